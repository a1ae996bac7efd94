"""What graders stand on: every way for an answer to go wrong is told truly, in time, and leaves
nothing; nothing that an answer sends goes unseen."""

import inspect
import os
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from course.grading import Event, Wrong, expect, grade, printed_there, same
from course.plain import NotPlain, flatten, rebuild

HEAD = "import os, sys, time, subprocess, ctypes, torch, torch.distributed as dist\nR = None\n"
RING = "y = x.clone(); w = dist.isend(x, 1 - r); dist.recv(y, 1 - r); w.wait(); return y"
MARK = f"1000{os.getpid()}"  # seconds that no other run of these tests sleeps


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


def order_of_a_set(answer, wire) -> list[int]:
    return answer.f()


def test_what_hangs_on_addresses_differs_between_ranks_as_under_torchrun(tmp_path: Path) -> None:
    body = """import torch
def f():
    number = {torch.nn.Parameter(torch.ones(2)): i for i in range(40)}
    return [number[parameter] for parameter in set(number)]
"""
    (path := tmp_path / "answer.py").write_text(body)
    orders = grade(path, order_of_a_set, 4)
    assert len({*map(tuple, orders)}) == 4


def test_a_name_that_the_answer_lacks_is_named_with_its_file(tmp_path: Path) -> None:
    (path := tmp_path / "answer.py").write_text("")
    with pytest.raises(Wrong, match=r"^rank 0: answer\.py has no f; `course reset answer` writes"):
        grade(path, order_of_a_set, 2)


def test_what_the_named_rank_printed_is_kept_for_a_wrong_value(tmp_path: Path) -> None:
    (path := tmp_path / "answer.py").write_text(
        "import os\ndef f():\n    print('my share is', os.environ['RANK'])"
    )
    grade(path, order_of_a_set, 2)
    assert printed_there("rank 1: expected 3, got 4") == "\n  printed: my share is 1"
    assert printed_there("expected 3, got 4") == "\n  printed: my share is 0"
    assert printed_there("rank 7: expected 3, got 4") == ""


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
            " s not every rank has come back:\n  rank 0 came back\n",
            "rank 1 busy at answer.py:5",
        ],
    ),
    "stays away": (
        "return r or dist.all_reduce(x)",
        [
            "not every rank has come back; all that have not were asleep, and nothing moved "
            "between them for 1.5 s:\n",
            "rank 0 waits in all_reduce, called from answer.py:5, in f; "
            "its last call: all_reduce, 12 B, among [0, 1]\n      return r or dist.all_reduce(x)\n"
            "  rank 1 came back",
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
    "a library has not written it": (
        "torch.nn.Module()(x)",
        ['rank 0: NotImplementedError: Module [Module] is missing the required "forward" function'],
    ),
    "waits for what it began": (
        "dist.irecv(x, 1 - r).wait()",
        ["rank 0 waits at answer.py:5, in f; its last call: recv, 12 B, from rank 1"],
    ),
    "raises what no grader expects": (
        "raise KeyboardInterrupt('now')",
        ["rank 0: KeyboardInterrupt: now\n  answer.py, line 5, in f: raise KeyboardInterrupt"],
    ),
    "returns what holds itself": (
        "x = []; x.append(x); return x",
        ["rank 0: returned a value that holds itself, or is nested too deeply"],
    ),
    "asks the debugger": ("breakpoint()", ["rank 0: breakpoint() has no terminal here; print()"]),
    "tells what it printed": ("print('here', r); raise KeyError(r)", ["\n  printed: here "]),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_went_wrong_is_told(way: str, tmp_path: Path) -> None:
    body, words = WAYS[way]
    message = told(tmp_path, body)
    for word in words:
        assert word in message, message


def test_a_deadlock_in_a_given_helper_is_told_with_its_caller(tmp_path: Path) -> None:
    helper = "def exchange(x, r):\n    dist.recv(x, 1 - r)\n"
    message = told(tmp_path, "exchange(x, r)", helper)
    assert (
        "      dist.recv(x, 1 - r)\n    called from answer.py:7, in f\n      exchange(x, r)\n"
    ) in message, message


def test_a_hang_quotes_the_file_as_it_is_now(tmp_path: Path) -> None:
    assert "while 1: pass" in told(tmp_path, "while 1: pass")
    assert "while 2: pass" in told(tmp_path, "while 2: pass")


def test_a_file_that_cannot_be_read_is_told_with_its_line(tmp_path: Path) -> None:
    assert "SyntaxError: invalid syntax\n  answer.py, line 3: a b" in told(tmp_path, "pass", "a b")


def test_a_file_that_loops_on_import_is_told(tmp_path: Path) -> None:
    assert "rank 0 busy at answer.py:3, in <module>" in told(tmp_path, "pass", "while True: pass")


@pytest.mark.parametrize("end", ["return x", "os._exit(1)", "os.kill(os.getpid(), 9)", "1 / 0"])
def test_children_do_not_outlive_the_answer(end: str, tmp_path: Path) -> None:
    starts = [
        'subprocess.Popen(["sleep", MARK])',
        'subprocess.Popen(["sleep", MARK], start_new_session=True)',
        'subprocess.Popen(["sh", "-c", "sleep " + MARK + " & setsid sleep " + MARK + " &"])',
    ]
    body = f"MARK = {MARK!r}; " + "; ".join(starts) + f"; time.sleep(0.2); {end}"
    (path := tmp_path / "answer.py").write_text(f"{HEAD}\ndef f(x, r):\n    {body}\n")
    if end == "return x":
        grade(path, call, 2)
    else:
        with pytest.raises(Wrong):
            grade(path, call, 2)
    for _ in range(1200):
        left = [p for p in psutil.process_iter(["cmdline"]) if MARK in (p.info["cmdline"] or [])]
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
        "import threading\n    t = threading.Thread(target=dist.all_reduce, args=(x,))\n"
        "    t.start(); t.join()",
        "from concurrent.futures import ThreadPoolExecutor as P\n"
        "    P().submit(dist.all_reduce, x).result()",
    ],
)
def test_no_collective_goes_unseen(body: str, tmp_path: Path) -> None:
    (path := tmp_path / "answer.py").write_text(f"{HEAD}\ndef f(x, r):\n    {body}\n")
    with pytest.raises(Wrong, match=r"the answer calls (.*, )?all_reduce(, .*)?; use send, recv"):
        grade(path, says_sending_is_wrong, 2)


BELOW = {  # calls that pass no dispatcher: what the grader is told, and by whom
    "the group's own backend": (
        "dist.group.WORLD._get_backend(x.device).allreduce([x]).wait()",
        "the process group made 1 calls, and torch's dispatcher passed no more than 0 of them",
    ),
    "modes switched off": (
        "from torch.utils._python_dispatch import _disable_current_modes as off\n"
        "    with off(): dist.all_reduce(x); dist.all_reduce(x)",
        "the process group made 2 calls, and torch's dispatcher passed no more than 0 of them",
    ),
    "sockets": (
        "import socket\n    a = socket.create_server(('127.0.0.1', 0))\n"
        "    b = socket.create_connection(a.getsockname()); c = a.accept()[0]\n"
        "    for _ in range(10): b.sendall(b'x' * 10_000); c.recv(10**6, socket.MSG_WAITALL * 0)\n"
        "    globals()['kept'] = a, b, c",
        "its sockets carried ",
    ),
    "the store": (
        "dist.distributed_c10d._get_default_store().set(f'mine{r}', 'abc')",
        "the answer calls store; use send, recv",
    ),
}


@pytest.mark.parametrize("how", BELOW)
def test_what_goes_past_the_wire_is_missed(how: str, tmp_path: Path) -> None:
    body, words = BELOW[how]
    (path := tmp_path / "answer.py").write_text(f"{HEAD}\ndef f(x, r):\n    {body}\n")
    with pytest.raises(Wrong) as wrong:
        grade(path, says_sending_is_wrong, 2)
    assert words in str(wrong.value)


GROUPS = {  # what rank r of 2 calls, and the ranks of each group that is counted there
    "new_group": ("dist.new_group([0, 1])", [(0, 1)]),
    "of all ranks": ("dist.new_group()", [(0, 1)]),
    "of others": ("dist.new_group([1 - r])", [None]),
    "by another name": (
        "from torch.distributed.distributed_c10d import new_group as g; g([0])",
        [(0,)],
    ),
    "new_subgroups": ("dist.new_subgroups(1)", [(0,), (1,)]),
    "by enumeration": ("dist.new_subgroups_by_enumeration([[0], [1]])", [(0,), (1,)]),
    "a mesh": ("dist.init_device_mesh('cpu', (2, 1))", [(0,), (1,)]),
    "made and destroyed": (
        "g = dist.new_group([0, 1]); dist.barrier(g); dist.destroy_process_group(g)",
        [(0, 1)],
    ),
    "a mesh of all ranks in a row": ("dist.init_device_mesh('cpu', (2,))", []),
    "none": ("dist.all_reduce(x)", []),
}


def groups_of(answer, wire) -> list[tuple]:
    call(answer, wire)
    return wire.groups


@pytest.mark.parametrize("how", GROUPS)
def test_a_group_is_counted_however_it_is_made(how: str, tmp_path: Path) -> None:
    body, due = GROUPS[how]
    (path := tmp_path / "answer.py").write_text(f"{HEAD}\ndef f(x, r):\n    {body}\n")
    for rank, groups in enumerate(grade(path, groups_of, 2)):
        assert groups == [(1 - rank,) if ranks is None else ranks for ranks in due]


def test_splitting_a_group_asks_for_a_name_too() -> None:
    """Gloo splits with the newest torch alone; the name is what `groups_counted` counts."""
    for make in (dist.split_group, dist.distributed_c10d._new_group_with_tag):
        assert "_process_group_name(" in inspect.getsource(inspect.unwrap(make))


def no_groups(answer, wire) -> None:
    call(answer, wire)
    wire.no_groups()


def test_a_new_group_is_refused_where_it_is_not_wanted(tmp_path: Path) -> None:
    (path := tmp_path / "answer.py").write_text(f"{HEAD}\ndef f(x, r):\n    dist.new_group([1])\n")
    with pytest.raises(Wrong, match=r"a process group of ranks \[1\] was made"):
        grade(path, no_groups, 2)


def everything(answer, wire) -> list[tuple]:
    r = dist.get_rank()
    n = dist.get_world_size()
    x = torch.ones(4)
    wide = torch.ones(4 * n)
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
        if r == 2:
            dist.send(x, group=half, group_dst=0)
        else:
            dist.recv(x, group=half)
    wire.note("functional")
    funcol.all_reduce(x, "sum", dist.group.WORLD).wait()
    funcol.all_gather_tensor(x, 0, dist.group.WORLD).wait()
    funcol.reduce_scatter_tensor(wide, "sum", 0, dist.group.WORLD).wait()
    return [(e.op, e.nbytes, e.peer, e.ranks) for e in wire.events]


def test_every_call_is_counted_with_its_bytes_and_ranks(tmp_path: Path) -> None:
    (path := tmp_path / "answer.py").write_text("")
    world = (0, 1, 2)
    half = (1, 2)
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
    same(due / 0, due / 0, "infinities")
    for got, words in [
        (due + torch.tensor([0.0, 1.0]), "x: element 1: expected 2, got 3; 1 of 2 elements are wr"),
        (due + torch.tensor([1.0, 3.0]), "x: element 1: expected 2, got 5; 2 of 2 elements are wr"),
        (due * float("nan"), "x: element 0: expected 1, got nan"),
        (due / 0, "x: element 0: expected 1, got inf"),
        (due.double(), r"x: expected \(2,\) float32, got \(2,\) float64"),
        (due[:1], r"x: expected \(2,\) float32, got \(1,\) float32"),
        (None, "x: expected a tensor, got None"),
    ]:
        with pytest.raises(Wrong, match=words):
            same(got, due, "x")


def test_whole_numbers_are_compared_exactly_and_named_by_row_and_column() -> None:
    due = torch.tensor([[1, 2], [3, 2**53]])
    same(due.clone(), due, "x")
    with pytest.raises(Wrong, match=rf"x: element \[1, 1\]: expected {2**53}, got {2**53 + 1}"):
        same(due + torch.tensor([[0, 0], [0, 1]]), due, "x")


def test_a_known_confusion_is_named() -> None:
    due = torch.tensor([2.0, 4.0])
    known = {"this is the own value": due / 7, "this is the mean": due / 2}
    with pytest.raises(Wrong, match="x: this is the mean: element 1: expected 4, got 2"):
        same(due / 2, due, "x", instead=known)
    with pytest.raises(Wrong, match="x: element 1: expected 4, got 5"):
        same(due + 1 / due.flip(0) * 4 - 1, due, "x", instead=known)


@pytest.mark.parametrize(
    ("due", "got", "words"),
    [
        (4000, 3000, "bytes: expected 4,000, got 3,000"),
        (23, torch.ones(2), r"bytes: expected int 23, got a tensor of shape \(2,\)"),
        (1, True, "bytes: expected int 1, got bool True"),
        (3, 3.0, "bytes: expected int 3, got float 3.0"),
        (3, None, "bytes: expected int 3, got None"),
        ((1, 2), [1, 2], r"bytes: expected tuple \(1, 2\), got list \[1, 2\]"),
        ([1, 2], [1, True], r"bytes: expected \[1, 2\], got \[1, True\]"),
        ({"a": 1}, {"a": 1.0}, "bytes: expected {'a': 1}, got {'a': 1.0}"),
        (torch.float32, torch.float64, "bytes: expected torch.float32, got torch.float64"),
    ],
)
def test_expect_minds_the_type(due: object, got: object, words: str) -> None:
    expect(due, due, "bytes")
    with pytest.raises(Wrong, match=words):
        expect(got, due, "bytes")


def test_an_int_will_do_where_a_float_is_due_and_a_size_is_a_tuple() -> None:
    expect(3, 3.0, "seconds")
    expect(torch.Size([2, 3]), (2, 3), "shape")
    expect([], [], "nothing")


@dataclass
class Mine:
    """A grader's own."""

    shape: tuple
    parts: list


VALUES = [
    None,
    True,
    3,
    2.5,
    "ü",
    b"x",
    1 + 2j,
    [1, (2, {3}), {"a": frozenset("b"), 4: None}],
    torch.float16,
    torch.device("cpu"),
    torch.Size([2, 3]),
    Event("send", 4, 1, (0, 1)),
    Mine((1, 2), [Event("note", text="x")]),
]
TENSORS = [
    torch.arange(6).reshape(2, 3).t()[1:],
    torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    torch.tensor(7),
    torch.empty(0, 3),
    torch.tensor([True, False]),
    torch.tensor([1 + 2j]).conj(),
    torch.ones(2, requires_grad=True),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_plain_values_come_back_as_they_were(value: object) -> None:
    modules = [Event.__module__, __name__]
    back = rebuild(flatten(value, modules), modules)
    assert (back, type(back)) == (value, type(value))


@pytest.mark.parametrize("value", TENSORS, ids=lambda t: f"{t.dtype} {tuple(t.shape)}")
def test_tensors_come_back_as_they_were_without_what_they_were_a_view_of(
    value: torch.Tensor,
) -> None:
    back = rebuild(flatten(value))
    assert torch.equal(back, value)
    assert (back.dtype, back.requires_grad) == (value.dtype, value.requires_grad)
    assert back.untyped_storage().nbytes() == value.nbytes


class Bag(list):
    """An answer's own list."""


@pytest.mark.parametrize(
    "value", [Bag(), lambda: 1, object(), iter([]), Mine((), []), torch.ones(2).to_sparse()]
)
def test_nothing_else_is_plain(value: object) -> None:
    with pytest.raises(NotPlain, match="cannot leave the rank"):
        flatten([value], [Event.__module__])


def test_no_class_but_the_graders_own_can_be_named() -> None:
    modules = [Event.__module__, __name__]
    for module, name in [("os", "system"), (__name__, "HEAD"), (__name__, "Bag")]:
        with pytest.raises(TypeError):
            rebuild({"is": "object", "module": module, "class": name, "of": {}}, modules)
