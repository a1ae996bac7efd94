"""One trace for all ranks: Perfetto, and the clocks of several nodes
==================================================================

**Question.** Each rank writes a trace of its own. How do you see all of them on one time axis with
nothing lost, and can you trust that axis?

**Predict**, and write it down before you run.

1. The traces of all ranks are merged into one file. How many of their events may be lost, or end up
   in another row: spans, counters, names of threads, and the arrows (flow events) that connect a
   launch with what it launched?
2. All ranks meet in a barrier. In one picture of all, what must be true of its spans, whichever
   rank comes first? By how many microseconds is it violated on one machine?
3. Rank 1's clock is 0.5 s wrong. Can you tell by how much, and in which direction, from nothing
   but the spans of barriers? Is the answer better with thirty barriers than with one?
4. Now its clock is not only wrong: it gains 100 ms per second. Can the barriers tell that, too?

**Run.**

    torchrun --standalone --nproc-per-node=4 02_one_trace_for_all_ranks.py # NCCL if 4 GPUs
    python 02_one_trace_for_all_ranks.py                                   # the same; else gloo
    python 02_one_trace_for_all_ranks.py --trace all.json   # then open it in ui.perfetto.dev

Not run on several GPUs.

**Try.** In `merge` write `- shift` for `+ shift`: which claim fails, and why not the one on this
machine's clocks? In the same place keep only events with `"ph": "X"`: what is gone?

**Before.** profiling/01_distributed_profiling.py: spans, and what they add up to.

**Next.** 03_nsight_and_nvtx.py: ranges of your own, and the machine below torch.
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
from collections.abc import Iterator
from datetime import timedelta
from itertools import combinations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, record_function, schedule

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# %% [markdown]
# ## 1. Ranges that every trace has
#
# `record_function` names a stretch of code in torch's trace. The barriers get a range too: section
# 3 will need their spans, and a name of our own is there on every backend. One barrier tells
# little, so each recorded step ends with several; on two nodes one per step is enough, as there are
# many steps.


# %%
def one_step(model: nn.Module, x_BD: torch.Tensor) -> None:
    with record_function("step"):
        with record_function("forward"):
            loss = model(x_BD).square().mean()
        with record_function("backward"):
            loss.backward()
        for _ in range(ROUNDS):
            with record_function("barrier"):
                dist.barrier()


# %% [markdown]
# ## 2. One file, one time axis
#
# A trace is a list of **events**. Those with `"ph": "X"` are spans; "s" and "f" are the ends of an
# arrow (**flow**) from a launch to what it launched; "C" is a counter, "M" names a row, "i" is an
# instant. `ts` counts microseconds from the trace's `baseTimeNanoseconds`, `pid` and `tid` say in
# which row an event lies:
#
#     rank 0's file    ts 1000   pid 771         pid 0, "rank 0"   ts 1000
#     rank 1's file    ts 4000   pid 772   ->    pid 1, "rank 1"   ts 4000
#
# The base is the wall clock's time, rounded down to a multiple of three months. All processes on
# all machines share it, which is why traces merge so easily: times can be compared as they are.
# (Files of older versions count from a base of their own; `shift` moves them to the earliest.)
#
# `pid` is meaningless to a reader, and two machines can use one number twice; so it becomes the
# rank. But a GPU's rows have a `pid` of their own (the GPU's number), and must not fall into the
# same row as the process. So each (rank, pid) gets a number of its own, and the process itself gets
# the rank's. (A GPU's row, too, has a "step", of category `gpu_user_annotation`: from the first to
# the last kernel that the step launched. Ours are those of category `user_annotation`.)
#
# Nor may two ranks' arrows share an `id`, and it has to be a *number*: Perfetto reads text there as
# a hexadecimal number, and drops every arrow whose `id` it cannot read, such as "1.12" for arrow 12
# of rank 1. Threads keep their `tid` and their names. torch writes rank and backend
# into each file (`distributedInfo`), so a file found lying about can be placed.

# %%
REPLACED = ("process_name", "process_sort_index")  # every row gets new ones


def merge(traces: list[dict], clock_errors: list[float] | None = None) -> list[dict]:
    """One list of all events: `ts` in us since the earliest base; rank r's process has pid r.

    `clock_errors`: by how many us each rank's clock is late (section 3); its events move back.
    """
    earliest = min(trace["baseTimeNanoseconds"] for trace in traces)
    merged = []
    numbers: dict[tuple, int] = {}  # {(rank, id): the id in the merged file}
    for rank, trace in enumerate(traces):
        shift = (trace["baseTimeNanoseconds"] - earliest) / 1e3
        if clock_errors is not None:
            shift -= clock_errors[rank]
        rows = pids_of(rank, trace)
        for pid, new_pid in rows.items():
            name = f"rank {rank}" if new_pid == rank else f"rank {rank}: {pid}"
            merged.append(metadata("process_name", new_pid, {"name": name}))
            merged.append(metadata("process_sort_index", new_pid, {"sort_index": rank}))
        for event in trace["traceEvents"]:
            if event["name"] in REPLACED:
                continue
            moved = event | {"pid": rows[event.get("pid")]}
            if "ts" in event and event["ph"] != "M":
                moved["ts"] = event["ts"] + shift
            if "id" in event:
                moved["id"] = numbers.setdefault((rank, event["id"]), 1 + len(numbers))
            merged.append(moved)
    return merged


def pids_of(rank: int, trace: dict) -> dict:
    """A new pid for each of a trace's: the rank for the process, others for what it launched on."""
    rows = {}
    for event in trace["traceEvents"]:
        if event["name"] == "step" and event.get("cat") == "user_annotation":
            rows[event["pid"]] = rank
    for event in trace["traceEvents"]:
        rows.setdefault(event.get("pid"), 1000 * (rank + 1) + len(rows))
    return rows


def metadata(name: str, pid: int, args: dict) -> dict:
    return {"ph": "M", "name": name, "pid": pid, "args": args}


# %% [markdown]
# ## 3. Can the axis be trusted?
#
# One machine has one clock. Two machines' clocks differ by microseconds (PTP) to milliseconds
# (NTP), and a merged picture then shows effects before causes. A barrier is the test: no rank
# leaves before every rank has come, so all spans of one barrier must share a moment, on any number
# of machines:
#
#     rank 0   [=======================]               rank 0   [=======]
#     rank 1                [==========]               rank 1               [===]
#     they share the moments when all were there       the clocks are apart by the gap, or more
#
# Each barrier bounds the error of rank r's clock against rank 0's from both sides. Rank r comes
# before rank 0 leaves: start_r - error <= end_0. And it leaves after rank 0 has come: end_r - error
# >= start_0. So over many barriers
#
#     max (start_r - end_0)  <=  error  <=  min (end_r - start_0)
#
# The gap that you see is only the lower bound: a wait in the barrier hides part of the error. The
# two together have a sign, for each rank. The middle is the estimate, and half the distance is what
# it may be off. More barriers can only bring the bounds closer, and what does so is the barrier in
# which *both* waited least: those in which somebody waited long are outvoted, not averaged in. (NTP
# trusts the packet with the shortest way there and back for the same reason.)


# %%
def barriers(merged: list[dict]) -> list[list[tuple[float, float]]]:
    """For each barrier in turn, the span (start, end) in us that each rank spent in it."""
    of_rank: list[list] = [[] for _ in range(WORLD_SIZE)]
    for event in merged:
        if event["name"] == "barrier" and event.get("cat") == "user_annotation":
            of_rank[event["pid"]].append((event["ts"], event["ts"] + event["dur"]))
    return list(zip(*map(sorted, of_rank), strict=True))


def clock_error(rounds: list[list[tuple[float, float]]], rank: int) -> tuple[float, float]:
    """By how many us a rank's clock is late against rank 0's: (at least, at most)."""
    at_least = -math.inf
    at_most = math.inf
    for spans in rounds:
        start_0, end_0 = spans[0]
        start, end = spans[rank]
        at_least = max(at_least, start - end_0)
        at_most = min(at_most, end - start_0)
    return at_least, at_most


def gap(rounds: list[list[tuple[float, float]]]) -> float:
    """The longest time in us by which spans of one barrier miss each other; 0: they all meet."""
    gaps = [0.0]
    for spans in rounds:
        last_to_come = max(start for start, _ in spans)
        first_to_leave = min(end for _, end in spans)
        gaps.append(last_to_come - first_to_leave)
    return max(gaps)


# %% [markdown]
# Quartz clocks also **drift**: they gain or lose some microseconds per second, so an offset that
# was right at the first step is wrong an hour later. Let the error be a straight line in the rank's
# own time. Two barriers i < j then bound its slope, from the upper bound at one and the lower bound
# at the other:
#
#     (lower_j - upper_i) / (start_j - end_i) <= slope <= (upper_j - lower_i) / (end_j - start_i)
#
# Bounds that are 1 ms apart tell 2 ms per second after one second, and 1 us per second only after
# half an hour. So do not fit a drift to a short trace: estimate the offset anew, every few minutes.


# %%
def clock_drift(rounds: list[list[tuple[float, float]]], rank: int) -> tuple[float, float]:
    """By how many us per us a rank's clock gains on rank 0's: (at least, at most)."""
    at_least = -math.inf
    at_most = math.inf
    for first, later in combinations(rounds, 2):
        i = first[rank]
        j = later[rank]
        lower_i = i[0] - first[0][1]
        upper_i = i[1] - first[0][0]
        lower_j = j[0] - later[0][1]
        upper_j = j[1] - later[0][0]
        at_least = max(at_least, (lower_j - upper_i) / (j[0] - i[1]))
        at_most = min(at_most, (upper_j - lower_i) / (j[1] - i[0]))
    return at_least, at_most


# %% [markdown]
# ## 4. How it is measured
#
# The profiler's *schedule* skips a step, warms up on one (DDP rebuilds its buckets then), and
# records three. All traces go to rank 0, which merges and counts; the counts are compared with
# those of the files, and each event with what it was. What is expected of a merged time axis is
# tried on faults that are planted: rank 1's trace is given a base 0.5 s too late *before* it is
# merged, as a wrong clock would, and must be found again; then times that grow too fast.

# %%
ACTIVE = 3  # steps recorded
ROUNDS = 10  # barriers in each
PLANTED = 500_000.0  # us
GAIN = 0.1  # us per us: a thousand times what a bad clock does, since the trace is short


def record_steps(device: torch.device) -> dict:
    """Train a small DDP model; return this rank's trace as the profiler wrote it."""
    layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to(device)
    ids = [device.index] if device.type == "cuda" else None
    model = DistributedDataParallel(layers, device_ids=ids, bucket_cap_mb=0.5)
    x_BD = torch.ones(16, 256, device=device)
    recorded = schedule(wait=1, warmup=1, active=ACTIVE, repeat=1)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:

        def save(profiler: profile) -> None:
            profiler.export_chrome_trace(file.name)

        with profile(schedule=recorded, on_trace_ready=save) as profiler:  # CPU, and CUDA if there
            for _ in range(2 + ACTIVE):
                one_step(model, x_BD)
                profiler.step()
        with open(file.name) as trace:
            return json.load(trace)


def gather_on_rank_0(trace: dict) -> list[dict]:
    """All ranks' traces, in order, on rank 0; elsewhere nothing."""
    traces = [None] * WORLD_SIZE if RANK == 0 else None
    dist.gather_object(trace, traces)
    return traces or []


def as_before(traces: list[dict], merged: list[dict]) -> Counter:
    """How many events of each sort are in the merged list, with all that they had.

    Their times may have moved by the distance of the bases, and nothing else; a new pid or id must
    stand for one old one of one rank.
    """
    ranks = {e["pid"]: e["args"]["sort_index"] for e in merged if e["name"] == REPLACED[1]}
    earliest = min((trace["baseTimeNanoseconds"] for trace in traces), default=0)
    owners: dict[tuple, tuple] = {}
    right = Counter()
    for rank, trace in enumerate(traces):
        apart = (trace["baseTimeNanoseconds"] - earliest) / 1e3
        ours = [e for e in merged if e["name"] not in REPLACED and ranks[e["pid"]] == rank]
        theirs = [e for e in trace["traceEvents"] if e["name"] not in REPLACED]
        for old, new in pairs_by_sort(theirs, ours):
            same = all(old.get(key) == new.get(key) for key in old.keys() - {"pid", "ts", "id"})
            for key in old.keys() & {"pid", "id"}:
                owner = owners.setdefault((key, new.get(key)), (rank, old[key]))
                same &= owner == (rank, old[key])
            moved = new.get("ts", 0) - old.get("ts", 0)
            same &= abs(moved - (0 if old["ph"] == "M" else apart)) < 0.01
            right[old["ph"]] += same
    return right


def pairs_by_sort(theirs: list[dict], ours: list[dict]) -> Iterator[tuple[dict, dict]]:
    """The first span of each list, the second ones, and so on; likewise arrows, counters, ..."""
    for sort in sorted({event["ph"] for event in theirs}):
        before = [event for event in theirs if event["ph"] == sort]
        after = [event for event in ours if event["ph"] == sort]
        yield from zip(before, after, strict=False)


# %% [markdown]
# The planted faults.


# %%
def late(traces: list[dict]) -> list[dict]:
    """The traces as they would be, were rank 1's clock PLANTED us late."""
    changed = list(traces)
    base = traces[1]["baseTimeNanoseconds"] + int(1e3 * PLANTED)
    changed[1] = traces[1] | {"baseTimeNanoseconds": base}
    return changed


def gaining(traces: list[dict]) -> list[dict]:
    """The traces as they would be, if rank 1's clock gained GAIN us in each us that it shows."""
    events = []
    first = min(event["ts"] for event in traces[1]["traceEvents"] if event["ph"] == "X")
    for event in traces[1]["traceEvents"]:
        if event["ph"] == "X":
            begin = first + (event["ts"] - first) / (1 - GAIN)
            events.append(event | {"ts": begin, "dur": event["dur"] / (1 - GAIN)})
    changed = list(traces)
    changed[1] = traces[1] | {"traceEvents": events}
    return changed


# %% [markdown]
# Only rank 0 has something to say here; `rank=0` tells `claim` so.


# %%
def check_merging(traces: list[dict], merged: list[dict]) -> None:
    """Claim that every event is in the merged file, and that arrows hold."""
    right = as_before(traces, merged)
    there = Counter()
    for trace in traces:
        there.update(e["ph"] for e in trace["traceEvents"] if e["name"] not in REPLACED)
    text = "spans of all files, in their row, at their time"
    claim(text, there["X"], right["X"], question=1, rank=0)
    others = there.total() - there["X"]
    found = right.total() - right["X"]
    claim("arrows, counters, instants, names, likewise", others, found, question=1, rank=0)
    arrows = Counter(event["id"] for event in merged if event["ph"] in "sf")
    whole = sum(ends > 1 for number, ends in arrows.items() if isinstance(number, int))
    before = 0
    for trace in traces:
        ends = Counter(event["id"] for event in trace["traceEvents"] if event["ph"] in "sf")
        before += sum(number > 1 for number in ends.values())
    text = "arrows with both ends and a number of their own"
    claim(text, before, whole, question=1, rank=0)


# %% [markdown]
# On one machine the clocks are one, so what is found there without a planted fault is 0.


# %%
def check_clocks(traces: list[dict], merged: list[dict]) -> None:
    """Claim that one machine has one clock, and that a late one is found from the barriers."""
    if WORLD_SIZE == 1:
        blocked("barriers as a test of clocks", needs="2 ranks")
        return
    here = wrong_gap = error = width = 0.0
    if RANK == 0:
        here = gap(barriers(merged))
        wrong = barriers(merge(late(traces)))
        wrong_gap = gap(wrong)
        at_least, at_most = clock_error(wrong, rank=1)
        error = (at_least + at_most) / 2
        width = at_most - at_least
        print(f"{'':13}rank 1's clock: {error / 1e3:.2f} ms late, +-{width / 2e3:.2f}")
    planted = PLANTED / 1e3
    claim("us by which this machine's clocks are apart", 0, here, question=2, rank=0)
    late_clock = {"kind": "simulated", "question": 3, "rank": 0}
    claim("ms of gap, rank 1's clock late", planted, wrong_gap / 1e3, atol=50, **late_clock)
    claim("ms late, from both bounds", planted, error / 1e3, atol=50, **late_clock)


def check_many_barriers(traces: list[dict]) -> None:
    """Claim that more barriers bring the bounds closer, and that they show a drift."""
    if WORLD_SIZE == 1:
        return
    distance = {}
    middle = 0.0
    if RANK == 0:
        rounds = barriers(merge(late(traces)))
        for number in (1, ROUNDS, ACTIVE * ROUNDS):
            widths = []
            for first in range(0, len(rounds) - number + 1, number):
                at_least, at_most = clock_error(rounds[first : first + number], rank=1)
                widths.append(at_most - at_least)
            distance[number] = sum(widths) / len(widths)
            words = (
                f"{number} of the barriers: the bounds are {distance[number] / 1e3:,.2f} ms apart"
            )
            print(f"{'':13}{words}, on average")
        at_least, at_most = clock_drift(barriers(merge(gaining(traces))), rank=1)
        middle = (at_least + at_most) / 2
        print(f"{'':13}it gains {1e3 * middle:.1f} ms per s, +-{500 * (at_most - at_least):.1f}")
    ratio = distance.get(ACTIVE * ROUNDS, 0.0) / distance.get(1, 1.0)
    claim("bounds from all barriers / from one", 0.7, ratio, "<=", question=3, timed=True, rank=0)
    what = "ms per s, from both bounds"
    gain = 1e3 * GAIN
    found = 1e3 * middle
    drifting = {"kind": "simulated", "timed": True, "rank": 0}
    claim(what, gain, found, atol=gain / 2, question=4, **drifting)


# %% [markdown]
# ## What you should have seen
#
# 1. None. Four files have some thousand spans each; all are in the merged one, at the same distance
#    from each other, and so is every arrow with both its ends. The arrows are what one opens a GPU
#    trace for: from the line of Python that launched a kernel to the kernel.
# 2. All spans of one barrier share a moment, for nobody leaves before everybody has come. On one
#    machine they do so exactly: a gap of 0 us.
# 3. Half a second late, give or take what the shortest barrier takes. The gap alone is a little
#    less than 0.5 s, and tells neither the sign nor the rank. Thirty barriers do better than one
#    picked at random, because the best of them decides.
# 4. Yes: the error is larger at the last barrier than at the first, by more than the bounds leave
#    open. On real clocks, a thousand times better, that takes a trace of minutes.
#
# **Try.** With the wrong sign each trace moves the wrong way. Torch's traces share a base, so
# nothing is noticed there; but the planted clock is found 0.5 s *early*. With spans only, the
# picture looks right until you look for an arrow.
#
# **At scale** nobody merges a thousand traces: Perfetto takes some GB. Take the slowest few ranks,
# or one per node; Meta's HTA and NVIDIA's `nsys` recipes read many files and merge only figures. On
# two nodes, put a barrier into each recorded step, as here: it costs microseconds, and a
# training step costs much more.


# %%
def main() -> None:
    trace = {"metavar": "PATH", "help": "save the traces of all ranks as one Perfetto file"}
    options = command_line({"--trace": trace})
    launch()
    device = setup()
    os.environ["KINETO_LOG_LEVEL"] = "99"  # else the profiler tells when it starts and stops
    traces = gather_on_rank_0(record_steps(device))
    merged = merge(traces) if RANK == 0 else []
    check_merging(traces, merged)
    check_clocks(traces, merged)
    check_many_barriers(traces)
    if options.trace and RANK == 0:
        with open(options.trace, "w") as file:
            json.dump({"traceEvents": merged}, file)
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
