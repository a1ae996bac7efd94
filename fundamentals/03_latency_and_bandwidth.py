"""What a message costs: latency, bandwidth, and where one hands over to the other
==============================================================================

**Question.** How long does a message of n bytes take from one process to another, and how large
must it be before a bandwidth means anything?

**Predict.** Write down before you run this:

1. Two processes of one machine pass a buffer through shared memory, a Unix socket, TCP on the
   loopback, and gloo. Rank the four for 64 bytes, and for 4 MiB.
2. From how many bytes on does TCP have half of its best bandwidth: 1 kB, 100 kB or 10 MB?

**Run.**

    torchrun --standalone --nproc-per-node=2 03_latency_and_bandwidth.py
    python 03_latency_and_bandwidth.py --figure paths.png                  # 4 ranks, 2 of them idle

Everything here runs on CPU cores, on a GPU box too.

**You will have seen** (4 ranks on 2 cores, gloo, torch 2.15, 6 s) 15 to 20 us one way through
shared memory or a Unix socket, 20 to 30 through TCP, 60 to 900 through gloo, by load; 7 to 9, 4 to
5, 2 to 3 and 1 to 3 GB/s for large messages; and half of the best from some 140, 90 and 70 kB on,
within a factor of three of where alpha + n/beta put it.

**Next.** exercises/02_measure_a_link; then `communication/01_nccl_collectives.py`: what many
ranks say to each other at once.
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
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from statistics import median
from typing import NamedTuple, NoReturn

import numpy as np
import torch
import torch.distributed as dist

WORLD_SIZES = range(1, 65)  # what --nproc-per-node may be
FLAGS: dict[str, dict] = {"--figure": {"metavar": "PNG", "help": "draw bandwidth against size"}}
SIZES = [4**k for k in range(3, 12)]  # bytes: 64 B to 4 MiB, which takes less than a time slice

Curve = dict[int, float]  # bytes -> median seconds, one way
Copy = Callable[[int], object]  # moves so many bytes
Path = tuple[Copy, Copy]  # send, receive

# %% [markdown]
# ## 1. Between two ranks: memory, shared memory, Unix socket, TCP, gloo
#
# Rank 0 sends n bytes, rank 1 sends them back; half of that is one way. Each trip is timed by
# itself, for a median forgives the scheduler a few. Each rank is pinned to a core, or the scheduler
# would choose anew every time whether a message has to wake another core.
#
# **Hops one after another add their seconds.** Shared memory is a copy in, a bell (a byte through
# the Unix socket), a copy out: two memory copies, once the bell no longer counts. A socket copies
# in and out of the kernel; TCP makes packets of it besides, and gloo hands it to another thread.


# %%
def from_rank_0(value: object, group: dist.ProcessGroup) -> object:
    """Everybody gets rank 0's value; on gloo, who waits for it burns no core."""
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def connect(family: int, pair: dist.ProcessGroup) -> socket.socket:
    """A socket between ranks 0 and 1; the kernel picks its address, so nothing is left behind."""
    wire = socket.socket(family)
    if RANK == 0:
        wire.bind(("127.0.0.1", 0) if family == socket.AF_INET else "")
        wire.listen()
    address = from_rank_0(wire.getsockname(), pair)
    if RANK == 0:
        with wire:
            wire, _ = wire.accept()
    else:
        wire.connect(address)
    if family == socket.AF_INET:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # small messages go at once
    return wire


def through_socket(wire: socket.socket, out: memoryview, into: memoryview) -> Path:
    def receive(n: int) -> None:
        got = 0
        while got < n:
            got += (part := wire.recv_into(into[got:n]))
            if not part:
                raise ConnectionError("the other rank left")

    return lambda n: wire.sendall(out[:n]), receive


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


def there_and_back(paths: dict[str, Path], sizes: dict[str, list[int]]) -> dict[str, Curve]:
    """Ten rounds, all paths and sizes in turns; medians of nine, for the first one warms up."""
    taken = {name: {n: [] for n in sizes[name]} for name in paths}
    for _, name in itertools.product(range(10), paths):
        first, then = paths[name] if RANK == 0 else reversed(paths[name])
        for n in sizes[name]:
            for _ in range(max(1, min(10, 2**20 // n))):
                started = time.perf_counter()
                first(n)
                then(n)
                taken[name][n].append((time.perf_counter() - started) / 2)
    return {k: {n: median(t[len(t) // 10 :]) for n, t in c.items()} for k, c in taken.items()}


def paths_here(pair: dist.ProcessGroup | None, wires: ExitStack) -> tuple[dict, Callable]:
    """This rank's paths, and a function that sends 4 MiB there and back and counts wrong bytes."""
    whole = torch.randint(256, (SIZES[-1],), dtype=torch.uint8)
    empty = torch.zeros_like(whole)
    x, y = (whole, empty) if RANK == 0 else (empty, empty)  # rank 1 sends back what came
    out, into = memoryview(x.numpy()), memoryview(y.numpy())

    def copy(n: int) -> None:
        if RANK == 0:
            into[:n] = out[:n]

    paths = {"memory copy": (copy, copy)}
    if pair:
        unix = wires.enter_context(connect(socket.AF_UNIX, pair))
        tcp = wires.enter_context(connect(socket.AF_INET, pair))
        paths["shared memory"] = through_memory(unix, out, into)
        paths["Unix socket"] = through_socket(unix, out, into)
        paths["TCP loopback"] = through_socket(tcp, out, into)
        send = partial(dist.send, dst=1 - RANK, group=pair)
        receive = partial(dist.recv, src=1 - RANK, group=pair)
        paths["gloo"] = lambda n: send(x[:n]), lambda n: receive(y[:n])

    def wrong(path: Path) -> int:
        y.zero_()
        for move in path if RANK == 0 else reversed(path):
            move(SIZES[-1])
        return int((y != whole).sum())

    return paths, wrong


def between_two_ranks(pair: dist.ProcessGroup | None) -> tuple[dict, dict, int]:
    """Ranks 0 and 1: every path's curve, again with the n_1/2 of the first fit, wrong bytes."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[RANK % len(cores)]})
    with ExitStack() as wires:
        paths, wrong = paths_here(pair, wires)
        curves = there_and_back(paths, dict.fromkeys(paths, SIZES))
        halves = {name: fit(curve).half for name, curve in curves.items()} if RANK == 0 else {}
        halves = from_rank_0(halves, pair) if pair else halves
        again = there_and_back(paths, {name: sorted({*SIZES, n}) for name, n in halves.items()})
        lost = sum(wrong(path) for path in paths.values())
    os.sched_setaffinity(0, cores)
    return curves, again, lost


# %% [markdown]
# ## 2. alpha + bytes/beta
#
# Two numbers describe a path (Hockney, 1994): t(n) = alpha + n/beta. At **n_1/2 = alpha beta** both
# terms are equal and half of beta is reached; at ten times that, 91%. Well below n_1/2 only the
# number of messages counts, so fuse them (hence DDP's buckets); well above it only their bytes.
#
# The fit sees every other size and minimises relative errors; its error is told on the sizes it did
# not see. Then a second series, n_1/2 among its sizes, shows where half of the best bandwidth
# really is. One beta is a simplification (what fits in a cache is faster, a socket copies on while
# the receiver wakes up), and latency moves with the machine's load: sizes are steps of four apart,
# and within one such step prediction and measurement must agree.


# %%
class Fit(NamedTuple):
    alpha: float  # seconds
    beta: float  # bytes/s
    off: float  # the factor by which the line misses the sizes held out, median

    @property
    def half(self) -> int:
        """n_1/2 in bytes."""
        return max(1, round(self.alpha * self.beta))


def fit(curve: Curve) -> Fit:
    n, t = np.array(list(curve.items())).T
    seen, held = slice(0, None, 2), slice(1, None, 2)
    lines = np.stack([1 / t[seen], n[seen] / t[seen]], axis=1)  # (alpha + n/beta) / t = 1
    alpha, inverse = np.linalg.lstsq(lines, np.ones(len(lines)), rcond=None)[0]
    off = np.abs(np.log((alpha + n[held] * inverse) / t[held]))
    return Fit(float(alpha), float(1 / inverse), float(np.exp(np.median(off))))


def reaches_half(curve: Curve) -> float:
    """Bytes at which `curve` first has half of its best bandwidth, between sizes on logarithms."""
    speed = {n: n / t for n, t in curve.items()}
    half = max(speed.values()) / 2
    low, high = next((a, b) for a, b in itertools.pairwise(speed) if speed[b] >= half)
    part = math.log(half / speed[low]) / math.log(speed[high] / speed[low])
    return low * (high / low) ** part


def when_latency_stops_mattering(curves: dict, again: dict, wrong: int) -> None:
    columns = f"{'alpha':>10}{'beta':>13}{'off by':>9}{'n_1/2 predicted':>18}{'found':>12}"
    say(f"  {'one way':16}{columns}")
    for name, curve in curves.items():
        alpha, beta, off = found = fit(curve)
        line = f"{alpha * 1e6:7.1f} us{beta / 1e9:8.2f} GB/s{off - 1:9.0%}{found.half:12,} bytes"
        say(f"  {name:16}{line}{reaches_half(again[name]):12,.0f}")
    say()
    claim("bytes that came back wrong, all paths", 0, wrong)
    if len(curves) == 1:
        return blocked("shared memory, Unix socket, TCP, gloo", needs="2 ranks on one machine")
    for name in ("shared memory", "Unix socket", "TCP loopback"):  # gloo's is told, not judged
        found = fit(curves[name])
        steps = math.log(reaches_half(again[name]) / found.half, 4)
        claim(f"{name}: factor off on sizes held out", 2, found.off, "<=")
        claim(f"{name}: n_1/2 found - predicted, steps of 4x", 0, steps, atol=1)
    shared, copy = (again[name][SIZES[-1]] for name in ("shared memory", "memory copy"))
    say(f"\n  4 MiB through shared memory / two memory copies: {shared / copy / 2:.2f}")


# %% [markdown]
# ## 3. In one picture
#
# Dots are measured, lines are the fits, diamonds sit at n_1/2; dashed, what datasheets promise one
# way. `fundamentals/01_gpu_interconnects.py` derives those.


# %%
CEILINGS = {"NVLink 4 (H100)": 450, "PCIe 5.0 x16": 63, "200 Gb/s NIC": 25, "25 Gb/s NIC": 3.125}


def draw(curves: dict[str, Curve], path: str) -> None:
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(9, 6), layout="constrained")).subplots()
    for name, rate in CEILINGS.items():
        axes.axhline(rate, color="0.5", linewidth=0.8, linestyle="--")
        place = {"transform": axes.get_yaxis_transform(), "va": "bottom", "color": "0.4"}
        axes.text(0.01, rate, f"{name}: {rate:g} GB/s", fontsize=9, **place)
    for k, (name, curve) in enumerate(curves.items()):
        found = fit(curve)
        style = {"color": f"C{k}", "markeredgecolor": f"C{k}"}
        axes.loglog(list(curve), [n / t / 1e9 for n, t in curve.items()], "o", label=name, **style)
        n = np.geomspace(SIZES[0], SIZES[-1])
        axes.loglog(n, n / (found.alpha + n / found.beta) / 1e9, linewidth=1, **style)
        axes.plot(found.half, found.beta / 2e9, "D", markersize=10, markerfacecolor="none", **style)
    axes.set(xlabel="bytes in a message", ylabel="GB/s, one way")
    axes.set_xticks(SIZES[::2], ["64 B", "1 KiB", "16 KiB", "256 KiB", "4 MiB"])
    axes.minorticks_off()
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)


def main(options: argparse.Namespace) -> None:
    setup()
    wait = timedelta(minutes=2)
    host = dist.new_group(backend="gloo", timeout=wait)
    two = int(os.environ["LOCAL_WORLD_SIZE"]) > 1 and sys.platform == "linux"
    pair = dist.new_group([0, 1], backend="gloo", timeout=wait) if two else None
    found = between_two_ranks(pair) if (2 if two else 1) > RANK else None
    curves, again, wrong = from_rank_0(found, host)  # the others have waited here
    when_latency_stops_mattering(curves, again, wrong)
    if options.figure and RANK == 0:
        draw(curves, options.figure)
    finish()


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
