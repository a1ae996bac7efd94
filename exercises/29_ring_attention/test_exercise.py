"""Grader of 29: one process's rows, the bytes that travel, and the scores that are computed."""

import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from course.grading import Wrong, expect, grade, same

B, H, D = 2, 3, 4
FORBIDDEN = ["torch.nn.functional.scaled_dot_product_attention"]
# Values below 10: sums of at most 48 terms in another order, and as many merges as ranks.
ATOL = {torch.float64: 10 * 4 * 48 * 2**-53, torch.float32: 10 * 4 * 48 * 2**-24}


def zigzag(T: int, n: int, rank: int) -> torch.Tensor:
    """Places p whose piece p // (T / 2n), counted from the nearer end, is `rank`."""
    piece = torch.arange(T) * 2 * n // T
    return torch.minimum(piece, 2 * n - 1 - piece).eq(rank).nonzero().flatten()


def whole(seed: int, T: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(3, B, H, T, D, generator=generator, dtype=torch.float64)
    return [*drawn.to(dtype)]


def oracle(seed: int, T: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    q, k, v = whole(seed, T, dtype)
    score = q @ k.mT / D**0.5
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    return score.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def dealt(answer, wire, cases: list[tuple[int, int]]) -> list[list[torch.Tensor]]:
    found = []
    for T, n in cases:
        found.append([answer.places(T, n, rank) for rank in range(n)])
    return found


def test_places(answer: Path) -> None:
    """Two pieces for each rank, one from each end"""
    cases = [(8, 2), (4, 2), (24, 3), (24, 4), (6, 1), (16, 8)]
    for (T, n), found in zip(cases, grade(answer, dealt, 1, cases)[0], strict=True):
        for rank, mine in enumerate(found):
            same(mine, zigzag(T, n, rank), f"places({T}, {n}, {rank})")


def on_a_rank(answer, wire, seed: int, T: int, dtype: torch.dtype = torch.float64) -> tuple:
    rank = dist.get_rank()
    n = dist.get_world_size()
    mine = zigzag(T, n, rank)
    given = [x[:, :, mine] for x in whole(seed, T, dtype)]
    kept = [x.clone() for x in given]
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        o = answer.ring_attention(*given)
    for name, x, was in zip("qkv", given, kept, strict=True):
        if not torch.equal(x, was):
            raise Wrong(f"{name} was changed; it is the caller's")
    wire.only("send", "recv")
    sent = [(call.peer, call.nbytes) for call in wire.calls("send")]
    return o, sent, counted.get_total_flops()


@pytest.mark.parametrize("n", [2, 3, 4, 1])
def test_values(answer: Path, seed: int, n: int) -> None:
    """One process's rows of the causal attention, on {n} ranks"""
    T = 48 if n != 3 else 36
    due = oracle(seed, T)
    for rank, (o, *_) in enumerate(grade(answer, on_a_rank, n, seed, T, forbid=FORBIDDEN)):
        same(o, due[:, :, zigzag(T, n, rank)], f"rank {rank} of {n}: o", ATOL[torch.float64])


def test_float32(answer: Path, seed: int) -> None:
    """The same in float32, on 2 ranks"""
    kind = torch.float32
    due = oracle(seed, 48, kind)
    for rank, (o, *_) in enumerate(grade(answer, on_a_rank, 2, seed, 48, kind, forbid=FORBIDDEN)):
        same(o, due[:, :, zigzag(48, 2, rank)], f"float32, rank {rank}: o", ATOL[kind])


@pytest.mark.parametrize("n", [2, 4])
def test_bytes(answer: Path, seed: int, n: int) -> None:
    """Keys and values go to the next rank, n - 1 times, on {n} ranks"""
    T = 48
    each = 8 * 2 * B * H * (T // n) * D
    for rank, (_, sent, _) in enumerate(grade(answer, on_a_rank, n, seed, T, forbid=FORBIDDEN)):
        expect({peer for peer, _ in sent}, {(rank + 1) % n}, f"rank {rank}: sends to ranks")
        expect(sum(nbytes for _, nbytes in sent), (n - 1) * each, f"rank {rank}: bytes sent")


@pytest.mark.parametrize("n", [2, 4])
def test_work(answer: Path, seed: int, n: int) -> None:
    """Half of the scores with each other rank's keys, equally many on each of {n} ranks"""
    T = 48
    t = T // n
    two_products = 2 * 2 * B * H * D  # q k and p v, FLOPs per score
    others = (n - 1) * t * t // 2
    least = t * (t + 1) // 2 + others
    most = t * t + others
    found = grade(answer, on_a_rank, n, seed, T, forbid=FORBIDDEN)
    computed = [flops / two_products for *_, flops in found]
    for rank, scores in enumerate(computed):
        if not least <= scores <= most:
            told = f"expected {t} x {t} and {n - 1} times half of it, {most}, got {scores:g}"
            raise Wrong(f"rank {rank}: scores computed: {told}")
    if len(set(computed)) > 1:
        told = ", ".join(f"{scores:g}" for scores in computed)
        raise Wrong(f"ranks compute unlike numbers of scores: {told}")


class Held(TorchDispatchMode):
    """Looks, before each operation, in how many of these blocks, a row each, some number is also
    found in memory that an operation made and that is alive: in whatever has arrived, and copies.
    """

    def __init__(self, blocks: torch.Tensor) -> None:
        super().__init__()
        self.blocks = blocks
        self.made = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.look()
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                if "empty" in func._schema.name:
                    leaf.zero_()  # else what was let go of might still lie there
                storage = leaf.untyped_storage()
                self.made[storage._cdata] = weakref.ref(storage)
        return result

    def look(self) -> None:
        alive = [reference() for reference in self.made.values()]
        numbers = [
            torch.empty(0, dtype=self.blocks.dtype).set_(storage)
            for storage in alive
            if storage is not None and storage.nbytes() % self.blocks.itemsize == 0
        ]
        if numbers:
            found = torch.isin(self.blocks, torch.cat(numbers)).any(1)
            self.most = max(self.most, int(found.sum()))


def held(answer, wire, seed: int, T: int) -> int:
    """The keys and values of how many other ranks lie here at a time."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    q, k, v = whole(seed, T)
    blocks = []
    for other in range(n):
        places = zigzag(T, n, other)
        blocks.append(torch.stack([k[:, :, places], v[:, :, places]]).flatten())
    del blocks[rank]
    mine = zigzag(T, n, rank)
    given = [x[:, :, mine] for x in (q, k, v)]
    with Held(torch.stack(blocks)) as here, torch.no_grad():
        answer.ring_attention(*given)
    return here.most


def test_memory(answer: Path, seed: int) -> None:
    """What is computed with and passed on is let go, copies too, on 8 ranks"""
    n = 8
    for rank, most in enumerate(grade(answer, held, n, seed, 48, forbid=FORBIDDEN)):
        if most > 5:  # what comes, what goes on meanwhile, and what is not yet forgotten
            told = f"it holds the keys and values of {most} other ranks at a time"
            raise Wrong(f"rank {rank} of {n}: {told}: let go of what is passed on and used")
