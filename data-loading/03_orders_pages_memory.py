"""Traversal orders, pages and memory: what a shuffle costs a loader
=================================================================

**Question.** How many pages of a file does each traversal order keep in memory, or read from disk
again if memory is too small, and do the ranks of one machine share them?

**Predict**, and write it down before you run:

1. A file has 8 pages. A loader takes one sample after the other. How many pages are open at once,
   from a page's first sample to its last, in file order, in FFCV's quasi-random order, and in a
   random order?
2. No page of the file is in memory. Now all n ranks map it and read all of it. How many times does
   the disk deliver the file? How many copies of it does `top` (RES, or RSS) seem to show?
3. A loader with `os_cache=False` keeps pages in memory of its own, each from three batches before
   its first sample to its last. It reads the file in quasi-random order, one sample per batch. How
   many of the 8 pages does it hold at most?
4. Memory has room for 4 of the 8 pages, and for each of 130 samples its page is read whole. How
   many pages does the disk deliver in quasi-random order, and how many in random order?

**Run.**

    torchrun --standalone --nproc-per-node=4 03_orders_pages_memory.py   # one rank per GPU, or gloo
    python 03_orders_pages_memory.py                                     # the same

Not run on several GPUs. One node. FFCV needs the Debian packages of packages.txt, then `pip install
-e '.[ffcv]'`. Question 4 needs root and memory cgroups.

**Try.** In `shard` begin each share one sample later: which claims fail? In `check_shares` leave
out `indices=mine`: training would go on as before, so what tells you?

**Before.** data-loading/02_beton_file.py: pages, and what a loader's buffers are.

**Next.** data-loading/09_one_file_two_nodes.py: the same file, read by two nodes.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import logging
import math
import mmap
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import timedelta
from multiprocessing import shared_memory
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import torch
import torch.distributed as dist

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

Loader = None
if "RANK" in os.environ or WORLD_SIZE > 1:  # a launcher needs none of it
    os.environ["NUMBA_OPT"] = "0"  # compile quickly: nothing here is timed
    with contextlib.suppress(ImportError):  # the extra [ffcv]
        from ffcv import writer as ffcv_writer
        from ffcv.fields import IntField, RGBImageField, decoders
        from ffcv.loader import Loader, OrderOption
        from ffcv.transforms import ToTensor
        from ffcv.traversal_order import QuasiRandom, Random, Sequential
        from ffcv.writer import DatasetWriter

N = 130  # images, HEIGHT x WIDTH pixels of three bytes
HEIGHT = 160
WIDTH = 240
PAGE = 2**21  # bytes: 2 MiB, which 18 images share
ROOM = 4  # pages that memory has room for in section 4
SEED = 0
A_DISK = "a temporary folder on a disk: set TMPDIR"
SMALL = "pages from disk, if memory holds half of them"

# %% [markdown]
# ## 1. Sequential, quasi-random and random order
#
# Stochastic gradient descent wants samples in random order; a disk wants them in file order. A page
# is **open** from its first sample to its last, and while it is open it should be in memory. FFCV
# offers three orders. Each row below is a page, time runs to the right, and x is one sample:
#
#               SEQUENTIAL               QUASI_RANDOM             RANDOM
#     page 1    xxxx                     x xx         x           x      x    x   x
#     page 2        xxxx                       xx x xx              x x    x        x
#     page 3            xxxx              x  x    x                x    x      x   x
#     page 4                xxxx                 x  x   xx x         x    x     x    x
#     open      1 page at a time         a few                    all, nearly from the start
#
# QUASI_RANDOM shuffles the pages, opens some of them, and draws at random from these; when one is
# used up, the next is opened. (FFCV opens twice as many pages as a batch has samples; the paper
# says as many.) RANDOM costs nothing while the file fits into memory.


# %%
def open_at_once(batches: Iterable[Iterable[int]], ahead: int = 0) -> int:
    """Return the most pages open at once, if batch i takes samples from the pages batches[i].

    A page is opened `ahead` batches before its first sample, and closed after its last.
    """
    opened = {}
    closed = {}
    last = -1
    for last, pages in enumerate(batches):
        for page in pages:
            opened.setdefault(page, max(0, last - ahead))
            closed[page] = last
    counts = []
    for now in range(last + 1):
        counts.append(sum(opened[page] <= now <= closed[page] for page in opened))
    return max(counts)


# %% [markdown]
# ## 2. One page cache for all ranks
#
# With `os_cache=True`, the default, FFCV **maps** the file into its address space. The kernel reads
# a page from disk when somebody touches it, which is a **major fault**, and keeps it in its **page
# cache**, once per machine:
#
#     rank 0 ── map ──┐
#     rank 1 ── map ──┼──> the page cache: one copy of each page ──> disk
#     rank 2 ── map ──┘
#
# Three calls show what happens. `posix_fadvise` drops a file from the page cache, if nobody has
# it mapped; `mincore` says which of its bytes are there; and /proc/self/io says how many bytes the
# disk has delivered for this process. (The kernel's own pages have 4 KiB. Around a fault it reads
# more than one of them: 128 KiB, unless /sys/block/*/queue/read_ahead_kb says otherwise.)


# %%
libc = ctypes.CDLL(None, use_errno=True)


def drop(path: Path) -> None:
    """Write a file to its disk, and drop it from the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bytes_in_page_cache(path: Path) -> int:
    length = path.stat().st_size
    data = np.memmap(path, np.uint8, "r")  # mapped, and not touched
    present = np.zeros(math.ceil(length / mmap.PAGESIZE), np.uint8)  # a byte for each 4 KiB
    pointer = ctypes.c_void_p
    whole = [pointer(data.ctypes.data), ctypes.c_size_t(length), pointer(present.ctypes.data)]
    if libc.mincore(*whole) != 0:
        raise OSError(f"mincore: {os.strerror(ctypes.get_errno())}")
    return mmap.PAGESIZE * int((present & 1).sum())


def bytes_from_disk() -> int:
    return psutil.Process().io_counters().read_bytes


# %% [markdown]
# Tools mislead here. **RSS**, a process's resident set, counts each shared page in full, in every
# process; **PSS** divides it by the number of processes that share it, so that sums are true.


# %%
def mapped_bytes(path: Path, measure: str) -> int:
    """Return the bytes of `path` in this process's memory, by "Rss" or "Pss" (Linux, smaps)."""
    mappings = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    kib = 0
    for mapping in mappings:
        if str(path) in mapping.partition("\n")[0]:
            kib += int(re.search(rf"^{measure}: +(\d+) kB", mapping, re.M)[1])
    return 1024 * kib


# %% [markdown]
# ## 3. Quasi-random order on several ranks
#
# FFCV refuses QUASI_RANDOM together with `distributed=True`. What is missing is easily given: let
# each rank open the file as if it were alone, with a share of neighboring samples as `indices`:
#
#     samples   0 ........ 32 | 33 ........ 65 | 66 ........ 98 | 99 .. 129, 0, 1
#               rank 0          rank 1           rank 2           rank 3
#
# All ranks must take equally many steps, or the last all-reduce of an epoch hangs. Where n does not
# divide N, the last rank begins again at sample 0. There is a price: a share stays the same in
# every epoch, and only the order within it changes.
#
# For files larger than memory there is `os_cache=False`: a rank then reads whole pages into memory
# of its own, three batches ahead, and frees each after its last sample. Each is read once, and the
# order decides how many must be held.


# %%
def shard(rank: int, ranks: int, samples: int) -> np.ndarray:
    """Return equally many neighboring samples for each rank; the last ones begin again at 0."""
    each = math.ceil(samples / ranks)
    return np.arange(rank * each, (rank + 1) * each) % samples


# %% [markdown]
# ## 4. Memory that is smaller than the file
#
# If the page cache is too small, the kernel forgets what was not used for longest, and a page may
# be read again. How much that costs depends on the **unit** of a read. If each sample were read
# alone, random order would cost nothing: each byte is still used once per epoch. But few things
# read so. The unit is a page of FFCV's own cache, 1 MiB of NFS, a range on S3;
# a sample is a small part of it, and in random order the rest is forgotten before it is used.
#
# How often a page is read, the **least recently used** being forgotten, is simple to count:


# %%
def pages_read(order: Iterable[int], room: int) -> int:
    """Return how often a page is read, if `room` pages fit and the least recently used goes."""
    held = []  # the page that was used last stands at the end
    reads = 0
    for page in order:
        if page in held:
            held.remove(page)
        else:
            reads += 1
        held = [*held, page][-room:]
    return reads


# %% [markdown]
# To see it on a file of 16 MiB, memory must be made small. A **control group** (cgroup) does that;
# containers and Slurm jobs live in one. All that its processes allocate counts against its limit,
# and so does each page of a file that they are the first to read. Rank 0 moves into a group of its
# own, reads, and moves back.


# %%
@contextlib.contextmanager
def limited_memory(limit: int) -> Iterator[None]:
    """Charge what this process reads or allocates to a memory cgroup of `limit` bytes.

    Raises OSError where none can be made.
    """
    home, parent, name = own_group()
    if not (home / "cgroup.procs").exists():
        raise OSError(f"{home} is no memory cgroup")
    group = parent / f"lesson-{os.getpid()}"
    group.mkdir()
    remove = 'read _; for _ in 1 2 3 4 5 6 7 8 9; do rmdir "$0" 2>&- && break; sleep 0.1; done'
    sweep = {"stdin": subprocess.PIPE, "start_new_session": True}  # it outlives us, and Ctrl-C
    sweeper = subprocess.Popen(["sh", "-c", remove, str(group)], **sweep)
    try:
        (group / name).write_text(str(limit))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (home / "cgroup.procs").write_text(str(os.getpid()))
        sweeper.communicate()  # the end of its input: it removes the group


def own_group() -> tuple[Path, Path, str]:
    """Return this process's memory cgroup, where another can be made, and the limit's file."""
    groups = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, place = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(","), place)
    if "memory" in groups:  # version 1
        home = Path(f"/sys/fs/cgroup/memory{groups['memory']}")
        return home, home, "memory.limit_in_bytes"
    home = Path(f"/sys/fs/cgroup{groups['']}")  # version 2: no processes in inner groups
    return home, home if groups[""] == "/" else home.parent, "memory.max"


def read_whole_pages(path: Path, pages: Iterable[int]) -> float:
    """Read these pages one after the other; return how many the disk delivered."""
    buffer = mmap.mmap(-1, PAGE)  # new memory, so that it is charged
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # nothing ahead
        before = bytes_from_disk()
        for page in pages:
            os.preadv(file.fileno(), [buffer], PAGE * int(page))
        return (bytes_from_disk() - before) / PAGE


# %% [markdown]
# ## 5. The file and its loader
#
# As in data-loading/02_beton_file.py: crops of two photographs, raw pixels, and one thread per
# rank, since the ranks share the cores.


# %%
class Images:
    """(pixels, label, index) of each image, the same on every rank.

    The images are crops of the two photographs that scikit-learn ships, half of them upside down;
    the label says which photograph it is, and which way up.
    """

    def __init__(self, count: int, seed: int) -> None:
        from sklearn.datasets import load_sample_images

        self.photographs = load_sample_images().images  # two of 427 x 640 pixels
        self.count = count
        self.seed = seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[np.ndarray, int, int]:
        random = np.random.default_rng([self.seed, index])
        label = int(index) % 4
        y = random.integers(427 - 2 * HEIGHT)
        x = random.integers(640 - 2 * WIDTH)
        crop_HWC = self.photographs[label % 2][y:, x:][: 2 * HEIGHT : 2, : 2 * WIDTH : 2]
        if label >= 2:
            crop_HWC = crop_HWC[::-1]
        return np.ascontiguousarray(crop_HWC), label, int(index)


class Nameless(shared_memory.SharedMemory):
    """Shared memory that forked processes inherit, and that no kill leaves behind by its name."""

    def __init__(self, *given: object, **options: object) -> None:
        super().__init__(*given, **options)
        super().unlink()

    def unlink(self) -> None:
        """Nothing: its name went when it came."""


def write_beton(path: Path) -> None:
    """Write N images as raw pixels, with label and index, by FFCV's own writer."""
    multiprocessing.set_start_method("fork", force=True)  # FFCV's writers inherit what they need
    ffcv_writer.shared_memory = SimpleNamespace(SharedMemory=Nameless)
    fields = {"image": RGBImageField("raw"), "label": IntField(), "index": IntField()}
    writer = DatasetWriter(str(path), fields, page_size=PAGE, num_workers=1)
    writer.from_indexed_dataset(Images(N, SEED), chunksize=16)
    for process in multiprocessing.active_children():
        process.join()


def open_beton(path: Path, batch_size: int, order: str = "RANDOM", **options: object) -> "Loader":
    """Return FFCV's loader of whole images, labels and indices, with one thread per rank."""
    gc.collect()  # an old loader, freed while numba compiles, prints "Exception ignored: KeyError"
    pipelines = {
        "image": [decoders.SimpleRGBImageDecoder(), ToTensor()],
        "label": [decoders.IntDecoder(), ToTensor()],
        "index": [decoders.IntDecoder(), ToTensor()],
    }
    options = {"seed": SEED, "num_workers": 1, "drop_last": False} | options
    return Loader(str(path), batch_size, order=OrderOption[order], pipelines=pipelines, **options)


# %% [markdown]
# ## 6. How it is measured
#
# The page of a sample stands in the file's allocation table, which FFCV's reader holds. Orders are
# taken from FFCV itself, and pages are counted as if batches had one sample. The own cache is the
# array that FFCV has allocated. What a rank was delivered is counted, not what was planned: each
# sample carries its index.
#
# Before a count of what the disk delivers, an epoch is read and the file is dropped, so that
# compiling reads nothing more. That needs a file system on a disk: one in memory drops nothing.


# %%
def pages_of_samples(loader: "Loader") -> np.ndarray:
    """Return the page in which each sample lies."""
    table = loader.reader.alloc_table
    pages = np.zeros(N, int)
    pages[table["sample_id"]] = table["ptr"] // PAGE
    return pages


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


def check_orders(loader: "Loader", page_of: np.ndarray) -> None:
    pages = len(set(page_of))
    expected = {Sequential: ("=", 1), QuasiRandom: ("=", 2), Random: (">=", pages - 1)}
    for order, (sign, predicted) in expected.items():
        samples = samples_in(order, loader)
        measured = open_at_once([page] for page in page_of[samples])
        text = f"{order.__name__}: pages open at once, of {pages}"
        claim(text, predicted, measured, sign, question=1)


def samples_in(order: type, loader: "Loader") -> np.ndarray:
    """Return FFCV's order of the samples in epoch 0, as if batches had one sample."""
    batch_size = loader.batch_size
    loader.batch_size = 1
    samples = order(loader).sample_order(0)
    loader.batch_size = batch_size
    return samples


# %% [markdown]
# All ranks read the whole file through their maps: first with nothing in memory, then once more.


# %%
def read_all(loader: "Loader") -> dict[str, int]:
    """Read an epoch; return what all ranks together got from the disk, and their major faults."""
    before = [bytes_from_disk(), resource.getrusage(resource.RUSAGE_SELF).ru_majflt]
    for _ in loader:
        pass
    after = [bytes_from_disk(), resource.getrusage(resource.RUSAGE_SELF).ru_majflt]
    mine = np.subtract(after, before)
    disk, faults = np.sum(gather_objects(mine), axis=0)  # and so all ranks have read everything
    return {"from disk": int(disk), "major faults": int(faults)}


def empty_page_cache(loader: "Loader", path: Path) -> None:
    """Let every rank unmap the file, and rank 0 drop it from memory."""
    loader.memory_manager.context.mmap = None  # FFCV maps it again when it reads
    gc.collect()
    dist.barrier()
    if RANK == 0:
        drop(path)
    dist.barrier()


def check_page_cache(loader: "Loader", path: Path) -> bool:
    """Claim how often the disk delivers the file; return whether it can be dropped from memory."""
    read_all(loader)  # which compiles
    empty_page_cache(loader, path)
    left = bytes_in_page_cache(path)
    on_disk = from_rank_0(left < path.stat().st_size)
    if on_disk:
        claim("bytes of the file in memory after it was dropped", 0, left)
        first = read_all(loader)
        print0(f"{'':13}first epoch, all ranks: {first['major faults']} major faults")
        times = first["from disk"] / max(1, bytes_in_page_cache(path))
        claim("times that the disk delivers what is in memory", 1, times, atol=0.02, question=2)
    else:
        for text in ("times that the disk delivers what is in memory", SMALL):
            blocked(text, needs=A_DISK)
    again = read_all(loader)
    claim("major faults of all ranks in a second epoch", 0, again["major faults"], varies=True)
    read = N * HEIGHT * WIDTH * 3  # bytes, and a little more around them
    for measure, copies in (("Rss", WORLD_SIZE), ("Pss", 1)):
        held = sum(gather_objects(mapped_bytes(path, measure))) / read
        text = f"copies of the file in memory, by {measure.upper()}"
        claim(text, copies, held, atol=0.15 * copies, question=2)
    empty_page_cache(loader, path)
    return on_disk


# %% [markdown]
# Then rank 0 reads whole pages in memory that holds half of them. The limit has room for one page
# more, into which it reads, and half a MiB for what else the kernel charges to the group. The
# kernel forgets not quite the least recently used; that is what the slack is for.


# %%
def count_reads(path: Path, page_of: np.ndarray, orders: dict[str, np.ndarray]) -> dict | str:
    """Return the pages that the disk delivers for each order, or why memory has no limit."""
    counted = {}
    try:
        for name, samples in orders.items():
            drop(path)
            with limited_memory((ROOM + 1) * PAGE + 2**19):
                counted[name] = read_whole_pages(path, page_of[samples])
    except OSError as error:
        return str(error)
    drop(path)
    counted["without a limit"] = read_whole_pages(path, page_of[orders["Random"]])
    return counted


def check_small_memory(loader: "Loader", path: Path, page_of: np.ndarray) -> None:
    """Claim how many pages the disk delivers if memory holds half of the file, or all of it."""
    orders = {order.__name__: samples_in(order, loader) for order in (QuasiRandom, Random)}
    counted = from_rank_0(count_reads(path, page_of, orders) if RANK == 0 else None)
    if isinstance(counted, str):
        print0(f"{'':13}no limit: {counted}")
        blocked(SMALL, needs="root and a memory cgroup")
        return
    for name, samples in orders.items():
        expected = pages_read(page_of[samples], ROOM) if name == "Random" else 8
        text = f"{name}: pages from disk, room for {ROOM} of 8"
        claim(text, expected, counted[name], atol=0.2 * expected, question=4)
    claim("Random: pages from disk, room for all", 8, counted["without a limit"], atol=0.1)


# %% [markdown]
# The last checks are of FFCV's own cache, and of the shares of all ranks.


# %%
def check_refusal(path: Path) -> None:
    """FFCV itself: no quasi-random order over ranks."""
    refusal = "none"
    try:
        open_beton(path, 4, "QUASI_RANDOM", distributed=True)
    except NotImplementedError as error:
        refusal = str(error)
    print0(f"{'':13}with distributed=True FFCV says: {refusal}")
    claim("QUASI_RANDOM with distributed=True is refused", 1, "Not implemented" in refusal)


def check_own_cache(path: Path, page_of: np.ndarray) -> None:
    """Read the whole file with a cache of one's own; claim how many pages that holds."""
    epoch = iter(open_beton(path, 1, "QUASI_RANDOM", os_cache=False))
    held = epoch.memory_context.memory.nbytes / PAGE
    expected = open_at_once(([page] for page in page_of[epoch.order]), ahead=3)
    claim("pages in a cache of one's own, of 8", expected, held, question=3)
    for _ in epoch:
        pass  # to the end, where its threads stop


def check_shares(path: Path, page_of: np.ndarray) -> None:
    """Read one share per rank in quasi-random order; claim who got what, and what was read."""
    mine = shard(RANK, WORLD_SIZE, N)
    loader = open_beton(path, 4, "QUASI_RANDOM", indices=mine, os_cache=False)
    delivered = np.concatenate([index.numpy().flatten() for *_, index in loader])
    before = psutil.Process().io_counters().read_chars  # of this process, from disk or memory
    for _ in loader:
        pass
    asked = psutil.Process().io_counters().read_chars - before
    expected = len(set(page_of[mine]))
    claim("pages that a rank reads in an epoch", expected, asked / PAGE, atol=0.01)
    times = np.bincount(np.concatenate(gather_objects(delivered)), minlength=N)
    claim("samples that an epoch leaves out", 0, int((times == 0).sum()))
    claim("samples that come twice", -N % WORLD_SIZE, int((times - 1).sum()))


def check_shards() -> None:
    """Claim that `shard` covers 1 to 39 samples on 1 to 8 ranks, each as often as it should."""
    wrong = 0
    for samples in range(1, 40):
        for ranks in range(1, 9):
            shares = [shard(rank, ranks, samples) for rank in range(ranks)]
            times = np.bincount(np.concatenate(shares), minlength=samples)
            twice = int((times - 1).sum())
            wrong += len(times) != samples or times.min() == 0 or twice != -samples % ranks
    claim("cases, of 312, in which shares miss or add some", 0, wrong, kind="theory")


# %% [markdown]
# ## What you should have seen
#
# 1. One, two, and (nearly) all 8. Random order opens every page at the beginning and closes it at
#    the end; quasi-random order keeps twice the batch size open, here 2. With batches of 256 and
#    pages of 8 MiB that is 4 GiB at worst: small pages or small batches keep it in bounds.
# 2. Once, whatever n is: what one rank has touched the others find in the page cache, and in the
#    second epoch nobody waits for the disk. In memory there is one copy, as PSS shows. RSS shows n:
#    added up over the 8 ranks of a node it frightens people into copying data that is shared.
# 3. Three: the two that quasi-random order has open, and the next, which is read three batches
#    ahead. That is 6 MiB, however large the file. But nothing is shared: every rank of a machine
#    holds its own pages, and where two shares meet in a page both read it.
# 4. Eight, each once, and some 60, since about every second page is no longer there when a sample
#    of it comes. An ImageNet of JPEGs has about 80 samples in a page of 8 MiB: on a machine whose
#    memory holds half of it, random order would read 40 times the file. In a container the page
#    cache counts against the limit, so a job that is fast on a free machine may read everything
#    again and again under Kubernetes or Slurm. With `os_cache=False` each page is read once in any
#    order, and random order has to *hold* them all instead.
#
# **Try.** Shares that begin one sample late leave out sample 0 (and `check_shards` says in how many
# cases). Without `indices=mine` every rank reads the whole file: the pages that it reads and the
# samples that come twice give it away; a loss curve would not.
#
# On a thousand ranks with data on Lustre or S3, the choice is the same but dearer: pages of many
# MiB in quasi-random order, one share per *node*, so that its ranks share a page cache. Nodes do
# not: n of them draw a file from its server n times, in every epoch unless it fits their memory.


# %%
def main() -> None:
    command_line()
    launch()
    if int(os.environ.get("LOCAL_WORLD_SIZE", WORLD_SIZE)) != WORLD_SIZE:
        refuse(f"needs one node, whose ranks share a file, got {WORLD_SIZE} ranks on several")
    setup()
    check_shards()
    if Loader is None:
        for text in ("orders", "the page cache", "a rank's own cache"):
            blocked(text, needs="FFCV: make .venv/all")
        finish()
    errors = os.environ.get("TORCHELASTIC_ERROR_FILE")  # in the launcher's folder
    here = Path(errors).parent if errors else None
    with tempfile.TemporaryDirectory(prefix="beton-", dir=here) as folder:
        path = Path(from_rank_0(folder)) / "raw.beton"
        if RANK == 0:
            write_beton(path)
        dist.barrier()
        loader = open_beton(path, batch_size=8)
        page_of = pages_of_samples(loader)
        check_orders(loader, page_of)
        if check_page_cache(loader, path):
            check_small_memory(loader, path, page_of)
        check_refusal(path)
        check_own_cache(path, page_of)
        check_shares(path, page_of)
        dist.barrier()  # the folder goes when all have read it
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
