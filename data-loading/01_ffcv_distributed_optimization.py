"""Data loading for many ranks: where an image's time goes, and what FFCV takes away
=================================================================================

**Question.** On its way from the disk to the model an image is read, decoded, augmented, collated
and copied. Where does its time go, and which of it do a DataLoader's knobs or FFCV take away?

**Predict**, and write it down before you run:

1. A JPEG of 100 kB lies in the page cache. Which takes longer, reading it or decoding it, and how
   many times longer?
2. A DataLoader gets two workers instead of none. By what factor does the time of a core per image
   change?
3. DataLoader and FFCV get two workers each. How many processes does each of them start?
4. Both deliver the same random crops of the same JPEGs. By what factor does FFCV need less time of
   a core per image? And from a file of raw pixels?
5. How many times as many bytes as the JPEGs does that file of raw pixels have?

**Run.**

    torchrun --standalone --nproc-per-node=4 01_ffcv_distributed_optimization.py  # or on your GPUs
    python 01_ffcv_distributed_optimization.py             # the same, started for you

Not run on several GPUs. One node. FFCV needs the Debian packages of packages.txt, then `pip install
-e '.[ffcv]'`. `--data FOLDER` takes your own images; `--figure PATH` draws where the time goes.

**Try.** In `crops_by_ffcv` normalize by MEAN and STD without the factor 255: which claims fail? In
`ffcv_loader` set `drop_last` to True, which is FFCV's own default: which ones now?

**Before.** parallelism/01_data_parallelism_ddp.py: how ranks share a dataset.

**Next.** data-loading/10_dataloader_knobs.py: the knobs one by one.
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
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, default_collate

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

Loader = None
if "RANK" in os.environ or WORLD_SIZE > 1:  # a launcher needs none of it
    with contextlib.suppress(ImportError):  # the extra [ffcv]
        from numba import config

        config.DISABLE_JIT = RANK != 0  # rank 0 alone measures: the others need not compile
        from ffcv.fields import IntField, RGBImageField, decoders
        from ffcv.loader import Loader, OrderOption
        from ffcv.memory_managers import OSCacheManager
        from ffcv.pipeline.compiler import Compiler
        from ffcv.reader import Reader
        from ffcv.transforms import NormalizeImage, ToTensor, ToTorchImage
        from ffcv.writer import DatasetWriter
        from PIL import Image, ImageOps

        if RANK == 0:
            from torchvision import transforms

N = 242  # images
WIDTH, HEIGHT = 500, 375  # pixels of each
PAGE = 2**23  # bytes of a page in a .beton file, FFCV's default
BATCH = 32  # images
WORKERS = 2
SEED = 0
MEAN = np.array([0.485, 0.456, 0.406])  # of ImageNet's pixels between 0 and 1
STD = np.array([0.229, 0.224, 0.225])

# Shapes: N images, B of them in a batch; C, H, W: colors, rows, columns.

# %% [markdown]
# ## 1. The five stations of an image
#
# On its way from the disk to the model an image passes five stations:
#
#     file ──read──> JPEG ──decode──> pixels ──augment──> crop ──collate──> batch ──copy──> GPU
#                   100 kB            560 kB             600 kB            19 MB
#
# **Read** takes the file's bytes from the disk, or from the page cache if the kernel still has
# them. **Decode** makes pixels of them, three bytes each. **Augment** cuts out a random part,
# resizes it to 224 x 224 pixels, and makes normalized floats of it, four bytes per color.
# **Collate** copies 32 such crops into one batch. **Copy** moves the batch to the GPU.
#
# A training step takes some 100 ms for 256 images, so eight GPUs want 20,000 images per second. A
# rank whose loader is slower waits in every step. So the first question is how long an image takes
# at each station. The first three are a dataset's `__getitem__`. Here each has a stopwatch:


# %%
spent: Counter = Counter()  # seconds at each station, in this process


@contextlib.contextmanager
def station(name: str) -> Iterator[None]:
    """Add the time that a block takes to what is spent at a station."""
    start = time.perf_counter()
    yield
    spent[name] += time.perf_counter() - start


class Photos(Dataset):
    """A folder of JPEGs, each of them as (crop, index)."""

    def __init__(self, folder: Path, augment: Callable) -> None:
        self.paths = sorted(folder.iterdir())
        self.augment = augment

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple:
        with station("read"):
            jpeg = self.paths[index].read_bytes()
        with station("decode"):
            image = Image.open(io.BytesIO(jpeg)).convert("RGB")
        with station("augment"):
            crop = self.augment(image)
        return crop, int(index)


# %% [markdown]
# The other two are a function that DataLoader calls with a list of samples, and a line of the
# training loop.


# %%
def crops_by_torchvision() -> Callable:
    """Return what makes of an image a normalized random crop (3, 224, 224) in float32."""
    crop = transforms.RandomResizedCrop(224)
    return transforms.Compose([crop, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])


def collate(samples: list[tuple]) -> list[torch.Tensor]:
    with station("collate"):
        return default_collate(samples)


def copy(batch: torch.Tensor, device: torch.device) -> None:
    with station("copy"):
        batch.to(device, copy=True)
        if device.type == "cuda":
            torch.cuda.synchronize()


# %% [markdown]
# ## 2. What a DataLoader's knobs do: divide and hide
#
# A station that takes too long can be divided, hidden, or taken away.
#
# **Divide it.** `num_workers=k` starts k processes, each of which reads, decodes, augments and
# collates every k-th batch. (They are processes because threads would take turns at Python's lock,
# the GIL, for much of this work.) The work does not become less: a core spends as long on an image
# as before, and the batch must then cross to the trainer through shared memory. So k workers load
# at most k times as fast, and only if k cores are free.
#
# **Hide it.** Each worker loads up to `prefetch_factor` batches ahead, while the model computes.
# With `pin_memory=True` and `.to(device, non_blocking=True)` the copy, too, runs next to the step.
# What is hidden costs no time, as long as the loader is as fast as the step.
#
# **Take it away.** No knob does that to a station. (`persistent_workers=True` takes away something
# else: starting the workers anew in every epoch.) It takes another file, or another loader:
#
#                                    read     decode   augment  collate  copy
#     DataLoader, num_workers=k      divided  divided  divided  divided
#                 prefetch_factor    hidden   hidden   hidden   hidden
#                 pin_memory                                             hidden
#     FFCV, a file of JPEGs          gone                       gone
#     FFCV, a file of raw pixels     gone     gone              gone
#
# Where nothing stands, nothing changes. data-loading/10_dataloader_knobs.py turns the knobs one by
# one; here it matters what they leave.


# %%
def torchvision_loader(folder: Path, rounds: int, workers: int = WORKERS) -> DataLoader:
    """Return a loader of crops in random order, its epoch `rounds` times the images."""
    photos = Photos(folder, crops_by_torchvision())
    sampler = RandomSampler(photos, num_samples=rounds * N)
    knobs = {"num_workers": workers, "persistent_workers": workers > 0}
    return DataLoader(photos, BATCH, sampler=sampler, collate_fn=collate, **knobs)


# %% [markdown]
# ## 3. What FFCV does: take away
#
# FFCV (Leclerc et al., 2023) delivers the same batches, and three things are different. All images
# are written into **one file** beforehand, as JPEGs or as raw pixels. It is mapped into memory, so
# to read an image is to know where it lies; and raw pixels need no decoding. What is done to an
# image is compiled by numba and runs without the GIL, so workers are **threads**, and no batch
# crosses from process to process. And each image is decoded and cropped **into its place** in a
# batch that was allocated before, so nothing is collated:
#
#     DataLoader    process 1: read decode augment collate ──shared memory──┐
#                   process 2: read decode augment collate ──shared memory──┴──> batch ──> GPU
#
#     FFCV          thread 1: decode + crop + normalize ──┐
#                   thread 2: decode + crop + normalize ──┴──> its place in the batch ──> GPU
#
# In code, each field of a sample has a **pipeline**: a decoder, then operations. `NormalizeImage`
# sees bytes up to 255 where torchvision's `Normalize` sees floats up to 1, so MEAN and STD are
# multiplied by 255. numba compiles each pipeline before its first batch, for some seconds. The file
# is written from any dataset of samples; here `augment` only makes an array of the image.


# %%
def crops_by_ffcv() -> list:
    """Return the pipeline that makes of an image a normalized crop (3, 224, 224) in float32."""
    crop = decoders.RandomResizedCropRGBImageDecoder((224, 224))
    normalize = NormalizeImage(255 * MEAN, 255 * STD, np.float32)
    return [crop, normalize, ToTensor(), ToTorchImage()]


def ffcv_loader(path: Path, image: list | None, **options: object) -> "Loader":
    """Return a loader of (image, index), or without a pipeline for `image` of (index,)."""
    gc.collect()  # an old loader, freed while numba compiles, prints "Exception ignored: KeyError"
    pipelines = {"image": image, "index": [decoders.IntDecoder(), ToTensor()]}
    options = {"order": OrderOption.RANDOM, "seed": SEED, "drop_last": False} | options
    return Loader(str(path), BATCH, pipelines=pipelines, **options)


def write_photos(folder: Path, path: Path, field: "RGBImageField") -> None:
    """Write a folder of JPEGs into one .beton file."""
    multiprocessing.set_start_method("fork", force=True)  # FFCV's writers inherit what they need
    fields = {"image": field, "index": IntField()}
    writer = DatasetWriter(str(path), fields, page_size=PAGE, num_workers=1)
    writer.from_indexed_dataset(Photos(folder, np.array), chunksize=16)
    for process in multiprocessing.active_children():
        process.join()  # which FFCV forgets


# %% [markdown]
# ## 4. On several ranks: every image, once
#
# A loader that loses images is fast, too. torch's `DistributedSampler` shuffles the indices alike
# on all n ranks, and each takes every n-th of them. If n does not divide N, the first few come a
# second time at the end, so that all ranks take equally many steps. FFCV's `distributed=True` uses
# the same sampler. But its default is `drop_last=True`, which loses in every epoch what does not
# fill a rank's last batch. Here all ranks count together how often each image comes.


# %%
def indices_by_ffcv(path: Path) -> Iterator[torch.Tensor]:
    """Yield the indices of this rank's share of an epoch, batch by batch."""
    Compiler.set_enabled(False)  # plain Python: slow, the same values, and there at once
    for *_, index_B in ffcv_loader(path, None, distributed=True, num_workers=1):
        yield index_B
    Compiler.set_enabled(True)


def check_sharing(name: str, batches: Iterable[torch.Tensor], device: torch.device) -> None:
    """Claim how often the images come, given the indices of this rank's epoch."""
    times_N = torch.zeros(N, dtype=torch.int64)
    for index_B in batches:
        times_N += torch.bincount(index_B.flatten(), minlength=N)
    times_N = times_N.to(device)
    dist.all_reduce(times_N)
    claim(f"{name}: images that never come", 0, (times_N == 0).sum().item())
    claim(f"{name}: images that come twice", -N % WORLD_SIZE, (times_N > 1).sum().item())


# %% [markdown]
# ## 5. How it is measured: the images
#
# Rank 0 makes a folder of JPEGs: crops of scikit-learn's two photographs, or of your images, at
# quality 97, about 100 kB each as in ImageNet. FFCV encodes JPEGs again when it writes them, at
# quality 90 unless told. It is told 97, so that both loaders decode equally much.


# %%
def prepare(place: Path, data: str | None) -> None:
    """Fill `place` with photos/*.jpg, jpg.beton and raw.beton."""
    folder = place / "photos"
    folder.mkdir()
    for index, image in enumerate(images_of(data)):
        image.save(folder / f"{index:04}.jpg", quality=97)
    write_photos(folder, place / "jpg.beton", RGBImageField("jpg", jpeg_quality=97))
    write_photos(folder, place / "raw.beton", RGBImageField("raw"))


def images_of(data: str | None) -> Iterator["Image.Image"]:
    """Yield N images of WIDTH x HEIGHT pixels, from a folder or from two photographs."""
    if data:
        found = sorted(Path(data).rglob("*.[jJpP]*[gG]"))  # .jpg, .JPEG, .png
        if not found:
            raise ValueError(f"--data needs a folder with JPEGs or PNGs, got {data}")
        for index in np.linspace(0, len(found) - 1, N).astype(int):
            image = Image.open(found[index]).convert("RGB")
            yield ImageOps.fit(image, (WIDTH, HEIGHT))
        return
    from sklearn.datasets import load_sample_images

    generator = np.random.default_rng(SEED)
    photographs = load_sample_images().images  # two of 427 x 640 pixels
    for index in range(N):
        y = generator.integers(427 - HEIGHT + 1)
        x = generator.integers(640 - WIDTH + 1)
        crop_HWC = photographs[index % 2][y : y + HEIGHT, x : x + WIDTH]
        yield Image.fromarray(np.ascontiguousarray(crop_HWC))


# %% [markdown]
# ## 6. How it is measured: the time
#
# Rank 0 measures while the others wait. First the stations: an epoch of a DataLoader without
# workers. Its stopwatches should add up to the whole.


# %%
def station_seconds(folder: Path, device: torch.device) -> tuple[dict[str, float], float]:
    """Return seconds per image: of each station, and of the whole epoch."""
    loader = torchvision_loader(folder, rounds=1, workers=0)
    spent.clear()
    start = time.perf_counter()
    for image_BCHW, *_ in loader:
        copy(image_BCHW, device)
    whole = time.perf_counter() - start
    return {name: seconds / N for name, seconds in spent.items()}, whole / N


def check_stations(place: Path, device: torch.device) -> dict[str, float]:
    """Claim that the stations are the epoch; return the seconds per image of each."""
    measured = station_seconds(place / "photos", device) if RANK == 0 else None
    stations, whole = from_rank_0(measured)
    shown = [f"{name} {1e3 * seconds:.2f}" for name, seconds in stations.items()]
    print0(f"{'':13}DataLoader, ms per image: {', '.join(shown)}")
    claim("all stations / the whole epoch", 0.9, sum(stations.values()) / whole, ">=", timed=True)
    ratio = stations["read"] / stations["decode"]
    claim("time to read / time to decode", 0.25, ratio, "<=", question=1, timed=True)
    return stations


def from_rank_0(value: object) -> object:
    """Return rank 0's `value` on every rank."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


# %% [markdown]
# Then the loaders. What is judged is the time of a **core** per image, as the kernel counts it for
# this process and all that it has started: other load on the machine hardly changes it. Wall time
# is only printed. The loaders take turns, and the best epoch of each counts.


# %%
def all_loaders(place: Path, rounds: int, files: tuple = ("jpg", "raw")) -> dict[str, Callable]:
    """Return what gives each loader of crops, whose epochs go `rounds` times over the images."""
    options = {"indices": np.tile(np.arange(N), rounds), "num_workers": WORKERS}
    torchvision = torchvision_loader(place / "photos", rounds)
    ffcv = ffcv_loader(place / f"{files[0]}.beton", crops_by_ffcv(), **options)
    loaders = {"DataLoader": lambda: torchvision}
    for name in files:
        loaders[name] = functools.partial(point_at, ffcv, place / f"{name}.beton")
    return loaders


def point_at(loader: "Loader", path: Path) -> "Loader":
    """Let a compiled loader read another file of the same fields: that saves compiling again."""
    loader.reader = Reader(str(path))
    loader.memory_manager = OSCacheManager(loader.reader)
    return loader


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
# Before, each loader has an epoch to warm up, in which FFCV compiles. In it its processes are
# counted, and each color is averaged over all crops: a loader that normalizes or resizes in another
# way would be found out.


# %%
def without_workers(folder: Path) -> DataLoader:
    torch.set_num_threads(1)  # as in a worker; FFCV has set it to its own number of threads
    return torchvision_loader(folder, 1, workers=0)


def measure_loaders(place: Path) -> dict[str, dict]:
    """On rank 0: seconds per image, processes started, and the mean colors of what is delivered."""
    loaders = all_loaders(place, rounds=1)
    means = {}
    processes = {}
    for name, loader in loaders.items():
        before = len(psutil.Process().children())
        batches = [image_BCHW.double().mean((0, 2, 3)) for image_BCHW, *_ in loader()]
        means[name] = torch.stack(batches).mean(0)
        processes[name] = len(psutil.Process().children()) - before
    loaders["no workers"] = functools.partial(without_workers, place / "photos")
    return {"seconds": alternate(loaders, 2), "means": means, "processes": processes}


def check_loaders(place: Path) -> dict[str, float]:
    """Claim what workers and FFCV save, and that the crops agree; return core seconds per image."""
    measured = from_rank_0(measure_loaders(place) if RANK == 0 else None)
    processes = measured["processes"]
    claim("processes that DataLoader started", WORKERS, processes["DataLoader"], question=3)
    claim("processes that FFCV started", 0, processes["jpg"] + processes["raw"], question=3)
    means = measured["means"]
    for name in ("jpg", "raw"):
        far = (means[name] - means["DataLoader"]).abs().max()  # of the three colors
        claim(f"mean of normalized crops, {name} - DataLoader's", 0, far, atol=0.2)
    core = {}
    for name, times in measured["seconds"].items():
        wall = min(seconds for seconds, _ in times)
        core[name] = min(seconds for _, seconds in times)
        shown = f"{1 / wall:7,.0f} images per second, {1e3 * core[name]:.2f} ms of a core per image"
        print0(f"{'':13}{name:10} {shown}")
    ratio = core["DataLoader"] / core["no workers"]
    claim(f"core time, {WORKERS} workers / none", 1, ratio, atol=0.3, question=2, timed=True)
    for name, at_least in (("jpg", 1.2), ("raw", 2.5)):
        ratio = core["DataLoader"] / core[name]
        text = f"core time, DataLoader's / FFCV's, {name}"
        claim(text, at_least, ratio, ">=", question=4, timed=True)
    return core


# %% [markdown]
# No stopwatch can stand inside FFCV's compiled loops. But its two files differ in nothing but
# decoding, so the difference of their times is decoding. The DataLoader's core time, with workers,
# is divided as the stations were without them. `--figure` draws both.


# %%
def divided(core: float, stations: dict[str, float]) -> dict[str, float]:
    """Divide a loader's core time among a worker's stations, in the proportions measured."""
    worked = {name: seconds for name, seconds in stations.items() if name != "copy"}
    return {name: core * seconds / sum(worked.values()) for name, seconds in worked.items()}


def check_rest(stations: dict[str, float], core: dict[str, float], place: Path) -> None:
    """Claim what FFCV's JPEGs leave to do, and what its raw pixels cost."""
    decode = core["jpg"] - core["raw"]
    rest = 1e3 * core["raw"]
    print0(f"{'':13}FFCV, jpg: {1e3 * decode:.2f} ms to decode, {rest:.2f} to crop and normalize")
    ratio = decode / divided(core["DataLoader"], stations)["decode"]
    claim("time to decode a JPEG, FFCV's / DataLoader's", 0.8, ratio, atol=0.3, timed=True)
    jpegs = sum(path.stat().st_size for path in place.rglob("*.jpg"))
    raw = (place / "raw.beton").stat().st_size
    claim("bytes, file of raw pixels / JPEGs", 4, raw / jpegs, ">=", question=5)


def draw(path: str, stations: dict[str, float], core: dict[str, float]) -> None:
    """Draw milliseconds of a core per image, station by station."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    axes = figure.subplots()
    plain, jpg, raw = (1e3 * core[name] for name in ("DataLoader", "jpg", "raw"))
    rows = {"DataLoader": divided(plain, stations)}
    rows["FFCV, JPEG"] = {"decode": jpg - raw, "crop, normalize": raw}
    rows["FFCV, raw"] = {"crop, normalize": raw}
    colors = {"read": "#9ecae1", "decode": "#fdae6b", "collate": "#bcbddc"}
    for row, parts in rows.items():
        left = 0.0
        for part, ms in parts.items():
            axes.barh(row, ms, left=left, color=colors.get(part, "#a1d99b"), edgecolor="white")
            turned = 90 if ms < plain / 10 else 0
            axes.text(left + ms / 2, row, part, ha="center", va="center", rotation=turned)
            left += ms
    title = f"A DataLoader takes {plain / jpg:.1f} times as long as FFCV from JPEGs"
    axes.set_title(f"{title}, {plain / raw:.1f} times as from raw pixels")
    axes.set_xlabel(f"ms of one core per image of {WIDTH} x {HEIGHT} pixels, {WORKERS} workers")
    axes.invert_yaxis()
    figure.savefig(path, dpi=150)


# %% [markdown]
# ## What you should have seen
#
# 1. Decoding, by a factor of ten or more. These files were just written, so reading them is a copy
#    from memory. Do not carry that over to a network file system, where a million small files are
#    opened one by one and reading may take most of the time.
# 2. By none, or hardly. Two workers deliver up to twice as many images per second, and spend as
#    much time of a core on each. When all cores are busy, no knob makes a DataLoader faster.
# 3. Two, and none: FFCV's workers are threads.
# 4. On two cores, 1.4 to 2 from JPEGs and 4 to 6 from raw pixels; the ledger asks for less, since
#    it must hold on your machine. About two thirds of what FFCV spends on a JPEG is decoding, and
#    that is nearly as much as in a DataLoader: libjpeg-turbo does it in both. From raw pixels it is
#    gone, too, and cropping and resizing is most of what remains.
# 5. Six times and more: 562,500 bytes of pixels per image, and some padding. That is the price.
#    ImageNet at this size has 720 GB, which must fit the page cache of every node. If it does not,
#    reading, the smallest station here, becomes the one that everybody waits for.
#
# Neither loader loses an image, and with 4 ranks two of 242 come twice. FFCV's authors report 7.9
# times as many images per second as a DataLoader: on 96 virtual cores, of which DataLoader can use
# 24, and from JPEGs of quality 90, which decode faster.
#
# **Try.** Without 255 the pixels are divided by 0.229 instead of 58, and the mean of the crops is
# off by hundreds, from both files: training would diverge, or crawl if a BatchNorm comes first.
# With `drop_last=True` images never come; with 4 ranks that is almost half of this small dataset.
# Others are lost in each epoch, so a loss curve tells little.
#
# **On GPUs** the copy crosses PCIe. Whether the step waits at all is measured in
# data-loading/10_dataloader_knobs.py. If it does, count cores: "ms of a core" times the images per
# second that a GPU wants is the number of cores that it needs. 3 ms times 2,500 per second are 7.5
# cores, 60 for eight GPUs; from raw pixels it is 14. If the node has them, `num_workers` is enough.
# If not, take work away: smaller images on the disk, FFCV (its last commit is of May 2024, and it
# runs on today's torch), or decoding on the GPU (nvJPEG, through DALI). With a thousand ranks all
# nodes read from one file system; then few large files, read in order, matter more than all this.


# %%
def leave(place: Path, owner: int, number: int, frame: object) -> None:
    """End on a signal, the folder's owner without the folder: workers have inherited this."""
    if os.getpid() == owner:
        shutil.rmtree(place, ignore_errors=True)
    os._exit(128 + number)


def main() -> None:
    data = {"metavar": "FOLDER", "help": "a folder of your own images"}
    figure = {"metavar": "PATH", "help": "draw where each loader's time goes"}
    options = command_line({"--data": data, "--figure": figure})
    launch()
    if int(os.environ.get("LOCAL_WORLD_SIZE", WORLD_SIZE)) != WORLD_SIZE:
        refuse(f"needs one node, whose ranks share a folder, got {WORLD_SIZE} ranks on several")
    device = setup()
    sampler = DistributedSampler(range(N), seed=SEED)
    check_sharing("DataLoader", DataLoader(range(N), BATCH, sampler=sampler), device)
    if Loader is None:
        for text in ("where a DataLoader's time goes", "threads against processes"):
            blocked(text, needs="FFCV: make .venv/all")
        finish()
    own = tempfile.TemporaryDirectory(prefix="ffcv-lesson-") if RANK == 0 else None
    with own or contextlib.nullcontext() as folder:
        place = Path(from_rank_0(folder))
        if RANK == 0:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, functools.partial(leave, place, os.getpid()))
            with contextlib.redirect_stderr(io.StringIO()):  # FFCV's progress bars
                prepare(place, options.data)
        dist.barrier()
        check_sharing("FFCV", indices_by_ffcv(place / "jpg.beton"), device)
        stations = check_stations(place, device)
        core = check_loaders(place)
        check_rest(stations, core, place)
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
