"""Matrices are what the algorithms say, places the best; logs are read, and breaks are seen."""

import itertools
import math
import random
import re
import sys
from collections import Counter
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from course.playing import Lazily, Played, load, play
from course.ranks import run
from tests.helpers.pretended_gpus import play_on_gpus
from tests.lessons.every import Breaks, Without, test_lesson  # noqa: F401

LESSON = "profiling/08_communication_matrix.py"
lesson = Lazily(LESSON)

WITHOUT = {  # as on macOS, where there is no /proc, and in some sandboxes
    "a kernel that tells": Without(
        [('Path("/proc/self/fd")', 'Path("/nowhere")')], {"what the kernel's sockets count"}
    )
}


def of_size(n: int):
    """The lesson, as one of n ranks has it."""
    lesson.matrix.__globals__.update(WORLD_SIZE=n, ALL=tuple(range(n)))
    return lesson


# Messages


def hops_of_a_ring(n: int, step: int, halves: int) -> Counter:
    """Let chunks travel around a ring until all ranks have all: {(from, to): messages}."""
    has = [{rank} for rank in range(n)]
    fresh = [rank for rank in range(n)]  # the chunk that each rank got last
    sent = Counter()
    while any(len(chunks) < n for chunks in has):
        arriving = {(rank + step) % n: fresh[rank] for rank in range(n)}
        for rank in range(n):
            sent[rank, (rank + step) % n] += halves
        for rank, chunk in arriving.items():
            has[rank].add(chunk)
            fresh[rank] = chunk
    return sent


@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_rings_are_hop_by_hop_what_the_lesson_says(n: int) -> None:
    """A reduce-scatter makes the hops of an all-gather, with sums instead of copies."""
    own = of_size(n)
    backwards, forwards = hops_of_a_ring(n, -1, 2), hops_of_a_ring(n, 1, 2)
    nbytes = 8 * n * 5  # two halves of n chunks
    once = {
        "AllReduce": (backwards + backwards, nbytes // (2 * n)),
        "AllGather": (forwards, nbytes // 2),
        "ReduceScatter": (backwards + backwards, nbytes // 2),  # of n * nbytes
    }
    for name, (hops, piece) in once.items():
        messages = own.messages_of(own.Operation(name, nbytes, own.ALL))
        due = Counter({(*edge, piece): count for edge, count in hops.items()})
        assert Counter(tuple(message) for message in messages) == due
    by_nccl = own.messages_of(own.Operation("ReduceScatter", nbytes, own.ALL), gloo=False)
    assert Counter(by_nccl) == Counter(
        {(*edge, nbytes): count // 2 for edge, count in forwards.items()}
    )


def test_other_operations_send_to_whom_they_should() -> None:
    own = of_size(6)

    def edges(name: str, ranks: tuple) -> list[tuple]:
        messages = own.messages_of(own.Operation(name, 10, ranks), gloo=False)
        assert {message.nbytes for message in messages} <= {10}
        return [message[:2] for message in messages]

    assert edges("Send", (4, 1)) == [(4, 1)]
    assert edges("Recv", (4, 1)) == []
    assert edges("Broadcast", (5, 0, 2)) == [(5, 0), (0, 2)]
    assert sorted(edges("AlltoAll", (1, 3, 5))) == [
        (i, j) for i in (1, 3, 5) for j in (1, 3, 5) if i != j
    ]
    assert edges("AllReduce", (3,)) == edges("AllGather", (3,)) == []
    with pytest.raises(ValueError, match="PutSignal"):
        edges("PutSignal", (0, 1))


def test_a_message_costs_two_headers_there_and_one_back() -> None:
    own = of_size(3)
    messages = [own.Message(0, 2, 10), own.Message(0, 2, 0), own.Message(1, 0, 7)]
    assert own.matrix(messages).tolist() == [[0, 48, 202], [103, 0, 0], [96, 0, 0]]
    assert own.matrix(messages, 0, 0).tolist() == [[0, 0, 10], [7, 0, 0], [0, 0, 0]]


def test_a_rank_asks_for_what_it_takes_part_in() -> None:
    own = of_size(4)
    due = own.asked(
        [
            own.Operation("AllReduce", 8, (0, 2)),
            own.Operation("AllReduce", 8, (0, 2)),
            own.Operation("AllReduce", 8, (1, 3)),
            own.Operation("AlltoAll", 5, (0, 1, 2)),
            own.Operation("Send", 7, (2, 3)),
            own.Operation("Send", 7, (3, 2)),
            own.Operation("Send", 7, (2, 2)),
            own.Operation("Recv", 7, (3, 2)),
        ],
        rank=2,
    )
    assert due == {
        ("AllReduce", 8, (0, 2)): 2,
        ("Send", 5, (2, 0)): 1,
        ("Send", 5, (2, 1)): 1,
        ("Send", 7, (2, 3)): 1,
    }


def test_what_crosses_is_what_lies_outside_both_frames() -> None:
    M_RR = torch.arange(16).view(4, 4)  # entry (i, j) is 4 i + j
    own = of_size(4)
    assert own.between_nodes(M_RR, (0, 1)) == 2 + 3 + 6 + 7 + 8 + 9 + 12 + 13
    assert own.between_nodes(M_RR, (0, 2)) == 1 + 3 + 4 + 6 + 9 + 11 + 12 + 14


# Places


square = st.integers(2, 6).flatmap(
    lambda n: st.lists(
        st.lists(st.integers(0, 1000), min_size=n, max_size=n), min_size=n, max_size=n
    )
)


@given(square)
def test_the_best_division_is_the_best_of_all(rows: list[list[int]]) -> None:
    n = len(rows)
    of_size(n)
    crossing = {}
    for bits in range(2**n):
        node = frozenset(rank for rank in range(n) if bits >> rank & 1)
        if len(node) in (n // 2, n - n // 2):
            crossing[node] = sum(
                rows[i][j] for i in range(n) for j in range(n) if (i in node) != (j in node)
            )
    M_RR = torch.tensor(rows)
    for node in lesson.divisions(n):
        assert lesson.between_nodes(M_RR, node) == crossing[frozenset(node)]
    best = lesson.best_division(M_RR)
    assert lesson.between_nodes(M_RR, best) == min(crossing.values())


@pytest.mark.parametrize(("n", "due"), [(2, 1), (3, 3), (4, 3), (5, 10), (8, 35), (16, 6435)])
def test_each_division_is_there_once(n: int, due: int) -> None:
    found = lesson.divisions(n)
    both = {frozenset({frozenset(node), frozenset(range(n)) - set(node)}) for node in found}
    assert len(found) == len(both) == due
    assert found[0] == tuple(range(math.ceil(n / 2)))
    assert {len(node) for node in found} == {math.ceil(n / 2)}


def test_of_many_ranks_two_divisions_are_left() -> None:
    assert lesson.divisions(18) == [tuple(range(9)), tuple(range(0, 18, 2))]


# What the kernel counts


def test_connections_are_matched_and_the_store_s_left_out(monkeypatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "29500")
    own = of_size(2)
    a, b = ["10.0.0.1", 4000], ["10.0.0.2", 4000]  # one port, on two nodes
    c, d = ["10.0.0.1", 4001], ["10.0.0.2", 5001]  # another group's connection
    store, client = ["10.0.0.1", 29500], ["10.0.0.2", 6000]
    elsewhere = ["10.0.0.9", 22]
    told = [
        [[[a, b], 7, 100], [[c, d], 1, 20], [[store, client], 900, 800], [[a, elsewhere], 5, 5]],
        [[[b, a], 100, 7], [[d, c], 20, 1], [[client, store], 800, 900]],
    ]
    arrived_RR, sent_RR = own.assemble(told)
    assert arrived_RR.tolist() == sent_RR.tolist() == [[0, 120], [8, 0]]
    told[1][0][1] = 99  # a byte that did not arrive
    arrived_RR, sent_RR = own.assemble(told)
    assert (sent_RR - arrived_RR).tolist() == [[0, 1], [0, 0]]


def measured_steps() -> list:
    """Matrices of steps that the lesson's jobs do not contain."""
    own = load(LESSON)
    rank = dist.get_rank()
    x = torch.ones(1234)

    def uneven() -> None:
        parts = [[5, 700], [0, 1]]  # from rank, to rank
        own_parts = [sent[rank] for sent in parts]
        received = torch.empty(sum(own_parts))
        dist.all_to_all_single(received, x[: sum(parts[rank])], own_parts, parts[rank])

    steps = [lambda: None, own.meet, uneven, dist.barrier]
    return [own.measure(step)[0].tolist() for step in steps]


def test_only_the_step_is_counted() -> None:
    """A barrier of two is a message of nothing each way; of an all-to-all nothing else travels."""
    nothing, met, uneven, barrier = run(measured_steps, 2)[0]
    assert nothing == met == [[0, 0], [0, 0]]
    assert uneven == [[0, 4 * 700 + 96 + 48], [96 + 48, 0]]
    assert barrier == [[0, 96 + 48], [96 + 48, 0]]


def descriptors_left_open() -> int:
    own = load(LESSON)
    before = len(own.os.listdir("/proc/self/fd"))
    for _ in range(50):
        own.counters()
    return len(own.os.listdir("/proc/self/fd")) - before


def test_looking_at_sockets_leaves_no_descriptors() -> None:
    assert max(run(descriptors_left_open, 2)) < 10


class Told:
    """A socket of which the kernel tells: 7 bytes arrived, 100 sent, 30 of these once more."""

    def __init__(self, fileno: int) -> None:
        self.fileno = fileno

    def __enter__(self) -> "Told":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def getsockopt(self, level: int, option: int, length: int) -> bytes:
        info = bytearray(length)
        for at, value in ((128, 7), (200, 100), (208, 30)):  # as in linux/tcp.h
            info[at : at + 8] = value.to_bytes(8, sys.byteorder)
        return bytes(info)

    def getsockname(self) -> tuple[str, int]:
        return "10.0.0.1", 4000

    def getpeername(self) -> tuple[str, int]:
        return "10.0.0.2", 5000


def test_what_tcp_sends_again_is_not_counted_again() -> None:
    own = load(LESSON)
    own.Path = lambda folder: SimpleNamespace(glob=lambda pattern: [SimpleNamespace(name="7")])
    own.os = SimpleNamespace(readlink=lambda path: "socket:[1]", dup=lambda number: number)
    own.socket = SimpleNamespace(socket=Told, IPPROTO_TCP=6, TCP_INFO=11)
    assert own.counters() == {(("10.0.0.1", 4000), ("10.0.0.2", 5000)): (7, 70)}


# NCCL's log

INIT = (
    "gpu3:77:81 [1] NCCL INFO ncclCommInitRankConfig comm 0xa{r} rank {r} nranks 3 cudaDev {r} "
    "nvmlDev {r} busId 1b000 commId 0x{id} - Init {state}"
)
SPLIT = (
    "[2026-01-01 12:00:00] gpu3:77:81 [1] NCCL INFO ncclCommSplit comm 0xb{r} rank {r} nranks 2 "
    "cudaDev 0 nvmlDev 0 busId 1b000 parent 0xa{p} childCount 1 color 77 key {r} - Init COMPLETE"
)
CALL = (
    "gpu3:77:81 [1] NCCL INFO {name}: opCount {op} sendbuff 0x7f00 recvbuff (nil) count {count} "
    "datatype {dtype} op 0 root {root} comm {comm} [nranks=3] stream 0x55"
)


def call(name: str, comm: str, count: int = 8, dtype: int = 7, root: int = 0, op: str = "0") -> str:
    return CALL.format(name=name, op=op, count=count, dtype=dtype, root=root, comm=comm)


def born(rank: int, commid: str = "beef", state: str = "COMPLETE") -> str:
    return INIT.format(r=rank, id=commid, state=state)


def test_well_formed_lines_are_read_and_others_passed_over() -> None:
    lines = [
        "gpu3:77:77 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>",
        born(2, state="START"),
        born(2),
        "gpu3:77:81 [1] NCCL INFO Channel 00/16 : 0 1 2",
        call("AllReduce", "0xa2", count=268435456, dtype=9, op="1f"),
        "gpu3:77:81 [1] NCCL INFO 805306368 Bytes -> Algo 1 proto 2 time 3970.683594",
        call("Send", "0xa2", count=5, root=1, op="20"),
        "gpu3:77:81 [1] NCCL INFO AllReduce: opCount 21 sendbuff 0x7f00 recvbu",  # cut off
    ]
    log = lesson.parse("\n".join(lines))
    assert log.places == {"0xbeef": 2}
    assert log.sizes == {"0xbeef": 3}
    assert log.calls == [
        ("AllReduce", 0x1F, 268435456, 9, 0, "0xbeef"),
        ("Send", 0x20, 5, 7, 1, "0xbeef"),
    ]


def test_a_line_that_others_have_published_is_read() -> None:
    """From NCCL's issues 531 and 1605: a call, and a split that has a commId of its own."""
    split = (
        "myhost:2261199:2261301 [0] NCCL INFO ncclCommSplit comm 0x595122703ca0 rank 0 nranks 2 "
        "cudaDev 0 nvmlDev 0 busId 1a000 parent 0x5951213c0f90 color 1684518034 key 0 "
        "commId 0x5a16c3838ce6f1f8 - Init COMPLETE"
    )
    called = (
        "n136-081-017:201800:201800 [2] NCCL INFO AllGather: opCount f7 sendbuff 0x7f33f878be00 "
        "recvbuff 0x7f33f878ca00 count 512 datatype 0 op 0 root 0 comm 0x595122703ca0 "
        "[nranks=16] stream 0x9cd23f10"
    )
    log = lesson.parse(f"{split}\n{called}")
    assert log.places == {"0x5a16c3838ce6f1f8": 0}
    assert log.calls == [("AllGather", 247, 512, 0, 0, "0x5a16c3838ce6f1f8")]


def test_the_logged_matrix_knows_groups_roots_and_types() -> None:
    """Job's ranks 0, 1, 2 are the world's 2, 0, 1; a group is split off for the job's 1 and 2."""
    of_size(3)
    world = {0: 2, 1: 0, 2: 1}  # by the job's rank: the place in the communicator
    texts = {job: [born(place)] for job, place in world.items()}
    for job, place in ((1, 1), (2, 0)):
        texts[job].append(SPLIT.format(r=place, p=world[job]))
    for job, place in world.items():
        texts[job].append(call("Broadcast", f"0xa{place}", count=100, dtype=1, root=2))
    texts[1].append(call("Send", "0xb1", count=3, dtype=8, root=0))
    texts[2].append(call("Recv", "0xb0", count=3, dtype=8, root=1))
    texts[0].append(call("Send", "0xa2", count=9, root=2))  # to itself
    texts[0].append(call("Send", "0xa2", count=9, root=0))
    logs = [lesson.parse("\n".join(texts[job])) for job in range(3)]
    assert logs[1].places == {"0xbeef": 0, "0xbeef childCount 1 color 77": 1}
    broadcast = [[0, 100, 0], [0, 0, 100], [0, 0, 0]]  # places 2, 0, 1
    broadcast[1][2] += 3 * 8
    broadcast[0][1] += 9 * 4
    assert lesson.logged_matrix(logs).tolist() == broadcast


def log_of(*lines: str):
    return lesson.parse("\n".join([born(0), *lines]))


def compared(a: list[str], b: list[str]) -> list[tuple]:
    one, other = (lesson.collectives(log_of(*lines), "0xbeef") for lines in (a, b))
    return [
        tuple(
            call.op_count if call else None for call in (first and first[0], second and second[0])
        )
        for first, second in lesson.differences(one, other)
    ]


def step(start: int, kinds: str) -> list[str]:
    """One rank's calls, a letter each: a, b, c are buckets, A, B, C the same in bfloat16."""
    counts = {"a": 500, "b": 600, "c": 700}
    return [
        call("AllReduce", "0xa0", counts[k.lower()], 9 if k.isupper() else 7, op=f"{start + i:x}")
        for i, k in enumerate(kinds)
    ]


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ("abcabc", "abcabc", []),
        ("abcabc", "abCabc", [(2, 2)]),  # another type
        ("abcabc", "ababc", [(2, None)]),  # a call that is missing
        ("ababc", "abcabc", [(None, 2)]),
        ("abcabc", "abcab", [(5, None)]),  # at the end: this rank has left
        ("aaaa", "aaa", [(3, None)]),
        ("caaa", "aaa", [(0, None)]),  # all that follows looks alike
        ("Aaa", "aaa", [(0, 0)]),
        ("abcabcabc", "abCabcab", [(2, 2), (8, None)]),
        ("", "ab", [(None, 0), (None, 1)]),
    ],
)
def test_two_ranks_are_compared_call_by_call(one: str, other: str, found: list) -> None:
    assert compared(step(0, one), step(0, other)) == found


def test_what_belongs_to_pairs_or_other_groups_is_not_compared() -> None:
    sends = [call("Send", "0xa0", root=1), call("Recv", "0xa0", root=2)]
    another = [call("AllReduce", "0xcc", count=5)]
    assert compared([*step(0, "ab"), *sends], [*step(0, "ab"), *another]) == []
    assert compared(step(0, "ab"), [call("AllGather", "0xa0", 500), *step(1, "b")]) == [(0, 0)]


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=30), st.randoms())
def test_one_call_left_out_is_one_difference(kinds: list[str], drawn: random.Random) -> None:
    """Or one of the same calls next to it: nobody can tell those apart."""
    at = drawn.randrange(len(kinds))
    rest = kinds[:at] + kinds[at + 1 :]
    ((only, other),) = compared(step(0, "".join(kinds)), step(0, "".join(rest)))
    assert other is None
    assert [*itertools.chain(kinds[:only], kinds[only + 1 :])] == rest


def read(files: list, monkeypatch, capsys) -> str:
    """What `--logs` prints, or refuses with."""
    own = load(LESSON)
    monkeypatch.setattr("sys.argv", [LESSON, "--logs", *map(str, files)])
    try:
        own.main()
    except SystemExit as end:
        return end.code
    return capsys.readouterr().out


def test_logs_of_a_job_are_read_whatever_their_order(tmp_path, monkeypatch, capsys) -> None:
    files = [tmp_path / "nccl.b", tmp_path / "nccl.a"]
    for file, text in zip(files, lesson.SAMPLE, strict=True):
        file.write_text(text)
    for order in (files, files[::-1]):
        said = read(order, monkeypatch, capsys)
        assert [line.split() for line in said.splitlines()[1:3]] == [["0", "4746"], ["2884", "0"]]
        assert "7629 kB between two nodes, at best: 0 on one of them" in said
        assert "communicator 0x6e99db63b024eb76: 1 of 2 ranks differ\n" in said
        assert "opCount a: rank 0 AllReduce of 1, type 7; rank 1 nothing" in said
    assert "has 2 ranks, got logs of 1" in read(files[:1], monkeypatch, capsys)
    for cut in ("nothing", lesson.SAMPLE[0].partition("Init COMPLETE")[2]):  # INIT not asked for
        files[0].write_text(cut)
        assert "NCCL_DEBUG_SUBSYS=INIT,COLL" in read(files[:1], monkeypatch, capsys)


# Broken lines

JOBS = ["data parallel", "FSDP", "pipeline", "expert parallel", "tensor parallel"]
GRIDS = ["TP inside, DP outside", "DP inside, TP outside"]


def entries(*jobs: str) -> set[str]:
    return {f"{job}: entries as predicted" for job in jobs}


def calls(*jobs: str) -> set[str]:
    return {f"{job}: calls unlike those predicted" for job in jobs}


def pairs(*jobs: str) -> set[str]:
    return {f"{job}: pairs between which data flows" for job in jobs}


MESSAGE = {f"1,000 bytes, rank 0 to 1: bytes {way}" for way in ("there", "back")}
SHARES = "FSDP: bytes / those of data parallel"
RING = "data parallel, one ring: worst / best"
WORST, IN_ORDER = "TP inside: worst / best", "TP outside: in order / best"
BEST = "jobs for which no places are better than in order"
AGREE = "jobs of which all that was sent arrived, once"
SAMPLE = {f"sample: bytes that rank {rank} sends" for rank in (0, 1)}
FIRST, DIFFERENCES = "sample: opCount of the first difference", "sample: differences"
LOOP = "for _ in range(4 * LAYERS):\n            dist."
HALF = "for _ in range(2 * LAYERS):\n            dist."
TO_PARTNER = "[len(tokens) * (rank == (RANK ^ 1)) for rank in ALL]"
LINES = {
    "as in Try: rings the other way": (
        [("ring(ranks, -1 if gloo else 1,", "ring(ranks, 1,")],
        entries("data parallel", "FSDP"),
    ),
    "one message in two, and a type too wide": (
        [
            ("            dist.send(x, 1)\n",
             "            dist.send(x[:99], 1)\n            dist.send(x[99:], 1)\n"),
            ("            dist.recv(x, 0)\n",
             "            dist.recv(x[:99], 0)\n            dist.recv(x[99:], 0)\n"),
            ("WIDTHS = [1, 1, 4, 4, 8, 8, 2, 4, 8, 2,", "WIDTHS = [1, 1, 4, 4, 8, 8, 2, 4, 8, 4,"),
        ],
        MESSAGE | {max(SAMPLE)},
    ),
    "gloo credited with a reduce-scatter; one expert for each rank's tokens; calls from 1": (
        [
            ('if name == "ReduceScatter" and not gloo:', 'if name == "ReduceScatter":'),
            ("all_to_all_single(arrived, tokens)",
             f"all_to_all_single(arrived, tokens, *2 * [{TO_PARTNER}])"),
            ("int(op_count, 16)", "1 + int(op_count, 16)"),
        ],
        entries("FSDP", "expert parallel") | pairs("expert parallel") | {FIRST},
    ),
    "one gathering, no backward pass, half of the all-reduces": (
        [
            ("(layer, mesh=mesh)", "(layer, mesh=mesh, reshard_after_forward=False)"),
            ("        pass_on([*reversed(ALL)])  # backward\n", ""),
            (LOOP + "all_reduce", HALF + "all_reduce"),
        ],
        entries("FSDP", "pipeline", "tensor parallel", *GRIDS)
        | pairs("pipeline") | {SHARES, WORST, IN_ORDER},
    ),
    "counters since the connection was made; types that are not compared": (
        [
            ("arrived - arrived_before, sent - sent_before", "arrived, sent - sent_before"),
            ("(self.name, self.count, self.datatype, self.root)", "(self.name, self.count)"),
        ],
        MESSAGE | entries(*JOBS, *GRIDS)
        | pairs("data parallel", "pipeline")
        | {AGREE, DIFFERENCES, SHARES, WORST, IN_ORDER, RING, BEST},
    ),
    "pairs that are the same in both grids; the loss of both ranks": (
        [
            ("torn = [(rank, rank + WORLD_SIZE // 2)", "torn = [(2 * rank, 2 * rank + 1)"),
            ("opCount a sendbuff 0x7f2d000000", "opCount a sendbuff (nil)"),
            ("SKIPS = [(1, 1), (1, 0), (0, 1)]", "SKIPS = [(1, 1)]"),
        ],
        {IN_ORDER, BEST, DIFFERENCES},
    ),
}  # fmt: skip


BREAKS = Breaks(LINES, ranks=4)


# What the pretended NCCL logs, on four GPUs.
ON_FOUR_GPUS = {
    "all calls since the job began": (
        [("calls=log.calls[before:]", "calls=log.calls")],
        calls(*JOBS, *GRIDS),
    ),
    "ranks of groups taken for the job's, what goes to oneself, one gathering": (
        [
            ("[place] = rank", "[place] = place"),
            ("+= ranks[0] == rank != ranks[1]", "+= ranks[0] == rank"),
            ("(layer, mesh=mesh)", "(layer, mesh=mesh, reshard_after_forward=False)"),
        ],
        calls("FSDP", "expert parallel", "tensor parallel", *GRIDS),
    ),
    "half of the steps": (
        [
            (LOOP + "all_reduce", HALF + "all_reduce"),
            ("        pass_on([*reversed(ALL)])  # backward\n", ""),
            ("        ddp(x).sum().backward()\n", "        ddp(x)\n"),
        ],
        calls("data parallel", "pipeline", "tensor parallel", *GRIDS),
    ),
}


@pytest.mark.deep
@pytest.mark.parametrize("name", ON_FOUR_GPUS)
def test_a_break_is_seen_on_gpus(name: str) -> None:
    changes, failed = ON_FOUR_GPUS[name]
    played = play_on_gpus(LESSON, 4, *changes)
    assert failed <= played.failed, played.output
    if name.startswith("half"):
        assert "by theory: NCCL's calls" in played.output  # printed, and not claimed
        assert {row["claim"] for row in played.ledger if "entries" in row["claim"]} == set()


def PLAIN(played: Played) -> None:
    """The table names the best places, and the sample's difference is told."""
    assert "opCount a: rank 0 AllReduce of 1, type 7; rank 1 nothing" in played.output
    rows = dict(re.findall(r"^ {5}(\w.*?) {2,}.*  (0, \d)$", played.output, re.M))
    assert list(rows) == [*JOBS, *GRIDS]
    assert set(rows.values()) == {"0, 1", "0, 2"}
    assert rows["DP inside, TP outside"] == "0, 2"
    header, *rest = re.findall(
        r"^ {5}data parallel +FSDP[^\n]*\n((?: +\d+.*\n){4})", played.output, re.M
    )
    assert not rest
    assert [line.split()[:4] for line in header.splitlines()] == [
        ["0", "1", "0", "788"],
        ["788", "0", "1", "0"],
        ["0", "788", "0", "1"],
        ["1", "0", "788", "0"],
    ]


@pytest.mark.deep
def test_as_in_try_larger_gradients_want_other_places() -> None:
    more = ("PARAMETERS = LAYERS * WIDTH**2", "PARAMETERS = 16 * LAYERS * WIDTH**2")
    played = play(LESSON, 4, more)
    played.expect({IN_ORDER})
    rows = dict(re.findall(r"^ {5}(\w.*?) {2,}.*  (0, \d)$", played.output, re.M))
    assert rows["TP inside, DP outside"] == "0, 2"
    assert rows["DP inside, TP outside"] == "0, 1"


# Types, roots, sizes, and the figure's bars


def test_a_type_of_nccl_is_as_wide_as_torchs() -> None:
    names = "int8 uint8 int32 uint32 int64 uint64 float16 float32 float64 bfloat16"
    names += " float8_e4m3fn float8_e5m2"  # in the order of ncclDataType_t
    assert [getattr(torch, name).itemsize for name in names.split()] == lesson.WIDTHS


def test_a_reduce_ends_with_its_root_and_a_broadcast_begins_with_it() -> None:
    inside = {0: 5, 1: 3, 2: 4}  # place in the communicator: rank in the job
    calls = [lesson.Logged(name, 0, 10, 9, 1, "c") for name in ("Reduce", "Broadcast", "AllReduce")]
    found = [lesson.operation_of(call, 5, inside) for call in calls]
    assert [(one.nbytes, one.ranks) for one in found] == [
        (20, (4, 5, 3)),
        (20, (3, 4, 5)),
        (20, (5, 3, 4)),
    ]


def test_sizes_are_rounded_up_to_what_halves_of_chunks_divide() -> None:
    own = of_size(3)
    assert [own.rounded_up(elements) for elements in (1, 6, 7, 256)] == [6, 6, 12, 258]


def test_what_crosses_in_order_in_turn_and_at_best_is_drawn_and_printed(
    capsys: pytest.CaptureFixture,
) -> None:
    own, axes = of_size(4), Mock(spines=MagicMock())
    M_RR = torch.zeros(4, 4, dtype=torch.int64)
    M_RR[0, 3] = M_RR[3, 0] = 3000  # two ranks that should share a node
    M_RR[0, 1] = 1000
    own.draw_bars(axes, {"torn": M_RR})
    bars = {call.kwargs["label"]: call.args[1] for call in axes.barh.call_args_list}
    assert bars == {"in order": 6.0, "in turn": 7.0, "best": 1.0}
    own.print_placements({"torn": M_RR})
    assert ["torn", "6", "7", "1", "0,", "3"] in [
        line.split() for line in capsys.readouterr().out.splitlines()
    ]
    own.write_cells(axes, M_RR, 3000)
    cells = {call.args for call in axes.text.call_args_list}
    assert cells >= {(1, 0, "1"), (3, 0, "3"), (0, 3, "3")}  # column, row, kB
