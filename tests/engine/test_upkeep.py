"""The commands around the course: doctor, new, write, results and benchmarks."""

import argparse
import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import NAMES, merged, row_of
from course import doctor, new, write
from course.book import exercises
from course.lessons import LESSONS, ROOT
from course.playing import load
from tests.helpers.checkout import changed_files, checkout, python

PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
RUFF = ("-m", "ruff")


# The doctor


def test_the_commands_join_the_command_course() -> None:
    parser = argparse.ArgumentParser("course")
    commands = parser.add_subparsers()
    for part in (doctor, new, write):
        part.add(commands)
    for line in (
        "doctor",
        "new lesson fsdp/09_x",
        "new exercise 99_x --after fsdp/01",
        "write tables",
    ):
        assert callable(parser.parse_args(line.split()).run), line


def test_upkeep_begins_without_torch_or_pytest() -> None:
    """The doctor comes to machines where they are missing."""
    code = "import sys; sys.modules |= dict.fromkeys(('torch', 'pytest', 'psutil')); "
    code += "from course import doctor, new, write; print(doctor.core())"
    assert "packages" in python(ROOT, "-c", code)


def test_all_is_well_where_tests_run(capsys: pytest.CaptureFixture) -> None:
    for finding in (
        doctor.python(),
        doctor.core(),
        doctor.torch(),
        doctor.clone(),
        doctor.answers(),
    ):
        assert finding.state == "ok", finding


def test_a_python_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ((3, 10), (3, 15)):
        monkeypatch.setattr(doctor.sys, "version_info", version)
        assert doctor.python().state == "bad"
        assert doctor.findings()[-1].label != "torch", "nothing that needs a newer Python is tried"


def test_a_clone_on_a_windows_drive() -> None:
    kernel = "6.6.87.2-microsoft-standard-WSL2"
    slow = doctor.system(Path("/mnt/c/Users/ada/course"), kernel)
    assert slow.state == "warn"
    assert "git clone into ~" in slow.remedy
    assert doctor.system(Path("/home/ada/course"), kernel).state == "ok"
    assert doctor.system(Path("/mnt/c/course"), "6.12.0-generic").state == "ok", "a disk on Linux"


def test_too_little_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, state in ((5e8, "bad"), (5e9, "warn"), (5e10, "ok")):
        usage = shutil._ntuple_diskusage(1e12, 1e12 - free, free)
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path, usage=usage: usage)
        assert doctor.disk().state == state


def test_a_clone_with_a_file_missing(tmp_path: Path) -> None:
    assert doctor.clone(tmp_path).found == "not a git clone"
    checkout(tmp_path)
    assert doctor.clone(tmp_path).state == "ok"
    (tmp_path / LESSONS[0]).unlink()
    hurt = doctor.clone(tmp_path)
    assert hurt.state == "bad"
    assert hurt.remedy.startswith(f"git checkout -- {LESSONS[0]}")
    git_is_missing = {"PATH": str(tmp_path)}
    code = "from course import doctor; print(doctor.clone())"
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=git_is_missing, capture_output=True, text=True
    )
    assert "git is not installed" in said.stdout, said


def test_answers_that_cannot_be_written(tmp_path: Path) -> None:
    assert doctor.answers(tmp_path).found == "none begun"
    (tmp_path / "answers").touch()
    assert doctor.answers(tmp_path).state == "bad"


def test_a_torch_that_is_missing_old_or_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    package = tmp_path / "torch"
    (package / "distributed").mkdir(parents=True)
    for source, state, words in (
        ("raise ImportError('libcudart.so.13: no such file')", "bad", "libcudart.so.13"),
        ("__version__ = '2.9.1+cu128'", "bad", "2.9.1"),
        ("__version__ = '2.11.0a0+34c6371d24.nv26.2'", "ok", "2.11.0a0"),
    ):
        (package / "__init__.py").write_text(source)
        (package / "distributed/__init__.py").write_text("is_gloo_available = lambda: True")
        found = doctor.torch()
        assert (found.state, words in found.found) == (state, True), found


def test_what_an_extra_blocks_is_read_off_the_lessons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda package: "")
    blocked = {row.label: row.found for row in doctor.extras()}
    assert set(blocked) == {"deepspeed", "ffcv", "numba", "nvtx"}
    assert blocked["deepspeed"].endswith("fsdp/09_inference, fsdp/10_offload")
    assert blocked["ffcv"].count("data-loading/") == 5
    assert "profiling/03" in blocked["nvtx"]
    missing = doctor.core()
    assert missing.state == "bad"
    assert "cloudpickle" in missing.found
    assert "pytest" in missing.found


def test_a_bad_finding_is_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    lessons = []
    monkeypatch.setattr(doctor.subprocess, "run", lambda command: lessons.append(command) or good)
    good = subprocess.CompletedProcess([], 0)
    for label, state, status, tried in (
        ("disk", "ok", 0, 1),
        ("disk", "warn", 0, 1),
        ("disk", "bad", 1, 1),
        ("torch", "bad", 1, 0),
    ):
        lessons.clear()
        row = doctor.Finding(label, state, "found", "remedy")
        monkeypatch.setattr(doctor, "findings", lambda row=row: [row])
        assert doctor.run(argparse.Namespace()) == status
        assert len(lessons) == tried


def test_windows_is_told_in_one_sentence() -> None:
    code = "import sys; sys.platform = 'win32'; import course.ranks"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 1
    assert len(ran.stderr.splitlines()) == 1
    assert "WSL2" in ran.stderr


# New lessons and exercises


def test_a_row_goes_to_its_place_in_the_reading_order() -> None:
    order = (ROOT / "course/lessons.toml").read_text()
    last = [lesson for lesson in LESSONS if lesson.startswith("fsdp/")][-1]
    ahead = "parallelism/03_model_tensor_pipeline_parallel.py"  # of fsdp/01, on the spine
    for name, before in (("fsdp/99_last", last), ("fsdp/01_a", ahead)):
        listed = new.re.findall(r'^path = "(.+)"$', new.with_row(order, name), new.re.M)
        assert sorted(listed) == sorted([*LESSONS, f"{name}.py"])
        assert listed[listed.index(f"{name}.py") - 1] == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lesson", "nowhere/01_x"], "A lesson lies in one of communication, "),
        (["lesson", "fsdp/x"], "A lesson is called NN_name"),
        (["lesson", "fsdp/01_other"], "Number 01 is taken: 01_fsdp_basics"),
        (["exercise", "1_x", "--after", "fsdp/01"], "An exercise is called NN_name"),
        (["exercise", "99_x", "--after", "fsdp"], "--after names a lesson"),
    ],
)
def test_what_cannot_be_new_is_refused(arguments: list[str], words: str) -> None:
    parser = argparse.ArgumentParser("course")
    new.add(parser.add_subparsers())
    options = parser.parse_args(["new", *arguments])
    with pytest.raises(SystemExit, match=words):
        options.run(options)


@pytest.mark.timeout(900)  # it starts Python many times: on a busy machine, half a minute each
@pytest.mark.deep
def test_a_new_lesson_passes_the_tests_of_form_and_runs(tmp_path: Path) -> None:
    checkout(tmp_path)
    said = python(tmp_path, "-m", "course.new", "lesson", "parallelism/90_my_lesson")
    lesson = "parallelism/90_my_lesson.py"
    assert lesson in said
    tests = "tests/lessons/parallelism/test_90_my_lesson.py"
    assert changed_files(tmp_path) == {lesson, tests, "course/lessons.toml"}
    python(tmp_path, *RUFF, "check", lesson, tests)
    python(tmp_path, *RUFF, "format", "--check", lesson, tests)
    python(tmp_path, "-m", "course.run_lessons", "--keep", f"--only={lesson}")
    python(tmp_path, "-m", "course.write", "tables")
    ledger = "results/lessons/parallelism_90_my_lesson.json"
    assert changed_files(tmp_path) == {
        lesson,
        tests,
        "course/lessons.toml",
        "parallelism/README.md",
        "README.md",
        "results/README.md",
        ledger,
        ledger.replace(".json", ".txt"),
    }, "make results ONLY=... measures this lesson, and no row of another changes"
    verdicts = [row["verdict"] for row in json.loads((tmp_path / ledger).read_text())["ledger"]]
    assert verdicts == ["PASS"]
    said = python(
        tmp_path, *PYTEST, "tests/form", tests, "-k", "90_my_lesson or tables or folder or repeats"
    )
    assert "failed" not in said


@pytest.mark.timeout(900)  # it starts Python many times: on a busy machine, half a minute each
@pytest.mark.deep
def test_a_new_exercise_is_complete(tmp_path: Path) -> None:
    checkout(tmp_path)
    after = "parallelism/06_tensor_parallel"
    python(tmp_path, "-m", "course.new", "exercise", "90_my_task", "--after", "parallelism/06")
    python(tmp_path, "-m", "course.write", "tables")
    python(tmp_path, *RUFF, "check", "exercises/90_my_task", f"{after}.py")
    python(tmp_path, *RUFF, "format", "--check", "exercises/90_my_task", f"{after}.py")
    made = {f"exercises/90_my_task/{path.removesuffix('.in')}" for path in TEMPLATE}
    tables = {"README.md", "exercises/README.md", "parallelism/README.md"}
    assert changed_files(tmp_path) == made | tables | {f"{after}.py"}
    said = python(tmp_path, *PYTEST, "tests/exercises/test_exercises.py", "-k", "90_my or follows")
    assert "failed" not in said
    python(tmp_path, *PYTEST, "tests/form", "-k", "tables or 90_my_task or 06_tensor_parallel")


TEMPLATE = [path.name for path in (ROOT / "course/templates/exercise").iterdir()]


# A learner's checkout


@pytest.fixture
def solved(tmp_path: Path) -> Path:
    """A checkout with an answer to every exercise, and notes that no test of form would accept."""
    checkout(tmp_path)
    (tmp_path / "answers").mkdir()
    for exercise in exercises(tmp_path):
        assert exercise.answer.parent == tmp_path / "answers"
        shutil.copy(exercise.solution, exercise.answer)
    (tmp_path / "answers/notes.py").write_text("a, b = f(1), g((int if x else id)(2)) ; print(a)\n")
    return tmp_path


def test_git_and_lint_do_not_see_answers(solved: Path) -> None:
    assert changed_files(solved) == set()
    python(solved, *RUFF, "check", ".")
    python(solved, *RUFF, "format", "--check", ".")


def test_tables_that_are_true_are_left_alone(capsys: pytest.CaptureFixture) -> None:
    for made in (write.tables, write.plumbing):
        assert made(argparse.Namespace()) == 0
        assert capsys.readouterr().out == "Everything is up to date.\n"


def test_one_file_s_ratios_take_the_places_of_the_old(tmp_path: Path) -> None:
    kept = tmp_path / "bench.json"
    old = [{"name": "a", "ratio": 1.0}, {"name": "b", "ratio": 2.0}]
    kept.write_text(json.dumps({"rows": old}))
    new_rows = [{"name": "c", "ratio": 3.0}, {"name": "a", "ratio": 4.0}]
    ratios = {row["name"]: row["ratio"] for row in merged(new_rows, kept)}
    assert list(ratios.items()) == [("a", 4.0), ("b", 2.0), ("c", 3.0)]
    assert merged(old, tmp_path / "none.json") == old


SMALL = {  # every row is measured all the same
    "ddp": {"WIDTH": 64, "DEPTH": 2, "ROUNDS": 1},
    "ffcv": {"ROUNDS": 1, "load": lambda path: load(path, ("\nN = 242 ", "\nN = 32 "))},
    "model_parallel": {"WIDTH": 64, "TOKENS": 8, "LAYERS": 2, "MICROS": 2, "ROWS": 4},
    "ring": {"CASES": ((40_000, "tree", 2, 0.7), (40_000, "ring", 2, 1.1))},
    "zero": {"LAYERS": 1, "WIDTH": 64, "TOKENS": 8},
}


@pytest.mark.deep
@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_measures_its_rows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "ffcv":
        pytest.importorskip("ffcv", reason="needs FFCV, which needs packages.txt")
    bench = importlib.import_module(f"benchmarks.{name}")
    for constant, small in SMALL[name].items():
        monkeypatch.setattr(bench, constant, small)
    rows = [row_of(result) for result in bench.ratios(3)]
    assert rows
    for row in rows:
        assert len(row["ours"]) >= 3, row
        assert len(row["ours"]) == len(row["peer"])
        best = min(row["ours"]) / min(row["peer"])  # the others may have waited for a core
        assert 0.01 < best < 100, f"times in the same unit: {row}"


@pytest.mark.deep
def test_the_command_measures_draws_and_keeps_nothing_unasked(tmp_path: Path) -> None:
    checkout(tmp_path)
    ring = tmp_path / "benchmarks/ring.py"
    small = ring.read_text().replace('000_000, "ring"', '000, "ring"')
    ring.write_text(small)
    said = python(tmp_path, "-m", "benchmarks", "--repeats=1", "--only=ring")
    rows = json.loads((tmp_path / "build/bench/bench.json").read_text())["rows"]
    assert len(rows) == 6
    assert [row["name"] for row in rows if row["name"] not in said] == []
    assert (tmp_path / "build/bench/bench.png").stat().st_size > 1000
    assert changed_files(tmp_path) == {"benchmarks/ring.py"}, "only --keep writes to results/"
