"""Find the lessons, load one by its path, or play it on the harness's ranks, a line changed."""

import ast
import sys
import tomllib
import types
from dataclasses import dataclass
from pathlib import Path

from course.ranks import attempt

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("fundamentals", "communication", "parallelism", "fsdp", "profiling", "data-loading")
LESSONS = []  # in reading order
for folder in FOLDERS:
    found = sorted((ROOT / folder).glob("[0-9][0-9]_*.py"))
    LESSONS += [str(path.relative_to(ROOT)) for path in found]
READING_ORDER = tomllib.loads((ROOT / "course/lessons.toml").read_text())["lesson"]
ABOUT = {row["path"]: row for row in READING_ORDER}


def world_sizes_of(path: str) -> list[int]:
    """The world sizes that the lesson takes, of 1 to 4."""
    return ABOUT[path]["ranks"]


def flags_of(path: str) -> list[str]:
    """The names of the lesson's own flags, read without running it."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "command_line":
            return [key.value for key in node.args[0].keys] if node.args else []
    raise AssertionError(f"{path} never calls command_line()")


class DecidedByNoClock(AssertionError):
    """Something differs from what is expected that no clock decides: no second try for it."""


@dataclass
class Played:
    """How a lesson ended: rank 0's exit status (or what became of the ranks), ledger and output."""

    code: int | str
    ledger: list[dict]
    output: str

    @property
    def failed(self) -> set[str]:
        """The claims that FAILED, those apart that a clock decides.

        Raises DecidedByNoClock if the lesson did not come to its end: then none FAILED, either.
        """
        return {row["claim"] for row in self._failed() if not row["timed"]}

    @property
    def failed_by_clock(self) -> set[str]:
        """The claims that FAILED and that a clock decides: a busy machine may be the cause."""
        return {row["claim"] for row in self._failed() if row["timed"]}

    def _failed(self) -> list[dict]:
        if not isinstance(self.code, int) or not self.ledger:
            raise DecidedByNoClock(f"no ledger; ended with {self.code}\n{self.output[-3000:]}")
        return [row for row in self.ledger if row["verdict"] == "FAIL"]

    def expect(self, failed: set[str]) -> None:
        """Check that these claims FAILED and no other, apart from those that a clock decides.

        Raises DecidedByNoClock if not, or if the exit status does not tell.
        """
        if self.failed != failed:
            raise DecidedByNoClock(
                f"FAIL: {sorted(self.failed)}\nexpected: {sorted(failed)}\n{self.output[-3000:]}"
            )
        due = int(bool(self.failed or self.failed_by_clock))
        if self.code != due:
            raise DecidedByNoClock(
                f"exit status {self.code}, expected {due}\n{self.output[-3000:]}"
            )


def changed(path: str, *changes: tuple[str, str]) -> str:
    """The lesson's source with each (old, new) replaced; old must occur once."""
    source = (ROOT / path).read_text()
    for old, new in changes:
        assert source.count(old) == 1, f"{path} holds {source.count(old)} times: {old}"
        source = source.replace(old, new)
    return source


def load(path: str, *changes: tuple[str, str]) -> types.ModuleType:
    """Import the lesson at `path` afresh, with each (old, new) replaced; old must occur once."""
    source = changed(path, *changes)
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
    changed(path, *changes)  # a change that no longer applies fails here, not on a rank
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
        lesson.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, str) else int(end.code or 0)
        return code, lesson.ledger
    raise AssertionError(f"{path}: main ended without finish()")
