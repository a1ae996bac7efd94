"""Where did the time go? Traces of all ranks, an illness named, its cure predicted
==============================================================================

**Question.** A step takes 150 ms and should take 80: is it the loader, the network, one slow rank,
or your own code? What does the trace of one rank show, and what only the traces of all?

**Predict.** Look at ILLNESSES below. Write down for each by how much it will lengthen a step of 75
ms, and in which ranks' traces you expect to see it.

**Run.**

    torchrun --standalone --nproc-per-node=4 01_distributed_profiling.py   # NCCL, if 4 GPUs
    python 01_distributed_profiling.py                                     # the same; else gloo

**You will have seen** (4 ranks on 2 cores, gloo, torch 2.15, 14 s) that the trace accounts for the
clock to 1%; that each of six planted illnesses is named from the traces, and none in a healthy run;
that a straggler shows as 80 ms of "network" on every rank but the one that causes it; and that
taking an illness's share away foretells the cured step to 20%. Not run on several GPUs.

**Next.** profiling/02_one_trace_for_all_ranks.py
"""

import argparse
import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, record_function, schedule

WORLD_SIZES = range(2, 65)  # one rank has nobody to wait for
FLAGS: dict[str, dict] = {
    "--figure": {"metavar": "PATH", "help": "save where each case's step goes as a PNG"},
}


def main(options: argparse.Namespace) -> None:
    device = setup()
    os.environ["KINETO_LOG_LEVEL"] = "99"  # else the profiler tells when it starts and stops
    cases = {name: run(ills, device) for name, ills in ILLNESSES.items()}
    the_clock_agrees(cases)
    the_illness_is_named(cases)
    the_cure_is_predicted(cases)
    if options.figure and RANK == 0:
        draw(cases, options.figure)
    finish()


# %% [markdown]
# ## 1. A training loop with illnesses to switch on
#
# Four layers under DDP, a bucket each. A layer's compute is a labelled *sleep*, so that it takes
# the same time on two cores as on a hundred and leaves them to the communication; on a GPU it is a
# kernel that spins as long. Everything else is real: autograd, DDP's hooks, all-reduces, the trace.


# %%
@dataclass
class Ills:
    loader: float = 0.0  # ms that the loop waits for its next batch
    layer: float = 6.0  # ms of forward compute in one layer; backward takes twice that
    slow: float = 1.0  # the last rank's compute takes so many times as long
    buckets: float = 0.2  # MB a bucket: a layer's gradients, or less
    overlap: bool = True  # all-reduce while backward goes on, or after it
    syncs: bool = False  # a barrier behind every layer, "to be safe"


HEALTHY, LAYERS, TENSORS, NUMBERS = Ills(), 4, 8, 6_000  # 8 tensors of 6,000 numbers in each layer
ILLNESSES = {
    "healthy": HEALTHY,
    "slow loader": replace(HEALTHY, loader=60),
    "straggler": replace(HEALTHY, slow=2),
    "needless syncs": replace(HEALTHY, syncs=True),
    "tiny buckets": replace(HEALTHY, buckets=0.001),
    "no overlap": replace(HEALTHY, overlap=False),
    "small batch": replace(HEALTHY, layer=HEALTHY.layer / 16),  # 1/16 of the batch
}


def compute(ms: float, device: torch.device) -> None:
    with record_function("compute"):
        if device.type == "cuda":
            torch.cuda._sleep(int(ms * 1.5e6))  # cycles, at about 1.5 GHz
        else:
            time.sleep(ms / 1e3)


class Work(torch.autograd.Function):
    """Passes x on; costs `ms` forward and twice that backward, like a layer's two matmuls."""

    @staticmethod
    def forward(ctx, x: Tensor, ms: float, syncs: bool, *parameters: Tensor) -> Tensor:
        ctx.ms, ctx.syncs, ctx.shapes = ms, syncs, [p.shape for p in parameters]
        compute(ms, x.device)
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        compute(2 * ctx.ms, grad.device)
        if ctx.syncs:
            dist.barrier()
        return grad, None, None, *(grad.mean().expand(shape).clone() for shape in ctx.shapes)


class Layer(nn.Module):
    def __init__(self, ms: float, syncs: bool) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(NUMBERS) for _ in range(TENSORS))
        self.ms, self.syncs = ms, syncs

    def forward(self, x: Tensor) -> Tensor:
        return Work.apply(x, self.ms, self.syncs, *self.weights)


def step(model: DistributedDataParallel, ills: Ills, device: torch.device) -> None:
    """One training step: load, forward, backward, all-reduce."""
    with record_function("loader"):
        time.sleep(ills.loader / 1e3)
    x = torch.ones(8, device=device, requires_grad=True)
    with contextlib.nullcontext() if ills.overlap else model.no_sync():
        model(x).sum().backward()
    if not ills.overlap:
        flat = torch.cat([p.grad.flatten() for p in model.parameters()]) / WORLD_SIZE
        dist.all_reduce(flat)
    model.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize()


# %% [markdown]
# ## 2. Recording
#
# The profiler is not always on: a *schedule* skips a step, warms up (DDP rebuilds its buckets
# then), and records a few. Each rank writes its own trace; here all are read back and compared. A
# wall clock of our own runs beside it: a trace that lost events looks as tidy as a whole one.

# %%
ACTIVE = 5  # steps recorded


@dataclass
class Case:
    """What all ranks' traces say of one case. Times in ms, of the shortest step: noise adds."""

    wall: float  # by this rank's own clock
    mine: dict[str, float]  # this rank's compute, exposed communication, loader, idle
    split: dict[str, float]  # the same of the rank whose step took longest
    compute: list[float]  # of each rank
    hidden: float  # share of its communication that compute covers; the worst rank's
    early: float  # share of its all-reduces that start before its compute ends; the best rank's
    message: float  # bytes, mean of the all-reduces
    syncs: float  # barriers and device synchronisations inside a step

    @property
    def total(self) -> float:
        return sum(self.split.values())


def traced(ills: Ills, device: torch.device) -> tuple[list[dict], list[float]]:
    """Train under the profiler; return the trace's events, and the wall clock's ms a step."""
    ms = ills.layer * (ills.slow if RANK == WORLD_SIZE - 1 else 1)
    layers = nn.Sequential(*(Layer(ms, ills.syncs) for _ in range(LAYERS))).to(device)
    ids = [device.index] if device.type == "cuda" else None
    model = DistributedDataParallel(layers, device_ids=ids, bucket_cap_mb=ills.buckets)
    plan, walls = schedule(wait=1, warmup=1, active=ACTIVE, repeat=1), []
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        save = partial(profile.export_chrome_trace, path=file.name)
        with profile(schedule=plan, on_trace_ready=save) as profiler:  # CPU, and CUDA if there
            for _ in range(2 + ACTIVE):
                dist.barrier()
                started = time.perf_counter()
                with record_function("step"):
                    step(model, ills, device)
                walls.append(1e3 * (time.perf_counter() - started))
                profiler.step()
        return json.load(open(file.name))["traceEvents"], walls[2:]


# %% [markdown]
# ## 3. From spans to a sum
#
# A step is cut by interval arithmetic: *compute* is what compute spans cover; *exposed* is what
# communication covers and compute does not; then the loader; *idle* is what nothing covers. Only
# exposed communication costs time, which is why a total of "all-reduce ms" says so little.

# %%
Spans = list[tuple[float, float]]


def union(spans: Spans) -> Spans:
    """The same points, as disjoint spans in order."""
    joined: Spans = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        elif end > start:
            joined.append((start, end))
    return joined


def length(spans: Spans) -> float:
    return sum(end - start for start, end in union(spans))


def within(spans: Spans, window: tuple[float, float]) -> Spans:
    """The parts of the spans that lie in the window."""
    clipped = [(max(start, window[0]), min(end, window[1])) for start, end in spans]
    return [(start, end) for start, end in clipped if end > start]


def spans_of(events: list[dict], *names: str) -> Spans:
    """(start, end) in ms of the complete events whose name begins with one of these."""
    found = [e for e in events if e.get("ph") == "X" and e.get("name", "").startswith(names)]
    return [(e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3) for e in found]


def split(events: list[dict], window: tuple[float, float]) -> tuple[dict[str, float], float]:
    """ms of each kind in one step, and the share of its communication that compute covers."""
    gpu = [e for e in events if e.get("cat") == "kernel"]  # there: the kernels; else: the spans
    busy = spans_of([e for e in gpu if "nccl" not in e["name"]], "") or spans_of(events, "compute")
    wire = spans_of(gpu, "nccl") or spans_of(events, "gloo:all_reduce", "gloo:barrier")
    c, w, l = (within(x, window) for x in (busy, wire, spans_of(events, "loader")))  # noqa: E741
    covered = [0.0, length(c), length(c + w), length(c + w + l), window[1] - window[0]]
    kinds = ("compute", "exposed", "loader", "idle")
    ms = {kind: covered[i + 1] - covered[i] for i, kind in enumerate(kinds)}
    return ms, 1 - ms["exposed"] / length(w) if w else 1.0


def run(ills: Ills, device: torch.device) -> Case:
    """Record one case and bring together what all ranks saw."""
    slow = max(1, WORLD_SIZE / 4) ** 2 if device.type == "cpu" else 1  # many ranks on few cores:
    ills = replace(ills, layer=slow * ills.layer, loader=slow * ills.loader)  # gloo needs time
    events, walls = traced(ills, device)
    steps = sorted(spans_of(events, "step"))
    best = min(range(ACTIVE), key=lambda i: steps[i][1] - steps[i][0])
    mine, hidden = split(events, steps[best])
    calls = [(c, s) for s in steps for c in within(spans_of(events, "c10d::allreduce_"), s)]
    ends = {s: max(end for _, end in within(spans_of(events, "compute"), s)) for s in steps}
    early = sum(c[0] < ends[s] for c, s in calls) / len(calls)
    waits = spans_of(events, "gloo:barrier", "cudaDeviceSynchronize", "cudaStreamSynchronize")
    syncs = len([w for s in steps for w in within(waits, s)]) / ACTIVE
    message = 4 * LAYERS * TENSORS * NUMBERS * ACTIVE / len(calls)
    everyone: list = [None] * WORLD_SIZE
    dist.all_gather_object(everyone, (mine, hidden, early))
    splits, shares, earlies = zip(*everyone, strict=True)
    slowest = max(splits, key=lambda ms: sum(ms.values()))
    computes = [ms["compute"] for ms in splits]
    return Case(walls[best], mine, slowest, computes, min(shares), max(earlies), message, syncs)


def the_clock_agrees(cases: dict[str, Case]) -> None:
    say(f"\n{'':10}ms a step{'':10}compute  exposed  loader   idle     hidden  bytes a message")
    for name, case in cases.items():
        row = "".join(f"{ms:9.1f}" for ms in case.split.values())
        say(f"{'':10}{name:16}{row}  {case.hidden:8.0%}  {case.message:12,.0f}")
    for name, case in cases.items():
        total = sum(case.mine.values())
        claim(f"{name}: the trace's sum, ms by the clock", case.wall, total, rtol=0.05)


# %% [markdown]
# ## 4. Naming the illness
#
# From the surest sign to the least. One rank's trace is not enough: in a straggler's job the others
# seem to have a slow network, and only the straggler itself looks busy. A message is tiny if its
# latency costs more than its bytes (fundamentals/03_latency_and_bandwidth.py fits where that is).


# %%
def diagnose(case: Case) -> str:
    """The illness that the traces show; "healthy" if none."""
    if case.split["loader"] > 0.2 * case.total:
        return "slow loader"
    if max(case.compute) - min(case.compute) > 0.25 * case.total:
        return "straggler"
    if case.syncs >= 2:
        return "needless syncs"
    if case.message < 50_000:
        return "tiny buckets"
    if case.early == 0:
        return "no overlap"
    if case.split["compute"] < 0.75 * case.total:
        return "small batch"
    return "healthy"


def the_illness_is_named(cases: dict[str, Case]) -> None:
    for name, case in cases.items():
        said = diagnose(case)
        claim(f"{name}: named" + (f", but as {said}" if said != name else ""), True, said == name)


# %% [markdown]
# ## 5. What a cure will give
#
# Amdahl: a cure can take away no more than the time its illness shows in the trace. So the step
# will be what is left, if nothing else comes to light behind it. The cured job is the healthy one.
# A small batch is cured by one 16 times as large, behind whose compute the network hides.


# %%
def cured(name: str, case: Case) -> float:
    """Predicted ms a step, from the ill job's own trace."""
    if name == "small batch":
        return case.total + 15 * case.split["compute"] - case.split["exposed"]
    if name == "straggler":
        return case.total - (max(case.compute) - min(case.compute))
    return case.total - case.split["loader" if name == "slow loader" else "exposed"]


def the_cure_is_predicted(cases: dict[str, Case]) -> None:
    healthy = cases["healthy"].total
    for name, case in cases.items():
        if name != "healthy":  # 30%: sleeps and threads on a busy machine vary by so much
            claim(f"{name}: ms a step when cured", cured(name, case), healthy, rtol=0.3)


def draw(cases: dict[str, Case], path: str) -> None:
    from matplotlib.figure import Figure

    axes = (figure := Figure((10, 4), layout="constrained")).subplots()
    colours = {"compute": "C2", "exposed": "C3", "loader": "C1", "idle": "0.8"}
    names, left = list(cases)[::-1], [0.0] * len(cases)
    for kind, colour in colours.items():
        widths = [cases[name].split[kind] for name in names]
        axes.barh(names, widths, left=left, color=colour, label=kind)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    ill = names[1:-1]  # neither the small batch nor the healthy run
    axes.plot([cured(n, cases[n]) for n in ill], ill, "k|", markersize=22, label="predicted cured")
    axes.axvline(cases["healthy"].total, color="k", linewidth=0.7, linestyle=":")
    axes.set_xlabel(f"ms a step on the slowest of {WORLD_SIZE} ranks; dotted: the healthy step")
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=150)


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
