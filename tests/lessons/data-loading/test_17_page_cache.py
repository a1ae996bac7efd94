"""Files that are dropped and mapped, memory that ends; claims against broken lines."""

import functools
import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from course.playing import Lazily, load, play
from course.ranks import run
from tests.lessons.every import Breaks, test_lesson  # noqa: F401

LESSON = "data-loading/17_page_cache.py"
lesson = Lazily(LESSON)


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    """The lesson's file, none of which is in memory."""
    path = tmp_path.resolve() / "data"
    path.write_bytes(bytes(lesson.SIZE))
    lesson.drop(path)
    if lesson.in_page_cache(path):
        pytest.skip("the temporary folder is not on a disk")
    return path


def test_what_is_read_is_in_the_page_cache_until_it_is_dropped(on_disk: Path) -> None:
    with open(on_disk, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # nothing ahead
        before = lesson.from_disk()
        os.pread(file.fileno(), lesson.SIZE // 4, lesson.SIZE // 2)
    assert lesson.in_page_cache(on_disk) == 0.25
    assert lesson.from_disk() - before == pytest.approx(0.25, abs=0.001)
    lesson.drop(on_disk)
    assert lesson.in_page_cache(on_disk) == 0


def test_memory_is_that_of_the_pages_touched(on_disk: Path) -> None:
    assert lesson.in_memory(on_disk) == (0, 0)
    data = np.memmap(on_disk, np.uint8, "r")
    assert lesson.in_memory(on_disk) == (0, 0)
    lesson.read_all(data)
    assert lesson.in_memory(on_disk) == (1, 1)
    del data
    assert lesson.in_memory(on_disk) == (0, 0)


def test_faults_are_of_the_chunks_that_are_not_in_memory(on_disk: Path) -> None:
    assert lesson.read_chunks(on_disk, [0, 1, 9, 1]) == pytest.approx(3 / lesson.CHUNKS)
    assert lesson.faults_of_touches(on_disk) == lesson.CHUNKS - 3
    assert lesson.faults_of_touches(on_disk) == 0


@given(st.lists(st.integers(0, 7)), st.integers(1, 8))
def test_chunks_from_disk_are_the_misses_of_an_lru_cache(order: list, room: int) -> None:
    fetch = functools.lru_cache(maxsize=room)(lambda chunk: chunk)
    for chunk in order:
        fetch(chunk)
    assert lesson.chunks_from_disk(order, room) == fetch.cache_info().misses


def groups_left(pid: int) -> list[Path]:
    return list(load(LESSON).own_group()[1].glob(f"lesson-{pid}"))


def in_a_small_memory(path: Path) -> list[str] | str:
    """The groups of this process before, within and after; or why it can have none."""
    lesson = load(LESSON)
    where = [Path("/proc/self/cgroup").read_text()]
    try:
        with lesson.limited_memory(lesson.SIZE // 4):
            where.append(Path("/proc/self/cgroup").read_text())
            lesson.read_chunks(path, lesson.IN_ORDER)
            left = lesson.in_page_cache(path)
    except OSError as error:
        return str(error)
    where.append(Path("/proc/self/cgroup").read_text())
    assert 0.125 < left <= 0.25
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


@pytest.mark.deep
def test_without_a_memory_cgroup_it_says_what_it_needs() -> None:
    played = play(LESSON, 2, ("    group.mkdir()\n", '    raise PermissionError("no root")\n'))
    played.expect(set())
    assert [row["needs"] for row in played.ledger if row["verdict"] == "BLOCKED"] == [
        "root and a memory cgroup"
    ]


@pytest.mark.deep
def test_on_a_file_system_in_memory_it_says_that_it_needs_a_disk() -> None:
    played = play(LESSON, 2, ("SIZE))\n            drop(path)\n", "SIZE))\n"))
    played.expect(set())
    assert [row["needs"] for row in played.ledger if row["verdict"] == "BLOCKED"] == [
        "a temporary folder on a disk: set TMPDIR"
    ]


DELIVERED = "files that the disk delivers to all ranks"
AGAIN = "files that it delivers when all read again"
RSS = "copies by RSS, summed over ranks"
PSS = "copies by PSS, summed over ranks"
UNMAPPED = "copies by RSS when all have unmapped it"
CACHED = "copies in the page cache then"
OWN = "copies in arrays of their own"
BESIDES = "copies in the page cache, besides"
SHUFFLED = "half fits: epoch 2 from disk, shuffled"
BACKWARD = "half fits: epoch 2 from disk, backward"
IN_ORDER = "half fits: epoch 2 from disk, in order"
HALF = "half fits: copies in the page cache then"
FAULTS = "half fits: major faults of a touch per chunk"
SMALL = {SHUFFLED, BACKWARD, IN_ORDER, HALF, FAULTS}

MAP = '    data = np.memmap(path, np.uint8, "r")\n    read_all(data)\n'
LINES = {
    "arrays of their own, as in Try": (
        MAP,
        "    data = np.fromfile(path, np.uint8)\n    read_all(data)\n",
        {RSS, PSS},
    ),
    "it stays mapped, as in Try": ("    del data  # which unmaps it\n", "", {UNMAPPED}),
    "only half is read at first": (
        "    read_all(data)\n    delivered",
        "    read_all(data[: SIZE // 2])\n    delivered",
        {DELIVERED, AGAIN},
    ),
    "only rank 0 keeps its map": (
        '    rss, pss = in_memory(path)\n    claim("copies by RSS, summed',
        "    data = None if RANK else data\n    dist.barrier()\n"
        '    rss, pss = in_memory(path)\n    claim("copies by RSS, summed',
        {RSS},
    ),
    "each rank writes to its map, and so has pages of its own": (
        MAP,
        '    data = np.memmap(path, np.uint8, "c")\n    read_all(data)\n'
        "    data[:: mmap.PAGESIZE] += 1\n",
        {PSS},
    ),
    "it is dropped when all have unmapped it": (
        "    del data  # which unmaps it\n",
        "    del data\n    dist.barrier()\n    drop(path)\n    dist.barrier()\n",
        {CACHED},
    ),
    "each rank maps it instead": (
        "    data = np.fromfile(path, np.uint8)\n    copies",
        '    data = np.memmap(path, np.uint8, "r")\n    copies',
        {OWN},
    ),
    "it is dropped after it was read": (
        "    copies = sum_of_ranks",
        "    drop(path)\n    copies = sum_of_ranks",
        {BESIDES},
    ),
    "memory has no limit": (
        "(group / name).write_text(str(limit))",
        "(group / name).write_text(str(2**40))",
        SMALL,
    ),
    "memory has room for a quarter of the file": (
        "limited_memory(SIZE // 2 + CHUNK)",
        "limited_memory(SIZE // 4 + CHUNK)",
        {SHUFFLED, BACKWARD, HALF, FAULTS},
    ),
    "the file is dropped after each first epoch": (
        "            measured.append(read",
        "            drop(path)\n            measured.append(read",
        {SHUFFLED, BACKWARD},
    ),
    "each second epoch is backward": (
        "measured.append(read_chunks(path, order))",
        "measured.append(read_chunks(path, IN_ORDER[::-1]))",
        {SHUFFLED, IN_ORDER},
    ),
    "all of the file is touched ahead of the faults": (
        "        data.madvise(mmap.MADV_RANDOM)  # nothing ahead\n",
        "        data.madvise(mmap.MADV_RANDOM)\n        sum(data[::CHUNK])\n",
        {FAULTS},
    ),
}
ALONE = [
    "arrays of their own, as in Try",
    "each rank writes to its map, and so has pages of its own",
    "memory has no limit",
    "memory has room for a quarter of the file",
    "the file is dropped after each first epoch",
    "each second epoch is backward",
]
BREAKS = Breaks(LINES, alone=ALONE)
