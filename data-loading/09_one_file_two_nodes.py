"""One file, two nodes: how often a page crosses the network
=========================================================

**Question.** A job has two nodes, and its dataset is one file on node 0. How many times does the
file cross the network, and what must node 1 do for that to be as seldom as possible?

**Predict**, and write it down before you run. The file has 8 pages of 480 samples. Node 1 has 4
ranks, which take half of the samples of each epoch, and node 0 sends it whole pages. *Files* are
bytes that cross, divided by the size of the file. In 1 to 3 samples are taken in an order that is
random over the whole file.

1. A rank keeps nothing, and asks for the page of each sample. How many files cross in an epoch?
2. Each rank writes the pages that come into a file of its own. How many files cross in epoch 0?
3. The 4 ranks share one such file. How many files have crossed after a tenth of epoch 0?
4. They share one, and node 1 takes only samples of pages 4 to 7. How many files cross in epoch 0?
5. With that, node 1 sees nothing new in epoch 1. In the order of 1 to 3, which share of its samples
   of epoch 1 did it not have in epoch 0?

**Run.**

    torchrun --standalone --nproc-per-node=4 09_one_file_two_nodes.py   # NCCL on 4 GPUs, else gloo
    python 09_one_file_two_nodes.py                                     # the same
    launch/two_nodes_here.sh --ranks 2 data-loading/09_one_file_two_nodes.py --mbit 200

The first two lines play both nodes on one machine: all ranks are node 1's, and threads of rank 0
are node 0. The last one makes two networks here, joined by a cable of 200 Mbit/s, and counts there
as well. Not run on several GPUs, nor on two machines.

**Try.** In `NodeCopy.page` leave out the line that writes the mark: which claims fail? In `dealt`
leave out `set_epoch`: which claim fails, and for whom is that worse, the network or the model?

**Before.** data-loading/03_orders_pages_memory.py: pages, and orders that need many of them.
data-loading/17_page_cache.py: the memory that the ranks of one node share.

**Next.** data-loading/04_jit_augmentation.py: what happens to a sample once its bytes are there.
"""

import argparse
import ctypes
import fcntl
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
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# On one machine all ranks are node 1's. With two nodes, n ranks on each, the last n are node 1's.
PER_NODE = int(os.environ.get("LOCAL_WORLD_SIZE", WORLD_SIZE))  # ranks of a node: n
READER = RANK - (WORLD_SIZE - PER_NODE)  # 0 to n-1 on node 1, below 0 on node 0

PAGES = 8
PER_PAGE = 480  # samples
N = PAGES * PER_PAGE  # in the file; each of the two nodes takes half of them
SAMPLE = 128  # bytes
PAGE = PER_PAGE * SAMPLE
FILE = PAGES * PAGE
SEED = 0

# %% [markdown]
# ## 1. A page is used by many samples, and by many ranks
#
# A file system over the network (NFS, Lustre) or an object store (S3) does not know what a sample
# is. It delivers ranges of bytes. A rank could ask for each sample alone: half a file would cross
# per epoch, in 1,920 requests of 128 bytes, each of which waits for the network once. So one asks
# for much more at a time, here a **page**, and 8 requests would bring the whole file.
#
# But a rank that keeps nothing gets the same page again for the next sample in it. (fsspec comes
# close to that: by default each jump in a file brings 5 MiB, in the place of what was there.) And
# the other ranks of its node get it too, since an order that is random over the file gives every
# rank samples of every page.


# %%
class RemoteFile:
    """The file as a rank of node 1 sees it: node 0 sends the page of each sample."""

    def __init__(self, server: socket.socket) -> None:
        self.server = server
        self.received = 0  # bytes

    def sample(self, index: int) -> bytes:
        number, place = divmod(index, PER_PAGE)
        return self.page(number)[place * SAMPLE : (place + 1) * SAMPLE]

    def page(self, number: int) -> bytes:
        """Ask node 0 for a page of the file."""
        self.server.sendall(struct.pack("!Q", number))
        data = self.server.recv(PAGE, socket.MSG_WAITALL)
        self.received += len(data)
        return data


# %% [markdown]
# ## 2. One copy per node, filled as it is read
#
# Node 1 has a disk. So it can keep each page that comes, in a file that all its ranks open:
#
#     node 0    file ──> server
#                          ║
#                 network  ║  a page, when node 1 does not have it
#                          v
#     node 1    copy on its own disk:  [page 0][      ][page 2][      ]...  marks: 1 0 1 0 ...
#                  │         │         │
#               rank 0    rank 1    rank 2 ...
#
# The copy begins empty. A rank that finds no mark fetches the page, writes it, and then marks it.
# Meanwhile it holds a **lock** on one byte, the mark (`lockf`). Two ranks that need the same page:
#
#     rank 0   no mark   locks   fetches the page, writes, marks   unlocks   reads it
#     rank 1   no mark   waits .................................   locks     a mark: unlocks, reads
#
# Rank 1 looks a second time when it has the lock, so the page crosses once. Another page has
# another lock, and is fetched at the same time. The mark comes last, so a rank that is killed
# halfway leaves a page without a mark, which the next rank fetches again.
#
# If node 0 goes away in the middle of a page, `recv` may return less than a page, without an error.
# We trust node 0. Code of your own must compare the length with PAGE before it writes the mark.


# %%
class NodeCopy(RemoteFile):
    """The same, but pages that have come stay in a file, which any number of ranks may share."""

    def __init__(self, server: socket.socket, path: Path) -> None:
        super().__init__(server)
        self.copy = os.open(path, os.O_RDWR | os.O_CREAT)

    def page(self, number: int) -> bytes:
        mark = FILE + number  # its place in the copy, behind all pages
        if not self.has(mark):
            fcntl.lockf(self.copy, fcntl.LOCK_EX, 1, mark)
            if not self.has(mark):  # no other rank has fetched it meanwhile
                os.pwrite(self.copy, super().page(number), number * PAGE)
                os.pwrite(self.copy, b"1", mark)
            fcntl.lockf(self.copy, fcntl.LOCK_UN, 1, mark)
        return os.pread(self.copy, PAGE, number * PAGE)

    def has(self, mark: int) -> bool:
        return os.pread(self.copy, 1, mark) == b"1"


# %% [markdown]
# ## 3. Who takes which samples
#
# Two ways to deal out an epoch. Each row is a page of four samples, time runs to the right, x is a
# sample of node 1 and o one of node 0:
#
#               random over the file     each node its own half
#     page 0    x   o     o x            o   o   o     o
#     page 1      o   x o      x            o   o o o
#     page 2     x     x     o    o      x     x x   x
#     page 3       x o   x    o             x x   x   x
#
# On the left every page is needed by both nodes. On the right each page has one node that needs it.
# Both are random, and use PyTorch's own `DistributedSampler`: on the left it deals the file to the
# 2n ranks of both nodes, on the right half of the file to the n ranks of node 1.


# %%
def dealt(samples: int, ranks: int, rank: int, epoch: int) -> list[int]:
    """Return which of so many samples this rank takes in this epoch, in a random order."""
    if READER < 0:
        return []  # on node 0, where ranks only serve
    sampler = DistributedSampler(range(samples), ranks, rank, seed=SEED)
    sampler.set_epoch(epoch)
    return list(sampler)


def whole_file(epoch: int) -> list[int]:
    return dealt(N, 2 * PER_NODE, PER_NODE + READER, epoch)


def own_half(epoch: int) -> list[int]:
    return [N // 2 + index for index in dealt(N // 2, PER_NODE, READER, epoch)]


# %% [markdown]
# ## 4. How it is measured
#
# Rank 0's threads serve the file over TCP. Files are the bytes that have come out of the sockets of
# node 1's ranks. Requests, locks and copies are real; the network is not, unless there is a cable.
# Even then both nodes share one kernel, and its page cache: what crosses is counted, not what a
# disk delivers. Every sample holds its own number, so a sample from a wrong place is noticed.


# %%
def contents(index: int) -> bytes:
    return np.full(SAMPLE // 8, index, np.int64).tobytes()


def serve(node_1: socket.socket, file: BinaryIO) -> None:
    """On node 0: answer each request with a page of the file, as long as node 1 asks."""
    while request := node_1.recv(8, socket.MSG_WAITALL):
        (number,) = struct.unpack("!Q", request)
        node_1.sendall(os.pread(file.fileno(), PAGE, number * PAGE))


def connect_to_node_0(file: BinaryIO, address: str) -> socket.socket:
    """Fill the file and serve it, on rank 0; return this rank's connection to that server."""
    port = 0
    if RANK == 0:
        file.write(b"".join(map(contents, range(N))))
        file.flush()
        listening = socket.create_server((address, 0), backlog=WORLD_SIZE)
        port = listening.getsockname()[1]
    server = socket.create_connection((address, from_rank_0(port)))
    if RANK == 0:
        for _ in range(WORLD_SIZE):
            node_1, _ = listening.accept()
            threading.Thread(target=serve, args=(node_1, file), daemon=True).start()
    return server


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


phases: list[tuple[float, float]] = []  # files that crossed, by the sockets' count, by a cable's


def files_crossed(file: RemoteFile, samples: list[int]) -> float:
    """Read this rank's samples; return how many files crossed, for all ranks."""
    before = file.received
    cable_before = from_cable()  # 0, if there is none
    dist.barrier()  # nobody begins before all have looked
    for index in samples:
        file.sample(index)
    crossed = sum(gather_objects(file.received - before)) / FILE
    phases.append((crossed, (from_cable() - cable_before) / FILE))
    return crossed


# %% [markdown]
# The order is random over the whole file, and the ranks keep nothing, a copy each, or one for all.


# %%
def check_whole_file(server: socket.socket, folder: Path) -> None:
    """Claim how many files cross if each node takes samples of the whole file."""
    mine = whole_file(0)
    crossed = files_crossed(RemoteFile(server), mine)
    pages = sum(gather_objects(len(mine)))  # one for each sample
    claim("random, nothing kept: files", pages / PAGES, crossed, question=1)

    crossed = files_crossed(NodeCopy(server, folder / f"rank_{RANK}"), mine)
    claim("random, a copy per rank, epoch 0: files", PER_NODE, crossed, question=2)

    file = NodeCopy(server, folder / "whole")
    tenth = len(mine) // 10
    first = files_crossed(file, mine[:tenth])
    claim("random, a copy per node, first tenth: files", 1, first, question=3)
    crossed = first + files_crossed(file, mine[tenth:])
    claim("random, a copy per node, epoch 0: files", 1, crossed)
    claim("random, a copy per node, epoch 1: files", 0, files_crossed(file, whole_file(1)))
    wrong = sum(file.sample(index) != contents(index) for index in whole_file(2))
    claim("samples that came with other contents", 0, wrong)


def check_own_half(server: socket.socket, folder: Path) -> None:
    """Claim how many files cross if each node has pages of its own."""
    file = NodeCopy(server, folder / "half")
    crossed = files_crossed(file, own_half(0))
    claim("own half, a copy per node, epoch 0: files", 1 / 2, crossed, question=4)
    claim("own half, a copy per node, epoch 1: files", 0, files_crossed(file, own_half(1)))


# %% [markdown]
# The price of the half: node 1 never sees the other samples.


# %%
def new_to_node_1(order_of: Callable) -> float:
    """Return which share of node 1's samples of epoch 1 it did not have in epoch 0."""
    before = set().union(*gather_objects(order_of(0)))
    after = set().union(*gather_objects(order_of(1)))
    return len(after - before) / len(after)


def check_samples() -> None:
    """Claim how many samples are new to node 1 in epoch 1."""
    share = new_to_node_1(whole_file)  # 0.04 is five standard deviations of a random half
    claim("random: share new to node 1 in epoch 1", 0.5, share, atol=0.04, question=5)
    claim("own half: share new to node 1 in epoch 1", 0, new_to_node_1(own_half))


# %% [markdown]
# ## What you should have seen
#
# 1. 240. Each of node 1's 1,920 samples brings a page, an eighth of a file. It uses half a file, so
#    480 times that much crosses.
# 2. Four, one per rank: each has samples of every page, so each fetches all 8. The 8 ranks of a
#    real node get the same file 8 times.
# 3. One, all of it: a tenth of node 1's samples are 192, and each of the 8 pages has some 24 of
#    them. The first rank that needs a page fetches it for all. In the rest of the epoch, and in
#    later ones, nothing crosses: the disk has the pages, however little memory node 1 has.
# 4. Half a file. Node 1 needs 4 of the 8 pages, and no other node needs them.
# 5. Half. With pages of its own a node sees the same samples again and again. The price is small if
#    the file was written in random order, since each step has samples of both nodes, and both learn
#    from all gradients. In a file sorted by class, each node would have classes of its own.
#
# **Try.** Without the mark no page is ever there, and each sample fetches one: all six rows with a
# copy fail. Without `set_epoch` each epoch has the same samples, and nothing
# is new to node 1 in epoch 1: the row of question 5 fails, alone. The network does not mind; the
# model gets the batches of epoch 0 again and again.
#
# **When.** If node 1's disk holds the file: one copy per node, made before training or as here. If
# it holds only a share: each node its own pages. If there is no disk, the page cache of the node
# does the same as long as memory holds the pages, for all its ranks.
#
# **What epoch 0 waits for** is arithmetic here, and no row times it. 8 GPUs of node 1 that take
# 20,000 images of 110 kB per second use 2.2 GB/s, and a port of 10 Gbit/s brings 1.25. So a GB that
# they use takes 0.45 s to train on and 0.80 s to fetch. In a random order nearly all of a node's
# pages are fetched first (question 3), and hardly anything is trained meanwhile. So the two add up:
#
#     pages of its own              0.80 + 0.45 s per GB used        waits 64% of the epoch
#     random over the file          1.60 + 0.45 s                    waits 78%
#
# A copy of the whole file, made before training, waits as long as the second row: it fetches the
# same bytes first. With a copy per rank, 8 on a node, 16 times as much crosses as in the first row.
#
# **Where it bites.** Eight ranks that each have a cache folder of their own, named after the rank,
# are question 2. A lock on the whole file (`flock`) lets a node fetch only one page at a time.
# `lockf` locks out processes, not threads, and a process that closes any descriptor of the file
# loses its locks. If a node may lose power and keep the copy, `os.fsync` belongs between page and
# mark.
#
# **In other systems**, none of which was measured here: MosaicML's Streaming keeps shards in
# `local`, one folder for the ranks of a node; WebDataset deals out shards by `nodesplitter` and
# keeps them in `cache_dir`; NFS has only the node's page cache, unless it is mounted with `fsc`.
#
# **On GPUs** nothing differs: pages come to the host. At a thousand nodes, in an order random over
# all of the file, each needs 38% of such pages in epoch 0 (1 - 0.999^480) and all of them in the
# end: a thousand files. With pages of its own for each node it is one file, for all together.

# %% [markdown]
# Only with launch/two_nodes_here.sh: the kernel counts at node 1's end of the cable too, in each of
# the readings above. It counts headers of packets as well, and what the ranks tell each other: less
# than 15% of the reading, or of half a file where nothing is due. A reading that fetched half or
# twice what the sockets say would be off by 50% or more.


# %%
CABLE = WORLD_SIZE > PER_NODE  # there are two nodes, n ranks on each


def throttle(mbit: int) -> None:
    """Limit what this node sends into the cable."""
    limit = f"tbf rate {mbit}mbit burst 64kb latency 100ms"
    subprocess.run(f"tc qdisc add dev cable root {limit}".split(), check=True)


def from_cable() -> int:
    """Return the bytes that have come to this node out of the cable, by the kernel's count."""
    return psutil.net_io_counters(pernic=True)["cable"].bytes_recv if CABLE else 0


def furthest_off(phases: list[tuple[float, float]]) -> float:
    """Return by which share the kernel's count differs from the sockets', where it does most."""
    return max(abs(cable - sockets) / max(sockets, 1 / 2) for sockets, cable in phases)


def check_cable() -> None:
    """Claim that as many files came to node 1 out of the cable as its sockets say."""
    text = "cable: share by which a reading is off, at most"
    claim(text, 0.15, furthest_off(phases), "<=", rank=WORLD_SIZE - 1)


def main() -> None:
    mbit = {"type": int, "help": "of the cable that launch/two_nodes_here.sh makes"}
    options = command_line({"--mbit": mbit})
    launch()
    if CABLE and "cable" not in psutil.net_io_counters(pernic=True):
        refuse(f"needs one machine, or launch/two_nodes_here.sh, got {WORLD_SIZE} ranks on several")
    if PER_NODE > 16:
        refuse(f"a rank needs samples of every page: at most 16 ranks of a node, got {PER_NODE}")
    if options.mbit and RANK % PER_NODE == 0:  # each node throttles its own end
        throttle(options.mbit)
    setup()
    errors = os.environ.get("TORCHELASTIC_ERROR_FILE")  # in the launcher's folder
    here = Path(errors).parent if errors else None
    with (
        tempfile.TemporaryFile() as file,
        tempfile.TemporaryDirectory(prefix="node-", dir=here) as own_folder,
    ):
        folder = Path(from_rank_0(own_folder))  # on a disk that all ranks here see
        server = connect_to_node_0(file, os.environ["MASTER_ADDR"] if CABLE else "127.0.0.1")
        check_whole_file(server, folder)
        check_own_half(server, folder)
        dist.barrier()  # rank 0 serves, and keeps the folder, until all have asked
        if CABLE:
            check_cable()
    check_samples()
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
