"""Grader of 18: steps of unequal ranks, efficiency of any batch, a fit, its minimum, a figure."""

import random
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from course.grading import Wrong, expect, grade

LENGTHS = (13, 12)  # steps: 10 that count, whose median lies between two, and 9
RANKS = (1, 2, 3, 4, 6, 8)


def close(got: object, due: float, what: str, why: str = "") -> None:
    """Compare two numbers, to nine digits."""
    if isinstance(got, bool) or not isinstance(got, int | float):
        raise Wrong(f"{what}: expected a number, got {got!r}")
    if abs(got - due) > 1e-9 * max(abs(due), 1e-3):
        raise Wrong(f"{what}: expected {due:.12g}, got {got:.12g}{why and ': ' + why}")


def steps_of(seed: int, rank: int, length: int) -> list[float]:
    """Seconds of one rank's steps: the first three are slow; now one rank is late, now another."""
    chance = random.Random(1000 * seed + rank)
    times = [chance.uniform(0.1, 0.2) for _ in range(length)]
    return [5 * seconds if step < 3 else seconds for step, seconds in enumerate(times)]


def call_seconds(answer, wire, seed: int) -> list[tuple]:
    told = []
    for length in LENGTHS:
        mine = steps_of(seed, dist.get_rank(), length)
        wire.events.clear()
        got = answer.seconds_per_step(mine)
        if mine != steps_of(seed, dist.get_rank(), length):
            raise Wrong("the list was changed; it is the caller's")
        told.append((got, wire.calls()))
    return told


@pytest.mark.parametrize("n", [1, 2, 4])
def test_seconds(answer: Path, seed: int, n: int) -> None:
    """A step ends with its slowest rank, on {n} ranks"""
    told = grade(answer, call_seconds, n, seed)
    for at, length in enumerate(LENGTHS):
        ranks = [steps_of(seed, rank, length) for rank in range(n)]
        slowest = [max(step) for step in zip(*ranks, strict=True)]
        named = {
            statistics.median(slowest): "do the slow first steps count?",
            statistics.mean(slowest[3:]): "that is the mean; asked for is the median",
            max(statistics.median(times[3:]) for times in ranks): "the slowest rank of each *step*",
            statistics.median_low(slowest[3:]): "of an even number, the median is the mean of the "
            "two in the middle; that is the lower one",
        }
        due = statistics.median(slowest[3:])
        for rank, results in enumerate(told):
            got, calls = results[at]
            what = f"rank {rank}: seconds per step, of {length} steps"
            close(got, due, what, why_of(got, named))
            if n > 1:
                made = [event.op for event in calls]
                if len(made) != 1:
                    raise Wrong(f"rank {rank}: one collective is due; it calls {', '.join(made)}")
                if calls[0].nbytes > 8 * length:
                    sent = f"{calls[0].nbytes} bytes in {made[0]}, at most {8 * length} are due"
                    raise Wrong(f"rank {rank}: {sent}")


def why_of(got: object, named: dict[float, str]) -> str:
    for value, why in named.items():
        if isinstance(got, float) and abs(got - value) < 1e-9:
            return why
    return ""


def call_efficiency(answer, wire, times: dict, batch: dict) -> dict:
    got = answer.efficiency(dict(times), dict(batch))
    if not isinstance(got, dict) or sorted(got) != sorted(times):
        raise Wrong(f"expected a dict with {sorted(times)}, got {got!r}")
    return got


@pytest.mark.parametrize("kind", ["strong", "weak", "neither"])
def test_efficiency(answer: Path, seed: int, kind: str) -> None:
    """Efficiency in {kind} scaling"""
    chance = random.Random(seed)
    times = {n: chance.uniform(0.1, 0.2) for n in reversed(RANKS)}  # 1 does not come first
    some = {n: chance.randrange(100, 1000) for n in (*RANKS, 16)}  # 16 ranks were not timed
    batch = {n: {"strong": 240, "weak": 240 * n, "neither": some[n]}[kind] for n in some}
    (got,) = grade(answer, call_efficiency, 1, times, batch, group=False)
    for n in RANKS:
        due = batch[n] / times[n] / (n * batch[1] / times[1])
        close(got[n], due, f"efficiency of {n} ranks")


def call_fit(answer, wire, times: dict) -> list:
    got = answer.fit(dict(times))
    if not isinstance(got, tuple | list) or len(got) != 3:
        raise Wrong(f"expected three numbers, got {got!r}")
    return list(got)


def judge_fit(answer: Path, times: dict[int, float], due: tuple) -> None:
    (got,) = grade(answer, call_fit, 1, times, group=False)
    for name, value, expected in zip("abc", got, due, strict=True):
        if isinstance(value, int | float) and abs(value - expected) < 1e-9 * abs(expected):
            continue
        raise Wrong(f"{name}: expected {expected:.12g} s, got {value!r}")


@pytest.mark.parametrize("ranks", [(1, 2, 4), (8, 2, 1, 4, 16), (3, 2, 6)])
def test_fit(answer: Path, seed: int, ranks: tuple) -> None:
    """Constants of times that follow the law, on {ranks} ranks"""
    chance = random.Random(seed)
    a = chance.uniform(0.01, 0.1)
    b = chance.uniform(0.3, 0.9)
    c = chance.uniform(0.001, 0.005)
    if 1 not in ranks:  # below zero, as where a larger share fits no cache
        a, c = -a / 4, -c / 5
    judge_fit(answer, {n: a + b / n + c * (n - 1) for n in ranks}, (a, b, c))


def test_least_squares(answer: Path, seed: int) -> None:
    """Constants of times that follow it nearly: least squares"""
    chance = random.Random(seed)
    times = {n: (0.05 + 0.6 / n + 0.004 * (n - 1)) * chance.uniform(0.9, 1.1) for n in RANKS}
    lines = np.array([[1, 1 / n, n - 1] for n in times])
    due = np.linalg.lstsq(lines, np.array(list(times.values())), rcond=None)[0]
    judge_fit(answer, times, tuple(due))


def call_fastest(answer, wire, cases: list) -> list:
    return [answer.fastest(*case) for case in cases]


def test_fastest(answer: Path, seed: int) -> None:
    """The fastest number of ranks, also at the ends"""
    chance = random.Random(seed)
    cases = [(0.01, chance.uniform(0.2, 0.9), chance.uniform(1e-3, 5e-3), 64) for _ in range(20)]
    cases += [(0.01, 0.4, 0.001, 8), (0.01, 0.4, 0.0, 16), (0.01, 0.0, 0.001, 16)]
    cases += [(0.0, 0.75, 0.125, 16), (0.5, 0.0, 0.0, 16)]  # two, or all, are equally fast
    cases += [(0.01, 0.4, 0.001, 1), (0.1, 0.4, -0.001, 16)]  # only one; the more the faster
    cases += [(0.0, 0.765625, 0.125, 16)]  # the root of b / c is 2.47, and 3 ranks are fastest
    (got,) = grade(answer, call_fastest, 1, cases, group=False)
    for (a, b, c, most), found in zip(cases, got, strict=True):
        seconds = [a + b / n + c * (n - 1) for n in range(1, most + 1)]
        due = 1 + seconds.index(min(seconds))
        expect(found, due, f"fastest of 1 to {most} ranks, a {a:g}, b {b:.4g}, c {c:.4g}")


def call_draw(answer, wire, times: dict, most: int) -> tuple:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    answer.draw(axes, dict(times), most)
    lines = {}
    for line in axes.get_lines():
        x, y = (np.asarray(part, dtype=float).tolist() for part in line.get_data())
        lines[line.get_label()] = (x, y, line.get_linestyle(), line.get_marker())
    legend = axes.get_legend()
    words = [text.get_text() for text in legend.get_texts()] if legend else []
    return lines, words, axes.get_xlabel(), axes.get_ylabel()


@pytest.mark.parametrize("most", [12, 5])
def test_drawing(answer: Path, seed: int, most: int) -> None:
    """Three lines: ideal, measured, fitted, up to {most} ranks"""
    chance = random.Random(seed)
    measured = {n: (0.05 + 0.6 / n + 0.004 * (n - 1)) * chance.uniform(0.9, 1.1) for n in RANKS}
    times = dict(sorted(measured.items(), reverse=True))
    ((lines, words, x_label, y_label),) = grade(answer, call_draw, 1, times, most, group=False)
    whole = list(range(1, most + 1))
    design = np.array([[1, 1 / n, n - 1] for n in measured])
    a, b, c = np.linalg.lstsq(design, np.array(list(measured.values())), rcond=None)[0]
    due = {
        "ideal": (whole, whole),
        "measured": (list(RANKS), [measured[1] / measured[n] for n in RANKS]),
        "fitted": (whole, [(a + b) / (a + b / n + c * (n - 1)) for n in whole]),
    }
    expect(sorted(lines), sorted(due), "labels of the lines")
    for name, (ranks, speed_ups) in due.items():
        x, y, style, marker = lines[name]
        expect([round(n) for n in x], ranks, f"{name}: numbers of ranks")
        for n, got, expected in zip(ranks, y, speed_ups, strict=True):
            if abs(got - expected) > 1e-6 * expected:
                due_and_got = f"expected {expected:.4f}, got {got:.4f}"
                raise Wrong(f"{name}: speed-up of {n} ranks: {due_and_got}")
        nothing = (None, "None", "none", "", " ")
        if name == "measured" and (style not in nothing or marker in nothing):
            raise Wrong("measured: points are asked for, with markers, without a line between them")
        if name != "measured" and style in nothing:
            raise Wrong(f"{name}: points without a line; a line is asked for")
    expect(sorted(words), sorted(due), "words of the legend")
    if not (x_label and y_label):
        raise Wrong("name both axes")
