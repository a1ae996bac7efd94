"""Grader of 19: saved by 1 to 4 ranks or cut anywhere, loaded on 1 to 4; reads are counted."""

import itertools
import json
import os
import random
import shutil
import tempfile
import tracemalloc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from course.grading import Largest, Wrong, expect, grade, same

SHAPES = {  # rows that divide by no, by some, by all numbers of ranks; fewer rows than ranks, none
    "token.weight": [10, 6],
    "head.weight": [12, 3, 2],
    "norm.bias": [7],
    "position.weight": [3, 5],
    "one.weight": [1, 4],
    "step": [],
    "none.weight": [0, 3],
}
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.float16, torch.uint8, torch.float64]
DTYPES += [torch.int32]  # as many as tensors: each is there in every checkpoint


def tensors_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for at, (name, shape) in enumerate(SHAPES.items()):
        x = torch.randint(1, 100, shape, generator=generator)  # no zeros, and exact in each dtype
        made[name] = x.to(DTYPES[(at + seed) % len(DTYPES)])
    return made


def even_cuts(rows: int, world: int) -> list[int]:
    chunk = -(-rows // world)
    return [min(rows, rank * chunk) for rank in range(world + 1)]


def odd_cuts(rows: int, world: int, dice: random.Random) -> list[int]:
    """Anywhere, as another program may cut."""
    return [0, *sorted(dice.choices(range(rows + 1), k=world - 1)), rows]


def write(tensors: dict, world: int, dice: random.Random, odd: bool = False) -> Path:
    """A checkpoint of so many ranks, in a folder of this rank's own. An odd one has twice as many
    shards as files, each in any file."""
    folder = Path(tempfile.mkdtemp(dir=os.environ.get("TMPDIR", "/tmp")))
    metadata = {}
    files = [bytearray(dice.randbytes(dice.randrange(64))) for _ in range(world)]  # a header
    for name, x in tensors.items():
        rows = x if x.dim() else x[None]
        cuts = odd_cuts(len(rows), 2 * world, dice) if odd else even_cuts(len(rows), world)
        shards = []
        for at, (start, stop) in enumerate(itertools.pairwise(cuts)):
            rank = dice.randrange(world) if odd else at
            if start < stop:
                place = {"file": f"rank-{rank}.bin", "offset": len(files[rank])}
                shards.append(place | {"start": start, "stop": stop})
                files[rank] += rows[start:stop].contiguous().view(torch.uint8).numpy().tobytes()
        if odd:
            dice.shuffle(shards)
        about = {"dtype": str(x.dtype)[6:], "shape": list(x.shape), "shards": shards}
        metadata[name] = about
    for rank, data in enumerate(files):
        data += dice.randbytes(2048)  # so that a wrong place is told by its values
        (folder / f"rank-{rank}.bin").write_bytes(data)
    (folder / "metadata.json").write_text(json.dumps(metadata))
    return folder


def due_of(x: torch.Tensor) -> torch.Tensor:
    """This rank's rows; of a scalar, all."""
    if not x.dim():
        return x
    cuts = even_cuts(len(x), dist.get_world_size())
    start, stop = cuts[dist.get_rank() :][:2]
    return x[start:stop]


def check_loaded(answer, folder: Path, tensors: dict, where: str) -> None:
    got = answer.load(folder)
    expect(sorted(got), sorted(tensors), f"{where}: names of what is loaded")
    for name, x in tensors.items():
        due = due_of(x)
        what = f"{where}: rows of {name} {list(x.shape)} on rank {dist.get_rank()}"
        same(got[name], due, what)


def cut(answer, wire) -> None:
    for rows in range(21):
        for world in range(1, 9):
            cuts = even_cuts(rows, world)
            for rank in range(world):
                due = (cuts[rank], cuts[rank + 1])
                what = f"own_rows({rows}, {world}, {rank})"
                expect(tuple(answer.own_rows(rows, world, rank)), due, what)


def test_rows(answer: Path) -> None:
    """Rows are cut where fully_shard cuts them"""
    grade(answer, cut, 1)


def resharded(answer, wire, seed: int, odd: bool) -> None:
    dice = random.Random(f"{seed} {dist.get_rank()}")
    for world in (1, 2, 3, 4):
        tensors = tensors_of(seed + world)
        folder = write(tensors, world, dice, odd)
        how = "cut anywhere into" if odd else "saved by"
        check_loaded(answer, folder, tensors, f"{how} {world}, loaded on {dist.get_world_size()}")
        shutil.rmtree(folder)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_values(answer: Path, seed: int, n: int) -> None:
    """Saved by 1 to 4 ranks, loaded on {n}"""
    grade(answer, resharded, n, seed, False)


@pytest.mark.parametrize("n", [1, 3])
def test_cut_anywhere(answer: Path, seed: int, n: int) -> None:
    """Shards of any size in any order, loaded on {n}"""
    grade(answer, resharded, n, seed, True)


def counted(answer, wire, seed: int) -> list[tuple]:
    """(ranks that saved, bytes and reads, bytes and reads that are due) of this rank."""
    dice = random.Random(seed)
    told = []
    for world in (1, 2, 3, 4):
        tensors = tensors_of(seed + world)
        folder = write(tensors, world, dice)
        log = []
        real = answer.read_at

        def read_at(path, offset, nbytes, log=log, real=real):
            log.append(nbytes)
            return real(path, offset, nbytes)

        answer.read_at = read_at
        answer.load(folder)
        answer.read_at = real
        nbytes = reads = 0
        for x in tensors.values():
            due = due_of(x)
            nbytes += due.nbytes
            reads += overlapping(x, world)
        told.append((world, sum(log), len(log), nbytes, reads))
        shutil.rmtree(folder)
    if calls := wire.calls():
        raise Wrong(f"it calls {calls[0].op}: each rank reads for itself, and talks to nobody")
    return told


def overlapping(x: torch.Tensor, world: int) -> int:
    """How many old shards hold rows of this rank's."""
    if not x.dim():
        return 1
    cuts = even_cuts(len(x), dist.get_world_size())
    start, stop = cuts[dist.get_rank() :][:2]
    old = even_cuts(len(x), world)
    return sum(max(start, old[r]) < min(stop, old[r + 1]) for r in range(world))


@pytest.mark.parametrize("n", [1, 3, 4])
def test_cost(answer: Path, seed: int, n: int) -> None:
    """A rank reads the bytes of its own rows, and talks to nobody, on {n} ranks"""
    for rank, told in enumerate(grade(answer, counted, n, seed)):
        for world, nbytes, reads, due, due_reads in told:
            where = f"saved by {world}, loaded on {n}, rank {rank}"
            expect(nbytes, due, f"{where}: bytes that read_at has read")
            if reads > due_reads:
                raise Wrong(f"{where}: {reads} calls of read_at, where {due_reads} will do")


def held(answer, wire) -> tuple[int, int]:
    """Bytes of a tensor, and the most that Python holds at a time, or one tensor of torch's."""
    x = torch.arange(64 * 4096).view(64, 4096)
    folder = write({"large.weight": x}, 2, random.Random(0))
    tracemalloc.start()
    with Largest() as largest:
        mine = answer.load(folder)["large.weight"]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    shutil.rmtree(folder)
    same(mine, due_of(x), "rows of large.weight")
    return x.nbytes, max(most, largest.nbytes)


def test_memory(answer: Path) -> None:
    """No rank of 4 holds as many bytes as a whole tensor has"""
    for rank, (whole, most) in enumerate(grade(answer, held, 4)):
        if most >= whole:
            told = f"holds {most:,} bytes at a time to return {whole // 4:,}"
            raise Wrong(f"rank {rank}: {told}; the whole tensor has {whole:,}")


def with_a_gap(answer, wire, seed: int) -> None:
    """What load says when one shard of a tensor is listed nowhere.

    It was saved by 2 and is loaded by 3: rank 1 misses some of its rows, rank 0 or 2 all. Or it was
    saved by 10: rank 1 has rows 4 to 7, and misses one between others.
    """
    rank = dist.get_rank()
    dice = random.Random(seed)
    tensors = tensors_of(seed)
    for name, world, at, missing in (
        ("token.weight", 2, 1, {1, 2}),
        ("token.weight", 2, 0, {0, 1}),
        ("token.weight", 10, 5, {1}),
        ("step", 2, 0, {0, 1, 2}),
    ):
        folder = write(tensors, world, dice)
        metadata = json.loads((folder / "metadata.json").read_text())
        metadata[name]["shards"].pop(at)
        (folder / "metadata.json").write_text(json.dumps(metadata))
        said = ""
        try:
            answer.load(folder)
        except ValueError as error:
            said = str(error) or "nothing"
        shutil.rmtree(folder)
        if rank in missing and not said:
            raise Wrong(f"rows of {name} lie in no shard, and load says nothing")
        if rank in missing and name not in said:
            raise Wrong(f"rows of {name} lie in no shard, and the error does not name it: {said}")
        if said and rank not in missing:
            raise Wrong(f"all of this rank's rows are there, and load raises: {said}")


def test_gap(answer: Path, seed: int) -> None:
    """A row that lies nowhere is not loaded as zeros"""
    grade(answer, with_a_gap, 3, seed)
