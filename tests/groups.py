"""What each group of tests depends on, and which groups a change has touched since all was green.

A group is a file of tests, or one exercise. Its deep tests run at the gate if something that it
depends on differs from `tests/passed.txt`, which only a night writes (`make passed`): one line per
file or package, and what it was then, but none for a file of tests of which one failed. A group
depends on its file of tests, on what of tests/ that imports, on every file and folder of this
repository that those name in a string, and on the versions of the packages that they and the
lessons among them import.

A lesson's group does not depend on what all lessons share: the plumbing, what plays and judges
them. That is a group of its own, `SHARED`, whose tests are the sentinels: three plays of broken
lines of each lesson, the spine on pretended GPUs. Nor does it depend on the lesson's prose, its
comments and docstrings: form reads those, and holds that each broken line is still in its lesson.
"""

import ast
import functools
import hashlib
import io
import re
import tokenize
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

from course.book import exercises
from course.lessons import LESSONS, ROOT
from course.shared_code import MARK

PASSED = ROOT / "tests/passed.txt"
SHARED = "what all lessons share"
PLUMBING = "course/plumbing.py"
PLAYING = [PLUMBING, "course/playing.py", "course/ranks.py", "course/rank_server.py"]
PLAYING += ["tests/lessons/every.py", "tests/helpers/together.py"]
PLAYING += ["tests/conftest.py", "tests/lessons/conftest.py"]
PRETENDED = ["pretended_gpus", "gpu_clock", "gpu_kernels", "gpu_nccl", "gpu_nccl_log", "gpu_places"]
SHARED_FILES = {*PLAYING, *(f"tests/helpers/{name}.py" for name in PRETENDED)}
ALWAYS = ("torch", "numpy")  # whose versions every group depends on
SKIPPED = {"__pycache__", "answers", "build", "results", "passed.txt", "flaky.txt"}  # runs write it


def dependencies(group: str) -> set[str]:
    """The files, relative to the root, and "package NAME" that the group depends on."""
    if group == SHARED:
        return SHARED_FILES | packages_of(())
    if group.startswith("exercises/"):
        folder = files_in(group)
        engine = closure([f"course/{name}.py" for name in ("grading", "judge", "ranks", "wire")])
        files = {*folder, *engine, "tests/exercises/test_exercises.py"}
    elif group.startswith("tests/lessons/"):
        files = closure([group], through_course=False) - SHARED_FILES
    else:
        files = closure([group])
    return files | packages_of(files)


def closure(paths: list[str], through_course: bool = True) -> set[str]:
    """These files, what of tests/ and course/ they import, and the files that they name."""
    found = set()
    waiting = list(paths)
    while waiting:
        path = waiting.pop()
        if path in found or (path.startswith("course/") and not through_course):
            continue
        found.add(path)
        if path.endswith(".py") and path not in LESSONS:
            waiting += [*imported_files(path), *fixtures_of(path)]
            if path.startswith("tests/"):
                found |= named_files(path)
    return found


@functools.cache
def tree_of(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


@functools.cache
def imports_of(path: str) -> frozenset[str]:
    """The names of all modules that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def imported_files(path: str) -> Iterator[str]:
    for name in imports_of(path):
        if name.startswith(("tests.", "course.")):
            file = name.replace(".", "/") + ".py"
            if (ROOT / file).is_file():
                yield file


def fixtures_of(path: str) -> list[str]:
    """The conftest.py next to a file of tests, but for those that all tests have."""
    beside = Path(path).parent / "conftest.py"
    own = len(beside.parts) > 3 and beside.parts[0] == "tests"
    return [str(beside)] if own and (ROOT / beside).is_file() else []


def named_files(path: str) -> set[str]:
    """The files of this repository that a file names in a string, those in such folders too."""
    tree = tree_of(path)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            for name in re.findall(r"(?<![\w./-])\w[\w.-]*(?:/[\w.-]+)+", node.value):
                if (ROOT / name).exists() and name.partition("/")[0] not in SKIPPED:
                    found |= files_in(name)
    return found


@functools.cache
def files_in(name: str) -> frozenset[str]:
    """The file of that name, or the files of the folder, less what running leaves there."""
    path = ROOT / name
    every = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    inside = [str(file.relative_to(ROOT)) for file in every if not SKIPPED & {*file.parts}]
    return frozenset(inside)


@functools.cache
def distributions() -> dict[str, list[str]]:
    return dict(packages_distributions())


def packages_of(files: set[str] | tuple) -> set[str]:
    """ "package NAME" for each installed package that the files import."""
    tops = {*ALWAYS}
    for path in files:
        if path.endswith(".py"):
            tops |= {name.partition(".")[0] for name in imports_of(path)}
    tops -= {"course", "tests"}
    return {f"package {name}" for top in tops for name in distributions().get(top, [])}


@functools.cache
def state_of(dependency: str) -> str:
    """What it is now: a package's version, or a hash of a file, of a lesson's code alone."""
    kind, _, name = dependency.partition(" ")
    if kind == "package":
        try:
            return version(name)
        except PackageNotFoundError:
            return "missing"
    path = ROOT / dependency
    if not path.is_file():
        return "missing"
    content = path.read_bytes()
    if dependency in LESSONS:
        content = code_of(content.decode().partition(MARK)[0]).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def code_of(source: str) -> str:
    """What of the source runs: no comment, docstring or empty line."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


# tests/passed.txt


def every() -> list[str]:
    """All groups: the files of tests, the exercises, and what all lessons share."""
    files = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py"))
    return [*files, *(f"exercises/{one.name}" for one in exercises()), SHARED]


def stale() -> dict[str, list[str]]:
    """The groups of which something is not as it was when all was green, and what that is."""
    passed = read_passed()
    changed = {group: changed_since(passed, group) for group in every()}
    return {group: what for group, what in changed.items() if what}


def write_passed(failed: list[str]) -> None:
    """Say that all of this is green as it is now, but for the files of the tests that failed."""
    red = {name.partition("::")[0] for name in failed}
    all_files = sorted(set().union(*map(dependencies, every())) - red)
    lines = [f"{dependency}: {state_of(dependency)}" for dependency in all_files]
    PASSED.write_text("\n".join(lines) + "\n")


def read_passed() -> dict[str, str] | None:
    """What was green, or None if the file is missing or damaged."""
    if not PASSED.exists():
        return None
    found = {}
    for line in PASSED.read_text().splitlines():
        told = re.fullmatch(r"(\S+|package \S+): (\S+)", line)
        if not told or told[1] in found:
            return None
        found[told[1]] = told[2]
    return found or None


def changed_since(passed: dict[str, str] | None, group: str) -> list[str]:
    """What of the group's dependencies is not as it was when all was green."""
    if passed is None:
        return [f"no sound {PASSED.relative_to(ROOT)}"]
    return sorted(one for one in dependencies(group) if passed.get(one) != state_of(one))
