"""The lesson on fully_shard: shards lose nothing, and each claim FAILs when its line breaks."""

import math
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.optimizer import register_optimizer_step_pre_hook

from course.playing import load, play
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "fsdp/01_fsdp_basics.py"
LEARNED = "mean of the last losses, and the bytes' entropy"
LATER = "loss on a byte: change if later bytes change"
SUM = "probabilities of a byte's 256 values: their sum"
CHOICES = ("model", "blocks", "linears", "blocks, kept", "blocks, freed")
ERRORS = {f"{name}: weights after 3 steps, error" for name in CHOICES}


def counted() -> list[tuple]:
    """What the counter saw of one call each of known size, and of a call over half the ranks."""
    lesson, n = load(LESSON), dist.get_world_size()
    x = torch.ones(4 * n)
    pair = dist.new_group([0, 1])
    with lesson.CountedCommunication() as wire:
        dist.all_reduce(x)
        dist.all_gather_into_tensor(torch.empty(len(x) * n), x)
        dist.reduce_scatter_tensor(torch.empty(4), x)
        dist.all_gather_into_tensor(torch.empty(6, dtype=torch.bfloat16), torch.ones(3).bfloat16())
        dist.all_reduce(x, group=pair)
    return [(call.operation, call.elements, call.nbytes) for call in wire.log]


def test_the_counter_sees_what_is_handed_over() -> None:
    assert run(counted, 2)[0] == [
        ("all_reduce", 8, 32),
        ("all_gather", 16, 64),
        ("reduce_scatter", 8, 32),
        ("all_gather", 6, 12),
        ("all_reduce", 8, 32),
    ]


def shares() -> tuple[int, list[int], list[int], float]:
    lesson = load(LESSON)
    lesson.RANK, lesson.WORLD_SIZE = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (lesson.WORLD_SIZE,))
    whole = lesson.new_gpt(mesh)
    model = lesson.shard_model(lesson.new_gpt(mesh), mesh, "blocks")
    rows = [p.to_local().shape[0] for p in model.parameters()]
    predicted = [lesson.rows_held(len(p)) for p in whole.parameters()]
    return lesson.elements_of(whole), rows, predicted, lesson.weights_error(model, whole)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_shards_are_chunks_of_rows_and_lose_nothing(n: int) -> None:
    ranks = run(shares, n)
    whole = [p.shape[0] for p in load(LESSON).GPT().parameters()]
    for i, rows in enumerate(whole):
        held = [rank[1][i] for rank in ranks]
        assert sum(held) == rows
        assert max(held) == -(-rows // n)
        assert sorted(held, reverse=True) == held
    assert all(held == predicted for _, held, predicted, _ in ranks)
    assert [rank[3] for rank in ranks] == [0.0] * n


@pytest.mark.parametrize(("rows", "n"), [(1, 4), (7, 3), (8, 4), (9, 8)])
def test_padded_rows_are_whole_chunks(rows: int, n: int) -> None:
    lesson = load(LESSON)
    lesson.WORLD_SIZE = n
    module = torch.nn.Linear(5, rows, bias=False)
    chunk = len(torch.arange(rows).chunk(n)[0])
    assert lesson.padded_elements(module) == 5 * chunk * n


def norms_of_updates() -> list[float]:
    """The norm over all ranks of the gradients that the optimizer is given, for each update."""
    lesson = load(LESSON)
    lesson.RANK, lesson.WORLD_SIZE = dist.get_rank(), dist.get_world_size()
    for name in ("learning", "that_ranks_differ", "that_nothing_looks_ahead"):
        setattr(lesson, f"check_{name}", lambda *_, **__: None)
    losses_of = lesson.byte_losses
    lesson.byte_losses = lambda *given: 1000 * losses_of(*given)  # there is something to clip
    norms = []

    def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
        gradients = [parameter.grad for parameter in optimizer.param_groups[0]["params"]]
        norms.append(torch.nn.utils.get_total_norm(gradients).full_tensor().item())

    register_optimizer_step_pre_hook(note)
    mesh = init_device_mesh("cpu", (lesson.WORLD_SIZE,))
    lesson.train(mesh, SimpleNamespace(steps=2, data=lesson.__file__))
    return norms


def test_gradients_are_clipped_by_their_norm_over_all_ranks() -> None:
    """Clipped by the norm of its own shards, each of two ranks would be left with a norm of 1."""
    for norms in run(norms_of_updates, 2):
        assert norms == pytest.approx([1.0, 1.0], rel=1e-4)


def counts_of(units: tuple[str, ...]) -> set[str]:
    named = ("all-gathers, 2U + 1", "reduce-scatters, U + 1", "all-gathered, 2 P_in + P_root")
    named += ("most ever whole, the root + one unit",)
    return {f"{unit}: {what}" for unit in units for what in named}


KEPT = {f"reshard_after_forward=False: {what}" for what in ("all-gathers", "whole after forward")}
FREED = {f"reshard_after_forward=True: {what}" for what in ("all-gathers", "whole after forward")}
DEFAULT = {f"default: {what}" for what in ("all-gathers", "whole after forward")}
INNER = "        fully_shard(module, mesh=mesh, **options)\n"

LINES = {
    "inner units are forgotten (Try)": (
        [(INNER, "        pass\n")],
        counts_of(("blocks", "linears"))
        | DEFAULT
        | {f"reshard_after_forward={free}: all-gathers" for free in (True, False)},
    ),
    "blocks are units, whatever was chosen": (
        [("for module in inner_modules(model, units):", "for module in model.blocks:")],
        counts_of(("model", "linears")),
    ),
    "attention looks ahead (Try)": ([("is_causal=True", "is_causal=False")], {LATER, SUM}),
    "labels are not shifted": (
        [("    y_BT = x_BT[:, 1:]\n", "    y_BT = x_BT[:, :-1]\n")],
        {SUM},
    ),
    "every rank trains on rank 0's data": (
        [
            (
                "take_steps(model, random_bytes(mesh, RANK))",
                "take_steps(model, random_bytes(mesh, 0))",
            )
        ],
        ERRORS,
    ),
    "one choice alone trains on other data": (
        [
            (
                "take_steps(model, random_bytes(mesh, RANK))",
                'take_steps(model, random_bytes(mesh, RANK * (name != "linears")))',
            )
        ],
        {"linears: weights after 3 steps, error"},
    ),
    "it frees although told to keep": (
        [('({"reshard_after_forward": False},', '({"reshard_after_forward": True},')],
        KEPT,
    ),
    "it keeps although told to free": (
        [('({"reshard_after_forward": True},', '({"reshard_after_forward": False},')],
        FREED,
    ),
    "the default keeps everything": (
        [("({}, 2 * U + 1, P_root)", '({"reshard_after_forward": False}, 2 * U + 1, P_root)')],
        DEFAULT,
    ),
    "gradients are not reduced": (
        [
            (
                "            byte_losses(model, random_bytes(mesh, RANK)).mean().backward()\n",
                "            model.set_requires_gradient_sync(False)\n"
                "            byte_losses(model, random_bytes(mesh, RANK)).mean().backward()\n",
            )
        ],
        {
            f"{units}: {what}"
            for units in ("model", "blocks", "linears")
            for what in ("reduce-scatters, U + 1", "reduce-scattered, P_in + P_root")
        },
    ),
    "gradients are summed, not averaged": (
        [
            (
                "        take_steps(model, random_bytes(mesh, RANK))\n",
                "        model.set_gradient_divide_factor(1.0)\n"
                "        take_steps(model, random_bytes(mesh, RANK))\n",
            )
        ],
        ERRORS,
    ),
    "all ranks draw the same text": (
        [
            (
                "torch.Generator().manual_seed(RANK)  # every",
                "torch.Generator().manual_seed(0)  # every",
            )
        ],
        {"ranks that drew another text than this one"},
    ),
    "the model is replicated, not sharded": (
        [
            (
                '    model = shard_model(new_gpt(mesh), mesh, "blocks")\n    name',
                '    names = {"mesh_dim_names": ("replicate", "shard")}\n'
                "    copies = init_device_mesh(mesh.device_type, (WORLD_SIZE, 1), **names)\n"
                '    model = shard_model(new_gpt(mesh), copies, "blocks")\n    name',
            )
        ],
        {
            "elements this rank holds: chunk r of each tensor",
            "elements that all ranks hold together: P",
        },
    ),
}


TOLD = "it frees although told to keep"  # broken so, the line is one that another break changes
ANY_LOSS = ("bytes' entropy\", entropy, mean", "bytes' entropy\", 9.0, mean")  # for one step
BREAKS = [
    Breaks(LINES, changes=[ANY_LOSS], argv=("--steps", "1"), alone=[TOLD]),
    Breaks(
        {"a model that does not learn": ("lr=6e-3", "lr=0.0", {LEARNED})}, argv=("--steps", "10")
    ),
    # A loss that no small model reaches in 25 steps: labels that are not shifted end at 0.3.
    Breaks(
        {
            "a loss that is too good": (
                ("    y_BT = x_BT[:, 1:]\n", "    y_BT = x_BT[:, :-1]\n"),
                {"mean of the last losses, and one bit per byte", SUM},
            )
        }
    ),
]
ON_GPUS = OnGpus(
    [
        ("L: int = 16, T: int = 2048", "L: int = 2, T: int = 32"),
        ("torch.randint(32_768, (B", "torch.randint(1024, (B"),
        ("GPT(L, width, T, V=32_768, heads=width // 128)", "GPT(L, 256, T, V=1024, heads=2)"),
        ("repeats: int = 5", "repeats: int = 1"),
    ],
    argv=("--steps", "5"),
    ranks=(1, 2),
)


@pytest.mark.deep
def test_own_text_and_its_entropy(tmp_path: Path) -> None:
    path = tmp_path / "two.txt"
    path.write_text("ab" * 5000)  # entropy ln 2, and wholly predictable
    played = play(LESSON, 2, argv=("--steps", "40", "--data", str(path)))
    row = next(row for row in played.ledger if row["claim"] == LEARNED)
    assert row["predicted"] == pytest.approx(math.log(2), abs=1e-6)
    assert row["verdict"] == "PASS"
    played.expect(set())


def test_a_gpus_peak_is_that_of_its_longest_known_name() -> None:
    peak_of = load(LESSON).peak_of
    assert peak_of("NVIDIA A10G") == 70e12 < peak_of("NVIDIA A10") == 125e12
    assert peak_of("NVIDIA H100 PCIe") == 756e12 < peak_of("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_of("NVIDIA L4") == 121e12 < peak_of("NVIDIA L40S") == 362e12
    assert math.isnan(peak_of("NVIDIA L40"))


def collectives_of_choices() -> dict[str, tuple[int, int]]:
    """All-gathers and reduce-scatters of a step, under each of the choices that are compared."""
    lesson = load(LESSON)
    mesh = init_device_mesh("cpu", (2,))
    counts = {}
    for name, (units, options) in lesson.CHOICES.items():
        model = lesson.shard_model(lesson.new_gpt(mesh), mesh, units, **options)
        with lesson.CountedCommunication() as counted:
            lesson.byte_losses(model, lesson.random_bytes(mesh, 0)).mean().backward()
        counts[name] = (len(counted.calls("all_gather")), len(counted.calls("reduce_scatter")))
    return counts


def test_choices_whose_weights_are_compared_are_what_they_are_called() -> None:
    """All end at the same weights, so weights do not tell one choice from another."""
    due = {"model": (1, 1), "blocks": (9, 5), "linears": (35, 18)}
    due |= {"blocks, kept": (5, 5), "blocks, freed": (10, 5)}
    assert run(collectives_of_choices, 2) == [due, due]


def test_three_steps_are_those_of_plain_sgd() -> None:
    """One process takes them as well, so it does not notice how they are taken."""
    lesson = load(LESSON)
    mesh = SimpleNamespace(device_type="cpu")
    ours, plain = (lesson.new_gpt(mesh, torch.float64) for _ in range(2))
    x_BT = lesson.random_bytes(mesh, 0)
    lesson.take_steps(ours, x_BT)
    weights = list(plain.parameters())
    for _ in range(3):
        loss = F.cross_entropy(plain(x_BT[:, :-1]).transpose(1, 2), x_BT[:, 1:])
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.data -= 0.1 * gradient
    pairs = zip(ours.parameters(), weights, strict=True)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in pairs)


def test_ranks_have_different_batches() -> None:
    """With the same one everywhere, a mean over the ranks could be left out."""
    lesson = load(LESSON)
    mesh = SimpleNamespace(device_type="cpu")
    assert not lesson.random_bytes(mesh, 0).equal(lesson.random_bytes(mesh, 1))


def losses_of_training() -> tuple[list[float], list[float], list[bool]]:
    """What training returns, this rank's own losses, and which steps began with no gradient."""
    lesson = load(LESSON)
    for name in ("learning", "that_ranks_differ", "that_nothing_looks_ahead"):
        setattr(lesson, f"check_{name}", lambda *_, **__: None)
    losses_of = lesson.byte_losses
    own, fresh = [], []

    def byte_losses(model: torch.nn.Module, x_BT: torch.Tensor) -> torch.Tensor:
        fresh.append(all(parameter.grad is None for parameter in model.parameters()))
        losses = losses_of(model, x_BT)
        own.append(losses.mean().item())
        return losses

    lesson.byte_losses = byte_losses
    mesh = init_device_mesh("cpu", (2,))
    return lesson.train(mesh, SimpleNamespace(steps=2, data=lesson.__file__)), own, fresh


def test_losses_are_averaged_and_gradients_begin_anew() -> None:
    (losses, first, fresh), (same, second, also) = run(losses_of_training, 2)
    means = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    assert losses == same == pytest.approx(means, rel=1e-6)
    assert first != second
    assert fresh == also == [True, True]


def test_what_a_step_hands_over_is_told_in_multiples_of_P() -> None:
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 2
    whole = lesson.GPT()
    P = lesson.elements_of(whole)
    handed = {"": 3 * P, "all_gather": 2 * P, "reduce_scatter": P}
    said = []
    lesson.print0, lesson.claim = said.append, Mock()
    counted = SimpleNamespace(calls=lambda _: [], elements=lambda operation="": handed[operation])
    lesson.check_collectives("model", whole, [], counted)
    assert "which is 3.00 P" in said[-1]


def test_the_figure_shows_shares_of_P_over_a_step() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    timelines = {"model": [0, 200, 200], "blocks": [0, 50, 100, 20]}
    with patch.object(figure, "savefig", autospec=True) as saved:
        load(LESSON).draw(timelines, "figure.svg")
    (axes,) = saved.call_args.args[0].axes
    model, blocks = ([*line.get_xdata(), *line.get_ydata()] for line in axes.lines)
    assert model == pytest.approx([0, 1 / 3, 2 / 3, 0, 100, 100])
    assert blocks == pytest.approx([0, 0.25, 0.5, 0.75, 0, 25, 50, 10])
    assert [text.get_text().split()[-1] for text in axes.texts] == ["100%", "50%"]


def test_mfu_counts_products_and_attention_but_no_embedding() -> None:
    """On the meta device, which has all shapes of a GPU's tensors."""
    lesson = load(
        LESSON,
        ('(B, T + 1), device="cuda")', '(B, T + 1), device="meta")'),
        ('with torch.device("cuda"):', 'with torch.device("meta"):'),
    )
    lesson.WORLD_SIZE = 4
    lesson.shard_model = Mock()
    lesson.time_steps = Mock(side_effect=[(1000.0, 9e6), (1000.0, 5e6), (1000.0, 4e6)])
    lesson.peak_of = lambda gpu: 1e10
    said, saved = [], []
    lesson.print0 = said.append
    lesson.claim = lambda text, predicted, measured, *_: saved.append(measured)
    gpu = {"is_bf16_supported": lambda *_: True, "get_device_name": lambda: ""}
    with patch.multiple(torch.cuda, **gpu):
        lesson.check_on_gpus(SimpleNamespace(device_type="cuda"), width=256, L=2, T=64)
    in_blocks = 2 * (12 * 256**2 + 13 * 256)
    flops = 6 * (in_blocks + 2 * 256 + 32_768 * 256) + 12 * 2 * 256 * 64
    mfu = f"{flops * 2 * 64 / 1e10:.1%}"  # two sequences in a second
    assert said[1].split() == ["model", "0.01", "1000.0", "512", mfu]
    assert saved == [4e6 / (2 * in_blocks)]
