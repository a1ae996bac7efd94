"""Debugging hangs: who waits for whom?
====================================

**Question.** A job of many ranks stands still and prints nothing, or dies with words that name no
rank. Which rank is to blame, and at which line?

**Predict**, and write it down before you run:

1. Eight jobs of four ranks have a bug each: a skipped collective, another order, other shapes,
   another dtype, a last batch too few, a rank that is killed, the wrong group, two ranks that both
   send first. On gloo, in how many of them does no rank print an error?
2. The rank that is killed: how many of the other three ranks' error messages say which one it was?
3. You know in which line each rank stands, and which collectives it has called. In how many of the
   eight does this name the guilty rank and its line?
4. The same bug, another order, but with two ranks in all. How many ranks can be blamed?
5. A healthy job is looked at in the same way while it trains, one of its ranks slower than the
   others. How often is a rank blamed?
6. Three ranks have 3 batches and one has 2. With DDP's `join`, how many batches are trained on?

**Run.** One process; it starts its own ranks, four for each faulty job, on gloo also where there
are GPUs.

    python 04_debugging_hangs.py

Not run on several GPUs.

**Try.** In `made` leave out the line that adds "input_dtypes": who is blamed for the wrong dtype?
In `who_waits_for_whom` write `(eventually, 0)` for the score: in which jobs is the right rank still
named?

**Before.** communication/02_point_to_point.py: what a send waits for.

**Next.** exercises/23_name_the_hung_rank; then profiling/05_memory.py. Exercise 14 has such jobs to
fix. NCCL's own log and variables: communication/nccl_debugging.md.
"""

import argparse
import contextlib
import ctypes
import faulthandler
import importlib
import inspect
import io
import json
import logging
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

RANKS = 4  # of each faulty job, however many ranks this lesson has
GUILTY = 2  # the rank that has the bug
Recorded = dict[str, object]  # a call, as the flight recorder notes it

# %% [markdown]
# ## 1. Eight ways to hang a job, or to crash it
#
# A collective is over when all ranks of its group have made the same call. So one rank that makes
# another call is enough, and its peers are those that seem to hang:
#
#     rank 0   all_reduce | all_reduce ...
#     rank 1   all_reduce | all_reduce ...       three ranks wait, in a line without a mistake,
#     rank 2   all_reduce | barrier ...     <--  for the one that stands somewhere else
#     rank 3   all_reduce | all_reduce ...
#
# Each job below has one bug, on the rank whose `guilty` is true. The line that a report should name
# ends with `# BUG`: there the guilty rank stands, or there it is missed. For each job ask: where
# does each of the four ranks wait?


# %%
def skipped_collective(rank: int, guilty: bool) -> None:
    """A rank whose loss is not finite leaves out the all-reduce."""
    loss = torch.tensor(math.nan if guilty else 1.0)
    if loss.isfinite():
        dist.all_reduce(loss)
    dist.barrier()  # BUG


def another_order(rank: int, guilty: bool) -> None:
    """One rank filled its dictionary in another order."""
    state = {"weight": torch.ones(4), "seen": torch.tensor([5])}
    if guilty:
        state = dict(reversed(state.items()))
    for tensor in state.values():
        if tensor.is_floating_point():
            dist.all_reduce(tensor)
        else:
            dist.broadcast(tensor, 0)  # BUG


def other_shapes(rank: int, guilty: bool) -> None:
    """One rank has a class more in its last layer."""
    gradient = torch.ones(5 if guilty else 4)
    dist.all_reduce(gradient)  # BUG
    dist.barrier()


def other_dtype(rank: int, guilty: bool) -> None:
    """One rank's metric came from NumPy, whose numbers are float64."""
    metric = torch.ones(4, dtype=torch.float64 if guilty else torch.float32)
    dist.all_reduce(metric)  # BUG
    dist.barrier()


# %% [markdown]
# A last batch too few is the most common of all. DDP's `join` cures it: a rank that has no batch
# left answers the others' all-reduces with zeros, until all are done.


# %%
def uneven_batches(rank: int, guilty: bool, join: bool = False) -> None:
    """One rank has 2 batches, the others have 3."""
    model = DistributedDataParallel(nn.Linear(4, 1))
    with model.join(enable=join):
        for batch in range(2 if guilty else 3):
            model(torch.ones(2, 4)).sum().backward()
            os.write(1, f"batch {batch}\n".encode())
    dist.barrier()  # BUG


def cured_by_join(rank: int, guilty: bool) -> None:
    uneven_batches(rank, guilty, join=True)


def dead_rank(rank: int, guilty: bool) -> None:
    """The kernel kills a rank, as it does when the host's memory is full."""
    for step in range(3):
        if guilty and step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(4))  # BUG


def wrong_group(rank: int, guilty: bool) -> None:
    """There are two groups of the same ranks, and one rank takes the other."""
    data = dist.new_group()
    tensor = dist.new_group()
    dist.all_reduce(torch.ones(4), group=tensor if guilty else data)  # BUG


def both_send_first(rank: int, guilty: bool) -> None:
    """Neighbors exchange: 0 with 1, in the right order; 2 with 3, and both send first."""
    mine = torch.ones(4)
    theirs = torch.empty(4)
    partner = rank ^ 1
    if rank == 1:
        dist.recv(theirs, partner)
    dist.send(mine, partner)  # BUG
    if rank != 1:
        dist.recv(theirs, partner)
    dist.barrier()


JOBS = [skipped_collective, another_order, other_shapes, other_dtype]
JOBS += [uneven_batches, dead_rank, wrong_group, both_send_first]

# %% [markdown]
# ## 2. What a rank can tell: its stack, and a record of its calls
#
# The **stack** says in which line a rank stands now. It does not say whether this is the line's
# third time or its fourth. The **flight recorder** knows that: a ring buffer in torch, in which a
# rank notes each collective when it is called, with its group, its number in the group, its name,
# sizes and dtypes, and whether it is over (`retired`). For gloo it is on by default, too.
#
# So each rank gets a **black box**: a thread that waits for a signal and then writes down both.
# It has to be a thread, because the main thread is inside C++ and runs no signal handler there.
#
# gloo's recorder leaves out sends and receives. Their peer is read off the stack, from the
# variables of torch's own function, as `py-spy dump --locals` would show them. (NCCL's recorder has
# them, as "nccl:send 2->3".)


# %%
@dataclass
class Look:
    """What is known of a rank at one moment."""

    state: str = "running"  # or finished, raised, dead
    words: str = ""  # of the exception, or of a process that died
    exitcode: int = 0  # of a dead one: -9 is SIGKILL, -6 SIGABRT
    stack: list[tuple[str, int, str]] = field(default_factory=list)  # (file, line, function)
    message: tuple[str, int] | None = None  # ("send" or "recv", the peer) while it waits in one
    calls: list[Recorded] = field(default_factory=list)  # what the flight recorder has, in order
    groups: dict[str, list[int]] = field(default_factory=dict)  # {name: ranks}
    cpu: int = 0  # nanoseconds that the main thread has computed


class BlackBox(threading.Thread):
    """Writes a Look at this rank's main thread into `path`: now, and at each SIGUSR1."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self.path = path
        self.state = "running"
        self.error: BaseException | None = None

    def run(self) -> None:
        while True:
            unfinished = self.path.with_suffix(".tmp")
            unfinished.write_bytes(pickle.dumps(self.look()))
            unfinished.rename(self.path)  # so that nobody reads half of it
            signal.sigwait({signal.SIGUSR1})

    def look(self) -> Look:
        main = threading.main_thread().ident
        frame = sys._current_frames()[main]
        stack = traceback.extract_stack(frame)
        if self.error is not None:
            stack = traceback.extract_tb(self.error.__traceback__)
        look = Look(self.state, words=str(self.error or ""))
        look.stack = [(entry.filename, entry.lineno, entry.name) for entry in stack]
        look.message = message_of(frame)
        look.calls = read_recorder()["entries"]
        for group, ranks in dist.distributed_c10d._world.pg_group_ranks.items():
            look.groups[group.group_name] = sorted(ranks)
        look.cpu = time.clock_gettime_ns(time.pthread_getcpuclockid(main))
        return look


def read_recorder() -> dict:
    """What torch's flight recorder holds; its own stacks would take seconds to look up."""
    return pickle.loads(torch._C._distributed_c10d._dump_fr_trace(includeStackTraces=False))


def message_of(frame: FrameType | None) -> tuple[str, int] | None:
    """If a stack leads into torch's send or recv: which of them, and the peer."""
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("send", "recv") and code.co_filename.endswith("distributed_c10d.py"):
            return code.co_name, frame.f_locals.get("dst", frame.f_locals.get("src"))
        frame = frame.f_back
    return None


# %% [markdown]
# ## 3. Who waits for whom
#
# A rank inside a collective waits for every member of the group that has not made *this* call: same
# group, same number, same name, sizes and dtype. (In an all-to-all or a gather sizes may differ by
# right; no job here has one.) A rank that sends waits for its peer, unless that one receives from
# it. This is a graph, and the guilty rank is where its arrows lead:
#
#     0 --.                     0 --.
#     1 ---+--> 2 (dead)        1 ---+--> 2 --> 0, 1, 3       3 arrows lead to 2, and 1 to each
#     3 --'                     3 --'                          of the others
#
# On the left, rank 2 waits for nobody, and everybody for it. On the right all wait for each other,
# so it is a vote: three ranks lack the call of one, and one lacks the calls of three. This vote
# needs a majority. With two ranks it says "one of you two".


# %%
@dataclass
class Verdict:
    ranks: list[int]  # whom all wait for; nobody, if nobody waits
    line: int | None = None  # of this file: where the first of them stands, or is missed
    why: str = "nobody waits"


def who_waits_for_whom(looks: list[Look]) -> Verdict:
    """Name the ranks that all others wait for, at the end of every chain."""
    waits = [waits_for(rank, looks) for rank in range(len(looks))]
    in_the_end = [set(others) for others in waits]
    for _ in looks:
        for others in in_the_end:
            others.update(*[in_the_end[other] for other in others])
    scores = []
    for rank in range(len(looks)):
        eventually = sum(rank in in_the_end[other] for other in range(len(looks)) if other != rank)
        directly = sum(rank in others for others in waits)
        scores.append((eventually, directly))
    if max(scores) == (0, 0):
        return Verdict(killed(looks))
    guilty = [rank for rank, score in enumerate(scores) if score == max(scores)]
    first = guilty[0]
    waiting = [rank for rank, others in enumerate(waits) if first in others]
    line = own_line(looks[first]) or own_line(looks[waiting[0]])
    why = f"{where(looks[first])}; rank {waiting[0]}: {where(looks[waiting[0]])}"
    return Verdict(guilty, line, f"rank {first}: {why}")


# %% [markdown]
# Most of the work is in "has made the same call". What follows is that, and a name for each place.


# %%
def killed(looks: list[Look]) -> list[int]:
    """Who died, and was not aborted as a consequence: all that is left if nobody lives to wait."""
    dead = [rank for rank, look in enumerate(looks) if look.state == "dead"]
    return [rank for rank in dead if looks[rank].exitcode != -signal.SIGABRT]


def waits_for(rank: int, looks: list[Look]) -> set[int]:
    """The ranks without which this one cannot go on."""
    look = looks[rank]
    if look.state in ("finished", "dead"):
        return set()
    call = open_call(look)
    message = look.message or sent_in(call)
    if message is not None:
        kind, peer = message
        answer = ("recv" if kind == "send" else "send", rank)
        return set() if answer in (looks[peer].message, sent_in(open_call(looks[peer]))) else {peer}
    if call is None:
        return set()
    members = look.groups.get(call["process_group"][0], [])  # DETAIL's own group has no name
    return {other for other in members if other != rank and not made(looks[other], call)}


def open_call(look: Look) -> Recorded | None:
    """The collective in which a rank is, or in which it failed."""
    for call in look.calls:
        if not call["retired"]:
            return call
    failed_inside = look.state == "raised" and "/torch/" in look.stack[-1][0]
    return look.calls[-1] if look.calls and failed_inside else None


def sent_in(call: Recorded | None) -> tuple[str, int] | None:
    """NCCL's recorder has messages, too: "nccl:send 2->3", "nccl:recv 3<-2"."""
    found = re.search(r"(send|recv) \d+(?:->|<-)(\d+)", call["profiling_name"]) if call else None
    return (found[1], int(found[2])) if found else None


def made(look: Look, call: Recorded) -> bool:
    """Whether a rank has made this call too; who was aborted inside one cannot say: we trust it."""
    if look.exitcode == -signal.SIGABRT:
        return True
    same = ["process_group", "collective_seq_id", "profiling_name", "input_sizes"]
    same += ["input_dtypes"]
    return any(all(own[key] == call[key] for key in same) for own in look.calls)


def own_line(look: Look) -> int | None:
    """The innermost line of this file on a rank's stack."""
    here = Path(__file__).name
    lines = [line for file, line, _ in look.stack if Path(file).name == here]
    return lines[-1] if lines and look.state in ("running", "raised") else None


def where(look: Look) -> str:
    """A rank's place in words."""
    if look.state == "dead":
        return f"dead, exit code {look.exitcode}"
    if look.message is not None:
        return f"{look.message[0]}, peer {look.message[1]}"
    call = open_call(look)
    if call is None:
        return look.state
    name = call["profiling_name"].partition(":")[2]
    given = zip(call["input_sizes"], call["input_dtypes"], strict=True)
    tensors = "".join(f" of {dtype}{size}" for size, dtype in given)
    return f"{name}{tensors}, #{call['collective_seq_id']} in group {call['process_group'][0]}"


# %% [markdown]
# One look is not enough: in a healthy job, too, three ranks wait for the slowest at most moments. A
# job hangs if *nothing has changed*: three looks in a row are alike, in all stacks and records, and
# in the nanoseconds that each main thread has computed; and somebody is waited for. No clock and no
# timeout decides, and a rank that wants to compute and gets no core does not count as hung.


# %%
def hangs(looks: list[list[Look]], processes: list[psutil.Process]) -> bool:
    """Whether the last three looks at all ranks are alike, and no thread waits for a core."""
    if len(looks) < 3 or not looks[-1] == looks[-2] == looks[-3]:
        return False
    return not any(wants_a_core(process) for process in processes)


def wants_a_core(process: psutil.Process) -> bool:
    """Whether a thread of a process computes, or would if it got a core."""
    for stat in Path(f"/proc/{process.pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has ended
            if stat.read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False


# %% [markdown]
# ## 4. The tools, one by one
#
# All of the above is made of tools that are there on any cluster. Here each is asked by itself, of
# a job that hangs or dies:
#
# - **py-spy** reads a stack from outside, of a process that was not prepared for it: `py-spy dump
#   --pid PID`. It needs the right to trace (root, or ptrace_scope 0; a container needs SYS_PTRACE).
# - **faulthandler** is Python's own: `faulthandler.register(signal.SIGUSR2)` at the start of a
#   script, and `kill -USR2 PID` prints all stacks. It needs nothing of the main thread.
# - **`dist.monitored_barrier`** says which rank does not come. It is gloo's; a job on NCCL makes a
#   gloo group for it. Put one before the collective that you suspect.
# - **TORCH_DISTRIBUTED_DEBUG=DETAIL** compares each collective over all ranks *before* it starts,
#   and raises on every rank. It costs a round of messages per collective.
# - **torchfrtrace** (torch.distributed.flight_recorder) analyses one dump per rank in a folder. It
#   wants to know the ranks of each group, which gloo's dump leaves out, so they are added.
#
# launch/diagnose.py, a file to copy alone, is sections 2 and 3 for a job that nobody prepared. Put
# `skipped_collective` into a file job.py that joins gloo, start it with torchrun, and ask:
#
#     python launch/diagnose.py --job job.py       # stacks, by py-spy; --dumps DIR reads recorders
#     CALLS DIFFER: rank 2 called barrier (.../job.py:12 in skipped_collective), but ranks 0, 1, 3
#     all_reduce (.../job.py:11 in skipped_collective).


# %%
def ask_py_spy(process: psutil.Process) -> int | str:
    """The line in which py-spy sees a rank, or what it needs."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    py_spy = shutil.which("py-spy", path=path)
    if py_spy is None:
        return "the package py-spy"
    command = [py_spy, "dump", "--pid", str(process.pid)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if ran.returncode != 0:
        return "root, or the right to trace"
    return line_in(ran.stdout)


def ask_faulthandler(process: psutil.Process) -> int:
    """The line in which Python's own handler sees it: it prints where the rank does."""
    said = Path(process.cwd(), f"{GUILTY}.txt")
    process.send_signal(signal.SIGUSR2)
    wait_until(lambda: "in fork_rank" in said.read_text())  # the outermost function but one
    return line_in(said.read_text())


def line_in(stack: str) -> int:
    """The line of the job that hangs, in a stack as either tool prints it."""
    found = re.search(r"line (\d+) in skipped_collective|skipped_collective \(.*:(\d+)\)", stack)
    return int(found[1] or found[2]) if found else 0


def ask_torchfrtrace(looks: list[Look]) -> str:
    """What torch's analyzer prints about the calls that the ranks recorded."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):  # on import it complains of a package for tables
        from torch.distributed.flight_recorder import fr_trace
    logging.getLogger("Flight Recorder").handlers = [logging.StreamHandler(said)]
    with tempfile.TemporaryDirectory() as folder:
        for rank, look in enumerate(looks):
            groups = {}
            for name, ranks in look.groups.items():
                groups[name] = {"name": name, "desc": "", "ranks": str(ranks)}
            calls = [call | {"frames": []} for call in look.calls]
            dump = {"version": "2.10", "pg_config": groups, "entries": calls}
            Path(folder, f"trace_{rank}").write_bytes(pickle.dumps(dump))
        fr_trace.main([folder, "-p", "trace_"])
    return said.getvalue()


def barrier_without_one(rank: int, guilty: bool) -> None:
    """All but one come to a barrier that is monitored; that one dies while they wait there.

    Had it died before, rank 0 would find a closed connection, and not ask whose.
    """
    while guilty:
        time.sleep(0.05)
        if os.path.exists("stop"):  # the others have been looked at for a while
            os._exit(1)
    dist.monitored_barrier(timeout=timedelta(minutes=2))


# %% [markdown]
# On GPUs a rank does not wait in the collective: it launches a kernel, goes on, and waits at the
# next `.item()` or `synchronize()`. So its stack shows *that* line, and the flight recorder is
# worth more than the stack: it holds each call with the stack that it had, and its state. By
# default that is "scheduled" until it is "completed", for a kernel that has run for ten minutes as
# well. Only with TORCH_NCCL_ENABLE_TIMING=1 is it "started" in between; then you can tell a rank
# that is *in* the collective from one whose GPU has not come to it.
#
# A **watchdog** thread ends the process when a collective takes longer than the group's timeout,
# and has every rank write its dump first. So after a hang the files are there, unless somebody
# turned that off: one per rank, on each node, in ~/.cache/torch/ (or $XDG_CACHE_HOME/torch/). In a
# container that is gone with it: set TORCH_FR_DUMP_TEMP_FILE, their prefix. This variable, its kin,
# and how torch's old and new NCCL backends word a timeout are in communication/nccl_debugging.md.
# torch's documentation ("ProcessGroupNCCL Environment Variables") has more. None was tried here,
# since gloo has no watchdog:
#
#     TORCH_NCCL_DEBUG_INFO_PIPE_FILE    prefix of pipes, unset: write a byte, and get a dump
#     TORCH_NCCL_DESYNC_DEBUG            the watchdog itself says which rank lags: 0
#     TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC   480: ends a process whose watchdog is stuck itself
#     TORCH_NCCL_BLOCKING_WAIT           1: wait() blocks, and raises at the timeout
#
# A GPU at 100% that draws little power spins in a NCCL kernel: its rank waits. And if no rank's
# code is to blame, ask the machine: `dmesg -T | python launch/diagnose.py --log -` on each node
# knows which Xid numbers are mostly the program's, and which are the machine's. Then take the node
# out, and restart without it.

# %% [markdown]
# ## 5. All eight
#
# Each job is started and looked at until it hangs or is over. The report knows nothing of the
# source: what it names is compared with the mark `# BUG` afterwards.


# %%
def name_all_eight() -> None:
    """Let each job hang, and claim that the report is right."""
    print(f"  {'job':19} {'blamed':8} {'line':>5} {'truth':>6}  what can be seen")
    silent = 0
    slowest = 0.0
    right = Counter()
    of_job = {}
    for job in JOBS:
        seen = watch(job)
        of_job[job] = seen
        blamed = seen.verdict.ranks
        line = seen.verdict.line
        source, first = inspect.getsourcelines(job)
        truth = first + next(at for at, text in enumerate(source) if text.endswith("# BUG\n"))
        guilty = [GUILTY, GUILTY ^ 1] if job is both_send_first else [GUILTY]
        right["ranks"] += blamed == guilty
        right["lines"] += line == truth
        silent += not any("Error" in said for said in seen.printed)
        slowest = max(slowest, seen.seconds)
        ranks = ", ".join(map(str, blamed))
        print(f"  {job.__name__:19} {ranks:8} {line!s:>5} {truth:6}  {symptom(seen)}")
        print(f"    {seen.verdict.why}")
    print(f"\n{'':13}{'claim':50} {'predicted':22} {'measured':>11}")
    claim("jobs of eight in which no rank prints an error", 6, silent, question=1)
    claim("jobs whose guilty rank is named", 8, right["ranks"], question=3)
    claim("jobs whose guilty line is named", 8, right["lines"], question=3)
    claim("seconds until the slowest is named", 15, slowest, "<=", timed=True)
    words = [look.words for look in of_job[dead_rank].looks if look.state == "raised"]
    claim("dead rank: ranks that raise", 1, len(words), ">=")
    naming = sum(f"ank {GUILTY}" in said for said in words)
    claim("dead rank: of their messages, how many name it", 0, naming, question=2)


def symptom(seen: "Watched") -> str:
    """What became of a job's ranks, in words."""
    states = Counter(look.state for look in seen.looks)
    words = {"running": "wait", "raised": "raise", "dead": "dead", "finished": "done"}
    return ", ".join(f"{states[state]} {word}" for state, word in words.items() if states[state])


# %% [markdown]
# Where the report must not be so sure: with two ranks, and with none guilty. The healthy job trains
# until it is told to stop, and rank 2 is late in every step. So most single looks show three ranks
# that wait for it; but no three looks in a row are alike.


# %%
def healthy(rank: int, guilty: bool) -> None:
    """Train until there is a file "stop"; one rank is slow, and does nothing wrong."""
    going_on = torch.ones(())
    while going_on > 0:
        if guilty:
            time.sleep(0.05)
        dist.all_reduce(torch.ones(1000))
        going_on = torch.tensor(0.0 if os.path.exists("stop") else 1.0)
        dist.all_reduce(going_on, dist.ReduceOp.MIN)


def check_doubt() -> None:
    """Claim that two ranks share the blame, and that nobody is blamed without a reason."""
    two = watch(another_order, ranks=2)
    claim("two ranks, another order: ranks blamed", 2, len(two.verdict.ranks), question=4)
    seen = watch(healthy)
    print(f"{'':13}healthy: {seen.blamed} of {seen.times} single looks would have blamed a rank")
    claim("healthy: ranks blamed", 0, len(seen.verdict.ranks), question=5)
    ended = sum(look.state == "finished" for look in seen.looks)
    claim("healthy: ranks that trained to the end", RANKS, ended)


# %% [markdown]
# And the tools by themselves, and the cure.


# %%
def check_tools() -> None:
    """Claim what each tool of section 4 says."""
    seen = watch(skipped_collective, probe=ask_stacks)
    by_py_spy, by_faulthandler = seen.probed
    line = seen.verdict.line
    text = "py-spy: line of the guilty rank"
    if isinstance(by_py_spy, str):
        blocked(text, needs=by_py_spy)
    else:
        claim(text, line, by_py_spy)
    claim("faulthandler: line of the guilty rank", line, by_faulthandler)
    said = ask_torchfrtrace(seen.looks)
    error = re.search("error msg: (.*)", said)
    print(textwrap.indent(textwrap.fill(error[1] if error else said, 85), " " * 13))
    claim("torchfrtrace: names the rank", 1, f"rank {GUILTY}" in said)
    barrier = watch(barrier_without_one).looks[0].words
    claim("monitored_barrier: names the rank", 1, f"Rank {GUILTY} failed" in barrier)
    compared = watch(other_dtype, debug="DETAIL").looks
    naming = sum(f"Rank {GUILTY} is running collective" in look.words for look in compared)
    claim("DETAIL, another dtype: ranks that name it", RANKS, naming)


def ask_stacks(processes: list[psutil.Process]) -> tuple[int | str, int]:
    return ask_py_spy(processes[GUILTY]), ask_faulthandler(processes[GUILTY])


def check_cure() -> None:
    cured = watch(cured_by_join)
    batches = sum(printed.count("batch") for printed in cured.printed)
    claim("uneven, with join: batches trained on", 3 * 3 + 2, batches, question=6)
    ended = sum(look.state == "finished" for look in cured.looks)
    claim("uneven, with join: ranks that come to the end", RANKS, ended)


# %% [markdown]
# ## 6. How it is measured
#
# Four processes are forked per job, which takes milliseconds where four interpreters would take
# seconds. They meet through a file, not a port. Each asks to be killed when this process ends, and
# is killed when its job has been looked at; a real job would have to be ended just so, since a rank
# in C++ hears neither SIGTERM nor Ctrl-C.


# %%
@dataclass
class Watched:
    """How a job was seen to hang, or to end."""

    verdict: Verdict
    looks: list[Look]  # the last one at each rank
    blamed: int  # how many single looks would have blamed a rank
    times: int  # how many looks there were
    seconds: float
    printed: list[str]  # by each rank, errors included
    probed: object  # what `probe` returned


def watch(
    job: Callable[[int, bool], None],
    ranks: int = RANKS,
    debug: str = "OFF",
    probe: Callable[[list[psutil.Process]], object] | None = None,
) -> Watched:
    """Start a job, look at it until it hangs or is over, and leave no process."""
    start = time.monotonic()
    history: list[list[Look]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [fork_rank(job, rank, ranks, folder, debug) for rank in range(ranks)]
        try:
            wait_until(lambda: all(is_ready(folder, *one) for one in enumerate(processes)))
            while not decided(history, processes) and len(history) < 300:
                time.sleep(0.1)
                history.append([look_at(folder, *one) for one in enumerate(processes)])
                if len(history) == 8:
                    (folder / "stop").touch()  # for jobs that wait for it
            seconds = time.monotonic() - start
            printed = [(folder / f"{rank}.txt").read_text() for rank in range(ranks)]
            probed = probe(processes) if probe else None
        finally:
            for process in processes:
                process.kill()
                process.wait()
    blamed = sum(who_waits_for_whom(looks).ranks != [] for looks in history)
    verdict = who_waits_for_whom(history[-1])
    return Watched(verdict, history[-1], blamed, len(history), seconds, printed, probed)


def decided(history: list[list[Look]], processes: list[psutil.Process]) -> bool:
    """Whether a job hangs, or is over on all ranks."""
    if not hangs(history, processes):
        return False
    states = [look.state for look in history[-1]]
    over = "running" not in states or "raised" in states
    return over or who_waits_for_whom(history[-1]).ranks != []


def look_at(folder: Path, rank: int, process: psutil.Process) -> Look:
    """Ask a rank's black box, if the rank lives."""
    (folder / f"{rank}.look").unlink(missing_ok=True)
    if exitcode_of(process) is None:
        process.send_signal(signal.SIGUSR1)
        wait_until(lambda: is_ready(folder, rank, process))
    if (folder / f"{rank}.look").exists():
        return pickle.loads((folder / f"{rank}.look").read_bytes())
    return Look("dead", exitcode=exitcode_of(process))


def is_ready(folder: Path, rank: int, process: psutil.Process) -> bool:
    return (folder / f"{rank}.look").exists() or exitcode_of(process) is not None


def exitcode_of(process: psutil.Process) -> int | None:
    """A dead child's exit code, -9 if SIGKILL ended it; it stays a zombie, and keeps its number."""
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def wait_until(done: Callable[[], bool]) -> None:
    for _ in range(30_000):
        if done():
            return
        time.sleep(0.002)
    raise TimeoutError("a rank gave no answer in 60 s")


# %% [markdown]
# And a rank of a job, from its first line to the last, which it never reaches: a rank that has
# finished stays, so that it can be asked.


# %%
def fork_rank(job: Callable, rank: int, ranks: int, folder: Path, debug: str) -> psutil.Process:
    """Start a rank of a job."""
    parent = os.getpid()
    child = os.fork()
    if child > 0:
        return psutil.Process(child)
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # its threads inherit that
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() == parent:
            os.chdir(folder)
            live_as_rank(job, rank, ranks, debug)
    finally:
        os._exit(1)


def live_as_rank(job: Callable, rank: int, ranks: int, debug: str) -> None:
    """Join a group of gloo's, do the job, and stay."""
    file = os.open(f"{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.register(signal.SIGUSR2, file=2)
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = debug
    dist.set_debug_level_from_env()
    store = dist.FileStore("store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    if store.add("joined", 1) == ranks:
        store.set("all joined", "")
    store.wait(["all joined"])  # nobody may die while another still connects
    box = BlackBox(Path(f"{rank}.look"))
    box.start()
    try:
        job(rank, rank == min(GUILTY, ranks - 1))
        box.state = "finished"
    except Exception as error:
        os.write(2, traceback.format_exc().encode())
        box.error = error
        box.state = "raised"
    while True:
        time.sleep(60)


# %% [markdown]
# ## What you should have seen
#
# 1. In six. Only the wrong dtype, whose 8 bytes do not fit where 4 are awaited, and the dead rank
#    end in messages at once. The six would print something after the group's timeout, 30 minutes
#    for gloo and 10 for NCCL. Five elements next to four hang on four ranks; other sizes and other
#    numbers of ranks crash as the dtype does, since it depends on how gloo cuts a tensor. Sending
#    first hangs on gloo at every size, on NCCL above its buffer's only: such a job passes its test
#    and hangs with the real model.
# 2. None. They say "Connection closed by peer" and an address, and one rank says nothing and waits
#    on: in this all-reduce it exchanges nothing with the dead one. What names the rank is
#    the launcher, who sees exit code -9, and the report.
# 3. In all eight, and the line, too. In seven the rank's own place is enough; a dead one has none,
#    so the line is the one where its peers miss it.
# 4. Both. Each has made one call that the other has not. A debugging run therefore wants three
#    ranks.
# 5. Never. Yet most single looks would have blamed the slow one. If you run py-spy once, you see
#    three ranks in an all-reduce, in a healthy job as well. Look twice, and compare.
# 6. On all 11. Without `join` the fourth rank's missing batch hangs the job; other cures drop the
#    last batches, or repeat some (07_distributed_sampler), or agree on the number of steps
#    beforehand.
#
# **Try.** Without dtypes nobody is blamed: every rank has made "the same" call. Without the vote,
# all four ranks of a circle are blamed alike; right are only the jobs without one through all
# ranks: the dead rank, and the two that send first.
#
# py-spy, faulthandler and the black box agree on the line. monitored_barrier and DETAIL name the
# rank without a stack; torch's analyzer names it from the records alone.
#
# **At a thousand ranks** nobody reads stacks: group equal ones and look at the smallest group,
# which is this lesson's vote. Torch has the black box as well, as a web server in every rank
# (`torch.distributed.debug`, experimental). Keep it from strangers: it shows memory.


# %%
def main() -> None:
    command_line()
    if WORLD_SIZE > 1:
        refuse(f"needs 1 rank, for it starts its own; got {WORLD_SIZE}; run it with plain python")
    if sys.platform != "linux":
        refuse(f"needs Linux, which tells what a thread computes; got {sys.platform}")
    if not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"):
        refuse(f"needs a flight recorder for gloo; got torch {torch.__version__}; take a newer one")
    print(f"torch {torch.__version__}, gloo, {RANKS} ranks per job\n")
    importlib.import_module("torch._dynamo")  # DDP would import it, in every child
    name_all_eight()
    check_doubt()
    check_tools()
    check_cure()
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
