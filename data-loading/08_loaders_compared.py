"""Data loaders compared: PyTorch's DataLoader, FFCV, and forty lines by hand
==========================================================================

**Question.** Five loaders deliver the same crops of the same images, at very different costs. What
does each of them leave out, and which of them is enough?

**Predict**, and write it down before you run:

1. A DataLoader decodes JPEGs. Another one reads the same images as raw pixels from a file that is
   mapped into memory, and all else is the same. How many times less core time does an image cost?
2. Threads of one process now do that work in place of worker processes. How many times less again?
3. Which loader is last with its first batch: a DataLoader, FFCV, or the one by hand?
4. An epoch has 205 images, on 4 ranks, in batches of 8 per rank. How many come twice from a
   DataLoader with a `DistributedSampler`? How many never come from FFCV's `Loader`, whose default
   is `drop_last=True`?
5. Training stops after three batches on each rank, and goes on with a new loader. How many images
   come again? How many would, if the loader had saved one integer?

**Run.**

    torchrun --standalone --nproc-per-node=4 08_loaders_compared.py    # NCCL on 4 GPUs, else gloo
    python 08_loaders_compared.py                                      # the same, started for you

Not run on several GPUs. One node. It needs numba and torchvision; FFCV needs the Debian packages of
packages.txt. `pip install -e '.[ffcv]'` brings all three.

**Try.** In `RawLoader.__iter__` leave out `self.consumed += BATCH`: does the loader still deliver
what it should, and which claims fail? In `data_loader` add `drop_last=True` to what `DataLoader` is
given: which claims fail now?

**Before.** data-loading/04_jit_augmentation.py: the GIL, and compiled loops without it.
data-loading/06_tokens.py: one global order, and ranks that cut it.

**Next.** benchmarks/loaders.py: eight loaders on 1, 2 and 4 ranks. Its table is in
data-loading/README.md.
"""

import argparse
import contextlib
import ctypes
import functools
import gc
import io
import itertools
import json
import logging
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing import shared_memory
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

Loader = transforms = njit = None
if "RANK" in os.environ or WORLD_SIZE > 1:  # a launcher needs none of it
    with contextlib.suppress(ImportError):  # the extra [data]
        from numba import config, njit

        config.DISABLE_JIT = RANK != 0  # what FFCV compiles on import is needed on rank 0 alone
    with contextlib.suppress(ImportError):  # the extra [ffcv]
        from ffcv import writer as ffcv_writer
        from ffcv.fields import IntField, RGBImageField, decoders
        from ffcv.loader import Loader, OrderOption
        from ffcv.pipeline.compiler import Compiler
        from ffcv.transforms import RandomHorizontalFlip, ToTensor
        from ffcv.writer import DatasetWriter
    if njit:
        config.DISABLE_JIT = False
    if RANK == 0:  # which alone makes and decodes JPEGs
        with contextlib.suppress(ImportError):
            from torchvision import transforms
            from torchvision.datasets.folder import default_loader

N = 205  # images, HEIGHT x WIDTH pixels
HEIGHT = 375
WIDTH = 500
CROP = 224  # rows and columns of a crop
BATCH = 32  # images per step, over all ranks
WORKERS = 2  # processes or threads of a loader
AHEAD = 3  # batches that threads prepare in advance
SEED = 0
MEAN = [0.485, 0.456, 0.406]  # of ImageNet's pixels between 0 and 1
STD = [0.229, 0.224, 0.225]

# Shapes: N images, B of them in a batch, S slots; H, W, C: rows, columns, colors.

# %% [markdown]
# ## 1. A loader is what it leaves out
#
# A training step wants 32 crops of 224 x 224 pixels, half of them mirrored. A DataLoader, as most
# tutorials write it, does four things for each image. It **decodes** a JPEG. It copies a **crop**
# out of the image. It makes normalized **floats** of the crop, and collates 32 of them, which is
# another copy. And it hands the batch over from a worker **process** to the trainer's.
#
# Of these four only the crop has to be copied anew in every epoch. Each loader of this lesson
# leaves out one thing more than the one above it, and as little else changes as libraries allow:
#
#                          decode     floats,     process to    copy
#                          a JPEG     collate     process       a crop
#     DataLoader, plain       x          x            x            x
#     DataLoader, JPEG        x                       x            x
#     DataLoader, raw                                 x            x
#     by hand, raw                                                 x
#     FFCV, raw                                                    x, and mirrors afterwards
#
# So **the difference of two rows is mostly the price of one thing**. One price is larger than the
# others together, and as long as it is paid, hardly anything else matters.
#
# What is left out is paid for elsewhere. Raw pixels were decoded once, beforehand: they take six
# times the bytes of these JPEGs, and should fit into the page cache. Threads need code that runs
# without the GIL, and it is compiled before the first batch. And two things should never be left
# out, but often are: a few images of each epoch, and the place at which a run stopped. So there are
# five columns to compare: core time, memory, time to the first batch, which images come in an
# epoch, and which come again after a stop.

# %% [markdown]
# ## 2. What remains: copying a crop
#
# Three of the loaders share this loop. It is one like those of data-loading/04: numba compiles it,
# and it runs without the GIL.


# %%
def crop_and_mirror(
    images_NHWC: np.ndarray, index_B: np.ndarray, draws_3B: np.ndarray, out_BHWC: np.ndarray
) -> None:
    """Copy a crop of each image to its place in the batch, mirrored or not."""
    for b in range(len(index_B)):
        y = draws_3B[0, b]
        x = draws_3B[1, b]
        mirrored = draws_3B[2, b]
        for row in range(CROP):
            source_WC = images_NHWC[index_B[b], y + row, x : x + CROP]
            target_WC = out_BHWC[b, row]
            for column in range(CROP):
                from_column = CROP - 1 - column if mirrored else column
                for color in range(3):
                    target_WC[column, color] = source_WC[from_column, color]


@functools.cache
def compiled() -> Callable:
    """Return that loop as machine code; without numba as it is, which is slow."""
    return njit(nogil=True)(crop_and_mirror) if njit else crop_and_mirror


def draw(random: np.random.Generator, count: int) -> np.ndarray:
    """Return y, x and whether it is mirrored, of so many crops: (3, count)."""
    choices = np.array([[HEIGHT - CROP + 1], [WIDTH - CROP + 1], [2]])
    return random.integers(choices, size=(3, count))


# %% [markdown]
# ## 3. DataLoader: plain, without floats, without decoding
#
# `Photos` is the dataset that everybody writes, one image at a time. `Batches` leaves out the
# second column. Pixels stay bytes, a quarter of the floats, and are normalized on the GPU. And
# since DataLoader hands all indices of a batch to `__getitems__` (plural), where a dataset has it,
# each crop is written into its place and nothing is collated.


# %%
class Photos(Dataset):
    """(crop, index) of each JPEG in a folder, the crop in normalized floats (C, H, W)."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        crop = [transforms.RandomCrop(CROP), transforms.RandomHorizontalFlip()]
        floats = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
        self.transform = transforms.Compose(crop + floats)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple:
        return self.transform(default_loader(self.paths[index])), index


class Batches(Dataset):
    """(crops, indices), a whole batch at a time; the crops are bytes (B, H, W, C)."""

    def __init__(self, photo: Callable[[int], np.ndarray]) -> None:
        self.photo = photo  # index -> its pixels (H, W, C)

    def __len__(self) -> int:
        return N

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        image_BHWC = np.empty((len(indices), CROP, CROP, 3), np.uint8)
        draws_3B = draw(np.random.default_rng(), len(indices))
        first = np.zeros(1, int)
        for b, index in enumerate(indices):
            photo_NHWC = self.photo(index)[None]  # one image
            compiled()(photo_NHWC, first, draws_3B[:, [b]], image_BHWC[b : b + 1])
        return torch.from_numpy(image_BHWC), torch.tensor(indices)


# %% [markdown]
# `photo` decides about the first column: it is a decoder, or a view of one file that holds nothing
# but pixels and is mapped into memory. On n ranks a `DistributedSampler` deals out the shuffled
# images. Where n does not divide N it **pads**: the first few images come once more, at the end.


# %%
def data_loader(dataset: Dataset, rank: int, ranks: int) -> DataLoader:
    """Return a DataLoader of this rank's share of the images, shuffled."""
    sampler = DistributedSampler(dataset, ranks, rank, seed=SEED)
    options = {"num_workers": WORKERS, "persistent_workers": True}
    options["multiprocessing_context"] = "fork"
    options["worker_init_fn"] = end_with_the_rank
    if isinstance(dataset, Batches):
        options["collate_fn"] = lambda batch: batch
    return DataLoader(dataset, BATCH // ranks, sampler=sampler, **options)


def end_with_the_rank(worker: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def photos_in(place: Path) -> list[Path]:
    return sorted((place / "photos").iterdir())


def mapped(path: Path) -> np.ndarray:
    """Return the images of a file that is nothing but their pixels, mapped into memory."""
    return np.asarray(np.memmap(path, np.uint8, "r")).reshape(-1, HEIGHT, WIDTH, 3)


def plain_loader(place: Path, rank: int, ranks: int) -> DataLoader:
    return data_loader(Photos(photos_in(place)), rank, ranks)


def jpeg_loader(place: Path, rank: int, ranks: int) -> DataLoader:
    paths = photos_in(place)
    return data_loader(Batches(lambda i: np.asarray(default_loader(paths[i]))), rank, ranks)


def raw_loader(place: Path, rank: int, ranks: int) -> DataLoader:
    images_NHWC = mapped(place / "photos.raw")
    return data_loader(Batches(lambda i: images_NHWC[i]), rank, ranks)


# %% [markdown]
# ## 4. By hand: threads, slots, and one integer
#
# Since the compiled loop holds no GIL, threads can do the work of processes, and nothing has to be
# handed over: a batch lies where the trainer reads it. Two threads fill **slots**, batches that are
# allocated once and used again and again. A queue of three keeps them ahead of the trainer:
#
#     thread 1    fill slot 0        fill slot 2        fill slot 0  ...
#     thread 2         fill slot 1        fill slot 3        fill slot 1  ...
#     trainer                 slot 0   slot 1   slot 2   slot 3   slot 0  ...
#
# The order of the images is that of data-loading/06: one endless line of positions, epoch after
# epoch. A step takes the next 32, and rank r of n takes every n-th of these. So nothing is repeated
# or left out, and the place of a run is one integer, `consumed`, to be saved next to the weights. A
# step's crops are drawn from its first position, so they too are the same after a stop.


# %%
@functools.lru_cache(maxsize=2)
def order(epoch: int) -> np.ndarray:
    return np.random.default_rng([SEED, epoch]).permutation(N)


class RawLoader:
    """Batches of random crops from a file of raw pixels, without end."""

    def __init__(self, path: Path, rank: int, ranks: int, consumed: int = 0) -> None:
        self.images_NHWC = mapped(path)
        self.mine = slice(rank, BATCH, ranks)  # of each step
        share = len(range(rank, BATCH, ranks))
        self.slots_SBHWC = torch.empty(AHEAD + 1, share, CROP, CROP, 3, dtype=torch.uint8)
        self.consumed = consumed  # images that all ranks have been given: the whole state

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (image_BHWC, index_B); a batch is overwritten when two more were asked for."""
        first = self.consumed
        pending = deque()
        with ThreadPoolExecutor(WORKERS) as threads:
            for step in itertools.count():
                slot_BHWC = self.slots_SBHWC[step % len(self.slots_SBHWC)]
                pending.append(threads.submit(self.fill, slot_BHWC, first + step * BATCH))
                if len(pending) == AHEAD:
                    batch = pending.popleft().result()
                    self.consumed += BATCH
                    yield batch

    def fill(self, slot_BHWC: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill a slot with this rank's images of the step that begins at position `first`."""
        positions = range(first, first + BATCH)[self.mine]
        index_B = np.array([order(position // N)[position % N] for position in positions])
        draws_3B = draw(np.random.default_rng([SEED, first]), BATCH)[:, self.mine]
        self.copy(index_B, np.ascontiguousarray(draws_3B), slot_BHWC.numpy())
        return slot_BHWC, torch.from_numpy(index_B)

    def copy(self, index_B: np.ndarray, draws_3B: np.ndarray, out_BHWC: np.ndarray) -> None:
        compiled()(self.images_NHWC, index_B, draws_3B, out_BHWC)


# %% [markdown]
# ## 5. FFCV: the same things left out, by a library
#
# FFCV also has one file, whose images were decoded when it was written, and threads, compiled code
# and slots. Its decoder draws crops of any size and resizes them. Here `scale` and `ratio` leave it
# one size, which it copies as it is; it mirrors in a second pass over the batch. On several ranks
# it asks the same `DistributedSampler`. But it has a `drop_last` of its own, True unless told,
# which **drops** what does not fill a rank's last batch.


# %%
def random_crops() -> list:
    """Return FFCV's pipeline for crops of CROP x CROP pixels that are not resized."""
    share = CROP * CROP / (HEIGHT * WIDTH)  # of the image's area
    one_size = {"scale": (share, share), "ratio": (1.0, 1.0)}
    crop = decoders.RandomResizedCropRGBImageDecoder((CROP, CROP), **one_size)
    return [crop, RandomHorizontalFlip(), ToTensor()]


def ffcv_loader(place: Path, ranks: int, image: list | None, **options: object) -> "Loader":
    """Return FFCV's loader of (image, index), or without a pipeline for `image` of (index,)."""
    gc.collect()  # an old loader, freed while numba compiles, prints "Exception ignored: KeyError"
    pipelines = {"image": image, "index": [decoders.IntDecoder(), ToTensor()]}
    options = {"order": OrderOption.RANDOM, "distributed": ranks > 1, "seed": SEED} | options
    options |= {"num_workers": WORKERS, "batches_ahead": AHEAD}
    return Loader(str(place / "photos.beton"), BATCH // ranks, pipelines=pipelines, **options)


# %% [markdown]
# ## 6. How it is measured: core time, memory, first batch
#
# Rank 0 makes JPEGs of about 100 kB, and writes what the decoder makes of them into both raw files.
# So all loaders deliver the same pixels.


# %%
class Nameless(shared_memory.SharedMemory):
    """Shared memory that forked processes inherit, and that no kill leaves behind by its name."""

    def __init__(self, *given: object, **options: object) -> None:
        super().__init__(*given, **options)
        super().unlink()

    def unlink(self) -> None:
        """Nothing: its name went when it came."""


def prepare(place: Path) -> None:
    """Fill `place` with photos/*.jpg, photos.raw and photos.beton, as far as packages are here."""
    from sklearn.datasets import load_sample_images

    photographs = load_sample_images().images  # two of 427 x 640 pixels
    random = np.random.default_rng(SEED)
    (place / "photos").mkdir()
    pixels_NHWC = np.memmap(place / "photos.raw", np.uint8, "w+", shape=(N, HEIGHT, WIDTH, 3))
    for index in range(N):
        y, x = random.integers([427 - HEIGHT + 1, 640 - WIDTH + 1])
        pixels_NHWC[index] = photographs[index % 2][y : y + HEIGHT, x : x + WIDTH]
        if transforms:
            path = place / f"photos/{index:04}.jpg"
            transforms.functional.to_pil_image(pixels_NHWC[index]).save(path, quality=97)
            pixels_NHWC[index] = default_loader(path)
    if Loader:
        multiprocessing.set_start_method("fork", force=True)  # FFCV's writers inherit the pixels
        ffcv_writer.shared_memory = SimpleNamespace(SharedMemory=Nameless)
        fields = {"image": RGBImageField("raw"), "index": IntField()}
        writer = DatasetWriter(str(place / "photos.beton"), fields, num_workers=1)
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
            writer.from_indexed_dataset([(pixels_NHWC[i], i) for i in range(N)], chunksize=16)
        for process in multiprocessing.active_children():
            process.join()  # which FFCV forgets


# %% [markdown]
# Then rank 0 makes each loader for itself alone, while the other ranks wait, and asks the kernel:
#
# - **First batch**: seconds from making the loader until the batch is there.
# - **Memory** of all its processes: their PSS, in which a page that k processes share counts 1/k in
#   each. *Own* memory is apart from pages *mapped* from files, which belong to the page cache.
# - **Core time**: CPU seconds of all its processes, per image. The loaders take turns, and with
#   them what limits them, alone in one thread: decoding the JPEGs, and copying crops.


# %%
ROUNDS = 8  # over the raw images in a turn: one would be too short for the kernel's clock


def memory() -> Counter:
    """Return the PSS of all processes in MB, by kind: "Anon" and "Shmem" their own, "File"."""
    held = Counter()
    for pid in (os.getpid(), *workers()):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        for kind, kib in re.findall(r"^Pss_(Anon|Shmem|File): +(\d+) kB", text, re.M):
            held[kind] += 1024 * int(kib) / 1e6
    return held


def core_time() -> float:
    """Return the CPU seconds so far of this process and its workers."""
    spent = time.process_time()  # finer than what the kernel tells of other processes
    for pid in workers():
        times = psutil.Process(pid).cpu_times()
        spent += times.user + times.system
    return spent


def workers() -> list[int]:
    return [worker.pid for worker in multiprocessing.active_children()]


def decoding(place: Path) -> Iterator[tuple]:
    """Decode every JPEG, and do nothing else."""
    for path in photos_in(place):
        yield default_loader(path), [0]


def copying(place: Path) -> Iterator[tuple]:
    """Copy a crop of every raw image to its place in a batch, and do nothing else."""
    images_NHWC = mapped(place / "photos.raw")
    image_BHWC = np.empty((BATCH, CROP, CROP, 3), np.uint8)
    for index in np.tile(order(0), ROUNDS):
        image_BHWC[index % BATCH] = images_NHWC[index, 75 : 75 + CROP, 138 : 138 + CROP]
        yield image_BHWC, [index]


# %% [markdown]
# A turn of a DataLoader or of FFCV is one epoch, or ROUNDS of them, so that nothing is prepared in
# advance for the next turn. FFCV goes before the DataLoaders: rank 0 shares its pages with their
# workers, and each page that it writes to meanwhile would be copied, and counted as FFCV's. The
# table is printed, and ratios of its rows are claimed.


# %%
def makers(place: Path) -> dict[str, tuple[Callable, int]]:
    """Return what makes each loader, for one rank, and of how many batches a turn consists."""
    epoch = math.ceil(N / BATCH)
    tiled = {"indices": np.tile(np.arange(N), ROUNDS)}  # since FFCV allocates slots in each epoch
    made = {"by hand, raw": (lambda: RawLoader(place / "photos.raw", 0, 1), ROUNDS * epoch)}
    if Loader:
        make = functools.partial(ffcv_loader, place, 1, random_crops(), **tiled)
        made["FFCV, raw"] = (make, ROUNDS * N // BATCH)
    made["DataLoader, raw"] = (lambda: raw_loader(place, 0, 1), ROUNDS * epoch)
    made["DataLoader, JPEG"] = (lambda: jpeg_loader(place, 0, 1), epoch)
    made["DataLoader, plain"] = (lambda: plain_loader(place, 0, 1), epoch)
    return made


def one_turn(loader: Iterable, batches: int) -> Iterator[tuple]:
    """Return so many batches of a loader, epoch after epoch."""
    return itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), batches)


def measure(place: Path) -> tuple[dict[str, tuple], dict[str, float]]:
    """On rank 0: (MB own, MB mapped, seconds to the first batch), and core ms per image."""
    found = {}
    turns = {}
    for name, (make, count) in makers(place).items():
        before = memory()
        start = time.perf_counter()
        turns[name] = functools.partial(one_turn, make(), count)
        batches = turns[name]()
        next(batches)
        first = time.perf_counter() - start
        time.sleep(0.2)  # until all that is prepared in advance is there
        more = {kind: mb - before[kind] for kind, mb in memory().items()}
        found[name] = (more["Anon"] + more["Shmem"], more["File"], first)
        for _ in batches:  # the rest of this turn is the warm-up
            pass
        del batches  # and FFCV's slots with it
    turns["decoding alone"] = functools.partial(decoding, place)
    turns["copying alone"] = functools.partial(copying, place)
    spent = {name: [] for name in turns}
    for _ in range(2):
        for name, turn in turns.items():
            before = core_time()
            images = sum(len(index) for _, index in turn())
            spent[name].append(1e3 * (core_time() - before) / images)
    return found, {name: median(ms) for name, ms in spent.items()}


def check_costs(place: Path) -> None:
    """Print what rank 0 measures, and the price of each thing; claim ratios."""
    found, ms = gather_objects(measure(place) if RANK == 0 else None)[0]
    print0(f"\n{'':31}ms of a core  images/core s     MB own + mapped   first batch")
    for name in ms:
        told = f"{'':13}{name:18}{ms[name]:12.3f}{1e3 / ms[name]:15,.0f}"
        if name in found:
            told += "{:11.0f} + {:6.0f}{:12.2f} s".format(*found[name])
        print0(told)
    plain, jpeg, raw = (ms[f"DataLoader, {name}"] for name in ("plain", "JPEG", "raw"))
    hand = ms["by hand, raw"]
    prices = f"floats {plain - jpeg:.2f}, decoding {jpeg - raw:.2f}, processes {raw - hand:.2f}"
    print0(f"{'':13}The price in ms: {prices}, a crop {hand:.2f}\n")
    clock = {"sign": ">=", "timed": True}
    claim("core time: DataLoader, plain / JPEG", 1.2, plain / jpeg, **clock)
    claim("core time: DataLoader, JPEG / raw", 3, jpeg / raw, question=1, **clock)
    claim("core time: decoding alone / DataLoader, JPEG", 0.5, ms["decoding alone"] / jpeg, **clock)
    claim("core time: DataLoader, raw / by hand", 1.3, raw / hand, question=2, **clock)
    if Loader:
        claim("core time: by hand / FFCV", 1, hand / ms["FFCV, raw"], sign="<=", timed=True)
        own, _, first = found["FFCV, raw"]
        later = first / found["DataLoader, raw"][2]
        claim("first batch: FFCV / DataLoader", 3, later, question=3, **clock)
        more = own / found["by hand, raw"][0]
        claim("own memory: FFCV / by hand", 4, more, ">=", varies=True)


# %% [markdown]
# ## 7. How it is measured: which images come
#
# Now all ranks load. Each image carries its index, so what is counted was delivered, not planned.
# A stop is tried: three batches, and then three of a new loader.
#
# The sampler gives each rank a list of 52 images. What it pads stands last in the lists of the last
# ranks. FFCV drops from each list what fills no batch of 8; of that, padding is no loss. (FFCV runs
# in plain Python here, which spares compiling on every rank.) By hand, an epoch is the first N
# positions, and after a stop the crops must be those of a run without one.
#
# Pixels are compared before any crop: whole images, those of the raw file with what the decoder
# makes of the JPEGs, and FFCV's with the raw file.


# %%
STOP = 3  # batches on each rank


def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


def delivered(batches: Iterable, steps: int | None = None) -> np.ndarray:
    """Return the indices of the images in the first batches, or in all."""
    indices = []
    for *_, index_B in itertools.islice(batches, steps):
        indices.append(index_B.numpy().flatten().copy())  # FFCV writes over its batches
    return np.concatenate(indices)


def counts(index_N: np.ndarray) -> np.ndarray:
    """Return how often each of the N images comes, over all ranks."""
    return np.bincount(np.concatenate(gather_objects(index_N)), minlength=N)


def check_decoded(place: Path) -> None:
    """Compare whole images of the raw file with what the decoder makes of the JPEGs, on rank 0."""
    raw_BHWC = mapped(place / "photos.raw")[:BATCH]
    decoded = [default_loader(p) for p in photos_in(place)[:BATCH]] if RANK == 0 else raw_BHWC
    claim("raw file: bytes of pixels that differ", 0, (np.stack(decoded) != raw_BHWC).sum())


def check_libraries(place: Path) -> None:
    """Claim which images DataLoader and FFCV deliver."""
    share = BATCH // WORLD_SIZE  # of a step, on each rank
    seen = STOP * share * WORLD_SIZE
    padded = -N % WORLD_SIZE
    make = functools.partial(raw_loader, place, RANK, WORLD_SIZE)
    epoch = delivered(make())
    times = counts(epoch)
    claim("DataLoader: samples that never come", 0, (times == 0).sum())
    claim("DataLoader: samples that come twice", padded, (times == 2).sum(), question=4)
    expected = 2 if WORLD_SIZE - padded <= RANK else 1
    claim("DataLoader: how often a rank's last one comes", expected, times[epoch[-1]])
    both = counts(epoch[: STOP * share]) * counts(delivered(make(), STOP))
    claim("DataLoader: samples that come again", seen, (both > 0).sum(), question=5)
    if Loader:
        Compiler.set_enabled(False)
        make = functools.partial(ffcv_loader, place, WORLD_SIZE, None)
        epoch = delivered(make())
        places = math.ceil(N / WORLD_SIZE)  # in each rank's list
        dropped = places % share
        never = WORLD_SIZE * dropped - padded if dropped else 0
        claim("FFCV: samples that a rank is given", places - dropped, len(epoch))
        claim("FFCV: samples that never come", never, (counts(epoch) == 0).sum(), question=4)
        with contextlib.closing(iter(make())) as batches:  # else its thread goes on
            both = counts(epoch[: STOP * share]) * counts(delivered(batches, STOP))
        claim("FFCV: samples that come again", seen, (both > 0).sum(), question=5)
        whole = [decoders.SimpleRGBImageDecoder(), ToTensor()]
        some = {"order": OrderOption.SEQUENTIAL, "indices": np.arange(BATCH)}
        image_BHWC, _ = next(iter(ffcv_loader(place, 1, whole, **some)))
        differ = image_BHWC.numpy() != mapped(place / "photos.raw")[:BATCH]
        claim("FFCV: bytes of pixels that differ", 0, differ.sum())


def check_by_hand(path: Path) -> None:
    """Claim which images the loader by hand delivers, and that a stop changes nothing."""
    steps = math.ceil(N / BATCH)
    position = np.arange(steps * BATCH)
    mine = position[position % BATCH % WORLD_SIZE == RANK]
    epoch = delivered(RawLoader(path, RANK, WORLD_SIZE), steps)[mine < N]
    claim("by hand: samples that do not come once", 0, (counts(epoch) != 1).sum())
    stopped = RawLoader(path, RANK, WORLD_SIZE)
    before = counts(delivered(stopped, STOP))
    resumed = RawLoader(path, RANK, WORLD_SIZE, stopped.consumed)
    without_stop = itertools.islice(RawLoader(path, RANK, WORLD_SIZE), STOP, 2 * STOP)
    after = []
    differ = 0
    for (same_BHWC, _), (image_BHWC, index_B) in zip(without_stop, resumed, strict=False):
        differ += (image_BHWC != same_BHWC).sum()
        after.append(index_B)
    both = before * counts(np.concatenate(after))
    claim("by hand: samples that come again", 0, (both > 0).sum(), question=5)
    claim("by hand: bytes that differ from a run without stop", 0, differ)


# %% [markdown]
# ## What you should have seen
#
# 1. Six or seven times, and that is the file, not the loader. Most of what a DataLoader spends on a
#    JPEG is the decoder, as "decoding alone" shows. As long as it decodes, nothing that is done
#    around the decoder makes a loader much faster. The floats cost about half as much.
# 2. Two to three times: a batch is allocated, copied to shared memory, and another process woken.
#    What remains is the crop; "copying alone" is the least that it can take. FFCV is close, but
#    copies first and mirrors in a second pass.
# 3. FFCV, by a factor of ten and more: it compiles its whole pipeline first, the loader by hand one
#    small function. The compiler also makes it several times as large. A DataLoader's workers take
#    little as long as they only read what they share with the trainer.
# 4. Three come twice, as the last images of ranks 1, 2 and 3: -205 mod 4 = 3. From FFCV 13 never
#    come: of 52 places each rank drops the last four, which fill no batch, and of these 16 three
#    are padding. By hand nothing is repeated or left out, since a batch may span two epochs.
# 5. All 96 that had come: DataLoader and FFCV begin the epoch again, so a run that stops often sees
#    the first images of its epochs more often than the last ones. With the integer, none.
#
# **Try.** Without `self.consumed += BATCH` every batch is right, and the integer stays 0: only the
# two claims after the stop fail. With `drop_last=True` a DataLoader repeats nothing and leaves out
# 13, as FFCV does.
#
# **Which to take when.** A GPU that trains on R images per second keeps R / (images per core s) of
# the node's cores busy with loading. Count these first:
#
#     the node has these cores                     DataLoader, with bytes instead of floats
#     it has not; raw pixels fit its memory        FFCV, or a loader by hand
#     it has not; only the JPEGs fit               FFCV's JPEGs, or decode on the GPU (DALI)
#     the files lie in an object store             shards, read from front to back
#     a run must go on exactly where it stopped    one integer, or torchdata's StatefulDataLoader
#
# FFCV decodes JPEGs by libjpeg's fast DCT, which is less exact: benchmarks/loaders.py predicts a
# bound from the quantization table, and compares. On a GPU the slots by hand would be pinned, and
# since a slot is used again, a copy with `non_blocking=True` must be over in time.


# %%
def leave(place: Path, number: int, frame: object) -> None:
    """End on Ctrl-C, without the folder."""
    for other in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(other, signal.SIG_IGN)
    shutil.rmtree(place, ignore_errors=True)
    os._exit(128 + number)


def main() -> None:
    command_line()
    launch(range(1, BATCH + 1))
    if int(os.environ.get("LOCAL_WORLD_SIZE", WORLD_SIZE)) != WORLD_SIZE:
        refuse(f"needs one node, whose ranks share a folder, got {WORLD_SIZE} ranks on several")
    if WORLD_SIZE > BATCH:
        refuse(f"needs at most {BATCH} ranks, which share a batch, got {WORLD_SIZE}")
    setup()
    own = tempfile.TemporaryDirectory(prefix="loaders-") if RANK == 0 else contextlib.nullcontext()
    with own as folder:
        place = Path(gather_objects(folder)[0])
        if RANK == 0:  # the others have nothing to remove
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, functools.partial(leave, place))
            prepare(place)
        dist.barrier()
        if gather_objects(bool(njit and transforms))[0]:
            check_costs(place)
            check_decoded(place)
        else:
            blocked("what each loader costs", needs="numba, torchvision: pip install -e '.[ffcv]'")
        check_libraries(place)
        check_by_hand(place / "photos.raw")
        if Loader is None:
            blocked("FFCV: costs, samples, pixels", needs="FFCV: make .venv/all")
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
