"""Profiling's lessons: intervals, diagnosis and merging are right, and breaks are seen."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lessons import load, play

LOOP, MERGE = "profiling/01_distributed_profiling.py", "profiling/02_one_trace_for_all_ranks.py"
loop, merging = load(LOOP), load(MERGE)

spans = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted).map(tuple))


@given(spans)
def test_union_covers_the_same_points_with_disjoint_spans(given_spans: list) -> None:
    covered = {x for start, end in given_spans for x in range(start, end)}
    joined = loop.union(given_spans)
    assert {x for start, end in joined for x in range(start, end)} == covered
    assert loop.length(given_spans) == len(covered)
    assert all(a[1] < b[0] for a, b in pairwise(joined))


@given(spans, st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted).map(tuple))
def test_within_clips_to_the_window(given_spans: list, window: tuple) -> None:
    covered = {x for start, end in given_spans for x in range(start, end)}
    inside = covered & set(range(*window))
    assert loop.length(loop.within(given_spans, window)) == len(inside)


def event(name: str, start: float, end: float, **more: object) -> dict:
    return {"ph": "X", "name": name, "ts": 1e3 * start, "dur": 1e3 * (end - start)} | more


def test_a_step_is_cut_into_four_kinds_that_add_up() -> None:
    events = [
        event("loader", 0, 10),
        event("compute", 10, 30),
        event("gloo:all_reduce", 20, 45),  # 10 of its 25 ms behind compute
        event("compute", 50, 60),
        event("gloo:all_reduce", 90, 120),  # half of it after the step
    ]
    ms, hidden = loop.split(events, (0, 105))
    assert ms == {"compute": 30, "exposed": 30, "loader": 10, "idle": 35}
    assert hidden == pytest.approx(10 / 40)


def test_on_a_gpu_kernels_count_and_nccl_is_communication() -> None:
    events = [
        event("compute", 0, 1),  # the launch
        event("spin_kernel", 5, 25, cat="kernel"),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 20, 40, cat="kernel"),
    ]
    ms, hidden = loop.split(events, (0, 50))
    assert ms == {"compute": 20, "exposed": 15, "loader": 0, "idle": 15}
    assert hidden == 0.25


HEALTHY = loop.Case(
    wall=85,
    mine={},
    split={"compute": 72, "exposed": 8, "loader": 0, "idle": 5},
    compute=[72, 73],
    hidden=0.6,
    early=0.75,
    message=192_000,
    syncs=0,
)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({}, "healthy"),
        ({"split": HEALTHY.split | {"loader": 60}}, "slow loader"),
        ({"compute": [72, 144]}, "straggler"),
        ({"syncs": 4}, "needless syncs"),
        ({"message": 24_000}, "tiny buckets"),
        ({"early": 0}, "no overlap"),
        ({"split": HEALTHY.split | {"compute": 9}, "compute": [9, 9]}, "small batch"),
    ],
)
def test_diagnosis(change: dict, name: str) -> None:
    assert loop.diagnose(replace(HEALTHY, **change)) == name


def test_merging_aligns_bases_and_renames_rows() -> None:
    traces = [
        {"baseTimeNanoseconds": 5_000_000, "traceEvents": [event("a", 1, 2, pid=77)]},
        {"baseTimeNanoseconds": 2_000_000, "traceEvents": [event("b", 4, 5, pid=78), {"ph": "s"}]},
    ]
    merged = merging.merge(traces)
    a, b = (e for e in merged if e["ph"] == "X")
    assert (a["pid"], b["pid"]) == (0, 1)
    assert a["ts"] == b["ts"] == 4000  # both begin 4 ms after the earlier base
    names = [e["args"]["name"] for e in merged if e["name"] == "process_name"]
    assert names == ["rank 0", "rank 1"]


def test_clocks_apart_are_found_through_barriers() -> None:
    rounds = [[(0, 10), (8, 10)], [(20, 30), (25, 31)]]
    assert merging.apart(rounds) == 0
    assert merging.apart([[(0, 10), (108, 110)]]) == 98


LOST = "events of all traces that are in the merged one"
BREAKS = {
    "the loader's illness is switched on and off wrongly": (
        LOOP,
        ('"slow loader": replace(HEALTHY, loader=60)', '"slow loader": replace(HEALTHY, loader=1)'),
        {"slow loader: named, but as"},
    ),
    "nobody looks at other ranks": (
        LOOP,
        ('computes = [ms["compute"] for ms in splits]', "computes = [1.0 for ms in splits]"),
        {"straggler: named, but as"},
    ),
    "the trace is read in the wrong unit": (
        LOOP,
        ('(e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3)', '(e["ts"], (e["ts"] + e["dur"]))'),
        {f"{name}: the trace's sum, ms by the clock" for name in loop.ILLNESSES},
    ),
    "idle time is forgotten": (
        LOOP,
        ('kinds = ("compute", "exposed", "loader", "idle")', 'kinds = ("compute", "exposed")'),
        None,  # a KeyError, told by a rank
    ),
    "the merged file holds one rank": (
        MERGE,
        ("enumerate(traces):\n        late", "enumerate(traces[:1]):\n        late"),
        {LOST, "steps of the rank that has fewest", "ms found, all clocks but rank 0's 0.5 s late"},
    ),
    "bases are ignored, and differ": (
        MERGE,
        ('(trace["baseTimeNanoseconds"] - zero) / 1e3', "1e6 * rank"),
        {
            "us by which this host's clocks are apart",
            "ms found, all clocks but rank 0's 0.5 s late",
        },
    ),
    "events are dropped": (
        MERGE,
        (
            'if event.get("ph") == "X")\n',
            'if event.get("ph") == "X" and event["name"] != "forward")\n',
        ),
        {LOST},
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_seen(name: str) -> None:
    path, change, expected = BREAKS[name]
    played = play(path, 2, change)
    assert played.code != 0
    if expected is None:
        assert "KeyError" in str(played.code)
        return
    for claim in expected:  # what builds on it may fail too
        assert any(failed.startswith(claim) for failed in played.failed), played.failed
