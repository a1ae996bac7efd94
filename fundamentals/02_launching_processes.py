"""Launching processes: a store, a group, a launcher
=================================================

**Question.** What happens between `torchrun train.py` and the first collective, and who ends the
ranks when something goes wrong?

**Predict.** Write down: (1) What is the least that rank 3 must be told to find the others?
(2) Which variables does `torchrun` set for a rank, and which of them does `mp.spawn` set?
(3) A process forks while a lock is taken; then a thread lets go of it. Does the child get it?
(4) `kill -9` hits a `torchrun` that runs two ranks. How many are left?

**Run.**

    torchrun --standalone --nproc-per-node=4 02_launching_processes.py   # NCCL, if there are 4 GPUs
    python 02_launching_processes.py                                     # the same; gloo if not

**You will have seen** (4 ranks on 2 cores, gloo, torch 2.15, 9 s; not run on several GPUs) that a
rank needs its number and one address; `torchrun` sets 19 variables, `mp.spawn` none; a forked child
never gets the lock; two spawned ones take 2.5 s, mostly `import torch`; a killed `torchrun` leaves
both ranks, and none if they ran one line of the plumbing.

**Next.** exercises/01_hello_ranks; then communication/01_nccl_collectives.py
"""

import argparse
import contextlib
import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD_SIZES = range(1, 65)  # what --nproc-per-node may be
FLAGS: dict[str, dict] = {}

# %% [markdown]
# ## 1. Ranks meet at a store
#
# A job begins as n processes, each told its number and the address of one server, a *store*: a
# dictionary reached over TCP. `set(key, value)` writes; `get(key)` and `wait([keys])` block until
# the keys are there; `add(key, k)` adds and returns the sum in one step, so no two ranks see the
# same; `compare_set(key, old, new)` writes if the value is still `old` and returns what is there.
# That numbers ranks, elects one, and makes a barrier. Never pick the server's port: what was free
# when you looked may be taken when you bind it. Port 0 lets the kernel choose, and you hold it.


# %%
def open_store() -> dist.TCPStore:
    """A store of our own: rank 0 serves it, the others connect."""
    host = os.environ["MASTER_ADDR"]
    server = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if RANK == 0 else None
    port = on_rank_0(lambda: server.port)  # an address must come from elsewhere: here, a group
    return server or dist.TCPStore(host, port, is_master=False)


def barrier(store: dist.Store, name: str, n: int) -> None:
    """Return once `n` ranks have called this; a name serves once."""
    if store.add(f"{name}/arrived", 1) == n:
        store.set(f"{name}/open", "yes")
    store.wait([f"{name}/open"])


def wait_for_nobody(store: dist.Store) -> str:
    """What a wait of 0.3 s for a key that nobody sets raises (c10d adds two warnings)."""
    try:
        store.wait(["a rank that never came"], timedelta(seconds=0.3))
    except dist.DistStoreError as error:
        return f"DistStoreError: {error}"
    return ""


def on_rank_0(function: Callable, *args: Any) -> Any:
    """Call a function on rank 0 alone; every rank returns what it returned."""
    result = [function(*args) if RANK == 0 else None]
    dist.broadcast_object_list(result)
    return result[0]


def ranks_meet_at_a_store(store: dist.TCPStore) -> None:
    mine = store.add("tickets", 1), store.compare_set("leader", "", str(RANK))  # "": no key yet
    everyone: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(everyone, mine)
    tickets, leaders = map(set, zip(*everyone, strict=True))
    claim("different tickets that add() gave to n ranks", WORLD_SIZE, len(tickets))
    claim("leaders that compare_set lets n ranks elect", 1, len(leaders))
    time.sleep(0.3 * RANK / WORLD_SIZE)  # the ranks come one by one
    store.add("came", 1)
    barrier(store, "door", WORLD_SIZE)
    claim("ranks that had come when this one left the barrier", WORLD_SIZE, store.add("came", 0))
    raised = on_rank_0(wait_for_nobody, store)
    claim("wait() gives up an absent rank", True, raised != "")
    say(f"{'':10}{raised}\n")


# %% [markdown]
# ## 2. A process group is a numbering, connections, and a store
#
# A store can carry an all-gather: write your value, read the others'. That is n x n gets, answered
# by one server. A *process group* uses the store only to exchange addresses; then its members
# connect (gloo over TCP; NCCL over NVLink, PCIe, InfiniBand), and tensors go straight across.
#
# `dist.new_group(ranks)` makes a smaller group of some members. **Every** rank calls it, outsiders
# too, in the same order: a group's keys in the store are named by counting the calls. A rank that
# skips one is not noticed, but the next group waits for keys that it writes under another name.
# Members are numbered anew from 0, yet `src=` and `dst=` still mean the **global** rank; the new
# number goes into `group_src=` and `group_dst=`.


# %%
def a_group_is_a_numbering(store: dist.TCPStore, device: torch.device) -> None:
    mine, by_group = f"rank {RANK} is process {os.getpid()}", [""] * WORLD_SIZE
    dist.all_gather_object(by_group, mine)
    store.set(f"value of {RANK}", mine)
    by_store = [store.get(f"value of {rank}").decode() for rank in range(WORLD_SIZE)]
    alike = sum(a == b for a, b in zip(by_store, by_group, strict=True))
    claim("values that store and group gather alike", WORLD_SIZE, alike)
    even = range(0, WORLD_SIZE, 2)
    inside, x = RANK in even, torch.tensor(float(RANK), device=device)
    group = dist.new_group(list(even))  # outsiders get a token that says: not in it
    number = dist.get_rank(group)
    claim("number among the even ranks, -1 outside", RANK // 2 if inside else -1, number)
    if inside:
        dist.broadcast(x, src=dist.get_global_rank(group, len(even) - 1), group=group)
    claim("broadcast by the last of them, own rank outside", even[-1] if inside else RANK, x.item())


# %% [markdown]
# ## 3. Starting processes: fork and spawn
#
# `fork` copies the process. But of its threads only the one that forked comes along, while locks
# stay as they were: what another thread would let go is held for ever. A rank has many threads: a
# forked child may hang in its first matrix product; CUDA, once used, refuses ("Cannot re-initialize
# CUDA in forked subprocess"). Fork before there are threads, as a *forkserver* does, or spawn.
#
# `spawn` starts a new Python, which imports your file again and gets function and arguments
# pickled. So the function stands at the file's top level, and what starts processes behind
# `if __name__ == "__main__"`. `torch.multiprocessing.spawn(f, args, nprocs)` calls `f(i, *args)` in
# such children and ends all if one fails. It tells them i and nothing else: you provide the meeting
# place, **a store that the parent holds open**.


# %%
def fork_beside_a_thread() -> tuple[int, bool, bool]:
    """Threads in a forked child; whether it, and its parent, get the lock that a thread lets go."""
    fork, lock, forked = mp.get_context("fork"), threading.Lock(), threading.Event()
    lock.acquire()
    threading.Thread(target=lambda: forked.wait() and lock.release()).start()
    answers = fork.SimpleQueue()
    child = fork.Process(
        target=lambda: answers.put((psutil.Process().num_threads(), lock.acquire(timeout=0.3)))
    )
    child.start()
    forked.set()
    parent_got_it = lock.acquire(timeout=60)
    child.join()
    return *answers.get(), parent_got_it


def spawned(index: int, port: int) -> None:
    """In each child of mp.spawn: join a group of two at the parent's store, and report there."""
    if sys.platform == "linux":  # as in `setup`; mp.spawn has asked for SIGINT only
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if not mp.parent_process().is_alive():
        sys.exit(1)
    told = sum(name in os.environ for name in NAMES)
    store = dist.TCPStore("localhost", port, is_master=False, timeout=timedelta(minutes=1))
    dist.init_process_group("gloo", store=dist.PrefixStore("pg", store), rank=index, world_size=2)
    members: list[Any] = [None, None]
    dist.all_gather_object(members, os.getpid())
    store.set(f"report of {index}", json.dumps({"told": told, "members": members}))
    dist.destroy_process_group()


def spawn_two() -> list[dict]:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    mp.spawn(spawned, args=(store.port,), nprocs=2)
    return [json.loads(store.get(f"report of {index}")) for index in range(2)]


def fork_and_spawn() -> None:
    threads, child_got_it, parent_got_it = fork_beside_a_thread()
    claim("threads in a forked child", 1, threads)
    claim("forked child gets the lock that a thread lets go", False, child_got_it)
    claim("its parent gets that lock", True, parent_got_it)
    for name in NAMES:
        os.environ.pop(name, None)  # children would inherit RANK=0, and believe it
    start, reports = time.monotonic(), on_rank_0(spawn_two)
    say(f"{'':10}two spawned children took {time.monotonic() - start:.1f} s")
    members = {pid for report in reports for pid in report["members"]}
    claim("mp.spawn: processes in the group its children make", 2, len(members))
    claim("mp.spawn: variables of torchrun's that it sets", 0, sum(r["told"] for r in reports))


# %% [markdown]
# ## 4. torchrun
#
# `torchrun` starts any program `--nproc-per-node` times and tells each copy who it is through its
# environment. It holds the store, watches, ends all if one fails, and with `--max-restarts` begins
# again. For several nodes, run the same line on each, `torchrun --nnodes=2 --nproc-per-node=8
# --rdzv-backend=c10d --rdzv-endpoint=node0:29400 ...`: the launchers meet at a store of their own
# there (a *rendezvous*); node 0's then opens the ranks' store on a port from the kernel. Here rank
# 0 runs two as two nodes of this host, and holds their store itself (`is_host=0`: be its client).
#
# Then both get SIGKILL, which nobody can catch: a launcher that dies of it ends no rank. The ranks
# of one have run the plumbing's first line, those of the other have not. Orphans fall to process 1,
# or to an ancestor that asked for them (prctl 36, PR_SET_CHILD_SUBREAPER), as rank 0 does here.

# %%
SET_BY_TORCHRUN = {
    "RANK WORLD_SIZE": "number in the world, from 0",
    "MASTER_ADDR MASTER_PORT": "the ranks' store; init reads these four",
    "LOCAL_RANK LOCAL_WORLD_SIZE": "number on this node: the GPU to take",
    "GROUP_RANK GROUP_WORLD_SIZE": "number of the node, i.e. launcher",
    "ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE": "--role, for jobs with unlike parts",
    "OMP_NUM_THREADS": "1 unless set: ranks share the cores",
    "TORCHELASTIC_RUN_ID": "--rdzv-id, the job's name",
    "TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS": "not 0: load the checkpoint",
    "TORCHELASTIC_USE_AGENT_STORE": "the launcher, not rank 0, serves",
    "TORCHELASTIC_ERROR_FILE": "where @record writes a traceback",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "what the launcher passes on",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "NCCL's watchdog ends a stuck rank",
}
NAMES = " ".join(SET_BY_TORCHRUN).split()
LAUNCHER = "import ctypes; ctypes.CDLL(None).prctl(1, 9); "  # first of all: end with rank 0
LAUNCHER += "import torch.distributed.run; torch.distributed.run.main()"
PROGRAM = """
import ctypes, json, os, sys
if sys.argv[1] == "tied":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: the plumbing's first line
told = {name: os.environ[name] for name in sys.argv[2:] if name in os.environ}
os.write(1, json.dumps(told | {"pid": os.getpid()}).encode() + b"\\n")  # at once: lines stay whole
sys.stdin.read()  # until rank 0 closes the pipe, or is no more
"""


def two_nodes_on_this_host() -> tuple[list[dict], dict[str, int]]:
    """Run torchrun twice: what each of 4 ranks is told, and how many outlive a killed launcher."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    torchrun = [sys.executable, "-c", LAUNCHER, "--nnodes=2", "--nproc-per-node=2"]
    torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{store.port}"]
    torchrun += ["--rdzv-conf=is_host=0,join_timeout=60", "--local-addr=localhost"]
    torchrun += ["--no-python", sys.executable, "-c", PROGRAM]
    pipes, nodes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE), {}
    ctypes.CDLL(None).prctl(36, 1)
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as end:
        for kind in ("tied", "loose"):
            command, env = [*torchrun, kind, *NAMES], os.environ | {"TMPDIR": logs}
            nodes[kind] = end.enter_context(subprocess.Popen(command, env=env, **pipes))
            end.callback(nodes[kind].kill)
        told = {kind: [read_line(node) for _ in range(2)] for kind, node in nodes.items()}
        left = {kind: survivors(node, told[kind]) for kind, node in nodes.items()}
    return sorted(told["tied"] + told["loose"], key=lambda rank: int(rank["RANK"])), left


def read_line(node: subprocess.Popen) -> dict:
    return json.loads(node.stdout.readline() or sys.exit(node.stderr.read().decode()))


def survivors(node: subprocess.Popen, ranks: list[dict]) -> int:
    """SIGKILL the launcher; only then let its ranks leave, and count those that still can."""
    node.kill()
    node.wait()  # by now the kernel has sent whatever PR_SET_PDEATHSIG asked for
    node.stdin.close()
    return sum(os.waitpid(rank["pid"], 0)[1] == 0 for rank in ranks)  # the others: SIGKILL


def two_torchruns_make_one_world() -> None:
    if sys.platform != "linux":
        return blocked("two torchruns as two nodes", needs="a system library: Linux's prctl")
    ranks, left = on_rank_0(two_nodes_on_this_host)
    say("\n  what two torchruns of 2 ranks tell them")
    for names, meaning in SET_BY_TORCHRUN.items():
        for name in names.split():
            values = [rank.get(name, "unset") for rank in ranks]
            seen = " ".join(values if len(set(values)) > 1 else values[:1])
            say(f"  {name:32} {seen[-24:]:24}  {meaning * names.startswith(name)}")
    told = min(len(set(NAMES) & set(rank)) for rank in ranks)
    claim("torchrun: variables set, of those listed", len(NAMES), told)
    node, here = ([int(rank[name]) for rank in ranks] for name in ("GROUP_RANK", "LOCAL_RANK"))
    regular = sum(int(ranks[r]["RANK"]) == r == 2 * node[r] + here[r] for r in range(4))
    claim("torchrun: ranks numbered node x 2 + local rank", 4, regular)
    stores = {(rank["MASTER_ADDR"], rank["MASTER_PORT"]) for rank in ranks}
    claim("torchrun: stores at which the four would meet", 1, len(stores))
    claim("ranks left when their launcher is killed", 2, left["loose"])
    claim("ranks left, if they asked to be killed with it", 0, left["tied"])


# %% [markdown]
# ## 5. The plumbing, line by line
#
# - **`RANK`, `WORLD_SIZE`** have defaults: tests and `mp.spawn`'s children import this file too.
# - **`command_line`** runs in launcher and ranks before anything else: `--help` and wrong flags
#   start no rank. argparse's own ways to print are replaced, or every rank would.
# - **`launch`**, for plain `python`: be torchrun in this very process, and catch how it ends. A
#   negative exit code is the signal that ended a rank; 128 + signal is how a shell says so. Without
#   `--local-addr` ranks meet at the host's full name, and hang where that does not resolve.
# - **`setup`**. `prctl(1, SIGKILL)`, PR_SET_PDEATHSIG, says: kill me when what started me ends.
#   `CDLL(None)` is the C library. torchrun passes SIGTERM and Ctrl-C on to its ranks, which have
#   sessions of their own, out of the terminal's reach; nobody passes SIGKILL on. If the launcher
#   died before that line, `getppid()` is not what it left in `LAUNCHER`. NCCL refuses two ranks on
#   one GPU ("Duplicate GPU detected"), hence gloo then. `set_device` comes before all else that
#   uses CUDA, or every rank opens a context on GPU 0 too. With `device_id` NCCL connects now, not
#   in the first collective. `timeout`, for a missing rank, is else 10 minutes on NCCL, 30 on gloo.
#   `excepthook` comes last, since `crash` needs the group's store.
# - **`crash`** takes exceptions that nobody caught. `add(...) == 1`: of all that fail, one speaks.
#   When a rank dies, its peers' collectives fail too ("Connection closed by peer"); the launcher
#   ends them in their sleep, so no effect is reported for the cause. `sys.exit` would wait for
#   threads that may wait for a peer; after `os._exit` the kernel closes our sockets: peers know.
# - **`say`**: on rank 0, or every line comes n times; it flushes, for `os._exit` does not.
# - **`require`** is for rules that all ranks see broken. If all left at once, the launcher might
#   see rank 3 go first and end rank 0 before it spoke; past a collective, peers could be waiting.
# - **`claim`** is a collective: the worst of all ranks counts; NaN, which compares false, is worst.
# - **`record`** writes a second file and renames it, an atomic step: LESSON_JSON is always whole.
# - **`finish`**: nobody leaves while a peer may need it. If the group's threads still run while
#   Python takes its objects apart, a finished job aborts now and then: hence
#   `destroy_process_group`, and `os._exit` in case something still holds the group.
# - **The last lines**: with `RANK` in the environment this is a rank. Other launchers' names:
#
# | `torchrun` | `deepspeed` | `mpirun` (Open MPI) | `srun` (Slurm) |
# |---|---|---|---|
# | RANK | RANK | OMPI_COMM_WORLD_RANK | SLURM_PROCID |
# | WORLD_SIZE | WORLD_SIZE | OMPI_COMM_WORLD_SIZE | SLURM_NTASKS |
# | LOCAL_RANK | LOCAL_RANK, --local_rank | OMPI_COMM_WORLD_LOCAL_RANK | SLURM_LOCALID |
# | LOCAL_WORLD_SIZE | **LOCAL_SIZE** | OMPI_COMM_WORLD_LOCAL_SIZE | SLURM_TASKS_PER_NODE |


# %%
def main(options: argparse.Namespace) -> None:
    device = setup()
    store = open_store()  # rank 0 serves it until main ends
    ranks_meet_at_a_store(store)
    a_group_is_a_numbering(store, device)
    fork_and_spawn()
    two_torchruns_make_one_world()
    finish()


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
