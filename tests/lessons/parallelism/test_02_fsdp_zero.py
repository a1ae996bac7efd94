"""ZeRO-1: each claim fails when the line that it guards is broken; what ZeRO1 does for a module."""

import math

import pytest
import torch
from torch import nn

from course.playing import load
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "parallelism/02_fsdp_zero.py"

# One line of the lesson broken: exactly these claims must FAIL at two ranks

DDP = "PyTorch's DDP: error against one process"
WAYS = ("data parallelism", "ZeRO-1")  # by stage: 0 and 1
ERROR = [f"{way}: error against one process" for way in WAYS]
HELD = [f"{way}: bytes held after backward" for way in WAYS]
MOST = [f"{way}: bytes held in optimizer.step" for way in WAYS]
ELEMENTS = [f"{way}: elements per parameter and step" for way in WAYS]
BYTES_ON_GPUS = ("GPU, {}: bytes after backward", "GPU, {}: bytes in optimizer.step")

AVERAGE = "    gradients_N /= WORLD_SIZE\n"
ALL_REDUCE = "    dist.all_reduce(gradients_N)\n"
REDUCE_SCATTER = "    dist.reduce_scatter_tensor(gradients_K, gradients_N)"
MINE = "own_shard(self.weights_N) if sharded else self.weights_N"
STEP = "zero1_step if sharded else data_parallel_step"
LINES = {
    "no broadcast": ("        dist.broadcast(self.weights_N, src=0)\n", "", {*ERROR}),
    "no average in data parallelism": (AVERAGE + ALL_REDUCE, ALL_REDUCE, {ERROR[0]}),
    "no average in ZeRO-1": (AVERAGE + REDUCE_SCATTER, REDUCE_SCATTER, {ERROR[1]}),
    "data parallelism reduces nothing": (ALL_REDUCE, "", {ERROR[0], ELEMENTS[0]}),
    "ZeRO-1 shards nothing": (
        [(MINE, "self.weights_N"), (STEP, "data_parallel_step")],
        {HELD[1], MOST[1]},
    ),
    "data parallelism shards as ZeRO-1 does": (
        [(MINE, "own_shard(self.weights_N)"), (STEP, "zero1_step")],
        {HELD[0], MOST[0]},
    ),
    "ZeRO-1 all-reduces (Try)": (REDUCE_SCATTER, ALL_REDUCE.rstrip(), {ELEMENTS[1]}),
    "ZeRO-1 gathers nothing": (
        "    dist.all_gather_into_tensor(weights_N, weights_K)",
        "    pass",
        {ERROR[1], ELEMENTS[1]},
    ),
    "gradients in higher precision stay": (
        "        self.optimizer.zero_grad()  #",
        "        pass  #",
        {*HELD},
    ),
    "masters and moments in float64": (
        "torch.promote_types(mine.dtype, torch.float32)",
        "torch.float64",
        {*HELD, *MOST},
    ),
    "weights of data parallelism never see an update": (
        "    weights_N.copy_(master_N)\n",
        "    pass\n",
        {ERROR[0]},
    ),
    "weights of ZeRO-1 never see an update (Try)": (
        "    weights_K.copy_(master_K)\n",
        "    pass\n",
        {ERROR[1]},
    ),
    "gradients of the step before stay": ("        self.gradients_N.zero_()\n", "", {*ERROR}),
    "the last micro-batch alone": (
        "in x_BD.chunk(micro_batches):",
        "in x_BD.chunk(micro_batches)[-1:]:",
        {*ERROR},
    ),
    "DDP forgotten": (
        "nn.parallel.DistributedDataParallel(mlp(0, device).double())",
        "mlp(0, device).double()",
        {DDP},
    ),
}

WRONGLY = ["data parallelism shards as ZeRO-1 does", "ZeRO-1 shards nothing"]
BREAKS = Breaks(LINES, alone=WRONGLY)
ON_GPUS = OnGpus(ranks=(1, 2))  # four ranks are there what two are: no rings, no stages, no mesh


@pytest.mark.deep
@pytest.mark.parametrize("stage", [0, 1])
def test_the_allocator_tells_what_is_not_sharded_as_it_should_be(stage: int) -> None:
    from tests.helpers.pretended_gpus import play_on_gpus

    changes, failed = LINES[WRONGLY[stage]]
    played = play_on_gpus(LESSON, 2, *changes)
    played.expect(failed | {text.format(WAYS[stage]) for text in BYTES_ON_GPUS})


# What ZeRO1 does for a module (its training: test_zero1_on_odd_modules.py)


def three_small_steps() -> tuple[list[float], list[float]]:
    """This rank's masters, and all weights, after steps that bfloat16 is too coarse for."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    zero = load(LESSON).ZeRO1([weight], torch.optim.SGD, lr=1e-4)
    for _ in range(3):
        weight.grad.fill_(1)
        zero.step()
    return zero.master.tolist(), weight.tolist()


def test_masters_add_up_what_their_weights_cannot_show() -> None:
    for masters, weights in run(three_small_steps, 2):
        assert masters == pytest.approx([1 - 3e-4] * 2, abs=1e-6)
        assert weights == [1.0] * 4


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


# What is refused


def of_two_dtypes() -> str:
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).double())]
    with pytest.raises(ValueError, match="one dtype") as raised:
        load(LESSON).ZeRO1(params, torch.optim.SGD, lr=0.1)
    return str(raised.value)


def test_parameters_of_two_dtypes_are_refused() -> None:
    rule = "trained parameters must have one dtype, got 2: build a ZeRO1 for each"
    assert run(of_two_dtypes, 1) == [rule]


def without_values(layer: nn.Module) -> str:
    with pytest.raises(ValueError, match="have values") as raised:
        load(LESSON).ZeRO1(layer.parameters(), torch.optim.SGD, lr=0.1)
    return str(raised.value)


@pytest.mark.parametrize("layer", [nn.LazyLinear(2), nn.Linear(3, 2, device="meta")], ids=type)
def test_parameters_without_values_are_refused(layer: nn.Module) -> None:
    rule = "parameters must have values, got none: load weights first"
    assert run(without_values, 2, layer) == [rule] * 2


def replaced() -> str:
    """The module's own zero_grad drops the gradients that lie in the flat tensor."""
    layer = nn.Linear(3, 3)
    zero = load(LESSON).ZeRO1(layer.parameters(), torch.optim.SGD, lr=0.1)
    layer.zero_grad()
    layer(torch.ones(2, 3)).sum().backward()
    with pytest.raises(ValueError, match="must stay in place") as raised:
        zero.step()
    return str(raised.value)


def test_gradients_that_lie_elsewhere_are_refused() -> None:
    rule = "gradients must stay in place, got others: use ZeRO1.zero_grad"
    assert run(replaced, 1) == [rule]


def test_a_difference_that_is_no_number_is_not_lost() -> None:
    """Python's `max` keeps a number that comes before a NaN."""
    model = nn.Linear(2, 2)
    oracle = nn.Linear(2, 2)
    nn.init.constant_(model.bias, math.nan)  # the second of its parameters
    assert math.isnan(load(LESSON).error_of(model, oracle))
