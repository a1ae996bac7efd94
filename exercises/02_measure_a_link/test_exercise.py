"""Grader of 02: the method, on links whose alpha and beta only the grader knows. Each difficulty
comes alone before all come together. No real time passes.
"""

import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from course.grading import Wrong, expect, grade

ANOTHER = 3e-5, 0.5  # alpha and beta of a link that was measured before
LAUNCH = 1e-6  # seconds that starting a ping takes
HALF = 250_000  # alpha x beta in bytes, or n_1/2: there alpha and n / beta are equal
WIDE = [4**k for k in range(3, 14)]  # from where only alpha counts to where only beta does
LARGE = [64, 1024, 4096, *(4**k for k in range(11, 16))]  # most take far longer than alpha
NARROW = [64_000, 1_000, 250_000, 4_000, 500_000, 16_000]  # about HALF, in no order
NAMED = {  # by which factors alpha and beta are off, and whence
    (2, 1): "a ping is two messages, there and back: alpha is one's",
    (1, 2): "one way is asked for, and only one message of a ping has those bytes",
    (1, 1e9 / 2**30): "that is GiB/s; 1 GB is 1e9 bytes",
    (1, 1e9): "that is bytes/s; asked for are GB/s",
    (1, 8): "those are gigabits",
    (1e6, 1): "those are microseconds; asked for are seconds",
}


def make(alpha: float, beta: float, warm: int, outliers: bool, noise: float, seed: int):
    """A link, and what was done with it. Its state is out of reach: there is only the clock."""
    now = 0.0
    idle_at = 1e-3  # at first it still carries somebody else's
    chance = random.Random(seed)
    done = SimpleNamespace(pings=Counter(), read=0, early=0)

    def ping(nbytes: int) -> None:
        nonlocal now, idle_at
        done.pings[nbytes] += 1
        seconds = (2 * alpha + nbytes / beta / 1e9) * (1 + chance.uniform(-noise, noise))
        if done.pings[nbytes] <= warm or (outliers and done.pings[nbytes] % 16 in (5, 6)):
            seconds *= 20
        idle_at = max(now, idle_at) + seconds
        now += LAUNCH

    def synchronize() -> None:
        nonlocal now
        now = max(now, idle_at)

    def clock() -> float:
        done.read += 1
        done.early += bool(done.pings) and now < idle_at
        return now

    return SimpleNamespace(ping=ping, synchronize=synchronize, clock=clock), done


def call(answer, wire, sizes: list[int], link: tuple) -> tuple:
    another, _ = make(*ANOTHER, *link[2:])
    answer.measure(another, list(sizes))  # what was measured there does not count now
    made, done = make(*link)
    given = list(sizes)
    got = answer.measure(made, given)
    if given != sizes:
        raise Wrong("the list of sizes was changed; it is the caller's")
    try:
        alpha, beta = map(float, got)
    except (TypeError, ValueError):
        raise Wrong(f"expected two numbers, alpha and beta, got {got!r}") from None
    return alpha, beta, done


def judge(
    answer: Path, seed: int, sizes: list[int], within: float, why: str = "", **link
) -> SimpleNamespace:
    """Compare alpha and beta; `why` is what to think of if they are off. Returns what was done."""
    alpha = random.Random(seed).uniform(2e-6, 20e-6)
    drawn = {"alpha": alpha, "beta": HALF / alpha / 1e9}
    link = drawn | {"warm": 0, "outliers": False, "noise": 0.0, "seed": seed} | link
    alpha, beta, done = grade(answer, call, 1, sizes, tuple(link.values()), group=False)[0]
    off = alpha / link["alpha"], beta / link["beta"]
    if all(abs(factor - 1) <= within for factor in off):
        check_cost(done.pings, sizes)
        return done
    for factors, mistake in NAMED.items():
        if all(abs(a / b - 1) < 0.03 for a, b in zip(off, factors, strict=True)):
            why = mistake
    if all(abs(a / b - 1) < 0.03 for a, b in zip((alpha, beta), ANOTHER, strict=True)):
        why = "that is another link, measured in an earlier call"
    if done.early:
        why = f"the clock was read {done.early} times with a ping still under way"
    if not done.read:
        why = "link.clock() was never read"
    due = f"alpha {link['alpha'] * 1e6:.4g} us, beta {link['beta']:.4g} GB/s"
    got = f"alpha {alpha * 1e6:.4g} us, beta {beta:.4g} GB/s"
    raise Wrong(f"expected {due} (within {within:.0%}), got {got}{why and ': ' + why}")


def check_cost(pings: Counter, sizes: list[int]) -> None:
    if other := set(pings) - set(sizes):
        raise Wrong(f"pings of sizes that were not asked for: {sorted(other)}")
    worst = max(pings, key=pings.get)
    if pings[worst] > 50:
        raise Wrong(f"{worst:,} B: expected at most 50 pings, got {pings[worst]:,}")


def test_quiet(answer: Path, seed: int) -> None:
    """A quiet link, 64 B to 64 MiB"""
    judge(answer, seed, WIDE, 0.01)


def test_narrow(answer: Path, seed: int) -> None:
    """A quiet link, sizes all about the middle and in any order"""
    why = "in no message here does alpha or n / beta count alone: fit both"
    judge(answer, seed, NARROW, 0.01, why)


def test_two_sizes(answer: Path, seed: int) -> None:
    """A quiet link, only two sizes"""
    judge(answer, seed, [500_000, 100_000], 0.01)


def test_warm_up(answer: Path, seed: int) -> None:
    """A link whose first three pings of each size are slow"""
    judge(answer, seed, WIDE, 0.01, "do the slow first pings count?", warm=3)


def test_outliers(answer: Path, seed: int) -> None:
    """A link where one ping in eight takes twenty times as long, two in a row"""
    judge(answer, seed, WIDE, 0.01, "do a few slow pings count that much?", outliers=True)


# Each time is within 2%, so each median is. With sizes from far below n_1/2 to far above it, a fit
# that weighs them alike is then within about 2%, a line through two of the times within 3%.
NOISY = {"noise": 0.02, "within": 0.05}


def test_noise(answer: Path, seed: int) -> None:
    """Links whose times vary by 2%"""
    why = "2% of the longest time is more than alpha: count errors relative to the time"
    for more in range(4):
        judge(answer, seed + more, LARGE, why=why, **NOISY)


@pytest.mark.parametrize(
    ("name", "alpha", "beta"),
    [
        ("NVLink 4", 2e-6, 450),
        ("PCIe 5.0", 4e-6, 63),
        ("TCP", 3e-5, 1.8),
        ("Ethernet of 100 Mbit/s", 3e-4, 0.0117),
    ],
)
def test_all_together(answer: Path, seed: int, name: str, alpha: float, beta: float) -> None:
    """All difficulties together, on a link like {name}"""
    half = int(alpha * beta * 1e9)
    # The first and the last differ by less than their noise: no line through these two will do.
    sizes = [half, half * 10, half // 10, half // 3, half * 3, half // 100, half + half // 500]
    how = {"alpha": alpha, "beta": beta, "warm": 3, "outliers": True, **NOISY}
    why = "sizes come in any order, and all of them count"
    judge(answer, seed + int(beta), sizes, why=why, **how)  # other noise on each link


def test_cost(answer: Path, seed: int) -> None:
    """At most 50 pings of each size, and none of another"""
    for sizes in (WIDE, LARGE):
        judge(answer, seed, sizes, 0.01)


ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}  # of a ring


def speeds(answer, wire) -> float:
    for name in (*ROUNDS, "broadcast", "reduce"):
        for n, nbytes, seconds in (4, 10**9, 0.1), (3, 3 * 10**8, 0.6), (8, 10**6, 1e-4):
            share = ROUNDS[name] * (n - 1) / n if name in ROUNDS else 1
            due = share * nbytes / seconds / 1e9
            got = answer.busbw(name, nbytes, seconds, n)
            if not (isinstance(got, int | float) and abs(got / due - 1) < 1e-9):
                told = f"{name} of {nbytes / 1e9:g} GB on {n} ranks in {seconds:g} s"
                raise Wrong(f"{told}: expected {due:g} GB/s, got {got}")
    return answer.busbw("all_reduce", 10**9, 0.1, 1)


def test_busbw(answer: Path) -> None:
    """busbw of six collectives"""
    (alone,) = grade(answer, speeds, 1, group=False)
    expect(alone, 0.0, "all_reduce on one rank: GB/s")
