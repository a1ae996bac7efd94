"""Merging keeps everything and moves it right, clocks are found from barriers, breaks are seen."""

import json
import re
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course.playing import Lazily, play
from tests.lessons.every import Breaks, test_lesson  # noqa: F401

LESSON = "profiling/02_one_trace_for_all_ranks.py"
merging = Lazily(LESSON)


def event(name: str, start: float, end: float, **more: object) -> dict:
    return {"ph": "X", "name": name, "ts": 1e3 * start, "dur": 1e3 * (end - start)} | more


def test_merging_aligns_bases_and_renames_rows() -> None:
    traces = [
        {
            "baseTimeNanoseconds": 5_000_000,
            "traceEvents": [
                event("step", 1, 2, pid=77, cat="user_annotation"),
                event("kernel", 1, 2, pid=0),
                {"ph": "s", "id": 3, "pid": 77, "ts": 1000.0, "name": "ac2g"},
            ],
        },
        {
            "baseTimeNanoseconds": 2_000_000,
            "traceEvents": [
                event("step", 4, 5, pid=78, cat="user_annotation"),
                {"ph": "s", "id": 3, "pid": 78, "ts": 4000.0, "name": "ac2g"},
                {"ph": "M", "name": "process_name", "pid": 78, "args": {"name": "python"}},
                {"ph": "M", "name": "thread_name", "pid": 78, "tid": 9, "args": {"name": "loop"}},
                {"ph": "C", "name": "memory", "pid": 78, "ts": 4500.0, "args": {"bytes": 7}},
            ],
        },
    ]
    merged = merging.merge(traces)
    a, kernel, b = (e for e in merged if e["ph"] == "X")
    assert (a["pid"], b["pid"]) == (0, 1)
    assert kernel["pid"] not in (0, 1)  # a GPU's row is not the process's
    assert a["ts"] == b["ts"] == 4000  # both begin 4 ms after the earlier base
    first, second = (e for e in merged if e["ph"] == "s")
    assert (first["pid"], first["ts"], second["pid"], second["ts"]) == (0, 4000, 1, 4000)
    assert {type(first["id"]), type(second["id"])} == {int}  # Perfetto drops "1.3"
    assert first["id"] != second["id"]
    thread = next(e for e in merged if e["name"] == "thread_name")
    assert (thread["pid"], thread["tid"], thread["args"]) == (1, 9, {"name": "loop"})
    counter = next(e for e in merged if e["ph"] == "C")
    assert (counter["pid"], counter["ts"], counter["args"]) == (1, 4500, {"bytes": 7})
    assert merging.as_before(traces, merged) == {"X": 3, "s": 2, "M": 1, "C": 1}
    names = {e["pid"]: e["args"]["name"] for e in merged if e["name"] == "process_name"}
    assert (names[0], names[1]) == ("rank 0", "rank 1")
    assert merging.merge(traces, [0, 500])[-1]["ts"] == 4000  # a late clock: its events move back


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
        left = 1000 * number + 50  # both leave together, whichever came first
        rounds.append([(left - wait_0, left), (left - wait_1 + error, left + error)])
    at_least, at_most = merging.clock_error(rounds, rank=1)
    assert at_least <= error <= at_most
    assert at_least == error - min(wait_1 for _, wait_1 in waits)  # the shortest wait decides
    assert at_most == error + min(wait_0 for wait_0, _ in waits)
    assert merging.gap(rounds) <= abs(error)


@given(waits, st.integers(-99, 99))
def test_a_planted_drift_lies_between_its_bounds_with_its_sign(waits: list, percent: int) -> None:
    rounds = []
    for number, (wait_0, wait_1) in enumerate([*waits, (0, 0)]):
        left = 1000 * number + 50
        early, later = (t / (1 - percent / 100) + 7 for t in (left - wait_1, left))
        rounds.append([(left - wait_0, left), (early, later)])
    at_least, at_most = merging.clock_drift(rounds, rank=1)
    assert at_least - 1e-9 <= percent / 100 <= at_most + 1e-9


def test_what_a_drift_may_be_by_hand() -> None:
    """Rank 1 waits 4 and 1 us of each barrier, rank 0 nothing; its clock gains nothing."""
    rounds = [[(100, 100), (96, 100)], [(200, 200), (199, 200)]]
    at_least, at_most = merging.clock_drift(rounds, rank=1)
    # lower bounds -4 and -1, upper bounds 0 and 0: (-1 - 0) / (199 - 100), (0 - -4) / (200 - 96)
    assert (at_least, at_most) == pytest.approx((-1 / 99, 4 / 104))


def test_the_pair_of_barriers_that_tells_most_decides() -> None:
    """In the second barrier and in the last both ranks wait long."""
    rounds = [[(99, 100), (98, 100)], [(150, 200), (120, 200)]]
    rounds += [[(299, 300), (297, 300)], [(350, 400), (320, 400)]]
    bounds = [merging.clock_drift([*pair], rank=1) for pair in combinations(rounds, 2)]
    lower, upper = merging.clock_drift(rounds, rank=1)
    assert lower == max(at_least for at_least, _ in bounds) > bounds[-1][0]
    assert upper == min(at_most for _, at_most in bounds) < bounds[-1][1]


def test_a_clock_that_gains_shows_later_times_and_longer_spans() -> None:
    """It gains 0.1 us in each us that it shows: 9 ms by a right clock are 10 ms by it."""
    mine = {"traceEvents": [event("first", 1, 2), event("later", 10, 19)]}
    _, gained = merging.gaining([{}, mine])
    first, later = gained["traceEvents"]
    found = (first["ts"], later["ts"], later["dur"])
    assert found == pytest.approx((1e3, 11e3, 10e3))


SPANS, REST = (
    "spans of all files, in their row, at their time",
    "arrows, counters, instants, names, likewise",
)
STEP = ("step", "user_annotation")
ARROWS = "arrows with both ends and a number of their own"
HERE, GAP = "us by which this machine's clocks are apart", "ms of gap, rank 1's clock late"
LATE = "ms late, from both bounds"
SHIFT = 'shift = (trace["baseTimeNanoseconds"] - earliest) / 1e3'
MOVED = "            moved = event |"
NUMBER = 'moved["id"] = numbers.setdefault((rank, event["id"]), 1 + len(numbers))'
# Faults that are planted together, and the claims that have to FAIL.
LINES = {
    "spans are dropped": (
        [(MOVED, f'            if event["name"] == "forward":\n{" " * 16}continue\n' + MOVED)],
        {SPANS},
    ),
    "all but spans is dropped, as in Try, and only the first to come is looked at": (
        [
            (MOVED, '            if event["ph"] != "X":\n                continue\n' + MOVED),
            ("last_to_come = max(start", "last_to_come = min(start"),
        ],
        {REST, ARROWS, GAP},
    ),
    "numbers that Perfetto cannot read": (
        [(NUMBER, """moved["id"] = f"{rank}.{event['id']}\"""")],
        {ARROWS},
    ),
    "arrows of two ranks share a number": (
        [(NUMBER, 'moved["id"] = event["id"]')],
        {ARROWS, REST},
    ),
    "a thread's row, and the sign of the shift": (
        [
            (MOVED, '            event = event | {"tid": 0}\n' + MOVED),
            (SHIFT, 'shift = (earliest - trace["baseTimeNanoseconds"]) / 1e3'),
        ],
        {SPANS, REST, LATE},
    ),
    "the wrong sign, as in Try": (
        [('moved["ts"] = event["ts"] + shift', 'moved["ts"] = event["ts"] - shift')],
        {LATE},
    ),
    "bases are ignored, and differ": (
        [(SHIFT, "shift = 1e6 * rank")],
        {SPANS, REST, HERE, GAP, LATE},
    ),
}  # fmt: skip
UNBOUNDED = "at_least = -math.inf\n    at_most = math.inf\n    for spans"
OF_THE_CLOCK = {
    "the worst barrier decides": (
        [
            (UNBOUNDED, "at_least = math.inf\n    at_most = -math.inf\n    for spans"),
            ("max(at_least, start - end_0)", "min(at_least, start - end_0)"),
            ("min(at_most, end - start_0)", "max(at_most, end - start_0)"),
        ],
        {"bounds from all barriers / from one"},
    ),
}


BREAKS = [
    Breaks(LINES, alone=["the wrong sign, as in Try"]),
    Breaks(OF_THE_CLOCK, clock=True),
]


@pytest.mark.deep
def test_ranks_that_keep_the_numbers_of_their_processes_are_not_found() -> None:
    played = play(LESSON, 2, ('            rows[event["pid"]] = rank\n', "            pass\n"))
    assert re.search(r"rank \d raised: .*(Index|Key)Error", str(played.code), re.S), played.code


@pytest.mark.deep
def test_the_lesson_holds_and_saves_what_perfetto_reads(tmp_path) -> None:
    path = tmp_path / "all.json"
    played = play(LESSON, 3, argv=("--trace", str(path)))
    played.expect(set())
    saved = json.loads(path.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in saved if e["name"] == "process_name"}
    assert {f"rank {rank}" for rank in range(3)} <= names
    assert all(isinstance(e["pid"], int) for e in saved)
    spans = [e for e in saved if e["ph"] == "X"]
    steps = Counter(e["pid"] for e in spans if (e["name"], e.get("cat")) == STEP)
    assert steps == {0: 3, 1: 3, 2: 3}  # in the rank's own row
    arrows = Counter()
    for e in saved:
        if e["ph"] in "sf":  # Perfetto ties an arrow to the spans of its row
            row = [one for one in spans if (one["pid"], one["tid"]) == (e["pid"], e["tid"])]
            around = [one["ts"] - 0.01 <= e["ts"] <= one["ts"] + one["dur"] + 0.01 for one in row]
            assert any(around)
        if e["ph"] == "X":
            assert e["ts"] >= 0
            assert e["dur"] >= 0
            assert "tid" in e
        if e["ph"] in "sf":
            assert isinstance(e["id"], int)
            arrows[e["id"]] += 1
    assert arrows
    assert set(arrows.values()) == {2}
