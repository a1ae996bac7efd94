"""Distributed profiling: find the bottleneck in the traces of all ranks
=====================================================================

**Question.** A training step takes half as long again as it should. Is it the loader, the network,
one slow rank, or your own code? What does one rank's trace show, what do only all of them show
together, and how long will the step take once the bottleneck is gone?

**Predict**, and write it down before you run. BOTTLENECKS below lists six, each added to the same
healthy job, and ON_ONE_GPU three more, which need a GPU.

1. By what factor does each of them lengthen the step?
2. One rank computes twice as long as the others. In whose trace does the *network* look best?
3. You know only the slow job's trace. How do you compute, for each bottleneck, how long the step
   will take without it?

**Run.**

    torchrun --standalone --nproc-per-node=4 01_distributed_profiling.py # NCCL if 4 GPUs, else gloo
    python 01_distributed_profiling.py                                   # the same, started for you
    python 01_distributed_profiling.py --figure steps.png                # and draw the steps

Not run on several GPUs.

**Try.** In `one_step` make the loader wait for `0.0` instead: what is the slow loader's job named
now? In `predicted_fixed` return `case.total` for all, as if no cure helped: which claims notice?

**Before.** parallelism/04_buckets_and_overlap.py: buckets, and what overlaps with what.

**Next.** exercises/26_three_slow_trainings; then
profiling/02_one_trace_for_all_ranks.py
"""

import argparse
import contextlib
import ctypes
import functools
import json
import logging
import math
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, record_function, schedule

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# %% [markdown]
# ## 1. Where a step's time goes
#
# Every moment of a step belongs to one of five kinds. *Compute* is what compute covers.
# Communication that runs behind compute costs nothing; what sticks out is **exposed**, in a barrier
# or in an all-reduce. Then there is the *loader*, and *idle*, which nothing covers:
#
#     compute     |   [ forward  ][ backward            ]            |
#     network     |                     [all-reduce][all-reduce]     |
#     loader      |[]                                                |
#     counts as    l   c c c c c c c c c c c c c c c c c  e e e e e  i
#
# Only exposed communication lengthens the step, which is why a total of "all-reduce ms" says so
# little. A trace is a list of spans (start, end), so the kinds are interval arithmetic: the length
# of a union, and how much longer it becomes with the next kind added. By construction the five add
# up to the step.

# %%
Spans = list[tuple[float, float]]  # (start, end) in ms
KINDS = ("compute", "barrier", "all-reduce", "loader", "idle")


def union(spans: Spans) -> Spans:
    """The same points, as disjoint spans in order."""
    joined: Spans = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        elif end > start:
            joined.append((start, end))
    return joined


def length(spans: Spans) -> float:
    return sum(end - start for start, end in union(spans))


def within(spans: Spans, window: tuple[float, float]) -> Spans:
    """The parts of the spans that lie in the window."""
    clipped = [(max(start, window[0]), min(end, window[1])) for start, end in spans]
    return [(start, end) for start, end in clipped if end > start]


def split_time(spans: dict[str, Spans], window: tuple[float, float]) -> dict[str, float]:
    """The ms of each kind in one step, given each kind's spans, and the step's own (start, end)."""
    ms = {}
    covered: Spans = []
    for kind in ("compute", "barrier", "all-reduce", "loader"):
        before = length(covered)
        covered = covered + within(spans[kind], window)
        ms[kind] = length(covered) - before
    ms["idle"] = window[1] - window[0] - length(covered)
    return ms


def hidden_share(spans: dict[str, Spans], ms: dict[str, float], window: tuple) -> float:
    """The share of a step's communication that compute covers."""
    communication = length(within(spans["barrier"] + spans["all-reduce"], window))
    exposed = ms["barrier"] + ms["all-reduce"]
    return 1 - exposed / communication if communication else 1.0


# %% [markdown]
# ## 2. A training job with bottlenecks to switch on
#
# Twelve layers under DDP, one bucket each. A layer's compute is a labeled *sleep* of `forward` ms
# and twice that backward, so that it takes the same time on two cores as on a hundred, and leaves
# them to the communication; on a GPU it is a kernel that spins as long. As in real jobs, where
# sequences differ in length, a layer takes 0.3 or 1.7 times the mean; on neighboring ranks in
# opposite turns, so that all ranks have the same to do in a step. The rest is real: autograd, DDP's
# hooks, its all-reduces, the trace. (Only gloo's wire is too fast for so small a model: section 6.)


# %%
@dataclass
class Job:
    """A job, healthy as it stands here; times are in units of `forward`, the healthy layer's."""

    loader: float = 0.0  # how long the loop waits for its next batch
    batch: float = 1.0  # the share of the healthy batch, and so of the compute
    slow: float = 1.0  # the last rank's compute takes so many times as long
    bucket_mb: float = 0.0  # 0: a layer's gradients make one bucket
    overlap: bool = True  # all-reduce while backward goes on, or only after it
    syncs: bool = False  # a barrier behind every layer, "to be safe"
    alone: bool = False  # section 5: on one GPU, without a network
    needed: float = 0.0  # there, ms that the optimizer's bytes need at least
    batch_bytes: int = 0  # there, what is copied to the GPU in a step
    small_kernels: bool = False  # a layer's compute is many small kernels
    pinned: bool = True  # the batch lies in pinned host memory
    fused: bool = True  # the optimizer's step is one kernel


LAYERS, TENSORS = 12, 8
UNEVEN = (0.3, 1.7)  # a layer's compute over the mean, in turns; each rank begins one later
HEALTHY = Job()
BOTTLENECKS = {
    "slow loader": replace(HEALTHY, loader=3 * LAYERS),
    "straggler": replace(HEALTHY, slow=2),
    "needless syncs": replace(HEALTHY, syncs=True),
    "tiny buckets": replace(HEALTHY, bucket_mb=0.001),  # every tensor alone
    "no overlap": replace(HEALTHY, overlap=False),
    "small batch": replace(HEALTHY, batch=1 / 4),
}


# %% [markdown]
# `Work` is a layer's compute, forward and backward, and gives each weight a gradient.


# %%
class Work(torch.autograd.Function):
    """Passes x on; costs `ms` forward and twice that backward, like a layer's matmuls."""

    @staticmethod
    def forward(
        ctx: object, x: torch.Tensor, ms: float, job: Job, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.ms = ms
        ctx.job = job
        ctx.shapes = [weight.shape for weight in weights]
        compute(ms, job, x.device)
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple:
        compute(2 * ctx.ms, ctx.job, grad.device)
        return grad, None, None, *(grad.mean().expand(shape).clone() for shape in ctx.shapes)


def compute(ms: float, job: Job, device: torch.device) -> None:
    """Stand for so much compute, and a barrier behind it if the job has one."""
    with record_function("compute"):
        if job.small_kernels:
            launch_small_kernels(round(ms / small_kernel_ms()), small_kernel_ms())
        elif device.type == "cuda":
            torch.cuda._sleep(int(ms * cycles_per_ms()))
        else:
            time.sleep(ms / 1e3)
    if job.syncs:
        with record_function("barrier"):
            dist.barrier()


class Layer(nn.Module):
    def __init__(self, ms: float, job: Job, elements: int) -> None:
        super().__init__()
        tensors = 1 if job.alone else TENSORS  # alone, each larger than a GPU's cache
        sizes = [elements * TENSORS // tensors] * tensors
        self.weights = nn.ParameterList(torch.zeros(size) for size in sizes)
        self.ms = ms
        self.job = job

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Work.apply(x, self.ms, self.job, *self.weights)


def one_step(
    model: nn.Module, job: Job, forward: float, device: torch.device, extras: "Extras | None"
) -> None:
    """One training step: load, forward, backward, all-reduce; on one GPU section 5's extras."""
    with record_function("loader"):
        time.sleep(job.loader * forward / 1e3)
    if extras:
        extras.copy_batch(device)
    x = torch.ones(8, device=device, requires_grad=True)
    with contextlib.nullcontext() if job.overlap else model.no_sync():
        model(x).sum().backward()
    if not job.overlap:
        for layer in model.module:
            flat = torch.cat([weight.grad.flatten() for weight in layer.weights])
            start_all_reduce(flat).wait()
    if extras:
        extras.update()
    model.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize()


# %% [markdown]
# ## 3. Naming the bottleneck
#
# From the surest sign to the least. One rank's trace is not enough: in a straggler's job all
# *others* seem to have a slow network, for they wait in the all-reduce, and only the straggler
# itself looks busy. So compare compute over ranks before you blame the network. A message is tiny
# if its latency costs more than its bytes (fundamentals/04_latency_and_bandwidth.py finds where
# that is).
#
#     symptom in the traces                                       bottleneck
#     the loader's share is large                                 slow loader
#     one rank computes longer than others, and waits for nobody  straggler
#     much time is exposed in barriers or synchronizations        needless syncs
#     much is exposed, in messages that are latency-bound         tiny buckets
#     all-reduces hide behind no compute at all                   no overlap
#     they hide, but compute is too short to hide them            small batch


# %%
@dataclass
class Case:
    """What the traces of all ranks say of one job: its shortest step, for noise only adds."""

    wall: float  # ms of that step by this rank's own clock
    traced: float  # ms of that step in this rank's trace
    splits: list[dict[str, float]]  # for each rank, the ms of each kind
    hidden: float  # the share of communication behind compute, on the rank with the least
    message: float  # bytes, mean of the all-reduces
    avoidable: dict[str, float] = field(default_factory=dict)  # on GPUs: section 5's shares
    calls: int = 0  # all-reduces in that step, on this rank
    nbytes: int = 0  # of all of them together
    ranges: int = 0  # ranges of compute in it, as the host made them
    doubled: float = 0.0  # for a small batch: mean ms of compute with twice the batch

    @property
    def total(self) -> float:
        """Ms of the step, on the rank where it takes longest."""
        return max(sum(ms.values()) for ms in self.splits)

    def share(self, kind: str) -> float:
        """The share of the step that a kind takes, mean over ranks."""
        return statistics.mean(ms[kind] for ms in self.splits) / self.total

    def spread(self) -> float:
        """By how many ms one rank's compute is longer than another's."""
        computes = [ms["compute"] for ms in self.splits]
        return max(computes) - min(computes)


def diagnose(case: Case, latency_bound: float) -> str:
    """The bottleneck that the traces show; messages below so many bytes are latency-bound."""
    if case.share("loader") > 0.2:
        return "slow loader"
    busiest = max(case.splits, key=lambda ms: ms["compute"])
    if case.spread() > 0.25 * case.total and busiest["all-reduce"] < 0.15 * case.total:
        return "straggler"
    if case.share("barrier") > 0.15:
        return "needless syncs"
    if case.share("all-reduce") > 0.2:
        if case.message < latency_bound:
            return "tiny buckets"
        return "no overlap" if case.hidden < 0.1 else "small batch"
    for name, share in case.avoidable.items():
        if share > 0.2:
            return name
    return "healthy"


# %% [markdown]
# ## 4. Predict the step without the bottleneck
#
# Before you spend a week on a cure, compute what it will give. Amdahl's law: a cure can take away
# no more than the time that the bottleneck takes in the trace. The step will be what is left, if
# nothing else comes to light behind it. Here something always does: the last layer's all-reduce,
# one of LAYERS, can start only when backward is over, and stays exposed.
#
# A small batch is made four times as large, so that one step serves as many samples as four did.
# Its compute is *not* four times as long, for a part of it is the same in every step, whatever the
# batch: here each sleep lasts some tenths of a ms longer than it was asked to, on a GPU each kernel
# is launched. One batch size does not tell that part from the rest, two do: record the job with
# twice the batch as well, and draw a line through both, compute = fixed + slope x batch.


# %%
def predicted_fixed(name: str, case: Case) -> float:
    """Predicted ms per step without the bottleneck, from the slow job's own traces."""
    if name in case.avoidable:
        return case.total * (1 - case.avoidable[name])
    exposed = statistics.mean(ms["all-reduce"] for ms in case.splits)
    hideable = exposed * (LAYERS - 1) / LAYERS
    if name == "slow loader":
        return case.total * (1 - case.share("loader"))
    if name == "straggler":
        return case.total - case.spread()
    if name == "needless syncs":
        return case.total * (1 - case.share("barrier"))
    if name == "small batch":
        compute = case.share("compute") * case.total  # at a quarter of the healthy batch
        healthy = compute + 3 * (case.doubled - compute)  # three quarters more
        return case.total - compute + healthy - hideable
    return case.total - hideable


# %% [markdown]
# ## 5. Three more, on one GPU
#
# These need no network: a GPU waits for its own host, or for its own memory. So each rank runs them
# on its GPU alone, with the same twelve layers, a batch that is copied to the GPU, and AdamW.
#
#     healthy          host  |launch launch launch launch      waits      |
#                      GPU   |      [ kernel ][ kernel ][ kernel ][kernel]|
#     launch-bound     host  |launch   python   launch   python   launch   python
#                      GPU   |      [k]               [k]               [k]
#
# A kernel is **launch-bound** if the host takes longer to launch it than the GPU to run it: the
# queue is empty, and the GPU waits. Ordinary host memory is **pageable**: a copy from there goes
# through a pinned buffer of the driver, and the host waits. From pinned memory the GPU fetches the
# batch itself, behind compute. And an optimizer does almost no arithmetic: it is **memory-bound**,
# as fast as its bytes. AdamW in one fused kernel reads a parameter, its gradient and two moments,
# and writes three of them: 28 bytes. As eight operations it reads and writes 20 numbers, 80 bytes.
# (`foreach=True` launches fewer kernels, and moves as many bytes.)
#
#     sign in the trace                                     bottleneck              cure
#     nothing runs on the GPU while the host launches       launch-bound kernels    see below
#     "Memcpy HtoD (Pageable -> Device)", behind no kernel  pageable copies         pin_memory
#     optimizer's kernels take longer than 28 bytes need    memory-bound optimizer  fused=True
#
# Fewer and larger kernels come from `torch.compile`, a CUDA graph replays many in one launch. Each
# sign is the share of the step that its cure takes away, so Amdahl's law needs no more.


# %%
ON_ONE_GPU = {
    "launch-bound kernels": {"small_kernels": True},
    "pageable copies": {"pinned": False},
    "memory-bound optimizer": {"fused": False},
}
modules = nn.Sequential(*[nn.Identity() for _ in range(10)])


def launch_small_kernels(kernels: int, ms: float) -> None:
    """Launch kernels of `ms` each; after each run some Python, as eager modules do."""
    for _ in range(kernels):
        torch.cuda._sleep(int(ms * cycles_per_ms()))
        modules(None)


class Extras:
    """What a step on one GPU has besides: a batch in host memory, and an optimizer."""

    def __init__(self, model: nn.Module, job: Job) -> None:
        self.batch = torch.zeros(job.batch_bytes, dtype=torch.uint8, pin_memory=job.pinned)
        self.copies = torch.cuda.Stream()
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=job.fused, foreach=False)

    def copy_batch(self, device: torch.device) -> None:
        """From pinned memory the next step's batch, behind this step; else this step's, before."""
        if self.batch.is_pinned():
            with torch.cuda.stream(self.copies):
                self.batch.to(device, non_blocking=True)
        else:
            self.batch.to(device)

    def update(self) -> None:
        with record_function("optimizer"):
            self.optimizer.step()


# %% [markdown]
# Which kernels are the optimizer's? When they run, the host is elsewhere. But a kernel has the same
# `correlation` as the call that launched it, and that call lies within the host's range.


# %%
def avoidable_shares(
    events: list[dict], spans: dict[str, Spans], window: tuple[float, float], needed: float
) -> dict[str, float]:
    """The share of a step that each cure takes away; the optimizer's bytes need `needed` ms.

    Returns nothing if the trace shows no launch.
    """
    kernels = within(spans["compute"] + spans["all-reduce"], window)
    launches = spans_of(events, "cuda_runtime", "cudaLaunchKernel")
    launches = within(launches + spans_of(events, "cuda_driver", "cuLaunchKernel"), window)
    if not launches:
        return {}
    launching = (min(launches)[0], max(launches)[1])
    copies = spans_of(events, "gpu_memcpy", "") + spans_of(events, "gpu_memset", "")
    busy = within(kernels + copies, launching)
    pageable = within(spans_of(events, "gpu_memcpy", "Memcpy HtoD (Pageable"), window)
    optimizer = within(launched_in(events, "optimizer"), window)
    ms = {
        "launch-bound kernels": launching[1] - launching[0] - length(busy),
        "pageable copies": length(kernels + pageable) - length(kernels),
        "memory-bound optimizer": max(0.0, length(optimizer) - needed),
    }
    return {name: part / (window[1] - window[0]) for name, part in ms.items()}


def launched_in(events: list[dict], name: str) -> Spans:
    """The kernels that the host launched within its ranges of that name."""
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    launched = set()
    for start, end in spans_of(events, "user_annotation", name):
        inside = [call for call in calls if start <= call["ts"] / 1e3 < end]
        launched |= {call["args"]["correlation"] for call in inside}
    kernels = [event for event in events if event.get("cat") == "kernel"]
    mine = [kernel for kernel in kernels if kernel["args"]["correlation"] in launched]
    return spans_of(mine, "kernel", "")


# %% [markdown]
# ## 6. How it is measured
#
# **The network.** A model this small would be sent in no time. So on the CPU each all-reduce is
# followed, still inside its span, by a sleep of LATENCY + bytes / BANDWIDTH: the wire of a slow
# network, one message at a time. `forward` is then chosen so that one layer's all-reduce takes 1.7
# times a layer's forward and so a little less than its backward: it can hide, but only just. That
# ratio is what makes the job the same on a faster or a slower machine, and on GPUs, where NCCL's
# all-reduces are real and large and nothing sleeps.

# %%
LATENCY, BANDWIDTH = 3.0, 38_400  # ms per message, bytes per ms
wire = threading.Lock()


def start_all_reduce(gradients: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Average over all ranks: start it, and return a future."""
    work = dist.all_reduce(gradients.div_(WORLD_SIZE), async_op=True)

    def carry(future: torch.futures.Future) -> torch.Tensor:
        if not gradients.is_cuda:
            with wire:
                time.sleep((LATENCY + gradients.nbytes / BANDWIDTH) / 1e3)
        return future.value()[0]

    return work.get_future().then(carry)


def all_reduce_hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return start_all_reduce(bucket.buffer())


def elements_per_tensor(device: torch.device) -> int:
    """A layer's gradients are 192 kB on the CPU, 256 MB on GPUs."""
    return 8_000_000 if device.type == "cuda" else 6_000


def choose_forward(device: torch.device) -> float:
    """The ms that a layer's forward shall take: a layer's all-reduce alone, divided by 1.7."""
    if WORLD_SIZE == 1:
        return 5.0
    flat = torch.zeros(TENSORS * elements_per_tensor(device), device=device)
    times = []
    for _ in range(8):
        dist.barrier()
        start = time.perf_counter()
        start_all_reduce(flat).wait()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return max(gather_objects(statistics.median(times[3:]))) / 1.7


@functools.cache
def cycles_per_ms() -> float:
    """How many of its cycles a GPU spins in a millisecond."""
    torch.cuda._sleep(10_000_000)  # once to wake it up
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda._sleep(10_000_000)
    end.record()
    end.synchronize()
    return 10_000_000 / start.elapsed_time(end)


# %% [markdown]
# On one GPU the sizes follow from its memory, its bus and its host. Two thirds of a healthy step
# are compute, one third is the optimizer. A pageable copy takes as long as two such thirds, and a
# small kernel a third of its launch.


# %%
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


def choose_alone(device: torch.device) -> Job:
    """The healthy job on one GPU."""
    source = torch.zeros(TENSORS * elements_per_tensor(device), device=device)
    target = torch.zeros_like(source)
    pageable = torch.zeros(source.numel())
    copy_ms = max(gather_objects(median_ms(lambda: target.copy_(source))))
    needed = copy_ms * 28 / 8 * LAYERS  # a copy reads and writes 8 bytes per parameter
    bytes_per_ms = pageable.nbytes / median_ms(lambda: target.copy_(pageable), repeats=5)
    return Job(alone=True, needed=needed, batch_bytes=int(2 * needed * bytes_per_ms))


@functools.cache
def small_kernel_ms() -> float:
    """A third of the ms that the host takes to launch a kernel."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    launch_small_kernels(500, 0.0)
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / 500 / 3


# %% [markdown]
# **Recording.** The profiler is not always on: its *schedule* skips a step, warms up on one (DDP
# rebuilds its buckets then), and records a few. Each rank writes its own trace; here all are read
# back and compared. A trace that lost events looks as tidy as a whole one, so they are counted: an
# all-reduce per bucket, two ranges of compute per layer. A wall clock tells whether a ms of the
# trace is one.

# %%
ACTIVE = 4  # steps recorded


def make_model(job: Job, forward: float, device: torch.device) -> nn.Module:
    """The job's layers, under DDP if it has a network."""
    layers = []
    for index in range(LAYERS):
        ms = job.batch * forward * UNEVEN[(index + RANK) % len(UNEVEN)]
        if RANK == WORLD_SIZE - 1:
            ms *= job.slow
        layers.append(Layer(ms, job, elements_per_tensor(device)))
    if job.alone:
        return nn.Sequential(*layers).to(device)
    layer_mb = 4 * TENSORS * elements_per_tensor(device) / 2**20
    model = DistributedDataParallel(
        nn.Sequential(*layers).to(device),
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=job.bucket_mb or layer_mb,
    )
    model.register_comm_hook(None, all_reduce_hook)
    return model


def record(job: Job, forward: float, device: torch.device) -> tuple[list[dict], list[float]]:
    """Train under the profiler; return the trace's events, and each step's ms by the clock."""
    model = make_model(job, forward, device)
    extras = Extras(model, job) if job.alone else None
    walls = []
    recorded = schedule(wait=1, warmup=1, active=ACTIVE, repeat=1)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:

        def save(profiler: profile) -> None:
            profiler.export_chrome_trace(file.name)

        # CPU, and CUDA if there; with shapes, a trace has the sizes of messages, too
        with profile(schedule=recorded, on_trace_ready=save, record_shapes=True) as profiler:
            for _ in range(2 + ACTIVE):
                dist.barrier()
                start = time.perf_counter()
                with record_function("step"):
                    one_step(model, job, forward, device, extras)
                walls.append(1e3 * (time.perf_counter() - start))
                profiler.step()
        with open(file.name) as trace:
            return json.load(trace)["traceEvents"], walls[2:]


# %% [markdown]
# **Reading it back.** On GPUs a trace has each of our ranges twice: `user_annotation` is the
# host's, and `gpu_user_annotation` spans the kernels launched within it. Only the first is a step.
# What computes and what communicates there are the kernels. With `record_shapes` every operation
# has the shapes of its tensors ("Input Dims"), which give the bytes of each message. (NCCL's
# kernels have them anyway: "In msg nelems", "dtype", "Group size", "Process Group Name".)


# %%
def spans_of(events: list[dict], category: str, *names: str) -> Spans:
    """(start, end) in ms of a category's events whose name begins with one of these."""
    found = [event for event in events if event.get("cat") == category]
    found = [event for event in found if event["name"].startswith(names)]
    return [(event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3) for event in found]


def read_trace(events: list[dict]) -> dict[str, Spans]:
    """Each kind's spans, and the steps'."""
    spans = {
        "step": sorted(spans_of(events, "user_annotation", "step")),
        "loader": spans_of(events, "user_annotation", "loader"),
        "compute": spans_of(events, "user_annotation", "compute"),
        "all-reduce": spans_of(events, "user_annotation", "gloo:all_reduce"),
        "barrier": spans_of(events, "user_annotation", "barrier"),
    }
    kernels = [event for event in events if event.get("cat") == "kernel"]
    if kernels:
        computing = [event for event in kernels if "nccl" not in event["name"]]
        spans["compute"] = spans_of(computing, "kernel", "")
        spans["all-reduce"] = spans_of(kernels, "kernel", "nccl")
    return spans


def bytes_of_messages(events: list[dict], window: tuple[float, float]) -> list[int]:
    """The bytes of each all-reduce that is called in the window (all are of float32 here)."""
    calls = [e for e in events if (e["name"], e.get("cat")) == ("c10d::allreduce_", "cpu_op")]
    sizes = []
    end = -math.inf
    for call in sorted(calls, key=lambda call: call["ts"]):
        if call["ts"] >= end and window[0] <= call["ts"] / 1e3 <= window[1]:
            tensors = call["args"]["Input Dims"][0]
            sizes.append(sum(4 * math.prod(shape) for shape in tensors))
            end = call["ts"] + call["dur"]  # what begins before is its own, one layer further down
    return sizes


def run(job: Job, forward: float, device: torch.device) -> Case:
    """Record one job and bring together what all ranks saw."""
    events, walls = record(job, forward, device)
    spans = read_trace(events)
    durations = gather_objects([end - start for start, end in spans["step"]])
    longest = [max(of_all_ranks) for of_all_ranks in zip(*durations, strict=True)]
    best = longest.index(min(longest))  # the same step on every rank
    window = spans["step"][best]
    ms = split_time(spans, window)
    hidden = hidden_share(spans, ms, window)
    sizes = bytes_of_messages(events, window)
    shares = avoidable_shares(events, spans, window, job.needed) if job.alone else {}
    everyone = gather_objects((ms, hidden, shares))
    return Case(
        wall=walls[best],
        traced=sum(ms.values()),
        splits=[ms for ms, _, _ in everyone],
        hidden=min(hidden for _, hidden, _ in everyone),
        message=statistics.mean(sizes or [0]),
        nbytes=sum(sizes),
        calls=len(sizes),
        ranges=len(within(spans_of(events, "user_annotation", "compute"), window)),
        avoidable={name: statistics.mean(one[name] for *_, one in everyone) for name in shares},
    )


def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


# %% [markdown]
# **What is claimed.** A bottleneck must hurt: each lengthens the step by a quarter at least. (A
# small batch does a quarter of the work; its step counts four times.) What is predicted is the ms
# of a step, so it may be off by a third of the ms by which the slow step differs from the healthy
# one, and "no change" FAILs. All are ratios within one run.


# %%
def all_reduces_of(name: str) -> int:
    """How many a step has: one per layer, or one per tensor."""
    return LAYERS * TENSORS if name == "tiny buckets" else LAYERS


def check_traces(cases: dict[str, Case], elements: int) -> None:
    """Print the table; claim that no event is lost, and that overlap is seen as overlap."""
    header = "".join(f"{kind:>11}" for kind in KINDS)
    print0(f"\n  {'ms per step':16}{header}  hidden  bytes per message")
    for name, case in cases.items():
        row = "".join(f"{case.share(kind) * case.total:11.1f}" for kind in KINDS)
        print0(f"  {name:16}{row}{case.hidden:8.0%}{case.message:19,.0f}")
    print0()
    for name, case in cases.items():
        claim(f"{name}: all-reduces in the step's trace", all_reduces_of(name), case.calls)
    gradients = 4 * LAYERS * TENSORS * elements
    sent = max((case.nbytes for case in cases.values()), key=lambda sent: abs(sent - gradients))
    claim("bytes in a step's messages, furthest off", gradients, sent)
    fewest = min(case.ranges for case in cases.values())
    claim("ranges of compute in a step's trace, fewest", 2 * LAYERS, fewest)
    ratios = [case.traced / case.wall for case in cases.values()]
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    claim("a step in the trace / by the clock, worst case", 1, worst, atol=0.05, timed=True)
    if WORLD_SIZE > 1:
        hidden = cases["healthy"].hidden
        on_sleeps = {"kind": "simulated", "timed": True}
        claim("healthy: communication hidden, at least", 0.5, hidden, ">=", **on_sleeps)
        hidden = cases["no overlap"].hidden
        claim("no overlap: communication hidden, at most", 0.1, hidden, "<=", **on_sleeps)


def check_diagnosis(cases: dict[str, Case]) -> None:
    """Claim that the traces name each bottleneck, and the healthy job healthy."""
    for name, case in cases.items():
        said = diagnose(case, latency_bound=LATENCY * BANDWIDTH)
        right = said == name.removesuffix(", alone")
        if not right:
            print0(f"{'':13}{name} is taken for: {said}")
        claim(f"{name}: named", True, right, kind="simulated", timed=True)


def per_healthy_batch(name: str, case: Case) -> float:
    """Ms that the job needs for as many samples as a healthy step has."""
    return case.total * 4 if name == "small batch" else case.total


def check_predictions(cases: dict[str, Case]) -> None:
    """Claim what each bottleneck costs, and that the step without it is as predicted."""
    healthy = next(iter(cases.values())).total
    on_sleeps = {"kind": "simulated", "timed": True}
    for name in list(cases)[1:]:
        factor = per_healthy_batch(name, cases[name]) / healthy
        claim(f"{name}: step / healthy, at least", 1.25, factor, ">=", question=1, **on_sleeps)
    if "straggler" in cases:
        exposed = [ms["all-reduce"] for ms in cases["straggler"].splits]
        least = exposed.index(min(exposed))
        claim("straggler: rank with least exposed", WORLD_SIZE - 1, least, question=2, **on_sleeps)
        print0(f"{'':13}exposed there, ms per rank: " + ", ".join(f"{ms:.0f}" for ms in exposed))
    for name in list(cases)[1:]:
        predicted = predicted_fixed(name, cases[name])
        slack = abs(cases[name].total - healthy) / 3
        text = f"{name}: ms per step, fixed"
        claim(text, predicted, healthy, atol=slack, question=3, **on_sleeps)


# %% [markdown]
# The jobs on one GPU are judged by the same claims, next to a healthy job of their own.


# %%
def check_one_gpu(device: torch.device) -> None:
    """Run section 5's jobs, if there is a GPU."""
    if device.type != "cuda":
        for name in ON_ONE_GPU:
            blocked(name, needs="1 GPU")
        return
    healthy = choose_alone(device)
    forward = 2 * healthy.needed / (3 * LAYERS)  # with backward, all layers take twice `needed`
    cases = {"healthy, alone": run(healthy, forward, device)}
    for name, change in ON_ONE_GPU.items():
        cases[name] = run(replace(healthy, **change), forward, device)
    header = "".join(f"{name:>24}" for name in ON_ONE_GPU)
    print0(f"\n  {'share of the step':24}{header}")
    for name, case in cases.items():
        print0(f"  {name:24}" + "".join(f"{share:24.0%}" for share in case.avoidable.values()))
    print0()
    check_diagnosis(cases)
    check_predictions(cases)


# %% [markdown]
# `--figure` draws where each job's step goes; a black mark is the predicted step without the
# bottleneck, the dotted line the healthy one. The small batch has four steps, which take as many
# samples as a healthy one; the straggler's rank has a bar of its own.


# %%
def draw(cases: dict[str, Case], path: str) -> None:
    """A bar per job: the ms that it takes for the samples of one healthy step, kind by kind."""
    from matplotlib.figure import Figure

    bars = []  # (label, job, splits), the lowest first
    for name, case in reversed(cases.items()):
        if name == "straggler":
            bars.append(("straggler: its own rank", name, case.splits[-1:]))
            bars.append(("straggler: the others", name, case.splits[:-1]))
        else:
            label = f"{name}, 4 steps" if name == "small batch" else name
            bars.append((label, name, case.splits))
    labels = [label for label, *_ in bars]
    longest = max(per_healthy_batch(name, case) for name, case in cases.items())
    figure = Figure((10, 4.5), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(bars)
    colors = ("#9ecae1", "#bcbddc", "#fc9272", "#fdae6b", "0.8")
    for kind, color in zip(KINDS, colors, strict=True):
        widths = []
        for _, name, splits in bars:
            steps = per_healthy_batch(name, cases[name]) / cases[name].total
            widths.append(steps * statistics.mean(ms[kind] for ms in splits))
        drawn = axes.barh(labels, widths, left=left, color=color, label=kind)
        if kind != "compute":
            words = [kind if width > longest / 10 else "" for width in widths]
            axes.bar_label(drawn, words, label_type="center")
        left = [a + b for a, b in zip(left, widths, strict=True)]
    healthy = cases["healthy"].total
    marks = [predicted_fixed(name, cases[name]) for _, name, _ in bars[:-1]]
    axes.plot(marks, labels[:-1], "k|", markersize=20)
    axes.axvline(healthy, color="k", linewidth=0.7, linestyle=":")
    for label in labels:
        axes.text(longest / 60, label, "compute", va="center")
    text = "black: the step predicted without the bottleneck"
    axes.text(1.02 * healthy, labels[-1], text, va="center")
    axes.set_title("What is not compute names the bottleneck, and says what its cure will give")
    axes.set_xlabel(f"ms, on {WORLD_SIZE} ranks; gray: idle; dotted: the healthy step")
    figure.savefig(path, dpi=150)


# %% [markdown]
# ## What you should have seen
#
# 1. Call a layer's forward F. A healthy step is 36 F of compute, and some 3 F of all-reduces that
#    the end of backward leaves exposed. The slow loader and the straggler nearly double it:
#    everybody waits for the loader, and all ranks for the slow one. Needless syncs cost 70%: each
#    layer takes as long as on the rank that is slow *in this layer*, although no rank is slow over
#    the whole step. Without overlap all twelve all-reduces are exposed, which is 20 F, half a step.
#    Tiny buckets pay the latency eight times per layer, and what no longer fits behind backward
#    sticks out: more than a step. A quarter of the batch needs two to three times as long per
#    sample, for its gradients are as large as before.
# 2. In the straggler's own. It comes last to every all-reduce and waits for nobody, while the other
#    ranks' traces show a slow network. That is why one trace is not enough.
# 3. Subtract what the trace attributes to the bottleneck, and leave what stays exposed anyway. On a
#    quiet machine that comes within some 10% of the healthy step. For the small batch it does so
#    only because the fixed part of compute is known from two batch sizes: four times the compute of
#    a quarter batch would be a third too much here.
#
# The thresholds of `diagnose` were chosen on these very jobs. Tests run it on two other models and
# two other sizes, and there it names all seven jobs as well. It has limits. With four layers the
# last all-reduce, which nothing can hide, is a fifth of a healthy step. And where a whole layer's
# message is latency-bound, three bottlenecks look alike. So look at the table first. Two
# bottlenecks at once hide each other: cure the surest, and record again.
#
# **Try.** Without its wait the loader's job is healthy, and is named so; its factor and its
# predicted step FAIL too. If `predicted_fixed` returns the slow step itself, all six FAIL: the
# slack is a third of the ms by which the slow step differs from the healthy one.
#
# **On GPUs** the host runs ahead of the device, so a range around Python code tells when kernels
# were *launched*. Look at kernels: those with "nccl" in their names are communication. Two more
# bottlenecks are common there: an `.item()` that waits for the device, and allocator retries near
# the memory's end. At a thousand ranks read the slowest few ranks' traces, not all: collect one
# figure per rank (compute ms) in every step, and record where it stands out.
#
# Section 5's three were not run on a GPU; they were planned by this arithmetic. Call the fused
# optimizer's time U: a healthy step is 3 U. A pageable copy adds 2 U before anything starts, which
# makes 1.7 times. The optimizer in eight operations takes 80 / 28 = 2.9 U, which makes 1.6 times.
# And where each kernel runs for a third of its launch, compute takes 6 U, which makes 2.3 times.


# %%
def main() -> None:
    figure = {"metavar": "PATH", "help": "save where each job's step goes as a PNG"}
    options = command_line({"--figure": figure})
    launch()
    device = setup()
    os.environ["KINETO_LOG_LEVEL"] = "99"  # else the profiler tells when it starts and stops
    forward = choose_forward(device)
    jobs = {"healthy": HEALTHY} | BOTTLENECKS
    if WORLD_SIZE == 1:
        jobs = {name: jobs[name] for name in ("healthy", "slow loader")}
        blocked("straggler, and what concerns the network", needs="2 ranks")
    elif device.type == "cuda":
        del jobs["tiny buckets"]
        blocked("tiny buckets", needs="CPU ranks: no GPU, or CUDA_VISIBLE_DEVICES=")
    cases = {name: run(job, forward, device) for name, job in jobs.items()}
    if "small batch" in cases:
        twice = run(replace(jobs["small batch"], batch=1 / 2), forward, device)
        cases["small batch"].doubled = twice.share("compute") * twice.total
    check_traces(cases, elements_per_tensor(device))
    check_diagnosis(cases)
    check_predictions(cases)
    check_one_gpu(device)
    if options.figure and RANK == 0:
        draw(cases, options.figure)
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
