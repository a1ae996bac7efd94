"""The lesson on time: its equation is the planner's for a dense model, and its rows break."""

import functools
from types import SimpleNamespace

import pytest

from course import plan
from course.planning import HEADROOM, room
from course.playing import load
from tests.lessons.every import Breaks, test_lesson  # noqa: F401

LESSON = "parallelism/17_planning_time.py"


@functools.cache
def lesson():
    return load(LESSON)


def dense(preset: str) -> tuple:
    """A preset of the planner's as the lesson's model, and as its own."""
    shape = plan.read_config(plan.known_models()[preset])
    kv = shape.kv_heads * shape.qk_dim
    return lesson().Model(shape.layers, shape.hidden, kv, shape.ff, shape.vocab), shape


def planned(preset: str, gpu: str, tokens: int, batch: int, **axes) -> dict[str, float]:
    """What `course plan` says with the lesson's share, in the lesson's parts."""
    _, shape = dense(preset)
    layout = plan.Layout(**axes | {"recompute": 2 * axes.get("recompute", 0)})
    known = vars(plan.known_gpus()[gpu]) | {"efficiency": lesson().SHARE}
    found = plan.seconds(shape, plan.Job(tokens, batch), layout, SimpleNamespace(**known))
    return {
        "products": float(found["matrix products"] + found["attention scores"]),
        "memory-bound": float(found["elementwise, by HBM"]),
        "tensor": float(found["tensor parallel"]),
        "bubble": float(found["bubble"]),
        "data": float(found["data parallel, exposed"]),
    }


@pytest.mark.parametrize(
    ("preset", "gpu", "tokens", "batch", "axes"),
    [
        ("llama-7b", "b200", 4096, 64, {"dp": 8}),
        ("llama-8b", "h100", 8192, 128, {"dp": 8, "zero": 3}),
        ("llama-8b", "h100", 1024, 64, {"dp": 64}),  # too few tokens to hide the gradients
        ("llama-7b", "h100", 8192, 128, {"dp": 8, "tp": 4, "pp": 2}),
        ("llama-70b", "h100", 8192, 128, {"dp": 4, "tp": 16}),
        ("llama-70b", "h100", 8192, 128, {"dp": 64, "zero": 3, "recompute": True}),
        ("llama-70b", "h100", 8192, 128, {"dp": 16, "tp": 4, "zero": 3}),
        ("llama-70b", "gb300", 8192, 128, {"dp": 64, "zero": 3}),
        ("llama-70b", "h100", 8192, 128, {"dp": 8, "tp": 8, "recompute": True}),
        ("llama-405b", "gb300", 8192, 512, {"dp": 4, "tp": 8, "pp": 9}),
        ("llama-405b", "gb300", 8192, 512, {"dp": 4, "tp": 4, "pp": 14, "recompute": True}),
    ],
)
def test_the_lesson_computes_what_course_plan_computes(
    preset: str, gpu: str, tokens: int, batch: int, axes: dict
) -> None:
    model, _ = dense(preset)
    ours = lesson().step(
        model, lesson().Layout(**axes), getattr(lesson(), gpu.upper()), tokens, batch
    )
    theirs = planned(preset, gpu, tokens, batch, **axes)
    for part, seconds in theirs.items():
        assert ours[part] == pytest.approx(seconds, rel=2e-3), part
    assert (theirs["data"] > 0) == (tokens == 1024)


def test_stages_that_are_cut_evenly_wait_for_the_head() -> None:
    """The planner gives the stage with a large head fewer layers, and so is up to 4% faster."""
    model, _ = dense("llama-70b")
    for pp in (2, 4, 16):
        layout = {"dp": 64 // pp, "pp": pp}
        ours = lesson().step(model, lesson().Layout(**layout), lesson().H100, 8192, 128)
        theirs = planned("llama-70b", "h100", 8192, 128, **layout)
        assert 1 <= ours["products"] / theirs["products"] < 1.04


@pytest.mark.parametrize("preset", ["llama-7b", "llama-8b", "llama-70b", "llama-405b"])
def test_flops_are_the_planner_s_but_for_the_norms(preset: str) -> None:
    model, shape = dense(preset)
    theirs = plan.flops_per_token(shape, 8192)
    assert lesson().flops_per_token(model, 8192) == pytest.approx(theirs, rel=1e-4)


def test_gib_are_those_of_lesson_10_and_of_the_planner() -> None:
    memory = load("parallelism/16_planning_memory.py")
    _, shape = dense("llama-70b")
    for name, (layout, gib) in lesson().LAYOUTS.items():
        axes = layout._asdict()
        ours = memory.most_loaded(memory.LLAMA_70B, memory.Layout(**axes), 8192, 128 // layout.dp)
        assert round(sum(ours.values()) / plan.GiB) == gib, name
        whole = plan.Layout(**axes | {"recompute": 2 * layout.recompute})
        theirs = sum(plan.memory(shape, plan.Job(8192, 128), whole).values()) - plan.WORKSPACE
        assert gib == pytest.approx(float(theirs) / plan.GiB, abs=0.7), name


@pytest.mark.parametrize("name", ["h100", "b200", "gb300"])
def test_gpus_are_the_planner_s(name: str) -> None:
    theirs = plan.known_gpus()[name]
    ours = getattr(lesson(), name.upper())
    assert ours.peak == theirs.bf16
    for what in ("hbm", "nvlink", "domain", "network"):
        assert getattr(ours, what) == getattr(theirs, what), what
    assert ours.memory == round(HEADROOM * room(theirs) / plan.GiB)
    for ranks, stride in ((8, 1), (16, 1), (8, 8), (16, 4), (2, 32), (64, 1)):
        assert lesson().rate(ours, ranks, stride) == plan.group_rate(theirs, ranks, stride)


def test_fsdp_gathers_twice_and_each_pass_hides_its_own() -> None:
    """By hand: a micro-batch of 3 s hides 1 s forward and 2 s backward."""
    module = lesson()
    gpu = module.H100._replace(nvlink=1 / module.LINK_SHARE, domain=2)  # a byte per second
    model = module.Model(layers=1, hidden=1, kv=1, ff=0, vocab=0)  # 4 parameters, 2 of them sent
    fsdp = module.Layout(dp=2, zero=3)  # 4 s forward, 12 s backward
    assert module.data_parallel(model, fsdp, gpu, 5, 3.0) == pytest.approx(5 * (3 + 10))
    replicas = module.Layout(dp=2, zero=1)  # once: 4 s of weights, 8 s of gradients
    assert module.data_parallel(model, replicas, gpu, 5, 3.0) == pytest.approx(3 + 6)


def test_the_rows_of_simumax_are_a_part_of_the_table() -> None:
    table = (plan.DATA.parents[1] / "tests/data/simumax_b200_measured.csv").read_text()
    for layout, milliseconds in lesson().PUBLISHED_MS.items():
        for count, found in zip(lesson().COUNTS, milliseconds, strict=True):
            cases = [line for line in table.splitlines() if f",{found:.2f}," in line]
            axes = {f"tp{layout.tp}", f"pp{layout.pp}", f"dp{layout.dp}", f"mbc{count}", "l12"}
            assert any(axes <= {*case.partition(",")[0].split("_")} for case in cases), layout


COUNTED = "8B: GFLOPs per token, all of attention"
PUBLISHED = {f"{size}: GFLOPs per token, published" for size in ("8B", "70B", "405B")}
TENSOR, FSDP = "TP: collectives of an MLP", "FSDP: collectives of an MLP"
SHARE, MEDIAN = "share of the peak, from three runs", "nine other runs: median miss"
TP_8 = "TP 8's least miss / the others' largest"
TOO_FAST = "TP 8: our seconds / published, at most"
CHOSEN = "times of three that we choose the fastest"
BUBBLE = "PP 2: a micro-batch of 4 / one of 32"
NVIDIA = {f"{name}, FSDP: seconds" for name in ("8 H100, 8B", "64 GB300, 70B")}
H100, GB300 = (f"64 {gpu}: FSDP alone / the choice" for gpu in ("H100", "GB300"))
CARDS = "64 H100: FSDP with TP 8 / with TP 4"
SWAPPED = "64 GB300: H100's choice / the choice"
LINES = {
    # the equation
    "no head": (" + model.vocab * model.hidden  # with the head", "", {COUNTED, *PUBLISHED}),
    "all of attention": (
        "model.hidden * sequence / 2",
        "model.hidden * sequence",
        {COUNTED, *PUBLISHED},
    ),
    "the head costs no time": (
        "flops += 6 * model.vocab",
        "flops += 0 * model.vocab",
        {SHARE, MEDIAN, CHOSEN},
    ),
    "tensor parallelism costs nothing": (
        "if layout.tp > 1:",
        "if layout.tp > 99:",
        {SHARE, MEDIAN, SWAPPED},
    ),
    "recomputation is free": ("passes = 4 / 3 if", "passes = 1 if", {H100, SWAPPED}),
    "TP 8 computes like TP 6": (
        "flops / layout.tp / (SHARE",
        "flops / min(layout.tp, 6) / (SHARE",
        {MEDIAN, TP_8, TOO_FAST},
    ),
    "no bubble": ("(layout.pp - 1) * seconds", "0 * seconds", {BUBBLE, TP_8}),
    "NVLink reaches everywhere": ("cards * gpu.network", "gpu.nvlink", {CARDS}),
    "backward hides all": ("max(gather + reduce - backward, 0)", "0", {CARDS}),
    "a share of a half": ("SHARE = 0.39", "SHARE = 0.5", {SHARE, MEDIAN, TP_8, *NVIDIA}),
    "8 bits are no faster": ("peak=2 * gpu.peak", "peak=gpu.peak", NVIDIA),
    # the choice
    "an H100 of 288 GB": ("network=50e9, memory=67", "network=50e9, memory=235", {H100, SWAPPED}),
    "a GB300 of 80 GB": ("network=100e9, memory=235", "network=100e9, memory=67", {GB300, SWAPPED}),
    # what is counted
    "FSDP keeps what it has gathered": (
        "reshard_after_forward=True",
        "reshard_after_forward=False",
        {FSDP},
    ),
    "no backward pass": ("mlp(x_tD).sum().backward()", "mlp(x_tD).sum()", {TENSOR, FSDP}),
    "an MLP of two matrices": (
        "F.silu(linear(h, model.ff)(y_TD)) * linear(h, model.ff)(y_TD)",
        "F.silu(linear(h, model.ff)(y_TD))",
        {COUNTED},
    ),
}
BREAKS = Breaks(LINES, alone=["no bubble"])
