"""The layer of experts on links and GPUs: its arithmetic with made-up milliseconds, its ranks."""

import importlib
import json
import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from benchmarks import experts
from benchmarks.experts import LESSON, QWEN3_30B, SMALL, GroupedExperts, Row, shown
from course.lessons import ROOT
from course.ranks import run

CPU = torch.device("cpu")
LINKS = ["all-to-all inside a node", "all-to-all across nodes"]
LAYER = "layer"


def test_grouped_experts_are_the_loop_s() -> None:
    """One expert has no row."""
    torch.manual_seed(0)
    weights = [torch.randn(shape) for shape in ((3, 8, 16), (3, 8, 16), (3, 16, 8))]
    row_RD = torch.randn(7, 8)
    rows_e = torch.tensor([2, 0, 5])
    with torch.no_grad():
        grouped = GroupedExperts(*weights)(row_RD, rows_e)
        torch.testing.assert_close(grouped, LESSON.Experts(*weights)(row_RD, rows_e))


def passed_on(ranks: list[int]) -> float:
    """What comes to this rank, where some ranks pass their own numbers on."""
    rank = dist.get_rank()
    if rank not in ranks:
        return -1.0
    return experts.pass_on(torch.full((3,), float(rank)), ranks)[2].item()


def test_the_link_is_to_the_next_of_these_ranks() -> None:
    assert run(passed_on, 4, [0, 1, 2, 3]) == [3, 0, 1, 2]
    assert run(passed_on, 4, [1, 3]) == [-1, 3, -1, 1]


def links(local: int) -> list[tuple]:
    """The rows of the links, as if all-to-alls took 2 and 4 ms, and a link 1 ms."""
    ms = iter([2.0, 1.0, 4.0, 1.0] if 1 < local < 4 else [2.0, 1.0])  # all-to-all, link
    with patch.object(experts, "median_ms", lambda work: next(ms)):
        rows = experts.measure_links(SMALL, CPU, local)
    return [(row.name, row.rate, row.ratio, row.needs) for row in rows]


@pytest.mark.parametrize(
    ("local", "inside", "across"),
    [(4, 3 / 4 / 2, None), (2, 1 / 2 / 2, 1 / 2 / 4), (1, None, 3 / 4 / 2)],
)
def test_the_link_is_held_against_the_bytes_that_cross_it(
    local: int, inside: float | None, across: float | None
) -> None:
    """Of what each of four ranks hands over, a part stays: on the rank, or on its node."""
    per_ms = SMALL.tokens * SMALL.K * SMALL.D * 4 / 1e6  # GB/s of all that a rank hands over
    due = []
    needs = ("2 ranks on one node", "2 nodes")
    for name, ratio, need in zip(LINKS, (inside, across), needs, strict=True):
        rate = None if ratio is None else pytest.approx(ratio * per_ms)
        due.append((name, rate, ratio, need if ratio is None else ""))
    assert run(links, 4, local) == [due] * 4


def layer(device: torch.device, n: int) -> list[Row]:
    """The rows of the layer, as if two all-to-alls took 2 ms each, in a layer of 10 ms."""
    ms = iter([4.0, 1.0, 2.0, 3.0, 10.0])  # loop, grouped; all-to-all, a rank's experts, the layer
    with (
        patch.object(dist, "get_world_size", return_value=n),
        patch.object(experts, "median_ms", lambda work: next(ms)),
    ):
        return experts.measure_experts(QWEN3_30B, device)


@pytest.mark.parametrize(("capability", "aim"), [((9, 0), "<= 0.5"), ((8, 0), "")])
def test_the_layer_is_held_against_its_parts(capability: tuple[int, int], aim: str) -> None:
    with (
        patch.object(torch.cuda, "is_bf16_supported", return_value=True),
        patch.object(torch.cuda, "get_device_capability", return_value=capability),
    ):
        loop, grouped, part, whole = layer(torch.device("meta"), 8)
    names = ["128 experts, in a loop", "128 experts, grouped", "16 experts of a rank, grouped"]
    assert [row.name for row in (loop, grouped, part, whole)] == [*names, LAYER]
    assert (loop.ratio, grouped.ratio, part.ratio) == (None, 1 / 4, None)
    assert (grouped.aim, whole.aim) == (aim, ">= 0.3")
    assert whole.ratio == pytest.approx((2 * 2 + 3) / 10)
    flop = 4096 * 8 * 3 * 2 * 2048 * 768  # 4,096 tokens, 8 experts each, 3 products
    due = [flop / ms / 1e9 for ms in (4, 1, 3, 10)]
    assert [row.rate for row in (loop, grouped, part, whole)] == pytest.approx(due)


def test_gpus_without_bfloat16_are_told_so() -> None:
    with patch.object(torch.cuda, "is_bf16_supported", return_value=False):
        rows = layer(torch.device("meta"), 8)
    assert [row.needs for row in rows] == ["GPUs with bfloat16"] * 4


def slowest() -> float:
    """As if rank r took 2 + r ms in the middle of three rounds, after three slow ones."""
    rank = float(dist.get_rank())
    ms = iter([99, 99, 99, 1 + rank, 50, 2 + rank])
    with (
        patch.object(experts, "ROUNDS", 3),
        patch.object(experts, "on_cpu_ms", lambda work: next(ms)),
    ):
        return experts.median_ms(lambda: None)


def test_the_slowest_rank_s_median_counts() -> None:
    assert run(slowest, 3) == [4.0] * 3


def test_the_docstring_s_numbers() -> None:
    rows = QWEN3_30B.tokens * QWEN3_30B.K
    assert rows // QWEN3_30B.E == 256
    assert 5 * QWEN3_30B.E == 640  # three products, silu, gate x up
    nbytes = rows * QWEN3_30B.D * QWEN3_30B.dtype.itemsize
    assert round(nbytes / 1e6) == 134
    assert round(8 * nbytes / 3.35e12 * 1e3, 1) == 0.3


def test_aims_are_judged_on_gpus_alone() -> None:
    row = Row("128 experts, grouped", 1234.5, 1800.4, "TFLOP/s", "/ in a loop", 0.5, "<= 0.5")
    assert shown(row, on_gpus=True).split()[-4:] == ["0.50", "<=", "0.5", "kept"]
    assert shown(row, on_gpus=False).split()[-1] == "0.50"
    row.ratio = 0.51
    assert shown(row, on_gpus=True).endswith("MISSED")
    row = Row(LAYER, 1234.5, 1800.4, "TFLOP/s", "(2 x 0.311 + 0.555) / layer", 0.29, ">= 0.3")
    assert shown(row, on_gpus=True).endswith("MISSED")
    assert len(shown(row, on_gpus=True)) <= 100
    assert shown(Row(LINKS[1], needs="2 nodes"), on_gpus=True).endswith("needs 2 nodes")


def whole(folder: str) -> list[str]:
    """Measure everything, once, on a rank of two nodes."""
    suite = importlib.import_module("benchmarks.experts")
    suite.ROUNDS = 1
    rows = suite.measure(SMALL, CPU, 1, Path(folder, "run.json"))
    return [row.name for row in rows if not row.needs]


def test_everything_is_measured_on_cpu_cores(tmp_path: Path) -> None:
    names = run(whole, 2, str(tmp_path))[0]
    assert names == [LINKS[1], "16 experts, in a loop", "16 experts, grouped", *names[3:]]
    assert names[3:] == ["8 experts of a rank, grouped", LAYER]
    written = json.loads((tmp_path / "run.json").read_text())["rows"]
    assert [row["name"] for row in written] == [LINKS[0], *names]
    assert all(row["ms"] > 0 for row in written if not row["needs"])


def on_pretended_gpus() -> tuple[list[str], list]:
    """As on two nodes of two GPUs, with few tokens and small experts."""
    from tests.helpers import gpu_nccl, pretended_gpus

    n = int(os.environ["WORLD_SIZE"])
    with pretended_gpus.pretended_gpus(n, str(ROOT / "benchmarks/experts.py")):
        suite = importlib.reload(experts)
        suite.ROUNDS = 1
        device = torch.device("cuda", int(os.environ["RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        size = suite.Size(32, 32, 32, 16, 4, torch.bfloat16)
        rows = suite.measure(size, device, n // 2, None)
        dist.destroy_process_group()
    return [row.name for row in rows if not row.needs], gpu_nccl.notes


@pytest.mark.deep
def test_ranks_measure_on_pretended_gpus() -> None:
    from tests.helpers import gpu_nccl

    found = run(on_pretended_gpus, 4, group=False)
    names = ["16 experts, in a loop", "16 experts, grouped", "4 experts of a rank, grouped", LAYER]
    assert [name for name, _ in found] == [[*LINKS, *names]] * 4
    assert not gpu_nccl.what_would_hang([notes for _, notes in found])
