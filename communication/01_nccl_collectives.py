"""Collectives: broadcast, all-reduce, all-gather, reduce-scatter, all-to-all
==========================================================================

**Question.** What does each collective of `torch.distributed` do, how many bytes must it move, and
what goes wrong when ranks do not call it together?

**Predict**, and write it down before you run:

1. Four ranks hold 1, 2, 3 and 4, and call `dist.all_reduce`. What does each hold then?
2. Every one of four ranks holds a tensor of S bytes. What share of S must the busiest rank send (or
   receive) in an all-reduce?
3. A reduce-scatter is one half of an all-reduce. What share must it move, and what does gloo move?
4. One rank skips the first of three all-reduces. How many wrong sums are handed out before anybody
   gets an error?
5. One rank is 0.3 s late for an all-reduce. Your clock starts when you call it. How much of the
   lateness is billed to the network?

**Run.**

    torchrun --standalone --nproc-per-node=4 01_nccl_collectives.py   # NCCL on 4 GPUs, else gloo
    python 01_nccl_collectives.py                                     # the same, started for you

Not run on several GPUs.

**Try.** Reduce by `dist.ReduceOp.MAX` in `run_all_reduce`: which claim fails? In
`who_waits_for_whom` call `work.wait()` right after the all-reduce: which one now?

**Before.** fundamentals/02_launching_processes.py: ranks, groups, torchrun.

**Next.** On the spine: parallelism/01_data_parallelism_ddp.py. Or what collectives are made of:
communication/02_point_to_point.py
"""

import argparse
import contextlib
import ctypes
import json
import logging
import math
import os
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: R ranks; N chunks per rank, and N = R. A chunk is one element or many.

# %% [markdown]
# ## 1. One all-reduce
#
# This is the call that data-parallel training makes for every gradient:
#
#              before          after dist.all_reduce(x)
#     rank 0    [1.]             [10.]
#     rank 1    [2.]             [10.]        1 + 2 + 3 + 4 = 10
#     rank 2    [3.]             [10.]
#     rank 3    [4.]             [10.]
#
# A **collective** is a call that every rank of a group makes: all of them, in the same order, with
# tensors of the same shape and dtype, on the device that the backend wants. It works in place.
# Nobody can have this sum before every rank has brought its summand, so the slowest sets the pace.


# %%
def one_all_reduce(device: torch.device) -> None:
    x = torch.tensor([RANK + 1.0], device=device)
    dist.all_reduce(x)
    claim("all_reduce of rank + 1", sum(range(1, WORLD_SIZE + 1)), x.item(), question=1)


# %% [markdown]
# ## 2. One root: broadcast, scatter, gather, reduce
#
# In the pictures, 23 is chunk 3 of the tensor that rank 2 was born with, and *3 is the sum of all
# ranks' chunks 3. Four collectives have a **root**, one rank that gives or gets everything; here
# that is rank 1. Broadcast and scatter go from the root to all, gather and reduce from all to the
# root. A chunk may be one element or a billion.
#
#                broadcast                     scatter
#     rank 0     00 01 02 03 -> 10 11 12 13    -           -> 10
#     rank 1     10 11 12 13 -> 10 11 12 13    10 11 12 13 -> 11
#     rank 2     20 21 22 23 -> 10 11 12 13    -           -> 12
#     rank 3     30 31 32 33 -> 10 11 12 13    -           -> 13
#
#                reduce                        gather
#     rank 0     00 01 02 03 -> -              00          -> -
#     rank 1     10 11 12 13 -> *0 *1 *2 *3    10          -> 00 10 20 30
#     rank 2     20 21 22 23 -> -              20          -> -
#     rank 3     30 31 32 33 -> -              30          -> -
#
# Broadcast hands out the initial weights, reduce collects a loss for the log. Of these four no rank
# may rely on another's having come: the root of a broadcast may be back before others have called
# it, and so may a rank that gives to a reduce. Only a result that needs all ranks waits for all.

# %%
ROOT = 1 % WORLD_SIZE  # any rank may be


def run_broadcast(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x)
    dist.broadcast(out, src=ROOT)


def run_scatter(x: torch.Tensor, out: torch.Tensor) -> None:
    chunks = list(x.split(1)) if RANK == ROOT else None
    dist.scatter(out, chunks, src=ROOT)


def run_gather(x: torch.Tensor, out: torch.Tensor) -> None:
    chunks = list(out.split(1)) if RANK == ROOT else None
    dist.gather(x, chunks, dst=ROOT)


def run_reduce(x: torch.Tensor, out: torch.Tensor) -> None:
    total = x.clone()
    dist.reduce(total, dst=ROOT)
    if RANK == ROOT:  # elsewhere `total` may now hold partial sums: promised to nobody
        out.copy_(total)


# %% [markdown]
# ## 3. No root: all-reduce, all-gather, reduce-scatter, all-to-all
#
# Training uses mostly these four, in which every rank gives and gets equally much:
#
#                all_reduce                    all_gather
#     rank 0     00 01 02 03 -> *0 *1 *2 *3    00          -> 00 10 20 30
#     rank 1     10 11 12 13 -> *0 *1 *2 *3    10          -> 00 10 20 30
#     rank 2     20 21 22 23 -> *0 *1 *2 *3    20          -> 00 10 20 30
#     rank 3     30 31 32 33 -> *0 *1 *2 *3    30          -> 00 10 20 30
#
#                reduce_scatter                all_to_all
#     rank 0     00 01 02 03 -> *0             00 01 02 03 -> 00 10 20 30
#     rank 1     10 11 12 13 -> *1             10 11 12 13 -> 01 11 21 31
#     rank 2     20 21 22 23 -> *2             20 21 22 23 -> 02 12 22 32
#     rank 3     30 31 32 33 -> *3             30 31 32 33 -> 03 13 23 33
#
# DDP all-reduces gradients; ZeRO and FSDP reduce-scatter gradients and all-gather weights; experts
# (parallelism/11) get their tokens by an all-to-all, which is a transpose: row r, chunk j becomes
# row j, chunk r.


# %%
def run_all_reduce(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x)
    dist.all_reduce(out)


def run_all_gather(x: torch.Tensor, out: torch.Tensor) -> None:
    dist.all_gather_into_tensor(out, x)


def run_reduce_scatter(x: torch.Tensor, out: torch.Tensor) -> None:
    dist.reduce_scatter_tensor(out, x)


def run_all_to_all(x: torch.Tensor, out: torch.Tensor) -> None:
    dist.all_to_all_single(out, x)


CALLS: dict[str, Callable] = {
    "broadcast": run_broadcast,
    "scatter": run_scatter,
    "gather": run_gather,
    "reduce": run_reduce,
    "all_reduce": run_all_reduce,
    "all_gather": run_all_gather,
    "reduce_scatter": run_reduce_scatter,
    "all_to_all": run_all_to_all,
}

# %% [markdown]
# ## 4. Five reductions, and two halves that make a whole
#
# A reduction need not be a sum: `dist.ReduceOp` has SUM, AVG, MIN, MAX and PRODUCT. SUM, MIN and
# MAX of small integers are exact in any order. AVG (NCCL multiplies by 1/n first) and a long
# PRODUCT may round at every factor.
#
# Look at the pictures again: a reduce-scatter and then an all-gather leave just what an all-reduce
# does (Rabenseifner, 2004): to the bit if the additions are exact, as those of the integers below,
# otherwise up to rounding, for the two may add in different orders:
#
#     00 01 02 03 --reduce_scatter--> *0 --all_gather--> *0 *1 *2 *3
#
# That is more than a curiosity. Between the halves each rank holds 1/n of the sum, all that is
# needed to update 1/n of the weights. ZeRO is nothing but the optimizer moved in between.


# %%
def five_reductions(device: torch.device) -> None:
    x_4 = torch.arange(4, dtype=torch.float64, device=device) + RANK
    X_R4 = torch.stack([x_4 - RANK + rank for rank in range(WORLD_SIZE)])
    expected = {"SUM": X_R4.sum(0), "AVG": X_R4.mean(0), "MIN": X_R4.amin(0), "MAX": X_R4.amax(0)}
    expected["PRODUCT"] = X_R4.prod(0)
    print0("\n  all_reduce of [0, 1, 2, 3] + rank")
    for name, expected_4 in expected.items():
        out_4 = x_4.clone()
        dist.all_reduce(out_4, getattr(dist.ReduceOp, name))
        print0(f"  {name:>33}  →  [{', '.join(f'{y:g}' for y in out_4.tolist())}]")
        rounds = name in ("AVG", "PRODUCT")  # once per factor, here and in one process
        atol = 2 * WORLD_SIZE * 2**-53 if rounds else 0
        claim(f"{name}: error", 0, relative_error(out_4, expected_4), atol=atol)


def two_halves_make_a_whole(device: torch.device) -> None:
    x = torch.arange(1000 * WORLD_SIZE, device=device, dtype=torch.float32) % (97 + RANK)
    shard = torch.empty_like(x[:1000])
    halves = torch.empty_like(x)
    dist.reduce_scatter_tensor(shard, x)
    dist.all_gather_into_tensor(halves, shard)
    whole = x.clone()
    dist.all_reduce(whole)
    differ = whole.view(torch.int32) != halves.view(torch.int32)
    claim("elements whose bits differ, all_reduce and halves", 0, differ.sum().item())


# %% [markdown]
# ## 5. What must be moved
#
# Let S be the bytes of the larger buffer, the whole array. A rank must receive what it lacks, and
# in a reduction it must send what only it has. With n ranks, and in units of S, the busiest rank
# must send or receive at least:
#
# | | must | why |
# |---|---|---|
# | broadcast, reduce | 1 | every rank lacks all of it, or has all of its summand |
# | scatter, gather | (n-1)/n | the root has its own chunk already |
# | all_gather, reduce_scatter, all_to_all | (n-1)/n | each rank has one chunk of n already |
# | all_reduce | 2(n-1)/n | a reduce-scatter and an all-gather |
#
# For large n an all-reduce costs 2 S per rank, *however many ranks there are*. That one fact makes
# data parallelism possible.
#
# Benchmarks report two speeds. **algbw** = S / time is what the caller sees. **busbw** = algbw x
# `must` is what the busiest link carried, so it can be compared with a datasheet. One exception:
# with **NVLS** the NVSwitch itself adds up, a GPU sends S only once, and busbw may exceed the link:
# 480 GB/s are published for 8 H100, whose links carry 450. How collectives are built, and how NCCL
# chooses, is the subject of communication/03_ring_and_tree.py and communication/04_alpha_beta.py.
#
# What a backend really moves may be more. gloo's all-reduce is a ring and meets the bound. Its
# broadcast is a tree, in which the root sends S in each of ceil(log2 n) steps; its reduce is a
# reduce-scatter and a gather; and its reduce-scatter is a whole all-reduce, of which most is thrown
# away: the right values at twice the price. NCCL's rings meet the bound.

# %%
SHARE = (WORLD_SIZE - 1) / WORLD_SIZE  # all but one chunk
DEPTH = math.ceil(math.log2(WORLD_SIZE))  # of a tree
MUST = {"broadcast": 1, "scatter": SHARE, "gather": SHARE, "reduce": 1, "all_reduce": 2 * SHARE}
MUST |= {"all_gather": SHARE, "reduce_scatter": SHARE, "all_to_all": SHARE}
GLOO = MUST | {"broadcast": DEPTH, "reduce": 2 * SHARE, "reduce_scatter": 2 * SHARE}


def bytes_on_the_wire(device: torch.device) -> None:
    """Count what sockets carry during each collective; claim the busiest rank's share of S."""
    if device.type == "cuda":
        blocked("bytes on the wire, by TCP", needs="2 ranks on CPU")
        return
    if not any(carried()):  # the store's traffic at least should be there
        blocked("bytes on the wire, by TCP", needs="a system library: Linux with TCP_INFO")
        return
    moved = {name: busiest_share(name) for name in CALLS}
    for name in ("broadcast", "scatter", "gather", "reduce", "all_gather", "all_to_all"):
        claim_share(name, moved[name])
    claim_share("all_reduce", moved["all_reduce"], question=2)
    claim_share("reduce_scatter", moved["reduce_scatter"], question=3)


# %% [markdown]
# ## 6. Who waits for whom
#
# `dist.barrier()` moves no data: nobody leaves it before everybody has come. But a collective need
# not hold up the program. With `async_op=True` the call returns a **Work** at once, the collective
# goes on in the background, and `work.wait()` marks the place where the result is needed. Until
# then, leave the buffer alone. DDP hides its all-reduces behind the backward pass in this way.
#
# On GPUs mind what `wait()` means: it makes the current CUDA *stream* wait, not the Python program.
# (Nor does Python wait in a synchronous call: that queues the kernel on the current stream.)
#
# Order proves both, without a clock, counted in the store. The last rank is late for the barrier.
# And rank 0 makes its asynchronous call only after the others have come back from theirs, so they
# cannot have waited for a sum that needs rank 0.


# %%
def who_waits_for_whom(device: torch.device) -> None:
    store = dist.distributed_c10d._get_default_store()  # by TCP, next to the collectives
    time.sleep(0.1 if RANK == WORLD_SIZE - 1 else 0)
    store.add("arrived", 1)
    dist.barrier()
    arrived = store.add("arrived", 0)
    claim("ranks that had arrived when the barrier let go", WORLD_SIZE, arrived)

    x = torch.full((4,), RANK + 1.0, device=device)
    undone = [f"undone {rank}" for rank in range(1, WORLD_SIZE)]
    if RANK == 0:
        with contextlib.suppress(dist.DistStoreError):  # not all back in 20 s: count those who are
            store.wait(undone, timedelta(seconds=20))
        store.add("undone", sum(store.check([key]) for key in undone))
    work = dist.all_reduce(x, async_op=True)
    if not work.is_completed():
        store.set(f"undone {RANK}", "")
    work.wait()
    claim("ranks back, work undone, before rank 0 calls", WORLD_SIZE - 1, store.add("undone", 0))
    total = torch.full_like(x, sum(range(1, WORLD_SIZE + 1)))
    claim("after wait(): error of the sum", 0, largest_error(x, total))


# %% [markdown]
# ## 7. One rank skips a call
#
# Collectives have no names on the wire: a rank's k-th call meets the others' k-th call. So if one
# rank skips a call ("my batch was empty"), its next one is taken for the one it skipped:
#
#     step                0           1           2
#     ranks 0 to 2    call 1      call 2      call 3   <- waits forever
#     rank 3          skips       call 1      call 2
#
# If the shapes agree there is no error. Every rank gets a sum over *different steps*, training goes
# on with wrong gradients, and only at the end does anybody wait, in a call that is innocent. A
# group in which a call has failed is lost, so this is done in a group of its own, with a short
# timeout.


# %%
def one_rank_skips(device: torch.device) -> None:
    group = dist.new_group(timeout=timedelta(seconds=3), backend="gloo")
    dist.barrier(group)
    sums = []
    error = ""
    try:
        for step in range(3):
            loss = torch.tensor([100.0 * step + RANK])
            if RANK < WORLD_SIZE - 1 or step > 0:  # the last rank skips step 0
                dist.all_reduce(loss, group=group)
                sums.append(loss.item())
    except RuntimeError as timeout:
        error = str(timeout)
    reason, _, _ = error.rpartition("] ")[2].partition(". ")
    print0(f"{'':13}rank 0 got {sums}, then:")
    print0(f"{'':13}{reason:.80}")
    claim("sums handed out after the skip, without an error", 2, len(sums), question=4)

    errors = [0.0]
    for step, total in enumerate(sums):
        errors.append(total - (100 * step * WORLD_SIZE + sum(range(WORLD_SIZE))))
    claim("largest error of these sums: the next step's 100", 100, torch.tensor(errors).max())
    ended = sum(gather_objects(error != ""))
    claim("ranks that waited for nobody, ended by the timeout", WORLD_SIZE - 1, ended)


# %% [markdown]
# ## 8. The two sides of a clock
#
# A collective ends when the last rank has come. So a clock that starts when *this* rank arrives
# measures how late the others are, and calls it network. And on GPUs a call returns as soon as it
# is queued, so a clock that stops then measures nothing. Settle both sides: synchronize the device
# and meet at a barrier before the clock starts, and again before it stops.
#
#                wrong                                    right
#     rank 0     start|....waits....|all-reduce|stop      ...waits...|start|all-reduce|stop
#     rank 3     ........late.......|all-reduce|          ...late....|start|all-reduce|stop

# %%
LATE = 0.3  # seconds; a sleep that stands for a slow batch


def settle(x: torch.Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()
    dist.barrier()


def seconds_by_the_clock(x: torch.Tensor, before: bool = True, after: bool = True) -> float:
    """Time an all-reduce of `x` on the slowest rank's clock; one rank comes LATE."""
    settle(x)
    time.sleep(LATE if RANK == WORLD_SIZE - 1 else 0)
    if before:
        settle(x)
    start = time.perf_counter()
    dist.all_reduce(x)
    if after:
        settle(x)
    return max(gather_objects(time.perf_counter() - start))  # not settled after: launch time


def sides_of_a_clock(device: torch.device) -> None:
    x = torch.ones(1000 if device.type == "cpu" else 2**28, device=device)
    right = []
    billed = []
    launched = []
    for _ in range(3):
        right.append(seconds_by_the_clock(x))
        billed.append(seconds_by_the_clock(x, before=False))
        launched.append(seconds_by_the_clock(x, after=False))
    print0(f"{'':13}{sorted(right)[1] * 1e3:.1f} ms if both sides are settled,")
    print0(f"{'':13}{sorted(billed)[1] * 1e3:.1f} ms if the ranks do not meet before")
    share = (sorted(billed)[1] - sorted(right)[1]) / LATE
    claim(
        "share of one rank's lateness billed to the network",
        1,
        share,
        atol=0.5,
        question=5,
        kind="simulated",
        timed=True,
    )
    if device.type == "cpu":  # where a call returns when it is done
        blocked("clock not settled after / settled", needs="2 GPUs")
        return
    ratio = sorted(launched)[1] / sorted(right)[1]
    claim("clock not settled after / settled", 0.5, ratio, "<=", timed=True)


# %% [markdown]
# ## 9. How it is measured
#
# The oracle is one process that sees all ranks' data X_RN: `brought` says what this rank hands to
# each collective, `expected` what it must hold thereafter. X_RN[r, j] is 10 r + j: small integers,
# so every sum is exact in float32 and nothing is tolerated. The output starts as NaN, so that an
# element nobody wrote shows.


# %%
def brought(X_RN: torch.Tensor) -> dict[str, torch.Tensor]:
    """What this rank brings to each collective: all its chunks, its first, or nothing."""
    whole = X_RN[RANK]
    first = whole[:1]
    nothing = whole[:0]
    return {
        "broadcast": whole,
        "scatter": whole if RANK == ROOT else nothing,
        "gather": first,
        "reduce": whole,
        "all_reduce": whole,
        "all_gather": first,
        "reduce_scatter": whole,
        "all_to_all": whole,
    }


def expected(X_RN: torch.Tensor) -> dict[str, torch.Tensor]:
    """What this rank must hold after each collective, computed from all ranks' data."""
    total = X_RN.sum(0)
    nothing = total[:0]
    return {
        "broadcast": X_RN[ROOT],
        "scatter": X_RN[ROOT, RANK : RANK + 1],
        "gather": X_RN[:, 0] if RANK == ROOT else nothing,
        "reduce": total if RANK == ROOT else nothing,
        "all_reduce": total,
        "all_gather": X_RN[:, 0],
        "reduce_scatter": total[RANK : RANK + 1],
        "all_to_all": X_RN[:, RANK],
    }


def eight_collectives(device: torch.device) -> None:
    """Run each on a row of X; print what all ranks held before and after; claim the values."""
    j_N = torch.arange(WORLD_SIZE, dtype=torch.float32, device=device)
    X_RN = (10 if WORLD_SIZE <= 10 else 100) * j_N[:, None] + j_N
    for name, run in CALLS.items():
        x = brought(X_RN)[name].clone()
        expected_out = expected(X_RN)[name]
        out = torch.full_like(expected_out, torch.nan)
        held_before = gather_objects(x.flatten().tolist())
        run(x, out)
        print0(picture(name, held_before, gather_objects(out.flatten().tolist())))
        error = largest_error(out, expected_out) if out.numel() > 0 else 0.0
        claim(f"{name}: error", 0, error)


def picture(name: str, before: list[list[float]], after: list[list[float]]) -> str:
    """Draw what each of the first four ranks held, four chunks at most."""
    lines = []
    for rank in range(min(WORLD_SIZE, 4)):
        lines.append(f"rank {rank}   {row_of(before[rank]):17}  →  {row_of(after[rank])}")
    if WORLD_SIZE > 4:
        lines.append("…")
    return f"\n  {name:16}" + f"\n{'':18}".join(lines)


def row_of(chunks: list[float]) -> str:
    cells = ["?" if math.isnan(x) else f"{x:02g}" for x in chunks[:4]] or ["."]
    if len(chunks) > 4:
        cells.append("…")
    return " ".join(cells)


# %% [markdown]
# Bytes are counted where they pass: the kernel knows what each TCP socket has sent, repeats
# included, and received (TCP_INFO). Barriers on both sides keep other traffic out; what messages
# carry besides the data is less than 1% of chunks of 200 kB.


# %%
def carried() -> tuple[int, int]:
    """Bytes that all TCP sockets of this process have sent (repeats apart) and received."""
    sent = 0
    received = 0
    descriptors = os.listdir("/proc/self/fd") if sys.platform == "linux" else []
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # closed by now, or not TCP
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as copy:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
            received += int.from_bytes(info[128:136], sys.byteorder)  # tcpi_bytes_received
            sent += int.from_bytes(info[200:208], sys.byteorder)  # tcpi_bytes_sent
            sent -= int.from_bytes(info[208:216], sys.byteorder)  # tcpi_bytes_retrans
    return sent, received


def busiest_share(name: str) -> float:
    """Run a collective with chunks of 200 kB; return what the busiest rank moved / S."""
    X_RN = torch.ones(1, 1, 50_000).expand(WORLD_SIZE, WORLD_SIZE, -1)
    x = brought(X_RN)[name].contiguous()
    out = torch.empty_like(expected(X_RN)[name])
    dist.barrier()
    sent_before, received_before = carried()
    dist.barrier()
    CALLS[name](x, out)
    dist.barrier()
    sent, received = carried()
    mine = max(sent - sent_before, received - received_before)
    return max(gather_objects(mine)) / (X_RN[0].numel() * 4)


def claim_share(name: str, share: float, question: int | None = None) -> None:
    text = f"{name}: must {MUST[name]:.3g} S, gloo moves"
    claim(text, GLOO[name], share, atol=0.01 * GLOO[name], question=question)


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element; inf if one is no number."""
    error = (ours - expected).abs().max() / expected.abs().max()
    return error.nan_to_num(nan=torch.inf).item()


def largest_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference between two tensors; inf if one is no number."""
    return (ours - expected).abs().max().nan_to_num(nan=torch.inf).item()


def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


# %% [markdown]
# ## 10. On GPUs: the speed of three collectives, and what NVLink carried
#
# One GiB, timed with CUDA events, the median of 20. busbw belongs next to the datasheet's figure
# for one direction: 300 GB/s on A100, 450 on H100. Where NVLink joins all GPUs, an all-reduce must
# reach 0.7 of it. NVML counts what a GPU's NVLinks carried: 2(n-1)/n S on rings; with NVLS about 1
# + 1/n S, since the switch reads each GPU's summands once, adds, and sends the sums out. Then busbw
# may exceed the links'.


# %%
def measure_on_gpus(device: torch.device) -> None:
    if device.type == "cpu" or WORLD_SIZE == 1:
        blocked("GB/s of 1 GiB, and bytes that NVLink carried", needs="2 GPUs")
        return
    whole = torch.zeros(2**28 // WORLD_SIZE * WORLD_SIZE, device=device)
    shard = torch.zeros(len(whole) // WORLD_SIZE, device=device)
    ways = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, shard),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(shard, whole),
    }
    ms = {}
    busbw = {}
    shares = {}
    for name, way in ways.items():
        ms[name] = max(gather_objects(median_ms(way)))
        algbw = whole.nbytes / ms[name] / 1e6
        busbw[name] = algbw * MUST[name]
        before = sent_by_nvlink(device)
        way()
        torch.cuda.synchronize()
        shares[name] = (sent_by_nvlink(device) - before) / whole.nbytes
        speeds = f"algbw {algbw:.0f} GB/s, busbw {busbw[name]:.0f} GB/s"
        print0(f"{'':13}{name:15}{ms[name]:7.2f} ms, {speeds}, over NVLink {shares[name]:.2f} S")
    judge_nvlink(shares["all_reduce"], busbw["all_reduce"], nvlinks_one_way(device))
    halves = ms["reduce_scatter"] + ms["all_gather"]
    claim("ms of an all-reduce / its halves", 1.3, ms["all_reduce"] / halves, "<=", timed=True)


def judge_nvlink(share: float, busbw: float, links: float) -> None:
    """Claim the bytes of an all-reduce, and its speed; `links` is GB/s of this GPU's, one way."""
    of_all = gather_objects((share, links))
    if min(min(pair) for pair in of_all) == 0 or int(os.environ["LOCAL_WORLD_SIZE"]) < WORLD_SIZE:
        needs = "GPUs of one node, all joined by NVLink, and a driver that counts its bytes"
        blocked("all_reduce of 1 GiB: bytes and busbw over NVLink", needs=needs)
        return
    by_rings = MUST["all_reduce"]
    by_switch = 1 + 1 / WORLD_SIZE  # NVLS
    due = min((by_rings, by_switch), key=lambda expected: abs(share - expected))
    claim("all_reduce over NVLink / S", due, share, atol=0.15, question=2, varies=True)
    slowest = min(links for _, links in of_all)
    claim("all_reduce: busbw / NVLinks, one way", 0.7, busbw / slowest, ">=", timed=True)


# %% [markdown]
# NVML, the driver's library, knows the links that are up, their version, and what they have
# carried:


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


def sent_by_nvlink(device: torch.device) -> int:
    """Bytes that this GPU's NVLinks have sent so far; 0 if it has none or NVML does not say."""
    import pynvml

    try:
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        all_links = 0xFFFFFFFF
        field = (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, all_links)
        value = pynvml.nvmlDeviceGetFieldValues(handle, [field])[0]
    except pynvml.NVMLError:
        return 0
    return value.value.ullVal * 1024 if value.nvmlReturn == 0 else 0


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
# ## What you should have seen
#
# 1. Ten, on every rank: 1 + 2 + 3 + 4. Divided by n, that is data parallelism's mean gradient.
# 2. 1.5 S on four ranks, 2(n-1)/n in general. That is less than 2 S for any n: a thousand ranks pay
#    hardly more bytes each than four do. What grows with n is the number of steps: latency.
# 3. It must move 0.75 S; gloo's moves 1.5 S, for it runs a whole all-reduce and keeps one chunk. So
#    measured on gloo, ZeRO and FSDP move more bytes than on NCCL, where it is 0.75 S.
# 4. Two: both sums after the skip are wrong by 100, the skipper's next step, and nobody is told.
#    The error comes in the third call and names that call, not the one that was skipped. On NCCL
#    the watchdog ends the job after the timeout (10 minutes by default), and the flight recorder
#    shows which rank has made fewer calls. How to read both: communication/nccl_debugging.md.
# 5. All of it. In a profile, a long all-reduce means more often a late rank than a slow network.
#
# **Try.** With MAX, only "all_reduce: error" fails: the bytes are the same, and nothing else can
# tell. With `wait()` right after the call, the other ranks cannot be back before rank 0 calls, and
# "ranks back, work undone, before rank 0 calls" counts none.
#
# On real systems an all-gather of uneven shards needs padding, a rank that runs out of data must
# still make its calls (DDP's `join`), and "same order on all ranks" is what a dictionary of
# parameters iterated in another order breaks.


# %%
def main() -> None:
    command_line()
    launch()
    device = setup()
    one_all_reduce(device)
    eight_collectives(device)
    five_reductions(device)
    two_halves_make_a_whole(device)
    print0()
    if WORLD_SIZE == 1:
        blocked("bytes, waiting, skipping, and clocks", needs="2 ranks")
    else:
        bytes_on_the_wire(device)
        who_waits_for_whom(device)
        one_rank_skips(device)
        sides_of_a_clock(device)
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
