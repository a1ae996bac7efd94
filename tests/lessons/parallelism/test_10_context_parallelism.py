"""Softmax in pieces and the ring against torch's attention; who computes what; broken lines."""

from collections import Counter
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from course.lessons import ROOT
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
    torch.testing.assert_close(running.output(), due, rtol=0, atol=1e-9)
    lse = (q @ k.transpose(-1, -2) / 2).logsumexp(dim=-1, keepdim=True)
    torch.testing.assert_close(running.most_Hc1 + running.total_Hc1.log(), lse)


@pytest.mark.parametrize("name", ["consecutive", "zig-zag"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_each_piece_below_the_diagonal_is_computed_once(n: int, name: str) -> None:
    """In place of queries, keys and values stand the numbers of their chunks."""
    lesson = load(LESSON)
    lesson.WORLD_SIZE = n
    forward = lesson.ring_forward if name == "consecutive" else lesson.zig_zag_forward
    computed = Counter()
    in_steps = []  # how many pieces

    def chunks_of(rank: int) -> torch.Tensor:
        return torch.tensor(rank if name == "consecutive" else lesson.zig_zag(rank))

    def visitors(block: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        for step in range(n):
            in_steps.append(0)
            source = (lesson.RANK - step) % n
            yield source, torch.stack([chunks_of(source), chunks_of(source)])

    class Noted:
        def __init__(self, mine: torch.Tensor) -> None:
            self.mine = mine.item()

        def add(self, k: torch.Tensor, v: torch.Tensor, diagonal: bool) -> None:
            assert k == v
            assert diagonal == (k.item() == self.mine)
            computed[self.mine, k.item()] += 1
            in_steps[-1] += 1

    lesson.visitors = visitors
    lesson.RunningSoftmax = Noted
    for rank in range(n):
        lesson.RANK = rank
        in_steps.clear()
        forward(chunks_of(rank), torch.stack([chunks_of(rank), chunks_of(rank)]))
        if name == "zig-zag":
            assert in_steps == [3] + [2] * (n - 1)
    number = n if name == "consecutive" else 2 * n
    assert computed == Counter((i, j) for i in range(number) for j in range(i + 1))


def zig_zag_backward(
    lesson: ModuleType, running: list, block: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `ring_backward`, over both chunks of each rank: (2, H, c, K) and (2, 2, H, c, K)."""
    dq = torch.zeros_like(grad)
    arriving = torch.zeros_like(block)
    works = []
    for visitor, visiting in lesson.visitors(block):
        part = torch.zeros_like(block)
        for i, mine in enumerate(lesson.zig_zag(lesson.RANK)):
            for j, theirs in enumerate(lesson.zig_zag(visitor)):
                if theirs <= mine:
                    piece = (running[i], visiting[:, j], grad[i], theirs == mine)
                    dq_part, dkv_part = lesson.piece_gradients(*piece)
                    dq[i] += dq_part
                    part[:, j] += dkv_part
        lesson.wait_for(works)
        leaving = part + arriving
        works = lesson.start_hop(leaving, arriving)
    lesson.wait_for(works)
    return dq, arriving


def ring_error(tokens: int, batch: int, heads: int, features: int, name: str) -> float:
    """How far this rank's outputs and gradients are from one process's.

    2n need not divide the tokens: zeros are added at the end, which no token before them sees.
    """
    lesson = load(LESSON)
    torch.manual_seed(tokens)
    missing = -tokens % (2 * lesson.WORLD_SIZE)
    whole = [torch.randn(batch, heads, tokens, features).double() for _ in range(4)]
    grad = whole.pop()
    for x in whole:
        x.requires_grad_()
    due = F.scaled_dot_product_attention(*whole, is_causal=True)
    due.backward(grad)

    def mine(x: torch.Tensor) -> torch.Tensor:
        padded = F.pad(x.detach(), (0, 0, 0, missing))
        return lesson.share(padded) if name == "consecutive" else lesson.zig_zag_share(padded)

    q, k, v = map(mine, whole)
    block = torch.stack([k, v])
    if name == "consecutive":
        running = lesson.ring_forward(q, block)
        out = running.output()
        dq, dkv = lesson.ring_backward(running, block, mine(grad))
    else:
        running = lesson.zig_zag_forward(q, block)
        out = torch.stack([one.output() for one in running])
        dq, dkv = zig_zag_backward(lesson, running, block, mine(grad))
    real = mine(torch.ones_like(grad))  # 0 where padding is
    due_gradients = torch.stack([mine(x.grad) for x in whole])
    output = lesson.largest_error(out * real, mine(due))
    return max(output, lesson.largest_error(torch.stack([dq, *dkv]), due_gradients))


def largest(cases: list[tuple]) -> float:
    """The largest error of these cases, one after another on the same ranks."""
    return max(ring_error(*case) for case in cases)


few = st.integers(1, 3)
orders = st.sampled_from(["consecutive", "zig-zag"])
rings = st.tuples(st.integers(1, 40), few, few, st.integers(1, 5), orders)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@settings(max_examples=2, deadline=None)
@given(st.lists(rings, min_size=4, max_size=9))
def test_ring_equals_one_process_whatever_the_length(n: int, cases: list[tuple]) -> None:
    assert max(run(largest, n, cases)) < CLOSE


@pytest.mark.deep
def test_eight_ranks_and_fewer_tokens_than_chunks() -> None:
    lengths = (1, 7, 15, 16, 17, 48)
    cases = [(tokens, 1, 2, 3, "zig-zag") for tokens in lengths]
    cases += [(tokens, 1, 2, 3, "consecutive") for tokens in lengths]
    assert max(run(largest, 8, cases)) < CLOSE


def on_the_sockets() -> tuple[float, float]:
    """Bytes that this rank's sockets send forward and backward, in units of its keys."""
    lesson = load(LESSON)
    q, k, v, grad = torch.randn(4, 1, 4, 512, 64, dtype=torch.float64)
    block = torch.stack([k, v])
    counts = []

    def count() -> None:
        dist.barrier()
        counts.append(sum(carried().values()) / k.nbytes)
        dist.barrier()

    count()
    running = lesson.ring_forward(q, block)
    count()
    lesson.ring_backward(running, block, grad)
    count()
    return counts[1] - counts[0], counts[2] - counts[1]


@pytest.mark.parametrize("n", [2, 3])
def test_the_sockets_carry_what_the_formulas_say(n: int) -> None:
    for forward, backward in run(on_the_sockets, n):
        if backward:  # the kernel tells
            assert forward == pytest.approx(2 * (n - 1), rel=0.01)
            assert backward == pytest.approx(4 * n - 2, rel=0.01)


def kept() -> float:
    """Numbers that a forward pass leaves for the backward pass, in units of this rank's keys."""
    lesson = load(LESSON)
    q, k, v = (torch.randn(3, 5, 8) for _ in range(3))
    block = torch.stack([k, v])
    left = [block, *vars(lesson.ring_forward(q, block)).values()]
    return sum(x.untyped_storage().nbytes() // x.itemsize for x in left) / k.numel()


def test_a_rank_keeps_its_own_and_no_visitor() -> None:
    """Its queries, keys, values and sums, of 8 features each, and two numbers per query."""
    assert run(kept, 3) == [4 + 2 / 8] * 3


@pytest.mark.parametrize(("link", "stated"), [(450e9, 444), (50e9, 4_000)])
def test_the_length_from_which_a_hop_hides(link: float, stated: int) -> None:
    """Llama 3 8B, in bf16, at 400 TFLOP/s: from there on a step is as long as its hop."""
    for t, hides in ((0.99 * stated, False), (1.01 * stated, True)):
        work = 2 * 2 * 2 * (t / 2) ** 2 * 128 * 32 / 400e12  # two pieces of two products
        hop = 2 * t * 8 * 128 * 2 / link
        assert (work >= hop) == hides
        assert 5 / 2 * work >= 2 * hop, "what hides forward hides backward"
    text = (ROOT / LESSON).read_text()
    assert f"{stated:,} " in text
    assert f"over {131_072 // 4_000} ranks" in text


def test_a_longer_time_hides_the_shorter() -> None:
    lesson = load(LESSON)
    assert lesson.hidden(work=4.0, hops=1.0, both=4.0) == 1
    assert lesson.hidden(work=1.0, hops=4.0, both=4.0) == 1
    assert lesson.hidden(work=4.0, hops=1.0, both=5.0) == 0, "one after the other"
    assert lesson.hidden(work=4.0, hops=1.0, both=4.25) == 0.75


CONSECUTIVE = "consecutive: error of the output"
GRADIENTS = "consecutive: error of the gradients"
ZIG_ZAG = "zig-zag: error of the output"
LARGE = "scores of thousands: error of the output"
ERRORS = {CONSECUTIVE, GRADIENTS, ZIG_ZAG, LARGE}
SENT, SENT_BACK = (f"bytes sent {way} / my keys and values" for way in ("forward", "backward"))
UNDER_WAY = "hops under way while scores are computed"
BLOCKS = "other ranks' blocks in memory at a time"
UNEQUAL = "consecutive: scores needed, last rank / first"
GAIN = "busiest rank's scores: consecutive / zig-zag"

HOP = "        works = start_hop(block, arriving)\n"
YIELD = "        yield (RANK - step) % WORLD_SIZE, block  # the caller computes with it meanwhile\n"
WAIT = "        wait_for(works)\n"
PASS_ON = "        block = arriving\n"
ADD = "            running.add(k_HcK, v_HcK, diagonal=visitor == RANK)\n"
ADD_PIECE = "                    running[i].add(k_2HcK[j], v_2HcK[j], diagonal=theirs == mine)\n"
WRONG = "float(visitor == (RANK + 1) % WORLD_SIZE)"
SEEN = "        if visitor <= RANK:  # a later rank's keys are not seen\n"
RESCALED = "self.sum_HcK = self.sum_HcK * rescale + weight"
MOST = "torch.maximum(self.most_Hc1, s_Hcc.amax(dim=-1, keepdim=True))"
SEND_ON = "        works = start_hop(leaving, arriving)\n"
LINES = {
    "totals are not rescaled (Try)": (
        ("self.total_Hc1 * rescale +", "self.total_Hc1 +"),
        ERRORS,
    ),
    "gradients of keys and values do not come home (Try)": (
        ("return dq_HcK, arriving", "return dq_HcK, leaving"),
        {GRADIENTS},
    ),
    "sums of values are not rescaled": (
        (RESCALED, "self.sum_HcK = self.sum_HcK + weight"),
        ERRORS,
    ),
    "the last step of the ring is rescaled wrongly": (
        (ADD, f"            running.most_Hc1 = running.most_Hc1 + {WRONG}\n{ADD}"),
        {CONSECUTIVE, GRADIENTS},
    ),
    "zig-zag: the last step of the ring is rescaled wrongly": (
        (
            ADD_PIECE,
            f"{' ' * 20}running[i].most_Hc1 = running[i].most_Hc1 + {WRONG}\n{ADD_PIECE}",
        ),
        {ZIG_ZAG, LARGE},
    ),
    "the largest score is that of the last piece alone": (
        (MOST, "s_Hcc.amax(dim=-1, keepdim=True)"),
        {LARGE},
    ),
    "the keys of later ranks are seen": (
        (SEEN, "        if True:\n"),
        {CONSECUTIVE, GRADIENTS, UNEQUAL},
    ),
    "each rank's own block is seen whole": (
        (ADD, ADD.replace("visitor == RANK", "False")),
        {CONSECUTIVE, GRADIENTS, UNEQUAL, GAIN},
    ),
    "the mask compares places on the rank, not in the sequence": (
        [("if theirs <= mine:", "if j <= i:"), ("diagonal=theirs == mine", "diagonal=i == j")],
        {ZIG_ZAG, LARGE, GAIN},
    ),
    "tokens are in zig-zag, the mask is not": (
        [
            ("enumerate(zig_zag(RANK))", "enumerate((2 * RANK, 2 * RANK + 1))"),
            ("enumerate(zig_zag(visitor))", "enumerate((2 * visitor, 2 * visitor + 1))"),
        ],
        {ZIG_ZAG, LARGE, GAIN, UNDER_WAY},
    ),
    "zig-zag deals out the second half in the same direction": (
        ("return rank, 2 * WORLD_SIZE - 1 - rank", "return rank, WORLD_SIZE + rank"),
        {GAIN},
    ),
    "consecutive tokens are dealt out like cards": (
        (".chunk(WORLD_SIZE, dim=-2)[RANK].clone()", "[..., RANK::WORLD_SIZE, :].clone()"),
        {CONSECUTIVE, GRADIENTS},
    ),
    "what earlier ranks have added is dropped": (
        ("leaving = part + arriving", "leaving = part"),
        {GRADIENTS},
    ),
    "delta is left out": ((" - delta_Hc1)", ")"), {GRADIENTS}),
    "weights backward are not divided by their total": (
        (".exp() / running.total_Hc1", ".exp()"),
        {GRADIENTS},
    ),
    "queries get the gradient of one piece": (
        ("dq_HcK += dq_part", "dq_HcK = dq_part"),
        {GRADIENTS},
    ),
    "blocks are sent twice": (
        (HOP, f"        wait_for(start_hop(block, arriving))\n{HOP}"),
        {SENT, SENT_BACK},
    ),
    "gradients are sent twice": (
        (SEND_ON, f"        wait_for(start_hop(leaving, arriving))\n{SEND_ON}"),
        {SENT_BACK},
    ),
    "a hop is awaited before the work": (
        (f"{YIELD}{WAIT}{PASS_ON}", f"{WAIT}{YIELD}{PASS_ON}"),
        {UNDER_WAY},
    ),
    "a hop starts after the work": ((HOP + YIELD, YIELD + HOP), {UNDER_WAY}),
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

PEAK = "other ranks' blocks in memory, at the peak"
ON_GPUS = OnGpus(
    changes=[
        ("torch.randn(2, 2, 64, 512, 128,", "torch.randn(2, 2, 2, 16, 128,"),
        ("largest_error(*with_torch(device))", "0.0"),  # fused kernels exist for CUDA alone
    ],
    hardware={PEAK: "of a small ring; gloo's threads let go when they like"},
)


def check_gradients_of_large_scores() -> None:
    """Their exponentials are infinite; the gradients are not."""
    lesson = load(LESSON)
    torch.manual_seed(0)
    q, k, v, grad = torch.randn(4, 1, 2, 12, 4, dtype=torch.float64)
    whole = [x.requires_grad_() for x in (3000 * q, k, v)]
    F.scaled_dot_product_attention(*whole, is_causal=True).backward(grad)
    q, k, v = [lesson.share(x.detach()) for x in whole]
    block = torch.stack([k, v])
    running = lesson.ring_forward(q, block)
    dq, (dk, dv) = lesson.ring_backward(running, block, lesson.share(grad))
    for ours, x in zip((dq, dk, dv), whole, strict=True):
        assert x.grad.isfinite().all()
        torch.testing.assert_close(ours, lesson.share(x.grad), rtol=1e-8, atol=1e-8)


def test_scores_of_thousands_have_the_gradients_of_one_process() -> None:
    run(check_gradients_of_large_scores, 2)
