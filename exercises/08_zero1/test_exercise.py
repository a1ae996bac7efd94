"""Grader of 08: who owns what, weights to the bit, live bytes of state, bytes sent."""

import contextlib
import gc
import inspect
import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD, Adagrad, AdamW
from torch.optim.lr_scheduler import LambdaLR

from course.grading import Wrong, expect, grade, same
from course.wire import InOrder, NotedWait

ZERO = ("torch.distributed.optim.ZeroRedundancyOptimizer.__init__",)
SHAPES = {"bias": (5,), "embedding": (11, 6), "gain": (1,), "frozen": (30, 9), "up": (6, 7)}
SHAPES |= {"shift": (7,), "down": (7, 5)}
SHAPES |= {f"gain {k}": (k,) for k in (2, 3, 4, 8, 9, 10, 12, 13)}  # a set of so many has any order
P = sum(4 * torch.Size(shape).numel() for name, shape in SHAPES.items() if name != "frozen")
LARGEST = 4 * 66
STEPS = 4
DECAYED = "embedding", "up", "down", "frozen"
HOW = {  # the class, its defaults, and what the second group has of its own besides lr
    "SGD": (SGD, {"lr": 0.1, "momentum": 0.9}, {"momentum": 0.5}),
    "AdamW": (AdamW, {"lr": 0.1, "betas": (0.8, 0.9)}, {"betas": (0.5, 0.7)}),
    "Adagrad": (Adagrad, {"lr": 0.1}, {"eps": 0.1}),
}
CHANGED = {
    "SGD": ("lr", "weight_decay", "momentum", "nesterov"),
    "AdamW": ("lr", "weight_decay", "betas", "eps"),
}


def parameters(seed: int, few: bool = False) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    every = {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator), name != "frozen")
        for name, shape in SHAPES.items()
    }
    return {name: every[name] for name in ("embedding", "bias", "frozen")} if few else every


def gradients(seed: int, step: int) -> dict[str, torch.Tensor | None]:
    """The same on all ranks, as averaged ones are; none for one weight in step 1."""
    generator = torch.Generator().manual_seed(100 * seed + step)
    grads = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return grads | {"frozen": None} | ({"up": None} if step == 1 else {})


def in_groups(params: dict[str, torch.nn.Parameter], how: str) -> list[dict]:
    """Two groups, each with settings of its own."""
    decayed = [p for name, p in params.items() if name in DECAYED]
    others = [p for name, p in params.items() if name not in DECAYED]
    own = HOW[how][2]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.01} | own]


def train(
    optimizer: torch.optim.Optimizer,
    params: dict,
    seed: int,
    changed: tuple[str, ...],
    seen: Callable[[int], None],
) -> None:
    """Four steps; after each, `seen(step)`, and settings that are to be `changed` change, as
    OneCycleLR and its like change them."""
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step)) if "lr" in changed else None
    for step in range(STEPS):
        grads = gradients(seed, step)
        for name, p in params.items():
            p.grad = grads[name]
        optimizer.step()
        seen(step)
        optimizer.zero_grad()
        if any(p.grad is not None for p in params.values()):
            raise Wrong(f"step {step}: zero_grad left gradients")
        if schedule:
            schedule.step()
        for group in optimizer.param_groups:
            if "weight_decay" in changed:
                group["weight_decay"] *= 2
            if "momentum" in changed:
                group["momentum"] *= 0.8
            if "betas" in changed:
                group["betas"] = tuple(0.9 * beta for beta in group["betas"])
            if "nesterov" in changed:
                group["nesterov"] = not group["nesterov"]
            if "eps" in changed:
                group["eps"] = 10 * group["eps"] + 0.01


def given(params: dict, how: str, few: bool) -> Iterator[torch.Tensor] | list[dict]:
    """What the optimizer is made of: as parameters() gives them, or in groups."""
    return iter(params.values()) if few else in_groups(params, how)


@contextlib.contextmanager
def waits_noted() -> Iterator[dict[int, dist.Work]]:
    """Within, the broadcasts that nobody has waited for yet."""
    pending = {}
    broadcast = dist.ProcessGroup.broadcast

    def noted(*args: object, **kwargs: object) -> dist.Work:
        work = broadcast(*args, **kwargs)
        pending[id(work)] = work
        return work

    wait = NotedWait(lambda work: pending.pop(id(work), None))
    with (
        patch.object(dist.ProcessGroup, "broadcast", noted),
        patch.object(dist.Work, "wait", wait),
    ):
        yield pending


def on_ranks(answer, wire, seed: int, how: str, changed: tuple[str, ...], few: bool) -> list:
    """Each step's weights and calls."""
    optimizer_class, defaults, _ = HOW[how]
    params = parameters(seed, few)
    lie = {name: p.data_ptr() for name, p in params.items()}
    log = []

    def seen(step: int) -> None:
        if not all(work.is_completed() for work in pending.values()):
            raise Wrong(f"step {step}: step came back before what it sends had arrived: wait")
        log.append(({name: p.detach().clone() for name, p in params.items()}, wire.calls()))
        wire.events.clear()
        for name, p in params.items():
            if p.data_ptr() != lie[name]:
                raise Wrong(f"step {step}: {name} lies in other memory now: update it in place")

    optimizer = answer.ZeRO1(given(params, how, few), optimizer_class, **defaults)
    _other = answer.ZeRO1([torch.nn.Parameter(torch.ones(3))], SGD, lr=1.0)  # which never steps
    wire.events = InOrder()
    with waits_noted() as pending:
        train(optimizer, params, seed, changed, seen)
    return log


def plain(
    seed: int, how: str, changed: tuple[str, ...], few: bool, kept: tuple[str, ...] | None = None
) -> list[dict[str, torch.Tensor]]:
    """The plain optimizer's weights, after each step; last of all those at the start. With `kept`,
    of a group's own settings only these count."""
    optimizer_class, defaults, _ = HOW[how]
    params = parameters(seed, few)
    log = []
    start = {name: p.detach().clone() for name, p in params.items()}

    def seen(step: int) -> None:
        log.append({name: p.detach().clone() for name, p in params.items()})

    groups = given(params, how, few)
    if kept is not None and not few:
        names = {"params", *kept}
        groups = [dict(pair for pair in group.items() if pair[0] in names) for group in groups]
    train(optimizer_class(groups, **defaults), params, seed, changed, seen)
    return [*log, start]


def mistaken(seed: int, how: str, changed: tuple[str, ...], few: bool) -> dict[str, list]:
    """What known mistakes make of the weights."""
    logs = {
        "groups had no settings of their own": plain(seed, how, changed, few, ()),
        "groups had no settings of their own but lr and weight_decay": plain(
            seed, how, changed, few, ("lr", "weight_decay")
        ),
    }
    for count in range(1, len(changed) + 1):
        for missed in itertools.combinations(changed, count):
            rest = tuple(name for name in changed if name not in missed)
            told = f"{' and '.join(missed)} had not changed in param_groups"
            logs[told] = plain(seed, how, rest, few)
    return logs


def compare(
    results: list, seed: int, how: str, changed: tuple[str, ...] = (), few: bool = False
) -> None:
    """All ranks' weights, after each step, with the plain optimizer's."""
    due = plain(seed, how, changed, few)
    wrong = mistaken(seed, how, changed, few)
    for step in range(STEPS):
        for rank, log in enumerate(results):
            for told, other in wrong.items():
                if unlike(due[step], other[step]) and not unlike(log[step][0], other[step]):
                    raise Wrong(f"after step {step}, weights on rank {rank} are as if {told}")
        for name, after in due[step].items():
            came = [log[step][0][name] for log in results]
            before = due[step - 1][name]
            stale = [r for r, w in enumerate(came) if torch.equal(w, before)]
            if stale and not torch.equal(before, after):
                told = f"after step {step}, {name} is what it was before on ranks {stale}"
                if len(stale) == len(came):
                    raise Wrong(f"{told}: its owner has not updated it, or a stale copy was sent")
                raise Wrong(f"{told}: its owner has to send it to all")
            for rank, got in enumerate(came):
                unused = ""
                if gradients(seed, step)[name] is None:
                    unused = " (it has no gradient in this step)"
                same(got, after, f"after step {step}, {name} on rank {rank}{unused}")


def unlike(ours: dict, theirs: dict) -> bool:
    return not all(torch.equal(ours[name], theirs[name]) for name in theirs)


DEALT = [100, 1] * 6, [9] * 3 + [1] * 9, [*range(1, 13)], [7], [50, 3, 3, 2, 40, 2]


def deal(answer, wire, n: int, lists: list[list[int]]) -> list:
    dealt = []
    for sizes in lists:
        given = [*sizes]
        dealt.append(answer.partition(given, n))
        if given != sizes:
            raise Wrong("partition has changed the list of sizes; it is the caller's")
    if dealt != [answer.partition([*sizes], n) for sizes in lists]:
        raise Wrong("partition, asked again, deals otherwise: ranks would not agree")
    return dealt


@pytest.mark.parametrize("n", [2, 3, 4])
def test_partition(answer: Path, seed: int, n: int) -> None:
    """Parameters are dealt out evenly, to {n} ranks"""
    draw = random.Random(seed)
    lists = [*DEALT]
    for _ in range(20):
        lists.append([draw.randint(1, 50) for _ in range(draw.randint(1, 30))])
    (dealt,) = grade(answer, deal, 1, n, lists, group=False)
    for sizes, owners in zip(lists, dealt, strict=True):
        told = f"partition({sizes}, {n})"
        whole = isinstance(owners, list) and len(owners) == len(sizes)
        if not (whole and all(type(owner) is int and owner in range(n) for owner in owners)):
            raise Wrong(f"{told}: expected {len(sizes)} ranks from 0 to {n - 1}, got {owners}")
        held = [sum(s for s, o in zip(sizes, owners, strict=True) if o == r) for r in range(n)]
        if max(held) > (bound := sum(sizes) / n + max(sizes)):
            told += f": no rank may hold over {bound:g} elements"
            raise Wrong(f"{told}; by rank they hold {held}")


@pytest.mark.parametrize("n", [2, 4])
def test_bytes(answer: Path, seed: int, n: int) -> None:
    """A step sends updated parameters, each at most once, on {n} ranks"""
    for rank, log in enumerate(grade(answer, on_ranks, n, seed, "SGD", (), False, forbid=ZERO)):
        for step, (_, calls) in enumerate(log):
            told = f"rank {rank}, step {step}"
            ops = {e.op for e in calls}
            if ops & {"all_reduce", "reduce_scatter", "reduce"}:
                raise Wrong(f"{told}: calls {', '.join(sorted(ops))}; gradients come averaged")
            if ops - {"broadcast"}:
                raise Wrong(f"{told}: calls {', '.join(sorted(ops))}; use broadcast")
            sent = sum(e.nbytes for e in calls)
            grads = gradients(seed, step)
            due = sum(grad.nbytes for grad in grads.values() if grad is not None)
            unused = [name for name, grad in grads.items() if grad is None]
            if sent > due:
                told += f": expected {due:,} B of broadcasts at most, got {sent:,} B"
                raise Wrong(f"{told}; in this step there is no gradient of {', '.join(unused)}")


WEIGHED = [(2, "SGD"), (3, "AdamW"), (4, "AdamW"), (2, "Adagrad"), (1, "SGD")]


@pytest.mark.parametrize(("n", "how"), WEIGHED)
def test_weights(answer: Path, seed: int, n: int, how: str) -> None:
    """The plain optimizer's weights, to the bit: {how}, {n} ranks"""
    compare(grade(answer, on_ranks, n, seed, how, (), False, forbid=ZERO), seed, how)


def storages(tensors: list[torch.Tensor]) -> dict[int, int]:
    """Bytes at each address; single numbers, as Adam's count of steps, are left out."""
    return {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors if t.dim())}


def hold(answer, wire, seed: int, how: str, alone: bool = False) -> tuple[int, int]:
    """Bytes of tensors, weights and gradients apart: the most at the end of any optimizer's step,
    before its hooks can free something, and those at the end. With `alone` each parameter has a
    group of its own. (A copy kept as bytes or as a list of
    numbers is not seen: this finds mistakes, not deceit.)"""
    optimizer_class, defaults, _ = HOW[how]
    params = parameters(seed)
    grads = gradients(seed, 0)
    alive = []
    given = storages([*params.values(), *(g for g in grads.values() if g is not None)])
    gc.freeze()  # what there is already need not be searched for tensors

    def live() -> int:
        gc.collect()
        found = storages([t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)])
        return sum(nbytes for at, nbytes in found.items() if at not in given)

    class Counted(optimizer_class):
        @torch.no_grad()
        def step(self) -> None:
            inspect.unwrap(optimizer_class.step)(self)  # without the wrapper that calls the hooks
            alive.append(live())

    every = [{"params": [p]} for p in params.values()]
    zero = answer.ZeRO1(every if alone else in_groups(params, how), Counted, **defaults)
    for _ in range(2):
        for name, p in params.items():
            p.grad = grads[name]
        zero.step()
        zero.zero_grad()
    if not alive:
        raise Wrong("in two steps of ZeRO1 no optimizer of the class that it was given has stepped")
    time.sleep(0.2)  # until gloo's threads have let go of what they sent
    return max(alive), live()


# Adagrad makes its state before the first step.
HELD = [(2, "AdamW"), (3, "AdamW"), (4, "AdamW"), (1, "AdamW"), (3, "Adagrad")]


@pytest.mark.parametrize(("n", "how"), HELD)
def test_state(answer: Path, seed: int, n: int, how: str) -> None:
    """Bytes of {how}'s state: one copy over {n} ranks, evenly"""
    check_state(grade(answer, hold, n, seed, how, forbid=ZERO), n, how)


def test_groups_of_one(answer: Path, seed: int) -> None:
    """The same where each parameter is a group of its own, over 3 ranks"""
    held = grade(answer, hold, 3, seed, "AdamW", True, forbid=ZERO)
    if sum(end > 0 for _, end in held) == 1:
        told = "one rank holds all of the state: deal out the parameters of all groups together"
        raise Wrong(f"with one parameter per group {told}")
    check_state(held, 3, "AdamW")


def check_state(held: list[tuple[int, int]], n: int, how: str) -> None:
    """One copy of the state over all ranks, and none above its share plus the largest."""
    each = {"AdamW": 2, "Adagrad": 1}[how]  # tensors as large as the weights
    if n > 1 and min(end for _, end in held) >= each * P:
        told = f"every rank holds {each * P:,} B, a whole copy"
        raise Wrong(f"this optimizer shards nothing: {told}")
    for rank, (most, end) in enumerate(held):
        bound = each * (P // n + LARGEST)
        if most > end and most > bound:
            raise Wrong(f"rank {rank} holds {most:,} B of state in a step, {end:,} B after it: "
                        "state of others is made, then thrown away")  # fmt: skip
        if end > bound:
            told = f"rank {rank} holds {end:,} B of state; no more than {bound:,} B are due"
            raise Wrong(f"{told}. Is something dealt out that has no state, like the frozen?")
    expect(sum(end for _, end in held), each * P, "bytes of state on all ranks together")


@pytest.mark.parametrize("how", ["AdamW", "SGD"])
def test_settings_change(answer: Path, seed: int, how: str) -> None:
    """Schedulers and the caller change the groups' settings: {how}, 3 ranks"""
    changed = CHANGED[how]
    results = grade(answer, on_ranks, 3, seed, how, changed, False, forbid=ZERO)
    compare(results, seed, how, changed)


def test_few_parameters(answer: Path, seed: int) -> None:
    """No groups, and two parameters for 4 ranks: some own nothing"""
    results = grade(answer, on_ranks, 4, seed, "AdamW", (), True, forbid=ZERO)
    compare(results, seed, "AdamW", few=True)
