"""Launching processes: torchrun, rank and world size, the first collective
========================================================================

**Question.** What happens between typing `torchrun train.py` and the moment when its processes
first exchange data, and how does such a job end?

**Predict**, and write it down before you run:

1. A program has ten lines. Every process, a *rank*, puts its own number into a tensor, and an
   all-reduce adds the tensors up. Started as four ranks, 0 to 3, what does each print?
2. torchrun tells each process who it is by some twenty environment variables. How many of these
   must a process have in order to find the others, and to know which one it is?
3. torchrun runs on two machines and starts two processes on each. It numbers all four from 0 (the
   *rank*), and on each machine the two from 0 (the *local rank*). Which rank has local rank 1 on
   the second machine?
4. On CPUs one of four ranks skips the line `dist.all_reduce(x)` and goes on to its next line. How
   many of the four ranks come past the line that it skips?
5. One of four ranks dies of an error. The other three are healthy and wait for nobody. How many of
   these three come to the end of their program?

**Run.** Type one of these lines in this file's folder, or `course run fundamentals/02` in any. The
ranks use NCCL on 4 GPUs, else gloo.

    torchrun --standalone --nproc-per-node=4 02_launching_processes.py
    python 02_launching_processes.py

Not run on several GPUs.

**Try.** In `HELLO` write `dist.barrier()` for `dist.all_reduce(x)`: which two claims fail? Undo it,
and write `if RANK >= 0:` for `if RANK > 0:` in section 5: which one now?

**Before.** Nothing but PyTorch on one device.

**Next.** exercises/00_first_collectives, ten short functions; exercises/01_hello_ranks; then
communication/01_nccl_collectives.py: what ranks can say to each other in one call. What a launcher
is made of, and who ends ranks whose launcher was killed, can wait: fundamentals/08.
"""

import argparse
import ctypes
import json
import logging
import math
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist

# A *rank* is one of WORLD_SIZE processes that run this same file (section 1). `claim(text,
# predicted, measured)` prints one row of the ledger and must be called by every rank. It, `setup`,
# `print0`, `blocked` and `finish` stand at this file's end, the same in every lesson; you need not
# read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# %% [markdown]
# ## 1. A complete distributed program
#
# Here is all that a distributed program needs. Put it into a file `hello.py` and type
# `torchrun --standalone --nproc-per-node=4 hello.py`. **torchrun** is a launcher: it starts the
# same file four times, as four ordinary Python processes that share nothing, not one variable.
#
# - The program never says how many processes there are or which of them it is. Each process reads
#   that from its environment, where torchrun has put it.
# - `init_process_group` finds the other processes and connects to them. When it returns, all have
#   arrived (on gloo, and on NCCL from torch 2.15 on). `"gloo"` names the **backend**, the library
#   that moves tensors: gloo between CPUs, `"nccl"` between NVIDIA GPUs.
# - The **rank** is the number of this process, from 0; the **world size** is how many there are.
# - `x` is an ordinary tensor, and each process has its own: [0.] on rank 0, [1.] on rank 1.
# - `all_reduce` is a **collective**: a call that every rank must make. It adds up all ranks' `x`
#   and leaves the sum in `x`, on every rank. A rank that comes first waits for the others.
# - `print` runs in every process, so four lines appear, in any order.
# - `destroy_process_group` says goodbye. Without it a finished program sometimes crashes at exit.
#
# On GPUs three things differ: `"nccl"`, first
# `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))`, and `device="cuda"` where `x` is made.

# %%
HELLO = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
world_size = dist.get_world_size()
x = torch.tensor([float(rank)])
dist.all_reduce(x)
print(f"I am rank {rank} of {world_size}, and the ranks sum to {x.item():g}", flush=True)
dist.destroy_process_group()
"""

# %% [markdown]
# This lesson runs as several ranks itself, four if you started it with plain `python`. Its rank 0
# types the command for you: it starts another torchrun, with four ranks. Then `from_rank_0` hands
# the lines that these print to the other ranks of the lesson, because every rank must call `claim`.
# `torchrun`, `start` and `lines_of` stand in section 7: a command, a process that runs it, and the
# lines that this prints.


# %%
def say_hello() -> None:
    """Run the program with torchrun, as four ranks, from rank 0 of this lesson."""
    lines = []
    if RANK == 0:
        lines = lines_of([start(torchrun("--standalone", "--nproc-per-node=4", program=HELLO))])
    lines = from_rank_0(lines)
    for line in lines:
        print0(f"     {line}")
    sums = [float(line.split()[-1]) for line in lines]
    furthest_off = max(sums, key=lambda printed: abs(printed - 6), default=0)
    claim("each of four ranks prints 0 + 1 + 2 + 3", 6, furthest_off, question=1)


# %% [markdown]
# Data-parallel training is this program with a model. Every rank starts from the same weights and
# takes other examples; the all-reduce makes the gradients the same, so the weights stay the same:
#
#     loss_of(model(my_x), my_target).backward()
#     for parameter in model.parameters():
#         dist.all_reduce(parameter.grad)
#         parameter.grad /= world_size
#     optimizer.step()
#
# parallelism/01_data_parallelism_ddp.py does that, and checks it.

# %% [markdown]
# ## 2. The words
#
# Two machines with two GPUs each. One process per GPU:
#
#     node 0 (host a)                              node 1 (host b)
#
#     torchrun + store   <------ meets here -----  torchrun
#        |                                            |
#        +-- rank 0   local rank 0   GPU 0 of a       +-- rank 2   local rank 0   GPU 0 of b
#        +-- rank 1   local rank 1   GPU 1 of a       +-- rank 3   local rank 1   GPU 1 of b
#
# | Word | What it means |
# |---|---|
# | **rank** | one of the processes of a job, and its number, from 0 |
# | **world size** | the number of ranks |
# | **launcher** | the program that starts the ranks of a node and watches them, such as torchrun |
# | **node** | one machine; more exactly, what one launcher looks after |
# | **local rank** | a rank's number on its node: which GPU to take |
# | **store** | a small server at which all ranks of a job meet, at MASTER_ADDR:MASTER_PORT |
# | **group** | some of the ranks, connected; the *default group* has all of them |
#
# And two words of this course. A **ledger row** is one line that a lesson prints when it checks a
# claim: what was predicted, what was measured, and PASS or FAIL. A number in front of the claim
# says which question of *Predict* it answers; the worst of all ranks is shown. **BLOCKED** marks
# what this machine cannot answer, and says what it would need, such as "2 GPUs".
#
# The next rows are about the lesson's own ranks. Each is a process of its own, on a GPU of its own
# if there are enough of them; `device` is that GPU, or the CPU.


# %%
def own_ranks(device: torch.device) -> None:
    host = platform.node()
    processes = set(gather_objects((host, os.getpid())))
    claim("processes that run this lesson", WORLD_SIZE, len(processes))
    x = torch.tensor([float(RANK)], device=device)
    dist.all_reduce(x)
    claim("this lesson's ranks, summed by all_reduce", sum(range(WORLD_SIZE)), x.item())
    if device.type == "cpu":
        blocked("different GPUs that these ranks use", needs="2 GPUs")
        return
    gpus = set(gather_objects((host, torch.cuda.current_device())))
    claim("different GPUs that these ranks use", WORLD_SIZE, len(gpus))


# %% [markdown]
# ## 3. What torchrun tells each rank
#
# A launcher starts the processes, and tells each by **environment variables** who it is:
#
# | Variable | What it tells the rank |
# |---|---|
# | RANK, WORLD_SIZE | who am I, of how many |
# | MASTER_ADDR, MASTER_PORT | where is the store |
# | LOCAL_RANK, LOCAL_WORLD_SIZE | the same on this node: which GPU is mine |
# | GROUP_RANK | the number of my node |
#
# torchrun sets twelve more, for special cases. `LOCAL_RANK` is the GPU's number only if each
# process sees all GPUs of its node.
#
# Which of them does `init_process_group` need? Hide one variable of the table after the other, and
# count those without which its first step fails, which is to connect to the store.


# %%
TOLD_BY_TORCHRUN = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
TOLD_BY_TORCHRUN += ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"]


def what_a_rank_needs() -> None:
    needed = 0
    for name in TOLD_BY_TORCHRUN:
        hidden = os.environ.pop(name, "")
        try:
            next(dist.rendezvous("env://"))  # connects to the store, as init_process_group does
        except ValueError:
            needed += 1
        os.environ[name] = hidden
    claim("variables without which a rank cannot join", 4, needed, question=2)


# %% [markdown]
# ## 4. Two nodes
#
# On several nodes, run one torchrun per node, with the same command on each. The launchers find
# each other (a **rendezvous**) at one address, in any order:
#
#     torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=a:29500 \
#              --nproc-per-node=8 train.py
#
# The torchrun on host a serves a small store there. The lesson does the same on this machine: two
# torchruns, of two ranks each, run the program of section 1, and then each rank prints what it was
# told. Here the lesson serves that store, and tells both so (`is_host=0`). On Slurm,
# launch/slurm.sbatch starts one torchrun per node.

# %%
TOLD = """
import os
names = ["RANK", "GROUP_RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]
print("told", *[os.environ[name] for name in names], flush=True)
"""


def two_torchruns() -> list[str]:
    """Run the program as two nodes of two ranks; return the lines that all four print."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{store.port}"]
    meet.append("--rdzv-conf=is_host=0,join_timeout=60")
    command = torchrun("--nnodes=2", "--nproc-per-node=2", *meet, program=HELLO + TOLD)
    return lines_of([start(command), start(command)])


def two_torchruns_make_one_world() -> None:
    lines = []
    if RANK == 0:
        lines = two_torchruns()
    lines = from_rank_0(lines)
    sums = [float(line.split()[-1]) for line in lines if line.startswith("I am")]
    claim("ranks of two launchers' four that print 6", 4, sums.count(0 + 1 + 2 + 3))
    rank_at = {}
    stores = set()
    for line in sorted(line for line in lines if line.startswith("told")):
        _, rank, node, local_rank, host, port = line.split()
        print0(f"{'':13}rank {rank}: node {node}, local rank {local_rank}, store {host}:{port}")
        rank_at[node, local_rank] = int(rank)
        stores.add((host, port))
    claim("rank with local rank 1 on the second node", 3, rank_at.get(("1", "1"), -1), question=3)
    claim("stores at which the four would meet", 1, len(stores))


# %% [markdown]
# ## 5. One rank skips the call
#
# A collective is for all. The classic mistake puts it behind an `if`:
#
#     if rank > 0:
#         dist.all_reduce(x)
#
# No rank does anything that is wrong by itself, and no error is printed. The ranks that make the
# call wait, for as long as the group's **timeout**: 30 minutes on gloo, 10 on NCCL. Then they die.
# The lesson makes the mistake in a group of its own, whose timeout is 3 seconds, and catches the
# error. That group is of no use afterwards; the default group is as before.


# %%
def one_rank_skips_the_call() -> None:
    group = dist.new_group(timeout=timedelta(seconds=3), backend="gloo")
    dist.barrier(group)  # all are connected now
    x = torch.tensor([float(RANK)])
    came_past = 1
    said = ""
    try:
        if RANK > 0:  # the mistake
            dist.all_reduce(x, group=group)
    except RuntimeError as error:
        came_past = 0
        said = str(error)
    words = gather_objects(said)[-1].rpartition("] ")[2]
    print0(f"{'':13}the last rank says: {words:.65}")
    claim("ranks that come past the all-reduce", 1, sum(gather_objects(came_past)), question=4)


# %% [markdown]
# ## 6. How a job ends
#
# | What happens | Who ends the ranks |
# |---|---|
# | all come to their last line | each ends by itself, and torchrun exits with 0 |
# | a rank raises an exception, or crashes | torchrun: it ends the others and exits with 1 |
# | a rank waits for one that never comes | the timeout ends that rank, then torchrun the others |
# | Ctrl-C, or SIGTERM, to torchrun | torchrun passes it on to its ranks |
# | `kill -9` hits torchrun itself | nobody, unless the ranks took care (fundamentals/08) |
#
# Here rank 1 dies while the others have work for half a minute. They need no torch and no group:
# torchrun starts any program, and looks after processes.

# %%
DIES = """
import os, sys, time

if os.environ["RANK"] == "1":
    sys.exit("out of memory")
time.sleep(30)  # the others train
print("trained to the end", flush=True)
"""


def one_rank_dies() -> None:
    ended = None
    if RANK == 0:
        process = start(torchrun("--standalone", "--nproc-per-node=4", program=DIES))
        printed, complaint = process.communicate(timeout=250)
        ended = (process.returncode, printed.count("to the end"), complaint)
    status, at_the_end, complaint = from_rank_0(ended)
    claim("torchrun's exit status when one rank has died", 1, status)
    claim("healthy ranks that come to their end", 0, at_the_end, question=5)
    named = re.search(r"Root Cause.*?rank +: (\d+)", complaint, re.DOTALL)
    claim("rank that torchrun names as the root cause", 1, int(named[1]) if named else -1)


# %% [markdown]
# ## 7. How it is measured
#
# Rank 0 alone starts torchruns, reads what their ranks print, and broadcasts it. Whether a rank
# came past a line or to its end is what it printed, or gathered, afterwards. All that is started
# here asks to be ended with the process that started it (`END_WITH_PARENT`, which fundamentals/08
# explains), so nothing stays behind if you press Ctrl-C.

# %%
DIE = "import ctypes; ctypes.CDLL(None).prctl(1, 9)\n"
END_WITH_PARENT = DIE if sys.platform == "linux" else ""
RUN = "from torch.distributed.run import main; main()"  # what the command `torchrun` does
OURS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
OURS += ("PYTHONUNBUFFERED",)  # which would print a line in two parts, to be mixed up


def torchrun(*options: str, program: str) -> list[str]:
    """The command that launches a program, given as text, on this machine."""
    launcher = [sys.executable, "-c", END_WITH_PARENT + RUN, "--local-addr=localhost"]
    return [*launcher, *options, "--no-python", sys.executable, "-c", END_WITH_PARENT + program]


def start(command: list[str]) -> subprocess.Popen:
    """Start it without the variables by which it would take itself for a rank of this lesson."""
    told = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=told, stdout=pipe, stderr=pipe, text=True)


def lines_of(processes: list[subprocess.Popen]) -> list[str]:
    """Wait for these to end well; return the lines that they printed."""
    lines = []
    for process in processes:
        printed, complaint = process.communicate(timeout=250)
        if process.returncode != 0:
            sys.exit(complaint)
        lines += printed.splitlines()
    return lines


def from_rank_0(value: object) -> object:
    """Return rank 0's `value` on every rank."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


# %% [markdown]
# ## What you should have seen
#
# 1. Each prints 6, which is 0 + 1 + 2 + 3. Only the all-reduce moved data between the processes, a
#    few bytes per rank. The lines come in any order: processes take no turns to print.
# 2. Four: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. A launcher is anything that starts n
#    processes, tells each these four, and sees to it that somebody serves the store.
# 3. Rank 3: torchrun numbers node by node, so ranks that are neighbors in number share a node. That
#    is why tensor parallelism, which talks most, takes consecutive ranks.
# 4. One, the rank that skipped it: the three that did nothing wrong wait until the timeout. On GPUs
#    `all_reduce` returns at once, and a rank stops at the next line that needs the sum, while
#    `nvidia-smi` shows a busy GPU: it is busy waiting. profiling/04_debugging_hangs.py finds the
#    rank that is to blame.
# 5. None. torchrun looks at its ranks ten times a second. When one has failed, it sends SIGTERM to
#    the others, SIGKILL half a minute later to those that are still there, and exits with 1. Read
#    its *Root Cause* first: ranks that lose a peer die of errors that name no cause.
#
# **Try.** A barrier adds up nothing, and each rank of `HELLO` prints its own number: "each of four
# ranks prints 0 + 1 + 2 + 3" and "ranks of two launchers' four that print 6" fail. If rank 0 makes
# the call as well, all come past it: "ranks that come past the all-reduce" fails.
#
# With a thousand ranks the same things happen, but the store answers a thousand clients, the import
# of Python packages from a shared disk takes minutes, and some node always fails. Then one death
# ends the work of all, unless the job writes checkpoints and is started again
# (fundamentals/07_training_that_survives.py).


# %%
def main() -> None:
    command_line()
    launch()
    device = setup()
    say_hello()
    own_ranks(device)
    what_a_rank_needs()
    two_torchruns_make_one_world()
    one_rank_skips_the_call()
    one_rank_dies()
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
