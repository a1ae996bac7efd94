"""Softmax in pieces and the ring against torch's attention; who computes what; broken lines."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

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
    torch.testing.assert_close(running.sum_BHcK / running.total_BHc1, due, rtol=0, atol=1e-9)
    lse = (q @ k.transpose(-1, -2) / 2).logsumexp(dim=-1, keepdim=True)
    torch.testing.assert_close(running.most_BHc1 + running.total_BHc1.log(), lse)


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
    ours = lesson.RingAttention.apply(*mine, layout)
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
    shares = torch.randn(4, 1, 4, 512, 64, dtype=torch.float64)
    *mine, grad = shares
    for x in mine:
        x.requires_grad_()
    counts = []

    def count() -> None:
        dist.barrier()
        counts.append(sum(carried().values()) / grad.nbytes)
        dist.barrier()

    count()
    ours = lesson.RingAttention.apply(*mine, lesson.zig_zag)
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


NAMES = ("consecutive", "zig-zag")
ZIG_ZAG = {f"zig-zag: error of the {what}" for what in ("output", "gradients")}
GRADIENTS = {f"{name}: error of the gradients" for name in NAMES}
SHORT = "1 to 20 tokens: largest error"
LARGE = "scores of thousands: error of the output"
BACKWARD = GRADIENTS | {SHORT}
ERRORS = BACKWARD | {f"{name}: error of the output" for name in NAMES}
SENT, SENT_BACK = (f"elements sent {way} / my keys" for way in ("forward", "backward"))
KEPT = "other ranks whose keys and values are kept"
BLOCKS = "traveling blocks held at a time"
BEHIND = "zig-zag: fewest pieces while a hop travels"
BEHIND_BACK = "hops backward with pieces to hide behind"
PIECES = "zig-zag: pieces of a rank"
UNEQUAL = "consecutive: pieces, last rank / first"
GAIN = "busiest rank's pieces: consecutive / zig-zag"

HOP = "        hop = None if last else Hop(kv_2BHtK)\n        for i, j, diagonal"
ADD = "            running[i].add(*kv_2BHtK.chunk(2, dim=3)[j], diagonal)\n"
SAVED = "out_BHtK, lse_BHt1)\n        ctx.layout"
RESCALED = "self.sum_BHcK = self.sum_BHcK * rescale_BHc1 + weight"
MOST = "torch.maximum(self.most_BHc1, s_BHcc.amax(dim=-1, keepdim=True))"
FOUND = "    found = []\n    for i, mine"
SEND_ON = "        on_its_way = Hop(grad_2BHtK)\n"
LEFT = "        self.leaving = None  # it has left: its memory may be used again\n"
IN_STEP = "            kv_2BHtK = hop.arrived()\n    out_BHtK"
LINES = {
    "totals are not rescaled (Try)": (
        ("self.total_BHc1 * rescale_BHc1 +", "self.total_BHc1 +"),
        ERRORS | {LARGE},
    ),
    "gradients of keys and values do not come home (Try)": (
        ("    return grad_q_BHtK, *home_2BHtK", "    return grad_q_BHtK, *grad_2BHtK"),
        BACKWARD,
    ),
    "sums of values are not rescaled": (
        (RESCALED, "self.sum_BHcK = self.sum_BHcK + weight"),
        ERRORS | {LARGE},
    ),
    "the last step of the ring is rescaled wrongly": (
        (ADD, f"            running[i].most_BHc1 = running[i].most_BHc1 + last\n{ADD}"),
        ERRORS | {LARGE},
    ),
    "the largest score is that of the last piece alone": (
        (MOST, "s_BHcc.amax(dim=-1, keepdim=True)"),
        {LARGE},
    ),
    "the mask compares places on the rank, not in the sequence": (
        [("if theirs <= mine:", "if j <= i:"), ("(i, j, theirs == mine)", "(i, j, i == j)")],
        ERRORS | {LARGE, UNEQUAL, GAIN},
    ),
    "tokens are in zig-zag, the mask is not": (
        (FOUND, f"    layout = consecutive\n{FOUND}"),
        ZIG_ZAG | {SHORT, LARGE, PIECES, GAIN, BEHIND, BEHIND_BACK},
    ),
    "zig-zag deals out the second half in the same direction": (
        ("return rank, 2 * WORLD_SIZE - 1 - rank", "return rank, WORLD_SIZE + rank"),
        {PIECES, GAIN, BEHIND},
    ),
    "consecutive tokens are not": (
        ("return 2 * rank, 2 * rank + 1", "return rank, WORLD_SIZE + rank"),
        {UNEQUAL, GAIN},
    ),
    "the padding is in front": (
        ("F.pad(x_BHTK, (0, 0, 0, missing))", "F.pad(x_BHTK, (0, 0, missing, 0))"),
        ERRORS | {LARGE},
    ),
    "what earlier ranks have added is dropped": (
        ("grad_2BHtK += on_its_way.arrived()", "on_its_way.arrived()"),
        BACKWARD,
    ),
    "delta is left out": ((" - delta_BHc1)", ")"), BACKWARD),
    "queries get the gradient of one piece": (
        (".add_(grad_q_BHcK)", ".copy_(grad_q_BHcK)"),
        BACKWARD,
    ),
    "keys and values are sent twice": (
        (HOP, f"        last or Hop(kv_2BHtK).arrived()\n{HOP}"),
        {SENT, BEHIND},
    ),
    "gradients are sent twice": (
        (SEND_ON, f"        Hop(grad_2BHtK).arrived()\n{SEND_ON}"),
        {SENT_BACK},
    ),
    "the visitors are kept": (
        [
            (SAVED, SAVED.replace("lse_BHt1", "lse_BHt1, k_BHtK.clone(), v_BHtK.clone()")),
            ("ring_backward(ctx.saved_tensors,", "ring_backward(ctx.saved_tensors[:5],"),
        ],
        {KEPT},
    ),
    "a hop starts after the pieces of its step": (
        [
            (HOP, "        for i, j, diagonal"),
            (IN_STEP, IN_STEP.replace("hop.arrived()", "Hop(kv_2BHtK).arrived()")),
        ],
        {BEHIND},
    ),
    "gradients are awaited before the next pieces": (
        (SEND_ON, f"{SEND_ON}        on_its_way.arrived()\n"),
        {BEHIND_BACK},
    ),
    "what has left is not let go": ((LEFT, ""), {BLOCKS}),
    "visitors stay until the end of the pass": (
        (ADD, f"            running[i].__dict__.setdefault('all', []).append(kv_2BHtK)\n{ADD}"),
        {BLOCKS},
    ),
}
BREAKS = [Breaks(LINES, ranks=3, alone=["what has left is not let go"])]

SMALLER = ("131_072 // WORLD_SIZE", "1_024 // WORLD_SIZE")
NO_FUSED_KERNELS = ("largest_error(*with_torch(device))", "0.0")  # they exist for CUDA alone
ON_GPUS = OnGpus(changes=[SMALLER, NO_FUSED_KERNELS])
