"""Capacity, loss and bias against one process; shapes against the planner; broken lines."""

import csv
from collections import defaultdict
from statistics import median
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from course import plan
from course.lessons import ROOT
from course.playing import Lazily, load, play
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "parallelism/20_expert_balance.py"
lesson = Lazily(LESSON)
PRESETS = {
    "Qwen3-30B": "qwen3-30b-a3b",
    "Qwen3-235B": "qwen3-235b-a22b",
    "DeepSeek-V3": "deepseek-v3",
}


def served(cases: list[tuple], size: int) -> list[list[bool]]:
    """Which of this rank's copies are served, in groups of so many ranks."""
    changed = load(LESSON)
    group, _ = dist.new_subgroups(size)
    found = []
    for copies, experts, capacity in cases:
        mine = torch.tensor(copies[dist.get_rank()], dtype=torch.long)
        found.append(changed.within_capacity(mine, experts, capacity, group).tolist())
    return found


def first_come(copies: list[list[int]], capacity: int, size: int) -> list[list[bool]]:
    """The same by one process, of each rank in turn."""
    found = []
    for first in range(0, len(copies), size):
        waiting = defaultdict(int)
        for rank in copies[first : first + size]:
            found.append([])
            for expert in rank:
                waiting[expert] += 1
                found[-1].append(waiting[expert] <= capacity)
    return found


def cases_of(ranks: int) -> st.SearchStrategy:
    """Copies of each rank, uneven in number, some ranks with none; experts; a capacity."""

    def skewed(experts: int) -> st.SearchStrategy:
        expert = st.one_of(st.just(0), st.integers(0, experts - 1))  # half of all to one
        of_ranks = st.lists(st.lists(expert, max_size=9), min_size=ranks, max_size=ranks)
        return st.tuples(of_ranks, st.just(experts), st.integers(0, 9))

    return st.integers(1, 5).flatmap(skewed)


@pytest.mark.parametrize(("ranks", "size"), [(1, 1), (2, 2), (3, 3), (4, 4), (4, 2), (4, 1)])
@settings(max_examples=2, deadline=None)
@given(st.data())
def test_groups_serve_as_one_process_does(ranks: int, size: int, data: st.DataObject) -> None:
    cases = data.draw(st.lists(cases_of(ranks), min_size=5, max_size=9))
    found = run(served, ranks, cases, size)
    for number, (copies, _, capacity) in enumerate(cases):
        assert [of_rank[number] for of_rank in found] == first_come(copies, capacity, size)


@given(st.lists(st.integers(1, 99), min_size=2, max_size=9), st.integers(1, 9))
def test_the_loss_is_1_if_either_factor_is_even(counts: list[int], tokens: int) -> None:
    experts = len(counts)
    scores = torch.rand(tokens, experts).double().softmax(dim=1)
    even = torch.full_like(scores, 1 / experts)
    assert lesson.balance_loss(even, torch.tensor(counts)).item() == pytest.approx(1)
    assert lesson.balance_loss(scores, torch.full((experts,), 7)).item() == pytest.approx(1)


def test_the_loss_pushes_down_the_fullest_expert_most() -> None:
    scores = torch.full((3, 4), 0.25, dtype=torch.float64, requires_grad=True)
    lesson.balance_loss(scores, torch.tensor([6, 3, 2, 1])).backward()
    assert scores.grad[0].tolist() == pytest.approx([4 * count / 12 / 3 for count in (6, 3, 2, 1)])


@given(st.integers(0, 2**20), st.integers(1, 4))
def test_bias_chooses_and_does_not_weigh(seed: int, k: int) -> None:
    torch.manual_seed(seed)
    scores, bias = torch.rand(6, 5).double(), torch.rand(5).double()
    weights, chosen = lesson.choose(scores, bias, k)
    for token in range(6):
        best = sorted(range(5), key=lambda e: -(scores[token, e] + bias[e]).item())[:k]
        assert chosen[token].tolist() == best
        assert weights[token].tolist() == [scores[token, e].item() for e in best]


def test_bias_moves_by_its_rate_or_not_at_all() -> None:
    bias = torch.tensor([0.5, 0.0, 0.0, 0.25])
    lesson.adjust(bias, torch.tensor([9, 5, 5, 1]), 0.125)
    assert bias.tolist() == [0.375, 0.0, 0.0, 0.375]


@pytest.mark.parametrize(("n", "shares"), [(1, [1]), (2, [2, 0]), (4, [2, 1, 1, 0])])
def test_skewed_gives_rank_0_what_the_last_one_has(n: int, shares: list[int]) -> None:
    changed = load(LESSON)
    changed.WORLD_SIZE = n
    found = torch.bincount(changed.skewed(5 * n, torch.device("cpu")), minlength=n)
    assert found.tolist() == [5 * share for share in shares]
    assert changed.imbalance(found) == min(2, n)


def trained(how: str) -> tuple[float, float]:
    changed = load(LESSON, ("STEPS = 150", "STEPS = 6"))
    text = torch.arange(5000) ** 2 % 251
    return changed.train(how, text)


@pytest.mark.parametrize("how", ["neither", "loss", "bias"])
def test_ranks_train_as_one_process_does(how: str) -> None:
    alone = run(trained, 1, how)[0]
    for uneven, loss in run(trained, 3, how):
        assert uneven == pytest.approx(alone[0], rel=0.02)  # a close choice may fall otherwise
        assert loss == pytest.approx(alone[1], rel=1e-3)


@pytest.mark.parametrize("name", PRESETS)
def test_shapes_are_the_planner_s_but_for_the_norms(name: str) -> None:
    shape = plan.read_config(plan.known_models()[PRESETS[name]])._replace(mtp=0)
    ours = lesson.SHAPES[name]
    total = sum(plan.parameters(shape).values())
    assert lesson.parameters(ours, ours.experts) == pytest.approx(total, rel=1e-4)
    flops = plan.flops_per_token(shape, 4096)
    assert lesson.flops_per_token(ours, 4096) == pytest.approx(flops, rel=1e-4)


def published() -> dict[str, list[tuple[float, float]]]:
    """Tokens/s and TFLOP/s of all of NVIDIA's rows of each model."""
    rows = defaultdict(list)
    table = ROOT / "tests/data/megatron_bridge_perf.csv"
    for row in csv.DictReader(table.open(encoding="utf-8")):
        for name, start in {
            "Qwen3-30B": "Qwen3_30B",
            "Qwen3-235B": "Qwen3_235B",
            "DeepSeek-V3": "DeepSeekV3",
        }.items():
            if row["model"].startswith(start):
                mtp = name == "DeepSeek-V3" and "w/o" not in row["model"]
                figures = (float(row["tok_s_gpu"]), float(row["model_tflop_s_gpu"]))
                rows[f"{name}, MTP" if mtp else name].append(figures)
    return rows


def test_flops_are_the_median_of_all_published_rows_to_half_a_percent() -> None:
    rows = published()
    assert {name: len(found) for name, found in rows.items()} == {
        "Qwen3-30B": 35,
        "Qwen3-235B": 3,
        "DeepSeek-V3": 4,
        "DeepSeek-V3, MTP": 28,
    }
    for name, found in rows.items():
        m = lesson.SHAPES[name.removesuffix(", MTP")]
        ours = lesson.flops_per_token(m, 4096)
        if name.endswith("MTP"):  # one layer more, its projection, and the head again
            ours = lesson.flops_per_token(m._replace(layers=m.layers + 1), 4096)
            ours += 6 * (2 * m.hidden**2 + m.vocab * m.hidden)
        theirs = median(tflops * 1e12 / tokens for tokens, tflops in found)
        assert theirs == pytest.approx(ours, rel=0.005), name


def test_the_rows_of_the_lesson_are_a_part_of_the_table() -> None:
    rows = published()
    for name, (_, _, figures) in lesson.PUBLISHED.items():
        assert set(figures) <= set(rows[name])


def test_the_answers_numbers() -> None:
    """Those of *What you should have seen*."""
    shares = {}
    for name, m in lesson.SHAPES.items():
        routed = 6 * (m.layers - m.dense) * m.k * 3 * m.hidden * m.expert
        shares[name] = (routed, lesson.flops_per_token(m, 4096))
    routed, all_of_it = shares["Qwen3-30B"]
    assert (round(routed / 1e9, 1), round(all_of_it / 1e9, 1)) == (10.9, 23.1)
    rounded = {name: round(100 * part / whole) for name, (part, whole) in shares.items()}
    assert rounded == {"Qwen3-30B": 47, "Qwen3-235B": 57, "DeepSeek-V3": 49}
    m = lesson.SHAPES["Qwen3-30B"]
    experts = m.layers * m.experts * 3 * m.hidden * m.expert
    assert round(100 * experts / lesson.parameters(m, m.experts)) == 95
    assert round(100 * (1 / 2 - 1.25 / 4)) == 19


FLOPS = "skewed: FLOPs of the slowest rank / even"
DROPPED, FULLEST = (
    f"capacity 1: {what}"
    for what in ("share of copies dropped", "copies of the fullest rank / even")
)
ALL, EACH = (f"{who} a group: copies served otherwise" for who in ("all ranks", "each rank"))
OWN, WORLD = (f"{whose}: the balancing loss" for whose in ("own counts", "counts of all ranks"))
GRADIENT = "loss: error of the router's gradient"
BIAS = "bias: experts with another one than due"
RESCORED = "bias of 10 for expert 3: tokens it rescores"
UNEVEN = "neither: imbalance, at least"
BY_LOSS, BY_BIAS = (f"{how}: imbalance, at most" for how in ("loss", "bias"))
LEARNED = "each: nats per byte, at most"
OF_DEEPSEEK = {
    f"DeepSeek-V3: {what}"
    for what in ("billions of parameters", "billions that a token meets", "GFLOPs per token")
}
TOTAL = {f"{name}: billions of parameters" for name in PRESETS}
MET = {f"{name}: billions that a token meets" for name in PRESETS}
PER_TOKEN = {f"{name}: GFLOPs per token" for name in PRESETS}
SHARE = "Qwen3-30B: share of a token's FLOPs in experts"

BEFORE = "    before_E = sum(counts_nE[: dist.get_rank(group)])"
LINES = {
    "capacity is counted per rank (Try)": (
        (BEFORE, "    before_E = 0"),
        {DROPPED, FULLEST, ALL},
    ),
    "the last ranks are served first": (
        (BEFORE, "    before_E = sum(counts_nE[dist.get_rank(group) + 1 :])"),
        {ALL},
    ),
    "nothing is dropped": (
        ("[:, 0] <= capacity", "[:, 0] <= 9 * capacity"),
        {DROPPED, FULLEST, ALL, EACH},
    ),
    "a rank's group is all ranks": (
        ("(expert_C, WORLD_SIZE, 30, alone)", "(expert_C, WORLD_SIZE, 30, None)"),
        {EACH},
    ),
    "each rank counts its own tokens": (
        ("    dist.all_reduce(count_E)\n    return count_E", "    return count_E"),
        {DROPPED, FULLEST, WORLD, GRADIENT, BIAS},
    ),
    "the loss is not scaled by E": (
        ("return len(count_E) * (share_E", "return (share_E"),
        {OWN, WORLD, GRADIENT},
    ),
    "counts in place of shares": (
        ("count_E.double() / count_E.sum()", "count_E.double()"),
        {OWN, WORLD, GRADIENT},
    ),
    "probabilities are added up": (
        ("(share_E * score_NE.mean(dim=0))", "(share_E * score_NE.sum(dim=0))"),
        {OWN, WORLD, GRADIENT},
    ),
    "the output is weighted with the bias (Try)": (
        ("return score_NE.gather(1, expert_NK)", "return (score_NE + bias_E).gather(1, expert_NK)"),
        {RESCORED},
    ),
    "the bias chooses nothing": (
        ("(score_NE + bias_E).topk", "score_NE.topk"),
        {RESCORED},
    ),
    "the bias goes the wrong way": (
        ("bias_E += rate * too_few_E.sign()", "bias_E -= rate * too_few_E.sign()"),
        {BIAS},
    ),
    "the bias moves by the difference": (
        ("rate * too_few_E.sign()", "rate * too_few_E"),
        {BIAS},
    ),
    "routing that is not skewed": (
        ("    return expert_C * (expert_C < WORLD_SIZE - 1)\n", "    return expert_C\n"),
        {FLOPS, DROPPED},
    ),
    "shared experts are forgotten": (
        ("(experts + m.shared) * 3", "experts * 3"),
        OF_DEEPSEEK,
    ),
    "every layer is a mixture": (
        ("(m.layers - m.dense) * mixture", "m.layers * mixture"),
        OF_DEEPSEEK,
    ),
    "one table instead of two": (
        ("2 * m.vocab * m.hidden", "m.vocab * m.hidden"),
        TOTAL | MET | PER_TOKEN | {SHARE},
    ),
    "the embedding is multiplied": (
        ("parameters(m, m.k) - m.vocab * m.hidden", "parameters(m, m.k)"),
        PER_TOKEN | {SHARE},
    ),
    "all of attention": (
        ("3 * m.layers * m.heads", "6 * m.layers * m.heads"),
        PER_TOKEN | {SHARE},
    ),
}
UNTRAINED = [
    ("    check_training(torch.frombuffer(text, dtype=torch.uint8).long().to(device))\n", "")
]
TRAINED = {
    "the loss weighs nothing": (("COEFFICIENT = 0.1", "COEFFICIENT = 0.0"), {BY_LOSS}),
    "the bias does not move": (("RATE = 0.002", "RATE = 0.0"), {BY_BIAS}),
    "the loss is added always": ((' if how == "loss" else 0', ""), {UNEVEN}),
    "another byte is to be predicted": (
        ("(logits_NV, window_NT[:, -1])", "(logits_NV, window_NT[:, -1].roll(1))"),
        {LEARNED, BY_BIAS},
    ),
}
CLOCK = {
    "the even rows are timed twice": (
        ("zip(inputs, tries, strict=True)", "zip((inputs[0], inputs[0]), tries, strict=True)"),
        {"skewed: CPU seconds of rank 0 / even"},
    ),
}
BREAKS = [
    Breaks(CLOCK, ranks=4, changes=UNTRAINED, clock=True),
    Breaks(LINES, ranks=4, changes=UNTRAINED, alone=["a rank's group is all ranks"]),
    Breaks(TRAINED, alone=["the loss is added always"]),
]

ON_GPUS = OnGpus(
    changes=[
        ("STEPS = 150", "STEPS = 4"),
        ("copies = 32768 //", "copies = 64 //"),
        ("repeats: int = 20", "repeats: int = 1"),
    ]
)


@pytest.mark.deep
def test_it_holds_on_8_ranks() -> None:
    play(LESSON, 8, *UNTRAINED, deadline=200).expect(set())


def test_a_skewed_layer_on_gpus_is_held_against_an_even_one() -> None:
    changed = load(LESSON)
    changed.WORLD_SIZE = 4
    ms = iter([10.0, 19.0])
    changed.layer_ms = lambda expert_C, expert: next(ms)
    changed.slowest = lambda x, device: x
    with patch.object(torch.cuda, "is_bf16_supported", return_value=True):
        changed.measure_on_gpus(torch.device("meta"))
    assert changed.ledger[0]["measured"] == pytest.approx(1.9)
