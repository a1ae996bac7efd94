"""Grader of 28: output and gradients of one process, exact sizes, each expert called once."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course.grading import Wrong, expect, grade, same

D = 5
# Numbers below 10: sums of at most 60 terms of products of three, in another order.
ATOL = {torch.float64: 60 * 1000 * 2**-53, torch.float32: 60 * 1000 * 2**-24}
INTEGERS = [f"torch.{name}" for name in ("int64", "int32", "int16", "uint8")]


def tokens_of(case: str, rank: int) -> int:
    return {"even": 6, "none on rank 0": 5 * (rank > 0)}.get(case, 3 + 4 * rank)


def data(
    seed: int, case: str, n: int, e: int, K: int, dtype: torch.dtype = torch.float64
) -> list[dict[str, torch.Tensor]]:
    """For each rank: x, score, expert, the gradient of y. In "uneven" one expert gets nothing, in
    "nobody chooses rank 1" all of that rank.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for rank in range(n):
        N = tokens_of(case, rank)
        liking = torch.rand(N, n * e, generator=generator)
        if case == "uneven":
            liking[:, n * e - 1] = -1  # nobody's choice, as long as K leaves another
            liking[:, 0] += 0.5
        elif case == "even":
            liking[:1, n * e - 1] = 2  # somebody's choice, for certain
        elif case == "nobody chooses rank 1":
            liking[:, 1::n] = -1
        found.append(
            {
                "x": torch.randn(N, D, generator=generator, dtype=torch.float64).to(dtype),
                "score": torch.rand(N, K, generator=generator, dtype=torch.float64).to(dtype),
                "expert": liking.topk(K).indices[:, torch.randperm(K, generator=generator)],
                "grad": torch.randn(N, D, generator=generator, dtype=torch.float64).to(dtype),
            }
        )
    return found


def weights(seed: int, n: int, e: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn(n * e, D, D, generator=generator, dtype=torch.float64).to(dtype)


def oracle(
    seed: int, case: str, n: int, e: int, K: int, dtype: torch.dtype
) -> tuple[list[tuple], torch.Tensor]:
    """Per rank y and the gradients of x and score; the gradients of all experts."""
    whole = weights(seed, n, e, dtype).requires_grad_()
    found = []
    for one in data(seed, case, n, e, K, dtype):
        x = one["x"].requires_grad_()
        score = one["score"].requires_grad_()
        y = (
            score[..., None] * torch.tanh(torch.einsum("nd,nkde->nke", x, whole[one["expert"]]))
        ).sum(1)
        y.backward(one["grad"])
        found.append((y.detach(), x.grad, score.grad))
    return found, whole.grad


class Counted(TorchDispatchMode):
    """Notes of each all-to-all the dtype, and how many numbers go in and come out, added up."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "alltoall" in func._schema.name.replace("_", ""):
            found = {}  # an output that is handed in may be returned as well
            for leaf in tree_leaves((args, result)):
                if isinstance(leaf, torch.Tensor):
                    found[leaf.data_ptr(), leaf.numel()] = leaf
            numbers = sum(tensor.numel() for tensor in found.values())
            self.calls.append((str(next(iter(found.values())).dtype), numbers))
        return result


def on_a_rank(
    answer, wire, seed: int, case: str, e: int, K: int, dtype: torch.dtype = torch.float64
) -> tuple:
    rank = dist.get_rank()
    n = dist.get_world_size()
    one = data(seed, case, n, e, K, dtype)[rank]
    mine = [w.clone().requires_grad_() for w in weights(seed, n, e, dtype)[rank::n]]
    rows = []

    def expert(i: int) -> object:
        def compute(x_RD: torch.Tensor) -> torch.Tensor:
            rows.append((i, len(x_RD)))
            return torch.tanh(x_RD @ mine[i])

        return compute

    x = one["x"].clone().requires_grad_()
    score = one["score"].clone().requires_grad_()
    chosen = one["expert"].clone()
    y = answer.mixture(x, score, chosen, [expert(i) for i in range(e)])
    if not isinstance(y, torch.Tensor) or not y.requires_grad:
        raise Wrong(f"mixture: expected a tensor with a way back to x, got {y!r}"[:200])
    for name, given in (("x", x), ("score", score), ("expert", chosen)):
        if not torch.equal(given, one[name]):
            raise Wrong(f"{name} was changed; it is the caller's")
    forward = len(wire.calls())
    y.backward(one["grad"])
    wire.only("all_to_all")
    made = len(wire.calls()) - forward
    if n > 1 and made < 2:
        told = f"{case}: {made} of the 2 all-to-alls of backward are made"
        raise Wrong(f"{told}; other ranks wait for this one")
    return y.detach(), x.grad, score.grad, [w.grad for w in mine], sorted(rows), forward


def counted(answer, wire, *inputs: object) -> tuple[list, list]:
    """What `Counted` notes of the calls forward, and of those backward."""
    with Counted() as seen:
        *_, forward = on_a_rank(answer, wire, *inputs)
    return seen.calls[:forward], seen.calls[forward:]


def judged(
    answer: Path, seed: int, case: str, n: int, e: int, K: int, dtype: torch.dtype = torch.float64
) -> None:
    """Compare output and gradients with those of one process."""
    found = grade(answer, on_a_rank, n, seed, case, e, K, dtype)
    due, of_experts = oracle(seed, case, n, e, K, dtype)
    atol = ATOL[dtype]
    for rank, (y, of_x, of_score, *_) in enumerate(found):
        told = f"{case}, rank {rank} of {n}"
        same(y, due[rank][0], f"{told}: y", atol)
        same(of_x, due[rank][1], f"{told}: gradient of x", atol)
        same(of_score, due[rank][2], f"{told}: gradient of score", atol)
    for rank, (_, _, _, grads, *_) in enumerate(found):
        for i, grad in enumerate(grads):
            told = f"{case}, rank {rank} of {n}: gradient of experts[{i}]"
            same(grad, of_experts[rank + i * n], told, atol)


@pytest.mark.parametrize(("n", "e"), [(2, 2), (3, 3), (2, 1), (1, 2)])
def test_even(answer: Path, seed: int, n: int, e: int) -> None:
    """Output and gradients of one process, as many tokens everywhere, on {n} ranks, e = {e}"""
    judged(answer, seed, "even", n, e, 2)


def test_float32(answer: Path, seed: int) -> None:
    """The same in float32, on 2 ranks"""
    judged(answer, seed, "even", 2, 2, 2, torch.float32)


@pytest.mark.parametrize("case", ["uneven", "none on rank 0", "nobody chooses rank 1"])
def test_uneven(answer: Path, seed: int, case: str) -> None:
    """The same where ranks have unlike numbers of tokens ({case})"""
    judged(answer, seed, case, 3, 2, 3)


def test_calls(answer: Path, seed: int) -> None:
    """Each expert is called once, with all its rows, and with none if none came"""
    found = grade(answer, on_a_rank, 3, seed, "uneven", 2, 3)
    chosen = torch.cat([one["expert"].flatten() for one in data(seed, "uneven", 3, 2, 3)])
    counts = chosen.bincount(minlength=6).tolist()
    for rank, (*_, rows, _) in enumerate(found):
        due = [(i, counts[rank + 3 * i]) for i in range(2)]
        expect(rows, due, f"rank {rank}: (expert, rows) of each call")


@pytest.mark.parametrize("n", [2, 4])
def test_cost(answer: Path, seed: int, n: int) -> None:
    """Counts, rows out, rows back; two all-to-alls backward; no padding, on {n} ranks"""
    chosen = [one["expert"] for one in data(seed, "uneven", n, 2, 2)]
    everyone = torch.cat([c.flatten() for c in chosen])
    found = grade(answer, counted, n, seed, "uneven", 2, 2)
    for rank, (forward, backward) in enumerate(found):
        expect(len(forward), 3, f"rank {rank}: all-to-alls, forward")
        expect(len(backward), 2, f"rank {rank}: all-to-alls, backward")
        numbers = D * (chosen[rank].numel() + int((everyone % n == rank).sum()))
        both = f"rank {rank}: numbers that go in and come out, added up"
        expect([size for _, size in forward[1:]], [numbers] * 2, f"{both}, rows out and back")
        expect([size for _, size in backward], [numbers] * 2, f"{both}, gradients out and back")
        expect(forward[0][1], 2 * n * 2, f"{both}, of counts")
        if forward[0][0] not in INTEGERS:
            raise Wrong(f"rank {rank}: counts travel as {forward[0][0]}; they are integers")
