"""One file, two nodes: where a dataset's bytes travel
===================================================

**Question.** A job has two nodes, and its dataset is one file. How many of its bytes cross the
cable between the nodes in each epoch, what decides that, and how long does a step wait for them?

**Predict**, and write it down before you run. The file has 8 pages with 16 samples each and lies on
node 0's disk. In each epoch node 1 takes half of the samples, and asks node 0 for whole pages.

1. The order is random over the whole file, another one in each epoch, and node 1 keeps all pages
   that have come. How many files cross the cable in the first epoch, and how many in the second?
2. The same, but node 1 has room for only 3 pages. How many files cross in an epoch?
3. Now each node takes the samples of its own four pages, in file order, still with room for 3
   pages. How many files cross in the first epoch, and how many in the second? And in the second, if
   node 1 has written what came to a disk of its own?
4. The model computes on a batch of 16 samples for as long as two pages take on the cable, and the
   loader reads ahead. What share of its time does node 1 wait in 3., and what share in 2.?

**Run.** Rank 0 makes two virtual nodes on this machine; all ranks claim what was seen in them.

    torchrun --standalone --nproc-per-node=4 09_one_file_two_nodes.py   # NCCL on 4 GPUs, else gloo
    python 09_one_file_two_nodes.py                                     # the same

Not run on several GPUs. The virtual nodes need Linux, iproute2, and root or user namespaces.

**Try.** In `random_order` leave `epoch` out of the seed: which claim fails, and for whom is that
better? Set `ROOM` to 4: which claims fail, and why only those?

**Before.** data-loading/03_orders_pages_memory.py: pages, orders, and the page cache of one node.

**Next.** data-loading/04_jit_augmentation.py: what happens to a sample once its bytes are there.
"""

import argparse
import ctypes
import json
import logging
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import BinaryIO, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a process with threads should not fork
import numpy as np
import psutil
import torch
import torch.distributed as dist

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

SAMPLE = 12_288  # bytes: an image of 64 x 64 pixels, three bytes each
PER_PAGE = 16  # samples; a batch has as many
PAGE = PER_PAGE * SAMPLE
PAGES = 8
N = PAGES * PER_PAGE  # samples in the file; each of the two nodes takes half of them
ROOM = 3  # pages that node 1's memory can hold
SEED = 0
MBIT = 50  # of the cable, each way

# %% [markdown]
# ## 1. One file, and a node that does not have it
#
# There are two ways to feed a second node. Either it gets a copy before training begins, and the
# whole file crosses the cable once. Or it asks for what it needs when it needs it, in every epoch:
#
#     a copy for each node                       one file for both
#
#     node 0   file ────────> samples            node 0   file ────────> samples
#               ║                                          └──> server
#               ║  all of it, once                              ║  what is asked for
#               v                                               v
#     node 1   copy ────────> samples            node 1   room for 3 pages ──> samples
#
# A file system over the network (NFS, Lustre) or an object store (S3) is the second way. It does
# not know what a sample is. It delivers ranges of bytes, usually larger than a sample: here a page.
# A request is an offset and a length, 16 bytes. Node 1 keeps the ranges that it used last, as a
# real node's kernel does: NFS puts what has come into the node's page cache.


# %%
def serve(node_1: socket.socket, file: BinaryIO) -> None:
    """On node 0: answer each request with a range of the file, as long as node 1 lives."""
    while True:
        offset, length = struct.unpack("!QQ", node_1.recv(16, socket.MSG_WAITALL))
        node_1.sendall(os.pread(file.fileno(), length, offset))


@dataclass
class RemoteFile:
    """The file on node 1: ranges of `unit` bytes come over the cable, and the last `room` stay."""

    cable: socket.socket
    unit: int = PAGE
    room: int = ROOM
    kept: dict[int, bytes] = field(default_factory=dict)  # the one used last stands at the end

    def fetch(self, number: int) -> bytes:
        self.cable.sendall(struct.pack("!QQ", number * self.unit, self.unit))
        return self.cable.recv(self.unit, socket.MSG_WAITALL)

    def sample(self, index: int) -> bytes:
        number, start = divmod(index * SAMPLE, self.unit)
        data = self.kept.pop(number, None) or self.fetch(number)
        self.kept[number] = data
        if len(self.kept) > self.room:
            del self.kept[next(iter(self.kept))]  # the least recently used
        return data[start : start + SAMPLE]


# %% [markdown]
# ## 2. The order of the samples decides how often a page crosses
#
# The n = 64 samples of node 1 are 4 pages' worth, half a file. But a page is used in full only if
# all its samples are node 1's, and it crosses once only if they come while it is kept. Each row
# below is a page, time runs to the right, x is a sample of node 1 and o one of node 0:
#
#               random over the file       shards, in file order
#     page 0    x   o     o x    o         oooo
#     page 1      o   x o      x               oooo
#     page 2     x     x     o    o        xxxx
#     page 3       x o   x    o x              xxxx
#
# - **Random over the whole file**, as with `DistributedSampler`. If node 1 has room for r of p
#   pages, a sample's page is still there with probability r/p, so about n (1 - r/p) pages cross.
# - **Quasi-random** over the whole file: the pages come in random order, two are open at a time,
#   and samples are drawn from these. Each page crosses once, but half of it is for the other node.
# - **Shards**: each node has pages of its own. Each crosses once and is used in full, in any order
#   that keeps few pages open.


# %%
def random_order(node: int, epoch: int) -> list[int]:
    shuffled = np.random.default_rng([SEED, epoch]).permutation(N)
    return shuffled[node::2].tolist()


def quasi_random(pages: Sequence[int], epoch: int) -> list[int]:
    """The samples of these pages in random order, of which the first two that are left are open."""
    generator = np.random.default_rng([SEED, epoch])
    first = generator.permutation(pages) * PER_PAGE
    left = [generator.permutation(range(at, at + PER_PAGE)).tolist() for at in first]
    order = []
    while left:
        page = left[generator.integers(len(left[:2]))]
        order.append(page.pop())
        left = [page for page in left if page]
    return order


ORDERS = {  # (node, epoch) -> the samples that the node reads
    "copy, then random": lambda node, epoch: [*range(N), *random_order(node, epoch)],
    "random": random_order,
    "quasi-random": lambda node, epoch: quasi_random(range(PAGES), epoch)[node::2],
    "shards, quasi-random": lambda node, epoch: quasi_random(range(4 * node, 4 * node + 4), epoch),
    "shards, file order": lambda node, epoch: list(range(64 * node, 64 * node + 64)),
}

# %% [markdown]
# ## 3. The second epoch: memory, a disk of its own, and one kernel
#
# What crosses again depends on what node 1 still has. In a random order that is new in each epoch,
# half of the samples of the second epoch were node 0's in the first. In a shard they are the same
# ones. So a copy that is made on node 1's disk *while* the first epoch reads ends all traffic.
#
# Real nodes have a page cache each. Our virtual nodes have networks of their own, but **one kernel
# and so one page cache**: what node 0 has read, node 1 finds in memory, with nothing on the cable
# and nothing from a disk. Two virtual nodes, or two containers of one machine, that open the same
# file test only that. So node 1 does not open it here: bytes reach it through a socket, and its
# memory is `kept`. Its own copy is another file, which `drop` empties as on a machine of its own.


# %%
@dataclass
class CachedFile(RemoteFile):
    """Also keeps each page that has come, in a file on node 1's own disk."""

    copy: BinaryIO = field(default_factory=tempfile.TemporaryFile)  # nameless: nothing is left
    have: set[int] = field(default_factory=set)

    def fetch(self, number: int) -> bytes:
        if number not in self.have:
            os.pwrite(self.copy.fileno(), super().fetch(number), number * PAGE)
            self.have.add(number)
        return os.pread(self.copy.fileno(), PAGE, number * PAGE)


def drop(file: BinaryIO) -> None:
    """Write a file to its disk, and drop it from the page cache."""
    os.fsync(file.fileno())
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# %% [markdown]
# ## 4. What a step waits for
#
# A batch needs c seconds on the cable, and the model computes C seconds on it. A loader that reads
# ahead does both at once, so a step takes the longer of the two:
#
#     c = bytes of the pages that a batch needs x 1514 / 1448 x 8 / (bits per second)
#     share of the time that the model waits = 1 - C / c if c > C, else 0
#
# (A packet of 1,514 bytes carries 1,448.) Reading ahead hides a cable that is faster than the
# model. If it is slower, no depth of prefetching helps; fewer bytes do.


# %%
def batches_ahead(file: RemoteFile, order: Sequence[int]) -> Iterator[list[bytes]]:
    """Read batches in a thread of their own, as far ahead as it comes."""
    batches = np.reshape(order, (-1, PER_PAGE)).tolist()
    return ThreadPoolExecutor(1).map(lambda batch: [*map(file.sample, batch)], batches)


def share_waited(batches: Iterable, compute: float) -> float:
    """Sleep, in place of a model, on each batch; return the share of time without a batch."""
    arrivals = []
    for _ in batches:
        arrivals.append(time.perf_counter())
        time.sleep(compute)
    return 1 - (len(arrivals) - 1) * compute / (arrivals[-1] - arrivals[0])


# %% [markdown]
# ## 5. How it is measured
#
# **Bytes** are those that the kernel counts at node 1's end of the cable, both ways together. Of a
# packet's 1,514 bytes, 66 are headers (Ethernet 14, IP 20, TCP 32), and an acknowledgment is such a
# header alone. Between none and all packets have one; we expect half. All is divided by what the
# whole file takes in this way, so that the unit is a file. `files` are the predictions. Each word
# of a sample is the sample's number; what the disk delivers is counted in /proc/self/io.

# %%
MSS = 1448
FRAME = 1514
FILE = N * SAMPLE * (FRAME + (FRAME - MSS) / 2) / MSS  # bytes
SLACK = 0.07  # acknowledgments (0.023), requests, and what TCP sends twice on busy cores


class Case(NamedTuple):
    """Epochs that node 1 reads, each in one of ORDERS, and the files that should cross in each."""

    name: str
    reader: Callable[[socket.socket], RemoteFile]
    orders: list[str]
    files: list[float]
    question: int | None = None
    slack: float = 0.0  # in files, where chance decides: about one standard deviation


MISSES = N / 2 * (1 - ROOM / PAGES)  # pages, in random order
all_pages = partial(RemoteFile, room=PAGES)
by_sample = partial(RemoteFile, unit=SAMPLE, room=N)
CASES = [
    Case("own copy", CachedFile, ["copy, then random", "random"], [1, 0]),
    Case("random, large memory", all_pages, ["random"] * 2, [1, 0], question=1),
    Case("random, small memory", RemoteFile, ["random"], [MISSES / PAGES], question=2, slack=0.5),
    Case("random, by the sample", by_sample, ["random"] * 2, [1 / 2, 1 / 4], slack=0.05),
    Case("quasi-random", RemoteFile, ["quasi-random"], [1]),
    Case("shards, quasi-random", RemoteFile, ["shards, quasi-random"], [1 / 2]),
    Case("shards, file order", RemoteFile, ["shards, file order"] * 2, [1 / 2] * 2, question=3),
    Case("shards, own disk", CachedFile, ["shards, file order"] * 2, [1 / 2, 0], question=3),
]
PAGE_SECONDS = PAGE * FRAME / MSS * 8 / (MBIT * 1e6)
STEPS = {  # order, pages that a batch needs, and how many pages' time the model computes
    "shards, computing 2 pages": ("shards, file order", 1, 2),
    "shards, computing 1/2 page": ("shards, file order", 1, 1 / 2),
    "random, computing 2 pages": ("random", PER_PAGE * (1 - ROOM / PAGES), 2),
}


def contents(index: int) -> bytes:
    return np.full(SAMPLE // 4, index, np.uint32).tobytes()


def read_epoch(file: RemoteFile, order: Sequence[int]) -> tuple[float, int]:
    """Return the files that crossed the cable, and how many samples are wrong."""
    before = bytes_on_the_cable()
    samples = [file.sample(index) for index in order]
    crossed = (bytes_on_the_cable() - before) / FILE
    return crossed, sum(data != contents(i) for data, i in zip(samples, order, strict=True))


def files_from_disk(file: BinaryIO) -> float:
    """Read all of a file; return how much of it the disk has delivered."""
    before = psutil.Process().io_counters().read_bytes
    os.pread(file.fileno(), N * SAMPLE, 0)
    return (psutil.Process().io_counters().read_bytes - before) / (N * SAMPLE)


def measure(file: BinaryIO, cable: socket.socket) -> dict:
    """On node 1: read each case's epochs, look at the disks, take steps; return what was seen."""
    drop(file)  # and so node 0 reads it from its disk
    seen = {"wrong": 0}
    for case in CASES:
        remote = case.reader(cable)
        for epoch, name in enumerate(case.orders, start=1):
            crossed, wrong = read_epoch(remote, ORDERS[name](1, epoch))
            seen[case.name, epoch] = crossed
            seen["wrong"] += wrong
    seen["node 0's file"] = files_from_disk(file)
    drop(remote.copy)
    seen["own disk"] = files_from_disk(remote.copy)
    for name, (order, _, compute) in STEPS.items():
        batches = batches_ahead(RemoteFile(cable), 2 * ORDERS[order](1, 1))
        seen[name] = share_waited(batches, compute * PAGE_SECONDS)
    return seen


# %% [markdown]
# **The nodes** are network namespaces, joined by a pair of virtual interfaces and throttled by tbf;
# section 4 of communication/07_hierarchical_collectives.py explains these lines; skip them here.
# Each process asks the kernel to be killed when its parent ends, so nothing is left behind.

# %%
libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNET = 0x40000000  # for unshare and setns: a network namespace
CLONE_NEWUSER = 0x10000000  # for unshare: a user namespace


def new_network() -> int:
    """Move this process into a new network namespace; return a descriptor of it."""
    if sys.platform != "linux":
        raise OSError("network namespaces exist on Linux only")
    user = os.geteuid()
    group = os.getegid()
    if libc.unshare(CLONE_NEWNET) != 0:  # not root: become root of a user namespace first
        if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
            raise OSError(f"unshare: {os.strerror(ctypes.get_errno())}")
        for name, line in {
            "setgroups": "deny",
            "uid_map": f"0 {user} 1",
            "gid_map": f"0 {group} 1",
        }.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def enter(network: int) -> None:
    """Move this process into a network namespace."""
    if libc.setns(network, CLONE_NEWNET) != 0:
        raise OSError(f"setns: {os.strerror(ctypes.get_errno())}")


def command(line: str, keep: tuple[int, ...] = ()) -> None:
    """Run a command, with these descriptors open; raise OSError with what it complained of."""
    done = subprocess.run(line.split(), pass_fds=keep, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{done.stderr.strip()} ({line})")


def two_nodes(mbit: float) -> list[int]:
    """Make two networks joined by a cable that carries `mbit` Mbit/s each way; return both."""
    nodes = [new_network(), new_network()]  # we are in the second now
    far_end = f"peer name slow netns /proc/self/fd/{nodes[0]}"
    command(f"ip link add name slow type veth {far_end}", keep=(nodes[0],))
    for number, network in enumerate(nodes, start=1):
        enter(network)
        command("ip link set lo up")
        command(f"ip address add 10.0.0.{number}/24 dev slow")
        command("ip link set slow addrgenmode none up")  # no IPv6, so no chatter
        command("ip link set slow gso_max_segs 1")  # TCP cuts packets itself: no card does it here
        command(f"tc qdisc add dev slow root tbf rate {mbit}mbit burst 5kb latency 100ms")
    return nodes


def bytes_on_the_cable() -> int:
    """Bytes that have come into this node by the cable, and left: one end sees both ways."""
    with open("/proc/self/net/dev") as file:
        rows = [line.split() for line in file if "slow:" in line]
    # field 1 counts what was received, field 9 what was sent; without a cable there is no row
    return sum(int(row[1]) + int(row[9]) for row in rows)


def die_with(parent: int) -> None:
    """Be killed when `parent` ends (PR_SET_PDEATHSIG), or now if it has ended."""
    if sys.platform == "linux":
        libc.prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


# %% [markdown]
# **Two processes**, both forked by rank 0: node 1, and its child, which serves in node 0. What they
# saw is claimed by all ranks.


# %%
def be_the_nodes(parent: int, file: BinaryIO, pipe: Connection) -> None:
    """Be node 1, and fork node 0, which serves; where there can be no nodes, use a socket pair."""
    os.setsid()  # Ctrl-C is for the lesson; when that ends, we do
    die_with(parent)
    why_not = ""
    try:
        nodes = two_nodes(MBIT)
        enter(nodes[0])  # a socket stays in the node in which it was made
        listening = socket.create_server(("10.0.0.1", 0))
        enter(nodes[1])
        cable = socket.create_connection(listening.getsockname())
        far_end, _ = listening.accept()
    except OSError as error:
        why_not = str(error)
        cable, far_end = socket.socketpair()
    node_1 = os.getpid()
    if os.fork() == 0:
        die_with(node_1)
        serve(far_end, file)
    pipe.recv()  # the lesson's own ranks are ready, and leave us the cores
    pipe.send((why_not, measure(file, cable)))


def start_nodes() -> Connection:
    """Write the file, and fork the nodes' processes; return a pipe to node 1."""
    ours, theirs = Pipe()
    parent = os.getpid()
    with tempfile.TemporaryFile() as file:  # both nodes inherit it open
        file.write(b"".join(map(contents, range(N))))
        file.flush()
        if os.fork() == 0:
            try:
                be_the_nodes(parent, file, theirs)
            except BaseException:  # it must not return into `main`
                sys.excepthook(*sys.exc_info())
            os._exit(0)
    theirs.close()
    return ours


def check_cable(seen: dict) -> None:
    for case in CASES:
        for epoch, files in enumerate(case.files, start=1):
            text = f"{case.name}, epoch {epoch}: files crossed"
            slack = SLACK * files + case.slack + 0.001  # or a late acknowledgment
            how = {"atol": slack, "varies": True}
            claim(text, files, seen[case.name, epoch], question=case.question, **how)
    judge = partial(claim, kind="simulated", timed=True)  # a sleep stands for the model
    for name, (_, pages, compute) in STEPS.items():
        predicted = max(0, 1 - compute / pages)
        judge(f"{name}: share of time waited", predicted, seen[name], atol=0.08, question=4)


def check_disks(seen: dict) -> None:
    claim("node 0's file, read by node 1: files from disk", 0, seen["node 0's file"], atol=0.02)
    text = "shards, own disk: files that it delivers"
    if seen["own disk"] > 0:
        claim(text, 1 / 2, seen["own disk"], atol=0.02)
    else:
        blocked(text, needs="a temporary folder on a disk: set TMPDIR")


# %% [markdown]
# ## What you should have seen
#
# 1. One, and none. A page of 16 samples holds none of node 1's with probability 2^-16, so all 8
#    pages cross, although half of each is not used. After that node 1 has the file. A copy made
#    before training costs as much, and no step waits for it.
# 2. Five. A page is still there with probability 3/8, so 64 x 5/8 = 40 pages cross: ten times what
#    node 1 uses. If it asks for single samples, half a file crosses in any order; where it keeps
#    them, a quarter in the second epoch, an eighth in the third. The price is a request for each.
# 3. Half a file, half a file again, and none. Memory for three of four pages is worth nothing here:
#    the next page is always the one that was just forgotten. With its own disk node 1 asks for
#    nothing, and what memory has lost comes from there. Over the *whole* file even quasi-random
#    order brings twice as much as shards, because both nodes open the same pages.
# 4. 0 and 0.8. With shards a batch needs one page, which comes while the model computes for two. In
#    random order it needs ten: the model computes for 2 of 10 page times and waits for 8. A model
#    that is four times as fast waits half of its time with shards, too, and node 0 waits with it,
#    in the all-reduce at the end of the step.
#
# **Try.** Without `epoch` every epoch has the same order, and "by the sample" needs nothing in the
# second: better for the cable, and not for training. With room for 4 pages a shard fits: "shards,
# file order" reads its second epoch from memory, and the fast model waits less than predicted.
#
# **What to take.** A copy for each node, if its disk is large enough; else shards, kept on the
# node's disk as they come. A node then sees the same half in every epoch, so write the file in
# random order once: sorted by class, it would give each node classes of its own.
#
# **On a real cluster**, none of which was measured here, memory is the node's page cache, one for
# all its ranks. *NFS* asks for at most 1,048,576 bytes at a time (nfs(5), `rsize`), and reads ahead
# 128 KiB or 15 x `rsize`, by distribution (Microsoft on Azure NetApp Files); `fsc` keeps what came
# on a local disk, unless it is read with O_DIRECT (Red Hat). *Lustre* spreads a file over many
# servers and reads ahead only after consecutive reads (its 1.6 manual). *S3* itself caches nothing
# on a client; AWS calls ranges of 8 or 16 MB typical, and each is a request. WebDataset deals out
# shards by `nodesplitter` and keeps them in `cache_dir`; in MosaicML's Streaming these are
# `num_canonical_nodes` and `local`. Many clients share a server: 8 GPUs that take 20,000 images of
# 110 kB per second need 2.2 GB/s, and a port of 10 Gbit/s brings 1.25. A dataset of small files
# also asks for each by its name; our one file does not.


# %%
def main() -> None:
    command_line()
    launch()
    node_1 = start_nodes() if RANK == 0 else None
    setup()  # after the forks: it starts threads
    if node_1:
        node_1.send("go")
    told = [node_1.recv() if node_1 else None]
    dist.broadcast_object_list(told)
    why_not, seen = told[0]
    claim("samples that came with other contents", 0, seen["wrong"])
    if why_not:
        print0(f"{'':13}{why_not:.80}")
        blocked("files over the cable, and what a step waits", needs="root or user namespaces")
    else:
        check_cable(seen)
    check_disks(seen)
    if node_1:
        os.wait()  # it has ended
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
