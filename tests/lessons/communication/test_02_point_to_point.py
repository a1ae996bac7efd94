"""Shifts and halos against one process, the deadlock for real, claims against broken lines."""

import re

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
