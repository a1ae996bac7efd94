"""Data loaders compared: what a loader saves by what it leaves out
================================================================

**Question.** From a folder of JPEGs to a batch of crops it is a staircase of work. How much does
each step cost, how short can a loader be that leaves all of them out, and what else does one win or
give up by the choice?

**Predict**, and write it down before you run:

1. A DataLoader reads JPEGs. Then it reads the same images from a mapped file of raw pixels, and
   nothing else changes. How many times less of a core's time does an image take?
2. Now threads do the same work in place of DataLoader's worker processes. How many times less, once
   more?
3. FFCV has threads, too, and compiles what they do. Which is earlier with its first batch, FFCV or
   a DataLoader with two workers?
4. 205 images, 4 ranks, batches of 8. How many images come twice in an epoch of a DataLoader with a
   `DistributedSampler`, and on which ranks? How many never come in an epoch of FFCV's `Loader`,
   whose own `drop_last=True` is the default?
5. Training stops after three batches on each rank, and begins again. How many images come a second
   time in this epoch with either of them? How many if the loader had saved one integer?

**Run.**

    torchrun --standalone --nproc-per-node=4 08_loaders_compared.py    # NCCL on 4 GPUs, else gloo
    python 08_loaders_compared.py                                      # the same, started for you

Not run on several GPUs. One node. It needs numba (`pip install -e '.[data]'`); JPEGs need
torchvision; FFCV needs the Debian packages of packages.txt, then `pip install -e '.[ffcv]'`.

**Try.** In `RawLoader.__iter__` leave out `self.consumed += BATCH`: does the loader still deliver
what it should, and which claims fail? In `data_loader` add `drop_last=True` to what `DataLoader` is
given: which claims fail now?

**Before.** data-loading/04_jit_augmentation.py: the GIL, and compiled loops without it.
data-loading/06_tokens.py: one global order, and ranks that cut it.

**Next.** benchmarks/loaders.py has more loaders, on 1, 2 and 4 ranks.
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
from pathlib import Path
from statistics import median

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
WORKERS = 2
AHEAD = 3  # batches that are prepared in advance
SEED = 0
MEAN = [0.485, 0.456, 0.406]  # of ImageNet's pixels between 0 and 1
STD = [0.229, 0.224, 0.225]

# Shapes: N images, B of them in a batch, S slots; H, W, C: rows, columns, colors.

# %% [markdown]
# ## 1. The staircase
#
# A trainer wants a batch: 32 crops of 224 x 224 pixels, half of them mirrored, 4.8 MB. On the way
# from the disk a loader does some of these things for every image, and a loader is what it does
# not do:
#
#                            open a file,   make       collate:    hand over from
#                            decode JPEG    floats     copy again  process to process
#     DataLoader, plain      x              x          x           x
#     DataLoader, JPEG       x                                     x
#     DataLoader, raw                                              x
#     by hand, raw
#     FFCV, raw
#
# (FFCV leaves out the same four things, but mirrors in a second pass over the batch.)
#
# From row to row one thing is left out and all else stays, so the difference of two rows is what
# that thing costs. Nothing is free: a file of raw pixels has six times the bytes of these JPEGs and
# should fit the page cache, and what is compiled is compiled before the first batch.
#
# What all of them do is to copy a crop to its place in the batch, mirrored or not. It is a loop
# like that of data-loading/04: compiled by numba, and without the GIL.


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
# ## 2. DataLoader: plain, without floats, without JPEGs
#
# `Photos` is the dataset that everybody writes: open a file, decode it, crop it, make normalized
# floats of it. DataLoader's workers, which are processes, collate 32 of these into a batch, and
# hand it over through shared memory.
#
# `Batches` leaves out two things. Pixels stay bytes, a quarter of the floats, and are normalized on
# the GPU. And `__getitems__` (plural) is handed a whole batch of indices, so each crop is written
# into its place and nothing is collated. Where an image comes from is `photo`: a decoder, or a view
# of the mapped file.


# %%
class Photos(Dataset):
    """(crop, index) of each JPEG in a folder, the crop in normalized floats (C, H, W)."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        crop = [transforms.RandomCrop(CROP), transforms.RandomHorizontalFlip()]
        floats = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
        self.transform = transforms.Compose(crop + floats)

    def __len__(self) -> int:
        return len(self.paths)

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
# On n ranks a `DistributedSampler` deals out the shuffled samples, and repeats the first few at the
# end where n does not divide N.


# %%
def data_loader(dataset: Dataset, rank: int, ranks: int) -> DataLoader:
    """Return a DataLoader of this rank's share of the samples, shuffled."""
    sampler = DistributedSampler(dataset, ranks, rank, seed=SEED)
    options = {"num_workers": WORKERS, "persistent_workers": True}
    options["multiprocessing_context"] = "fork"
    if isinstance(dataset, Batches):
        options["collate_fn"] = lambda batch: batch
    return DataLoader(dataset, BATCH // ranks, sampler=sampler, **options)


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
# ## 3. By hand: threads, slots and one integer
#
# What is left to leave out is the way from process to process. Two threads fill **slots**, batches
# that are allocated once and used again and again. A queue of three keeps the threads ahead of the
# trainer:
#
#     thread 1    fill slot 0        fill slot 2        fill slot 0  ...
#     thread 2         fill slot 1        fill slot 3        fill slot 1  ...
#     trainer                 slot 0   slot 1   slot 2   slot 3   slot 0  ...
#
# The order is that of data-loading/06: an endless row of positions, epoch after epoch, of which a
# step takes 32 and rank r every n-th. So the state is one integer, `consumed`. It belongs into the
# checkpoint, next to the weights. The crops of a step are drawn from its first position, for all
# ranks, and each rank takes its own of them. So they are the same after a stop, and on another
# number of ranks.


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
        self.consumed = consumed  # samples that all ranks have been given: the whole state

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
        """Fill a slot with this rank's samples of the step that begins at position `first`."""
        positions = range(first, first + BATCH)[self.mine]
        index_B = np.array([order(position // N)[position % N] for position in positions])
        draws_3B = draw(np.random.default_rng([SEED, first]), BATCH)[:, self.mine]
        self.copy(index_B, np.ascontiguousarray(draws_3B), slot_BHWC.numpy())
        return slot_BHWC, torch.from_numpy(index_B)

    def copy(self, index_B: np.ndarray, draws_3B: np.ndarray, out_BHWC: np.ndarray) -> None:
        compiled()(self.images_NHWC, index_B, draws_3B, out_BHWC)


# %% [markdown]
# On a GPU the slots would be pinned (`pin_memory=True`), and since a slot is used again, the copy
# `.to(device, non_blocking=True)` must be over before two more batches are asked for.

# %% [markdown]
# ## 4. FFCV
#
# FFCV leaves out the same things: one file, whose images were decoded when it was written, threads,
# compiled code, slots. Its decoder draws crops of any size and resizes them; `scale` and `ratio`
# leave just one size here, which OpenCV copies as it is. With `distributed=True` it wraps the same
# `DistributedSampler`, and it has a `drop_last` of its own, True unless told, which drops what does
# not fill a rank's last batch.


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
# ## 5. How it is measured: which samples come
#
# Rank 0 makes JPEGs of about 100 kB, and writes what the decoder makes of them into both raw files.
# Each image carries its index, so what is counted was delivered, not planned.


# %%
def prepare(place: Path) -> None:
    """Fill `place` with photos/*.jpg, photos.raw and photos.beton, as far as packages are here."""
    from sklearn.datasets import load_sample_images

    photographs = load_sample_images().images  # two of 427 x 640 pixels
    random = np.random.default_rng(SEED)
    (place / "photos").mkdir()
    pixels_NHWC = np.memmap(place / "photos.raw", np.uint8, "w+", shape=(N, HEIGHT, WIDTH, 3))
    for index in range(N):
        y = random.integers(427 - HEIGHT + 1)
        x = random.integers(640 - WIDTH + 1)
        pixels_NHWC[index] = photographs[index % 2][y : y + HEIGHT, x : x + WIDTH]
        if transforms:
            path = place / f"photos/{index:04}.jpg"
            transforms.functional.to_pil_image(pixels_NHWC[index]).save(path, quality=97)
            pixels_NHWC[index] = default_loader(path)
    if Loader:
        multiprocessing.set_start_method("fork", force=True)  # FFCV's writers inherit the pixels
        fields = {"image": RGBImageField("raw"), "index": IntField()}
        writer = DatasetWriter(str(place / "photos.beton"), fields, num_workers=1)
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
            writer.from_indexed_dataset([(pixels_NHWC[i], i) for i in range(N)], chunksize=16)
        for process in multiprocessing.active_children():
            process.join()  # which FFCV forgets


def photos_in(place: Path) -> list[Path]:
    return sorted((place / "photos").iterdir())


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


def delivered(batches: Iterable, steps: int | None = None) -> np.ndarray:
    """Return the indices of the samples in the first batches, or in all."""
    indices = []
    for *_, index_B in itertools.islice(batches, steps):
        indices.append(index_B.numpy().flatten().copy())  # FFCV writes over its batches
    return np.concatenate(indices)


def counts(index_N: np.ndarray) -> np.ndarray:
    """Return how often each of the N samples comes, over all ranks."""
    return np.bincount(np.concatenate(gather_objects(index_N)), minlength=N)


# %% [markdown]
# A DataLoader's list is put together again from what each rank was delivered: place i of rank r was
# place i n + r. All but the first of each sample are repeats; the last ranks should have one each.
# A stop is tried with a second loader, as after a restart.


# %%
STOP = 3  # batches on each rank, before the stop


def check_data_loader(place: Path) -> None:
    index_N = delivered(raw_loader(place, RANK, WORLD_SIZE))
    list_N = np.stack(gather_objects(index_N), axis=1).flatten()
    _, first = np.unique(list_N, return_index=True)
    repeats = np.delete(np.arange(len(list_N)), first) % WORLD_SIZE
    expected = [int(0 < N % WORLD_SIZE <= rank) for rank in range(WORLD_SIZE)]
    wrong = (np.bincount(repeats, minlength=WORLD_SIZE) != expected).sum()
    claim("DataLoader: samples that never come", 0, N - len(first))
    claim("DataLoader: samples that come twice", -N % WORLD_SIZE, len(repeats), question=4)
    claim("DataLoader: ranks with other repeats", 0, wrong, question=4)
    before = counts(delivered(raw_loader(place, RANK, WORLD_SIZE), STOP))
    after = counts(index_N)
    seen = STOP * (BATCH // WORLD_SIZE) * WORLD_SIZE
    claim("DataLoader: samples that come again", seen, (before * after > 0).sum(), question=5)


def check_by_hand(path: Path) -> None:
    steps = math.ceil(N / BATCH)
    position_SB = np.arange(steps * BATCH).reshape(steps, BATCH)[:, RANK::WORLD_SIZE]
    index_N = delivered(RawLoader(path, RANK, WORLD_SIZE), steps)[position_SB.flatten() < N]
    claim("by hand: samples that do not come once", 0, (counts(index_N) != 1).sum())
    expected = copied(RawLoader(path, RANK, WORLD_SIZE), 2 * STOP)
    stopped = RawLoader(path, RANK, WORLD_SIZE)
    before = counts(delivered(stopped, STOP))
    resumed = copied(RawLoader(path, RANK, WORLD_SIZE, stopped.consumed), STOP)
    after = counts(np.concatenate([index_B for _, index_B in resumed]))
    claim("by hand: samples that come again", 0, (before * after > 0).sum(), question=5)
    pairs = zip(resumed, expected[STOP:], strict=True)
    differ = sum((image != same).sum() for (image, _), (same, _) in pairs)
    claim("by hand: bytes that differ from a run without stop", 0, differ)


def copied(loader: RawLoader, steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return copies of the first batches."""
    return [(x.numpy().copy(), index.numpy()) for x, index in itertools.islice(loader, steps)]


# %% [markdown]
# FFCV is asked for the indices alone, and in plain Python, which spares compiling on every rank.
# Its pixels are compared before any crop, whole images, bit by bit.


# %%
def check_ffcv(place: Path) -> None:
    Compiler.set_enabled(False)  # slow, the same values, and there at once
    each = math.ceil(N / WORLD_SIZE)
    dropped = each % (BATCH // WORLD_SIZE)  # by each rank; repeats among them are no loss
    left_out = WORLD_SIZE * dropped - (-N % WORLD_SIZE) if dropped else 0
    after = counts(delivered(ffcv_loader(place, WORLD_SIZE, None)))
    claim("FFCV: samples that never come", left_out, (after == 0).sum(), question=4)
    with contextlib.closing(iter(ffcv_loader(place, WORLD_SIZE, None))) as epoch:
        before = counts(delivered(epoch, STOP))  # unless it is closed, its thread goes on
    seen = STOP * (BATCH // WORLD_SIZE) * WORLD_SIZE
    claim("FFCV: samples that come again", seen, (before * after > 0).sum(), question=5)
    whole = [decoders.SimpleRGBImageDecoder(), ToTensor()]
    some = {"order": OrderOption.SEQUENTIAL, "indices": np.arange(BATCH), "distributed": False}
    with contextlib.closing(iter(ffcv_loader(place, WORLD_SIZE, whole, **some))) as epoch:
        image_BHWC = next(epoch)[0].numpy()
    expected_BHWC = mapped(place / "photos.raw")[: len(image_BHWC)]
    claim("FFCV: bytes of pixels that differ", 0, (image_BHWC != expected_BHWC).sum())
    Compiler.set_enabled(True)


# %% [markdown]
# ## 6. How it is measured: core time, memory, first batch
#
# Rank 0 measures while the others wait. Each loader is made and asked for one batch, which is the
# time to the first. After four more the memory of all processes is added up: PSS, which counts a
# shared page once. Then the loaders take turns. Next to them stands what limits them, alone in one
# thread: decoding the JPEGs, and copying crops. Raw pixels are read ROUNDS times, since one round
# is too short for the kernel's clock.


# %%
ROUNDS = 8
PLAIN = "DataLoader, plain"
JPEG = "DataLoader, JPEG"
RAW = "DataLoader, raw"
HAND = "by hand, raw"
FFCV = "FFCV, raw"


def makers(place: Path) -> dict[str, Callable]:
    """Return what makes each loader of one process; what it makes is called for each epoch."""
    made = {HAND: lambda: endless(RawLoader(place / "photos.raw", 0, 1))}
    made[RAW] = lambda: many_epochs(raw_loader(place, 0, 1))
    if transforms:
        made[JPEG] = lambda: jpeg_loader(place, 0, 1).__iter__
        made[PLAIN] = lambda: plain_loader(place, 0, 1).__iter__
    if Loader:
        tiled = {"indices": np.tile(np.arange(N), ROUNDS)}
        made[FFCV] = lambda: ffcv_loader(place, 1, random_crops(), **tiled).__iter__
    return made


def endless(loader: RawLoader) -> Callable:
    batches = iter(loader)
    return lambda: itertools.islice(batches, ROUNDS * N // BATCH)


def many_epochs(loader: DataLoader) -> Callable:
    return lambda: itertools.chain.from_iterable(itertools.repeat(loader, ROUNDS))


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
# The probes, and the turns.


# %%
def processes() -> list[psutil.Process]:
    """Return this process and its workers."""
    workers = [worker.pid for worker in multiprocessing.active_children()]
    return [psutil.Process(pid) for pid in (os.getpid(), *workers)]


def core_time() -> float:
    """Return the CPU seconds so far of this process and its workers, those that ended too."""
    me, *workers = processes()
    own = me.cpu_times()
    spent = time.process_time() + own.children_user + own.children_system
    for worker in workers:
        times = worker.cpu_times()
        spent += times.user + times.system
    return spent


def memory() -> Counter:
    """Return the PSS of all processes in MB, by kind: "Anon" and "Shmem" their own, "File"."""
    held = Counter()
    for process in processes():
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        for kind, kib in re.findall(r"^Pss_(Anon|Shmem|File): +(\d+) kB", text, re.M):
            held[kind] += 1024 * int(kib) / 1e6
    return held


def measure(place: Path) -> tuple[dict[str, dict], dict[str, list[float]]]:
    """On rank 0: each loader's first batch and memory, and core seconds per image of all."""
    found = {}
    epochs = {}
    for name, make in makers(place).items():
        before = memory()
        start = time.perf_counter()
        epochs[name] = make()
        batches = epochs[name]()
        next(batches)
        found[name] = {"first": time.perf_counter() - start}
        for _ in itertools.islice(batches, 4):
            held = memory()
        own = held["Anon"] + held["Shmem"] - before["Anon"] - before["Shmem"]
        found[name] |= {"own": own, "mapped": max(0.0, held["File"] - before["File"])}
        for _ in batches:  # the rest of the epoch is the warm-up
            pass
    alone = {"decoding": functools.partial(decoding, place)} if transforms else {}
    alone["copying"] = functools.partial(copying, place)
    return found, take_turns(epochs | alone, repeats=2)


def take_turns(epochs: dict[str, Callable], repeats: int) -> dict[str, list[float]]:
    """Run an epoch of each in turns; return core seconds per image, repeat by repeat."""
    spent = {name: [] for name in epochs}
    for _ in range(repeats):
        for name, epoch in epochs.items():
            before = core_time()
            images = sum(len(index) for _, index in epoch())
            spent[name].append((core_time() - before) / images)
    return spent


def times_as_long(spent: dict[str, list[float]], one: str, other: str) -> float:
    """Return how many times as long `one` takes as `other`: the median over the repeats."""
    pairs = zip(spent[one], spent[other], strict=True)
    return median(seconds / others for seconds, others in pairs)


# %% [markdown]
# What the staircase says is claimed as ratios.


# %%
def check_costs(place: Path) -> None:
    """Print and claim what rank 0 measured."""
    found, spent = from_rank_0(measure(place) if RANK == 0 else None)
    print0(f"\n{'':34}ms of a core    MB own + mapped    first batch")
    for name, seconds in spent.items():
        told = f"{'':13}{name:21}{1e3 * median(seconds):12.3f}"
        if name in found:
            own, file, first = (found[name][key] for key in ("own", "mapped", "first"))
            told += f"{own:12.0f} + {file:4.0f}{first:15.2f} s"
        print0(told)
    print0()
    ratio = functools.partial(times_as_long, spent)
    at_least = {"sign": ">=", "timed": True}
    claim("core time: DataLoader, raw / by hand", 1.3, ratio(RAW, HAND), question=2, **at_least)
    if JPEG in spent:
        claim("core time: DataLoader, JPEG / raw", 3, ratio(JPEG, RAW), question=1, **at_least)
        claim("core time: DataLoader, plain / JPEG", 1.2, ratio(PLAIN, JPEG), **at_least)
        share = ratio("decoding", JPEG)
        claim("core time: decoding alone / DataLoader, JPEG", 0.5, share, **at_least)
    if FFCV in spent:
        claim("core time: by hand / FFCV", 1, ratio(HAND, FFCV), sign="<=", timed=True)
        later = found[FFCV]["first"] / found[RAW]["first"]
        claim("first batch: FFCV / DataLoader", 3, later, question=3, **at_least)


# %% [markdown]
# ## What you should have seen
#
# 1. About six times, and that is the file, not the loader: most of what a DataLoader spends on a
#    JPEG is the decoder, as the row "decoding" shows, done alone. As long as it decodes, nothing
#    that is done around the decoder makes it much faster. Floats cost more than half as much again.
# 2. Almost three times: allocating a batch, copying it to shared memory, waking another process.
#    The rest is the crop itself, and "copying" is the least that it can take. FFCV takes half as
#    long again as the loader by hand, since it copies first and mirrors in a second pass.
# 3. The DataLoader, by a factor of ten and more, since FFCV compiles its pipeline first. The loader
#    by hand compiles one small function, and the checks before had done that. (The table has the
#    memory of all processes too. What workers have of their own is little, since forked processes
#    share their pages until somebody writes; mapped pages belong to the page cache, which all ranks
#    share.)
# 4. Three, on ranks 1, 2 and 3, as their last sample: -205 mod 4 = 3. With FFCV's default 13 never
#    come: a rank's list has 52 places, of which the last four fill no batch. Of these 16 three are
#    the repeats, and no loss. (The sampler has a `drop_last` too: that would leave out 205 mod 4 =
#    1.) By hand nothing is repeated or left out, since a batch may span two epochs.
# 5. All 96 that had come, and none. DataLoader and FFCV begin the epoch again, and a run that stops
#    often sees the first samples of its epochs more often than the last ones. torchdata's
#    `StatefulDataLoader` saves a position, too. FFCV takes the rest of the list as `indices`, but
#    only as another loader, which compiles again.
#
# **Try.** Without `self.consumed += BATCH` every batch is right, and the integer stays 0: only the
# two claims after the stop fail. With `drop_last=True` the first three claims fail: DataLoader
# delivers nothing twice and leaves out 13, as FFCV does.
#
# **Which to take when.**
#
#     raw pixels fit the node's memory, cores are short     FFCV, or a loader by hand
#     only the JPEGs fit                                   FFCV with JPEGs: one file, threads
#     the files lie in an object store                     shards, read from front to back
#     the step takes longer than the next batch            DataLoader: it is fast enough
#     the run must go on in mid-epoch                      one integer, or StatefulDataLoader
#
# On GPUs the question is the same, per card: how many cores does a node have for each, and what is
# "ms of a core" times the images that it wants? Bytes also cross PCIe in a quarter of the time that
# floats take. If the cores do not suffice, DALI and nvJPEG decode on the GPU.


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
        place = Path(from_rank_0(folder))
        signal.signal(signal.SIGINT, functools.partial(leave, place))
        signal.signal(signal.SIGTERM, functools.partial(leave, place))
        if RANK == 0:
            prepare(place)
        dist.barrier()
        check_data_loader(place)
        check_by_hand(place / "photos.raw")
        if Loader:
            check_ffcv(place)
        else:
            blocked("FFCV: samples, pixels, core time", needs="FFCV: make .venv/all")
        if njit:
            check_costs(place)
        else:
            blocked("core time of each loader", needs="numba: pip install -e '.[data]'")
        if from_rank_0(transforms is None):
            blocked("DataLoader from JPEGs", needs="torchvision: pip install torchvision")
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
