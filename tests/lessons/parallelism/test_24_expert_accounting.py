"""Shapes against the planner and all published rows; layers against plain ones; broken lines."""

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
SMALL = ("small Qwen3", "small DeepSeek")


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
    held = lesson.parameters(m, 16)
    assert (round(held / 1e9, 2), round(16 * held / 1e9)) == (5.16, 83)
    with_all = flops + 6 * (stored - lesson.parameters(m, m.k))
    assert round(with_all / 1e9) == 186
    assert (round(with_all / flops, 2), round(40 * with_all / flops)) == (8.07, 323)
    assert [round(100 * 45275 * each / 5e15) for each in (flops, with_all)] == [21, 169]
    m = lesson.SHAPES["DeepSeek-V3"]
    shared = lesson.parameters(m, 0) - lesson.parameters(m._replace(shared=0), 0)
    assert round(shared / 1e9, 1) == 2.6


@pytest.mark.parametrize(
    ("name", "columns"),
    [
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


def test_attention_is_torch_s_own() -> None:
    torch.manual_seed(0)
    q_THK, k_THK, v_THV = (torch.randn(7, 3, width).double() for width in (6, 6, 4))
    ours = lesson.attend(q_THK, k_THK, v_THV)
    q_HTK, k_HTK, v_HTV = (x.transpose(0, 1) for x in (q_THK, k_THK, v_THV))
    theirs = F.scaled_dot_product_attention(q_HTK, k_HTK, v_HTV, is_causal=True)
    assert (ours - theirs.transpose(0, 1)).abs().max() < 1e-12


@pytest.mark.parametrize("name", SMALL)
def test_a_mixture_is_what_all_experts_return_weighted_by_the_chosen_scores(name: str) -> None:
    torch.manual_seed(0)
    m = lesson.SMALL[name]
    mixture = lesson.Mixture(m, m.experts).double()
    x_TD = torch.randn(9, m.hidden).double()
    score_TE = mixture.router(x_TD).softmax(dim=1)
    least_T1 = score_TE.sort(dim=1).values[:, [-m.k]]
    kept_TE = score_TE * (score_TE >= least_T1)
    hidden_ETW = F.silu(x_TD @ mixture.gate_EDW) * (x_TD @ mixture.up_EDW)
    expected = torch.einsum("te,etd->td", kept_TE, hidden_ETW @ mixture.down_EWD)
    if m.shared:
        expected = expected + mixture.shared(x_TD)
    assert (mixture(x_TD) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("name", SMALL)
def test_a_token_sees_none_after_it(name: str) -> None:
    torch.manual_seed(0)
    m = lesson.SMALL[name]
    model = lesson.model_of(m, lesson.ATTENTION[name], m.experts).double()
    token_T = torch.randint(m.vocab, (8,))
    before = model(token_T)
    token_T[5:] = (token_T[5:] + 1) % m.vocab
    after = model(token_T)
    assert (before - after)[:5].abs().max() < 1e-12
    assert (before - after)[5:].abs().max() > 1e-3


BUILT = {name: f"{name}, built: billions in matrices" for name in PRESETS}
CHECKPOINT = {f"{name}, built: billions, as in its checkpoint" for name in PRESETS}
USED = "Qwen3-30B, 8 experts per layer: billions used"
HELD = "Qwen3-30B, EP 8: billions on a GPU"
BY_WEIGHTS = {name: f"{name}: forward FLOPs by weights / (2 T)" for name in SMALL}
COUNTED = {name: f"{name}: FLOPs per token" for name in SMALL}
GFLOPS = {name: f"{name}: GFLOPs per token" for name in PRESETS}
SHARE = "Qwen3-30B: share of a token's FLOPs in experts"
MFU = "Qwen3-30B: MFU with all parameters / MFU"
OF_SMALL = {*BY_WEIGHTS.values(), *COUNTED.values()}
OF_DEEPSEEK = {table["DeepSeek-V3"] for table in (BUILT, GFLOPS)}
OF_DEEPSEEK |= {table["small DeepSeek"] for table in (BY_WEIGHTS, COUNTED)}

LINES = {
    "shared experts are forgotten (Try)": (
        ("router + (experts + m.shared) * 3", "router + experts * 3"),
        OF_DEEPSEEK,
    ),
    "every layer is a mixture": (
        ("(m.layers - m.dense) * mixture", "m.layers * mixture"),
        OF_DEEPSEEK,
    ),
    "the embedding is multiplied (Try)": (
        ("parameters(m, m.k) - m.vocab * m.hidden  #", "parameters(m, m.k)  #"),
        {USED, *GFLOPS.values(), SHARE, MFU} | OF_SMALL,
    ),
    "one table instead of two": (
        ("2 * m.vocab * m.hidden", "m.vocab * m.hidden"),
        {*BUILT.values(), *GFLOPS.values(), USED, HELD, SHARE, MFU} | OF_SMALL,
    ),
    "the router is forgotten": (
        ("    router = m.hidden * m.experts\n", "    router = 0\n"),
        {*BUILT.values(), *GFLOPS.values(), USED, HELD} | OF_SMALL,
    ),
    "all of attention": (
        ("return 6 * used(m) + 3 * m.layers", "return 6 * used(m) + 6 * m.layers"),
        {*COUNTED.values(), *GFLOPS.values(), SHARE, MFU},
    ),
    "a GPU holds all experts": (
        ("parameters(m, held) / 1e9", "parameters(m, m.experts) / 1e9"),
        {HELD},
    ),
    "norms have no weights": (
        ("self.norm2 = nn.RMSNorm(D)", "self.norm2 = nn.RMSNorm(D, elementwise_affine=False)"),
        CHECKPOINT,
    ),
    "each expert computes all copies": (
        ("(expert_TK == e).nonzero", "(expert_TK >= 0).nonzero"),
        OF_SMALL,
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
    built = [parameter for parameter in lesson.Mixture(m, 4).parameters() if parameter.dim() > 1]
    assert sum(parameter.numel() for parameter in built) == router + (4 + 2) * expert
