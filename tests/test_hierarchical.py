"""Two nodes in namespaces: sums, bytes on the cable, and nothing left behind, whoever ends what."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exercises.ranks import attempt, run
from tests import lessons
from tests.lessons import ROOT, Played, load, play

LESSON = "communication/06_hierarchical_collectives.py"
QUICK = ('"default": 20.0', '"default": 400.0')
ONE_ROUND = ("range(1 if why_not else 3)", "range(1)")
NO_TIMES = ("        times(rounds, mbit)\n", "")


def once(*changes: tuple[str, str], argv: tuple[str, ...] = ()) -> Played:
    """One round of small all-reduces, no times judged."""
    return play(LESSON, 1, QUICK, ONE_ROUND, NO_TIMES, *changes, argv=argv)


# Values


def apart(nodes: int, local: int, length: int, dtype: torch.dtype) -> int:
    """Numbers of any way's all-reduce that differ from one process's, on this rank."""
    lesson = load(LESSON, ("NODES, L = 2, 2", f"NODES, L = {nodes}, {local}"), ("12_000", "2"))
    brought = [torch.arange(length) % 5 + rank for rank in range(nodes * local)]
    wrong = 0
    for name, (way, _) in lesson.ways().items():
        if name != "hierarchy in torch":  # which needs shares of equal length, and its mesh
            way(x := brought[lesson.RANK].to(dtype))
            wrong += int((x != sum(brought).to(dtype)).sum())
    return wrong


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (3, 1), (4, 1)]),
    st.integers(0, 40),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_every_way_sums_right(shape: tuple[int, int], length: int, dtype: torch.dtype) -> None:
    nodes, local = shape
    assert run(apart, nodes * local, nodes, local, length, dtype) == [0] * (nodes * local)


# Claims, and what breaks them


@pytest.mark.parametrize("local", [1, 3])
def test_other_nodes(local: int) -> None:
    played = once(argv=("--ranks-per-node", str(local)))
    assert (played.code, played.failed) == (0, set()), played.output
    assert len(played.ledger) == 11


@pytest.mark.parametrize("argv", [("--ranks-per-node", "9"), ("--mbit", "0"), ("--mbit", "nan")])
def test_bad_flags_are_refused_before_any_rank(argv: tuple[str, str]) -> None:
    ran = subprocess.run([sys.executable, ROOT / LESSON, *argv], capture_output=True, text=True)
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert "must be 1 to 8, --mbit 1 to 1000" in ran.stderr


LINK = ": S over the link, both ways"
WAYS = "ring, to and fro", "ring, node by node", "hierarchy", "torch's all_reduce"
WAYS += ("hierarchy in torch",)
BREAKS = {
    "a flat ring in place of the hierarchy": (
        '"hierarchy": (hierarchical,',
        '"hierarchy": (lambda x: ring_all_reduce(x, range(n)),',
        {"hierarchy" + LINK},
    ),
    "a counter that misses one direction": (
        "int(row[1]) + int(row[9])",
        "int(row[1])",
        {name + LINK for name in WAYS},
    ),
    "a counter that misses the other": (
        "int(row[1]) + int(row[9])",
        "int(row[9])",
        {name + LINK for name in WAYS},
    ),
    "nodes that are mixed up": (
        "libc.setns(nodes[rank // L], NET)",
        "libc.setns(nodes[rank % NODES], NET)",
        {name + LINK for name in WAYS},
    ),
    "a sum that is not passed on": (
        "piece.copy_(piece + came if step <= adds else came)",
        "piece.copy_(piece + came if step <= adds else piece)",
        {name + ": numbers that are wrong" for name in WAYS[:3]},
    ),
    "a node's sum that is not summed across": (
        '    dist.all_reduce(mine, group=mesh.get_group("across"))\n',
        "",
        {"hierarchy in torch: numbers that are wrong", "hierarchy in torch" + LINK},
    ),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_line_fails_the_claims_that_guard_it(what: str) -> None:
    old, new, claims = BREAKS[what]
    played = once((old, new))
    assert played.failed == claims, played.output
    assert played.code == 1


def test_times_fail_if_the_hierarchy_is_a_ring() -> None:
    changed = (
        '"hierarchy": (hierarchical,',
        '"hierarchy": (lambda x: ring_all_reduce(x, range(n)),',
    )
    played = play(LESSON, 1, ONE_ROUND, changed, argv=("--mbit", "40"))
    assert {f"time, {name} / hierarchy" for name in WAYS[:2]} & played.failed, played.output


# Who may make nodes


def unprivileged(*changes: tuple[str, str]) -> tuple[int, list[dict]]:
    """Play the lesson as nobody, who can make a network only inside a user namespace."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: or /proc/self stays root's
    return lessons._play(LESSON, changes, ())


def test_whoever_is_not_root_has_nodes_too() -> None:
    (outcome,) = attempt(unprivileged, 1, QUICK, ONE_ROUND, NO_TIMES, deadline=60, group=False)
    code, ledger = outcome.value
    assert code == 0, outcome.output
    assert [row["claim"] for row in ledger if row["verdict"] == "PASS"][-1].endswith(LINK)


NONE = ("if libc.unshare(NET)", "if True"), ("if libc.unshare(USER | NET)", "if True")
NO_TC = [('command(f"tc ', 'command(f"no-such-tc ')]
NO_RIGHT = [("ip link set lo up", "ip link set no-such-link up")]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (NONE, "unshare: "),
        (NO_TC, "No such file or directory: 'no-such-tc'"),
        (NO_RIGHT, 'Cannot find device "no-such-link"'),
    ],
)
def test_without_nodes_it_is_blocked_and_says_why(changes: list, why: str) -> None:
    played = once(*changes)
    assert played.code == 0
    assert why in played.output
    assert [row["needs"] for row in played.ledger if row["verdict"] == "BLOCKED"] == [
        "root or user namespaces",
        "GPUs in two nodes",
    ]
    assert max(map(len, played.output.splitlines())) <= 100


# Nothing is left

MARK = f"STARTED_BY_TEST={os.getpid()}".encode()  # inherited by all that a lesson starts
MARKED = os.environ | {"CUDA_VISIBLE_DEVICES": "", "STARTED_BY_TEST": str(os.getpid())}


def networks(pids: list[int]) -> set[str]:
    """The network namespaces that these processes are in, ours apart."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
    return found - {os.readlink("/proc/self/ns/net")}


def machine() -> dict:
    """What the lesson might leave: interfaces, qdiscs, named namespaces."""
    named = Path("/run/netns")
    tc = subprocess.run(["tc", "qdisc"], capture_output=True, text=True).stdout
    return {
        "interfaces": sorted(os.listdir("/sys/class/net")),
        "qdiscs": tc,
        "named": sorted(os.listdir(named)) if named.exists() else [],
    }


def start(path: Path, *launcher: str) -> subprocess.Popen:
    """Start the lesson; return it once its ranks and its two networks are there."""
    lesson = subprocess.Popen(
        [sys.executable, *launcher, path], env=MARKED, stdout=subprocess.DEVNULL, process_group=0
    )
    started, wanted = [], 6 if launcher else 5  # the lesson under torchrun, a launcher, four ranks
    for _ in range(600):
        time.sleep(0.05)
        started = psutil.Process(lesson.pid).children(recursive=True)
        nets = networks([process.pid for process in started])
        if (len(started), len(nets)) == (wanted, 2):
            return lesson
    raise AssertionError(f"no {wanted} processes: {started}")


def gone() -> bool:
    """True once no process that bears our mark is left: then none can hold a network, either."""
    for _ in range(200):
        left = []
        for pid in psutil.pids():
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                left += [pid] * (MARK in Path(f"/proc/{pid}/environ").read_bytes())
        if not left:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("end", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_signal_leaves_nothing(end: str) -> None:
    was = machine()
    lesson = start(ROOT / LESSON)
    lesson.send_signal(getattr(signal, end))
    assert lesson.wait(10) != 0
    assert gone()
    assert machine() == was


def test_torchrun_killed_leaves_nothing() -> None:
    was = machine()
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"
    lesson = start(ROOT / LESSON, *torchrun)
    lesson.kill()
    assert gone()
    assert machine() == was


def changed(folder: Path, *changes: tuple[str, str]) -> Path:
    source = (ROOT / LESSON).read_text()
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (path := folder / "lesson.py").write_text(source)
    return path


@pytest.mark.parametrize("end", ["    for way in ways():\n", "    1 / 0\n    for way in ways():\n"])
def test_the_end_and_an_exception_leave_nothing(end: str, tmp_path: Path) -> None:
    was = machine()
    path = changed(tmp_path, QUICK, ONE_ROUND, NO_TIMES, ("    for way in ways():\n", end))
    lesson = start(path)
    assert lesson.wait(60) == ("1 / 0" in end)
    assert gone()
    assert machine() == was


def test_a_rank_that_fails_ends_all(tmp_path: Path) -> None:
    was = machine()
    path = changed(tmp_path, ("    ways()[name][0](x)\n", "    time.sleep(60 / (RANK - 2))\n"))
    ran = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert ran.stderr.count("ZeroDivisionError: division by zero") == 1
    assert machine() == was
    left = [p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])]
    assert not [line for line in left if str(path) in line]
