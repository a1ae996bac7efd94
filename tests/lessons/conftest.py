"""Each file of a lesson's tests has the tests that all lessons have (tests/lessons/every.py)."""

import pytest

from tests.lessons.every import cases_of


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = cases_of(metafunc.module)
        params = [pytest.param(case, id=str(case), marks=case.marks) for case in cases]
        metafunc.parametrize("case", params)
