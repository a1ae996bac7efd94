"""Data loading for many ranks: where a DataLoader's time goes, and FFCV in its place
==================================================================================

**Question.** A rank that waits for images trains nothing. Where does a loader's time go, how much
of it does FFCV save, and does every sample still come once per epoch?

**Predict**, and write it down before you run:

1. A JPEG of 100 kB lies in the page cache. Which takes longer, reading it or decoding it, and how
   many times longer?
2. Both loaders get two workers. How many processes does each of them start?
3. Both deliver the same random crops of the same JPEGs. By what factor does FFCV need less time of
   a core per image? And from a file of raw pixels?
4. How many bytes per image has that file of raw pixels, if images have 500 x 375 pixels, and whole
   images lie in pages of 8 MiB, after one page for the header?
5. An epoch of 242 samples is read by 7 ranks. How many samples come twice?

**Run.**

    torchrun --standalone --nproc-per-node=4 01_ffcv_distributed_optimization.py  # or on your GPUs
    python 01_ffcv_distributed_optimization.py             # the same, started for you

Not run on several GPUs. One node. FFCV needs the Debian packages of packages.txt, then `pip install
-e '.[ffcv]'`. `--data FOLDER` takes your own images, one folder per class.

**Try.** In `crops_by_ffcv` normalize by MEAN and STD without the factor 255: which claim fails?
In `rank_loader` ask for `OrderOption.SEQUENTIAL`: which one now?

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
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

Loader = None
if "RANK" in os.environ or WORLD_SIZE > 1:  # a launcher needs none of it
    if RANK != 0:
        os.environ["NUMBA_OPT"] = "0"  # compile quickly: only rank 0 measures time
    with contextlib.suppress(ImportError):  # the extra [ffcv]
        from ffcv.fields import IntField, RGBImageField, decoders
        from ffcv.loader import Loader, OrderOption
        from ffcv.memory_managers import OSCacheManager
        from ffcv.reader import Reader
        from ffcv.transforms import NormalizeImage, ToTensor, ToTorchImage
        from ffcv.writer import DatasetWriter

        if RANK == 0:  # which alone makes and decodes JPEGs
            from torchvision import transforms
            from torchvision.datasets import ImageFolder
            from torchvision.datasets import folder as folders
            from torchvision.transforms import functional

N = 242  # images
WIDTH = 500
HEIGHT = 375
PAGE = 2**23  # bytes of a page in a .beton file, FFCV's default
BATCH = 32  # images per step, over all ranks
WORKERS = 2
SEED = 0
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
# ## 2. The same crops through FFCV
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
# ## 3. Every sample once, over all ranks
#
# With `distributed=True` FFCV wraps torch's `DistributedSampler`, which deals shuffled samples out
# to the ranks, and counts epochs by itself, so that each has an order of its own. All ranks must
# take equally many steps, or the last all-reduce of an epoch hangs. Where n does not divide N,
# -N mod n samples therefore come twice. One trap: FFCV's default is `drop_last=True`, which loses
# what does not fill a rank's last batch.


# %%
def rank_loader(path: Path) -> "Loader":
    """Return a loader of this rank's share of the whole images, one thread per rank."""
    batch_size = max(1, BATCH // WORLD_SIZE)
    pipeline = [decoders.SimpleRGBImageDecoder(), ToTensor()]
    order = OrderOption.RANDOM
    options = {"order": order, "distributed": True, "num_workers": 1}
    return ffcv_loader(path, pipeline, batch_size, **options)


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

    random = np.random.default_rng(SEED)
    photographs = load_sample_images().images  # two of 427 x 640 pixels
    for index in range(N):
        y = random.integers(427 - HEIGHT + 1)
        x = random.integers(640 - WIDTH + 1)
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
    """Return the seconds per image of each station, and of the `whole` epoch around them."""
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
    start = time.perf_counter()
    for image_BCHW, _ in DataLoader(dataset, BATCH, collate_fn=collate):
        copy(image_BCHW)
    spent["whole"] = time.perf_counter() - start
    return {station: seconds / N for station, seconds in spent.items()}


def check_stations(place: Path, device: torch.device) -> dict[str, float]:
    """Claim that the stations are the epoch, and that reading is the least of it."""
    seconds = from_rank_0(station_seconds(place / "photos", device) if RANK == 0 else None)
    whole = seconds.pop("whole")
    shown = [f"{station} {1e3 * s:.2f}" for station, s in seconds.items()]
    print0(f"{'':13}DataLoader, ms per image: {', '.join(shown)}")
    claim("all stations / the whole epoch", 0.9, sum(seconds.values()) / whole, ">=", timed=True)
    ratio = seconds["read"] / seconds["decode"]
    claim("time to read / time to decode", 0.25, ratio, "<=", question=1, timed=True)
    return seconds


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
    """Claim what FFCV saves and that it delivers the same; return core seconds per image."""
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
        wall = min(wall for wall, _ in times)
        core[name] = min(core for _, core in times)
        shown = f"{1 / wall:7,.0f} images per second, {1e3 * core[name]:.2f} ms of a core per image"
        print0(f"{'':13}{name:10} {shown}")
    for name, at_least in (("jpg", 1.2), ("raw", 2.5)):
        text = f"core time, DataLoader's / FFCV's, {name}"
        ratio = core["DataLoader"] / core[name]
        claim(text, at_least, ratio, ">=", question=3, timed=True)
    return core


# %% [markdown]
# ## 6. How it is measured: the samples
#
# Each sample carries its index, so what was delivered is counted, not what was planned. Two epochs
# are compared position by position: in random order, only a few samples stand at the same place.


# %%
def check_samples(indices: list[torch.Tensor], device: torch.device) -> None:
    """Claim that an epoch, whose indices this rank has, leaves out nothing."""
    mine = torch.cat([index_B.flatten() for index_B in indices]).to(device)
    times = torch.bincount(mine, minlength=N)
    dist.all_reduce(times)
    claim("samples that an epoch leaves out", 0, (times == 0).sum())
    claim("samples that come twice", -N % WORLD_SIZE, (times - 1).sum(), question=5)


def check_epochs(path: Path, device: torch.device) -> None:
    """Read two epochs on all ranks; claim what the first delivers, and that the second differs."""
    loader = rank_loader(path)
    epochs = []
    for _ in range(2):
        epochs.append([index_B.clone() for *_, index_B in loader])  # FFCV writes over its batches
    check_samples(epochs[0], device)
    first = torch.cat(epochs[0])
    second = torch.cat(epochs[1])
    same = (first == second).double().mean()
    claim("share of samples at their place in 2 epochs", 0.2, same, "<=")


def check_bytes(place: Path) -> None:
    """Claim what a raw image takes, padding included; tell what its JPEG takes."""
    jpegs = sum(path.stat().st_size for path in (place / "photos").rglob("*.jpg")) / N
    raw = (place / "raw.beton").stat().st_size / N
    print0(f"{'':13}a JPEG of quality 97 has {jpegs:,.0f} bytes")
    pages = math.ceil(N / (PAGE // (HEIGHT * WIDTH * 3)))
    expected = (1 + pages) * PAGE / N + 24  # and an entry of 24 bytes in the allocation table
    claim("bytes per image in raw.beton", expected, raw, atol=1, question=4)


def from_rank_0(value: object) -> object:
    """Return rank 0's `value` on every rank."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


# %% [markdown]
# ## 7. On GPUs: pinned memory
#
# The copy to a GPU runs next to the training step only from **pinned** memory, which the kernel
# never moves; from pageable memory the driver first copies to a pinned buffer of its own.


# %%
def measure_copies(device: torch.device) -> None:
    """Copy a batch of float32 crops to this rank's GPU from pageable and from pinned memory."""
    if device.type == "cpu":
        blocked("copy of a batch: pageable / pinned time", needs="1 GPU")
        return
    pageable_BCHW = torch.randn(256, 3, 224, 224)
    pinned_BCHW = pageable_BCHW.pin_memory()
    pageable = median_ms(lambda: pageable_BCHW.to(device, non_blocking=True))
    pinned = median_ms(lambda: pinned_BCHW.to(device, non_blocking=True))
    gigabytes = pinned_BCHW.nbytes / 1e9
    for name, ms in (("pinned", pinned), ("pageable", pageable)):
        print0(f"{'':13}{name}: {1e3 * gigabytes / ms:.1f} GB/s")
    claim("copy of a batch: pageable / pinned time", 1.2, pageable / pinned, ">=", timed=True)


def median_ms(work: Callable, repeats: int = 20) -> float:
    """Return the median time of `work()` on this rank's GPU, in milliseconds."""
    times = []
    with torch.no_grad():
        for _ in range(repeats + 3):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return sorted(times[3:])[repeats // 2]


# %% [markdown]
# ## What you should have seen
#
# 1. Decoding, by a factor of ten or more: these files were just written, so reading them is a copy
#    from memory. Do not carry that to a network file system, where a million small files are opened
#    one by one and reading may be the largest share; there one large file helps most of all.
# 2. DataLoader two, FFCV none: its workers are threads.
# 3. On two cores, 1.4 to 2 for JPEGs of the same quality and 4 to 6 for raw pixels; the ledger
#    asks for less, since it must hold on your machine. FFCV's authors measure 7.9 times the images
#    per second on 96 virtual cores, where DataLoader's processes stop scaling at 24; per core the
#    gain is smaller, and their JPEGs had quality 90. FFCV's default quality of 90 gains more, by
#    decoding less: then the pictures are other pictures.
# 4. 562,500 for the pixels, and here 96,134 more: a page holds 14 images and some padding, the last
#    page is not full, and there is a page for the header. All in all that is six to seven times the
#    JPEG. Raw pixels trade cores for bytes: ImageNet would have 720 GB,
#    which must fit the page cache of every node, or the disk becomes the limit.
# 5. Three: each of 7 ranks takes 35 samples, and 7 x 35 = 245. On your ranks, -242 mod n.
#
# **Try.** Without 255 the pixels are divided by 0.229 instead of 58, so the mean of the crops is
# off by hundreds: training would diverge, or crawl if a BatchNorm comes first. In sequential order
# nothing is left out, but both epochs have the same order, and only the last claim says so.
#
# On a GPU box the question is whether the step waits: time the wait for the next batch, as
# profiling/01_distributed_profiling.py does. If it does: more workers, pinned memory, smaller
# images on disk, decoding on the GPU (nvJPEG, through DALI), and FFCV, whose last commit is of May
# 2024 but which runs on today's torch.


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
    if Loader is None:
        check_samples([torch.tensor(list(DistributedSampler(range(N))))], device)
        for text in ("where a DataLoader's time goes", "threads against processes"):
            blocked(text, needs="FFCV: make .venv/all")
        finish()
    with tempfile.TemporaryDirectory(prefix="ffcv-lesson-") as folder:
        place = Path(from_rank_0(folder))
        if RANK == 0:
            with contextlib.redirect_stderr(io.StringIO()):  # FFCV's progress bars
                prepare(place, options.data)
        dist.barrier()
        stations = check_stations(place, device)
        core = check_loaders(place)
        check_bytes(place)
        check_epochs(place / "raw.beton", device)
        if options.figure and RANK == 0:
            draw(options.figure, stations, core)
        dist.barrier()  # the folder goes when all have read it
    measure_copies(device)
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
