"""Intervals, diagnosis and predictions are right, and breaks are seen."""

from dataclasses import replace
from itertools import accumulate, chain, pairwise
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock, patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from course.playing import load, play
from course.ranks import run as run_ranks
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "profiling/01_distributed_profiling.py"
loop = load(LESSON)

ON_GPUS = OnGpus(
    changes=[
        ("return 8_000_000 if", "return 80_000 if"),
        ("copy_ms * 28 / 8 * LAYERS", "copy_ms / 10"),
        ("perf_counter() - start) / 500 / 3", "perf_counter() - start) * 0 + 0.1"),
        (
            '        del jobs["tiny buckets"]\n',
            '        kept = ("healthy", "needless syncs", "straggler", "no overlap")\n'
            "        jobs = {name: jobs[name] for name in kept}\n",
        ),
    ],
    ranks=(1, 2),
)

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


NBYTES = 12 * 192_000
BUSY = {"compute": 180.0, "barrier": 0.0, "all-reduce": 15.0, "loader": 0.0, "idle": 2.0}
HEALTHY = loop.Case(
    197, 197, [BUSY, BUSY], hidden=0.85, message=192_000, calls=12, ranges=24, nbytes=NBYTES
)
LONG = BUSY | {"all-reduce": 110.0}
STARVED = BUSY | {"compute": 60.0, "all-reduce": 80.0}  # a third of the compute, not a quarter
CASES = {
    "healthy": HEALTHY,
    "slow loader": replace(HEALTHY, splits=[BUSY | {"loader": 108}] * 2),
    "straggler": replace(HEALTHY, splits=[LONG | {"all-reduce": 150}, BUSY | {"compute": 315}]),
    "needless syncs": replace(HEALTHY, splits=[BUSY | {"barrier": 110}] * 2),
    "tiny buckets": replace(HEALTHY, splits=[LONG] * 2, message=24_000, hidden=0.4, calls=96),
    "no overlap": replace(HEALTHY, splits=[LONG] * 2, hidden=0),
    "small batch": replace(HEALTHY, splits=[STARVED] * 2, hidden=0.3, doubled=100),
}


@pytest.mark.parametrize("name", CASES)
def test_diagnosis(name: str) -> None:
    assert loop.diagnose(CASES[name], latency_bound=115_200) == name


@pytest.mark.parametrize("name", list(CASES)[1:])
def test_predictions_come_near_the_healthy_step(name: str) -> None:
    case = CASES[name]
    assert loop.predicted_fixed(name, case) == pytest.approx(HEALTHY.total, rel=0.1)


def judged(*lines: tuple[str, str], **changes: object) -> set[str]:
    """What FAILs of these cases; each change is of the case with that name."""
    own = load(LESSON, *lines)
    own.WORLD_SIZE = 2
    cases = CASES | {name.replace("_", " "): case for name, case in changes.items()}
    own.check_traces(cases, 6_000)
    own.check_diagnosis(cases)
    own.check_predictions(cases)
    return {row["claim"] for row in own.ledger if row["verdict"] == "FAIL"}


def test_what_the_clock_decides_is_judged_rightly() -> None:
    assert judged() == set()
    assert judged(healthy=replace(HEALTHY, wall=180)) == {TRACED}
    assert judged(healthy=replace(HEALTHY, hidden=0.4)) == {min(HIDDEN)}
    cases = {"no_overlap": replace(CASES["no overlap"], hidden=0.2)}
    assert judged(**cases) == {max(HIDDEN), f"no overlap: {NAMED}"}
    assert judged(
        straggler=replace(CASES["straggler"], splits=CASES["straggler"].splits[::-1])
    ) == {"straggler: rank with least exposed"}
    assert judged(slow_loader=HEALTHY) == {f"slow loader: {what}" for what in (NAMED, LONGER)}
    half = replace(HEALTHY, splits=[BUSY | {"loader": 80, "idle": 80}] * 2)
    assert judged(slow_loader=half) == {f"slow loader: {FIXED}"}


@pytest.mark.parametrize("unit", ["case.total", "per_healthy_batch(name, case)"])
def test_that_nothing_is_gained_fails_for_all_six(unit: str) -> None:
    no_change = (
        "    exposed = statistics.mean",
        f"    return {unit}\n    exposed = statistics.mean",
    )
    assert judged(no_change) == {f"{name}: {FIXED}" for name in list(CASES)[1:]}


def test_four_times_the_compute_of_a_quarter_batch_is_too_much() -> None:
    fixed_costs_forgotten = ("3 * (case.doubled - compute)", "3 * compute")
    assert judged(fixed_costs_forgotten) == {f"small batch: {FIXED}"}


def test_lost_events_are_counted() -> None:
    assert judged(healthy=replace(HEALTHY, calls=11)) == {f"healthy: {CALLS}"}
    one_bucket_per_layer = {"tiny_buckets": replace(CASES["tiny buckets"], calls=12)}
    assert judged(**one_bucket_per_layer) == {f"tiny buckets: {CALLS}"}
    assert judged(straggler=replace(CASES["straggler"], ranges=23)) == {RANGES}
    assert judged(straggler=replace(CASES["straggler"], nbytes=NBYTES - 4)) == {BYTES}
    assert judged(straggler=replace(CASES["straggler"], nbytes=NBYTES + 4)) == {BYTES}


def test_the_size_of_a_message_is_read_from_the_trace() -> None:
    def called(ts: float, *shapes: list[int], cat: str = "cpu_op") -> dict:
        dims = {"args": {"Input Dims": [list(shapes), [], []]}}
        return event("c10d::allreduce_", ts, ts + 1, cat) | dims

    events = [called(4, [9]), called(5, [6, 2], [3]), called(7, [10]), called(11, [8])]
    events += [called(8, [99], cat="user_annotation"), event("aten::mm", 6, 7, "cpu_op")]
    assert loop.bytes_of_messages(events, (5, 10)) == [60, 40]


def test_all_ranks_look_at_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the one that is shortest on the rank where it takes longest."""
    own = load(LESSON)
    mine, others = [1.0, 5.0, 3.0], [9.0, 5.0, 4.0]
    steps = [event("step", 10 * i, 10 * i + ms) for i, ms in enumerate(mine)]
    gathered = []

    def gather(value: object) -> list:
        gathered.append(value)
        return [value, others if len(gathered) == 1 else value]

    monkeypatch.setattr(own, "record", lambda *_: (steps, mine))
    monkeypatch.setattr(own, "gather_objects", gather)
    case = own.run(own.HEALTHY, 1.0, torch.device("cpu"))
    assert (case.wall, case.total) == (3, 3)


def launched(name: str, launch: float, start: float, end: float) -> list[dict]:
    """A kernel, and the call that launched it, which took 0.1 ms."""
    link = {"args": {"correlation": round(1000 * launch)}}
    call = event("cudaLaunchKernel", launch, launch + 0.1, "cuda_runtime")
    return [call | link, event(name, start, end, "kernel") | link]


def copied(kind: str, start: float, end: float) -> dict:
    return event(f"Memcpy HtoD ({kind} -> Device)", start, end, "gpu_memcpy")


OPTIMIZER_NEEDS = 30.0  # ms that the optimizer's bytes need in these traces
ALONE = {  # of a step, in ms; each begins with a kernel that a reader must not mistake for the work
    "healthy, alone": [
        *launched("fill", 0, 0, 1),
        copied("Pinned", 1, 8),  # of which 6 ms before the first large kernel
        *launched("spin_kernel", 1, 7, 61),
        event("optimizer", 2, 4),  # the host's range; the kernel runs when it is long over
        *launched("FusedAdamMathFunctor", 3, 61, 93),
    ],
    "launch-bound kernels": [
        *launched("fill", 0, 0, 1),
        *chain(*(launched("spin_kernel", at, at + 1, at + 4) for at in range(1, 121, 6))),
        event("optimizer", 121, 122),
        *launched("FusedAdamMathFunctor", 121, 122, 154),
    ],
    "pageable copies": [
        *launched("fill", 0, 0, 1),
        copied("Pageable", 1, 61),
        *launched("spin_kernel", 61, 62, 122),
        event("optimizer", 63, 64),
        *launched("FusedAdamMathFunctor", 63, 122, 154),
    ],
    "memory-bound optimizer": [
        *launched("fill", 0, 0, 1),
        copied("Pinned", 1, 7),
        *launched("spin_kernel", 1, 7, 61),
        event("optimizer", 2, 4),
        *launched("vectorized_elementwise_kernel<Mul>", 2.1, 61, 101),
        *launched("vectorized_elementwise_kernel<Sqrt>", 3, 101, 146),
    ],
}


def alone(name: str, *change: tuple[str, str]) -> object:
    """The Case of one GPU's hand-written trace."""
    lesson = load(LESSON, *change)
    window = (0.0, 1 + max((one["ts"] + one["dur"]) / 1e3 for one in ALONE[name]))
    spans = lesson.read_trace(ALONE[name])
    ms = lesson.split_time(spans, window)
    shares = lesson.avoidable_shares(ALONE[name], spans, window, OPTIMIZER_NEEDS)
    return lesson.Case(window[1], window[1], [ms], 1.0, 0.0, shares)


def said(name: str, *change: tuple[str, str]) -> str:
    return load(LESSON, *change).diagnose(alone(name, *change), latency_bound=115_200)


@pytest.mark.parametrize("name", ALONE)
def test_the_diagnosis_of_one_gpu(name: str) -> None:
    assert said(name) == name.removesuffix(", alone")


@pytest.mark.parametrize("name", list(ALONE)[1:])
def test_the_predicted_cure_of_one_gpu(name: str) -> None:
    healthy = alone("healthy, alone")
    slow = alone(name)
    assert slow.total > healthy.total * 4 / 3
    assert loop.predicted_fixed(name, slow) == pytest.approx(healthy.total, rel=0.1)


def test_shares_of_one_gpu_by_hand() -> None:
    in_small, pageable, optimizer = (alone(name) for name in list(ALONE)[1:])
    assert in_small.avoidable["launch-bound kernels"] == pytest.approx((121.1 - 1 - 20 * 3) / 155)
    assert pageable.avoidable["pageable copies"] == pytest.approx(60 / 155)
    assert optimizer.avoidable["memory-bound optimizer"] == pytest.approx(
        (85 - OPTIMIZER_NEEDS) / 147
    )
    assert (
        loop.avoidable_shares([], loop.read_trace([]), (0, 1), OPTIMIZER_NEEDS) == {}
    )  # a CPU's trace


@pytest.mark.parametrize(
    ("fault", "named_wrong"),
    [
        (("length(optimizer) - needed", "length(optimizer)"), "healthy, alone"),
        (('"Memcpy HtoD (Pageable"', '"Memcpy DtoH"'), "pageable copies"),
        (("within(kernels + copies, launching)", "within(kernels, launching)"), "pageable copies"),
        (('["correlation"] in launched', '["correlation"] not in launched'), "healthy, alone"),
        (("launching[1] - launching[0] -", "window[1] - window[0] -"), "pageable copies"),
        (("share > 0.2:\n            return name", "share > 0.5:\n            return name"),
         "memory-bound optimizer"),
    ],
    ids=["bytes that are needed", "kind of copy", "copies leave no gap", "another's kernels",
         "the end is no launch", "threshold"],
)  # fmt: skip
def test_a_reader_of_one_gpu_at_fault_is_seen(fault: tuple[str, str], named_wrong: str) -> None:
    assert said(named_wrong, fault) != named_wrong.removesuffix(", alone")


def planted(*change: tuple[str, str]) -> dict[str, tuple[bool, bool, bool]]:
    """What the jobs of one GPU do on a pretended one.

    For each: whether many kernels are launched, whether a copy goes on behind the host, and whether
    the optimizer is fused.
    """
    from tests.helpers import pretended_gpus

    with pretended_gpus.pretended_gpus(1):
        lesson = load(LESSON, ("return 8_000_000 if", "return 80 if"), *change)
        device = torch.device("cuda", 0)
        found = {}
        for name, job_change in ({"healthy": {}} | lesson.ON_ONE_GPU).items():
            job = replace(lesson.Job(alone=True, batch_bytes=1000), **job_change)
            model = lesson.make_model(job, 1.0, device)
            extras = lesson.Extras(model, job)
            lesson.small_kernel_ms()
            with patch.object(torch.cuda, "_sleep", Mock()) as launch:
                model(torch.ones(8, device=device, requires_grad=True))
            extras.copy_batch(device)
            fused = extras.optimizer.defaults["fused"]
            found[name] = (launch.call_count > 2 * lesson.LAYERS, not extras.copies.query(), fused)
        return found


PLANTED = {
    "healthy": (False, True, True),
    "launch-bound kernels": (True, True, True),
    "pageable copies": (False, False, True),
    "memory-bound optimizer": (False, True, False),
}
NOT_PLANTED = {
    "launch-bound kernels": ("if job.small_kernels:", "if False:"),
    "pageable copies": ("pin_memory=job.pinned", "pin_memory=True"),
    "memory-bound optimizer": ("fused=job.fused", "fused=True"),
}


def test_each_job_on_one_gpu_has_its_bottleneck_and_no_other() -> None:
    assert run_ranks(planted, 1, group=False) == [PLANTED]


@pytest.mark.parametrize("name", NOT_PLANTED)
def test_a_bottleneck_that_is_not_planted_is_seen(name: str) -> None:
    (found,) = run_ranks(planted, 1, NOT_PLANTED[name], group=False)
    assert found == PLANTED | {name: PLANTED["healthy"]}


class Traffic(TorchDispatchMode):
    """Counts operations, and the numbers per element that they read and write."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements
        self.operations = 0
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in args if torch.is_tensor(x) and x.numel() == self.elements]
        if tensors:
            self.operations += 1
            self.numbers += len({x.data_ptr() for x in tensors}) + 1  # and what is written
        return result


def test_adamw_in_eight_operations_moves_twenty_numbers() -> None:
    weight = torch.ones(100, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], fused=False, foreach=False)
    for _ in range(2):  # the first step makes the moments
        weight.grad = torch.ones(100)
        with Traffic(100) as traffic:
            optimizer.step()
    assert (traffic.operations, traffic.numbers) == (8, 20)


def test_the_sizes_of_the_jobs_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic behind `choose_alone`: the fused optimizer takes U of a step of 3 U."""
    monkeypatch.setattr(loop, "median_ms", lambda work, repeats=20: 2.0)
    monkeypatch.setattr(loop, "gather_objects", lambda value: [value])
    job = loop.choose_alone(torch.device("cpu"))
    layer = 4 * loop.TENSORS * loop.elements_per_tensor(torch.device("cpu"))  # bytes
    U = 28 / 4 * loop.LAYERS * layer / (2 * layer / 2.0)  # by a copy's bytes per ms
    assert job.needed == pytest.approx(U)
    assert job.batch_bytes / (layer / 2.0) == pytest.approx(2 * U, rel=1e-3)
    assert 2 + 80 / 28 > 3 * 4 / 3  # the optimizer in eight operations
    assert 2 + 3 > 3 * 4 / 3  # a pageable copy
    assert 3 * 2 + 1 > 3 * 4 / 3  # launches that take three times as long as their kernels


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


CALLS = "all-reduces in the step's trace"
BYTES = "bytes in a step's messages, furthest off"
RANGES = "ranges of compute in a step's trace, fewest"
FIXED, NAMED, LONGER = "ms per step, fixed", "named", "step / healthy, at least"
TRACED = "a step in the trace / by the clock, worst case"
HIDDEN = {"healthy: communication hidden, at least", "no overlap: communication hidden, at most"}
NEEDED = ("healthy", "straggler", "no overlap")  # the lesson compares these in any case


def with_jobs(*names: str) -> tuple[str, str]:
    """A change that runs these jobs alone, and those that are needed."""
    jobs = tuple(dict.fromkeys((*NEEDED, *names)))
    all_jobs = "run(job, forward, device) for name, job in jobs.items()}"
    return all_jobs, f"run(jobs[name], forward, device) for name in {jobs}}}"


LINES = {
    "one bucket for all layers": (
        "bucket_cap_mb=job.bucket_mb or layer_mb",
        "bucket_cap_mb=job.bucket_mb or 25",
        {
            f"{name}: {CALLS}"
            for name in ("healthy", "slow loader", "straggler", "needless syncs", "small batch")
        },
    ),
    "buckets that are not tiny": (
        "replace(HEALTHY, bucket_mb=0.001)",
        "replace(HEALTHY, bucket_mb=0.0)",
        {f"tiny buckets: {CALLS}"},
    ),
    "a layer whose gradients are not averaged": (
        "for layer in model.module:",
        "for layer in model.module[1:]:",
        {f"no overlap: {CALLS}", BYTES},
    ),
    "compute that is in no range": (
        '    with record_function("compute"):\n',
        '    with record_function("compute" if ms < 10 else "work"):\n',
        {RANGES},
    ),
}
OF_THE_CLOCK = {
    "idle time is forgotten, and the host is slow": (
        [
            ('ms["idle"] = window[1] - window[0] - length(covered)', 'ms["idle"] = 0.0'),
            (
                "    x = torch.ones(8, device",
                "    time.sleep(0.05)\n    x = torch.ones(8, device",
            ),
        ],
        {TRACED},
    ),
}
NOT_JUDGED = (  # what builds on the split of a step
    "    check_diagnosis(cases)\n    check_predictions(cases)\n    check_one_gpu(device)\n",
    "    check_one_gpu(device)\n",
)


BREAKS = [
    Breaks(LINES, changes=[("ACTIVE = 4 ", "ACTIVE = 1 ")]),
    Breaks(OF_THE_CLOCK, changes=[with_jobs(), NOT_JUDGED], clock=True),
]

# Changes, the claims that a clock decides and that FAIL then, and the others that do. Each is a set
# of breaks that meet different claims; what builds on those may fail too, so these are no table for
# tests/lessons/every.py. A job that turned healthy gains nothing; by how much it seems to is noise:
# no FIXED.
SEEN_BY_THE_CLOCK = {
    "no wait of the loader; a barrier that is none; a bucket per layer after all; always overlap": (
        [
            ("time.sleep(job.loader * forward / 1e3)", "time.sleep(0.0 * forward / 1e3)"),
            ("            dist.barrier()\n\n\nclass Layer", "            pass\n\n\nclass Layer"),
            ("bucket_cap_mb=job.bucket_mb or layer_mb", "bucket_cap_mb=layer_mb"),
            ('"no overlap": replace(HEALTHY, overlap=False)', '"no overlap": replace(HEALTHY)'),
        ],
        {
            "no overlap: communication hidden, at most",
            *(
                f"{name}: {what}"
                for name in ("slow loader", "needless syncs", "tiny buckets", "no overlap")
                for what in (NAMED, LONGER)
            ),
        },
        {f"tiny buckets: {CALLS}"},
    ),
    "nobody looks at other ranks; hidden is taken for exposed": (
        [
            ("splits=[ms for ms, _, _ in everyone]", "splits=[ms]"),
            ("return 1 - exposed / communication if", "return exposed / communication if"),
        ],
        HIDDEN | {f"straggler: {NAMED}", f"no overlap: {NAMED}"},
        set(),
    ),
    "the clock counts another step; no cure is thought to help": (
        [
            ("wall=walls[best]", "wall=walls[best - 1] / 2"),
            (
                "    exposed = statistics.mean",
                "    return case.total\n    exposed = statistics.mean",
            ),
        ],
        {TRACED} | {f"{name}: {FIXED}" for name in ("slow loader", "straggler", "no overlap")},
        set(),
    ),
    "the trace is read in the wrong unit": (
        [
            (
                '(event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3)',
                '(event["ts"], event["ts"] + event["dur"])',
            )
        ],
        {TRACED},
        {f"{name}: {CALLS}" for name in NEEDED} | {BYTES},
    ),
}


@pytest.mark.clock
@pytest.mark.parametrize("names", SEEN_BY_THE_CLOCK)
def test_a_break_is_seen(names: str) -> None:
    changes, expected, exact = SEEN_BY_THE_CLOCK[names]
    jobs = [claim.partition(":")[0] for claim in sorted(expected - {TRACED})]
    played = play(LESSON, 2, *changes, with_jobs(*jobs))
    played.expect(exact)
    assert expected <= played.failed_by_clock, played.output  # what builds on it may fail too


def test_the_last_gradients_all_reduce_cannot_hide() -> None:
    lesson = load(LESSON)
    ms = {"compute": 60.0, "barrier": 0.0, "loader": 0.0, "idle": 0.0, "all-reduce": 36.0}
    case = lesson.Case(wall=96.0, traced=96.0, splits=[ms, ms], hidden=0.0, message=1e6)
    hidden = 36 * (lesson.LAYERS - 1) / lesson.LAYERS
    assert lesson.LAYERS == 12
    assert lesson.predicted_fixed("no overlap", case) == pytest.approx(96 - hidden)


# The jobs, without a clock


@pytest.mark.parametrize(
    ("name", "rank", "ms"),
    [
        ("healthy", 0, (3, 17)),
        ("healthy", 1, (17, 3)),  # in opposite turns: over all layers both have the same to do
        ("straggler", 0, (3, 17)),
        ("straggler", 1, (34, 6)),
        ("small batch", 0, (0.75, 4.25)),
    ],
)
def test_what_a_layer_computes(name: str, rank: int, ms: tuple) -> None:
    own = load(LESSON)
    own.WORLD_SIZE, own.RANK = 2, rank
    job = ({"healthy": own.HEALTHY} | own.BOTTLENECKS)[name]
    layers = own.make_model(replace(job, alone=True), 10.0, torch.device("cpu"))
    assert [layer.ms for layer in layers] == pytest.approx([*ms] * 6)


@pytest.mark.parametrize(
    ("change", "due"),
    [
        ({}, [0, 3, 17, 34, 6]),
        ({"loader": 6.0}, [60, 3, 17, 34, 6]),
        ({"syncs": True}, [0, 3, "barrier", 17, "barrier", 34, "barrier", 6, "barrier"]),
        ({"overlap": False}, [0, 3, 17, 34, 6, "48000 elements", "48000 elements"]),
    ],
)
def test_a_step_of_two_layers(change: dict, due: list) -> None:
    """The ms that it sleeps, and what else it does, in order: loader, forward, backward."""
    own, done = load(LESSON, ("LAYERS, TENSORS = 12, 8", "LAYERS, TENSORS = 2, 8")), []
    own.time = SimpleNamespace(sleep=lambda seconds: done.append(round(1e3 * seconds, 6)))
    own.start_all_reduce = lambda flat: done.append(f"{flat.numel()} elements") or Mock()
    job, cpu = replace(own.HEALTHY, **change), torch.device("cpu")
    layers = own.make_model(replace(job, alone=True), 10.0, cpu)
    ddp = MagicMock(side_effect=layers, module=layers)  # what DDP itself sends is left out
    with patch.object(own.dist, "barrier", lambda: done.append("barrier")):
        own.one_step(ddp, job, 10.0, cpu, None)
    assert done == due
    assert ddp.no_sync.called == (not job.overlap)


def one_message() -> tuple:
    """What 38,400 bytes come to, and the ms that the wire takes for them alone."""
    own, slept = load(LESSON), []
    own.time = SimpleNamespace(sleep=lambda s: slept.append((round(1e3 * s, 6), own.wire.locked())))
    mean = own.start_all_reduce(torch.full((9600,), float(own.RANK))).wait()
    return mean[0].item(), slept


def test_an_all_reduce_averages_and_the_wire_carries_one_message_at_a_time() -> None:
    assert run_ranks(one_message, 2) == [(0.5, [(3 + 1, True)])] * 2


def test_a_layers_forward_is_the_slowest_ranks_all_reduce_over_1_7() -> None:
    own = load(LESSON)
    own.WORLD_SIZE = 2
    seconds = [9, 9, 9, 0.001, 0.034, 0.034, 0.034, 0.5]  # three warm up; the median decides
    moments = iter(accumulate(chain.from_iterable((0, each) for each in seconds)))
    own.time = SimpleNamespace(perf_counter=lambda: next(moments))
    own.start_all_reduce = Mock()
    own.gather_objects = lambda ms: [ms, 1.5 * ms]
    with patch.object(own.dist, "barrier"):
        assert own.choose_forward(torch.device("cpu")) == pytest.approx(51 / 1.7)


def test_a_case_has_all_ranks_splits_and_the_least_that_is_hidden() -> None:
    own = load(LESSON)
    shown = [dict.fromkeys(own.KINDS, 2.0), dict.fromkeys(own.KINDS, 1.0)]
    gathered = iter([[[10.0], [10.0]], [(shown[0], 0.9, {}), (shown[1], 0.2, {})]])
    own.record = lambda *_: ([event("step", 0, 10)], [10.0])
    own.gather_objects = lambda value: next(gathered)
    own.bytes_of_messages = lambda *_: [100, 300]
    case = own.run(own.HEALTHY, 1.0, torch.device("cpu"))
    assert (case.splits, case.hidden) == (shown, 0.2)
    assert (case.message, case.nbytes, case.calls) == (200, 400, 2)


def test_shares_are_means_over_ranks_of_the_longest_step() -> None:
    splits = [BUSY | {"loader": 3.0}, BUSY | {"compute": 150.0, "loader": 9.0}]
    case = replace(HEALTHY, splits=splits)
    assert (case.total, case.share("loader"), case.spread()) == pytest.approx((200, 6 / 200, 30))


def test_a_small_batch_is_recorded_with_twice_the_batch_too() -> None:
    own, found = load(LESSON), {}
    own.WORLD_SIZE = 2
    own.command_line = lambda flags: SimpleNamespace(figure=None)
    own.launch = own.check_diagnosis = own.check_predictions = own.check_one_gpu = Mock()
    own.setup = lambda: torch.device("cpu")
    own.choose_forward = lambda device: 4.0
    own.run = lambda job, *_: replace(HEALTHY, splits=[BUSY | {"compute": 20 + 160 * job.batch}])
    own.check_traces = lambda cases, elements: found.update(cases)
    own.finish = Mock()
    own.main()
    assert list(found) == ["healthy", *own.BOTTLENECKS]
    assert found["small batch"].splits[0]["compute"] == 60
    assert found["small batch"].doubled == pytest.approx(100)


def test_the_figure_stacks_the_kinds_and_marks_the_predicted_step() -> None:
    with patch("matplotlib.figure.Figure") as figure:
        loop.draw({name: CASES[name] for name in ("healthy", "slow loader")}, "steps.png")
    axes = figure.return_value.subplots.return_value
    bars = {call.kwargs["label"]: call for call in axes.barh.call_args_list}
    names, widths = bars["loader"].args
    assert names == ["slow loader", "healthy"]
    assert widths == pytest.approx([108, 0])
    assert bars["loader"].kwargs["left"] == pytest.approx([195, 195])  # compute, all-reduce
    marks, slow = axes.plot.call_args.args[:2]
    assert (marks, slow) == (pytest.approx([197]), ["slow loader"])
    assert axes.axvline.call_args.args == (pytest.approx(197),)


def test_the_jobs_on_one_gpu_compute_twice_as_long_as_the_optimizer_needs() -> None:
    own, ran = load(LESSON), []
    own.choose_alone = lambda device: own.Job(alone=True, needed=36.0)
    own.run = lambda job, forward, device: ran.append((job, forward)) or HEALTHY
    own.check_diagnosis = own.check_predictions = Mock()
    own.check_one_gpu(torch.device("cuda"))
    assert [forward * 3 * own.LAYERS for _, forward in ran] == [72] * 4
    jobs = [(job.small_kernels, job.pinned, job.fused) for job, _ in ran]
    assert jobs == [*PLANTED.values()]


def test_a_small_kernel_takes_a_third_of_its_launch() -> None:
    own, launches = load(LESSON), []
    own.launch_small_kernels = lambda kernels, ms: launches.append(kernels)
    own.time = SimpleNamespace(perf_counter=lambda: 6e-6 * sum(launches))
    with patch.object(torch.cuda, "synchronize"):
        assert own.small_kernel_ms() == pytest.approx(0.002)
