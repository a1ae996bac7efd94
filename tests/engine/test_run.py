"""The gate confirms what fails before it believes it; the night does not, and says what passed."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from course.lessons import ROOT
from tests import groups, run

Story = list[
    tuple[int, list[str]]
]  # what each session of pytest ends with: its status, what failed


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Play a tier of which each session of pytest ends as told; return its status."""
    monkeypatch.setattr(run, "FLAKY", tmp_path / "flaky.txt")
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(groups, "stale", dict)
    monkeypatch.setattr(groups, "PASSED", run.ROOT / "passed.txt")
    monkeypatch.setattr(groups, "every", lambda: ["tests/a.py", "tests/b.py"])
    monkeypatch.setattr(groups, "dependencies", lambda group: {group, "both.py"})
    monkeypatch.setenv("STALE", "")
    run.FLAKY.write_text("tests/a.py::known\n")

    def play(tier, story: Story) -> int:
        sessions = []

        def session(*arguments: str, workers: str = "") -> tuple[int, list[str]]:
            sessions.append((*arguments, workers))
            return story[len(sessions) - 1]

        monkeypatch.setattr(run, "pytest", session)
        status = tier("3")
        assert len(sessions) == len(story), sessions
        play.sessions = sessions
        return status

    return play


def test_all_that_passes_is_green_and_played_once(played) -> None:
    assert played(run.gate, [(0, [])]) == 0


def test_what_fails_once_and_passes_twice_is_flaky_and_said_last(played, capsys) -> None:
    names = ["tests/a.py::b", "tests/a.py::c[d; e]"]
    assert played(run.gate, [(1, names), (0, []), (0, [])]) == 0
    assert played.sessions[1:] == [("all", *names, "")] * 2  # alone, in one process
    assert capsys.readouterr().out.splitlines()[-2:] == [f"FLAKY {name}" for name in names]
    assert run.FLAKY.read_text().splitlines() == ["tests/a.py::known", *names]


@pytest.mark.parametrize(
    "story",
    [
        [(1, ["a"]), (1, ["a"])],
        [(1, ["a"]), (0, []), (1, ["a"])],
        [(1, ["a", "b", "c", "d"])],  # too many to be chance
        [(2, [])],  # interrupted, or a file that cannot be collected
        [(5, [])],  # nothing ran
        [(1, ["tests/a.py::known"]), (0, []), (0, [])],  # it has flaked before
    ],
)
def test_anything_else_is_red(played, story: Story) -> None:
    assert played(run.gate, story) != 0
    assert run.FLAKY.read_text() == "tests/a.py::known\n"


def test_a_night_that_is_green_says_what_passed(played) -> None:
    assert played(run.night, [(0, []), (0, [])]) == 0
    assert groups.read_passed().keys() == {"both.py", "tests/a.py", "tests/b.py"}


@pytest.mark.parametrize(
    "story", [[(1, ["tests/a.py::x"]), (0, [])], [(0, []), (1, ["tests/a.py::y"])]]
)
def test_a_red_night_leaves_out_the_files_of_what_failed(played, story: Story, capsys) -> None:
    assert played(run.night, story) == 1
    assert groups.read_passed().keys() == {"both.py", "tests/b.py"}
    assert "All but tests/a.py::" in capsys.readouterr().out


@pytest.mark.parametrize(
    "story", [[(1, ["a", "b"]), (1, ["c", "d"])], [(3, [])], [(0, []), (2, [])]]
)
def test_a_night_with_many_failures_or_worse_says_nothing(played, story: Story) -> None:
    assert played(run.night, story) != 0
    assert not groups.PASSED.exists()


@pytest.mark.parametrize(("minutes", "ends"), [(-1, "1 left to the night"), (1, "2 passed")])
@pytest.mark.parametrize("workers", [["-p", "no:xdist"], ["-n", "1"]])
def test_no_deep_test_begins_after_its_minutes(
    tmp_path: Path, minutes: int, ends: str, workers: list[str]
) -> None:
    file = tmp_path / "test_two.py"
    file.write_text(
        "import pytest\n\n\n@pytest.mark.deep\ndef test_deep(): ...\n\n\ndef test_other(): ...\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "tests.deep_minutes", "-rs", *workers]
    env = os.environ | {"DEEP_UNTIL": str(time.time() + 60 * minutes), "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([*command, file], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
    assert ends in ran.stdout.splitlines()[-1]
    assert "SKIPPED" not in ran.stdout  # which .ci/run takes for a want


LESSON = "tests/lessons/communication/test_03_ring_and_tree.py"


def collected(tier: str, *stale: str) -> set[str]:
    """The names, without the file's, of the tests of a lesson that this tier would run."""
    command = [sys.executable, "-m", "pytest", f"--tier={tier}", "--co", "-q", LESSON]
    env = os.environ | {"STALE": json.dumps(stale)}
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
    return {line.partition("::")[2] for line in ran.stdout.splitlines() if line.startswith(LESSON)}


def test_each_tier_runs_what_the_readme_of_tests_says() -> None:
    night = collected("night")
    changed = collected("gate", LESSON)
    shared = collected("gate", groups.SHARED)
    unchanged = collected("gate", "tests/lessons/communication/test_02_point_to_point.py")
    assert {
        "test_lesson[plain]",
        "test_every_all_reduce_adds_each_rank_once_everywhere",
    } < unchanged
    assert unchanged < shared < changed < night
    assert "test_lesson[ranks: 3]" in changed - shared
    assert len(shared - unchanged) == 3  # sentinels
    assert "test_lesson[ranks: 1]" in night - changed
    assert collected("all") >= night


def test_a_lessons_prose_is_in_no_hash() -> None:
    code = 'print("# no comment")\nx = """no docstring"""'
    prose = '"""What it shows."""\n# %% [markdown]\n# In words.\n\n' + code + "  # a remark"
    assert groups.code_of(prose) == groups.code_of(code) == code
    assert groups.code_of(prose.replace("no comment", "another")) != code
