"""Schedules against their meaning and their formulas; runs against one process; broken lines."""

import contextlib
import functools
import os
import socket
import sys
from collections import Counter
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from course.playing import Played, load, play
from course.ranks import run
from tests.lessons.every import Breaks, test_lesson  # noqa: F401

LESSON = "communication/03_ring_and_tree.py"
SIX = ("star", "ring", "tree", "double tree")
SIX += ("recursive doubling", "recursive halving-doubling")
THREE = ("reduce_scatter", "all_gather", "broadcast")


@functools.cache
def lesson():
    return load(LESSON)


def held_after(schedule, held: list[list[Counter]], length: int, most: int) -> list[list[Counter]]:
    """What each rank holds of each number, as a count of the ranks in its sum; checks each step."""
    n = len(held)
    for step in schedule(n, length, most):
        before = [list(row) for row in held]
        for move in step:
            assert 0 <= move.start <= move.stop <= length
            assert move.source != move.target
            assert 0 <= min(move[:2]) <= max(move[:2]) < n
            for i in range(move.start, move.stop):
                sent = before[move.source][i]
                held[move.target][i] = held[move.target][i] + sent if move.add else sent
        for r in range(n):  # what is copied lands in x while x is being sent
            copied = [m for m in step if m.target == r and not m.add]
            touched = [m for m in step if r in (m.source, m.target)]
            for m in copied:
                apart = [t.stop <= m.start or m.stop <= t.start for t in touched if t is not m]
                assert all(apart)
    return held


def spread(n: int, length: int) -> list[list[Counter]]:
    return [[Counter({r: 1}) for _ in range(length)] for r in range(n)]


worlds, lengths, caps = st.integers(1, 17), st.integers(0, 40), st.integers(1, 50)


@settings(max_examples=150, deadline=None)
@given(worlds, lengths, caps)
def test_every_all_reduce_adds_each_rank_once_everywhere(n: int, length: int, most: int) -> None:
    everyone = Counter(range(n))
    for name, schedule in lesson().ALL_REDUCE.items():
        held = held_after(schedule, spread(n, length), length, most)
        assert held == [[everyone] * length] * n, name


@settings(max_examples=100, deadline=None)
@given(worlds, lengths, caps)
def test_the_relatives_do_what_their_names_say(n: int, length: int, most: int) -> None:
    chunks = lesson().split_span(0, length, n)
    held = held_after(lesson().reduce_scatter_schedule, spread(n, length), length, most)
    for r, (start, stop) in enumerate(chunks):
        assert held[r][start:stop] == [Counter(range(n))] * (stop - start)
    owner = [r for r, (start, stop) in enumerate(chunks) for _ in range(start, stop)]
    held = held_after(lesson().all_gather_schedule, spread(n, length), length, most)
    assert held == [[Counter([r]) for r in owner]] * n
    held = held_after(lesson().broadcast_schedule, spread(n, length), length, most)
    assert held == [[Counter([0])] * length] * n


@settings(max_examples=100, deadline=None)
@given(worlds, st.integers(1, 40), caps)
def test_no_message_of_a_tree_or_chain_is_longer_than_allowed(n, length, most) -> None:
    for schedule in (
        lesson().tree_schedule,
        lesson().double_tree_schedule,
        lesson().broadcast_schedule,
    ):
        steps = schedule(n, length, most)
        assert all(m.stop - m.start <= most for step in steps for m in step)
    count = -(-length // most)
    chain = [step for step in lesson().broadcast_schedule(n, length, most) if step]
    assert len(chain) == (n - 2 + count if n > 1 else 0)  # pipelined, not n - 1 times count
    deepest = (n + 1).bit_length() - 1 if n & (n + 1) else (n + 1).bit_length() - 2
    assert len(lesson().tree_schedule(n, length, most)) == 2 * deepest + count - 1


Case = tuple[str, int, torch.dtype, str, int, int]
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
case = st.tuples(
    st.sampled_from(SIX), st.integers(0, 300), dtypes, st.sampled_from(["SUM", "MAX"]), caps, caps
)


def compared(cases: list[Case]) -> list[Case]:
    """The cases in which this rank does not get, bit by bit, what one process computes."""
    here, wrong = load(LESSON), []
    for name, length, dtype, op, most, seed in cases:
        torch.manual_seed(seed)
        X = torch.randint(-4, 5, (here.WORLD_SIZE, length)).to(dtype)
        due = X.sum(0) if op == "SUM" else X.amax(0)
        x = X[here.RANK].clone()
        here.run(here.ALL_REDUCE[name], x, getattr(dist.ReduceOp, op), most)
        theirs = X[here.RANK].clone()
        dist.all_reduce(theirs, getattr(dist.ReduceOp, op))
        if not (torch.equal(x, due) and torch.equal(theirs, due)):
            wrong.append((name, length, dtype, op, most, seed))
    return wrong


@pytest.mark.parametrize("n", range(1, 6))
@settings(max_examples=4, deadline=None)
@given(cases=st.lists(case, min_size=15, max_size=40))
def test_any_length_dtype_and_op_equals_one_process_and_the_library(n: int, cases: list) -> None:
    assert run(compared, n, cases) == [[]] * n


def shapes_and_rounding() -> tuple[tuple, float, float]:
    """A 3-dimensional tensor in place; the error of a random sum as a share of its bound."""
    here = load(LESSON)
    x = torch.full((3, 5, 7), here.RANK + 1.0)
    here.run(here.ring_schedule, x)
    torch.manual_seed(here.RANK)
    y = torch.randn(1000)
    exact, size = y.double(), y.double().abs()
    dist.all_reduce(exact)
    dist.all_reduce(size)
    here.run(here.double_tree_schedule, y)
    bound = (here.WORLD_SIZE - 1) * 2**-24 * size
    return tuple(x.shape), x.unique().tolist(), ((y - exact).abs() / bound).max().item()


def test_shapes_stay_and_roundings_stay_within_their_bound() -> None:
    for shape, values, share in run(shapes_and_rounding, 5):
        assert shape == (3, 5, 7)
        assert values == [15.0]
        assert 0 < share < 1.01


def bytes_the_kernel_sent() -> int:
    """Bytes that all TCP sockets of this process have sent, repeats apart (struct tcp_info)."""
    sent = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed by now, or not TCP
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket"):
                with socket.socket(fileno=os.dup(int(fd))) as s:
                    info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
                out, again = (int.from_bytes(info[i : i + 8], sys.byteorder) for i in (200, 208))
                sent += out - again
    return sent


def counted_and_carried(name: str) -> tuple[int, int]:
    """Bytes a rank sends, as the lesson counts them and as the kernel does."""
    here = load(LESSON)
    x = torch.zeros(1_000_000)
    here.run(here.ALL_REDUCE[name], x)  # connections are made
    dist.barrier()
    before = bytes_the_kernel_sent()
    dist.barrier()
    with here.CountedCommunication() as counted:
        here.run(here.ALL_REDUCE[name], x)
    dist.barrier()
    handed = sum(call.nbytes for call in counted.calls("send"))
    carried = bytes_the_kernel_sent() - before
    dist.barrier()  # who leaves closes its sockets, and the others' counters go with them
    return handed, carried


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel counts bytes on Linux")
@pytest.mark.parametrize("name", SIX)
def test_the_kernel_counts_the_same_bytes(name: str) -> None:
    for counted, carried in run(counted_and_carried, 3, name):
        assert counted <= carried <= counted + 20_000  # headers, barriers


def messages_of_a_tree() -> int:
    here = load(LESSON)
    with here.CountedCommunication() as counted:
        here.run(here.tree_schedule, torch.zeros(2 * 2**20))  # float32: 8 MiB
    return len(counted.calls("send"))


def test_a_tree_is_cut_into_pieces_of_four_mib_by_default() -> None:
    assert run(messages_of_a_tree, 2) == [2, 2]


def refused() -> tuple[list[str], int]:
    here, said = load(LESSON), []
    with here.CountedCommunication() as counted:
        for x, op in (torch.zeros(4), dist.ReduceOp.AVG), (torch.zeros(4, 4).t()[:2], None):
            try:
                here.run(here.ring_schedule, x, op or dist.ReduceOp.SUM)
            except ValueError as error:
                said.append(str(error))
    return said, len(counted.log)


def test_what_it_cannot_do_is_refused_before_any_message() -> None:
    for said, posted in run(refused, 2):
        assert posted == 0
        assert len(said) == 2
        for words, value in zip(said, ("AVG", "strides (1, 4)"), strict=True):
            assert words.startswith("needs SUM or MAX and a contiguous tensor, got ")
            assert value in words
            assert "use x.contiguous()" in words


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [2, 5, 7])  # 1, 3 and 4: test_lesson
def test_the_lesson_holds_beside_powers_of_two_too(ranks: int) -> None:
    played = play(LESSON, ranks)
    played.expect(set())


def PLAIN(played: Played) -> None:
    """The picture shows the ring: of n ranks, sums in n - 1 steps, and then copies."""
    n = int(played.output.partition(" ranks")[0])
    lines = played.output.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("  ring"))
    sums = [f"+{(r - 1) % n}→{(r + 1) % n}" for r in range(n)]
    assert lines[at + 1].split()[2:] == sums
    copies = [f"{r}→{(r + 1) % n}" for r in range(n)]
    assert lines[at + n].split()[2:] == copies


SUMS = "wrong elements"
MESSAGES, ELEMENTS, LARGEST = "messages sent", "elements sent / N", "largest message"
RANDOM = "random sums that differ between ranks"
TREE_ASKED = "tree of 64: busiest rank's elements / N"
DOUBLE_ASKED = "double tree of 64: busiest rank's elements / N"
MINE = "reduce_scatter: wrong elements in its own chunk"
STAR_ASKED = "star of 64: busiest rank's elements / N"


def every(*names: str, what: tuple[str, ...]) -> set[str]:
    return {f"{name}: {one}" for name in names for one in what}


RING = "    return reduce_scatter_schedule(n, N, piece) + all_gather_schedule(n, N, piece)\n"
WHOLE_RING = """    there = [[Move(h, h + 1, 0, N, True)] for h in range(n - 1)]
    return there + [[Move((h - 1) % n, h, 0, N, False)] for h in range(n - 1)]
"""
LINES = {
    "the ring passes on the whole tensor": (
        (RING, WHOLE_RING),
        every("ring", what=(MESSAGES, ELEMENTS, LARGEST)),
    ),
    "the counter misses elements": (
        ("sends = [call.elements for", "sends = [call.elements - 1 for"),
        every(*SIX, *THREE, what=(ELEMENTS, LARGEST)),
    ),
    "a chunk is off by one": (
        ("chunks[(rank + offset - step) % n]", "chunks[(rank + offset - step + 1) % n]"),
        {MINE, f"all_gather: {SUMS}"},
    ),
    "MAX is taken for SUM": (
        ("            combine(own, place, out=own)", "            torch.add(own, place, out=own)"),
        every(*SIX, what=(SUMS,)),
    ),
    "the ring stops half-way": (
        (RING, "    return reduce_scatter_schedule(n, N, piece)\n"),
        every("ring", what=(SUMS, MESSAGES, ELEMENTS)) | {RANDOM, "ring of 64: steps"},
    ),
    "both trees are the same": (
        ("schedule.append(moves + mirrored)", "schedule.append(moves + others)"),
        every("double tree", what=(MESSAGES, ELEMENTS)) | {DOUBLE_ASKED},
    ),
    "ranks beyond a power of two are left out": (
        ("    return [moves] if moves else []", "    return []"),
        every(*SIX[4:], what=(SUMS, MESSAGES, ELEMENTS, LARGEST)) | {RANDOM},
    ),
    "the number of pieces is rounded down": (
        ("math.ceil(length / piece))", "length // piece)"),
        every("tree", "double tree", "broadcast", what=(MESSAGES, LARGEST)),
    ),
    "the pieces of the double tree are twice too long": (
        ("count_pieces(N - N // 2, piece)", "count_pieces(N - N // 2, 2 * piece)"),
        every("double tree", what=(MESSAGES, LARGEST)),
    ),
    "the tree is a star": (
        (
            "parents = [(rank - 1) // 2 for rank in range(n)]\n    return",
            "parents = [0] * n\n    return",
        ),
        {TREE_ASKED, "tree of 64: steps"},
    ),
    "rank 0 sends the whole sum twice": (
        (
            "    return [everyone_sends, rank_0_sends]",
            "    return [everyone_sends, rank_0_sends, rank_0_sends]",
        ),
        every("star", what=(MESSAGES, ELEMENTS)) | {STAR_ASKED, "star of 64: steps"},
    ),
    "the chain passes on what it has not received yet": (
        ("schedule[rank + i].append", "schedule[(n - 1 - rank) % len(schedule)].append"),
        {f"broadcast: {SUMS}"},
    ),
    "all messages of a step land in the same memory": (
        ("kept_memory(number, len(place)", "kept_memory(0, len(place)"),
        every("star", "tree", "double tree", what=(SUMS,)),
    ),
    "the ring goes one step too far": (
        ("for step in range(n - 1):", "for step in range(n):"),
        every("ring", "reduce_scatter", "all_gather", what=(MESSAGES, ELEMENTS))
        | {"ring of 64: steps"},
    ),
}


BREAKS = Breaks(LINES, ranks=3)


# Values that no row shows


def pieces_of(dtype: torch.dtype) -> int:
    here = load(LESSON)
    with here.CountedCommunication() as counted:
        here.run(here.tree_schedule, torch.zeros(2**23 // dtype.itemsize, dtype=dtype))
    return len(counted.calls("send"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_piece_has_four_mib_in_every_dtype(dtype: torch.dtype) -> None:
    assert run(pieces_of, 2, dtype) == [2, 2]  # of 8 MiB


@pytest.mark.parametrize(
    ("chunks", "add", "color", "line"), [((3, 4), True, "C3", "-"), ((3, 5), False, "black", ":")]
)
def test_an_arrow_leads_from_the_sender_to_the_receiver_a_step_later(
    chunks: tuple[int, int], add: bool, color: str, line: str
) -> None:
    axes = Mock()
    lesson().draw_message(axes, 6, lesson().Move(1, 2, *chunks, add=add))
    (_, tip, tail), style = axes.annotate.call_args
    assert (tail, tip) == ((6, 1), (7, 2))
    assert (style["arrowprops"]["color"], style["arrowprops"]["linestyle"]) == (color, line)


def test_the_busiest_rank_counts_what_it_sends() -> None:
    def two_senders(n: int, N: int, piece: int) -> list:
        move = lesson().Move
        return [[move(0, 1, 0, N, True), move(2, 1, 0, N // 2, True)], [move(2, 0, 0, N, False)]]

    assert lesson().busiest(two_senders, 4) == 1.5
