"""The suite for a new cluster: who is warned of, what is compared, and a rank that is throttled."""

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from benchmarks import cluster
from benchmarks.cluster import Measurement, compare, row_of
from course.ranks import attempt, run

PRODUCT = Measurement("product", "TFLOP/s", 2.0, lambda: None, look="its clock")
LATENCY = Measurement("all_reduce, 1 MiB", "us", None, lambda: None, "joint")


def warned(seconds: list[list[float]], measurement: Measurement = PRODUCT) -> list[str]:
    return row_of(measurement, seconds, 0.1).warnings


def test_peers_within_the_tolerance_are_not_warned_of() -> None:
    assert warned([[1.0, 1.05], [1.09, 1.2], [1.02, 1.0]]) == []


def test_a_rank_whose_best_is_slower_is_named() -> None:
    assert warned([[1.0], [2.0], [1.0], [1.02]]) == ["rank 1: 1 at best, its peers 1.98"]
    assert warned([[1.0], [2.0]]) == ["rank 1: 1 at best, its peers 1.5"]


def test_rounds_that_were_disturbed_warn_of_nobody() -> None:
    assert warned([[1.0, 1.0, 1.0], [1.0, 9.0, 9.0], [9.0, 1.0, 9.0]]) == []


def test_where_all_must_meet_nobody_is_compared_with_its_peers() -> None:
    row = row_of(LATENCY, [[1e-3], [3e-3]], 0.1)
    assert (row.value, row.warnings) == (pytest.approx(3000), [])


def test_all_are_warned_of_when_the_datasheet_is_far() -> None:
    sheet = Measurement("product", "TFLOP/s", 2.0, lambda: None, expected=1.5)
    assert warned([[1.0], [1.0]], sheet) == []
    assert warned([[2.0], [2.0]], sheet) == ["all: 1, expected 1.5 by the datasheet"]


def test_what_a_datasheet_lets_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "NVIDIA H100 80GB HBM3": (989, 450),
        "NVIDIA H200": (989, 450),
        "NVIDIA H200 NVL": (835, 450),
        "NVIDIA B300 SXM6 AC": (2250, 900),
        "NVIDIA A100-SXM4-40GB": (312, 300),
        "NVIDIA L40S": (362, None),
        "NVIDIA L4": (121, None),
        "NVIDIA L40": (None, None),  # another GPU than an L4, or an L40S
        "Tesla T4": (65, None),
        "Tesla V100-SXM2-16GB": (125, 150),
        "Tesla V100-PCIE-32GB": (112, None),
        "NVIDIA GeForce RTX 4090": (None, None),
    }
    for name, (tflops, nvlink) in names.items():
        monkeypatch.setattr("torch.cuda.get_device_name", lambda device, name=name: name)
        for what, figure in (("tflops", tflops), ("nvlink", nvlink)):
            least = figure and 0.7 * figure
            assert cluster.expected(torch.device("cuda"), what) == least, name
    assert cluster.expected(torch.device("cpu"), "tflops") is None


def test_gpus_before_ampere_multiply_in_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    for native, dtype in ((True, torch.bfloat16), (False, torch.float16)):
        supported = {True: True, False: native}.__getitem__  # by emulation, all have bfloat16
        monkeypatch.setattr("torch.cuda.is_bf16_supported", supported)
        assert cluster.half_precision() == dtype


def test_two_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    about = {"ranks": 2, "nodes": 1, "device": "CPU cores", "torch": "2.15", "date": "2026-11-23"}
    runs = {
        "old": [("memory", "GB/s", 10), ("all_reduce", "us", 100), ("gone", "us", 1)],
        "new": [("memory", "GB/s", 9.5), ("all_reduce", "us", 120), ("more", "GB/s", 1)],
    }
    files = [tmp_path / name for name in runs]
    for file, rows in zip(files, runs.values(), strict=True):
        rows = [{"name": name, "unit": unit, "value": value} for name, unit, value in rows]
        file.write_text(json.dumps({"about": about | {"torch": file.name}, "rows": rows}))
    assert compare(*files, 0.1) == 1
    said = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert said["torch differ: old and new"]
    assert said["memory"].endswith("0.95 ")
    assert said["all_reduce"].endswith("0.83 SLOWER")
    assert said["more"].endswith("new")
    assert "gone".ljust(44) + " not measured any more" in said.values()
    assert compare(files[0], files[0], 0.1) == 0
    assert "SLOWER" not in capsys.readouterr().out


def whole(folder: str) -> tuple[list[str], list[int]]:
    """Measure everything, once, on a rank."""
    suite = importlib.import_module("benchmarks.cluster")
    suite.ROUNDS = 1
    files = argparse.Namespace(
        folder=None, tolerance=0.99, json=Path(folder, "run.json"), figure=f"{folder}/run.png"
    )
    rows = suite.run(files)
    return [row.name for row in rows], [len(row.medians) for row in rows]


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [1, 3])
def test_everything_is_measured_on_every_rank(ranks: int, tmp_path: Path) -> None:
    names, counts = run(whole, ranks, str(tmp_path), deadline=120)[0]
    assert set(counts) == {ranks}
    assert len(names) == len(set(names)) == (17 if ranks > 1 else 16)  # one has no link to a next
    written = json.loads((tmp_path / "run.json").read_text())
    assert [row["name"] for row in written["rows"]] == names
    assert all(row["value"] > 0 for row in written["rows"] if "bus" not in row["name"] or ranks > 1)
    assert (tmp_path / "run.png").stat().st_size > 1000


def sums_where_one_is_wrong() -> bool:
    suite = importlib.import_module("benchmarks.cluster")
    right = dist.all_reduce

    def wrong(x: torch.Tensor) -> None:
        right(x)
        if dist.get_rank() == 1:
            x[77_777] += 1

    assert suite.sums_are_right(torch.device("cpu"))
    with patch("torch.distributed.all_reduce", wrong):
        return suite.sums_are_right(torch.device("cpu"))


@pytest.mark.deep
def test_one_wrong_element_of_a_sum_is_noticed_by_all() -> None:
    assert run(sums_where_one_is_wrong, 3) == [False] * 3


BUSY = "import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"


def throttled(slow: int | None) -> list[str]:
    """The warnings of a product of matrices, while others share one rank's core."""
    suite = importlib.import_module("benchmarks.cluster")
    if dist.get_rank() == slow:
        core = min(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {core})
        for _ in range(3):
            subprocess.Popen([sys.executable, "-c", BUSY.format(core=core)])
    product = suite.own_measurements(torch.device("cpu"), Path())[0]
    seconds = [None] * dist.get_world_size()
    dist.all_gather_object(seconds, suite.seconds_of(product, torch.device("cpu")))
    return suite.row_of(product, seconds, 0.3).warnings


@pytest.mark.clock
@pytest.mark.deep
@pytest.mark.skipif(sys.platform != "linux", reason="pins processes to a core")
def test_a_rank_that_is_throttled_is_found_and_no_other() -> None:
    (warning,) = run(throttled, 3, 1)[0]
    assert warning.startswith("rank 1: ")
    assert run(throttled, 3, None)[0] == []


def test_a_link_is_measured_by_its_sender_and_by_every_rank_once() -> None:
    outcomes = attempt(links, 3)
    assert [outcome.value for outcome in outcomes] == [(1, 1)] * 3, outcomes


@pytest.mark.parametrize(("nodes", "local"), [(2, 8), (3, 2), (4, 1), (5, 4)])
@pytest.mark.parametrize("alone", [False, True])
def test_rails_cross_between_nodes_each_once_and_in_both_directions(
    nodes: int, local: int, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = nodes * local
    monkeypatch.setattr(cluster, "WORLD_SIZE", n)
    turns = cluster.Link(torch.zeros(1), local, alone).turns()
    assert sorted(rank for senders in turns for rank in senders) == list(range(n))
    for senders in turns:
        receivers = {(rank + local) % n for rank in senders}
        assert len(receivers) == len(senders)
        assert not receivers & set(senders)  # nobody sends and receives
        for rank in senders:
            assert rank // local != (rank + local) % n // local  # it leaves its node
        if alone:
            assert len({rank % local for rank in senders}) == 1
    if (nodes, local, alone) == (2, 8, False):
        assert turns == [list(range(8)), list(range(8, 16))]


def test_a_bad_network_card_is_found_on_its_rail_and_not_on_the_links_to_next_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two nodes of eight ranks, each with a card of its own; that of rank 11 is slow."""
    n, local, bad = 16, 8, 11
    monkeypatch.setattr(cluster, "WORLD_SIZE", n)
    monkeypatch.setattr(cluster, "LOCAL_WORLD_SIZE", local)
    monkeypatch.setitem(cluster.__dict__, "COLLECTIVES", {})
    monkeypatch.setattr(cluster, "Step", lambda wrap, device: argparse.Namespace(tokens_BT=TOKENS))
    found = {}
    for measurement in cluster.joint_measurements(torch.device("cpu")):
        if measurement.kind != "link":
            continue
        took = []
        for rank in range(n):
            ends = (rank, (rank + measurement.call.step) % n)
            crosses = ends[0] // local != ends[1] // local
            took.append([4.0 if crosses and bad in ends else 1.0])
        found[measurement.name] = [int(w.split()[1][:-1]) for w in warned(took, measurement)]
    assert found == {
        "link to the next rank": [],
        "rails to the next node, all at once": [3, 11],
        "rails to the next node, one by one": [3, 11],
    }


TOKENS = torch.zeros(1, 2)


def test_rails_are_measured_between_two_nodes_of_two_ranks() -> None:
    outcomes = attempt(rails, 4)
    assert [outcome.value for outcome in outcomes] == [True] * 4, outcomes


def rails() -> bool:
    """Whether what arrives comes from the same rank of the other node, in either way."""
    suite = importlib.import_module("benchmarks.cluster")
    suite.LOCAL_WORLD_SIZE = 2
    right = []
    for alone in (False, True):
        link = suite.Link(torch.full((4,), float(dist.get_rank())), 2, alone)
        assert suite.over_the_link(link, torch.device("cpu")) > 0
        # node 1 gets node 0's numbers, and sends them back
        right.append(link.x.tolist() == [float(dist.get_rank() % 2)] * 4)
    return all(right)


def links() -> tuple[int, int]:
    """How often this rank sends, and answers, in a round."""
    suite = importlib.import_module("benchmarks.cluster")
    link = suite.Link(torch.zeros(4))
    calls = []
    with (
        patch.object(suite.Link, "__call__", lambda self: calls.append("sends")),
        patch.object(suite.Link, "answer", lambda self: calls.append("answers")),
    ):
        suite.over_the_link(link, torch.device("cpu"))
    return calls.count("sends"), calls.count("answers")
