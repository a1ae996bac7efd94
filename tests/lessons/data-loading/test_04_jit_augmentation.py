"""Crops against crops made by hand, clocks against made-up seconds, claims against broken lines."""

from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock, patch

import numpy as np
import pytest

from course.playing import Lazily, load
from tests.lessons.every import Breaks, OnGpus, Without, test_lesson  # noqa: F401

LESSON = "data-loading/04_jit_augmentation.py"
pytestmark = pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
lesson = Lazily(LESSON)

# The workers take the most time, on rank 0; the plain run, on four ranks, has them.
NO_WORKERS = ("    check_workers(images, draws, expected)\n    finish", "    finish")
NO_SECONDS = ("    check_seconds(augment, images, draws)\n", "")
FEW = ("BATCHES = 150", "BATCHES = 30")
SIZES = {1: [FEW], 3: [FEW]}
ON_GPUS = OnGpus(changes=[FEW])
NUMBA = "    import numba\n"
WITHOUT = {
    "numba": Without(
        [(NUMBA, "    raise ImportError\n" + NUMBA)],
        {"the compiled loop", "threads against processes", "compilations"},
    ),
}
NO_DEVICE = {
    "seconds_of": "what it times runs on the host",
    "pace": "batches are filled on the host",
}


def small() -> ModuleType:
    """The lesson, not compiled, with crops of 8 x 8 pixels of images of 12 x 14."""
    changes = [("HEIGHT = 160", "HEIGHT = 12"), ("WIDTH = 240", "WIDTH = 14")]
    changes += [("S = 128  #", "S = 8  #"), ("CUT = 32  #", "CUT = 3  #")]
    return load(LESSON, *changes)


def crop_by_hand(image: np.ndarray, draw: tuple, S: int, CUT: int) -> np.ndarray:
    y, x, flip, light, cut_y, cut_x = draw
    crop = np.zeros((S, S, 3), int)
    for row in range(S):
        for column in range(S):
            mirrored = S - 1 - column if flip else column
            crop[row, column] = image[y + row, x + mirrored]
    crop = np.floor(crop * (light / 64)).clip(max=255)
    crop[cut_y : cut_y + CUT, cut_x : cut_x + CUT] = 0
    return crop


def test_all_ways_make_the_crop_that_one_makes_by_hand() -> None:
    lesson = small()
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (60, 12, 14, 3), np.uint8)
    draws = random.integers(lesson.LEAST, np.add(lesson.LEAST, lesson.CHOICES), (60, 6))
    draws[:5, 3] = [32, 63, 64, 65, 96]  # of 64ths: PIL has cases of its own
    draws[5] = np.add(lesson.LEAST, lesson.CHOICES) - 1  # the last of everything
    draws[6] = lesson.LEAST
    by_hand = [crop_by_hand(*one, 8, 3) for one in zip(images, draws.tolist(), strict=True)]
    expected = np.stack(by_hand)
    assert (lesson.one_by_one(lesson.augment_pil, images, draws) == expected).all()
    assert (lesson.one_by_one(lesson.augment_numpy, images, draws) == expected).all()
    assert (lesson.crops_by(lesson.augment_loop, images, draws) == expected).all()


def test_numpy_makes_a_new_crop() -> None:
    lesson = small()
    image = np.full((12, 14, 3), 100, np.uint8)
    for flip in (0, 1):
        lesson.augment_numpy(image, np.array([0, 0, flip, 64, 0, 0]))
    assert (image == 100).all()


def test_the_images_are_windows_of_the_photograph() -> None:
    images = lesson.windows_of_a_photograph()
    assert images.shape == (64, 160, 240, 3)
    assert images.dtype == np.uint8
    assert len({image.tobytes() for image in images}) == 64
    assert images.flags.c_contiguous
    assert images.flags.writeable


def test_times_are_per_crop() -> None:
    lesson = small()
    lesson.seconds_of = lambda work, *given: 1.0
    images = np.zeros((64, 12, 14, 3), np.uint8)
    seconds = lesson.seconds_per_crop(lesson.augment_loop, images, np.zeros((64, 6), np.int64))
    assert seconds == {"Python": 1.0, "PIL": 1 / 64, "NumPy": 1 / 64, "numba": 1 / 64}


@pytest.mark.parametrize("count", [1, 2, 5, 60])
def test_threads_fill_the_whole_batch(count: int) -> None:
    lesson = small()
    images = np.random.default_rng(0).integers(0, 256, (count, 12, 14, 3), np.uint8)
    draws = np.random.default_rng(1).integers(0, 3, (count, 6))
    draws[:, 3] += 62  # of 64ths
    expected = lesson.one_by_one(lesson.augment_pil, images, draws)
    with ThreadPoolExecutor(2) as pool:
        found = lesson.fill_by_threads(pool, lesson.augment_loop, images, draws)
    assert (found == expected).all()


def test_each_thread_gets_half() -> None:
    lesson = small()
    pool = Mock()
    lesson.fill_by_threads(pool, "augment", np.zeros((64, 12, 14, 3), np.uint8), np.zeros((64, 6)))
    assert [len(given.args[1]) for given in pool.submit.call_args_list] == [32, 32]


def test_processes_make_as_many_batches_as_threads() -> None:
    images = np.zeros((64, 160, 240, 3), np.uint8)
    loader = lesson.process_loader(None, images, np.zeros((64, 6), np.int64))
    assert len(loader) == lesson.BATCHES
    assert all(sorted(batch) == [*range(64)] for batch in loader.batch_sampler)
    assert loader.num_workers == lesson.WORKERS


def test_cpu_seconds_are_those_of_all_processes() -> None:
    lesson = load(LESSON)
    worker = Mock(cpu_times=lambda: SimpleNamespace(user=10.0, system=20.0, iowait=400.0))
    trainer = Mock(cpu_times=lambda: SimpleNamespace(user=1.0, system=2.0, children_user=800.0))
    trainer.children.return_value = [worker, worker]
    with patch.object(lesson.psutil, "Process", return_value=trainer):
        assert lesson.cpu_seconds() == 63


def test_the_pace_is_that_of_all_batches() -> None:
    lesson = load(LESSON)
    now = [0.0]

    def batches() -> object:
        for _ in range(3):
            now[0] += 2.0
            yield None

    lesson.time = SimpleNamespace(perf_counter=lambda: now[0])
    lesson.cpu_seconds = lambda: 1.5 * now[0]
    assert lesson.pace(batches()) == (6.0, 9.0)


def verdicts(rate: dict, cores: dict) -> list[bool]:
    """Whether each claim of the clock's holds."""
    lesson = load(LESSON)
    held = []

    def claim(text: str, predicted: float, measured: float, sign: str, **how: object) -> None:
        assert how["timed"]
        held.append(measured <= predicted if sign == "<=" else measured >= predicted)

    lesson.claim = claim
    lesson.os = Mock(cpu_count=lambda: 2)
    lesson.judge_threads(rate, cores)
    return held


def test_what_the_clock_says_of_threads_and_processes() -> None:
    rate = {"threads": 60_000.0, "DataLoader": 20_000.0}
    cores = {"threads, GIL held": 1.0, "threads": 1.9, "DataLoader": 2.0}
    assert verdicts(rate, cores) == [True, True, True, True]
    slow = {"threads": 20_000.0, "DataLoader": 20_000.0}  # no faster, and as much CPU time
    assert verdicts(slow, cores | {"threads": 2.0}) == [True, True, False, False]
    one = {"threads, GIL held": 2.0, "threads": 1.0}
    assert verdicts(rate, cores | one)[:2] == [False, False]
    assert verdicts(slow, cores | {"threads": 1.0})[3]  # half the CPU time per crop


@pytest.mark.parametrize("launched", [True, False])
def test_the_folder_lies_in_the_launchers_and_goes(
    launched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "other"))
    (tmp_path / "other").mkdir()
    (tmp_path / "0").mkdir()
    monkeypatch.setenv(
        "TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json") if launched else ""
    )
    lesson = load(LESSON)
    lesson.from_rank_0 = lambda value: value
    lesson.dist = Mock()
    with lesson.shared_folder() as folder:
        assert folder.is_dir()
        assert folder.parent == tmp_path / ("0" if launched else "other")
    assert not folder.exists()


NUMPY = "bytes in which NumPy's crops differ from PIL's"
LOOP = "bytes in which the loop's crops differ from PIL's"
BATCHES = "bytes in which batches differ from PIL's crops"
KINDS = "compilations for 4 kinds of images"
NO_CACHE = "compilations on all ranks, no cache"
STORED = "compilations on all ranks, cache, rank 0 first"
LOADED = "ranks that loaded it from the cache"
HELD = "another thread's steps meanwhile, GIL held"
RELEASED = "another thread's steps meanwhile, GIL released"
COPIED = "bytes per crop in shared memory, DataLoader"
WRITTEN = "bytes per crop in shared memory, threads"

COMPILING = {
    "NumPy forgets the minimum, as in Try": (
        "np.minimum(crop_SSC.astype(np.uint16) * light // 64, 255).astype",
        "(crop_SSC.astype(np.uint16) * light // 64).astype",
        {NUMPY},
    ),
    "the loop mirrors the other images": (
        "S - 1 - column if flip else column",
        "column if flip else S - 1 - column",
        {LOOP},
    ),
    "the mirrored view is a copy": (
        "mirrored = images_NHWC[:, :, ::-1]\n",
        "mirrored = images_NHWC[:, :, ::-1].copy()\n",
        {KINDS},
    ),
    "nothing is cached": (
        "augment = compiled(cache=True)",
        "augment = compiled()",
        {STORED, LOADED},
    ),
    # One of the four kinds that come later.
    "all ranks compile for a second kind of images": (
        "min(seconds_of(crops_by, augment, images, draws)",
        "min(seconds_of(crops_by, augment, images[:, ::-1], draws)",
        {NO_CACHE},
    ),
}
WORKERS = {
    "threads take the draws of other images": (
        "images[mine], draws[mine], crops_NSSC[mine]",
        "images[mine], draws[mine][::-1].copy(), crops_NSSC[mine]",
        {BATCHES},
    ),
    "the GIL is released where it is said to be held": (
        "for nogil in (False, True)]",
        "for nogil in (True, True)]",
        {HELD},
    ),
    "the DataLoader carries floats": (
        "self.draws[one])[0])\n",
        "self.draws[one])[0]).float()\n",
        {COPIED},
    ),
    "all batches are copied into shared memory": (
        "batch = torch.as_tensor(last)\n",
        "batch = torch.as_tensor(last).share_memory_()\n",
        {WRITTEN},
    ),
    "the GIL is held where it is said to be released": (
        "for nogil in (False, True)]",
        "for nogil in (False, False)]",
        {RELEASED},
    ),
}
CLOCK = {
    "the first call is the second": (
        "    first = seconds_of(",
        "    crops_by(augment, images, draws)\n    first = seconds_of(",
        {"seconds of the first call / of a later one"},
    ),
    "the loop in Python is the compiled one": (
        "N * seconds_of(crops_by, augment_loop, images[:1], draws[:1])",
        "seconds_of(crops_by, augment, images, draws)",
        {"time per crop, Python / the compiled loop"},
    ),
    "NumPy is the compiled loop": (
        "seconds_of(one_by_one, augment_numpy, images, draws)",
        "seconds_of(crops_by, augment, images, draws)",
        {"time per crop, NumPy / the compiled loop"},
    ),
    "threads release the GIL that are said to hold it": (
        "held = compiled(nogil=False)",
        "held = compiled(nogil=bool(1))",
        {"cores in use by 2 threads, GIL held"},
    ),
    "one thread takes all images": (
        "share = math.ceil(len(images) / WORKERS)",
        "share = len(images)",
        {"cores in use by 2 threads, GIL released", "crops per second, threads / DataLoader"},
    ),
    "threads make each crop four times": (
        "        jobs.append(pool.submit(augment, images[mine], draws[mine], crops_NSSC[mine]))",
        "        given = images[mine], draws[mine], crops_NSSC[mine]\n"
        "        jobs += [pool.submit(augment, *given) for _ in range(4)]",
        {"CPU time per crop, DataLoader / threads", "crops per second, threads / DataLoader"},
    ),
}
BREAKS = [
    Breaks(
        COMPILING,
        changes=[NO_WORKERS, NO_SECONDS],
        alone=["all ranks compile for a second kind of images"],
        deadline=120,
    ),
    Breaks(WORKERS, changes=[FEW, NO_SECONDS], deadline=120),
    Breaks(CLOCK, deadline=120, clock=True),
]
