"""Grade one answer by a grader in a process of its own (course/judge.py), and believe it only as
far as it makes sense: whatever else it prints, or another exit status, is a failure of the grader.
"""

import importlib.util
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from course.book import ROOT, Exercise, Report
from course.terminal import end


@dataclass
class Verdict(Report):
    """What became of grading one answer."""

    seconds: float = 0
    error: str = ""  # how the grader itself failed, with all that it printed
    absent: bool = False  # there is no answer
    running: str = ""  # the title of the check that has started and not ended

    @property
    def status(self) -> str:
        """accepted, failed, blocked (nothing could be checked here), absent or error."""
        if self.absent:
            return "absent"
        if self.error:
            return "error"
        if self.failed:
            return "failed"
        return "accepted" if self.passed else "blocked"


def grade(
    exercise: Exercise,
    answer: Path,
    seed: int | None = None,
    tell: Callable[[dict], None] = lambda check: None,
    stale: Callable[[], bool] = lambda: False,
    meanwhile: Callable[[str, float], None] = lambda title, seconds: None,
) -> Verdict | None:
    """Run the grader on `answer`; `tell` is given each check (check, verdict, message) as it ends.

    `meanwhile` is given the title of the check that runs, or "", and its seconds, several times a
    second.

    Returns None as soon as `stale` says that the answer is no longer the one being graded. Nothing
    is left running, whatever is raised.
    """
    for package in ("torch", "pytest"):
        if importlib.util.find_spec(package) is None:
            sys.exit(f"{sys.executable} has no {package}; in {ROOT}: pip install -e .")
    verdict = Verdict()
    other = []  # what the grader printed, verdicts apart
    began = since = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = start_judge(exercise, answer, seed, errors)
        try:
            for line in lines_of(process):
                if stale():
                    return None
                if line:
                    since = time.monotonic()
                    if not take_down(line, verdict, tell):
                        other.append(line)
                meanwhile(verdict.running, time.monotonic() - since)
            status = process.wait()
        except KeyboardInterrupt:
            end(process, patience=2)  # the terminal has told it, too
            raise
        finally:
            end(process)
        verdict.seconds = round(time.monotonic() - began, 1)
        said = verdict.passed or verdict.blocked or verdict.failed
        if other or not said or status != (0 if verdict.accepted else 1):
            errors.seek(0)
            verdict.error = f"exit status {status}\n{''.join(other)}{errors.read()}"
    return verdict


def start_judge(exercise: Exercise, answer: Path, seed: int | None, errors: IO) -> subprocess.Popen:
    """Start the grader; with -P no file of the current folder passes for a library."""
    argv = [sys.executable, "-P", "-m", "course.judge", exercise.folder, answer]
    if seed is not None:
        argv.append(f"--seed={seed}")
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        argv,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        encoding="utf-8",
        errors="replace",
    )


def lines_of(process: subprocess.Popen) -> Iterator[str]:
    """The lines that a process prints, as they come, and "" five times a second in between.

    A thread reads them. It may wait for longer than the process lives, if something that this has
    started holds its output open; but what was printed comes within seconds of the end.
    """
    lines = queue.SimpleQueue()

    def read() -> None:
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        ended = process.poll() is not None
        try:
            line = lines.get(timeout=5 if ended else 0.2)
        except queue.Empty:
            if ended:
                return
            line = ""
        if line is None:
            return
        yield line


def take_down(line: str, verdict: Verdict, tell: Callable[[dict], None]) -> bool:
    """Note what a line of the grader's says; False if it is not such a line."""
    try:
        check = json.loads(line)
        title = check["check"]
        result = check["verdict"]
        message = check["message"]
    except (ValueError, TypeError, KeyError):
        return False
    verdict.running = title if result == "running" else ""
    if result == "running":
        return True
    if result == "passed":
        verdict.passed.append(title)
    elif result == "blocked":
        verdict.blocked.append(f"{title}: {message}")
    else:
        verdict.failed = title
        verdict.message = message
    tell(check)
    return True
