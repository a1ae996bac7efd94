"""Token shards: flat files of 2-byte integers, mapped into memory
===============================================================

**Question.** The tokens of a text lie in several files. How does a rank get any window of them
without reading the rest, and what do the n ranks of a machine need in memory for it?

**Predict**, and write it down before you run. A window has 1,024 tokens, a shard is a file of 60
windows, a token takes 2 bytes, and a page 4 KiB.

1. A tokenizer of 4,096 tokens is trained on the sources of Python's standard library. How many
   bytes of this text does a token hold, to the nearest whole number?
2. Token 100,000 of a larger vocabulary is stored in 2 bytes (`uint16`). Which number comes back?
3. Windows and bytes are counted from 0. At which byte of its file does window 101 begin?
4. No shard is in memory, and one rank reads window 101. How many bytes does the disk deliver?
5. All 4 ranks read all windows. How many copies of the shards lie in their memory, all together?

**Run.**

    torchrun --standalone --nproc-per-node=4 18_token_shards.py    # NCCL on 4 GPUs, else gloo
    python 18_token_shards.py                                      # the same, started for you

`--data FILE` takes your own text. The tokenizer needs `pip install -e '.[data]'`; without it, bytes
serve. One node, Linux. Not run on several GPUs, where nothing differs: files are the host's.

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
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

T = 1024  # tokens in a window
WINDOWS = 150
PER_SHARD = 60  # windows; the last shard has the 30 that are left
DTYPE = np.uint16
VOCABULARY = 4096
END = 0  # the token after each document

# %% [markdown]
# ## 1. A window is an offset
#
# A language model trains on **windows** of T tokens, cut from one long array, which lies in files,
# the **shards**. They hold nothing but tokens, as integers of 2 bytes. All have one size, so that a
# window needs no index and no search: with 60 windows per shard, window i is number i mod 60 of
# shard i div 60, and its first token is number (i mod 60) T of that file:
#
#     tokens_0.bin    | w0  | w1  | w2  | ... | w59 |.|
#     tokens_1.bin    | w60 | w61 | w62 | ...       ... | w119 |.|
#     tokens_2.bin    | w120 | w121 | ... | w149 |.|   <- the target of the last token
#
# A window takes along one token more, since the target of each token is the one after it. In the
# middle of a shard this is the first token of the next window. The last window of a shard has none
# behind it, so the shard gets one token more: the first one of the next shard, stored twice.
#
# The file is **mapped** (`mmap`) and not read: its bytes get addresses in the memory of the
# process, and an array on top of them copies nothing. A slice of it is no more than an address.
# `np.memmap(path, np.uint16, "r")` does the same in one call, without the advice below.


# %%
def write_shards(folder: Path, tokens: np.ndarray) -> None:
    """Write the windows, PER_SHARD in each file; each file ends with one target more.

    Zeros in the names keep files in order: by letters "10" would come before "2".
    """
    for shard, first in enumerate(range(0, WINDOWS, PER_SHARD)):
        stop = min(first + PER_SHARD, WINDOWS)
        kept = tokens[first * T : stop * T + 1]
        kept.astype(DTYPE).tofile(folder / f"tokens_{shard:05}.bin")


def map_tokens(path: Path) -> np.ndarray:
    """Return the tokens of a shard, none of which is read yet."""
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    mapped.madvise(mmap.MADV_RANDOM)  # advice: any page may come next, so read none ahead
    return np.frombuffer(mapped, DTYPE)


class Shards:
    """The windows of all shards in a folder: `shards[i]` is window i."""

    def __init__(self, folder: Path) -> None:
        self.maps = [map_tokens(path) for path in sorted(folder.glob("tokens_*.bin"))]

    def __getitem__(self, window: int) -> np.ndarray:
        """Return T + 1 tokens: all but the last are inputs, all but the first are targets."""
        shard, place = divmod(window, PER_SHARD)
        start = place * T
        return self.maps[shard][start : start + T + 1]


# %% [markdown]
# ## 2. Two bytes per token
#
# A **tokenizer** turns text into integers. This one is **byte-pair encoding** (BPE; Sennrich et
# al., 2016): it begins with the 256 bytes as tokens, and again and again makes a new token of the
# two that most often stand next to each other, until there are 4,096. Two bytes hold the numbers 0
# to 65,535. A larger vocabulary needs `uint32`, and twice the disk. NumPy does not stop you where
# it matters: `astype` keeps the lower 16 bits and says nothing.
#
# A **document** is here what stands between two blank lines; token 0 ends it. Windows know nothing
# of documents: one may begin in one window and end in the next, or in the next shard.


# %%
def learn_bpe(documents: list[str]) -> "Tokenizer":
    """Byte-pair encoding, learned from these documents, by the library `tokenizers`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # all 256 bytes, so that no text is unknown
    rules = {"vocab_size": VOCABULARY - 1, "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(documents, trainers.BpeTrainer(**rules))
    return tokenizer


def tokenize(documents: list[str]) -> list[list[int]]:
    """Return the tokens of each document, with END behind them."""
    tokenizer = learn_bpe(documents) if Tokenizer else None
    tokenized = []
    for document in documents:
        numbers = tokenizer.encode(document).ids if tokenizer else document.encode()
        tokenized.append([number + 1 for number in numbers] + [END])
    return tokenized


# %% [markdown]
# ## 3. What a window costs: its pages
#
# The kernel reads a file in **pages** of 4 KiB, on the first touch, and keeps them in its page
# cache. A window has 2 x 1,025 = 2,050 bytes, so it lies in one page, or it crosses into the next:
#
#     byte        81,920             83,968             86,016
#                 |           page 20                   |           page 21   ...
#                 |  window 100      |  window 101      |.|
#
# All ranks map the same pages of the page cache: what was touched is in memory once per machine.

# %% [markdown]
# ## 4. How it is measured
#
# Rank 0 tokenizes before the ranks meet. The oracle is its array of tokens, before any shard was
# written: it knows of no files, no windows and no ranks.


# %%
def prepare(path: str | None) -> tuple[np.ndarray, float, int]:
    """Return the tokens, the bytes of text per token, and the windows that begin in a document."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    files = [Path(path)] if path else sorted(stdlib.glob("[a-d]*.py"))
    text = b"".join(file.read_bytes() for file in files)[:700_000].decode(errors="replace")
    documents = [document for document in text.split("\n\n") if document.strip()]
    tokenized = tokenize(documents)
    tokens = np.concatenate(tokenized)
    if len(tokens) <= WINDOWS * T:
        refuse(f"needs {WINDOWS * T + 1} tokens, got {len(tokens)}; take a longer text")
    text_bytes = sum(len(document.encode()) for document in documents)
    ends = np.cumsum([len(numbers) for numbers in tokenized])  # there the next document begins
    aligned = (ends % T == 0) & (ends < WINDOWS * T)
    inside = WINDOWS - 1 - aligned.sum()  # window 0 begins with a document
    return tokens[: WINDOWS * T + 1], text_bytes / (len(tokens) - len(documents)), inside


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
# /proc/self/io says how many bytes the disk has delivered for this process. Rank 0 drops the files
# from the page cache first, while nobody maps them. Where a window lies is read off its address.


# %%
def bytes_from_disk(folder: Path, window: int) -> int:
    """Return what the disk delivers for one window, when no shard is in memory."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # only what is on the disk can be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = psutil.Process().io_counters().read_bytes
    Shards(folder)[window].copy()
    return psutil.Process().io_counters().read_bytes - before


def check_bytes(folder: Path, bytes_per_token: float, own_text: bool) -> None:
    """Claim what a token holds, what it costs, and what becomes of one that is too large."""
    text = "BPE of 4,096: bytes of text per token"
    if Tokenizer is None:
        blocked(text, needs="tokenizers: pip install -e '.[data]'")
    elif not own_text:
        claim(text, 4, bytes_per_token, atol=0.5, question=1)
    stored = np.array([100_000]).astype(DTYPE)
    claim("token 100,000, stored and read back", 34_464, stored[0], question=2)
    size = sum(path.stat().st_size for path in folder.iterdir())
    claim("bytes of all shards on disk", 2 * (150 * 1024 + 3), size)


def check_window(shards: Shards, delivered: int) -> None:
    """Claim where window 101 lies, and what reading it costs."""
    window = shards[101]
    shard = [np.shares_memory(window, tokens) for tokens in shards.maps].index(True)
    claim("window 101: its shard", 1, shard)
    first = 41 * 1024 * 2  # bytes: it is number 41 of its shard
    address = window.ctypes.data - shards.maps[shard].ctypes.data
    claim("window 101: its first byte there", first, address, question=3)
    pages = (first + 2049) // mmap.PAGESIZE - first // mmap.PAGESIZE + 1
    text = "window 101: bytes that the disk delivers"
    if delivered == 0:  # a file system in memory has no disk
        blocked(text, needs="a temporary folder on a disk: set TMPDIR")
    else:
        claim(text, pages * mmap.PAGESIZE, delivered, question=4)


# %% [markdown]
# Rank r of n takes every n-th window, from the r-th on. Then every rank reads all shards, and the
# copies are counted by **PSS**, which divides each page by the number of processes that map it (RSS
# counts it in full in each). Linux rounds it down to 1 KiB per rank and file: up to 1% per rank.


# %%
def check_all_windows(shards: Shards, tokens: np.ndarray, inside: int) -> None:
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
    begun = (rows[:-1, T - 1] != END).sum()  # the token before the next window
    claim("windows that begin inside a document", inside, begun)


def check_copies(shards: Shards, folder: Path) -> None:
    """Claim how many copies of the shards the ranks have together when all have read all."""
    for tokens in shards.maps:
        tokens.sum()
    dist.barrier()
    maps = psutil.Process().memory_maps()
    pss = sum(mapping.pss for mapping in maps if Path(mapping.path).parent == folder)
    pages = sum(math.ceil(path.stat().st_size / mmap.PAGESIZE) for path in folder.iterdir())
    copies = sum(gather_objects(pss)) / (pages * mmap.PAGESIZE)
    claim("copies in memory, all ranks", 1, copies, atol=0.01 * WORLD_SIZE, question=5)


# %% [markdown]
# ## What you should have seen
#
# 1. Four, where bytes as tokens would hold one. Other text gives another number.
# 2. 100,000 - 65,536 = 34,464, which means something else. Nothing complains, and the model learns
#    from wrong text: compare the vocabulary with 65,536 before you write.
# 3. It is number 101 - 60 = 41 of shard 1, and 41 x 1,024 x 2 = 83,968.
# 4. 8,192, two pages: its inputs end with page 20, and the last target alone lies on page 21. The
#    other 29 pages stay on the disk. Without the advice the kernel would read many of them ahead.
# 5. One, on any number of ranks: what they map is the page cache. Added up by RSS it would be n.
#
# The shards have 2 x (150 x 1,024 + 3) = 307,206 bytes: 3 is one target more in each. Most windows
# begin inside a document. Joined in order they are the text again: nothing of a document is lost.
#
# **Try.** `np.fromfile` reads each shard as a whole. The row of the disk fails, and the row of the
# copies shows 0, since nothing is mapped: there are n in the ranks' own memory. With the other byte
# order you get no error. Sizes and offsets are right, nearly all tokens are wrong: the rows of the
# inputs and of the targets fail. A flat file says nothing of itself.
#
# **When.** For all of one size that several ranks read in any order. Not for records of different
# sizes, which need an index, nor from an object store, which streams whole shards.
#
# **Where it bites.** On a spinning disk or a network file system a random page costs milliseconds,
# so shuffle the shards first, and then the windows of a few open ones. Keep dtype and vocabulary
# next to the shards. nanoGPT's file has no header either; llm.c's have one of 1,024 bytes, which
# moves every offset. A mapped file that gets shorter ends its readers with SIGBUS.
#
# **On GPUs** a window is copied into pinned memory, widened to `int64` for the embedding, and goes
# to the GPU with `non_blocking=True`. At a thousand ranks each *node* has its own page cache, with
# the pages of its own windows. 15 trillion tokens of 128,256 kinds are 60 TB in `uint32`.


# %%
def main() -> None:
    options = command_line({"--data": {"metavar": "FILE", "help": "text to tokenize"}})
    launch()
    if options.data and not Path(options.data).is_file():
        refuse(f"--data takes a file of text, got {options.data}; leave it out for Python's own")
    if int(os.environ.get("LOCAL_WORLD_SIZE", WORLD_SIZE)) != WORLD_SIZE:
        refuse(f"needs one node, whose ranks share files, got {WORLD_SIZE} ranks on several")
    prepared = prepare(options.data) if RANK == 0 else None
    setup()
    tokens, bytes_per_token, inside = from_rank_0(prepared)
    errors = os.environ.get("TORCHELASTIC_ERROR_FILE")  # in the launcher's folder
    here = Path(errors).parent if errors else None
    with tempfile.TemporaryDirectory(prefix="tokens-", dir=here) as own_folder:
        folder = Path(from_rank_0(own_folder)).resolve()
        if RANK == 0:
            write_shards(folder, tokens)
        delivered = from_rank_0(bytes_from_disk(folder, 101) if RANK == 0 else None)
        shards = Shards(folder)
        check_bytes(folder, bytes_per_token, bool(options.data))
        check_window(shards, delivered)
        check_all_windows(shards, tokens, inside)
        check_copies(shards, folder)
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
