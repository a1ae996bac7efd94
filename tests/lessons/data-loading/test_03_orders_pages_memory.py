"""Orders against sets, pages against other counts; claims against broken lines."""

import functools
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course.playing import Lazily, load
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, Without, test_lesson  # noqa: F401

# FFCV's order in plain Python: the same values, without seconds of compiling on every rank.
NO_JIT = ('os.environ["NUMBA_OPT"] = "0"', 'os.environ["NUMBA_DISABLE_JIT"] = "1"')
LESSON = "data-loading/03_orders_pages_memory.py"
pytestmark = pytest.mark.skipif(find_spec("ffcv") is None, reason="FFCV is not installed")
lesson = Lazily(LESSON)

SIZES = {1: [NO_JIT], 3: [NO_JIT]}  # the plain run, on four ranks, compiles
ON_GPUS = OnGpus(changes=[NO_JIT])
IMPORT = "    with contextlib.suppress(ImportError):  # the extra [ffcv]\n"
GONE = (IMPORT, IMPORT + "        raise ImportError\n")
WITHOUT = {"FFCV": Without([GONE], {"pages that FFCV holds"})}


@pytest.mark.parametrize("name", ["file_order", "random", "quasi_random"])
def test_each_sample_comes_once_and_orders_differ_from_epoch_to_epoch(name: str) -> None:
    order_of = getattr(lesson, name)
    for epoch in range(3):
        assert sorted(order_of(epoch).tolist()) == list(range(5760))
    assert (order_of(0) == order_of(0)).all()
    assert (name == "file_order") == (order_of(0) == order_of(1)).all()


@given(st.integers(0, 1000))
@settings(deadline=None, max_examples=20)
def test_quasi_random_order_draws_from_two_pages(epoch: int) -> None:
    pages = lesson.quasi_random(epoch) // 720
    first = [int(np.argmax(pages == page)) for page in range(8)]
    last = [5759 - int(np.argmax(pages[::-1] == page)) for page in range(8)]
    for now in range(0, 5760, 11):
        assert sum(first[page] <= now <= last[page] for page in range(8)) <= 2
    half = pages[:600]  # of the first two, about evenly
    assert len(set(half.tolist())) == 2
    assert 200 < (half == half[0]).sum() < 400


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1))
def test_pages_open_equal_a_count_step_by_step(pages: list) -> None:
    def is_open(page: int, now: int) -> bool:
        return page in pages[: now + 1] and page in pages[now:]

    due = max(sum(is_open(page, now) for page in range(6)) for now in range(len(pages)))
    assert lesson.open_at_once(720 * np.array(pages) + 5) == due


@pytest.mark.parametrize("room", [1, 2, 4, 8])
def test_page_reads_are_the_misses_of_a_least_recently_used_cache(
    room: int, tmp_path: Path
) -> None:
    path = tmp_path / "pages"
    path.write_bytes(b"".join(map(lesson.contents, range(5760))))
    order = np.random.default_rng(room).integers(0, 5760, 300)
    fetch = functools.lru_cache(maxsize=room)(lambda page: page)
    for index in order.tolist():
        fetch(index // 720)
    with open(path, "rb") as file:
        found = lesson.page_reads(file, lambda epoch: order, room)
        reader = lesson.PageReader(file, room)
        for index in order.tolist():
            assert reader.sample(index) == lesson.contents(index)
    assert found == pytest.approx(fetch.cache_info().misses, abs=0.02)


def ffcv_orders() -> dict:
    opened = load(LESSON, NO_JIT)
    return {batch: opened.ffcv_quasi_random(batch) for batch in (1, 2, 4)}


def test_ffcv_draws_from_twice_as_many_pages_as_a_batch_has_samples() -> None:
    (orders,) = run(ffcv_orders, 1, deadline=60)
    for batch, order in orders.items():
        assert sorted(order.tolist()) == list(range(5760))
        assert lesson.open_at_once(order) == 2 * batch


def held_by_hand(pages: list, ahead: int = 3) -> int:
    """The most pages that are open or are read ahead, counted step by step."""
    first = {page: pages.index(page) for page in pages}
    last = {page: len(pages) - 1 - pages[::-1].index(page) for page in pages}
    counts = []
    for now in range(len(pages)):
        counts.append(sum(first[page] - ahead <= now <= last[page] for page in first))
    return max(counts)


def held_and_due() -> list:
    opened = load(LESSON, NO_JIT)
    found = []
    for epoch in range(3):
        for order in (opened.file_order(epoch), opened.random(epoch), opened.quasi_random(epoch)):
            due = held_by_hand((order // 720).tolist())
            found.append((opened.pages_held(order, 1), due))
    return found


def test_ffcv_holds_what_is_open_and_what_is_read_ahead() -> None:
    (found,) = run(held_and_due, 1, deadline=60)
    for held, due in found:
        assert held == due


FILE_OPEN = "in file order: pages open at once"
QUASI_OPEN = "quasi-random: pages open at once"
RANDOM_OPEN = "random: pages open at once"
FILE_1 = "in file order, room for 1: page reads"
RANDOM_8 = "random, room for 8: page reads"
RANDOM_7 = "random, room for 7: page reads"
RANDOM_4 = "random, room for 4: page reads"
QUASI_3 = "quasi-random, room for 3: page reads"
QUASI_2 = "quasi-random, room for 2: page reads"
WRONG = "samples that came with other contents"
FFCV_FILE = "FFCV, in file order: pages held"
FFCV_1 = "FFCV, quasi-random, batches of 1: pages held"
FFCV_4 = "FFCV, quasi-random, batches of 4: pages held"

LINES = {
    "three pages are open, as in Try": (
        "len(left) < 2:",
        "len(left) < 3:",
        {QUASI_OPEN, QUASI_3, QUASI_2},
    ),
    "a page has 72 samples, as in Try": ("PER_PAGE = 720 ", "PER_PAGE = 72 ", {RANDOM_7, RANDOM_4}),
    "nothing is kept": (
        "        self.room = room\n",
        "        self.room = 0\n",
        {FILE_1, RANDOM_8, RANDOM_7, RANDOM_4, QUASI_3, QUASI_2},
    ),
    "everything is kept": (
        "        self.room = room\n",
        "        self.room = PAGES\n",
        {RANDOM_7, RANDOM_4, QUASI_2},
    ),
    "random order is quasi-random": (
        "    return np.random.default_rng([SEED, RANK, epoch]).permutation(N)",
        "    return quasi_random(epoch)",
        {RANDOM_OPEN, RANDOM_7, RANDOM_4},
    ),
    "file order is random": (
        "    return np.arange(N)\n",
        "    return random(epoch)\n",
        {FILE_OPEN, FILE_1, FFCV_FILE},
    ),
    "a sample is read from a place too far": (
        "data[place * SAMPLE : (place + 1) * SAMPLE]",
        "data[(place + 1) * SAMPLE : (place + 2) * SAMPLE]",
        {WRONG},
    ),
    "FFCV reads nothing ahead": (
        '    claim("FFCV, in file order: pages held"',
        '    compute_schedule.__defaults__ = (0,)\n    claim("FFCV, in file order: pages held"',
        {FFCV_FILE},
    ),
    "FFCV's order is random": (
        ").sample_order(0)",
        ").sample_order(0)[random(0)]",
        {FFCV_1},
    ),
    "FFCV's batches are smaller": ("ffcv_quasi_random(4)", "ffcv_quasi_random(2)", {FFCV_4}),
}
ALONE = [
    "a page has 72 samples, as in Try",
    "random order is quasi-random",
    "nothing is kept",
    "everything is kept",
]
BREAKS = Breaks(LINES, changes=[NO_JIT], alone=ALONE, deadline=120)
