"""Grader of 28: output and gradients of one process, exact sizes, each expert called once."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from course.grading import Wrong, expect, grade, same

D = 5
# Float64, numbers below 10: sums of at most 60 terms of products of three, in another order.
ATOL = 60 * 1000 * 2**-53


def tokens_of(case: str, rank: int) -> int:
    return {"even": 6, "uneven": 3 + 4 * rank, "none on rank 0": 5 * (rank > 0)}[case]


def data(seed: int, case: str, n: int, e: int, K: int) -> list[dict[str, torch.Tensor]]:
    """For each rank: x, score, expert, the gradient of y. In "uneven" one expert gets nothing."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for rank in range(n):
        N = tokens_of(case, rank)
        liking = torch.rand(N, n * e, generator=generator)
        if case == "uneven":
            liking[:, n * e - 1] = -1  # nobody's choice, as long as K leaves another
            liking[:, 0] += 0.5
        found.append(
            {
                "x": torch.randn(N, D, generator=generator, dtype=torch.float64),
                "score": torch.rand(N, K, generator=generator, dtype=torch.float64),
                "expert": liking.topk(K).indices[:, torch.randperm(K, generator=generator)],
                "grad": torch.randn(N, D, generator=generator, dtype=torch.float64),
            }
        )
    return found


def weights(seed: int, n: int, e: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn(n * e, D, D, generator=generator, dtype=torch.float64)


def oracle(seed: int, case: str, n: int, e: int, K: int) -> tuple[list[tuple], torch.Tensor]:
    """Per rank y and the gradients of x and score; the gradients of all experts."""
    whole = weights(seed, n, e).requires_grad_()
    found = []
    for one in data(seed, case, n, e, K):
        x = one["x"].requires_grad_()
        score = one["score"].requires_grad_()
        y = (
            score[..., None] * torch.tanh(torch.einsum("nd,nkde->nke", x, whole[one["expert"]]))
        ).sum(1)
        y.backward(one["grad"])
        found.append((y.detach(), x.grad, score.grad))
    return found, whole.grad


def on_a_rank(answer, wire, seed: int, case: str, e: int, K: int) -> tuple:
    rank = dist.get_rank()
    n = dist.get_world_size()
    one = data(seed, case, n, e, K)[rank]
    mine = [w.clone().requires_grad_() for w in weights(seed, n, e)[rank::n]]
    rows = []

    def expert(i: int) -> object:
        def compute(x_RD: torch.Tensor) -> torch.Tensor:
            rows.append((i, len(x_RD)))
            return torch.tanh(x_RD @ mine[i])

        return compute

    x = one["x"].clone().requires_grad_()
    score = one["score"].clone().requires_grad_()
    wire.note("forward")
    y = answer.mixture(x, score, one["expert"].clone(), [expert(i) for i in range(e)])
    if not isinstance(y, torch.Tensor) or not y.requires_grad:
        raise Wrong(f"mixture: expected a tensor with a way back to x, got {y!r}"[:200])
    if not torch.equal(x, one["x"]) or not torch.equal(score, one["score"]):
        raise Wrong("x or score was changed; they are the caller's")
    wire.note("backward")
    y.backward(one["grad"])
    wire.only("all_to_all")
    grads = [w.grad for w in mine]
    return y.detach(), x.grad, score.grad, grads, sorted(rows), wire.events


def judged(seed: int, case: str, n: int, e: int, K: int, found: list[tuple]) -> None:
    due, of_experts = oracle(seed, case, n, e, K)
    for rank, (y, of_x, of_score, *_) in enumerate(found):
        told = f"{case}, rank {rank} of {n}"
        same(y, due[rank][0], f"{told}: y", ATOL)
        same(of_x, due[rank][1], f"{told}: gradient of x", ATOL)
        same(of_score, due[rank][2], f"{told}: gradient of score", ATOL)
    for rank, (_, _, _, grads, *_) in enumerate(found):
        for i, grad in enumerate(grads):
            told = f"{case}, rank {rank} of {n}: gradient of experts[{i}]"
            same(
                torch.zeros(D, D).double() if grad is None else grad,
                of_experts[rank + i * n],
                told,
                ATOL,
            )


@pytest.mark.parametrize("n", [2, 3, 1])
def test_even(answer: Path, seed: int, n: int) -> None:
    """Output and gradients of one process, as many tokens everywhere, on {n} ranks"""
    judged(seed, "even", n, 2, 2, grade(answer, on_a_rank, n, seed, "even", 2, 2))


@pytest.mark.parametrize("case", ["uneven", "none on rank 0"])
def test_uneven(answer: Path, seed: int, case: str) -> None:
    """The same where ranks have unlike numbers of tokens ({case})"""
    judged(seed, case, 3, 2, 3, grade(answer, on_a_rank, 3, seed, case, 2, 3))


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
    for rank, (*_, events) in enumerate(grade(answer, on_a_rank, n, seed, "uneven", 2, 2)):
        arrived = int((everyone % n == rank).sum())
        larger = 8 * D * max(arrived, chosen[rank].numel())  # what goes in, or what comes out
        sizes = {"forward": [], "backward": []}
        phase = "forward"
        for event in events:
            if event.op == "note":
                phase = event.text
            else:
                sizes[phase].append(event.nbytes)
        expect(len(sizes["forward"]), 3, f"rank {rank}: all-to-alls, forward")
        expect(len(sizes["backward"]), 2, f"rank {rank}: all-to-alls, backward")
        expect(sizes["forward"][1:], [larger] * 2, f"rank {rank}: bytes of rows, out and back")
        expect(sizes["backward"], [larger] * 2, f"rank {rank}: bytes of gradients, out and back")
        expect(
            sizes["forward"][0] <= 8 * 2 * n, True, f"rank {rank}: counts take at most 16 n bytes"
        )
