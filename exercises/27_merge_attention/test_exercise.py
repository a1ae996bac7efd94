"""Grader of 27: what one softmax over all keys gives, at any size of the scores, and its cost."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from course.grading import Wrong, expect, grade, same

B, H, T, D = 2, 3, 5, 4
KEYS = 6  # of each part
NOTHING = -torch.inf


def atol(size: float, eps: float = 2**-53) -> float:
    """Values below 10: a softmax is a quotient of two sums of at most 24 terms, in another order;
    the exponent of a difference of numbers below 2 s is exact to 2 s eps.
    """
    return 10 * (2 * 24 + 4 * max(size, 1000.0)) * eps


def scores_and_values(
    seed: int, parts: int, size: float
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Scores (B, H, T, KEYS) of each part, some of them -inf, and its values (B, H, KEYS, D).

    Query 0 sees no key of part 0, query 1 none of the others, query 2 none at all. Scores are near
    size or -size, by chance; of the first head -size in all parts, of the second size.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for part in range(parts):
        scores = torch.randn(B, H, T, KEYS, generator=generator, dtype=torch.float64)
        sign = 1 - 2 * torch.rand(B, H, T, 1, generator=generator).round().double()
        sign[:, 0] = -1
        sign[:, 1] = 1
        scores = scores + size * sign
        scores[:, :, 0 if part == 0 else 1] = NOTHING
        scores[:, :, 2] = NOTHING
        scores[:, :, 3, 0] = NOTHING
        values = torch.randn(B, H, KEYS, D, generator=generator, dtype=torch.float64)
        found.append((scores, values))
    return found


def attention(
    scores: torch.Tensor, values: torch.Tensor, nothing: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse over these keys; where none is seen, o is `nothing`."""
    lse = scores.logsumexp(-1)
    o = scores.softmax(-1) @ values
    return torch.where((lse > NOTHING).unsqueeze(-1), o, nothing), lse


def oracle(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """One softmax over the keys of all parts."""
    scores = torch.cat([scores for scores, _ in parts], dim=-1)
    return attention(scores, torch.cat([values for _, values in parts], dim=-2))


def mistaken(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What known mistakes make of o."""
    (o1, lse1), (o2, lse2) = (attention(*part) for part in parts)
    p = torch.sigmoid((lse1 - lse2).nan_to_num(0)).unsqueeze(-1)
    return {
        "this is the mean of the two": (o1 + o2) / 2,
        "this is the sum of the two: each was divided by its own sum only": o1 + o2,
        "each part has the other's share": (1 - p) * o1 + p * o2,
    }


def pair(found: object) -> tuple:
    if not isinstance(found, tuple) or len(found) != 2:
        raise Wrong(f"merge is to return o and lse, got {found!r}"[:200])
    return found


def kept(given: torch.Tensor, was: torch.Tensor) -> bool:
    """Whether all elements are what they were: nan is nan, and -inf no large number."""
    return torch.equal(given.isnan(), was.isnan()) and bool(((given == was) | was.isnan()).all())


def merged(
    answer, wire, seed: int, size: float, nothing: float, dtype: torch.dtype = torch.float64
) -> tuple:
    first, second = scores_and_values(seed, 2, size)
    parts = [*attention(*first, nothing), *attention(*second, nothing)]
    given = [t.to(dtype) for t in parts]
    before = [t.clone() for t in given]
    found = pair(answer.merge(*given))
    for name, t, was in zip(("o1", "lse1", "o2", "lse2"), given, before, strict=True):
        if not kept(t, was):
            raise Wrong(f"merge changed {name}; it is the caller's")
    wire.only()
    return found


def check(seed: int, size: float, found: tuple, told: str) -> None:
    parts = scores_and_values(seed, 2, size)
    o, lse = oracle(parts)
    same(found[0], o, f"{told}: o", atol(size), mistaken(parts))
    added = {"this is the sum of both lse": sum_of_lse(parts)}
    same(found[1], lse, f"{told}: lse", atol(size), added)


def sum_of_lse(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    return attention(*parts[0])[1] + attention(*parts[1])[1]


def by_hand(answer, wire) -> tuple:
    one = torch.tensor([[[[10.0]]]], dtype=torch.float64)
    logs = torch.tensor([1.0, 3.0], dtype=torch.float64).log()
    return pair(answer.merge(one, logs[0].view(1, 1, 1), 2 * one, logs[1].view(1, 1, 1)))


def test_by_hand(answer: Path) -> None:
    """10 with weight 1 and 20 with weight 3 make 17.5"""
    (o, lse), *_ = grade(answer, by_hand, 1)
    same(o, torch.tensor([[[[17.5]]]], dtype=torch.float64), "o", 1e-14)
    same(lse, torch.tensor([[[4.0]]], dtype=torch.float64).log(), "lse", 1e-14)


def test_small_scores(answer: Path, seed: int) -> None:
    """Two halves are one softmax; a half without a key does not count"""
    check(seed, 0.0, grade(answer, merged, 1, seed, 0.0, 0.0)[0], "scores near 0")


@pytest.mark.parametrize("size", [1000, 20_000, 10**12])
def test_large_scores(answer: Path, seed: int, size: int) -> None:
    """The same where the scores are {size:,} or -{size:,}"""
    found = grade(answer, merged, 1, seed, float(size), 0.0)[0]
    check(seed, float(size), found, f"scores of {size:,} or {-size:,}")


@pytest.mark.parametrize("what", ["nan", "inf"])
def test_nan_where_no_key_is(answer: Path, seed: int, what: str) -> None:
    """{what} in a half without a key goes nowhere"""
    found = grade(answer, merged, 1, seed, 0.0, float(what))[0]
    check(seed, 0.0, found, f"{what} lies where a part has no key")


def test_float32(answer: Path, seed: int) -> None:
    """The same in float32, of two halves, and on 2 ranks"""
    o, lse = (t.float() for t in oracle(scores_and_values(seed, 2, 0.0)))
    found = grade(answer, merged, 1, seed, 0.0, 0.0, torch.float32)[0]
    same(found[0], o, "float32: o", atol(0.0, 2**-24))
    same(found[1], lse, "float32: lse", atol(0.0, 2**-24))
    for rank, (got, _) in enumerate(grade(answer, of_ranks, 2, seed, 0.0, 0.0, torch.float32)):
        same(got, o, f"float32, rank {rank}: o", atol(0.0, 2**-24))


def of_ranks(
    answer, wire, seed: int, size: float, nothing: float, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, list]:
    parts = scores_and_values(seed, dist.get_world_size(), size)
    found = attention(*parts[dist.get_rank()], nothing)
    o, lse = (t.to(dtype) for t in found)
    before = o.clone(), lse.clone()
    result = answer.over_all_ranks(o, lse)
    for name, t, was in zip(("o", "lse"), (o, lse), before, strict=True):
        if not kept(t, was):
            raise Wrong(f"over_all_ranks changed {name}; it is the caller's")
    return result, wire.calls()


@pytest.mark.parametrize(("n", "size"), [(2, 10), (3, 10), (3, 1000), (1, 10)])
def test_ranks(answer: Path, seed: int, n: int, size: int) -> None:
    """All have the attention over all keys, alike to the bit, on {n} ranks, scores near {size}"""
    due, _ = oracle(scores_and_values(seed, n, float(size)))
    found = grade(answer, of_ranks, n, seed, float(size), torch.nan)
    for rank, (o, _) in enumerate(found):
        same(o, due, f"scores of {size:,} or {-size:,}, rank {rank}: o", atol(float(size)))
        same(o, found[0][0], f"rank {rank}: o next to rank 0's, to the bit")


@pytest.mark.parametrize("n", [2, 4])
def test_cost(answer: Path, seed: int, n: int) -> None:
    """One all-gather of D + 1 numbers per query, on {n} ranks"""
    each = 4 * B * H * T * (D + 1)
    for rank, (_, calls) in enumerate(grade(answer, of_ranks, n, seed, 10.0, 0.0, torch.float32)):
        expect([call.op for call in calls], ["all_gather"], f"rank {rank}: its calls")
        expect([call.nbytes for call in calls], [n * each], f"rank {rank}: bytes gathered")
