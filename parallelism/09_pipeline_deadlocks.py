"""Pipeline deadlocks: find them in the lists of actions
=====================================================

**Question.** A pipeline's schedule is a list of actions per stage. Which lists can never finish,
and how do you find that out before a thousand GPUs hang?

**Predict**, and write it down before you run. There are four stages and eight micro-batches, so
each stage has 16 actions: eight forward, eight backward.

1. The last stage works in GPipe's order by mistake, all others in 1F1B's. How many of its 16
   actions does the last stage get done?
2. All stages work in 1F1B's order. A send waits for its receiver, and each stage sends first and
   receives then, instead of posting both together. How many of the four stages finish?
3. The stages send first again, but all work in GPipe's order. How many of the four finish?

**Run.**

    torchrun --standalone --nproc-per-node=4 09_pipeline_deadlocks.py   # NCCL on 4 GPUs, else gloo
    python 09_pipeline_deadlocks.py                                     # the same, started for you

Not run on several GPUs.

**Try.** In `simulate` set `at_once` to 1: which claims fail? In the last line of `messages` replace
`in found` by `in found[::-1]`, so that a stage receives first: which claims fail now?

**Before.** parallelism/07_pipeline_schedules.py; communication/02_point_to_point.py: what a send
waits for. This lesson is optional: no other one builds on it.

**Next.** parallelism/10_context_parallelism.py: attention over a sequence that no rank holds.
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
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise, product
from typing import NamedTuple

import torch
import torch.distributed as dist

# A *rank* is one of WORLD_SIZE processes that run this same file, and here it is also one *stage*
# of the pipeline. `claim(text, predicted, measured)` prints one row of the ledger and must be
# called by every rank. It, `setup`, `print0`, `blocked` and `finish` stand in the last cell, the
# same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

M = 8  # micro-batches
Action = tuple[str, int]  # ("F" or "B", number of the micro-batch): one forward, one backward pass

# %% [markdown]
# ## 1. What the lists imply: who waits for whom
#
# The lists are those of the lesson before. GPipe does all forwards, then all backwards. 1F1B warms
# up with p-1-s forwards on stage s, and then alternates. The lists alone say who sends what to
# whom. Between two actions a stage sends the result of the first and receives what the second
# needs:
#
#              ... F(k) ...  result to stage s+1,  input from stage s-1
#              ... B(k) ...  result to stage s-1,  input from stage s+1
#
# Each arrow crosses two lists, so one stage's order constrains another's. If the waiting goes in a
# circle, none of these stages moves again: a **deadlock**. Each list may be sensible, and together
# they cannot be done.


# %%
def gpipe(stage: int, p: int, m: int) -> list[Action]:
    """The order in which a stage of p works on m micro-batches: all forward, then all backward."""
    return [("F", k) for k in range(m)] + [("B", k) for k in range(m)]


def one_f_one_b(stage: int, p: int, m: int) -> list[Action]:
    """1F1B with a flush: the order in which a stage of p works on m micro-batches."""
    num_warmup = min(p - 1 - stage, m)
    order = [("F", k) for k in range(num_warmup)]  # fill the pipeline
    for k in range(m - num_warmup):  # steady state: one forward, one backward
        order.append(("F", num_warmup + k))
        order.append(("B", k))
    for k in range(m - num_warmup, m):  # drain it
        order.append(("B", k))
    return order


class Message(NamedTuple):
    """One end of a message, as one stage has it."""

    verb: str  # "send" or "recv"
    peer: int  # the other stage
    action: Action  # whose result it carries

    def __str__(self) -> str:
        preposition = "to" if self.verb == "send" else "from"
        return f"{self.verb} {self.action[0]}{self.action[1]} {preposition} stage {self.peer}"


def messages(stage: int, p: int, done: Action | None, todo: Action | None) -> list[Message]:
    """What `stage` exchanges between two actions: first what it sends, then what it receives."""
    found = []
    if done is not None:
        receiver = stage + 1 if done[0] == "F" else stage - 1
        found.append(Message("send", receiver, done))
    if todo is not None:
        sender = stage - 1 if todo[0] == "F" else stage + 1
        found.append(Message("recv", sender, todo))
    return [message for message in found if 0 <= message.peer < p]


# %% [markdown]
# ## 2. The simulator: play the lists, message by message
#
# The simulator knows no layers, no bytes and no time. A message passes when both ends have posted
# it, because a send waits for its receiver: gloo's at any size, NCCL's when the message is large. A
# stage does its next action when all messages before it have passed. In each round all messages
# pass that can, and then each stage does an action if it can. Here are two stages under 1F1B with
# two micro-batches; stage 0 has F0 F1 B0 B1 on its list, stage 1 has F0 B0 F1 B1:
#
#     round   stage 0 has posted    stage 1 has posted    passes     done by stage 0   by stage 1
#     1       nothing               recv F0                          F0
#     2       send F0               recv F0               F0         F1                F0
#     3       send F1, recv B0      nothing                                            B0
#     4       send F1, recv B0      send B0, recv F1      F1, B0     B0                F1
#
# With `together=False` a stage posts its send alone, and its receive once the send is through. Then
# in round 4 there are two sends and no receive, and nothing passes. When a round changes nothing,
# either all lists are done, or the stages that are left hang.


# %%
def simulate(
    schedule: Sequence[list[Action]], together: bool = True
) -> tuple[list[int], list[list[Message]]]:
    """Return how many actions each stage gets done, and the messages that it then waits for."""
    p = len(schedule)
    at_once = 2 if together else 1  # how many of its messages a stage posts
    done = [0] * p
    waits = [messages_before(schedule, s, 0) for s in range(p)]
    moved = True
    while moved:
        moved = False
        for s in range(p):
            for message in waits[s][:at_once]:
                if message.verb == "send":
                    other_end = Message("recv", s, message.action)
                    if other_end in waits[message.peer][:at_once]:
                        waits[s].remove(message)
                        waits[message.peer].remove(other_end)
                        moved = True
        for s in range(p):
            if not waits[s] and done[s] < len(schedule[s]):
                done[s] += 1
                waits[s] = messages_before(schedule, s, done[s])
                moved = True
    return done, waits


def messages_before(schedule: Sequence[list[Action]], s: int, i: int) -> list[Message]:
    """What stage s exchanges before the i-th action of its list, or at its end."""
    last = schedule[s][i - 1] if i > 0 else None
    todo = schedule[s][i] if i < len(schedule[s]) else None
    return messages(s, len(schedule), last, todo)


# %% [markdown]
# `check_schedule` makes an error of what the simulator finds. First it refuses a list that has a B
# before its own F, which no message shows.


# %%
def check_schedule(schedule: Sequence[list[Action]], together: bool = True) -> None:
    """Raise ValueError if the stages cannot all finish; say which waits for which message."""
    for s, actions in enumerate(schedule):
        for i, (direction, k) in enumerate(actions):
            if direction == "B" and ("F", k) not in actions[:i]:
                rule = "a micro-batch must go forward before it goes back"
                raise ValueError(f"{rule}, got B{k} first on stage {s}; reorder its list")
    done, waits = simulate(schedule, together)
    stuck = []
    for s, ends in enumerate(waits):
        if ends:
            stuck.append(f"stage {s} after {done[s]} actions, in {ends[0]}")
    if stuck:
        rule = "every stage must be able to finish its list"
        raise ValueError(f"{rule}; these wait forever: {'; '.join(stuck)}; reorder the lists")


# %% [markdown]
# ## 3. Two deadlocks
#
# **Two good lists make a bad pair.** Four stages, the last one in GPipe's order. It wants all eight
# forwards before its first backward. The others warm up with a few forwards and then wait for
# gradients:
#
#               done          next    which needs the result of
#     stage 0   F0 F1 F2 F3   B0      stage 1's B0
#     stage 1   F0 F1 F2      B0      stage 2's B0
#     stage 2   F0 F1         B0      stage 3's B0, which stage 3 does after F7  <--.
#     stage 3   F0 F1         F2      stage 2's F2, which stage 2 does after B0  ---'  a circle
#
# **A good schedule, a bad exchange.** In 1F1B's steady state stage s has an activation for s+1, and
# s+1 has a gradient for s. If both send first, both wait for the other's receive:
#
#     stage s     send F(k+1) to s+1 ---waits for---> recv F(k+1), which s+1 posts after its send
#     stage s+1   send B(k) to s     ---waits for---> recv B(k), which s posts after its send
#
# Post both in one batch, and neither waits for the other's receive. Under GPipe nothing ever
# crosses. Forward, the last stage only receives, so it serves the one before it, and so on down the
# line; backward it is the same from the other end.
#
# Below, every rank follows its list for real. There are no layers, and a message is one number. A
# rank whose message does not pass within `patience` gives up.


# %%
def one_gpipe_among_1f1b(p: int, m: int) -> list[list[Action]]:
    """1F1B on all stages but the last."""
    return [one_f_one_b(s, p, m) for s in range(p - 1)] + [gpipe(p - 1, p, m)]


def exchange(
    ends: list[Message], group: dist.ProcessGroup, together: bool, patience: timedelta
) -> Message | None:
    """Pass this rank's messages; return the first one that does not pass, if there is one."""
    verbs = {"send": dist.isend, "recv": dist.irecv}
    batches = [ends] if together and ends else [[end] for end in ends]
    for batch in batches:
        posted = [dist.P2POp(verbs[end.verb], torch.zeros(1), end.peer, group) for end in batch]
        for end, work in zip(batch, dist.batch_isend_irecv(posted), strict=True):
            try:
                work.wait(patience)
            except RuntimeError:  # gloo's: the patience of this rank is over, or of its peer
                return end
    return None


def rehearse(
    actions: list[Action], group: dist.ProcessGroup, together: bool, patience: timedelta
) -> tuple[int, Message | None]:
    """Follow this rank's list; return the actions done, and the message that it waits in."""
    done = 0
    for last, todo in pairwise([None, *actions, None]):
        stuck = exchange(messages(RANK, WORLD_SIZE, last, todo), group, together, patience)
        if stuck is not None:
            return done, stuck
        if todo is not None:
            done += 1
    return done, None


# %% [markdown]
# ## 4. How it is measured
#
# Predicted is what the simulator says, measured what the ranks did. Each run has a gloo group of
# its own, which a deadlock may ruin, on machines with GPUs too: NCCL's watchdog would end the
# process. Patience is three seconds where the simulator finds a deadlock, elsewhere a minute.


# %%
def check_simulator() -> None:
    """Claim how many schedules of 1 to 8 stages and micro-batches the simulator refuses."""
    healthy = 0  # GPipe, 1F1B, and GPipe that sends first
    crossing = 0
    mixed = 0
    for p, m in product(range(1, 9), range(1, 9)):
        by_gpipe = [gpipe(s, p, m) for s in range(p)]
        by_1f1b = [one_f_one_b(s, p, m) for s in range(p)]
        healthy += is_stuck(by_gpipe) + is_stuck(by_1f1b) + is_stuck(by_gpipe, together=False)
        crossing += is_stuck(by_1f1b, together=False)
        mixed += is_stuck(one_gpipe_among_1f1b(p, m))
    claim("healthy schedules: stuck, of 192", 0, healthy, kind="simulated")
    claim("1F1B, sends first: stuck, if p, m >= 2", 49, crossing, kind="simulated")
    claim("one GPipe among 1F1B: stuck, if p >= 2, m >= 3", 42, mixed, kind="simulated")


def is_stuck(schedule: Sequence[list[Action]], together: bool = True) -> bool:
    try:
        check_schedule(schedule, together)
    except ValueError:
        return True
    return False


def let_happen(name: str, schedule: Sequence[list[Action]], together: bool) -> tuple[int, int]:
    """Run a schedule; return how many stages finish, and the actions that the last one has done."""
    done, waits = simulate(schedule, together)
    stuck = any(waits)
    group = dist.new_group(backend="gloo")
    dist.barrier()  # patience is for messages, and not for ranks that come late
    patience = timedelta(seconds=3 if stuck else 60)
    told = gather_objects(rehearse(schedule[RANK], group, together, patience))
    as_simulated = 0
    finished = 0
    for rank, (actions, message) in enumerate(told):
        expected = waits[rank][0] if waits[rank] else None
        as_simulated += actions == done[rank] and message == expected
        finished += message is None
    if stuck:
        show_error(schedule, together)
    claim(f"{name}: stages as simulated", WORLD_SIZE, as_simulated, timed=stuck)
    return finished, told[-1][0]


def show_error(schedule: Sequence[list[Action]], together: bool) -> None:
    """Print what the simulator says of a schedule that cannot finish."""
    try:
        check_schedule(schedule, together)
    except ValueError as error:
        for part in str(error).split("; "):
            print0(f"{'':13}{part}")


def check_deadlocks() -> None:
    """Run two schedules that finish, and two that do not."""
    if WORLD_SIZE == 1:
        blocked("two deadlocks, and what finishes, for real", needs="2 ranks")
        return
    p = WORLD_SIZE
    by_1f1b = [one_f_one_b(s, p, M) for s in range(p)]
    by_gpipe = [gpipe(s, p, M) for s in range(p)]
    finished, _ = let_happen("1F1B", by_1f1b, together=True)
    claim("1F1B: stages that finish", p, finished)
    mixed = one_gpipe_among_1f1b(p, M)
    finished, by_the_last = let_happen("one GPipe among 1F1B", mixed, together=True)
    claim("one GPipe among 1F1B: stages that finish", 0, finished)
    claim("one GPipe among 1F1B: done by the last stage", 2, by_the_last, question=1)
    finished, _ = let_happen("1F1B, sends first", by_1f1b, together=False)
    claim("1F1B, sends first: stages that finish", 0, finished, question=2)
    finished, _ = let_happen("GPipe, sends first", by_gpipe, together=False)
    claim("GPipe, sends first: stages that finish", p, finished, question=3)


def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


# %% [markdown]
# ## What you should have seen
#
# 1. Two: F0 and F1. It waits for F2, which stage 2 does after B0, for which stage 3 has no gradient
#    yet. With more stages it is still two: the circle lies between the last two, and those before
#    wait behind it, each in a send that the next stage does not take.
# 2. None. In the steady state each pair of neighbors has a message for each other, and both send.
# 3. All four: no two messages ever cross. So a pipeline that was tested with GPipe may hang when
#    only the order of its actions changes.
#
# The simulator knew all of it before anything was sent: `check_schedule` raises an error that names
# each stage that waits, and its message. Call it where a schedule is made, on one CPU, if you write
# the lists yourself, or reorder them. PyTorch checks its own lists in the same way
# (`_simulate_comms_compute` in `torch.distributed.pipelining.schedules`).
#
# **Try.** With `at_once = 1` the simulator refuses 1F1B, which runs: "healthy schedules: stuck" and
# "1F1B: stages as simulated" fail. With the receive first, a batch is the same batch. But posted
# alone, GPipe hangs where forward turns into backward, because a stage waits for a gradient before
# it hands on its last activation. "healthy schedules: stuck", "1F1B, sends first: stuck" (now with
# one micro-batch, too) and "GPipe, sends first: stages that finish" fail.
#
# **On GPUs** the second deadlock hides at first. An NCCL send is copied into a buffer, 4 MiB per
# channel, and completes with no receive posted if the buffer takes all of it. So small activations
# pass, and the job hangs when the batch or the sequence grows; from which size on depends on the
# machine. Nor is there a patience per message. GPUs that wait show 100 %, because a kernel spins,
# and after ten minutes (torch's default) NCCL's watchdog ends the job. Where each rank stands is in
# the stacks and in the flight recorder (profiling/04_debugging_hangs.py). Use one batch
# (`batch_isend_irecv`) for messages that may cross.
#
# **What the simulator leaves out.** Real messages of one direction are taken in the order in which
# they were sent. So if two lists disagree about the order of micro-batches, the simulator reports a
# deadlock, and the ranks compute with the wrong activations instead. Nor does it know time:
# 07_pipeline_schedules.py counts that.


# %%
def main() -> None:
    command_line()
    launch()
    setup()
    check_simulator()
    check_deadlocks()
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
