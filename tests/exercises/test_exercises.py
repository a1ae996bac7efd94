"""Every stub is empty, every solution passes, every wrong answer is told what is wrong with it."""

import ast
import json
import re
from pathlib import Path

import pytest

from course.book import Exercise, Mistake, Report, exercises
from course.judge import judge
from course.lessons import ROOT
from course.outline import lessons

BOOK = exercises()
PARTS = "**Task.**", "**Why.**", "**Given.**", "**Cost target.**", "**The hole.**"


def graded(exercise: Exercise, answer: Path, only: str = "") -> Report:
    """What the grader says; the test is skipped where this machine cannot grade it at all."""
    report = judge(exercise, answer, only, seed=1)
    if report.blocked and not report.passed and not report.failed:
        pytest.skip(report.blocked[0])
    return report


each = pytest.mark.parametrize("exercise", BOOK, ids=lambda e: e.name)


@each
def test_the_readme_says_all_a_learner_needs(exercise: Exercise) -> None:
    assert [exercise.readme.count(part) for part in PARTS] == [1] * len(PARTS)
    assert f"**The hole.** {sum(exercise.holes)} lines" in exercise.readme
    assert exercise.holes
    assert f"course check {exercise.number}\n" in exercise.readme
    assert f"`course hint {exercise.number}`" in exercise.readme
    assert len(exercise.hints) >= 2
    assert not any(hint in exercise.readme for hint in exercise.hints)
    assert len(exercise.title) <= 80


@each
def test_the_stub_fails_by_being_empty_and_nothing_else(exercise: Exercise, tmp_path: Path) -> None:
    (stub := tmp_path / "answer.py").write_text(exercise.stub())
    report = graded(exercise, stub)
    assert (report.passed, report.accepted) == ([], False)
    assert report.message.startswith("not written yet: answer.py, line ")


@each
def test_the_solution_passes(exercise: Exercise) -> None:
    report = graded(exercise, exercise.solution)
    assert report.accepted, f"{report.failed}\n{report.message}"
    for reason in report.blocked:
        assert re.search(r"needs (\d\+? )?GPUs|needs nsys|needs root", reason), reason


MISTAKES = [
    pytest.param(exercise, mistake, id=f"{exercise.name}-{mistake.name}")
    for exercise in BOOK
    for mistake in exercise.mistakes()
]


@pytest.mark.deep
@pytest.mark.parametrize(("exercise", "mistake"), MISTAKES)
def test_a_mistake_is_refused_and_told_why(
    exercise: Exercise, mistake: Mistake, tmp_path: Path
) -> None:
    (answer := tmp_path / "answer.py").write_text(mistake.source)
    report = graded(exercise, answer, mistake.check)
    assert not report.accepted
    assert mistake.says in " ".join(report.message.split())


@each
def test_there_are_mistakes_enough(exercise: Exercise) -> None:
    names = [mistake.name for mistake in exercise.mistakes()]
    assert len(set(names)) == len(names)
    assert len(names) >= 4


class Lazy(ast.NodeTransformer):
    """Fills every hole with the same cheap thing."""

    def __init__(self, how: str) -> None:
        self.how, self.first = how, "None"

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        names = [argument.arg for argument in node.args.args if argument.arg != "self"]
        outer, self.first = self.first, (names or ["None"])[0]
        self.generic_visit(node)
        self.first = outer
        return node

    def visit_Raise(self, node: ast.Raise) -> list[ast.stmt] | ast.Raise:
        if ast.unparse(node.exc) != "NotImplementedError":
            return node
        return ast.parse(self.how.replace("FIRST", self.first)).body


@pytest.mark.deep
@pytest.mark.parametrize("how", ["pass", "return FIRST"])
@each
def test_doing_nothing_does_not_pass(exercise: Exercise, how: str, tmp_path: Path) -> None:
    filled = Lazy(how).visit(ast.parse(exercise.stub()))
    (lazy := tmp_path / "lazy.py").write_text(ast.unparse(filled))
    assert "NotImplementedError" not in lazy.read_text()
    report = graded(exercise, lazy)
    assert not report.accepted
    assert "the grader itself failed" not in report.message


def test_every_interview_answer_points_at_a_claim_that_passed() -> None:
    text = (ROOT / "exercises" / "interview_topics.md").read_text()
    asked = re.findall(r"^\*\*(\d+)\. ", text, re.M)
    assert asked == [str(number) for number in range(1, len(asked) + 1)]
    proofs = re.findall(r"^Proof: `(.+)`: \"(.+)\"$", text, re.M)
    assert len(proofs) == len(asked) > 0
    for lesson, claim in proofs:
        name = lesson.replace("/", "_").replace(".py", ".json")
        told = json.loads((ROOT / "results" / "lessons" / name).read_text())
        verdicts = {row["claim"]: row["verdict"] for row in told["ledger"]}
        assert verdicts.get(claim) == "PASS", f"{lesson}: {claim}"


def test_each_exercise_follows_from_a_lesson_that_it_names() -> None:
    follow = {name: lesson.path for lesson in lessons() for name in lesson.exercises}
    assert sorted(follow) == [exercise.name for exercise in BOOK]
    for exercise in BOOK:
        given = exercise.readme.partition("**Given.**")[2].partition("**Cost target.**")[0]
        assert follow[exercise.name] in given, exercise.name
