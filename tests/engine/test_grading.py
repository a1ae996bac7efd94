"""What graders stand on: every way for an answer to go wrong is told truly, in time, and leaves
nothing; nothing that an answer sends goes unseen."""

import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from course.grading import Wrong, expect, grade, same

HEAD = "import os, sys, time, subprocess, ctypes, torch, torch.distributed as dist\nR = None\n"
RING = "y = x.clone(); w = dist.isend(x, 1 - r); dist.recv(y, 1 - r); w.wait(); return y"


def call(answer, wire) -> object:
    r = dist.get_rank()
    return answer.f(torch.ones(3) + r, r)


def told(folder: Path, body: str, head: str = "", deadline: float = 2, **options) -> str:
    (path := folder / "answer.py").write_text(f"{HEAD}{head}\ndef f(x, r):\n    {body}\n")
    with pytest.raises(Wrong) as wrong:
        grade(path, call, 2, deadline=deadline, **options)
    return str(wrong.value)


def test_a_right_answer_gives_its_values(tmp_path: Path) -> None:
    (path := tmp_path / "answer.py").write_text(f"{HEAD}\ndef f(x, r):\n    {RING}\n")
    got = grade(path, call, 2)
    assert [y.tolist() for y in got] == [[2.0] * 3, [1.0] * 3]


WAYS = {
    "not written": ("raise NotImplementedError", ["not written yet: answer.py, line 5, in f"]),
    "raises on one rank": (
        "return [0, 1][r + 1] if r else dist.barrier()",
        ["rank 1: IndexError: list index out of range\n  answer.py, line 5, in f: return [0, 1]"],
    ),
    "leaves": ("sys.exit(0) if r else dist.barrier()", ["rank 1: called sys.exit(0)"]),
    "leaves without a word": (
        "os._exit(0) if r else dist.barrier()",
        ["rank 1: exited with status 0, before the function returned"],
    ),
    "crashes": ("ctypes.string_at(0) if r else dist.barrier()", ["rank 1: killed by SIGSEGV at "]),
    "prints for ever": (
        "while True: print('x' * 10**6)",
        ["printed more than 20,000,000 bytes; is there a loop that prints?"],
    ),
    "loops for ever": (
        "while r: pass",
        [
            "after 2 s not every rank has come back:\n  rank 0 came back\n",
            "rank 1 busy at answer.py:5",
        ],
    ),
    "stays away": (
        "return r or dist.all_reduce(x)",
        [
            "rank 0 waits in all_reduce, called from answer.py:5, in f; "
            "its last call: all_reduce, 12 B, among [0, 1]\n      return r or dist.all_reduce(x)\n"
            "  rank 1 came back"
        ],
    ),
    "waits for the other, and the other for it": (
        "dist.recv(x, 1 - r)",
        [
            "rank 0 waits in recv, called from answer.py:5, in f; "
            "its last call: recv, 12 B, from rank 1",
            "its last call: recv, 12 B, from rank 0",
        ],
    ),
    "tells what it printed": ("print('here', r); raise KeyError(r)", ["\n  printed: here "]),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_went_wrong_is_told(way: str, tmp_path: Path) -> None:
    body, words = WAYS[way]
    started = time.monotonic()
    message = told(tmp_path, body)
    assert time.monotonic() - started < 20
    for word in words:
        assert word in message, message


def test_a_file_that_cannot_be_read_is_told_with_its_line(tmp_path: Path) -> None:
    assert "SyntaxError: invalid syntax\n  answer.py, line 3: a b" in told(tmp_path, "pass", "a b")


def test_a_file_that_loops_on_import_is_told(tmp_path: Path) -> None:
    assert "rank 0 busy at answer.py:3, in <module>" in told(tmp_path, "pass", "while True: pass")


@pytest.mark.parametrize("end", ["return x", "os._exit(1)", "os.kill(os.getpid(), 9)", "1 / 0"])
def test_children_do_not_outlive_the_answer(end: str, tmp_path: Path) -> None:
    starts = [
        'subprocess.Popen(["sleep", "86401"])',
        'subprocess.Popen(["sleep", "86401"], start_new_session=True)',
        'subprocess.Popen(["sh", "-c", "sleep 86401 & setsid sleep 86401 &"])',
    ]
    body = "; ".join(starts) + f"; time.sleep(0.2); {end}"
    (path := tmp_path / "answer.py").write_text(f"{HEAD}\ndef f(x, r):\n    {body}\n")
    if end == "return x":
        grade(path, call, 2)
    else:
        with pytest.raises(Wrong):
            grade(path, call, 2)
    for _ in range(40):
        left = [p for p in psutil.process_iter(["cmdline"]) if "86401" in (p.info["cmdline"] or [])]
        if not left:
            return
        time.sleep(0.05)
    raise AssertionError(left)


SAMPLER = "torch.utils.data.DistributedSampler.__init__"


@pytest.mark.parametrize(
    "body",
    [
        "return torch.utils.data.DistributedSampler([1])",
        "from torch.utils.data.distributed import DistributedSampler as D; return D([1])",
        "return type('Mine', (torch.utils.data.DistributedSampler,), {})([1])",
        "import contextlib\n    with contextlib.suppress(BaseException):"
        " torch.utils.data.DistributedSampler([1])\n    return x",
    ],
)
def test_what_is_forbidden_is_refused_by_any_name(body: str, tmp_path: Path) -> None:
    message = told(tmp_path, body, forbid=(SAMPLER,))
    assert message.endswith("the answer uses DistributedSampler, which it is to do without")


def says_sending_is_wrong(answer, wire) -> None:
    answer.f(torch.ones(3), dist.get_rank())
    wire.only("send", "recv")


@pytest.mark.parametrize(
    "body",
    [
        "dist.all_reduce(x)",
        "dist.group.WORLD.allreduce([x]).wait()",
        "torch.ops._c10d_functional.all_reduce(x, 'sum', dist.group.WORLD.group_name)",
        "m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))\n"
        "    m(x).sum().backward()",
    ],
)
def test_no_collective_goes_unseen(body: str, tmp_path: Path) -> None:
    (path := tmp_path / "answer.py").write_text(f"{HEAD}\ndef f(x, r):\n    {body}\n")
    with pytest.raises(Wrong, match=r"the answer calls (.*, )?all_reduce(, .*)?; use send, recv"):
        grade(path, says_sending_is_wrong, 2)


def everything(answer, wire) -> list[tuple]:
    r, n = dist.get_rank(), dist.get_world_size()
    x, wide = torch.ones(4), torch.ones(4 * n)
    wide_n = [*wide.chunk(n)]
    dist.all_reduce(x)
    dist.reduce(x, 1)
    dist.broadcast(x, 1)
    dist.all_gather(wide_n, x)
    dist.all_gather_into_tensor(wide, x)
    dist.reduce_scatter_tensor(x, wide)
    dist.reduce_scatter(x, wide_n)
    dist.all_to_all_single(wide, wide.clone())
    dist.gather(x, None if r else wide_n, 0)
    dist.scatter(x, None if r else wide_n, 0)
    dist.barrier()
    half = dist.new_group([1, 2])
    if r in (1, 2):
        dist.all_reduce(x, group=half)
        peer = 3 - r
        works = [dist.isend(x[:r], peer), dist.irecv(x[:peer].clone(), peer)]
        [work.wait() for work in works]
        dist.send(x, group=half, group_dst=0) if r == 2 else dist.recv(x, group=half)
    wire.note("functional")
    funcol.all_reduce(x, "sum", dist.group.WORLD).wait()
    funcol.all_gather_tensor(x, 0, dist.group.WORLD).wait()
    funcol.reduce_scatter_tensor(wide, "sum", 0, dist.group.WORLD).wait()
    return [(e.op, e.nbytes, e.peer, e.ranks) for e in wire.events]


def test_every_call_is_counted_with_its_bytes_and_ranks(tmp_path: Path) -> None:
    (path := tmp_path / "answer.py").write_text("")
    world, half = (0, 1, 2), (1, 2)
    first = [
        ("all_reduce", 16, None, world),
        ("reduce", 16, None, world),
        ("broadcast", 16, None, world),
        ("all_gather", 48, None, world),
        ("all_gather", 48, None, world),
        ("reduce_scatter", 48, None, world),
        ("reduce_scatter", 48, None, world),
        ("all_to_all", 48, None, world),
    ]
    pair = [("all_reduce", 16, None, half)]
    last = [("note", 0, None, ()), ("all_reduce", 16, None, world)]
    last += [("all_gather", 48, None, world), ("reduce_scatter", 48, None, world)]
    got = grade(path, everything, 3)
    for rank, seen in enumerate(got):
        assert seen[:8] == first
        assert [s[0] for s in seen[8:11]] == ["gather", "scatter", "barrier"]
        assert seen[11 : 11 + (rank > 0)] == pair * (rank > 0)
        assert [s[:3] for s in seen[-4:]] == [s[:3] for s in last]
    assert got[1][12:14] == [("send", 4, 2, world), ("recv", 8, 2, world)]
    assert got[2][12:14] == [("send", 8, 1, world), ("recv", 4, 1, world)]
    assert (got[1][14], got[2][14]) == (("recv", 16, None, half), ("send", 16, 1, half))


def wrapped(answer, wire) -> dict[str, list[int]]:
    seen = {}
    for name, wrap in {"ddp": DistributedDataParallel, "fsdp": fully_shard}.items():
        model = wrap(torch.nn.Linear(8, 4, bias=False))
        wire.events.clear()
        model(torch.ones(8)).sum().backward()
        seen[name] = [(e.op, e.nbytes) for e in wire.calls()]
    return seen


def test_ddp_and_fsdp_are_seen(tmp_path: Path) -> None:
    (path := tmp_path / "answer.py").write_text("")
    for seen in grade(path, wrapped, 2):
        assert seen["ddp"] == [("all_reduce", 128)]
        assert seen["fsdp"] == [("all_gather", 128), ("reduce_scatter", 128)]


def test_values_that_differ_are_shown_with_their_place() -> None:
    due = torch.tensor([1.0, 2.0])
    same(due.clone(), due, "x")
    same(due + 1e-3, due, "x", atol=2e-3)
    for got, words in [
        (due + torch.tensor([0.0, 1.0]), "x: element 1: expected 2, got 3"),
        (due * float("nan"), "x: element 0: expected 1, got nan"),
        (due.double(), r"x: expected \(2,\) float32, got \(2,\) float64"),
        (due[:1], r"x: expected \(2,\) float32, got \(1,\) float32"),
        (None, "x: expected a tensor, got None"),
    ]:
        with pytest.raises(Wrong, match=words):
            same(got, due, "x")
    expect(3, 3, "bytes")
    with pytest.raises(Wrong, match="bytes: expected 4,000, got 3,000"):
        expect(3000, 4000, "bytes")
