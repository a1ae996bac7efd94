"""Point to point: send, receive, and how two ranks come to wait for each other for ever
=====================================================================================

**Question.** What do send and receive wait for, and how must they be paired?

**Predict.** Every rank sends one byte to its right neighbour, then receives from its left one. Does
this end? With 16 MB instead? A grid of a million numbers is cut over four ranks; each number needs
its two neighbours in every step: how many bytes does a rank send a step?

**Run.**

    torchrun --standalone --nproc-per-node=4 02_point_to_point.py   # NCCL, if there are 4 GPUs
    python 02_point_to_point.py                                     # the same; else gloo

**You will have seen** (4 ranks on 2 cores, gloo, torch 2.15, 9 s; never run on several GPUs)
that gloo's sends wait for their receives, be it for one byte, where a TCP socket takes 4 MB; four
ranks, all in `send`, until a timeout frees them; three ways out; and that a rank in the middle of
the rod sends 16 bytes a step. As one message, 64 small ones were 54 times as fast.

**Next.** exercises/03_ring_shift and exercises/14_five_hangs; then
communication/03_ring_and_tree.py builds all-reduce from send and receive.
"""

import argparse
import contextlib
import ctypes
import faulthandler
import json
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import NoReturn
from unittest import mock

import torch
import torch.distributed as dist

WORLD_SIZES = range(1, 65)  # what --nproc-per-node may be
FLAGS: dict[str, dict] = {}  # flag -> keyword arguments of argparse's add_argument


def main(options: argparse.Namespace) -> None:
    device = setup()
    dist.barrier()  # NCCL: all ranks meet before the first batch_isend_irecv
    cpu = dist.new_group(backend="gloo")  # for what NCCL would not forgive
    for section in a_send_waits, everybody_sends_first, three_ways_out, what_gloo_forgives:
        say()
        section(cpu) if N > 1 else blocked(section.__name__.replace("_", " "), needs="2 ranks")
    say()
    halo_exchange(device)
    ping_pong(device) if N > 1 else blocked("ping-pong", needs="2 ranks")
    finish()


# %% [markdown]
# ## 1. A send waits for its receive
#
# `send(x, to)` hands x to rank `to`, which must call `recv(y, source)`; `isend` and `irecv` do not
# wait but return a `Work`, whose `wait()` does. When may a send return? MPI may buffer small
# messages (an *eager* send), and a TCP socket takes what fits into the kernel's buffers: counted
# below. Programs in which everybody sends first then work, until messages grow. Gloo announces a
# message and waits for the receive, be it for one byte (*rendezvous*). NCCL's sends may wait, too.

# %%
N = int(os.environ.get("WORLD_SIZE", 1))
LEFT, RIGHT = (int(os.environ.get("RANK", 0)) + N - 1) % N, (int(os.environ.get("RANK", 0)) + 1) % N
SIZES = [1, 2**12, 2**24]  # bytes


def a_send_waits(cpu: dist.ProcessGroup) -> None:
    """Rank 1 receives only once rank 0 says that its send is over, or a quarter second later."""
    store, early = dist.distributed_c10d._get_default_store(), 0
    for size in SIZES:
        x = torch.zeros(size, dtype=torch.uint8)
        dist.barrier(cpu)
        if RANK == 0:
            dist.send(x, 1, cpu)
            store.set(f"sent {size}", "")
        elif RANK == 1:
            over, until = False, time.monotonic() + 0.25
            while not over and time.monotonic() < until:
                over = store.check([f"sent {size}"])
            early += over
            dist.recv(x, 0, cpu)
    tcp, taken = socket.create_server(("127.0.0.1", 0)), 0
    with tcp, socket.create_connection(tcp.getsockname()) as wire, tcp.accept()[0]:
        wire.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while taken < 2**30:
                taken += wire.send(bytes(2**16))
    say(f"{'':10}a TCP socket takes {taken:,} bytes that nobody has asked for")
    claim("bytes a TCP socket takes before anybody reads", 1000, taken, ">=")
    claim("gloo sends back before the receive, 1 B to 16 MiB", 0, early)


# %% [markdown]
# ## 2. Everybody sends first
#
# So this ring shift never ends: each rank waits in `send` for a neighbour to receive, who waits in
# `send`. No rank alone does anything wrong. Two things show it: a timeout, given when the group is
# made (by default half an hour; gloo then raises, NCCL's watchdog ends the process), and stacks,
# one of every rank. `faulthandler` writes them even while a rank waits inside C++; from outside,
# `py-spy dump` does. If all stand in the same send, nobody is late: the order is wrong.

# %%
PATIENCE = 3.0  # seconds until a call in this group fails


def send_first(x: torch.Tensor, y: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.send(x, RIGHT, group)
    dist.recv(y, LEFT, group)


def everybody_sends_first(cpu: dist.ProcessGroup) -> None:
    group = dist.new_group(timeout=timedelta(seconds=PATIENCE), backend="gloo")  # will be lost
    x, y, error = torch.full((1,), RANK, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8), ""
    dist.barrier(cpu)
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback_later(PATIENCE / 2, file=file)
        try:
            send_first(x, y, group)
        except RuntimeError as timeout:
            error = str(timeout).rpartition("] ")[2]
        faulthandler.cancel_dump_traceback_later()
        file.seek(0)
        frames = re.findall(r'File ".*?([^/"]+)", line (\d+) in (\w+)', file.read())
    stacks: list = [None] * N
    dist.all_gather_object(stacks, (frames, error), group=cpu)
    for r, (stack, words) in enumerate(stacks[:2]):
        say(f"{'':10}rank {r}, stack after {PATIENCE / 2:g} s, innermost call first:")
        for name, line, function in [f for f in stack if f[2] not in ("wrapper", "<module>")][:4]:
            say(f"{'':12}{function:24}{name}:{line}")
        say(f"{'':12}then, after {PATIENCE:g} s: {words:.60}")
    sending = sum(bool(stack) and stack[0][2] == "send" for stack, _ in stacks)
    claim("ranks whose stack ends in send", N, sending)
    claim("ranks freed by the timeout", N, sum(words != "" for _, words in stacks))


# %% [markdown]
# ## 3. Three ways out
#
# 1. **An order**: odd ranks receive first. One rank that receives first breaks the circle; every
#    other one only makes it faster.
# 2. **Do not wait**: `isend`, then `recv`, then wait for the send; x must be left alone until then.
# 3. **A batch**: `batch_isend_irecv` posts sends and receives together; their order is irrelevant.
#
# On NCCL take the third (or the first). There, calls are kernels that run one after the other on a
# stream: an `isend` in front of an `irecv` returns at once, yet its kernel may wait for a receive
# that the other rank has queued behind its own send. A batch is one kernel.


# %%
def in_order(x: torch.Tensor, y: torch.Tensor, group: dist.ProcessGroup) -> None:
    if RANK % 2:
        dist.recv(y, LEFT, group)
    dist.send(x, RIGHT, group)
    if RANK % 2 == 0:
        dist.recv(y, LEFT, group)


def without_waiting(x: torch.Tensor, y: torch.Tensor, group: dist.ProcessGroup) -> None:
    work = dist.isend(x, RIGHT, group)
    dist.recv(y, LEFT, group)
    work.wait()


def batched(x: torch.Tensor, y: torch.Tensor, group: dist.ProcessGroup) -> None:
    shift = dist.P2POp(dist.isend, x, RIGHT, group), dist.P2POp(dist.irecv, y, LEFT, group)
    for work in dist.batch_isend_irecv(list(shift)):
        work.wait()


def three_ways_out(cpu: dist.ProcessGroup) -> None:
    for way in in_order, without_waiting, batched:
        wrong = 0
        for size in SIZES:
            x, y = torch.full((2, size), RANK, dtype=torch.uint8)
            way(x, y, cpu)
            wrong += (y != LEFT).sum().item()
        claim(f"ring shift, {way.__name__.replace('_', ' ')}: wrong bytes", 0, wrong)


# %% [markdown]
# ## 4. What gloo forgives and NCCL does not
#
# | Gloo | NCCL |
# |---|---|
# | a tag tells messages between two ranks apart | ignores tags: they match in order |
# | `recv` without a source takes the first that comes | needs the source |
# | a message may be shorter than the buffer (never longer: that aborts) | sizes must agree |
# | `isend` and `irecv` in any order | pair them in a batch, or they may hang |
# | a subset of ranks may start talking | all must take part, if the first call is a batch |
# | `wait()` returns when the data is there | `wait()` makes the current stream wait |
#
# The first three, on gloo:


# %%
def what_gloo_forgives(cpu: dist.ProcessGroup) -> None:
    a, b, long = torch.zeros(1), torch.zeros(1), torch.full((6,), -1.0)
    source = -1
    if RANK == 0:
        works = [dist.isend(torch.tensor([t]), 1, cpu, tag=int(t)) for t in (1.0, 2.0)]
        for work in works:
            work.wait()
        dist.send(torch.ones(4), 1, cpu)
        dist.send(torch.ones(1), 1, cpu)
    elif RANK == 1:
        dist.recv(b, 0, cpu, tag=2)
        dist.recv(a, 0, cpu, tag=1)
        dist.recv(long, 0, cpu)
        source = dist.recv(torch.zeros(1), None, cpu)
    seen: list = [None] * N
    dist.all_gather_object(seen, (a.item(), b.item(), (long < 0).sum().item(), source), group=cpu)
    first, second, untouched, source = seen[1]
    claim("sent 1, 2; received as tag 2, tag 1: numbers right", 2, (first == 1) + (second == 2))
    claim("4 numbers into a buffer of 6: numbers untouched", 2, untouched)
    claim("recv from anybody: the rank it came from", 0, source)


# %% [markdown]
# ## 5. Halo exchange
#
# Heat flows along a rod: u[i] += (u[i-1] - 2 u[i] + u[i+1]) / 4. Each rank holds a part and one
# number of each neighbour, its *halo*, fresh in every step; its messages, four at most, go into one
# batch. However long the rod, they stay as small: that is why stencils, convolutions cut along an
# image and sliding-window attention scale. An all-gather would bring the whole rod, every step.

# %%
LENGTH, STEPS = 1_000_003, 10


def heat(u: torch.Tensor) -> torch.Tensor:
    return u[1:-1] + 0.25 * (u[:-2] - 2 * u[1:-1] + u[2:])


def exchange(u: torch.Tensor) -> None:
    """Send the own outermost numbers, u[1] and u[-2]; receive the neighbours' into u[0], u[-1]."""
    ops = []
    for peer, mine, halo in (RANK - 1, u[1:2], u[:1]), (RANK + 1, u[-2:-1], u[-1:]):
        if 0 <= peer < N:
            ops += [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, halo, peer)]
    for work in dist.batch_isend_irecv(ops) if ops else []:
        work.wait()


def halo_exchange(device: torch.device) -> None:
    torch.manual_seed(0)  # the same rod on every rank, its ends kept at 0
    rod = torch.cat([torch.zeros(1), torch.rand(LENGTH), torch.zeros(1)]).double().to(device)
    edges = [1 + LENGTH * r // N for r in range(N + 1)]
    first, end = list(pairwise(edges))[RANK]
    u = rod[first - 1 : end + 1].clone()
    spy = mock.patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv)
    with spy as posted:
        for _ in range(STEPS):
            exchange(u)
            u[1:-1] = heat(u)
    for _ in range(STEPS):
        rod[1:-1] = heat(rod)
    ops = [op for call in posted.call_args_list for op in call.args[0]]
    sent = sum(op.tensor.nbytes for op in ops if op.op is dist.isend)
    neighbours = (RANK > 0) + (RANK < N - 1)
    claim("halo exchange: numbers unlike one process's", 0, (u[1:-1] != rod[first:end]).sum())
    claim("halo exchange: bytes a rank sends a step", 8 * neighbours, sent / STEPS)


# %% [markdown]
# ## 6. Ping-pong
#
# Half a round trip is a message's latency. 64 messages one after another pay it 64 times; posted in
# one batch they overlap; as one message 64 times as long, they pay it once. So fuse first.


# %%
def ping_pong(device: torch.device) -> None:
    def there_and_back(x: torch.Tensor) -> None:
        for r in (0, 1):
            if RANK < 2:
                dist.send(x, 1 - r) if r == RANK else dist.recv(x, r)

    def batch(parts: list[torch.Tensor]) -> None:
        for r in (0, 1):
            if RANK < 2:
                verb = dist.isend if r == RANK else dist.irecv
                for work in dist.batch_isend_irecv([dist.P2POp(verb, p, 1 - RANK) for p in parts]):
                    work.wait()

    x = torch.zeros(64 * 16, device=device)
    parts = list(x.split(16))  # 64 bytes each
    ways: dict[str, tuple[int, Callable]] = {  # times to repeat, so that all take about as long
        "one by one": (1, lambda: [there_and_back(part) for part in parts]),
        "in one batch": (8, lambda: batch(parts)),
        "as one message": (32, lambda: there_and_back(x)),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for name, (repeats, way) in [*ways.items()] * 8:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            way()
        torch.cuda.synchronize() if device.type == "cuda" else None
        times[name].append((time.perf_counter() - start) / repeats / 2)
    best = {name: min(seconds) * 1e6 for name, seconds in times.items()}  # others only delay
    for name, us in best.items():
        say(f"{'':10}64 messages of 64 bytes, {name:16}{us:9,.0f} us one way")
    say(f"{'':10}latency of one: {best['one by one'] / 64:.0f} us")
    ratio = torch.tensor(best["one by one"] / best["as one message"], device=device)
    dist.broadcast(ratio, 0)  # ranks beyond 1 only watched
    claim("64 messages one by one / as one message", 4, ratio.item(), ">=")


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
