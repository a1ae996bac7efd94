"""Token shards: a window is an offset into a mapped file
======================================================

**Question.** The tokens of a text lie in several files, the shards. How does a rank get any window
of them without reading the rest?

**Predict**, and write it down before you run. A window has 1,024 tokens, and the target of each is
the token after it. A shard is a file of 60 windows, with 2 bytes per token. The kernel reads it in
pages of 4 KiB, of which it has 31. Windows, bytes and pages are counted from 0.

1. At which byte of its file does window 91 begin?
2. A rank needs window 91, and no shard is in memory. The kernel has been told to read only pages
   that are touched. How many bytes does the disk deliver?
3. The kernel has been told nothing. How many of the shard's 31 pages does the disk deliver?
4. Which is the largest token that fits these shards?

**Run.**

    torchrun --standalone --nproc-per-node=4 18_token_shards.py    # NCCL on 4 GPUs, else gloo
    python 18_token_shards.py                                      # the same, started for you

One node, Linux, and a temporary folder on a disk. The tokenizer comes with `pip install -e
'.[data]'`; without it the tokens are bytes. Not run on several GPUs, where nothing differs: files
are the host's.

**Try.** In `map_tokens` return `np.fromfile(path, DTYPE)`: which claims fail? In `write_shards` use
`.astype(">u2")`, the byte order of another machine: which claims fail, and which error do you get?

**Before.** data-loading/06_tokens.py: which windows a rank takes, and when.
data-loading/17_page_cache.py: one page cache for all ranks of a machine.

**Next.** data-loading/07_packing.py: how documents share a row, and which tokens count.
"""

import argparse
import contextlib
import ctypes
import json
import logging
import math
import mmap
import os
import signal
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist

Tokenizer = None
with contextlib.suppress(ImportError):  # the extra [data]
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

T = 1024  # tokens in a window
WINDOWS = 150
PER_SHARD = 60  # windows; the last shard has the 30 that are left
DTYPE = np.uint16

# %% [markdown]
# ## 1. A window is an offset
#
# A language model trains on **windows** of T tokens, cut from one long array, which lies in files,
# the **shards**. A shard holds nothing but tokens, as integers of 2 bytes. Every shard but the last
# has the same number of windows, so a window needs no index and no search: window i is number
# i mod 60 of shard i div 60, and its first token is number (i mod 60) T of that file:
#
#     tokens_00000.bin    | w0   | w1   | w2   | ...       | w59  |.|
#     tokens_00001.bin    | w60  | w61  | w62  | ...       | w119 |.|
#     tokens_00002.bin    | w120 | w121 | ...  | w149 |.|      . one token: a target
#
# A window takes along one token more, since the target of each token is the one after it. In the
# middle of a shard this is the first token of the next window. The last window of a shard has none
# behind it, so the shard gets one token more: the first one of the next shard, stored twice.
#
# Two details of writing matter. The names have zeros, because a folder is sorted by letters, and
# then tokens_10 would come before tokens_2: every window behind it would be another one, without
# any error. And the largest token is compared with what 2 bytes hold. NumPy does not do that for
# you: `astype` would keep the lower 16 bits of token 100,000 and store 34,464.


# %%
def write_shards(folder: Path, tokens: np.ndarray) -> None:
    """Write the windows of the tokens, PER_SHARD in each file; each ends with one target more."""
    largest = np.iinfo(DTYPE).max
    if tokens.max() > largest:
        raise ValueError(f"needs tokens up to {largest:,}, got {tokens.max():,}; use np.uint32")
    windows = (len(tokens) - 1) // T
    for shard, first in enumerate(range(0, windows, PER_SHARD)):
        stop = min(first + PER_SHARD, windows)
        kept = tokens[first * T : stop * T + 1]
        kept.astype(DTYPE).tofile(folder / f"tokens_{shard:05}.bin")


# %% [markdown]
# To read, a shard is **mapped** (`mmap`): its bytes get addresses in the memory of the process, and
# nothing is read yet. An array on top of it copies nothing, and a slice of that is no more than an
# address. `np.memmap(path, np.uint16, "r")` does the same in one call, but gives the kernel no
# advice (section 2). A slice past the end would be too short, without an error, so we look.


# %%
def map_tokens(path: Path, advice: int) -> np.ndarray:
    """Return the tokens of a shard, none of which is read yet."""
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    mapped.madvise(advice)
    return np.frombuffer(mapped, DTYPE)


class Shards:
    """The windows of all shards in a folder: `shards[i]` is window i."""

    def __init__(self, folder: Path, advice: int = mmap.MADV_RANDOM) -> None:
        self.maps = [map_tokens(path, advice) for path in sorted(folder.glob("tokens_*.bin"))]

    def __len__(self) -> int:
        return sum(len(tokens) // T for tokens in self.maps)

    def __getitem__(self, window: int) -> np.ndarray:
        """Return T + 1 tokens: all but the last are inputs, all but the first are targets."""
        if not 0 <= window < len(self):
            raise IndexError(f"needs a window from 0 to {len(self) - 1}, got {window}")
        shard, place = divmod(window, PER_SHARD)
        start = place * T
        return self.maps[shard][start : start + T + 1]


# %% [markdown]
# ## 2. What a window costs: its pages
#
# The kernel reads a file in **pages** when one is touched for the first time, and keeps them in its
# page cache, once for all ranks of a machine. A page has 4 KiB on x86, and up to 64 KiB on ARM. A
# window has 2 x 1,025 = 2,050 bytes, so it lies in one page, or it crosses into the next:
#
#     byte        61,440             63,488             65,536
#                 |           page 15                   |           page 16   ...
#                 |  window 90       |  window 91       |.|
#
# By default Linux also reads **around** the page that was touched: 128 KiB (the disk's
# `read_ahead_kb`), half of them before the page, as far as the file has them. This is right for a
# file that is read in order. Windows come in random order, so most of it is read for nothing, if
# memory does not keep it until its turn comes. Linux gives up only after 100 misses more than hits
# in an open file. With the advice `MADV_RANDOM` it reads the touched page alone from the start.

# %% [markdown]
# ## 3. How it is measured
#
# The tokens are those of a text, the sources of Python's standard library; how it becomes tokens
# stands at the end. The oracle is their array before it was written: it knows of no files, no
# windows and no ranks. Where a window lies is read off its address in memory. /proc/self/io says
# how many bytes the disk has delivered for this process. Before it is asked, rank 0 drops the
# shards from the page cache, which works only while nobody maps them.


# %%
def bytes_from_disk(folder: Path, window: int, advice: int) -> int:
    """Return what the disk delivers for one window, when no shard is in memory."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # only what is on the disk can be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = psutil.Process().io_counters().read_bytes
    Shards(folder, advice)[window].copy()
    return psutil.Process().io_counters().read_bytes - before


def read_around(folder: Path) -> int:
    """Return how many bytes Linux reads around a page in this folder; 128 KiB if it won't say."""
    device = folder.stat().st_dev
    disk = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    return 1024 * int(disk.read_text()) if disk.exists() else 2**17


def largest_taken(folder: Path, tokens: tuple[int, ...]) -> int:
    """Return the largest of these tokens that `write_shards` does not refuse."""
    taken = []
    for token in tokens:
        with contextlib.suppress(ValueError):
            write_shards(folder, np.array([token]))  # no window, so no file
            taken.append(token)
    return max(taken)


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
# One window first: where it lies, and what the disk delivers for it, to rank 0 alone.


# %%
def check_disk(folder: Path) -> None:
    """Claim what the disk delivers for window 91, with the advice and without."""
    measured = None
    if RANK == 0:
        advised = bytes_from_disk(folder, 91, mmap.MADV_RANDOM)
        measured = (advised, bytes_from_disk(folder, 91, mmap.MADV_NORMAL), read_around(folder))
    advised, not_advised, around = from_rank_0(measured)
    if advised == 0 or around < 2**17:  # a file system in memory has no disk
        needs = "a temporary folder on a disk: set TMPDIR"
        blocked("window 91: what the disk delivers", needs=needs)
        return
    page = mmap.PAGESIZE
    claim("window 91: bytes from the disk", 2 * page, advised, question=2)
    pages = math.ceil(2 * (60 * 1024 + 1) / page)
    claim("window 91, no advice: pages from the disk", pages, not_advised / page, question=3)


def check_files(folder: Path) -> None:
    """Claim how many tokens a file holds, and which token is too large for it."""
    size = (folder / "tokens_00000.bin").stat().st_size
    claim("tokens in the file of shard 0", 60 * 1024 + 1, size / 2)
    largest = largest_taken(folder, (65_535, 65_536))
    claim("of tokens 65,535 and 65,536, the largest taken", 65_535, largest, question=4)


def check_window(shards: Shards) -> None:
    """Claim where window 91 lies."""
    window = shards[91]
    shard = [np.shares_memory(window, tokens) for tokens in shards.maps].index(True)
    claim("window 91: its shard", 1, shard)
    address = window.ctypes.data - shards.maps[shard].ctypes.data
    claim("window 91: its first byte there", 31 * 1024 * 2, address, question=1)


# %% [markdown]
# Then all windows. Rank r of n takes every n-th one, from the r-th on; joined in order, the ranks'
# windows must be the text again.


# %%
def check_all_windows(shards: Shards, tokens: np.ndarray) -> None:
    """Claim that the ranks' windows together are the text's tokens, each once."""
    rows = np.zeros((WINDOWS, T + 1), int)
    times = np.zeros(WINDOWS, int)
    mine = {window: shards[window].copy() for window in range(RANK, WINDOWS, WORLD_SIZE)}
    for windows in gather_objects(mine):
        for window, row in windows.items():
            rows[window] = row
            times[window] += 1
    claim("windows not read exactly once, all ranks", 0, (times != 1).sum())
    unlike = (rows[:, :-1].flatten() != tokens[:-1]).sum()
    claim("inputs, joined, unlike the text's tokens", 0, unlike)
    unlike = (rows[:, 1:].flatten() != tokens[1:]).sum()
    claim("targets, joined, unlike those one token on", 0, unlike)


# %% [markdown]
# ## What you should have seen
#
# 1. It is number 91 - 60 = 31 of shard 1, and 31 x 1,024 x 2 = 63,488.
# 2. 8,192, two pages: its inputs end with page 15, and the last target alone lies on page 16. For
#    2 kB that are wanted, 8 kB come: 4 times as many. With 64 KiB per page it would be 131,072.
# 3. All 31. Around page 15 the kernel reads 32 pages, 16 of them before it, and the shard ends with
#    page 30. For 2 kB that are wanted, 127 kB come: 62 times as many. In a larger shard it would
#    be all 32.
# 4. 65,535, the largest number of 16 bits. `write_shards` refuses the next one. Without that line
#    the row would say 65,536, which would be stored as 0: the model would learn from wrong text,
#    while nothing complains.
#
# **Try.** `np.fromfile` reads all of each shard, so the disk delivers all of them: the rows of
# questions 2 and 3 fail. The tokens are right, and n ranks have n copies in memory of their own.
# With the other byte order you get no error. Sizes and offsets are right, and nearly all tokens are
# wrong: the rows of the inputs, the targets and the bytes fail. A flat file says nothing of itself.
#
# **Which tokens.** The 4,096 of byte-pair encoding hold about 4 bytes of text each, so a window
# holds four times as much text as one whose tokens are bytes. Bytes need no tokenizer, and take 2
# bytes each in these shards, unless you store them as `uint8`.
#
# **When.** For pieces of one size that are read in any order, by several ranks. Leave the advice
# out if all shards fit into memory: to read around fills it in fewer waits. Not for records of
# different sizes, which need an index, nor from an object store, where a request costs as much as
# some megabytes: stream whole shards from there.
#
# **Where it bites.** On a spinning disk or a network file system a random page costs milliseconds.
# Shuffle the shards first then, and the windows of a few open ones, without the advice. Keep dtype
# and vocabulary next to the shards. nanoGPT's file has no header either; llm.c's have one of 1,024
# bytes, which moves every offset. A mapped file that gets shorter ends its readers with SIGBUS.
#
# **On GPUs** a window is copied into pinned memory and goes to the GPU with `non_blocking=True`. It
# is widened on the way: an embedding takes `int32` or `int64`, the targets of `F.cross_entropy`
# must be `int64`. At a thousand ranks each *node* has its own page cache, with the pages of its own
# windows. 15 trillion tokens of 128,256 kinds are 60 TB in `uint32`.

# %% [markdown]
# You need not read how the text becomes tokens. The simplest ones are its bytes. **Byte-pair
# encoding** (BPE; Sennrich et al., 2016) begins with these, and again and again makes a new token
# of the two that stand next to each other most often, here until there are 4,096. Rank 0 lets the
# library `tokenizers` learn it from the text itself.


# %%
def standard_library() -> str:
    """Return 700 kB of the sources of Python's standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
    return b"".join(file.read_bytes() for file in files)[:700_000].decode(errors="replace")


def learn_bpe(text: str) -> "Tokenizer":
    """Return a tokenizer that has learned its tokens from this text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # all 256 bytes, so that no text is unknown
    rules = {"vocab_size": 4096, "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(text.split("\n\n"), trainers.BpeTrainer(**rules))
    return tokenizer


def tokenize(text: str) -> np.ndarray:
    """Return the tokens of a text: those of BPE, or its bytes where the library is missing."""
    return np.array(learn_bpe(text).encode(text).ids if Tokenizer else list(text.encode()))


def check_text(folder: Path, text: str, count: int) -> None:
    """Claim how much text one of `count` tokens holds; and that bytes are tokens as well."""
    data = np.frombuffer(text.encode(), np.uint8)
    if Tokenizer is None:
        needs = "tokenizers: pip install -e '.[data]'"
        blocked("BPE of 4,096: bytes of text per token", needs=needs)
    else:
        claim("BPE of 4,096: bytes of text per token", 4, len(data) / count, atol=0.5)
    if RANK == 0:
        folder.mkdir()
        write_shards(folder, data[: WINDOWS * T + 1])
    dist.barrier()
    shards = Shards(folder)
    back = np.concatenate([shards[window][:-1] for window in range(WINDOWS)])
    claim("bytes as tokens: bytes unlike the text's", 0, (back != data[: WINDOWS * T]).sum())


def main() -> None:
    command_line()
    launch()
    if int(os.environ.get("LOCAL_WORLD_SIZE", WORLD_SIZE)) != WORLD_SIZE:
        refuse(f"needs one node, whose ranks share files, got {WORLD_SIZE} ranks on several")
    setup()
    errors = os.environ.get("TORCHELASTIC_ERROR_FILE")  # in the launcher's folder
    here = Path(errors).parent if errors else None
    with tempfile.TemporaryDirectory(prefix="tokens-", dir=here) as own_folder:
        folder = Path(from_rank_0(own_folder))
        text = standard_library()
        tokens = from_rank_0(tokenize(text) if RANK == 0 else None)
        needed = tokens[: WINDOWS * T + 1]
        if RANK == 0:
            write_shards(folder, needed)
        check_disk(folder)  # first: a shard that is mapped cannot be dropped
        shards = Shards(folder)
        check_window(shards)
        check_files(folder)
        check_all_windows(shards, needed)
        check_text(folder / "bytes", text, len(tokens))
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
