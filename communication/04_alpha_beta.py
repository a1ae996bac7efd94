"""The alpha-beta cost model: which all-reduce algorithm wins when
===============================================================

**Question.** Ring or tree: which is faster, from which size on, and can two constants of a link
tell in advance?

**Predict**, and write it down before you run:

1. A message of s bytes takes alpha + s/beta. On 16 ranks, an all-reduce of S bytes costs how many
   alphas and how many S/beta around a ring? By recursive halving-doubling?
2. And up and down a binary tree, if the buffer is sent whole?
3. Four ranks are joined by links with alpha = 20 ms and beta = 10 MB/s. From how many bytes on does
   the ring beat the tree?
4. Cut the buffer of a double binary tree into very many pieces. How many S/beta remain?

**Run.**

    torchrun --standalone --nproc-per-node=4 04_alpha_beta.py    # NCCL on 4 GPUs, else gloo
    python 04_alpha_beta.py --figure alpha_beta.png              # the same, started for you

Not run on several GPUs.

**Try.** In `price`, let a step cost the bytes that a rank sends *plus* those that it receives:
which prices change? In `run_on_slow_link` sleep for the alphas only: which claims fail?

**Before.** communication/03_ring_and_tree.py: the six algorithms.
fundamentals/04_latency_and_bandwidth.py: alpha and beta of a single link.

**Next.** communication/05_bandwidth_test.py measures every collective, and which link is the limit
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
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# n is the number of ranks, N the number of elements that each of them holds, S their bytes.
WHOLE = 2**62  # elements that a message may have, if none is to be cut

# %% [markdown]
# ## 1. What a step costs: alpha + bytes / beta
#
# A message costs a fixed time **alpha** (latency), however small it is, and a time proportional to
# its bytes, at the bandwidth **beta** (Hockney, 1994). Let a *step* of an algorithm cost a rank
#
#     messages x alpha + bytes / beta      of what it sends or what it receives, whichever is more
#
# because a link carries both directions at once, but a rank handles its messages one after another.
# Let the step begin when all the ranks that it exchanges messages with have arrived. Then a
# schedule, the list of all ranks' messages step by step, can be **priced** without running it: give
# each rank a clock, and see when the last is done.


# %%
class Move(NamedTuple):
    """One message: `source` sends elements [start, stop) of its buffer to `target`."""

    source: int
    target: int
    start: int
    stop: int
    add: bool  # the target adds them to its own elements; if not, it overwrites its own


Schedule = list[list[Move]]  # step by step, the messages of all ranks


def price(schedule: Schedule, n: int, alpha: float, seconds_per_element: float) -> float:
    """Return the time at which the last of `n` ranks has done its part of `schedule`."""
    clock = [0.0] * n
    for moves in schedule:
        start = list(clock)
        sent = Counter()  # elements
        received = Counter()
        messages_out = Counter()
        messages_in = Counter()
        for move in moves:
            both_there = max(clock[move.source], clock[move.target])
            start[move.source] = max(start[move.source], both_there)
            start[move.target] = max(start[move.target], both_there)
            sent[move.source] += move.stop - move.start
            received[move.target] += move.stop - move.start
            messages_out[move.source] += 1
            messages_in[move.target] += 1
        for rank in sent.keys() | received.keys():
            elements = max(sent[rank], received[rank])
            messages = max(messages_out[rank], messages_in[rank])
            clock[rank] = start[rank] + alpha * messages + seconds_per_element * elements
    return max(clock)


# %% [markdown]
# ## 2. Six prices, and their formulas
#
# With alpha = 1 and no cost per byte, `price` counts alphas; with alpha = 0 and one second for the
# whole buffer, it counts S/beta. There are formulas for that (for the ring and the last two, see
# Thakur, Rabenseifner and Gropp, 2005). If n is a power of two and at least 4:
#
#                                    alphas          S / beta
#     star                           2 (n-1)         2 (n-1)
#     ring                           2 (n-1)         2 (n-1)/n
#     binary tree, sent whole        3 log2(n) - 1   3 log2(n) - 1
#     double binary tree, whole      3 log2(n)       3/2 log2(n)
#     recursive doubling             log2(n)         log2(n)
#     recursive halving-doubling     2 log2(n)       2 (n-1)/n
#
# The star has two steps only, but rank 0 handles n - 1 messages in each. In the tree, on the way
# up, a parent receives from two children in one step: two messages and 2 S per level, except at the
# bottom, where the last parent of 2^k ranks has one child. On the way down a parent sends two, but
# each child receives one, and goes on as soon as it has that.


# %%
def formulas(n: int) -> dict[str, tuple[float, float]]:
    """Return alphas and S/beta of each algorithm; `n` is a power of two."""
    log2_n = math.log2(n)
    return {
        "star": (2 * (n - 1), 2 * (n - 1)),
        "ring": (2 * (n - 1), 2 * (n - 1) / n),
        "tree": (3 * log2_n - 1, 3 * log2_n - 1),
        "double tree": (3 * log2_n, 3 / 2 * log2_n),
        "recursive doubling": (log2_n, log2_n),
        "recursive halving-doubling": (2 * log2_n, 2 * (n - 1) / n),
    }


def terms(algorithm: Callable, n: int, piece: int = WHOLE) -> tuple[float, float]:
    """Return how many alphas and how many S/beta an algorithm costs."""
    N = 256 * n
    schedule = algorithm(n, N, piece)
    return price(schedule, n, 1, 0), price(schedule, n, 0, 1 / N)


def check_prices() -> None:
    check_price("ring", question=1)
    check_price("recursive halving-doubling", question=1)
    check_price("tree", question=2)
    for name in ("star", "double tree", "recursive doubling"):
        check_price(name)


def check_price(name: str, question: int | None = None) -> None:
    """Compare what 16 ranks pay with the formulas."""
    alphas, shares = terms(ALL_REDUCE[name], 16)
    expected_alphas, expected_shares = formulas(16)[name]
    claim(f"{name}: alphas", expected_alphas, alphas, question=question, kind="theory")
    claim(f"{name}: S / beta", expected_shares, shares, atol=1e-9, question=question, kind="theory")


# %% [markdown]
# ## 3. Where ring and tree cross, and what pieces change
#
# The ring has many alphas and few bytes, the tree few alphas and many bytes. So as functions of S
# they are two straight lines that cross:
#
#     time |
#          |                              /  tree
#          |                          /
#          |                      /       .  ring
#          |                  X
#          |          .   /
#          |  .       /
#          |      /
#          |  /
#          +------------------|-------------- S
#                         crossing
#
#     (alphas that the tree saves) x alpha = (S / beta that the tree adds),  solved for S
#
# But nobody sends a large buffer over a tree whole. Cut into k pieces that follow one another, a
# double tree takes 2 log2(n) + k - 1 steps, and once the pipeline is full, all links work: its
# bytes fall towards 2 S, which is what its busiest rank sends, and just above the ring's 2(n-1)/n.
# With n = 16 they are 2 + 4/k; a busy rank then receives four messages per step, two from its
# children in one tree and one from a parent in each, and the alphas are 8 + 4k. So the trees that
# lose to a ring at a few kB *here* are trees without pieces; NCCL's pipelined double trees reach
# about 0.92 of the ring's bandwidth.


# %%
def check_pieces() -> None:
    n = 16
    k = 64
    piece = 256 * n // 2 // k  # of a half buffer
    alphas, shares = terms(double_tree_schedule, n, piece)
    claim(f"double tree in {k} pieces: alphas", 8 + 4 * k, alphas, kind="theory")
    what = f"double tree in {k} pieces: S / beta"
    claim(what, 2 + 4 / k, shares, atol=1e-9, question=4, kind="theory")


# %% [markdown]
# ## 4. NCCL's cost model: rings, trees and three protocols
#
# NCCL does what we just did, once, when a communicator is made: it prices each algorithm with each
# **protocol** and, for each call, takes the cheapest. Protocols differ in how a GPU learns that
# data has arrived. **Simple** sends data, then a memory fence: full bandwidth, slow to start.
# **LL** ("low latency") sends 4 bytes of flag with each 4 bytes of data: half of the bandwidth at
# most, no fence. **LL128** sends 8 bytes of flag with each 120 of data.
#
# The constants are those of NCCL 2.30.7, src/graph/tuning.cc, for H100: microseconds and GB/s. They
# describe rings and trees over nodes of 8 GPUs with Intel CPUs, and a network as fast as NVLink
# (8 cards of 400 Gb/s per node come near). Left out: the static correction factors for trees, the
# network card's own latency, and **NVLS**, where the NVSwitch adds; 8 H100 use it by default for
# large buffers. On a real machine NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING prints NCCL's table.


# %%
class Way(NamedTuple):
    """One algorithm with one protocol: microseconds, and its share of the wire's bandwidth."""

    algorithm: str
    protocol: str
    base: float  # us to start
    nvlink_step: float  # us
    network_step: float  # us
    share: float  # on one node
    share_between: float  # on several nodes


WAYS = [
    Way("ring", "LL", 6.6, 0.6, 2.7, 0.5, 0.5),
    Way("ring", "LL128", 14.0, 1.9, 4.0, 0.92, 0.92),
    Way("ring", "Simple", 8.4, 3.4, 14.0, 1.0, 1.0),
    Way("tree", "LL", 6.8, 0.6, 5.0, 0.92 / 3.8, 0.92 / 3.8),
    Way("tree", "LL128", 14.0, 1.25, 8.5, 0.92 * 7 / 9, 0.92 * 120 / 128),
    Way("tree", "Simple", 8.4, 4.0, 14.0, 0.92, 0.92),
]
H100_WIRE = 18 * 20.6  # GB/s one way: NVLinks per GPU, what NCCL expects of each
LL_LIMIT = {1: 141.0, 2: 39.0}  # GB/s that LL reaches at most, by nodes
LL_LIMIT_BEYOND = 20.4  # on three nodes and more
NET_OVERHEAD = 1.0  # us to post a message to the network; 3 times that with Simple


def nccl_us(way: Way, nodes: int, nbytes: float, wire: float = H100_WIRE) -> float:
    """Return NCCL's price of an all-reduce over nodes of 8 GPUs, in microseconds."""
    n = 8 * nodes
    inside = way.nvlink_step
    if way.algorithm == "ring":
        steps_between = 2 * (nodes - 1)
        steps_inside = 2 * (n - 1) - steps_between
        traffic = 2 * (n - 1) / n
        if nodes > 1:
            inside = max(inside, NET_OVERHEAD * (3 if way.protocol == "Simple" else 1))
    else:  # a chain inside each node and a tree across nodes, both up and down
        steps_between = 2 * int(math.log2(nodes))
        steps_inside = 2 * (8 - 1)
        traffic = 2
    bandwidth = wire * (way.share if nodes == 1 else way.share_between)
    if way.protocol == "LL":
        bandwidth = min(bandwidth, LL_LIMIT.get(nodes, LL_LIMIT_BEYOND))
    fixed = way.base + steps_inside * inside + steps_between * way.network_step
    return fixed + nbytes * traffic / bandwidth / 1e3


def cheapest(nodes: int, nbytes: int) -> tuple[float, Way]:
    """Return NCCL's choice and its price."""
    prices = [(nccl_us(way, nodes, nbytes), way) for way in WAYS]
    return min(prices)


# %% [markdown]
# The table that this prints is computed, not measured, and nothing is claimed of it. Below it stand
# the published bandwidths of two real machines for comparison. What NCCL takes on *your* machine,
# and how fast each choice is there, benchmarks/nccl_sweep.py finds out.


# %%
def show_nccl_choices() -> None:
    print0(f"\n  {'all_reduce of':16}8 H100, one node           32 H100, four nodes")
    for exponent in range(10, 31, 4):
        cells = ""
        for nodes in (1, 4):
            us, way = cheapest(nodes, 2**exponent)
            cells += f"{way.algorithm:5}{way.protocol:7}{us:9,.0f} us     "
        size = f"{2 ** (exponent % 10)} {'KMG'[exponent // 10 - 1]}iB"
        print0(f"  {size:16}{cells}".rstrip())
    simple_ring = WAYS[2]
    for gpu, wire, published in (("A100", 12 * 20, 235), ("H100", H100_WIRE, 370)):
        us = nccl_us(simple_ring, 1, 8e9, wire)
        busbw = 2 * 7 / 8 * 8e9 / us / 1e3
        print0(f"  8 {gpu}, ring: busbw {busbw:.0f} GB/s by this model, {published} published")
    print0()


# %% [markdown]
# ## 5. A simulated link, and two constants fitted to it
#
# Can two constants describe six algorithms that really run? Ranks that share cores and caches have
# no links of their own on which to test that. So the link is **simulated**: after each step a rank
# sleeps for its messages x ALPHA + bytes/BETA. Messages, order and waiting are real; the cost of a
# step is planted. What this tests is the *accounting*: that the time of a whole algorithm is that
# of the messages and bytes along the critical path, as `price` says. It does not test that real
# links obey the model; section 7 looks at that.
#
# Alpha and beta are fitted, one pair for all six algorithms, to every other size by least squares
# of relative errors. The claims are about the sizes in between, which the fit has not seen. Last, a
# large buffer goes over a double tree whole, and in eight pieces. There nothing is slept for alpha,
# which leaves the S/beta.

# %%
ALPHA = 20e-3  # s
BETA = 1e7  # bytes/s
ANSWERS = {"ring": 1, "recursive halving-doubling": 1, "tree": 2}  # which questions of *Predict*
Curve = dict[int, float]  # bytes: seconds


def run_on_slow_link(
    algorithm: Callable, x_N: torch.Tensor, piece: int = WHOLE, alpha: float = ALPHA
) -> None:
    """Carry out an all-reduce; sleep after each step what a slow link would have taken."""
    for receives, sends in steps_of_this_rank(algorithm, len(x_N), piece):
        exchange_step(x_N, receives, sends)
        if x_N.is_cuda:
            torch.cuda.synchronize()
        sent = sum(move.stop - move.start for move in sends)
        received = sum(move.stop - move.start for move in receives)
        messages = max(len(sends), len(receives))
        time.sleep(messages * alpha + max(sent, received) * x_N.itemsize / BETA)


def fit_alpha_beta(costs: dict[str, tuple], curves: dict[str, Curve], sizes: list) -> np.ndarray:
    """Return alpha and 1/beta that fit all algorithms with the least squared relative error."""
    rows = []
    for name, (alphas, shares) in costs.items():
        for size in sizes:
            seconds = curves[name][size]
            rows.append((alphas / seconds, shares * size / seconds))
    return np.linalg.lstsq(np.array(rows), np.ones(len(rows)), rcond=None)[0]


def predict_seconds(
    costs: dict[str, tuple], alpha: float, seconds_per_byte: float, sizes: list[int]
) -> dict[str, Curve]:
    curves = {}
    for name, (alphas, shares) in costs.items():
        curves[name] = {s: alphas * alpha + shares * s * seconds_per_byte for s in sizes}
    return curves


def crossing(ring_curve: Curve, tree_curve: Curve) -> float:
    """Return from which size on the ring is faster, on straight lines between sizes; else NaN."""
    for smaller, larger in pairwise(sorted(ring_curve)):
        before = ring_curve[smaller] - tree_curve[smaller]
        after = ring_curve[larger] - tree_curve[larger]
        if before > 0 >= after:
            return smaller + (larger - smaller) * before / (before - after)
    return math.nan


# %% [markdown]
# Five sizes around the crossing, a factor of three apart; the first, third and fifth are fitted.


# %%
def check_slow_link(device: torch.device) -> tuple[dict, dict]:
    costs = {name: terms(algorithm, WORLD_SIZE) for name, algorithm in ALL_REDUCE.items()}
    alphas_saved = costs["ring"][0] - costs["tree"][0]
    shares_added = costs["tree"][1] - costs["ring"][1]
    planted = max(1, alphas_saved) * ALPHA * BETA / shares_added  # bytes; 4 ranks or more cross
    sizes = [4 * round(planted * 3**k / 4) for k in (-2, -1, 0, 1, 2)]
    runs = {}
    for name, algorithm in ALL_REDUCE.items():
        runs[name] = partial(run_on_slow_link, algorithm)
    curves = measure(runs, sizes, device)
    return check_curves(costs, curves), curves


def check_curves(costs: dict[str, tuple], curves: dict[str, Curve]) -> dict[str, Curve]:
    """Fit alpha and beta, judge the sizes that the fit has not seen; return what is predicted."""
    sizes = list(curves["ring"])
    alpha, seconds_per_byte = fit_alpha_beta(costs, curves, sizes[::2])
    predicted = predict_seconds(costs, alpha, seconds_per_byte, sizes)
    print0(f"\n{'':13}slept: alpha {ALPHA * 1e3:g} ms, beta {BETA / 1e6:g} MB/s")
    print0(f"{'':13}fitted: alpha {alpha * 1e3:.2f} ms, beta {1e-6 / seconds_per_byte:.2f} MB/s")

    for name in ALL_REDUCE:
        ratios = [curves[name][size] / predicted[name][size] for size in sizes[1::2]]
        worst = max(ratios, key=lambda ratio: abs(math.log(ratio)))
        what = f"{name}: seconds / predicted"
        number = ANSWERS.get(name)
        claim(what, 1, worst, atol=0.25, question=number, kind="simulated", timed=True)
    what = "ring beats tree: from bytes / predicted"
    alphas_saved = costs["ring"][0] - costs["tree"][0]
    if alphas_saved <= 0:
        blocked(what, needs="4 ranks: between fewer a ring has no more alphas than a tree")
        return predicted
    shares_added = costs["tree"][1] - costs["ring"][1]
    expected = alphas_saved * alpha / (shares_added * seconds_per_byte)
    found = crossing(curves["ring"], curves["tree"])
    print0(f"{'':13}the ring wins from {expected:,.0f} bytes predicted, {found:,.0f} found")
    slack = 0.4  # the curves cross at a small angle: 3% of one's time is a fifth of the size
    claim(what, 1, found / expected, atol=slack, question=3, kind="simulated", timed=True)
    return predicted


def check_pieces_on_slow_link(device: torch.device) -> None:
    """Compare a double tree in eight pieces with the same one, sent whole."""
    N = 2**18  # 1 MB
    runs = {}
    shares = []
    for pieces in (1, 8):
        piece = N // 2 // pieces
        runs[pieces] = partial(run_on_slow_link, double_tree_schedule, piece=piece, alpha=0.0)
        shares.append(terms(double_tree_schedule, WORLD_SIZE, 256 * WORLD_SIZE // 2 // pieces)[1])
    curves = measure(runs, [4 * N], device)
    judge_pieces(shares, [curves[pieces][4 * N] for pieces in runs])


def judge_pieces(shares: list[float], seconds: list[float]) -> None:
    what = "double tree in 8 pieces / whole: seconds"
    ratio = seconds[1] / seconds[0]
    expected = shares[1] / shares[0]
    claim(what, expected, ratio, atol=0.15, question=4, kind="simulated", timed=True)


# %% [markdown]
# ## 6. How it is measured
#
# A time is the best of three, each taken between a barrier and the slowest rank's end; algorithms
# take turns. On GPUs the device is synchronized before the clock is read.


# %%
def measure(
    runs: dict[str, Callable], sizes: list[int], device: torch.device, calls: int = 1
) -> dict[str, Curve]:
    """Return seconds per call, by name and bytes."""
    curves = {name: dict.fromkeys(sizes, math.inf) for name in runs}
    for _ in range(3):
        for size in sizes:
            x_N = torch.zeros(size // 4, device=device)
            for name, work in runs.items():
                seconds = slowest_seconds(partial(work, x_N), device, calls)
                curves[name][size] = min(curves[name][size], seconds)
    return curves


def slowest_seconds(work: Callable, device: torch.device, calls: int) -> float:
    """Return the mean time of `work()`, by the clock of the slowest rank."""
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = torch.tensor((time.perf_counter() - start) / calls, device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def draw(path: str, predicted: dict[str, Curve], curves: dict[str, Curve]) -> None:
    """Save times against bytes; lines are predicted, dots measured."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    for number, (name, curve) in enumerate(predicted.items()):
        seconds = [curves[name][size] for size in curve]
        axes.loglog(list(curve), list(curve.values()), color=f"C{number}")
        axes.loglog(list(curve), seconds, "o", color=f"C{number}", label=name)
    place = 0.0
    for line in sorted(axes.lines[1::2], key=lambda line: line.get_ydata()[-1]):
        place = max(line.get_ydata()[-1], 1.07 * place)  # names must not cover each other
        style = {"xycoords": ("axes fraction", "data"), "va": "center", "color": line.get_color()}
        axes.annotate(f" {line.get_label()}", (1, place), **style)
    axes.set_title(
        f"All-reduce of {WORLD_SIZE} ranks over a simulated link, in which a message is a sleep:\n"
        "two constants predict (lines) all that is measured (dots)"
    )
    sizes = list(predicted["ring"])
    axes.set_xticks(sizes, [f"{size / 1e3:,.0f} kB" for size in sizes])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter(lambda seconds, _: f"{1e3 * seconds:g} ms")
    axes.minorticks_off()
    figure.savefig(path, dpi=120)


# %% [markdown]
# The six algorithms are those of communication/03_ring_and_tree.py, to the letter, since a lesson
# imports no other. First the star, the ring and the trees.


# %%
def star_schedule(n: int, N: int, piece: int) -> Schedule:
    """Gather everything at rank 0, then broadcast the sum from there."""
    everyone_sends = [Move(rank, 0, 0, N, add=True) for rank in range(1, n)]
    rank_0_sends = [Move(0, rank, 0, N, add=False) for rank in range(1, n)]
    return [everyone_sends, rank_0_sends]


def split_span(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
    """Cut [start, stop) into spans whose lengths differ by at most one."""
    edges = [start + (stop - start) * i // parts for i in range(parts + 1)]
    return list(pairwise(edges))


def around_the_ring(n: int, N: int, offset: int, add: bool) -> Schedule:
    """Each step, send a chunk to the right neighbor: first chunk rank + offset, then those before.

    After n - 1 steps, rank r has received chunk r + offset + 1 last.
    """
    chunks = split_span(0, N, n)
    schedule = []
    for step in range(n - 1):
        moves = []
        for rank in range(n):
            start, stop = chunks[(rank + offset - step) % n]
            moves.append(Move(rank, (rank + 1) % n, start, stop, add))
        schedule.append(moves)
    return schedule


def reduce_scatter_schedule(n: int, N: int, piece: int) -> Schedule:
    """Leave the finished sum of chunk r on rank r."""
    return around_the_ring(n, N, offset=-1, add=True)  # chunk r ends on rank r


def all_gather_schedule(n: int, N: int, piece: int) -> Schedule:
    """Copy chunk r of rank r to all ranks."""
    return around_the_ring(n, N, offset=0, add=False)  # it begins with its own chunk


def ring_schedule(n: int, N: int, piece: int) -> Schedule:
    return reduce_scatter_schedule(n, N, piece) + all_gather_schedule(n, N, piece)


# %% [markdown]
# The trees:


# %%
def count_pieces(length: int, piece: int) -> int:
    """Return how many messages of at most `piece` elements it takes to send `length`."""
    return max(1, math.ceil(length / piece))


def up_and_down(parents: list[int], spans: list[tuple[int, int]]) -> Schedule:
    """Sum up the tree to rank 0, then copy down, piece after piece. Needs parents[rank] < rank."""
    depth = [0]
    for rank in range(1, len(parents)):
        depth.append(depth[parents[rank]] + 1)
    deepest = max(depth)
    schedule = [[] for _ in range(2 * deepest + len(spans) - 1)]
    for rank in range(1, len(parents)):
        parent = parents[rank]
        for i, (start, stop) in enumerate(spans):
            step_up = deepest - depth[rank] + i
            step_down = deepest + depth[rank] - 1 + i
            schedule[step_up].append(Move(rank, parent, start, stop, add=True))
            schedule[step_down].append(Move(parent, rank, start, stop, add=False))
    return schedule


def tree_schedule(n: int, N: int, piece: int) -> Schedule:
    """A binary tree: the parent of rank r is (r - 1) // 2."""
    parents = [(rank - 1) // 2 for rank in range(n)]
    return up_and_down(parents, split_span(0, N, count_pieces(N, piece)))


def double_tree_schedule(n: int, N: int, piece: int) -> Schedule:
    """Two binary trees, one with the ranks in reverse order, for half of the elements each."""
    parents = [(rank - 1) // 2 for rank in range(n)]
    first_half, second_half = split_span(0, N, 2)
    count = count_pieces(N - N // 2, piece)
    first_tree = up_and_down(parents, split_span(*first_half, count))
    second_tree = up_and_down(parents, split_span(*second_half, count))
    schedule = []
    for moves, others in zip(first_tree, second_tree, strict=True):
        mirrored = [m._replace(source=n - 1 - m.source, target=n - 1 - m.target) for m in others]
        schedule.append(moves + mirrored)
    return schedule


# %% [markdown]
# The two recursive ones:


# %%
def largest_power_of_two(n: int) -> int:
    """Return the largest power of two that is at most n."""
    return 1 << (n.bit_length() - 1)


def fold_schedule(n: int, power: int, N: int) -> Schedule:
    """The ranks from `power` on add their elements to those of a partner."""
    moves = [Move(rank, rank - power, 0, N, add=True) for rank in range(power, n)]
    return [moves] if moves else []


def reversed_schedule(schedule: Schedule) -> Schedule:
    """The same messages in reverse order and direction; what arrives is copied."""
    back = []
    for moves in reversed(schedule):
        back.append([Move(m.target, m.source, m.start, m.stop, add=False) for m in moves])
    return back


def recursive_doubling_schedule(n: int, N: int, piece: int) -> Schedule:
    """Exchange everything with the rank at distance 1, 2, 4, ..."""
    power = largest_power_of_two(n)
    folded = fold_schedule(n, power, N)
    schedule = list(folded)
    distance = 1
    while distance < power:
        schedule.append([Move(rank, rank ^ distance, 0, N, add=True) for rank in range(power)])
        distance *= 2
    return schedule + reversed_schedule(folded)


def recursive_halving_doubling_schedule(n: int, N: int, piece: int) -> Schedule:
    """Exchange halves at distance n/2, quarters at n/4, ...; then the same backwards."""
    power = largest_power_of_two(n)
    schedule = fold_schedule(n, power, N)
    spans = [(0, N)] * power  # what each rank still has to finish
    distance = power // 2
    while distance >= 1:
        moves = []
        for rank in range(power):
            peer = rank ^ distance
            lower, upper = split_span(*spans[rank], 2)
            keep, give = (lower, upper) if rank < peer else (upper, lower)
            moves.append(Move(rank, peer, *give, add=True))
            spans[rank] = keep
        schedule.append(moves)
        distance //= 2
    return schedule + reversed_schedule(schedule)


ALL_REDUCE: dict[str, Callable] = {
    "star": star_schedule,
    "ring": ring_schedule,
    "tree": tree_schedule,
    "double tree": double_tree_schedule,
    "recursive doubling": recursive_doubling_schedule,
    "recursive halving-doubling": recursive_halving_doubling_schedule,
}

# %% [markdown]
# And how a schedule is carried out, one step at a time:


# %%
@cache  # training reduces buffers of the same lengths in each iteration
def steps_of_this_rank(algorithm: Callable, N: int, piece: int) -> list[tuple]:
    """Return what this rank receives and what it sends, for each step in which it takes part."""
    steps = []
    for everything in algorithm(WORLD_SIZE, N, piece):
        moves = [move for move in everything if move.start < move.stop]  # not empty
        receives = [move for move in moves if move.target == RANK]
        sends = [move for move in moves if move.source == RANK]
        if receives or sends:
            steps.append((receives, sends))
    return steps


# Kept from call to call, since touching new memory costs page faults: without this, a ring of two
# ranks took 1.2 to 1.5 times as long for 64 MB.
@cache
def kept_memory(number: int, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory in which the step's message `number` arrives, until it is added."""
    return torch.empty(length, dtype=dtype, device=device)


def exchange_step(
    x_N: torch.Tensor, receives: list[Move], sends: list[Move], combine: Callable = torch.add
) -> None:
    """Send and receive this rank's messages of one step; combine what arrives with its own."""
    places = []
    operations = []
    for number, move in enumerate(receives):
        place = x_N[move.start : move.stop]
        if move.add:
            place = kept_memory(number, len(place), x_N.dtype, x_N.device)
        places.append(place)
        operations.append(dist.P2POp(dist.irecv, place, move.source))
    for move in sends:
        operations.append(dist.P2POp(dist.isend, x_N[move.start : move.stop], move.target))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for move, place in zip(receives, places, strict=True):
        if move.add:
            own = x_N[move.start : move.stop]
            combine(own, place, out=own)


# %% [markdown]
# ## 7. Without sleeping: this machine, and on GPUs real links
#
# Now the same algorithms with nothing planted, next to `dist.all_reduce`, and two constants fitted
# to *these* times. On two cores this is a test that the model does not pass: there are no separate
# links, and what one rank copies, another waits for. On GPUs the links are real, sizes go to 1 GiB,
# and the table says which of the six comes near to NCCL's own. (Trees are priced whole here, and
# run in pieces of 4 MiB.) All of this is told and not judged: no claim depends on it.


# %%
def show_this_machine(device: torch.device) -> None:
    sizes = [4**6, 4**9, 4**12]
    if device.type == "cuda":
        sizes = [4**6, 4**10, 4**13, 4**15]
    costs = {name: terms(algorithm, WORLD_SIZE) for name, algorithm in ALL_REDUCE.items()}
    runs = {}
    for name, algorithm in ALL_REDUCE.items():
        runs[name] = partial(run_at_full_speed, algorithm)
    curves = measure(runs | {"dist.all_reduce": dist.all_reduce}, sizes, device, calls=2)
    alpha, seconds_per_byte = fit_alpha_beta(costs, curves, sizes)
    predicted = predict_seconds(costs, alpha, seconds_per_byte, sizes)
    print0(f"\n  {'without sleeping: ms (fitted)':30}" + "".join(f"{s:>13,} bytes" for s in sizes))
    for name, curve in curves.items():
        cells = ""
        for size in sizes:
            fitted = f"({predicted[name][size] * 1e3:.2f})" if name in predicted else ""
            cells += f"{curve[size] * 1e3:9.2f} {fitted:>9}"
        print0(f"  {name:30}{cells}".rstrip())
    print0(f"  alpha {alpha * 1e6:,.0f} us, beta {1e-9 / seconds_per_byte:,.2f} GB/s fit best")
    largest = sizes[-1]
    for name in ("ring", "dist.all_reduce"):
        busbw = 2 * (WORLD_SIZE - 1) / WORLD_SIZE * largest / curves[name][largest] / 1e9
        print0(f"  {name}: busbw {busbw:,.2f} GB/s at {largest:,} bytes")


def run_at_full_speed(algorithm: Callable, x_N: torch.Tensor) -> None:
    """Carry out an all-reduce; a message of a tree has 4 MiB at most."""
    for receives, sends in steps_of_this_rank(algorithm, len(x_N), 2**22 // x_N.itemsize):
        exchange_step(x_N, receives, sends)


# %% [markdown]
# ## What you should have seen
#
# 1. 30 alphas and 2 x 15/16 = 1.875 S/beta around the ring; 8 alphas and the same bytes by
#    recursive halving-doubling, which therefore beats the ring at every size *in this model*. Real
#    networks are not a full crossbar: at distance n/2 all ranks cross the middle of the network at
#    once, and the model knows nothing of that. A ring crosses it in two places only.
# 2. 11 of both: a parent pays for two messages per level on the way up, a child for one on the way
#    down. Among 1,024 ranks it would be 29 alphas instead of the ring's 2,046; and the star, with
#    its two steps, would pay 2,046 as well.
# 3. From 57,143 bytes on with the planted constants: 1 alpha saved x 20 ms x 10 MB/s / 3.5. The
#    fitted alpha also holds what gloo takes for a message, so prediction and measurement are both
#    somewhat larger. For a link of 5 us and 50 GB/s the same formula gives 71 kB.
# 4. 2, and 2 + 4/64 with 64 pieces: pipelining removes the tree's disadvantage almost completely.
#    It costs alphas, 264 of them here, so pieces must not be too small; NCCL tunes that, too. Four
#    ranks have 3 S/beta whole and 1.69 in eight pieces, and the simulated link shows that ratio.
#
# NCCL, by its own constants: ring with LL for 1 KiB in one node, where its tree is a chain of 8,
# with as many steps as the ring and no advantage. Tree with LL for 1 KiB on four nodes, where the
# ring needs 62 steps. Ring with Simple for 1 GiB in both. In between, LL128. On 8 H100, NVLS beats
# all of them for large buffers: busbw of about 480 GB/s is published, against 370 for rings.
#
# On the simulated link, one pair of constants predicts six algorithms on sizes that it has not
# seen, to about 10%. Without sleeping it does not: compare the fitted times in brackets. For small
# buffers on two cores, a rank's turn on a core costs more than any message; for large ones all
# ranks share one memory bus, so what counts is the sum of all bytes and not the busiest rank. A
# model is as good as its assumption that each rank has a link of its own. `--figure` saves the
# times over the simulated link, lines predicted, dots measured.
#
# **Try.** If a step costs what is sent plus what is received, every algorithm in which ranks do
# both at once gets dearer: ring, recursive doubling, halving-doubling and double tree. The star and
# the plain tree keep their prices, since there a rank either sends or receives. Without the
# bandwidth in the sleep, all sizes take the same time: the crossing, sizes held out and pieces
# fail.
#
# At 1,024 ranks the ring's 2,046 steps, of 14 us each if NCCL's Simple crosses a network (section
# 4), are 29 ms, as long as it takes to send 1.4 GB at 50 GB/s. That is why large jobs use trees,
# hierarchies (communication/07) and switches that add.


# %%
def main() -> None:
    flag = {"metavar": "PATH", "help": "draw the times over the simulated link to this file"}
    options = command_line({"--figure": flag})
    launch()
    device = setup()
    check_prices()
    check_pieces()
    show_nccl_choices()
    if WORLD_SIZE == 1:
        blocked("times, and where ring and tree cross", needs="2 ranks")
        finish()
    dist.barrier()  # NCCL: all ranks meet before the first batch_isend_irecv
    predicted, curves = check_slow_link(device)
    check_pieces_on_slow_link(device)
    show_this_machine(device)
    if options.figure and RANK == 0:
        draw(options.figure, predicted, curves)
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
