"""The diagnosis of profiling/01 on models and sizes that its thresholds were not chosen on.

Nothing here may be used to choose a threshold. First by arithmetic: `simulate` says what the traces
would hold if no machine made noise. Then real traces of two more models and two more sizes.
"""

import functools
from collections import defaultdict
from dataclasses import dataclass, replace
from types import ModuleType

import pytest

from course.playing import Lazily, load, play

LESSON = "profiling/01_distributed_profiling.py"


@dataclass
class Model:
    """A model and its network; as it stands here, the lesson's own."""

    layers: int = 12
    tensors: int = 8  # of a layer
    kilobytes: float = 192  # of a layer's gradients
    uneven: tuple[float, ...] = (0.3, 1.7)  # the layers' compute over the mean, in turns
    ratio: float = 1.7  # a layer's all-reduce over its forward
    fixed: float = 0.0  # ms by which a layer's compute is longer than it should, whatever the batch


MODELS = {
    "8 layers of 12 tensors": Model(layers=8, tensors=12),
    "18 layers, three sorts": Model(layers=18, uneven=(0.2, 0.8, 2.0)),
    "24 layers of 4 tensors, nearly alike": Model(layers=24, tensors=4, uneven=(0.5, 1.5)),
    "6 layers": Model(layers=6),
}
AMOUNTS = {
    "five eighths of the bytes": Model(kilobytes=120),
    "twice as many bytes": Model(kilobytes=384),
    "longer forward": Model(kilobytes=144, ratio=1.4),
    "shorter forward": Model(ratio=2.0),
}


def simulate(lesson: ModuleType, name: str, model: Model, ranks: int, **changes: float) -> object:
    """The Case of a job without noise: all-reduces in order, one at a time, when all are ready."""
    job = replace(({"healthy": lesson.HEALTHY} | lesson.BOTTLENECKS)[name], **changes)
    messages = model.tensors if job.bucket_mb else 1  # of a layer
    nbytes = 1e3 * model.kilobytes / messages
    forward = (lesson.LATENCY + 1e3 * model.kilobytes / lesson.BANDWIDTH) / model.ratio
    spans = [defaultdict(list) for _ in range(ranks)]
    ready = compute(job, model, forward, spans)
    if not job.overlap:
        ready = [ready[-1]] * model.layers
    free = 0.0  # when the wire is
    for moments in ready:
        for _ in range(messages):
            starts = [max(moment, free) for moment in moments]
            free = max(starts) + lesson.LATENCY + nbytes / lesson.BANDWIDTH
            for mine, start in zip(spans, starts, strict=True):
                mine["all-reduce"].append((start, free))
    window = (0.0, free)
    splits = [lesson.split_time(mine, window) for mine in spans]
    pairs = zip(spans, splits, strict=True)
    hidden = min(lesson.hidden_share(mine, ms, window) for mine, ms in pairs)
    return lesson.Case(window[1], window[1], splits, hidden, nbytes)


def compute(job: object, model: Model, forward: float, spans: list[dict]) -> list[list[float]]:
    """Write loader, compute and barriers into each rank's spans.

    Returns for each layer, in the order of backward, when each rank has its gradients.
    """
    loader = 3 * model.layers * forward if job.loader else 0.0
    now = [loader for _ in spans]
    for mine in spans:
        mine["loader"].append((0, loader))
    forwards = [(layer, 1) for layer in range(model.layers)]
    backwards = [(layer, 2) for layer in reversed(range(model.layers))]
    ready = []
    for layer, times in forwards + backwards:
        for rank, start in enumerate(now):
            ms = times * job.batch * forward * model.uneven[(layer + rank) % len(model.uneven)]
            now[rank] += ms * (job.slow if rank == len(now) - 1 else 1) + model.fixed
            spans[rank]["compute"].append((start, now[rank]))
        if job.syncs:
            for mine, start in zip(spans, now, strict=True):
                mine["barrier"].append((start, max(now)))
            now = [max(now)] * len(now)
        if times == 2:
            ready.append(list(now))
    return ready


def named(lesson: ModuleType, model: Model, ranks: int) -> dict[str, str]:
    """What the diagnosis says of each job."""
    bound = lesson.LATENCY * lesson.BANDWIDTH
    jobs = ["healthy", *lesson.BOTTLENECKS]
    cases = {name: simulate(lesson, name, model, ranks) for name in jobs}
    return {name: lesson.diagnose(case, bound) for name, case in cases.items()}


lesson = Lazily(LESSON)


@functools.cache
def right() -> dict[str, str]:
    return {name: name for name in ["healthy", *lesson.BOTTLENECKS]}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", MODELS | AMOUNTS)
def test_each_job_is_named_by_arithmetic(kind: str, ranks: int) -> None:
    assert named(lesson, (MODELS | AMOUNTS)[kind], ranks) == right()


@pytest.mark.parametrize("kind", MODELS | AMOUNTS)
def test_each_bottleneck_costs_a_third_there_by_arithmetic(kind: str) -> None:
    healthy = simulate(lesson, "healthy", (MODELS | AMOUNTS)[kind], 2).total
    for name in lesson.BOTTLENECKS:
        case = simulate(lesson, name, (MODELS | AMOUNTS)[kind], 2)
        assert lesson.per_healthy_batch(name, case) > healthy * 4 / 3, name


@pytest.mark.parametrize("fixed", [0.0, 1.3])
@pytest.mark.parametrize("name", ["small batch", "slow loader", "no overlap", "needless syncs"])
def test_predictions_by_arithmetic_know_what_no_batch_changes(name: str, fixed: float) -> None:
    model = Model(fixed=fixed)
    healthy = simulate(lesson, "healthy", model, 2).total
    case = simulate(lesson, name, model, 2)
    if name == "small batch":
        twice = simulate(lesson, name, model, 2, batch=1 / 2)
        case.doubled = twice.share("compute") * twice.total
    assert lesson.predicted_fixed(name, case) == pytest.approx(healthy, rel=0.1)
    if name == "small batch" and fixed:
        others = load(LESSON, ("3 * (case.doubled - compute)", "3 * compute"))
        assert others.predicted_fixed(name, case) > 1.2 * healthy


THRESHOLDS = {
    "loader": ('case.share("loader") > 0.2', 'case.share("loader") > 0.55'),
    "spread": ("case.spread() > 0.25 * case.total", "case.spread() > 0.55 * case.total"),
    "waits": ('busiest["all-reduce"] < 0.15', 'busiest["all-reduce"] < 0.01'),
    "barrier": ('case.share("barrier") > 0.15', 'case.share("barrier") > 0.45'),
    "all-reduce, low": ('case.share("all-reduce") > 0.2', 'case.share("all-reduce") > 0.05'),
    "all-reduce, high": ('case.share("all-reduce") > 0.2', 'case.share("all-reduce") > 0.4'),
    "message": ("case.message < latency_bound", "case.message < latency_bound / 10"),
    "hidden": ("case.hidden < 0.1", "case.hidden < 0.4"),
}


@pytest.mark.parametrize("name", THRESHOLDS)
def test_a_threshold_that_fits_no_more_is_seen(name: str) -> None:
    other = load(LESSON, THRESHOLDS[name])
    assert any(named(other, model, 2) != right() for model in (MODELS | AMOUNTS).values())


def test_the_limits_that_the_lesson_tells() -> None:
    four_layers = simulate(lesson, "healthy", replace(Model(), layers=4), 2)
    assert four_layers.share("all-reduce") == pytest.approx(0.2, abs=0.02)
    two_layers = named(lesson, replace(Model(), layers=2), 2)
    assert two_layers["healthy"] == "small batch"
    latency_bound = named(lesson, replace(Model(), kilobytes=96), 2)
    wrong = {name for name, said in latency_bound.items() if said != name}
    assert wrong == {"no overlap", "small batch"}
    assert {latency_bound[name] for name in wrong} == {"tiny buckets"}


THREE_SORTS = ("UNEVEN = (0.3, 1.7)", "UNEVEN = (0.2, 0.8, 2.0)")
TRACED = {  # two models and two sizes, by real traces
    "model: 8 layers of 12 tensors": [("LAYERS, TENSORS = 12, 8", "LAYERS, TENSORS = 8, 12")],
    "model: 18 layers, three sorts": [
        ("LAYERS, TENSORS = 12, 8", "LAYERS, TENSORS = 18, 8"),
        THREE_SORTS,
    ],
    "size: twice as many bytes": [("else 6_000", "else 12_000")],
    "size: fewer bytes, longer forward": [
        ("else 6_000", "else 4_500"),
        ("statistics.median(times[3:]))) / 1.7", "statistics.median(times[3:]))) / 1.4"),
    ],
}


@pytest.mark.clock
@pytest.mark.parametrize("kind", TRACED)
def test_each_job_is_named_from_its_traces(kind: str) -> None:
    """Only the names are judged: predictions are the lesson's own."""
    played = play(LESSON, 2, ("ACTIVE = 4", "ACTIVE = 2"), *TRACED[kind])
    played.expect(set())
    verdicts = {row["claim"]: row["verdict"] for row in played.ledger}
    expected = {f"{name}: named": "PASS" for name in right()}
    assert {claim: verdicts[claim] for claim in expected} == expected, played.output
