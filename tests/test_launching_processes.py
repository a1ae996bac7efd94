"""The lesson on launching: what it builds is right, what breaks it FAILs, nothing stays behind."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from exercises.ranks import attempt, run
from tests.lessons import ROOT, load

LESSON = "fundamentals/02_launching_processes.py"
SPAWN = ("on_rank_0(spawn_two)", '[{"members": [1, 2], "told": 0}] * 2')  # leave it out
FORK = ("fork_beside_a_thread()\n    claim", "1, False, True\n    claim")
TORCHRUN = ("    two_torchruns_make_one_world()\n    finish", "    finish")
BOTH = ("    fork_and_spawn()\n    two_torchruns_make_one_world()\n", "")


def _play(changes: tuple[tuple[str, str], ...]) -> set[str]:
    """Play the lesson on this rank; return what FAILED. mp.spawn's children import it by name."""
    from tests import lessons

    source = (ROOT / LESSON).read_text()
    for old, new in changes:
        assert source.count(old) == 1, f"{source.count(old)} times: {old}"
        source = source.replace(old, new)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "lesson_02_launching_processes.py").write_text(source)
        sys.path.insert(0, folder)
        code, ledger = lessons._play(LESSON, changes, ())
    failed = {row["claim"] for row in ledger if row["verdict"] == "FAIL"}
    assert (code == 0) == (not failed)
    return failed


def failed(*changes: tuple[str, str], ranks: int = 2) -> set[str]:
    outcomes = attempt(_play, ranks, changes, deadline=90, group=False)
    assert {o.kind for o in outcomes} == {"returned"}, "\n".join(map(str, outcomes))
    return outcomes[0].value


BREAKS = [
    pytest.param(
        [('mine = store.add("tickets", 1)', 'mine = store.add("tickets", 0)'), BOTH],
        {"different tickets that add() gave to n ranks"},
        id="a counter that is only read",
    ),
    pytest.param(
        [('store.compare_set("leader", "", str(RANK))', "str(RANK)"), BOTH],
        {"leaders that compare_set lets n ranks elect"},
        id="everybody elects himself",
    ),
    pytest.param(
        [('    store.wait([f"{name}/open"])\n', ""), BOTH],
        {"ranks that had come when this one left the barrier"},
        id="a barrier that waits for nobody",
    ),
    pytest.param(
        [('add(f"{name}/arrived", 1) == n', 'add(f"{name}/arrived", 1) == 1'), BOTH],
        {"ranks that had come when this one left the barrier"},
        id="a barrier that the first one opens",
    ),
    pytest.param(
        [('store.wait(["a rank that never came"]', 'store.wait(["came"]'), BOTH],
        {"wait() gives up an absent rank"},
        id="a wait for one who is there",
    ),
    pytest.param(
        [('store.get(f"value of {rank}")', 'store.get(f"value of {RANK}")'), BOTH],
        {"values that store and group gather alike"},
        id="an all-gather that reads its own value",
    ),
    pytest.param(
        [("number = dist.get_rank(group)", "number = dist.get_rank()"), BOTH],
        {"number among the even ranks, -1 outside"},
        id="global ranks for the group's",
    ),
    pytest.param(
        [
            (
                "child.start()\n    forked.set()",
                "forked.set()\n    time.sleep(0.3)\n    child.start()",
            ),
            SPAWN,
            TORCHRUN,
        ],
        {"forked child gets the lock that a thread lets go"},
        id="a fork after the lock was let go",
    ),
    pytest.param(
        [
            ("forked.wait() and lock.release()", "forked.wait()"),
            ("lock.acquire(timeout=60)", "lock.acquire(timeout=0.2)"),
            SPAWN,
            TORCHRUN,
        ],
        {"its parent gets that lock"},
        id="a thread that keeps the lock",
    ),
    pytest.param(
        [
            (
                "psutil.Process().num_threads(), lock.acquire",
                "threading.Thread(target=time.sleep, args=(1,)).start()"
                " or psutil.Process().num_threads(), lock.acquire",
            ),
            SPAWN,
            TORCHRUN,
        ],
        {"threads in a forked child"},
        id="a child with a thread of its own",
    ),
    pytest.param(
        [
            ("dist.all_gather_object(members, os.getpid())", "members[index] = os.getpid()"),
            FORK,
            TORCHRUN,
        ],
        {"mp.spawn: processes in the group its children make"},
        id="children that do not speak to each other",
    ),
    pytest.param(
        [("os.environ.pop(name, None)", "pass"), FORK, TORCHRUN],
        {"mp.spawn: variables of torchrun's that it sets"},
        id="an environment handed down",
    ),
    pytest.param(
        [
            (
                "[*torchrun, kind, *NAMES]",
                '[*torchrun[:3], "--nnodes=1", f"--rdzv-id={kind}", *torchrun[4:], kind, *NAMES]',
            ),
            FORK,
            SPAWN,
        ],
        {
            "torchrun: ranks numbered node x 2 + local rank",
            "torchrun: stores at which the four would meet",
        },
        id="two launchers that do not meet",
    ),
    pytest.param(
        [
            ('sys.argv[1] == "tied"', "True"),
            ('"ROLE_NAME ROLE_RANK', '"ROLE_TITLE ROLE_RANK'),
            FORK,
            SPAWN,
        ],
        {"ranks left when their launcher is killed", "torchrun: variables set, of those listed"},
        id="every rank tied to its launcher, and a name that nobody sets",
    ),
    pytest.param(
        [('sys.argv[1] == "tied"', "False"), FORK, SPAWN],
        {"ranks left, if they asked to be killed with it"},
        id="no rank tied to its launcher",
    ),
]


@pytest.mark.parametrize(("changes", "caught"), BREAKS)
def test_what_breaks_a_claim_fails_it_alone(
    changes: list[tuple[str, str]], caught: set[str]
) -> None:
    assert failed(*changes) == caught


def test_broadcast_claim_needs_a_group_of_two() -> None:
    change = ("src=dist.get_global_rank(group, len(even) - 1)", "src=0")
    caught = {"broadcast by the last of them, own rank outside"}
    assert failed(change, BOTH, ranks=3) == caught


def test_the_unbroken_lesson_passes_on_three_ranks() -> None:
    assert failed(ranks=3) == set()


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


def test_the_table_names_all_that_torchrun_sets() -> None:
    lesson = load(LESSON)
    clean = {k: v for k, v in os.environ.items() if k not in lesson.NAMES}
    program = "import os; os.write(1, (' '.join(os.environ) + '\\n').encode())"  # in one piece
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--tee=0"]
    command = [sys.executable, *torchrun, "--no-python", sys.executable, "-c", program]
    ran = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=60)
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


@pytest.mark.parametrize(
    ("before", "sleepers", "started"),
    [
        # torchrun, rank 0, two launchers with two ranks each
        pytest.param("    node.kill()\n", 1, 8, id="while torchrun runs"),
        # torchrun, rank 0, two children
        pytest.param("    told = sum(name in", 2, 4, id="while mp.spawn runs"),
    ],
)
def test_nothing_outlives_a_killed_launcher(
    before: str, sleepers: int, started: int, tmp_path: Path
) -> None:
    mark, source = uuid.uuid4().hex, (ROOT / LESSON).read_text()
    asleep = tmp_path / "asleep"
    sleep = f"    open({str(asleep)!r}, 'a').write('z')\n    time.sleep(600)\n"
    for old, new in [(before, sleep + before), *([SPAWN] if sleepers == 1 else [])]:
        assert source.count(old) == 1
        source = source.replace(old, new)
    (tmp_path / "lesson.py").write_text(source)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    with subprocess.Popen(
        [*torchrun, "lesson.py"],
        cwd=tmp_path,
        env=os.environ | {"MARK": mark},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as launcher:
        wait_until(lambda: asleep.exists() and asleep.stat().st_size == sleepers, 90)
        assert len(marked(mark)) >= started
        launcher.send_signal(signal.SIGKILL)
    wait_until(lambda: not marked(mark), 15)


def wait_until(holds, seconds: float) -> None:
    stop = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < stop, "not in time"
        time.sleep(0.1)
