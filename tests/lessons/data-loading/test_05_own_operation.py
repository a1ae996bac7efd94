"""Draws against NumPy's own, seeds against published ones, claims against broken lines."""

from importlib.util import find_spec

import numpy as np
import pytest

from course.playing import Lazily, load
from tests.lessons.every import Breaks, OnGpus, Without, test_lesson  # noqa: F401

LESSON = "data-loading/05_own_operation.py"
pytestmark = pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
lesson = Lazily(LESSON)

# FFCV takes seconds to import and to compile, on rank 0; the plain run, on four ranks, has it.
FFCV = "        from ffcv.fields import RGBImageField\n"
NUMBA = "    import numba\n"
NO_FFCV = (FFCV, "        raise ImportError\n" + FFCV)
NO_NUMBA = (NUMBA, "    raise ImportError\n" + NUMBA)
LEFT_OUT = [NO_FFCV, ("    check_operation()\n", "")]
SIZES = {1: LEFT_OUT, 3: LEFT_OUT}
ON_GPUS = OnGpus(changes=LEFT_OUT)
WITHOUT = {
    "numba": Without([NO_NUMBA, NO_FFCV], {"random numbers in compiled code", "FFCV's operation"}),
    "FFCV": Without([NO_FFCV], {"FFCV's operation"}),
}


def test_draws_are_numpys_own_and_every_choice_occurs() -> None:
    lesson = load(LESSON, ("HEIGHT = 160", "HEIGHT = 130"), ("WIDTH = 240", "WIDTH = 140"))
    draws = np.zeros((5000, 6), np.int64)
    lesson.draw_crops(draws, 7)
    floats = np.random.RandomState(7).random_sample((5000, 6))
    assert (draws == lesson.LEAST + np.floor(floats * lesson.CHOICES)).all()
    assert (draws.min(0) == lesson.LEAST).all()
    assert (draws.max(0) == np.add(lesson.LEAST, lesson.CHOICES) - 1).all()
    again = np.zeros((5000, 6), np.int64)
    lesson.draw_crops(again, lesson.AS_IT_IS)
    assert (again != draws).any()


def test_a_seed_in_compiled_code_draws_what_numpy_draws() -> None:
    draws = np.zeros((50, 6), np.int64)
    lesson.numba.njit(lesson.draw_crops)(draws, 7)
    floats = np.random.RandomState(7).random_sample((50, 6))
    assert (draws == lesson.LEAST + np.floor(floats * lesson.CHOICES)).all()


def test_seeds_are_splitmix64s() -> None:
    first = 6457827717110365317  # of the generator that begins with 1234567, as published
    assert lesson.mixed_by_python(1234567) == first >> 32
    compiled = lesson.numba.njit(lesson.mixed)
    words = np.random.default_rng(0).integers(0, 2**31, (200, 3)).tolist()
    words += [[0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0]]
    found = [compiled(*three) for three in words]
    assert found == [lesson.mixed_by_python(*three) for three in words]
    assert len({*found}) == len(words)


def test_the_operations_crop_is_the_one_made_by_hand() -> None:
    image = np.random.default_rng(0).integers(0, 256, (160, 240, 3), np.uint8)
    compiled = lesson.numba.njit(lesson.augment)
    for sample in range(8):
        draws = np.zeros((1, 6), np.int64)
        lesson.draw_crops(draws, lesson.mixed_by_python(lesson.SEED, 1, sample))
        y, x, flip, light, cut_y, cut_x = draws[0].tolist()
        expected = np.zeros((128, 128, 3), int)
        for column in range(128):
            source = x + (127 - column if flip else column)
            expected[:, column] = image[y : y + 128, source]
        expected = np.floor(expected * (light / 64)).clip(max=255)
        expected[cut_y : cut_y + 32, cut_x : cut_x + 32] = 0
        crop = np.empty((128, 128, 3), np.uint8)
        compiled(image, draws[0], crop)
        assert (crop == expected).all()
        assert (lesson.crop_by_numpy(image, 1, sample) == expected).all()


PYTHON = "sequences on n ranks, not compiled"
TRIES = "sequences in 2 tries, seeded in Python"
IN_PYTHON = "sequences on n ranks, seeded in Python"
COMPILED = "sequences on n ranks, seeded in compiled code"
BY_RANK = "sequences on n ranks, seeded there by rank"
THIRD = "sequences of 2 threads, seeded in a third"
SAMPLE = "crops of epoch 1 drawn before, seed + sample"
SUM = "crops of epoch 1 drawn before, + epoch"
MIXED = "crops of epoch 1 drawn before, mixed"
EPOCH = "different crops of n ranks in an epoch, mixed"
BYTES = "bytes in which FFCV's crops differ from NumPy's"
KEPT = "samples with the same crop in both epochs"
DIFFERENT = "different crops that FFCV made in 2 epochs"

LINES = {
    "Python is seeded by rank": (
        "    np.random.seed(SEED)\n    found",
        "    np.random.seed(SEED + RANK)\n    found",
        {PYTHON},
    ),
    "the tries are seeded in compiled code": (
        "tries.append(sequence(draw))",
        "tries.append(sequence(draw, SEED))",
        {TRIES, IN_PYTHON},
    ),
    "all ranks seed by rank": (
        "alike = different(sequence(draw, SEED))",
        "alike = different(sequence(draw, SEED + RANK))",
        {COMPILED},
    ),
    "no rank seeds by rank": (
        "by_rank = different(sequence(draw, SEED + RANK))",
        "by_rank = different(sequence(draw, SEED))",
        {BY_RANK},
    ),
    "the thread that was seeded draws": (
        "threads.append(sequence_of_a_thread(draw))",
        "threads.append(sequence(draw))",
        {THIRD},
    ),
    "the sample's seed has the epoch": (
        "    return seed + sample\n",
        "    return seed + 1000 * epoch + sample\n",
        {SAMPLE},
    ),
    "the sum counts the epoch twice": (
        "    return seed + epoch + sample\n",
        "    return seed + 2 * epoch + sample\n",
        {SUM},
    ),
    "the epoch is not mixed in": (
        "    for word in (seed, epoch, sample):\n",
        "    for word in (seed, sample):\n",
        {MIXED},
    ),
    "ranks count their samples from 0": (
        "    own = draws_of(seed_of, 0, range(RANK, N, WORLD_SIZE))\n",
        "    own = draws_of(seed_of, 0, range(N // WORLD_SIZE))\n",
        {EPOCH},
    ),
}
EPOCH_LOST = "no buffer carries the epoch, as in Try"
OPERATION = {
    EPOCH_LOST: (
        "AllocationQuery((1 + self.epoch,)",
        "AllocationQuery((1,)",
        {BYTES, KEPT, DIFFERENT},
    ),
    "the operation seeds by place in the batch, as in Try": (
        "np.int64(indices[i])",
        "np.int64(i)",
        {BYTES, DIFFERENT},
    ),
}
BREAKS = [Breaks(LINES, changes=LEFT_OUT, deadline=120)]
if find_spec("ffcv") is not None:
    others = [("    check_compiled()\n", ""), ("    check_seeds()\n", "")]
    BREAKS.append(Breaks(OPERATION, changes=others, deadline=120))
