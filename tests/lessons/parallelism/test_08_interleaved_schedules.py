"""Lists against formulas for any p, m and v; claims against broken lines."""

from fractions import Fraction
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course.lessons import ROOT
from course.playing import Lazily, Played
from tests.lessons.every import Breaks, test_lesson  # noqa: F401
from tests.lessons.parallelism.test_19_zero_bubble import complete, held_at_most, simulate

LESSON = "parallelism/08_interleaved_schedules.py"
PLAIN_1F1B = Lazily("parallelism/07_pipeline_schedules.py")
lesson = Lazily(LESSON)
ranks = st.integers(1, 8)
costs = st.integers(1, 4)


@given(ranks, st.integers(1, 5))
def test_one_stage_and_one_forward_per_hop_is_1f1b(p: int, groups: int) -> None:
    for rank in range(p):
        found = lesson.interleaved(rank, p, groups * p, 1, hops=1)
        expected = PLAIN_1F1B.one_f_one_b(rank, p, groups * p)
        assert found == [(kind, rank, k) for kind, k in expected]


@settings(deadline=None)
@given(ranks, st.integers(1, 5), st.integers(2, 4), st.sampled_from([1, 2]), costs, costs)
def test_all_idle_as_the_formula_whatever_the_passes_cost(
    p: int, groups: int, v: int, hops: int, f: int, b: int
) -> None:
    """(p-1) / (v m + p-1) for every m that p divides, with two forwards per hop and with one."""
    m = p * groups
    slots = {"F": f, "B": b}
    deep = [lesson.interleaved(rank, p, m, v, hops) for rank in range(p)]
    wide = [lesson.breadth_first(rank, p, m, v) for rank in range(p)]
    ahead = min((v - 1) * p + hops * (p - 1) + 1, v * m)
    for orders, held in ((deep, ahead), (wide, v * m)):
        complete(orders, v * p, m, "B")
        assert held_at_most(orders[0]) == held
        with patch.dict(lesson.SLOTS, slots):
            idle = lesson.idle_share(simulate(orders, slots))
        assert idle == Fraction(p - 1, v * m + p - 1)


def test_the_grids_of_the_text() -> None:
    """p = 2, m = 4: six slots of 30 are idle, then three of 27; a column is half a stage's."""
    plain = [lesson.interleaved(rank, 2, 4, 1, hops=1) for rank in range(2)]
    halves = [lesson.interleaved(rank, 2, 4, 2) for rank in range(2)]
    assert lesson.idle_share(simulate(plain, lesson.SLOTS)) == Fraction(6, 30)
    first, second = simulate(halves, lesson.SLOTS)
    assert lesson.idle_share([first, second]) == Fraction(3, 27)
    text = (ROOT / LESSON).read_text(encoding="utf-8")
    for rank, layers, starts in ((0, "0, 2", first), (1, "1, 3", second)):
        cells = [" ."] * 27
        for (kind, stage, k), slot in starts.items():
            name = f"{kind if stage == rank else kind.lower()}{k}"
            cells[slot : slot + lesson.SLOTS[kind]] = lesson.SLOTS[kind] * [name]
        assert f"rank {rank}, layers {layers}   {''.join(cells)}" in text


def test_a_message_has_a_tag_of_its_own() -> None:
    actions = [(kind, stage, k) for kind in "FB" for stage in range(8) for k in range(8)]
    with patch.object(lesson._lesson, "MICRO_BATCHES", 8):
        assert len({*map(lesson.tag_of, actions)}) == len(actions)


def test_a_share_is_of_the_medians() -> None:
    assert lesson.share_idle([11.0, 10.0, 99.0], [8.0, 1.0, 9.0]) == pytest.approx(3 / 11)


def PLAIN(played: Played) -> None:
    """The runs are drawn as grids, one row a rank."""
    assert "rank 0  FFFFffffFFF...bbFbb.fbbfbbfBBfBBBB.BB.bb.bb.bb.bbBBBBBBBB\n" in played.output
    assert "rank 3  ...FFFFFFFFffffffffbbbbbbbbbbbbbbbbBBBBBBBBBBBBBBBB\n" in played.output


NAMES = ("1F1B", "v = 2", "v = 4", "breadth first")
ERRORS, IDLE, HELD = (
    {f"{name}: {what}" for name in NAMES}
    for what in ("error of the gradients", "share of slots idle", "micro-batches held")
)
SENT = {f"v = {v}: messages / 1F1B's" for v in (2, 4)}
DEEP = {f"v = {v}: micro-batches held" for v in (2, 4)}
TORCHS = ("Interleaved1F1B", "LoopedBFS")
SEND = "dist.isend(result, rank, self.group, tag=tag_of(action))"
UNLIKE = {name: f"torch's {name}: actions unlike our list's" for name in TORCHS}
LINES = {
    "one forward per hop (Try)": (
        ("hops: int = 2", "hops: int = 1"),
        DEEP | {UNLIKE["Interleaved1F1B"]},
    ),
    "breadth first goes back in order": (
        ("for k in reversed(range(m))]", "for k in range(m)]"),
        {UNLIKE["LoopedBFS"]},
    ),
    "breadth first is interleaved in disguise": (
        ('"breadth first": (breadth_first, 2)', '"breadth first": (interleaved, 2)'),
        {"breadth first: micro-batches held"},
    ),
    "a message's clock is not read": (
        ("        self.now = max(self.now, int(message[-1]))\n", ""),
        IDLE,
    ),
    "activations are kept": (
        ("self.held.pop((stage, k))", "self.held[stage, k]"),
        HELD - {"breadth first: micro-batches held"},
    ),
    "the loss is a sum over micro-batches": (("[k]) / MICRO_BATCHES", "[k])"), ERRORS),
    "every message counts twice": (
        [
            (f"self.sends.append({SEND})", f"self.sends += 2 * [{SEND}]"),
            ("for send in self.sends:", "for send in {*self.sends}:"),
        ],
        SENT,
    ),
    "PyTorch minimizes another loss": (
        ("MICRO_BATCHES, loss_fn=F.mse_loss)", "MICRO_BATCHES, loss_fn=F.l1_loss)"),
        {f"torch's {name}: error of the gradients" for name in TORCHS},
    ),
}
BREAKS = [Breaks(LINES)]
