"""Collectives: what each rank holds, what it must move, and what goes wrong
=========================================================================

**Question.** What does every collective of `torch.distributed` do and cost, and who waits for whom?

**Predict.** For each of the eight on four ranks: what share of the S bytes must the busiest rank
send or receive? If rank 3 skips the first of three all-reduces, which of them raises an error?

**Run.**

    torchrun --standalone --nproc-per-node=4 01_nccl_collectives.py   # NCCL, if there are 4 GPUs
    python 01_nccl_collectives.py                                     # the same; else gloo

**You will have seen** (4 ranks on 2 cores, gloo, torch 2.15, 10 s; not run on several GPUs) that an
all-reduce moves 1.5 S through each rank, its halves 0.75 S each, but gloo's reduce-scatter 1.5 S;
that after a skipped call two sums are wrong by 100 and only the last call fails, by its timeout;
that without a barrier before it, a clock bills one rank's lateness to the network in full.

**Next.** communication/02_point_to_point.py opens them: send and receive.
"""

import argparse
import contextlib
import ctypes
import json
import logging
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from itertools import product
from typing import NoReturn

import torch
import torch.distributed as dist

WORLD_SIZES = range(1, 65)  # what --nproc-per-node may be
FLAGS: dict[str, dict] = {}  # flag -> keyword arguments of argparse's add_argument


def main(options: argparse.Namespace) -> None:
    device = setup()
    eight_pictures(device)
    five_reductions(device)
    two_halves_make_a_whole(device)
    ring_or_tree()
    for section in bytes_on_the_wire, who_waits_for_whom, one_rank_skips, sides_of_a_clock:
        say()
        section(device) if N > 1 else blocked(section.__name__.replace("_", " "), needs="2 ranks")
    finish()


# %% [markdown]
# ## 1. Eight collectives
#
# A collective is a call that every rank of a group makes, in the same order, with matching shapes.
# X[r, j] is chunk j of the data born on rank r; one number stands for a chunk of any size, and 23
# is chunk 3 of rank 2. A row below says what rank r brings, the call, what rank r must then hold,
# as one process computes it that sees all of X, and two shares of bytes (section 4).

# %%
N = int(os.environ.get("WORLD_SIZE", 1))
ROOT = 1 % N  # any rank may be
PART, DEPTH = (N - 1) / N, (N - 1).bit_length()  # everything but one chunk; ceil(log2 N)


def at_root(chunks: torch.Tensor | list, r: int) -> torch.Tensor | list:
    return chunks if r == ROOT else chunks[:0]


def reduce(out: torch.Tensor, x: torch.Tensor) -> None:
    dist.reduce(x, ROOT)
    out.copy_(at_root(x, RANK))  # elsewhere x may hold partial sums: promised to nobody


# fmt: off
COLLECTIVES = {  # name: (before, call, after, must, gloo)
    "broadcast": (lambda X, r: X[r], lambda out, x: dist.broadcast(out.copy_(x), ROOT),
                  lambda X, r: X[ROOT], 1, DEPTH),
    "scatter": (lambda X, r: at_root(X[r], r),
                lambda out, x: dist.scatter(out, at_root(list(x.split(1)), RANK), ROOT),
                lambda X, r: X[ROOT, r : r + 1], PART, PART),
    "gather": (lambda X, r: X[r, :1],
               lambda out, x: dist.gather(x, at_root(list(out.split(1)), RANK), ROOT),
               lambda X, r: at_root(X[:, 0], r), PART, PART),
    "reduce": (lambda X, r: X[r], reduce, lambda X, r: at_root(X.sum(0), r), 1, 2 * PART),
    "all_reduce": (lambda X, r: X[r], lambda out, x: dist.all_reduce(out.copy_(x)),
                   lambda X, r: X.sum(0), 2 * PART, 2 * PART),
    "all_gather": (lambda X, r: X[r, :1], dist.all_gather_into_tensor,
                   lambda X, r: X[:, 0], PART, PART),
    "reduce_scatter": (lambda X, r: X[r], dist.reduce_scatter_tensor,
                       lambda X, r: X.sum(0)[r : r + 1], PART, 2 * PART),
    "all_to_all": (lambda X, r: X[r], dist.all_to_all_single, lambda X, r: X[:, r], PART, PART),
}
# fmt: on


def everyone(held: torch.Tensor) -> list[list[float]]:
    """What every rank holds, for pictures and verdicts; it travels pickled, by another road."""
    rows: list = [None] * N
    dist.all_gather_object(rows, held.flatten().tolist())
    return rows


def picture(name: str, before: list[list[float]], after: list[list[float]]) -> str:
    def row(numbers: list[float]) -> str:
        cells = ["?" if x != x else f"{x:02g}" for x in numbers[:4]] or ["."]
        return " ".join(cells + ["…"] * (len(numbers) > 4))

    lines = [f"rank {r}   {row(before[r]):17}  →  {row(after[r])}" for r in range(min(N, 4))]
    return f"\n  {name:16}" + f"\n{'':18}".join(lines + ["…"] * (N > 4))


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item() if a.numel() else 0.0


def eight_pictures(device: torch.device) -> None:
    r = torch.arange(N, dtype=torch.float32, device=device)
    X = (10 if N <= 10 else 100) * r[:, None] + r  # integers below 2^24: every sum is exact
    for name, (before, call, after, *_) in COLLECTIVES.items():
        x, due = before(X, RANK).clone(), after(X, RANK)
        brought, out = everyone(x), torch.full_like(due, torch.nan)  # NaN: nothing filled it in
        call(out, x)
        say(picture(name, brought, everyone(out)))
        claim(f"{name}, distance from one process", 0, gap(out, due))


# %% [markdown]
# ## 2. Five reductions, two halves
#
# SUM, MIN and MAX of small integers are exact in any order; AVG (NCCL multiplies by 1/n first) and
# a long PRODUCT may round at every factor. An all-reduce is a reduce-scatter, then an all-gather
# (Rabenseifner, 2004): to the bit, if additions are exact or come in the same order. ZeRO and FSDP
# update each rank's shard between the two.


# %%
def five_reductions(device: torch.device) -> None:
    x_4 = torch.arange(4, dtype=torch.float64, device=device) + RANK
    X_R4 = torch.stack([x_4 - RANK + r for r in range(N)])
    oracle = {"SUM": X_R4.sum(0), "AVG": X_R4.mean(0), "MIN": X_R4.amin(0), "MAX": X_R4.amax(0)}
    say("\n  all_reduce of [0, 1, 2, 3] + rank")
    for name, y_4 in (oracle | {"PRODUCT": X_R4.prod(0)}).items():
        out_4 = x_4.clone()
        dist.all_reduce(out_4, getattr(dist.ReduceOp, name))
        say(f"  {name:>33}  →  [{', '.join(f'{y:g}' for y in out_4.tolist())}]")
        atol = 2 * N * 2**-53 if name in ("AVG", "PRODUCT") else 0  # a rounding per factor, twice
        claim(f"{name}, distance from one process", 0, gap(out_4, y_4) / y_4.max(), atol=atol)


def two_halves_make_a_whole(device: torch.device) -> None:
    x = torch.arange(1000 * N, device=device, dtype=torch.float32) % (97 + RANK)
    shard, halves, whole = torch.empty_like(x[:1000]), torch.empty_like(x), x.clone()
    dist.reduce_scatter_tensor(shard, x)
    dist.all_gather_into_tensor(halves, shard)
    dist.all_reduce(whole)
    differ = whole.view(torch.int32) != halves.view(torch.int32)
    claim("numbers whose bits differ, all_reduce and halves", 0, differ.sum().item())


# %% [markdown]
# ## 3. Ring or tree: NCCL's choice
#
# A message of s bytes costs alpha + s / beta. An all-reduce around a ring is 2(n-1) steps of S/n
# bytes, up and down a tree 2 ceil(log2 n) steps of up to S: few bytes against few alphas. NCCL
# prices each algorithm with each protocol and takes the cheapest. Simple sends data, then a fence;
# LL puts 4 bytes of flag beside 4 of data instead, LL128 8 beside 120. Constants: NCCL 2.30,
# src/graph/tuning.cc; NVLink 4, a network as fast; without correction factors and NVLS, where the
# switch adds. On GPUs, NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING prints NCCL's own prices.

# %%
PROTOCOLS = "LL", "LL128", "Simple"
NCCL = {  # of each: us to start, us a step over NVLink and over the network, share of the wire
    "Ring": ((6.6, 14, 8.4), (0.6, 1.9, 3.4), (2.7, 4, 14), (1 / 2, 15 / 16, 1)),
    "Tree": ((6.8, 14, 8.4), (0.6, 1.25, 4), (5, 8.5, 14), (1 / 3.8, 7 / 9, 0.92)),
}


def price(way: tuple[str, str], nodes: int, size: float, wire: float = 18 * 20.6) -> float:
    """us for an all-reduce over nodes of 8 GPUs; `wire`: links x GB/s a link, one way, per GPU."""
    start, near, far, share = (row[PROTOCOLS.index(way[1])] for row in NCCL[way[0]])
    n = 8 * nodes
    if way[0] == "Ring":
        hops, leaps, traffic = 2 * (n - nodes), 2 * (nodes - 1), 2 * (n - 1) / n
    else:  # a chain inside each node, a tree across nodes, both up and down
        hops, leaps, traffic = 2 * 7, 2 * (nodes.bit_length() - 1), 2
    limit = (141 if nodes == 1 else 20.4) if way[1] == "LL" else wire
    return start + hops * near + leaps * far + size * traffic / min(wire * share, limit) / 1e3


def ring_or_tree() -> None:
    say(f"\n  {'all_reduce of':16} 8 H100, one node          32 H100, four nodes")
    for exponent in range(10, 31, 4):
        row = f"  {2 ** (exponent % 10):>8} {'KMG'[exponent // 10 - 1]}iB"
        for nodes in (1, 4):
            ways = [(price(way, nodes, 2**exponent), *way) for way in product(NCCL, PROTOCOLS)]
            row += "    {1} {2:7} {0:7,.0f} us".format(*min(ways))
        say(row)
    for gpu, wire, published in ("A100", 12 * 20, 235), ("H100", 18 * 20.6, 370):
        busbw = 2 * 7 / 8 * 8e9 / price(("Ring", "Simple"), 1, 8e9, wire) / 1e3
        claim(f"busbw of 8 {gpu}, GB/s: priced, published", busbw, published, rtol=0.03)


# %% [markdown]
# ## 4. Bytes
#
# A rank must receive what it lacks and, in a reduction, send what only it has: `must`, a share of
# S, the larger buffer's bytes. With it, algbw = S / time, which the caller sees, becomes busbw =
# algbw x `must`, which the busiest link carries and a datasheet bounds. The kernel counts what each
# TCP socket carried (TCP_INFO), so gloo can be watched. Its all_reduce is the ring: through each
# rank go 2(n-1) chunks of S/n, one a step. Its broadcast is the tree: the root sends S in each of
# ceil(log2 n) steps. Its reduce_scatter is a whole all-reduce: right values, twice the price.


# %%
def carried() -> tuple[int, int]:
    """Bytes all TCP sockets of this process have sent (repeats apart) and received."""
    sent = received = 0
    for fd in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):  # closed by now, or not TCP
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket"):
                continue
            with socket.socket(fileno=os.dup(int(fd))) as s:
                info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
            fields = (info[i : i + 8] for i in (128, 200, 208))  # of the kernel's struct tcp_info
            into, out, again = (int.from_bytes(field, sys.byteorder) for field in fields)
            sent, received = sent + out - again, received + into
    return sent, received


def bytes_on_the_wire(device: torch.device) -> None:
    if device.type == "cuda" or not any(carried()):  # the store's traffic at least is there
        return blocked("bytes on the wire", needs="a system library: gloo, Linux with TCP_INFO")
    X = torch.ones(1, 1, 50_000).expand(N, N, -1)  # messages' headers: under 1% of such chunks
    for name, (before, call, after, must, gloo) in COLLECTIVES.items():
        x, out = before(X, RANK).contiguous(), torch.empty_like(after(X, RANK))
        dist.barrier()
        was = carried()
        dist.barrier()
        call(out, x)
        dist.barrier()
        moved = [now - then for now, then in zip(carried(), was, strict=True)]
        busiest = max(map(max, everyone(torch.tensor(moved)))) / (4 * X[0].numel())
        claim(f"{name}: must {must:.3g} S, gloo moves", gloo, busiest, rtol=0.01)


# %% [markdown]
# ## 5. Who waits for whom
#
# A barrier moves no data: nobody leaves it before everybody has come. With `async_op=True`, though,
# a call returns a `Work` at once. Both are statements about order, and order proves them, counted
# in the store. The last rank is late at the barrier; rank 0 makes its asynchronous call only when
# the others are back from theirs: they cannot have waited for a sum that needs rank 0. Leave the
# buffer alone until `wait()`; on NCCL that makes the current *stream* wait, not the CPU.


# %%
def who_waits_for_whom(device: torch.device) -> None:
    store = dist.distributed_c10d._get_default_store()  # by TCP, beside the collectives
    time.sleep(0.1 if RANK == N - 1 else 0)
    store.add("came", 1)
    dist.barrier()
    claim("ranks that had come when the barrier let go", N, store.add("came", 0))
    x, undone = torch.full((4,), RANK + 1.0, device=device), [f"undone {r}" for r in range(1, N)]
    if RANK == 0:
        with contextlib.suppress(dist.DistStoreError):  # not all back in 5 s: count those who are
            store.wait(undone, timedelta(seconds=5))
        store.add("undone", sum(store.check([key]) for key in undone))
    work = dist.all_reduce(x, async_op=True)
    if not work.is_completed():
        store.set(f"undone {RANK}", "")
    work.wait()
    claim("ranks back, work undone, before rank 0 calls", N - 1, store.add("undone", 0))
    claim("after wait(), distance from the sum", 0, gap(x, torch.full_like(x, N * (N + 1) / 2)))


# %% [markdown]
# ## 6. One rank skips a call
#
# Collectives are matched by order, not by name. When a rank skips one ("my batch was empty"), its
# next call is taken for the one it skipped: same shape, no error, and all get a sum over different
# steps. Only at the end, where the others make one call more, does anybody wait in vain, and the
# error names that call, not the skipped one. A group in which a call failed is lost, so this is a
# group of its own.


# %%
def one_rank_skips(device: torch.device) -> None:
    group, sums, error = dist.new_group(timeout=timedelta(seconds=2), backend="gloo"), [], ""
    dist.barrier(group)
    try:
        for step in range(3):
            loss = torch.tensor([100.0 * step + RANK])
            if RANK < N - 1 or step > 0:  # the last rank skips step 0
                dist.all_reduce(loss, group=group)
                sums.append(loss.item())
    except RuntimeError as timeout:
        error = str(timeout)
    say(f"{'':10}rank 0 got {sums}, then: {error.rpartition('] ')[2]:.60}")
    claim("sums handed out after the skip, without an error", 2, len(sums))
    off = [got - (100 * step * N + N * (N - 1) / 2) for step, got in enumerate(sums)]
    worst = max(off, key=lambda x: abs(x - 100), default=0)
    claim("each is off by the skipper's next step, 100", 100, worst)
    ended = everyone(torch.tensor(error != ""))
    claim("ranks that waited in vain, ended by the timeout", N - 1, sum(map(sum, ended)))


# %% [markdown]
# ## 7. The two sides of a clock
#
# A collective ends when the last rank has come, so a clock started at each rank's own arrival
# bills one rank's lateness to the network; and a CUDA call returns once it is launched. Therefore
# settle both sides of the clock: synchronise the device, then a barrier. Report the slowest rank.

# %%
LATE = 0.3  # seconds; a sleep that stands for a slow batch


def clock(x: torch.Tensor, skip: str) -> float:
    """Seconds for an all-reduce of x, by the slowest rank's clock, the last rank being late."""

    def settle() -> None:
        if x.is_cuda:
            torch.cuda.synchronize()
        dist.barrier()

    settle()
    time.sleep(LATE if RANK == N - 1 else 0)
    settle() if skip != "before" else None
    start = time.perf_counter()
    dist.all_reduce(x)
    settle() if skip != "after" else None
    return max(everyone(torch.tensor(time.perf_counter() - start)))[0]


def sides_of_a_clock(device: torch.device) -> None:
    x = torch.ones(1000 if device.type == "cpu" else 2**28, device=device)
    rounds = [[clock(x, skip) for skip in ("nothing", "before", "after")] for _ in range(3)]
    right, billed, launched = (sorted(times)[1] for times in zip(*rounds, strict=True))  # medians
    say(f"{'':10}{billed * 1e3:.1f} ms if not settled before, {right * 1e3:.1f} ms if settled")
    share = (billed - right) / LATE
    claim("share of one rank's lateness billed to the network", 1, share, atol=0.5)
    if device.type == "cpu":  # where a call returns when it is done
        return blocked("clock not settled after / settled", needs="2 GPUs")
    claim("clock not settled after / settled", 0.5, launched / right, "<=")


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
