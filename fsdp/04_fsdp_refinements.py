"""FSDP2 refined: prefetch, dtypes, accumulation, meta device, resharding, hybrid sharding
=======================================================================================

**Question.** Beyond the choice of units, FSDP2 has half a dozen settings. Which of them change how
much is communicated, which change only when or among whom, and do the gradients stay those of one
process?

**Predict**, and write it down before you run. The model is the GPT of fsdp/01_fsdp_basics.py with
P parameters in 4 blocks, a unit per block and one for the rest (the root); there are 4 ranks.

1. When block 0 begins its forward pass, how many blocks have been asked for: as a rule, and with
   one block of explicit prefetch?
2. With `param_dtype=bfloat16` and `reduce_dtype=float32`: in how many bytes is an element gathered,
   in how many is a gradient reduced, and in how many does the optimizer hold a weight?
3. Three micro-batches, gradients synchronized once: how many all-gathers and reduce-scatters?
4. A model is built on the meta device. Every rank then draws the shards of a weight under the same
   seed. How many of the 4 shards are rank 0's, on CPUs and on GPUs? And how many elements of a
   non-persistent buffer does a state dict fill?
5. After forward, blocks are sharded again over 2 of the 4 ranks. Among how many ranks does backward
   gather, and what share of the blocks does a rank hold meanwhile?
6. Two groups of two ranks shard inside and replicate across. What share of P does a rank hand to
   the collective that crosses between the groups?

**Run.**

    torchrun --standalone --nproc-per-node=4 04_fsdp_refinements.py   # NCCL on 4 GPUs, else gloo
    python 04_fsdp_refinements.py                                     # the same, started for you

Not run on several GPUs.

**Try.** Remove the line with `set_requires_gradient_sync`: the gradients stay right, so what fails?
In `check_drawing` write `manual_seed(RANK)`: what fails on CPUs, and why is that no failure at all?

**Before.** fsdp/01_fsdp_basics.py: units, all-gathers, reduce-scatters.

**Next.** exercises/09_hybrid_sharding; then fsdp/05_fsdp_transformer.py: a whole training run.
"""

import argparse
import ctypes
import gc
import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: B sequences, T tokens in each, D model width, V different tokens, L blocks, H heads of K
# features. P is the number of parameters, n the number of ranks, U the number of blocks.

# %% [markdown]
# ## 1. Prefetching: the next gather is asked for before the present block computes
#
# A gather hides behind compute only if it is under way *before* its result is needed. In backward
# FSDP2 takes care of that: it asks for the next unit before the present one computes. In forward
# the CPU usually runs ahead of the GPU: while block 0 computes, the CPU has long asked for block 1.
# Where the CPU is the slow one, `set_modules_to_forward_prefetch` moves the gather ahead of the
# *launch* of the block before. This is the order in which the CPU hands work to the GPU:
#
#     as a rule       gather root  gather 0             compute 0  gather 1  compute 1  gather 2 ...
#     with prefetch   gather root  gather 0  gather 1   compute 0  gather 2  compute 1  gather 3 ...
#
#     backward        gather 3  gather 2  compute 3  reduce-scatter 3  gather 1  compute 2 ...
#
# There is one case in which even a fast CPU does not help. With `CUDA_DEVICE_MAX_CONNECTIONS=1`,
# which tensor parallelism asks for on Hopper and older GPUs, kernels start in the order in which
# they were launched, and a gather that was launched after a block's compute waits behind it
# (communication/06_overlap.py). Then only an explicit prefetch overlaps.


# %%
def shard_blocks(model: "GPT", mesh: DeviceMesh, **options: object) -> "GPT":
    """Make each block a unit, then everything that is left."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def prefetch_forward(model: "GPT") -> None:
    """Let each block ask for the following one before it computes."""
    for i in range(len(model.blocks) - 1):
        model.blocks[i].set_modules_to_forward_prefetch([model.blocks[i + 1]])


def check_prefetch(mesh: DeviceMesh, prefetch: bool) -> None:
    name = "with prefetch" if prefetch else "as a rule"
    model = shard_blocks(new_gpt(mesh), mesh)
    if prefetch:
        prefetch_forward(model)
    asked_for = []  # all-gathers so far, each time a block begins to compute
    with CountedCommunication() as counted:

        def note(*_: object) -> None:
            asked_for.append(len(counted.calls("all_gather")))

        for block in model.blocks:
            block.register_forward_pre_hook(note)
        loss = mean_loss(model, random_bytes(mesh, RANK))
        forward = len(counted.log)
        loss.backward()
    claim(f"{name}: gradients, error", 0, error_against_one_process(model, mesh), atol=1e-14)
    if WORLD_SIZE == 1:
        blocked(f"{name}: blocks asked for, and when", needs="2 ranks")
        return
    blocks = asked_for[0] - 1  # all but the root
    claim(f"{name}: blocks asked for as block 0 starts", 1 + prefetch, blocks, question=1)
    backward = [call.operation for call in counted.log[forward:]]
    first = backward.index("reduce_scatter")
    claim(f"{name}: gathers before the first gradient", 2, first)


# %% [markdown]
# ## 2. Mixed precision: three dtypes for one weight
#
# `MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)` leaves the sharded weight, its
# gradient and Adam's moments in float32; these are the **master weights** that the optimizer
# updates. Only what is gathered is bfloat16, and it exists only while it is whole:
#
#     at rest          float32 shard     4 bytes, 1/n of them on each rank
#     gathered         bfloat16          2 bytes, a unit or two at a time
#     activations      bfloat16
#     reduce-scatter   float32           4 bytes: n ranks add up n small numbers without losing them
#
# DDP with masters holds both copies whole on every rank; that is why mixed precision costs FSDP
# less. `reduce_dtype=bfloat16` would halve the third line's traffic, at the price of a rounding to
# 8 bits of every partial sum.


# %%
def check_dtypes(mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard_blocks(new_gpt(mesh, torch.float32), mesh, mp_policy=policy)
    activation_bytes = []

    def note(module: nn.Module, inputs: tuple) -> None:
        activation_bytes.append(inputs[0].itemsize)

    model.head.register_forward_pre_hook(note)
    with CountedCommunication() as counted:
        mean_loss(model, random_bytes(mesh, RANK)).backward()

    sizes = {p.to_local().itemsize for p in model.parameters()}
    claim("bytes of a weight that the optimizer updates", 4, min(sizes), question=2)
    claim("bytes of an activation", 2, activation_bytes[0])
    error = relative_gradients_error(model, mesh)
    claim("bfloat16: gradients, relative error, at most", 0.1, error, "<=")
    if WORLD_SIZE == 1:
        blocked("bytes of an element gathered and reduced", needs="2 ranks")
        return
    gathers = counted.calls("all_gather")
    scatters = counted.calls("reduce_scatter")
    claim("bytes of an element gathered", 2, bytes_per_element(gathers), question=2)
    claim("bytes of an element reduced", 4, bytes_per_element(scatters), question=2)


def bytes_per_element(calls: list["Call"]) -> float:
    return sum(call.nbytes for call in calls) / sum(call.elements for call in calls)


# %% [markdown]
# ## 3. Accumulating and clipping gradients
#
# `set_requires_gradient_sync(False)` omits a micro-batch's reduce-scatters. The price is memory:
# whole, unreduced gradients stay on every rank, 4P bytes in float32. The parameters are still
# gathered for every micro-batch.
#
# Clipping needs the norm of the *whole* gradient. `clip_grad_norm_` computes it from the shards of
# all ranks and returns a DTensor, of which `.full_tensor()` makes a plain tensor. The norm of one
# rank's own shards is something else: clipping by it would scale each rank by another factor.


# %%
def check_accumulation(mesh: DeviceMesh, micro_batches: int = 3) -> None:
    whole = new_gpt(mesh)
    model = shard_blocks(new_gpt(mesh), mesh)
    batches = [random_bytes(mesh, rank, 2 * micro_batches) for rank in range(WORLD_SIZE)]
    mean_loss(whole, torch.cat(batches)).backward()
    with CountedCommunication() as counted:
        for i, x_BT in enumerate(batches[RANK].chunk(micro_batches)):
            last = i == micro_batches - 1
            model.set_requires_gradient_sync(last)
            (mean_loss(model, x_BT) / micro_batches).backward()

    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    claim("norm before clipping / one process's", 1, norm / expected, atol=1e-12)
    claim("clipped gradients, error", 0, gradients_error(model, whole), atol=1e-14)
    if WORLD_SIZE == 1:
        blocked(f"{micro_batches} micro-batches: collectives", needs="2 ranks")
        return
    U = len(model.blocks)
    gathers = len(counted.calls("all_gather"))
    scatters = len(counted.calls("reduce_scatter"))
    name = f"{micro_batches} micro-batches"
    claim(f"{name}: all-gathers", micro_batches * (2 * U + 1), gathers, question=3)
    claim(f"{name}: reduce-scatters", U + 1, scatters, question=3)


# %% [markdown]
# ## 4. The meta device: a model that no rank could build
#
# A model too large for one rank cannot be built first and sharded afterwards. On the **meta
# device** tensors have shapes and dtypes, but no memory:
#
#     with torch.device("meta"): GPT()     shapes only
#     fully_shard(...)                     shapes of the shards
#     to_empty(device=...)                 memory for the shards, with garbage in it
#     ?                                    something must fill them
#
# On a mesh of GPUs the model's own initializers may do it, under one seed on all ranks: DTensor
# gives each shard its own part of the generator's sequence. On a mesh of CPUs it does not. There
# every rank draws the same elements, so the "whole" weight is one shard n times over, with nothing
# but a warning.


# %%
def check_drawing(mesh: DeviceMesh) -> None:
    with torch.device("meta"):
        model = shard_blocks(GPT().double(), mesh)
    model.to_empty(device=mesh.device_type)

    torch.manual_seed(0)
    weight = model.blocks[0].up.weight
    with warnings.catch_warnings(action="ignore"):  # torch warns of just this, on CPUs
        nn.init.normal_(weight)
    shards = weight.full_tensor().chunk(WORLD_SIZE)
    alike = [shard.equal(shards[0][: len(shard)]) for shard in shards]  # the last may be shorter
    if WORLD_SIZE == 1:
        blocked("one seed on all ranks: shards like rank 0's", needs="2 ranks")
        return
    expected = WORLD_SIZE if mesh.device_type == "cpu" else 1  # itself
    claim("one seed on all ranks: shards like rank 0's", expected, sum(alike), question=4)


# %% [markdown]
# A full state dict, read by rank 0 into the host's memory and sent out piece by piece, gives the
# same weights on every mesh; so does a sharded checkpoint. But neither fills everything. `to_empty`
# leaves garbage in **buffers**, too, and a buffer that was registered with `persistent=False`, such
# as a table of rotary positions, is in no state dict: compute it again after `to_empty`.


# %%
def with_angles(model: "GPT") -> "GPT":
    """Give the model a table as of rotary positions, which its state dict leaves out."""
    model.register_buffer("angles", torch.arange(64.0), persistent=False)
    return model


def check_meta_device(mesh: DeviceMesh) -> None:
    with torch.device("meta"):
        model = shard_blocks(with_angles(GPT().double()), mesh)
    model.to_empty(device=mesh.device_type)
    model.angles.fill_(math.nan)  # garbage that can be told from values

    state = {}
    if RANK == 0:
        torch.manual_seed(0)
        state = with_angles(GPT().double()).state_dict()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    error = weights_error(model, new_gpt(mesh))
    claim("the cure: distance from rank 0's weights", 0, error)
    filled = len(model.angles) - model.angles.isnan().sum().item()
    claim("elements of a non-persistent buffer filled", 0, filled, question=4)


# %% [markdown]
# ## 5. Resharding over fewer ranks after forward: reshard_after_forward=k
#
# Between nodes a gather costs far more than inside one. Forward must gather over all n ranks, since
# that is where the shards lie. But afterwards the block need not be sharded as thinly again: with
# `reshard_after_forward=k` each rank keeps 1/k of it, and backward gathers among k neighbors, such
# as the 8 GPUs of a node. DeepSpeed has the same under the name of **hpZ** (ZeRO++, Wang et al.
# 2023). For n = 4 and k = 2, a rank holds of one block:
#
#                          rank 0    rank 1     rank 2    rank 3
#     at rest, n = 4       [#   ]    [ #  ]     [  # ]    [   #]      the optimizer's shards
#     forward              [####]    [####]     [####]    [####]      gathered among 4
#     kept, k = 2          [##  ]    [  ##]     [##  ]    [  ##]      1/k: more memory,
#     backward             [####]    [####]     [####]    [####]      gathered among 2
#     gradients            [#   ]    [ #  ]     [  # ]    [   #]      reduce-scattered among 4


# %%
def check_resharding(mesh: DeviceMesh, k: int = 2) -> None:
    if WORLD_SIZE < 4 or WORLD_SIZE % k != 0:
        blocked(f"resharding over {k} ranks after forward", needs="4 ranks")
        return
    model = new_gpt(mesh)
    P_blocks = elements_of(model.blocks)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=k)
    fully_shard(model, mesh=mesh)
    with CountedCommunication() as counted:
        loss = mean_loss(model, random_bytes(mesh, RANK))
        forward = len(counted.log)
        kept = sum(p.to_local().numel() for p in model.blocks.parameters())
        loss.backward()
    U = len(model.blocks)
    gathers = [call for call in counted.log[forward:] if call.operation == "all_gather"]
    claim("resharded: elements a rank keeps of the blocks", P_blocks / k, kept, question=5)
    claim("resharded: all-gathers in backward", U, len(gathers))
    ranks = {len(call.ranks) for call in gathers}
    claim("resharded: ranks in a gather of backward", k, max(ranks), question=5)
    scatters = {len(call.ranks) for call in counted.calls("reduce_scatter")}
    claim("resharded: ranks in a reduce-scatter", WORLD_SIZE, min(scatters))
    claim("resharded: gradients, error", 0, error_against_one_process(model, mesh), atol=1e-14)


# %% [markdown]
# ## 6. Hybrid sharding (HSDP): shard inside a group, replicate across groups
#
# **HSDP** goes further: over a mesh of r x s ranks it shards over the s ranks of a group and
# replicates over the r groups. Gathers and reduce-scatters stay inside a group. Between the groups
# goes one all-reduce of a gradient *shard*: P/s elements, s times fewer than in DDP. The price is
# memory: 16P/s bytes per rank instead of 16P/n. DeepSpeed's counterpart was MiCS.
#
#     mesh           shard ->
#     replicate   group 0    rank 0   rank 1      all-gather, reduce-scatter along a row
#       |         group 1    rank 2   rank 3
#       v                   all-reduce down a column
#
# Compare the two for several nodes: `reshard_after_forward=k` keeps the optimizer's state 1/n and
# spares the network backward's gathers; HSDP spares it all gathers, and pays with memory.


# %%
def check_hybrid_sharding(device: torch.device) -> None:
    if WORLD_SIZE < 4 or WORLD_SIZE % 2 != 0:
        blocked("hybrid sharding over 2 groups", needs="4 ranks")
        return
    r = 2
    s = WORLD_SIZE // r
    mesh = init_device_mesh(device.type, (r, s), mesh_dim_names=("replicate", "shard"))
    model = shard_blocks(new_gpt(mesh), mesh)
    with CountedCommunication() as counted:
        mean_loss(model, random_bytes(mesh, RANK)).backward()
    first = RANK // s * s  # of this rank's group, whose ranks are neighbors
    inside = tuple(range(first, first + s))
    across = tuple(range(RANK % s, WORLD_SIZE, s))
    whole = new_gpt(mesh)
    P = padded_elements(whole, s)
    P_blocks = padded_elements(whole.blocks, s)
    handed_inside = sum(call.elements for call in counted.log if call.ranks == inside)
    handed_across = sum(call.elements for call in counted.log if call.ranks == across)
    claim("HSDP: elements handed over inside a group", 2 * P + P_blocks, handed_inside)
    claim("HSDP: elements handed over across groups", P / s, handed_across, question=6)
    claim("HSDP: gradients, error", 0, error_against_one_process(model, mesh), atol=1e-14)


# %% [markdown]
# ## 7. How it is measured
#
# `CountedCommunication` records every collective as it is handed to the backend: its operation,
# elements, bytes and group. It does not see what then crosses a wire. The model is a plain GPT that
# knows nothing of sharding.


# %%
class Call(NamedTuple):
    """One collective, send or receive of this rank, as it was handed to the process group."""

    operation: str  # "all_reduce", "all_gather", "reduce_scatter", "send", ...
    elements: int  # of its input or its output, whichever is larger
    nbytes: int  # of the same
    ranks: tuple[int, ...]  # of the group
    peer: int | None


class CountedCommunication(TorchDispatchMode):
    """Records this rank's communication in `log`, beneath torch's dispatcher: DDP's and FSDP's too.

    It sees what is handed to a backend, not what the backend then sends.
    """

    NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier")
    NAMES += ("send", "recv", "reduce", "gather", "scatter")  # "_allgather_base_" is an all_gather

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Call] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its local tensors come by here in a moment
        if func.namespace.lstrip("_").startswith("c10d"):
            self.record(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def record(self, func, args: tuple, kwargs: dict) -> None:
        spelled = func._schema.name.replace("_", "")
        names = [name for name in self.NAMES if name.replace("_", "") in spelled]
        if not names:
            return  # it waits for a result or wraps one
        given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}
        given |= kwargs
        if "process_group" in given:
            group = dist.ProcessGroup.unbox(given["process_group"])
        else:
            group = dist.distributed_c10d._resolve_process_group(given["group_name"])
        ranks = tuple(dist.get_process_group_ranks(group))
        sizes = [(0, 0)]
        for argument in args:
            tensors = [leaf for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor)]
            sizes.append((sum(t.numel() for t in tensors), sum(t.nbytes for t in tensors)))
        peer = given.get("dst", given.get("src")) if names[0] in ("send", "recv") else None
        peer = None if peer is None or peer < 0 else ranks[peer]
        self.log.append(Call(names[0], *max(sizes), ranks, peer))

    def calls(self, operation: str = "") -> list[Call]:
        """The calls of one operation, in order; of all without a name."""
        return [call for call in self.log if operation in ("", call.operation)]

    def elements(self, operation: str = "") -> int:
        """Elements handed over in all calls of one operation."""
        return sum(call.elements for call in self.calls(operation))


# %% [markdown]
# The **oracle** is one process: the same GPT on the batches of all ranks. Every setting's gradients
# are compared with its gradients, in float64. An element of a gradient is below 1 here, and another
# order of additions changes it by some 1e-16; 1e-14 is allowed. In bfloat16 every operation rounds
# to 8 bits, so there the error is relative, and a tenth is allowed: the gradients of another batch
# would be off by 1 or more.


# %%
def new_gpt(mesh: DeviceMesh, dtype: torch.dtype = torch.float64) -> "GPT":
    torch.manual_seed(0)  # the same weights on every rank
    return GPT().to(mesh.device_type, dtype)


def random_bytes(mesh: DeviceMesh, rank: int, B: int = 2) -> torch.Tensor:
    """Return a rank's batch of random bytes, (B, 65)."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(256, (B, 65), generator=generator).to(mesh.device_type)


def mean_loss(model: nn.Module, x_BT: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of predicting each byte from those before it."""
    logits_BTV = model(x_BT[:, :-1])
    return F.cross_entropy(logits_BTV.flatten(0, 1), x_BT[:, 1:].flatten())


def one_process(mesh: DeviceMesh) -> "GPT":
    """Return a whole model with the gradients of all ranks' batches together."""
    whole = new_gpt(mesh)
    batches = [random_bytes(mesh, rank) for rank in range(WORLD_SIZE)]
    mean_loss(whole, torch.cat(batches)).backward()
    return whole


def gradients_error(model: nn.Module, whole: nn.Module) -> float:
    """Return the largest difference between a gradient of a sharded and of a whole model."""
    errors = []
    for ours, expected in zip(model.parameters(), whole.parameters(), strict=True):
        errors.append(largest_error(ours.grad.full_tensor(), expected.grad))
    return max(errors)


def error_against_one_process(model: nn.Module, mesh: DeviceMesh) -> float:
    return gradients_error(model, one_process(mesh))


def relative_gradients_error(model: nn.Module, mesh: DeviceMesh) -> float:
    """Return the largest error of a gradient, relative to that gradient's largest element."""
    errors = []
    whole = one_process(mesh)
    for ours, expected in zip(model.parameters(), whole.parameters(), strict=True):
        errors.append(relative_error(ours.grad.full_tensor(), expected.grad))
    return max(errors)


def weights_error(model: nn.Module, whole: nn.Module) -> float:
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    return max(largest_error(ours.full_tensor(), expected) for ours, expected in pairs)


def elements_of(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def padded_elements(module: nn.Module, ranks: int) -> int:
    """Return the elements of all parameters, rows rounded up to a multiple of the ranks."""
    rows = [math.ceil(len(p) / ranks) * ranks for p in module.parameters()]
    return sum(r * p[0].numel() for r, p in zip(rows, module.parameters(), strict=True))


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element; inf if one is no number."""
    error = (ours - expected).abs().max() / expected.abs().max()
    return error.nan_to_num(nan=torch.inf).item()


def largest_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference between two tensors; inf if one is no number."""
    return (ours - expected).abs().max().nan_to_num(nan=torch.inf).item()


# %% [markdown]
# The GPT of fsdp/01_fsdp_basics.py, to the letter.


# %%
class Block(nn.Module):
    """A pre-norm transformer block: (B, T, D) -> (B, T, D)."""

    def __init__(self, D: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)
        self.norm2 = nn.LayerNorm(D)
        self.up = nn.Linear(D, 4 * D)
        self.down = nn.Linear(4 * D, D)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
        return x_BTD + self.down(F.gelu(self.up(self.norm2(x_BTD))))

    def attention(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """H heads of K features each; a token sees itself and those before it."""
        qkv_BT3HK = self.qkv(x_BTD).unflatten(-1, (3, self.heads, -1))
        q_BHTK, k_BHTK, v_BHTK = qkv_BT3HK.permute(2, 0, 3, 1, 4)
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        return self.out(y_BHTK.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """A GPT: L blocks, D wide, at most T tokens of context, V different tokens; here bytes."""

    def __init__(self, L: int = 4, D: int = 64, T: int = 64, V: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(V, D)
        self.position = nn.Embedding(T, D)
        self.blocks = nn.ModuleList(Block(D, heads) for _ in range(L))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, x_BT: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, T, V) of the token after each of `x_BT`."""
        h_BTD = self.token(x_BT) + self.position.weight[: x_BT.shape[1]]
        for block in self.blocks:
            h_BTD = block(h_BTD)
        return self.head(self.norm(h_BTD))


# %% [markdown]
# ## 8. On GPUs: how much of the communication is hidden
#
# A step of 0.94 billion parameters in bfloat16, forward and backward, timed with CUDA events: once
# without any sharding, then sharded under each setting. What a setting adds to the unsharded time
# is its **exposed** communication. Next to it stands the time of the same collectives alone, one
# after the other: two gathers and a scatter per block, one of each for the root. No more can be
# hidden than there is communication, or computation: over PCIe the first is the longer of the two.


# %%
def check_on_gpus(mesh: DeviceMesh) -> None:
    if mesh.device_type == "cpu" or WORLD_SIZE == 1:
        blocked("share of the communication that is exposed", needs="2 GPUs")
        return
    if not torch.cuda.is_bf16_supported(False):  # in hardware, not emulated
        blocked("share of the communication that is exposed", needs="2 GPUs with bfloat16")
        return
    x_BT = torch.randint(32_768, (2, 2049), device="cuda")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    plain = large_gpt().bfloat16()
    alone = step_ms(plain, x_BT)
    L = len(plain.blocks)
    in_block = elements_of(plain.blocks[0])
    in_root = elements_of(plain) - L * in_block
    del plain
    collectives = gather_ms(in_root) + scatter_ms(in_root)
    collectives += L * (2 * gather_ms(in_block) + scatter_ms(in_block))
    print0(f"{'':13}unsharded {alone:.1f} ms; all collectives alone {collectives:.1f} ms")
    settings = {"as a rule": {}, "kept": {"reshard_after_forward": False}}
    if WORLD_SIZE >= 4 and WORLD_SIZE % 2 == 0:
        settings["reshard over 2"] = {"reshard_after_forward": 2}
    for name, options in settings.items():
        model = large_gpt()
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, **options)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        milliseconds = step_ms(model, x_BT)
        print0(f"{'':13}{name}: {milliseconds:.1f} ms")
        if name == "as a rule":
            hidden = (alone + collectives - milliseconds) / min(alone, collectives)
            claim("hidden / what can be hidden, at least", 0.2, hidden, ">=", timed=True)
        del model
        gc.collect()  # FSDP's hooks and the model hold each other
        torch.cuda.empty_cache()


def large_gpt() -> "GPT":
    torch.manual_seed(0)
    with torch.device("cuda"):
        return GPT(L=16, D=2048, T=2048, V=32_768, heads=16)


def step_ms(model: nn.Module, x_BT: torch.Tensor) -> float:
    """Return the median time of a forward and backward pass, in milliseconds."""

    def step() -> None:
        with torch.enable_grad():
            mean_loss(model, x_BT).backward()
        model.zero_grad()

    return median_ms(step)


def gather_ms(elements: int) -> float:
    """Return the median time of an all-gather of a unit in bfloat16, in milliseconds."""
    shard = torch.zeros(elements // WORLD_SIZE, device="cuda", dtype=torch.bfloat16)
    whole = shard.new_empty(len(shard) * WORLD_SIZE)
    return median_ms(lambda: dist.all_gather_into_tensor(whole, shard))


def scatter_ms(elements: int) -> float:
    """Return the median time of a reduce-scatter of a unit's gradient in float32."""
    shard = torch.zeros(elements // WORLD_SIZE, device="cuda")
    whole = shard.new_zeros(len(shard) * WORLD_SIZE)
    return median_ms(lambda: dist.reduce_scatter_tensor(shard, whole))


def median_ms(work: Callable, repeats: int = 20) -> float:
    """Return the median time of `work()` on this rank's GPU, in milliseconds."""
    times = []
    with torch.no_grad():
        for _ in range(repeats + 3):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return sorted(times[3:])[repeats // 2]


# %% [markdown]
# ## What you should have seen
#
# 1. One block as a rule, two with prefetch. In backward two gathers precede the first gradient
#    without any setting, since FSDP2 prefetches there. Prefetch moves a gather in time; it adds
#    none, and costs the memory of one more whole block.
# 2. Gathered in 2 bytes, reduced in 4, held in 4. Per parameter a step thus hands over 2 + 2 + 4
#    bytes; without mixed precision it would be 12. The gradients are within a few percent of
#    float32's, which is bfloat16's precision after some 40 roundings.
# 3. 27 all-gathers, three times the 9 of one micro-batch, but only 5 reduce-scatters. Accumulation
#    under FSDP saves a third of the traffic and costs whole gradients; where those do not fit,
#    reduce every micro-batch.
# 4. On CPUs all 4: the model trains on, with n identical slices in every weight, and reaches a poor
#    loss for no visible reason, so fill it from a state dict or a checkpoint. On GPUs only rank 0's
#    own: there `to_empty` and then the model's initializers is the usual way. On both no element of
#    the buffer: if it is not computed again, the model trains on garbage.
# 5. Among 2, and a rank keeps half of the blocks. On 16 nodes of 8 GPUs, k = 8 keeps 16 times more
#    than a shard over 128 ranks, but in bfloat16, and backward's gathers never leave the node.
# 6. P/2 per rank, while 2.84 P in gathers and scatters stay inside the group. With 8 GPUs per node
#    it is P/8 per rank. A node's 8 ranks together all-reduce P over its border, as DDP does; full
#    sharding gathers and scatters 3P over it, and does so for every micro-batch.
#
# Every setting leaves the gradients at those of one process, to about 1e-16 in float64. They change
# bytes, order and groups, never what is learned.
#
# **Try.** Without `set_requires_gradient_sync` every micro-batch reduces its gradients; the sum is
# the same, and only the count of reduce-scatters tells. With a seed per rank the shards differ, as
# they should: the claim that fails is the one that says the trap exists. On GPUs nothing fails.
#
# **On real systems** accumulation under HSDP has a second switch: `set_requires_all_reduce(False)`
# leaves out only the all-reduce between groups, and keeps the cheap reduce-scatter inside. Which
# strategy suits which job is in fsdp/sharding_strategies.md.


# %%
def main() -> None:
    command_line()
    launch()
    device = setup()
    mesh = init_device_mesh(device.type, (WORLD_SIZE,), mesh_dim_names=("shard",))
    check_prefetch(mesh, prefetch=False)
    check_prefetch(mesh, prefetch=True)
    check_dtypes(mesh)
    check_accumulation(mesh)
    check_drawing(mesh)
    check_meta_device(mesh)
    check_resharding(mesh)
    check_hybrid_sharding(device)
    check_on_gpus(mesh)
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
