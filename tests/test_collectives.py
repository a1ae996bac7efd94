"""The lesson on collectives: its definitions, its counting, and that each claim can fail."""

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from exercises.ranks import run
from tests.lessons import load, play

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


def calls() -> dict[str, list[float]]:
    lesson = load(LESSON)
    X = torch.tensor([[10.0 * r + j for j in range(lesson.N)] for r in range(lesson.N)])
    held = {}
    for name, (before, call, after, *_) in lesson.COLLECTIVES.items():
        out = torch.full_like(after(X, lesson.RANK), torch.nan)
        call(out, before(X, lesson.RANK).clone())
        held[name] = out.tolist()
    return held


def test_each_rank_holds_what_the_standard_says() -> None:
    held = run(calls, 4)
    assert {name: [held[r][name] for r in range(4)] for name in held[0]} == HELD_AFTER


def test_a_picture_shows_what_was_gathered_and_stays_narrow() -> None:
    lesson = load(LESSON)
    lesson.N = 4
    drawn = lesson.picture("gather", [[0], [10], [20], [30]], HELD_AFTER["gather"])
    lines = drawn.splitlines()[1:]
    assert lines[0].split() == ["gather", "rank", "0", "00", "→", "."]
    assert lines[1].split() == ["rank", "1", "10", "→", "00", "10", "20", "30"]
    assert len({line.index("→") for line in lines}) == 1
    lesson.N = 64
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
        return {name: row[3] for name, row in load(LESSON).COLLECTIVES.items()}

    for n in (2, 3):
        part = (n - 1) / n
        once = dict.fromkeys(("scatter", "gather", "all_gather", "reduce_scatter"), part)
        rest = {"broadcast": 1, "reduce": 1, "all_to_all": part, "all_reduce": 2 * part}
        assert run(shares, n)[0] == once | rest


def test_prices_use_the_constants_torch_has_from_nccl() -> None:
    from torch._inductor import comm_analysis as theirs

    lesson = load(LESSON)
    for row, algorithm in enumerate(("Tree", "Ring")):
        start, near, far, _ = lesson.NCCL[algorithm]
        assert list(start) == theirs.baseLat[row]
        assert list(near) == theirs.hwLat[theirs.NCCL_HW.NVLINK][row]
        assert list(far) == theirs.hwLat[theirs.NCCL_HW.NET][row]


ways = st.sampled_from(list(itertools.product(("Ring", "Tree"), ("LL", "LL128", "Simple"))))


@settings(max_examples=200, deadline=None)
@given(ways, st.sampled_from((1, 2, 4, 8)), st.integers(0, 2**33), st.integers(1, 2**33))
def test_a_price_is_linear_in_bytes(way: tuple, nodes: int, size: int, more: int) -> None:
    price = load_once().price
    start = price(way, nodes, 0)
    slope = price(way, nodes, 1 << 20) - start
    assert price(way, nodes, size) == pytest.approx(start + slope * size / (1 << 20))
    assert price(way, nodes, size + more) > price(way, nodes, size)


def load_once(cache: list = []) -> object:  # noqa: B006
    cache.append(load(LESSON)) if not cache else None
    return cache[0]


def test_low_latency_comes_first_and_the_ring_last() -> None:
    """Across nodes the tree takes small messages and the ring large ones; LL gives way for good."""
    lesson = load_once()
    every = list(itertools.product(lesson.NCCL, lesson.PROTOCOLS))
    for nodes in (1, 4, 16):
        best = [min(every, key=lambda w: lesson.price(w, nodes, 2**e)) for e in range(6, 36)]
        assert best[0] == ("Ring" if nodes == 1 else "Tree", "LL")
        assert best[-1] == ("Ring", "Simple")
        low_latency = [protocol == "LL" for _, protocol in best]
        assert low_latency == sorted(low_latency, reverse=True)
        if nodes > 1:
            algorithms = [algorithm for algorithm, _ in best]
            assert algorithms == sorted(algorithms, reverse=True)


def values(*names: str) -> set[str]:
    return {f"{name}, distance from one process" for name in names}


def traffic_of(name: str, must: str) -> set[str]:
    return {f"{name}: must {must} S, gloo moves"}


CAME = "ranks that had come when the barrier let go"
UNDONE = "ranks back, work undone, before rank 0 calls"
SUMMED = "after wait(), distance from the sum"
SUMS = "sums handed out after the skip, without an error"
OFF = "each is off by the skipper's next step, 100"
ENDED = "ranks that waited in vain, ended by the timeout"
LATE = "share of one rank's lateness billed to the network"
MOVES = "bytes_on_the_wire"  # the sections to run, of those for several ranks
WAITS, SKIPS, CLOCK = "who_waits_for_whom", "one_rank_skips", "sides_of_a_clock"

BREAKS = {  # what is broken, at two ranks: section, (old, new), the claims to FAIL and no other
    "no broadcast": (
        MOVES,
        ("dist.broadcast(out.copy_(x), ROOT)", "out.copy_(x)"),
        values("broadcast") | traffic_of("broadcast", "1"),
    ),
    "scatter in the wrong order": (
        MOVES,
        (
            "dist.scatter(out, at_root(list(x.split(1)), RANK)",
            "dist.scatter(out, at_root(list(x.flip(0).split(1)), RANK)",
        ),
        values("scatter"),
    ),
    "no scatter": (
        MOVES,
        ("dist.scatter(out, at_root(list(x.split(1)), RANK), ROOT)", "None"),
        values("scatter") | traffic_of("scatter", "0.5"),
    ),
    "no gather": (
        MOVES,
        ("dist.gather(x, at_root(list(out.split(1)), RANK), ROOT)", "None"),
        values("gather") | traffic_of("gather", "0.5"),
    ),
    "reduce by MAX": (
        MOVES,
        ("dist.reduce(x, ROOT)", "dist.reduce(x, ROOT, dist.ReduceOp.MAX)"),
        values("reduce"),
    ),
    "no reduce": (
        MOVES,
        ("    dist.reduce(x, ROOT)\n", ""),
        values("reduce") | traffic_of("reduce", "1"),
    ),
    "all_reduce by MAX": (
        MOVES,
        ("dist.all_reduce(out.copy_(x))", "dist.all_reduce(out.copy_(x), dist.ReduceOp.MAX)"),
        values("all_reduce"),
    ),
    "all_reduce twice over": (
        MOVES,
        (
            "lambda out, x: dist.all_reduce(out.copy_(x))",
            "lambda out, x: (dist.all_reduce(x.clone()), dist.all_reduce(out.copy_(x)))",
        ),
        traffic_of("all_reduce", "1"),
    ),
    "all_gather without the others": (
        MOVES,
        ("dist.all_gather_into_tensor,", "lambda out, x: out.copy_(x.expand_as(out)),"),
        values("all_gather") | traffic_of("all_gather", "0.5"),
    ),
    "reduce_scatter of the wrong chunk": (
        MOVES,
        (
            "dist.reduce_scatter_tensor,",
            "lambda out, x: dist.reduce_scatter_tensor(out, x.flip(0)),",
        ),
        values("reduce_scatter"),
    ),
    "no reduce_scatter": (
        MOVES,
        ("dist.reduce_scatter_tensor,", "lambda out, x: out.copy_(x[:1]),"),
        values("reduce_scatter") | traffic_of("reduce_scatter", "0.5"),
    ),
    "all_to_all with nobody": (
        MOVES,
        ("dist.all_to_all_single,", "torch.Tensor.copy_,"),
        values("all_to_all") | traffic_of("all_to_all", "0.5"),
    ),
    "every operator is SUM": (
        MOVES,
        ("getattr(dist.ReduceOp, name)", "dist.ReduceOp.SUM"),
        values("AVG", "MIN", "MAX", "PRODUCT"),
    ),
    "every operator is MAX": (
        MOVES,
        ("getattr(dist.ReduceOp, name)", "dist.ReduceOp.MAX"),
        values("SUM", "AVG", "MIN", "PRODUCT"),
    ),
    "halves that only gather": (
        MOVES,
        (
            "    dist.reduce_scatter_tensor(shard, x)\n",
            "    shard.copy_(x[RANK * 1000 :][:1000])\n",
        ),
        {"numbers whose bits differ, all_reduce and halves"},
    ),
    "a ring that sends everything at every hop": (
        MOVES,
        ("2 * (nodes - 1), 2 * (n - 1) / n\n", "2 * (nodes - 1), 2 * (n - 1)\n"),
        {f"busbw of 8 {gpu}, GB/s: priced, published" for gpu in ("A100", "H100")},
    ),
    "no barrier": (WAITS, ('    dist.barrier()\n    claim("ranks', '    claim("ranks'), {CAME}),
    "a call that waits": (
        WAITS,
        ("x, async_op=True)\n", "x, async_op=True)\n    work.wait()\n"),
        {UNDONE},
    ),
    "another sum": (WAITS, ("RANK + 1.0, device", "RANK + 2.0, device"), {SUMMED}),
    "no skip": (SKIPS, ("if RANK < N - 1 or step > 0:", "if True:"), {SUMS, OFF, ENDED}),
    "one step more": (SKIPS, ("for step in range(3)", "for step in range(4)"), {SUMS}),
    "smaller losses": (SKIPS, ("100.0 * step + RANK", "10.0 * step + RANK"), {OFF}),
    "an error unseen": (SKIPS, ("error = str(timeout)", "pass"), {ENDED}),
    "both clocks settled": (CLOCK, ('settle() if skip != "before" else None', "settle()"), {LATE}),
    "neither clock settled": (CLOCK, ('settle() if skip != "before" else None', "pass"), {LATE}),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_a_broken_line_fails_its_claims_and_no_other(broken: str) -> None:
    section, change, failing = BREAKS[broken]
    every = ", ".join((MOVES, WAITS, SKIPS, CLOCK))
    played = play(LESSON, 2, (f"in {every}:", f"in [{section}]:"), change)
    assert played.failed == failing, played.output
    assert played.code == 1


def test_the_unbroken_lesson_passes_at_three_ranks() -> None:
    played = play(LESSON, 3)
    assert played.failed == set()
    assert played.code == 0, played.output
    assert "rank 0 got [103.0, 403.0], then: " in played.output


def test_at_four_ranks_the_tree_beats_a_root_that_tells_everybody_itself() -> None:
    flat = ("1, DEPTH)", "1, N - 1)")
    every = ", ".join((MOVES, WAITS, SKIPS, CLOCK))
    played = play(LESSON, 4, (f"in {every}:", f"in [{MOVES}]:"), flat)
    assert played.failed == traffic_of("broadcast", "1")
