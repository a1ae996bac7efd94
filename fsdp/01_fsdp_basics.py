"""FSDP2 in practice: what fully_shard gathers and frees, and what each choice costs
=================================================================================

**Question.** `fully_shard` leaves two choices to you: which modules to shard together, and when to
free them. What does each choice cost in memory and in communication, and does training stay the
same under all of them?

**Predict**, and write it down before you run. A GPT of P parameters consists of 4 blocks, two
embeddings, a norm and a head. `fully_shard` is called on U inner modules and then on the whole
model: on no inner module (U = 0), on every block (U = 4), or on every linear layer (U = 17).

1. How many all-gathers and how many reduce-scatters does one training step need, given U?
2. What share of the parameters does a rank ever hold whole at the same time?
3. How many elements go through these collectives on one rank in one step, in multiples of P? Count
   the whole unit in both: the output of an all-gather, the input of a reduce-scatter.
4. Every block is a unit (U = 4). By default a unit is freed after its forward pass, except the
   outermost. Let all units keep their parameters from forward to backward instead. How many
   all-gathers are left, and how many parameters are whole after the forward pass?
5. By how much do the weights differ from those of one process after three steps in float64, for
   each of these choices?

**Run.**

    torchrun --standalone --nproc-per-node=4 01_fsdp_basics.py   # NCCL on 4 GPUs, else gloo
    python 01_fsdp_basics.py                                     # the same, started for you

Not run on several GPUs.

**Try.** Replace the inner `fully_shard(module, ...)` by `pass`: training still works, so what
fails? In `Block.attention` write `is_causal=False`: the loss falls as before, so what fails?

**Before.** parallelism/02_fsdp_zero.py: what ZeRO shards, and how many bytes that saves.

**Next.** The spine ends here: choose by need (README), or go on in order, with
fundamentals/01_gpu_interconnects.py.
"""

import argparse
import ctypes
import gc
import json
import logging
import math
import os
import re
import signal
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: B sequences, T tokens in each, D model width, V different tokens, L blocks, H heads of K
# features. P is the number of parameters, n the number of ranks, U the number of inner units.

CONTEXT = 64  # tokens that the GPT sees at once; a batch holds one more, which is only predicted

# %% [markdown]
# ## 1. fully_shard: a unit is gathered before its forward pass and freed after it
#
# **FSDP** (fully sharded data parallelism, Zhao et al. 2023) is ZeRO's stage 3 in PyTorch. At rest
# every rank holds 1/n of each parameter, of its gradient and of its optimizer state. A module's
# parameters become whole just before the module computes, and are freed right after.
#
# `fully_shard(module)` changes the module in place. Each parameter becomes a **DTensor**: a local
# tensor together with a mesh of ranks and a placement. Here the placement is `Shard(0)`: rank r
# holds the r-th of n chunks of rows. Where the rows do not divide by n, the last ranks hold fewer,
# or none. Call it on the inner modules first, then on the whole model: every call makes one
# **unit**, the parameters that no inner call has taken. The outermost unit is called the **root**.
# With a unit per block, the first three of these lines shard a model:
#
#     for block in model.blocks:
#         fully_shard(block, mesh=mesh)
#     fully_shard(model, mesh=mesh)
#     optimizer = torch.optim.AdamW(model.parameters())  # after sharding: it must see the DTensors
#
# The training loop stays as it was, because `fully_shard` puts **hooks** on the module. One runs
# before its forward pass and gathers the unit, one runs after it and frees the unit. Two more do
# the same around its backward pass, and the last of them also reduce-scatters the unit's gradient,
# which has been whole until then: each rank is left with the average of its own shard.
#
# A unit is gathered by *one* all-gather, however many tensors it has. This is one rank's view of a
# step with a unit per block; `[#   ]` is a shard, `[####]` is a whole unit of parameters:
#
#                          root      block 0    block 1    block 2     communication
#     at rest             [#   ]     [#   ]     [#   ]     [#   ]
#     forward   tokens    [####]     [#   ]     [#   ]     [#   ]      gather root
#               block 0   [####]     [####]     [#   ]     [#   ]      gather 0
#               block 1   [####]     [#   ]     [####]     [#   ]      gather 1
#               block 2   [####]     [#   ]     [#   ]     [####]      gather 2
#               head      [####]     [#   ]     [#   ]     [#   ]
#     backward  head      [####]     [#   ]     [#   ]     [#   ]      none, the root is still whole
#               block 2   [####]     [#   ]     [#   ]     [####]      gather 2, reduce-scatter 2
#               block 1   [####]     [#   ]     [####]     [#   ]      gather 1, reduce-scatter 1
#               block 0   [####]     [####]     [#   ]     [#   ]      gather 0, reduce-scatter 0
#               tokens    [####]     [#   ]     [#   ]     [#   ]      reduce-scatter root
#     update              [#   ]     [#   ]     [#   ]     [#   ]      none: every rank has its 1/n
#
# The root stays whole after forward, since backward would gather it again at once. The model is a
# small GPT; it stands in section 5 and has no line about sharding in it.


# %%
def inner_modules(model: nn.Module, units: str) -> list[nn.Module]:
    """Return the modules that become units of their own, for one of three choices."""
    if units == "blocks":
        return list(model.blocks)
    if units == "linears":
        return [module for module in model.modules() if isinstance(module, nn.Linear)]
    return []  # "model": the root is the only unit


def shard_model(model: nn.Module, mesh: DeviceMesh, units: str, **options: object) -> nn.Module:
    """Make each inner module a unit, then everything that is left: the order matters."""
    for module in inner_modules(model, units):
        fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def rows_held(rows: int) -> int:
    """Return how many of a tensor's rows this rank holds: chunks of ceil(rows / n), in order."""
    chunk = math.ceil(rows / WORLD_SIZE)
    return max(0, min(chunk, rows - RANK * chunk))


def check_shards(mesh: DeviceMesh) -> None:
    whole = new_gpt(mesh)
    model = shard_model(new_gpt(mesh), mesh, "blocks")
    name, parameter = next(iter(model.named_parameters()))
    shapes = f"{tuple(parameter.shape)}, here {tuple(parameter.to_local().shape)}"
    print0(f"{'':13}{name}: {type(parameter).__name__} {shapes}, {parameter.placements}")

    expected = sum(rows_held(len(p)) * p[0].numel() for p in whole.parameters())
    held = sum(p.to_local().numel() for p in model.parameters())
    claim("elements this rank holds: chunk r of each tensor", expected, held)
    total = sum(gather_objects(held))
    claim("elements that all ranks hold together: P", elements_of(whole), total)


# %% [markdown]
# ## 2. Which modules become units: memory against messages
#
# With small units only a small part of the model is whole at any moment, but there are many small
# messages. With one unit for the whole model there is one large message, and the whole model is
# gathered at once. A unit per block is the usual choice. With U inner units, P_in parameters in
# them, and P_root in the root:
#
#     collective           how many       elements, whole units
#     all-gather           2U + 1         2 P_in + P_root      each unit forward, inner ones again
#     reduce-scatter        U + 1           P_in + P_root      each unit's gradient, once
#
#     parameters ever whole      P_root + the largest inner unit
#
# During backward the gradient of the unit at work is there as well, as large as the unit. For L
# blocks the sum of elements is a little under 3P, which is ZeRO-3's volume. In a ring each rank
# *sends* (n-1)/n of these numbers.


# %%
def check_units(mesh: DeviceMesh) -> dict[str, list[int]]:
    """Return for each choice of units how many elements were whole at each operation of a step."""
    timelines = {}
    for units in ("model", "blocks", "linears"):
        whole = new_gpt(mesh)
        inner = inner_modules(whole, units)
        model = shard_model(new_gpt(mesh), mesh, units)
        with CountedCommunication() as counted, WholeElements(model) as held:
            byte_losses(model, random_bytes(mesh, RANK)).mean().backward()

        P_in = sum(elements_of(module) for module in inner)
        largest = max((elements_of(module) for module in inner), default=0)
        expected = elements_of(whole) - P_in + largest
        claim(f"{units}: most ever whole, the root + one unit", expected, held.most, question=2)
        check_collectives(units, whole, inner, counted)
        timelines[units] = held.timeline
    return timelines


def check_collectives(
    units: str, whole: nn.Module, inner: list[nn.Module], counted: "CountedCommunication"
) -> None:
    if WORLD_SIZE == 1:
        blocked(f"{units}: collectives and their elements", needs="2 ranks")
        return
    U = len(inner)
    gathers = len(counted.calls("all_gather"))
    scatters = len(counted.calls("reduce_scatter"))
    claim(f"{units}: all-gathers, 2U + 1", 2 * U + 1, gathers, question=1)
    claim(f"{units}: reduce-scatters, U + 1", U + 1, scatters, question=1)

    P_in = sum(padded_elements(module) for module in inner)
    P_root = padded_elements(whole) - P_in
    gathered = counted.elements("all_gather")
    scattered = counted.elements("reduce_scatter")
    claim(f"{units}: all-gathered, 2 P_in + P_root", 2 * P_in + P_root, gathered, question=3)
    claim(f"{units}: reduce-scattered, P_in + P_root", P_in + P_root, scattered, question=3)
    print0(f"{'':13}which is {counted.elements() / elements_of(whole):.2f} P\n")


# %% [markdown]
# ## 3. When a unit is freed: reshard_after_forward, and FSDP1's words for it
#
# The option `reshard_after_forward` says whether a unit is freed between forward and backward. By
# default the inner units are and the root is not, since backward begins with the root and would
# gather it again at once. `False` keeps every unit: against the default that saves U all-gathers
# and costs P_in elements of memory, in the dtype of the computation. `True` frees the root too.
#
#     reshard_after_forward    all-gathers    whole after forward
#     (default)                2U + 1         P_root
#     False                     U + 1         P
#     True                     2U + 2         0
#
# A number of ranks instead shards the parameters again over fewer ranks than n
# (fsdp/04_fsdp_refinements.py).
#
# In FSDP1, and in papers before 2024, these choices were called *strategies*:
#
# | FSDP1                          | FSDP2                              | ZeRO             |
# |--------------------------------|------------------------------------|------------------|
# | `FULL_SHARD`                   | the default                        | stage 3          |
# | `SHARD_GRAD_OP`                | `reshard_after_forward=False`      | nearest: stage 2 |
# | `HYBRID_SHARD`                 | a mesh of two dimensions           | nearest: MiCS    |
# | (none)                         | `reshard_after_forward=8`, say     | ZeRO++'s hpZ     |
# | `NO_SHARD`                     | DDP                                | stage 0          |
# | `transformer_auto_wrap_policy` | a loop: `fully_shard` each block   |                  |
# | `size_based_auto_wrap_policy`  | a loop over modules that are large |                  |
#
# The two rows of MiCS and hpZ are explained in fsdp/04_fsdp_refinements.py.


# %%
def check_when_freed(mesh: DeviceMesh) -> None:
    whole = new_gpt(mesh)
    U = len(whole.blocks)
    P = elements_of(whole)
    P_root = P - elements_of(whole.blocks)
    cases = {  # name: (options, all-gathers, elements whole after forward)
        "default": ({}, 2 * U + 1, P_root),
        "reshard_after_forward=False": ({"reshard_after_forward": False}, U + 1, P),
        "reshard_after_forward=True": ({"reshard_after_forward": True}, 2 * U + 2, 0),
    }
    for name, (options, gathers, kept) in cases.items():
        model = shard_model(new_gpt(mesh), mesh, "blocks", **options)
        with CountedCommunication() as counted, WholeElements(model) as held:
            loss = byte_losses(model, random_bytes(mesh, RANK)).mean()
            after_forward = held.timeline[-1]
            loss.backward()
        claim(f"{name}: whole after forward", kept, after_forward, question=4)
        if WORLD_SIZE == 1:
            blocked(f"{name}: all-gathers", needs="2 ranks")
        else:
            measured = len(counted.calls("all_gather"))
            claim(f"{name}: all-gathers", gathers, measured, question=4)


# %% [markdown]
# ## 4. Under every choice, training is that of one process
#
# FSDP is data parallelism: every rank computes on its own part of the batch, and the
# reduce-scatter averages the gradients. Which unit is gathered when must not change a single
# result. So for every choice, three steps of SGD have to end at the weights that one process
# reaches on the whole batch. (SGD, because Adam divides a gradient by its own size: it would nearly
# hide a sum over the ranks that was never divided by n.)
#
# In float64 the two differ by the order of additions only. Allow each gradient 2000 roundings of
# 2**-53 of terms below 1; three steps of lr = 0.1 then move a weight by at most 3 x 0.1 x 2000 x
# 2**-53 = 7e-14. A sum instead of an average moves some weight by more than a thousandth, 1e10
# times as far.

# %%
CHOICES = {  # name: (units, options of fully_shard)
    "model": ("model", {}),
    "blocks": ("blocks", {}),
    "linears": ("linears", {}),
    "blocks, kept": ("blocks", {"reshard_after_forward": False}),
    "blocks, freed": ("blocks", {"reshard_after_forward": True}),
}


def take_steps(model: nn.Module, x_BT: torch.Tensor, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        byte_losses(model, x_BT).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def check_training(mesh: DeviceMesh) -> None:
    whole = new_gpt(mesh, torch.float64)
    take_steps(whole, torch.cat([random_bytes(mesh, rank) for rank in range(WORLD_SIZE)]))
    for name, (units, options) in CHOICES.items():
        model = shard_model(new_gpt(mesh, torch.float64), mesh, units, **options)
        take_steps(model, random_bytes(mesh, RANK))
        error = weights_error(model, whole)
        slack = 3 * 0.1 * 2000 * 2**-53
        claim(f"{name}: weights after 3 steps, error", 0, error, atol=slack, question=5)


# %% [markdown]
# ## 5. A GPT that learns, in ordinary code
#
# The model is a plain GPT. Every token sees itself and the tokens before it, and at each place the
# head gives a logit for each of the 256 values that the *next* byte may have. Nothing in these two
# classes knows of ranks. In the training loop three places do: the model is sharded, every rank
# draws its own part of the text, and the ranks' losses are averaged in order to be printed. One
# more line communicates without saying so. The gradients are DTensors, so `clip_grad_norm_` takes
# their norm over all ranks, which is a collective.


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
# Two quantities tell whether the model learns. A model that knows nothing pays ln 256 = 5.55 **nats
# per byte** (a nat is 1.44 bits). One that knows only how often each byte occurs pays the
# **entropy** of the bytes, which is computed from the text. To get below that it must use context.
#
# A loss can also be too good. If a label is not shifted by one place, or if attention looks ahead,
# the model sees the byte that it is to predict, and the loss falls faster than ever. Three claims
# guard against that:
#
# - The loss on a byte does not change when *later* bytes do.
# - Take one text 256 times, and put another value in the same place each time. The probabilities of
#   those 256 values, each from its own copy, must add up to 1. A model that sees the value finds
#   every one of them likely, and the sum is another.
# - 25 steps of a small model do not reach one bit (0.69 nats) per byte, which good compressors do
#   not reach on such text either.


# %%
def byte_losses(model: nn.Module, x_BT: torch.Tensor) -> torch.Tensor:
    """Return the loss (B, T-1), in nats, on each byte but the first, given those before it."""
    logits_BTV = model(x_BT[:, :-1])
    y_BT = x_BT[:, 1:]
    losses = F.cross_entropy(logits_BTV.flatten(0, 1), y_BT.flatten(), reduction="none")
    return losses.view(y_BT.shape)


def read_text(path: str | None) -> bytes:
    """Return up to 2 MB of the file at `path`, or of the standard library's sources."""
    if path:
        return Path(path).read_bytes()[:2_000_000]
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    return b"".join(source.read_bytes() for source in sources)[:2_000_000]


def train(mesh: DeviceMesh, options: argparse.Namespace) -> list[float]:
    """Train on real text; return the loss of each step, averaged over the ranks."""
    text = read_text(options.data)
    bytes_N = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    model = shard_model(new_gpt(mesh), mesh, "blocks")
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, fused=True)
    generator = torch.Generator().manual_seed(RANK)  # every rank draws another part of the text
    losses = []
    drawn = []
    silent = None if RANK == 0 else True  # None: show progress if this is a terminal
    for _ in tqdm(range(options.steps), "training", leave=False, disable=silent):
        starts = torch.randint(len(bytes_N) - CONTEXT, (8,), generator=generator).tolist()
        drawn += starts
        x_BT = torch.stack([bytes_N[start : start + CONTEXT + 1] for start in starts])
        loss = byte_losses(model, x_BT.to(mesh.device_type)).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / WORLD_SIZE
        dist.all_reduce(mean)
        losses.append(mean.item())
    check_learning(text, losses, own_data=options.data is not None)
    check_that_ranks_differ(drawn)
    check_that_nothing_looks_ahead(model, mesh)
    return losses


# %% [markdown]
# ## 6. How it is measured
#
# The **oracle** is one process: `whole` has the same weights and sees all ranks' batches.
#
# `CountedCommunication` records every collective as it is handed to the backend. A call counts with
# its input or its output, whichever is larger, as in nccl-tests. That is not what then crosses a
# wire: for N elements a rank sends (n-1)/n of N on NCCL's ring, but gloo's reduce-scatter is an
# all-reduce inside and sends twice as much. All ranks' chunks are equally large, so rows that do
# not divide by n are padded.
#
# `WholeElements` looks at the model at *every* operation and adds up the parameters that are not
# DTensors. It sees what a module can compute with. A buffer that is being filled for the next unit
# is not in it: on GPUs, where FSDP2 gathers one unit ahead, expect up to two units.


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
# The second counter is about memory. At each operation it asks the model which parameters are whole
# at that moment.


# %%
class WholeElements(TorchDispatchMode):
    """Records at every operation how many elements of the model's parameters are whole."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.timeline: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        whole = [p.numel() for p in self.model.parameters() if not isinstance(p, DTensor)]
        self.timeline.append(sum(whole))
        return func(*args, **(kwargs or {}))

    @property
    def most(self) -> int:
        return max(self.timeline)


def elements_of(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def padded_elements(module: nn.Module) -> int:
    """Return the elements of all parameters, their rows rounded up to a multiple of n."""
    total = 0
    for parameter in module.parameters():
        rows = math.ceil(len(parameter) / WORLD_SIZE) * WORLD_SIZE
        total += rows * parameter[0].numel()
    return total


def weights_error(model: nn.Module, whole: nn.Module) -> float:
    """Return the largest difference between a parameter of a sharded and of a whole model."""
    errors = []
    for ours, expected in zip(model.parameters(), whole.parameters(), strict=True):
        errors.append(largest_error(ours.full_tensor(), expected))
    return max(errors)


def largest_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference between two tensors; inf if one is no number."""
    return (ours - expected).abs().max().nan_to_num(nan=torch.inf).item()


def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


def new_gpt(mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> GPT:
    torch.manual_seed(0)  # the same weights on every rank
    return GPT().to(mesh.device_type, dtype)


def random_bytes(mesh: DeviceMesh, rank: int) -> torch.Tensor:
    """Return a rank's batch of two sequences of random bytes: (B, T)."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(256, (2, CONTEXT + 1), generator=generator).to(mesh.device_type)


# %% [markdown]
# What is claimed of the training: the loss lies between two bounds, all ranks drew different text,
# and no prediction depends on what it is to predict. The last is computed in float32; two losses of
# the same byte may differ by the rounding of about 64 sums, and the 256 probabilities by as much.


# %%
def check_learning(text: bytes, losses: list[float], own_data: bool) -> None:
    shares = [count / len(text) for count in Counter(text).values()]
    entropy = -sum(share * math.log(share) for share in shares)
    final = losses[-10:]
    mean = sum(final) / len(final)
    print0(f"{'':13}{len(text):,} bytes; loss {losses[0]:.2f} to {losses[-1]:.2f} nats per byte")
    claim("mean of the last losses, and the bytes' entropy", entropy, mean, "<=", varies=True)
    if own_data:
        return  # which may be as predictable as you like
    claim("mean of the last losses, and one bit per byte", math.log(2), mean, ">=", varies=True)


def check_that_ranks_differ(drawn: list[int]) -> None:
    if WORLD_SIZE == 1:
        blocked("ranks that drew another text than this one", needs="2 ranks")
        return
    others = sum(starts != drawn for starts in gather_objects(drawn))  # its own are equal
    claim("ranks that drew another text than this one", WORLD_SIZE - 1, others)


def check_that_nothing_looks_ahead(model: nn.Module, mesh: DeviceMesh) -> None:
    at = 10  # of 17 bytes
    x_BT = random_bytes(mesh, RANK)[:, :17]
    changed_BT = x_BT.clone()
    changed_BT[:, at + 1 :] = 255 - x_BT[:, at + 1 :]
    each_value_VT = x_BT[:1].repeat(256, 1)  # 256 copies of one text, but for the byte at `at`
    each_value_VT[:, at] = torch.arange(256, device=x_BT.device)
    with torch.no_grad():
        before = byte_losses(model, x_BT)[:, :at]
        after = byte_losses(model, changed_BT)[:, :at]
        losses_V = byte_losses(model, each_value_VT)[:, at - 1]
    change = largest_error(after, before)
    claim("loss on a byte: change if later bytes change", 0, change, atol=1e-4)
    total = losses_V.neg().exp().sum()
    claim("probabilities of a byte's 256 values: their sum", 1, total, atol=1e-4)


# %% [markdown]
# ## 7. On GPUs: gigabytes, milliseconds and MFU of each choice
#
# The same choices for a model that is worth sharding: 0.94 billion parameters at the default width,
# computed in bfloat16, with shards, sums and Adam in float32. Peak memory is the allocator's. The
# clock is CUDA events. **MFU** (model FLOPs utilization) counts 6 FLOPs per parameter and token for
# all but the embeddings, which are looked up, plus 12 L D T per token for attention, over what the
# GPU's datasheet promises for dense bfloat16 (05, section 4: other conventions).


# %%
PEAK_BF16 = {"L4": 121e12, "A10G": 70e12, "A10": 125e12, "L40S": 362e12, "A100": 312e12}
PEAK_BF16 |= {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "B300": 2250e12}


def peak_of(gpu: str) -> float:
    """Return dense FLOP/s of a GPU, by the longest known name in its own; NaN of others."""
    known = [name for name in PEAK_BF16 if re.search(rf"\b{name}\b", gpu)]
    return PEAK_BF16[max(known, key=len)] if known else math.nan


def check_on_gpus(mesh: DeviceMesh, width: int, L: int = 16, T: int = 2048, B: int = 2) -> None:
    if mesh.device_type == "cpu":
        blocked("peak memory: what a unit per block saves", needs="1 GPU")
        return
    if not torch.cuda.is_bf16_supported(False):  # in hardware, not emulated
        blocked("peak memory: what a unit per block saves", needs="1 GPU with bfloat16")
        return
    peak = peak_of(torch.cuda.get_device_name())
    x_BT = torch.randint(32_768, (B, T + 1), device="cuda")
    peaks = {}
    print0(f"{'':13}{'units':8} {'peak GB':>8} {'ms':>8} {'tokens/s, all ranks':>20} {'MFU':>6}")
    for units in ("model", "blocks", "linears"):
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = GPT(L, width, T, V=32_768, heads=width // 128)
        multiplied = elements_of(model) - elements_of(model.token) - elements_of(model.position)
        P_blocks = elements_of(model.blocks)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard_model(model, mesh, units, mp_policy=policy)
        milliseconds, peaks[units] = time_steps(model, x_BT)
        tokens = B * T / milliseconds * 1e3
        flops = (6 * multiplied + 12 * L * width * T) * tokens
        row = (
            f"{units:8} {peaks[units] / 1e9:8.2f} {milliseconds:8.1f} {tokens * WORLD_SIZE:20,.0f}"
        )
        print0(f"{'':13}{row} {flops / peak:6.1%}")
        del model
        gc.collect()  # FSDP's hooks and the model hold each other
        torch.cuda.empty_cache()
    saved = (peaks["model"] - peaks["blocks"]) / (2 * P_blocks)
    claim("peak memory saved / blocks in bfloat16, at least", 0.5, saved, ">=")


def time_steps(model: nn.Module, x_BT: torch.Tensor, repeats: int = 5) -> tuple[float, int]:
    """Return the median time of a training step in milliseconds, and the peak memory in bytes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    times = []
    for _ in range(repeats + 2):  # the first two allocate and warm up
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        byte_losses(model, x_BT).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times[2:])[repeats // 2], torch.cuda.max_memory_allocated()


# %% [markdown]
# ## What you should have seen
#
# 1. 2U + 1 all-gathers and U + 1 reduce-scatters: 1 and 1, 9 and 5, 35 and 18. The number of
#    messages is what small units cost. A message that is too small is all latency, so keep a unit
#    at some megabytes per rank, which a transformer block usually is.
# 2. The root and one inner unit. With one unit for everything that is all of the model; with a unit
#    per block, 37% of this small one; with a unit per linear layer, 16%. It is 7% in Llama 2 7B and
#    16% in Llama 3 8B, whose vocabulary is four times as large: most of that is embedding and head,
#    so a big embedding or head deserves a unit of its own. In backward add a unit's gradient.
# 3. 2 P for one unit, 2.84 P for blocks, 2.91 P for linear layers. DDP's all-reduce is a
#    reduce-scatter and an all-gather, 2 P in the same count. FSDP needs half as much again, because
#    forward and backward each gather the parameters.
# 4. 5 of 9 all-gathers are left, and all P parameters are whole after forward instead of the root's
#    16%. That is worth it where P parameters in bfloat16 fit and the network is slow. Told `True`,
#    the root is freed and gathered again: 10 all-gathers.
# 5. By less than 1e-15 for every choice, which is rounding. A choice of units is a choice of memory
#    and time, never of results. So make it by measuring, and change it whenever that helps.
#
# The loss falls from 5.8 to about 2.8 nats per byte: the mean of the last ten is below the bytes'
# entropy of 3.1, and far above one bit. With `--figure PATH` the lesson draws how much of the model
# is whole at each operation of a step:
# ![whole when](../results/lessons/fsdp_01_fsdp_basics.png)
#
# **Try.** Without the inner `fully_shard` everything is one unit. Training ends at the same
# weights; only the counts and the memory betray it, just as in a real job. With `is_causal=False`
# the loss falls as before, and only the two claims about looking ahead fail. A loss that is too
# good is a bug until it is explained.
#
# **On GPUs** the all-gathers run on a stream of their own while the block before computes, so 3 P
# take no longer than 2 P where computing a block takes longer than gathering the next. At a
# thousand ranks the gather of a small unit is all latency; then shard within smaller groups
# (fsdp/04_fsdp_refinements.py).
#
# **Where it bites.** Hooks run on `forward` only: a model that is called by another method, such as
# `generate`, meets DTensors, until `register_fsdp_forward_method` names that method. Two modules
# that share a parameter (a tied embedding and head) must lie in the same unit.


# %%
def draw(timelines: dict[str, list[int]], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure((9, 4), layout="constrained")
    axes = figure.subplots()
    P = max(timelines["model"])
    words = {"model": (102, "one unit"), "blocks": (39, "a unit per block")}  # y, text
    words |= {"linears": (2, "a unit per linear layer")}
    for units, timeline in timelines.items():
        percent = [100 * whole / P for whole in timeline]
        progress = [operation / len(timeline) for operation in range(len(timeline))]
        (line,) = axes.step(progress, percent)
        y, name = words[units]
        text = f"{name}: at most {max(percent):.0f}%"
        axes.text(0.58, y, text, ha="center", color=line.get_color())
    axes.set(ylabel="% of the parameters held whole", ylim=(-3, 112), xticks=[])
    axes.set_xlabel("operations of one step: forward, then backward")
    axes.set_title("The smaller the units, the less of the model is whole at any time")
    figure.savefig(path, dpi=150)


def main() -> None:
    options = command_line(
        {
            "--data": {"metavar": "PATH", "help": "text to train on (Python's own sources)"},
            "--steps": {"type": int, "default": 25, "help": "training steps (25)"},
            "--width": {"type": int, "default": 2048, "help": "model width on GPUs (2048)"},
            "--figure": {"metavar": "PATH", "help": "draw what is whole during a step"},
        }
    )
    launch()
    if options.steps < 1:
        refuse(f"training takes at least one step; got --steps {options.steps}; leave it out")
    device = setup()
    mesh = init_device_mesh(device.type, (WORLD_SIZE,), mesh_dim_names=("shard",))
    check_shards(mesh)
    timelines = check_units(mesh)
    check_when_freed(mesh)
    check_training(mesh)
    train(mesh, options)
    check_on_gpus(mesh, options.width)
    if options.figure and RANK == 0:
        draw(timelines, options.figure)
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
