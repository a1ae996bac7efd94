"""Every measured row has been seen to FAIL: an entry of its lesson's BREAKS names it.

And what such an entry breaks is still in the lesson, once: at the gate, since a lesson whose prose
alone has changed is not played deep.
"""

import functools
import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from course.lessons import LESSONS, ROOT, file_of_tests
from course.machines import ledger_of
from tests.helpers.together import changes_of
from tests.lessons.every import Breaks, Change, OnGpus

# {lesson: {claim: why no broken line is named}}; 25 at most.
UNBROKEN: dict[str, dict[str, str]] = {}


@functools.cache
def module_of(lesson: str) -> ModuleType:
    path = file_of_tests(lesson)
    spec = importlib.util.spec_from_file_location(f"rows_{Path(lesson).stem}", path)
    tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    return tests


def tables_of(lesson: str) -> list[Breaks]:
    tables = getattr(module_of(lesson), "BREAKS", [])
    return [tables] if isinstance(tables, Breaks) else tables


def named_by_a_break(lesson: str) -> set[str]:
    """The claims that some entry of the lesson's own file of tests names."""
    entries = [entry for table in tables_of(lesson) for entry in table.lines.values()]
    return set().union(*(entry[-1] for entry in entries))


def changes_in(lesson: str) -> Iterator[Change]:
    """All that the tables of the lesson's own file of tests change in it."""
    tests = module_of(lesson)
    for table in tables_of(lesson):
        yield from table.changes
        for entry in table.lines.values():
            yield from changes_of(entry)
    yield from itertools.chain(*getattr(tests, "SIZES", {}).values())
    yield from getattr(tests, "ON_GPUS", OnGpus()).changes
    for without in getattr(tests, "WITHOUT", {}).values():
        yield from without.changes


def measured_rows(lesson: str) -> set[str]:
    """The claims that results/ says were measured of the real thing."""
    rows = [row for row in ledger_of(lesson)["ledger"] if row["verdict"] != "BLOCKED"]
    return {row["claim"] for row in rows if row.get("kind", "measured") == "measured"}


@pytest.mark.parametrize("lesson", LESSONS)
def test_what_is_changed_is_there_once(lesson: str) -> None:
    source = (ROOT / lesson).read_text()
    assert [old for old, _ in changes_in(lesson) if source.count(old) != 1] == []


def test_each_measured_row_is_named_by_a_broken_line() -> None:
    unnamed = {}
    for lesson in LESSONS:
        if missing := measured_rows(lesson) - named_by_a_break(lesson):
            unnamed[lesson] = missing
    assert unnamed == {lesson: {*claims} for lesson, claims in UNBROKEN.items()}
    assert sum(map(len, UNBROKEN.values())) <= 25
