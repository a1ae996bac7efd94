"""The lesson on launchers: what it builds is right, what breaks it FAILs, nothing stays behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from course.playing import changed, load
from course.ranks import ALONE, run
from tests.helpers.leftovers import MARKED, gone
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "fundamentals/08_inside_a_launcher.py"
BY_HAND, KILLED = "a_launcher_by_hand", "launchers_that_are_killed"
STORE, GROUP = "ranks_meet_at_a_store", "a_group_is_a_numbering"
GPUS, CHILDREN = "cost_of_a_group", "fork_and_spawn"
SECTIONS = {BY_HAND, KILLED, STORE, GROUP, GPUS, CHILDREN}
WITH_DEVICE = {GROUP, GPUS}
SPAWN = (
    "        heard = spawn_two()\n",
    "        heard = [[1, 2], [1, 2]]\n",
)
FORK = ("= fork_beside_a_thread()\n", "= (1, False, True)\n")

STARTS_PROCESSES = [  # sections of rank 0 that start processes of their own
    ("    a_launcher_by_hand()\n", ""),
    ("    launchers_that_are_killed()\n", ""),
    ("    fork_and_spawn()\n", ""),
]
SIZES = {1: STARTS_PROCESSES, 3: STARTS_PROCESSES}  # they are the same at every world size
ON_GPUS = OnGpus(changes=STARTS_PROCESSES)  # these are started without pretended GPUs

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


TWO = "ranks of two launched by hand that print 0 + 1"
ENDED = "launched by hand: healthy ranks that are ended"
LISTED = "torchrun: ranks told the list, and nothing else"
LEFT = "ranks left when their launcher is killed"
TIED = "ranks left, if they asked to be killed with it"
ARRIVED = "ranks that had arrived when this one left"
EVEN = "number among the even ranks, -1 outside"
LOCK = "forked child gets the lock that a thread freed"

# Where rank 0 starts processes it is alone: who waited for it would end by a timeout.
LAUNCHED = Breaks(
    {
        "hello without its all-reduce": ("dist.all_reduce(x)\nprint", "print", {TWO}),
        "a launcher that ends nobody": (
            [
                ("process.terminate()  # SIGTERM, if it still runs", "pass"),
                ("time.sleep(20)", "time.sleep(1)"),
            ],
            {ENDED},
        ),
    },
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
        "each rank elects itself": (
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
ORPHANS = Breaks(
    {
        "every rank tied to its launcher; a name that nobody sets": (
            [
                ("loose = Job(WAITS)", "loose = Job(END_WITH_PARENT + WAITS)"),
                ('"ROLE_NAME ROLE_RANK', '"ROLE_TITLE ROLE_RANK'),
            ],
            {LEFT, LISTED},
        ),
        "no rank tied to its launcher, and a variable that the list forgets": (
            [
                ("tied = Job(END_WITH_PARENT + WAITS)", "tied = Job(WAITS)"),
                ('    "TORCHELASTIC_RUN_ID": "the job\'s name (--rdzv-id)",\n', ""),
            ],
            {TIED, LISTED},
        ),
    },
    ranks=1,
    changes=only(KILLED),
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
BREAKS = [TOGETHER, LAUNCHED, ORPHANS, OF_TWO, FORKED, SPAWNED]


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
    assert run(_staggered, len(delays), delays, quiet=ALONE) == [[True] * len(delays)] * len(delays)


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


@pytest.mark.deep
@pytest.mark.parametrize(
    ("section", "before", "sleepers"),
    [
        # two torchruns with two ranks each
        pytest.param(KILLED, "        self.launcher.kill()\n", 1, id="while torchrun runs"),
        pytest.param(CHILDREN, "    pids = [None, None]\n", 2, id="while mp.spawn runs"),
    ],
)
def test_nothing_outlives_a_killed_launcher(
    section: str, before: str, sleepers: int, tmp_path: Path
) -> None:
    asleep = tmp_path / "asleep"
    margin = " " * (len(before) - len(before.lstrip()))
    sleep = f"{margin}open({str(asleep)!r}, 'a').write('z')\n{margin}time.sleep(600)\n"
    source = changed(LESSON, *only(section), (before, sleep + before))
    (tmp_path / "lesson.py").write_text(source)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([*torchrun, "lesson.py"], cwd=tmp_path, env=MARKED, **silent) as launcher:
        stop = time.monotonic() + 200
        while not (asleep.exists() and asleep.stat().st_size == sleepers):
            assert time.monotonic() < stop, "not in time"
            time.sleep(0.1)
        launcher.send_signal(signal.SIGKILL)
    assert gone()


# Values that no row shows


def test_a_launcher_by_hand_returns_how_each_rank_ended_and_what_it_said() -> None:
    program = "import os, sys; print(os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
    assert load(LESSON).launch_by_hand(program, 3) == ([0, 0, 0], ["0 of 3", "1 of 3", "2 of 3"])
    statuses, _ = load(LESSON).launch_by_hand("import sys; sys.exit(3)", 1)
    assert statuses == [3]


@pytest.mark.parametrize("how", ["sys.exit(3)", "os.kill(os.getpid(), 9)"])
def test_however_a_rank_ends_the_others_are_ended(how: str) -> None:
    program = f"import os, sys, time\nif os.environ['RANK'] == '1': {how}\ntime.sleep(60)"
    began = time.monotonic()
    statuses, _ = load(LESSON).launch_by_hand(program, 2)
    assert statuses == [-signal.SIGTERM, 3 if "exit" in how else -signal.SIGKILL]
    assert time.monotonic() - began < 50


def test_a_child_is_told_nothing_of_the_rank_that_starts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lesson = load(LESSON)
    for name in (*lesson.NAMES, "TORCHELASTIC_NEW", "PYTHONUNBUFFERED"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KEPT", "1")
    told = lesson.without_ranks()
    assert not {*lesson.NAMES, "TORCHELASTIC_NEW", "PYTHONUNBUFFERED"} & told.keys()
    assert told["KEPT"] == "1"


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


def two_clients() -> tuple[bool, bool]:
    """Whether keys of the lesson's store are seen by it, and not by others of the same server."""
    lesson = load(LESSON)
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(server.port)}
    lesson.open_store().set("door", "open")
    return lesson.open_store().check(["door"]), server.check(["door"])


def test_the_lesson_s_keys_in_the_store_stay_apart() -> None:
    assert run(two_clients, 1, group=False) == [(True, False)]
