"""The map of model parallelism: its parts on sizes of every kind, each claim against a break."""

import copy
import functools
import os
import sys
from collections.abc import Callable
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


SHORT = ("EPOCHS = 6 * MLPS // 10\n", "EPOCHS = 1\n")
LEARNED = [f"{way}: accuracy on new digits" for way in ("pipeline", "tensor")]
QUICK = [SHORT, *((f'"{claim}", 0.9,', f'"{claim}", 0.0,') for claim in LEARNED)]


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [5, 8])  # they share 12 layers unevenly
def test_the_lesson_holds_on_other_world_sizes(ranks: int) -> None:
    play(LESSON, ranks, *QUICK, deadline=200).expect(set())


def with_ranks(ranks: int) -> object:
    """The lesson as one of so many ranks has it, of which the others are not there."""
    os.environ["WORLD_SIZE"] = str(ranks)
    sys.argv = [LESSON]
    return load(LESSON)


def refusal(ranks: int) -> str:
    with pytest.raises(SystemExit) as end:
        with_ranks(ranks).main()
    return end.value.code


def test_it_refuses_more_ranks_than_were_tried() -> None:
    (said,) = run(refusal, 1, 65, group=False)
    assert "takes at most 64 ranks, for no deeper model was tried; got 65; set --nproc" in said


def learned(ranks: int) -> tuple[int, float]:
    """Of the model that so many ranks would share, trained here: its layers, its accuracy."""
    lesson = with_ranks(ranks)
    cpu = torch.device("cpu")
    model = lesson.train(lesson.one_process_step, lesson.untrained(cpu), cpu)
    x, target = lesson.digits(cpu)
    with torch.no_grad():
        right = lesson.accuracy(model(x[lesson.TRAINED_ON :]), target[lesson.TRAINED_ON :])
    return lesson.LAYERS, right


@pytest.mark.deep
@pytest.mark.parametrize(("ranks", "layers"), [(12, 12), (13, 13), (16, 16)])
def test_every_rank_gets_a_layer_and_the_deeper_model_learns(ranks: int, layers: int) -> None:
    ((there_are, right),) = run(learned, 1, ranks, group=False, deadline=120)
    assert there_are == layers
    assert right >= 0.9


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 6))
def test_parts_on_devices_equal_one_model(devices: int) -> None:
    lesson = here()
    cpu = torch.device("cpu")
    oracle = lesson.untrained(cpu)
    model = lesson.OnDevices(copy.deepcopy(oracle), [cpu] * devices)
    x = torch.randn(7, 64, dtype=torch.float64)
    model(x).square().sum().backward()
    oracle(x).square().sum().backward()
    for ours, expected in zip(model.parameters(), oracle.parameters(), strict=True):
        assert torch.equal(ours.grad, expected.grad)


def gpipe_log(lesson: object, stage: int, p: int, m: int) -> list:
    """What a stage does in GPipe: passes and messages."""
    log = []
    for kind, before, after in ("F", stage - 1, stage + 1), ("B", stage + 1, stage - 1):
        for _ in range(m):
            if 0 <= before < p:
                log.append(lesson.Event("recv", 1, before))
            log.append(lesson.Event(kind))
            if 0 <= after < p:
                log.append(lesson.Event("send", 1, after))
    return log


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9))
def test_replay_finds_the_bubble(p: int, m: int) -> None:
    logs = [gpipe_log(here(), stage, p, m) for stage in range(p)]
    assert here().replay(logs) == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)


def test_a_message_that_was_there_already_sets_no_clock_back() -> None:
    """Rank 1 works through slots 0 and 1; what came at the end of slot 0 is read after them."""
    forward = here().Event("F")
    backward = here().Event("B")
    send = here().Event("send", 1, 1)
    receive = here().Event("recv", 1, 0)
    idle = here().replay([[forward, send], [backward, receive, forward]])
    assert idle == pytest.approx(1 - 4 / 6)  # rank 0 works in 1 of 3 slots, rank 1 in all


def evaluated_on_new_digits() -> list[bool]:
    """For each accuracy that this rank claims: is it that of the outputs for new digits?"""
    lesson, cpu, found = load(LESSON), torch.device("cpu"), []
    x, target = (of_all[lesson.TRAINED_ON :] for of_all in lesson.digits(cpu))
    model = lesson.untrained(cpu)

    def accuracy(y: torch.Tensor, targets: torch.Tensor) -> float:
        found.append(torch.equal(targets, target) and torch.allclose(y, model(x)))
        return 1.0

    lesson.accuracy = accuracy
    lesson.claim = lambda *_, **__: None
    lesson.train = lambda step, model, device: model
    lesson.check_tensor(cpu, model)
    lesson.pipelined_accuracy(lesson.part_of(model, lesson.RANK, lesson.WORLD_SIZE), cpu)
    return found


def test_accuracy_is_that_on_digits_which_the_training_did_not_see() -> None:
    assert run(evaluated_on_new_digits, 2) == [[True], [True, True]]


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


def largest(error: Callable, cases: list[tuple]) -> float:
    """The largest error of these cases, one after another on the same ranks."""
    return max(error(*case) for case in cases)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@settings(max_examples=2, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 9)), min_size=4, max_size=9))
def test_a_split_mlp_equals_the_whole_one_uneven_shares_too(n: int, cases: list) -> None:
    assert max(run(largest, n, mlp_error, cases)) < CLOSE


def step_error(rows: int, m: int) -> float:
    """How far this stage's gradients after one micro-batched step are from one process's."""
    lesson = load(LESSON)
    lesson.B = rows
    cpu = torch.device("cpu")
    oracle = lesson.untrained(cpu)
    x, target = lesson.digits(cpu)
    stage = copy.deepcopy(lesson.part_of(oracle, dist.get_rank(), dist.get_world_size()))
    lesson.micro_batch_step(stage, x[:rows], target[:rows], m)
    lesson.one_process_step(oracle, x[:rows], target[:rows])
    expected = lesson.part_of(oracle, dist.get_rank(), dist.get_world_size())
    pairs = zip(stage.parameters(), expected.parameters(), strict=True)
    return max((a.grad - b.grad).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@settings(max_examples=2, deadline=None)
@given(st.lists(st.tuples(st.integers(7, 20), st.integers(1, 7)), min_size=4, max_size=9))
def test_micro_batches_of_any_size_add_up_to_the_batch(n: int, cases: list) -> None:
    assert max(run(largest, n, step_error, cases)) < CLOSE


ERROR = ": error of the trained weights"
HANDED = "tensor: elements handed to all-reduces per step"
RANK_1 = {f"{name}: elements that rank 1 sends per step" for name in ("naive", "micro-batches")}
TOTAL = {f"{name}: elements that all send per step" for name in ("naive", "micro-batches")}
LINES = {
    "f is missing (Try)": (
        [
            (
                "F.linear(CopyToRanks.apply(x_BD), weight_eD, bias_e)",
                "F.linear(x_BD, weight_eD, bias_e)",
            )
        ],
        {"tensor" + ERROR, "MLP: all-reduces backward"} | {HANDED},
    ),
    "micro-batches count like batches (Try)": (
        [('reduction="sum") / B', 'reduction="sum") / len(y_bC)')],
        {"micro-batches" + ERROR},
    ),
    "g is missing": (
        [("ReduceFromRanks.apply(F.linear(x_Be, weight_De))", "F.linear(x_Be, weight_De)")],
        {"tensor" + ERROR, "MLP: all-reduces forward"} | {HANDED},
    ),
    "g sums backward too": (
        [("        return grad, None\n", "        return all_reduce(grad), None\n")],
        {"tensor" + ERROR, "MLP: all-reduces backward"} | {HANDED},
    ),
    "the bias is added n times": (
        [
            (
                "ReduceFromRanks.apply(F.linear(x_Be, weight_De)) + bias_D",
                "ReduceFromRanks.apply(F.linear(x_Be, weight_De, bias_D))",
            )
        ],
        {"tensor" + ERROR},
    ),
    "a rank holds twice its share, half of it zeros": (
        [
            ("my_share(whole.up.weight, 0)", "padded(whole.up.weight, 0)"),
            ("my_share(whole.up.bias, 0)", "padded(whole.up.bias, 0)"),
            ("my_share(whole.down.weight, 1)", "padded(whole.down.weight, 1)"),
            (
                "def my_share(",
                "def padded(x: torch.Tensor, dim: int) -> torch.Tensor:\n"
                "    mine = my_share(x, dim)\n"
                "    return torch.cat([mine, torch.zeros_like(mine)], dim)\n\n\n"
                "def my_share(",
            ),
        ],
        {"MLP: elements held of its weights / D"},
    ),
    "a message is doubled": (
        [("send(y.detach(), RANK + 1)", "send(2 * y.detach(), RANK + 1)")],
        {"naive" + ERROR, "micro-batches" + ERROR},
    ),
    "activations go twice": (
        [
            ("send(y.detach(), RANK + 1)", "send(torch.cat([y.detach()] * 2), RANK + 1)"),
            ("buffer = x_bI.new_empty(len(x_bI), D)", "buffer = x_bI.new_empty(2 * len(x_bI), D)"),
            (
                "x = receive(buffer, RANK - 1).requires_grad_()",
                "x = receive(buffer, RANK - 1)[: len(x_bI)].requires_grad_()",
            ),
        ],
        TOTAL,  # of two ranks, rank 1 sends no activations
    ),
    "the gradient goes twice": (
        [
            ("send(x.grad, RANK - 1)", "send(torch.cat([x.grad] * 2), RANK - 1)"),
            (
                "receive(torch.empty_like(y), RANK + 1)",
                "receive(torch.cat([y.detach()] * 2), RANK + 1)[: len(y)]",
            ),
        ],
        RANK_1 | TOTAL,
    ),
    "the gradient does not cross the devices": (
        [("x = part(x.to(device))", "x = part(x.to(device).detach())")],
        {"two devices" + ERROR},
    ),
    "one micro-batch at a time": (
        [
            (
                "    passes = [forward_stage(stage, x_bI) for x_bI in x_BI.chunk(m)]\n"
                "    for (x, y), target_b in zip(passes, targets, strict=True):\n",
                "    for x_bI, target_b in zip(x_BI.chunk(m), targets, strict=True):\n"
                "        x, y = forward_stage(stage, x_bI)\n",
            )
        ],
        {"micro-batches: share of slots idle"},
    ),
    "one batch is one micro-batch": (
        [("m: int = M", "m: int = 1")],
        {"micro-batches: share of slots idle"},
    ),
}
UNTRAINED = {
    "an untrained model": (
        [SHORT, ("        optimizer.step()\n", "")],
        {*LEARNED},
    ),
}
BREAKS = [Breaks(LINES, changes=QUICK), Breaks(UNTRAINED)]

ON_GPUS = OnGpus(
    changes=[
        ("EPOCHS = 6 * MLPS // 10", "EPOCHS = 2"),
        ("width: int = 8192", "width: int = 256"),
    ]
)


def test_an_epoch_is_the_1500_training_digits_and_none_of_the_new_ones() -> None:
    cpu = torch.device("cpu")
    drawn = list(here().batches(cpu, epochs=2))
    assert [len(x_BI) for x_BI, _ in drawn] == [250] * 12
    for of_all, batches in zip(here().digits(cpu), zip(*drawn, strict=True), strict=True):
        assert torch.equal(torch.cat(batches), torch.cat([of_all[:1500]] * 2))


def test_training_drops_the_gradients_of_the_step_before() -> None:
    """A gradient of 1 in three steps with momentum 0.9 makes steps of 1, 1.9 and 2.71."""
    lesson = load(LESSON)
    lesson.batches = lambda device, epochs: [(None, None)] * epochs
    model = nn.Linear(1, 1, bias=False).double()
    before = model.weight.item()
    lesson.train(lambda model, *_: model.weight.sum().backward(), model, None, epochs=3)
    assert before - model.weight.item() == pytest.approx(0.05 * (1 + 1.9 + 2.71))


def test_one_process_drives_two_devices() -> None:
    lesson, cpu, driven = load(LESSON), torch.device("cpu"), []
    lesson.OnDevices = lambda layers, devices: driven.append(devices)
    lesson.train = lesson.claim = Mock()
    lesson.weights_error = lambda *_: 0.0
    lesson.check_one_process(cpu, None)
    assert driven == [[cpu, cpu]]


def test_a_pass_is_logged_each_way() -> None:
    part, log = nn.Linear(2, 2), []
    here().log_passes(part, log)
    part(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert [event.operation for event in log] == ["F", "B"]


def test_the_error_is_that_of_the_worst_parameter() -> None:
    expected = nn.Linear(2, 2)
    for parameter in expected.parameters():
        nn.init.constant_(parameter, 4.0)
    ours = copy.deepcopy(expected)
    ours.bias.data[0] = 5.0
    assert here().weights_error(ours, expected) == pytest.approx(0.25)


@pytest.mark.parametrize("way", ["send", "receive"])
def test_a_message_is_waited_for(way: str) -> None:
    work = Mock()
    started = patch.object(dist, "batch_isend_irecv", return_value=[work])
    with patch.object(dist, "P2POp"), started:
        getattr(here(), way)(torch.ones(2), 1)
    work.wait.assert_called_once()


def test_a_gpu_idles_while_the_other_one_computes() -> None:
    """A step takes 6 ms, and GPU 0's part alone 3."""
    two = 'torch.device("cuda", number) for number in (0, 1)'
    lesson = load(LESSON, (two, 'torch.device(name) for name in ("cpu", "cpu")'))
    worked = []

    def milliseconds(work: Callable) -> float:
        work()
        worked.append(work)
        return 3.0 * len(worked)

    lesson.milliseconds = milliseconds
    assert lesson.idle_of_two_gpus(2, width=4) == pytest.approx(1 / 2)
    assert len(worked) == 2


def counted_by_traffic() -> list[tuple]:
    lesson = load(LESSON)
    rank = dist.get_rank()
    with lesson.Traffic() as traffic:
        (lesson.send if rank == 0 else lesson.receive)(torch.ones(6), 1 - rank)
        lesson.all_reduce(torch.ones(5))
    lesson.all_reduce(torch.ones(7))  # not in the block
    return [*traffic, ("in all", traffic.elements("all_reduce"))]


def test_traffic_is_what_is_handed_over_in_its_block() -> None:
    first, second = run(counted_by_traffic, 2)
    assert first == [("send", 6, 1), ("all_reduce", 5, None), ("in all", 5)]
    assert second == [("recv", 6, 0), ("all_reduce", 5, None), ("in all", 5)]
