"""Traversal orders and pages: what a shuffle costs a loader
=========================================================

**Question.** A loader reads a file in pages, and each page holds many samples. How many pages must
it keep for the order in which it takes the samples, and what does it cost to keep fewer?

**Predict**, and write it down before you run. A file has 5,760 samples in 8 pages of 720. A sample
whose page is not kept has the whole page read. When there is no room, the page that was used least
recently goes.

1. The order is random, and there is room for 7 of the 8 pages. How many page reads does an epoch
   cost, to within a tenth?
2. Now samples are drawn at random from two pages at a time; when one is used up, the next one
   opens. For how many pages must there be room if an epoch is to read each page once?
3. Each page holds one of 8 classes. How many classes has a batch of 32 samples in that order?
4. How many, if the same samples were shuffled once, before the file was written?

**Run.**

    torchrun --standalone --nproc-per-node=4 03_orders_pages_memory.py   # one rank per GPU, or gloo
    python 03_orders_pages_memory.py                                     # the same

Linux only: the kernel counts what is read. Not run on several GPUs, where nothing differs.

**Try.** In `quasi_random` let three pages be open at a time, `len(left) < 3`: which claims fail? In
`PageReader.sample` write `get(page)` for `pop(page, None)`, so that the page that was read first is
the one that goes: which claims fail now?

**Before.** data-loading/02_beton_file.py: what lies in a page, and what a loader's buffers are.

**Next.** data-loading/17_page_cache.py: the pages that all ranks of a machine share.
"""

import argparse
import ctypes
import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import BinaryIO

import numpy as np
import psutil
import torch
import torch.distributed as dist

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

PAGES = 8
PER_PAGE = 720  # samples
N = PAGES * PER_PAGE
SAMPLE = 32  # bytes
PAGE = PER_PAGE * SAMPLE
BATCH = 32
EPOCHS = 8  # over which reads are averaged
SEED = 0

# %% [markdown]
# ## 1. A loader that reads pages
#
# Take 1.28 million JPEGs of 110 kB, in one file of 141 GB in an object store. A request there takes
# as long as some megabytes, so a client fetches blocks of 5 MiB, which hold 47 images each. Over
# 10 Gbit/s an epoch
#
#     in file order                              brings     141 GB, in  2 minutes
#     in random order, if memory keeps 7/8       brings     839 GB, in 11 minutes
#     in random order, if memory keeps 1/2       brings   3,355 GB, in 45 minutes
#
# This lesson makes such a table on a small file, and cures it. A **page** here is what is read at
# once. The loader keeps the pages that it used last, since the next sample may lie in one of them:


# %%
class PageReader:
    """Reads samples of a file by whole pages, and keeps the `room` pages that it used last."""

    def __init__(self, file: BinaryIO, room: int) -> None:
        self.file = file
        self.room = room
        self.kept: dict[int, bytes] = {}  # the page used last stands at the end

    def sample(self, index: int) -> bytes:
        page, place = divmod(index, PER_PAGE)
        data = self.kept.pop(page, None)
        if data is None:
            data = os.pread(self.file.fileno(), PAGE, page * PAGE)
        self.kept[page] = data
        if len(self.kept) > self.room:
            del self.kept[next(iter(self.kept))]  # the least recently used
        return data[place * SAMPLE : (place + 1) * SAMPLE]


# %% [markdown]
# The rule of the last `if` is called **LRU**, least recently used. Clients of that kind are many:
# `blockcache` in fsspec keeps 32 blocks of 5 MiB unless told otherwise, and a file system over the
# network delivers up to 1 MiB at a time. Linux itself is one for a file that is mapped from a local
# disk, with pages of 128 KiB, what it reads around the place that was touched. If memory holds the
# whole file, none of this matters. If it does not, images of 110 kB lose little there, since a page
# holds hardly more than one. Tokens in windows of 2 kB lose much (data-loading/18).

# %% [markdown]
# ## 2. The order decides how many pages are open
#
# A page is **open** from its first sample in an epoch to its last. In the picture four pages have
# four samples each, time runs to the right, and x is one sample:
#
#               in file order           quasi-random            random
#     page 1    xxxx                     xx x x                   x    xx    x
#     page 2        xxxx                         x xx x         x    x    x x
#     page 3            xxxx            x  x x  x                  x  x    x  x
#     page 4                xxxx               x  x  x x         x  x    x     x
#     open      1 at a time             at most 2               all 4 for most of the time
#
# File order has one page open, and is no shuffle. Random order has all of them open: the first
# sample of each page comes soon, and the last one late. **Quasi-random** order is the compromise.
# It shuffles the pages, opens a few, and draws at random from these; when one is used up it opens
# the next.


# %%
def file_order(epoch: int) -> np.ndarray:
    return np.arange(N)


def random(epoch: int) -> np.ndarray:
    return np.random.default_rng([SEED, RANK, epoch]).permutation(N)


def quasi_random(epoch: int) -> np.ndarray:
    """Draw from two pages at a time."""
    generator = np.random.default_rng([SEED, RANK, epoch])
    closed = generator.permutation(PAGES).tolist()
    left = {}  # of each open page: the samples that have not been taken
    order = []
    while closed or left:
        while closed and len(left) < 2:
            page = closed.pop()
            left[page] = (page * PER_PAGE + generator.permutation(PER_PAGE)).tolist()
        page = list(left)[generator.integers(len(left))]
        order.append(left[page].pop())
        if not left[page]:
            del left[page]
    return np.array(order)


# %% [markdown]
# What does it cost to keep fewer pages than are open? In random order any page may come next. With
# room for r of p pages, the next sample's page is there with probability r/p, whatever the rule
# that drops pages, unless it knows what comes. So an epoch of N samples costs
#
#     page reads in random order  =  N (1 - r/p)
#
# Even one page too few is much: 1 sample in p has a whole page read.

# %% [markdown]
# ## 3. What quasi-random order gives up
#
# It mixes the samples of the pages that are open, and no others. What lies together in the file
# comes together in the epoch, too. A file that was written class by class shows it at once: count
# the classes in each batch.


# %%
def classes_per_batch(class_of: np.ndarray, order: np.ndarray) -> float:
    """Return the median number of classes in a batch, if sample i is of class `class_of[i]`."""
    batches = class_of[order].reshape(-1, BATCH)
    return float(np.median([len(set(batch)) for batch in batches.tolist()]))


# %% [markdown]
# ## 4. How it is measured
#
# Each rank has a file of its own, and shuffles by a seed of its own, so a row holds for n loaders
# and shows the one that is furthest off. Page reads are the bytes that the kernel has handed to
# this process, by /proc/self/io, divided by the size of a page: the mean of 8 epochs, each of
# which begins with nothing kept. Every sample holds its own number, so a sample from a wrong place
# is noticed.


# %%
def open_at_once(order: np.ndarray) -> int:
    """Return the most pages open at once, if step t takes the sample `order[t]`."""
    pages = order // PER_PAGE
    spans = []
    for page in np.unique(pages):
        steps = np.flatnonzero(pages == page)
        spans.append((steps[0], steps[-1]))
    counts = []
    for now in range(len(order)):
        counts.append(sum(first <= now <= last for first, last in spans))
    return max(counts)


def contents(index: int) -> bytes:
    return np.full(SAMPLE // 8, index, np.int64).tobytes()


def page_reads(file: BinaryIO, order_of: Callable, room: int) -> float:
    """Read some epochs by pages, `room` of which are kept; return the page reads per epoch."""
    before = psutil.Process().io_counters().read_chars
    for epoch in range(EPOCHS):
        reader = PageReader(file, room)
        for index in order_of(epoch).tolist():
            reader.sample(index)
    return (psutil.Process().io_counters().read_chars - before) / PAGE / EPOCHS


def least_room(file: BinaryIO, order_of: Callable) -> int:
    """Return the smallest room with which an epoch reads each page once."""
    for room in range(1, PAGES + 1):
        if page_reads(file, order_of, room) < PAGES + 0.05:
            return room
    return PAGES + 1  # none


# %% [markdown]
# In random order the reads of an epoch have a standard deviation of 25 (room for 7) or 38 (room for
# 4), and the mean of 8 epochs a third of that. On average they are up to 1% more than the formula
# says, since nothing is kept at first.


# %%
def check_open() -> None:
    """Claim how many pages each order opens at once."""
    claim("in file order: pages open at once", 1, open_at_once(file_order(0)))
    claim("quasi-random: pages open at once", 2, open_at_once(quasi_random(0)))
    claim("random: pages open at once", PAGES, open_at_once(random(0)))


def check_reads(file: BinaryIO) -> None:
    """Claim how many page reads an epoch costs, by order and room."""
    reads = page_reads(file, file_order, 1)
    claim("in file order, room for 1: page reads", PAGES, reads, atol=0.05)
    reads = page_reads(file, random, 8)
    claim("random, room for 8: page reads", PAGES, reads, atol=0.05)
    reads = page_reads(file, random, 7)
    expected = N * (1 - 7 / PAGES)
    claim("random, room for 7: page reads", expected, reads, atol=0.1 * expected, question=1)
    reads = page_reads(file, random, 4)
    expected = N * (1 - 4 / PAGES)
    claim("random, room for 4: page reads", expected, reads, atol=0.02 * expected)
    room = least_room(file, quasi_random)
    claim("quasi-random: room that reads each page once", 3, room, question=2)
    reads = page_reads(file, quasi_random, 2)
    claim("quasi-random, room for 2: page reads", PAGES + 6 / 2, reads, atol=1.5)

    reader = PageReader(file, 4)
    wrong = sum(reader.sample(index) != contents(index) for index in random(0).tolist())
    claim("samples that came with other contents", 0, wrong)


def check_mixing() -> None:
    """Claim how many classes a batch has, by the order in the file and the order of the epoch."""
    by_class = np.arange(N) // PER_PAGE
    shuffled = np.random.default_rng(SEED).permutation(by_class)
    count = classes_per_batch(by_class, random(0))
    claim("written by class, random: classes per batch", 8, count)
    count = classes_per_batch(by_class, quasi_random(0))
    claim("written by class, quasi-random: classes per batch", 2, count, question=3)
    count = classes_per_batch(shuffled, quasi_random(0))
    claim("written shuffled, quasi-random: classes per batch", 8, count, question=4)


# %% [markdown]
# ## What you should have seen
#
# 1. About 720: 5,760 x 1/8. Each page is read 90 times, because one page of eight does not fit.
#    With room for 4 it is every second sample, and each page is read 360 times.
# 2. Three, one more than are open. LRU does not know which page is done. When a page's last sample
#    is followed at once by the first one of the next page, the page used least recently is the one
#    that is still open. With room for 2 it goes, and has to be read again. This happens in half of
#    the 6 times that a page follows another: 8 + 6/2, about 11 reads.
# 3. Two, those of the open pages. This is no shuffle of a sorted file.
# 4. All 8. Whatever two pages are open, their samples are of all classes. So shuffle once, when you
#    write, and quasi-random order is enough in each epoch.
#
# **Try.** With three open pages the row of pages open says 3, and room for 4 is needed. With room
# for 2 some 1,500 pages are read, since about every third sample finds its page gone; and a batch
# has three classes. So four rows fail. With the other rule, called FIFO, none does. In random order
# all rules that do not know what comes are equally bad, and in quasi-random order the pages that
# were read first are done first. The order matters, and not the rule.
#
# **A loader that knows the order** does better than both. It has drawn the order of the whole epoch
# beforehand, so it knows when a page comes, and when it is done. FFCV with `os_cache=False` reads
# each page once, three batches before its first sample, and frees it after its last. It holds what
# is open and what is read ahead, and so in random order the whole file. Its QUASI_RANDOM opens
# twice as many pages as a batch has samples. With batches of 256 that is up to 512 pages, of 8 MiB
# each by default: 4 GiB per rank. It refuses `distributed=True`. Give each rank a loader with its
# own `indices`, neighbors in the file, and as many as every other rank has.
#
# **When.** As long as the file fits into the memory of a node, random order costs nothing, and the
# page cache holds it for all ranks (the next lesson). If it does not fit and is read in pages, take
# quasi-random order, room for a page more than are open, and a file that was written shuffled.
#
# **Where it bites.** In the table of section 1 a block is read 6 times per epoch if 7 of 8 are
# kept, and 24 times if half of them are. The symptom is a loader that is fast as long as a dataset
# is small, and slower by far more than the dataset has grown.
#
# **On GPUs** nothing differs: pages lie in the memory of the host. With a thousand ranks the server
# that holds the file feels the reads of all of them: data-loading/09_one_file_two_nodes.py.


# %%
def main() -> None:
    command_line()
    launch()
    setup()
    with tempfile.TemporaryFile() as file:  # it has no name, so nothing is left
        file.write(b"".join(map(contents, range(N))))
        file.flush()
        check_open()
        check_reads(file)
    check_mixing()
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
