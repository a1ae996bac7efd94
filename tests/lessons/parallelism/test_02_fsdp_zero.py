"""ZeRO-1: each claim fails when the line that it guards is broken; what ZeRO1 does for a module."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from course.playing import load
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "parallelism/02_fsdp_zero.py"

# One line of the lesson broken: exactly these claims must FAIL at two ranks

DDP = "PyTorch's DDP: error against one process"
ERROR = {stage: f"stage {stage}, float32: error against one process" for stage in (0, 1)}
HELD = {stage: f"stage {stage}, bfloat16: bytes held per parameter" for stage in (0, 1)}
UNLIKE = {stage: f"stage {stage}, bfloat16: weights unlike their master" for stage in (0, 1)}
STEP_FIRST = "step waits: gathers over before layer 0"
LAYERS_FIRST = "layers wait: gathers over before layer 0"
LAYERS_LAST = "layers wait: gathers over before layer 3"
LAYERS_ERROR = "layers wait: error against one process"
SHARDED = {ERROR[1], LAYERS_ERROR}  # what trains in float32 with shards
BOTH = SHARDED | {ERROR[0]}


def elements(stage: int, *operations: str) -> set[str]:
    return {f"stage {stage}, bfloat16: {op}, elements / P" for op in operations}


ALL = ("all_reduce", "reduce_scatter", "all_gather")
REDUCE_SCATTER = "dist.reduce_scatter_tensor(b.gradients_K, b.gradients_N)"
GATHER = "b.gathering = dist.all_gather_into_tensor(b.weights_N, b.weights_K, async_op=True)"
SHARDS = "WORLD_SIZE if sharded else 1"
STAGES = "zero1_step if sharded else data_parallel_step"
LINES = {
    "no broadcast": ("            dist.broadcast(whole, src=0)\n", "", BOTH),
    "no average in stage 0": (
        "        b.gradients_N.div_(WORLD_SIZE)\n        dist.all_reduce(",
        "        dist.all_reduce(",
        {ERROR[0]},
    ),
    "no average in stage 1": (
        f"        b.gradients_N.div_(WORLD_SIZE)\n        {REDUCE_SCATTER}",
        f"        {REDUCE_SCATTER}",
        SHARDED,
    ),
    "stage 0 averages nothing": (
        "        dist.all_reduce(b.gradients_N)\n",
        "",
        {ERROR[0]} | elements(0, "all_reduce"),
    ),
    "stage 1 shards nothing": (
        [(SHARDS, "1"), (STAGES, "data_parallel_step")],
        {HELD[1], LAYERS_FIRST} | elements(1, *ALL),
    ),
    "stage 0 shards as stage 1 does": (
        [(SHARDS, "WORLD_SIZE"), (STAGES, "zero1_step")],
        {HELD[0]} | elements(0, *ALL),
    ),
    "stage 1 all-reduces": (
        REDUCE_SCATTER,
        "dist.all_reduce(b.gradients_N)",
        elements(1, "all_reduce", "reduce_scatter"),
    ),
    "stage 1 gathers nothing": (
        GATHER,
        "pass",
        elements(1, "all_gather") | SHARDED | {LAYERS_FIRST},
    ),
    "gradients that are no views": (
        "                p.grad = view\n",
        "                p.grad = None\n",
        {*HELD.values()},
    ),
    "gradients in higher precision stay": (
        "        self.optimizer.zero_grad()  #",
        "        pass  #",
        {*HELD.values()},
    ),
    "masters and moments in float64": (
        "torch.promote_types(dtype, master_dtype or dtype)",
        "torch.promote_types(dtype, torch.float64)",
        {*HELD.values()},
    ),
    "weights of stage 0 never see an update": (
        "        b.weights_N.copy_(b.master_K)\n",
        "        pass\n",
        {UNLIKE[0]},
    ),
    "weights of stage 1 never see an update": (
        "        b.weights_K.copy_(b.master_K)\n",
        "        pass\n",
        {UNLIKE[1]},
    ),
    "gradients of the step before stay": ("            b.gradients_N.zero_()\n", "", BOTH),
    "the last micro-batch alone": (
        "in x_BD.chunk(micro_batches):",
        "in x_BD.chunk(micro_batches)[-1:]:",
        BOTH,
    ),
    "DDP forgotten": (
        "nn.parallel.DistributedDataParallel(net(0, x_BD.device))",
        "net(0, x_BD.device)",
        {DDP},
    ),
    "the step waits although layers do": (
        "        if not self.units:",
        "        if True:",
        {LAYERS_FIRST},
    ),
    "each layer waits for all": (
        "needed = [b for b in buckets if not parameters.isdisjoint(b.gradient_of)]",
        "needed = buckets",
        {LAYERS_FIRST},
    ),
    "what has arrived is not noted": (
        "            self.gathering.wait()\n            self.gathering = None\n",
        "            self.gathering.wait()\n",
        {STEP_FIRST, LAYERS_FIRST, LAYERS_LAST},
    ),
}

BREAKS = Breaks(LINES, alone=["stage 1 shards nothing", "stage 0 shards as stage 1 does"])
ON_GPUS = OnGpus(ranks=(1, 2))  # four ranks are there what two are: no rings, no stages, no mesh


@pytest.mark.deep
@pytest.mark.parametrize("stage", [0, 1])
def test_the_allocator_tells_what_is_not_sharded_as_it_should_be(stage: int) -> None:
    from tests.helpers.pretended_gpus import play_on_gpus

    changes, failed = LINES[("stage 0 shards as stage 1 does", "stage 1 shards nothing")[stage]]
    played = play_on_gpus(LESSON, 2, *changes)
    played.expect(failed | {f"GPU: bytes allocated per parameter, stage {stage}"})


# What ZeRO1 does for a module (its training: test_zero1_on_odd_modules.py)


def three_small_steps() -> tuple[list[float], list[float]]:
    """This rank's masters, and all weights, after steps that bfloat16 is too coarse for."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    zero = load(LESSON).ZeRO1([weight], torch.optim.SGD, torch.float32, lr=1e-4)
    for _ in range(3):
        weight.grad = torch.ones_like(weight)
        zero.step()
    return zero.buckets[0].master_K.tolist(), weight.tolist()


def test_masters_add_up_what_their_weights_cannot_show() -> None:
    for masters, weights in run(three_small_steps, 2):
        assert masters == pytest.approx([1 - 3e-4] * 2, abs=1e-6)
        assert weights == [1.0] * 4


def elements_of_buckets() -> list[int]:
    weights = [nn.Parameter(torch.zeros(6)) for _ in range(4)]
    zero = load(LESSON).ZeRO1(weights, torch.optim.SGD, numel=12, lr=1.0)
    return [len(b.weights_N) for b in zero.buckets]


def test_a_bucket_holds_about_as_many_elements_as_it_is_told() -> None:
    assert run(elements_of_buckets, 2) == [[12, 12]] * 2


def moved_by_one_step() -> list[bool]:
    """Which of two layers a step has changed, if rank 0 used the first alone, rank 1 neither."""
    lesson = load(LESSON)
    layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    zero = lesson.ZeRO1(layers.parameters(), torch.optim.Adam, lr=0.1)
    before = [layer.weight.detach().clone() for layer in layers]
    if lesson.RANK == 0:
        layers[0](torch.ones(2, 4)).sum().backward()
    zero.step()
    return [not torch.equal(a, layer.weight) for a, layer in zip(before, layers, strict=True)]


def test_what_one_rank_has_used_is_trained_on_all() -> None:
    assert run(moved_by_one_step, 2) == [[True, False]] * 2


def waits_of_units() -> tuple[list[str], list[str], int]:
    """What each of two units waits for before its forward, and `wait`; how many a step leaves."""
    lesson = load(LESSON)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    zero = lesson.ZeRO1(model.parameters(), torch.optim.SGD, numel=9, units=model, lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    zero.step()
    under_way = sum(b.gathering is not None for b in zero.buckets)
    zero.wait()
    waited = []
    for name, b in zip(("first", "second"), zero.buckets, strict=True):
        b.gathering = SimpleNamespace(wait=lambda name=name: waited.append(name))
    model[1](torch.ones(2, 3))
    by_unit = list(waited)
    zero.wait()
    return by_unit, waited, under_way


def test_a_unit_waits_for_its_own_weights_and_wait_for_the_rest() -> None:
    assert run(waits_of_units, 2) == [(["second"], ["second", "first"], 2)] * 2


def units_that_leave_a_layer_out() -> str:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(ValueError, match="units must hold") as raised:
        load(LESSON).ZeRO1(model.parameters(), torch.optim.SGD, units=[model[0]], lr=0.1)
    return str(raised.value)


def test_units_must_hold_all_that_is_trained() -> None:
    rule = "units must hold every trained parameter, got fewer: add their modules"
    assert run(units_that_leave_a_layer_out, 1) == [rule]
