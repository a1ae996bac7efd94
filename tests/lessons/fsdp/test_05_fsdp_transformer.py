"""The lesson that trains a GPT: each claim FAILs when the line that it guards breaks.

A break plays only the section that it is in, and those that it does not touch.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.optimizer import register_optimizer_step_pre_hook

from course.lessons import ROOT
from course.playing import Played, load, play
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "fsdp/05_fsdp_transformer.py"
MAIN = (ROOT / LESSON).read_text().partition("def main()")[2]
SECTIONS = re.search(r"(?:    check_\w+\(.*\)\n)+", MAIN)[0]
LOSSES = "check_losses(mesh, options.compile)"
TRAINING = "check_training(mesh, options)"
AT_REST = {f"{P} million parameters: bytes of each" for P in ("0.8", "1.5", "2.2")}
KEPT_WHOLE = {f"{P} million parameters, kept whole: bytes" for P in ("0.8", "1.5", "2.2")}
SHAPES = ("124m", "1b", "7b")
SDPA = "F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)"
BY_HAND = "(q_BHTK @ k_BHTK.mT / q_BHTK.shape[-1] ** 0.5).softmax(-1) @ v_BHTK"
FULL = '    if recompute == "full":\n        return {"add": 2 * D}\n'
AGREED = """\
for grad in gradients)
        scaler.step(optimizer)
        scaler.update()
"""
ALONE = """\
for grad in gradients)
        if overflows == 0:
            optimizer.step()
        scaler.update(scaler.get_scale() / (1 if overflows == 0 else 2))
"""

MODEL = {
    "the scores are stored": (
        [(SDPA, BY_HAND)],
        {
            "made by addmm: bytes per token",
            "made by attention: bytes per token",
            "none: bytes per token",
            "selective: bytes per token",
        },
    ),
    "no first residual": (
        [
            (
                "x_BTD = x_BTD + self.attention(self.norm1(x_BTD))",
                "x_BTD = self.attention(self.norm1(x_BTD))",
            )
        ],
        {"made by add: bytes per token", "made by addmm: bytes per token"},
    ),
    "one norm": (
        [("self.up(self.norm2(x_BTD))", "self.up(x_BTD)")],
        {"made by layer_norm: bytes per token", "none: bytes per token"},
    ),
    "relu": (
        [("F.gelu(", "F.relu(")],
        {
            "made by addmm: bytes per token",
            "made by gelu: bytes per token",
            "none: bytes per token",
        },
    ),
}
ACTIVATIONS = {
    "no recomputation in the formula": (
        [(FULL, "")],
        {"full: bytes per token", "full: peak of a step, in MB"},
    ),
    "no recomputation in the model": (
        [("            block = checkpoint_wrapper(block)\n", "            pass\n")],
        {
            "full: bytes per token",
            "full: peak of a step, in MB",
            "full: FLOPs / forward's",
            "full, no early stop: FLOPs / forward's",
        },
    ),
}
FLOPS = {
    "products are recomputed (Try)": (
        [("    torch.ops.aten.addmm.default,  # nn.Linear\n", "")],
        {"selective: bytes per token", "selective: FLOPs / forward's"},
    ),
    "FlashAttention's five products are taken for four": (
        [(" + attention / 2  #", "  #")],
        {f"{name}: FLOPs / forward's" for name in ("none", "selective", "full")}
        | {"full, no early stop: FLOPs / forward's"},
    ),
    "early stop is not known": (
        [
            (
                "        if early_stop:\n            total -=",
                "        if False:\n            total -=",
            )
        ],
        {"full: FLOPs / forward's"},
    ),
}
PEAK = {
    "everything is recomputed": (
        [('    if recipe.recompute == "full":', '    if recipe.recompute != "selective":')],
        {"none: peak of a step, in MB"},
    ),
    "selective is taken for none": (
        [('elif recipe.recompute == "selective":', 'elif recipe.recompute == "some":')],
        {"selective: peak of a step, in MB"},
    ),
}
VALUES = {
    "SGD (Try)": (
        [
            (
                "torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)\n            mean",
                "torch.optim.SGD(model.parameters(), lr=1e-3)\n            mean",
            )
        ],
        AT_REST | KEPT_WHOLE,
    ),
    "18P is said to be 16P": (
        [("return 16 * P / n + 2 * copies", "return 16 * P / n")],
        KEPT_WHOLE,
    ),
    "16P is said to be 18P": (
        [("return 16 * P / n + 2 * copies", "return 18 * P / n + 2 * copies")],
        AT_REST | KEPT_WHOLE,
    ),
    "every rank trains on rank 0's bytes, and in bfloat16 on others": (
        [
            (
                "losses = losses_of(model, random_bytes(mesh, RANK))",
                "losses = losses_of(model, random_bytes(mesh, 0))",
            ),
            (
                "(losses_of(model, random_bytes(mesh, RANK)).double()",
                "(losses_of(model, random_bytes(mesh, 0)).double()",
            ),
        ],
        {
            f"{name}: losses, error"
            for name in ("by block", "by size", "kept whole", "selective", "full")
        }
        | {"bfloat16: losses, error, at most"},
    ),
    "recomputation in float32, and what is called bfloat16": (
        [
            ('(Recipe(recompute="selective"), {})', '(Recipe(recompute="selective"), FLOAT)'),
            ('(Recipe(recompute="full"), {})', '(Recipe(recompute="full"), FLOAT)'),
            ('policy_of("bfloat16"))\n    error', 'policy_of("float32"))\n    error'),
            (
                "RECIPES = {",
                'FLOAT = {"mp_policy": MixedPrecisionPolicy(torch.float32)}\nRECIPES = {',
            ),
        ],
        {
            "selective: losses, error",
            "selective: weights unlike those of by block",
            "full: losses, error",
            "full: weights unlike those of by block",
            "bfloat16: losses, error, at least",
        },
    ),
    "masters in float32 only": (
        [("heads=4)).to(dtype)", "heads=4)).to(torch.float32)")],
        {"bfloat16 masters: share that an update misses"},
    ),
    "masters in bfloat16 only": (
        [("heads=4)).to(dtype)", "heads=4)).to(torch.bfloat16)")],
        {"float32 masters: share that an update misses"},
    ),
}
OTHERS = {
    "no inner unit": (
        [("        fully_shard(unit, mesh=mesh, **options)\n", "        pass\n")],
        {
            "by block: parameters ever whole, root + one unit",
            "by block: all-gathers in a step, 2U + 1",
            "by size: parameters ever whole, root + one unit",
            "by size: all-gathers in a step, 2U + 1",
        },
    ),
    "another threshold": (
        [("least: int = 20_000", "least: int = 30_000")],
        {
            "by size: units",
            "by size: parameters ever whole, root + one unit",  # units lie inside units
            "by size: all-gathers in a step, 2U + 1",
        },
    ),
    "the first block is no unit": (
        [("return list(model.blocks)", "return list(model.blocks[1:])")],
        {"by block: units", "by block: all-gathers in a step, 2U + 1"},
    ),
    "P is the blocks'": (
        [("return elements_of(model), counter", "return elements_of(model.blocks), counter")],
        {f"{size}: parameters" for size in SHAPES} | {f"{size}: 6 P / FLOPs" for size in SHAPES},
    ),
    "each rank decides alone": (
        [(AGREED, ALONE)],
        {"one overflow: ranks that skip"},
    ),
    "the scale fits": (
        [("init_scale=2.0**26)", "init_scale=2.0**8)")],
        {"steps skipped until the scale fits, at least", "the scale is halved by each"},
    ),
    "the overflow is everywhere, and comes again": (
        [
            ("        if plant and RANK == 0:", "        if plant:"),
            (
                '    _, moved = step()\n    claim("the next',
                '    _, moved = step(plant=True)\n    claim("the next',
            ),
        ],
        {"one overflow: ranks that hold it", "the next step: weights that move, of a rank"},
    ),
    "the learning rate stays nothing": (
        [("    peak = PEAK_LR[options.size]\n", "    peak = 1e-9\n")],
        {"validation loss, at most"},
    ),
    "it predicts what it sees": (
        [("x_BT[:, 1:].flatten())\n\n\ndef average", "x_BT[:, :-1].flatten())\n\n\ndef average")],
        {"validation loss, and one bit per byte"},
    ),
}


def only(*sections: str) -> list[tuple[str, str]]:
    """The lesson with these sections alone, in their order."""
    return [(SECTIONS, "".join(f"    {section}\n" for section in sections))]


BREAKS = [
    Breaks(MODEL, changes=only("check_activations(mesh)")),
    Breaks(
        ACTIVATIONS,
        changes=only("check_activations(mesh)", "check_peak(mesh)", "check_flops(mesh)"),
    ),
    Breaks(FLOPS, changes=only("check_activations(mesh)", "check_flops(mesh)")),
    Breaks(PEAK, changes=only("check_peak(mesh)")),
    Breaks(VALUES, changes=only("check_bytes_at_rest(mesh)", LOSSES)),
    Breaks(
        OTHERS, changes=only("check_units(mesh)", "check_sizes()", "check_overflow(mesh)", TRAINING)
    ),
]
# There is no compiler for such GPUs. What C++ saves does not say that it lies on one, what is
# recomputed does, and recomputation compares the two. Nor does the GradScaler's flag say it.
ON_GPUS = OnGpus(
    [
        ("    check_overflow(mesh)\n", ""),
        ("checkpoint_wrapper(block)", 'checkpoint_wrapper(block, determinism_check="none")'),
        ("context_fn=keep_results)", 'context_fn=keep_results, determinism_check="none")'),
        ('    settings["compiled"] = Recipe(None, "none", options.compile or "inductor")\n', ""),
        ("train(model, text_N, options, steps=8)", "train(model, text_N, options, steps=2)"),
    ],
    argv=("--size", "tiny", "--steps", "2", "--batch", "2"),
    hardware={
        f"{name}: peak memory / predicted": "of a tiny model; gloo's threads let go when they like"
        for name in ("full", "selective", "none")
    },
    ranks=(1, 2),
)


def play_section(section: str, n: int, *changes: tuple[str, str], argv: tuple = ()) -> Played:
    return play(LESSON, n, *only(section), *changes, argv=argv)


@pytest.mark.deep
def test_what_needs_two_ranks_is_blocked_on_one() -> None:
    played = play_section("check_units(mesh)", 1)
    assert played.code == 0, played.output
    blocked = {row["claim"] for row in played.ledger if row["verdict"] == "BLOCKED"}
    assert {"by block: all-gathers", "by size: all-gathers"} <= blocked


def test_the_learning_rate_warms_up_and_falls_along_a_cosine() -> None:
    lesson = load(LESSON)
    rates = [lesson.learning_rate(step, 101, 2.0) for step in range(101)]
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert rates[10] == pytest.approx(2.0)
    assert rates[55] == pytest.approx(1.1)  # half of the way down
    assert rates[100] == pytest.approx(0.2)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert lesson.learning_rate(1, 2, 2.0) == pytest.approx(2.0)


def test_formulas_are_the_papers() -> None:
    """Korthikanti et al. 2022, table 2 and appendix A; Narayanan et al. 2021: P of their models."""
    lesson = load(LESSON)
    shape = lesson.Shape(L=48, D=6144, T=2048, V=51_200, heads=64)
    L, h, s, V = 48, 6144, 2048, 51_200
    assert lesson.model_flops(shape) == pytest.approx(
        72 * L * h**2 * (1 + s / (6 * h) + V / (12 * L * h))
    )
    saved = lesson.saved_per_token(shape, "none", statistic=0)
    assert sum(saved.values()) == 34 * h - 2 * h + 4 * 64
    assert sum(lesson.saved_per_token(shape, "full").values()) == 2 * h
    P = 12 * L * h**2 * (1 + 13 / (12 * h) + (V + s) / (12 * L * h))
    ours = shape.P - V * h  # whose head is not the embedding's
    assert ours == pytest.approx(P, rel=1e-5)


def test_large_modules_leave_nothing_out_and_take_nothing_twice() -> None:
    lesson = load(LESSON)
    model = lesson.GPT(*lesson.SIZES["tiny"])
    for least in (1, 10_000, 100_000, 10**9):
        units = [*lesson.units_of(model, least), model]
        taken = set()
        for unit in units[:-1]:
            fresh = [p for p in unit.parameters() if p not in taken]
            assert sum(p.numel() for p in fresh) >= least
            taken.update(fresh)


@pytest.mark.deep
def test_every_flag_at_once(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(Path(pytest.__file__).read_bytes() + b"all work and no play " * 5_000)
    argv = ("--data", str(text), "--precision", "float16", "--recompute", "selective")
    argv += ("--units", "20000", "--batch", "4", "--steps", "25")
    played = play_section(TRAINING, 2, argv=argv)
    assert not played.failed, played.output


@pytest.mark.deep
def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"too short")
    played = play_section(TRAINING, 1, argv=("--data", str(text)))
    assert "--data needs over 640 bytes; it has 9" in str(played.code) + played.output


def graphs_of_a_step() -> tuple[list[int], int]:
    """The matrix products in each graph that the compiler is given, and how often graphs break."""
    lesson = load(LESSON)
    graphs = []

    def compiler(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        linear = torch.nn.functional.linear
        graphs.append(
            sum(node.target in (linear, torch._C._nn.linear) for node in graph.graph.nodes)
        )
        return graph.forward

    mesh = init_device_mesh("cpu", (1,))
    shape = lesson.Shape(L=2, D=48, T=64, V=256, heads=4)
    model = lesson.build(lesson.new_gpt(mesh, shape), mesh, lesson.Recipe(compiler=compiler))
    lesson.mean_loss(model, lesson.random_bytes(mesh, 0)).backward()
    return graphs, sum(torch._dynamo.utils.counters["graph_break"].values())


def test_a_compiled_block_is_one_graph() -> None:
    """The hooks of FSDP2 stay outside: inside they would break it."""
    ((graphs, breaks),) = run(graphs_of_a_step, 1)
    assert breaks == 0
    assert graphs
    assert set(graphs) == {4}


def test_a_gpu_has_its_own_peak() -> None:
    lesson = load(LESSON)
    names = {
        "Tesla T4": "T4",
        "Tesla V100-SXM2-16GB": "V100",
        "NVIDIA L4": "L4",
        "NVIDIA L40S": "L40S",
        "NVIDIA L40": None,
        "NVIDIA A10": "A10",
        "NVIDIA A10G": "A10G",
        "NVIDIA A100-SXM4-80GB": "A100",
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA H100 PCIe": "H100 PCIe",
        "NVIDIA H200": "H200",
        "NVIDIA GH200 480GB": "GH200",
        "NVIDIA B200": "B200",
        "NVIDIA GB200": "GB200",
        "NVIDIA B300 SXM6 AC": "B300",
        "NVIDIA GeForce RTX 4090": "4090",
        "NVIDIA T400": None,
    }
    assert {name: lesson.datasheet_of(name) for name in names} == names
    assert lesson.PEAKS["A10G"] < lesson.PEAKS["A10"]


def test_conventions_of_mfu_are_as_the_table_says() -> None:
    lesson = load(LESSON)
    for size, by_6p, by_half in ("124m", "1.15", "0.93"), ("7b", "0.96", "0.96"):
        shape = lesson.SIZES[size]
        full = lesson.model_flops(shape)
        assert f"{6 * shape.P / full:.2f}" == by_6p
        assert f"{1 - 6 * shape.L * shape.D * shape.T / full:.2f}" == by_half


def test_training_and_held_out_text_do_not_overlap() -> None:
    lesson = load(LESSON)
    seen = {}

    def train(model: object, text_N: torch.Tensor, *_: object) -> tuple[list[float], float]:
        seen["train"] = text_N
        return [5.0, 5.0], 1.0

    def validate(model: object, text_N: torch.Tensor, options: object) -> float:
        seen["held out"] = text_N
        return 2.0

    lesson.train, lesson.validation_loss = train, validate
    for name in ("new_gpt", "build", "print_rates", "print0", "claim"):
        setattr(lesson, name, lambda *_, **__: None)
    options = {"size": "tiny", "batch": 2, "steps": 2, "data": None, "units": None}
    options |= {"recompute": "none", "compile": None, "precision": "float32"}
    lesson.check_training(SimpleNamespace(device_type="cpu"), SimpleNamespace(**options))
    end = seen["train"].data_ptr() + len(seen["train"])
    assert seen["held out"].data_ptr() == end
    assert len(seen["held out"]) == (len(seen["train"]) + len(seen["held out"])) // 10


def test_gradients_are_unscaled_before_they_are_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float16 the norm is that of the gradients, not 65,536 times as much."""
    clip = torch.nn.utils.clip_grad_norm_
    norms = []

    def clip_and_note(*given: object) -> None:
        norms.append(clip(*given).item())

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip_and_note)
    lesson = load(LESSON)
    lesson.average = lambda losses: losses  # there is one rank
    text_N = torch.arange(1000).to(torch.uint8)
    for precision in ("float32", "float16"):
        model = lesson.new_gpt(SimpleNamespace(device_type="cpu"), lesson.SIZES["tiny"])
        options = SimpleNamespace(size="tiny", batch=2, precision=precision)
        lesson.train(model, text_N, options, 1)
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


@pytest.mark.deep
def test_compiled_it_has_the_same_losses() -> None:
    """Dynamo's graphs with autograd's, and no kernels of a compiler's: that takes minutes."""
    played = play_section(LOSSES, 1, argv=("--compile", "aot_eager"))
    played.expect(set())
    claims = {row["claim"]: row for row in played.ledger}
    assert math.isclose(claims["compiled: losses, error"]["measured"], 0, abs_tol=1.3e-12)


def test_on_one_rank_a_step_of_one_token_peaks_at_weights_gradients_and_moments() -> None:
    lesson = load(LESSON)
    shape = lesson.SIZES["7b"]
    P_root = shape.P - shape.L * (12 * shape.D**2 + 13 * shape.D)
    assert lesson.predicted_peak(shape, "full", tokens=1, n=1) == 2 * P_root + 4 * shape.P


@pytest.mark.parametrize(
    ("recompute", "tokens", "V", "peak"),
    [  # L = 2, D = 8, T = 4, 2 heads: a block has 872 parameters, and keeps 272, 184 or 16 bytes
        ("none", 1000, 2, 160 + 1000 * (2 * 272 + 18 * 8) + 4 * 872),
        ("selective", 1000, 2, 160 + 1000 * (2 * 184 + (12 + 18) * 8) + 4 * 872),
        ("full", 1000, 2, 160 + 1000 * (2 * 16 + (30 + 18) * 8 + 4 * 2) + 4 * 872),
        ("none", 1000, 100, 3296 + 1000 * (2 * 272 + 4 * 8 + 12 * 100)),  # backward begins
        ("full", 8, 2, 160 + 8 * (16 + (30 + 18) * 8 + 4 * 2) + 4 * 872 + 4 * 872 / 2),  # its end
    ],
)
def test_each_moment_of_a_step_can_be_its_peak(
    recompute: str, tokens: int, V: int, peak: float
) -> None:
    lesson = load(LESSON)
    shape = lesson.Shape(L=2, D=8, T=4, V=V, heads=2)
    assert lesson.predicted_peak(shape, recompute, tokens, n=2) == peak


@pytest.mark.parametrize(
    ("size", "million", "features"),
    [("124m", 124.5, 64), ("350m", 354.9, 64), ("1b", 913.0, 128), ("7b", 6658.6, 128)],
)
def test_sizes_have_the_parameters_of_gpts_whose_head_is_their_embedding(
    size: str, million: float, features: int
) -> None:
    """GPT-2 small and medium, and GPT-3 6.7B; the third is a shallower GPT-3 XL."""
    shape = load(LESSON).SIZES[size]
    assert round((shape.P - shape.V * shape.D) / 1e6, 1) == million
    assert shape.D // shape.heads == features


def test_three_steps_are_those_of_plain_sgd() -> None:
    """One process takes them as well, so it does not notice how they are taken."""
    lesson = load(LESSON)
    lesson.average = lambda losses: losses
    mesh = SimpleNamespace(device_type="cpu")
    shape = lesson.Shape(L=1, D=16, T=64, V=256, heads=2)
    ours, plain = (lesson.new_gpt(mesh, shape).double() for _ in range(2))
    x_BT = lesson.random_bytes(mesh, 0)
    losses = lesson.losses_of(ours, x_BT)
    weights = list(plain.parameters())
    for seen in losses:
        loss = F.cross_entropy(plain(x_BT[:, :-1]).transpose(1, 2), x_BT[:, 1:])
        assert seen.item() == pytest.approx(loss.item(), abs=1e-12)
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.data -= 0.1 * gradient
    pairs = zip(ours.parameters(), weights, strict=True)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in pairs)


def averages() -> tuple[list[float], float]:
    lesson = load(LESSON)
    mine = 2.0 * dist.get_rank()
    return lesson.average(torch.tensor([mine, 6.0])).tolist(), lesson.mean_over_ranks(mine)


def test_averages_are_over_the_ranks() -> None:
    assert run(averages, 2) == [([1.0, 6.0], 1.0)] * 2


def test_ranks_have_different_batches() -> None:
    """With the same one everywhere, a mean over the ranks could be left out."""
    lesson = load(LESSON)
    mesh = SimpleNamespace(device_type="cpu")
    assert not lesson.random_bytes(mesh, 0).equal(lesson.random_bytes(mesh, 1))


def test_choices_whose_losses_are_compared_are_what_they_are_called() -> None:
    """All have the same losses, so losses do not tell one choice from another."""
    lesson = load(LESSON)
    lesson.build = Mock(return_value=SimpleNamespace(parameters=list))
    lesson.losses_of = lambda *_: torch.zeros(3)
    lesson.claim = lesson.check_masters = Mock()
    lesson.check_losses(SimpleNamespace(device_type="cpu"), None)
    built = [(*call.args[2], call.kwargs) for call in lesson.build.call_args_list]
    assert built[:5] == [
        (None, "none", None, {}),
        (7_000, "none", None, {}),
        (None, "none", None, {"reshard_after_forward": False}),
        (None, "selective", None, {}),
        (None, "full", None, {}),
    ]
    policy = built[5][3]["mp_policy"]
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)


def train_a_little(lesson: ModuleType, steps: int) -> tuple[list[torch.Tensor], list[bool], float]:
    """Train a small model; return its batches, which steps began with no gradient, the seconds."""
    lesson.average = lambda losses: losses
    mean_loss = lesson.mean_loss
    drawn, fresh = [], []

    def note(model: torch.nn.Module, x_BT: torch.Tensor) -> torch.Tensor:
        drawn.append(x_BT)
        fresh.append(all(parameter.grad is None for parameter in model.parameters()))
        return mean_loss(model, x_BT)

    lesson.mean_loss = note
    shape = lesson.Shape(L=1, D=8, T=64, V=256, heads=2)
    model = lesson.new_gpt(SimpleNamespace(device_type="cpu"), shape)
    options = SimpleNamespace(size="tiny", batch=2, precision="float32")
    _, seconds = lesson.train(model, torch.arange(1000).to(torch.uint8), options, steps)
    return drawn, fresh, seconds


def test_each_step_has_its_own_rate_clips_at_1_and_begins_with_no_gradient() -> None:
    lesson = load(LESSON)
    lesson.time = SimpleNamespace(perf_counter=Mock(side_effect=[10.0, 16.0]))
    rates = []
    hook = register_optimizer_step_pre_hook(
        lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"])
    )
    with patch.object(torch.nn.utils, "clip_grad_norm_") as clip:
        _, fresh, seconds = train_a_little(lesson, steps=5)
    hook.remove()
    assert rates == pytest.approx([lesson.learning_rate(step, 5, 6e-3) for step in range(5)])
    assert [call.args[1] for call in clip.call_args_list] == [1.0] * 5
    assert fresh == [True] * 5
    assert seconds == 2.0  # of each of the last three


def test_each_rank_draws_another_part_of_the_text() -> None:
    drawn = []
    for rank in (0, 1):
        lesson = load(LESSON)
        lesson.RANK = rank
        drawn += train_a_little(lesson, steps=2)[0]
    assert not drawn[0].equal(drawn[2])
    assert not drawn[0].equal(drawn[1])


def test_all_ranks_are_judged_by_the_same_text_and_without_a_graph() -> None:
    lesson = load(LESSON)
    judged = []

    def mean_loss(model: object, x_BT: torch.Tensor) -> torch.Tensor:
        judged.append((torch.is_grad_enabled(), x_BT.tolist()))
        return torch.tensor(float(len(judged)))

    lesson.mean_loss = mean_loss
    options = SimpleNamespace(size="tiny", batch=2)
    losses = []
    for lesson.RANK in (0, 1):
        losses.append(lesson.validation_loss(None, torch.arange(1000), options))
    assert losses == [16.5, 48.5]  # the means of 1 to 32, and of 33 to 64
    assert judged[:32] == judged[32:]
    assert [graph for graph, _ in judged] == [False] * 64


def test_what_is_trained_is_built_as_told_and_its_bound_is_the_entropy_of_the_bytes(
    tmp_path: Path,
) -> None:
    lesson = load(LESSON)
    text = tmp_path / "text"
    text.write_bytes(b"ab" * 5_000)
    bounds = []
    lesson.claim = lambda name, predicted, *_, **__: bounds.append(predicted)
    lesson.train = lambda *_: ([5.0, 5.0], 1.0)
    lesson.validation_loss = lambda *_: 2.0
    for name in ("new_gpt", "build", "print_rates", "print0"):
        setattr(lesson, name, Mock())
    options = {"size": "tiny", "batch": 2, "steps": 2, "data": str(text), "units": 7}
    options |= {"recompute": "full", "compile": "inductor", "precision": "bfloat16"}
    lesson.check_training(SimpleNamespace(device_type="cpu"), SimpleNamespace(**options))
    assert bounds == [pytest.approx(math.log(2))]
    (_, _, recipe), how = lesson.build.call_args
    assert recipe == (7, "full", "inductor")
    assert how["mp_policy"].param_dtype == torch.bfloat16


def test_rates_are_told_as_the_formulas_have_them() -> None:
    """Of 854,654,976 FLOPs per token that are useful, and 1,024,524,288 that run."""
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 4
    lesson.peak_flops = lambda device: (1e14, "a datasheet")
    said = []
    lesson.print0 = said.append
    options = SimpleNamespace(recompute="full")
    lesson.print_rates(lesson.SIZES["124m"], options, 10_000.0, torch.device("cpu"))
    assert said[0].strip() == "40,000 tokens/s, 8.55 TFLOP/s per rank"
    assert said[1].strip() == "MFU 8.5%, HFU 10.2% of 100: a datasheet"


def test_a_cpus_peak_is_2_n_cubed_flops_per_product() -> None:
    lesson = load(LESSON)
    lesson.time = SimpleNamespace(perf_counter=Mock(side_effect=[3.0, 4.0]))  # of five products
    assert lesson.peak_flops(torch.device("cpu"))[0] == pytest.approx(5 * 2 * 512**3)


def test_peaks_are_told_for_8_gpus_with_8_sequences_each() -> None:
    lesson = load(LESSON)
    lesson.count_on_meta = lambda shape: (1, 1.0)
    lesson.gather_objects = lambda value: [value]
    lesson.claim = Mock()
    lesson.predicted_peak = Mock(return_value=1e9)
    said = []
    lesson.print0 = lambda line: said.append(line.strip())
    lesson.check_sizes()
    for call in lesson.predicted_peak.call_args_list:
        assert (call.args[2], call.kwargs) == (8 * call.args[0].T, {"n": 8})
    at_rest = "none 11.3, selective 11.3, full 11.3"  # and 12 bytes of 6.86e9 / 8 parameters
    assert said[4] == f"peak on 8 GPUs, 8 sequences each, in GB: {at_rest}"
    assert [line.split()[-1] for line in said[1::2]] == ["1.20", "1.24", "1.24"]
