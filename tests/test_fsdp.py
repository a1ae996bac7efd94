"""FSDP2's lessons: what they count is real, and each claim FAILs when the line it guards breaks."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from exercises.ranks import run
from tests.lessons import load, play

BASICS, REFINEMENTS = "fsdp/01_fsdp_basics.py", "fsdp/03_fsdp_refinements.py"
LEARNED = "mean of the last 10 losses, against the entropy"


def counted(path: str) -> list[tuple]:
    """What Wire saw of one call each of known size, and of a call over half the ranks."""
    lesson, x = load(path), torch.ones(4 * dist.get_world_size())
    pair = dist.new_group([0, 1])
    with lesson.Wire() as wire:
        dist.all_reduce(x)
        dist.all_gather_into_tensor(torch.empty(len(x) * dist.get_world_size()), x)
        dist.reduce_scatter_tensor(torch.empty(4), x)
        dist.all_gather_into_tensor(torch.empty(6, dtype=torch.bfloat16), torch.ones(3).bfloat16())
        if dist.get_rank() < 2:
            dist.all_reduce(x, group=pair)
        dist.barrier()
    return [row[:3] for row in wire.log]


@pytest.mark.parametrize("path", [BASICS, REFINEMENTS])
def test_wire_counts_what_textbook_algorithms_send(path: str) -> None:
    assert run(counted, 2, path)[0] == [
        ("allreduce_", 8, 32),  # 2 (n-1)/n of 8 numbers
        ("_allgather_base_", 8, 32),  # (n-1)/n of 16
        ("_reduce_scatter_base_", 4, 16),  # (n-1)/n of 8
        ("_allgather_base_", 3, 6),  # of 6 numbers of 2 bytes
        ("allreduce_", 8, 32),
    ]


def shares(path: str) -> tuple[int, list[int], float]:
    lesson = load(path)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole, model = lesson.gpt(mesh), lesson.sharded(lesson.gpt(mesh), mesh)
    rows = [p.to_local().shape[0] for p in model.parameters()]
    return lesson.numbers(whole), rows, lesson.gap_to(whole, model)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_shards_are_chunks_of_rows_and_lose_nothing(n: int) -> None:
    ranks = run(shares, n, BASICS)
    whole = [p.shape[0] for p in load(BASICS).GPT().parameters()]
    for i, rows in enumerate(whole):
        held = [rank[1][i] for rank in ranks]
        assert sum(held) == rows
        assert max(held) == -(-rows // n)
        assert sorted(held, reverse=True) == held
    assert [rank[2] for rank in ranks] == [0.0] * n


@pytest.mark.parametrize(("rows", "n"), [(1, 4), (7, 3), (8, 4), (9, 8)])
def test_gathered_rows_are_whole_chunks(rows: int, n: int) -> None:
    chunk = len(torch.arange(rows).chunk(n)[0])
    assert load(BASICS).gathered(rows, n) == chunk * n


BREAKS = {
    "every rank trains on rank 0's data": (
        BASICS,
        ("(model, batch(mesh, RANK)):", "(model, batch(mesh, 0)):"),
        {"weights after 3 steps, distance from one process"},
    ),
    "inner units are forgotten": (
        BASICS,
        ("            fully_shard(module, mesh=mesh, **how)\n", "            pass\n"),
        {
            f"{units}: {what}"
            for units in ("blocks", "linears")
            for what in (
                "all-gathers, 2U + 1",
                "reduce-scatters, U + 1",
                "numbers sent",
                "most ever whole, the rest + one unit",
            )
        }
        | {
            "reshard_after_forward=True: all-gathers",
            "reshard_after_forward=False: all-gathers",
        },
    ),
    "whole tensors are counted as sent": (
        BASICS,
        ("* (group.size() - 1) // group.size()", ""),
        {f"{units}: numbers sent" for units in ("model", "blocks", "linears")},
    ),
    "it frees although told to keep": (
        BASICS,
        ("reshard_after_forward=free", "reshard_after_forward=True"),
        {
            "reshard_after_forward=False: all-gathers",
            "reshard_after_forward=False: whole after forward",
        },
    ),
    "nothing is fetched ahead": (
        REFINEMENTS,
        ("block.set_modules_to_forward_prefetch([following])", "pass"),
        {"with prefetch: blocks asked for as block 0 starts"},
    ),
    "gathers stay in float32": (
        REFINEMENTS,
        ("param_dtype=torch.bfloat16,", "param_dtype=torch.float32,"),
        {"allgather_base: bytes a number", "bytes of an activation"},
    ),
    "gradients are summed in bfloat16": (
        REFINEMENTS,
        ("reduce_dtype=torch.float32", "reduce_dtype=torch.bfloat16"),
        {"reduce_scatter_base: bytes a number"},
    ),
    "every micro-batch synchronises": (
        REFINEMENTS,
        ("model.set_requires_gradient_sync(i == micro - 1)", "pass"),
        {"3 micro-batches: reduce-scatters"},
    ),
    "micro-batches are summed, not averaged": (
        REFINEMENTS,
        ("(model(x_BT) / micro).backward()", "model(x_BT).backward()"),
        {
            "norm before clipping, of one process's",
            "clipped gradients, distance from one process",  # 1e-6 in the divisor of the clip
        },
    ),
    "the norm is one rank's": (
        REFINEMENTS,
        (
            "parts.full_tensor() / whole",
            "nn.utils.get_total_norm([p.grad.to_local() for p in model.parameters()]) / whole",
        ),
        {"norm before clipping, of one process's"},
    ),
    "nobody fills the model born on meta": (
        REFINEMENTS,
        ("    set_model_state_dict(model, full, options=options)\n", ""),
        {"the cure: distance from rank 0's weights"},
    ),
    "seeds differ": (
        REFINEMENTS,
        ("    torch.manual_seed(0)\n    up", "    torch.manual_seed(RANK)\n    up"),
        {"the trap: shards that equal rank 0's"},
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_makes_its_claim_fail(name: str) -> None:
    path, change, expected = BREAKS[name]
    argv = ("--steps", "1") if path == BASICS else ()
    played = play(path, 2, change, argv=argv)
    assert played.code == 1, played.code
    assert played.failed - {LEARNED} == expected


def test_a_model_that_does_not_learn_fails() -> None:
    change = ("lr=3e-3", "lr=0.0")
    played = play(BASICS, 2, change, argv=("--steps", "10"))
    assert played.failed == {LEARNED}


def test_own_text_and_its_entropy(tmp_path) -> None:
    path = tmp_path / "two.txt"
    path.write_text("ab" * 5000)  # entropy ln 2, and wholly predictable
    played = play(BASICS, 2, argv=("--steps", "40", "--data", str(path)))
    row = next(row for row in played.ledger if row["claim"] == LEARNED)
    assert row["predicted"] == pytest.approx(0.693147, abs=1e-6)
    assert row["verdict"] == "PASS"
