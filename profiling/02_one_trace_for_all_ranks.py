"""One trace for all ranks: Perfetto, NVTX ranges and Nsight Systems
=================================================================

**Question.** Each rank writes a trace of its own. How do you see all of them on one time axis, can
you trust that axis, and how do your ranges get into Nsight Systems?

**Predict.** Before you run this: two ranks meet in a barrier. In one picture of both, which must be
true of the two spans of that barrier, whoever comes first? What would a clock that is 0.5 s late on
one of them do to it?

**Run.**

    torchrun --standalone --nproc-per-node=4 02_one_trace_for_all_ranks.py  # NCCL, if 4 GPUs
    python 02_one_trace_for_all_ranks.py                                    # the same; else gloo
    python 02_one_trace_for_all_ranks.py --trace all.json   # then open it in ui.perfetto.dev

**You will have seen** (4 ranks on 2 cores, gloo, torch 2.15, 6 s) that 4 traces of some 860 events
become one file and lose none; that every barrier's spans share a moment, so that this host's clocks
are 0 us apart; and that clocks set 0.5 s apart are found so from the barriers alone. Not run on
several GPUs, nor with nsys.

**Next.** exercises/13_profile_all_reduce; then data-loading/01_ffcv_distributed_optimization.py:
where the batches come from.
"""

import argparse
import contextlib
import ctypes
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, record_function, schedule

with contextlib.suppress(ImportError):  # pip install -e '.[profiling]'
    import nvtx

WORLD_SIZES = range(2, 65)  # of one rank there is nothing to merge
FLAGS: dict[str, dict] = {
    "--trace": {"metavar": "PATH", "help": "save the traces of all ranks as one Perfetto file"},
}


def main(options: argparse.Namespace) -> None:
    device = setup()
    os.environ["KINETO_LOG_LEVEL"] = "99"  # else the profiler tells when it starts and stops
    traces = gather(record_steps(device))
    merged = merge(traces) if RANK == 0 else []
    nothing_is_lost(traces, merged)
    the_clocks_agree(merged, device)
    if options.trace and RANK == 0:
        with open(options.trace, "w") as file:
            json.dump({"traceEvents": merged}, file)
    nsight_systems()
    finish()


# %% [markdown]
# ## 1. One range, two profilers
#
# `record_function` names a stretch of code in torch's trace; `nvtx.annotate` names it for Nsight
# Systems, at no cost when nobody listens. One helper says both, so the two never drift apart. The
# profiler's *schedule* skips a step, warms up on one (DDP rebuilds its buckets then), records
# three.

# %%
ACTIVE = 3  # steps recorded


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """A range in torch's trace, and in Nsight Systems' where the nvtx package is installed."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(record_function(name))
        if "nvtx" in globals():
            stack.enter_context(nvtx.annotate(name))
        yield


def record_steps(device: torch.device) -> dict:
    """Train a small DDP model; return this rank's trace as the profiler wrote it."""
    layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to(device)
    ids = [device.index] if device.type == "cuda" else None
    model = DistributedDataParallel(layers, device_ids=ids, bucket_cap_mb=0.5)
    x_BD, plan = torch.ones(16, 256, device=device), schedule(wait=1, warmup=1, active=ACTIVE)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        save = partial(profile.export_chrome_trace, path=file.name)
        with profile(schedule=plan, on_trace_ready=save) as profiler:  # CPU, and CUDA if there
            for _ in range(2 + ACTIVE):
                with span("step"):
                    with span("forward"):
                        loss = model(x_BD).square().mean()
                    with span("backward"):
                        loss.backward()
                    dist.barrier()
                profiler.step()
        return json.load(open(file.name))


# %% [markdown]
# ## 2. One file, one time axis
#
# In each trace `pid` is a process number, meaningless to a reader, and `ts` counts microseconds
# from the trace's own `baseTimeNanoseconds`. So `pid` becomes the rank, every `ts` moves by the
# distance between the bases, and a metadata event names the row. torch already writes `rank` and
# `backend` into the file (`distributedInfo`), from which a file found lying about can be placed.


# %%
def gather(trace: dict) -> list[dict]:
    """All ranks' traces, in order, on rank 0; elsewhere nothing."""
    traces: list = [None] * WORLD_SIZE if RANK == 0 else None
    dist.gather_object(trace, traces)
    return traces or []


def merge(traces: list[dict]) -> list[dict]:
    """One list of events: `pid` is the rank, `ts` in us since the earliest trace's base."""
    zero, merged = min(trace["baseTimeNanoseconds"] for trace in traces), []
    for rank, trace in enumerate(traces):
        late = (trace["baseTimeNanoseconds"] - zero) / 1e3
        for key, value in (
            ("process_name", {"name": f"rank {rank}"}),
            (
                "process_sort_index",
                {"sort_index": rank},
            ),
        ):
            merged.append({"ph": "M", "name": key, "pid": rank, "args": value})
        complete = (event for event in trace["traceEvents"] if event.get("ph") == "X")
        merged += [event | {"pid": rank, "ts": event["ts"] + late} for event in complete]
    return merged


def nothing_is_lost(traces: list[dict], merged: list[dict]) -> None:
    def events(trace: dict) -> list[dict]:
        return [event for event in trace["traceEvents"] if event.get("ph") == "X"]

    before, after = sum(map(len, map(events, traces))), sum(e["ph"] == "X" for e in merged)
    claim("events of all traces that are in the merged one", before, after)
    steps = [sum(e["name"] == "step" and e["pid"] == r for e in merged) for r in range(WORLD_SIZE)]
    claim("steps of the rank that has fewest", ACTIVE, min(steps) if RANK == 0 else ACTIVE)
    placed = [trace["distributedInfo"]["rank"] == rank for rank, trace in enumerate(traces)]
    claim("traces that know their rank", WORLD_SIZE, sum(placed) if RANK == 0 else WORLD_SIZE)


# %% [markdown]
# ## 3. Can the axis be trusted?
#
# One machine has one clock. Two machines' clocks differ by microseconds (PTP) to milliseconds
# (NTP), and a merged picture then shows effects before causes. A barrier is the test: no rank
# leaves before every rank has come, so the spans of one barrier must share a moment, on any number
# of machines. By how much they fail to is how far the clocks are apart, and what to shift them by.


# %%
def barriers(merged: list[dict]) -> list[list[tuple[float, float]]]:
    """For each barrier in turn, the span (start, end) in us that each rank spent in it."""
    ranks: dict[int, list] = {}
    for event in merged:
        if event["name"] == "gloo:barrier":
            ranks.setdefault(event["pid"], []).append((event["ts"], event["ts"] + event["dur"]))
    return list(zip(*map(sorted, ranks.values()), strict=True))


def apart(rounds: list[list[tuple[float, float]]]) -> float:
    """us by which the clocks must be apart: 0 if each barrier's spans share a moment."""
    return max(max(0.0, max(s for s, _ in spans) - min(e for _, e in spans)) for spans in rounds)


def the_clocks_agree(merged: list[dict], device: torch.device) -> None:
    if device.type == "cuda":
        return blocked("barriers as a test of clocks: gloo names its spans", needs="ranks on CPU")
    found, off, shifted = ACTIVE, 0.0, 500.0
    if RANK == 0:
        found, off = len(barriers(merged)), apart(barriers(merged))
        late = [e | {"ts": e["ts"] + 5e5} if e["ph"] == "X" and e["pid"] else e for e in merged]
        shifted = apart(barriers(late)) / 1e3
    claim("barriers found in every rank's trace", ACTIVE, found)
    claim("us by which this host's clocks are apart", 0, off)
    # Seen through spans as wide as the longest wait in a barrier, so a little less than planted.
    claim("ms found, all clocks but rank 0's 0.5 s late", 500, shifted, rtol=0.1)


# %% [markdown]
# ## 4. Nsight Systems
#
# torch's profiler sees what torch does. Nsight Systems sees the machine: CUDA, NVTX ranges (ours,
# and NCCL's own), threads, network. One report for a node, one for each of several (`%q{}` takes a
# variable from the environment), then sums by range and by kernel:
#
#     nsys profile -t cuda,nvtx,osrt -o step torchrun --standalone --nproc-per-node=8 train.py
#     nsys profile -t cuda,nvtx,osrt -o step_%q{SLURM_NODEID} torchrun --nnodes=2 ... train.py
#     nsys stats -r nvtx_pushpop_sum,cuda_gpu_kern_sum step.nsys-rep


# %%
def nsight_systems() -> None:
    if shutil.which("nsys") is None or "nvtx" not in globals():
        return blocked(
            "our range in a report of Nsight Systems", needs="nsys, and the nvtx package"
        )
    found, code = 1, "import nvtx\nwith nvtx.annotate('our range'): pass"
    if RANK == 0:
        with tempfile.TemporaryDirectory() as folder:
            report = f"{folder}/report.nsys-rep"
            record = ["nsys", "profile", "-t", "nvtx", "-o", report, sys.executable, "-c", code]
            subprocess.run(record, check=True, capture_output=True, timeout=60)
            stats = ["nsys", "stats", "-r", "nvtx_pushpop_sum", report]
            told = subprocess.run(stats, capture_output=True, text=True, timeout=60).stdout
            found = told.count("our range")
    claim("our range in a report of Nsight Systems", 1, found)


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
