"""One file, two nodes: how often a page crosses the network
=========================================================

**Question.** A job has two nodes, and its dataset is one file on node 0. How many times must the
file cross the network in each epoch, and what decides that?

**Predict**, and write it down before you run. The file has 8 pages with 64 samples each. In each
epoch node 1 takes half of the samples, and asks node 0 for whole pages. *Files* are bytes that
cross, divided by the size of the file.

1. The order is random over the whole file, and node 1 keeps all pages that have come. How many
   files cross in the first epoch?
2. The same order, but node 1 has room for 3 pages. How many files cross in each epoch?
3. Now each node takes the samples of its own four pages, in file order, still with room for 3
   pages. How many files cross in the second epoch?
4. The same as 3., but node 1 has written what came to a disk of its own. How many files cross in
   the second epoch?

**Run.**

    torchrun --standalone --nproc-per-node=4 09_one_file_two_nodes.py   # NCCL on 4 GPUs, else gloo
    python 09_one_file_two_nodes.py                                     # the same

Not run on several GPUs, nor on two real nodes: bytes cross a socket between processes.

**Try.** In `random_order` leave `epoch` out of the seed: which claims fail, and for whom is that
better? Set `ROOM` to 4: which two claims fail, and why?

**Before.** data-loading/03_orders_pages_memory.py: pages, and orders that open many of them.
data-loading/17_page_cache.py: the memory that the ranks of one node share.

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
import sys
import tempfile
import threading
import time
from collections import Counter
from datetime import timedelta
from typing import BinaryIO

import numpy as np
import torch
import torch.distributed as dist

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

SAMPLE = 768  # bytes: an image of 16 x 16 pixels, three bytes each
PER_PAGE = 64  # samples
PAGE = PER_PAGE * SAMPLE
PAGES = 8
N = PAGES * PER_PAGE  # samples in the file; each of the two nodes takes half of them
FILE = N * SAMPLE  # bytes
ROOM = 3  # pages that node 1's memory can hold
SEED = 0

# %% [markdown]
# ## 1. One file, and a node that does not have it
#
# There are two ways to feed a second node. Either it gets a copy before training begins, and the
# whole file crosses the network once. Or it asks for what it needs when it needs it, in every
# epoch:
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
# Node 1 keeps the ranges that it used last, as a real node's page cache does.


# %%
class RemoteFile:
    """The file as node 1 sees it: whole pages come from the server, and the last `room` stay."""

    def __init__(self, server: socket.socket, room: int, unit: int = PAGE) -> None:
        self.server = server
        self.room = room
        self.unit = unit  # bytes that come at once
        self.kept: dict[int, bytes] = {}  # the one used last stands at the end
        self.received = 0  # bytes

    def sample(self, index: int) -> bytes:
        number, start = divmod(index * SAMPLE, self.unit)
        data = self.kept.pop(number, None)
        if data is None:
            data = self.fetch(number)
        self.kept[number] = data
        if len(self.kept) > self.room:
            del self.kept[next(iter(self.kept))]  # the least recently used
        return data[start : start + SAMPLE]

    def fetch(self, number: int) -> bytes:
        """Ask the server for a range of the file: an offset and a length go, its bytes come."""
        self.server.sendall(struct.pack("!QQ", number * self.unit, self.unit))
        data = self.server.recv(self.unit, socket.MSG_WAITALL)
        self.received += len(data)
        return data


# %% [markdown]
# ## 2. The order of the samples decides how often a page crosses
#
# Node 1 takes half of the samples, so half a file would be enough. But a page is used in full only
# if all its samples are node 1's, and it crosses once only if they come while it is kept. Each row
# below is a page, time runs to the right, x is a sample of node 1 and o one of node 0:
#
#               random over the file       shards, in file order
#     page 0    x   o     o x    o         oooo
#     page 1      o   x o      x               oooo
#     page 2     x     x     o    o        xxxx
#     page 3       x o   x    o x              xxxx
#
# - **Random over the whole file**, as with `DistributedSampler`. If node 1 has room for r of p
#   pages, the page of its next sample is there with probability r/p. So of its n = 256 samples
#   about n (1 - r/p) make a page cross, as in data-loading/03.
# - **Quasi-random** over the whole file: the pages come in random order, two are open at a time,
#   and samples are drawn from these. Each page crosses once, but half of it is for the other node.
# - **Shards**: each node has pages of its own. Each crosses once and is used in full, in any order
#   that keeps few pages open.


# %%
def random_order(epoch: int) -> np.ndarray:
    """Node 1's samples of a shuffle of the whole file."""
    return np.random.default_rng([SEED, RANK, epoch]).permutation(N)[1::2]


def quasi_random(pages: range, epoch: int) -> np.ndarray:
    """The samples of these pages: the next of the shuffled pages opens when one is used up."""
    generator = np.random.default_rng([SEED, RANK, epoch])
    closed = generator.permutation(pages).tolist()
    open_pages = [closed.pop(), closed.pop()]
    left = {page: generator.permutation(PER_PAGE).tolist() for page in pages}
    order = []
    while open_pages:
        page = generator.choice(open_pages)
        order.append(page * PER_PAGE + left[page].pop())
        if not left[page]:
            open_pages.remove(page)
            open_pages += closed[:1]
            closed = closed[1:]
    return np.array(order)


def file_order(pages: range) -> np.ndarray:
    return np.arange(pages.start * PER_PAGE, pages.stop * PER_PAGE)


# %% [markdown]
# ## 3. The second epoch, and a disk of node 1's own
#
# What crosses again depends on what node 1 still has. In a random order that is new in each epoch,
# half of the samples of the second epoch were node 0's in the first. In a shard they are the same
# ones. So a copy that is made on node 1's disk *while* the first epoch reads ends all traffic.


# %%
class CachedFile(RemoteFile):
    """Also keeps each page that has come, in a file on node 1's own disk."""

    def __init__(self, server: socket.socket, room: int, copy: BinaryIO) -> None:
        super().__init__(server, room)
        self.copy = copy
        self.have: set[int] = set()

    def fetch(self, number: int) -> bytes:
        if number not in self.have:
            os.pwrite(self.copy.fileno(), super().fetch(number), number * PAGE)
            self.have.add(number)
        return os.pread(self.copy.fileno(), PAGE, number * PAGE)


# %% [markdown]
# ## 4. How it is measured
#
# Rank 0 is node 0: threads of it serve the file over TCP. Each rank plays node 1 of a job of its
# own, with an order of its own, so a row holds for n jobs and shows the one that is furthest off.
# Files are the bytes that have arrived at node 1, divided by the size of the file. Each word of a
# sample is the sample's number, so a sample from a wrong place is noticed.


# %%
def contents(index: int) -> bytes:
    return np.full(SAMPLE // 4, index, np.uint32).tobytes()


def serve(node_1: socket.socket, file: BinaryIO) -> None:
    """On node 0: answer each request with a range of the file, as long as node 1 asks."""
    while request := node_1.recv(16, socket.MSG_WAITALL):
        offset, length = struct.unpack("!QQ", request)
        node_1.sendall(os.pread(file.fileno(), length, offset))


def connect_to_node_0(file: BinaryIO) -> socket.socket:
    """Fill the file and serve it, on rank 0; return this rank's connection to that server."""
    port = [0]
    if RANK == 0:
        file.write(b"".join(map(contents, range(N))))
        file.flush()
        listening = socket.create_server(("127.0.0.1", 0), backlog=WORLD_SIZE)
        port = [listening.getsockname()[1]]
    dist.broadcast_object_list(port)
    server = socket.create_connection(("127.0.0.1", port[0]))
    if RANK == 0:
        for _ in range(WORLD_SIZE):
            node_1, _ = listening.accept()
            threading.Thread(target=serve, args=(node_1, file), daemon=True).start()
    return server


def files_crossed(file: RemoteFile, order: np.ndarray) -> float:
    """Read samples in this order; return how many files crossed."""
    before = file.received
    for index in order.tolist():
        file.sample(index)
    return (file.received - before) / FILE


# %% [markdown]
# Random orders, with room for all pages, with too little, and by the sample. With too little room
# chance decides, and the mean of 8 epochs has a standard deviation of less than 2%.


# %%
def check_random(server: socket.socket) -> None:
    """Claim how many files cross in random order."""
    file = RemoteFile(server, room=PAGES)
    crossed = files_crossed(file, random_order(1))
    claim("random, room for all, epoch 1: files", 1, crossed, question=1)
    claim("random, room for all, epoch 2: files", 0, files_crossed(file, random_order(2)))

    file = RemoteFile(server, ROOM)
    crossed = np.mean([files_crossed(file, random_order(epoch)) for epoch in range(8)])
    claim("random, room for 3, each epoch: files", 20, crossed, atol=2.5, question=2)

    file = RemoteFile(server, room=N, unit=SAMPLE)
    crossed = files_crossed(file, random_order(1))
    claim("random, by the sample, epoch 1: files", 1 / 2, crossed)
    crossed = files_crossed(file, random_order(2))
    claim("random, by the sample, epoch 2: files", 1 / 4, crossed, atol=0.05)


# %% [markdown]
# Orders that keep few pages open. A shard of four pages is one more than there is room for.


# %%
def check_few_pages(server: socket.socket) -> None:
    """Claim how many files cross in quasi-random order and in shards."""
    file = RemoteFile(server, ROOM)
    crossed = files_crossed(file, quasi_random(range(PAGES), 1)[1::2])
    claim("quasi-random over the file: files", 1, crossed)
    shard = range(PAGES // 2, PAGES)  # node 1's pages
    file = RemoteFile(server, ROOM)
    claim("shard, quasi-random: files", 1 / 2, files_crossed(file, quasi_random(shard, 1)))

    file = RemoteFile(server, ROOM)
    claim("shard, file order, epoch 1: files", 1 / 2, files_crossed(file, file_order(shard)))
    crossed = files_crossed(file, file_order(shard))
    claim("shard, file order, epoch 2: files", 1 / 2, crossed, question=3)

    with tempfile.TemporaryFile() as copy:
        file = CachedFile(server, ROOM, copy)
        claim("shard, own disk, epoch 1: files", 1 / 2, files_crossed(file, file_order(shard)))
        crossed = files_crossed(file, file_order(shard))
        claim("shard, own disk, epoch 2: files", 0, crossed, question=4)


def check_contents(server: socket.socket) -> None:
    """Claim that all samples are the right ones, from the server and from the own disk."""
    wrong = 0
    with tempfile.TemporaryFile() as copy:
        file = CachedFile(server, ROOM, copy)
        for index in [*random_order(1).tolist(), *random_order(2).tolist()]:
            wrong += file.sample(index) != contents(index)
    claim("samples that came with other contents", 0, wrong)


# %% [markdown]
# ## What you should have seen
#
# 1. One. A page of 64 samples holds none of node 1's with probability 2^-64, so all 8 pages cross,
#    although half of each is not used. After that node 1 has the file. A copy made before training
#    costs as much, and no step waits for it.
# 2. Twenty. A page is still there with probability 3/8, so 256 x 5/8 = 160 pages cross: forty times
#    what node 1 uses. If it asks for single samples, half a file crosses in any order; where it
#    keeps them, a quarter in the second epoch. The price is a request for each.
# 3. Half a file, again. Memory for three of four pages is worth nothing here: the next page is
#    always the one that was just dropped.
# 4. None. What memory has lost comes from node 1's own disk. Over the *whole* file even
#    quasi-random order brings twice as much as a shard, because both nodes open the same pages.
#
# **Try.** Without `epoch` every epoch has the same order, and "by the sample" needs nothing in the
# second: that claim alone fails, and it is better for the network and worse for training. With room
# for 4 pages random order brings 256 x 4/8 = 128 pages, 16 files, and a shard fits: its second
# epoch comes from memory. All others stay as they were.
#
# **When.** A copy for each node, if its disk is large enough; else shards, kept on the node's disk
# as they come; random order over a remote file never. In shards a node sees the same half in every
# epoch, so write the file in random order once: sorted by class, it would give each node classes of
# its own.
#
# **What a step waits for** follows from the bytes. A loader that reads ahead hides a network that
# is faster than the model; if it is slower, no depth of prefetching helps, and fewer bytes do. Many
# clients share a server: 8 GPUs that take 20,000 images of 110 kB per second need 2.2 GB/s, and a
# port of 10 Gbit/s brings 1.25. In random order that is forty times as much, and nothing helps.
#
# **On a real cluster**, none of which was measured here, memory is the node's page cache, one for
# all its ranks. *NFS* asks for at most 1,048,576 bytes at a time (nfs(5), `rsize`), and reads ahead
# 128 KiB or 15 x `rsize`, by distribution (Microsoft on Azure NetApp Files); `fsc` keeps what came
# on a local disk, unless it is read with O_DIRECT (Red Hat). *Lustre* spreads a file over many
# servers and reads ahead only after consecutive reads (its 1.6 manual). *S3* itself caches nothing
# on a client; AWS calls ranges of 8 or 16 MB typical. WebDataset deals out shards by `nodesplitter`
# and keeps them in `cache_dir`; in MosaicML's Streaming these are `num_canonical_nodes` and
# `local`. Two containers of one machine share a kernel and its page cache, so a test on them shows
# none of this traffic.


# %%
def main() -> None:
    command_line()
    launch()
    if int(os.environ.get("LOCAL_WORLD_SIZE", WORLD_SIZE)) != WORLD_SIZE:
        refuse(f"needs one machine, which plays both nodes, got {WORLD_SIZE} ranks on several")
    setup()
    with tempfile.TemporaryFile() as file:  # it has no name, so nothing is left
        server = connect_to_node_0(file)
        check_random(server)
        check_few_pages(server)
        check_contents(server)
        dist.barrier()  # rank 0 serves until all have asked
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
