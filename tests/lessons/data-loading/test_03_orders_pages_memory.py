"""Orders against sets, pages against other counts; claims against broken lines."""

import functools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course.playing import Lazily
from tests.lessons.every import Breaks, test_lesson  # noqa: F401

LESSON = "data-loading/03_orders_pages_memory.py"
lesson = Lazily(LESSON)


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


def test_the_least_room_is_the_number_of_pages_used_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "pages"
    path.write_bytes(b"".join(map(lesson.contents, range(5760))))
    in_turn = np.arange(5760).reshape(8, 720).T.flatten()  # all pages, again and again
    in_pairs = np.arange(5760).reshape(4, 2, 720).transpose(0, 2, 1).flatten()
    with open(path, "rb") as file:
        assert lesson.least_room(file, lambda epoch: in_turn[:80]) == 8
        assert lesson.least_room(file, lambda epoch: in_pairs) == 2
        assert lesson.least_room(file, lesson.file_order) == 1


def test_classes_are_counted_in_each_batch() -> None:
    order = np.arange(5760)
    assert lesson.classes_per_batch(order // 720, order) == 1
    assert lesson.classes_per_batch(order % 7, order) == 7
    assert lesson.classes_per_batch(order, order[::-1]) == 32


FILE_OPEN = "in file order: pages open at once"
QUASI_OPEN = "quasi-random: pages open at once"
RANDOM_OPEN = "random: pages open at once"
FILE_1 = "in file order, room for 1: page reads"
RANDOM_8 = "random, room for 8: page reads"
RANDOM_7 = "random, room for 7: page reads"
RANDOM_4 = "random, room for 4: page reads"
LEAST = "quasi-random: room that reads each page once"
QUASI_2 = "quasi-random, room for 2: page reads"
WRONG = "samples that came with other contents"
SORTED = "written by class, random: classes per batch"
SORTED_QUASI = "written by class, quasi-random: classes per batch"
SHUFFLED_QUASI = "written shuffled, quasi-random: classes per batch"

LINES = {
    "three pages are open, as in Try": (
        "len(left) < 2:",
        "len(left) < 3:",
        {QUASI_OPEN, LEAST, QUASI_2, SORTED_QUASI},
    ),
    "the page that was read first goes, as in Try": (
        "self.kept.pop(page, None)",
        "self.kept.get(page)",
        set(),
    ),
    "nothing is kept": (
        "        self.room = room\n",
        "        self.room = 0\n",
        {FILE_1, RANDOM_8, RANDOM_7, RANDOM_4, LEAST, QUASI_2},
    ),
    "everything is kept": (
        "        self.room = room\n",
        "        self.room = PAGES\n",
        {RANDOM_7, RANDOM_4, LEAST, QUASI_2},
    ),
    "random order is quasi-random": (
        "    return np.random.default_rng([SEED, RANK, epoch]).permutation(N)",
        "    return quasi_random(epoch)",
        {RANDOM_OPEN, RANDOM_7, RANDOM_4, SORTED},
    ),
    "file order is random": (
        "    return np.arange(N)\n",
        "    return random(epoch)\n",
        {FILE_OPEN, FILE_1},
    ),
    "a sample is read from a place too far": (
        "data[place * SAMPLE : (place + 1) * SAMPLE]",
        "data[(place + 1) * SAMPLE : (place + 2) * SAMPLE]",
        {WRONG},
    ),
    "the file is not shuffled before it is written": (
        "np.random.default_rng(SEED).permutation(by_class)",
        "by_class",
        {SHUFFLED_QUASI},
    ),
    "a class is spread over all pages": (
        "by_class = np.arange(N) // PER_PAGE",
        "by_class = np.arange(N) % PAGES",
        {SORTED_QUASI},
    ),
}
ALONE = [
    "three pages are open, as in Try",
    "random order is quasi-random",
    "nothing is kept",
    "everything is kept",
    "a class is spread over all pages",
]
BREAKS = Breaks(LINES, alone=ALONE)


def test_quasi_random_order_shuffles_the_samples_of_each_page() -> None:
    """At random, two samples in a row are (720 + 1) / 3 places apart in the mean."""
    order = lesson.quasi_random(0)
    pages = [order[order // 720 == page] % 720 for page in range(8)]
    for places in pages:
        assert 200 < np.abs(np.diff(places)).mean() < 280
    assert len({places.tobytes() for places in pages}) == 8
