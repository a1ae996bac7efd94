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
NAMES = "wrong gradients, of a block's 9"
THEN = "error of the loss then"
DOUBLED = "gradients doubled: difference of losses"

NO_CURVES = ("        check_curves(whole)\n", "")
LINES = {
    "later stages repeat layers, as in Try": (
        "range(s * LAYERS // p, (s + 1) * LAYERS // p)",
        "range((s + 1) * LAYERS // p)",
        {LOSS, NOTHING, THREE},
    ),
    "micro-batches' losses are added": (
        "for loss in losses) / m / dp",
        "for loss in losses) / dp",
        {LOSS, COARSE, NOTHING, THREE, THEN},
    ),
    "a rank's tokens always count alike": (
        '    if mistake == "dp":\n',
        "    if True:\n",
        {LOSS, NOTHING, THREE},
    ),
    "no stage is seeded alike": ('    if mistake == "pp":\n', "    if False:\n", {THREE}),
    "no norm is forgotten": (
        'forgotten = "norm" if mistake == "tp" else None',
        "forgotten = None",
        {THREE, NAMES},
    ),
    "the norms' mistake is one of the loss as well": (
        "    tokens = (batch.next_BT != NONE).sum() / dp ",
        '    tokens = (batch.next_BT != NONE).sum() / dp * (2 if mistake == "tp" else 1) ',
        {THREE, NAMES, THEN},
    ),
}
CURVES = {
    "the doubled run has another learning rate": (
        "AdamW(stage.parameters(), lr=3e-3)",
        'AdamW(stage.parameters(), lr=1e-3 if mistake == "factor" else 3e-3)',
        {DOUBLED},
    ),
}
LEARNED = {
    "the norms' run has another learning rate": (
        "AdamW(stage.parameters(), lr=3e-3)",
        'AdamW(stage.parameters(), lr=3e-2 if mistake == "tp" else 3e-3)',
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
    hardware={LOSS: WHY, COARSE: WHY, NOTHING: WHY, THREE: WHY, NAMES: WHY, THEN: WHY},
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
