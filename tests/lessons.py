"""Find the lessons, load one by its path, or play it on the harness's ranks, a line changed."""

import ast
import sys
import types
from dataclasses import dataclass
from pathlib import Path

from exercises.ranks import attempt

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("fundamentals", "communication", "parallelism", "fsdp", "profiling", "data-loading")
LESSONS = [
    str(path.relative_to(ROOT))
    for folder in FOLDERS  # in reading order
    for path in sorted((ROOT / folder).glob("[0-9][0-9]_*.py"))
]


def world_sizes_of(path: str) -> range:
    """The lesson's WORLD_SIZES, read without running it."""
    return range(*(ast.literal_eval(argument) for argument in _assigned(path, "WORLD_SIZES").args))


def flags_of(path: str) -> list[str]:
    """The names of the lesson's own flags, read without running it."""
    return [key.value for key in _assigned(path, "FLAGS").keys]


def _assigned(path: str, name: str) -> ast.expr:
    for node in ast.parse((ROOT / path).read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(t, ast.Name) and t.id == name for t in targets):
            return node.value
    raise AssertionError(f"{path} sets no {name}")


@dataclass
class Played:
    """How a lesson ended: rank 0's exit status (or what became of the ranks), its ledger and
    output; `failed`, the texts of the claims that FAILED."""

    code: int | str
    ledger: list[dict]
    output: str

    @property
    def failed(self) -> set[str]:
        return {row["claim"] for row in self.ledger if row["verdict"] == "FAIL"}


def load(path: str, *changes: tuple[str, str]) -> types.ModuleType:
    """Import the lesson at `path` afresh, with each (old, new) replaced; old must occur once."""
    source = (ROOT / path).read_text()
    for old, new in changes:
        assert source.count(old) == 1, f"{path} holds {source.count(old)} times: {old}"
        source = source.replace(old, new)
    lesson = types.ModuleType("lesson_" + Path(path).stem)
    lesson.__file__ = str(ROOT / path)
    sys.modules[lesson.__name__] = lesson  # dataclasses and pickle look it up there
    exec(compile(source, lesson.__file__, "exec"), lesson.__dict__)
    return lesson


def play(
    path: str,
    world_size: int,
    *changes: tuple[str, str],
    argv: tuple[str, ...] = (),
    deadline: float = 90,
) -> Played:
    """Run a lesson's `main` on so many ranks, with `argv` as its command line."""
    outcomes = attempt(_play, world_size, path, changes, argv, deadline=deadline, group=False)
    first = outcomes[0]
    if any(o.kind != "returned" for o in outcomes):
        return Played("\n".join(map(str, outcomes)), [], first.output)
    code, ledger = first.value
    return Played(code, ledger, first.output)


def _play(path: str, changes: tuple, argv: tuple[str, ...]) -> tuple[int, list[dict]]:
    sys.argv = [str(ROOT / path), *argv]
    lesson = load(path, *changes)
    try:
        lesson.main(lesson.command_line())
    except SystemExit as end:
        return int(end.code or 0), lesson.ledger
    raise AssertionError(f"{path}: main ended without finish()")
