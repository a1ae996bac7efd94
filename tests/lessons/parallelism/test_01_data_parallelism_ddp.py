"""The DDP lesson: a broken line fails the claims that guard it, and no others."""

import pytest

from course.playing import play

LESSON = "parallelism/01_data_parallelism_ddp.py"
HAND, DDP = "by hand: ", "DDP: "
BETWEEN, ERROR = "weights, difference between ranks", "weights, error against one process"
MICRO, MICRO_ALL = "4 micro-batches, no_sync: ", "4 micro-batches, without no_sync: "
QUICK = (("EPOCHS = 10 ", "EPOCHS = 2 "), ('new digits", 0.95,', 'new digits", 0.0,'))

BREAKS = {
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
        ("storages = [tensor.", "held += [m.grad for m in masters]; storages = [tensor."),
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
        (
            'if device.type == "cuda" else None)',
            'if device.type == "cuda" else None, bucket_cap_mb=0.1)',
        ),
        {DDP + "all-reduces per step"},
    ),
}


@pytest.mark.deep
@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_line_fails_the_claims_that_guard_it_and_no_others(what: str) -> None:
    change, claims = BREAKS[what]
    if "float32 gradients" in what:  # they must be alive, too
        changes = [change, ("    adam.zero_grad()  #", "    #")]
    elif "smaller buckets" in what:  # in its first step DDP has one bucket, whatever the cap
        changes = [change, ("        train(ddp, [mine])\n", "        train(ddp, [mine] * 2)\n")]
        claims = claims | {DDP + "bytes per step"}
    else:
        changes = [change]
    played = play(LESSON, 2, *changes, *QUICK)
    played.expect(claims)


@pytest.mark.deep
def test_a_network_that_learns_too_little_fails() -> None:
    played = play(LESSON, 2, ("EPOCHS = 10 ", "EPOCHS = 1 "))
    good = "accuracy on new digits"
    played.expect({HAND + good, DDP + good})


@pytest.mark.deep
def test_the_figure_is_saved(tmp_path) -> None:
    path = tmp_path / "curves.png"
    play(LESSON, 2, *QUICK, argv=("--figure", str(path))).expect(set())
    assert path.stat().st_size > 10_000


def test_more_ranks_than_samples_are_refused() -> None:
    played = play(LESSON, 1, ("GLOBAL_BATCH = 96 ", "GLOBAL_BATCH = 0 "))
    assert "at most 0 ranks, not 1" in str(played.code)
