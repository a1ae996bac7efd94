"""Orders, a memory that forgets, a server; claims against broken lines."""

import functools
import socket
import tempfile
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course.playing import Lazily
from tests.lessons.every import Breaks, test_lesson  # noqa: F401

LESSON = "data-loading/09_one_file_two_nodes.py"
lesson = Lazily(LESSON)


@given(st.integers(0, 1000))
def test_node_1_takes_half_of_the_samples_another_half_in_each_epoch(epoch: int) -> None:
    order = lesson.random_order(epoch)
    assert len(set(order.tolist())) == len(order) == 256
    assert set(order.tolist()) < set(range(512))
    assert 80 < len({*order.tolist()} & {*lesson.random_order(epoch + 1).tolist()}) < 176
    assert (lesson.random_order(epoch) == order).all()


@settings(deadline=None)
@given(st.integers(0, 5), st.integers(2, 8), st.integers(0, 1000))
def test_quasi_random_order_has_two_pages_open(start: int, count: int, epoch: int) -> None:
    pages = range(start, start + count)
    order = lesson.quasi_random(pages, epoch)
    assert sorted(order.tolist()) == [*range(64 * start, 64 * (start + count))]
    of_page = order // 64
    first = {page: int(np.argmax(of_page == page)) for page in pages}
    last = {page: len(order) - 1 - int(np.argmax(of_page[::-1] == page)) for page in pages}
    for now in range(0, len(order), 7):
        assert sum(first[page] <= now <= last[page] for page in pages) <= 2


@settings(deadline=None)
@given(st.lists(st.integers(0, 511)), st.integers(1, 8), st.sampled_from([1, 16, 64]))
def test_memory_forgets_what_was_used_least_recently(order: list, room: int, samples: int) -> None:
    asked = []
    remote = lesson.RemoteFile(None, room, unit=samples * lesson.SAMPLE)

    def fetch(number: int) -> bytes:
        asked.append(number)
        return b"".join(map(lesson.contents, range(number * samples, (number + 1) * samples)))

    remote.fetch = fetch
    oracle = functools.lru_cache(maxsize=room)(lambda number: number)
    for index in order:
        assert remote.sample(index) == lesson.contents(index)
        oracle(index // samples)
    assert len(asked) == oracle.cache_info().misses


@pytest.fixture
def served():
    """A connection to a server of the lesson's file."""
    near, far = socket.socketpair()
    with tempfile.TemporaryFile() as file, near, far:
        file.write(b"".join(map(lesson.contents, range(lesson.N))))
        file.flush()
        work = threading.Thread(target=lesson.serve, args=(far, file))
        work.start()
        yield near
        near.shutdown(socket.SHUT_RDWR)
        work.join()


@pytest.mark.parametrize("samples", [1, 64])
def test_a_server_sends_the_range_that_is_asked_for(served, samples: int) -> None:
    remote = lesson.RemoteFile(served, 1, unit=samples * lesson.SAMPLE)
    for index in (0, 511, 5, 64, 5):
        assert remote.sample(index) == lesson.contents(index)
    assert remote.received == 5 * samples * lesson.SAMPLE


def test_a_page_that_was_kept_on_disk_is_not_asked_for_again(served) -> None:
    with tempfile.TemporaryFile() as copy:
        check_cached_file(lesson.CachedFile(served, 3, copy))


def check_cached_file(remote) -> None:
    for index in range(0, 512, 64):
        assert remote.sample(index) == lesson.contents(index)
    assert remote.received == lesson.FILE
    remote.kept.clear()
    remote.server = None
    for index in range(63, 512, 64):
        assert remote.sample(index) == lesson.contents(index)


ALL = "random, room for all, epoch 1: files"
ALL_AGAIN = "random, room for all, epoch 2: files"
SMALL = "random, room for 3, each epoch: files"
SINGLE = "random, by the sample, epoch 1: files"
SINGLE_AGAIN = "random, by the sample, epoch 2: files"
QUASI = "quasi-random over the file: files"
SHARD = "shard, quasi-random: files"
FILE_ORDER = "shard, file order, epoch 1: files"
AGAIN = "shard, file order, epoch 2: files"
OWN_DISK = "shard, own disk, epoch 1: files"
KEPT = "shard, own disk, epoch 2: files"
WRONG = "samples that came with other contents"
LINES = {
    "every epoch in the same order, as in Try": (
        "np.random.default_rng([SEED, RANK, epoch]).permutation(N)",
        "np.random.default_rng([SEED, RANK]).permutation(N)",
        {SINGLE_AGAIN},
    ),
    "room for a shard, as in Try": ("ROOM = 3 ", "ROOM = 4 ", {SMALL, AGAIN}),
    "a node takes all samples": (
        "permutation(N)[1::2]",
        "permutation(N)",
        {SMALL, SINGLE, SINGLE_AGAIN},
    ),
    "nothing is kept in memory": (
        "        self.kept[number] = data\n",
        "        self.kept = {number: data}\n",
        {ALL, ALL_AGAIN, SMALL, SINGLE_AGAIN, QUASI, SHARD},
    ),
    "nothing is kept on disk": ("            self.have.add(number)\n", "", {KEPT}),
    "all pages are open": (
        "open_pages = [closed.pop(), closed.pop()]",
        "open_pages = [closed.pop() for _ in pages]",
        {QUASI, SHARD},
    ),
    "a shard is the whole file": (
        "shard = range(PAGES // 2, PAGES)",
        "shard = range(PAGES)",
        {SHARD, FILE_ORDER, AGAIN, OWN_DISK},
    ),
    "the server sends another range": (
        "os.pread(file.fileno(), length, offset))",
        "os.pread(file.fileno(), length, (offset + PAGE) % FILE))",
        {WRONG},
    ),
}
ALONE = ["room for a shard, as in Try"]
BREAKS = Breaks(LINES, alone=ALONE)
