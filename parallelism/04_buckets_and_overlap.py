"""Gradient buckets and overlap: build DistributedDataParallel yourself
====================================================================

**Question.** Data parallelism averages all gradients in every step. How can they travel while
backward still computes, and what is left to wait for when it ends?

**Predict**, and write it down before you run. Four linear layers have a weight and a bias each, so
a step makes 8 gradients: 67, 132, 132 and 10 kB per layer, the first layer first, 341 kB in all.
Gradients are collected in buckets, those of the last layer first.

1. A bucket is closed as soon as it holds 100 kB. How many all-reduces does a step make?
2. How many of the 8 gradients are still missing when the first of these all-reduces starts?
3. How many of the 341 kB are handed to the network only when the last gradient is there?
4. How many, if a bucket is closed as soon as it holds 1 MB?

**Run.**

    torchrun --standalone --nproc-per-node=4 04_buckets_and_overlap.py  # NCCL on 4 GPUs, or gloo
    python 04_buckets_and_overlap.py                                    # the same, started for you

Not run on several GPUs, which section 6 needs.

**Try.** Fill the buckets with the first layer first, by deleting `reversed` in `in_buckets`: which
claims fail? Put it back, and delete the last line of `gradient_is_ready`: what is still right?

**Before.** parallelism/01_data_parallelism_ddp.py: why gradients are averaged.

**Next.** exercises/05_data_parallel_hooks; then parallelism/05_zero2_and_zero3.py lets go of the
gradients. How much of the communication is hidden: communication/06_overlap.py.
"""

import argparse
import ctypes
import json
import logging
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# %% [markdown]
# ## 1. Gradients are ready from the last layer to the first
#
# Backward starts at the loss and works its way to the input. Once it has passed the last layer,
# that layer's gradients are final: nothing that backward does later changes them. The first layer's
# gradients come at the very end. So there is no reason to wait for all of them. The last layers'
# gradients can travel while backward computes the first layers':
#
#     time ------------------------------------------------------------------------->
#     backward         | layer 4 | layer 3 | layer 2 | layer 1 |
#     after backward                                           | 4, 3, 2 and 1 | step
#     while it runs              |    4    |    3    |    2    |   1   | step
#
# Communication that makes the step longer is **exposed**; the rest is **hidden** behind the
# computation. After backward, all of it is exposed. While backward runs, only layer 1's is, for
# then nothing is left to compute. That is the whole idea of PyTorch's DistributedDataParallel
# (DDP), and it works as long as the network keeps up with backward.
#
# What it is worth: 7 billion parameters have 14 GB of gradients in bfloat16. At 50 GB/s per GPU,
# one way, a ring all-reduce of all of them takes 2 x 14 / 50 = 0.56 s; one of the last 25 MB takes
# 0.001 s.

# %% [markdown]
# ## 2. Buckets: fewer messages, which leave later
#
# Should each gradient leave by itself as soon as it is ready? Every all-reduce pays the latency of
# the network, and a model has hundreds of gradients, many of them tiny. So gradients share
# **buckets**, flat buffers that are all-reduced as a whole (Li et al., 2020, section 3.2). They are
# filled from the last parameter to the first, since that is about the order in which gradients
# come. A bucket is closed as soon as it holds a certain size:
#
#     backward            |4|  layer 3  |  layer 2  |layer 1|
#     1 B, 8 messages       |4|         |    3    | |    2    |  1  |
#     100 kB, 3 messages                |  4 and 3  |    2    |  1  |
#     1 MB, 1 message                                       |    4, 3, 2 and 1    |
#
# Small buckets pay the latency often. Large ones leave late, and the last one, which nothing hides,
# is large too.
#
# In the code the gradients *are* parts of the buckets: each `parameter.grad` becomes a view of the
# flat buffer, and the averages need not be copied back. A gradient is divided by the number of
# ranks before it is added to the others': in float16 a sum may overflow where the mean does not.


# %%
class Bucket:
    """One flat buffer; `views` maps each parameter to its gradient, a part of the buffer."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = parameters[0].new_zeros(sum(sizes))
        self.missing: set[nn.Parameter] = set()  # whose gradients are still to come
        self.views = {}
        for parameter, part in zip(parameters, self.flat.split(sizes), strict=True):
            self.views[parameter] = part.view_as(parameter)

    def take_in(self, parameter: nn.Parameter) -> None:
        """Move a gradient, divided, into the bucket. A gradient that was not made counts as 0."""
        self.missing.remove(parameter)
        view = self.views[parameter]
        if parameter.grad is None:
            view.zero_()
        else:
            torch.div(parameter.grad, WORLD_SIZE, out=view)
        parameter.grad = view


def in_buckets(parameters: list[nn.Parameter], capacity: float) -> list[Bucket]:
    """Deal out the parameters, the last one first; close a bucket that holds `capacity` bytes."""
    groups: list[list[nn.Parameter]] = [[]]
    for parameter in reversed(parameters):
        if sum(member.nbytes for member in groups[-1]) >= capacity:
            groups.append([])
        groups[-1].append(parameter)
    return [Bucket(group) for group in groups if group]


# %% [markdown]
# ## 3. Hooks that send a bucket as soon as it is full
#
# Autograd calls a hook when a parameter's gradient is complete. Our hook puts the gradient into its
# bucket. If no other is missing there, it starts an asynchronous all-reduce and returns, so that
# backward goes on while the bytes travel. At the end of a backward, autograd calls what was queued
# on it meanwhile; there we wait for the all-reduces that are still under way. (`queue_callback` is
# private to PyTorch; DDP and FSDP use it too.) Two rules keep the ranks together:
#
# - **All ranks send their buckets in the same order.** A collective carries no name: the first
#   all-reduce of one rank is matched with the first of every other rank, whatever is in it. If the
#   ranks use different layers, their gradients come in different orders. So a bucket that is full
#   before its turn waits for those in front of it.
# - **What is missing at the end is sent as zeros.** A layer that this rank did not use makes no
#   gradient, yet other ranks may have used it and wait for our part.
#
# Beware: the hook is handed the *parameter*, not its gradient. If it averages that, there is no
# error, and the ranks stay close together: each backward averages the weights, and then each rank
# makes a step of its own.
#
# Equal gradients keep equal weights equal, so rank 0's are copied to all ranks once, at the start.
# **Buffers**, such as the running statistics of batch norm, have no gradients to keep them
# together. They are copied from rank 0 before each forward that trains. In eval mode each rank has
# its own statistics, and so its own metrics; PyTorch's DDP copies rank 0's there, too.


# %%
def copy_from_rank_0(tensor: torch.Tensor) -> None:
    """Make a parameter or a buffer the same on all ranks."""
    dense = tensor.data.contiguous()  # the tensor itself, unless it is transposed
    dist.broadcast(dense, src=0)
    tensor.data.copy_(dense)


class BucketedDDP(nn.Module):
    """Data parallelism: after backward, every rank has the mean gradients of all ranks.

    `bucket_mb` is in 1e6 bytes. All ranks wrap the same module, once, after any of it is frozen. A
    copy of a wrapped module does not communicate. A parameter must get one gradient per backward.
    """

    def __init__(self, module: nn.Module, bucket_mb: float = 25.0) -> None:
        super().__init__()
        trained = [p for p in module.parameters() if p.requires_grad]  # a tied weight counts once
        refuse_odd(module, trained)
        for tensor in [*module.parameters(), *module.buffers()]:
            copy_from_rank_0(tensor)
        self.module = module
        self.buckets = in_buckets(trained, bucket_mb * 1e6)
        self.works: list[dist.Work] | None = None  # of the backward under way, if there is one
        for bucket in self.buckets:
            for parameter in bucket.views:
                hook = partial(self.gradient_is_ready, bucket)
                parameter.register_post_accumulate_grad_hook(hook)

    def forward(self, *args: object, **kwargs: object) -> object:
        self.works = None  # even if the last backward failed
        if self.training and torch.is_grad_enabled():
            for buffer in self.module.buffers():
                copy_from_rank_0(buffer)
        return self.module(*args, **kwargs)

    def gradient_is_ready(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        """The hook: `parameter.grad` is complete."""
        if self.works is None:  # it is the first in this backward
            self.works = []
            for each in self.buckets:
                each.missing = set(each.views)
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        bucket.take_in(parameter)
        self.send_full_buckets()

    def send_full_buckets(self) -> None:
        """Send the next buckets in line; stop at one that is not full."""
        for bucket in self.buckets[len(self.works) :]:
            if bucket.missing:
                break
            self.works.append(dist.all_reduce(bucket.flat, async_op=True))

    def finish(self) -> None:
        """Backward is over: send what never filled, then wait, so that the optimizer may step."""
        for bucket in self.buckets:
            for parameter in list(bucket.missing):
                bucket.take_in(parameter)
        self.send_full_buckets()
        for work in self.works:
            work.wait()  # on NCCL the current stream waits for the sum, not the CPU
        self.works = None


# %% [markdown]
# ## 4. PyTorch's DistributedDataParallel does the same, and rebuilds its buckets
#
# DDP's reducer is written in C++ and has one trick more. The order in which parameters are defined
# is only a guess at the order in which their gradients come. So in the first step all of them share
# one bucket, and nothing overlaps. DDP notes the true order and rebuilds its buckets from it.
# `bucket_cap_mb` counts in MiB. By default a bucket has 25 and the first one 1, so that the first
# all-reduce starts early; if you name a size, all buckets have it.
#
# With micro-batches only the last backward need send: `no_sync()` keeps DDP's hooks quiet in the
# others. Ours always send. The result is the same, for the mean of what all ranks share is itself.
#
# DDP waits for exactly one gradient of every parameter, and has two classic errors:
#
# - **"Expected to have finished reduction in the prior iteration"**: a parameter got no gradient,
#   so the *next* forward finds a bucket that never left. If all ranks leave the same layer out,
#   remove it from the model; otherwise set `find_unused_parameters=True`. (Then buckets are never
#   rebuilt, and there is no single bucket in the first step.) If only some ranks leave it out, the
#   others wait in their all-reduce: you see a hang, and the error on one rank.
# - **"Expected to mark a variable ready only once"**: a parameter got two, as when re-entrant
#   activation checkpointing wraps a layer that is used twice. Use `use_reentrant=False`.
#
# Ours takes what gets no gradient, and raises KeyError for a second one. Parameters of several
# dtypes or without values, and sparse gradients, it refuses when it is built.


# %%
def torch_ddp(model: nn.Module) -> DistributedDataParallel:
    """PyTorch's own, with buckets that are closed at 100 kB."""
    device = next(model.parameters()).device
    ids = [device] if device.type == "cuda" else None
    return DistributedDataParallel(model, ids, bucket_cap_mb=100_000 / 2**20)


def refuse_odd(module: nn.Module, trained: list[nn.Parameter]) -> None:
    """Raise ValueError for what BucketedDDP has no bucket for."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter) or parameter.is_meta:
            rule = f"parameters must have values, got none for {name}"
            raise ValueError(f"{rule}: load weights, or run a lazy module once")
    dtypes = {parameter.dtype for parameter in trained}
    if len(dtypes) > 1:
        raise ValueError(f"trained parameters must have one dtype, got {len(dtypes)}: use DDP")
    if any(getattr(part, "sparse", False) for part in module.modules()):
        raise ValueError("gradients must be dense, got a module with sparse=True: set it False")


# %% [markdown]
# ## 5. How it is measured
#
# Where ranks share cores, a clock cannot show overlap, but the order of events can: a gradient that
# comes after an all-reduce has started is computed while that all-reduce may travel. `Timeline`
# notes both. It sees all-reduces beneath torch's dispatcher, where those of DDP's C++ reducer pass
# too. It learns of gradients from hooks of its own. These run before ours and DDP's if they are
# registered first, so a timeline is made before the model is wrapped, and entered for each step.


# %%
Event = tuple[str, int]  # ("all_reduce", or the number of the layer whose gradient it is; bytes)


class Timeline(TorchDispatchMode):
    """The events of each step, in the order in which they happened on this rank."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.steps: list[list[Event]] = []
        linears = [layer for layer in model if isinstance(layer, nn.Linear)]
        for number, linear in enumerate(linears, start=1):
            note = partial(self.note_gradient, str(number))
            linear.weight.register_post_accumulate_grad_hook(note)
            linear.bias.register_post_accumulate_grad_hook(note)

    def __enter__(self) -> "Timeline":
        self.steps.append([])
        return super().__enter__()

    def note_gradient(self, layer: str, parameter: nn.Parameter) -> None:
        self.steps[-1].append((layer, parameter.nbytes))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.c10d.allreduce_.default:
            self.steps[-1].append(("all_reduce", sum(tensor.nbytes for tensor in args[0])))
        return func(*args, **(kwargs or {}))


# %% [markdown]
# Every step is printed as it went: the number of a layer when one of its gradients is ready, and
# `[142]` when an all-reduce of 142 kB starts. What you predicted is read off these events.


# %%
def read_events(name: str, events: list[Event]) -> tuple[int, int, int]:
    """Print the events of a step; return what the next cell claims of them."""
    words = []
    calls = 0  # all-reduces so far
    missing = 0  # gradients that come after the first of them
    after = 0  # bytes handed over since the last gradient
    for what, nbytes in events:
        if what == "all_reduce":
            words.append(f"[{nbytes / 1e3:.0f}]")
            calls += 1
            after += nbytes
        else:
            words.append(what)
            if calls > 0:
                missing += 1
            after = 0
    print0(f"{'':13}{name}: {' '.join(words)}")
    return calls, missing, after


# %% [markdown]
# That the gradients are right, too, is seen by training. The **oracle** is one process that sees
# the whole of every batch. Its additions come in another order, which moves a sum over B samples
# by at most B eps of its terms. SGD passes such an error on to the weights with a total gain of
# 0.1 / (1 - 0.9) = 1, so after S steps they may differ by S B eps, to first order.


# %%
STEPS = 3
BATCH = 24 * WORLD_SIZE  # samples per step, all ranks together
MINE = slice(RANK, None, WORLD_SIZE)  # every rank has other samples of the batch


def net(device: torch.device, seed: int) -> nn.Sequential:
    """Four linear layers of 67, 132, 132 and 10 kB in float64."""
    torch.manual_seed(seed)
    layers = []
    for inputs, outputs in pairwise([64, 128, 128, 128, 10]):
        layers += [nn.Linear(inputs, outputs, device=device, dtype=torch.float64), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def train(model: nn.Module, samples: slice, timeline: AbstractContextManager) -> None:
    """SGD on these samples of each batch; forward and backward inside the timeline."""
    device = next(model.parameters()).device
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(0)  # all ranks draw the same batches
    for _ in range(STEPS):
        x_BD = torch.randn(BATCH, 64, dtype=torch.float64)[samples].to(device)
        label_B = torch.randint(10, (BATCH,))[samples].to(device)
        sgd.zero_grad()
        with timeline:
            cross_entropy(model(x_BD), label_B).backward()
        sgd.step()


def largest_difference(ours: nn.Module, expected: nn.Module) -> float:
    """Between the parameters of two modules."""
    pairs = zip(ours.parameters(), expected.parameters(), strict=True)
    return torch.stack([(a - b).abs().max() for a, b in pairs]).max().item()


# %% [markdown]
# Our own wrapper with three sizes of buckets; then PyTorch's DDP, whose first step is looked at by
# itself.


# %%
def check_own(device: torch.device) -> None:
    """Claim that our own DDP trains as one process does, and in which order it works."""
    alone = net(device, seed=0)
    train(alone, slice(None), nullcontext())
    seen = {}
    for name, nbytes in {"1 B": 1, "100 kB": 100_000, "1 MB": 1_000_000}.items():
        model = net(device, seed=RANK)  # only a broadcast can make ranks agree
        timeline = Timeline(model)
        train(BucketedDDP(model, nbytes / 1e6), MINE, timeline)
        atol = STEPS * BATCH * torch.finfo(torch.float64).eps
        error = largest_difference(model, alone)
        claim(f"{name}: weights, error against one process", 0, error, atol=atol)
        seen[name] = read_events(name, timeline.steps[-1])
    calls, missing, after = seen["1 B"]
    claim("1 B: all-reduces per step", 8, calls)
    claim("1 B: missing at the first", 7, missing)
    claim("1 B: bytes after the last gradient", 65_536, after)
    calls, missing, after = seen["100 kB"]
    claim("100 kB: all-reduces per step", 3, calls, question=1)
    claim("100 kB: missing at the first", 4, missing, question=2)
    claim("100 kB: bytes after the last gradient", 66_560, after, question=3)
    calls, missing, after = seen["1 MB"]
    claim("1 MB: all-reduces per step", 1, calls)
    claim("1 MB: bytes after the last gradient", 341_072, after, question=4)


def check_pytorch(device: torch.device) -> None:
    """Claim the order of PyTorch's DDP, in its first step and in its third."""
    model = net(device, seed=0)
    timeline = Timeline(model)
    train(torch_ddp(model), MINE, timeline)
    for step, expected in {"first": (1, 0, 341_072), "third": (3, 4, 66_560)}.items():
        name = f"PyTorch, {step} step"
        seen = read_events(name, timeline.steps[0 if step == "first" else 2])
        claim(f"{name}: all-reduces per step", expected[0], seen[0])
        claim(f"{name}: missing at the first", expected[1], seen[1])
        claim(f"{name}: bytes after the last gradient", expected[2], seen[2])


# %% [markdown]
# ## 6. On GPUs: how much of the communication is exposed
#
# 47 layers of 2 to 34 MB have 587 MB of gradients in bfloat16. Their sizes differ, so that every
# capacity makes other buckets. A step in which nothing is sent is computation alone, and what a
# step takes longer than that is exposed. CUDA events are the clock; the ways take turns.


# %%
WIDTHS = [4096, 2048, 1024, 1024, 2048, 4096] * 8


def wrapped_layers(bucket_mb: float, device: torch.device) -> BucketedDDP:
    factory = {"device": device, "dtype": torch.bfloat16}
    layers = [nn.Linear(inputs, outputs, **factory) for inputs, outputs in pairwise(WIDTHS)]
    return BucketedDDP(nn.Sequential(*layers), bucket_mb)


def step_ms(own: BucketedDDP, x_BD: torch.Tensor) -> float:
    """Return how long this rank's GPU takes for forward and backward, in milliseconds."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    dist.barrier()
    start.record()
    own(x_BD).square().mean().backward()
    end.record()
    end.synchronize()
    own.zero_grad()
    return start.elapsed_time(end)


def median_steps(ways: dict[str, BucketedDDP], x_BD: torch.Tensor) -> dict[str, float]:
    """Return the median milliseconds of each way's step, on the slowest rank."""
    times = {way: [] for way in ways}
    for _ in range(23):  # of which 3 warm up
        for way, own in ways.items():
            times[way].append(step_ms(own, x_BD))
    medians = [statistics.median(all_times[3:]) for all_times in times.values()]
    slowest = torch.tensor(medians, device=x_BD.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(ways, slowest.tolist(), strict=True))


# %% [markdown]
# The claim compares what buckets of 25 MB expose with what one bucket exposes. Without overlap the
# ratio would be 1; half is allowed. To tell, one bucket's exposed time must be well above the noise
# (what two measurements of the same step differ by, or half a percent of a step), and below half a
# step, so that backward is long enough to hide it. Otherwise the row is BLOCKED.


# %%
def what_it_needs(ms: dict[str, float]) -> str:
    """Why these times cannot tell hidden from exposed; nothing if they can."""
    compute = ms["nothing sent"]
    one_bucket = ms["one bucket"] - compute
    noise = max(abs(ms["the same again"] - compute), 0.005 * compute)
    if one_bucket < 4 * noise:
        return "GPUs whose all-reduces take longer than the noise"
    if one_bucket > compute / 2:
        return "GPUs with faster links"
    return ""


def measure_on_gpus(device: torch.device) -> None:
    """Claim that buckets of 25 MB expose at most half of what one bucket exposes."""
    what = "exposed ms, 25 MB buckets / one bucket"
    if device.type == "cpu" or WORLD_SIZE == 1 or not torch.cuda.is_bf16_supported(False):
        blocked(what, needs="2 GPUs with bfloat16")
        return
    silent = wrapped_layers(25, device)
    silent.send_full_buckets = lambda: None
    ways = {"nothing sent": silent, "the same again": silent}
    for bucket_mb in (1, 5, 25, 100):
        ways[f"{bucket_mb} MB"] = wrapped_layers(bucket_mb, device)
    ways["one bucket"] = wrapped_layers(1000, device)
    x_BD = torch.randn(16_384, WIDTHS[0], device=device, dtype=torch.bfloat16)
    ms = median_steps(ways, x_BD)
    exposed = {way: ms[way] - ms["nothing sent"] for way in ways}
    for way, own in ways.items():
        row = f"{way:14} {len(own.buckets):3} buckets, {ms[way]:7.2f} ms per step"
        print0(f"{'':13}{row}, {exposed[way]:6.2f} exposed")
    needs = what_it_needs(ms)
    if needs:
        blocked(what, needs)
        return
    claim(what, 0.5, exposed["25 MB"] / exposed["one bucket"], "<=", timed=True)


# %% [markdown]
# ## What you should have seen
#
# 1. Three: layers 4 and 3 make 142 kB and close the first bucket, layer 2 fills the second, and
#    layer 1 is what is left. PyTorch's DDP makes three as well, from its second step on.
# 2. Four: when layers 4 and 3 leave, the weights and biases of layers 2 and 1 are still to come.
#    DDP's first step, with its one bucket, leaves none to hide behind.
# 3. 67 kB, the last bucket, 20% of the bytes. That is the least that is exposed. A network that
#    carries bytes only as fast as backward makes them is still busy with earlier buckets then.
# 4. All 341 kB: the one bucket is full when the last gradient is there. Buckets of 1 B would expose
#    66 kB (a bias comes before its weight, so layer 1's weight is last), for eight messages.
#
# **Try.** Buckets filled from the first layer on are full only when backward ends: as many bytes
# and messages, the same weights, and nothing is hidden. What fails are the claims, for 1 B and 100
# kB, on what is missing at the first all-reduce and on the bytes after the last gradient. The same
# four fail if the hook no longer sends: `finish` sends all buckets then, and the weights are right.
#
# **When to change the size:** a bucket should travel much longer than its latency, and much shorter
# than backward. 25 MB travel for 1 ms at 50 GB/s. A ring of 8 ranks adds 14 hops of some 5 us, 0.07
# ms. One of 1,000 ranks adds 1,998 hops, or 10 ms, and wants larger buckets (or a tree: NCCL has
# both). If backward as a whole is shorter than the all-reduces, no size hides them: give each rank
# more samples, or accumulate micro-batches under `no_sync`. What is hidden still costs something:
# NCCL's kernels take streaming multiprocessors from the matrix products that hide them
# (communication/06_overlap.py). And one rank whose data are late delays the first bucket of all:
# then a trace shows long all-reduces on every rank but that one.


# %%
def main() -> None:
    command_line()
    launch()
    device = setup()
    check_own(device)
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
