"""Grader of 01: the greeting, the checksum on every rank, one collective of 8 bytes."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from course.grading import Wrong, expect, grade

LENGTHS = [3, 1, 0, 5, 2]


def shard_of(rank: int, seed: int) -> torch.Tensor:
    """Another length on every rank, none on rank 2. Even numbers, but for one on rank 0, so that
    every checksum is odd; and so large that no float64 holds an odd number of that size. Those of
    rank 1 are below zero, and make the checksum of 2 and of 3 ranks so.
    """
    random = torch.Generator().manual_seed(seed + rank)
    shard = 2 * torch.randint(2**55, 2**56, (LENGTHS[rank],), generator=random)
    if rank == 0:
        shard[0] += 1
    if rank == 1:
        shard *= -4
    return shard


def call(answer, wire, empty: bool, seed: int) -> tuple:
    shard = shard_of(dist.get_rank(), seed)
    if empty:
        answer.hello(shard)  # what was held then does not count now
        wire.events.clear()
        shard = shard[:0]
    given = shard.clone()
    said = answer.hello(shard)
    wire.no_groups()
    if not torch.equal(shard, given):
        raise Wrong("the shard was changed; it is the caller's")
    if not (isinstance(said, tuple) and len(said) == 2):
        raise Wrong(f"expected a greeting and a checksum, got {said!r}")
    for part, due, what in zip(said, (str, int), ("greeting", "checksum"), strict=True):
        if type(part) is not due:
            raise Wrong(f"the {what}: expected of type {due.__name__}, got {part!r}")
    return said, wire.calls()


def compare(said: tuple, rank: int, n: int, seed: int) -> None:
    """Greeting and checksum of one rank; known mistakes are called by their names."""
    greeting, checksum = said
    expect(greeting, f"rank {rank} of {n}", f"rank {rank}: greeting")
    sums = [int(shard_of(r, seed).sum()) for r in range(n)]
    due = sum((r + 1) * sums[r] for r in range(n))
    known = {
        "that is this rank's own part, not the sum over all ranks": (rank + 1) * sums[rank],
        "the weights are to be 1 to n": due - sum(sums),
        "weigh each rank's sum before they are added up": (rank + 1) * sum(sums),
    }
    why = next((f": {mistake}" for mistake, value in known.items() if checksum == value), "")
    if 0 < abs(checksum - due) < abs(due) / 2**20 and checksum % 16 == 0:  # due is odd
        why = ": as rounded by a float; int64 is exact"
    if checksum == due % 2**64:
        why = ": elements may be below zero, and so may their sum"
    if checksum != due:
        raise Wrong(f"rank {rank}: checksum: expected {due:,}, got {checksum:,}{why}")


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_greeting_and_checksum(answer: Path, seed: int, n: int) -> None:
    """Greeting and checksum, on {n} ranks"""
    for rank, (said, _) in enumerate(grade(answer, call, n, False, seed)):
        compare(said, rank, n, seed)


@pytest.mark.parametrize("n", [2, 4, 3])
def test_cost(answer: Path, seed: int, n: int) -> None:
    """One collective of 8 bytes, on {n} ranks"""
    for rank, (_, calls) in enumerate(grade(answer, call, n, False, seed)):
        one_of_8_bytes(calls, rank)


def one_of_8_bytes(calls: list, rank: int) -> None:
    expect(len(calls), 1, f"rank {rank}: collectives")
    expect(calls[0].nbytes, 8, f"rank {rank}: bytes in its {calls[0].op}")


def test_nobody_holds_anything(answer: Path, seed: int) -> None:
    """Nobody holds anything any more: the checksum is 0"""
    for rank, (said, calls) in enumerate(grade(answer, call, 3, True, seed)):
        expect(said[1], 0, f"rank {rank}: checksum")
        one_of_8_bytes(calls, rank)
