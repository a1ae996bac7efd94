"""Grader of 12: the file read with NumPy alone; then every rank's batches, epoch by epoch."""

import _thread
import os
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from course.grading import Wrong, expect, grade

N, LONGEST, SIDE = 11, 64, 32
BATCH = 5
SIZES = [5, 1]  # 6 samples on each of 2 ranks
FILES = {  # width, height and PIL's mode; in order, though made in another
    "Zebra": {"10.png": (32, 32, "RGB"), "9.png": (33, 47, "RGB"), "B.JPEG": (128, 80, "RGB")},
    "apple": {"a.JPEG": (50, 33, "L"), "b.JPEG": (64, 32, "CMYK"), "c.png": (40, 33, "RGBA"),
              "d.JPG": (45, 64, "RGB"), "e.PNG": (80, 128, "RGB")},
    "n10": {"x.jpg": (41, 52, "RGB"), "y.jpeg": (64, 64, "RGB")},
    "n2": {"only.png": (37, 37, "RGB")},
}  # fmt: skip
PICTURE = np.dtype("<u1, <u2, <u2, <u8")  # mode, width, height, start
ROW = np.dtype([("image", PICTURE), ("label", "<i8")], align=True)


@pytest.fixture
def photos(tmp_path: Path, seed: int) -> tuple[Path, list[str], list[np.ndarray]]:
    """The folder; names and RGB pixels of its samples, in order. The same in every check."""
    if find_spec("ffcv") is None:
        pytest.skip("needs a system library (FFCV; see packages.txt)")
    from PIL import Image

    folder = tmp_path / "photos"
    folder.mkdir()
    rng = np.random.default_rng(seed)
    lying = Image.Exif()
    lying[0x0112] = 6  # the orientation that a camera notes; pixels are where they are
    for name in reversed(FILES):
        (folder / name).mkdir()
        for file, (width, height, mode) in reversed(FILES[name].items()):
            bands = [rng.integers(0, 256, (height, width), np.uint8) for _ in mode]
            made = Image.merge(mode, [Image.fromarray(band) for band in bands])
            made.save(folder / name / file, **{"quality": 95, "exif": lying} if "J" in file else {})
    (folder / "n2" / "about.txt").write_text("One sample, and this file, which is none.")
    names = []
    for name, files in FILES.items():
        names += [f"{name}/{file}" for file in files]
    pixels = [np.array(Image.open(folder / name).convert("RGB")) for name in names]
    return folder, names, pixels


def area(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Scaled down: each new pixel is the mean of the old area that it covers."""

    def weights(new: int, old: int) -> np.ndarray:
        edges = np.arange(new + 1)[:, None] * old / new
        parts = np.clip(edges, np.arange(old), np.arange(old) + 1)
        return np.diff(parts, axis=0) * new / old

    rows = weights(height, len(pixels))
    columns = weights(width, pixels.shape[1])
    return np.einsum("yi,xj,ijc->yxc", rows, columns, pixels.astype(float))


def stored(pixels: np.ndarray) -> np.ndarray:
    height, width, _ = pixels.shape
    ratio = LONGEST / max(height, width)
    return area(pixels, int(height * ratio), int(width * ratio)) if ratio < 1 else pixels


def delivered(pixels: np.ndarray) -> torch.Tensor:
    height, width, _ = pixels.shape
    side = min(height, width)
    y = (height - side) // 2
    x = (width - side) // 2
    square = area(pixels[y : y + side, x : x + side], SIDE, SIDE)
    return torch.from_numpy(square).permute(2, 0, 1)


# The file


def write(answer, wire, folder: Path, path: Path) -> bytes:
    """Let it be written; if one of FFCV's writers dies, do not wait for it as FFCV does."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            for child in psutil.Process().children():
                try:
                    how = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                except ChildProcessError:
                    continue
                if how and how.si_status:
                    time.sleep(0.2)
                    return over.is_set() or _thread.interrupt_main()

    threading.Thread(target=watch, daemon=True).start()
    try:
        answer.write(folder, path)
    except KeyboardInterrupt:
        raise Wrong("one of FFCV's writers died (below), and FFCV waits for ever") from None
    finally:
        over.set()
    wire.only()
    if not path.exists():
        raise Wrong("there is no file at the path that write was given")
    return path.read_bytes()


@pytest.fixture(scope="module")
def beton(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the answer's file lies, once it has been written."""
    return tmp_path_factory.mktemp("beton") / "photos.beton"


def test_file(answer: Path, seed: int, photos: tuple, beton: Path) -> None:
    """The file: fields, samples, labels, pixels"""
    folder, names, pixels = photos
    (data,) = grade(answer, write, 1, folder, beton, group=False, deadline=60)
    count = int(np.frombuffer(data, "<u2", 1, 2)[0])
    samples = int.from_bytes(data[8:16], "little")
    described = [data[24 + 1041 * i : 41 + 1041 * i] for i in range(count)]
    fields = [(field[1:].rstrip(b"\0").decode(), field[0]) for field in described]
    expect(fields, [("image", 2), ("label", 1)], "fields, and FFCV's numbers of their types")
    expect(samples, N, "samples")
    rows = np.frombuffer(data, ROW, N, 24 + 1041 * count)
    due = [list(FILES).index(name.split("/")[0]) for name in names]
    expect(rows["label"].tolist(), due, "labels, in file order")
    for i, (mode, width, height, start) in enumerate(rows["image"].tolist()):
        ought = stored(pixels[i])
        expect(["jpg", "raw"][mode], "raw", f"sample {i}, {names[i]}: stored as")
        got = np.frombuffer(data, "<u1", height * width * 3, start).reshape(height, width, 3)
        for j, other in enumerate(pixels):
            if j != i and near(got, stored(other)):
                raise Wrong(f"sample {i}: expected {names[i]}, got {names[j]}")
        where = f"sample {i}, {names[i]}"
        if (width, height) == ought.shape[:2] and width != height:
            where += ", turned upright; asked for are pixels as PIL decodes them"
        expect((width, height), ought.shape[1::-1], f"{where}: width and height")
        if not near(got, ought):
            swapped = ": its channels are blue, green, red" * near(got[..., ::-1], ought)
            raise Wrong(f"sample {i}, {names[i]}: the pixels are wrong{swapped}")


def near(got: np.ndarray, ought: np.ndarray) -> bool:
    """Equal; or where scaled, at most 1 off: a build of OpenCV may round otherwise."""
    exact = ought.dtype == np.uint8
    return got.shape == ought.shape and bool(abs(got - ought.astype(float)).max() <= 1 - exact)


# The loader


def deliver(answer, wire, path: Path, seed: int) -> list:
    """Two epochs' batches in order, copied, for FFCV writes over them."""
    loader = opened(answer, path, False, seed)
    epochs = []
    for _ in range(2):
        epochs.append([tuple(x.clone() for x in parts) for parts in loader])
    wire.only()
    return epochs


def opened(answer, path: Path, shuffle: bool, seed: int) -> object:
    from ffcv.loader import Loader

    loader = answer.loader(path, BATCH, shuffle, seed)
    if not isinstance(loader, Loader):
        raise Wrong(f"loader: expected FFCV's Loader, got {loader!r}"[:300])
    return loader


def written(answer: Path, folder: Path, beton: Path) -> Path:
    """The file, written now if this check alone was asked for."""
    if not beton.exists():
        grade(answer, write, 1, folder, beton, group=False, deadline=60)
    return beton


def test_loader(answer: Path, seed: int, photos: tuple, beton: Path) -> None:
    """The loader: two epochs on 2 ranks, in order"""
    folder, names, pixels = photos
    outcomes = grade(answer, deliver, 2, written(answer, folder, beton), seed, deadline=60)
    ought = torch.stack([delivered(stored(p).round()) for p in pixels])
    for epoch in range(2):
        seen = []
        for rank, epochs in enumerate(outcomes):
            where = f"in order, epoch {epoch}, rank {rank}"
            seen.append(recognize(epochs[epoch], ought, names, where))
        missing = missed(seen, names)
        expect(missing, [], f"in order, epoch {epoch}: samples that no rank delivers")
        due = [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 0]]
        expect(seen, due, "in order: samples of rank 0 and rank 1")


def recognize(batches: list[tuple], ought: torch.Tensor, names: list[str], where: str) -> list[int]:
    """Which samples these are; refused if they are not what a batch is to hold."""
    sizes = [len(images) for images, *_ in batches]
    if sum(sizes) == N:
        raise Wrong(f"{where}: every rank delivers all {N} samples")
    expect(sizes, SIZES, f"{where}: images in each batch")
    seen = []
    for images, labels in batches:
        got = tuple(images.shape), images.dtype, tuple(labels.shape), labels.dtype
        size = len(images)
        due = (size, 3, SIDE, SIDE), torch.uint8, (size,), torch.int64
        expect(got, due, f"{where}: shapes and dtypes of images and labels")
        for image, label in zip(images, labels.tolist(), strict=True):
            off = (ought - image).abs().amax((1, 2, 3))
            if off.min() > 2:  # two roundings, each at most 1 off
                raise Wrong(f"{where}: an image is none of the folder's, cropped and scaled")
            i = int(off.argmin())
            due = list(FILES).index(names[i].split("/")[0])
            expect(label, due, f"{where}: label of {names[i]}")
            seen.append(i)
    return seen


def missed(seen: list[list[int]], names: list[str]) -> list[str]:
    return [names[i] for i in range(N) if i not in seen[0] + seen[1]]


def shuffle(answer, wire, path: Path, seeds: list[int]) -> dict[int, list]:
    """For each seed, the samples of two epochs: asked for, not read, for which FFCV would compile
    once more."""
    orders = {}
    for seed in [*seeds, seeds[0]]:
        loader = opened(answer, path, True, seed)
        expect(len(loader), len(SIZES), "shuffled: batches on this rank")
        order = loader.traversal_order
        now = [list(map(int, order.sample_order(epoch))) for epoch in range(2)]
        if now != orders.setdefault(seed, now):
            raise Wrong(f"shuffled, seed {seed}: a second loader has other orders than the first")
    wire.only()
    return orders


def test_shuffled(answer: Path, seed: int, photos: tuple, beton: Path) -> None:
    """The loader: two epochs on 2 ranks, shuffled, with two seeds"""
    folder, names, _ = photos
    seeds = [seed, seed + 1]
    of_ranks = grade(answer, shuffle, 2, written(answer, folder, beton), seeds, deadline=60)
    for s in seeds:
        for epoch in range(2):
            missing = missed([orders[s][epoch] for orders in of_ranks], names)
            told = f"shuffled, seed {s}, epoch {epoch}"
            expect(missing, [], f"{told}: samples that no rank delivers")
        first, second = of_ranks[0][s]
        if first == second:
            raise Wrong(f"shuffled, seed {s}: both epochs have the same order")
    if of_ranks[0][seed] == of_ranks[0][seed + 1]:
        raise Wrong(f"shuffled: seeds {seed} and {seed + 1} give the same orders: seed is not used")
