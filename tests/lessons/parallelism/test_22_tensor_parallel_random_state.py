"""What ranks draw alike and apart, at first and in training; broken lines."""

import pytest
import torch
import torch.distributed as dist

from course.playing import Lazily, load
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "parallelism/22_tensor_parallel_random_state.py"
lesson = Lazily(LESSON)
CPU = torch.device("cpu")


def drawn() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What a rank draws from each of its generators, in the order of a training step."""
    changed = load(LESSON)
    split = changed.seed_generators(5, CPU)
    part = changed.Part(split)
    mask_Te, mask_TD = changed.masks(split)
    return [part.adapter.detach(), mask_TD], [part.up.detach(), part.down.detach(), mask_Te]


def test_copied_is_drawn_alike_and_split_apart() -> None:
    ranks = run(drawn, 3)
    for copied, split in ranks[1:]:
        assert all(map(torch.equal, copied, ranks[0][0]))
        for ours, theirs in zip(split, ranks[0][1], strict=True):
            assert (ours == theirs).float().mean() < 0.9


def measured_of_one_process() -> dict[str, float]:
    changed = load(LESSON)
    found = {}
    changed.claim = lambda text, predicted, measured, **_: found.update({text: measured})
    changed.check_one_process(CPU)
    return found


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_ranks_compute_what_one_process_does(n: int) -> None:
    for found in run(measured_of_one_process, n):
        assert max(found.values()) < 1e-13
        assert set(found) == {OUTPUT, GRADIENTS}


def dropped_in_training() -> list[torch.Tensor]:
    """What the dropout of copied activations leaves, in the order of the trainings' steps."""
    changed = load(LESSON)
    real = changed.dropout
    left = []

    def noted(x: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        y = real(x, generator)
        if generator is None:
            left.append(y.detach() != 0)
        return y

    changed.dropout = noted
    changed.claim = changed.print0 = lambda *given, **named: None
    changed.check_initial_values(CPU)
    return left


def test_masks_of_copied_activations_are_alike_in_every_training() -> None:
    """However the weights are drawn: no row tells it of copies that are drawn apart."""
    first, *others = run(dropped_in_training, 3)
    assert len(first) == 30
    for left in others:
        assert all(map(torch.equal, left, first))


def end_of_main() -> tuple[str, bool]:
    changed = load(LESSON)
    changed.sys.argv = [LESSON]
    changed.time.sleep = lambda seconds: None
    with pytest.raises(SystemExit) as end:
        changed.main()
    return str(end.value), dist.is_initialized()


def test_five_ranks_are_refused_before_any_collective() -> None:
    for text, initialized in run(end_of_main, 5, group=False):
        assert "share 384 hidden features evenly; got 5; set --nproc-per-node to 1, 2" in text
        assert not initialized


OUTPUT, GRADIENTS = (f"two generators: error of the {what}" for what in ("output", "gradients"))
DISTINCT = "two generators: distinct hidden features"
ADAPTERS = "two generators: places alike in two adapters"
DISTINCT_ALIKE = "split drawn alike: distinct hidden features"
DISTANCE = "copied drawn apart: distance after / before"
MASKS_APART = "split, drawn apart: places alike in two masks"
OUTPUTS_ALIKE = "copied, drawn alike: places alike in outputs"
DTENSOR = "DTensor, all seeded alike: places alike"

LINES = {
    "the second generator is seeded alike (Try)": (
        ("manual_seed(seed + 2718 + RANK)", "manual_seed(seed + 2718)"),
        {DISTINCT, MASKS_APART},
    ),
    "the mask after g is drawn apart (Try)": (
        ("        return dropout(y_TD)\n", "        return dropout(y_TD, self.split)\n"),
        {OUTPUT, GRADIENTS, OUTPUTS_ALIKE},
    ),
    "the adapter is drawn apart": (
        (
            "nn.init.normal_(self.adapter, std=STD)",
            "nn.init.normal_(self.adapter, std=STD, generator=split)",
        ),
        {OUTPUT, GRADIENTS, ADAPTERS},
    ),
    "f does not sum": (
        ("return all_reduce(grad, ctx.group), None", "return grad, None"),
        {GRADIENTS, ADAPTERS, DISTANCE},
    ),
    "g does not sum": (
        ("        return all_reduce(x, group)\n", "        return x.clone()\n"),
        {OUTPUT, OUTPUTS_ALIKE},
    ),
    "hidden activations have no mask": (
        (
            "dropout(F.gelu(F.linear(x_TD, self.up)), self.split)",
            "F.gelu(F.linear(x_TD, self.up))",
        ),
        {OUTPUT, GRADIENTS},
    ),
    "features that should be alike are drawn apart": (
        (
            "torch.Generator(device).manual_seed(2718))  # the mistake",
            "torch.Generator(device).manual_seed(2718 + RANK))  # the mistake",
        ),
        {DISTINCT_ALIKE},
    ),
    "copies that should be apart are drawn alike": (
        ("    torch.manual_seed(RANK)  # the mistake", "    torch.manual_seed(0)  # the mistake"),
        {DISTANCE},
    ),
    "DTensor's ranks have seeds of their own": (
        ("    torch.manual_seed(0)\n    with", "    torch.manual_seed(RANK)\n    with"),
        {DTENSOR},
    ),
}
BREAKS = Breaks(LINES, ranks=4, alone=("the second generator is seeded alike (Try)",))
PHILOX = "        check_dtensor(device)\n"
ON_GPUS = OnGpus(
    changes=[(f"        check_masks(device)\n{PHILOX}", "        check_masks(device)\n")]
)


@pytest.mark.parametrize("own", [False, True])
def test_dropout_drops_a_tenth_and_scales_the_rest(own: bool) -> None:
    """Two masks of a tenth kept agree as often as two of a tenth dropped: no row tells them apart.

    The bound of the share is five standard deviations.
    """
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1) if own else None
    dropped = lesson.dropout(torch.ones(100_000, dtype=torch.float64), generator)
    assert dropped.unique().tolist() == [0, 1 / 0.9]
    assert (dropped == 0).double().mean() == pytest.approx(0.1, abs=0.005)
