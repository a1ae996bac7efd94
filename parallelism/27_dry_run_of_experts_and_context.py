"""A dry run of experts and context: the same 1,024 ranks in two kinds of groups
=============================================================================

**Question.** Attention cuts long sequences along cp. Experts are dealt out along ep, over the same
1,024 ranks. Which shards does one rank hold, and how much does each axis carry per token?

**Predict**, and write it down before you run. The model is a layer of Qwen3-30B in bfloat16: 2,048
wide, and each token goes to 8 of 128 experts. On 1,024 ranks, cp 8 ranks share a sequence of 32,768
tokens, and ep 16 ranks share the experts. "kB per token" are the bytes of a collective's whole
array, divided by the number of the rank's own tokens.

1. Parameters are sharded as far as possible. Into how many shards are those of attention cut?
2. And the matrices of one expert?
3. Each of a rank's tokens is sent to its 8 experts, and comes back; so do the gradients. How many
   kB per token are these four all-to-alls together?
4. Along cp a rank gathers the keys and values of the sequence, and their gradients go back: 33 kB
   per token. cp becomes 16; sequence and ep stay. How many kB per token are there along cp now?
5. cp is 8 again, and ep becomes 32. How many kB per token are the four all-to-alls now?

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
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: B sequences of T tokens, t = T / cp of them on a rank; D width of the model, h heads of
# queries, g of keys, K features of a head; E experts, e = E / ep of them on a rank, k per token, R
# rows that a rank sends to an expert, n ranks along ep.

# %% [markdown]
# ## 1. The same ranks in two kinds of groups
#
# Eight ranks, cp 4, ep 2. Four neighbors share a sequence, A or B. Two neighbors share the four
# experts:
#
#     rank               0     1     2     3     4     5     6     7
#     its tokens         A 1/4 A 2/4 A 3/4 A 4/4 B 1/4 B 2/4 B 3/4 B 4/4
#     its experts        0 1   2 3   0 1   2 3   0 1   2 3   0 1   2 3
#
# Attention does not know of ep, and experts do not know of cp. Each of the two parts of a layer has
# a group in which ranks exchange activations:
#
#     cp       0123 4567            keys and values of one sequence
#     ep       01 23 45 67          tokens on their way to experts
#
# and a group in which ranks shard parameters. The rule for it is one sentence: **parameters are
# sharded over all ranks that use the same ones.** Every rank uses the same matrices of attention,
# along cp too. An expert is used by every ep-th rank:
#
#     fsdp     01234567             shards of attention and router
#     copies   0246 1357            shards of the same experts
#
# Megatron calls it parallel folding that experts have groups of their own, over the same ranks. In
# code there are four lists of groups:


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
# ## 2. The plan
#
# Now 1,024 ranks, cp 8 and ep 16. A rank has t = 4,096 tokens of one sequence. What it gathers or
# sends forward has a way back for the gradients, so each array counts twice. Tokens that went to
# experts come home as well, which makes four. A number has 2 bytes:
#
#     axis    ranks  the whole array                       numbers    times     MB   kB per token
#     fsdp    1,024  attention and router             19.1 million        2   76.5           18.7
#     copies     64  the rank's 8 experts             37.7 million        2  151.0           36.9
#     cp          8  keys and values: 2 T g K         33.6 million        2  134.2           32.8
#     ep         16  k copies of each token: t k D    67.1 million        4  536.9          131.1
#
# Divide the last two rows by t = T / cp. A token has 2 x cp x 2 g K numbers along cp, and 4 k D
# along ep. **For each token of its own a rank gathers the keys and values of cp tokens. To the
# experts it sends each copy once, wherever they lie.** So per token the traffic of cp grows with
# cp, and that of ep depends on neither axis.
#
# Parameters are gathered once per micro-batch, here of one sequence. With cp 16 a rank has half as
# many tokens of it, so fsdp and copies double per token as well. Two sequences would make up for
# that, and not for what cp carries.


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


def numbers_used(m: Model, ep: int) -> dict[str, int]:
    """Return how many parameters a rank uses of each kind, by the axis that shards them."""
    four_matrices = 2 * m.D * (m.heads + m.kv_heads) * m.K
    one_expert = 3 * m.D * m.expert_width
    return {"fsdp": four_matrices + m.D * m.experts, "copies": m.experts // ep * one_expert}


def planned(m: Model, cp: int, ep: int) -> dict[str, float]:
    """Return the kB per token of a rank's collectives along each axis, forward and backward."""
    t = m.T // cp
    numbers = {axis: 2 * used / t for axis, used in numbers_used(m, ep).items()}
    numbers["cp"] = 2 * (2 * m.T * m.kv_heads * m.K) / t
    numbers["ep"] = 4 * (m.top_k * m.D)
    return {axis: 2 * count / 1e3 for axis, count in numbers.items()}  # 2 bytes each


# %% [markdown]
# ## 3. How it is measured: one process plays rank 517
#
# Does a program send what the plan says? If no value decides what it calls, one process can be rank
# 517 without the other 1,023. PyTorch has a process group named "fake", which waits for nobody and
# moves nothing (lesson 26). Fake tensors have shapes and no bytes, so the layer has its real size.
# This is a whole dry run:
#
#     with pretended(517, 1024):
#         mesh = Mesh(lines_of(1024, cp=8, ep=16))
#         train_layer(m, shards, x_tD, mesh)
#
# Then `mesh.calls` lists each collective that rank 517 would join. Values are wrong. Groups, calls
# and shapes are right. (`Mesh` and `train_layer` are section 4.)


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
    tokens: int  # of this rank


def dry_run(m: Model, rank: int, world_size: int, cp: int, ep: int, dtype: torch.dtype) -> Found:
    """Play one rank, and count."""
    with pretended(rank, world_size):
        mesh = Mesh(lines_of(world_size, cp, ep))
        shards = {}
        for axis, shapes in shapes_of(m, ep).items():
            numbers = sum(math.prod(shape) for shape in shapes.values())
            length = -(-numbers // mesh.size(axis))  # rounded up: padding
            shards[axis] = torch.zeros(length, dtype=dtype, requires_grad=True)
        x_tD = torch.zeros(m.T // cp, m.D, dtype=dtype)
        train_layer(m, shards, x_tD, mesh)
    return Found(mesh.calls, {axis: len(shard) for axis, shard in shards.items()}, len(x_tD))


# %% [markdown]
# Three meshes are played, and a small one that our own ranks will fill in section 5. Each of our
# ranks plays another one of the 1,024; rank 0 plays 517. A process has one world at a time, so the
# dry runs come before our ranks meet.
#
# The bytes of all calls along an axis, per token, must be the plan's. The two rows of shards divide
# the numbers that a rank uses by those that it holds. Rows of the 1,024 ranks are marked simulated:
# the program is real, and its world is not.

# %%
PLAYED = (517 + RANK * 1024 // WORLD_SIZE) % 1024  # the rank that this rank plays
SMALL = Model(48, heads=4, kv_heads=2, K=12, experts=8, top_k=2, expert_width=16, T=32)
EP = 2 if WORLD_SIZE % 2 == 0 else 1  # in the mesh that our ranks fill
CP = 4 if WORLD_SIZE % 4 == 0 else EP
DRY = {"kind": "simulated"}


def dry_runs() -> dict[str, Found]:
    """Count three meshes of 1,024 ranks, and this rank's part of the one that our ranks fill."""
    return {
        "cp 8, ep 16": dry_run(Model(), PLAYED, 1024, 8, 16, torch.bfloat16),
        "cp 16, ep 16": dry_run(Model(), PLAYED, 1024, 16, 16, torch.bfloat16),
        "cp 8, ep 32": dry_run(Model(), PLAYED, 1024, 8, 32, torch.bfloat16),
        "rehearsal": dry_run(SMALL, RANK, WORLD_SIZE, CP, EP, torch.float64),
    }


def per_token(found: Found, axis: str) -> float:
    """Add up the calls along an axis: kB per token of the rank."""
    return sum(size for along, _, size in found.calls if along == axis) / found.tokens / 1e3


def check_axis(runs: dict, cp: int, ep: int, axis: str, question: int | None = None) -> None:
    name = f"cp {cp}, ep {ep}"
    due = planned(Model(), cp, ep)[axis]
    counted = per_token(runs[name], axis)
    claim(f"{name}; {axis}: kB per token", due, counted, question=question, **DRY)


def check_dry_runs(runs: dict[str, Found]) -> None:
    used = numbers_used(Model(), ep=16)
    held = runs["cp 8, ep 16"].held
    claim("attention: shards", 1024, used["fsdp"] / held["fsdp"], question=1, **DRY)
    claim("an expert: shards", 64, used["copies"] / held["copies"], question=2, **DRY)
    check_axis(runs, 8, 16, "fsdp")
    check_axis(runs, 8, 16, "copies")
    check_axis(runs, 8, 16, "cp")
    check_axis(runs, 8, 16, "ep", question=3)
    check_axis(runs, 16, 16, "cp", question=4)
    check_axis(runs, 16, 16, "ep")
    check_axis(runs, 8, 32, "copies")
    check_axis(runs, 8, 32, "ep", question=5)


# %% [markdown]
# ## 4. The program that is counted
#
# It knows nothing of dry runs. Every collective goes through `call`, which notes the axis, the
# operation, and the bytes of the larger one of input and output. That is the whole array, of which
# each of n ranks sends (n-1)/n. Backward, the gradient takes the way back: a reduce-scatter adds up
# the gradients of what an all-gather has handed out, and an all-to-all takes home those of what an
# all-to-all has sent.


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
        n = self.size(axis)
        if n == 1:
            return x
        run, length = {
            "all_gather": (dist.all_gather_into_tensor, len(x) * n),
            "reduce_scatter": (dist.reduce_scatter_tensor, len(x) // n),
            "all_to_all": (dist.all_to_all_single, len(x)),
        }[operation]
        y = x.new_empty(length, *x.shape[1:])
        run(y, x.contiguous(), group=self.groups[axis])
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
# **Attention, along cp.** A rank gathers the keys and values of all T tokens, and its t queries
# attend to those that come before them. (Rotation by position is left out.)


# %%
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
# **Experts, along ep.** A router chooses experts by values, and a dry run has none. So the copies
# of a rank's tokens are dealt out like cards: one to expert 0, one to expert 1, and so on, in
# rounds. Each expert gets R of them, and the router only weighs what comes back. With copies in
# order of experts, an all-to-all takes them there. Of two ranks, 2 stands for the R rows that rank
# 0 has for expert 2, and 2' for those of rank 1:
#
#                   rank 0           rank 1
#     copy_ERD      0  1  2  3       0' 1' 2' 3'       the first half is for rank 0
#     row_neRD      0  1  0' 1'      2  3  2' 3'       by sender, then by expert
#
# Each matrix of e experts multiplies the rows of all n senders, and the results go home.


# %%
def mixture(x_tD: torch.Tensor, w: dict, m: Model, mesh: Mesh) -> torch.Tensor:
    t = len(x_tD)
    n = mesh.size("ep")
    expert_tk = (torch.arange(t * m.top_k, device=x_tD.device) % m.experts).view(t, m.top_k)
    score_tk = (x_tD @ w["router"]).softmax(dim=1).gather(1, expert_tk)

    copy_ERD = x_tD.repeat_interleave(m.top_k, 0).unflatten(0, (-1, m.experts)).transpose(0, 1)
    row_neRD = Collective.apply(mesh, "all_to_all", copy_ERD, "ep").unflatten(0, (n, -1))
    y_neRD = (F.silu(row_neRD @ w["gate"]) * (row_neRD @ w["up"])) @ w["down"]
    home_ERD = Collective.apply(mesh, "all_to_all", y_neRD.flatten(0, 1), "ep")

    y_tkD = home_ERD.transpose(0, 1).reshape(t, m.top_k, -1)
    return (y_tkD * score_tk[:, :, None]).sum(dim=1)


# %% [markdown]
# **Parameters, along fsdp and copies.** They lie in one row of numbers per axis, of which a rank
# holds a shard. `whole` gathers the row and cuts matrices out of it. Its gradient comes back by a
# reduce-scatter, added up over all ranks that use these parameters.


# %%
def shapes_of(m: Model, ep: int) -> dict[str, dict[str, tuple]]:
    """Return the shapes of what one rank uses, by the axis along which it is sharded."""
    D = m.D
    queries = m.heads * m.K
    keys = m.kv_heads * m.K
    expert = (m.experts // ep, D, m.expert_width)
    return {
        "fsdp": {
            "q": (D, queries), "k": (D, keys), "v": (D, keys), "out": (queries, D),
            "router": (D, m.experts),
        },
        "copies": {"gate": expert, "up": expert, "down": (m.experts // ep, m.expert_width, D)},
    }  # fmt: skip


def whole(shard: torch.Tensor, shapes: dict[str, tuple], axis: str, mesh: Mesh) -> dict:
    """Gather the parameters of these shapes."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    row = Collective.apply(mesh, "all_gather", shard, axis)[: sum(sizes)]  # without padding
    pieces = zip(shapes.items(), row.split(sizes), strict=True)
    return {name: piece.view(shape) for (name, shape), piece in pieces}


def layer_loss(x_tD: torch.Tensor, w: dict, m: Model, mesh: Mesh) -> torch.Tensor:
    x_tD = x_tD + attention(F.rms_norm(x_tD, [m.D]), w, m, mesh)
    x_tD = x_tD + mixture(F.rms_norm(x_tD, [m.D]), w, m, mesh)
    return 0.5 * x_tD.square().sum()


def train_layer(m: Model, shards: dict[str, torch.Tensor], x_tD: torch.Tensor, mesh: Mesh) -> None:
    """One micro-batch, forward and backward: leave the gradients in the shards."""
    w = {}
    for axis, shapes in shapes_of(m, mesh.size("ep")).items():
        w |= whole(shards[axis], shapes, axis, mesh)
    layer_loss(x_tD, w, m, mesh).backward()


# %% [markdown]
# ## 5. The same on real ranks
#
# Can the count be believed, and is the program right at all? Four real ranks are the left half of
# section 1's picture: cp 0123, ep 01 23, copies 02 13. So a program that takes one of these three
# groups for another is found out. (fsdp is 0123, too; eight ranks tell it from cp.)
#
# Each rank does its part of the layer. Its gradients must be those of the same layer in one
# process: on a mesh without groups every collective returns what it is given. And its calls must be
# those of a dry run of this mesh, one by one.


# %%
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


def check_real_ranks(runs: dict[str, Found], device: torch.device) -> None:
    if WORLD_SIZE == 1:
        blocked("real ranks: calls unlike the dry run's", needs="2 ranks")
        return
    m = SMALL
    torch.manual_seed(0)  # on every rank: the same parameters, the same sequences
    w = {}
    for shapes in shapes_of(m, 1).values():
        for name, shape in shapes.items():
            drawn = torch.randn(shape, dtype=torch.float64) / m.D**0.5
            w[name] = drawn.to(device).requires_grad_()
    x_BTD = torch.randn(WORLD_SIZE // CP, m.T, m.D, dtype=torch.float64).to(device)
    for x_TD in x_BTD:  # in one process
        layer_loss(x_TD, w, m, Mesh({})).backward()

    mesh = Mesh(lines_of(WORLD_SIZE, CP, EP))
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
# 3. 131 kB: 4 x 8 copies x 2,048 numbers x 2 bytes. This is the most expensive axis, four times
#    cp's 33 kB. A 16th of it stays on the rank.
# 4. 66 kB, twice as many: the same keys and values, for half as many tokens. The all-to-alls have
#    131 kB as before.
# 5. 131 kB as before, of which a 32nd now stays on the rank. What is halved is the row of copies,
#    37 kB to 18, and the memory that the gathered experts take: 4 of them in place of 8.
#
# **Try.** Without cp in fsdp's group the gradients of the other parts of a sequence are missing. No
# error tells, and not one byte differs. Two rows fail: the shards of attention, and the error of
# its gradients. With experts sharded over all ranks, shards of different experts are mixed into one
# row. Again the bytes are right. Three rows fail: the shards of an expert, and both errors of
# gradients. So a dry run tells what is held and sent; only real ranks tell that it is right.
#
# **What is left out.** Nothing here is gathered twice. A program that frees keys and values, or
# parameters, after the forward pass has 3 in place of 2 in the table's column *times*. Real routing
# is not balanced: the rank with a popular expert gets more (20_expert_balance.py). A later part of
# a sequence attends to more; zig-zag order evens this out (lesson 10), and sends as much. Neither
# time nor the peak of memory is counted.
#
# **On GPUs.** In nodes of 8 the groups of cp 8 stay inside a node. Those of ep 16 lie on two, and
# half of 537 MB leaves the node: 5 ms per layer over a card of 50 GB/s. The layer's own work is
# 4.7 TFLOP per rank on average, some 12 ms at 400 TFLOP/s. An expert cannot begin before its tokens
# are there, so the all-to-alls hide only behind other work: a second micro-batch, or an expert that
# all tokens share. Or ep stays inside the NVLink domain. The dry runs stay on the CPU; the real
# ranks use NCCL.
#
# **Which cp and ep?** The smallest that fit: cp until the activations of a sequence do, ep until
# the gathered experts do. A larger cp gathers the same keys and values for fewer tokens. A larger
# ep saves memory, and traffic along copies; it saves none along ep. Either one gets slower once it
# leaves the NVLink domain.
#
# **When.** Before a job with several axes is queued, and on each change of its mesh. The tests of
# this lesson do the same for 31 meshes on five axes, with pipeline and tensor parallelism.


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
