"""Grader of 11: the order, one process's gradients, messages, idle slots, micro-batches alive."""

import contextlib
import itertools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from course.grading import Wrong, expect, grade, same
from course.wire import NotedWait

ROWS = 11
M = 6  # micro-batches, where one number is enough
WIDTHS = [3, 5, 2, 4, 3]  # stage s maps rows of WIDTHS[s] numbers to WIDTHS[s + 1]
FORBIDDEN = ["torch.distributed.pipelining.PipelineStage.__init__"]
# Float64, numbers below 10: four layers there and back, sums of up to 11 rows of 5 numbers, in
# another order than one process's.
ATOL = 8 * 55 * 10 * 2**-53
PATIENCE = 6  # seconds; a stage that has not done by then what it should, waits for us


# The order


def ask(answer, wire, cases: list[tuple]) -> list:
    return [answer.zero_bubble(*case) for case in cases]


def test_zero_bubble(answer: Path) -> None:
    """The order of passes: 1 to 5 stages, 1 to 9 micro-batches"""
    pairs = list(itertools.product(range(1, 6), range(1, 10)))
    cases = []
    for p, m in pairs:
        cases += [(stage, p, m) for stage in range(p)]
    (orders,) = grade(answer, ask, 1, cases, group=False)
    named = {}
    for (stage, p, m), order in zip(cases, orders, strict=True):
        named[stage, p, m] = names(order, f"zero_bubble({stage}, {p}, {m})", m)
    for p, m in pairs:
        check_order([named[stage, p, m] for stage in range(p)], m)


def names(order: object, of: str, m: int) -> list[str]:
    """["F0", "B0", "W0", ...]; refused unless each pass of each micro-batch is there, in turn."""
    pairs = isinstance(order, list) and all(isinstance(a, tuple) and len(a) == 2 for a in order)
    if not pairs or not all(kind in ("F", "B", "W") for kind, _ in order):
        raise Wrong(
            f'{of}: expected a list like [("F", 0), ("B", 0), ("W", 0)], got {order!r}'[:300]
        )
    if strange := [k for _, k in order if type(k) is not int]:
        raise Wrong(f"{of}: expected the number of a micro-batch, got {strange[0]!r}")
    told = [f"{kind}{k}" for kind, k in order]
    due = sorted(f"{kind}{k}" for kind, k in itertools.product("FBW", range(m)))
    if sorted(told) != due:
        raise Wrong(f"{of}: expected each of {' '.join(due)} once, got {' '.join(told)}")
    for k in range(m):
        if not told.index(f"F{k}") < told.index(f"B{k}") < told.index(f"W{k}"):
            raise Wrong(f"{of}: F{k}, B{k} and W{k} do not come in this order: {' '.join(told)}")
    return told


def check_order(orders: list[list[str]], m: int) -> None:
    """Refuse orders that idle more slots than ZB-H1, or hold more than p micro-batches."""
    p = len(orders)
    shown = "".join(f"\n  rank {r}: {' '.join(order)}" for r, order in enumerate(orders))
    told = f"{p} stages, {m} micro-batches" if p > 1 else f"1 stage, {m} micro-batches"
    for rank, order in enumerate(orders):
        alive = most = 0
        for name in order:
            alive += {"F": 1, "B": 0, "W": -1}[name[0]]
            most = max(most, alive)
        if most > min(p, m):
            gpipe = "; all forwards come first (GPipe)" if order[:m] == forwards(m) else ""
            late = f"expected at most {min(p, m)}, got {most}{gpipe}"
            raise Wrong(f"{told}, rank {rank}: micro-batches alive: {late}{shown}")
    idle = idle_slots(orders)
    due = 2 * (p - 1) - min(m - 1, p - 1)
    if idle > due and all(order[:2] == ["F0", "B0"] for order in orders):
        alone = "one micro-batch at a time goes there and back, while all other stages wait"
        raise Wrong(f"{told}: {alone}: each idles {idle} slots instead of {due}{shown}")
    if idle > due:
        at_once = all(one_pass(order, m) for order in orders)
        why = "; every W comes right after its B, though nobody waits for it" if at_once else ""
        raise Wrong(f"{told}: idle slots of each stage: expected {due}, got {idle}{why}{shown}")
    for rank, order in enumerate(orders):
        mine = [name for name in order if name[0] != "W"]
        if mine != (ought := one_forward_one_backward(rank, p, m)):
            come = f"expected forwards and Bs as in 1F1B, {' '.join(ought)}, got {' '.join(mine)}"
            raise Wrong(f"{told}, rank {rank}: {come}{shown}")


def one_forward_one_backward(stage: int, p: int, m: int) -> list[str]:
    """Its forwards and Bs, in order."""
    ahead = min(p - 1 - stage, m)
    order = forwards(ahead)
    for k in range(m):
        if ahead + k < m:
            order.append(f"F{ahead + k}")
        order.append(f"B{k}")
    return order


def one_pass(order: list[str], m: int) -> bool:
    """Whether each W stands next to its B."""
    shown = " ".join(order)
    return all(f"B{k} W{k}" in shown or f"W{k} B{k}" in shown for k in range(m))


def forwards(m: int) -> list[str]:
    return [f"F{k}" for k in range(m)]


def idle_slots(orders: list[list[str]]) -> int:
    """Of each stage, if every pass begins as soon as it can and takes one slot."""
    ends: dict[tuple[int, str], int] = {}
    clock = [0] * len(orders)
    todo = [list(order) for order in orders]
    while any(todo):
        left = sum(map(len, todo))
        for s, passes in enumerate(todo):
            while passes:
                name = passes[0]
                before = s + {"F": -1, "B": 1, "W": -len(orders)}[name[0]]
                if 0 <= before < len(orders) and (before, name) not in ends:
                    break
                start = max(clock[s], ends.get((before, name), 0))
                clock[s] = ends[s, passes.pop(0)] = start + 1
        if left == sum(map(len, todo)):
            shown = "".join(f"\n  rank {r}: {' '.join(order)}" for r, order in enumerate(orders))
            raise Wrong(f"stages wait for each other in a circle:{shown}")
    return max(clock) - max(map(len, orders))


# A step


class Saved:
    """A tensor that autograd keeps for the backward passes of micro-batch k."""

    def __init__(self, k: int, tensor: torch.Tensor) -> None:
        self.k, self.tensor = k, tensor


class Mark(torch.autograd.Function):
    """Lets a tensor pass, and says when its gradient is there."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, tell: Callable[[], None]) -> torch.Tensor:
        ctx.tell = tell
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.tell()
        return grad, None


class Layer(nn.Module):
    """What one stage computes."""

    def __init__(self, s: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(10 * seed + s)
        self.linear = nn.Linear(WIDTHS[s], WIDTHS[s + 1], dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Stage(Layer):
    """Takes down its passes, and how many micro-batches autograd, and its caller, keep at
    each forward. With `gate`, a pass waits until a neighbor has begun what it could do before.
    """

    def __init__(self, s: int, seed: int, wire, p: int, m: int, gate: bool) -> None:
        super().__init__(s, seed)
        self.s, self.wire, self.p, self.m, self.gate = s, wire, p, m, gate
        self.store = dist.distributed_c10d._get_default_store()
        self.saved: weakref.WeakSet = weakref.WeakSet()
        self.passed: list[list[StorageWeakRef]] = []  # of each micro-batch, its input and output
        self.alive: list[int] = []
        self.kept: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k = len(self.alive)
        self.begins(f"F{k}")
        if k == 0 and self.p - self.s > 2:
            ahead = min(self.p - self.s, self.m - 1)
            told = f"rank {self.s - 1} does not begin F{ahead} while rank {self.s} is in F0: it "
            self.wait_until(
                self.s - 1, f"F{ahead}", f"{told}waits for its earlier activations to be taken"
            )
        done = k - (self.p - 1 - self.s)  # the next pass of this stage is its B
        if done > self.s and k < self.m:
            told = f"rank {self.s + 1} does not begin W{done - self.s - 1} before rank {self.s} "
            told += f"takes B{done}'s gradient: it waits for its message to be taken"
            self.wait_until(self.s + 1, f"W{done - self.s - 1}", told)
        with saved_tensors_hooks(lambda tensor: self.keep(Saved(k, tensor)), lambda s: s.tensor):
            x_marked = Mark.apply(x, lambda: self.input_gradient(k))
            weight = Mark.apply(self.linear.weight, lambda: self.begins(f"W{k}"))
            y = torch.tanh(F.linear(x_marked, weight, self.linear.bias))
        own = [y, x] if self.s > 0 else [y]  # stage 0's inputs are the caller's
        self.passed.append([StorageWeakRef(t.untyped_storage()) for t in own])
        self.alive.append(len({saved.k for saved in self.saved}))
        self.kept.append(sum(map(any_alive, self.passed)))
        return y

    def keep(self, saved: Saved) -> Saved:
        self.saved.add(saved)
        return saved

    def input_gradient(self, k: int) -> None:
        self.begins(f"B{k}")
        ahead = min(k + self.p - self.s, self.m - 1)
        told = f"rank {self.s - 1} does not begin F{ahead} before B{k}'s gradient comes"
        self.wait_until(self.s - 1, f"F{ahead}", f"{told}: it could work, and waits")

    def begins(self, name: str) -> None:
        self.wire.note(name)
        self.store.set(f"stage {self.s}, {name}", "begun")

    def wait_until(self, stage: int, name: str, told: str) -> None:
        if not self.gate or not 0 <= stage < self.p:
            return
        until = time.monotonic() + PATIENCE
        while not self.store.check([f"stage {stage}, {name}"]):
            if time.monotonic() > until:
                raise Wrong(told)
            time.sleep(0.005)


def any_alive(storages: list[StorageWeakRef]) -> bool:
    return not all(storage.expired() for storage in storages)


@contextlib.contextmanager
def dropped_sends_refused() -> Iterator[None]:
    """Within, a send whose Work is gone before anyone has waited for it is refused."""
    send = dist.ProcessGroup.send
    pending: dict[int, weakref.ref] = {}

    def look() -> None:
        if any(work() is None for work in pending.values()):
            told = "the Work of a send is gone, and nobody has waited for it"
            raise Wrong(f"{told}: its message may never arrive")

    def send_seen(*args: object) -> dist.Work:
        look()
        work = send(*args)
        pending[id(work)] = weakref.ref(work)
        return work

    wait = NotedWait(lambda work: pending.pop(id(work), None))
    with patch.object(dist.ProcessGroup, "send", send_seen), patch.object(dist.Work, "wait", wait):
        yield
    look()


def batch(seed: int, p: int, m: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Micro-batches, and what is to come of them; of unlike numbers of rows."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (ROWS, WIDTHS[0]), (ROWS, WIDTHS[p])
    x, due = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    return list(x.tensor_split(m)), list(due.tensor_split(m))


def step(answer, wire, seed: int, m: int, gate: bool = False) -> dict:
    """One step; what came of it, what the stage saw, and the order that the answer promised."""
    rank = dist.get_rank()
    p = dist.get_world_size()
    xs, dues = batch(seed, p, m)
    like = [torch.empty(len(x), WIDTHS[rank], dtype=x.dtype, device="meta") for x in xs]
    stage = Stage(rank, seed, wire, p, m, gate)

    def loss_of(y: torch.Tensor, k: int) -> torch.Tensor:
        return F.mse_loss(y, dues[k])

    with dropped_sends_refused():
        loss = answer.pipeline_step(stage, like if rank else xs, loss_of)
    wire.only("send", "recv")
    if any(not a.equal(b) for a, b in zip(xs, batch(seed, p, m)[0], strict=True)):
        raise Wrong("the inputs were changed; they are the caller's")
    if any(x.requires_grad for x in xs):
        raise Wrong("requires_grad of the inputs was set; they are the caller's")
    return {
        "loss": loss.detach() if isinstance(loss, torch.Tensor) else loss,
        "grads": [parameter.grad for parameter in stage.parameters()],
        "events": wire.events,
        "alive": max(stage.alive, default=0),
        "kept": max(stage.kept, default=0),
        "promised": names(answer.zero_bubble(rank, p, m), "zero_bubble", m),
    }


def one_process(seed: int, p: int, m: int) -> tuple[torch.Tensor, list, dict[str, list]]:
    """The loss, every stage's gradients, and those that known mistakes lead to."""
    xs, dues = batch(seed, p, m)
    stages = [Layer(s, seed) for s in range(p)]
    model = nn.Sequential(*stages)

    def gradients(loss: torch.Tensor) -> list:
        return [torch.autograd.grad(loss, s.parameters(), retain_graph=True) for s in stages]

    losses = [F.mse_loss(model(x), due) for x, due in zip(xs, dues, strict=True)]
    wrong = {
        "the sum of the micro-batches' mean losses": gradients(sum(losses)),
        "the mean of the micro-batches' mean losses, few rows or many": gradients(sum(losses) / m),
        "the last micro-batch alone": gradients(losses[-1] * len(xs[-1]) / ROWS),
    }
    loss = F.mse_loss(model(torch.cat(xs)), torch.cat(dues))
    return loss.detach(), gradients(loss), wrong


@pytest.mark.parametrize(("n", "m"), [(2, M), (4, M), (3, 2), (4, 2), (1, M), (3, 1)])
def test_values(answer: Path, seed: int, n: int, m: int) -> None:
    """One process's gradients and loss, {n} stage(s), {m} micro-batches"""
    got = grade(answer, step, n, seed, m, forbid=FORBIDDEN)
    (loss, grads, wrong) = one_process(seed, n, m)
    for rank, mine in enumerate(got):
        for index, (g, due) in enumerate(zip(mine["grads"], grads[rank], strict=True)):
            for mistake, theirs in wrong.items():
                if (
                    g is not None
                    and g.dtype == due.dtype
                    and torch.allclose(g, theirs[rank][index])
                    and not torch.allclose(due, theirs[rank][index])
                ):
                    raise Wrong(f"rank {rank}: this is the gradient of {mistake}")
            same(g, due, f"rank {rank}: gradient of the {('weight', 'bias')[index]}", ATOL)
        if rank < n - 1:
            expect(mine["loss"], None, f"rank {rank}: returned, away from the last stage")
        else:
            same(mine["loss"], loss, f"rank {rank}: the loss", ATOL)


@pytest.mark.parametrize("n", [2, 4])
def test_messages(answer: Path, seed: int, n: int) -> None:
    """Activations go one cut onward, gradients one cut back, nothing else, {n} stages"""
    for rank, mine in enumerate(grade(answer, step, n, seed, M, forbid=FORBIDDEN)):
        sends = [event for event in mine["events"] if event.op == "send"]
        for to, cut in (rank + 1, rank + 1), (rank - 1, rank):
            if 0 <= to < n:
                toward = [e for e in sends if e.peer == to]
                whom = f"rank {rank} to rank {to}"
                expect(len(toward), M, f"{whom}: messages")
                expect(sum(e.nbytes for e in toward), 8 * ROWS * WIDTHS[cut], f"{whom}: bytes")
        others = set(Counter(e.peer for e in sends)) - {rank - 1, rank + 1}
        expect(sorted(others), [], f"rank {rank}: sends to ranks that are no neighbors")


def passes(events: list, rank: int) -> list[str]:
    """What the stage did, in order. Rank 0's B computes nothing: it is a message that comes."""
    order = []
    for event in events:
        if event.op == "note":
            order.append(event.text)
        elif rank == 0 and event.op == "recv":
            order.append(f"B{sum(name[0] == 'B' for name in order)}")
    return order


@pytest.mark.parametrize("n", [2, 4])
def test_order(answer: Path, seed: int, n: int) -> None:
    """The step works in the order of zero_bubble, and holds little, {n} stages"""
    got = grade(answer, step, n, seed, M, forbid=FORBIDDEN)
    orders = [passes(mine["events"], rank) for rank, mine in enumerate(got)]
    for rank, order in enumerate(orders):
        kinds = {"F": "forward passes", "B": "gradients of the input", "W": "gradients of weights"}
        for kind, called in kinds.items():
            expect(sum(name[0] == kind for name in order), M, f"rank {rank}: {called}")
        promised = got[rank]["promised"]
        if order != promised:
            told = f"pipeline_step works in another order than zero_bubble({rank}, {n}, {M}) says"
            if one_pass(order, M):
                told += "; each W comes next to its B: is it one backward pass?"
            lines = f"\n  says:  {' '.join(promised)}\n  works: {' '.join(order)}"
            raise Wrong(f"rank {rank}: {told}{lines}")
    check_order(orders, M)
    for rank, mine in enumerate(got):
        if mine["alive"] > n:
            told = f"at most {n} micro-batches, got {mine['alive']}"
            raise Wrong(f"rank {rank}: autograd is to hold activations of {told}")
        if mine["kept"] > n + 1:  # a variable may still name the one before
            told = f"expected at most {n}, got {mine['kept']}"
            kept = "micro-batches whose input or output is kept, by the Work of a send perhaps"
            raise Wrong(f"rank {rank}: {kept}: {told}")


@pytest.mark.parametrize("n", [2, 4])
def test_in_flight(answer: Path, seed: int, n: int) -> None:
    """No stage waits while it could still work, {n} stages"""
    grade(answer, step, n, seed, M, True, forbid=FORBIDDEN)
