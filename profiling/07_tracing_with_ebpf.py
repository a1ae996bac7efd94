"""Tracing with eBPF: bpftrace on a training job that runs already
===============================================================

**Question.** A job trains, slowly perhaps, and nobody built a profiler into it. What can root learn
of its collectives from outside, without a restart and without a changed line, and what does that
cost the job?

**Predict**, and write it down before you run:

1. DDP trains a model whose gradients fill four buckets of 1 MiB, and all-reduces the loss, 10
   steps. How many all-reduces per rank does bpftrace count, and how many bytes in them?
2. Another process of this machine uses the same library file. Does a probe fire for its calls, too?
   And are they in the counts of the job?
3. How many bytes does the kernel see a rank send by TCP, per byte of an all-reduce of n ranks?
4. Rank 1 sleeps 100 ms in every step. Whose all-reduces take the least time: rank 1's, or those of
   the ranks that do not sleep?
5. How many microseconds does a hit of a probe cost: 0.1, 1, 10 or 100? And what share of a step is
   that?

**Run.** As root, since what bpftrace loads runs in the kernel (`apt-get install bpftrace`).

    torchrun --standalone --nproc-per-node=4 07_tracing_with_ebpf.py   # NCCL on 4 GPUs, else gloo
    python 07_tracing_with_ebpf.py                                     # the same, started for you
    python 07_tracing_with_ebpf.py --attach 4711 4712 --seconds 10     # a job of yours that runs

Not run on several GPUs.

**Try.** In `probe` leave out the filter (`/@traced[pid]/`): which claims fail? Undo it, and let the
size of a buffer be arg2: which claims fail now, and what are these huge numbers?

**Before.** profiling/02_one_trace_for_all_ranks.py: traces that the job itself records.

**Next.** communication/nccl_debugging.md: what NCCL tells by itself, and its profiler plugins; then
profiling/08_communication_matrix.py: who sends how many bytes to whom.
"""

import argparse
import ctypes
import functools
import json
import logging
import math
import os
import re
import select
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

STEPS = 10  # of training, while it is traced
LAYERS = 4
BATCH = 256
WIDTH = 4096  # of the layers on GPUs
PAUSE = 0.1  # seconds that rank 1 sleeps in every step
SLOW = 1  # this rank
OTHERS = 7  # all-reduces of another job
MOMENTS = 100  # at which a process begins a collective, remembered at most
HITS = 500  # calls by which the price of a hit is measured, 20 times
TRACEFS = "/sys/kernel/tracing"
Maps = dict[str, dict[tuple[str, ...], object]]  # bpftrace's maps: {name: {key: value}}
libc = ctypes.CDLL(None, use_errno=True)

# %% [markdown]
# ## 1. The job: it knows nothing of being watched
#
# This is the training loop, and there is no line in it for the profiler's sake. DDP all-reduces
# each bucket of gradients, the loss is all-reduced for the log, and rank 0 broadcasts whether to go
# on. One rank has a problem that its owners do not know of: it is slow.


# %%
def train(
    model: nn.Module, batch_BD: torch.Tensor, device: torch.device, steps: int, pause: float
) -> None:
    """Some steps; `pause` is what rank SLOW loses in each, in seconds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    go_on = torch.ones(1, device=device)
    for _ in range(steps):
        x_BD = batch_BD.to(device, non_blocking=True)
        loss = model(x_BD).square().mean()
        if RANK == SLOW:
            time.sleep(pause)  # launch time: it is the host that loses it
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean_loss = loss.detach().clone()
        dist.all_reduce(mean_loss, op=dist.ReduceOp.AVG)
        mean_loss.item()  # for the log; on a GPU the host waits here for all ranks
        dist.broadcast(go_on, 0)


# %% [markdown]
# ## 2. Uprobes: a breakpoint in a file, a program in the kernel
#
# A **uprobe** is a breakpoint at one instruction of a library *file*. A thread that gets there
# traps into the kernel, which runs a small **eBPF** program, verified to end and to harm nothing,
# and lets the process go on. bpftrace compiles such programs from one line each:
#
#     uprobe:FILE:ADDRESS   /filter/   { what to do: pid, tid, nsecs, arg0, arg1, ... }
#
#     torch's thread          ProcessGroupGloo::allreduce(...)       count it, note the moment
#                                  |  queue
#     a thread of gloo's      Context::createUnboundBuffer(p, size)  note the size of this thread
#                             gloo::allreduce(...)                   note the moment; the size is
#                                  |                                 that of the buffer made last
#                             AsyncWork::finishWorkGloo()            the time it took: a histogram
#     gloo's loop thread      sendmsg()                              a *tracepoint* of the kernel's
#
# A **uretprobe** fires when a function returns, and would be the obvious end of a collective. But
# it exchanges the return address on the stack, and a C++ exception that passes such a frame does
# not find its way: the process is aborted. gloo throws when a peer dies, so with a uretprobe there
# the tracer would kill what it watches. C functions, such as NCCL's, throw nothing.
#
# Results stay in **maps** in the kernel, summed up there (`count()`, `sum()`, `hist()`), and are
# read once, at the end. That is why it is cheap, and why a million calls make no large file.
#
# The probe is in the file, so it fires for every process that uses the file. The filter
# `/@traced[pid]/` keeps our ranks. Arguments are registers: whole numbers and addresses. That
# decides what to hook. torch's `allreduce` gets a C++ vector of tensors, whose layout no ABI
# promises; the gloo below it gets an address and a number of bytes.


# %%
def probe(kind: str, library: str, symbol: str, do: str) -> str:
    """One line of bpftrace: where, for whom, what. @hits counts how often a process traps."""
    address = address_of(symbol, library)
    return f"{kind}:{library}:{address} /@traced[pid]/ {{ @hits[pid] = count(); {do} }}"


def on_entry(name: str, size: str) -> str:
    """What to do as a collective of so many bytes begins."""
    return f'@sizes[pid, "{name}", {size}] = count(); @doing[tid] = "{name}"; @began[tid] = nsecs;'


def on_end() -> str:
    """What to do as the collective ends that this thread has begun."""
    took = "nsecs - @began[tid]"
    latency = f"@us[pid, @doing[tid]] = hist(({took}) / 1000);"
    latency += f" @spent[pid, @doing[tid]] = sum({took});"
    return f"if (@began[tid]) {{ {latency} delete(@began[tid]); }}"


def on_call(name: str) -> str:
    """What to do as a rank asks for it. A map holds 4096 entries, so only so many moments."""
    nth = f'@nth[pid, "{name}"]'
    moment = f'@at[pid, "{name}", {nth}] = nsecs; {nth} = {nth} + 1;'
    return f'@calls[pid, "{name}"] = count(); if ({nth} < {MOMENTS}) {{ {moment} }}'


def gloo_probes(library: str) -> list[str]:
    """The collectives of torch's gloo process group. Symbols are C++, up to their arguments."""
    size_of_this_thread = "@buffer[tid] = arg3;"  # arg0: where to return an object; arg1: this
    buffer = "_ZN4gloo7Context19createUnboundBufferE"
    lines = [probe("uprobe", library, buffer, size_of_this_thread)]
    finish = "_ZN4c10d16ProcessGroupGloo9AsyncWork14finishWorkGloo"
    lines.append(probe("uprobe", library, finish, on_end()))
    for name, function in {"all_reduce": "allreduce", "broadcast": "broadcast"}.items():
        mangled = f"{len(function)}{function}E"
        queued = f"_ZN4c10d16ProcessGroupGloo{mangled}"
        carried_out = f"_ZN4gloo{mangled}"
        everybody = f'@machine["{name}"] = count();'
        lines += [
            f"uprobe:{library}:{address_of(queued, library)} {{ {everybody} }}",
            probe("uprobe", library, queued, on_call(name)),
            probe("uprobe", library, carried_out, on_entry(name, "@buffer[tid], 0")),
        ]
    return lines


# %% [markdown]
# ## 3. The same for NCCL, and for copies to the GPU
#
# NCCL is C: `ncclAllReduce(sendbuff, recvbuff, count, datatype, op, comm, stream)`, so the number
# of elements is arg2 and their type arg3, an enum. But the call only *launches*: it returns within
# microseconds, while the GPU waits for its peers, out of reach of any breakpoint. What is left is
# when each rank calls, and all processes of a machine read one clock: a rank whose *host* is late,
# is late here, as long as the hosts wait for each other in every step, as this job's do for the
# log. Where no line waits, the others run ahead, and the k-th call of the slow one is late by k of
# its pauses. Times on the GPU are what NCCL's own profiler plugins tell (see "What you should have
# seen").
#
# What is counted is the count that the call has: of all-gather and reduce-scatter a rank's share,
# of all-to-all what one rank gets. Pipelines send and receive; torch's all-to-all is made of sends
# and receives, too. (ncclAlltoAll came with NCCL 2.28.)
#
# The driver, libcuda.so, copies by `cuMemcpyHtoDAsync_v2(to, from, bytes, stream)` and its kin. One
# GPU's memory is copied to another's by `cuMemcpyPeerAsync(to, its context, from, its context,
# bytes, stream)`, or as a block whose sizes stand at the end of a struct. Whether the *runtime's*
# copies, those of torch, come by these exported functions was not tried: it asks the driver for
# addresses of its own.

# %%
NCCL = {  # collective: (function, where its count is); the type comes next
    "all_reduce": ("ncclAllReduce", 2),
    "broadcast": ("ncclBroadcast", 2),
    "all_gather": ("ncclAllGather", 2),
    "reduce_scatter": ("ncclReduceScatter", 2),
    "reduce": ("ncclReduce", 2),
    "all_to_all": ("ncclAlltoAll", 2),
    "send": ("ncclSend", 1),
    "recv": ("ncclRecv", 1),
}
LATER = ("ncclAlltoAll",)  # older libraries have none
WIDTHS = [1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1]  # bytes per element of ncclInt8, ..., ncclFloat8e5m2


def nccl_probes(library: str) -> list[str]:
    lines = []
    for name, (function, count) in NCCL.items():
        if function in LATER and function not in symbols(library):
            continue
        size = f"arg{count}, arg{count + 1}"
        lines += [
            probe("uprobe", library, function, on_call(name) + on_entry(name, size)),
            probe("uretprobe", library, function, on_end()),
        ]
    return lines


WIDTH_HEIGHT_DEPTH = (176, 184, 192)  # where they lie in CUDA_MEMCPY3D_PEER, in bytes
BLOCK = " * ".join(f"*(uint64 *)(arg0 + {offset})" for offset in WIDTH_HEIGHT_DEPTH)


def copy_probes(library: str) -> list[str]:
    lines = []
    for symbol in symbols(library):
        found = re.fullmatch(r"cuMemcpy(HtoD|DtoH|DtoD|3DPeer|Peer|)Async(_v2)?(_ptsz)?", symbol)
        if found and (found[2] or "to" not in found[1]):  # without _v2: sizes of 32 bits
            nbytes = {"Peer": "arg4", "3DPeer": BLOCK}.get(found[1], "arg2")
            do = (
                f'@copied[pid, "{found[1]}"] = sum({nbytes}); @copies[pid, "{found[1]}"] = count();'
            )
            lines.append(probe("uprobe", library, symbol, do))
    return lines


# %% [markdown]
# ## 4. The kernel's view next to it
#
# A **tracepoint** is a place that the kernel's authors marked, with named fields. What a socket
# accepted (`sock_send_length`, since Linux 6.3; before, the return value of `tcp_sendmsg`) runs in
# the process that sends, so our filter holds. A **retransmission** happens in a timer or when an
# answer comes in, whatever runs then: there `pid` means nothing, and the port says whose it is.


# %%
def kernel_probes() -> list[str]:
    sent = "tracepoint:sock:sock_send_length /@traced[pid] && args->protocol == 6 && args->ret > 0/"
    amount = "args->ret"
    if version_of_linux() < (6, 3):
        sent = "kretprobe:tcp_sendmsg /@traced[pid] && (int64)retval > 0/"
        amount = "retval"
    do = f"@tcp[pid] = sum({amount}); @sends[pid] = count();"
    again = "tracepoint:tcp:tcp_retransmit_skb { @again[args->dport] = count(); }"
    return [f"{sent} {{ {do} }}", again]


def program(pids: list[int], nccl: bool) -> str:
    """The whole program, for these processes."""
    traced = " ".join(f"@traced[{pid}] = 1;" for pid in pids)
    lines = [f'BEGIN {{ {traced} printf("attached"); }}']
    if nccl:
        lines += nccl_probes(mapped(pids[0], "libnccl.so"))
        lines += copy_probes(mapped(pids[0], "libcuda.so"))
    else:
        lines += gloo_probes(mapped(pids[0], "libtorch_cpu.so"))
    price = "@price[pid] = count(); @last[pid] = nsecs;"  # section 6
    clib = mapped(pids[0], "libc.so")
    ffsll = f"uprobe:{clib}:{address_of('ffsll', clib)}"
    lines += [*kernel_probes(), f"{ffsll} /@traced[pid]/ {{ {price} }}"]
    return "\n".join(lines)


# %% [markdown]
# ## 5. How it is measured: attach, wait, read
#
# bpftrace is started next to the ranks, by one rank of each machine, and tells when all probes are
# in place. A last probe ends it: at `a64l` of the C library, which nobody uses, when the process
# that started it calls that. (Ctrl-C does so, too, but bpftrace 0.17 overlooks a SIGINT that comes
# while it prints.) It then prints its maps, as JSON. It is killed if the rank dies, and with it the
# kernel removes its probes. Tracepoints are described in a file system that some machines do not
# mount; it is mounted for bpftrace alone.

# %%
MOUNT = f'[ -e {TRACEFS}/events ] || mount -t tracefs tracefs {TRACEFS}; exec "$@"'
PRIVATELY = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "sh", "-c", MOUNT, "sh"]


def attach(text: str) -> subprocess.Popen:
    """Start bpftrace; return once its probes are in place. Raises OSError with its complaint."""
    clib = mapped(os.getpid(), "libc.so")
    end = f"uprobe:{clib}:{address_of('a64l', clib)} /pid == {os.getpid()}/ {{ exit(); }}"
    words = [*PRIVATELY, "bpftrace", "-f", "json", "-e", f"{text}\n{end}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    tracer = subprocess.Popen(words, **pipes)
    for line in tracer.stdout:
        if '"printf"' in line:
            return tracer
    said = tracer.communicate()[1]
    errors = re.findall("ERROR: (.*)", said) or [said.strip()]
    raise OSError(f"bpftrace: {errors[-1]}")


def detach(tracer: subprocess.Popen) -> Maps:
    """End bpftrace; return its maps. The parts of a key are strings."""
    libc.a64l(b"")
    printed, _ = tracer.communicate(timeout=60)
    maps = {}
    for line in filter(None, printed.splitlines()):
        message = json.loads(line)
        if message["type"] in ("map", "hist"):
            for name, values in message["data"].items():
                if isinstance(values, dict):  # else it has no keys
                    maps[name] = {tuple(key.split(",")): values[key] for key in values}
    return maps


def seen(maps: Maps, name: str, *key: object) -> int:
    """One value of a map; 0 if there is none."""
    return maps.get(name, {}).get(tuple(map(str, key)), 0)


def sizes_seen(maps: Maps, pid: int, name: str) -> Counter:
    """How many calls of a collective had so many bytes: {bytes: calls}."""
    found = Counter()
    for (whose, collective, amount, kind), calls in maps.get("@sizes", {}).items():
        if (whose, collective) == (str(pid), name):
            found[int(amount) * WIDTHS[int(kind)]] += calls
    return found


# %% [markdown]
# Addresses come from the library's table of exported symbols, by `nm`. bpftrace takes names, too,
# but searches the 75,000 of libtorch_cpu.so anew for every probe, for more than a second each. And
# of a name that it does not find it only warns, and counts nothing; `address_of` raises.


# %%
@functools.cache
def symbols(library: str) -> dict[str, str]:
    """The functions that a library exports: {name: address}."""
    table = ["nm", "--dynamic", "--defined-only", library]
    listed = subprocess.run(table, capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines()]
    return {row[2].partition("@")[0]: f"0x{row[0]}" for row in rows if row[1] in ("T", "W", "i")}


def address_of(symbol: str, library: str) -> str:
    """Where a function begins; one of C++ ("_Z...") may be named up to its arguments."""
    for name, address in symbols(library).items():
        if name == symbol or (symbol.startswith("_Z") and name.startswith(symbol)):
            return address
    raise OSError(f"{os.path.basename(library)} exports no {symbol}")


def mapped(pid: int, name: str) -> str:
    """The file of this name, up to its version, that a process has mapped."""
    with open(f"/proc/{pid}/maps") as file:
        for line in file:
            path = line.rstrip().partition("/")[2]
            if os.path.basename(path).startswith(name):
                return "/" + path
    raise OSError(f"process {pid} uses no {name}")


def version_of_linux() -> tuple[int, ...]:
    return tuple(map(int, os.uname().release.split("-")[0].split(".")[:2]))


def why_not() -> str:
    """What keeps this process from tracing; empty if it may try."""
    if sys.platform != "linux":
        return "this is not Linux"
    if os.geteuid() != 0:
        return "this user is not root"
    for command in ("bpftrace", "nm", "setpriv", "unshare"):
        if shutil.which(command) is None:
            return f"there is no command {command}"
    if os.readlink("/proc/self/ns/pid") != "pid:[4026531836]":
        return "this is a container, whose pids are not those that the kernel knows"
    return ""


# %% [markdown]
# The oracle is what the ranks handed to torch's dispatcher, recorded by the counter below; the job
# that is traced does not know of it, either.


# %%
class Call(NamedTuple):
    """One collective, send or receive of this rank, as it was handed to the process group."""

    operation: str  # "all_reduce", "all_gather", "reduce_scatter", "send", ...
    elements: int  # of its input or its output, whichever is larger
    nbytes: int  # of the same
    ranks: tuple[int, ...]  # of the group
    peer: int | None


class CountedCommunication(TorchDispatchMode):
    """Records this rank's communication in `log`, beneath torch's dispatcher: DDP's and FSDP's too.

    It sees what is handed to a backend, not what the backend then sends.
    """

    NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier")
    NAMES += ("send", "recv", "reduce", "gather", "scatter")  # "_allgather_base_" is an all_gather

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Call] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its local tensors come by here in a moment
        if func.namespace.lstrip("_").startswith("c10d"):
            self.record(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def record(self, func, args: tuple, kwargs: dict) -> None:
        spelled = func._schema.name.replace("_", "")
        names = [name for name in self.NAMES if name.replace("_", "") in spelled]
        if not names:
            return  # it waits for a result or wraps one
        given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}
        given |= kwargs
        if "process_group" in given:
            group = dist.ProcessGroup.unbox(given["process_group"])
        else:
            group = dist.distributed_c10d._resolve_process_group(given["group_name"])
        ranks = tuple(dist.get_process_group_ranks(group))
        sizes = [(0, 0)]
        for argument in args:
            tensors = [leaf for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor)]
            sizes.append((sum(t.numel() for t in tensors), sum(t.nbytes for t in tensors)))
        peer = given.get("dst", given.get("src")) if names[0] in ("send", "recv") else None
        peer = None if peer is None or peer < 0 else ranks[peer]
        self.log.append(Call(names[0], *max(sizes), ranks, peer))

    def calls(self, operation: str = "") -> list[Call]:
        """The calls of one operation, in order; of all without a name."""
        return [call for call in self.log if operation in ("", call.operation)]

    def elements(self, operation: str = "") -> int:
        """Elements handed over in all calls of one operation."""
        return sum(call.elements for call in self.calls(operation))


# %% [markdown]
# Two witnesses are planted. **Another job**: a process of its own that uses gloo all alone. And a
# **lost packet**: a port whose queue is full drops a SYN, so the kernel sends it again after a
# second. The socket itself knows how often (`TCP_INFO`), which is the oracle. The packet is lost
# last, when nothing else is sent: while a core runs one tracepoint's program, the kernel leaves out
# another's there, so a timer that interrupts a send which we count goes unseen.


# %%
def die_with(parent: int) -> None:
    """Be killed when `parent` ends (PR_SET_PDEATHSIG), or now if it has ended."""
    if sys.platform == "linux":
        libc.prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def start_another_job() -> tuple[int, Connection]:
    """Fork a process that all-reduces with itself when told so; return its pid, and the pipe."""
    ours, theirs = Pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid > 0:
        theirs.close()
        return pid, ours
    try:
        die_with(parent)
        ours.close()
        theirs.recv()
        group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(minutes=1))
        for _ in range(OTHERS):
            group.allreduce([torch.ones(1)]).wait()
        theirs.send("done")
    finally:
        os._exit(0)


def lose_a_packet() -> list[socket.socket]:
    """Send a SYN to a port that has no room; return its socket, that port's, and those in it."""
    full = socket.create_server(("127.0.0.1", 0), backlog=0)
    first = socket.create_connection(full.getsockname())  # it fills the queue
    lost = socket.socket()
    lost.setblocking(False)
    lost.connect_ex(full.getsockname())
    time.sleep(0.1)
    accepted, _ = full.accept()  # now there is room, and the next try will get through
    return [lost, full, first, accepted]


def times_sent_again(lost: socket.socket) -> int:
    """Wait until it is connected; return the kernel's count: tcpi_total_retrans, at byte 100."""
    select.select([], [lost], [], 60)
    info = lost.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    (again,) = struct.unpack_from("I", info, 100)
    return again


# %% [markdown]
# ## 6. What a hit costs
#
# A function that nobody uses, `ffsll` of the C library, is called with its probe in place and
# without. The difference is the price of a uprobe. One byte sent to ourselves by TCP, with its
# tracepoint and without, gives the price of that. The clock is that of the thread: it stands still
# while another process has the core, so a busy machine does not spoil it. Prices times hits, over
# the time of a step without bpftrace and without rank 1's sleep: the share that tracing takes. To
# compare whole steps instead would measure the machine's noise, which is larger.


# %%
def seconds_per_call() -> tuple[float, float]:
    """Of a function that does nearly nothing, and of a byte sent and received; medians of 20."""
    server = socket.create_server(("127.0.0.1", 0))
    with socket.create_connection(server.getsockname()) as ours, server.accept()[0] as theirs:
        return (
            median_seconds(lambda: libc.ffsll(1)),
            median_seconds(lambda: (ours.send(b"."), theirs.recv(1))),
        )


def median_seconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(20):
        start = time.thread_time()
        for _ in range(HITS):
            call()
        times.append((time.thread_time() - start) / HITS)
    return statistics.median(times)


class Prices(NamedTuple):
    """Seconds per hit."""

    uprobe: float
    tracepoint: float


# %% [markdown]
# The experiment: a training that nobody watches, for the time of a step; then bpftrace is attached,
# and a training is watched in which rank 1 sleeps; then the witnesses act, and bpftrace ends.


# %%
class Evidence(NamedTuple):
    """What was found; the same kinds of things on every rank."""

    pids: list[int]  # of all ranks
    log: list[Call]  # of this rank, from torch's dispatcher
    step: float  # seconds of one without bpftrace
    maps: Maps  # of this rank's machine
    prices: Prices
    port: int  # that dropped a SYN
    again: int  # times that the kernel says it sent a SYN there again
    stranger: int  # the pid of the other job


def trace(device: torch.device, job: tuple[int, Connection] | None) -> tuple[Evidence, str]:
    """Train, then train with bpftrace attached; return what was found, or why that is nothing."""
    local_rank = int(os.environ["LOCAL_RANK"])
    model, batch_BD = model_and_batch(device)
    train(model, batch_BD, device, 2, 0)  # DDP sorts its buckets in the first step
    step = seconds_per_step(model, batch_BD, device)
    pids = gather_objects(os.getpid())
    here = pids[RANK - local_rank :][: int(os.environ["LOCAL_WORLD_SIZE"])]
    tracer, complaint, without = None, "", None
    if local_rank == 0:  # one per machine
        without = seconds_per_call()
        tracer, complaint = try_to_attach(here, device)
    complaints = list(filter(None, gather_objects(complaint)))
    with CountedCommunication() as counted:
        train(model, batch_BD, device, STEPS, PAUSE)
    wait_for(device)
    gather_objects("trained")  # a barrier, but no all-reduce on any backend
    found = ({}, Prices(0.0, 0.0), 0, 0, 0)
    if tracer:
        found = witnesses(tracer, without, job)
    found = gather_objects(found)[RANK - local_rank]
    return Evidence(pids, counted.log, step, *found), complaints[0] if complaints else ""


def witnesses(
    tracer: subprocess.Popen, without: tuple[float, float], job: tuple[int, Connection] | None
) -> tuple[Maps, Prices, int, int, int]:
    """Let the planted witnesses act, and detach: maps, prices, port, its SYNs again, other job."""
    prices = [on - off for on, off in zip(seconds_per_call(), without, strict=True)]
    stranger = 0
    if job:
        stranger, pipe = job
        pipe.send("go")
        pipe.recv()
    sockets = lose_a_packet()  # last: a timer that interrupts a tracepoint is not seen
    port = sockets[1].getsockname()[1]
    again = times_sent_again(sockets[0])
    maps = detach(tracer)
    for one in sockets:
        one.close()  # only now: the end of a connection may be sent again, too
    return maps, Prices(*prices), port, again, stranger


def try_to_attach(pids: list[int], device: torch.device) -> tuple[subprocess.Popen | None, str]:
    """Attach to these processes, or say why not."""
    complaint = why_not()
    if complaint:
        return None, complaint
    try:
        return attach(program(pids, nccl=device.type == "cuda")), ""
    except OSError as error:
        return None, str(error)


# %% [markdown]
# The model of the job, its batch, and the time of a step when nobody watches.


# %%
def model_and_batch(device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    """Layers of one bucket each, and a batch (B, D) in the host's memory."""
    D = 512 if device.type == "cpu" else WIDTH
    layers = [nn.Linear(D, D, bias=False) for _ in range(LAYERS)]
    ids = [device.index] if device.type == "cuda" else None
    bucket = layers[0].weight.nbytes / 2**20
    model = nn.Sequential(*layers).to(device)
    batch_BD = torch.ones(BATCH, D)
    if device.type == "cuda":
        batch_BD = batch_BD.pin_memory()
    return DistributedDataParallel(model, device_ids=ids, bucket_cap_mb=bucket), batch_BD


def seconds_per_step(model: nn.Module, batch_BD: torch.Tensor, device: torch.device) -> float:
    dist.barrier()
    wait_for(device)
    start = time.perf_counter()
    train(model, batch_BD, device, STEPS, 0)
    wait_for(device)
    return (time.perf_counter() - start) / STEPS


def wait_for(device: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


# %% [markdown]
# The claims. Each rank compares what bpftrace saw of it with what it handed to torch.


# %%
def check_the_job(found: Evidence) -> None:
    """Claim what torch's dispatcher saw, which needs no root."""
    handed = [call for call in found.log if call.operation == "all_reduce"]
    claim("all-reduces per step: buckets and the loss", LAYERS + 1, len(handed) / STEPS)


def check_collectives(found: Evidence) -> None:
    """Claim that counts and sizes are those of torch's dispatcher."""
    pid = os.getpid()
    for name in ("all_reduce", "broadcast"):
        handed = [call for call in found.log if call.operation == name]
        text = f"{name}: calls that bpftrace counts"
        claim(text, len(handed), seen(found.maps, "@calls", pid, name), question=1)
        sizes = sizes_seen(found.maps, pid, name)
        expected = sum(call.nbytes for call in handed)
        total = sum(size * calls for size, calls in sizes.items())
        claim(f"{name}: bytes in them", expected, total, question=1)
        handed_sizes = Counter(call.nbytes for call in handed)
        wrong = (sizes - handed_sizes).total() + (handed_sizes - sizes).total()
        claim(f"{name}: calls of another size", 0, wrong)
        timed = 0
        for bar in found.maps.get("@us", {}).get((str(pid), name), []):
            timed += bar["count"]
        claim(f"{name}: calls in the histogram of times", len(handed), timed)


def check_another_job(found: Evidence, device: torch.device) -> None:
    """Claim that the probe fires for every process, and that the filter keeps out another's."""
    text = "all-reduces of another job that were counted"
    everybody = "all-reduces of all processes, at least"
    if device.type == "cuda":
        blocked(text, needs="ranks on gloo: the other job has no GPU")
        return
    claim(text, 0, seen(found.maps, "@calls", found.stranger, "all_reduce"), question=2, rank=0)
    calls = found.maps.get("@calls", {}).items()
    ours = sum(number for (_, name), number in calls if name == "all_reduce")
    fired = seen(found.maps, "@machine", "all_reduce")
    claim(everybody, ours + OTHERS, fired, ">=", question=2, rank=0)


def check_the_kernel(found: Evidence, device: torch.device) -> None:
    """Claim what the kernel saw: bytes that TCP took, and a packet that was sent again."""
    n = WORLD_SIZE
    text = "bytes sent by TCP / bytes of all-reduces"
    if device.type == "cuda":
        blocked(text, needs="nodes with GPUs and no network but TCP (NCCL_NET=Socket)")
    elif n == 1:
        blocked(text, needs="2 ranks")
    else:
        reduced = sum(call.nbytes for call in found.log if call.operation == "all_reduce")
        sent = seen(found.maps, "@tcp", os.getpid()) / reduced
        due = 2 * (n - 1) / n
        claim(text, due, sent, atol=0.01 * due, question=3, varies=True)  # headers: 1%
    again = seen(found.maps, "@again", found.port)
    claim("times that a dropped SYN was sent again", found.again, again)
    retries = sum(found.maps.get("@again", {}).values()) - again
    print0(f"{'':13}other segments that this machine sent again meanwhile: {retries}")


def check_copies(found: Evidence, device: torch.device) -> None:
    """Claim that the driver's copies hold the batches."""
    text = "bytes copied to the GPU by cuMemcpy, at least"
    if device.type == "cpu":
        blocked(text, needs="1 GPU")
        return
    copied = seen(found.maps, "@copied", os.getpid(), "HtoD")
    claim(text, STEPS * BATCH * WIDTH * 4, copied, ">=")


# %% [markdown]
# Who is slow? Two views. On gloo, a collective lasts as long as its rank waits for others, so the
# rank that everybody waits for spends the *least* time in it. And on one machine, the moments at
# which the ranks begin their k-th all-reduce can be compared directly.


# %%
def lateness(maps: Maps, pids: list[int]) -> list[float]:
    """By how many ms each of these processes begins an all-reduce after the first; the median."""
    moments = [{} for _ in pids]
    for (whose, name, nth), nanoseconds in maps.get("@at", {}).items():
        if name == "all_reduce" and int(whose) in pids:
            moments[pids.index(int(whose))][nth] = nanoseconds
    late = [[0.0] for _ in pids]
    for nth in moments[0]:
        first = min(of_rank.get(nth, math.inf) for of_rank in moments)
        for rank, of_rank in enumerate(moments):
            late[rank].append((of_rank.get(nth, first) - first) / 1e6)
    return [statistics.median(times) for times in late]


def check_who_is_slow(found: Evidence, device: torch.device) -> None:
    """Claim that both views name rank SLOW."""
    texts = ["rank that spends the least time in all-reduces", "rank that begins them last"]
    here = found.pids[: int(os.environ["LOCAL_WORLD_SIZE"])]
    if len(here) < 2:
        blocked(texts[0], needs="2 ranks on one machine")
        return
    spent = [seen(found.maps, "@spent", pid, "all_reduce") / 1e6 for pid in here]
    late = lateness(found.maps, here)
    show(found, here, spent, late)
    if device.type == "cuda":
        blocked(texts[0], needs="ranks on gloo: a call of NCCL's ends before its work")
    else:
        claim(texts[0], SLOW, spent.index(min(spent)), question=4, timed=True, rank=0)
    claim(texts[1], SLOW, late.index(max(late)), question=4, timed=True, rank=0)
    half = 1e3 * PAUSE / 2
    claim("ms by which it is late, at least", half, max(late), ">=", timed=True, rank=0)


def show(found: Evidence, here: list[int], spent: list[float], late: list[float]) -> None:
    """Print a row per rank of rank 0's machine, and a histogram of the first six."""
    print0(f"{'':13}rank    pid  all-reduces       MB  MB by TCP   ms inside  ms late")
    for rank, pid in enumerate(here):
        calls = seen(found.maps, "@calls", pid, "all_reduce")
        sizes = sizes_seen(found.maps, pid, "all_reduce").items()
        megabytes = sum(size * number for size, number in sizes) / 1e6
        by_tcp = seen(found.maps, "@tcp", pid) / 1e6
        row = f"{rank:4} {pid:6} {calls:12} {megabytes:8.1f} {by_tcp:10.1f}"
        print0(f"{'':13}{row} {spent[rank]:11.1f} {late[rank]:8.1f}")
    bars = Counter()  # {(us from, us to, rank): calls}
    for rank, pid in enumerate(here[:6]):
        for bar in found.maps.get("@us", {}).get((str(pid), "all_reduce"), []):
            bars[bar.get("min", 0), bar.get("max", 0), rank] = bar["count"]
    header = "".join(f"  rank {rank}" for rank in range(len(here[:6])))
    print0(f"{'':13}us inside one all-reduce {header}")
    for low, high in sorted({(low, high) for low, high, _ in bars}):
        calls = "".join(f"{bars[low, high, rank]:8}" for rank in range(len(here[:6])))
        print0(f"{'':13}{low:10,} to {high:9,}  {calls}")


def check_overhead(found: Evidence) -> None:
    """Claim that no hit was lost, and what the hits cost."""
    leader = found.pids[RANK - int(os.environ["LOCAL_RANK"])]
    hits = seen(found.maps, "@price", leader)
    claim("calls of a function that does nothing, counted", 20 * HITS, hits)
    price = found.prices
    claim("us per hit of a uprobe, at most", 30, 1e6 * price.uprobe, "<=", question=5, timed=True)
    cheaper = price.tracepoint / price.uprobe
    claim("a tracepoint's price / a uprobe's, at most", 0.5, cheaper, "<=", timed=True)
    uprobes = seen(found.maps, "@hits", os.getpid()) / STEPS
    sends = seen(found.maps, "@sends", os.getpid())
    if os.getpid() == leader:
        sends -= 20 * HITS  # those by which the price was measured
    tracepoints = sends / STEPS
    share = 100 * (uprobes * price.uprobe + tracepoints * price.tracepoint) / found.step
    claim("% of a step that tracing takes, at most", 2, share, "<=", question=5, timed=True)
    hits = f"{uprobes:.0f} hits of uprobes and {tracepoints:.0f} of tracepoints"
    print0(f"{'':13}{hits} per step of {1e3 * found.step:.1f} ms, on rank 0")


# %% [markdown]
# With `--attach` the same program watches processes that are not ours, for some seconds.


# %%
def watch(pids: list[int], seconds: float) -> None:
    """Print what bpftrace counts of these processes."""
    complaint = why_not()
    if complaint:
        refuse(f"tracing needs root with bpf(2), but {complaint}")
    try:
        with open(f"/proc/{pids[0]}/maps") as file:
            nccl = "libcuda.so" in file.read()  # the driver, which torch loads to use a GPU
        tracer = attach(program(pids, nccl))
    except OSError as error:
        refuse(f"cannot trace process {pids[0]}: {error}")
    time.sleep(seconds)
    maps = detach(tracer)
    for pid in pids:
        print(f"pid {pid}: {seen(maps, '@tcp', pid):,} bytes by TCP")
        for whose, name in sorted(maps.get("@calls", {})):
            if whose == str(pid):
                calls = seen(maps, "@calls", pid, name)
                spent = seen(maps, "@spent", pid, name) / 1e6
                sizes = dict(sizes_seen(maps, pid, name).most_common(4))
                print(f"  {name:15} {calls:7} calls {spent:9.1f} ms, {{bytes: calls}} {sizes}")
        for whose, kind in sorted(maps.get("@copied", {})):
            if whose == str(pid):
                copied = seen(maps, "@copied", pid, kind)
                print(f"  cuMemcpy{kind}Async copied {copied:,} bytes")


# %% [markdown]
# ## What you should have seen
#
# 1. Fifty all-reduces per rank: four buckets and the loss, ten times; 41,943,080 bytes, 4 MiB and 4
#    bytes per step. Exactly what torch's dispatcher counted, though the job was neither restarted
#    nor changed. Ten broadcasts of four bytes, too.
# 2. It fires: the breakpoint is in the file, and everybody who uses the file pays for it. The
#    filter keeps the other job's seven all-reduces out of the counts.
# 3. 2(n-1)/n, the ring's bytes, and less than a percent for the headers of gloo's messages. Only
#    the kernel can say so: above it one sees what was handed over. What TCP sends again is not in
#    these bytes, and has a tracepoint of its own. Loopback loses nothing; what is sent again there
#    was late, because its receiver had to wait for a core. Between nodes, look at this first.
# 4. Rank 1's. The others come early, and wait for it inside the collective. So a histogram of times
#    is read upside down: the one that is *fast* in all-reduces is who all wait for. The moments
#    at which they begin say the same directly: rank 1 is late by its sleep.
# 5. Some 10 us in the virtual machine where this was written; a trap is cheaper where there is no
#    hypervisor. A tracepoint costs a tenth of it or less, since nothing traps. A step has some
#    thirty hits of uprobes, so tracing takes well below 2% of it. The price is per *hit*: hook what
#    is called some hundred times per second, such as collectives, never what is called a million
#    times, such as an allocator.
#
# **Try.** Without the filter all processes are counted: the other job's seven all-reduces are, and
# so is everything else on the machine that uses gloo. With arg2 the "sizes" are addresses:
# registers have no types, so an argument counted wrongly gives numbers, and no error.
#
# **On GPUs** the script hooks libnccl.so. Counts and sizes are as exact; times are those of the
# launch, about the same on all ranks, and only lateness tells who is slow. NCCL over NVLink or
# InfiniBand passes the kernel by, so TCP shows nothing. What happens on the GPU is told by NCCL's
# own profiler plugins, the inspector among them: they need a variable set *before* the job starts.
# communication/nccl_debugging.md has their settings.
#
# **Does it hang, or is it slow?** If it hangs, there is nothing to count. launch/diagnose.py, to be
# copied alone, reads each rank's stack twice a second. It tells a job that stands still from one in
# which all ranks move on, and then names the rank that the others wait for in most looks:
#
#     python launch/diagnose.py --job train.py --seconds 30
#
# **On a real cluster** one rank in a hundred is slow, and nobody knows which. Attach on each node
# for ten seconds (`--attach`, with the pids of its ranks), and compare what they spend inside.
# Instead of root, CAP_BPF and CAP_PERFMON do; a container needs the host's pids (`--pid=host`).
# Where the library has no symbols, because it is linked statically, nothing can be hooked by name.


# %%
def main() -> None:
    attach_to = {"metavar": "PID", "nargs": "+", "type": int, "help": "watch these processes"}
    for_long = {"metavar": "S", "type": float, "default": 10, "help": "so long (default: 10)"}
    options = command_line({"--attach": attach_to, "--seconds": for_long})
    if options.attach:
        watch(options.attach, options.seconds)
        return
    launch()
    job = start_another_job() if RANK == 0 else None
    device = setup()
    found, complaint = trace(device, job)
    check_the_job(found)
    if complaint:
        print0(f"{'':13}{complaint[-87:]}")
        blocked("all that bpftrace counts", needs="root with bpf(2)")
    else:
        check_collectives(found)
        check_another_job(found, device)
        check_the_kernel(found, device)
        check_copies(found, device)
        check_who_is_slow(found, device)
        check_overhead(found)
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
