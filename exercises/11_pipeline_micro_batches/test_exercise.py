"""Grader of 11: one process's gradients, messages, idle slots, micro-batches alive."""

import time
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from course.grading import Wrong, expect, grade, same

ROWS = 11
WIDTHS = [3, 5, 2, 4, 3]  # stage s maps rows of WIDTHS[s] numbers to WIDTHS[s + 1]
FORBIDDEN = ["torch.distributed.pipelining.PipelineStage.__init__"]
# Float64, numbers below 10: four layers there and back, sums of up to 11 rows of 5 numbers, in
# another order than one process's.
ATOL = 8 * 55 * 10 * 2**-53
PATIENCE = 6  # seconds; a stage that has not done by then what it should, waits for us


class Saved:
    """A tensor that autograd keeps for the backward pass of micro-batch k."""

    def __init__(self, k: int, tensor: torch.Tensor) -> None:
        self.k, self.tensor = k, tensor


class Passing(torch.autograd.Function):
    """Says when the gradient of a stage's output arrives, before anything is done with it."""

    @staticmethod
    def forward(ctx, y, arrives):
        ctx.arrives = arrives
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):
        ctx.arrives()
        return grad, None


class Layer(nn.Module):
    """What one stage computes."""

    def __init__(self, s: int) -> None:
        super().__init__()
        torch.manual_seed(s)
        self.linear = nn.Linear(WIDTHS[s], WIDTHS[s + 1], dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Stage(Layer):
    """Takes down when it works, and how many micro-batches autograd keeps just then. With `gate`,
    a backward pass waits until the stage before has done all that 1F1B lets it do before."""

    def __init__(self, s: int, wire, p: int, m: int, gate: bool) -> None:
        super().__init__(s)
        self.s, self.wire, self.p, self.m, self.gate = s, wire, p, m, gate
        self.store = dist.distributed_c10d._get_default_store()
        self.saved = weakref.WeakSet()
        self.alive = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k = len(self.alive)
        self.wire.note(f"F{k}")
        self.store.set(f"stage {self.s}, F{k}", "begun")
        with saved_tensors_hooks(lambda tensor: self.keep(Saved(k, tensor)), lambda s: s.tensor):
            y = super().forward(x)
        self.alive.append(len({saved.k for saved in self.saved}))
        return Passing.apply(y, lambda: self.backward_begins(k))

    def keep(self, saved: Saved) -> Saved:
        self.saved.add(saved)
        return saved

    def backward_begins(self, k: int) -> None:
        self.wire.note(f"B{k}")
        if self.gate and self.s > 0:
            ahead = min(k + self.p - self.s, self.m - 1)
            before = self.s - 1
            until = time.monotonic() + PATIENCE
            while not self.store.check([f"stage {before}, F{ahead}"]):
                if time.monotonic() > until:
                    told = f"rank {before} does not begin F{ahead} before B{k}'s gradient comes"
                    raise Wrong(f"{told}: it could work, and waits")
                time.sleep(0.005)


def batch(p: int, m: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Micro-batches, and what is to come of them; of unlike numbers of rows."""
    generator = torch.Generator().manual_seed(10 * p + m)
    sizes = (ROWS, WIDTHS[0]), (ROWS, WIDTHS[p])
    x, due = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    return list(x.tensor_split(m)), list(due.tensor_split(m))


def step(answer, wire, m: int, gate: bool = False) -> tuple:
    """One step; returns the loss, gradients, events, and micro-batches alive after each forward."""
    rank = dist.get_rank()
    p = dist.get_world_size()
    xs, dues = batch(p, m)
    like = [torch.empty(len(x), WIDTHS[rank], dtype=x.dtype, device="meta") for x in xs]
    stage = Stage(rank, wire, p, m, gate)

    def loss_of(y: torch.Tensor, k: int) -> torch.Tensor:
        return F.mse_loss(y, dues[k])

    loss = answer.pipeline_step(stage, like if rank else xs, loss_of)
    wire.only("send", "recv")
    if any(not a.equal(b) for a, b in zip(xs, batch(p, m)[0], strict=True)):
        raise Wrong("the inputs were changed; they are the caller's")
    loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
    grads = [parameter.grad for parameter in stage.parameters()]
    return loss, grads, wire.events, stage.alive


def one_process(p: int, m: int) -> tuple[torch.Tensor, list, dict[str, list]]:
    """The loss, every stage's gradients, and those that known mistakes lead to."""
    xs, dues = batch(p, m)
    stages = [Layer(s) for s in range(p)]
    model = nn.Sequential(*stages)

    def gradients(loss: torch.Tensor) -> list:
        return [torch.autograd.grad(loss, s.parameters(), retain_graph=True) for s in stages]

    losses = [F.mse_loss(model(x), due) for x, due in zip(xs, dues, strict=True)]
    wrong = {
        "the sum of the micro-batches' mean losses": gradients(sum(losses)),
        "the mean of the micro-batches' mean losses, few rows or many": gradients(sum(losses) / m),
        "the last micro-batch alone": gradients(losses[-1]),
    }
    loss = F.mse_loss(model(torch.cat(xs)), torch.cat(dues))
    return loss.detach(), gradients(loss), wrong


@pytest.mark.parametrize("n", [2, 3, 4, 1])
@pytest.mark.parametrize("m", [6, 2])
def test_values(answer: Path, n: int, m: int) -> None:
    """One process's gradients and loss, {n} stage(s), {m} micro-batches"""
    got = grade(answer, step, n, m, forbid=FORBIDDEN)
    (loss, grads, wrong) = one_process(n, m)
    for rank, (loss_got, mine, _, _) in enumerate(got):
        for index, (g, due) in enumerate(zip(mine, grads[rank], strict=True)):
            for mistake, theirs in wrong.items():
                if g is not None and torch.allclose(g, theirs[rank][index]):
                    raise Wrong(f"rank {rank}: this is the gradient of {mistake}")
            same(g, due, f"rank {rank}: gradient of the {('weight', 'bias')[index]}", ATOL)
        if rank < n - 1:
            expect(loss_got, None, f"rank {rank}: returned, away from the last stage")
        else:
            got_loss = torch.tensor(loss_got) if isinstance(loss_got, float) else loss_got
            got_loss = got_loss.double() if isinstance(got_loss, torch.Tensor) else got_loss
            same(got_loss, loss, f"rank {rank}: the loss", ATOL)


@pytest.mark.parametrize("n", [2, 4])
def test_messages(answer: Path, n: int) -> None:
    """Activations go one cut onward, gradients one cut back, nothing else, {n} stages"""
    m = 6
    for rank, (_, _, events, _) in enumerate(grade(answer, step, n, m, forbid=FORBIDDEN)):
        sends = [event for event in events if event.op == "send"]
        for to, cut in (rank + 1, rank + 1), (rank - 1, rank):
            if 0 <= to < n:
                mine = [e for e in sends if e.peer == to]
                whom = f"rank {rank} to rank {to}"
                expect(len(mine), m, f"{whom}: messages")
                expect(sum(e.nbytes for e in mine), 8 * ROWS * WIDTHS[cut], f"{whom}: bytes")
        others = set(Counter(e.peer for e in sends)) - {rank - 1, rank + 1}
        expect(sorted(others), [], f"rank {rank}: sends to ranks that are no neighbours")


@pytest.mark.parametrize("n", [2, 3, 4])
def test_order(answer: Path, n: int) -> None:
    """Few idle slots, few micro-batches alive, {n} stages"""
    m = 6
    got = grade(answer, step, n, m, forbid=FORBIDDEN)
    orders = []
    for _, _, events, _ in got:
        orders.append([e.text for e in events if e.op == "note"])
    shown = "".join(f"\n  rank {r}: {' '.join(order)}" for r, order in enumerate(orders))
    for rank, order in enumerate(orders):
        for kind, passes in ("F", "forward passes"), ("B", "backward passes"):
            expect(sum(name[0] == kind for name in order), m, f"rank {rank}: {passes}")
    idle = idle_slots(orders, m)
    one_at_a_time = 3 * m * (n - 1)
    if max(idle) == one_at_a_time:
        told = "one micro-batch at a time goes there and back, while all other stages wait"
        raise Wrong(f"{told}: each idles {max(idle)} slots instead of {3 * (n - 1)}{shown}")
    for rank, (_, _, _, alive) in enumerate(got):
        if max(alive) > n - rank:
            told = "; all forwards come first (GPipe)" if max(alive) == m else ""
            most = f"expected at most {n - rank}, got {max(alive)}{told}"
            raise Wrong(f"rank {rank}: micro-batches alive: {most}{shown}")
    for rank, slots in enumerate(idle):
        if slots != (due := 3 * (n - 1)):
            raise Wrong(f"rank {rank}: idle slots: expected {due}, got {slots}{shown}")


def idle_slots(orders: list[list[str]], m: int) -> list[int]:
    """Of each stage, if every pass begins as soon as it can: F takes one slot, B two."""
    ends: dict[tuple[int, str], int] = {}
    clock = [0] * len(orders)
    todo = [list(order) for order in orders]
    while any(todo):
        left = sum(map(len, todo))
        for s, passes in enumerate(todo):
            while passes:
                name = passes[0]
                before = s - 1 if name[0] == "F" else s + 1
                if 0 <= before < len(orders) and (before, name) not in ends:
                    break
                start = max(clock[s], ends.get((before, name), 0))
                clock[s] = ends[s, passes.pop(0)] = start + {"F": 1, "B": 2}[name[0]]
        if left == sum(map(len, todo)):
            raise Wrong(f"stages work on their micro-batches in unlike order: {orders}")
    return [max(clock) - 3 * m for _ in orders]


@pytest.mark.parametrize("n", [2, 4])
def test_in_flight(answer: Path, n: int) -> None:
    """No stage waits for a gradient while it could still work, {n} stages"""
    grade(answer, step, n, 6, True, forbid=FORBIDDEN)
