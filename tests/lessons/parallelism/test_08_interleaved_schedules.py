"""Lists against formulas for any p, m and v; claims against broken lines."""

import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course.lessons import ROOT
from course.playing import Lazily, Played
from tests.lessons.every import Breaks, test_lesson  # noqa: F401
from tests.lessons.parallelism.test_19_zero_bubble import (
    complete,
    held_at_most,
    simulate,
    torchs_lists,
)

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


def lists_of(p: int, m: int, v: int) -> list[list]:
    return [lesson.interleaved(rank, p, m, v) for rank in range(p)]


@given(ranks, st.integers(1, 5))
def test_with_one_stage_it_is_1f1b(p: int, groups: int) -> None:
    for rank in range(p):
        found = lesson.interleaved(rank, p, groups * p, 1)
        expected = PLAIN_1F1B.one_f_one_b(rank, p, groups * p)
        assert found == [(kind, rank, k) for kind, k in expected]


@settings(deadline=None)
@given(ranks, st.integers(1, 5), st.integers(2, 4), costs, costs)
def test_it_idles_as_the_formula_whatever_the_passes_cost(
    p: int, groups: int, v: int, f: int, b: int
) -> None:
    """(p-1) / (v m + p-1) for every m that p divides, and p micro-batches held on rank 0."""
    m = p * groups
    orders = lists_of(p, m, v)
    complete(orders, v * p, m, "B")
    assert held_at_most(orders[0]) == v * p
    idle = lesson.idle_share(slots_of(orders, {"F": f, "B": b}))
    assert idle == Fraction(p - 1, v * m + p - 1)


@settings(deadline=None)
@given(ranks, st.integers(1, 4), st.sampled_from([1, 2]))
def test_lists_are_played_as_the_simulator_does(p: int, groups: int, v: int) -> None:
    orders = lists_of(p, groups * p, v)
    assert lesson.play(orders, v) == slots_of(orders, {"F": 2 // v, "B": 4 // v})


def torchs(p: int, m: int, v: int) -> list[list]:
    return torchs_lists("Interleaved1F1B", p, m, v)


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 8), st.integers(2, 5), st.integers(2, 4))
def test_pytorch_s_list_runs_ahead_by_two_per_hop_and_is_else_the_lesson_s(
    p: int, groups: int, v: int
) -> None:
    """It holds p + (p-1)/v micro-batches, and its bubble is as long if messages are free."""
    m = p * groups
    for rank, (theirs, ours) in enumerate(zip(torchs(p, m, v), lists_of(p, m, v), strict=True)):
        for kind in "FB":
            assert [a for a in theirs if a[0] == kind] == [a for a in ours if a[0] == kind]
        ahead = [[a[0] for a in order].index("B") - 1 for order in (theirs, ours)]
        least = (v - 1) * p + p - 1 - rank
        assert ahead == [least + p - 1 - rank, least]
    assert held_at_most(torchs(p, m, v)[0]) == v * p + p - 1
    idle = lesson.idle_share(slots_of(torchs(p, m, v), {"F": 1, "B": 2}))
    assert idle == Fraction(p - 1, v * m + p - 1)


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 8), st.integers(2, 5), st.integers(2, 4), st.integers(0, 4))
def test_pytorch_s_list_exposes_the_first_and_the_last_micro_batch_s_messages(
    p: int, groups: int, v: int, quarters: int
) -> None:
    """2 (v p - 1) c slots, for messages of c <= 1 slots; here all is in quarters of a slot."""
    m = p * groups
    slots = slots_of(torchs(p, m, v), {"F": 4, "B": 8}, quarters)
    assert lesson.length(slots) == 12 * (v * m + p - 1) + 2 * (v * p - 1) * quarters


@settings(deadline=None)
@given(st.integers(2, 8), st.integers(2, 5), st.integers(0, 4))
def test_one_forward_per_hop_waits_for_two_messages_that_often(
    p: int, groups: int, quarters: int
) -> None:
    """On two stages per rank: why libraries run ahead by two."""
    m = p * groups
    slots = slots_of(lists_of(p, m, 2), {"F": 4, "B": 8}, quarters)
    waits = (2 * m - p - 1) * (p - 1) // p
    exposed = 2 * (2 * p - 1 + waits) * quarters
    assert lesson.length(slots) == 12 * (2 * m + p - 1) + exposed


def drawn(starts: list[dict], slots: dict[str, int], length: int) -> list[str]:
    """The rows of a grid, as the lesson's text has them, and before them its ruler."""
    rows = [" ".join(f"{slot:2}" for slot in range(length))]
    for rank, actions in enumerate(starts):
        cells = [" ."] * length
        for action, slot in actions.items():
            kind = action[0]
            cells[slot : slot + slots[kind]] = slots[kind] * [named(action, rank)]
        rows.append(" ".join(cells))
    return rows


def named(action: tuple, rank: int) -> str:
    """The letter is small for a rank's second stage."""
    kind, stage, k = action
    return f"{kind if stage == rank else kind.lower()}{k}"


def test_the_grids_of_the_text() -> None:
    """p = m = 2: six slots of 18 are idle, then three of 15."""
    text = (ROOT / LESSON).read_text(encoding="utf-8")
    for orders, slots, length, names in (
        (lists_of(2, 2, 1), {"F": 2, "B": 4}, 18, ("1F1B", "layers 0, 1", "layers 2, 3")),
        (lists_of(2, 2, 2), {"F": 1, "B": 2}, 15, ("v = 2", "layers 0, 2", "layers 1, 3")),
    ):
        rows = drawn(simulate(orders, slots), slots, length)
        grid = "".join(
            rf"#     {name} .*{re.escape(row)}\n" for name, row in zip(names, rows, strict=True)
        )
        assert re.search(grid, text), names


def test_the_lists_of_the_text() -> None:
    """p = 2, v = 2, m = 4: warm-up, steady state and cooldown."""
    text = (ROOT / LESSON).read_text(encoding="utf-8")
    for rank, order in enumerate(lists_of(2, 4, 2)):
        (row,) = re.findall(rf"#     rank {rank} +(F0 F1 .*)\n", text)
        assert row.split() == [named(action, rank) for action in order], rank
        num_warmup = [kind for kind, _, _ in order].index("B") - 1
        assert len(re.split(r" {2,}", row)[0].split()) == num_warmup
        assert set(re.split(r" {2,}", row)[2]) & {"F", "f"} == set()


def test_the_answers_numbers() -> None:
    """Four ranks, slots of half a rank's layers: with 8 and 64 micro-batches."""

    def length(orders: list[list], v: int, message: int = 0) -> int:
        return lesson.length(slots_of(orders, {"F": 2 // v, "B": 4 // v}, message))

    assert [length(lists_of(4, 8, v), v) for v in (1, 2)] == [66, 57]
    assert [length(lists_of(4, 64, v), v) for v in (1, 2)] == [402, 393]
    assert [length(orders, 2, 1) for orders in (torchs(4, 8, 2), lists_of(4, 8, 2))] == [71, 87]
    assert [held_at_most(orders[0]) for orders in (torchs(4, 8, 2), lists_of(4, 8, 2))] == [11, 8]


def test_lists_that_wait_for_each_other_end() -> None:
    """Two ranks, one micro-batch; then a rank 0 that wants its backward pass first."""
    orders = [[("F", 0, 0), ("B", 0, 0)], [("F", 1, 0), ("B", 1, 0)]]
    assert lesson.play(orders, 1) == [
        {("F", 0, 0): range(2), ("B", 0, 0): range(8, 12)},
        {("F", 1, 0): range(2, 4), ("B", 1, 0): range(4, 8)},
    ]
    assert lesson.play([orders[0][::-1], orders[1]], 1) == [{}, {}]


def test_a_share_is_of_the_medians() -> None:
    assert lesson.share_idle([11.0, 10.0, 99.0], [8.0, 1.0, 9.0]) == pytest.approx(3 / 11)


def PLAIN(played: Played) -> None:
    """The lists are drawn as grids, two rows a rank."""
    assert "1F1B: 66 slots\n" in played.output
    assert "v = 2: 57 slots\n" in played.output
    forward = f"  rank 3  ......{8 * 'FFBBBB'}............\n"
    numbers = f"{'':16}" + "".join(f"{k} {k}   " for k in range(8)).rstrip()
    assert f"{forward}{numbers}\n" in played.output
    assert "rank 0  FFFFffff......bbFbbFbbFbbFBBfBBfBBfBBfbb.bb.bb.bbBBBBBBBB\n" in played.output
    assert f"\n{'':10}01230123      0 41 52 63 70 41 52 63 74  5  6  7 4 5 6 7\n" in played.output


ERRORS, IDLE = (
    {f"{name}: {what}" for name in ("1F1B", "v = 2")}
    for what in ("error of the gradients", "share of slots idle")
)
SENT = "v = 2: messages / 1F1B's"
ONE_HELD, HELD, TORCHS_HELD = (
    f"{name}: micro-batches held" for name in ("1F1B", "v = 2", "torch's list")
)
LINES = {
    "a rank runs ahead by two per hop (Try)": (
        ("(v - 1) * p + p - 1 - rank", "(v - 1) * p + 2 * (p - 1 - rank)"),
        {ONE_HELD, HELD},
    ),
    "PyTorch's list is ours": (
        (
            'case.run(lists[RANK], 2)\n    claim("torch',
            'case.run(interleaved(RANK, p, MICRO_BATCHES, 2), 2)\n    claim("torch',
        ),
        {TORCHS_HELD},
    ),
    "a neighbor is not waited for": (
        ("max(now[rank], ends.get((kind, neighbor, k), 0))", "now[rank]"),
        IDLE | {"torch's list: share of slots idle"},
    ),
    "activations are kept": (
        ("held.pop((stage, k))", "held[stage, k]"),
        {ONE_HELD, HELD, TORCHS_HELD},
    ),
    "the loss is a sum over micro-batches": (("[k]) / MICRO_BATCHES", "[k])"), ERRORS),
    "messages of small stages count twice": (
        ("return len(sends), most_held", "return len(stages) * len(sends), most_held"),
        {SENT},
    ),
    "PyTorch minimizes another loss": (
        ("MICRO_BATCHES, loss_fn=F.mse_loss)", "MICRO_BATCHES, loss_fn=F.l1_loss)"),
        {"torch's Interleaved1F1B: error of the gradients"},
    ),
}
ALONE = ["a rank runs ahead by two per hop (Try)"]  # PyTorch's list is ours then
BREAKS = [Breaks(LINES, alone=ALONE)]
