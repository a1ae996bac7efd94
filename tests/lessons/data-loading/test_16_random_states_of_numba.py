"""Draws against NumPy's own, a mix against a published generator, claims against broken lines."""

from importlib.util import find_spec
from unittest.mock import Mock, patch

import numpy as np
import pytest

from course.playing import Lazily, load
from tests.lessons.every import Breaks, OnGpus, Without, test_lesson  # noqa: F401

LESSON = "data-loading/16_random_states_of_numba.py"
pytestmark = pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
lesson = Lazily(LESSON)

NO_COSTS = ("    check_costs(gather_objects(measure_costs() if RANK == 0 else None)[0])\n", "")
SIZES = {1: [NO_COSTS], 3: [NO_COSTS]}
ON_GPUS = OnGpus(changes=[NO_COSTS])
NUMBA = "    import numba\n"
WITHOUT = {
    "numba": Without(
        [(NUMBA, "    raise ImportError\n" + NUMBA)],
        {"sequences drawn by compiled code", "mixed numbers, and what they cost"},
    )
}


def as_crops(floats: np.ndarray) -> np.ndarray:
    return lesson.LEAST + np.floor(floats * lesson.CHOICES)


def test_draws_are_numpys_own_and_every_choice_occurs() -> None:
    small = load(LESSON, ("HEIGHT = 160", "HEIGHT = 130"), ("WIDTH = 240", "WIDTH = 140"))
    small.set_seed(7)
    draws = small.draw_crops(5000)
    floats = np.random.RandomState(7).random_sample((5000, 6))
    assert (draws == small.LEAST + np.floor(floats * small.CHOICES)).all()
    assert (draws.min(0) == small.LEAST).all()
    assert (draws.max(0) == np.add(small.LEAST, small.CHOICES) - 1).all()
    assert (small.draw_crops(5000) != draws).any()


def test_a_seed_in_compiled_code_draws_what_numpy_draws() -> None:
    floats = np.random.RandomState(7).random_sample((50, 6))
    lesson.numba.njit(lesson.set_seed)(7)
    assert (lesson.numba.njit(lesson.draw_crops)(50) == as_crops(floats)).all()


def splitmix64(state: int) -> int:
    """The generator's next number, as in its authors' C code."""
    z = (state + 0x9E3779B97F4A7C15) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return z ^ (z >> 31)


def chained(*words: int) -> int:
    z = 0
    for word in words:
        z = splitmix64((z + word) % 2**64)
    return z


def test_mixed_numbers_are_splitmix64s_word_after_word() -> None:
    assert splitmix64(1234567) == 6457827717110365317  # as published
    compiled = lesson.numba.njit(lesson.draw_mixed)
    samples = np.array([0, 1, 63, 2**31, 2**40 + 5])
    for seed, epoch in ((0, 0), (0, 1), (1, 0), (2**31, 89)):
        draws = compiled(seed, epoch, samples)
        for draw, sample in zip(draws.tolist(), samples.tolist(), strict=True):
            bits = [chained(seed, epoch, sample, k) >> 11 for k in range(6)]
            floats = np.array(bits) / 2**53
            assert draw == as_crops(floats).tolist()


def test_mixed_numbers_fill_all_between_0_and_1() -> None:
    """Each of the six, of 10,000 samples: with a bound of 5 standard errors for the mean."""
    fine = load(LESSON)
    fine.LEAST = (0,) * 6
    fine.CHOICES = (2**30,) * 6
    draws = fine.numba.njit(fine.draw_mixed)(0, 1, np.arange(10_000)) / 2**30
    assert abs(draws.mean(0) - 1 / 2).max() < 5 * (1 / 12 / 10_000) ** 0.5
    assert (draws.min(0) < 0.002).all()
    assert (draws.max(0) > 0.998).all()
    assert draws.max() < 1


def test_a_word_changed_by_1_changes_half_of_the_bits() -> None:
    for place in range(4):
        changed = 0
        for sample in range(200):
            words = [7, 3, sample, 2]
            before = chained(*words)
            words[place] += 1
            changed += (before ^ chained(*words)).bit_count()
        assert 31 < changed / 200 < 33


@pytest.mark.parametrize(("us", "verdict"), [(0.1, "PASS"), (0.5, "FAIL")])
def test_costs_are_judged_by_their_ratio(us: float, verdict: str) -> None:
    fresh = load(LESSON)
    with patch.object(fresh, "print0", Mock()):
        fresh.check_costs({"a Generator": 19, "the mix": us})
    assert [row["verdict"] for row in fresh.ledger] == [verdict]


PYTHON = "sequences on n ranks, not compiled"
TRIES = "sequences in 2 tries, seeded in Python"
IN_PYTHON = "sequences on n ranks, seeded in Python"
COMPILED = "sequences on n ranks, seeded in compiled code"
THIRD = "sequences of 2 threads, seeded in a third"
MIXED = "crops of epoch 1 drawn before, mixed"
RANKS = "n ranks' crops that one rank draws, mixed"
THREADS = "crops of 2 threads unlike one thread's, mixed"

LINES = {
    "Python is seeded by rank": (
        "    set_seed(SEED)\n    claim",
        "    set_seed(SEED + RANK)\n    claim",
        {PYTHON},
    ),
    "the tries are seeded in compiled code": (
        "        set_seed(SEED)\n        tries",
        "        compiled_seed(SEED)\n        tries",
        {TRIES, IN_PYTHON},
    ),
    "all ranks seed by rank": (
        "    compiled_seed(SEED)\n    claim",
        "    compiled_seed(SEED + RANK)\n    claim",
        {COMPILED},
    ),
    "the thread that was seeded draws": (
        "another.submit(draw, N).result().tobytes()",
        "draw(N).tobytes()",
        {THIRD},
    ),
    "the epoch is not mixed in": (
        "in (seed, epoch, samples_B[i], k):",
        "in (seed, samples_B[i], k):",
        {MIXED},
    ),
    "the mix counts in place of the sample, as in Try": (
        "in (seed, epoch, samples_B[i], k):",
        "in (seed, epoch, i, k):",
        {RANKS, THREADS},
    ),
}
CLOCK = {
    "the mix is drawn from Generators": (
        '"the mix": lambda epoch: mixed(SEED, epoch, samples_N)',
        '"the mix": by_generators',
        {"time: a Generator / the mix"},
    ),
}
BREAKS = [Breaks(LINES, changes=[NO_COSTS], deadline=120), Breaks(CLOCK, clock=True)]
