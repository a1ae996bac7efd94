"""The form: one plumbing, lessons of a lesson's length, paths that exist, a README that is true."""

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

import pytest

from tests import write_readme
from tests.lessons import FOLDERS, LESSONS, ROOT, flags_of, world_sizes_of
from tests.write_plumbing import plumbing_of
from tests.write_readme import section

TRACKED = subprocess.run(
    ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
).stdout.split()
IMPORTABLE = {"torch", "numpy", "sklearn", "matplotlib", "tqdm", "psutil", "pynvml"}
IMPORTABLE |= {"deepspeed", "ffcv", "numba", "torchvision", "nvtx"}


LONGER = {  # than 350 lines, plumbing apart
    "fundamentals/00_check_your_machine.py": 470,  # a tool as much as a lesson
    "communication/03_ring_and_tree.py": 450,  # six algorithms, one engine, one price list
    "communication/05_overlap.py": 380,  # one on the CPU, one on the link, one on a GPU's streams
    "communication/07_gradient_compression.py": 470,  # twelve ways to train, and two real links
    "parallelism/01_data_parallelism_ddp.py": 460,  # three ways, side by side in one run
}


def code_lines(source: str) -> int:
    """Lines that hold code: blank lines, comments and docstrings apart."""
    skip = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (*skip, tokenize.ENDMARKER):
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and ast.get_docstring(
            node
        ):
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def test_there_are_lessons() -> None:
    assert LESSONS[0] == "fundamentals/00_check_your_machine.py"
    assert len(LESSONS) >= 5


@pytest.mark.parametrize("lesson", LESSONS)
def test_plumbing_is_the_canonical_copy(lesson: str) -> None:
    assert plumbing_of(lesson) == plumbing_of("tests/plumbing.py"), "run: make plumbing"


def test_plumbing_stays_small() -> None:
    assert code_lines(plumbing_of("tests/plumbing.py")) <= 101


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_has_a_lessons_form(lesson: str) -> None:
    source = (ROOT / lesson).read_text()
    own = source.removesuffix(plumbing_of(lesson))
    assert 100 <= own.count("\n") <= LONGER.get(lesson, 350)
    doc = ast.get_docstring(ast.parse(source))
    for part in (
        "**Question.**",
        "**Predict.**",
        "**Run.**",
        "**You will have seen**",
        "**Next.**",
    ):
        assert part in doc, part
    assert f"python {lesson}" in doc or f"python {Path(lesson).name}" in doc
    assert "torchrun" in doc
    assert own.count("# %% [markdown]") >= 3
    assert world_sizes_of(lesson)
    assert isinstance(flags_of(lesson), list)


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_imports_only_what_is_named(lesson: str) -> None:
    for node in ast.walk(ast.parse((ROOT / lesson).read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            top = name.partition(".")[0]
            assert top in IMPORTABLE | set(sys.stdlib_module_names), f"{lesson} imports {name}"


@pytest.mark.parametrize("lesson", LESSONS)
def test_functions_are_short_typed_and_said(lesson: str) -> None:
    tree = ast.parse((ROOT / lesson).read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    lengths = [node.end_lineno - node.lineno + 1 for node in functions]
    assert max(lengths) <= 45
    assert sum(length > 25 for length in lengths) <= len(lengths) // 5, "mostly under 25 lines"
    untyped = [node.name for node in functions if node.returns is None and node.name != "__init__"]
    assert untyped == []


PATHS = re.compile(rf"\b(?:{'|'.join(FOLDERS)}|exercises|tests|results)/[\w./-]*\w")


@pytest.mark.parametrize("file", [*LESSONS, *(f for f in TRACKED if f.endswith(".md"))])
def test_every_path_that_is_named_exists(file: str) -> None:
    text = (ROOT / file).read_text()
    if file.endswith(".py"):
        text = ast.get_docstring(ast.parse(text))
    missing = [path for path in PATHS.findall(text) if not (ROOT / path).exists()]
    links = [l for l in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in l]  # noqa: E741
    missing += [link for link in links if not (ROOT / file).parent.joinpath(link).exists()]
    assert missing == []


@pytest.mark.parametrize("readme", ["README.md", "exercises/README.md"])
def test_tables_are_made_of_what_was_measured(readme: str) -> None:
    assert (ROOT / readme).read_text() == write_readme.written(ROOT / readme), "run: make results"


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_says_the_seconds_that_were_measured(lesson: str) -> None:
    doc = section(lesson, "You will have seen")
    assert re.match(r"\([^)]*torch[^)]*, \d+ s\b", doc)
    assert (ROOT / lesson).read_text() == write_readme.timed(lesson), "run: make results"


def test_readme_can_be_read_in_three_minutes() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    prose = [line for line in lines if not line.startswith(("|", " ", "`"))]  # tables are skimmed
    assert len(re.findall(r"\w+", "\n".join(prose))) < 3 * 250


def test_core_needs_no_compiler_and_ci_pins_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = {re.split(r"[><=]", need)[0] for need in project["dependencies"]}
    assert core.isdisjoint({"ffcv", "deepspeed"})
    pinned = {
        line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    extras = [need for extra in project["optional-dependencies"].values() for need in extra]
    wanted = core | {re.split(r"[><=]", need)[0] for need in extras}
    assert wanted - pinned <= {"setuptools"}


def test_nothing_here_speaks_of_how_it_was_made() -> None:
    forbidden = [
        "../" + "shared",
        "/" + "work/",
        "/" + "root/",
        "py" + "pi.org",
        "skeleton" + ".py",
    ]
    for file in TRACKED:
        path = ROOT / file
        if path.suffix in (".py", ".md", ".toml", ".txt", ".json", ".sh", "") and path.is_file():
            text = path.read_text(errors="replace")
            assert not [word for word in forbidden if word in text], file
