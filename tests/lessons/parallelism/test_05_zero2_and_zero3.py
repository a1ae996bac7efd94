"""ZeRO-2 and ZeRO-3: each claim fails when the line that it guards is broken."""

import copy
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course.playing import load, play
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "parallelism/05_zero2_and_zero3.py"

# One line of the lesson broken: exactly these claims must FAIL at two ranks

ERROR = {stage: f"stage {stage}, float32: error against one process" for stage in (2, 3)}
HELD = {stage: f"stage {stage}, bfloat16: bytes held per parameter" for stage in (2, 3)}
FIRST = {stage: f"stage {stage}, bfloat16: gathered in the 1st pass / P" for stage in (2, 3)}
SECOND = {stage: f"stage {stage}, bfloat16: gathered in the 2nd pass / P" for stage in (2, 3)}
PASSES = ("1st", "2nd")
REDUCED = {f"stage {s}, bfloat16: reduced in the {n} pass / P" for s in (2, 3) for n in PASSES}
WHOLE = "stage 3, bfloat16: units whole at once"
ORDER = "stage 3, bfloat16: gathers in the order 0123 3210"
EARLY = "stage 3, bfloat16: gathers next to a whole unit"
MOST_OF_4 = "4 units: most bytes per parameter, less stage 1's"
MOST_OF_1 = "1 unit: most bytes per parameter, less stage 1's"
PYTORCH = "PyTorch: gradients, distance to ours"
PYTORCH_GATHERED = "PyTorch: bytes gathered in a pass, as ours"
PYTORCH_REDUCED = "PyTorch: bytes reduced in a pass, as ours"

LINES = {
    "no average": (
        "self.grad_N = grad_N.div_(WORLD_SIZE)",
        "self.grad_N = grad_N",
        {*ERROR.values(), PYTORCH},
    ),
    "a shard off by one": (
        "flat_N.chunk(WORLD_SIZE)[RANK].clone()",
        "flat_N.chunk(WORLD_SIZE)[RANK - 1].clone()",
        {*ERROR.values(), PYTORCH},
    ),
    "an all-reduce where a reduce-scatter would do": (
        "dist.reduce_scatter_tensor(self.mine_K, self.grad_N, async_op=True)",
        "dist.all_reduce(self.grad_N, async_op=True)",
        REDUCED | {PYTORCH_REDUCED},
    ),
    "gradients travel in float32": (
        "self.grad_N = grad_N.div_(WORLD_SIZE)",
        "self.grad_N = grad_N.float().div_(WORLD_SIZE)",
        REDUCED | {MOST_OF_4},
    ),
    "gradients stay whole": (
        "        self.grad_N.untyped_storage().resize_(0)",
        "        self.unit.kept = self.grad_N",
        {*HELD.values(), MOST_OF_4, MOST_OF_1},
    ),
    "each micro-batch overwrites the one before (Try)": (
        "shard_K.grad += self.mine_K",
        "shard_K.grad.copy_(self.mine_K)",
        {*ERROR.values()},
    ),
    "a reduction is waited for at once": (
        "stay_under_way = 1 if k > 0 else 0",
        "stay_under_way = 0",
        {MOST_OF_4},
    ),
    "masters in low precision": (
        "[RANK].clone())",
        "[RANK].to(dtype, copy=True))",
        {*HELD.values(), MOST_OF_4, MOST_OF_1},
    ),
    "the modules keep their own parameters": (
        '        module.to("meta")',
        "        pass",
        {*HELD.values(), MOST_OF_4, MOST_OF_1},
    ),
    "stage 2 gathers once and for all": (
        "        for unit in self.units:\n            unit.free()\n",
        "        pass\n",
        {FIRST[2], ERROR[2]},
    ),
    "stage 2 gathers in each pass": (
        "if self.stage == 3:",
        "if True:",
        {HELD[2], FIRST[2], SECOND[2]},
    ),
    "stage 3 keeps whole weights": (
        "if self.stage == 3:",
        "if False:",
        {HELD[3], FIRST[3], SECOND[3], WHOLE, ORDER, EARLY, MOST_OF_4, PYTORCH_GATHERED},
    ),
    "stage 3 frees after backward only": (
        "            self.release(k)\n            if x.requires_grad:",
        "            if x.requires_grad:",
        {FIRST[3], SECOND[3], WHOLE, ORDER, EARLY, MOST_OF_4, PYTORCH_GATHERED},
    ),
    "stage 3 frees after forward only": (
        "        self.release(k)\n        self.reducing",
        "        self.reducing",
        {HELD[3], SECOND[3], WHOLE, ORDER, EARLY, MOST_OF_4},
    ),
    "stage 3 prefetches nothing (Try)": (
        "if self.prefetch and 0 <= following",
        "if False and 0 <= following",
        {WHOLE, EARLY, MOST_OF_4},
    ),
    "stage 3 prefetches nothing in forward": (
        "self.make_whole(k, following=k + 1)",
        "self.make_whole(k, following=-1)",
        {EARLY},
    ),
    "stage 3 prefetches nothing in backward": (
        "self.make_whole(k, following=k - 1)",
        "self.make_whole(k, following=-1)",
        {EARLY, MOST_OF_4},
    ),
    "stage 3 prefetches the wrong neighbor": (
        "self.make_whole(k, following=k - 1)",
        "self.make_whole(k, following=k + 1)",
        {HELD[3], FIRST[3], WHOLE, ORDER, EARLY, MOST_OF_4, PYTORCH_GATHERED},
    ),
    "PyTorch's units stay whole after forward": (
        "fully_shard(unit, mesh=mesh)",
        "fully_shard(unit, mesh=mesh, reshard_after_forward=False)",
        {PYTORCH_GATHERED},
    ),
}

BREAKS = Breaks(LINES)

ON_GPUS = OnGpus(
    changes=[
        ("torch.randn(8192, 8192,", "torch.randn(64, 2048,"),
        ("nn.Linear(8192, 8192, bias=False, device", "nn.Linear(2048, 2048, bias=False, device"),
    ],
    ranks=(1, 2),  # four ranks are there what two are: no rings, no stages, no mesh
)


@pytest.mark.deep
def test_it_holds_on_8_ranks() -> None:
    play(LESSON, 8, deadline=200).expect(set())


class Scale(nn.Module):
    """A scalar, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def train_odd(stage: int) -> float:
    """How far three steps are from one process; no unit's elements divide by 2, 3 or 4 ranks."""
    lesson = load(LESSON)
    rank = dist.get_rank()
    n = dist.get_world_size()
    torch.manual_seed(0)
    units = [nn.Linear(3, 5), nn.Sequential(nn.Tanh(), nn.Linear(5, 7, bias=False)), Scale()]
    units = [unit.double() for unit in [*units, nn.Linear(7, 2)]]
    alone = nn.Sequential(*copy.deepcopy(units))
    model = lesson.ZeRO(units, stage, torch.float64)
    optimizers = [torch.optim.Adam(part.parameters(), lr=0.1, eps=0.1) for part in (alone, model)]
    for x_RB3 in torch.randn(3, n, 4, 3, dtype=torch.float64):
        for optimizer in optimizers:
            optimizer.zero_grad()
        alone(x_RB3.flatten(0, 1)).square().mean().backward()
        with torch.no_grad():
            model(x_RB3[rank])  # evaluation in between leaves no trace
        for piece_B3 in x_RB3[rank].chunk(2):
            (model(piece_B3).square().mean() / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.free()
    errors = []
    for unit, module in zip(model.units, alone, strict=True):
        whole_N = unit.shard_K.new_empty(n * len(unit.shard_K))
        dist.all_gather_into_tensor(whole_N, unit.shard_K.detach())
        expected = torch.cat([p.detach().flatten() for p in module.parameters()])
        padding = whole_N[len(expected) :]
        errors += [(whole_N[: len(expected)] - expected).abs().max(), *padding.abs()]
    return max(errors).item()


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [2, 3])
def test_padded_units_train_as_in_one_process(stage: int, n: int) -> None:
    assert max(run(train_odd, n, stage)) < 1e-13  # some hundred roundings of 2**-53


def reductions_under_way() -> tuple[int, int]:
    """Of a pass through four units: the most at a time, and those left at the end."""
    lesson = load(LESSON)
    under_way = [0]

    class Counted(lesson.Reduction):
        def __init__(self, *given: object) -> None:
            under_way.append(under_way[-1] + 1)
            super().__init__(*given)

        def land(self) -> None:
            under_way.append(under_way[-1] - 1)
            super().land()

    lesson.Reduction = Counted
    cpu = torch.device("cpu")
    model = lesson.ZeRO(lesson.network(cpu))
    lesson.loss_of(model, torch.randn(2, lesson.D)).backward()
    return max(under_way), under_way[-1]


def test_a_reduction_lands_when_the_next_one_has_started() -> None:
    assert run(reductions_under_way, 2) == [(2, 0)] * 2


class Chain:
    """Stands for ZeRO where nothing is computed."""

    def __init__(self, layers: list, dtype: torch.dtype) -> None:
        self.weight = nn.Parameter(torch.ones(1))

    def parameters(self) -> list[nn.Parameter]:
        return [self.weight]

    def free(self) -> None:
        pass


MADE_UP = {  # ms of a pass without gathers, of one that waits for them, of one that prefetches
    "hides half": ((10.0, 20.0, 14.9), "PASS"),
    "hides less": ((10.0, 20.0, 15.1), "FAIL"),
    "hides nothing": ((10.0, 20.0, 20.0), "FAIL"),
    "nothing to hide": ((10.0, 9.9, 9.0), "FAIL"),
}


@pytest.mark.parametrize("case", MADE_UP)
def test_prefetching_must_hide_half_of_what_waiting_exposes(case: str) -> None:
    """The first two rounds warm up."""
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 2
    lesson.ZeRO = Chain
    lesson.loss_of = lambda model, x_BD: model.weight.sum()
    passes, verdict = MADE_UP[case]
    ms = iter([99.0, 1.0, 50.0] * 2 + [*passes] * 5)
    lesson.ms_of_pass = lambda *given: next(ms)
    with patch.object(torch.cuda, "is_bf16_supported", return_value=True):
        lesson.measure_on_gpus(torch.device("meta"))
    *_, row = lesson.ledger
    assert row["verdict"] == verdict
    assert row["timed"]
