"""Feeding the ranks: where a DataLoader's time goes, and FFCV in its place
========================================================================

**Question.** A rank that waits for images trains nothing. Where does a loader's time go, how much
of it does FFCV save, and does every sample still come once?

**Predict.** What share of an image's time through torchvision is reading its file? What share does
FFCV save if its file holds JPEGs, what if it holds raw pixels? On 7 ranks, how often does an epoch
of 240 samples deliver one twice?

**Run.**

    torchrun --standalone --nproc-per-node=4 01_ffcv_distributed_optimization.py   # GPUs, if 4
    python 01_ffcv_distributed_optimization.py             # the same; else gloo on the CPU

**You will have seen** (4 ranks on 2 cores, gloo, torch 2.15, 23 s) that reading is 2% of an image's
time; that the same crop costs a core a little less than half through FFCV's JPEGs and a fifth
through its raw pixels; and that all ranks together deliver each sample once.

FFCV needs the Debian packages of packages.txt, then `pip install -e '.[ffcv]'`. One node. Not run
on several GPUs.

**Next.** data-loading/02_ffcv_file_order_memory.py: the file, its orders, memory, and training.
"""

import argparse
import contextlib
import ctypes
import gc
import io
import json
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler

try:  # the extra [ffcv]
    if os.environ["RANK"] == "0":  # which alone reads photos; KeyError: a launcher needs nothing
        from torchvision import transforms
        from torchvision.datasets import ImageFolder, folder
        from torchvision.transforms import functional
    else:
        os.environ["NUMBA_OPT"] = "0"  # compile quickly
    from ffcv.fields import IntField, RGBImageField, decoders
    from ffcv.loader import Loader, OrderOption
    from ffcv.memory_managers import OSCacheManager
    from ffcv.reader import Reader
    from ffcv.transforms import NormalizeImage, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter
    from numba import config as numba_config
except (ImportError, KeyError):
    Loader = None

WORLD_SIZES = range(1, 65)  # what --nproc-per-node may be
FLAGS: dict[str, dict] = {
    "--data": {"metavar": "FOLDER", "help": "images, one folder a class (ImageNet's layout)"},
    "--figure": {"metavar": "PATH", "help": "save where each loader's time goes as a PNG"},
}
IMAGES, BATCH, SEED = 240, 32, 0  # images of 500 x 375; batch over all ranks
ROUNDS = 3  # times round the images in an epoch that is timed
WORKERS = min(2, numba_config.NUMBA_NUM_THREADS) if Loader else 2
MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])  # ImageNet's
PAPER = (1200 - 75) / 1200  # Leclerc et al. 2023: seconds that an epoch loads, that it only reads


def main(options: argparse.Namespace) -> None:
    one_node = int(os.environ["LOCAL_WORLD_SIZE"]) == WORLD_SIZE
    require(one_node, f"needs one node, got {WORLD_SIZE} ranks on several; they share a folder")
    device = setup()
    if on_rank_0(lambda: Loader is None):
        without_ffcv(device)
        finish()
    with shared_folder() as place:
        on_rank_0(prepare, place, options.data)
        parts = where_the_time_goes(place, device)
        seconds = threads_against_processes(place)
        each_sample_once((number for *_, number in rank_loader(place)), device)
        if options.figure and RANK == 0:
            draw(options.figure, parts, seconds)
    finish()


# %% [markdown]
# ## 1. A folder that all ranks read
#
# Rank 0 makes it: crops of scikit-learn's two photographs, or as many images of yours. They are
# JPEGs of 500 x 375 at quality 97, about 100 kB each, as in ImageNet. From them FFCV writes two
# files, one of JPEGs (it encodes them again, at quality 90 unless told) and one of raw pixels. A
# million files become one, read in any order.


# %%
@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A temporary folder, removed at the end; what a killed run left, the next one removes."""
    for left in Path(tempfile.gettempdir()).glob("ffcv-lesson-*") if RANK == 0 else ():
        if not psutil.pid_exists(int(left.name.split("-")[2])):
            shutil.rmtree(left, ignore_errors=True)
    place = Path(on_rank_0(tempfile.mkdtemp, "", f"ffcv-lesson-{os.getpid()}-"))
    try:
        yield place
    finally:
        if RANK == 0:
            shutil.rmtree(place, ignore_errors=True)


def on_rank_0(function: Callable, *args: object) -> object:
    """Call it on rank 0 while the others wait; hand everybody what it returned."""
    box = [function(*args) if RANK == 0 else None]
    dist.broadcast_object_list(box)
    return box[0]


def pictures(data: str | None) -> Iterator[tuple[str, object]]:
    """Class and image of each sample, from `data` or from the two photographs."""
    if data:
        found = ImageFolder(data)
        for i in np.linspace(0, len(found) - 1, IMAGES).astype(int):
            image, label = found[i]
            small = functional.resize(image, 375)
            yield found.classes[label], functional.center_crop(small, [375, 500])
        return
    from sklearn.datasets import load_sample_images

    random, photographs = np.random.default_rng(SEED), load_sample_images().images  # 640 x 427
    for i in range(IMAGES):
        y, x = random.integers(427 - 375 + 1), random.integers(640 - 500 + 1)
        crop = photographs[i % 2][y : y + 375, x : x + 500]
        yield f"class_{i % 2}", functional.to_pil_image(np.ascontiguousarray(crop))


class Photos(Dataset):
    """ImageFolder with its number beside each sample."""

    def __init__(self, place: Path, transform: Callable | None = None) -> None:
        self.folder = ImageFolder(place / "photos", transform)

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, number: int) -> tuple:
        return (*self.folder[number], int(number))


def prepare(place: Path, data: str | None) -> None:
    """Fill `place` with photos/CLASS/*.jpg, jpg.beton and raw.beton; FFCV shows its progress."""
    for i, (name, image) in enumerate(pictures(data)):
        (place / "photos" / name).mkdir(parents=True, exist_ok=True)
        image.save(place / "photos" / name / f"{i:04}.jpg", quality=97)
    for mode in "jpg", "raw":
        write(place, mode, RGBImageField(mode))


def write(place: Path, name: str, images: "RGBImageField") -> None:
    multiprocessing.set_start_method("fork", force=True)  # FFCV's writers inherit what they need
    fields = {"image": images, "label": IntField(), "number": IntField()}
    writer = DatasetWriter(str(place / f"{name}.beton"), fields, num_workers=1)
    writer.from_indexed_dataset(Photos(place), chunksize=16)
    for process in multiprocessing.active_children():
        process.join()  # which FFCV forgets


# %% [markdown]
# ## 2. Where a DataLoader's time goes
#
# FFCV's paper: an epoch of ImageNet takes 1,200 s through ImageFolder, 75 s if its files are only
# read. The 94% that is often quoted is (1200 - 75) / 1200: what no faster disk can save. Here each
# step is timed in one DataLoader without workers (files just written are read from memory).


# %%
def crop_224() -> Callable:
    crop, to_floats = transforms.RandomResizedCrop(224), transforms.Normalize(MEAN, STD)
    return transforms.Compose([crop, transforms.ToTensor(), to_floats])


def take_apart(place: Path, device: torch.device) -> dict[str, float]:
    """Seconds per image of each part, and of the `whole` epoch around them."""
    spent = dict.fromkeys(("read", "decode", "augment", "collate", "copy"), 0.0)

    def timed(part: str, function: Callable) -> Callable:
        def wrapped(*args: object) -> object:
            start = time.perf_counter()
            result = function(*args)
            spent[part] += time.perf_counter() - start
            return result

        return wrapped

    read = timed("read", lambda path: io.BytesIO(Path(path).read_bytes()))
    decode = timed("decode", lambda file: folder.Image.open(file).convert("RGB"))
    augment = timed("augment", crop_224())
    collate = timed("collate", torch.utils.data.default_collate)
    copy = timed("copy", lambda x: torch.empty_like(x, device=device).copy_(x))
    dataset = ImageFolder(place / "photos", augment, loader=lambda path: decode(read(path)))
    start = time.perf_counter()
    for images, _ in DataLoader(dataset, BATCH, collate_fn=collate):
        copy(images)
    spent["whole"] = time.perf_counter() - start
    return {part: seconds / len(dataset) for part, seconds in spent.items()}


def where_the_time_goes(place: Path, device: torch.device) -> dict[str, float]:
    parts = on_rank_0(take_apart, place, device)
    whole = parts.pop("whole")
    say("  DataLoader, ms an image:", *(f"{part} {1e3 * s:.2f}" for part, s in parts.items()))
    claim("five parts / the whole epoch", 0.9, sum(parts.values()) / whole, ">=")
    claim("share that is not reading; paper: 1125/1200", PAPER, 1 - parts["read"] / whole, ">=")
    return parts


# %% [markdown]
# ## 3. Threads against processes
#
# DataLoader's workers are processes: a batch is collated there and crosses to the trainer through
# shared memory. FFCV's are threads of code that numba compiled, without the GIL: they decode, crop
# and normalise each sample into its place in a batch that is already there. Both loaders deliver
# float32 crops of 224 x 224, normalised, with two workers. Rank 0 measures alone, in turns, over
# epochs long enough that FFCV's start, which makes its buffers anew each epoch, weighs little; its
# compiling, seconds for each loader, is warm-up. What is judged is a core's time per image, of all
# threads and processes together: other load on the machine hardly changes that. FFCV decodes
# smaller JPEGs, for it encoded them again; at the photos' quality it gains less (`make bench`).


# %%
def open_beton(path: Path, image: list, batch: int, **rest: object) -> "Loader":
    """A shuffling loader of (image, label, number) that drops nothing."""
    gc.collect()  # an old loader, freed while numba compiles, prints "Exception ignored: KeyError"
    numbers = {name: [decoders.IntDecoder(), ToTensor()] for name in ("label", "number")}
    rest |= {"order": OrderOption.RANDOM, "seed": SEED, "drop_last": False}
    return Loader(str(path), batch, pipelines={"image": image, **numbers}, **rest)


def point_at(loader: "Loader", path: Path) -> "Loader":
    """Let a compiled loader read another file of the same fields: that saves compiling again."""
    loader.reader = Reader(str(path))
    loader.memory_manager = OSCacheManager(loader.reader)
    return loader


def loaders_of(place: Path, files: list[str], rounds: int) -> dict[str, Callable]:
    """What gives each loader of float32 crops, its epoch `rounds` times round the images."""
    workers = {"num_workers": WORKERS, "persistent_workers": True}
    photos = Photos(place, crop_224())
    sampler = RandomSampler(photos, num_samples=rounds * IMAGES)
    torchvision = DataLoader(photos, BATCH, sampler=sampler, **workers)
    image = [decoders.RandomResizedCropRGBImageDecoder((224, 224))]
    image += [NormalizeImage(255 * MEAN, 255 * STD, np.float32), ToTensor(), ToTorchImage()]
    again = {"indices": np.tile(np.arange(IMAGES), rounds), "num_workers": WORKERS}
    ffcv = open_beton(place / f"{files[0]}.beton", image, BATCH, **again)
    of_file = {name: lambda n=name: point_at(ffcv, place / f"{n}.beton") for name in files}
    return {"DataLoader": lambda: torchvision, **of_file}


def core_seconds() -> float:
    """CPU time so far of this process and those it has started."""
    times = [p.cpu_times() for p in (psutil.Process(), *psutil.Process().children())]
    return sum(t.user + t.system for t in times)


def race(loaders: dict[str, Callable], repeats: int) -> tuple[dict, dict[str, int]]:
    """Per loader and epoch, (wall, core) seconds per image; the processes each loader started."""
    seconds, processes = {name: [] for name in loaders}, {}
    for _ in range(1 + repeats):
        for name, times in seconds.items():
            loader, before = loaders[name](), len(psutil.Process().children())
            cores, start = core_seconds(), time.perf_counter()
            count = sum(len(images) for images, *_ in loader)
            wall, cores = time.perf_counter() - start, core_seconds() - cores
            times.append((wall / count, cores / count))
            processes.setdefault(name, len(psutil.Process().children()) - before)
    return {name: times[1:] for name, times in seconds.items()}, processes


def threads_against_processes(place: Path) -> dict[str, float]:
    """A core's seconds per image through each loader, at its best."""
    seconds, processes = on_rank_0(lambda: race(loaders_of(place, ["jpg", "raw"], ROUNDS), 2))
    wall, core = ({name: min(t[k] for t in seconds[name]) for name in seconds} for k in (0, 1))
    say("\n  images a second:", *(f"{name} {1 / s:,.0f}" for name, s in wall.items()))
    say("  a core's ms an image:", *(f"{name} {1e3 * s:.2f}" for name, s in core.items()))
    claim("processes that the DataLoader started", WORKERS, processes["DataLoader"])
    claim("processes that FFCV started", 0, processes["jpg"] + processes["raw"])
    claim("core time, DataLoader's / FFCV's, JPEG", 2, core["DataLoader"] / core["jpg"], ">=")
    claim("core time, DataLoader's / FFCV's, raw", 3.5, core["DataLoader"] / core["raw"], ">=")
    return core


# %% [markdown]
# ## 4. Each sample once
#
# `distributed=True` wraps torch's DistributedSampler and sets its epoch by itself. All ranks must
# take equally many steps, so where n does not divide N, -N mod n samples come twice. And FFCV's
# default is `drop_last=True`, which loses a rank's last batch. Each sample carries its number, so
# what was delivered is counted, not what was planned. One thread a rank: they share the cores.


# %%
def rank_loader(place: Path) -> "Loader":
    """This rank's share of the whole images."""
    image = [decoders.SimpleRGBImageDecoder(), ToTensor()]
    batch, ranks = max(1, BATCH // WORLD_SIZE), {"num_workers": 1, "distributed": True}
    return open_beton(place / "raw.beton", image, batch, **ranks)


def each_sample_once(numbers: Iterable[torch.Tensor], device: torch.device) -> None:
    mine = torch.cat([n.flatten().clone() for n in numbers])  # FFCV writes over its batches
    count = torch.bincount(mine.to(device), minlength=IMAGES)
    dist.all_reduce(count)
    claim("samples that an epoch leaves out", 0, (count == 0).sum())
    claim("samples that come twice: -N mod n", -IMAGES % WORLD_SIZE, (count > 1).sum())


def without_ffcv(device: torch.device) -> None:
    each_sample_once([torch.tensor(list(DistributedSampler(range(IMAGES))))], device)
    for text in "where the time goes", "threads against processes":
        blocked(text, "a system library: see --help")


def draw(path: str, parts: dict[str, float], seconds: dict[str, float]) -> None:
    """Milliseconds of a core per image and part; FFCV's decoding is JPEG less raw."""
    from matplotlib.figure import Figure

    core, bars = ({name: 1e3 * s for name, s in of.items()} for of in (seconds, parts))
    bars["between processes"] = max(0.0, core["DataLoader"] - sum(bars.values()))
    figure, left = Figure(figsize=(9, 3), layout="constrained"), 0.0
    axes = figure.subplots()
    for i, (part, ms) in enumerate(bars.items()):
        axes.barh("DataLoader", ms, left=left, color=f"C{i}", label=part)
        left += ms
    axes.barh(["FFCV, JPEG", "FFCV, raw"], core["raw"], color="C6", label="crop and normalise")
    axes.barh("FFCV, JPEG", core["jpg"] - core["raw"], left=core["raw"], color="C1")
    axes.set_xlabel(f"ms of one core per image of 500 x 375, {WORKERS} workers")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)


# %% [markdown]
# ## The plumbing, the same in every lesson; fundamentals/02_launching_processes.py explains it

# %%
ledger: list[dict] = []  # every claim made so far, the same on every rank
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def command_line() -> argparse.Namespace:
    """Read FLAGS; --help and mistakes end here, before any collective, and are said once."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    for flag, about in FLAGS.items():
        parser.add_argument(flag, **about)
    parser.print_help = lambda: say(parser.format_help())
    parser.error = lambda text: require(False, f"{text}\n{parser.format_usage().rstrip()}")
    rule = f"needs a number of ranks in {WORLD_SIZES}, got {WORLD_SIZE}; set --nproc-per-node"
    require("RANK" not in os.environ or WORLD_SIZE in WORLD_SIZES, rule)
    return parser.parse_args()


def launch() -> None:
    """Plain `python`: be torchrun, one rank per GPU, else 4, without its wall of text."""
    from torch.distributed.elastic.multiprocessing import api, errors
    from torch.distributed.run import main as torchrun

    ranks = gpus if (gpus := torch.cuda.device_count()) > 1 else 4
    ranks = ranks if ranks in WORLD_SIZES else WORLD_SIZES[0]
    os.environ |= {"LAUNCHER": str(os.getpid()), "OMP_NUM_THREADS": "1"}  # ranks share the cores
    logging.disable()  # the rank that failed says why
    here = ["--standalone", "--local-addr=127.0.0.1"]  # the host's name need not resolve
    try:
        torchrun([*here, f"--nproc-per-node={ranks}", *sys.argv])
    except errors.ChildFailedError as error:
        rank, first = error.get_first_failure()
        sys.exit(f"rank {rank} was ended by {first.signal_name()}" if first.exitcode < 0 else 1)
    except api.SignalException as error:
        sys.exit(128 + error.sigval)


def setup() -> torch.device:
    """Join the group torchrun describes: NCCL if every rank here has its own GPU, else gloo."""
    if sys.platform == "linux":  # PR_SET_PDEATHSIG: no rank outlives a killed launcher,
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.environ.pop("LAUNCHER", parent := str(os.getppid())) != parent:
        sys.exit(1)  # nor one killed before this line
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank that waits inside C++ too
    gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    backend, wait = "nccl" if gpu else "gloo", timedelta(minutes=2)
    dist.init_process_group(backend, device_id=device if gpu else None, timeout=wait)
    sys.excepthook = crash
    say(f"{WORLD_SIZE} ranks, {backend}, torch {torch.__version__}\n")
    say(f"{'':10}{'claim':55} {'predicted':20} measured")
    return device


def crash(*error: object) -> NoReturn:
    """An exception nobody caught: the first rank prints it, all leave at once; peers may wait."""
    first = dist.distributed_c10d._get_default_store().add("crash", 1) == 1
    time.sleep(1)  # if a peer's death is the cause, the launcher ends us meanwhile and names it
    if first:
        print(f"rank {RANK}:", file=sys.stderr)
        sys.__excepthook__(*error)
    os._exit(1)


def say(*words: object) -> None:
    """Print on rank 0 only."""
    if RANK == 0:
        print(*words, flush=True)


def require(holds: bool, rule: str) -> None:
    """End the run, before its first collective, with one message: rule, value, remedy."""
    if not holds:
        time.sleep(10 if RANK else 0)  # rank 0 speaks; the launcher ends the others as it leaves
        sys.exit(f"{sys.argv[0]}: {rule}")


def claim(text: str, predicted: float, measured: float, sign="=", atol=0.0, rtol=0.0) -> None:
    """Record the worst rank's `measured sign predicted` (= <= >=), give or take the slack."""
    mine = float(predicted), float(measured), atol + rtol * abs(predicted)
    ranks = [mine] * WORLD_SIZE
    if dist.is_initialized():
        dist.all_gather_object(ranks, mine)
    over = {"=": abs, "<=": float, ">=": float.__neg__}[sign]
    excess = [over(m - p) - slack for p, m, slack in ranks]
    worst = max(range(len(ranks)), key=lambda r: excess[r] if excess[r] == excess[r] else 1e999)
    (p, m, slack), verdict = ranks[worst], "PASS" if excess[worst] <= 0 else "FAIL"  # NaN: FAIL
    off = "" if verdict == "PASS" else f"\n{'':10}off by {m - p:.3g} on rank {worst}"
    told, seen = (f"{x:,.{12 if x.is_integer() else 6}g}" for x in (p, m))
    between = f"{sign:>2} {told}" + (f" ±{float(f'{slack:.1g}'):g}" if slack else "")
    say(f"  {verdict:7} {text:55} {between:20} {seen}{off}")
    row = {"claim": text, "verdict": verdict, "rank": worst, "sign": sign}
    finite = m - m == 0  # JSON knows no other numbers
    record(row | {"predicted": p, "measured": m if finite else str(m), "slack": slack})


def blocked(text: str, needs: str) -> None:
    """Record what this machine cannot answer, and what would."""
    say(f"  BLOCKED {text:55} needs {needs}")
    record({"claim": text, "verdict": "BLOCKED", "needs": needs})


def record(row: dict) -> None:
    """Add to the ledger; LESSON_JSON, if set, names a file that is whole after every claim."""
    ledger.append(row)
    if RANK == 0 and (path := os.environ.get("LESSON_JSON")):
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        about = {"ranks": WORLD_SIZE, "gpu": gpu, "cpus": os.cpu_count(), "python": sys.version}
        about |= {"torch": torch.__version__, "argv": sys.argv, "date": time.strftime("%F")}
        with open(path + ".part", "w") as file:
            json.dump(about | {"ledger": ledger}, file, indent=1)
        os.replace(path + ".part", path)


def finish() -> NoReturn:
    """Leave the group; exit 1 if a claim failed or none was made."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    count = [row["verdict"] for row in ledger].count
    say(f"\n  {count('PASS')} PASS, {count('FAIL')} FAIL, {count('BLOCKED')} BLOCKED")
    code = int(count("PASS") == 0 or count("FAIL") > 0)
    if __name__ == "__main__":  # threads of a group that something still holds can abort sys.exit
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    options = command_line()
    if "RANK" in os.environ or len(WORLD_SIZES) == 1:
        main(options)
    else:
        launch()
