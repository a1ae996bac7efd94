"""Grade one answer: the checks of test_exercise.py, in order, until the first that fails.

    python -m course.judge EXERCISE_FOLDER ANSWER [--only CHECK] [--seed N]

prints a line of JSON per check as it starts, and another as it ends; the command `course` runs it
so, in a process of its own. The answer itself is imported on ranks alone, never here.
"""

import argparse
import contextlib
import json
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

from course.book import Exercise, Report
from course.subreaper import adopt_orphans


class Listener:
    """A pytest plugin: hands the grader its answer and seed; takes down what each check says."""

    def __init__(self, answer: Path, report: Report, tell: Callable[[dict], None]) -> None:
        self.answer_path = answer
        self.report = report
        self.tell = tell

    @pytest.fixture
    def answer(self) -> Path:
        """The file to grade."""
        return self.answer_path

    @pytest.fixture
    def seed(self) -> int:
        """What random inputs are drawn from; another one on every run unless --seed names it."""
        return self.report.seed

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Function) -> None:
        self.tell({"check": title_of(item), "verdict": "running", "message": ""})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Function, call: pytest.CallInfo) -> Iterator:
        told = yield
        title = title_of(item)
        if told.skipped:
            reason = told.longrepr[2].removeprefix("Skipped: ")
            self.report.blocked.append(f"{title}: {reason}")
            self.tell({"check": title, "verdict": "blocked", "message": reason})
        elif told.failed:
            message = f"the grader itself failed:\n{told.longreprtext}"
            if call.excinfo.typename == "Wrong":
                message = str(call.excinfo.value)
                message += sys.modules["course.grading"].printed_there(message)  # it is loaded now
                if "seed" in item.fixturenames and "not written yet" not in message:
                    message += f"\n(inputs drawn from seed {self.report.seed})"
            self.report.failed = title
            self.report.message = message
            self.tell({"check": title, "verdict": "failed", "message": message})
        elif call.when == "call":
            self.report.passed.append(title)
            self.tell({"check": title, "verdict": "passed", "message": ""})
        return told

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.grader_failed(report.longreprtext)

    def pytest_internalerror(self, excrepr: object) -> None:
        self.grader_failed(str(excrepr))

    def grader_failed(self, why: str) -> None:
        """Put down that no verdict on the answer could be reached."""
        self.put_down("the grader", f"the grader itself failed:\n{why}")

    def put_down(self, title: str, message: str) -> None:
        """Put down a failure that no check of the grader's has found."""
        self.report.failed = title
        self.report.message = message
        self.tell({"check": title, "verdict": "failed", "message": message})


def title_of(item: pytest.Function) -> str:
    """A check's name as the learner sees it: the first line of its docstring."""
    title = (item.obj.__doc__ or item.name).strip().partition("\n")[0]
    if hasattr(item, "callspec"):
        title = title.format(**item.callspec.params).replace(" 1 ranks", " 1 rank")
    return title


def judge(
    exercise: Exercise,
    answer: Path,
    only: str = "",
    seed: int | None = None,
    tell: Callable[[dict], None] = lambda check: None,
) -> Report:
    """Run the grader, or its check `only` (a test function's name), on `answer`.

    `tell` is given each check as it starts ("running") and as it ends: its title, verdict and
    message. If pytest itself fails, in whatever way, that is told as a failed check of "the
    grader". Raises KeyboardInterrupt at Ctrl-C. Neither plugins and options of the learner's
    environment nor a conftest.py count.
    """
    report = Report(seed=random.randrange(10**6) if seed is None else seed)
    node = f"{exercise.grader}::{only}" if only else str(exercise.grader)
    argv = [node, "-x", "--noconftest", "--import-mode=importlib", f"--rootdir={exercise.folder}"]
    argv += ["-c", os.devnull, "-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:logging"]
    argv += ["--assert=plain", "-p", "no:unraisableexception"]  # this looks through all of torch
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTEST_PLUGINS": ""}
    listener = Listener(answer.resolve(), report, tell)
    if no_python := why_python_cannot_read(answer):
        listener.put_down("Python can read the file", no_python)
        return report
    sys.modules.pop(exercise.grader.stem, None)  # another exercise's: all have one name
    with patch.dict(os.environ, alone):
        ended = pytest.main(argv, plugins=[listener])
    if ended == pytest.ExitCode.INTERRUPTED and not report.failed:
        raise KeyboardInterrupt
    if ended not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not report.failed:
        listener.grader_failed(f"pytest ended with {ended!r} on {node}")
    return report


def why_python_cannot_read(answer: Path) -> str:
    """The error of syntax in this file and its line, in words; empty if there is none."""
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(answer.read_bytes(), answer.name, "exec", dont_inherit=True)
    except SyntaxError as error:
        line = (error.text or "").strip()
        return f"{type(error).__name__}: {error.msg}\n  {answer.name}, line {error.lineno}: {line}"
    except (ValueError, RecursionError, MemoryError) as error:
        return f"{type(error).__name__}: {error}\n  {answer.name}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("answer", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()

    def tell(check: dict) -> None:
        print(json.dumps(check), flush=True)

    from course.ranks import fork_server  # loads torch

    fork_server()
    exercise = Exercise(options.folder.resolve())
    adopt_orphans()  # of ranks' server too, should an answer kill it
    try:
        report = judge(exercise, options.answer, options.only, options.seed, tell)
    except KeyboardInterrupt:
        return 130
    finally:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    return 0 if report.accepted else 1


if __name__ == "__main__":
    sys.exit(main())
