"""The DDP lesson: a broken line fails the claims that guard it, and no others."""

import copy
import math
from collections.abc import Callable
from itertools import chain
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from course.playing import load, play
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "parallelism/01_data_parallelism_ddp.py"
HAND, DDP = "by hand: ", "DDP: "
BETWEEN, ERROR = "weights, difference between ranks", "weights, error against one process"
QUICK = (("EPOCHS = 10 ", "EPOCHS = 2 "), ('new digits", 0.95,', 'new digits", 0.0,'))

LINES = {
    "by hand: does not broadcast": (
        ("    broadcast_weights(model)\n    optimizer", "    optimizer"),
        {HAND + BETWEEN, HAND + ERROR},
    ),
    "by hand: does not divide": (
        ("        parameter.grad /= WORLD_SIZE ", "        pass "),
        {HAND + ERROR},
    ),
    "by hand: sums twice": (
        (
            "        dist.all_reduce(parameter.grad)\n",
            "        dist.all_reduce(parameter.grad)\n" * 2,
        ),
        {HAND + ERROR, HAND + "all-reduces per step"},
    ),
    "by hand: averages the parameters": (
        ("dist.all_reduce(parameter.grad)", "dist.all_reduce(parameter.data)"),
        {HAND + BETWEEN, HAND + ERROR},
    ),
    "DDP is left out": (
        ("train(wrap(ddp), share_of", "train(ddp, share_of"),
        {DDP + BETWEEN, DDP + ERROR},
    ),
    "no set_epoch": (
        ("        sampler.set_epoch(epoch)\n", ""),
        {"different orders in all epochs"},
    ),
    "every rank draws everything": (
        ("DistributedSampler(data, WORLD_SIZE, rank)", "DistributedSampler(data, 1, 0)"),
        {"samples drawn in one epoch, by all ranks"},
    ),
    "every rank draws the same share": (
        ("DistributedSampler(data, WORLD_SIZE, rank)", "DistributedSampler(data, WORLD_SIZE, 0)"),
        {"different samples among them"},
    ),
    "DDP counted over two steps": (
        ("        train(ddp, [mine])\n", "        train(ddp, [mine] * 2)\n"),
        {DDP + "all-reduces per step", DDP + "bytes per step"},
    ),
    "DDP has small buckets": (  # a first step would not show it
        (
            "DistributedDataParallel(model, ids)",
            "DistributedDataParallel(model, ids, bucket_cap_mb=0.1)",
        ),
        {DDP + "all-reduces per step"},
    ),
}
TOO_SHORT = {
    "a network that learns too little": (
        ("EPOCHS = 10 ", "EPOCHS = 1 "),
        {HAND + "accuracy on new digits", DDP + "accuracy on new digits"},
    ),
}
BREAKS = [Breaks(LINES, changes=QUICK), Breaks(TOO_SHORT)]

ON_GPUS = OnGpus(
    changes=[("EPOCHS = 10", "EPOCHS = 3"), ("repeats: int = 20", "repeats: int = 1")],
    ranks=(1, 2),  # to a GPU four ranks are here what two are: no rings, no stages, no mesh
)


@pytest.mark.deep
def test_more_ranks_than_samples_are_refused() -> None:
    played = play(LESSON, 1, ("GLOBAL_BATCH = 96 ", "GLOBAL_BATCH = 0 "))
    assert "at most 0 ranks, not 1" in str(played.code)


def sgd(model: nn.Module, batches: list[tuple]) -> None:
    """Train by the equations, v = 0.9 v + g and w = w - 0.1 v."""
    weights = list(model.parameters())
    velocities = [torch.zeros_like(weight) for weight in weights]
    for image_BD, label_B in batches:
        loss = cross_entropy(model(image_BD), label_B)
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, velocity, gradient in zip(weights, velocities, gradients, strict=True):
                weight -= 0.1 * velocity.mul_(0.9).add_(gradient)


def small_job() -> tuple[nn.Linear, nn.Linear, list[tuple]]:
    """Two equal models, and three batches for them."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    batches = [(torch.randn(8, 5).double(), torch.arange(8) % 3) for _ in range(3)]
    return model, copy.deepcopy(model), batches


def alike(ours: nn.Module, expected: nn.Module) -> bool:
    pairs = zip(ours.parameters(), expected.parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in pairs)


def test_training_is_sgd_with_momentum_on_each_batch_alone() -> None:
    model, alone, batches = small_job()
    load(LESSON).train(model, batches)
    sgd(alone, batches)
    assert alike(model, alone)


def test_every_fifth_digit_is_kept_for_the_test() -> None:
    lesson = load(LESSON)
    with patch.object(lesson.dist, "broadcast_object_list"):
        train_set, test_set = lesson.digits(torch.device("cpu"))
    images, digits = map(torch.tensor, load_digits(return_X_y=True))
    kept = torch.arange(1797) % 5 == 0
    for data, which in ((train_set, ~kept), (test_set, kept)):
        assert torch.allclose(data.tensors[0], images[which] / 8 - 0.6)
        assert torch.equal(data.tensors[1], digits[which])


def two_short_trainings() -> tuple[list[int], list[dict]]:
    """On how many samples accuracy was asked for, and what was claimed."""
    lesson = load(LESSON, ("EPOCHS = 10 ", "EPOCHS = 1 "))
    asked = []
    drawn = torch.Generator().manual_seed(0)

    def samples(number: int) -> object:
        image_ND = torch.rand(number, 64, generator=drawn, dtype=torch.float64)
        return lesson.TensorDataset(image_ND, torch.arange(number) % 10)

    def average(parameter: nn.Parameter) -> None:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    def wrap(model: nn.Module) -> nn.Module:
        """What DDP does, which takes seconds to load."""
        lesson.broadcast_weights(model)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(average)
        return model

    lesson.wrap = wrap
    lesson.accuracy_on = lambda data, model: asked.append(len(data)) or 1.0
    lesson.check_training(samples(1437), samples(360), torch.device("cpu"))
    return asked, lesson.ledger


def test_trainings_are_compared_and_judged_by_new_digits() -> None:
    for asked, rows in run(two_short_trainings, 2):
        assert asked == [360, 360]
        assert [row["verdict"] for row in rows] == ["PASS"] * 6
        assert {row["slack"] for row in rows if "error" in row["claim"]} == {15 * 96 * 2.0**-52}


def drawn_together() -> list[list[int]]:
    """The images of one epoch that all ranks draw, step by step."""
    lesson = load(LESSON, ("EPOCHS = 10 ", "EPOCHS = 1 "))
    numbers = torch.arange(194)
    batches = lesson.batches_of_all(lesson.TensorDataset(numbers, numbers))
    return [image_B.tolist() for image_B, _ in batches]


def test_a_step_of_the_oracle_has_the_samples_of_all_ranks() -> None:
    first, second = run(drawn_together, 2)
    assert first == second
    assert list(map(len, first)) == [96, 96, 2]
    assert sorted(chain(*first)) == list(range(194))


def after_the_broadcast() -> list[float]:
    lesson = load(LESSON)
    model = nn.BatchNorm1d(1)
    for tensor in model.state_dict().values():
        tensor.fill_(lesson.RANK + 1)
    lesson.broadcast_weights(model)
    return [tensor.item() for tensor in model.state_dict().values()]


def test_buffers_are_broadcast_as_the_weights_are() -> None:
    assert run(after_the_broadcast, 2) == [[1] * 5] * 2


def test_the_largest_difference_is_that_of_the_worst_parameter() -> None:
    model, other, _ = small_job()
    other.bias.data[1] -= 0.5
    found = load(LESSON).largest_difference(model.parameters(), other.parameters())
    assert found == pytest.approx(0.5)


def test_what_ddp_exposes_is_compared_with_averaging_by_hand() -> None:
    """A step takes 30 ms without all-reduces, 5 more by DDP, 10 more by hand."""
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 4
    ddp = MagicMock()
    lesson.average_gradients = lambda model: ddp.averaged()

    def time_of(step: Callable) -> float:
        ddp.reset_mock()
        step()
        if not ddp.no_sync.called:
            return 35.0
        return 40.0 if ddp.averaged.called else 30.0

    lesson.wrap = lambda model: ddp
    lesson.median_ms_in_turn = lambda ways: {name: time_of(way) for name, way in ways.items()}
    with patch.object(torch.cuda, "is_bf16_supported", return_value=True):
        lesson.measure_on_gpus(torch.device("meta"))
    (row,) = lesson.ledger
    assert (row["predicted"], row["measured"]) == pytest.approx((0.8, 0.5))


def test_a_difference_that_is_no_number_is_not_lost() -> None:
    """Python's `max` keeps a number that comes before a NaN."""
    ours = [torch.zeros(2), torch.tensor([math.nan, 0.0])]
    assert math.isnan(load(LESSON).largest_difference(ours, [torch.ones(2), torch.zeros(2)]))
