"""Every measured row has been seen to FAIL: an entry of its lesson's BREAKS names it."""

import importlib.util
from pathlib import Path

from course.lessons import LESSONS, file_of_tests
from course.machines import ledger_of
from tests.lessons.every import Breaks

# {lesson: {claim: why no broken line is named}}; 25 at most.
UNBROKEN: dict[str, dict[str, str]] = {}


def named_by_a_break(lesson: str) -> set[str]:
    """The claims that some entry of the lesson's own file of tests names."""
    path = file_of_tests(lesson)
    spec = importlib.util.spec_from_file_location(f"rows_{Path(lesson).stem}", path)
    tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    tables = getattr(tests, "BREAKS", [])
    named = set()
    for table in [tables] if isinstance(tables, Breaks) else tables:
        for entry in table.lines.values():
            named |= entry[-1]
    return named


def measured_rows(lesson: str) -> set[str]:
    """The claims that results/ says were measured of the real thing."""
    rows = [row for row in ledger_of(lesson)["ledger"] if row["verdict"] != "BLOCKED"]
    return {row["claim"] for row in rows if row.get("kind", "measured") == "measured"}


def test_each_measured_row_is_named_by_a_broken_line() -> None:
    unnamed = {}
    for lesson in LESSONS:
        if missing := measured_rows(lesson) - named_by_a_break(lesson):
            unnamed[lesson] = missing
    assert unnamed == {lesson: {*claims} for lesson, claims in UNBROKEN.items()}
    assert sum(map(len, UNBROKEN.values())) <= 25
