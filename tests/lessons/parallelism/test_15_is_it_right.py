"""Mistakes found in their axis, and claims against broken lines."""

from types import SimpleNamespace

import pytest

from course.playing import Lazily, load, play
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "parallelism/15_is_it_right.py"
lesson = Lazily(LESSON)

LOSS = "error of the loss, float32"
COARSE = "error of the loss, bfloat16"
NOTHING = "axes found wrong, no mistake"
THREE = "mistakes found in their axis alone"
SAMPLER = "sampler's mistake: axes found wrong"
FACTOR = "factor: axes found wrong"
TWO = "dp x tp found wrong, no mistake"
TOGETHER = "dp x tp found wrong, sampler's mistake"
NAMES = "wrong gradients, of the model's 14"
THEN = "error of the loss then"
DOUBLED = "gradients doubled: difference of losses"

NO_CURVES = ("        check_curves(whole)\n", "")
LINES = {
    "later stages repeat layers, as in Try": (
        "mine = range(s * LAYERS // p, (s + 1) * LAYERS // p)",
        "mine = range((s + 1) * LAYERS // p)",
        {LOSS, NOTHING, THREE, SAMPLER},
    ),
    "micro-batches' losses are added": (
        "for loss in losses) / m\n",
        "for loss in losses)\n",
        {LOSS, NOTHING, THREE, SAMPLER, TWO, THEN},
    ),
    "a rank's tokens always count alike": (
        "    tokens = (batch.next_BT != NONE).sum()\n",
        "    tokens = (next_bT != NONE).sum() * dp\n",
        {LOSS, NOTHING, THREE, SAMPLER, TWO},
    ),
    "bfloat16 is none": ("copy.deepcopy(whole).bfloat16()", "whole", {COARSE}),
    "no stage is seeded alike": ('if mistake == "seed":', 'if mistake == "":', {THREE}),
    "no rank's tokens count alone": ('if mistake == "tokens":', 'if mistake == "":', {THREE}),
    "no norm is forgotten": (
        'if mistake == "norms":',
        'if mistake == "":',
        {THREE, NAMES},
    ),
    "the norms' mistake is one of the loss as well": (
        "return total.item() / dp",
        "return total.item() / dp * (2 if mistake == 'norms' else 1)",
        {THREE, THEN},
    ),
    "tp is outermost for the sampler, and there is no dp": (
        "share = RANK % dp",
        "share = 0",
        {SAMPLER},
    ),
    "the sampler reads as it should": (
        'if mistake == "sampler":',
        'if mistake == "":',
        {TOGETHER},
    ),
    "the factor is averaged away": (
        'average = mistake != "factor"',
        "average = True",
        {FACTOR},
    ),
}
CURVES = {
    "the doubled run has another learning rate": (
        "AdamW(stage.parameters(), lr=3e-3)",
        "AdamW(stage.parameters(), lr=1e-3 if mistake == 'factor' else 3e-3)",
        {DOUBLED},
    ),
}
LEARNED = {
    "the norms' run has another learning rate": (
        "AdamW(stage.parameters(), lr=3e-3)",
        "AdamW(stage.parameters(), lr=3e-2 if mistake == 'norms' else 3e-3)",
        {"norms' mistake / other batches, losses"},
    ),
}
FEW = ("        check_axes(whole)\n        check_names(whole)\n", "")
BREAKS = [
    Breaks(LINES, ranks=4, changes=[NO_CURVES], deadline=150, alone=[*LINES]),
    Breaks(CURVES, ranks=4, changes=[FEW], deadline=150),
    Breaks(LEARNED, ranks=4, changes=[FEW], deadline=150),
]

WHY = "the pretended GPUs' tensors say that they are on the CPU, and FSDP refuses a DTensor there"
ON_GPUS = OnGpus(
    changes=[
        ('        fully_shard(block, mesh=mesh["dp"])', "        pass"),
        ('    fully_shard(stage, mesh=mesh["dp"])\n', ""),
        (
            "{name: x.grad.full_tensor() for name, x in stage.named_parameters()}",
            "{n: x.grad.full_tensor() if hasattr(x, 'full_tensor') else x.grad for n, x in "
            "stage.named_parameters()}",
        ),
        NO_CURVES,
    ],
    hardware=dict.fromkeys(
        [LOSS, COARSE, NOTHING, THREE, SAMPLER, FACTOR, TWO, TOGETHER, NAMES, THEN], WHY
    ),
)


def test_losses_stand_on_unequally_many_tokens() -> None:
    """Else the mistake of dp would be none."""
    lesson.DEVICE = "cpu"
    batch = lesson.batch_of(0)
    counts = {int((part != lesson.NONE).sum()) for part in batch.next_BT.chunk(4)}
    assert len(counts) > 1
    assert (batch.next_BT[:, 0] != lesson.NONE).all()


def test_what_is_no_number_is_wrong_and_so_is_what_another_rank_found() -> None:
    """`max` loses a NaN, and so does a comparison with `>`."""
    own = load(LESSON)
    others = [False]
    own.dist = SimpleNamespace(all_gather_object=lambda out, mine: out.extend([mine, *others]))
    assert own.any_is_wrong(1e-7, float("nan"))
    assert own.any_is_wrong(1e-7, 2e-4, 0.0)
    assert not own.any_is_wrong(1e-7, 0.0)
    others = [True]
    assert own.any_is_wrong(1e-7, 0.0)


@pytest.mark.night
@pytest.mark.timeout(400)
def test_it_holds_on_8_ranks() -> None:
    play(LESSON, 8, deadline=300).expect(set())
