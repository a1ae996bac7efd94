"""Grader of 07: who gets what, in many cases; fairness, orders, drop_last; a real DataLoader."""

import random
from collections import Counter
from functools import partial
from itertools import chain, pairwise, product
from math import ceil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from course.grading import Wrong, expect, grade

LENGTHS = (13, 7, 12, 5, 3, 2, 1, 0, 101)  # and one more, drawn
EPOCHS = range(6)
Case = tuple[int, bool, int]  # length, shuffle, epoch

run = partial(grade, forbid=("torch.utils.data.DistributedSampler.__init__",))


def sampler(answer, length: int, **how):
    made = answer.FairSampler(length, dist.get_world_size(), dist.get_rank(), **how)
    if isinstance(made, DistributedSampler):
        raise Wrong("the answer is a DistributedSampler, which it is to do without")
    return made


def lengths(seed: int) -> tuple[int, ...]:
    """Those that are always asked, and one that nobody can know before."""
    return (*LENGTHS, 20 + seed % 71)


def draw(answer, wire, drop_last: bool, seed: int) -> dict[Case, list[int]]:
    """What this rank gets in each case."""
    torch.manual_seed(dist.get_rank())  # as a training script may: no two ranks draw alike
    drawn = {}
    for length in lengths(seed):
        for shuffle in (False, True):
            it = sampler(answer, length, shuffle=shuffle, seed=seed, drop_last=drop_last)
            for epoch in EPOCHS:
                it.set_epoch(epoch)
                says = len(it)
                mine = [*it]
                if other := [i for i in mine if type(i) is not int]:
                    case = told((length, shuffle, epoch))
                    raise Wrong(f"{case}: it yields {other[0]!r}; a sample's number is an int")
                drawn[length, shuffle, epoch] = mine
                for said in (says, len(it)):
                    if said != len(mine):
                        why = f"it yields {len(mine)} samples, but len(sampler) is {said}"
                        raise Wrong(f"{told((length, shuffle, epoch))}: {why}")
    wire.only()
    return drawn


def told(case: Case) -> str:
    length, shuffle, epoch = case
    return f"length {length}, {'shuffled' if shuffle else 'in order'}, epoch {epoch}"


def together(ranks: list[dict[Case, list[int]]], case: Case) -> list[int]:
    """The order that was dealt: place after place, rank after rank."""
    return list(chain(*zip(*(drawn[case] for drawn in ranks), strict=True)))


def few(samples: set[int]) -> str:
    return ", ".join(map(str, sorted(samples)[:5])) + (", ..." if len(samples) > 5 else "")


def unfair(times: Counter, length: int) -> str:
    """How two samples differ by more than one, if any do."""
    most, least = (pick(range(length), key=lambda i: times[i]) for pick in (max, min))
    if times[most] - times[least] <= 1:
        return ""
    return f"sample {most} came {times[most]}x, sample {least} {times[least]}x"


@pytest.mark.parametrize("n", [3, 2, 4, 7, 1])
def test_each_epoch(answer: Path, seed: int, n: int) -> None:
    """No sample is lost, and every rank gets as many, on {n} ranks"""
    ranks = run(answer, draw, n, False, seed)
    for case in ranks[0]:
        length, shuffle, _ = case
        got = [len(drawn[case]) for drawn in ranks]
        if min(got) < max(got):
            raise Wrong(f"{told(case)}: ranks get {got} samples: one with more waits for others")
        expect(got[0], ceil(length / n), f"{told(case)}: samples on each rank")
        times = Counter(chain(*(drawn[case] for drawn in ranks)))
        if strange := set(times) - set(range(length)):
            raise Wrong(f"{told(case)}: there is no sample {few(strange)}")
        if lost := set(range(length)) - set(times):
            why = "; do all ranks draw the same order?" if shuffle else ""
            raise Wrong(f"{told(case)}: no rank gets sample {few(lost)}{why}")
        if length and (how := unfair(times, length)):
            raise Wrong(f"{told(case)}: the padding is to come from different samples: {how}")


def states() -> dict[str, object]:
    """What the program's own random numbers are drawn from."""
    return {
        "torch": torch.get_rng_state().tolist(),
        "Python": random.getstate(),
        "NumPy": repr(np.random.get_state()),
    }


def unmoved(before: dict[str, object], when: str = "") -> None:
    """Refuse an answer that has moved what others draw from."""
    for whose, state in states().items():
        if state != before[whose]:
            moved = f"{whose}'s global random numbers have moved{when}"
            raise Wrong(f"{moved}: draw from a Generator of your own")


def orders(answer, wire, seed: int) -> dict[str, list[int]]:
    torch.manual_seed(dist.get_rank())
    before = states()
    drawn = {}
    it = sampler(answer, 101, seed=seed)
    for epoch in EPOCHS:
        it.set_epoch(epoch)
        drawn[f"epoch {epoch}"] = [int(i) for i in it]
    drawn["epoch 5 again"] = [int(i) for i in it]
    after = sampler(answer, 101, seed=seed)
    after.set_epoch(5)
    drawn["epoch 5 after a restart"] = [int(i) for i in after]
    drawn["another seed"] = [int(i) for i in sampler(answer, 101, seed=seed + 7)]
    it = sampler(answer, 101)
    for epoch in (0, 1):
        it.set_epoch(epoch)
        drawn[f"epoch {epoch} with seed 0"] = [int(i) for i in it]
    unmoved(before)
    samples = iter(it)
    next(samples)
    unmoved(before, " while samples are still to come")  # dropout draws then, and augmentation
    return drawn


def test_orders(answer: Path, seed: int) -> None:
    """Shuffled anew by epoch and seed, by nothing else"""
    ranks = run(answer, orders, 3, seed)
    for rank, drawn in enumerate(ranks):
        first = drawn["epoch 0"]
        second = drawn["epoch 1"]
        if first == second:
            raise Wrong(f"rank {rank} has the same order in epochs 0 and 1: does epoch count?")
        if set(first) == set(second):
            raise Wrong(f"rank {rank} has the same samples in each epoch: shuffle, then deal")
        if drawn["another seed"] == first:
            seeds = f"seed {seed} and with seed {seed + 7}"
            raise Wrong(f"rank {rank} has the same order with {seeds}: does seed count?")
        if drawn["epoch 0 with seed 0"] == drawn["epoch 1 with seed 0"]:
            raise Wrong(f"rank {rank} has the same order in epochs 0 and 1 if the seed is 0")
        for when in ("again", "after a restart"):
            if drawn[f"epoch 5 {when}"] != drawn["epoch 5"]:
                why = "only seed and epoch are to decide it"
                raise Wrong(f"rank {rank} has another order in epoch 5 {when}: {why}")

    pairs = {"the dataset": {*pairwise(range(101))}}
    for epoch in EPOCHS:
        # of 100 pairs a new shuffle keeps 1 on average, and more than 10 once in 10**8 times
        order = chain(*zip(*(drawn[f"epoch {epoch}"] for drawn in ranks), strict=True))
        now = {*pairwise(order)}
        for when, before in pairs.items():
            if (kept := len(now & before)) > 10:
                same = f"{kept} of 100 pairs of neighbors are the same as in"
                raise Wrong(f"epoch {epoch} is not shuffled anew: {same} {when}")
        pairs[f"epoch {epoch}"] = now


def test_places(answer: Path, seed: int) -> None:
    """Rank r gets places r, r + n, r + 2n of the order; the padding stands behind it"""
    ranks = run(answer, draw, 3, False, seed)
    for case in ranks[0]:
        length, shuffle, _ = case
        order = together(ranks, case)[:length]
        if not shuffle:
            expect(order, [*range(length)], f"{told(case)}: the order put together again")
        elif len(set(order)) < length:
            raise Wrong(f"{told(case)}: samples come again before all have come: {order[:20]}")
    on_two = run(answer, draw, 2, False, seed)
    for case in ranks[0]:
        orders_of = [together(drawn, case)[: case[0]] for drawn in (ranks, on_two)]
        if orders_of[0] != orders_of[1]:
            why = "2 ranks have another order than 3; only seed and epoch count"
            raise Wrong(f"{told(case)}: {why}")


def far(answer, wire, seed: int) -> dict[Case, list[int]]:
    """What this rank gets in many epochs, each from a sampler of its own, as after a restart."""
    drawn = {}
    for length, shuffle, epoch in product((5, 7, 10), (False, True), range(40)):
        it = sampler(answer, length, shuffle=shuffle, seed=seed)
        it.set_epoch(epoch)
        drawn[length, shuffle, epoch] = [*it]
    return drawn


@pytest.mark.parametrize("n", [3, 4])
def test_over_epochs(answer: Path, seed: int, n: int) -> None:
    """Each epoch repeats others, until all have had their turn, on {n} ranks"""
    check_over_epochs(run(answer, draw, n, False, seed))
    check_over_epochs(run(answer, far, n, seed))


def check_over_epochs(ranks: list[dict[Case, list[int]]]) -> None:
    sums: dict[tuple[int, bool], Counter] = {}
    before = {}
    for length, shuffle, epoch in filter(lambda case: case[0], ranks[0]):
        case = length, shuffle, epoch
        now = Counter(chain(*(drawn[case] for drawn in ranks)))
        times = sums.setdefault((length, shuffle), Counter())
        times += now
        twice = {i for i in now if now[i] > min(now.values())}
        if how := unfair(times, length):
            if twice == before.get((length, shuffle)):
                how = f"the same as in epoch {epoch - 1} are repeated: {few(twice)}"
            raise Wrong(f"{told(case)}: in sum over epochs 0 to {epoch}: {how}")
        before[length, shuffle] = twice


@pytest.mark.parametrize("n", [3, 4])
def test_drop_last(answer: Path, seed: int, n: int) -> None:
    """drop_last: the last length % n of the order left out, none twice, on {n} ranks"""
    ranks = run(answer, draw, n, True, seed)
    padded = run(answer, draw, n, False, seed)
    for case in ranks[0]:
        length, shuffle, _ = case
        for rank, drawn in enumerate(ranks):
            expect(len(drawn[case]), length // n, f"{told(case)}: samples on rank {rank}")
        order = together(ranks, case)
        if twice := {i for i, times in Counter(order).items() if times > 1}:
            raise Wrong(f"{told(case)}: with drop_last none comes twice, but {few(twice)} did")
        if not shuffle:
            due = [*range(length // n * n)]
            expect(order, due, f"{told(case)}: the order put together again")
        elif order != together(padded, case)[: length // n * n]:
            raise Wrong(f"{told(case)}: this is not the head of the order without drop_last")


def train(answer, wire, length: int, seed: int) -> tuple[list[int], int]:
    """The samples that all ranks saw in epoch 3, through loaders; and this rank's steps."""
    loader = DataLoader(
        TensorDataset(torch.arange(length)),
        batch_size=3,
        sampler=sampler(answer, length, seed=seed),
    )
    loader.sampler.set_epoch(3)
    seen = torch.zeros(length, dtype=torch.int64)
    steps = 0
    for (batch,) in loader:
        step = torch.bincount(batch, minlength=length)
        dist.all_reduce(step)  # every step has a collective, as in training
        seen, steps = seen + step, steps + 1
    return seen.tolist(), steps


@pytest.mark.parametrize(("n", "length"), [(2, 25), (3, 20), (4, 2)])
def test_loader(answer: Path, seed: int, n: int, length: int) -> None:
    """A real DataLoader, a collective in each step: {length} samples on {n} ranks"""
    for rank, (seen, steps) in enumerate(run(answer, train, n, length, seed)):
        share = ceil(length / n)
        expect(steps, ceil(share / 3), f"rank {rank}: steps")
        expect(sum(seen), share * n, f"rank {rank}: samples that all ranks saw")
        expect(min(seen), share * n // length, f"rank {rank}: times that the rarest was seen")
