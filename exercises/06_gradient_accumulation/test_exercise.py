"""Grader of 06: steps, order of events, bytes, gradients, the same bits on all ranks."""

from itertools import chain
from pathlib import Path
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course.grading import Wrong, expect, grade, same

# Samples in each micro-batch, by rank: in each group of three, all ranks hold equally many
SIZES = [1, 4, 2, 3, 3, 1, 5], [2, 2, 3, 1, 1, 5, 5], [3, 1, 3, 2, 4, 1, 5], [1, 1, 5, 5, 1, 1, 5]
EPOCHS = 2


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


P = sum(p.nbytes for p in net(0).parameters())


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - 2 * target).square().sum(1).mean()  # not the same if they are exchanged


def data(rank: int, sizes: list[int], seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Other samples on every rank and in every place."""
    random = torch.Generator().manual_seed(seed + rank)
    draw = torch.randn(sum(sizes), 5, dtype=torch.float64, generator=random) * (rank + 1)
    return [(rows[:, :3], rows[:, 3:]) for rows in draw.split(sizes)]


def groups(batches: list, k: int) -> list[list]:
    return [batches[i : i + k] for i in range(0, len(batches), k)]


def train(answer, wire, sizes: list[list[int]], k: int, seed: int) -> tuple:
    """Return the events, the gradients that each step found, and the weights at the end."""
    rank = dist.get_rank()
    found = []
    module = net(seed + rank)
    model = DistributedDataParallel(module)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def note(what: str) -> None:
        wire.note(what if model.require_backward_grad_sync else f"{what} alone")

    def before_step(*_: object) -> None:
        params = module.named_parameters()
        found.append({s: None if p.grad is None else p.grad.clone() for s, p in params})

    module.register_forward_pre_hook(lambda _, given: note(f"forward {len(given[0])}"))
    first = next(module.parameters())  # its gradient comes last
    first.register_post_accumulate_grad_hook(lambda p: note("backward"))
    sgd.register_step_pre_hook(before_step)
    sgd.register_step_post_hook(lambda *_: wire.note("step"))
    for p in module.parameters():
        p.grad = torch.ones_like(p)  # as something before may have left them
    batches = data(rank, sizes[rank], seed)
    given = [id(batch) for batch in batches]
    wire.events.clear()
    for _ in range(EPOCHS):
        answer.train_epoch(model, sgd, loss_fn, batches, k)
        if [id(batch) for batch in batches] != given:
            raise Wrong("the list of micro-batches was changed; the next epoch needs it again")
    return wire.events, found, module.state_dict()


def by_step(events: list) -> list[list]:
    """The events of each step; what follows the last one counts as a step that never came."""
    steps = [[]]
    for event in events:
        if event.text == "step":
            steps.append([])
        else:
            steps[-1].append(event)
    return steps if steps[-1] else steps[:-1]


@pytest.mark.parametrize("k", [3, 10])
def test_steps(answer: Path, seed: int, k: int) -> None:
    """7 micro-batches in groups of {k}: a step for each group, one micro-batch at a time"""
    sizes = SIZES[:2] if k == 3 else SIZES[:1] * 2
    for rank, (events, _, _) in enumerate(grade(answer, train, 2, sizes, k, seed)):
        notes = []
        seen = []
        for step in by_step(events):
            notes.append([e.text for e in step if e.op == "note"])
            seen.append([int(s.split()[1]) for s in notes[-1] if "forward" in s])
        due = groups(sizes[rank], k) * EPOCHS
        expect(seen, due, f"rank {rank}: samples in each forward, step by step, {EPOCHS} epochs")
        if not events[-1].text == "step":
            raise Wrong(f"rank {rank}: no step after the last backward")
        for number, step in enumerate(notes):
            ways = [s.split()[0] for s in step]
            if ways != ["forward", "backward"] * (len(ways) // 2):
                told = "each micro-batch goes forward, then backward, before the next: otherwise"
                raise Wrong(f"rank {rank}, step {number}: {told} {k} graphs are alive at once")


@pytest.mark.parametrize("n", [2, 4])
def test_bytes(answer: Path, seed: int, n: int) -> None:
    """One all-reduce of the gradients per step, on {n} ranks"""
    for rank, (events, _, _) in enumerate(grade(answer, train, n, SIZES[:n], 3, seed)):
        check_bytes(events, rank)


def check_bytes(events: list, rank: int) -> None:
    for number, step in enumerate(by_step(events)):
        told = f"rank {rank}, step {number}"
        ways = [e.text.split() for e in step if e.op == "note"]
        pairs = zip(ways[::2], ways[1::2], strict=False)
        if any("alone" in b and "alone" not in f for f, b in pairs):
            raise Wrong(f"{told}: backward is inside no_sync(), its forward is not: DDP syncs")
        if other := {e.op for e in step} - {"note", "all_reduce", "broadcast"}:
            raise Wrong(f"{told}: calls {', '.join(sorted(other))}; DDP does all that is needed")
        sent = sum(e.nbytes for e in step if e.op == "all_reduce")
        expect(sent, P, f"{told}, micro-batches: {len(ways) // 2}: bytes all-reduced")
        ops = ["forward" if "forward" in e.text else e.op for e in step]
        if "forward" in ops[ops.index("all_reduce") :]:
            raise Wrong(f"{told}: it all-reduces before the last micro-batch has had its turn")


Gradients = dict[str, torch.Tensor]


def one_process(
    n: int, sizes: list[list[int]], k: int, seed: int
) -> list[tuple[Gradients, list[dict]]]:
    """Each step's gradients: of one large batch; and by rank, those of known mistakes."""
    model = net(seed)
    log = []
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    split = [groups(data(rank, sizes[rank], seed), k) for rank in range(n)]
    for _ in range(EPOCHS):
        for parts in zip(*split, strict=True):
            due = gradients(model, [*chain.from_iterable(parts)])
            known = mistakes(model, parts)
            if log:
                before = log[-1][0]
                both = {name: due[name] + before[name] for name in due}
                known["this step's and the one before's together"] = both
            else:
                both = {name: due[name] + 1 for name in due}
                known["this step's, and what lay in .grad before the epoch"] = both
            own = "that of this rank's samples alone"
            log.append((due, [known | {own: gradients(model, group)} for group in parts]))
            for name, p in model.named_parameters():
                p.grad = due[name]
            sgd.step()
    return log


def gradients(model: nn.Module, batches: list) -> Gradients:
    """Of the mean over all samples of these micro-batches."""
    x, y = (torch.cat(part) for part in zip(*batches, strict=True))
    names, params = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss_fn(model(x), y), params), strict=True))


def mistakes(model: nn.Module, parts: tuple[list, ...]) -> dict[str, Gradients]:
    """What the ranks' groups would make if micro-batches were put together wrongly."""

    def weighed(weights: list[list[float]]) -> Gradients:
        total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for group, row in zip(parts, weights, strict=True):
            for batch, weight in zip(group, row, strict=True):
                for name, grad in gradients(model, [batch]).items():
                    total[name] += weight * grad / len(parts)
        return total

    m = len(parts[0])
    ends = [len(group[-1][0]) / sum(len(x) for x, _ in group) for group in parts]
    return {
        "the mean of micro-batches' means; their sizes differ": weighed([[1 / m] * m] * len(parts)),
        "the sum of micro-batches' means; their sizes differ": weighed([[1] * m] * len(parts)),
        "that of the last micro-batch alone": weighed([[0] * (m - 1) + [end] for end in ends]),
    }


def compare(results: list, sizes: list[list[int]], k: int, seed: int) -> None:
    for number, (due, by_rank) in enumerate(one_process(len(results), sizes, k, seed)):
        # some 100 additions, in another order; their errors grow a hundredfold in 6 steps at most
        atol = 100 * 100 * 2**-53 * max(1.0, *(float(grad.abs().max()) for grad in due.values()))
        for rank, (_, found, _) in enumerate(results):
            told = f"rank {rank}, step {number}"
            expect(len(found) > number, True, f"{told}: was there a step")
            for name, grad in found[number].items():
                known = {f"it is {how}": grads[name] for how, grads in by_rank[rank].items()}
                what = f"{told}, gradient of {name}{times(grad, due[name])}"
                same(grad, due[name], what, atol, instead=known)
    for rank, (_, _, end) in enumerate(results):
        for name, t in end.items():
            same(t, results[0][2][name], f"at the end, {name} of rank {rank} next to rank 0's")


def times(got: torch.Tensor | None, due: torch.Tensor) -> str:
    """Say so if all is right up to one factor."""
    if got is None:
        return ""
    factor = float((got * due).sum() / (due * due).sum())
    near = torch.allclose(got, factor * due, 1e-9, 0) and abs(factor - 1) > 1e-6
    return f" ({factor:.6g} times what is due)" if near else ""


@pytest.mark.parametrize("n", [2, 3, 4, 1])
def test_gradients(answer: Path, seed: int, n: int) -> None:
    """Gradients of one large batch, the same weights everywhere, on {n} ranks"""
    compare(grade(answer, train, n, SIZES[:n], 3, seed), SIZES, 3, seed)


@pytest.mark.parametrize("k", [1, 7, 10])
def test_other_groups(answer: Path, seed: int, k: int) -> None:
    """The same with 7 micro-batches in groups of {k}"""
    results = grade(answer, train, 2, SIZES[:1] * 2, k, seed)
    compare(results, SIZES[:1] * 2, k, seed)
    for rank, (events, _, _) in enumerate(results):
        check_bytes(events, rank)


class Held:
    """A tensor that autograd keeps for backward."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def held_before(answer, wire, seed: int) -> list[int]:
    """How many tensors are kept for other micro-batches' backward as each goes forward."""
    model = DistributedDataParallel(net(seed))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = WeakSet()
    found = []

    def keep(tensor: torch.Tensor) -> Held:
        held = Held(tensor)
        kept.add(held)
        return held

    model.module.register_forward_pre_hook(lambda *_: found.append(len(kept)))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda held: held.tensor):
        answer.train_epoch(model, sgd, loss_fn, data(dist.get_rank(), SIZES[0], seed), 3)
    return found


def test_activations(answer: Path, seed: int) -> None:
    """Activations of one micro-batch at a time"""
    for rank, found in enumerate(grade(answer, held_before, 2, seed)):
        told = f"rank {rank}: as a micro-batch goes forward, tensors kept for others' backward"
        expect(found, [0] * len(SIZES[0]), told)
