"""Check your machine: look at it, try it, know its failures
==========================================================

**Question.** What can this machine train, and when something does not work, what is it?

**Predict.** Which network interface will two ranks here talk through, and what decides it? How
large is the shared memory, and who needs it? Two causes of `The client socket has timed out`?

**Run.** One process, with 8 GPUs, one or none; it works where torchrun cannot start.

    python 00_check_your_machine.py
    python 00_check_your_machine.py --log train.log  # and name what killed the job that wrote it

**You will have seen** (2 cores, torch 2.15, 9 s) that gloo listens where the host name points,
foretold, then observed; that shared memory holds what it claims, by filling it; and five failures
at init, recognised by their last words. An unknown host and an absent rank 0 die of the *same*
words: only looking up the name in them tells which. Not run on GPUs.

**Next.** fundamentals/01_gpu_interconnects.py
"""

import argparse
import contextlib
import ctypes
import importlib.metadata
import json
import logging
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn
from unittest import mock

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # the failures provoked below are meant
import torch
import torch.distributed as dist

WORLD_SIZES = range(1, 2)  # the doctor is one process
FLAGS: dict[str, dict] = {"--log": {"metavar": "PATH", "help": "what a job that died had printed"}}
SHM = "/dev/shm"  # Linux keeps shared memory in files here; they live in RAM
NOTHING = float("nan")  # measured where a trial failed: equal to no prediction


def main(options: argparse.Namespace) -> None:
    """No `setup()`: a doctor must speak where no process group can form."""
    require(not options.log or os.path.isfile(options.log), f"--log: no file {options.log}")
    gloo = look(torchrun, "gloo", 2)  # its ranks import torch while we look around
    say(f"This machine, as torch {torch.__version__} finds it\n")
    for name, probe in {"computer": computer, "GPUs": gpus, "network": network}.items():
        show(name, look(probe)())
    say(f"\n{'What it promises, tried':66}{'predicted':21}measured\n")
    the_host_name_is_ours()
    ranks_meet("gloo", 2, gloo(100))
    every_gpu_joins()
    shared_memory_is_there()
    say("\nFailures that you will meet, provoked and recognised\n")
    failures_are_recognised()
    if options.log:
        say(f"\nWhat killed the job that wrote {options.log}\n")
        prescribe(look(Path(options.log).read_text)())
    what_runs_here()
    finish()


# %% [markdown]
# ## 1. Look, and do not get hurt
#
# A doctor is called to machines that are ill: a driver hangs, a name server is silent, a package is
# missing. So every probe runs in a thread, has a deadline, and hands back its exception as a value.
#
# Between GPUs the path matters more than the card. NVML names the highest thing on the way: NVLink;
# PIX, a PCIe switch; PXB, several; PHB, a CPU's PCIe bridge; NODE, two bridges; SYS, the link from
# CPU to CPU. PCIe below its full width is a badly seated card; below its generation, an idle one.


# %%
def look(probe: Callable, *args: object) -> Callable:
    """Start `probe(*args)`; what is returned, called with a deadline, gives its value or error."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(probe(*args))
        except Exception as error:
            found.append(error)

    def answer(seconds: float = 10) -> object:
        thread.join(seconds)
        return found[0] if found else TimeoutError(f"gave no answer in {seconds} s")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return answer


def show(label: str, found: object) -> None:
    """A labelled paragraph: text, or the exception of a probe that failed."""
    text = f"cannot look: {found!r}" if isinstance(found, Exception) else str(found)
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, 78)]
    say("\n".join(f"  {'' if i else label:18} {line}" for i, line in enumerate(lines)))


def output(command: str) -> str:
    """What a command prints; raises if it is missing or fails."""
    return subprocess.run(command.split(), capture_output=True, text=True, check=True).stdout


def computer() -> str:
    import psutil

    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ram, shm = psutil.virtual_memory(), shutil.disk_usage(SHM).free if os.path.isdir(SHM) else 0
    free = f"{ram.available / 1e9:.1f} of {ram.total / 1e9:.1f} GB free, {shm / 1e9:.3g} in {SHM}"
    cores = f"{mine} of {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    return f"{cores}; {free}\n{platform.platform()}, Python {platform.python_version()}"


def gpus() -> str:
    """What NVML sees, or nvidia-smi where NVML's package is missing; and what torch may use."""
    found = look(nvml)()
    if isinstance(found, Exception) and shutil.which("nvidia-smi"):
        what = "name,memory.total,utilization.gpu,pcie.link.gen.current,pcie.link.width.current"
        found = output(f"nvidia-smi --query-gpu={what} --format=csv") + output("nvidia-smi topo -m")
    elif isinstance(found, Exception):
        found = f"none: {found or type(found).__name__}"
    visible, nccl = os.environ.get("CUDA_VISIBLE_DEVICES"), look(torch.cuda.nccl.version)()
    built = f"NCCL {'.'.join(map(str, nccl))}" if isinstance(nccl, tuple) else "no NCCL in it"
    may = f"torch may use {torch.cuda.device_count()}; CUDA_VISIBLE_DEVICES={visible}"
    return f"{found}\n{may}; {built}"


def nvml() -> str:
    """A line for each GPU, then the path between each two."""
    import pynvml

    def ask(question: str, *about: object) -> object:
        with contextlib.suppress(pynvml.NVMLError):  # not every card can answer everything
            return getattr(pynvml, "nvmlDeviceGet" + question)(*about)

    pynvml.nvmlInit()
    cards = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    lines, paths = [f"{len(cards)}, driver {pynvml.nvmlSystemGetDriverVersion()}"], []
    names = {0: "one board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
    for i, card in enumerate(cards):
        ram, busy = ask("MemoryInfo", card), ask("UtilizationRates", card)
        links = [ask("NvLinkState", card, j) for j in range(pynvml.NVML_NVLINK_MAX_LINKS)]
        gen, most = ask("CurrPcieLinkGeneration", card), ask("MaxPcieLinkGeneration", card)
        wide, full = ask("CurrPcieLinkWidth", card), ask("MaxPcieLinkWidth", card)
        about = f"{ram.total / 1e9 if ram else 0:.0f} GB, {busy.gpu if busy else '?'}% busy"
        wires = f"{links.count(1)} NVLinks up, PCIe gen {gen} of {most}, x{wide} of x{full}"
        lines.append(f"{i}: {ask('Name', card)}, {about}, {wires}")
        for j, peer in enumerate(cards[:i]):
            nvlink = ask("P2PStatus", card, peer, pynvml.NVML_P2P_CAPS_INDEX_NVLINK) == 0
            way = "NVLink" if nvlink else names.get(ask("TopologyCommonAncestor", card, peer), "?")
            paths.append(f"{j}-{i} {way}")
    return "\n".join([*lines, ", ".join(paths)])


# %% [markdown]
# ## 2. Which network will they take?
#
# - **torchrun** sends its ranks to `socket.getfqdn()`, even with `--standalone`, unless it is given
#   `--local-addr`. Where that name does not resolve, they all hang.
# - **gloo** listens on `GLOO_SOCKET_IFNAME`; else on the host name's first address that binds;
#   else on 127.0.0.1 (ProcessGroupGloo.cpp, `createDefaultDevice`). Debian gives the host name
#   127.0.1.1: right for one machine, and the usual reason why ranks on two never meet.
# - **NCCL** takes `NCCL_SOCKET_IFNAME`; else all `ib*`; else all but `docker*`, `lo*`, `virbr*`;
#   else those, in this order (NCCL's socket.cc, `ncclFindInterfaces`).


# %%
def interfaces() -> dict[str, list[str]]:
    """The IP addresses of every interface that is up and has one."""
    import psutil

    state, kinds, found = psutil.net_if_stats(), (socket.AF_INET, socket.AF_INET6), {}
    for name, nets in psutil.net_if_addrs().items():
        if held := [n.address.split("%")[0] for n in nets if n.family in kinds]:
            found |= {name: held} if state[name].isup else {}
    return found


def own_addresses(name: str) -> list[str]:
    """What `name` resolves to, less what no socket of this machine can bind; OSError if nothing."""
    found = []
    for *kind, _, place in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
        with contextlib.suppress(OSError), socket.socket(*kind) as s:
            s.bind(place)
            found.append(place[0].split("%")[0])
    return found


def gloo_addresses() -> list[str]:
    """Where gloo will listen."""
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        return [interfaces().get(name, [f"no {name}"])[0] for name in names.split(",")]
    with contextlib.suppress(OSError):
        return own_addresses(socket.gethostname())[:1] or ["127.0.0.1"]
    return ["127.0.0.1"]


def nccl_interfaces(names: list[str]) -> list[str]:
    """Which of these interfaces NCCL's sockets will take, if NCCL_SOCKET_IFNAME does not say."""
    rules = ("ib", "(?!docker|lo|virbr)", "docker", "lo", "virbr")
    choices = ([name for name in names if re.match(rule, name)] for rule in rules)
    return next(filter(None, choices), [])


def network() -> str:
    nets, gloo = interfaces(), gloo_addresses()
    nccl = os.environ.get("NCCL_SOCKET_IFNAME") or ", ".join(nccl_interfaces(list(nets)))
    lines = [f"{name} {', '.join(held)}" for name, held in nets.items()]
    lines += [f"gloo will listen on {', '.join(gloo)}; NCCL, on {nccl}"]
    lines += ["enough for one machine; for several, set GLOO_SOCKET_IFNAME"] * ("127." in gloo[0])
    with socket.socket() as s:
        taken = s.connect_ex(("127.0.0.1", 29500)) == 0
    return "\n".join([*lines, f"port 29500, torchrun's default, is {'TAKEN' * taken or 'free'}"])


# %% [markdown]
# ## 3. Failures have faces
#
# What a job says as it dies; what that means; how to be sure; what to do. Five are provoked: here
# they take seconds, when you first meet one an evening. Where a client timed out, the host that it
# called is looked up: no such name, or nobody at home?

# %%
TABLE = r"""
port taken: EADDRINUSE|[Aa]ddress already in use
  another job, or an orphan of your last one, listens on MASTER_PORT
  ss -ltnp | grep :29500
  torchrun --standalone, which takes a free port; or end that process
unknown host name: gai ?error|nodename nor|Name or service not known|name resolution|no address of
  MASTER_ADDR, or socket.getfqdn() which torchrun puts there, leads nowhere
  getent hosts $MASTER_ADDR $(hostname --fqdn)
  one machine: torchrun --local-addr=127.0.0.1; several: an IP address as MASTER_ADDR
wrong interface: Unable to find address for|connectFullMesh failed|[Nn]o (socket )?interface found
  gloo or NCCL uses an interface that is not there, or that other machines cannot reach
  ip -brief address; NCCL_DEBUG=INFO prints the one that NCCL takes
  on every node GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, as it is called there
no NCCL: doesn't have NCCL built in|requires at least one CUDA device|no GPUs found
  torch was built for CPUs, or may use no GPU
  python -c 'import torch; print(torch.version.cuda, torch.cuda.device_count())'
  torch's CUDA build, a driver, CUDA_VISIBLE_DEVICES not empty; or backend gloo
too little shared memory: /dev/shm|shared memory|</torch_\d+|Bus error|SIGBUS
  a container has 64 MB unless told otherwise; NCCL and DataLoader workers want more
  df -h /dev/shm
  docker run --shm-size=1g, or --ipc=host; Kubernetes: an emptyDir of medium Memory
hang at init: clients joined|wait timeout after|monitoredBarrier|gave no answer|Watchdog caught
  a rank is missing: not started, dead before init, or waiting in another call
  pgrep -af python counts them; py-spy dump --pid PID says where one waits
  start all that WORLD_SIZE promises; mend the first error of the first that died
nobody listens: client socket has (timed out|failed)|Connection refused
  rank 0 is not there, or its port is another, or a firewall stands before it
  nc -vz $MASTER_ADDR $MASTER_PORT
  the same MASTER_ADDR and MASTER_PORT on all nodes; open the ports between them
"""
AILMENTS = re.findall(r"^(\w.*?): (.+)\n  (.+)\n  (.+)\n  (.+)", TABLE, re.M)


def diagnose(words: str) -> tuple[str, ...]:
    """The line that gives a job's last `words` away, then the row of the table that it fits."""
    if called := re.search(r"connect to \((.+?), \d+\)", words):
        answer = look(socket.getaddrinfo, called[1], None)()
        unknown = isinstance(answer, OSError | UnicodeError)
        words += f"\nName or service not known: {called[0]}" * unknown
    for row in AILMENTS:
        if found := re.search(f".{{0,30}}({row[1]}).*", words):
            return found[0], *row
    return words[-300:], "in no table", "", "?", "?", "mend the first error of the first rank"


def prescribe(words: object) -> None:
    said, name, _, cause, proof, remedy = diagnose(str(words))
    show(name, f'"{said[:200]}"\ncause: {cause}\nproof: {proof}\nremedy: {remedy}')


def store(host: str = "127.0.0.1", port: int = 0, n: int = 1, serve: bool = True) -> dist.TCPStore:
    return dist.TCPStore(host, port, n, serve, timedelta(seconds=1))


FAILURES = {
    "port taken": lambda: (first := store(), store(port=first.port)),
    "unknown host name": lambda: store("nowhere-" * 9, 29500, serve=False),  # too long for DNS
    "wrong interface": lambda: dist.ProcessGroupGloo.create_device(interface="nowhere0"),
    "no NCCL": lambda: dist.init_process_group("nccl", rank=0, world_size=1, store=store()),
    "hang at init": lambda: store(n=2),  # and the other never comes
}


@mock.patch.object(dist.distributed_c10d, "_NCCL_AVAILABLE", False)  # as in torch built for CPUs
def failures_are_recognised() -> None:
    right = 0
    for name, failure in FAILURES.items():
        said, found, _, _, _, remedy = diagnose(str(look(failure)()))
        right += found == name
        show(found, f'"{said[:76]}"\n{remedy}')
    claim("failures that the table names rightly", len(FAILURES), right)


# %% [markdown]
# ## 4. Try what the machine promises
#
# PROGRAM is the smallest there is: all that a rank must be told is in its environment, put there by
# torchrun. NCCL needs a GPU for each: one proves that NCCL starts, two that they reach each other.
#
# DataLoader workers and NCCL hand data over in shared memory. A file there may be longer than the
# memory behind it: then the *write* kills with SIGBUS. `posix_fallocate` asks before.

# %%
PROGRAM = """
import ctypes, datetime, json, os, sys, torch, torch.distributed as dist
sys.platform == "linux" and ctypes.CDLL(None).prctl(1, 9)  # die with torchrun
backend, rank, wait = sys.argv[1], int(os.environ["RANK"]), datetime.timedelta(seconds=40)
device = torch.device("cuda", rank) if backend == "nccl" else None
dist.init_process_group(backend, timeout=wait, device_id=device)
x = torch.tensor([rank + 1.0], device=device)
dist.all_reduce(x)
try:
    import psutil
    sockets = psutil.Process().net_connections("tcp")
except Exception:
    sockets = []
met = json.dumps([x.item(), [s.laddr.ip for s in sockets if s.status == "LISTEN"]])
os.write(1, f"MET {met}\\n".encode())  # in one piece: print() lets ranks interrupt each other
dist.destroy_process_group()
"""


def torchrun(backend: str, n: int) -> str:
    """What n ranks of PROGRAM print, of their errors too."""
    words = f"-m torch.distributed.run --standalone --nproc-per-node={n} --no-python".split()
    command = [sys.executable, *words, sys.executable, "-c", PROGRAM, backend]
    env = os.environ | {"TORCH_CPP_LOG_LEVEL": "WARNING", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    try:
        return subprocess.run(command, env=env, **pipes, timeout=90).stdout
    except subprocess.TimeoutExpired as late:  # killed, and its ranks with it
        return f"{(late.output or b'').decode()}\n{n} ranks gave no answer in {late.timeout} s"


def ranks_meet(backend: str, n: int, said: object) -> None:
    """From what n ranks said: they summed right, and listened where it was foretold."""
    met = [json.loads(line) for line in re.findall("^MET (.*)", str(said), re.M)]
    right, listens = n * (n + 1) / 2, {address for _, heard in met for address in heard}
    worst = max((total for total, _ in met), key=lambda total: abs(total - right), default=NOTHING)
    claim(f"1 + ... + {n}, summed through {backend}", right, worst if len(met) == n else NOTHING)
    if len(met) < n:
        prescribe(said)
    elif backend == "gloo" and listens:
        claim("addresses gloo listens on, foretold wrongly", 0, len(listens ^ {*gloo_addresses()}))


def every_gpu_joins() -> None:
    if n := torch.cuda.device_count() if dist.is_nccl_available() else 0:
        ranks_meet("nccl", n, look(torchrun, "nccl", n)(100))
    if n < 2:
        blocked("an all-reduce between GPUs through NCCL", needs="2 GPUs")


def the_host_name_is_ours() -> None:
    held = look(own_addresses, name := socket.getfqdn())()
    count = len(held) if isinstance(held, list) else 0
    claim("addresses of the host name that are this machine's", 1, count, ">=")
    if not count:
        prescribe(held or f"{name} has no address of this machine")


def fill_shared_memory(size: int) -> int:
    """Write `size` bytes; return how many came back unchanged."""
    block = os.urandom(2**20)
    with tempfile.TemporaryFile(dir=SHM) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        file.writelines([block] * (size // len(block)))
        file.seek(0)
        return sum(len(block) for got in iter(lambda: file.read(len(block)), b"") if got == block)


def shared_memory_is_there() -> None:
    if not os.path.isdir(SHM):
        return blocked(f"bytes that {SHM} gives back", needs="a system library: Linux")
    size = min(shutil.disk_usage(SHM).free, 2**27) >> 20 << 20  # 2**27 is twice Docker's default
    same = look(fill_shared_memory, size)()
    claim(f"bytes that {SHM} gives back", size, same if isinstance(same, int) else NOTHING)
    if same != 2**27:
        prescribe(f"{SHM}: {same}" if isinstance(same, Exception) else f"{SHM}: {same:,} bytes")


# %% [markdown]
# ## 5. What is missing, and what that blocks
#
# A lesson says in its own source what it needs: in its imports and its `blocked(...)` calls. So the
# table of lessons is read off the lessons, and is never out of date.

# %%
PARTS = """
C++ compiler | c++ --version | building FFCV | apt install g++
DeepSpeed | deepspeed | ZeRO and offload as DeepSpeed does them | pip install -e '.[deepspeed]'
FFCV | ffcv | FFCV's loaders | apt install what packages.txt names; pip install -e '.[ffcv]'
nvtx | nvtx | names in the timelines of GPUs | pip install -e '.[profiling]'
nsys | nsys --version | timelines of GPUs | NVIDIA Nsight Systems
bpftrace | bpftrace --version | a rank watched from the kernel | apt install bpftrace
Slurm | sinfo --version | sbatch and srun | a cluster, or apt install slurm-wlm
tc | tc -V | links slowed on purpose | apt install iproute2
root or user namespaces | unshare --user --net echo yes | several nodes on one machine | root
"""
FOLDERS = ("fundamentals", "communication", "parallelism", "fsdp", "profiling", "data-loading")


def version(how: str) -> str:
    """Of a package, or what a command says; raises if there is none."""
    if " " in how:
        return re.search(r"\d+\.[\w.]+|yes", output(how))[0]
    return importlib.metadata.version(how)


def lacking(lesson: str, missing: dict[str, str]) -> str:
    """What a lesson needs, going by its source, and this machine has not; `missing` parts."""
    short = {part for part, how in missing.items() if f"import {how}" in lesson}
    for need in re.findall(r'needs="(.+?)"', lesson):
        gpu = re.match(r"(\d*) ?GPU", need)
        if gpu and torch.cuda.device_count() < int(gpu[1] or 1):
            short.add(need)
        short |= {part for part in missing if part in need}
    return ", ".join(sorted(short))


def what_runs_here() -> None:
    say("\nWhat is here, and what is not\n")
    parts = [[*map(str.strip, line.split("|"))] for line in PARTS.strip().splitlines()]
    found = {part: look(version, how)() for part, how, _, _ in parts}
    missing = {part: how for part, how, *_ in parts if isinstance(found[part], Exception)}
    show("here", ", ".join(f"{part} {found[part]}" for part in found if part not in missing))
    for part, _, blocks, get in parts:
        if part in missing:
            show(f"no {part}", f"blocks {blocks}. Get it: {get}")
    say("\nWhich lessons run here\n")
    root = Path(__file__).resolve().parents[1]
    course = [p for f in FOLDERS for p in sorted(root.glob(f"{f}/[0-9][0-9]_*.py"))]
    for path in course:
        short = lacking(path.read_text(), missing)
        place = str(path.relative_to(root))
        say(f"  {place:45} {'in part, without ' + short if short else 'in full'}")
    if not course:
        say("  This file was copied out of the course; there it lists them.")
    step = f"python {course[1].relative_to(root)}" if course[1:] else "any lesson of the course"
    failed = any(row["verdict"] == "FAIL" for row in ledger)
    say("\nMend the first FAIL, then run this again." if failed else f"\nAll well. Next: {step}")


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
