"""A dry run of experts and context: the same 1,024 ranks in two kinds of groups
=============================================================================

**Question.** Attention cuts long sequences along cp. Experts are dealt out along ep, over the same
1,024 ranks. Which shards does one rank hold, and how many MB does it hand over along each axis?

**Predict**, and write it down before you run. The model is a layer of Qwen3-30B in bfloat16: 2,048
wide, each token goes to 8 of 128 experts. On 1,024 ranks, cp 8 ranks share a sequence of 32,768
tokens, and ep 16 ranks share the experts. The MB of a collective are those of its whole array, of
which each of n ranks sends (n-1)/n.

1. Parameters are sharded as far as possible. Into how many shards are those of attention cut?
2. And the matrices of one expert?
3. Each of a rank's tokens is sent to its 8 experts, and comes back; so do the gradients. How many
   MB does rank 517 hand to these four all-to-alls together?
4. cp becomes 16; sequence and ep stay. How many MB does it hand to the all-to-alls now?
5. cp is 8 again, and ep becomes 32. How many MB now?

**Run.**

    torchrun --standalone --nproc-per-node=4 27_dry_run_of_experts_and_context.py  # NCCL, or gloo
    python 27_dry_run_of_experts_and_context.py                                    # started for you

Not run on several GPUs. The dry runs need none: they are on the CPU everywhere.

**Try.** In `lines_of` shard attention over the ranks of the same place in a sequence only, `"fsdp":
[ranks[i::cp] for i in range(cp)]`: which rows fail? Then shard experts as all else is, `"copies":
[ranks]`: which rows fail now?

**Before.** parallelism/26_dry_run_of_1024_ranks.py: what a dry run is.
parallelism/10_context_parallelism.py and parallelism/11_expert_parallelism.py: the two axes.

**Next.** fsdp/02_deepspeed_config.py: the same choices in a file of settings.
"""

import argparse
import contextlib
import ctypes
import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: T tokens of a sequence, t = T / cp of them on a rank; D width of the model, h heads of
# queries, g of keys, K features of a head; E experts, e = E / ep of them on a rank, k per token, R
# tokens that a rank sends to an expert.

# %% [markdown]
# ## 1. The same ranks in two kinds of groups
#
# Eight ranks, cp 2, ep 4. Two neighbors share a sequence; four neighbors share the experts:
#
#     rank               0     1     2     3     4     5     6     7
#     its tokens         A 1/2 A 2/2 B 1/2 B 2/2 C 1/2 C 2/2 D 1/2 D 2/2
#     its experts        0 1   2 3   4 5   6 7   0 1   2 3   4 5   6 7
#
# Attention does not know of ep, and experts do not know of cp. Each of the two parts of a layer has
# a group in which ranks exchange activations:
#
#     cp       01 23 45 67          keys and values of one sequence
#     ep       0123 4567            tokens on their way to experts
#
# and a group in which ranks shard parameters. The rule for it is one sentence: **parameters are
# sharded over all ranks that use the same ones.** Every rank uses the same matrices of attention,
# along cp too. An expert is used by every ep-th rank:
#
#     fsdp     01234567             shards of attention and router
#     copies   04 15 26 37          shards of the same experts
#
# Megatron calls it parallel folding that experts may have groups of their own, over the same ranks.
# In code there are four lists of groups. (Sections 2 and 3 are a program that uses them. How many
# MB it sends is section 4, which you may read first.)


# %%
def lines_of(world_size: int, cp: int, ep: int) -> dict[str, list[list[int]]]:
    """Return all groups along each axis."""
    ranks = list(range(world_size))
    return {
        "cp": [ranks[i : i + cp] for i in range(0, world_size, cp)],
        "ep": [ranks[i : i + ep] for i in range(0, world_size, ep)],
        "fsdp": [ranks],
        "copies": [ranks[i::ep] for i in range(ep)],
    }


# %% [markdown]
# ## 2. Every collective goes through one function
#
# `call` runs a collective along an axis and notes it: the axis, the operation, and the bytes of the
# larger one of input and output. That is the whole array. Of it each of n ranks sends (n-1)/n: an
# all-gather or a reduce-scatter around a ring, an all-to-all straight to the others.
#
# Backward, the gradient takes the way back: a reduce-scatter answers an all-gather, and an
# all-to-all answers an all-to-all.


# %%
class Mesh:
    """This rank's group along each axis, and the collectives that it has joined."""

    def __init__(self, lines: dict[str, list[list[int]]]) -> None:
        self.groups = {}
        self.calls: list[tuple[str, str, int]] = []  # axis, operation, bytes
        for axis, groups in lines.items():
            if len(groups[0]) > 1:
                self.groups[axis], _ = dist.new_subgroups_by_enumeration(groups)

    def size(self, axis: str) -> int:
        return self.groups[axis].size() if axis in self.groups else 1

    def place(self, axis: str) -> int:
        return self.groups[axis].rank() if axis in self.groups else 0

    def call(self, operation: str, x: torch.Tensor, axis: str) -> torch.Tensor:
        """Run a collective along an axis, and note it; a rank that is alone there returns x."""
        if axis not in self.groups:
            return x
        group = self.groups[axis]
        x = x.contiguous()
        if operation == "all_gather":
            y = x.new_empty(group.size() * len(x), *x.shape[1:])
            dist.all_gather_into_tensor(y, x, group=group)
        elif operation == "reduce_scatter":
            y = x.new_empty(len(x) // group.size(), *x.shape[1:])
            dist.reduce_scatter_tensor(y, x, group=group)
        else:
            y = torch.empty_like(x)
            dist.all_to_all_single(y, x, group=group)
        self.calls.append((axis, operation, max(x.nbytes, y.nbytes)))
        return y


WAY_BACK = {"all_gather": "reduce_scatter", "all_to_all": "all_to_all"}
WAY_BACK["reduce_scatter"] = "all_gather"


class Collective(torch.autograd.Function):
    """A collective along an axis; its gradient takes the way back."""

    @staticmethod
    def forward(ctx, mesh: Mesh, operation: str, x: torch.Tensor, axis: str) -> torch.Tensor:
        ctx.back = (mesh, WAY_BACK[operation], axis)
        return mesh.call(operation, x, axis)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple:
        mesh, operation, axis = ctx.back
        return None, None, mesh.call(operation, grad, axis), None


# %% [markdown]
# ## 3. One layer on these groups
#
# **Attention, along cp.** A rank has t tokens of a sequence. It gathers the keys and values of all
# T tokens, and its queries attend to those that come before them. The sequence is cut in order, so
# a later rank has more before it; zig-zag order evens this out (lesson 10), and sends as much.
# (Rotation by position is left out.)


# %%
class Model(NamedTuple):
    """The shape of a layer; this one is of Qwen3-30B."""

    D: int = 2048  # width
    heads: int = 32  # h, of queries
    kv_heads: int = 4  # g
    K: int = 128  # features of a head
    experts: int = 128  # E
    top_k: int = 8  # k
    expert_width: int = 768
    T: int = 32768  # tokens of a sequence


def attention(x_tD: torch.Tensor, w: dict, m: Model, mesh: Mesh) -> torch.Tensor:
    q_thK, k_tgK, v_tgK = [(x_tD @ w[name]).unflatten(1, (-1, m.K)) for name in "qkv"]
    y_thK = attend(q_thK, torch.stack([k_tgK, v_tgK], dim=1), mesh)
    return y_thK.flatten(1) @ w["out"]


def attend(q_thK: torch.Tensor, kv_t2gK: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Causal attention of this rank's tokens to the whole sequence."""
    k_TgK, v_TgK = Collective.apply(mesh, "all_gather", kv_t2gK, "cp").unbind(dim=1)
    q_htK, k_gTK, v_gTK = [x.transpose(0, 1) for x in (q_thK, k_TgK, v_TgK)]
    before = mesh.place("cp") * len(q_thK)  # tokens that come before this rank's
    seen_tT = q_thK.new_ones(len(q_thK), len(k_TgK)).tril(before).bool()
    how = {"attn_mask": seen_tT, "enable_gqa": True}
    return F.scaled_dot_product_attention(q_htK, k_gTK, v_gTK, **how).transpose(0, 1)


# %% [markdown]
# **Experts, along ep.** A router chooses experts by values, and a dry run has none. So the routing
# is given: copy c of a rank's tokens goes to expert c mod E, and each expert gets equally many. The
# router only weighs what comes back. To dispatch is then to transpose: expert first, token second.
# With two ranks and four experts, where 2 stands for the rows of rank 0 that expert 2 is to get,
# and 2' for those of rank 1:
#
#                             rank 0           rank 1
#     copy_ERD, by expert     0  1  2  3       0' 1' 2' 3'
#     arrived                 0  1  0' 1'      2  3  2' 3'
#     x_eRD, by expert        0 0'  1 1'       2 2'  3 3'
#
# The way home is the same, from the last line to the first.


# %%
def mixture(x_tD: torch.Tensor, w: dict, m: Model, mesh: Mesh) -> torch.Tensor:
    t = len(x_tD)
    ep = mesh.size("ep")
    expert_tk = (torch.arange(t * m.top_k, device=x_tD.device) % m.experts).view(t, m.top_k)
    score_tk = (x_tD @ w["router"]).softmax(dim=1).gather(1, expert_tk)

    copy_ERD = x_tD.repeat_interleave(m.top_k, 0).unflatten(0, (-1, m.experts)).transpose(0, 1)
    arrived = Collective.apply(mesh, "all_to_all", copy_ERD, "ep")
    # It lies by sender, then by expert. An expert takes the rows of all senders.
    x_eRD = arrived.unflatten(0, (ep, -1)).transpose(0, 1).flatten(1, 2)
    y_eRD = (F.silu(x_eRD @ w["gate"]) * (x_eRD @ w["up"])) @ w["down"]
    leaving = y_eRD.unflatten(1, (ep, -1)).transpose(0, 1).flatten(0, 1)
    home_ERD = Collective.apply(mesh, "all_to_all", leaving, "ep")

    y_tkD = home_ERD.transpose(0, 1).reshape(t, m.top_k, -1)
    return (y_tkD * score_tk[:, :, None]).sum(dim=1)


# %% [markdown]
# **Parameters, along fsdp and copies.** They lie in one row of numbers per group, of which a rank
# holds a shard. `whole` gathers the row. Because the shard is the parameter, its gradient comes
# back by a reduce-scatter, added up over all ranks of the group.


# %%
def shapes_of(m: Model, ep: int) -> dict[str, dict[str, tuple]]:
    """Return the shapes of what one rank uses, by the axis along which it is sharded."""
    D = m.D
    e = m.experts // ep
    queries = m.heads * m.K
    keys = m.kv_heads * m.K
    expert = (e, D, m.expert_width)
    return {
        "fsdp": {
            "q": (D, queries), "k": (D, keys), "v": (D, keys), "out": (queries, D),
            "router": (D, m.experts),
        },
        "copies": {"gate": expert, "up": expert, "down": (e, m.expert_width, D)},
    }  # fmt: skip


def whole(shard: torch.Tensor, shapes: dict[str, tuple], axis: str, mesh: Mesh) -> dict:
    """Gather the parameters of these shapes."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    row = Collective.apply(mesh, "all_gather", shard, axis)[: sum(sizes)]  # without padding
    pieces = zip(shapes.items(), row.split(sizes), strict=True)
    return {name: piece.view(shape) for (name, shape), piece in pieces}


def train_layer(m: Model, shards: dict[str, torch.Tensor], x_tD: torch.Tensor, mesh: Mesh) -> None:
    """One micro-batch, forward and backward: leave the gradients in the shards."""
    w = {}
    for axis, shapes in shapes_of(m, mesh.size("ep")).items():
        w |= whole(shards[axis], shapes, axis, mesh)
    x_tD = x_tD + attention(F.rms_norm(x_tD, [m.D]), w, m, mesh)
    x_tD = x_tD + mixture(F.rms_norm(x_tD, [m.D]), w, m, mesh)
    (0.5 * x_tD.square().sum()).backward()


# %% [markdown]
# ## 4. The plan
#
# Each collective has its way back, so it counts twice; the two all-to-alls of the experts count
# four times. On 1,024 ranks, with cp 8 and ep 16, and 2 bytes per number:
#
#     axis    ranks  the whole array                           numbers          times     MB
#     fsdp    1,024  attention and router                      19.1 million       2       76.5
#     copies     64  the rank's 8 experts                      37.7 million       2      151.0
#     cp          8  keys and values of a sequence: 2 T g K    33.6 million       2      134.2
#     ep         16  a row of D per copy of a token: t k D     67.1 million       4      536.9
#
# Here the two axes meet. The row of ep has t = T / cp in it: **the traffic of ep shrinks as cp
# grows, and not as ep grows.** Wherever the experts lie, a rank sends each copy once. And the row
# of cp has the whole T: a larger cp does not make it smaller.


# %%
def planned(m: Model, cp: int, ep: int) -> dict[str, float]:
    """Return the MB of a rank's collectives along each axis, forward and backward."""
    t = m.T // cp
    numbers = {
        "fsdp": 2 * (2 * m.D * (m.heads + m.kv_heads) * m.K + m.D * m.experts),
        "copies": 2 * (m.experts // ep * 3 * m.D * m.expert_width),
        "cp": 2 * (2 * m.T * m.kv_heads * m.K),
        "ep": 4 * (t * m.top_k * m.D),
    }
    return {axis: 2 * count / 1e6 for axis, count in numbers.items()}  # 2 bytes each


# %% [markdown]
# ## 5. The dry run: how it is measured
#
# `pretended` makes this process one rank of a world that does not exist (lesson 26): groups, calls
# and shapes are right, and no byte is moved. Tensors are fake, too, so the layer has its real size.
# Each of our ranks plays another one of the 1,024; rank 0 plays 517. A process has one world at a
# time, so the dry runs come before the ranks meet.


# %%
@contextlib.contextmanager
def pretended(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a world that does not exist. All that is private to torch stands here."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    with FakeTensorMode():
        yield
    dist.destroy_process_group()


class Found(NamedTuple):
    calls: list[tuple[str, str, int]]
    held: dict[str, int]  # numbers in this rank's shards, by axis


def dry_run(m: Model, rank: int, world_size: int, cp: int, ep: int, dtype: torch.dtype) -> Found:
    """Play one rank, and count."""
    with pretended(rank, world_size):
        mesh = Mesh(lines_of(world_size, cp, ep))
        shards = {}
        for axis, shapes in shapes_of(m, ep).items():
            numbers = sum(math.prod(shape) for shape in shapes.values())
            length = -(-numbers // mesh.size(axis))  # rounded up: padding
            shards[axis] = torch.zeros(length, dtype=dtype, requires_grad=True)
        train_layer(m, shards, torch.zeros(m.T // cp, m.D, dtype=dtype), mesh)
    return Found(mesh.calls, {axis: len(shard) for axis, shard in shards.items()})


PLAYED = (517 + RANK * 1024 // WORLD_SIZE) % 1024  # the rank that this rank plays
SMALL = Model(48, heads=4, kv_heads=2, K=12, experts=8, top_k=2, expert_width=16, T=32)
CP = EP = 2 if WORLD_SIZE % 2 == 0 else 1  # in the mesh that our ranks fill


def dry_runs() -> dict[str, Found]:
    """Count three meshes of 1,024 ranks, and this rank's part of the one that our ranks fill."""
    return {
        "cp 8, ep 16": dry_run(Model(), PLAYED, 1024, 8, 16, torch.bfloat16),
        "cp 16, ep 16": dry_run(Model(), PLAYED, 1024, 16, 16, torch.bfloat16),
        "cp 8, ep 32": dry_run(Model(), PLAYED, 1024, 8, 32, torch.bfloat16),
        "rehearsal": dry_run(SMALL, RANK, WORLD_SIZE, CP, EP, torch.float64),
    }


# %% [markdown]
# Plan and count are compared axis by axis. The two rows of shards divide the numbers of all ranks
# by those of this rank, so they tell how many ranks `lines_of` has put in its group. These rows are
# marked simulated: the program is real, and its world is not.


# %%
DRY = {"kind": "simulated"}


def megabytes(found: Found) -> Counter:
    """Add up the MB of all calls along each axis."""
    nbytes = Counter()
    for axis, _, size in found.calls:
        nbytes[axis] += size
    return Counter({axis: total / 1e6 for axis, total in nbytes.items()})


def check_dry_runs(runs: dict[str, Found]) -> None:
    m = Model()
    held = runs["cp 8, ep 16"].held
    attention_numbers = 2 * m.D * (m.heads + m.kv_heads) * m.K + m.D * m.experts
    experts_numbers = m.experts // 16 * 3 * m.D * m.expert_width
    claim("attention: shards", 1024, attention_numbers / held["fsdp"], question=1, **DRY)
    claim("an expert: shards", 64, experts_numbers / held["copies"], question=2, **DRY)

    plan = planned(m, cp=8, ep=16)
    counted = megabytes(runs["cp 8, ep 16"])
    for axis in ("fsdp", "copies", "cp"):
        claim(f"cp 8, ep 16; {axis}: MB", plan[axis], counted[axis], **DRY)
    claim("cp 8, ep 16; ep: MB", plan["ep"], counted["ep"], question=3, **DRY)

    plan = planned(m, cp=16, ep=16)
    counted = megabytes(runs["cp 16, ep 16"])
    claim("cp 16, ep 16; cp: MB", plan["cp"], counted["cp"], **DRY)
    claim("cp 16, ep 16; ep: MB", plan["ep"], counted["ep"], question=4, **DRY)

    plan = planned(m, cp=8, ep=32)
    counted = megabytes(runs["cp 8, ep 32"])
    claim("cp 8, ep 32; copies: MB", plan["copies"], counted["copies"], **DRY)
    claim("cp 8, ep 32; ep: MB", plan["ep"], counted["ep"], question=5, **DRY)


# %% [markdown]
# ## 6. The same on real ranks
#
# Can the count be believed, and is the program right at all? Our ranks fill a small mesh. Four
# ranks have cp 2 and ep 2; attention is sharded over all four, and experts over two. Each rank does
# the layer for real. Its gradients must be those of a reference: the same layer in one process,
# written without groups, one expert after the other.
#
# On this mesh the groups of cp and those of ep are the same pairs. So these rows would not notice
# if the two were exchanged. The tests of this lesson do the same with cp 2 and ep 4, and with cp 4
# and ep 2.


# %%
def reference_loss(w: dict, x_BTD: torch.Tensor, m: Model) -> torch.Tensor:
    """The loss of all sequences, in one process."""
    normed_BTD = F.rms_norm(x_BTD, [m.D])
    q, k, v = [(normed_BTD @ w[name]).unflatten(2, (-1, m.K)).transpose(1, 2) for name in "qkv"]
    y_BhTK = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x_BTD = x_BTD + y_BhTK.transpose(1, 2).flatten(2) @ w["out"]

    normed_BTD = F.rms_norm(x_BTD, [m.D])
    score_BTE = (normed_BTD @ w["router"]).softmax(dim=2)
    y_BTD = torch.zeros_like(x_BTD)
    for expert in range(m.experts):
        gate, up, down = [w[name][expert] for name in ("gate", "up", "down")]
        for copy in range(m.top_k):  # copy c of token i goes to expert (i k + c) mod E
            chosen_T = (torch.arange(m.T, device=x_BTD.device) * m.top_k + copy) % m.experts
            mine_T1 = (chosen_T == expert)[:, None]
            out_BTD = (F.silu(normed_BTD @ gate) * (normed_BTD @ up)) @ down
            y_BTD = y_BTD + mine_T1 * score_BTE[:, :, expert, None] * out_BTD
    return 0.5 * (x_BTD + y_BTD).square().sum()


def own_shards(w: dict, m: Model, mesh: Mesh) -> dict[str, torch.Tensor]:
    """Cut this rank's shards out of all parameters, or out of all gradients."""
    shards = {}
    for axis, shapes in shapes_of(m, 1).items():
        pieces = [w[name] for name in shapes]
        if axis == "copies":  # of the experts that lie here
            pieces = [piece.chunk(mesh.size("ep"))[mesh.place("ep")] for piece in pieces]
        row = torch.cat([piece.detach().flatten() for piece in pieces])
        n = mesh.size(axis)
        shards[axis] = F.pad(row, (0, -len(row) % n)).chunk(n)[mesh.place(axis)].clone()
    return shards


# %% [markdown]
# And its calls must be those that it rehearsed in a dry run of this mesh, one by one.


# %%
def check_real_ranks(runs: dict[str, Found], device: torch.device) -> None:
    if WORLD_SIZE == 1:
        blocked("real ranks: calls unlike the dry run's", needs="2 ranks")
        return
    m = SMALL
    mesh = Mesh(lines_of(WORLD_SIZE, CP, EP))
    torch.manual_seed(0)  # on every rank: the same parameters, the same sequences
    w = {}
    for shapes in shapes_of(m, 1).values():
        for name, shape in shapes.items():
            drawn = torch.randn(shape, dtype=torch.float64) / m.D**0.5
            w[name] = drawn.to(device).requires_grad_()
    x_BTD = torch.randn(WORLD_SIZE // CP, m.T, m.D, dtype=torch.float64).to(device)
    reference_loss(w, x_BTD, m).backward()
    due = own_shards({name: parameter.grad for name, parameter in w.items()}, m, mesh)

    shards = {axis: x.requires_grad_() for axis, x in own_shards(w, m, mesh).items()}
    x_tD = x_BTD[RANK // CP].chunk(CP)[RANK % CP]
    train_layer(m, shards, x_tD, mesh)
    error = relative_error(shards["fsdp"].grad, due["fsdp"])
    claim("real ranks: error of attention's gradients", 0, error, atol=1e-12)
    error = relative_error(shards["copies"].grad, due["copies"])
    claim("real ranks: error of experts' gradients", 0, error, atol=1e-12)
    if runs:
        pairs = zip_longest(runs["rehearsal"].calls, mesh.calls)  # in order, and as many
        unlike = sum(rehearsed != real for rehearsed, real in pairs)
        claim("real ranks: calls unlike the dry run's", 0, unlike)


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element; inf if one is no number."""
    error = (ours - expected).abs().max() / expected.abs().max()
    return error.nan_to_num(nan=torch.inf).item()


# %% [markdown]
# ## What you should have seen
#
# 1. 1,024. All ranks use the same matrices of attention, those along cp too.
# 2. 64: rank 517 has the same 8 experts as every 16th rank, and 1,024 / 16 = 64.
# 3. 537 MB: 4 x 4,096 tokens x 8 copies x 2,048 numbers x 2 bytes. This is the most expensive axis,
#    four times cp's 134 MB. A 16th of it stays on the rank.
# 4. 268 MB, half: a rank has half as many tokens. Along cp there are 134 MB as before, now for half
#    the work. The shards stay the same, since the ranks do.
# 5. 537 MB as before: as many tokens, as many copies. What is halved is the row of copies, for 4
#    experts in place of 8, and the memory that gathered experts take.
#
# **Try.** Without cp in fsdp's group the gradients of the other parts of a sequence are missing. No
# error tells, and not one byte differs. Two rows fail: the shards of attention, and the error of
# its gradients. With experts sharded over all ranks, shards of different experts are mixed into one
# row. Again the bytes are right. Three rows fail: the shards of an expert, and both errors of
# gradients. So a dry run tells what is held and sent; only real ranks tell that it is right.
#
# **What is left out.** Nothing here is gathered twice. A program that frees keys and values, or
# parameters, after the forward pass has 3 in place of 2 in the table's column *times*. Real routing
# is not balanced: the rank with a popular expert gets more (20_expert_balance.py). Neither time nor
# the peak of memory is counted.
#
# **On GPUs.** In nodes of 8 the groups of cp 8 stay inside a node. Those of ep 16 lie on two, and
# half of 537 MB leaves the node: 5 ms per layer over a card of 50 GB/s. The layer's own work is
# 4.7 TFLOP per rank on average, some 12 ms at 400 TFLOP/s. An expert cannot begin before its tokens
# are there, so the all-to-alls hide only behind other work: a second micro-batch, or an expert that
# all tokens share. Or ep stays inside the NVLink domain. The dry runs stay on the CPU; the real
# ranks use NCCL.
#
# All ranks have that average only in zig-zag order. In the order of this lesson, and with a kernel
# that skips what the mask hides, the first rank of cp would have 1.8 TFLOP and the last one 7.6,
# and all would wait for the last. (Our dense mask skips nothing.)
#
# **Which cp and ep?** The smallest that fit: cp until the activations of a sequence do, ep until
# the gathered experts do. A larger cp has the same keys and values gathered for less work. A larger
# ep saves memory and no traffic. Either one gets slower once it leaves the NVLink domain.
#
# **When.** Before a job with several axes is queued, and on each change of its mesh. The tests of
# this lesson do the same on five axes, with pipeline and tensor parallelism.


# %%
def main() -> None:
    command_line()
    launch()
    runs = {}
    with contextlib.suppress(ImportError):  # what is private to torch may move
        runs = dry_runs()
    device = setup()
    if runs:
        check_dry_runs(runs)
    else:
        blocked("what one rank of 1,024 holds and sends", needs="torch 2.11 to 2.15")
    check_real_ranks(runs, device)
    finish()


# %% [markdown]
# ## Plumbing, the same in every lesson: join the group, print, check a claim, leave

# %%
ledger: list[dict] = []  # one row per claim, the same on every rank


def command_line(flags: dict[str, dict] | None = None) -> argparse.Namespace:
    """Read the flags, given as {name: arguments of add_argument}; --help and mistakes end here."""
    as_it_is = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_it_is)
    for name, arguments in (flags or {}).items():
        parser.add_argument(name, **arguments)
    parser.error = refuse
    return parser.parse_args()


def launch(world_sizes: range | list[int] = range(1, 1025)) -> None:
    """Plain `python lesson.py`: be torchrun, one rank per GPU if there are several, else 4.

    `world_sizes` are the numbers of ranks that the lesson takes: it gets the largest that fits.
    """
    if "RANK" in os.environ:
        return  # torchrun has started this rank
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    gpus = torch.cuda.device_count()
    ranks = max(size for size in world_sizes if size <= gpus) if gpus > 1 else 4
    os.environ |= {"LAUNCHER": str(os.getpid()), "OMP_NUM_THREADS": "1"}  # ranks share the cores
    logging.disable()  # the rank that fails says why
    here = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]
    try:
        with tempfile.TemporaryDirectory() as logs:  # the one that torchrun makes would stay
            torchrun([*here, f"--log-dir={logs}", *sys.argv])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        sys.exit(f"rank {rank} was ended by {failure.signal_name()}" if failure.exitcode < 0 else 1)
    except SignalException as error:
        sys.exit(128 + error.sigval)
    sys.exit()


def setup() -> torch.device:
    """Join the process group: NCCL if every rank has a GPU of its own, gloo if none has."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the launcher
    if os.environ.pop("LAUNCHER", str(os.getppid())) != str(os.getppid()):
        sys.exit(1)  # it was killed before that line
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank that waits inside C++ too
    torch.set_float32_matmul_precision("highest")  # some images make TF32 the default
    gpus = torch.cuda.device_count()
    local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cpu")
    some = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    how = f"gloo ({local_ranks} ranks and {some} here)"
    if gpus >= local_ranks:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        version = ".".join(map(str, torch.cuda.nccl.version()))
        how = f"NCCL {version} on {torch.cuda.get_device_name()}"
    patience = timedelta(minutes=2)
    store, _, _ = next(dist.rendezvous("env://", timeout=patience))
    store.set(f"device of {RANK}", device.type)
    devices = store.multi_get([f"device of {rank}" for rank in range(WORLD_SIZE)])
    if len(set(devices)) > 1:
        counted = f"GPUs for {devices.count(b'cuda')} of {WORLD_SIZE} ranks"
        refuse(f"needs a GPU per rank, or none, got {counted}; hide all by CUDA_VISIBLE_DEVICES=")
    group = {"rank": RANK, "world_size": WORLD_SIZE, "store": store, "timeout": patience}
    own_gpu = device if device.type == "cuda" else None
    dist.init_process_group("nccl" if own_gpu else "gloo", device_id=own_gpu, **group)
    sys.excepthook = crash  # only now: init_process_group sets one of its own
    print0(f"{WORLD_SIZE} ranks, {how}, torch {torch.__version__}\n")
    print0(f"{'':13}{'claim':50} {'predicted':22} {'measured':>11}")
    return device


def print0(*words: object) -> None:
    """Print on rank 0 only."""
    if RANK == 0:
        print(*words, flush=True)


def refuse(rule: str) -> None:
    """End before the first collective with one message, from rank 0: rule, value, remedy."""
    if RANK != 0:
        time.sleep(30)  # the launcher ends us meanwhile
    sys.exit(f"{sys.argv[0]}: {rule}")


def crash(*error: object) -> None:
    """Leave without ceremony, since peers may be stuck. The first rank that fails says why."""
    first = dist.distributed_c10d._get_default_store().add("crashes", 1) == 1
    time.sleep(1 if first else 30)  # the launcher ends us meanwhile, if a peer's death is the cause
    print(f"rank {RANK}:", file=sys.stderr)
    sys.__excepthook__(*error)
    os._exit(1)


def claim(
    text: str,
    predicted: float,
    measured: float,
    sign: str = "=",
    atol: float = 0.0,
    question: int | None = None,
    kind: str = "measured",
    timed: bool = False,
    varies: bool = False,
    rank: int | None = None,
) -> None:
    """Check `measured sign predicted` (=, <=, >=), give or take `atol`, on all ranks; all call.

    The worst rank is shown, or `rank`. `question` is the number in *Predict* that this answers.
    `kind` says what was measured: the real thing, or what is "simulated", or "theory". `timed` says
    that a clock decides; `varies`, that the kernel's own traffic does, or how well a model learns.
    """
    p = float(predicted)
    m = float(measured)
    error = {"=": abs(m - p), "<=": m - p, ">=": p - m}[sign] - atol
    found = [(math.inf if math.isnan(error) else error, RANK, p, m, float(atol))]
    if dist.is_initialized():
        found *= WORLD_SIZE
        dist.all_gather_object(found, found[0])
    worst = max(found, key=lambda one: one[0]) if rank is None else found[rank]
    error, rank, p, m, slack = worst
    verdict = "PASS" if error <= 0 else "FAIL"
    mark = {"measured": " ", "simulated": "s", "theory": "t"}[kind]
    answers = f"{question}." if question else ""
    between = f"{sign:>2} {readable(p)}" + (f" ±{slack:.2g}" if slack else "")
    print0(f"  {verdict} {mark}  {answers:2} {text:50} {between:22} {readable(m):>11}")
    if verdict == "FAIL":
        print0(f"{'':13}off by {m - p:.3g} on rank {rank}")
    row = {"claim": text, "verdict": verdict, "sign": sign, "rank": rank, "slack": slack}
    row |= {"predicted": p, "measured": m if math.isfinite(m) else str(m)}  # JSON knows no NaN
    row |= {"question": question, "kind": kind, "timed": timed, "varies": varies}
    ledger.append(row | {"line": sys._getframe(1).f_lineno})


def readable(x: float) -> str:
    """Whole numbers in full, others to six digits."""
    return f"{x:,.0f}" if x.is_integer() and abs(x) < 1e12 else f"{x:,.6g}"


def blocked(text: str, needs: str) -> None:
    """Record what this machine cannot answer, and what would."""
    print0(f"  BLOCKED    {text:50} needs {needs}")
    row = {"claim": text, "verdict": "BLOCKED", "needs": needs}
    ledger.append(row | {"line": sys._getframe(1).f_lineno})


def finish() -> None:
    """Write the ledger where LESSON_JSON says; exit 1 if a claim failed or none was made."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    counts = Counter((row.get("kind"), row["verdict"]) for row in ledger)
    said = f"{counts['measured', 'PASS']} PASS, {counts['measured', 'FAIL']} FAIL"
    said += f", {counts[None, 'BLOCKED']} BLOCKED"
    for kind in ("simulated", "theory"):  # apart from what was measured
        passed = counts[kind, "PASS"]
        failed = counts[kind, "FAIL"]
        said += f"; {kind} ({kind[0]}): {passed} PASS, {failed} FAIL" if passed + failed else ""
    print0(f"\n  {said}")
    verdicts = {row["verdict"] for row in ledger}
    if verdicts == {"BLOCKED"}:
        print0("  Nothing could be checked: BLOCKED rows say what they need.")
    if RANK == 0 and "LESSON_JSON" in os.environ:
        with open(os.environ["LESSON_JSON"], "w") as file:
            json.dump({"ranks": WORLD_SIZE, "ledger": ledger}, file, indent=1)
    code = int("FAIL" in verdicts or "PASS" not in verdicts)
    if __name__ == "__main__":
        os._exit(code)  # threads of a group that something still holds can abort a plain exit
    sys.exit(code)


if __name__ == "__main__":
    main()
