"""Data loaders compared: what each thing that a loader does costs
===============================================================

**Question.** Five loaders deliver the same crops of the same images, and each leaves out one thing
that the one before it does. What does each thing cost?

**Predict**, and write it down before you run. An image is a JPEG of 375 x 500 pixels, about 100 kB,
and a crop has 224 x 224. Costs are CPU seconds, those of all processes together.

1. One DataLoader decodes JPEGs. Another one finds the same images' pixels in a file that is mapped
   into memory, and all else is the same. How many times less does an image cost?
2. What costs more: to decode the JPEG, or to make normalized floats of the crop and to pass these
   on in place of bytes?
3. A DataLoader's worker process makes whole batches. Then a thread of the trainer's own process
   makes them by the same call. How many times less does an image cost?

**Run.**

    torchrun --standalone --nproc-per-node=4 08_loaders_compared.py    # NCCL on 4 GPUs, else gloo
    python 08_loaders_compared.py                                      # the same, started for you

Not run on several GPUs. numba and Pillow come with `pip install -e '.[data]'`; FFCV needs the
Debian packages of packages.txt, then `pip install -e '.[ffcv]'`. What lacks them is BLOCKED.

**Try.** In `loaders` give `raw` the photo `decoded` in place of `photos_NHWC.__getitem__`: which
claims fail? In `Batches.__getitems__` write `index_B[:-1]` for `index_B` in the call of
`copy_crops`: which claims fail, and would a loss curve have told you?

**Before.** data-loading/04_jit_augmentation.py: the GIL, and compiled loops without it.

**Next.** data-loading/14_exactly_once.py: which samples a loader delivers, also after a stop.
"""

import argparse
import contextlib
import ctypes
import importlib.util
import io
import itertools
import json
import logging
import math
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from multiprocessing import shared_memory
from pathlib import Path
from statistics import median
from types import SimpleNamespace

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

Loader = Image = njit = None
if "RANK" in os.environ and RANK == 0:  # which alone loads images
    with contextlib.suppress(ImportError):  # the extra [data]
        from numba import njit
    with contextlib.suppress(ImportError):  # the extra [data] too
        from PIL import Image
    with contextlib.suppress(ImportError):  # the extra [ffcv]
        from ffcv import writer as ffcv_writer
        from ffcv.fields import IntField, RGBImageField, decoders
        from ffcv.loader import Loader
        from ffcv.pipeline.compiler import Compiler
        from ffcv.transforms import ToTensor
        from ffcv.writer import DatasetWriter

N = 96  # images, HEIGHT x WIDTH pixels of three bytes
HEIGHT = 375
WIDTH = 500
CROP = 224  # rows and columns of a crop
BATCH = 32
AHEAD = 2  # batches that a loader prepares in advance
SEED = 0
MEAN = torch.tensor([0.485, 0.456, 0.406]).reshape(3, 1, 1)  # of ImageNet's pixels, from 0 to 1
STD = torch.tensor([0.229, 0.224, 0.225]).reshape(3, 1, 1)

# Shapes: N images, B of them in a batch; H, W, C: rows, columns, colors.

# %% [markdown]
# ## 1. A price is the difference of two loaders that differ in one thing
#
# A training step wants 32 crops of 224 x 224 pixels. A DataLoader, as most tutorials write it, does
# five things for each of them. It **decodes** a JPEG. It copies a **crop** out of the image. It
# makes normalized **floats** of the crop. It does so **one by one**: a call of `__getitem__` per
# image, and 32 crops are then collated, which is another copy. And a worker **process** hands the
# batch over to the trainer's process.
#
# What does each of the five cost? Here are five loaders. Each is the one above it, with one line of
# code changed, and leaves out one thing more. So **the difference of two neighbors is the price of
# one thing**, where all above it has been left out already:
#
#                 floats    decoding    one by one    process    crop
#     plain         x          x            x            x         x
#     bytes                    x            x            x         x
#     raw                                   x            x         x
#     batches                                            x         x
#     by hand                                                      x
#     FFCV                                                         x       written by others
#
# The order counts: with floats a process has four times the bytes to hand over, and that is booked
# as floats here. Only the crop has to be made anew in every epoch. The other four can be left out,
# if one pays elsewhere. Bytes can be normalized on the GPU, where that costs next to nothing.
# Decoded pixels take several times the bytes of the JPEGs, and should fit into the page cache. A
# thread needs code that runs without the GIL, and such code is compiled before the first batch
# comes.

# %% [markdown]
# ## 2. The crop: what no loader leaves out
#
# All five call the same two functions. numba compiles them, and then they run without the GIL
# (data-loading/04). Where the crops lie was drawn before, so all five make the same crops. (In
# training one would draw anew in each epoch.)

# %%
compiled = njit(nogil=True) if njit else lambda function: function
draw = np.random.default_rng(SEED).integers
CORNERS_N2 = draw((HEIGHT - CROP + 1, WIDTH - CROP + 1), size=(N, 2))  # y and x of each crop


@compiled
def copy_crop(photo_HWC: np.ndarray, corner: np.ndarray, out_HWC: np.ndarray) -> None:
    """Copy the crop of one image to its place."""
    y, x = corner
    for row in range(CROP):
        for column in range(CROP):
            for color in range(3):
                out_HWC[row, column, color] = photo_HWC[y + row, x + column, color]


@compiled
def copy_crops(photos_NHWC: np.ndarray, index_B: np.ndarray, out_BHWC: np.ndarray) -> None:
    """Copy the crop of each of these images to its place in the batch."""
    for b in range(len(index_B)):
        index = index_B[b]
        copy_crop(photos_NHWC[index], CORNERS_N2[index], out_BHWC[b])


# %% [markdown]
# ## 3. Five loaders
#
# `Crops` makes crops one by one, and `Batches` makes a whole batch by one call. DataLoader uses
# `__getitems__` (plural) where a dataset has it: then it hands over the indices of a batch and
# nothing is collated.


# %%
class Crops(Dataset):
    """(crop, index) of one image: bytes (H, W, C), or normalized floats (C, H, W)."""

    def __init__(self, photo: Callable[[int], np.ndarray], floats: bool = False) -> None:
        self.photo = photo  # index -> its pixels (H, W, C)
        self.floats = floats

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        crop_HWC = np.empty((CROP, CROP, 3), np.uint8)
        copy_crop(self.photo(index), CORNERS_N2[index], crop_HWC)
        crop = torch.from_numpy(crop_HWC)
        return (normalized(crop) if self.floats else crop), index


def normalized(crop_HWC: torch.Tensor) -> torch.Tensor:
    crop_CHW = crop_HWC.permute(2, 0, 1).contiguous()
    return (crop_CHW / 255 - MEAN) / STD


class Batches(Dataset):
    """(crops, indices) of one batch: bytes (B, H, W, C)."""

    def __init__(self, photos_NHWC: np.ndarray) -> None:
        self.photos_NHWC = photos_NHWC

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        index_B = np.array(indices)
        crops_BHWC = np.empty((len(indices), CROP, CROP, 3), np.uint8)
        copy_crops(self.photos_NHWC, index_B, crops_BHWC)
        return torch.from_numpy(crops_BHWC), torch.from_numpy(index_B)


# %% [markdown]
# Four loaders are DataLoaders of these, with one worker each. The fifth, **by hand**, calls the
# same `__getitems__` in a thread, two batches ahead of the trainer. Nothing has to be handed over:
# a batch lies where the trainer reads it. In `loaders` each is one line of code, and differs from
# the line above it in one thing.


# %%
def data_loader(dataset: Dataset, order: list[int], collate: Callable | None = None) -> DataLoader:
    """Return a DataLoader of these images, in this order, with one worker that stays."""
    options = {"num_workers": 1, "prefetch_factor": AHEAD, "persistent_workers": True}
    options |= {"multiprocessing_context": "fork", "worker_init_fn": end_with_the_rank}
    return DataLoader(dataset, BATCH, sampler=order, collate_fn=collate, **options)


def end_with_the_rank(worker: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class ByHand:
    """The batches of a dataset, made by a thread of this process."""

    def __init__(self, dataset: Batches, order: list[int]) -> None:
        self.dataset = dataset
        self.order = order

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        pending = deque()
        with ThreadPoolExecutor(1) as thread:
            for first in range(0, len(self.order), BATCH):
                indices = self.order[first : first + BATCH]
                pending.append(thread.submit(self.dataset.__getitems__, indices))
                if len(pending) > AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()


def loaders(place: Path) -> dict[str, Callable[[list[int]], Iterable]]:
    """Return what makes each loader of the images in `place`, given the order of their indices."""
    paths = photos_in(place)
    photos_NHWC = mapped(place / "photos.raw")

    def decoded(index: int) -> np.ndarray:
        return decode(paths[index])

    made = {
        "plain": partial(data_loader, Crops(decoded, floats=True)),
        "bytes": partial(data_loader, Crops(decoded)),
        "raw": partial(data_loader, Crops(photos_NHWC.__getitem__)),
        "batches": partial(data_loader, Batches(photos_NHWC), collate=lambda batch: batch),
        "by hand": partial(ByHand, Batches(photos_NHWC)),
    }
    if Loader:
        made["FFCV"] = partial(ffcv_loader, place, random_crops())
    return made


def photos_in(place: Path) -> list[Path]:
    return sorted((place / "photos").iterdir())


def decode(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"))


def mapped(path: Path) -> np.ndarray:
    """Return the images of a file that is nothing but their pixels, mapped into memory."""
    return np.asarray(np.memmap(path, np.uint8, "r")).reshape(-1, HEIGHT, WIDTH, 3)


# %% [markdown]
# ## 4. FFCV: the same things left out, by a library
#
# FFCV also has one file, whose images were decoded when it was written, and a thread that runs
# compiled code. It is no step of the ladder: it does what the loader by hand does, by other code.
# It compiles a pipeline, and fills **slots**, batches that are allocated once and used again and
# again. Its crops may have any size and are resized; `scale` and `ratio` leave it one size here.


# %%
def random_crops() -> list:
    """Return FFCV's pipeline for crops of CROP x CROP pixels that are not resized."""
    share = CROP * CROP / (HEIGHT * WIDTH)  # of the image's area
    one_size = {"scale": (share, share), "ratio": (1.0, 1.0)}
    return [decoders.RandomResizedCropRGBImageDecoder((CROP, CROP), **one_size), ToTensor()]


def ffcv_loader(place: Path, image: list, order: list[int]) -> "Loader":
    """Return FFCV's loader of (image, index), in this order."""
    pipelines = {"image": image, "index": [decoders.IntDecoder(), ToTensor()]}
    options = {"indices": order, "num_workers": 1, "batches_ahead": AHEAD}
    return Loader(str(place / "photos.beton"), BATCH, pipelines=pipelines, **options)


# %% [markdown]
# ## 5. How it is measured: CPU time per image
#
# Rank 0 makes the images, and writes what the decoder makes of the JPEGs into both raw files. So
# all loaders deliver the same pixels.


# %%
class Nameless(shared_memory.SharedMemory):
    """Shared memory that forked processes inherit, and that no kill leaves behind by its name."""

    def __init__(self, *given: object, **options: object) -> None:
        super().__init__(*given, **options)
        super().unlink()

    def unlink(self) -> None:
        """Nothing: its name went when it came."""


def prepare(place: Path) -> None:
    """Fill `place` with photos/*.jpg, photos.raw and, if FFCV is here, photos.beton."""
    folder = Path(importlib.util.find_spec("sklearn").origin).parent / "datasets/images"
    two = [decode(folder / name) for name in ("china.jpg", "flower.jpg")]  # 427 x 640 pixels
    random = np.random.default_rng(SEED)
    (place / "photos").mkdir()
    pixels_NHWC = np.memmap(place / "photos.raw", np.uint8, "w+", shape=(N, HEIGHT, WIDTH, 3))
    for index in range(N):
        y, x = random.integers([427 - HEIGHT + 1, 640 - WIDTH + 1])
        window_HWC = two[index % 2][y : y + HEIGHT, x : x + WIDTH]
        path = place / f"photos/{index:04}.jpg"
        Image.fromarray(window_HWC).save(path, quality=97)
        pixels_NHWC[index] = decode(path)
    if Loader is None:
        return
    multiprocessing.set_start_method("fork", force=True)  # FFCV's writer inherits the pixels
    ffcv_writer.shared_memory = SimpleNamespace(SharedMemory=Nameless)
    fields = {"image": RGBImageField("raw"), "index": IntField()}
    writer = DatasetWriter(str(place / "photos.beton"), fields, num_workers=1)
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        writer.from_indexed_dataset([(pixels_NHWC[i], i) for i in range(N)], chunksize=16)
    for process in multiprocessing.active_children():
        process.join()  # which FFCV forgets


# %% [markdown]
# Then rank 0 makes each loader for itself, while the other ranks wait. The loaders take turns, and
# with them two limits, each alone in one thread: to decode all JPEGs, and to copy all crops into
# one batch again and again. What a loader costs is the CPU time of this process and of all workers,
# divided by the images. The kernel counts other processes' time in steps of 10 ms, so a turn over
# raw pixels goes ROUNDS times over the images.


# %%
ROUNDS = 12
TURNS = 3


def cpu_seconds() -> float:
    """Return the CPU time so far of this process and its workers."""
    spent = time.process_time()  # finer than what the kernel tells of other processes
    for worker in multiprocessing.active_children():
        times = psutil.Process(worker.pid).cpu_times()
        spent += times.user + times.system
    return spent


def own_megabytes() -> float:
    """Return what this process and its workers hold besides pages of files: their PSS, in MB."""
    held = 0
    for process in (psutil.Process(), *multiprocessing.active_children()):
        rollup = Path(f"/proc/{process.pid}/smaps_rollup")  # on Linux
        for line in rollup.read_text().splitlines() if rollup.exists() else ():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                held += 1024 * int(line.split()[1])
    return held / 1e6


def milliseconds(work: Callable[[], int]) -> float:
    """Do some work; return milliseconds of CPU time per image, of which it returns the number."""
    before = cpu_seconds()
    images = work()
    return 1e3 * (cpu_seconds() - before) / images


def run_through(loader: Iterable) -> int:
    return sum(len(index) for _, index in loader)


def decode_all(paths: list[Path]) -> int:
    for path in paths:
        decode(path)
    return len(paths)


def copy_all(photos_NHWC: np.ndarray, order: list[int]) -> int:
    crops_BHWC = np.empty((BATCH, CROP, CROP, 3), np.uint8)
    for first in range(0, len(order), BATCH):
        copy_crops(photos_NHWC, np.array(order[first : first + BATCH]), crops_BHWC)
    return len(order)


# %% [markdown]
# The first epoch of each loader is a warm-up, and its crops are compared with NumPy's slices of the
# raw file, byte by byte. FFCV draws crops of its own. So whole images are compared as well, before
# any crop: those of the raw file with what the decoder makes of the JPEGs, and FFCV's with the raw
# file (in plain Python, to spare compiling). When a loader's first batch has come, the memory of
# all processes is read (PSS, which counts a page that two processes share half in each).


# %%
def wrong_bytes(photos_NHWC: np.ndarray, batches: Iterator[tuple]) -> int:
    """Return how many bytes of an epoch's crops differ from NumPy's slices, or never came."""
    pairs = zip(photos_NHWC, CORNERS_N2, strict=True)
    expected_NHWC = np.stack([photo[y : y + CROP, x : x + CROP] for photo, (y, x) in pairs])
    found_NHWC = ~expected_NHWC
    for crops, index_B in itertools.islice(batches, N // BATCH):
        if crops.is_floating_point():
            crops = ((crops * STD + MEAN) * 255).round().byte().permute(0, 2, 3, 1)
        found_NHWC[index_B] = crops
    return (found_NHWC != expected_NHWC).sum()


def bytes_unlike(place: Path) -> dict[str, int]:
    """Return in how many bytes whole images differ, before any crop."""
    raw_BHWC = mapped(place / "photos.raw")[:BATCH]
    decoded = [decode(path) for path in photos_in(place)[:BATCH]]
    unlike = {"raw file: bytes unlike the decoder's": (raw_BHWC != np.stack(decoded)).sum()}
    if Loader:
        Compiler.set_enabled(False)
        whole = [decoders.SimpleRGBImageDecoder(), ToTensor()]
        image_BHWC, _ = next(iter(ffcv_loader(place, whole, list(range(BATCH)))))
        unlike["FFCV's file: bytes unlike the raw file's"] = (image_BHWC.numpy() != raw_BHWC).sum()
    return unlike


def begin(make: Callable[[], Iterable]) -> tuple[Iterable, Iterator[tuple], tuple[float, float]]:
    """Make a loader; return it, its batches, and the MB it takes and seconds to its first batch."""
    held = own_megabytes()
    start = time.perf_counter()
    loader = make()
    batches = iter(loader)
    first = next(batches)
    seconds = time.perf_counter() - start
    time.sleep(0.2)  # until the batches in advance are there
    return loader, itertools.chain([first], batches), (own_megabytes() - held, seconds)


def measure(place: Path) -> dict[str, dict]:
    """Return "ms" of CPU time per image, "wrong" bytes of crops, and `begin`'s MB and seconds."""
    photos_NHWC = mapped(place / "photos.raw")
    once = np.random.default_rng(SEED).permutation(N).tolist()
    orders = {"plain": once, "bytes": once}  # the others go ROUNDS times over the images
    Crops(photos_NHWC.__getitem__)[0]  # numba compiles, before workers are forked
    Batches(photos_NHWC).__getitems__([0])
    works = {}
    wrong = {}
    begun = {}
    for name, make in loaders(place).items():
        order = orders.get(name, once * ROUNDS)
        loader, batches, begun[name] = begin(partial(make, order))
        if name != "FFCV":
            wrong[f"{name}: bytes unlike NumPy's crops"] = wrong_bytes(photos_NHWC, batches)
        for _ in batches:  # the rest of the warm-up
            pass
        works[name] = partial(run_through, loader)
    works["decoding alone"] = partial(decode_all, photos_in(place))
    works["copying alone"] = partial(copy_all, photos_NHWC, once * ROUNDS)
    spent = {name: [] for name in works}
    for _ in range(TURNS):
        for name, work in works.items():
            spent[name].append(milliseconds(work))
    ms = {name: median(all_ms) for name, all_ms in spent.items()}
    return {"ms": ms, "wrong": wrong, "begun": begun}


# %% [markdown]
# The table says what each loader costs, the memory it takes, the seconds to its first batch, and
# the price of what the next one leaves out: in CPU milliseconds, and as a share of `plain`'s.

# %%
THINGS = {"plain": "floats", "bytes": "decoding", "raw": "one by one", "batches": "a process"}


def show(ms: dict[str, float], begun: dict[str, tuple[float, float]]) -> None:
    """Print what each loader costs, and the price of what it does and the next one does not."""
    columns = f"{'CPU ms':>8}{'per CPU s':>11}{'own MB':>8}{'first, s':>10}"
    print0(f"\n{'':13}{'':15}{columns}   of which")
    names = list(ms)
    for name, next_name in zip(names, [*names[1:], ""], strict=True):
        told = f"{'':13}{name:15}{ms[name]:8.3f}{1e3 / ms[name]:11,.0f}"
        if name in begun:
            megabytes, seconds = begun[name]
            told += f"{megabytes:8.0f}{seconds:10.2f}"
        if name in THINGS:
            price = ms[name] - ms[next_name]
            told += f"   {THINGS[name]:11}{price:6.3f}{price / ms['plain']:5.0%}"
        print0(told)
    print0()


def check_costs(ms: dict[str, float]) -> None:
    """Claim ratios of milliseconds of CPU time per image."""
    clock = {"sign": ">=", "timed": True}
    plain, some_bytes, raw, batches, by_hand = (ms[name] for name in [*THINGS, "by hand"])
    claim("CPU time: plain / bytes", 1.25, plain / some_bytes, **clock)
    claim("CPU time: bytes / raw", 7, some_bytes / raw, atol=2.5, question=1, timed=True)
    price = (some_bytes - raw) / (plain - some_bytes)
    claim("CPU time: decoding / floats", 1.1, price, question=2, **clock)
    claim("CPU time: decoding alone / bytes", 0.6, ms["decoding alone"] / some_bytes, **clock)
    claim("CPU time: raw / batches", 1.05, raw / batches, **clock)
    claim("CPU time: batches / by hand", 1.7, batches / by_hand, question=3, **clock)
    claim("CPU time: copying alone / by hand", 0.5, ms["copying alone"] / by_hand, **clock)
    if "FFCV" in ms:
        claim("CPU time: by hand / FFCV", 1.3, by_hand / ms["FFCV"], **clock)


# %% [markdown]
# ## What you should have seen
#
# 1. Six to eight times, and that is the file, not the loader. The decoder alone is three quarters
#    of what `bytes` costs. As long as a loader decodes, nothing else makes it much faster.
# 2. Decoding: about half of what `plain` costs, and more. Floats are most of the rest: they are
#    normalized, and four times the bytes are collated and handed over. What one by one, process and
#    crop cost with bytes is a tenth together.
# 3. Between two and three times. The worker's batch is copied into a new segment of shared memory,
#    whose pages the kernel clears and maps a second time. What remains is the crop: "copying alone"
#    is nearly all that the loader by hand costs.
#
# The price of raw pixels is their size: 562,500 bytes per image against about 99,000, 5.7 times. At
# this size ImageNet's 1.28 million images take 720 GB as pixels and 127 GB as JPEGs.
#
# FFCV costs half as much as the loader by hand: its C++ copies a crop's rows whole, where the loop
# of section 2 moves byte after byte. But it compiles for seconds before its first batch.
#
# **Try.** With JPEGs `raw` costs what `bytes` does, so the rows of questions 1 and 2 fail: it looks
# as if decoding were free. Without its last crop a batch ends with whatever lay in that memory: the
# rows of bytes of `batches` and `by hand` fail. A loss curve would hardly tell, since 31 images of
# 32 are right.
#
# **Which to take when.** Eight GPUs that train on 2,500 images per second each need 20,000. At 400
# images per CPU second that keeps 50 cores busy, at 8,000 it takes 2.5. So count cores first:
#
#     the node has them                            DataLoader, with bytes instead of floats
#     it has not; raw pixels fit the page cache    raw pixels: a DataLoader, FFCV, or by hand
#     it has not; raw pixels do not fit            smaller images, or decode on the GPU (DALI)
#     the files lie in an object store             shards, read from front to back
#
# Raw pixels that do not fit come from the disk in every epoch, six times the bytes of JPEGs: then
# the disk is the limit. The table in data-loading/README.md has memory and first batches on 1, 2
# and 4 ranks as well.
#
# **On GPUs** (not measured here) each rank pays all this for its own share. A batch by hand should
# lie in pinned memory, and a DataLoader should have `pin_memory=True`; else the host waits while a
# batch is copied to the GPU. On a thousand ranks the file system comes first.


# %%
def leave(place: Path, number: int, frame: object) -> None:
    """End on Ctrl-C, without the folder."""
    for other in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(other, signal.SIG_IGN)
    shutil.rmtree(place, ignore_errors=True)
    os._exit(128 + number)


def found_on_rank_0() -> dict[str, object]:
    """Make the images, measure, and remove them."""
    with tempfile.TemporaryDirectory(prefix="loaders-") as folder:
        place = Path(folder)
        tempfile.tempdir = folder  # here workers make sockets
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, partial(leave, place))
        prepare(place)
        found = measure(place) if njit else {"wrong": {}}
        found["wrong"] |= bytes_unlike(place)
        jpegs = sum(path.stat().st_size for path in photos_in(place))
        found["size"] = (place / "photos.raw").stat().st_size / jpegs
    return found


def main() -> None:
    command_line()
    launch()
    setup()
    results = [found_on_rank_0() if RANK == 0 and Image else {}]
    dist.broadcast_object_list(results)
    found = results[0]
    if "ms" in found:
        show(found["ms"], found["begun"])
        check_costs(found["ms"])
    else:
        blocked("what each loader costs", needs="numba, Pillow: pip install -e '.[data]'")
    if "size" in found:
        claim("size: raw file / JPEGs", 5.7, found["size"], atol=0.3)
    for text, wrong in found.get("wrong", {}).items():
        claim(text, 0, wrong)
    if "FFCV" not in found.get("ms", {}):
        blocked("FFCV: CPU time and pixels", needs="FFCV: pip install -e '.[ffcv]'")
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
