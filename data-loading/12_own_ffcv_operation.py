"""A custom FFCV operation: Python for each batch, compiled code for each pixel
============================================================================

**Question.** FFCV makes batches by operations, in a thread of its own and mostly in compiled code.
What must an operation of your own declare and do, and how does it learn the epoch, which compiled
code cannot see?

**Predict**, and write it down before you run. The file has 64 samples; a batch has 8.

1. FFCV prepares three batches ahead of the one that you hold. In how many different buffers do
   the crops of an epoch lie?
2. Compiled code of an operation uses a number that `generate_code` read from an attribute. The
   trainer sets the attribute to 0, runs an epoch, sets it to 1, and runs another. Which number does
   the second epoch use?
3. An operation does its work in compiled code, and what must change between epochs in Python. How
   often in an epoch does its Python function run?

**Run.**

    torchrun --standalone --nproc-per-node=4 12_own_ffcv_operation.py    # a rank per GPU, else gloo
    python 12_own_ffcv_operation.py                                      # the same, started for you

Not run on several GPUs. FFCV needs the Debian packages of packages.txt, then `pip install -e
'.[ffcv]'`. Without it all but one row is BLOCKED.

**Try.** In `draw_and_augment` draw for `range(len(indices))` instead of `indices`: which claims
fail, and how many different crops remain? In `open_loader` let `epoch_now` return 0, as if the
trainer had forgotten the epoch: which claims fail now?

**Before.** data-loading/02_beton_file.py: the file, and a loader's buffers.
data-loading/05_random_numbers.py: why compiled code should not draw its random numbers itself.

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
if "RANK" in os.environ and RANK == 0:  # which alone runs FFCV: it compiles for seconds
    os.environ["NUMBA_OPT"] = "0"  # compile quickly: nothing here is timed
    with contextlib.suppress(ImportError):  # the extra [ffcv]
        import numba
        from ffcv import writer as ffcv_writer
        from ffcv.fields import IntField, RGBImageField
        from ffcv.fields.decoders import IntDecoder, SimpleRGBImageDecoder
        from ffcv.loader import Loader, OrderOption
        from ffcv.pipeline.allocation_query import AllocationQuery
        from ffcv.pipeline.compiler import Compiler
        from ffcv.pipeline.operation import Operation
        from ffcv.transforms import ToTensor
        from ffcv.writer import DatasetWriter

# Shapes: B samples of a batch, H x W pixels of a picture, S x S of a crop, C = 3 colors.
N = 64  # samples
BATCH = 8
HEIGHT = 160
WIDTH = 240
S = 128
CUT = 32  # height and width of the square that is blackened
SEED = 0

# The smallest y, x, flip, light, cut_y and cut_x of a crop, and how many choices there are for each
LEAST = (0, 0, 0, 32, 0, 0)
CHOICES = (HEIGHT - S + 1, WIDTH - S + 1, 2, 65, S - CUT + 1, S - CUT + 1)

# %% [markdown]
# ## 1. What an operation declares, and what FFCV does with it
#
# A **pipeline** of FFCV is a list of **operations** that a batch goes through:
#
#     pages ──decoder──> pictures ──our operation──> crops ──ToTensor──> the batch that you get
#              compiled             Python, then
#                                   compiled code
#
# An operation answers two calls. `declare_state_and_memory` gets the *state* of what arrives:
# shape of one sample, dtype, device, and whether the code is to be compiled (`jit_mode`). It
# returns the state of what leaves, and how much memory that takes per sample. FFCV asks when the
# loader is made and at the beginning of each epoch, and allocates the memory once per epoch, for
# several batches. Such a buffer of a batch is a **slot**:
#
#     slot 0   slot 1   slot 2   slot 3   slot 4
#     yours    ready    ready    ready    being filled        then the roles move on by one
#
# `generate_code` returns the function that does the work. FFCV calls it once for each batch, in a
# thread that it starts anew for each epoch, with what the operation before has made, the memory of
# this slot and, if the function has the attribute `with_indices`, the numbers of the samples. The
# function must write into the memory that it is given: a buffer of its own would be overwritten
# while a batch in it still waits.
#
# One operation that makes four changes in one pass needs one set of slots, where four operations
# would need four, and would write and read every pixel four times. This is the pass, for one
# sample: plain loops, to be compiled.


# %%
def augment(image_HWC: np.ndarray, numbers: np.ndarray, crop_SSC: np.ndarray) -> None:
    """Crop, mirror, brighten and cut out, in one pass; `numbers` are y, x, flip and so on."""
    y, x, flip, light, cut_y, cut_x = numbers
    for row in range(S):
        for column in range(S):
            in_square = 0 <= row - cut_y < CUT and 0 <= column - cut_x < CUT
            from_column = S - 1 - column if flip else column
            for color in range(3):
                value = image_HWC[y + row, x + from_column, color]
                bright = min(value * light // 64, 255)
                crop_SSC[row, column, color] = 0 if in_square else bright


# %% [markdown]
# ## 2. What compiled code cannot see
#
# If the state that leaves says `jit_mode=True`, FFCV compiles the function by numba. numba knows no
# `self`: it cannot read an attribute of the operation while it runs. What the function uses from
# outside has to be a local variable of `generate_code`. numba takes that for a **constant**, an
# array too. FFCV calls `generate_code` when the loader is made, and uses that code in every
# epoch. The operation below tries it: it replaces each sample's integer by the epoch that its
# compiled code knows.
#
# A loader with `recompile=True` makes and compiles the code anew for each epoch. That is right, and
# every epoch begins with seconds of waiting.


# %%
class Stamp(Operation):
    """Replaces an integer by `self.epoch`, as it was when the code was made."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0

    def declare_state_and_memory(self, previous_state: object) -> tuple:
        state = replace(previous_state, jit_mode=True)
        return state, AllocationQuery(previous_state.shape, previous_state.dtype)

    def generate_code(self) -> Callable:
        epoch = self.epoch

        def stamp(numbers_B1: np.ndarray, stamped_B1: np.ndarray) -> np.ndarray:
            stamped_B1[:] = epoch
            return stamped_B1

        return stamp


# %% [markdown]
# ## 3. Python once per batch, compiled code for the pixels
#
# With `jit_mode=False` FFCV calls the function as it stands, in Python. It may read `self`, ask for
# the epoch, draw random numbers by NumPy, and then hand pictures, numbers and memory as arguments
# to a loop that it has had compiled. Nothing is lost by it: FFCV calls each operation's function
# from Python anyway, once per batch.
#
# The loop over samples and pixels is the work. FFCV's `Compiler` compiles it as it does FFCV's own
# operations: to run without the GIL and, if the loader has several workers, on as many threads,
# which `prange` divides the samples among.


# %%
def compiled_loop() -> Callable:
    """Return `augment` over a batch, compiled for as many threads as the loader has workers."""
    augment_one = Compiler.compile(augment)
    prange = Compiler.get_iterator()  # plain range, if there is one worker

    def augment_batch(
        images_BHWC: np.ndarray, numbers_B6: np.ndarray, crops_BSSC: np.ndarray
    ) -> None:
        for i in prange(len(images_BHWC)):
            augment_one(images_BHWC[i], numbers_B6[i], crops_BSSC[i])

    augment_batch.is_parallel = True
    return Compiler.compile(augment_batch)


# %% [markdown]
# This is the whole operation. Nothing random happens in compiled code, so lesson 05's rule is easy
# to keep: **a crop's numbers are a function of seed, epoch and sample**, here by a Generator for
# each sample.


# %%
def draw_numbers(seed: int, epoch: int, samples: np.ndarray) -> np.ndarray:
    """Return six whole numbers for each sample's crop, (B, 6)."""
    floats = [np.random.default_rng((seed, epoch, int(one))).random(6) for one in samples]
    return LEAST + (np.array(floats) * CHOICES).astype(np.int64)


class FusedAugment(Operation):
    """A crop of each sample; `epoch_now()` says for which epoch."""

    def __init__(self, seed: int, epoch_now: Callable[[], int]) -> None:
        super().__init__()
        self.seed = seed
        self.epoch_now = epoch_now

    def declare_state_and_memory(self, previous_state: object) -> tuple:
        state = replace(previous_state, jit_mode=False, shape=(S, S, 3))
        return state, AllocationQuery((S, S, 3), previous_state.dtype)

    def generate_code(self) -> Callable:
        augment_batch = compiled_loop()

        def draw_and_augment(
            images_BHWC: np.ndarray, crops_BSSC: np.ndarray, indices: np.ndarray
        ) -> np.ndarray:
            numbers_B6 = draw_numbers(self.seed, self.epoch_now(), indices)
            augment_batch(images_BHWC, numbers_B6, crops_BSSC)
            return crops_BSSC

        draw_and_augment.with_indices = True
        return draw_and_augment


# %% [markdown]
# **Where the epoch comes from.** A loader counts its epochs in `next_epoch`, by which it seeds the
# order of the samples, and which it moves on when an epoch begins. An attribute that the trainer
# sets would be a second count, and forgetting it would give every sample the same crop forever. So
# the operation asks the loader. A trainer that resumes at epoch 7 sets `loader.next_epoch = 7`, and
# gets the order and the crops of epoch 7.
#
# The loader needs the operation, and the operation the loader: `epoch_now` is a function that finds
# `loader` when it is called. It is called in FFCV's thread, for each batch.


# %%
def open_loader(path: Path, workers: int) -> tuple["Loader", Stamp, list[int]]:
    """Return FFCV's loader, the stamp's operation, and the list of epochs that were asked for."""
    asked = []

    def epoch_now() -> int:
        asked.append(loader.next_epoch - 1)  # it counts the epoch that is running already
        return asked[-1]

    stamp = Stamp()
    pipelines = {
        "image": [SimpleRGBImageDecoder(), FusedAugment(SEED, epoch_now), ToTensor()],
        "number": [IntDecoder(), stamp, ToTensor()],
    }
    options = {"order": OrderOption.RANDOM, "seed": SEED, "num_workers": workers}
    loader = Loader(str(path), BATCH, pipelines=pipelines, **options)
    return loader, stamp, asked


# %% [markdown]
# ## 4. How it is measured
#
# Rank 0 alone runs FFCV, with two workers if there are two cores. All samples of its file hold the
# same picture, of noise, so that two crops differ just where their numbers do. There are more
# batches than slots, so each slot is used again. The crops are cloned, since their slots are
# filled anew, and put in the order of the samples.
#
# The oracle makes a crop by NumPy's slices. It spells out the Generator that `default_rng` makes,
# and draws from it number by number. Every rank makes the crops of its share of the samples, and
# compares them with rank 0's.


# %%
def from_rank_0(value: object) -> object:
    """Return rank 0's `value` on every rank."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def picture() -> np.ndarray:
    return np.random.default_rng(SEED).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)


def crop_by_numpy(epoch: int, sample: int) -> np.ndarray:
    """Return the crop that this sample must have in this epoch."""
    seeds = np.random.SeedSequence([SEED, epoch, sample])
    generator = np.random.Generator(np.random.PCG64(seeds))
    numbers = []
    for least, choices in zip(LEAST, CHOICES, strict=True):
        numbers.append(least + math.floor(generator.random() * choices))
    y, x, flip, light, cut_y, cut_x = numbers
    crop_SSC = picture()[y : y + S, x : x + S].astype(np.int64)
    mirrored = crop_SSC[:, ::-1] if flip else crop_SSC
    bright = np.minimum(mirrored * light // 64, 255)
    bright[cut_y : cut_y + CUT, cut_x : cut_x + CUT] = 0
    return bright


def check_pass() -> None:
    """Claim, without FFCV and not compiled, that the pass makes the crop of slices."""
    crop_SSC = np.empty((S, S, 3), np.uint8)
    augment(picture(), draw_numbers(SEED, 0, np.array([RANK]))[0], crop_SSC)
    wrong = (crop_SSC != crop_by_numpy(0, RANK)).sum()
    claim("bytes in which the pass differs from NumPy's", 0, wrong)


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


# %% [markdown]
# An epoch is run as a trainer would run it. The file lies in a temporary folder, inside the
# launcher's own if there is one, which is removed even after Ctrl-C.


# %%
class Epoch:
    """What an epoch of the loader delivers: crops by sample, stamps, and buffers."""

    def __init__(self, loader: "Loader") -> None:
        self.order = loader.next_traversal_order()
        batches = []
        self.stamps = set()
        self.buffers = set()
        for crops_BSSC, stamps_B1 in loader:
            batches.append(crops_BSSC.clone())
            self.stamps |= {*stamps_B1.flatten().tolist()}
            self.buffers.add(crops_BSSC.data_ptr())
        self.crops_NSSC = np.empty((N, S, S, 3), np.uint8)
        self.crops_NSSC[self.order] = torch.cat(batches).numpy()


def run_epochs() -> dict:
    """On rank 0: write the file, run epochs 0 and 1, then 1 again; return what is to be claimed."""
    gc.collect()  # no old function may be freed while FFCV compiles
    errors = os.environ.get("TORCHELASTIC_ERROR_FILE")  # in the launcher's folder
    with tempfile.TemporaryDirectory(dir=Path(errors).parent if errors else None) as folder:
        path = Path(folder) / "noise.beton"
        write_pictures(path)
        loader, stamp, asked = open_loader(path, min(2, numba.config.NUMBA_NUM_THREADS))
        first = Epoch(loader)
        stamp.epoch = 1
        second = Epoch(loader)
        calls = len(asked) / 2
        loader.next_epoch = 1
        again = Epoch(loader)
    moved = (again.order != second.order).sum()
    return {
        "buffers": len(first.buffers),
        "stamp": max(second.stamps),
        "calls": calls,
        "crops": [first.crops_NSSC, second.crops_NSSC],
        "unlike": (again.crops_NSSC != second.crops_NSSC).sum() + moved,
    }


def check_operation() -> None:
    """Claim what FFCV's operation does in two epochs; every rank checks its share of the crops."""
    if from_rank_0(Loader is None):
        blocked("FFCV's operation", needs="FFCV: make .venv/all")
        return
    found = from_rank_0(run_epochs() if RANK == 0 else None)
    claim("buffers in which an epoch's crops lie", 3 + 2, found["buffers"], question=1)
    claim("epoch that compiled code uses in the second", 0, found["stamp"], question=2)
    claim("calls of Python in an epoch", N // BATCH, found["calls"], question=3)
    wrong = 0
    for epoch, crops_NSSC in enumerate(found["crops"]):
        for sample in range(RANK, N, WORLD_SIZE):
            wrong += (crops_NSSC[sample] != crop_by_numpy(epoch, sample)).sum()
    claim("bytes in which FFCV's crops differ from NumPy's", 0, wrong)
    first, second = found["crops"]
    same = (first == second).all((1, 2, 3)).sum()
    claim("samples with the same crop in both epochs", 0, same)
    crops = {crop_SSC.tobytes() for crop_SSC in np.concatenate(found["crops"])}
    claim("different crops that FFCV made in 2 epochs", 2 * N, len(crops))
    claim("bytes and places unlike epoch 1's, run again", 0, found["unlike"])


# %% [markdown]
# ## What you should have seen
#
# 1. Five: the batch that you work with, three that are ready, and one that is being filled. A batch
#    that you keep for longer changes under your hands: clone it.
# 2. 0. The code was made when the attribute was 0, and the number became a constant of it. Setting
#    the attribute changes nothing, and nothing says so.
# 3. 8, once for each batch. All that Python does here is to ask for the epoch and to draw 48
#    numbers; each pixel's work is compiled.
#
# The crops are NumPy's to the bit, in every slot, with two workers and in both epochs. Each rank
# has found its share equal, so a crop is the same on the rank that would make it and on rank 0.
# Epoch 1, begun again by its number, gives the same order and the same crops.
#
# **Try.** Drawn by the place in the batch, all samples at one place get the same numbers: 8 x 2 =
# 16 different crops in two epochs, and the bytes differ. No sample keeps its crop, so that row does
# not tell. With an epoch of 0 forever all 64 samples keep their crops, 64 different ones remain,
# and those of the second epoch are not NumPy's. Epoch 1 run again is the same, so that row does
# not tell, either.
#
# **Where it bites.** An exception in an operation's function ends FFCV's thread, and your loop
# waits for its next batch forever: try the function on arrays of your own first, as `check_pass`
# does. Two epochs of one loader that run at once ask for the same `next_epoch`; begin one when the
# other is over. FFCV's thread holds the GIL while it draws: for hundreds of samples per batch, mix
# the numbers in compiled code, as lesson 05 does, and hand the epoch over as an argument.
#
# **When.** Write an operation if crops must repeat, which those of FFCV's own augmentations do not
# (its pull request 89 would let you seed them), or if one pass is to replace several. If nothing
# has to change between epochs, `jit_mode=True` and one compiled function are enough. What works on
# whole batches on the GPU (`ToDevice`, then a module of PyTorch's) needs none of it.
#
# On n ranks each opens a loader with `distributed=True`, compiles once, and makes the crops of the
# samples that are its own; the operation knows nothing of ranks and needs to know nothing. Where
# there is a GPU, FFCV pins the slots, so that `ToDevice` copies from them without waiting.


# %%
def main() -> None:
    command_line()
    launch()
    setup()
    check_pass()
    check_operation()
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
