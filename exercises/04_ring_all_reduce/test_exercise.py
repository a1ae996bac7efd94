"""Grader of 04: sums, the same bits everywhere, messages, bytes and neighbours."""

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from course.grading import Wrong, expect, grade, same


def operand(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Other numbers on every rank and in every place; 11ths, so that the order of sums shows."""
    x = torch.arange(1, length + 1, dtype=torch.float64) * (rank + 1) ** 2
    return (x / 11 if dtype.is_floating_point else x).to(dtype)


def call(answer, wire, length: int, dtype: torch.dtype) -> tuple:
    x = operand(dist.get_rank(), length, dtype)
    returned = answer.ring_all_reduce(x)
    if isinstance(returned, torch.Tensor) and returned is not x:
        raise Wrong("it returns another tensor; the sum belongs into x itself")
    wire.only("send", "recv")
    return x, wire.calls("send")


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("length", [12, 7, 2])
def test_sum(answer: Path, n: int, length: int) -> None:
    """The sum, on {n} ranks, {length} elements"""
    parts = [operand(r, length, torch.float32) for r in range(n)]
    due = torch.stack(parts).double().sum(0).float()
    # n - 1 additions, each rounded to half a unit in the last place, and the reference once
    atol = n * 2**-24 * float(torch.stack(parts).sum(0).max()) if length else 0.0
    got = [x for x, _ in grade(answer, call, n, length, torch.float32)]
    for rank, x in enumerate(got):
        same(x, due, f"rank {rank}", atol)
    for rank, x in enumerate(got):
        same(x, got[0], f"rank {rank} beside rank 0, to the bit")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bfloat16])
def test_dtypes(answer: Path, dtype: torch.dtype) -> None:
    """The sum, {dtype}"""
    due = sum(operand(r, 5, torch.float64 if dtype.is_floating_point else dtype) for r in range(3))
    atol = 0.0 if dtype == torch.int64 else 4 * torch.finfo(dtype).eps * float(due.max())
    for rank, (x, _) in enumerate(grade(answer, call, 3, 5, dtype)):
        same(x, due.to(dtype), f"rank {rank}", atol)


@pytest.mark.parametrize("n", [4, 3, 2])
def test_bytes(answer: Path, n: int) -> None:
    """2 (n - 1) messages of one n-th each, to the right neighbour, on {n} ranks"""
    length = 12 * n
    for rank, (_, sends) in enumerate(grade(answer, call, n, length, torch.float32)):
        told = f"rank {rank} of {n}, x of {4 * length} B"
        expect(sum(e.nbytes for e in sends), 2 * (n - 1) * 48, f"{told}: bytes sent")
        expect(len(sends), 2 * (n - 1), f"{told}: messages")
        to = dict(Counter(e.peer for e in sends))
        expect(to, {(rank + 1) % n: 2 * (n - 1)}, f"{told}: messages to each rank")


def test_alone(answer: Path) -> None:
    """Alone: x stays as it is, and nothing is sent"""
    ((x, sends),) = grade(answer, call, 1, 5, torch.float32)
    same(x, operand(0, 5, torch.float32), "the sum of one rank")
    expect(len(sends), 0, "messages")
