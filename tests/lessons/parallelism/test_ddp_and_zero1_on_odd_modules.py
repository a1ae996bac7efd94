"""BucketedDDP and ZeRO1 used as libraries: they train odd modules as one process does."""

import copy
import itertools
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from course.playing import changed, load
from course.ranks import attempt, run
from tests.helpers.odd_modules import CountingAdam, Moody, Odd, batches

ZERO = "parallelism/02_fsdp_zero.py"
DDP = "parallelism/04_buckets_and_overlap.py"
LR = EPS = 0.1
ADAM = {"lr": LR, "eps": EPS}  # the slope of Adam's update in the gradient is at most lr / eps = 1
TINY = 1e-12  # float64: thousands of roundings of 2**-53


def zero1(params, kind=torch.optim.Adam, changes=(), **options):
    """A ZeRO1 with small buckets."""
    return load(ZERO, *changes).ZeRO1(params, kind, **({"numel": 40} | options))


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


# ZeRO1: any module, any elementwise optimizer


def train(
    sharded: bool, again: str = "", mixed: bool = False, pieces: int = 2, changes: tuple = ()
) -> float:
    """Distance of this rank's weights and norms from one process, in three clipped steps."""
    rank = dist.get_rank()
    alone = Odd(0, mixed=mixed)
    model = Odd(rank, again, mixed)
    optimizer = torch.optim.AdamW(alone.parameters(), **ADAM)
    kind = torch.optim.AdamW
    zero = zero1(model.parameters(), kind, changes, clip=0.3, sharded=sharded, **ADAM)
    far = 0.0
    for batch_RB2 in batches(dist.get_world_size()):
        optimizer.zero_grad()
        alone(batch_RB2.flatten(0, 1))["loss"].backward()
        norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.3)
        optimizer.step()
        with torch.no_grad():
            model(batch_RB2[rank])  # evaluation in between leaves no trace
        for piece_B2 in batch_RB2[rank].chunk(pieces):
            (model(piece_B2)["loss"] / pieces).backward()
        far = max(far, abs(zero.step() - norm).item())
    return max(far, distance(model, alone))


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


def follow(
    kind: type, widths: tuple, numel: int = 20, changes: tuple = (), **defaults: object
) -> float:
    """Two steps on plain layers, next to one process."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    alone = layers(*widths)
    model = layers(*widths, seed=rank + 5)
    optimizer = kind(alone.parameters(), **defaults)
    zero = zero1(model.parameters(), kind, changes, numel=numel, **defaults)
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
    numel=st.sampled_from([1, 20, 1000]),
)
def test_any_widths_and_buckets(n: int, widths: list, numel: int) -> None:
    assert max(run(follow, n, torch.optim.SGD, tuple(widths), numel)) < TINY


OTHERS = [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, CountingAdam]


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("kind", OTHERS)
def test_any_elementwise_optimizer(kind: type, n: int) -> None:
    assert max(run(follow, n, kind, (4, 7, 3))) < 1e-6  # eps is small, so a rounding may grow


def hooks_called() -> list[int]:
    """How often hooks of both optimizers and the count in the group say that there was a step."""
    model = layers(4, 7, 3)
    zero = zero1(model.parameters(), CountingAdam)
    called = []
    zero.register_step_post_hook(lambda *arguments: called.append("outer"))
    zero.optimizer.register_step_post_hook(lambda *arguments: called.append("inner"))
    for _ in range(2):
        model(inputs(2, 4)).sum().backward()
        zero.step()
    return [called.count("outer"), called.count("inner"), zero.param_groups[0]["step"]]


def test_a_step_is_one_step() -> None:
    assert run(hooks_called, 2) == [[2, 2, 2]] * 2


def in_groups(schedule: type, options: dict, changes: tuple = ()) -> float:
    """Decay and no decay, a learning rate for each group, a scheduler, parameters with names."""
    rank = dist.get_rank()

    def optimizer_of(model: nn.Module, make):
        named = [(name, p) for name, p in model.named_parameters()]
        decay = [(name, p) for name, p in named if p.dim() > 1]
        rest = [(name, p) for name, p in named if p.dim() == 1]
        groups = [{"params": decay, "weight_decay": 0.5}, {"params": rest, "lr": 0.01}]
        optimizer = make(groups, lr=0.1, weight_decay=0.0)
        return optimizer, schedule(optimizer, **options)

    alone = layers(4, 7, 3)
    model = layers(4, 7, 3)
    optimizer, scheduler = optimizer_of(alone, torch.optim.AdamW)
    make = partial(zero1, kind=torch.optim.AdamW, changes=changes)
    zero, zero_scheduler = optimizer_of(model, make)
    for x_RBD in inputs(4, dist.get_world_size(), 4, 4):
        alone(x_RBD).square().mean().backward()
        model(x_RBD[rank]).square().mean().backward()
        for each in (optimizer, scheduler, zero, zero_scheduler):
            each.step()
        optimizer.zero_grad()
        zero.zero_grad()
    same = zero.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    return distance(model, alone) if same else float("inf")


@pytest.mark.parametrize("n", [2, 3])
def test_parameter_groups_and_schedulers(n: int) -> None:
    step = {"step_size": 2, "gamma": 0.1}
    assert max(run(in_groups, n, torch.optim.lr_scheduler.StepLR, step)) < 1e-6
    one_cycle = {"max_lr": [0.1, 0.05], "total_steps": 10}
    assert max(run(in_groups, n, torch.optim.lr_scheduler.OneCycleLR, one_cycle)) < 1e-6


# ZeRO1: gradients that are unused, dropped, half made


def moody(which: str, changes: tuple = ()) -> float:
    """Ranks and steps use different parameters; AdamW decays what has a gradient of zero."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    alone = Moody()
    model = Moody()
    optimizer = torch.optim.AdamW(alone.parameters(), weight_decay=0.5, **ADAM)
    if which == "ZeRO1":
        wrapped = model
        ours = zero1(model.parameters(), torch.optim.AdamW, changes, weight_decay=0.5, **ADAM)
    else:
        wrapped = load(DDP).BucketedDDP(model, 1e-6, find_unused=True)
        ours = torch.optim.AdamW(model.parameters(), weight_decay=0.5, **ADAM)
    x_RBD = inputs(n, 2, 3)
    for together in (0, 1, 0, 1, 1):  # do ranks differ in this step?
        for step in range(2):
            optimizer.zero_grad()
            ours.zero_grad()
            sum(alone(x_RBD[r], step + together * r) / n for r in range(n)).backward()
            wrapped(x_RBD[rank], step + together * rank).backward()
            optimizer.step()
            ours.step()
    return distance(model, alone)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("which", ["ZeRO1", "BucketedDDP"])
def test_unused_parameters_are_passed_over(which: str, n: int) -> None:
    assert max(run(moody, n, which)) < TINY


def spoilt(kind: str, zero_grad: str) -> float:
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
        if zero_grad == "module":
            model.zero_grad()
        else:
            zero.zero_grad(set_to_none=zero_grad == "none")
    return distance(model, alone)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("zero_grad", ["module", "none", "zeros"])
def test_a_bad_batch_can_be_dropped(zero_grad: str, n: int) -> None:
    assert max(run(spoilt, n, "NaN", zero_grad)) < TINY
    assert max(run(spoilt, n, "error", zero_grad)) < TINY


def penalised(which: str) -> float:
    """Double backward: the loss holds the gradient of another loss."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    model = layers(4, 7, 1)
    alone = layers(4, 7, 1)
    if which == "ZeRO1":
        ours = zero1(model.parameters(), torch.optim.SGD, lr=0.1)
        wrapped = model
    else:
        ours = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = load(DDP).BucketedDDP(model, 1e-4)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)

    def loss_of(module: nn.Module, x_BD: torch.Tensor) -> torch.Tensor:
        x_BD = x_BD.clone().requires_grad_()
        (slope_BD,) = torch.autograd.grad(module(x_BD).tanh().sum(), x_BD, create_graph=True)
        return (slope_BD.norm(dim=1) - 1).square().mean()

    for x_RBD in inputs(2, n, 4, 4):
        optimizer.zero_grad()
        ours.zero_grad()
        sum(loss_of(alone, x_RBD[r]) / n for r in range(n)).backward()
        loss_of(wrapped, x_RBD[rank]).backward(create_graph=which == "ZeRO1")
        optimizer.step()
        ours.step()
    return distance(model, alone)


@pytest.mark.filterwarnings("ignore:Using backward. with create_graph")
@pytest.mark.parametrize("which", ["ZeRO1", "BucketedDDP"])
def test_a_gradient_penalty(which: str) -> None:
    assert max(run(penalised, 3, which)) < TINY


# ZeRO1: low precision, loaded weights, checkpoints


def in_bfloat16(clip: float | None) -> float:
    """Against one process that rounds where a rank does."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    low = torch.bfloat16
    model = layers(6, 9, 5).to(low)
    alone = copy.deepcopy(model).float()
    zero = zero1(model.parameters(), master_dtype=torch.float32, clip=clip, **ADAM)
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
        if clip:
            nn.utils.clip_grad_norm_(alone.parameters(), clip)
        optimizer.step()
        model(step_RBD[rank]).float().square().mean().backward()
        zero.step()
    assert distance(model, copy.deepcopy(alone).to(low)) == 0 or n > 2 or clip
    masters = [state["master"] for state in zero.state_dict()["state"].values()]
    return largest_difference(masters, alone.parameters())


def test_low_precision_is_one_process_to_the_bit() -> None:
    assert run(in_bfloat16, 1, None) == [0]
    assert run(in_bfloat16, 2, None) == [0, 0]  # two numbers have only one sum
    # Three steps; n roundings of 2^-9 in a gradient of at most 4 in size, Adam's slope is 1.
    assert max(run(in_bfloat16, 4, None)) < 3 * 4 * 2**-9 * 4
    assert max(run(in_bfloat16, 2, 0.1)) < 1e-6


def large_gradients() -> float:
    model = nn.Linear(1, 1, bias=False, dtype=torch.float16)
    zero = zero1(model.parameters(), torch.optim.SGD, master_dtype=torch.float32, lr=1.0)
    before = model.weight.item()
    model(torch.full((1, 1), 40_000.0).half()).backward()
    zero.step()
    return model.weight.item() - before


def test_a_mean_that_float16_can_hold_does_not_overflow() -> None:
    """Two gradients of 40,000 have a sum beyond float16's 65,504."""
    assert run(large_gradients, 2) == [pytest.approx(-40_000, rel=1e-3)] * 2


def loaded(changes: tuple = ()) -> float:
    """A step from loaded weights, by a ZeRO1 that has trained others and by one that has not."""
    x_BD = inputs(dist.get_world_size(), 4, 6)[dist.get_rank()].bfloat16()
    ends = []
    for before in (0, 2):
        model = layers(6, 9, 5).bfloat16()
        options = {"master_dtype": torch.float32, "lr": 0.1}
        zero = zero1(model.parameters(), torch.optim.SGD, changes, **options)
        for step in range(before + 1):
            if step == before:
                model.load_state_dict(layers(6, 9, 5, seed=7).bfloat16().state_dict())
            model(x_BD).float().square().mean().backward()
            zero.step()
        ends.append(model)
    return distance(*ends)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_loaded_weights_are_not_undone_by_the_next_step(n: int) -> None:
    assert run(loaded, n) == [0] * n


def adamw_in_groups(model: nn.Module, make):
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.5}, {"params": rest, "lr": 0.01}]
    return make(groups, lr=0.1, eps=EPS, weight_decay=0.0, amsgrad=True)


def net(dtype: torch.dtype) -> nn.Module:
    model = layers(4, 7, 3)
    model.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))  # as its step, a number
    model.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    return model.to(dtype)


def steps(model: nn.Module, optimizer, first: int, last: int) -> None:
    """Steps on 12 samples each, shared out to the ranks there are."""
    for x_BD in inputs(4, 12, 4)[first:last]:
        mine = x_BD.chunk(dist.get_world_size())[dist.get_rank()].to(model.scale.dtype)
        (model[1](model[0](mine)).double() * model.scale).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def make_zero(model: nn.Module):
    make = partial(zero1, kind=torch.optim.AdamW, master_dtype=torch.float32)
    return adamw_in_groups(model, make)


def without_zero(model: nn.Module):
    return adamw_in_groups(model, torch.optim.AdamW)


def save(path: Path, dtype: torch.dtype, make) -> None:
    """Two steps, then a checkpoint from rank 0."""
    model = net(dtype)
    optimizer = make(model)
    steps(model, optimizer, 0, 2)
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if dist.get_rank() == 0:
        torch.save(checkpoint, path)


def resume(path: Path, dtype: torch.dtype, make, optimizer_first: bool) -> float:
    """Two steps from the checkpoint; their distance from four steps that were not interrupted."""
    model = net(dtype)
    optimizer = make(model)
    saved = torch.load(path, weights_only=True)
    if optimizer_first:
        optimizer.load_state_dict(saved["optimizer"])
    model.load_state_dict(saved["model"])
    if not optimizer_first:
        optimizer.load_state_dict(saved["optimizer"])
    steps(model, optimizer, 2, 4)
    whole = net(dtype)
    steps(whole, make(whole), 0, 4)
    return distance(model, whole)


@pytest.mark.parametrize(
    ("before", "after"), [(2, 2), (3, 3), (1, 3), (2, 3), (3, 2), (3, 1), (2, 4)]
)
def test_training_resumes_on_as_many_ranks_and_on_others(tmp_path, before, after) -> None:
    path = tmp_path / "checkpoint.pt"
    run(save, before, path, torch.float64, make_zero)
    assert max(run(resume, after, path, torch.float64, make_zero, after == 2)) < TINY


def test_the_state_dict_is_that_of_the_bare_optimizer(tmp_path) -> None:
    """A checkpoint of AdamW goes on with ZeRO1, and the other way round."""
    path = tmp_path / "checkpoint.pt"
    run(save, 1, path, torch.float64, without_zero)
    assert max(run(resume, 3, path, torch.float64, make_zero, False)) < TINY
    run(save, 3, path, torch.float64, make_zero)
    assert max(run(resume, 1, path, torch.float64, without_zero, False)) < TINY


@pytest.mark.parametrize("optimizer_first", [False, True])
def test_masters_are_resumed_to_the_bit(tmp_path, optimizer_first: bool) -> None:
    path = tmp_path / "checkpoint.pt"
    run(save, 2, path, torch.bfloat16, make_zero)
    assert run(resume, 2, path, torch.bfloat16, make_zero, optimizer_first) == [0, 0]


def bytes_of_state(load_it: bool) -> float:
    """Bytes of the optimizer's state per element, as the storages behind it are large."""
    model = layers(20, 30, 10)
    zero = zero1(model.parameters())
    model(inputs(2, 20)).sum().backward()
    zero.step()
    if load_it:
        zero.load_state_dict(zero.state_dict())
    storages = {}
    for state in zero.optimizer.state.values():
        for tensor in (state["exp_avg"], state["exp_avg_sq"]):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values()) / sum(p.numel() for p in model.parameters())


def test_a_rank_holds_its_part_of_the_state_even_when_it_was_loaded() -> None:
    """Two moments of 8 bytes over 3 ranks, the last of which has padding."""
    for load_it in (False, True):
        assert sum(run(bytes_of_state, 3, load_it)) == pytest.approx(16)
        assert max(run(bytes_of_state, 3, load_it)) == pytest.approx(16 / 3, rel=0.01)


# Freezing, ranks that differ, nothing to train, groups of ranks, copies


def train_both(model, wrapped, ours, alone, optimizer, first: int, last: int) -> None:
    """Some steps of the parallel model and of one process."""
    for x_RBD in inputs(6, dist.get_world_size(), 4, 4)[first:last]:
        alone(x_RBD).square().mean().backward()
        wrapped(x_RBD[dist.get_rank()]).square().mean().backward()
        for each in (ours, optimizer):
            each.step()
            each.zero_grad()


def frozen_later(which: str, freeze: bool) -> float:
    """Freeze or unfreeze a layer after wrapping; go on as the error says."""
    model = layers(4, 7, 3)
    model[0].requires_grad_(freeze)
    alone = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(alone.parameters(), weight_decay=0.5, **ADAM)
    if which == "ZeRO1":
        wrapped = model
        ours = zero1(model.parameters(), torch.optim.AdamW, weight_decay=0.5, **ADAM)
    else:
        wrapped = load(DDP).BucketedDDP(model, 1e-4)
        ours = torch.optim.AdamW(model.parameters(), weight_decay=0.5, **ADAM)
    train_both(model, wrapped, ours, alone, optimizer, 0, 2)
    model[0].requires_grad_(not freeze)
    alone[0].requires_grad_(not freeze)
    if which == "BucketedDDP":
        has_been = "frozen" if freeze else "unfrozen"
        with pytest.raises(ValueError, match=f"0.weight has been {has_been} since: wrap"):
            wrapped(inputs(2, 4))
        with torch.no_grad():
            wrapped(inputs(2, 4))  # evaluation needs no gradients
        wrapped = load(DDP).BucketedDDP(model, 1e-4)
    elif not freeze:
        with pytest.raises(ValueError, match="parameter 0 does only now: build another ZeRO1"):
            ours.step()
        state = ours.state_dict()
        ours = zero1(model.parameters(), torch.optim.AdamW, weight_decay=0.5, **ADAM)
        ours.load_state_dict(state)
    train_both(model, wrapped, ours, alone, optimizer, 2, 4)
    return distance(model, alone)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("freeze", [True, False])
@pytest.mark.parametrize("which", ["ZeRO1", "BucketedDDP"])
def test_freezing_after_wrapping(which: str, freeze: bool, n: int) -> None:
    assert max(run(frozen_later, n, which, freeze)) < TINY


def hand_over_different(difference: str) -> None:
    odd = dist.get_rank() == 1
    model = nn.Sequential(nn.Linear(3, 5 if odd and difference == "shape" else 4), nn.Linear(4, 2))
    if odd and difference == "layers":
        model.append(nn.Linear(2, 2))
    if odd and difference == "frozen":
        model[0].weight.requires_grad_(False)
    if odd and difference == "dtype":
        model.to(torch.float64)
    zero1(model.named_parameters(), numel=20 if odd and difference == "numel" else 40)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("difference", ["shape", "layers", "frozen", "dtype", "numel"])
def test_different_parameters_are_one_clear_error_on_every_rank(difference: str, n: int) -> None:
    outcomes = attempt(hand_over_different, n, difference, deadline=20)
    last_lines = {o.text.splitlines()[-1] for o in outcomes}
    assert [o.kind for o in outcomes] == ["raised"] * n
    assert len(last_lines) == 1
    said = last_lines.pop()
    assert said.startswith("ValueError: every rank must hand ZeRO1 the same parameters")
    where = {"layers": "2.weight of group 0", "numel": "numel"}
    assert where.get(difference, "0.weight of group 0") in said
    assert ": [1]" in said


def nothing_to_train() -> float:
    """All is frozen; with clipping the norm is 0, as torch's clip_grad_norm_ has it."""
    model = layers(4, 3).requires_grad_(False)
    zero = zero1(model.parameters(), clip=1.0)
    norm = zero.step()
    zero.load_state_dict(zero.state_dict())
    wrapped = load(DDP).BucketedDDP(model)
    assert not wrapped(inputs(2, 4)).requires_grad
    return norm.item() + distance(model, layers(4, 3))


def fewer_elements_than_ranks() -> float:
    return follow(torch.optim.AdamW, (1, 1), **ADAM)


def test_nothing_to_train_and_next_to_nothing() -> None:
    assert run(nothing_to_train, 2) == [0, 0]
    assert max(run(fewer_elements_than_ranks, 4)) < TINY


def in_pairs(sharded: bool) -> float:
    """Ranks 0 and 1, 2 and 3: each pair is a group of its own, with data of its own."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = rank // 2
    alone = layers(4, 7, 3, seed=2 * pair)
    model = layers(4, 7, 3, seed=rank)
    options = {"group": groups[pair], "clip": 0.1, "sharded": sharded}
    zero = zero1(model.parameters(), **options, **ADAM)
    optimizer = torch.optim.Adam(alone.parameters(), **ADAM)
    for x_PRBD in inputs(2, 2, 2, 4, 4):
        optimizer.zero_grad()
        alone(x_PRBD[pair]).square().mean().backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        model(x_PRBD[pair, rank % 2]).square().mean().backward()
        optimizer.step()
        zero.step()
    resumed = zero1(model.parameters(), **options, **ADAM)
    resumed.load_state_dict(zero.state_dict())
    return distance(model, alone)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_group_of_ranks_is_sharded_by_itself(sharded: bool) -> None:
    assert max(run(in_pairs, 4, sharded)) < TINY


# BucketedDDP: batch norm, copies


def two_forwards() -> float:
    """Two forwards before one backward; each rank normalizes its own batches."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2)).double()
    alone = copy.deepcopy(model)
    wrapped = load(DDP).BucketedDDP(model)
    x_FRBD = inputs(2, n, 4, 5)
    total = [0] * 4
    for r in range(n):
        worker = copy.deepcopy(alone)
        sum(worker(x_BD).square().sum() for x_BD in x_FRBD[:, r]).backward()
        total = [t + p.grad / n for t, p in zip(total, worker.parameters(), strict=True)]
        if r == rank == 0:
            statistics = worker[0].running_mean
    sum(wrapped(x_BD).square().sum() for x_BD in x_FRBD[:, rank]).backward()
    if rank == 0:
        assert torch.equal(model[0].running_mean, statistics)
    return largest_difference([p.grad for p in model.parameters()], total)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_two_forwards_through_batch_norm_before_one_backward(n: int) -> None:
    assert max(run(two_forwards, n)) < TINY


def copied() -> float:
    """A copy trains as the original does, and leaves it alone. No rank need copy but this one."""
    rank = dist.get_rank()
    model = layers(4, 7, 3)
    model[0].bias.requires_grad_(False)
    alone = copy.deepcopy(model)
    original = load(DDP).BucketedDDP(model, 1e-4)
    twin = copy.deepcopy(original)
    ours = torch.optim.SGD(twin.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    untouched = copy.deepcopy(model)
    train_both(twin.module, twin, ours, alone, optimizer, 0, 2)
    assert all(p.grad is None for p in original.parameters())
    far = distance(twin.module, alone) + distance(model, untouched)
    original(inputs(2, 4) + rank).sum().backward()
    grads = [torch.zeros(7, 4).double() for _ in range(dist.get_world_size())]
    dist.all_gather(grads, model[0].weight.grad)
    return far + max((g - grads[0]).abs().max().item() for g in grads)


@pytest.mark.parametrize("n", [2, 3])
def test_a_copy_of_the_wrapper_averages_too(n: int) -> None:
    assert max(run(copied, n)) < TINY


# Wrong lines that the lesson's own claims may not notice

SUBTLE = {  # the line, and what strays from one process then: a function of this file
    "padding that leaks into the norm": (
        ("self.buffer_N = torch.zeros_like(", "self.buffer_N = torch.ones_like("),
        partial(train, True, "", False, 2),
    ),
    "an unused parameter keeps its old gradient": (
        ("            view.zero_()", "            pass"),
        partial(moody, "ZeRO1"),
    ),
    "a parameter that one rank did not use is passed over by all": (
        ("(by_anyone, dist.ReduceOp.MAX", "(by_anyone, dist.ReduceOp.MIN"),
        partial(moody, "ZeRO1"),
    ),
    "every parameter counts as used": (
        ("{p: p.grad is not None for p", "{p: True for p"),
        partial(moody, "ZeRO1"),
    ),
    "what a scheduler writes is not handed on": (
        ("copy_settings(self, self.optimizer)  #", "pass  #"),
        partial(in_groups, torch.optim.lr_scheduler.StepLR, {"step_size": 2, "gamma": 0.1}),
    ),
    "masters do not see that weights were loaded": (
        ("            follow_loaded_weights(bucket)\n", ""),
        loaded,
    ),
    "the optimizer steps once per bucket": (
        ("        self.optimizer.step()\n", "        self.optimizer.step()\n" * 2),
        partial(follow, CountingAdam, (4, 7, 3)),
    ),
}


def stray(name: str) -> float:
    change, function = SUBTLE[name]
    return function(changes=(change,))


@pytest.mark.deep
@pytest.mark.parametrize("name", SUBTLE)
def test_subtle_mistakes_show_on_odd_modules(name: str) -> None:
    changed(ZERO, SUBTLE[name][0])  # fails here, not on a rank, if the change no longer applies
    assert max(run(stray, 2, name)) > 1e-6
