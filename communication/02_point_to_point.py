"""Send and receive: pairing messages without a deadlock
=====================================================

**Question.** What do `send` and `recv` wait for, and how must they be paired?

**Predict**, and write it down before you run:

1. Each of four ranks sends one byte to its right neighbor and then receives one from its left. On
   gloo, how many ranks are stuck? (And on NCCL?)
2. Rank 0 sends messages of 1 byte, 4 KiB and 16 MiB, and rank 1 has not called `recv` yet. How many
   of the three sends return on gloo?
3. Rank 0 sends 1.0 with tag 1, then 2.0 with tag 2. Rank 1 asks for tag 2 first. What does it get?
4. Heat flows along a rod of a million float64, split over four ranks. Each element needs its two
   neighbors in every step. How many bytes does a rank in the middle send per step?
5. 64 messages of 64 bytes, each answered before the next one goes, or one message of 4 KiB there
   and back: how many times as fast is the one, if a message costs latency and nothing else?

**Run.**

    torchrun --standalone --nproc-per-node=4 02_point_to_point.py   # NCCL on 4 GPUs, else gloo
    python 02_point_to_point.py                                     # the same, started for you

Not run on several GPUs.

**Try.** In `send_first` write `isend` for `send`, and wait for it at the end: which claims fail? In
section 5, exchange halos in the first step only: which ones now?

**Before.** communication/01_nccl_collectives.py: what collectives do.

**Next.** exercises/03_ring_shift and exercises/14_five_hangs; then an all-reduce built from sends
and receives: communication/03_ring_and_tree.py
"""

import argparse
import contextlib
import ctypes
import faulthandler
import json
import logging
import math
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# %% [markdown]
# ## 1. What a send waits for
#
# `dist.send(x, 1)` hands x to rank 1, which must call `dist.recv(y, 0)`. On gloo both return when x
# may be changed and y may be read. On NCCL both return once their kernel is queued, and what comes
# later on the same stream finds x free and y filled. `isend` and `irecv` return at once, with a
# **Work** whose `wait()` does the rest. Collectives are built from these calls, and pipeline stages
# use them directly.
#
# May a send be over before the receive is called? That depends on who carries the message:
#
# | | a send without a receive |
# |---|---|
# | a TCP socket | returns while the message fits into the kernel's buffers, some MB |
# | MPI | may return for a small message (*eager*), not for a large one (*rendezvous*) |
# | gloo | waits, even with one byte |
# | NCCL | is copied into a buffer (NCCL_BUFFSIZE, 4 MiB per channel): small sends complete |
#
# The rule that follows from the table: **never rely on it.** A program in which everybody sends
# first passes its test with small tensors on NCCL, and hangs when the activations grow.

# %%
SIZES = [1, 2**12, 2**24]  # bytes


def sends_back_early(sizes: list[int], device: torch.device, group: dist.ProcessGroup) -> int:
    """Count the sends that return while rank 1 has not yet called recv.

    Rank 1 receives once rank 0 says that its send is over, or a quarter of a second later.
    """
    store = dist.distributed_c10d._get_default_store()
    early = 0
    for size in sizes:
        x = torch.zeros(size, dtype=torch.uint8, device=device)
        dist.barrier(group)
        if RANK == 0:
            dist.send(x, 1, group)
            if x.is_cuda:
                torch.cuda.synchronize()  # only now has the GPU, too, done with the send
            store.set(f"sent {size} on {device.type}", "")
        elif RANK == 1:
            over = False
            until = time.monotonic() + 0.25
            while not over and time.monotonic() < until:
                over = store.check([f"sent {size} on {device.type}"])
            early += over
            dist.recv(x, 0, group)
    return early


def a_send_waits(cpu: dist.ProcessGroup) -> None:
    taken = bytes_that_a_socket_takes()
    claim("bytes a TCP socket takes before anybody reads", 2**16, taken, ">=")
    early = sends_back_early(SIZES, torch.device("cpu"), cpu)
    claim("gloo: sends back before the receive", 0, early, question=2)


# %% [markdown]
# ## 2. Everybody sends first: a deadlock
#
# A **ring shift** moves every rank's tensor one rank to the right. Written in the obvious way it
# never ends on gloo: each rank waits in `send` for its neighbor to receive, who waits in `send`.
#
#     rank 0 --waits for--> rank 1 --waits for--> rank 2 --waits for--> rank 3
#        ^                                                                 |
#        +---------------------------waits for-----------------------------+
#
# No rank alone does anything wrong, so look at all of them. Two things help. A **timeout** is given
# when a group is made (by default 30 minutes for gloo, 10 for NCCL): then gloo raises an error, and
# NCCL's watchdog ends the process. The rank whose timeout ends first closes its connections, so a
# neighbor may read `Connection closed by peer` before its own timeout. And **stacks**, one per
# rank: `faulthandler` writes them even while a rank waits inside C++, and from outside `py-spy dump
# --pid` does. If all stand in the same send, nobody is late, and the order of the calls is wrong.

# %%
LEFT = (RANK - 1) % WORLD_SIZE
RIGHT = (RANK + 1) % WORLD_SIZE
PATIENCE = 3.0  # seconds until a call in this group fails


def send_first(x: torch.Tensor, y: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.send(x, RIGHT, group)
    dist.recv(y, LEFT, group)


def everybody_sends_first(cpu: dist.ProcessGroup) -> None:
    group = dist.new_group(timeout=timedelta(seconds=PATIENCE), backend="gloo")  # will be lost
    x = torch.full((1,), RANK, dtype=torch.uint8)
    y = torch.zeros(1, dtype=torch.uint8)
    error = ""
    dist.barrier(cpu)
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback_later(PATIENCE / 2, file=file)
        try:
            send_first(x, y, group)
        except RuntimeError as timeout:
            error = str(timeout).rpartition("] ")[2]
        faulthandler.cancel_dump_traceback_later()
        file.seek(0)
        frames = re.findall(r'File ".*?([^/"]+)", line (\d+) in (\w+)', file.read())
    stacks = [None] * WORLD_SIZE
    dist.all_gather_object(stacks, frames, group=cpu)
    errors = [None] * WORLD_SIZE
    dist.all_gather_object(errors, error, group=cpu)
    for rank in (0, 1):
        print_stack(rank, stacks[rank], errors[rank])
    sending = sum(bool(stack) and stack[0][2] == "send" for stack in stacks)
    claim("ranks whose stack ends in send", WORLD_SIZE, sending, question=1)
    claim("ranks freed by the timeout", WORLD_SIZE, sum(error != "" for error in errors))


def print_stack(rank: int, frames: list[tuple], error: str) -> None:
    print0(f"{'':13}rank {rank}, stack after {PATIENCE / 2:g} s, innermost call first:")
    ours = [frame for frame in frames if frame[2] != "wrapper"]
    for file, line, function in ours[:4]:
        print0(f"{'':15}{function:24}{file}:{line}")
    print0(f"{'':15}then, after {PATIENCE:g} s: {error:.60}")


# %% [markdown]
# ## 3. Three ways out
#
# 1. **An order.** Odd ranks receive first, even ranks send first. One rank that receives first
#    would break the circle; with every other one, the shift takes two steps:
#
#         step 1     0 -> 1     2 -> 3
#         step 2     1 -> 2     3 -> 0
#
# 2. **Do not wait.** `isend`, then `recv`, then wait for the send. Leave x alone until then.
# 3. **A batch.** `batch_isend_irecv` posts sends and receives together, in whatever order.
#
# On NCCL take the third, or the first. There each call is a kernel, and kernels of one stream run
# one after another: an `isend` before an `irecv` returns at once, yet its kernel may wait for a
# receive that the other rank has queued behind *its* send. A batch is one kernel. In torch 2.15's
# NCCL backend all asynchronous operations of a group, sends and receives included, share *one*
# stream and the group's communicator. So unbatched sends and receives queue behind each other for
# certain, and behind the group's collectives too: give a pipeline a group of its own.


# %%
def in_order(x: torch.Tensor, y: torch.Tensor, group: dist.ProcessGroup) -> None:
    if RANK % 2 == 1:
        dist.recv(y, LEFT, group)
    dist.send(x, RIGHT, group)
    if RANK % 2 == 0:
        dist.recv(y, LEFT, group)


def without_waiting(x: torch.Tensor, y: torch.Tensor, group: dist.ProcessGroup) -> None:
    work = dist.isend(x, RIGHT, group)
    dist.recv(y, LEFT, group)
    work.wait()


def in_a_batch(x: torch.Tensor, y: torch.Tensor, group: dist.ProcessGroup) -> None:
    send = dist.P2POp(dist.isend, x, RIGHT, group)
    receive = dist.P2POp(dist.irecv, y, LEFT, group)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


def three_ways_out(cpu: dist.ProcessGroup) -> None:
    for way in (in_order, without_waiting, in_a_batch):
        wrong = 0
        for size in SIZES:
            x = torch.full((size,), RANK, dtype=torch.uint8)
            y = torch.full((size,), RANK, dtype=torch.uint8)
            way(x, y, cpu)
            wrong += (y != LEFT).sum().item()
        claim(f"ring shift, {way.__name__.replace('_', ' ')}: wrong bytes", 0, wrong)


# %% [markdown]
# ## 4. What gloo forgives and NCCL does not
#
# | gloo | NCCL |
# |---|---|
# | a **tag** tells messages between two ranks apart | ignores tags: messages match in order |
# | `recv` without a source takes the first that comes | needs the source |
# | a message may be shorter than the buffer (a longer one aborts) | sizes must agree |
# | `isend` and `irecv` in any order | put them into a batch, or they may hang |
# | `wait()` returns when the data is there | `wait()` makes the current stream wait |
#
# One more difference has come and gone. Up to torch 2.14, without `device_id` in
# `init_process_group`, NCCL connects in the first call. If that is a batch, all ranks must take
# part; if it is a single send, it makes a communicator of the two ranks and waits until both are
# there, so in a ring where everybody sends first one byte is enough to hang. torch 2.15 connects at
# once.
#
# Code that uses the left column works in a test on CPUs, and not on GPUs. The first three rows, on
# gloo:


# %%
def what_gloo_forgives(cpu: dist.ProcessGroup) -> None:
    arrived = [0.0, 0.0]
    untouched = -1
    source = -1
    if RANK == 0:
        first = dist.isend(torch.tensor([1.0]), 1, cpu, tag=1)
        second = dist.isend(torch.tensor([2.0]), 1, cpu, tag=2)
        first.wait()
        second.wait()
        dist.send(torch.ones(4), 1, cpu)
        dist.send(torch.ones(1), 1, cpu)
    elif RANK == 1:
        arrived = []
        for tag in (2, 1):
            y = torch.zeros(1)
            dist.recv(y, 0, cpu, tag=tag)
            arrived.append(y.item())
        long = torch.full((6,), -1.0)
        dist.recv(long, 0, cpu)
        untouched = (long < 0).sum().item()
        source = dist.recv(torch.zeros(1), None, cpu)
    claim("what comes first if tag 2 is asked for first", 2, arrived[0], question=3, rank=1)
    claim("what comes next, asked for by tag 1", 1, arrived[1], rank=1)
    claim("4 elements into a buffer of 6: left untouched", 2, untouched, rank=1)
    claim("recv from anybody: the rank it came from", 0, source, rank=1)


# %% [markdown]
# ## 5. Halo exchange: send the edges only
#
# Heat flows along a rod: u[i] += (u[i-1] - 2 u[i] + u[i+1]) / 4. Each rank holds a part of the rod
# and one element of each neighbor, its **halo**, which must be fresh in every step:
#
#     rank 0     0 | u0 u1 u2 u3 | h           h: the neighbor's outermost element
#                               |   ^          u3 goes into rank 1's halo,
#                               v   |          u4 into rank 0's
#     rank 1                    h | u4 u5 u6 u7 | 0
#
# A rank sends its two outermost elements and receives two, in one batch. However long the rod, the
# messages stay as small: that is why stencils, convolutions split along an image, and
# sliding-window attention scale. An all-gather would bring the whole rod, in every step.

# %%
LENGTH = 1_000_003  # no multiple of the ranks
STEPS = 10


def heat(u: torch.Tensor) -> torch.Tensor:
    return u[1:-1] + 0.25 * (u[:-2] - 2 * u[1:-1] + u[2:])


def exchange(u: torch.Tensor) -> None:
    """Send the own outermost elements u[1] and u[-2]; receive the neighbors' into u[0], u[-1]."""
    ops = []
    if RANK > 0:
        ops.append(dist.P2POp(dist.isend, u[1:2], RANK - 1))
        ops.append(dist.P2POp(dist.irecv, u[:1], RANK - 1))
    if RANK < WORLD_SIZE - 1:
        ops.append(dist.P2POp(dist.isend, u[-2:-1], RANK + 1))
        ops.append(dist.P2POp(dist.irecv, u[-1:], RANK + 1))
    if ops:
        for work in dist.batch_isend_irecv(ops):
            work.wait()


def halo_exchange(device: torch.device) -> None:
    torch.manual_seed(0)  # the same rod on every rank, its ends kept at 0
    rod = torch.cat([torch.zeros(1), torch.rand(LENGTH), torch.zeros(1)]).double().to(device)
    edges = [1 + LENGTH * rank // WORLD_SIZE for rank in range(WORLD_SIZE + 1)]
    first, end = list(pairwise(edges))[RANK]
    u = rod[first - 1 : end + 1].clone()
    with CountedCommunication() as counted:
        for _ in range(STEPS):
            exchange(u)
            u[1:-1] = heat(u)
    for _ in range(STEPS):
        rod[1:-1] = heat(rod)
    differ = (u[1:-1] != rod[first:end]).sum()
    claim("halos: elements that differ from one process", 0, differ)
    if WORLD_SIZE == 1:
        return
    sent = sum(call.nbytes for call in counted.calls("send")) / STEPS
    neighbors = int(RANK > 0) + int(RANK < WORLD_SIZE - 1)
    claim("halos: bytes that rank 1 sends per step", 8 * neighbors, sent, question=4, rank=1)
    total = sum(gather_objects(sent))
    claim("halos: bytes that all ranks send per step", 16 * (WORLD_SIZE - 1), total)


# %% [markdown]
# ## 6. Ping-pong: many small messages, or one
#
# Half a round trip is the **latency** of a message. 64 messages, each of which is answered before
# the next one goes, pay it 64 times each way; posted in one batch they overlap; as one message of
# the same bytes they pay it once. That is why DDP copies gradients into buckets, and why
# `torch.cat` before a send is seldom a waste.


# %%
def there_and_back(parts: list[torch.Tensor]) -> None:
    """Ranks 0 and 1: one round trip of all parts, in a batch; NCCL wants batches, even of one."""
    for sender in (0, 1):
        operation = dist.isend if sender == RANK else dist.irecv
        for work in dist.batch_isend_irecv([dist.P2POp(operation, p, 1 - RANK) for p in parts]):
            work.wait()


def one_by_one(parts: list[torch.Tensor]) -> None:
    for part in parts:
        there_and_back([part])


def ping_pong(device: torch.device) -> None:
    x = torch.zeros(64 * 16, device=device)
    parts = list(x.split(16))  # 64 bytes each
    one = "one by one, answered"
    whole = "as one message"
    us = {one: math.inf, "in one batch": math.inf, whole: math.inf}
    for _ in range(8):  # the best of 8: whatever disturbs only delays
        us[one] = min(us[one], microseconds(lambda: one_by_one(parts), 1))
        batch = microseconds(lambda: there_and_back(parts), 8)
        us["in one batch"] = min(us["in one batch"], batch)
        us[whole] = min(us[whole], microseconds(lambda: there_and_back([x]), 32))
    for name, best in us.items():
        print0(f"{'':13}64 messages of 64 bytes, {name:18}{best:9,.0f} us one way")
    ratio = us[one] / us[whole] if RANK < 2 else 0.0
    what = "64 messages one by one / as one message"
    claim(what, 64, ratio, atol=40, question=5, timed=True, rank=0)


# %% [markdown]
# ## 7. How it is measured
#
# Early sends are counted by order: a send that is over before rank 1 calls `recv` has said so in
# the store. For that rank 1 gives it a quarter of a second; a send that took longer than that
# without waiting for anybody would not be seen. The rod's oracle is the whole rod in one process,
# equal to the bit, since every element sees the same three numbers in the same formula. Messages
# are counted beneath torch's dispatcher, where each call passes on its way to the backend. The
# clock starts after a barrier.


# %%
def microseconds(round_trip: Callable, repeats: int) -> float:
    """Return the mean time of half a round trip between ranks 0 and 1; others only wait."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        if RANK < 2:
            round_trip()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats / 2 * 1e6


def bytes_that_a_socket_takes() -> int:
    """Write to a TCP connection that nobody reads, until the kernel takes no more."""
    taken = 0
    server = socket.create_server(("127.0.0.1", 0))
    wire = socket.create_connection(server.getsockname())
    reader, _ = server.accept()
    with server, wire, reader, contextlib.suppress(BlockingIOError):
        wire.setblocking(False)
        while taken < 2**30:
            taken += wire.send(bytes(2**16))
    return taken


def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


# %% [markdown]
# The counter of messages, the same in every lesson that needs one:


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
# ## 8. On GPUs: NCCL's buffer, and latency against size
#
# NCCL's connection exists after a first message. From then on a send of 1 KiB should be over before
# any receive is posted, and one of 256 MiB should not. The table that follows shows where a message
# stops being latency and becomes bandwidth: half of the full speed is reached at about latency x
# bandwidth bytes.


# %%
def measure_on_gpus(device: torch.device) -> None:
    if device.type == "cpu" or WORLD_SIZE == 1:
        blocked("NCCL: small sends return, large ones wait", needs="2 GPUs")
        return
    group = dist.group.WORLD
    sends_back_early([1], device, group)  # connects
    small = sends_back_early([2**10], device, group)
    large = sends_back_early([2**28], device, group)
    claim("NCCL: sends of 1 KiB back before the receive", 1, small, rank=1)
    claim("NCCL: sends of 256 MiB back before the receive", 0, large, rank=1)
    for size in (2**3, 2**13, 2**18, 2**23, 2**28):
        x = torch.zeros(size, dtype=torch.uint8, device=device)
        us = 0.0
        if RANK < 2:
            us = median_ms(lambda x=x: there_and_back([x])) / 2 * 1e3
        speed = size / max(us, 1) / 1e3
        print0(f"{'':13}{size:12,} bytes  {us:10.1f} us one way  {speed:8.2f} GB/s")
        dist.barrier()


def median_ms(work: Callable, repeats: int = 20) -> float:
    """Return the median time of `work()` on this rank's GPU, in milliseconds."""
    times = []
    with torch.no_grad():
        for _ in range(repeats + 3):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return sorted(times[3:])[repeats // 2]


# %% [markdown]
# ## What you should have seen
#
# 1. All four, until the timeout, even with one byte: every stack ends in `send`. On NCCL, if it has
#    connected before, the same program ends with one byte, which fits into its buffer. It hangs
#    once a message is larger than what all of its channels buffer (4 MiB each; how many serve one
#    peer depends on the machine, so section 8 tries 256 MiB). So test with the sizes that you will
#    use, or better, write an order that needs no buffer.
# 2. None. gloo announces a message and waits for the receive. A bare TCP socket takes some
#    megabytes in the meantime, so hand-written socket programs show the same trap as MPI.
# 3. The 2.0: a tag is part of the match. On NCCL, which has no tags, it would get the 1.0, and no
#    error.
# 4. 16: two float64, one to each side, of a part that holds two megabytes. Rank 0 and the last rank
#    have one neighbor and send 8.
# 5. 64 times, if latency is all. On two cores it is 50 to 60 times, with some 50 us per message
#    whatever its size. Called from Python, a message over NVLink costs tens of microseconds too, of
#    which most is the launch: nccl-tests' sendrecv_perf, in C, shows NCCL's own.
#
# **Try.** With `isend` in `send_first` nobody is stuck: "ranks whose stack ends in send" and "ranks
# freed by the timeout" fail. With stale halos both the elements and the bytes are wrong.
#
# On real systems a pipeline's stages exchange activations by batches, and a shape that differs
# between the two sides hangs NCCL instead of raising. With a thousand ranks nobody reads a thousand
# stacks: sort them by their innermost call, and look at the few that differ.


# %%
def main() -> None:
    command_line()
    launch()
    device = setup()
    dist.barrier()  # NCCL without device_id: all ranks meet before the first batch_isend_irecv
    if WORLD_SIZE == 1:
        blocked("sends, deadlocks, shifts, tags, ping-pong", needs="2 ranks")
    else:
        cpu = dist.new_group(backend="gloo", timeout=timedelta(minutes=1))  # NCCL forgives less
        a_send_waits(cpu)
        everybody_sends_first(cpu)
        three_ways_out(cpu)
        what_gloo_forgives(cpu)
    halo_exchange(device)
    if WORLD_SIZE > 1:
        ping_pong(device)
    measure_on_gpus(device)
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
