"""Orders, a memory that forgets, two nodes in namespaces; claims, broken lines, nothing left."""

import functools
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course.lessons import ROOT
from course.playing import Lazily, load, play
from course.ranks import attempt
from tests.helpers.leftovers import MARKED, gone, machine
from tests.helpers.virtual_cluster import once_there, play_as_nobody
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "data-loading/09_one_file_two_nodes.py"
lesson = Lazily(LESSON)
QUICK = ("MBIT = 50 ", "MBIT = 400 ")
NO_STEPS = ("share_waited(batches, compute * PAGE_SECONDS)", "len([*batches])")
SIZES = {1: [QUICK, NO_STEPS], 3: [QUICK, NO_STEPS]}
ON_GPUS = OnGpus(changes=[QUICK, NO_STEPS])


# Orders


@given(st.integers(0, 1000))
def test_both_nodes_together_take_each_sample_once(epoch: int) -> None:
    for name, order in lesson.ORDERS.items():
        if not name.startswith("copy"):
            both = order(0, epoch) + order(1, epoch)
            assert sorted(both) == list(range(lesson.N)), name
            assert len(order(1, epoch)) == lesson.N // 2


def test_an_order_is_another_one_in_each_epoch_and_the_same_again() -> None:
    for name in ("random", "quasi-random", "shards, quasi-random"):
        order = lesson.ORDERS[name]
        assert len({tuple(order(1, epoch)) for epoch in range(9)}) == 9
        assert order(1, 3) == order(1, 3)


@given(st.lists(st.integers(0, 7), min_size=1, unique=True), st.integers(0, 1000))
def test_quasi_random_order_has_two_pages_open(pages: list[int], epoch: int) -> None:
    order = np.array(lesson.quasi_random(pages, epoch)) // lesson.PER_PAGE
    first = {page: int(np.argmax(order == page)) for page in pages}
    last = {page: len(order) - 1 - int(np.argmax(order[::-1] == page)) for page in pages}
    for now in range(len(order)):
        assert sum(first[page] <= now <= last[page] for page in pages) <= 2


# Memory, cable, disk


@settings(deadline=None)
@given(st.lists(st.integers(0, 127)), st.integers(1, 8), st.sampled_from([1, 4, 16]))
def test_memory_forgets_what_was_used_least_recently(order: list, room: int, samples: int) -> None:
    asked = []
    remote = lesson.RemoteFile(None, unit=samples * lesson.SAMPLE, room=room)

    def fetch(number: int) -> bytes:
        asked.append(number)
        return b"".join(map(lesson.contents, range(number * samples, (number + 1) * samples)))

    remote.fetch = fetch
    oracle = functools.lru_cache(maxsize=room)(lambda number: number)
    for index in order:
        assert remote.sample(index) == lesson.contents(index)
        oracle(index // samples)
    assert len(asked) == oracle.cache_info().misses


def test_in_random_order_the_misses_are_what_the_formula_says() -> None:
    misses = []
    for epoch in range(300):
        fetch = functools.lru_cache(maxsize=lesson.ROOM)(lambda page: page)
        for index in lesson.random_order(1, epoch):
            fetch(index // lesson.PER_PAGE)
        misses.append(fetch.cache_info().misses)
    assert np.mean(misses) == pytest.approx(lesson.MISSES, abs=2.5)  # no sample comes twice
    assert np.mean(np.abs(np.subtract(misses, lesson.MISSES)) < 10) > 0.95


@pytest.fixture
def served():
    """A cable to a server of the lesson's file, and the file."""
    near, far = socket.socketpair()
    with tempfile.TemporaryFile() as file, near, far:
        file.write(b"".join(map(lesson.contents, range(lesson.N))))
        file.flush()
        work = threading.Thread(target=serve_until_closed, args=(far, file))
        work.start()
        yield near, file
        near.shutdown(socket.SHUT_RDWR)
        work.join()


def serve_until_closed(far: socket.socket, file) -> None:
    with pytest.raises(lesson.struct.error):  # the end of the connection is no request
        lesson.serve(far, file)


@pytest.mark.parametrize("samples", [1, 16])
def test_a_server_sends_the_range_that_is_asked_for(served, samples: int) -> None:
    remote = lesson.RemoteFile(served[0], unit=samples * lesson.SAMPLE)
    for index in (0, 127, 5, 64, 5):
        assert remote.sample(index) == lesson.contents(index)


def test_a_page_that_was_kept_on_disk_is_not_asked_for_again(served) -> None:
    remote = lesson.CachedFile(served[0])
    for index in range(0, 128, 16):
        assert remote.sample(index) == lesson.contents(index)
    remote.kept.clear()
    remote.cable = None
    lesson.drop(remote.copy)
    for index in range(15, 128, 16):
        assert remote.sample(index) == lesson.contents(index)


def test_batches_come_in_order_and_an_epoch_wants_its_samples(served) -> None:
    order = lesson.random_order(1, 1)
    batches = list(lesson.batches_ahead(lesson.RemoteFile(served[0]), order))
    assert [len(batch) for batch in batches] == [16] * 4
    assert [sample for batch in batches for sample in batch] == [*map(lesson.contents, order)]


# What is judged


@pytest.mark.parametrize(("every", "compute", "due"), [(2.0, 1.0, 0.5), (0.5, 2.0, 0.0)])
def test_a_model_waits_for_a_cable_that_is_slower(every: float, compute: float, due: float) -> None:
    """By a clock that only sleeping and arrivals put forward."""
    own = load(LESSON)
    now = [7.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def batches():
        for number in range(1, 6):
            now[0] = max(now[0], 7.0 + every * number)
            yield number

    own.time = SimpleNamespace(perf_counter=lambda: now[0], sleep=sleep)
    assert own.share_waited(batches(), compute) == pytest.approx(due)


def verdicts_on(times: float, off: float = 0.0) -> dict[str, str]:
    """What the lesson says if everything were so many times as predicted."""
    own = load(LESSON)
    seen = {}
    for case in own.CASES:
        for epoch, files in enumerate(case.files, start=1):
            seen[case.name, epoch] = files * times + (0.01 if times > 1.5 else 0)
    for name, (_, pages, compute) in own.STEPS.items():
        seen[name] = max(0, 1 - compute / pages) + off
    own.check_cable(seen)
    return {row["claim"]: row["verdict"] for row in own.ledger}


def test_bytes_and_waits_are_judged_with_less_slack_than_a_mistake_makes() -> None:
    assert set(verdicts_on(1.0).values()) == {"PASS"}
    assert set(verdicts_on(1.04).values()) == {"PASS"}
    for times in (0.5, 2.0):
        said = verdicts_on(times, off=0.1).items()
        passed = {claim for claim, verdict in said if verdict == "PASS"}
        assert not {claim for claim in passed if times == 2 or "epoch 1" in claim}


def test_seconds_follow_from_the_bytes_of_a_page_with_their_headers() -> None:
    assert pytest.approx(196_608 * 1514 / 1448 * 8 / 50e6) == lesson.PAGE_SECONDS
    assert pytest.approx(128 * 12_288 * 1.0684, rel=1e-3) == lesson.FILE


# Claims, and what breaks them

CROSSED = ": files crossed"
BEFORE = "own copy, epoch 1" + CROSSED, "own copy, epoch 2" + CROSSED
ALL = "random, large memory, epoch 1" + CROSSED, "random, large memory, epoch 2" + CROSSED
SMALL = "random, small memory, epoch 1" + CROSSED
SINGLE = "random, by the sample, epoch 1" + CROSSED, "random, by the sample, epoch 2" + CROSSED
QUASI = "quasi-random, epoch 1" + CROSSED
SHARDS = "shards, quasi-random, epoch 1" + CROSSED
FILE_ORDER = "shards, file order, epoch 1" + CROSSED, "shards, file order, epoch 2" + CROSSED
OWN_DISK = "shards, own disk, epoch 1" + CROSSED, "shards, own disk, epoch 2" + CROSSED
DELIVERS = "shards, own disk: files that it delivers"
WRONG = "samples that came with other contents"
SHARED = "node 0's file, read by node 1: files from disk"
LINES = {
    "a node takes all samples": (
        "    return shuffled[node::2].tolist()",
        "    return shuffled.tolist()",
        {SMALL, *SINGLE},
    ),
    "every epoch in the same order, as in Try": (
        "np.random.default_rng([SEED, epoch]).permutation(N)",
        "np.random.default_rng([SEED]).permutation(N)",
        {SINGLE[1]},
    ),
    "room for a shard, as in Try": ("ROOM = 3 ", "ROOM = 4 ", {FILE_ORDER[1]}),
    "nothing is kept in memory": (
        "        self.kept[number] = data\n",
        "        self.kept = {number: data}\n",
        {*ALL, SMALL, SINGLE[1], QUASI, SHARDS},
    ),
    "nothing is kept on disk": (
        "            self.have.add(number)\n",
        "            pass\n",
        {*BEFORE, OWN_DISK[1]},
    ),
    "the copy is of half a file": (
        "[*range(N), *random_order(node, epoch)]",
        "[*range(N // 2)]",
        {*BEFORE},
    ),
    "all pages are open": ("len(left[:2])", "len(left)", {QUASI, SHARDS}),
    "a shard is the whole file": (
        "list(range(64 * node, 64 * node + 64))",
        "list(range(128))",
        {*FILE_ORDER, OWN_DISK[0], DELIVERS},
    ),
    "a counter that misses what comes in": (
        "int(row[1]) + int(row[9])",
        "int(row[9])",
        {BEFORE[0], ALL[0], SMALL, *SINGLE, QUASI, SHARDS, *FILE_ORDER, OWN_DISK[0]},
    ),
    "the server sends another range": (
        "os.pread(file.fileno(), length, offset))",
        "os.pread(file.fileno(), length, (offset + PAGE) % (N * SAMPLE)))",
        {WRONG},
    ),
    "the file is dropped before node 1 reads it": (
        '    seen["node 0\'s file"] =',
        '    drop(file)\n    seen["node 0\'s file"] =',
        {SHARED},
    ),
    "the copy's disk delivers a quarter": (
        '    seen["own disk"] = files',
        '    os.pread(remote.copy.fileno(), PAGE * 2, 4 * PAGE)\n    seen["own disk"] = files',
        {DELIVERS},
    ),
}
ALONE = ["room for a shard, as in Try"]
BREAKS = Breaks(LINES, ranks=1, changes=[QUICK, NO_STEPS], alone=ALONE, deadline=120)


# Who may make nodes

NONE = [
    ("if libc.unshare(CLONE_NEWNET) != 0:", "if True:"),
    ("if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:", "if True:"),
]
NO_TC = [('command(f"tc ', 'command(f"no-such-tc ')]
NO_RIGHT = [("ip link set lo up", "ip link set no-such-link up")]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (NONE, "unshare: "),
        (NO_TC, "No such file or directory: 'no-such-tc'"),
        (NO_RIGHT, 'Cannot find device "no-such-link"'),
    ],
)
def test_without_nodes_it_is_blocked_and_says_why(changes: list, why: str) -> None:
    played = play(LESSON, 2, NO_STEPS, *changes)
    played.expect(set())
    assert why in played.output
    blocked = [row["needs"] for row in played.ledger if row["verdict"] == "BLOCKED"]
    assert "root or user namespaces" in blocked
    assert WRONG in [row["claim"] for row in played.ledger if row["verdict"] == "PASS"]
    assert max(map(len, played.output.splitlines())) <= 100


@pytest.mark.deep
def test_a_user_who_is_not_root_has_nodes_too() -> None:
    (outcome,) = attempt(play_as_nobody, 1, LESSON, QUICK, NO_STEPS, deadline=120, group=False)
    _, ledger = outcome.value
    passed = {row["claim"] for row in ledger if row["verdict"] == "PASS"}
    assert passed >= {SMALL, QUASI, DELIVERS}, outcome.output


# Nothing is left


@pytest.mark.deep
@pytest.mark.parametrize("end", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_signal_leaves_nothing(end: str) -> None:
    """Neither process nor network nor interface."""
    was = machine()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(ROOT / LESSON)]
    how = {"env": MARKED, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    torchrun = subprocess.Popen(command, process_group=0, **how)
    once_there(torchrun, 4, nets=1)  # two ranks, node 1 and the server that it has forked
    assert b"2 ranks" in torchrun.stdout.readline()  # both ranks have joined, and end with torchrun
    torchrun.send_signal(getattr(signal, end))
    torchrun.stdout.close()
    assert torchrun.wait(150) != 0
    assert gone()
    assert machine() == was


def test_a_failure_on_node_1_ends_the_lesson() -> None:
    played = play(LESSON, 2, QUICK, ("    drop(file)  # and so", "    1 / 0  # and so"))
    assert "EOFError" in str(played.code)
    assert "ZeroDivisionError" in played.output
