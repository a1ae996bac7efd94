"""A bandwidth test: nccl-tests in Python, with a checker that is itself checked
=============================================================================

**Question.** How fast is every collective on this machine at every size, are its results right, and
which link sets the pace?

**Predict**, and write it down before you run:

1. An all-reduce of 4 MiB moves 1,024 times as many bytes as one of 4 KiB. How many times the busbw
   does it reach on the machine before you: about the same, 5 times as much, or more?
2. Every rank sends to the next one, again and again, and one link is 20 times slower than the rest.
   How long does a round take the rank that is farthest from it, compared with the slow link alone?
3. Up to 64 ranks add up small integers in bfloat16, which has 8 bits of precision. In how many
   elements may the result be wrong?

**Run.**

    torchrun --standalone --nproc-per-node=8 05_bandwidth_test.py -b 8 -e 8G -f 2   # NCCL
    python 05_bandwidth_test.py                                    # 4 KiB to 4 MiB, gloo on a CPU

Not run on several GPUs.

**Try.** Let `holds_part_of_total` check from element 0 on every rank: which claim fails? In
`call_reduce` leave out `b.reduce_op` and run with `-o max`: what fails now, and why not without?

**Before.** communication/01_nccl_collectives.py: the collectives.
communication/03_ring_and_tree.py: how they work inside.

**Next.** communication/06_overlap.py hides what you have measured behind compute
"""

import argparse
import contextlib
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
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

PRIME = 4099
DTYPES = {name: getattr(torch, name) for name in ("float", "double", "half", "bfloat16", "int32")}

# %% [markdown]
# ## 1. algbw and busbw: two bandwidths of one measurement
#
# An operation on an array of S bytes takes t seconds. Then **algbw** = S / t is what the caller
# sees. It falls with the number of ranks even if the links are as busy as before, because an
# all-reduce must move more than S: each rank sends 2(n-1)/n S. So NVIDIA's nccl-tests define
# **busbw** = algbw x factor, the bandwidth at which the busiest link must have carried its bytes,
# which can be held against a datasheet, and which compares across operations and numbers of ranks:
#
#     operation                                        S is        factor, n ranks
#     all_reduce                                       the array   2 (n-1)/n
#     reduce_scatter, all_gather, scatter, gather      the whole   (n-1)/n
#     all_to_all                                       the array   (n-1)/n
#     broadcast, reduce, sendrecv                      the array   1
#
# There is one exception: with NVLS or SHARP the switch adds, and a rank sends only about S instead
# of 2(n-1)/n S. Then busbw counts bytes that never traveled and may exceed the link: about 480 GB/s
# is published for 8 H100, whose NVLinks carry 450 one way.


# %%
def once(n: int) -> float:
    """The busiest link carries the whole array once."""
    return 1


def all_but_one(n: int) -> float:
    """A rank sends or receives all parts of the array but its own."""
    return (n - 1) / n


def twice_all_but_one(n: int) -> float:
    """A reduce-scatter and an all-gather."""
    return 2 * (n - 1) / n


def bandwidths(nbytes: float, seconds: float, factor: float) -> tuple[float, float]:
    """Return algbw and busbw in GB/s, where GB = 1e9 bytes."""
    algbw = nbytes / seconds / 1e9
    return algbw, algbw * factor


# %% [markdown]
# An example: "an all-reduce of 400 MB, 100 million float32 gradients, runs at 277 GB/s on 4 GPUs".
# If that is busbw, it took 400 MB x 1.5 / 277 GB/s = 2.17 ms; if it is algbw, 1.44 ms. It is busbw,
# as figures that are held against a link should be. It is each rank's, not the sum of four, and one
# way, unlike NVLink's 900 GB/s, which counts both directions. And it counts one call after the
# other on warm buffers: no backward pass that wants the memory too, and no wait for a late rank.

# %% [markdown]
# ## 2. Data that gives a wrong result away
#
# A benchmark that does not look at its results measures nothing. Rank r fills its buffer with a
# **tile** of 4,099 small integers of its own, over and over. 4,099 is a prime, so a chunk that
# lands in another chunk's place does not fit there. Sums of up to 64 numbers from 0 to 3 are exact
# in every dtype here, in bfloat16 too, whatever the order of the additions. So nothing is
# tolerated, and `#wrong` is a count of elements.


# %%
def tile(rank: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    i = torch.arange(PRIME, device=device)
    return ((i * 2654435761 + rank * 40503 >> 7) % 4).to(dtype)


def wrong(out: Tensor, pattern: Tensor, start: int = 0) -> int:
    """Count elements of `out` that are not `pattern`, repeated for ever, from `start` on."""
    pattern = pattern.roll(-start)
    whole = len(out) // PRIME * PRIME
    tiles = out[:whole].view(-1, PRIME)
    rest = out[whole:]
    return int((tiles != pattern).sum() + (rest != pattern[: len(rest)]).sum())


class Bench:
    """What all measurements share; `total` is the reduction of all ranks' tiles."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, op: str, calls: int, warmup: int
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.op = op
        self.calls = calls
        self.warmup = warmup
        self.tiles = [tile(rank, dtype, device) for rank in range(WORLD_SIZE)]
        reduction = {"sum": Tensor.sum, "max": Tensor.amax, "min": Tensor.amin}[op]
        self.total = reduction(torch.stack(self.tiles), 0).to(dtype)
        self.reduce_op = getattr(dist.ReduceOp, op.upper())

    def synchronize(self) -> None:
        """Wait until the GPU is done; without this, a clock would time only the launch."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


# %% [markdown]
# ## 3. Nine operations
#
# Each operation is a call on two buffers, `x` to read and `out` to write. PyTorch has no
# out-of-place all-reduce, broadcast or reduce, so there a copy comes first and is timed with it;
# the in-place column, which has no copy, is the one to quote.


# %%
def call_all_reduce(b: Bench, out: Tensor, x: Tensor) -> None:
    dist.all_reduce(out.copy_(x), b.reduce_op)


def call_reduce_scatter(b: Bench, out: Tensor, x: Tensor) -> None:
    dist.reduce_scatter_tensor(out, x, b.reduce_op)


def call_all_gather(b: Bench, out: Tensor, x: Tensor) -> None:
    dist.all_gather_into_tensor(out, x)


def call_all_to_all(b: Bench, out: Tensor, x: Tensor) -> None:
    dist.all_to_all_single(out, x)


def call_broadcast(b: Bench, out: Tensor, x: Tensor) -> None:
    dist.broadcast(out.copy_(x), 0)


def call_reduce(b: Bench, out: Tensor, x: Tensor) -> None:
    dist.reduce(out.copy_(x), 0, b.reduce_op)


def call_gather(b: Bench, out: Tensor, x: Tensor) -> None:
    dist.gather(x, list(out.chunk(WORLD_SIZE)) if RANK == 0 else None, 0)


def call_scatter(b: Bench, out: Tensor, x: Tensor) -> None:
    dist.scatter(out, list(x.chunk(WORLD_SIZE)) if RANK == 0 else None, 0)


def call_sendrecv(b: Bench, out: Tensor, x: Tensor) -> None:
    """Everyone sends to the next rank at once. One batch: NCCL may deadlock on separate calls."""
    send = dist.P2POp(dist.isend, x, (RANK + 1) % WORLD_SIZE)
    receive = dist.P2POp(dist.irecv, out, (RANK - 1) % WORLD_SIZE)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


# %% [markdown]
# What `out` must then hold is a list of (part of `out`, pattern, place in the pattern where the
# part begins). Ranks that receive nothing have nothing to check.


# %%
Expected = list[tuple[Tensor, Tensor, int]]


def holds_total(b: Bench, out: Tensor) -> Expected:
    return [(out, b.total, 0)]


def holds_total_on_rank_0(b: Bench, out: Tensor) -> Expected:
    return holds_total(b, out) if RANK == 0 else []


def holds_part_of_total(b: Bench, out: Tensor) -> Expected:
    return [(out, b.total, RANK * len(out))]


def holds_data_of_rank_0(b: Bench, out: Tensor) -> Expected:
    return [(out, b.tiles[0], 0)]


def holds_part_of_rank_0(b: Bench, out: Tensor) -> Expected:
    return [(out, b.tiles[0], RANK * len(out))]


def holds_data_of_left_neighbor(b: Bench, out: Tensor) -> Expected:
    return [(out, b.tiles[RANK - 1], 0)]


def holds_parts_of_all(b: Bench, out: Tensor, part: int = 0) -> Expected:
    """Part number `part` of every rank's data, in the order of ranks."""
    chunks = enumerate(out.chunk(WORLD_SIZE))
    return [(chunk, b.tiles[rank], part * len(chunk)) for rank, chunk in chunks]


def holds_parts_of_all_on_rank_0(b: Bench, out: Tensor) -> Expected:
    return holds_parts_of_all(b, out) if RANK == 0 else []


def holds_my_part_of_all(b: Bench, out: Tensor) -> Expected:
    return holds_parts_of_all(b, out, RANK)


# %% [markdown]
# One line per operation. "whole" is the array of S bytes, "part" its n-th part. In place, `x` and
# `out` are the same memory, or one is a part of the other.


# %%
class Operation(NamedTuple):
    call: Callable[[Bench, Tensor, Tensor], None]  # with out and x
    holds: Callable[[Bench, Tensor], Expected]
    x: str  # "whole" or "part"
    out: str
    factor: Callable[[int], float]  # busbw / algbw on n ranks
    in_place: bool = True
    reduces: bool = False


# fmt: off
OPS = {
    "all_reduce": Operation(
        call_all_reduce, holds_total, "whole", "whole", twice_all_but_one, reduces=True),
    "reduce_scatter": Operation(
        call_reduce_scatter, holds_part_of_total, "whole", "part", all_but_one, reduces=True),
    "all_gather": Operation(
        call_all_gather, holds_parts_of_all, "part", "whole", all_but_one),
    "all_to_all": Operation(
        call_all_to_all, holds_my_part_of_all, "whole", "whole", all_but_one, in_place=False),
    "broadcast": Operation(
        call_broadcast, holds_data_of_rank_0, "whole", "whole", once),
    "reduce": Operation(
        call_reduce, holds_total_on_rank_0, "whole", "whole", once, reduces=True),
    "gather": Operation(
        call_gather, holds_parts_of_all_on_rank_0, "part", "whole", all_but_one, in_place=False),
    "scatter": Operation(
        call_scatter, holds_part_of_rank_0, "whole", "part", all_but_one, in_place=False),
    "sendrecv": Operation(
        call_sendrecv, holds_data_of_left_neighbor, "whole", "whole", once, in_place=False),
}
# fmt: on

# %% [markdown]
# ## 4. One row of the table, and how it is measured
#
# First a call on fresh data is checked; then calls on whatever is in the buffers are timed. There
# is a barrier before the clock starts, or the slowest rank's lateness would be billed to the
# network; and the device is synchronized before it stops, or only the launch would be timed. The
# time is the mean over calls and ranks, as in nccl-tests. Where only the root receives, senders are
# done early, so for gather and reduce this mean flatters.


# %%
def buffers(b: Bench, op: Operation, count: int, in_place: bool) -> tuple[Tensor, Tensor]:
    """Return `out`, zeros, and `x`, this rank's data, for an array of `count` elements."""
    numel = {"whole": count, "part": count // WORLD_SIZE}
    x = b.tiles[RANK].repeat(math.ceil(numel[op.x] / PRIME))[: numel[op.x]]
    if not in_place:
        return x.new_zeros(numel[op.out]), x
    if op.x == op.out:
        return x, x
    if op.out == "part":
        return x.chunk(WORLD_SIZE)[RANK], x
    out = x.new_zeros(numel[op.out])
    return out, out.chunk(WORLD_SIZE)[RANK].copy_(x)


def measure(b: Bench, name: str, count: int, in_place: bool) -> dict[str, float]:
    """Check a call, time others: us, GB/s (algbw and busbw), wrong elements on all ranks."""
    op = OPS[name]
    out, x = buffers(b, op, count, in_place)
    op.call(b, out, x)
    b.synchronize()
    errors = sum(wrong(*expected) for expected in op.holds(b, out))
    for _ in range(b.warmup):
        op.call(b, out, x)
    b.synchronize()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(b.calls):
        op.call(b, out, x)
    b.synchronize()
    seconds = fmean(gather_objects((time.perf_counter() - start) / b.calls))
    algbw, busbw = bandwidths(count * b.dtype.itemsize, seconds, op.factor(WORLD_SIZE))
    errors = sum(gather_objects(errors))
    return {"us": 1e6 * seconds, "algbw": algbw, "busbw": busbw, "wrong": errors}


def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


# %% [markdown]
# The table has nccl-tests' columns: size in bytes, count of elements, and for both places the time,
# the two bandwidths in GB/s, and the number of wrong elements.

# %%
PLACES = ("out of place", "in place")


def sweep(b: Bench, begin: int, end: int, factor: int) -> list[dict]:
    """Run every operation at every size, out of place and in place; print and return the rows."""
    print0(f"\n{'':37}{PLACES[0]:^31}{PLACES[1]:^31}")
    four = f"{'us':>9} {'algbw':>6} {'busbw':>6} {'#wrong':>6} "
    print0(f"{'size':>10} {'count':>10}{'type':>9}{'redop':>6} {four}{four}".rstrip())
    sizes = []
    while begin <= end:
        sizes.append(begin)
        begin *= factor
    rows = []
    for name, op in OPS.items():
        print0(name)
        for wanted in tqdm(sizes, name, leave=False, disable=RANK > 0 or None):
            count = max(wanted // b.dtype.itemsize // WORLD_SIZE, 1) * WORLD_SIZE  # n equal parts
            row = {"op": name, "size": count * b.dtype.itemsize, "count": count}
            row |= {"type": str(b.dtype)[6:], "redop": b.op if op.reduces else "none"}
            row["out of place"] = measure(b, name, count, in_place=False)
            if op.in_place:
                row["in place"] = measure(b, name, count, in_place=True)
            rows.append(row)
            print0(as_line(row))
    return rows


def as_line(row: dict) -> str:
    line = "{size:10,} {count:10,}{type:>9}{redop:>6} ".format(**row)
    for place in PLACES:
        if place in row:
            line += "{us:9,.0f} {algbw:6.2f} {busbw:6.2f} {wrong:6,} ".format(**row[place])
        else:
            line += f"{'-':>9} {'-':>6} {'-':>6} {'-':>6} "
    return line.rstrip()


def check_rows(b: Bench, rows: list[dict]) -> None:
    """Claim that nothing was wrong, and that the check sees an error."""
    print0()
    for name in OPS:
        mine = [row for row in rows if row["op"] == name]
        measured = [row["out of place"] for row in mine]
        measured += [row["in place"] for row in mine if "in place" in row]
        errors = sum(cell["wrong"] for cell in measured)
        claim(f"{name}: wrong elements", 0, errors, question=3)
    out = b.total.repeat(3)
    out[PRIME + RANK] += 1
    claim("elements called wrong, where one is", 1, wrong(out, b.total), question=3)


# %% [markdown]
# ## 5. Which link is the limit?
#
# Each link is timed alone, from every rank to the next, by as many sends in a row as the all-reduce
# has calls. A ring is *at most* as fast as its slowest link, because every byte of the result must
# cross each of them:
#
#     rank 0 --fast--> rank 1 --slow--> rank 2 --fast--> rank 3 --fast--> rank 0
#                         rank 2 waits here; then 3 waits for 2, and 0 for 3
#
# To trust the search for the slowest link, slow one down on purpose: its sender sleeps at least 20
# times as long as the slowest link takes. The search must name it. Then all links work at once, in
# round after round, with the same sender asleep: soon a round takes *every* rank as long as the
# slow link alone. So what is claimed is the time of the rank that waits least. (The slow one's own
# time would prove nothing: it sleeps that long whatever the others do.) The clock starts after
# n - 1 rounds, when the news of the slow link has come round the ring.
#
# On NVLink and NVSwitch one pair of GPUs cannot fill its links with one send, since NCCL gives a
# single peer only a few channels. There the all-reduce, on all channels and with NVLS, may
# reach *more* than a send does. And NCCL's rings do not go from rank r to r + 1: they follow the
# topology, and across nodes several rings use several network cards.


# %%
def link_seconds(b: Bench, x: Tensor, slowed: int = -1, sleep: float = 0.0) -> list[float]:
    """Return seconds per send from each rank to the next: the best of three runs of b.calls."""
    seconds = []
    for sender in range(WORLD_SIZE):
        receiver = (sender + 1) % WORLD_SIZE
        times = []
        for _ in range(3):
            b.synchronize()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(b.calls):
                if sender == slowed and sender == RANK:
                    b.synchronize()  # sleep after the last message, not next to it
                    time.sleep(sleep)
                send_alone(x, sender, receiver)
            b.synchronize()
            times.append((time.perf_counter() - start) / b.calls)
        seconds.append(gather_objects(min(times))[receiver])  # it knows when all has come
    return seconds


def send_alone(x: Tensor, sender: int, receiver: int) -> None:
    operations = []
    if sender == RANK:
        operations.append(dist.P2POp(dist.isend, x, receiver))
    if receiver == RANK:
        operations.append(dist.P2POp(dist.irecv, x, sender))
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def all_links_seconds(b: Bench, x: Tensor, slowed: int, sleep: float) -> float:
    """Return seconds per round, in which all send to the next rank, of the rank that waits least.

    The best of three runs of b.calls rounds each.
    """
    out = torch.empty_like(x)
    times = []
    for _ in range(3):
        dist.barrier()
        for number in range(WORLD_SIZE - 1 + b.calls):
            if number == WORLD_SIZE - 1:
                b.synchronize()
                start = time.perf_counter()
            if slowed == RANK:
                b.synchronize()
                time.sleep(sleep)
            call_sendrecv(b, out, x)
        b.synchronize()
        times.append(min(gather_objects((time.perf_counter() - start) / b.calls)))
    return min(times)


# %% [markdown]
# The all-reduce's busbw is printed next to the slowest link's, and claimed to grow with the size.
# On GPUs there is a floor: where NVLink joins all of them, 1 GiB must reach 0.7 of what the links
# of a GPU carry one way. (Published: 235 of 300 GB/s on 8 A100, 370 of 450 on 8 H100 by rings.)
# There a message between two ranks has 256 MiB, so that the launch does not count.


# %%
def check_links(b: Bench) -> float:
    """Name the slowest link; return its GB/s."""
    on_gpus = b.device.type == "cuda"
    nbytes = size("256M") if on_gpus else size("4M")
    count = nbytes // b.dtype.itemsize // WORLD_SIZE * WORLD_SIZE
    x = torch.zeros(count, dtype=b.dtype, device=b.device)
    seconds = link_seconds(b, x)
    speeds = [x.nbytes / s / 1e9 for s in seconds]
    slowest = min(speeds)
    links = []
    for sender, speed in enumerate(speeds):
        links.append(f"{sender}->{(sender + 1) % WORLD_SIZE} {speed:.2f}")
    limit = links[speeds.index(slowest)]
    print0(f"\n{'':13}GB/s: {'  '.join(links[:6])}; the limit: {limit}\n")

    slowed = WORLD_SIZE // 2
    sleep = max(20 * max(seconds), 0.1)  # 0.1 s: above what a busy machine may disturb
    with_a_slow_one = link_seconds(b, x, slowed, sleep)
    named = with_a_slow_one.index(max(with_a_slow_one))
    what = "link named when one is slowed, by its sender"
    claim(what, slowed, named, kind="simulated", timed=True)
    ratio = all_links_seconds(b, x, slowed, sleep) / max(with_a_slow_one)
    what = "all links at once / the slow one alone"
    claim(what, 1, ratio, atol=0.4, question=2, kind="simulated", timed=True)

    small_count = max(4096 // b.dtype.itemsize // WORLD_SIZE, 1) * WORLD_SIZE
    large = measure(b, "all_reduce", count, in_place=True)["busbw"]
    small = measure(b, "all_reduce", small_count, in_place=True)["busbw"]
    print0(f"{'':13}all-reduce's busbw: {large / slowest:.2f} times the slowest link's")
    what = f"busbw of an all-reduce: {nbytes >> 20} MiB / 4 KiB"
    claim(what, 5, large / small, ">=", question=1, timed=True)
    check_floor(b)
    return slowest


def check_floor(b: Bench) -> None:
    """On GPUs that NVLink joins, claim what an all-reduce reaches of the links."""
    what = "1 GiB all-reduce: busbw / NVLinks, one way"
    if b.device.type == "cpu":
        blocked(what, needs="2 GPUs")
        return
    links = min(gather_objects(nvlinks_one_way(b.device)))
    if links == 0 or int(os.environ["LOCAL_WORLD_SIZE"]) < WORLD_SIZE:
        blocked(what, needs="GPUs of one node, all joined by NVLink")
        return
    count = 2**30 // b.dtype.itemsize // WORLD_SIZE * WORLD_SIZE
    busbw = measure(b, "all_reduce", count, in_place=True)["busbw"]
    claim(what, 0.7, busbw / links, ">=", timed=True)


# %% [markdown]
# NVML, the driver's library, knows the links of a GPU that are up, and their version:


# %%
def nvlinks_one_way(device: torch.device) -> float:
    """GB/s that the NVLinks of this rank's GPU, as far as they are up, carry in one direction.

    0 if the driver does not tell, or if a GPU of this node is joined to this one by another way.
    """
    import pynvml

    rate = 0.0
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        handles = []
        for gpu in range(torch.cuda.device_count()):
            uuid = str(torch.cuda.get_device_properties(gpu).uuid).removeprefix("GPU-")
            handles.append(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
        own = handles.pop(device.index)
        for other in handles:
            if pynvml.nvmlDeviceGetP2PStatus(own, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK) != 0:
                return 0.0
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):  # ends at the first that it has not
            if pynvml.nvmlDeviceGetNvLinkState(own, link):
                version = pynvml.nvmlDeviceGetNvLinkVersion(own, link)  # 6 is NVLink 4, 7 NVLink 5
                if version == 1:
                    rate += 20
                else:
                    rate += 25 if version < 7 else 50
    return rate


# %% [markdown]
# Last, the example's 400 MB on this machine. The time is told and not judged; the result is
# checked. `--figure` saves busbw against size, of the in-place calls where there are any.


# %%
def show_400_MB(b: Bench, slowest: float) -> None:
    S = 400_000_000
    count = S // b.dtype.itemsize // WORLD_SIZE * WORLD_SIZE
    b.calls = 20 if b.device.type == "cuda" else 1
    b.warmup = 1
    seen = measure(b, "all_reduce", count, in_place=True)
    here = "400 MB here, {us:,.0f} us: algbw {algbw:.2f}, busbw {busbw:.2f} GB/s, ".format(**seen)
    print0(f"\n{'':13}{here}{seen['busbw'] / slowest:.0%} of the slowest link\n")
    claim("400 MB all-reduce: wrong elements", 0, seen["wrong"])


def draw(rows: list[dict], slowest: float, path: str) -> None:
    """busbw against size, and what share of the slowest link's bandwidth the all-reduce has."""
    from matplotlib.figure import Figure

    figure = Figure((9, 5.5), layout="constrained")
    axes = figure.subplots()
    words = [(slowest, "slowest link, alone", "k")]
    for number, (name, op) in enumerate(OPS.items()):
        place = "in place" if op.in_place else "out of place"
        curve = {row["size"]: row[place]["busbw"] for row in rows if row["op"] == name}
        width = 3 if name == "all_reduce" else 1
        axes.loglog(list(curve), list(curve.values()), f"C{number}o-", linewidth=width)
        words.append((curve[max(curve)], name, f"C{number}"))
        if name == "all_reduce":
            shares = [f"{100 * busbw / slowest:.2g}%" for busbw in curve.values()]
    axes.axhline(slowest, color="k", linestyle=":")
    place = math.inf
    for busbw, text, color in sorted(words, reverse=True):
        place = min(busbw, place / 1.3)  # no text on another
        side = {"xycoords": ("axes fraction", "data"), "va": "center", "color": color}
        axes.annotate(f" {text}", (1, place), **side)
    sizes = sorted(curve)
    title = f"all_reduce: {shares[0]} of the slowest link's bandwidth with {sizes[0]:,} bytes"
    axes.set_title(f"{title}, {shares[-1]} with {sizes[-1]:,}", fontsize=11)
    ticks = sizes[:: -(-len(sizes) // 5)]
    axes.set_xticks(ticks, [f"{size:,}" for size in ticks])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set(xlabel=f"bytes of {rows[0]['type']}, {WORLD_SIZE} ranks", ylabel="busbw, GB/s")
    figure.savefig(path, dpi=120)


# %% [markdown]
# ## What you should have seen
#
# 1. Far more: hundreds of times on two cores, where an all-reduce of four ranks costs milliseconds,
#    however small it is. 4 KiB are all latency. busbw still grows at 4 MiB, so a bandwidth test
#    that stops there has measured latency; on GPUs expect the plateau from some 100 MB on. It can
#    reach the slowest link's bandwidth at most. On two cores 4 MiB reach a fifth to two fifths of
#    that, 400 MB no more, because the cores that copy are the limit.
# 2. As long: the ratio is 1, on every rank. One bad cable or one card on the wrong PCIe slot makes
#    the whole job slow, and no average shows it; so look for the slowest link first.
# 3. None. And the checker is awake: one wrong element, planted among 12,297, is counted as one.
#    With random floats a tolerance would be needed, and a bug could hide below it.
#
# If somebody quotes a figure, ask whether it is algbw or busbw. One above the link's one-way
# datasheet figure is algbw of something else, both directions added up, or NVLS.
#
# **Try.** With the check from element 0 on, "reduce_scatter: wrong elements" fails: every rank but
# rank 0 holds another part of the sum. A reduce without its operation adds, which is right by
# default and wrong with `-o max`: test with flags that differ from the defaults.
#
# On 8 GPUs, `-b 8 -e 8G -f 2 -n 20` is what nccl-tests' all_reduce_perf does; without flags this
# runs 4 KiB to 1 GiB there. But each call here comes from Python and costs some tens of
# microseconds to launch, so for small sizes nccl-tests, in C, shows less time.
# benchmarks/nccl_sweep.py compares NCCL's algorithms, protocols and NVLS on or off. The figure of a
# fabric's datasheet is reached by large messages only, of all GPUs at once: measure with as many
# nodes as the job has.


# %%
EXACT = {"bfloat16": 2**8, "half": 2**11}  # all integers up to here


def size(text: str) -> int:
    """Return the bytes meant by 8, 4K, 32M or 1G; as in nccl-tests, K is 1024."""
    unit = "KMG".find(text[-1:].upper()) + 1
    return int(text[:-1] if unit else text) * 1024**unit


def check_options(o: argparse.Namespace) -> None:
    ranks = o.g or WORLD_SIZE
    if WORLD_SIZE == 1:
        refuse("needs 2 ranks or more, for one rank has no link; got 1; set --nproc-per-node=2")
    if not 1 < ranks <= WORLD_SIZE:
        refuse(f"-g must be 2 to {WORLD_SIZE}, the number of ranks; got {ranks}")
    if o.o == "sum" and 3 * ranks > EXACT.get(o.d, math.inf):
        most = EXACT[o.d] // 3
        refuse(f"sums of {o.d} are exact up to {most} ranks, got {ranks}; set -d float or -o max")
    last = o.b if o.e is None else o.e
    if not 0 < o.b <= last:
        refuse(f"-b must be positive and at most -e; got {o.b:,} and {last:,}")
    if o.f is not None and o.f < 2:
        refuse(f"-f must be at least 2, or the sizes do not grow; got {o.f}")
    if (o.n is not None and o.n < 1) or o.w < 0:
        refuse(f"-n must be positive, -w not negative; got {o.n} and {o.w}")


def sizes_and_calls(o: argparse.Namespace, device: torch.device) -> tuple[int, int, int]:
    """Return where to end, the factor between sizes, and calls; on GPUs sizes are real ones."""
    end, factor, calls = ("1G", 4, 20) if device.type == "cuda" else ("4M", 32, 5)
    return o.e or max(o.b, size(end)), o.f or factor, o.n or calls


def main() -> None:
    global WORLD_SIZE
    options = command_line(
        {  # named as in nccl-tests
            "-b": {"type": size, "default": "4K", "metavar": "BYTES", "help": "begin here (4K)"},
            "-e": {"type": size, "metavar": "BYTES", "help": "end here (4M; on GPUs 1G)"},
            "-f": {"type": int, "metavar": "FACTOR", "help": "between sizes (32; on GPUs 4)"},
            "-g": {"type": int, "metavar": "RANKS", "help": "take part, others leave (all)"},
            "-n": {"type": int, "metavar": "CALLS", "help": "to average (5; on GPUs 20)"},
            "-w": {"type": int, "default": 1, "metavar": "CALLS", "help": "to warm up with (1)"},
            "-o": {"choices": ["sum", "max", "min"], "default": "sum", "help": "reduction (sum)"},
            "-d": {"choices": DTYPES, "default": "float", "help": "the data type (float)"},
            "--json": {"metavar": "PATH", "help": "save all rows"},
            "--figure": {"metavar": "PATH", "help": "save busbw against size as a PNG"},
        }
    )
    launch()
    check_options(options)
    WORLD_SIZE = options.g or WORLD_SIZE
    os.environ["WORLD_SIZE"] = str(WORLD_SIZE)
    if RANK >= WORLD_SIZE:
        sys.exit()  # takes no part
    device = setup()
    end, factor, calls = sizes_and_calls(options, device)
    bench = Bench(device, DTYPES[options.d], options.o, calls, options.w)
    rows = sweep(bench, options.b, end, factor)
    check_rows(bench, rows)
    slowest = check_links(bench)
    show_400_MB(bench, slowest)
    if RANK == 0 and options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))
    if RANK == 0 and options.figure:
        draw(rows, slowest, options.figure)
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
