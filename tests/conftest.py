"""What every test shares: an environment of its own, and which tests run when (tests/README.md)."""

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import hypothesis
import pytest

from course.book import Exercise
from course.lessons import ROOT
from tests import groups

# The same cases on every run, and none judged by its milliseconds: a suite that is red today and
# green tomorrow teaches nothing. New cases are drawn by `pytest --hypothesis-profile=default`.
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True)
hypothesis.settings.load_profile("steady")


# A script that starts the suite in the background has it ignore Ctrl-C, and nohup has it ignore the
# end of its terminal; what the suite starts, and then interrupts, must not inherit either.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """What a lesson sets when it is imported must not reach the next test."""
    with patch.dict(os.environ):
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=["all", "gate", "night", "clock"],
        default="all",
        help="gate: what guards a change; night: all that no clock decides; clock: the rest, alone",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--tier") in ("night", "clock"):
        os.environ["TIER"] = "night"  # what varies is judged (course/playing.py)


def group_of(item: pytest.Item) -> str:
    """The group of tests/groups.py: the exercise that it grades, or the file in which it stands."""
    exercise = getattr(item, "callspec", None) and item.callspec.params.get("exercise")
    if isinstance(exercise, Exercise):
        return f"exercises/{exercise.name}"
    return str(item.path.relative_to(ROOT))


ALONE = {"clock", "timed", "gpu"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what this tier runs; begin with what may take longest, so that none is left to one."""
    tier = config.getoption("--tier")
    stale = stale_groups() if tier == "gate" else set()
    left_out = config.stash[LEFT_OUT] = Counter()
    kept = []
    dropped = []
    for item in items:
        why = left_out_since(
            {mark.name for mark in item.iter_markers()}, group_of(item), tier, stale
        )
        left_out[why] += 1
        (dropped if why else kept).append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = sorted(kept, key=lambda item: item.get_closest_marker("timeout") is None)


def stale_groups() -> set[str]:
    """Those whose deep tests run: as tests/run.py has found, or as they are."""
    found = os.environ.get("STALE")
    return {*json.loads(found)} if found else {*groups.stale()}


def left_out_since(marks: set[str], group: str, tier: str, stale: set[str]) -> str:
    """Why this tier leaves out a test with these marks; empty if it does not."""
    if tier == "night":
        return "run alone, later" if marks & ALONE else ""
    if tier == "clock":
        return "" if marks & ALONE else "run before"
    if tier == "gate":
        if marks & {"clock", "night"}:
            return "left to the night"
        shared = "sentinel" in marks and groups.SHARED in stale
        if "deep" in marks and not (group in stale or shared):
            return "deep, of groups that have not changed"
    return ""


LEFT_OUT = pytest.StashKey[Counter]()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    """Take over what a worker counted; all workers count the same."""
    told = getattr(node, "workeroutput", {}).get("left out")
    node.config.stash[LEFT_OUT] = Counter(told or {})


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left out"] = dict(session.config.stash[LEFT_OUT])


COUNTED = {
    "test_the_solution_passes": "solutions accepted by their graders",
    "test_a_mistake_is_refused_and_told_why": "known mistakes refused for their own reason",
}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many solutions were accepted, how many mistakes refused, and what was not run."""
    passed = terminalreporter.getreports("passed")
    failed = terminalreporter.getreports("failed")
    for test, what in COUNTED.items():
        good = [report for report in passed if f"::{test}[" in report.nodeid]
        bad = [report for report in failed if f"::{test}[" in report.nodeid]
        if good or bad:
            slowest = max(good + bad, key=lambda report: report.duration)
            name = slowest.nodeid.partition("[")[2].removesuffix("]")
            said = f"{what}: {len(good)} of {len(good + bad)}"
            terminalreporter.write_line(f"{said}; slowest {slowest.duration:.0f} s, {name}")
    for why, count in sorted(terminalreporter.config.stash.get(LEFT_OUT, Counter()).items()):
        if why:
            terminalreporter.write_line(f"{count} tests not run here: {why}")
    if "FAILED" in os.environ:
        reports = failed + terminalreporter.getreports("error")
        names = dict.fromkeys(report.nodeid for report in reports)
        Path(os.environ["FAILED"]).write_text("".join(f"{name}\n" for name in names))
