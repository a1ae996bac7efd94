"""What numba compiles, and how often: signatures, ranks, the cache on disk
========================================================================

**Question.** numba compiles a function when it is called. Which calls make it compile, and how does
a machine with n ranks compile once instead of n times?

**Predict**, and write it down before you run. There are n ranks.

1. A function is called with 64 images of 160 x 240 pixels, with 2 images of 200 x 300, with a
   mirrored view of the 64 (`images[:, :, ::-1]`), and with a read-only copy of them. How many times
   is it compiled?
2. All n ranks call it for the first time. How many times is it compiled, all ranks together?
3. The function is declared with `cache=True`, and rank 0 calls it before the others do. How many
   times now?
4. A cached function returns `gain() * 10`, and `gain` stands in another file, where it returns 2.
   You change that 2 to 3, and start a new process. What does the function return?

**Run.**

    torchrun --standalone --nproc-per-node=4 11_what_numba_compiles.py   # on GPUs, else on cores
    python 11_what_numba_compiles.py                                     # the same, started for you

Not run on several GPUs. One node. numba comes with `pip install -e '.[data]'`; without it
all claims are BLOCKED.

**Try.** In `four_kinds` write `images_NHWC[:, :, ::-1].copy()`: which claim fails? In
`call_on_rank_0_first` leave out the barrier: which claims now?

**Before.** data-loading/04_jit_augmentation.py: what such a function is good for.

**Next.** data-loading/05_random_numbers.py: random crops that can be repeated.
"""

import argparse
import contextlib
import ctypes
import json
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

try:
    import numba
except ImportError:  # it comes with the extra [data]
    numba = None

LIGHT = 96  # brightness, in 64ths

# %% [markdown]
# ## 1. Once per signature
#
# A C compiler runs before the program. numba runs while it does, **just in time** (JIT): a function
# that is declared with `@numba.njit` is compiled by the first call, because only a call shows of
# which types the arguments are. These types are its **signature**. Each function keeps a table of
# what it has compiled:
#
#     call ──> types of the arguments ──> in the table? ──yes──> jump to the machine code
#                                               └─no──> compile, enter it, jump
#
# The way on top takes about a microsecond, the way below some tenths of a second. This is the
# idea of the lesson: **the table is filled per signature, and it belongs to one process.** Both
# halves cost time where one does not expect it.
#
# What belongs to an array's type? Not its size. Its number of dimensions does, the type of its
# elements, whether they lie in C's order without gaps (numba writes C; A, any, if not), and whether
# they may be written. Below is a function to compile, and the four kinds of question 1.


# %%
def brighten(images_NHWC: np.ndarray, light: int, bright_NHWC: np.ndarray) -> None:
    """Write each byte times light / 64, at most 255."""
    count, height, width, colors = images_NHWC.shape
    for i in range(count):
        for row in range(height):
            for column in range(width):
                for color in range(colors):
                    value = images_NHWC[i, row, column, color] * light // 64
                    bright_NHWC[i, row, column, color] = min(value, 255)


def declared(**options: bool) -> Callable:
    """Return the function, to be compiled; `@numba.njit(...)` above it would do the same."""
    return numba.njit(**options)(brighten)


def brightened(function: Callable, images_NHWC: np.ndarray) -> np.ndarray:
    """Call it, and return the images that it has written."""
    bright_NHWC = np.empty(images_NHWC.shape, np.uint8)
    function(images_NHWC, LIGHT, bright_NHWC)
    return bright_NHWC


def four_kinds(images_NHWC: np.ndarray) -> list[np.ndarray]:
    larger = np.zeros((2, 200, 300, 3), np.uint8)
    mirrored = images_NHWC[:, :, ::-1]
    read_only = images_NHWC.copy()
    read_only.flags.writeable = False
    return [images_NHWC, larger, mirrored, read_only]


# %% [markdown]
# If you know the types before, you can name the signature. Then the function is compiled where it
# is declared, and no call compiles anything: numba converts each argument if that is safe, and
# raises a TypeError if not. An array in C's order is also one in any order, and one that may be
# written may also be read. So the signature below takes all four kinds. (The price: code for any
# order computes each element's place from strides, which may be slower.)


# %%
def declared_once() -> Callable:
    """Return the function, compiled for images in any order that it only reads."""
    images = numba.types.Array(numba.uint8, 4, "A", readonly=True)
    signature = numba.void(images, numba.int64, numba.uint8[:, :, :, ::1])
    return numba.njit(signature)(brighten)


# %% [markdown]
# ## 2. Once per process
#
# Machine code lies in the memory of the process that has compiled it, and a rank is a process. So n
# ranks fill n tables, with the same code, at the same time, on cores that they share:
#
#     rank 0   import ──compile──> first batch          8 ranks on 8 idle cores: as long as one
#     rank 1   import ──compile──> first batch          8 ranks on 4 cores: twice as long, or more
#     ...                                               and every GPU waits for it
#
# numba counts for itself what it compiles: `stats.cache_misses`, a count per signature, goes up
# with each compilation, with a cache or without.


# %%
def compilations(function: Callable) -> int:
    """Return how often this process has compiled a function."""
    return sum(function.stats.cache_misses.values())


def loads(function: Callable) -> int:
    """Return how often this process has found it, compiled, in the cache on disk."""
    return sum(function.stats.cache_hits.values())


# %% [markdown]
# ## 3. A cache on disk: one rank goes first
#
# With `cache=True` a process that has compiled writes the machine code to a file, and one whose
# table has no entry looks there before it compiles. The files lie in `__pycache__` next to the
# source, or where NUMBA_CACHE_DIR says. But if all ranks look at once, all find nothing, and all
# compile. One must go first:


# %%
def call_on_rank_0_first(function: Callable, images_NHWC: np.ndarray) -> None:
    if RANK == 0:
        brightened(function, images_NHWC)  # compiles, and writes the file
    dist.barrier()
    if RANK != 0:
        brightened(function, images_NHWC)  # reads it


# %% [markdown]
# ## 4. What the cache does not look at
#
# How does the cache know that a file is still right? Its key is the signature, the bytecode of the
# function and the kind of CPU; and if the function's own source file has changed, nothing in the
# cache counts. That leaves a hole. What the function calls becomes part of its machine code, and
# may come from *another* file. Of two files like these, the cache looks at the second alone:


# %%
OTHER = """
import numba

@numba.njit
def gain():
    return {gain}
"""

OWN = """
import numba
from other import gain

@numba.njit(cache=True)
def brighten(x):
    return gain() * x

print(brighten(10))
"""


def run_own(folder: Path) -> int:
    """Run the second file in a new process; return what it prints."""
    command = [sys.executable, "-B", str(folder / "own.py")]  # -B: Python's own cache stays out
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return int(ran.stdout)


def change_files(folder: Path) -> list[int]:
    """Return what it prints at first, after the other file has changed, and after its own has."""
    (folder / "other.py").write_text(OTHER.format(gain=2))
    (folder / "own.py").write_text(OWN)
    printed = [run_own(folder)]
    (folder / "other.py").write_text(OTHER.format(gain=3))
    printed.append(run_own(folder))
    (folder / "own.py").write_text(OWN + "# a comment\n")
    printed.append(run_own(folder))
    return printed


# %% [markdown]
# ## 5. How it is measured
#
# Every rank compiles, and numba's own counters say how often. The folder for the cache is rank 0's,
# and temporary. It lies in the launcher's own folder, if there is one, which is removed even after
# Ctrl-C. The first call's time is that of compiling and that of a later call, so what share of it
# is compiling follows from both.


# %%
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


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """Yield a temporary folder of rank 0's that all ranks use."""
    errors = os.environ.get("TORCHELASTIC_ERROR_FILE")  # in the launcher's folder
    with tempfile.TemporaryDirectory(dir=Path(errors).parent if errors else None) as folder:
        yield Path(from_rank_0(folder))
        dist.barrier()  # it goes when all have used it


def seconds_of(function: Callable, images_NHWC: np.ndarray) -> float:
    start = time.perf_counter()
    brightened(function, images_NHWC)
    return time.perf_counter() - start


def check_processes(images_NHWC: np.ndarray) -> None:
    """Claim how often n ranks compile for one kind of images, and what that costs."""
    function = declared()
    first = seconds_of(function, images_NHWC)
    later = min(seconds_of(function, images_NHWC) for _ in range(3))
    claim("compilations in 4 calls with one kind of images", 1, compilations(function))
    share = 1 - later / first
    claim("share of the first call that is compiling", 1, share, atol=0.1, timed=True)
    print0(f"{'':13}the first call took {first:.2f} s, a later one {later:.4f} s")
    on_all_ranks = sum(gather_objects(compilations(function)))
    claim("compilations on all ranks, no cache", WORLD_SIZE, on_all_ranks, question=2)


# %% [markdown]
# The four kinds are tried on rank 0 alone, by the function as it is usually declared, and by the
# one whose signature was named.


# %%
def call_with_four_kinds(function: Callable, images_NHWC: np.ndarray) -> tuple[int, int]:
    """Return how often this compiles, and how many bytes are not what NumPy computes."""
    wrong = 0
    for images in four_kinds(images_NHWC):
        expected = np.minimum(images.astype(np.uint16) * LIGHT // 64, 255)
        wrong += (brightened(function, images) != expected).sum()
    for signature in function.signatures:
        print0(f"{'':13}compiled for {signature[0]}")
    return compilations(function), int(wrong)


def check_kinds(images_NHWC: np.ndarray) -> None:
    """Claim how often four kinds of images make a function compile."""
    usual = None
    named = None
    if RANK == 0:
        usual = call_with_four_kinds(declared(), images_NHWC)
        named = call_with_four_kinds(declared_once(), images_NHWC)
    usual, usual_wrong = from_rank_0(usual)
    named, named_wrong = from_rank_0(named)
    claim("compilations for 4 kinds of images", 3, usual, question=1)
    claim("compilations for 4 kinds, signature named", 1, named)
    claim("bytes that differ from NumPy's", 0, usual_wrong + named_wrong)


# %% [markdown]
# What loading saves is measured by rank 0 alone, while the others wait.


# %%
def check_cache(images_NHWC: np.ndarray, folder: Path) -> None:
    """Claim how often n ranks compile with a cache on disk, and what loading from it saves."""
    os.environ["NUMBA_CACHE_DIR"] = str(folder)  # your launcher would set it before python starts
    numba.config.reload_config()
    function = declared(cache=True)
    call_on_rank_0_first(function, images_NHWC)
    on_all_ranks = sum(gather_objects(compilations(function)))
    claim("compilations on all ranks, cache, rank 0 first", 1, on_all_ranks, question=3)
    loaded = sum(gather_objects(loads(function)))
    claim("ranks that loaded it from the cache", WORLD_SIZE - 1, loaded)
    ratio = None
    if RANK == 0:
        compiling = seconds_of(declared(), images_NHWC[:1])
        ratio = seconds_of(declared(cache=True), images_NHWC[:1]) / compiling
    at_most = "seconds of the first call, loaded / compiled"
    claim(at_most, 0.3, from_rank_0(ratio), "<=", timed=True)


def check_stale_cache(folder: Path) -> None:
    """Claim what a cached function returns after a change in another file, and in its own."""
    printed = change_files(folder) if RANK == 0 else None
    first, other_changed, own_changed = from_rank_0(printed)
    claim("printed with a gain of 2", 20, first)
    claim("printed with a gain of 3, in the other file", 20, other_changed, question=4)
    claim("printed with a gain of 3, own file changed too", 30, own_changed)


# %% [markdown]
# ## What you should have seen
#
# 1. Three times. 64 images or 2, of whatever size, are one signature. The mirrored view has other
#    strides, A instead of C. The read-only copy is another type, which is why a file that is mapped
#    to be read (FFCV's) costs a compilation that a test with a plain array did not. With a named
#    signature it was compiled once. A loader that stutters now and then may be compiling for a new
#    kind of input: print its functions' `signatures`.
# 2. n times: once in each process. No process knows that another has compiled the same code.
# 3. Once. All others load, which takes a small part of the time. But it is up to you who goes
#    first: the cache has no lock.
# 4. 20: the wrong result, no warning. It was 30 when its own file had changed, by as little as a
#    comment. So keep what is compiled together in one file, or delete the cache when a helper
#    changes.
#
# **Try.** A copy of the mirrored view lies in C's order again: two compilations instead of three,
# one claim fails. Without the barrier the others look into the folder while rank 0 still compiles,
# and find nothing, since compiling takes much longer than the ranks are apart: n compilations,
# nothing loaded, and both claims of the cache fail (on one rank neither does).
#
# **When.** If compiling takes seconds and jobs start often: `cache=True`, and one rank first. If a
# run takes days, forget it; but call the functions once, with every kind of input, before the first
# step, or name their signatures, so that no rank compiles while the others wait for it in a
# collective. FFCV caches nothing; every rank compiles its pipeline at its first batch.
#
# **Threads** are started once per process, too. With `parallel=True` each rank starts as many as
# there are cores that it may run on, whatever OMP_NUM_THREADS says: set NUMBA_NUM_THREADS to a
# rank's share of the cores. In a container with a quota of CPUs these are all cores of the host.
#
# **On GPUs, and at a thousand ranks.** All of this runs on the cores, while the GPUs wait. A
# compilation takes as long on every node, at the same time, and does not grow with their number;
# what grows is the load on a file system that all share. So give each node a folder of its own, on
# its own disk, and let LOCAL_RANK 0 go first on each. Cores of another kind find the files and
# compile anew. An `all_reduce` that one rank reaches late, because it compiles, looks like a slow
# network (profiling/06).


# %%
def main() -> None:
    command_line()
    launch()
    if int(os.environ.get("LOCAL_WORLD_SIZE", WORLD_SIZE)) != WORLD_SIZE:
        refuse(f"needs one node, whose ranks share a folder, got {WORLD_SIZE} ranks on several")
    setup()
    if numba is None:
        blocked("what numba compiles, and how often", needs="numba: pip install -e '.[data]'")
        finish()
    images_NHWC = np.random.default_rng(RANK).integers(0, 256, (64, 160, 240, 3), np.uint8)
    check_processes(images_NHWC)
    check_kinds(images_NHWC)
    with shared_folder() as folder:
        check_cache(images_NHWC, folder)
        check_stale_cache(folder)
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
