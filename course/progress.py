"""What a learner has done, in answers/.progress.json.

The file is replaced as a whole, so that no interruption leaves it half written; and one command at
a time changes it, so that two at once lose nothing.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from datetime import date

from course.book import ROOT
from course.terminal import shown

ANSWERS = ROOT / "answers"
FILE = ANSWERS / ".progress.json"
# lessons and exercises: when each was done, by its name; blocked: of those done in part, what could
# not be checked; hints: how many of an exercise were shown; predictions: of a lesson, what was
# answered to each question
KEYS = ("lessons", "exercises", "blocked", "hints", "predictions")


def read() -> dict[str, dict]:
    """What is known, by KEYS. A file that cannot be read is moved aside, and that is said."""
    known = {key: {} for key in KEYS}
    try:
        kept = json.loads(FILE.read_text(encoding="utf-8"))
        if not isinstance(kept, dict):
            raise ValueError("no object")
        for key in KEYS:
            known[key].update(kept.get(key, {}))
    except FileNotFoundError:
        pass
    except (ValueError, TypeError):  # no JSON, or not what we write
        aside = FILE.with_name(f".progress.broken-{os.getpid()}.json")
        FILE.replace(aside)
        print(
            f"{shown(FILE)} was broken; it is {aside.name} now, and ticks begin anew.",
            file=sys.stderr,
        )
        return {key: {} for key in KEYS}
    return known


def remember(what: str, name: str, value: object) -> None:
    """Keep a value under one of KEYS."""
    _change((what, name, value))


def settle(what: str, name: str, blocked: list[str]) -> None:
    """Put down that a lesson or an exercise is done today, and what of it could not be checked."""
    _change((what, name, date.today().isoformat()), ("blocked", name, blocked or None))


def forget(what: str, name: str) -> None:
    """Drop what is kept under one of KEYS, if anything is."""
    _change((what, name, None))


def _change(*changes: tuple[str, str, object]) -> None:
    """Keep each value, or drop what is kept if it is None. A folder in which nothing can be
    written ends no command: that nothing was noted is said.
    """
    try:
        with _alone():
            known = read()
            for what, name, value in changes:
                known[what][name] = value
                if value is None:
                    del known[what][name]
            _write(known)
    except OSError as error:
        print(f"Not noted: {shown(FILE)} cannot be written: {error.strerror}.", file=sys.stderr)


def _write(known: dict[str, dict]) -> None:
    part = FILE.with_name(FILE.name + ".part")
    part.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    os.replace(part, FILE)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hold the folder's lock. Where a file system has none, two commands may cross: no more."""
    import fcntl  # not on Windows, where `course` says so first

    ANSWERS.mkdir(exist_ok=True)
    folder = os.open(ANSWERS, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
