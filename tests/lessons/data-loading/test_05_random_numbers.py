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


def test_a_crop_is_drawn_from_a_generator_of_the_three_numbers() -> None:
    for sample in (0, 9):
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([5, 2, sample])))
        assert (lesson.draw_crop(5, 2, sample) == as_crops(generator.random(6))).all()


def test_a_rank_draws_its_samples_in_turn() -> None:
    generator = np.random.default_rng((lesson.SEED, 1))
    expected = [as_crops(floats).astype(np.int64).tobytes() for floats in generator.random((21, 6))]
    crops = lesson.crops_in_turn(1, 3)
    assert list(crops) == list(range(1, 64, 3))
    assert list(crops.values()) == expected


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
    ("thing", "us", "failed"),
    [
        ("", 0, []),
        ("decoding a JPEG", 900, ["percent: a Generator / decoding a JPEG"]),
        ("copying a crop", 10, ["time: a Generator / copying a crop"]),
        ("the mix", 0.5, ["time: a Generator / the mix"]),
    ],
)
def test_costs_are_judged_by_their_ratios(thing: str, us: float, failed: list[str]) -> None:
    cost = {"decoding a JPEG": 1700, "copying a crop": 4, "a Generator": 19, "the mix": 0.1}
    if thing:
        cost[thing] = us
    fresh = load(LESSON)
    with patch.object(fresh, "print0", Mock()):
        fresh.check_costs(cost)
    assert [row["claim"] for row in fresh.ledger if row["verdict"] == "FAIL"] == failed
    assert len(fresh.ledger) == 3


STAY = "crops kept on n + 1 ranks"
BEFORE = "crops of epoch 1 drawn before"
PYTHON = "sequences on n ranks, not compiled"
TRIES = "sequences in 2 tries, seeded in Python"
IN_PYTHON = "sequences on n ranks, seeded in Python"
COMPILED = "sequences on n ranks, seeded in compiled code"
THIRD = "sequences of 2 threads, seeded in a third"
MIXED = f"{BEFORE}, mixed"
EPOCH = "different crops of n ranks in an epoch, mixed"
THREADS = "crops of 2 threads unlike one thread's, mixed"

LINES = {
    "the epoch is forgotten, as in Try": (
        "default_rng((seed, epoch, sample))",
        "default_rng((seed, sample))",
        {f"{BEFORE}, three numbers"},
    ),
    "all ranks draw from the same Generator": (
        "default_rng((SEED, rank))",
        "default_rng(SEED)",
        {f"{STAY}, a Generator per rank"},
    ),
    "a crop depends on the number of ranks": (
        "return {s: draw_crop(SEED, epoch, s).tobytes() for",
        "return {s: draw_crop(ranks, epoch, s).tobytes() for",
        {f"{STAY}, three numbers"},
    ),
    "the sum counts the epoch twice": (
        "default_rng(SEED + epoch + sample)",
        "default_rng(SEED + 2 * epoch + sample)",
        {f"{BEFORE}, by the sum"},
    ),
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
        {EPOCH, THREADS},
    ),
}
CLOCK = {
    "the mix is drawn from Generators": (
        '"the mix": lambda: mixed(SEED, 0, samples_N)',
        '"the mix": lambda: [draw_crop(SEED, 0, sample) for sample in range(N)]',
        {"time: a Generator / the mix"},
    ),
    "a Generator costs what the mix does": (
        '"a Generator": lambda: [draw_crop(SEED, 0, sample) for sample in range(N)]',
        '"a Generator": lambda: mixed(SEED, 0, samples_N)',
        {"time: a Generator / the mix", "time: a Generator / copying a crop"},
    ),
    "a JPEG is opened and not decoded": (
        'Image.open(jpeg).convert("RGB") for',
        "Image.open(jpeg) for",
        {"percent: a Generator / decoding a JPEG"},
    ),
}
BREAKS = [Breaks(LINES, changes=[NO_COSTS], deadline=120), Breaks(CLOCK, clock=True)]
