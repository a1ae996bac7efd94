"""The lesson on time: its equation is the planner's for a dense model, and its rows break."""

import functools
from statistics import median
from types import SimpleNamespace

import pytest

from course import plan
from course.lessons import ROOT
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
    """What `course plan` says with the lesson's share, in the lesson's parts.

    It has what memory bounds apart, which the lesson's share contains: bubble and exposed messages
    are those of a micro-batch without it.
    """
    _, shape = dense(preset)
    layout = plan.Layout(**axes | {"recompute": 2 * axes.get("recompute", 0)})
    known = SimpleNamespace(**vars(plan.known_gpus()[gpu]) | {"efficiency": lesson().SHARE})
    job = plan.Job(tokens, batch)
    found = plan.seconds(shape, job, layout, known)
    products = float(found["matrix products"] + found["attention scores"])
    tensor = float(found["tensor parallel"])
    busy = products + tensor
    one = busy / (batch / layout.dp)
    exposed = plan.data_parallel_seconds(shape, job, layout, known, one)
    bubble = found["bubble"] * busy / (busy + found["elementwise, by HBM"])
    return {
        "products": products,
        "tensor": tensor,
        "bubble": float(bubble),
        "data": float(exposed["data parallel, exposed"]),
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


def test_the_share_is_fitted_to_the_three_runs_with_tp_2() -> None:
    """Whatever time they have beyond the messages, products took; in the median, to two digits."""
    module = lesson()
    layout = module.Layout(dp=4, tp=2)
    one = module.micro_batch(module.TWELVE, layout, module.B200, 4096)
    shares = []
    for m, milliseconds in zip(module.COUNTS, module.PUBLISHED_MS[layout], strict=True):
        left = milliseconds / 1e3 - m * one["tensor"]
        shares.append(module.SHARE * m * one["products"] / left)
    assert round(median(shares), 2) == module.SHARE


def test_the_tables_in_the_text_are_what_the_code_computes() -> None:
    module = lesson()
    text = (ROOT / LESSON).read_text()
    for name, (_, gib) in module.LAYOUTS.items():
        (row,) = [line for line in text.splitlines() if line.startswith(f"#     {name}  ")]
        for gpu in (module.H100, module.GB300):
            said = module.why_not(name, gpu).replace("x as long", "x").removesuffix(" s")
            if said.startswith("needs"):
                said = "does not fit"
            else:
                said = f"{module.seconds_of(name, gpu):.1f} s  {said}"
            assert f" {gib} " in row
            assert said in row
    for layout in module.PUBLISHED_MS:
        name = f"#     TP {layout.tp}, PP {layout.pp}, DP {layout.dp}  "
        (row,) = [line for line in text.splitlines() if line.startswith(name)]
        for ratio in module.ratios_on_b200(layout):
            assert f" {ratio:.2f}" in row
    for name in module.NVIDIA:
        (row,) = [line for line in text.splitlines() if line.startswith(f"#     {name}  ")]
        assert f" {module.ratio_of_nvidia(name):.2f}" in row


def test_gib_are_those_of_lesson_16_and_of_the_planner() -> None:
    memory = load("parallelism/16_planning_memory.py")
    _, shape = dense("llama-70b")
    for name, (layout, gib) in lesson().LAYOUTS.items():
        axes = layout._asdict()
        assert memory.LAYOUTS[name] == memory.Layout(**axes)
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
    for what in ("nvlink", "domain", "network"):
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


FLOPS = "70B, a layer: FLOPs per parameter and token"
PAIRS = "attention: FLOPs / h per pair of tokens"
TENSOR, FSDP = (f"{how}: collectives of an MLP per micro-batch" for how in ("TP", "FSDP"))
H100, GB300 = (f"64 {gpu}: FSDP alone / the choice" for gpu in ("H100", "GB300"))
CARDS = "64 H100: FSDP with TP 8 / with TP 4"
SWAPPED = "64 GB300: H100's choice / the choice"
SHARES = "shares of 0.25 to 0.6: choices that change"
NEAR = "8 B200, PP 2 and TP 4: largest miss"
FAR = "8 B200, TP 8: least miss; 15% is not reached"
LINES = {
    # the equation
    "the head costs no time": ("flops += 6 * model.vocab", "flops += 0 * model.vocab", {NEAR}),
    "tensor parallelism costs nothing": (
        "if layout.tp > 1:",
        "if layout.tp > 99:",
        {NEAR, H100, SWAPPED, SHARES},
    ),
    "recomputation is free": ("passes = 4 / 3 if", "passes = 1 if", {H100, SWAPPED}),
    "TP 8 computes like TP 6": (
        "flops / layout.tp / (SHARE",
        "flops / min(layout.tp, 6) / (SHARE",
        {FAR},
    ),
    "NVLink reaches everywhere": ("cards * gpu.network", "gpu.nvlink", {CARDS}),
    "backward hides all": ("max(gather + reduce - backward, 0)", "0", {CARDS}),
    "a share of a half": ("SHARE = 0.38", "SHARE = 0.5", {NEAR}),
    # the choice
    "an H100 of 288 GB": ("network=50e9, memory=67", "network=50e9, memory=235", {H100, SWAPPED}),
    "a GB300 of 80 GB": ("network=100e9, memory=235", "network=100e9, memory=67", {GB300, SWAPPED}),
    "a share of 0.9": ("(0.25, 0.3, 0.5, 0.6)", "(0.25, 0.3, 0.5, 0.9)", {SHARES}),
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
        {FLOPS},
    ),
    "a layer without backward": ("y_TD.sum().backward()", "y_TD.sum()", {FLOPS, PAIRS}),
}
# These change what a layout takes, and with it what others would have done to the choice.
ALONE = ["tensor parallelism costs nothing", "recomputation is free", "TP 8 computes like TP 6"]
BREAKS = Breaks(LINES, alone=[*ALONE, "a share of 0.9"])
