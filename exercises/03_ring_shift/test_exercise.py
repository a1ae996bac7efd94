"""Grader of 03: who gets whose tensor, what it costs, and that nobody's message waits."""

import time
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from course.grading import Event, Wrong, expect, grade, same

SHIFTS = 1, -1, 2, -2, 3, 4, 5, -7, 0
DTYPES = torch.int32, torch.int64, torch.float64, torch.bfloat16, torch.bool, torch.complex64
LAYOUTS = "", "transposed", "transposed on rank 0 alone", "every other column", "expanded"
LAYOUTS += "one number", "no elements"
Case = tuple[int, torch.dtype, str]  # shift, dtype, memory layout


def held(
    rank: int, seed: int, dtype: torch.dtype = torch.float32, layout: str = ""
) -> torch.Tensor:
    """Other numbers on every rank and in every place; too fine for a detour by float32."""
    random = torch.Generator().manual_seed(seed + rank)
    if dtype.is_floating_point or dtype.is_complex:
        x = torch.randn(3, 4, dtype=dtype, generator=random)
    else:
        bits = {torch.bool: 1, torch.int32: 31, torch.int64: 62}[dtype]
        x = torch.randint(2**bits, (3, 4), generator=random).to(dtype)
    views = {"transposed": x.t(), "every other column": x[:, ::2], "one number": x[1, 2]}
    views |= {"expanded": x[:, :1].expand(3, 4), "no elements": x[:0]}
    views["transposed on rank 0 alone"] = x.t() if rank == 0 else x.t().contiguous()
    return views.get(layout, x)


def call(answer, wire, cases: list[Case], seed: int) -> list[list[Event]]:
    """Judge what comes in each case; return the messages. Rank 0 comes late to the first one."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    store = _get_default_store()
    messages = []
    returned = []
    for number, (shift, dtype, layout) in enumerate(cases):
        x = held(rank, seed, dtype, layout)
        lies = x.data_ptr(), x.stride()
        behind = (rank - shift) % n
        if rank == 0 and number == 0:
            for other in range(1, n):
                store.wait([f"0, rank {other}"])
            time.sleep(0.4)  # who waits for nothing comes back meanwhile
        store.add(f"{number}, rank {rank}", 1)  # unlike set, returns when it is there
        told = f"shift {shift}, {layout or 'contiguous'} {str(dtype)[6:]}"
        y = answer.ring_shift(x, shift)
        if rank == 0 and number == 0:  # who came back too early is to say so first
            wait_until_there([f"0, rank {other} is right" for other in range(1, n)], 4)
        if isinstance(y, torch.Tensor) and not store.check([f"{number}, rank {behind}"]):
            raise Wrong(f"{told}: came back before anything can have come: wait for the work")
        if not torch.equal(x, held(rank, seed, dtype, layout)):
            raise Wrong(f"{told}: x was changed; it is the caller's, and is still on its way out")
        if (x.data_ptr(), x.stride()) != lies:
            raise Wrong(f"{told}: x was given other memory or strides; it is the caller's")
        due = held(behind, seed, dtype, layout)
        if isinstance(y, torch.Tensor) and not torch.equal(y, due):
            for other in range(n):
                if torch.equal(y, held(other, seed, dtype, layout)):
                    whose = f"expected the tensor of rank {behind}, got rank {other}'s"
                    raise Wrong(f"{told}: {whose}")
        same(y, due, f"{told}: what comes from rank {behind}")
        if y.numel() and y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
            raise Wrong(f"{told}: what it returns shares x's memory; it is to have its own")
        if y.numel() and any(y.data_ptr() == earlier.data_ptr() for earlier in returned):
            raise Wrong(f"{told}: it shares memory with what an earlier call returned")
        returned.append(y)
        if not y.is_contiguous():
            raise Wrong(f"{told}: what it returns is not contiguous")
        wire.only("send", "recv")
        messages.append(wire.calls())
        store.add(f"{number}, rank {rank} is right", 1)
        wire.events.clear()
    return messages


def wait_until_there(keys: list[str], seconds: float) -> None:
    """Wait for these in the store, but no longer than so many seconds."""
    stop = time.monotonic() + seconds
    while time.monotonic() < stop and not _get_default_store().check(keys):
        time.sleep(0.01)


@pytest.mark.parametrize("n", [2, 3, 4, 1])
def test_values(answer: Path, seed: int, n: int) -> None:
    """What comes, by any shift, on {n} ranks"""
    grade(answer, call, n, [(shift, torch.float32, "") for shift in SHIFTS], seed)


def test_tensors(answer: Path, seed: int) -> None:
    """What comes, of any dtype and memory layout"""
    grade(answer, call, 3, [*product((1, -1, 0), DTYPES, LAYOUTS)], seed)


@pytest.mark.parametrize("n", [3, 4, 2])
def test_cost(answer: Path, seed: int, n: int) -> None:
    """One message out and one in, whatever the shift, on {n} ranks"""
    cases = [(shift, torch.float32, "") for shift in SHIFTS]
    for rank, messages in enumerate(grade(answer, call, n, cases, seed)):
        for (shift, *_), calls in zip(cases, messages, strict=True):
            told = f"rank {rank} of {n}, shift {shift}"
            sent = [e for e in calls if e.op == "send"]
            received = [e for e in calls if e.op == "recv"]
            to = [] if shift % n == 0 else [(rank + shift) % n]
            expect([e.peer for e in sent], to, f"{told}: sends to ranks")
            expect(sum(e.nbytes for e in sent), 48 * len(to), f"{told}: bytes sent")
            expect(len(received), len(to), f"{told}: messages received")


class Told(list):
    """Events, each of which the other ranks hear of as it is made."""

    def __init__(self, late: int) -> None:
        super().__init__()
        self.late = late

    def append(self, event: Event) -> None:
        super().append(event)
        key = f"rank {dist.get_rank()} starts its {event.op}, rank {self.late} late"
        _get_default_store().add(key, 1)


def shifts_at_once(n: int) -> tuple[int, ...]:
    """The shift to ask for when rank 0 is late, when rank 1 is, and so on; 1 is the default."""
    return (1, -1, -3, 2) if n == 4 else (1,) * n


def each_late(answer, wire, seed: int) -> list[torch.Tensor]:
    """Each rank in turn comes late: when all others have started their send and their receive.
    That they wait for its message is their right, but not before they have sent their own."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    came = []
    for late, shift in enumerate(shifts_at_once(n)):
        wire.events = Told(late)
        x = held(rank, seed)
        if rank == late:
            wait_for_the_others(late, n)
            wait_until_there([f"rank {(late - shift) % n} is back, rank {late} late"], 0.2)
        came.append(answer.ring_shift(x, shift) if shift != 1 else answer.ring_shift(x))
        x.fill_(-1)  # as the next step would: an answer that has not waited for its send spoils it
        _get_default_store().add(f"rank {rank} is back, rank {late} late", 1)
    return came


def wait_for_the_others(late: int, n: int) -> None:
    """Return when all have started both. A right answer waits for nobody here, a wrong one would
    for ever."""
    store = _get_default_store()
    stop = time.monotonic() + 8
    for other, op in product(set(range(n)) - {late}, ("send", "recv")):
        while not store.check([f"rank {other} starts its {op}, rank {late} late"]):
            if time.monotonic() > stop:
                why = f"rank {other} has not started its {op} while rank {late} is away"
                raise Wrong(f"{why}: start both, then wait")
            time.sleep(0.01)


@pytest.mark.parametrize("n", [3, 4, 2])
def test_all_at_once(answer: Path, seed: int, n: int) -> None:
    """All have sent before anything has come: each of {n} ranks is late once"""
    for rank, came in enumerate(grade(answer, each_late, n, seed, deadline=20)):
        for late, (shift, y) in enumerate(zip(shifts_at_once(n), came, strict=True)):
            behind = (rank - shift) % n
            if isinstance(y, torch.Tensor) and (y == -1).any():
                raise Wrong(f"rank {behind} came back while its x was still being sent: wait")
            same(y, held(behind, seed), f"rank {rank}, rank {late} late: what came")
