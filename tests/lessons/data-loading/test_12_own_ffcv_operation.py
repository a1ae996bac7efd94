"""Crops against crops made by hand, claims against broken lines."""

from importlib.util import find_spec

import numpy as np
import pytest

from course.playing import Lazily
from tests.lessons.every import Breaks, OnGpus, Without, test_lesson  # noqa: F401

LESSON = "data-loading/12_own_ffcv_operation.py"
pytestmark = pytest.mark.skipif(find_spec("ffcv") is None, reason="FFCV is not installed")
lesson = Lazily(LESSON)

# FFCV takes seconds to import and to compile, on rank 0; the plain run, on four ranks, has it.
NUMBA = "        import numba\n"
NO_FFCV = (NUMBA, "        raise ImportError\n" + NUMBA)
LEFT_OUT = [NO_FFCV, ("    check_operation()\n", "")]
SIZES = {1: LEFT_OUT, 3: LEFT_OUT}
ON_GPUS = OnGpus(changes=LEFT_OUT)
WITHOUT = {"FFCV": Without([NO_FFCV], {"FFCV's operation"})}


def by_hand(image: np.ndarray, numbers: list[int]) -> np.ndarray:
    y, x, flip, light, cut_y, cut_x = numbers
    crop = np.zeros((128, 128, 3), int)
    for column in range(128):
        source = x + (127 - column if flip else column)
        crop[:, column] = image[y : y + 128, source]
    crop = np.floor(crop * (light / 64)).clip(max=255)
    crop[cut_y : cut_y + 32, cut_x : cut_x + 32] = 0
    return crop


def test_the_pass_and_the_oracle_make_the_crop_that_one_makes_by_hand() -> None:
    import numba

    compiled = numba.njit(lesson.augment)
    image = lesson.picture()
    numbers = lesson.draw_numbers(lesson.SEED, 1, np.arange(8))
    assert {*numbers[:, 2].tolist()} == {0, 1}  # as it is, and mirrored
    for sample in range(8):
        expected = by_hand(image, numbers[sample].tolist())
        crop = np.empty((128, 128, 3), np.uint8)
        compiled(image, numbers[sample], crop)
        assert (crop == expected).all()
        assert (lesson.crop_by_numpy(1, sample) == expected).all()


def test_numbers_lie_within_the_picture_and_depend_on_all_three() -> None:
    samples = np.arange(1000)
    numbers = lesson.draw_numbers(0, 0, samples)
    assert (numbers >= lesson.LEAST).all()
    assert (numbers < np.add(lesson.LEAST, lesson.CHOICES)).all()
    for other in (lesson.draw_numbers(1, 0, samples), lesson.draw_numbers(0, 1, samples)):
        assert not {*map(tuple, numbers)} & {*map(tuple, other)}


PASS = "bytes in which the pass differs from NumPy's"
BUFFERS = "buffers in which an epoch's crops lie"
STAMP = "epoch that compiled code uses in the second"
CALLS = "calls of Python in an epoch"
BYTES = "bytes in which FFCV's crops differ from NumPy's"
KEPT = "samples with the same crop in both epochs"
DIFFERENT = "different crops that FFCV made in 2 epochs"
AGAIN = "bytes and places unlike epoch 1's, run again"

DRAWN = "numbers_B6 = draw_numbers(self.seed, self.epoch_now(), indices)"
ONE_BY_ONE = "[draw_numbers(self.seed, self.epoch_now(), [one]) for one in indices]"
WORKERS = '"num_workers": workers}'
LINES = {
    "drawn by place in the batch, as in Try": (
        DRAWN,
        DRAWN.replace("indices", "range(len(indices))"),
        {BYTES, DIFFERENT},
    ),
    "the epoch is forgotten, as in Try": (
        "        return asked[-1]\n",
        "        return 0\n",
        {BYTES, KEPT, DIFFERENT},
    ),
    "one batch is prepared ahead": (
        WORKERS,
        '"num_workers": workers, "batches_ahead": 1}',
        {BUFFERS},
    ),
    "the loader compiles for each epoch": (
        WORKERS,
        '"num_workers": workers, "recompile": True}',
        {STAMP},
    ),
    "Python draws for each sample by itself": (
        DRAWN,
        f"numbers_B6 = np.concatenate({ONE_BY_ONE})",
        {CALLS},
    ),
    "the loader counts on": ("        loader.next_epoch = 1\n", "", {AGAIN}),
    "nothing is cut out": ("0 if in_square else bright", "bright", {PASS, BYTES}),
}
BREAKS = Breaks(LINES, deadline=120)
