"""The lesson on LoRA: adapters, who has gradients, and each claim FAILs when its line breaks."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.optimizer import register_optimizer_step_pre_hook

from course.playing import load, play
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "fsdp/08_lora.py"
QUICK = ("--steps", "1")
SETTINGS = ("full", "LoRA", "LoRA, bfloat16")
BYTES = {f"{name}: bytes on this rank" for name in SETTINGS}
GATHERED = {f"{name}: elements gathered" for name in SETTINGS}
SCATTERED = {f"{name}: elements reduce-scattered" for name in SETTINGS}
SCATTERS = {f"{name}: reduce-scatters" for name in SETTINGS}
STAYS = {f"in bfloat16, a change of {size} W: share that stays" for size in (0.1, 0.01, 0.001)}
COUNT = "Q: the sum of r (d_in + d_out)"
START = "outputs that differ once adapters are there"
GRADIENT_A = "first step: elements of A with a gradient"
GRADIENT_B = "first step: elements of B with one, all"
DEAD = "A = B = 0: elements moved in 3 steps"
ROWS = "r = 1, by rows: A reduce-scattered"
COLUMNS = "r = 1, by columns: A reduce-scattered"
FROZEN_DTYPE = "frozen bfloat16, trained float32: errors"
TWO_DTYPES = "trained in two dtypes: errors"
LOSSES = "losses of 3 steps, error"
WEIGHTS = "weights after 3 steps, error"
FROZEN = "frozen weights that training has changed"
GAIN = "full fine-tuning's gain in nats, at least"
THIRD = "gain of the adapters, at least a third of it"
RANK_LORA = "LoRA: matrix rank of what merging changed"
RANK_FULL = "full: smallest matrix rank of a change"
MERGED = "merged in float64: outputs, error"


def adapted(r: int) -> tuple[nn.Linear, nn.Module]:
    lesson = load(LESSON)
    torch.manual_seed(0)
    base = nn.Linear(5, 7).double()
    layer = lesson.LoRALinear(base, r, alpha=3)
    nn.init.normal_(layer.lora_B)
    return base, layer


def test_the_adapter_is_the_formula() -> None:
    base, layer = adapted(2)
    x = torch.randn(4, 5, dtype=torch.float64)
    W = base.weight + 3 / 2 * layer.lora_B @ layer.lora_A
    assert torch.allclose(layer(x), x @ W.T + base.bias, rtol=0, atol=1e-14)
    change = (W - base.weight).detach()
    assert torch.allclose(layer.change(), change, rtol=0, atol=1e-14)


def test_adapters_stay_in_float32_beside_bfloat16() -> None:
    lesson = load(LESSON)
    layer = lesson.LoRALinear(nn.Linear(5, 7).bfloat16(), 2, alpha=3)
    assert (layer.lora_A.dtype, layer.lora_B.dtype) == (torch.float32, torch.float32)


def test_added_where_named_and_merged_back() -> None:
    lesson = load(LESSON)
    model = lesson.GPT().double()
    names = [name for name, _ in model.named_parameters()]
    x = torch.randint(256, (2, 8))
    lesson.add_adapters(model, ("qkv", "down"), 2, 4)
    layers = lesson.adapters_of(model)
    assert len(layers) == 8
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert all(name.endswith(("lora_A", "lora_B")) for name in trained)
    assert len(trained) == 16
    for layer in layers:
        nn.init.normal_(layer.lora_B, std=0.1)
    expected = model(x)
    merged = lesson.merge_adapters(model)
    assert [name for name, _ in merged.named_parameters()] == names
    assert torch.allclose(merged(x), expected, rtol=0, atol=1e-12)


def on_a_rank() -> tuple:
    """Of an adapted model on one rank: frozen gradients, and what it holds and should hold."""
    lesson = load(LESSON)
    lesson.RANK, lesson.WORLD_SIZE = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (lesson.WORLD_SIZE,))
    whole = lesson.new_model(mesh, "LoRA")
    model = lesson.shard_model(lesson.new_model(mesh, "LoRA"), mesh)
    with lesson.CountedCommunication() as counted:
        lesson.mean_loss(model, lesson.random_bytes(mesh, lesson.RANK)).backward()
    frozen = [p.grad for p in model.parameters() if not p.requires_grad and p.grad is not None]
    rows = [p.to_local().shape[0] for p in model.parameters()]
    predicted = [lesson.rows_held(len(p)) for p in whole.parameters()]
    same = lesson.whole_parameters(model)
    error = max((same[name] - p).abs().max().item() for name, p in whole.named_parameters())
    scattered = counted.elements("reduce_scatter")
    return len(frozen), rows == predicted, error, scattered


@pytest.mark.parametrize("n", [2, 3, 4])
def test_only_adapters_have_gradients_and_send_them(n: int) -> None:
    for frozen, rows, error, scattered in run(on_a_rank, n):
        assert (frozen, rows, error) == (0, True, 0.0)
        in_A = 4 * (64 + 64 + 64 + 256) * (math.ceil(4 / n) * n)
        out_B = 4 * sum(math.ceil(d / n) * n for d in (192, 64, 256, 64)) * 4
        assert scattered == in_A + out_B


FINE_TUNE = "    optimizer = torch.optim.AdamW(trained(model), lr=lr, fused=True)\n"
TUNED = "            add_adapters(model, ADAPTED, r, ALPHA)\n"
STEPS = "    losses = take_steps(model, batches[RANK])\n"

LINES = {
    "B starts at one": (
        [("weight.new_zeros(base.out_features", "weight.new_ones(base.out_features")],
        {START, DEAD, GRADIENT_A, WEIGHTS},
    ),
    "blocks are no units": (
        [
            (
                "    for block in model.blocks:\n        fully_shard(block, mesh=mesh, **options)\n"
                "    return fully_shard",
                "    return fully_shard",
            )
        ],
        {*GATHERED, *SCATTERS},
    ),
    "A starts at zero": (
        [("nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))", "self.lora_A.data.zero_()")],
        {GRADIENT_B, RANK_LORA},
    ),
    "merged without its factor; one dtype after all; one rank's losses; columns not asked for": (
        [
            ("return self.scale * self.lora_B.detach()", "return self.lora_B.detach()"),
            ("layer.lora_A.data = layer.lora_A.data.bfloat16()", "pass"),
            ("    dist.all_reduce(losses)\n", "    losses = losses * WORLD_SIZE\n"),
            ('"columns": (by_columns_if_thin, in_A)', '"columns": (None, in_A)'),
        ],
        {MERGED, TWO_DTYPES, LOSSES, COLUMNS},
    ),
    "units are kept for backward; the bfloat16 base is trained; A is dealt out by columns": (
        [
            (
                "mesh, name), mesh, **options)\n        with",
                "mesh, name), mesh, reshard_after_forward=False, **options)\n        with",
            ),
            (
                'frozen = new_model(mesh, "LoRA, bfloat16")\n',
                'frozen = new_model(mesh, "LoRA, bfloat16").requires_grad_(True)\n',
            ),
            ('"rows": (None, WORLD', '"rows": (by_columns_if_thin, WORLD'),
        ],
        {*GATHERED, FROZEN_DTYPE, ROWS},
    ),
    "gradients are summed; the base stays in float32; half of the change is merged": (
        [
            (
                STEPS,
                "    for block in model.blocks:\n"
                "        block.set_gradient_divide_factor(1.0)\n" + STEPS,
            ),
            ('"LoRA, bfloat16": (torch.bfloat16,', '"LoRA, bfloat16": (torch.float32,'),
            ("(W_M.float() + change_M)", "(W_M.float() + change_M / 2)"),
        ],
        {LOSSES, WEIGHTS, "LoRA, bfloat16: bytes on this rank", *STAYS},
    ),
    "gradients stay on their ranks": (
        "            mean_loss(model, random_bytes(mesh, RANK)).backward()\n        gathered",
        "            model.set_requires_gradient_sync(False)\n"
        "            mean_loss(model, random_bytes(mesh, RANK)).backward()\n        gathered",
        {*SCATTERED, *SCATTERS},
    ),
    "Adam has a third moment": (
        "        optimizer = torch.optim.AdamW(trained(model))\n        mean_loss",
        "        optimizer = torch.optim.AdamW(trained(model), amsgrad=True)\n        mean_loss",
        BYTES,
    ),
}
UNTRAINED = {
    "the base is tuned with its adapters; full fine-tuning stands still": (
        [
            (TUNED, TUNED.replace("ALPHA)", "ALPHA).requires_grad_(True)")),
            ('("full", None, 3e-3)', '("full", None, 0.0)'),
        ],
        {FROZEN, GAIN, RANK_FULL},
    ),
    "the optimizer is made before the shards (Try)": (
        [
            (
                "    shard_model(model, mesh)\n" + FINE_TUNE,
                FINE_TUNE + "    shard_model(model, mesh)\n",
            )
        ],
        {GAIN, RANK_FULL, RANK_LORA},
    ),
}

ADAPTERS = {
    "the adapters stand still": (
        '("LoRA", MATRIX_RANK, 1e-2)',
        '("LoRA", MATRIX_RANK, 0.0)',
        {THIRD, RANK_LORA},
    ),
    "the head is adapted, too": (
        '("qkv", "out", "up", "down")',
        '("qkv", "out", "up", "down", "head")',
        {COUNT, "LoRA: reduce-scatters", "LoRA, bfloat16: reduce-scatters"},
    ),
}


# Neither need full fine-tuning gain anything in one step, nor the adapters a share of that.
ANY_SHARE = ("claim(text, gain / 3, reached", "claim(text, -9.0, reached")
ANY_GAIN = ('at least", 0.1, gain', 'at least", -9.0, gain')
BREAKS = [
    Breaks(LINES, changes=[ANY_SHARE, ANY_GAIN], argv=QUICK, alone=["A starts at zero"], most=2),
    Breaks(UNTRAINED, changes=[ANY_SHARE], argv=QUICK),
    Breaks(ADAPTERS, changes=[ANY_GAIN], argv=QUICK),
]
ON_GPUS = OnGpus(
    [
        ("L: int = 16, T: int = 2048", "L: int = 2, T: int = 32"),
        ("torch.randint(32_768, (B", "torch.randint(1024, (B"),
        ("GPT(L, width, T, V=32_768, heads=width // 128)", "GPT(L, 256, T, V=1024, heads=2)"),
        ("repeats: int = 5", "repeats: int = 1"),
    ],
    argv=QUICK,
    ranks=(1, 2),
)


@pytest.mark.deep
def test_nothing_frozen_is_refused_in_bfloat16() -> None:
    """The docstring's Try."""
    played = play(LESSON, 2, ("    model.requires_grad_(False)\n", ""), argv=QUICK)
    assert "FSDP expects uniform original parameter dtype" in played.code
    for claim in (COUNT, DEAD, "LoRA: bytes on this rank"):
        assert re.search(rf"FAIL .*{re.escape(claim)}", played.output), claim


@pytest.mark.deep
def test_own_text(tmp_path: Path) -> None:
    path = tmp_path / "two.txt"
    path.write_text("ab" * 5000)
    played = play(LESSON, 1, argv=(*QUICK, "--data", str(path)))
    played.expect(set())
    assert {THIRD, GAIN}.isdisjoint(row["claim"] for row in played.ledger)


def test_the_change_is_alpha_over_r_times_the_product() -> None:
    """Twice the matrix rank, and zeros in the new half: half the change."""
    lesson = load(LESSON)
    small, large = (lesson.LoRALinear(torch.nn.Linear(6, 5), r, 8.0) for r in (2, 4))
    with torch.no_grad():
        small.lora_B.normal_()
        large.lora_A.zero_()[:2] = small.lora_A
        large.lora_B.zero_()[:, :2] = small.lora_B
    assert torch.allclose(small.change(), 4.0 * small.lora_B @ small.lora_A)
    assert torch.allclose(large.change(), small.change() / 2)


def test_what_is_held_out_is_drawn_from_no_training_text() -> None:
    lesson = load(LESSON)
    text = lesson.Text(torch.zeros(900, dtype=torch.long), torch.ones(100, dtype=torch.long))
    with patch.object(lesson, "mean_loss", return_value=torch.tensor(0.0)) as loss:
        lesson.held_out_loss(None, text, SimpleNamespace(device_type="cpu"))
    assert bool((loss.call_args[0][1] == 1).all())


ON_CPU = SimpleNamespace(device_type="cpu")  # a mesh, as far as its device is asked for


def test_three_steps_are_those_of_plain_sgd() -> None:
    """One process takes them as well, so it does not notice how they are taken."""
    lesson = load(LESSON)
    torch.manual_seed(0)
    ours = lesson.add_adapters(lesson.GPT(L=1).double(), lesson.ADAPTED, 2, 4.0)
    x_BT = lesson.random_bytes(ON_CPU, 0)
    plain = lesson.GPT(L=1).double()
    lesson.add_adapters(plain, lesson.ADAPTED, 2, 4.0).load_state_dict(ours.state_dict())
    losses = lesson.take_steps(ours, x_BT)
    weights = lesson.trained(plain)
    for seen in losses:
        loss = F.cross_entropy(plain(x_BT[:, :-1]).transpose(1, 2), x_BT[:, 1:])
        assert seen.item() == pytest.approx(loss.item(), abs=1e-12)
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.data -= 0.1 * gradient
    assert len(losses) == 3
    pairs = zip(lesson.trained(ours), weights, strict=True)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in pairs)


def test_ranks_have_different_batches() -> None:
    """With the same one everywhere, a mean over the ranks could be left out."""
    lesson = load(LESSON)
    assert not lesson.random_bytes(ON_CPU, 0).equal(lesson.random_bytes(ON_CPU, 1))


def test_the_loss_is_on_the_byte_that_follows() -> None:
    x_BT = torch.arange(12).view(2, 6)
    assert load(LESSON).mean_loss(lambda x_BT: 100.0 * F.one_hot(x_BT + 1, 256), x_BT) < 1e-6


def test_the_last_tenth_of_a_text_is_held_out(tmp_path: Path) -> None:
    content = bytes(i % 251 for i in range(1000))
    (tmp_path / "text").write_bytes(content)
    _, prose = load(LESSON).read_texts(str(tmp_path / "text"))
    assert bytes(prose.train_N.tolist()) == content[:900]
    assert bytes(prose.held_out_N.tolist()) == content[900:]


def test_the_base_learns_code_and_all_are_tuned_on_prose_and_judged_by_both() -> None:
    lesson = load(LESSON)
    code, prose = lesson.Text("code", "the end of it"), lesson.Text("prose", "its end")
    lesson.read_texts = lambda path: (code, prose)
    trained, judged = [], []

    def fine_tune(model: nn.Module, mesh: object, bytes_N: str, steps: int, lr: float) -> nn.Module:
        trained.append((bytes_N, steps, len(lesson.trained(model))))
        return model

    def held_out_loss(model: nn.Module, text: tuple, mesh: object) -> float:
        judged.append(text)
        return float(len(judged))

    lesson.fine_tune, lesson.held_out_loss = fine_tune, held_out_loss
    lesson.whole_parameters = nn.Module.state_dict
    lesson.check_gains = lesson.print0 = Mock()
    lesson.check_fine_tuning(ON_CPU, SimpleNamespace(data=None, steps=3))
    assert trained == [("code", 6, 53), ("prose", 3, 53), ("prose", 3, 2 * 16)]
    assert judged == [code, prose] * 3
    losses = lesson.check_gains.call_args.args[0]
    assert losses == {"base": [1.0, 2.0], "full": [3.0, 4.0], "LoRA": [5.0, 6.0]}


def test_gains_are_on_prose_and_against_the_base() -> None:
    lesson = load(LESSON)
    claims = {}
    lesson.claim = lambda text, predicted, measured, *_, **__: claims.update(
        {text: (predicted, measured)}
    )
    losses = {"base": [2.0, 3.0], "full": [2.5, 2.4], "LoRA": [2.2, 2.7]}
    lesson.print0 = Mock()
    lesson.check_gains(losses, {"base": {}, "LoRA": {}}, own_data=False)
    assert claims[GAIN] == pytest.approx((0.1, 0.6))
    assert claims[THIRD] == pytest.approx((0.2, 0.3))


def tuned_on(rank: int) -> tuple[list[torch.Tensor], list[bool], list[float], list[float]]:
    """Batches of one of four ranks, which steps began with no gradient, rates, and clips."""
    lesson = load(LESSON)
    lesson.RANK, lesson.WORLD_SIZE = rank, 4
    lesson.shard_model = Mock()
    mean_loss = lesson.mean_loss
    drawn, fresh, rates = [], [], []

    def note(model: nn.Module, x_BT: torch.Tensor) -> torch.Tensor:
        drawn.append(x_BT)
        fresh.append(all(parameter.grad is None for parameter in model.parameters()))
        return mean_loss(model, x_BT)

    lesson.mean_loss = note
    hook = register_optimizer_step_pre_hook(
        lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"])
    )
    with patch.object(nn.utils, "clip_grad_norm_") as clip:
        lesson.fine_tune(lesson.GPT(L=1), ON_CPU, torch.arange(4000) % 256, 6, lr=0.5)
    hook.remove()
    return drawn, fresh, rates, [call.args[1] for call in clip.call_args_list]


def test_ranks_share_24_sequences_warm_up_clip_and_begin_each_step_with_no_gradient() -> None:
    drawn, fresh, rates, clips = tuned_on(0)
    assert {tuple(x_BT.shape) for x_BT in drawn} == {(6, 65)}
    assert fresh == [True] * 6
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5])
    assert clips == [1.0] * 6
    others, *_ = tuned_on(1)
    assert not drawn[0].equal(others[0])


def test_the_smaller_a_change_is_the_more_of_it_bfloat16_loses() -> None:
    """Prediction and measurement have the size of the change in common."""
    lesson = load(LESSON)
    torch.manual_seed(0)
    model = lesson.add_adapters(lesson.GPT(), lesson.ADAPTED, 4, 16)
    for layer in lesson.adapters_of(model):
        nn.init.normal_(layer.lora_B)
    stays = []
    lesson.claim = lambda text, predicted, measured, **_: stays.append(float(measured))
    lesson.check_merged_in_bfloat16(model.double())
    tenth, hundredth, thousandth = stays
    assert 0.005 < tenth < 0.05
    assert 0.1 < hundredth < 0.4
    assert 0.7 < thousandth < 0.9


def bytes_told() -> list[str]:
    lesson = load(LESSON)
    said = []
    lesson.print0, lesson.claim = lambda *words: said.extend(words), Mock()
    lesson.check_bytes(init_device_mesh("cpu", (1,)))
    return [line.split("#")[-1].strip() for line in said]


def test_bytes_are_told_in_multiples_of_P_over_n() -> None:
    """4 or 2 bytes of a frozen parameter, and 16 of 16,384 that are trained, next to 236,928."""
    assert run(bytes_told, 1) == [["16.00 P / n", "5.11 P / n", "3.11 P / n"]]


def test_mixed_precision_gathers_bfloat16_and_adds_up_float32() -> None:
    policy = load(LESSON).MIXED["mp_policy"]
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
