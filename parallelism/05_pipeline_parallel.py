"""Pipeline parallelism: a model cut between its layers, a batch cut into micro-batches
====================================================================================

**Question.** Each rank holds some of the layers and waits for its neighbours. In which order should
it work through the micro-batches, how long does it idle, and how many activations must it hold?

**Predict.** Four stages, eight micro-batches, a backward pass twice as long as a forward. What
share of the time does a stage idle without micro-batches, under GPipe, under 1F1B? (Two of the
three are the same.) How many micro-batches' activations does the first stage hold under each?

**Run.**

    torchrun --standalone --nproc-per-node=4 05_pipeline_parallel.py   # NCCL, if there are 4 GPUs
    python 05_pipeline_parallel.py --figure gantt.png                  # the same; else gloo

**You will have seen** (4 ranks on 2 cores, gloo, torch 2.15, 16 s; never run on several GPUs) 75%
of all slots idle without micro-batches, 27.3% under GPipe, 27.3% under 1F1B, exactly as predicted;
on the clock 75%, 34% and 33%. GPipe's first stage holds 8 micro-batches, 1F1B's 4.

**Next.** exercises/11_pipeline_micro_batches; then parallelism/06_3d_parallelism.py
"""

import argparse
import contextlib
import copy
import ctypes
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from fractions import Fraction
from itertools import pairwise, product
from typing import NoReturn
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

WORLD_SIZES = range(1, 9)  # a stage a rank, a layer a stage at least
FLAGS: dict[str, dict] = {  # flag -> keyword arguments of argparse's add_argument
    "--figure": {"metavar": "PATH", "help": "draw the schedules, predicted and run, to this file"}
}
LAYERS, D, M, ROWS = 8, 32, 8, 4  # M micro-batches of ROWS examples, D numbers each
# Distances are relative to the largest number. Sums of 32 terms, there and back, are reordered.
ROUNDING = 2 * (LAYERS + 1) * 32 * 2**-53


def main(options: argparse.Namespace) -> None:
    device = setup()
    all_bubbles()
    case, p = Case(device), WORLD_SIZE
    lists = {"no micro-batches": (gpipe, 1), "GPipe": (gpipe, M), "1F1B": (one_f_one_b, M)}
    schedules = {name: [order(s, p, m) for s in range(p)] for name, (order, m) in lists.items()}
    for name, schedule in schedules.items():
        slot_by_slot(name, schedule, case)
    refused(case)
    torch_pipelines(case)
    on_the_clock(schedules, case, options.figure)
    finish()


# %% [markdown]
# ## 1. A schedule is a list
#
# A stage runs F(k), the forward pass of micro-batch k, and B(k), its backward pass, in some order.
# *Without micro-batches* (naive model parallelism) there is one of each: one stage works at a time.
# *GPipe* (Huang et al., 2019) does all forwards, then all backwards. *1F1B* (Narayanan et al.,
# 2019) runs ahead only by what fills the pipeline, p-1-s forwards on stage s, then alternates: as
# idle, but activations are freed early. (Interleaved, v chunks a rank: idle (p-1)/(vm) of work.)

# %%
Action = tuple[str, int]  # ("F" or "B", micro-batch)
COST = {"F": 1, "B": 2}  # slots: backward does twice the work, for inputs and for weights
SLOT = 0.015  # seconds, in section 4


def gpipe(stage: int, p: int, m: int) -> list[Action]:
    return [("F", k) for k in range(m)] + [("B", k) for k in range(m)]


def one_f_one_b(stage: int, p: int, m: int) -> list[Action]:
    ahead = min(p - 1 - stage, m)
    steady = [(kind, k + ahead * (kind == "F")) for k in range(m - ahead) for kind in "FB"]
    return [("F", k) for k in range(ahead)] + steady + [("B", k) for k in range(m - ahead, m)]


def messages(stage: int, p: int, done: Action | None, todo: Action | None) -> list[tuple]:
    """What `stage` exchanges between two actions: (dist.isend or irecv, peer, action it is for)."""
    ends = (dist.isend, done, 1), (dist.irecv, todo, -1)
    found = [(verb, stage + (way if a[0] == "F" else -way), a) for verb, a, way in ends if a]
    return [message for message in found if 0 <= message[1] < p]


# %% [markdown]
# ## 2. Play it before you run it
#
# The lists alone decide who waits for whom. Between two actions a stage sends what the first made
# and receives what the second needs, posted together: in 1F1B's steady state neighbours have
# something for each other, and if both sent first, with sends that wait for their receiver as
# NCCL's do, neither would finish. Here a message passes once both sides have posted it. Through p
# stages, m micro-batches take m+p-1 times F and B; a stage works m of them, idles (p-1)/(m+p-1).


# %%
def simulate(schedule: Sequence[list[Action]]) -> list[dict[Action, int]]:
    """The slot in which each stage starts each action; ValueError if the stages cannot finish."""
    p, starts, clock = len(schedule), [{} for _ in schedule], [0] * len(schedule)
    todo = [[*actions, None] for actions in schedule]
    posted = [messages(s, p, None, actions[0]) for s, actions in enumerate(todo)]
    moved = True
    while moved:
        moved = False
        for s in range(p):
            for verb, peer, action in posted[s][:]:
                if verb is dist.isend and (dist.irecv, s, action) in posted[peer]:
                    posted[s].remove((verb, peer, action))
                    posted[peer].remove((dist.irecv, s, action))
                    clock[peer] = max(clock[peer], clock[s])  # nothing starts before its cause
                    moved = True
            action = todo[s][0]
            able = action and (action[0] == "F" or ("F", action[1]) in starts[s])
            if able and not posted[s]:
                starts[s][todo[s].pop(0)] = clock[s]
                clock[s] += COST[action[0]]
                posted[s] = messages(s, p, action, todo[s][0])
                moved = True
    if stuck := [f"stage {s} before {todo[s][0]}" for s in range(p) if todo[s][0] or posted[s]]:
        wait = f"they wait for ever: {', '.join(stuck)}"
        raise ValueError(f"every stage must be able to finish its list, but {wait}; reorder them")
    return starts


def idle_share(starts: list[dict[Action, int]]) -> Fraction:
    end = max(slot + COST[kind] for each in starts for (kind, _), slot in each.items())
    busy = sum(COST[kind] for each in starts for kind, _ in each)
    return 1 - Fraction(busy, end * len(starts))


def all_bubbles() -> None:
    wrong = 0
    for order, p, m in product((gpipe, one_f_one_b), range(1, 9), range(1, 9)):
        idle = idle_share(simulate([order(s, p, m) for s in range(p)]))
        wrong += idle != Fraction(p - 1, m + p - 1)
    claim("bubbles unlike (p-1)/(m+p-1), of 128 simulated", 0, wrong)


# %% [markdown]
# ## 3. Run it
#
# A stage keeps each micro-batch's input and output until its backward pass, which starts from the
# gradient that arrives and leaves one to send on. To count slots in the run itself, each message
# takes along its sender's logical clock (Lamport, 1978). PyTorch's torch.distributed.pipelining
# must find the same gradients; it also has interleaved and zero-bubble schedules.
#
# Two good schedules make a bad one. Let the last stage follow GPipe and the others 1F1B: it waits
# for the last micro-batch, which the first stage will send once it has the first one's gradient. On
# GPUs that is a hang without a message; here it is refused before it runs.


# %%
def pipeline(stage: nn.Module, schedule: list[list[Action]], work: Callable = id) -> Callable:
    """This rank's `step(inputs, loss_of)`; `work(action)` is called before each action.

    inputs: stage 0's micro-batches, elsewhere tensors like those that will arrive; loss_of(y, k):
    the k-th one's loss, from the last stage's output. `step` returns how many it held at most.
    """
    simulate(schedule)  # a schedule that would deadlock ends here, on every rank alike
    last = len(schedule) - 1

    def step(inputs: Sequence[torch.Tensor], loss_of: Callable) -> int:
        held, most, leaving = {}, 0, None
        for done, todo in pairwise([None, *schedule[RANK], None]):
            sides = {dist.isend: leaving, dist.irecv: (arrived := torch.empty_like(inputs[0]))}
            posts = messages(RANK, len(schedule), done, todo)
            ops = [dist.P2POp(verb, sides[verb], peer) for verb, peer, _ in posts]
            for handle in dist.batch_isend_irecv(ops) if ops else []:
                handle.wait()
            kind, k = todo or (None, None)
            work(todo) if todo else None
            if kind == "F":
                x = inputs[k] if RANK == 0 else arrived.requires_grad_()
                y = stage(x) if last > RANK else loss_of(stage(x), k) / len(inputs)
                held[k], leaving = (x, y), y.detach().contiguous()
                most = max(most, len(held))
            elif kind == "B":
                x, y = held.pop(k)
                y.backward(arrived if last > RANK else None)
                leaving = x.grad  # None on stage 0, unless its inputs want gradients
        return most

    return step


@contextlib.contextmanager
def logical_clock() -> Iterator[tuple[Callable, dict[Action, int]]]:
    """`work` for a pipeline, and the slots in which this rank's actions then start."""
    real, now, starts = dist.batch_isend_irecv, [0], {}

    def stamped(posts: list[dist.P2POp]) -> list:
        stamps = [torch.tensor([now[0]], device=post.tensor.device) for post in posts]
        extra = [dist.P2POp(post.op, s, post.peer) for post, s in zip(posts, stamps, strict=True)]
        for handle in real([op for pair in zip(posts, extra, strict=True) for op in pair]):
            handle.wait()
        now[0] = max(now[0], *map(int, stamps))
        return []

    def work(action: Action) -> None:
        starts[action] = now[0]
        now[0] += COST[action[0]]

    with mock.patch.object(dist, "batch_isend_irecv", stamped):
        yield work, starts


class Case:
    """A model, a batch, and the gradients that one process finds."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)  # the same on every rank
        kind = {"device": device, "dtype": torch.float64}
        layers = [nn.Sequential(nn.Linear(D, D, **kind), nn.Tanh()) for _ in range(LAYERS)]
        self.x, self.due = torch.randn(2, M * ROWS, D, **kind)
        F.mse_loss(nn.Sequential(*layers)(self.x.requires_grad_()), self.due).backward()
        first, end = (r * LAYERS // WORLD_SIZE for r in (RANK, RANK + 1))
        self.oracle = nn.Sequential(*layers[first:end])

    def stage(self) -> nn.Module:
        stage = copy.deepcopy(self.oracle)
        stage.zero_grad()
        return stage

    def batch(self, m: int) -> tuple:  # micro-batches, the loss of the k-th
        inputs = [x.requires_grad_() for x in self.x.detach().chunk(m)]
        return inputs, lambda y, k: F.mse_loss(y, self.due.chunk(m)[k])

    def distance(self, stage: nn.Module, inputs: Sequence[torch.Tensor] = ()) -> float:
        """How far gradients are from one process's: weights, biases, and rank 0's inputs."""
        both = zip(stage.parameters(), self.oracle.parameters(), strict=True)
        pairs = [(ours.grad, due.grad) for ours, due in both]
        if RANK == 0 and inputs:
            pairs.append((torch.cat([x.grad for x in inputs]), self.x.grad))
        return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def slot_by_slot(name: str, schedule: list[list[Action]], case: Case) -> None:
    m, stage = len(schedule[0]) // 2, case.stage()
    inputs, loss_of = case.batch(m)
    with logical_clock() as (work, starts):
        most_held = pipeline(stage, schedule, work)(inputs, loss_of)
    everyone: list = [None] * WORLD_SIZE
    dist.all_gather_object(everyone, starts)
    bubble = Fraction(WORLD_SIZE - 1, m + WORLD_SIZE - 1)
    late = sum(starts[action] != slot for action, slot in simulate(schedule)[RANK].items())
    held = min(m, WORLD_SIZE - RANK) if name == "1F1B" else m
    claim(f"{name}: gradients, from one process", 0, case.distance(stage, inputs), atol=ROUNDING)
    claim(f"{name}: share of slots idle in the run", bubble, idle_share(everyone))
    claim(f"{name}: actions not in the slot simulated", 0, late)
    claim(f"{name}: micro-batches held at most", held, most_held)


def refused(case: Case) -> None:
    if WORLD_SIZE == 1:
        return blocked("a schedule that would deadlock: messages posted", needs="2 ranks")
    schedule = [one_f_one_b(s, WORLD_SIZE, M) for s in range(WORLD_SIZE - 1)]
    schedule.append(gpipe(WORLD_SIZE - 1, WORLD_SIZE, M))
    spy = mock.patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv)
    with spy as posted, contextlib.suppress(ValueError):
        pipeline(case.stage(), schedule)(*case.batch(M))
    claim("a schedule that would deadlock: messages posted", 0, posted.call_count)


def torch_pipelines(case: Case) -> None:
    for name, schedule in ("GPipe", ScheduleGPipe), ("1F1B", Schedule1F1B):
        module = case.stage()
        stage = PipelineStage(module, RANK, WORLD_SIZE, case.x.device)
        inputs = (case.x.detach().requires_grad_(),) if RANK == 0 else ()
        target = {"target": case.due} if RANK == WORLD_SIZE - 1 else {}
        schedule(stage, M, loss_fn=F.mse_loss).step(*inputs, **target)
        off = case.distance(module)
        claim(f"torch's {name}: gradients, from one process", 0, off, atol=ROUNDING)


# %% [markdown]
# ## 4. On the clock
#
# On two cores, stages that idle would lend their core to the others, and no bubble would show. So
# each action sleeps, F one slot, B two (without micro-batches M times as long), and the clock sees
# what it would see if every stage had a device of its own.


# %%
def timed(schedule: list[list[Action]], case: Case) -> list[list[tuple[str, float, float]]]:
    """Run it; of every stage, each action's (kind, start, seconds)."""
    log, m = [], len(schedule[0]) // 2

    def sleep(action: Action) -> None:
        seconds = COST[action[0]] * SLOT * M / m
        log.append((action[0], time.monotonic(), seconds))
        time.sleep(seconds)  # stands for the stage's work

    step = pipeline(case.stage(), schedule, sleep)
    dist.barrier()
    step(*case.batch(m))
    logs: list = [None] * WORLD_SIZE
    dist.all_gather_object(logs, log)
    zero = min(log[0][1] for log in logs)
    return [[(kind, start - zero, seconds) for kind, start, seconds in log] for log in logs]


def on_the_clock(schedules: dict[str, list], case: Case, figure: str | None) -> None:
    spans: dict[str, list[float]] = {name: [] for name in schedules}
    for _ in range(3):
        runs = {name: timed(schedule, case) for name, schedule in schedules.items()}
        for name, logs in runs.items():
            spans[name].append(max(start + seconds for log in logs for _, start, seconds in log))
    for name, schedule in schedules.items():
        best = min(spans[name])  # other jobs can only delay a run
        idle, bubble = 1 - 3 * M * SLOT / best, idle_share(simulate(schedule))
        claim(f"{name}: share of time idle on the clock", bubble, idle, atol=0.25)
    if figure and RANK == 0:
        draw(figure, schedules, runs)


def draw(path: str, schedules: dict[str, list], runs: dict[str, list]) -> None:
    """Gantt charts: above, what the simulation predicts; below, what the clock saw."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5), layout="constrained")
    grid = figure.subplots(2, 3, sharey=True)
    for pair, (name, schedule) in zip(grid.T, schedules.items(), strict=True):
        slot, p = SLOT * 2 * M / len(schedule[0]), len(schedule)
        starts = [each.items() for each in simulate(schedule)]
        due = [[(kind, at * slot, COST[kind] * slot) for (kind, _), at in each] for each in starts]
        for axes, logs, what in zip(pair, (due, runs[name]), ("predicted", "run"), strict=True):
            for stage, log in enumerate(logs):
                colors = [{"F": "C0", "B": "C2"}[kind] for kind, *_ in log]
                bars = [bar for _, *bar in log]
                axes.broken_barh(bars, (stage - 0.4, 0.8), facecolors=colors, edgecolor="white")
            axes.set(title=f"{name}, {what}", xlabel="seconds; forward blue", ylabel="stage")
            axes.set(xlim=(0, 3.3 * M * SLOT * p), ylim=(p, -1), yticks=range(p))
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
