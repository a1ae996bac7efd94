"""Five loaders make the same crops, prices from made-up seconds, and Ctrl-C leaves nothing."""

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

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

TINY = [("\nHEIGHT = 375", "\nHEIGHT = 6"), ("\nWIDTH = 500", "\nWIDTH = 7")]
TINY += [("\nCROP = 224", "\nCROP = 3"), ("\nN = 96 ", "\nN = 10 ")]
TINY += [("\nBATCH = 32", "\nBATCH = 5")]

# Where no clock decides, few images serve, once each, and FFCV need not compile.
FEW = [("\nN = 96 ", "\nN = 64 "), ("\nROUNDS = 12", "\nROUNDS = 1")]
FEW += [("\nTURNS = 3", "\nTURNS = 1")]
MADE = '        made["FFCV"] = '
UNCOMPILED = (MADE, f"        Compiler.set_enabled(False)\n{MADE}")
SIZES = {1: [*FEW, UNCOMPILED], 3: [*FEW, UNCOMPILED]}  # what rank 0 measures is the same there


def without(extra: str) -> tuple[str, str]:
    line = f"    with contextlib.suppress(ImportError):  # {extra}\n"
    return line, f"{line}        raise ImportError\n"


NO_FFCV = without("the extra [ffcv]")
FFCV = "FFCV: CPU time and pixels"
COST = "what each loader costs"
WITHOUT = {
    "FFCV": Without([NO_FFCV, *FEW], {FFCV}),
    "numba": Without([NO_FFCV, ("        from numba", "        from no_numba")], {COST, FFCV}),
}
ON_GPUS = OnGpus(changes=[NO_FFCV, *FEW])  # FFCV copies on streams of CUDA's, in its thread
NO_DEVICE = {"begin": "batches are made on the host"}


# The loaders


def photos(own: object) -> np.ndarray:
    return np.random.default_rng(1).integers(256, size=(10, 6, 7, 3), dtype=np.uint8)


def bytes_of(own: object, crops: torch.Tensor) -> torch.Tensor:
    if crops.dtype == torch.uint8:
        return crops
    return ((crops * own.STD + own.MEAN) * 255).round().byte().permute(0, 2, 3, 1)


def slices(own: object) -> np.ndarray:
    corners = own.CORNERS_N2
    pairs = zip(photos(own), corners, strict=True)
    return np.stack([photo[y : y + 3, x : x + 3] for photo, (y, x) in pairs])


def test_corners_lie_everywhere_in_the_image() -> None:
    own = load(LESSON, *TINY[:3], ("\nN = 96 ", "\nN = 2000 "))
    drawn = {tuple(one) for one in own.CORNERS_N2.tolist()}
    assert drawn == {*itertools.product(range(6 - 3 + 1), range(7 - 3 + 1))}


def test_a_batch_holds_the_crop_of_each_of_its_images() -> None:
    own = load(LESSON, *TINY)
    crops_BHWC, index_B = own.Batches(photos(own)).__getitems__([3, 0, 3])
    assert index_B.tolist() == [3, 0, 3]
    np.testing.assert_array_equal(crops_BHWC, slices(own)[[3, 0, 3]])


def test_one_by_one_they_are_the_same_crops_and_floats_of_them() -> None:
    own = load(LESSON, *TINY)
    images = photos(own)
    crop, index = own.Crops(images.__getitem__)[7]
    assert index == 7
    np.testing.assert_array_equal(crop, slices(own)[7])
    floats, _ = own.Crops(images.__getitem__, floats=True)[7]
    assert floats.dtype == torch.float32
    assert floats.is_contiguous()
    expected = (slices(own)[7] / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    np.testing.assert_allclose(floats, expected.transpose(2, 0, 1), atol=2**-20)


@pytest.mark.parametrize("name", ["plain", "bytes", "raw", "batches", "by hand"])
def test_a_loader_delivers_each_image_s_crop_once_in_its_order(name: str, tmp_path: Path) -> None:
    """Real workers; the decoder is pretended."""
    own = load(LESSON, *TINY)
    (tmp_path / "photos.raw").write_bytes(photos(own).tobytes())
    own.photos_in = lambda place: [*range(10)]
    own.decode = lambda number: photos(own)[number]
    order = [4, 9, 0, 2, 7, 1, 8, 3, 6, 5]
    loader = own.loaders(tmp_path)[name](order)
    for _ in range(2):  # epochs
        batches = [*loader]
        assert [len(index_B) for _, index_B in batches] == [5, 5]
        assert torch.cat([index_B for _, index_B in batches]).tolist() == order
        crops = torch.cat([bytes_of(own, crops) for crops, _ in batches])
        np.testing.assert_array_equal(crops, slices(own)[order])


def test_the_thread_is_two_batches_ahead_and_ends_when_its_loader_is_dropped() -> None:
    made = []
    dataset = SimpleNamespace(__getitems__=made.append)
    before = psutil.Process().num_threads()
    batches = iter(lesson.ByHand(dataset, [*range(32 * 6)]))
    next(batches)
    stop = time.monotonic() + 30
    while time.monotonic() < stop and len(made) < 3:
        time.sleep(0.05)
    assert [indices[0] for indices in made] == [0, 32, 64]
    batches.close()
    while time.monotonic() < stop and psutil.Process().num_threads() > before:
        time.sleep(0.05)
    assert psutil.Process().num_threads() == before


def test_an_error_in_the_thread_reaches_the_trainer() -> None:
    dataset = SimpleNamespace(__getitems__=Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        next(iter(lesson.ByHand(dataset, [*range(64)])))


# How it is measured


def test_what_never_came_is_wrong_and_so_is_another_image_s_crop() -> None:
    own = load(LESSON, *TINY)
    crops = torch.from_numpy(slices(own))
    halves = [(crops[:5], torch.arange(5)), (crops[5:], torch.arange(5, 10))]
    assert own.wrong_bytes(photos(own), iter(halves)) == 0
    assert own.wrong_bytes(photos(own), iter(halves[:1])) == 5 * 27
    moved = [halves[0], (crops[:5], torch.arange(5, 10))]
    assert own.wrong_bytes(photos(own), iter(moved)) > 100


def test_milliseconds_are_per_image() -> None:
    own = load(LESSON)
    clock = iter([1.0, 9.0])
    own.cpu_seconds = lambda: next(clock)
    assert own.milliseconds(lambda: own.run_through([(None, [0] * 5), (None, [0] * 3)])) == 1000


def test_cpu_time_is_that_of_all_processes() -> None:
    own = load(LESSON)
    workers = [SimpleNamespace(pid=1), SimpleNamespace(pid=2)]
    own.multiprocessing = SimpleNamespace(active_children=lambda: workers)
    worker = Mock(cpu_times=lambda: SimpleNamespace(user=10.0, system=20.0))
    own.psutil = SimpleNamespace(Process=lambda pid: worker)
    own.time = SimpleNamespace(process_time=lambda: 1.0)
    assert own.cpu_seconds() == 61


def test_memory_is_that_of_all_processes_and_of_no_file() -> None:
    own = load(LESSON)
    texts = ["Rss: 9 kB\nPss_Anon:    1000 kB\nPss_File: 77 kB\nPss_Shmem: 24 kB\n"]
    texts += ["Pss_Anon: 976 kB\nPss_Shmem: 0 kB\n", "Pss_Anon: 3 kB\n"]
    own.psutil = SimpleNamespace(Process=lambda: SimpleNamespace(pid=0))
    workers = [SimpleNamespace(pid=1), SimpleNamespace(pid=2)]
    own.multiprocessing = SimpleNamespace(active_children=lambda: workers)
    rollups = {f"/proc/{pid}/smaps_rollup": text for pid, text in enumerate(texts)}
    own.Path = lambda name: Mock(read_text=lambda: rollups[name], exists=lambda: True)
    assert own.own_megabytes() == 1024 * 2003 / 1e6


def test_a_loader_s_first_batch_is_waited_for_and_comes_with_the_others() -> None:
    own = load(LESSON)
    now = [5.0]
    held = iter([100.0, 130.0])
    own.own_megabytes = lambda: next(held)

    def sleep(seconds: float) -> None:
        now[0] += seconds

    own.time = SimpleNamespace(perf_counter=lambda: now[0], sleep=sleep)

    def batches() -> object:
        for batch in range(3):
            sleep(2.0)
            yield batch

    _, found, (megabytes, seconds) = own.begin(batches)
    assert (megabytes, seconds) == (30, 2)
    assert [*found] == [0, 1, 2]


def test_the_table_has_memory_and_first_batch_of_each_loader(capsys: object) -> None:
    own = load(LESSON)
    names = ["plain", "bytes", "raw", "batches", "by hand"]
    ms = {name: 5.0 - number for number, name in enumerate(names)} | {"copying alone": 0.5}
    own.show(ms, {name: (10 * number, 0.25) for number, name in enumerate(names)})
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["plain", "5.000", "200", "0", "0.25", "floats", "1.000", "20%"]
    assert lines[6].split() == ["by", "hand", "1.000", "1,000", "40", "0.25"]
    assert lines[7].split() == ["copying", "alone", "0.500", "2,000"]
    assert max(map(len, lines)) <= 100


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


@pytest.mark.parametrize(
    ("name", "ranks", "twice"),
    [("DataLoader, raw", 4, 2), ("FFCV, JPEG", 4, 2), ("FFCV, raw", 1, 0), ("tar shards", 4, 0)],
)
def test_a_benchmark_refuses_a_loader_that_leaves_out_or_repeats(
    name: str, ranks: int, twice: int
) -> None:
    times = np.ones(482, int)
    times[:twice] = 2
    loaders.check_delivered(name, times, ranks)
    times[twice] = 2
    with pytest.raises(ValueError, match=f"and {twice} of them twice, got 0 never, {twice + 1}"):
        loaders.check_delivered(name, times, ranks)
    times[twice] = 0
    with pytest.raises(ValueError, match="got 1 never"):
        loaders.check_delivered(name, times, ranks)


def test_a_benchmark_says_what_a_loader_by_hand_takes_next_to_ffcv() -> None:
    made_up = {"by hand, raw": 3.0, "FFCV, raw": 4.0, "by hand, JPEG": 9.0, "FFCV, JPEG": 6.0}
    rows = [{"loader": name, "ranks": 2, "wall_ms": [ms, 99, 0]} for name, ms in made_up.items()]
    assert loaders.ratios(rows) == [
        "by hand, JPEG / FFCV, JPEG, 2 ranks: 1.50 <= 1.00 MISSED",
        "by hand, raw / FFCV, raw, 2 ranks: 0.75 <= 1.00 kept",
    ]
    assert loaders.ratios(rows[:1]) == []


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
    kept = [path.name for path in tmp_path.iterdir()]
    ours_kept = [name for name in kept if not name.startswith("torchelastic")]
    assert ours_kept == [], "torchrun keeps its logs"
    stop = time.monotonic() + 30
    while time.monotonic() < stop and shared_by(ours, was):
        time.sleep(0.1)  # another test's segment has no number either, and is mapped or soon goes
    assert shared_by(ours, was) == []


# Broken lines
PLAIN_CROPS = "plain: bytes unlike NumPy's crops"
BYTES = "bytes: bytes unlike NumPy's crops"
RAW = "raw: bytes unlike NumPy's crops"
BATCHES = "batches: bytes unlike NumPy's crops"
BY_HAND = "by hand: bytes unlike NumPy's crops"
RAW_FILE = "raw file: bytes unlike the decoder's"
FFCV_FILE = "FFCV's file: bytes unlike the raw file's"
RATIO = "size: raw file / JPEGs"

COPIED = "copy_crops(self.photos_NHWC, index_B, "
LINES = {
    "the last crop of a batch is not copied, as in Try": (
        COPIED,
        COPIED.replace("index_B", "index_B[:-1]"),
        {BATCHES, BY_HAND},
    ),
    "one by one, a crop lies where another image's does": (
        "copy_crop(self.photo(index), CORNERS_N2[index]",
        "copy_crop(self.photo(index), CORNERS_N2[index - 1]",
        {PLAIN_CROPS, BYTES, RAW},
    ),
    "floats of 256ths": ("(crop_CHW / 255 - MEAN)", "(crop_CHW / 256 - MEAN)", {PLAIN_CROPS}),
    "the thread's last batch is forgotten": (
        "            while pending:",
        "            while len(pending) > 1:",
        {BY_HAND},
    ),
    "the raw files hold the pixels before they were JPEGs": (
        "        pixels_NHWC[index] = decode(path)\n",
        "        pixels_NHWC[index] = window_HWC\n",
        {RAW_FILE, PLAIN_CROPS, BYTES},
    ),
    "FFCV's file holds the images in another order": (
        "[(pixels_NHWC[i], i) for",
        "[(pixels_NHWC[i - 1], i) for",
        {FFCV_FILE},
    ),
    "JPEGs of higher quality": ("quality=97", "quality=100, subsampling=0", {RATIO}),
}
SLOW = {
    "the plain loader makes no floats": (
        "Crops(decoded, floats=True)",
        "Crops(decoded)",
        {"CPU time: plain / bytes"},
    ),
    "raw decodes JPEGs, as in Try": (
        '"raw": partial(data_loader, Crops(photos_NHWC.__getitem__)),',
        '"raw": partial(data_loader, Crops(decoded)),',
        {"CPU time: bytes / raw", "CPU time: decoding / floats"},
    ),
    "JPEGs are read and not decoded": (
        "        decode(path)\n    return",
        "        path.read_bytes()\n    return",
        {"CPU time: decoding alone / bytes"},
    ),
    "floats are made ten times": (
        "    return (crop_CHW / 255 - MEAN) / STD\n",
        "    for _ in range(10):\n"
        "        floats_CHW = (crop_CHW / 255 - MEAN) / STD\n"
        "    return floats_CHW\n",
        {"CPU time: decoding / floats"},
    ),
    "raw makes batches": (
        '"raw": partial(data_loader, Crops(photos_NHWC.__getitem__)),',
        '"raw": partial(data_loader, Batches(photos_NHWC), collate=lambda batch: batch),',
        {"CPU time: raw / batches"},
    ),
    "by hand each batch is made 20 times": (
        "                pending.append(thread",
        "                for _ in range(19):\n"
        "                    self.dataset.__getitems__(indices)\n"
        "                pending.append(thread",
        {"CPU time: batches / by hand", "CPU time: copying alone / by hand"},
    ),
    "FFCV is the loader by hand": (
        "partial(ffcv_loader, place, random_crops())",
        "partial(ByHand, Batches(photos_NHWC))",
        {"CPU time: by hand / FFCV"},
    ),
}
BREAKS = [
    Breaks(LINES, changes=[*FEW, UNCOMPILED], deadline=120),
    Breaks(SLOW, deadline=150, clock=True),
]
