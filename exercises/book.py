"""The exercises as they lie in their folders: titles, hints, stubs, and what a grader says."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import pytest

ROOT = Path(__file__).resolve().parent
HOLE = r"( *)# --- yours\n(.*?) *# --- end\n"


@dataclass
class Report:
    """What a grader said of an answer: titles of the checks passed and blocked; of the first that
    failed, title and message."""

    passed: list[str] = field(default_factory=list)
    blocked: list[str] = field(default_factory=list)
    failed: str = ""
    message: str = ""

    @property
    def accepted(self) -> bool:
        return bool(self.passed) and not self.failed


class Exercise:
    """One folder: README.md, exercise.py (the learner's), solution.py, test_exercise.py."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name
        self.number = int(folder.name[:2])
        self.readme = (folder / "README.md").read_text()
        self.title = re.match(r"# \d\d (.*)\n", self.readme)[1]
        self.mine = folder / "exercise.py"
        self.solution = folder / "solution.py"

    @property
    def hints(self) -> list[str]:
        """The README's hints, folded one inside the other there."""
        found = re.findall(
            r"<summary>.*?</summary>(.*?)(?=<details>|</details>)", self.readme, re.S
        )
        return [hint.strip() for hint in found]

    @property
    def holes(self) -> list[int]:
        """Lines of the solution in each hole."""
        return [len(body.splitlines()) for _, body in re.findall(HOLE, self._solved(), re.S)]

    def stub(self) -> str:
        """The solution with its holes: what exercise.py is before anyone has touched it."""

        def hole(found: re.Match) -> str:
            lines = len(found[2].splitlines())
            return f"{found[1]}raise NotImplementedError  # {lines} lines in the solution\n"

        return re.sub(HOLE, hole, self._solved(), flags=re.S)

    def _solved(self) -> str:
        return self.solution.read_text()

    def check(self, answer: Path | None = None) -> Report:
        """Run the grader in this process (the answer runs on ranks of its own) until it fails."""
        report = Report()
        argv = [str(self.folder / "test_exercise.py"), "-x", "--import-mode=importlib"]
        argv += [f"--rootdir={ROOT}", "-o", "addopts="]
        for plugin in ("terminal", "cacheprovider", "logging", "xdist", "rerunfailures"):
            argv += ["-p", f"no:{plugin}"]
        with patch.dict(os.environ, {"ANSWER": str(answer or self.mine)}):
            ended = pytest.main(argv, plugins=[_Listener(report)])
        if ended == pytest.ExitCode.INTERRUPTED and not report.failed:
            raise KeyboardInterrupt
        return report


def exercises() -> list[Exercise]:
    """All of them, in order."""
    return [Exercise(path.parent) for path in sorted(ROOT.glob("[0-9][0-9]_*/README.md"))]


class _Listener:
    """Takes down what each check of a grader says."""

    def __init__(self, report: Report) -> None:
        self.report = report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Function, call: pytest.CallInfo):
        report = yield
        title = (item.obj.__doc__ or item.name).strip()
        if hasattr(item, "callspec"):
            title = title.format(**item.callspec.params).replace(" 1 ranks", " 1 rank")
        if report.skipped:
            self.report.blocked.append(f"{title}: {report.longrepr[2].removeprefix('Skipped: ')}")
        elif report.failed:
            self.report.failed = title
            self.report.message = str(call.excinfo.value)
            if call.excinfo.typename != "Wrong":
                self.report.message = f"the grader itself failed:\n{report.longreprtext}"
        elif call.when == "call":
            self.report.passed.append(title)
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.report.failed = self.report.message = report.longreprtext
