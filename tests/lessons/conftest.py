"""Each file of a lesson's tests has the tests that all lessons have (tests/lessons/every.py)."""

import pytest

from tests.lessons import every


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is every.test_lesson:
        cases = every.cases_of(metafunc.module)
        params = [pytest.param(case, id=str(case), marks=case.marks) for case in cases]
        metafunc.parametrize("case", params)
