"""A bandwidth test: nccl-tests in Python, with a checker that is itself checked
===============================================================================

**Question.** How fast is every collective on this machine at every size, are its results right, and
which link sets the pace?

**Predict.** "An all-reduce of 400 MB at 277 GB/s on 8 GPUs": how long did it take if that is algbw,
how long if it is busbw? Here: what share of the slowest link will an all-reduce of 4 MiB reach?

**Run.**

    torchrun --standalone --nproc-per-node=8 04_bandwidth_test.py -b 8 -e 8G -f 2   # NCCL
    python 04_bandwidth_test.py                                    # 4 KiB to 4 MiB, gloo on a CPU

**You will have seen** (4 ranks on 2 cores, gloo, torch 2.15, 10 s; not run on several GPUs) that
277 GB/s is 1.44 ms if algbw, 2.53 ms if busbw; that nothing was wrong, and one planted wrong
element is seen; that busbw still grows at 4 MiB, where the all-reduce reaches a sixth to a quarter
of the slowest link, and at 400 MB some 40%: here the cores that copy are the limit, not the link.

**Next.** communication/05_overlap.py hides what you have measured behind compute.
"""

import argparse
import ctypes
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm


def size(text: str) -> int:
    """8, 4K, 32M or 1G, in bytes; as in nccl-tests K is 1024."""
    unit = "KMG".find(text[-1:].upper()) + 1
    return int(text[:-1] if unit else text) * 1024**unit


WORLD_SIZES = range(2, 65)  # one rank has no link
DTYPES = {d: getattr(torch, d) for d in ("float", "double", "half", "bfloat16", "int32")}
FLAGS: dict[str, dict] = {  # named as in nccl-tests
    "-b": {"type": size, "default": size("4K"), "metavar": "BYTES", "help": "begin here (4K)"},
    "-e": {"type": size, "default": size("4M"), "metavar": "BYTES", "help": "end here (4M)"},
    "-f": {"type": int, "default": 32, "metavar": "FACTOR", "help": "between sizes (32)"},
    "-g": {"type": int, "metavar": "RANKS", "help": "the first so many take part (all)"},
    "-n": {"type": int, "default": 5, "metavar": "CALLS", "help": "to take the mean of (5)"},
    "-w": {"type": int, "default": 1, "metavar": "CALLS", "help": "to warm up with (1)"},
    "-o": {"choices": ["sum", "max", "min"], "default": "sum", "help": "the reduction (sum)"},
    "-d": {"choices": DTYPES, "default": "float", "help": "the data type (float)"},
    "--json": {"metavar": "PATH", "help": "save all rows"},
    "--figure": {"metavar": "PATH", "help": "save busbw against size as a PNG"},
}


def main(options: argparse.Namespace) -> None:
    global WORLD_SIZE
    o, n = options, options.g or WORLD_SIZE
    require(1 < n <= WORLD_SIZE, f"-g must be 2 to {WORLD_SIZE}, the number of ranks; got {n}")
    require(0 < o.b <= o.e, f"-b must be positive and at most -e; got {o.b:,} and {o.e:,}")
    require(o.f > 1, f"-f must be at least 2, or the sizes do not grow; got {o.f}")
    require(o.n > 0 <= o.w, f"-n must be positive, -w not negative; got {o.n} and {o.w}")
    if n <= RANK:
        sys.exit()
    WORLD_SIZE, os.environ["WORLD_SIZE"] = n, str(n)
    bench = Bench(setup(), DTYPES[o.d], o.o, o.n, o.w)
    rows = sweep(bench, o.b, o.e, o.f)
    results_are_right(bench, rows)
    slowest = the_limit(bench)
    the_headline(bench, slowest)
    if RANK == 0 and o.json:
        Path(o.json).write_text(json.dumps(rows, indent=1))
    if RANK == 0 and o.figure:
        draw(rows, slowest, o.figure)
    finish()


# %% [markdown]
# ## 1. Data that gives a wrong result away
#
# Rank r fills its buffer with a tile of 4,099 small integers, its own, over and over. 4,099 is a
# prime, so a chunk that lands at another chunk's place does not fit there. Sums of up to 64 such
# numbers are exact in every dtype here, bfloat16 with its 8 bits too, whatever the order of the
# additions: the tolerance is zero, and `#wrong` is a count of elements.

# %%
PRIME = 4099


def tile(r: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    i = torch.arange(PRIME, device=device)
    return ((i * 2654435761 + r * 40503 >> 7) % 4).to(dtype)


def wrong(out: Tensor, pattern: Tensor, start: int = 0) -> int:
    """Elements of `out` that are not the pattern, repeated for ever, from element `start` on."""
    pattern, whole = pattern.roll(-start), len(out) // PRIME * PRIME
    rest = out[whole:]
    return int(
        (out[:whole].view(-1, PRIME) != pattern).sum() + (rest != pattern[: len(rest)]).sum()
    )


# %% [markdown]
# ## 2. Nine operations
#
# Each is a call on `x` and `out`, whole arrays of S bytes or n-th parts; what `out` must then hold,
# a list of (part, pattern, start); and the factor from algbw = S / time to busbw, what the busiest
# link must have carried, which compares across operations and numbers of ranks. In place, one of
# `x` and `out` is the other or a part of it. torch has no out-of-place all-reduce, broadcast or
# reduce: there a copy comes first, and is timed with it.


# %%
class Bench:
    """What all measurements share; `total` is the reduction of all ranks' tiles."""

    def __init__(self, device: torch.device, dtype: torch.dtype, op: str, calls: int, warm: int):
        self.device, self.dtype, self.op, self.calls, self.warm = device, dtype, op, calls, warm
        self.tiles = [tile(r, dtype, device) for r in range(WORLD_SIZE)]
        reduce = {"sum": Tensor.sum, "max": Tensor.amax, "min": Tensor.amin}[op]
        self.total = reduce(torch.stack(self.tiles), 0).to(dtype)
        self.redop = getattr(dist.ReduceOp, op.upper())


def ring_shift(b: Bench, out: Tensor, x: Tensor) -> None:
    send = dist.P2POp(dist.isend, x, (RANK + 1) % WORLD_SIZE)
    receive = dist.P2POp(dist.irecv, out, (RANK - 1) % WORLD_SIZE)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


def from_each(b: Bench, out: Tensor, part: int = 0) -> list:
    return [(p, b.tiles[q], part * len(p)) for q, p in enumerate(out.chunk(WORLD_SIZE))]


class Op(NamedTuple):
    call: Callable[[Bench, Tensor, Tensor], object]  # with out and x
    holds: Callable[[Bench, Tensor], list]  # what out must hold
    shares: tuple[bool, bool]  # are x and out whole, or n-th parts?
    factor: Callable[[int], float]  # busbw / algbw on n ranks
    traits: str = ""


WHOLE, TO_PART, TO_WHOLE = (True, True), (True, False), (False, True)
# fmt: off
OPS = {
    "all_reduce": Op(lambda b, out, x: dist.all_reduce(out.copy_(x), b.redop),
                     lambda b, out: [(out, b.total, 0)],
                     WHOLE, lambda n: 2 * (n - 1) / n, "in place, reduces"),
    "reduce_scatter": Op(lambda b, out, x: dist.reduce_scatter_tensor(out, x, b.redop),
                         lambda b, out: [(out, b.total, RANK * len(out))],
                         TO_PART, lambda n: (n - 1) / n, "in place, reduces"),
    "all_gather": Op(lambda b, out, x: dist.all_gather_into_tensor(out, x), from_each, TO_WHOLE,
                     lambda n: (n - 1) / n, "in place"),
    "all_to_all": Op(lambda b, out, x: dist.all_to_all_single(out, x),
                     lambda b, out: from_each(b, out, RANK), WHOLE, lambda n: (n - 1) / n),
    "broadcast": Op(lambda b, out, x: dist.broadcast(out.copy_(x), 0),
                    lambda b, out: [(out, b.tiles[0], 0)], WHOLE, lambda n: 1, "in place"),
    "reduce": Op(lambda b, out, x: dist.reduce(out.copy_(x), 0, b.redop),
                 lambda b, out: [] if RANK else [(out, b.total, 0)], WHOLE,
                 lambda n: 1, "in place, reduces"),
    "gather": Op(lambda b, out, x: dist.gather(x, None if RANK else [*out.chunk(WORLD_SIZE)], 0),
                 lambda b, out: [] if RANK else from_each(b, out), TO_WHOLE,
                 lambda n: (n - 1) / n),
    "scatter": Op(lambda b, out, x: dist.scatter(out, None if RANK else [*x.chunk(WORLD_SIZE)], 0),
                  lambda b, out: [(out, b.tiles[0], RANK * len(out))], TO_PART,
                  lambda n: (n - 1) / n),
    "sendrecv": Op(ring_shift, lambda b, out: [(out, b.tiles[RANK - 1], 0)], WHOLE, lambda n: 1),
}
# fmt: on

# %% [markdown]
# ## 3. One row of the table
#
# First a call on fresh data is checked; then calls on whatever is in the buffers are timed. A
# barrier before the clock starts, or the slowest rank's lateness is billed to the network; a device
# synchronisation before it stops, or only the launch is timed. The time is the mean over calls and
# ranks, as in nccl-tests; where only the root receives, senders are done early: it flatters.


# %%
PLACES, DASHES = ("out of place", "in place"), f"{'-':>9} {'-':>6} {'-':>6} {'-':>6} "
HEAD = f"{'us':>9} {'algbw':>6} {'busbw':>6} {'#wrong':>6} "
FOUR = "{us:9,.0f} {algbw:6.2f} {busbw:6.2f} {wrong:6,} "


def buffers(b: Bench, op: Op, count: int, in_place: bool) -> tuple[Tensor, Tensor]:
    """`out` and `x` for an array of `count` elements: x holds this rank's data, out zeros."""
    numel = [count if whole else count // WORLD_SIZE for whole in op.shares]
    x = b.tiles[RANK].repeat(-(-numel[0] // PRIME))[: numel[0]]
    if in_place and op.shares != TO_WHOLE:
        return (x if op.shares == WHOLE else x.chunk(WORLD_SIZE)[RANK]), x
    out = x.new_zeros(numel[1])
    return out, (out.chunk(WORLD_SIZE)[RANK].copy_(x) if in_place else x)


def sync(b: Bench) -> None:
    if b.device.type == "cuda":
        torch.cuda.synchronize()


def everyones(b: Bench, mine: float) -> list[float]:
    """The numbers that the ranks bring, on all of them."""
    mine_1 = torch.tensor([mine], dtype=torch.float64, device=b.device)
    dist.all_gather_into_tensor(all_n := mine_1.new_zeros(WORLD_SIZE), mine_1)
    return all_n.tolist()


def measure(b: Bench, name: str, count: int, in_place: bool) -> dict[str, float]:
    """Check a call, time others: us, GB/s (algbw and busbw), wrong elements on all ranks."""
    op = OPS[name]
    out, x = buffers(b, op, count, in_place)
    op.call(b, out, x)
    sync(b)
    errors = sum(wrong(*held) for held in op.holds(b, out))
    for call in range(-b.warm, b.calls):
        if call == 0:
            sync(b)
            dist.barrier()
            start = time.perf_counter()
        op.call(b, out, x)
    sync(b)
    seconds = fmean(everyones(b, (time.perf_counter() - start) / b.calls))
    row = {"us": 1e6 * seconds, "algbw": count * b.dtype.itemsize / seconds / 1e9}
    row["busbw"] = row["algbw"] * op.factor(WORLD_SIZE)
    return row | {"wrong": int(sum(everyones(b, errors)))}


def sweep(b: Bench, begin: int, end: int, factor: int) -> list[dict]:
    """Every operation at every size, out of place and in place; print nccl-tests' columns."""
    say(f"\n{'':37}{PLACES[0]:^31}{PLACES[1]:^31}")
    say(f"{'size':>10} {'count':>10}{'type':>9}{'redop':>6} {HEAD}{HEAD}")
    sizes, rows = [begin * factor**i for i in range(64) if begin * factor**i <= end], []
    for name, op in OPS.items():
        say(name)
        for wanted in tqdm(sizes, name, leave=False, disable=RANK > 0 or None):
            count = max(wanted // b.dtype.itemsize // WORLD_SIZE, 1) * WORLD_SIZE  # n equal parts
            row = {"op": name, "size": count * b.dtype.itemsize, "count": count}
            row |= {"type": str(b.dtype)[6:], "redop": b.op if "reduces" in op.traits else "none"}
            row["out of place"] = measure(b, name, count, in_place=False)
            if "in place" in op.traits:
                row["in place"] = measure(b, name, count, in_place=True)
            rows.append(row)
            cells = ["{size:10,} {count:10,}{type:>9}{redop:>6} ".format(**row)]
            cells += [FOUR.format(**row[place]) if place in row else DASHES for place in PLACES]
            say("".join(cells))
    return rows


def results_are_right(b: Bench, rows: list[dict]) -> None:
    """Claim that nothing was wrong, and that the check sees one wrong element among many."""
    say()
    for name in OPS:
        places = [row.get(place) for row in rows if row["op"] == name for place in PLACES]
        claim(f"{name}: wrong elements", 0, sum(place["wrong"] for place in places if place))
    out = b.total.repeat(3)
    out[PRIME + RANK] += 1
    claim("elements called wrong, where one is", 1, wrong(out, b.total))


# %% [markdown]
# ## 4. Which link is the limit?
#
# A ring is as fast as its slowest link, so time each link alone, from every rank to the next. To
# trust what comes out, slow one down on purpose: its sender sleeps ten times what the slowest
# takes. An all-reduce reaches at most 1 of the slowest link, for busbw is what that carries (unless
# NVLS lets the switch add, and less is moved than busbw assumes).


# %%
def link_seconds(b: Bench, x: Tensor, slowed: int = -1, sleep: float = 0.0) -> list[float]:
    took = []
    for sender in range(WORLD_SIZE):
        times, receiver = [], (sender + 1) % WORLD_SIZE
        for _ in range(5):  # the best counts
            sync(b)
            dist.barrier()
            start = time.perf_counter()
            if sender == RANK:
                time.sleep(sleep if sender == slowed else 0)
                dist.send(x, receiver)
            if receiver == RANK:
                dist.recv(x, sender)
            sync(b)
            times.append(time.perf_counter() - start)
        took.append(everyones(b, min(times))[receiver])  # it knows when all has come
    return took


def the_limit(b: Bench) -> float:
    """Name the slowest link; return its GB/s."""
    count, slowed = size("4M") // b.dtype.itemsize // WORLD_SIZE * WORLD_SIZE, WORLD_SIZE // 2
    x = torch.zeros(count, dtype=b.dtype, device=b.device)
    seconds = link_seconds(b, x)
    speeds = [x.nbytes / s / 1e9 for s in seconds]
    slowest = min(speeds)
    links = [f"{q}->{(q + 1) % WORLD_SIZE} {speed:.2f}" for q, speed in enumerate(speeds)]
    say(f"\n{'':10}GB/s: {'  '.join(links[:6])}; the limit: {links[speeds.index(slowest)]}\n")
    ill = link_seconds(b, x, slowed, sleep=10 * max(seconds))
    claim("link named when one is slowed, by its sender", slowed, ill.index(max(ill)))
    reached = measure(b, "all_reduce", count, in_place=True)["busbw"]
    claim("all-reduce's busbw / the slowest link's", 1, reached / slowest, "<=", rtol=0.5)
    return slowest


# %% [markdown]
# ## 5. The headline: 400 MB
#
# 100 million float32 gradients. "277 GB/s on 8 GPUs": algbw, or busbw, which is 1.75 times as much?
# It is each rank's, not the sum of eight, and one way, not NVLink's 900 GB/s of both. It counts one
# call after the other on warm buffers: no backward that wants the memory, no wait for a late rank.


# %%
def the_headline(b: Bench, slowest: float) -> None:
    S = 400_000_000
    algbw, busbw = (1e3 * S / 277e9 * factor for factor in (1, OPS["all_reduce"].factor(8)))
    say(f"\n{'':10}400 MB at 277 GB/s on 8 ranks: {algbw:.2f} ms if algbw, {busbw:.2f} if busbw")
    count = S // b.dtype.itemsize // WORLD_SIZE * WORLD_SIZE
    b.calls = b.warm = 1
    seen = measure(b, "all_reduce", count, in_place=True)
    here = "here, {us:,.0f} us: algbw {algbw:.2f}, busbw {busbw:.2f} GB/s, ".format(**seen)
    say(f"{'':10}{here}{seen['busbw'] / slowest:.0%} of the slowest link\n")
    claim("400 MB all-reduce: wrong elements", 0, seen["wrong"])


def draw(rows: list[dict], slowest: float, path: str) -> None:
    from matplotlib.figure import Figure

    axes = (figure := Figure((9, 5), layout="constrained")).subplots()
    for name in OPS:
        mine = {row["size"]: row["out of place"]["busbw"] for row in rows if row["op"] == name}
        axes.loglog(mine.keys(), mine.values(), marker="o", label=name)
    axes.axhline(slowest, color="k", linestyle=":", label="slowest link, alone")
    axes.set(xlabel=f"bytes of {rows[0]['type']}, {WORLD_SIZE} ranks", ylabel="busbw, GB/s")
    axes.legend(ncols=2)
    figure.savefig(path, dpi=120)


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
