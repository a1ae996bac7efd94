"""Two nodes in namespaces: sums, bytes on the cable, and nothing left behind, whichever ends."""

import io
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from course.lessons import ROOT
from course.playing import Played, load, play
from course.ranks import attempt, run
from tests.helpers.leftovers import MARKED, gone, machine
from tests.helpers.virtual_cluster import once_there, play_as_nobody
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "communication/07_hierarchical_collectives.py"
QUICK = ('"default": 20.0', '"default": 400.0')
ONE_ROUND = ("    repeats = 3\n", "    repeats = 1\n")
NO_TIMES = ("    check_times(rounds, mbit)\n", "")
NO_DEVICE = {"watched": "virtual nodes have no GPUs"}


def once(*changes: tuple[str, str], argv: tuple[str, ...] = ()) -> Played:
    """One round of small all-reduces, no times judged."""
    return play(LESSON, 1, QUICK, ONE_ROUND, NO_TIMES, *changes, argv=argv, deadline=200)


# Values


def apart(nodes: int, local: int, length: int, dtype: torch.dtype) -> int:
    """Numbers of any way's all-reduce that differ from one process's, on this rank."""
    lesson = load(LESSON, ("NODES = 2\n", f"NODES = {nodes}\n"), ("\nL = 2 ", f"\nL = {local} "))
    brought = [torch.arange(length) % 5 + rank for rank in range(nodes * local)]
    wrong = 0
    for name, way in lesson.ways().items():
        if name != "hierarchy in torch":  # which needs shares of equal length, and its mesh
            way.run(x := brought[lesson.RANK].to(dtype))
            wrong += int((x != sum(brought).to(dtype)).sum())
    return wrong


def digits_lost() -> float:
    """The largest relative error of any way's sum of numbers that need all of float32's digits."""
    lesson = load(LESSON)
    generator = torch.Generator().manual_seed(0)
    brought = [1e5 * (1 + torch.rand(50, generator=generator)) for _ in range(4)]
    due = sum(x.double() for x in brought)
    worst = 0.0
    for name, way in lesson.ways().items():
        if name != "hierarchy in torch":
            way.run(x := brought[lesson.RANK].clone())
            worst = max(worst, float((x.double() / due - 1).abs().max()))
    return worst


def test_sums_keep_the_digits_of_their_dtype() -> None:
    assert max(run(digits_lost, 4)) < 3 * 2**-24


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


@pytest.mark.deep
@pytest.mark.parametrize("local", [1, 3])
def test_other_nodes(local: int) -> None:
    played = once(argv=("--ranks-per-node", str(local)))
    played.expect(set())
    assert len(played.ledger) == 11


@pytest.mark.deep
@pytest.mark.parametrize("argv", [("--ranks-per-node", "9"), ("--mbit", "0"), ("--mbit", "nan")])
def test_bad_flags_are_refused_before_any_rank(argv: tuple[str, str]) -> None:
    ran = subprocess.run([sys.executable, ROOT / LESSON, *argv], capture_output=True, text=True)
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert "must be 1 to 8, --mbit 1 to 1000" in ran.stderr


LINK = ": S over the cable, both ways"
WRONG = ": elements that are wrong"
WAYS = "ring, to and fro", "ring, node by node", "hierarchy", "torch's all_reduce"
WAYS += ("hierarchy in torch",)
FLAT = (
    '"hierarchy": Way(hierarchical,',
    '"hierarchy": Way(lambda x: ring_all_reduce(x, node_by_node),',
)
LINES = {
    "a flat ring in place of the hierarchy": (FLAT, {"hierarchy" + LINK}),
    "a counter that misses one direction": (
        ("int(row[1]) + int(row[9])", "int(row[1])"),
        {name + LINK for name in WAYS},
    ),
    "a counter that misses the other": (
        ("int(row[1]) + int(row[9])", "int(row[9])"),
        {name + LINK for name in WAYS},
    ),
    "nodes that are mixed up": (
        ("nodes[2 * rank // len(pipes)]", "nodes[rank % 2]"),
        {name + LINK for name in WAYS},
    ),
    "a sum that is not passed on": (
        (
            "own.copy_(pass_on(chunks[(position - hop + 1) % n], own, ring))",
            "pass_on(chunks[(position - hop + 1) % n], own, ring)",
        ),
        {name + WRONG for name in WAYS[:3]},
    ),
    "the ring across left out": (
        ("    ring_all_reduce(chunks[(RANK + 1) % L], across)", "    across  "),
        {"hierarchy" + WRONG, "hierarchy" + LINK},
    ),
    "a node's sum that is not summed across": (
        ('    dist.all_reduce(own, group=mesh.get_group("across"))\n', ""),
        {"hierarchy in torch" + WRONG, "hierarchy in torch" + LINK},
    ),
    "torch's all_reduce keeps the largest": (
        (
            "Way(dist.all_reduce, edge)",
            "Way(lambda x: dist.all_reduce(x, dist.ReduceOp.MAX), edge)",
        ),
        {"torch's all_reduce" + WRONG},
    ),
}


BREAKS = Breaks(LINES, ranks=1, changes=[QUICK, ONE_ROUND, NO_TIMES], deadline=200)


def verdicts_on(seconds: dict[str, float]) -> list[str]:
    """What the lesson says of the flat rings' times next to the hierarchy's."""
    lesson = load(LESSON)
    lesson.check_times([{name: lesson.Seen(seconds[name], 0, 0) for name in WAYS}], 20.0)
    return [row["verdict"] for row in lesson.ledger]


def test_times_are_judged_by_the_bytes_on_the_cable() -> None:
    lesson = load(LESSON)
    predicted = {name: lesson.predicted_seconds(name, 20.0) for name in WAYS}
    assert verdicts_on(predicted) == ["PASS"] * 2
    assert verdicts_on(predicted | {"hierarchy": 1.15 * predicted["hierarchy"]}) == ["PASS"] * 2
    as_a_ring = predicted | {"hierarchy": predicted["ring, node by node"]}
    assert "FAIL" in verdicts_on(as_a_ring)
    as_it_should_not = predicted | {"hierarchy": predicted["ring, to and fro"]}
    assert verdicts_on(as_it_should_not) == ["FAIL"] * 2


def on_two_nodes(script: Path, local: int, mbit: float) -> tuple[list, list[str], dict]:
    """Run the script as torchrun on two nodes would; return exit statuses, errors, and ledger.

    As on Debian, the first node knows itself by an address that no other node can reach.
    """
    lesson = load(LESSON)
    nodes = lesson.two_nodes(mbit)
    ledger = script.with_suffix(".json")
    ranks = []
    for rank in range(2 * local):
        node = rank // local
        lesson.enter(nodes[node])
        place = {"RANK": rank, "WORLD_SIZE": 2 * local, "LOCAL_RANK": rank % local}
        place |= {"LOCAL_WORLD_SIZE": local, "MASTER_PORT": 29500, "LESSON_JSON": ledger}
        place["MASTER_ADDR"] = "10.0.0.1" if node else "127.0.0.1"
        variables = os.environ | {name: str(value) for name, value in place.items()}
        variables["GLOO_SOCKET_IFNAME"] = "slow"
        variables.pop("TORCHELASTIC_USE_AGENT_STORE", "")
        pipe = subprocess.PIPE
        ranks.append(subprocess.Popen([sys.executable, script], env=variables, stderr=pipe))
    errors = [rank.communicate(timeout=150)[1].decode() for rank in ranks]
    told = json.loads(ledger.read_text()) if ledger.exists() else {}
    return [rank.returncode for rank in ranks], errors, told


SENT = ": S sent by a node"
ON_GPUS = OnGpus(  # run as torchrun would on two real nodes: plain python starts ranks of its own
    changes=[
        (
            'local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))',
            "local_ranks = WORLD_SIZE // 2",
        ),
        ("64 * ELEMENTS if", "ELEMENTS if"),
    ],
    hardware={name + SENT: "a network card counts its bytes" for name in WAYS[:3]},
    ranks=(4,),
)


@pytest.mark.deep
def test_real_nodes_sum_right_and_their_cards_have_sent_what_was_predicted(tmp_path: Path) -> None:
    script = changed(tmp_path)
    ((codes, errors, told),) = run(on_two_nodes, 1, script, 2, 400, deadline=170, group=False)
    assert codes == [0] * 4, errors
    claims = [row["claim"] for row in told["ledger"] if row["verdict"] == "PASS"]
    assert set(claims) == {name + WRONG for name in WAYS} | {name + SENT for name in WAYS[:3]}


@pytest.mark.deep
def test_a_flat_ring_on_real_nodes_sends_more(tmp_path: Path) -> None:
    script = changed(tmp_path, FLAT)
    ((codes, errors, told),) = run(on_two_nodes, 1, script, 2, 400, deadline=170, group=False)
    assert codes == [1] * 4, errors
    failed = [row["claim"] for row in told["ledger"] if row["verdict"] == "FAIL"]
    assert failed == ["hierarchy" + SENT]


@pytest.mark.parametrize(
    ("files", "sent"),
    [
        (
            {
                "mlx5_0/ports/1/counters/port_xmit_data": 3,
                "mlx5_1/ports/1/counters/port_xmit_data": 4,
            },
            28,
        ),
        ({"rdmap0s6/ports/1/hw_counters/tx_bytes": 1000}, 1000),  # EFA
        (
            {"mlx5_0/ports/1/counters/port_xmit_data": 5, "mlx5_0/ports/1/hw_counters/tx_bytes": 9},
            20,
        ),
    ],
)
def test_bytes_of_cards_in_words_or_in_bytes(monkeypatch, tmp_path, files: dict, sent: int) -> None:
    for name, count in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{count}\n")
    lesson = load(LESSON)
    monkeypatch.setattr(lesson, "Path", lambda folder: tmp_path)
    assert lesson.bytes_sent_by_this_node(torch.device("cuda")) == sent


def verdict_on(sent: float) -> str:
    lesson = load(LESSON)
    lesson.judge_sent("hierarchy", 1.0, sent)
    return lesson.ledger[0]["verdict"]


@pytest.mark.parametrize(("sent", "due"), [(1.1, "PASS"), (2.0, "FAIL"), (0, "BLOCKED")])
def test_a_node_without_cards_is_not_judged(sent: float, due: str) -> None:
    assert run(verdict_on, 2, sent) == [due] * 2


# Who may make nodes


@pytest.mark.deep
def test_a_user_who_is_not_root_has_nodes_too() -> None:
    changes = [QUICK, ONE_ROUND, NO_TIMES]
    (outcome,) = attempt(play_as_nobody, 1, LESSON, *changes, deadline=200, group=False)
    code, ledger = outcome.value
    assert code == 0, outcome.output
    assert [row["claim"] for row in ledger if row["verdict"] == "PASS"][-1].endswith(LINK)


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
    played = once(*changes)
    assert played.code == 0
    assert why in played.output
    assert [row["needs"] for row in played.ledger if row["verdict"] == "BLOCKED"] == [
        "root or user namespaces",
        "2 nodes with GPUs",
    ]
    assert max(map(len, played.output.splitlines())) <= 100


# Nothing is left


def start(path: Path, *launcher: str) -> subprocess.Popen:
    """Start the lesson; return it once its ranks and its two networks are there."""
    lesson = subprocess.Popen(
        [sys.executable, *launcher, path], env=MARKED, stdout=subprocess.DEVNULL, process_group=0
    )
    once_there(lesson, 6 if launcher else 5)  # the lesson under torchrun, a launcher, four ranks
    return lesson


@pytest.mark.deep
@pytest.mark.parametrize("end", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_signal_leaves_nothing(end: str) -> None:
    was = machine()
    lesson = start(ROOT / LESSON)
    lesson.send_signal(getattr(signal, end))
    assert lesson.wait(150) != 0
    assert gone()
    assert machine() == was


@pytest.mark.deep
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


END = "    for name in ways():\n        claim("


@pytest.mark.deep
@pytest.mark.parametrize("end", [END, "    1 / 0\n" + END])
def test_the_end_and_an_exception_leave_nothing(end: str, tmp_path: Path) -> None:
    was = machine()
    path = changed(tmp_path, QUICK, ONE_ROUND, NO_TIMES, (END, end))
    lesson = start(path)
    assert lesson.wait(150) == ("1 / 0" in end)
    assert gone()
    assert machine() == was


@pytest.mark.deep
def test_a_rank_that_fails_ends_all(tmp_path: Path) -> None:
    was = machine()
    fails = ("    way.run(x)\n", "    time.sleep(60 / abs(RANK - 2))\n")
    path = changed(tmp_path, fails)
    ran = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=150)
    assert ran.returncode == 1
    assert ran.stderr.count("ZeroDivisionError: division by zero") == 1
    assert machine() == was
    left = [p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])]
    assert not [line for line in left if str(path) in line]


@pytest.mark.parametrize("nodes", [2, 3, 4, 8])
def test_a_hierarchy_crosses_with_a_rings_share_of_s_among_the_nodes(nodes: int) -> None:
    lesson = load(LESSON)
    lesson.NODES = nodes
    for name in ("hierarchy", "hierarchy in torch"):
        assert lesson.ways()[name].times_S == pytest.approx(2 * (1 - 1 / nodes))


# Values that no row shows


@pytest.mark.parametrize(
    ("nodes", "local", "flat", "to_and_fro"),
    [(2, 1, 1.0, 1.0), (2, 2, 1.5, 3.0), (2, 8, 1.875, 15.0), (4, 8, 1.9375, 15.5)],
)
def test_a_flat_ring_crosses_by_one_edge_or_by_one_per_rank(
    nodes: int, local: int, flat: float, to_and_fro: float
) -> None:
    lesson = load(LESSON)
    lesson.NODES, lesson.L = nodes, local
    times = {name: way.times_S for name, way in lesson.ways().items()}
    assert times["ring, node by node"] == times["torch's all_reduce"] == flat
    assert times["ring, to and fro"] == to_and_fro


def test_seconds_follow_from_806_400_bytes_with_their_headers() -> None:
    lesson = load(LESSON)
    once = 806_400 * 1514 / 1448 * 8 / 20e6  # at 20 Mbit/s
    times = {"hierarchy": 1, "ring, node by node": 1.5, "ring, to and fro": 3}
    for name, of_once in times.items():
        assert lesson.predicted_seconds(name, 20.0) == pytest.approx(of_once * once)
        assert lesson.predicted_seconds(name, 40.0) == pytest.approx(of_once * once / 2)


@pytest.mark.parametrize(
    ("packets", "verdict"), [(2, "PASS"), (1, "FAIL"), (3, "FAIL"), (4, "FAIL")]
)
def test_bytes_on_the_cable_are_s_each_way_with_headers(packets: int, verdict: str) -> None:
    """Of the hierarchy, in the round in which the fewest packets were sent again."""
    lesson = load(LESSON)
    crossed = packets * 806_400 * (1514 + 33) / 1448  # half of the packets are acknowledged
    rounds = [{"hierarchy": lesson.Seen(1.0, 0, times * crossed)} for times in (1.4, 1, 1.2)]
    lesson.check_bytes("hierarchy", rounds)
    assert [row["verdict"] for row in lesson.ledger] == [verdict]


def test_the_slowest_rank_and_the_most_wrong_one_are_told_and_node_0_s_bytes() -> None:
    lesson = load(LESSON)
    told = {0: (1.0, 0, 700), 1: (3.0, 0, 701), 2: (2.0, 5, 900)}
    pipes, sent = [], []

    def recv(rank: int) -> object:
        return lesson.Seen(*told[rank]) if sent[-1][1].startswith("what") else None

    for rank in told:
        send = partial(lambda rank, word: sent.append((rank, word)), rank)
        pipes.append(SimpleNamespace(send=send, recv=partial(recv, rank)))
    assert lesson.observe(pipes, "hierarchy") == (3.0, 5, 700)
    assert [word for rank, word in sent if rank == 2][:2] == ["hierarchy", "go"]


def groups() -> dict[str, list[int]]:
    mesh = load(LESSON).mesh_of_nodes("cpu")
    both = ("inside", "across")
    return {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in both}


def test_the_mesh_has_a_row_per_node() -> None:
    inside = [[0, 1], [0, 1], [2, 3], [2, 3]]
    across = [[0, 2], [1, 3], [0, 2], [1, 3]]
    expected = zip(inside, across, strict=True)
    assert run(groups, 4) == [{"inside": row, "across": column} for row, column in expected]


def test_a_cable_s_end_counts_both_ways_and_gloo_s_card_what_it_sent(monkeypatch) -> None:
    table = "Inter-| Receive | Transmit\n    lo: 9 9 0 0 0 0 0 0 9 9 0 0 0 0 0 0\n"
    table += "  slow: 1000 3 0 0 0 0 0 0 70 2 0 0 0 0 0 0\n"
    table += "  eth1: 500 3 0 0 0 0 0 0 5 2 0 0 0 0 0 0\n"
    lesson = load(LESSON)
    lesson.open = lambda path: io.StringIO(table)
    assert lesson.bytes_on_the_cable() == 1070
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "slow,eth1")
    assert lesson.bytes_sent_by_this_node(torch.device("cpu")) == 75


def test_on_real_nodes_nobody_sends_before_all_have_looked(monkeypatch) -> None:
    """By a clock and a counter that the work puts forward."""
    lesson = load(LESSON)
    now, counter, done = [0.0], [100], []

    def work() -> None:
        done.append("work")
        now[0] += 0.25
        counter[0] += 4000

    def look(device: torch.device) -> int:
        done.append("look")
        return counter[0]

    monkeypatch.setattr(lesson.dist, "barrier", lambda: done.append("barrier"))
    lesson.bytes_sent_by_this_node = look
    lesson.time = SimpleNamespace(perf_counter=lambda: now[0])
    assert lesson.timed_on_real_nodes(work, torch.device("cpu")) == (0.25, 4000)
    assert done == ["barrier", "look", "barrier", "work", "barrier", "look"]
