"""Traversal orders and pages: what a shuffle costs a loader
=========================================================

**Question.** A loader reads a file in pages, and each page holds many samples. How many pages must
it keep for the order in which it takes the samples, and what does it cost to keep fewer?

**Predict**, and write it down before you run. A file has 5,760 samples in 8 pages of 720. A sample
whose page is not kept has the whole page read. When there is no room, the page goes that was not
used for longest.

1. The order is random, and there is room for 7 of the 8 pages. How many page reads does an epoch
   cost, to within a tenth?
2. Now samples are drawn at random from two pages at a time; when one is used up, the next one
   opens. There is room for 3 pages. How many page reads does an epoch cost?
3. The same order with room for 2. How many page reads does an epoch cost, on average?
4. FFCV's quasi-random order draws from twice as many pages at a time as a batch has samples. How
   many of the 8 pages does it hold for batches of 4?

**Run.**

    torchrun --standalone --nproc-per-node=4 03_orders_pages_memory.py   # one rank per GPU, or gloo
    python 03_orders_pages_memory.py                                     # the same

Not run on several GPUs, where nothing differs. Question 4 needs FFCV: the Debian packages of
packages.txt, then `pip install -e '.[ffcv]'`; without it that part is BLOCKED.

**Try.** In `quasi_random` let three pages be open at a time, `len(left) < 3`: which claims fail?
Set `PER_PAGE` to 72: which claims fail, and what do the others count?

**Before.** data-loading/02_beton_file.py: what lies in a page, and what a loader's buffers are.

**Next.** data-loading/17_page_cache.py: the pages that all ranks of a machine share.
"""

import argparse
import contextlib
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
from types import SimpleNamespace
from typing import BinaryIO

import numpy as np
import psutil
import torch
import torch.distributed as dist

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

QuasiRandom = None
if "RANK" in os.environ or WORLD_SIZE > 1:  # a launcher needs none of it
    os.environ["NUMBA_OPT"] = "0"  # compile quickly: nothing here is timed
    with contextlib.suppress(ImportError):  # the extra [ffcv]
        from ffcv.memory_managers.process_cache.schedule import compute_schedule
        from ffcv.traversal_order.quasi_random import QuasiRandom

PAGES = 8
PER_PAGE = 720  # samples
N = PAGES * PER_PAGE
SAMPLE = 32  # bytes
PAGE = PER_PAGE * SAMPLE
EPOCHS = 8  # over which reads are averaged
SEED = 0

# %% [markdown]
# ## 1. A loader that reads pages
#
# Stochastic gradient descent wants samples in random order. A file server or an object store wants
# to deliver large pieces: NFS reads up to 1 MiB at a time, a request to S3 pays off from some MiB
# on, and FFCV, if it manages memory itself (`os_cache=False`), reads pages of 8 MiB. A sample is a
# small part of such a **page**. This loader keeps the pages that it used last, since the next
# sample may lie in one of them:


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
# The rule of the last `if` is called **LRU**, least recently used. The client of a network file
# system has such a rule, and so have caches in front of an object store.
#
# None of this concerns a loader that reads each image alone, as one does that maps a file on a
# local disk (FFCV's default): the kernel reads its own pages of 4 KiB, and up to 128 KiB around
# them. Then an epoch costs the file once or twice, in any order.

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
# ## 3. A loader that knows the order
#
# LRU looks back. But the loader has drawn the order of the whole epoch beforehand, and so it knows
# when a page comes and when it is done. FFCV with `os_cache=False` makes a schedule of that: it
# reads each page once, three batches before its first sample, and frees it after its last. With two
# pages open, and batches of one sample:
#
#     page 3    xxxxxxxxxx                 x: open, from its first sample to its last
#     page 1    xxxxxx                     r: read ahead
#     page 4       rrrxxxxxxxxxx
#     page 2           rrrxxxxxxxxxx
#     held      22233323332222221111
#
# So it *holds* what is open, and what is read ahead. These are FFCV's own functions; they ask for
# no file, only for the samples of each page.


# %%
def ffcv_quasi_random(batch: int) -> np.ndarray:
    """Return the samples in FFCV's QUASI_RANDOM order for batches of this size."""
    samples_of = {}
    for page in range(PAGES):
        samples_of[np.uint64(page)] = range(page * PER_PAGE, (page + 1) * PER_PAGE)
    file = SimpleNamespace(page_to_samples=samples_of)
    options = {"batch_size": batch, "seed": RANK, "distributed": False, "indices": np.arange(N)}
    return QuasiRandom(SimpleNamespace(memory_manager=file, **options)).sample_order(0)


def pages_held(samples: np.ndarray, batch: int) -> int:
    """Return for how many pages FFCV allocates memory, if batches take samples in this order."""
    batches = np.split(samples // PER_PAGE, range(batch, N, batch))
    return compute_schedule([set(pages.tolist()) for pages in batches]).num_slots


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


# %% [markdown]
# In random order the reads of one epoch vary by 1% to 3%, and their mean by a third of that. On
# average they are up to 1% more than the formula says, since nothing is kept at first.


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
    claim("random, room for 7: page reads", 720, reads, atol=72, question=1)
    reads = page_reads(file, random, 4)
    claim("random, room for 4: page reads", 2880, reads, atol=60)
    reads = page_reads(file, quasi_random, 3)
    claim("quasi-random, room for 3: page reads", PAGES, reads, atol=0.05, question=2)
    reads = page_reads(file, quasi_random, 2)
    claim("quasi-random, room for 2: page reads", 8 + 6 / 2, reads, atol=1.5, question=3)

    reader = PageReader(file, 4)
    wrong = sum(reader.sample(index) != contents(index) for index in random(0).tolist())
    claim("samples that came with other contents", 0, wrong)


def check_ffcv() -> None:
    """Claim for how many pages FFCV allocates memory, by order."""
    if QuasiRandom is None:
        blocked("pages that FFCV holds", needs="FFCV: make .venv/all")
        return
    claim("FFCV, in file order: pages held", 2, pages_held(file_order(0), 1))
    held = pages_held(ffcv_quasi_random(1), 1)
    claim("FFCV, quasi-random, batches of 1: pages held", 4, held, "<=")
    held = pages_held(ffcv_quasi_random(4), 4)
    claim("FFCV, quasi-random, batches of 4: pages held", 8, held, question=4)


# %% [markdown]
# ## What you should have seen
#
# 1. About 720: 5,760 x 1/8. Each page is read 90 times, because one page of eight does not fit.
#    With room for 4 it is every second sample, and each page is read 360 times.
# 2. Eight: each page once. Two pages are open, and the third place holds one that is done.
# 3. About 11. Six times a page is used up and another one opens. In half of these cases the new
#    page's first sample comes directly after the old page's last one; then the page used least
#    recently is the one that is still open, and it has to be read again: 8 + 6/2. LRU does not know
#    which page is done, so it needs room for one page more than are open.
# 4. All 8, since it draws from 2 x 4 pages. With batches of 1 it draws from two, and holds three;
#    four, if both pages end at nearly the same time, so that two are read ahead. So count pages,
#    not only samples: batches of 256 open up to 512 pages, of 8 MiB each by default, which is 4 GiB
#    per rank. Small pages or small batches avoid that.
#
# **Try.** With three open pages the row of pages open says 3. Room for 3 is no longer one more than
# are open, so some 12 pages are read, and with room for 2 some 1,500, since about every third
# sample finds its page gone: both rows of quasi-random reads fail as well. With 72 samples per page
# only the two rows of random reads with too little room fail. They show about a tenth, some 78 and
# 291, since there is a tenth of the samples; all other rows count pages. What makes random order so
# dear is many samples per page.
#
# **When.** As long as the file fits into the memory of a node, random order costs nothing, and the
# page cache holds it for all ranks (the next lesson). If it does not fit and is read in pages,
# quasi-random order, with room for a page more than are open, or FFCV's with `os_cache=False`. What
# lies together in the file then stays together in the order, so write the file in random order
# once: sorted by class, it would be no shuffle.
#
# **Where it bites.** Of JPEGs of 110 kB 8 MiB hold some 76. If they are read in units of that size,
# in random order, and half of the units are kept, each unit is read 38 times per epoch. The
# symptom is a loader that is fast as long as a dataset is small, and slower by far more than the
# dataset has grown. FFCV refuses QUASI_RANDOM with `distributed=True`; give each rank a loader with
# its own `indices`, neighbors in the file, and as many as every other rank has.
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
    check_ffcv()
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
