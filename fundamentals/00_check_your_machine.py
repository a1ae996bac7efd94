"""Check your machine: look at it, and try what it promises
========================================================

**Question.** What can this machine train, and when something does not work, what is it?

**Predict**, and write it down before you run:

1. On which network interface will two ranks of this machine meet, with gloo and with NCCL, and what
   decides it?
2. A program asks for 128 MiB of shared memory. How many bytes of it does this machine really have?
3. A job dies with `The client socket has timed out`. Name two different causes. Can a table tell
   them apart?

**Run.** One process, with 8 GPUs, one or none; it starts its own ranks, and works where torchrun
cannot.

    python 00_check_your_machine.py

If a job has died: `course doctor --log train.log`, or launch/diagnose.py, names what killed it.

Not run on several GPUs.

**Try.** In `PROGRAM`, sum `rank + 2.0`: which claim fails? In `nccl_interfaces`, move `"lo"` to the
front of the rules: which one now?

**Before.** Nothing. You need not understand the code to use it: read what it prints.

**Next.** fundamentals/02_launching_processes.py: how ranks start, find each other and end.
"""

import argparse
import ast
import contextlib
import ctypes
import importlib.metadata
import importlib.util
import json
import logging
import math
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
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # the failures provoked below are meant
import torch
import torch.distributed as dist

# A *rank* is one of WORLD_SIZE processes that run one file together; this file is one process and
# starts ranks of a smaller program. `claim(text, predicted, measured)` prints one row of the
# ledger. It, `print0`, `blocked` and `finish` stand at this file's end, the same in every lesson.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

SHM = "/dev/shm"  # Linux keeps shared memory in files here; they live in RAM
NOTHING = math.nan  # measured where a trial failed: equal to no prediction

# %% [markdown]
# ## 1. Look, and do not get hurt
#
# This lesson is called to machines that are ill: a driver hangs, a name server is silent, a package
# is missing. So every probe runs in a thread, has a deadline, and hands back its exception as a
# value:
#
#     probe ----> thread ----> value              shown
#                        \---> exception          shown as "cannot look: ..."
#                         \--> silence, 10 s      TimeoutError, shown too


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
    """Print a labeled paragraph: text, or the exception of a probe that failed."""
    text = f"cannot look: {found!r}" if isinstance(found, Exception) else str(found)
    for line in text.splitlines():
        for part in textwrap.wrap(line, 78):
            print0(f"  {label:18} {part}")
            label = ""


def output(command: str) -> str:
    """Return what a command prints; raise if it is missing or fails."""
    return subprocess.run(command.split(), capture_output=True, text=True, check=True).stdout


def computer() -> str:
    import psutil

    cores = os.cpu_count()
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    ram = psutil.virtual_memory()
    shm = shutil.disk_usage(SHM).free if os.path.isdir(SHM) else 0
    memory = f"{ram.available / 1e9:.1f} of {ram.total / 1e9:.1f} GB free, {shm / 1e9:.3g} in {SHM}"
    busy = f"{mine} of {cores} cores, load {os.getloadavg()[0]:.1f}"
    return f"{busy}; {memory}\n{platform.platform()}, Python {platform.python_version()}"


# %% [markdown]
# ## 2. GPUs, and what joins them
#
# Between GPUs the path matters more than the card. NVIDIA's management library (NVML) names the
# highest thing on the way: NVLink; PIX, a PCIe switch; PXB, several; PHB, a CPU's PCIe bridge;
# NODE, two bridges; SYS, the link from CPU to CPU. PCIe below its full *width* is wiring,
# bifurcation, a riser or a badly seated card; below its *generation*, an idle GPU. `nvidia-smi topo
# -m` also says how far each NIC is.
#
# A card that is there may still be slow or taken: other programs hold it, its compute mode admits
# one process, heat or power hold its clock down, or its memory has had errors that nothing could
# correct. What a card does not answer is left out.


# %%
def gpus() -> str:
    """What NVML sees, or nvidia-smi where NVML's package is missing; and what torch may use."""
    found = look(nvml)()
    if isinstance(found, Exception) and shutil.which("nvidia-smi"):
        what = "name,memory.total,utilization.gpu,pcie.link.gen.current,pcie.link.width.current"
        found = output(f"nvidia-smi --query-gpu={what} --format=csv") + output("nvidia-smi topo -m")
    elif isinstance(found, Exception):
        found = f"none: {found or type(found).__name__}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    nccl = look(torch.cuda.nccl.version)()
    built = f"NCCL {'.'.join(map(str, nccl))}" if isinstance(nccl, tuple) else "no NCCL in it"
    may = f"torch may use {torch.cuda.device_count()}; CUDA_VISIBLE_DEVICES={visible}"
    return f"{found}\n{may}; CUDA {torch.version.cuda}, {built}"


def nvml() -> str:
    """A line for each GPU, then the path between each two."""
    import pynvml

    def ask(question: str, *about: object) -> object:
        with contextlib.suppress(pynvml.NVMLError, AttributeError):  # not every card answers all
            function = getattr(pynvml, "nvmlDeviceGet" + question)
            return function(*about)

    pynvml.nvmlInit()
    cards = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    lines = [f"{len(cards)}, driver {pynvml.nvmlSystemGetDriverVersion()}"]
    paths = []
    names = {0: "one board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
    for i, card in enumerate(cards):
        ram = ask("MemoryInfo", card)
        busy = ask("UtilizationRates", card)
        links = [ask("NvLinkState", card, j) for j in range(pynvml.NVML_NVLINK_MAX_LINKS)]
        about = f"{ram.total / 1e9 if ram else 0:.0f} GB, {busy.gpu if busy else '?'}% busy"
        pcie = f"PCIe gen {ask('CurrPcieLinkGeneration', card)}"
        pcie += f" of {ask('MaxPcieLinkGeneration', card)}, x{ask('CurrPcieLinkWidth', card)}"
        pcie += f" of x{ask('MaxPcieLinkWidth', card)}"
        wires = f"{links.count(1)} NVLinks up, {pcie}"
        lines.append(f"{i}: {ask('Name', card)}, {about}, {wires}{ailing(ask, card)}")
        for j, peer in enumerate(cards[:i]):
            nvlink = ask("P2PStatus", card, peer, pynvml.NVML_P2P_CAPS_INDEX_NVLINK) == 0
            way = "NVLink" if nvlink else names.get(ask("TopologyCommonAncestor", card, peer), "?")
            paths.append(f"{j}-{i} {way}")
    return "\n".join([*lines, ", ".join(paths)])


SLOWED = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat, by hardware"}
SLOWED[0x80] = "power brake"  # NVML's clocks throttle reasons


def ailing(ask: Callable, card: object) -> str:
    """What keeps this card from working, or from working fast; empty if nothing does."""
    found = ""
    others = ask("ComputeRunningProcesses", card)
    if others:
        found += f", {len(others)} programs on it"
    if ask("ComputeMode", card) == 2:
        found += ", PROHIBITED to compute: nvidia-smi -c 0"
    if ask("ComputeMode", card) in (1, 3):
        found += ", one process at a time: enough for a rank per GPU"
    reasons = ask("CurrentClocksThrottleReasons", card) or 0
    found += "".join(f", SLOWED by {why}" for bit, why in SLOWED.items() if reasons & bit)
    if ask("TotalEccErrors", card, 1, 0):  # uncorrected, since the driver was loaded
        found += ", UNCORRECTABLE memory errors: nvidia-smi -q -d ECC"
    return found


# %% [markdown]
# ## 3. Which network will they take?
#
# Three programs choose, each by its own rule:
#
# - **torchrun** sends its ranks to `socket.getfqdn()`, even with `--standalone`, unless it is given
#   `--local-addr`. Where that name does not resolve, they all hang.
# - **gloo** listens on `GLOO_SOCKET_IFNAME`; else on the host name's first address that binds; else
#   on 127.0.0.1 (ProcessGroupGloo.cpp, `createDefaultDevice`). Debian gives the host name
#   127.0.1.1: right for one machine, and the usual reason why gloo's ranks on two never meet while
#   NCCL's do. (These lessons' `setup` names the interface that leads to the other nodes.)
# - **NCCL** takes `NCCL_SOCKET_IFNAME`; else all `ib*`; else, if `NCCL_COMM_ID` is set, what shares
#   its subnet; else all but `docker*`, `lo*`, `virbr*`; else those, in this order (NCCL's
#   socket.cc, `ncclFindInterfaces`). That is for meeting, and for data over TCP. Where there is
#   RDMA, data take the NICs of `NCCL_IB_HCA`, whatever the interface.


# %%
def interfaces() -> dict[str, list[str]]:
    """The IP addresses of every interface that is up and has one."""
    import psutil

    state = psutil.net_if_stats()
    found = {}
    for name, nets in psutil.net_if_addrs().items():
        ips = [n.address for n in nets if n.family in (socket.AF_INET, socket.AF_INET6)]
        if ips and state[name].isup:
            found[name] = [address.split("%")[0] for address in ips]
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
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    if names:
        return [interfaces().get(name, [f"no {name}"])[0] for name in names.split(",")]
    with contextlib.suppress(OSError):
        return own_addresses(socket.gethostname())[:1] or ["127.0.0.1"]
    return ["127.0.0.1"]


def nccl_interfaces(names: list[str]) -> list[str]:
    """Which of these interfaces NCCL's sockets will take, if NCCL_SOCKET_IFNAME does not say."""
    rules = ("ib", "(?!docker|lo|virbr)", "docker", "lo", "virbr")
    for rule in rules:
        fitting = [name for name in names if re.match(rule, name)]
        if fitting:
            return fitting
    return []


# %% [markdown]
# What is shown of it: every interface, both choices, RDMA's ports, and whether torchrun's default
# port is free.


# %%
def network() -> str:
    nets = interfaces()
    gloo = gloo_addresses()
    nccl = os.environ.get("NCCL_SOCKET_IFNAME") or ", ".join(nccl_interfaces(list(nets)))
    lines = [f"{name} {', '.join(held)}" for name, held in nets.items()]
    lines.append(f"gloo will listen on {', '.join(gloo)}; NCCL's sockets, on {nccl}")
    if gloo[0].startswith("127."):
        lines.append("enough for one machine; for several, set GLOO_SOCKET_IFNAME")
    lines.append(rdma_ports(Path("/sys/class/infiniband")))
    with socket.socket() as s:
        taken = s.connect_ex(("127.0.0.1", 29500)) == 0
    lines.append(f"port 29500, torchrun's default, is {'TAKEN' if taken else 'free'}")
    return "\n".join(lines)


def rdma_ports(root: Path) -> str:
    """Every InfiniBand or RoCE port below `root`, with its state and rate."""
    ports = []
    for port in sorted(root.glob("*/ports/*")):
        state = (port / "state").read_text().strip()  # "4: ACTIVE"
        rate = (port / "rate").read_text().strip()  # "400 Gb/sec (4X NDR)"
        ports.append(f"{port.parts[-3]} {state.partition(': ')[2]} {rate}")
    return "RDMA: " + (", ".join(ports) or "no port; NCCL between nodes would take TCP")


# %% [markdown]
# ## 4. Two failures with the same words
#
# What a job says as it dies often names the cause. launch/diagnose.py, a file of this course to
# copy alone, has a table of such words. Whatever fails in section 5 is shown to it, if it is here.


# %%
DIAGNOSE = Path(__file__).resolve().parent.parent / "launch/diagnose.py"


def prescribe(words: object) -> None:
    """Show what launch/diagnose.py makes of a failure's words; if it is not here, the error."""
    if DIAGNOSE.exists():
        command = [sys.executable, DIAGNOSE, "--log", "-"]
        ran = subprocess.run(command, input=str(words), capture_output=True, text=True)
        show("diagnosis", ran.stdout + ran.stderr)
    else:
        error = re.search(r"^(\[rank\d+\]: )?[\w.]*(Error|Exception)\b.*", str(words), re.M)
        show("it said", error[0] if error else str(words)[-300:])


# %% [markdown]
# But no table knows more than the words do. A rank calls a host that does not exist, or one where
# nobody listens: both times torch says that the client socket has timed out. Both are provoked
# here. It takes seconds; the first time that you meet one, it takes an evening. What tells them
# apart is a question to the machine: does that name lead anywhere?


# %%
def call_rank_0(host: str, port: int) -> None:
    """Look for rank 0's store, as every rank does first; for 4 seconds, in place of minutes."""
    dist.TCPStore(host, port, 1, False, timedelta(seconds=4))


def unknown_name() -> None:
    call_rank_0("nowhere-" * 9, 29500)  # too long for DNS


def silent_port() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # nobody listens there, and nobody else may
        call_rank_0("127.0.0.1", held.getsockname()[1])


def leads_nowhere(words: str) -> bool:
    """Whether this machine finds no address for the host that these words name."""
    called = re.search(r"connect to \((.+?), \d+\)", words)
    found = look(socket.getaddrinfo, called[1], None)() if called else None
    return isinstance(found, OSError | UnicodeError)


def two_failures_say_the_same() -> None:
    failures = {"unknown name": unknown_name, "silent port": silent_port}
    answers = {name: look(failure) for name, failure in failures.items()}  # they wait together
    alike = 0
    right = 0
    for name, answer in answers.items():
        said = str(answer(60)).partition("\n")[0]
        alike += "client socket has timed out" in said
        right += leads_nowhere(said) == (name == "unknown name")
        show(name, said)
    claim("failures that say: client socket has timed out", 2, alike, question=3)
    claim("of these, told apart by looking up the host name", 2, right, question=3)


# %% [markdown]
# ## 5. How it is measured: try what the machine promises
#
# PROGRAM is the smallest there is: all that a rank must be told is in its environment, put there by
# torchrun. The address that gloo listens on was predicted; the ranks look which sockets they have.
# NCCL needs a GPU for each rank: one proves that NCCL starts, two that they reach each other. But
# NCCL chooses its interface before it looks for GPUs, and says so: so that choice can be checked
# everywhere.

# %%
PROGRAM = """
import ctypes, datetime, json, os, sys, torch, torch.distributed as dist
sys.platform == "linux" and ctypes.CDLL(None).prctl(1, 9)  # die with torchrun
backend, rank, wait = sys.argv[1], int(os.environ["RANK"]), datetime.timedelta(seconds=90)
device = None
if backend == "nccl":
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
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
        return subprocess.run(command, env=env, **pipes, timeout=170).stdout
    except subprocess.TimeoutExpired as late:  # killed, and its ranks with it
        return f"{(late.output or b'').decode()}\n{n} ranks gave no answer in {late.timeout} s"


def ranks_meet(backend: str, n: int, said: object) -> None:
    """From what n ranks said: they summed right, and listened where it was predicted."""
    met = [json.loads(line) for line in re.findall("^MET (.*)", str(said), re.M)]
    expected = n * (n + 1) / 2
    totals = [total for total, _ in met]
    worst = max(totals, key=lambda total: abs(total - expected), default=NOTHING)
    claim(f"1 + ... + {n}, summed through {backend}", expected, worst if len(met) == n else NOTHING)
    listens = set()
    for _, addresses in met:
        listens.update(addresses)
    if len(met) < n:
        prescribe(said)
    elif backend == "gloo" and listens:
        wrong = len(listens ^ set(gloo_addresses()))
        claim("addresses gloo listens on, wrongly predicted", 0, wrong, question=1)


def every_gpu_joins() -> None:
    gpus = torch.cuda.device_count() if dist.is_nccl_available() else 0
    if gpus:
        ranks_meet("nccl", gpus, look(torchrun, "nccl", gpus)(180))
    if gpus < 2:
        blocked("an all-reduce between GPUs through NCCL", needs="2 GPUs")


# %% [markdown]
# NCCL's own words, without a GPU: making a *unique id* opens the socket where ranks will meet.

# %%
ASK_NCCL = """
import ctypes, os, sys
ctypes.CDLL(sys.argv[1]).ncclGetUniqueId(ctypes.create_string_buffer(128))
ctypes.CDLL(None).fflush(None)  # what NCCL printed lies in C's buffer
os._exit(0)  # its thread would wait for ranks
"""


def nccl_library() -> str | None:
    """The NCCL that torch brought."""
    torch_folder = Path(importlib.util.find_spec("torch").origin).parent
    found = sorted(torch_folder.parent.glob("nvidia/nccl/lib/libnccl.so*"))
    return str(found[0]) if found else None


def interface_nccl_takes(library: str) -> str:
    """The first interface that NCCL names when it opens its bootstrap socket."""
    command = [sys.executable, "-c", ASK_NCCL, library]
    env = {k: v for k, v in os.environ.items() if not k.startswith("NCCL_DEBUG")}
    env["NCCL_DEBUG"] = "INFO"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    said = subprocess.run(command, env=env, **pipes, timeout=100).stdout
    return re.search(r"Bootstrap ?: Using (\S+?):", said)[1]


def nccl_takes_what_is_predicted() -> None:
    text = "interfaces NCCL meets on, wrongly predicted"
    library = nccl_library()
    nets = look(interfaces)()
    chosen = {"NCCL_SOCKET_IFNAME", "NCCL_COMM_ID"} & set(os.environ)
    if library is None or isinstance(nets, Exception) or chosen:
        blocked(text, needs="NCCL in torch, psutil, and no choice in NCCL_SOCKET_IFNAME")
        return
    taken = look(interface_nccl_takes, library)(110)
    predicted = nccl_interfaces(list(nets))[:1]
    show("NCCL meets on", taken)
    claim(text, 0, int([taken] != predicted), question=1)


# %% [markdown]
# Does the host name lead here? And is shared memory there? DataLoader workers and NCCL hand data
# over in it. A file in /dev/shm may be longer than the memory behind it: then the *write* kills
# with SIGBUS. `posix_fallocate` asks before.


# %%
def the_host_name_is_ours() -> None:
    name = socket.getfqdn()
    held = look(own_addresses, name)()
    count = len(held) if isinstance(held, list) else 0
    claim("addresses of the host name that are this machine's", 1, count, ">=")
    if not count:
        prescribe(f"{name} has no address of this machine: {held}")


def fill_shared_memory(size: int) -> int:
    """Write `size` bytes; return how many came back unchanged."""
    block = os.urandom(2**20)
    with tempfile.TemporaryFile(dir=SHM) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        file.writelines([block] * (size // len(block)))
        file.seek(0)
        same = 0
        while got := file.read(len(block)):
            if got == block:
                same += len(got)
        return same


def shared_memory_is_there() -> None:
    if not os.path.isdir(SHM):
        blocked(f"bytes that {SHM} gives back", needs="a system library: Linux")
        return
    size = min(shutil.disk_usage(SHM).free, 2**27) >> 20 << 20  # 2**27 is twice Docker's default
    same = look(fill_shared_memory, size)()
    count = same if isinstance(same, int) else NOTHING
    claim(f"bytes that {SHM} gives back", size, count, question=2)
    if same != 2**27:
        prescribe(f"insufficient shared memory in {SHM}: {same!r} of {2**27} bytes")


# %% [markdown]
# ## 6. What is missing, and what that blocks
#
# A lesson says in its own source what it needs: in its imports and its `blocked(...)` calls. So the
# table of lessons is read off the lessons, and is never out of date.

# %%
PARTS = """
C++ compiler | c++ --version | building FFCV | apt install g++
DeepSpeed | deepspeed | ZeRO and offload as DeepSpeed does them | pip install -e '.[deepspeed]'
FFCV | ffcv | FFCV's loaders | make .venv/all, which asks apt-get for compilers
nvtx | nvtx | names in the timelines of GPUs | pip install -e '.[profiling]'
nsys | nsys --version | timelines of GPUs | NVIDIA Nsight Systems
py-spy | py-spy | stacks of ranks that hang | pip install -e '.[profiling]'
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


def needs_of(tree: ast.AST) -> set[str]:
    """What the `blocked(...)` calls of a lesson name, by keyword or by position."""
    needs = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "blocked":
            named = [keyword.value for keyword in node.keywords if keyword.arg == "needs"]
            for argument in [*node.args[1:], *named]:
                texts = [part for part in ast.walk(argument) if isinstance(part, ast.Constant)]
                needs.update(str(text.value) for text in texts)
    return needs


def imports_of(tree: ast.AST) -> set[str]:
    """The packages that a lesson imports, anywhere."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


def lacking(lesson: str, missing: dict[str, str]) -> str:
    """What a lesson needs, going by its source, and this machine has not; `missing` parts."""
    tree = ast.parse(lesson)
    short = {part for part, how in missing.items() if how in imports_of(tree)}
    for need in needs_of(tree):
        gpu = re.match(r"(\d*)\+? ?GPU", need)
        wanted = int(gpu[1] or 1) if gpu else 0
        if torch.cuda.device_count() < wanted:
            short.add("1 GPU" if wanted == 1 else f"{wanted} GPUs")
        short |= {part for part in missing if re.search(rf"\b{re.escape(part)}\b", need)}
    return ", ".join(sorted(short))


def what_runs_here() -> None:
    print0("\nWhat is here, and what is not\n")
    parts = [line.split("|") for line in PARTS.strip().splitlines()]
    parts = [tuple(map(str.strip, part)) for part in parts]
    found = {part: look(version, how)() for part, how, _, _ in parts}
    missing = {part: how for part, how, *_ in parts if isinstance(found[part], Exception)}
    show("here", ", ".join(f"{part} {found[part]}" for part in found if part not in missing))
    for part, _, blocks, get in parts:
        if part in missing:
            show(f"no {part}", f"blocks {blocks}. Get it: {get}")
    print0("\nWhich lessons run here\n")
    root = Path(__file__).resolve().parents[1]
    course = []
    for folder in FOLDERS:
        course += sorted(root.glob(f"{folder}/[0-9][0-9]_*.py"))
    for path in course:
        short = lacking(path.read_text(), missing)
        place = str(path.relative_to(root))
        print0(f"  {place:54} {'all but what needs ' + short if short else 'all'}")
    if not course:
        print0("  This file was copied out of the course; there it lists them.")
    if any(row["verdict"] == "FAIL" for row in ledger):
        print0("\nFix the first FAIL, then run this again.")


# %% [markdown]
# ## What you should have seen
#
# 1. gloo listens where the *host name* points (or GLOO_SOCKET_IFNAME), NCCL on the first interface
#    whose name begins with `ib`, else on the first that is neither loopback nor docker. On a laptop
#    these are often two different networks, and on a cluster both may be the slow one: NCCL's data
#    then take InfiniBand all the same; gloo's do only as TCP, over an `ib` interface's address. On
#    one machine NCCL only meets there: data go by NVLink, PCIe or shared memory. The claims compare
#    what was predicted with the sockets that were really open.
# 2. All 128 MiB, unless this is a container: Docker gives 64 MB, and then the claim shows how many
#    there are. `docker run --shm-size=1g` gives more, or `--ipc=host`; in Kubernetes, an emptyDir
#    of medium Memory. A program that only asks how long its file is would have been told 128 MiB.
# 3. An unknown host name, and a host where nobody listens. Both die with the same words, so a table
#    cannot tell; looking up the name does. launch/diagnose.py says of both "nobody listens", and to
#    look up the name first. Where no table knows the words, read the first error of the first rank.
#
# **Try.** `rank + 2.0` sums to 5 for 3: a wrong sum is a FAIL, as a hang or a crash would be. With
# `lo` first, NCCL is predicted on the loopback, and NCCL itself says otherwise.
#
# On GPUs NCCL starts on every card and sums through all of them; look at the lines of the cards
# first (width of PCIe, "SLOWED by", other programs). On a thousand GPUs this is a *prolog*: run on
# each node before each job, for one node that fails stops all.


# %%
def main() -> None:
    command_line()
    if WORLD_SIZE > 1:
        refuse(f"needs 1 rank, for it starts its own; got {WORLD_SIZE}; run it with plain python")
    gloo = look(torchrun, "gloo", 2)  # its ranks import torch while we look around
    print0(f"This machine, as torch {torch.__version__} finds it\n")
    for name, probe in {"computer": computer, "GPUs": gpus, "network": network}.items():
        show(name, look(probe)())
    print0(f"\n{'What it promises, tried':63} {'predicted':22} {'measured':>11}\n")
    the_host_name_is_ours()
    ranks_meet("gloo", 2, gloo(180))
    nccl_takes_what_is_predicted()
    every_gpu_joins()
    shared_memory_is_there()
    print0("\nTwo failures that you will meet\n")
    two_failures_say_the_same()
    what_runs_here()
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
