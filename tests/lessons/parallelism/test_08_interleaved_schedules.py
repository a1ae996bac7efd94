"""Lists against formulas for any p, m and v; claims against broken lines."""

import re
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


def slots_of(orders: list[list], slots: dict[str, int], message: int = 0) -> list[dict]:
    """The slots of each action, as the lesson counts them."""
    found = []
    for actions in simulate(orders, slots, message):
        found.append({one: range(slot, slot + slots[one[0]]) for one, slot in actions.items()})
    return found


def lists_of(p: int, m: int, v: int, hops: int) -> list[list]:
    return [lesson.interleaved(rank, p, m, v, hops) for rank in range(p)]


@given(ranks, st.integers(1, 5))
def test_one_stage_and_one_forward_per_hop_is_1f1b(p: int, groups: int) -> None:
    for rank in range(p):
        found = lesson.interleaved(rank, p, groups * p, 1)
        expected = PLAIN_1F1B.one_f_one_b(rank, p, groups * p)
        assert found == [(kind, rank, k) for kind, k in expected]


@settings(deadline=None)
@given(ranks, st.integers(1, 5), st.integers(2, 4), st.sampled_from([1, 2]), costs, costs)
def test_it_idles_as_the_formula_whatever_the_passes_cost(
    p: int, groups: int, v: int, hops: int, f: int, b: int
) -> None:
    """(p-1) / (v m + p-1) for every m that p divides, with two forwards per hop and with one."""
    m = p * groups
    orders = lists_of(p, m, v, hops)
    complete(orders, v * p, m, "B")
    assert held_at_most(orders[0]) == min((v - 1) * p + hops * (p - 1) + 1, v * m)
    idle = lesson.idle_share(slots_of(orders, {"F": f, "B": b}))
    assert idle == Fraction(p - 1, v * m + p - 1)


@settings(deadline=None)
@given(st.integers(2, 8), st.integers(2, 5), st.integers(1, 4), st.integers(0, 4))
def test_two_forwards_per_hop_expose_the_first_and_the_last_micro_batch_s_messages(
    p: int, groups: int, v: int, quarters: int
) -> None:
    """2 (v p - 1) c slots, for messages of c <= 1 slots; here all is in quarters of a slot."""
    m = p * groups
    slots = slots_of(lists_of(p, m, v, 2), {"F": 4, "B": 8}, quarters)
    assert lesson.length(slots) == 12 * (v * m + p - 1) + 2 * (v * p - 1) * quarters


@settings(deadline=None)
@given(st.integers(2, 8), st.integers(2, 5), st.integers(0, 4))
def test_one_forward_per_hop_waits_for_two_messages_that_often(
    p: int, groups: int, quarters: int
) -> None:
    """On two stages per rank; with p = 4 and m = 8, the eight times of the lesson's text."""
    m = p * groups
    slots = slots_of(lists_of(p, m, 2, 1), {"F": 4, "B": 8}, quarters)
    waits = (2 * m - p - 1) * (p - 1) // p
    exposed = 2 * (2 * p - 1 + waits) * quarters
    assert lesson.length(slots) == 12 * (2 * m + p - 1) + exposed


def drawn(starts: list[dict], slots: dict[str, int], length: int) -> list[str]:
    """The rows of a grid, as the lesson's text has them, and before them its ruler."""
    rows = [" ".join(f"{slot:2}" for slot in range(length))]
    for rank, actions in enumerate(starts):
        cells = [" ."] * length
        for (kind, stage, k), slot in actions.items():
            name = f"{kind if stage == rank else kind.lower()}{k}"
            cells[slot : slot + slots[kind]] = slots[kind] * [name]
        rows.append(" ".join(cells))
    return rows


def test_the_grids_of_the_text() -> None:
    """p = m = 2: six slots of 18 are idle, then three of 15. Then m = 4, with slow messages."""
    text = (ROOT / LESSON).read_text(encoding="utf-8")
    for orders, slots, message, length, names in (
        (lists_of(2, 2, 1, 1), {"F": 2, "B": 4}, 0, 18, ("1F1B", "layers 0, 1", "layers 2, 3")),
        (lists_of(2, 2, 2, 1), {"F": 1, "B": 2}, 0, 15, ("v = 2", "layers 0, 2", "layers 1, 3")),
        (lists_of(2, 4, 1, 1), {"F": 1, "B": 2}, 1, 19, ("one per hop", "rank 0", "rank 1")),
        (lists_of(2, 4, 1, 2), {"F": 1, "B": 2}, 1, 17, ("two per hop", "rank 0", "rank 1")),
    ):
        rows = drawn(simulate(orders, slots, message), slots, length)
        grid = "".join(
            rf"#     {name} .*{re.escape(row)}\n" for name, row in zip(names, rows, strict=True)
        )
        assert re.search(grid, text), names


def test_the_answers_numbers() -> None:
    """Four ranks, slots of half a rank's layers: with 8 and 64 micro-batches."""

    def length(m: int, v: int, hops: int, quarters: int) -> float:
        slots = {"F": 8 // v, "B": 16 // v}
        return lesson.length(slots_of(lists_of(4, m, v, hops), slots, quarters)) / 4

    assert [length(8, 1, 1, 0), length(8, 2, 2, 0)] == [66, 57]
    assert [length(8, 1, 2, 4), length(8, 2, 2, 4), length(8, 2, 1, 4)] == [72, 71, 87]
    assert [length(8, 1, 2, 2), length(8, 2, 2, 2)] == [69, 64]
    assert [length(64, 1, 1, 0), length(64, 2, 2, 0)] == [402, 393]
    assert [length(8, 1, 2, 8), length(8, 2, 2, 8)] == [78, 92]


def test_a_message_has_a_tag_of_its_own() -> None:
    actions = [(kind, stage, k) for kind in "FB" for stage in range(8) for k in range(8)]
    with patch.object(lesson._lesson, "MICRO_BATCHES", 8):
        assert len({*map(lesson.tag_of, actions)}) == len(actions)


def test_a_share_is_of_the_medians() -> None:
    assert lesson.share_idle([11.0, 10.0, 99.0], [8.0, 1.0, 9.0]) == pytest.approx(3 / 11)


def PLAIN(played: Played) -> None:
    """The runs are drawn as grids, one row a rank."""
    assert f"rank 3  ......{8 * 'FFBBBB'}............\n" in played.output
    assert "rank 0  FFFFffff......bbFbbFbbFbbFBBfBBfBBfBBfbb.bb.bb.bbBBBBBBBB\n" in played.output
    slow = f"{4 * 'fbb'}{4 * 'FBB'}{4 * 'fbb'}{4 * '.BB'}"
    assert f"rank 3  ......FFFF....{slow}.........\n" in played.output


ERRORS, IDLE = (
    {f"{name}: {what}" for name in ("1F1B", "v = 2")}
    for what in ("error of the gradients", "share of slots idle")
)
SENT = "v = 2: messages / 1F1B's"
ONE_HELD, HELD, DEEP = (
    f"{name}: micro-batches held" for name in ("1F1B", "v = 2", "v = 2, two per hop")
)
WHOLE_ADDED, ADDED = (f"v = {v}: slots that messages add" for v in (1, 2))
SEND = "dist.isend(message, rank, self.group, tag=tag_of(action))"
UNLIKE = "torch's Interleaved1F1B: actions unlike our list's"
LINES = {
    "a rank runs ahead by one per hop, whatever is asked": (
        ("per_hop * (p - 1 - rank)", "(p - 1 - rank)"),
        {DEEP, WHOLE_ADDED, ADDED, UNLIKE},
    ),
    "a rank runs ahead by two per hop, whatever is asked": (
        ("per_hop * (p - 1 - rank)", "2 * (p - 1 - rank)"),
        {ONE_HELD, HELD},
    ),
    "1F1B's one forward per hop, with slow messages": (
        ("v=1, per_hop=2, message", "v=1, per_hop=1, message"),
        {WHOLE_ADDED},
    ),
    "messages take no time": (("v=2, per_hop=2, message=MESSAGE", "v=2, per_hop=2"), {ADDED}),
    "a message's clock is not read": (
        ("        self.now = max(self.now, int(message[-1]))\n", ""),
        IDLE | {WHOLE_ADDED, ADDED},
    ),
    "activations are kept": (
        ("self.held.pop((stage, k))", "self.held[stage, k]"),
        {ONE_HELD, HELD, DEEP},
    ),
    "the loss is a sum over micro-batches": (("[k]) / MICRO_BATCHES", "[k])"), ERRORS),
    "messages of small stages count twice": (
        [
            (f"self.sends.append({SEND})", f"self.sends += len(self.stages) * [{SEND}]"),
            ("for send in self.sends:", "for send in {*self.sends}:"),
        ],
        {SENT},
    ),
    "PyTorch minimizes another loss": (
        ("MICRO_BATCHES, loss_fn=F.mse_loss)", "MICRO_BATCHES, loss_fn=F.l1_loss)"),
        {"torch's Interleaved1F1B: error of the gradients"},
    ),
}
ALONE = [f"a rank runs ahead by {number} per hop, whatever is asked" for number in ("one", "two")]
BREAKS = [Breaks(LINES, alone=ALONE)]
