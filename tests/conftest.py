"""What every test shares: an environment of its own; a summary of exercises and repeats."""

import os
import signal
from collections.abc import Iterator
from unittest.mock import patch

import hypothesis
import pytest

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that may take longest, so that no worker is left alone with one."""
    items.sort(key=lambda item: item.get_closest_marker("timeout") is None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that is marked `gpu(n)` where torch finds fewer than n GPUs."""
    for mark in item.iter_markers("gpu"):
        import torch  # only such tests need it

        if torch.cuda.device_count() < mark.args[0]:
            pytest.skip(f"needs {mark.args[0]} GPU" + "s" * (mark.args[0] > 1))


COUNTED = {
    "test_the_solution_passes": "solutions accepted by their graders",
    "test_a_mistake_is_refused_and_told_why": "known mistakes refused for their own reason",
}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many solutions were accepted, how many mistakes refused, and what was repeated."""
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
    repeated = {report.nodeid for report in terminalreporter.getreports("rerun")}
    if repeated:
        green = repeated & {report.nodeid for report in passed}
        said = f"repeated, since a clock decides them: {len(repeated)}, {len(green)} passed then"
        terminalreporter.write_line(said)
        for nodeid in sorted(repeated):
            terminalreporter.write_line(f"  {nodeid}")
