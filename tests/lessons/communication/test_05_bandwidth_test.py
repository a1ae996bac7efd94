"""The bandwidth test: the checker catches what is planted, the columns mean what they say."""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from matplotlib.figure import Figure

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


def test_the_lectures_figure_is_the_busbw_of_four_gpus(lesson) -> None:
    """400 MB in 2.17 ms; the factor of four ranks is 1.5."""
    _, busbw = lesson.bandwidths(400e6, 2.166e-3, lesson.twice_all_but_one(4))
    assert busbw == pytest.approx(277, abs=0.1)
    algbw, _ = lesson.bandwidths(400e6, 1.444e-3, lesson.twice_all_but_one(4))
    assert algbw == pytest.approx(277, abs=0.1)


def late_by(seconds: float) -> float:
    """What `measure` says of an operation for which one rank takes so long, the other no time."""
    lesson = load(LESSON)
    bench = lesson.Bench(torch.device("cpu"), torch.float32, "sum", 1, 0)

    def slow(b: object, out: torch.Tensor, x: torch.Tensor) -> None:
        lesson.time.sleep(seconds if lesson.RANK == 0 else 0)

    lesson.OPS["all_reduce"] = lesson.OPS["all_reduce"]._replace(call=slow)
    return lesson.measure(bench, "all_reduce", 64, True)["us"]


def test_the_time_of_all_ranks_counts_and_not_that_of_the_fastest(lesson) -> None:
    assert min(run(late_by, 2, 0.2)) > 80_000  # the mean is 100,000 us or more


class Machine:
    """NVML of a node of GPUs whose links have this version; `pairs` says which are joined."""

    NVMLError = RuntimeError
    NVML_P2P_CAPS_INDEX_NVLINK = 3
    NVML_NVLINK_MAX_LINKS = 18

    def __init__(self, links: list[bool], version: int, joined: bool = True) -> None:
        self.links, self.version, self.joined = links, version, joined

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetP2PStatus(self, a: str, b: str, index: int) -> int:
        assert a != b
        return 0 if self.joined else 5

    def nvmlDeviceGetNvLinkState(self, a: str, link: int) -> bool:
        if link >= len(self.links):
            raise self.NVMLError
        return self.links[link]

    def nvmlDeviceGetNvLinkVersion(self, a: str, link: int) -> int:
        return self.version


@pytest.mark.parametrize(
    ("links", "version", "joined", "rate"),
    [
        ([True] * 12, 4, True, 300),  # A100
        ([True] * 18, 6, True, 450),  # H100
        ([True] * 18, 7, True, 900),  # B200
        ([True] * 17 + [False], 6, True, 425),  # one is down
        ([True] * 12, 4, False, 0),  # in pairs
        ([], 0, False, 0),
    ],
)
def test_nvlinks_one_way(lesson, monkeypatch, links, version, joined, rate) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Machine(links, version, joined))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    properties = [SimpleNamespace(uuid=f"{gpu}") for gpu in range(4)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: properties[gpu])
    assert lesson.nvlinks_one_way(torch.device("cuda", 2)) == rate


@pytest.mark.parametrize(
    ("links", "busbw", "verdict"),
    [(450, 370, "PASS"), (300, 235, "PASS"), (450, 200, "FAIL"), (0, 20, "BLOCKED")],
)
def test_an_all_reduce_is_held_against_the_nvlinks(monkeypatch, links, busbw, verdict) -> None:
    """H100 and A100 as published; half of the links unused; joined by PCIe only."""
    lesson = load(LESSON)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(lesson, "nvlinks_one_way", lambda device: links)
    monkeypatch.setattr(lesson, "gather_objects", lambda value: [value])
    monkeypatch.setattr(lesson, "measure", lambda *args, **kwargs: {"busbw": busbw})
    gpu = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float32)
    lesson.check_floor(gpu)
    assert [(row["claim"], row["verdict"]) for row in lesson.ledger] == [(FLOOR, verdict)]


@pytest.mark.parametrize(("dtype", "op", "most"), [("bfloat16", "sum", 85), ("half", "sum", 682)])
def test_more_ranks_than_a_dtype_adds_up_exactly_are_refused(monkeypatch, dtype, op, most) -> None:
    lesson = load(LESSON)
    told = argparse.Namespace(b=4096, e=None, f=None, g=None, n=None, w=1, d=dtype, o=op)
    said = []
    monkeypatch.setattr(lesson, "refuse", said.append)
    for ranks in (most, most + 1):
        lesson.WORLD_SIZE = ranks
        lesson.check_options(told)
    assert len(said) == 1
    assert f"exact up to {most} ranks, got {most + 1}" in said[0]
    told.o = "max"
    lesson.check_options(told)
    assert len(said) == 1


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


def in_place_parts() -> list[bool]:
    """Whether a rank's part of an operation in place lies where its chunk of the whole does."""
    lesson = load(LESSON)
    bench = lesson.Bench(torch.device("cpu"), torch.float32, "sum", 1, 0)
    right = []
    for name in ("reduce_scatter", "all_gather"):
        out, x = lesson.buffers(bench, lesson.OPS[name], 30, True)
        part, whole = sorted((out, x), key=len)
        right.append(part.data_ptr() == whole.data_ptr() + lesson.RANK * part.nbytes)
    return right


def test_in_place_a_rank_uses_its_own_chunk() -> None:
    assert run(in_place_parts, 3) == [[True, True]] * 3


FRESH = "    b.synchronize()\n    errors = sum(wrong"


def corrupted(*names: str) -> tuple[str, str, set[str]]:
    """One wrong element in the results of these operations, and of no others."""
    corrupt = f"out[7] += RANK == 0 and name in {names}\n    errors"
    claims = {f"{name}: wrong elements" for name in names}
    if "all_reduce" in names:
        claims.add("400 MB all-reduce: wrong elements")
    return FRESH, FRESH.replace("errors", corrupt, 1), claims


NAMED = "link named when one is slowed, by its sender"
AT_ONCE = "all links at once / the slow one alone"
GROWS = "busbw of an all-reduce: 4 MiB / 4 KiB"
FLOOR = "1 GiB all-reduce: busbw / NVLinks, one way"
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
    "every rank's part of the sum is the first": (  # Try
        ("(out, b.total, RANK * len(out))", "(out, b.total, 0)"),
        {"reduce_scatter: wrong elements"},
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
    "nobody waits for anybody": (
        (
            "                time.sleep(sleep)\n            call_sendrecv(b, out, x)\n",
            "                time.sleep(sleep)\n",
        ),
        {AT_ONCE},
    ),
    "a large all-reduce that is small": (
        (
            'large = measure(b, "all_reduce", count,',
            # one call is all noise
            'b.calls = 40\n    large = measure(b, "all_reduce", small_count,',
        ),
        {GROWS},
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


# Values that no row shows


def measured_by_our_clock() -> tuple[list[str], dict[str, float]]:
    """What is done, by a clock that a call puts forward by 2 ms; and what is told of it."""
    here = load(LESSON)
    now, done = [0.0], []

    def call(*_: object) -> None:
        done.append("call")
        now[0] += 0.002

    def barrier() -> None:
        done.append("barrier")
        now[0] += 1.0  # another rank is late

    here.dist = SimpleNamespace(barrier=barrier)
    here.time = SimpleNamespace(perf_counter=lambda: now[0])
    here.gather_objects = lambda value: [value, 3 * value]
    bench = SimpleNamespace(calls=4, warmup=2, dtype=torch.float32)
    bench.synchronize = lambda: done.append("wait")
    here.OPS["all_reduce"] = here.OPS["all_reduce"]._replace(call=call, holds=lambda b, out: [])
    here.buffers = lambda *_: (None, None)
    here.WORLD_SIZE = 4
    return done, here.measure(bench, "all_reduce", 10**6, True)


def test_calls_are_warmed_up_and_averaged_over_calls_and_ranks() -> None:
    done, row = measured_by_our_clock()
    expected = ["call", "wait", *2 * ["call"], "wait", "barrier", *4 * ["call"], "wait"]
    assert done == expected
    assert row["us"] == pytest.approx(4000)  # the mean of 2 ms and 6 ms
    assert row["algbw"] == pytest.approx(4e6 / 4e-3 / 1e9)
    assert row["busbw"] == pytest.approx(1.5 * row["algbw"])


def on_three_links(slowed: int, sleep: float) -> tuple[list[float], list[tuple]]:
    """Seconds of each link as rank 1 of three sees them: a send takes 1 s, and 10 to rank 2."""
    here = load(LESSON)
    here.RANK, here.WORLD_SIZE = 1, 3
    now, sent = [0.0], []

    def send_alone(x: object, sender: int, receiver: int) -> None:
        sent.append((sender, receiver))
        now[0] += 10 if receiver == 2 else 1
        if len(sent) % 6 in (1, 2):  # of three runs of two sends each the first is disturbed
            now[0] += 50

    def nap(seconds: float) -> None:
        now[0] += seconds

    here.send_alone = send_alone
    here.dist = SimpleNamespace(barrier=lambda: None)
    here.time = SimpleNamespace(perf_counter=lambda: now[0], sleep=nap)
    here.gather_objects = lambda mine: [mine, mine + 0.5, mine + 0.25]
    bench = SimpleNamespace(calls=2, synchronize=lambda: None)
    return here.link_seconds(bench, None, slowed, sleep), sent


def test_each_link_is_timed_alone_by_its_receiver() -> None:
    seconds, sent = on_three_links(-1, 0.0)
    assert sent == 6 * [(0, 1)] + 6 * [(1, 2)] + 6 * [(2, 0)]  # the best of three runs of two
    assert seconds == [1.5, 10.25, 1.0]
    seconds, _ = on_three_links(1, 7.0)  # rank 1 is asleep before each of its sends
    assert seconds == [1.5, 17.25, 1.0]
    seconds, _ = on_three_links(2, 7.0)
    assert seconds == [1.5, 10.25, 1.0]


def test_all_links_are_timed_once_the_slow_one_is_known_everywhere() -> None:
    """Rounds of 9 s until the news has come round, then of 2 s; another rank waits less."""
    here = load(LESSON)
    here.WORLD_SIZE = 4
    now, rounds = [0.0], []

    def call_sendrecv(*_: object) -> None:
        rounds.append(0)
        now[0] += 9 if len(rounds) % 8 in (1, 2, 3) else 2

    here.call_sendrecv = call_sendrecv
    here.dist = SimpleNamespace(barrier=lambda: None)
    naps = []
    here.time = SimpleNamespace(perf_counter=lambda: now[0], sleep=naps.append)
    here.gather_objects = lambda mine: [mine, mine - 0.5]
    bench = SimpleNamespace(calls=5, synchronize=lambda: None)
    assert here.all_links_seconds(bench, torch.zeros(1), slowed=0, sleep=0.3) == 1.5
    assert len(rounds) == 3 * (3 + 5)
    assert naps == [0.3] * len(rounds)


def test_the_slowest_link_is_named_and_slowed_20_times(capsys) -> None:
    here = load(LESSON)
    here.WORLD_SIZE = 4
    asked = []

    def link_seconds(b: object, x: torch.Tensor, slowed: int = -1, sleep: float = 0) -> list:
        asked.append((x.nbytes, slowed, sleep))
        return [1e-3, 1e-3, 21e-3, 8e-3] if slowed == 2 else [1e-3, 4e-3, 1e-3, 8e-3]

    def measure(b: object, name: str, count: int, in_place: bool) -> dict[str, float]:
        asked.append((name, 4 * count, in_place))
        return {"busbw": count / 2**20}

    here.link_seconds = link_seconds
    here.all_links_seconds = lambda *_: 21e-3
    here.measure = measure
    bench = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
    assert here.check_links(bench) == pytest.approx(2**22 / 8e-3 / 1e9)
    assert "; the limit: 3->0 0.52" in capsys.readouterr().out
    assert asked == [
        (2**22, -1, 0),
        (2**22, 2, pytest.approx(0.16)),
        ("all_reduce", 2**22, True),
        ("all_reduce", 4096, True),
    ]
    assert [row["measured"] for row in here.ledger if "measured" in row] == [2, 1, 1024]


def test_400_mb_are_100_million_gradients(capsys) -> None:
    here = load(LESSON)
    here.WORLD_SIZE = 4
    asked = []

    def measure(b: object, name: str, count: int, in_place: bool) -> dict[str, float]:
        asked.append((name, count, in_place, b.calls, b.warmup))
        return {"us": 2166.0, "algbw": 184.67, "busbw": 277.0, "wrong": 0}

    here.measure = measure
    bench = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32, calls=9, warmup=9)
    here.show_400_MB(bench, 554.0)
    assert asked == [("all_reduce", 100_000_000, True, 1, 1)]
    assert "busbw 277.00 GB/s, 50% of the slowest link" in capsys.readouterr().out


def test_every_size_is_measured_in_both_places_in_n_equal_parts() -> None:
    here = load(LESSON)
    here.WORLD_SIZE = 3
    cell = {"us": 1, "algbw": 1, "busbw": 1, "wrong": 0}
    here.measure = lambda b, name, count, in_place: cell
    bench = SimpleNamespace(dtype=torch.float32, op="max")
    table = here.sweep(bench, 4, 4096, 32)
    assert len(table) == 9 * 3
    for row in table:
        assert row["count"] == {12: 3, 120: 30, 4092: 1023}[row["size"]]
        reduces = row["op"] in ("all_reduce", "reduce_scatter", "reduce")
        assert row["redop"] == ("max" if reduces else "none")
        alone = row["op"] in ("all_to_all", "gather", "scatter", "sendrecv")
        assert ("in place" in row) == (not alone)


def test_the_figure_shows_busbw_in_place_where_there_is_one(lesson, monkeypatch) -> None:
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    table = []
    for number, (name, op) in enumerate(lesson.OPS.items(), start=1):
        for size in (4096, 2**20):
            row = {"op": name, "size": size, "type": "float32"}
            row["out of place"] = {"algbw": 0.1, "busbw": size * number / 2**20}
            if op.in_place:
                row["in place"] = {"algbw": 0.1, "busbw": 100 * size * number / 2**20}
            table.append(row)
    lesson.draw(table, 7.0, "unused.png")
    *curves, slowest = drawn[0].axes[0].lines
    for number, (line, op) in enumerate(zip(curves, lesson.OPS.values(), strict=True), start=1):
        speed = number * (100 if op.in_place else 1)
        assert list(line.get_xdata()) == [4096, 2**20]
        assert list(line.get_ydata()) == [speed / 256, speed]
    assert list(slowest.get_ydata()) == [7, 7]
