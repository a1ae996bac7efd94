"""The simulator against formulas and another one, deadlocks for real, broken lines."""

import functools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course.playing import Played, load, play
from tests.lessons.every import Breaks, test_lesson  # noqa: F401

LESSON = "parallelism/09_pipeline_deadlocks.py"


@functools.cache
def lesson():
    return load(LESSON)


def lists_of(name: str, p: int, m: int) -> list[list]:
    return [getattr(lesson(), name)(s, p, m) for s in range(p)]


def all_can_run(schedule: list[list]) -> bool:
    """By another road: let any action be done whose input is there, until nothing changes."""
    found = [set() for _ in schedule]
    left = [list(actions) for actions in schedule]
    changed = True
    while changed:
        changed = False
        for s, actions in enumerate(left):
            while actions:
                direction, _ = actions[0]
                source = s - 1 if direction == "F" else s + 1
                if 0 <= source < len(schedule) and actions[0] not in found[source]:
                    break
                found[s].add(actions.pop(0))
                changed = True
    return not any(left)


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
def test_any_order_runs_to_its_end_or_is_refused(data: st.DataObject, p: int, m: int) -> None:
    schedule, answer = shuffled(data.draw, p, m), ""
    try:
        lesson().check_schedule(schedule)
    except ValueError as error:
        answer = str(error)
    done, waits = lesson().simulate(schedule)
    assert bool(answer) == any(waits)
    if not answer:
        assert done == [2 * m] * p
    if not all_can_run(schedule):  # nobody could, even with buffers for all messages
        assert "these wait forever: stage" in answer
        assert "reorder" in answer


@pytest.mark.parametrize("p", range(2, 9))
def test_the_deadlocks_are_as_told_for_any_number_of_stages(p: int) -> None:
    done, waits = lesson().simulate(lesson().one_gpipe_among_1f1b(p, 8))
    assert done[-1] == 2
    assert done[0] == p  # the circle lies between the last two; the others wait behind it
    assert [str(end) for end in waits[-1]] == [f"recv F2 from stage {p - 2}"]
    assert str(waits[-2][-1]) == f"recv B0 from stage {p - 1}"
    lesson().check_schedule(lists_of("gpipe", p, 8), together=False)
    done, _ = lesson().simulate(lists_of("one_f_one_b", p, 8), together=False)
    assert all(actions < 16 for actions in done)


def test_what_cannot_finish_is_refused_with_rule_value_remedy() -> None:
    swapped = [[("F", 0), ("F", 1), ("B", 0), ("B", 1)], [("F", 1), ("F", 0), ("B", 0), ("B", 1)]]
    missing = [[("F", 0), ("B", 0)], [("F", 0)]]
    for schedule, stuck in (
        (swapped, "stage 0 after 1 actions, in send F0 to stage 1"),
        (missing, "stage 0 after 1 actions, in recv B0 from stage 1"),
    ):
        words = rf"every stage must .* wait forever: {stuck}\b.*; reorder"
        with pytest.raises(ValueError, match=words):
            lesson().check_schedule(schedule)


@pytest.mark.parametrize("late", [[("B", 0), ("F", 0)], [("F", 1), ("B", 0), ("F", 0), ("B", 1)]])
def test_a_backward_pass_needs_its_own_forward_pass(late: list) -> None:
    early = sorted(late, key=lambda action: "FB".index(action[0]))
    lesson().check_schedule([early])
    words = "must go forward before it goes back, got B0 first on stage 1; reorder"
    with pytest.raises(ValueError, match=words):
        lesson().check_schedule([early, late])


def test_sends_that_wait_for_their_receivers_are_checked_as_such() -> None:
    one_f_one_b = lists_of("one_f_one_b", 4, 8)
    lesson().check_schedule(one_f_one_b)
    with pytest.raises(ValueError, match="stage 3 after 2 actions, in send B0 to stage 2"):
        lesson().check_schedule(one_f_one_b, together=False)


def test_messages_are_what_neighbors_of_the_stage_hand_over() -> None:
    message = lesson().Message
    between = lesson().messages(1, 3, ("F", 4), ("B", 2))
    assert between == [message("send", 2, ("F", 4)), message("recv", 2, ("B", 2))]
    assert lesson().messages(0, 3, ("B", 0), ("F", 1)) == []  # no stage before it
    assert lesson().messages(2, 3, ("F", 0), ("B", 0)) == []  # the loss is here
    assert lesson().messages(2, 3, None, ("F", 0)) == [message("recv", 1, ("F", 0))]


MIXED = "one GPipe among 1F1B"
FINISH = "stages that finish"
AS_SIMULATED = "stages as simulated"
CROSSING_STUCK = "1F1B, sends first: stuck, if p, m >= 2"
MIXED_STUCK = f"{MIXED}: stuck, if p >= 2, m >= 3"
HEALTHY_STUCK = "healthy schedules: stuck, of 192"
LINES = {
    "1F1B is GPipe in disguise": (
        "num_warmup = min(p - 1 - stage, m)",
        "num_warmup = m",
        {
            CROSSING_STUCK,
            MIXED_STUCK,
            f"{MIXED}: {FINISH}",
            f"{MIXED}: done by the last stage",
            f"1F1B, sends first: {FINISH}",
        },
    ),
    "the end of a list counts as an action": (
        "        if todo is not None:\n            done += 1\n",
        "        done += 1\n",
        {f"1F1B: {AS_SIMULATED}", f"GPipe, sends first: {AS_SIMULATED}"},
    ),
    "a stage receives first (Try)": (
        "for message in found if",
        "for message in found[::-1] if",
        {HEALTHY_STUCK, CROSSING_STUCK, f"GPipe, sends first: {FINISH}"},
    ),
}
UNEXPECTED = {  # a schedule gets stuck where the simulator sees none
    "the simulator posts all at once": (
        "at_once = 2 if together else 1",
        "at_once = 2",
        {CROSSING_STUCK, f"1F1B, sends first: {AS_SIMULATED}"},
    ),
    "the run posts the first message alone": (
        "[ends] if together and ends else ",
        "",
        {f"1F1B: {AS_SIMULATED}", f"1F1B: {FINISH}"},
    ),
}
POSTED = {  # a clock decides how many actions are done before patience ends
    "the simulator posts one message at a time (Try)": (
        "at_once = 2 if together else 1",
        "at_once = 1",
        {HEALTHY_STUCK, f"1F1B: {AS_SIMULATED}"},
    ),
    "the run always posts together": (
        "if together and ends",
        "if ends",
        {f"1F1B, sends first: {AS_SIMULATED}", f"1F1B, sends first: {FINISH}"},
    ),
    "an action counts before its messages have come": (
        "return done, stuck",
        "return done + 1, stuck",
        {
            f"{MIXED}: {AS_SIMULATED}",
            f"{MIXED}: done by the last stage",
            f"1F1B, sends first: {AS_SIMULATED}",
        },
    ),
}
BREAKS = [
    Breaks(LINES, alone=["the end of a list counts as an action"]),
    Breaks(UNEXPECTED, changes=[("seconds=3 if stuck else 60", "seconds=5")]),
    Breaks(POSTED, clock=True),
]


def PLAIN(played: Played) -> None:
    """The simulator names each of four stages in both deadlocks."""
    told = re.findall(r"stage (\d) after \d+ actions, in (?:send|recv) ", played.output)
    assert told == [*"0123"] * 2


def test_the_rounds_of_the_text() -> None:
    """Two stages, two micro-batches: round 4 passes both messages, or both hang."""
    schedule = lists_of("one_f_one_b", 2, 2)
    assert lesson().simulate(schedule)[0] == [4, 4]
    done, waits = lesson().simulate(schedule, together=False)
    assert done == [2, 2]
    assert [str(ends[0]) for ends in waits] == ["send F1 to stage 1", "send B0 to stage 0"]


@pytest.mark.deep
def test_without_patience_the_deadlock_is_real() -> None:
    patience = ("seconds=3 if stuck else 60", "seconds=200")
    played = play(LESSON, 2, patience, deadline=15)
    assert played.code.count("hung: ") == 2, played.code
    assert played.code.count(", in exchange") == 2, played.code


@pytest.mark.deep
def test_it_holds_with_as_many_stages_as_micro_batches() -> None:
    play(LESSON, 8, deadline=200).expect(set())
