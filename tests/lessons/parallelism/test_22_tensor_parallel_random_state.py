"""What ranks draw alike and apart, recomputation against none; broken lines."""

from contextlib import nullcontext

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


@pytest.mark.parametrize("error", [None, KeyError])
def test_afterwards_a_generator_goes_on_where_it_was(error: type[Exception] | None) -> None:
    generator = torch.Generator().manual_seed(5)
    state = generator.get_state()
    mask = torch.rand(9, generator=generator)
    due = torch.rand(9, generator=torch.Generator().set_state(generator.get_state()))
    with pytest.raises(error) if error else nullcontext(), lesson.back_at(state, generator):
        assert torch.equal(torch.rand(9, generator=generator), mask)
        if error:
            raise error
    assert torch.equal(torch.rand(9, generator=generator), due)


def gradients(recompute: bool) -> list[torch.Tensor]:
    """Of two layers with dropout, one of them recomputed or not; then what is drawn next."""
    changed = load(LESSON)
    split = changed.seed_generators(7, CPU)
    part = changed.Part(split)
    x_TD, grad_TD = changed.batch(CPU)
    x_TD.requires_grad_()

    def layer(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return part(x)

    y_TD = changed.recomputed(layer, x_TD, split) if recompute else part(x_TD)
    part(y_TD).backward(grad_TD)
    grads = [p.grad for p in part.parameters()]
    return [*grads, x_TD.grad, torch.rand(3), torch.rand(3, generator=split)]


def test_recomputed_layers_have_the_same_gradients_and_states() -> None:
    for plain, again in zip(run(gradients, 2, False), run(gradients, 2, True), strict=True):
        assert all(map(torch.equal, plain, again))


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
ADAPTERS = "two generators: places where adapters differ"
DISTINCT_ALIKE = "split drawn alike: distinct hidden features"
DISTANCE = "copied drawn apart: distance after / before"
MASKS_APART = "split, drawn apart: places alike in two masks"
OUTPUTS_ALIKE = "copied, drawn alike: places alike in outputs"
AGAIN_COPIED, AGAIN_SPLIT, AGAIN_KEPT = (
    f"recomputed, {what}: places alike in two masks" for what in ("copied", "split", "state kept")
)
DTENSOR = "DTensor, all seeded alike: places alike"

SPLIT_AGAIN = "lambda x: checkpoint(dropout, x, split, use_reentrant=False)"
COPIED_AGAIN = "lambda x: checkpoint(dropout, x, use_reentrant=False)"
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
    "torch's own generator is not put back": (
        (COPIED_AGAIN, COPIED_AGAIN.replace("=False)", "=False, preserve_rng_state=False)")),
        {AGAIN_COPIED},
    ),
    "the split mask is drawn from torch's own generator": (
        (SPLIT_AGAIN, SPLIT_AGAIN.replace("x, split,", "x,")),
        {AGAIN_SPLIT},
    ),
    "the second generator is not put back": (
        ("back_at(split.get_state(), split))", "contextlib.nullcontext())"),
        {AGAIN_KEPT},
    ),
    "DTensor's ranks have seeds of their own": (
        ("    torch.manual_seed(0)\n    with", "    torch.manual_seed(RANK)\n    with"),
        {DTENSOR},
    ),
}
BREAKS = Breaks(LINES, ranks=4, alone=("the second generator is seeded alike (Try)",))
RECOMPUTED = "    check_recomputation(device)\n"  # C++ saves a mask, and no place of it
PHILOX = "    check_dtensor(device)\n"
ON_GPUS = OnGpus(changes=[(f"{RECOMPUTED}{PHILOX}    finish()", "    finish()")])


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
