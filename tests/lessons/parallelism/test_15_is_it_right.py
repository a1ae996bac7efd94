"""Mistakes found in their run, here and in lesson 13's model; and claims against broken lines."""

from types import SimpleNamespace

import pytest
import torch

from course.playing import Lazily, load, play
from course.ranks import run
from tests.lessons.every import Breaks, test_lesson  # noqa: F401

LESSON = "parallelism/15_is_it_right.py"
lesson = Lazily(LESSON)

SINGLE = "error of a gradient, float32"
LOSS = "error of the loss, float32"
COARSE = "error of a gradient, bfloat16"
SHRINKS = "error of a gradient, float32 / float64"
STAYS = "norm's mistake: float32 / float64"
NOTHING = "no mistake: found in run"
DROPOUT = "dropout with equal seeds: found in run"
ALL = "dropout: wrong, of loss and 14 gradients"
NORM = "norm's gradient not reduced: found in run"
NAMES = "norm: wrong, of loss and 14 gradients"
GROUP = "loss over the wrong group: found in run"
ONE = "group: wrong, of loss and 14 gradients"
DOUBLED = "gradients doubled: difference of losses"

NO_CURVE = ("    check_curve(weights)\n", "")
RIGHT = {  # the program without a planted mistake is wrong then
    "there is no f, as in Try": (
        "F.rms_norm(CopyToRanks.apply(x_bTD, tp), (D,)",
        "F.rms_norm(x_bTD, (D,)",
        {SINGLE, SHRINKS, NOTHING, NAMES, GROUP, ONE},
    ),
    "each rank's dropout counts from 0": (
        'first = 0 if mistake == "dropout" else dp.rank() * len(x_bT)',
        "first = 0",
        {SINGLE, LOSS, SHRINKS, NOTHING, NORM, NAMES, GROUP, ONE},
    ),
    "gradients are not averaged over dp": (
        "gradient = mean_over(dp, w.grad)",
        "gradient = w.grad",
        {SINGLE, SHRINKS, NOTHING, NORM, NAMES, GROUP, ONE},
    ),
    "a rank reports its own loss": (
        "mean_over(group, loss.detach())",
        "loss.detach()",
        {LOSS, NOTHING, NORM, NAMES, GROUP},
    ),
    "norm's mistake is one of the loss as well": (
        "mean_over(group, loss.detach())",
        "mean_over(group, loss.detach()) * (tp.size() if mistake == 'norm' else 1)",
        {NAMES},
    ),
}
LINES = RIGHT | {
    "float64 is float32": (
        "double = largest_of_gradients(errors_in(torch.float64, weights))",
        "double = largest_of_gradients(errors_in(torch.float32, weights))",
        {SHRINKS},
    ),
    "bfloat16 is float32": ("errors_in(torch.bfloat16,", "errors_in(torch.float32,", {COARSE}),
    "in float64 there is no mistake": (
        'errors_in(torch.float64, weights, "norm")',
        "errors_in(torch.float64, weights)",
        {STAYS},
    ),
    "no dropout is seeded alike": ('if mistake == "dropout"', 'if mistake == ""', {DROPOUT, ALL}),
    "the loss has the right group": ('if mistake == "group"', 'if mistake == ""', {GROUP, ONE}),
    "the loss has groups of tp ranks, as in Try": (
        "neighbors(dp.size())",
        "neighbors(tp.size())",
        {GROUP},
    ),
    "no norm is forgotten": (' and mistake != "norm":', ":", {NORM, NAMES, STAYS}),
}
CURVE = {
    "the factor changes from step to step": (
        "factor * step[name]",
        "factor**number * step[name]",
        {DOUBLED},
    ),
}
FEW = ("    check_rounding(weights)\n", "")
FEWER = ("        check_search(weights)\n", "        pass\n")
BREAKS = [
    Breaks(LINES, ranks=4, changes=[NO_CURVE], deadline=150, alone=[*RIGHT]),
    Breaks(CURVE, ranks=4, changes=[FEW, FEWER], deadline=150),
]


def test_ranks_of_dp_have_other_sequences() -> None:
    """Else the wrong group's mean would be the right one; and each target is the next token."""
    x_BT, next_BT = lesson.batch_of(0)
    assert x_BT.shape == next_BT.shape == (lesson.B, lesson.T)
    assert (x_BT[:, 1:] == next_BT[:, :-1]).all()
    assert len({tuple(part.flatten().tolist()) for part in x_BT.chunk(4)}) == 4


def test_a_dropout_mask_belongs_to_a_sequence() -> None:
    """Whichever rank draws it; and no two sequences have the same."""
    ones_BTD = torch.ones(lesson.B, lesson.T, lesson.D)
    whole = lesson.dropout(ones_BTD, 0)
    half = lesson.dropout(ones_BTD[lesson.B // 2 :], lesson.B // 2)
    assert (whole[lesson.B // 2 :] == half).all()
    assert not (whole[0] == whole[1]).all()
    assert len(whole.unique()) == 2
    assert whole.min() == 0
    assert abs(whole.mean() - 1) < 0.02


def alone_with(others: list[str]) -> object:
    """The lesson with one other rank, which found these names wrong."""
    own = load(LESSON)

    def gather(out: list, mine: list[str]) -> None:
        out[:] = [mine, others]

    own.dist = SimpleNamespace(all_gather_object=gather)
    return own


def step_of(*values: float, dtype: torch.dtype = torch.float32) -> dict:
    names = ("loss", "norm", "head")
    pairs = zip(names, values, strict=True)
    return {name: torch.tensor([x, 1.0], dtype=dtype) for name, x in pairs}


def test_what_is_no_number_is_wrong_and_so_is_what_another_rank_found() -> None:
    """`max` loses a NaN, and so does a comparison with `>`."""
    own = alone_with([])
    right = step_of(1.0, 1.0, 1.0)
    assert own.wrong_in(right, right) == []
    assert own.wrong_in(step_of(1.0, float("nan"), 1.0), right) == ["norm"]
    assert own.wrong_in(step_of(1.0, 1.0, float("inf")), right) == ["head"]
    assert own.wrong_in(step_of(1.0, 1 + 2e-4, 1 + 1e-5), right) == ["norm"]
    assert alone_with(["head"]).wrong_in(step_of(1.0, 2.0, 1.0), right) == ["norm", "head"]


def test_the_bound_follows_from_the_dtype_and_is_closer_for_the_loss() -> None:
    own = alone_with([])
    right = step_of(1.0, 1.0, 1.0)
    assert own.wrong_in(step_of(1 + 1e-5, 1 + 1e-5, 1.0), right) == ["loss"]
    right = step_of(1.0, 1.0, 1.0, dtype=torch.float64)
    ours = step_of(1 + 1e-14, 1 + 1e-12, 1 + 1e-14, dtype=torch.float64)
    assert own.wrong_in(ours, right) == ["loss", "norm"]


def test_the_search_ends_at_the_first_run_that_is_wrong() -> None:
    own = alone_with([])
    right = step_of(1.0, 1.0, 1.0)
    computed = {"a": right, "b": step_of(1.0, 2.0, 1.0), "c": step_of(2.0, 2.0, 2.0)}
    tried = []

    def step_on_mesh(mesh: str) -> dict:
        tried.append(mesh)
        return computed[mesh]

    meshes = {"dp": "a", "tp": "b", "dp x tp": "c"}
    assert own.find_mistake(step_on_mesh, meshes, right) == ("tp", ["norm"])
    assert tried == ["a", "b"]
    assert own.find_mistake(step_on_mesh, {"dp": "a"}, right) == ("no run", [])


def found_in_lesson_13(forgotten: str) -> tuple[str, list[str]]:
    """What the search finds in lesson 13's program, in float64, if its plan lacks a line."""
    own = load(LESSON)
    gpt = load("parallelism/13_gpt_by_library.py")
    gpt.BLOCK = {name: style for name, style in gpt.BLOCK.items() if name != forgotten}
    torch.manual_seed(0)
    whole = gpt.LlamaModel().double()
    tokens_BT = torch.randint(gpt.V, (gpt.B, gpt.T + 1))
    loss = gpt.loss_of(whole(tokens_BT[:, :-1]), tokens_BT[:, 1:])
    loss.backward()
    right = {"loss": loss.detach()} | {name: w.grad for name, w in whole.named_parameters()}

    def step_on_mesh(mesh: object) -> dict:
        stage = gpt.put_on_mesh(whole, mesh)
        x_bT = gpt.share_of(tokens_BT, mesh)
        losses = gpt.compute_gradients(gpt.schedule_of(stage, mesh), mesh, x_bT)
        mean = gpt.mean_loss(losses, tokens_BT.device)
        step = {"loss": torch.tensor(mean, dtype=torch.float64)}
        return step | {name: w.grad.full_tensor() for name, w in stage.named_parameters()}

    shapes = {"dp": (1, 1, 4, 1), "tp": (1, 1, 1, 4), "dp x tp": (1, 1, 2, 2)}
    meshes = {name: gpt.make_mesh(shape, tokens_BT.device) for name, shape in shapes.items()}
    return own.find_mistake(step_on_mesh, meshes, right)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("forgotten", "found"),
    [
        ("nothing", ("no run", [])),
        ("norm1", ("tp", [f"blocks.{i}.norm1.weight" for i in range(4)])),
    ],
)
def test_the_search_finds_a_mistake_in_lesson_13(forgotten: str, found: tuple) -> None:
    """A norm of which tp knows nothing: wrong in the run of tp, by the norms' names."""
    assert run(found_in_lesson_13, 4, forgotten, deadline=90) == [found] * 4


@pytest.mark.night
@pytest.mark.timeout(400)
def test_it_holds_on_8_ranks() -> None:
    play(LESSON, 8, deadline=300).expect(set())
