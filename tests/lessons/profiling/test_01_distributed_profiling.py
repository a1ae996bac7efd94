"""Intervals, diagnosis and predictions are right, and breaks are seen."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course.playing import load, play

LESSON = "profiling/01_distributed_profiling.py"
loop = load(LESSON)

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


def event(name: str, start: float, end: float, cat: str = "user_annotation") -> dict:
    return {"ph": "X", "name": name, "cat": cat, "ts": 1e3 * start, "dur": 1e3 * (end - start)}


def test_a_step_is_cut_into_five_kinds_that_add_up() -> None:
    found = loop.read_trace(
        [
            event("loader", 0, 10),
            event("compute", 10, 30),
            event("gloo:all_reduce", 20, 45),  # 10 of its 25 ms behind compute
            event("compute", 50, 60),
            event("barrier", 60, 65),
            event("gloo:all_reduce", 90, 120),  # half of it after the step
        ]
    )
    ms = loop.split_time(found, (0, 105))
    assert ms == {"compute": 30, "barrier": 5, "all-reduce": 30, "loader": 10, "idle": 30}
    assert loop.hidden_share(found, ms, (0, 105)) == pytest.approx(10 / 45)


def test_on_a_gpu_kernels_count_nccl_is_communication_and_twins_are_left_out() -> None:
    found = loop.read_trace(
        [
            event("step", 0, 50),
            event("step", 5, 20, cat="gpu_user_annotation"),  # Kineto's twin of the host's range
            event("compute", 0, 1),  # the launch
            event("compute", 5, 25, cat="gpu_user_annotation"),
            event("spin_kernel", 5, 25, cat="kernel"),
            event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 20, 40, cat="kernel"),
        ]
    )
    assert found["step"] == [(0, 50)]
    ms = loop.split_time(found, (0, 50))
    assert ms == {"compute": 20, "barrier": 0, "all-reduce": 15, "loader": 0, "idle": 15}
    assert loop.hidden_share(found, ms, (0, 50)) == 0.25


BUSY = {"compute": 180.0, "barrier": 0.0, "all-reduce": 15.0, "loader": 0.0, "idle": 2.0}
HEALTHY = loop.Case(wall=197, traced=197, splits=[BUSY, BUSY], hidden=0.85, message=192_000)
LONG = BUSY | {"all-reduce": 110.0}
STARVED = BUSY | {"compute": 45.0, "all-reduce": 80.0}
CASES = {
    "healthy": HEALTHY,
    "slow loader": replace(HEALTHY, splits=[BUSY | {"loader": 108}] * 2),
    "straggler": replace(HEALTHY, splits=[LONG | {"all-reduce": 150}, BUSY | {"compute": 315}]),
    "needless syncs": replace(HEALTHY, splits=[BUSY | {"barrier": 110}] * 2),
    "tiny buckets": replace(HEALTHY, splits=[LONG] * 2, message=24_000, hidden=0.4),
    "no overlap": replace(HEALTHY, splits=[LONG] * 2, hidden=0),
    "small batch": replace(HEALTHY, splits=[STARVED] * 2, hidden=0.3),
}


@pytest.mark.parametrize("name", CASES)
def test_diagnosis(name: str) -> None:
    assert loop.diagnose(CASES[name], latency_bound=115_200) == name


@pytest.mark.parametrize("name", list(CASES)[1:])
def test_predictions_come_near_the_healthy_step_and_no_change_does_not(name: str) -> None:
    case = CASES[name]
    gain = loop.per_healthy_batch(name, case) - HEALTHY.total
    assert abs(loop.predicted_fixed(name, case) - HEALTHY.total) < gain / 3
    assert abs(loop.per_healthy_batch(name, case) - HEALTHY.total) > gain / 3


def test_every_bottleneck_is_planned_to_cost_a_third() -> None:
    """The arithmetic behind `Job`, in units of a layer's forward; one all-reduce takes 1.7."""
    layers, all_reduce = loop.LAYERS, 1.7
    healthy = 3 * layers + 2 * all_reduce
    assert loop.BOTTLENECKS["slow loader"].loader > healthy / 3
    assert loop.BOTTLENECKS["straggler"].slow * 3 * layers > healthy * 4 / 3
    assert 1.7 * 3 * layers > healthy * 4 / 3  # syncs: in each layer all wait for the slow one
    assert 3 * layers + layers * all_reduce > healthy * 4 / 3  # no overlap
    latency = all_reduce * loop.LATENCY / (loop.LATENCY + 192_000 / loop.BANDWIDTH)
    tiny = layers * (all_reduce + (loop.TENSORS - 1) * latency)
    assert layers + tiny > healthy * 4 / 3
    batch = loop.BOTTLENECKS["small batch"].batch
    assert (batch * layers + layers * all_reduce) / batch > healthy * 4 / 3


def test_one_rank_alone_is_told_what_it_lacks() -> None:
    played = play(LESSON, 1)
    played.expect(set())
    assert "needs 2 ranks" in played.output


@pytest.mark.slow
def test_the_figure_is_drawn(tmp_path) -> None:
    path = tmp_path / "steps.png"
    played = play(LESSON, 2, argv=("--figure", str(path)))
    assert path.read_bytes().startswith(b"\x89PNG"), played.output


FIXED, NAMED, LONGER = "ms per step, fixed", "named", "step / healthy, at least"
TRACED = "a step in the trace / by the clock, worst case"
HIDDEN = {"healthy: communication hidden, at least", "no overlap: communication hidden, at most"}
NEEDED = ("healthy", "straggler", "no overlap")  # the lesson compares these in any case


def with_jobs(*names: str) -> tuple[str, str]:
    """A change that runs these jobs alone, and those that are needed."""
    jobs = tuple(dict.fromkeys((*NEEDED, *names)))
    all_jobs = "run(job, forward, device) for name, job in jobs.items()}"
    return all_jobs, f"run(jobs[name], forward, device) for name in {jobs}}}"


BREAKS = {  # a job that turned healthy gains nothing; by how much it seems to is noise: no FIXED
    "the loader does not wait": (
        ("time.sleep(job.loader * forward / 1e3)", "time.sleep(0.0 * forward / 1e3)"),
        {f"slow loader: {what}" for what in (NAMED, LONGER)},
    ),
    "nobody looks at other ranks": (
        ("splits=[ms for ms, _ in everyone]", "splits=[ms]"),
        {f"straggler: {NAMED}"},
    ),
    "the trace is read in the wrong unit": (
        ('(event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3)',
         '(event["ts"], event["ts"] + event["dur"])'),
        {TRACED},
    ),
    "the clock counts another step": (("wall=walls[best]", "wall=walls[best - 1] / 2"), {TRACED}),
    "hidden is taken for exposed": (
        ("return 1 - exposed / communication if", "return exposed / communication if"),
        HIDDEN | {f"no overlap: {NAMED}"},
    ),
    "no cure is thought to help": (
        ("    exposed = statistics.mean", "    return case.total\n    exposed = statistics.mean"),
        {f"{name}: {FIXED}" for name in ("slow loader", "straggler", "no overlap")},
    ),
    "overlap is not switched off": (
        ('"no overlap": replace(HEALTHY, overlap=False)', '"no overlap": replace(HEALTHY)'),
        {"no overlap: communication hidden, at most",
         *(f"no overlap: {what}" for what in (NAMED, LONGER))},
    ),
    "a barrier that is none": (
        ("            dist.barrier()\n\n\nclass Layer", "            pass\n\n\nclass Layer"),
        {f"needless syncs: {what}" for what in (NAMED, LONGER)},
    ),
    "a bucket per layer after all": (
        ("bucket_cap_mb=job.bucket_mb or layer_mb", "bucket_cap_mb=layer_mb"),
        {f"tiny buckets: {what}" for what in (NAMED, LONGER)},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.clock
@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_seen(name: str) -> None:
    change, expected = BREAKS[name]
    jobs = [claim.partition(":")[0] for claim in sorted(expected - {TRACED})]
    played = play(LESSON, 2, change, with_jobs(*jobs))
    played.expect(set())
    assert expected <= played.failed_by_clock, played.output  # what builds on it may fail too


@pytest.mark.slow
@pytest.mark.clock
def test_idle_time_forgotten_is_seen() -> None:
    forgotten = (
        '    ms["idle"] = window[1] - window[0] - length(covered)\n',
        '    ms["idle"] = 0.0\n',
    )
    slow_host = (
        "    x = torch.ones(8, device",
        "    time.sleep(0.05)\n    x = torch.ones(8, device",
    )
    played = play(LESSON, 2, forgotten, slow_host, with_jobs())
    assert TRACED in played.failed_by_clock, played.output
