"""Just-in-time compiled augmentation: threads in the place of worker processes
============================================================================

**Question.** A DataLoader augments images in worker processes. What must be true of the code that
makes a crop for threads of the trainer's own process to do it, and what do they save?

**Predict**, and write it down before you run. A loop over the pixels of a crop is compiled by
numba, and there are two free cores.

1. Two threads fill a batch with crops, and the compiled loop holds the GIL, Python's lock. How many
   cores do they use: CPU seconds per second?
2. The loop releases the GIL. How many now?
3. Two worker processes of a DataLoader run the same compiled loop. How many bytes per crop of 128 x
   128 pixels come to the trainer through memory that it shares with them?
4. They call the loop once per batch, not once per crop. Does a crop take them more CPU time than it
   takes the threads, as much, or less?

**Run.**

    torchrun --standalone --nproc-per-node=4 04_jit_augmentation.py  # one rank per GPU, else gloo
    python 04_jit_augmentation.py                                    # the same, started for you

Not run on several GPUs. Linux only. numba and Pillow come with `pip install -e '.[data]'`, the
photograph comes with scikit-learn; what needs one that is missing is BLOCKED.

**Try.** In `compiled` write `nogil=False` for `nogil=nogil`: which claims fail, and is any pixel
different? In `augment_numpy` leave out `np.minimum` and keep its first argument: which claim fails?

**Before.** data-loading/01_ffcv_distributed_optimization.py: what FFCV is for.

**Next.** data-loading/11_what_numba_compiles.py: when numba compiles, and how often on n ranks.
Then data-loading/05_random_numbers.py: crops that can be repeated.
"""

import argparse
import ctypes
import importlib.util
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
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

try:
    import numba
except ImportError:  # it comes with the extra [data]
    numba = None
try:
    from PIL import Image, ImageEnhance
except ImportError:  # so does Pillow
    Image = None

N = 128  # images in a batch, HEIGHT x WIDTH pixels of three bytes
HEIGHT = 160
WIDTH = 240
S = 128  # height and width of a crop
CUT = 32  # height and width of the square that cutout blackens
WORKERS = 2
BATCHES = 80  # in a measurement
SEED = 0

# %% [markdown]
# ## 1. A loop that touches no Python object
#
# A node with eight GPUs runs eight ranks. If each of them has eight workers to prepare its images,
# these are 72 processes, each with a Python of its own, and every batch travels from a worker to
# its trainer. Threads would spare all that: they live in the trainer's process, and write where the
# trainer reads. What keeps them from it is a lock.
#
# All threads of a process share its Python objects. So that they do not spoil them, the interpreter
# lets only one thread at a time run Python: the one that holds the **GIL**, the global interpreter
# lock. But code that touches no Python object needs no lock. This is the idea of the lesson:
# **compile all the work on a batch into one loop over plain memory, release the GIL around it, and
# threads of one process run it on as many cores as they like.**
#
# The work, here, is to change each image a little, at random, before the model sees it: crop it,
# mirror it, make it brighter or darker, blacken a square (**cutout**, DeVries and Taylor, 2017).
# Which crop to make stands in six whole numbers per image, drawn before, by one thread; brightness
# counts in 64ths. The four steps are **fused**: one short loop reads each pixel, does all four to
# it, and writes the result to its place in the batch.


# %%
# The smallest y, x, flip, light, cut_y and cut_x, and how many choices there are for each:
LEAST = (0, 0, 0, 32, 0, 0)
CHOICES = (HEIGHT - S + 1, WIDTH - S + 1, 2, 65, S - CUT + 1, S - CUT + 1)


def augment_loop(images_NHWC: np.ndarray, draws: np.ndarray, crops_NSSC: np.ndarray) -> None:
    """Write the crop of each image to its place in a batch."""
    for i in range(len(images_NHWC)):
        y, x, flip, light, cut_y, cut_x = draws[i]
        for row in range(S):
            for column in range(S):
                in_square = 0 <= row - cut_y < CUT and 0 <= column - cut_x < CUT
                from_column = S - 1 - column if flip else column
                for color in range(3):
                    value = images_NHWC[i, y + row, x + from_column, color]
                    bright = min(value * light // 64, 255)
                    crops_NSSC[i, row, column, color] = 0 if in_square else bright


# %% [markdown]
# Run by Python, this is slow and needs the GIL: each `value` is an object, and so is each product.
# **numba** compiles it when it is first called, **just in time** (JIT): it infers the type of every
# variable from the types of the arguments, and has LLVM make machine code of it, as a C compiler
# would. What is left of an array is an address, a shape and strides; what is left of a number is a
# register.
#
# The machine code could always do without the GIL. A thread keeps it all the same until the call
# returns, unless it was compiled with `nogil=True`, which says: release it before the first pixel,
# and take it again after the last.


# %%
def compiled(function: Callable, nogil: bool) -> Callable:
    """Return the function, to be compiled; `@numba.njit(nogil=True)` above it does the same."""
    return numba.njit(nogil=nogil)(function)


def crops_by(augment: Callable, images_NHWC: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Return a new batch of crops that `augment`, compiled or not, has written."""
    crops_NSSC = np.empty((len(images_NHWC), S, S, 3), np.uint8)
    augment(images_NHWC, draws, crops_NSSC)
    return crops_NSSC


# %% [markdown]
# Why not call functions that others have compiled? PIL has one per operation, NumPy one per step of
# arithmetic. But each of them makes a new object, and between any two of them the thread is back in
# Python, and needs the GIL:
#
#     PIL      copy in ─> crop ─> mirror ─> black ─> blend ─> cutout ─> copy out     6 new objects
#     NumPy    view ─> view ─> 16 bits ─> * ─> // ─> min ─> 8 bits ─> cutout         5 new arrays
#     loop     per pixel: from where? how bright? cut? ─> into the batch             none
#
# (Cutout writes into what is there; PIL copies the whole image in, at four bytes per pixel, before
# it crops.) All three make the same crop, to the bit: PIL blends in float32, which holds 64ths of a
# byte exactly. So PIL, which shares no code with the other two, can be the oracle.


# %%
def augment_pil(images_NHWC: np.ndarray, draws: np.ndarray, crops_NSSC: np.ndarray) -> None:
    """Write the same crops, made by PIL."""
    for i, (y, x, flip, light, cut_y, cut_x) in enumerate(draws.tolist()):
        crop = Image.fromarray(images_NHWC[i]).crop((x, y, x + S, y + S))
        if flip:
            crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        crop = ImageEnhance.Brightness(crop).enhance(light / 64)
        crop.paste((0, 0, 0), (cut_x, cut_y, cut_x + CUT, cut_y + CUT))
        crops_NSSC[i] = np.asarray(crop)


def augment_numpy(images_NHWC: np.ndarray, draws: np.ndarray, crops_NSSC: np.ndarray) -> None:
    """Write the same crops, made by NumPy."""
    for i, (y, x, flip, light, cut_y, cut_x) in enumerate(draws.tolist()):
        crop_SSC = images_NHWC[i, y : y + S, x : x + S]
        if flip:
            crop_SSC = crop_SSC[:, ::-1]
        crop_SSC = np.minimum(crop_SSC.astype(np.uint16) * light // 64, 255).astype(np.uint8)
        crop_SSC[cut_y : cut_y + CUT, cut_x : cut_x + CUT] = 0
        crops_NSSC[i] = crop_SSC


# %% [markdown]
# ## 2. Two threads fill one batch
#
# Threads need nothing but their share of the batch. Each gets some of the images, with their draws,
# and the part of the batch that belongs to them: three views, no copies.
#
#     GIL held        thread 1   crops 0 to 63 ───> wait ────────────>
#                     thread 2   wait ────────────> crops 64 to 127 ─>
#
#     GIL released    thread 1   crops 0 to 63 ───>         one batch, in the trainer's memory,
#                     thread 2   crops 64 to 127 ─>         and Python is free meanwhile
#
# The batch was allocated once, before. When the model is done with it, it is filled again.


# %%
def fill_by_threads(
    pool: ThreadPoolExecutor,
    augment: Callable,
    images_NHWC: np.ndarray,
    draws: np.ndarray,
    batch_NSSC: np.ndarray,
) -> None:
    """Let WORKERS threads write a batch of crops, a share each."""
    share = math.ceil(len(images_NHWC) / WORKERS)
    jobs = []
    for start in range(0, len(images_NHWC), share):
        mine = slice(start, start + share)
        jobs.append(pool.submit(augment, images_NHWC[mine], draws[mine], batch_NSSC[mine]))
    for job in jobs:
        job.result()


# %% [markdown]
# Are both threads in the loop at the same time? No clock need tell. Below, each thread hangs out a
# flag when it enters the compiled code, does its share, counts the flags, its own among them, and
# takes its flag in. No lock guards the flags: if two threads count at one moment, the count may be
# too small, never too large, and each tries twenty times.


# %%
def threads_inside(nogil: bool, images_NHWC: np.ndarray, draws: np.ndarray) -> int:
    """Return how many of WORKERS threads were in the compiled loop at one time."""
    augment = compiled(augment_loop, nogil)
    batch_NSSC = np.empty((N, S, S, 3), np.uint8)
    flags = np.zeros(WORKERS, np.int64)

    def augment_and_count(
        me: int, images: np.ndarray, draws: np.ndarray, crops: np.ndarray, flags: np.ndarray
    ) -> int:
        flags[me] = 1
        augment(images, draws, crops)
        count = flags.sum()
        flags[me] = 0
        return count

    count_flags = compiled(augment_and_count, nogil)

    def work(me: int) -> int:
        mine = slice(me * N // WORKERS, (me + 1) * N // WORKERS)
        given = (images_NHWC[mine], draws[mine], batch_NSSC[mine], flags)
        return max(count_flags(me, *given) for _ in range(20))

    with ThreadPoolExecutor(WORKERS) as pool:
        return max(pool.map(work, range(WORKERS)))


# %% [markdown]
# ## 3. Two processes hand over their batches
#
# A DataLoader's workers are **processes**. Each has a GIL of its own, so that two of them use two
# cores whatever they run. But each also has memory of its own, and what it makes must get into the
# trainer's:
#
#     threads      loop ──> the trainer's batch
#     processes    loop ──> the worker's array ──copy──> a new segment of shared memory
#                                                         └──handle──> mapped by the trainer
#
# That is what PyTorch does with a tensor that a worker puts into its queue: it copies the bytes
# into a segment of memory that both can see, and pickles only a handle to it. The next batch gets
# the next segment.
#
# To compare like with like, a worker here is asked for a whole batch (`batch_size=None`, and a
# sampler that names batches; a method `__getitems__` would do as well) and makes it by one call of
# the same compiled loop. The usual `__getitem__`, one sample at a time, would cost a Python call, a
# small array and collating per crop as well, which is not what we want to know. Only the array
# cannot be the same again and again, as the threads' is: the queue copies a batch in a thread of
# its own, later, when the worker may be writing the next one. So each batch gets a new array.


# %%
class CropBatches(Dataset):
    """Batches of crops, each made by one call when a worker process is asked for it."""

    def __init__(self, augment: Callable, images: np.ndarray, draws: np.ndarray) -> None:
        self.augment = augment
        self.images = images
        self.draws = draws

    def __getitem__(self, batch: slice) -> torch.Tensor:
        return torch.from_numpy(crops_by(self.augment, self.images[batch], self.draws[batch]))


def process_loader(augment: Callable, images: np.ndarray, draws: np.ndarray) -> DataLoader:
    """Return a loader of BATCHES batches, made in WORKERS processes that stay."""
    options = {"num_workers": WORKERS, "persistent_workers": True}
    options["multiprocessing_context"] = "fork"  # so that they inherit what was compiled
    batches = [slice(0, N)] * BATCHES
    return DataLoader(CropBatches(augment, images, draws), None, sampler=batches, **options)


# %% [markdown]
# ## 4. How it is measured: cores, CPU time, shared memory
#
# The images are windows of a photograph that scikit-learn ships. Every rank draws numbers of its
# own and compares the loop's crops with PIL's, byte by byte. The rest is done on rank 0 alone, and
# the other ranks wait.


# %%
def from_rank_0(value: object) -> object:
    """Return rank 0's `value` on every rank."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def windows_of_a_photograph() -> np.ndarray:
    """Return N windows (N, HEIGHT, WIDTH, 3) of a photograph of 427 x 640 pixels."""
    folder = Path(importlib.util.find_spec("sklearn").origin).parent / "datasets" / "images"
    photo_HWC = np.asarray(Image.open(folder / "china.jpg"))
    last = (427 - HEIGHT, 640 - WIDTH)
    corners = np.random.default_rng(SEED).integers(last, size=(N, 2), endpoint=True)
    return np.stack([photo_HWC[y : y + HEIGHT, x : x + WIDTH] for y, x in corners])


# %% [markdown]
# CPU time is that of this process and its workers, with all their threads. Where a batch lies, the
# kernel says: in /proc/self/maps it lists what this process has mapped, with an `s` where other
# processes see the same memory.


# %%
def cpu_seconds() -> float:
    """Return the CPU time so far of this process and its workers."""
    times = [process.cpu_times() for process in (psutil.Process(), *psutil.Process().children())]
    return sum(one.user + one.system for one in times)


def pace(make: Callable[[], int]) -> tuple[float, float]:
    """Let `make` make crops; return the CPU seconds that this takes per second, and per crop."""
    cpu = cpu_seconds()
    start = time.perf_counter()
    crops = make()
    wall = time.perf_counter() - start
    cpu = cpu_seconds() - cpu
    return cpu / wall, cpu / crops


def shared_bytes(array: np.ndarray) -> int:
    """Return how many bytes of an array lie in memory that is shared between processes."""
    first = array.ctypes.data
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, *_ = line.split()
        start, end = (int(address, 16) for address in addresses.split("-"))
        if permissions.endswith("s"):
            found += max(0, min(end, first + array.nbytes) - max(start, first))
    return found


# %% [markdown]
# Threads do three more things for comparison: run the same loop as Python reads it (four crops take
# it long enough), make NumPy's crops, and share the loop as numba does. With `prange` for `range`
# and `parallel=True`, one call from one Python thread is enough: threads of numba's own take a part
# of the images each. All ways take turns, five times, and medians count. The loaders begin, since
# their workers are forked: better before this process has threads of ours.


# %%
def by_threads(
    pool: ThreadPoolExecutor, augment: Callable, images: np.ndarray, draws: np.ndarray, batches: int
) -> Callable[[], int]:
    """Return a function that lets threads fill so many batches, and returns how many crops."""
    batch_NSSC = np.empty((len(images), S, S, 3), np.uint8)

    def make() -> int:
        for _ in range(batches):
            fill_by_threads(pool, augment, images, draws, batch_NSSC)
        return batches * len(images)

    return make


def shared_by_numba(loop: Callable) -> Callable:
    """Return the compiled loop over images, which WORKERS of numba's own threads share."""
    numba.set_num_threads(min(WORKERS, numba.config.NUMBA_NUM_THREADS))

    def augment_prange(images: np.ndarray, draws: np.ndarray, crops: np.ndarray) -> None:
        for image in numba.prange(len(images)):
            i = np.int64(image)  # prange counts unsigned; to numba unsigned + signed is a float
            loop(images[i : i + 1], draws[i : i + 1], crops[i : i + 1])

    return numba.njit(parallel=True, nogil=True)(augment_prange)


# %% [markdown]
# What a queue pickles is asked of a worker, which does for it what the queue does.


# %%
class PickledSizes(CropBatches):
    """In the place of each batch: how many bytes a worker's queue pickles for it."""

    def __getitem__(self, batch: slice) -> int:
        return len(ForkingPickler.dumps(super().__getitem__(batch)))


def measure(images: np.ndarray, draws: np.ndarray, expected: np.ndarray) -> dict[str, object]:
    """On rank 0: each way's median pace, what lies in shared memory, how many bytes are wrong."""
    held = compiled(augment_loop, nogil=False)
    released = compiled(augment_loop, nogil=True)
    for augment in (held, released):
        crops_by(augment, images, draws)  # compiles
    one = {"sampler": [slice(0, N)], "num_workers": 1, "multiprocessing_context": "fork"}
    (pickled,) = DataLoader(PickledSizes(released, images, draws), None, **one)
    loader = process_loader(released, images, draws)
    for last in loader:
        from_worker = last.numpy()
    wrong = (from_worker != expected).sum()
    shared = shared_by_numba(released)
    wrong += (crops_by(shared, images, draws) != expected).sum()
    batch_NSSC = np.empty((N, S, S, 3), np.uint8)

    def by_prange() -> int:
        for _ in range(BATCHES):
            shared(images, draws, batch_NSSC)
        return BATCHES * N

    with ThreadPoolExecutor(WORKERS) as pool:
        for augment in (held, released):
            fill_by_threads(pool, augment, images, draws, batch_NSSC)
            wrong += (batch_NSSC != expected).sum()
        ways = {
            "threads, not compiled": by_threads(pool, augment_loop, images[:4], draws[:4], 1),
            "threads, NumPy": by_threads(pool, augment_numpy, images, draws, BATCHES // 4),
            "threads, GIL held": by_threads(pool, held, images, draws, BATCHES),
            "threads, GIL released": by_threads(pool, released, images, draws, BATCHES),
            "threads, prange": by_prange,
            "DataLoader": lambda: sum(len(batch) for batch in loader),
        }
        paces = {name: [] for name in ways}
        for _ in range(5):
            for name, make in ways.items():
                paces[name].append(pace(make))
    medians = {name: np.median(turns, axis=0).tolist() for name, turns in paces.items()}
    inside = [threads_inside(nogil, images, draws) for nogil in (False, True)]
    found = {"paces": medians, "inside": inside, "wrong": wrong, "pickled": pickled}
    return found | {"shared": (shared_bytes(from_worker), shared_bytes(batch_NSSC))}


# %% [markdown]
# Two cores at most can be in use, and a thread that waits for the other at a batch's end uses none:
# the slack is 0.3. Two equal ways differ by a few percent in CPU time; the row of question 4 asks
# for half as much again.


# %%
def check_threads(images: np.ndarray, draws: np.ndarray, expected: np.ndarray) -> None:
    """Claim what threads do and what a DataLoader's processes do, and what it costs."""
    found = from_rank_0(measure(images, draws, expected) if RANK == 0 else None)
    held, released = found["inside"]
    claim("bytes in which batches differ from PIL's crops", 0, found["wrong"])
    claim("threads in the loop at one time, GIL held", 1, held, question=1)
    claim("threads in the loop at one time, GIL released", 2, released, question=2)
    for name, (cores, cost) in found["paces"].items():
        shown = f"{cores:.2f} cores, {1e6 * cost:7,.0f} CPU microseconds per crop"
        print0(f"{'':13}{name:22} {shown}")
    judge_paces(found["paces"])
    loader, threads = found["shared"]
    claim("bytes per crop in shared memory, DataLoader", 3 * S * S, loader / N, question=3)
    claim("bytes pickled per batch, DataLoader", 1000, found["pickled"], "<=")
    claim("bytes per crop in shared memory, threads", 0, threads / N)


def judge_paces(paces: dict[str, tuple[float, float]]) -> None:
    """Claim what the clock says: {way: (cores in use, CPU seconds per crop)}."""
    python, _ = paces["threads, not compiled"]
    held, _ = paces["threads, GIL held"]
    released, by_thread = paces["threads, GIL released"]
    shared, _ = paces["threads, prange"]
    _, by_process = paces["DataLoader"]
    claim("cores in use by 2 threads, not compiled", 1, python, atol=0.2, timed=True)
    claim("cores in use by 2 threads, GIL held", 1, held, atol=0.2, question=1, timed=True)
    if os.cpu_count() == 1:
        blocked("cores in use by 2 threads, GIL released", needs="2 cores")
        blocked("cores in use by 2 threads, prange", needs="2 cores")
    else:
        two = "cores in use by 2 threads, GIL released"
        claim(two, 2, released, atol=0.3, question=2, timed=True)
        claim("cores in use by 2 threads, prange", 2, shared, atol=0.3, timed=True)
    more = by_process / by_thread
    claim("CPU time per crop, DataLoader / threads", 1.5, more, ">=", question=4, timed=True)


# %% [markdown]
# ## What you should have seen
#
# 1. One. To Python a compiled function that holds the GIL is one long step: until it returns no
#    other thread makes any, and a training loop in this process stands still as well. The same loop
#    without a compiler uses one core too; there the threads take turns in the middle of it, every 5
#    milliseconds, and get no more done.
# 2. Two. In the loop there are addresses and numbers, nothing that Python counts, so both threads
#    are in it at one time. NumPy's lie between: it releases the GIL within a step and needs it from
#    step to step. With `prange` it is two as well, and you write no threads.
# 3. 49,152: a byte per pixel and color. Each was written by the loop into the worker's memory, and
#    once more, by a copy, into the segment. Only the handle is pickled, less than a kilobyte for a
#    batch of 6 MB. With threads it is none: what the loop writes is what the trainer reads.
# 4. More: here more than twice as much. The loop is the same, and both call it for dozens of crops
#    at once, so the difference is the border between processes: a new array and a new segment for
#    each batch, whose pages the kernel must find and clear, the copy, the handle, and the pages
#    mapped a second time. The slower the augmentation, the less of that one notices. A ring of
#    shared segments, written in place again and again, would save most; a DataLoader has none.
#
# **Try.** With `nogil=False` everywhere two claims fail, threads in the loop and cores in use with
# the GIL released. No pixel is different and no error says so: half the speed is all one sees.
# Without the minimum, 200 * 96 // 64 = 300 becomes 44 in 8 bits, bright places turn dark, and the
# claim of NumPy's crops fails.
#
# **When.** Keep PIL or torchvision in worker processes while the GPU does not wait for them. If it
# does, and the time goes into loops over bytes, compile these, whole, and let threads call them.
# Two warnings. The compiler checks no index unless `boundscheck=True`: a draw too large reads
# another image's bytes. And random numbers that threads draw need more care than those that one
# thread has drawn before (data-loading/16). Python built without a GIL (3.13t and later) lets
# threads run any code at once; there the loop is compiled for its speed alone.
#
# **On GPUs** (not measured here) the crops are still made on the cores, of which a GPU often has
# ten to twenty. But a GPU copies by itself only from **pinned** memory, pages that the kernel does
# not move; from any other the driver first copies to a pinned buffer of its own, and the host
# waits. Threads can fill pinned memory, `torch.empty(shape, dtype=torch.uint8, pin_memory=True)`,
# seen through its `.numpy()`; it may be filled again when its copy is done. Workers cannot: for
# `pin_memory=True` a DataLoader copies every batch once more, in a thread of the trainer's. If the
# cores do not suffice, DALI or torchvision's transforms augment on the GPU.
#
# **FFCV** compiles whole pipelines with `nogil=True`, calls them in one Python thread per epoch,
# and lets numba's own threads share each batch (`prange`). At a thousand ranks all of this is as
# here, in each of them.


# %%
def main() -> None:
    command_line()
    launch()
    setup()
    if Image is None or importlib.util.find_spec("sklearn") is None:
        blocked("crops, by threads and by processes", needs="Pillow, and scikit-learn's photograph")
        finish()
    images = windows_of_a_photograph()
    draws = np.random.default_rng(RANK).integers(LEAST, np.add(LEAST, CHOICES), (N, 6))
    expected = crops_by(augment_pil, images, draws)
    found = crops_by(augment_numpy, images, draws)
    claim("bytes in which NumPy's crops differ from PIL's", 0, (found != expected).sum())
    if numba is None:
        for text in ("the compiled loop", "threads against processes"):
            blocked(text, needs="numba: pip install -e '.[data]'")
        finish()
    found = crops_by(compiled(augment_loop, nogil=True), images, draws)
    claim("bytes in which the loop's crops differ from PIL's", 0, (found != expected).sum())
    check_threads(images, draws, expected)
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
