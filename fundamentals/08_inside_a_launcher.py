"""Inside a launcher: start ranks, let them meet at a store, end them
==================================================================

**Question.** What does a launcher such as torchrun do? How does it start ranks, how do these find
each other, and who ends them when the launcher itself is killed?

**Predict**, and write it down before you run:

1. `kill -9` hits a torchrun that runs two ranks. How many of the two ranks are left?
2. Each rank writes its own number into the store under the key "leader", but only if nothing is
   there yet, and gets back what is there now. All do so at the same time. How many different
   answers do they get?
3. `dist.new_group` makes a group of the even ranks of four, 0 and 2. Which number has rank 2 in it?
4. A process forks while a thread of it holds a lock; then that thread lets go of it. Does the
   forked child get the lock?

**Run.**

    torchrun --standalone --nproc-per-node=4 08_inside_a_launcher.py   # NCCL on 4 GPUs, else gloo
    python 08_inside_a_launcher.py                                     # the same, started for you

Not run on several GPUs.

**Try.** Remove the line with `store.wait` from `barrier`: which claim fails? In section 4, ask
`dist.get_rank()` instead of `dist.get_rank(group)`: which one now?

**Before.** fundamentals/02_launching_processes.py: torchrun, and the variables that it sets.

**Next.** fundamentals/06_scaling_efficiency.py: what n ranks are worth. How a job goes on after it
was ended: 07_training_that_survives.py.
"""

import argparse
import ctypes
import json
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; see section 6.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# %% [markdown]
# ## 1. A launcher in twenty lines
#
# A launcher has three things to do: it **starts** the ranks and tells each who it is, it gives them
# a place to **meet**, and it watches them, to **end** all when one has failed. On one node that
# takes twenty lines:
#
# - The place to meet is the **store**, a small server. On port 0 the kernel picks a port that is
#   free. (Never pick one yourself: what was free when you looked may be taken when you open it.)
# - A rank is a process with four variables in its environment. A fifth says that the launcher
#   serves the store; otherwise rank 0 would.
# - `poll` returns nothing while a process runs, and its exit status afterwards: 0 if all went well,
#   a negative number, the signal's, if a signal ended it.


# %%
def launch_by_hand(program: str, ranks: int) -> tuple[list[int], list[str]]:
    """Run a program as so many ranks; return their exit statuses, and the lines they printed."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    processes = []
    for rank in range(ranks):
        environment = without_ranks()
        environment |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
        environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
        environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        command = [sys.executable, "-c", END_WITH_PARENT + program]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE))
    statuses = [None]
    while None in statuses:
        statuses = [process.poll() for process in processes]
        if any(status not in (None, 0) for status in statuses):
            for process in processes:
                process.terminate()  # SIGTERM, if it still runs
        time.sleep(0.1)
    return statuses, [process.communicate()[0].decode().strip() for process in processes]


# %% [markdown]
# torchrun does the same, and more: it finds the launchers of other nodes (**rendezvous**), with
# `--max-restarts` it starts all ranks again, it passes Ctrl-C and SIGTERM on to them, and to a rank
# that ignores SIGTERM it sends SIGKILL.
#
# Two programs show that the twenty lines work. In the first the ranks meet and add up their
# numbers. In the second one of four ranks dies, and the launcher ends the three that are healthy.

# %%
HELLO = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.tensor([float(dist.get_rank())])
dist.all_reduce(x)
print(x.item(), flush=True)
dist.destroy_process_group()
"""
DIES = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(1)
time.sleep(20)
"""


def a_launcher_by_hand() -> None:
    found = None
    if RANK == 0:
        _, lines = launch_by_hand(HELLO, 2)
        statuses, _ = launch_by_hand(DIES, 4)
        found = (lines, statuses)
    lines, statuses = from_rank_0(found)
    claim("ranks of two launched by hand that print 0 + 1", 2, lines.count("1.0"))
    ended = statuses.count(-signal.SIGTERM)
    claim("launched by hand: healthy ranks that are ended", 3, ended)


# %% [markdown]
# ## 2. torchrun, and what becomes of its ranks if it is killed
#
# Here is all that torchrun adds to a rank's environment. `OMP_NUM_THREADS` is added only where a
# node has several ranks and nobody has set it. Do not ask `TORCHELASTIC_RESTART_COUNT` whether to
# load a checkpoint: it stays 0 when ranks restart because a node came or went, and a job that Slurm
# queues again starts at 0. The rule is: if a checkpoint exists, load it.

# %%
SET_BY_TORCHRUN = {
    "RANK WORLD_SIZE": "who am I, of how many",
    "MASTER_ADDR MASTER_PORT": "where the store is",
    "LOCAL_RANK LOCAL_WORLD_SIZE": "the same on this node: my GPU",
    "GROUP_RANK GROUP_WORLD_SIZE": "number of my node, of how many",
    "ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE": "for jobs with ranks of several sorts",
    "OMP_NUM_THREADS": "1 if unset: ranks share the cores",
    "TORCHELASTIC_RUN_ID": "the job's name (--rdzv-id)",
    "TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS": "restarts so far, and at most",
    "TORCHELASTIC_USE_AGENT_STORE": "the launcher serves the store",
    "TORCHELASTIC_ERROR_FILE": "where @record leaves a traceback",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "signals that the launcher passes on",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "NCCL's watchdog ends a stuck rank",
}
NAMES = " ".join(SET_BY_TORCHRUN).split()

# %% [markdown]
# Clusters often start ranks by `srun` or `mpirun` instead, one task per rank. The names differ, and
# **neither sets an address at which to meet**: take the first host of the job (`scontrol show
# hostnames`). `launch/slurm.sbatch` starts one torchrun per node, which does; the first lines of
# `launch/distributed_hello.py` translate Slurm's names for a script that `srun` starts.
#
# | `torchrun` | `deepspeed` | `mpirun` (Open MPI) | `srun` (Slurm) |
# |---|---|---|---|
# | RANK | RANK | OMPI_COMM_WORLD_RANK | SLURM_PROCID |
# | WORLD_SIZE | WORLD_SIZE | OMPI_COMM_WORLD_SIZE | SLURM_STEP_NUM_TASKS, SLURM_NTASKS |
# | LOCAL_RANK | LOCAL_RANK | OMPI_COMM_WORLD_LOCAL_RANK | SLURM_LOCALID |
# | MASTER_ADDR, MASTER_PORT | the same | not set | not set |
#
# **Who ends the ranks if the launcher is killed?** Nobody can catch SIGKILL, which `kill -9` and
# the out-of-memory killer send, so a launcher that is killed ends nobody. Its ranks have sessions
# of their own, out of the terminal's reach. They live on, and hold their GPUs' memory. Linux offers
# a remedy that a process must ask for itself: `prctl(PR_SET_PDEATHSIG, SIGKILL)`, "kill me when
# what started me ends". The plumbing of these lessons does, and so does all that they start.
#
# Two torchruns with two ranks each show both. A rank prints the names of its variables, and then
# reads: that ends when the lesson closes the pipe.

# %%
if sys.platform == "linux":
    END_WITH_PARENT = "import ctypes; ctypes.CDLL(None).prctl(1, 9)\n"  # PR_SET_PDEATHSIG, SIGKILL
else:
    END_WITH_PARENT = ""
RUN = "from torch.distributed.run import main; main()"  # what the command `torchrun` does
WAITS = """
import os, sys
print(*os.environ, flush=True)
sys.stdin.read()
print("still here", flush=True)
"""


class Job:
    """A torchrun with two ranks that wait."""

    def __init__(self, program: str) -> None:
        options = ["--standalone", "--local-addr=localhost", "--nproc-per-node=2", "--no-python"]
        torchrun = [sys.executable, "-c", END_WITH_PARENT + RUN, *options]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [*torchrun, sys.executable, "-c", program]
        self.launcher = subprocess.Popen(command, env=without_ranks(), text=True, **pipes)

    def told(self) -> list[set[str]]:
        """Wait until both ranks have started; return the names of each one's variables."""
        lines = [self.launcher.stdout.readline() for _ in range(2)]
        if not all(lines):
            sys.exit(self.launcher.stderr.read())
        return [set(line.split()) for line in lines]

    def left(self) -> int:
        """Kill the launcher as `kill -9` does; count the ranks that are still there afterwards."""
        self.launcher.kill()
        self.launcher.wait()
        self.launcher.stdin.close()  # those that are left may go now, and say so
        return self.launcher.stdout.read().count("still here")


def two_jobs() -> tuple[list[set[str]], int, int]:
    """Return what two ranks were told, and how many are left of ranks that are loose, or tied."""
    loose = Job(WAITS)
    tied = Job(END_WITH_PARENT + WAITS)
    told = loose.told() + tied.told()
    return told, loose.left(), tied.left()


def launchers_that_are_killed() -> None:
    if sys.platform != "linux":
        blocked("a launcher that is killed", needs="a system library: Linux's prctl")
        return
    found = None
    if RANK == 0:
        found = two_jobs()
    told, loose, tied = from_rank_0(found)
    added = [names - set(without_ranks()) for names in told]
    claim("torchrun: ranks told the list, and nothing else", 4, added.count(set(NAMES)), rank=0)
    claim("ranks left when their launcher is killed", 2, loose, question=1)
    claim("ranks left, if they asked to be killed with it", 0, tied)


# %% [markdown]
# ## 3. Where ranks meet: the store
#
# The store is a dictionary that all ranks reach over TCP. Its address is in every rank's
# environment, so connecting to it takes one line and no group. It holds a few hundred bytes per
# rank; tensors never pass through it. Four operations are enough to number ranks, to elect one, and
# to make a barrier:
#
# - `set(key, value)` writes; `wait([keys])` blocks until the keys are there.
# - `add(key, k)` adds to a counter and returns the new sum, in one step: no two ranks ever get
#   the same number.
# - `compare_set(key, old, new)` writes only if the value is still `old`, and returns what is there
#   now. If several ranks try, the first one wins, and all learn its name.


# %%
def barrier(store: dist.Store, name: str, n: int) -> None:
    """Return once `n` ranks have called this with the same name, which serves once."""
    if store.add(f"{name}/arrived", 1) == n:
        store.set(f"{name}/open", "yes")
    store.wait([f"{name}/open"])


def open_store() -> dist.Store:
    """Connect to the store whose address is in the environment."""
    host = os.environ["MASTER_ADDR"]
    store = dist.TCPStore(host, int(os.environ["MASTER_PORT"]), is_master=False)
    return dist.PrefixStore("lesson", store)  # "lesson/" goes before each key: ours stay apart


def ranks_meet_at_a_store() -> None:
    store = open_store()
    tickets = set(gather_objects(store.add("tickets", 1)))
    claim("different tickets that add() gave to n ranks", WORLD_SIZE, len(tickets))
    leader = store.compare_set("leader", "", str(RANK))  # "": nobody has written yet
    leaders = set(gather_objects(leader))
    claim("leaders that compare_set lets n ranks elect", 1, len(leaders), question=2)

    time.sleep(0.3 * RANK / WORLD_SIZE)  # the ranks arrive one by one
    store.add("arrived", 1)
    barrier(store, "door", WORLD_SIZE)
    claim("ranks that had arrived when this one left", WORLD_SIZE, store.add("arrived", 0))


# %% [markdown]
# ## 4. From the store to a group
#
# A store could carry an all-gather: write your value, read the others'. That makes n x n reads, all
# answered by one server. A **process group** uses the store only to exchange addresses. Then its
# members connect with each other (gloo over TCP; NCCL over NVLink, PCIe or InfiniBand), and tensors
# go straight across. `dist.new_group(ranks)` makes a smaller group. Two rules catch everybody once:
#
# - **Every** rank of the default group must call it, members or not, and all in the same order.
#   Each rank counts its calls of `new_group`, and the count becomes the group's name in the store.
#   A rank that skips a call is not noticed at once. But at the next call it looks for its peers
#   under one name, while they wait for it under another.
# - Members are numbered anew from 0, yet `src=` and `dst=` still mean the **global** rank. For the
#   number inside the group there are `group_src=` and `group_dst=`.


# %%
def a_group_is_a_numbering(device: torch.device) -> None:
    even_ranks = list(range(0, WORLD_SIZE, 2))
    group = dist.new_group(even_ranks)  # the others get a token that says: you are not in it
    x = torch.tensor(float(RANK), device=device)
    expected_number = -1
    expected_x = RANK
    if RANK in even_ranks:
        dist.broadcast(x, src=even_ranks[-1], group=group)
        expected_number = RANK // 2
        expected_x = even_ranks[-1]
    number = dist.get_rank(group)
    claim("number among the even ranks, -1 outside", expected_number, number, question=3)
    claim("broadcast by the last of them, own rank outside", expected_x, x.item())


# %% [markdown]
# On GPUs a group costs more than a number. NCCL makes a **communicator**: it finds the paths
# between the GPUs, opens connections, and takes buffers on each GPU. Since NCCL 2.22 connections
# are made in the first collective that needs them, not with the group, so the first call is many
# times slower than the second. That is why benchmarks warm up, and why a job with hundreds of
# groups runs short of memory.
#
# torch 2.15's backend "nccl" is a new implementation, ProcessGroupNCCL2, and its messages differ
# from what is written about the old one; `TORCH_DIST_USE_NCCL2=0` brings that back. The new one
# binds a group to one GPU at init: the one that `device_id` says, else that of LOCAL_RANK, else the
# rank modulo the number of GPUs. A tensor on any other GPU is refused: "ProcessGroupNCCL is bound
# to device cuda:1". Forget `set_device`, and these are the last words of every rank but 0.


# %%
def cost_of_a_group(device: torch.device) -> None:
    if device.type == "cpu" or WORLD_SIZE == 1:
        blocked("ms and MB that a new NCCL group costs", needs="2 GPUs")
        return
    x = torch.ones(1, device=device)
    torch.cuda.synchronize()
    free_before, _ = torch.cuda.mem_get_info()
    group = dist.new_group()
    seconds = []
    for _ in range(2):
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        dist.all_reduce(x, group=group)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    free_after, _ = torch.cuda.mem_get_info()
    first, second = seconds
    times = f"first all-reduce {first * 1e3:.1f} ms, second {second * 1e3:.2f} ms"
    print0(f"{'':13}a new group, a {type(group._get_backend(device)).__name__}: {times}")
    print0(f"{'':13}and {(free_before - free_after) / 1e6:.0f} MB of this GPU's memory")
    claim("NCCL: first all-reduce / second", 3, first / second, ">=", timed=True)


# %% [markdown]
# ## 5. Starting ranks from inside a program: fork and spawn
#
# A launcher starts programs. DataLoader workers, or a quick experiment in one file, are started
# from inside Python, in one of two ways.
#
# **fork** copies the process, and takes no time. But of its threads only the one that forked comes
# along, while locks stay as they were: a lock that another thread held stays locked in the child,
# and the thread that would release it does not exist there. A rank has many threads, so a forked
# child may hang in its first matrix product; and CUDA, once used, refuses ("Cannot re-initialize
# CUDA in forked subprocess"). Fork before there are threads, as a *forkserver* does, or spawn.


# %%
def fork_beside_a_thread() -> tuple[int, bool, bool]:
    """Return the threads in a forked child, and whether it and its parent get a freed lock."""
    lock = threading.Lock()
    held = threading.Event()
    forked = threading.Event()

    def hold_it_across_the_fork() -> None:
        with lock:
            held.set()
            forked.wait()

    def in_the_child() -> None:
        got_it = lock.acquire(timeout=0.3)
        answers.put((psutil.Process().num_threads(), got_it))

    fork = mp.get_context("fork")
    answers = fork.SimpleQueue()
    threading.Thread(target=hold_it_across_the_fork).start()
    held.wait()
    child = fork.Process(target=in_the_child)
    child.start()
    forked.set()
    parent_got_it = lock.acquire(timeout=60)
    child.join()
    threads, child_got_it = answers.get()
    return threads, child_got_it, parent_got_it


# %% [markdown]
# **spawn** starts a new Python, which imports your file again and gets function and arguments
# pickled. So the function must stand at the file's top level, and the code that starts processes
# behind `if __name__ == "__main__"`. `torch.multiprocessing.spawn(f, args, nprocs)` calls
# `f(i, *args)` in new processes and ends all if one fails. It tells them i and nothing else. The
# store is your business, as in section 1, and `init_process_group` takes it, rank and world size.


# %%
def spawned(index: int, port: int) -> None:
    """In each child of mp.spawn: join a group of two at the parent's store, and report there."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with the parent: section 2
    store = dist.TCPStore("localhost", port, is_master=False, timeout=timedelta(minutes=1))
    dist.init_process_group("gloo", store=store, rank=index, world_size=2)
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    store.set(f"pids heard by {index}", json.dumps(pids))
    dist.destroy_process_group()


def spawn_two() -> list[list[int]]:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    mp.spawn(spawned, args=(store.port,), nprocs=2)
    return [json.loads(store.get(f"pids heard by {index}")) for index in range(2)]


def fork_and_spawn() -> None:
    threads, child_got_it, parent_got_it = fork_beside_a_thread()
    claim("threads in a forked child", 1, threads)
    claim("forked child gets the lock that a thread freed", 0, child_got_it, question=4)
    claim("its parent gets that lock", 1, parent_got_it)
    for name in NAMES:
        os.environ.pop(name, None)  # spawned children would inherit RANK=0, and believe it
    heard = []
    if RANK == 0:
        heard = spawn_two()
    heard = from_rank_0(heard)
    members = {*heard[0], *heard[1]}
    claim("mp.spawn: processes in its children's group", 2, len(members))


# %% [markdown]
# ## 6. The plumbing, explained
#
# The last cell of every lesson is a launcher, too, and what every training script does one way or
# another:
#
# - **`launch`** makes plain `python lesson.py` work: without `RANK` in the environment it calls
#   torchrun's `main`, which starts this same file again, as ranks; in a rank it returns at once.
#   `--local-addr` spares machines whose own name does not resolve.
# - **`setup`** first asks to be ended with the launcher (section 2; a launcher killed before that,
#   while its ranks still import torch, is seen by its number, LAUNCHER). NCCL wants a GPU for each
#   rank, and ranks that choose different backends wait for each other until the timeout. So each
#   first tells the store whether its node has a GPU for each of its ranks; if only some have, all
#   end with one message. `set_device` comes before all else that uses CUDA's memory, or every rank
#   also opens a context on GPU 0. `set_float32_matmul_precision` takes back what some images set,
#   products of float32 with 10 bits of fraction (TF32).
# - **`print0`** prints on rank 0 only. **`refuse`** ends a run that cannot mean anything with one
#   message instead of n.
# - **`claim`** gathers prediction and measurement of all ranks and shows the worst, so that no rank
#   can be wrong in silence. Gathering is a collective: all ranks must call it, in the same order.
# - **`crash`** takes an exception that nobody caught. When a rank dies, its peers' collectives fail
#   too ("Connection closed by peer"), and n tracebacks hide the cause: the first to count at the
#   store speaks. Then it leaves by `os._exit`, for `sys.exit` would wait for threads that may
#   themselves wait for a peer.
# - **`finish`** meets at a barrier, since nobody should leave while a peer may need it, destroys
#   the group, and writes the ledger to the file that LESSON_JSON names, if it is set.

# %% [markdown]
# ## 7. How it is measured
#
# Rank 0 alone starts launchers and children, reads what they print, and broadcasts it, for `claim`
# must be called by every rank. All that it starts asks to end with it, except the two ranks of
# section 2 that are to outlive their launcher: they end when rank 0 closes the pipe that they read.
# Whether a rank outlived its launcher is what it printed afterwards; how a rank ended is the exit
# status that the kernel reports.


# %%
def without_ranks() -> dict[str, str]:
    """The environment without torchrun's variables, so that a child does not take itself for us."""
    hidden = (*NAMES, "TORCHELASTIC_", "PYTHONUNBUFFERED")  # a later torchrun may set more of these
    return {name: value for name, value in os.environ.items() if not name.startswith(hidden)}


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
# 1. Both, if they did nothing about it; none, if they asked the kernel to be ended with their
#    launcher. On a GPU machine look for such leftovers with `nvidia-smi` when memory is taken and
#    no job runs.
# 2. One: the first to write wins, and `compare_set` tells every rank who that was. torchrun's
#    launchers agree at a store in this way on who is in the job, whatever the order they come in.
# 3. Number 1: the group has its own numbering, 0 and 1. The two odd ranks get -1, and a collective
#    of a group that they are not in does nothing there.
# 4. No, never: the thread that would have freed the child's copy of the lock does not exist in the
#    child, which has one thread. The parent gets it at once. `mp.spawn` forks nothing: it takes
#    seconds where a fork takes milliseconds, since each child imports torch anew.
#
# **Try.** Without `store.wait` the barrier lets every rank through: "ranks that had arrived when
# this one left" fails. `dist.get_rank()` is the global rank: "number among the even ranks, -1
# outside" fails.
#
# **When to write a launcher?** Hardly ever: torchrun, or srun with one torchrun per node, has met
# the cases that twenty lines leave out. But a job that hangs before its first collective, or leaves
# processes behind, is a launcher's work gone wrong, and the three questions are always the same:
# who started this process, where does it expect to meet the others, and who ends it?


# %%
def main() -> None:
    command_line()
    launch()
    device = setup()
    a_launcher_by_hand()
    launchers_that_are_killed()
    ranks_meet_at_a_store()
    a_group_is_a_numbering(device)
    cost_of_a_group(device)
    fork_and_spawn()
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
