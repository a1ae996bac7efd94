"""Who hangs, who is slow, what died: point this file at your own job
===================================================================

    python diagnose.py --job train.py               # it stands still, or is slow: this node's ranks
    python diagnose.py --pids 4711 4712 4713 4714   # the same, by number
    python diagnose.py --dumps DIR                  # flight-recorder dumps, gathered from all nodes
    python diagnose.py --log train.log ...          # what it printed before it died; - reads a pipe
    python diagnose.py --nccl-logs /tmp/nccl.*      # NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,COLL
    python diagnose.py --steps steps.*.csv          # it is slow: each rank's seconds per step

It prints what happened in one sentence; the guilty rank, host, line, collective, number and group;
who waits for whom; the evidence; what to type next; or, if it cannot tell, what to collect. It
exits with 0 if nothing is wrong, 1 if it names a fault, 2 if it cannot tell.

Copy this file alone. It needs Python 3.11; --job and --pids need Linux, py-spy and the right
to trace: the job's own user, or root where the system asks for it. It leaves the job as it is:
py-spy reads without stopping a process, and a dump, a pickle, is refused if it would run code.

Dumps: torch 2.4 to 2.15, gloo and both NCCL backends, pickle or JSON, named as torch names them
(..._rank_7), in DIR or in folders below it, each named after its host. Logs: torchrun's, Slurm's,
Kubernetes' with prefixes, .gz, of any size; a GB takes 4 minutes at most. Steps: a file per rank, a
number per line; or CSV with columns own (seconds until a rank is ready to communicate) and perhaps
rank, step (the whole), data (waiting for the loader).

Limits: looks for 6 s accuse a rank in a 60 s upload or loop: look again, --seconds 90; a copied
dump or log looks as old as its file. It reads main threads alone. Stacks have no sequence numbers:
it votes, and with tensor or pipeline groups only dumps are sure. Two ranks cannot outvote each
other. Of several causes in a log it takes the first of its table. At first try it named a
wrong cause for 6.7, 9.7 and 12.9% of three sets of public reports: read the evidence. Real dumps
were gloo's, of torch 2.15; NCCL's, old and new, and its logs are made up. Not run on several GPUs.
"""

import argparse
import csv
import functools
import gc
import gzip
import json
import linecache
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from threading import Thread
from typing import NamedTuple

PATIENCE = 30  # seconds: a call that is younger may only be slow
LATE, WINDOW, FALSE_ALARM = 1.1, 20, 0.01  # a straggler: so many times the median, in so many steps
LIBRARY = re.compile(r"(site|dist)-packages/|/lib(64)?/python3|/bin/|^<|torch/(distributed|_)")
HOST = os.uname().nodename

# A row: its name: the words that give it away; what they mean [where seen; # is an issue on GitHub]
# -> what to type. Causes first, consequences last: of all rows whose words occur the first counts.
LAST_WORDS = r"""
no way out: Max retries exceeded|HTTPSConnectionPool|URLError|LocalEntryNotFound|ProxyError
  a node without internet wants to download [datasets#1996] -> download elsewhere; HF_HUB_OFFLINE=1
port taken: EADDRINUSE|[Aa]ddress already in use|server socket has failed
  another job has MASTER_PORT [pytorch#85604] -> ss -ltnp | grep :29500; torchrun --standalone
no ssh: \bssh\b.*(exit (status|code) 255|connect to host)|denied \(publickey|Host key verif
  the launcher cannot log in to a node [DeepSpeed#4907] -> ssh NODE hostname; ssh-copy-id NODE
unknown host name: gai ?error|nodename nor|Name or service not known|ilure in name|no address of
    |Name does not resolve|can't resolve
  MASTER_ADDR leads nowhere [pytorch#131691] -> getent hosts $MASTER_ADDR $(hostname -f); use an IP
wrong interface: find address for|FullMesh failed with|o (socket )?interface found|r AF_INET
    |ss_family|onnect (to )?\[?(127\.0\.1\.|169\.254\.)
  the host's name or the interface leads to no node [pytorch#29482] -> getent hosts $(hostname);
     ip -br a; set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME
no NCCL: doesn't have NCCL built in|requires at least one CUDA device|no GPUs found|No CUDA GPUs are
  torch is a CPU build, or sees no GPU [torch] -> nvidia-smi; python -m torch.utils.collect_env
two ranks on a GPU: Duplicate GPU detected|Multiple Ranks are using the same GPU
  no set_device, or more ranks than GPUs [verl#161] -> torch.cuda.set_device(LOCAL_RANK) first
more ranks than GPUs: invalid device ordinal|You requested gpu|than the device count
  a rank's GPU is not there, or hidden [stanford_alpaca#67] -> nvidia-smi -L; fewer --nproc-per-node
wrong GPU: ProcessGroupNCCL2? is bound to device
  tensors on one GPU, group on another [torch 2.15] -> set_device(LOCAL_RANK) before any tensor
versions differ: [Mm]ismatched NCCL version|NCCL version mismatch|undefined symbol: nccl
  nodes run different builds of NCCL [nccl, init.cc] -> torch.cuda.nccl.version() on every node
driver too old: version is insufficient|r system is too old|no kernel image|named symbol not found
  driver or GPU does not fit this torch [CUDA] -> nvidia-smi; python -m torch.utils.collect_env
fabric manager: system not yet initialized|CUDA error 802|Error 802
  the NVSwitches are not set up [CUDA] -> systemctl status nvidia-fabricmanager; start it
broken GPU: Xid(?: \(.*?\):)? (48|6[34]|74|79|9[245]|119|120|14[4-9]|150)\b|off the bus
    |ECC error|uncorrectable \w+ error|determine the device handle|RESET_REQUIRED
  memory, link or card gave up [open-gpu-kernel-modules#1151] -> dmesg | grep -i xid; drain the node
index out of range: side assert triggered|cudaErrorAssert|Assertion `.*([Ii]ndex|target|Src).*failed
  a label or token beyond the layer's size [lm-evaluation-harness#2293] -> CUDA_LAUNCH_BLOCKING=1
wild kernel: illegal memory access|misaligned address|unspecified launch failure|_EXECUTION_FAILED
    |illegal instruction|Memory access fault by GPU|Xid(?: \(.*?\):)? (13|31|43|45)\b
  the program's fault before the card's [NVIDIA, Xid] -> CUDA_LAUNCH_BLOCKING=1, compute-sanitizer
another Xid: \bXid\b
  hardware, driver or program [NVIDIA, Xid] -> its number at docs.nvidia.com/deploy/xid-errors
GPU memory full: (CUDA|HIP|XPU) out of memory|torch\.OutOfMemoryError|CUDA error: out of memory
    |_ALLOC_FAILED|Cuda failure.*out of memory|Failed to CUDA calloc
  it needs more than is left [trl#3436] -> nvidia-smi; smaller micro-batch, checkpointing, sharding
host memory full: can't allocate memory|(?<!OutOf)MemoryError|std::bad_alloc
  more than the host or a limit allows [torch, alloc_cpu.cpp] -> free -g; ulimit -v; fewer workers
kernel too greedy: out of resource: shared memory|OutOfResources
  a Triton kernel wants more than an SM has [triton] -> smaller blocks, fewer num_stages
too many open files: Too many open files|received \d+ items of ancdata
  loader workers share tensors by files [pytorch#973] -> ulimit -n 65536; fewer workers
too many processes: (thread|fork).*Resource temporarily un|can't start new thread
  a user's or a pod's limit of processes and threads [verl#472] -> ulimit -u; OMP_NUM_THREADS=1
RDMA refused: ibv_\w+ failed
  locked memory, or a wrong address [nccl-tests#206, #185] -> ulimit -l; show_gids; NCCL_IB_HCA
too little shared memory: (rror|ailed|able|space|out of|ufficient|raise).*(/dev/shm|shared memory)
    |/dev/shm.*(rror|ailed|space left)|</torch_\d+|[Bb]us error|SIGBUS|\bshm\.h:(?!.*Cuda)
    |(code|status)( *[:=])? (-7|135)\b
  a container has 64 MB of it [pytorch#5040] -> df -h /dev/shm; --shm-size=8g; emptyDir: Memory
disk full: No space left on device|[Dd]isk quota exceeded|PytorchStreamWriter failed writing
  checkpoints, logs or caches fill a disk or a quota [dolly#139] -> df -h; df -i; quota -s
storage gone: Stale file handle|Transport endpoint is|Input/output error
  a file server, its mount or the terminal is gone [Linux] -> df; dmesg -T | tail; tmux
time is up: DUE TO TIME LIMIT|DUE TO PREEMPTION|DeadlineExceeded
  the scheduler took the nodes [Slurm] -> sacct -j JOB; sbatch --signal=B:USR1@300; --requeue
killed for memory: (code|status)( *[:=])? (-9|137)\b|(?<!Signals\.)SIGKILL|EXIT CODE: 9\b
    |[Oo]ut [Oo]f [Mm]emory(: Killed|\s*$)|killed by signal: Killed|[Ss]ignal 9\b|\d+ Killed\s
    |\b[Oo][Oo][Mm].?[Kk]ill(?!.disable| 0)|: Killed$|low on memory|OUT_OF_MEMORY
  SIGKILL, mostly for host memory [ArjunaUsers#52] -> dmesg -T | grep -i 'out of mem'; fewer workers
crash in native code: (code|status)( *[:=])? (-(11|4|8)|139)\b|SIGSEGV|[Ss]egmentation fault
    |SIGILL|SIGFPE|[Ss]ignal (11|4|8)\b
  torch's, a library's or your compiled code [Megatron-LM#1880] -> python -X faulthandler train.py
package missing: ModuleNotFoundError|No module named|cannot open shared object file
    |execve\(\): [\w.-]+: No such|(run|python3?|accelerate|deepspeed): (command )?not found
    |sh: \S+/bin/\S+: No such
  another Python, or an image that lacks it [Python] -> sys.executable, pip list on every node
unused parameter: Expected to have finished reduction in the prior iteration|did not receive grad
  the loss does not depend on a parameter [pytorch#43259] -> TORCH_DISTRIBUTED_DEBUG=DETAIL names it
gradient twice: marked as ready twice|mark a variable ready only once
  reentrant checkpointing, or two forwards [torch, reducer.cpp] -> use_reentrant=False; static_graph
calls differ: [Mm]ismatch between collectives|Received data size doesn't match|preamble.length
    |Mismatched collective|DDP expects same model|not to match (sizes|strides) of the same param
  another collective, order, shape or dtype [nccl#296] -> --dumps; TORCH_DISTRIBUTED_DEBUG=DETAIL
a loader died: DataLoader worker (\(pid[(s)\d, ]+\) )?(exited|is killed)|Caught \w+ in DataLoader
  a worker raised or was killed, perhaps for too little shared memory [pytorch#5040] -> dmesg -T |
     grep -i 'out of mem'; num_workers=0; df -h /dev/shm; --shm-size=8g
loss is NaN: [Ll]oss'?[ :=]*(is |became )?(infinite or )?(NaN|nan)\b(?!.*skip)
  numbers overflow, or the data holds bad ones [Detectron#83] -> a lower rate; clip_grad_norm_
exception of the program: THE LAST LINE OF A TRACEBACK
  a rank raised, and the others end or wait for it [Python] -> that line, with this rank's data
ended from outside: got signal: |Received \d+ death|signal SIG(HUP|INT)|KeyboardInterrupt
    |CANCELLED AT(?!.* TASK)|DUE TO(?! TASK)|NodeLost|\b[Ee]victed\b|low on resource
  scheduler, Ctrl-C (2), closed terminal (1) [Chinese-Vicuna#73] -> sacct -j JOB; kubectl describe
RDMA gave up: NET/IB.*((status|error)[= ](5|12)\b|event : .*error)|RETRY_EXC_ERR
    |NET/OFI.*error|mlx5:.* got completion
  a bad link, card, or a dead peer [nccl#1814] -> ibstat; ib_write_bw between them; one card always?
hang in training: Watchdog caught|operation timeout|Timed out waiting \d+ms for
    |watchdog (got stuck|hang)|Timeout at NCCL work|\[(missing|ready) ranks:|Stalled ranks:
  a rank did not call what others did [LlamaFactory#7396] -> ~/.cache/torch/*_rank_N, then --dumps
node missing: RendezvousTimeoutError|RendezvousClosedError
  another node's torchrun never came, or left [pytorch#116974] -> the same --rdzv-id on every node?
hang at init: clients joined|wait timeout after|based barrier|onitoredBarrier(?!, but)|e no answer
  a rank never started, died, or waits elsewhere [torch, store] -> this tool with --job on each node
nobody listens: client socket has (timed out|failed)|C10d store has failed
    |(?<!\d\] )Connection refused|socketStartConnect: Connect to .* failed
  no rank 0, no such name, or a firewall [pytorch#79388] -> getent hosts HOST; nc -vz HOST PORT
a peer died: [Cc]onnection (was )?(closed|reset)|ncclRemoteError|remote process exited|node has died
    |[Bb]roken pipe|lost communication with|Barrier, but|Horovod has been shut|ly disconnected
  this rank only noticed, or a link broke [nccl#2076] -> this tool with --log and all ranks' logs
NCCL stopped: (NCCL|Cuda) ([Ee]rror|failure)\b|NCCL comm.* aborted|unhandled \w+ err|nccl[A-Z]\w*Err
  it says no more; a wrong interface? [pytorch#111187] -> NCCL_DEBUG=WARN, then --log; ip -br a
"""
ROWS = re.findall(r"^(\w.+?): (.+)\n  (.+) -> (.+)", re.sub(r"\n {4}", "", LAST_WORDS), re.M)
NAMES = [name for name, *_ in ROWS]
PATTERNS = [re.compile(words) for _, words, *_ in ROWS]
RAISED = NAMES.index("exception of the program")


class Finding(NamedTuple):
    """What is known of a job."""

    kind: str  # "healthy", "cannot tell", or what is wrong: mostly the name of a row above
    what: str  # one sentence
    guilty: Sequence[str] = ()
    stack: Sequence[str] = ()  # of the first of these
    waits: Sequence[str] = ()  # who waits for whom
    evidence: Sequence[str] = ()
    type_next: Sequence[str] = ()

    def __str__(self) -> str:
        lines = [f"{self.kind.upper()}: {self.what}"]
        for title, said in zip(self._fields[2:], self[2:], strict=True):
            more = [f"... and {len(said) - 12} more"] if len(said) > 12 else []
            for i, line in enumerate([*said[:12], *more]):
                lines.append(f"  {'' if i else title.replace('_', ' '):10} {line}")
        return "\n".join(lines)


def some(ranks: Iterable[int]) -> str:
    shown = sorted(ranks)
    more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
    return ("rank " if len(shown) == 1 else "ranks ") + ", ".join(map(str, shown[:8])) + more


# Who waits for whom. A rank in a collective waits for each member of the group that has not made
# the same call; one that sends, for its peer. The guilty rank is where the arrows lead; if all wait
# for each other it is a vote: three ranks lack one's call, and that one lacks the calls of three.


def blame(waits: dict[int, set[int]]) -> list[int]:
    """The ranks that all others wait for in the end, and of these those that most wait for."""
    ranks = sorted(set(waits).union(*waits.values()))
    bit = {rank: 1 << place for place, rank in enumerate(ranks)}
    reach = {rank: sum(bit[other] for other in waits.get(rank, ())) for rank in ranks}
    for middle in ranks:
        for rank in ranks:
            if reach[rank] & bit[middle]:
                reach[rank] |= reach[middle]
    score = {}
    for rank in ranks:
        eventually = sum(bool(reach[other] & bit[rank]) for other in ranks if other != rank)
        score[rank] = (eventually, sum(rank in others for others in waits.values()))
    best = max(score.values(), default=(0, 0))
    return [rank for rank in ranks if score[rank] == best != (0, 0)]


class Call(NamedTuple):
    """A call that a rank has made."""

    group: tuple[str, str, str]  # its name, its description, its ranks if known
    seq: int  # 0 if unknown
    name: str  # "all_reduce", "send", ...
    tensors: str  # sizes and dtypes, or what else must be the same on all ranks
    peer: int | None  # of a send or recv, as the group numbers it; -1 is any
    open: bool  # not known to be over
    where: str  # the program's line
    created: float = 0  # seconds since 1970; 0 if unknown

    def __str__(self) -> str:
        to = "" if self.peer is None else f" (peer {self.peer})"
        number = f" #{self.seq}" if self.seq else ""
        group = " ".join(filter(None, self.group[:2]))
        group = f" of group {group}" if group else ""
        return f"{self.name}{to}{number}{group} at {self.where or 'an unknown line'}"

    def like(self, other: "Call") -> bool:
        """Whether two ranks' calls fit; in some collectives sizes differ by right."""
        uneven = re.search(r"(?i)all_?to_?all|_v\b|^gather|^scatter|coalesced", self.name)
        return self.name == other.name and (bool(uneven) or self.tensors == other.tensors)


@dataclass
class Record:
    """What one rank has left: its calls in order, where they were read, and when."""

    rank: int
    calls: list[Call]
    source: str = ""  # host and file or process, as far as they are known
    written: float = math.inf  # seconds since 1970

    def __post_init__(self) -> None:
        self.collectives = {(c.group, c.seq): c for c in reversed(self.calls) if c.peer is None}
        self.oldest = {group: seq for group, seq in self.collectives}
        over = {c.group: c.seq for c in self.calls if not c.open and c.peer is None}
        stuck: dict[tuple, Call] = {}  # the first open call in each group, and all messages
        for call in self.calls:
            if call.open and (call.peer is not None or call.seq > over.get(call.group, -1)):
                message = len(stuck) if call.peer is not None else -1
                stuck.setdefault((call.group, message), call)
        self.stuck = list(stuck.values())

    def at(self, call: Call) -> Call | None:
        """What this rank called under that number; the same, if it has been overwritten since."""
        overwritten = self.oldest.get(call.group, call.seq) > call.seq
        return call if overwritten else self.collectives.get((call.group, call.seq))

    def __str__(self) -> str:
        last = f"called last {self.calls[-1]}, which is over" if self.calls else "in no collective"
        last = f"in {self.stuck[0]}" if self.stuck else last
        place = ", ".join(filter(None, [f"rank {self.rank}", self.source]))
        return f"{place}: {last}"


def waits_of(rank: int, call: Call, records: dict[int, Record], ranks: list[int]) -> set[int]:
    """The ranks without which this call of a group of `ranks` cannot end."""
    if call.peer is None:
        own = {other: records[other].at(call) for other in ranks if other in records}
        return {o for o in ranks if o != rank and not (own.get(o) and own[o].like(call))}
    if not 0 <= call.peer < len(ranks):
        return set()
    peer = ranks[call.peer]
    answer = ("recv" if call.name == "send" else "send", call.tensors, ranks.index(rank))
    there = [c for c in (records[peer].stuck if peer in records else []) if c[2:5] == answer]
    own = [c for c in records[rank].stuck if (c.group, *c[2:5]) == (call.group, *call[2:5])]
    return set() if len(there) > [c is call for c in own].index(True) else {peer}


def members_of(records: dict[int, Record]) -> dict[tuple, list[int]]:
    """The ranks of each group. gloo's recorder leaves them out: then those that called in it."""
    found = defaultdict(set)
    for record in records.values():
        for group in {call.group for call in record.calls}:
            world = group[0] == "0" or group[1] == "default_pg"
            found[group] |= {*records, *range(max(records))} if world else {record.rank}
    known = {group: [int(rank) for rank in re.findall(r"\d+", group[2])] for group in found}
    return {group: known[group] or sorted(ranks) for group, ranks in found.items()}


def explain(records: dict[int, Record]) -> Finding:
    """The verdict on all ranks' calls."""
    members = members_of(records)
    calls = [(rank, call) for rank, record in records.items() for call in record.stuck]
    newest = max([c.created for record in records.values() for c in record.calls], default=0)
    old = [(r, c) for r, c in calls if max(records[r].written, newest) - c.created > PATIENCE]
    if not calls:
        ask = "if the job stands still, it does so outside of collectives: this tool with --job"
        return Finding("healthy", "every recorded call is over.", type_next=[ask])
    if not old:
        what = f"no open call was {PATIENCE} s old when the dump was written."
        return Finding("healthy", what, type_next=[f"dump again in {PATIENCE} s, and compare"])
    waits: dict[int, set[int]] = defaultdict(set)
    lines, differ = [], False
    for rank, call in old:
        others = waits_of(rank, call, records, members[call.group])
        waits[rank] |= others
        differ |= call.peer is None and any(o in records and records[o].at(call) for o in others)
        lines += [f"rank {rank}, in {call}, for {some(others)}"] if others else []
    if differ:  # a rank without a record may have died of that
        waits = {rank: others & {*records} for rank, others in waits.items()}
    guilty = blame(waits)
    if guilty:
        old = [(rank, call) for rank, call in old if waits[rank] & {*guilty}]
        return accuse(guilty, old, records)._replace(waits=lines)
    what = f"all members made the same calls, such as {old[0][1]}, and these do not end."
    ask = ["--dumps, if these were stacks or logs; if gloo's dumps, compare the groups above"]
    ask += ["else it lies below: dmesg -T | grep -i xid on each node; nvidia-smi; ncclras"]
    ask += ["NCCL_DEBUG=INFO NCCL_DEBUG_FILE=/tmp/nccl.%h.%p in the next run, then --log"]
    evidence = [f"rank {rank}: {call}" for rank, call in old]
    return Finding("cannot tell", what, evidence=evidence, type_next=ask)


def accuse(guilty: list[int], old: list, records: dict[int, Record]) -> Finding:
    """Name these ranks. `old` holds (rank, call) of those that wait for one of them."""
    rank, call = next((one for one in old if one[0] not in guilty), old[0])
    them = some(guilty)
    rest = some({r for r, _ in old} - {*guilty})
    record = records.get(guilty[0])
    asked = guilty if rank in guilty else guilty[:1]
    theirs = [records[one].at(call) for one in asked if one in records and call.peer is None]
    own = next((one for one in theirs if one and not one.like(call)), None)
    kind = "calls differ" if own else "hang in training"
    what = f"{them} did not come to {call}, where {rest} wait."
    if rank in guilty:
        where = "; ".join([f"rank {r} in {c.name} ({c.tensors or c.where})" for r, c in old[:4]])
        what = f"{them} wait for each other, and no majority says who is wrong: {where}."
    elif record is None:
        what = f"{them} left no record (dead, or not gathered), and {rest} wait in {call}."
    elif call.peer is not None:
        what = f"rank {rank} waits in {call}, and {them} does not answer with the same size."
    elif kind == "calls differ":
        what = f"{them} called {own.name} ({own.tensors}), but {rest} {call.name} ({call.tensors})."
    evidence = [f"{records[r].source}: {c} ({c.tensors})" for r, c in old[:3]]
    for mine in record.calls if record and call.peer is None else []:
        theirs = records[rank].at(mine) if mine.group == call.group and mine.peer is None else None
        if theirs and mine.created and theirs.where != mine.where:  # a log's lines always differ
            evidence += [f"ways part: rank {guilty[0]} calls {mine}; rank {rank} calls {theirs}"]
            break
    places = [str(records.get(one, f"rank {one}: no record, so no line")) for one in guilty]
    ask = ["this tool with --job on that node shows the stack; dmesg -T | tail"]
    ask += ["in the source: what condition, loop or exception takes this rank another way?"]
    return Finding(kind, what, places, evidence=evidence, type_next=ask)


# Flight-recorder dumps. NCCL's calls are scheduled, started, completed; retired, not completed is
# timed out. gloo's stay "scheduled", and those that are over are retired.


class PlainUnpickler(pickle.Unpickler):
    """Reads numbers, text, lists and dicts; refuses whatever else a pickle wants to call."""

    def find_class(self, module: str, name: str) -> Callable:
        if module == "torch.jit._pickle" and name in ("build_intlist", "build_doublelist"):
            return list
        raise pickle.UnpicklingError(f"it wants to run {module}.{name}")


def read_dump(path: Path, folder: Path) -> Record:
    """A rank's dump, in `folder` or in its host's folder below; ValueError if it is none."""
    try:
        with path.open("rb") as file:
            text = file.peek(1)[:1] == b"{"
            dump = json.load(file) if text else PlainUnpickler(file).load()
        groups = dump.get("pg_config") or {}
        ranks = {name: sys.intern(str(groups[name]["ranks"])) for name in groups}  # keeps its hash
        found = dump.get("entries") or []  # in a coalesced group only the last has a state
        last = {series(e): e["state"] for e in found if e["profiling_name"].endswith(":coalesced")}
        calls = [as_call(e, ranks, last.get(series(e), e["state"])) for e in found]
    except Exception as error:
        raise ValueError(f"{path}: not a flight-recorder dump ({error})") from error
    rank = int(re.search(r"(\d+)(\.\w+)?$", path.name)[1])
    host = "" if path.parent == folder else f"{path.parent.name}, "
    return Record(rank, calls, f"{host}{path}", path.stat().st_mtime)


def series(entry: dict) -> tuple:
    """What the calls of a coalesced group have in common with its last entry."""
    kind = "p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id"
    return entry["process_group"][0], kind, entry[kind]


def as_call(entry: dict, ranks: dict[str, str], state: str) -> Call:
    """An entry of a dump, less what is not needed."""
    library, _, said = entry["profiling_name"].rpartition(":")
    name, _, way = said.partition(" ")
    peer = re.search(r"(?:->|<-)(\d+)", way)
    message = name in ("send", "recv") or entry.get("is_p2p")
    side = "output" if name == "recv" else "input"
    sizes = zip(entry[f"{side}_sizes"], entry[f"{side}_dtypes"], strict=False)
    over = state == "completed" or (entry.get("retired") and not library.startswith("nccl"))
    group, about = entry["process_group"]
    return Call(
        (group, about.replace("undefined", ""), ranks.get(group, "")),
        entry["p2p_seq_id" if message else "collective_seq_id"],
        sys.intern(name),
        sys.intern(", ".join([f"{dtype}{size}" for size, dtype in sizes])),
        (int(peer[1]) if peer else -1) if message else None,
        not over,
        sys.intern(line_of(entry.get("frames") or [])),
        (entry.get("time_created_ns") or 0) / 1e9,
    )


def line_of(frames: list[dict]) -> str:
    """The innermost line outside of libraries; torch and py-spy begin with the innermost."""
    own = [frame for frame in frames if is_own(frame["filename"])]
    for frame in own or [frame for frame in frames if "/torch/" not in frame["filename"]]:
        file = "/".join(frame["filename"].split("/")[-2:])
        return f"{file}:{frame['line']} in {frame['name']}"
    return ""


@functools.cache
def is_own(file: str) -> bool:
    return not LIBRARY.search(file)


def diagnose_dumps(folder: str) -> Finding:
    """The verdict on all dumps in a folder and below."""
    records: dict[int, Record] = {}
    notes = []
    gc.disable()  # millions of objects, and no circles
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file() and re.search(r"\d(\.\w+)?$", path.name):
            try:
                new = read_dump(path, Path(folder))
            except ValueError as error:
                notes.append(str(error))
                continue
            old = records.setdefault(new.rank, new)
            notes += [f"{old.source}, {path}: both of rank {new.rank}"] if old is not new else []
            records[new.rank] = max(new, old, key=lambda one: one.written)
    gc.enable()
    if not records:
        ask = ["on each node: ls ~/.cache/torch/*_rank_*, or what TORCH_FR_DUMP_TEMP_FILE says"]
        ask += ["next run: TORCH_FR_BUFFER_SIZE=2000 TORCH_FR_DUMP_TEMP_FILE=/shared/rank_"]
        return Finding("cannot tell", f"no dump in {folder}.", evidence=notes, type_next=ask)
    finding = explain(records)
    return finding._replace(evidence=[*finding.evidence, *notes])


# NCCL's logs: a line per call, written when the host asks, so it tells who did not call, not whose
# GPU is late; and a line per communicator, which says what rank of it a process is.

CALLED = re.compile(
    r"(?<!\S)(\S+:\d+):\d+ \[\d+\] NCCL INFO ([A-Z]\w+): opCount .*"
    r"(count \d+ datatype \d+ op \d+ root \d+) comm (0x\w+)"
)
BORN = re.compile(r"(?<!\S)(\S+:\d+):\d+ .* comm (0x\w+) rank (\d+) nranks (\d+) (.*) - Init COM")


def diagnose_nccl_logs(files: list[str]) -> Finding:
    """The first call at which the ranks of a communicator differ."""
    born: dict[tuple, str] = {}  # {(process, address there): communicator}
    places: dict[str, dict] = defaultdict(dict)  # {communicator: {its rank: process}}
    calls: dict[tuple, deque] = defaultdict(lambda: deque(maxlen=4000))
    size = Counter()
    for file, number, line in lines_of(files):
        if found := BORN.search(line):
            process, address, place, ranks, about = found.groups()
            ids = re.search(r"commId (0x\w+)|parent (0x\w+) (.*color \S+)", about)
            name = ids[1] or f"{born.get((process, ids[2]))} {ids[3]}" if ids else about
            born[process, address] = name
            places[name][int(place)] = process
            size[name] = int(ranks)
        elif (found := CALLED.search(line)) and found[2] not in ("Send", "Recv"):
            process, name, tensors, address = found.groups()
            own = calls[born.get((process, address), address), process]
            seq = own[-1].seq + 1 if own else 1
            own.append(Call((), seq, name, tensors, None, False, f"{file}:{number}"))
    for name, process in places.items():
        group = (f"{name}, which numbers its ranks itself", "", str(list(range(size[name]))))
        own = {rank: calls[name, one] for rank, one in process.items()}
        finding = explain(first_difference(group, process, own))
        if finding.kind != "healthy":
            written = max([os.stat(file).st_mtime for file in files if file != "-"], default=0)
            fresh = time.time() - written < PATIENCE
            what = f"logs that grow, or were just copied (cp -p), say for now that {finding.what}"
            return finding._replace(kind="cannot tell", what=what) if fresh else finding
    if places and calls:
        return Finding("healthy", "all ranks of all communicators made the same calls.")
    ask = "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,COLL NCCL_DEBUG_FILE=/tmp/nccl.%h.%p torchrun ..."
    return Finding("cannot tell", "no calls, or no communicators, in there.", type_next=[ask])


def first_difference(group: tuple, process: dict[int, str], calls: dict) -> dict[int, Record]:
    """Each rank's calls up to the first at which they differ or one is behind: these are open."""
    said = defaultdict(set)
    for call in [call for own in calls.values() for call in own]:
        said[call.seq].add(call[2:4])
    end = min([seq for seq in said if len(said[seq]) > 1], default=max(said, default=0))
    behind = any(not own or own[-1].seq < end for own in calls.values())
    stands = behind or len(said[end]) > 1
    records = {}
    for rank, own in calls.items():
        own = [c._replace(group=group, open=stands and c.seq == end) for c in own if c.seq <= end]
        records[rank] = Record(rank, own, process[rank].replace(":", ", "))
    return records


# Logs are streamed. Of each row the first line that fits is kept, of each rank what it waits in.

HINT_WORDS = """
rror xcept ailed FAILED imeout imed atchdog Xid ECC OOM oom illed SIG ignal emory exit File Cause
Traceback Uncaught return AF_INET alloc space uota CANCEL DUE NET/ fault victed open ancdata reset
onnection refused ready reduction nterrupt clients arrier ddress Duplicate Multiple interface bound
ordinal match expects insufficient kernel initialized bus ssert illegal aligned OutOf ibv_ shm core
odule NodeLost low RETRY endezvous uires ocket remote roken unhandled nown resol nodename GPUs NCCL
answer undef writing param too srun family found lost ranks: EXIT denied thread connected NaN nan,
ssh: died receive such
"""
HINTS = HINT_WORDS.split()
RANK = re.compile(r"\[(?:default|(?i:rank) ?)(\d+)\]|^(\d+): |^\[\d+,(\d+)\]<|process (\d+) term")
PLACE = re.compile(
    r"\[pod/([\w.-]+)/|srun: error: ([\w.-]+): |^([\w.-]+):\d+:\d+ \[\d|(?<!\S)(\S+) kernel:"
)
TIME = re.compile(r"\d{4}-\d\d-\d\d[T _]\d\d:\d\d:\d\d")
FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)')
THROWN = re.compile(r"(^|[\s:|\]])(\w+\.)*([A-Z]\w*(Error|Exit|Full|Empty)|\w*Exception)\b")
BARE = re.compile(r"^(\[[\w,]+\](<\w+>)?: ?)?(\w+\.)*([A-Z]\w*Error|\w*Exception)(: |$)")
GUESSES = re.compile(r"\(1\) .*\(2\) .*")  # of a launcher or of torch: what the cause may be
WEAK = re.compile(
    r"^(?!.*(death signal|signal SIG(HUP|INT))).*"
    r"(\[W\d* |\bW\d{4} |[Ww]arning(?!s for)|WARNING|[Rr]etry|errno: 97|NCCL INFO)"
)
WENT_ON = re.compile(r"(?<!\S)(\S+:\d+):\d+ \[\d+\] NCCL INFO (Using network|.* Init COMPLETE)")
WORK = re.compile(r"caught collective.*WorkNCCL\(SeqNum=(\d+), OpType=(\w+)(?:, (NumelIn=\d+))?")
QUEUED = re.compile(r"\[PG (?:ID \d+ PG GUID )?(\S+).* Rank \d+\].*last enqueued .*work: (\d+),")
LISTED = re.compile(r"\b(host|rank) {6}: (\S+)")  # torchrun's list of failures
ABORTED = re.compile(r"Terminating (StepId|job step)|Job step aborted")
INDENTED = re.compile(r"^(\S*:)?\s{2}")  # of a traceback, after a rank's prefix
ENDS = re.compile(r"(?i)\b(train|job|run|all )\w*.{0,30}(done|finish|complete)|^\W*done|n_runtime")
SOURCE = re.compile(r"(^|\s{2,})(raise|except) ")  # in a traceback; its last line tells more
FAILED = re.compile(
    r"failed \(exitcode|core dumped|non-zero exit|ChildFailed|Process(Exit|Rais)ed"
    r"|(Actor\w*|RayTask)Error|[Ss]ee .*root cause|FullMesh failed"
)


def lines_of(files: list[str]) -> Iterator[tuple[str, int, str]]:
    """(file, number, line) of text files, gzipped ones, and of standard input for "-"."""
    for file in files:
        opened = gzip.open if file.endswith(".gz") else open
        with opened(0 if file == "-" else file, "rt", errors="replace") as stream:
            read = functools.partial(stream.readline, 1 << 16)
            for number, line in enumerate(iter(read, ""), 1):
                yield file, number, line[:2000] + line[2000:][-1000:]  # patterns take their square


def first_of(pattern: re.Pattern, line: str) -> str:
    found = pattern.search(line)
    return next(filter(None, found.groups()), found[0]) if found else ""


Hit = namedtuple("Hit", "when file number text rank host own_line calm")  # a line that fits a row


class Log:
    """What is kept of logs while they are read."""

    def __init__(self) -> None:
        self.hits: dict[int, Hit] = {}  # {row: its first line}
        self.weak: dict[int, Hit] = {}  # {row: its last line, a warning}
        self.own_line: dict[str, str] = {}  # of each rank's traceback
        self.raising: set[str] = set()  # ranks in a traceback
        self.work: dict[int, tuple] = {}  # what each rank's watchdog gave up on
        self.queued: dict[int, tuple] = {}  # each rank's group then, and its last call there
        self.listed = {"host": "", "rank": ""}  # in torchrun's list of failures, just now
        self.hosts: dict[str, str] = {}  # of the ranks in that list
        self.failed = False  # a launcher says so
        self.aborted = False  # Slurm ends the job: what it kills from here on is no cause
        self.length: dict[str, int] = {}  # of each file, in lines
        self.calm: dict[str, int] = Counter()  # the lines of each file outside of tracebacks
        self.ends: dict[str, deque] = defaultdict(lambda: deque(maxlen=10))  # last lines

    def read(self, file: str, number: int, line: str) -> None:
        """Keep what a line says."""
        self.length[file] = number
        self.calm[file] += not INDENTED.search(line)
        self.ends[file].append(line)
        if found := LISTED.search(line):
            self.listed[found[1]] = found[2]
            if found[1] == "rank":
                self.hosts[found[2]] = self.listed["host"]
        if not any(hint in line for hint in HINTS):
            return
        rank = first_of(RANK, line)
        if found := FRAME.search(line):
            if is_own(found[1]):
                self.own_line[rank] = f"{found[1]}:{found[2]} in {found[3]}"
        elif "Traceback (most recent" in line:
            self.raising.add(rank)
            self.own_line.pop(rank, None)
        else:
            self.note(file, number, line.strip(), rank)

    def note(self, file: str, number: int, line: str, rank: str) -> None:
        if rank and (found := WORK.search(line)):
            self.work.setdefault(int(rank), found.groups(""))
        if rank and (found := QUEUED.search(line)):
            self.queued.setdefault(int(rank), found.groups())
        self.failed |= bool(FAILED.search(line))
        self.aborted |= bool(ABORTED.search(line))
        raising = rank in self.raising or "Uncaught " in line
        if found := WENT_ON.search(line):
            refused = NAMES.index("RDMA refused")
            if refused in self.hits and found[1] in self.hits[refused].text:
                del self.hits[refused]  # NCCL took another card
        row = row_of(GUESSES.sub("", line), THROWN if raising else BARE)
        if row is None or (self.aborted and line.startswith("srun: error")):
            return
        weak = WEAK.search(line) or (row == RAISED and not raising)
        own_line = self.own_line.get(rank, "") if rank in self.raising else ""
        self.raising.discard(rank)
        if re.search(r"(exitcode|traceback) +: ", line):
            rank = self.listed["rank"]
        about = (rank, first_of(PLACE, line), own_line, self.calm[file])
        hit = Hit(first_of(TIME, line), file, number, line, *about)
        old = self.hits.get(row)
        old = None if old and self.calm[old.file] - old.calm > 2000 else old  # it went on
        tells = old and rank == old.rank and own_line and not old.own_line
        if weak:
            self.weak[row] = hit
        elif not old or tells or (rank and not old.rank) or "" < hit.when < old.when:
            self.hits[row] = hit

    def timeouts(self) -> Finding:
        """Who did not come, as far as the watchdogs say which calls they gave up on."""
        names = {name for name, _ in self.queued.values()}
        only = names.pop() if len(names) == 1 else ""
        records = {}
        for rank, (seq, name, tensors) in self.work.items():
            group = ("PG " + self.queued.get(rank, (only,))[0], "", "")
            records[rank] = Record(rank, [Call(group, int(seq), name, tensors, None, True, "")])
        for rank, (name, last) in self.queued.items():
            group = ("PG " + name, "", "")
            stuck = [r.calls[0].seq for r in records.values() if r.calls[0].group == group]
            if rank not in records and int(last) < min(stuck, default=0):
                call = Call(group, int(last), "its last call", "", None, False, "")
                records[rank] = Record(rank, [call])
        return explain(records)


def row_of(line: str, thrown: re.Pattern) -> int | None:
    """The row that a line fits: by its words, or as an exception's last line."""
    raised = thrown.search(line) and not FAILED.search(line) and not SOURCE.search(line)
    rows = (row for row, pattern in enumerate(PATTERNS) if pattern.search(line))
    return next(rows, RAISED if raised else None)


def diagnose_logs(files: list[str]) -> Finding:
    """What killed the job that wrote these."""
    log = Log()
    for file, number, line in lines_of(files):
        log.read(file, number, line)
    late = {row: weak for row, weak in log.weak.items() if log.length[weak.file] - weak.number < 50}
    causes = {row: hit for row, hit in late.items() if row <= RAISED}
    hits = {row: h for row, h in log.hits.items() if log.calm[h.file] - h.calm <= 2000} or causes
    if not hits:
        peer = late.get(NAMES.index("a peer died"))
        odd = [f"{peer.file}:{peer.number}: {peer.text[:150]}"] if peer else []
        ended = any(ENDS.search(line) for lines in log.ends.values() for line in lines)
        kind = "healthy" if ended and not (log.raising or log.failed or odd) else "cannot tell"
        what = "no words in there are known to end a job" + ("." if ended else ", nor of its end.")
        if odd:
            what = "it ends with warnings only, as a job does that is over, or has lost a rank."
        ask = ["if it stands still: this tool with --job"]
        ask += ["if it died: all ranks' logs, by torchrun --log-dir D -r 3 -t 3; dmesg -T | tail"]
        return Finding(kind, what, evidence=odd, type_next=ask)
    name, _, meaning, remedy = ROWS[min(hits)]
    first = hits[min(hits)]
    rank = first.rank
    host = first.host or log.hosts.get(rank, "")
    local = re.search(r"local_rank: \d+", first.text)
    who = [f"rank {rank}" if rank else local and local[0], host and f"on {host}"]
    said = " ".join(filter(None, [*who, first.own_line and f"at {first.own_line}"]))
    evidence = [f"{h.file}:{h.number}: {h.text[:200]}" for _, h in sorted(hits.items())]
    finding = Finding(name, f"{said or 'some rank'}: {meaning}", [said] if said else [])
    if name == "hang in training" and log.timeouts().kind in (name, "calls differ"):
        finding = log.timeouts()
    return finding._replace(evidence=evidence, type_next=[remedy])


# Stacks, by py-spy, two a second. A job hangs if nothing changes: neither stacks nor, where a rank
# is in no call, what its main thread computed; and somebody is waited for. It hangs, too, if one
# rank runs in one function, and the others stand in one call. If all move on, the last is slow.

WAITING = re.compile(
    r"_c10d\.py (?!_|wrapper)(\w+)|_engine_run_(\w+)$|(wait_tensor|synchronize)$"
    r"|(_broadcast_coalesced|_verify_param\w+)$"  # in DDP's constructor and forward
)
BELOW = re.compile(r"\.(wait|item|tolist|cpu|synchronize)\(")  # waits in C++: the text tells


class Look(NamedTuple):
    """A rank at one moment."""

    rank: int
    pid: int
    alive: bool
    stack: tuple[str, ...] = ()  # "file:line in function: text", innermost first
    line: str = ""  # the program's
    call: str = ""  # the collective, or what waits for one or for the GPU
    peer: int | None = None  # of a send or recv
    error: str = ""  # of py-spy
    slept: str = ""  # how often the main thread has waited for something
    computed: tuple[str, ...] = ()  # its ticks, and how often it was made to wait for a core


SILENT: set[str] = set()  # files whose disk has not answered


def source(path: str, number: int) -> str:
    """A line of a file; nothing if its disk does not answer for two seconds."""
    found: list[str] = []
    reads = Thread(target=lambda: found.append(linecache.getline(path, number)), daemon=True)
    if path not in SILENT:
        reads.start()
        reads.join(2)
    if not found:
        SILENT.add(path)
    return "".join(found).strip()


def proc(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""


def look_at(rank: int, pid: int, py_spy: str) -> Look:
    """A process's main thread, now."""
    stat = proc(pid, f"task/{pid}/stat").rpartition(")")[2].split()
    if not stat or stat[0] in "ZX":
        return Look(rank, pid, False)
    slept, *forced = re.findall(r"ctxt_switches:\s(\d+)", proc(pid, f"task/{pid}/status")) or "0"
    command = [py_spy, "dump", "--json", "--nonblocking", "--locals", "--pid", str(pid)]
    for _ in range(5):  # what runs may change while it is read
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
        except subprocess.TimeoutExpired:
            return Look(rank, pid, True, error="py-spy does not come back")
        if ran.returncode == 0:
            break
    else:
        said = ran.stderr.strip().partition("\n")[0] or "no stack"
        return Look(rank, pid, True, error=said) if proc(pid, "cmdline") else Look(rank, pid, False)
    threads = json.loads(ran.stdout)
    frames = next((t for t in threads if t["os_thread_id"] == pid), threads[0])["frames"]
    look = Look(rank, pid, True, (), line_of(frames), slept=slept, computed=(*stat[11:13], *forced))
    for frame in frames:
        file, number, name = frame["filename"], frame["line"], frame["name"]
        text = source(f"/proc/{pid}/root{file}", number)
        found = WAITING.search(f"{file} {name}") or (not look.stack and BELOW.search(text))
        look = look._replace(stack=(*look.stack, f"{file}:{number} in {name}: {text[:90]}"))
        if found and not look.call:
            call = found[found.lastindex]
            values = {one["name"]: one["repr"] or "" for one in frame.get("locals") or []}
            to = values.get("dst" if call == "send" else "src", "")
            peer = int(to) if call in ("send", "recv") and to.isdigit() else None
            look = look._replace(call=call, peer=peer)
    return look


def started(pid: int) -> int:
    """When a process began, in ticks since the machine did; 0 if it has gone."""
    return int((proc(pid, "stat").rpartition(")")[2].split() or ["0"] * 20)[19])


def nobody(name: str) -> Finding:
    """Why there is no rank to look at."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    named = [pid for pid in pids if name and name in proc(pid, "cmdline").replace("\0", " ")]
    locked = [str(pid) for pid in named if not proc(pid, "environ") and proc(pid, "cmdline")]
    if locked:
        what = f"pids {', '.join(locked)} may not be read."
        ask = f"sudo {sys.executable} {' '.join(sys.argv)}; or as their user"
        return Finding("cannot tell", what, type_next=[ask])
    what = f"no rank on this node has {name!r} in its command."
    return Finding("cannot tell", what, type_next=["NAME as in: pgrep -af python; or --pids"])


def find_jobs(name: str, given: Sequence[int] = ()) -> list[dict[int, int]]:
    """{rank: pid} of each job whose command has `name`, 0 if one is missing; or of `given` pids."""
    pids = given or [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    pids = [pid for pid in pids if name in proc(pid, "cmdline").replace("\0", " ")]
    ranks = [(pid, dict(re.findall(r"(\w+)=([^\0]*)\0", proc(pid, "environ")))) for pid in pids]
    ranks = [one for one in ranks if "RANK" in one[1]]
    # A pod's RANK is its node's, also in torchrun's environment; torchrun gives each a LOCAL_RANK.
    jobs: dict[tuple, dict[int, int]] = defaultdict(dict)
    ranks = [one for one in ranks if "LOCAL_RANK" in one[1]] or ranks
    for pid, about in sorted(ranks, key=lambda one: (started(one[0]), one[0])):
        rank = int(about["RANK"])
        first = rank - int(about.get("LOCAL_RANK", 0))
        job = jobs[about.get("MASTER_ADDR"), about.get("MASTER_PORT")]
        for one in [] if given else range(first, first + int(about.get("LOCAL_WORLD_SIZE", 1))):
            job.setdefault(one, 0)
        if pid != os.getpid():
            job[rank] = job.get(rank) or pid  # its loader's workers came later
    return [*jobs.values()] or ([dict(enumerate(given))] if given else [])  # none has a RANK


def diagnose_ranks(pids: dict[int, int], seconds: float) -> Finding:
    """The verdict on the processes of some ranks, after so many seconds."""
    py_spy = shutil.which("py-spy", path=Path(sys.executable).parent) or shutil.which("py-spy")
    if not py_spy:
        return Finding("cannot tell", "py-spy is missing.", type_next=["pip install py-spy"])
    world = re.search(r"\bWORLD_SIZE=(\d+)", proc(max(pids.values()), "environ"))
    looks: list[list[Look]] = []
    pauses = max(2, min(round(2 * seconds), 60))
    begin = time.monotonic()
    with ThreadPoolExecutor(32) as pool:
        while len(looks) <= pauses:
            time.sleep(max(0, begin + len(looks) * seconds / pauses - time.monotonic()))
            looks.append([*pool.map(lambda one: look_at(*one, py_spy), sorted(pids.items()))])
            enough = len(looks) >= 7 and time.monotonic() - begin > 6
            if enough and judge(looks).kind == "calls differ":
                break  # all stand still, and nobody computes or uploads
    return judge(looks, int(world[1]) if world else 0, time.monotonic() - begin)


def stands(row: Sequence[Look]) -> bool:
    """Whether a rank stayed in one call, perhaps spinning, or slept outside of calls."""
    return len({look._replace(computed=()) if row[-1].call else look for look in row}) == 1


def judge(history: list[list[Look]], world: int = 0, seconds: float = 0) -> Finding:
    """The verdict on looks at ranks of a job of `world`: on those that could always be read."""
    every = {row[0].rank: row for row in zip(*history, strict=True)}
    rows = {rank: row for rank, row in every.items() if not any(look.error for look in row)}
    evidence = [f"{len(history)} looks in {seconds:.0f} s"]
    for rank, row in every.items():
        said = [o.error or f"{o.call or 'no known call'} at {o.line}" for o in row if o.alive]
        usual, often = Counter(said or ["dead"]).most_common(1)[0]
        evidence.append(f"rank {rank}, pid {row[0].pid}: {usual}, in {often} looks")
    alive = any(row[-1].alive for row in rows.values())
    finding = verdict(rows) if alive else Finding("cannot tell", "no stack to read.")
    missing = {*every, *range(world)} - {*rows}
    if missing:
        evidence.append(f"not looked at: {some(missing)}")
    if missing and finding.kind == "cannot tell":
        what = f"{finding.what} Not looked at, and perhaps waited for: {some(missing)}."
        ask = f"on their nodes: sudo {sys.executable} {' '.join(sys.argv)}; --cap-add SYS_PTRACE"
        finding = finding._replace(what=what, type_next=[ask, *finding.type_next])
    if finding.guilty:
        row = rows[int(re.findall(r"\d+", finding.guilty[0])[0])]
        look = ([look for look in row if not look.call] or row)[-1]
        stack = [s for s in look.stack if s == look.stack[0] or is_own(s.partition(":")[0])]
        ask = f"py-spy dump --locals --pid {look.pid}; cat /proc/{look.pid}/wchan; dmesg -T | tail"
        asks = [ask, *finding.type_next[-1:]]
        if finding.kind != "slow":
            asks.append("perhaps it only takes long: look again, --seconds 90")
        finding = finding._replace(stack=stack, type_next=asks)
    return finding._replace(evidence=evidence)


def verdict(rows: dict[int, Sequence[Look]]) -> Finding:
    """The verdict on several looks at each rank."""
    alive = {rank: row for rank, row in rows.items() if row[-1].alive}
    if not all(map(stands, alive.values())):
        return late_one(alive)
    known = any(row[-1].call for row in alive.values())
    line, many = Counter(row[-1].line for row in alive.values()).most_common(1)[0]
    if not known and 2 * many <= len(alive):
        return Finding("cannot tell", "all stand still, in no known call, and each elsewhere.")
    records = {}
    places = {rank: place for place, rank in enumerate(rows)}
    for rank, (*_, look) in alive.items():  # most wait in a way that this tool may not know
        name = look.call or ("a wait" if not known and line == look.line else "")
        said = "" if look.peer is not None else look.line
        peer = None if look.peer is None else places.get(look.peer, -1)
        call = Call(("", "", str([*rows])), 0, name, said, peer, True, look.line)
        about = f"{HOST}, pid {look.pid}" + ("" if name else f", at {look.line}")
        records[rank] = Record(rank, [call] if name else [], about)
    return explain(records)


def late_one(rows: dict[int, Sequence[Look]]) -> Finding:
    """The verdict if some rank moves or computes: is it always the same that is waited for?"""
    free = [sum(not look.call for look in looks) for looks in zip(*rows.values(), strict=True)]
    late = {}
    for r, row in rows.items():  # in which looks it is free, in no call, and half of them wait
        late[r] = [n for n, o in zip(free, row, strict=True) if not o.call and 2 * n <= len(rows)]
    rank = max(rows, key=lambda one: len(late[one]))
    often, looks = len(late[rank]), [look for look in rows[rank] if not look.call] or rows[rank]
    others = {one: row for one, row in rows.items() if one != rank}
    still = {one for one, row in rows.items() if stands(row)}
    if not still and 3 * often < 2 * len(free):
        return Finding("healthy", f"{some(rows)} move on, and none is waited for in most looks.")
    lines = " and ".join([line for line, _ in Counter(o.line for o in looks).most_common(2)])
    guilty = [f"rank {rank}, {HOST}, pid {looks[0].pid}, at {lines}"]
    said = f"rank {rank} is at {lines}, in no call in {often} of {len(free)} looks; the others"
    ask = ["look longer: --seconds 60", "what takes long there: data, disk, a lock, a hot GPU?"]
    waits = []
    for one, row in others.items():
        places = [f"{o.call or 'a wait'} at {o.line}" for o in row if o.call or one in still]
        waits += [f"rank {one}, in {place}, for rank {rank}" for place in places[-1:]]
    functions = {(look.call, re.sub(r":\d+", "", look.line)) for look in rows[rank]}
    calls = {(row[-1].call, row[-1].line) for row in others.values()}
    own = any(is_own(text.partition(":")[0]) for look in looks for text in look.stack[:1])
    loops = own and len(functions) == len(calls) == 1
    loops |= all("_try_get_data:" in str(look.stack) for look in looks)  # of a loader's worker
    if loops and still == {*others} and often >= 7:
        what = f"{said} stand still: it loops, or takes longer than this look."
        return Finding("hang in training", what, guilty, (), waits, type_next=ask[:1])
    # By chance a rank is one of n free ones in n / ranks of the looks; others must move in between.
    moves = min([len({(o.stack, o.slept) for o in row}) for row in others.values()], default=0)
    chance = math.prod([n / len(rows) for n in late[rank]]) ** min(1, moves / max(often, 1))
    ways = len(rows) * math.comb(sum(0 < 2 * n <= len(rows) for n in free), often)
    if not still and ways * chance < 1e-4:
        return Finding("slow", f"{said} wait for it, and all move on.", guilty, (), waits, (), ask)
    what = f"{some(still)} stood still, others moved." if still else f"{said} wait: by chance?"
    return Finding("cannot tell", what, type_next=ask[:1])


# Step times. A healthy rank is later than the median of the others in half of the steps, as a coin
# falls; so one that is more than LATE times the median in k of WINDOW steps is no accident.


def read_steps(files: list[str]) -> dict[int, list[dict[str, float]]]:
    """{rank: its steps}, each {"own": seconds, perhaps "step" and "data"}."""
    steps: dict[int, list[dict[str, float]]] = defaultdict(list)
    for place, file in enumerate(files):
        lines = Path(file).read_text().splitlines() or [""]
        number = re.search(r"(\d+)\D*$", Path(file).name)
        for row in csv.DictReader(lines, ["own"] if lines[0][:1].isdigit() else None):
            values = {key: float(value) for key, value in row.items() if value}
            rank = values.get("rank", number[1] if number else place)
            steps[int(rank)].append(values)
    return steps


def late_in(own: dict[int, list[float]]) -> dict[int, list[int]]:
    """In how many steps of each window each rank was late."""
    found: dict[int, list[int]] = {rank: [] for rank in own}
    for start in range(0, min(map(len, own.values())) - WINDOW + 1, WINDOW):
        for rank in own:
            late = 0
            for step in range(start, start + WINDOW):
                others = [own[other][step] for other in own if other != rank]
                late += own[rank][step] > LATE * median(others)
            found[rank].append(late)
    return found


def diagnose_steps(files: list[str]) -> Finding:
    """The straggler, the slow loader or the communication that is not hidden."""
    steps = read_steps(files)
    own = {rank: [one["own"] for one in found] for rank, found in steps.items()}
    if len(own) < 3 or min(map(len, own.values())) < WINDOW:
        ask = f"3 ranks' own times of {WINDOW} steps: from an all-reduce's end to the next call"
        return Finding("cannot tell", "too few ranks or steps.", type_next=[ask])
    enough = 0  # so many late steps that chance would make an alarm in 1 of 100 windows
    chance = FALSE_ALARM * 2**WINDOW / len(own)
    while sum(math.comb(WINDOW, i) for i in range(enough, WINDOW + 1)) > chance:
        enough += 1
    late = late_in(own)
    slow = [rank for rank, windows in late.items() if median(windows) >= enough]
    total = sum([Counter(one) for found in steps.values() for one in found], Counter())
    if slow:
        what = f"{some(slow)} took {LATE} times the others' median or more, not by chance."
        evidence = [f"rank {rank}: late in {late[rank]} of {WINDOW} steps each" for rank in slow]
        evidence += [f"{enough} of {WINDOW} would be chance in one of 100 windows"]
        ask = ["on its node nvidia-smi -q -d CLOCK,PERFORMANCE: heat, power cap? longer data?"]
        return Finding("straggler", what, [some(slow)], (), ["all others, always"], evidence, ask)
    if total["data"] > 0.3 * total["own"]:
        what = f"all ranks wait for their loaders: {total['data'] / total['own']:.0%} of own time."
        ask = ["more workers, pin_memory, faster decoding or storage"]
        return Finding("slow loader", what, type_next=ask)
    if total["step"] - total["own"] > 0.3 * total["step"] > 0:
        what = f"no rank is slow; {1 - total['own'] / total['step']:.0%} of a step is exchange."
        ask = ["trace two steps by torch.profiler: does it overlap? NCCL_DEBUG=INFO: what network?"]
        return Finding("exposed communication", what, type_next=ask)
    return Finding("healthy", "no rank is late more often than by chance; loaders keep up.")


def main() -> int:
    """Answer from each kind of evidence that is given."""
    as_it_is = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_it_is)
    parser.add_argument("--job", metavar="NAME", default="")
    parser.add_argument("--pids", metavar="P", nargs="+", type=int, default=[])
    parser.add_argument("--dumps", metavar="DIR")
    for flag in ("--log", "--nccl-logs", "--steps"):
        parser.add_argument(flag, metavar="FILE", nargs="+")
    parser.add_argument("--seconds", type=float, default=6, help="how long to look at processes")
    given = parser.parse_args()
    jobs = (find_jobs(given.job, given.pids) or [{}]) if given.job or given.pids else []
    findings = [diagnose_ranks(pids, given.seconds) if pids else nobody(given.job) for pids in jobs]
    answers = [diagnose_dumps, diagnose_logs, diagnose_nccl_logs, diagnose_steps]
    files = [given.dumps, given.log, given.nccl_logs, given.steps]
    findings += [one(read) for one, read in zip(answers, files, strict=True) if read]
    if not findings:
        parser.error("what is there to look at? --help says what it takes")
    print(*findings, sep="\n\n")
    codes = [{"healthy": 0, "cannot tell": 2}.get(one.kind, 1) for one in findings]
    return min(filter(None, codes), default=0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as error:
        print(f"diagnose.py: cannot read {' '.join(sys.argv[1:])}: {error!r}", file=sys.stderr)
        sys.exit(2)
