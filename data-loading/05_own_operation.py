"""Random numbers in compiled code: who seeds them, and an FFCV operation of one's own
===================================================================================

**Question.** Compiled code has a random state of its own. Who must seed it, and by what, so that
ranks, threads and epochs draw different crops, and a second run draws the same ones again?

**Predict**, and write it down before you run:

1. Each of n ranks calls `np.random.seed(0)` in Python, then a function that draws 64 crops by
   `np.random`. How many different sequences of crops do the ranks draw? How many if numba has
   compiled the function?
2. How many if the compiled function itself calls `np.random.seed(0)` first? And if it seeds by the
   rank?
3. Compiled code seeds by 0 on one thread; then a new thread lets compiled code draw 64 crops. This
   is done twice. How many different sequences come out?
4. Compiled code seeds anew before it draws the crop of each sample, by `seed + sample`. Of the 64
   crops of epoch 1, how many has epoch 0 drawn too? How many with `seed + epoch + sample`?

**Run.**

    torchrun --standalone --nproc-per-node=4 05_own_operation.py    # one rank per GPU, else gloo
    python 05_own_operation.py                                      # the same, started for you

Not run on several GPUs. numba comes with `pip install -e '.[data]'`; the last claims need FFCV: the
Debian packages of packages.txt, then `pip install -e '.[ffcv]'`.

**Try.** In `declare_state_and_memory` let the second shape be `(1,)`: which claims fail? In `fused`
write `i` for `indices[i]`: which ones now, and would a loss curve tell?

**Before.** data-loading/04_jit_augmentation.py: compiled loops under FFCV's threads.

**Next.** data-loading/06_tokens.py
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

try:
    import numba
except ImportError:  # it comes with the extra [data]
    numba = None

Loader = None
Operation = object
if "RANK" in os.environ and RANK == 0:  # which alone runs FFCV
    with contextlib.suppress(ImportError):  # the extra [ffcv]
        from ffcv.fields import RGBImageField
        from ffcv.fields.decoders import SimpleRGBImageDecoder
        from ffcv.loader import Loader, OrderOption
        from ffcv.pipeline.allocation_query import AllocationQuery
        from ffcv.pipeline.compiler import Compiler
        from ffcv.pipeline.operation import Operation
        from ffcv.transforms import ToTensor
        from ffcv.writer import DatasetWriter

N = 64  # samples, each a picture of HEIGHT x WIDTH pixels of three bytes
HEIGHT = 160
WIDTH = 240
S = 128  # height and width of a crop
CUT = 32  # height and width of the square that cutout blackens
SEED = 0

# %% [markdown]
# ## 1. Compiled code has its own random state, one per thread
#
# In code that numba has compiled, `np.random` is not NumPy's. numba has written it anew, in machine
# code, with a state that no Python code sees:
#
#     Python           np.random.seed(0) ──> NumPy's state         one per process
#     compiled code    np.random.seed(0) ──> numba's state         one per thread
#
# numba's state begins with random bytes from the operating system. Nothing sets it but a call of
# `np.random.seed` in compiled code, on this very thread. This is the idea of the lesson: **who
# seeds it decides which crops ranks, threads and epochs draw.**
#
# - Nobody does, since the script seeds in Python: no run can be repeated.
# - Compiled code does, by the same number on all ranks: all ranks crop alike, which no log shows.
# - One thread does and another draws: as if nobody had.
#
# The function below draws six whole numbers per crop: where it lies, whether it is mirrored, how
# bright it is in 64ths, and where a square of it is blackened. It runs as it stands, and compiled.


# %%
AS_IT_IS = -1

# The smallest y, x, flip, light, cut_y and cut_x, and how many choices there are for each:
LEAST = (0, 0, 0, 32, 0, 0)
CHOICES = (HEIGHT - S + 1, WIDTH - S + 1, 2, 65, S - CUT + 1, S - CUT + 1)


def draw_crops(draws: np.ndarray, seed: int) -> None:
    """Draw six numbers per crop by `np.random`, seeded before unless `seed` is AS_IT_IS."""
    if seed != AS_IT_IS:
        np.random.seed(seed)
    for i in range(len(draws)):
        for k in range(6):
            draws[i, k] = LEAST[k] + int(np.random.random() * CHOICES[k])


# %% [markdown]
# ## 2. A seed for each sample and epoch
#
# FFCV augments in a thread of its own, a new one in each epoch, and with several workers in threads
# of numba's. So seed right before each draw, on the thread that draws, by a number that says what
# is drawn: the run's seed, the epoch and the sample. Then the order does not matter, nor do
# threads or the number of ranks, and every crop can be computed again.
#
# It must not be their sum: the sums of different triples are often equal. `mixed` scrambles after
# each addition, as the generator **splitmix64** does (Steele, Lea and Flood, 2014): it multiplies
# by large odd numbers modulo 2^64, and folds the upper bits onto the lower ones. `np.random.seed`
# takes 32 bits.


# %%
STEP = np.uint64(0x9E3779B97F4A7C15)
FACTOR_1 = np.uint64(0xBF58476D1CE4E5B9)
FACTOR_2 = np.uint64(0x94D049BB133111EB)


def by_sample(seed: int, epoch: int, sample: int) -> int:
    return seed + sample


def by_sum(seed: int, epoch: int, sample: int) -> int:
    return seed + epoch + sample


def mixed(seed: int, epoch: int, sample: int) -> int:
    """Return 32 bits that depend on all three; to be compiled: its sums must wrap around."""
    z = np.uint64(0)
    for word in (seed, epoch, sample):
        z = z + np.uint64(word) + STEP
        z = (z ^ (z >> np.uint64(30))) * FACTOR_1
        z = (z ^ (z >> np.uint64(27))) * FACTOR_2
        z = z ^ (z >> np.uint64(31))
    return np.int64(z >> np.uint64(32))


# %% [markdown]
# ## 3. An operation of one's own for FFCV
#
# An **operation** of FFCV's pipeline answers two calls. `declare_state_and_memory` says what comes
# out (shape, dtype, whether the code can be compiled) and how much memory it needs per image; FFCV
# allocates it for several batches ahead, its **slots**. `generate_code` returns the function that
# FFCV compiles and calls for each batch. It gets what the operation before has made, its own memory
# in this slot and, if it has `with_indices`, which samples these are. The one below goes over the
# pixels once, for all four changes.
#
# How does it learn the epoch? The compiler takes `self.seed` for a constant, and would take an
# epoch for one as well: every epoch would get the crops of the first, or compile anew
# (`recompile=True`). But FFCV asks for the memory when an epoch begins, in the main thread. So the
# trainer sets `operation.epoch` before it begins one, and a second buffer carries the number in its
# shape: 1 + epoch bytes per image, of which nobody reads any. Its type stays the same, so nothing
# is compiled again.


# %%
def augment(image_HWC: np.ndarray, draw: np.ndarray, crop_SSC: np.ndarray) -> None:
    """Crop, mirror, brighten and cut out in one pass."""
    y, x, flip, light, cut_y, cut_x = draw
    for row in range(S):
        for column in range(S):
            in_square = 0 <= row - cut_y < CUT and 0 <= column - cut_x < CUT
            from_column = S - 1 - column if flip else column
            for color in range(3):
                value = image_HWC[y + row, x + from_column, color]
                bright = min(value * light // 64, 255)
                crop_SSC[row, column, color] = 0 if in_square else bright


class FusedAugment(Operation):
    """What a crop is like depends on the seed, the epoch and the sample alone."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.epoch = 0  # set it before each epoch

    def declare_state_and_memory(self, previous_state: object) -> tuple:
        state = replace(previous_state, jit_mode=True, shape=(S, S, 3))
        crop = AllocationQuery((S, S, 3), previous_state.dtype)
        epoch = AllocationQuery((1 + self.epoch,), np.dtype("u1"))
        return state, (crop, epoch)

    def generate_code(self) -> Callable:
        seed = self.seed  # the compiler takes it for a constant
        seed_of = Compiler.compile(mixed)
        draw = Compiler.compile(draw_crops)
        augment_one = Compiler.compile(augment)
        my_range = Compiler.get_iterator()  # prange, if the loader has several workers

        def fused(images_BHWC: np.ndarray, memory: tuple, indices: np.ndarray) -> np.ndarray:
            crops_BSSC, shaped = memory
            epoch = shaped.shape[1] - 1
            draws = np.empty((len(indices), 6), np.int64)
            for i in my_range(len(indices)):
                draw(draws[i : i + 1], seed_of(seed, epoch, np.int64(indices[i])))
                augment_one(images_BHWC[i], draws[i], crops_BSSC[i])
            return crops_BSSC

        fused.is_parallel = True
        fused.with_indices = True
        return fused


# %% [markdown]
# ## 4. How it is measured: sequences of draws
#
# Sequences of 64 draws are compared as bytes, between ranks, tries and threads. Without numba only
# the first row remains, of the function as it stands.


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


def sequence(draw: Callable, seed: int = AS_IT_IS) -> bytes:
    """Return N draws of `draw`, which is `draw_crops`, compiled or not."""
    draws = np.empty((N, 6), np.int64)
    draw(draws, seed)
    return draws.tobytes()


def sequence_of_a_thread(draw: Callable) -> bytes:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(sequence, draw).result()


def different(one: bytes) -> int:
    """Return how many different sequences the ranks have."""
    return len({*gather_objects(one)})


def check_python() -> None:
    np.random.seed(SEED)
    found = different(sequence(draw_crops))
    claim("sequences on n ranks, not compiled", 1, found, question=1)


def check_compiled() -> None:
    draw = numba.njit(draw_crops)
    tries = []
    threads = []
    for _ in range(2):
        np.random.seed(SEED)
        tries.append(sequence(draw))
    for _ in range(2):
        sequence(draw, SEED)  # seeds compiled code, on this thread
        threads.append(sequence_of_a_thread(draw))
    claim("sequences in 2 tries, seeded in Python", 2, len({*tries}))
    claim("sequences on n ranks, seeded in Python", WORLD_SIZE, different(tries[-1]), question=1)
    alike = different(sequence(draw, SEED))
    claim("sequences on n ranks, seeded in compiled code", 1, alike, question=2)
    by_rank = different(sequence(draw, SEED + RANK))
    claim("sequences on n ranks, seeded there by rank", WORLD_SIZE, by_rank, question=2)
    claim("sequences of 2 threads, seeded in a third", 2, len({*threads}), question=3)


# %% [markdown]
# Now seeds per sample. The N samples are dealt to the ranks in turn for the last of these claims.
# Chance makes two of 128 draws equal about once in 250,000 runs: there are 4.6 billion possible
# draws, and about as many seeds.


# %%
def draws_of(seed_of: Callable, epoch: int, samples: range) -> list[bytes]:
    """Return the draw of each sample, seeded one by one."""
    draw = numba.njit(draw_crops)
    draws = np.empty((len(samples), 6), np.int64)
    for place, sample in enumerate(samples):
        draw(draws[place : place + 1], seed_of(SEED, epoch, sample))
    return [one.tobytes() for one in draws]


def repeated(seed_of: Callable) -> int:
    """Return how many of epoch 1's draws epoch 0 has, too."""
    before = draws_of(seed_of, 0, range(N))
    return len({*before} & {*draws_of(seed_of, 1, range(N))})


def check_seeds() -> None:
    seed_of = numba.njit(mixed)
    claim("crops of epoch 1 drawn before, seed + sample", N, repeated(by_sample), question=4)
    summed = repeated(by_sum)
    claim("crops of epoch 1 drawn before, + epoch", N - 1, summed, question=4)
    claim("crops of epoch 1 drawn before, mixed", 0, repeated(seed_of))
    own = draws_of(seed_of, 0, range(RANK, N, WORLD_SIZE))
    everyones = set().union(*gather_objects(own))
    claim("different crops of n ranks in an epoch, mixed", N, len(everyones))


# %% [markdown]
# ## 5. How it is measured: the operation
#
# Rank 0 alone runs FFCV, whose pipeline compiles for some seconds, for two epochs in different
# order. All samples of its file hold the same picture, of noise, so crops differ just where draws
# do. The oracle is NumPy's: a `RandomState` seeded alike draws the same floats as numba (both are
# Mersenne twisters), Python's integers mix the seed, and slices make the crop.


# %%
def mixed_by_python(*words: int) -> int:
    z = 0
    for word in words:
        z = (z + word + int(STEP)) % 2**64
        z = (z ^ z >> 30) * int(FACTOR_1) % 2**64
        z = (z ^ z >> 27) * int(FACTOR_2) % 2**64
        z ^= z >> 31
    return z >> 32


def crop_by_numpy(image_HWC: np.ndarray, epoch: int, sample: int) -> np.ndarray:
    """Return the crop that this sample must have in this epoch."""
    floats = np.random.RandomState(mixed_by_python(SEED, epoch, sample)).random_sample(6)
    y, x, flip, light, cut_y, cut_x = (LEAST + (floats * CHOICES).astype(np.int64)).tolist()
    crop_SSC = image_HWC[y : y + S, x : x + S].astype(np.int64)
    mirrored = crop_SSC[:, ::-1] if flip else crop_SSC
    bright = np.minimum(mirrored * light // 64, 255)
    bright[cut_y : cut_y + CUT, cut_x : cut_x + CUT] = 0
    return bright


def write_pictures(picture_HWC: np.ndarray, path: Path) -> None:
    """Write N samples, raw pixels of the same picture, into a .beton file."""
    multiprocessing.set_start_method("fork", force=True)  # FFCV's writer inherits the pictures
    fields = {"image": RGBImageField("raw")}
    writer = DatasetWriter(str(path), fields, page_size=2**21, num_workers=1)
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        writer.from_indexed_dataset([(picture_HWC,)] * N)
    for process in multiprocessing.active_children():
        process.join()  # which FFCV forgets


def crops_by_ffcv(path: Path) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield (epoch, sample, crop) of two epochs, as FFCV delivers them."""
    gc.collect()  # no old function may be freed while FFCV compiles
    operation = FusedAugment(SEED)
    pipelines = {"image": [SimpleRGBImageDecoder(), operation, ToTensor()]}
    options = {"order": OrderOption.RANDOM, "seed": SEED, "num_workers": 1, "drop_last": False}
    loader = Loader(str(path), 16, pipelines=pipelines, **options)
    for epoch in range(2):
        operation.epoch = epoch
        order = loader.next_traversal_order()
        crops = torch.cat([crops_BSSC.clone() for (crops_BSSC,) in loader])  # it reuses its slots
        for sample, crop_SSC in zip(order, crops.numpy(), strict=True):
            yield epoch, int(sample), crop_SSC


# %% [markdown]
# The file lies in the launcher's own folder, if there is one, which is removed even after Ctrl-C.


# %%
def measure_operation() -> dict[str, int]:
    """On rank 0: compare FFCV's crops with the oracle's, and with each other."""
    picture_HWC = np.random.default_rng(SEED).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
    errors = os.environ.get("TORCHELASTIC_ERROR_FILE")  # in the launcher's folder
    wrong = 0
    found = ({}, {})
    with tempfile.TemporaryDirectory(dir=Path(errors).parent if errors else None) as folder:
        path = Path(folder) / "noise.beton"
        write_pictures(picture_HWC, path)
        for epoch, sample, crop_SSC in crops_by_ffcv(path):
            wrong += (crop_SSC != crop_by_numpy(picture_HWC, epoch, sample)).sum()
            found[epoch][sample] = crop_SSC.tobytes()
    same = sum(found[0][sample] == found[1][sample] for sample in range(N))
    crops = {*found[0].values(), *found[1].values()}
    return {"wrong": wrong, "same": same, "different": len(crops)}


def check_operation() -> None:
    if from_rank_0(Loader is None):
        blocked("FFCV's operation", needs="FFCV: make .venv/all")
        return
    found = from_rank_0(measure_operation() if RANK == 0 else None)
    claim("bytes in which FFCV's crops differ from NumPy's", 0, found["wrong"])
    claim("samples with the same crop in both epochs", 0, found["same"])
    claim("different crops that FFCV made in 2 epochs", 2 * N, found["different"])


# %% [markdown]
# ## What you should have seen
#
# 1. One, and n. Seeded in Python, numba's state stays as the operating system has filled it. That
#    only makes a run that cannot be repeated: a second try on the same rank draws anew as well.
# 2. One, and n. The first looks right in every log, while all ranks crop alike.
# 3. Two. Each thread has a state of its own, which nobody has seeded. FFCV's thread is a new one in
#    each epoch; its loader's `seed` orders the samples and seeds no augmentation.
# 4. All 64: each sample keeps its crop for ever, and augmentation stops after one epoch. And 63:
#    sample k draws in epoch 1 what sample k + 1 drew in epoch 0, so the same few draws wander over
#    the data. Mixed, none. With sums, runs with seeds 0 and 1 share nearly all draws as well.
#
# The operation makes NumPy's crops to the bit, in every slot and both epochs. Let its loader have
# two workers, and all claims still hold: each sample's draw is seeded on the thread that makes it.
# Another rank would make the same crop of the same sample, so n ranks that share out an epoch draw
# 64 different crops, whatever n is.
#
# **Try.** With `(1,)` the operation draws as in epoch 0 forever: half of the crops are wrong, all
# samples keep theirs, and 64 different ones remain; all three claims of FFCV's fail. With `i` all
# samples at the same place in a batch get the same draw: 32 different crops in two epochs. Two
# claims fail; no sample keeps its crop. The loss falls all the same, and only the comparison tells.
#
# On GPUs nothing changes, since the operation stays on the cores. The trainer that resumes at epoch
# 7 sets `operation.epoch = 7`, and gets the crops that it would have had.


# %%
def main() -> None:
    command_line()
    launch()
    setup()
    check_python()
    if numba is None:
        for text in ("random numbers in compiled code", "FFCV's operation"):
            blocked(text, needs="numba: pip install -e '.[data]'")
        finish()
    check_compiled()
    check_seeds()
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
