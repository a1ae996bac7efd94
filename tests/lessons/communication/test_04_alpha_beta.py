"""Prices against textbooks and NCCL's own constants; fits; broken lines fail their claims."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course.playing import load, play

LESSON = "communication/04_alpha_beta.py"
FULL_SPEED = ("    show_this_machine(device)\n", "")


@pytest.fixture(scope="module")
def lesson():
    return load(LESSON)


@pytest.mark.parametrize("n", range(2, 17))
def test_prices_are_the_textbooks(lesson, n: int) -> None:
    log, power = n.bit_length() - 1, n & (n - 1) == 0
    due = {"star": (2, 2 * (n - 1)), "ring": (2 * (n - 1), 2 * Fraction(n - 1, n))}
    halving, doubling = "recursive halving-doubling", "recursive doubling"
    if power:
        due[halving] = (2 * log, 2 * Fraction(n - 1, n))
        due[doubling] = (log, log)
        due["tree"] = (2 * log, 3 * log - 1)
        if n > 2:
            due["double tree"] = (2 * log, Fraction(3 * log, 2))
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
    assert lesson.terms(lesson.tree_schedule, n)[0] == 2 * log
    assert (
        lesson.terms(lesson.double_tree_schedule, n)[1] < lesson.terms(lesson.tree_schedule, n)[1]
        or n == 2
    )
    if n > 2:
        assert lesson.terms(lesson.tree_schedule, n)[0] < lesson.terms(lesson.ring_schedule, n)[0]


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


ONE_KIB, ONE_GIB = "8 H100, 1 KiB: us, ring with LL", "8 H100, 1 GiB: us, ring with Simple"
TWO_MIB = "8 H100, 2 MiB: us, ring with LL"
FOUR_KIB, FOUR_MIB = "32 H100, 1 KiB: us, tree with LL", "32 H100, 1 MiB: us, tree with LL128"
FOUR_GIB = "32 H100, 1 GiB: us, ring with Simple"
FOUR_RING = "32 H100, 1 KiB: us, ring with LL, dearer"
BOTH_WAYS = {"ring", "double tree", "recursive doubling", "recursive halving-doubling"}
BREAKS = {  # what is broken: (old, new), the claims that FAIL
    "a step costs what is sent and what is received": (
        ("elements = max(sent[rank], received[rank])", "elements = sent[rank] + received[rank]"),
        {f"{name}: S / beta" for name in BOTH_WAYS}
        | {f"double tree in {k} pieces: S / beta" for k in (2, 64)},
    ),
    "NCCL's tree is climbed one way only": (
        (
            "steps_inside = 2 * (8 - 1)\n        traffic = 2",
            "steps_inside = 8 - 1\n        traffic = 1",
        ),
        {ONE_KIB, TWO_MIB, ONE_GIB, FOUR_KIB, FOUR_MIB, FOUR_GIB},
    ),
    "LL's limits are swapped": (
        ("{1: 141.0, 2: 39.0}", "{1: 20.4, 2: 39.0, 4: 141.0}"),
        {ONE_KIB, TWO_MIB, FOUR_KIB, FOUR_MIB, FOUR_RING},
    ),
    "a ring that sends everything in every step": (
        ("        traffic = 2 * (n - 1) / n", "        traffic = 2 * (n - 1)"),
        {ONE_KIB, TWO_MIB, ONE_GIB, FOUR_GIB, FOUR_RING},
    ),
    "posting to the network costs nothing": (
        ("NET_OVERHEAD = 1.0", "NET_OVERHEAD = 0.0"),
        {FOUR_RING},
    ),
}


@pytest.mark.deep
@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_price_fails_its_claims_and_no_others(what: str) -> None:
    change, claims = BREAKS[what]
    played = play(LESSON, 1, change)
    played.expect(claims)


@pytest.mark.deep
def test_steps_that_do_not_wait_for_their_peers_have_another_price() -> None:
    there = "both_there = max(clock[move.source], clock[move.target])"
    played = play(LESSON, 1, (there, "both_there = 0"))
    assert "tree: S / beta" in played.failed, played.output


TIMES = {
    "a price that sends all of S in every algorithm": (
        "alphas * alpha + shares * s * seconds_per_byte",
        "alphas * alpha + s * seconds_per_byte",
    ),
    "a link without a bandwidth": (
        "time.sleep(ALPHA + max(sent, received) * x_N.itemsize / BETA)",
        "time.sleep(ALPHA)",
    ),
    "prices that add up both directions": (
        "elements = max(sent[rank], received[rank])",
        "elements = sent[rank] + received[rank]",
    ),
}


@pytest.mark.deep
@pytest.mark.clock
@pytest.mark.parametrize("what", TIMES)
def test_a_wrong_price_or_link_fails_on_the_clock(what: str) -> None:
    played = play(LESSON, 4, FULL_SPEED, TIMES[what])
    assert played.failed_by_clock, played.output


@pytest.mark.deep
def test_the_lesson_draws_and_one_rank_makes_no_claim_on_time(tmp_path) -> None:
    path = tmp_path / "times.png"
    played = play(LESSON, 2, argv=("--figure", str(path)))
    played.expect(set())
    assert "without sleeping" in played.output
    assert path.read_bytes().startswith(b"\x89PNG")
    played = play(LESSON, 1)
    played.expect(set())
    assert not any(row.get("timed") for row in played.ledger)
