"""The course's own DDP on every kind of module, and every claim against a broken line."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from course.playing import load, play
from course.ranks import attempt, run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "parallelism/04_buckets_and_overlap.py"
EPS = {t: torch.finfo(t).eps for t in (torch.float64, torch.float32, torch.bfloat16)}


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


ZOO = [Net, Frozen, Tied, Roads, Mixed, Normed, Strided, Sparse, Checkpointed, Reentrant]


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


def follow_one_process(build: Callable[[], nn.Module], bucket_mb: float, **options: bool) -> None:
    """Four steps of SGD next to one process that sees all samples: gradients, weights, None."""
    lesson = load(LESSON)
    torch.manual_seed(dist.get_rank())
    ours = lesson.BucketedDDP(build(), bucket_mb, **options)
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
            elif options.get("find_unused") or not p.requires_grad:
                assert p.grad is None, f"{name} has a gradient that no rank made"
            else:
                assert not p.grad.any(), f"{name} was used by nobody: zeros"
                q.grad = torch.zeros_like(q)
        for optimizer in sgd:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0 or bool(options))
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


@pytest.mark.parametrize("build", [Roads, Net])
def test_with_find_unused_what_nobody_used_has_no_gradient(build: type) -> None:
    run(lambda: follow_one_process(build, 0.0001, find_unused=True), 4)


class Random(nn.Module):
    """Layers of given widths, dtypes and who uses them; frozen where told."""

    def __init__(self, layers: list[tuple]) -> None:
        super().__init__()
        self.plan = layers
        self.layers = nn.ModuleList(nn.Linear(5, w, dtype=t) for w, t, _, _ in layers)
        for layer, (_, _, frozen, _) in zip(self.layers, layers, strict=True):
            layer.weight.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        used = [(m, p) for m, p in zip(self.layers, self.plan, strict=True) if p[3] >> rank & 1]
        return torch.cat([m(x.to(p[1])).double().sin() for m, p in used], dim=1)


layer = st.tuples(st.integers(1, 40), st.sampled_from(list(EPS)), st.booleans(), st.integers(0, 15))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.lists(layer, max_size=6), st.integers(1, 4), st.sampled_from([1e-6, 5e-4, 1e-3, 25]))
def test_own_ddp_follows_one_process_on_generated_modules(plan, n: int, bucket_mb: float) -> None:
    plan = [*plan, (3, torch.float64, False, 15)]  # every rank uses something
    run(lambda: follow_one_process(lambda: Random(plan), bucket_mb, find_unused=True), n)


# Buckets


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from(list(EPS))), min_size=1),
    st.integers(1, 400),
)
def test_buckets_hold_every_parameter_once_last_first(sizes: list[tuple], capacity: int) -> None:
    parameters = [nn.Parameter(torch.zeros(size, dtype=t)) for size, t in sizes]
    buckets = load(LESSON).in_buckets(parameters, capacity)
    for dtype in EPS:
        order = [p for b in buckets for p in b.views if p.dtype == dtype]
        assert [id(p) for p in order] == [id(p) for p in reversed(parameters) if p.dtype == dtype]
    open_buckets = [b for b in buckets if b.flat.nbytes < capacity]
    assert len({b.flat.dtype for b in open_buckets}) == len(open_buckets)  # one each, the last
    for b in buckets:
        *others, _ = b.views
        assert all(p.dtype == b.flat.dtype for p in b.views)
        assert not others or sum(p.nbytes for p in others) < capacity  # closed as soon as full


def bytes_of_buckets() -> list[int]:
    """Two tensors between 0.1 MB and 0.1 MiB, at 0.1 MB per bucket."""
    model = nn.ParameterList(torch.zeros(102_400 // 4) for _ in range(2))
    return [b.flat.nbytes for b in load(LESSON).BucketedDDP(model, 0.1).reducer.buckets]


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


# Accumulation, several backwards, groups, failure and recovery


def accumulate() -> None:
    """3 micro-batches under no_sync, twice; two synced backwards; clipping and an error between."""
    rank, ours = dist.get_rank(), load(LESSON).BucketedDDP(Net(), 0.0001)
    torch.manual_seed(0)
    alone = Net()
    alone.load_state_dict(ours.module.state_dict())
    flats = {b.flat.untyped_storage().data_ptr() for b in ours.reducer.buckets}

    def require_equal(what: str, *steps: int) -> None:
        for p, oracle in zip(ours.parameters(), one_process(alone, *steps), strict=True):
            require_close(p.grad, *oracle, what)
            assert p.grad.untyped_storage().data_ptr() in flats
        ours.zero_grad()

    for step in (0, 3):
        with ours.no_sync():
            loss(ours, step, rank).backward()
            loss(ours, step + 1, rank).backward()
        loss(ours, step + 2, rank).backward()
        require_equal("no_sync", step, step + 1, step + 2)
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


def in_pairs() -> list[float]:
    """Ranks 0 and 1, 2 and 3: each pair is a group of its own."""
    lesson, rank = load(LESSON), dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, rank)
    ours = lesson.BucketedDDP(model, group=groups[rank // 2])
    (ours(torch.ones(1, 1)) * rank).sum().backward()
    return [model.weight.item(), model.weight.grad.item()]


def test_a_group_is_averaged_by_itself() -> None:
    assert run(in_pairs, 4) == [[0, 0.5], [0, 0.5], [2, 2.5], [2, 2.5]]


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


def wrap_different(difference: str) -> None:
    odd = dist.get_rank() == 1
    model = nn.Sequential(nn.Linear(3, 5 if odd and difference == "shape" else 4), nn.Linear(4, 2))
    if odd and difference == "layers":
        model.append(nn.Linear(2, 2))
    if odd and difference == "frozen":
        model[0].weight.requires_grad_(False)
    if odd and difference == "dtype":
        model.to(torch.float64)
    load(LESSON).BucketedDDP(model, 2.0 if odd and difference == "bucket_mb" else 1.0)


@pytest.mark.parametrize("difference", ["shape", "layers", "frozen", "dtype", "bucket_mb"])
def test_different_modules_are_one_clear_error_on_every_rank(difference: str) -> None:
    outcomes = attempt(wrap_different, 3, difference, deadline=10)
    last_lines = {o.text.splitlines()[-1] for o in outcomes}
    assert [o.kind for o in outcomes] == ["raised"] * 3
    assert len(last_lines) == 1
    said = last_lines.pop()
    assert "every rank must wrap the same module" in said
    assert "on ranks [0, 2]" in said
    assert "on ranks [1]" in said


# Every claim, against the line it guards

OWN, TORCH = "own: ", "PyTorch, "
BETWEEN, ERROR = (
    OWN + "weights, difference between ranks",
    OWN + "weights, error against one process",
)
GOOD, MISSING = OWN + "accuracy on new digits", OWN + "missing at the first"
MICRO, LATE, ODD = (
    "own, 4 micro-batches: ",
    "own, late network: error",
    "odd model: error of the gradients",
)
MEMORY, BUFFERS = (
    OWN + "gradients and buckets / gradients",
    "buffers at each forward, between ranks",
)
EVENTS = ("all-reduces per step", "bytes per step", "missing at the first")
NONE = "gradients that no rank made, and are None"
WRONG = {ERROR, MICRO + "error", LATE}  # it averages wrongly
LINES = {
    "does not broadcast": (
        ("        broadcast([*module.parameters(), *module.buffers()], group)\n", ""),
        {BETWEEN, *WRONG},
    ),
    "a bucket of one element too many": (
        [
            (
                "new_zeros(sum(p.numel() for p in parameters))",
                "new_zeros(\n            sum(p.numel() for p in parameters) + 1\n        )",
            ),
            ("self.flat.split(", "self.flat[:-1].split("),
        ],
        {OWN + "bytes per step", MEMORY},
    ),
    "each gradient leaves in backward, and again after it": (
        (
            "    with per_gradient:\n",
            "    for parameter in model.parameters():\n"
            "        parameter.register_post_accumulate_grad_hook(\n"
            "            lambda parameter: dist.all_reduce(parameter.grad)\n"
            "        )\n"
            "    with per_gradient:\n",
        ),
        {f"per gradient: {event}" for event in EVENTS},
    ),
    "does not divide": (
        ("torch.div(dense, ranks, out=", "torch.div(dense, 1, out="),
        {*WRONG, ODD},
    ),
    "averages the parameter": (
        ("torch.div(dense, ranks", "torch.div(parameter.detach(), ranks"),
        {*WRONG, ODD},
    ),
    "launches nothing before the end": (
        ("if bucket.missing and not incomplete:", "if not incomplete:"),
        {MISSING},
    ),
    "fills buckets first layer first": (("in reversed(parameters)", "in parameters"), {MISSING}),
    "has a bucket per tensor": (
        (">= capacity:", ">= 0:"),
        {OWN + "all-reduces per step", MISSING, MICRO + "all-reduces"},
    ),
    "sends under no_sync": (
        ("        self.reducer.sync = False\n", ""),
        {MICRO + "all-reduces"},
    ),
    "micro-batches are not divided": (
        ("(loss * (len(label_b) / len(label_B))).backward()", "loss.backward()"),
        {MICRO + "error", TORCH + "4 micro-batches: error"},
    ),
    "an unused parameter keeps its old gradient": (
        ("            parameter.grad.zero_()\n", "            pass\n"),
        {ODD},
    ),
    "buffers are not broadcast": (
        (
            "            broadcast(self.module.buffers(), self.reducer.group)\n",
            "            pass\n",
        ),
        {BUFFERS},
    ),
    "unused parameters get zeros": (
        ("                parameter.grad = None\n", "                pass\n"),
        {NONE},
    ),
    "ranks order their buckets differently": (
        (
            "        self.reducer = Reducer(",
            "        if RANK == 1 and len(trained) == 7:  # two roads of one size change places\n"
            "            trained[1:5] = trained[3:5] + trained[1:3]\n"
            "        self.reducer = Reducer(",
        ),
        {ODD, "different orders of buckets over ranks"},
    ),
    "no layer is left out": (
        ("return pair.first(x_BD)", "return pair.second(pair.first(x_BD))"),
        {"a layer left out: DDP raises in step"},
    ),
    "checkpointing that is not re-entrant": (
        [
            ("pair.second(x_BD), use_reentrant=True)", "pair.second(x_BD), use_reentrant=False)"),
            ("(pair.first, x_BD, use_reentrant=True)", "(pair.first, x_BD, use_reentrant=False)"),
        ],
        {"a layer checkpointed twice, re-entrantly: in step"},
    ),
    "PyTorch's is asked for no views": (
        ("gradient_as_bucket_view=views", "gradient_as_bucket_view=False"),
        {TORCH + "views=True: the same"},
    ),
    "PyTorch's looks for unused parameters": (
        (
            "train(torch_ddp(model), batches, ddp)",
            "train(torch_ddp(model, find_unused_parameters=True), batches, ddp)",
        ),
        {f"{TORCH}{step} step: {event}" for step in ("first", "third") for event in EVENTS},
    ),
    "PyTorch's does not broadcast": (
        ("bucket_cap_mb=CAPACITY / 2**20,", "bucket_cap_mb=CAPACITY / 2**20, init_sync=False,"),
        {TORCH + "4 micro-batches: error", TORCH + "static_graph: error"},
    ),
    "PyTorch's has smaller buckets": (
        ("bucket_cap_mb=CAPACITY / 2**20", "bucket_cap_mb=1e-4"),
        {
            TORCH + "third step: all-reduces per step",
            TORCH + "third step: missing at the first",
            TORCH + "4 micro-batches: all-reduces",
            TORCH + "views=False: the same",
        },
    ),
}
QUICK = (("STEPS = 100", "STEPS = 20"), ('new digits", 0.9,', 'new digits", 0.0,'))
TOO_SHORT = {"a network that learns too little": (("STEPS = 100", "STEPS = 10"), {GOOD})}
BREAKS = [Breaks(LINES, changes=QUICK), Breaks(TOO_SHORT)]

ON_GPUS = OnGpus(
    changes=[
        ("(1, 5, 25, 100, 1e6)", "(25, 1e6)"),
        ("for _ in range(16)]", "for _ in range(4)]"),
        ("repeats: int = 20", "repeats: int = 1"),
    ],
    ranks=(1, 2),  # four ranks are there what two are: no rings, no stages, no mesh
)


@pytest.mark.deep
def test_ranks_that_launch_whatever_is_full_are_noticed() -> None:
    """Only the model whose ranks go other ways shows it: there, unlike layers are added up."""
    change = (
        "            self.launch()\n",
        "            self.works.append(self.start_all_reduce(bucket.flat))\n",
    )
    played = play(LESSON, 2, change, *QUICK)
    orders = "different orders of buckets over ranks"
    assert {ODD, orders} <= played.failed <= {ODD, orders, NONE}, played.output


@pytest.mark.deep
def test_without_the_wait_the_latest_network_is_caught() -> None:
    """What else fails is the network's mood: that is the point."""
    played = play(LESSON, 2, ("            work.wait()", "            pass"), *QUICK)
    assert LATE in played.failed, played.output
    assert all(claim.startswith(("own", "odd")) for claim in played.failed)


@pytest.mark.deep
def test_gradients_that_are_no_views_are_a_second_copy() -> None:
    played = play(LESSON, 2, ("self.flat.split(", "self.flat.clone().split("), *QUICK)
    assert {MEMORY, ERROR} <= played.failed
    row = next(row for row in played.ledger if row["claim"] == MEMORY)
    assert row["measured"] == pytest.approx(2, abs=0.001)


def mean_of_large_gradients() -> float:
    model = nn.Linear(1, 1, bias=False, dtype=torch.float16)
    ours = load(LESSON).BucketedDDP(model)
    ours(torch.full((1, 1), 40_000.0).half()).sum().backward()
    return model.weight.grad.item()


def test_a_mean_that_float16_can_hold_does_not_overflow() -> None:
    """Two gradients of 40,000 have a sum beyond float16's 65,504."""
    assert run(mean_of_large_gradients, 2) == [40_000] * 2


def syncs_around_no_sync() -> list[bool]:
    ours, found = load(LESSON).BucketedDDP(nn.Linear(1, 1)), []
    with ours.no_sync():
        with ours.no_sync():
            found.append(ours.reducer.sync)
        found.append(ours.reducer.sync)
    return [*found, ours.reducer.sync]


def test_what_is_switched_off_twice_is_not_on_again_after_the_first() -> None:
    assert run(syncs_around_no_sync, 1) == [[False, False, True]]


# What oracle and lesson share


class NoNetwork(nn.Linear):
    """Looks like DDP, and sends nothing."""

    def no_sync(self) -> nullcontext:
        return nullcontext()


@pytest.mark.parametrize("pieces", [1, 3])
def test_training_is_sgd_with_momentum_on_each_batch_alone(pieces: int) -> None:
    lesson = load(LESSON)
    torch.manual_seed(0)
    model = NoNetwork(5, 3).double()
    alone = copy.deepcopy(model)
    batches = [(torch.randn(7, 5).double(), torch.arange(7) % 3) for _ in range(3)]
    lesson.train(model, batches, lesson.Timeline(model), pieces)
    sgd = torch.optim.SGD(alone.parameters(), 0.1, 0.9)
    for image_BD, label_B in batches:
        sgd.zero_grad()
        cross_entropy(alone(image_BD), label_B).backward()
        sgd.step()
    assert lesson.largest_difference(model, alone) < 1e-12


def test_the_largest_difference_is_that_of_the_worst_parameter() -> None:
    model = nn.Linear(3, 2)
    other = copy.deepcopy(model)
    other.bias.data[1] -= 0.5
    assert load(LESSON).largest_difference(model, other) == pytest.approx(0.5)


def test_ranks_share_each_batch_and_the_last_300_digits_are_not_drawn() -> None:
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 4
    samples = torch.arange(1797), torch.arange(1797)
    drawn = torch.cat([image_B for image_B, _ in lesson.batches_of(samples, 40, 0, 1)])
    assert drawn.unique().tolist() == list(range(1497))
    shares = [lesson.batches_of(samples, 1, rank, 4)[0][0].tolist() for rank in range(4)]
    assert [len(mine) for mine in shares] == [24] * 4
    assert sorted(chain.from_iterable(shares)) == list(range(96))


def evaluated_on_new_digits() -> bool:
    lesson = load(LESSON, ("STEPS = 100", "STEPS = 1"))
    cpu, net, seen = torch.device("cpu"), lesson.net, []

    def watched(device: torch.device, seed: int) -> nn.Module:
        model = net(device, seed)
        model.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        return model

    lesson.net = watched
    lesson.claim = lesson.check_events = lambda *_, **__: None
    lesson.check_others = lambda *_: {}
    lesson.check_training(cpu)
    return torch.equal(seen[-1], lesson.digits(cpu)[0][-300:])


def test_accuracy_is_that_on_the_digits_that_are_not_drawn() -> None:
    assert run(evaluated_on_new_digits, 1) == [True]


def test_exposed_is_what_a_step_takes_longer_than_one_that_sends_nothing(
    capsys: pytest.CaptureFixture,
) -> None:
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 2
    own, sizes = mock.MagicMock(), []

    def median_ms(step: Callable) -> float:
        own.reset_mock()
        step()
        return 10.0 if own.no_sync.called else {25: 12.0, 1e6: 16.0}.get(sizes[-1], 14.0)

    lesson.BucketedDDP = lambda model, bucket_mb: sizes.append(bucket_mb) or own
    lesson.median_ms = median_ms
    with mock.patch.object(torch.cuda, "is_bf16_supported", return_value=True):
        lesson.measure_on_gpus(torch.device("meta"))
    said = " ".join(capsys.readouterr().out.split())
    assert "buckets of 25 MB: 12.00 ms per step, 2.00 exposed" in said
    assert lesson.ledger[0]["measured"] == 12 / 16


def test_in_the_figure_an_all_reduce_begins_when_its_gradients_are_there() -> None:
    events = [("gradient", 5000), ("all_reduce", 5000), ("gradient", 7000), ("all_reduce", 7000)]
    with mock.patch("matplotlib.figure.Figure") as figure:
        load(LESSON).draw({"own": events}, "events.png")
    axes = figure.return_value.subplots.return_value
    bars = [(call.args[1], call.args[3]) for call in axes.barh.call_args_list]
    assert bars == [(5, 0), (5, 5), (7, 5), (7, 12)]  # how long, and from where, in kB
