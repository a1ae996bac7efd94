"""Launching processes: torchrun, rank and world size, process groups
==================================================================

**Question.** What happens between typing `torchrun train.py` and the moment when its processes
first exchange data, and who ends them when something goes wrong?

**Predict**, and write it down before you run:

1. A program has ten lines. Every process, a *rank*, puts its own number into a tensor, and an
   all-reduce adds the tensors up. Started as four ranks, 0 to 3, what does each print?
2. torchrun sets 19 environment variables. How many of them must a process have in order to find
   the others, and to know which one it is?
3. torchrun runs on two machines and starts two processes on each. It numbers all four from 0 (the
   *rank*), and on each machine the two from 0 (the *local rank*). Which rank has local rank 1 on
   the second machine?
4. A process forks while a thread holds a lock; then that thread lets go of it. Does the forked
   child get the lock?
5. `kill -9` hits a torchrun that runs two ranks. How many ranks are left?

**Run.**

    torchrun --standalone --nproc-per-node=4 02_launching_processes.py   # NCCL on 4 GPUs, else gloo
    python 02_launching_processes.py                                     # the same, started for you

Not run on several GPUs.

**Try.** Remove the line with `store.wait` from `barrier`: which claim fails? In section 6, ask
`dist.get_rank()` instead of `dist.get_rank(group)`: which one now?

**Before.** Nothing but PyTorch on one device.

**Next.** exercises/00_first_collectives, ten short functions; exercises/01_hello_ranks; then
communication/01_nccl_collectives.py: what ranks can say to each other in one call. Sections 5, 7
and 8 (the store, fork and spawn, who ends the ranks) can wait for a second reading.
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

# A *rank* is one of WORLD_SIZE processes that run this same file (section 1). `claim(text,
# predicted, measured)` prints one row of the ledger and must be called by every rank. It, `setup`,
# `print0`, `blocked` and `finish` stand in the last cell, the same in every lesson; section 10
# explains them.
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
# This lesson runs as several ranks itself, four if you started it with plain `python`. Its rank 0
# types the command for you: it starts another torchrun, with four ranks. Then `from_rank_0` hands
# the lines that these print to the other ranks of the lesson, because every rank must call `claim`.
# These helpers stand in section 9: `TORCHRUN` and `PYTHON` are the parts of the command, and
# `output_of` runs it.

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


def say_hello() -> None:
    """Run the program with torchrun, as four ranks, from rank 0 of this lesson."""
    options = ["--standalone", "--local-addr=localhost", "--nproc-per-node=4"]
    lines = []
    if RANK == 0:
        lines = output_of([*TORCHRUN, *options, *PYTHON, HELLO])
    lines = from_rank_0(lines)
    for line in lines:
        print0(f"     {line}")
    sums = [last_number(line) for line in lines]
    furthest_off = max(sums, key=lambda printed: abs(printed - 6), default=0)
    claim("each of four ranks prints 0 + 1 + 2 + 3", 6, furthest_off, question=1)


# %% [markdown]
# This is data-parallel training on GPUs, in a few lines more. Every rank takes the GPU with its own
# number on this machine, starts from the same weights, and computes the gradients of other
# examples; the all-reduce makes the gradients the same, so the weights stay the same too:
#
#     device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
#     torch.cuda.set_device(device)
#     dist.init_process_group("nccl")
#     rank = dist.get_rank()
#     world_size = dist.get_world_size()
#
#     torch.manual_seed(0)  # the same weights on every rank
#     model = torch.nn.Linear(64, 10).to(device)
#     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
#     for x, target in batches:
#         my_x = x.chunk(world_size)[rank].to(device)
#         my_target = target.chunk(world_size)[rank].to(device)
#         optimizer.zero_grad()
#         torch.nn.functional.cross_entropy(model(my_x), my_target).backward()
#         for parameter in model.parameters():
#             dist.all_reduce(parameter.grad)
#             parameter.grad /= world_size
#         optimizer.step()
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
# The world size is 4. Every rank also connects to the store, at MASTER_ADDR:MASTER_PORT.
#
# | Word | What it means |
# |---|---|
# | **rank** | one of the processes of a job, and its number, from 0 |
# | **world size** | the number of ranks |
# | **launcher** | the program that starts the ranks of a node and watches them, such as torchrun |
# | **store** | a small server at which the ranks of a job meet (section 5) |
# | **node** | one machine; more exactly, what one launcher looks after |
# | **local rank** | a rank's number on its node: which GPU to take |
# | **backend** | the library that moves tensors: NCCL between GPUs, gloo between CPUs |
# | **group** | some of the ranks, connected; the *default group* has all of them |
# | **collective** | a call that all ranks of a group make together, such as `all_reduce` |
# | **bucket** | several gradients laid end to end, to be summed in one collective |
# | **shard** | one rank's share of a tensor that is split over ranks |
# | **micro-batch** | a part of a batch that goes through the model on its own |
# | **stage** | consecutive layers that live on one rank of a pipeline |
#
# And two words of this course. A **ledger row** is one line that a lesson prints when it checks a
# claim: what was predicted, what was measured, and PASS or FAIL. A number in front of the claim
# says which question of *Predict* it answers; the worst of all ranks is shown. **BLOCKED** marks
# what this machine cannot answer, and says what it would need, such as "2 GPUs".

# %% [markdown]
# ## 3. What torchrun tells each rank
#
# A launcher does two things: it starts the processes, and it tells each through its **environment
# variables** who it is. The table lists all that torchrun adds to them. Strictly, the four of the
# first two rows suffice to join the others, if rank 0 serves the store. Here the launcher does, so
# a fifth says so, `TORCHELASTIC_USE_AGENT_STORE`, which the count below leaves alone. The local
# rank chooses the GPU; the rest is for special cases. `OMP_NUM_THREADS` is added only where a node
# has several ranks and nobody has set it.
#
# Two warnings. `TORCHELASTIC_RESTART_COUNT` does not tell you whether to load a
# checkpoint: it stays 0 when ranks restart because a node came or went, and a job that Slurm
# queues again starts at 0. The rule is: if a checkpoint exists, load it. And `LOCAL_RANK` is the
# GPU's number only if each process sees all GPUs of its node.

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
# So a launcher can be written by hand, and this is one, for one node. It opens the **store**, a
# small server at which the ranks meet (section 5), on port 0: then the kernel picks a free port.
# Never pick one yourself: what was free when you looked may be taken when you bind it.
# `TORCHELASTIC_USE_AGENT_STORE` says that the launcher is the server; otherwise rank 0 would be.
#
# What torchrun adds: it watches the ranks and ends all if one fails (or, with `--max-restarts`,
# starts all again), it passes Ctrl-C and SIGTERM on, and it finds the launchers of other nodes.


# %%
def launch_by_hand(ranks: int) -> list[str]:
    """Start the program of section 1 on this node; return the lines that the ranks print."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    processes = []
    for rank in range(ranks):
        environment = without_ranks(os.environ)
        environment["RANK"] = str(rank)
        environment["WORLD_SIZE"] = str(ranks)
        environment["MASTER_ADDR"] = "localhost"
        environment["MASTER_PORT"] = str(store.port)
        environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        command = [sys.executable, "-c", END_WITH_PARENT + HELLO]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE))
    return [process.communicate()[0].decode().strip() for process in processes]


def variables_that_a_rank_needs() -> int:
    """Hide each variable from init_process_group's first step; count those it complains about."""
    needed = 0
    for name in NAMES:
        if name == "TORCHELASTIC_USE_AGENT_STORE":
            continue  # without it rank 0 would try to be the server at the launcher's port
        hidden = os.environ.pop(name, None)
        try:
            next(dist.rendezvous("env://"))  # connects to the store, as init_process_group does
        except ValueError:
            needed += 1
        if hidden is not None:
            os.environ[name] = hidden
    return needed


def a_launcher_by_hand() -> None:
    needed = variables_that_a_rank_needs()
    claim("variables without which a rank cannot join", 4, needed, question=2)
    lines = []
    if RANK == 0:
        lines = launch_by_hand(2)
    lines = from_rank_0(lines)
    sums = [last_number(line) for line in lines]
    claim("ranks of two launched by hand that print 0 + 1", 2, sums.count(0 + 1))


# %% [markdown]
# ## 4. Several nodes, and other launchers
#
# On several nodes, run one launcher per node. Either name the first node and number the nodes, or
# let the launchers find each other (a **rendezvous**) at any one address, in any order:
#
#     # static: the same on each node, but for --node-rank
#     torchrun --nnodes=2 --node-rank=0 --master-addr=a --master-port=29500 \
#              --nproc-per-node=8 train.py
#
#     # c10d: the same on each node
#     torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=a:29500 \
#              --nproc-per-node=8 train.py
#
# The lesson does the second on this machine: two launchers of two ranks each run the program of
# section 1, plus four lines in which a rank reports its environment and then waits. Of the two
# nodes, the ranks of one ask to end together with their launcher; section 8 says how and why.

# %%
REPORT = """
import json, os, sys
os.write(1, json.dumps(dict(os.environ)).encode() + b"\\n")  # in one piece: two ranks share a pipe
sys.stdin.read()  # returns when the lesson closes this pipe
print("still here", flush=True)
"""


class Node:
    """One torchrun with two ranks, a node of two."""

    def __init__(self, endpoint: str, tied: bool) -> None:
        meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--local-addr=localhost"]
        meet += ["--rdzv-conf=is_host=0,join_timeout=60"]  # the lesson serves at the endpoint
        program = HELLO + REPORT
        if tied:
            program = END_WITH_PARENT + program
        command = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=2", *meet, *PYTHON, program]
        pipe = subprocess.PIPE
        environment = without_ranks(os.environ)
        self.launcher = subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe
        )
        self.hellos: list[str] = []
        self.ranks: list[dict] = []

    def read(self) -> None:
        """Wait until both ranks have said hello and reported."""
        while len(self.ranks) < 2:
            line = self.launcher.stdout.readline().decode()
            if line.startswith("{"):
                self.ranks.append(json.loads(line))
            elif line:
                self.hellos.append(line.strip())
            else:
                sys.exit(self.launcher.stderr.read().decode())

    def survivors(self) -> int:
        """Kill the launcher as `kill -9` does; count the ranks that still live thereafter."""
        self.launcher.kill()
        self.launcher.wait()
        self.launcher.stdin.close()  # those that are left may go now, and say so
        return self.launcher.stdout.read().count(b"still here")


def two_nodes_on_this_host() -> tuple[list[str], list[dict], dict[str, int]]:
    """Return what four ranks said, what they were told, and how many outlived their launcher."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    endpoint = f"localhost:{store.port}"
    nodes = {"tied": Node(endpoint, tied=True), "loose": Node(endpoint, tied=False)}
    for node in nodes.values():
        node.read()
    hellos = nodes["tied"].hellos + nodes["loose"].hellos
    ranks = nodes["tied"].ranks + nodes["loose"].ranks
    ranks.sort(key=lambda rank: int(rank["RANK"]))
    left = {name: node.survivors() for name, node in nodes.items()}
    return hellos, ranks, left


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
# | LOCAL_WORLD_SIZE | LOCAL_SIZE | OMPI_COMM_WORLD_LOCAL_SIZE | SLURM_STEP_TASKS_PER_NODE |
# | MASTER_ADDR, MASTER_PORT | the same | not set | not set |
#
# SLURM_STEP_TASKS_PER_NODE is a text such as "8(x2)", which `int` refuses; SLURM_NTASKS_PER_NODE is
# a number, but is there only if the job was submitted with --ntasks-per-node.


# %%
def two_torchruns_make_one_world() -> None:
    if sys.platform != "linux":
        blocked("two launchers as two nodes", needs="a system library: Linux's prctl")
        return
    seen = None
    if RANK == 0:
        seen = two_nodes_on_this_host()
    hellos, ranks, left = from_rank_0(seen)
    print_table(ranks)
    sums = [last_number(line) for line in hellos]
    claim("ranks of two launchers' four that print 6", 4, sums.count(0 + 1 + 2 + 3))
    of_launcher = set(without_ranks(os.environ))
    added = [set(rank) - of_launcher for rank in ranks]
    told = added.count(set(NAMES))
    claim("torchrun: ranks told the list, and nothing else", 4, told, rank=0)
    second_node = [rank for rank in ranks if rank["GROUP_RANK"] == "1"]
    found = [int(rank["RANK"]) for rank in second_node if rank["LOCAL_RANK"] == "1"]
    claim("rank with local rank 1 on the second node", 3, max(found, default=-1), question=3)
    regular = 0
    for position, rank in enumerate(ranks):
        expected = 2 * int(rank["GROUP_RANK"]) + int(rank["LOCAL_RANK"])
        if int(rank["RANK"]) == position and position == expected:
            regular += 1
    claim("torchrun: ranks numbered node x 2 + local rank", 4, regular)
    stores = {rank["MASTER_ADDR"] + ":" + rank["MASTER_PORT"] for rank in ranks}
    claim("torchrun: stores at which the four would meet", 1, len(stores))
    claim("ranks left when their launcher is killed", 2, left["loose"], question=5)
    claim("ranks left, if they asked to be killed with it", 0, left["tied"])


def shortened(text: str, width: int) -> str:
    """The end of a text that is too long, which tells values apart better than its beginning."""
    return text if len(text) <= width else "…" + text[1 - width :]


def print_table(ranks: list[dict]) -> None:
    """Print each variable with what the four ranks were told; one value if it is the same."""
    print0("\n  what two torchruns of 2 ranks tell them")
    for names, meaning in SET_BY_TORCHRUN.items():
        for name in names.split():
            values = [rank.get(name, "unset") for rank in ranks]
            if len(set(values)) == 1:
                values = values[:1]
            print0(f"  {name:32} {shortened(' '.join(values), 24):24}  {meaning}")
            meaning = ""
    print0()


# %% [markdown]
# ## 5. The store: where ranks meet (a second reading)
#
# The **store** is a dictionary that all ranks reach over TCP. Its address is in every rank's
# environment, so connecting to it takes one line and no group. It holds a few hundred bytes per
# rank; tensors never pass through it. Five operations are enough to number ranks, to elect one, and
# to make a barrier:
#
# - `set(key, value)` writes; `get(key)` and `wait([keys])` block until the keys are there.
# - `add(key, k)` adds to a counter and returns the new sum, in one step: no two ranks ever get
#   the same number.
# - `compare_set(key, old, new)` writes only if the value is still `old`, and returns what is there
#   now. If several ranks try, the first one wins, and all learn its name.


# %%
def open_store() -> dist.Store:
    """Connect to the store whose address is in the environment."""
    host = os.environ["MASTER_ADDR"]
    store = dist.TCPStore(host, int(os.environ["MASTER_PORT"]), is_master=False)
    return dist.PrefixStore("lesson", store)  # "lesson/" goes before each key: ours stay apart


def barrier(store: dist.Store, name: str, n: int) -> None:
    """Return once `n` ranks have called this with the same name, which serves once."""
    if store.add(f"{name}/arrived", 1) == n:
        store.set(f"{name}/open", "yes")
    store.wait([f"{name}/open"])


def ranks_meet_at_a_store() -> None:
    store = open_store()
    tickets = set(gather_objects(store.add("tickets", 1)))
    claim("different tickets that add() gave to n ranks", WORLD_SIZE, len(tickets))
    leader = store.compare_set("leader", "", str(RANK))  # "": nobody has written yet
    leaders = set(gather_objects(leader))
    claim("leaders that compare_set lets n ranks elect", 1, len(leaders))

    time.sleep(0.3 * RANK / WORLD_SIZE)  # the ranks arrive one by one
    store.add("arrived", 1)
    barrier(store, "door", WORLD_SIZE)
    claim("ranks that had arrived when this one left", WORLD_SIZE, store.add("arrived", 0))

    gave_up = 0
    if RANK == 0:
        print0(f"{'':13}c10d warns twice now, as it should: nobody sets the key waited for")
        try:
            store.wait(["a rank that never came"], timedelta(seconds=0.3))
        except dist.DistStoreError as error:
            gave_up = 1
            print0(f"{'':13}{error}")
    claim("store.wait() ends when its timeout has passed", 1, gave_up, rank=0)


# %% [markdown]
# ## 6. Process groups
#
# An **all-gather** is a collective that gives every rank the values of all ranks. A store could
# carry it: write your value, read the others'. That makes n x n reads, all answered by one server.
# A **process group** uses the store only to exchange addresses. Then its members connect with each
# other (gloo over TCP; NCCL over NVLink, PCIe or InfiniBand), and tensors go straight across.
#
# `dist.new_group(ranks)` makes a smaller group. Two rules catch everybody once:
#
# - **Every** rank of the default group must call it, members or not, and all in the same order.
#   Each rank counts its calls of `new_group`, and the count becomes the group's name in the store.
#   A rank that skips a call is not noticed at once. But at the next call it looks for its peers
#   under one name, while they wait for it under another.
# - Members are numbered anew from 0, yet `src=` and `dst=` still mean the **global** rank. For the
#   number inside the group there are `group_src=` and `group_dst=`.


# %%
def a_group_is_a_numbering(device: torch.device) -> None:
    store = open_store()
    value = f"rank {RANK} is process {os.getpid()}"
    by_group = gather_objects(value)
    store.set(f"value of {RANK}", value)
    by_store = [store.get(f"value of {rank}").decode() for rank in range(WORLD_SIZE)]
    alike = sum(a == b for a, b in zip(by_store, by_group, strict=True))
    claim("values that store and group gather alike", WORLD_SIZE, alike)

    even_ranks = list(range(0, WORLD_SIZE, 2))
    group = dist.new_group(even_ranks)  # the others get a token that says: you are not in it
    if RANK in even_ranks:
        x = torch.tensor(float(RANK), device=device)
        dist.broadcast(x, src=even_ranks[-1], group=group)
        expected_number = RANK // 2
        expected_x = even_ranks[-1]
    else:
        x = torch.tensor(float(RANK))
        expected_number = -1
        expected_x = RANK
    number = dist.get_rank(group)
    claim("number among the even ranks, -1 outside", expected_number, number)
    claim("broadcast by the last of them, own rank outside", expected_x, x.item())


# %% [markdown]
# On GPUs a group costs more than a number. NCCL makes a **communicator**: it finds the paths
# between the GPUs, opens connections, and takes buffers on each GPU. Since NCCL 2.22 connections
# are made in the first collective that needs them, not with the group, so the first call is many
# times slower than the second. That is why benchmarks warm up, and why a job with hundreds of
# groups runs short of memory.
#
# torch 2.15's backend "nccl" is a new implementation, ProcessGroupNCCL2, and messages of its
# watchdog and names in its traces differ from what is written about the old one, ProcessGroupNCCL.
# `TORCH_DIST_USE_NCCL2=0` brings that back. Which of the two this is gets printed. The new one
# binds a group to one GPU at init: the one that `device_id` says, else that of LOCAL_RANK, else the
# rank modulo the number of GPUs. A tensor on any other GPU is refused: "ProcessGroupNCCL is bound
# to device cuda:1". Forget `set_device`, and these are the last words of every rank but 0. And all
# operations of a group run on one stream, one after the other.


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
# ## 7. Starting processes inside a program: fork and spawn (a second reading)
#
# Launchers start programs. DataLoader workers, or a quick experiment in one file, are started from
# inside Python, in one of two ways.
#
# **fork** copies the process, and takes no time. But of its threads only the one that forked comes
# along, while locks stay as they were: a lock that another thread held stays locked in the child,
# and the thread that would release it does not exist there. A rank has many threads, so a forked
# child may hang in its first matrix product; and CUDA, once used, refuses ("Cannot re-initialize
# CUDA in forked subprocess"). Fork before there are threads, as a *forkserver* does, or spawn.
#
# **spawn** starts a new Python, which imports your file again and gets function and arguments
# pickled. So the function must stand at the file's top level, and the code that starts processes
# behind `if __name__ == "__main__"`.


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
# `torch.multiprocessing.spawn(f, args, nprocs)` calls `f(i, *args)` in new processes and ends all
# if one fails. It tells them i and nothing else: no variable is set, nobody serves a store. You
# provide the meeting place, **a store that the parent holds open**, and hand `rank` and
# `world_size` to `init_process_group` yourself.


# %%
def spawned(index: int, port: int) -> None:
    """In each child of mp.spawn: join a group of two at the parent's store, and report there."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with the parent: section 8
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
    start = time.monotonic()
    heard = []
    if RANK == 0:
        heard = spawn_two()
    heard = from_rank_0(heard)
    print0(f"{'':13}two spawned children took {time.monotonic() - start:.1f} s")
    members = {*heard[0], *heard[1]}
    claim("mp.spawn: processes in its children's group", 2, len(members))


# %% [markdown]
# ## 8. Who ends the ranks (a second reading)
#
# | What happens | Who ends the ranks |
# |---|---|
# | a rank raises an exception, or crashes | torchrun: it ends the others and exits with 1 |
# | Ctrl-C, or SIGTERM, to torchrun | torchrun passes it on to its ranks |
# | `kill -9` (SIGKILL), or the out-of-memory killer, hits torchrun | **nobody** |
# | a rank waits for one that never comes | the collective's timeout: 10 minutes, on gloo 30 |
#
# Nobody can catch SIGKILL, and ranks have sessions of their own, out of the terminal's reach. So
# ranks whose launcher was killed live on, and hold their GPUs' memory. Linux offers a remedy that a
# process must ask for itself: `prctl(PR_SET_PDEATHSIG, SIGKILL)`, "kill me when what started me
# ends". The plumbing of these lessons does, and so do the processes that this lesson starts.

# %%
if sys.platform == "linux":
    END_WITH_PARENT = "import ctypes; ctypes.CDLL(None).prctl(1, 9)\n"  # PR_SET_PDEATHSIG, SIGKILL
else:
    END_WITH_PARENT = ""

# %% [markdown]
# ## 9. How it is measured
#
# Rank 0 alone starts torchruns and children, reads what they print, and broadcasts it, for `claim`
# must be called by every rank. All that it starts asks to end with it, except the two ranks of
# section 4 that are to outlive their launcher: they end when rank 0 closes the pipe that they read.
# What torchrun tells its ranks is read in the ranks; whether a rank outlived its launcher is what
# it printed afterwards.

# %%
RUN = "from torch.distributed.run import main; main()"  # what the command `torchrun` does
TORCHRUN = [sys.executable, "-c", END_WITH_PARENT + RUN]
PYTHON = ["--no-python", sys.executable, "-c"]  # run the text that follows, not a file


def without_ranks(environment: dict) -> dict:
    """Return a copy without torchrun's variables, so that a child does not take itself for us."""
    hidden = [*NAMES, "PYTHONUNBUFFERED"]  # which would write a line in two parts, to be mixed up
    shown = {}
    for name, value in environment.items():  # a later torchrun may set more TORCHELASTIC_ variables
        if name not in hidden and not name.startswith("TORCHELASTIC_"):
            shown[name] = value
    return shown


def output_of(command: list[str]) -> list[str]:
    """Run a command to its end; return the lines it printed."""
    environment = without_ranks(os.environ)
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    return ran.stdout.splitlines() if ran.returncode == 0 else sys.exit(ran.stderr)


def last_number(line: str) -> float:
    return float(line.split()[-1])


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
# ## 10. The plumbing, explained
#
# The last cell of every lesson is the same. It does what every training script does one way or
# another, and now you know all that it needs:
#
# - **`command_line`** reads flags before anything else, so that `--help` starts no rank.
# - **`launch`** makes plain `python lesson.py` work: without `RANK` in the environment it calls
#   torchrun's `main`, which starts this same file again, as ranks; in a rank it returns at once. A
#   lesson that cannot use every number of GPUs says which numbers it can, and gets the largest.
#   `--local-addr` spares machines whose own name does not resolve. A negative exit code is the
#   signal that ended a rank, and 128 + signal is how a shell says the same.
# - **`setup`** first asks for section 8's PR_SET_PDEATHSIG (a launcher killed before that, while
#   its ranks still import torch, is seen by its number, LAUNCHER). `set_float32_matmul_precision`
#   takes back what some images set, products of float32 with 10 bits of fraction (TF32). NCCL wants
#   a GPU for each rank, and ranks that choose different backends wait for each other until the
#   timeout. So each first tells the store whether its node has a GPU for each of its ranks; if only
#   some have, all end with one message. `set_device` comes before all else that uses CUDA's memory,
#   or every rank also opens a context on GPU 0. `timeout` is how long a collective waits for a rank
#   that never comes.
# - **`print0`** prints on rank 0 only, or every line would come n times.
# - **`refuse`** ends a run that cannot mean anything with one message instead of n.
# - **`claim`** gathers prediction and measurement of all ranks and shows the worst, so that no rank
#   can be wrong in silence. Gathering is a collective: all ranks must call it, in the same order.
# - **`crash`** takes an exception that nobody caught. When a rank dies, its peers' collectives fail
#   too ("Connection closed by peer"), and n tracebacks hide the cause: the first to count at the
#   store speaks. Then it leaves by `os._exit`, for `sys.exit` would wait for threads that may
#   themselves wait for a peer.
# - **`finish`** meets at a barrier, since nobody should leave while a peer may need it, destroys
#   the group, and writes the ledger to the file that LESSON_JSON names, if it is set.

# %% [markdown]
# ## What you should have seen
#
# 1. Each prints 6, which is 0 + 1 + 2 + 3. Only the all-reduce moved data between the processes, a
#    few bytes per rank. The lines come in any order: processes take no turns to print.
# 2. Four: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. A launcher is anything that starts n
#    processes and tells each these four. `mp.spawn` sets none of the 19: it hands over an index,
#    and the store, the address and the world size are your business.
# 3. Rank 3: torchrun numbers node by node, so ranks that are neighbors in number share a node. That
#    is why tensor parallelism, which talks most, takes consecutive ranks.
# 4. No, never: the thread that would have freed the child's copy of the lock does not exist in the
#    child, which has one thread. The parent gets it at once. `mp.spawn` (section 7) forks nothing:
#    it takes seconds where a fork takes milliseconds, since each child imports torch anew.
# 5. Both are left if they did nothing about it, and none if they asked the kernel to be ended with
#    their launcher. On a GPU machine look for such leftovers with `nvidia-smi` when memory is taken
#    and no job runs.
#
# **Try.** Without `store.wait` the barrier lets every rank through: "ranks that had arrived when
# this one left" fails. `dist.get_rank()` is the global rank: "number among the even ranks" fails.
#
# With a thousand ranks the same things happen, but the store answers a thousand clients, the import
# of Python packages from a shared disk takes minutes, and some node always fails. That is
# why there are restarts and checkpoints. On Slurm, `srun` replaces torchrun, or starts one torchrun
# per node.


# %%
def main() -> None:
    command_line()
    launch()
    device = setup()
    say_hello()
    a_launcher_by_hand()
    two_torchruns_make_one_world()
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
    how = f"gloo ({local_ranks} ranks and {gpus} GPUs here)"
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
        counted = f"{devices.count(b'cuda')} GPUs for {WORLD_SIZE} ranks"
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
