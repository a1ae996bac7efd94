"""A custom FFCV operation: what compiled code cannot see
======================================================

**Question.** A loop that was compiled needs something that changes between epochs, such as the
epoch itself for a random crop. How does the new value get there, by numba alone and inside FFCV?

**Predict**, and write it down before you run. The epoch is set three times:

    code is made   epoch = 0   `numba.njit` is applied to a function, or FFCV's loader is made
    first run      epoch = 1
    second run     epoch = 2   which epoch does it see: 0, 1 or 2?

1. A compiled function reads the epoch from a global variable.
2. It reads it from a global NumPy array of 64 bytes, which is changed in place.
3. FFCV compiles a function that uses `epoch`, a local variable of the method that returned it.
4. The same, and the loader was made with `recompile=True`.

**Run.**

    torchrun --standalone --nproc-per-node=4 12_own_ffcv_operation.py    # a rank per GPU, else gloo
    python 12_own_ffcv_operation.py                                      # the same, started for you

One node; one rank is enough, and several cut out a share each. Not run on several GPUs.
numba comes with `pip install -e '.[data]'`. FFCV needs the Debian packages of packages.txt, then
`pip install -e '.[ffcv]'`; without it 3 and 4 are BLOCKED.

**Try.** In `AskingCrop.generate_code` write `epoch = self.epoch` above the inner function, and hand
over `epoch`: which claims fail? In `check_numba` let the loop begin with epoch 0: which claims fail
now?

**Before.** data-loading/02_beton_file.py: the file, and a loader's buffers.
data-loading/16_random_states_of_numba.py: random numbers as a function of seed, epoch and sample.

**Next.** data-loading/06_tokens.py: no pictures, but text. (This lesson is optional.)
"""

import argparse
import contextlib
import ctypes
import gc
import io
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
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from multiprocessing import shared_memory
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

numba = None
Loader = None
Operation = object  # what the classes below derive from where there is no FFCV
if "RANK" in os.environ or WORLD_SIZE > 1:  # a launcher needs none of it
    os.environ["NUMBA_OPT"] = "0"  # compile quickly: nothing here is timed
    with contextlib.suppress(ImportError):  # the extra [data]
        import numba
    with contextlib.suppress(ImportError):  # the extra [ffcv]
        from ffcv import writer as ffcv_writer
        from ffcv.fields import IntField, RGBImageField
        from ffcv.fields.decoders import IntDecoder, SimpleRGBImageDecoder
        from ffcv.loader import Loader, OrderOption
        from ffcv.pipeline.allocation_query import AllocationQuery
        from ffcv.pipeline.compiler import Compiler
        from ffcv.pipeline.operation import Operation
        from ffcv.transforms import ToTensor
        from ffcv.writer import DatasetWriter

# Letters at the end of a name are the axes of an array: B samples of a batch, H x W pixels of a
# picture or S x S of a crop, C = 3 colors.
N = 64  # samples
WORKERS = 1  # threads of a loader; compiling for more takes longer
BATCH = 8
HEIGHT = 160
WIDTH = 240
S = 32
DOWN = HEIGHT - S + 1  # places for a crop
ACROSS = WIDTH - S + 1
SEED = 0

# %% [markdown]
# ## 1. Compiled code keeps what it saw
#
# numba compiles a function when it is **called for the first time**. What the function uses from
# outside, a global variable or one of an enclosing function, is a **constant** of the machine code
# from then on. So are the contents of an array of at most a million bytes. (Of a larger one, or one
# with gaps, the code keeps the address. Do not rely on it.) What comes in as an argument is read in
# each call. This is the idea of the lesson: **what changes must be an argument.**
#
# Here are three ways to tell a function the epoch. Python calls each as you expect.

# %%
EPOCH = 0
ARRAY = np.zeros(8, np.int64)  # 64 bytes


def read_global() -> int:
    return EPOCH


def read_array() -> int:
    return ARRAY[0]


def read_argument(epoch: int) -> int:
    return epoch


def set_epoch(epoch: int) -> None:
    global EPOCH
    EPOCH = epoch
    ARRAY[0] = epoch


# %% [markdown]
# ## 2. Inside FFCV
#
# A **pipeline** of FFCV is a list of **operations** that a batch goes through:
#
#     pages ──decoder──> pictures ──our operation──> crops ──ToTensor──> the batch that you get
#
# An operation has two methods. FFCV calls both when the loader is made.
#
# - `declare_state_and_memory` says what comes out: the shape of a sample, its type, and whether
#   FFCV is to compile the function (`jit_mode`); and which memory it needs to write to.
# - `generate_code` returns the function that FFCV calls for each batch: with the batch, the memory,
#   and the numbers of the samples if the function has an attribute `with_indices`.
#
# Our operation crops each picture at a place that is mixed from epoch and sample. This is its loop.
# Like those of FFCV's own operations it asks FFCV over what to loop, and says `is_parallel`: in a
# loader with several workers, numba divides the batch among as many threads.


# %%
def compiled_cut_out() -> Callable:
    """Return a loop that writes the crop of each picture of a batch, to be compiled."""
    batch_range = Compiler.get_iterator()  # numba's prange; or range, if there is one worker

    def cut_out(
        images_BHWC: np.ndarray, crops_BSSC: np.ndarray, samples_B: np.ndarray, epoch: int
    ) -> None:
        for i in batch_range(len(images_BHWC)):
            count = epoch * N + np.int64(samples_B[i]) + 1
            mixed = count * 950_706_376 % 2_147_483_647  # data-loading/16 has a better mix
            y = mixed % DOWN
            x = mixed // DOWN % ACROSS
            crops_BSSC[i] = images_BHWC[i, y : y + S, x : x + S]

    cut_out.is_parallel = True
    return Compiler.compile(cut_out)


# %% [markdown]
# The function that FFCV compiles gets no `self`, only arrays. So in the first version the epoch has
# to be a local variable of `generate_code`:


# %%
class FrozenCrop(Operation):
    """The mistake: all compiled, for the epoch that `self.epoch` was when the loader was made."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0

    def declare_state_and_memory(self, previous_state: object) -> tuple:
        state = replace(previous_state, jit_mode=True, shape=(S, S, 3))
        return state, AllocationQuery((S, S, 3), previous_state.dtype)

    def generate_code(self) -> Callable:
        cut_out = compiled_cut_out()
        epoch = self.epoch

        def crop(
            images_BHWC: np.ndarray, crops_BSSC: np.ndarray, samples_B: np.ndarray
        ) -> np.ndarray:
            cut_out(images_BHWC, crops_BSSC, samples_B, epoch)
            return crops_BSSC

        crop.with_indices = True
        return crop


# %% [markdown]
# With `jit_mode=False` FFCV calls the function as it stands, in Python, once per batch. It may read
# `self`, and hand what it finds to the loop, which stays machine code. This costs one more call in
# Python per batch, and no more: FFCV 1.0.2 compiles the function of each operation by itself, and
# calls one after the other from Python, whatever their mode.


# %%
class AskingCrop(FrozenCrop):
    """Python reads `self.epoch` for each batch, and the compiled loop gets it as an argument."""

    def declare_state_and_memory(self, previous_state: object) -> tuple:
        state, memory = super().declare_state_and_memory(previous_state)
        return replace(state, jit_mode=False), memory

    def generate_code(self) -> Callable:
        cut_out = compiled_cut_out()

        def ask_and_crop(
            images_BHWC: np.ndarray, crops_BSSC: np.ndarray, samples_B: np.ndarray
        ) -> np.ndarray:
            cut_out(images_BHWC, crops_BSSC, samples_B, self.epoch)
            return crops_BSSC

        ask_and_crop.with_indices = True
        return ask_and_crop


# %% [markdown]
# The trainer sets the epoch, as it does for a `DistributedSampler`. Each rank gets its share of the
# samples. The operation is told their numbers, so it need not know that there are ranks.


# %%
def open_loader(path: Path, operation: "Operation", recompile: bool = False) -> "Loader":
    """Return FFCV's loader of this rank's share of the crops, and of the samples' numbers."""
    gc.collect()  # an old loader, freed while numba compiles, prints "Exception ignored: KeyError"
    pipelines = {
        "image": [SimpleRGBImageDecoder(), operation, ToTensor()],
        "number": [IntDecoder(), ToTensor()],
    }
    options = {"order": OrderOption.RANDOM, "distributed": True, "seed": SEED, "drop_last": False}
    options |= {"num_workers": WORKERS, "recompile": recompile}
    return Loader(str(path), BATCH, pipelines=pipelines, **options)


def run_epoch(loader: "Loader", operation: "Operation", epoch: int) -> dict[int, bytes]:
    """Return the crop of each sample of this rank's share, by the sample's number."""
    operation.epoch = epoch
    crops = {}
    for crops_BSSC, numbers_B1 in loader:
        for i, number in enumerate(numbers_B1.flatten().tolist()):
            crops[number] = crops_BSSC[i].numpy().tobytes()  # a copy: FFCV writes over the batch
    return crops


# %% [markdown]
# ## 3. How it is measured
#
# All samples hold the same picture of noise, so a crop says where it was cut out. The oracle is
# NumPy: one process, no FFCV, nothing compiled. Crops are of epoch e if all are what the oracle
# cuts out in epoch e.

# %%
PICTURE = np.random.default_rng(SEED).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)


def crop_by_numpy(epoch: int, sample: int) -> bytes:
    """Return the crop that this sample must have in this epoch."""
    mixed = 950_706_376 * (N * epoch + sample + 1) % (2**31 - 1)
    x, y = divmod(mixed, DOWN)
    x %= ACROSS
    return PICTURE[y : y + S, x : x + S].tobytes()


def epoch_of(crops: dict[int, bytes]) -> float:
    """Return of which epoch all of these crops are; nan if of none."""
    for epoch in range(3):
        if all(crops[sample] == crop_by_numpy(epoch, sample) for sample in crops):
            return epoch
    return math.nan


def from_rank_0(value: object) -> object:
    """Return rank 0's `value` on every rank."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


# %% [markdown]
# First numba alone, then the operations, each through two epochs.


# %%
def check_numba() -> None:
    """Claim which epoch compiled functions see in their second call."""
    if numba is None:
        blocked("what compiled functions see", needs="numba: pip install -e '.[data]'")
        return
    by_global = numba.njit(read_global)
    by_array = numba.njit(read_array)
    by_argument = numba.njit(read_argument)
    for epoch in (1, 2):
        set_epoch(epoch)
        seen = [by_global(), by_array(), by_argument(EPOCH)]
    claim("epoch seen in a global", 1, seen[0], question=1)
    claim("epoch seen in an array of 64 bytes", 1, seen[1], question=2)
    claim("epoch seen in an argument", 2, seen[2])


def epochs_seen(path: Path, operation: "Operation", recompile: bool = False) -> list[float]:
    """Run an epoch set to 1 and one set to 2; return of which epoch the crops of each are."""
    loader = open_loader(path, operation, recompile)
    return [epoch_of(run_epoch(loader, operation, epoch)) for epoch in (1, 2)]


def check_operations(path: Path) -> None:
    """Claim of which epoch the crops of the operations are, in a first and a second epoch."""
    first, second = epochs_seen(path, FrozenCrop())
    claim("FrozenCrop, set to 1: crops are of epoch", 0, first)
    claim("FrozenCrop, set to 2: crops are of epoch", 0, second, question=3)
    seen = epochs_seen(path, FrozenCrop(), recompile=True) if RANK == 0 else None
    first, second = from_rank_0(seen)  # one rank is enough: to compile takes seconds
    claim("recompiled, set to 2: crops are of epoch", 2, second, question=4)
    first, second = epochs_seen(path, AskingCrop())
    claim("AskingCrop, set to 1: crops are of epoch", 1, first)
    claim("AskingCrop, set to 2: crops are of epoch", 2, second)


# %% [markdown]
# ## What you should have seen
#
# 1. Epoch 1. Not 0: nothing is compiled when `njit` is applied. Not 2: the first call made a
#    constant of it.
# 2. Epoch 1: the array's contents were copied into the code by the first call.
# 3. Epoch 0. The local variable was set in `generate_code`, when the loader was made, long before
#    numba compiled. Setting the attribute changes nothing, and nothing says so: the loss falls, on
#    the same crops in every epoch, and only the test accuracy is worse than it should be.
# 4. Epoch 2: FFCV calls `generate_code` anew as each epoch begins. It is a remedy, at the price of
#    compiling before every epoch, which takes several seconds (the first batches in this folder's
#    README). `AskingCrop` sees epoch 2 as well, and compiles once: Python reads the attribute after
#    the trainer has set it, and passes a number.
#
# **Try.** With the local variable both rows of AskingCrop show 0 and fail, though its function is
# Python: what counts is when the value is *read*. With epoch 0 first, the rows of questions 1 and 2
# show 0 and fail. One call to warm up, before the epoch is set, is enough to freeze it.
#
# **When.** Write an operation if crops must repeat in a second run, which those of FFCV's own
# augmentations do not. If nothing changes between epochs, `jit_mode=True` is enough. What works on
# whole batches on the GPU (`ToDevice`, then a module of PyTorch's) needs none of it. Hand over
# one number per batch, as here: to draw some per sample in Python takes longer than a small crop
# (data-loading/16).
#
# **Where it bites.** A trainer that forgets `operation.epoch` gets frozen crops from `AskingCrop`
# as well. An exception in an operation ends FFCV's thread, and your loop waits for its next batch
# forever: try the function on arrays of your own first. And numba is not alone. `jax.jit` keeps
# what it saw in a global, a CUDA graph replays kernels with the numbers they were captured with;
# `torch.compile` guards what it saw, and compiles again when that has changed.
#
# **On GPUs** the crops are made on the cores all the same; where there is a GPU, FFCV pins the
# memory that the operation writes to, so that `ToDevice` copies from it without waiting. Every rank
# compiles for itself, at the same time, however many there are.

# %% [markdown]
# You need not read how the file is written: by FFCV's own writer, and so that a writer that is
# killed leaves nothing in /dev/shm.


# %%
class Nameless(shared_memory.SharedMemory):
    """Shared memory that forked processes inherit, and that no kill leaves behind by its name."""

    def __init__(self, *given: object, **options: object) -> None:
        super().__init__(*given, **options)
        super().unlink()

    def unlink(self) -> None:
        """Nothing: its name went when it came."""


def write_pictures(path: Path) -> None:
    """Write N samples, raw pixels of the same picture and the sample's number, into a file."""
    multiprocessing.set_start_method("fork", force=True)  # FFCV's writer inherits the pictures
    ffcv_writer.shared_memory = SimpleNamespace(SharedMemory=Nameless)
    fields = {"image": RGBImageField("raw"), "number": IntField()}
    writer = DatasetWriter(str(path), fields, page_size=2**21, num_workers=1)
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        writer.from_indexed_dataset([(PICTURE, number) for number in range(N)])
    for process in multiprocessing.active_children():
        process.join()  # which FFCV forgets


def main() -> None:
    command_line()
    launch()
    if int(os.environ.get("LOCAL_WORLD_SIZE", WORLD_SIZE)) != WORLD_SIZE:
        refuse(f"needs one node, whose ranks share a folder, got {WORLD_SIZE} ranks on several")
    setup()
    check_numba()
    if Loader is None:
        blocked("what FFCV's operations see", needs="FFCV: make .venv/all")
        finish()
    errors = os.environ.get("TORCHELASTIC_ERROR_FILE")  # in the launcher's folder
    here = Path(errors).parent if errors else None
    with tempfile.TemporaryDirectory(prefix="noise-", dir=here) as folder:
        path = Path(from_rank_0(folder)) / "noise.beton"
        if RANK == 0:
            write_pictures(path)
        dist.barrier()
        check_operations(path)
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
