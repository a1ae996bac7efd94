"""Files go whole to one process; lessons and exercises, the longest files, one by one."""

import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """What a lesson sets when it is imported must not reach the next test."""
    with patch.dict(os.environ):
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        part = params.get("lesson") or getattr(params.get("exercise"), "name", "")
        item.add_marker(pytest.mark.xdist_group(f"{item.path.name} {part}"))
        if hasattr(item.module, "play"):  # another job may disturb a lesson's clock; hardly twice
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many solutions the graders accepted, and how many wrong answers they told apart."""
    reports = [(r, way) for way in ("passed", "failed") for r in terminalreporter.getreports(way)]
    for test, what in {
        "test_the_solution_passes": "exercises whose solution passes",
        "test_a_wrong_answer_is_told_what_is_wrong": "wrong answers rejected for their own reason",
    }.items():
        ways = [way for r, way in reports if f"test_exercises.py::{test}[" in r.nodeid]
        if ways:
            terminalreporter.write_line(f"{what}: {ways.count('passed')} of {len(ways)}")
    checks = [r for r, _ in reports if "::test_the_solution_passes[" in r.nodeid]
    if checks:
        slowest = max(checks, key=lambda r: r.duration)
        name = slowest.nodeid.partition("[")[2].partition("]")[0]
        terminalreporter.write_line(f"slowest of their checks: {slowest.duration:.0f} s, {name}")
