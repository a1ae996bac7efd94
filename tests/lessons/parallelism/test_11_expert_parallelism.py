"""Dispatch and combine against a loop over tokens, skewed and over several ranks; broken lines."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._functional_collectives import all_to_all_single_autograd

from course.playing import load
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "parallelism/11_expert_parallelism.py"
CLOSE = 1e-11  # float64, sums of some hundred terms, relative to numbers of about 1


def one_token(x: torch.Tensor, router: torch.Tensor, experts: list, k: int) -> torch.Tensor:
    """The output of one token: its k best experts, one after the other."""
    scores = (router @ x).softmax(dim=0)
    best = sorted(range(len(scores)), key=lambda e: scores[e].item(), reverse=True)[:k]
    y = torch.zeros_like(x)
    for e in best:
        gate, up, down = (weights[e] for weights in experts)
        y = y + scores[e] * ((F.silu(x @ gate) * (x @ up)) @ down)
    return y


def layer_error(cases: list[tuple], copies: int) -> float:
    """How far outputs and gradients are from one process, with so many copies of each expert."""
    lesson = load(LESSON)
    rank, n = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (copies, n // copies), mesh_dim_names=("copy", "expert"))
    ep, part = mesh["expert"].size(), mesh.get_local_rank("expert")
    worst = 0.0
    for tokens, per_rank, k, skew, seed in cases:
        torch.manual_seed(seed)
        experts = ep * per_rank
        lesson.K = min(k, experts)
        x = torch.randn(n * tokens, 3).double()
        x[:, 0] = 1
        router = torch.randn(experts, 3).double()
        router[:, 0] = skew * torch.arange(experts)  # the last experts get the most
        shapes = [(experts, 3, 4), (experts, 3, 4), (experts, 4, 3)]
        weights = [torch.randn(shape).double() for shape in shapes]
        whole = [tensor.clone().requires_grad_() for tensor in (x, router, *weights)]
        y = torch.stack([one_token(row, whole[1], whole[2:], lesson.K) for row in whole[0]])
        y.square().mean().backward()

        mine = x.chunk(n)[rank].clone().requires_grad_()
        own_router = lesson.Router(router.clone())
        own = lesson.Experts(*[tensor.chunk(ep)[part].clone() for tensor in weights])
        ours = lesson.expert_parallel(mine, own_router, own, mesh.get_group("expert"))
        ours.square().mean().backward()
        lesson.WORLD_SIZE = n
        lesson.complete_gradients(own_router, own, mesh.get_group("copy"))
        pairs = [(ours, y.chunk(n)[rank]), (mine.grad / n, whole[0].grad.chunk(n)[rank])]
        pairs.append((own_router.weight_ED.grad, whole[1].grad))
        for parameter, expected in zip(own.parameters(), whole[2:], strict=True):
            pairs.append((parameter.grad, expected.grad.chunk(ep)[part]))
        for a, b in pairs:
            assert a.shape == b.shape
            worst = max(worst, ((a - b).abs().max() / max(1, b.abs().max())).item())
    return worst


layers = st.tuples(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.sampled_from([0, 1, 20]),
    st.integers(0, 99),
)  # fmt: skip


@pytest.mark.parametrize(("n", "copies"), [(1, 1), (2, 1), (2, 2), (3, 1), (4, 1), (4, 2)])
@settings(max_examples=2, deadline=None)
@given(st.lists(layers, min_size=3, max_size=6))
def test_any_number_of_experts_and_any_skew_equal_one_process(
    n: int, copies: int, cases: list
) -> None:
    assert max(run(layer_error, n, cases, copies)) < CLOSE


def all_to_one(rank_with_all: int) -> float:
    """One rank has the experts of all tokens; the others take part, with gradients of 0."""
    lesson = load(LESSON)
    rank, n = dist.get_rank(), dist.get_world_size()
    experts = lesson.Experts(*[torch.ones(shape) for shape in ((1, 2, 2), (1, 2, 2), (1, 2, 2))])
    x = torch.ones(3, 2, requires_grad=True)

    def router(x_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(len(x_ND), 1), torch.full((len(x_ND), 1), rank_with_all)

    y = lesson.expert_parallel(x, router, experts, None)
    y.sum().backward()
    assert (x.grad != 0).all()
    assert experts.gate_eDH.grad.count_nonzero().item() == (4 if rank == rank_with_all else 0)
    assert n > 1
    return y.sum().item()


def test_ranks_without_a_token_take_part() -> None:
    expected = 3 * 2 * 2 * F.silu(torch.tensor(2.0)).item() * 2
    assert run(all_to_one, 3, 1) == pytest.approx([expected] * 3)


def pytorchs_differs() -> int:
    """Numbers in which our all-to-all and PyTorch's differ, forward and backward; parts 0 to 2."""
    lesson = load(LESSON)
    rank, n = dist.get_rank(), dist.get_world_size()
    sent = [(rank + 2 * other + 1) % 3 for other in range(n)]
    received = [(other + 2 * rank + 1) % 3 for other in range(n)]
    row = torch.randn(sum(sent), 3, requires_grad=True)
    ours = lesson.AllToAll.apply(row, sent, received, None)
    theirs = all_to_all_single_autograd(row, received, sent, dist.group.WORLD)
    weight = torch.randn_like(ours)
    (ours_grad,) = torch.autograd.grad(ours, row, weight)
    (theirs_grad,) = torch.autograd.grad(theirs, row, weight)
    return int((ours != theirs).sum() + (ours_grad != theirs_grad).sum())


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_our_all_to_all_is_pytorch_s(n: int) -> None:
    assert run(pytorchs_differs, n) == [0] * n


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))
def test_in_turn_gives_all_experts_as_many_copies(experts: int, times: int, k: int) -> None:
    k = min(k, experts)
    scores, chosen = load(LESSON).in_turn(torch.zeros(experts * times, 2), experts, k)
    assert torch.bincount(chosen.flatten()).tolist() == [k * times] * experts
    assert all(len(set(row)) == k for row in chosen.tolist())
    assert scores.sum(dim=1).tolist() == pytest.approx([1] * experts * times)


def test_the_answers_numbers() -> None:
    """Those of *What you should have seen*, from Qwen3-30B's config.json."""
    layers, experts, k, D, H = 48, 128, 8, 2048, 768
    one = 3 * D * H
    assert 9 * experts * H / (4 * k) == 27_648
    per_token = k * 7 / 8 * D * 2
    assert round(per_token / 1e3) == 29
    assert round(4 * layers * per_token / 1e6, 1) == 5.5
    assert round(layers * experts * one / 1e9, 1) == 29.0
    assert round(layers * k * one / 1e9, 1) == 1.8
    assert round(2 * k * one * 4096 / 1e9) == 309
    assert round(309e9 / (0.4 * 989e12) * 1e3, 1) == 0.8
    assert round(4096 * per_token / 1e6) == 117
    assert round(117e6 / 450e9 * 1e3, 2) == 0.26
    assert round(117e6 / 50e9 * 1e3, 1) == 2.3


NAMES = ("one copy", "several copies")
OUTPUT = {f"{name}: error of the output" for name in NAMES}
OTHERS = {f"{name}: error of the other gradients" for name in NAMES}
EXPERTS = {f"{name}: error of the experts' gradients" for name in NAMES}
ADDED = "several copies: gradient added up / the oracle's"
CALLS = "all-to-alls of tokens, forward and backward"
COUNTS = "all-to-alls of counts"
EVEN = "even routing: numbers to other ranks / (N D)"
VALUES = OUTPUT | OTHERS | EXPERTS | {ADDED}

OF_ROUTER = "    for parameter in router.parameters():\n"
OF_EXPERTS = "    for parameter in experts.parameters():\n"
ALL_RANKS = "        dist.all_reduce(parameter.grad)\n"
COPIES = "        dist.all_reduce(parameter.grad, group=copies)\n"
DIVIDED = "        parameter.grad /= WORLD_SIZE\n"
AVERAGED = "        parameter.grad /= dist.get_world_size(copies)\n"
EXCHANGED = "    dist.all_to_all_single(their_ne, count_ne, group=group)\n"
DISPATCHED = "AllToAll.apply(row_CD, sent, received, group)"
RETURNED = "    y_CD = AllToAll.apply(y_RD"
LINES = {
    "a token is combined with another's scores (Try)": (
        ("score_NK.flatten()[way.order_C]", "score_NK.flatten()"),
        VALUES,
    ),
    "averaged over the copies (Try)": (
        (OF_EXPERTS + COPIES + DIVIDED, OF_EXPERTS + COPIES + AVERAGED),
        EXPERTS,
    ),
    "experts' gradients are added up over all ranks": (
        (OF_EXPERTS + COPIES, OF_EXPERTS + ALL_RANKS),
        EXPERTS,
    ),
    "copies' gradients are not added up": (
        (OF_EXPERTS + COPIES, OF_EXPERTS),
        {"several copies: error of the experts' gradients"},
    ),
    "the router's gradient is not added up": ((OF_ROUTER + ALL_RANKS, OF_ROUTER), OTHERS),
    "the router's gradient is added up over the copies only": (
        (OF_ROUTER + ALL_RANKS, OF_ROUTER + COPIES),
        OTHERS,
    ),
    "rows go to the rank's other expert": (
        (".repeat(n)\n", ".repeat_interleave(n)\n"),
        VALUES,
    ),
    "rows are not sorted by expert": (("row_RD[order_R], their_ne", "row_RD, their_ne"), VALUES),
    "rows go back as they are, by expert": (("y_RD[way.order_R.argsort()]", "y_RD"), VALUES),
    "combine adds rows to other tokens": (
        ("index_add(0, way.order_C // score_NK.shape[1]", "index_add(0, way.order_C % N"),
        VALUES,
    ),
    "scores over the tokens": (
        (".softmax(dim=1)\n        score_NK", ".softmax(dim=0)\n        score_NK"),
        VALUES,
    ),
    "the scores do not count": (
        ("score_C[:, None] * y_CD", "(1 + 0 * score_C)[:, None] * y_CD"),
        VALUES,
    ),
    "rows bring no gradient back": (
        ("row_CD = x_ND[order_C", "row_CD = x_ND.detach()[order_C"),
        OTHERS | {CALLS},
    ),
    "rows travel twice": (
        (RETURNED, f"    exchange(y_RD, way.received, way.sent, group)\n{RETURNED}"),
        {CALLS},
    ),
    "counts travel twice": ((EXCHANGED, 2 * EXCHANGED), {COUNTS}),
    "rows are sent twice as wide": (
        (
            DISPATCHED,
            "AllToAll.apply(torch.cat([row_CD, row_CD], dim=1), sent, received, group)"
            "[:, : x_ND.shape[1]]",
        ),
        {EVEN},
    ),
}
BREAKS = Breaks(LINES, ranks=4)

ON_GPUS = OnGpus(
    changes=[("rows = 4096 * 8", "rows = 64"), ("repeats: int = 20", "repeats: int = 1")]
)


@pytest.mark.deep
def test_the_link_is_held_against_the_bytes_that_cross_it() -> None:
    """Three quarters of what each of four ranks sends leave it."""
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 4
    ms = iter([2.0, 1.0])  # all-to-all, link
    lesson.median_ms = lambda work: next(ms)
    with patch.dict("os.environ", LOCAL_WORLD_SIZE="4"):
        lesson.measure_on_gpus(torch.device("meta"))
    found = [row["measured"] for row in lesson.ledger]
    assert found == pytest.approx([3 / 4 / 2])
