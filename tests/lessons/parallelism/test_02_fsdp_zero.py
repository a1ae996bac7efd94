"""ZeRO-1: the paper's table; each claim fails when the line that it guards is broken."""

from unittest.mock import MagicMock, patch

import pytest
import torch
from torch import nn

from course.playing import load
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "parallelism/02_fsdp_zero.py"
TABLE_1 = """\
1    120  120  120  2048 2048 2048 16000 16000 16000
4    52.5 41.3 30   896  704  512  7000  5500  4000
16   35.6 21.6 7.5  608  368  128  4750  2875  1000
64   31.4 16.6 1.88 536  284  32   4187  2218  250
256  30.4 15.4 0.47 518  263  8    4046  2054  62.5
1024 30.1 15.1 0.12 513  257  2    4011  2013  15.6"""  # n; GB in stages 1 2 3 of 7.5B, 128B, 1T


def test_the_formula_gives_the_papers_table_1() -> None:
    """Rajbhandari et al. (2019): 54 cells, some rounded and some truncated."""
    bytes_held = load(LESSON).bytes_held
    cells = 0
    for row in TABLE_1.splitlines():
        n, *printed = row.split()
        for i, cell in enumerate(printed):
            gigabytes = (7.5, 128, 1000)[i // 3] * sum(bytes_held(i % 3 + 1, int(n)))
            assert abs(gigabytes - float(cell)) < 10.0 ** -len(cell.partition(".")[2]), (n, cell)
            cells += 1
    assert cells == 54


def steps_of_clipped_gradients() -> list[list[float]]:
    """How SGD moves two weights whose gradient is 5 long, at other values of `clip`."""
    lesson, moved = load(LESSON), []
    for clip in 2.5, 100.0:
        weight = nn.Parameter(torch.zeros(2))
        zero = lesson.ZeRO1([weight], torch.optim.SGD, clip=clip, lr=1.0)
        weight.grad = torch.tensor([3.0, 4.0])
        zero.step()
        moved.append(weight.tolist())
    return moved


def test_clipping_shortens_a_long_gradient_and_leaves_a_short_one() -> None:
    for shortened, as_it_was in run(steps_of_clipped_gradients, 2):
        assert shortened == pytest.approx([-1.5, -2.0])
        assert as_it_was == [-3.0, -4.0]


# One line of the lesson broken: exactly these claims must FAIL at two ranks

LOW = ("bfloat16", "float32")
ERROR = {stage: f"stage {stage}, float32: error against one process" for stage in (0, 1)}
BOTH = set(ERROR.values())
UNLIKE = {f"stage {stage}, bfloat16: weights unlike their master" for stage in (0, 1)}


def held(*stages: int) -> set[str]:
    return {f"stage {s}, {low}: bytes held per parameter" for s in stages for low in LOW}


def elements(stage: int, *operations: str) -> set[str]:
    return {f"stage {stage}, {low}: {op}, elements / P" for op in operations for low in LOW}


def handed(stage: int) -> set[str]:
    return {f"stage {stage}, {low}: bytes handed over / P" for low in LOW}


LINES = {
    "no broadcast": (
        "        dist.broadcast(dense, group_src=0, group=zero.group)\n",
        "",
        BOTH,
    ),
    "no average": ("self.buffer_N.div_(dist.get_world_size(self.group))", "pass", BOTH),
    "stage 1 shards nothing": (
        "self.shards = dist.get_world_size(group) if sharded else 1",
        "self.shards = 1",
        held(1) | elements(1, "all_reduce", "reduce_scatter", "all_gather") | handed(1),
    ),
    "stage 0 shards as stage 1 does": (
        "dist.get_world_size(group) if sharded else 1",
        "dist.get_world_size(group)",
        held(0) | elements(0, "all_reduce", "reduce_scatter", "all_gather") | handed(0),
    ),
    "a shard off by one": (
        "self.shard_K = self.full_N.tensor_split(shards)[mine]",
        "self.shard_K = self.full_N.tensor_split(shards)[mine - 1]",
        {ERROR[1]},  # in bfloat16 masters and weights are exchanged alike
    ),
    "stage 1 all-reduces": (
        "if self.shards == 1:",
        "if True:",
        elements(1, "all_reduce", "reduce_scatter"),
    ),
    "stage 1 gathers nothing": (
        "gathering.append(bucket.gather())",
        "pass",
        elements(1, "all_gather")
        | handed(1)
        | {ERROR[1], "stage 1, bfloat16: weights unlike their master"},
    ),
    "each rank its own norm": (
        "        dist.all_reduce(square, group=zero.group)\n",
        "        pass\n",
        {ERROR[1]},
    ),
    "gradients that are no views": ("            p.grad = view\n", "", held(0, 1)),
    "float32 gradients stay": (
        "        self.optimizer.zero_grad()\n",
        "",
        {f"stage {s}, bfloat16: bytes held per parameter" for s in (0, 1)},
    ),
    "masters and moments in float64": (
        "torch.promote_types(dtype, master_dtype or dtype)",
        "torch.promote_types(dtype, torch.float64)",
        held(0, 1),
    ),
    "weights never see an update in bfloat16": (
        "                bucket.shard_K.copy_(bucket.master_K)\n",
        "                pass\n",
        UNLIKE,
    ),
    "gradients of the step before stay": ("        self.zero_grad()  #", "        pass  #", BOTH),
    "an unused parameter keeps its old gradient": (
        "            view.zero_()",
        "            pass",
        BOTH,
    ),
    "every parameter counts as used": ("{p: p.grad is not None for p", "{p: True for p", BOTH),
    "the last micro-batch alone": (
        "for half_BD in x_BD.chunk(2):",
        "for half_BD in x_BD.chunk(2)[1:]:",
        BOTH,
    ),
    "DDP forgotten": (
        "    if ddp:\n",
        "    if False:\n",
        {"PyTorch's DDP: error against one process"},
    ),
}

BREAKS = Breaks(LINES, alone=["stage 0 shards as stage 1 does"])

# A CUDA tensor in an object would be unpickled onto its sender's GPU, by every rank.
OBJECTS = "        dist.all_gather_object(by_rank, mine, zero.group)\n"
LOOK = "        assert not any(value.is_cuda for s in mine.values() for value in s.values())\n"
ON_GPUS = OnGpus(
    changes=[(OBJECTS, LOOK + OBJECTS)],
    ranks=(1, 2),  # four ranks are there what two are: no rings, no stages, no mesh
)


@pytest.mark.parametrize(
    ("dtype", "weight", "gradient", "optimizer"),
    [(torch.bfloat16, 2, 2, 12), (torch.float32, 4, 4, 8)],
)
def test_stage_1_shards_the_optimizer_2_the_gradients_too_3_all(
    dtype: torch.dtype, weight: int, gradient: int, optimizer: int
) -> None:
    lesson = load(LESSON)
    assert [lesson.bytes_held(stage, 4, dtype) for stage in range(4)] == [
        [weight, gradient, optimizer],
        [weight, gradient, optimizer / 4],
        [weight, gradient / 4, optimizer / 4],
        [weight / 4, gradient / 4, optimizer / 4],
    ]


def test_the_table_that_is_printed_is_the_papers(capsys: pytest.CaptureFixture) -> None:
    load(LESSON).print_table(7.5)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1] == ["ranks", "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
    assert ["64", "120.00", "31.41", "16.64", "1.88"] in rows


def three_small_steps() -> tuple[list[float], list[float]]:
    """Masters and weights after steps that bfloat16 is too coarse for."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    zero = load(LESSON).ZeRO1([weight], torch.optim.SGD, torch.float32, lr=1e-4)
    for _ in range(3):
        weight.grad = torch.ones_like(weight)
        zero.step()
    return zero.state_dict()["state"][0]["master"].tolist(), weight.tolist()


def test_masters_add_up_what_their_weights_cannot_show() -> None:
    for masters, weights in run(three_small_steps, 2):
        assert masters == pytest.approx([1 - 3e-4] * 4, abs=1e-6)
        assert weights == [1.0] * 4


def elements_of_buckets() -> list[int]:
    weights = [nn.Parameter(torch.zeros(6)) for _ in range(4)]
    zero = load(LESSON).ZeRO1(weights, torch.optim.SGD, numel=12, lr=1.0)
    return [len(bucket.full_N) for bucket in zero.buckets]


def test_a_bucket_holds_about_as_many_elements_as_it_is_told() -> None:
    assert run(elements_of_buckets, 2) == [[12, 12]] * 2


def test_the_figure_shows_the_formula_and_what_was_measured() -> None:
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 4
    panels = [MagicMock() for _ in range(4)]
    with patch("matplotlib.figure.Figure") as figure:
        figure.return_value.subplots.return_value = panels
        lesson.draw({(0, torch.bfloat16): 16.0, (1, torch.bfloat16): 7.0}, "memory.png")
    heights = [panel.stackplot.call_args.args[1] for panel in panels]  # of 1, 2, 4, 8 ... ranks
    assert [each[:, 2].sum().item() for each in heights] == pytest.approx([112, 49, 38.5, 28])
    assert [each[:, 3].sum().item() for each in heights] == pytest.approx([112, 38.5, 26.25, 14])
    points = [panel.plot.call_args.args[:2] for panel in panels[:2]]
    assert points == [(2, 112), (2, 49)]


def moved_by_one_step() -> list[bool]:
    """Which of two layers a step has changed, if rank 0 used the first alone, rank 1 neither."""
    lesson = load(LESSON)
    layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    before = [layer.weight.detach().clone() for layer in layers]
    zero = lesson.ZeRO1(layers.parameters(), torch.optim.Adam, lr=0.1)
    if lesson.dist.get_rank() == 0:
        layers[0](torch.ones(2, 4)).sum().backward()
    zero.step()
    return [not torch.equal(a, layer.weight) for a, layer in zip(before, layers, strict=True)]


def test_what_one_rank_has_used_is_trained_on_all() -> None:
    assert run(moved_by_one_step, 2) == [[True, False]] * 2
