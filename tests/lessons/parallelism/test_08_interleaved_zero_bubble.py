"""Lists against formulas for any p, m and v; claims against broken lines."""

from collections import Counter
from fractions import Fraction
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course.playing import Lazily
from tests.lessons.every import Breaks, test_lesson  # noqa: F401

LESSON = "parallelism/08_interleaved_zero_bubble.py"
lesson = Lazily(LESSON)
ranks = st.integers(1, 8)
costs = st.integers(1, 4)


def complete(orders: list[list], stages: int, m: int, backward: str) -> None:
    """Each rank has every pass of its stages, each once, in an order that it can follow."""
    everything = Counter(action for order in orders for action in order)
    due = {(kind, s, k) for kind in f"F{backward}" for s in range(stages) for k in range(m)}
    assert everything == Counter(due)


def held_at_most(order: list) -> int:
    alive = most = 0
    for kind, _, _ in order:
        alive += {"F": 1, "I": 0, "B": -1, "W": -1}[kind]
        most = max(most, alive)
    return most


@settings(deadline=None)
@given(ranks, st.integers(1, 5), st.integers(2, 4), costs, costs)
def test_interleaving_idles_as_the_formula_whatever_the_passes_cost(
    p: int, groups: int, v: int, f: int, b: int
) -> None:
    m = p * groups
    for name in "interleaved", "breadth_first":
        orders = [getattr(lesson, name)(rank, p, m, v) for rank in range(p)]
        complete(orders, v * p, m, "B")
        with patch.dict(lesson.SLOTS, F=f, B=b):
            idle = lesson.idle_share(lesson.simulate(orders))
        assert idle == Fraction(p - 1, v * m + p - 1)
        held = held_at_most(orders[0])
        ahead = 2 * (p - 1) + (v - 1) * p + 1
        assert held == (v * m if name == "breadth_first" else min(ahead, v * m))


@settings(deadline=None)
@given(ranks, st.integers(0, 12), costs, costs, costs)
def test_zb_h1_idles_as_the_paper_says_for_its_range_of_passes(
    p: int, more: int, f: int, i: int, w: int
) -> None:
    """(p-1) (F + I - W) for m >= 2p-1 and W <= I, W <= F; and it holds p on every rank."""
    m = 2 * p - 1 + more
    orders = [lesson.zb_h1(rank, p, m) for rank in range(p)]
    complete(orders, p, m, "IW")
    assert {held_at_most(order) for order in orders} == {p}
    w = min(w, f, i)
    with patch.dict(lesson.SLOTS, F=f, I=i, W=w):
        idle = lesson.idle_share(lesson.simulate(orders))
    bubble = (p - 1) * (f + i - w)
    assert idle == Fraction(bubble, bubble + m * (f + i + w))


@settings(deadline=None)
@given(ranks, st.integers(0, 12))
def test_zb_h2_and_zb_v_idle_nowhere_if_all_passes_are_equal(p: int, more: int) -> None:
    m = 2 * p - 1 + more
    for name, stages, held in (("zb_h2", p, 2 * p - 1), ("zb_v", 2 * p, 2 * p)):
        orders = [getattr(lesson, name)(rank, p, m) for rank in range(p)]
        complete(orders, stages, m, "IW")
        assert {held_at_most(order) for order in orders} == {held}
        assert lesson.idle_share(lesson.simulate(orders)) == 0


def test_slots_by_hand_and_a_list_that_never_ends() -> None:
    """p = 2, m = 1: F, F, then I on rank 1; its W runs while rank 0 does its I."""
    orders = [lesson.zb_h1(rank, 2, 1) for rank in range(2)]
    first, second = lesson.simulate(orders)
    assert first == {("F", 0, 0): 0, ("I", 0, 0): 3, ("W", 0, 0): 4}
    assert second == {("F", 1, 0): 1, ("I", 1, 0): 2, ("W", 1, 0): 3}
    assert lesson.idle_share([first, second]) == Fraction(2, 5)
    with pytest.raises(ValueError, match="wait for each other for ever"):
        lesson.simulate([orders[0], orders[1][::-1]])


def test_places() -> None:
    with patch.object(lesson._lesson, "WORLD_SIZE", 3):
        assert lesson.loop(6) == [0, 1, 2, 0, 1, 2]
        assert lesson.v_shape(6) == [0, 1, 2, 2, 1, 0]


NAMES = ("interleaved", "breadth first", "ZB-H1", "ZB-H2", "ZB-V")
ERRORS, IDLE, HELD, SLOTS = (
    {f"{name}: {what}" for name in NAMES}
    for what in (
        "error of the gradients",
        "share idle",
        "held by rank 0",
        "actions not in the slot simulated",
    )
)
TORCHS = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def unlike(name: str) -> str:
    return f"torch's {name}: actions unlike our list's"


CLOCK = "        self.now = max(self.now, int(message[-1]))\n"
LINES = {
    "one forward ahead for each rank behind (Try)": (
        ("(v - 1) * p + 2 * (p - 1 - rank)", "(v - 1) * p + (p - 1 - rank)"),
        {"interleaved: held by rank 0", unlike("Interleaved1F1B")},
    ),
    "no W is delayed (Try)": (
        (
            "    ahead = min(ahead, m)\n    order",
            "    ahead = min(ahead, m)\n    delay = 0\n    order",
        ),
        {"ZB-H1: share idle", "ZB-H2: share idle"},
    ),
    "breadth first goes back in order": (
        ("for k in reversed(range(m))]", "for k in range(m)]"),
        {unlike("LoopedBFS")},
    ),
    "a V that does W too early": (
        ('(rank, "ID IU"),', '(rank, "ID IU WU"),'),
        {"ZB-V: share idle", unlike("ZBVZeroBubble")},
    ),
    "a message's clock is not read": (
        (CLOCK, ""),
        (IDLE | SLOTS) - {"ZB-H2: share idle", "ZB-V: share idle"},
    ),
    "what is held is counted before it is freed": (
        ("self.held = max(self.held, len(self.graphs))", "self.held = len(self.starts) + 1"),
        HELD,
    ),
    "the loss is a sum over micro-batches": (
        ("[k]) / MICRO_BATCHES", "[k])"),
        ERRORS,
    ),
    "every message counts twice": (
        [
            ("self.sends.append(dist.isend(", "self.sends += 2 * [dist.isend("),
            ("tag=self.tag(*action)))\n", "tag=self.tag(*action))]\n"),
            ("for send in self.sends:", "for send in {*self.sends}:"),
        ],
        {"interleaved: messages"},
    ),
    "PyTorch minimizes another loss": (
        (
            "MICRO_BATCHES, loss_fn=F.mse_loss)\n    inputs = (case.x",
            "MICRO_BATCHES, loss_fn=F.l1_loss)\n    inputs = (case.x",
        ),
        {f"torch's {name}: error of gradients" for name in TORCHS},
    ),
}
BREAKS = [Breaks(LINES)]
