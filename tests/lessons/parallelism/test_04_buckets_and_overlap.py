"""The course's own DDP on every kind of module, and every claim against a broken line."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from course.playing import load
from course.ranks import run
from tests.helpers.odd_modules import Odd, batches
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "parallelism/04_buckets_and_overlap.py"
EPS = {t: torch.finfo(t).eps for t in (torch.float64, torch.float32, torch.bfloat16)}
TINY = 1e-12  # float64: thousands of roundings of 2**-53
SENDS = (
    "queue_callback(self.finish)\n"
    "        bucket.take_in(parameter)\n"
    "        self.send_full_buckets()\n"
)  # what the hook does


# Modules of every kind; forward takes (x, rank), so that ranks can differ


class Net(nn.Module):
    """Four layers of uneven size, a number and an empty parameter; nested."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        inner = nn.Sequential(nn.Linear(6, 3, bias=False), nn.Tanh(), nn.Linear(3, 11))
        self.layers = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), inner)
        self.scale = nn.Parameter(torch.randn(()))
        self.last = nn.Linear(11, 2)
        self.to(dtype)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.last(self.layers(x)) * self.scale


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].weight.requires_grad_(False)
        self.last.bias.requires_grad_(False)


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(11, 2, dtype=torch.float64)
        self.again.weight = self.last.weight

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return super().forward(x, rank) + self.again(self.layers(x).sin())


class Roads(Net):
    """Even ranks go left, odd ones right; nobody goes the third way."""

    def __init__(self) -> None:
        super().__init__()
        self.roads = nn.ModuleList(nn.Linear(5, 11, dtype=torch.float64) for _ in range(3))

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.last(self.roads[rank % 2](x))


class Mixed(Net):
    """float64, then float32, then bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(2, 4, dtype=torch.float32)
        self.lowest = nn.Linear(4, 3, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.lowest(self.low(super().forward(x, rank).float()).bfloat16())


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5, dtype=torch.float64)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return super().forward(self.norm(x), rank)


class Strided(Net):
    """A transposed weight, and an image layer in channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(5, 12, dtype=torch.float64).t())
        image = nn.Conv2d(3, 4, 2, dtype=torch.float64)
        self.image = image.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.image((x @ self.turned.t()).view(-1, 3, 2, 2)).flatten(1)


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5, sparse=True, dtype=torch.float64)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        rows = (x[:, 0] * 10).long() % 7
        return super().forward(x + self.table(rows), rank)


class Checkpointed(Net):
    reentrant = False

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x.requires_grad_(), use_reentrant=self.reentrant)
        return self.last(x) * self.scale


class Reentrant(Checkpointed):
    reentrant = True


ZOO = [Net, Frozen, Tied, Roads, Normed, Strided, Checkpointed, Reentrant]


def loss(module: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    return module(x, rank).square().mean()


def one_process(alone: nn.Module, *steps: int) -> list[tuple | None]:
    """What every parameter's gradient is with all samples: the mean, and the size of its terms.

    Added up in float64, whatever the parameter's type; None if no rank uses the parameter.
    """
    n, gradients = dist.get_world_size(), [None] * len(list(alone.parameters()))
    for step in steps:
        for rank in range(n):
            loss(alone, step, rank).backward()
            for i, p in enumerate(alone.parameters()):
                if p.grad is not None:
                    mean, size = gradients[i] or (0, 0)
                    term = p.grad.to_dense().double() / n
                    gradients[i] = mean + term, size + term.abs()
                p.grad = None
    return gradients


def require_close(ours: torch.Tensor, mean: torch.Tensor, size: torch.Tensor, what: str) -> None:
    """One rounding for each division and addition: (2n + 2) eps of the terms is ample."""
    bound = (2 * dist.get_world_size() + 2) * EPS[ours.dtype] * size
    off = (ours.detach().double() - mean).abs()
    assert (off <= bound + 1e-300).all(), f"{what}: off by {off.max()}, allowed {bound.max()}"


def follow_one_process(build: Callable[[], nn.Module], bucket_mb: float) -> None:
    """Four steps of SGD next to one process that sees all samples: gradients and weights."""
    lesson = load(LESSON)
    torch.manual_seed(dist.get_rank())
    ours = lesson.BucketedDDP(build(), bucket_mb)
    torch.manual_seed(0)
    alone = build()
    sgd = [
        torch.optim.SGD(m.parameters(), 0.01, 0.9, weight_decay=0.1, foreach=True)
        for m in (ours, alone)
    ]
    for step in range(4):
        loss(ours, step, dist.get_rank()).backward()
        pairs = list(zip(ours.module.named_parameters(), alone.parameters(), strict=True))
        for ((name, p), q), oracle in zip(pairs, one_process(alone, step), strict=True):
            assert p.stride() == q.stride()
            if oracle is not None:
                require_close(p.grad, *oracle, f"gradient of {name} in step {step}")
                q.grad = oracle[0].to(q.dtype)
            elif not p.requires_grad:
                assert p.grad is None, f"{name} has a gradient that no rank made"
            else:
                assert not p.grad.any(), f"{name} was used by nobody: zeros"
                q.grad = torch.zeros_like(q)
        for optimizer in sgd:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        for (name, p), q in pairs:
            require_close(p, q.detach().double(), q.detach().abs() + 1, f"{name}, step {step}")
        alone.load_state_dict(ours.module.state_dict())  # roundings do not carry over
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [p.detach() for p in ours.parameters()])
    for theirs in everyone:
        assert all(torch.equal(a, b) for a, b in zip(theirs, everyone[0], strict=True))


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("build", ZOO)
def test_own_ddp_follows_one_process_on(build: type, n: int) -> None:
    run(follow_one_process, n, build, 0.0001)


class Random(nn.Module):
    """Layers of given widths, and who uses them; frozen where told."""

    def __init__(self, layers: list[tuple], dtype: torch.dtype) -> None:
        super().__init__()
        self.plan = layers
        self.dtype = dtype
        self.layers = nn.ModuleList(nn.Linear(5, width, dtype=dtype) for width, _, _ in layers)
        for layer, (_, frozen, _) in zip(self.layers, layers, strict=True):
            layer.weight.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        pairs = zip(self.layers, self.plan, strict=True)
        used = [layer for layer, (_, _, users) in pairs if users >> rank & 1]
        return torch.cat([layer(x.to(self.dtype)).double().sin() for layer in used], dim=1)


layer = st.tuples(st.integers(1, 40), st.booleans(), st.integers(0, 15))
dtype = st.sampled_from(list(EPS))
capacity_mb = st.sampled_from([1e-6, 5e-4, 1e-3, 25])


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.lists(layer, max_size=6), dtype, st.integers(1, 4), capacity_mb)
def test_own_ddp_follows_one_process_on_generated_modules(
    plan: list[tuple], dtype: torch.dtype, n: int, capacity_mb: float
) -> None:
    plan = [*plan, (3, False, 15)]  # every rank uses something
    run(lambda: follow_one_process(lambda: Random(plan, dtype), capacity_mb), n)


# Buckets


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 50), min_size=1), dtype, st.integers(1, 400))
def test_buckets_hold_every_parameter_once_last_first(
    sizes: list[int], dtype: torch.dtype, capacity: int
) -> None:
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]
    buckets = load(LESSON).in_buckets(parameters, capacity)
    order = [id(p) for b in buckets for p in b.views]
    assert order == [id(p) for p in reversed(parameters)]
    for b in buckets:
        *others, _ = b.views
        assert not others or sum(p.nbytes for p in others) < capacity  # closed as soon as full
    assert all(b.flat.nbytes >= capacity for b in buckets[:-1])


def bytes_of_buckets() -> list[int]:
    """Two tensors between 0.1 MB and 0.1 MiB, at 0.1 MB per bucket."""
    model = nn.ParameterList(torch.zeros(102_400 // 4) for _ in range(2))
    return [b.flat.nbytes for b in load(LESSON).BucketedDDP(model, 0.1).buckets]


def test_bucket_mb_counts_in_1e6_bytes() -> None:
    assert run(bytes_of_buckets, 1) == [[102_400, 102_400]]


def launched_sizes() -> list[int]:
    """Which buckets leave, in which order, when every rank uses other layers."""
    sizes, real = [], dist.all_reduce

    def all_reduce(tensor: torch.Tensor, **how: object) -> dist.Work:
        sizes.append(tensor.numel())
        return real(tensor, **how)

    ours = load(LESSON).BucketedDDP(Roads(), 1e-6)
    with mock.patch.object(dist, "all_reduce", all_reduce):
        loss(ours, 0, dist.get_rank()).backward()
    return sizes


def test_ranks_that_use_other_layers_launch_the_same_buckets_in_the_same_order() -> None:
    orders = run(launched_sizes, 4)
    expected = [p.numel() for p in reversed(list(Roads().parameters()))]
    assert orders == [expected] * 4


def gradients_where_ranks_differ(*changes: tuple[str, str]) -> list[float]:
    torch.manual_seed(0)
    ours = load(LESSON, *changes).BucketedDDP(Roads(), 1e-6)
    loss(ours, 0, dist.get_rank()).backward()
    return [p.grad.sum().item() for p in ours.parameters()]


def test_ranks_that_send_whatever_is_full_add_up_unlike_layers() -> None:
    """No collective complains: the sizes agree."""
    whatever_is_full = (
        SENDS,
        "queue_callback(self.finish)\n"
        "        bucket.take_in(parameter)\n"
        "        if not bucket.missing:\n"
        "            self.works.append(dist.all_reduce(bucket.flat, async_op=True))\n",
    )
    right = run(gradients_where_ranks_differ, 2)
    wrong = run(gradients_where_ranks_differ, 2, whatever_is_full)
    assert right[0] == right[1] != wrong[0]


def stale_gradients(*changes: tuple[str, str]) -> list[float]:
    """Each road's gradient after a step on the left road and a step on the right one."""
    torch.manual_seed(0)
    ours = load(LESSON, *changes).BucketedDDP(Roads(), 1e-6)
    for step in range(2):
        ours.zero_grad()
        loss(ours, step, step).backward()
    return [road.weight.grad.sum().item() for road in ours.module.roads]


def test_an_unused_gradient_is_zero_and_not_that_of_the_step_before() -> None:
    (right,) = run(stale_gradients, 1)
    (wrong,) = run(stale_gradients, 1, ("            view.zero_()\n", "            pass\n"))
    assert right[0] == right[2] == 0 != right[1]
    assert wrong[0] != 0


class LateWork:
    """An all-reduce over a network that transfers nothing until wait() is called."""

    real = staticmethod(dist.all_reduce)

    def __init__(self, tensor: torch.Tensor, async_op: bool) -> None:
        self.tensor = tensor

    def wait(self) -> None:
        self.real(self.tensor)


def gradients_of_a_late_network(*changes: tuple[str, str]) -> list[float]:
    torch.manual_seed(0)
    ours = load(LESSON, *changes).BucketedDDP(Net(), 0.0001)
    with mock.patch.object(dist, "all_reduce", LateWork):
        loss(ours, 0, dist.get_rank()).backward()
    return [p.grad.sum().item() for p in ours.parameters()]


def test_backward_waits_for_the_all_reduces() -> None:
    """On gloo between two processes a forgotten wait is mostly without effect."""
    first, second = run(gradients_of_a_late_network, 2)
    assert first == second
    no_wait = ("            work.wait()", "            pass")
    first, second = run(gradients_of_a_late_network, 2, no_wait)
    assert first != second


class Asked(TorchDispatchMode):
    """Counts how often the host asks for a tensor's value."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() == "aten::_local_scalar_dense":
            self.times += 1
        return func(*args, **(kwargs or {}))


def values_asked_for(*changes: tuple[str, str]) -> int:
    ours = load(LESSON, *changes).BucketedDDP(Roads(), 1e-6)
    with Asked() as asked:
        loss(ours, 0, dist.get_rank()).backward()
    return asked.times


def test_a_backward_asks_for_no_value() -> None:
    """A GPU's host would wait at each, and the next all-reduce start late; no claim counts them."""
    assert run(values_asked_for, 2) == [0, 0]
    send = "            self.works.append("
    asks = (send, f"            bucket.flat.sum().item()\n{send}")
    assert min(run(values_asked_for, 2, asks)) > 0


# Several backwards, failure and recovery


def accumulate() -> None:
    """Two synced backwards, a backward that breaks, two forwards before one backward."""
    rank, ours = dist.get_rank(), load(LESSON).BucketedDDP(Net(), 0.0001)
    torch.manual_seed(0)
    alone = Net()
    alone.load_state_dict(ours.module.state_dict())
    flats = {b.flat.untyped_storage().data_ptr() for b in ours.buckets}

    def require_equal(what: str, *steps: int) -> None:
        for p, oracle in zip(ours.parameters(), one_process(alone, *steps), strict=True):
            require_close(p.grad, *oracle, what)
            assert p.grad.untyped_storage().data_ptr() in flats
        ours.zero_grad()

    loss(ours, 7, rank).backward()
    loss(ours, 8, rank).backward()  # both send: the mean of means that all share is itself
    require_equal("two backwards", 7, 8)
    with pytest.raises(ZeroDivisionError):
        (loss(ours, 9, rank) + broken(ours.module.layers[0].weight)).backward()
    ours.zero_grad()
    (loss(ours, 10, rank) + loss(ours, 11, rank)).backward()
    require_equal("two forwards, one backward, after one that broke", 10, 11)


def broken(x: torch.Tensor) -> torch.Tensor:
    """Its backward raises, after some buckets have left."""
    y = x.sum()
    y.register_hook(lambda grad: 1 / 0)
    return y


@pytest.mark.parametrize("n", [1, 2, 3])
def test_gradients_accumulate_as_in_one_process(n: int) -> None:
    run(accumulate, n)


def statistics_of_two_steps() -> tuple[list[float], dict]:
    lesson, rank = load(LESSON), dist.get_rank()
    ours = lesson.BucketedDDP(Normed())
    before = []
    for step in range(2):
        inner = ours.module.norm.register_forward_pre_hook(
            lambda m, _: before.append(m.running_mean.sum().item())
        )
        loss(ours, step, rank).backward()
        inner.remove()
    return before, {name: tensor.shape for name, tensor in ours.state_dict().items()}


def test_buffers_follow_the_first_rank_and_state_dict_is_the_modules() -> None:
    (first, state), (second, _) = run(statistics_of_two_steps, 2)
    assert first == second
    assert first[1] != 0
    assert state == {f"module.{k}": t.shape for k, t in Normed().state_dict().items()}


# As a library: odd modules, a gradient of a gradient, nothing to train


def distance(model: nn.Module, alone: nn.Module) -> float:
    """Largest difference between the state dicts of two modules."""
    pairs = zip(model.state_dict().values(), alone.state_dict().values(), strict=True)
    return torch.cat([(a.double() - b.double()).abs().flatten() for a, b in pairs]).max().item()


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def layers(*widths: int) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths))).double()


def train_odd(again: str) -> float:
    """Tied, frozen, unused, empty, transposed and integer parameters, an LSTM, buffers."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    alone = Odd()
    model = Odd(rank, again, buffer_seed=rank)
    wrapped = load(LESSON).BucketedDDP(model, 0.0001)
    sgd = [torch.optim.SGD(m.parameters(), 0.1) for m in (wrapped, alone)]
    for batch_RB2 in batches(n):
        alone(batch_RB2.flatten(0, 1))["loss"].backward()
        wrapped(batch_RB2[rank])["loss"].backward()
        for optimizer in sgd:
            optimizer.step()
            optimizer.zero_grad()
    return distance(model, alone)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("again", ["", "reentrant", "not reentrant"])
def test_odd_modules_train_as_in_one_process(again: str, n: int) -> None:
    assert max(run(train_odd, n, again)) < TINY


def penalized() -> float:
    """Double backward: the loss holds the gradient of another loss."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    model = layers(4, 7, 1)
    alone = layers(4, 7, 1)
    wrapped = load(LESSON).BucketedDDP(model, 0.0001)
    sgd = [torch.optim.SGD(m.parameters(), 0.1) for m in (wrapped, alone)]

    def loss_of(module: nn.Module, x_BD: torch.Tensor) -> torch.Tensor:
        x_BD = x_BD.clone().requires_grad_()
        (slope_BD,) = torch.autograd.grad(module(x_BD).tanh().sum(), x_BD, create_graph=True)
        return (slope_BD.norm(dim=1) - 1).square().mean()

    for x_RBD in inputs(2, n, 4, 4):
        sum(loss_of(alone, x_RBD[r]) / n for r in range(n)).backward()
        loss_of(wrapped, x_RBD[rank]).backward()
        for optimizer in sgd:
            optimizer.step()
            optimizer.zero_grad()
    return distance(model, alone)


def test_a_gradient_penalty() -> None:
    assert max(run(penalized, 3)) < TINY


def nothing_to_train() -> float:
    model = layers(4, 3).requires_grad_(False)
    wrapped = load(LESSON).BucketedDDP(model)
    assert not wrapped(inputs(2, 4)).requires_grad
    return distance(model, layers(4, 3))


def test_nothing_to_train() -> None:
    assert run(nothing_to_train, 2) == [0, 0]


def two_forwards() -> float:
    """Two forwards before one backward; each rank normalizes its own batches."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2)).double()
    alone = copy.deepcopy(model)
    wrapped = load(LESSON).BucketedDDP(model)
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
    pairs = zip(model.parameters(), total, strict=True)
    return max((p.grad - expected).abs().max().item() for p, expected in pairs)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_two_forwards_through_batch_norm_before_one_backward(n: int) -> None:
    assert max(run(two_forwards, n)) < TINY


# What is refused, and what is not


def refused(build: Callable[[], nn.Module]) -> str:
    with pytest.raises(ValueError, match="must") as raised:
        load(LESSON).BucketedDDP(build())
    return str(raised.value)


def test_several_dtypes_are_refused() -> None:
    rule = "trained parameters must have one dtype, got 3: use DDP"
    assert run(refused, 1, Mixed) == [rule]


def test_sparse_gradients_are_refused() -> None:
    rule = "gradients must be dense, got a module with sparse=True: set it False"
    assert run(refused, 1, Sparse) == [rule]


class Lazy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(2)


@pytest.mark.parametrize(
    ("build", "name"), [(Lazy, "lazy.weight"), (lambda: Net().to("meta"), "scale")]
)
def test_parameters_without_values_are_refused(build: Callable[[], nn.Module], name: str) -> None:
    rule = f"parameters must have values, got none for {name}: load weights, or run a lazy module"
    assert run(refused, 2, build) == [f"{rule} once"] * 2


def wrap_a_copy() -> None:
    model = Net()
    load(LESSON).BucketedDDP(model)
    follow_one_process(lambda: copy.deepcopy(model), 0.0001)


def test_a_copy_of_a_wrapped_module_may_be_wrapped() -> None:
    run(wrap_a_copy, 2)


class Twice(Net):
    """Its first layer runs twice, and is checkpointed both times, re-entrantly."""

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        first = self.layers[0]
        y = checkpoint(first, x.requires_grad_(), use_reentrant=True)
        return self.last(checkpoint(first, y[:, :5], use_reentrant=True).repeat(1, 2)[:, :11])


def step_twice() -> None:
    ours = load(LESSON).BucketedDDP(Twice(), 0.0001)
    with pytest.raises(KeyError):
        loss(ours, 0, dist.get_rank()).backward()


def test_a_second_gradient_in_one_backward_is_refused() -> None:
    run(step_twice, 1)


def mean_of_large_gradients() -> float:
    model = nn.Linear(1, 1, bias=False, dtype=torch.float16)
    ours = load(LESSON).BucketedDDP(model)
    ours(torch.full((1, 1), 40_000.0).half()).sum().backward()
    return model.weight.grad.item()


def test_a_mean_that_float16_can_hold_does_not_overflow() -> None:
    """Two gradients of 40,000 have a sum beyond float16's 65,504."""
    assert run(mean_of_large_gradients, 2) == [40_000] * 2


# Every claim, against the line it guards

FIRST, THIRD = "PyTorch, first step", "PyTorch, third step"
CALLS = "{}: all-reduces per step"
MISSING = "{}: missing at the first"
AFTER = "{}: bytes after the last gradient"
SIZES_OF_BUCKETS = ("1 B", "100 kB", "1 MB")
ERRORS = {f"{size}: weights, error against one process" for size in SIZES_OF_BUCKETS}


def order_of(way: str) -> set[str]:
    return {CALLS.format(way), MISSING.format(way), AFTER.format(way)}


OF_1_MB = {CALLS.format("1 MB"), AFTER.format("1 MB")}
NOTHING_HIDDEN = {row.format(size) for row in (MISSING, AFTER) for size in ("1 B", "100 kB")}

BREAKS = Breaks(
    {
        "does not broadcast": (
            ("            copy_from_rank_0(tensor)\n", "            pass\n"),
            ERRORS,
        ),
        "buckets of one element too many": (
            [
                ("new_zeros(sum(sizes))", "new_zeros(sum(sizes) + 1)"),
                ("self.flat.split(sizes)", "self.flat[:-1].split(sizes)"),
            ],
            {AFTER.format(size) for size in SIZES_OF_BUCKETS},
        ),
        "does not divide": (
            ("torch.div(parameter.grad, WORLD_SIZE, out=", "torch.div(parameter.grad, 1, out="),
            ERRORS,
        ),
        "averages the parameter": (
            ("torch.div(parameter.grad, ", "torch.div(parameter.detach(), "),
            ERRORS,
        ),
        "gradients are no views of the buckets": (
            ("self.flat.split(sizes)", "self.flat.clone().split(sizes)"),
            ERRORS,
        ),
        "sends nothing before the end (Try)": (
            (SENDS, "queue_callback(self.finish)\n        bucket.take_in(parameter)\n"),
            NOTHING_HIDDEN,
        ),
        "fills buckets first layer first (Try)": (
            ("in reversed(parameters)", "in parameters"),
            NOTHING_HIDDEN,
        ),
        "has a bucket per tensor": (
            (">= capacity:\n", ">= 0:\n"),
            order_of("100 kB") | OF_1_MB,
        ),
        "has one bucket": (
            (">= capacity:\n", ">= 1e9:\n"),
            order_of("1 B") | order_of("100 kB"),
        ),
        "PyTorch's looks for unused parameters": (
            (
                "bucket_cap_mb=100_000 / 2**20)",
                "bucket_cap_mb=100_000 / 2**20, find_unused_parameters=True)",
            ),
            order_of(FIRST) | order_of(THIRD),
        ),
        "PyTorch's has smaller buckets": (
            ("bucket_cap_mb=100_000 / 2**20", "bucket_cap_mb=1e-4"),
            order_of(THIRD),
        ),
    }
)

ON_GPUS = OnGpus(
    changes=[
        ("2048, 4096] * 8", "2048, 4096]"),
        ("torch.randn(16_384, WIDTHS[0]", "torch.randn(64, WIDTHS[0]"),
        ("range(23)", "range(4)"),
        ("(1, 5, 25, 100)", "(25,)"),
    ],
    ranks=(1, 2),  # four ranks are there what two are: no rings, no stages, no mesh
)


# What oracle and lesson share, and what judges


def test_training_is_sgd_with_momentum_on_the_samples_named() -> None:
    lesson = load(LESSON)
    torch.manual_seed(1)
    model = nn.Linear(64, 10).double()
    alone = copy.deepcopy(model)
    lesson.train(model, slice(1, None, 2), nullcontext())
    sgd = torch.optim.SGD(alone.parameters(), 0.1, 0.9)
    torch.manual_seed(0)
    for _ in range(3):
        x_BD = torch.randn(24, 64, dtype=torch.float64)
        label_B = torch.randint(10, (24,))
        sgd.zero_grad()
        cross_entropy(alone(x_BD[1::2]), label_B[1::2]).backward()
        sgd.step()
    assert lesson.largest_difference(model, alone) < 1e-12


def test_the_largest_difference_is_that_of_the_worst_parameter() -> None:
    model = nn.Linear(3, 2)
    other = copy.deepcopy(model)
    other.bias.data[1] -= 0.5
    assert load(LESSON).largest_difference(model, other) == pytest.approx(0.5)


def test_events_are_read_as_they_came(capsys: pytest.CaptureFixture) -> None:
    lesson = load(LESSON)
    kinds = ["2", "all_reduce", "1", "1", "all_reduce", "all_reduce"]
    events = list(zip(kinds, [1000, 1000, 2000, 3000, 2000, 3000], strict=True))
    assert lesson.read_events("x", events) == (3, 2, 5000)
    assert "x: 2 [1] 1 1 [2] [3]\n" in capsys.readouterr().out


def test_every_capacity_of_the_sweep_makes_other_buckets() -> None:
    lesson = load(LESSON)
    counts = {}
    for bucket_mb in (1, 5, 25, 100, 1000):
        with mock.patch.multiple(lesson, copy_from_rank_0=mock.DEFAULT, refuse_odd=mock.DEFAULT):
            own = lesson.wrapped_layers(bucket_mb, torch.device("meta"))
        counts[bucket_mb] = len(own.buckets)
    assert list(counts.values()) == sorted(set(counts.values()), reverse=True)
    assert counts[1] == 47
    assert counts[1000] == 1
    assert sum(p.nbytes for p in own.parameters()) == 587_423_744


def times(compute: float, again: float, one_bucket: float, small: float) -> dict[str, float]:
    """Milliseconds of a step, made up."""
    ms = {"nothing sent": compute, "the same again": again}
    ms |= dict.fromkeys(["1 MB", "5 MB", "25 MB", "100 MB"], small)
    return ms | {"one bucket": one_bucket}


@pytest.mark.parametrize(
    ("ms", "verdict"),
    [
        (times(50, 50.1, 53, 50.9), "PASS"),
        (times(50, 50.1, 53, 53), "FAIL"),  # no overlap
        (times(50, 50.1, 53, 51.6), "FAIL"),  # more than half
        (times(50, 50.8, 53, 50.9), "noise"),  # 3 ms are less than 4 times 0.8
        (times(50, 50, 50.9, 50.1), "noise"),  # less than 4 times half a percent
        (times(50, 50.1, 80, 60), "faster links"),
    ],
)
def test_exposed_is_what_a_step_takes_longer_than_one_that_sends_nothing(
    ms: dict, verdict: str, capsys: pytest.CaptureFixture
) -> None:
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 2
    made = []
    lesson.wrapped_layers = lambda bucket_mb, device: made.append(bucket_mb) or mock.MagicMock()
    lesson.median_steps = lambda ways, x_BD: ms
    with mock.patch.object(torch.cuda, "is_bf16_supported", return_value=True):
        lesson.measure_on_gpus(torch.device("meta"))
    said = " ".join(capsys.readouterr().out.split())
    assert made == [25, 1, 5, 25, 100, 1000]
    assert f"{ms['25 MB']:.2f} ms per step, {ms['25 MB'] - 50:.2f} exposed" in said
    (row,) = lesson.ledger
    assert verdict in row["verdict"] + row.get("needs", "")


def test_medians_leave_out_what_warms_up_and_the_slowest_rank_counts() -> None:
    lesson = load(LESSON)
    seconds = iter([100.0] * 6 + [1.0, 4.0] * 19 + [50.0, 60.0])
    lesson.step_ms = lambda own, x_BD: next(seconds)

    def on_two_ranks(slowest: torch.Tensor, op: object) -> None:
        assert op == dist.ReduceOp.MAX
        slowest[0] = 3.0  # the other rank's

    with mock.patch.object(dist, "all_reduce", on_two_ranks):
        medians = lesson.median_steps({"one": None, "other": None}, torch.zeros(1))
    assert medians == {"one": 3.0, "other": 4.0}
