"""Each lesson of parallelism/ on two ranks and on eight, whole, where it takes so many.

Its own file of tests has it on one rank, three and four, and its broken lines mostly on two.
"""

from pathlib import Path

import pytest

from course.lessons import LESSONS, world_sizes_of
from tests.lessons.every import passes_on_ranks

CASES = [
    (lesson, ranks)
    for lesson in LESSONS
    if lesson.startswith("parallelism/")
    for ranks in {2, 8} & {*world_sizes_of(lesson)}
]


@pytest.mark.night
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("lesson", "ranks"), CASES)
def test_a_lesson_passes(lesson: str, ranks: int, tmp_path: Path) -> None:
    passes_on_ranks(lesson, ranks, (), tmp_path)
