"""The count of tokens against its definition; claims against broken lines."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from course.playing import Lazily, load
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "data-loading/13_token_weights.py"
lesson = Lazily(LESSON)

ON_GPUS = OnGpus(ranks=(4,))


def means(counts: list[list[int]]) -> tuple[float, float]:
    """The sum of all parts over n, and what is due; every loss of rank r is r + 1."""
    changed = load(LESSON)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    changed.WORLD_SIZE = ranks
    valid_kT = [torch.arange(9) < count for count in counts[rank]]
    losses = torch.full((9,), rank + 1.0, dtype=torch.float64)
    count = changed.count_tokens(valid_kT)
    part = sum(changed.part_of_mean(losses, valid, count) for valid in valid_kT)
    dist.all_reduce(part)
    due = [r + 1.0 for r in range(ranks) for some in counts[r] for _ in range(some)]
    return part.item() / ranks, sum(due) / len(due)


COUNTS = [[[0, 3], [1, 9], [4, 4], [2, 0]], [[1], [0], [0], [0]], [[9, 8, 7]] * 4]


@pytest.mark.parametrize("counts", COUNTS, ids=["uneven", "one alone", "three micro-batches"])
def test_parts_add_up_to_the_mean_of_all_tokens(counts: list[list[int]]) -> None:
    for found, due in run(means, 4, counts):
        assert found == pytest.approx(due, rel=1e-14)


@settings(deadline=None)
@given(st.lists(st.floats(-9, 9), min_size=1, max_size=9), st.integers(1, 4))
def test_the_mistake_is_the_mean_of_one_micro_batch(values: list[float], k: int) -> None:
    losses = torch.tensor([[*values, 99.0]], dtype=torch.float64)
    valid = torch.tensor([[True] * len(values) + [False]])
    found = lesson.mean_of_means(losses, valid, k).item()
    assert found == pytest.approx(sum(values) / len(values) / k, abs=1e-12)


def test_the_last_tokens_of_each_row_have_a_loss() -> None:
    valid = lesson.last_tokens(20, torch.device("cpu"))
    assert valid.shape == (3, 128)
    assert valid.sum(1).tolist() == [20, 20, 20]
    assert valid[:, -20:].all()


WEIGHT = "mean of means: weight on rank 0 / the last"
RIGHT = "one count: weight on rank 0 / the last"
MICRO = "mean of means: weight, micro-batch 0 / 1"
MICRO_RIGHT = "one count: weight, micro-batch 0 / 1"
EACH = "one count: weight x all tokens"
NAN = "none on rank 0, mean of means: share of numbers"
LIBRARY = "none on rank 0, F.cross_entropy: share of numbers"
NO_NAN = "none on rank 0, one count: share of numbers"
LEARNED = "mean of means: learned probability of A"
LEARNED_RIGHT = "one count: learned probability of A"
LOSS = "mean of means: loss in the end, nats per token"
LOSS_RIGHT = "one count: loss in the end, nats per token"
MISTAKEN = "mean of means: gradient, as with those weights"
RUN = "one count: error of the weights after 6 steps"

UNEVEN = "    return WORLD_SIZE * (losses_BT * valid_BT).sum() / count / valid_BT.sum()"
LINES = {
    "the count is not summed (Try)": (
        ("    dist.all_reduce(count)\n", ""),
        {RIGHT, EACH, NO_NAN, LEARNED_RIGHT, LOSS_RIGHT, RUN},
    ),
    "a count for each micro-batch (Try)": (
        (
            "part_of_mean(losses, valid_BT, count))",
            "part_of_mean(losses, valid_BT, count_tokens([valid_BT])))",
        ),
        {MICRO_RIGHT, EACH, RUN},
    ),
    "DDP's division is forgotten": (
        ("return WORLD_SIZE * (losses_BT", "return (losses_BT"),
        {EACH, RUN},
    ),
    "all tokens are in the sum": (
        ("(losses_BT * valid_BT).sum() / count", "losses_BT.sum() / count"),
        {RIGHT, MICRO_RIGHT, EACH, LEARNED_RIGHT, LOSS_RIGHT, RUN},
    ),
    "DDP reduces in no micro-batch": (
        ("nullcontext() if last else ddp.no_sync()", "ddp.no_sync()"),
        {WEIGHT, RIGHT, MICRO, MICRO_RIGHT, EACH, NAN, MISTAKEN, RUN}
        | {LEARNED, LEARNED_RIGHT, LOSS, LOSS_RIGHT},
    ),
    "the mistake divides by all places": (
        (".sum() / valid_BT.sum() / k", ".sum() / valid_BT.numel() / k"),
        {WEIGHT, MISTAKEN, MICRO, NAN, LEARNED, LOSS},
    ),
    "the smaller micro-batch counts more": (
        ("    return WORLD_SIZE * (losses_BT * valid_BT).sum() / count", UNEVEN),
        {RIGHT, MICRO_RIGHT, EACH, NO_NAN, LEARNED_RIGHT, LOSS_RIGHT, RUN},
    ),
    "the library's mean counts what is left out": (
        ("y_BT.masked_fill(~valid_BT, -100)).backward()", "y_BT).mul(math.nan).backward()"),
        {LIBRARY},
    ),
}
BREAKS = [Breaks(LINES, alone=["DDP reduces in no micro-batch"])]


def count_of_large_micro_batches() -> int:
    valid_kBT = [torch.ones(2, rows, dtype=torch.bool) for rows in (16_384, 50_000)]
    return load(LESSON).count_tokens(valid_kBT).item()


def test_a_micro_batch_may_have_more_tokens_than_16_bits_count() -> None:
    assert run(count_of_large_micro_batches, 2) == [2 * 2 * (16_384 + 50_000)] * 2
