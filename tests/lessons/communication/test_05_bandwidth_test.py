"""The bandwidth test: the checker catches what is planted, the columns mean what they say."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from course.playing import load, play
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "communication/05_bandwidth_test.py"
QUICK = "-b", "4K", "-e", "4K", "-n", "1", "-w", "0"
SMALL = (("S = 400_000_000", "S = 400_000"),)
NO_LINKS = ("    slowest = check_links(bench)\n", "    slowest = 1.0\n")
ON_GPUS = OnGpus(  # above 4 million elements kernels are left out; values are checked at each size
    argv=("-e", "1M", "-f", "16", "-n", "2"),
    hardware={
        "400 MB all-reduce: wrong elements": "kernels on more than 4 million elements are left out"
    },
)
REFUSE_AT_ONCE = ("        time.sleep(30)  # the launcher", "        pass  # the launcher")


@pytest.fixture(scope="module")
def lesson():
    return load(LESSON)


def test_sizes_are_read_as_nccl_tests_reads_them(lesson) -> None:
    assert [lesson.size(text) for text in ("8", "4K", "32m", "1G")] == [8, 4096, 2**25, 2**30]


def test_sizes_are_real_ones_on_gpus_alone(lesson) -> None:
    told = argparse.Namespace(b=4096, e=None, f=None, n=None)
    assert lesson.sizes_and_calls(told, torch.device("cpu")) == (2**22, 32, 5)
    assert lesson.sizes_and_calls(told, torch.device("cuda")) == (2**30, 4, 20)
    told = argparse.Namespace(b=2**23, e=None, f=2, n=7)
    assert lesson.sizes_and_calls(told, torch.device("cpu")) == (2**23, 2, 7)


def test_the_check_counts_every_wrong_element(lesson) -> None:
    pattern = lesson.tile(1, torch.float32, torch.device("cpu"))
    for start in (0, 5, 4098):
        right = pattern.repeat(4)[start : start + 10_000]
        assert lesson.wrong(right, pattern, start) == 0
        for where in (0, 4098, 4099, 9_999):
            assert lesson.wrong(right + (torch.arange(10_000) == where), pattern, start) == 1
        assert lesson.wrong(right, pattern, start + 1) > 5_000
    assert lesson.wrong(torch.full((7,), float("nan")), pattern) == 7


@pytest.mark.parametrize("dtype", ["bfloat16", "half", "int32"])
def test_sums_of_64_ranks_are_exact(lesson, dtype: str) -> None:
    tiles = [lesson.tile(r, getattr(torch, dtype), torch.device("cpu")) for r in range(64)]
    upward, downward = sum(tiles[1:], tiles[0]), sum(tiles[-2::-1], tiles[-1])
    assert torch.equal(upward, downward)
    assert torch.equal(upward.double(), torch.stack(tiles).double().sum(0))
    assert all(not torch.equal(tiles[0], other) for other in tiles[1:])


def rows(op: str, dtype: str, count: int) -> list:
    import torch.distributed as dist

    lesson = load(LESSON)
    lesson.RANK, lesson.WORLD_SIZE = dist.get_rank(), dist.get_world_size()
    bench = lesson.Bench(torch.device("cpu"), getattr(torch, dtype), op, 1, 0)
    found = []
    for name, about in lesson.OPS.items():
        for in_place in [False, True][: 1 + about.in_place]:
            out, x = lesson.buffers(bench, about, count, in_place)
            shared = out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
            row = lesson.measure(bench, name, count, in_place)
            found.append((name, in_place, shared, row["wrong"], row["busbw"] / row["algbw"]))
    return found


@pytest.mark.parametrize(
    ("n", "op", "dtype"),
    [(2, "max", "bfloat16"), (3, "min", "int32"), (4, "sum", "half"), (5, "sum", "double")],
)
def test_every_operation_is_right_in_both_places(n: int, op: str, dtype: str) -> None:
    share = (n - 1) / n
    factors = {"all_reduce": 2 * share, "broadcast": 1, "reduce": 1, "sendrecv": 1}
    for found in run(rows, n, op, dtype, 4099 * n):
        assert len(found) == 14
        for name, in_place, shared, wrong, factor in found:
            assert (shared, wrong) == (in_place, 0), name
            assert factor == pytest.approx(factors.get(name, share))


FRESH = "    b.synchronize()\n    errors = sum(wrong"


def corrupted(*names: str) -> tuple[str, str, set[str]]:
    """One wrong element in the results of these operations, and of no others."""
    corrupt = f"out[7] += RANK == 0 and name in {names}\n    errors"
    claims = {f"{name}: wrong elements" for name in names}
    if "all_reduce" in names:
        claims.add("400 MB all-reduce: wrong elements")
    return FRESH, FRESH.replace("errors", corrupt, 1), claims


HEADLINE = "400 MB in 2.527 ms on 8 ranks: busbw, GB/s"
ALGBW = "400 MB in 1.444 ms on 8 ranks: algbw, GB/s"
NAMED = "link named when one is slowed, by its sender"
AT_ONCE = "all links at once / the slow one alone"
LIMIT = "all-reduce's busbw / the slowest link's"
LINES = {
    "one wrong element in every other operation": corrupted(
        "all_reduce", "all_gather", "broadcast", "gather", "sendrecv"
    ),
    "one wrong element in each of the others": corrupted(
        "reduce_scatter", "all_to_all", "reduce", "scatter"
    ),
    "the check sees nothing": (
        ("(tiles != pattern).sum()", "(tiles != pattern).any() * 0"),
        {"elements called wrong, where one is"},
    ),
    "a reduce that adds, whatever it is told": (
        ("out.copy_(x), 0, b.reduce_op)", "out.copy_(x), 0)"),
        {"reduce: wrong elements"},
    ),
    "busbw of an all-reduce is n - 1 times algbw": (
        ("    return 2 * (n - 1) / n", "    return n - 1"),
        {HEADLINE, "all_reduce: busbw / algbw"},
    ),
    "GiB for GB": (
        ("algbw = nbytes / seconds / 1e9", "algbw = nbytes / seconds / 2**30"),
        {HEADLINE, ALGBW},
    ),
}


LINKS = {
    "another sender is slowed": (
        ("if sender == slowed and sender == RANK:", "if sender == 0 and sender == RANK:"),
        {NAMED},
    ),
    "all links at once without the slow one": (
        ("            if slowed == RANK:", "            if slowed == -1:"),
        {AT_ONCE},
    ),
    "the clock is a billion times too fast": (
        ("seconds = fmean(", "seconds = 1e-9 * fmean("),
        {LIMIT},
    ),
}


BREAKS = [
    Breaks(
        LINES,
        ranks=3,
        changes=[*SMALL, NO_LINKS],
        argv=(*QUICK, "-o", "max"),
        alone=["the check sees nothing"],
    ),
    Breaks(LINKS, ranks=3, changes=SMALL, argv=QUICK, clock=True),
]


@pytest.mark.deep
def test_a_reduce_that_always_adds_is_right_by_default() -> None:
    change = ("out.copy_(x), 0, b.reduce_op)", "out.copy_(x), 0)")
    play(LESSON, 3, change, *SMALL, NO_LINKS, argv=QUICK).expect(set())


@pytest.mark.deep
def test_fewer_ranks_take_part_and_rows_are_saved(tmp_path: Path) -> None:
    saved = tmp_path / "rows.json"
    argv = (*QUICK, "-g", "2", "-d", "int32", "--json", str(saved))
    played = play(LESSON, 3, *SMALL, argv=argv)
    played.expect(set())
    assert played.output.startswith("2 ranks, gloo")
    table = json.loads(saved.read_text())
    assert [row["op"] for row in table] == list(load(LESSON).OPS)
    assert {(row["size"], row["count"], row["type"]) for row in table} == {(4096, 1024, "int32")}


@pytest.mark.deep
@pytest.mark.parametrize(
    ("argv", "rule"),
    [
        (("-g", "3"), "-g must be 2 to 2"),
        (("-b", "1M", "-e", "1K"), "-b must be positive and at most -e; got 1,048,576 and 1,024"),
        (("-f", "1"), "-f must be at least 2"),
        (("-n", "0"), "-n must be positive"),
        (("-b", "many"), "invalid size value: 'many'"),
    ],
)
def test_wrong_usage_is_refused_before_any_collective(argv: tuple, rule: str) -> None:
    played = play(LESSON, 2, REFUSE_AT_ONCE, argv=argv)
    assert rule in str(played.code) + played.output
    assert played.ledger == []
