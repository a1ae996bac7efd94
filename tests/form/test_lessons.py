"""The form of lessons: the order of parts, one plumbing, identical passages, code that reads."""

import ast
import functools
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from course.lessons import LESSONS, READING_ORDER, ROOT, file_of_tests, world_sizes_of
from course.shared_code import definitions, passages, plumbing_of
from tests.helpers.tricks import tricks

IMPORTABLE = {"torch", "numpy", "sklearn", "matplotlib", "tqdm", "psutil", "pynvml"}
IMPORTABLE |= {"deepspeed", "ffcv", "numba", "torchvision", "nvtx", "tokenizers", "PIL"}

READ_ALOUD = LESSONS + [
    str(path.relative_to(ROOT))
    for folder in ("exercises", "course", "tests/helpers")
    for path in sorted((ROOT / folder).rglob("*.py"))
]

TOP = """\
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
"""


@functools.cache
def own(lesson: str) -> str:
    """A lesson's source without its plumbing."""
    return (ROOT / lesson).read_text().removesuffix(plumbing_of(lesson))


@functools.cache
def tree_of(lesson: str) -> ast.Module:
    """The same, parsed."""
    return ast.parse(own(lesson))


@functools.cache
def definitions_of(lesson: str) -> dict[str, str]:
    return definitions(own(lesson))


def docstring(lesson: str) -> str:
    return ast.get_docstring(tree_of(lesson))


RULES: list[Callable[[str], None]] = []  # each asserts something of a lesson


def rule(check: Callable[[str], None]) -> Callable[[str], None]:
    RULES.append(check)
    return check


@pytest.mark.parametrize("lesson", LESSONS)
def test_the_form_of_a_lesson(lesson: str) -> None:
    broken = []
    for check in RULES:
        try:
            check(lesson)
        except AssertionError as error:
            broken.append(f"{check.__name__}: {error}")
    assert not broken, "\n".join(broken)


def predictions(lesson: str) -> set[int]:
    """The numbers of the questions under *Predict*."""
    part = re.search(r"\*\*Predict\*\*(.*?)\n\*\*", docstring(lesson), re.S)[1]
    return {int(number) for number in re.findall(r"^(\d+)\. ", part, re.M)}


def test_the_reading_order_names_each_lesson_once() -> None:
    assert sorted(row["path"] for row in READING_ORDER) == sorted(set(LESSONS))


@rule
def plumbing_is_the_canonical_copy(lesson: str) -> None:
    assert plumbing_of(lesson) == plumbing_of("course/plumbing.py"), "run: make plumbing"
    assert TOP in own(lesson).partition("\n# %%")[0], "RANK and WORLD_SIZE stand above the cells"


@rule
def the_docstring_asks_and_does_not_answer(lesson: str) -> None:
    said = docstring(lesson)
    title, rule = said.splitlines()[:2]
    assert set(rule) == {"="}
    assert len(rule) == len(title)
    parts = ["**Question.**", "**Predict**", "**Run.**", "**Try.**", "**Before.**", "**Next.**"]
    places = [said.index(part) for part in parts]
    assert places == sorted(places)
    name = Path(lesson).name
    assert re.search(rf"python {name}", said)
    assert re.search(rf"torchrun .*{name}", said) or "starts its own ranks" in said
    assert "You will have seen" not in said


@rule
def a_claim_answers_each_question(lesson: str) -> None:
    keywords = [node for node in ast.walk(tree_of(lesson)) if isinstance(node, ast.keyword)]
    answered = set()
    for keyword in keywords:
        if keyword.arg == "question" and isinstance(keyword.value, ast.Constant):
            answered.add(keyword.value.value)
    assert predictions(lesson)
    assert answered == predictions(lesson)


@rule
def the_idea_comes_first_and_the_answers_last(lesson: str) -> None:
    source = own(lesson)
    sections = re.findall(r"^# %% \[markdown\]\n# ## (.*)$", source, re.M)
    assert sections[0].startswith("1. ")
    assert sections[-1] == "What you should have seen"
    numbered = [int(s.partition(".")[0]) for s in sections if s[0].isdigit()]
    assert numbered == list(range(1, len(numbered) + 1))
    assert any("measured" in section for section in sections[:-1]), "How it is measured"
    answers = source.partition("# ## What you should have seen")[2]
    for number in predictions(lesson):
        assert re.search(rf"^# {number}\. ", answers, re.M), f"{number}. is not answered"
    defined = [n.name for n in tree_of(lesson).body if isinstance(n, ast.FunctionDef)]
    assert defined[-1] == "main"
    assert "def main()" in answers


@rule
def cells_are_short_and_have_words_before_them(lesson: str) -> None:
    """A cell of code holds at most about 60 lines; before each stands a cell of prose."""
    cells = re.split(r"^# %%", own(lesson), flags=re.M)[1:]
    for before, cell in zip([" [markdown]", *cells], cells, strict=False):
        if not cell.startswith(" [markdown]"):
            assert before.startswith(" [markdown]"), cell[:200]
            assert len([line for line in cell.splitlines() if line.strip()]) <= 75, cell[:200]


@rule
def plain_python_starts_no_number_of_ranks_that_the_lesson_refuses(lesson: str) -> None:
    """Those whose `launch` names some numbers are tried (tests/lessons/every.py)."""
    if world_sizes_of(lesson) != [1] and "\n    launch()\n" in own(lesson):
        assert {*world_sizes_of(lesson)} >= {2, 3, 4, 8}


@rule
def its_tests_stand_in_one_file(lesson: str) -> None:
    text = file_of_tests(lesson).read_text()
    assert re.search(r"from tests.lessons.every import .*\btest_lesson\b", text)
    assert f'LESSON = "{lesson}"' in text


@rule
def a_lesson_imports_only_what_is_named(lesson: str) -> None:
    for node in ast.walk(tree_of(lesson)):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            top = name.partition(".")[0]
            assert top in IMPORTABLE | set(sys.stdlib_module_names), f"{lesson} imports {name}"


@rule
def a_largest_error_keeps_a_nan(lesson: str) -> None:
    """Python's `max` loses a NaN that is not the first: `max(0.0, nan)` is 0.0."""
    for function in ast.walk(tree_of(lesson)):
        if isinstance(function, ast.FunctionDef):
            names = re.findall(r"(\w+)\.append\(.*\.abs\(\)", ast.unparse(function))
            for call in re.findall(r"(?<![.\w])max\((.*)", ast.unparse(function)):
                assert ".abs()" not in call, f"max({call}: max of a tensor keeps a NaN"
                assert call.partition(")")[0] not in names, f"max({call}: torch.stack(...).max()"


def test_code_can_be_read_aloud() -> None:
    found = []
    for path in READ_ALOUD:
        source = (ROOT / path).read_text()
        if path in LESSONS or path.startswith("course/"):
            assert "noqa" not in source, path
        lines = source.splitlines()
        for at, trick in tricks(ast.parse(source)):
            found.append(f"{path}:{at}: {trick}: {lines[at - 1].strip()}")
    assert not found, "\n".join(found)


@rule
def shared_passages_are_identical(lesson: str) -> None:
    shared = passages()
    for name, text in definitions_of(lesson).items():
        if name in shared:
            assert text == shared[name], f"{name}: run make plumbing"


def test_nothing_else_repeats() -> None:
    """No function or method of six lines or more stands in two lessons, the passages apart."""
    places = defaultdict(set)
    shared = passages()
    for lesson in LESSONS:
        for name, text in definitions_of(lesson).items():
            if name in shared:
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 5:
                    if ast.get_docstring(node):
                        node.body.pop(0)
                    places[ast.dump(ast.Module(node.body, []))].add(f"{lesson}: {node.name}")
    assert [sorted(where) for where in places.values() if len(where) > 1] == []


def is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # `torch.distributed.barrier.x`: barrier is a function
        return False


def used_but_not_imported(source: str, loaded: set[str]) -> set[str]:
    """Modules of torch's that are named in full and that neither the file nor torch imports."""
    imported, used = set(loaded), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
            used.add(ast.unparse(node))
    return {name for name in used - imported if is_module(name)}


def test_a_lesson_imports_the_modules_it_uses() -> None:
    """Most tests run lessons in processes that have loaded more than a lesson's own."""
    show = "import torch, torch.distributed, json, sys; print(json.dumps([*sys.modules]))"
    ran = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    loaded = {*json.loads(ran.stdout)}
    assert used_but_not_imported("torch.distributed.fsdp.fully_shard(x)", loaded)
    for lesson in LESSONS:
        assert used_but_not_imported((ROOT / lesson).read_text(), loaded) == set(), lesson
