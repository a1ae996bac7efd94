"""Shapes against the planner and all published rows; the layer's parts; broken lines."""

import csv
from collections import defaultdict
from statistics import median

import pytest
import torch
import torch.nn.functional as F

from course import plan
from course.lessons import ROOT
from course.playing import Lazily
from tests.lessons.every import Breaks, test_lesson  # noqa: F401

LESSON = "parallelism/24_expert_accounting.py"
lesson = Lazily(LESSON)
PRESETS = {
    "Qwen3-30B": "qwen3-30b-a3b",
    "Qwen3-235B": "qwen3-235b-a22b",
    "DeepSeek-V3": "deepseek-v3",
}


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
    for name, figures in lesson.SPEEDS.items():
        assert set(figures) <= set(rows[name])


def test_the_numbers_of_the_questions_and_answers() -> None:
    """Those of *Predict*, of section 4, and of *What you should have seen*."""
    shares = {}
    for name, m in lesson.SHAPES.items():
        routed = 6 * (m.layers - m.dense) * m.k * 3 * m.hidden * m.expert
        shares[name] = (routed, lesson.flops_per_token(m, 4096))
    routed, flops = shares["Qwen3-30B"]
    assert (round(routed / 1e9, 1), round(flops / 1e9, 1)) == (10.9, 23.1)
    rounded = {name: round(100 * part / whole) for name, (part, whole) in shares.items()}
    assert rounded == {"Qwen3-30B": 47, "Qwen3-235B": 57, "DeepSeek-V3": 49}
    m = lesson.SHAPES["Qwen3-30B"]
    in_millions = [m.attention, m.hidden * m.experts, 3 * m.hidden * m.expert, m.vocab * m.hidden]
    assert [round(n / 1e6, 2) for n in in_millions] == [18.87, 0.26, 4.72, 311.16]
    scores = flops - 6 * lesson.used(m)
    assert round(scores / 1e9, 2) == 4.83
    assert round(100 * scores / flops) == 21
    assert round((flops + scores) / 1e9, 1) == 27.9
    stored = lesson.parameters(m, m.experts)
    experts = stored - lesson.parameters(m, 0)
    assert (round(experts / 1e9, 2), round(100 * experts / stored)) == (28.99, 95)
    assert round((stored - experts) / 1e9, 2) == 1.54
    held = lesson.parameters(m, 32)
    assert (round(held / 1e9, 2), round(16 * held / 1e9)) == (8.79, 141)
    assert 16 * lesson.parameters(m, 16) < 85e9 < 16 * held  # what 80 GiB hold
    assert round((lesson.used(m) - m.vocab * m.hidden) / m.layers / 1e6, 1) == 56.9
    assert round((lesson.used(m) + m.vocab * m.hidden) / 1e9, 2) == 3.35
    with_all = flops + 6 * (stored - lesson.parameters(m, m.k))
    assert round(with_all / 1e9) == 186
    assert (round(with_all / flops, 2), round(40 * with_all / flops)) == (8.07, 323)
    assert [round(100 * 45275 * each / 5e15) for each in (flops, with_all)] == [21, 169]
    m = lesson.SHAPES["DeepSeek-V3"]
    shared = 6 * (lesson.parameters(m, 0) - lesson.parameters(m._replace(shared=0), 0))
    routed, flops = shares["DeepSeek-V3"]
    assert round(100 * (routed + shared) / flops) == 55


def test_the_cards_count_the_embedding_as_used() -> None:
    """3.3, 22 and 37 billion are activated, they say: ours, with the embedding, to 2%."""
    for name, card in {"Qwen3-30B": 3.3, "Qwen3-235B": 22, "DeepSeek-V3": 37}.items():
        m = lesson.SHAPES[name]
        with_embedding = lesson.used(m) + m.vocab * m.hidden
        assert with_embedding / 1e9 == pytest.approx(card, rel=0.02)


def test_a_dense_model_on_the_same_gpus_has_three_times_the_mfu() -> None:
    table = ROOT / "tests/data/megatron_bridge_perf.csv"
    found = {}
    for row in csv.DictReader(table.open(encoding="utf-8")):
        where = (row["release"], row["system"], row["gpus"])
        if where == ("25.11", "DGX-GB300", "8") and "FP8-MX" in row["precision"]:
            found[row["model"]] = round(float(row["model_tflop_s_gpu"]) / 50)
    assert (found["LLAMA3_8B"], found["Qwen3_30B_a3B"]) == (39, 13)


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("Qwen3-30B", [30.5, 29.0, 1.5, 5.2, 2.0]),
        ("Qwen3-235B", [235.1, 227.1, 8.0, 36.4, 11.5]),
        ("DeepSeek-V3", [671.0, 653.9, 17.1, 98.9, 27.3]),
    ],
)
def test_the_table_of_expert_parallelism(name: str, columns: list[float]) -> None:
    m = lesson.SHAPES[name]
    stored = lesson.parameters(m, m.experts)
    rest = lesson.parameters(m, 0)
    held = [lesson.parameters(m, m.experts // n) for n in (8, 64)]
    assert [round(n / 1e9, 1) for n in (stored, stored - rest, rest, *held)] == columns
    if name == "DeepSeek-V3":
        assert round(16 * held[1] / 1e9) == 437


def real(part: torch.nn.Module) -> torch.nn.Module:
    """The same, with values."""
    torch.manual_seed(0)
    part = part.to_empty(device="cpu").double()
    for parameter in part.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return part


def test_attention_is_torch_s_own_without_a_mask() -> None:
    part = real(lesson.QwenAttention(6))
    x_TD = torch.randn(5, 6).double()
    q_HTC, k_GTC, v_GTC = (
        each(x_TD).view(5, -1, 128).transpose(0, 1) for each in (part.q, part.k, part.v)
    )
    y_HTC = F.scaled_dot_product_attention(q_HTC, k_GTC, v_GTC, enable_gqa=True)
    expected = part.out(y_HTC.transpose(0, 1).reshape(5, -1))
    assert (part(x_TD) - expected).abs().max() < 1e-12 * expected.abs().max()


def test_an_expert_is_llama_s_mlp() -> None:
    part = real(lesson.Expert(6, 4))
    x_RD = torch.randn(3, 6).double()
    expected = (F.silu(x_RD @ part.gate.weight.T) * (x_RD @ part.up.weight.T)) @ part.down.weight.T
    assert (part(x_RD) - expected).abs().max() < 1e-12


def test_each_token_chooses_8_experts_and_they_are_not_even() -> None:
    rows_E = lesson.route(lesson.QWEN3_30B)
    assert sum(rows_E) == 8 * 4096
    assert len(rows_E) == 128
    assert min(rows_E) < 256 < max(rows_E)


STORED = {name: f"{name}: billions stored, as in its checkpoint" for name in PRESETS}
GFLOPS = {name: f"{name}: GFLOPs per token" for name in PRESETS}
ACTIVE = {name: f"{name}: billions used, by GFLOPs per token" for name in PRESETS}
USED = "Qwen3-30B: billions of parameters used"
HELD = "Qwen3-30B: billions on a rank"
SHARE = "Qwen3-30B: share of a token's FLOPs in experts"
MFU = "Qwen3-30B: MFU with all experts / MFU"
OF_DEEPSEEK = {table["DeepSeek-V3"] for table in (STORED, GFLOPS, ACTIVE)}

LINES = {
    "shared experts are forgotten": (
        ("router + (experts + m.shared) * 3", "router + experts * 3"),
        OF_DEEPSEEK,
    ),
    "every layer is a mixture": (
        ("(m.layers - m.dense) * mixture", "m.layers * mixture"),
        OF_DEEPSEEK,
    ),
    "the embedding is multiplied (Try)": (
        ("parameters(m, m.k) - m.vocab * m.hidden  #", "parameters(m, m.k)  #"),
        {USED, SHARE, MFU, *GFLOPS.values(), *ACTIVE.values()},
    ),
    "one table instead of two": (
        ("mlps + 2 * m.vocab * m.hidden", "mlps + m.vocab * m.hidden"),
        {USED, HELD, SHARE, MFU, *STORED.values(), *GFLOPS.values(), *ACTIVE.values()},
    ),
    "the router is forgotten": (
        ("    router = m.hidden * m.experts\n", "    router = 0\n"),
        {USED, HELD, SHARE, MFU, *STORED.values(), *GFLOPS.values()},
    ),
    "the whole matrix of scores": (
        ("m.attended * sequence / 2", "m.attended * sequence"),
        {SHARE, MFU, *GFLOPS.values(), *ACTIVE.values()},
    ),
    "a rank holds all experts": (
        ("parameters(m, held) / 1e9", "parameters(m, m.experts) / 1e9"),
        {HELD},
    ),
    "each expert computes all tokens (Try)": (
        ("m.hidden, rows_E[e])", "m.hidden, SEQUENCE)"),
        {USED, SHARE, MFU},
    ),
    "a rank's experts are not added to the others'": (
        ("    dist.all_reduce(total)\n", ""),
        {USED, SHARE, MFU},
    ),
    "a token chooses one expert too few": (
        ("score_TE.topk(m.k, dim=1)", "score_TE.topk(m.k - 1, dim=1)"),
        {USED, SHARE, MFU},
    ),
    "MFU counts what is visited": (
        ("    unused = parameters(m, m.experts) - parameters(m, m.k)\n", "    unused = 0\n"),
        {MFU},
    ),
}
BREAKS = Breaks(LINES)


def test_two_shared_experts_are_two() -> None:
    """The models of the lesson have one or none."""
    m = lesson.Shape(
        layers=3, dense=1, hidden=5, attention=7, attended=0, mlp=11, expert=2, experts=4, k=3,
        shared=2, vocab=13,
    )  # fmt: skip
    expert, router = 3 * 5 * 2, 5 * 4
    besides = 3 * 7 + 3 * 5 * 11 + 2 * router + 2 * 13 * 5  # attention, the dense MLP, both tables
    assert lesson.parameters(m, 4) == besides + 2 * (4 + 2) * expert
    assert lesson.parameters(m, 1) == besides + 2 * (1 + 2) * expert
    assert lesson.used(m) == besides + 2 * (3 + 2) * expert - 13 * 5
