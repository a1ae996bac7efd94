"""The DDP lesson: a broken line fails the claims that guard it, and no others."""

import copy
from contextlib import nullcontext
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from course.playing import Played, load, play
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "parallelism/01_data_parallelism_ddp.py"
HAND, DDP, SMALL = "by hand: ", "DDP: ", "DDP, buckets of 0.1 MiB: "
BETWEEN, ERROR = "weights, difference between ranks", "weights, error against one process"
MASTERS = "bfloat16: masters, difference between ranks"
MICRO, MICRO_ALL = "4 micro-batches, no_sync: ", "4 micro-batches, without no_sync: "
QUICK = (("EPOCHS = 10 ", "EPOCHS = 2 "), ('new digits", 0.95,', 'new digits", 0.0,'))

LINES = {
    "by hand: does not broadcast": (
        ("    broadcast_weights(by_hand)\n", ""),
        {HAND + BETWEEN, HAND + ERROR},
    ),
    "by hand: does not divide": (("        parameter.grad /= WORLD_SIZE\n", ""), {HAND + ERROR}),
    "by hand: sums twice": (
        (
            "        dist.all_reduce(parameter.grad)\n",
            "        dist.all_reduce(parameter.grad)\n" * 2,
        ),
        {HAND + ERROR, HAND + "all-reduces per step", HAND + "bytes per step"},
    ),
    "by hand: averages the parameters": (
        ("dist.all_reduce(parameter.grad)", "dist.all_reduce(parameter.data)"),
        {HAND + BETWEEN, HAND + ERROR, MASTERS},
    ),
    "micro-batches are not divided": (
        ("(loss / pieces).backward()", "loss.backward()"),
        {MICRO + "error", MICRO_ALL + "error"},
    ),
    "all micro-batches communicate": (
        ("use_no_sync and i < pieces - 1", "False"),
        {MICRO + "bytes"},
    ),
    "no_sync where it was not asked for": (
        ("use_no_sync and i < pieces - 1", "i < pieces - 1"),
        {MICRO_ALL + "bytes"},
    ),
    "DDP is left out": (
        ("train(wrap(ddp), my_share", "train(ddp, my_share"),
        {DDP + BETWEEN, DDP + ERROR},
    ),
    "no micro-batch communicates": (
        ("use_no_sync and i < pieces - 1", "use_no_sync"),
        {MICRO + "bytes", MICRO + "error"},
    ),
    "gradients in bfloat16 are not averaged": (
        ("    average_gradients(model)\n    for parameter, master", "    for parameter, master"),
        {MASTERS},
    ),
    "float32 gradients stay": (
        [
            ("storages = [tensor.", "held += [m.grad for m in masters]; storages = [tensor."),
            ("    adam.zero_grad()  #", "    #"),  # they must be alive, too
        ],
        {"bytes held per parameter"},
    ),
    "no set_epoch": (
        ("        sampler.set_epoch(epoch)\n", ""),
        {"different orders in all epochs"},
    ),
    "every rank draws everything": (
        ("DistributedSampler(train_set)", "DistributedSampler(train_set, 1, 0)"),
        {"samples drawn in one epoch, by all ranks"},
    ),
    "every rank draws the same share": (
        ("DistributedSampler(train_set)", "DistributedSampler(train_set, WORLD_SIZE, 0)"),
        {"different samples among them"},
    ),
    "DDP with smaller buckets": (
        ("bucket_cap_mb=bucket_mib)", "bucket_cap_mb=0.1)"),
        {DDP + "all-reduces per step"},
    ),
    "DDP with one bucket": (
        ("bucket_cap_mb=bucket_mib)", "bucket_cap_mb=25)"),
        {SMALL + "all-reduces per step"},
    ),
    "DDP's first step is counted": (
        ("        train(ddp, [mine] * 2)\n", ""),
        {SMALL + "all-reduces per step"},
    ),
    "DDP counted over two steps": (
        ("            train(ddp, [mine])\n", "            train(ddp, [mine] * 2)\n"),
        {way + what for way in (DDP, SMALL) for what in ("all-reduces per step", "bytes per step")},
    ),
}
TOO_SHORT = {
    "a network that learns too little": (
        ("EPOCHS = 10 ", "EPOCHS = 1 "),
        {HAND + "accuracy on new digits", DDP + "accuracy on new digits"},
    ),
}
ALONE = ["DDP's first step is counted"]  # where buckets are small it has one, too
BREAKS = [Breaks(LINES, changes=QUICK, alone=ALONE), Breaks(TOO_SHORT)]

ON_GPUS = OnGpus(
    changes=[("EPOCHS = 10", "EPOCHS = 3"), ("repeats: int = 20", "repeats: int = 1")],
    ranks=(1, 2),  # to a GPU four ranks are here what two are: no rings, no stages, no mesh
)


@pytest.mark.deep
def test_more_ranks_than_samples_are_refused() -> None:
    played = play(LESSON, 1, ("GLOBAL_BATCH = 96 ", "GLOBAL_BATCH = 0 "))
    assert "at most 0 ranks, not 1" in str(played.code)


def test_masters_keep_what_bfloat16_cannot() -> None:
    lesson = load(LESSON)
    lesson.average_gradients = lambda model: None
    torch.manual_seed(0)
    model = nn.Linear(64, 10).bfloat16()
    masters = [parameter.detach().float() for parameter in model.parameters()]
    start = [master.clone() for master in masters]
    adam = torch.optim.Adam(masters, lr=1e-6)
    for _ in range(3):
        batch = (torch.randn(8, 64), torch.arange(8))
        lesson.mixed_precision_step(model, masters, adam, batch)
    for parameter, master, first in zip(model.parameters(), masters, start, strict=True):
        assert (master != first).double().mean() > 0.9
        assert torch.equal(parameter, master.bfloat16())


def PLAIN(played: Played) -> None:
    """It also says what 7 billion parameters take."""
    assert "7 billion parameters: 112 GB on every rank" in played.output


def sgd(model: nn.Module, batches: list[tuple]) -> list[float]:
    """Train by the equations, v = 0.9 v + g and w = w - 0.1 v; return the losses."""
    weights = list(model.parameters())
    velocities = [torch.zeros_like(weight) for weight in weights]
    losses = []
    for image_BD, label_B in batches:
        loss = cross_entropy(model(image_BD), label_B)
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, velocity, gradient in zip(weights, velocities, gradients, strict=True):
                weight -= 0.1 * velocity.mul_(0.9).add_(gradient)
    return losses


class NoNetwork(nn.Linear):
    """Looks like DDP, and sends nothing."""

    def no_sync(self) -> nullcontext:
        return nullcontext()


def small_job() -> tuple[NoNetwork, NoNetwork, list[tuple]]:
    """Two equal models, and three batches for them."""
    torch.manual_seed(0)
    model = NoNetwork(5, 3).double()
    batches = [(torch.randn(8, 5).double(), torch.arange(8) % 3) for _ in range(3)]
    return model, copy.deepcopy(model), batches


def alike(ours: nn.Module, expected: nn.Module) -> bool:
    pairs = zip(ours.parameters(), expected.parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in pairs)


def test_training_is_sgd_with_momentum_on_each_batch_alone() -> None:
    model, alone, batches = small_job()
    assert load(LESSON).train(model, batches) == pytest.approx(sgd(alone, batches))
    assert alike(model, alone)


@pytest.mark.parametrize("use_no_sync", [True, False])
def test_micro_batches_begin_without_the_gradients_of_the_step_before(use_no_sync: bool) -> None:
    model, alone, batches = small_job()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    load(LESSON).accumulate(model, batches[0], 4, use_no_sync)
    sgd(alone, batches[:1])
    assert alike(model, alone)


def test_mixed_precision_is_adam_on_the_gradients_of_this_batch() -> None:
    lesson = load(LESSON)
    lesson.average_gradients = lambda model: None
    torch.manual_seed(0)
    model = nn.Linear(64, 10).bfloat16()
    masters = [parameter.detach().float() for parameter in model.parameters()]
    expected = [master.clone() for master in masters]
    adam, theirs = torch.optim.Adam(masters), torch.optim.Adam(expected)
    for _ in range(2):
        image_BD, label_B = torch.randn(8, 64), torch.arange(8)
        loss = cross_entropy(model(image_BD.bfloat16()), label_B)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for master, gradient in zip(expected, gradients, strict=True):
            master.grad = gradient.float()
        theirs.step()
        lesson.mixed_precision_step(model, masters, adam, (image_BD, label_B))
        assert all(master.grad is None for master in masters)  # 16 bytes, not 20
        assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(torch.equal(a, b) for a, b in zip(masters, expected, strict=True))


def test_every_fifth_digit_is_kept_for_the_test() -> None:
    lesson = load(LESSON)
    with patch.object(lesson.dist, "broadcast_object_list"):
        train_set, test_set = lesson.digits(torch.device("cpu"))
    images, digits = map(torch.tensor, load_digits(return_X_y=True))
    kept = torch.arange(1797) % 5 == 0
    assert torch.equal(train_set.tensors[0], torch.arange(1437))
    for data, which in ((train_set, ~kept), (test_set, kept)):
        assert torch.allclose(data.tensors[1], images[which] / 8 - 0.6)
        assert torch.equal(data.tensors[2], digits[which])


def three_short_trainings() -> tuple:
    """The curves' names, steps and distance; on how many samples accuracy was asked for."""
    lesson = load(LESSON, ("EPOCHS = 10 ", "EPOCHS = 1 "))
    asked = []
    drawn = torch.Generator().manual_seed(0)

    def samples(number: int) -> object:
        image_ND = torch.rand(number, 64, generator=drawn, dtype=torch.float64)
        return lesson.TensorDataset(torch.arange(number), image_ND, torch.arange(number) % 10)

    def average(parameter: nn.Parameter) -> None:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    def wrap(model: nn.Module) -> nn.Module:
        """What DDP does, which takes seconds to load."""
        lesson.broadcast_weights(model)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(average)
        return model

    lesson.digits = lambda device: (samples(1437), samples(360))
    lesson.wrap = wrap
    lesson.claim = lambda *_, **__: None
    lesson.accuracy_on = lambda data, model: asked.append(len(data))
    curves = lesson.train_three_times(torch.device("cpu"))
    curves_CS = torch.tensor([*curves.values()], dtype=torch.float64)
    apart = (curves_CS - curves_CS[-1]).abs().max().item()
    return [*curves], curves_CS.shape[1], apart, asked


def test_three_trainings_have_one_curve_and_are_judged_by_new_digits() -> None:
    for names, steps, apart, asked in run(three_short_trainings, 2):
        assert names == ["by hand", "DDP", "one process"]
        assert steps == 15  # of 96 samples, 1,437 in all
        assert apart < 1e-9
        assert asked == [360, 360]


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
    assert load(LESSON).largest_difference(model, other) == pytest.approx(0.5)


def test_efficiency_compares_steps_with_such_that_send_nothing() -> None:
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 4
    ddp = MagicMock()

    def median_ms(step: object) -> float:
        ddp.reset_mock()
        step()
        return 30.0 if ddp.no_sync.called else 40.0

    lesson.wrap = lambda model: ddp
    lesson.median_ms = median_ms
    with patch.object(torch.cuda, "is_bf16_supported", return_value=True):
        lesson.measure_on_gpus(torch.device("meta"))
    (row,) = lesson.ledger
    assert (row["predicted"], row["measured"]) == pytest.approx((0.6 * 4, 4 * 30 / 40))
