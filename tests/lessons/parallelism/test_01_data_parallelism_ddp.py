"""The DDP lesson: a broken line fails the claims that guard it, and no others."""

import pytest
import torch
from torch import nn

from course.playing import load, play
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
