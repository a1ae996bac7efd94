"""Just-in-time compiled augmentation: threads in the place of worker processes
============================================================================

**Question.** A DataLoader augments images in worker processes, FFCV in threads of one process. What
must be true of the code that makes a crop for threads to be enough, and what do they save?

**Predict**, and write it down before you run:

1. A loop over the pixels of a crop is compiled by numba. How many times as fast is it as the same
   loop in Python? And as NumPy?
2. Two threads fill a batch with such crops, on two free cores. How many cores do they use if the
   compiled code holds the GIL, Python's lock? If it releases it?
3. A DataLoader's two worker processes run the same compiled code. How many bytes per crop of 128 x
   128 pixels do they copy for the trainer? How many times as many crops per second do threads make?
4. The function is called with 64 images of 160 x 240 pixels, with 2 images of 200 x 300, with a
   mirrored view of the 64 (`images[:, :, ::-1]`), and with a read-only copy of them. How many times
   is it compiled?
5. All n ranks of a machine call it for the first time. How many times is it compiled, all ranks
   together? And with `cache=True`, if rank 0 calls it before the others do?

**Run.**

    torchrun --standalone --nproc-per-node=4 04_jit_augmentation.py  # one rank per GPU, else gloo
    python 04_jit_augmentation.py                                    # the same, started for you

Not run on several GPUs. One node. numba comes with `pip install -e '.[data]'`.

**Try.** In `augment_numpy` leave out `np.minimum` and keep its first argument: which claim fails?
In `measure_workers` let `released` be `compiled(nogil=False)`: which claims now?

**Before.** data-loading/01_ffcv_distributed_optimization.py: what FFCV is for.

**Next.** data-loading/05_own_operation.py: random numbers in compiled code, and your own operation
in FFCV.
"""

import argparse
import contextlib
import ctypes
import functools
import importlib.util
import json
import logging
import math
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist
from PIL import Image, ImageEnhance
from torch.utils.data import DataLoader, Dataset

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

try:
    import numba
    from numba import prange
except ImportError:  # it comes with the extra [data]
    numba = None
    prange = range

N = 64  # images in a batch, HEIGHT x WIDTH pixels of three bytes
HEIGHT = 160
WIDTH = 240
S = 128  # height and width of a crop
CUT = 32  # height and width of the square that cutout blackens
WORKERS = 2
BATCHES = 150  # in a measurement
SEED = 0

# %% [markdown]
# ## 1. One loop over the pixels, compiled
#
# Augmentation changes each image a little, at random, before the model sees it: crop it, mirror it,
# make it brighter or darker, blacken a square (**cutout**, DeVries and Taylor, 2017). Said pixel by
# pixel that is one short loop. Which crop to make stands in six whole numbers per image, drawn
# before; brightness counts in 64ths.
#
# Python would be slow at it, since each step looks up types and makes objects. **numba** reads the
# function's bytecode when it is first called, infers the type of every variable from the types of
# the arguments, and has LLVM make machine code of it, as a C compiler would, but **just in time**
# (JIT). This is the idea of the lesson:
#
# - All steps happen in one pass over the pixels (they are **fused**), and each crop is written
#   where it belongs, in a batch that was allocated before.
# - Machine code that works on arrays touches no Python object. So it need not hold the **GIL**, the
#   lock that lets one thread at a time run Python, and threads can fill one batch together.


# %%
# The smallest y, x, flip, light, cut_y and cut_x, and how many choices there are for each:
LEAST = (0, 0, 0, 32, 0, 0)
CHOICES = (HEIGHT - S + 1, WIDTH - S + 1, 2, 65, S - CUT + 1, S - CUT + 1)


def augment_loop(images_NHWC: np.ndarray, draws: np.ndarray, crops_NSSC: np.ndarray) -> None:
    """Write the crop of each image into its place in a batch."""
    for i in prange(len(images_NHWC)):  # range, unless numba is told to use threads of its own
        y, x, flip, light, cut_y, cut_x = draws[i]
        for row in range(S):
            for column in range(S):
                in_square = 0 <= row - cut_y < CUT and 0 <= column - cut_x < CUT
                from_column = S - 1 - column if flip else column
                for color in range(3):
                    value = images_NHWC[i, y + row, x + from_column, color]
                    bright = min(value * light // 64, 255)
                    crops_NSSC[i, row, column, color] = 0 if in_square else bright


def compiled(nogil: bool = True, **options: bool) -> Callable:
    """Return the loop as numba will compile it; `@numba.njit(...)` above it would do the same."""
    return numba.njit(nogil=nogil, **options)(augment_loop)


def crops_by(augment: Callable, images_NHWC: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Return a new batch of crops that `augment`, compiled or not, has written."""
    crops_NSSC = np.empty((len(images_NHWC), S, S, 3), np.uint8)
    augment(images_NHWC, draws, crops_NSSC)
    return crops_NSSC


# %% [markdown]
# Without a compiler one calls functions that were written in C: PIL has one per operation, NumPy
# one per step of arithmetic. Each goes over all pixels, and most of them make a new image:
#
#     PIL      crop ─> mirror ─> black image ─> blend ─> cutout              4 new images
#     NumPy    view ─> view ─> 16 bits ─> * ─> // ─> min ─> 8 bits ─> cutout      5
#     loop     per pixel: from where? how bright? cut? ─> into the batch       none
#
# All three make the same crop, to the bit: PIL's brightness is computed in float32, which holds
# 64ths of a byte exactly.


# %%
def augment_pil(image_HWC: np.ndarray, draw: np.ndarray) -> np.ndarray:
    """Return a crop (S, S, 3) of an image, by PIL."""
    y, x, flip, light, cut_y, cut_x = draw.tolist()
    crop = Image.fromarray(image_HWC).crop((x, y, x + S, y + S))
    if flip:
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    crop = ImageEnhance.Brightness(crop).enhance(light / 64)
    crop.paste((0, 0, 0), (cut_x, cut_y, cut_x + CUT, cut_y + CUT))
    return np.asarray(crop)


def augment_numpy(image_HWC: np.ndarray, draw: np.ndarray) -> np.ndarray:
    """Return the same crop, by NumPy."""
    y, x, flip, light, cut_y, cut_x = draw.tolist()
    crop_SSC = image_HWC[y : y + S, x : x + S]
    if flip:
        crop_SSC = crop_SSC[:, ::-1]
    crop_SSC = np.minimum(crop_SSC.astype(np.uint16) * light // 64, 255).astype(np.uint8)
    crop_SSC[cut_y : cut_y + CUT, cut_x : cut_x + CUT] = 0
    return crop_SSC


# %% [markdown]
# ## 2. Two threads fill one batch
#
# A thread that calls compiled code keeps the GIL until the call returns, unless the code was
# compiled with `nogil=True`. Then threads need nothing but their share of the batch:
#
#     GIL held        thread 1   crops 0 to 31 ──> wait ────────────>
#                     thread 2   wait ───────────> crops 32 to 63 ──>
#
#     GIL released    thread 1   crops 0 to 31 ──>          one batch, in the trainer's memory,
#                     thread 2   crops 32 to 63 ─>          and Python is free meanwhile


# %%
def fill_by_threads(
    pool: ThreadPoolExecutor, augment: Callable, images: np.ndarray, draws: np.ndarray
) -> np.ndarray:
    """Return a batch of crops that WORKERS threads have written, a share each."""
    crops_NSSC = np.empty((len(images), S, S, 3), np.uint8)
    share = math.ceil(len(images) / WORKERS)
    jobs = []
    for start in range(0, len(images), share):
        mine = slice(start, start + share)
        jobs.append(pool.submit(augment, images[mine], draws[mine], crops_NSSC[mine]))
    for job in jobs:
        job.result()
    return crops_NSSC


# %% [markdown]
# FFCV does the same in two steps. One Python thread per epoch calls compiled functions without the
# GIL, while the trainer works. And numba's own threads share each batch: compiled with
# `parallel=True`, a loop over `prange` is divided among them.
#
# A DataLoader's workers are **processes**. Each has a GIL of its own, so that they need no
# `nogil`, and memory of its own, so that what they make must be carried over: each worker makes the
# crops of a whole batch one by one, and collates them, which copies every byte into memory that it
# shares with the trainer.


# %%
class Crops(Dataset):
    """The crop of each image, made by compiled code when a worker process asks for it."""

    def __init__(self, augment: Callable, images: np.ndarray, draws: np.ndarray) -> None:
        self.augment = augment
        self.images = images
        self.draws = draws

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> torch.Tensor:
        one = slice(i, i + 1)
        return torch.from_numpy(crops_by(self.augment, self.images[one], self.draws[one])[0])


def process_loader(augment: Callable, images: np.ndarray, draws: np.ndarray) -> DataLoader:
    """Return a loader of BATCHES batches of crops, made in WORKERS processes that stay."""
    epoch = [*range(N)] * BATCHES
    options = {"num_workers": WORKERS, "persistent_workers": True}
    options["multiprocessing_context"] = "fork"  # so that they inherit what was compiled
    return DataLoader(Crops(augment, images, draws), N, sampler=epoch, **options)


# %% [markdown]
# ## 3. What compiling costs: once per signature, in every process
#
# numba compiles for the types of the arguments, the **signature**. How large an array is does not
# belong to its type. Its number of dimensions does, the type of its elements, whether they lie in
# C's order without gaps, and whether they may be written. FFCV's data come from a file that is
# mapped read-only, so even this costs a compilation.
#
# Machine code lies in the memory of one process, and a rank is a process: n ranks compile the same
# function n times, at the same time, on cores that they share. With `cache=True` numba stores what
# it has compiled in files, and a process that finds them there loads them. The key is the
# signature, the function's bytecode, its source file as it stands and the kind of CPU. So let one
# rank go first.


# %%
def call_with_four_kinds_of_images(
    augment: Callable, images_NHWC: np.ndarray, draws: np.ndarray
) -> None:
    larger = np.zeros((2, 200, 300, 3), np.uint8)
    mirrored = images_NHWC[:, :, ::-1]
    read_only = images_NHWC.copy()
    read_only.flags.writeable = False
    for images in (images_NHWC, larger, mirrored, read_only):
        crops_by(augment, images, draws[: len(images)])


def call_on_rank_0_first(augment: Callable, images_NHWC: np.ndarray, draws: np.ndarray) -> None:
    if RANK == 0:
        crops_by(augment, images_NHWC, draws)  # compiles, and stores
    dist.barrier()
    if RANK != 0:
        crops_by(augment, images_NHWC, draws)


# %% [markdown]
# ## 4. How it is measured: the pixels, and the time per crop
#
# The images are windows of a photograph that scikit-learn ships. Every rank draws numbers of its
# own, and compares every byte of the crops: PIL, which shares no code with the others, is the
# oracle. Times are medians per crop on rank 0, the ways taking turns, while the other ranks wait.


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


def windows_of_a_photograph() -> np.ndarray:
    """Return N windows (N, HEIGHT, WIDTH, 3) of a photograph of 427 x 640 pixels."""
    folder = Path(importlib.util.find_spec("sklearn").origin).parent / "datasets" / "images"
    photo_HWC = np.asarray(Image.open(folder / "china.jpg"))
    last = (427 - HEIGHT, 640 - WIDTH)
    corners = np.random.default_rng(SEED).integers(last, size=(N, 2), endpoint=True)
    return np.stack([photo_HWC[y : y + HEIGHT, x : x + WIDTH] for y, x in corners])


def one_by_one(augment_one: Callable, images: np.ndarray, draws: np.ndarray) -> np.ndarray:
    crops = [augment_one(image_HWC, draw) for image_HWC, draw in zip(images, draws, strict=True)]
    return np.stack(crops)


def seconds_of(work: Callable, *given: object) -> float:
    start = time.perf_counter()
    work(*given)
    return time.perf_counter() - start


def seconds_per_crop(augment: Callable, images: np.ndarray, draws: np.ndarray) -> dict[str, float]:
    """Return the median seconds per crop of each way to make it; `augment` is compiled."""
    seconds = {"Python": [], "PIL": [], "NumPy": [], "numba": []}
    for _ in range(5):
        seconds["Python"].append(N * seconds_of(crops_by, augment_loop, images[:1], draws[:1]))
        seconds["PIL"].append(seconds_of(one_by_one, augment_pil, images, draws))
        seconds["NumPy"].append(seconds_of(one_by_one, augment_numpy, images, draws))
        seconds["numba"].append(seconds_of(crops_by, augment, images, draws))
    return {name: statistics.median(times) / N for name, times in seconds.items()}


def check_seconds(augment: Callable, images: np.ndarray, draws: np.ndarray) -> None:
    seconds = from_rank_0(seconds_per_crop(augment, images, draws) if RANK == 0 else None)
    shown = [f"{name} {1e3 * one:.3f}" for name, one in seconds.items()]
    print0(f"{'':13}milliseconds per crop: {', '.join(shown)}")
    for name, at_least in (("Python", 50), ("NumPy", 1.5)):
        ratio = seconds[name] / seconds["numba"]
        text = f"time per crop, {name} / the compiled loop"
        claim(text, at_least, ratio, ">=", question=1, timed=True)


# %% [markdown]
# ## 5. How it is measured: the workers
#
# First without a clock: a compiled function reads, at its beginning and at its end, how far another
# thread has counted in Python. If it holds the GIL, that thread makes not one step. Then all ways
# to fill batches take turns on rank 0, and CPU seconds are those of this process and its workers.


# %%
def steps_meanwhile(nogil: bool, images: np.ndarray, draws: np.ndarray) -> int:
    """Return how many steps another thread makes, in Python, during one call of compiled code."""
    augment = compiled()

    @numba.njit(nogil=nogil)
    def fill(
        images_NHWC: np.ndarray,
        draws: np.ndarray,
        crops_NSSC: np.ndarray,
        steps: np.ndarray,
        rounds: int,
    ) -> int:
        before = steps[0]
        for _ in range(rounds):
            augment(images_NHWC, draws, crops_NSSC)
        return steps[0] - before

    steps = np.zeros(1, np.int64)
    batch = (images, draws, np.empty((N, S, S, 3), np.uint8))
    fill(*batch, steps, 1)  # compiles
    done = threading.Event()

    def count() -> None:
        while not done.is_set():
            steps[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    made = fill(*batch, steps, BATCHES)
    done.set()
    thread.join()
    return made


def pace(batches: Iterable) -> tuple[float, float]:
    """Return the seconds, and the CPU seconds, in which all batches come."""
    cpu = cpu_seconds()
    start = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - start, cpu_seconds() - cpu


def cpu_seconds() -> float:
    """Return the CPU time so far of this process and its workers."""
    times = [process.cpu_times() for process in (psutil.Process(), *psutil.Process().children())]
    return sum(one.user + one.system for one in times)


# %% [markdown]
# Each way first fills BATCHES batches to warm up, the last of which is compared with PIL's. The
# DataLoader begins, since it forks: better before this process has threads.


# %%
def measure_workers(images: np.ndarray, draws: np.ndarray, expected: np.ndarray) -> dict[str, dict]:
    """On rank 0: what each way to fill batches delivers, and in which time."""
    held = compiled(nogil=False)
    released = compiled()
    parallel = compiled(parallel=True)
    for augment in (held, released):
        crops_by(augment, images, draws)  # compiles
    loader = process_loader(released, images, draws)
    with ThreadPoolExecutor(WORKERS) as pool:
        fill = functools.partial(fill_by_threads, pool)
        ways = {
            "DataLoader": lambda: loader,
            "threads, GIL held": lambda: (fill(held, images, draws) for _ in range(BATCHES)),
            "threads": lambda: (fill(released, images, draws) for _ in range(BATCHES)),
            "prange": lambda: (crops_by(parallel, images, draws) for _ in range(BATCHES)),
        }
        found = {}
        for name, batches in ways.items():
            *_, last = batches()
            batch = torch.as_tensor(last)
            shared = batch.nbytes / N if batch.is_shared() else 0
            wrong = (batch.numpy() != expected).sum()
            found[name] = {"wrong": wrong, "shared": shared, "seconds": np.zeros(2)}
        for _ in range(3):
            for name, batches in ways.items():
                found[name]["seconds"] += pace(batches())
    return found


def check_workers(images: np.ndarray, draws: np.ndarray, expected: np.ndarray) -> None:
    """Claim what threads do and a DataLoader's processes do, and what it costs."""
    steps = []
    found = None
    if RANK == 0:
        found = measure_workers(images, draws, expected)
        steps = [steps_meanwhile(nogil, images, draws) for nogil in (False, True)]
    found = from_rank_0(found)
    steps = from_rank_0(steps)
    claim("another thread's steps meanwhile, GIL held", 0, steps[0])
    claim("another thread's steps meanwhile, GIL released", 1, steps[1], ">=")
    wrong = sum(one["wrong"] for one in found.values())
    claim("bytes in which batches differ from PIL's crops", 0, wrong)
    rate = {}
    cores = {}
    for name, one in found.items():
        wall, cpu = one["seconds"] / (3 * BATCHES * N)
        rate[name] = 1 / wall
        cores[name] = cpu / wall
        shown = f"{rate[name]:9,.0f} crops per second, {1e6 * cpu:4.0f} CPU microseconds per crop"
        print0(f"{'':13}{name:17} {shown}")
    judge_threads(rate, cores)
    copied = found["DataLoader"]["shared"]
    claim("bytes per crop in shared memory, DataLoader", 3 * S * S, copied, question=3)
    claim("bytes per crop in shared memory, threads", 0, found["threads"]["shared"])


def judge_threads(rate: dict[str, float], cores: dict[str, float]) -> None:
    """Claim what the clock says."""
    if os.cpu_count() == 1:
        blocked("cores in use by 2 threads", needs="2 cores")
        return
    held = cores["threads, GIL held"]
    claim("cores in use by 2 threads, GIL held", 1.2, held, "<=", question=2, timed=True)
    free = cores["threads"]
    claim("cores in use by 2 threads, GIL released", 1.5, free, ">=", question=2, timed=True)
    more = rate["threads"] / rate["DataLoader"]
    claim("crops per second, threads / DataLoader", 2, more, ">=", question=3, timed=True)
    less = cores["DataLoader"] / rate["DataLoader"] * rate["threads"] / free
    claim("CPU time per crop, DataLoader / threads", 2, less, ">=", timed=True)


# %% [markdown]
# ## 6. How it is measured: compilations
#
# numba counts them itself, per function and signature. The cache is a temporary folder that all
# ranks share. It lies in the launcher's own folder, if there is one, which is removed even after
# Ctrl-C.


# %%
def compilations(augment: Callable) -> int:
    """Return how many signatures of a function this process has compiled itself."""
    return sum(augment.stats.cache_misses.values())


def check_compiling(images: np.ndarray, draws: np.ndarray, expected: np.ndarray) -> Callable:
    """Compile the loop on all ranks; claim its pixels and what it costs; return it."""
    augment = compiled()
    first = seconds_of(crops_by, augment, images, draws)
    found = crops_by(augment, images, draws)
    later = min(seconds_of(crops_by, augment, images, draws) for _ in range(3))
    claim("bytes in which the loop's crops differ from PIL's", 0, (found != expected).sum())
    claim("seconds of the first call / of a later one", 20, first / later, ">=", timed=True)
    on_all_ranks = sum(gather_objects(compilations(augment)))
    if RANK == 0:
        call_with_four_kinds_of_images(augment, images, draws)
        for signature in augment.signatures:
            print0(f"{'':13}compiled for {str(signature[0])[:70]}")
    claim("compilations for 4 kinds of images", 3, from_rank_0(len(augment.signatures)), question=4)
    claim("compilations on all ranks, no cache", WORLD_SIZE, on_all_ranks, question=5)
    return augment


def check_cache(images: np.ndarray, draws: np.ndarray) -> None:
    with shared_folder() as folder:
        numba.config.CACHE_DIR = str(folder)  # or NUMBA_CACHE_DIR; else next to the source file
        augment = compiled(cache=True)
        call_on_rank_0_first(augment, images, draws)
        on_all_ranks = sum(gather_objects(compilations(augment)))
        claim("compilations on all ranks, cache, rank 0 first", 1, on_all_ranks, question=5)
        loaded = sum(gather_objects(sum(augment.stats.cache_hits.values())))
        claim("ranks that loaded it from the cache", WORLD_SIZE - 1, loaded)


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """Yield a temporary folder of rank 0's that all ranks use."""
    errors = os.environ.get("TORCHELASTIC_ERROR_FILE")  # in the launcher's folder
    with tempfile.TemporaryDirectory(dir=Path(errors).parent if errors else None) as folder:
        yield Path(from_rank_0(folder))
        dist.barrier()  # it goes when all have used it


# %% [markdown]
# ## What you should have seen
#
# 1. About a thousand times as fast as in Python, and some three times as fast as NumPy, whose
#    arithmetic is compiled too: what it loses is the passes over memory. PIL comes after NumPy.
# 2. One, and two. To Python a compiled function that holds the GIL is one long step: until it
#    returns no other thread makes any, and a training loop in this process stands still as well.
# 3. 49,152, a byte per pixel and color; threads copy none, they write where the trainer reads.
#    Processes keep two cores busy as well, with the same code. But each crop costs them Python's
#    calls, a tensor of its own, collating, and a copy into memory whose pages the kernel must make
#    first. Here this takes twice the time of the crop itself, so threads deliver about three times
#    as many crops. The faster the augmentation, the more they save: next to PIL's time per crop it
#    would be less.
# 4. Three times. 64 images or 2, of whatever size, are one signature; the mirrored view has other
#    strides (numba calls the layout A, any, instead of C), and the read-only copy is another type.
#    A loader that stutters now and then may be compiling for a new kind of input: look at its
#    functions' `signatures`.
# 5. n times, and once. All ranks compile the same code at once, on cores that they share, so the
#    more ranks a node has, the longer a start takes. FFCV caches nothing: every rank compiles its
#    pipeline before the first batch. If no rank goes first, all that find nothing compile. A cache
#    on a network file system serves all nodes with the same CPU; it does not notice that a function
#    in *another* file has changed.
#
# **Try.** Without the minimum, 200 * 96 // 64 = 300 becomes 44 in 8 bits: bright places turn dark,
# and the claim of NumPy's crops fails. With the GIL held two threads use one core, which a claim
# tells, and deliver half as many crops. No pixel changes, and no error says so.
#
# **When.** Keep PIL or torchvision in worker processes while the GPU does not wait for them. If it
# does, and the time goes into loops over bytes, compile these, and let threads call them. Three
# warnings. The compiler checks no index, unless `boundscheck=True`: a draw too large reads another
# image's bytes. It reads global variables only when it compiles. And numba starts as many threads
# for `prange` as there are cores, in each rank, whatever OMP_NUM_THREADS says: give each rank its
# share by NUMBA_NUM_THREADS. Python built without a GIL (3.13t and later) lets threads run any code
# at once, and would spare the processes as well.
#
# On GPUs nothing here changes: numba's augmentation stays on the cores, of which a GPU often has
# ten to twenty. If these do not suffice, DALI or torchvision's transforms augment on the GPU.


# %%
def main() -> None:
    command_line()
    launch()
    if int(os.environ.get("LOCAL_WORLD_SIZE", WORLD_SIZE)) != WORLD_SIZE:
        refuse(f"needs one node, whose ranks share a folder, got {WORLD_SIZE} ranks on several")
    setup()
    images = windows_of_a_photograph()
    draws = np.random.default_rng(RANK).integers(LEAST, np.add(LEAST, CHOICES), (N, 6))
    expected = one_by_one(augment_pil, images, draws)
    found = one_by_one(augment_numpy, images, draws)
    claim("bytes in which NumPy's crops differ from PIL's", 0, (found != expected).sum())
    if numba is None:
        for text in ("the compiled loop", "threads against processes", "compilations"):
            blocked(text, needs="numba: pip install -e '.[data]'")
        finish()
    augment = check_compiling(images, draws, expected)
    check_cache(images, draws)
    check_seconds(augment, images, draws)
    check_workers(images, draws, expected)
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
