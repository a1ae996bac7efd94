"""Orders against sets, pages against other counts, memory that ends; claims, broken lines."""

import functools
import os
import time
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course.playing import Lazily, load
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, Without, test_lesson  # noqa: F401

# FFCV's pipelines in plain Python: the same values, without seconds of compiling on every rank.
NO_JIT = ('os.environ["NUMBA_OPT"] = "0"', 'os.environ["NUMBA_DISABLE_JIT"] = "1"')
LESSON = "data-loading/03_orders_pages_memory.py"
pytestmark = pytest.mark.skipif(find_spec("ffcv") is None, reason="FFCV is not installed")
lesson = Lazily(LESSON)

SIZES = {1: [NO_JIT], 3: [NO_JIT]}  # the plain run, on four ranks, compiles
ON_GPUS = OnGpus(changes=[NO_JIT])
IMPORT = "    with contextlib.suppress(ImportError):  # the extra [ffcv]\n"
GONE = (IMPORT, IMPORT + "        raise ImportError\n")
WITHOUT = {"FFCV": Without([GONE], {"orders", "the page cache", "a rank's own cache"})}


def orders_of(path: Path) -> tuple[list, str]:
    opened = load(LESSON)
    loader = opened.open_beton(path, 8, distributed=True)
    epochs = [loader.traversal_order.sample_order(epoch).tolist() for epoch in range(3)]
    with pytest.raises(NotImplementedError, match="Not implemented") as refusal:
        opened.open_beton(path, 8, "QUASI_RANDOM", distributed=True)
    return epochs, str(refusal.value)


@pytest.mark.parametrize("ranks", [1, 3, pytest.param(2, marks=pytest.mark.deep)])
def test_ranks_share_an_epoch_and_quasi_random_is_refused(ranks: int, beton: Path) -> None:
    outcomes = run(orders_of, ranks, beton, deadline=60)
    for epoch in range(3):
        indices = [n for epochs, _ in outcomes for n in epochs[epoch]]
        assert set(indices) == set(range(130))
        assert len(indices) == 130 + -130 % ranks
    assert len({tuple(epoch) for epoch in outcomes[0][0]}) == 3  # each epoch in another order


@given(st.integers(1, 200), st.integers(1, 16))
def test_shares_are_equal_and_miss_nothing(samples: int, ranks: int) -> None:
    shares = [lesson.shard(rank, ranks, samples) for rank in range(ranks)]
    assert {len(share) for share in shares} == {-(-samples // ranks)}
    counts = np.bincount(np.concatenate(shares))
    assert len(counts) == samples
    assert counts.min() >= 1
    assert counts.max() - counts.min() <= 1  # what comes again is spread over all samples


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), min_size=1), min_size=1), st.integers(0, 4))
def test_pages_open_equal_a_count_batch_by_batch(batches: list, ahead: int) -> None:
    def is_open(page: int, now: int) -> bool:
        uses = [i for i, pages in enumerate(batches) if page in pages]
        return bool(uses) and uses[0] - ahead <= now <= uses[-1]

    due = max(sum(is_open(p, now) for p in range(6)) for now in range(len(batches)))
    assert lesson.open_at_once(batches, ahead) == due


@given(st.lists(st.integers(0, 7)), st.integers(1, 8))
def test_pages_read_are_the_misses_of_a_least_recently_used_cache(order: list, room: int) -> None:
    fetch = functools.lru_cache(maxsize=room)(lambda page: page)
    for page in order:
        fetch(page)
    assert lesson.pages_read(order, room) == fetch.cache_info().misses


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    """A file of four pages, none of which is in memory."""
    path = tmp_path / "pages"
    path.write_bytes(bytes(4 * lesson.PAGE))
    lesson.drop(path)
    if lesson.bytes_in_page_cache(path):
        pytest.skip("the temporary folder is not on a disk")
    return path


def test_what_is_read_is_in_the_page_cache_until_it_is_dropped(on_disk: Path) -> None:
    assert lesson.read_whole_pages(on_disk, [1, 1, 3]) == 2
    assert lesson.bytes_in_page_cache(on_disk) == 2 * lesson.PAGE
    assert lesson.read_whole_pages(on_disk, [1, 0]) == 1
    lesson.drop(on_disk)
    assert lesson.bytes_in_page_cache(on_disk) == 0


def groups_left(pid: int) -> list[Path]:
    return list(load(LESSON).own_group()[1].glob(f"lesson-{pid}"))


def in_a_small_memory(path: Path) -> list[str] | str:
    """The groups of this process before, within and after; or why it can have none."""
    lesson = load(LESSON)
    where = [Path("/proc/self/cgroup").read_text()]
    try:
        with lesson.limited_memory(2 * lesson.PAGE + 2**19):
            where.append(Path("/proc/self/cgroup").read_text())
            lesson.read_whole_pages(path, range(4))
            left = lesson.bytes_in_page_cache(path)
    except OSError as error:
        return str(error)
    where.append(Path("/proc/self/cgroup").read_text())
    assert lesson.PAGE / 2 < left <= 2 * lesson.PAGE + 2**19
    assert groups_left(os.getpid()) == []
    return where


def test_a_process_comes_back_from_its_small_memory(on_disk: Path) -> None:
    (where,) = run(in_a_small_memory, 1, on_disk, group=False)
    if isinstance(where, str):
        pytest.skip(where)
    before, within, after = where
    assert before == after != within


def test_the_group_of_a_killed_process_is_removed() -> None:
    try:
        with lesson.limited_memory(2**28):
            pass
    except OSError as error:
        pytest.skip(str(error))
    child = os.fork()
    if child == 0:
        with lesson.limited_memory(2**28):
            os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    stop = time.monotonic() + 10
    while groups_left(child) and time.monotonic() < stop:
        time.sleep(0.05)
    assert groups_left(child) == []


LEFT = "samples that an epoch leaves out"
TWICE = "samples that come twice"
READS = "pages that a rank reads in an epoch"
CACHE = "pages in a cache of one's own, of 8"
DROPPED = "bytes of the file in memory after it was dropped"
TIMES = "times that the disk delivers what is in memory"
FAULTS = "major faults of all ranks in a second epoch"
QUASI = "QuasiRandom: pages from disk, room for 4 of 8"
RANDOM = "Random: pages from disk, room for 4 of 8"
ROOMY = "Random: pages from disk, room for all"
LINES = {
    "a share begins late, as in Try": (
        "np.arange(rank * each, (rank",
        "np.arange(rank * each + 1, (rank",
        {"cases, of 312, in which shares miss or add some", LEFT, TWICE},
    ),
    "only rank 0 keeps its map": (
        "    read = N * HEIGHT",
        "    if RANK: loader.memory_manager.context.mmap = None; gc.collect()\n"
        "    dist.barrier()\n"
        "    read = N * HEIGHT",
        {"copies of the file in memory, by RSS"},
    ),
    "a cache that reads nothing ahead": (
        '    epoch = iter(open_beton(path, 1, "QUASI',
        "    from ffcv.memory_managers.process_cache.schedule import compute_schedule\n"
        "    compute_schedule.__defaults__ = (0,)\n"
        '    epoch = iter(open_beton(path, 1, "QUASI',
        {CACHE},
    ),
    "every rank takes all, as in Try": (
        '"QUASI_RANDOM", indices=mine, os',
        '"QUASI_RANDOM", os',
        {READS, TWICE},
    ),
    "random order where quasi-random is asked": (
        "        samples = samples_in(order, loader)\n        measured",
        "        samples = samples_in(Random, loader)\n        measured",
        {"Sequential: pages open at once, of 8", "QuasiRandom: pages open at once, of 8"},
    ),
    "quasi-random order where random is asked": (
        "        samples = samples_in(order, loader)\n        measured",
        "        samples = samples_in(QuasiRandom, loader)\n        measured",
        {"Sequential: pages open at once, of 8", "Random: pages open at once, of 8"},
    ),
    "each rank has a file of its own": (
        [
            (
                "        loader = open_beton(path, batch_size=8)\n",
                '        own = Path(f"{path}-{RANK}")\n'
                "        own.write_bytes(path.read_bytes())\n"
                "        loader = open_beton(own, batch_size=8)\n",
            ),
            ("if check_page_cache(loader, path)", "if check_page_cache(loader, own)"),
            ("    if RANK == 0:\n        drop(path)\n", "    drop(path)\n"),
        ],
        {TIMES, "copies of the file in memory, by PSS"},
    ),
    "the file is dropped once more": (
        "    again = read_all(loader)\n",
        "    empty_page_cache(loader, path)\n    again = read_all(loader)\n",
        {FAULTS},
    ),
    "FFCV is not told of other ranks": (
        '"QUASI_RANDOM", distributed=True)',
        '"QUASI_RANDOM")',
        {"QUASI_RANDOM with distributed=True is refused"},
    ),
    "memory has no limit": (
        "(group / name).write_text(str(limit))",
        "(group / name).write_text(str(2**40))",
        {RANDOM},
    ),
    "memory is small for quasi-random order, too": (
        "samples_in(order, loader) for order in (Quasi",
        "samples_in(Random, loader) for order in (Quasi",
        {QUASI},
    ),
    "what is in memory already is read": (
        "    drop(path)\n    counted[",
        "    counted[",
        {ROOMY},
    ),
    "the maps stay while the file is dropped": (
        "    loader.memory_manager.context.mmap = None  # FFCV",
        "    # FFCV",
        {DROPPED, TIMES, QUASI, RANDOM, ROOMY},
    ),
}
BREAKS = Breaks(LINES, changes=[NO_JIT], alone=["memory has no limit"], deadline=120)


def test_a_share_is_of_neighbors() -> None:
    assert list(load(LESSON).shard(1, 2, 10)) == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("check", ["check_own_cache", "check_shares"])
def test_a_cache_of_ones_own_is_read_in_quasi_random_order(check: str) -> None:
    """In file order each share would be the same one, and a cache as large as is predicted."""
    lesson = load(LESSON)
    lesson.RANK, lesson.WORLD_SIZE = 1, 2
    lesson.open_beton = Mock(side_effect=InterruptedError)
    with pytest.raises(InterruptedError):
        getattr(lesson, check)(Path("raw.beton"), None)
    (_, _, order), options = lesson.open_beton.call_args
    assert (order, options["os_cache"]) == ("QUASI_RANDOM", False)
