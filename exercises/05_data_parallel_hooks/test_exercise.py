"""Grader of 05: gradients, weights to the bit, bytes, order of events; frozen, tied, left out."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from course.grading import Wrong, expect, grade, same

DDP = ("torch.nn.parallel.DistributedDataParallel.__init__",)
ALL = (0, 1, 2)
STEPS = 3
HANDED = "A post_accumulate_grad hook is handed the parameter; its gradient is parameter.grad"


class Net(nn.Module):
    """Tied weights, a frozen layer, buffers, two dtypes, and layers that a step may leave out."""

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

    def forward(self, token_B: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        x_BD = self.frozen(self.embed(token_B)) + self.shift
        for i in used:
            x_BD = x_BD + self.layers[i](x_BD).tanh()
        return self.readout((x_BD * self.gain).float())


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Five tokens and what follows them, others on every rank and in every step."""
    token_B = (torch.arange(5) * (rank + 2) + step * (rank + 1)) % 7
    return token_B, (token_B * token_B + rank) % 7


def one_process(uses: list[tuple[int, ...]]) -> list[tuple[list, dict]]:
    """Each step's gradients: each rank's own, and their mean, which the optimizer follows."""
    model = Net(0)
    log = []
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sgd = torch.optim.SGD(trained.values(), lr=0.1)
    for step in range(STEPS):
        own = []
        for rank, used in enumerate(uses):
            token_B, next_B = batch(rank, step)
            loss = cross_entropy(model(token_B, used), next_B)
            grads = torch.autograd.grad(loss, [*trained.values()], materialize_grads=True)
            own.append(dict(zip(trained, grads, strict=True)))
        for name, p in trained.items():
            p.grad = sum(grads[name] for grads in own) / len(uses)
        log.append((own, {name: p.grad for name, p in trained.items()}))
        sgd.step()
    return log


def wrap(answer, wire) -> dict[str, torch.Tensor]:
    model = Net(dist.get_rank())
    answer.DataParallel(model)
    return model.state_dict()


def train(answer, wire, uses: list) -> tuple:
    """Return each step's gradients and events, and the state at the end."""
    rank = dist.get_rank()
    log = []
    model = Net(rank)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for p in trained.values():
        p.register_post_accumulate_grad_hook(lambda p: wire.note("gradient"))
    wrapped = answer.DataParallel(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        wire.events.clear()
        sgd.zero_grad()
        before = [p.detach().clone() for p in model.parameters()]
        token_B, next_B = batch(rank, step)
        cross_entropy(wrapped(token_B, uses[rank]), next_B).backward()
        wrapped.finish()
        if not all(map(torch.equal, before, model.parameters())):
            raise Wrong(
                f"step {step}: backward changed the weights, as averaging them does. {HANDED}"
            )
        grads = {s: None if p.grad is None else p.grad.clone() for s, p in trained.items()}
        log.append((grads, list(wire.events)))
        sgd.step()
    return log, model.state_dict()


def compare(results: list, uses: list, what: str = "") -> None:
    """Every step's gradients with one process's; all ranks' weights with each other's."""
    n = len(uses)
    atol = 100 * 2**-24  # some 100 additions of numbers below 1, in float32
    for step, (own, mean) in enumerate(one_process(uses)):
        for rank, (log, _) in enumerate(results):
            for name, grad in log[step][0].items():
                told = f"step {step}, rank {rank}, gradient of {name}{what}"
                named = {"still this rank's own, no mean": own[rank][name]}
                named[f"the sum over {n} ranks, {n} times the mean"] = n * mean[name]
                for mistake, known in named.items():
                    distinct = (known - mean[name]).abs().max() > 10 * atol
                    if distinct and grad is not None and torch.allclose(grad, known, 0, atol):
                        raise Wrong(f"{told}: it is {mistake}")
                same(grad, mean[name], told, atol)
    for rank, (_, end) in enumerate(results):
        for name, t in end.items():
            same(t, results[0][1][name], f"after {STEPS} steps, {name} of rank {rank} beside 0's")


def test_start(answer: Path) -> None:
    """All start from rank 0's parameters and buffers, on 3 ranks"""
    for rank, start in enumerate(grade(answer, wrap, 3, forbid=DDP)):
        for name, due in Net(0).state_dict().items():
            kind = "buffer" if name in ("shift", "count") else "parameter"
            same(start[name], due, f"rank {rank}, {kind} {name} once the module is wrapped")


def late(answer, wire) -> None:
    """Rank 1 begins its backward when rank 0's is over, and a while after."""
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    wrapped = answer.DataParallel(Net(rank))
    token_B, next_B = batch(rank, 0)
    loss = cross_entropy(wrapped(token_B, ALL), next_B)
    if rank == 1:
        looks = (time.sleep(0.01) or store.check(["backward"]) for _ in range(500))
        if not any(looks):
            raise Wrong("rank 0's backward waits for rank 1's: start the all-reduce and go on")
        time.sleep(0.5)
        if store.check(["finish"]):
            raise Wrong("finish() came back on rank 0 before rank 1 had sent anything: wait!")
    loss.backward()
    if rank == 0:
        store.set("backward", "")
    wrapped.finish()
    if rank == 0:
        store.set("finish", "")


def test_waiting(answer: Path) -> None:
    """Backward waits for nobody, finish() for everybody"""
    grade(answer, late, 2, forbid=DDP)


def check_bytes(events: list, told: str) -> None:
    if other := {e.op for e in events} - {"all_reduce", "note"}:
        raise Wrong(f"{told}: calls {', '.join(sorted(other))}; a step needs all-reduces only")
    model = Net(0)
    sent = sum(e.nbytes for e in events)
    P = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    if sent == P + model.readout.weight.nbytes:
        raise Wrong(f"{told}: the tied weight is one parameter, and is all-reduced twice")
    expect(sent, P, f"{told}: bytes all-reduced")


@pytest.mark.parametrize("n", [2, 3])
def test_bytes(answer: Path, n: int) -> None:
    """Each gradient is all-reduced once a step, on {n} ranks"""
    for rank, (log, _) in enumerate(grade(answer, train, n, [ALL] * n, forbid=DDP)):
        for step, (_, events) in enumerate(log):
            check_bytes(events, f"step {step}, rank {rank}")


@pytest.mark.parametrize("n", [2, 3, 4, 1])
def test_gradients(answer: Path, n: int) -> None:
    """Gradients of one process, the same weights everywhere, on {n} ranks"""
    compare(grade(answer, train, n, [ALL] * n, forbid=DDP), [ALL] * n)


@pytest.mark.parametrize("n", [2, 4])
def test_order(answer: Path, n: int) -> None:
    """The first all-reduce starts before the last gradient exists, on {n} ranks"""
    for rank, (log, _) in enumerate(grade(answer, train, n, [ALL] * n, forbid=DDP)):
        for step, (_, events) in enumerate(log):
            ops = [e.op for e in events if e.nbytes or e.op == "note"]
            if "note" not in ops[ops.index("all_reduce") :]:
                told = f"the first all-reduce came after the last of {ops.count('note')} gradients"
                raise Wrong(f"step {step}, rank {rank}: {told}: nothing overlaps")


APART = {
    "some use another": [(0,), (1,), (0,)],
    "some use fewer": [(0, 1), (1,), (1, 0)],
    "nobody uses it": [(2,), (2,), (2,)],
}


@pytest.mark.parametrize("who", APART)
def test_layers_left_out(answer: Path, who: str) -> None:
    """Layers left out in a step: {who}"""
    told = ", ".join(f"{list(used)} on rank {rank}" for rank, used in enumerate(APART[who]))
    told += "; all-reduces are matched by their order alone"
    results = grade(answer, train, 3, APART[who], forbid=DDP)
    compare(results, APART[who], f" (layers used: {told})")
    for rank, (log, _) in enumerate(results):
        check_bytes(log[-1][1], f"last step, rank {rank}")
