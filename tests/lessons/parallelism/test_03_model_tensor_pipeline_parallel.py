"""Both cuts of a model on sizes of every kind against one process, each claim against a break."""

import copy
import functools
import os
import sys
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from course.playing import load, play
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "parallelism/03_model_tensor_pipeline_parallel.py"
CLOSE = 1e-11


@functools.cache
def here():
    return load(LESSON)


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [5, 8])  # they share 16 MLPs unevenly, and evenly
def test_the_lesson_holds_on_other_world_sizes(ranks: int) -> None:
    play(LESSON, ranks, deadline=200).expect(set())


def refusal(ranks: int) -> str:
    os.environ["WORLD_SIZE"] = str(ranks)
    sys.argv = [LESSON]
    with pytest.raises(SystemExit) as end:
        load(LESSON).main()
    return end.value.code


def test_it_refuses_more_ranks_than_mlps() -> None:
    (said,) = run(refusal, 1, 17, group=False)
    assert "takes at most 16 ranks, one per MLP; got 17; set --nproc-per-node to 16" in said


@pytest.mark.parametrize("ranks", range(1, 17))
def test_the_stages_are_the_stack_in_order_and_none_is_empty(ranks: int) -> None:
    lesson = load(LESSON)
    model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(lesson.MLPS)])
    lesson.WORLD_SIZE = ranks
    found = []
    for rank in range(ranks):
        lesson.RANK = rank
        stage = lesson.Stage(model).layers
        assert len(stage) in (16 // ranks, -(-16 // ranks))
        found += [layer.weight.item() for layer in stage]
    assert found == [layer.weight.item() for layer in model]


def mlp_error(seed: int, rows: int) -> float:
    """How far a split MLP is from the whole one: output, and all gradients."""
    lesson = load(LESSON)
    torch.manual_seed(seed)
    whole = lesson.MLP().double()
    x = torch.randn(rows, lesson.D, dtype=torch.float64, requires_grad=True)
    mine = x.detach().clone().requires_grad_()
    part = lesson.ParallelMLP(whole)
    y = whole(x)
    ours = part(mine)
    y.backward(y.detach().sin())
    ours.backward(y.detach().sin())
    share = lesson.my_share
    pairs = [(ours, y), (mine.grad, x.grad)]
    pairs.append((part.up_weight.grad, share(whole.up.weight.grad, 0)))
    pairs.append((part.up_bias.grad, share(whole.up.bias.grad, 0)))
    pairs.append((part.down_weight.grad, share(whole.down.weight.grad, 1)))
    pairs.append((part.down_bias.grad, whole.down.bias.grad))
    return max((a - b).abs().max().item() for a, b in pairs)


def largest(error: object, cases: list[tuple]) -> float:
    """The largest error of these cases, one after another on the same ranks."""
    return max(error(*case) for case in cases)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@settings(max_examples=2, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 9)), min_size=4, max_size=9))
def test_a_split_mlp_equals_the_whole_one_uneven_shares_too(n: int, cases: list) -> None:
    assert max(run(largest, n, mlp_error, cases)) < CLOSE


def step_error(rows: int, m: int) -> float:
    """How far this stage's gradients after one micro-batched step are from one process's."""
    lesson = load(LESSON, ("B, D = 100, 32\n", f"B, D = {rows}, 32\n"))
    torch.manual_seed(rows)
    whole = nn.Sequential(*[lesson.MLP() for _ in range(lesson.MLPS)]).double()
    x = torch.randn(rows, 32, dtype=torch.float64)
    stage = lesson.Stage(whole)
    lesson.pipeline_step(stage, x, x.sin(), m)
    lesson.step(whole, x, x.sin())
    first, end = (r * 16 // dist.get_world_size() for r in (lesson.RANK, lesson.RANK + 1))
    pairs = zip(stage.parameters(), whole[first:end].parameters(), strict=True)
    return max((a.grad - b.grad).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@settings(max_examples=2, deadline=None)
@given(st.lists(st.tuples(st.integers(7, 20), st.integers(1, 7)), min_size=4, max_size=9))
def test_micro_batches_of_any_size_add_up_to_the_batch(n: int, cases: list) -> None:
    assert max(run(largest, n, step_error, cases)) < CLOSE


def slots_of(counts: list[int]) -> list[int]:
    """The slots gone by on this stage at the end of a step, for each number of micro-batches."""
    lesson = load(LESSON)
    torch.manual_seed(0)
    model = nn.Sequential(*[lesson.MLP() for _ in range(lesson.MLPS)]).double()
    x = torch.randn(lesson.B, lesson.D, dtype=torch.float64)
    found = []
    for m in counts:
        stage = lesson.ClockedStage(model)
        lesson.pipeline_step(stage, x, x, m)
        found.append(stage.slots)
    return found


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_a_step_takes_the_slots_of_the_pictures(p: int) -> None:
    """Stage 0 ends last, after 3 (m+p-1) slots; each one before it, as many backward passes."""
    counts = [1, 2, 4, 10]
    for stage, slots in enumerate(run(slots_of, p, counts)):
        assert slots == [3 * (m + p - 1) - 2 * stage for m in counts]


def a_late_receive() -> int:
    """The slots of a stage that reads in slot 5 what was sent in slot 2, or the other way round."""
    lesson = load(LESSON)
    stage = lesson.ClockedStage(nn.Sequential(*[nn.Identity() for _ in range(16)]))
    stage.slots = 2 if lesson.RANK == 0 else 5
    for sender in (0, 1):
        if sender == lesson.RANK:
            stage.send(torch.ones(1), 1 - sender)
        else:
            stage.receive(torch.ones(1), sender)
    return stage.slots


def test_a_message_that_was_there_already_sets_no_clock_back() -> None:
    assert run(a_late_receive, 2) == [5, 5]


@pytest.mark.parametrize("way", ["send", "receive"])
def test_a_message_is_waited_for(way: str) -> None:
    work = Mock()
    started = patch.object(dist, "batch_isend_irecv", return_value=[work])
    stage = here().Stage(nn.Sequential(*[nn.Identity() for _ in range(16)]))
    with patch.object(dist, "P2POp"), started:
        getattr(stage, way)(torch.ones(2), 1)
    work.wait.assert_called_once()


def counted_here() -> list:
    lesson = load(LESSON)
    rank = dist.get_rank()
    stage = lesson.ClockedStage(nn.Sequential(*[nn.Identity() for _ in range(16)]))
    with lesson.Counted() as counted:
        (stage.send if rank == 0 else stage.receive)(torch.ones(6), 1 - rank)
        lesson.all_reduce(torch.ones(5))
    lesson.all_reduce(torch.ones(7))  # not in the block
    return [counted.elements["send"], counted.elements["allreduce_"]]


def test_counted_is_what_is_handed_over_in_its_block_without_clocks() -> None:
    assert run(counted_here, 2) == [[[6], [5]], [[], [5]]]


def test_training_drops_the_gradients_of_the_step_before() -> None:
    lesson = load(LESSON)
    model = nn.Linear(1, 1, bias=False).double()
    before = model.weight.item()
    case = Mock(x=None, target=None)
    lesson.Case.train(case, model, lambda model, *_: model.weight.sum().backward())
    assert before - model.weight.item() == pytest.approx(lesson.STEPS * lesson.LEARNING_RATE)


def test_all_weights_are_compared() -> None:
    expected = nn.Linear(2, 2)
    for parameter in expected.parameters():
        nn.init.constant_(parameter, 4.0)
    ours = copy.deepcopy(expected)
    ours.bias.data[0] = 5.0
    error = here().relative_error(here().weights(ours), here().weights(expected))
    assert error == pytest.approx(0.25)


OUTPUT = "tensor: error of the untrained model's output"
FORWARD = "tensor: all-reduces per MLP, forward"
IN_A_STEP = "tensor: all-reduces per MLP, in a training step"
HANDED = "tensor: elements handed to all-reduces per step"
TRAINED = "tensor: error of the trained weights"
LOSS = "tensor: loss after training / before"
PIPELINE = "pipeline: error of the trained weights"
CROSS = {f"{name}: elements across each cut per step" for name in ("naive", "micro-batches")}
IDLE = {f"{name}: share of slots idle" for name in ("naive", "micro-batches")}
PADDED = """\
def padded(x: torch.Tensor, dim: int) -> torch.Tensor:
    mine = my_share(x, dim)
    return torch.cat([mine, torch.zeros_like(mine)], dim)


def my_share("""
LINES = {
    "f is missing (Try)": (
        "F.linear(CopyToRanks.apply(x_BD), self.up_weight",
        "F.linear(x_BD, self.up_weight",
        {IN_A_STEP, HANDED, TRAINED},
    ),
    "micro-batches count like batches (Try)": (
        ".square().sum() / B",
        ".square().sum() / len(y_bD)",
        {PIPELINE},
    ),
    "g is missing": (
        "ReduceFromRanks.apply(F.linear(hidden_Be, self.down_weight))",
        "F.linear(hidden_Be, self.down_weight)",
        {OUTPUT, FORWARD, IN_A_STEP, HANDED, TRAINED},
    ),
    "g sums backward too": (
        "        return grad, None\n",
        "        return all_reduce(grad), None\n",
        {IN_A_STEP, HANDED, TRAINED},
    ),
    "the bias is added n times": (
        "return x_BD + y_BD + self.down_bias",
        "return x_BD + y_BD + WORLD_SIZE * self.down_bias",
        {OUTPUT, TRAINED},
    ),
    "a rank holds twice its share, half of it zeros": (
        [
            ("my_share(whole.up.weight, 0)", "padded(whole.up.weight, 0)"),
            ("my_share(whole.up.bias, 0)", "padded(whole.up.bias, 0)"),
            ("my_share(whole.down.weight, 1)", "padded(whole.down.weight, 1)"),
            ("def my_share(", PADDED),
        ],
        {"tensor: parameters that a rank holds"},
    ),
    "nothing is learned": (
        "            optimizer.step()\n",
        "",
        {LOSS},
    ),
    "a message is doubled": (
        "stage.send(y.detach(), RANK + 1)",
        "stage.send(2 * y.detach(), RANK + 1)",
        {PIPELINE},
    ),
    "two stages hold the layer at the cut": (
        "end = (RANK + 1) * MLPS // WORLD_SIZE",
        "end = (RANK + 1) * MLPS // WORLD_SIZE + (RANK < LAST)",
        {PIPELINE, "pipeline: parameters held by all ranks"},
    ),
    "activations go twice": (
        [
            ("stage.send(y.detach(), RANK + 1)", "stage.send(torch.cat([y.detach()] * 2), 1)"),
            (
                "x = stage.receive(torch.empty_like(x), RANK - 1).requires_grad_()",
                "x = stage.receive(torch.cat([x, x]).detach(), 0)[: len(x)].requires_grad_()",
            ),
        ],
        CROSS,
    ),
    "the gradient goes twice": (
        [
            ("stage.send(x.grad, RANK - 1)", "stage.send(torch.cat([x.grad] * 2), 0)"),
            (
                "grad = stage.receive(torch.empty_like(y), RANK + 1)",
                "grad = stage.receive(torch.cat([y.detach()] * 2), 1)[: len(y)]",
            ),
        ],
        CROSS,
    ),
    "one micro-batch at a time": (
        [
            ("    passes = []\n", "    targets = list(target_BD.chunk(m))\n"),
            (
                "        passes.append((x, y))\n"
                "    for (x, y), target_bD in zip(passes, target_BD.chunk(m), strict=True):\n",
                "        target_bD = targets.pop(0)\n",
            ),
        ],
        {"micro-batches: share of slots idle"},
    ),
    "the batch is one micro-batch": (
        [
            ("for x in x_BD.chunk(m):", "for x in x_BD.chunk(1):"),
            ("zip(passes, target_BD.chunk(m), strict=True)", "zip(passes, [target_BD])"),
        ],
        {"micro-batches: messages across each cut per step", "micro-batches: share of slots idle"},
    ),
    "a message takes no clock along": (
        "self.slots = max(self.slots, slots.item())",
        "slots.item()",
        IDLE,
    ),
}
BREAKS = Breaks(LINES, alone=["nothing is learned"])

ON_GPUS = OnGpus(changes=[("torch.zeros(8192, 8192,", "torch.zeros(64, 64,")])


def test_on_gpus_the_sums_of_a_step_are_compared_with_its_messages() -> None:
    """On two GPUs, with a message of 2 ms and a sum of 3: 32 sums take 96 ms, 2 messages 4."""
    lesson = load(
        LESSON, ("torch.zeros(8192, 8192, dtype=torch.bfloat16, device=device)", "ones()")
    )
    lesson.ones = lambda: torch.ones(4)
    lesson.WORLD_SIZE, lesson.LAST = 2, 1
    times = [2.0, 3.0]
    lesson.median_ms = lambda work: times.pop(0)
    lesson.claim = Mock()
    with patch.object(dist, "P2POp"):
        lesson.measure_on_gpus(Mock(type="cuda"))
    (_, predicted, measured, sign), _ = lesson.claim.call_args
    assert (predicted, measured, sign) == (8, 24, ">=")
