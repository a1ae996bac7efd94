"""A dry run of experts and long contexts: five axes, one rank of 1,024
====================================================================

**Question.** A mixture of experts trains on 1,024 ranks, along the axes of pipeline, data, context,
tensor and expert parallelism at once. What does one rank hold, and what does it hand over along
each axis?

**Predict**, and write it down before you run.

1. A dense layer is split over 8 ranks by tensor and sequence parallelism. In this program the
   gathered input is kept for the backward pass. How many all-gathers and reduce-scatters of
   activations does the layer cost a rank per micro-batch, forward and backward?
2. Context parallelism gathers the keys and values of a sequence, and drops them after the forward
   pass. How many collectives along cp does a layer cost a rank per micro-batch?
3. Each token visits 2 of 16 experts, which lie on 16 ranks. A is what a rank's tokens are together,
   one row each. How many A does the rank hand to all-to-alls per layer, forward and backward?
4. The 48 layers of Qwen3-30B lie on pp 4 x dp_replicate 2 x dp_shard 16 x cp 2 x tp 4 ranks in
   bfloat16, their experts dealt out over 32. A layer has 604 million parameters in experts, and
   19.1 million besides. How many MB of them does rank 517 hold?

**Run.**

    torchrun --standalone --nproc-per-node=4 27_dry_run_of_experts_and_context.py  # NCCL, or gloo
    python 27_dry_run_of_experts_and_context.py                                    # started for you

Not run on several GPUs. The dry runs need none: they are on the CPU everywhere.

**Try.** In `Unit.reduce` leave out the two lines of `self.copied`, so that norms keep gradients of
a rank's own tokens: which rows fail? In `lines_of` shard along dp_shard alone, `"fsdp":
ranks.transpose(0, 1, 3, 4, 2).reshape(-1, shards)`: which rows fail now?

**Before.** parallelism/26_dry_run_of_1024_ranks.py: what a dry run is. Then the axes:
parallelism/12_gpt_on_a_mesh.py, 10_context_parallelism.py, 11_expert_parallelism.py. This lesson is
optional: no other one builds on it.

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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: T tokens of a sequence, t = T / cp of them in a tensor-parallel group, n = t / tp on a
# rank between two layers; D width of the model, h and g a rank's heads of queries and of keys, K
# features per head; E experts, e of them on a rank, k per token, R rows of tokens per expert.

# %% [markdown]
# ## 1. Every collective goes through one function
#
# A dry run plays one rank of a large world with torch's fake process group (lesson 26): calls,
# groups and shapes are right, and values mean nothing. Here the program is written by hand, so all
# its collectives go through `call`, which notes them by axis. It does not know whether the group is
# fake or real. It notes the bytes of the larger one of input and output: of an all-gather, the
# whole.
#
# With `weightless` the tensors are **fake**, too: they have shape and dtype and no bytes, so a
# model may have its real size. Both are private to PyTorch, and stand behind one function.

# %%
groups: dict[str, dist.ProcessGroup] = {}  # of this rank, by axis; only where it is not alone
Calls = dict[tuple[str, str], list[int]]  # the bytes of each call, by axis and operation
log: Calls = defaultdict(list)


@contextlib.contextmanager
def pretended(rank: int, world_size: int, weightless: bool = False) -> Iterator[None]:
    """Be one rank of a world that does not exist. All that is private to torch stands here."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    with FakeTensorMode() if weightless else contextlib.nullcontext():
        yield
    dist.destroy_process_group()


def call(operation: str, x: torch.Tensor, axis: str) -> torch.Tensor:
    """Run a collective along an axis, and note it; a rank that is alone there returns x."""
    if axis not in groups:
        return x
    group = groups[axis]
    x = x.contiguous()
    y = x.clone()
    if operation == "all_gather":
        y = x.new_empty(group.size() * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(y, x, group=group)
    elif operation == "reduce_scatter":
        y = x.new_empty(len(x) // group.size(), *x.shape[1:])
        dist.reduce_scatter_tensor(y, x, group=group)
    elif operation == "all_to_all":
        dist.all_to_all_single(y, x, group=group)
    else:
        dist.all_reduce(y, group=group)
    log[axis, operation].append(max(x.nbytes, y.nbytes))
    return y


# %% [markdown]
# ## 2. The mesh is an array of rank numbers
#
# The program is a GPT of today on all axes at once. Its **mesh** is an array of the ranks' numbers,
# of shape (pp, dp_replicate, dp_shard, cp, tp), and a group along an axis is a line of this array.
# Two kinds of groups cut across: parameters are sharded over dp_shard *and* cp (**fsdp**), since
# ranks along cp have the same ones; and experts are dealt out over `ep` ranks in a row, whatever
# their axes. Rank 517 of pp 4 x dp_replicate 2 x dp_shard 8 x cp 2 x tp 8, with ep 16, is in
#
#     pp             5 261 517 773                     other layers
#     dp_replicate   517 645                           copies of the same shards
#     fsdp           517 525 533 541 ... 637           16 shards of the same parameters
#     cp             517 525                           parts of the same sequences
#     tp             512 513 514 515 516 517 518 519   parts of the same layers
#     ep             512 513 514 ... 527               other experts
#     copies         517 533 549 ... 629               8 shards of the same experts


# %%
class Mesh(NamedTuple):
    """How many ranks there are along each axis, outermost first."""

    pp: int = 1  # stages
    dp_replicate: int = 1  # other sequences, the same shards
    dp_shard: int = 1  # other sequences, other shards
    cp: int = 1  # other parts of a sequence
    tp: int = 1  # other parts of each layer
    ep: int = 1  # other experts: neighbors in dp_shard x cp x tp


def lines_of(mesh: Mesh) -> dict[str, np.ndarray]:
    """Return all groups along each axis, one per row: its axis is moved to the end."""
    pp, replicas, shards, cp, tp, ep = mesh
    ranks = np.arange(math.prod(mesh[:5])).reshape(mesh[:5])  # axes 0 to 4 are pp to tp
    in_rows = ranks.reshape(pp * replicas, -1, ep)
    return {
        "pp": ranks.transpose(1, 2, 3, 4, 0).reshape(-1, pp),
        "dp_replicate": ranks.transpose(0, 2, 3, 4, 1).reshape(-1, replicas),
        "fsdp": ranks.transpose(0, 1, 4, 2, 3).reshape(-1, shards * cp),
        "cp": ranks.transpose(0, 1, 2, 4, 3).reshape(-1, cp),
        "tp": ranks.reshape(-1, tp),
        "ep": ranks.reshape(-1, ep),
        "copies": in_rows.transpose(0, 2, 1).reshape(-1, in_rows.shape[1]),
    }


def join(mesh: Mesh) -> None:
    """Make the groups and begin a new log; all ranks that exist call it."""
    groups.clear()
    log.clear()
    for axis, lines in lines_of(mesh).items():
        if lines.shape[1] > 1:
            groups[axis], _ = dist.new_subgroups_by_enumeration(lines.tolist())


def size(axis: str) -> int:
    return groups[axis].size() if axis in groups else 1


def place(axis: str) -> int:
    return groups[axis].rank() if axis in groups else 0


# %% [markdown]
# ## 3. The program: one step of one rank
#
# Gradients go back through the **transpose** of a collective: a reduce-scatter answers an
# all-gather, and an all-to-all answers another. Between two layers a rank has n tokens. Attention
# and MLP gather the t tokens of the tensor-parallel group, and scatter their sums again (**sequence
# parallelism**). What they gathered is kept for the backward pass. Megatron keeps the n tokens
# instead, and gathers the t tokens again: two all-gathers more per layer. Keys and values of the
# whole sequence are gathered along cp; `checkpoint` drops them, so they are gathered anew for the
# backward pass. (Rotation by position is left out.)

# %%
TRANSPOSE = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
TRANSPOSE["all_to_all"] = "all_to_all"


class Collective(torch.autograd.Function):
    """A collective whose gradient goes through the transpose."""

    @staticmethod
    def forward(ctx: object, operation: str, x: torch.Tensor, axis: str) -> torch.Tensor:
        ctx.back = (TRANSPOSE[operation], axis)
        return call(operation, x, axis)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple:
        operation, axis = ctx.back
        return None, call(operation, grad, axis), None


class Model(NamedTuple):
    """The layers of a Llama; if there are experts, every MLP is a mixture of them."""

    layers: int
    width: int  # D
    heads: int
    kv_heads: int
    head_width: int  # K
    mlp_width: int  # of a dense MLP, or of an expert
    tokens: int  # T
    experts: int = 0
    top_k: int = 0  # k


def attention(x_nD: torch.Tensor, w: dict, m: Model) -> torch.Tensor:
    x_tD = Collective.apply("all_gather", x_nD, "tp")
    q_thK, k_tgK, v_tgK = [(x_tD @ w[name].T).unflatten(1, (-1, m.head_width)) for name in "qkv"]
    how = {"use_reentrant": False, "preserve_rng_state": False}
    y_thK = checkpoint(attend, q_thK, torch.stack([k_tgK, v_tgK], dim=1), **how)
    return Collective.apply("reduce_scatter", y_thK.flatten(1) @ w["out"].T, "tp")


def attend(q_thK: torch.Tensor, kv_t2gK: torch.Tensor) -> torch.Tensor:
    """Causal attention of this rank's tokens to the whole sequence."""
    k_TgK, v_TgK = Collective.apply("all_gather", kv_t2gK, "cp").unbind(dim=1)
    q_htK, k_gTK, v_gTK = [x.transpose(0, 1) for x in (q_thK, k_TgK, v_TgK)]
    before = place("cp") * len(q_thK)  # tokens that come before this rank's
    seen_tT = q_thK.new_ones(len(q_thK), len(k_TgK)).tril(before).bool()
    how = {"attn_mask": seen_tT, "enable_gqa": True}
    return F.scaled_dot_product_attention(q_htK, k_gTK, v_gTK, **how).transpose(0, 1)


def dense_mlp(x_nD: torch.Tensor, w: dict, m: Model) -> torch.Tensor:
    x_tD = Collective.apply("all_gather", x_nD, "tp")
    y_tD = (F.silu(x_tD @ w["gate"].T) * (x_tD @ w["up"].T)) @ w["down"].T
    return Collective.apply("reduce_scatter", y_tD, "tp")


# %% [markdown]
# A router must not look at values, for here there are none. So the routing is given: copy c of the
# rank's tokens goes to expert c mod E, and each expert gets equally many. Dispatching is a
# transposition then; the router only weighs the copies.


# %%
def mixture(x_nD: torch.Tensor, w: dict, m: Model) -> torch.Tensor:
    n = len(x_nD)
    ranks = size("ep")
    expert_nk = (torch.arange(n * m.top_k, device=x_nD.device) % m.experts).view(n, m.top_k)
    score_nk = (x_nD @ w["router"].T).softmax(dim=1).gather(1, expert_nk)
    copy_ERD = x_nD.repeat_interleave(m.top_k, 0).unflatten(0, (-1, m.experts)).transpose(0, 1)
    arrived = Collective.apply("all_to_all", copy_ERD, "ep")
    # What has arrived lies by sender, then by expert. An expert takes the rows of all senders.
    x_eRD = arrived.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1, 2)
    y_eRD = (F.silu(x_eRD @ w["gate"]) * (x_eRD @ w["up"])) @ w["down"]
    leaving = y_eRD.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1)
    home_ERD = Collective.apply("all_to_all", leaving, "ep")
    y_nkD = home_ERD.transpose(0, 1).reshape(n, m.top_k, -1)
    return (y_nkD * score_nk[:, :, None]).sum(dim=1)


def layer(x_nD: torch.Tensor, w: dict, m: Model) -> torch.Tensor:
    x_nD = x_nD + attention(F.rms_norm(x_nD, [m.width], w["norm1"]), w, m)
    mlp = mixture if m.experts else dense_mlp
    return x_nD + mlp(F.rms_norm(x_nD, [m.width], w["norm2"]), w, m)


# %% [markdown]
# Parameters are sharded in **units**, as in FSDP: what a rank of tp has of a layer is one, its
# experts are another. A unit is one row of numbers, padded to equal shards. In front stand norms
# and router, which are copied along tp: a rank has their gradients of its own n tokens, so these
# are added up first.


# %%
class Unit:
    """Parameters that are gathered and reduced as one, along `axis`."""

    def __init__(self, axis: str, shapes: dict[str, tuple], copied: int, zeros: Callable) -> None:
        self.axis = axis
        self.shapes = shapes
        self.copied = copied  # so many numbers in front are the same along tp
        self.sizes = [math.prod(shape) for shape in shapes.values()]
        self.shard = zeros(-(-sum(self.sizes) // size(axis)))
        self.grad = torch.zeros_like(self.shard)

    def gather(self, w: dict) -> torch.Tensor:
        """Put the parameters into `w`; return them as one row, whose gradient will be theirs."""
        row = call("all_gather", self.shard, self.axis)[: sum(self.sizes)].detach().requires_grad_()
        pieces = zip(self.shapes.items(), row.split(self.sizes), strict=True)
        w |= {name: piece.view(shape) for (name, shape), piece in pieces}
        return row

    def reduce(self, grad: torch.Tensor) -> None:
        if self.copied:
            grad[: self.copied] = call("all_reduce", grad[: self.copied], "tp")
        padding = len(self.shard) * size(self.axis) - len(grad)
        mine = call("reduce_scatter", F.pad(grad, (0, padding)), self.axis)
        self.grad += call("all_reduce", mine, "dp_replicate")


def units_of_a_layer(m: Model, zeros: Callable) -> list[Unit]:
    """Return units of the shapes that tp and ep leave to this rank."""
    D = m.width
    wide = m.mlp_width if m.experts else m.mlp_width // size("tp")
    queries = m.heads // size("tp") * m.head_width
    keys = m.kv_heads // size("tp") * m.head_width
    shapes = {"norm1": (D,), "norm2": (D,), "router": (m.experts, D)}
    shapes |= {"q": (queries, D), "k": (keys, D), "v": (keys, D), "out": (D, queries)}
    copied = (2 + m.experts) * D
    if m.experts:
        e = m.experts // size("ep")
        experts = {"gate": (e, D, wide), "up": (e, D, wide), "down": (e, wide, D)}
        return [Unit("fsdp", shapes, copied, zeros), Unit("copies", experts, 0, zeros)]
    shapes |= {"gate": (wide, D), "up": (wide, D), "down": (D, wide)}
    return [Unit("fsdp", shapes, copied, zeros)]


# %% [markdown]
# A stage has its share of the layers. All micro-batches go forward, then all go backward. Units are
# gathered for the forward pass, freed, and gathered again for the backward pass. (Here they are not
# freed.) Embedding, head and loss, at the pipeline's two ends, are left out: the first stage is
# given its inputs, and the last one the gradient of its outputs.


# %%
def step(m: Model, layers: list[list[Unit]], inputs: list, grads: list) -> None:
    """Add up gradients in the units; neighbors overwrite `inputs` and `grads`, (n, D) each."""
    s = place("pp")
    traces = []
    for x_nD in inputs:
        meet(dist.irecv, x_nD, s - 1)
        traces.append(forward(m, layers, x_nD))
        meet(dist.isend, traces[-1][-1][2].detach(), s + 1)
    for trace, grad_nD in zip(traces, grads, strict=True):
        meet(dist.irecv, grad_nD, s + 1)
        meet(dist.isend, backward(layers, trace, grad_nD), s - 1)


def forward(m: Model, layers: list[list[Unit]], x_nD: torch.Tensor) -> list[tuple]:
    """Return input, gathered rows and output of each layer."""
    trace = []
    for units in layers:
        x_nD = x_nD.detach().requires_grad_()
        w = {}
        rows = [unit.gather(w) for unit in units]
        y_nD = layer(x_nD, w, m)
        trace.append((x_nD, rows, y_nD))
        x_nD = y_nD
    return trace


def backward(layers: list[list[Unit]], trace: list[tuple], grad_nD: torch.Tensor) -> torch.Tensor:
    """Take the gradient of the last output; return that of the first input."""
    for units, (x_nD, rows, y_nD) in zip(layers[::-1], trace[::-1], strict=True):
        for unit in units:
            unit.gather({})
        y_nD.backward(grad_nD)
        for unit, row in zip(units, rows, strict=True):
            unit.reduce(row.grad)
        grad_nD = x_nD.grad
    return grad_nD


def meet(operation: Callable, x: torch.Tensor, stage: int) -> None:
    """Send x to another stage, or receive it from there, if there is such a stage."""
    if stage in range(size("pp")):
        message = dist.P2POp(operation, x, group=groups["pp"], group_peer=stage)
        for work in dist.batch_isend_irecv([message]):
            work.wait()
        log["pp", operation.__name__].append(x.nbytes)


# %% [markdown]
# ## 4. The plan: the same in closed form
#
# For each axis and operation, a list of how many numbers each call is about. `course plan` adds up
# the same (16_planning_memory.py and 17_planning_time.py).

# %%
MICRO_BATCHES = 2  # of one sequence each, per step


def planned(m: Model, mesh: Mesh, rank: int) -> tuple[Calls, int]:
    """Return how many numbers each call of a step is about, and how many parameters are held."""
    pp, replicas, shards, cp, tp, ep = mesh
    ways = {"pp": pp, "dp_replicate": replicas, "fsdp": shards * cp, "cp": cp, "tp": tp, "ep": ep}
    ways["copies"] = shards * cp * tp // ep
    stage = rank * pp // math.prod(mesh[:5])
    neighbors = 2 - int(stage == 0) - int(stage == pp - 1)
    layers = m.layers // pp
    D = m.width
    tD = m.tokens // cp * D
    keys_values = 2 * m.tokens * m.kv_heads // tp * m.head_width
    mlp = 3 * D * m.mlp_width
    copied = (2 + m.experts) * D  # two norms, and a row of the router per expert
    dense = copied + 2 * D * (m.heads + m.kv_heads) * m.head_width // tp
    dense += 0 if m.experts else mlp // tp
    split = 1 if m.experts else 2  # attention, and a dense MLP
    calls = {
        ("tp", "all_gather"): 2 * split * layers * [tD],  # forward, and backward
        ("tp", "reduce_scatter"): 2 * split * layers * [tD],
        ("tp", "all_reduce"): layers * [copied],
        ("cp", "all_gather"): 2 * layers * [keys_values],  # forward, and again backward
        ("cp", "reduce_scatter"): layers * [keys_values],
        ("ep", "all_to_all"): 4 * layers * [tD // tp * m.top_k],  # there and back, both ways
        ("pp", "isend"): neighbors * [tD // tp],
        ("pp", "irecv"): neighbors * [tD // tp],
    }
    units = {"fsdp": dense}
    if m.experts:
        units["copies"] = m.experts * mlp // ep
    held = []
    for axis, numbers in units.items():
        shard = -(-numbers // ways[axis])  # with padding
        calls[axis, "all_gather"] = 2 * layers * [shard * ways[axis]]
        calls[axis, "reduce_scatter"] = layers * [shard * ways[axis]]
        held += layers * [shard]
    calls["dp_replicate", "all_reduce"] = held
    calls = {key: MICRO_BATCHES * sizes for key, sizes in calls.items() if ways[key[0]] > 1}
    return calls, sum(held)


# %% [markdown]
# ## 5. How it is measured
#
# Each of our ranks plays another rank of the 1,024; rank 0 plays 517. A process has one world at a
# time, so the dry runs come before the ranks meet. Two small models have real tensors. Qwen3-30B
# has fake ones of its real size; its embedding, its head and the norms of queries and keys are left
# out. To see whether a dry run can be believed, each rank also rehearses its own part in a mesh
# that our ranks fill. Then they do that step for real.

# %%
SMALL = Model(8, 64, heads=16, kv_heads=8, head_width=4, mlp_width=128, tokens=256)
EXPERTS = SMALL._replace(experts=16, top_k=2)
QWEN3_30B = Model(48, 2048, 32, 4, head_width=128, mlp_width=768, tokens=8192, experts=128, top_k=8)
MESHES = {
    "PP 4, FSDP 16, CP 2, TP 8": (SMALL, Mesh(pp=4, dp_shard=16, cp=2, tp=8)),
    "FSDP 1024, EP 16": (EXPERTS, Mesh(dp_shard=1024, ep=16)),
    "Qwen3-30B": (QWEN3_30B, Mesh(pp=4, dp_replicate=2, dp_shard=16, cp=2, tp=4, ep=32)),
}
AXES = ("pp", "dp_replicate", "fsdp", "copies", "cp", "tp", "ep")
PLAYED = (517 + RANK * 1024 // WORLD_SIZE) % 1024  # the rank that this rank plays
REAL = {2: Mesh(pp=2), 4: Mesh(pp=2, tp=2), 8: Mesh(dp_shard=2, cp=2, tp=2, ep=4)}
OURS = REAL.get(WORLD_SIZE, Mesh(dp_shard=WORLD_SIZE))  # the mesh that our ranks fill


def counted(m: Model, mesh: Mesh, device: str | torch.device = "cpu") -> tuple[Calls, int]:
    """Do a step in whatever world this is; return its calls, and the bytes of parameters held."""
    dtype = torch.bfloat16 if m == QWEN3_30B else torch.float32
    zeros = partial(torch.zeros, dtype=dtype, device=device)
    join(mesh)
    layers = [units_of_a_layer(m, zeros) for _ in range(m.layers // mesh.pp)]
    n = m.tokens // mesh.cp // mesh.tp
    inputs = [zeros(n, m.width) for _ in range(MICRO_BATCHES)]
    step(m, layers, inputs, [torch.zeros_like(x_nD) for x_nD in inputs])
    held = sum(unit.shard.nbytes for unit in chain(*layers))
    return dict(log), held


def dry_runs() -> dict[str, tuple[Calls, int]]:
    """Return what each mesh takes, and what this rank's own part takes."""
    runs = {}
    for name, (m, mesh) in MESHES.items():
        with pretended(PLAYED, 1024, weightless=m == QWEN3_30B):
            runs[name] = counted(m, mesh)
    with pretended(RANK, WORLD_SIZE):
        runs["rehearsal"] = counted(EXPERTS, OURS)
    return runs


# %% [markdown]
# Plan and count are compared axis by axis. Questions 1 to 3 are about one layer and micro-batch.


# %%
def total(calls: Calls, axis: str = "", what: Callable = sum) -> int:
    """Return the bytes of all calls along an axis, or along all; or how many these are (len)."""
    return sum(what(sizes) for (along, _), sizes in calls.items() if axis in ("", along))


def check_mesh(name: str, calls: Calls) -> None:
    """Claim the MB that are handed over along each axis of a mesh."""
    m, mesh = MESHES[name]
    plan, _ = planned(m, mesh, PLAYED)
    itemsize = 2 if m == QWEN3_30B else 4
    for axis in AXES:
        due = itemsize * total(plan, axis)
        found = total(calls, axis)
        if due or found:
            claim(f"{name}; {axis}: MB", due / 1e6, found / 1e6)


def check_dry_runs(runs: dict[str, tuple[Calls, int]]) -> None:
    for name, (m, mesh) in MESHES.items():
        calls, held = runs[name]
        check_mesh(name, calls)
        if m != QWEN3_30B:
            claim(f"{name}: kB of parameters", 4 * planned(m, mesh, PLAYED)[1] / 1e3, held / 1e3)
    claim("Qwen3-30B: MB of parameters", 117, runs["Qwen3-30B"][1] / 1e6, atol=0.5, question=4)

    calls, _ = runs["PP 4, FSDP 16, CP 2, TP 8"]
    layers = 2 * MICRO_BATCHES
    found = len(calls["tp", "all_gather"] + calls["tp", "reduce_scatter"])
    claim("TP: gathers and scatters per dense layer", 8, found / layers, question=1)
    claim("CP: collectives per layer", 3, total(calls, "cp", len) / layers, question=2)
    calls, _ = runs["FSDP 1024, EP 16"]
    A = EXPERTS.tokens * EXPERTS.width * 4
    found = total(calls, "ep") / (EXPERTS.layers * MICRO_BATCHES)
    claim("EP: bytes in all-to-alls per layer / A", 8, found / A, question=3)


def check_real_ranks(runs: dict[str, tuple[Calls, int]], device: torch.device) -> None:
    """Claim that a step which is done takes what was planned, and what was counted dry."""
    if WORLD_SIZE == 1:
        blocked("real ranks: what a dry run has counted", needs="2 ranks")
        return
    calls, _ = counted(EXPERTS, OURS, device)
    plan, _ = planned(EXPERTS, OURS, RANK)
    claim("real ranks: calls", total(plan, what=len), total(calls, what=len))
    claim("real ranks: bytes handed over", 4 * total(plan), total(calls))
    if runs:
        rehearsed, _ = runs["rehearsal"]
        unlike = sum(calls.get(key) != sizes for key, sizes in rehearsed.items())
        claim("real ranks: kinds of calls unlike the dry run's", 0, unlike)


# %% [markdown]
# ## What you should have seen
#
# 1. Eight: attention and MLP have a gather before and a scatter behind, and backward the transpose
#    of both. Megatron regathers the input in backward: ten there. A collective that is easily
#    forgotten comes on top, the all-reduce of the norms' gradients.
# 2. Three: a gather forward, the same one again backward, a reduce-scatter of the gradients.
# 3. Eight: 2 A there and 2 A back, and as much backward. A sixteenth of it stays on the rank.
# 4. 117 MB. Experts are divided by pp and by the 128 ranks of a stage and replica: 12 x 604 / 128 =
#    56.6 million. The rest is divided by tp, but for norms and router, and by the 32 ranks of
#    dp_shard x cp: 1.9 million. Each takes 2 bytes. None of them was ever in this machine.
#
# **Try.** Without the two lines norms drift apart along tp, and no error tells. On four ranks four
# rows fail: the bytes along tp of both meshes that have it, and calls and bytes of the real ranks.
# With shards along dp_shard alone nothing adds up gradients along cp. Three rows fail: the
# parameters of both meshes with cp (question 4 is one of them), and the bytes along dp_replicate of
# Qwen3-30B, whose replicas add up larger shards. A gathered unit has the same bytes either way.
#
# **On GPUs** the dry runs stay on the CPU, and the real ranks use NCCL.
#
# **When.** Before a job with several axes is queued. Play at least one rank of each stage, since
# stages differ. A router chooses experts by values, which a dry run has not, so count a balanced
# routing and add what imbalance costs (20_expert_balance.py).


# %%
def main() -> None:
    command_line()
    launch()
    try:
        runs = dry_runs()
    except ImportError:  # what is private to torch may move
        runs = {}
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
