"""Grader of 09: shards, one process's gradients, what is whole when, bytes on each axis."""

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from course.grading import Wrong, expect, grade, same

D = 12
HIDDEN = [24, 48, 12]  # rows that 1, 2, 3 and 4 ranks share evenly
SHAPES = [(2, 2), (1, 3), (2, 1)]  # (nodes, ranks per node)
# Float64, numbers below 10: sums of up to 48 terms, there and back through 9 layers, and over 4
# ranks, in another order than one process's.
ATOL = 2 * 9 * 48 * 10 * 2**-53


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(D, hidden)
        self.down = nn.Linear(hidden, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Takes down, in the middle of every block, forward and backward, how many bytes of parameters
    are whole. Outside of them are tied weights, and a buffer."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(D, D)
        self.again = nn.Linear(D, D, bias=False)
        self.again.weight = self.first.weight
        self.register_buffer("shift", torch.randn(D))
        self.last = nn.Linear(D, 2 * D)
        self.blocks = nn.ModuleList(Block(hidden) for hidden in HIDDEN)
        self.to(dtype)
        self.whole: list[int] = []
        for block in self.blocks:
            block.down.register_forward_pre_hook(self.look)
            block.down.register_forward_hook(self.look_backward)

    def look_backward(self, module: nn.Module, given: object, y: torch.Tensor) -> None:
        y.register_hook(self.look)

    def look(self, *_: object) -> None:
        self.whole.append(sum(p.nbytes for p in self.parameters() if not isinstance(p, DTensor)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.again(self.first(x)) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


def batch(seed: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return torch.randn(3, D, generator=generator, dtype=torch.float64) + rank


def sizes(dtype: torch.dtype = torch.float64) -> tuple[int, int, list[int]]:
    """Bytes: of all parameters, of those outside the blocks, of each block."""
    model = Model(0, dtype)
    blocks = [sum(p.nbytes for p in block.parameters()) for block in model.blocks]
    total = sum(p.nbytes for p in model.parameters())
    return total, total - sum(blocks), blocks


def local(p: torch.Tensor | None) -> tuple | None:
    """What this rank holds, and how: (tensor, the mesh's ranks, placements)."""
    if isinstance(p, DTensor):
        return p.to_local().detach().clone(), p.device_mesh.mesh.tolist(), str(p.placements)
    return None if p is None else (p.detach().clone(), None, "")


def build(answer, wire, seed: int, per_node: int) -> dict[str, tuple]:
    """Of each parameter, what this rank holds."""
    model = answer.hybrid(Model(seed), per_node)
    if not isinstance(model, nn.Module):
        raise Wrong(f"hybrid: expected a module, got {model!r}")
    return {name.removeprefix("module."): local(p) for name, p in model.named_parameters()}


def step(answer, wire, seed: int, per_node: int, predicts: bool = False) -> tuple:
    """One step; returns gradients, what was whole when, what was sent, and what was predicted."""
    model = Model(seed)
    nodes = dist.get_world_size() // per_node
    predicted = answer.predict(model, nodes, per_node) if predicts else None
    sharded = answer.hybrid(model, per_node)
    before = len(wire.events)
    sharded(batch(seed, dist.get_rank())).backward()
    grads = {name.removeprefix("module."): local(p.grad) for name, p in sharded.named_parameters()}
    return grads, model.whole, wire.calls()[before:], predicted


@pytest.mark.parametrize(("nodes", "per_node"), SHAPES)
def test_shards(answer: Path, seed: int, nodes: int, per_node: int) -> None:
    """Who holds which shard, {nodes} node(s) of {per_node}"""
    whole = dict(Model(seed).named_parameters())
    got = grade(answer, build, nodes * per_node, seed, per_node)
    check_shards(got, {name: p.detach() for name, p in whole.items()}, per_node, "")


def check_shards(got: list[dict], whole: dict, per_node: int, of: str, atol: float = 0.0) -> None:
    """Every rank holds the rows that belong to its place in its node."""
    for rank, mine in enumerate(got):
        expect(sorted(mine), sorted(whole), f"rank {rank}: names of the parameters")
        for name, due in whole.items():
            what = f"rank {rank}: {of}{name}"
            if mine[name] is None:
                raise Wrong(f"{what}: expected a tensor, got None")
            shard, mesh, placements = mine[name]
            if all(m is not None and m[1] is None for m in mine.values()):
                raise Wrong(
                    f"rank {rank}: nothing is sharded: every rank holds every parameter whole"
                )
            if mesh is None:
                raise Wrong(f"{what} is no DTensor: it is in no unit, every rank holds it whole")
            what += f" (over mesh {mesh}, {placements})"
            expect(shard.nbytes, due.nbytes // per_node, f"{what}: bytes of the shard")
            place = rank % per_node
            chunks = due.chunk(per_node)
            for other, chunk in enumerate(chunks):
                if other != place and shard.shape == chunk.shape and shard.equal(chunk):
                    told = f"part {other} of {per_node}, which belongs to another rank of the node"
                    raise Wrong(f"{what}: expected part {place}, got {told}")
            nodes = len(mesh)
            if atol and nodes > 1 and alike(shard, nodes * chunks[place]):
                told = f"{nodes} times what is due: the sum over nodes, not the mean"
                raise Wrong(f"{what}: {told}")
            same(shard, chunks[place], what, atol)


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (1, 3)])
def test_gradients(answer: Path, seed: int, nodes: int, per_node: int) -> None:
    """One process's gradients, {nodes} node(s) of {per_node}"""
    n = nodes * per_node
    model = Model(seed)
    sum(model(batch(seed, rank)) / n for rank in range(n)).backward()
    due = {name: p.grad for name, p in model.named_parameters()}
    got = [grads for grads, *_ in grade(answer, step, n, seed, per_node)]
    check_shards(got, due, per_node, "gradient of ", ATOL)


def test_memory(answer: Path, seed: int) -> None:
    """One block is whole at a time, 1 node of 2"""
    total, outside, blocks = sizes()
    for rank, (_, whole, *_) in enumerate(grade(answer, step, 2, seed, 2)):
        turns = [*enumerate(blocks), *reversed([*enumerate(blocks)])]
        for turn, ((k, block), bytes_whole) in enumerate(zip(turns, whole, strict=True)):
            if bytes_whole > outside + block:
                way = " backward" if turn >= len(blocks) else ""
                works = f"block {k} works{way}"
                told = f"rank {rank}: bytes of parameters that are whole while {works}"
                every = " (all there are)" if bytes_whole == total else ""
                raise Wrong(f"{told}: expected {outside + block:,}, got {bytes_whole:,}{every}")


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (1, 3), (2, 1)])
def test_bytes(answer: Path, seed: int, nodes: int, per_node: int) -> None:
    """Collectives inside and across, {nodes} node(s) of {per_node}"""
    _, outside, blocks = sizes()
    scattered = [*blocks, outside]
    due = {
        "all_gather": (scattered + blocks) * (per_node > 1),  # forward, then backward
        "reduce_scatter": scattered * (per_node > 1),
        "all_reduce": [size // per_node for size in scattered] * (nodes > 1),
    }
    got = grade(answer, step, nodes * per_node, seed, per_node)
    for rank, (_, _, calls, _) in enumerate(got):
        inside, across = groups(rank, nodes, per_node)
        calls = [e for e in calls if len(e.ranks) > 1]  # alone there is nothing to send
        for e in calls:
            way = across if e.op == "all_reduce" else inside
            expect(e.ranks, way, f"rank {rank}: ranks among which an {e.op} goes")
        for op, each in due.items():
            mine = [e.nbytes for e in calls if e.op == op]
            expect(len(mine), len(each), f"rank {rank}: {op}s")
            expect(sorted(mine), sorted(each), f"rank {rank}: bytes in each {op}")


def alike(got: torch.Tensor, wrong: torch.Tensor) -> bool:
    return got.shape == wrong.shape and got.dtype == wrong.dtype and torch.allclose(got, wrong)


def groups(rank: int, nodes: int, per_node: int) -> tuple[tuple, tuple]:
    """The ranks of its node; the ranks with its place in every node."""
    place = rank % per_node
    across = range(place, nodes * per_node, per_node)
    return tuple(range(rank - place, rank - place + per_node)), tuple(across)


def test_counted(answer: Path, seed: int) -> None:
    """Bytes predicted, as counted on 2 nodes of 2"""
    for rank, (_, _, calls, predicted) in enumerate(grade(answer, step, 4, seed, 2, True)):
        sent = dict.fromkeys(groups(rank, 2, 2), 0)
        for e in calls:
            sent[e.ranks] += e.nbytes // 2 * (2 if e.op == "all_reduce" else 1)  # (n - 1)/n = 1/2
        told = f"rank {rank}: bytes sent (inside, across)"
        check_predicted(predicted, tuple(sent.values()), torch.float64, 2, 2, told)


def ring(total: int, blocks: int, nodes: int, per_node: int) -> tuple[int, int]:
    inside = (2 * total + blocks) * (per_node - 1) // per_node
    return inside, 2 * (total // per_node) * (nodes - 1) // nodes


def check_predicted(
    got: object, due: tuple, dtype: torch.dtype, nodes: int, per_node: int, told: str
) -> None:
    """Known mistakes are called by their names."""
    model = Model(0, dtype)
    total, _, blocks = sizes(dtype)
    tied = model.first.weight.nbytes
    more = {
        "buffers": model.shift.nbytes,
        "tied weights twice": tied,
        "buffers, and tied weights twice": model.shift.nbytes + tied,
    }
    for what, nbytes in more.items():
        if got != due and got == ring(total + nbytes, sum(blocks), nodes, per_node):
            told += f", {what} counted"
    if got != due and got == (due[0], 2 * (nodes - 1) * (total // per_node // nodes)):
        told += ", across rounded down before it is multiplied"
    expect(got, due, told)


def tied_blocks() -> Model:
    """Two of its blocks share a parameter."""
    model = Model(0)
    model.blocks[1].down.bias = model.blocks[0].down.bias
    return model


def ask_of_tied_blocks(answer, wire) -> tuple:
    return answer.predict(tied_blocks(), 2, 2)


def ask(answer, wire, cases: list[tuple]) -> list:
    return [answer.predict(Model(0, dtype), *shape) for dtype, *shape in cases]


def test_predict(answer: Path) -> None:
    """Bytes predicted, for clusters that are not here, in float64 and bfloat16"""
    shapes = [(8, 4), (128, 12), (1, 1), (1, 6), (4, 1)]
    cases = list(itertools.product((torch.float64, torch.bfloat16), shapes))
    flat = [(dtype, *shape) for dtype, shape in cases]
    (answers,) = grade(answer, ask, 1, flat)
    for (dtype, nodes, per_node), got in zip(flat, answers, strict=True):
        total, _, blocks = sizes(dtype)
        due = ring(total, sum(blocks), nodes, per_node)
        told = f"{str(dtype)[6:]}, {nodes} node(s) of {per_node}: bytes sent (inside, across)"
        check_predicted(got, due, dtype, nodes, per_node, told)


def test_tied_blocks(answer: Path) -> None:
    """A parameter of two blocks travels once"""
    (got,) = grade(answer, ask_of_tied_blocks, 1)
    model = tied_blocks()
    total, blocks = (sum(p.nbytes for p in m.parameters()) for m in (model, model.blocks))
    due = ring(total, blocks, 2, 2)
    expect(got, due, "two blocks share a bias: bytes sent (inside, across)")


def with_its_own() -> Model:
    """A parameter lies in the model itself, in none of its modules."""
    model = Model(0)
    model.scale = nn.Parameter(torch.ones(4 * D, dtype=torch.float64))
    return model


def ask_of_its_own(answer, wire) -> tuple:
    return answer.predict(with_its_own(), 2, 2)


def test_parameter_of_the_model(answer: Path) -> None:
    """What the model itself holds travels too"""
    (got,) = grade(answer, ask_of_its_own, 1)
    model = with_its_own()
    total, blocks = (sum(p.nbytes for p in m.parameters()) for m in (model, model.blocks))
    told = "a parameter lies in the model itself: bytes sent (inside, across)"
    expect(got, ring(total, blocks, 2, 2), told)
