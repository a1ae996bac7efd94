"""Samples dealt out, a copy that ranks share, a server; claims against broken lines; two nodes."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from course.lessons import ROOT
from course.playing import Lazily, load
from course.ranks import run
from tests.helpers.leftovers import MARKED, gone
from tests.helpers.namespaces import needs_namespaces
from tests.lessons.every import Breaks, test_lesson  # noqa: F401

LESSON = "data-loading/09_one_file_two_nodes.py"
lesson = Lazily(LESSON)


def shares() -> list[tuple[list, list]]:
    opened = load(LESSON)
    return [(opened.whole_file(epoch), opened.own_half(epoch)) for epoch in range(3)]


@pytest.mark.parametrize("ranks", [1, 3, pytest.param(8, marks=pytest.mark.deep)])
def test_node_1_takes_half_of_the_samples_each_once(ranks: int) -> None:
    dealt = run(shares, ranks, group=False)
    for epoch in range(3):
        whole = [index for share in dealt for index in share[epoch][0]]
        half = [index for share in dealt for index in share[epoch][1]]
        assert len(whole) == len(set(whole)) == 1920
        assert set(whole) < set(range(3840))
        assert 800 < len([index for index in whole if index >= 1920]) < 1120
        assert sorted(half) == list(range(1920, 3840))


@pytest.fixture
def served():
    """Makes connections to a server of the lesson's file."""
    ends = []
    with tempfile.TemporaryFile() as file:
        file.write(b"".join(map(lesson.contents, range(lesson.N))))
        file.flush()

        def connect() -> socket.socket:
            near, far = socket.socketpair()
            work = threading.Thread(target=lesson.serve, args=(far, file))
            work.start()
            ends.append((near, far, work))
            return near

        yield connect
        for near, far, work in ends:
            near.shutdown(socket.SHUT_RDWR)
            work.join()
            near.close()
            far.close()


def test_a_server_sends_the_page_that_is_asked_for(served) -> None:
    remote = lesson.RemoteFile(served())
    for index in (0, 3839, 5, 480, 5):
        assert remote.sample(index) == lesson.contents(index)
    assert remote.received == 5 * lesson.PAGE


def test_a_page_that_was_kept_is_not_asked_for_again(served, tmp_path: Path) -> None:
    copy = lesson.NodeCopy(served(), tmp_path / "copy")
    for index in range(0, 3840, 480):
        assert copy.sample(index) == lesson.contents(index)
    assert copy.received == lesson.FILE
    later = lesson.NodeCopy(None, tmp_path / "copy")
    for index in range(479, 3840, 480):
        assert later.sample(index) == lesson.contents(index)


def test_a_page_without_its_mark_is_fetched_again(served, tmp_path: Path) -> None:
    """As if the rank that fetched it had been killed halfway."""
    copy = lesson.NodeCopy(served(), tmp_path / "copy")
    os.pwrite(copy.copy, b"half of a page", 3 * lesson.PAGE)
    assert copy.sample(3 * 480) == lesson.contents(3 * 480)
    assert copy.received == lesson.PAGE


class Slow:
    """A connection on which something happens before a request."""

    def __init__(self, server: socket.socket, before: Callable[[], None]) -> None:
        self.server = server
        self.recv = server.recv
        self.before = before

    def sendall(self, request: bytes) -> None:
        self.before()
        self.server.sendall(request)


def fetch(folder: Path, pages: list[int], before: Callable[[], None]) -> tuple[bool, int]:
    """On each rank, ask the shared copy for a page; return whether it is right, and what came."""
    own = load(LESSON)
    page = pages[dist.get_rank()]
    near, far = socket.socketpair()
    with tempfile.TemporaryFile() as file:
        file.write(b"".join(map(own.contents, range(own.N))))
        file.flush()
        threading.Thread(target=own.serve, args=(far, file), daemon=True).start()
        copy = own.NodeCopy(Slow(near, before), folder / "copy")
        dist.barrier()
        right = copy.sample(480 * page) == own.contents(480 * page)
        return right, copy.received // own.PAGE


def test_ranks_that_need_a_page_at_the_same_time_fetch_it_once(tmp_path: Path) -> None:
    found = run(fetch, 4, tmp_path, [3, 3, 3, 3], lambda: time.sleep(0.2))
    assert sorted(found) == [(True, 0), (True, 0), (True, 0), (True, 1)]


def test_ranks_that_need_different_pages_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """No request goes out before all four are about to: one lock for the file would hang here."""
    found = run(fetch, 4, tmp_path, [0, 1, 2, 3], lambda: dist.barrier())
    assert found == [(True, 1)] * 4


@needs_namespaces
@pytest.mark.night
def test_as_many_bytes_cross_the_cable_of_two_nodes(tmp_path: Path) -> None:
    """By one command; the kernel counts at the cable's end, in each reading, what sockets count."""
    ledger = tmp_path / "ledger.json"
    folder = Path(sys.executable).parent
    env = MARKED | {"PATH": f"{folder}:{os.environ['PATH']}", "LESSON_JSON": str(ledger)}
    argv = ["bash", str(ROOT / "launch/two_nodes_here.sh"), "--ranks", "2"]
    argv += [str(ROOT / LESSON), "--mbit", "400"]
    ran = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    rows = json.loads(ledger.read_text())["ledger"]
    assert [row["verdict"] for row in rows] == ["PASS"] * 11, ran.stdout
    assert rows[8]["claim"] == "cable: share by which a reading is off, at most"
    assert 0 < rows[8]["measured"] < rows[8]["predicted"] == 0.15
    assert gone()


def test_a_reading_that_is_off_shows_next_to_a_larger_one() -> None:
    right = [(240.0, 250.8), (2.0, 2.1), (1.0, 1.05), (0.0, 0.01), (0.5, 0.53)]
    assert lesson.furthest_off(right) == pytest.approx(0.06)
    for place, cable in ((1, 1.05), (2, 2.1), (3, 0.125), (4, 1.05), (4, 0.0)):
        wrong = list(right)
        wrong[place] = (right[place][0], cable)
        assert lesson.furthest_off(wrong) > 0.15


def readings(changes: list) -> list[tuple[float, float]]:
    """By the lesson, on each rank: two readings, of which a pretended cable brings the second."""
    own = load(LESSON, *changes)
    cable = iter((100, 100, 100, 100 + own.FILE))
    own.from_cable = lambda: next(cable)
    file = own.RemoteFile(None)

    def sample(index: int) -> None:
        file.received += own.FILE * index

    file.sample = sample
    for samples in ([], [1]):
        own.files_crossed(file, samples)
    return own.phases


def test_each_reading_has_its_own_count_of_the_cable() -> None:
    assert run(readings, 2, []) == [[(0.0, 0.0), (2.0, 1.0)]] * 2


NOTHING = "random, nothing kept: files"
PER_RANK = "random, a copy per rank, epoch 0: files"
PER_NODE = "random, a copy per node, epoch 0: files"
FIRST = "random, a copy per node, first tenth: files"
AGAIN = "random, a copy per node, epoch 1: files"
WRONG = "samples that came with other contents"
HALF = "own half, a copy per node, epoch 0: files"
HALF_AGAIN = "own half, a copy per node, epoch 1: files"
NEW = "random: share new to node 1 in epoch 1"
HALF_NEW = "own half: share new to node 1 in epoch 1"
LINES = {
    "no page is marked, as in Try": (
        '                os.pwrite(self.copy, b"1", mark)\n',
        "",
        {PER_RANK, FIRST, PER_NODE, AGAIN, HALF, HALF_AGAIN},
    ),
    "every epoch has the same order, as in Try": ("    sampler.set_epoch(epoch)\n", "", {NEW}),
    "something is kept": (
        "files_crossed(RemoteFile(server), mine)",
        'files_crossed(NodeCopy(server, folder / f"kept_{RANK}"), mine)',
        {NOTHING},
    ),
    "the ranks' copies are one": ('folder / f"rank_{RANK}"', 'folder / "rank"', {PER_RANK}),
    "the node's copies are one per rank": (
        [
            ('folder / "whole"', 'folder / f"whole_{RANK}"'),
            ('folder / "half"', 'folder / f"half_{RANK}"'),
        ],
        {FIRST, PER_NODE, HALF},
    ),
    "the halves overlap": ("[N // 2 + index", "[N // 2 - 1 + index", {HALF}),
    "the halves change from epoch to epoch": (
        "[N // 2 + index for",
        "[N // 2 * (1 - epoch) + index for",
        {HALF_AGAIN, HALF_NEW},
    ),
    "the server sends another page": (
        "os.pread(file.fileno(), PAGE, number * PAGE))",
        "os.pread(file.fileno(), PAGE, (number + 1) % PAGES * PAGE))",
        {WRONG},
    ),
    "in epoch 1 the random order needs a page that did not come": (
        "first = files_crossed(file, mine[:tenth])",
        "mine = [i for i in mine if i >= PER_PAGE]\n    first = files_crossed(file, mine[:tenth])",
        {FIRST, PER_NODE, AGAIN},
    ),
    "the first tenth is one sample": ("mine[:tenth]", "mine[:1]", {FIRST}),
}
ALONE = ["no page is marked, as in Try"]
BREAKS = Breaks(LINES, alone=ALONE)


def test_a_page_that_did_not_come_is_not_taken_from_the_copy(served, tmp_path: Path) -> None:
    """The server is away when the first rank asks for it, and there when the next one does."""

    def away() -> None:
        raise ConnectionResetError

    first = lesson.NodeCopy(Slow(served(), away), tmp_path / "copy")
    with pytest.raises(ConnectionResetError):
        first.sample(3 * 480)
    os.close(first.copy)
    second = lesson.NodeCopy(served(), tmp_path / "copy")
    assert second.sample(3 * 480) == lesson.contents(3 * 480)
    assert second.received == lesson.PAGE
