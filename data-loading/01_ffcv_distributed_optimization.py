"""Data loading for many ranks: where an image's time goes, and what FFCV takes away
=================================================================================

**Question.** On its way from the disk to the model an image is read, decoded, augmented, collated
and copied. Where does its time go, and which of it do a DataLoader's knobs or FFCV take away?

**Predict**, and write it down before you run:

1. A JPEG of 100 kB lies in the page cache. How many times as long as reading it does it take to
   decode it?
2. A DataLoader gets two workers instead of none. By what factor does the time of a core per image
   change?
3. An image costs 3 ms of a core, and a GPU trains on 2,500 images per second. How many cores must
   load for this GPU?
4. FFCV delivers the same random crops of the same JPEGs. How many times less time of a core does an
   image cost then?
5. How many times less than with the DataLoader is it, if FFCV reads a file of raw pixels?

**Run.**

    torchrun --standalone --nproc-per-node=4 01_ffcv_distributed_optimization.py  # or on your GPUs
    python 01_ffcv_distributed_optimization.py             # the same, started for you

Not run on several GPUs. FFCV needs the Debian packages of packages.txt, then `pip install -e
'.[ffcv]'`; without it questions 1 to 3 remain, if torchvision is there. `--data FOLDER` takes your
own images; `--figure PATH` draws where the time goes.

**Try.** In `crops_by_ffcv` normalize by MEAN and STD without the factor 255: which claims fail? In
`Photos.__getitem__` leave out `.convert("RGB")`: which ones now, and where has decoding gone?

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
from multiprocessing import shared_memory
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, RandomSampler, default_collate

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

Loader = transforms = None
if "RANK" in os.environ and RANK == 0:  # which alone loads images here, and measures
    with contextlib.suppress(ImportError):  # it comes with the extra [ffcv], too
        from PIL import Image, ImageOps
        from torchvision import transforms
    with contextlib.suppress(ImportError):  # the extra [ffcv]
        from ffcv import writer as ffcv_writer
        from ffcv.fields import IntField, RGBImageField, decoders
        from ffcv.loader import Loader, OrderOption
        from ffcv.transforms import NormalizeImage, ToTensor, ToTorchImage
        from ffcv.writer import DatasetWriter

N = 242  # images
WIDTH, HEIGHT = 500, 375  # pixels of each
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
# A training step takes some 100 ms for 256 images, so a GPU wants 2,500 images per second, and
# eight want 20,000. A rank whose loader is slower waits in every step. So the first question is how
# long an image takes at each station. The first three are a dataset's `__getitem__`. Here each has
# a stopwatch:


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


def torchvision_loader(folder: Path, rounds: int, workers: int = WORKERS) -> DataLoader:
    """Return a loader of crops in random order, its epoch `rounds` times the images."""
    photos = Photos(folder, crops_by_torchvision())
    sampler = RandomSampler(photos, num_samples=rounds * N)
    knobs = {"num_workers": workers, "persistent_workers": workers > 0}
    knobs["multiprocessing_context"] = "fork" if workers else None
    return DataLoader(photos, BATCH, sampler=sampler, collate_fn=collate, **knobs)


# %% [markdown]
# ## 2. Divide it, hide it, or take it away
#
# Three things can be done about a station that takes too long.
#
# **Divide it.** `num_workers=k` starts k processes, each of which reads, decodes, augments and
# collates every k-th batch. (They are processes because threads would take turns at Python's lock,
# the GIL, for much of this work.) The work does not become less: a core spends as long on an image
# as before, and the batch must then cross to the trainer through shared memory. So k workers load
# at most k times as fast, and only if k cores are free.
#
# **Hide it.** Each worker loads up to `prefetch_factor` batches ahead, while the model computes.
# With `pin_memory=True` and `.to(device, non_blocking=True)` the host no longer waits for the copy,
# and on a stream of its own it runs next to the step. What is hidden costs no time as long as the
# loader is as fast as the step, but it costs the same time of the cores.
#
# **Take it away.** No knob does that. It takes another file, or another loader.
#
# So what decides is one number, the **time of a core per image**. Knobs do not change it, and it
# says how many cores a GPU needs:
#
#     cores = images per second that the GPU trains on  x  seconds of a core per image
#
# If the node has so many cores for each of its GPUs, dividing and hiding are enough. If not, they
# change nothing, and something must be taken away.


# %%
def cores_busy(loader: Iterable, rate: float) -> float:
    """Return how many cores are busy while images are taken at a rate, in images per second."""
    cores = core_seconds()
    start = time.perf_counter()
    taken = 0
    for image_BCHW, *_ in loader:
        taken += len(image_BCHW)
        time.sleep(max(0.0, start + taken / rate - time.perf_counter()))
    return (core_seconds() - cores) / (time.perf_counter() - start)


def core_seconds() -> float:
    """Return the CPU time so far of this process and those that it has started."""
    me = psutil.Process()
    times = [process.cpu_times() for process in [me, *me.children()]]
    return sum(t.user + t.system for t in times)


# %% [markdown]
# ## 3. What FFCV takes away
#
# FFCV (Leclerc et al., 2023) delivers the same batches, and it works on four of the stations:
#
# - **Read.** All images are written into one file beforehand, which is mapped into memory. To read
#   an image is to know where it lies: no file is opened, and nothing is called per image. But its
#   bytes come from the page cache as before, or from the disk if they are not there.
# - **Decode.** The file may hold raw pixels instead of JPEGs. Then nothing is decoded, and there
#   are about six times as many bytes to keep, and to read.
# - **Augment.** What is done to an image is compiled by numba: fewer passes over its bytes.
# - **Collate.** Compiled code runs without the GIL, so workers are **threads**. Each puts its crops
#   into their place in a batch that was allocated before. Nothing is collated, and no batch crosses
#   from process to process.
#
#       DataLoader    process 1: read decode augment collate ──shared memory──┐
#                     process 2: read decode augment collate ──shared memory──┴──> batch ──> GPU
#
#       FFCV          thread 1: decode + crop + normalize ──┐
#                     thread 2: decode + crop + normalize ──┴──> its place in the batch ──> GPU
#
# In code, each field of a sample has a **pipeline**: a decoder, then operations. `NormalizeImage`
# sees bytes up to 255 where torchvision's `Normalize` sees floats up to 1, so MEAN and STD are
# multiplied by 255. numba compiles each pipeline before its first batch, for some seconds.


# %%
def crops_by_ffcv() -> list:
    """Return the pipeline that makes of an image a normalized crop (3, 224, 224) in float32."""
    crop = decoders.RandomResizedCropRGBImageDecoder((224, 224))
    normalize = NormalizeImage(255 * MEAN, 255 * STD, np.float32)
    return [crop, normalize, ToTensor(), ToTorchImage()]


def ffcv_loader(path: Path, rounds: int) -> "Loader":
    """Return a loader of crops in random order, its epoch `rounds` times the images."""
    gc.collect()  # an old loader, freed while numba compiles, prints "Exception ignored: KeyError"
    pipelines = {"image": crops_by_ffcv(), "index": [decoders.IntDecoder(), ToTensor()]}
    knobs = {"num_workers": WORKERS, "drop_last": False, "seed": SEED}
    indices = np.tile(np.arange(N), rounds)
    order = OrderOption.RANDOM
    return Loader(str(path), BATCH, order=order, indices=indices, pipelines=pipelines, **knobs)


# %% [markdown]
# ## 4. How it is measured: the images
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
    if Loader:
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
# FFCV writes its file from any dataset of samples; here `augment` only makes an array of the image.


# %%
class Nameless(shared_memory.SharedMemory):
    """Shared memory that forked processes inherit, and that no kill leaves behind by its name."""

    def __init__(self, *given: object, **options: object) -> None:
        super().__init__(*given, **options)
        super().unlink()

    def unlink(self) -> None:
        """Nothing: its name went when it came."""


def write_photos(folder: Path, path: Path, field: "RGBImageField") -> None:
    """Write a folder of JPEGs into one .beton file."""
    multiprocessing.set_start_method("fork", force=True)  # FFCV's writers inherit what they need
    ffcv_writer.shared_memory = SimpleNamespace(SharedMemory=Nameless)
    writer = DatasetWriter(str(path), {"image": field, "index": IntField()}, num_workers=1)
    writer.from_indexed_dataset(Photos(folder, np.array), chunksize=16)
    for process in multiprocessing.active_children():
        process.join()  # which FFCV forgets


# %% [markdown]
# ## 5. How it is measured: the time
#
# Rank 0 measures while the others wait. First the stations: an epoch of a DataLoader without
# workers, after one that warms up. Its stopwatches should add up to the whole.


# %%
def station_seconds(folder: Path, device: torch.device) -> tuple[dict[str, float], float, float]:
    """Return seconds per image: of each station, of the whole epoch, and of a core."""
    loader = torchvision_loader(folder, rounds=1, workers=0)
    for _ in range(2):
        spent.clear()
        cores = core_seconds()
        start = time.perf_counter()
        for image_BCHW, *_ in loader:
            copy(image_BCHW, device)
        whole = time.perf_counter() - start
        cores = core_seconds() - cores
    return {name: seconds / N for name, seconds in spent.items()}, whole / N, cores / N


def check_stations(place: Path, device: torch.device) -> tuple[dict[str, float], float]:
    """Claim that the stations are the epoch; return seconds per image: of each, and of a core."""
    measured = station_seconds(place / "photos", device) if RANK == 0 else None
    stations, whole, core = from_rank_0(measured)
    shown = [f"{name} {1e3 * seconds:.2f}" for name, seconds in stations.items()]
    print0(f"{'':13}ms per image: {', '.join(shown)}")
    claim("all stations / the whole epoch", 0.9, sum(stations.values()) / whole, ">=", timed=True)
    ratio = stations["decode"] / stations["read"]
    claim("time to decode / time to read", 10, ratio, ">=", question=1, timed=True)
    return stations, core


def from_rank_0(value: object) -> object:
    """Return rank 0's `value` on every rank."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


# %% [markdown]
# Then the loaders. What is judged is the time of a **core** per image, as the kernel counts it for
# this process and all that it has started: other load on the machine hardly changes it. Wall time
# is only printed. The loaders take turns, and the best epoch of each counts. Before, each has an
# epoch to warm up, in which FFCV compiles. In it its processes are counted, and each color is
# averaged over all crops: a loader that normalizes in another way would be found out.


# %%
def all_loaders(place: Path, rounds: int, files: tuple[str, ...]) -> dict[str, Iterable]:
    """Return the loaders of crops, FFCV's by file; epochs go `rounds` times over the images."""
    loaders = {"DataLoader": torchvision_loader(place / "photos", rounds)}
    for name in files:
        loaders[name] = ffcv_loader(place / f"{name}.beton", rounds)
    return loaders


def alternate(loaders: dict[str, Iterable], repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Run epochs of all loaders in turns; return (wall, core) seconds per image of each epoch."""
    seconds = {name: [] for name in loaders}
    for _ in range(repeats):
        for name, loader in loaders.items():
            cores = core_seconds()
            start = time.perf_counter()
            images = sum(len(image_BCHW) for image_BCHW, *_ in loader)
            wall = time.perf_counter() - start
            seconds[name].append((wall / images, (core_seconds() - cores) / images))
    return seconds


def measure_loaders(place: Path) -> dict[str, dict]:
    """On rank 0: seconds per image, processes started, and the mean colors of what is delivered."""
    loaders = all_loaders(place, 1, ("jpg", "raw") if Loader else ())
    means = {}
    processes = {}
    for name, loader in loaders.items():
        before = len(psutil.Process().children())
        batches = [image_BCHW.double().mean((0, 2, 3)) for image_BCHW, *_ in loader]
        means[name] = torch.stack(batches).mean(0)
        processes[name] = len(psutil.Process().children()) - before
    found = {"seconds": alternate(loaders, 2), "means": means, "processes": processes}
    wall = min(wall for wall, _ in found["seconds"]["DataLoader"])
    found["rate"] = 0.5 / wall
    found["busy"] = cores_busy(loaders["DataLoader"], found["rate"])
    return found


def check_loaders(place: Path, without_workers: float) -> dict[str, float]:
    """Claim what workers change, and that the crops agree; return core seconds per image."""
    found = from_rank_0(measure_loaders(place) if RANK == 0 else None)
    core = {}
    for name, times in found["seconds"].items():
        wall = min(seconds for seconds, _ in times)
        core[name] = min(seconds for _, seconds in times)
        shown = f"{1 / wall:7,.0f} images/s, {1e3 * core[name]:.2f} ms of a core per image"
        print0(f"{'':13}{name:10} {shown}, {2500 * core[name]:4.1f} cores for 2,500/s")
    ratio = core["DataLoader"] / without_workers
    claim(f"core time, {WORKERS} workers / none", 1, ratio, atol=0.4, question=2, timed=True)
    ratio = found["busy"] / (found["rate"] * core["DataLoader"])
    claim("cores busy / (rate x core time)", 1, ratio, atol=0.25, question=3, timed=True)
    processes = found["processes"]
    claim("processes that DataLoader started", WORKERS, processes.pop("DataLoader"))
    if processes:
        claim("processes that FFCV started", 0, sum(processes.values()))
    means = found["means"]
    for name in processes:
        far = (means[name] - means["DataLoader"]).abs().max()  # of the three colors
        claim(f"mean of normalized crops, {name} - DataLoader's", 0, far, atol=0.2)
    return core


# %% [markdown]
# No stopwatch can stand inside FFCV's compiled loops. But its two files differ in nothing but
# decoding, so the difference of their times is decoding. The stations of the DataLoader are those
# without workers; what it takes more with them is handing over. `--figure` draws the result.


# %%
def by_station(stations: dict[str, float], core: dict[str, float]) -> dict[str, dict[str, float]]:
    """Return seconds of a core per image, of each loader at each station."""
    worked = {name: seconds for name, seconds in stations.items() if name != "copy"}
    worked["hand over"] = max(core["DataLoader"] - sum(worked.values()), 0.0)
    rows = {"DataLoader": worked}
    rows["FFCV, JPEG"] = {"decode": core["jpg"] - core["raw"], "augment": core["raw"]}
    rows["FFCV, raw"] = {"augment": core["raw"]}
    return rows


def check_ffcv(rows: dict[str, dict[str, float]], place: Path) -> None:
    """Claim what FFCV saves, of decoding and augmenting too, and what raw pixels cost in bytes."""
    for name, parts in rows.items():
        shown = [f"{station} {1e3 * seconds:.2f}" for station, seconds in parts.items()]
        print0(f"{'':13}{name:11}core ms: {', '.join(shown)}")
    theirs = rows["DataLoader"]
    ours = rows["FFCV, JPEG"]
    jpg = sum(theirs.values()) / sum(ours.values())
    claim("core time, DataLoader's / FFCV's, JPEG", 1.4, jpg, ">=", question=4, timed=True)
    raw = sum(theirs.values()) / rows["FFCV, raw"]["augment"]
    claim("core time, DataLoader's / FFCV's, raw", 3.5, raw, ">=", question=5, timed=True)
    ratio = ours["decode"] / theirs["decode"]
    claim("time to decode, FFCV's / DataLoader's", 0.8, ratio, atol=0.2, timed=True)
    ratio = ours["augment"] / theirs["augment"]
    claim("time to augment, FFCV's / DataLoader's", 0.5, ratio, atol=0.2, timed=True)
    claim("bytes, file of raw pixels / JPEGs", 5, from_rank_0(bytes_ratio(place)), ">=")


def bytes_ratio(place: Path) -> float:
    """On rank 0: the bytes of the raw pixels, by those of the JPEGs."""
    if RANK != 0:
        return 0.0
    jpegs = sum(path.stat().st_size for path in place.rglob("*.jpg"))
    return (place / "raw.beton").stat().st_size / jpegs


def draw(path: str, rows: dict[str, dict[str, float]]) -> None:
    """Draw milliseconds of a core per image, station by station."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    axes = figure.subplots()
    colors = {"read": "#9ecae1", "decode": "#fdae6b", "augment": "#a1d99b", "collate": "#bcbddc"}
    colors["hand over"] = "#d9d9d9"
    for name, parts in rows.items():
        left = 0.0
        for station, seconds in parts.items():
            ms = 1e3 * seconds
            axes.barh(name, ms, left=left, color=colors[station], edgecolor="white")
            turned = 90 if ms < 0.3 else 0
            axes.text(left + ms / 2, name, station, ha="center", va="center", rotation=turned)
            left += ms
    axes.set_title("FFCV takes away collating and half of augmenting; raw pixels, decoding")
    axes.set_xlabel(f"ms of one core per image of {WIDTH} x {HEIGHT} pixels, {WORKERS} workers")
    axes.invert_yaxis()
    figure.savefig(path, dpi=150)


# %% [markdown]
# ## What you should have seen
#
# 1. Ten times as long and more, if nothing else wants the disk: these files were just written, so
#    reading them is a copy from memory. Do not carry that over to a network file system, where a
#    million small files are opened one by one and reading may take most of the time.
# 2. By none, or hardly: handing a batch over takes about a tenth more. Two workers deliver up to
#    twice as many images per second, and spend as much time of a core on each.
# 3. 7.5, and 60 for eight GPUs. Taken at half the speed that the loader could have, images keep
#    rate x core time cores busy, whatever the number of workers.
# 4. 1.4 to 2 times. Decoding remains, and costs some four fifths of what it costs in a DataLoader:
#    libjpeg-turbo does it in both, and Pillow copies more. Reading, collating and handing over are
#    gone, and augmenting takes about half.
# 5. 4 to 6 times: decoding is gone too, and cropping and resizing is what remains. The price is six
#    times the bytes. ImageNet at this size has 720 GB, which must fit the page cache of every node.
#    If it does not, reading, the smallest station here, becomes the one that everybody waits for.
#
# In percent of the DataLoader's core time, on a machine with two cores:
#
#                              read   decode   augment   collate   hand over     sum
#     DataLoader                 2      46        41         4           7         100
#     FFCV, from JPEGs                  37        20                                57
#     FFCV, from raw pixels                       20                                20
#
# FFCV's authors report 7.9 times as many images per second as a DataLoader: on 96 virtual cores, of
# which DataLoader can use 24, and from JPEGs of quality 90, which decode faster.
#
# **Try.** Without 255 the pixels are divided by 0.229 instead of 58, and the mean of the crops is
# off by hundreds, from both files, so two claims fail: training would diverge, unless a BatchNorm
# comes first, which undoes it. Without `.convert` the image is only opened, and PIL decodes it when
# its pixels are wanted, which is in `augment`. Then decoding takes no longer than reading, and both
# ratios of FFCV's stations to the DataLoader's are wrong: three claims fail. A stopwatch sees where
# work is done, not where it belongs.
#
# **On GPUs** the copy crosses PCIe, and data-loading/10_dataloader_knobs.py measures whether the
# step waits at all. If it does, count cores. The last column above is what one GPU keeps busy. If
# the node has them, `num_workers` is enough. If not, take work away: smaller images on the disk,
# FFCV (its last commit is of May 2024, and it runs on today's torch), or decoding on the GPU
# (nvJPEG, through DALI). With a thousand ranks all nodes read from one file system; then few large
# files, read in order, matter more than all this.
#
# A loader that loses images is fast, too: FFCV's own default, `drop_last=True`, leaves out what
# does not fill a rank's last batch. data-loading/08 counts what comes.


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
    device = setup()
    if from_rank_0(transforms is None):
        blocked("where a DataLoader's time goes", needs="torchvision: pip install -e '.[ffcv]'")
        finish()
    own = tempfile.TemporaryDirectory(prefix="ffcv-lesson-") if RANK == 0 else None
    with own or contextlib.nullcontext("") as folder:
        place = Path(folder)  # rank 0 alone has one
        if RANK == 0:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, functools.partial(leave, place, os.getpid()))
            with contextlib.redirect_stderr(io.StringIO()):  # FFCV's progress bars
                prepare(place, options.data)
        dist.barrier()  # the others wait here for the images
        stations, without_workers = check_stations(place, device)
        core = check_loaders(place, without_workers)
        if "raw" in core:
            rows = by_station(stations, core)
            check_ffcv(rows, place)
            if options.figure and RANK == 0:
                draw(options.figure, rows)
        else:
            blocked("what FFCV takes away", needs="FFCV: pip install -e '.[ffcv]'")
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
