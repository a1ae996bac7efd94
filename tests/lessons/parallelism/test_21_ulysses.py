"""Both ways against torch's attention, whatever tokens, heads and ranks; bytes; broken lines."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from course.lessons import ROOT
from course.playing import Lazily, load
from course.ranks import run
from course.wire import carried
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "parallelism/21_ulysses.py"
CLOSE = 1e-12  # float64, sums of some hundred terms
lesson = Lazily(LESSON)
few = st.integers(1, 4)


@given(few, few, st.integers(1, 12))
def test_each_rank_has_the_keys_of_its_queries(grouped: int, key_heads: int, n: int) -> None:
    heads = grouped * key_heads
    q_BHtK = torch.arange(heads).view(1, heads, 1, 1)
    k_BGtK = torch.arange(key_heads).view(1, key_heads, 1, 1)
    if heads % n != 0:
        with pytest.raises(RuntimeError, match="unflatten"):
            lesson.heads_by_rank(q_BHtK, k_BGtK, k_BGtK, n)
        return
    by_rank = lesson.heads_by_rank(q_BHtK, k_BGtK, -k_BGtK, n)
    assert torch.equal(by_rank[1], -by_rank[2])
    assert by_rank[1].numel() == math.lcm(n, key_heads), "fewer copies would do"
    for rank in range(n):
        queries, keys, _ = (x[0, rank].flatten().tolist() for x in by_rank)
        assert queries == list(range(heads))[rank * heads // n : (rank + 1) * heads // n]
        assert len(queries) % len(keys) == 0
        for place, query in enumerate(queries):
            assert keys[place * len(keys) // len(queries)] == query // grouped


def way_error(
    tokens: int, batch: int, heads: int, key_heads: int, features: int, way: str
) -> float:
    """How far outputs and gradients of this rank are from one process's."""
    ours = load(LESSON)
    torch.manual_seed(tokens)
    of_each = (heads, key_heads, key_heads, heads)
    *whole, grad = [torch.randn(batch, h, tokens, features).double() for h in of_each]
    for x in whole:
        x.requires_grad_()
    due = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    due.backward(grad)
    mine = [ours.share(x.detach()).requires_grad_() for x in whole]
    out = ours.WAYS[way](*mine)
    out.backward(ours.share(grad))
    pairs = [(out * ours.share(torch.ones_like(grad)), ours.share(due))]
    pairs += [(a.grad, ours.share(b.grad)) for a, b in zip(mine, whole, strict=True)]
    return max((a - b).abs().max().item() for a, b in pairs)


def largest(cases: list[tuple]) -> float:
    """The largest error of these cases, one after another on the same ranks."""
    return max(way_error(*case) for case in cases)


shapes = st.tuples(st.integers(1, 30), st.integers(1, 2), few, few, st.integers(1, 5))
ways = st.sampled_from(["gathered", "Ulysses"])


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@settings(max_examples=2, deadline=None)
@given(st.lists(st.tuples(shapes, ways), min_size=4, max_size=9))
def test_both_ways_equal_one_process(n: int, drawn: list[tuple]) -> None:
    cases = []
    for (tokens, batch, grouped, key_heads, features), way in drawn:
        heads = math.lcm(grouped * key_heads, n if way == "Ulysses" else 1)
        cases.append((tokens, batch, heads, key_heads, features, way))
    assert max(run(largest, n, cases)) < CLOSE


@pytest.mark.deep
def test_eight_ranks_and_fewer_tokens_and_keys_than_ranks() -> None:
    cases = [(tokens, 1, 24, 3, 4, way) for tokens in (1, 7, 9) for way in ("gathered", "Ulysses")]
    assert max(run(largest, 8, cases)) < CLOSE


def on_the_sockets(way: str) -> tuple[float, float]:
    """Bytes that this rank's sockets send forward and backward, in units of its keys and values."""
    ours = load(LESSON)
    q, grad = torch.randn(2, 1, 8, 512, 64, dtype=torch.float64)
    k, v = torch.randn(2, 1, 4, 512, 64, dtype=torch.float64)
    for x in (q, k, v):
        x.requires_grad_()
    counts = []

    def count() -> None:
        dist.barrier()
        counts.append(sum(carried().values()) / (k.nbytes + v.nbytes))
        dist.barrier()

    count()
    out = ours.WAYS[way](q, k, v)
    count()
    out.backward(grad)
    count()
    return counts[1] - counts[0], counts[2] - counts[1]


@pytest.mark.parametrize("n", [2, 4])
def test_the_sockets_carry_what_the_formulas_say(n: int) -> None:
    """Except for gloo's reduce-scatter, which is an all-reduce inside (communication/01)."""
    sent = (n - 1) / n * (8 + 4) / 4
    for forward, backward in run(on_the_sockets, n, "Ulysses"):
        if backward:  # the kernel tells
            assert forward == pytest.approx(sent, rel=0.01)
            assert backward == pytest.approx(sent, rel=0.01)
    for forward, backward in run(on_the_sockets, n, "gathered"):
        if backward:
            assert forward == pytest.approx(n - 1, rel=0.01)


def not_hidden(t: float, link: float) -> dict[str, float]:
    """Seconds of a forward pass that attention does not hide, and those of attention itself.

    Of Llama 3 8B, in bf16, on 8 GPUs of 400 TFLOP/s, t tokens per rank.
    """
    step = 2 * 2 * 2 * (t / 2) ** 2 * 128 * 32 / 400e12  # two pieces of two products
    hop = 2 * t * 8 * 128 * 2 / link
    exchanges = 2 * 7 / 8 * (32 + 8) * t * 128 * 2 / link
    found = {"ring": 7 * max(0.0, hop - step), "gather": 7 * hop, "Ulysses": exchanges}
    return found | {"attention": 8 * step}


@pytest.mark.parametrize(
    ("link", "percent", "length"), [(450e9, "1.5%", 167), (50e9, "13%", 1_500)]
)
def test_which_way_costs_least(link: float, percent: str, length: int) -> None:
    """What the lesson says under *When* and *On GPUs*."""
    long = not_hidden(131_072 / 8, link)
    assert f"{100 * long['Ulysses'] / long['attention']:.2g}%" == percent
    shorter = not_hidden(0.99 * length, link)
    longer = not_hidden(1.01 * length, link)
    assert shorter["ring"] > shorter["Ulysses"]
    assert longer["ring"] < longer["Ulysses"]
    for seconds in (shorter, longer, long):
        assert seconds["gather"] >= max(seconds["ring"], seconds["Ulysses"])
    text = (ROOT / LESSON).read_text()
    assert percent in text
    assert f"{length:,} " in text


GATHERED, ULYSSES = (
    {f"{name}: error of the output", f"{name}: error of the gradients"}
    | {f"{name}, 1 to 10 tokens: largest error"}
    for name in ("gathered", "Ulysses")
)
FEW = "Ulysses, 2 heads of keys: largest error"
G_SENT, G_BACK, U_SENT, U_BACK = (
    f"{name}: sent {way} / my keys and values"
    for name in ("gathered", "Ulysses")
    for way in ("forward", "backward")
)
G_FLOPS, U_FLOPS = (f"{name}: FLOPs, last rank / first" for name in ("gathered", "Ulysses"))
G_KEPT, U_KEPT = (
    f"{name}: q, k and v kept / my keys and values" for name in ("gathered", "Ulysses")
)
CALLS = "Ulysses: all-to-alls forward"
MOST = "32 heads: most ranks that Ulysses takes"

PUT_TOGETHER = "    k_BGTK, v_BGTK = GatherTokens.apply(torch.stack([k_BGtK, v_BGtK]))"
ATTENTION = "(q_BHtK, k_BGsK, v_BGsK, mask_ts, enable_gqa=True)"
EXCHANGED = "        dist.all_to_all_single(arrived_nBhtK, parts_nBhtK)\n"
BACK = "    return heads_to_tokens(out_BhTK)"
COPIES = "math.lcm(n, key_heads) // key_heads"
IN_THE_MODELS_ORDER = "torch.cat([x.flatten(1, 2) for x in by_rank], dim=1)"
LINES = {
    "all keys are seen": (
        ("seen = (RANK + 1) * t", "seen = WORLD_SIZE * t"),
        GATHERED | {G_FLOPS},
    ),
    "a rank's keys get the gradients of its own queries alone": (
        ("        return grad_2BGtK\n", "        return parts[RANK]\n"),
        GATHERED - {"gathered: error of the output"},
    ),
    "the mask counts from the rank's first token": (
        (ATTENTION, ATTENTION.replace("mask_ts", "is_causal=True")),
        GATHERED,
    ),
    "values are gathered twice": (
        [
            (
                PUT_TOGETHER,
                PUT_TOGETHER.replace("BGTK =", "BGTK, _ =").replace("v_BGtK]", "v_BGtK, v_BGtK]"),
            ),
            ("new_empty(WORLD_SIZE * 2,", "new_empty(WORLD_SIZE * 3,"),
        ],
        {G_SENT, G_BACK, G_KEPT},
    ),
    "Ulysses sees the future": (
        ("q_BhTK, k_BgTK, v_BgTK, is_causal=True", "q_BhTK, k_BgTK, v_BgTK"),
        ULYSSES | {FEW},
    ),
    "heads are not in order rank by rank (Try)": (
        (
            "    mine = tokens_to_heads(torch.cat(by_rank, dim=2).flatten(1, 2))",
            f"    mine = tokens_to_heads({IN_THE_MODELS_ORDER})",
        ),
        ULYSSES | {FEW},
    ),
    "copies of keys lie in the wrong order (Try)": (
        ("x.repeat_interleave(copies, dim=1)", "x.repeat(1, copies, 1, 1)"),
        {FEW},
    ),
    "heads of keys are copied though they need not be": (
        (COPIES, f"2 * ({COPIES})"),
        {U_SENT, U_BACK, U_KEPT},
    ),
    "attention gets keys of its own": (
        ("k_BGsK = k_BGTK[:, :, :seen]", "k_BGsK = k_BGTK[:, :, :seen].clone()"),
        {G_KEPT},
    ),
    "no head of keys has more than two copies": ((COPIES, f"min(2, {COPIES})"), {MOST}),
    "no gradient is sent back": (
        ("        return Exchange.apply(grad_nBhtK)\n", "        return grad_nBhtK\n"),
        ULYSSES - {"Ulysses: error of the output"} | {FEW, U_BACK},
    ),
    "everything is exchanged twice": ((EXCHANGED, 2 * EXCHANGED), {U_SENT, U_BACK, CALLS}),
    "the last rank attends twice": (
        (
            BACK,
            "    if RANK == WORLD_SIZE - 1:\n"
            "        F.scaled_dot_product_attention(q_BhTK, k_BgTK, v_BgTK, enable_gqa=True)\n"
            + BACK,
        ),
        {U_FLOPS},
    ),
}
BREAKS = [Breaks(LINES, ranks=4)]

ON_GPUS = OnGpus(changes=[("131_072 // n", "1_024 // n")])
