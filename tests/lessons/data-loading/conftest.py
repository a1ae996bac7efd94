"""The file that the lessons of this folder write."""

from pathlib import Path

import pytest

from course.playing import load
from course.ranks import run


@pytest.fixture(scope="module")
def beton(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lesson's file, written by FFCV in a process of its own."""
    path = tmp_path_factory.mktemp("beton") / "raw.beton"
    run(lambda lesson: load(lesson).write_beton(path), 1, request.module.LESSON)
    return path
