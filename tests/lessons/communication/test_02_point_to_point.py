"""Shifts and halos against one process, the deadlock for real, claims against broken lines."""

import re
from itertools import chain
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course.playing import load, play
from course.ranks import attempt, run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "communication/02_point_to_point.py"
QUICK = ("PATIENCE = 3.0", "PATIENCE = 1.5")
NO_DEADLOCK = ("        everybody_sends_first(cpu)\n", "")
NO_DEVICE = {"sends_back_early": "it asks again until a deadline"}
ON_GPUS = OnGpus(
    hardware={"NCCL: sends of 1 KiB back before the receive": "NCCL's buffer for small messages"}
)


def shifted(sizes: list[int], dtypes: list[torch.dtype]) -> list[bool]:
    here, right = load(LESSON), []
    for way in here.in_order, here.without_waiting, here.in_a_batch:
        for size in sizes:
            for dtype in dtypes:
                x = torch.full((size,), here.RANK, dtype=dtype)
                way(x, y := torch.full_like(x, -1), None)
                due = (here.RANK - 1) % here.WORLD_SIZE
                right.append(bool((y == due).all() and (x == here.RANK).all()))
    return right


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_each_way_out_shifts_any_size_and_dtype(ranks: int) -> None:
    told = run(shifted, ranks, [0, 1, 1000, 3_000_001], [torch.float32, torch.int8])
    assert told == [[True] * 24] * ranks


def test_heat_goes_to_the_neighbors_and_fades() -> None:
    """By hand: a quarter to each side; and the largest difference never grows."""
    heat = load(LESSON).heat
    assert heat(torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0])).tolist() == [0.25, 0.5, 0.25]
    zigzag = torch.tensor([0.0] + [1.0, -1.0] * 4 + [0.0])
    assert heat(zigzag).abs().max() < zigzag.abs().max()


def rods(cases: list[tuple[int, int, int]]) -> list[float]:
    """The largest distance from one process, for each (length, steps, seed)."""
    here, off = load(LESSON), []
    for length, steps, seed in cases:
        torch.manual_seed(seed)
        rod = torch.cat([torch.zeros(1), torch.rand(length), torch.zeros(1)]).double()
        edges = [1 + length * r // here.WORLD_SIZE for r in range(here.WORLD_SIZE + 1)]
        first, end = edges[here.RANK : here.RANK + 2]
        u = rod[first - 1 : end + 1].clone()
        for _ in range(steps):
            here.exchange(u)
            u[1:-1] = here.heat(u)
            rod[1:-1] = here.heat(rod)
        off.append((u[1:-1] - rod[first:end]).abs().max().item())
    return off


@pytest.mark.parametrize("ranks", range(1, 5))
@settings(max_examples=3, deadline=None)
@given(st.lists(st.tuples(st.integers(4, 60), st.integers(0, 9), st.integers(0, 99)), min_size=8))
def test_a_rod_in_parts_is_the_whole_rod(ranks: int, cases: list) -> None:
    assert run(rods, ranks, cases) == [[0.0] * len(cases)] * ranks


def nobody_receives_first() -> None:
    here = load(LESSON, ("    if RANK % 2 == 1:\n", "    if RANK > 99:\n"))
    here.in_order(torch.zeros(1), torch.zeros(1), None)


def test_if_nobody_receives_first_every_rank_hangs_in_send() -> None:
    for outcome in attempt(nobody_receives_first, 3, deadline=4):
        assert outcome.kind == "hung"
        assert outcome.text.startswith("waits in send, called from ")
        assert outcome.text.endswith(", in nobody_receives_first")  # our frame; the lesson is given


@pytest.mark.deep
def test_the_lesson_holds_on_five_ranks() -> None:
    played = play(LESSON, 5, QUICK)
    played.expect(set())
    assert played.output.count("send_first   ") == 2  # both stacks, with file and line
    ends = re.findall(r"then, after 1.5 s: (.*)", played.output)
    timeout, by_peer = "Timed out waiting 1500ms for send operation", "Connection closed by peer"
    assert len(ends) == 2
    assert all(end.startswith((timeout, by_peer)) for end in ends), ends


TAKEN = "bytes a TCP socket takes before anybody reads"
EARLY = "gloo: sends back before the receive"
STUCK = {"ranks whose stack ends in send", "ranks freed by the timeout"}
SHIFT = {f"ring shift, {way}: wrong bytes" for way in ("in order", "without waiting", "in a batch")}
TAGS = {"what comes first if tag 2 is asked for first", "what comes next, asked for by tag 1"}
UNTOUCHED = "4 elements into a buffer of 6: left untouched"
ANYBODY = "recv from anybody: the rank it came from"
HALO = "halos: elements that differ from one process"
HALO_BYTES = {
    "halos: bytes that rank 1 sends per step",
    "halos: bytes that all ranks send per step",
}
FUSED = "64 messages one by one / as one message"
LINES = {
    "buffers as small as the kernel allows": (
        "    wire = socket.create_connection(server.getsockname())\n",
        "    server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)\n"
        "    wire = socket.create_connection(server.getsockname())\n"
        "    wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)\n",
        {TAKEN},
    ),
    "the sender goes on before its send is over": (
        "            dist.send(x, 1, group)\n",
        "            work = dist.isend(x, 1, group)\n"
        '            store.set(f"sent {size} on {device.type}", "")\n'
        "            work.wait()\n",
        {EARLY},
    ),
    "the first send does not wait": (  # Try
        "    dist.send(x, RIGHT, group)\n    dist.recv(y, LEFT, group)\n\n\ndef everybody",
        "    work = dist.isend(x, RIGHT, group)\n    dist.recv(y, LEFT, group)\n    work.wait()\n"
        "\n\ndef everybody",
        STUCK,
    ),
    "what arrives lands elsewhere": (
        [
            ("1:\n        dist.recv(y, LEFT", "1:\n        dist.recv(y.clone(), LEFT"),
            (
                "dist.recv(y, LEFT, group)\n    work.wait()\n\n\ndef in_a",
                "dist.recv(y.clone(), LEFT, group)\n    work.wait()\n\n\ndef in_a",
            ),
            ("dist.irecv, y, LEFT", "dist.irecv, y.clone(), LEFT"),
        ],
        SHIFT,
    ),
    "tags are mixed up": (
        "dist.recv(y, 0, cpu, tag=tag)",
        "dist.recv(y, 0, cpu, tag=3 - tag)",
        TAGS,
    ),
    "the buffer is filled": (
        "dist.send(torch.ones(4), 1, cpu)",
        "dist.send(torch.ones(6), 1, cpu)",
        {UNTOUCHED},
    ),
    "another rank sends": (
        "        dist.send(torch.ones(1), 1, cpu)\n",
        "    elif RANK == 2:\n        dist.send(torch.ones(1), 1, cpu)\n",
        {ANYBODY},
    ),
    "halos are stale": (  # Try
        "        for _ in range(STEPS):\n            exchange(u)\n",
        "        for step in range(STEPS):\n"
        "            if step == 0:\n"
        "                exchange(u)\n",
        {HALO} | HALO_BYTES,
    ),
}


IN_ORDER = {
    "tags are received in the order sent": ("for tag in (2, 1):", "for tag in (1, 2):", TAGS),
}
ONE_OF_MANY = {
    "one message that is many": (
        "microseconds(lambda: there_and_back([x]), 32)",
        "microseconds(lambda: one_by_one(parts), 1)",
        {FUSED},
    ),
}
BREAKS = [
    Breaks(LINES, ranks=3, changes=[QUICK], most=8),  # with STUCK, so nobody waits for a deadlock
    Breaks(IN_ORDER, ranks=3, changes=[NO_DEADLOCK]),
    Breaks(ONE_OF_MANY, ranks=3, changes=[NO_DEADLOCK], clock=True),
]


@pytest.mark.deep
def test_a_send_that_nobody_waits_for_ends_by_the_timeout() -> None:
    played = play(
        LESSON,
        2,
        NO_DEADLOCK,
        ("timeout=timedelta(minutes=1)", "timeout=timedelta(seconds=4)"),
        (
            "    dist.recv(y, LEFT, group)\n    work.wait()\n",
            "    time.sleep(RANK)  # so rank 0 forgets its send before anybody receives\n"
            "    dist.recv(y, LEFT, group)\n",
        ),
    )
    assert "Timed out waiting" in played.code


# Values that no row shows


def test_heat_flows_a_quarter_of_the_curvature() -> None:
    rod = torch.tensor([0.0, 0.0, 4.0, 0.0, 8.0])
    assert load(LESSON).heat(rod).tolist() == [1, 2, 3]


def test_a_message_takes_half_a_round_trip(monkeypatch) -> None:
    """By a clock that a round trip puts forward by 6 ms."""
    here = load(LESSON)
    now, met = [0.0], []

    def round_trip() -> None:
        now[0] += 0.006

    def barrier() -> None:
        met.append(now[0])
        now[0] += 1.0  # another rank is late

    monkeypatch.setattr(here.dist, "barrier", barrier)
    here.time = SimpleNamespace(perf_counter=lambda: now[0])
    assert here.microseconds(round_trip, 4) == pytest.approx(3000)
    here.RANK = 2
    assert here.microseconds(round_trip, 4) == 0
    assert len(met) == 2


def handed_over(way: str) -> list[tuple[str, int]]:
    """The messages of a round trip of three parts, in order: operation and elements."""
    here = load(LESSON)
    parts = [torch.full((2,), here.RANK), torch.full((5,), here.RANK), torch.full((1,), here.RANK)]
    with here.CountedCommunication() as counted:
        getattr(here, way)(parts)
    assert all((part == 0).all() for part in parts)  # rank 0's, there and back
    return [(call.operation, call.elements) for call in counted.log]


def test_parts_go_there_and_back_in_a_batch_or_each_by_itself() -> None:
    sends = [("send", n) for n in (2, 5, 1)]
    receives = [("recv", n) for n in (2, 5, 1)]
    assert run(handed_over, 2, "there_and_back") == [sends + receives, receives + sends]
    first = list(chain(*zip(sends, receives, strict=True)))
    second = list(chain(*zip(receives, sends, strict=True)))
    assert run(handed_over, 2, "one_by_one") == [first, second]


def test_64_messages_of_64_bytes_are_compared_with_one_of_as_many() -> None:
    here = load(LESSON)
    tried = []
    here.there_and_back = lambda parts: tried.append([part.nbytes for part in parts])

    def microseconds(round_trip, repeats: int) -> float:
        tried.clear()
        round_trip()
        assert sum(map(sum, tried)) == 4096
        return 50.0 * len(tried) + sum(len(parts) for parts in tried)

    here.microseconds = microseconds
    here.ping_pong(torch.device("cpu"))
    (row,) = here.ledger
    assert tried == [[4096]]
    assert row["measured"] == (50 * 64 + 64) / 51


def test_on_gpus_half_a_trip_and_its_bytes_make_the_speed(capsys, monkeypatch) -> None:
    here = load(LESSON)
    here.WORLD_SIZE = 2
    tried = []

    def sends_back_early(sizes: list[int], *_: object) -> int:
        tried.append(sizes)
        return 0

    here.sends_back_early = sends_back_early
    here.median_ms = lambda work: 2.0
    here.claim = lambda *_, **__: None  # by rank 1, which is not here
    here.torch = SimpleNamespace(zeros=lambda size, **_: None, uint8=None)
    monkeypatch.setattr(here.dist, "barrier", lambda: None)
    here.measure_on_gpus(SimpleNamespace(type="cuda"))
    assert tried == [[1], [1024], [2**28]]
    last = capsys.readouterr().out.splitlines()[-1].split()
    assert last == ["268,435,456", "bytes", "1000.0", "us", "one", "way", "268.44", "GB/s"]


def test_the_median_on_a_gpu_leaves_the_first_three_out(monkeypatch) -> None:
    took = iter([0.5, 0.5, 0.5, 5.0, 1.0, 2.0, 4.0, 3.0])
    event = Mock(elapsed_time=lambda end: next(took))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    work = Mock()
    assert load(LESSON).median_ms(work, repeats=5) == 3.0
    assert work.call_count == 8
