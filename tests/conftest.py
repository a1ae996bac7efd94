"""Files go whole to one process; the lessons, which are the longest file, one by one."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        lesson = getattr(item, "callspec", None) and item.callspec.params.get("lesson")
        name = f"{item.path.name} {lesson}" if item.path.stem == "test_lessons" else str(item.path)
        item.add_marker(pytest.mark.xdist_group(name))
