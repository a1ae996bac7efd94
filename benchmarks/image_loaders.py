"""The loaders that benchmarks/loaders.py compares, on any number of ranks: of images, with crops.

data-loading/08_loaders_compared.py explains what each thing that they do costs, on one rank;
data-loading/14_exactly_once.py which samples they deliver. Here are the complete ones.
"""

import contextlib
import ctypes
import functools
import gc
import io
import itertools
import multiprocessing
import os
import re
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import shared_memory
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

Loader = transforms = njit = None
with contextlib.suppress(ImportError):  # the extra [data]
    from numba import njit
with contextlib.suppress(ImportError):  # the extra [ffcv]
    from ffcv import writer as ffcv_writer
    from ffcv.fields import IntField, RGBImageField, decoders
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor
    from ffcv.writer import DatasetWriter
with contextlib.suppress(ImportError):
    from torchvision import transforms
    from torchvision.datasets.folder import default_loader

N = 482  # images, HEIGHT x WIDTH pixels; four ranks cannot share them equally
HEIGHT = 375
WIDTH = 500
CROP = 224  # rows and columns of a crop
BATCH = 32  # images per step, over all ranks
WORKERS = 2  # processes or threads of a loader
AHEAD = 3  # batches that threads prepare in advance
ROUNDS = 8  # over the images, in an epoch from raw pixels
SEED = 0
MEAN = [0.485, 0.456, 0.406]  # of ImageNet's pixels between 0 and 1
STD = [0.229, 0.224, 0.225]

# Shapes: N images, B of them in a batch, S slots; H, W, C: rows, columns, colors.


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


def copying(place: Path) -> Iterator[tuple]:
    """Copy a crop of every raw image to its place in a batch, and do nothing else."""
    images_NHWC = mapped(place / "photos.raw")
    image_BHWC = np.empty((BATCH, CROP, CROP, 3), np.uint8)
    for index in np.tile(order(0), ROUNDS):
        image_BHWC[index % BATCH] = images_NHWC[index, 75 : 75 + CROP, 138 : 138 + CROP]
        yield image_BHWC, [index]
