"""Overlap: spans against counting, order and values at any world size, breaks, nothing left."""

import contextlib
import functools
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from torch.autograd import DeviceType

from course.lessons import ROOT
from course.playing import Played, load, play
from course.ranks import attempt, run
from tests.helpers.leftovers import MARKED, gone, machine
from tests.helpers.virtual_cluster import once_there, play_as_nobody
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "communication/06_overlap.py"
NO_LINK = [("    check_across_the_cable(link, why_not, options.figure)\n", "")]
NO_LINK += [
    (
        'link, why_not = start_ranks(2, MBIT, measure_when_told) if RANK == 0 else ([], "")',
        'link, why_not = [], ""',
    )
]
NO_HERE = [("    measure_on_this_machine(device)\n", "")]
ONE_STEP = [
    ("    for name in PASSES:\n        worst", '    for name in ("backward",):\n        worst')
]
ONE_STEP += [('        "forward": ForwardPass(x_BD, Recorder(), NAP / 2),\n', "")]
QUICK = [("REPEATS = 3", "REPEATS = 1")]
# What rank 0 alone starts is the same whatever the lesson's world size is.
SIZES = {3: [NO_LINK[0], *QUICK]}
# Its ranks across a cable are forked, and on gloo. Kineto asks the driver for CUDA's events.
ON_GPUS = OnGpus(
    changes=[
        NO_LINK[0],
        ("        activities.append(ProfilerActivity.CUDA)\n", "        pass\n"),
        ("batch(RANK, 4096, 4096)", "batch(RANK, 16, D)"),
        ("min(max(times, 1), 16)", "2"),
        *QUICK,
        ("torch.randn(8192, 8192,", "torch.randn(64, 64,"),
        ("torch.empty(1 << 26,", "torch.empty(1 << 16,"),
    ]
)


@functools.cache
def lesson():
    return load(LESSON)


spans = st.lists(
    st.tuples(st.sampled_from(["compute", "communication"]), st.integers(0, 30), st.integers(0, 9))
)


@given(spans)
def test_exposed_is_what_counting_moments_says(drawn: list[tuple[str, int, int]]) -> None:
    placed = [lesson().Span(kind, 7, start, start + long) for kind, start, long in drawn]
    moments = {"compute": set(), "communication": set()}
    for kind, _, start, end in placed:
        moments[kind] |= set(range(start, end))
    assert lesson().exposed(placed) == len(moments["communication"] - moments["compute"])


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [2, 5])  # 3 and 4: test_lesson
def test_order_and_values_hold_for_any_number_of_ranks(ranks: int) -> None:
    played = play(LESSON, ranks, *NO_LINK, *NO_HERE)
    played.expect(set())
    assert [row["verdict"] for row in played.ledger] == ["PASS"] * 8 + ["BLOCKED"]  # GPU streams


def gradients_twice(how: str) -> bool:
    """Whether a pass that runs again finds the same gradients, and not those of both passes."""
    here = load(LESSON)
    step = here.BackwardPass(here.batch(here.RANK, 4, 16), here.Recorder())
    found = []
    for _ in range(2):
        step.recorder.begin()
        step.prepare(how)
        step.run()
        found.append(step.buckets.clone())
    return torch.equal(*found)


@pytest.mark.parametrize("how", ["after", "overlap"])
def test_a_pass_begins_without_the_gradients_of_the_last(how: str) -> None:
    assert run(gradients_twice, 2, how) == [True, True]


def late_work() -> list[list[float]]:
    """What an all-reduce on the late network leaves: when called, before and after the wait."""
    x = torch.ones(2)
    work = lesson().LateWork(torch.distributed.all_reduce, (x,))
    before = x.tolist()
    x.fill_(7)
    work.wait()
    return [before, x.tolist()]


def test_the_late_network_reads_at_once_and_delivers_when_waited_for() -> None:
    assert run(late_work, 3) == [[[1, 1], [3, 3]]] * 3


SENT, GRADIENTS = "all-reduces before the last gradient", "error of the gradients"
AHEAD, ACTIVATIONS = "all-gathers begun a layer ahead", "error of the activations"
HALF_FULL = ("layer % PER_BUCKET == 0:", "layer % PER_BUCKET == 1:")
# Only the late network: a real one would write to memory that may be gone, and crash at times.
NO_FINAL_WAIT = (
    "            work.wait()\n",
    "            if not self.recorder.late:\n                work.wait()\n",
)
NO_WAIT = (
    "                self.recorder.works[layer].wait()\n",
    "                if not self.recorder.late:\n"
    "                    self.recorder.works[layer].wait()\n",
)
LINES = {
    "a bucket leaves before it is full": (
        [HALF_FULL],
        {"overlap: " + SENT, "overlap: " + GRADIENTS},
    ),
    "all buckets wait for the last gradient": (
        [
            (
                "layer % PER_BUCKET == 0:  # the first layer comes last\n            self",
                "layer == 0:\n            for bucket in reversed(range(BUCKETS)): self",
            )
        ],
        {"overlap: " + SENT},
    ),
    "a gradient is no view of its bucket": (
        [
            (
                "self.buckets[layer // PER_BUCKET, layer % PER_BUCKET]",
                "self.buckets[layer // PER_BUCKET, layer % PER_BUCKET].clone()",
            )
        ],
        {how + GRADIENTS for how in ("after: ", "overlap: ")},
    ),
    "nobody waits in the end": (
        [NO_FINAL_WAIT],
        {how + GRADIENTS for how in ("after: ", "overlap: ")},
    ),
    "a layer does not wait for its weight": (
        [NO_WAIT],
        {how + ACTIVATIONS for how in ("after: ", "overlap: ")},
    ),
    "no prefetch": (
        [
            ('        if self.how == "overlap":\n            self.gather(0)\n', ""),
            ('self.how == "overlap" and layer + 1 < LAYERS:', 'self.how == "overlap":'),
            ("self.gather(layer + 1)", "self.gather(layer)"),
        ],
        {"overlap: " + AHEAD},
    ),
    "everybody holds the first shard": (
        [("flat.chunk(WORLD_SIZE)[RANK].clone()", "flat.chunk(WORLD_SIZE)[0].clone()")],
        {how + ACTIVATIONS for how in ("after: ", "overlap: ")},
    ),
    "all buckets leave before there is a gradient": (
        [
            ("            self.loss.backward()\n        if self", "            if self"),
            (
                "            for bucket in reversed(range(BUCKETS)):\n"
                "                self.recorder.communicate("
                "bucket, dist.all_reduce, self.buckets[bucket])\n"
                "        for work",
                "                for bucket in reversed(range(BUCKETS)):\n"
                "                    self.recorder.communicate("
                "bucket, dist.all_reduce, self.buckets[bucket])\n"
                "            self.loss.backward()\n        for work",
            ),
        ],
        {"after: " + SENT, "after: " + GRADIENTS},
    ),
    "all weights are gathered before the first layer": (
        [
            (
                '            if self.how == "after":\n                self.gather(layer)\n',
                '            if self.how == "after" and layer == 0:\n'
                "                for each in range(LAYERS):\n"
                "                    self.gather(each)\n",
            )
        ],
        {"after: " + AHEAD},
    ),
}


CLOCK, TRACE, LOG = (
    "backward: share hidden",
    "backward: by trace, as by clock",
    "backward: by log, as by clock",
)
WAITS_AT_ONCE = (
    "            work = work.get_future().then(lambda _: self.communicated(part, start))\n",
    "            work = work.get_future().then(lambda _: self.communicated(part, start))\n"
    "        work.wait()\n",
)
ON_THE_LINK = {
    "the issuer waits at once": ([WAITS_AT_ONCE], {CLOCK, TRACE}),
    "half of the buckets wait for the end": (
        [
            (
                'if self.how == "after":\n            for',
                'if self.how != "compute":\n            for',
            ),
            (
                "in reversed(range(BUCKETS)):",
                'in reversed(range(BUCKETS // (1 + (self.how == "overlap")))):',
            ),
            (HALF_FULL[0], "layer % PER_BUCKET == 0 and layer >= LAYERS // 2:"),
        ],
        {CLOCK, "overlap: " + SENT},
    ),
    "the trace lacks a collective": (
        [('    "gloo:all_reduce": "communication",\n', "")],
        {TRACE},
    ),
    "the trace lacks the compute": ([('    "compute": "compute",\n', "")], {TRACE}),
    "the log lacks the communication": (
        [
            ("exposed(overlap.log)", "exposed(computing(overlap.log))"),
            ("exposed(after.log)", "exposed(computing(after.log))"),
        ],
        {LOG},
    ),
}
LATE = ["the issuer waits at once", "half of the buckets wait for the end"]


HERE, ACROSS = [*NO_LINK, *NO_HERE], [*NO_HERE, *ONE_STEP, *QUICK]
BREAKS = [
    Breaks(LINES, changes=HERE),
    Breaks(ON_THE_LINK, changes=ACROSS, alone=LATE, deadline=200, clock=True),
]


def across(*changes: tuple[str, str]) -> Played:
    return play(LESSON, 2, *ACROSS, *changes, deadline=200)


def test_the_figure_is_drawn(tmp_path) -> None:
    log = [lesson().Span("compute", 1, 0.0, 0.2), lesson().Span("communication", 1, 0.2, 0.3)]
    found = lesson().Measured(1, 1, {}, 1, lesson().Timed(0.3, log, []))
    lesson().draw(str(tmp_path / "figure.png"), [{"backward": found, "forward": found}] * 2)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_the_timeline_shows_who_does_what_when() -> None:
    log = [lesson().Span("compute", 0, 0.0, 0.5), lesson().Span("communication", 0, 0.5, 1.0)]
    rows = lesson().timeline(1, lesson().Timed(1.0, log, []), width=8).splitlines()
    assert rows == ["  rank 1 comp  aaaa....", "  rank 1 comm  ....aaaa"]


@pytest.mark.deep
def test_without_a_slow_network_it_is_blocked_and_says_why() -> None:
    played = across(('command(f"tc ', 'command(f"no-such-tc '))
    played.expect(set())
    assert "no-such-tc" in played.output
    needs = [row["needs"] for row in played.ledger if row["verdict"] == "BLOCKED"]
    assert needs == ["root or user namespaces", "1 GPU"]
    assert max(map(len, played.output.splitlines())) <= 100


@pytest.mark.deep
def test_a_user_who_is_not_root_has_a_slow_network_too() -> None:
    outcomes = attempt(play_as_nobody, 2, LESSON, *ACROSS, deadline=200, group=False)
    _, ledger = outcomes[0].value
    assert {row["claim"] for row in ledger} >= {CLOCK, TRACE, LOG}, outcomes[0].output


@pytest.mark.deep
def test_torchrun_killed_leaves_nothing() -> None:
    """Other ends: test_07_hierarchical_collectives.py; they share the passage that makes nodes."""
    was = machine()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(ROOT / LESSON)]
    torchrun = subprocess.Popen(command, env=MARKED, stdout=subprocess.PIPE, process_group=0)
    once_there(torchrun, 5)  # two ranks, and a launcher with two ranks in two nodes
    assert b"2 ranks" in torchrun.stdout.readline()  # both ranks have joined, and end with torchrun
    torchrun.kill()
    torchrun.stdout.close()
    assert torchrun.wait(150) != 0
    assert gone()
    assert machine() == was


def test_a_layer_is_gathered_while_the_one_before_it_computes() -> None:
    lesson = load(LESSON)
    order = []
    recorder = lesson.Recorder()

    def communicate(part: int, *_: object) -> None:
        order.append(f"gather {part}")
        recorder.works.append(Mock())

    recorder.communicate = communicate
    recorder.computed = lambda part, _: order.append(f"compute {part}")
    step = lesson.ForwardPass(torch.ones(2, 4), recorder)
    step.prepare("overlap")
    step.run()
    due = ["gather 0"]
    for layer in range(lesson.LAYERS):
        due += [f"gather {layer + 1}"] * (layer + 1 < lesson.LAYERS) + [f"compute {layer}"]
    assert order == due


# Values that no row shows


def test_what_is_hidden_is_the_share_of_communication_that_lengthens_no_step() -> None:
    """By made-up runs of a pass of 1 s, 2 s with communication after it, 1.3 s with overlap."""
    here = load(LESSON)
    Span, Timed = here.Span, here.Timed
    compute = [Span("compute", 0, 0.0, 1.0)]
    after = [*compute, Span("communication", 0, 1.0, 1.8)]
    overlap = [Span("compute", 0, 0.0, 1.1), Span("communication", 0, 0.5, 1.3)]
    log = [Span("compute", 0, 0.0, 1.0), Span("communication", 0, 0.5, 1.4)]
    fast = {"compute": Timed(1.0, compute, compute), "after": Timed(2.0, after, after)}
    fast["overlap"] = Timed(1.3, log, overlap)
    ran = []

    def run_once(step: str, how: str) -> object:
        """The second of three runs is the fastest."""
        ran.append(how)
        return fast[how] if ran.count(how) == 2 else Timed(9.0, [], [])

    here.run_once = run_once
    found = here.measure("a pass")
    assert ran == 3 * ["compute", "after", "overlap"]
    assert found.compute == 1.0
    assert found.communication == pytest.approx(1.0)
    assert found.hidden == pytest.approx({"clock": 0.7, "trace": 0.75, "log": 0.5})
    assert found.slower == pytest.approx(1.1)
    assert found.overlapped is fast["overlap"]


def event(name: str, start: float, end: float, gpu: bool = False, ours: bool = False) -> object:
    """One of a profiler's events, in microseconds."""
    device = DeviceType.CUDA if gpu else DeviceType.CPU
    times = SimpleNamespace(start=start, end=end)
    about = {"device_type": device, "is_user_annotation": ours}
    return SimpleNamespace(name=name, time_range=times, **about)


def test_a_trace_s_spans_are_ours_on_a_cpu_and_the_pass_s_kernels_on_a_gpu() -> None:
    events = [event("pass", 1e6, 9e6), event("pass", 2e6, 9e6, gpu=True, ours=True)]
    events += [event("compute", 1e6, 2e6), event("gloo:all_reduce", 2e6, 3e6)]
    events += [event("gloo:all_gather", 3e6, 4e6), event("aten::mm", 1e6, 2e6)]
    events += [event("compute", 4e6, 6e6, gpu=True, ours=True)]
    events += [event("gemm", 4e6, 5e6, gpu=True), event("ncclDevKernel", 5e6, 6e6, gpu=True)]
    events += [event("gemm", 0.5e6, 1.5e6, gpu=True)]  # of what was prepared before
    profiler = SimpleNamespace(events=lambda: events)
    Span = lesson().Span
    assert lesson().spans_of(profiler, on_gpu=False) == [
        Span("compute", 0, 1, 2),
        Span("communication", 0, 2, 3),
        Span("communication", 0, 3, 4),
        Span("compute", 0, 4, 6),
    ]
    assert lesson().spans_of(profiler, on_gpu=True) == [
        Span("compute", 0, 4, 5),
        Span("communication", 0, 5, 6),
    ]


def test_a_layer_naps_1_3_times_as_long_as_its_bytes_take_on_the_cable() -> None:
    """65,536 bytes per layer at 50 Mbit/s, headers included; an all-gather of two sends half."""
    here = load(LESSON)
    told = []
    here.measure = lambda step: (type(step).__name__, step.nap)
    here.measure_when_told(SimpleNamespace(recv=lambda: "go", send=told.append))
    on_the_cable = 65_536 * 1514 / 1448 * 8 / 50e6
    ((_, backward), (_, forward)) = told[0].values()
    assert told[0] == {
        "backward": ("BackwardPass", backward),
        "forward": ("ForwardPass", forward),
    }
    assert (backward, forward) == pytest.approx((1.3 * on_the_cable, 0.65 * on_the_cable))


@pytest.mark.parametrize(("name", "most"), [("backward", 11 / 12), ("forward", 23 / 24)])
def test_all_but_the_last_bucket_or_the_first_gather_can_hide(name: str, most: float) -> None:
    here = load(LESSON)
    for clock, trace, log in ((most, most, most), (0.5, 0.5, 0.5), (most, 0.6, most)):
        here.check_shares(name, {"clock": clock, "trace": trace, "log": log})
    here.check_shares(name, {"clock": most, "trace": most, "log": 0.6})
    verdicts = [row["verdict"] for row in here.ledger]
    assert verdicts == [
        *("PASS", "PASS", "PASS"),
        *("FAIL", "PASS", "PASS"),
        *("PASS", "FAIL", "PASS"),
        *("PASS", "PASS", "FAIL"),
    ]
    assert here.ledger[0]["predicted"] == pytest.approx(most)


@pytest.mark.parametrize(("communication", "rows"), [(3.0, 4), (0.1, 1), (99.0, 16)])
def test_on_gpus_the_batch_grows_until_compute_outlasts_communication(
    communication: float, rows: int
) -> None:
    here = load(LESSON)
    here.batch = lambda rank, rows, width: torch.empty(1, 2)
    measured = []

    def measure(step: torch.Tensor) -> object:
        measured.append(len(step))
        hidden = {"clock": 0.5, "trace": 0.5, "log": 0.5}
        return here.Measured(1.0, communication, hidden, 1.0, None)

    here.BackwardPass = lambda x, recorder: x
    here.PASSES = {"backward": here.BackwardPass, "forward": here.BackwardPass}
    here.measure = measure
    here.from_rank_0 = lambda value: value
    here.measure_on_this_machine(torch.device("meta"))
    assert measured == [1, rows, rows]
    most = [min(share, 1 / communication) for share in (11 / 12, 23 / 24)]
    assert [row["predicted"] for row in here.ledger] == pytest.approx(most)


def test_on_gpus_a_copy_waits_for_the_event_recorded_after_the_products() -> None:
    """A copy takes 2 ms and each product 10; a stream that does not wait begins at once."""
    here = load(LESSON)
    streams = {"main": 0.0, "side": 0.0}
    current = ["main"]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = None

        def record(self) -> None:
            self.at = streams[current[0]]

        def elapsed_time(self, end: "Event") -> float:
            return end.at - self.at

    class Tensor:
        def __matmul__(self, other: "Tensor") -> "Tensor":
            streams["main"] += 10
            return self

        def to(self, device: object, non_blocking: bool) -> None:
            assert current == ["side"]
            streams["side"] += 2

    def wait_event(event: Event) -> None:
        streams["side"] = max(streams["side"], event.at)

    @contextlib.contextmanager
    def stream(side: object) -> Iterator[None]:
        current[0] = "side"
        yield
        current[0] = "main"

    def synchronize() -> None:
        streams.update(dict.fromkeys(streams, max(streams.values())))

    cuda = SimpleNamespace(Event=Event, stream=stream, synchronize=synchronize)
    cuda.Stream = lambda priority: SimpleNamespace(wait_event=wait_event)
    here.torch = SimpleNamespace(
        cuda=cuda, randn=lambda *_, **__: Tensor(), empty=lambda *_, **__: Tensor()
    )
    here.check_streams_and_events(SimpleNamespace(type="cuda"))
    assert [row["verdict"] for row in here.ledger] == ["PASS", "PASS"]
    assert [row["measured"] for row in here.ledger] == pytest.approx([82 / 80, 2 / 80])


def test_the_figure_s_bars_are_the_spans_of_each_rank(monkeypatch) -> None:
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    Span = lesson().Span
    seen = []
    for rank in range(2):
        of_rank = {}
        for late, name in enumerate(("backward", "forward")):
            log = [Span("compute", 1, 0.0, 0.2 + rank), Span("communication", 1, 0.5, 0.8 + late)]
            timed = lesson().Timed(1.0, log, [])
            of_rank[name] = lesson().Measured(1, 1, {}, 1, timed)
        seen.append(of_rank)
    lesson().draw("unused.png", seen)
    for late, axes in enumerate(drawn[0].axes):
        scale = {"s": 1, "ms": 1e3}[axes.get_xlabel()]
        bars = [(bar.get_x(), bar.get_width()) for bar in axes.patches]
        for rank in range(2):
            for start, end in ((0.0, 0.2 + rank), (0.5, 0.8 + late)):
                span = (start * scale, (end - start) * scale)
                assert any(bar == pytest.approx(span) for bar in bars), span
