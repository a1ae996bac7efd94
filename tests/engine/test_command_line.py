"""`course` in a real terminal: progress, hints, watch, solution, reset, Ctrl-C."""

import os
import re
import shutil
import sys
import time
from pathlib import Path

import pexpect
import pytest

from course.lessons import ROOT
from tests.helpers.leftovers import left_in

FIRST, LAST = "exercises/01_hello_ranks", "exercises/04_ring_all_reduce"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A fresh clone's exercises, two of them, in a folder of their own."""
    for name in ("__main__", "book", "conftest", "grading", "ranks", "subreaper"):
        (tmp_path / "exercises").mkdir(exist_ok=True)
        shutil.copy(ROOT / "exercises" / f"{name}.py", tmp_path / "exercises")
    for name in (FIRST, LAST):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignore)
    return tmp_path


def start(home: Path, *argv: str) -> pexpect.spawn:
    command = ["-m", "exercises", *argv]
    size = (60, 100)
    return pexpect.spawn(sys.executable, command, cwd=home, dimensions=size, encoding="utf-8")


def said(terminal: pexpect.spawn) -> tuple[int, str]:
    """Exit status, and what the terminal showed, less the colours."""
    terminal.expect(pexpect.EOF, timeout=60)
    terminal.close()
    return terminal.exitstatus, re.sub(r"\x1b\[\d*m", "", terminal.before).replace("\r\n", "\n")


def ask(home: Path, *argv: str) -> tuple[int, str]:
    return said(start(home, *argv))


def soon_empty(home: Path) -> bool:
    """Wait for the server that ranks are forked from: it ends when it sees that we have."""
    return any(not left_in(home) or time.sleep(0.1) for _ in range(100))


def solve(home: Path, exercise: str) -> None:
    shutil.copy(home / exercise / "solution.py", home / exercise / "exercise.py")


def test_a_newcomer_is_led_to_the_first(home: Path) -> None:
    status, text = ask(home)
    assert status == 0
    assert "0 of 2 done" in text
    assert f"Next: 01. Read {FIRST}/README.md, write {FIRST}/exercise.py, then\n" in text
    assert "course check 1\n" in text
    status, text = ask(home, "next")
    assert text.startswith("# 01 Hello")
    assert "<details>" not in text, "hints come one by one"
    status, text = ask(home, "check")
    assert status == 1
    assert "not written yet: exercise.py, line" in text
    assert "A hint: course hint 1" in text
    assert max(map(len, text.splitlines())) <= 100


def test_progress_leads_from_one_to_the_next_and_to_the_end(home: Path) -> None:
    solve(home, FIRST)
    status, text = ask(home, "check", "1")
    assert status == 0
    assert re.search(r"Accepted: \d+ checks passed", text)
    assert "Next: 04." in text
    status, text = ask(home)
    assert "1 of 2 done" in text
    assert "✓ 01" in text
    assert "✓ 04" not in text
    solve(home, LAST)
    status, text = ask(home, "check")
    assert (status, "Next" in text) == (0, False)
    assert "All done" in ask(home)[1]
    assert "All done" in ask(home, "next")[1]


def test_hints_come_one_by_one(home: Path) -> None:
    for shown in (1, 2, 3, 3):
        status, text = ask(home, "hint", "4")
        assert status == 0
        assert re.findall(r"Hint (\d) of 3\.", text) == ["1", "2", "3"][:shown]
    assert "A hint:" not in ask(home, "check", "4")[1], "none is left to offer"


def test_the_solution_is_shown_after_a_pass_or_anyway(home: Path) -> None:
    status, text = ask(home, "solution", "1")
    assert status == 1
    assert "--anyway" in text
    assert "def hello" not in text
    due = (home / FIRST / "solution.py").read_text()
    assert ask(home, "solution", "1", "--anyway") == (0, due)
    solve(home, FIRST)
    ask(home, "check", "1")
    assert ask(home, "solution", "1") == (0, due)


def test_watch_checks_again_on_save_until_it_passes(home: Path) -> None:
    terminal = start(home, "watch", "1")
    terminal.expect("not written yet", timeout=60)
    terminal.expect("Waiting for you to save", timeout=60)
    mine = home / FIRST / "exercise.py"
    mine.write_text(mine.read_text().replace("raise NotImplementedError", "return 'hi', 0"))
    terminal.expect("greeting: expected rank 0 of 1, got hi", timeout=60)
    terminal.expect("Waiting for you to save", timeout=60)
    solve(home, FIRST)
    status, text = said(terminal)
    assert status == 0
    assert "Accepted" in text
    assert soon_empty(home)


LOOP = "raise NotImplementedError", "while True: pass"


@pytest.mark.parametrize("command", ["check", "watch"])
def test_ctrl_c_ends_at_once_and_leaves_nothing(command: str, home: Path) -> None:
    mine = home / FIRST / "exercise.py"
    if command == "check":
        mine.write_text(mine.read_text().replace(*LOOP))
    terminal = start(home, command, "1")
    if command == "check":
        while not any("forkserver" in line for line in left_in(home)):
            time.sleep(0.1)
        time.sleep(3)  # the ranks are busy by now
    else:
        terminal.expect("Waiting for you to save", timeout=60)
    terminal.sendintr()
    status, text = said(terminal)
    assert status == 130
    assert "Traceback" not in text
    assert soon_empty(home)


def test_reset_asks_first_and_keeps_a_copy(home: Path) -> None:
    mine = home / FIRST / "exercise.py"
    stub = mine.read_text()
    for kept, text in enumerate(("mine = 1\n", "mine = 2\n"), 1):
        mine.write_text(text)
        for answer, gone in (("n", False), ("", False), ("y", True)):
            terminal = start(home, "reset", "1")
            terminal.expect(r"start afresh\? \[y/N\] ", timeout=30)
            terminal.sendline(answer)
            status, _ = said(terminal)
            assert (status == 0, mine.read_text() == stub) == (gone, gone)
        assert (home / FIRST / f"exercise.kept-{kept}.py").read_text() == text
    mine.unlink()
    assert ask(home, "reset", "1")[0] == 0
    assert mine.read_text() == stub


def test_nothing_but_reset_touches_the_learners_file(home: Path) -> None:
    mine = home / LAST / "exercise.py"
    solve(home, LAST)
    was = mine.stat()
    for argv in ("list",), ("next",), ("check", "4"), ("watch", "4"), ("hint", "4"):
        ask(home, *argv)
    ask(home, "solution", "4")
    assert (mine.stat().st_mtime_ns, mine.stat().st_ino) == (was.st_mtime_ns, was.st_ino)
    made = {path.name for path in home.rglob("*") if path.is_file()} - {
        path.name for path in (ROOT / "exercises").rglob("*")
    }
    assert {name for name in made if not name.endswith(".pyc")} <= {".progress.json"}


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (("check", "99"), "There is no exercise 99; they go from 1 to 4."),
        (("chekc", "1"), "invalid choice: 'chekc'"),
        (("check", "one"), "invalid int value: 'one'"),
        (("reset",), "reset needs the number of an exercise"),
    ],
)
def test_wrong_usage_is_told_in_one_line(argv: tuple, word: str, home: Path) -> None:
    status, text = ask(home, *argv)
    assert status != 0
    assert word in text
    assert "Traceback" not in text


def test_pytest_grades_the_same(home: Path) -> None:
    for right in (False, True):
        if right:
            solve(home, FIRST)
        command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", FIRST]
        env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
        ran = pexpect.spawn(sys.executable, command, cwd=home, env=env, encoding="utf-8")
        status, text = said(ran)
        assert (status == 0) == right, text
        assert right or "not written yet" in text
