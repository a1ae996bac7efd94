"""Draws against NumPy's own, a mix against a published generator, claims against broken lines."""

from importlib.util import find_spec
from unittest.mock import Mock, patch

import numpy as np
import pytest

from course.playing import Lazily, load
from tests.lessons.every import Breaks, OnGpus, Without, test_lesson  # noqa: F401

LESSON = "data-loading/05_random_numbers.py"
pytestmark = pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
lesson = Lazily(LESSON)

NO_COSTS = ("    check_costs(measure_costs())\n", "")
SIZES = {1: [NO_COSTS], 3: [NO_COSTS]}
ON_GPUS = OnGpus(changes=[NO_COSTS])
NUMBA = "    import numba\n"
WITHOUT = {
    "numba": Without(
        [(NUMBA, "    raise ImportError\n" + NUMBA)], {"random numbers in compiled code"}
    )
}
NO_DEVICE = {"measure_costs": "what it times runs on the host"}


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
    seeded = lesson.numba.njit(lesson.draw_seeded)(np.array([3, 7]))
    assert (seeded[1] == as_crops(floats[0])).all()


def test_generators_are_those_of_the_three_numbers() -> None:
    draws = lesson.draw_by_generators(5, 2, [0, 9])
    for draw, sample in zip(draws, (0, 9), strict=True):
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([5, 2, sample])))
        assert (draw == as_crops(generator.random(6))).all()
    assert lesson.draw_by_generators(5, 2, []).shape == (0, 6)


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
            if seed == lesson.SEED:
                assert lesson.mixed_by_hand(epoch, sample) == draw


def test_a_word_changed_by_1_changes_half_of_the_bits() -> None:
    for place in range(4):
        changed = 0
        for sample in range(200):
            words = [7, 3, sample, 2]
            before = chained(*words)
            words[place] += 1
            changed += (before ^ chained(*words)).bit_count()
        assert 31 < changed / 200 < 33


def test_so_many_crops_are_possible() -> None:
    crops = np.prod(lesson.CHOICES)
    assert 4.55e9 < crops < 4.65e9
    assert 1 < crops / lesson.N**2 / 1e6 < 1.5  # seeds for each pair of equal crops


@pytest.mark.parametrize(
    ("way", "ns", "failed"),
    [
        ("", 0, []),
        ("a Generator per sample", 1900, ["time: a Generator per sample / the mix"]),
        ("np.random, seeded per sample", 400, ["time: seeded per sample / the mix"]),
        ("copying the crop's pixels", 300, ["time: the mix / copying the crop's pixels"]),
    ],
)
def test_costs_are_judged_by_their_ratios(way: str, ns: float, failed: list[str]) -> None:
    cost = {
        "a Generator per sample": 9000,
        "np.random, seeded per sample": 2000,
        "a mix of the four words": 100,
        "copying the crop's pixels": 3000,
    }
    if way:
        cost[way] = ns
    fresh = load(LESSON)
    with patch.object(fresh, "print0", Mock()):
        fresh.check_costs(cost)
    assert [row["claim"] for row in fresh.ledger if row["verdict"] == "FAIL"] == failed
    assert len(fresh.ledger) == 3


PYTHON = "sequences on n ranks, not compiled"
GENERATORS = "crops of epoch 1 drawn before, Generators"
TRIES = "sequences in 2 tries, seeded in Python"
IN_PYTHON = "sequences on n ranks, seeded in Python"
COMPILED = "sequences on n ranks, seeded in compiled code"
BY_RANK = "sequences on n ranks, seeded there by rank"
THIRD = "sequences of 2 threads, seeded in a third"
SAMPLE = "crops of epoch 1 drawn before, seed + sample"
SUM = "crops of epoch 1 drawn before, + epoch"
MIXED = "crops of epoch 1 drawn before, mixed"
HANDED = "numbers unlike Python's, Generator handed over"
EPOCH = "different crops of n ranks in an epoch, mixed"
RANKS = "numbers of n ranks unlike one process's, mixed"
THREADS = "numbers of 2 threads unlike one process's, mixed"

LINES = {
    "Python is seeded by rank": (
        "    set_seed(SEED)\n    claim",
        "    set_seed(SEED + RANK)\n    claim",
        {PYTHON},
    ),
    "Generators are seeded by the sum, as in Try": (
        "default_rng((seed, epoch, sample))\n",
        "default_rng(seed + epoch + sample)\n",
        {GENERATORS},
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
    "no rank seeds by rank": (
        "    compiled_seed(SEED + RANK)\n",
        "    compiled_seed(SEED)\n",
        {BY_RANK},
    ),
    "the thread that was seeded draws": (
        "another.submit(draw, N).result().tobytes()",
        "draw(N).tobytes()",
        {THIRD},
    ),
    "the sample's seed has the epoch": (
        "seeded(SEED + samples_N)",
        "seeded(SEED + 1000 * epoch + samples_N)",
        {SAMPLE},
    ),
    "the sum counts the epoch twice": (
        "seeded(SEED + epoch + samples_N)",
        "seeded(SEED + 2 * epoch + samples_N)",
        {SUM},
    ),
    "the epoch is not mixed in, as in Try": (
        "in (seed, epoch, samples_B[i], k):",
        "in (seed, samples_B[i], k):",
        {MIXED, RANKS, THREADS},
    ),
    "Python goes on with another Generator": (
        "draw_from(generator, N)])",
        "draw_from(np.random.default_rng(SEED), N)])",
        {HANDED},
    ),
    "ranks count their samples from 0": (
        "np.arange(RANK, N, WORLD_SIZE)",
        "np.arange(N // WORLD_SIZE)",
        {EPOCH, RANKS},
    ),
    "the mix counts in place of the sample": (
        "in (seed, epoch, samples_B[i], k):",
        "in (seed, epoch, i, k):",
        {EPOCH, RANKS, THREADS},
    ),
}
MIX = '"a mix of the four words": lambda: mixed(SEED, 0, samples_N)'
CLOCK = {
    "the mix is drawn from Generators": (
        MIX,
        '"a mix of the four words": lambda: draw_by_generators(SEED, 0, range(N))',
        {
            "time: a Generator per sample / the mix",
            "time: seeded per sample / the mix",
            "time: the mix / copying the crop's pixels",
        },
    ),
}
BREAKS = [Breaks(LINES, changes=[NO_COSTS], deadline=120), Breaks(CLOCK, clock=True)]
