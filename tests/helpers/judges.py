"""Judges in processes of their own, forked from one that has loaded what a judge loads.

    python -m tests.helpers.judges

reads requests, a line of JSON each, and answers each with the judge's exit status. A judge that is
forked here does what `python -m course.judge ARGUMENTS` does, from the first line of that module to
the exit of its own process; only torch is there already.
"""

import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

from course.lessons import ROOT


class Judges:
    """The process that judges are forked from, as a test sees it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.judges"],
            env=environment,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def judge(
        self, arguments: list, environment: dict[str, str], files: list[Path], deadline: int
    ) -> int:
        """Let one be forked that prints to these two files; wait for it, return its exit status."""
        request = [[*map(str, arguments)], environment, [*map(str, files)], deadline]
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def serve() -> None:
    """Fork a judge per request, until there are no more."""
    from course.ranks import PRELOAD

    for name in PRELOAD:
        importlib.import_module(name)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            be_judge(*json.loads(line))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def be_judge(
    arguments: list[str], environment: dict[str, str], files: list[str], deadline: int
) -> None:
    """Do what `python -m course.judge` does; ranks get `deadline` seconds of CPU."""
    for descriptor, path in enumerate(files, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ |= environment
    tempfile.tempdir = None  # look at TMPDIR anew
    sys.modules["course.grading"].grade.__kwdefaults__["deadline"] = deadline
    sys.argv[1:] = arguments
    runpy.run_module("course.judge", run_name="__main__", alter_sys=True)  # ends in sys.exit


if __name__ == "__main__":
    serve()
