"""The lesson on time: its equation is the planner's for a dense model, and its rows break."""

import functools
from functools import partial
from statistics import median
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from course import plan
from course.lessons import ROOT
from course.planning import HEADROOM, room
from course.playing import load
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "parallelism/17_planning_time.py"
ON_GPUS = OnGpus(
    changes=[
        ("(8192, 8192, 4096)", "(512, 128, 64)"),
        ("torch.bfloat16 if device", "torch.float32 if device"),
        ("use_reentrant=False)", 'use_reentrant=False, determinism_check="none")'),
    ]
)


@functools.cache
def lesson():
    return load(LESSON)


def gpu_of(name: str):
    """A GPU of the planner's as the lesson's."""
    row = plan.known_gpus()[name]
    return lesson().Gpu(row.bf16, row.nvlink, row.domain, row.network)


def dense(preset: str) -> tuple:
    """A preset of the planner's as the lesson's model, and as its own."""
    shape = plan.read_config(plan.known_models()[preset])
    kv = shape.kv_heads * shape.qk_dim
    return lesson().Model(shape.layers, shape.hidden, kv, shape.ff, shape.vocab), shape


def planned(
    shape: plan.Model, gpu: str, tokens: int, batch: int, layout: plan.Layout
) -> dict[str, float]:
    """What `course plan` says with the lesson's share, in the lesson's parts.

    It has what memory bounds apart, which the lesson's share contains: bubble and exposed messages
    are those of a micro-batch without it. It recomputes layers to their end, and the head with
    them; the lesson, as torch, stops before a layer's last product and the sum after it. It hides
    FSDP behind messages of tensor parallelism, whatever link they take; the lesson, behind those
    that FSDP's own link does not carry.
    """
    known = SimpleNamespace(**vars(plan.known_gpus()[gpu]) | {"efficiency": lesson().SHARE})
    job = plan.Job(tokens, batch)
    m = batch / layout.dp
    found = plan.seconds(shape, job, layout, known)
    products = float(found["matrix products"] + found["attention scores"])
    tensor = float(found["tensor parallel"])
    two_links = layout.tp <= known.domain < layout.dp * layout.tp
    hides = products + tensor if two_links else products
    exposed = plan.data_parallel_seconds(shape, job, layout, known, hides / m)
    busy = products + tensor
    bubble = found["bubble"] * busy / (busy + found["elementwise, by HBM"])
    if layout.recompute == 2:
        spared = 2 * shape.hidden * (shape.vocab + shape.layers * shape.ff)
        products -= m * spared * tokens / layout.tp / (known.efficiency * known.bf16)
        tensor *= 11 / 12
    return {
        "products": products,
        "messages": tensor,
        "bubble": float(bubble),
        "exposed": float(exposed["data parallel, exposed"]),
    }


@pytest.mark.parametrize(
    ("preset", "gpu", "tokens", "batch", "dp", "tp", "recompute"),
    [
        ("llama-7b", "b200", 4096, 64, 8, 1, False),
        ("llama-8b", "h100", 8192, 128, 8, 1, False),
        ("llama-8b", "h100", 1024, 64, 64, 1, False),  # too few tokens to hide the gradients
        ("llama-7b", "h100", 8192, 128, 16, 4, False),
        ("llama-70b", "h100", 8192, 128, 4, 16, False),  # TP, too, goes over the network
        ("llama-70b", "h100", 8192, 128, 64, 1, True),
        ("llama-70b", "h100", 8192, 128, 16, 4, False),
        ("llama-70b", "gb300", 8192, 128, 64, 1, False),
        ("llama-70b", "h100", 8192, 128, 8, 8, True),
        ("llama-405b", "gb300", 8192, 512, 64, 8, False),
        ("llama-405b", "gb300", 8192, 512, 32, 4, True),
    ],
)
def test_the_lesson_computes_what_course_plan_computes(
    preset: str, gpu: str, tokens: int, batch: int, dp: int, tp: int, recompute: bool
) -> None:
    model, shape = dense(preset)
    recomputed = model.layers if recompute else 0
    layout = lesson().Layout(dp, tp, recomputed)
    ours = lesson().step(model, layout, gpu_of(gpu), tokens, batch)
    ours["products"] += ours.pop("again")
    theirs = planned(
        shape, gpu, tokens, batch, plan.Layout(dp=dp, tp=tp, zero=3, recompute=2 * recompute)
    )
    assert theirs.pop("bubble") == 0
    assert set(ours) == set(theirs)
    for part, seconds in theirs.items():
        assert ours[part] == pytest.approx(seconds, rel=2e-3), part
    assert (theirs["exposed"] > 0) == (tokens == 1024 or tp == 16)


def test_layers_are_recomputed_one_by_one() -> None:
    """Half of the layers cost half of what all cost: products and messages."""
    module = lesson()
    none, half, whole = (
        module.step(module.LLAMA_70B, module.Layout(16, 4, k), module.H100, 8192, 128)
        for k in (0, 40, 80)
    )
    assert none["again"] == 0
    for part in ("again", "messages"):
        assert half[part] == pytest.approx((none[part] + whole[part]) / 2)
    assert whole["messages"] == pytest.approx((8 + 3) / 8 * none["messages"])
    assert whole["products"] == none["products"]


def test_a_layer_has_the_flops_that_the_equation_says() -> None:
    """By torch's counter on the meta device: 6 per parameter; 12 h per pair of tokens, unmasked."""
    module = lesson()
    model = module.LLAMA_70B
    tokens = 8192
    h = model.hidden
    heads = h // 128
    linear = partial(nn.Linear, bias=False, device="meta")
    x_TD = torch.zeros(tokens, h, device="meta", requires_grad=True)  # from the layer before
    with FlopCounterMode(display=False) as counter:
        q_HTK = linear(h, h)(x_TD).view(tokens, heads, 128).transpose(0, 1)
        k_GTK = linear(h, model.kv)(x_TD).view(tokens, -1, 128).transpose(0, 1)
        v_GTK = linear(h, model.kv)(x_TD).view(tokens, -1, 128).transpose(0, 1)
        shared = heads // len(k_GTK)  # queries' heads that share a head of keys and values
        scores_HTT = q_HTK @ k_GTK.repeat_interleave(shared, 0).transpose(1, 2)
        mixed_HTK = scores_HTT.softmax(-1) @ v_GTK.repeat_interleave(shared, 0)
        y_TD = x_TD + linear(h, h)(mixed_HTK.transpose(0, 1).flatten(1))
        gated_TF = F.silu(linear(h, model.ff)(y_TD)) * linear(h, model.ff)(y_TD)
        y_TD = y_TD + linear(model.ff, h)(gated_TF)
        y_TD.sum().backward()
    counted = counter.get_flop_counts()["Global"]
    assert counted[torch.ops.aten.mm] == 6 * tokens * module.layer_matrices(model)
    assert counted[torch.ops.aten.bmm] == 12 * tokens**2 * h


def test_fsdp_hides_behind_messages_of_another_link_alone() -> None:
    """One micro-batch: which seconds of each pass hide FSDP."""
    module = lesson()
    model = module.LLAMA_70B
    seen = []
    here = load(LESSON)
    here.not_hidden = lambda *given: seen.append(given[-2:]) or 0.0
    alone = here.step(model, here.Layout(dp=64), module.H100, 8192, 64)["products"]
    for layout, gpu, two_links in (
        (here.Layout(16, 4), module.H100, True),  # NVLink, and the cards
        (here.Layout(16, 4), module.PCIE, False),  # PCIe for both
        (here.Layout(2, 4), module.H100, False),  # NVLink for both
        (here.Layout(4, 16), module.H100, False),  # the cards for both
    ):
        parts = here.step(model, layout, gpu, 8192, layout.dp)
        forward, backward = seen[-1]
        messages = parts["messages"] if two_links else 0.0
        assert parts["messages"] > 0
        assert forward == pytest.approx(alone / layout.tp / 3 + messages / 2)
        assert backward == pytest.approx(alone / layout.tp * 2 / 3 + messages / 2)


# Published seconds: docs/b200/b200_release_v1.2_summary.md of SimuMax; Megatron on 8 B200, 12
# layers of Llama 3 70B, sequences of 4,096 tokens
COUNTS = (4, 8, 32)  # micro-batches
PUBLISHED_MS = {  # by tp and pp; the rest is dp
    (1, 2): (843.0, 1476.8, 5436.5),
    (2, 1): (725.5, 1387.0, 5376.5),
    (4, 1): (409.8, 765.6, 2964.6),
    (8, 1): (280.9, 556.7, 2073.7),
}


def step_on_b200(tp: int, m: int) -> dict[str, float]:
    module = lesson()
    twelve = module.LLAMA_70B._replace(layers=12)
    dp = 8 // tp
    return module.step(twelve, module.Layout(dp, tp), gpu_of("b200"), 4096, m * dp)


def ratios_on_b200(tp: int) -> list[float]:
    """Our seconds / published seconds, for each number of micro-batches."""
    ratios = []
    for m, milliseconds in zip(COUNTS, PUBLISHED_MS[tp, 1], strict=True):
        ratios.append(1e3 * sum(step_on_b200(tp, m).values()) / milliseconds)
    return ratios


def test_the_share_is_fitted_to_the_three_runs_with_tp_2() -> None:
    """Whatever time they have beyond the messages, products took; in the median, to two digits."""
    shares = []
    for m, milliseconds in zip(COUNTS, PUBLISHED_MS[2, 1], strict=True):
        parts = step_on_b200(2, m)
        left = milliseconds / 1e3 - parts["messages"]
        shares.append(lesson().SHARE * parts["products"] / left)
    assert round(median(shares), 2) == lesson().SHARE


def test_the_equation_is_near_published_runs_but_for_tp_8() -> None:
    for tp in (2, 4):
        assert max(abs(ratio - 1) for ratio in ratios_on_b200(tp)) < 0.1
    assert min(abs(ratio - 1) for ratio in ratios_on_b200(8)) > 0.15


def test_the_planner_with_this_share_is_near_the_published_pipeline() -> None:
    _, shape = dense("llama-70b")
    for m, milliseconds in zip(COUNTS, PUBLISHED_MS[1, 2], strict=True):
        twelve = shape._replace(layers=12)
        parts = planned(twelve, "b200", 4096, 4 * m, plan.Layout(dp=4, pp=2))
        assert abs(1e3 * sum(parts.values()) / milliseconds - 1) < 0.15


def test_the_rows_of_simumax_are_a_part_of_the_table() -> None:
    table = (plan.DATA.parents[1] / "tests/data/simumax_b200_measured.csv").read_text()
    for (tp, pp), milliseconds in PUBLISHED_MS.items():
        for count, found in zip(COUNTS, milliseconds, strict=True):
            cases = [line for line in table.splitlines() if f",{found:.2f}," in line]
            axes = {f"tp{tp}", f"pp{pp}", f"dp{8 // tp // pp}", f"mbc{count}", "l12"}
            assert any(axes <= {*case.partition(",")[0].split("_")} for case in cases), (tp, pp)


NVIDIA = {  # Megatron-Bridge, NeMo 25.11, in 8 bits: GPU, dp, sequences per step, tokens/s per GPU
    "llama-8b": ("h100", 8, 128, 14451),
    "llama-70b": ("gb300", 64, 256, 4520),
}


def ratio_of_nvidia(preset: str) -> float:
    """Our seconds / published seconds, with FSDP alone and nothing recomputed."""
    gpu, dp, batch, tokens_per_second = NVIDIA[preset]
    model, _ = dense(preset)
    fast = gpu_of(gpu)
    fast = fast._replace(peak=2 * fast.peak)
    parts = lesson().step(model, lesson().Layout(dp), fast, 8192, batch)
    return sum(parts.values()) * tokens_per_second * dp / (batch * 8192)


def test_the_tables_in_the_texts_are_what_the_code_computes() -> None:
    module = lesson()
    text = (ROOT / LESSON).read_text()
    for gpu, title in ((module.H100, "64 H100"), (module.PCIE, "64 on PCIe")):
        table = text.partition(f"#     {title}  ")[2].partition("\n#\n")[0]
        for name in module.LAYOUTS:
            assert f"\n#     {module.row_of(name, gpu)}" in table
    text = (ROOT / "parallelism/README.md").read_text()
    for tp in (2, 4, 8):
        (row,) = [line for line in text.splitlines() if line.startswith(f"| 8 B200, TP {tp}")]
        assert row.endswith("| " + " | ".join(f"{r:.2f}" for r in ratios_on_b200(tp)) + " |")
    for preset, said in (("llama-8b", "8B on 8 H100 it is"), ("llama-70b", "70B on 64 GB300")):
        assert f"{said} {ratio_of_nvidia(preset):.2f}" in text


def test_no_share_from_a_quarter_to_three_fifths_changes_the_answers() -> None:
    """On PCIe FSDP alone is the first; on H100 the three are a tie."""
    module = lesson()
    for share in (0.25, 0.3, module.SHARE, 0.5, 0.6):
        seconds = {}
        for gpu in (module.PCIE, module.H100):
            other = gpu._replace(peak=gpu.peak * share / module.SHARE)
            seconds[gpu] = [sum(module.step_of(name, other).values()) for name in module.LAYOUTS]
        alone, *split = seconds[module.PCIE]
        assert alone < 0.95 * min(split), share
        assert max(seconds[module.H100]) < 1.08 * min(seconds[module.H100]), share


def test_the_text_s_other_numbers() -> None:
    """The ratio with the peak of the card that is sold with PCIe; and if all layers fit."""
    module = lesson()
    slower = module.PCIE._replace(peak=756e12)
    ratios = []
    for gpu, fits in ((slower, False), (module.PCIE, True), (module.H100, True)):
        seconds = []
        for name in ("FSDP x TP 4", "FSDP alone"):
            layout = module.LAYOUTS[name]
            layout = layout._replace(recomputed=0) if fits else layout
            seconds.append(sum(module.step(module.LLAMA_70B, layout, gpu, 8192, 128).values()))
        ratios.append(round(seconds[0] / seconds[1], 2))
    assert ratios == [1.26, 1.41, 1.08]


def held(tp: int, recomputed: int) -> float:
    """Bytes of one of 64 GPUs that train 70B, if so many layers are recomputed.

    A step has several micro-batches. torch's sequence parallelism keeps the two gathered inputs of
    a layer, 4 h per token, whole on each rank of tp.
    """
    model = lesson().LLAMA_70B
    h = model.hidden
    saved = 12 * h + 4 * model.kv + 8 * model.ff
    numbers = model.layers * lesson().layer_matrices(model) + 2 * model.vocab * h
    fixed = 16 * numbers / 64 + (12 * 8192 + 2 * h) * model.vocab / tp
    kept = 8192 * ((saved - 4 * h) / tp + 4 * h)
    dropped = 8192 * 2 * h / tp
    return fixed + (model.layers - recomputed) * kept + recomputed * dropped


def test_bytes_are_those_of_lesson_16_and_of_the_planner() -> None:
    memory = load("parallelism/16_planning_memory.py")
    for recomputed in (0, 80):
        ours = held(1, recomputed)
        theirs = memory.fsdp_memory(memory.LLAMA_70B, 64, 8192, recompute=recomputed > 0)
        assert ours == pytest.approx(sum(theirs.values()), rel=1e-3)
    _, shape = dense("llama-70b")
    job = plan.Job(
        8192, 128, weight_bytes=4, state_bytes=8, keep_gathered=True, mlp_saved=8, logit_bytes=12
    )
    for tp in (1, 2, 4, 8):
        layout = plan.Layout(dp=64 // tp, tp=tp, zero=3)
        parts = plan.memory(shape, job, layout)
        kept = ("weights", "gradients", "optimizer states", "activations", "logits")
        theirs = sum(float(parts[part]) for part in kept)
        ours = held(tp, recomputed=0)
        head = 2 * shape.vocab * shape.hidden / tp  # which the planner has elsewhere
        assert (ours - head) / plan.GiB == pytest.approx(theirs / plan.GiB, abs=0.2)


def test_no_layer_is_recomputed_without_need() -> None:
    limit = HEADROOM * room(plan.known_gpus()["h100"])
    assert round(limit / plan.GiB, 1) == 66.8
    for layout in lesson().LAYOUTS.values():
        assert layout.dp * layout.tp == 64
        assert held(layout.tp, layout.recomputed) <= limit
        assert held(layout.tp, layout.recomputed - 1) > limit


@pytest.mark.parametrize("name", ["h100", "b200", "gb300"])
def test_links_are_the_planner_s(name: str) -> None:
    theirs = plan.known_gpus()[name]
    for ranks, stride in ((8, 1), (16, 1), (8, 8), (16, 4), (2, 32), (64, 1)):
        ours = lesson().rate(gpu_of(name), ranks, stride)
        assert ours == plan.group_rate(theirs, ranks, stride)


def test_gpus_are_the_planner_s() -> None:
    assert gpu_of("h100") == lesson().H100
    pcie = plan.known_gpus()["h100"].pcie
    assert gpu_of("h100")._replace(nvlink=pcie, one_link=True) == lesson().PCIE


def test_fsdp_gathers_twice_and_each_pass_hides_its_own() -> None:
    """By hand, for passes of 1 s forward and 2 s backward."""
    module = lesson()
    gpu = module.H100._replace(nvlink=1 / module.LINK_SHARE, domain=2)  # a byte per second
    model = module.Model(layers=1, hidden=1, kv=1, ff=0, vocab=0)  # 4 parameters, 2 of them sent
    fsdp = module.Layout(dp=2)  # 4 s forward, 12 s backward
    assert module.not_hidden(model, fsdp, gpu, 1.0, 2.0) == pytest.approx(3 + 10)
    assert module.not_hidden(model, fsdp, gpu, 5.0, 2.0) == pytest.approx(10)
    assert module.not_hidden(model, fsdp, gpu, 5.0, 13.0) == 0


def test_recomputation_hides_more_of_fsdp_in_the_backward_pass_alone() -> None:
    """Without a head backward takes two forward passes, and nearly three if all is recomputed."""
    module = lesson()
    model = module.LLAMA_70B._replace(vocab=0)
    seen = []
    here = load(LESSON)
    here.not_hidden = lambda *given: seen.append(given[-2:]) or 0.0
    for recomputed in (0, 80):
        here.step(model, here.Layout(64, recomputed=recomputed), module.H100, 8192, 128)
    (forward, backward), (forward_again, longer) = seen
    assert forward_again == forward
    assert backward == pytest.approx(2 * forward)
    of_matrices = 2 * module.layer_matrices(model) / (2 * model.hidden * model.ff)
    of_attention = 4 * model.hidden * 8192 / 2 / (2 * model.hidden * model.ff)
    spared = 1 / (of_matrices + of_attention)  # `down`, as a part of the forward pass
    assert 0.25 < spared < 0.26
    assert longer == pytest.approx((3 - spared) * forward)


# The measured steps


def test_a_split_layer_sums_its_output_and_the_gradient_of_its_input() -> None:
    """Two ranks with equal parts: what is summed once is doubled, and the residual is not."""
    here = load(LESSON)
    here.dist = SimpleNamespace(all_reduce=lambda total: total.mul_(2))
    x_TD = torch.randn(3, 4, requires_grad=True)
    weights = [torch.randn(shape) for shape in ((4, 6), (6, 4), (4, 6), (6, 4))]
    y_TD = here.split_layer(x_TD, weights)
    doubled = [weights[0], 2 * weights[1], weights[2], 2 * weights[3]]
    assert torch.allclose(y_TD, here.whole_layer(x_TD, doubled), atol=1e-5)
    (grad_TD,) = torch.autograd.grad(y_TD.sum(), x_TD)
    up_DF, down_FD, more_DF, back_FD = weights  # by hand: each pair's gradient is doubled once

    def through_pair(x_TD: torch.Tensor, up_DF: torch.Tensor, down_FD: torch.Tensor):
        x_TD = x_TD.detach().requires_grad_()
        part_TD = F.gelu(x_TD @ up_DF) @ down_FD
        return x_TD, part_TD

    first_TD, part_TD = through_pair(x_TD, up_DF, down_FD)
    second_TD, last_TD = through_pair(first_TD + 2 * part_TD, more_DF, back_FD)
    ones_TD = torch.ones(3, 4)
    (back_TD,) = torch.autograd.grad(last_TD, second_TD, ones_TD)
    between_TD = ones_TD + 2 * back_TD
    (back_TD,) = torch.autograd.grad(part_TD, first_TD, between_TD)
    assert torch.allclose(grad_TD, between_TD + 2 * back_TD, atol=1e-4)


def test_a_rank_s_share_is_its_columns_and_rows() -> None:
    here = load(LESSON)
    here.WORLD_SIZE, here.RANK = 3, 1
    up_DF = torch.arange(12.0).view(2, 6)
    down_FD = torch.arange(12.0).view(6, 2)
    up_Df, down_fD, *more = here.share_of_rank([up_DF, down_FD, up_DF + 1, down_FD + 1])
    assert up_Df.tolist() == [[2, 3], [8, 9]]
    assert down_fD.tolist() == [[4, 5], [6, 7]]
    assert [part.tolist() for part in more] == [[[3, 4], [9, 10]], [[5, 6], [7, 8]]]
    assert all(part.requires_grad and part.is_leaf for part in (up_Df, down_fD, *more))


def test_the_equation_of_a_step_here_by_hand() -> None:
    """4 layers of 10 s, and messages of 1 s: 16 in each of 4 micro-batches of the split."""
    here = load(LESSON)
    here.WORLD_SIZE = 4
    assert here.predict_here(10.0, 1.0) == {"recomputed": 50.0, "split": 104.0}
    here.WORLD_SIZE = 2
    assert here.predict_here(10.0, 1.0) == {"recomputed": 50.0, "split": 72.0}


# The rows that a clock decides, by made-up seconds


@pytest.mark.parametrize(
    ("recomputed", "split", "verdicts"),
    [
        (50.0, 104.0, ["PASS", "PASS"]),
        (45.0, 104.0, ["PASS", "PASS"]),
        (50.0, 140.0, ["PASS", "PASS"]),
        (40.0, 83.0, ["FAIL", "PASS"]),  # nothing is recomputed
        (57.0, 104.0, ["FAIL", "PASS"]),
        (50.0, 40.0, ["PASS", "FAIL"]),  # messages cost nothing
        (50.0, 168.0, ["PASS", "FAIL"]),  # twice as many messages
    ],
)
def test_the_choice_is_predicted_by_a_layer_and_a_message(
    recomputed: float, split: float, verdicts: list[str]
) -> None:
    """Predicted are 50 and 104 s, 2.08 times as much, give or take 0.83."""
    here = load(LESSON)
    here.WORLD_SIZE = 4
    seconds = {"layer": 10.0, "message": 1.0, "plain": 40.0}
    here.check_seconds(seconds | {"recomputed": recomputed, "split": split})
    again, choice = here.ledger
    assert [again["verdict"], choice["verdict"]] == verdicts
    assert again["measured"] == pytest.approx(recomputed / 40)
    assert choice["predicted"] == pytest.approx(2.08)
    assert choice["measured"] == pytest.approx(split / recomputed)


def test_the_median_leaves_the_first_of_eight_out() -> None:
    """Works in turns, by a clock that they put forward; the barrier's wait counts for none."""
    here = load(LESSON)
    now = [0.0]
    order = []
    took = {"a": iter([50, 3, 1, 3, 1, 2, 1, 3]), "b": iter([70, *[6] * 7])}

    def work(name: str) -> None:
        order.append(name)
        now[0] += next(took[name])

    def barrier() -> None:
        now[0] += 100

    everyone = SimpleNamespace(MAX="max")
    here.dist = SimpleNamespace(barrier=barrier, all_reduce=lambda *_: None, ReduceOp=everyone)
    here.time = SimpleNamespace(perf_counter=lambda: now[0])
    works = {name: partial(work, name) for name in took}
    assert here.medians(works, torch.device("cpu")) == {"a": 2.0, "b": 6.0}
    assert order == ["a", "b"] * 8


FLOPS = "a stack: FLOPs per parameter and token"
AGAIN = "the same, recomputed by torch"
PARTS = "the same, split: all ranks together"
ERROR = "split: error of output and gradient"
H100 = "64 H100: FSDP alone / TP 4"
PCIE = "64 on PCIe: TP 4 / FSDP alone"
LINES = {
    # the equation
    "recomputation is free": (  # Try
        "again = recomputed * (layer / 3 - last) * seconds_per_flop",
        "again = 0.0",
        {H100, PCIE},
    ),
    "torch runs a layer again to its end": ("(layer / 3 - last)", "(layer / 3)", {H100, PCIE}),
    "tensor parallelism costs nothing": ("if tp > 1:", "if tp > 99:", {H100, PCIE}),
    "forward hides nothing": ("max(2 * per_byte - forward, 0)", "2 * per_byte", {H100, PCIE}),
    "all layers fit": (  # Try
        "    dp, tp, recomputed = layout",
        "    dp, tp, recomputed = *layout[:2], 0",
        {H100},
    ),
    "PCIe as fast as NVLink": ("nvlink=63e9", "nvlink=450e9", {PCIE}),
    "PCIe carries FSDP apart from messages": ("one_link=True", "one_link=False", {PCIE}),
    # what is counted
    "weights without gradients": (
        "[weight.requires_grad_() for weight in drawn]",
        "drawn",
        {FLOPS, AGAIN},
    ),
    "nothing is recomputed": (
        "partial(checkpoint, whole_layer, use_reentrant=False)",
        "whole_layer",
        {AGAIN},
    ),
    "a layer is recomputed to its end": (
        "use_reentrant=False)",
        "use_reentrant=False, early_stop=False)",
        {AGAIN},
    ),
    "each rank computes all columns": (
        "chunk(WORLD_SIZE, dim)[RANK]",
        "chunk(1, dim)[0]",
        {PARTS, ERROR},
    ),
    "all ranks have the same columns": (
        "chunk(WORLD_SIZE, dim)[RANK]",
        "chunk(WORLD_SIZE, dim)[0]",
        {ERROR},
    ),
    "the output is not summed": (
        "x_TD = x_TD + sum_over_ranks(F.gelu(copy_TD @ up_Df) @ down_fD)",
        "x_TD = x_TD + F.gelu(copy_TD @ up_Df) @ down_fD",
        {ERROR},
    ),
    "the gradient is not summed": ("copy_TD.register_hook(sum_over_ranks)", "pass", {ERROR}),
}
BY_CLOCK = {
    "both keep everything": (
        "partial(step_here, x_TD, stack, recomputed_layer)",
        "partial(step_here, x_TD, stack, whole_layer)",
        {"recomputed / plain, seconds"},
    ),
    "messages are taken to cost nothing": (
        "messages = 4 * LAYERS * message",
        "messages = 0.0",
        {"split / recomputed, seconds"},
    ),
}
BREAKS = [Breaks(LINES), Breaks(BY_CLOCK, ranks=4, clock=True)]
