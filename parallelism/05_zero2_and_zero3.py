"""ZeRO-2 and ZeRO-3 from scratch: gather the weights, compute, free them (FSDP)
=============================================================================

**Question.** How can n ranks train a model that none of them could hold, and what does it cost?

**Predict**, and write it down before you run. A model is a chain of four equal units, P
parameters in all. Four ranks train it in bfloat16 with Adam, in steps of two micro-batches.
Gradients travel in bfloat16 and are added up in float32.

1. How many bytes per parameter does a rank hold when backward has ended: in stage 2 (optimizer and
   gradients sharded) and in stage 3 (weights, too)?
2. How many elements per parameter go into reduce-scatters, and come out of all-gathers, on a rank:
   in the first micro-batch of a step, and in the second?
3. In stage 3, the weights of how many units are whole at once?
4. In which order does stage 3 gather the units 0, 1, 2, 3 in a micro-batch's forward and backward,
   and how many of these gathers can travel while another unit computes?
5. At its worst moment, stage 1 holds 4 + 16/n bytes per parameter. Does stage 3 hold more or fewer
   at its worst: with four units, and with the whole model as a single unit?

**Run.**

    torchrun --standalone --nproc-per-node=4 05_zero2_and_zero3.py  # NCCL on 4 GPUs, else gloo
    python 05_zero2_and_zero3.py                                    # the same, started for you

Not run on several GPUs.

**Try.** In `make_whole` leave out the last two lines: is the training still right? In `land` copy
the mean into the shard's gradient instead of adding it: what fails, and what would not?

**Before.** parallelism/02_fsdp_zero.py: sixteen bytes per parameter, and stage 1.

**Next.** exercises/21_gather_and_free. fsdp/01_fsdp_basics.py uses PyTorch's `fully_shard`;
parallelism/06_tensor_parallel.py splits the multiplications themselves.
"""

import argparse
import ctypes
import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: N elements of a unit's weights with their padding, K = N / n of a rank's shard; R ranks
# have B samples of D features each. The U units of a model have P parameters together.

# %% [markdown]
# ## 1. A unit's weights come and go
#
# In stage 1 of ZeRO, weights and gradients are still whole on every rank. But a layer's weights are
# needed only while that layer computes. So divide the model into **units** whose weights come and
# go together; in a transformer a unit is usually a block. Each rank keeps a **shard**, one n-th, of
# every unit. Before a unit computes, its weights are gathered from all ranks, and then freed again:
#
#     slot     wait F0   F1   F2   F3  wait B3   B2   B1   B0    F forward, B backward
#     unit 0    <#  ##   .    .    .    .   .    .    <#   ##    ## its weights are whole
#     unit 1    .   <#   ##   .    .    .   .    <#   ##   .     <# they are being gathered
#     unit 2    .   .    <#   ##   .    .   <#   ##   .    .     .  only this rank's shard is there
#     unit 3    .   .    .    <#   ##   <#  ##   .    .    .
#
# Backward needs the same weights, so they are gathered a second time. While one unit computes, the
# next one's weights already travel: they are **prefetched**. Only the first gather of each
# direction has nothing to hide behind.
#
# The weights of a unit lie end to end in one flat tensor, with a few zeros so that n divides its
# length. The shard stays in float32, because the optimizer updates it; the whole weights are in the
# dtype that computes. `whole_N` is always the same tensor, but its memory is not always there:
# `resize_(0)` on its storage gives the memory back. Views of the tensor, which autograd saves for
# backward, stay valid, and show the weights again once they are gathered into the same storage.


# %%
class Unit:
    """A module whose weights are whole while it computes; in between there is only a shard.

    shard_K    this rank's n-th of the weights laid end to end: what the optimizer updates
    whole_N    all of them, in the dtype that computes; its memory comes and goes
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.module = module
        self.shapes = {name: p.shape for name, p in module.named_parameters()}
        flat = torch.cat([p.detach().flatten() for p in module.parameters()])
        flat_N = F.pad(flat, (0, -len(flat) % WORLD_SIZE))
        self.shard_K = nn.Parameter(flat_N.chunk(WORLD_SIZE)[RANK].clone())
        self.whole_N = torch.empty_like(flat_N, dtype=dtype)
        self.gathering: dist.Work | None = None
        module.to("meta")  # its own parameters keep their shapes, and no memory
        self.free()

    def gather(self) -> None:
        """Start to make the weights whole, unless they are, or are on their way."""
        if self.has_memory():
            return
        self.whole_N.untyped_storage().resize_(self.whole_N.nbytes)
        mine_K = self.whole_N.chunk(WORLD_SIZE)[RANK]
        mine_K.copy_(self.shard_K.detach())  # rounded to the dtype that computes
        self.gathering = dist.all_gather_into_tensor(self.whole_N, mine_K, async_op=True)

    def wait(self) -> None:
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def free(self) -> None:
        self.whole_N.untyped_storage().resize_(0)

    def has_memory(self) -> bool:
        return self.whole_N.untyped_storage().nbytes() > 0


# %% [markdown]
# ## 2. The gradient of an all-gather is a reduce-scatter
#
# What does autograd see? The shards are the parameters, and the whole weights are a function of
# them: the all-gather. Through it the losses of *all* ranks depend on my shard. So its gradient is
# my part of the sum of all ranks' whole gradients. That is what a reduce-scatter computes.
#
# `compute` cuts the whole weights into views of the right shapes and lends them to the module. In
# backward, autograd joins the gradients of these views into one flat one, for `Gather.backward`.
# By then all operations that used a weight are through, so the weights are no longer needed.


# %%
class Gather(torch.autograd.Function):
    """The whole weights as a function of the shard. Backward gives their gradient to `reduce`."""

    @staticmethod
    def forward(ctx: object, shard_K: Tensor, whole_N: Tensor, reduce: Callable) -> Tensor:
        ctx.reduce = reduce
        return whole_N.data  # .data: autograd need not notice when the memory is filled again

    @staticmethod
    def backward(ctx: object, grad_N: Tensor) -> tuple[None, None, None]:
        ctx.reduce(grad_N)
        return None, None, None  # the sum is still on its way: `land` puts it into .grad


def compute(unit: Unit, x: Tensor, reduce: Callable) -> Tensor:
    """Call a unit whose weights are whole; backward will hand their gradient to `reduce`."""
    whole_N = Gather.apply(unit.shard_K, unit.whole_N, reduce)
    sizes = [shape.numel() for shape in unit.shapes.values()]
    *pieces, _ = whole_N.split([*sizes, len(whole_N) - sum(sizes)])  # the last one is padding
    weights = {}
    for (name, shape), piece in zip(unit.shapes.items(), pieces, strict=True):
        weights[name] = piece.view(shape)
    return functional_call(unit.module, weights, (x,))


# %% [markdown]
# The reduce-scatter runs while the next unit computes. So it is started in one place, and it
# **lands** in another: there we wait for it, and add this rank's part to the shard's gradient, in
# float32. Ranks average: they divide before they add, because in float16 a sum of n gradients may
# overflow where their mean does not. Several micro-batches add up on the shards, and each of them
# communicates, since no rank has the memory to add up whole gradients, as under DDP's `no_sync`.


# %%
class Reduction:
    """The gradient of a unit on its way to the ranks that own its shards."""

    def __init__(self, unit: Unit, grad_N: Tensor) -> None:
        self.unit = unit
        self.grad_N = grad_N.div_(WORLD_SIZE)
        self.mine_K = self.grad_N.chunk(WORLD_SIZE)[RANK]
        self.work = dist.reduce_scatter_tensor(self.mine_K, self.grad_N, async_op=True)

    def land(self) -> None:
        self.work.wait()
        shard_K = self.unit.shard_K
        if shard_K.grad is None:
            shard_K.grad = torch.zeros_like(shard_K)
        shard_K.grad += self.mine_K
        self.grad_N.untyped_storage().resize_(0)  # at once, even if gloo's thread still holds it


# %% [markdown]
# ## 3. A step: gather, compute, free, and all of it again backward
#
# What remains is the right order. Each unit has four moments; on the right are FSDP2's names:
#
#     moment               what happens to unit k                             in FSDP2
#     before forward       gather k and wait; start to gather k+1             unshard
#     after forward        free k                                             reshard
#     before backward      gather k and wait; start to gather k-1             unshard
#     gradient is there    free k; start to reduce its gradient, land k+1's   reshard, reduce
#
# The third moment is a hook on the unit's output: autograd calls it when the gradient of that
# output is there, before it goes on into the unit. The fourth is `Gather.backward`. Unit 0 is the
# last one in backward; nothing is left to hide its reduction, so it lands at once.
#
# **Stage 2** is the same with whole weights that stay: `release` does nothing. They are gathered on
# their first use after an update, and `free` drops them once the optimizer has changed the shards.


# %%
class ZeRO(nn.Module):
    """A chain of modules, each of them a unit, the same on every rank; stage 2 or 3 of ZeRO.

    `parameters()` are this rank's shards, for an optimizer that treats each element by itself. Call
    `free` after each of its steps.
    """

    def __init__(
        self, modules: Iterable[nn.Module], stage: int = 3, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.units = [Unit(module, dtype) for module in modules]
        self.shards = nn.ParameterList([unit.shard_K for unit in self.units])
        self.stage = stage
        self.prefetch = True
        self.reducing: list[Reduction] = []

    def forward(self, x: Tensor) -> Tensor:
        for k, unit in enumerate(self.units):
            self.make_whole(k, following=k + 1)
            x = compute(unit, x, reduce=partial(self.after_backward, k))
            self.release(k)
            if x.requires_grad:
                x.register_hook(partial(self.before_backward, k))
        return x

    def before_backward(self, k: int, grad: Tensor) -> None:
        self.make_whole(k, following=k - 1)

    def after_backward(self, k: int, grad_N: Tensor) -> None:
        self.release(k)
        self.reducing.append(Reduction(self.units[k], grad_N))
        stay_under_way = 1 if k > 0 else 0
        while len(self.reducing) > stay_under_way:
            self.reducing.pop(0).land()

    def make_whole(self, k: int, following: int) -> None:
        self.units[k].gather()  # unless it was prefetched
        self.units[k].wait()
        if self.prefetch and 0 <= following < len(self.units):
            self.units[following].gather()

    def release(self, k: int) -> None:
        if self.stage == 3:
            self.units[k].free()

    def free(self) -> None:
        """Free all whole weights: after an update they are out of date."""
        for unit in self.units:
            unit.free()


# %% [markdown]
# ## 4. Why stage 3 can need more memory than stage 1
#
# When backward has ended, stage 3 holds 16/n bytes per parameter: weight (4), gradient (4) and
# Adam's two moments (8), sharded and in float32. Whole things come on top. The worst moment is when
# autograd has just joined the gradient of unit k. Then, in bytes per parameter *of a unit*:
#
#     weights of unit k, and of unit k-1, which was prefetched                     2 + 2
#     gradients of unit k, one per weight, and the flat one that joins them        2 + 2
#     flat gradient of unit k+1, which is being reduced                                2
#
# That is 10 bytes: in a model of U equal units (three or more) 10/U per parameter of the model.
# Stage 1 has whole weights and gradients in bfloat16, 2 + 2, and while its optimizer steps 16/n as
# well. So stage 3 is smaller by 4 - 10/U, whatever n is. On many ranks 16/n is little, and the
# units are nearly all that counts. With one or two units stage 3 saves nothing.

# %% [markdown]
# ## 5. The same chain in PyTorch
#
# `fully_shard` (FSDP2) finds the four moments by hooks on modules, so a model may have any form. It
# cuts each weight by rows; FSDP1 flattened a unit's weights, as we do. Our `dtype` is `param_dtype`
# in its `MixedPrecisionPolicy`, that of `grad_N` is `reduce_dtype`. Stage 2 is
# `reshard_after_forward=False` with `set_reshard_after_backward(False)` in all micro-batches but
# the last. Backward prefetches as here. In forward the host, which runs ahead of the GPU, asks for
# the next unit early enough, or `set_modules_to_forward_prefetch` does.
#
# **What real modules ask for besides:** weights that units share, frozen weights (whose gradient
# cannot say that they may be freed), several dtypes, outputs of any structure, units that are
# called twice or recomputed, a gradient norm over all shards, checkpoints for any number of ranks.
# That is FSDP2's job. What it gathers, frees and reduces, and when, is what you have read.

# %% [markdown]
# ## 6. How it is measured
#
# Three steps of two micro-batches. All sizes are multiples of n, so nothing is padded. The
# **oracle** is one process that sees all samples. Some 100 additions per gradient come in another
# order, which moves it by up to 100 x 2**-24 of its terms' size. The slope of Adam's update is at
# most lr / eps = 1. So three steps may move a weight by 3 x 100 x 2**-24.


# %%
U, STEPS, PIECES, B = 4, 3, 2, 4
D = WORLD_SIZE * max(1, 432 // WORLD_SIZE)
HIDDEN = WORLD_SIZE * max(1, 120 // WORLD_SIZE)
P = U * 2 * D * HIDDEN
ROUNDING = 100 * 2**-24
ADAM = partial(torch.optim.Adam, lr=0.01, eps=0.01)


def network(device: torch.device) -> list[nn.Module]:
    torch.manual_seed(0)
    units = []
    for _ in range(U):
        up = nn.Linear(D, HIDDEN, bias=False)
        down = nn.Linear(HIDDEN, D, bias=False)
        units.append(nn.Sequential(up, nn.ReLU(), down).to(device))
    return units


def samples(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(WORLD_SIZE, B, D, generator=generator).to(device)


def loss_of(model: nn.Module, x_BD: Tensor) -> Tensor:
    return (model(x_BD) - x_BD).square().mean()


def far_from(mine_K: Tensor, expected: Iterable[Tensor]) -> float:
    """Return how far all ranks' shards together are from these tensors laid end to end."""
    expected_N = torch.cat([tensor.detach().flatten() for tensor in expected])
    whole_N = torch.empty_like(expected_N)
    dist.all_gather_into_tensor(whole_N, mine_K.detach())
    return (whole_N - expected_N).abs().max().item()


# %% [markdown]
# One instrument sees every operation of a rank, beneath torch's dispatcher. It adds up the bytes of
# all storages that were made and are still there, but for scalars and the batch. It logs what goes
# into reduce-scatters and comes out of all-gathers, FSDP2's too; a ring sends (n-1)/n of that. And
# it counts the units that have their weights while one is gathered.


# %%
class Watch(TorchDispatchMode):
    """Counts the bytes of all tensors made while it is on, and logs collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.units: list[Unit] = []
        self.alive = weakref.WeakValueDictionary()  # storages, by identity
        self.start_pass()

    def start_pass(self) -> None:
        self.log: list[tuple[str, int, list[bool], int]] = []  # as appended below
        self.most = self.bytes_now()

    def bytes_now(self) -> int:
        return sum(storage.nbytes() for storage in self.alive.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its local tensors come by here in a moment
        name = func.name().replace("_", "")
        if name.startswith(("c10d::allgather", "c10d::reducescatter")):
            array = max(args[:2], key=Tensor.numel)  # of output and input
            fills = [unit.whole_N.data_ptr() == array.data_ptr() for unit in self.units]
            whole = sum(unit.has_memory() for unit in self.units)
            self.log.append((name, array.nbytes, fills, whole))
        result = func(*args, **(kwargs or {}))
        made = [] if func.is_view else tree_leaves(result)
        for tensor in made:
            if isinstance(tensor, Tensor) and tensor.dim() > 0 and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                self.alive[id(storage)] = storage
        self.most = max(self.most, self.bytes_now())
        return result


def bytes_in(log: list[tuple], operation: str) -> int:
    return sum(nbytes for name, nbytes, _, _ in log if operation in name)


def train(stage: int, dtype: torch.dtype, device: torch.device, one_unit: bool = False) -> tuple:
    """Return the model and, of its last step, the logs, the bytes held at the end, and the most."""
    with Watch() as watch:
        x_BD = samples(device)[RANK].to(dtype)
        modules = [nn.Sequential(*network(device))] if one_unit else network(device)
        model = ZeRO(modules, stage, dtype)
        watch.units = model.units
        optimizer = ADAM(model.parameters())
        for _ in range(STEPS):
            optimizer.zero_grad()
            logs = []
            for piece_BD in x_BD.chunk(PIECES):
                watch.start_pass()
                (loss_of(model, piece_BD) / PIECES).backward()
                logs.append(watch.log)
            held = (watch.bytes_now() - x_BD.nbytes) / P
            most = (watch.most - x_BD.nbytes) / P
            optimizer.step()
            model.free()
    return model, logs, held, most


# %% [markdown]
# Bytes and order in bfloat16; in float32 three steps against one process, one pass against FSDP2.


# %%
def check_stage(stage: int, device: torch.device) -> None:
    name = f"stage {stage}, bfloat16"
    _, logs, held, most = train(stage, torch.bfloat16, device)
    expected = (16 + 2 * WORLD_SIZE) / WORLD_SIZE if stage == 2 else 16 / WORLD_SIZE
    claim(f"{name}: bytes held per parameter", expected, held, question=1)
    gathers = (1, 0) if stage == 2 else (2, 2)
    for number, log, gather in zip(("1st", "2nd"), logs, gathers, strict=True):
        reduced = bytes_in(log, "reducescatter") / 2 / P  # two bytes per element
        gathered = bytes_in(log, "allgather") / 2 / P
        claim(f"{name}: reduced in the {number} pass / P", 1, reduced, question=2)
        claim(f"{name}: gathered in the {number} pass / P", gather, gathered, question=2)
    if stage == 3:
        check_order(name, [*logs[0], *logs[1]])
        *_, most_of_one = train(stage, torch.bfloat16, device, one_unit=True)
        in_stage_1 = 4 + 16 / WORLD_SIZE
        text = "most bytes per parameter, less stage 1's"
        claim(f"4 units: {text}", 10 / 4 - 4, most - in_stage_1, atol=0.05, question=5)
        claim(f"1 unit: {text}", 6 - 4, most_of_one - in_stage_1, atol=0.05, question=5)


def check_order(name: str, log: list[tuple]) -> None:
    gathers = [(fills, whole) for call, _, fills, whole in log if "allgather" in call]
    expected = [0, 1, 2, 3, 3, 2, 1, 0] * PIECES
    in_order = sum(fills[k] for k, (fills, _) in zip(expected, gathers, strict=False))
    whole = [count for _, count in gathers]
    claim(f"{name}: units whole at once", 2, max(whole, default=0), question=3)
    claim(f"{name}: gathers in the order 0123 3210", len(expected), in_order, question=4)
    early = whole.count(2) / PIECES  # all but the first of forward and of backward
    claim(f"{name}: gathers next to a whole unit", 2 * (U - 1), early, question=4)


def check_one_process(device: torch.device) -> None:
    alone = nn.Sequential(*network(device))
    optimizer = ADAM(alone.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(alone, samples(device).flatten(0, 1)).backward()
        optimizer.step()
    for stage in (2, 3):
        model, *_ = train(stage, torch.float32, device)
        pairs = zip(model.units, alone, strict=True)
        error = max(far_from(unit.shard_K, module.parameters()) for unit, module in pairs)
        claim(f"stage {stage}, float32: error against one process", 0, error, atol=STEPS * ROUNDING)


def check_pytorch(device: torch.device) -> None:
    ours = ZeRO(network(device))
    theirs = nn.Sequential(*network(device))
    mesh = dist.init_device_mesh(device.type, (WORLD_SIZE,))
    for unit in theirs:
        fully_shard(unit, mesh=mesh)
    fully_shard(theirs, mesh=mesh)
    logs = []
    for model in (ours, theirs):
        with Watch() as watch:
            loss_of(model, samples(device)[RANK]).backward()
        logs.append(watch.log)
    errors = []
    for unit, module in zip(ours.units, theirs, strict=True):
        gradients = [p.grad.full_tensor() for p in module.parameters()]
        errors.append(far_from(unit.shard_K.grad, gradients))
    largest = max(p.grad.abs().max().item() for p in ours.parameters())
    claim("PyTorch: gradients, distance to ours", 0, max(errors), atol=ROUNDING * largest)
    if WORLD_SIZE == 1:
        blocked("PyTorch: bytes in a pass, as ours", needs="2 ranks")
        return
    for operation, done in (("allgather", "gathered"), ("reducescatter", "reduced")):
        expected, measured = (bytes_in(log, operation) for log in logs)
        claim(f"PyTorch: bytes {done} in a pass, as ours", expected, measured)


# %% [markdown]
# ## 7. On GPUs: what the allocator says, and what prefetching hides
#
# Here `wait` holds back the stream that computes, not the host, and NCCL gathers on a stream of its
# own; so both go on at once. First the same bytes by CUDA's allocator, for a billion parameters in
# sixteen units. (The slack is for cuBLAS's 32 MB; it tells 2 + 16/n from 2 + 14/n up to 16 GPUs.)
# Then the time of forward and backward, by CUDA events, in three ways that take turns: with weights
# that stay whole; with gathers that each unit waits for; and with prefetching. What the last two
# take longer is **exposed**. Prefetching must hide at least half of what waiting exposes.


# %%
def ms_of_pass(model: ZeRO, x_BD: Tensor, stage: int, prefetch: bool) -> float:
    """Return the milliseconds that forward and backward take on this GPU."""
    model.stage = stage
    model.prefetch = prefetch
    model.free()
    if stage == 2:
        loss_of(model, x_BD).backward()  # after it all weights stay whole
    dist.barrier()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    loss_of(model, x_BD).backward()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def measure_on_gpus(device: torch.device) -> None:
    memory = {stage: f"GPU: bytes allocated per parameter, stage {stage}" for stage in (2, 3)}
    overlap = "GPU: exposed by prefetching / by waiting"
    if device.type == "cpu" or WORLD_SIZE == 1 or not torch.cuda.is_bf16_supported(False):
        for text in (*memory.values(), overlap):
            blocked(text, needs="2 GPUs with bfloat16")
        return
    x_BD = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated()
    layers = [nn.Linear(8192, 8192, bias=False, device=device) for _ in range(16)]
    model = ZeRO(layers, dtype=torch.bfloat16)
    parameters = WORLD_SIZE * sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.Adam(model.parameters())
    held = {}
    for stage in (2, 2, 3):  # Adam's moments are there after the first step
        model.stage = stage
        loss_of(model, x_BD[:64]).backward()
        held[stage] = (torch.cuda.memory_allocated() - before) / parameters
        optimizer.step()
        model.free()
    for stage, text in memory.items():
        claim(text, 16 / WORLD_SIZE + (2 if stage == 2 else 0), held[stage], atol=0.1)
    ways = {"no gathers": (2, True), "waiting": (3, False), "prefetching": (3, True)}
    times = {way: [] for way in ways}
    for _ in range(7):
        for way, (stage, prefetch) in ways.items():
            times[way].append(ms_of_pass(model, x_BD, stage, prefetch))
    ms = {way: median(measured[2:]) for way, measured in times.items()}
    print0(f"{'':13}forward and backward, ms: {ms}")
    exposed = {way: ms[way] - ms["no gathers"] for way in ways}
    share = exposed["prefetching"] / exposed["waiting"] if exposed["waiting"] > 0 else math.inf
    claim(overlap, 0.5, share, "<=", timed=True)


# %% [markdown]
# ## What you should have seen
#
# 1. Stage 2 holds 6 bytes per parameter, 2 + 16/n; stage 3 holds 4, or 16/n. Seven billion
#    parameters are 42 and 28 GB per rank; on 64 ranks 15.8 and 1.75 GB. The ZeRO paper's table says
#    2 + 14/n for stage 2: its gradient shards rest in bfloat16 (2/n); ours, like FSDP2's, in
#    float32 (4/n). In stage 3 the paper also counts a bfloat16 shard of the weights (2/n), where we
#    round the float32 shard each time it is gathered. So there both counts are 16/n.
# 2. P elements go through reduce-scatters in each micro-batch. Stage 3 gathers 2P in each, once
#    forward and once backward; stage 2 gathers P in the first micro-batch after an update. With one
#    micro-batch per step that is 2P and 3P: the "1.5 times the communication" of stage 3. With m it
#    is (m + 1) P and 3m P, where DDP under `no_sync` has 2P. So accumulate as little as you can.
# 3. Two: the one that computes and the one that is on its way.
# 4. 0 1 2 3 forward and 3 2 1 0 backward. All gathers but the first of each direction, six of
#    eight, start while another unit still has its weights. Unit 3 is gathered twice in a row; in
#    FSDP2 you can keep it, by `reshard_after_forward=False` for the last block.
# 5. Fewer with four units: 2.5 bytes above 16/n, where stage 1 has 4. More with one unit: 6, for
#    its weights, its gradients and the flat gradient are all whole at once. If one unit is most of
#    your model, say an embedding of many tokens before small blocks, cut it up or take stage 1.
#
# **Try.** Without prefetching the training is right; the rows that count whole units tell, and at
# its worst moment a rank holds 2/U bytes less. On GPUs each unit would wait for its gather. If the
# mean is copied, each micro-batch overwrites the one before, and the error tells; with one
# micro-batch per step nothing would fail.
#
# **When to use it:** stage 3 if whole weights do not fit, else stage 1 or 2, which gather less. On
# real systems gradients often travel in float32, too, since a sum over many ranks loses bits in
# bfloat16. Large units cost memory, small ones make small messages whose latency nothing hides; a
# block is a good size. At a thousand ranks, gathering over the whole cluster takes too long:
# **hybrid sharding** shards within a node and replicates over nodes (exercises/09_hybrid_sharding).
# And a model that no rank can hold must not be built whole, as `network` is here (fsdp/04).


# %%
def main() -> None:
    command_line()
    launch()
    device = setup()
    for stage in (2, 3):
        check_stage(stage, device)
    check_one_process(device)
    check_pytorch(device)
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
    how = f"gloo ({local_ranks} ranks and {gpus} GPUs here)"
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
        counted = f"{devices.count(b'cuda')} GPUs for {WORLD_SIZE} ranks"
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
