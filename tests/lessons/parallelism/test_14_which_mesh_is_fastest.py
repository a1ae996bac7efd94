"""Seconds that follow from made-up numbers, by hand; claims against broken lines; two nodes."""

import json
import math
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from course.lessons import ROOT
from course.playing import Lazily, load
from tests.helpers.leftovers import MARKED, gone
from tests.helpers.namespaces import needs_namespaces
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "parallelism/14_which_mesh_is_fastest.py"
lesson = Lazily(LESSON)


def machine(alone: float = 0.25, alpha: float = 1e-3, beta: float = 200e6):
    return lesson.Costs(8e9, alone, defaultdict(lambda: (alpha, beta)))


def seconds(costs, *sizes: int) -> float:
    return sum(lesson.predict(lesson.Layout(*sizes), costs).values())


@pytest.mark.parametrize(
    ("sizes", "shared", "own"),
    [
        ((1, 1, 8, 1), 0.236, 0.236),
        ((1, 1, 1, 8), 0.405, 0.405),
        ((8, 1, 1, 1), 0.179, 0.335),
    ],
)
def test_the_table_of_section_3(sizes: tuple, shared: float, own: float) -> None:
    assert seconds(machine(), *sizes) == pytest.approx(shared, abs=0.0005)
    assert seconds(machine(alone=1.0), *sizes) == pytest.approx(own, abs=0.0005)


def test_a_step_by_hand() -> None:
    """pp 2 x dp_replicate 2 x tp 2: 2 micro-batches of 4 sequences, 4 layers of half a matrix."""
    parts = lesson.predict(lesson.Layout(2, 2, 1, 2), machine(alone=1.0))
    flops = 1024 * 8 * (6 * 12 * 128**2 + 6 * 128 * 64) / 8
    activation = 4 * 64 * 128 * 4
    assert parts["products"] == pytest.approx(flops / 8e9)
    tp = 64 * (1e-3 + activation / 200e6) + 8 * (1e-3 + 128 * 4 / 200e6)
    assert parts["tp"] == pytest.approx(tp)
    pp = 2 * (1e-3 + activation / 2 / 200e6)
    assert parts["pp"] == pytest.approx(pp)
    copies = 4 * (1e-3 + (12 * 128**2 / 2 + 2 * 128) * 4 / 200e6)
    assert parts["dp_replicate"] == pytest.approx(copies)
    assert parts["dp_shard"] == 0
    assert parts["waiting"] == pytest.approx((flops / 8e9 + tp + pp) / 2)  # 3 slots, not 2


def test_an_axis_that_gets_a_slow_link_falls_behind() -> None:
    """What is slow for tp alone, for dp_shard alone, for pp alone."""
    meshes = [(8, 1, 1, 1), (1, 1, 8, 1), (1, 1, 1, 8)]
    for operation, axis in (("send", 0), ("reduce_scatter", 1), ("all_reduce", 2)):
        costs = machine()
        before = [seconds(costs, *sizes) for sizes in meshes]
        costs.lines[operation, 8, 1] = (0.1, 200e6)
        after = [seconds(costs, *sizes) for sizes in meshes]
        if operation == "reduce_scatter":  # tp has it too
            assert [y > x for x, y in zip(before, after, strict=True)] == [False, True, True]
        else:
            assert [y > x for x, y in zip(before, after, strict=True)].index(True) == axis
        assert after.index(max(after)) == (2 if operation == "reduce_scatter" else axis)


def test_how_far_apart_the_ranks_of_an_axis_are() -> None:
    layout = lesson.Layout(2, 1, 2, 2)
    kinds = {one.axis: lesson.kind_of(one, layout)[1:] for one in lesson.messages(layout, 1)}
    assert kinds == {"pp": (2, 4), "dp_shard": (2, 2), "tp": (2, 1)}


def test_all_ranks_have_the_same_flops_and_together_hold_the_model() -> None:
    costs = machine()
    whole = 8 * (12 * 128**2 + 2 * 128) * 16  # bytes
    for sizes in meshes_of(8):
        layout = lesson.Layout(*sizes)
        assert lesson.predict(layout, costs)["products"] == pytest.approx(0.1572864)
        norms = 8 * 2 * 128 * 16  # each rank of tp has them
        held = lesson.state_bytes(layout) * layout.pp * layout.dp_shard
        assert held == (whole - norms) // layout.tp + norms


def meshes_of(ranks: int) -> list[tuple]:
    module = load(LESSON)
    module.WORLD_SIZE = ranks
    return module.all_meshes()


def test_there_are_20_meshes_of_eight_ranks_and_286_of_1024() -> None:
    found = meshes_of(8)
    assert len(found) == len({*found}) == 20
    assert all(math.prod(sizes) == 8 for sizes in found)
    assert math.comb(10 + 3, 3) == 286
    for ranks, few in lesson.FEW.items():
        assert {*few} <= {*meshes_of(ranks)}


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0], 1),
        ([1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0], -1),
        ([1.0, 2.0, 3.0, 4.0], [2.0, 1.0, 3.0, 4.0], 0.8),  # 1 - 6 x 2 / 60
        ([3.0, 1.0, 2.0, 9.0], [5.0, 6.0, 7.0, 8.0], 0.4),  # 1 - 6 x 6 / 60
    ],
)
def test_rank_correlation(one: list, other: list, expected: float) -> None:
    assert lesson.rank_correlation(one, other) == pytest.approx(expected)


GATHERED, SCATTERED, REDUCED, SENT = (
    f"{operation}: bytes of a step, all meshes"
    for operation in ("all_gather", "reduce_scatter", "all_reduce", "send")
)
CALLS = "calls of a step, all meshes"
HELD = "bytes held, all meshes"
TP_SHARD = "tp / dp_shard: bytes of a step"
COPIES = "dp_replicate 2 / dp_shard 2: bytes held"
ON_2, ON_8 = (f"pp 8 on {cores} cores: seconds / without idle slots" for cores in (2, 8))
BEST = "slow cable: pp across / the best axis, seconds"
ACROSS = "slow cable: tp across / pp across, seconds"

LINES = {
    "the backward pass sends nothing along tp, as in Try": (
        "m * 4 * layers",
        "m * 2 * layers",
        {GATHERED, SCATTERED, CALLS, ACROSS},
    ),
    "who waits loses its core, as in Try": (
        'costs.alone * seconds["products"]',
        'seconds["products"]',
        {ON_2, ACROSS},
    ),
    "there is a slot per micro-batch": (
        "(2 * layout.pp - 1) / layout.pp",
        "1",
        {ON_8},
    ),
    "stages send forward only": (
        "int(s > 0) + int(s < pp - 1)",
        "int(s < pp - 1)",
        {SENT, CALLS, ACROSS},
    ),
    "stages send for each layer": (
        "m * neighbors, activation // tp",
        "m * 4 * layers * neighbors, activation // tp",
        {SENT, CALLS, BEST, ACROSS},
    ),
    "tp's ranks send whole activations to the next stage": (
        "m * neighbors, activation // tp",
        "m * neighbors, activation",
        {SENT, ACROSS},
    ),
    "gradients are not reduce-scattered": (
        '        Message("dp_shard", "reduce_scatter", layers, layer),\n',
        "",
        {SCATTERED, CALLS},
    ),
    "each norm has its own weights on each rank": (
        '        Message("tp", "all_reduce", 2 * layers, D * DTYPE.itemsize),\n',
        "",
        {REDUCED, CALLS, ACROSS},
    ),
    "FSDP gathers once more for the backward pass": (
        "reshard_after_forward=False",
        "reshard_after_forward=True",
        {GATHERED, CALLS, TP_SHARD},
    ),
    "a stage is one unit": (
        "        fully_shard(layer, mesh=dp, reshard_after_forward=False)\n",
        "",
        {CALLS},
    ),
    "copies do not average": (
        'hybrid = mesh["dp_replicate"].size() > 1',
        "hybrid = False",
        {REDUCED, CALLS},
    ),
    "the whole parameters are counted": (
        "held += tensor.to_local().nbytes",
        "held += tensor.nbytes",
        {HELD, COPIES},
    ),
    "the optimizer holds one moment": (
        'state["exp_avg"], state["exp_avg_sq"]):',
        'state["exp_avg"]):',
        {HELD},
    ),
}
UPSIDE_DOWN = {
    "the slowest is predicted to be the fastest": (
        "predicted = [sum(predict(layout, costs).values()) for layout in runs]",
        "predicted = [1e-2 / sum(predict(layout, costs).values()) for layout in runs]",
        {
            "rank correlation of predicted and measured",
            "predicted first / measured first, seconds",
            "measured / predicted, median",
        },
    ),
}
BREAKS = [Breaks(LINES, ranks=4, deadline=150)]
BREAKS += [Breaks(UPSIDE_DOWN, ranks=4, deadline=150, clock=True)]

WHY = "the pretended GPUs' tensors say that they are on the CPU, and FSDP refuses a DTensor there"
ON_GPUS = OnGpus(
    changes=[
        ("        fully_shard(layer, mesh=dp, reshard_after_forward=False)\n", ""),
        ("    fully_shard(stage, mesh=dp)\n", ""),
        ("tp / shard, question=1", "tp / max(shard, 1), question=1"),
    ],
    hardware=dict.fromkeys([GATHERED, SCATTERED, REDUCED, CALLS, HELD, TP_SHARD, COPIES], WHY),
)


@needs_namespaces
@pytest.mark.clock
@pytest.mark.timeout(400)
def test_across_a_slow_cable_tp_costs_what_was_predicted(tmp_path: Path) -> None:
    """Two nodes of two ranks, started by one command."""
    ledger = tmp_path / "ledger.json"
    folder = Path(sys.executable).parent
    env = MARKED | {"PATH": f"{folder}:{os.environ['PATH']}", "LESSON_JSON": str(ledger)}
    argv = ["bash", str(ROOT / "launch/two_nodes_here.sh"), "--ranks", "2"]
    argv += [str(ROOT / LESSON), "--mbit", "200"]
    ran = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    rows = {row["claim"]: row for row in json.loads(ledger.read_text())["ledger"]}
    failed = [claim for claim, row in rows.items() if row["verdict"] == "FAIL"]
    assert {*failed} <= {claim for claim, row in rows.items() if row.get("timed")}, ran.stdout
    across = rows["cable: tp across less pp across, / predicted"]
    assert across["verdict"] == "PASS", ran.stdout
    assert gone()
