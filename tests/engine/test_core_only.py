"""With the core packages and no others, as after `make start`, the course can be taken.

The environment is made of links: of all that is installed here it sees the distributions that
pyproject.toml's dependencies need, and theirs, and nothing else. Nothing is downloaded.
"""

import ast
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from course.book import exercises
from course.lessons import LESSONS, ROOT
from tests.helpers.checkout import checkout


def core_distributions() -> set[str]:
    """The canonical names of the core's packages, and of all that these require."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting = [Requirement(text) for text in project["dependencies"]]
    found = set()
    while waiting:
        need = waiting.pop()
        name = canonicalize_name(need.name)
        applies = need.marker is None or need.marker.evaluate({"extra": ""})
        if name in found or not applies:
            continue
        found.add(name)
        waiting += [Requirement(text) for text in importlib.metadata.requires(name) or []]
    return found


def link_distribution(name: str, packages: Path) -> None:
    """Link what a distribution has put into site-packages; files of its own, as in bin, stay."""
    distribution = importlib.metadata.distribution(name)
    tops = {path.parts[0] for path in distribution.files if path.parts[0] != ".."}
    for top in tops:
        link = packages / top
        if not link.is_symlink():
            link.symlink_to(distribution.locate_file(top))


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with a .venv of the core, in which the course itself is installed as editable."""
    clone = checkout(tmp_path_factory.mktemp("core"))
    venv.create(clone / ".venv", with_pip=False, symlinks=True)
    (packages,) = (clone / ".venv").glob("lib/python3*/site-packages")
    for name in core_distributions():
        link_distribution(name, packages)
    (packages / "course.pth").write_text(f"{clone}\n")
    return clone


def run(clone: Path, *arguments: str, timeout: float = 250) -> subprocess.CompletedProcess:
    """Run the clone's Python, from a folder elsewhere."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return subprocess.run(
        [clone / ".venv/bin/python", *arguments],
        cwd=clone.parent,
        env={name: value for name, value in os.environ.items() if name not in hidden},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )


def test_the_environment_holds_the_core_and_nothing_else(core: Path) -> None:
    code = "import importlib.util as u; print(*(n for n in {} if u.find_spec(n)))"
    there = ("torch", "sklearn", "matplotlib", "tqdm", "psutil", "pynvml", "pytest", "cloudpickle")
    absent = ("xdist", "hypothesis", "pexpect", "deepspeed", "ffcv", "torchvision", "nvtx", "ruff")
    assert run(core, "-c", code.format(there + absent)).stdout.split() == list(there)


def test_the_command_starts_and_leads_to_the_first_exercise(core: Path) -> None:
    listed = run(core, "-m", "course")
    assert listed.returncode == 0, listed.stdout
    assert "Traceback" not in listed.stdout


def test_a_solution_is_accepted(core: Path) -> None:
    first = next(one for one in exercises(core) if one.name == "01_hello_ranks")
    first.answer.parent.mkdir(exist_ok=True)
    shutil.copy(first.solution, first.answer)
    checked = run(core, "-m", "course", "check", "1")
    assert checked.returncode == 0, checked.stdout
    assert "Accepted" in checked.stdout


def test_every_lesson_can_be_imported(core: Path) -> None:
    """Those that need more say so when they run: BLOCKED."""
    code = f"from course.playing import load\nfor lesson in {LESSONS}: load(lesson)"
    loaded = run(core, "-c", code)
    assert loaded.returncode == 0, loaded.stdout


def test_the_doctor_names_what_is_missing(core: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from course import doctor\nfor row in doctor.findings(): print(row)"
    told = run(core, "-c", code).stdout
    assert "all 9 of the core" in told
    for package in ("deepspeed", "ffcv", "numba", "nvtx"):
        assert f"! {package:12} not installed: BLOCKED in " in told
    assert "✗" not in told


@pytest.mark.deep
@pytest.mark.parametrize(
    "lesson",
    [
        "parallelism/01_data_parallelism_ddp.py",  # what `make start` runs
        "fsdp/03_deepspeed_bytes.py",
    ],
)
def test_a_lesson_runs_or_says_what_it_needs(
    core: Path, lesson: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = tmp_path / "ledger.json"
    monkeypatch.setenv("LESSON_JSON", str(ledger))
    if lesson.startswith("fsdp/"):  # as one rank, which need not load torch five times
        place = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        for name, value in (place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}).items():
            monkeypatch.setenv(name, str(value))
    ran = run(core, str(core / lesson))
    assert "Traceback" not in ran.stdout
    rows = json.loads(ledger.read_text())["ledger"]
    blocked = {row["needs"] for row in rows if row["verdict"] == "BLOCKED"}
    assert "FAIL" not in [row["verdict"] for row in rows], ran.stdout
    if lesson.startswith("fsdp/"):
        assert "deepspeed: pip install -e '.[deepspeed]'" in blocked
    else:
        assert ran.returncode == 0, ran.stdout


def imported(path: Path) -> set[str]:
    """The distributions that a file imports from, the standard library and this one apart."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module.partition(".")[0])
    modules -= set(sys.stdlib_module_names) | {"course", "tests", "benchmarks"}
    return {canonicalize_name(PROVIDERS[module][0]) for module in modules}


PROVIDERS = importlib.metadata.packages_distributions()


@pytest.mark.parametrize(
    ("files", "extras"),
    [
        ("course/*.py", ()),
        ("exercises/*/test_exercise.py", ("ffcv",)),
        ("benchmarks/*.py", ("data", "ffcv")),
        ("[!e]*/[0-9][0-9]_*.py", ("data", "deepspeed", "ffcv", "profiling")),
        ("tests/**/test_*.py", ("data", "deepspeed", "ffcv", "profiling", "test")),
    ],
)
def test_what_is_imported_is_named_in_pyproject(files: str, extras: tuple[str, ...]) -> None:
    """Also what another package happens to bring, as scikit-learn brings cloudpickle."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = list(project["dependencies"])
    for extra in extras:
        named += project["optional-dependencies"][extra]
    allowed = {canonicalize_name(Requirement(text).name) for text in named}
    paths = set(ROOT.glob(files)) - {ROOT / "course/passages.py"}  # that is copied into lessons
    assert paths
    for path in paths:
        assert imported(path) <= allowed, path
