"""A custom FFCV operation: what compiled code cannot see
======================================================

**Question.** FFCV makes batches by a chain of operations, and compiles most of them. An operation
of your own needs something that changes between epochs, such as the epoch itself for a random crop.
How does it get there?

**Predict**, and write it down before you run. A file has 64 samples. An operation crops each of
them at a place that depends on the epoch and on the sample's number. Before each epoch the trainer
sets `operation.epoch`.

1. The operation is compiled, and reads `self.epoch` where its code is made. How many of the 64
   samples get in epoch 1 the crop that they had in epoch 0?
2. The operation is called in Python, once per batch. It reads `self.epoch`, computes the batch's
   places, and hands them to a compiled loop. How many samples keep their crop now?
3. n ranks make the second operation's crops, each of its share of the samples. How many bytes
   differ from those that one process cuts out with NumPy?

**Run.**

    torchrun --standalone --nproc-per-node=4 12_own_ffcv_operation.py    # a rank per GPU, else gloo
    python 12_own_ffcv_operation.py                                      # the same, started for you

Not run on several GPUs. One node. FFCV needs the Debian packages of packages.txt, then `pip install
-e '.[ffcv]'`. Without it all is BLOCKED.

**Try.** In `AskingCrop` draw for `np.arange(len(indices_B))` instead of `indices_B`: which claims
fail? In `open_loader` add `recompile=True` to the loader: which claim fails now, and why?

**Before.** data-loading/02_beton_file.py: the file, and a loader's buffers.
data-loading/16_random_states_of_numba.py: why compiled code should not draw its own numbers.

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

Loader = None
Operation = object  # what the classes below derive from where there is no FFCV
if "RANK" in os.environ or WORLD_SIZE > 1:  # a launcher needs none of it
    os.environ["NUMBA_OPT"] = "0"  # compile quickly: nothing here is timed
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

# Letters at the end of a name are the axes of an array: N samples of the file or B of a batch, H x
# W pixels of a picture or S x S of a crop, C = 3 colors; 2 is a place, (y, x).
N = 64
BATCH = 8
HEIGHT = 160
WIDTH = 240
S = 32
CHOICES = (HEIGHT - S + 1, WIDTH - S + 1)  # places for a crop, down and across
SEED = 0

# %% [markdown]
# ## 1. An operation makes a function
#
# A **pipeline** of FFCV is a list of **operations** that a batch goes through:
#
#     pages ──decoder──> pictures ──our operation──> crops ──ToTensor──> the batch that you get
#
# FFCV asks an operation two things. `declare_state_and_memory` says what leaves it: the shape of
# one sample, the type, and whether its function is to be compiled (`jit_mode`), along with the
# memory that FFCV should allocate. `generate_code` returns the function. FFCV calls `generate_code`
# when the loader is made, and the function for each batch: with what the operation before has made,
# the memory to write to and, if it has the attribute `with_indices`, the numbers of the samples.
#
# numba compiles that function when the first batch comes, and there lies the trap. numba knows no
# `self`. What the function uses from outside has to be a local variable of `generate_code`, and
# numba takes that for a **constant**, an array too. This is the idea of the lesson: **compiled code
# keeps what it saw when it was made; what changes must come in as an argument.** The first
# operation does it wrong:


# %%
def draw_corners(epoch: int, samples: np.ndarray) -> np.ndarray:
    """Return the upper left corner (y, x) of each sample's crop, (B, 2), in Python."""
    corners_B2 = np.empty((len(samples), 2), np.int64)
    for i, sample in enumerate(samples.tolist()):
        generator = np.random.default_rng((SEED, epoch, sample))
        corners_B2[i] = generator.random(2) * CHOICES  # cut off to whole numbers
    return corners_B2


def cut_out(images_BHWC: np.ndarray, corners_B2: np.ndarray, crops_BSSC: np.ndarray) -> None:
    """Write each picture's crop; to be compiled."""
    for i in range(len(images_BHWC)):
        y, x = corners_B2[i]
        crops_BSSC[i] = images_BHWC[i, y : y + S, x : x + S]


class FrozenCrop(Operation):
    """The mistake: a crop of each sample, all compiled, for the epoch `self.epoch`."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0

    def declare_state_and_memory(self, previous_state: object) -> tuple:
        state = replace(previous_state, jit_mode=True, shape=(S, S, 3))
        return state, AllocationQuery((S, S, 3), previous_state.dtype)

    def generate_code(self) -> Callable:
        compiled_cut_out = Compiler.compile(cut_out)
        corners_N2 = draw_corners(self.epoch, np.arange(N))  # a constant of what is compiled

        def crop(
            images_BHWC: np.ndarray, crops_BSSC: np.ndarray, indices_B: np.ndarray
        ) -> np.ndarray:
            compiled_cut_out(images_BHWC, corners_N2[indices_B], crops_BSSC)
            return crops_BSSC

        crop.with_indices = True
        return crop


# %% [markdown]
# ## 2. Ask in Python, work in compiled code
#
# With `jit_mode=False` FFCV calls the function as it stands, in Python. It may read `self`, draw
# numbers by NumPy, and hand them as an argument to a loop that it has had compiled:
#
#                     FrozenCrop                        AskingCrop
#     loader made     read self.epoch, draw corners     nothing
#     first batch     compile, with the corners         compile the loop alone
#     each batch      run what was compiled             read self.epoch, draw corners, run it
#
# FFCV calls each operation's function from Python anyway, once per batch, whether it was compiled
# or not. What must not be Python is the loop over pixels, and it is not. To draw takes some ten
# microseconds per sample, little next to decoding a JPEG (data-loading/16).


# %%
class AskingCrop(Operation):
    """A crop of each sample; Python reads `self.epoch` for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0

    def declare_state_and_memory(self, previous_state: object) -> tuple:
        state = replace(previous_state, jit_mode=False, shape=(S, S, 3))
        return state, AllocationQuery((S, S, 3), previous_state.dtype)

    def generate_code(self) -> Callable:
        compiled_cut_out = Compiler.compile(cut_out)

        def ask_and_crop(
            images_BHWC: np.ndarray, crops_BSSC: np.ndarray, indices_B: np.ndarray
        ) -> np.ndarray:
            corners_B2 = draw_corners(self.epoch, indices_B)  # of this epoch
            compiled_cut_out(images_BHWC, corners_B2, crops_BSSC)
            return crops_BSSC

        ask_and_crop.with_indices = True
        return ask_and_crop


# %% [markdown]
# The trainer says which epoch it is, as it does to a `DistributedSampler`. FFCV has a count of its
# own, `next_epoch`, from which it shuffles; both are set here, so a run can go on at any epoch.


# %%
def open_loader(path: Path, operation: "Operation") -> "Loader":
    """Return FFCV's loader of this rank's share of the crops, and of the samples' numbers."""
    gc.collect()  # an old loader, freed while numba compiles, prints "Exception ignored: KeyError"
    pipelines = {
        "image": [SimpleRGBImageDecoder(), operation, ToTensor()],
        "number": [IntDecoder(), ToTensor()],
    }
    options = {"order": OrderOption.RANDOM, "distributed": True, "seed": SEED, "drop_last": False}
    return Loader(str(path), BATCH, num_workers=1, pipelines=pipelines, **options)


def run_epoch(loader: "Loader", operation: "Operation", epoch: int) -> dict[int, bytes]:
    """Return the crop of each sample of this rank's share, by the sample's number."""
    operation.epoch = epoch
    loader.next_epoch = epoch
    crops = {}
    for crops_BSSC, numbers_B1 in loader:
        for i, number in enumerate(numbers_B1.flatten().tolist()):
            crops[number] = crops_BSSC[i].numpy().tobytes()  # a copy: FFCV writes over the batch
    return crops


# %% [markdown]
# ## 3. How it is measured
#
# All samples hold the same picture of noise, so two crops are equal just where their corners are.
# Each rank makes the crops of its share, which is another one in each epoch, so the ranks exchange
# their crops before those of two epochs are compared. The oracle is NumPy: one process, no FFCV,
# the corners drawn and cut out one by one.
#
# `Nameless` keeps FFCV's writer from leaving a file in /dev/shm when it is killed.


# %%
def picture() -> np.ndarray:
    return np.random.default_rng(SEED).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)


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
        writer.from_indexed_dataset([(picture(), number) for number in range(N)])
    for process in multiprocessing.active_children():
        process.join()  # which FFCV forgets


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
# The oracle spells out what `default_rng` does, and draws number by number.


# %%
def crop_by_numpy(epoch: int, sample: int) -> np.ndarray:
    """Return the crop that this sample must have in this epoch."""
    seeds = np.random.SeedSequence([SEED, epoch, sample])
    generator = np.random.Generator(np.random.PCG64(seeds))
    y = math.floor(generator.random() * CHOICES[0])
    x = math.floor(generator.random() * CHOICES[1])
    return picture()[y : y + S, x : x + S]


def crops_of_ranks(loader: "Loader", operation: "Operation", epoch: int) -> dict[int, bytes]:
    """Run an epoch on all ranks; return the crops of all samples, by their numbers."""
    crops = {}
    for share in gather_objects(run_epoch(loader, operation, epoch)):
        crops |= share
    return crops


def bytes_unlike_numpys(crops: dict[int, bytes], epoch: int) -> int:
    unlike = 0
    for sample, crop in crops.items():
        expected = crop_by_numpy(epoch, sample).ravel()
        unlike += (np.frombuffer(crop, np.uint8) != expected).sum()
    return unlike


def same(crops: dict[int, bytes], others: dict[int, bytes]) -> int:
    """Return how many samples have the same crop in both."""
    return sum(crops[sample] == others[sample] for sample in crops)


# %% [markdown]
# Each operation runs epochs 0 and 1, as a trainer would run them.


# %%
def check_operations(path: Path) -> None:
    """Claim what both operations' crops are in two epochs."""
    frozen = FrozenCrop()
    loader = open_loader(path, frozen)
    first = crops_of_ranks(loader, frozen, 0)
    second = crops_of_ranks(loader, frozen, 1)
    claim("frozen: bytes unlike NumPy's, epoch 0", 0, bytes_unlike_numpys(first, 0))
    claim("frozen: samples that keep their crop", N, same(first, second), question=1)

    asking = AskingCrop()
    loader = open_loader(path, asking)
    first = crops_of_ranks(loader, asking, 0)
    second = crops_of_ranks(loader, asking, 1)
    claim("asking: samples that keep their crop", 0, same(first, second), question=2)
    claim("asking: different crops in epoch 1", N, len({*second.values()}))
    unlike = bytes_unlike_numpys(first, 0) + bytes_unlike_numpys(second, 1)
    claim("asking: bytes unlike NumPy's, both epochs", 0, unlike, question=3)
    again = crops_of_ranks(loader, asking, 0)
    claim("asking: samples with the same crop, epoch 0 again", N, same(first, again))


# %% [markdown]
# ## What you should have seen
#
# 1. All 64. The code was made when the attribute was 0, so the corners of epoch 0 became a constant
#    of it. Setting the attribute changes nothing, and nothing says so: the loss falls, on the same
#    crops in every epoch, and only the test accuracy is worse than it should be.
# 2. None. Python reads the attribute once per batch, after the trainer has set it.
# 3. None, on any number of ranks. The corner is a function of seed, epoch and sample, and the
#    operation is told the samples' numbers, so it need not know that there are ranks. Epoch 0 run
#    again gives the same crops again.
#
# **Try.** Drawn by the place in the batch, all samples at one place get the same corner: 8
# different crops in an epoch instead of 64, and the bytes are not NumPy's. Two claims fail. That no
# sample keeps its crop and that epoch 0 repeats itself cannot tell. With `recompile=True` FFCV
# makes the code anew for each epoch, so `FrozenCrop` sees epoch 1: no sample keeps its crop, and
# that row fails. It is a remedy too, at the price of compiling before every epoch.
#
# **Where it bites.** A trainer that forgets `operation.epoch` gets the frozen crops from the second
# operation as well; set it where you set `next_epoch`, or read it there. The function must write
# into the memory that it is given, as FFCV fills one buffer while others wait. An exception in it
# ends FFCV's thread, and your loop waits for its next batch forever: try it on arrays of your own
# first. While Python draws, it holds the GIL; if that shows in a profile, hand over the epoch alone
# and compute the corners in the loop, as data-loading/16 does.
#
# **When.** Write an operation if crops must repeat, which those of FFCV's own augmentations do not.
# If nothing changes between epochs, `jit_mode=True` is enough. What works on whole batches on the
# GPU (`ToDevice`, then a module of PyTorch's) needs none of it.
#
# **On GPUs** the crops are made on the cores all the same; where there is a GPU, FFCV pins the
# memory that the operation writes to, so that `ToDevice` copies from it without waiting. Every rank
# compiles for itself, at the same time, however many there are.


# %%
def main() -> None:
    command_line()
    launch()
    if int(os.environ.get("LOCAL_WORLD_SIZE", WORLD_SIZE)) != WORLD_SIZE:
        refuse(f"needs one node, whose ranks share a folder, got {WORLD_SIZE} ranks on several")
    setup()
    if Loader is None:
        blocked("FFCV's operations", needs="FFCV: make .venv/all")
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
