"""Grader of 21: shares, one process's weights, calls and elements, their order, what is whole."""

import gc
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course.grading import Event, Wrong, expect, grade, same

D = 7  # 1, 7 and 11 are divided by none of 2, 3, 4
WIDTHS = (31, 37, 41, 43, 47, 53)
FROZEN = {1: ("down",), 3: ("up", "down", "spare")}  # of units, by layer; unit 3 is frozen whole
STEPS = 3
# Float64, numbers below 10: 3 steps of sums of up to 53 terms through 6 units and over 4 ranks.
ATOL = 3 * 6 * 4 * 53 * 10 * 2**-53


class Layers(nn.Module):
    """A unit: two layers, after one that is never used. Says when it computes."""

    def __init__(self, number: int, told: list) -> None:
        super().__init__()
        self.number = number
        self.told = told
        self.spare = nn.Linear(D, 1, bias=False)
        self.up = nn.Linear(D, WIDTHS[number])
        self.down = nn.Linear(WIDTHS[number], D)
        for name in FROZEN.get(number, ()):
            getattr(self, name).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for say in self.told:
            say(self.number)
        return x + self.down(torch.tanh(self.up(x)))


def units_of(seed: int, told: list | None = None) -> list[Layers]:
    torch.manual_seed(seed)
    told = [] if told is None else told
    return [Layers(number, told).double() for number in range(len(WIDTHS))]


def sizes(number: int) -> tuple[int, int]:
    """Trained and frozen elements of a unit."""
    count = {True: 0, False: 0}
    for p in units_of(0)[number].parameters():
        count[p.requires_grad] += p.numel()
    return count[True], count[False]


def shares(number: int, n: int) -> tuple[int, int]:
    trained, frozen = sizes(number)
    return -(-trained // n), -(-frozen // n)


def batch(seed: int, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + 10 * rank + step)
    return torch.randn(2, D, generator=generator, dtype=torch.float64)


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def flat(parameters: list[torch.Tensor]) -> torch.Tensor:
    parts = [p.detach().flatten() for p in parameters]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def kinds(unit: nn.Module) -> dict[str, torch.Tensor]:
    trained = [p for p in unit.parameters() if p.requires_grad]
    frozen = [p for p in unit.parameters() if not p.requires_grad]
    return {"trained": flat(trained), "frozen": flat(frozen)}


def alive() -> int:
    """Elements of all tensors that were made since gc.freeze() and that a variable holds."""
    gc.collect()
    storages = {}
    for tensor in gc.get_objects():
        if issubclass(type(tensor), torch.Tensor) and tensor.dim() > 0:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes() // 8
    return sum(storages.values())


def hold(answer, wire, seed: int) -> list:
    """Each unit's shares, and the elements left in its own parameters."""
    gc.freeze()
    units = units_of(seed)
    model = answer.ZeRO3(units)
    elements = alive()
    held = []
    for k, unit in enumerate(units):
        left = sum(p.untyped_storage().nbytes() // 8 for p in unit.parameters())
        for kind, share in (("trained", model.trained[k]), ("frozen", model.frozen[k])):
            behind = share.untyped_storage().nbytes() // 8
            if behind > share.numel():
                raise Wrong(
                    f"unit {k}: its share of what is {kind} has {share.numel()} elements, and "
                    f"keeps {behind} alive: it is a view of the whole unit"
                )
        held.append((copy_of(model.trained[k]), copy_of(model.frozen[k]), left))
    names = [name for name, _ in model.named_parameters()]
    other = answer.ZeRO3([unit.float() for unit in units_of(seed)])
    for k in range(len(units)):
        for kind, share in (("trained", other.trained[k]), ("frozen", other.frozen[k])):
            if len(share) > 0 and share.dtype != torch.float32:
                told = f"its share of what is {kind} is of {share.dtype}, and the unit of float32"
                raise Wrong(f"unit {k}: {told}")
    return [held, names, elements]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_shares(answer: Path, seed: int, n: int) -> None:
    """Each of {n} ranks holds its share, and nothing else"""
    most = sum(sum(shares(k, n)) for k in range(len(WIDTHS))) + 100  # a few numbers more
    for rank, (held, names, elements) in enumerate(grade(answer, hold, n, seed)):
        for k, unit in enumerate(units_of(seed)):
            told = f"rank {rank}, unit {k}"
            for kind, share in (("trained", held[k][0]), ("frozen", held[k][1])):
                whole = kinds(unit)[kind]
                length = -(-len(whole) // n)
                padded = torch.cat([whole, whole.new_zeros(n * length - len(whole))])
                due = padded[rank * length : (rank + 1) * length]
                expect(len(share), length, f"{told}: elements of its share of what is {kind}")
                if length > 0:
                    same(share, due, f"{told}: share of what is {kind}")
            expect(held[k][2], 0, f"{told}: elements still in the unit's own parameters")
        expect(names, [f"trained.{k}" for k in range(len(WIDTHS))], "the model's parameters")
        if elements > most:
            raise Wrong(f"rank {rank}: {elements:,} elements are held, {most:,} at most are due")


def train(answer, wire, seed: int, micro_batches: int) -> tuple[list, torch.Tensor]:
    """Steps of SGD, after a forward without gradients; returns what each unit's share of the
    trained elements is at the end, and the gradient of the first step's last input."""
    model = answer.ZeRO3(units_of(seed))
    with torch.no_grad():
        model(batch(seed, dist.get_rank(), 0))
    inputs = []
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for x in batch(seed, dist.get_rank(), step).chunk(micro_batches):
            x = x.clone().requires_grad_(step == 0)
            (loss_of(model(x)) / micro_batches).backward()
            inputs.append(x)
        optimizer.step()
    return [copy_of(share) for share in model.trained], inputs[micro_batches - 1].grad


def first_gradient(seed: int, rank: int, micro_batches: int) -> torch.Tensor:
    """What one process finds for that input of this rank."""
    x = batch(seed, rank, 0).chunk(micro_batches)[-1].clone().requires_grad_()
    (loss_of(nn.Sequential(*units_of(seed))(x)) / micro_batches).backward()
    return x.grad


def alone(seed: int, n: int, lr: float = 0.1, known: bool = False) -> list[torch.Tensor]:
    """What one process is left with, on all batches; if `known`, as if means were sums."""
    model = nn.Sequential(*units_of(seed))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(n):
            (loss_of(model(batch(seed, rank, step))) / (1 if known else n)).backward()
        optimizer.step()
    return [kinds(unit)["trained"] for unit in model]


@pytest.mark.parametrize(("n", "micro_batches"), [(1, 1), (2, 1), (3, 2), (4, 1)])
def test_training(answer: Path, seed: int, n: int, micro_batches: int) -> None:
    """Weights after 3 steps are one process's: {n} ranks, micro-batches: {micro_batches}"""
    told = grade(answer, train, n, seed, micro_batches)
    expected = alone(seed, n)
    summed = alone(seed, n, known=True)
    start = alone(seed, n, lr=0.0)
    for k, due in enumerate(expected):
        if len(due) == 0:
            continue
        got = torch.cat([shares_of_rank[k] for shares_of_rank, _ in told])[: len(due)]
        known = {"gradients are the sum over ranks": summed[k]} if n > 1 else {}
        known["it has not moved"] = start[k]
        same(got, due, f"unit {k}, its shares put together", ATOL, known)
    for rank, (_, gradient) in enumerate(told):
        due = first_gradient(seed, rank, micro_batches)
        same(gradient, due, f"rank {rank}: gradient of the model's input", ATOL)


def watch(answer, wire, seed: int) -> tuple[list[Event], list[Event]]:
    """The calls and the computations of a forward, and of its backward, in their order."""
    model = answer.ZeRO3(units_of(seed, [lambda number: wire.note(str(number))]))
    wire.events.clear()
    loss = loss_of(model(batch(seed, dist.get_rank(), 0)))
    forward = list(wire.events)
    wire.events.clear()
    loss.backward()
    return forward, list(wire.events)


def names_of(events: list[Event], n: int) -> list[str]:
    """Each event in words: "gather 2", "compute 2", "scatter 2"; units are told by their sizes."""
    gathered = {}
    scattered = {}
    for k in range(len(WIDTHS)):
        trained, frozen = shares(k, n)
        gathered[8 * n * (trained + frozen)] = k
        scattered[8 * n * trained] = k
        scattered.setdefault(8 * n * (trained + frozen), f"{k} with what is frozen")
    words = []
    for event in events:
        if event.op == "note":
            words.append(f"compute {event.text}")
        elif event.op == "all_gather" and event.nbytes in gathered:
            words.append(f"gather {gathered[event.nbytes]}")
        elif event.op == "reduce_scatter" and event.nbytes in scattered:
            words.append(f"scatter {scattered[event.nbytes]}")
        else:
            words.append(f"{event.op} of {event.nbytes // 8} elements, which no unit has")
    return words


def due_forward(last: int) -> list[str]:
    words = ["gather 0"]
    for k in range(last + 1):
        if k < last:
            words.append(f"gather {k + 1}")
        words.append(f"compute {k}")
    return words


def due_backward(last: int, n: int) -> list[str]:
    words = [f"gather {last}"]
    for k in range(last, -1, -1):
        if k > 0:
            words.append(f"gather {k - 1}")
        words.append(f"compute {k}")
        if shares(k, n)[0] > 0:
            words.append(f"scatter {k}")
    return words


@pytest.mark.parametrize("n", [2, 4])
def test_order(answer: Path, seed: int, n: int) -> None:
    """One gather per unit and pass, before its neighbor computes: {n} ranks"""
    last = len(WIDTHS) - 1
    for rank, (forward, backward) in enumerate(grade(answer, watch, n, seed)):
        pairs = (("forward", forward, due_forward(last)), ("backward", backward, None))
        for name, events, due in pairs:
            got = names_of(events, n)
            due = due_backward(last, n) if due is None else due
            for at, word in enumerate(due):
                came = got[at] if at < len(got) else "nothing more"
                if came != word:
                    so_far = ", ".join(due[max(0, at - 3) : at]) or "nothing"
                    raise Wrong(f"rank {rank}, {name}: after {so_far}: expected {word}, got {came}")
            if len(got) > len(due):
                raise Wrong(f"rank {rank}, {name}: nothing more was due, got {got[len(due)]}")


def stay(answer, wire, seed: int) -> dict[str, torch.Tensor]:
    """Rank 1 does not begin its gather before that of rank 0 has returned."""
    model = answer.ZeRO3(units_of(seed))
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        model.gather(2)
        store.set("the gather of rank 0 has returned", "")
    else:
        try:
            store.wait(["the gather of rank 0 has returned"], timedelta(seconds=15))
        except dist.DistStoreError:
            raise Wrong("gather waits for the other ranks: start it, and return at once") from None
        model.gather(2)
    model.gather(2)  # it is under way
    model.gather(-1)
    model.gather(len(WIDTHS))
    made = [event.op for event in wire.calls()]
    expect(
        made, ["all_gather"], "calls of gather, for unit 2 twice, unit -1 and one after the last"
    )
    return {name: copy_of(p) for name, p in model.whole(2).items()}


def test_waiting(answer: Path, seed: int) -> None:
    """A gather returns at once, and whole waits for it"""
    due = dict(units_of(seed)[2].named_parameters())
    for rank, got in enumerate(grade(answer, stay, 2, seed, quiet=20)):
        expect(sorted(got), sorted(due), f"rank {rank}: parameters of unit 2")
        for name, p in due.items():
            same(got[name], p.detach(), f"rank {rank}: {name} of unit 2, whole")


def weigh(answer, wire, seed: int) -> list[tuple[str, int, int]]:
    """(when, elements alive beyond what was there, at most so many), as units compute and after."""
    found = []
    told = []
    model = answer.ZeRO3(units_of(seed, told))
    gc.collect()
    gc.freeze()

    def look(when: str, bound: int) -> None:
        """gloo's threads may hold a buffer for a moment: once, give them time to let go of it."""
        least = alive()
        patience = 100 if all(elements <= limit for _, elements, limit in found) else 0
        while least > bound and patience > 0:
            time.sleep(0.05)
            least = min(least, alive())
            patience -= 1
        found.append((when, least, bound))

    n = dist.get_world_size()
    told.append(lambda number: look(f"while unit {number} computes", allowed(number, n)))
    loss_of(model(batch(seed, dist.get_rank(), 0))).backward()
    look("after backward", gradients(n))
    return found


def gradients(n: int) -> int:
    """Elements of all shares' gradients."""
    return sum(shares(k, n)[0] for k in range(len(WIDTHS)))


def allowed(number: int, n: int) -> int:
    """Elements of this unit and its larger neighbor, of all shares' gradients, of activations."""
    whole = [n * sum(shares(k, n)) for k in range(len(WIDTHS))]
    neighbors = [whole[k] for k in (number - 1, number + 1) if 0 <= k < len(WIDTHS)]
    return whole[number] + max(neighbors) + gradients(n) + 40 * 2 * D


def test_memory(answer: Path, seed: int) -> None:
    """Two units are whole at a time, and none after backward, on 4 ranks"""
    total = sum(4 * sum(shares(k, 4)) for k in range(len(WIDTHS)))
    for rank, found in enumerate(grade(answer, weigh, 4, seed, deadline=40)):
        for when, elements, bound in found:
            if elements > bound:
                due = "the shares' gradients"
                if when != "after backward":
                    due = "it, its neighbor, gradients and activations"
                raise Wrong(
                    f"rank {rank}: {elements:,} elements are alive {when}; {due} are {bound:,} at "
                    f"most, and all units together {total:,}"
                )
