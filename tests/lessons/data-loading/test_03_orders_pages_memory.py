"""Orders against sets, pages against other counts; claims against broken lines."""

import functools
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course.playing import Lazily, load, play
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

# FFCV's pipelines in plain Python: the same values, without seconds of compiling on every rank.
NO_JIT = ('os.environ["NUMBA_OPT"] = "0"', 'os.environ["NUMBA_DISABLE_JIT"] = "1"')
LESSON = "data-loading/03_orders_pages_memory.py"
pytestmark = pytest.mark.skipif(find_spec("ffcv") is None, reason="FFCV is not installed")
lesson = Lazily(LESSON)

SIZES = {1: [NO_JIT], 3: [NO_JIT]}  # the plain run, on four ranks, compiles
ON_GPUS = OnGpus(changes=[NO_JIT])
IMPORT = "    with contextlib.suppress(ImportError):  # the extra [ffcv]\n"
GONE = (IMPORT, IMPORT + "        raise ImportError\n")


@pytest.mark.deep
def test_without_ffcv_all_is_blocked_and_that_is_no_success() -> None:
    played = play(LESSON, 2, GONE)
    assert played.code == 1
    assert [row["verdict"] for row in played.ledger] == ["BLOCKED"] * 3, played.output


def orders_of(path: Path) -> tuple[list, str]:
    opened = load(LESSON)
    loader = opened.open_beton(path, 8, distributed=True)
    epochs = [loader.traversal_order.sample_order(epoch).tolist() for epoch in range(3)]
    with pytest.raises(NotImplementedError, match="Not implemented") as refusal:
        opened.open_beton(path, 8, "QUASI_RANDOM", distributed=True)
    return epochs, str(refusal.value)


@pytest.mark.parametrize("ranks", [1, 5, pytest.param(2, marks=pytest.mark.deep)])
def test_ranks_share_an_epoch_and_quasi_random_is_refused(ranks: int, beton: Path) -> None:
    outcomes = run(orders_of, ranks, beton, deadline=60)
    for epoch in range(3):
        indices = [n for epochs, _ in outcomes for n in epochs[epoch]]
        assert set(indices) == set(range(576))
        assert len(indices) == 576 + -576 % ranks
    assert len({tuple(epoch) for epoch in outcomes[0][0]}) == 3  # each epoch in another order


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7, 8, 16])
def test_shares_are_of_neighbors_equal_and_disjoint(ranks: int) -> None:
    shares = [lesson.neighbors(rank, ranks) for rank in range(ranks)]
    assert {len(share) for share in shares} == {576 // ranks}
    assert np.concatenate(shares).tolist() == [*range(576 // ranks * ranks)]


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1))
def test_pages_open_equal_a_count_step_by_step(pages: list) -> None:
    def is_open(page: int, now: int) -> bool:
        return page in pages[: now + 1] and page in pages[now:]

    due = max(sum(is_open(page, now) for page in range(6)) for now in range(len(pages)))
    assert lesson.open_at_once(pages) == due


@pytest.mark.parametrize("room", [1, 2, 4, 8])
def test_page_reads_are_the_misses_of_a_least_recently_used_cache(
    room: int, tmp_path: Path
) -> None:
    path = tmp_path / "pages"
    path.write_bytes(bytes(8 * lesson.PAGE))
    order = np.random.default_rng(room).integers(0, 8, 60)
    fetch = functools.lru_cache(maxsize=room)(lambda page: page)
    for page in order:
        fetch(page)
    found = lesson.page_reads(path, order, room)
    assert found == pytest.approx(fetch.cache_info().misses, abs=0.01)


SEQUENTIAL = "SEQUENTIAL: pages open at once"
QUASI = "QUASI_RANDOM: pages open at once"
RANDOM = "RANDOM: pages open at once"
QUASI_READS = "QUASI_RANDOM: page reads, too little room"
ROOMY = "RANDOM: page reads, room for all"
READS = "RANDOM: page reads, too little room"
HELD = "QUASI_RANDOM, own memory: pages held"
OWN_READS = "QUASI_RANDOM, own memory: pages read"
DEALT = "random shares: page reads of all ranks"
NEIGHBORS = "neighbors: page reads of all ranks"
LEFT = "neighbors: samples left out"
LINES = {
    "memory has room for 2, as in Try": ("ROOM = 4 ", "ROOM = 2 ", {QUASI_READS}),
    "batches of four, as in Try": (
        'open_beton(path, 1, "QUASI_RANDOM", seed=RANK))',
        'open_beton(path, 4, "QUASI_RANDOM", seed=RANK))',
        {QUASI, QUASI_READS},
    ),
    "file order is random": ('"SEQUENTIAL", seed=RANK', '"RANDOM", seed=9', {SEQUENTIAL}),
    "random order is quasi-random": (
        'open_beton(path, 1, "RANDOM", seed=RANK))',
        'open_beton(path, 1, "QUASI_RANDOM", seed=RANK))',
        {RANDOM, READS},
    ),
    "nothing is kept": (
        "maxsize=room)",
        "maxsize=0)",
        {QUASI_READS, ROOMY, READS, DEALT, NEIGHBORS},
    ),
    "everything is kept": ("maxsize=room)", "maxsize=None)", {READS}),
    "a cache that reads nothing ahead": (
        "    epoch_in_own_memory(loader)  # which",
        "    from ffcv.memory_managers.process_cache.schedule import compute_schedule\n"
        "    compute_schedule.__defaults__ = (0,)\n"
        "    epoch_in_own_memory(loader)  # which",
        {HELD},
    ),
    "one page more is read": (
        "    return held, (psutil",
        "    os.pread(os.open(loader.fname, os.O_RDONLY), PAGE, 0)\n    return held, (psutil",
        {OWN_READS},
    ),
    "neighbors are dealt one by one": (
        "    return np.arange(rank * each, (rank + 1) * each)",
        "    return np.arange(rank, each * ranks, ranks)",
        {NEIGHBORS},
    ),
    "every rank takes the first share": (
        "np.arange(rank * each, (rank + 1) * each)",
        "np.arange(0, each)",
        {LEFT},
    ),
    "every rank has the first half": (
        'open_beton(path, 1, "RANDOM", distributed=True)',
        'open_beton(path, 1, "SEQUENTIAL", indices=np.arange(N // 2))',
        {DEALT},
    ),
}
ALONE = ["memory has room for 2, as in Try", "everything is kept"]
BREAKS = Breaks(LINES, changes=[NO_JIT], alone=ALONE, deadline=120)
