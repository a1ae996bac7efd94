"""ZeRO stages 2 and 3 from scratch: sharded gradients, then sharded weights (FSDP)
================================================================================

**Question.** How can n ranks train a model that none of them could hold, and what does it cost?

**Predict**, and write it down before you run. A model of four equal units has P parameters. Four
ranks train it in bfloat16 with Adam, in steps of two micro-batches.

1. How many bytes per parameter does a rank hold when backward has ended: in stage 2 (optimizer and
   gradients sharded) and in stage 3 (weights, too)?
2. How many elements per parameter does a rank hand to reduce-scatters and to all-gathers: in each
   micro-batch, and in the optimizer's step?
3. In stage 3, the weights of how many units are whole at once?
4. In which order does stage 3 gather the units 0, 1, 2, 3 in a micro-batch's forward and backward,
   and how many of these gathers can travel while another unit computes?

**Run.**

    torchrun --standalone --nproc-per-node=4 05_zero2_and_zero3.py  # NCCL on 4 GPUs, else gloo
    python 05_zero2_and_zero3.py                                    # the same, started for you

Takes 16 s with 4 ranks on 2 cores (gloo, torch 2.15). Not run on several GPUs. Predict, run, read.

**Try.** In `before_backward` prefetch `self.next.get(unit)` instead of `self.previous[unit]`: is
the training still right? In `wait_pending` let `copy_` replace what `add_` adds up: what fails?

**Before.** parallelism/02_fsdp_zero.py: sixteen bytes per parameter, buckets, stage 1.

**Next.** fsdp/01_fsdp_basics.py uses PyTorch's `fully_shard`.
parallelism/06_tensor_parallel.py splits the multiplications themselves.
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
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_STEP_NUM_TASKS", "1")))

# Shapes: N elements of a flat tensor with its padding, K = N / n of a rank's shard; B samples of D
# features on a rank, R ranks. P counts the parameters of a model.

# %% [markdown]
# ## 1. The gradient of an all-gather is a reduce-scatter
#
# Stage 1 sharded what the optimizer needs. Weights and gradients remain, and both are needed only
# in passing. So divide the model into **units** whose weights come and go together; a transformer's
# blocks are the usual choice. A rank keeps its shard of each unit. Before a unit computes, its
# weights are gathered; afterwards they are freed:
#
#     slot       F0   F1   F2   F3   B3   B2   B1   B0        F forward, B backward
#     unit 0     ##   .    .    .    .    .    <#   ##        ## its weights are whole
#     unit 1     <#   ##   .    .    .    <#   ##   .         <# they are being gathered
#     unit 2     .    <#   ##   .    <#   ##   .    .         .  only this rank's shard is there
#     unit 3     .    .    <#   ##   ##   .    .    .
#
# While one unit computes, the next one's weights travel (section 3).
#
# What does autograd see? The shard *is* the parameter, and the all-gather a function of it. Through
# that function the losses of *all* ranks depend on my shard, so its gradient is a sum over ranks:
# the backward of an all-gather is a reduce-scatter.


# %%
class Gather(torch.autograd.Function):
    """Whole weights out of a shard. Backward hands the whole gradient to `reduce`."""

    @staticmethod
    def forward(ctx, shard_K: torch.Tensor, flat: "Flat", reduce: Callable) -> torch.Tensor:
        ctx.flat = flat
        ctx.reduce = reduce
        return flat.full_N.data  # .data: refilling it in backward is no modification to autograd

    @staticmethod
    def backward(ctx, gradient_N: torch.Tensor) -> tuple[None, None, None]:
        ctx.reduce(ctx.flat, gradient_N)  # zero where a parameter went unused, and in the padding
        return None, None, None  # the gradient will arrive in flat.gradient_K


# %% [markdown]
# ## 2. A flat tensor per unit, which can lose its storage
#
# As in stage 1, the parameters of a unit lie end to end in a flat tensor, padded to a multiple of
# n. New is that the whole tensor can be emptied: `resize_(0)` gives the memory of its storage back,
# while the tensor, and all views of it that autograd has saved, live on. Gathering into the same
# storage before backward makes those views right again.
#
# Modules look their weights up by name, so these names must lead to views of the flat tensor while
# the unit computes. A parameter may be used in several places; each is a `Use`. Tied weights of two
# units belong to the root, which is gathered all the while.


# %%
class Use(NamedTuple):
    """One place where a parameter is used."""

    unit: nn.Module  # the innermost unit around it
    owner: nn.Module  # the module whose attribute it is
    attribute: str
    name: str  # in the state dict of the whole model


def uses_of(
    module: nn.Module, unit: nn.Module, units: Sequence[nn.Module], prefix: str = ""
) -> Iterator[tuple[nn.Parameter, Use]]:
    """Yield every use of every parameter of a module."""
    if module in units:
        unit = module
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        yield parameter, Use(unit, module, name, prefix + name)
    for name, child in module.named_children():
        yield from uses_of(child, unit, units, f"{prefix}{name}.")


class Flat:
    """Parameters of one unit and dtype: N elements with the padding, of which a rank owns K = N/n.

    full_N      whole weights in the dtype that computes; an empty storage while they are freed
    shard_K     this rank's shard of them, and gradient_K of the gradient, averaged over ranks
    master_K    the shard that the optimizer updates: shard_K, or a copy of higher precision
    """

    def __init__(
        self, uses: dict[nn.Parameter, list[Use]], stage: int, compute: torch.dtype
    ) -> None:
        self.uses = list(uses.values())
        self.shapes = [parameter.shape for parameter in uses]
        self.stage = stage
        self.works: list[dist.Work] = []  # the all-gather under way
        self.users = 0  # backwards of the unit that still need the weights
        n = dist.get_world_size()
        trained = next(iter(uses)).requires_grad
        whole = torch.cat([parameter.detach().flatten() for parameter in uses])
        whole_N = F.pad(whole, (0, -len(whole) % n))
        self.full_N = whole_N.to(compute)
        shard_K = self.full_N.view(n, -1)[dist.get_rank()]
        self.shard_K = nn.Parameter(shard_K.clone() if stage == 3 else shard_K, trained)
        self.master_K = self.shard_K
        if trained and compute != whole.dtype:
            self.master_K = nn.Parameter(whole_N.view(n, -1)[dist.get_rank()].clone())
        self.gradient_K = torch.zeros_like(shard_K) if trained else None

    def views(self, flat_N: torch.Tensor) -> Iterator[tuple[list[Use], torch.Tensor]]:
        """Each parameter's uses, and its part of `flat_N`."""
        sizes = [shape.numel() for shape in self.shapes]
        parts = flat_N.split([*sizes, len(flat_N) - sum(sizes)])
        return zip(self.uses, map(torch.Tensor.view, parts, self.shapes), strict=True)

    def fetch(self) -> None:
        """Start to gather the weights, unless they are there or on their way."""
        storage = self.full_N.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self.full_N.nbytes)
            shard_K = self.shard_K.data
            self.works.append(dist.all_gather_into_tensor(self.full_N, shard_K, async_op=True))

    def wait(self) -> None:
        while self.works:
            self.works.pop().wait()

    def free(self) -> None:
        self.wait()
        if self.stage == 3:
            self.full_N.untyped_storage().resize_(0)


# %% [markdown]
# ## 3. Hooks around each unit: gather, compute, free, prefetch
#
# Four moments matter, and each has a hook:
#
#     before forward      gather the unit; start to gather the next one
#     after forward       free it
#     before backward     gather it again; start to gather the previous one
#     gradient is there   free it; start the reduce-scatter of its gradient
#
# To **prefetch**, one must know which unit comes next. The hooks learn it as they run: in forward
# each unit notes which came before it. Backward visits them the other way round.
#
# At most one reduce-scatter is under way, since its input is a whole unit's gradient that must stay
# in memory until it has been sent. The result is *added* to the shard's gradient, so that several
# micro-batches accumulate. Unlike stage 1, every micro-batch communicates: a rank has no memory for
# a whole gradient to add up in.


# %%
class UnitHooks:
    """Moves the weights of units in and out of memory, and their gradients into shards."""

    def __init__(self, module: nn.Module, flats: dict[nn.Module, list[Flat]]) -> None:
        self.module = module
        self.flats = flats
        self.next: dict = {}  # learned in forward: which unit follows each unit
        self.previous: dict = {}
        self.last: nn.Module | None = None
        self.in_backward: set[nn.Module] = set()
        self.pending: list[tuple] = []  # the reduce-scatter under way
        for unit in flats:
            unit.register_forward_pre_hook(self.before_forward)
            unit.register_forward_hook(self.after_forward)
        self.after_backward()

    def use(self, unit: nn.Module, following: nn.Module | None) -> None:
        """Make a unit's weights whole, and start to gather those of the following one."""
        for flat in self.flats[unit]:
            flat.fetch()  # unless it was prefetched
            flat.wait()
        if following in self.flats and following not in self.in_backward:
            for flat in self.flats[following]:
                flat.fetch()

    def before_forward(self, unit: nn.Module, inputs: tuple) -> None:
        if unit not in self.in_backward:  # else activation checkpointing computes it once more
            if unit is self.module:
                self.last = None
            self.next[self.last] = unit
            self.previous[unit] = self.last
            self.last = unit
            self.use(unit, self.next.get(unit))
        for flat in self.flats[unit]:
            full_N = Gather.apply(flat.shard_K, flat, self.reduce)
            for uses, view in flat.views(full_N):
                for use in uses:
                    setattr(use.owner, use.attribute, view)

    def after_forward(self, unit: nn.Module, inputs: tuple, output: object) -> None:
        for flat in self.flats[unit]:
            for use in chain(*flat.uses):
                setattr(use.owner, use.attribute, None)  # not a view of memory that is gone
        if unit not in self.in_backward:
            for flat in self.flats[unit]:
                flat.free()
            outputs = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
            outputs = [tensor for tensor in outputs if tensor.requires_grad]
            if outputs:
                hook = partial(self.before_backward, unit)
                register_multi_grad_hook(outputs, hook, mode="any")

    def before_backward(self, unit: nn.Module, gradient: torch.Tensor) -> None:
        """Backward has reached the unit's output."""
        if not self.in_backward:  # private to PyTorch: the engine calls it when backward is over
            torch.autograd.Variable._execution_engine.queue_callback(self.after_backward)
        self.in_backward.add(unit)
        self.use(unit, self.previous[unit])
        for flat in self.flats[unit]:
            flat.users += 1  # a unit may have been called twice

    def reduce(self, flat: Flat, gradient_N: torch.Tensor) -> None:
        """The unit's gradient is there: send it to the ranks that own its shards."""
        self.wait_pending()
        flat.users -= 1
        if flat.users == 0:
            flat.free()
        sum_K = torch.empty_like(flat.gradient_K)
        work = dist.reduce_scatter_tensor(sum_K, gradient_N, async_op=True)
        self.pending = [(flat, work, sum_K, gradient_N)]

    def wait_pending(self) -> None:
        for flat, work, sum_K, _ in self.pending:
            work.wait()
            flat.gradient_K.add_(sum_K, alpha=1 / dist.get_world_size())
        self.pending = []

    def after_backward(self) -> None:
        self.wait_pending()
        for flat in chain(*self.flats.values()):
            flat.free()  # what is frozen, or went unused
            flat.users = 0
        self.in_backward = set()


# %% [markdown]
# ## 4. MiniFSDP: shard a module, train it, get it back whole
#
# The constructor takes the module's own parameters away and gives each unit a flat shard instead.
# `stage=2` is the same machine without `free`: weights stay whole, and `step` gathers them once.


# %%
class MiniFSDP:
    """Call the module, `backward` once or more, then `step`. All ranks run units in one order.

    `optimizer` builds any elementwise torch optimizer; with `compute` the module and its inputs are
    of that dtype, masters are not. Tied parameters belong to the root; frozen ones stay to the end.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        units: Sequence[nn.Module],
        stage: int = 3,
        compute: torch.dtype | None = None,
        clip: float | None = None,
    ) -> None:
        self.module = module
        self.stage = stage
        self.clip = clip
        uses: dict[nn.Parameter, list[Use]] = {}
        for parameter, use in uses_of(module, module, units):
            uses.setdefault(parameter, []).append(use)
        groups: dict[tuple, dict] = {}  # what will lie in one flat tensor
        for parameter, places in uses.items():
            dist.broadcast(parameter.data, 0)  # ranks may have been seeded differently
            one_unit = len({use.unit for use in places}) == 1
            owner_unit = places[0].unit if one_unit else module
            like = (owner_unit, parameter.dtype, parameter.requires_grad)
            groups.setdefault(like, {})[parameter] = places
            for use in places:
                use.owner._parameters.pop(use.attribute, None)
        for buffer in module.to(compute).buffers():
            dist.broadcast(buffer, 0)  # made equal now; later each rank has its own
        self.flats: dict[nn.Module, list[Flat]] = {unit: [] for unit in (module, *units)}
        for (unit, dtype, _), members in groups.items():
            flat = Flat(members, stage, compute if compute and dtype.is_floating_point else dtype)
            self.flats[unit].append(flat)
            unit.register_parameter(f"flat_shard_{len(self.flats[unit])}", flat.shard_K)
        self.trained = [f for f in chain(*self.flats.values()) if f.shard_K.requires_grad]
        self.optimizer = optimizer([flat.master_K for flat in self.trained])
        self.hooks = UnitHooks(module, self.flats)

    @torch.no_grad()
    def step(self) -> torch.Tensor | None:
        """Clip, update this rank's shards, in stage 2 gather; return the norm if clipping."""
        norm = None
        if self.clip is not None:  # an element is counted by its owner, padding is zero
            squares = [f.gradient_K.to(f.master_K.dtype).square().sum() for f in self.trained]
            square = sum(squares)
            dist.all_reduce(square)
            norm = square.sqrt()
        for flat in self.trained:
            flat.master_K.grad = flat.gradient_K.to(flat.master_K.dtype)
            if norm is not None:
                flat.master_K.grad.mul_((self.clip / (norm + 1e-6)).clamp(max=1))
            self.optimizer.step()  # passes over masters without a gradient: all but this one
            flat.master_K.grad = None
            flat.shard_K.copy_(flat.master_K)
            if self.stage == 2:
                dist.all_gather_into_tensor(flat.full_N, flat.shard_K.data)
            flat.gradient_K.zero_()
        return norm

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The bare module's, in the masters' precision, on every rank."""
        state = {k: t for k, t in self.module.state_dict().items() if "flat_shard_" not in k}
        for flat in chain(*self.flats.values()):
            whole_N = flat.master_K.data.new_empty(flat.full_N.shape)
            dist.all_gather_into_tensor(whole_N, flat.master_K.data)
            for uses, view in flat.views(whole_N):
                state |= {use.name: view for use in uses}
        return state


# %% [markdown]
# Gradients travel and are added up in bfloat16 here, as in parallelism/02_fsdp_zero.py; in a real
# job reduce them in float32 (`MixedPrecisionPolicy(reduce_dtype=torch.float32)` in FSDP2).

# %% [markdown]
# ## 5. How it is measured
#
# Three steps of two micro-batches on ranks that are seeded differently, against the **oracle**, one
# process that sees all samples. Some 100 additions in each gradient come in another order, which
# moves it by up to 100 x 2**-24 of its terms' size, and the slope of Adam's update is at most
# lr / eps = 1. So three steps may move a weight by 3 x 100 x 2**-24 = 1.8e-5; expect much less.
# In bfloat16 it is claimed that every weight is its float32 master, rounded.


# %%
UNITS, D, HIDDEN, STEPS, PIECES, LR, EPS, CLIP = 4, 420, 120, 3, 2, 0.01, 0.01, 0.1
SLACK = STEPS * 100 * 2**-24
ADAM = partial(torch.optim.Adam, lr=LR, eps=EPS)
WEIGHT, GRADIENT, OPTIMIZER = 0, 1, 2
SIZES = {torch.bfloat16: (2, 2, 12), torch.float32: (4, 4, 8)}  # bytes per parameter


def network(seed: int, device: torch.device) -> nn.Sequential:
    """Four equal units; their elements, 2 x 420 x 120 each, need no padding on 1 to 8 ranks."""
    torch.manual_seed(seed)
    units = []
    for _ in range(UNITS):
        up = nn.Linear(D, HIDDEN, bias=False)
        down = nn.Linear(HIDDEN, D, bias=False)
        units.append(nn.Sequential(up, nn.ReLU(), down))
    return nn.Sequential(*units).to(device)


def loss_of(model: nn.Module, x_BD: torch.Tensor) -> torch.Tensor:
    return (model(x_BD) - x_BD).square().mean()


def on_one_process(x_BD: torch.Tensor) -> dict[str, torch.Tensor]:
    """The oracle's weights, and its last gradient norm."""
    model = network(0, x_BD.device)
    optimizer = ADAM(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, x_BD).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return model.state_dict() | {"norm": norm}


# %% [markdown]
# **Bytes held**: between backward and step, every tensor that Python can reach is asked for its
# storage. **Elements** are counted as they are handed to a collective, beneath torch's dispatcher.
# A ring then sends (n-1)/n of them; gloo sends twice that in a reduce-scatter, which is an
# all-reduce inside.


# %%
def live_storages() -> dict[int, int]:
    """Return the bytes of every storage that a tensor within Python's reach holds, by address.

    Scalars are left out, such as Adam's counters of steps.
    """
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.dim() > 0]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes() > 0}


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
# For the order of gathers, the counter also notes which unit is gathered and how many are whole at
# that moment. On gloo nothing shows that the unit before *computes* meanwhile; what is counted are
# the gathers that were launched while it still had its weights.


# %%
class WatchedUnits(CountedCommunication):
    """Notes at each all-gather which flat tensor it fills, and how many of them are whole."""

    def __init__(self, flats: list[Flat]) -> None:
        super().__init__()
        self.flats = flats
        self.gathered: list[int] = []
        self.whole: list[int] = []

    def record(self, func, args: tuple, kwargs: dict) -> None:
        known = len(self.calls("all_gather"))
        super().record(func, args, kwargs)
        if len(self.calls("all_gather")) > known:
            addresses = {leaf.data_ptr() for leaf in tree_leaves(args) if torch.is_tensor(leaf)}
            in_memory = [flat.full_N.untyped_storage().size() > 0 for flat in self.flats]
            for i, flat in enumerate(self.flats):
                if in_memory[i] and flat.full_N.data_ptr() in addresses:
                    self.gathered.append(i)
            self.whole.append(sum(in_memory))


# %% [markdown]
# One run trains three steps and looks at the last one.


# %%
def check_stage(
    stage: int, layout: torch.dtype, x_RBD: torch.Tensor, alone: dict[str, torch.Tensor]
) -> None:
    """Train in stage 2 or 3; claim bytes, elements, order and weights of the last step."""
    name = f"stage {stage}, {str(layout).removeprefix('torch.')}"
    x_BD = x_RBD[RANK].to(layout)
    before = live_storages()
    model = network(RANK, x_BD.device)
    P = sum(parameter.numel() for parameter in model.parameters())
    zero = MiniFSDP(model, ADAM, [*model], stage, layout, CLIP)
    for _ in range(STEPS):
        with WatchedUnits(zero.trained) as passes:
            for piece_BD in x_BD.chunk(PIECES):
                (loss_of(model, piece_BD) / PIECES).backward()
        dist.barrier()
        time.sleep(0.1)  # gloo's threads hold what they have sent for a moment longer
        held = sum(size for at, size in live_storages().items() if at not in before)
        with CountedCommunication() as update:
            norm = zero.step()
    padding = UNITS * (WORLD_SIZE - 1) if 840 % WORLD_SIZE else 0  # elements, at most
    size = SIZES[layout]
    sharded = size[GRADIENT] + size[OPTIMIZER] + (size[WEIGHT] if stage == 3 else 0)
    expected = sum(size) - sharded + sharded / WORLD_SIZE
    slack = 16 * padding / P
    claim(f"{name}: bytes held per parameter", expected, held / P, atol=slack, question=1)
    check_elements(name, stage, passes, update, P, padding / P)
    if stage == 3:
        check_order(name, passes)
    if layout == torch.float32:
        state = zero.full_state_dict() | {"norm": norm}
        error = max((state[key] - alone[key]).abs().max().item() for key in alone)
        claim(f"{name}: error against one process", 0, error, atol=SLACK)
    else:
        unlike = [(flat.shard_K != flat.master_K.to(layout)).sum() for flat in zero.trained]
        claim(f"{name}: weights unlike their master", 0, sum(unlike))


def check_elements(
    name: str,
    stage: int,
    passes: CountedCommunication,
    update: CountedCommunication,
    P: int,
    padding: float,
) -> None:
    reduced = passes.elements("reduce_scatter") / P / PIECES
    gathered = passes.elements("all_gather") / P / PIECES
    at_update = update.elements("all_gather") / P
    per_pass = 2 if stage == 3 else 0
    per_update = 1 if stage == 2 else 0
    claim(f"{name}: reduced per pass / P", 1, reduced, atol=padding, question=2)
    claim(f"{name}: gathered per pass / P", per_pass, gathered, atol=2 * padding, question=2)
    claim(f"{name}: gathered per update / P", per_update, at_update, atol=padding, question=2)
    calls = [*passes.log, *update.calls("all_gather")]
    per_element = sum(call.nbytes for call in calls) / sum(call.elements for call in calls)
    claim(f"{name}: bytes per element", 2 if "bfloat16" in name else 4, per_element)


def check_order(name: str, passes: WatchedUnits) -> None:
    claim(f"{name}: units whole at once", 2, max(passes.whole, default=0), question=3)
    forward = list(range(UNITS))
    expected = (forward + forward[::-1]) * PIECES
    pairs = zip(expected, passes.gathered, strict=False)
    in_order = sum(unit == gathered for unit, gathered in pairs)
    claim(f"{name}: gathers in the order 0123 3210", len(expected), in_order, question=4)
    early = passes.whole.count(2) / PIECES  # in forward and in backward, all but the first
    claim(f"{name}: gathers beside a whole unit", 2 * (UNITS - 1), early, question=4)


# %% [markdown]
# PyTorch's own `fully_shard` (FSDP2) trains the same model beside ours. It shards each parameter
# along its first dimension instead of flattening a unit.


# %%
def check_pytorch(x_RBD: torch.Tensor, alone: dict[str, torch.Tensor]) -> None:
    model = network(0, x_RBD.device)
    P = sum(parameter.numel() for parameter in model.parameters())
    mesh = dist.init_device_mesh(x_RBD.device.type, (WORLD_SIZE,))
    for unit in model:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = ADAM(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        with CountedCommunication() as passes:
            loss_of(model, x_RBD[RANK]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    errors = []
    for name, parameter in model.named_parameters():
        errors.append((parameter.full_tensor() - alone[name]).abs().max().item())
    claim("PyTorch: error against one process", 0, max(errors), atol=SLACK)
    if WORLD_SIZE == 1:
        blocked("PyTorch: reduced and gathered per pass / P", needs="2 ranks")
        return
    gathered = passes.elements("all_gather") / P
    reduced = passes.elements("reduce_scatter") / P
    claim("PyTorch: reduced per pass / P", 1, reduced, atol=0.1)
    claim("PyTorch: gathered per pass / P", 2, gathered, atol=0.1)


# %% [markdown]
# ## 6. On GPUs: what the allocator says, and what a step takes
#
# The same count by CUDA's allocator, for a billion parameters in sixteen units: what is allocated
# when backward has ended, the peak within a step, and its time. The peak of stage 3 adds two whole
# units and two whole gradients to the shards. (cuBLAS keeps some 32 MB: hence the slack.)


# %%
def measure_on_gpus(device: torch.device) -> None:
    if device.type == "cpu" or WORLD_SIZE == 1:
        blocked("GPU: bytes allocated per parameter, stage 2", needs="2 GPUs")
        blocked("GPU: bytes allocated per parameter, stage 3", needs="2 GPUs")
        return
    x_BD = torch.randn(64, 8192, device=device, dtype=torch.bfloat16)
    for stage in (2, 3):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        model = nn.Sequential()
        for _ in range(16):
            model.append(nn.Linear(8192, 8192, bias=False, device=device))
        P = sum(parameter.numel() for parameter in model.parameters())
        zero = MiniFSDP(model, torch.optim.Adam, [*model], stage, torch.bfloat16)
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            start.record()
            loss_of(model, x_BD).backward()
            held = (torch.cuda.memory_allocated() - before) / P
            zero.step()
            end.record()
        end.synchronize()
        peak = (torch.cuda.max_memory_allocated() - before) / P
        expected = 16 / WORLD_SIZE if stage == 3 else 2 + 14 / WORLD_SIZE
        claim(f"GPU: bytes allocated per parameter, stage {stage}", expected, held, atol=0.3)
        print0(f"{'':13}peak of a step: {peak:.1f} bytes per parameter,", end=" ")
        print0(f"{start.elapsed_time(end):.0f} ms")
        del model, zero


# %% [markdown]
# ## What you should have seen
#
# 1. Stage 2 holds 5.5 bytes per parameter, 2 + 14/n; stage 3 holds 4, or 16/n. Only stage 3 has no
#    part that stays: 7 billion parameters are 39 GB per rank in stage 2 and 28 GB in stage 3, and
#    on 64 ranks 15.5 GB and 1.75 GB.
# 2. Each micro-batch hands P elements to reduce-scatters. Stage 3 gathers 2P more in each, once
#    forward and once backward; stage 2 gathers P in the optimizer's step. With one micro-batch per
#    step that is 2P and 3P, hence the "1.5 times the communication" of stage 3. With k of them it
#    is (k + 1) P and 3k P, where data parallelism under `no_sync` has 2P, the two halves of one
#    all-reduce: accumulate as little as you can. (gloo moves more, since its reduce-scatter is an
#    all-reduce inside.)
# 3. Two: the one that computes and the one that is on its way. Whole weights and gradients of two
#    units come on top of 16P/n; large units hide their communication better and cost more memory.
# 4. 0 1 2 3 forward and 3 2 1 0 backward. All gathers but the first of each pass, six of eight, are
#    launched while another unit still computes. Unit 3 is gathered twice in a row: it was freed
#    after forward, just before backward needs it. FSDP2 lets you keep it
#    (`reshard_after_forward=False` for the last block).
#
# PyTorch's `fully_shard` hands over the same and ends at the same weights.
#
# **Try.** With the wrong neighbor the weights stay right, since a unit that was not prefetched is
# gathered when it is needed. But backward begins by gathering unit 0, which it needs last, and
# waits for each of the others; only the claim on their order sees it. When `copy_` replaces `add_`,
# each micro-batch overwrites the one before: with one micro-batch per step nothing would fail.
#
# On real systems: FSDP1 flattened as we do; FSDP2 shards each parameter, so that frozen weights and
# optimizers that look at matrices fit in. At a thousand ranks, gathering each unit over the whole
# cluster takes too long; **hybrid sharding** shards within a node and replicates over nodes
# (exercises/09_hybrid_sharding). `register_forward_pre_hook` runs on `module(x)`: calling
# `module.forward(x)` or another method finds weights that are not there.


# %%
def main() -> None:
    command_line()
    launch()
    device = setup()
    generator = torch.Generator().manual_seed(2)
    x_RBD = torch.randn(WORLD_SIZE, 8, D, generator=generator).to(device)
    alone = on_one_process(x_RBD.flatten(0, 1))
    gc.freeze()  # what there is already need not be searched for tensors
    for stage in (2, 3):
        for layout in SIZES:
            check_stage(stage, layout, x_RBD, alone)
    gc.unfreeze()
    check_pytorch(x_RBD, alone)
    measure_on_gpus(device)
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


def launch() -> None:
    """Plain `python lesson.py`: be torchrun, one rank per GPU if there are several, else 4."""
    if "RANK" in os.environ or WORLD_SIZE > 1:
        return  # this is a rank already: torchrun or srun has started it
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    gpus = torch.cuda.device_count()
    ranks = gpus if gpus > 1 else 4
    os.environ["LAUNCHER"] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores
    logging.disable()  # the rank that fails says why
    try:
        torchrun(["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}", *sys.argv])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        sys.exit(f"rank {rank} was ended by {failure.signal_name()}" if failure.exitcode < 0 else 1)
    except SignalException as error:
        sys.exit(128 + error.sigval)
    sys.exit()


def setup() -> torch.device:
    """Join the process group: NCCL if every local rank has a GPU of its own, else gloo."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the launcher
    parent = str(os.getppid())
    if os.environ.pop("LAUNCHER", parent) != parent:
        sys.exit(1)  # it was killed before that line
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank that waits inside C++ too
    if "RANK" not in os.environ:
        name_ranks_as_torchrun_does()
    gpus = torch.cuda.device_count()
    local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    if gpus >= local_ranks:
        backend = "nccl"
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group(backend, device_id=device, timeout=timedelta(minutes=2))
    else:
        backend = f"gloo ({gpus} GPUs visible, {local_ranks} ranks here)"
        device = torch.device("cpu")
        dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    sys.excepthook = crash  # only now: init_process_group sets one of its own
    print0(f"{WORLD_SIZE} ranks, {backend}, torch {torch.__version__}\n")
    print0(f"{'':13}{'claim':50} {'predicted':22} {'measured':>11}")
    return device


def name_ranks_as_torchrun_does() -> None:
    """Under `srun`, one task per rank: set the variables that torchrun would have set."""
    slurm = os.environ
    first_node = re.match(r"([^,[]+)(?:\[(\d+))?", slurm["SLURM_STEP_NODELIST"])  # of "gpu[03-07]"
    tasks_here = re.match(r"\d+", slurm["SLURM_STEP_TASKS_PER_NODE"])  # of "4(x2)"
    os.environ |= {"RANK": str(RANK), "WORLD_SIZE": str(WORLD_SIZE)}
    os.environ |= {"LOCAL_RANK": slurm["SLURM_LOCALID"], "LOCAL_WORLD_SIZE": tasks_here[0]}
    os.environ["MASTER_ADDR"] = first_node[1] + (first_node[2] or "")
    os.environ["MASTER_PORT"] = str(20_000 + int(slurm["SLURM_JOB_ID"]) % 10_000)


def print0(*words: object) -> None:
    """Print on rank 0 only."""
    if RANK == 0:
        print(*words, flush=True)


def refuse(rule: str) -> None:
    """End before the first collective with one message, from rank 0: rule, value, remedy."""
    if RANK != 0:
        time.sleep(30)  # the launcher ends us meanwhile
    sys.exit(f"{sys.argv[0]}: {rule}")


def claim(
    text: str,
    predicted: float,
    measured: float,
    sign: str = "=",
    atol: float = 0.0,
    question: int | None = None,
    timed: bool = False,
    rank: int | None = None,
) -> None:
    """Check `measured sign predicted` (=, <=, >=), give or take `atol`, on all ranks; all call.

    The worst rank is shown, or `rank`. `question` is the number in *Predict* that this answers;
    `timed` says that a clock decides.
    """
    pairs = [(float(predicted), float(measured), float(atol))]
    if dist.is_initialized():
        pairs = pairs * WORLD_SIZE
        dist.all_gather_object(pairs, pairs[0])
    errors = []
    for p, m, slack in pairs:
        error = {"=": abs(m - p), "<=": m - p, ">=": p - m}[sign] - slack
        errors.append(math.inf if math.isnan(error) else error)
    worst = errors.index(max(errors)) if rank is None else rank
    verdict = "PASS" if errors[worst] <= 0 else "FAIL"
    p, m, slack = pairs[worst]
    between = f"{sign:>2} {readable(p)}" + (f" ±{slack:.2g}" if slack else "")
    mark = f"{question}." if question else ""
    print0(f"  {verdict:7} {mark:2} {text:50} {between:22} {readable(m):>11}")
    if verdict == "FAIL":
        print0(f"{'':13}off by {m - p:.3g} on rank {worst}")
    row = {"claim": text, "verdict": verdict, "sign": sign, "rank": worst, "slack": slack}
    row |= {"predicted": p, "measured": m if math.isfinite(m) else str(m)}  # JSON knows no NaN
    ledger.append(row | {"question": question, "timed": timed})


def readable(x: float) -> str:
    """Whole numbers in full, others to six digits."""
    return f"{x:,.0f}" if x.is_integer() and abs(x) < 1e12 else f"{x:,.6g}"


def blocked(text: str, needs: str) -> None:
    """Record what this machine cannot answer, and what would."""
    print0(f"  BLOCKED    {text:50} needs {needs}")
    ledger.append({"claim": text, "verdict": "BLOCKED", "needs": needs})


def crash(*error: object) -> None:
    """Leave without ceremony, since peers may be stuck. The first rank that fails says why."""
    first = dist.distributed_c10d._get_default_store().add("crashes", 1) == 1
    time.sleep(1 if first else 30)  # the launcher ends us meanwhile, if a peer's death is the cause
    print(f"rank {RANK}:", file=sys.stderr)
    sys.__excepthook__(*error)
    os._exit(1)


def finish() -> None:
    """Write the ledger where LESSON_JSON says; exit 1 if a claim failed or none was made."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    verdicts = Counter(row["verdict"] for row in ledger)
    print0(f"\n  {verdicts['PASS']} PASS, {verdicts['FAIL']} FAIL, {verdicts['BLOCKED']} BLOCKED")
    if RANK == 0 and "LESSON_JSON" in os.environ:
        about = {"ranks": WORLD_SIZE, "torch": torch.__version__, "python": sys.version}
        about["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        about |= {"cpus": os.cpu_count(), "date": time.strftime("%F"), "ledger": ledger}
        with open(os.environ["LESSON_JSON"], "w") as file:
            json.dump(about, file, indent=1)
    code = int(verdicts["FAIL"] > 0 or verdicts["PASS"] == 0)
    if __name__ == "__main__":
        os._exit(code)  # threads of a group that something still holds can abort a plain exit
    sys.exit(code)


if __name__ == "__main__":
    main()
