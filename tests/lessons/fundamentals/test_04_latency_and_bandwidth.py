"""What a message costs: paths, fits, two clocks; and what a wrong line does to the claims."""

import re
import socket
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from course.playing import Lazily, Played, load, play
from course.ranks import RanksFailed, run
from tests.lessons.every import Breaks, test_lesson  # noqa: F401

LESSON = "fundamentals/04_latency_and_bandwidth.py"
lesson = Lazily(LESSON)
WHOLE, TWICE = "bytes that came back wrong, all paths", "sizes that a fit saw and is judged on"
HALF = "4 KiB by TCP: way there / half of both"
WIRED = ("shared memory", "Unix socket", "TCP loopback")
HALVES = {f"{name}: n_1/2 found - predicted, 4x" for name in WIRED}
OFF = {f"{name}: factor off, sizes held out" for name in WIRED}
SMALL = "64 bytes: seconds by gloo / the next slowest"
LARGE = "4 MiB: seconds by TCP / shared memory"
FEW = (
    (
        "for _ in range(10):\n        for name in sizes",
        "for _ in range(3):\n        for name in sizes",
    ),
)
LINES = {
    "shared memory not written": ("shared[:n] = out[:n]", "shared[:1] = out[:1]", {WHOLE}),
    "socket sends zeros": ("wire.sendall(out[:n])", "wire.sendall(bytes(n))", {WHOLE}),
    "gloo receives elsewhere": (
        "dist.recv(self.received[:n]",
        "dist.recv(self.received.clone()[:n]",
        {WHOLE},
    ),
    "judged on what it saw": ("held = slice(1, None, 2)", "held = slice(0, None, 2)", {TWICE}),
}
NO_LATENCY = ("np.stack([1 / t[seen]", "np.stack([0 / t[seen]")
ROUND_TRIP = ("(end - start) / 2 for", "(end - start) for")
CLOCK_LINES = {
    "no latency in the fit": (NO_LATENCY, OFF | HALVES),
    "a round trip told as one way": (ROUND_TRIP, {HALF}),  # Try
    "a Unix socket in place of gloo": (
        '["gloo"] = self.through_gloo(host)',
        '["gloo"] = through_socket(unix, out, into)',
        {SMALL},
    ),
    "shared memory that is written nine times": (
        "        shared[:n] = out[:n]\n",
        "        for _ in range(9):\n            shared[:n] = out[:n]\n",
        {LARGE},
    ),
}
BREAKS = [Breaks(LINES, changes=FEW), Breaks(CLOCK_LINES, clock=True)]
NO_DEVICE = {"trip": "sockets and shared memory"}


def PLAIN(played: Played) -> None:
    """Ranks beyond two wait and hear everything: gloo's own numbers are in the table, too."""
    assert re.search(r"^  gloo +[\d.]+ us", played.output, re.M), played.output


# What a clock decides, with trips that are made up: all of them on the line of alpha and beta.

WRONG = {  # what each wrong line must make FAIL, and nothing else
    "alpha / beta": (("self.alpha * self.beta", "self.alpha * self.beta / 64"), HALVES),
    "no latency in the fit": (NO_LATENCY, OFF | HALVES),
    "a round trip told as one way": (ROUND_TRIP, {HALF}),
}


def failed_by_made_up_trips(*changes: tuple[str, str]) -> set[str]:
    lesson = load(LESSON, *changes)
    lines = {
        "memory copy": (1e-7, 16e9),
        "shared memory": (5e-6, 8e9),
        "Unix socket": (8e-6, 5e9),
        "TCP loopback": (15e-6, 3e9),
        "gloo": (40e-6, 2e9),
    }
    trips, theirs = {}, {}
    for name, (alpha, beta) in lines.items():
        took = {n: alpha + n / beta for n in lesson.SIZES}
        trips[name] = {n: [(0.0, t, 2 * t)] * 20 for n, t in took.items()}
        theirs[name] = {n: [(0.0, t, t)] * 20 for n, t in took.items()}
    lesson.check_paths(lesson.Found(trips, trips, 0), lesson.Found(theirs, theirs, 0))
    return {row["claim"] for row in lesson.ledger if row["verdict"] == "FAIL"}


def test_paths_that_obey_the_model_keep_every_claim() -> None:
    assert failed_by_made_up_trips() == set()


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_line_fails_what_the_clock_decides(name: str) -> None:
    change, claims = WRONG[name]
    assert failed_by_made_up_trips(change) == claims


@pytest.mark.deep
def test_an_n_half_beyond_the_buffers_does_not_hang() -> None:
    """As a machine so busy that every message takes milliseconds would have it."""
    beyond = ("self.alpha * self.beta))", "self.alpha * self.beta * 2**30))")
    play(LESSON, 2, *FEW, beyond, deadline=30).expect(set())


@given(st.floats(1e-7, 1e-3), st.floats(1e8, 1e12))
def test_the_fit_finds_the_line_it_was_made_of(alpha: float, beta: float) -> None:
    found = lesson.fit({n: alpha + n / beta for n in lesson.SIZES})
    assert found.alpha == pytest.approx(alpha, rel=1e-6)
    assert found.beta == pytest.approx(beta, rel=1e-6)
    assert found.factor_off == pytest.approx(1)
    assert found.half == pytest.approx(alpha * beta, abs=1)
    assert found.seen | found.held == set(lesson.SIZES)
    assert found.seen & found.held == set()


@given(st.lists(st.floats(0.95, 1.05), min_size=9, max_size=9))
def test_a_noise_of_five_percent_does_not_move_the_latency(noise: list[float]) -> None:
    """By absolute errors the largest message alone would decide, and alpha be anything."""
    alpha, beta = 10e-6, 1e9
    sizes = zip(lesson.SIZES, noise, strict=True)
    found = lesson.fit({n: (alpha + n / beta) * off for n, off in sizes})
    assert found.alpha == pytest.approx(alpha, rel=0.1)


def test_gloo_that_is_no_slower_than_tcp_for_a_small_message_fails() -> None:
    lesson = load(LESSON)
    took = {"shared memory": 5e-6, "Unix socket": 8e-6, "TCP loopback": 15e-6, "memory copy": 1e-7}
    for gloo in (40e-6, 15e-6):
        of_all = took | {"gloo": gloo}
        curves = {name: {64: t, 4**11: 1e-3 + 100 * t} for name, t in of_all.items()}
        lesson.check_order(curves)
    small = [row["verdict"] for row in lesson.ledger if row["claim"].startswith("64 bytes")]
    assert small == ["PASS", "FAIL"]


def test_half_is_found_between_sizes() -> None:
    lesson = load(LESSON)
    curve = {n: 10e-6 + n / 10e9 for n in lesson.SIZES}  # n_1/2 is 100 kB
    assert lesson.reaches_half(curve) == pytest.approx(100e3, rel=0.15)


def rank_1_hears_rank_0() -> object:
    lesson = load(LESSON)
    if dist.get_rank() > 1:
        return "undisturbed"
    return lesson.told_by_rank_0(f"rank {dist.get_rank()}", dist.group.WORLD)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_rank_1_hears_rank_0_and_the_others_are_not_disturbed(ranks: int) -> None:
    assert run(rank_1_hears_rank_0, ranks) == ["rank 0"] * 2 + ["undisturbed"] * (ranks - 2)


def leave_while_the_other_listens() -> None:
    lesson = load(LESSON)
    wire = lesson.connect(socket.AF_INET, dist.group.WORLD)
    if dist.get_rank() == 0:
        _, receive = lesson.through_socket(wire, memoryview(b"x"), memoryview(bytearray(1)))
        receive(1)
    wire.close()


def test_a_rank_that_leaves_is_an_error_not_a_hang() -> None:
    with pytest.raises(RanksFailed, match="the other rank left"):
        run(leave_while_the_other_listens, 2)


def verdicts_on(there: float, back: float, half: float = 0.5) -> list[str]:
    """The verdict on a path whose way there and way back take so many seconds."""
    lesson = load(LESSON)
    lesson.one_way = lambda trips: half * (there + back)
    ours = lesson.Found({"TCP loopback": {4**6: [(0, 0, there + back)] * 20}}, {}, 0)
    theirs = lesson.Found({"TCP loopback": {4**6: [(0, there, there)] * 20}}, {}, 0)
    lesson.check_one_way(ours, theirs)
    return [row["verdict"] for row in lesson.ledger]


def test_half_a_round_trip_is_held_against_a_second_clock() -> None:
    assert verdicts_on(30e-6, 25e-6) == ["PASS"]
    assert verdicts_on(30e-6, 30e-6, half=1) == ["FAIL"]
    assert verdicts_on(50e-6, 10e-6) == ["FAIL"]


# Values that no row shows


@pytest.mark.parametrize(("rank", "order"), [(0, ["send", "receive"]), (1, ["receive", "send"])])
def test_a_trip_notes_when_its_first_half_was_done(rank: int, order: list[str]) -> None:
    """By a clock that a message puts forward: 3 s to send, 5 s to receive."""
    own = load(LESSON)
    own.RANK = rank
    now, done = [10.0], []

    def move(name: str, seconds: float, n: int) -> None:
        done.append((name, n))
        now[0] += seconds

    own.time = SimpleNamespace(perf_counter=lambda: now[0])
    paths = own.Paths.__new__(own.Paths)
    paths.ends = {"wire": (partial(move, "send", 3), partial(move, "receive", 5))}
    middle = 13 if rank == 0 else 15
    assert paths.trip("wire", 64) == (10, middle, 18)
    assert done == [(name, 64) for name in order]


def test_every_path_makes_trips_of_every_size_in_turns() -> None:
    made = []

    class Paths:
        def trip(self, name: str, n: int) -> tuple[str, int]:
            made.append((name, n))
            return name, n

    trips = lesson.ping_pong(Paths(), {"TCP loopback": [64, 2**22], "gloo": [2**18]})
    assert trips["TCP loopback"][64] == [("TCP loopback", 64)] * 100
    assert trips["TCP loopback"][2**22] == [("TCP loopback", 2**22)] * 10
    assert trips["gloo"][2**18] == [("gloo", 2**18)] * 40
    assert made == made[:15] * 10


def test_one_way_is_half_of_the_median_trip_without_the_first_tenth() -> None:
    trips = [(0, 5, 9)] * 2 + [(1, 2, 3)] * 9 + [(1, 2, 5)] * 9
    assert lesson.one_way(trips) == pytest.approx((1 + 2) / 2)


def test_a_series_is_made_on_one_core_and_the_second_has_n_half_among_its_sizes(
    monkeypatch,
) -> None:
    own = load(LESSON)
    own.SIZES[:] = [64, 256, 1024]
    pinned, asked = [], []
    monkeypatch.setattr(own.os, "sched_getaffinity", lambda _: {3, 5})
    monkeypatch.setattr(own.os, "sched_setaffinity", lambda _, cores: pinned.append(cores))

    class Paths:
        ends: ClassVar = {"memory copy": None, "wire": None}

        def __init__(self, *_: object) -> None:
            pass

        def wrong_bytes(self, name: str) -> int:
            return {"memory copy": 1, "wire": 2}[name]

    def ping_pong(paths: Paths, sizes: dict[str, list[int]]) -> dict:
        asked.append(sizes)
        beta = {"memory copy": 1e8, "wire": 1e12}  # n_1/2 of 100 and 1,000,000 bytes
        trips = {}
        for name in sizes:
            trips[name] = {n: [(0, 0, 2e-6 + 2 * n / beta[name])] * 10 for n in sizes[name]}
        return trips

    own.Paths = Paths
    own.ping_pong = ping_pong
    found = own.measure_paths(None, two=False)
    assert asked[0] == {"memory copy": [64, 256, 1024], "wire": [64, 256, 1024]}
    assert asked[1] == {"memory copy": [64, 100, 256, 1024], "wire": [64, 256, 1024]}
    assert (set(found.trips["wire"]), found.wrong_bytes) == ({64, 256, 1024}, 3)
    assert 100 in found.again["memory copy"]
    assert pinned == [{3}, {3, 5}]


def test_the_second_series_tells_where_half_of_the_bandwidth_is() -> None:
    """A path whose latency rose 64 times meanwhile: the fit is as good, its n_1/2 is not found."""
    own = load(LESSON)

    def trips(alpha: float) -> dict:
        took = {n: alpha + n / 3e9 for n in own.SIZES}
        return {name: {n: [(0, t, 2 * t)] * 20 for n, t in took.items()} for name in names}

    names = ("memory copy", *WIRED, "gloo")
    own.check_paths(own.Found(trips(5e-6), trips(320e-6), 0), own.Found(trips(5e-6), {}, 0))
    failed = {row["claim"] for row in own.ledger if row["verdict"] == "FAIL"}
    assert failed >= HALVES
    assert failed.isdisjoint(OFF)


def test_tcp_that_is_as_fast_as_shared_memory_for_a_large_message_fails() -> None:
    own = load(LESSON)
    for tcp in (2e-3, 1e-3):
        curves = {name: {64: 1e-5, 4**11: 1e-3} for name in ("memory copy", *WIRED)}
        curves["TCP loopback"] = {64: 1e-5, 4**11: tcp}
        own.check_order(curves | {"gloo": {64: 2e-5, 4**11: 3e-3}})
    large = [row["verdict"] for row in own.ledger if row["claim"] == LARGE]
    assert large == ["PASS", "FAIL"]


def test_the_table_tells_alpha_beta_and_both_n_halves(capsys) -> None:
    curve = {n: 10e-6 + n / 2e9 for n in lesson.SIZES}
    later = {n: 40e-6 + n / 2e9 for n in lesson.SIZES}
    lesson.print_fits({"wire": curve}, {"wire": later})
    found = round(lesson.reaches_half(later))
    line = capsys.readouterr().out.splitlines()[2]
    assert line.split() == [
        *("wire", "10.0", "us", "2.00", "GB/s", "0%"),
        *("20,000", "bytes", f"{found:,}"),
    ]


def test_nccl_s_curve_is_half_of_a_trip_there_and_back(monkeypatch) -> None:
    """20 bytes per microsecond and 100 us, told in milliseconds of the whole trip."""
    own = load(LESSON, ("NCCL_SIZES = [4**k for k in range(3, 15)]", "NCCL_SIZES = [64, 256]"))
    asked = []

    def batch(operations: list) -> list:
        ((turn, x, peer),) = operations
        asked.append((turn, len(x), peer))
        return [Mock()]

    calls = {"isend": "send", "irecv": "receive", "batch_isend_irecv": batch}
    calls["P2POp"] = lambda turn, x, peer: (turn, x, peer)
    for name, call in calls.items():
        monkeypatch.setattr(own.dist, name, call)

    def median_ms(work) -> float:
        work()
        return 2 * (0.1 + asked[-1][1] / 20e3)

    own.median_ms = median_ms
    for rank, turns in enumerate((["send", "receive"], ["receive", "send"])):
        own.RANK = rank
        asked.clear()
        curve = own.nccl_curve(torch.device("cpu"))
        assert curve == {n: pytest.approx(1e-4 + n / 20e6) for n in (64, 256)}
        assert asked[:2] == [(turn, 64, 1 - rank) for turn in turns]


def test_the_median_on_a_gpu_leaves_the_first_three_out(monkeypatch) -> None:
    took = iter([0.5, 0.5, 0.5, 5.0, 1.0, 2.0, 4.0, 3.0])

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            pass

        def record(self) -> None:
            pass

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: "Event") -> float:
            return next(took)

    work = Mock()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert lesson.median_ms(work, repeats=5) == 3.0
    assert work.call_count == 8


def options_of_wires() -> list:
    own = load(LESSON)
    told = []
    for family in (socket.AF_INET, socket.AF_UNIX):
        with own.connect(family, dist.group.WORLD) as wire:
            told.append(wire.family)
            if family == socket.AF_INET:
                told.append(wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) > 0)
            dist.barrier()
    return told


def test_a_small_message_through_tcp_does_not_wait_for_more() -> None:
    assert run(options_of_wires, 2) == [[socket.AF_INET, True, socket.AF_UNIX]] * 2


CEILINGS = {  # GB/s one way, as published
    "NVLink 4 (H100)": 450,
    "PCIe 5.0 x16": 63,
    "200 Gb/s NIC": 25,
    "10 Gb/s NIC": 1.25,
}


def test_the_figure_shows_measured_dots_the_line_through_them_and_n_half(monkeypatch) -> None:
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    assert lesson.CEILINGS == CEILINGS
    alpha, beta = 10e-6, 2e9
    lesson.draw({"wire": {n: alpha + n / beta for n in lesson.SIZES}}, "unused.png")
    *ceilings, dots, line, half = drawn[0].axes[0].lines
    assert [one.get_ydata()[0] for one in ceilings] == list(CEILINGS.values())
    for curve in (dots, line):
        n, rate = map(np.array, curve.get_data())
        assert rate == pytest.approx(n / (alpha + n / beta) / 1e9)
    assert list(dots.get_xdata()) == lesson.SIZES
    assert [float(value[0]) for value in half.get_data()] == pytest.approx([20_000, 1])


def bytes_at_both_ends() -> tuple[int, dict[str, int]]:
    """How many different bytes this rank's end holds, before all paths have carried them."""
    own = load(LESSON)
    with ExitStack() as wires:
        paths = own.Paths(dist.group.WORLD, True, wires)
        values = len(paths.random.unique())
        wrong = {name: paths.wrong_bytes(name) for name in paths.ends}
        dist.barrier()
    return values, wrong


def test_only_rank_0_holds_what_is_to_come_back() -> None:
    """Else bytes that never left would be told as right."""
    (values, wrong), (of_rank_1, _) = run(bytes_at_both_ends, 2)
    assert (values, of_rank_1) == (256, 1)
    assert wrong == dict.fromkeys(("memory copy", *WIRED, "gloo"), 0)


def test_the_bell_rings_when_the_bytes_are_in_the_shared_memory(monkeypatch) -> None:
    """And what is there is taken out after it has rung."""
    own = load(LESSON)
    shared = memoryview(bytearray(8))
    heard = []
    monkeypatch.setattr(own.socket, "send_fds", lambda *_: None)
    own.mmap = SimpleNamespace(mmap=lambda *_: shared)
    own.RANK = 0

    def through_socket(*_: object) -> tuple:
        return lambda n: heard.append(bytes(shared[:4])), lambda n: shared.__setitem__(0, 7)

    own.through_socket = through_socket
    into = memoryview(bytearray(8))
    send, receive = own.through_memory(None, memoryview(b"new here"), into)
    send(4)
    assert heard == [b"new "]
    receive(4)
    assert bytes(into[:4]) == b"\x07ew "
