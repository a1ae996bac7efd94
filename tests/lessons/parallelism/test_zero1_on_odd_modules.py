"""ZeRO1 used as a library: it trains odd modules as one process does."""

import copy
import itertools
from collections import defaultdict
from collections.abc import Iterable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from course.playing import load
from course.ranks import run
from tests.helpers.odd_modules import CountingAdam, Moody, Odd, batches

ZERO = "parallelism/02_fsdp_zero.py"
LR = EPS = 0.1
ADAM = {"lr": LR, "eps": EPS}  # the slope of Adam's update in the gradient is at most lr / eps = 1
DECAYED = ADAM | {"weight_decay": 0.5}
TINY = 1e-12  # float64: thousands of roundings of 2**-53


def zero1(params, kind=torch.optim.Adam, **options):
    return load(ZERO).ZeRO1(params, kind, **options)


class InParts:
    """Several ZeRO1 that are used as one: of one dtype each, and of few parameters."""

    def __init__(self, params, kind=torch.optim.Adam, part: int = 3, **options) -> None:
        lesson = load(ZERO)
        by_dtype = defaultdict(list)
        for p in params:
            if p.requires_grad:
                by_dtype[p.dtype].append(p)
        self.zeros = []
        for members in by_dtype.values():
            for start in range(0, len(members), part):
                some = members[start : start + part]
                self.zeros.append(lesson.ZeRO1(some, kind, **options))

    def step(self) -> None:
        for zero in self.zeros:
            zero.step()

    def zero_grad(self) -> None:
        for zero in self.zeros:
            zero.zero_grad()


def distance(model: nn.Module, alone: nn.Module) -> float:
    """Largest difference between the state dicts of two modules, which must look alike."""
    state = model.state_dict()
    expected = alone.state_dict()
    assert state.keys() == expected.keys()
    assert all(state[k].dtype == t.dtype and state[k].shape == t.shape for k, t in expected.items())
    return largest_difference(state.values(), expected.values())


def largest_difference(ours: Iterable, expected: Iterable) -> float:
    pairs = zip(ours, expected, strict=True)
    return torch.cat([(a.double() - b.double()).abs().flatten() for a, b in pairs]).max().item()


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def layers(*widths: int, seed: int = 5) -> nn.Sequential:
    torch.manual_seed(seed)
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairs)).double()


def fill_in(model: nn.Module) -> None:
    """Give a gradient of zero to what is trained and was not used, as ZeRO1 does."""
    for p in model.parameters():
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)


# Any module, any elementwise optimizer


def train(sharded: bool, again: str = "", mixed: bool = False, pieces: int = 2) -> float:
    """Distance of this rank's weights from one process, in three steps."""
    rank = dist.get_rank()
    alone = Odd(0, mixed=mixed)
    model = Odd(rank, again, mixed)
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        if not ours.requires_grad:  # what is frozen stays as it is
            ours.data.copy_(theirs)
    optimizer = torch.optim.AdamW(alone.parameters(), **DECAYED)
    zero = InParts(model.parameters(), torch.optim.AdamW, sharded=sharded, **DECAYED)
    for batch_RB2 in batches(dist.get_world_size()):
        optimizer.zero_grad()
        alone(batch_RB2.flatten(0, 1))["loss"].backward()
        fill_in(alone)
        optimizer.step()
        with torch.no_grad():
            model(batch_RB2[rank])  # evaluation in between leaves no trace
        for piece_B2 in batch_RB2[rank].chunk(pieces):
            (model(piece_B2)["loss"] / pieces).backward()
        zero.step()
    return distance(model, alone)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("sharded", [False, True])
def test_odd_modules_train_as_in_one_process(sharded: bool, n: int) -> None:
    assert max(run(train, n, sharded)) < TINY


def test_mixed_dtypes_and_odd_pieces() -> None:
    assert max(run(train, 2, True, "", True, 1)) < 3 * 1000 * 2**-24
    assert max(run(train, 2, True, "", False, 4)) < TINY


@pytest.mark.parametrize("again", ["reentrant", "not reentrant"])
def test_activation_checkpointing(again: str) -> None:
    assert max(run(train, 2, True, again)) < TINY


def follow(kind: type, widths: tuple, part: int = 3, **defaults: object) -> float:
    """Two steps on plain layers, next to one process."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    alone = layers(*widths)
    model = layers(*widths, seed=rank + 5)
    optimizer = kind(alone.parameters(), **defaults)
    zero = InParts(model.parameters(), kind, part, **defaults)
    for x_RBD in inputs(2, n, 4, widths[0]):
        optimizer.zero_grad()
        zero.zero_grad()
        alone(x_RBD).square().mean().backward()
        model(x_RBD[rank]).square().mean().backward()
        optimizer.step()
        zero.step()
    return distance(model, alone)


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(
    n=st.integers(1, 4),
    widths=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    part=st.sampled_from([1, 3, 100]),
)
def test_any_widths_and_parts(n: int, widths: list, part: int) -> None:
    assert max(run(follow, n, torch.optim.SGD, tuple(widths), part)) < TINY


OTHERS = [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, CountingAdam]


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("kind", OTHERS)
def test_any_elementwise_optimizer(kind: type, n: int) -> None:
    assert max(run(follow, n, kind, (4, 7, 3))) < 1e-6  # eps is small, so a rounding may grow


def fewer_elements_than_ranks() -> float:
    return follow(torch.optim.AdamW, (1, 1), **ADAM)


def test_fewer_elements_than_ranks() -> None:
    assert max(run(fewer_elements_than_ranks, 4)) < TINY


def steps_counted() -> int:
    model = layers(4, 7, 3)
    zero = zero1(model.parameters(), CountingAdam)
    for _ in range(2):
        model(inputs(2, 4)).sum().backward()
        zero.step()
    return zero.optimizer.param_groups[0]["step"]


def test_a_step_is_one_step() -> None:
    assert run(steps_counted, 2) == [2, 2]


def in_groups() -> float:
    """Decay and no decay, a learning rate for each group, a scheduler: a ZeRO1 for each group."""
    rank = dist.get_rank()
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.1)
    alone = layers(4, 7, 3)
    model = layers(4, 7, 3)
    stepped = []
    for dims, lr, decay in ((2, 0.1, 0.5), (1, 0.01, 0.0)):
        options = {"lr": lr, "weight_decay": decay}
        theirs = [p for p in alone.parameters() if p.dim() == dims]
        optimizer = torch.optim.AdamW(theirs, **options)
        ours = [p for p in model.parameters() if p.dim() == dims]
        zero = zero1(ours, torch.optim.AdamW, **options)
        stepped += [optimizer, zero, schedule(optimizer), schedule(zero.optimizer)]
    for x_RBD in inputs(4, dist.get_world_size(), 4, 4):
        alone.zero_grad()
        alone(x_RBD).square().mean().backward()
        model(x_RBD[rank]).square().mean().backward()
        for each in stepped:
            each.step()
    return distance(model, alone)


@pytest.mark.parametrize("n", [2, 3])
def test_parameter_groups_and_schedulers(n: int) -> None:
    assert max(run(in_groups, n)) < 1e-6


def nothing_to_train() -> str:
    with pytest.raises(ValueError, match="must have one dtype") as raised:
        zero1(layers(4, 3).requires_grad_(False).parameters())
    return str(raised.value)


def test_nothing_to_train_is_refused() -> None:
    rule = "trained parameters must have one dtype, got 0: build a ZeRO1 for each"
    assert run(nothing_to_train, 2) == [rule] * 2


# Gradients that are unused, dropped, half made


def moody() -> float:
    """Ranks and steps use different parameters; some gradients are dropped."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    alone = Moody()
    model = Moody()
    optimizer = torch.optim.AdamW(alone.parameters(), **DECAYED)
    zero = InParts(model.parameters(), torch.optim.AdamW, **DECAYED)
    x_RBD = inputs(n, 2, 3)
    for together in (0, 1, 0, 1, 1):  # do ranks differ in this step?
        for step in range(2):
            model(x_RBD[rank], step + 1).backward()
            zero.zero_grad()
            optimizer.zero_grad()
            sum(alone(x_RBD[r], step + together * r) / n for r in range(n)).backward()
            fill_in(alone)
            model(x_RBD[rank], step + together * rank).backward()
            optimizer.step()
            zero.step()
    return distance(model, alone)


@pytest.mark.parametrize("n", [2, 3])
def test_unused_parameters_have_a_gradient_of_zero(n: int) -> None:
    assert max(run(moody, n)) < TINY


def spoilt(kind: str, module_too: bool) -> float:
    """A step that is dropped: its loss was NaN, or backward broke half-way."""
    rank = dist.get_rank()
    alone = layers(4, 7, 3)
    model = layers(4, 7, 3)
    optimizer = torch.optim.Adam(alone.parameters(), **ADAM)
    zero = zero1(model.parameters(), **ADAM)
    x_RBD = inputs(dist.get_world_size(), 4, 4)
    for spoil in (False, True, False):
        if spoil and kind == "NaN":
            (model(x_RBD[rank]) * torch.nan).sum().backward()
        elif spoil:
            hidden = model[0](x_RBD[rank])
            hidden.register_hook(lambda grad: 1 / 0)  # the gradients of model[1] are made already
            with pytest.raises(ZeroDivisionError):
                model[1](hidden).sum().backward()
        else:
            alone(x_RBD).square().mean().backward()
            model(x_RBD[rank]).square().mean().backward()
            optimizer.step()
            zero.step()
        optimizer.zero_grad()
        if module_too:
            model.zero_grad()  # which takes the gradients out of the flat tensor
        zero.zero_grad()
    return distance(model, alone)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("module_too", [False, True])
def test_a_bad_batch_can_be_dropped(module_too: bool, n: int) -> None:
    assert max(run(spoilt, n, "NaN", module_too)) < TINY
    assert max(run(spoilt, n, "error", module_too)) < TINY


def penalized() -> float:
    """Double backward: the loss holds the gradient of another loss."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    model = layers(4, 7, 1)
    alone = layers(4, 7, 1)
    zero = zero1(model.parameters(), torch.optim.SGD, lr=0.1)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)

    def loss_of(module: nn.Module, x_BD: torch.Tensor) -> torch.Tensor:
        x_BD = x_BD.clone().requires_grad_()
        (slope_BD,) = torch.autograd.grad(module(x_BD).tanh().sum(), x_BD, create_graph=True)
        return (slope_BD.norm(dim=1) - 1).square().mean()

    for x_RBD in inputs(2, n, 4, 4):
        optimizer.zero_grad()
        sum(loss_of(alone, x_RBD[r]) / n for r in range(n)).backward()
        loss_of(model, x_RBD[rank]).backward()
        fill_in(alone)
        optimizer.step()
        zero.step()
    return distance(model, alone)


def test_a_gradient_penalty() -> None:
    assert max(run(penalized, 3)) < TINY


# Low precision, checkpoints, memory


def in_bfloat16() -> float:
    """Against one process that rounds where a rank does."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    low = torch.bfloat16
    model = layers(6, 9, 5).to(low)
    alone = copy.deepcopy(model).float()
    zero = zero1(model.parameters(), **ADAM)
    optimizer = torch.optim.Adam(alone.parameters(), **ADAM)
    x_RBD = inputs(3, n, 4, 6).to(low)
    for step_RBD in x_RBD:
        worker = copy.deepcopy(alone).to(low)
        total = [0] * 4
        for x_BD in step_RBD:
            worker.zero_grad()
            worker(x_BD).float().square().mean().backward()
            total = [t + p.grad / n for t, p in zip(total, worker.parameters(), strict=True)]
        for p, t in zip(alone.parameters(), total, strict=True):
            p.grad = t.float()
        optimizer.step()
        model(step_RBD[rank]).float().square().mean().backward()
        zero.step()
    assert distance(model, copy.deepcopy(alone).to(low)) == 0 or n > 2
    masters_N = torch.empty_like(zero.weights_N, dtype=torch.float32)
    dist.all_gather_into_tensor(masters_N, zero.master.detach())
    whole = torch.cat([p.detach().flatten() for p in alone.parameters()])
    return (masters_N[: len(whole)] - whole).abs().max().item()


def test_low_precision_is_one_process_to_the_bit() -> None:
    assert run(in_bfloat16, 1) == [0]
    assert run(in_bfloat16, 2) == [0, 0]  # two numbers have only one sum
    # Three steps; n roundings of 2^-9 in a gradient of at most 4 in size, Adam's slope is 1.
    assert max(run(in_bfloat16, 4)) < 3 * 4 * 2**-9 * 4


def large_gradients() -> float:
    model = nn.Linear(1, 1, bias=False, dtype=torch.float16)
    zero = zero1(model.parameters(), torch.optim.SGD, lr=1.0)
    before = model.weight.item()
    model(torch.full((1, 1), 40_000.0).half()).backward()
    zero.step()
    return model.weight.item() - before


def test_a_mean_that_float16_can_hold_does_not_overflow() -> None:
    """Two gradients of 40,000 have a sum beyond float16's 65,504."""
    assert run(large_gradients, 2) == [pytest.approx(-40_000, rel=1e-3)] * 2


def resumed() -> float:
    """A checkpoint is each rank's master and the state of its optimizer, as the lesson says."""
    x_SBD = inputs(4, 4, 6)[:, dist.get_rank() :].bfloat16()

    def steps(model: nn.Module, zero: object, first: int, last: int) -> None:
        for x_BD in x_SBD[first:last]:
            model(x_BD).float().square().mean().backward()
            zero.step()

    def make() -> tuple:
        model = layers(6, 9, 5).bfloat16()
        return model, zero1(model.parameters(), **ADAM)

    model, zero = make()
    steps(model, zero, 0, 2)
    master_K = zero.master.detach().clone()
    saved = copy.deepcopy(zero.optimizer.state_dict())
    weights = copy.deepcopy(model.state_dict())
    steps(model, zero, 2, 4)

    again, other = make()
    again.load_state_dict(weights)
    other.optimizer.load_state_dict(saved)
    other.master.data.copy_(master_K)
    steps(again, other, 2, 4)
    return distance(again, model)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_training_resumes_to_the_bit_on_as_many_ranks(n: int) -> None:
    assert run(resumed, n) == [0] * n


def bytes_of_state() -> float:
    """Bytes of the optimizer's state per element, as the storages behind it are large."""
    model = layers(20, 30, 10)
    zero = zero1(model.parameters())
    model(inputs(2, 20)).sum().backward()
    zero.step()
    storages = {}
    for state in zero.optimizer.state.values():
        for tensor in (state["exp_avg"], state["exp_avg_sq"]):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values()) / sum(p.numel() for p in model.parameters())


def test_a_rank_holds_its_part_of_the_state() -> None:
    """Two moments of 8 bytes over 3 ranks; the padding adds at most 2 elements."""
    assert sum(run(bytes_of_state, 3)) == pytest.approx(16, rel=0.01)
    assert max(run(bytes_of_state, 3)) == pytest.approx(16 / 3, rel=0.01)
