"""What every test shares: an environment of its own, and which tests run when (tests/README.md)."""

import os
import signal
from collections.abc import Iterator
from unittest.mock import patch

import hypothesis
import pytest

from course.lessons import ROOT
from tests import groups

# The same cases on every run, and none judged by its milliseconds: a suite that is red today and
# green tomorrow teaches nothing. New cases are drawn by `pytest --hypothesis-profile=default`.
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True)
hypothesis.settings.load_profile("steady")


# A script that starts the suite in the background has it ignore Ctrl-C; what the suite starts, and
# then interrupts, must not inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """What a lesson sets when it is imported must not reach the next test."""
    with patch.dict(os.environ):
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    tiers = ["all", "gate", "night", "clock"]
    help_ = "gate: what guards a change; night: all but the clock's; clock: those, alone"
    parser.addoption("--tier", choices=tiers, default="all", help=help_)


def pytest_configure(config: pytest.Config) -> None:
    tier = config.getoption("--tier")
    if tier in ("night", "clock"):
        os.environ["TIER"] = "night"


def group_of(item: pytest.Item) -> str:
    """The file of tests, or of the tests of all exercises the exercise's folder."""
    callspec = getattr(item, "callspec", None)
    if callspec and "exercise" in callspec.params:
        return f"exercises/{callspec.params['exercise'].name}"
    return str(item.path.relative_to(ROOT))


def marks(item: pytest.Item) -> set[str]:
    return {mark.name for mark in item.iter_markers()}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what this tier runs; begin with what may take longest, so that none is left to one."""
    tier = config.getoption("--tier")
    kept = items
    if tier == "night":
        kept = [item for item in items if not marks(item) & {"clock", "timed", "gpu"}]
    elif tier == "clock":
        kept = [item for item in items if marks(item) & {"clock", "timed", "gpu"}]
    elif tier == "gate":
        kept = at_the_gate(config, items)
    dropped = {*map(id, items)} - {*map(id, kept)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in dropped])
    items[:] = sorted(kept, key=lambda item: item.get_closest_marker("timeout") is None)


def at_the_gate(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """Everything but the night's, and of deep tests those whose group has changed."""
    passed = groups.read_passed()
    deep = sorted({group_of(item) for item in items if "deep" in marks(item)})
    why = {group: groups.changed_since(passed, group) for group in [*deep, groups.SHARED]}
    config.stash[WHY] = (passed, why)
    kept = []
    for item in items:
        marked = marks(item)
        if marked & {"clock", "night"}:
            continue
        chosen = why.get(group_of(item)) or ("sentinel" in marked and why[groups.SHARED])
        if "deep" not in marked or chosen:
            kept.append(item)
    return kept


WHY = pytest.StashKey[tuple]()


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """Say which groups are played deep, and why."""
    if WHY not in config.stash:
        return []
    passed, why = config.stash[WHY]
    if passed is None:
        return ["All groups are played deep: tests/passed.txt is missing or damaged."]
    lines = [
        f"Deep, since it changed: {of(group)}: {few(what)}" for group, what in why.items() if what
    ]
    return [
        *lines,
        f"{sum(not what for what in why.values())} of {len(why)} groups are as when all was green.",
    ]


def of(group: str) -> str:
    return group.removeprefix("tests/").removesuffix(".py")


def few(what: list[str]) -> str:
    more = f" and {len(what) - 4} more" if len(what) > 4 else ""
    return ", ".join(what[:4]) + more


COUNTED = {
    "test_the_solution_passes": "solutions accepted by their graders",
    "test_a_mistake_is_refused_and_told_why": "known mistakes refused for their own reason",
}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many solutions were accepted and how many mistakes refused."""
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
