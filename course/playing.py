"""Load a lesson by its path, or play it on the harness's ranks, a line changed."""

import functools
import os
import sys
import types
from dataclasses import dataclass
from pathlib import Path

from course.lessons import ROOT
from course.ranks import attempt


class NotAsExpected(AssertionError):
    """A lesson ended otherwise than was expected, or other claims FAILED."""


@dataclass
class Played:
    """How a lesson ended: rank 0's exit status (or what became of the ranks), ledger and output."""

    code: int | str
    ledger: list[dict]
    output: str

    @property
    def failed(self) -> set[str]:
        """The claims that FAILED whatever the machine: neither timed nor varying ones.

        Raises NotAsExpected if the lesson did not come to its end: then none FAILED, either.
        """
        return {row["claim"] for row in self._failed() if not (row["timed"] or row.get("varies"))}

    @property
    def failed_by_clock(self) -> set[str]:
        """The claims that FAILED and that a clock decides: a busy machine may be the cause."""
        return {row["claim"] for row in self._failed() if row["timed"]}

    @property
    def failed_by_chance(self) -> set[str]:
        """The claims that FAILED and vary: bytes that the kernel adds, what a model has learned."""
        return {row["claim"] for row in self._failed() if row.get("varies") and not row["timed"]}

    def _failed(self) -> list[dict]:
        if not isinstance(self.code, int) or not self.ledger:
            raise NotAsExpected(f"no ledger; ended with {self.code}\n{self.output[-3000:]}")
        return [row for row in self.ledger if row["verdict"] == "FAIL"]

    def _surprises(self, failed: set[str], expected: set[str]) -> str:
        """What FAILED and should not have, with its numbers; and what should have, and did not."""
        rows = [row for row in self._failed() if row["claim"] in failed - expected]
        found = [f"FAIL {row['claim']}: {row['measured']}, not {row['predicted']}" for row in rows]
        return "; ".join(found + [f"no FAIL {claim}" for claim in sorted(expected - failed)])

    def expect(self, failed: set[str], by_clock: set[str] | None = None) -> None:
        """Check that these claims FAILED and no other, and that the exit status says so.

        What a clock decides is judged if `by_clock` says which of those claims are to FAIL. Of the
        varying claims, those in `failed` must FAIL; that no other does is judged at night.
        """
        found = self.failed | (
            self.failed_by_chance if at_night() else self.failed_by_chance & failed
        )
        if by_clock is not None:
            found |= self.failed_by_clock
            failed = failed | by_clock
        if found != failed:
            raise NotAsExpected(
                f"not as expected: {self._surprises(found, failed)}\n{self.output[-3000:]}"
            )
        due = int(bool(self._failed()))
        if self.code != due:
            raise NotAsExpected(f"exit status {self.code}, expected {due}\n{self.output[-3000:]}")


def at_night() -> bool:
    """Whether everything is judged, what a clock or the kernel decides too: `make test-all`."""
    return os.environ.get("TIER") == "night"


def changed(path: str, *changes: tuple[str, str]) -> str:
    """The lesson's source with each (old, new) replaced; old must occur once."""
    source = (ROOT / path).read_text(encoding="utf-8")
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


class Lazily:
    """A lesson that is loaded when something of it is first asked for, and not before."""

    def __init__(self, path: str) -> None:
        self.__dict__["_path"] = path

    @functools.cached_property
    def _lesson(self) -> types.ModuleType:
        return load(self._path)

    def __getattr__(self, name: str) -> object:
        return getattr(self._lesson, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._lesson, name, value)


def play(
    path: str,
    world_size: int,
    *changes: tuple[str, str],
    argv: tuple[str, ...] = (),
    deadline: float = 90,
) -> Played:
    """Run a lesson's `main` on so many ranks, with `argv` as its command line."""
    changed(path, *changes)  # a change that no longer applies fails here, not on a rank
    patient = {"deadline": deadline, "quiet": deadline}  # lessons sleep on purpose, throttle links
    outcomes = attempt(play_here, world_size, path, changes, argv, group=False, **patient)
    first = outcomes[0]
    if any(o.kind != "returned" for o in outcomes):
        return Played("\n".join(map(str, outcomes)), [], first.output)
    code, ledger = first.value
    return Played(code, ledger, first.output)


def play_here(path: str, changes: tuple, argv: tuple[str, ...]) -> tuple[int | str, list[dict]]:
    """Run the lesson's `main` on this rank; return its exit status, or message, and its ledger."""
    sys.argv = [str(ROOT / path), *argv]
    lesson = load(path, *changes)
    return how_it_ends(lesson), lesson.ledger


def how_it_ends(lesson: types.ModuleType) -> int | str:
    """Run the lesson's `main`; return its exit status, or message."""
    try:
        lesson.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, str) else int(end.code or 0)
    raise AssertionError(f"{lesson.__name__}: main ended without finish()")
