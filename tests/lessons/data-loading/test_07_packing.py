"""Masks, positions and losses against their definitions; claims against broken lines."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from course.playing import Lazily, load, play
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "data-loading/07_packing.py"
lesson = Lazily(LESSON)

ON_GPUS = OnGpus(ranks=(4,))  # on one, the logits are larger than what is computed there


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_masks_positions_and_losses_follow_their_definitions(tokens: list[int]) -> None:
    batch = lesson.pack(torch.tensor([[*tokens, 9]]), torch.device("cpu"))
    documents = [tokens[:place].count(0) for place in range(len(tokens))]
    assert batch.x_BT[0].tolist() == tokens
    assert batch.y_BT[0].tolist() == [*tokens[1:], 9]
    for query, document in enumerate(documents):
        seen = [key <= query and documents[key] == document for key in range(len(tokens))]
        assert batch.mask_BTT[0, query].tolist() == seen
        assert batch.position_BT[0, query] == query - documents.index(document)
        assert batch.valid_BT[0, query] == (tokens[query] != 0)


def test_bounds_of_a_row_that_ends_with_a_document_and_of_one_without() -> None:
    assert lesson.document_bounds(torch.tensor([5, 0, 7, 7, 0])) == [0, 2, 5]
    assert lesson.document_bounds(torch.tensor([5, 6, 7])) == [0, 3]


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_attention_by_bounds_is_a_softmax_inside_each_document(lengths: list[int]) -> None:
    bounds = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    q, k, v = torch.randn(3, bounds[-1], 8, dtype=torch.float64)
    found = lesson.attention_by_bounds(q, k, v, bounds)
    for token in range(bounds[-1]):
        start = max(bound for bound in bounds if bound <= token)
        scores = k[start : token + 1] @ q[token] / 8**0.5
        due = scores.softmax(0) @ v[start : token + 1]
        torch.testing.assert_close(found[token], due, rtol=0, atol=1e-14)


def test_rows_follow_each_other_in_one_line_of_tokens() -> None:
    rows = lesson.draw_rows()
    assert rows.shape == (6, 24, 129)
    rows = rows.flatten(0, 1)
    assert (rows[:-1, -1] == rows[1:, 0]).all()
    assert 0.025 < (rows == lesson.END).double().mean() < 0.04


def means() -> tuple[float, float, bool]:
    """What each rank's part of the global mean comes to on average, and what it should be.

    Rank r holds r losses, all of them r + 1: rank 0 has none, and a mean of its own that is nan.
    """
    changed = load(LESSON)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    losses = torch.full((ranks,), rank + 1.0, dtype=torch.float64)
    valid = torch.arange(ranks) < rank
    part = changed.global_mean(losses, valid)
    dist.all_reduce(part)
    all_losses = [r + 1.0 for r in range(ranks) for _ in range(r)]
    own = changed.mean_of_means(losses, valid)
    return part.item() / ranks, sum(all_losses) / len(all_losses), bool(own.isnan())


def test_the_global_mean_is_that_of_all_tokens_and_a_rank_may_have_none() -> None:
    for rank, (found, due, nan) in enumerate(run(means, 4)):
        assert found == pytest.approx(due, rel=1e-15)
        assert nan == (rank == 0)


def test_more_ranks_than_rows_are_refused_before_any_collective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "25")
    monkeypatch.setattr("sys.argv", [LESSON])
    changed = load(LESSON)
    changed.setup = None
    with pytest.raises(SystemExit) as end:
        changed.main()
    assert "a step has 24 rows, got 25 ranks; start at most 24" in str(end.value)


@pytest.mark.deep
def test_unequally_many_rows_per_rank() -> None:
    played = play(LESSON, 5)
    played.expect(set())
    (row,) = [row for row in played.ledger if row["claim"] == WEIGHT]
    assert row["predicted"] == 2.4


CAUSAL = "causal mask: pairs across documents"
MASKED = "document mask: pairs across documents"
VALID = "tokens that have a loss"
ALONE = "packed / alone: error of the logits"
RUN_ON = "positions that run on: error, at least"
NO_MASK = "without the mask: error, at least"
BOUNDS = "bounds / mask: error of the attention"
WEIGHT = "mean of means: weight on rank 0 / on the last"
OTHER = "mean of means: error of the gradient, at least"
RIGHT = "global mean: weight on rank 0 / on the last"
GRADIENT = "global mean: error of the gradient"
NAN = "no token on a rank: its mean is nan"
RUN = "after six steps: error of the weights"

TRAINED = "    ddp = DistributedDataParallel(model)\n    optimizer"
LINES = {
    "the mask looks back over all documents": (
        ("mask_TT[start:end, start:end] = True", "mask_TT[start:end, :end] = True"),
        {MASKED, ALONE, BOUNDS},
    ),
    "the mask looks ahead": (
        ("    return mask_TT.tril()  # causal", "    return mask_TT  # causal"),
        {ALONE, BOUNDS},
    ),
    "positions run on (Try)": (
        ("[torch.arange(end - start) for", "[torch.arange(start, end) for"),
        {ALONE},
    ),
    "forbidden pairs are counted": (
        ("(weight_1TT[0] > 0)", "(weight_1TT[0] >= 0)"),
        {CAUSAL, MASKED},
    ),
    "END has a loss": (("mask_BTT, x_BT != END)", "mask_BTT, x_BT >= 0)"), {VALID}),
    "attention by bounds looks ahead": (("is_causal=True", "is_causal=False"), {BOUNDS}),
    "the count is not summed (Try)": (
        ("    dist.all_reduce(count)\n", ""),
        {RIGHT, GRADIENT, RUN},
    ),
    "DDP's division is forgotten": (
        ("return WORLD_SIZE * losses", "return losses"),
        {GRADIENT, RUN},
    ),
    "the run is trained without DDP": (
        (TRAINED, "    ddp = model\n    optimizer"),
        {RUN},
    ),
    "every rank trains on the rows of rank 0": (
        ("step[RANK::WORLD_SIZE]", "step[0::WORLD_SIZE]"),
        {RUN},
    ),
    "a mean of nothing is 0": (
        ("return losses[valid].mean()", "return losses[valid].sum() / valid.sum().clamp(min=1)"),
        {NAN},
    ),
}
LARGE_ERRORS = {  # any other mistake in the same place would make the error large as well
    "the model has no attention": (
        ("self.head(h_BTD + y_BTD)", "self.head(h_BTD + 0 * y_BTD)"),
        {NO_MASK},
    ),
    "the model knows no positions": (
        ("+ self.position(position_BT)", "+ 0 * self.position(position_BT)"),
        {RUN_ON},
    ),
    "the mean of means is right": (
        ("    return losses[valid].mean()\n", "    return global_mean(losses, valid)\n"),
        {WEIGHT, OTHER},
    ),
}
BREAKS = [Breaks(LINES), Breaks(LARGE_ERRORS)]
