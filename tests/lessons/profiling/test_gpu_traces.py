"""All that reads traces, on one that a GPU would give: twins, kernels, launches and arrows."""

from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from course.playing import load
from tests.helpers.gpu_trace import GPU, MS, STEP_MS, STEPS, gpu_trace

ONE, MANY = "profiling/01_distributed_profiling.py", "profiling/02_one_trace_for_all_ranks.py"
OVERLAP, EXERCISE = "communication/06_overlap.py", "exercises/13_profile_all_reduce/solution.py"


def every_step(*change: tuple[str, str]) -> list[dict[str, float]]:
    """The five kinds of each step that profiling/01 finds in the trace."""
    loop = load(ONE, *change)
    found = loop.read_trace(gpu_trace(0)["traceEvents"])
    return [loop.split_time(found, window) for window in found["step"]]


def test_a_step_on_a_gpu_is_cut_as_by_hand() -> None:
    assert every_step() == [pytest.approx(MS)] * STEPS
    loop = load(ONE)
    found = loop.read_trace(gpu_trace(0)["traceEvents"])
    window = found["step"][0]
    hidden = loop.hidden_share(found, loop.split_time(found, window), window)
    assert hidden == pytest.approx(10 / 45)


@pytest.mark.parametrize(
    "fault",
    [
        ('if event.get("cat") == category]', 'if event.get("cat", "").endswith(category)]'),
        ("    if kernels:\n", "    if not kernels:\n"),
        ('spans["compute"] = spans_of(computing', 'spans["compute"] += spans_of(kernels'),
    ],
    ids=["twins are steps", "launches for compute", "NCCL's kernels for compute"],
)
def test_a_reader_at_fault_cuts_a_step_otherwise(fault: tuple[str, str]) -> None:
    assert every_step(fault) != [pytest.approx(MS)] * STEPS


def verdicts(traces: list[dict], *change: tuple[str, str]) -> dict[str, str]:
    """What profiling/02 claims of two ranks' traces."""
    merging = load(MANY, *change)
    merging.WORLD_SIZE = 2
    merging.ACTIVE = STEPS
    merging.ROUNDS = 1
    merged = merging.merge(traces)
    merging.check_merging(traces, merged)
    merging.check_clocks(traces, merged)
    return {row["claim"]: row["verdict"] for row in merging.ledger}


def two_files(backward: bool = False) -> list[dict]:
    """Rank 1's begins 200 ms later and comes 20 ms late to the barrier; events in either order."""
    traces = [gpu_trace(0), gpu_trace(1, late=20, base_ms=200)]
    for trace in traces:
        trace["traceEvents"] = trace["traceEvents"][:: -1 if backward else 1]
    return traces


@pytest.mark.parametrize("backward", [False, True], ids=["host first", "GPU first"])
def test_two_gpus_traces_are_merged_and_their_clocks_agree(backward: bool) -> None:
    assert set(verdicts(two_files(backward)).values()) == {"PASS"}


def test_a_gpu_in_its_process_s_row_is_seen() -> None:
    found = verdicts(two_files(), ("1000 * (rank + 1) + len(rows)", "rank"))
    assert found["spans of all files, in their row, at their time"] == "FAIL"


def as_profiler(events: list[dict]) -> SimpleNamespace:
    """A profiler whose `events()` are those of a trace."""
    found = []
    for event in events:
        if event["ph"] == "X":
            times = SimpleNamespace(start=event["ts"], end=event["ts"] + event["dur"])
            where = DeviceType.CUDA if event["pid"] == GPU else DeviceType.CPU
            mine = event["cat"].endswith("user_annotation")
            more = {"time_range": times, "device_type": where, "is_user_annotation": mine}
            found.append(SimpleNamespace(name=event["name"], **more))
    return SimpleNamespace(events=lambda: found)


def a_pass(*change: tuple[str, str]) -> tuple[float, float]:
    """Ms of compute, and of exposed communication, that communication/06 finds in a pass."""
    overlap = load(OVERLAP, *change)
    events = [event for event in gpu_trace(0)["traceEvents"] if event["ph"] == "X"]
    first = min(event["ts"] for event in events if event["name"] == "step") + 1e3 * STEP_MS
    for event in events:  # the first step plays what is prepared before the pass
        if event["name"] == "step" and event["ts"] + 1 > first:
            event["name"] = "pass"
    spans = overlap.spans_of(as_profiler(events), on_gpu=True)
    return 1e3 * overlap.covered(overlap.computing(spans)), 1e3 * overlap.exposed(spans)


def test_a_pass_on_a_gpu_is_its_own_kernels() -> None:
    assert a_pass() == pytest.approx((48, 15))  # 10 of an all-reduce, 5 of the barrier in the step


@pytest.mark.parametrize(
    "fault",
    [
        (" and not event.is_user_annotation\n", "\n"),
        ("if on_gpu and kernel and event.time_range.start >= begin:", "if on_gpu and kernel:"),
        ('event.name.startswith("nccl") else "compute"', 'event.name == "nccl" else "compute"'),
    ],
    ids=["twins are kernels", "what came before counts", "NCCL's kernels for compute"],
)
def test_a_pass_read_at_fault_is_another(fault: tuple[str, str]) -> None:
    assert a_pass(fault) != pytest.approx((48, 15))


def share(*change: tuple[str, str]) -> tuple[float, float, float]:
    """What exercise 13's solution says of rank 1 in a trace of both ranks."""
    events = []
    for rank in range(2):
        events += [event | {"pid": rank} for event in gpu_trace(rank)["traceEvents"]]
    return tuple(load(EXERCISE, *change).share(events, 1))


def test_exercise_13_reads_the_same_trace() -> None:
    assert share() == pytest.approx((25e3 * STEPS, 15e3 * STEPS, 0.15))
    twins = ('(e["name"], e["cat"]) == ("step", "user_annotation")', 'e["name"] == "step"')
    assert share(twins) != pytest.approx((25e3 * STEPS, 15e3 * STEPS, 0.15))
