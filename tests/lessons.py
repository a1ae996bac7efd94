"""Load a lesson by its path, or play it on the harness's ranks, whole or with a line changed."""

import sys
import types
from dataclasses import dataclass
from pathlib import Path

from exercises.ranks import attempt

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("fundamentals", "communication", "parallelism", "fsdp", "profiling", "data-loading")
LESSONS = [
    str(path.relative_to(ROOT)) for f in FOLDERS for path in sorted(ROOT.glob(f"{f}/[0-9]*.py"))
]


@dataclass
class Played:
    """How a lesson ended: rank 0's exit status, ledger and output; `failed`, what FAILED."""

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
