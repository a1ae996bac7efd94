"""One trace for all ranks: Perfetto, clocks, NVTX and Nsight Systems
==================================================================

**Question.** Each rank writes a trace of its own. How do you see all of them on one time axis, can
you trust that axis, and how do your own ranges get into Nsight Systems?

**Predict**, and write it down before you run.

1. The traces of all ranks are merged into one file. How many of their events may be lost: spans,
   and the arrows (flow events) that connect a launch with what it launched?
2. All ranks meet in a barrier. In one picture of all, what must be true of its spans, whoever comes
   first? By how many microseconds is it violated on one machine?
3. Rank 1's clock is 0.5 s wrong. Can you tell by how much, and in which direction, from nothing
   but the spans of barriers?

**Run.**

    torchrun --standalone --nproc-per-node=4 02_one_trace_for_all_ranks.py # NCCL if 4 GPUs
    python 02_one_trace_for_all_ranks.py                                   # the same; else gloo
    python 02_one_trace_for_all_ranks.py --trace all.json   # then open it in ui.perfetto.dev

Takes 11 s with 4 ranks on 2 cores (gloo, torch 2.15). Not run on several GPUs, nor with nsys.
Predict, run, then read.

**Try.** In `merge` write `- shift` for `+ shift`: which claim fails, and why not the one on this
machine's clocks? In the same place keep only events with `"ph": "X"`: what is gone?

**Before.** profiling/01_distributed_profiling.py: spans, and what they add up to.

**Next.** exercises/13_profile_all_reduce; then data-loading/01_ffcv_distributed_optimization.py:
where the batches come from.
"""

import argparse
import contextlib
import ctypes
import json
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, record_function, schedule

try:
    import nvtx  # pip install -e '.[profiling]'
except ImportError:
    nvtx = None

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_STEP_NUM_TASKS", "1")))

# %% [markdown]
# ## 1. One range, two profilers
#
# `record_function` names a stretch of code in torch's trace; `nvtx.annotate` names it for Nsight
# Systems, and costs nothing when nobody listens. One helper says both, so that the two never drift
# apart. The barrier gets a range too: section 3 will need its span, and a name of our own is there
# on every backend.


# %%
@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """A range in torch's trace, and in Nsight Systems' where the nvtx package is installed."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(record_function(name))
        if nvtx is not None:
            stack.enter_context(nvtx.annotate(name))
        yield


def one_step(model: nn.Module, x_BD: torch.Tensor) -> None:
    with span("step"):
        with span("forward"):
            loss = model(x_BD).square().mean()
        with span("backward"):
            loss.backward()
        with span("barrier"):
            dist.barrier()


# %% [markdown]
# ## 2. One file, one time axis
#
# A trace is a list of **events**. Those with `"ph": "X"` are spans; "s" and "f" are the ends of an
# arrow (**flow**) from a launch to what it launched; "C" is a counter, "M" names a row, "i" is an
# instant. `ts` counts microseconds from the trace's own `baseTimeNanoseconds`, `pid` and `tid` say
# in which row an event lies:
#
#     rank 0's file    base 5.000 s   ts 1000   pid 771         pid 0, "rank 0: python"   ts 3001000
#     rank 1's file    base 2.000 s   ts 4000   pid 772   ->    pid 1, "rank 1: python"   ts    4000
#
# So each event moves by the distance between its trace's base and the earliest one. `pid` is
# meaningless to a reader, and two machines can use one number twice; so it becomes the rank. But a
# GPU's rows have a `pid` of their own (the GPU's number), and must not fall into the same row as
# the process. Hence each (rank, pid) gets a number of its own, and the process itself gets the
# rank's. (A GPU's row, too, has a "step", of category `gpu_user_annotation`: from the first to the
# last kernel that the step launched. Ours are those of category `user_annotation`.) Nor may two
# ranks' arrows share an `id`. torch writes rank and backend into each file (`distributedInfo`), so
# a file found lying about can be placed.


# %%
def merge(traces: list[dict], clock_errors: list[float] | None = None) -> list[dict]:
    """One list of all events: `ts` in us since the earliest base; rank r's process has pid r.

    `clock_errors`: by how many us each rank's clock is late (section 3); its events move back.
    """
    earliest = min(trace["baseTimeNanoseconds"] for trace in traces)
    merged = []
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
            if event["name"] in ("process_name", "process_sort_index", "process_labels"):
                continue  # replaced by ours
            moved = event | {"pid": rows[event.get("pid")]}
            if "ts" in event and event["ph"] != "M":
                moved["ts"] = event["ts"] + shift
            if "id" in event:
                moved["id"] = f"{rank}.{event['id']}"
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
# two together have a sign, for each rank, and are as far apart as the shortest time that both spent
# in a barrier. The middle is the estimate, and half the distance is what it may be off.


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
# ## 4. How it is measured
#
# The profiler's *schedule* skips a step, warms up on one (DDP rebuilds its buckets then), and
# records three. All traces go to rank 0, which merges and counts; the counts are compared with
# those of the files. What is expected of a merged time axis is tried on a fault that is planted:
# rank 1's trace is given a base 0.5 s too late *before* it is merged, as a wrong clock would, and
# must be found again.

# %%
ACTIVE = 3  # steps recorded
PLANTED = 500_000.0  # us


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


def count(events: list[dict], phases: str) -> int:
    return sum(event.get("ph", "-") in phases for event in events)


def late(traces: list[dict]) -> list[dict]:
    """The traces as they would be, were rank 1's clock PLANTED us late."""
    changed = list(traces)
    base = traces[1]["baseTimeNanoseconds"] + int(1e3 * PLANTED)
    changed[1] = traces[1] | {"baseTimeNanoseconds": base}
    return changed


# %% [markdown]
# Only rank 0 has something to say here; `rank=0` tells `claim` so.


# %%
def check_merging(traces: list[dict], merged: list[dict]) -> None:
    """Claim that every event is in the merged file, that arrows hold, and who is who."""
    spans = sum(count(trace["traceEvents"], "X") for trace in traces)
    claim("spans of all files in the merged one", spans, count(merged, "X"), question=1, rank=0)
    others = sum(count(trace["traceEvents"], "sfCi") for trace in traces)
    found = count(merged, "sfCi")
    claim("arrows, counters and instants in it", others, found, question=1, rank=0)
    arrows = Counter(event["id"] for event in merged if event["ph"] in "sf")
    whole = sum(ends > 1 for ends in arrows.values())
    before = 0
    for trace in traces:
        ends = Counter(event["id"] for event in trace["traceEvents"] if event["ph"] in "sf")
        before += sum(number > 1 for number in ends.values())
    claim("arrows with both ends, each in its own rank", before, whole, rank=0)
    steps = Counter()
    for event in merged:
        if event["name"] == "step" and event.get("cat") == "user_annotation":
            steps[event["pid"]] += 1
    fewest = min((steps[rank] for rank in range(WORLD_SIZE)), default=0)
    claim("steps in the row of the rank that has fewest", ACTIVE, fewest, rank=0)
    names = Counter()
    for event in merged:
        if event["name"] == "process_name":
            names[event["pid"]] += event["args"]["name"] == f"rank {event['pid']}"
    named = sum(names[rank] == 1 for rank in range(WORLD_SIZE))
    claim("rows that bear their rank's name", WORLD_SIZE, named, rank=0)
    placed = [trace["distributedInfo"]["rank"] == rank for rank, trace in enumerate(traces)]
    claim("files that know their rank", WORLD_SIZE, sum(placed), rank=0)


def check_clocks(traces: list[dict], merged: list[dict]) -> None:
    """Claim that one machine has one clock, and that a late one is found from the barriers."""
    if WORLD_SIZE == 1:
        blocked("barriers as a test of clocks", needs="2 ranks")
        return
    here = wrong_gap = error = uncertain = mended = 0.0
    found = 0
    if RANK == 0:
        found = len(barriers(merged))
        here = gap(barriers(merged))
        wrong = barriers(merge(late(traces)))
        wrong_gap = gap(wrong)
        at_least, at_most = clock_error(wrong, rank=1)
        error = (at_least + at_most) / 2
        uncertain = (at_most - at_least) / 2
        errors = [0.0, error] + [0.0] * (WORLD_SIZE - 2)
        mended = gap(barriers(merge(late(traces), errors)))
    planted = PLANTED / 1e3
    off = uncertain / 1e3  # ms
    claim("barriers found in every rank's trace", ACTIVE, found, rank=0)
    claim("us by which this machine's clocks are apart", 0, here, question=2, rank=0)
    claim("ms of gap, rank 1's clock late", planted, wrong_gap / 1e3, atol=2 * off, rank=0)
    claim("ms late, from both bounds", planted, error / 1e3, atol=off, question=3, rank=0)
    claim("ms that this estimate may be off, at most", 50, off, "<=", timed=True, rank=0)
    claim("us of gap left, less than what it may be off", uncertain, mended, "<=", rank=0)


# %% [markdown]
# ## 5. Nsight Systems
#
# torch's profiler sees what torch does. Nsight Systems sees the machine: CUDA, NVTX ranges (ours,
# and NCCL's own), threads, network. One report for a node, one for each of several (`%q{}` takes a
# variable from the environment), then sums by range and by kernel:
#
#     nsys profile -t cuda,nvtx,osrt -o step torchrun --standalone --nproc-per-node=8 train.py
#     nsys profile -t cuda,nvtx,osrt -o step_%q{SLURM_NODEID} torchrun --nnodes=2 ... train.py
#     nsys stats -r nvtx_pushpop_sum,cuda_gpu_kern_sum step.nsys-rep


# %%
def check_nsight_systems() -> None:
    if shutil.which("nsys") is None or nvtx is None:
        blocked("our range in a report of Nsight Systems", needs="nsys, and the nvtx package")
        return
    if "NSYS_PROFILING_SESSION_ID" in os.environ:
        blocked("our range in a report of Nsight Systems", needs="nsys that does not run already")
        return
    found = 0
    error = [""]
    if RANK == 0:
        code = "import nvtx\nwith nvtx.annotate('our range'): pass"
        with tempfile.TemporaryDirectory() as folder:
            report = f"{folder}/report.nsys-rep"
            profiled = ["nsys", "profile", "-t", "nvtx", "-o", report, sys.executable, "-c", code]
            stats = ["nsys", "stats", "-r", "nvtx_pushpop_sum", report]
            try:
                subprocess.run(profiled, check=True, capture_output=True, timeout=60)
                printed = subprocess.run(stats, capture_output=True, text=True, timeout=60).stdout
                found = printed.count("our range")
            except subprocess.SubprocessError as failed:  # where nothing may be traced, say
                error = [str(failed)]
    dist.broadcast_object_list(error)
    if error[0]:
        end = error[0][-80:]  # what went wrong stands last
        print0(f"{'':13}{'…' if len(error[0]) > 80 else ''}{end}")
        blocked("our range in a report of Nsight Systems", needs="nsys that works here")
        return
    claim("our range in a report of Nsight Systems", 1, found, rank=0)


# %% [markdown]
# ## What you should have seen
#
# 1. None. Four files have some 860 spans each; all are in the merged one, and so is every
#    arrow with both its ends. The arrows are what one opens a GPU trace for: from the line of
#    Python that launched a kernel to the kernel.
# 2. All spans of one barrier share a moment, for nobody leaves before everybody has come. On one
#    machine they do so exactly: a gap of 0 us.
# 3. Half a second late, give or take what a barrier takes, here a few milliseconds at most. The gap
#    alone is a little less than 0.5 s, and tells neither the sign nor the rank. Shifted by the
#    estimate, all barriers meet again, to within what it may be off.
#
# **Try.** With the wrong sign each trace moves the wrong way. Traces that torch writes on one
# machine share a base, so nothing is noticed there; but the planted clock is found 0.5 s *early*.
# With spans only, the picture looks right until you look for an arrow.
#
# **At scale** nobody merges a thousand traces: Perfetto takes some GB. Take the slowest few ranks,
# or one per node; Meta's HTA and NVIDIA's `nsys` recipes read many files and merge only figures. On
# two nodes, put a barrier into each recorded step, as here: it costs microseconds beside a training
# step.


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
    if options.trace and RANK == 0:
        with open(options.trace, "w") as file:
            json.dump({"traceEvents": merged}, file)
    check_nsight_systems()
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
    if "RANK" in os.environ or WORLD_SIZE > 1:
        return  # this is a rank already: torchrun or srun has started it
    import tempfile

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    gpus = torch.cuda.device_count()
    ranks = max(size for size in world_sizes if size <= gpus) if gpus > 1 else 4
    if ranks < gpus:
        print(f"{ranks} of {gpus} GPUs: the largest number that this lesson can use")
    os.environ["LAUNCHER"] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores
    logging.disable()  # the rank that fails says why
    arguments = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}", *sys.argv]
    try:
        with tempfile.TemporaryDirectory() as logs:  # the one that torchrun makes would stay
            torchrun([f"--log-dir={logs}", *arguments])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        sys.exit(f"rank {rank} was ended by {failure.signal_name()}" if failure.exitcode < 0 else 1)
    except SignalException as error:
        sys.exit(128 + error.sigval)
    sys.exit()


def setup() -> torch.device:
    """Join the process group: NCCL if every rank has a GPU of its own, else gloo on all ranks."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the launcher
    parent = str(os.getppid())
    if os.environ.pop("LAUNCHER", parent) != parent:
        sys.exit(1)  # it was killed before that line
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank that waits inside C++ too
    if "RANK" not in os.environ:
        name_ranks_as_torchrun_does()
    torch.set_float32_matmul_precision("highest")  # some images make TF32 the default
    patience = timedelta(minutes=2)
    store, _, _ = next(dist.rendezvous("env://", timeout=patience))
    device, backend = choose_device(store)
    local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    if local_ranks < WORLD_SIZE:
        lead_gloo_to_other_nodes(store)
    group = {"rank": RANK, "world_size": WORLD_SIZE, "store": store, "timeout": patience}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **group)
    else:
        dist.init_process_group("gloo", **group)
    sys.excepthook = crash  # only now: init_process_group sets one of its own
    print0(f"{WORLD_SIZE} ranks, {backend}, torch {torch.__version__}\n")
    print0(f"{'':13}{'claim':50} {'predicted':22} {'measured':>11}")
    return device


def choose_device(store: dist.Store) -> tuple[torch.device, str]:
    """Agree on one backend before anybody joins; return this rank's device, and what to print."""
    visible = torch.cuda.device_count()
    mine = "none"
    if visible > 0:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % visible)
        gpu = torch.cuda.get_device_properties(device)
        mine = str(gpu.uuid)  # not the index: each rank may be shown another GPU as its only one
        if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
            mine += f", shared by rank {RANK}"  # NCCL allows that from 2.30
    own = set(tell_all(store, "GPU", mine)) - {"none"}
    if len(own) < WORLD_SIZE:
        why = f"NCCL needs {WORLD_SIZE} GPUs, these ranks see {len(own)}"
        return torch.device("cpu"), f"gloo ({why})"
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return device, f"NCCL {version} on {gpu.name}"


def lead_gloo_to_other_nodes(store: dist.Store) -> None:
    """Say on which network gloo listens: it would ask for the host's name, often 127.0.1.1."""
    import psutil

    here = address_towards(os.environ["MASTER_ADDR"])
    for address in tell_all(store, "address", here):
        if here.startswith("127.") and not address.startswith("127."):
            here = address_towards(address)  # on the first node, whose name means itself
    for network, addresses in psutil.net_if_addrs().items():
        if here in [one.address for one in addresses]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", network)


def address_towards(host: str) -> str:
    """Return this node's address on the way to the host."""
    import socket

    family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way:
        way.connect(there)  # sends nothing: the kernel looks up the route
        return way.getsockname()[0]


def tell_all(store: dist.Store, what: str, value: str) -> list[str]:
    """Return every rank's `value`, in order, through the store: there is no group yet."""
    store.set(f"{what} of {RANK}", value)
    values = store.multi_get([f"{what} of {rank}" for rank in range(WORLD_SIZE)])
    return [value.decode() for value in values]


def name_ranks_as_torchrun_does() -> None:
    """Under `srun`, one task per rank: set the variables that torchrun would have set."""
    slurm = os.environ
    first_node = re.match(r"([^,[]+)(?:\[(\d+))?", slurm["SLURM_STEP_NODELIST"])  # of "gpu[03-07]"
    tasks_here = re.match(r"\d+", slurm["SLURM_STEP_TASKS_PER_NODE"])  # of "4(x2)"
    os.environ |= {"RANK": str(RANK), "WORLD_SIZE": str(WORLD_SIZE)}
    os.environ |= {"LOCAL_RANK": slurm["SLURM_LOCALID"], "LOCAL_WORLD_SIZE": tasks_here[0]}
    os.environ["MASTER_ADDR"] = first_node[1] + (first_node[2] or "")
    os.environ["MASTER_PORT"] = str(20_000 + int(slurm["SLURM_JOB_ID"]) % 10_000)


def print0(*words: object) -> None:
    """Print on rank 0 only."""
    if RANK == 0:
        print(*words, flush=True)


def refuse(rule: str) -> None:
    """End before the first collective with one message, from rank 0: rule, value, remedy."""
    if RANK != 0:
        time.sleep(30)  # the launcher ends us meanwhile
    sys.exit(f"{sys.argv[0]}: {rule}")


def claim(
    text: str,
    predicted: float,
    measured: float,
    sign: str = "=",
    atol: float = 0.0,
    question: int | None = None,
    timed: bool = False,
    rank: int | None = None,
) -> None:
    """Check `measured sign predicted` (=, <=, >=), give or take `atol`, on all ranks; all call.

    The worst rank is shown, or `rank`. `question` is the number in *Predict* that this answers;
    `timed` says that a clock decides.
    """
    pairs = [(float(predicted), float(measured), float(atol))]
    if dist.is_initialized():
        pairs = pairs * WORLD_SIZE
        dist.all_gather_object(pairs, pairs[0])
    errors = []
    for p, m, slack in pairs:
        error = {"=": abs(m - p), "<=": m - p, ">=": p - m}[sign] - slack
        errors.append(math.inf if math.isnan(error) else error)
    worst = errors.index(max(errors)) if rank is None else rank
    verdict = "PASS" if errors[worst] <= 0 else "FAIL"
    p, m, slack = pairs[worst]
    between = f"{sign:>2} {readable(p)}" + (f" ±{slack:.2g}" if slack else "")
    mark = f"{question}." if question else ""
    print0(f"  {verdict:7} {mark:2} {text:50} {between:22} {readable(m):>11}")
    if verdict == "FAIL":
        print0(f"{'':13}off by {m - p:.3g} on rank {worst}")
    row = {"claim": text, "verdict": verdict, "sign": sign, "rank": worst, "slack": slack}
    row |= {"predicted": p, "measured": m if math.isfinite(m) else str(m)}  # JSON knows no NaN
    ledger.append(row | {"question": question, "timed": timed})


def readable(x: float) -> str:
    """Whole numbers in full, others to six digits."""
    return f"{x:,.0f}" if x.is_integer() and abs(x) < 1e12 else f"{x:,.6g}"


def blocked(text: str, needs: str) -> None:
    """Record what this machine cannot answer, and what would."""
    print0(f"  BLOCKED    {text:50} needs {needs}")
    ledger.append({"claim": text, "verdict": "BLOCKED", "needs": needs})


def crash(*error: object) -> None:
    """Leave without ceremony, since peers may be stuck. The first rank that fails says why."""
    first = dist.distributed_c10d._get_default_store().add("crashes", 1) == 1
    time.sleep(1 if first else 30)  # the launcher ends us meanwhile, if a peer's death is the cause
    print(f"rank {RANK}:", file=sys.stderr)
    sys.__excepthook__(*error)
    os._exit(1)


def finish() -> None:
    """Write the ledger where LESSON_JSON says; exit 1 if a claim failed or none was made."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    verdicts = Counter(row["verdict"] for row in ledger)
    print0(f"\n  {verdicts['PASS']} PASS, {verdicts['FAIL']} FAIL, {verdicts['BLOCKED']} BLOCKED")
    if set(verdicts) == {"BLOCKED"}:
        print0("  Nothing could be checked: BLOCKED rows say what they need.")
    if RANK == 0 and "LESSON_JSON" in os.environ:
        about = {"ranks": WORLD_SIZE, "torch": torch.__version__, "python": sys.version}
        about["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        about |= {"cpus": os.cpu_count(), "date": time.strftime("%F"), "ledger": ledger}
        with open(os.environ["LESSON_JSON"], "w") as file:
            json.dump(about, file, indent=1)
    code = int(verdicts["FAIL"] > 0 or verdicts["PASS"] == 0)
    if __name__ == "__main__":
        os._exit(code)  # threads of a group that something still holds can abort a plain exit
    sys.exit(code)


if __name__ == "__main__":
    main()
