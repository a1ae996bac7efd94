"""Draws against NumPy's own, workers against broken lines."""

from unittest.mock import Mock, patch

import numpy as np
import pytest

from course.playing import Lazily, load
from tests.lessons.every import Breaks, OnGpus, Without, test_lesson  # noqa: F401

LESSON = "data-loading/05_random_numbers.py"
lesson = Lazily(LESSON)

NO_COSTS = ("    check_costs(gather_objects(measure_costs() if RANK == 0 else None)[0])\n", "")
NO_WORKERS = ("    check_workers()\n", "")
SIZES = {1: [NO_COSTS], 3: [NO_COSTS]}
ON_GPUS = OnGpus(changes=[NO_COSTS])
PILLOW = "    from PIL import Image\n"
PERCENT = "percent: a Generator / decoding a JPEG"
WITHOUT = {"Pillow": Without([(PILLOW, "    raise ImportError\n" + PILLOW)], {PERCENT})}


def as_crops(floats: np.ndarray) -> np.ndarray:
    return lesson.LEAST + np.floor(floats * lesson.CHOICES)


def test_every_choice_occurs() -> None:
    small = load(LESSON, ("HEIGHT = 160", "HEIGHT = 130"), ("WIDTH = 240", "WIDTH = 140"))
    draws = np.stack([small.draw_crop(0, 0, sample) for sample in range(5000)])
    assert (draws.min(0) == small.LEAST).all()
    assert (draws.max(0) == np.add(small.LEAST, small.CHOICES) - 1).all()


def test_a_crop_is_drawn_from_a_generator_of_the_three_numbers() -> None:
    for sample in (0, 9):
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([5, 2, sample])))
        assert (lesson.draw_crop(5, 2, sample) == as_crops(generator.random(6))).all()


def test_another_seed_draws_other_crops() -> None:
    crops = [lesson.draw_crop(seed, 1, sample) for seed in range(3) for sample in range(64)]
    assert len({crop.tobytes() for crop in crops}) == 3 * 64


def test_a_rank_draws_its_samples_in_turn() -> None:
    generator = np.random.default_rng((lesson.SEED, 1))
    expected = [as_crops(floats).astype(np.int64).tobytes() for floats in generator.random((21, 6))]
    crops = lesson.crops_in_turn(1, 3)
    assert list(crops) == list(range(1, 64, 3))
    assert list(crops.values()) == expected


def test_so_many_crops_are_possible() -> None:
    crops = np.prod(lesson.CHOICES)
    assert 4.55e9 < crops < 4.65e9
    assert 1 < crops / lesson.N**2 / 1e6 < 1.5  # seeds for each pair of equal crops


@pytest.mark.parametrize(("us", "verdict"), [(1700, "PASS"), (900, "FAIL"), (12_000, "FAIL")])
def test_costs_are_judged_by_their_ratio(us: float, verdict: str) -> None:
    fresh = load(LESSON)
    with patch.object(fresh, "print0", Mock()):
        fresh.check_costs({"decoding a JPEG": us, "a Generator": 19})
    assert [row["verdict"] for row in fresh.ledger] == [verdict]


STAY = "crops kept on n + 1 ranks"
BEFORE = "crops of epoch 1 drawn before"
AGAIN = "crops drawn before"
KEPT = f"{AGAIN}, epoch in the dataset"
ANEW = f"{AGAIN}, the same, workers forked anew"
SENT = f"{AGAIN}, epoch with the sample"

FUNCTIONS = {
    "the epoch is forgotten": (
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
}
WORKERS = {
    "the epoch is forgotten, as in Try": (
        "default_rng((seed, epoch, sample))",
        "default_rng((seed, sample))",
        {f"{BEFORE}, three numbers", ANEW, SENT},
    ),
    "workers never persist": (
        "persistent_workers=persistent",
        "persistent_workers=False",
        {KEPT},
    ),
    "workers always persist": ("persistent_workers=persistent", "persistent_workers=True", {ANEW}),
    "the sampler sends no epoch": ("yield self.epoch, sample", "yield 0, sample", {SENT}),
    "the dataset is told nothing": ("        told.epoch = epoch\n", "", {ANEW, SENT}),
}
CLOCK = {
    "a JPEG is opened and not decoded": (
        'Image.open(jpeg).convert("RGB")',
        "Image.open(jpeg)",
        {PERCENT},
    ),
    "a Generator is made four times": (
        '"a Generator": lambda sample: draw_crop(SEED, 0, sample)',
        '"a Generator": lambda sample: [draw_crop(0, e, sample) for e in range(4)]',
        {PERCENT},
    ),
}
BREAKS = [
    Breaks(FUNCTIONS, changes=[NO_COSTS, NO_WORKERS]),
    Breaks(WORKERS, changes=[NO_COSTS], deadline=120, alone=[*WORKERS]),
    Breaks(CLOCK, changes=[NO_WORKERS], clock=True),
]
