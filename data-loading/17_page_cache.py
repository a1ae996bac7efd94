"""The page cache: one copy of a file for all ranks of a machine
=============================================================

**Question.** n ranks of one machine read the same file. How often does the disk deliver it, how
many copies of it lie in memory, and which tool tells the truth about that?

**Predict**, and write it down before you run. No byte of the file is in memory at first.

1. All n ranks map the file (`np.memmap`) and read all of it. How many times does the disk deliver
   it, all ranks together?
2. `top` shows each process's resident memory (RES, or RSS). How many copies of the file do you get
   if you add up what it shows for the n ranks?
3. Now all ranks have unmapped the file. How many copies of it are left in memory?
4. Each rank reads the file into an array of its own (`np.fromfile`), and keeps it. How many copies
   do these arrays add?
5. Memory has room for half of the file, and a rank reads all of it in order, twice. How many times
   does the disk deliver it in the second epoch?

**Run.**

    torchrun --standalone --nproc-per-node=4 17_page_cache.py    # one rank per GPU, or gloo
    python 17_page_cache.py                                      # the same, started for you

Not run on several GPUs, where nothing differs: all of it happens in the memory of the host. One
node, Linux, and a temporary folder on a disk. Question 5 needs root and a memory cgroup.

**Try.** In `check_map` let `data` be `np.fromfile(path, np.uint8)`: which claims fail? In the same
place leave out `del data`: which claim fails now, and what does the page cache say?

**Before.** data-loading/03_orders_pages_memory.py: which pages an order needs in memory.

**Next.** data-loading/09_one_file_two_nodes.py: the same file, read by two nodes.
"""

import argparse
import contextlib
import ctypes
import json
import logging
import math
import mmap
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

SIZE = 2**26  # bytes of the file: 64 MiB
CHUNK = 2**20  # bytes that section 4 reads at once: 1 MiB
CHUNKS = SIZE // CHUNK
IN_ORDER = list(range(CHUNKS))

# %% [markdown]
# ## 1. A mapped file is the page cache
#
# The kernel keeps what it has read from a disk in its **page cache**, in pages of 4 KiB, once per
# machine. There are two ways to get at it. `read` copies from the page cache into memory of the
# process. `mmap` **maps** the file into the address space instead: it copies nothing, and the first
# touch of a page either finds it in the page cache or makes the kernel read it from the disk (a
# *major fault*):
#
#     np.memmap, all ranks                          np.fromfile, all ranks
#
#     rank 0 ── map ──┐                             rank 0  [own copy] <── read ──┐
#     rank 1 ── map ──┼──> page cache <── disk      rank 1  [own copy] <── read ──┼── page cache
#     rank 2 ── map ──┘    one copy                 rank 2  [own copy] <── read ──┘   and one copy
#
# This is the idea of the lesson: **what is mapped is shared, by all processes, whatever tool says
# otherwise.** FFCV maps its file (`os_cache=True`, the default), and so do `np.load(mmap_mode="r")`
# and `torch.load(mmap=True)`. `os_cache=False`, `np.load` and a list of tensors are copies.


# %%
def read_all(data: np.ndarray) -> None:
    """Touch one byte in each page of the kernel's."""
    data[:: mmap.PAGESIZE].sum()


# %% [markdown]
# ## 2. RSS, PSS, and who counts what
#
# A process's resident set (**RSS**) counts each page that the process has mapped and touched, in
# full. n ranks that share one copy count it n times. **PSS**, the proportional set, divides each
# page by the number of processes that map it, so that sums over processes are true:
#
#     4 ranks, one copy of a file of 64 MiB        RSS 64 MiB each        PSS 16 MiB each
#
# Neither sees a page that nobody maps. It stays in the page cache all the same, until the kernel
# needs the memory for something else; `free` shows it under buff/cache. That is why the second run
# of a job is faster than the first.


# %%
def in_memory(path: Path) -> tuple[float, float]:
    """Return the copies of a mapped file that this process has by RSS, and by PSS."""
    for mapping in psutil.Process().memory_maps():
        if mapping.path == str(path):
            return mapping.rss / SIZE, mapping.pss / SIZE
    return 0.0, 0.0


# %% [markdown]
# ## 3. How it is measured
#
# Rank 0 writes a file, and drops it from the page cache: it writes it to the disk, since only clean
# pages can be dropped, and gives the kernel the advice that it is needed no more, which counts only
# while nobody maps it. `mincore` says which pages of a mapping are in the page cache, without
# touching any. /proc/self/io says how many bytes the disk has delivered for this process. All is
# divided by the size of the file, so that the unit is a file.
#
# A file system in memory has no disk to drop to; there most rows are BLOCKED.


# %%
libc = ctypes.CDLL(None, use_errno=True)


def drop(path: Path) -> None:
    """Write a file to its disk, and drop it from the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_page_cache(path: Path) -> float:
    """Return the share of a file that is in the page cache."""
    data = np.memmap(path, np.uint8, "r")  # mapped, and not touched
    present = np.zeros(SIZE // mmap.PAGESIZE, np.uint8)  # a byte for each page
    pointer = ctypes.c_void_p
    whole = [pointer(data.ctypes.data), ctypes.c_size_t(SIZE), pointer(present.ctypes.data)]
    if libc.mincore(*whole) != 0:
        raise OSError(f"mincore: {os.strerror(ctypes.get_errno())}")
    return (present & 1).mean()


def from_disk() -> float:
    """Return how many times the size of the file the disk has delivered to this process."""
    return psutil.Process().io_counters().read_bytes / SIZE


def own_memory() -> float:
    """Return the memory that this process shares with no other, in sizes of the file."""
    return psutil.Process().memory_full_info().uss / SIZE


def from_rank_0(value: object) -> object:
    """Return rank 0's `value` on every rank."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def sum_of_ranks(value: float) -> float:
    """Return the sum of all ranks' values; so all have come here."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return sum(values)


# %% [markdown]
# All ranks map the file and read it, twice; then they unmap it.


# %%
def check_map(path: Path) -> None:
    """Claim what the disk delivers to ranks that map a file, and what lies in memory then."""
    before = from_disk()
    data = np.memmap(path, np.uint8, "r")
    read_all(data)
    delivered = sum_of_ranks(from_disk() - before)
    claim("files that the disk delivers to all ranks", 1, delivered, atol=0.02, question=1)
    before = from_disk()
    read_all(data)
    again = sum_of_ranks(from_disk() - before)
    claim("files that it delivers when all read again", 0, again, atol=0.02)
    rss, pss = in_memory(path)
    claim("copies by RSS, summed over ranks", WORLD_SIZE, sum_of_ranks(rss), atol=0.02, question=2)
    claim("copies by PSS, summed over ranks", 1, sum_of_ranks(pss), atol=0.02)
    del data  # which unmaps it
    rss, pss = in_memory(path)
    claim("copies by RSS when all have unmapped it", 0, sum_of_ranks(rss))
    claim("copies in the page cache then", 1, in_page_cache(path), atol=0.02, question=3)


def check_copies(path: Path) -> None:
    """Claim how many copies ranks have that read a file into arrays of their own."""
    before = own_memory()
    data = np.fromfile(path, np.uint8)
    copies = sum_of_ranks(own_memory() - before)
    claim("copies in arrays of their own", WORLD_SIZE, copies, atol=0.05 * WORLD_SIZE, question=4)
    claim("copies in the page cache, besides", 1, in_page_cache(path), atol=0.02)
    del data


# %% [markdown]
# ## 4. Memory that is smaller than the file
#
# When the page cache is full, the kernel drops what was **least recently used** (LRU). Whether that
# is a good choice depends on the order in which the file is read. Take a file of 8 chunks, and
# memory for 4 of them. After a first epoch in order, chunks 5 to 8 are in memory:
#
#     second epoch in order     1 2 3 4 5 6 7 8      1 drops 5, ..., 4 drops 8, 5 drops 1, ...
#     second epoch backward     8 7 6 5 4 3 2 1      8, 7, 6 and 5 are still there


# %%
def chunks_from_disk(order: list[int], room: int) -> int:
    """Return how many chunks are read from the disk if the last `room` chunks used are kept."""
    kept = []  # the chunk used last stands at the end
    count = 0
    for chunk in order:
        count += chunk not in kept
        others = [other for other in kept if other != chunk]
        kept = [*others, chunk][-room:]
    return count


# %% [markdown]
# A **control group** (cgroup) makes memory small; containers and Slurm jobs live in one. Each page
# of a file counts against the limit of the group that read it first. Rank 0 moves into a group of
# its own, reads, and moves back. A shell removes the group then, or when rank 0 was killed.


# %%
def own_group() -> tuple[Path, Path, str]:
    """Return this process's memory cgroup, where another can be made, and the limit's file."""
    place = "/"
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, place = line.split(":", 2)
        if "memory" in controllers:  # version 1
            home = Path(f"/sys/fs/cgroup/memory{place}")
            return home, home, "memory.limit_in_bytes"
    home = Path(f"/sys/fs/cgroup{place}")  # version 2: the last line; no processes in inner groups
    return home, home if place == "/" else home.parent, "memory.max"


@contextlib.contextmanager
def limited_memory(limit: int) -> Iterator[None]:
    """Charge what this process reads to a cgroup of `limit` bytes; OSError if none can be made."""
    home, parent, name = own_group()
    (home / "cgroup.procs").read_text()  # an OSError where this is no cgroup
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


# %% [markdown]
# The file is read and not mapped, since a mapped page gets a second chance before it is dropped.
# Then half of it is in memory, as `mincore` and major faults show: one touch per chunk finds it, or
# waits for the disk. (The kernel's multi-generation LRU, /sys/kernel/mm/lru_gen, was not tried.)


# %%
def read_chunks(path: Path, order: list[int]) -> float:
    """Read a file's chunks in this order; return what the disk delivers, in sizes of the file."""
    before = from_disk()
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # nothing ahead
        for chunk in order:
            os.pread(file.fileno(), CHUNK, CHUNK * chunk)
    return from_disk() - before


def faults_of_touches(path: Path) -> int:
    """Map a file and touch one byte of each chunk; return the major faults."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ) as data:
        data.madvise(mmap.MADV_RANDOM)  # nothing ahead
        before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        sum(data[::CHUNK])
        return resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before


def second_epochs(path: Path, shuffled: list[int]) -> list[float] | None:
    """Return what the disk delivers in each second epoch; then copies in memory, and faults."""
    measured = []
    with contextlib.suppress(OSError), limited_memory(SIZE // 2 + CHUNK):  # and what is read
        for order in (shuffled, IN_ORDER[::-1], IN_ORDER):
            drop(path)
            read_chunks(path, IN_ORDER)  # the first epoch
            measured.append(read_chunks(path, order))
        return [*measured, in_page_cache(path), faults_of_touches(path)]
    return None


def check_small_memory(path: Path) -> None:
    """Claim what the disk delivers to a rank whose memory holds half of the file."""
    shuffled = np.random.default_rng(0).permutation(CHUNKS).tolist()
    dist.barrier()  # nobody maps the file now
    measured = from_rank_0(second_epochs(path, shuffled) if RANK == 0 else None)
    if measured is None:
        blocked("memory that is smaller than the file", needs="root and a memory cgroup")
        return
    in_shuffled, backward, in_order, cached, faults = measured
    claim("half fits: epoch 2 from disk, in order", 1, in_order, atol=0.05, question=5)
    claim("half fits: epoch 2 from disk, backward", 0.5, backward, atol=0.05)
    again = chunks_from_disk(IN_ORDER + shuffled, CHUNKS // 2) - CHUNKS  # without epoch 1
    claim("half fits: epoch 2 from disk, shuffled", again / CHUNKS, in_shuffled, atol=0.05)
    claim("half fits: copies in the page cache then", 0.5, cached, atol=0.05)
    claim("half fits: major faults of a touch per chunk", CHUNKS // 2, faults, atol=3)


# %% [markdown]
# ## What you should have seen
#
# 1. Once, whatever n is. The rank that touches a page first waits for the disk; the others find the
#    page there, or wait for the same read. In a second epoch nobody waits.
# 2. n copies, where there is one, as PSS shows. Added up over the 8 ranks of a node, RSS frightens
#    people into copying or splitting data that is shared already.
# 3. One. The page cache belongs to the machine and not to a process, so it outlives the ranks, and
#    the next job on this node finds the file in memory.
# 4. n more copies, one for each rank, and the one in the page cache is there besides: the read went
#    through it.
# 5. Once, as if there were no page cache: each chunk is dropped before it is needed again. A second
#    epoch that is read backward finds the half that is there, and a shuffled one a part of it.
#
# **Try.** With `np.fromfile` the disk delivers the file once all the same, since each rank copies
# from the same page cache. The two sums of RSS and PSS are 0 and fail, since no process maps the
# file. Without `del data` all ranks still map it: RSS says n and not 0, and that row alone fails.
# The page cache holds its one copy either way.
#
# **When.** Map what several ranks read and nobody writes: data, tokens, a checkpoint that all ranks
# load. Read into arrays of your own what one rank needs alone, or what must not be dropped.
#
# **Where it bites.** Pages of the page cache count against a container's limit, for the container
# that touched them first. So a job that is fast on a free machine may read its whole file from the
# disk in every epoch under Kubernetes or Slurm. A mapped file on a network file system that
# another node changes is not changed here. And a Python list of a million small arrays that forked
# workers share is copied after all, page by page: a reference count is a write.
#
# **On GPUs** the copy to the device goes through pinned memory, which is each rank's own: one batch
# and not the file. At a thousand ranks there is a page cache per *node*: n nodes read the file n
# times from its server, and that is the next lesson.


# %%
def main() -> None:
    command_line()
    launch()
    if int(os.environ.get("LOCAL_WORLD_SIZE", WORLD_SIZE)) != WORLD_SIZE:
        refuse(f"needs one node, whose ranks share a file, got {WORLD_SIZE} ranks on several")
    setup()
    errors = os.environ.get("TORCHELASTIC_ERROR_FILE")  # in the launcher's folder
    here = Path(errors).parent if errors else None
    with tempfile.TemporaryDirectory(prefix="pages-", dir=here) as folder:
        path = Path(from_rank_0(folder)).resolve() / "data"
        if RANK == 0:
            path.write_bytes(np.random.default_rng(0).bytes(SIZE))
            drop(path)
        on_disk = from_rank_0(in_page_cache(path) == 0 if RANK == 0 else None)
        if on_disk:
            check_map(path)
        else:
            blocked("what a mapped file costs", needs="a temporary folder on a disk: set TMPDIR")
        check_copies(path)
        if on_disk:
            check_small_memory(path)
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
