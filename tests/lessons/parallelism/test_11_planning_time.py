"""The lesson on time: its formulas are the planner's, its rows break."""

import functools

import pytest

from course import plan
from course.playing import load
from tests.lessons.every import Breaks, test_lesson  # noqa: F401

LESSON = "parallelism/11_planning_time.py"


@functools.cache
def lesson():
    return load(LESSON)


@pytest.mark.parametrize("gpu", ["a100", "h100", "gb300"])
def test_the_lesson_computes_what_course_plan_computes(gpu: str) -> None:
    """The same constants, the same seconds."""
    theirs = plan.known_gpus()[gpu]
    ours = lesson().GPUS[gpu.upper()]
    for name, value in vars(ours).items():
        assert value == getattr(theirs, name), name
    layout = {"dp": 8, "tp": 4, "pp": 2, "ep": 8, "chunks": 2}
    shape = lesson().MODELS["Qwen3-30B-A3B"]
    mine = lesson().seconds(shape, lesson().Job(), lesson().Layout(**layout), ours)
    his = plan.seconds(plan.Model(*shape), plan.Job(), plan.Layout(**layout), theirs)
    assert {name: float(value) for name, value in mine.items()} == pytest.approx(his)


@pytest.mark.parametrize(
    ("ours", "preset"),
    [
        ("Llama 3 8B", "llama-8b"),
        ("Llama 3.1 70B", "llama-70b"),
        ("Llama 3.1 405B", "llama-405b"),
        ("Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("Qwen3-235B-A22B", "qwen3-235b-a22b"),
        ("DeepSeek-V3", "deepseek-v3"),
    ],
)
def test_shapes_are_the_presets(ours: str, preset: str) -> None:
    shape = plan.read_config(plan.known_models()[preset])
    mine = plan.Model(*lesson().MODELS[ours])
    assert sum(plan.parameters(mine).values()) == sum(plan.parameters(shape).values())
    assert plan.flops_per_token(mine, 4096) == plan.flops_per_token(shape, 4096)


GFLOPS, FACTOR = (
    "Llama 3 8B, 8,192 tokens: GFLOPs per token",
    "most / least of three conventions",
)
EIGHT, LARGE, SMALL_QWEN, QWEN, MTP, NO_MTP = (
    f"{name}: published / ours"
    for name in (
        "Llama 3 8B",
        "Llama 3.1 405B",
        "Qwen3-30B-A3B",
        "Qwen3-235B-A22B",
        "DeepSeek-V3",
        "DeepSeek-V3 without MTP",
    )
)
TABLE = "Megatron's Table 1, TFLOP/s: median miss"
BUBBLE = "64 stages, 512 micro-batches: bubble / ideal"
FSDP, ACROSS = "H100: FSDP alone / TP 4 PP 4, seconds", "H100: TP 16 over two nodes / TP 8"
SCORES = '(3 if convention == "causal" else 6) * scores'
TOP_K = "met += moe_layers * (one.shared + model.top_k * one.expert)"
LINES = {
    "no head": (
        ("    head = model.vocab * model.hidden\n    scores", "    head = 0\n    scores"),
        {GFLOPS, FACTOR, EIGHT, SMALL_QWEN, QWEN, MTP, NO_MTP},
    ),
    "all of the attention matrix": (
        (SCORES, "6 * scores"),
        {GFLOPS, EIGHT, LARGE, SMALL_QWEN, QWEN, MTP, NO_MTP},
    ),
    "a token meets every expert": (
        (TOP_K, TOP_K.replace("top_k", "experts")),
        {SMALL_QWEN, QWEN, MTP, NO_MTP},
    ),
    "the layer that predicts further is free": (
        ("    if model.mtp:\n        met +=", "    if False:\n        met +="),
        {MTP},
    ),
    "NVLink reaches everywhere": (
        ("gpu.network * np.minimum(inside, ranks)", "4 * gpu.nvlink"),
        {ACROSS},
    ),
    "no bubble": (
        ('step["bubble"] = (pp - 1) / layout.chunks * one', 'step["bubble"] = 0 * one'),
        {BUBBLE},
    ),
    "recomputation is free": (
        ("passes = np.where(layout.recompute == 2, 4 / 3, 1)  # a forward more", "passes = 1"),
        {TABLE, FSDP},
    ),
    "an efficiency of 0.9": (("efficiency=0.54", "efficiency=0.9"), {TABLE}),
}
BREAKS = Breaks(LINES)
