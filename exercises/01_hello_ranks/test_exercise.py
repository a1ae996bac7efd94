"""Grader of 01: the greeting, the checksum on every rank, one collective of 8 bytes."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from course.grading import Wrong, expect, grade


def shard_of(rank: int) -> torch.Tensor:
    """Another length on every rank, none on rank 1; large enough that float32 would round."""
    return 10**9 * (rank + 1) + torch.arange([3, 0, 5, 1][rank])


def call(answer, wire, empty: bool) -> tuple:
    shard = shard_of(dist.get_rank())[: 0 if empty else None]
    given = shard.clone()
    said = answer.hello(shard)
    if not torch.equal(shard, given):
        raise Wrong("the shard was changed; it is the caller's")
    return said, wire.calls()


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_greeting_and_checksum(answer: Path, n: int) -> None:
    """Greeting and checksum, on {n} ranks"""
    due = sum((r + 1) * int(shard_of(r).sum()) for r in range(n))
    for rank, (said, _) in enumerate(grade(answer, call, n, False)):
        if not (isinstance(said, tuple) and len(said) == 2):
            raise Wrong(f"rank {rank}: expected a greeting and a checksum, got {said!r}")
        expect(said[0], f"rank {rank} of {n}", f"rank {rank}: greeting")
        expect(said[1], due, f"rank {rank}: checksum")


@pytest.mark.parametrize("n", [2, 4])
def test_cost(answer: Path, n: int) -> None:
    """One collective of 8 bytes, on {n} ranks"""
    for rank, (_, calls) in enumerate(grade(answer, call, n, False)):
        expect(len(calls), 1, f"rank {rank}: calls")
        expect(calls[0].nbytes, 8, f"rank {rank}: bytes in its {calls[0].op}")


def test_nobody_holds_anything(answer: Path) -> None:
    """Nobody holds anything: the checksum is 0"""
    for rank, (said, _) in enumerate(grade(answer, call, 3, True)):
        expect(said[1], 0, f"rank {rank}: checksum")
