"""Traversal orders and pages: what a shuffle costs a loader
=========================================================

**Question.** A file is read in pages, and each page holds many samples. How much of the file must
memory hold for the order in which the samples are taken, and what does it cost if it cannot?

**Predict**, and write it down before you run. A file has 576 samples in 8 pages of 72. A page is
*open* from its first sample in an epoch to its last.

1. The order is random. How many of the 8 pages are open at once, at most?
2. The same order, but memory has room for 4 of the 8 pages. A sample whose page is not there has
   the whole page read; the page that was not used for longest goes. How many page reads does an
   epoch cost?
3. FFCV's quasi-random order takes samples from two pages at a time. FFCV keeps these pages in
   memory of its own, and reads a page three samples before its first one is due. How many pages
   does it hold at most?
4. n ranks share a random epoch as `DistributedSampler` deals it, and each keeps all pages that it
   has read. How many page reads does the epoch cost all ranks together?

**Run.**

    torchrun --standalone --nproc-per-node=4 03_orders_pages_memory.py   # one rank per GPU, or gloo
    python 03_orders_pages_memory.py                                     # the same

Not run on several GPUs. One node. FFCV needs the Debian packages of packages.txt, then `pip install
-e '.[ffcv]'`.

**Try.** Set `ROOM` to 2: which claim fails, although two pages are open at once? In `check_orders`
open the QUASI_RANDOM loader with batches of 4: which claims fail now?

**Before.** data-loading/02_beton_file.py: what lies in a page, and what a loader's buffers are.

**Next.** data-loading/17_page_cache.py: the pages that all ranks of a machine share.
"""

import argparse
import contextlib
import ctypes
import functools
import gc
import json
import logging
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import Counter
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
        from ffcv.writer import DatasetWriter

PAGE = 2**21  # bytes: 2 MiB, FFCV's smallest
PAGES = 8
PER_PAGE = 72  # samples
N = PAGES * PER_PAGE  # images, HEIGHT x WIDTH pixels of three bytes
HEIGHT = 80
WIDTH = 120
ROOM = 4  # pages that memory has room for
SEED = 0

# %% [markdown]
# ## 1. The order decides how many pages are open
#
# Stochastic gradient descent wants samples in random order. A disk, a file server or an object
# store wants to deliver large pieces, one after the other; here such a piece is a page. A page is
# **open** from its first sample in an epoch to its last. While it is open it should be in memory,
# since it will be needed again. FFCV offers three orders. In the picture four pages have four
# samples each, time runs to the right, and x is one sample:
#
#               SEQUENTIAL              QUASI_RANDOM            RANDOM
#     page 1    xxxx                     xx x x                   x    xx    x
#     page 2        xxxx                         x xx x         x    x    x x
#     page 3            xxxx            x  x x  x                  x  x    x  x
#     page 4                xxxx               x  x  x x         x  x    x     x
#     open      1 at a time             at most 2               all 4 for most of the time
#
# SEQUENTIAL needs one page in memory, and is no shuffle. RANDOM needs them all: the first sample of
# each page comes soon, and the last one late. QUASI_RANDOM is the compromise: it shuffles the
# pages, opens a few, and draws at random from these; when one is used up it opens the next. FFCV
# opens twice as many pages as a batch has samples, so two for batches of one.


# %%
def open_at_once(pages: np.ndarray) -> int:
    """Return the most pages open at once, if step t takes a sample from page `pages[t]`."""
    first = {}
    last = {}
    for step, page in enumerate(pages):
        first.setdefault(page, step)
        last[page] = step
    counts = []
    for now in range(len(pages)):
        counts.append(sum(first[page] <= now <= last[page] for page in first))
    return max(counts)


# %% [markdown]
# ## 2. Memory that is too small reads pages again
#
# If fewer pages fit into memory than are open, pages are dropped and read again. Something always
# decides which: the kernel's page cache, the client of a network file system, a cache in the
# loader. Most drop what was **least recently used** (LRU). In random order that is no help, because
# any page may come next. If room for r of p pages is full, the next sample's page is there with
# probability r/p, so an epoch of N samples costs about
#
#     page reads in random order  =  N (1 - r/p)          in quasi-random order  =  p
#
# This does not happen to a loader that reads each sample alone: each byte is then used once per
# epoch in any order. But much is read in larger units: 1 MiB in NFS, some MiB from S3, and 8 MiB
# by a loader that reads whole pages of a .beton file. A sample is a small part of these.


# %%
def page_reads(path: Path, pages: np.ndarray, room: int) -> float:
    """Read these pages of a file in turn, `room` of them kept; return how many were read."""
    before = psutil.Process().io_counters().read_chars  # from the disk or from the page cache
    with open(path, "rb") as file:

        @functools.lru_cache(maxsize=room)
        def data_of(page: int) -> bytes:
            return os.pread(file.fileno(), PAGE, page * PAGE)

        for page in pages.tolist():
            data_of(page)
    return (psutil.Process().io_counters().read_chars - before) / PAGE


# %% [markdown]
# ## 3. FFCV's own pages
#
# With `os_cache=False` FFCV reads whole pages into memory of its own. It knows the order of the
# whole epoch, so it needs no LRU: it reads each page once, three batches before its first sample,
# and frees it after its last. What the order decides now is how many pages must be *held*:
#
#     page 3    xxxxxxxxxx                 x: open, from its first sample to its last
#     page 1    xxxxxx                     r: read ahead
#     page 4       rrrxxxxxxxxxx
#     page 2           rrrxxxxxxxxxx
#     held      22233323332222221111
#
# The array of pages is allocated when an epoch begins, with as many pages as will ever be held.


# %%
def epoch_in_own_memory(loader: "Loader") -> tuple[float, float]:
    """Read an epoch with `os_cache=False`; return how many pages are held at most, and read."""
    before = psutil.Process().io_counters().read_chars
    epoch = iter(loader)
    held = epoch.memory_context.memory.nbytes / PAGE
    for _ in epoch:
        pass
    return held, (psutil.Process().io_counters().read_chars - before) / PAGE


# %% [markdown]
# ## 4. Ranks that share an epoch
#
# `DistributedSampler` deals out a random order, so each rank has samples on every page: each reads
# the whole file to use an n-th of it. Give each rank neighbors instead:
#
#     pages     |   1   |   2   |   3   |   4   |   5   |   6   |   7   |   8   |
#     ranks     |    rank 0     |    rank 1     |    rank 2     |    rank 3     |
#
# Within its share a rank may take any order that keeps few pages open. FFCV refuses QUASI_RANDOM
# with `distributed=True`; a loader with `indices=neighbors(RANK, WORLD_SIZE)`, which knows nothing
# of other ranks, does the same. The price is that a share stays the same in every epoch.


# %%
def neighbors(rank: int, ranks: int) -> np.ndarray:
    """Return this rank's share: as many neighboring samples as every other rank has."""
    each = N // ranks  # else ranks would take unequally many steps, and the last all-reduce hang
    return np.arange(rank * each, (rank + 1) * each)


# %% [markdown]
# ## 5. How it is measured
#
# FFCV writes the file and says in which order it takes the samples. Each rank shuffles by a seed of
# its own, so a row of sections 1 and 2 holds for n orders, and shows the one that is furthest off.
# Pages are counted by the bytes that the kernel has handed to this process. Reads in random order
# vary by 4% from epoch to epoch, and are some more than the formula says, as memory is empty first.
#
# The images are crops of two photographs. `Nameless` keeps FFCV's writer from leaving a file in
# /dev/shm when it is killed.


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


# %% [markdown]
# The page of each sample stands in the file's allocation table. Page 0 of the file is its header.


# %%
def pages_in_order(loader: "Loader") -> np.ndarray:
    """Return the page of each sample, in the order in which the loader's next epoch takes them."""
    table = loader.reader.alloc_table
    page_of = np.zeros(N, int)
    page_of[table["sample_id"]] = table["ptr"] // PAGE
    return page_of[loader.next_traversal_order()]


def check_orders(path: Path) -> None:
    """Claim how many pages each order opens at once, and has read if memory is too small."""
    sequential = pages_in_order(open_beton(path, 1, "SEQUENTIAL", seed=RANK))
    quasi_random = pages_in_order(open_beton(path, 1, "QUASI_RANDOM", seed=RANK))
    random = pages_in_order(open_beton(path, 1, "RANDOM", seed=RANK))
    claim("SEQUENTIAL: pages open at once", 1, open_at_once(sequential))
    claim("QUASI_RANDOM: pages open at once", 2, open_at_once(quasi_random))
    claim("RANDOM: pages open at once", PAGES, open_at_once(random), question=1)

    reads = page_reads(path, quasi_random, ROOM)
    claim("QUASI_RANDOM: page reads, too little room", PAGES, reads, atol=0.01)
    reads = page_reads(path, random, PAGES)
    claim("RANDOM: page reads, room for all", PAGES, reads, atol=0.01)
    reads = page_reads(path, random, ROOM)
    expected = N * (1 - ROOM / PAGES)
    text = "RANDOM: page reads, too little room"
    claim(text, expected, reads, atol=0.15 * expected, question=2)


def check_own_memory(path: Path) -> None:
    """Claim how many pages FFCV's own cache holds, and reads."""
    loader = open_beton(path, 1, "QUASI_RANDOM", os_cache=False)
    epoch_in_own_memory(loader)  # which compiles
    held, read = epoch_in_own_memory(loader)
    claim("QUASI_RANDOM, own memory: pages held", 3, held, question=3)
    claim("QUASI_RANDOM, own memory: pages read", PAGES, read, atol=0.01)


def check_ranks(path: Path) -> None:
    """Claim how many pages all ranks together read for one epoch, with room for all pages."""
    dealt = pages_in_order(open_beton(path, 1, "RANDOM", distributed=True))
    reads = sum(gather_objects(page_reads(path, dealt, PAGES)))
    claim("random shares: page reads of all ranks", WORLD_SIZE * PAGES, reads, atol=0.1, question=4)

    mine = neighbors(RANK, WORLD_SIZE)
    own = pages_in_order(open_beton(path, 1, "QUASI_RANDOM", indices=mine))
    reads = sum(gather_objects(page_reads(path, own, PAGES)))
    borders = [rank * (N // WORLD_SIZE) for rank in range(1, WORLD_SIZE)]
    within_a_page = sum(border % PER_PAGE != 0 for border in borders)  # two ranks read that page
    claim("neighbors: page reads of all ranks", PAGES + within_a_page, reads, atol=0.1)
    taken = np.unique(np.concatenate(gather_objects(mine)))
    claim("neighbors: samples left out", N % WORLD_SIZE, N - len(taken))


# %% [markdown]
# ## What you should have seen
#
# 1. All 8. With 72 samples in a page, each page has one among the first few dozens, and one among
#    the last. Sequential order has one page open, quasi-random order two.
# 2. About 288: 576 x 4/8. Every second sample finds its page gone, and each page is read some 36
#    times for its 72 samples. In quasi-random order the same memory reads each of the 8 pages once.
# 3. Three: the two that are open, and the next one, which is read ahead. That is 6 MiB, however
#    large the file is. (In rare epochs it is four, if two pages end within three samples.)
# 4. 8 n, so 32 for four ranks: every page is read by every rank. Shares of neighbors cost 8, plus
#    one for each border between ranks that lies inside a page (two of them on three ranks).
#
# **Try.** With ROOM = 2 the reads in quasi-random order are more than 8. When a page is used up and
# the next is opened, the page used least recently is often the one that is still open, and it has
# to be read again. LRU does not know which page is done; FFCV's own schedule does. With batches of
# 4 FFCV opens 2 x 4 pages, so all: its pages open and its reads fail, and the reads are nearly as
# many as in random order. So count pages, not only samples: batches of 256 open up to 512 pages, of
# 8 MiB each by default, which is 4 GiB per rank. Small pages or small batches avoid that.
#
# **When.** As long as the file fits into the memory of a node, RANDOM costs nothing, and the page
# cache holds it for all ranks (the next lesson). If it does not fit, QUASI_RANDOM with
# `os_cache=False`, and neighbors for each rank. What lies together in the file then stays together
# in the order, so write the file in random order once: sorted by class, it would be no shuffle.
#
# **Where it bites.** An ImageNet of JPEGs has about 80 samples in 8 MiB. Read in units of that size
# and kept for as long as half of the file has room, random order would read 40 times the file. From
# a local disk a sample is read alone, in pages of 4 KiB, and about half are read again. In a
# container the page
# cache counts against the container's limit, so a job that is fast on a free machine may read
# everything again and again under Kubernetes or Slurm. (Neither was measured here.)
#
# **On GPUs** nothing differs: pages lie in the memory of the host. With a thousand ranks the server
# that holds the file feels the reads of all of them: data-loading/09_one_file_two_nodes.py.


# %%
def main() -> None:
    command_line()
    launch()
    if int(os.environ.get("LOCAL_WORLD_SIZE", WORLD_SIZE)) != WORLD_SIZE:
        refuse(f"needs one node, whose ranks share a file, got {WORLD_SIZE} ranks on several")
    setup()
    if Loader is None:
        for text in ("orders", "FFCV's own pages", "ranks that share an epoch"):
            blocked(text, needs="FFCV: make .venv/all")
        finish()
    errors = os.environ.get("TORCHELASTIC_ERROR_FILE")  # in the launcher's folder
    here = Path(errors).parent if errors else None
    with tempfile.TemporaryDirectory(prefix="beton-", dir=here) as folder:
        path = Path(from_rank_0(folder)) / "raw.beton"
        if RANK == 0:
            write_beton(path)
        dist.barrier()
        check_orders(path)
        check_own_memory(path)
        check_ranks(path)
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
