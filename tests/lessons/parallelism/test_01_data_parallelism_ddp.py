"""The DDP lesson: a broken line fails the claims that guard it, and no others."""

import pytest

from course.playing import play
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "parallelism/01_data_parallelism_ddp.py"
HAND, DDP = "by hand: ", "DDP: "
BETWEEN, ERROR = "weights, difference between ranks", "weights, error against one process"
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
        {HAND + BETWEEN, HAND + ERROR},
    ),
    "micro-batches are not divided": (
        ("(loss / pieces).backward()", "loss.backward()"),
        {MICRO + "error", MICRO_ALL + "error"},
    ),
    "all micro-batches communicate": (
        ("use_no_sync and i < pieces - 1", "False"),
        {MICRO + "bytes"},
    ),
    "no micro-batch communicates": (
        ("use_no_sync and i < pieces - 1", "use_no_sync"),
        {MICRO + "bytes", MICRO + "error"},
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
        [
            (
                'if device.type == "cuda" else None)',
                'if device.type == "cuda" else None, bucket_cap_mb=0.1)',
            ),
            # In its first step DDP has one bucket, whatever the cap.
            ("        train(ddp, [mine])\n", "        train(ddp, [mine] * 2)\n"),
        ],
        {DDP + "all-reduces per step", DDP + "bytes per step"},
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
