"""Data loading for many ranks: where a DataLoader's time goes, and FFCV in its place
==================================================================================

**Question.** A rank that waits for images trains nothing. Where does a loader's time go, what do
its knobs do about it, and what does FFCV?

**Predict**, and write it down before you run:

1. A JPEG of 100 kB lies in the page cache. Which takes longer, reading it or decoding it, and how
   many times longer?
2. Both loaders get two workers. How many processes does each of them start for the first epoch, and
   how many more for the second?
3. A dataset makes a NumPy Generator in `__init__` and draws each sample's crop from it. A loader
   with two workers delivers two epochs of 64 samples on each of n ranks. How many different crops
   are among these 128 n?
4. Both deliver the same random crops of the same JPEGs. By what factor does FFCV need less time of
   a core per image? And from a file of raw pixels?

**Run.**

    torchrun --standalone --nproc-per-node=4 01_ffcv_distributed_optimization.py  # or on your GPUs
    python 01_ffcv_distributed_optimization.py             # the same, started for you

Not run on several GPUs. One node. FFCV needs the Debian packages of packages.txt, then `pip install
-e '.[ffcv]'`. `--data FOLDER` takes your own images, one folder per class.

**Try.** In `crops_by_ffcv` normalize by MEAN and STD without the factor 255: which claim fails?
In `check_draws` leave out `generator=seeds`: which ones now?

**Before.** parallelism/01_data_parallelism_ddp.py: how ranks share a dataset.

**Next.** data-loading/02_beton_file.py
"""

import argparse
import contextlib
import ctypes
import functools
import gc
import io
import json
import logging
import math
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, RandomSampler

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

Loader = None
if RANK == 0 and ("RANK" in os.environ or WORLD_SIZE > 1):  # it alone measures loaders
    with contextlib.suppress(ImportError):  # the extra [ffcv]
        from ffcv.fields import IntField, RGBImageField, decoders
        from ffcv.loader import Loader, OrderOption
        from ffcv.memory_managers import OSCacheManager
        from ffcv.reader import Reader
        from ffcv.transforms import NormalizeImage, ToTensor, ToTorchImage
        from ffcv.writer import DatasetWriter
        from torchvision import transforms
        from torchvision.datasets import ImageFolder
        from torchvision.datasets import folder as folders
        from torchvision.transforms import functional

N = 242  # images
WIDTH = 500
HEIGHT = 375
PAGE = 2**23  # bytes of a page in a .beton file, FFCV's default
BATCH = 32  # images
WORKERS = 2
SEED = 0
ALIKE = "different draws of torch, ranks seeded alike"
MEAN = np.array([0.485, 0.456, 0.406])  # of ImageNet's pixels between 0 and 1
STD = np.array([0.229, 0.224, 0.225])

# %% [markdown]
# ## 1. The way of an image, through torchvision
#
# A training step on one GPU takes some 100 ms for 256 images; eight GPUs want 20,000 images per
# second. On its way to the GPU each image passes five stations:
#
#     file ──read──> JPEG ──decode──> pixels ──augment──> crop ──collate──> batch ──copy──> GPU
#          100 kB         100 kB           560 kB         600 kB (float32)
#
# `DataLoader` runs the first four in worker **processes**: Python holds its lock (the GIL) for much
# of the work, so threads would wait for each other. A batch is collated in a worker and crosses to
# the trainer through shared memory.
#
# FFCV's paper says where the time goes: an epoch of ImageNet through `ImageFolder` takes 1,200 s,
# and 75 s if its files are read and thrown away (Leclerc et al., 2023). The often quoted "94% of an
# epoch is data" is (1200 - 75) / 1200: what remains if reading cost nothing.


# %%
class Photos(Dataset):
    """A folder of JPEGs, one folder per class: (crop, label, index)."""

    def __init__(self, folder: Path, transform: Callable | None = None) -> None:
        self.images = ImageFolder(folder, transform)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple:
        image, label = self.images[index]
        return image, label, int(index)


def crops_by_torchvision() -> Callable:
    """Return what makes of an image a normalized random crop (3, 224, 224) in float32."""
    crop = transforms.RandomResizedCrop(224)
    return transforms.Compose([crop, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])


def torchvision_loader(folder: Path, rounds: int) -> DataLoader:
    """Return a loader of crops in random order, its epoch `rounds` times the images."""
    photos = Photos(folder, crops_by_torchvision())
    sampler = RandomSampler(photos, num_samples=rounds * N)
    return DataLoader(photos, BATCH, sampler=sampler, num_workers=WORKERS, persistent_workers=True)


# %% [markdown]
# ## 2. The DataLoader's own knobs
#
# Before a loader is replaced, its knobs are turned. This is how a rank with a GPU should load:
#
#     loader = DataLoader(
#         photos, batch_size,
#         num_workers=cores // ranks,     # 0 is the default: the trainer itself loads, and waits
#         prefetch_factor=2,              # batches in flight per worker
#         persistent_workers=True,        # else all are started anew in each epoch
#         pin_memory=True,                # copy each batch to memory that a GPU can read itself
#         worker_init_fn=own_generator,   # both for random numbers: see below
#         generator=torch.Generator().manual_seed(seed + rank),
#     )
#     for image_BCHW, label_B in loader:
#         image_BCHW = image_BCHW.to(device, non_blocking=True)  # from pinned memory only
#
# **Workers** divide the work and do not lessen it: a core spends as long on each image, and with
# more workers than cores nothing gets faster. `num_workers * prefetch_factor` batches are asked for
# before the first is used, and as many lie in shared memory when the GPU is slow. A copy from
# **pinned** memory, which the kernel never moves, runs next to the training step; from other memory
# the host waits for the copy.
#
# A worker is a fork of its rank: it inherits a copy of the dataset. `DataLoader` then gives each
# one its own seed, base seed + number of the worker, for the global states of `torch`, `random` and
# NumPy. A generator that the dataset made before is copied as it was: to all workers, on all ranks,
# in all epochs. And the base seed is drawn from torch's state, which ranks that train one model
# usually seed alike.


# %%
class Draws(Dataset):
    """What random numbers a sample would be cropped by, and which process drew them."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(SEED)  # made before the workers are

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, int]:
        return {
            "its own generator": int(self.generator.integers(2**62)),
            "torch": int(torch.randint(2**62, ())),
            "random": random.getrandbits(62),
            "numpy": int(np.random.randint(2**62)),
            "process": os.getpid(),
        }


def own_generator(worker: int) -> None:
    """Give a worker's copy of the dataset a generator of its own: to be its worker_init_fn."""
    dataset = torch.utils.data.get_worker_info().dataset
    dataset.generator = np.random.default_rng(torch.initial_seed())


def two_epochs(**knobs: object) -> dict[str, int]:
    """Read two epochs on every rank; return how many different values of each kind came."""
    torch.manual_seed(SEED)  # alike on every rank, as for one model
    knobs |= {"num_workers": WORKERS, "multiprocessing_context": "fork"}
    loader = DataLoader(Draws(), 4, **knobs)
    drawn = defaultdict(set)
    for _ in range(2):
        for batch in loader:
            for kind, value_B in batch.items():
                drawn[kind].update(value_B.tolist())
    everywhere = gather_objects(drawn)
    different = {}
    for kind in drawn:
        different[kind] = len(set.union(*[one[kind] for one in everywhere]))
    return different


# %% [markdown]
# ## 3. The same crops through FFCV
#
# FFCV changes three things. All images are written into **one file** beforehand, as JPEGs or as raw
# pixels. Its workers are **threads** that run code compiled by numba, without the GIL. And they
# decode, crop and normalize each image **into its place** in a batch that was allocated before, so
# there is nothing to collate and nothing crosses from process to process:
#
#     DataLoader    process 1: read decode augment collate ──shared memory──┐
#                   process 2: read decode augment collate ──shared memory──┴──> batch ──> GPU
#
#     FFCV          thread 1: decode + crop + normalize ──┐
#                   thread 2: decode + crop + normalize ──┴──> a slot of the batch ──> GPU
#
# `NormalizeImage` sees bytes, from 0 to 255, where torchvision's `Normalize` sees floats up to 1.
# So there is the factor 255. Compiling takes some seconds per pipeline, before the first batch.
#
# On several ranks `distributed=True` gives each rank its share, as torch's `DistributedSampler`
# does (02_beton_file.py compares the two). One trap: FFCV's default is `drop_last=True`, which
# loses in every epoch what does not fill a rank's last batch.


# %%
def crops_by_ffcv() -> list:
    """Return the pipeline that makes of an image a normalized crop (3, 224, 224) in float32."""
    crop = decoders.RandomResizedCropRGBImageDecoder((224, 224))
    normalize = NormalizeImage(255 * MEAN, 255 * STD, np.float32)
    return [crop, normalize, ToTensor(), ToTorchImage()]


def ffcv_loader(path: Path, image_pipeline: list, batch_size: int, **options: object) -> "Loader":
    """Return a loader of (image, label, index) that drops nothing."""
    gc.collect()  # an old loader, freed while numba compiles, prints "Exception ignored: KeyError"
    pipelines = {
        "image": image_pipeline,
        "label": [decoders.IntDecoder(), ToTensor()],
        "index": [decoders.IntDecoder(), ToTensor()],
    }
    options = {"order": OrderOption.RANDOM, "seed": SEED, "drop_last": False} | options
    return Loader(str(path), batch_size, pipelines=pipelines, **options)


def write_photos(folder: Path, path: Path, field: "RGBImageField") -> None:
    """Write a folder of JPEGs into one .beton file."""
    multiprocessing.set_start_method("fork", force=True)  # FFCV's writers inherit what they need
    fields = {"image": field, "label": IntField(), "index": IntField()}
    writer = DatasetWriter(str(path), fields, page_size=PAGE, num_workers=1)
    writer.from_indexed_dataset(Photos(folder), chunksize=16)
    for process in multiprocessing.active_children():
        process.join()  # which FFCV forgets


# %% [markdown]
# ## 4. How it is measured: the images
#
# Rank 0 makes a folder of JPEGs: crops of scikit-learn's two photographs, or of your images, at
# quality 97, about 100 kB each as in ImageNet. FFCV encodes JPEGs again when it writes them, at
# quality 90 unless told; so that both loaders decode equally much, it is told 97.


# %%
def prepare(place: Path, data: str | None) -> None:
    """Fill `place` with photos/CLASS/*.jpg, jpg.beton and raw.beton."""
    for index, (name, image) in enumerate(images_of(data)):
        folder = place / "photos" / name
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / f"{index:04}.jpg", quality=97)
    write_photos(place / "photos", place / "jpg.beton", RGBImageField("jpg", jpeg_quality=97))
    write_photos(place / "photos", place / "raw.beton", RGBImageField("raw"))


def images_of(data: str | None) -> Iterator[tuple[str, object]]:
    """Yield class and image (PIL, 500 x 375) of N samples, from `data` or two photographs."""
    if data:
        found = ImageFolder(data)
        for index in np.linspace(0, len(found) - 1, N).astype(int):
            image, label = found[index]
            smaller = functional.resize(image, HEIGHT)
            yield found.classes[label], functional.center_crop(smaller, [HEIGHT, WIDTH])
        return
    from sklearn.datasets import load_sample_images

    generator = np.random.default_rng(SEED)
    photographs = load_sample_images().images  # two of 427 x 640 pixels
    for index in range(N):
        y = generator.integers(427 - HEIGHT + 1)
        x = generator.integers(640 - WIDTH + 1)
        crop_HWC = photographs[index % 2][y : y + HEIGHT, x : x + WIDTH]
        yield f"class_{index % 2}", functional.to_pil_image(np.ascontiguousarray(crop_HWC))


# %% [markdown]
# ## 5. How it is measured: the time
#
# Rank 0 measures while the others wait. First each station of one DataLoader without workers is
# timed. Then each loader delivers one epoch as a warm-up, in which FFCV compiles, and whose pixels
# are averaged, each color by itself; then all take turns. What is judged is the time of a **core**
# per image, summed over threads and processes, since other load on the machine hardly changes it;
# wall time is printed.


# %%
def station_seconds(folder: Path, device: torch.device) -> dict[str, float]:
    """Return seconds per image: of each station, of the `whole` epoch, and of a `core` in it."""
    spent = Counter()

    def timed(station: str, function: Callable) -> Callable:
        def wrapped(*args: object) -> object:
            start = time.perf_counter()
            result = function(*args)
            spent[station] += time.perf_counter() - start
            return result

        return wrapped

    def copy_to_device(batch: torch.Tensor) -> None:
        batch.to(device, copy=True)
        if device.type == "cuda":
            torch.cuda.synchronize()

    read = timed("read", lambda path: io.BytesIO(Path(path).read_bytes()))
    decode = timed("decode", lambda file: folders.Image.open(file).convert("RGB"))
    augment = timed("augment", crops_by_torchvision())
    collate = timed("collate", torch.utils.data.default_collate)
    copy = timed("copy", copy_to_device)
    dataset = ImageFolder(folder, augment, loader=lambda path: decode(read(path)))
    cores = core_seconds()
    start = time.perf_counter()
    for image_BCHW, _ in DataLoader(dataset, BATCH, collate_fn=collate):
        copy(image_BCHW)
    spent["whole"] = time.perf_counter() - start
    spent["core"] = core_seconds() - cores
    return {station: seconds / N for station, seconds in spent.items()}


def check_stations(place: Path, device: torch.device) -> tuple[dict[str, float], float]:
    """Claim that the stations are the epoch; return the seconds of each, and a core's in all."""
    seconds = from_rank_0(station_seconds(place / "photos", device) if RANK == 0 else None)
    whole = seconds.pop("whole")
    alone = seconds.pop("core")
    shown = [f"{station} {1e3 * s:.2f}" for station, s in seconds.items()]
    print0(f"{'':13}DataLoader, ms per image: {', '.join(shown)}")
    speed = f"{1 / whole:7,.0f} images per second, {1e3 * alone:.2f} ms of a core per image"
    print0(f"{'':13}no workers {speed}")
    claim("all stations / the whole epoch", 0.9, sum(seconds.values()) / whole, ">=", timed=True)
    ratio = seconds["read"] / seconds["decode"]
    claim("time to read / time to decode", 0.25, ratio, "<=", question=1, timed=True)
    return seconds, alone


# %% [markdown]
# A core's time is the sum over this process and all that it has started, as the kernel counts it.
# With `--figure PATH` the times are drawn, station by station.


# %%
def draw(path: str, stations: dict[str, float], core: dict[str, float]) -> None:
    """Draw milliseconds of a core per image; FFCV's decoding is what JPEGs take beyond raw."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    axes = figure.subplots()
    rest = max(0.0, core["DataLoader"] - sum(stations.values()))  # a difference of two timings
    crop = {"crop, normalize": core["raw"]}
    rows = {"DataLoader": stations | {"rest": rest}}
    rows |= {"FFCV, JPEG": {"decode": core["jpg"] - core["raw"]} | crop, "FFCV, raw": crop}
    colors = {"read": "#9ecae1", "decode": "#fdae6b", "collate": "#bcbddc", "copy": "#fa9fb5"}
    for row, parts in rows.items():
        left = 0.0
        for part, seconds in parts.items():
            ms = 1e3 * seconds
            color = "0.8" if part == "rest" else colors.get(part, "#a1d99b")
            axes.barh(row, ms, left=left, color=color, edgecolor="white")
            upright = 90 if ms < 150 * core["DataLoader"] else 0  # where it is narrow
            style = {"ha": "center", "va": "center", "fontsize": 9, "rotation": upright}
            axes.text(left + ms / 2, row, part, **style)
            left += ms
    jpg, raw = (core["DataLoader"] / core[name] for name in ("jpg", "raw"))
    title = f"A DataLoader takes {jpg:.1f} times as long as FFCV from JPEGs"
    axes.set_title(f"{title}, {raw:.1f} times as from raw pixels")
    words = f"ms of one core per image of {WIDTH} x {HEIGHT} pixels, {WORKERS} workers"
    axes.set_xlabel(f"{words}; the rest is mostly between processes")
    axes.invert_yaxis()
    figure.savefig(path, dpi=150)


def core_seconds() -> float:
    """Return the CPU time so far of this process and those that it has started."""
    me = psutil.Process()
    times = [process.cpu_times() for process in [me, *me.children()]]
    return sum(t.user + t.system for t in times)


def alternate(loaders: dict[str, Callable], repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Run epochs of all loaders in turns; return (wall, core) seconds per image of each epoch."""
    seconds = {name: [] for name in loaders}
    for _ in range(repeats):
        for name, loader in loaders.items():
            cores = core_seconds()
            start = time.perf_counter()
            images = sum(len(image_BCHW) for image_BCHW, *_ in loader())
            wall = time.perf_counter() - start
            seconds[name].append((wall / images, (core_seconds() - cores) / images))
    return seconds


# %% [markdown]
# An epoch may go `rounds` times over the images. A compiled loader can be pointed at another
# file of the same fields, which saves compiling again.


# %%
def all_loaders(place: Path, rounds: int, files: tuple = ("jpg", "raw")) -> dict[str, Callable]:
    """Return what gives each loader of crops, whose epochs are `rounds` times the images."""
    options = {"indices": np.tile(np.arange(N), rounds), "num_workers": WORKERS}
    torchvision = torchvision_loader(place / "photos", rounds)
    ffcv = ffcv_loader(place / f"{files[0]}.beton", crops_by_ffcv(), BATCH, **options)
    loaders = {"DataLoader": lambda: torchvision}
    for name in files:
        loaders[name] = functools.partial(point_at, ffcv, place / f"{name}.beton")
    return loaders


def point_at(loader: "Loader", path: Path) -> "Loader":
    """Let a compiled loader read another file."""
    loader.reader = Reader(str(path))
    loader.memory_manager = OSCacheManager(loader.reader)
    return loader


def measure_loaders(place: Path) -> dict:
    """On rank 0: seconds per image, processes started, and the mean of what is delivered."""
    before = len(psutil.Process().children())
    loaders = all_loaders(place, rounds=1)
    means = {}
    processes = {}
    for name, loader in loaders.items():
        batches = [image_BCHW.double().mean((0, 2, 3)) for image_BCHW, *_ in loader()]
        means[name] = torch.stack(batches).mean(0)
        processes[name] = len(psutil.Process().children()) - before - sum(processes.values())
    return {"seconds": alternate(loaders, 2), "means": means, "processes": processes}


def check_loaders(place: Path) -> dict[str, float]:
    """Claim what FFCV saves, and that it delivers the same; return core seconds per image."""
    measured = from_rank_0(measure_loaders(place) if RANK == 0 else None)
    processes = measured["processes"]
    claim("processes that DataLoader started", WORKERS, processes["DataLoader"], question=2)
    claim("processes that FFCV started", 0, processes["jpg"] + processes["raw"], question=2)
    means = measured["means"]
    for name in ("jpg", "raw"):
        text = f"mean of normalized crops, {name} - DataLoader's"
        far = (means[name] - means["DataLoader"]).abs().max()  # of the three colors
        claim(text, 0, far, atol=0.2)
    core = {}
    for name, times in measured["seconds"].items():
        wall = min(seconds for seconds, _ in times)
        core[name] = min(seconds for _, seconds in times)
        shown = f"{1 / wall:7,.0f} images per second, {1e3 * core[name]:.2f} ms of a core per image"
        print0(f"{'':13}{name:10} {shown}")
    for name, at_least in (("jpg", 1.2), ("raw", 2.5)):
        text = f"core time, DataLoader's / FFCV's, {name}"
        ratio = core["DataLoader"] / core[name]
        claim(text, at_least, ratio, ">=", question=4, timed=True)
    return core


def check_limits(stations: dict, alone: float, core: dict) -> None:
    """Claim that workers, and FFCV for its JPEGs, do the same work as a DataLoader without."""
    ratio = core["DataLoader"] / alone
    claim(f"core time, {WORKERS} workers / none", 1, ratio, atol=0.3, timed=True)
    decode = core["jpg"] - core["raw"]
    shown = f"decode {1e3 * decode:.2f}, crop and normalize {1e3 * core['raw']:.2f}"
    print0(f"{'':13}FFCV, ms of a core per image: {shown}")
    theirs = core["DataLoader"] * stations["decode"] / sum(stations.values())
    ratio = decode / theirs
    claim("time to decode a JPEG, FFCV's / DataLoader's", 0.8, ratio, atol=0.3, timed=True)


# %% [markdown]
# ## 6. How it is measured: draws and knobs
#
# Draws are numbers below 2^62, which are not equal by chance; the different ones are counted, over
# all ranks and two epochs. Workers are told apart by their process numbers, and the sampler notes
# what it was asked for.


# %%
def check_draws() -> None:
    """Claim how many different numbers two epochs of 64 samples draw, on all ranks together."""
    naive = two_epochs()
    alone = 64 // WORKERS  # what one worker draws in an epoch
    forked = naive["its own generator"]
    claim("different draws, generator made before the fork", alone, forked, question=3)
    if WORLD_SIZE > 1:
        claim(ALIKE, 2 * 64, naive["torch"])
    else:
        blocked(ALIKE, needs="2 ranks")
    seeds = torch.Generator().manual_seed(SEED + RANK)  # of which the base seed is drawn
    knobs = {"worker_init_fn": own_generator, "persistent_workers": True}
    cured = two_epochs(generator=seeds, **knobs)
    for kind in ("its own generator", "torch", "random", "numpy"):
        claim(f"different draws of {kind}, cured", 2 * 64 * WORLD_SIZE, cured[kind])
    for text, counted, times in (("", naive, 2), (", persistent", cured, 1)):
        started = counted["process"] / WORLD_SIZE
        claim(f"workers of a rank in two epochs{text}", times * WORKERS, started, question=2)


def check_prefetching(factor: int = 3) -> None:
    """Claim how many batches are asked for before the first is used."""
    asked = []

    def batches() -> Iterator[list[int]]:
        for start in range(0, 64, 4):
            asked.append(start)
            yield list(range(start, start + 4))

    knobs = {"num_workers": WORKERS, "prefetch_factor": factor, "multiprocessing_context": "fork"}
    epoch = iter(DataLoader(Draws(), batch_sampler=batches(), **knobs))
    claim("batches asked for before the first, factor 3", factor * WORKERS, len(asked))
    for _ in epoch:
        pass  # to the end, where its workers stop


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
# ## 7. On GPUs: the share of a step that waits
#
# A GPU waits whenever the next batch is not there. Two CUDA events around each step say how long it
# computes, the host's clock how long the epoch takes; what is missing is waiting, for the loader
# and for the copy. So that the result does not depend on your GPU, a step is made to compute half
# as long as one process takes to load its batch: without workers half of the time should be
# waiting, and next to nothing with workers that load ahead, pinned memory, and copies that do not
# block.


# %%
class Scenes(Dataset):
    """512 random crops of one image, resized to 224 x 224 in float32."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> torch.Tensor:
        image_CHW = torch.arange(3 * HEIGHT * WIDTH).view(3, HEIGHT, WIDTH) % 256 / 255
        side = int(torch.randint(100, HEIGHT, ()))
        crop_1CHW = image_CHW[None, :, :side, :side]
        return torch.nn.functional.interpolate(crop_1CHW, (224, 224), mode="bilinear")[0]


def time_an_epoch(device: torch.device, products: int, **knobs: object) -> tuple[float, float]:
    """Return the seconds of the second epoch, and those in which the GPU computed."""
    loader = DataLoader(Scenes(), BATCH, **knobs)
    weight_DD = torch.randn(4096, 4096, device=device)
    for _ in range(2):  # the first starts the workers
        events = []
        torch.cuda.synchronize()
        start = time.perf_counter()
        for image_BCHW in loader:
            image_BCHW.to(device, non_blocking=True)
            events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
            events[-1][0].record()
            for _ in range(products):  # they stand for a model's step
                torch.mm(weight_DD, weight_DD)
            events[-1][1].record()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    return seconds, sum(begin.elapsed_time(end) for begin, end in events) / 1e3


def check_waiting(device: torch.device) -> None:
    """Claim the share of a step that waits, without workers and with all knobs turned."""
    cores = len(os.sched_getaffinity(0)) // WORLD_SIZE  # for this rank
    before = "share of a step that waits, no workers"
    after = "share of a step that waits, all knobs turned"
    if device.type == "cpu" or cores < 4:
        for text in (before, after):
            blocked(text, needs="1 GPU" if device.type == "cpu" else "4 cores per GPU")
        return
    loading, computing = time_an_epoch(device, 1)
    products = max(1, min(1000, round(loading / 2 / computing)))
    seconds, computing = time_an_epoch(device, products)
    claim(before, 0.3, 1 - computing / seconds, ">=", timed=True)
    knobs = {"num_workers": cores - 1, "pin_memory": True, "persistent_workers": True}
    knobs["multiprocessing_context"] = "fork"
    seconds, computing = time_an_epoch(device, products, **knobs)
    claim(after, 0.1, 1 - computing / seconds, "<=", timed=True)


# %% [markdown]
# ## What you should have seen
#
# 1. Decoding, by a factor of ten or more: these files were just written, so reading them is a copy
#    from memory. Do not carry that to a network file system, where a million small files are opened
#    one by one and reading may be the largest share; there one large file helps most of all.
# 2. DataLoader two, and two more for the second epoch unless workers persist; a new worker has no
#    file open and nothing cached. FFCV none: its workers are threads.
# 3. 32, whatever n is. Both workers draw the same 32 numbers, all ranks do, and the second epoch
#    repeats them, since what a worker draws never comes back to its rank. A model that is trained
#    so sees few crops, and nothing fails. The cure: seed in `worker_init_fn`, from
#    `torch.initial_seed()`, and let ranks differ, by the loader's own `generator`.
# 4. On two cores, 1.4 to 2 for JPEGs of the same quality and 4 to 6 for raw pixels; the ledger
#    asks for less, since it must hold on your machine. Of what FFCV spends on a JPEG, two thirds
#    are decoding, which libjpeg-turbo does for the DataLoader too, in nearly the same time: no
#    loader on CPU cores avoids it. Of what it spends on raw pixels some 70% is cropping and
#    resizing, and the rest normalizing. Their price is bytes, six times as many: ImageNet has 720
#    GB, which must fit the page cache of every node, or the disk becomes the limit. FFCV's authors
#    measure 7.9 times the images per second on 96 virtual cores, where DataLoader's processes stop
#    scaling at 24; and their JPEGs had quality 90, FFCV's default, which decodes less.
#
# **Try.** Without 255 the pixels are divided by 0.229 instead of 58, so the mean of the crops is
# off by hundreds: training would diverge, or crawl if a BatchNorm comes first. Without
# `generator=seeds` all ranks draw alike: the workers of one rank still differ, so on one rank
# nothing fails.
#
# On a GPU box the question is whether the step waits: time the wait for the next batch, as
# profiling/01_distributed_profiling.py does. If it does: turn the knobs, then smaller images on
# disk, decoding on the GPU (nvJPEG, through DALI), and FFCV, whose last commit is of May 2024 but
# which runs on today's torch.


# %%
def main() -> None:
    options = command_line(
        {
            "--data": {"metavar": "FOLDER", "help": "images, one folder per class"},
            "--figure": {"metavar": "PATH", "help": "draw where each loader's time goes"},
        }
    )
    launch()
    if int(os.environ.get("LOCAL_WORLD_SIZE", WORLD_SIZE)) != WORLD_SIZE:
        refuse(f"needs one node, whose ranks share a folder, got {WORLD_SIZE} ranks on several")
    device = setup()
    check_draws()
    check_prefetching()
    check_waiting(device)
    if from_rank_0(RANK == 0 and Loader is None):
        for text in ("where a DataLoader's time goes", "threads against processes"):
            blocked(text, needs="FFCV: make .venv/all")
        finish()
    with tempfile.TemporaryDirectory(prefix="ffcv-lesson-") as folder:
        place = Path(from_rank_0(folder))
        if RANK == 0:
            with contextlib.redirect_stderr(io.StringIO()):  # FFCV's progress bars
                prepare(place, options.data)
        dist.barrier()
        stations, alone = check_stations(place, device)
        core = check_loaders(place)
        check_limits(stations, alone, core)
        if options.figure and RANK == 0:
            draw(options.figure, stations, core)
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
