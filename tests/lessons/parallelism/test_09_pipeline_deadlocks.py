"""The simulator against formulas and another one, deadlocks, PyTorch's lists, broken lines."""

import functools
from fractions import Fraction
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course.playing import load, play
from tests.lessons.every import Breaks, test_lesson  # noqa: F401

LESSON = "parallelism/09_pipeline_deadlocks.py"
sizes = st.integers(1, 8), st.integers(1, 24)


@functools.cache
def lesson():
    return load(LESSON)


def lists_of(name: str, p: int, m: int) -> list[list]:
    return [getattr(lesson(), name)(s, p, m) for s in range(p)]


@settings(deadline=None)
@given(*sizes, st.integers(1, 5), st.integers(1, 5))
def test_bubbles_equal_the_formula_whatever_the_passes_cost(p: int, m: int, f: int, b: int) -> None:
    with patch.dict(lesson().SLOTS, F=f, B=b):
        for name in "gpipe", "one_f_one_b":
            starts = lesson().simulate(lists_of(name, p, m))
            assert lesson().idle_share(starts) == Fraction(p - 1, m + p - 1)


def earliest(schedule: list[list]) -> list[dict] | None:
    """The slots by another road: repeat until nothing changes. None: some never start."""
    p, slots, found = len(schedule), lesson().SLOTS, [{} for _ in schedule]
    changed = True
    while changed:
        changed = False
        for s, actions in enumerate(schedule):
            free = 0
            for direction, k in actions:
                source = s - 1 if direction == "F" else s + 1
                inside = 0 <= source < p
                if inside and (direction, k) not in found[source]:
                    break
                arrived = found[source][direction, k] + slots[direction] if inside else 0
                start = max(free, arrived)
                changed |= found[s].get((direction, k)) != start
                found[s][direction, k] = start
                free = start + slots[direction]
    return found if all(len(f) == len(a) for f, a in zip(found, schedule, strict=True)) else None


def shuffled(draw: st.DrawFn, p: int, m: int) -> list[list]:
    """Orders in which each micro-batch goes forward before it goes back, else at random."""
    schedule = []
    for _ in range(p):
        order = draw(st.permutations([k for k in range(m) for _ in "FB"]))
        seen: set = set()
        schedule.append([("B" if k in seen else "F", seen.add(k) or k) for k in order])
    return schedule


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 3))
def test_any_order_is_timed_right_or_refused(data: st.DataObject, p: int, m: int) -> None:
    schedule, answer = shuffled(data.draw, p, m), ""
    expected = earliest(schedule)
    try:
        lesson().check_schedule(schedule)
    except ValueError as error:
        answer = str(error)
    if expected is None:  # a cycle: nobody could run it
        assert "wait for ever" in answer
        assert "reorder" in answer
    elif not answer:  # what is refused may also be a knot of sends that wait for their receivers
        assert lesson().simulate(schedule) == expected


def test_what_cannot_finish_is_refused_with_rule_value_remedy() -> None:
    backwards_first = [[("B", 0), ("F", 0)]] * 2
    swapped = [[("F", 0), ("F", 1), ("B", 0), ("B", 1)], [("F", 1), ("F", 0), ("B", 0), ("B", 1)]]
    missing = [[("F", 0), ("B", 0)], [("F", 0)]]
    for schedule, action in (backwards_first, "B0"), (swapped, "F1"), (missing, "B0"):
        words = rf"every stage must .* stage 0 before {action}\b.*; reorder"
        with pytest.raises(ValueError, match=words):
            lesson().check_schedule(schedule)


@pytest.mark.parametrize("p", range(2, 9))
def test_the_deadlocks_are_as_told_for_any_number_of_stages(p: int) -> None:
    mixed = lesson().simulate(lesson().one_gpipe_among_1f1b(p, 8))
    assert len(mixed[-1]) == 2
    assert len(mixed[0]) == p  # the cycle lies between the last two; the others wait behind it
    lesson().check_schedule(lists_of("gpipe", p, 8), together=False)
    alone = lesson().simulate(lists_of("one_f_one_b", p, 8), together=False)
    assert all(len(starts) < 16 for starts in alone)


GRAD = "error of the gradients"
SLOTS = "actions not in the slot simulated"
BUBBLES = "128 simulated: not (p-1)/(m+p-1) idle"
DONE = "actions done"
MIXED, REFUSED = "one GPipe among 1F1B", "refused: messages handed to send"
FINISH = "sends first: stages that finish"
WARMUP = "num_warmup = min(p - 1 - stage, m)"
UNLIKE = "actions unlike our list's"
TORCHS = ("torch's GPipe: ", "torch's 1F1B: ", "torch's Interleaved1F1B: ")
LINES = {
    "1F1B is GPipe in disguise": (
        (WARMUP, "num_warmup = m"),
        {
            REFUSED,
            f"{MIXED}: done by the last stage",
            f"1F1B, {FINISH}",
            f"torch's 1F1B: {UNLIKE}",
        },
    ),
    "1F1B does not run ahead": (
        (WARMUP, "num_warmup = 0"),
        {BUBBLES, f"{MIXED}: done by the last stage", f"1F1B, {FINISH}", f"torch's 1F1B: {UNLIKE}"},
    ),
    "each message is sent twice": (
        (
            "ops.append(dist.P2POp(verbs[message.verb], stamp, message.peer, group))",
            "ops += 2 * [dist.P2POp(verbs[message.verb], stamp, message.peer, group)]",
        ),
        {"GPipe: messages handed to send", "1F1B: messages handed to send"},
    ),
    "a message that arrives costs no waiting": (
        ("                    clock[message.peer] = max(clock[message.peer], clock[s])\n", ""),
        {BUBBLES, f"GPipe: {SLOTS}", f"1F1B: {SLOTS}"},
    ),
    "the simulator cannot post together": (
        (
            "visible = posted[message.peer] if together else posted[message.peer][:1]",
            "visible = posted[message.peer][:1]",
        ),
        {BUBBLES, f"1F1B: {SLOTS}"},
    ),
    "the run does not read a message's clock": (
        ("                    now = max(now, stamp)", "                    pass"),
        {f"GPipe: {SLOTS}", f"1F1B: {SLOTS}"},
    ),
    "nothing is checked before the run": (
        ("        check_schedule(mixed)\n", ""),
        {REFUSED},
    ),
    "torch minimizes another loss": (
        ("loss_fn=F.mse_loss", "loss_fn=F.l1_loss"),
        {name + GRAD for name in TORCHS},
    ),
    "torch's GPipe for its 1F1B": (
        ('("1F1B", Schedule1F1B, one_f_one_b)', '("1F1B", ScheduleGPipe, one_f_one_b)'),
        {f"torch's 1F1B: {UNLIKE}"},
    ),
    "GPipe goes back in reverse order": (
        ('+ [("B", k) for k in range(m)]', '+ [("B", k) for k in reversed(range(m))]'),
        {f"torch's GPipe: {UNLIKE}"},
    ),
}  # fmt: skip

POSTED = {  # a clock decides how many actions are done before patience ends
    "the simulator always posts together": (
        (
            "    p = len(schedule)\n    starts: list",
            "    together = True\n    p = len(schedule)\n    starts: list",
        ),
        {f"1F1B, sends first: {DONE}"},
    ),
    "the run always posts together": (
        ("batches = [ops] if together else [[op] for op in ops]", "batches = [ops]"),
        {f"1F1B, sends first: {DONE}", f"1F1B, {FINISH}"},
    ),
    "the run receives first": (
        [
            ("else [[op] for op in ops]", "else [[op] for op in reversed(ops)]"),
            ("with_time = timedelta(minutes=2)", "with_time = PATIENCE"),  # it gets stuck
        ],
        {f"GPipe, sends first: {DONE}", f"GPipe, {FINISH}"},
    ),
    "an action counts before its messages have come": (
        (
            "            for message, stamp in exchange(",
            "            if todo is not None:\n"
            "                starts[todo] = now\n"
            "            for message, stamp in exchange(",
        ),
        {f"{MIXED}: {DONE}", f"{MIXED}: done by the last stage", f"1F1B, sends first: {DONE}"},
    ),
}
BREAKS = [Breaks(LINES), Breaks(POSTED, clock=True)]


@pytest.mark.deep
def test_it_holds_where_more_stages_need_more_micro_batches() -> None:
    play(LESSON, 6, ("max(8, WORLD_SIZE)", "max(4, WORLD_SIZE)"), deadline=200).expect(set())


@pytest.mark.deep
def test_without_the_timeout_the_deadlock_is_real() -> None:
    patience = ("PATIENCE = timedelta(seconds=3)", "PATIENCE = timedelta(seconds=200)")
    played = play(LESSON, 2, patience, deadline=15)
    assert played.code.count("hung: ") == 2, played.code
    assert played.code.count(", in exchange") == 2, played.code


# The run of parallelism/07's picture of 1F1B: three stages, five micro-batches
GRID = """\
F0 F1 F2  .  .  .  . B0 B0 F3 B1 B1 F4 B2 B2  . B3 B3  . B4 B4
 . F0 F1  .  . B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3  . B4 B4  .  .
 .  . F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4  .  .  .  ."""


def test_five_micro_batches_through_three_stages_take_these_slots() -> None:
    found = lesson().simulate(lists_of("one_f_one_b", 3, 5))
    for row, starts in zip(GRID.splitlines(), found, strict=True):
        cells = row.split()
        assert starts == {(c[0], int(c[1])): cells.index(c) for c in cells if c != "."}
        assert all(cells.count(f"{d}{k}") == lesson().SLOTS[d] for d, k in starts)


def test_sends_that_wait_for_their_receivers_are_checked_as_such() -> None:
    one_f_one_b = lists_of("one_f_one_b", 4, 8)
    lesson().check_schedule(one_f_one_b)
    with pytest.raises(ValueError, match="stage 3 before F1 wait for ever"):
        lesson().check_schedule(one_f_one_b, together=False)


def test_a_backward_pass_waits_for_the_forward_pass_of_its_own_micro_batch() -> None:
    lesson = load(LESSON)
    started = {("F", 0): 0, ("F", 2): 1}
    able = [k for k in range(4) if lesson.is_able(("B", k), started)]
    assert able == [0, 2]
    assert lesson.is_able(("F", 3), started)
    with pytest.raises(ValueError, match="stage 0 before B1"):
        lesson.check_schedule([[("F", 0), ("B", 1), ("F", 1), ("B", 0)]])
