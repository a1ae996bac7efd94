"""The lesson on collectives: its definitions, its counting, and that each claim can fail."""

import contextlib
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from course.lessons import ROOT
from course.playing import Played, load
from course.ranks import run
from tests.lessons.every import Breaks, test_lesson  # noqa: F401

LESSON = "communication/01_nccl_collectives.py"

# What the eight must do, written out for four ranks with rank 1 as root (MPI 4.1, chapter 6).
HELD_AFTER = {
    "broadcast": [[10, 11, 12, 13]] * 4,
    "scatter": [[10], [11], [12], [13]],
    "gather": [[], [0, 10, 20, 30], [], []],
    "reduce": [[], [60, 64, 68, 72], [], []],
    "all_reduce": [[60, 64, 68, 72]] * 4,
    "all_gather": [[0, 10, 20, 30]] * 4,
    "reduce_scatter": [[60], [64], [68], [72]],
    "all_to_all": [[0, 10, 20, 30], [1, 11, 21, 31], [2, 12, 22, 32], [3, 13, 23, 33]],
}


def held_after_each() -> dict[str, list[float]]:
    lesson = load(LESSON)
    n = lesson.WORLD_SIZE
    X_RN = torch.tensor([[10.0 * r + j for j in range(n)] for r in range(n)])
    held = {}
    for name, call in lesson.CALLS.items():
        out = torch.full_like(lesson.expected(X_RN)[name], torch.nan)
        call(lesson.brought(X_RN)[name].clone(), out)
        held[name] = out.tolist()
    return held


def test_each_rank_holds_what_the_standard_says() -> None:
    held = run(held_after_each, 4)
    assert {name: [held[r][name] for r in range(4)] for name in held[0]} == HELD_AFTER


def test_the_pictures_in_the_text_are_what_the_standard_says() -> None:
    """Each picture's rows, with *j for the sum of all chunks j."""
    text = (ROOT / LESSON).read_text()
    sums = {"*0": 60, "*1": 64, "*2": 68, "*3": 72}
    drawn = {}
    for first, second in (
        ("broadcast", "scatter"),
        ("reduce", "gather"),
        ("all_reduce", "all_gather"),
        ("reduce_scatter", "all_to_all"),
    ):
        _, _, below = text.partition(f"#                {first} ")
        drawn[first], drawn[second] = [], []
        for line in below.splitlines()[1:5]:
            left, right = line[17:46], line[46:]
            for name, cell in ((first, left), (second, right)):
                after = cell.partition("->")[2].split()
                drawn[name].append([sums.get(c) or int(c) for c in after if c != "-"])
    assert drawn == HELD_AFTER


def test_a_picture_shows_what_was_gathered_and_stays_narrow() -> None:
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 4
    drawn = lesson.picture("gather", [[0], [10], [20], [30]], HELD_AFTER["gather"])
    lines = drawn.splitlines()[1:]
    assert lines[0].split() == ["gather", "rank", "0", "00", "→", "."]
    assert lines[1].split() == ["rank", "1", "10", "→", "00", "10", "20", "30"]
    assert len({line.index("→") for line in lines}) == 1
    lesson.WORLD_SIZE = 64
    drawn = lesson.picture("all_to_all", [[6363.0] * 64] * 64, [[float("nan")] * 64] * 64)
    assert drawn.count("rank") == 4
    assert drawn.splitlines()[-1].strip() == "…"
    assert "? ? ? ? …" in drawn
    assert max(map(len, drawn.splitlines())) <= 100


def traffic(size: int) -> tuple[int, int]:
    """Rank 0 sends `size` bytes to rank 1; how much more each has carried since."""
    lesson = load(LESSON)
    x = torch.ones(size, dtype=torch.uint8)
    dist.barrier()
    was = lesson.carried()
    dist.barrier()
    dist.send(x, 1) if lesson.RANK == 0 else dist.recv(x, 0)
    dist.barrier()
    sent, received = (now - then for now, then in zip(lesson.carried(), was, strict=True))
    dist.barrier()  # who leaves closes its sockets, and the other's counters go with them
    return sent, received


def test_the_kernel_counts_each_byte_once_and_on_the_right_side() -> None:
    size = 3_000_000
    (sent, none), (nothing, received) = run(traffic, 2, size)
    assert size <= sent <= size + 2000
    assert size <= received <= size + 2000
    assert none < 2000
    assert nothing < 2000


def open_files() -> tuple[int, int]:
    lesson = load(LESSON)
    lesson.carried()
    before = len(lesson.os.listdir("/proc/self/fd"))
    for _ in range(50):
        lesson.carried()
    return before, len(lesson.os.listdir("/proc/self/fd"))


def test_counting_leaves_no_file_open() -> None:
    for before, after in run(open_files, 2):
        assert after < before + 25  # a leak is at least 50; gloo's own sockets come and go


def test_shares_are_the_factors_of_nccl_tests() -> None:
    """Broadcast and reduce 1, all_reduce 2(n-1)/n, the others (n-1)/n."""

    def shares() -> dict[str, float]:
        return load(LESSON).MUST

    for n in (2, 3):
        part = (n - 1) / n
        once = dict.fromkeys(("scatter", "gather", "all_gather", "reduce_scatter"), part)
        rest = {"broadcast": 1, "reduce": 1, "all_to_all": part, "all_reduce": 2 * part}
        assert run(shares, n)[0] == once | rest


@pytest.mark.parametrize(
    ("share", "busbw", "links", "verdicts"),
    [
        (1.75, 370, 450, ["PASS", "PASS"]),  # 8 H100, rings
        (1.13, 480, 450, ["PASS", "PASS"]),  # NVLS
        (3.5, 370, 450, ["FAIL", "PASS"]),  # everything twice
        (0.9, 200, 450, ["FAIL", "FAIL"]),  # another way than NVLink, and slow
        (0, 20, 0, ["BLOCKED"]),
    ],
)
def test_an_all_reduce_over_nvlink(monkeypatch, share, busbw, links, verdicts) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 8
    lesson.MUST["all_reduce"] = 1.75
    lesson.gather_objects = lambda value: [value] * 8
    lesson.judge_nvlink(share, busbw, links)
    assert [row["verdict"] for row in lesson.ledger] == verdicts


def back_before_the_last(call: Callable[[torch.Tensor], None]) -> list[bool]:
    """For each other rank: whether rank 0 was back from `call` before that rank called it."""
    store = dist.distributed_c10d._get_default_store()
    rank, x = dist.get_rank(), torch.zeros(4)
    early = []
    for late in range(1, dist.get_world_size()):
        key = f"{call.__name__} without {late}"
        dist.barrier()
        if rank == late:
            with contextlib.suppress(dist.DistStoreError):
                store.wait([key], timedelta(seconds=2))
            store.set(f"{key}: early", str(store.check([key])))
        call(x)
        if rank == 0:
            store.set(key, "")
        early.append(store.get(f"{key}: early") == b"True")
    return early


def broadcast(x: torch.Tensor) -> None:
    dist.broadcast(x, 0)


def test_a_root_need_not_wait_for_all_but_a_sum_must() -> None:
    """As sections 1 and 2 say. gloo broadcasts by a tree: its root waits for its children only."""
    assert any(run(back_before_the_last, 4, broadcast, quiet=20)[0])
    assert not any(run(back_before_the_last, 4, dist.all_reduce, quiet=20)[0])


def values(*names: str) -> set[str]:
    return {f"{name}: error" for name in names}


def traffic_of(name: str, must: str) -> set[str]:
    return {f"{name}: must {must} S, gloo moves"}


ONE = "all_reduce of rank + 1"
CAME = "ranks that had arrived when the barrier let go"
UNDONE = "ranks back, work undone, before rank 0 calls"
SUMMED = "after wait(): error of the sum"
SUMS = "sums handed out after the skip, without an error"
OFF = "largest error of these sums: the next step's 100"
ENDED = "ranks that waited for nobody, ended by the timeout"
LATE = "share of one rank's lateness billed to the network"
MOVES = "bytes_on_the_wire"  # the sections to run, of those for several ranks
WAITS, SKIPS, CLOCK = "who_waits_for_whom", "one_rank_skips", "sides_of_a_clock"


def only(section: str) -> list[tuple[str, str]]:
    """Changes that leave this section alone in `main`, of those for several ranks."""
    others = [name for name in (MOVES, WAITS, SKIPS, CLOCK) if name != section]
    return [(f"        {name}(device)\n", "") for name in others]


MOVED = {
    "MAX for the sum, in the first call": (
        (
            "    dist.all_reduce(x)\n    claim(",
            "    dist.all_reduce(x, dist.ReduceOp.MAX)\n    claim(",
        ),
        {ONE},
    ),
    "no broadcast": (
        ("    dist.broadcast(out, src=ROOT)\n", ""),
        values("broadcast") | traffic_of("broadcast", "1"),
    ),
    "scatter in the wrong order": (
        ("list(x.split(1))", "list(x.flip(0).split(1))"),
        values("scatter"),
    ),
    "reduce by MAX": (
        ("dist.reduce(total, dst=ROOT)", "dist.reduce(total, ROOT, dist.ReduceOp.MAX)"),
        values("reduce"),
    ),
    "no reduce": (
        ("    dist.reduce(total, dst=ROOT)\n", ""),
        values("reduce") | traffic_of("reduce", "1"),
    ),
    "all_reduce by MAX": (  # Try
        ("    dist.all_reduce(out)\n", "    dist.all_reduce(out, dist.ReduceOp.MAX)\n"),
        values("all_reduce"),
    ),
    "reduce_scatter of the wrong chunk": (
        ("dist.reduce_scatter_tensor(out, x)", "dist.reduce_scatter_tensor(out, x.flip(0))"),
        values("reduce_scatter"),
    ),
    "every operator is SUM": (
        ("getattr(dist.ReduceOp, name)", "dist.ReduceOp.SUM"),
        values("AVG", "MIN", "MAX", "PRODUCT"),
    ),
    "every operator is MAX": (
        ("getattr(dist.ReduceOp, name)", "dist.ReduceOp.MAX"),
        values("SUM", "AVG", "MIN", "PRODUCT"),
    ),
    "halves that only gather": (
        (
            "    dist.reduce_scatter_tensor(shard, x)\n",
            "    shard.copy_(x[RANK * 1000 :][:1000])\n",
        ),
        {"elements whose bits differ, all_reduce and halves"},
    ),
}
WAITED = {
    "no barrier": (  # and the last rank is so late that rank 0 has left
        (
            "    time.sleep(0.1 if RANK == WORLD_SIZE - 1 else 0)\n"
            '    store.add("arrived", 1)\n    dist.barrier()\n'
            '    arrived = store.add("arrived", 0)\n',
            '    if RANK == WORLD_SIZE - 1:\n        store.wait(["left"])\n'
            '    store.add("arrived", 1)\n    arrived = store.add("arrived", 0)\n'
            '    store.set("left", "")\n',
        ),
        {CAME},
    ),
    "a call that waits": (  # Try
        ("x, async_op=True)\n", "x, async_op=True)\n    work.wait()\n"),
        {UNDONE},
    ),
    "the buffer is written to before the wait": (
        (
            "if not work.is_completed():\n",
            "early = not work.is_completed()\n    x.zero_()\n    if early:\n",
        ),
        {SUMMED},
    ),
}
SKIPPED = {
    "no skip": (("if RANK < WORLD_SIZE - 1 or step > 0:", "if True:"), {SUMS, OFF, ENDED}),
    "one step more": (("for step in range(3)", "for step in range(4)"), {SUMS}),
    "smaller losses": (("100.0 * step + RANK", "10.0 * step + RANK"), {OFF}),
    "an error unseen": (("error = str(timeout)", "pass"), {ENDED}),
}
BILLED = {  # neither way of reading the clock tells lateness from transfer
    "the ranks always meet before": ("    if before:\n", "    if True:\n", {LATE}),
    "the ranks never meet before": ("    if before:\n", "    if False:\n", {LATE}),
}
ON_FOUR = {  # as plain python plays it: the shares of S are those of its rows
    "a root that tells everybody itself": (  # the tree beats it from four ranks on
        (
            "    dist.broadcast(out, src=ROOT)\n",
            "    for rank in range(WORLD_SIZE):\n"
            "        if RANK == ROOT and rank != ROOT:\n            dist.send(out, rank)\n"
            "        if RANK == rank and rank != ROOT:\n            dist.recv(out, ROOT)\n",
        ),
        traffic_of("broadcast", "1"),
    ),
    "no scatter": (
        ("    dist.scatter(out, chunks, src=ROOT)\n", ""),
        values("scatter") | traffic_of("scatter", "0.75"),
    ),
    "no gather": (
        ("    dist.gather(x, chunks, dst=ROOT)\n", ""),
        values("gather") | traffic_of("gather", "0.75"),
    ),
    "all_reduce twice over": (
        (
            "    dist.all_reduce(out)\n",
            "    dist.all_reduce(out.clone())\n    dist.all_reduce(out)\n",
        ),
        traffic_of("all_reduce", "1.5"),
    ),
    "all_gather without the others": (
        ("    dist.all_gather_into_tensor(out, x)\n", "    out.copy_(x.expand_as(out))\n"),
        values("all_gather") | traffic_of("all_gather", "0.75"),
    ),
    "no reduce_scatter": (
        ("dist.reduce_scatter_tensor(out, x)", "out.copy_(x[:1])"),
        values("reduce_scatter") | traffic_of("reduce_scatter", "0.75"),
    ),
    "all_to_all with nobody": (
        ("dist.all_to_all_single(out, x)", "out.copy_(x)"),
        values("all_to_all") | traffic_of("all_to_all", "0.75"),
    ),
}
SOON = ("timedelta(seconds=20)", "timedelta(seconds=2)")  # until rank 0 no longer waits for nobody
BREAKS = [
    Breaks(MOVED, changes=only(MOVES), most=8),
    Breaks(WAITED, changes=[*only(WAITS), SOON]),
    Breaks(SKIPPED, changes=only(SKIPS)),
    Breaks(ON_FOUR, ranks=4, changes=only(MOVES), most=8),
    Breaks(BILLED, changes=only(CLOCK), clock=True),
]


def PLAIN(played: Played) -> None:
    """What is printed of the skipped call: two sums that mix steps, and then the error."""
    n = int(played.output.partition(" ranks")[0])
    own = n * (n - 1) // 2  # the sum of all ranks' numbers
    sums = [100.0 + own, 100.0 * n + 100 + own]
    assert f"rank 0 got {sums}, then:\n" in played.output


# Values that no row shows


def test_an_error_is_the_largest_in_either_direction() -> None:
    lesson = load(LESSON)
    ours, expected = torch.tensor([1.0, -2.0]), torch.tensor([1.5, -8.0])
    assert lesson.largest_error(ours, expected) == lesson.largest_error(expected, ours) == 6
    assert lesson.relative_error(ours, expected) == 6 / 8


def done_by_the_clock(before: bool, after: bool) -> tuple[list, float]:
    """What rank 1 of two does around an all-reduce of 5 s, and the seconds that are told."""
    lesson = load(LESSON)
    lesson.RANK, lesson.WORLD_SIZE = 1, 2
    now, done = [0.0], []

    def spend(what: str, seconds: float) -> None:
        done.append(what)
        now[0] += seconds

    lesson.settle = lambda x: spend("settle", 100)
    sleep = partial(spend, "late")
    lesson.time = SimpleNamespace(perf_counter=lambda: now[0], sleep=sleep)
    lesson.dist = SimpleNamespace(all_reduce=lambda x: spend("all_reduce", 5))
    lesson.gather_objects = lambda seconds: [seconds, seconds + 1000, 0]
    return done, lesson.seconds_by_the_clock(torch.ones(1), before, after)


def test_the_clock_starts_after_all_have_met_and_stops_after_all_are_done() -> None:
    done, seconds = done_by_the_clock(before=True, after=True)
    assert done == ["settle", "late", "settle", "all_reduce", "settle"]
    assert seconds == pytest.approx(1105)  # of the slowest rank
    done, seconds = done_by_the_clock(before=True, after=False)
    assert done == ["settle", "late", "settle", "all_reduce"]
    assert seconds == pytest.approx(1005)
    done, seconds = done_by_the_clock(before=False, after=False)
    assert done == ["settle", "late", "all_reduce"]
    assert seconds == pytest.approx(1005)


@pytest.mark.parametrize(("billed", "verdict"), [(0.31, "PASS"), (0.02, "FAIL"), (0.61, "FAIL")])
def test_lateness_is_what_an_unsettled_clock_adds(billed: float, verdict: str) -> None:
    """300 ms are planted; an all-reduce takes 10 ms."""
    lesson = load(LESSON)

    def seconds(x: torch.Tensor, before: bool = True, after: bool = True) -> float:
        return 0.01 if before else billed

    lesson.seconds_by_the_clock = seconds
    lesson.sides_of_a_clock(torch.device("cpu"))
    assert [row["verdict"] for row in lesson.ledger] == [verdict, "BLOCKED"]


def test_speeds_of_1_gib_are_by_the_whole_array_and_what_must_be_moved(monkeypatch, capsys) -> None:
    """4 ms on four GPUs; each NVLink counter moves by the bytes of rings."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    lesson = load(LESSON)
    asked, counter = [], [0]

    class Array:
        def __init__(self, n: int, device: object) -> None:
            self.n, self.nbytes = n, 4 * n

        def __len__(self) -> int:
            return self.n

    def call(name: str, share: float, *arrays: Array) -> None:
        asked.append((name, *(len(array) for array in arrays)))
        counter[0] += int(share * 2**30)

    calls = {"all_reduce": partial(call, "all_reduce", 1.5)}
    calls["all_gather_into_tensor"] = partial(call, "all_gather", 0.75)
    calls["reduce_scatter_tensor"] = partial(call, "reduce_scatter", 0.75)
    lesson.dist = SimpleNamespace(**calls, is_initialized=lambda: False)
    lesson.torch = SimpleNamespace(zeros=Array, cuda=Mock())
    lesson.median_ms = lambda way: 4.0
    lesson.gather_objects = lambda value: [value]
    lesson.sent_by_nvlink = lambda device: counter[0]
    lesson.nvlinks_one_way = lambda device: 450
    judged = []
    lesson.judge_nvlink = lambda *what: judged.append(what)
    lesson.measure_on_gpus(SimpleNamespace(type="cuda"))
    whole, part = 2**28, 2**26
    assert asked == [
        ("all_reduce", whole),
        ("all_gather", whole, part),
        ("reduce_scatter", part, whole),
    ]
    algbw = 2**30 / 4e-3 / 1e9
    assert judged == [pytest.approx((1.5, 1.5 * algbw, 450))]
    told = capsys.readouterr().out.splitlines()
    assert f"algbw {algbw:.0f} GB/s, busbw {0.75 * algbw:.0f} GB/s, over NVLink 0.75 S" in told[1]
    assert [row["measured"] for row in lesson.ledger] == [0.5]  # ms of one / of both halves


class Machine:
    """NVML of a node of GPUs whose links have this version; `joined` says whether by NVLink."""

    NVMLError = RuntimeError
    NVML_P2P_CAPS_INDEX_NVLINK = 3
    NVML_NVLINK_MAX_LINKS = 18
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = 138

    def __init__(self, links: int, version: int, joined: bool = True) -> None:
        self.links, self.version, self.joined = links, version, joined

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetP2PStatus(self, a: str, b: str, index: int) -> int:
        assert a == "GPU-2" != b
        return 0 if self.joined else 5

    def nvmlDeviceGetNvLinkState(self, a: str, link: int) -> bool:
        if link >= self.links:
            raise self.NVMLError
        return True

    def nvmlDeviceGetNvLinkVersion(self, a: str, link: int) -> int:
        return self.version

    def nvmlDeviceGetFieldValues(self, a: str, fields: list) -> list[SimpleNamespace]:
        assert (a, fields) == ("GPU-2", [(138, 0xFFFFFFFF)])
        return [SimpleNamespace(value=SimpleNamespace(ullVal=3), nvmlReturn=self.version == 0)]


def on(machine: Machine, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", machine)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)

    def properties(gpu: int | torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=str(getattr(gpu, "index", gpu)))

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    return load(LESSON)


@pytest.mark.parametrize(
    ("links", "version", "joined", "rate"),
    [
        (4, 1, True, 80),  # P100
        (6, 2, True, 150),  # V100
        (12, 4, True, 300),  # A100
        (18, 6, True, 450),  # H100
        (18, 7, True, 900),  # B200
        (18, 6, False, 0),
    ],
)
def test_nvlinks_of_a_gpu_carry_what_is_published(
    links: int, version: int, joined: bool, rate: int, monkeypatch
) -> None:
    lesson = on(Machine(links, version, joined), monkeypatch)
    assert lesson.nvlinks_one_way(torch.device("cuda", 2)) == rate


def test_nvml_counts_what_nvlink_sent_in_kib(monkeypatch) -> None:
    for version, sent in ((6, 3 * 1024), (0, 0)):
        lesson = on(Machine(18, version), monkeypatch)
        assert lesson.sent_by_nvlink(torch.device("cuda", 2)) == sent


def test_the_median_on_a_gpu_leaves_the_first_three_out(monkeypatch) -> None:
    took = iter([0.5, 0.5, 0.5, 5.0, 1.0, 2.0, 4.0, 3.0])
    event = Mock(elapsed_time=lambda end: next(took))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    work = Mock()
    assert load(LESSON).median_ms(work, repeats=5) == 3.0
    assert work.call_count == 8
