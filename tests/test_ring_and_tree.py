"""Schedules against their meaning and their formulas; runs against one process; broken lines."""

import functools
from collections import Counter
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from exercises.ranks import run
from tests.lessons import load, play

LESSON = "communication/03_ring_and_tree.py"
QUICK = ("        times = on_a_slow_link(device)\n        on_this_machine(device)\n", "")
SIX = ("naive", "ring", "tree", "double tree", "halving-doubling", "doubling")
THREE = ("reduce_scatter", "all_gather", "broadcast")


@functools.cache
def lesson():
    return load(LESSON)


def held_after(schedule, held: list[list[Counter]], length: int, most: int) -> list[list[Counter]]:
    """What each rank holds of each number, as a count of the ranks in its sum; checks each step."""
    n = len(held)
    for step in schedule(n, length, most):
        before = [list(row) for row in held]
        for move in step:
            assert 0 <= move.start <= move.stop <= length
            assert move.source != move.target
            assert 0 <= min(move[:2]) <= max(move[:2]) < n
            for i in range(move.start, move.stop):
                sent = before[move.source][i]
                held[move.target][i] = held[move.target][i] + sent if move.add else sent
        for r in range(n):  # what is copied lands in x while x is being sent
            copied = [m for m in step if m.target == r and not m.add]
            touched = [m for m in step if r in (m.source, m.target)]
            for m in copied:
                apart = [t.stop <= m.start or m.stop <= t.start for t in touched if t is not m]
                assert all(apart)
    return held


def spread(n: int, length: int) -> list[list[Counter]]:
    return [[Counter({r: 1}) for _ in range(length)] for r in range(n)]


worlds, lengths, caps = st.integers(1, 17), st.integers(0, 40), st.integers(1, 50)


@settings(max_examples=150, deadline=None)
@given(worlds, lengths, caps)
def test_every_all_reduce_adds_each_rank_once_everywhere(n: int, length: int, most: int) -> None:
    everyone = Counter(range(n))
    for name, schedule in lesson().ALL_REDUCE.items():
        held = held_after(schedule, spread(n, length), length, most)
        assert held == [[everyone] * length] * n, name


@settings(max_examples=100, deadline=None)
@given(worlds, lengths, caps)
def test_the_relatives_do_what_their_names_say(n: int, length: int, most: int) -> None:
    chunks = lesson().cut(0, length, n)
    held = held_after(lesson().reduce_scatter, spread(n, length), length, most)
    for r, (start, stop) in enumerate(chunks):
        assert held[r][start:stop] == [Counter(range(n))] * (stop - start)
    owner = [r for r, (start, stop) in enumerate(chunks) for _ in range(start, stop)]
    held = held_after(lesson().all_gather, spread(n, length), length, most)
    assert held == [[Counter([r]) for r in owner]] * n
    held = held_after(lesson().broadcast, spread(n, length), length, most)
    assert held == [[Counter([0])] * length] * n


@settings(max_examples=100, deadline=None)
@given(worlds, st.integers(1, 40), caps)
def test_no_message_of_a_tree_or_chain_is_longer_than_allowed(n, length, most) -> None:
    for schedule in lesson().tree, lesson().double_tree, lesson().broadcast:
        steps = schedule(n, length, most)
        assert all(m.stop - m.start <= most for step in steps for m in step)
    count = -(-length // most)
    chain = [step for step in lesson().broadcast(n, length, most) if step]
    assert len(chain) == (n - 2 + count if n > 1 else 0)  # pipelined, not n - 1 times count
    deepest = (n + 1).bit_length() - 1 if n & (n + 1) else (n + 1).bit_length() - 2
    assert len(lesson().tree(n, length, most)) == 2 * deepest + count - 1


@pytest.mark.parametrize("n", range(2, 17))
def test_prices_are_the_textbooks(n: int) -> None:
    changed = load(LESSON)
    changed.N = n
    log, power = n.bit_length() - 1, n & (n - 1) == 0
    due = {"naive": (2, 2 * (n - 1)), "ring": (2 * (n - 1), 2 * Fraction(n - 1, n))}
    if power:
        due["halving-doubling"] = (2 * log, 2 * Fraction(n - 1, n))
        due["doubling"] = (log, log)
    else:
        due["doubling"] = (log + 2, log + 2)
    for name, (steps, share) in due.items():
        schedule = changed.ALL_REDUCE[name]
        assert changed.price(schedule, 1, 0) == steps
        assert changed.price(schedule, 0, 1) == pytest.approx(float(share))
        assert changed.price(schedule, 2, 3) == pytest.approx(float(2 * steps + 3 * share))
    assert changed.price(changed.tree, 1, 0) == 2 * log
    assert changed.price(changed.double_tree, 0, 1) < changed.price(changed.tree, 0, 1) or n == 2
    if n > 2:
        assert changed.price(changed.tree, 1, 0) < changed.price(changed.ring, 1, 0)


def test_the_fit_finds_the_constants_and_the_crossing_is_between() -> None:
    terms = {"a": (6, 1.5), "b": (4, 5.0)}
    sizes = [3000 * 3**k for k in range(6)]
    curves = {k: {s: a * 2e-3 + b * s * 1e-8 for s in sizes} for k, (a, b) in terms.items()}
    alpha, a_byte = lesson().fit(terms, curves, sizes[::2])
    assert alpha == pytest.approx(2e-3)
    assert a_byte == pytest.approx(1e-8)
    where = 2 * 2e-3 / (3.5 * 1e-8)
    assert lesson().crossing(curves["a"], curves["b"]) == pytest.approx(where, rel=0.05)
    never = lesson().crossing(curves["b"], curves["a"])
    assert never != never


Case = tuple[str, int, torch.dtype, str, int, int]
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
case = st.tuples(
    st.sampled_from(SIX), st.integers(0, 300), dtypes, st.sampled_from(["SUM", "MAX"]), caps, caps
)


def compared(cases: list[Case]) -> list[Case]:
    """The cases in which this rank does not get, bit by bit, what one process computes."""
    here, wrong = load(LESSON), []
    for name, length, dtype, op, most, seed in cases:
        torch.manual_seed(seed)
        X = torch.randint(-4, 5, (here.N, length)).to(dtype)
        due = X.sum(0) if op == "SUM" else X.amax(0)
        x = X[here.RANK].clone()
        here.run(here.ALL_REDUCE[name], x, getattr(dist.ReduceOp, op), most)
        dist.all_reduce(theirs := X[here.RANK].clone(), getattr(dist.ReduceOp, op))
        if not (torch.equal(x, due) and torch.equal(theirs, due)):
            wrong.append((name, length, dtype, op, most, seed))
    return wrong


@pytest.mark.parametrize("n", range(1, 6))
@settings(max_examples=4, deadline=None)
@given(cases=st.lists(case, min_size=15, max_size=40))
def test_any_length_dtype_and_op_equals_one_process_and_the_library(n: int, cases: list) -> None:
    assert run(compared, n, cases) == [[]] * n


def shapes_and_rounding() -> tuple[tuple, float, float]:
    """A 3-dimensional tensor in place; the error of a random sum as a share of its bound."""
    here = load(LESSON)
    x = torch.full((3, 5, 7), here.RANK + 1.0)
    here.run(here.ring, x)
    torch.manual_seed(here.RANK)
    y = torch.randn(1000)
    exact, size = y.double(), y.double().abs()
    dist.all_reduce(exact)
    dist.all_reduce(size)
    here.run(here.double_tree, y)
    bound = (here.N - 1) * 2**-24 * size
    return tuple(x.shape), x.unique().tolist(), ((y - exact).abs() / bound).max().item()


def test_shapes_stay_and_roundings_stay_within_their_bound() -> None:
    for shape, values, share in run(shapes_and_rounding, 5):
        assert shape == (3, 5, 7)
        assert values == [15.0]
        assert 0 < share < 1.01


def counted_and_carried(name: str) -> tuple[int, int]:
    """Bytes a rank sends, as the lesson counts them and as the kernel does."""
    here, kernel = load(LESSON), load("communication/01_nccl_collectives.py")
    x, ops = torch.zeros(1_000_000), []
    here.run(here.ALL_REDUCE[name], x)  # connections are made
    dist.barrier()
    was = kernel.carried()[0]
    dist.barrier()
    with here.posting(ops.extend):
        here.run(here.ALL_REDUCE[name], x)
    dist.barrier()
    return sum(op.tensor.nbytes for op in ops if op.op is dist.isend), kernel.carried()[0] - was


@pytest.mark.parametrize("name", SIX)
def test_the_kernel_counts_the_same_bytes(name: str) -> None:
    for counted, carried in run(counted_and_carried, 3, name):
        assert counted <= carried <= counted + 20_000  # headers, barriers


def refused() -> tuple[list[str], int]:
    here, said, posted = load(LESSON), [], []
    with here.posting(posted.extend):
        for x, op in (torch.zeros(4), dist.ReduceOp.AVG), (torch.zeros(4, 4).t()[:2], None):
            try:
                here.run(here.ring, x, op or dist.ReduceOp.SUM)
            except ValueError as error:
                said.append(str(error))
    return said, len(posted)


def test_what_it_cannot_do_is_refused_before_any_message() -> None:
    for said, posted in run(refused, 2):
        assert posted == 0
        assert len(said) == 2
        for words, value in zip(said, ("AVG", "strides (1, 4)"), strict=True):
            assert words.startswith("needs SUM or MAX and a contiguous tensor, got ")
            assert value in words
            assert "use x.contiguous()" in words


@pytest.mark.parametrize("ranks", [3, 5])
def test_the_lesson_holds_beside_powers_of_two(ranks: int) -> None:
    played = play(LESSON, ranks, QUICK)
    assert (played.code, played.failed) == (0, set()), played.output


def test_the_figure_is_drawn_and_the_picture_shows_the_ring(tmp_path) -> None:
    path = tmp_path / "ring.png"
    fast = ("ALPHA, BETA = 5e-3, 1e7", "ALPHA, BETA = 1e-4, 1e9")
    there = ("        on_this_machine(device)\n", "")
    played = play(LESSON, 3, fast, there, argv=("--figure", str(path)))
    assert path.read_bytes().startswith(b"\x89PNG"), played.output
    lines = played.output.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("  ring"))
    assert lines[at + 1].split()[2:] == ["+2→1", "+0→2", "+1→0"]
    assert lines[at + 3].split()[2:] == ["0→1", "1→2", "2→0"]


NUMBERS, WIRE = (
    "numbers unlike dist.all_reduce",
    ("messages a rank sends", "bytes a rank sends / S"),
)
RANDOM = "random sums that differ between ranks"


def on_wire(*names: str) -> set[str]:
    return {f"{name}: {what}" for name in names for what in WIRE}


RING = "    return reduce_scatter(n, length, most) + all_gather(n, length, most)\n"
WHOLE_RING = """    there = [[Move(h, h + 1, 0, length, True)] for h in range(n - 1)]
    return there + [[Move((h - 1) % n, h, 0, length, False)] for h in range(n - 1)]
"""
BREAKS = {
    "the ring passes on the whole tensor": ((RING, WHOLE_RING), on_wire("ring")),
    "the counter misses bytes": (
        ("sent = [op.tensor.nbytes for", "sent = [op.tensor.nbytes - 4 for"),
        {f"{name}: {WIRE[1]}" for name in (*SIX, *THREE)},
    ),
    "a chunk is off by one": (
        ("chunks[(r + ahead - h) % n]", "chunks[(r + ahead - h + 1) % n]"),
        {f"reduce_scatter: {NUMBERS}", f"all_gather: {NUMBERS}"},
    ),
    "MAX is taken for SUM": (
        ("COMBINE[op](own", "torch.add(own"),
        {f"{name}: {NUMBERS}" for name in SIX},
    ),
    "the ring stops half-way": (
        (RING, "    return reduce_scatter(n, length, most)\n"),
        {f"ring: {NUMBERS}", RANDOM} | on_wire("ring"),
    ),
    "both trees are the same": (
        ("Move(n - 1 - a, n - 1 - b, *rest)", "Move(a, b, *rest)"),
        on_wire("double tree"),
    ),
    "ranks beyond a power of two are left out": (
        ("] * (n > power)", "] * 0"),
        {f"{name}: {NUMBERS}" for name in SIX[4:]} | {RANDOM} | on_wire(*SIX[4:]),
    ),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_line_fails_the_claims_that_guard_it_and_no_others(what: str) -> None:
    change, claims = BREAKS[what]
    played = play(LESSON, 3, QUICK, change)
    assert played.failed == claims, played.output
    assert played.code == 1


TIMES = {
    "a price that sends all of S in every algorithm": (
        "a * alpha + b * s * a_byte",
        "a * alpha + s * a_byte",
    ),
    "a link without a bandwidth": ("ALPHA + load / BETA", "ALPHA"),
}


@pytest.mark.parametrize("what", TIMES)
def test_a_wrong_price_or_link_fails_on_the_clock(what: str) -> None:
    played = play(LESSON, 3, ("        on_this_machine(device)\n", ""), TIMES[what])
    assert any("crossing" in text or "held out" in text for text in played.failed), played.output
    assert played.code == 1
