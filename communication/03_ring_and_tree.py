"""Ring, tree, double binary tree, recursive doubling: all-reduce written on send and receive
==========================================================================================

**Question.** How does an all-reduce work inside, and why are there so many ways to do it?

**Predict**, and write it down before you run:

1. Four ranks hold N elements each, cut into four chunks. They pass one chunk at a time around a
   ring until all hold the sum. How many messages does each rank send, and how many elements in all?
2. Instead, rank 0 collects everything and sends the sum back to all. How many elements does rank 0
   send, and how many would it send among 64 ranks?
3. 64 ranks form a binary tree: sums flow up, the total flows down. How many elements does the
   busiest rank send?
4. Two binary trees carry half of the elements each. How many elements does the busiest of 64 ranks
   send now, if the trees are arranged well?
5. With random floating-point numbers, in how many elements do the results of two ranks differ?

**Run.**

    torchrun --standalone --nproc-per-node=4 03_ring_and_tree.py    # NCCL on 4 GPUs, else gloo
    python 03_ring_and_tree.py --figure ring_and_tree.png           # the same, started for you

Not run on several GPUs.

**Try.** In `ring_schedule` leave out `+ all_gather_schedule(n, N, piece)`: which claims fail? In
`double_tree_schedule` write `moves + others` for `moves + mirrored`: which claims fail now?

**Before.** communication/01_nccl_collectives.py: what an all-reduce, a reduce-scatter and an
all-gather do. communication/02_point_to_point.py: send and receive, and why they come in batches.

**Next.** exercises/04_ring_all_reduce; then communication/04_alpha_beta.py: which algorithm wins
when
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
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from itertools import pairwise, product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# n is the number of ranks, N the number of elements that each of them holds.

# %% [markdown]
# ## 1. Schedules, and the star: rank 0 does all the work
#
# Every rank holds a buffer of N elements, and afterwards every rank is to hold the sum of all of
# them. Whatever algorithm does that, it consists of **steps**, and in each step some ranks send a
# span of their buffer to some others. The receiver adds it to its own elements, or overwrites them.
# So we write each algorithm as a **schedule**: for every step, the messages of *all* ranks. A
# schedule can be printed, drawn, checked and counted before a single byte is sent; section 8 then
# carries it out.
#
# Each algorithm is a function of n, N and `piece`, the most elements that one message may have.
# Only trees and chains need that limit (section 3); the others ignore it.
#
# The simplest algorithm is a **star**. In step 1 all send their whole buffer to rank 0, which adds;
# in step 2 it sends back the total:
#
#     step 1     1 --N--> 0     2 --N--> 0     3 --N--> 0      added
#     step 2     0 --N--> 1     0 --N--> 2     0 --N--> 3      copied
#
# It has only two steps, but a step lasts as long as its busiest rank needs. In step 1 rank 0 must
# receive n-1 buffers, and in step 2 send as many, while everybody else waits for it.


# %%
class Move(NamedTuple):
    """One message: `source` sends elements [start, stop) of its buffer to `target`."""

    source: int
    target: int
    start: int
    stop: int
    add: bool  # the target adds them to its own elements; if not, it overwrites its own


Schedule = list[list[Move]]  # step by step, the messages of all ranks


def star_schedule(n: int, N: int, piece: int) -> Schedule:
    """Gather everything at rank 0, then broadcast the sum from there."""
    everyone_sends = [Move(rank, 0, 0, N, add=True) for rank in range(1, n)]
    rank_0_sends = [Move(0, rank, 0, N, add=False) for rank in range(1, n)]
    return [everyone_sends, rank_0_sends]


# %% [markdown]
# ## 2. Ring: reduce-scatter, then all-gather
#
# A ring shares the work equally (Patarasuk and Yuan, 2009). Cut the buffer into n chunks. In every
# step each rank sends *one* chunk to its right neighbor, which adds it to its own copy of that
# chunk. After n-1 steps each chunk has visited all ranks and is complete: chunk r on rank r. That
# is a **reduce-scatter**. Here it is on four ranks; a cell lists the ranks whose elements are in
# that chunk's sum so far, so 03 is rank 0's elements plus rank 3's:
#
#                rank 0              rank 1              rank 2              rank 3
#     chunk      0    1    2    3    0    1    2    3    0    1    2    3    0    1    2    3
#     start      0    0    0    0    1    1    1    1    2    2    2    2    3    3    3    3
#     step 1     0    0   03*   0    1    1    1   01*  12*   2    2    2    3   23*   3    3
#     step 2     0  023*  03    0    1    1  013*  01   12    2    2  012* 123*  23    3    3
#     step 3  0123* 023   03    0    1 0123* 013   01   12    2 0123* 012  123   23    3 0123*
#     * received and added in this step
#
# Then the complete chunks travel around once more, and now each rank copies what arrives: an
# **all-gather**. The two halves differ only in where they begin and in adding or copying. Together
# each rank sends 2(n-1) chunks of N/n elements.


# %%
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
# ## 3. Binary tree: up with sums, down with the total
#
# A ring needs 2(n-1) steps. A **binary tree** needs about 2 log2(n): the parent of rank r is
# (r-1) // 2, sums flow up to rank 0, and the total flows down again. For seven ranks:
#
#              0               step 1    3, 4 -> 1    5, 6 -> 2     added
#            /   \             step 2    1, 2 -> 0                  added
#           1     2            step 3    0 -> 1, 2                  copied
#          / \   / \           step 4    1 -> 3, 4    2 -> 5, 6     copied
#         3   4 5   6
#
# Sent whole, a large buffer keeps only one level of the tree busy at a time. So it is cut into
# **pieces** that follow one another, as cars follow one another along an assembly line. With
# pieces a, b and c, all levels are busy in the middle (ranks 5 and 6 do the same with 2):
#
#     step              1     2     3     4     5     6
#     3, 4 -> 1         a     b     c
#     1, 2 -> 0               a     b     c
#     0 -> 1, 2                     a     b     c
#     1 -> 3, 4                           a     b     c
#
# With d levels of links and k pieces that makes 2d + k - 1 steps. A **broadcast along a chain** of
# ranks 0, 1, 2, ... works in the same way: a rank passes on one piece while it receives the next.


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


def broadcast_schedule(n: int, N: int, piece: int) -> Schedule:
    """Copy rank 0's elements to all ranks, along the chain 0, 1, 2, ..."""
    spans = split_span(0, N, count_pieces(N, piece))
    schedule = [[] for _ in range(n - 2 + len(spans))]
    for rank in range(n - 1):
        for i, (start, stop) in enumerate(spans):
            schedule[rank + i].append(Move(rank, rank + 1, start, stop, add=False))
    return schedule


# %% [markdown]
# ## 4. Double binary tree: who is busy in one is idle in the other
#
# In a tree, half of the ranks are leaves, which send N elements; a rank with a parent and two
# children sends 3 N (one sum up, two totals down). The **double binary tree** (Sanders, Speck and
# Träff, 2009; in NCCL since 2.4) evens that out: half of the elements take the tree above, and the
# other half a second tree with the ranks in reverse order. A rank with children in one is a leaf
# in the other:
#
#     first half            0               second half           3
#                         /   \                                 /   \
#                        1     2                               2     1
#                       /                                     /
#                      3                                     0


# %%
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
# ## 5. Recursive doubling: everybody adds everything
#
# When messages are tiny, what counts is how many messages a rank must handle one after another. The
# star has two steps, but rank 0 handles n-1 messages in each. In **recursive doubling** no rank
# handles more than one per step: two ranks at distance 1 send each other their whole buffers and
# both add; then ranks at distance 2, 4, and so on, each time with twice as many ranks in the sum.
# The peer's number is this rank's with one bit flipped, `rank ^ distance`. For four ranks:
#
#                rank 0    rank 1    rank 2    rank 3
#     start        0         1         2         3
#     step 1       01*       01*       23*       23*      distance 1: 0 <-> 1,  2 <-> 3
#     step 2     0123*     0123*     0123*     0123*      distance 2: 0 <-> 2,  1 <-> 3
#
# This works for powers of two. For any other n, take the largest power of two below it; the ranks
# beyond it **fold**: each first sends its elements to a partner, which adds them, then stands
# aside, and is sent the total at the end.


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


# %% [markdown]
# ## 6. Recursive halving-doubling: few steps and few elements
#
# Rabenseifner (2004) takes the recursion apart into a reduce-scatter and an all-gather, as the ring
# does. In **recursive halving** two ranks at distance n/2 split the buffer: each sends the half
# that the other keeps, and adds what arrives to the half that it keeps. Ranks at distance n/4 do
# the same with the half they kept, and so on, until each rank holds the finished sum of 1/n of the
# elements. For four ranks and chunks:
#
#                rank 0              rank 1              rank 2              rank 3
#     chunk      0    1    2    3    0    1    2    3    0    1    2    3    0    1    2    3
#     start      0    0    0    0    1    1    1    1    2    2    2    2    3    3    3    3
#     step 1    02*  02*   0    0   13*  13*   1    1    2    2   02*  02*   3    3   13*  13*
#     step 2  0123*  02    0    0   13 0123*   1    1    2    2 0123*  02    3    3   13 0123*
#
# The same messages backwards, copied instead of added, are the all-gather ("doubling"). So there
# are 2 log2(n) steps, and a rank sends no more elements than in a ring.


# %%
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
# ## 7. Read the schedules
#
# This prints what you have just read: for a buffer of n chunks, who sends which chunk to whom in
# each step. A plus marks a chunk that the receiver adds. Hold the ring's lines next to the picture
# in section 2. `--figure` draws the same as arrows.

# %%
WHOLE = 2**62  # elements that a message may have, if none is to be cut


def show_schedules() -> None:
    """Print the first ten steps of the first five ranks."""
    columns = min(WORLD_SIZE, 5)
    for name, algorithm in ALL_REDUCE.items():
        header = "".join(f"rank {rank:<9}" for rank in range(columns))
        print0(f"\n  {name:28}{header}".rstrip())
        schedule = algorithm(WORLD_SIZE, WORLD_SIZE, WHOLE)
        for step, moves in enumerate(schedule[:10], start=1):
            cells = defaultdict(list)
            for move in moves:
                if move.start < move.stop:
                    cells[move.source].append(arrow(move))
            row = ""
            for rank in range(columns):
                more = "…" if len(cells[rank]) > 2 else ""
                row += f"{' '.join(cells[rank][:2]) + more:14}"
            print0(f"    step {step:<21}{row}".rstrip())
    print0()


def arrow(move: Move) -> str:
    """Return for example +2→3: chunk 2 goes to rank 3 and is added there."""
    sign = "+" if move.add else ""
    chunks = f"{move.start}-{move.stop - 1}"
    if move.stop - move.start == 1:
        chunks = f"{move.start}"
    if move.stop - move.start == WORLD_SIZE:
        chunks = "all"
    return f"{sign}{chunks}→{move.target}"


# %% [markdown]
# ## 8. Carry out a schedule with send and receive
#
# A rank picks its own messages out of the schedule, step by step, and posts all sends and receives
# of a step in one `batch_isend_irecv` before it waits for any. Then it adds. Why is that correct?
#
# - **Nobody waits forever.** Whatever is sent in a step is received in the same step. So if all
#   ranks have done their earlier steps, all post this one, every send has its receive, and all
#   finish it.
# - **Nothing is swapped.** Two messages from one rank to another arrive in the order in which they
#   were posted, and both ranks post them in the order of the schedule.
# - **Nothing is overwritten.** What is to be added lands in memory of its own. What is to be copied
#   lands where it belongs, and no schedule sends or adds those same elements in the same step.


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
# The whole of an all-reduce is then a loop over its steps. NCCL additionally cuts a ring's chunks
# into slices, so that a GPU adds one slice while the next one travels. On CPUs the cores that would
# add are busy copying messages, so slices only make more messages: tried here, they were slower.
# Trees do need pieces, or most ranks would wait.

# %%
COMBINE = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum}
PIECE_BYTES = 2**22  # of a message in a tree or chain


def run(
    algorithm: Callable, x: torch.Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM, piece: int = 0
) -> None:
    """Carry out `algorithm` on `x`, in place.

    A message of a tree has at most `piece` elements; 0 stands for PIECE_BYTES. Raises ValueError if
    `op` is neither SUM nor MAX, or if `x` is not contiguous.
    """
    if op not in COMBINE or not x.is_contiguous():
        got = f"{op}, strides {x.stride()}"
        raise ValueError(f"needs SUM or MAX and a contiguous tensor, got {got}; use x.contiguous()")
    x_N = x.view(-1)
    piece = piece or PIECE_BYTES // x.itemsize
    for receives, sends in steps_of_this_rank(algorithm, len(x_N), piece):
        exchange_step(x_N, receives, sends, COMBINE[op])


# %% [markdown]
# ## 9. How it is measured
#
# The **oracle** is `dist.all_reduce`. Small integers are exact in every dtype here, bfloat16
# included, in whatever order they are added, so not a single element may differ. Lengths 0, 1, n-1
# and n+1 leave chunks empty or uneven. With `piece=300`, trees and chains cut 1,000 elements into
# several messages.
#
# Then random numbers, whose sums do depend on the order: the claim is that all *ranks* agree to the
# last bit. Each rank compares its result with the elementwise maximum over all ranks. If all hold
# the same number, that is the maximum; if not, a rank that holds less than the maximum counts it.


# %%
def check_sums(device: torch.device) -> None:
    torch.manual_seed(RANK)
    lengths = (0, 1, WORLD_SIZE - 1, WORLD_SIZE + 1, 1000)
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    for name, algorithm in ALL_REDUCE.items():
        wrong = 0
        for length, dtype, op in product(lengths, dtypes, COMBINE):
            x = torch.randint(-4, 5, (length,), device=device).to(dtype)
            expected = x.clone()
            dist.all_reduce(expected, op)
            run(algorithm, x, op, piece=300)
            wrong += (x != expected).sum().item()
        claim(f"{name}: wrong elements", 0, wrong)

    differ = 0
    for algorithm in ALL_REDUCE.values():
        x = torch.randn(1000, device=device)
        run(algorithm, x)
        largest = x.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        differ += (x != largest).sum().item()
    claim("random sums that differ between ranks", 0, differ, question=5)


def check_relatives(device: torch.device) -> None:
    """Check reduce-scatter, all-gather and broadcast; each begins with a correct buffer."""
    x = torch.randint(9, (1001,), device=device)
    expected = x.clone()
    dist.all_reduce(expected)
    start, stop = split_span(0, len(x), WORLD_SIZE)[RANK]
    run(reduce_scatter_schedule, x)
    wrong = (x != expected)[start:stop].sum().item()
    claim("reduce_scatter: wrong elements in its own chunk", 0, wrong)

    x = torch.full_like(expected, -1)
    x[start:stop] = expected[start:stop]
    run(all_gather_schedule, x)
    claim("all_gather: wrong elements", 0, (x != expected).sum().item())

    x = expected.clone() if RANK == 0 else torch.full_like(expected, -1)
    run(broadcast_schedule, x, piece=300)
    claim("broadcast: wrong elements", 0, (x != expected).sum().item())


# %% [markdown]
# Now the counts. Nothing but our own calls moves data here, so what we hand to `isend` is what a
# rank sends. The counter sits beneath torch's dispatcher, where every send passes. For each
# algorithm the formulas below say how many **messages** this rank sends, how many **elements** in
# units of N, and how many elements the **largest message** has. The buffer has 128 n elements, so
# that chunks are equally long, and a piece has at most 100. So on four ranks a tree cuts 512
# elements into six messages, of 85 or 86 elements.


# %%
class Sends(NamedTuple):
    """What one rank sends, by formula."""

    messages: int
    elements: float  # in units of N
    largest: int  # elements of the largest message


def predict_sends(rank: int, n: int, N: int, piece: int) -> dict[str, Sends]:
    cuts = math.ceil(N / piece)  # pieces of a buffer
    cuts_of_half = math.ceil(N / 2 / piece)
    last = rank == n - 1
    here = links_in_tree(rank, n)
    both = here + links_in_tree(n - 1 - rank, n)
    doubling, halving = predict_recursive_sends(rank, n, N)
    return {
        "star": Sends(1, 1, N) if rank else Sends(n - 1, n - 1, N),
        "ring": Sends(2 * (n - 1), 2 * (n - 1) / n, N // n),
        "tree": Sends(here * cuts, here, math.ceil(N / cuts)),
        "double tree": Sends(both * cuts_of_half, both / 2, math.ceil(N / 2 / cuts_of_half)),
        "recursive doubling": doubling,
        "recursive halving-doubling": halving,
        "reduce_scatter": Sends(n - 1, (n - 1) / n, N // n),
        "all_gather": Sends(n - 1, (n - 1) / n, N // n),
        "broadcast": Sends(0, 0, 0) if last else Sends(cuts, 1, math.ceil(N / cuts)),
    }


def links_in_tree(rank: int, n: int) -> int:
    """Return how many parents and children a rank has in the binary tree."""
    children = max(0, min(2, n - 1 - 2 * rank))
    return children + (rank > 0)


def predict_recursive_sends(rank: int, n: int, N: int) -> tuple[Sends, Sends]:
    """Return what recursive doubling and recursive halving-doubling send."""
    power = largest_power_of_two(n)
    if rank >= power:  # it folds: one message, the whole buffer
        return Sends(1, 1, N), Sends(1, 1, N)
    levels = power.bit_length() - 1
    partner = 1 if rank < n - power else 0  # of a rank that folds: sends it the total at the end
    doubling = Sends(levels + partner, levels + partner, N)
    halving_elements = 2 * (power - 1) / power + partner
    halving = Sends(2 * levels + partner, halving_elements, N if partner else N // 2)
    return doubling, halving


# %% [markdown]
# The counter is the same in every lesson that needs one.


# %%
class Call(NamedTuple):
    """One collective, send or receive of this rank, as it was handed to the process group."""

    operation: str  # "all_reduce", "all_gather", "reduce_scatter", "send", ...
    elements: int  # of its input or its output, whichever is larger
    nbytes: int  # of the same
    ranks: tuple[int, ...]  # of the group
    peer: int | None  # of a send or receive: the other rank; None: any


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
# Each algorithm's counts are compared with the formulas, for every rank.


# %%
def check_counts(device: torch.device) -> None:
    if WORLD_SIZE == 1:
        blocked("messages, elements, largest message", needs="2 ranks")
        return
    check_sends("ring", ring_schedule, device, question=1)
    check_sends("star", star_schedule, device, question=2)
    for name, algorithm in ALL_REDUCE.items():
        if name not in ("ring", "star"):
            check_sends(name, algorithm, device)
    check_sends("reduce_scatter", reduce_scatter_schedule, device)
    check_sends("all_gather", all_gather_schedule, device)
    check_sends("broadcast", broadcast_schedule, device)


def check_sends(
    name: str, algorithm: Callable, device: torch.device, question: int | None = None
) -> None:
    """Carry out an algorithm; claim this rank's messages, elements and largest message."""
    x_N = torch.zeros(128 * WORLD_SIZE, device=device)
    with CountedCommunication() as counted:
        run(algorithm, x_N, piece=100)
    sends = [call.elements for call in counted.calls("send")]
    predicted = predict_sends(RANK, WORLD_SIZE, len(x_N), piece=100)
    messages, share, largest = predicted[name]
    claim(f"{name}: messages sent", messages, len(sends), question=question)
    claim(f"{name}: elements sent / N", share, sum(sends) / len(x_N), question=question)
    claim(f"{name}: largest message", largest, max(sends, default=0))


# %% [markdown]
# *Predict* 2, 3 and 4 ask about 64 ranks. Counting what they would send, and in how many steps,
# takes a schedule and no ranks.


# %%
def check_64_ranks() -> None:
    most = busiest(star_schedule, 64)
    claim("star of 64: busiest rank's elements / N", 63, most, question=2, kind="theory")
    most = busiest(tree_schedule, 64)
    claim("tree of 64: busiest rank's elements / N", 3, most, question=3, kind="theory")
    most = busiest(double_tree_schedule, 64)
    claim("double tree of 64: busiest rank's elements / N", 2, most, question=4, kind="theory")
    levels = 6  # 64 is 2 to the power of 6; the tree of 64 ranks is as deep
    steps = {"star": 2, "ring": 2 * (64 - 1), "tree": 2 * levels, "double tree": 2 * levels}
    steps |= {"recursive doubling": levels, "recursive halving-doubling": 2 * levels}
    for name, algorithm in ALL_REDUCE.items():
        counted = len(algorithm(64, 128 * 64, WHOLE))
        claim(f"{name} of 64: steps", steps[name], counted, kind="theory")


def busiest(algorithm: Callable, n: int) -> float:
    """Return how many elements the busiest of `n` ranks sends, in units of N."""
    N = 128 * n
    sent = Counter()
    for moves in algorithm(n, N, WHOLE):
        for move in moves:
            sent[move.source] += move.stop - move.start
    return max(sent.values()) / N


# %% [markdown]
# The picture that `--figure` saves: an arrow from sender to receiver for each message. A color is a
# chunk; black is more than one, and the number says how many. Solid arrows are added, dotted ones
# copied. The trees are drawn in pieces of one chunk, so that their pipelines show.


# %%
def draw(path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 8), layout="constrained")
    figure.suptitle(
        f"Each arrow is a message. A color is one of {WORLD_SIZE} chunks; a black arrow carries as "
        "many as its number says. Solid: added; dotted: copied"
    )
    for axes, (name, algorithm) in zip(figure.subplots(2, 3).flat, ALL_REDUCE.items(), strict=True):
        schedule = algorithm(WORLD_SIZE, WORLD_SIZE, piece=1)
        for step, moves in enumerate(schedule):
            for move in moves:
                if move.start < move.stop:
                    draw_message(axes, step, move)
        axes.set(title=name, xlabel="step", ylabel="rank")
        axes.set(xlim=(-0.1, len(schedule) + 0.1), ylim=(WORLD_SIZE - 0.8, -0.2))
        axes.set(xticks=range(len(schedule) + 1), yticks=range(WORLD_SIZE))
    figure.savefig(path)


def draw_message(axes: object, step: int, move: Move) -> None:
    """Draw one arrow, from (step, source) to (step + 1, target)."""
    chunks = move.stop - move.start
    color = f"C{move.start % 10}" if chunks == 1 else "black"
    style = {"arrowstyle": "->", "color": color, "linestyle": "-" if move.add else ":"}
    style |= {"linewidth": 1.5, "shrinkA": 2, "shrinkB": 2}
    axes.annotate("", (step + 1, move.target), (step, move.source), arrowprops=style)
    if chunks > 1:
        y = 0.8 * move.source + 0.2 * move.target
        box = {"color": "white", "pad": 0.5}
        axes.text(step + 0.2, y, chunks, ha="center", va="center", fontsize=9, bbox=box)


# %% [markdown]
# ## What you should have seen
#
# 1. Six messages and 1.5 N elements: 2(n-1) messages of N/n elements each. With 64 ranks it would
#    be 126 messages and 1.97 N. More ranks hardly change what one rank sends, so a large buffer
#    takes a ring hardly longer on more ranks. But the number of messages grows with n, and each has
#    a latency.
# 2. 3 N, and 63 N among 64 ranks. The star needs only two steps, but it has the worst hot spot.
#    **Parameter servers**, processes that collected all workers' gradients and sent weights back,
#    had this shape; to spread the load, the weights were divided among many servers.
# 3. 3 N, for 64 ranks as for 5: a sum up and two totals down. (Of 4 ranks none has a parent and two
#    children, so their busiest one sends 2 N.) A leaf sends only N, and half of the ranks are
#    leaves, so half of the links out of ranks idle two thirds of the time.
# 4. 2 N: a rank with two children in one tree is a leaf in the other, so it sends 3/2 N + 1/2 N.
#    This is just above the ring's 2(n-1)/n N, in about 2 log2(n) steps, plus one for each further
#    piece, instead of 2(n-1). The sum over all ranks is 2(n-1) N, here as for ring, star and tree:
#    no all-reduce moves less (Patarasuk and Yuan, 2009). Recursive doubling moves n log2(n) N,
#    more than that from 4 ranks on.
# 5. None. In most of these algorithms every element is finished on one rank and then copied. In
#    recursive doubling each rank adds on its own, but in pairs, and a + b is b + a to the last bit.
#    Against a sum in *another order* you would find differences, which is why two algorithms, or
#    two world sizes, give slightly different gradients.
#
# Why are there so many ways? Because steps, messages and elements cannot all be few at once. With
# d levels of links in the tree and its buffer (or half buffer) in k pieces:
#
#     algorithm            steps        messages per    busiest rank   use it when
#                                       rank and step   sends
#     star                 2            n-1 (rank 0)    (n-1) N        n is 2 or 3
#     ring                 2(n-1)       1               2(n-1)/n N     N is large
#     tree                 2d + k - 1   up to 3         3 N            N is small, n large
#     double tree          2d + k - 1   up to 4         2 N            n is large
#     recursive doubling   log2(n)      1               log2(n) N      N is tiny
#     halving-doubling     2 log2(n)    1               2(n-1)/n N     every link is equally fast
#
# (The last two rows are for powers of two.) On 64 ranks that makes 2, 126, 12, 12, 6 and 12 steps.
# Halving-doubling looks best of all. But each rank exchanges its largest messages with the rank n/2
# away, usually on another node, and all ranks do so at once. It also needs a power of two. A ring
# needs fast links between neighbors only.
#
# **Try.** A ring that stops after its reduce-scatter holds each sum on one rank only: its sums, its
# counts, its steps among 64 ranks and the agreement between ranks fail. With two equal trees every
# result is right and only the counts fail; that one break shows why one counts at all. On a real
# machine it would merely be slow, and nothing would tell you.
#
# On GPUs the same file runs over NCCL. NCCL's own ring and tree follow these schedules, but run in
# one kernel per GPU, which adds one slice while others travel. It runs many rings side by side,
# called "channels", each by a CUDA block of its own. Across nodes its tree connects *nodes*; inside
# a node the GPUs form a chain. On machines with NVLink switches that can add (NVLS, since Hopper) a
# rank sends only about N, since the switch adds the buffers and returns the sum.
#
# The ring's two halves are also used by themselves. ZeRO and FSDP reduce-scatter the gradients,
# update each rank's shard of the parameters, and all-gather the parameters.


# %%
def main() -> None:
    flag = {"metavar": "PATH", "help": "draw who sends what when, to this file"}
    options = command_line({"--figure": flag})
    launch()
    device = setup()
    dist.barrier()  # NCCL: all ranks meet before the first batch_isend_irecv
    show_schedules()
    check_sums(device)
    check_relatives(device)
    check_counts(device)
    check_64_ranks()
    if options.figure and RANK == 0:
        draw(options.figure)
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
