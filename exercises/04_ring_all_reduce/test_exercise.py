"""Grader of 04: sums, the same bits everywhere, messages and bytes each way, and all at once."""

import time
from collections import Counter
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from course.grading import Event, Wrong, expect, grade, same
from course.wire import NotedWait


def operand(rank: int, length: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Other numbers on every rank; between 1 and 2, or integers that no float32 holds."""
    random = torch.Generator().manual_seed(seed + rank)
    if dtype.is_floating_point:
        return 1 + torch.rand(length, dtype=torch.float64, generator=random).to(dtype)
    return torch.randint(2**40, 2**60, (length,), dtype=dtype, generator=random)


def call(answer, wire, length: int, dtype: torch.dtype, seed: int) -> tuple:
    x = operand(dist.get_rank(), length, dtype, seed)
    lies = x.data_ptr()
    returned = answer.ring_all_reduce(x)
    if isinstance(returned, torch.Tensor) and returned is not x:
        raise Wrong("it returns another tensor; the sum belongs into x itself")
    if x.data_ptr() != lies:
        raise Wrong("x was given other memory; the sum belongs where x lies")
    wire.only("send", "recv")
    return x, wire.calls("send")


def compare(results: list[torch.Tensor], parts: list[torch.Tensor], told: str = "") -> None:
    """With the sum; known mistakes are called by their names. And all ranks with each other."""
    n = len(parts)
    dtype = parts[0].dtype
    wide = torch.float64 if dtype.is_floating_point else dtype
    due = torch.stack(parts).to(wide).sum(0)
    atol = 0.0
    if dtype.is_floating_point:
        # n - 1 additions and one last rounding, each by half a unit in the last place of at most 2n
        atol = n * n * torch.finfo(dtype).eps
    for rank, x in enumerate(results):
        known = named(parts[rank].to(wide), due, n)
        known = {mistake: value.to(dtype) for mistake, value in known.items()}
        same(x, due.to(dtype), f"rank {rank}{told}", atol, instead=known)
    for rank, x in enumerate(results):
        same(x, results[0], f"rank {rank} next to rank 0, to the bit")


def named(own: torch.Tensor, due: torch.Tensor, n: int) -> dict[str, torch.Tensor]:
    """What known mistakes leave in x."""
    own_right, own_left = own.tensor_split(2)
    due_right, due_left = due.tensor_split(2)
    return {
        "this is the mean, not the sum": due / n,
        "the half for the left is still this rank's own": torch.cat([due_right, own_left]),
        "the half for the right is still this rank's own": torch.cat([own_right, due_left]),
    }


@pytest.mark.parametrize("n", [3, 4, 2])
@pytest.mark.parametrize("length", [24, 7, 1, 0])
def test_sum(answer: Path, seed: int, n: int, length: int) -> None:
    """The sum, on {n} ranks, {length} elements"""
    results = grade(answer, call, n, length, torch.float32, seed)
    compare([x for x, _ in results], [operand(r, length, torch.float32, seed) for r in range(n)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bfloat16])
def test_dtypes(answer: Path, seed: int, dtype: torch.dtype) -> None:
    """The sum, {dtype}"""
    results = grade(answer, call, 3, 13, dtype, seed)
    compare([x for x, _ in results], [operand(r, 13, dtype, seed) for r in range(3)])


AFTER_ONE_ANOTHER = [torch.float64, torch.int64, torch.float32]


def several(answer, wire, seed: int) -> list[torch.Tensor]:
    return [call(answer, wire, 13, dtype, seed)[0] for dtype in AFTER_ONE_ANOTHER]


def test_dtypes_after_one_another(answer: Path, seed: int) -> None:
    """The sum, of another dtype in each call: what one call leaves is nothing to the next"""
    results = grade(answer, several, 3, seed)
    for at, dtype in enumerate(AFTER_ONE_ANOTHER):
        told = f", call {at + 1}, the first of {str(dtype)[6:]}"
        compare([xs[at] for xs in results], [operand(r, 13, dtype, seed) for r in range(3)], told)


@pytest.mark.parametrize("n", [4, 3, 2])
def test_bytes(answer: Path, seed: int, n: int) -> None:
    """2 (n - 1) messages each way, each an n-th of a half, on {n} ranks"""
    length = 24 * n
    results = grade(answer, call, n, length, torch.float32, seed)
    for rank, (_, sends) in enumerate(results):
        told = f"rank {rank} of {n}, x of {4 * length} B"
        right = (rank + 1) % n
        left = (rank - 1) % n
        by_peer = Counter(e.peer for e in sends)
        if n > 2 and by_peer[left] == 0 and by_peer[right]:
            raise Wrong(f"{told}: nothing goes to the left, so half of every link rests")
        expect(sum(e.nbytes for e in sends), 4 * (n - 1) * 48, f"{told}: bytes sent")
        expect(len(sends), 4 * (n - 1), f"{told}: messages")
        due = Counter([right] * (2 * n - 2) + [left] * (2 * n - 2))
        expect(
            dict(sorted(by_peer.items())), dict(sorted(due.items())), f"{told}: messages by rank"
        )
        expect({e.nbytes for e in sends}, {48}, f"{told}: bytes of each message")
    if n > 2:
        # 2 n + 2 elements: cut into 2 n, the first half would have two chunks of two, not one
        for length in 7, 2 * n + 2:
            check_chunks(grade(answer, call, n, length, torch.float32, seed), length)


def check_chunks(results: list[tuple], length: int) -> None:
    """Each half is cut as tensor_split cuts it, and each chunk goes round the whole ring."""
    n = len(results)
    halves = torch.empty(length).tensor_split(2)
    sides = ("first", "right", 1), ("second", "left", -1)
    for half, (nth, side, way) in zip(halves, sides, strict=True):
        if len(half) < n:
            continue  # a chunk of no elements need not be sent
        sizes = Counter()
        for rank, (_, sends) in enumerate(results):
            sizes.update(e.nbytes for e in sends if e.peer == (rank + way) % n)
        due = Counter(chunk.nbytes for chunk in half.tensor_split(n))
        due = {nbytes: 2 * (n - 1) * times for nbytes, times in sorted(due.items())}
        told = f"x of {length} elements, the {nth} half of them {len(half)}: messages to the {side}"
        expect(dict(sorted(sizes.items())), due, f"{told} by bytes, from all {n} ranks")


class Told(list):
    """Events, of which the other ranks hear as they are made."""

    def append(self, event: Event) -> None:
        super().append(event)
        times = sum(e.op == event.op for e in self)
        _get_default_store().add(f"rank {dist.get_rank()}, {event.op} {times}", 1)


def each_late(answer, wire, late: int, seed: int) -> list[Event]:
    """One rank comes late: when all others have started the four operations of their first step."""
    rank = dist.get_rank()
    wire.events = Told()
    if rank == late:
        wait_for_the_others(late, dist.get_world_size())
    with patch.object(dist.Work, "wait", NotedWait(lambda work: wire.note("wait"))):
        answer.ring_all_reduce(operand(rank, 24, torch.float32, seed))
    return list(wire.events)


def wait_for_the_others(late: int, n: int) -> None:
    """A right answer waits for nobody here, a wrong one would for ever."""
    store = _get_default_store()
    stop = time.monotonic() + 8
    for other, op, times in product(range(n), ("send", "recv"), (1, 2)):
        key = f"rank {other}, {op} {times}"
        while other != late and not store.check([key]):
            if time.monotonic() > stop:
                which = "first" if times == 1 else "second"
                why = f"rank {other} has not started its {which} {op} while rank {late} is away"
                raise Wrong(f"{why}: start both directions, then wait")
            time.sleep(0.01)


@pytest.mark.parametrize(("n", "late"), [(4, 0), (4, 2), (2, 0), (3, 1)])
def test_both_ways_at_once(answer: Path, seed: int, n: int, late: int) -> None:
    """Both directions in each step, started before any is waited for; rank {late} of {n} is late"""
    for rank, events in enumerate(grade(answer, each_late, n, late, seed, deadline=20)):
        started = 0
        for event in events:
            if event.op == "note" and started % 4:
                told = f"rank {rank}, step {started // 4}: it waits when {started % 4} of the four"
                raise Wrong(f"{told} have been started: start both directions, then wait")
            started += event.op != "note"
        if (waited := sum(event.op == "note" for event in events)) < started:
            told = f"rank {rank}: {started} sends and receives were started, {waited} waited for"
            raise Wrong(f"{told}: wait for what is sent, too, before x changes again")
        to = [e.peer for e in events if e.op == "send"]
        for step, pair in enumerate(zip(to[::2], to[1::2], strict=False)):
            due = {(rank + 1) % n, (rank - 1) % n}
            expect(set(pair), due, f"rank {rank}, step {step}: the two sends go to ranks")


def test_alone(answer: Path, seed: int) -> None:
    """Alone: x stays as it is, and nothing is sent"""
    ((x, sends),) = grade(answer, call, 1, 5, torch.float32, seed)
    same(x, operand(0, 5, torch.float32, seed), "the sum of one rank")
    expect(len(sends), 0, "messages")
