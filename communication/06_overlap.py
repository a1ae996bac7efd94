"""Overlap: hide communication behind compute, and measure what is left
====================================================================

**Question.** While some gradients travel, others can still be computed. How much of the
communication then costs no time at all, and how do you know?

**Predict**, and write it down before you run:

1. A backward pass computes for 1.3 times as long as its all-reduces take. It has 12 buckets of
   equal size, and each is all-reduced as soon as it is full. Which share of the communication is
   hidden behind the computation?
2. How many of the 12 all-reduces begin before the last gradient exists?
3. Forward, the weights of 24 layers are sharded over the ranks, and each layer's are gathered one
   layer ahead. How many of the 24 all-gathers begin before the layer in front of theirs computes?
4. Is the share in question 1 the same if you take it from a profiler's trace instead of a clock?

**Run.**

    torchrun --standalone --nproc-per-node=4 06_overlap.py   # NCCL on 4 GPUs, else gloo
    python 06_overlap.py --figure timeline.png               # the same, started for you

Not run on several GPUs. For the slow network that rank 0 makes it needs Linux, iproute2, and root
or user namespaces.

**Try.** In `gradient_is_there` write `layer % PER_BUCKET == 1`: which claims fail? In
`BackwardPass.run` drop the last two lines, which wait: what fails now, and does the clock notice?

**Before.** communication/01_nccl_collectives.py: an all-reduce, and what `async_op` returns.

**Next.** communication/07_hierarchical_collectives.py
"""

import argparse
import ctypes
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NamedTuple, NoReturn

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no warning that 10.0.0.1 has no name
os.environ["KINETO_LOG_LEVEL"] = "99"  # else the profiler says when it starts and stops
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: B samples in the batch, D features. Each layer is a matrix of D x D.
D = 128
LAYERS = 24
PER_BUCKET = 2
BUCKETS = LAYERS // PER_BUCKET
HOWS = ("compute", "after", "overlap")  # no communication; all of it at the end; as early as can be

# %% [markdown]
# ## 1. An asynchronous collective: a handle now, the result later
#
# `dist.all_reduce(x)` on gloo returns when the sum is there. On NCCL it returns once its kernel is
# queued, and what the current CUDA stream does next finds the sum. With `async_op=True` the call
# returns at once and hands you a `Work`: somebody else moves the bytes meanwhile, a thread on gloo,
# another CUDA stream on NCCL. From then on x belongs to that somebody: do not read it, do not write
# it. `work.wait()` ends that: on gloo the program waits for the sum, on NCCL the current *stream*
# does, and the program goes on. What a rank does between the call and the wait is **overlap**:
#
#     blocking    compute A ......... compute B .........
#                           ==sum of A==          ==sum of B==
#
#     async       compute A compute B ......
#                           =sum of A=
#                                     =sum of B=
#
# The dots are time in which the processor waits. Communication is **exposed** as far as the step
# is longer for it; the rest is **hidden**. Above, the sum of A is hidden, and the sum of B cannot
# be: nothing is left to compute. Every rank below keeps a log of what it did when. The order of its
# rows proves what a clock can only suggest.


# %%
class Span(NamedTuple):
    """Something that took from `start` to `end`, in seconds since the pass began."""

    activity: str  # "compute" or "communication"
    part: int  # which bucket, or which layer
    start: float
    end: float


class Recorder:
    """Starts collectives without waiting for them, and logs what this rank does when."""

    def __init__(self, late: bool = False) -> None:
        self.late = late  # see section 5
        self.begin()

    def begin(self) -> None:
        self.zero = time.perf_counter()  # `log` holds, on GPUs, launch times
        self.log: list[Span] = []
        self.issued: list[float] = []  # when each collective was asked for
        self.works: list[dist.Work | torch.futures.Future | LateWork] = []

    def now(self) -> float:
        return time.perf_counter() - self.zero  # on GPUs, a launch time

    def computed(self, part: int, start: float) -> None:
        self.log.append(Span("compute", part, start, self.now()))

    def communicate(self, part: int, collective: Callable, *tensors: torch.Tensor) -> None:
        """Start `collective(*tensors)` and return at once; `works` holds its handle."""
        start = self.now()
        self.issued.append(start)
        if self.late:
            self.works.append(LateWork(collective, tensors))
            return
        work = collective(*tensors, async_op=True)
        if not tensors[0].is_cuda:  # there, a future is complete once the kernel is launched
            work = work.get_future().then(lambda _: self.communicated(part, start))
        self.works.append(work)

    def communicated(self, part: int, start: float) -> None:
        self.log.append(Span("communication", part, start, self.now()))


# %% [markdown]
# ## 2. Backward: a bucket leaves as soon as it is full
#
# Autograd computes the last layer's gradient first. One all-reduce per layer would pay the latency
# of the network 24 times, and one for all could begin only at the end. So gradients share
# **buckets**, here of two layers, and the hook of the layer that fills a bucket starts its
# all-reduce. DDP does just this (parallelism/04_buckets_and_overlap.py builds the real thing):
#
#     compute          | 23  22 | 21  20 | 19  18 |  ...  |  1   0 |              layers, last first
#     communication             |== 11 ==||== 10 ==||= 9 =| ... |= 1 =||== 0 ==|  buckets
#                                                                       exposed
#
# A hook of `register_post_accumulate_grad_hook` is handed the *parameter*, whose `grad` is
# complete by then. That `grad` is a view of the bucket here, so nothing has to be copied.


# %%
def same_weights(x_BD: torch.Tensor) -> list[torch.Tensor]:
    """Return random weights, equal on all ranks, that keep the size of activations."""
    torch.manual_seed(0)
    width = x_BD.shape[1]
    return [(torch.randn(width, width) / width**0.5).to(x_BD) for _ in range(LAYERS)]


class BackwardPass:
    """The backward pass of LAYERS linear layers, whose gradients are summed over all ranks."""

    def __init__(self, x_BD: torch.Tensor, recorder: Recorder, nap: float = 0.0) -> None:
        self.x_BD = x_BD
        self.recorder = recorder
        self.nap = nap  # seconds that every layer sleeps, as if it had more to compute
        self.weights = [nn.Parameter(weight) for weight in same_weights(x_BD)]
        self.buckets = x_BD.new_zeros(BUCKETS, PER_BUCKET, *self.weights[0].shape)
        for layer, weight in enumerate(self.weights):
            weight.grad = self.buckets[layer // PER_BUCKET, layer % PER_BUCKET]
            hook = self.hook_of(layer)
            weight.register_post_accumulate_grad_hook(hook)

    def hook_of(self, layer: int) -> Callable[[torch.Tensor], None]:
        return lambda _: self.gradient_is_there(layer)

    def gradient_is_there(self, layer: int) -> None:
        """Autograd calls this when `layer`'s gradient is complete."""
        time.sleep(self.nap)
        bucket = layer // PER_BUCKET
        self.recorder.computed(bucket, self.since)
        if self.how == "overlap" and layer % PER_BUCKET == 0:  # the first layer comes last
            self.recorder.communicate(bucket, dist.all_reduce, self.buckets[bucket])
        self.since = self.recorder.now()

    def prepare(self, how: str) -> None:
        """Forward, which is not measured here."""
        self.how = how
        self.buckets.zero_()
        y_BD = self.x_BD
        for weight in self.weights:
            y_BD = y_BD @ weight.T
        self.loss = y_BD.square().sum()

    def run(self) -> None:
        self.since = self.recorder.now()
        with record_function("compute"):
            self.loss.backward()
        if self.how == "after":
            for bucket in reversed(range(BUCKETS)):
                self.recorder.communicate(bucket, dist.all_reduce, self.buckets[bucket])
        for work in self.recorder.works:
            work.wait()


# %% [markdown]
# ## 3. Forward: prefetch the next layer's weights
#
# If the weights are sharded (ZeRO-3, FSDP), forward has to communicate as well: a layer needs its
# whole weight, and a rank holds 1/n of it. The cure is the same, the other way round: ask for layer
# i + 1 *before* you compute layer i. This is **prefetching**. It costs the memory of one more
# gathered layer, and the very first gather stays exposed:
#
#     communication    |== 0 ==||== 1 ==|  |== 2 ==|  |== 3 ==|
#     compute                   |    0    ||    1    ||    2    ||    3    |
#                       exposed


# %%
class ForwardPass:
    """The forward pass of LAYERS linear layers; each rank holds 1/n of every weight."""

    def __init__(self, x_BD: torch.Tensor, recorder: Recorder, nap: float = 0.0) -> None:
        self.x_BD = x_BD
        self.recorder = recorder
        self.nap = nap
        self.gathered = []
        self.shards = []
        for weight in same_weights(x_BD):
            padding = -weight.numel() % WORLD_SIZE  # all shards must have the same size
            flat = nn.functional.pad(weight.flatten(), (0, padding))
            self.shards.append(flat.chunk(WORLD_SIZE)[RANK].clone())
            self.gathered.append(torch.full_like(flat, torch.nan))  # what is not gathered shows

    def gather(self, layer: int) -> None:
        gathered = self.gathered[layer]
        self.recorder.communicate(layer, dist.all_gather_into_tensor, gathered, self.shards[layer])

    def prepare(self, how: str) -> None:
        self.how = how
        if how != "compute":
            return
        for gathered, weight in zip(self.gathered, same_weights(self.x_BD), strict=True):
            gathered[: weight.numel()] = weight.flatten()

    @torch.no_grad()
    def run(self) -> None:
        width = self.x_BD.shape[1]
        self.y_BD = self.x_BD
        if self.how == "overlap":
            self.gather(0)
        for layer in range(LAYERS):
            if self.how == "after":
                self.gather(layer)
            if self.how == "overlap" and layer + 1 < LAYERS:
                self.gather(layer + 1)
            if self.recorder.works:
                self.recorder.works[layer].wait()
            start = self.recorder.now()
            with record_function("compute"):
                weight = self.gathered[layer][: width * width].view(width, width)
                self.y_BD = self.y_BD @ weight.T
                time.sleep(self.nap)
            self.recorder.computed(layer, start)


# %% [markdown]
# ## 4. Exposed time, found in three ways
#
# - **By the clock**: the seconds of a pass, less those of the same pass without communication.
# - **By the trace**: the time in a profiler's trace in which a collective runs and nothing
#   computes. On gloo a collective is a span on one of gloo's threads, on NCCL a kernel.
# - **By the log**: the same in our own log.
#
# The three agree as long as communication and compute need different things. Where they compete,
# for cores on a CPU, for multiprocessors and memory bandwidth on a GPU, compute itself takes
# longer. The clock then counts that as exposed; trace and log do not, because something computes.


# %%
def covered(spans: list[Span]) -> float:
    """Seconds that at least one of the spans covers."""
    total = 0.0
    reached = -math.inf
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return total


def exposed(spans: list[Span]) -> float:
    """Seconds in which there is communication and no compute."""
    return covered(spans) - covered(computing(spans))


def computing(spans: list[Span]) -> list[Span]:
    return [span for span in spans if span.activity == "compute"]


class Timed(NamedTuple):
    """One run of a pass."""

    seconds: float
    log: list[Span]
    trace: list[Span]


class Measured(NamedTuple):
    """What is found out about a pass."""

    compute: float  # seconds without communication
    communication: float  # seconds by which communication lengthens it, when it comes after
    hidden: dict[str, float]  # the share of that which overlap hides, by "clock", "trace" and "log"
    slower: float  # how many times as long compute takes while there is communication
    overlapped: Timed


def measure(step: BackwardPass | ForwardPass) -> Measured:
    """Run each of HOWS a few times in turn, and compare the fastest: other jobs only delay one."""
    best: dict[str, Timed] = {}
    for how in HOWS * REPEATS:
        timed = run_once(step, how)
        if how not in best or timed.seconds < best[how].seconds:
            best[how] = timed
    compute, after, overlap = (best[how] for how in HOWS)
    communication = after.seconds - compute.seconds
    hidden = {
        "clock": 1 - (overlap.seconds - compute.seconds) / communication,
        "trace": 1 - exposed(overlap.trace) / (exposed(after.trace) or math.nan),
        "log": 1 - exposed(overlap.log) / (exposed(after.log) or math.nan),
    }
    slower = covered(computing(overlap.trace)) / (covered(computing(compute.trace)) or math.nan)
    return Measured(compute.seconds, communication, hidden, slower, overlap)


# %% [markdown]
# ## 5. How it is measured
#
# **The clock.** Ranks begin together, after a barrier, and on GPUs the device is synchronized on
# both sides: `wait()` on NCCL makes a stream wait, not the host.


# %%
REPEATS = 3


def run_once(step: BackwardPass | ForwardPass, how: str) -> Timed:
    on_gpu = step.x_BD.is_cuda
    activities = [ProfilerActivity.CPU]
    if on_gpu:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        step.prepare(how)
        if on_gpu:
            torch.cuda.synchronize()
        dist.barrier()
        step.recorder.begin()
        with record_function("pass"):
            step.run()
            if on_gpu:
                torch.cuda.synchronize()
        seconds = time.perf_counter() - step.recorder.zero
    return Timed(seconds, step.recorder.log, spans_of(profiler, on_gpu))


def spans_of(profiler: profile, on_gpu: bool) -> list[Span]:
    """The trace's spans: "compute" and gloo's collectives on a CPU, the pass's kernels on a GPU.

    On a GPU the trace begins with kernels of `prepare` and of the barrier, which are left out, and
    has each range of ours twice: the second, an annotation too, spans the kernels launched in it.
    """
    spans = []
    events = profiler.events()
    begin = min(event.time_range.start for event in events if event.name == "pass")
    for event in events:
        at = (event.time_range.start / 1e6, event.time_range.end / 1e6)
        kernel = event.device_type == DeviceType.CUDA and not event.is_user_annotation
        if on_gpu and kernel and event.time_range.start >= begin:
            activity = "communication" if event.name.startswith("nccl") else "compute"
            spans.append(Span(activity, 0, *at))
        elif not on_gpu and event.name in ACTIVITIES:
            spans.append(Span(ACTIVITIES[event.name], 0, *at))
    return spans


ACTIVITIES = {
    "compute": "compute",
    "gloo:all_reduce": "communication",
    "gloo:all_gather": "communication",
}

# %% [markdown]
# **The oracle** is one process that has all ranks' batches, in float64. A forgotten `wait()` would
# often go unnoticed, because on a fast machine the bytes have arrived before anyone looks. So the
# values are checked on the worst network that the rules allow: it reads a tensor when the
# collective is called, and writes the result when somebody waits, and not before. A bucket that
# leaves too early then carries too little, and one that nobody waits for never arrives.


# %%
TOLERANCE = 2 * LAYERS * D * 2**-53  # each layer adds D products, forward and backward, reordered


class LateWork:
    """A collective on a network that reads at once and delivers only when it is waited for."""

    def __init__(self, collective: Callable, tensors: tuple[torch.Tensor, ...]) -> None:
        self.collective = collective
        self.output = tensors[0]
        self.traveling = [tensor.clone() for tensor in tensors]

    def wait(self) -> None:
        self.collective(*self.traveling)
        self.output.copy_(self.traveling[0])


def batch(rank: int, rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rank))


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element; inf if one is no number."""
    error = (ours - expected).abs().max() / expected.abs().max()
    return error.nan_to_num(nan=torch.inf).item()


def check_order_and_values(device: torch.device) -> None:
    B = 8
    x_BD = batch(RANK, B, D).to(device, torch.float64)
    whole = torch.cat([batch(rank, B, D) for rank in range(WORLD_SIZE)]).to(x_BD)
    oracle = BackwardPass(whole, Recorder())
    oracle.prepare("compute")
    oracle.run()
    activations = whole
    for weight in oracle.weights:
        activations = activations @ weight.detach().T
    mine = activations[B * RANK : B * (RANK + 1)]
    for how in ("after", "overlap"):
        check_backward(how, x_BD, oracle.buckets)
        check_forward(how, x_BD, mine)


def check_backward(how: str, x_BD: torch.Tensor, expected: torch.Tensor) -> None:
    in_time = BackwardPass(x_BD, Recorder())
    run_once(in_time, how)
    last = max(span.end for span in computing(in_time.recorder.log))
    early = sum(issued < last for issued in in_time.recorder.issued)
    predicted = BUCKETS - 1 if how == "overlap" else 0
    claim(f"{how}: all-reduces before the last gradient", predicted, early, question=2)

    late = BackwardPass(x_BD, Recorder(late=True))
    late.prepare(how)
    late.run()
    error = relative_error(late.buckets, expected)
    claim(f"{how}: error of the gradients", 0, error, atol=TOLERANCE)


def check_forward(how: str, x_BD: torch.Tensor, expected: torch.Tensor) -> None:
    in_time = ForwardPass(x_BD, Recorder())
    run_once(in_time, how)
    began = [span.start for span in computing(in_time.recorder.log)]
    issued = in_time.recorder.issued
    early = sum(issued[layer + 1] < began[layer] for layer in range(LAYERS - 1))
    predicted = LAYERS - 1 if how == "overlap" else 0
    claim(f"{how}: all-gathers begun a layer ahead", predicted, early, question=3)

    late = ForwardPass(x_BD, Recorder(late=True))
    late.prepare(how)
    late.run()
    error = relative_error(late.y_BD, expected)
    claim(f"{how}: error of the activations", 0, error, atol=TOLERANCE)


# %% [markdown]
# **The slow network.** On this machine the cores that compute also copy the bytes, so what overlap
# gains here is told, and not judged. Where a network card moves the bytes, waiting costs no core.
# So that case is built: rank 0 starts two more ranks, on two **virtual nodes** joined by a slow
# cable, whose layers *sleep* instead of computing. The nodes are network namespaces, and the cable
# is a pair of virtual interfaces, throttled in both directions. The next lesson explains these
# lines (07_hierarchical_collectives.py, section 4); skip the next two cells until then.

# %%
libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNET = 0x40000000  # for unshare and setns: a network namespace
CLONE_NEWUSER = 0x10000000  # for unshare: a user namespace


def die_with(parent: int) -> None:
    """Be killed when `parent` ends (PR_SET_PDEATHSIG), or now if it has ended."""
    if sys.platform == "linux":
        libc.prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def new_network() -> int:
    """Move this process into a new network namespace; return a descriptor of it."""
    if sys.platform != "linux":
        raise OSError("network namespaces exist on Linux only")
    user = os.geteuid()
    group = os.getegid()
    if libc.unshare(CLONE_NEWNET) != 0:  # not root: become root of a user namespace first
        if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
            raise OSError(f"unshare: {os.strerror(ctypes.get_errno())}")
        for name, line in {
            "setgroups": "deny",
            "uid_map": f"0 {user} 1",
            "gid_map": f"0 {group} 1",
        }.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def enter(network: int) -> None:
    """Move this process into a network namespace."""
    if libc.setns(network, CLONE_NEWNET) != 0:
        raise OSError(f"setns: {os.strerror(ctypes.get_errno())}")


def command(line: str, keep: tuple[int, ...] = ()) -> None:
    """Run a command, with these descriptors open; raise OSError with what it complained of."""
    done = subprocess.run(line.split(), pass_fds=keep, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{done.stderr.strip()} ({line})")


def two_nodes(mbit: float) -> list[int]:
    """Make two networks joined by a cable that carries `mbit` Mbit/s each way; return both."""
    nodes = [new_network(), new_network()]  # we are in the second now
    far_end = f"peer name slow netns /proc/self/fd/{nodes[0]}"
    command(f"ip link add name slow type veth {far_end}", keep=(nodes[0],))
    for number, network in enumerate(nodes, start=1):
        enter(network)
        command("ip link set lo up")
        command(f"ip address add 10.0.0.{number}/24 dev slow")
        command("ip link set slow addrgenmode none up")  # no IPv6, so no chatter
        command("ip link set slow gso_max_segs 1")  # TCP cuts packets itself: no card does it here
        command(f"tc qdisc add dev slow root tbf rate {mbit}mbit burst 5kb latency 100ms")
    return nodes


# %% [markdown]
# Ranks are forked in their nodes, and talk to this process through pipes: nothing but what is
# measured crosses the cable. Each asks the kernel to be killed when its parent ends, so nothing is
# left behind, however the lesson ends.


# %%
def start_ranks(
    count: int, mbit: float, work: Callable[[Connection], None]
) -> tuple[list[Connection], str]:
    """Fork `count` ranks in two nodes, where each calls `work` with a pipe to this process.

    Returns the pipes and "", or no pipes and the reason why there can be no nodes. With `mbit` 0
    there is no cable: the ranks share the loopback of this machine.
    """
    pipes = [Pipe() for _ in range(count)]
    answer, tell = Pipe(duplex=False)
    parent = os.getpid()
    if os.fork() == 0:
        try:
            be_launcher(parent, mbit, [theirs for _, theirs in pipes], tell, work)
        except BaseException:  # of the launcher or of a rank, which must not return into `main`
            sys.excepthook(*sys.exc_info())
        os._exit(1)
    tell.close()
    for _, theirs in pipes:
        theirs.close()  # so that `recv` fails once those who hold the other copies have ended
    why_not = answer.recv()
    if why_not:
        os.wait()
        return [], why_not
    return [ours for ours, _ in pipes], ""


def be_launcher(
    parent: int,
    mbit: float,
    pipes: list[Connection],
    tell: Connection,
    work: Callable[[Connection], None],
) -> NoReturn:
    """Make the nodes and fork their ranks; stay until all have ended, or one of them badly."""
    os.setsid()  # Ctrl-C is for the lesson; when that ends, we do
    die_with(parent)
    try:
        nodes = two_nodes(mbit) if mbit > 0 else []
    except OSError as error:
        tell.send(str(error))
        os._exit(0)
    tell.send("")
    launcher = os.getpid()
    if nodes:
        enter(nodes[0])
    meeting = socket.create_server(("10.0.0.1" if nodes else "127.0.0.1", 0))
    for rank, pipe in enumerate(pipes):
        if nodes:
            enter(nodes[2 * rank // len(pipes)])
        if os.fork() == 0:
            die_with(launcher)
            os.environ["GLOO_SOCKET_IFNAME"] = "slow" if nodes else "lo"
            be_rank(rank, len(pipes), meeting)
            work(pipe)
            os._exit(0)
    for pipe in pipes:
        pipe.close()
    for _ in pipes:
        _, status = os.wait()
        if status != 0:
            os._exit(1)  # the ranks that are left are killed with us
    os._exit(0)


def be_rank(rank: int, world_size: int, meeting: socket.socket) -> None:
    """Join the group of the ranks in both nodes, by way of a socket that rank 0 serves."""
    global RANK, WORLD_SIZE
    RANK = rank
    WORLD_SIZE = world_size
    host, port = meeting.getsockname()
    server = {}
    if rank == 0:
        server = {"is_master": True, "master_listen_fd": os.dup(meeting.fileno())}
    store = dist.TCPStore(host, port, wait_for_workers=False, **server)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


# %% [markdown]
# An all-reduce between two ranks sends each byte of the tensor once in each direction, an
# all-gather half of them. A layer naps 1.3 times as long as its bytes need on the cable, headers
# included: a packet of 1,514 bytes carries 1,448.

# %%
MBIT = 50  # of the cable, each way
BYTE = 1514 / 1448 * 8 / MBIT / 1e6  # seconds on the cable
NAP = 1.3 * 4 * D * D * BYTE
PASSES = {"backward": BackwardPass, "forward": ForwardPass}


def measure_when_told(pipe: Connection) -> None:
    """On each of the two ranks across the cable."""
    x_BD = batch(RANK, 8, D)
    steps = {
        "backward": BackwardPass(x_BD, Recorder(), NAP),
        "forward": ForwardPass(x_BD, Recorder(), NAP / 2),
    }
    pipe.recv()
    pipe.send({name: measure(step) for name, step in steps.items()})


def from_rank_0(value: object) -> object:
    """Return rank 0's `value` on every rank."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def check_across_the_cable(link: list[Connection], why_not: str, figure: str | None) -> None:
    for pipe in link:
        pipe.send("go")
    seen = from_rank_0([pipe.recv() for pipe in link] or why_not)
    if isinstance(seen, str):
        print0(f"{'':13}{seen:.80}")
        blocked("overlap across a slow cable", needs="root or user namespaces")
        return
    for name in PASSES:
        worst = min((of_rank[name] for of_rank in seen), key=lambda found: found.hidden["clock"])
        times = f"{worst.compute * 1e3:.0f} ms, communication {worst.communication * 1e3:.0f} ms"
        print0(f"\n  {name} across the cable: compute {times}")
        for rank in range(2):
            print0(timeline(rank, seen[rank][name].overlapped))
        check_shares(name, worst.hidden)
    if figure and RANK == 0:
        draw(figure, seen)


def check_shares(name: str, hidden: dict[str, float]) -> None:
    judge = partial(claim, kind="simulated", timed=True)  # sleeps stand for the compute
    by_clock = hidden["clock"]
    if name == "backward":
        predicted = (BUCKETS - 1) / BUCKETS
        judge(f"{name}: share hidden", predicted, by_clock, atol=0.3, question=1)
    else:
        predicted = (LAYERS - 1) / LAYERS
        judge(f"{name}: share hidden", predicted, by_clock, atol=0.35)
    by_trace = hidden["trace"]
    judge(f"{name}: by trace, as by clock", by_clock, by_trace, atol=0.2, question=4)
    judge(f"{name}: by log, as by clock", by_clock, hidden["log"], atol=0.2)


# %% [markdown]
# What is printed of a pass is a timeline: a letter per bucket, or per layer, and a dot where
# nothing happens. `--figure PATH` draws the same, and in red what is exposed.


# %%
def timeline(rank: int, timed: Timed, width: int = 78) -> str:
    """Two rows of text: when this rank computed, and when it communicated."""
    rows = {"compute": ["."] * width, "communication": ["."] * width}
    scale = width / timed.seconds
    for span in timed.log:
        for column in range(round(span.start * scale), min(width, round(span.end * scale))):
            rows[span.activity][column] = chr(ord("a") + span.part)
    lines = [f"  rank {rank} {name[:4]}  {''.join(row)}" for name, row in rows.items()]
    return "\n".join(lines)


def draw(path: str, seen: list[dict[str, Measured]]) -> None:
    """A row of compute, in blue, and one of communication: green behind compute, red exposed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.5), layout="constrained")
    for axes, name in zip(figure.subplots(2), PASSES, strict=True):
        bare = []
        for rank in range(2):
            log = seen[rank][name].overlapped.log
            bare.append(f"{1e3 * exposed(log):.0f}")
            for span in sorted(log, reverse=True):  # compute first
                row = f"rank {rank}, {span.activity}"
                color = "#9ecae1" if span.activity == "compute" else "#ef3b2c"
                width = 1e3 * (span.end - span.start)
                axes.barh(row, width, left=1e3 * span.start, color=color, edgecolor="white")
                behind = computing(log) if span.activity == "communication" else []
                for other in behind:
                    start = max(span.start, other.start)
                    both = min(span.end, other.end) - start
                    if both > 0:
                        axes.barh(row, 1e3 * both, left=1e3 * start, color="#a1d99b")
                middle = 1e3 * span.start + width / 2
                axes.text(middle, row, str(span.part), ha="center", va="center", fontsize=7)
        axes.invert_yaxis()
        parts = "buckets" if name == "backward" else "layers"
        red = f"{' and '.join(bare)} ms of communication are exposed (red)"
        axes.set(title=f"{name}, {parts} numbered: {red}", xlabel="ms")
    figure.savefig(path, dpi=120)


# %% [markdown]
# ## 6. On GPUs: streams, and what overlap costs the compute
#
# A CUDA **stream** is a queue: kernels of one stream run in order, those of two may overlap. With
# `async_op=True` an all-reduce runs on a stream of the process group's own: in torch 2.15 one for
# all operations of the group, so these never overlap with each other. That stream first waits for
# an **event**, recorded on the compute stream when the gradient is there; `work.wait()` makes the
# compute stream wait for NCCL's, and the CPU goes on. Without `async_op`, torch since 2.8 runs the
# collective on the *current* stream: it then overlaps with nothing that this stream holds.
#
# Three things keep two streams from overlapping as they should:
#
# - **Multiprocessors.** NCCL's kernel occupies some of them (`NCCL_MAX_CTAS` bounds how many), and
#   it reads and writes memory. Matrix products that run next to it take longer, which no priority
#   cures. The figure `slower` below is by how much.
# - **Priority.** A large product keeps every multiprocessor busy, so NCCL's kernel may queue behind
#   its blocks. On a stream of high priority it goes first when a block *ends*. Priority does not
#   interrupt a block that runs. The old NCCL backend is told by `TORCH_NCCL_HIGH_PRIORITY=1`. torch
#   2.15's makes its stream by `pg_options` alone, `ProcessGroupNCCL.Options` with
#   `is_high_priority_stream=True`.
# - **`CUDA_DEVICE_MAX_CONNECTIONS`**, the number of hardware queues that streams share. With 1,
#   kernels start in the order in which the host launched them, whatever their streams. Megatron
#   demands that for tensor parallelism on Hopper and older GPUs, so that a collective starts before
#   the product launched after it; from Blackwell on it does not, and with FSDP it demands the
#   opposite, because a prefetch would queue behind all compute.
#
# Here the batch grows until the products of a backward pass take 1.3 times as long as its
# all-reduces, as across the cable: over NVLink 4,096 samples do, over PCIe it may take ten times as
# many.


# %%
def measure_on_this_machine(device: torch.device) -> None:
    """Print what overlap gains here; claim it on GPUs only."""
    print0()
    if device.type == "cpu":
        found = measure(BackwardPass(batch(RANK, 256, D), Recorder()))
        report("backward", found)
        blocked("share hidden behind matrix products", needs="2 GPUs")
        return
    x_BD = batch(RANK, 4096, 4096).to(device, torch.bfloat16)
    few = measure(BackwardPass(x_BD, Recorder()))
    times = from_rank_0(math.ceil(1.3 * few.communication / few.compute))
    x_BD = x_BD.repeat(min(max(times, 1), 16), 1)  # 16: 13 GB of activations
    for name, kind_of_pass in PASSES.items():
        found = measure(kind_of_pass(x_BD, Recorder()))
        report(name, found)
        parts = BUCKETS if name == "backward" else LAYERS
        most = min((parts - 1) / parts, found.compute / found.communication)
        hidden = found.hidden["clock"]
        claim(f"{name} on GPUs: share hidden", most, hidden, atol=0.3, timed=True)


def report(name: str, found: Measured) -> None:
    ways = [way for way, share in found.hidden.items() if not math.isnan(share)]
    shares = ", ".join(f"{found.hidden[way]:.0%} by the {way}" for way in ways)
    print0(f"  {name} on this machine: {found.communication * 1e3:.1f} ms of communication, hidden")
    print0(f"  {shares}; compute takes {found.slower:.2f} times as long")


# %% [markdown]
# To see an event at work, a copy from the host plays the part of NCCL below. It is enqueued last
# both times. If its stream waits for the event it ends after the products, else long before them.


# %%
def check_streams_and_events(device: torch.device) -> None:
    if device.type == "cpu":
        blocked("a stream that waits for an event, one that does not", needs="1 GPU")
        return
    x = torch.randn(8192, 8192, device=device)
    host = torch.empty(1 << 26, pin_memory=True)
    side = torch.cuda.Stream(priority=-1)  # goes first where both streams have a block to run
    begun, products, copied = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    for waits, sign in ((True, ">="), (False, "<=")):
        torch.cuda.synchronize()
        begun.record()
        for _ in range(8):
            x @ x  # 1.1 TFLOP
        products.record()
        if waits:
            side.wait_event(products)
        with torch.cuda.stream(side):
            host.to(device, non_blocking=True)  # 0.27 GB
            copied.record()
        torch.cuda.synchronize()
        end = begun.elapsed_time(copied) / begun.elapsed_time(products)
        claim(f"copy's end / the products', waiting={waits}", 1, end, sign, timed=True)


# %% [markdown]
# ## What you should have seen
#
# 1. 11/12, or 92%, is the most: whatever is computed first, the last bucket is full when nothing is
#    left to compute. A little less is measured, 87 to 91%, because every message has a latency. The
#    remedy is a *small* last bucket, and DDP's first bucket (the one with the last layers) is small
#    for the opposite reason: communication should begin early. If compute took only half as long
#    as communication, half of it at most could hide.
# 2. Eleven. This is proved by the order of events, without a clock.
# 3. Twenty-three: every gather but the first is asked for while there is still a layer to compute.
#    Prefetching two layers ahead would hide nothing more here, and cost another layer's memory.
# 4. Across the cable yes, to within 0.2, because sleeping needs no core. On this machine's
#    own loopback no: the clock has said anything from -41% to 39% here, while trace and log say
#    more, because gloo's threads take the cores from the products. Overlap that competes for what
#    compute needs can cost more than it gains. On GPUs the contention is for multiprocessors and
#    memory bandwidth; look at the clock before you believe a trace.
#
# The timeline shows it at a glance: communication runs one bucket behind compute, backward and
# forward. `--figure PATH` saves it as a picture.
#
# **Try.** `layer % PER_BUCKET == 1` sends each bucket when it is half full. Twelve all-reduces then
# begin before the last gradient, and the gradients are wrong, though on a real network only now and
# then. Without the last two lines nobody waits: the gradients never arrive, and the clock says that
# everything is hidden. Never time a step without comparing its result.
#
# On real systems: an all-reduce ends when the *slowest* rank has joined it. If one rank computes
# 20% longer, the others see their collectives last that much longer, and what looks like exposed
# communication is waiting for a straggler (profiling/01_distributed_profiling.py tells them apart).
# At a thousand ranks latency grows with the ring's 2(n-1) hops, so buckets must be larger, fewer of
# them remain, and the exposed last one weighs more.


# %%
def main() -> None:
    help_text = "draw the timeline across the slow cable"
    options = command_line({"--figure": {"metavar": "PATH", "help": help_text}})
    launch()
    if WORLD_SIZE == 1:
        refuse("needs 2 ranks or more, got 1, which has nothing to hide; set --nproc-per-node=2")
    link, why_not = start_ranks(2, MBIT, measure_when_told) if RANK == 0 else ([], "")
    device = setup()  # after the forks: it starts threads
    check_order_and_values(device)
    measure_on_this_machine(device)
    check_across_the_cable(link, why_not, options.figure)
    check_streams_and_events(device)
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
