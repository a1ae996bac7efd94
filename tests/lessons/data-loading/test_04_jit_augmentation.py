"""Crops against crops made by hand, clocks against made-up seconds, claims against broken lines."""

from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch

from course.playing import Lazily, load, play
from tests.lessons.every import Breaks, OnGpus, Without, test_lesson  # noqa: F401

LESSON = "data-loading/04_jit_augmentation.py"
pytestmark = pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
lesson = Lazily(LESSON)

# The workers take the most time, on rank 0; the plain run, on four ranks, has them.
NO_THREADS = ("    check_threads(images, draws, expected)\n    finish", "    finish")
FEW = ("BATCHES = 80", "BATCHES = 8")
SIZES = {1: [FEW], 3: [FEW]}
ON_GPUS = OnGpus(changes=[FEW])
NUMBA = "    import numba\n"
PIL = "    from PIL import Image, ImageEnhance\n"
WITHOUT = {
    "numba": Without(
        [(NUMBA, "    raise ImportError\n")],
        {"the compiled loop", "threads against processes"},
    ),
}
NO_DEVICE = {"pace": "batches are filled on the host"}


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
    for augment in (lesson.augment_pil, lesson.augment_numpy, lesson.augment_loop):
        assert (lesson.crops_by(augment, images, draws) == expected).all(), augment


def test_numpy_makes_a_new_crop() -> None:
    lesson = small()
    images = np.full((2, 12, 14, 3), 100, np.uint8)
    draws = np.array([[0, 0, flip, 64, 0, 0] for flip in (0, 1)])
    lesson.crops_by(lesson.augment_numpy, images, draws)
    assert (images == 100).all()


def test_the_images_are_windows_of_the_photograph() -> None:
    images = lesson.windows_of_a_photograph()
    assert images.shape == (128, 160, 240, 3)
    assert images.dtype == np.uint8
    assert len({image.tobytes() for image in images}) == 128
    assert images.flags.c_contiguous
    assert images.flags.writeable


@pytest.mark.parametrize("count", [1, 2, 5, 60])
def test_threads_fill_the_whole_batch(count: int) -> None:
    lesson = small()
    images = np.random.default_rng(0).integers(0, 256, (count, 12, 14, 3), np.uint8)
    draws = np.random.default_rng(1).integers(0, 3, (count, 6))
    draws[:, 3] += 62  # of 64ths
    draws[:, 2] %= 2
    expected = lesson.crops_by(lesson.augment_pil, images, draws)
    batch = np.empty((count, 8, 8, 3), np.uint8)
    with ThreadPoolExecutor(2) as pool:
        lesson.fill_by_threads(pool, lesson.augment_loop, images, draws, batch)
        assert (batch == expected).all()
        assert lesson.by_threads(pool, lesson.augment_loop, images, draws, 3)() == 3 * count


def test_each_thread_gets_half() -> None:
    lesson = small()
    pool = Mock()
    images = np.zeros((128, 12, 14, 3), np.uint8)
    batch = np.zeros((128, 8, 8, 3), np.uint8)
    lesson.fill_by_threads(pool, "augment", images, np.zeros((128, 6)), batch)
    given = [call.args[1:] for call in pool.submit.call_args_list]
    assert [len(share) for one in given for share in one] == [64] * 6
    assert all(np.shares_memory(one[2], batch) for one in given)


def test_a_worker_is_asked_for_whole_batches() -> None:
    lesson = small()
    images = np.random.default_rng(0).integers(0, 256, (128, 12, 14, 3), np.uint8)
    draws = np.tile([1, 2, 1, 70, 0, 3], (128, 1))
    loader = lesson.process_loader(lesson.augment_numpy, images, draws)
    assert len(loader) == len([*loader.sampler]) == lesson.BATCHES
    assert loader.num_workers == lesson.WORKERS
    batch = loader.dataset[next(iter(loader.sampler))]
    assert (batch.numpy() == lesson.crops_by(lesson.augment_pil, images, draws)).all()


def test_cpu_seconds_are_those_of_all_processes() -> None:
    lesson = load(LESSON)
    worker = Mock(cpu_times=lambda: SimpleNamespace(user=10.0, system=20.0, iowait=400.0))
    trainer = Mock(cpu_times=lambda: SimpleNamespace(user=1.0, system=2.0, children_user=800.0))
    trainer.children.return_value = [worker, worker]
    with patch.object(lesson.psutil, "Process", return_value=trainer):
        assert lesson.cpu_seconds() == 63


def test_the_pace_is_per_second_and_per_crop() -> None:
    lesson = load(LESSON)
    now = [0.0]

    def make() -> int:
        now[0] += 6.0
        return 90

    lesson.time = SimpleNamespace(perf_counter=lambda: now[0])
    lesson.cpu_seconds = lambda: 1.5 * now[0]
    assert lesson.pace(make) == (1.5, 0.1)


def test_shared_bytes_are_those_that_the_kernel_shares() -> None:
    shared = torch.zeros(2**20, dtype=torch.uint8).share_memory_().numpy()
    assert lesson.shared_bytes(shared) == 2**20
    assert lesson.shared_bytes(shared[5:-7]) == 2**20 - 12
    assert lesson.shared_bytes(shared.copy()) == 0


def verdicts(paces: dict, cores: int = 2) -> dict[str, bool]:
    """Whether each claim of the clock's holds."""
    lesson = load(LESSON)
    held = {}

    def claim(
        text: str,
        predicted: float,
        measured: float,
        sign: str = "=",
        atol: float = 0.0,
        **how: object,
    ) -> None:
        assert how["timed"]
        held[text] = measured >= predicted if sign == ">=" else abs(measured - predicted) <= atol

    lesson.claim = claim
    lesson.blocked = lambda text, needs: held.update({text: None})
    lesson.os = Mock(cpu_count=lambda: cores)
    lesson.judge_paces(paces)
    return held


def test_what_the_clock_says_of_threads_and_processes() -> None:
    paces = {"threads, not compiled": (1.02, 0.03), "threads, GIL held": (1.0, 30e-6)}
    paces |= {"threads, GIL released": (1.9, 31e-6), "DataLoader": (2.0, 55e-6)}
    paces |= {"threads, prange": (1.85, 31e-6)}
    assert verdicts(paces) == dict.fromkeys([PYTHON, ONE, TWO, PRANGE, CPU], True)
    assert verdicts(paces, cores=1)[TWO] is verdicts(paces, cores=1)[PRANGE] is None
    assert not verdicts(paces | {"threads, prange": (1.0, 31e-6)})[PRANGE]
    assert not verdicts(paces | {"threads, not compiled": (1.9, 0.03)})[PYTHON]
    assert not verdicts(paces | {"threads, GIL held": (1.9, 30e-6)})[ONE]
    assert not verdicts(paces | {"threads, GIL released": (1.0, 31e-6)})[TWO]
    assert not verdicts(paces | {"DataLoader": (2.0, 42e-6)})[CPU]


@pytest.mark.deep
def test_without_pil_it_says_what_it_needs() -> None:
    played = play(LESSON, 2, (PIL, "    raise ImportError\n"))
    (row,) = played.ledger
    assert row["needs"] == "Pillow, and scikit-learn's photograph"
    assert played.code == 1


NUMPY = "bytes in which NumPy's crops differ from PIL's"
LOOP = "bytes in which the loop's crops differ from PIL's"
BATCHES = "bytes in which batches differ from PIL's crops"
HELD = "threads in the loop at one time, GIL held"
RELEASED = "threads in the loop at one time, GIL released"
COPIED = "bytes per crop in shared memory, DataLoader"
WRITTEN = "bytes per crop in shared memory, threads"
PYTHON = "cores in use by 2 threads, not compiled"
ONE = "cores in use by 2 threads, GIL held"
TWO = "cores in use by 2 threads, GIL released"
PRANGE = "cores in use by 2 threads, prange"
PICKLED = "bytes pickled per batch, DataLoader"
CPU = "CPU time per crop, DataLoader / threads"

PIXELS = {
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
}
THREADS = {
    "threads take the draws of other images": (
        "images_NHWC[mine], draws[mine], batch_NSSC[mine]))",
        "images_NHWC[mine], draws[mine][::-1].copy(), batch_NSSC[mine]))",
        {BATCHES},
    ),
    "the GIL is released where it is said to be held": (
        "for nogil in (False, True)]",
        "for nogil in (True, True)]",
        {HELD},
    ),
    "the DataLoader carries floats": (
        "self.draws[batch]))\n",
        "self.draws[batch])).float()\n",
        {COPIED},
    ),
    "threads fill shared memory": (
        "    batch_NSSC = np.empty((N, S, S, 3), np.uint8)\n\n    def by_prange",
        "    batch_NSSC = torch.zeros(N, S, S, 3, dtype=torch.uint8).share_memory_().numpy()\n\n"
        "    def by_prange",
        {WRITTEN},
    ),
    "a worker sends an array": (
        "super().__getitem__(batch)))",
        "super().__getitem__(batch).numpy()))",
        {PICKLED},
    ),
    "numba's threads take the draws of other images": (
        "draws[i : i + 1], crops[",
        "draws[:1], crops[",
        {BATCHES},
    ),
    "workers make crops of other images": (
        "self.images[batch], self.draws[batch]))\n",
        "self.images[batch][::-1].copy(), self.draws[batch]))\n",
        {BATCHES},
    ),
    "the GIL is held, as in Try": (
        "numba.njit(nogil=nogil)",
        "numba.njit(nogil=False)",
        {RELEASED},
    ),
}
CLOCK = {
    "the GIL is held, as in Try": (
        "numba.njit(nogil=nogil)",
        "numba.njit(nogil=False)",
        {RELEASED, TWO},
    ),
    "the loop that is not compiled is": (
        "by_threads(pool, augment_loop, images[:4], draws[:4], 1)",
        "by_threads(pool, released, images, draws, BATCHES)",
        {PYTHON},
    ),
    "threads release the GIL that are said to hold it": (
        "held = compiled(augment_loop, nogil=False)",
        "held = compiled(augment_loop, nogil=bool(1))",
        {ONE},
    ),
    "one thread takes all images": (
        "share = math.ceil(len(images_NHWC) / WORKERS)",
        "share = len(images_NHWC)",
        {TWO},
    ),
    "numba's threads share nothing": (
        "numba.njit(parallel=True, nogil=True)",
        "numba.njit(nogil=True)",
        {PRANGE},
    ),
    "threads make each crop four times": (
        "jobs.append(pool.submit(augment, images_NHWC[mine], draws[mine], batch_NSSC[mine]))",
        "given = images_NHWC[mine], draws[mine], batch_NSSC[mine]\n"
        "        jobs += [pool.submit(augment, *given) for _ in range(4)]",
        {CPU},
    ),
}
BREAKS = [
    Breaks(PIXELS, changes=[NO_THREADS], deadline=120),
    Breaks(THREADS, changes=[FEW], deadline=120),
    Breaks(CLOCK, deadline=120, clock=True, alone=[*CLOCK]),
]
