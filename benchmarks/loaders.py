"""Loaders of images, each next to the others, on 1, 2 and 4 ranks.

    python -m benchmarks.loaders              # the tables, into build/bench/loaders.json
    python -m benchmarks.loaders --keep       # into results/bench/loaders.json

All deliver the same: crops of 224 x 224 bytes, half of them mirrored, of the same 500 x 375 JPEGs
of quality 97, 32 per step over all ranks. One rank has two workers, several ranks have one each.
data-loading/08_loaders_compared.py tells what each thing costs that they do, and 14_exactly_once.py
what comes twice or again; the loaders of both, complete, are in image_loaders.py. First come the
limits, each alone in one thread, then whether the pixels are the same, then the loaders. LitData is
run if it is installed; its row was written from its documentation, and has not run yet.
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from types import ModuleType

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from course.lessons import ROOT
from course.playing import load
from course.ranks import run

N = 482  # images, as in image_loaders.py; four ranks cannot share them equally
ROUNDS = 8  # over the images, in an epoch from raw pixels
BATCH = 32  # over all ranks
RANKS = (1, 2, 4)
SHARDS = 16
SHUFFLED = 64  # samples in the buffer from which those of a shard are drawn
QUALITY = 97


def loaders_of(ranks: int) -> ModuleType:
    """image_loaders.py with two workers in all, or one per rank."""
    workers = max(1, 2 // ranks)
    return load("benchmarks/image_loaders.py", ("\nWORKERS = 2", f"\nWORKERS = {workers}"))


# The files


def prepare(folder: str) -> None:
    """JPEGs, raw pixels, FFCV's files, tar shards."""
    place = Path(folder)
    ours = loaders_of(1)
    ours.prepare(place)
    paths = ours.photos_in(place)
    jpegs = [path.read_bytes() for path in paths]
    (place / "photos.jpgs").write_bytes(b"".join(jpegs))
    np.save(place / "ends.npy", np.cumsum([len(jpeg) for jpeg in jpegs]))
    for shard in range(SHARDS):
        with tarfile.open(place / f"shard-{shard:02}.tar", "w") as tar:
            for path in paths[shard::SHARDS]:
                tar.add(path, arcname=path.name)
    if ours.Loader:
        (place / "jpg").mkdir()
        field = ours.RGBImageField("jpg", jpeg_quality=QUALITY)
        fields = {"image": field, "index": ours.IntField()}
        path = str(place / "jpg/photos.beton")
        with contextlib.redirect_stderr(io.StringIO()):
            writer = ours.DatasetWriter(path, fields, num_workers=1)
            images = [(np.asarray(ours.default_loader(p)), i) for i, p in enumerate(paths)]
            writer.from_indexed_dataset(images, chunksize=16)
    if find_spec("litdata"):
        optimize = import_module("litdata").optimize

        inputs = list(enumerate(map(str, paths)))
        optimize(as_lit, inputs, str(place / "lit"), chunk_bytes="16MB", num_workers=1)


def as_lit(numbered: tuple[int, str]) -> dict:
    index, path = numbered
    return {"index": index, "image": Path(path).read_bytes()}


# Loaders by other libraries


def decode(jpeg: bytes) -> object:
    from PIL import Image

    return Image.open(io.BytesIO(jpeg)).convert("RGB")


def tensor_of(crop: object) -> torch.Tensor:
    return torch.from_numpy(np.array(crop))


class TarShards(IterableDataset):
    """(crop, index) from tar files, read from front to back, drawn from a buffer.

    A shard goes to one rank, and to one of its workers.
    """

    def __init__(self, shards: list[Path], crop: Callable) -> None:
        self.shards = shards
        self.crop = crop

    def __iter__(self) -> Iterator[tuple]:
        worker = get_worker_info()
        random = np.random.default_rng(worker.seed)
        buffer = []
        for shard in random.permutation(self.shards[worker.id :: worker.num_workers]):
            with tarfile.open(shard) as tar:
                for member in tar:
                    buffer.append((tar.extractfile(member).read(), int(member.name[:4])))
                    if len(buffer) == SHUFFLED:
                        yield self.drawn(buffer, random)
        while buffer:
            yield self.drawn(buffer, random)

    def drawn(self, buffer: list, random: np.random.Generator) -> tuple:
        jpeg, index = buffer.pop(random.integers(len(buffer)))
        return tensor_of(self.crop(decode(jpeg))), index


def crop_of(ours: ModuleType) -> Callable:
    kinds = ours.transforms
    return kinds.Compose([kinds.RandomCrop(ours.CROP), kinds.RandomHorizontalFlip()])


def tar_loader(ours: ModuleType, place: Path, batch: int, rank: int, ranks: int) -> DataLoader:
    shards = sorted(place.glob("shard-*.tar"))[rank::ranks]
    dataset = TarShards(shards, crop_of(ours))
    live = {"num_workers": ours.WORKERS, "persistent_workers": True}
    live["multiprocessing_context"] = "fork"
    return DataLoader(dataset, batch, **live)


def lit_loader(ours: ModuleType, place: Path, batch: int) -> object:
    litdata = import_module("litdata")

    class Crops(litdata.StreamingDataset):
        def __getitem__(self, index: object) -> tuple:
            sample = super().__getitem__(index)
            return tensor_of(crop_of(ours)(decode(sample["image"]))), sample["index"]

    dataset = Crops(str(place / "lit"), shuffle=True, drop_last=False, seed=ours.SEED)
    return litdata.StreamingDataLoader(dataset, batch_size=batch, num_workers=ours.WORKERS)


def mapped_jpegs(ours: ModuleType, place: Path, *given: object) -> object:
    """The loader by hand over JPEGs in one mapped file, decoded by OpenCV in threads."""
    cv2 = import_module("cv2")  # which FFCV brings

    cv2.setNumThreads(1)  # the threads are ours
    bytes_of_all = np.asarray(np.memmap(place / "photos.jpgs", np.uint8, "r"))
    parts = np.split(bytes_of_all, np.load(place / "ends.npy")[:-1])
    one = np.zeros(1, int)

    class JpegLoader(ours.RawLoader):
        def copy(self, index_B: np.ndarray, draws_3B: np.ndarray, out_BHWC: np.ndarray) -> None:
            for b, index in enumerate(index_B):
                photo_HWC = cv2.imdecode(parts[index], cv2.IMREAD_COLOR_RGB)
                draws = np.ascontiguousarray(draws_3B[:, b : b + 1])
                ours.compiled()(photo_HWC[None], one, draws, out_BHWC[b : b + 1])

    return JpegLoader(place / "photos.raw", *given)


# One loader after the other


def endless(loader: object, steps: int) -> Callable:
    """What gives an epoch of a loader by hand, which has no end."""
    batches = iter(loader)
    return lambda: (next(batches) for _ in range(steps))


def makers(
    ours: ModuleType, place: Path, rank: int, ranks: int, rounds: int, seen: int = 0
) -> dict[str, Callable]:
    """What makes each loader of this rank; raw ones go `rounds` times over the images."""
    here = (rank, ranks)
    steps = -(-N // BATCH)
    raw_file = place / "photos.raw"
    made = {
        "DataLoader, plain": lambda: ours.plain_loader(place, *here).__iter__,
        "DataLoader, JPEG": lambda: ours.jpeg_loader(place, *here).__iter__,
        "tar shards": lambda: tar_loader(ours, place, BATCH // ranks, *here).__iter__,
    }
    if find_spec("litdata"):
        made["LitData"] = lambda: lit_loader(ours, place, BATCH // ranks).__iter__
    whole = {"drop_last": False, "distributed": True}
    if ours.Loader:
        jpg = partial(ours.ffcv_loader, place / "jpg", ranks, **whole)
        made["FFCV, JPEG"] = lambda: jpg(ours.random_crops()).__iter__
    if find_spec("cv2"):
        jpegs = partial(mapped_jpegs, ours, place, *here, seen)
        made["by hand, JPEG"] = lambda: endless(jpegs(), steps)
    made["DataLoader, raw"] = lambda: repeated(ours.raw_loader(place, *here), rounds)
    if ours.Loader:
        tiled = whole | {"indices": np.tile(np.arange(N), rounds)}
        raw = partial(ours.ffcv_loader, place, ranks, **tiled)
        made["FFCV, raw"] = lambda: raw(ours.random_crops()).__iter__
    by_hand = partial(ours.RawLoader, raw_file, *here, seen)
    made["by hand, raw"] = lambda: endless(by_hand(), rounds * steps)
    return made


def repeated(loader: DataLoader, rounds: int) -> Callable:
    return lambda: itertools.chain.from_iterable(itertools.repeat(loader, rounds))


def gathered(value: object) -> list:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def names() -> list[str]:
    """Of the loaders that can run here."""
    return list(makers(loaders_of(1), Path(), 0, 1, 1))


def alone(folder: str, name: str) -> dict:
    """In fresh processes: first batch, memory, which samples come, and what comes again."""
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    ours = loaders_of(ranks)
    place = Path(folder)
    before = ours.memory()
    dist.barrier()
    start = time.perf_counter()
    batches = makers(ours, place, rank, ranks, 1)[name]()()
    arrived = [next(batches)[1].flatten().clone()]
    first = time.perf_counter() - start
    wait_until_idle(ours)
    dist.barrier()  # all look while all hold what they hold
    held = ours.memory()
    dist.barrier()
    own = held["Anon"] + held["Shmem"] - before["Anon"] - before["Shmem"]
    for _, index_B in batches:
        arrived.append(index_B.flatten().clone())
    mine = np.concatenate(arrived)
    if name.startswith("by hand"):
        row = np.arange(len(arrived) * BATCH).reshape(-1, BATCH)[:, rank::ranks]
        mine = mine[row.flatten() < N]
    times = np.bincount(np.concatenate(gathered(mine)), minlength=N)
    check_delivered(name, times, ranks)
    told = {"own_mb": own, "mapped_mb": held["File"] - before["File"]}
    found = gathered(told | {"first_s": first, "samples": len(mine)})
    samples = [one["samples"] for one in found]
    return {
        "own_mb": sum(one["own_mb"] for one in found),
        "mapped_mb": sum(one["mapped_mb"] for one in found),
        "first_s": max(one["first_s"] for one in found),
        "never": int((times == 0).sum()),
        "twice": int(np.maximum(times - 1, 0).sum()),
        "fewest": min(samples),
        "most": max(samples),
        "again": again(ours, place, name, arrived[:2]),
    }


def check_delivered(name: str, times: np.ndarray, ranks: int) -> None:
    """Raise ValueError unless each sample came, and as many came twice as the padding repeats."""
    never = int((times == 0).sum())
    twice = int(np.maximum(times - 1, 0).sum())
    due = -N % ranks if name.startswith(("DataLoader", "FFCV")) else 0
    if never or (twice != due and name != "LitData"):  # which has not run yet
        rule = f"needs all samples, and {due} of them twice"
        raise ValueError(f"{name} on {ranks} ranks: {rule}, got {never} never, {twice} twice")


def wait_until_idle(ours: ModuleType) -> None:
    """Return when this rank and its workers have hardly used a core for a while."""
    spent = -1.0
    while ours.core_time() - spent > 0.05:
        spent = ours.core_time()
        time.sleep(0.2)


def again(ours: ModuleType, place: Path, name: str, arrived: list[torch.Tensor]) -> int:
    """How many of the samples of two steps come again in two steps of a new loader."""
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    if ours.Loader:
        import_module("ffcv.pipeline.compiler").Compiler.set_enabled(False)
    new = makers(ours, place, rank, ranks, 1, seen=2 * BATCH)[name]()()
    after = [next(new)[1].flatten().clone() for _ in range(2)]
    if "FFCV" in name:
        new.close()
    came = set(np.concatenate(gathered(np.concatenate(arrived))))
    return len(came & set(np.concatenate(gathered(np.concatenate(after)))))


def compare(folder: str, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds per image, on the wall and of a core, of each loader; they take turns."""
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    ours = loaders_of(ranks)
    made = makers(ours, Path(folder), rank, ranks, ROUNDS)
    epochs = {name: make() for name, make in made.items()}
    seconds = {name: [] for name in epochs}
    for repeat in range(-1, repeats):  # the first is a warm-up: numba compiles
        for name, epoch in epochs.items():
            dist.barrier()
            start = time.perf_counter()
            spent = ours.core_time()
            mine = sum(len(index) for _, index in epoch())
            spent = ours.core_time() - spent
            dist.barrier()
            wall = time.perf_counter() - start
            images, cores = (sum(parts) for parts in zip(*gathered((mine, spent)), strict=True))
            if repeat >= 0:
                seconds[name].append((wall / images, cores / images))
    return seconds


# What limits them, alone in one thread


def limits(folder: str, repeats: int) -> dict[str, float]:
    """Milliseconds of a core per image for each thing that a loader may do, in turns."""
    ours = loaders_of(1)
    place = Path(folder)
    paths = ours.photos_in(place)
    works = {
        "open a file and read it": lambda: [path.read_bytes() for path in paths],
        "decode a JPEG, Pillow": lambda: [ours.default_loader(path) for path in paths],
        "copy a crop": lambda: list(ours.copying(place)),
    }
    images = dict.fromkeys(works, N) | {"copy a crop": ours.ROUNDS * N}
    jpegs = [np.fromfile(path, np.uint8) for path in paths]
    photos_NHWC = ours.mapped(place / "photos.raw")
    works["read a raw image from the page cache"] = lambda: [photo.copy() for photo in photos_NHWC]
    floats = ours.transforms.Compose(
        [ours.transforms.ToTensor(), ours.transforms.Normalize(ours.MEAN, ours.STD)]
    )
    crop = ours.transforms.CenterCrop(ours.CROP)(decode(paths[0].read_bytes()))
    works["make normalized floats of a crop"] = lambda: [floats(crop) for _ in range(N)]
    if find_spec("cv2"):
        cv2 = import_module("cv2")  # which FFCV brings

        cv2.setNumThreads(1)
        mode = cv2.IMREAD_COLOR_RGB
        works["decode a JPEG, OpenCV"] = lambda: [cv2.imdecode(jpeg, mode) for jpeg in jpegs]
    if ours.Loader:
        works["decode a JPEG, FFCV"] = lambda: [by_ffcv(jpeg, ours) for jpeg in jpegs]
        resize = partial(resized, ours, np.empty((224, 224, 3), np.uint8))
        works["resize a crop, FFCV"] = lambda: [resize(photo) for photo in photos_NHWC]
    spent = {name: [] for name in works}
    for repeat in range(-1, repeats):
        for name, work in works.items():
            start = time.process_time()
            work()
            if repeat >= 0:
                spent[name].append(time.process_time() - start)
    return {name: 1e3 * median(s) / images.get(name, N) for name, s in spent.items()}


def by_ffcv(jpeg: np.ndarray, ours: ModuleType) -> np.ndarray:
    """Decode as FFCV does: libjpeg-turbo with the fast DCT."""
    from ffcv.libffcv import imdecode

    image_HWC = np.empty((ours.HEIGHT, ours.WIDTH, 3), np.uint8)
    size = (ours.HEIGHT, ours.WIDTH)
    imdecode(jpeg, image_HWC, *size, *size, 0, 0, 1, 1, False, False)
    return image_HWC


def resized(ours: ModuleType, out_HWC: np.ndarray, photo_HWC: np.ndarray) -> None:
    """Resize the largest square to a crop, as FFCV's RandomResizedCrop does."""
    from ffcv.libffcv import resize_crop

    resize_crop(photo_HWC, 0, ours.HEIGHT, 62, 62 + ours.HEIGHT, out_HWC)


LIMIT_OF = {
    "DataLoader, plain": "decode a JPEG, Pillow",
    "DataLoader, JPEG": "decode a JPEG, Pillow",
    "tar shards": "decode a JPEG, Pillow",
    "LitData": "decode a JPEG, Pillow",
    "FFCV, JPEG": "decode a JPEG, FFCV",
    "by hand, JPEG": "decode a JPEG, OpenCV",
    "DataLoader, raw": "copy a crop",
    "FFCV, raw": "copy a crop",
    "by hand, raw": "copy a crop",
}


# Whether the pixels are the same


def fast_dct_error(y_HW: np.ndarray, quantization: list[int]) -> float:
    """What the fast DCT's rounded multipliers must change in brightness, root mean square.

    The fast DCT of libjpeg (Arai, Agui and Nakajima, 1988) multiplies coefficient (u, v) by its
    quantization step q and a scale a(u) a(v), rounded to a quarter. With q a a = 1.3, say, it takes
    1.25: the coefficient comes out 4% too small. The larger q, the less that is: at quality 97 most
    steps are 1 to 6, at quality 90 they are three times that. The transform keeps squares, so the
    pixels' error is that of the coefficients.
    """
    k = np.arange(8)
    basis = np.cos((2 * k[None] + 1) * k[:, None] * np.pi / 16) / 2
    basis[0] /= np.sqrt(2)
    scale = np.where(k == 0, 1, np.cos(k * np.pi / 16) * np.sqrt(2))
    exact = 4 * np.array(quantization).reshape(8, 8) * np.outer(scale, scale)
    wrong = np.round(exact) / exact - 1
    height, width = (size - size % 8 for size in y_HW.shape)
    blocks = y_HW[:height, :width].reshape(height // 8, 8, width // 8, 8).swapaxes(1, 2)
    coefficients = basis @ (blocks - 128) @ basis.T
    return float(np.sqrt(np.mean((wrong * coefficients) ** 2)))


def brightness(image_HWC: np.ndarray) -> np.ndarray:
    return image_HWC @ np.array([0.299, 0.587, 0.114])


ROUNDING = 1.0  # level, of the fast DCT: it cuts off where the exact one rounds, twice per pixel


def pixels(folder: str) -> dict[str, float]:
    """Whole images of each decoder and file next to Pillow's; of FFCV's JPEGs, their error."""
    from PIL import Image

    ours = loaders_of(1)
    place = Path(folder)
    some = ours.photos_in(place)[:16]
    photos_NHWC = np.stack([np.asarray(ours.default_loader(path)) for path in some])
    raw = np.memmap(place / "photos.raw", np.uint8, "r")[: photos_NHWC.size]
    told = {"bytes that differ: raw file, Pillow": (raw != photos_NHWC.flatten()).sum()}
    if find_spec("cv2"):
        cv2 = import_module("cv2")  # which FFCV brings

        theirs = [cv2.imdecode(np.fromfile(p, np.uint8), cv2.IMREAD_COLOR_RGB) for p in some]
        told["bytes that differ: OpenCV, Pillow"] = (theirs != photos_NHWC).sum()
    if ours.Loader:
        whole = [ours.decoders.SimpleRGBImageDecoder(), ours.ToTensor()]
        given = {"order": ours.OrderOption.SEQUENTIAL, "indices": np.arange(16)}
        given["drop_last"] = False
        import_module("ffcv.pipeline.compiler").Compiler.set_enabled(False)
        ((raw_BHWC, _),) = ours.ffcv_loader(place, 1, whole, **given)
        loader = ours.ffcv_loader(place / "jpg", 1, whole, **given)
        ((jpg_BHWC, _),) = loader
        told["bytes that differ: FFCV raw, Pillow"] = (raw_BHWC.numpy() != photos_NHWC).sum()
        data = np.memmap(place / "jpg/photos.beton", np.uint8, "r")
        sizes = loader.memory_manager.ptr_to_size
        errors, bounds, largest = [], [], 0
        for fast_HWC, row in zip(jpg_BHWC.numpy(), loader.reader.metadata["f0"], strict=False):
            start = int(row["data_ptr"])
            jpeg = Image.open(io.BytesIO(data[start : start + int(sizes[row["data_ptr"]])]))
            exact_HWC = np.asarray(jpeg.convert("RGB"))
            difference = brightness(fast_HWC) - brightness(exact_HWC)
            errors.append(float(np.sqrt(np.mean(difference**2))))
            predicted = fast_dct_error(brightness(exact_HWC), jpeg.quantization[0])
            bounds.append(float(np.hypot(predicted, ROUNDING)))
            far = np.abs(fast_HWC.astype(int) - exact_HWC).max()
            largest = max(largest, int(far))
        told["FFCV JPEG, Pillow: brightness, root mean square"] = max(errors)
        told["... which the fast DCT keeps below"] = bounds[int(np.argmax(errors))]
        told["... largest difference of a byte"] = largest
    return {name: float(number) for name, number in told.items()}


# The tables


def measured(repeats: int, show: Callable = print) -> dict:
    """All of it, as it is kept; `show` gets the lines of the tables as they come."""
    with tempfile.TemporaryDirectory() as folder:
        run(prepare, 1, folder, deadline=300)
        (limit,) = run(limits, 1, folder, repeats, deadline=600)
        show("\nalone in one thread                         ms of a core per image")
        for name, ms in limit.items():
            show(f"{name:44}{ms:10.3f}")
        (same,) = run(pixels, 1, folder, deadline=300)
        show("\npixels, 16 whole images")
        for name, number in same.items():
            show(f"{name:52}{number:10.4g}")
        show(f"\n{HEAD}")
        rows = []
        for ranks in RANKS:
            seconds = run(compare, ranks, folder, repeats, deadline=600)[0]
            for name, times in seconds.items():
                row = {"loader": name, "ranks": ranks, "wall_ms": [1e3 * w for w, _ in times]}
                row["core_ms"] = [1e3 * core for _, core in times]
                row |= run(alone, ranks, folder, name, deadline=300, quiet=30)[0]
                row["share"] = limit[LIMIT_OF[name]] / median(row["core_ms"])
                rows.append(row)
                show(line(row))
    return {"limits": limit, "pixels": same, "rows": rows}


HEAD = "loader               ranks  images/s  ms of a core  limit  own MB  mapped   first s"
HEAD += "  never  twice     per rank  again"


def line(row: dict) -> str:
    first = f"{row['loader']:20}{row['ranks']:6}{1e3 / median(row['wall_ms']):10,.0f}"
    first += f"{median(row['core_ms']):14.3f}{row['share']:7.0%}"
    memory = f"{row['own_mb']:8,.0f}{row['mapped_mb']:8,.0f}{row['first_s']:10.2f}"
    per_rank = str(row["fewest"])
    if row["most"] > row["fewest"]:
        per_rank += f" to {row['most']}"
    return f"{first}{memory}{row['never']:7}{row['twice']:7}{per_rank:>13}{row['again']:7}"


# Ratios, as of the other benchmarks

AIMS = {"by hand, JPEG": ("FFCV, JPEG", 1.0), "by hand, raw": ("FFCV, raw", 1.0)}


def ratios(rows: list[dict]) -> list[str]:
    """Lines that say what a loader by hand takes next to FFCV, and whether that is the aim."""
    wall_ms = {(row["loader"], row["ranks"]): median(row["wall_ms"]) for row in rows}
    told = []
    for ours, (peer, aim) in AIMS.items():
        for ranks in RANKS:
            if (ours, ranks) in wall_ms and (peer, ranks) in wall_ms:
                ratio = wall_ms[ours, ranks] / wall_ms[peer, ranks]
                kept = "kept" if ratio <= aim else "MISSED"
                told.append(f"{ours} / {peer}, {ranks} ranks: {ratio:.2f} <= {aim:.2f} {kept}")
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep", action="store_true", help="write to results/bench")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each (5)")
    options = parser.parse_args()
    folder = ROOT / ("results/bench" if options.keep else "build/bench")
    folder.mkdir(parents=True, exist_ok=True)
    about = {"date": time.strftime("%F"), "torch": torch.__version__, "cpus": os.cpu_count()}
    print("  ".join(f"{key} {value}" for key, value in about.items()))
    found = measured(options.repeats, partial(print, flush=True))
    path = folder / "loaders.json"
    path.write_text(json.dumps(about | found, indent=1) + "\n")
    print("\nwall time per image", *ratios(found["rows"]), sep="\n")
    print(f"\n{path}")


if __name__ == "__main__":
    main()
