"""Grader of 15: two real torchruns in two networks make one world; hosts' names become places."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.run

from course.grading import Wrong, expect, grade
from course.passages import die_with, enter, two_nodes
from course.ranks import attempt

HEAD = "10.0.0.1"  # two_nodes gives its nodes 10.0.0.1 and 10.0.0.2
PATIENCE = 45  # seconds in which two torchruns have to meet, on a busy machine too
APART = 3  # seconds between their starts
ADDRESSES = {HEAD, "10.0.0.2"}
TELL = "echo $RANK of $WORLD_SIZE, local $LOCAL_RANK of $LOCAL_WORLD_SIZE, store at $MASTER_ADDR"

# The flags


def flags_of(answer, wire, ranks: int) -> list:
    """The flags for node 0 and for node 1."""
    wire.only()
    made = []
    for node, here in enumerate([HEAD, "10.0.0.2"]):
        made.append(answer.torchrun_flags(node, 2, ranks, HEAD, here))
    return made


def be_torchrun(flags: list[str], output: int) -> None:
    """In a child: be torchrun, whose ranks run a line of shell, until it ends."""
    os.setsid()  # all that is of this node can be ended at once
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 0
    try:
        torch.distributed.run.main([*flags, "--no-python", "sh", "-c", TELL])
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        code = 1
    os._exit(1 if code else 0)


def launch(both_flags: list[list[str]], first: int) -> tuple[str, list[str]]:
    """Start one node, then the other; return why there are no nodes, and what each node wrote.

    A node that has not ended in time is told to be "still waiting".
    """
    try:
        networks = two_nodes(1000)
    except OSError as error:
        return str(error), []
    for name in list(os.environ):
        if name.startswith(("MASTER_", "TORCHELASTIC_", "PET_")) or name.endswith("RANK"):
            del os.environ[name]
    outputs = [os.memfd_create("output") for _ in networks]
    running = {}
    parent = os.getpid()
    for node in (first, 1 - first):
        enter(networks[node])
        pid = os.fork()
        if pid == 0:
            die_with(parent)
            be_torchrun(both_flags[node], outputs[node])
        running[pid] = node
        if node == first:
            time.sleep(APART)
    stop = time.monotonic() + PATIENCE
    while running and time.monotonic() < stop:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if running.pop(pid, None) is not None:
            stop = min(stop, time.monotonic() + 10)  # the other one has nobody to meet any more
        if all(b", store at " in os.pread(output, 100_000, 0) for output in outputs):
            stop = min(stop, time.monotonic() + 10)  # all ranks speak at about the same time
        time.sleep(0.02)
    for pid, node in running.items():
        os.write(outputs[node], b"still waiting\n")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    said = []
    for output in outputs:
        os.lseek(output, 0, os.SEEK_SET)
        with open(output) as file:
            said.append(file.read())
    return "", said


def lines_told(text: str) -> list[str]:
    """What the ranks of one node wrote."""
    return [line for line in text.splitlines() if ", store at " in line]


@pytest.mark.parametrize(("first", "ranks"), [(1, 2), (0, 1)])
def test_two_torchruns_make_one_world(answer: Path, first: int, ranks: int) -> None:
    """Two real torchruns, that of node {first} 3 s earlier, make one job: {ranks} ranks on each"""
    (both_flags,) = grade(answer, flags_of, 1, ranks)
    for node, flags in enumerate(both_flags):
        if not (isinstance(flags, list) and all(isinstance(flag, str) for flag in flags)):
            raise Wrong(f"node {node}: expected a list of flags, got {flags!r}")
    patient = {"deadline": PATIENCE + 60, "quiet": 30}  # it sleeps on purpose
    (ended,) = attempt(launch, 1, both_flags, first, **patient, group=False)
    assert ended.kind == "returned", ended
    why_not, said = ended.value
    if why_not:
        pytest.skip(f"needs root or user namespaces ({why_not})")
    told = [lines_told(text) for text in said]
    stores = set()
    for node, lines in enumerate(told):  # a wrong world first: who came second may find no store
        for line in lines:
            if f"of {2 * ranks}, local" not in line:
                raise Wrong(f"node {node}: a rank is told: {line}; expected {2 * ranks} ranks")
            stores.add(line.partition(" at ")[2])
    for node, text in enumerate(said):
        if not told[node]:
            lines = [line for line in text.splitlines() if line.strip()] or ["nothing"]
            raise Wrong(f"node {node}: no rank was started; in the end torchrun said: {lines[-1]}")
        expect(len(told[node]), ranks, f"node {node}: ranks started")
    if len(stores) != 1 or not stores <= ADDRESSES:
        met = ", ".join(sorted(stores))
        raise Wrong(f"the ranks are told to meet at {met}, which is not one node's address")


def told_torchrun(answer, wire) -> list[tuple[str, str, str, bool]]:
    """What torchrun reads in the flags of each of 3 nodes: nodes, ranks, where to meet, and
    whether this node is said to serve the store."""
    told = []
    for node in range(3):
        flags = answer.torchrun_flags(node, 3, 5, "10.7.0.1", f"10.7.0.{node + 1}")
        read = torch.distributed.run.parse_args([*flags, "script.py"])
        where = torch.distributed.run.get_rdzv_endpoint(read).replace(":None", ":29500")
        serves = re.search("is_host=[1ty]", read.rdzv_conf.lower()) is not None
        told.append((str(read.nnodes), str(read.nproc_per_node), where, serves))
    return told


def test_other_numbers(answer: Path) -> None:
    """As many nodes and ranks as asked for, around the head that is named"""
    (told,) = grade(answer, told_torchrun, 1)
    for node, (nodes, ranks, where, serves) in enumerate(told):
        if nodes not in ("3", "3:3"):
            raise Wrong(f"3 nodes were asked for, and torchrun is told of {nodes}")
        expect(ranks, "5", "5 ranks per node were asked for; what torchrun is told")
        expect(where, "10.7.0.1:29500", f"where node {node} of 3 is told to meet the others")
        if serves and node > 0:
            raise Wrong(f"node {node} of 3 is told to serve the store, as the head does")


# Hello

HOSTS = {
    "node by node": ["b", "b", "a", "a"],
    "dealt out in turn": ["a", "b", "a", "b"],
    "unequal nodes": ["b", "a", "b", "b"],
    "names that begin alike": ["node10", "node1", "node1", "node10"],
    "names with dots": ["gpu.b", "gpu.a", "gpu.a.b", "gpu.b"],
    "one node": ["a", "a", "a", "a"],
    "a node per rank": ["d", "c", "b", "a"],
}


def greet(answer, wire, hosts: list[str]) -> tuple:
    said = answer.hello(hosts[dist.get_rank()])
    wire.no_groups()
    calls = wire.calls()
    return said, calls, answer.hello("here")


def due_of(hosts: list[str], rank: int) -> tuple[str, list[int], list[int]]:
    order = sorted(set(hosts), key=hosts.index)
    inside = [other for other in range(len(hosts)) if hosts[other] == hosts[rank]]
    local = sum(other < rank for other in inside)
    across = []
    for name in order:
        ranks = [other for other in range(len(hosts)) if hosts[other] == name]
        across += ranks[local : local + 1]
    node = f"node {order.index(hosts[rank])} of {len(order)}"
    greeting = f"rank {rank} of {len(hosts)}: local rank {local} of {len(inside)} on {node}"
    return greeting, inside, across


@pytest.mark.parametrize("case", HOSTS)
def test_hello(answer: Path, case: str) -> None:
    """Greeting and neighbors, {case}"""
    hosts = HOSTS[case]
    for rank, (said, calls, again) in enumerate(grade(answer, greet, 4, hosts)):
        if not (isinstance(said, tuple) and len(said) == 3):
            raise Wrong(f"expected a greeting and two lists of ranks, got {said!r}")
        due = due_of(hosts, rank)
        names = "greeting", "the ranks of this node", "the ranks with this local rank"
        for part, right, name in zip(said, due, names, strict=True):
            expect(part, right, f"hosts {', '.join(hosts)}; rank {rank}: {name}")
        made = [event.op for event in calls]
        expect(made, ["all_gather", "all_gather"], f"rank {rank}: its calls")
        expect(again, due_of(["here"] * 4, rank), f"rank {rank}: called again, all on one host")


@pytest.mark.parametrize("n", [1, 3])
def test_cost(answer: Path, n: int) -> None:
    """One all_gather_object and nothing else, on {n} ranks"""
    hosts = ["a", "b", "a"][:n]
    for rank, (said, calls, _) in enumerate(grade(answer, greet, n, hosts)):
        expect(said, due_of(hosts, rank), f"hosts {', '.join(hosts)}; rank {rank}: what it returns")
        made = [event.op for event in calls]
        expect(made, ["all_gather", "all_gather"], f"rank {rank}: its calls")
