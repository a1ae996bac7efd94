"""The lesson on memory: its sum is the planner's for a dense model, and its rows break."""

import functools

import pytest
import torch
import torch.nn.functional as F

from course import plan
from course.lessons import ROOT
from course.planning import HEADROOM, room
from course.playing import load
from tests.lessons.every import Breaks, test_lesson  # noqa: F401

LESSON = "parallelism/16_planning_memory.py"


@functools.cache
def lesson():
    return load(LESSON)


def dense(preset: str) -> tuple:
    """A preset of the planner's as the lesson's model, and as its own."""
    shape = plan.read_config(plan.known_models()[preset])
    kv = shape.kv_heads * shape.qk_dim
    return lesson().Model(shape.layers, shape.hidden, kv, shape.ff, shape.vocab), shape


def planned(preset: str, micro_batches: int, sequence: int = 8192, **axes) -> dict[str, float]:
    """What `course plan` says, in the lesson's parts; less the workspaces, which it assumes."""
    _, shape = dense(preset)
    layout = plan.Layout(**axes | {"recompute": 2 * axes.get("recompute", 0)})
    job = plan.Job(sequence, micro_batches * layout.dp * layout.micro_batch)
    parts = {name: float(size) for name, size in plan.memory(shape, job, layout).items()}
    moment = parts["one layer's gradients"] + parts["layers gathered"]
    found = {name: parts[name] for name in ("weights", "gradients", "activations", "logits")}
    found |= {"states": parts["optimizer states"], "one layer": moment}
    assert sum(found.values()) == pytest.approx(sum(parts.values()) - plan.WORKSPACE)
    return found


@pytest.mark.parametrize(
    ("preset", "axes"),
    [
        ("llama-7b", {"dp": 8, "zero": 0}),
        ("llama-8b", {"dp": 8, "zero": 1, "micro_batch": 4}),
        ("llama-8b", {"dp": 16, "zero": 2}),
        ("llama-8b", {"dp": 8, "zero": 3}),
        ("llama-70b", {"dp": 64, "zero": 3}),
        ("llama-70b", {"dp": 64, "zero": 3, "recompute": True}),
        ("llama-70b", {"dp": 16, "tp": 4, "zero": 3}),
        ("llama-70b", {"dp": 2, "tp": 8, "pp": 4}),
        ("llama-70b", {"tp": 2, "pp": 20, "recompute": True}),
        ("llama-405b", {"dp": 4, "tp": 8, "pp": 9}),
        ("llama-405b", {"tp": 16, "pp": 14, "micro_batch": 2}),
    ],
)
def test_the_lesson_computes_what_course_plan_computes(preset: str, axes: dict) -> None:
    model, _ = dense(preset)
    ours = lesson().most_loaded(model, lesson().Layout(**axes), 8192, 32)
    theirs = planned(preset, 32, **axes)
    for part in ("weights", "gradients", "states", "logits"):
        assert ours[part] == pytest.approx(theirs[part], rel=1e-3), part
    for parts in (ours, theirs):  # the planner counts the layer computed anew as activations
        parts["tokens'"] = parts.pop("activations") + parts.pop("one layer")
    # it counts a part of the tables into each layer that ZeRO-3 gathers
    rel = 8e-3 if axes.get("zero") == 3 else 2e-3
    assert ours["tokens'"] == pytest.approx(theirs["tokens'"], rel=rel)
    assert sum(ours.values()) == pytest.approx(sum(theirs.values()), rel=rel / 2)


@pytest.mark.parametrize("preset", ["llama-7b", "llama-8b", "llama-70b", "llama-405b"])
def test_parameters_are_the_planner_s_to_the_last(preset: str) -> None:
    model, shape = dense(preset)
    assert lesson().parameters(model) == sum(plan.parameters(shape).values())


def test_the_room_on_an_h100_is_the_planner_s() -> None:
    assert HEADROOM * room(plan.known_gpus()["h100"]) == pytest.approx(lesson().ROOM, rel=1e-3)


def test_bytes_by_hand() -> None:
    """2 layers, h = 8, ff = 16, V = 32: attention 4 x 64, MLP 3 x 128, norms 16; two tables."""
    model = lesson().Model(layers=2, hidden=8, kv=8, ff=16, vocab=32)
    parts = lesson().memory(model, lesson().Layout(dp=2, micro_batch=2), 10, 2, stage=0)
    P = 2 * (256 + 384 + 16) + 2 * 256
    kept = 20 * (12 * 8 + 4 * 8 + 6 * 16)
    assert parts == {
        "weights": 2 * P, "gradients": 4 * P, "states": 6 * P,
        "activations": 2 * kept, "logits": 20 * 32 * 6, "one layer": 2 * 656,
    }  # fmt: skip


def test_each_axis_divides_what_the_table_says() -> None:
    module = lesson()

    def parts(stage: int = 1, **axes) -> dict[str, float]:
        layout = module.Layout(**{"pp": 4} | axes)  # a stage in the middle has no table
        return module.memory(module.LLAMA_70B, layout, 8192, 64, stage)

    one = parts()
    for part, size in parts(tp=2).items():
        assert size == one[part] / 2, part
    for part, size in parts(dp=8, zero=2).items():
        assert size == one[part] / (8 if part in ("gradients", "states") else 1), part
    twice = parts(stage=5, pp=8)  # three in flight, as on stage 1 of 4
    assert twice["activations"] == one["activations"] / 2
    assert parts(stage=0, pp=8)["activations"] == parts(stage=0, pp=2)["activations"]
    assert parts(micro_batch=2)["activations"] == 2 * one["activations"]


def test_a_stage_holds_no_more_micro_batches_than_a_step_has() -> None:
    module = lesson()
    held = []
    for micro_batches in (2, 4, 8):
        layout = module.Layout(pp=4)
        held.append(module.memory(module.LLAMA_70B, layout, 4096, micro_batches, 0)["activations"])
    assert held == [held[1] / 2, held[1], held[1]]


def test_the_rows_of_simumax_are_a_part_of_the_table() -> None:
    """Every measured peak of the lesson stands in tests/data, under its layout."""
    table = (plan.DATA.parents[1] / "tests/data/simumax_b200_measured.csv").read_text()
    for layout, measured in lesson().B200.items():
        cases = [line for line in table.splitlines() if f",{measured:.2f}," in line]
        axes = {f"tp{layout.tp}", f"pp{layout.pp}", f"dp{layout.dp}", "l12", "70b"}
        assert any(axes <= {*case.partition(",")[0].split("_")} for case in cases), layout


def test_the_table_in_the_text_is_what_the_code_computes() -> None:
    text = (ROOT / LESSON).read_text()
    for name, layout in lesson().LAYOUTS.items():
        sizes = lesson().most_loaded(lesson().LLAMA_70B, layout, 8192, 128 // layout.dp)
        gib = [size / plan.GiB for size in sizes.values()]
        cells = [f"{size:.1f}" for size in (*gib, sum(gib))]
        (row,) = [line for line in text.splitlines() if line.startswith(f"#     {name}  ")]
        assert row.removeprefix(f"#     {name}").removesuffix("  no").split() == cells
        assert row.endswith("  no") == (sum(sizes.values()) > lesson().ROOM)


def test_swiglu_in_one_kernel_has_the_gradients_of_its_operations() -> None:
    inputs = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    found = torch.autograd.grad(lesson().OneKernel.apply(*inputs).sum(), inputs)
    expected = torch.autograd.grad((F.silu(inputs[0]) * inputs[1]).sum(), inputs)
    torch.testing.assert_close(found, expected)


LAYER, KEPT_ROW = "70B: parameters of a layer", "a layer: bytes kept per token / h"
SEPARATE, AGAIN = "SwiGLU in separate operations", "recomputed"
FSDP, UNDIVIDED = "FSDP: bytes per parameter", "FSDP: activations of a rank / undivided"
ALONE, RECOMPUTED = "70B, FSDP over 64 H100: GiB per GPU", "the same, all layers recomputed: GiB"
LONGER = "first stage's activations, 8 stages / 4"
B200 = "8 B200: largest miss"
KEPT = 'parts["activations"] = tokens * kept * layers * in_flight'
LINES = {
    # the sum
    "an MLP of two matrices": ("mlp = 3 * h", "mlp = 2 * h", {LAYER, B200}),
    "norms keep their input alone": (
        "return 12 * model.hidden",
        "return 8 * model.hidden",
        {KEPT_ROW, SEPARATE, UNDIVIDED, B200},
    ),
    "one micro-batch in flight": (
        "in_flight = min(pp - stage, micro_batches)",
        "in_flight = 1",
        {LONGER, B200},
    ),
    "ZeRO shards activations": (KEPT, f"{KEPT} / layout.dp", {ALONE, LONGER, UNDIVIDED, B200}),
    "states are whole before ZeRO-3": ("if zero >= 1:", "if zero >= 3:", {B200}),
    "gradients are sharded by ZeRO-1": ("if zero >= 2:", "if zero >= 1:", {B200}),
    "weights are never sharded": (
        "if zero >= 3:\n        weights",
        "if zero >= 4:\n        weights",
        {RECOMPUTED},
    ),
    "no logits": ("= 6 * tokens * model.vocab if", "= 0 * tokens * model.vocab if", {B200}),
    "no gradients of the layer at work": (
        "= 2 * layer_parameters(model) / tp",
        "= 0 * layer_parameters(model) / tp",
        {B200},
    ),
    "recomputation keeps all": (
        "kept = 2 * model.hidden if",
        "kept = saved_per_token(model) if",
        {RECOMPUTED},
    ),
    # what is counted
    "keys as wide as queries": (
        "self.k = linear(h, model.kv)\n        self.v = linear(h, model.kv)",
        "self.k = linear(h, h)\n        self.v = linear(h, h)",
        {LAYER, KEPT_ROW, SEPARATE, UNDIVIDED},
    ),
    "SwiGLU is never fused": (
        "OneKernel.apply(gate_TF, up_TF) if self.fused",
        "OneKernel.apply(gate_TF, up_TF) if False",
        {KEPT_ROW, UNDIVIDED},
    ),
    "nothing is recomputed": (
        "forward_counted(layer, recompute=True)",
        "forward_counted(layer)",
        {AGAIN},
    ),
    "no step, no moments": (
        'for tensor in (weight, weight.grad, moments["exp_avg"], moments["exp_avg_sq"]):',
        "for tensor in (weight, weight.grad):",
        {FSDP},
    ),
    "the weights are gathered for good": (
        "held += tensor.to_local().nbytes",
        "held += tensor.full_tensor().nbytes",
        {FSDP},
    ),
}
BREAKS = Breaks(LINES)
