"""Grader of 25: healthy ranks, slow ones, ranks that were slow, and the number of late steps."""

import random
from math import comb
from pathlib import Path

import pytest
import torch.distributed as dist

from course.grading import Wrong, expect, grade

WINDOW, MARGIN, FALSE_ALARM = 20, 0.1, 0.01
Own = list[list[float]]  # seconds of each step and rank


def healthy(seed: int, steps: int, ranks: int, hiccups: float = 0.0) -> Own:
    """Times that vary by 1%, every rank as often fastest as slowest; some steps are hiccups."""
    chance = random.Random(seed)
    own = []
    for turn in range(steps):
        step = sorted(chance.gauss(1, 0.01) for _ in range(ranks))
        step = step[turn % ranks :] + step[: turn % ranks]
        own.append([5 * x if chance.random() < hiccups else x for x in step])
    return own


def slower(own: Own, factors: dict[int, float], first: int = 0, last: int | None = None) -> Own:
    """The same, but these ranks take so many times as long from one step to another."""
    changed = [list(step) for step in own]
    for step in changed[first:last]:
        for rank, factor in factors.items():
            step[rank] *= factor
    return changed


def stamps_of(own: Own, rank: int) -> list[tuple[float, float, float]]:
    """What the rank's clock, which is hours off, reads in a job with these own times."""
    now = 1000.0 + 7200.0 * ((rank * 3) % 4)
    stamps = []
    for step in own:
        over = now + max(step) + 1 / 128  # no rounding, if a step has none
        stamps.append((now, now + step[rank], over))
        now = over
    return stamps


def call(answer, wire, cases: list[tuple[Own, int, float, float]]) -> list[tuple]:
    """What runs on every rank: each case's answer, and its collectives with their bytes."""
    told = []
    for own, window, margin, false_alarm in cases:
        stamps = stamps_of(own, dist.get_rank())
        before = len(wire.calls())
        got = answer.stragglers(list(stamps), window, margin, false_alarm)
        if not isinstance(got, list) or not all(type(rank) is int for rank in got):
            raise Wrong(f"expected a list of whole numbers, got {got!r}")
        told.append((got, [(event.op, event.nbytes) for event in wire.calls()[before:]]))
    return told


def judge(answer: Path, n: int, *cases: tuple[Own, list[int], str], margin: float = MARGIN) -> None:
    """All ranks must name these ranks in each case."""
    given = [(own, WINDOW, margin, FALSE_ALARM) for own, _, _ in cases]
    for rank, told in enumerate(grade(answer, call, n, given)):
        for (got, _), (_, due, what) in zip(told, cases, strict=True):
            expect(got, due, f"{what}, on rank {rank} of {n}")


@pytest.mark.parametrize("n", [2, 4])
def test_healthy(answer: Path, seed: int, n: int) -> None:
    """No false alarm in 200 healthy steps with hiccups, on {n} ranks"""
    cases = []
    for part in range(10):
        own = healthy(1000 * seed + part, WINDOW, n, hiccups=0.02)
        own[part] = [5.0, *own[part][1:]]  # at least one
        cases.append((own, WINDOW, MARGIN, FALSE_ALARM))
    for rank, told in enumerate(grade(answer, call, n, cases)):
        alarms = sum(len(got) for got, _ in told)
        expect(alarms, 0, f"rank {rank}: false alarms in 200 healthy steps")


@pytest.mark.parametrize("n", [2, 3, 4])
def test_slow(answer: Path, seed: int, n: int) -> None:
    """One slow rank, each in turn, on {n} ranks"""
    own = healthy(seed, WINDOW, n)
    cases = []
    for slow in range(n):
        cases.append((slower(own, {slow: 1.5}), [slow], "half as slow again"))
        cases.append((slower(own, {slow: 1.18}), [slow], "18% slower"))
    judge(answer, n, *cases)


def test_of_two_others_the_larger_counts(answer: Path, seed: int) -> None:
    """Half as slow again as one of the two others, and as fast as the other"""
    first, second = random.Random(seed).sample(range(3), 2)
    own = slower(healthy(seed, WINDOW, 3), {first: 1.5, second: 1.5})
    judge(answer, 3, (own, [], "two of three are slow alike"))


def test_of_four_others(answer: Path, seed: int) -> None:
    """Of four others the third counts: not the slowest, not the mean of the two in the middle"""
    *_, third, slow, tried = random.Random(seed).sample(range(5), 5)
    cases = []
    for seconds, due in ((1.55, [slow]), (1.8, [slow, tried])):  # of the four, 1.5 s count
        step = [1.0] * 5
        step[third] = 1.5
        step[slow] = 3.0
        step[tried] = seconds
        cases.append(([step] * WINDOW, sorted(due), f"{seconds} s, others 1, 1, 1.5 and 3 s"))
    judge(answer, 5, *cases)


def test_a_little_slower(answer: Path, seed: int) -> None:
    """A rank that is always 4% slower is not worth an alarm"""
    judge(answer, 4, (slower(healthy(seed, WINDOW, 4), {2: 1.04}), [], "always 4% slower"))


def test_margin(answer: Path, seed: int) -> None:
    """A rank that is 18% slower is not named if 30% are allowed, nor one of 50% if 50% are"""
    own = slower(healthy(seed, WINDOW, 4), {2: 1.18})
    judge(answer, 4, (own, [], "18% slower, a margin of 30%"), margin=0.3)
    alike = [[1.0, 1.0, 1.5, 1.0]] * WINDOW
    judge(answer, 4, (alike, [], "exactly 50% slower, a margin of 50%"), margin=0.5)


def test_two_slow(answer: Path, seed: int) -> None:
    """Two slow ranks of four, one slower than the other"""
    first, second = random.Random(seed).sample(range(4), 2)
    own = slower(healthy(seed, WINDOW, 4), {first: 1.2, second: 3.0})
    later = slower(slower(healthy(seed, WINDOW, 4), {1: 1.5}, last=17), {3: 1.5})
    judge(
        answer,
        4,
        (own, sorted([first, second]), "20% slower, and thrice as slow"),
        (later, [1, 3], "rank 1 late in 17 of 20 steps, rank 3 in all"),
    )


def test_all_slow(answer: Path, seed: int) -> None:
    """All ranks become slow alike: nobody is a straggler"""
    own = slower(healthy(seed, 60, 3), {0: 2.0, 1: 2.0, 2: 2.0}, first=40)
    judge(answer, 3, (own, [], "twice as long on all ranks"))


def test_recent(answer: Path, seed: int) -> None:
    """The last steps count: slow since the middle, and slow until the middle"""
    own = healthy(seed, 2 * WINDOW, 3)
    judge(
        answer,
        3,
        (slower(own, {1: 1.5}, first=WINDOW), [1], "slow since the middle"),
        (slower(own, {1: 1.5}, last=WINDOW), [], "slow until the middle"),
    )


def enough(window: int, ranks: int, false_alarm: float) -> int:
    """The number of late steps that makes a straggler."""
    heads = 0  # of 2**window ways, those with at least k heads
    for k in range(window, -1, -1):
        heads += comb(window, k)
        if ranks * heads / 2**window > false_alarm:
            return k + 1
    return 0


@pytest.mark.parametrize("n", [2, 4])
def test_count(answer: Path, seed: int, n: int) -> None:
    """As many late steps as the promise asks for, and not one more, on {n} ranks"""
    chance = random.Random(seed)
    cases = []
    due = []
    promises = [(20, 0.002), (20, 0.01), (20, 0.1), (33, 0.01), (6, 0.001), (1100, 0.01)]
    for window, false_alarm in [*promises, (6, n / 2**6)]:  # the last is reached, to the bit
        k = enough(window, n, false_alarm)
        for late in (k - 1, k):
            if late > window:
                continue  # no number of late steps would do
            own = healthy(seed, window, n)
            for step in chance.sample(range(window), late):
                own[step] = [2 * x if rank == 1 else x for rank, x in enumerate(own[step])]
            cases.append((own, window, MARGIN, false_alarm))
            due.append((window, false_alarm, late, [1] if late == k else []))
    for rank, told in enumerate(grade(answer, call, n, cases)):
        for (got, _), (window, false_alarm, late, expected) in zip(told, due, strict=True):
            what = f"late in {late} of {window} steps, false alarm {false_alarm:g}, {n} ranks"
            expect(got, expected, f"{what}: named on rank {rank}")


def test_cost(answer: Path, seed: int) -> None:
    """One all-gather, to which each rank hands 8 bytes per step of the window"""
    cases = [(healthy(seed, 50, 3), window, MARGIN, FALSE_ALARM) for window in (20, 50)]
    for rank, told in enumerate(grade(answer, call, 3, cases)):
        for (_, handed), (_, window, _, _) in zip(told, cases, strict=True):
            due = [("all_gather", 3 * 8 * window)]
            expect(handed, due, f"rank {rank}: its calls, and the bytes that they leave")


def test_alone(answer: Path, seed: int) -> None:
    """A rank that is alone has nobody to be slower than"""
    judge(answer, 1, (healthy(seed, WINDOW, 1), [], "alone"))
