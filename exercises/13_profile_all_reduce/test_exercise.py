"""Grader of 13: shares of traces made by hand, tick by tick; then a trace of a real loop."""

import contextlib
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.profiler import record_function

from course.grading import Wrong, expect, grade

T0 = 4_426_345_170_000.0  # microseconds; a trace's clock began long ago
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ON_A_GPU = (  # communication, compute
    [(NCCL, "kernel"), ("ncclKernel_AllGather_RING_LL_Sum_int8_t", "kernel")],
    [("ampere_sgemm_128x64_tn", "kernel"), ("void at::native::vectorized_elementwise", "kernel")],
)
ON_A_CPU = (
    [("gloo:all_reduce", "user_annotation"), ("gloo:broadcast", "cpu_op"), ("gloo:send", "async")],
    [("aten::mm", "cpu_op"), ("aten::add_", "cpu_op")],
)
TICKS = 64  # in a microsecond: no unit of a clock, yet sums of them are exact, even after T0
Spans = list[tuple[float, float]]  # microseconds after T0, in ticks


def event(name: str, cat: str, start: float, end: float, pid: int = 1, ph: str = "X") -> dict:
    return {"ph": ph, "name": name, "cat": cat, "pid": pid, "tid": 7, "ts": T0 + start,
            "dur": end - start, "args": {}}  # fmt: skip


def trace(steps: Spans, wire: Spans, busy: Spans, gpu: bool = False, pid: int = 1) -> list[dict]:
    """The events of one rank, as torch's profiler names them: of each kind several names."""
    events = [event("step", "user_annotation", *s, pid) for s in steps]
    events += [event(f"ProfilerStep#{i}", "user_annotation", *s, pid) for i, s in enumerate(steps)]
    for names, spans in zip(ON_A_GPU if gpu else ON_A_CPU, (wire, busy), strict=True):
        for at, s in enumerate(spans):
            name, cat = names[at % len(names)]
            events.append(event(name, cat, *s, pid))
    return events


ONE = [(0, 100)]
HALF = [(20, 60)], [(0, 30), (50, 70)]  # of 40 us, 20 are exposed
CASES = {  # title: steps, communication, compute, on a GPU, events that must not count
    "compute hides nothing": (ONE, [(60, 90)], [(0, 60)], False, []),
    "compute hides a part": (ONE, *HALF, False, []),
    "communication of several kinds": (ONE, [(5, 15), (60, 90)], [(20, 30), (70, 75)], False, []),
    "all-reduces that overlap": (ONE, [(10, 50), (30, 70), (40, 45)], [(0, 20)], False, []),
    "compute that nests and overlaps": (ONE, [(0, 80)], [(10, 50), (12, 48), (40, 60)], False, []),
    "three steps, and what lies between them": (
        [(0, 100), (150, 200.5), (300, 310)],
        [(20, 60), (110, 140), (160, 190.5)],
        [(30, 40), (100, 150), (170, 180)],
        *(False, []),
    ),
    "an all-reduce that runs over the ends of steps": (
        [(0, 100), (150, 200)],
        [(-20, 30), (90, 160), (190, 230)],
        [(-10, 10), (95, 155)],
        *(False, []),
    ),
    "no communication": (ONE, [], [(0, 60)], False, []),
    "other ranks' events": (
        *(ONE, *HALF, False),
        trace([(0, 300)], [(0, 90)], [(20, 90)], pid=0) + trace(ONE, [(5, 95)], [], True, pid=2),
    ),
    "a GPU": (ONE, *HALF, True, []),
    "a GPU: kernels of several kinds": (ONE, [(5, 15), (60, 90)], [(9, 30), (70, 75)], True, []),
    "a GPU: what the CPU does is not compute": (
        *(ONE, *HALF, True),
        [event("aten::mm", "cpu_op", 0, 90), event("cudaLaunchKernel", "cuda_runtime", 25, 55)],
    ),
    "a GPU: its twin of the step is no second step": (
        *(ONE, *HALF, True),
        [event("step", "gpu_user_annotation", 10, 95)],
    ),
    "a GPU: a kernel is communication if its name begins with nccl": (
        *(ONE, *HALF, True),
        [event("copy_for_nccl", "kernel", 0, 25)],
    ),
    "a GPU: copies are neither": (
        *(ONE, *HALF, True),
        [event("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 25, 55)],
    ),
    "a GPU that does not communicate": (
        *(ONE, [], [(0, 60)], True),
        [event("gloo:all_reduce", "user_annotation", 20, 90)],
    ),
    "a GPU that does not compute": (
        *(ONE, [(20, 60)], [], True),
        [event("aten::mm", "cpu_op", 0, 90)],
    ),
    "a GPU: its kernels lie outside the step": (
        *(ONE, [(120, 140)], [(105, 110)], True),
        [
            event("aten::mm", "cpu_op", 0, 90),
            event("gloo:all_reduce", "user_annotation", 20, 95),
        ],
    ),
    "a GPU: launches and annotations are not communication": (
        *(ONE, *HALF, True),
        [
            event("c10d::allreduce_", "cpu_op", 72, 80),
            event("nccl:all_reduce", "user_annotation", 72, 90),
            event("nccl:all_reduce", "gpu_user_annotation", 72, 90),
            event("gloo:all_reduce", "user_annotation", 72, 90),
        ],
    ),
    "launches and ranges on the CPU are neither": (
        *(ONE, *HALF, False),
        [
            event("c10d::allreduce_", "cpu_op", 15, 90),
            event("forward", "user_annotation", 0, 50),
            event("step of the scheduler", "user_annotation", 100, 130),
            event("optimizer.step", "user_annotation", 130, 150),
            event("aten::mm", "python_function", 0, 90),
            event("wait for gloo:all_reduce", "user_annotation", 60, 90),
            event("backward of aten::mm", "cpu_op", 0, 60),
        ],
    ),
    "events without a duration": (
        *(ONE, *HALF, False),
        [
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "rank 1"}},
            {"ph": "i", "s": "g", "name": "gloo:all_reduce", "pid": 1, "tid": 7, "ts": T0 + 5},
            {"ph": "s", "id": 3, "name": "aten::mm", "cat": "ac2g", "pid": 1, "ts": T0 + 5},
        ],
    ),
}


def due_of(steps: Spans, wire: Spans, busy: Spans) -> tuple[float, float, float]:
    """By counting: every tick is in a set, or is not."""

    def ticks(spans: Spans) -> set[int]:
        found = set()
        for start, end in spans:
            found |= set(range(int(TICKS * start), int(TICKS * end)))
        return found

    inside = ticks(steps)
    sent = ticks(wire) & inside
    exposed = sent - ticks(busy)
    return len(sent) / TICKS, len(exposed) / TICKS, len(exposed) / len(inside)


def shares_of(answer, wire, traces: list, rank: int) -> list[tuple]:
    given = json.dumps(traces)
    shares = [answer.share(events, rank) for events in traces]
    wire.only()
    if json.dumps(traces) != given:
        raise Wrong("the events were changed; they are the caller's")
    if other := [type(one).__name__ for one in shares if not isinstance(one, answer.Share)]:
        raise Wrong(f"share: expected a Share, got {other[0]}")
    return [tuple(one) for one in shares]


def check(answer: Path, seed: int, cases: dict[str, tuple], rank: int = 1) -> None:
    traces = []
    for steps, wire, busy, gpu, others in cases.values():
        events = trace(steps, wire, busy, gpu, rank) + others
        random.Random(seed).shuffle(events)
        traces.append(events)
    (shares,) = grade(answer, shares_of, 1, traces, rank, group=False)
    for got, (title, (steps, wire, busy, *_)) in zip(shares, cases.items(), strict=True):
        due = due_of(steps, wire, busy)
        names = ["us of communication", "us exposed", "of the step"]
        expect(len(got), 3, "numbers in the Share")
        for name, is_, ought in zip(names, got, due, strict=True):
            if not abs(is_ - ought) <= 1e-9 * max(1, ought):  # sums are exact, a quotient is not
                given = f"steps {steps}, communication {wire}, compute {busy}, in us"
                raise Wrong(f"{title}: {name}: expected {ought:.9g}, got {is_:.9g}\n{given}")


def covers(answer, wire, cases: list[tuple]) -> list[float]:
    return [answer.covered(list(spans), start, end) for spans, start, end in cases]


def test_covered(answer: Path, seed: int) -> None:
    """What spans cover: overlapping, nested, beyond both ends"""
    rng = random.Random(seed)
    cases: list[tuple] = [([(0, 3), (2, 5), (4, 4.5), (9, 20)], 1, 10), ([], 0, 7)]
    cases += [([(0, 9), (2, 4), (6, 7)], 0, 10), ([(8, 9), (0, 30)], 3, 20), ([(0, 2)], 4, 6)]
    for _ in range(100):
        starts = [rng.randint(0, 40 * TICKS) / TICKS for _ in range(rng.randint(1, 9))]
        cases.append(([(s, s + rng.randint(0, 10 * TICKS) / TICKS) for s in starts], 10, 30))
    (got,) = grade(answer, covers, 1, cases, group=False)
    for length, (spans, start, end) in zip(got, cases, strict=True):
        due, *_ = due_of([(start, end)], spans, [])
        expect(length, due, f"covered({spans}, {start}, {end})")


def test_share(answer: Path, seed: int) -> None:
    """The share: traces made by hand, each for one pitfall"""
    check(answer, seed, CASES)


@pytest.mark.parametrize("rank", [0, 2])
def test_many(answer: Path, seed: int, rank: int) -> None:
    """The share of rank {rank}: 20 traces drawn by lot"""
    rng = random.Random(seed + rank)
    cases = {}
    for i in range(20):
        ends = sorted(rng.sample(range(400 * TICKS), 2 * rng.randint(1, 4)))
        ends = [end / TICKS for end in ends]
        steps = list(zip(ends[::2], ends[1::2], strict=True))

        def spans() -> Spans:
            starts = [rng.randint(-10 * TICKS, 390 * TICKS) for _ in range(rng.randint(0, 12))]
            return [(s / TICKS, (s + rng.randint(0, 60 * TICKS)) / TICKS) for s in starts]

        others = trace([(0, 400)], spans(), spans(), bool(i % 2), pid=1)
        cases[f"trace {i}"] = steps, spans(), spans(), bool(i % 2), others
    check(answer, seed, cases, rank)


# A trace of a real loop


def loop(
    answer, wire, folder: str, count: int, warmup: int
) -> tuple[list[int], list[dict], list, list[str]]:
    """Which batches `step` saw, the trace's events, the calls, and what `span` was asked for."""
    rank = dist.get_rank()
    seen = []
    asked = []
    given = answer.span

    def span(name: str) -> contextlib.AbstractContextManager:
        asked.append(str(name))
        return given(name)

    answer.span = span
    os.environ["KINETO_LOG_LEVEL"] = "99"  # else the profiler tells when it starts and stops

    def step(batch: torch.Tensor) -> None:
        seen.append(int(batch[0]))
        with record_function(f"batch {int(batch[0])}"):
            work = dist.all_reduce(batch.clone(), async_op=True)
            torch.ones(64, 64) @ torch.ones(64, 64)
            work.wait()

    path = Path(folder, f"rank_{rank}.json")
    batches = [torch.full((1000,), float(i)) for i in range(count)]
    answer.record(step, batches, str(path), warmup)
    if not path.exists():
        raise Wrong(f"there is no trace at {path.name}")
    try:
        events = json.loads(path.read_text())["traceEvents"]
    except (ValueError, TypeError, KeyError):
        raise Wrong(f"{path.name} is no Chrome trace") from None
    return seen, [e for e in events if e["ph"] == "X"], wire.calls(), asked


def spans_of(events: list[dict], name: str) -> list[tuple]:
    found = [e for e in events if e["name"].startswith(name)]
    return sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in found)


@pytest.mark.parametrize(("n", "count", "warmup"), [(2, 5, 2), (3, 4, 1), (1, 3, 2)])
def test_record(answer: Path, n: int, count: int, warmup: int, tmp_path: Path) -> None:
    """A trace of a loop on {n} ranks: {count} steps, the first {warmup} left out"""
    outcomes = grade(answer, loop, n, str(tmp_path), count, warmup)
    for rank, (seen, events, calls, asked) in enumerate(outcomes):
        expect(seen, list(range(count)), f"rank {rank}: batches that step was called with")
        expect([e.op for e in calls], ["all_reduce"] * count, f"rank {rank}: its calls")
        marks = spans_of(events, "batch ")
        calls = spans_of(events, "c10d::allreduce_")
        due = [f"batch {i}" for i in range(warmup, count)]
        expect([name for *_, name in marks], due, f"rank {rank}: steps that its trace has seen")
        ranges = spans_of([e for e in events if e.get("cat") == "user_annotation"], "step")
        expect(len(ranges), count - warmup, f'rank {rank}: ranges named "step" in its trace')
        if asked.count("step") < count - warmup:
            told = "Nsight Systems would not see them"
            raise Wrong(f'rank {rank}: the ranges "step" are not made by span: {told}')
        for (start, end, _), mark in zip(ranges, marks, strict=True):
            if not start <= mark[0] <= mark[1] <= end:
                raise Wrong(f'rank {rank}: the range "step" does not hold its step, {mark[2]}')
            if not any(start <= first <= last <= end for first, last, _ in calls):
                raise Wrong(f"rank {rank}: {mark[2]}'s range holds no all-reduce")


LISTEN = """
import json, runpy, sys, torch
from course.playing import load
lesson = load("profiling/03_nsight_and_nvtx.py")
listener, why_not = lesson.listen()
if listener is None:
    sys.exit("needs " + why_not)
record = runpy.run_path(sys.argv[1], run_name="answer")["record"]
lesson.heard(listener)
record(lambda x: x + 1, [torch.ones(2)] * 3, sys.argv[2], 1)
print(json.dumps([one.name for one in lesson.ranges_of(lesson.heard(listener), None)]))
"""


def by_the_listener(answer: Path, folder: Path) -> list[str]:
    """The ranges of three steps, as profiling/03's listener hears them: nsys comes in so, too."""
    command = [sys.executable, "-c", LISTEN, str(answer), str(folder / "trace.json")]
    ran = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120
    )
    if ran.stderr.startswith("needs "):
        pytest.skip(f"needs nsys, or {ran.stderr.strip().removeprefix('needs ')}")
    if ran.returncode:
        raise Wrong(f"record failed: {ran.stderr.strip().splitlines()[-1]}")
    return json.loads(ran.stdout.splitlines()[-1])


def test_nsys(answer: Path, tmp_path: Path) -> None:
    """Nsight Systems sees the ranges"""
    if importlib.util.find_spec("nvtx") is None:
        pytest.skip("needs nsys, and the nvtx package")
    if shutil.which("nsys") is None:
        told = by_the_listener(answer, tmp_path)
        expect(told, ["step"] * 3, "ranges that NVTX is told of, and nsys would see")
        return
    code = (
        "import runpy, sys, torch\n"
        "record = runpy.run_path(sys.argv[1], run_name='answer')['record']\n"
        "record(lambda x: x + 1, [torch.ones(2)] * 3, sys.argv[2], 1)\n"
    )
    report = str(tmp_path / "report.nsys-rep")
    profiled = ["nsys", "profile", "-t", "nvtx", "-o", report, sys.executable, "-c", code]
    profiled += [str(answer), str(tmp_path / "trace.json")]
    try:
        subprocess.run(profiled, check=True, capture_output=True, timeout=60)
        stats = ["nsys", "stats", "-r", "nvtx_pushpop_sum", report]
        told = subprocess.run(stats, capture_output=True, text=True, timeout=60).stdout
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise Wrong(f"nsys could not run record: {error}") from None
    if "step" not in told:
        raise Wrong('the report has no range named "step": use span')
