"""What site/pages.py writes: every lesson, its rows where they are claimed, no solution."""

import ast
import importlib.util
import re
import sys
from types import ModuleType

import pytest

from course import outline
from course.book import HOLE
from course.lessons import LESSONS, ROOT


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "site/pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pages = load()


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    site = pages.Pages()
    site.make()
    return site.texts


def page_of(lesson: str) -> str:
    return lesson.removesuffix(".py") + ".md"


def words_of(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_s_prose_code_questions_and_rows_are_on_its_page(
    lesson: str, made: dict[str, str]
) -> None:
    page = made[page_of(lesson)]
    source = (ROOT / lesson).read_text()
    for cell in pages.cells_of(source):
        if cell.prose and not cell.text.startswith("## Plumbing"):
            assert words_of(cell.text) <= words_of(page)
        elif not cell.prose:
            assert cell.text.rstrip() in page
    for number, text in outline.find_lesson(lesson).predict[1].items():
        assert f'id="question-{number}"' in page
        assert text in page
    _, pieces, _ = pages.recorded(lesson)
    assert len(re.findall(r'<b class="(?:pass|fail|blocked)">', page)) == len(pieces)


@pytest.mark.parametrize("lesson", LESSONS)
def test_how_it_is_run_is_said_once_and_its_commands_are_code(
    lesson: str, made: dict[str, str]
) -> None:
    _, _, run = made[page_of(lesson)].partition("## Run it\n\n")
    assert "**Run.**" not in run
    first = next(
        line for line in run.splitlines() if re.match(r" *(torchrun|python|course) ", line)
    )
    assert first.startswith("    ")  # indented code, not prose


@pytest.mark.parametrize("lesson", LESSONS)
def test_each_row_stands_at_a_cell_that_claims(lesson: str) -> None:
    source = (ROOT / lesson).read_text()
    calls = pages.calls_of(source)
    lines = {line for line, _ in calls}
    _, pieces, _ = pages.recorded(lesson)
    assert [row["claim"] for _, row in pieces if pages.line_of(row, calls) not in lines] == []


def test_no_page_holds_a_solution(made: dict[str, str]) -> None:
    """No line of a hole that says something, unless the task or a hint says it in a lesson too."""
    found = []
    for exercise in outline.book():
        told = exercise.readme + "".join(exercise.hints)
        solved = exercise.solution.read_text()
        page = made[f"exercises/{exercise.name}/README.md"]
        for _, body in re.findall(HOLE, solved, re.S):
            for line in map(str.strip, body.splitlines()):
                if len(line) > 20 and line in page and line not in told:
                    found.append(f"{exercise.name}: {line}")
        assert not [other for other in made if "solution" in other or "mistakes" in other]
    assert found == []


LESSON = '''"""A title
=======

**Question.** Why?

**Predict**, and write it down before you run:

1. How many?
"""

import os

# %% [markdown]
# ## 1. The idea
#
# As in fsdp/01 and `exercises/08_zero1`, not in [fsdp/02](../fsdp/README.md):
#
#     fsdp/01 stays as it is

# %%
claim(f"{name}: bytes", 1, 2)

# %%
def late() -> None:
    blocked("speed", needs="1 GPU")
    claim("steps", 3, 3)
'''


def test_cells_keep_their_lines() -> None:
    first, prose, code, last = pages.cells_of(LESSON)
    assert first.text == "import os"
    assert prose.prose
    assert prose.text.startswith("## 1. The idea\n\nAs in")
    lines = LESSON.split("\n")
    for cell in (code, last):
        assert cell.text in "\n".join(lines[number - 1] for number in cell.lines)


def test_rows_are_found_again_after_lines_have_moved() -> None:
    calls = pages.calls_of(LESSON)
    at = {row: pages.line_of({"claim": row, "line": 7}, calls) for row in ("gpipe: bytes", "speed")}
    lines = LESSON.split("\n")
    assert "bytes" in lines[at["gpipe: bytes"] - 1]
    assert "speed" in lines[at["speed"] - 1]


def test_what_was_printed_stays_before_its_row() -> None:
    row = {"verdict": "PASS", "sign": "=", "predicted": 3.0, "measured": 3.0, "slack": 0.0}
    row |= {"kind": "simulated", "timed": False}
    ledger = [row | {"claim": "a < b", "question": 1}, row | {"claim": "c", "question": None}]
    text = "     claim    predicted    measured\n  PASS    1. a < b   = 3    3\n"
    text += "   x & y\n  PASS    c\n1 PASS"
    pieces, last = pages.pieces_of(text, ledger)
    assert [before.strip() for before, _ in pieces] == ["", "x & y"]
    assert last == "1 PASS"
    shown = pages.output(pieces)
    assert shown.index("a &lt; b") < shown.index("x &amp; y") < shown.index("</b> c")
    assert 'data-question="1"' in shown
    assert "simulated" in shown
    with pytest.raises(ValueError, match="zip"):
        pages.pieces_of(text, ledger[:1])


def test_an_answer_that_is_a_number_is_no_list(made: dict[str, str]) -> None:
    """Of "1. 96. Every rank ..." the 1 numbers the answer, and 96 is what it says."""
    for lesson in LESSONS:
        _, _, seen = made[page_of(lesson)].partition('<div class="seen">')
        assert not re.search(r"^\d+\. +\d+\. ", seen.partition("</div>")[0], re.M), lesson
    assert "1. 96\\. Every rank" in made["parallelism/22_tensor_parallel_random_state.md"]


def test_names_become_links_but_in_code() -> None:
    text = pages.cells_of(LESSON)[1].text
    shown = pages.Pages().prose(text, "parallelism/07_pipeline_schedules.md")
    assert "[fsdp/01](../fsdp/01_fsdp_basics.md)" in shown
    assert "[`exercises/08_zero1`](../exercises/08_zero1/README.md)" in shown
    assert "    fsdp/01 stays" in shown
    assert "[fsdp/02](" in shown


def test_the_planner_s_formulas_are_translated_and_what_is_not_known_is_refused() -> None:
    made = pages.javascript()
    for name in ("memory", "seconds", "broken_rules", "settings", "words"):
        assert f"function {name}(" in made
    translate = sys.modules["translate"]
    for python in ("with x: pass", "x = lambda: 1", "x = y.reshape(2)", 'x = f"{y:>9}"'):
        with pytest.raises(NotImplementedError, match=r"a\.py:1: "):
            translate.Translator("a.py", {}).statement(ast.parse(python).body[0])
