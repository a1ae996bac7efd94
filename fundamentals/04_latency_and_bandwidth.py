"""Latency and bandwidth: what a message between two ranks costs, alpha + n/beta
=============================================================================

**Question.** How long does a message of n bytes take from one process to another, and how large
must it be before a bandwidth means anything?

**Predict**, and write it down before you run:

1. Two processes of one machine pass a buffer through shared memory, a Unix socket, TCP on the
   loopback, and gloo. Which is the slowest for 64 bytes? And how many times as long as shared
   memory does TCP take for 4 MiB: as long, twice, ten times?
2. From how many bytes on does TCP have half of its best bandwidth: 1 kB, 100 kB or 10 MB?
3. "One way" is usually half of there and back. The two ranks share a clock, so the way there can be
   timed by itself. By what factor will it differ from that half?

**Run.**

    torchrun --standalone --nproc-per-node=2 04_latency_and_bandwidth.py
    python 04_latency_and_bandwidth.py --figure paths.png               # 4 ranks, 2 of them idle

Not run on several GPUs, where NCCL is measured as well.

**Try.** In `one_way`, leave out the `/ 2`: which claims fail? In `fit`, let `held` be
`slice(0, None, 2)`: which one now?

**Before.** fundamentals/01_gpu_interconnects.py: links and their rates.
fundamentals/02_launching_processes.py: ranks and groups.

**Next.** exercises/02_measure_a_link; then fundamentals/05_several_nodes.py. What many ranks pay at
once, by the same two numbers: communication/04_alpha_beta.py.
"""

import argparse
import ctypes
import itertools
import json
import logging
import math
import mmap
import os
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

SIZES = [4**k for k in range(3, 12)]  # bytes: 64 B to 4 MiB, which takes less than a time slice
Curve = dict[int, float]  # bytes -> median seconds, one way
Move = Callable[[int], object]  # moves so many bytes
Path = tuple[Move, Move]  # send, receive

# %% [markdown]
# ## 1. The alpha-beta model of a message
#
# Two numbers describe a path (Hockney, 1994). A message of n bytes takes
#
#     t(n) = alpha + n / beta        alpha: latency, in seconds; beta: bandwidth, in bytes/second
#
#     bandwidth n / t(n)
#     beta   |                            ________________
#            |                  _____-----
#     beta/2 |_ _ _ _ _ _ _ _--
#            |            _-  .
#            |      __---     .
#            +----------------+--------------------------> log n
#                           n_1/2 = alpha beta
#
# At **n_1/2 = alpha beta** both terms are equal, and half of beta is reached; at ten times that,
# 91%. Well below n_1/2 only the *number* of messages counts, so fuse them (which is why DDP has
# buckets). Well above it only their bytes count.
#
# The fit sees every other size and minimizes *relative* errors, or the largest message alone would
# decide. It is judged on the sizes that it has not seen.


# %%
class Fit(NamedTuple):
    """The alpha-beta line through a curve."""

    alpha: float  # seconds
    beta: float  # bytes per second
    factor_off: float  # by which the line misses the sizes held out, median
    seen: set[int]  # sizes that made the line
    held: set[int]  # sizes that judge it

    @property
    def half(self) -> int:
        """n_1/2 in bytes."""
        return max(1, round(self.alpha * self.beta))


def fit(curve: Curve) -> Fit:
    n, t = np.array(list(curve.items())).T
    seen = slice(0, None, 2)
    held = slice(1, None, 2)
    lines = np.stack([1 / t[seen], n[seen] / t[seen]], axis=1)  # (alpha + n / beta) / t = 1
    alpha, inverse_beta = np.linalg.lstsq(lines, np.ones(len(lines)), rcond=None)[0]
    errors = np.abs(np.log((alpha + n[held] * inverse_beta) / t[held]))
    factor_off = float(np.exp(np.median(errors)))
    return Fit(float(alpha), float(1 / inverse_beta), factor_off, {*n[seen]}, {*n[held]})


def reaches_half(curve: Curve) -> float:
    """Bytes at which `curve` first has half of its best bandwidth, between sizes on logarithms."""
    speed = {n: n / t for n, t in curve.items()}
    half = max(speed.values()) / 2
    low, high = next((a, b) for a, b in itertools.pairwise(speed) if speed[b] >= half)
    part = math.log(half / speed[low]) / math.log(speed[high] / speed[low])
    return low * (high / low) ** part


# %% [markdown]
# One beta is a simplification: what fits in a cache is faster, and a socket copies on while the
# receiver wakes up. Latency moves with the machine's load. Sizes are a factor of four apart, and
# within one such step prediction and measurement must agree.

# %% [markdown]
# ## 2. From one process to another: sockets
#
# Two processes have separate memories. What one writes the other sees only through the kernel, or
# through memory that the kernel maps into both:
#
#     Unix socket      rank 0's buffer --copy--> kernel --copy--> rank 1's buffer
#     TCP loopback     rank 0's buffer --copy--> kernel, packets, checksums, acks --copy--> buffer
#     shared memory    rank 0's buffer --copy--> shared pages --copy--> rank 1's buffer, and a bell
#     gloo             a TCP connection, served by a thread of its own at each end
#
# **Hops one after another add their seconds.** A socket is a stream of bytes: the receiver asks for
# n of them and gets some, so it asks again.


# %%
def connect(family: int, host: dist.ProcessGroup) -> socket.socket:
    """A socket between ranks 0 and 1; the kernel picks its address, so nothing is left behind."""
    wire = socket.socket(family)
    if RANK == 0:
        wire.bind(("127.0.0.1", 0) if family == socket.AF_INET else "")
        wire.listen()
    address = told_by_rank_0(wire.getsockname(), host)
    if RANK == 0:
        with wire:
            wire, _ = wire.accept()
    else:
        wire.connect(address)
    if family == socket.AF_INET:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # small messages go at once
    return wire


def told_by_rank_0(value: object, host: dist.ProcessGroup) -> object:
    """Return rank 0's value on ranks 0 and 1, which call this; the others are not disturbed."""
    values = [value]
    if RANK == 0:
        dist.send_object_list(values, dst=1, group=host)
    else:
        dist.recv_object_list(values, src=0, group=host)
    return values[0]


def through_socket(wire: socket.socket, out: memoryview, into: memoryview) -> Path:
    def receive(n: int) -> None:
        received = 0
        while received < n:
            part = wire.recv_into(into[received:n])
            if part == 0:
                raise ConnectionError("the other rank left")
            received += part

    return lambda n: wire.sendall(out[:n]), receive


# %% [markdown]
# ## 3. Shared memory, and a bell
#
# Rank 0 makes a piece of memory without a name and hands its descriptor to rank 1 through the Unix
# socket; both map it. A copy in, a copy out, and no kernel between. But how does rank 1 know that
# something is there? Looking again and again would burn its core, so a byte through the socket
# rings a bell: for small messages that bell is all the cost. NCCL and gloo's kin do the same; it is
# why containers need a large /dev/shm.


# %%
def through_memory(bell: socket.socket, out: memoryview, into: memoryview) -> Path:
    """Memory that both ranks map. It has no name, only a descriptor: it goes when they go."""
    if RANK == 0:
        file = os.memfd_create("shared")
        os.ftruncate(file, len(out))
        socket.send_fds(bell, [b"!"], [file])
    else:
        file = socket.recv_fds(bell, 1, 1)[1][0]
    shared = memoryview(mmap.mmap(file, len(out)))
    os.close(file)
    ring, listen = through_socket(bell, memoryview(b"!"), memoryview(bytearray(1)))

    def send(n: int) -> None:
        shared[:n] = out[:n]
        ring(1)

    def receive(n: int) -> None:
        listen(1)
        into[:n] = shared[:n]

    return send, receive


# %% [markdown]
# All paths move the same random bytes. A plain copy within rank 0 is the yardstick: shared memory
# is two of them.


# %%
class Paths:
    """This rank's end of every path between ranks 0 and 1."""

    def __init__(self, host: dist.ProcessGroup, two: bool, wires: ExitStack) -> None:
        self.random = torch.randint(256, (SIZES[-1],), dtype=torch.uint8)
        if two and RANK == 1:
            self.random = torch.zeros_like(self.random)  # it sends back what it receives
        self.received = torch.zeros_like(self.random) if RANK == 0 else self.random
        out = memoryview(self.random.numpy())
        into = memoryview(self.received.numpy())

        def copy(n: int) -> None:
            if RANK == 0:
                into[:n] = out[:n]

        self.ends: dict[str, Path] = {"memory copy": (copy, copy)}
        if two:
            unix = wires.enter_context(connect(socket.AF_UNIX, host))
            tcp = wires.enter_context(connect(socket.AF_INET, host))
            self.ends["shared memory"] = through_memory(unix, out, into)
            self.ends["Unix socket"] = through_socket(unix, out, into)
            self.ends["TCP loopback"] = through_socket(tcp, out, into)
            self.ends["gloo"] = self.through_gloo(host)

    def through_gloo(self, host: dist.ProcessGroup) -> Path:
        def send(n: int) -> None:
            dist.send(self.random[:n], dst=1 - RANK, group=host)

        def receive(n: int) -> None:
            dist.recv(self.received[:n], src=1 - RANK, group=host)

        return send, receive

    def trip(self, name: str, n: int) -> tuple[float, float, float]:
        """There and back: when it began, was half done, and ended, by this rank's clock."""
        first, second = self.ends[name] if RANK == 0 else reversed(self.ends[name])
        start = time.perf_counter()
        first(n)
        middle = time.perf_counter()
        second(n)
        return start, middle, time.perf_counter()

    def wrong_bytes(self, name: str) -> int:
        """Send the largest message there and back; count what differs, on rank 0."""
        self.received.zero_()
        self.trip(name, SIZES[-1])
        return int((self.received != self.random).sum()) if RANK == 0 else 0


# %% [markdown]
# ## 4. On GPUs: NCCL between two of them
#
# The same model holds for NCCL, with other constants: alpha is a kernel launch and a handshake
# between two GPUs, beta the link. CUDA events time 20 trips; each has a send and a receive. Each
# trip is two calls from Python that find the GPU idle, so this alpha is *PyTorch's*: mostly the
# host's time, some tens of microseconds. NCCL's own, which a CUDA graph or nccl-tests'
# `sendrecv_perf` would show, is several times smaller, and so is its n_1/2.

# %%
NCCL_SIZES = [4**k for k in range(3, 15)]  # 64 B to 256 MiB


def nccl_curve(device: torch.device) -> Curve:
    """Seconds one way between the GPUs of ranks 0 and 1, which call this."""
    x = torch.zeros(NCCL_SIZES[-1], dtype=torch.uint8, device=device)

    def there_and_back(n: int) -> None:
        turns = [dist.isend, dist.irecv] if RANK == 0 else [dist.irecv, dist.isend]
        for turn in turns:
            for work in dist.batch_isend_irecv([dist.P2POp(turn, x[:n], 1 - RANK)]):
                work.wait()

    return {n: median_ms(partial(there_and_back, n)) / 2e3 for n in NCCL_SIZES}


def check_nccl(device: torch.device, host: dist.ProcessGroup) -> dict[str, Curve]:
    if device.type == "cpu":
        blocked("NCCL between 2 GPUs: alpha, beta, n_1/2", needs="2 GPUs")
        return {}
    dist.barrier()  # all ranks make their connections before two of them talk
    curve = nccl_curve(device) if RANK < 2 else None
    dist.barrier(group=host)  # on gloo: those that wait burn no GPU
    curve = from_rank_0(curve)
    print_fits({"NCCL": curve}, {"NCCL": curve})
    found = fit(curve)
    claim("NCCL: factor off on sizes held out", 2, found.factor_off, "<=", timed=True)
    steps = math.log(reaches_half(curve) / found.half, 4)
    claim("NCCL: n_1/2 found - predicted, steps of 4x", 0, steps, atol=1, timed=True)
    return {"NCCL": curve}


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
# ## 5. How it is measured
#
# Ten rounds, all paths and sizes in turns, each trip timed by itself: a median forgives the
# scheduler a few. The first round warms up. Each rank is pinned to a core, or the scheduler would
# choose anew every time whether a message has to wake another core. Linux's monotonic clock is the
# same for all processes, so rank 1 can note when the way there ended.
#
# After the first series the fits predict n_1/2. A second series has that size among its own and
# shows where half of the best bandwidth really is. Ranks beyond 1 wait in gloo, which burns no
# core.

# %%
Trips = dict[str, dict[int, list[tuple[float, float, float]]]]  # by path, by bytes


def ping_pong(paths: Paths, sizes: dict[str, list[int]]) -> Trips:
    trips: Trips = {}
    for name in sizes:
        trips[name] = {n: [] for n in sizes[name]}
    for _ in range(10):
        for name in sizes:
            for n in sizes[name]:
                for _ in range(max(1, min(10, 2**20 // n))):
                    trips[name][n].append(paths.trip(name, n))
    return trips


def one_way(trips: list[tuple[float, float, float]]) -> float:
    """Median seconds of half a trip, without the first tenth."""
    return median((end - start) / 2 for start, _, end in trips[len(trips) // 10 :])


def curves_of(trips: Trips) -> dict[str, Curve]:
    curves = {}
    for name, by_size in trips.items():
        curves[name] = {n: one_way(taken) for n, taken in by_size.items()}
    return curves


class Found(NamedTuple):
    """What rank 0 or 1 found."""

    trips: Trips
    again: Trips  # a second series, with n_1/2 among the sizes
    wrong_bytes: int


def measure_paths(host: dist.ProcessGroup, two: bool) -> Found:
    """Ranks 0 and 1 (rank 0 alone, if not `two`): every path's trips."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if cores:
        os.sched_setaffinity(0, {sorted(cores)[RANK % len(cores)]})
    with ExitStack() as wires:
        paths = Paths(host, two, wires)
        trips = ping_pong(paths, dict.fromkeys(paths.ends, SIZES))
        fits = {name: fit(curve) for name, curve in curves_of(trips).items()}
        halves = {name: min(one.half, SIZES[-1]) for name, one in fits.items()}  # the buffers' size
        if two:
            halves = told_by_rank_0(halves, host)
        again = ping_pong(paths, {name: sorted({*SIZES, n}) for name, n in halves.items()})
        wrong = sum(paths.wrong_bytes(name) for name in paths.ends)
    if cores:
        os.sched_setaffinity(0, cores)
    return Found(trips, again, wrong)


# %% [markdown]
# Every rank hears what the two have found, and judges it. gloo's own numbers are told, not judged:
# its thread wakes when the scheduler pleases.


# %%
def print_fits(curves: dict[str, Curve], again: dict[str, Curve]) -> None:
    columns = f"{'alpha':>10}{'beta':>13}{'off by':>9}{'n_1/2 predicted':>18}{'found':>12}"
    print0(f"\n  {'one way':16}{columns}")
    for name, curve in curves.items():
        found = fit(curve)
        line = f"{found.alpha * 1e6:7.1f} us{found.beta / 1e9:8.2f} GB/s{found.factor_off - 1:9.0%}"
        line += f"{found.half:12,} bytes{reaches_half(again[name]):12,.0f}"
        print0(f"  {name:16}{line}")
    print0()


def check_paths(ours: Found, theirs: Found | None) -> dict[str, Curve]:
    """Judge what rank 0 (`ours`) and rank 1 (`theirs`) found; return the curves."""
    curves = curves_of(ours.trips)
    again = curves_of(ours.again)
    print_fits(curves, again)
    claim("bytes that came back wrong, all paths", 0, ours.wrong_bytes)
    fits = {name: fit(curve) for name, curve in curves.items()}
    used_twice = sum(len(found.seen & found.held) for found in fits.values())
    claim("sizes that a fit saw and is judged on", 0, used_twice, kind="theory")
    if theirs is None:
        blocked("shared memory, Unix socket, TCP, gloo", needs="2 ranks on one Linux machine")
        return curves
    for name in ("shared memory", "Unix socket", "TCP loopback"):
        claim(f"{name}: factor off, sizes held out", 2, fits[name].factor_off, "<=", timed=True)
        steps = math.log(reaches_half(again[name]) / fits[name].half, 4)
        text = f"{name}: n_1/2 found - predicted, 4x"
        claim(text, 0, steps, atol=1, question=2, timed=True)
    check_order(curves)
    check_one_way(ours, theirs)
    return curves


def check_order(curves: dict[str, Curve]) -> None:
    small = {name: curve[SIZES[0]] for name, curve in curves.items()}
    large = {name: curve[SIZES[-1]] for name, curve in curves.items()}
    slower = small["gloo"] / max(
        small[name] for name in ("shared memory", "Unix socket", "TCP loopback")
    )
    claim("64 bytes: seconds by gloo / the next slowest", 1.2, slower, ">=", question=1, timed=True)
    slower = large["TCP loopback"] / large["shared memory"]
    claim("4 MiB: seconds by TCP / shared memory", 1.2, slower, ">=", question=1, timed=True)
    copies = large["shared memory"] / large["memory copy"]
    print0(f"{'':13}4 MiB through shared memory take {copies:.1f} times a copy; 2 predicted")


def check_one_way(ours: Found, theirs: Found) -> None:
    """The way there, by two ranks' view of one clock, next to half of there and back."""
    departures = ours.trips["TCP loopback"][4**6]
    arrivals = theirs.trips["TCP loopback"][4**6]
    there = []
    for (start, _, _), (_, arrival, _) in zip(departures, arrivals, strict=True):
        there.append(arrival - start)
    factor = median(there[len(there) // 10 :]) / one_way(departures)
    claim("4 KiB by TCP: way there / half of both", 1, factor, atol=0.4, question=3, timed=True)


def from_rank_0(value: object) -> object:
    """Return rank 0's `value` on every rank."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


# %% [markdown]
# ## What you should have seen
#
# 1. For 64 bytes shared memory and the Unix socket lead (15 to 20 us on two quiet cores), TCP
#    follows (20 to 30), gloo is last (60 to 900, by load): each layer wakes one more thread. For 4
#    MiB the order is the same for another reason: copies. Shared memory carries 7 to 9 GB/s, a
#    third to a half of a plain copy: it is two of them, between caches of two cores. A Unix socket
#    carries 4 to 7, TCP 2 to 5, gloo 1 to 3.
# 2. 100 kB: alpha 25 us times beta 3 GB/s is 75 kB, and half of the best bandwidth is found within
#    a factor of four of it. So "TCP does 3 GB/s" is true of messages of a megabyte, and 25 times
#    too optimistic for one of 3 kB.
# 3. By a few percent, for there and back are the same work. That is what allows "half a round trip"
#    where clocks are not shared. Where the ways differ (an overloaded receiver, a network with
#    unequal routes) the half is only a mean: start a busy job next to this one and look again.
#
# Every byte came back, through every path: a benchmark that loses bytes is fast. `--figure` draws
# measured dots, fitted lines and a diamond at each n_1/2, beneath what datasheets promise.
#
# **Try.** Without `/ 2` every time is a round trip: alpha doubles, beta halves, and *every fit
# remains as good as before*; only the second clock notices. A fit that is judged on the sizes it
# saw looks better than it is, by the more the fewer sizes there are.
#
# On GPUs expect an alpha of some tens of microseconds, which is the host's (section 4), and n_1/2
# of some tens of megabytes. In nccl-tests, without Python, alpha is near 10 us within a node and 20
# across nodes: even then NVLink makes a message of 100 kB pure latency. On real systems: 300 small
# gradients sent one by one cost 300 alphas, so DDP has buckets; a ring of n ranks pays 2(n-1)
# alphas, so NCCL has trees (communication/03_ring_and_tree.py). At a thousand ranks alpha decides
# small collectives alone.

# %%
CEILINGS = {  # GB/s one way; fundamentals/01_gpu_interconnects.py derives them
    "NVLink 4 (H100)": 450,
    "PCIe 5.0 x16": 63,
    "200 Gb/s NIC": 25,
    "10 Gb/s NIC": 1.25,
}


def draw(curves: dict[str, Curve], path: str) -> None:
    """Bandwidth against size: dots measured, lines fitted, diamonds at n_1/2, dashed promises."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    words = []  # (GB/s, text, color), to stand to the right
    for name, rate in CEILINGS.items():
        axes.axhline(rate, color="0.5", linewidth=0.8, linestyle="--")
        words.append((rate, f"{name}: {rate:g}", "0.4"))
    for k, (name, curve) in enumerate(curves.items()):
        found = fit(curve)
        style = {"color": f"C{k}", "markeredgecolor": f"C{k}"}
        axes.loglog(list(curve), [n / t / 1e9 for n, t in curve.items()], "o", **style)
        n = np.geomspace(min(curve), max(curve))
        fitted = n / (found.alpha + n / found.beta) / 1e9
        axes.loglog(n, fitted, linewidth=1, **style)
        axes.plot(found.half, found.beta / 2e9, "D", markersize=10, markerfacecolor="none", **style)
        words.append((fitted[-1], name, f"C{k}"))
    place = 0.0
    for rate, text, color in sorted(words):
        place = max(rate, 1.5 * place)  # no text on another
        side = {"xycoords": ("axes fraction", "data"), "va": "center", "color": color}
        axes.annotate(f" {text}", (1, place), **side)
    axes.set_title("Left of the diamond, half of the best bandwidth, a message is mostly latency")
    axes.set(xlabel="bytes in a message", ylabel="GB/s, one way")
    axes.set_xticks(SIZES[::2], ["64 B", "1 KiB", "16 KiB", "256 KiB", "4 MiB"])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    figure.savefig(path, dpi=150)


def main() -> None:
    about = {"metavar": "PATH", "help": "draw bandwidth against size"}
    options = command_line({"--figure": about})
    launch()
    if WORLD_SIZE < 2:
        refuse("needs 2 ranks or more, to send from one to the other; got 1; --nproc-per-node=2")
    device = setup()
    host = dist.new_group(backend="gloo")  # of all ranks: those who wait in it burn no core
    two = int(os.environ["LOCAL_WORLD_SIZE"]) > 1 and sys.platform == "linux"
    found = None
    if RANK == 0 or (two and RANK == 1):
        found = measure_paths(host, two)
    dist.barrier(group=host)
    ours, theirs, *_ = gather_objects(found)
    curves = check_paths(ours, theirs)
    curves |= check_nccl(device, host)
    if options.figure and RANK == 0:
        draw(curves, options.figure)
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
