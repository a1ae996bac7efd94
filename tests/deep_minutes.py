"""A plugin of pytest, for the gate: after DEEP_UNTIL no deep test begins; it is left to the night.

A change to what much rests on makes many groups deep. A gate that plays them all can take hours
on a slow machine; one that ends says what it left over. All other tests run, whenever it is.
"""

import os
import time

import pytest

LEFT = "left to the night"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out a deep test that would begin after DEEP_UNTIL (seconds since the epoch)."""
    if item.get_closest_marker("deep") and time.time() > float(os.environ["DEEP_UNTIL"]):
        pytest.skip(LEFT)


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Count it apart: it was not skipped for want of anything."""
    if report.skipped and str(report.longrepr).endswith(f"'Skipped: {LEFT}')"):
        return LEFT, "-", LEFT.upper()
    return None
