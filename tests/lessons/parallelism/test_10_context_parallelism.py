"""Softmax in pieces and the ring against torch's attention; who computes what; broken lines."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks

from course.playing import load
from course.ranks import run
from course.wire import carried
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "parallelism/10_context_parallelism.py"
CLOSE = 1e-12  # float64, sums of some hundred terms


@settings(deadline=None)
@given(st.permutations(range(5)), st.integers(1, 4), st.sampled_from([1.0, 50.0, 5000.0]))
def test_softmax_in_pieces_is_softmax_in_any_order(order: list[int], c: int, scale: float) -> None:
    lesson = load(LESSON)
    torch.manual_seed(len(order) * c)
    q = scale * torch.randn(2, 3, c, 4, dtype=torch.float64)
    k, v = torch.randn(2, 2, 3, 5 * c, 4, dtype=torch.float64)
    running = lesson.RunningSoftmax(q)
    for number in order:
        running.add(k.chunk(5, dim=2)[number], v.chunk(5, dim=2)[number], diagonal=False)
    due = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(running.sum_HcK / running.total_Hc1, due, rtol=0, atol=1e-9)
    lse = (q @ k.transpose(-1, -2) / 2).logsumexp(dim=-1, keepdim=True)
    torch.testing.assert_close(running.most_Hc1 + running.total_Hc1.log(), lse)


@pytest.mark.parametrize("name", ["consecutive", "zig_zag"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_each_piece_below_the_diagonal_is_computed_once(n: int, name: str) -> None:
    lesson = load(LESSON)
    lesson.WORLD_SIZE = n
    layout = getattr(lesson, name)
    assert sorted(sum(map(layout, range(n)), ())) == list(range(2 * n))
    computed = Counter()
    for rank in range(n):
        lesson.RANK = rank
        for step in range(n):
            source = (rank - step) % n
            found = lesson.pieces(layout, source)
            for i, j, diagonal in found:
                mine, theirs = layout(rank)[i], layout(source)[j]
                assert diagonal == (mine == theirs)
                computed[mine, theirs] += 1
            if name == "zig_zag":
                assert len(found) == (2 if step else 3)
    assert computed == Counter((i, j) for i in range(2 * n) for j in range(i + 1))


def ring_error(tokens: int, batch: int, heads: int, features: int, name: str) -> float:
    """How far outputs and gradients of this rank are from one process's."""
    lesson = load(LESSON)
    layout = getattr(lesson, name)
    torch.manual_seed(tokens)
    whole = [torch.randn(batch, heads, tokens, features).double() for _ in range(4)]
    grad = whole.pop()
    for x in whole:
        x.requires_grad_()
    due = F.scaled_dot_product_attention(*whole, is_causal=True)
    due.backward(grad)
    mine = [lesson.share(x.detach(), layout).requires_grad_() for x in whole]
    ours = lesson.ring_attention(*mine, layout)
    ours.backward(lesson.share(grad, layout))
    real = lesson.share(torch.ones_like(grad), layout)
    pairs = [(ours * real, lesson.share(due, layout))]
    pairs += [(a.grad, lesson.share(b.grad, layout)) for a, b in zip(mine, whole, strict=True)]
    return max((a - b).abs().max().item() for a, b in pairs)


def largest(cases: list[tuple]) -> float:
    """The largest error of these cases, one after another on the same ranks."""
    return max(ring_error(*case) for case in cases)


few = st.integers(1, 3)
layouts = st.sampled_from(["consecutive", "zig_zag"])
rings = st.tuples(st.integers(1, 40), few, few, st.integers(1, 5), layouts)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@settings(max_examples=2, deadline=None)
@given(st.lists(rings, min_size=4, max_size=9))
def test_ring_equals_one_process_whatever_the_length(n: int, cases: list[tuple]) -> None:
    assert max(run(largest, n, cases)) < CLOSE


@pytest.mark.deep
def test_eight_ranks_and_fewer_tokens_than_chunks() -> None:
    cases = [(tokens, 1, 2, 3, "zig_zag") for tokens in (1, 7, 15, 16, 17, 50)]
    assert max(run(largest, 8, cases)) < CLOSE


def on_the_sockets() -> tuple[float, float]:
    """Bytes that this rank's sockets send forward and backward, in units of its keys."""
    lesson = load(LESSON)
    shares = torch.randn(4, 2, 1, 4, 256, 64, dtype=torch.float64)
    *mine, grad = shares
    for x in mine:
        x.requires_grad_()
    counts = []

    def count() -> None:
        dist.barrier()
        counts.append(sum(carried().values()) / grad.nbytes)
        dist.barrier()

    count()
    ours = lesson.ring_attention(*mine, lesson.zig_zag)
    count()
    ours.backward(grad)
    count()
    return counts[1] - counts[0], counts[2] - counts[1]


@pytest.mark.parametrize("n", [2, 3])
def test_the_sockets_carry_what_the_formulas_say(n: int) -> None:
    for forward, backward in run(on_the_sockets, n):
        if backward:  # the kernel tells
            assert forward == pytest.approx(2 * (n - 1), rel=0.01)
            assert backward == pytest.approx(4 * n - 2, rel=0.01)


def kept() -> float:
    """Elements that the graph of a forward pass keeps on this rank, in units of its keys."""
    lesson = load(LESSON)
    q, k, v = (torch.randn(2, 3, 5, 8, requires_grad=True) for _ in range(3))
    found = []
    with saved_tensors_hooks(lambda x: found.append(x) or x, lambda x: x):
        lesson.ring_attention(q, k, v, lesson.zig_zag)
    return sum(x.untyped_storage().nbytes() // x.itemsize for x in found) / k.numel()


def test_a_rank_keeps_its_own_and_no_visitor() -> None:
    """Its queries, keys, values and outputs, of 8 features each, and one number per query."""
    assert run(kept, 3) == [4 + 1 / 8] * 3


NAMES = ("consecutive", "zig-zag")
ZIG_ZAG = {f"zig-zag: error of the {what}" for what in ("output", "gradients")}
GRADIENTS = {f"{name}: error of the gradients" for name in NAMES}
LARGE = "scores of thousands: error of the output"
ERRORS = GRADIENTS | {f"{name}: error of the output" for name in NAMES}
SENT, SENT_BACK = (f"bytes sent {way} / my keys and values" for way in ("forward", "backward"))
BLOCKS = "other ranks' blocks in memory at a time"
UNEQUAL = "consecutive: pieces, last rank / first"
GAIN = "busiest rank's pieces: consecutive / zig-zag"

HOP = "        works = start_hop(block, arriving)\n"
ADD = "            running[i].add(k_HcK, v_HcK, diagonal)\n"
RESCALED = "self.sum_HcK = self.sum_HcK * rescale_Hc1 + weight"
MOST = "torch.maximum(self.most_Hc1, s_Hcc.amax(dim=-1, keepdim=True))"
FOUND = "    found = []\n    for i, mine"
SEND_ON = "        works = start_hop(leaving, arriving)\n"
LINES = {
    "totals are not rescaled (Try)": (
        ("self.total_Hc1 * rescale_Hc1 +", "self.total_Hc1 +"),
        ERRORS | {LARGE},
    ),
    "gradients of keys and values do not come home (Try)": (
        ("return grad_q_2HcK, arriving", "return grad_q_2HcK, leaving"),
        GRADIENTS,
    ),
    "sums of values are not rescaled": (
        (RESCALED, "self.sum_HcK = self.sum_HcK + weight"),
        ERRORS | {LARGE},
    ),
    "the last step of the ring is rescaled wrongly": (
        (
            ADD,
            "            wrong = float(visitor == (RANK + 1) % WORLD_SIZE)\n"
            f"            running[i].most_Hc1 = running[i].most_Hc1 + wrong\n{ADD}",
        ),
        ERRORS | {LARGE},
    ),
    "the largest score is that of the last piece alone": (
        (MOST, "s_Hcc.amax(dim=-1, keepdim=True)"),
        {LARGE},
    ),
    "the mask compares places on the rank, not in the sequence": (
        [("if theirs <= mine:", "if j <= i:"), ("(i, j, theirs == mine)", "(i, j, i == j)")],
        ERRORS | {LARGE, UNEQUAL, GAIN},
    ),
    "tokens are in zig-zag, the mask is not": (
        (FOUND, f"    layout = consecutive\n{FOUND}"),
        ZIG_ZAG | {LARGE, GAIN},
    ),
    "zig-zag deals out the second half in the same direction": (
        ("return rank, 2 * WORLD_SIZE - 1 - rank", "return rank, WORLD_SIZE + rank"),
        {GAIN},
    ),
    "consecutive tokens are not": (
        ("return 2 * rank, 2 * rank + 1", "return rank, WORLD_SIZE + rank"),
        {UNEQUAL, GAIN},
    ),
    "the padding is in front": (
        ("F.pad(x_HTK, (0, 0, 0, missing))", "F.pad(x_HTK, (0, 0, missing, 0))"),
        ERRORS | {LARGE},
    ),
    "what earlier ranks have added is dropped": (
        ("        grad_kv += arriving  # what the ranks before have added\n", ""),
        GRADIENTS,
    ),
    "delta is left out": ((" - delta_Hc1)", ")"), GRADIENTS),
    "queries get the gradient of one piece": (
        ("grad_q_2HcK[i] += grad_q_HcK", "grad_q_2HcK[i] = grad_q_HcK"),
        GRADIENTS,
    ),
    "blocks are sent twice": (
        (HOP, f"        wait_for(start_hop(block, arriving))\n{HOP}"),
        {SENT, SENT_BACK},
    ),
    "gradients are sent twice": (
        (SEND_ON, f"        wait_for(start_hop(leaving, arriving))\n{SEND_ON}"),
        {SENT_BACK},
    ),
}
MEMORY = {
    "each visitor has a buffer of its own": (
        [
            (
                "buffers = [torch.empty_like(block), torch.empty_like(block)]",
                "buffers = [torch.empty_like(block) for _ in range(WORLD_SIZE)]",
            ),
            ("buffers[step % 2]", "buffers[step]"),
        ],
        {BLOCKS},
    ),
}
BREAKS = [Breaks(LINES, ranks=3), Breaks(MEMORY, ranks=4)]

ON_GPUS = OnGpus(changes=[("131_072 // (2 * WORLD_SIZE)", "1_024 // (2 * WORLD_SIZE)")])


def check_gradients_of_large_scores(name: str) -> None:
    """Their exponentials are infinite; the gradients are not."""
    lesson = load(LESSON)
    layout = getattr(lesson, name)
    torch.manual_seed(0)
    q, k, v, grad = torch.randn(4, 1, 2, 12, 4, dtype=torch.float64)
    whole = [x.requires_grad_() for x in (3000 * q, k, v)]
    F.scaled_dot_product_attention(*whole, is_causal=True).backward(grad)
    mine = [lesson.share(x.detach(), layout).requires_grad_() for x in whole]
    lesson.ring_attention(*mine, layout).backward(lesson.share(grad, layout))
    for ours, due in zip(mine, whole, strict=True):
        assert due.grad.isfinite().all()
        expected = lesson.share(due.grad, layout)
        torch.testing.assert_close(ours.grad, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", ["consecutive", "zig_zag"])
def test_scores_of_thousands_have_the_gradients_of_one_process(name: str) -> None:
    run(check_gradients_of_large_scores, 2, name)
