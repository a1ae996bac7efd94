"""The lesson on memory: its formulas are the planner's, its rows break."""

import functools

import pytest

from course import plan
from course.playing import load
from tests.lessons.every import Breaks, test_lesson  # noqa: F401

LESSON = "parallelism/10_planning_memory.py"


@functools.cache
def lesson():
    return load(LESSON)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("pp", [1, 4])
def test_the_lesson_computes_what_course_plan_computes(zero: int, pp: int) -> None:
    shape = plan.read_config(plan.known_models()["deepseek-v3"])
    layout = {"dp": 4, "tp": 2, "pp": pp, "ep": 8, "zero": zero}
    ours = lesson().memory(lesson().Model(*shape), lesson().Job(), lesson().Layout(**layout))
    theirs = plan.memory(shape, plan.Job(), plan.Layout(**layout))
    assert {name: float(value) for name, value in ours.items()} == theirs


def test_the_rows_of_simumax_are_a_part_of_the_table() -> None:
    """Every measured peak of the lesson stands in tests/data."""
    table = (plan.DATA.parents[1] / "tests/data/simumax_b200_measured.csv").read_text()
    for *_, measured in (*lesson().LLAMAS, *lesson().DEEPSEEKS):
        assert f",{measured:.2f}," in table


P, ZERO = "parameters of Llama 3 8B", "ZeRO's Table 1: cells within one printed unit"
B200, WORST = "8 B200, peak allocated: median miss", "8 B200, peak allocated: largest miss"
H100, TENTH = "8 H100, reserved: median miss", "8 H100, reserved: miss of the 90th percentile"
KORTHIKANTI = "Korthikanti's activations: largest miss"
RAN, CRASHED = "ran, and is called impossible", "crashed, and is called impossible"
LINES = {
    "an MLP of two matrices": (
        ("matrices = 3 if model.gated else 2", "matrices = 2"),
        {P, B200, WORST},
    ),
    "tied tables count twice": (
        ('"head": 0 if model.tied else model.vocab', '"head": model.vocab'),
        {"Megatron's Table 1: sizes right to the digit"},
    ),
    "norms keep their input alone": (
        ("norms = 4 * h  # the input of a norm, and its output", "norms = 2 * h"),
        {KORTHIKANTI},
    ),
    "one micro-batch in flight": (
        ("in_flight = np.minimum(pp * more, micro_batches)", "in_flight = 1"),
        {KORTHIKANTI, WORST, H100, TENTH, CRASHED},
    ),
    "states are not sharded before ZeRO-3": (
        ("sharded(job.state_bytes, 1)", "sharded(job.state_bytes, 3)"),
        {ZERO, B200, WORST, H100, TENTH, RAN},
    ),
    "gradients are sharded from ZeRO-1 on": (
        ("sharded(job.grad_bytes, 2)", "sharded(job.grad_bytes, 1)"),
        {ZERO, B200, WORST},
    ),
    "experts have as many replicas as the rest": (
        ("routed_replicas = np.maximum(replicas * tp / ep, 1)", "routed_replicas = replicas"),
        {WORST},
    ),
    "no logits": (
        ("logits = tokens * model.vocab * job.logit_bytes * last", "logits = 0 * tokens"),
        {WORST, TENTH},
    ),
    "context parallelism divides nothing": (
        ("job.sequence / cp / tp", "job.sequence / tp"),
        {WORST},
    ),
    "a reserve as large as the activations": (
        ("by_cost=True, reserve=0.2", "by_cost=True, reserve=1.0"),
        {H100, TENTH, RAN},
    ),
    "four bytes per score instead of five": (
        ("scores = 5 * heads * 2048 / hidden", "scores = 4 * heads * 2048 / hidden"),
        {"Korthikanti's percentages: points off"},
    ),
    "a share of another model": (
        ("share = 5 * 96 * 2048 / 12288", "share = 5 * 64 * 2048 / 12288"),
        {"GPT-3: scores / all activations"},
    ),
}
BREAKS = Breaks(LINES)


def parts(batch: int, **axes: int) -> dict:
    lesson = load(LESSON)
    model = lesson.llama(12, 8192, 64, 8, 28672, 128256)
    return lesson.memory(model, lesson.Job(4096, batch), lesson.Layout(**axes))


def test_a_stage_holds_no_more_micro_batches_than_a_step_has() -> None:
    held = [float(parts(batch, pp=4)["activations"]) for batch in (2, 4, 8)]
    assert held == pytest.approx([held[1] / 2, held[1], held[1]])


def test_zero_3_gathers_two_layers_of_two_bytes_each() -> None:
    lesson = load(LESSON)
    model = lesson.llama(12, 8192, 64, 8, 28672, 128256)
    gathered = float(parts(8, dp=8, zero=3)["layers gathered"])
    layer = 8192 * (8192 + 2 * 1024 + 8192 + 3 * 28672) + 2 * 8192
    rest = gathered / 4 - layer  # embedding and head, as if they were shared by the layers
    assert 0 <= rest <= 2.01 * 128256 * 8192 / 12
    assert model.vocab == 128256
