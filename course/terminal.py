"""What the command `course` prints, and the processes that it starts and ends."""

import contextlib
import functools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

COLORS = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33}
WIDTH = 99  # of a line that is wrapped, unless the terminal is narrower
PLAIN = {"✓": "+", "✗": "x", "◐": "/", "·": ".", "→": ">"}  # in ASCII


def paint(text: str, color: str) -> str:
    """The text in color, if a terminal shows it and NO_COLOR is not set."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{COLORS[color]}m{text}\x1b[0m"


def tick(done: bool, blocked: bool = False) -> str:
    """Before a step of the path: done, done in part (a part of it was BLOCKED), or not."""
    if done and blocked:
        return paint("◐", "yellow")
    return paint("✓", "green") if done else "·"


def plain(error: UnicodeEncodeError) -> tuple[str, int]:
    """What stands for signs that the encoding of the terminal or of a pipe does not know."""
    signs = error.object[error.start : error.end]
    return "".join(PLAIN.get(sign, "?") for sign in signs), error.end


def pending(text: str = "") -> None:
    """Say on a terminal what is waited for; the next such line, or none, takes its place."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(paint(f"{text[:width]:{width}}", "dim"), end="\r", flush=True)


def say(text: str, indent: int = 0) -> None:
    """Print text at once, long lines wrapped, each below its own first word."""
    width = min(WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDTH
    for line in text.splitlines():
        room = " " * (indent + len(line) - len(line.lstrip()))
        whole = {"break_long_words": False, "break_on_hyphens": False}  # paths, to be copied
        print(
            textwrap.fill(line.strip(), width, initial_indent=room, subsequent_indent=room, **whole)
        )
    sys.stdout.flush()


def shown(path: Path) -> str:
    """A path as one would type it: relative if it lies below the current folder."""
    with contextlib.suppress(ValueError, FileNotFoundError):  # elsewhere; the folder is deleted
        return str(path.relative_to(Path.cwd()))
    return str(path)


@functools.cache
def program() -> str:
    """What to type for `course`: the word, the script's path, or Python's with `-m course`."""
    script = Path(sys.argv[0])
    if script.name != "course":  # started as `python -m course`
        script = Path(sys.executable).with_name("course")
    if not script.exists():
        return f"{shlex.quote(shown(Path(sys.executable)))} -m course"
    found = shutil.which("course")
    if found and os.path.samefile(found, script):
        return "course"
    return shlex.quote(shown(script.absolute()))


def command(*words: object) -> str:
    """A command of `course`, to be copied as it is."""
    return " ".join([program(), *map(str, words)])


def end(process: subprocess.Popen, patience: float = 0) -> None:
    """End a process that Ctrl-C ends: wait so many seconds, then send it one, at last kill it."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    if process.poll() is None:
        process.kill()
        process.wait()
