"""Overlap: hide communication behind compute, and measure what is left
====================================================================

**Question.** While gradients travel, the next ones can be computed. How much of the communication
then costs no time at all, and how do you know?

**Predict.** Backward takes 1.3 times what its all-reduces take, in 12 buckets that leave as soon as
they are full. (1) What share of the communication is left to wait for at the end? (2) How many
buckets leave before the last gradient exists? (3) And (1), if the cores must copy the bytes, too?

**Run.** For the slow network that rank 0 makes: Linux, iproute2, and root or user namespaces.

    torchrun --standalone --nproc-per-node=4 05_overlap.py  # NCCL, if there are 4 GPUs
    python 05_overlap.py --figure timeline.png              # the same; else gloo

**You will have seen** (4 ranks on 2 cores, gloo, torch 2.15, 16 s; not run on GPUs) that 11 of 12
buckets leave early; that across a slow link, behind a sleep, 87 to 91% of the all-reduces are
hidden, as clock, trace and log agree; and -41 to 39% where the cores that compute also copy.

**Next.** communication/06_hierarchical_collectives.py
"""

import argparse
import ctypes
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import reduce
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NoReturn

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no warning that 10.0.0.1 has no name
os.environ["KINETO_LOG_LEVEL"] = "99"  # else the profiler tells when it starts and stops
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

WORLD_SIZES = range(2, 65)  # alone there is nothing to hide
FLAGS: dict[str, dict] = {"--figure": {"metavar": "PNG", "help": "draw the timeline"}}
D, LAYERS, PER_BUCKET = 128, 24, 2  # weights are D x D
BUCKETS, HOWS = LAYERS // PER_BUCKET, ("compute", "after", "overlap")
MBIT = 100  # Mbit/s of the slow network, both ways together


def main(options: argparse.Namespace) -> None:
    link = start_pair() if RANK == 0 else None  # it forks, so first of all
    device = setup()
    order_of_events(device)
    on_this_machine(device)
    across_the_link(link, options.figure)
    streams_and_events(device)
    finish()


# %% [markdown]
# ## 1. Handles, buckets, prefetch
#
# `dist.all_reduce(x, async_op=True)` returns a handle, a `Work`, at once; somebody else moves the
# bytes, a thread on gloo, a stream on NCCL. Leave x alone until `work.wait()`. In **backward** the
# last layer's gradients come first: when a bucket has all of its own, its all-reduce leaves, and
# all are waited for in the end. (The hook gets the *parameter*: leave it be.) In **forward** with
# sharded weights (FSDP), those of layer i + 1 are asked for before layer i computes. Here ranks
# compute only, or communicate when there is nothing else to do ("after"), or overlap. A log says
# what was done when; its order proves what a clock can only suggest.


# %%
class Case:
    """Layers, their shards and buckets. Backward sleeps a `nap` for each layer, forward half."""

    def __init__(self, rows: int, device, dtype=torch.float32, d: int = D, nap: float = 0) -> None:
        self.x, n, self.nap = batch(RANK, rows, d).to(device, dtype), dist.get_world_size(), nap
        blank, _ = torch.empty(d, d, device=device), torch.manual_seed(0)
        ready = [nn.init.orthogonal_(blank).to(dtype, copy=True) for _ in range(LAYERS)]
        self.full = [nn.functional.pad(weight.flatten(), (0, -d * d % n)) for weight in ready]
        self.shards = [full.chunk(n)[RANK].clone() for full in self.full]
        self.weights = [nn.Parameter(weight) for weight in ready]
        self.buckets = self.x.new_zeros(BUCKETS, PER_BUCKET, d, d)
        for i, weight in enumerate(self.weights):
            weight.grad = self.buckets[i // PER_BUCKET, i % PER_BUCKET]
            weight.register_post_accumulate_grad_hook(lambda _, i=i: self.has_gradient(i))

    def now(self) -> float:
        return time.perf_counter() - self.start

    def issue(self, i: int, collective: Callable, *tensors: torch.Tensor) -> None:
        self.issued.append(start := self.now())
        work, log = collective(*tensors, async_op=True), self.log
        if not self.x.is_cuda:  # where a future is done when the kernel is launched
            work = work.get_future().then(lambda _: log.append(("comm", i, start, self.now())))
        self.works.append(work)

    def has_gradient(self, i: int) -> None:
        time.sleep(self.nap)
        self.log.append(("compute", i // PER_BUCKET, self.mark, self.now()))
        if self.how == "overlap" and i % PER_BUCKET == 0:  # layers come last first
            self.issue(i // PER_BUCKET, dist.all_reduce, self.buckets[i // PER_BUCKET])
        self.mark = self.now()

    def backward(self) -> None:
        with record_function("compute"):
            self.loss.backward()
        for i in reversed(range(BUCKETS)) if self.how == "after" else ():
            self.issue(i, dist.all_reduce, self.buckets[i])

    def forward(self) -> None:
        y, d = self.x, self.x.shape[1]
        for i in range(LAYERS):
            ahead = [0, 1] if i == 0 else range(LAYERS)[i + 1 : i + 2]  # none after the last
            for k in {"compute": [], "after": [i], "overlap": ahead}[self.how]:
                self.issue(k // 2, dist.all_gather_into_tensor, self.full[k], self.shards[k])
            if self.works:
                self.works[i].wait()
            start = self.now()
            with record_function("compute"):
                self.y = y = y @ self.full[i][: d * d].view(d, d).T
                time.sleep(self.nap / 2)
            self.log.append(("compute", i // 2, start, self.now()))

    def run(self, step: str, how: str) -> float:
        """Do a "backward" or "forward" in one of HOWS; seconds, all ranks having begun together."""
        self.how, self.log, self.issued, self.works = how, [], [], []
        self.buckets.zero_()
        self.loss = reduce(lambda y, w: y @ w.T, self.weights, self.x).square().sum()
        settle = torch.cuda.synchronize if self.x.is_cuda else int
        settle()
        dist.barrier()
        self.start, self.mark = time.perf_counter(), 0.0
        with torch.set_grad_enabled(step == "backward"):
            getattr(self, step)()
        for work in self.works:
            work.wait()
        settle()
        return self.now()


def batch(rank: int, rows: int, d: int) -> torch.Tensor:
    return torch.randn(rows, d, generator=torch.Generator().manual_seed(rank))


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


def order_of_events(device: torch.device) -> None:
    case = Case(8, device, torch.float64)  # 1e-12: thousands of its roundings, of 1e-16
    weights = [weight.detach().clone().requires_grad_() for weight in case.weights]
    x = torch.cat([batch(rank, 8, D) for rank in range(WORLD_SIZE)]).to(case.x)
    y = reduce(lambda y, w: y @ w.T, weights, x)  # one process that has all batches
    y.square().sum().backward()
    due = torch.stack([weight.grad for weight in weights]).view_as(case.buckets)
    for how in HOWS[1:]:
        case.run("backward", how)
        last = max(end for kind, _, _, end in case.log if kind == "compute")
        early, ahead = sum(start < last for start in case.issued), how == "overlap"
        claim(f"{how}: buckets sent before the last gradient", ahead * (BUCKETS - 1), early)
        claim(f"{how}: gradients, from one process", 0, apart(case.buckets, due), atol=1e-12)
        for full in case.full:
            full.fill_(torch.nan)  # what no shard fills in shows
        case.run("forward", how)
        began = [start for kind, _, start, _ in case.log if kind == "compute"]
        early = sum(a < b for a, b in zip(case.issued[1:], began[:-1], strict=True))
        claim(f"{how}: layers asked for a layer ahead", ahead * (LAYERS - 1), early)
        off = apart(case.y, y.detach()[8 * RANK : 8 * RANK + 8])
        claim(f"{how}: activations, from one process", 0, off, atol=1e-12)


# %% [markdown]
# ## 2. What is exposed, three ways
#
# Communication is *exposed* as far as the step is longer for it, else *hidden*. Three ways to know:
# **the clock**, seconds less those of a run without communication; **the profiler**, time in the
# trace when a collective runs and nothing computes; **events**, the same in our own log (on GPUs,
# of `torch.cuda.Event`s). They agree unless both need the same: cores on a CPU, multiprocessors
# and memory bandwidth on a GPU. Then the last two find too little. Without GPUs the cores that
# compute also copy what is sent; this share is told, not judged.


# %%
def covered(spans: list[tuple[float, float]]) -> float:
    """Seconds that at least one of the spans covers."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def exposed(spans: list[tuple]) -> float:
    """Of spans (kind, ..., start, end): seconds when there is communication and no compute."""
    compute = [span[-2:] for span in spans if span[0] == "compute"]
    return covered([span[-2:] for span in spans]) - covered(compute)


def measure(case: Case, step: str) -> dict:
    """The best of three runs in each of HOWS, and what share of communication overlap hides."""
    best = dict.fromkeys(HOWS, (float("inf"),))  # other jobs can only delay a run
    for how in HOWS * 3:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            seconds = case.run(step, how)
        best[how] = min(best[how], (seconds, case.log, profiler), key=lambda run: run[0])
    kinds = {"compute", "gloo:all_reduce", "gloo:all_gather"}
    left = {"clock": [], "trace": [], "log": []}  # what is exposed, after and overlapped
    for run in (best["after"], best["overlap"]):
        events = [(e.name, e.time_range) for e in run[2].events() if e.name in kinds]
        left["clock"].append(run[0] - best["compute"][0])
        left["trace"].append(exposed([(name, t.start, t.end) for name, t in events]))
        left["log"].append(exposed(run[1]))
    hidden = {way: 1 - b / (a or float("nan")) for way, (a, b) in left.items()}
    seen = {"compute": best["compute"][0], "comm": left["clock"][0], "hidden": hidden}
    return seen | dict(zip(("overlap", "log"), best["overlap"], strict=False))


def on_this_machine(device: torch.device) -> None:
    gpu, text = device.type == "cuda", "GPUs: share of communication hidden"
    case = Case(16384, device, torch.bfloat16, 4096) if gpu else Case(256, device)
    seen = measure(case, "backward")
    hidden, comm = seen["hidden"]["clock"], seen["comm"] * 1e3
    say(f"\n  on this machine backward hides {hidden:.0%} of {comm:.0f} ms of all-reduces")
    claim(text, 0.9, hidden, ">=") if gpu else blocked(text, needs="2 GPUs")


# %% [markdown]
# ## 3. Across a slow link
#
# Where a network card moves the bytes, waiting costs no core. Two processes in a network of their
# own (a namespace, as 06 explains), whose loopback is slow, are such a case if no core computes
# either: here each layer *sleeps*. Then all but the last bucket can hide.

# %%
libc = ctypes.CDLL(None, use_errno=True)
NET, USER = 0x40000000, 0x10000000  # CLONE_NEWNET, CLONE_NEWUSER
NAP = 1.3 * 2 * 4 * D * D * 1514 / 1448 * 8 / MBIT / 1e6  # 1.3 x a layer's seconds, both ways


def slow_network() -> None:
    """Move this process into a network of its own; it goes when the last process in it ends."""
    me, us = os.geteuid(), os.getegid()  # who shall be root in there
    if libc.unshare(NET):
        if libc.unshare(USER | NET):
            raise OSError(f"unshare: {os.strerror(ctypes.get_errno())}")
        for name, row in ("setgroups", "deny"), ("uid_map", f"0 {me} 1"), ("gid_map", f"0 {us} 1"):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(row)
    lines = "ip link set lo mtu 1500 up; tc qdisc add dev lo root tbf latency 100ms burst 5kb rate "
    shell = subprocess.run(["sh", "-ec", f"{lines}{MBIT}mbit"], capture_output=True, text=True)
    if shell.returncode:
        raise OSError(shell.stderr.strip())


def start_pair() -> Connection:
    """Start two ranks in such a network; the pipe brings "" or why not, then what they saw."""
    near, far = Pipe()
    if os.fork() == 0:
        near.close()
        be_pair(far)
    far.close()
    return near


def be_pair(pipe: Connection) -> NoReturn:
    """Be rank 0 of the two, and fork the other; measure when told to, send what both have seen."""
    global RANK
    os.setsid()  # Ctrl-C is for the lesson, whose end ends us
    try:
        libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: be killed when the parent ends
        slow_network()
    except (OSError, AttributeError) as error:  # AttributeError: not Linux
        pipe.send(str(error))
        os._exit(0)
    pipe.send("")
    pipe.recv()  # fails if the parent ended before prctl
    meeting = socket.create_server(("127.0.0.1", 0))
    RANK = int(os.fork() == 0)
    libc.prctl(1, signal.SIGKILL)  # the child has to ask for itself
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    served = {} if RANK else {"is_master": True, "master_listen_fd": os.dup(meeting.fileno())}
    store = dist.TCPStore(*meeting.getsockname(), wait_for_workers=False, **served)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=2)
    case, seen = Case(8, torch.device("cpu"), nap=NAP), [None, None]
    dist.all_gather_object(seen, {step: measure(case, step) for step in ("backward", "forward")})
    if RANK == 0:
        pipe.send(seen)
        os.wait()
    os._exit(0)


def across_the_link(link: Connection | None, figure: str | None) -> None:
    told = [link.recv() if link else None]
    if told == [""]:
        link.send("go")
        told = [link.recv()]
    dist.broadcast_object_list(told)
    if isinstance(seen := told[0], str):
        say(f"{'':10}{seen:.90}")
        return blocked("overlap across a slow link", needs="root or user namespaces")
    for step in ("backward", "forward"):
        worst = min((rank[step] for rank in seen), key=lambda rank: rank["hidden"]["clock"])
        compute, comm, hidden = worst["compute"] * 1e3, worst["comm"] * 1e3, worst["hidden"]
        say(f"\n  {step} across the link: compute {compute:.0f} ms, communication {comm:.0f} ms")
        say("\n".join(timeline(rank, seen[rank][step]) for rank in range(2)))
        claim(f"{step}: share hidden, by the clock", 0.6, hidden["clock"], ">=")
        claim(f"{step}: by the trace, as by the clock", hidden["clock"], hidden["trace"], atol=0.2)
        claim(f"{step}: by the log, as by the clock", hidden["clock"], hidden["log"], atol=0.2)
    if figure and RANK == 0:
        draw(figure, seen)


def timeline(rank: int, seen: dict, width: int = 78) -> str:
    """Two rows of text, a letter for each bucket or pair of layers; dots where nothing happens."""
    rows, scale = {"compute": ["."] * width, "comm": ["."] * width}, width / seen["overlap"]
    for kind, i, start, end in seen["log"]:
        for column in range(round(start * scale), min(width, round(end * scale))):
            rows[kind][column] = chr(97 + i % 26)
    return "\n".join(f"  rank {rank} {kind:8}{''.join(row)}" for kind, row in rows.items())


def draw(path: str, seen: list[dict]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="tight")
    for axes, step in zip(figure.subplots(2), seen[0], strict=True):
        for r in range(2):
            for kind, i, start, end in sorted(seen[r][step]["log"], reverse=True):
                axes.barh(f"rank {r}, {kind}", end - start, left=start, color=f"C{i % 10}")
        axes.invert_yaxis()
        axes.set(title=f"{step}, a colour for each bucket", xlabel="s")
    figure.savefig(path, dpi=120)


# %% [markdown]
# ## 4. GPUs: streams, events, priority, connections
#
# A CUDA *stream* is a queue: kernels of one run in order, those of two may overlap. NCCL has its
# own; an all-reduce first makes it wait for an *event*, recorded on the compute stream when the
# gradient is there; `work.wait()` makes the compute stream wait for NCCL's, not the CPU.
# **Priority.** A matrix product fills all multiprocessors; NCCL's kernel needs a few, and on a
# stream of equal priority may queue behind it. TORCH_NCCL_HIGH_PRIORITY=1 lets it go first.
# **CUDA_DEVICE_MAX_CONNECTIONS** (8): hardware queues that streams share. With 1, kernels start in
# the order of launch, whatever their streams: Megatron sets it, so that a collective starts before
# the matrix product launched after it. With FSDP a prefetch would wait behind all compute.
#
# Below, the NCCL stream's part is played by a copy from the host. It is enqueued last both times:
# if its stream waits for the event, it ends after the products; if not, long before them.


# %%
def streams_and_events(device: torch.device) -> None:
    say()
    if device.type != "cuda":
        return blocked("a stream that waits for an event, one that does not", needs="1 GPU")
    host, x = torch.empty(1 << 26, pin_memory=True), torch.randn(8192, 8192, device=device)
    side = torch.cuda.Stream(priority=-1)  # before others, where both have something to do
    begun, products, copied = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    for waits, sign in ((True, ">="), (False, "<=")):
        torch.cuda.synchronize()
        begun.record()
        for _ in range(8):
            x @ x  # 1.1 TFLOP
        products.record()
        if waits:
            side.wait_event(products)
        with torch.cuda.stream(side):
            host.to(device, non_blocking=True)  # 0.27 GB
            copied.record()
        torch.cuda.synchronize()
        end = begun.elapsed_time(copied) / begun.elapsed_time(products)
        claim(f"copy's end / the products', waiting={waits}", 1, end, sign)


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
