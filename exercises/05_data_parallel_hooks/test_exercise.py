"""Grader of 05: gradients, weights to the bit, bytes, order of events; frozen, tied, left out."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from course.grading import Event, Wrong, expect, grade, same
from course.wire import InOrder

FORBIDDEN = (
    "torch.nn.parallel.DistributedDataParallel.__init__",
    "threading.Thread.__init__",  # threads of two ranks launch in any order
)
ALL = (0, 1, 2)
STEPS = 3
HANDED = "A post_accumulate_grad hook is handed the parameter; its gradient is parameter.grad"

run = partial(grade, forbid=FORBIDDEN)


class Net(nn.Module):
    """Tied weights, a frozen layer, buffers, one of which state_dict leaves out, two dtypes, and
    layers that a step may leave out, one of them with a parameter of float64.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in ALL)
        self.gain = nn.Parameter(torch.rand(4, dtype=torch.float64))
        self.readout = nn.Linear(4, 7)
        self.readout.weight = self.embed.weight
        self.register_buffer("shift", torch.randn(4))
        self.register_buffer("count", torch.tensor(10 + seed))
        self.register_buffer("scale", torch.rand(4), persistent=False)

    def forward(self, token_B: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        x_BD = self.frozen(self.embed(token_B)) * self.scale + self.shift
        for i in used:
            x_BD = x_BD + self.layers[i](x_BD).tanh()
        if 2 in used:
            x_BD = (x_BD * self.gain).float()
        return self.readout(x_BD)


def held(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers, by name."""
    every = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.detach() for name, tensor in every}


def used_in(step: int, used: tuple[int, ...]) -> tuple[int, ...]:
    """The layers that a rank uses in this step, given those of step 0: some, and the next ones in
    each further step; or all.
    """
    return used if len(used) == len(ALL) else tuple((i + step) % len(ALL) for i in used)


def batch(rank: int, step: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Five tokens and what follows them, others on every rank and in every step."""
    random = torch.Generator().manual_seed(seed + 100 * step + rank)
    token_B, next_B = torch.randint(7, (2, 5), generator=random)
    return token_B, next_B


def one_process(uses: list[tuple[int, ...]], seed: int) -> list[tuple[list, dict]]:
    """Each step's gradients: each rank's own, and their mean, which the optimizer follows."""
    model = Net(seed)
    log = []
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sgd = torch.optim.SGD(trained.values(), lr=0.1)
    for step in range(STEPS):
        own = []
        for rank, used in enumerate(uses):
            token_B, next_B = batch(rank, step, seed)
            loss = cross_entropy(model(token_B, used_in(step, used)), next_B)
            grads = torch.autograd.grad(loss, [*trained.values()], materialize_grads=True)
            own.append(dict(zip(trained, grads, strict=True)))
        for name, p in trained.items():
            p.grad = sum(grads[name] for grads in own) / len(uses)
        log.append((own, {name: p.grad for name, p in trained.items()}))
        sgd.step()
    return log


def wrap(answer, wire, seed: int) -> dict[str, torch.Tensor]:
    model = Net(seed + dist.get_rank())
    answer.DataParallel(model)
    return held(model)


def train(answer, wire, uses: list, seed: int) -> tuple:
    """Return each step's gradients and events, and the state at the end."""
    rank = dist.get_rank()
    log = []
    model = Net(seed + rank)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    wrapped = answer.DataParallel(model)
    _other = answer.DataParallel(nn.Linear(2, 2))  # which is not trained now
    wire.events = InOrder()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        wire.events.clear()
        sgd.zero_grad(set_to_none=step < 2)
        before = [p.detach().clone() for p in model.parameters()]
        token_B, next_B = batch(rank, step, seed)
        cross_entropy(wrapped(token_B, used_in(step, uses[rank])), next_B).backward()
        wrapped.finish()
        if not all(map(torch.equal, before, model.parameters())):
            raise Wrong(
                f"step {step}: backward changed the weights, as averaging them does. {HANDED}"
            )
        grads = {s: None if p.grad is None else p.grad.clone() for s, p in trained.items()}
        log.append((grads, list(wire.events)))
        sgd.step()
    return log, held(model)


def compare(results: list, uses: list, seed: int, what: str = "") -> None:
    """Every step's gradients with one process's; all ranks' weights with each other's."""
    n = len(uses)
    for step, (own, mean) in enumerate(one_process(uses, seed)):
        for rank, (log, _) in enumerate(results):
            for name, grad in log[step][0].items():
                # some 100 additions of numbers no larger than the largest here, in float32
                atol = 100 * 2**-24 * max(1.0, *(float(g[name].abs().max()) for g in own))
                told = f"step {step}, rank {rank}, gradient of {name}{what}"
                known = {"it is still this rank's own, no mean": own[rank][name]}
                known["it is still this rank's own, divided by the ranks"] = own[rank][name] / n
                known[f"it is the sum over {n} ranks, {n} times the mean"] = n * mean[name]
                known[f"it is the sum over {n} ranks, divided by 2"] = n / 2 * mean[name]
                same(grad, mean[name], told, atol, instead=known)
    for rank, (_, end) in enumerate(results):
        for name, t in end.items():
            same(t, results[0][1][name], f"after {STEPS} steps, {name} of rank {rank} next to 0's")


def test_start(answer: Path, seed: int) -> None:
    """All start from rank 0's parameters and buffers, on 3 ranks"""
    for rank, start in enumerate(run(answer, wrap, 3, seed)):
        for name, due in held(Net(seed)).items():
            kind = "buffer" if name in dict(Net(seed).named_buffers()) else "parameter"
            left = "" if name in Net(seed).state_dict() else " (state_dict() leaves it out)"
            same(start[name], due, f"rank {rank}, {kind} {name}{left} once the module is wrapped")


def late(answer, wire, seed: int) -> None:
    """Rank 1 begins each backward when rank 0's is over."""
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    wrapped = answer.DataParallel(Net(seed + rank))
    wire.events = InOrder()
    for step in range(2):
        wrapped.zero_grad()
        token_B, next_B = batch(rank, step, seed)
        loss = cross_entropy(wrapped(token_B, ALL), next_B)
        stop = time.monotonic() + 8
        while rank == 1 and not store.check([f"backward {step}"]):
            if time.monotonic() > stop:
                raise Wrong("rank 0's backward waits for rank 1's: start the all-reduce and go on")
            time.sleep(0.01)
        loss.backward()
        if rank == 0:
            store.set(f"backward {step}", "")
        wrapped.finish()


def test_waiting(answer: Path, seed: int) -> None:
    """Backward waits for nobody"""
    run(answer, late, 2, seed, deadline=20)


class Arriving:
    """An all-reduce whose result arrives when it is asked for, and no earlier."""

    def __init__(self, tensor: torch.Tensor, real: Callable, args: tuple, kwargs: dict) -> None:
        self.tensor = tensor
        self.arriving = tensor.detach().clone()
        self.work = real(self.arriving, *args, **kwargs)

    def arrive(self) -> None:
        self.tensor.detach().copy_(self.arriving)

    def wait(self, *args: object) -> bool:
        done = self.work.wait(*args)
        self.arrive()
        return done

    def is_completed(self) -> bool:
        done = self.work.is_completed()
        if done:
            self.arrive()
        return done

    def get_future(self) -> torch.futures.Future:
        def arrived(future: torch.futures.Future) -> list[torch.Tensor]:
            future.wait()
            self.arrive()
            return [self.tensor]

        return self.work.get_future().then(arrived)


def slow_network(answer, wire, seed: int) -> tuple:
    """Train where each all-reduce that is not waited for leaves its tensor as it was. All ranks use
    all layers, so no gradient is zero."""
    real = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
        if not tensor.any():
            why = "A tensor's own hook comes before that, a post_accumulate_grad hook after it"
            raise Wrong(f"zeros are all-reduced: this step's gradient was not in .grad yet. {why}")
        if kwargs.get("async_op") or any(arg is True for arg in args):
            return Arriving(tensor, real, args, kwargs)
        return real(tensor, *args, **kwargs)

    with patch("torch.distributed.all_reduce", all_reduce):
        return train(answer, wire, [ALL] * dist.get_world_size(), seed)


def test_each_is_waited_for(answer: Path, seed: int) -> None:
    """finish() waits for each all-reduce: a network where nothing arrives before that"""
    what = " (its all-reduce arrives only if it is waited for)"
    compare(run(answer, slow_network, 2, seed), [ALL] * 2, seed, what)


def check_bytes(events: list[Event], step: int, rank: int) -> None:
    told = f"step {step}, rank {rank}"
    if other := {e.op for e in events} - {"all_reduce"}:
        raise Wrong(f"{told}: calls {', '.join(sorted(other))}; a step needs all-reduces only")
    model = Net(0)
    sent = sum(e.nbytes for e in events)
    P = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    if sent == 0 and step > 0:
        why = "is the object as __init__ left it when finish() returns?"
        raise Wrong(f"{told}: no all-reduce at all, though step 0 had some: {why}")
    if sent == P + model.readout.weight.nbytes:
        raise Wrong(f"{told}: the tied weight is one parameter, and is all-reduced twice")
    expect(sent, P, f"{told}: bytes all-reduced")


@pytest.mark.parametrize("n", [2, 3])
def test_bytes(answer: Path, seed: int, n: int) -> None:
    """Each gradient is all-reduced once a step, on {n} ranks"""
    for rank, (log, _) in enumerate(run(answer, train, n, [ALL] * n, seed)):
        for step, (_, events) in enumerate(log):
            check_bytes(events, step, rank)


@pytest.mark.parametrize("n", [2, 3, 4, 1])
def test_gradients(answer: Path, seed: int, n: int) -> None:
    """Gradients of one process, the same weights everywhere, on {n} ranks"""
    compare(run(answer, train, n, [ALL] * n, seed), [ALL] * n, seed)


class Crossed(nn.Module):
    """Seven parameters, no two of one size, and two layers used in another order than they stand
    in. So the gradients arrive in an order that is neither the module's nor its reverse.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)  # 12 + 4
        self.later = nn.Linear(7, 2)  # 14 + 2
        self.sooner = nn.Linear(4, 7)  # 28 + 7
        self.last = nn.Linear(2, 5, bias=False)  # 10

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.later(self.sooner(self.first(x))))


def cross(answer, wire, seed: int) -> list[list[Event]]:
    """Each step's events; before an answer hears of a gradient, the grader notes its name."""
    torch.manual_seed(seed)
    model = Crossed()
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: wire.note(name))
    wrapped = answer.DataParallel(model)
    log = []
    for _ in range(2):
        wire.events.clear()
        model.zero_grad()
        wrapped(torch.randn(5, 3)).square().sum().backward()
        wire.note("")
        wrapped.finish()
        log.append(list(wire.events))
    return log


@pytest.mark.parametrize("n", [2, 4])
def test_order(answer: Path, seed: int, n: int) -> None:
    """Each all-reduce starts as soon as its turn has come, on {n} ranks"""
    by_size = {p.nbytes: name for name, p in Crossed().named_parameters()}
    for rank, log in enumerate(run(answer, cross, n, seed)):
        for step, events in enumerate(log):
            check_order(events, by_size, f"step {step}, rank {rank}")


def check_order(events: list[Event], by_size: dict[int, str], told: str) -> None:
    """No gradient comes, and backward does not end, while an all-reduce could start: while its own
    gradient is there and those of all that go before it.
    """
    sizes = [e.nbytes for e in events if e.op == "all_reduce"]
    if strange := set(sizes) - set(by_size):
        raise Wrong(f"{told}: an all-reduce of {min(strange)} B; no gradient is of that size")
    turns = [by_size[nbytes] for nbytes in sizes]  # the order in which this answer reduces
    there = set()
    started = 0
    for event in events:
        if event.op == "all_reduce":
            started += 1
        elif event.op == "note":
            if started < len(turns) and there.issuperset(turns[: started + 1]):
                when = f"the gradient of {event.text} came" if event.text else "backward was over"
                said = f"{turns[started]} was ready, but its all-reduce had not started when {when}"
                raise Wrong(f"{told}: {said} (this answer's order: {', '.join(turns)})")
            there.add(event.text)
    last = max(i for i, event in enumerate(events) if event.text)
    early = sum(event.op == "all_reduce" for event in events[:last])
    if early < len(turns) - 2:  # Crossed.first has two
        said = f"{early} of {len(turns)} all-reduces had started when the last gradient came"
        raise Wrong(f"{told}: {said}: backward begins with the last layers, so reduce them first")


APART = {
    "some use another": [(0,), (1,), (0,)],
    "some use fewer": [(0, 1), (1,), (1, 0)],
    "nobody uses two of them": [(2,), (2,), (2,)],
}


@pytest.mark.parametrize("who", APART)
def test_layers_left_out(answer: Path, seed: int, who: str) -> None:
    """Layers left out in a step: {who}"""
    told = ", ".join(f"{list(used)} on rank {rank}" for rank, used in enumerate(APART[who]))
    told += "; in further steps the next ones; all-reduces are matched by their order alone"
    results = run(answer, train, 3, APART[who], seed)
    compare(results, APART[who], seed, f" (layers used: {told})")
    for rank, (log, _) in enumerate(results):
        check_bytes(log[-1][1], STEPS - 1, rank)
