"""The loader by hand against NumPy, orders against a sampler, and what Ctrl-C leaves: nothing."""

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import numpy as np
import psutil
import pytest
import torch

from benchmarks import loaders
from course.lessons import ROOT
from course.playing import Lazily, load
from tests.helpers.leftovers import MARK, MARKED, gone
from tests.lessons.every import Breaks, OnGpus, Without, test_lesson  # noqa: F401

LESSON = "data-loading/08_loaders_compared.py"
pytestmark = pytest.mark.skipif(find_spec("ffcv") is None, reason="FFCV is not installed")
lesson = Lazily(LESSON)

SMALL = [("\nHEIGHT = 375", "\nHEIGHT = 6"), ("\nWIDTH = 500", "\nWIDTH = 7")]
SMALL += [("\nCROP = 224", "\nCROP = 3"), ("\nN = 205 ", "\nN = 11 ")]
SMALL += [("\nBATCH = 32", "\nBATCH = 5")]
COSTS = ("            check_costs(place)\n", "            pass\n")
SIZES = {1: [COSTS], 3: [COSTS]}  # what rank 0 measures is the same there
IMPORT = "    with contextlib.suppress(ImportError):  # "


def without(extra: str) -> tuple[str, str]:
    line = f"{IMPORT}{extra}\n"
    return line, f"{line}        raise ImportError\n"


NO_FFCV = without("the extra [ffcv]")
FFCV = "FFCV: costs, samples, pixels"
COST = "what each loader costs"
WITHOUT = {
    "FFCV": Without([NO_FFCV], {FFCV}),
    "numba": Without([NO_FFCV, without("the extra [data]")], {COST, FFCV}),
    "torchvision": Without(
        [("            from torchvision import transforms\n", "            raise ImportError\n")],
        {COST},
    ),
}
ON_GPUS = OnGpus(changes=[NO_FFCV, COSTS])  # FFCV copies on streams of CUDA's, in its thread
NO_DEVICE = {"measure": "loaders end on the host"}


# The loader by hand


def small(path: Path) -> object:
    """The lesson with few small images, and a file of them; its loop in plain Python."""
    own = load(LESSON, *SMALL)
    images_NHWC = np.random.default_rng(1).integers(256, size=(11, 6, 7, 3), dtype=np.uint8)
    path.write_bytes(images_NHWC.tobytes())
    return own


def test_the_loop_copies_crops_and_mirrors_them() -> None:
    own = load(LESSON, *SMALL)
    images_NHWC = np.random.default_rng(0).integers(256, size=(4, 6, 7, 3), dtype=np.uint8)
    out_BHWC = np.zeros((3, 3, 3, 3), np.uint8)
    index_B = np.array([3, 0, 3])
    draws_3B = np.array([[0, 3, 2], [4, 0, 1], [0, 1, 1]])
    own.crop_and_mirror(images_NHWC, index_B, draws_3B, out_BHWC)
    for image, (y, x, mirrored), crop in zip(index_B, draws_3B.T, out_BHWC, strict=True):
        expected = images_NHWC[image, y : y + 3, x : x + 3]
        np.testing.assert_array_equal(crop, expected[:, ::-1] if mirrored else expected)


def test_every_crop_can_be_drawn() -> None:
    own = load(LESSON, *SMALL)
    drawn = {tuple(one) for one in own.draw(np.random.default_rng(0), 2000).T.tolist()}
    assert drawn == {*itertools.product(range(6 - 3 + 1), range(7 - 3 + 1), range(2))}


def row_of(own: object, path: Path, ranks: int, consumed: int, steps: int) -> tuple:
    """What all ranks are given, step by step, in the order of the endless row: samples, crops."""
    samples = np.zeros((steps, own.BATCH), int)
    crops = np.zeros((steps, own.BATCH, 3, 3, 3), np.uint8)
    for rank in range(ranks):
        loader = own.RawLoader(path, rank, ranks, consumed)
        for step, (image_BHWC, index_B) in enumerate(itertools.islice(loader, steps)):
            samples[step, rank::ranks] = index_B
            crops[step, rank::ranks] = image_BHWC
        assert loader.consumed == consumed + steps * own.BATCH
    return samples.flatten().tolist(), crops


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_epoch_has_every_sample_once(ranks: int, tmp_path: Path) -> None:
    own = small(tmp_path / "raw")
    row, _ = row_of(own, tmp_path / "raw", ranks, 0, 7)
    epochs = [row[first : first + 11] for first in (0, 11, 22)]
    assert [sorted(epoch) for epoch in epochs] == [[*range(11)]] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3, "each epoch has an order of its own"


def test_another_number_of_ranks_goes_on_with_the_same_samples_and_crops(tmp_path: Path) -> None:
    own = small(tmp_path / "raw")
    row, crops = row_of(own, tmp_path / "raw", 1, 0, 6)
    before, _ = row_of(own, tmp_path / "raw", 2, 0, 2)
    after, same = row_of(own, tmp_path / "raw", 4, 10, 4)
    assert before + after == row
    np.testing.assert_array_equal(same, crops[2:])


def test_crops_are_those_of_their_images_half_of_them_mirrored(tmp_path: Path) -> None:
    own = small(tmp_path / "raw")
    images_NHWC = np.fromfile(tmp_path / "raw", np.uint8).reshape(11, 6, 7, 3)
    row, crops = row_of(own, tmp_path / "raw", 1, 0, 8)
    mirrored = 0
    for one, crop in zip(row, crops.reshape(-1, 3, 3, 3), strict=True):
        windows = np.lib.stride_tricks.sliding_window_view(images_NHWC[one], (3, 3), (0, 1))
        windows = windows.transpose(0, 1, 3, 4, 2).reshape(-1, 3, 3, 3)
        straight = (windows == crop).all((1, 2, 3)).any()
        turned = (windows == crop[:, ::-1]).all((1, 2, 3)).any()
        assert straight or turned
        mirrored += turned
    assert 8 < mirrored < 32, "half of 40, give or take"


def test_a_batch_stays_until_two_more_were_asked_for(tmp_path: Path) -> None:
    own = small(tmp_path / "raw")
    loader = iter(own.RawLoader(tmp_path / "raw", 0, 1))
    kept, _ = next(loader)
    was = kept.clone()
    next(loader)
    time.sleep(0.1)
    assert torch.equal(kept, was)
    places = [next(loader)[0].data_ptr() for _ in range(6)]
    assert len({*places}) == own.AHEAD + 1
    assert places[2] == kept.data_ptr()


def test_threads_of_a_loader_that_is_dropped_end(tmp_path: Path) -> None:
    own = small(tmp_path / "raw")
    before = psutil.Process().num_threads()
    loader = iter(own.RawLoader(tmp_path / "raw", 0, 1))
    next(loader)
    assert psutil.Process().num_threads() > before
    loader.close()
    stop = time.monotonic() + 30
    while time.monotonic() < stop and psutil.Process().num_threads() > before:
        time.sleep(0.05)
    assert psutil.Process().num_threads() == before


def test_an_error_in_a_thread_reaches_the_trainer(tmp_path: Path) -> None:
    own = small(tmp_path / "raw")
    own.compiled = Mock(side_effect=MemoryError)
    with pytest.raises(MemoryError):
        next(iter(own.RawLoader(tmp_path / "raw", 0, 1)))


# DataLoader


def test_a_worker_writes_each_crop_into_its_place() -> None:
    own = load(LESSON, *SMALL)
    batches = own.Batches(lambda index: np.full((6, 7, 3), 10 + index, np.uint8))
    image_BHWC, index_B = batches.__getitems__([2, 0])
    assert index_B.tolist() == [2, 0]
    assert image_BHWC.shape == (2, 3, 3, 3)
    assert [set(crop.flatten().tolist()) for crop in image_BHWC] == [{12}, {10}]


@pytest.mark.parametrize("dataset", ["raw_loader", "jpeg_loader"])
def test_a_loader_s_crops_are_of_the_images_whose_numbers_come_with_them(
    dataset: str, tmp_path: Path
) -> None:
    """Real workers; the decoder is pretended."""
    own = small(tmp_path / "photos.raw")
    own.photos_in = lambda place: [*range(11)]
    own.default_loader = lambda number: own.mapped(tmp_path / "photos.raw")[number]
    images_NHWC = own.mapped(tmp_path / "photos.raw")
    seen = []
    for image_BHWC, index_B in getattr(own, dataset)(tmp_path, 0, 1):
        assert len(image_BHWC) == len(index_B) <= 5
        for crop, index in zip(image_BHWC, index_B.tolist(), strict=True):
            colors = {tuple(color) for color in crop.reshape(-1, 3).tolist()}
            theirs = {tuple(color) for color in images_NHWC[index].reshape(-1, 3).tolist()}
            assert colors <= theirs
            seen.append(index)
    assert sorted(seen) == [*range(11)]


# How it is measured


def test_loaders_take_turns_and_milliseconds_are_per_image() -> None:
    own = load(LESSON)
    order = []

    class Fake:
        def __init__(self, name: str) -> None:
            self.name = name

        def __iter__(self) -> Iterator[tuple]:
            order.append(self.name)
            return iter([(None, [0] * 5), (None, [0] * 3)])

    clock = itertools.cycle([0.0, 8.0])
    held = itertools.cycle([{"Anon": 1, "Shmem": 0, "File": 5}, {"Anon": 3, "Shmem": 4, "File": 6}])
    own.core_time = lambda: next(clock)
    own.memory = lambda: Counter(next(held))
    own.makers = lambda place: {"a": (lambda: Fake("a"), 2), "b": (lambda: Fake("b"), 4)}
    own.decoding = own.copying = lambda place: [(None, [0])]
    found, ms = own.measure(Path())
    assert ms == {"a": 1000, "b": 500, "decoding alone": 8000, "copying alone": 8000}
    assert "".join(order) == "abb" * 3, "a warm-up, and two turns"
    assert [found[name][:2] for name in "ab"] == [(6, 1), (6, 1)]


def test_the_time_of_a_core_is_that_of_all_processes() -> None:
    own = load(LESSON)
    own.workers = lambda: [1, 2]
    worker = Mock(cpu_times=lambda: SimpleNamespace(user=10.0, system=20.0))
    own.psutil = SimpleNamespace(Process=lambda pid: worker)
    own.time = SimpleNamespace(process_time=lambda: 1.0)
    assert own.core_time() == 61


def test_memory_is_that_of_all_processes_by_kind() -> None:
    sleeping = subprocess.Popen(["sleep", "60"])
    with patch.object(lesson._lesson, "workers", list):
        alone = lesson.memory()
    with patch.object(lesson._lesson, "workers", lambda: [sleeping.pid]):
        both = lesson.memory()
    sleeping.kill()
    sleeping.wait()
    assert set(alone) == {"Anon", "File", "Shmem"}
    assert alone["Anon"] > 20
    assert 0 < both["Anon"] - alone["Anon"] < 2


# The benchmark's bound for FFCV's JPEGs


def test_the_fast_dct_changes_nothing_but_what_its_multipliers_round() -> None:
    flat = np.full((16, 24), 77.0)
    steps = [*range(1, 65)]
    assert loaders.fast_dct_error(flat, steps) == pytest.approx(0)
    k = np.arange(8)
    wave = np.cos((2 * k + 1) * 7 * np.pi / 16)  # coefficient (0, 7), whose step is 8
    y_HW = 128 + 20 * np.tile(wave, (8, 1))
    multiplier = 4 * 8 * np.cos(7 * np.pi / 16) * np.sqrt(2)
    wrong = round(multiplier) / multiplier - 1
    expected = abs(wrong) * 20 / np.sqrt(2)
    assert loaders.fast_dct_error(y_HW, steps) == pytest.approx(expected)


# Nothing is left


def started_by_us() -> dict[int, str]:
    """The names of all processes that bear our mark, by their number."""
    found = {}
    for pid in psutil.pids():
        with suppress(OSError):  # it has ended
            if MARK in Path(f"/proc/{pid}/environ").read_bytes():
                found[pid] = Path(f"/proc/{pid}/comm").read_text().strip()
    return found


def a_worker_works(ours: dict[int, str], place: Path) -> bool:
    return "pt_data_worker" in ours.values()


def ffcv_writes(ours: dict[int, str], place: Path) -> bool:
    return any(place.glob("loaders-*/photos.beton"))


def shared_by(ours: dict[int, str], was: set[str]) -> list[str]:
    """What is new in shared memory, and bears a number of ours, or none and is nobody's."""
    mapped = ""
    for pid in psutil.pids():
        with suppress(OSError):  # it has ended
            mapped += Path(f"/proc/{pid}/maps").read_text()
    found = []
    for name in set(os.listdir("/dev/shm")) - was:
        numbers = {int(part) for part in re.split("[-_]", name) if part.isdigit()}
        leaked = name.startswith("psm_") and name not in mapped
        if leaked or numbers & ours.keys():
            found.append(name)
    return found


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.mark.deep
@pytest.mark.parametrize(
    ("launcher", "when"), [((), a_worker_works), ((), ffcv_writes), (TORCHRUN, a_worker_works)]
)
def test_ctrl_c_leaves_nothing(launcher: tuple, when: object, tmp_path: Path) -> None:
    was = set(os.listdir("/dev/shm"))
    started = subprocess.Popen(
        [sys.executable, *launcher, ROOT / LESSON],
        env=MARKED | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        process_group=0,
    )
    ours = started_by_us()
    while not when(ours, tmp_path):
        assert started.poll() is None, "it ended before"
        time.sleep(0.05)
        ours = started_by_us()
    started.send_signal(signal.SIGINT)
    assert started.wait(150) != 0
    assert gone()
    assert [path.name for path in tmp_path.glob("loaders-*")] == []
    stop = time.monotonic() + 30
    while time.monotonic() < stop and shared_by(ours, was):
        time.sleep(0.1)  # another test's segment has no number either, and is mapped or soon goes
    assert shared_by(ours, was) == []


# Broken lines

ONCE = "by hand: samples that do not come once"
HAND_AGAIN = "by hand: samples that come again"
HAND_SAME = "by hand: bytes that differ from a run without stop"
NEVER = "DataLoader: samples that never come"
TWICE = "DataLoader: samples that come twice"
LAST = "DataLoader: how often a rank's last one comes"
DATA_AGAIN = "DataLoader: samples that come again"
FFCV_EACH = "FFCV: samples that a rank is given"
FFCV_NEVER = "FFCV: samples that never come"
FFCV_AGAIN = "FFCV: samples that come again"
FFCV_PIXELS = "FFCV: bytes of pixels that differ"
RAW_PIXELS = "raw file: bytes of pixels that differ"

LINES = {
    "what was given is not counted, as in Try": (
        "                    self.consumed += BATCH\n",
        "",
        {HAND_AGAIN, HAND_SAME},
    ),
    "DataLoader drops what fills no batch, as in Try": (
        'options["multiprocessing_context"] = "fork"',
        'options |= {"multiprocessing_context": "fork", "drop_last": True}',
        {NEVER, TWICE, LAST},
    ),
    "padding on the first ranks": (
        "2 if WORLD_SIZE - padded <= RANK else 1",
        "2 if padded > RANK else 1",
        {LAST},
    ),
    "FFCV drops nothing": (
        '"distributed": ranks > 1, "seed"',
        '"distributed": ranks > 1, "drop_last": False, "seed"',
        {FFCV_EACH, FFCV_NEVER},
    ),
    "padding that is dropped is counted as lost": (
        "WORLD_SIZE * dropped - padded if dropped else 0",
        "WORLD_SIZE * dropped",
        {FFCV_NEVER},
    ),
    "the last sample of each epoch is left out": (
        "order(position // N)[position % N]",
        "order(position // N)[position % (N - 1)]",
        {ONCE},
    ),
    "every rank takes the first rank's share": (
        "self.mine = slice(rank, BATCH, ranks)",
        "self.mine = slice(0, BATCH, ranks)",
        {ONCE},
    ),
    "crops are drawn anew after a stop": (
        "np.random.default_rng([SEED, first])",
        "np.random.default_rng()",
        {HAND_SAME},
    ),
    "FFCV's file holds the images in another order": (
        "[(pixels_NHWC[i], i) for",
        "[(pixels_NHWC[i - 1], i) for",
        {FFCV_PIXELS},
    ),
    "the raw files hold the pixels before they were JPEGs": (
        "            pixels_NHWC[index] = default_loader(path)\n",
        "",
        {RAW_PIXELS},
    ),
    "a DataLoader goes on where it stopped": (
        "counts(delivered(make(), STOP))",
        "counts(epoch[STOP * share :])",
        {DATA_AGAIN},
    ),
    "FFCV goes on where it stopped": (
        "counts(delivered(batches, STOP))",
        "counts(epoch[STOP * share :])",
        {FFCV_AGAIN},
    ),
}
LARGE = {
    "FFCV compiles nothing, so the compiler takes no memory": (
        "        make = functools.partial(ffcv_loader, place, 1,",
        "        Compiler.set_enabled(False)\n"
        "        make = functools.partial(ffcv_loader, place, 1,",
        {"own memory: FFCV / by hand"},
    ),
}
SLOW = {
    "each crop is copied 20 times": (
        "        compiled()(self.images_NHWC,",
        "        for _ in range(20):\n            compiled()(self.images_NHWC,",
        {"core time: DataLoader, raw / by hand", "core time: by hand / FFCV"},
    ),
    "the plain DataLoader is the other one": (
        "lambda: plain_loader(place, 0, 1)",
        "lambda: jpeg_loader(place, 0, 1)",
        {"core time: DataLoader, plain / JPEG"},
    ),
    "no JPEG is decoded": (
        "Batches(lambda i: np.asarray(default_loader(paths[i])))",
        "Batches(lambda i: np.zeros((HEIGHT, WIDTH, 3), np.uint8))",
        {"core time: DataLoader, JPEG / raw"},
    ),
    "JPEGs are read and not decoded": (
        "yield default_loader(path), [0]",
        "yield path.read_bytes(), [0]",
        {"core time: decoding alone / DataLoader, JPEG"},
    ),
    "one clock runs for all loaders, one after the other": (
        [
            ("        start = time.perf_counter()\n", ""),
            ("    found = {}\n", "    found = {}\n    start = time.perf_counter()\n"),
        ],
        {"first batch: FFCV / DataLoader"},
    ),
}
BREAKS = [
    Breaks(LINES, changes=[COSTS], deadline=120),
    Breaks(LARGE, deadline=150),
    Breaks(SLOW, deadline=150, clock=True),
]
