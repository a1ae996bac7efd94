"""The lesson on launching: what it builds is right, what breaks it FAILs, nothing stays behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from course.playing import changed, load
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "fundamentals/02_launching_processes.py"
HELLO, BY_HAND = "say_hello", "a_launcher_by_hand"
NODES, STORE = "two_torchruns_make_one_world", "ranks_meet_at_a_store"
GROUP, CHILDREN, GPUS = "a_group_is_a_numbering", "fork_and_spawn", "cost_of_a_group"
SECTIONS = {HELLO, BY_HAND, NODES, STORE, GROUP, CHILDREN, GPUS}
WITH_DEVICE = {GROUP, GPUS}
SPAWN = (
    "        heard = spawn_two()\n",
    "        heard = [[1, 2], [1, 2]]\n",
)
FORK = ("= fork_beside_a_thread()\n", "= (1, False, True)\n")

STARTS_PROCESSES = [  # sections of rank 0 that start processes of their own
    ("    say_hello()\n", ""),
    ("    a_launcher_by_hand()\n", ""),
    ("    two_torchruns_make_one_world()\n", ""),
    ("    fork_and_spawn()\n", ""),
]
SIZES = {1: STARTS_PROCESSES, 3: STARTS_PROCESSES}  # they are the same at every world size
ON_GPUS = OnGpus(changes=STARTS_PROCESSES)  # these are started without pretended GPUs
NO_DEVICE = {"fork_and_spawn": "processes start"}

# Rank 0 has left the door before any other rank comes to it.
RANK_0_FIRST = [
    ("    time.sleep(0.3 * RANK / WORLD_SIZE)", '    if RANK > 0:\n        store.wait(["left"])'),
    (
        'when this one left", WORLD_SIZE, store.add("arrived", 0))\n',
        'when this one left", WORLD_SIZE, (store.add("arrived", 0), store.set("left", ""))[0])\n',
    ),
]


def only(*sections: str) -> list[tuple[str, str]]:
    """Changes that leave these sections alone in `main`."""
    left_out = sorted(SECTIONS - set(sections))
    return [(f"    {name}({'device' * (name in WITH_DEVICE)})\n", "") for name in left_out]


HELLOS = "each of four ranks prints 0 + 1 + 2 + 3"
NEEDED = "variables without which a rank cannot join"
TWO = "ranks of two launched by hand that print 0 + 1"
FOUR = "ranks of two launchers' four that print 6"
LISTED = "torchrun: ranks told the list, and nothing else"
SECOND = "rank with local rank 1 on the second node"
NUMBERED = "torchrun: ranks numbered node x 2 + local rank"
STORES = "torchrun: stores at which the four would meet"
LEFT = "ranks left when their launcher is killed"
TIED = "ranks left, if they asked to be killed with it"
ARRIVED = "ranks that had arrived when this one left"
EVEN = "number among the even ranks, -1 outside"
LOCK = "forked child gets the lock that a thread freed"

# Where rank 0 starts processes it is alone: who waited for it would end by a timeout.
LAUNCHED = Breaks(
    {
        "hello without its all-reduce; hidden variables that stay hidden": (
            [
                ("dist.all_reduce(x)\nprint", "dist.barrier()\nprint"),
                ("        if hidden is not None:\n", "        if False:\n"),
            ],
            {HELLOS, TWO, NEEDED},
        ),
    },
    ranks=1,
    changes=only(HELLO, BY_HAND),
    deadline=250,
)
BY_HAND_ONLY = Breaks(
    {"another tensor": ("[float(rank)]", "[3.0 - rank]", {TWO})},  # of four ranks the same sum
    ranks=1,
    changes=only(BY_HAND),
    deadline=250,
)
TOGETHER = Breaks(
    {
        "a counter that is only read": (
            'store.add("tickets", 1)',
            'store.add("tickets", 0)',
            {"different tickets that add() gave to n ranks"},
        ),
        "everybody elects himself": (
            'store.compare_set("leader", "", str(RANK))',
            "str(RANK)",
            {"leaders that compare_set lets n ranks elect"},
        ),
        "a barrier that waits for nobody": (  # Try
            [*RANK_0_FIRST, ('    store.wait([f"{name}/open"])\n', "")],
            {ARRIVED},
        ),
        "a barrier that the first one opens": (
            [*RANK_0_FIRST, ('add(f"{name}/arrived", 1) == n', 'add(f"{name}/arrived", 1) == 1')],
            {ARRIVED},
        ),
        "a wait for one who is there": (
            'store.wait(["a rank that never came"], timedelta(seconds=0.3))',
            'store.wait(["arrived"])',
            {"store.wait() ends when its timeout has passed"},
        ),
        "an all-gather that reads its own value": (
            'store.get(f"value of {rank}")',
            'store.get(f"value of {RANK}")',
            {"values that store and group gather alike"},
        ),
        "global ranks for the group's": (  # Try
            "number = dist.get_rank(group)",
            "number = dist.get_rank()",
            {EVEN},
        ),
    },
    changes=only(STORE, GROUP),
)
OF_TWO = Breaks(
    {
        "a broadcast by rank 0": (  # on two ranks the even ones are rank 0 alone
            "src=even_ranks[-1]",
            "src=0",
            {"broadcast by the last of them, own rank outside"},
        ),
    },
    ranks=3,
    changes=only(GROUP),
)
FORKED = Breaks(
    {
        "a fork after the lock was let go": (
            "child.start()\n    forked.set()",
            "forked.set()\n    while lock.locked(): time.sleep(0.01)\n    child.start()",
            {LOCK},
        ),
        "a thread that keeps the lock": (
            [
                ("        with lock:\n", "        lock.acquire()\n        if True:\n"),
                ("lock.acquire(timeout=60)", "lock.acquire(timeout=0.2)"),
            ],
            {"its parent gets that lock"},
        ),
        "a child with a thread of its own": (
            [
                (
                    "        got_it = lock",
                    "        asked = threading.Event()\n"
                    "        threading.Thread(target=asked.wait).start()\n"
                    "        got_it = lock",
                ),
                ("num_threads(), got_it))\n", "num_threads(), got_it))\n        asked.set()\n"),
            ],
            {"threads in a forked child"},
        ),
    },
    ranks=1,
    changes=[*only(CHILDREN), SPAWN],
    alone=["a thread that keeps the lock"],  # the first waits for that lock before it forks
    deadline=250,
)
TWO_LAUNCHERS = Breaks(
    {
        "two launchers that do not meet, every rank tied to its own; a name that nobody sets": (
            [
                (
                    '"--nnodes=2", "--nproc-per-node=2", *meet',
                    '"--nproc-per-node=2", *meet, f"--rdzv-id={id(self)}"',
                ),
                ("tied=False)", "tied=True)"),
                ('"ROLE_NAME ROLE_RANK', '"ROLE_TITLE ROLE_RANK'),
            ],
            {FOUR, SECOND, NUMBERED, STORES, LEFT, LISTED},
        ),
        "no rank tied to its launcher, and a variable that the list forgets": (
            [
                ("tied=True)", "tied=False)"),
                ('    "TORCHELASTIC_RUN_ID": "the job\'s name (--rdzv-id)",\n', ""),
            ],
            {TIED, LISTED},
        ),
    },
    ranks=1,
    changes=only(NODES),
    deadline=250,
)
# mp.spawn's children import the lesson by its name: its code, as it is broken, stands in a folder.
IMPORTED_AS_BROKEN = [
    ("# %%\nSET_BY_TORCHRUN", "# %%\nCODE = sys._getframe().f_code\nSET_BY_TORCHRUN"),
    (
        "    mp.spawn(spawned, args=(store.port,), nprocs=2)\n",
        "    import importlib.util, marshal\n"
        "    with tempfile.TemporaryDirectory() as folder:\n"
        "        sys.path.insert(0, folder)\n"
        "        with open(f'{folder}/{__name__}.pyc', 'wb') as file:\n"
        "            file.write(importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(CODE))\n"
        "        mp.spawn(spawned, args=(store.port,), nprocs=2)\n",
    ),
]
SPAWNED = Breaks(
    {
        "children that tell each other nothing": (
            "dist.all_gather_object(pids, os.getpid())",
            "pids[index] = os.getpid(); dist.barrier()",  # none leaves while the other joins
            {"mp.spawn: processes in its children's group"},
        ),
    },
    ranks=1,
    changes=[*only(CHILDREN), FORK, *IMPORTED_AS_BROKEN],
    deadline=250,
)
BREAKS = [LAUNCHED, BY_HAND_ONLY, TOGETHER, OF_TWO, FORKED, SPAWNED, TWO_LAUNCHERS]


def _staggered(delays: list[float]) -> list[bool]:
    """Pass three barriers in a row, late by `delays`; had everybody come, each time?"""
    lesson, rank, n = load(LESSON), dist.get_rank(), dist.get_world_size()
    store, complete = lesson.open_store(), []
    for turn, delay in enumerate(delays[rank:] + delays[:rank]):
        time.sleep(delay)
        store.add(f"came {turn}", 1)
        lesson.barrier(store, f"door {turn}", n)
        complete.append(store.add(f"came {turn}", 0) == n)
    dist.barrier()  # rank 0 serves the store
    return complete


@settings(max_examples=10, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.01, 0.05]), min_size=1, max_size=4))
def test_barrier_lets_nobody_out_early(delays: list[float]) -> None:
    assert run(_staggered, len(delays), delays) == [[True] * len(delays)] * len(delays)


@pytest.mark.deep
def test_the_table_names_all_that_torchrun_sets() -> None:
    lesson = load(LESSON)
    clean = {k: v for k, v in os.environ.items() if k not in lesson.NAMES}
    program = "import os; os.write(1, (' '.join(os.environ) + '\\n').encode())"  # in one piece
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--tee=0"]
    command = [sys.executable, *torchrun, "--no-python", sys.executable, "-c", program]
    ran = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=150)
    for line in ran.stdout.splitlines():
        assert set(line.split()) - set(clean) - {"LC_CTYPE"} == set(lesson.NAMES)
    assert len(ran.stdout.splitlines()) == 2, ran.stderr


def marked(mark: str) -> list[psutil.Process]:
    """Processes whose environment holds the mark: all that the lesson started, at any remove."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if mark in process.environ().values() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.mark.deep
@pytest.mark.parametrize(
    ("section", "before", "sleepers", "started"),
    [
        # torchrun, rank 0, two launchers with two ranks each
        pytest.param(NODES, "        self.launcher.kill()\n", 1, 8, id="while torchrun runs"),
        # torchrun, rank 0, two children
        pytest.param(CHILDREN, "    pids = [None, None]\n", 2, 4, id="while mp.spawn runs"),
    ],
)
def test_nothing_outlives_a_killed_launcher(
    section: str, before: str, sleepers: int, started: int, tmp_path: Path
) -> None:
    mark = uuid.uuid4().hex
    asleep = tmp_path / "asleep"
    margin = " " * (len(before) - len(before.lstrip()))
    sleep = f"{margin}open({str(asleep)!r}, 'a').write('z')\n{margin}time.sleep(600)\n"
    source = changed(LESSON, *only(section), (before, sleep + before))
    (tmp_path / "lesson.py").write_text(source)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    with subprocess.Popen(
        [*torchrun, "lesson.py"],
        cwd=tmp_path,
        env=os.environ | {"MARK": mark},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as launcher:
        wait_until(lambda: asleep.exists() and asleep.stat().st_size == sleepers, 200)
        assert len(marked(mark)) >= started
        launcher.send_signal(signal.SIGKILL)
    wait_until(lambda: not marked(mark), 60)  # one that ends by itself takes torch down first


def wait_until(holds, seconds: float) -> None:
    stop = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < stop, "not in time"
        time.sleep(0.1)


def test_a_value_too_long_for_the_table_is_seen_to_be_cut() -> None:
    assert [load(LESSON).shortened(text, 4) for text in ("abcd", "abcde")] == ["abcd", "…cde"]


# Values that no row shows


def test_a_child_is_told_nothing_of_the_rank_that_starts_it() -> None:
    ours = {"RANK": "1", "LOCAL_RANK": "1", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1"}
    ours |= {"TORCHELASTIC_NEW": "1", "PYTHONUNBUFFERED": "1"}
    assert load(LESSON).without_ranks(ours | {"PATH": "/bin", "RANKS": "3"}) == {
        "PATH": "/bin",
        "RANKS": "3",
    }


def test_the_table_shows_one_value_only_where_all_ranks_were_told_the_same(capsys) -> None:
    ranks = [{"RANK": f"{rank}", "WORLD_SIZE": "4", "ROLE_RANK": "7"} for rank in range(4)]
    del ranks[2]["ROLE_RANK"]
    load(LESSON).print_table(ranks)
    shown = {}
    for line in capsys.readouterr().out.splitlines()[2:-1]:
        name, _, values = line.strip().partition(" ")
        shown[name] = values.strip().partition("   ")[0]
    assert shown["RANK"] == "0 1 2 3"
    assert shown["WORLD_SIZE"] == "4"
    assert shown["ROLE_RANK"] == "7 7 unset 7"
    assert shown["OMP_NUM_THREADS"] == "unset"


def test_a_new_group_s_first_and_second_all_reduce_are_timed_to_their_ends() -> None:
    """By a clock that only waiting for the GPU puts forward."""
    lesson = load(LESSON)
    lesson.WORLD_SIZE = 2
    now, pending, asked = [0.0], [], []
    takes = iter([6.0, 2.0])

    def all_reduce(x: object, group: object) -> None:
        asked.append(group)
        pending.append(next(takes))

    def synchronize() -> None:
        now[0] += sum(pending)
        pending.clear()

    group = Mock()
    cuda = SimpleNamespace(synchronize=synchronize, mem_get_info=lambda: (80e9 - now[0], 80e9))
    lesson.torch = SimpleNamespace(ones=Mock(), cuda=cuda)
    calls = {"all_reduce": all_reduce, "new_group": lambda: group, "barrier": Mock()}
    lesson.dist = SimpleNamespace(**calls, is_initialized=lambda: False)
    lesson.time = SimpleNamespace(perf_counter=lambda: now[0])
    lesson.cost_of_a_group(SimpleNamespace(type="cuda"))
    assert asked == [group, group]
    (row,) = lesson.ledger
    assert (row["measured"], row["verdict"]) == (3.0, "PASS")


def test_a_program_that_fails_is_not_read_as_one_that_says_nothing() -> None:
    lesson = load(LESSON)
    assert lesson.output_of([sys.executable, "-c", "print('a'); print('b')"]) == ["a", "b"]
    with pytest.raises(SystemExit, match="why"):
        lesson.output_of([sys.executable, "-c", "import sys; sys.exit('why')"])


def two_clients() -> tuple[bool, bool]:
    """Whether keys of the lesson's store are seen by it, and not by others of the same server."""
    lesson = load(LESSON)
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(server.port)}
    lesson.open_store().set("door", "open")
    return lesson.open_store().check(["door"]), server.check(["door"])


def test_the_lesson_s_keys_in_the_store_stay_apart() -> None:
    assert run(two_clients, 1, group=False) == [(True, False)]
