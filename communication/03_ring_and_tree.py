"""Ring and tree: all-reduce and its relatives, written on send and receive
=======================================================================

**Question.** How does an all-reduce work inside, and why does NCCL know more than one?

**Predict.** Four ranks hold S bytes each. Around a ring, how many messages does a rank send, how
many bytes in all? And rank 0, if it collects everything and sends back the sum? Which is faster for
1 kB, a ring or a tree, which for 1 GB? For which S do they take equally long?

**Run.**

    torchrun --standalone --nproc-per-node=4 03_ring_and_tree.py    # NCCL, if there are 4 GPUs
    python 03_ring_and_tree.py --figure ring_and_tree.png           # the same; else gloo

**You will have seen** (4 ranks on 2 cores, gloo, torch 2.15, 13 s; never run on several GPUs) six
all-reduces, equal to `dist.all_reduce` on every number. In the ring each rank sends 6 messages and
1.5 S, in the naive one rank 0 sends 3 S. Two constants predict all six on sizes not fitted, the
worst within 10%; tree and ring should cross at 33,282 bytes and do at 41,493.

**Next.** exercises/04_ring_all_reduce; then communication/04_bandwidth_test.py measures every
collective, and which link is the limit.
"""

import argparse
import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import time
from collections import Counter, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from datetime import timedelta
from fractions import Fraction
from functools import cache, partial
from itertools import pairwise, product
from typing import NoReturn
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

WORLD_SIZES = range(1, 17)  # what --nproc-per-node may be
FLAGS: dict[str, dict] = {  # flag -> keyword arguments of argparse's add_argument
    "--figure": {"metavar": "PATH", "help": "draw who sends what when, and the times, to this file"}
}


def main(options: argparse.Namespace) -> None:
    device = setup()
    dist.barrier()  # NCCL: all ranks meet before the first batch_isend_irecv
    who_sends_what()
    same_as_the_library(device)
    on_the_wire(device)
    if N == 1:
        blocked("times, and where tree and ring cross", needs="2 ranks")
    else:
        times = on_a_slow_link(device)
        on_this_machine(device)
        draw(options.figure, *times) if options.figure and RANK == 0 else None
    finish()


# %% [markdown]
# ## 1. An algorithm is a list of steps
#
# In each step, some ranks send a span of their buffer; who receives it adds it to his or copies it.
#
# - **naive**: all send everything to rank 0, which adds and sends back: a tree of depth 1.
# - **tree**: rank r has children 2r+1 and 2r+2; sums flow up, the total flows down. Long messages
#   are cut into pieces that follow each other, like micro-batches through a pipeline.
# - **double tree** (Sanders, Speck, Träff, 2009; NCCL): a second tree with the ranks in reverse
#   takes half of the data. Who has children in one is a leaf of the other.
# - **ring** (Patarasuk, Yuan, 2009): chunks go around once and are added up (reduce-scatter: rank r
#   ends with chunk r complete), then go around once more and are copied (all-gather).
# - **halving-doubling** (Rabenseifner, 2004): swap halves with the rank n/2 away, quarters with the
#   one n/4 away, ...; then all that backwards. **doubling** swaps everything, 1, 2, 4, ... away.
#   Both want a power of two: the ranks beyond it first add theirs to a partner's (`fold`).

# %%
N = int(os.environ.get("WORLD_SIZE", 1))
WHOLE = 2**62  # numbers a message may have, if none is to be cut
Move = namedtuple("Move", "source target start stop add")  # add what arrives, else copy it
Schedule = list[list[Move]]  # all ranks' moves, step by step


def cut(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
    """Spans whose lengths differ by 1 at most."""
    return list(pairwise(start + (stop - start) * i // parts for i in range(parts + 1)))


def pieces(length: int, most: int) -> int:
    return max(1, -(-length // most))


def around(n: int, length: int, ahead: int, add: bool) -> Schedule:
    """Step h: rank r sends chunk r + ahead - h to rank r + 1."""
    chunks, ranks = cut(0, length, n), range(n)
    move = [[(r, (r + 1) % n, *chunks[(r + ahead - h) % n]) for r in ranks] for h in range(n - 1)]
    return [[Move(*m, add) for m in step] for step in move]


def reduce_scatter(n: int, length: int, most: int) -> Schedule:
    return around(n, length, ahead=-1, add=True)


def all_gather(n: int, length: int, most: int) -> Schedule:
    return around(n, length, ahead=0, add=False)


def ring(n: int, length: int, most: int) -> Schedule:
    return reduce_scatter(n, length, most) + all_gather(n, length, most)


def up_and_down(parents: list[int], spans: list[tuple[int, int]]) -> Schedule:
    """Reduce to rank 0, then broadcast, a span behind the other; parents[r - 1] < r is rank r's."""
    depth = [0]
    for parent in parents:
        depth.append(depth[parent] + 1)
    steps: Schedule = [[] for _ in range(2 * max(depth) + len(spans) - 1)]
    for (r, parent), (k, span) in product(enumerate(parents, start=1), enumerate(spans)):
        steps[max(depth) - depth[r] + k].append(Move(r, parent, *span, True))
        steps[max(depth) + depth[r] - 1 + k].append(Move(parent, r, *span, False))
    return steps


def naive(n: int, length: int, most: int) -> Schedule:
    return up_and_down([0] * (n - 1), [(0, length)])


def tree(n: int, length: int, most: int) -> Schedule:
    return up_and_down([r // 2 for r in range(n - 1)], cut(0, length, pieces(length, most)))


def double_tree(n: int, length: int, most: int) -> Schedule:
    parents, count = [r // 2 for r in range(n - 1)], pieces(length, 2 * most)
    one, other = (up_and_down(parents, cut(*half, count)) for half in cut(0, length, 2))
    turned = [[Move(n - 1 - a, n - 1 - b, *rest) for a, b, *rest in step] for step in other]
    return [a + b for a, b in zip(one, turned, strict=True)]


def broadcast(n: int, length: int, most: int) -> Schedule:
    """From rank 0 along a chain: a rank hands on one piece while it receives the next."""
    steps = up_and_down(list(range(n - 1)), cut(0, length, pieces(length, most)))
    return [[move for move in step if not move.add] for step in steps]


def halving_doubling(n: int, length: int, most: int, halve: bool = True) -> Schedule:
    power = 1 << n.bit_length() - 1
    fold = [[Move(r, r - power, 0, length, True) for r in range(power, n)]] * (n > power)
    mine, swaps, ranks = [(0, length)] * power, [], range(power)
    for k in range(power.bit_length() - 1):
        away = power >> k + 1 if halve else 1 << k
        halves = [cut(*span, 2) if halve else [span] * 2 for span in mine]
        swaps.append([Move(r, r ^ away, *halves[r][not r & away], True) for r in ranks])
        mine = [halves[r][bool(r & away)] for r in ranks]
    back = reversed(fold + swaps if halve else fold)
    return fold + swaps + [[Move(b, a, *span, False) for a, b, *span, _ in step] for step in back]


def doubling(n: int, length: int, most: int) -> Schedule:
    return halving_doubling(n, length, most, halve=False)


ALL_REDUCE: dict[str, Callable] = {"naive": naive, "ring": ring, "tree": tree}
ALL_REDUCE |= {"double tree": double_tree, "halving-doubling": halving_doubling}
ALL_REDUCE |= {"doubling": doubling}


def who_sends_what() -> None:
    """Picture of the first steps and ranks, from the schedules for a buffer of n chunks."""
    say("\n  Chunk by chunk, who sends what to whom; + where it is added on arrival")
    for name, schedule in ALL_REDUCE.items():
        say(f"\n  {name:18}" + "".join(f"rank {r:<9}" for r in range(min(N, 5))).rstrip())
        for t, step in enumerate(schedule(N, N, WHOLE)[:10], start=1):
            cells = defaultdict(list)
            for a, b, i, j, add in step:
                span = "all" if j - i == N else f"{i}" if j - i == 1 else f"{i}-{j - 1}"
                cells[a] += [f"{'+' * add}{span}→{b}"] * (i < j)
            row = [" ".join(cells[r][:2]) + "…" * (len(cells[r]) > 2) for r in range(min(N, 5))]
            say(f"    step {t:<11}" + "".join(f"{cell:14}" for cell in row).rstrip())
    say()


# %% [markdown]
# ## 2. Run the list
#
# All that a rank does in a step is posted together (on NCCL, a must), and all that is sent in a
# step is received in it: by induction no step waits for ever. What is to be added lands in a
# scratch buffer, kept for the next time, for new memory costs page faults. NCCL cuts a ring's
# chunks further, to add one slice while the next travels. Where all cores are busy copying anyway,
# that only makes more messages: tried here, slower. Trees need it, or most ranks would wait.

# %%
COMBINE = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum}
PIECE = 2**22  # bytes of a message in a tree or chain
kept: dict[tuple, torch.Tensor] = {}  # (dtype, device) -> scratch buffer


@cache
def plan(schedule: Callable, n: int, length: int, most: int) -> list[tuple[list, list]]:
    """This rank's steps: what it receives, what it sends."""
    steps = [[m for m in step if m.start < m.stop] for step in schedule(n, length, most)]
    mine = [[[m for m in step if m[end] == RANK] for end in (1, 0)] for step in steps]
    return [(into, out) for into, out in mine if into or out]


def run(schedule: Callable, x: torch.Tensor, op=dist.ReduceOp.SUM, most: int = 0) -> None:
    """Carry out the schedule on x, in place; at most `most` numbers a message (0: PIECE bytes).

    Raises ValueError if op is neither SUM nor MAX, or x not contiguous.
    """
    if op not in COMBINE or not x.is_contiguous():
        got = f"{op}, strides {x.stride()}"
        raise ValueError(f"needs SUM or MAX and a contiguous tensor, got {got}; use x.contiguous()")
    x, key = x.view(-1), (x.dtype, x.device)
    for into, out in plan(schedule, N, len(x), most or PIECE // x.itemsize):
        lengths = [(m.stop - m.start) * m.add for m in into]
        if len(kept.get(key, "")) < sum(lengths):
            kept[key] = x.new_empty(sum(lengths))
        spare = kept[key][: sum(lengths)].split(lengths) if sum(lengths) else [None] * len(into)
        mine = [x[m.start : m.stop] for m in into]
        land = [s if m.add else own for m, s, own in zip(into, spare, mine, strict=True)]
        ops = [dist.P2POp(dist.irecv, t, m.source) for m, t in zip(into, land, strict=True)]
        ops += [dist.P2POp(dist.isend, x[m.start : m.stop], m.target) for m in out]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        for m, own, came in zip(into, mine, land, strict=True):
            COMBINE[op](own, came, out=own) if m.add else None


def same_as_the_library(device: torch.device) -> None:
    """Small integers, whose sums are exact in bfloat16 too, in any order; then random numbers."""
    torch.manual_seed(RANK)
    lengths, types = (0, 1, N - 1, N + 1, 1000), (torch.float32, torch.float64, torch.bfloat16)
    for name, schedule in ALL_REDUCE.items():
        unlike = 0
        for length, dtype, op in product(lengths, types, COMBINE):
            x = torch.randint(-4, 5, (length,), device=device).to(dtype)
            dist.all_reduce(due := x.clone(), op)
            run(schedule, x, op, most=300)
            unlike += (x != due).sum().item()
        claim(f"{name}: numbers unlike dist.all_reduce", 0, unlike)
    start, stop = cut(0, 1001, N)[RANK]
    dist.all_reduce(due := (x := torch.randint(9, (1001,), device=device)).clone())
    run(reduce_scatter, x)
    claim("reduce_scatter: numbers unlike dist.all_reduce", 0, (x != due)[start:stop].sum())
    x[:start], x[stop:] = -1, -1
    run(all_gather, x)
    claim("all_gather: numbers unlike dist.all_reduce", 0, (x != due).sum())
    run(broadcast, x := due * (RANK == 0), most=300)
    claim("broadcast: numbers unlike rank 0's", 0, (x != due).sum())
    unlike = 0
    for schedule in ALL_REDUCE.values():
        run(schedule, x := torch.randn(1000, device=device))
        dist.all_reduce(largest := x.clone(), dist.ReduceOp.MAX)
        unlike += (x != largest).sum().item()
    claim("random sums that differ between ranks", 0, unlike)


# %% [markdown]
# ## 3. Bytes and messages, counted
#
# What goes through `batch_isend_irecv` goes on the wire. No algorithm does with less than 2(n-1) S
# in all (Patarasuk, Yuan); all but doubling reach that. The ring shares it out: 2(n-1)/n S a rank.


# %%
@contextlib.contextmanager
def posting(watch: Callable) -> Iterator:
    """Calls watch(ops) on each batch this rank posts, once it is done."""
    real = dist.batch_isend_irecv

    def watched(ops: list) -> list:
        for work in real(ops):
            work.wait()
        watch(ops)
        return []

    with mock.patch.object(dist, "batch_isend_irecv", watched):
        yield


def sends(r: int) -> dict[str, tuple]:
    """What rank r sends, by formula: messages, and bytes as a share of S."""
    power = 1 << N.bit_length() - 1
    levels, twin = power.bit_length() - 1, int(r < N - power)
    links = [(rank > 0) + max(0, min(2, N - 1 - 2 * rank)) for rank in (r, N - 1 - r)]
    halving = 2 * levels + twin, 2 * Fraction(power - 1, power) + twin
    return {
        "naive": (1, 1) if r else (N - 1, N - 1),
        "ring": (2 * (N - 1), Fraction(2 * (N - 1), N)),
        "tree": (links[0], links[0]),
        "double tree": (sum(links), Fraction(sum(links), 2)),
        "halving-doubling": halving if r < power else (1, 1),
        "doubling": (levels + twin, levels + twin) if r < power else (1, 1),
        "reduce_scatter": (N - 1, Fraction(N - 1, N)),
        "all_gather": (N - 1, Fraction(N - 1, N)),
        "broadcast": (8 * (r < N - 1), r < N - 1),  # in 8 pieces
    }


def on_the_wire(device: torch.device) -> None:
    x, more = torch.zeros(128 * N, device=device), (reduce_scatter, all_gather, broadcast)
    for name, schedule in (ALL_REDUCE | {f.__name__: f for f in more}).items():
        ops: list = []
        with posting(ops.extend):
            run(schedule, x, most=len(x) // 8 if schedule is broadcast else WHOLE)
        sent = [op.tensor.nbytes for op in ops if op.op is dist.isend]
        messages, share = sends(RANK)[name]
        claim(f"{name}: messages a rank sends", messages, len(sent))
        claim(f"{name}: bytes a rank sends / S", share, Fraction(sum(sent), x.nbytes))


# %% [markdown]
# ## 4. Two constants
#
# Let a step cost a rank alpha + bytes/beta, bytes being what it sends or receives, whichever is
# more, from when all whom it deals with are there (`price`). A tree has few alphas, the ring few
# bytes; they take equally long where (alphas saved) x alpha = (bytes added) / beta. Ranks that
# share cores and caches have no links of their own to show that; so each rank sleeps alpha +
# bytes/beta after each step. Two constants are then fitted to all algorithms on every other size.
# They must predict the sizes in between, and where tree and ring cross. Halving-doubling looks best
# of all here, but it wants a fast link from each rank to every other; the ring only to neighbours.


# %%
ALPHA, BETA = 5e-3, 1e7  # s, bytes/s
Curve = dict[int, float]  # bytes -> seconds


def price(schedule: Callable, alpha: float, a_byte: float) -> float:
    """When the last rank is done, for S = 1, by a clock for each rank."""
    clock, length = [0.0] * N, 128 * N
    for step in schedule(N, length, WHOLE):
        came, busy = clock[:], Counter()
        for a, b, start, stop, _ in step:
            came[a], came[b] = (max(came[r], clock[a], clock[b]) for r in (a, b))
            busy.update({("out", a): (stop - start) / length, ("in", b): (stop - start) / length})
        for r in {r for _, r in busy}:
            clock[r] = came[r] + alpha + a_byte * max(busy["out", r], busy["in", r])
    return max(clock)


def measure(calls: dict, sizes: list, device: torch.device, most: int = 1) -> dict[str, Curve]:
    """Best of three times (each of `most` calls at most) by the slowest rank's clock, in turns."""
    taken: dict = {name: {size: [] for size in sizes} for name in calls}
    for _, size, name in product(range(3), sizes, calls):
        x, repeats = torch.zeros(size // 4, device=device), max(1, min(most, 2**20 // size))
        dist.barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            calls[name](x)
        torch.cuda.synchronize() if x.is_cuda else None
        seconds = torch.tensor((time.perf_counter() - start) / repeats, device=device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        taken[name][size].append(seconds.item())
    return {name: {size: min(t) for size, t in curve.items()} for name, curve in taken.items()}


def crossing(ring: Curve, tree: Curve) -> float:
    """Bytes from which on the ring is faster, between sizes on logarithms; else NaN."""
    lead = {size: np.log(ring[size] / tree[size]) for size in ring}
    for a, b in pairwise(lead):
        if lead[a] > 0 >= lead[b]:
            return a * (b / a) ** (lead[a] / (lead[a] - lead[b]))
    return np.nan


def link(ops: list) -> None:
    """What a step costs where a rank has a link of its own: a sleep stands for it."""
    torch.cuda.synchronize() if ops[0].tensor.is_cuda else None
    ends = dist.isend, dist.irecv
    load = max(sum(op.tensor.nbytes for op in ops if op.op is end) for end in ends)
    time.sleep(ALPHA + load / BETA)


def fit(terms: dict[str, tuple], curves: dict[str, Curve], sizes: list) -> tuple[float, float]:
    """alpha and 1/beta, one pair for all algorithms, of least relative error."""
    rows = [(*terms[name], size, curves[name][size]) for name in curves for size in sizes]
    a, b, size, t = np.array(rows).T
    return tuple(np.linalg.lstsq(np.stack([a / t, b * size / t], 1), t / t, rcond=None)[0])


def on_a_slow_link(device: torch.device) -> tuple[dict, dict]:
    terms = {name: (price(f, 1, 0), price(f, 0, 1)) for name, f in ALL_REDUCE.items()}
    (many, light), (few, heavy) = terms["ring"], terms["tree"]
    rate = (many - few) / (heavy - light)  # alphas saved for a byte added; 0 for two ranks
    sizes = [4 * round((rate or 1) * ALPHA * BETA * 3**k / 4) for k in (-2, -1, 0, 1, 2)]
    with posting(link):
        curves = measure({name: partial(run, f) for name, f in ALL_REDUCE.items()}, sizes, device)
    (alpha, a_byte), held_out = fit(terms, curves, sizes[::2]), sizes[1::2]
    due = {name: {s: a * alpha + b * s * a_byte for s in sizes} for name, (a, b) in terms.items()}
    found = f"fitted {alpha * 1e3:.1f} ms and {1e-6 / a_byte:.1f} MB/s"
    say(f"\n  Slept {ALPHA * 1e3:g} ms and {BETA / 1e6:g} MB/s, {found}. Predicted → measured, ms:")
    say(f"{'':41}" + "".join(f"{size:>15,} bytes" for size in held_out))
    for name, (a, b) in terms.items():
        cells = [f"{due[name][s] * 1e3:.1f} → {curves[name][s] * 1e3:.1f}" for s in held_out]
        say(f"  {name:18}{a:2.0f} alpha + {b:.3g} S/beta".ljust(41) + "{:>21}{:>21}".format(*cells))
    for name in ALL_REDUCE:
        off = np.exp(max(abs(np.log(curves[name][s] / due[name][s])) for s in held_out))
        claim(f"{name}: factor off on sizes held out", 2, off, "<=")
    what = "crossing, found / predicted in steps of 3x"
    if N == 2:
        blocked(what, needs="3 ranks: of 2 a ring wins")
    else:
        cross, found = rate * alpha / a_byte, crossing(curves["ring"], curves["tree"])
        say(f"{'':10}tree and ring cross at {cross:,.0f} bytes predicted, {found:,.0f} found")
        claim(what, 0, np.log(found / cross) / np.log(3), atol=1)
    return due, curves


def on_this_machine(device: torch.device) -> None:
    """Without sleeps; told, not judged."""
    sizes, library = [4**6, 4**9, 4**12], {"dist.all_reduce": dist.all_reduce}
    calls = {name: partial(run, schedule) for name, schedule in ALL_REDUCE.items()} | library
    say(f"\n  {'no sleeps, ms':18}" + "".join(f"{size:>11,} bytes" for size in sizes))
    for name, curve in measure(calls, sizes, device, most=10).items():
        say(f"  {name:18}" + "".join(f"{curve[size] * 1e3:17.2f}" for size in sizes))


def draw(path: str, due: dict[str, Curve], curves: dict[str, Curve]) -> None:
    """Arrows from sender to receiver, a colour a chunk; below, times, lines as predicted."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 9), layout="constrained")
    above, below = figure.subfigures(2, 1)
    above.suptitle("who sends what when: a colour a chunk, solid if added, dotted if copied")
    panels, times = above.subplots(1, len(ALL_REDUCE), sharey=True), below.subplots()
    for color, (axes, (name, schedule)) in enumerate(zip(panels, ALL_REDUCE.items(), strict=True)):
        steps = schedule(N, N, WHOLE)
        for (t, step), look in product(enumerate(steps), ("-", ":")):
            for a, b, start, _, _ in (move for move in step if move.add == (look == "-")):
                arrow = {"arrowstyle": "->", "color": f"C{start % 10}", "linestyle": look}
                axes.annotate("", (t + 1, b), (t, a), arrowprops=arrow)
        axes.set(title=name, xlabel="step", xlim=(-0.1, len(steps) + 0.1), ylim=(N - 0.8, -0.2))
        axes.set(yticks=range(N), ylabel="rank")
        times.loglog(list(due[name]), list(due[name].values()), color=f"C{color}")
        times.loglog(list(due[name]), list(curves[name].values()), f"C{color}o", label=name)
    times.set(title="on the slow link; lines: predicted", xlabel="bytes", ylabel="seconds")
    times.legend()
    figure.savefig(path)


# %% [markdown]
# ## The plumbing, the same in every lesson; fundamentals/02_launching_processes.py explains it

# %%
ledger: list[dict] = []  # every claim made so far, the same on every rank
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def command_line() -> argparse.Namespace:
    """Read FLAGS; --help and mistakes end here, before any collective, and are said once."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    for flag, about in FLAGS.items():
        parser.add_argument(flag, **about)
    parser.print_help = lambda: say(parser.format_help())
    parser.error = lambda text: require(False, f"{text}\n{parser.format_usage().rstrip()}")
    rule = f"needs a number of ranks in {WORLD_SIZES}, got {WORLD_SIZE}; set --nproc-per-node"
    require("RANK" not in os.environ or WORLD_SIZE in WORLD_SIZES, rule)
    return parser.parse_args()


def launch() -> None:
    """Plain `python`: be torchrun, one rank per GPU, else 4, without its wall of text."""
    from torch.distributed.elastic.multiprocessing import api, errors
    from torch.distributed.run import main as torchrun

    ranks = gpus if (gpus := torch.cuda.device_count()) > 1 else 4
    ranks = ranks if ranks in WORLD_SIZES else WORLD_SIZES[0]
    os.environ |= {"LAUNCHER": str(os.getpid()), "OMP_NUM_THREADS": "1"}  # ranks share the cores
    logging.disable()  # the rank that failed says why
    here = ["--standalone", "--local-addr=127.0.0.1"]  # the host's name need not resolve
    try:
        torchrun([*here, f"--nproc-per-node={ranks}", *sys.argv])
    except errors.ChildFailedError as error:
        rank, first = error.get_first_failure()
        sys.exit(f"rank {rank} was ended by {first.signal_name()}" if first.exitcode < 0 else 1)
    except api.SignalException as error:
        sys.exit(128 + error.sigval)


def setup() -> torch.device:
    """Join the group torchrun describes: NCCL if every rank here has its own GPU, else gloo."""
    if sys.platform == "linux":  # PR_SET_PDEATHSIG: no rank outlives a killed launcher,
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.environ.pop("LAUNCHER", parent := str(os.getppid())) != parent:
        sys.exit(1)  # nor one killed before this line
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank that waits inside C++ too
    gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    backend, wait = "nccl" if gpu else "gloo", timedelta(minutes=2)
    dist.init_process_group(backend, device_id=device if gpu else None, timeout=wait)
    sys.excepthook = crash
    say(f"{WORLD_SIZE} ranks, {backend}, torch {torch.__version__}\n")
    say(f"{'':10}{'claim':55} {'predicted':20} measured")
    return device


def crash(*error: object) -> NoReturn:
    """An exception nobody caught: the first rank prints it, all leave at once; peers may wait."""
    first = dist.distributed_c10d._get_default_store().add("crash", 1) == 1
    time.sleep(1)  # if a peer's death is the cause, the launcher ends us meanwhile and names it
    if first:
        print(f"rank {RANK}:", file=sys.stderr)
        sys.__excepthook__(*error)
    os._exit(1)


def say(*words: object) -> None:
    """Print on rank 0 only."""
    if RANK == 0:
        print(*words, flush=True)


def require(holds: bool, rule: str) -> None:
    """End the run, before its first collective, with one message: rule, value, remedy."""
    if not holds:
        time.sleep(10 if RANK else 0)  # rank 0 speaks; the launcher ends the others as it leaves
        sys.exit(f"{sys.argv[0]}: {rule}")


def claim(text: str, predicted: float, measured: float, sign="=", atol=0.0, rtol=0.0) -> None:
    """Record the worst rank's `measured sign predicted` (= <= >=), give or take the slack."""
    mine = float(predicted), float(measured), atol + rtol * abs(predicted)
    ranks = [mine] * WORLD_SIZE
    if dist.is_initialized():
        dist.all_gather_object(ranks, mine)
    over = {"=": abs, "<=": float, ">=": float.__neg__}[sign]
    excess = [over(m - p) - slack for p, m, slack in ranks]
    worst = max(range(len(ranks)), key=lambda r: excess[r] if excess[r] == excess[r] else 1e999)
    (p, m, slack), verdict = ranks[worst], "PASS" if excess[worst] <= 0 else "FAIL"  # NaN: FAIL
    off = "" if verdict == "PASS" else f"\n{'':10}off by {m - p:.3g} on rank {worst}"
    told, seen = (f"{x:,.{12 if x.is_integer() else 6}g}" for x in (p, m))
    between = f"{sign:>2} {told}" + (f" ±{float(f'{slack:.1g}'):g}" if slack else "")
    say(f"  {verdict:7} {text:55} {between:20} {seen}{off}")
    row = {"claim": text, "verdict": verdict, "rank": worst, "sign": sign}
    finite = m - m == 0  # JSON knows no other numbers
    record(row | {"predicted": p, "measured": m if finite else str(m), "slack": slack})


def blocked(text: str, needs: str) -> None:
    """Record what this machine cannot answer, and what would."""
    say(f"  BLOCKED {text:55} needs {needs}")
    record({"claim": text, "verdict": "BLOCKED", "needs": needs})


def record(row: dict) -> None:
    """Add to the ledger; LESSON_JSON, if set, names a file that is whole after every claim."""
    ledger.append(row)
    if RANK == 0 and (path := os.environ.get("LESSON_JSON")):
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        about = {"ranks": WORLD_SIZE, "gpu": gpu, "cpus": os.cpu_count(), "python": sys.version}
        about |= {"torch": torch.__version__, "argv": sys.argv, "date": time.strftime("%F")}
        with open(path + ".part", "w") as file:
            json.dump(about | {"ledger": ledger}, file, indent=1)
        os.replace(path + ".part", path)


def finish() -> NoReturn:
    """Leave the group; exit 1 if a claim failed or none was made."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    count = [row["verdict"] for row in ledger].count
    say(f"\n  {count('PASS')} PASS, {count('FAIL')} FAIL, {count('BLOCKED')} BLOCKED")
    code = int(count("PASS") == 0 or count("FAIL") > 0)
    if __name__ == "__main__":  # threads of a group that something still holds can abort sys.exit
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    options = command_line()
    if "RANK" in os.environ or len(WORLD_SIZES) == 1:
        main(options)
    else:
        launch()
