"""What a message costs: paths, fits, two clocks; and what a wrong line does to the claims."""

import re
import socket

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

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
