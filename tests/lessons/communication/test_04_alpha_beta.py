"""Prices against textbooks and NCCL's own constants; fits; broken lines fail their claims."""

from fractions import Fraction
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
