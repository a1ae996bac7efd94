"""Merging keeps everything and moves it right, clocks are found from barriers, breaks are seen."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course.playing import load, play

LESSON = "profiling/02_one_trace_for_all_ranks.py"
merging = load(LESSON)


def event(name: str, start: float, end: float, **more: object) -> dict:
    return {"ph": "X", "name": name, "ts": 1e3 * start, "dur": 1e3 * (end - start)} | more


def test_merging_aligns_bases_and_renames_rows() -> None:
    traces = [
        {
            "baseTimeNanoseconds": 5_000_000,
            "traceEvents": [
                event("step", 1, 2, pid=77, cat="user_annotation"),
                event("kernel", 1, 2, pid=0),
            ],
        },
        {
            "baseTimeNanoseconds": 2_000_000,
            "traceEvents": [
                event("step", 4, 5, pid=78, cat="user_annotation"),
                {"ph": "s", "id": 3, "pid": 78, "ts": 4000.0, "name": "ac2g"},
                {"ph": "M", "name": "process_name", "pid": 78, "args": {"name": "python"}},
            ],
        },
    ]
    merged = merging.merge(traces)
    a, kernel, b = (e for e in merged if e["ph"] == "X")
    assert (a["pid"], b["pid"]) == (0, 1)
    assert kernel["pid"] not in (0, 1)  # a GPU's row is not the process's
    assert a["ts"] == b["ts"] == 4000  # both begin 4 ms after the earlier base
    arrow = next(e for e in merged if e["ph"] == "s")
    assert (arrow["pid"], arrow["ts"], arrow["id"]) == (1, 4000, "1.3")
    names = {e["pid"]: e["args"]["name"] for e in merged if e["name"] == "process_name"}
    assert (names[0], names[1]) == ("rank 0", "rank 1")
    assert merging.merge(traces, [0, 500])[-1]["ts"] == 3500  # a late clock: its events move back


def test_clocks_apart_are_found_through_barriers() -> None:
    rounds = [[(0, 10), (8, 10)], [(20, 30), (25, 31)]]
    assert merging.gap(rounds) == 0
    assert merging.gap([[(0, 10), (108, 110)]]) == 98
    assert merging.gap([[(0, 10), (3, 10), (108, 110)]]) == 98  # one of three alone


waits = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1)


@given(waits, st.integers(-1000, 1000))
def test_a_planted_error_lies_between_its_bounds_with_its_sign(waits: list, error: int) -> None:
    rounds = []
    for number, (wait_0, wait_1) in enumerate(waits):
        left = 1000 * number + 50  # both leave together, whoever came first
        rounds.append([(left - wait_0, left), (left - wait_1 + error, left + error)])
    at_least, at_most = merging.clock_error(rounds, rank=1)
    assert at_least <= error <= at_most
    assert at_most - at_least <= min(a + b for a, b in waits) or len(waits) > 1
    assert merging.gap(rounds) <= abs(error)


SPANS, REST = "spans of all files in the merged one", "arrows, counters and instants in it"
ARROWS = "arrows with both ends, each in its own rank"
STEPS, ROWS = "steps in the row of the rank that has fewest", "rows that bear their rank's name"
FILES, HERE = "files that know their rank", "us by which this machine's clocks are apart"
GAP, LATE, LEFT = (
    "ms of gap, rank 1's clock late",
    "ms late, from both bounds",
    "us of gap left, less than what it may be off",
)
FOUND = "barriers found in every rank's trace"
SHIFT = 'shift = (trace["baseTimeNanoseconds"] - earliest) / 1e3'
BREAKS = {
    "events are dropped": (
        ("            moved = event |", '            if event["name"] == "forward":\n'
         "                continue\n            moved = event |"),
        {SPANS},
    ),
    "arrows are dropped": (
        ("            moved = event |", '            if event["ph"] != "X":\n'
         "                continue\n            moved = event |"),
        {REST, ARROWS},
    ),
    "arrows of two ranks share a number": (
        ("""moved["id"] = f"{rank}.{event['id']}\"""", 'moved["id"] = event["id"]'),
        {ARROWS},
    ),
    "the sign of the shift is wrong": (
        (SHIFT, 'shift = (earliest - trace["baseTimeNanoseconds"]) / 1e3'),
        {LATE},
    ),
    "the wrong sign, as in Try": (
        ('moved["ts"] = event["ts"] + shift', 'moved["ts"] = event["ts"] - shift'),
        {LATE, LEFT},
    ),
    "bases are ignored, and differ": ((SHIFT, "shift = 1e6 * rank"), {HERE, GAP, LATE}),
    "all names go to one row": (
        ('metadata("process_name", new_pid,', 'metadata("process_name", 0,'),
        {ROWS},
    ),
    "only the first to come is looked at": (
        ("last_to_come = max(start", "last_to_come = min(start"),
        {GAP},
    ),
    "the clock's error is left in": (
        ("            shift -= clock_errors[rank]\n", "            pass\n"),
        {LEFT},
    ),
    "the estimate lies outside its bounds": (
        ("error = (at_least + at_most) / 2", "error = 2 * at_least - at_most"),
        {LATE, LEFT},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_seen(name: str) -> None:
    change, expected = BREAKS[name]
    play(LESSON, 2, change).expect(expected)


@pytest.mark.slow
def test_ranks_that_keep_the_numbers_of_their_processes_are_not_found() -> None:
    played = play(LESSON, 2, ('            rows[event["pid"]] = rank\n', "            pass\n"))
    assert re.search(r"rank \d raised: .*(Index|Key)Error", str(played.code), re.S), played.code


@pytest.mark.slow
def test_the_lesson_holds_and_saves_what_perfetto_reads(tmp_path) -> None:
    path = tmp_path / "all.json"
    played = play(LESSON, 3, argv=("--trace", str(path)))
    played.expect(set())
    saved = json.loads(path.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in saved if e["name"] == "process_name"}
    assert {f"rank {rank}" for rank in range(3)} <= names


@pytest.mark.slow
def test_nsys_that_fails_is_told_and_fails_no_claim() -> None:
    there = ('shutil.which("nsys") is None or nvtx is None:', "False:")
    fails = ('profiled = ["nsys", "profile"', 'profiled = ["false", "profile"')
    played = play(LESSON, 2, there, fails)
    played.expect(set())
    assert "returned non-zero exit status 1" in played.output
    assert played.ledger[-1]["needs"] == "nsys that works here"
