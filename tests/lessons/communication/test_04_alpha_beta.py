"""Prices against textbooks and NCCL's own constants; fits; broken lines fail their claims."""

from fractions import Fraction
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from course.playing import Played, load
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "communication/04_alpha_beta.py"
ON_GPUS = OnGpus(
    changes=[
        ("[4**6, 4**10, 4**13, 4**15]", "[4**6, 4**10, 4**13]"),
        (
            "    for _ in range(3):\n        for size in sizes:",
            "    for size in sizes:\n        if size:",
        ),
    ]
)


@pytest.fixture(scope="module")
def lesson():
    return load(LESSON)


@pytest.mark.parametrize("n", range(2, 17))
def test_prices_are_the_textbooks(lesson, n: int) -> None:
    log, power = n.bit_length() - 1, n & (n - 1) == 0
    due = {"star": (2 * (n - 1), 2 * (n - 1)), "ring": (2 * (n - 1), 2 * Fraction(n - 1, n))}
    halving, doubling = "recursive halving-doubling", "recursive doubling"
    if power:
        due[halving] = (2 * log, 2 * Fraction(n - 1, n))
        due[doubling] = (log, log)
        due["tree"] = (3 * log - 1, 3 * log - 1)
        if n > 2:
            due["double tree"] = (3 * log, Fraction(3 * log, 2))
    else:
        due[doubling] = (log + 2, log + 2)
    for name, (steps, share) in due.items():
        N = 256 * n
        schedule = lesson.ALL_REDUCE[name](n, N, lesson.WHOLE)
        assert lesson.terms(lesson.ALL_REDUCE[name], n) == pytest.approx((steps, float(share)))
        both = lesson.price(schedule, n, 2, 3 / N)
        assert both == pytest.approx(float(2 * steps + 3 * share))
        if power and (n > 2 or name != "double tree"):
            assert lesson.formulas(n)[name] == pytest.approx((steps, float(share)))
    assert (
        lesson.terms(lesson.double_tree_schedule, n)[1] < lesson.terms(lesson.tree_schedule, n)[1]
        or n == 2
    )
    if n > 3:
        assert lesson.terms(lesson.tree_schedule, n)[0] < lesson.terms(lesson.ring_schedule, n)[0]


@pytest.mark.parametrize("n", [4, 8, 16, 64])
def test_a_star_is_never_the_cheapest(lesson, n: int) -> None:
    """Its root handles n - 1 messages in each of its two steps, and pays for each of them."""
    for nbytes in (0, 1, 1e6):
        prices = {}
        for name, algorithm in lesson.ALL_REDUCE.items():
            alphas, shares = lesson.terms(algorithm, n)
            prices[name] = alphas + shares * nbytes
        assert prices["star"] == max(prices.values())


def test_a_rank_pays_for_each_message_of_a_step_and_waits_for_its_peers(lesson) -> None:
    def move(source: int, target: int, elements: int = 1) -> lesson.Move:
        return lesson.Move(source, target, 0, elements, add=True)

    assert lesson.price([[move(1, 0), move(2, 0), move(3, 0)]], 4, 1, 0) == 3
    assert lesson.price([[move(0, 1), move(1, 0)]], 2, 1, 0) == 1  # both directions at once
    late = [[move(0, 1, 10)], [move(2, 1)]]  # rank 2 is free at once, its receiver after 10
    assert lesson.price(late, 3, 0, 1) == 11
    assert lesson.price([*late, [move(2, 3)]], 4, 0, 1) == 12  # and so was rank 2, as its sender


def test_the_fit_finds_the_constants_and_the_crossing_is_between(lesson) -> None:
    costs = {"a": (6, 1.5), "b": (4, 5.0)}
    sizes = [3000 * 3**k for k in range(6)]
    curves = {k: {s: a * 2e-3 + b * s * 1e-8 for s in sizes} for k, (a, b) in costs.items()}
    alpha, a_byte = lesson.fit_alpha_beta(costs, curves, sizes[::2])
    assert alpha == pytest.approx(2e-3)
    assert a_byte == pytest.approx(1e-8)
    for name, curve in lesson.predict_seconds(costs, alpha, a_byte, sizes).items():
        assert curve == pytest.approx(curves[name])
    where = 2 * 2e-3 / (3.5 * 1e-8)
    assert lesson.crossing(curves["a"], curves["b"]) == pytest.approx(where)
    never = lesson.crossing(curves["b"], curves["a"])
    assert never != never


def test_nccl_constants_are_those_torch_has_from_nccl(lesson) -> None:
    from torch._inductor import comm_analysis as theirs

    for row, algorithm in enumerate(("tree", "ring")):
        ways = [way for way in lesson.WAYS if way.algorithm == algorithm]
        assert [way.protocol for way in ways] == ["LL", "LL128", "Simple"]
        assert [way.base for way in ways] == theirs.baseLat[row]
        nvlink, network = theirs.NCCL_HW.NVLINK, theirs.NCCL_HW.NET
        assert [way.nvlink_step for way in ways] == theirs.hwLat[nvlink][row]
        assert [way.network_step for way in ways] == theirs.hwLat[network][row]


def test_nccl_bandwidth_shares_are_those_of_its_source(lesson) -> None:
    """Typed in from NCCL 2.30.7, src/graph/tuning.cc, lines 250 to 340."""
    shares = {(way.algorithm, way.protocol): way[5:] for way in lesson.WAYS}
    assert shares == {
        ("ring", "LL"): (0.5, 0.5),
        ("ring", "LL128"): (0.92, 0.92),
        ("ring", "Simple"): (1, 1),
        ("tree", "LL"): (0.92 / 3.8, 0.92 / 3.8),
        ("tree", "LL128"): (0.92 * 7 / 9, 0.92 * 120 / 128),
        ("tree", "Simple"): (0.92, 0.92),
    }


KiB, MiB, GiB = 2**10, 2**20, 2**30
BY_HAND = [  # nodes, bytes, who wins, microseconds: base + steps + bytes over the wire
    (1, KiB, "ring LL", 6.6 + 14 * 0.6 + KiB * 1.75 / 141e3),
    (1, 2 * MiB, "ring LL", 6.6 + 14 * 0.6 + 2 * MiB * 1.75 / 141e3),
    (1, GiB, "ring Simple", 8.4 + 14 * 3.4 + GiB * 1.75 / 370.8e3),
    (4, KiB, "tree LL", 6.8 + 14 * 0.6 + 4 * 5 + KiB * 2 / 20.4e3),
    (4, MiB, "tree LL128", 14 + 14 * 1.25 + 4 * 8.5 + MiB * 2 / (370.8e3 * 0.92 * 0.9375)),
    (4, GiB, "ring Simple", 8.4 + 56 * 3.4 + 6 * 14 + GiB * 1.9375 / 370.8e3),
]


@pytest.mark.parametrize(("nodes", "nbytes", "who", "us"), BY_HAND)
def test_nccl_prices_by_hand(lesson, nodes: int, nbytes: int, who: str, us: float) -> None:
    price, way = lesson.cheapest(nodes, nbytes)
    assert f"{way.algorithm} {way.protocol}" == who
    assert price == pytest.approx(us)


def test_posting_to_the_network_costs_a_ring_time(lesson) -> None:
    us = 6.6 + 56 * 1 + 6 * 2.7 + KiB * 1.9375 / 20.4e3
    assert lesson.nccl_us(lesson.WAYS[0], 4, KiB) == pytest.approx(us)


places = st.sampled_from(range(6)), st.sampled_from((1, 2, 4, 8))


@settings(max_examples=200, deadline=None)
@given(*places, st.integers(0, 2**33), st.integers(1, 2**33))
def test_nccl_prices_are_linear_in_bytes(way: int, nodes: int, size: int, more: int) -> None:
    here = load_once()
    us = [here.nccl_us(here.WAYS[way], nodes, s) for s in (0, 1 << 20, size, size + more)]
    assert us[2] == pytest.approx(us[0] + (us[1] - us[0]) * size / (1 << 20))
    assert us[3] > us[2]


def load_once(cache: list = []) -> object:  # noqa: B006
    cache.append(load(LESSON)) if not cache else None
    return cache[0]


def test_low_latency_comes_first_and_the_ring_last(lesson) -> None:
    """Across nodes the tree takes small messages and the ring large ones; LL gives way for good."""
    for nodes in (1, 4, 16):
        best = [lesson.cheapest(nodes, 2**e)[1] for e in range(6, 36)]
        assert (best[0].algorithm, best[0].protocol) == ("ring" if nodes == 1 else "tree", "LL")
        assert (best[-1].algorithm, best[-1].protocol) == ("ring", "Simple")
        low_latency = [way.protocol == "LL" for way in best]
        assert low_latency == sorted(low_latency, reverse=True)
        if nodes > 1:
            algorithms = [way.algorithm for way in best]
            assert algorithms == sorted(algorithms, reverse=True)


BOTH_WAYS = {"ring", "double tree", "recursive doubling", "recursive halving-doubling"}
PRICE = "alphas", "S / beta"
LINES = {
    "a step costs what is sent and what is received": (
        ("elements = max(sent[rank], received[rank])", "elements = sent[rank] + received[rank]"),
        {f"{name}: S / beta" for name in BOTH_WAYS} | {"double tree in 64 pieces: S / beta"},
    ),
    "an alpha per step, however many messages": (
        ("start[rank] + alpha * messages +", "start[rank] + alpha +"),
        {f"{name}: alphas" for name in ("star", "tree", "double tree", "double tree in 64 pieces")},
    ),
    "steps that do not wait for their peers": (
        "both_there = max(clock[move.source], clock[move.target])",
        "both_there = 0",
        {f"{tree}: {price}" for tree in ("tree", "double tree") for price in PRICE}
        | {f"double tree in 64 pieces: {price}" for price in PRICE},
    ),
}
BREAKS = Breaks(LINES, ranks=1, alone=["steps that do not wait for their peers"])


def PLAIN(played: Played) -> None:
    assert "without sleeping" in played.output


# Times, made up: what the claims say of them


def judged(lesson: ModuleType, n: int, seconds: ModuleType) -> dict[str, str]:
    """The verdicts of `lesson` on times that are what `seconds` says a slow link takes."""
    lesson.ledger.clear()
    lesson.WORLD_SIZE = n
    costs = {name: lesson.terms(algorithm, n) for name, algorithm in lesson.ALL_REDUCE.items()}
    took = {name: seconds.terms(algorithm, n) for name, algorithm in seconds.ALL_REDUCE.items()}
    sizes = [3000 * 3**k for k in range(5)]
    curves = {}
    for name, (alphas, shares) in took.items():
        curves[name] = {s: alphas * seconds.ALPHA + shares * s / seconds.BETA for s in sizes}
    lesson.check_curves(costs, curves)
    return {row["claim"]: row["verdict"] for row in lesson.ledger}


CROSSING = "ring beats tree: from bytes / predicted"


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_times_as_priced_are_accepted(lesson: ModuleType, n: int) -> None:
    verdicts = judged(load(LESSON), n, lesson)
    assert len(verdicts) == 7
    assert verdicts.pop(CROSSING) == ("BLOCKED" if n < 4 else "PASS")
    assert {*verdicts.values()} == {"PASS"}


BOTH_ADDED = (
    "elements = max(sent[rank], received[rank])",
    "elements = sent[rank] + received[rank]",
)
PER_STEP = ("start[rank] + alpha * messages +", "start[rank] + alpha +")
PRICES = {
    "a price that sends all of S in every algorithm": (
        "alphas * alpha + shares * s * seconds_per_byte",
        "alphas * alpha + s * seconds_per_byte",
    ),
    "prices that add up both directions": BOTH_ADDED,
    "an alpha per step, however many messages": PER_STEP,
}


@pytest.mark.parametrize("what", PRICES)
def test_times_at_a_wrong_price_are_refused(lesson: ModuleType, what: str) -> None:
    assert "FAIL" in judged(load(LESSON, PRICES[what]), 4, lesson).values()


def test_a_link_that_is_not_as_planted_is_refused(lesson: ModuleType) -> None:
    """Without a bandwidth, both directions added up, or one alpha for all messages of a step."""
    endless = load(LESSON)
    endless.BETA = float("inf")
    for link in endless, load(LESSON, BOTH_ADDED), load(LESSON, PER_STEP):
        assert "FAIL" in judged(load(LESSON), 4, link).values()


def slept(name: str, nbytes: int) -> float:
    here = load(LESSON)
    naps = []
    here.time = SimpleNamespace(sleep=naps.append)
    here.run_on_slow_link(here.ALL_REDUCE[name], torch.zeros(nbytes // 4))
    return sum(naps)


def test_a_rank_sleeps_an_alpha_for_each_message(lesson: ModuleType) -> None:
    """Rank 0 of a star receives three messages, then sends three; the others one and one."""
    S = 16_000 / lesson.BETA
    due = [6 * lesson.ALPHA + 6 * S] + 3 * [2 * lesson.ALPHA + 2 * S]
    assert run(slept, 4, "star", 16_000) == pytest.approx(due)


def test_pieces_are_judged_by_their_share_of_the_time(lesson: ModuleType) -> None:
    here = load(LESSON)
    for seconds in ([0.150, 0.085], [0.150, 0.150], [0.150, 0.020]):  # as priced, no gain, too good
        here.judge_pieces([3, 1.6875], seconds)
    assert [row["verdict"] for row in here.ledger] == ["PASS", "FAIL", "FAIL"]


@pytest.mark.parametrize("name", ["ring", "recursive doubling", "recursive halving-doubling"])
def test_a_rank_sleeps_for_what_it_sends_or_receives(lesson: ModuleType, name: str) -> None:
    """Where all ranks do the same: alpha in each step, and the larger of both directions."""
    alphas, shares = lesson.terms(lesson.ALL_REDUCE[name], 4)
    due = alphas * lesson.ALPHA + shares * 16_000 / lesson.BETA
    assert run(slept, 4, name, 16_000) == [pytest.approx(due)] * 4


# Values that no row shows


@pytest.mark.parametrize(
    ("nodes", "us"),
    [
        (1, 6.6 + 14 * 0.6 + MiB * 1.75 / 141e3),
        (2, 6.6 + 28 * 1 + 2 * 2.7 + MiB * 1.875 / 39e3),
        (3, 6.6 + 42 * 1 + 4 * 2.7 + MiB * 2 * 23 / 24 / 20.4e3),
    ],
)
def test_low_latency_has_a_limit_that_depends_on_the_nodes(lesson, nodes: int, us: float) -> None:
    """NCCL 2.30.7, src/graph/tuning.cc: llMaxBws of Hopper."""
    assert lesson.nccl_us(lesson.WAYS[0], nodes, MiB) == pytest.approx(us)


def test_a_tree_crosses_two_nodes_up_and_down(lesson) -> None:
    us = 8.4 + 14 * 4.0 + 2 * 14 + MiB * 2 / (370.8e3 * 0.92)
    assert lesson.nccl_us(lesson.WAYS[5], 2, MiB) == pytest.approx(us)


def test_the_table_shows_who_wins_and_what_is_published(lesson, capsys) -> None:
    lesson.show_nccl_choices()
    lines = capsys.readouterr().out.splitlines()[2:]
    sizes = {"1 KiB": KiB, "16 KiB": 16 * KiB, "256 KiB": 256 * KiB}
    sizes |= {"4 MiB": 4 * MiB, "64 MiB": 64 * MiB, "1 GiB": GiB}
    for line, (name, nbytes) in zip(lines[:6], sizes.items(), strict=True):
        told = line.removeprefix(f"  {name}").split()
        expected = []
        for nodes in (1, 4):
            us, way = lesson.cheapest(nodes, nbytes)
            expected += [way.algorithm, way.protocol, f"{us:,.0f}", "us"]
        assert told == expected
    assert lines[6] == "  8 A100, ring: busbw 240 GB/s by this model, 235 published"
    assert lines[7] == "  8 H100, ring: busbw 370 GB/s by this model, 370 published"


def sums(ways: list[str]) -> list[str]:
    """The ways and algorithms that do not leave the sum of all ranks' numbers."""
    here = load(LESSON)
    here.time = SimpleNamespace(sleep=lambda seconds: None)
    wrong = []
    for way in ways:
        for name, algorithm in here.ALL_REDUCE.items():
            for length in (0, 5, 1000):
                x = torch.arange(length, dtype=torch.float64) + here.RANK
                expected = here.WORLD_SIZE * torch.arange(length, dtype=torch.float64)
                getattr(here, way)(algorithm, x)
                if not torch.equal(x, expected + sum(range(here.WORLD_SIZE))):
                    wrong.append(f"{name}, {way}")
    return wrong


@pytest.mark.parametrize("ranks", [3, 4])
def test_what_is_timed_are_all_reduces(ranks: int) -> None:
    assert run(sums, ranks, ["run_on_slow_link", "run_at_full_speed"]) == [[]] * ranks


def test_without_sleeping_a_message_of_a_tree_has_four_mib() -> None:
    here = load(LESSON)
    asked = []

    def steps(algorithm: object, N: int, piece: int) -> list:
        asked.append((algorithm, N, piece))
        return []

    here.steps_of_this_rank = steps
    here.run_at_full_speed("a tree", torch.zeros(12))
    here.run_at_full_speed("a tree", torch.zeros(12, dtype=torch.bfloat16))
    assert asked == [("a tree", 12, 2**20), ("a tree", 12, 2**21)]


def test_the_best_of_three_counts_for_each_algorithm_and_size() -> None:
    here = load(LESSON)
    took = iter([5.0, 8.0, 50.0, 80.0, 3.0, 9.0, 60.0, 70.0, 4.0, 7.0, 40.0, 90.0])
    tried = []

    def slowest_seconds(work, device: torch.device, calls: int) -> float:
        assert calls == 2
        work()
        return next(took)

    here.slowest_seconds = slowest_seconds
    runs = {name: lambda x, name=name: tried.append((name, x.nbytes)) for name in ("ring", "tree")}
    curves = here.measure(runs, [4096, 65536], torch.device("cpu"), calls=2)
    assert curves == {"ring": {4096: 3.0, 65536: 40.0}, "tree": {4096: 7.0, 65536: 70.0}}
    once = [("ring", 4096), ("tree", 4096), ("ring", 65536), ("tree", 65536)]
    assert tried == 3 * once


def _slowest() -> float:
    here = load(LESSON)
    now = [0.0]
    here.time = SimpleNamespace(perf_counter=lambda: now[0])

    def work() -> None:
        now[0] += 1.0 + here.RANK

    return here.slowest_seconds(work, torch.device("cpu"), calls=3)


def test_a_time_is_per_call_and_of_the_slowest_rank() -> None:
    assert run(_slowest, 2) == pytest.approx([2.0, 2.0])


def test_a_double_tree_whole_is_compared_with_one_in_eight_pieces() -> None:
    """Without alphas; on four ranks 3 S / beta against 1.6875."""
    here = load(LESSON)
    here.WORLD_SIZE = 4
    timed = {}

    def measure(runs: dict, sizes: list[int], device: torch.device) -> dict:
        timed.update({pieces: work.keywords for pieces, work in runs.items()})
        return {pieces: {sizes[0]: float(pieces)} for pieces in runs}

    judged = []
    here.measure = measure
    here.judge_pieces = lambda *what: judged.append(what)
    here.check_pieces_on_slow_link(torch.device("cpu"))
    half = 2**17  # elements
    assert timed == {1: {"piece": half, "alpha": 0.0}, 8: {"piece": half // 8, "alpha": 0.0}}
    ((shares, seconds),) = judged
    assert shares == pytest.approx([3, 1.6875])
    assert seconds == [1.0, 8.0]


def test_busbw_without_sleeping_is_that_of_the_largest_buffer(capsys) -> None:
    here = load(LESSON)
    here.WORLD_SIZE = 4

    def measure(runs: dict, sizes: list[int], device: torch.device, calls: int) -> dict:
        return {name: {size: 1e-5 + size / 2e9 for size in sizes} for name in runs}

    here.measure = measure
    here.show_this_machine(torch.device("cpu"))
    busbw = 1.5 * 4**12 / (1e-5 + 4**12 / 2e9) / 1e9
    told = f"busbw {busbw:.2f} GB/s at 16,777,216 bytes"
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert lines == [f"  {name}: {told}" for name in ("ring", "dist.all_reduce")]


def test_the_figure_shows_predicted_lines_and_measured_dots(lesson, monkeypatch) -> None:
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    predicted = {"ring": {10: 1.0, 100: 2.0}, "tree": {10: 0.5, 100: 3.0}}
    measured = {"ring": {10: 1.1, 100: 2.2}, "tree": {10: 0.6, 100: 3.3}}
    lesson.draw("unused.png", predicted, measured)
    lines = drawn[0].axes[0].lines
    for name, (line, dots) in zip(predicted, (lines[:2], lines[2:]), strict=True):
        assert list(line.get_ydata()) == list(predicted[name].values())
        assert list(dots.get_ydata()) == list(measured[name].values())
        assert (dots.get_label(), dots.get_marker()) == (name, "o")


def test_a_noise_of_five_percent_does_not_move_the_latency(lesson) -> None:
    """By absolute errors the largest buffer alone would decide, and alpha be anything."""
    costs = {"a": (6, 1.5), "b": (4, 5.0)}
    sizes = [1000 * 10**k for k in range(7)]
    curves = {}
    for name, (alphas, shares) in costs.items():
        noise = [1.05, 0.95] * 4
        times = zip(sizes, noise, strict=False)
        curves[name] = {s: (alphas * 2e-3 + shares * s * 1e-8) * off for s, off in times}
    alpha, _ = lesson.fit_alpha_beta(costs, curves, sizes)
    assert alpha == pytest.approx(2e-3, rel=0.06)


def test_a_model_is_judged_by_sizes_that_its_fit_has_not_seen() -> None:
    here = load(LESSON)
    here.WORLD_SIZE = 4
    costs = {name: here.terms(algorithm, 4) for name, algorithm in here.ALL_REDUCE.items()}
    sizes = [3000 * 3**k for k in range(5)]
    curves = here.predict_seconds(costs, here.ALPHA, 1 / here.BETA, sizes)
    for curve in curves.values():
        for held_out in sizes[1::2]:
            curve[held_out] *= 1.5
    here.check_curves(costs, curves)
    rows = [row for row in here.ledger if row["claim"].endswith("seconds / predicted")]
    assert [row["measured"] for row in rows] == pytest.approx([1.5] * 6)
