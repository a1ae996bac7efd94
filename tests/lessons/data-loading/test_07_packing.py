"""Masks and positions against their definitions; claims against broken lines."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course.playing import Lazily
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "data-loading/07_packing.py"
lesson = Lazily(LESSON)

ON_GPUS = OnGpus(ranks=(4,))  # on one, the logits are larger than what is computed there


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_masks_and_positions_follow_their_definitions(tokens: list[int]) -> None:
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
    assert rows.shape == (24, 129)
    assert (rows[:-1, -1] == rows[1:, 0]).all()
    assert 0.025 < (rows == lesson.END).double().mean() < 0.04


CAUSAL = "causal mask: pairs across documents"
MASKED = "document mask: pairs across documents"
VALID = "tokens that have a loss"
ALONE = "packed / alone: error of the logits"
RUN_ON = "positions that run on: error, at least"
NO_MASK = "without the mask: error, at least"
BOUNDS = "bounds / mask: error of the attention"
LOST = "cut document: pairs lost"
CUT = "documents that get other logits than alone"
FLOPS = "bounds / mask: FLOPs of the attention"

ONE = "    for start, end in [(0, len(q_TK))]:\n        one"
LINES = {
    "the mask looks back over all documents": (
        ("mask_TT[start:end, start:end] = True", "mask_TT[start:end, :end] = True"),
        {MASKED, LOST, ALONE, CUT, BOUNDS},
    ),
    "the mask looks ahead (Try)": (
        ("    return mask_TT.tril()  # causal", "    return mask_TT  # causal"),
        {LOST, ALONE, CUT, BOUNDS},
    ),
    "positions run on (Try)": (
        ("[torch.arange(end - start) for", "[torch.arange(start, end) for"),
        {ALONE, CUT},
    ),
    "forbidden pairs are counted": (
        ("return weight_1TT[0] > 0", "return weight_1TT[0] >= 0"),
        {CAUSAL, MASKED, LOST},
    ),
    "END has a loss": (("mask_BTT, x_BT != END)", "mask_BTT, x_BT >= 0)"), {VALID}),
    "attention by bounds looks ahead": (("is_causal=True", "is_causal=False"), {BOUNDS}),
    "the bounds are one document": (
        ("    for start, end in pairwise(bounds):\n        one", ONE),
        {BOUNDS, FLOPS},
    ),
    "a document ends before its END": (
        ("torch.nonzero(x_T == END).flatten() + 1", "torch.nonzero(x_T == END).flatten()"),
        {MASKED, LOST},
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
}
BREAKS = [Breaks(LINES), Breaks(LARGE_ERRORS, alone=["the model has no attention"])]
