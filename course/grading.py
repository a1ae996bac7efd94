"""What every grader stands on: run an answer on ranks, count what it sends, say what went wrong.

    def steps(answer, wire):                     # runs on every rank
        x = torch.full((5,), float(dist.get_rank()))
        y = answer.ring_shift(x)
        wire.only("send", "recv")                # counted beneath the answer's feet
        return y, wire.sent()

    def test_values(answer):                     # in the grader; `answer` is a path
        '''The neighbor's tensor arrives'''     # the title that the learner sees
        for rank, (y, sent) in enumerate(grade(answer, steps, 3)):
            same(y, torch.full((5,), float((rank - 1) % 3)), f"rank {rank}: what came")
            expect(sent, 20, f"rank {rank}: bytes sent")

The answer's file is imported on the ranks alone, and only plain data comes back from them
(course/plain.py): whatever it does, the grader ends in time and runs none of its code.
"""

import bdb
import contextlib
import gc
import importlib.util
import linecache
import os
import random
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import cloudpickle
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course.plain import NotPlain, flatten, rebuild
from course.ranks import QUIET, Outcome, attempt
from course.wire import (
    WIRE,
    Event,
    Wire,
    Wrong,
    at_the_store,
    forbidden,
    groups_counted,
    in_threads,
)

__all__ = ["Event", "Wire", "Wrong", "expect", "grade", "same"]
__tracebackhide__ = True  # pytest shows the grader's lines, not these

TELLS = "What the learner is told: "

# On every rank


def load(path: Path) -> ModuleType:
    """Import the answer afresh, as a module named `answer`."""
    spec = importlib.util.spec_from_file_location("answer", path)
    sys.modules["answer"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _on_a_rank(path: Path, task: Callable, forbid: tuple[str, ...], args: tuple) -> object:
    """What the task returned, as plain data. Raises Wrong, in words, whatever else happened."""
    try:
        with contextlib.ExitStack() as beneath:
            wire = beneath.enter_context(Wire())
            beneath.enter_context(in_threads(wire))
            beneath.enter_context(groups_counted(wire))
            beneath.enter_context(at_the_store(wire, str(path)))
            beneath.enter_context(forbidden(wire, forbid))
            _unlike = a_heap_of_its_own(int(os.environ.get("RANK", "0")))
            value = task(load(path), wire, *args)
        if wire.refused or wire.hidden():
            raise Wrong(wire.refused or wire.hidden())
        return flatten(value, own_modules(task))
    except (Wrong, NotPlain) as wrong:
        raise Wrong(f"{TELLS}{wrong}") from None
    except SystemExit:
        raise
    except BaseException as error:
        lines = _lines(error, path)
        if isinstance(error, NotImplementedError) and _is_a_hole(error, path):
            raise Wrong(f"{TELLS}not written yet: {lines[-1].partition(': ')[0]}") from None
        where = "".join(f"\n  {line}" for line in lines)
        raise Wrong(f"{TELLS}{_said(error, path)}{where}") from None


def a_heap_of_its_own(rank: int) -> list:
    """Objects and tensors to keep, other ones on every rank, with gaps between them.

    Ranks are forks of one process, so what they make next would lie at the same addresses on all of
    them, and a set of tensors would have one order everywhere. Under torchrun it has not.
    """
    kept = []
    for size in range(16, 512, 16):
        kept += [torch.nn.Parameter(torch.empty(size)) for _ in range(60)]
        kept += [bytearray(size) for _ in range(60)]
    random.Random(rank).shuffle(kept)
    del kept[len(kept) // 2 :]
    gc.freeze()  # a grader that counts an answer's objects does not see these
    return kept


def own_modules(task: Callable) -> tuple[str, str]:
    """The modules whose dataclasses may leave a rank: the grader's, and the wire's Event."""
    return task.__module__, Event.__module__


def _said(error: BaseException, path: Path) -> str:
    """The error in Python's words, or in ours where those would mislead a learner."""
    if isinstance(error, bdb.BdbQuit):
        return "breakpoint() has no terminal here; print(), and the last lines are shown with this"
    if isinstance(error, AttributeError) and error.obj is sys.modules.get("answer"):
        return f"{path.name} has no {error.name}; `course reset {path.stem}` writes the stub again"
    return traceback.format_exception_only(error)[-1].strip()


def _is_a_hole(error: NotImplementedError, path: Path) -> bool:
    """Whether the answer itself raised it, as an empty hole does, and not a library."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(str(path), last.lineno).strip()
    return last.filename == str(path) and line.startswith("raise NotImplementedError")


def _lines(error: BaseException, path: Path) -> list[str]:
    """The answer's own lines on the way to the error, outermost first."""
    found = []
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == str(path):
            code = linecache.getline(str(path), frame.lineno).strip()
            found.append(f"{path.name}, line {frame.lineno}, in {frame.name}: {code}")
    if isinstance(error, SyntaxError):
        found.append(f"{path.name}, line {error.lineno}: {(error.text or '').strip()}")
    return found or [f"not in {path.name}: the grader could not use what it was given"]


class Largest(TorchDispatchMode):
    """Notes the bytes behind the largest tensor that an operation returns, those of `known` left
    out, and views of them.
    """

    def __init__(self, known: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                memory = leaf.untyped_storage()
                if memory.data_ptr() not in self.known:
                    self.nbytes = max(self.nbytes, memory.nbytes())
        return result


class Reduced(TorchDispatchMode):
    """Notes the dtypes of all tensors that pass an all-reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "allreduce" in func._schema.name.replace("_", ""):
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.dtypes += [str(tensor.dtype) for tensor in tensors]
        return func(*args, **(kwargs or {}))


# In the grader

LAST: list[Outcome] = []  # how the ranks of the last `grade` ended


def grade(
    answer: Path,
    task: Callable,
    world_size: int,
    *args: object,
    deadline: float = 10,
    quiet: float = QUIET,
    group: bool = True,
    forbid: tuple[str, ...] = (),
) -> list:
    """Call `task(module, wire, *args)` on every rank, where `module` is the answer's file and
    `wire` has seen what it sent. Return what the ranks returned, in order.

    What `task` returns leaves the rank as plain data: tensors, arrays, numbers, strings, lists,
    tuples, dicts and sets of these, Events, and dataclasses that the grader defines.

    Raises Wrong, in words for the learner, if a rank raises, exits, dies, floods its output, hides
    a call from the wire, or returns what cannot leave it; also if all that have not returned sleep
    for `quiet` seconds, or one uses `deadline` seconds of CPU: then with who waits for whom, and
    where.
    """
    grader = sys.modules[task.__module__]
    cloudpickle.register_pickle_by_value(grader)  # ranks cannot import it
    outcomes = attempt(
        _on_a_rank,
        world_size,
        answer,
        task,
        forbid,
        args,
        deadline=deadline,
        quiet=quiet,
        group=group,
        own=[answer.parent, Path(grader.__file__).parent],
        trusted=False,
    )
    LAST[:] = outcomes
    if all(o.kind == "returned" for o in outcomes):
        return _rebuilt(outcomes, own_modules(task))
    raise Wrong(_told(outcomes, answer))


def _rebuilt(outcomes: list[Outcome], modules: tuple[str, ...]) -> list:
    values = []
    for o in outcomes:
        try:
            values.append(rebuild(o.value, modules))
        except Exception as error:  # only an answer that forges its rank's word comes here
            raise Wrong(f"rank {o.rank} sent what cannot be read: {error!r}") from None
    return values


def _told(outcomes: list[Outcome], answer: Path) -> str:
    """Why the ranks failed: the first cause, or if there is none, who waits for whom."""
    linecache.checkcache(str(answer))  # it may have been saved since we last looked
    causes = [o for o in outcomes if o.kind not in ("returned", "hung")]
    if causes:
        first = min(causes, key=lambda o: o.when)  # 0 for a rank that died: errors follow it
        said = _cause(first, answer)
        first = next(o for o in causes if _cause(o, answer) == said)  # always the same rank
        same_everywhere = said.startswith("not written yet")
        return (said if same_everywhere else f"rank {first.rank}: {said}") + _printed(first, said)
    hung = [o for o in outcomes if o.kind == "hung"]
    if all(o.asleep for o in hung):
        why = "not every rank has come back; all that have not were asleep, and nothing moved"
        why += f" between them for {QUIET:g} s"
    else:
        why = f"after {int(max(o.waited for o in hung))} s not every rank has come back"
    lines = [f"{why}:"]
    for o in outcomes:
        last = re.findall(rf"{re.escape(WIRE)}(.*)", o.output)
        said = f"; its last call: {last[-1]}" if last and o.kind == "hung" else ""
        lines.append(
            f"  rank {o.rank} {_text(o, answer) if o.kind == 'hung' else 'came back'}{said}"
        )
        lines += _quoted(o, answer)
    return "\n".join(lines)


def _cause(o: Outcome, answer: Path) -> str:
    if o.kind == "raised":
        return o.text.partition(TELLS)[2] or o.text
    if o.kind == "flooded":
        return f"{o.text}; is there a loop that prints?"
    said = o.text if o.text.startswith("called") else f"{o.kind} {_text(o, answer)}"
    return "\n".join([said, *_quoted(o, answer)])


def _text(o: Outcome, answer: Path) -> str:
    """The outcome's text, the answer's file without its folder."""
    return o.text.replace(str(answer), answer.name)


def _quoted(o: Outcome, answer: Path) -> list[str]:
    """The answer's lines on the way to where the rank is, innermost first."""
    lines = []
    for frame in [frame for frame in o.frames if frame.file == str(answer)][:QUOTED]:
        if lines:
            lines.append(f"    called from {answer.name}:{frame.line}, in {frame.function}")
        lines.append(f"      {linecache.getline(str(answer), frame.line).strip()}")
    return lines


QUOTED = 4  # lines of the answer that are shown of a rank that hangs


def printed_there(message: str) -> str:
    """The last lines printed by the rank that `message` names first, or by rank 0."""
    if "\n  printed: " in message:
        return ""
    named = re.search(r"\brank (\d+)", message)
    rank = int(named[1]) if named else 0
    return _printed(LAST[rank], message) if rank < len(LAST) else ""


def _printed(o: Outcome, said: str) -> str:
    """The last lines that the rank printed, less those that its error repeats."""
    lines = [line for line in o.output.splitlines() if line and not line.startswith(WIRE)]
    lines = [line for line in lines[-5:] if line.strip() not in said]
    cut = [line if len(line) <= 200 else line[:199] + "…" for line in lines]
    return "".join(f"\n  printed: {line}" for line in cut)


def expect(got: object, due: object, what: str) -> None:
    """Refuse the answer unless `got` equals `due` and is of its type.

    True is not 1, and 3.0 is not 3; but an int will do where a float is due.
    """
    if _equal(got, due):
        return
    if _kind(got) == _kind(due):
        raise Wrong(f"{what}: expected {_shown(due)}, got {_shown(got)}")
    raise Wrong(f"{what}: expected {_named(due)}, got {_named(got)}")


NUMBERS = (bool, int, float)
SHOWN = 300  # characters of a value


def _equal(got: object, due: object) -> bool:
    if isinstance(due, torch.Tensor) and isinstance(got, torch.Tensor):
        return got.dtype == due.dtype and torch.equal(got, due)
    if _kind(got) != _kind(due):
        return isinstance(due, float) and type(got) is int and got == due
    if isinstance(due, list | tuple):
        return len(got) == len(due) and all(map(_equal, got, due))
    if isinstance(due, dict):
        return got.keys() == due.keys() and all(_equal(got[key], due[key]) for key in due)
    return bool(got == due)


def _kind(value: object) -> type:
    """The type that counts in a comparison: a Size is a tuple, a Counter is a dict."""
    for kind in (list, tuple, dict, str):
        if isinstance(value, kind):
            return kind
    return type(value)


def _named(value: object) -> str:
    """A value with its type."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if value is None:
        return "None"
    return f"{_kind(value).__name__} {_shown(value)}"


def _shown(value: object) -> str:
    return f"{value:,}" if type(value) is int else str(value)[:SHOWN]


def same(
    got: object,
    due: torch.Tensor,
    what: str,
    atol: float = 0.0,
    instead: dict[str, torch.Tensor] | None = None,
) -> None:
    """Refuse the answer unless `got` is a tensor like `due`, no element further off than `atol`.

    `instead` names known confusions ({"this is the mean": due / n}): if `got` is one of them, as
    exactly, the message says so.
    """
    if not isinstance(got, torch.Tensor):
        raise Wrong(f"{what}: expected a tensor, got {got!r}"[:SHOWN])
    if (got.shape, got.dtype) != (due.shape, due.dtype):
        kinds = [f"{tuple(t.shape)} {str(t.dtype)[6:]}" for t in (due, got)]
        raise Wrong(f"{what}: expected {kinds[0]}, got {kinds[1]}")
    if _close(got, due, atol):
        return
    names = [name for name, other in (instead or {}).items() if _close(got, other, atol)]
    said = f"{what}: {names[0]}" if names else what
    raise Wrong(f"{said}: {_worst(got.detach(), due.detach(), atol)}")


def _close(got: torch.Tensor, due: torch.Tensor, atol: float) -> bool:
    try:
        assert_close(got, due, rtol=0, atol=atol, check_stride=False)
    except AssertionError:
        return False
    return True


def _worst(got: torch.Tensor, due: torch.Tensor, atol: float) -> str:
    """The element that is furthest off, or the first of several, and how many are wrong."""
    wrong = ~torch.isclose(got, due, rtol=0, atol=atol)
    if got.is_complex() or got.is_floating_point():
        off = (got - due).abs().double().nan_to_num(torch.inf)
    else:  # exact beyond 2**53, where a double is not
        off = (got != due).double()
    worst = int((off * wrong).nan_to_num(torch.inf).argmax())
    pair = [t.flatten()[worst].item() for t in (due, got)]
    show = [f"{v:.9g}" if isinstance(v, float) else str(v) for v in pair]
    beyond = f" (at most {atol:.3g} off)" if atol else ""
    place = [int(i) for i in torch.unravel_index(torch.tensor(worst), got.shape)]
    at = place if len(place) > 1 else worst
    many = f"; {int(wrong.sum()):,} of {wrong.numel():,} elements are wrong"
    told = f"element {at}: expected {show[0]}{beyond}, got {show[1]}"
    return told + (many if wrong.numel() > 1 else "")
