"""ZeRO-3 from scratch: gather the weights, compute, free them (FSDP)
==================================================================

**Question.** How can n ranks train a model that none of them could hold, and what does it cost?

**Predict**, and write it down before you run. A model is a chain of four equal units, P parameters
in all, here small enough to be built whole. Four ranks train it by ZeRO stage 3: weights, gradients
and Adam's state are sharded in float32, and a unit is gathered in bfloat16 before it computes.

1. How many bytes per parameter does a rank hold when backward has ended?
2. How many elements per parameter come out of all-gathers, on a rank, in one forward and backward?
3. The weights of how many units are whole at once, if the next ones travel while one computes?
4. How many of the eight gathers in one forward and backward can travel while a unit computes?
5. At the worst moment of backward the weights of question 3 are whole, and the gradients of one
   unit twice, all in bfloat16: one per weight, and joined into a flat tensor to be sent. How many
   bytes per parameter of the model does a rank hold then, in all?

**Run.**

    torchrun --standalone --nproc-per-node=4 05_zero2_and_zero3.py  # NCCL on 4 GPUs, else gloo
    python 05_zero2_and_zero3.py                                    # the same, started for you

Not run on several GPUs.

**Try.** In `make_whole` leave out the last two lines: which claims fail? Put them back, and leave
out the division by WORLD_SIZE in `Gather.backward`: is the training still right?

**Before.** parallelism/02_fsdp_zero.py: sixteen bytes per parameter, and stage 1.

**Next.** exercises/21_gather_and_free. parallelism/06_tensor_parallel.py splits the
multiplications themselves; fsdp/01_fsdp_basics.py uses PyTorch's `fully_shard`.
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
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
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
# dtype that computes. The module itself moves to PyTorch's `meta` device, where its parameters have
# names and shapes, and no memory.


# %%
class Unit:
    """A module whose weights are whole while it computes; in between there is only a shard.

    shard_K    this rank's n-th of the weights laid end to end: what the optimizer updates
    whole_N    all of them, in the dtype that computes; None in between
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, keep: bool) -> None:
        flat = torch.cat([p.detach().flatten() for p in module.parameters()])
        flat_N = F.pad(flat, (0, -len(flat) % WORLD_SIZE))
        self.shard_K = nn.Parameter(flat_N.chunk(WORLD_SIZE)[RANK].clone())
        self.whole_N: Tensor | None = None
        self.module = module.to("meta")
        self.dtype = dtype
        self.keep = keep  # the weights stay whole: section 3

    def gather(self) -> None:
        """Start to make the weights whole, unless they are, or are on their way."""
        if self.whole_N is None:
            N = WORLD_SIZE * len(self.shard_K)
            self.whole_N = self.shard_K.detach().new_empty(N, dtype=self.dtype)
            mine_K = self.whole_N.chunk(WORLD_SIZE)[RANK]
            mine_K.copy_(self.shard_K.detach())  # rounded to the dtype that computes
            self.gathering = dist.all_gather_into_tensor(self.whole_N, mine_K, async_op=True)

    def free(self) -> None:
        if self.whole_N is not None:
            self.gathering.wait()  # else the others' shards may still be written there
            give_back(self.whole_N)
            self.whole_N = None


def give_back(x: Tensor) -> None:
    """Free a tensor's memory at once, even if gloo's thread holds the tensor a moment longer."""
    x.untyped_storage().resize_(0)


# %% [markdown]
# ## 2. The gradient of an all-gather is a reduce-scatter
#
# What does autograd see? The shards are the parameters, and the whole weights are a function of
# them: the all-gather. Through it the losses of *all* ranks depend on my shard. So its gradient is
# my part of the sum of all ranks' whole gradients. That is what a reduce-scatter computes. (Ranks
# average, and divide before they add: in float16 a sum may overflow where the mean does not.)
# Backward through the unit is over by then, so its weights can go.


# %%
class Gather(torch.autograd.Function):
    """The whole weights of a unit as a function of this rank's shard."""

    @staticmethod
    def forward(ctx: object, shard_K: Tensor, unit: Unit) -> Tensor:
        ctx.unit = unit
        return unit.whole_N.detach()

    @staticmethod
    def backward(ctx: object, grad_N: Tensor) -> tuple[Tensor, None]:
        if not ctx.unit.keep:
            ctx.unit.free()
        # In place, for autograd has just made grad_N, and nobody else holds it
        grad_N /= WORLD_SIZE
        mine_K = grad_N.chunk(WORLD_SIZE)[RANK]
        dist.reduce_scatter_tensor(mine_K, grad_N)
        grad_K = mine_K.to(ctx.unit.shard_K.dtype, copy=True)
        give_back(grad_N)
        return grad_K, None


# %% [markdown]
# `compute` cuts the whole weights into pieces of the right shapes and lends them to the module. But
# autograd would save them for backward, while we free them in between and gather them anew. So
# `pack`, which gets each tensor that autograd wants to save, keeps of a weight only where it lies.
# And `unpack` returns what lies there when backward needs it:
#
#     forward     whole_N [ ... | weight | ... ]   --pack-->   shape, stride, offset
#     between     whole_N is freed                             shape, stride, offset
#     backward    whole_N [ ... | weight | ... ]  <--unpack--  shape, stride, offset


# %%
def pack(unit: Unit, saved: Tensor) -> Tensor | tuple:
    if saved.untyped_storage().data_ptr() == unit.whole_N.untyped_storage().data_ptr():
        return saved.shape, saved.stride(), saved.storage_offset()
    return saved.detach()  # an activation


def unpack(unit: Unit, kept: Tensor | tuple) -> Tensor:
    return kept if isinstance(kept, Tensor) else unit.whole_N.as_strided(*kept)


def compute(unit: Unit, x: Tensor) -> Tensor:
    """Call a unit whose weights are whole."""
    whole_N = Gather.apply(unit.shard_K, unit)
    shapes = {name: p.shape for name, p in unit.module.named_parameters()}
    sizes = [shape.numel() for shape in shapes.values()]
    *pieces, _ = whole_N.split([*sizes, len(whole_N) - sum(sizes)])  # the last one is padding
    weights = {}
    for (name, shape), piece in zip(shapes.items(), pieces, strict=True):
        weights[name] = piece.view(shape)
    with saved_tensors_hooks(partial(pack, unit), partial(unpack, unit)):
        return functional_call(unit.module, weights, (x,))


# %% [markdown]
# ## 3. A step: gather, compute, free, and all of it again backward
#
# What remains is the right order. Each unit has four moments; on the right are FSDP2's names:
#
#     moment               what happens to unit k                             in FSDP2
#     before forward       gather k and wait; start to gather k+1             unshard
#     after forward        free k                                             reshard
#     before backward      gather k and wait; start to gather k-1             unshard
#     gradient is there    free k; reduce-scatter its gradient                reshard, reduce
#
# The third moment is a hook on the unit's output: autograd calls it when the gradient of that
# output is there, before it goes on into the unit. The fourth is `Gather.backward`, which waits for
# its reduce-scatter; FSDP2 lets it run while unit k-1 computes. Micro-batches add up on the shards.
# Each of them gathers and reduces anew, since no rank keeps anything whole in between.
#
# **Stage 2** shards the gradients and not the weights: with `keep`, a unit is gathered on its first
# use after an update, and stays whole until the next one.


# %%
class ZeRO(nn.Module):
    """A chain of modules, each of them a unit, the same on every rank.

    They have no buffers and no hooks on parameters, and return no views of their weights. It is
    stage 3, or 2 with `keep`. `parameters()` are this rank's shards, for an optimizer that treats
    each element by itself. Call `free` after each of its steps.
    """

    def __init__(
        self, modules: Iterable[nn.Module], dtype: torch.dtype = torch.float32, keep: bool = False
    ) -> None:
        super().__init__()
        self.units = [Unit(module, dtype, keep) for module in modules]
        self.shards = nn.ParameterList([unit.shard_K for unit in self.units])
        self.prefetch = True

    def forward(self, x: Tensor) -> Tensor:
        for k, unit in enumerate(self.units):
            self.make_whole(k, following=k + 1)
            x = compute(unit, x)
            if not unit.keep:
                unit.free()
            if x.requires_grad:
                x.register_hook(partial(self.before_backward, k))
        return x

    def before_backward(self, k: int, grad: Tensor) -> None:
        self.make_whole(k, following=k - 1)

    def make_whole(self, k: int, following: int) -> None:
        self.units[k].gather()  # unless it was prefetched
        self.units[k].gathering.wait()
        if self.prefetch and 0 <= following < len(self.units):
            self.units[following].gather()

    def free(self) -> None:
        """Free all whole weights: after an update they are out of date."""
        for unit in self.units:
            unit.free()


# %% [markdown]
# ## 4. What is whole comes on top
#
# When backward has ended, stage 3 holds 16/n bytes per parameter: weight (4), gradient (4) and
# Adam's two moments (8), sharded and in float32. Whole things come on top, and most of them when
# backward is through unit k, and autograd has just joined its gradients into a flat one to send
# them. Then, in bytes per parameter *of a unit*:
#
#     weights of unit k, and of unit k-1, which was prefetched            2 + 2
#     gradients of unit k, one per weight, and the flat one               2 + 2
#
# That is 8 bytes, or 8/U per parameter of a model of U equal units. A single unit has no neighbor,
# and has 6. On many ranks 16/n is small, and what is whole is nearly all that counts. (The peak is
# this file's: FSDP2 frees unit k's weights before it joins its gradients, but while unit k computes
# it still holds the flat gradient of unit k+1, which travels.)
#
# **PyTorch's `fully_shard`** (FSDP2) finds the four moments of section 3 by hooks on modules. It
# also copes with what real modules bring along: weights that units share, frozen weights, several
# dtypes, buffers, units that are called twice or recomputed, clipping, checkpoints.

# %% [markdown]
# ## 5. How it is measured
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


def own_part(tensors: Iterable[Tensor]) -> Tensor:
    """Return this rank's n-th of these tensors laid end to end."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).chunk(WORLD_SIZE)[RANK]


# %% [markdown]
# One instrument sees every operation of a rank, beneath torch's dispatcher. It adds up the bytes of
# all storages that were made and are still there, but for scalars and the batch. It logs what goes
# into reduce-scatters and comes out of all-gathers, FSDP2's too; a ring sends (n-1)/n of that. When
# a gather starts, it counts the storages, filled by gathers, that have memory. And it counts matrix
# products: if some run between the start of a gather and the first use of its weights, the gather
# can travel meanwhile.


# %%
@dataclass
class Collective:
    """One all-gather or reduce-scatter."""

    operation: str
    nbytes: int  # of its input or output, whichever is larger
    started: int  # products before it
    used: int = 0  # products before the first use of what it has gathered
    whole: int = 0  # storages of gathered weights that have memory, its own too


class Watch(TorchDispatchMode):
    """Counts the bytes of all tensors made while it is on, and logs collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = weakref.WeakValueDictionary()  # storages, by identity
        self.gathered = weakref.WeakValueDictionary()  # those that all-gathers have filled
        self.unused: dict[int, tuple] = {}  # those that nothing has used yet, and their gathers
        self.products = 0
        self.start_pass()

    def start_pass(self) -> None:
        self.log: list[Collective] = []
        self.most = self.bytes_now()

    def bytes_now(self) -> int:
        return sum(storage.nbytes() for storage in self.alive.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its local tensors come by here in a moment
        name = func.name().replace("_", "")
        for tensor in tree_leaves(args):
            if isinstance(tensor, Tensor) and id(tensor.untyped_storage()) in self.unused:
                _, call = self.unused.pop(id(tensor.untyped_storage()))
                call.used = self.products
        self.products += name == "aten::mm"
        if name.startswith(("c10d::allgather", "c10d::reducescatter")):
            array = max(args[:2], key=Tensor.numel)  # of output and input
            call = Collective(name, array.nbytes, self.products)
            self.log.append(call)
            if "allgather" in name:
                storage = array.untyped_storage()
                self.unused[id(storage)] = (storage, call)
                self.gathered[id(storage)] = storage
                call.whole = sum(one.nbytes() > 0 for one in self.gathered.values())
        result = func(*args, **(kwargs or {}))
        made = [] if func.is_view else tree_leaves(result)
        for tensor in made:
            if isinstance(tensor, Tensor) and tensor.dim() > 0 and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                self.alive[id(storage)] = storage
        self.most = max(self.most, self.bytes_now())
        return result


def bytes_in(log: list[Collective], operation: str) -> int:
    return sum(call.nbytes for call in log if operation in call.operation)


def train(
    device: torch.device, dtype: torch.dtype, keep: bool = False, one_unit: bool = False
) -> tuple[ZeRO, list[list[Collective]], float, float]:
    """Return the model and, of its last step, the logs, the bytes held at the end, and the most."""
    with Watch() as watch:
        x_BD = samples(device)[RANK].to(dtype)
        modules = [nn.Sequential(*network(device))] if one_unit else network(device)
        model = ZeRO(modules, dtype, keep)
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
# Bytes and order, in bfloat16. (The slack of the most bytes is for the activations of two rows.)


# %%
def check_stage_3(device: torch.device) -> None:
    name = "stage 3, bfloat16"
    n = WORLD_SIZE
    *_, held, _ = train(device, torch.bfloat16, keep=True)
    claim("stage 2, bfloat16: bytes held per parameter", (16 + 2 * n) / n, held)
    _, logs, held, most = train(device, torch.bfloat16)
    claim(f"{name}: bytes held per parameter", 16 / n, held, question=1)
    for number, log in zip(("1st", "2nd"), logs, strict=True):
        gathered = bytes_in(log, "allgather") / 2 / P  # two bytes per element
        reduced = bytes_in(log, "reducescatter") / 2 / P
        claim(f"{name}: gathered in the {number} pass / P", 2, gathered, question=2)
        claim(f"{name}: reduced in the {number} pass / P", 1, reduced)
    gathers = [call for call in [*logs[0], *logs[1]] if "allgather" in call.operation]
    whole = max(call.whole for call in gathers)
    claim(f"{name}: units whole at once", 2, whole, question=3)
    early = sum(call.used > call.started for call in gathers) / PIECES
    claim(f"{name}: gathers with products meanwhile", 2 * (U - 1), early, question=4)
    claim("4 units: most bytes per parameter", 16 / n + 8 / 4, most, atol=0.05, question=5)
    *_, most = train(device, torch.bfloat16, one_unit=True)
    claim("1 unit: most bytes per parameter", 16 / n + 6, most, atol=0.05)


# %% [markdown]
# In float32 three steps are compared with one process, and one pass with FSDP2: its gradients, and
# what it sends.


# %%
def check_one_process(device: torch.device) -> None:
    alone = nn.Sequential(*network(device))
    optimizer = ADAM(alone.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(alone, samples(device).flatten(0, 1)).backward()
        optimizer.step()
    model, *_ = train(device, torch.float32)
    errors = []
    for unit, module in zip(model.units, alone, strict=True):
        errors.append((unit.shard_K - own_part(module.parameters())).abs().max())
    error = torch.stack(errors).max()
    claim("stage 3, float32: error against one process", 0, error, atol=STEPS * ROUNDING)


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
        expected_K = own_part([p.grad.full_tensor() for p in module.parameters()])
        errors.append((unit.shard_K.grad - expected_K).abs().max())
    error = torch.stack(errors).max()
    largest = torch.stack([p.grad.abs().max() for p in ours.parameters()]).max().item()
    claim("PyTorch: gradients, distance to ours", 0, error, atol=ROUNDING * largest)
    if WORLD_SIZE == 1:
        blocked("PyTorch: bytes in a pass, as ours", needs="2 ranks")
        return
    for operation, done in (("allgather", "gathered"), ("reducescatter", "reduced")):
        expected, measured = (bytes_in(log, operation) for log in logs)
        claim(f"PyTorch: bytes {done} in a pass, as ours", expected, measured)


# %% [markdown]
# ## 6. On GPUs: what prefetching hides
#
# Here `wait` holds back the stream that computes, not the host, and NCCL gathers on a stream of its
# own; so both go on at once. Sixteen units have a billion parameters. A forward and a backward pass
# are timed in three ways that take turns: with weights that stay whole, with gathers that each unit
# waits for, and with prefetching. What the last two take longer is **exposed**, and prefetching
# must hide at least half of it. (The reduce-scatters are waited for in all three.)


# %%
def ms_of_pass(model: ZeRO, x_BD: Tensor, keep: bool, prefetch: bool) -> float:
    """Return the milliseconds that forward and backward take on this GPU."""
    for unit in model.units:
        unit.keep = keep
    model.prefetch = prefetch
    model.free()
    if keep:
        loss_of(model, x_BD).backward()  # after it all weights stay whole
    dist.barrier()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    loss_of(model, x_BD).backward()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def measure_on_gpus(device: torch.device) -> None:
    what = "GPU: exposed by prefetching / by waiting"
    if device.type == "cpu" or WORLD_SIZE == 1 or not torch.cuda.is_bf16_supported(False):
        blocked(what, needs="2 GPUs with bfloat16")
        return
    x_BD = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    layers = [nn.Linear(8192, 8192, bias=False, device=device) for _ in range(16)]
    model = ZeRO(layers, torch.bfloat16)
    ways = {"no gathers": (True, True), "waiting": (False, False), "prefetching": (False, True)}
    times = {way: [] for way in ways}
    for _ in range(7):
        for way, (keep, prefetch) in ways.items():
            times[way].append(ms_of_pass(model, x_BD, keep, prefetch))
    ms = {way: median(measured[2:]) for way, measured in times.items()}
    print0(f"{'':13}forward and backward, ms: {ms}")
    exposed = {way: ms[way] - ms["no gathers"] for way in ways}
    share = exposed["prefetching"] / exposed["waiting"] if exposed["waiting"] > 0 else math.inf
    claim(what, 0.5, share, "<=", timed=True)


# %% [markdown]
# ## What you should have seen
#
# 1. Four, or 16/n: weight, gradient and two moments of 4 bytes each, over four ranks. Seven billion
#    parameters are 28 GB per rank, and 1.75 GB on 64 ranks. Stage 2 holds 2 + 16/n, 42 and 15.8 GB.
#    (The paper says 2 + 14/n: there gradient shards rest in bfloat16, here in float32.)
# 2. Two: P forward, and P again backward. With the P that are reduced this is 3P, where the two
#    halves of DDP's all-reduce are 2P: the "1.5 times the communication" of stage 3. Each
#    micro-batch has its 3P; DDP under `no_sync` has 2P per step: accumulate as little as you can.
# 3. Two: the one that computes and the one that is on its way.
# 4. Six: all but the first of each direction. They hide if there are enough tokens: a unit computes
#    2 t FLOPs per parameter on t tokens, forward, while its neighbor receives 2 bytes. So it takes
#    FLOP/s / (bytes/s) tokens per rank, 8,000 at 400 TFLOP/s and 50 GB/s, however large a unit is.
# 5. Six: 16/4 + 8/4. As a single unit the model has 16/4 + 6 = 10. If one unit is most of your
#    model, say an embedding of many tokens before small blocks, cut it up.
#
# **Try.** Without prefetching the training is right. Three rows fail: the units whole at once (1,
# not 2), the gathers with products meanwhile (0, not 6), and the most bytes of four units, which
# are 2/U fewer. Without the division, gradients are n times as large, and the errors against one
# process and FSDP2 fail. Adam hides such a mistake well: with its usual eps of 1e-8 it hardly
# depends on the size of gradients. Here eps is 0.01.
#
# **When to use it:** stage 3 if whole weights do not fit, else stage 1 or 2, which gather less.
# Large units cost memory, and small ones latency; a block is a good size. At a thousand ranks,
# gathering over the whole cluster takes too long: **hybrid sharding** shards within a node and
# replicates over nodes (exercises/09_hybrid_sharding). And a model that no rank can hold must not
# be built whole, as `network` is here: section 4 of fsdp/04_fsdp_refinements.py builds it on the
# meta device.


# %%
def main() -> None:
    command_line()
    launch()
    device = setup()
    check_stage_3(device)
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
