"""What every grader stands on: run an answer on ranks, count what it sends, say what went wrong.

    def steps(answer, wire):                     # runs on every rank
        x = torch.full((5,), float(dist.get_rank()))
        y = answer.ring_shift(x)
        wire.only("send", "recv")                # counted beneath the answer's feet
        return y, wire.sent()

    def test_values(answer):                     # in the grader; `answer` is a path
        '''The neighbour's tensor arrives'''     # the title that the learner sees
        for rank, (y, sent) in enumerate(grade(answer, steps, 3)):
            same(y, torch.full((5,), float((rank - 1) % 3)), f"rank {rank}: what came")
            expect(sent, 20, f"rank {rank}: bytes sent")

The answer's file is imported on the ranks alone, so whatever it does, the grader ends in time.
"""

import contextlib
import importlib.util
import linecache
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import cloudpickle
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course.ranks import Outcome, attempt

__tracebackhide__ = True  # pytest shows the grader's lines, not these

TELLS, WIRE = "What the learner is told: ", "[wire] "


class Wrong(AssertionError):
    """What is wrong with an answer, in words for the learner."""


# On every rank

OPS = "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier", "send"
OPS += "recv", "reduce", "gather", "scatter"  # c10d's "_allgather_base_" is an all_gather


@dataclass
class Event:
    """One call, or a grader's note, in the order in which this rank made them."""

    op: str  # send, recv, all_reduce, all_gather, ..., or note
    nbytes: int = 0  # of the larger of what goes in and what comes out
    peer: int | None = None  # of a send or recv (None: from anyone): the rank in the whole world
    ranks: tuple[int, ...] = ()  # the group's, in the whole world
    text: str = ""  # a note's


class Wire(TorchDispatchMode):
    """Sees every communication of this rank, those of DDP and FSDP too: they all pass torch's
    dispatcher. `events` holds them in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.refused = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # let it come apart first; its collectives then pass here
        name = func._schema.name.partition("::")[2]
        if func.namespace.lstrip("_").startswith("c10d"):
            self._saw(func, name, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _saw(self, func, name: str, args: tuple, kwargs: dict) -> None:
        op = next((op for op in OPS if op.replace("_", "") in name.replace("_", "")), None)
        if op is None:
            return  # it waits, or wraps a result: nothing is sent
        sizes = [sum(t.nbytes for t in tree_leaves(a) if isinstance(t, torch.Tensor)) for a in args]
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        if "group_name" in given:
            group = given["group_name"]
            if isinstance(group, str):
                group = dist.distributed_c10d._resolve_process_group(group)
        else:
            group = dist.ProcessGroup.unbox(given["process_group"])
        ranks = tuple(dist.get_process_group_ranks(group))
        peer = given.get("dst", given.get("src"))
        event = Event(op, max(sizes, default=0), ranks=ranks)
        event.peer = None if peer is None else ranks[peer]
        self.events.append(event)
        whom = f"among {list(ranks)}"
        if op in ("send", "recv"):
            way = "to" if op == "send" else "from"
            whom = f"{way} rank {'?' if peer is None else event.peer}"
        os.write(1, f"\n{WIRE}{event.op}, {event.nbytes:,} B, {whom}\n".encode())

    def note(self, text: str) -> None:
        """Put a mark of the grader's among the events."""
        self.events.append(Event("note", text=text))

    def calls(self, *ops: str) -> list[Event]:
        """The communications, all or those named, in order."""
        return [e for e in self.events if e.op != "note" and (not ops or e.op in ops)]

    def sent(self) -> int:
        """Bytes that this rank gave to `send`."""
        return sum(e.nbytes for e in self.calls("send"))

    def only(self, *allowed: str) -> None:
        """Refuse an answer that communicated by anything else."""
        if other := {e.op for e in self.calls()} - set(allowed):
            rest = f"use {', '.join(allowed)}" if allowed else "nothing is to be sent here"
            raise Wrong(f"the answer calls {', '.join(sorted(other))}; {rest}")


@contextlib.contextmanager
def forbidden(wire: Wire, names: tuple[str, ...]) -> Iterator[None]:
    """Within, calling any of `names` ("torch.utils.data.DistributedSampler.__init__") is refused,
    even where the answer swallows the error.
    """
    with contextlib.ExitStack() as stack:
        for name in names:
            short = name.removesuffix(".__init__").rpartition(".")[2]

            def refuse(*args: object, _short: str = short, **kwargs: object) -> None:
                wire.refused = f"the answer uses {_short}, which it is to do without"
                raise Wrong(wire.refused)

            stack.enter_context(patch(name, refuse))
        yield


def load(path: Path) -> ModuleType:
    """Import the answer afresh, as a module named `answer`."""
    spec = importlib.util.spec_from_file_location("answer", path)
    sys.modules["answer"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _on_a_rank(path: Path, task: Callable, forbid: tuple[str, ...], args: tuple) -> object:
    try:
        with Wire() as wire, forbidden(wire, forbid):
            value = task(load(path), wire, *args)
        if wire.refused:
            raise Wrong(wire.refused)
    except Wrong as wrong:
        raise Wrong(f"{TELLS}{wrong}") from None
    except NotImplementedError as error:
        hole = _lines(error, path)[-1].partition(": ")[0]
        raise Wrong(f"{TELLS}not written yet: {hole}") from None
    except Exception as error:
        where = "".join(f"\n  {line}" for line in _lines(error, path))
        said = traceback.format_exception_only(error)[-1].strip()
        raise Wrong(f"{TELLS}{said}{where}") from None
    return value


def _lines(error: Exception, path: Path) -> list[str]:
    """The answer's own lines on the way to the error, outermost first."""
    found = []
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == str(path):
            code = linecache.getline(str(path), frame.lineno).strip()
            found.append(f"{path.name}, line {frame.lineno}, in {frame.name}: {code}")
    if isinstance(error, SyntaxError):
        found.append(f"{path.name}, line {error.lineno}: {(error.text or '').strip()}")
    return found or [f"not in {path.name}: the grader could not use what it was given"]


# In the grader


def grade(
    answer: Path,
    task: Callable,
    world_size: int,
    *args: object,
    deadline: float = 10,
    group: bool = True,
    forbid: tuple[str, ...] = (),
) -> list:
    """Call `task(module, wire, *args)` on every rank, where `module` is the answer's file and
    `wire` has seen what it sent. Return what the ranks returned, in order.

    Raises Wrong, in words for the learner, if a rank raises, exits, dies, floods its output, or has
    not come back when `deadline` seconds are over: then with who waits for whom, and where.
    """
    cloudpickle.register_pickle_by_value(sys.modules[task.__module__])  # ranks cannot import it
    outcomes = attempt(
        _on_a_rank,
        world_size,
        answer,
        task,
        forbid,
        args,
        deadline=deadline,
        group=group,
        stay=True,
    )
    if all(o.kind == "returned" for o in outcomes):
        return [o.value for o in outcomes]
    raise Wrong(_told(outcomes, answer, deadline))


def _told(outcomes: list[Outcome], answer: Path, deadline: float) -> str:
    """Why the ranks failed: the first cause, or if there is none, who waits for whom."""
    causes = [o for o in outcomes if o.kind not in ("returned", "hung")]
    if causes:
        first = min(causes, key=lambda o: o.when)  # 0 for a rank that died: errors follow it
        said = _cause(first)
        first = next(o for o in causes if _cause(o) == said)  # of several, always the same rank
        same_everywhere = said.startswith("not written yet")
        return (said if same_everywhere else f"rank {first.rank}: {said}") + _printed(first)
    lines = [f"after {deadline:g} s not every rank has come back:"]
    for o in outcomes:
        last = re.findall(rf"{re.escape(WIRE)}(.*)", o.output)
        said = f"; its last call: {last[-1]}" if last and o.kind == "hung" else ""
        text = o.text.replace(f"{answer.parent}{os.sep}", "")
        lines.append(f"  rank {o.rank} {text if o.kind == 'hung' else 'came back'}{said}")
        if at := re.search(rf"{re.escape(answer.name)}:(\d+)", text):
            lines.append(f"      {linecache.getline(str(answer), int(at[1])).strip()}")
    return "\n".join(lines)


def _cause(o: Outcome) -> str:
    if o.kind == "raised":
        return o.text.partition(TELLS)[2] or o.text
    return f"{o.kind} {o.text}"


def _printed(o: Outcome) -> str:
    lines = [line for line in o.output.splitlines() if line and not line.startswith(WIRE)]
    return "".join(f"\n  printed: {line[:200]}" for line in lines[-5:])


def expect(got: object, due: object, what: str) -> None:
    """Refuse the answer unless got == due."""
    if got != due:
        show = [f"{v:,}" if isinstance(v, int) else str(v) for v in (due, got)]
        raise Wrong(f"{what}: expected {show[0]}, got {show[1]}")


def same(got: object, due: torch.Tensor, what: str, atol: float = 0.0) -> None:
    """Refuse the answer unless `got` is a tensor like `due`, no element further off than `atol`."""
    if not isinstance(got, torch.Tensor):
        raise Wrong(f"{what}: expected a tensor, got {got!r}"[:300])
    if (got.shape, got.dtype) != (due.shape, due.dtype):
        kinds = [f"{tuple(t.shape)} {str(t.dtype)[6:]}" for t in (due, got)]
        raise Wrong(f"{what}: expected {kinds[0]}, got {kinds[1]}")
    off = (got.detach().double() - due.detach().double()).abs()
    if not bool((off <= atol).all()):
        worst = int((off.nan_to_num(float("inf"))).argmax())
        pair = [t.detach().flatten()[worst].item() for t in (due, got)]
        show = [f"{v:.9g}" if isinstance(v, float) else str(v) for v in pair]
        beyond = f" (at most {atol:.3g} off)" if atol else ""
        raise Wrong(f"{what}: element {worst}: expected {show[0]}{beyond}, got {show[1]}")
