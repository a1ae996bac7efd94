"""`course`, in a copy of the repository with two exercises and lessons that take no time.

Most answers here are not graded but obeyed: a judge stands in that runs the answer, so that a test
says in two lines what a grader prints, when, and how it ends. The real judge comes last.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pexpect
import pytest

from course import check, outline, overview, predict, terminal
from course.book import ROOT, Exercise
from tests.helpers.leftovers import left_in

FIRST, LAST = "01_hello_ranks", "04_ring_all_reduce"

OBEDIENT_JUDGE = """
import json, os, signal, sys, time
def check(title, verdict="passed", message=""):
    print(json.dumps({"check": title, "verdict": verdict, "message": message}), flush=True)
exec(open(sys.argv[2]).read())
"""
ACCEPTED = 'check("sums"); check("counts")'
FAILED = 'check("sums"); check("counts", "failed", "expected 8, got 16"); sys.exit(1)'

LESSON = '''"""{title}
====

**Question.** What is one and one?

**Predict**, and write it down before you run. Numbers are
whole here.

1. What is 1 + 1? And how often
   does it change?
2. What is 2 + 2?

**Run.** Alone.

**Next.** {next}
"""

import json, os, sys, time

if "--help" in sys.argv:
    sys.exit()
if "--break" in sys.argv:
    os._exit(3)
if "--hang" in sys.argv:
    print("a progress bar" if sys.stderr.isatty() else "no terminal", file=sys.stderr)
    print("HANGING")
    time.sleep(600)
row = {{"claim": "one and one", "verdict": "PASS", "question": 1, "sign": "=", "slack": 0.5}}
row |= {{"predicted": 2, "measured": 2.25, "rank": 0, "timed": False}}
blocked = {{"claim": "one and one, on a GPU", "verdict": "BLOCKED"}}
blocked["needs"] = os.environ.get("NEEDS", "99 GPUs")
with open(os.environ["LESSON_JSON"], "w") as file:
    json.dump({{"ledger": [row] if "A_GPU" in os.environ else [row, blocked]}}, file)
sys.exit("--fail" in sys.argv)

# ## What you should have seen
'''
LESSONS = {
    "fundamentals/02_launching.py": f"then exercises/{FIRST}",
    "fundamentals/03_measuring.py": "nothing",
    "parallelism/02_sharding.py": f"exercises/{LAST}; the end",
}

SHORT = """[[path]]
name = "short"
goal = "the short way"
page = "exercises/README.md"
steps = ["parallelism/02", "04", "fundamentals/03"]
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A clone with three lessons, of which the first is the spine, and two exercises."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "course", tmp_path / "course", ignore=ignore)
    for name in (FIRST, LAST):
        folder = Path("exercises", name)
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignore)
    rows = []
    for path, leads_to in LESSONS.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        title = f"{Path(path).stem[3:].title()}: all of it"
        (tmp_path / path).write_text(LESSON.format(title=title, next=leads_to))
        rows.append(f'[[lesson]]\npath = "{path}"\nminutes = 20\n')
    rows[0] += "spine = true\n"
    rows.append(SHORT)
    (tmp_path / "course/lessons.toml").write_text("\n".join(rows))
    (tmp_path / "course/judge.py").write_text(OBEDIENT_JUDGE)
    return tmp_path


def environment(home: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(home), "NO_COLOR": "1"}


def ask(
    home: Path, *argv: str, stdin: str = "", cwd: Path | None = None
) -> subprocess.CompletedProcess:
    """Run `course` without a terminal. No error is ever a traceback."""
    ran = subprocess.run(
        [sys.executable, "-m", "course", *argv],
        cwd=cwd or home,
        env=environment(home),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "Traceback" not in ran.stderr + ran.stdout, ran.stderr + ran.stdout
    return ran


def begin(home: Path, *argv: str) -> pexpect.spawn:
    """Start `course` in a terminal."""
    return pexpect.spawn(
        sys.executable,
        ["-m", "course", *argv],
        cwd=home,
        env=environment(home),
        dimensions=(60, 100),
        encoding="utf-8",
        timeout=120,
    )


def said(shell: pexpect.spawn) -> tuple[int, str]:
    """Exit status, and what the terminal showed since it was last looked at."""
    shell.expect(pexpect.EOF, timeout=150)
    shell.close()
    return shell.exitstatus, shell.before.replace("\r\n", "\n")


def answer(home: Path, exercise: str, source: str) -> Path:
    """Save an answer, which the obedient judge runs."""
    path = home / "answers" / f"{exercise}.py"
    path.parent.mkdir(exist_ok=True)
    saved = home / "saved"  # then there at once, and whole: somebody may be watching
    saved.write_text(source)
    return saved.replace(path)


def ticks(home: Path) -> dict:
    return json.loads((home / "answers/.progress.json").read_text())


def soon(true: Callable[[], bool]) -> bool:
    """Whether it comes true within two minutes: other jobs may be at work."""
    return any(true() or time.sleep(0.1) for _ in range(1200))


# The path


def follow(home: Path, text: str) -> subprocess.CompletedProcess:
    """Type the last command that stands by itself in what `course` printed."""
    typed = re.findall(r"^    (\S.*)$", text, re.M)[-1]
    return subprocess.run(
        typed, shell=True, cwd=home, env=environment(home), capture_output=True, text=True, input=""
    )


def test_who_types_what_is_printed_reaches_the_end(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_GPU", "here")
    text = ask(home).stdout
    assert "0 of 3 lessons, 0 of 2 exercises done" in text
    seen = []
    for _ in range(7):
        seen.append(re.search(r"^Next: (?:exercise )?(\S+)\.", text, re.M)[1])
        told = follow(home, text)
        if "Your file:" in told.stdout:
            answer(home, FIRST if seen[-1] == "01" else LAST, ACCEPTED)
            told = follow(home, ask(home).stdout)
        assert told.returncode == 0, told.stderr
        text = ask(home).stdout
        if "Next:" not in text:
            break
    assert seen == ["fundamentals/02", "01", "fundamentals/03", "parallelism/02", "04"]
    assert "3 of 3 lessons, 2 of 2 exercises done" in text
    assert "All done" in text
    assert "All done" in ask(home, "next").stdout
    assert "All exercises are done" in ask(home, "check").stderr
    assert "◐" not in text
    monkeypatch.delenv("A_GPU")
    ran = ask(home, "run", "sharding")
    how = "as far as this machine can: 1 claim is BLOCKED for want of 99 GPUs."
    assert f"✓ parallelism/02 is done {how}" in ran.stdout
    answer(home, FIRST, f'check("a kernel", "blocked", "needs FFCV"); {ACCEPTED}')
    ran = ask(home, "check", "1")
    assert re.search(r"Accepted: 2 checks passed in .* s; 1 BLOCKED\.", ran.stdout)
    for text in (ran.stdout, ask(home).stdout, ask(home, "next").stdout):
        assert "All done" not in text
        assert "Done, but for what was BLOCKED in 2 of 5 steps." in text
        assert "run these again: 01_hello_ranks, parallelism/02." in " ".join(text.split())
    text = ask(home).stdout
    assert re.search("  parallelism    ✓ 02  Sharding +here  ", text)
    assert "✓ here  done as far as this machine can: the rest needs GPUs" in text
    assert "◐ 01 hello ranks\n" in text
    assert "◐       done in part" in text
    assert "3 of 3 lessons, 2 of 2 exercises done" in text
    monkeypatch.setenv("NEEDS", "nsys")  # which could be installed here
    ran = ask(home, "run", "sharding")
    assert "◐ parallelism/02 is done in part: 1 claim is BLOCKED for want of nsys." in ran.stdout
    assert re.search("  parallelism    ◐ 02  Sharding +20  ", ask(home).stdout)
    monkeypatch.setenv("A_GPU", "here")
    assert "✓ parallelism/02 is done.\n" in ask(home, "run", "sharding").stdout
    assert "✓ here" not in ask(home).stdout
    ask(home, "tick", "sharding")
    assert "  parallelism    ✓ 02  Sharding" in ask(home).stdout


def test_what_a_machine_can_do_is_judged_by_the_gpus_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("course.overview.Path.glob", lambda folder, pattern: ["/dev/nvidia0"])
    for needs in ("2 GPUs", "2 GPUs with bfloat16", "2 nodes with GPUs"):
        assert overview.only_here([needs]), needs
    for needs in ("1 GPU", "nsys, and the nvtx package", "8 ranks, or --mesh with tp > 1"):
        assert not overview.only_here(["2 GPUs", needs]), needs


def test_the_path_shows_ticks_and_what_comes_next(home: Path) -> None:
    assert ask(home, "tick", "launching").returncode == 0
    answer(home, LAST, ACCEPTED)
    assert ask(home, "check", "4").returncode == 0
    rows = ask(home).stdout.splitlines()
    assert [row.split()[:4] for row in rows if "  20" in row] == [
        ["fundamentals", "✓", "02", "Launching"],
        ["fundamentals", "·", "03", "Measuring"],
        ["parallelism", "·", "02", "Sharding"],
    ]
    assert [row[-16:] for row in rows if " 01 hello" in row] == ["→ 01 hello ranks"]
    assert [row[-20:] for row in rows if " 04 ring" in row] == ["✓ 04 ring all reduce"]
    text = ask(home, "next").stdout
    assert text.startswith("# 01 Hello")
    assert not any(hint in text for hint in outline.find_exercise(FIRST).hints), "one by one"
    ask(home, "tick", "launching", "--off")
    text = ask(home, "next").stdout
    assert "2. What is 2 + 2?" in text
    assert "Run." not in text


def test_a_path_by_goal_has_its_own_order_and_next_step(home: Path) -> None:
    goals = ask(home, "path").stdout
    assert goals.splitlines()[1].split() == ["short", "the", "short", "way", "2", "0.7", "1"]
    assert ask(home, "tick", "sharding").returncode == 0
    rows = ask(home, "path", "short").stdout.splitlines()
    assert rows[0] == "The short way: 0.7 hours"
    shown = [row.split()[:3] for row in rows[2:5]]
    assert shown[0] == ["✓", "parallelism/02", "Sharding"]
    assert shown[1] == ["·", "exercise", "04"]
    assert shown[2] == ["·", "fundamentals/03", "Measuring"]
    assert rows[-1].endswith("start 4")
    assert ask(home, "next").stdout.startswith("Launching: all of it")  # that path is its own


@pytest.mark.parametrize("path", outline.paths(), ids=[path.name for path in outline.paths()])
def test_every_real_path_leads_over_steps_that_are_there(
    path: outline.GoalPath, capsys: pytest.CaptureFixture
) -> None:
    assert (ROOT / path.page.partition("#")[0]).exists()
    assert len({step.name for step in path.steps}) == len(path.steps)
    overview.show_path(argparse.Namespace(name=path.name))
    rows = capsys.readouterr().out.splitlines()
    assert max(map(len, rows)) <= 100
    for step in path.steps:
        assert any(step.name[:2] in row for row in rows)


def test_the_path_to_ddp_and_fsdp_is_the_spine() -> None:
    path = next(path for path in outline.paths() if path.name == "sharding")
    assert path.lessons == [lesson for lesson in outline.lessons() if lesson.spine]


def test_the_real_path_fits_a_terminal(capsys: pytest.CaptureFixture) -> None:
    overview.show(None)
    rows = capsys.readouterr().out.splitlines()
    assert max(map(len, rows)) <= 100
    assert len(rows) <= len(outline.lessons()) + 22  # a row per lesson, and little else
    for lesson in outline.lessons():
        assert any(lesson.number in row and lesson.subject[:30] in row for row in rows)
    for exercise in outline.book():
        words = f"{exercise.number:02d} {exercise.name[3:].replace('_', ' ')}"
        assert len([row for row in rows if row.endswith(words)]) == 1


def test_the_command_starts_without_torch_and_pytest(home: Path) -> None:
    script = "import sys; from course.command_line import run; run([]); "
    script += "sys.exit(str({'torch', 'numpy', 'pytest', 'psutil'} & {*sys.modules} or ''))"
    ran = subprocess.run(
        [sys.executable, "-c", script], env=environment(home), cwd=home, capture_output=True
    )
    assert (ran.returncode, ran.stderr) == (1, b"\n")


def test_it_works_from_any_folder(home: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    text = ask(home, "start", "1", cwd=elsewhere).stdout
    assert f"Your file:  {home}/answers/{FIRST}.py\n" in text
    assert f"Your file:  answers/{LAST}.py\n" in ask(home, "start", "4").stdout
    assert ask(home, "run", "02_launching.py", cwd=home / "fundamentals").returncode == 0
    answer(home, FIRST, f"import wave; {ACCEPTED}")
    (elsewhere / "wave.py").write_text("raise SystemExit('this is not the library')")
    assert ask(home, "check", "1", cwd=elsewhere).returncode == 0
    assert [path.name for path in elsewhere.iterdir()] == ["wave.py"]


def test_where_there_is_no_clone(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "course", tmp_path / "site-packages/course")
    ran = ask(tmp_path / "site-packages")
    assert ran.returncode == 1
    assert "works inside a clone" in ran.stderr


@pytest.mark.parametrize(
    ("script", "on_path", "cwd", "expected"),
    [
        ("bin/course", "bin", ".", "course"),
        ("bin/course", "nowhere", ".", "bin/course"),
        ("bin/course", "elsewhere", ".", "bin/course"),
        ("bin/course", "nowhere", "elsewhere", "{home}/bin/course"),
        ("course/__main__.py", "nowhere", ".", "bin/python -m course"),
    ],
)
def test_commands_are_printed_as_they_can_be_typed(
    script: str,
    on_path: str,
    cwd: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for file in (script, "bin/python", "elsewhere/course"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch(0o755)
    monkeypatch.setattr("sys.argv", [str(tmp_path / script)])
    monkeypatch.setattr("sys.executable", str(tmp_path / "bin/python"))
    monkeypatch.setenv("PATH", str(tmp_path / on_path))
    monkeypatch.chdir(tmp_path / cwd)
    assert terminal.program.__wrapped__() == expected.format(home=tmp_path)


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (("check", "99"), "There is no exercise '99'; they are 1 to 4"),
        (("check", "0"), "There is no exercise '0'"),
        (("hint", "r"), f"'r' may be any of: {FIRST}, {LAST}."),
        (("run", "02"), "'02' may be any of: fundamentals/02_launching, parallelism/02_sharding."),
        (("predict", "nothing"), "There is no lesson 'nothing'; "),
        (("chekc", "1"), "invalid choice: 'chekc'"),
        (("path", "rent"), "There is no path 'rent'; they are short."),
        (("reset",), "Name one, or all: "),
        (("reset", "1", "--all"), "Name one, or all: "),
        (("reset", "--all"), "No answer has more than its stub, so nothing to reset."),
        (("check", "1", "--all"), "not both"),
        (("check", "--all", "--answers", "nowhere"), "There is no folder nowhere."),
        (("check", "4", "--answers", "course"), f"There is no course/{LAST}.py."),
        (("check", "4"), f"There is no answers/{LAST}.py yet. To begin it: "),
        (("watch", "4"), f"There is no answers/{LAST}.py yet. To begin it: "),
    ],
)
def test_a_mistake_is_told_in_one_line(argv: tuple, word: str, home: Path) -> None:
    ran = ask(home, *argv)
    assert ran.returncode != 0
    assert word in ran.stderr
    assert len(ran.stderr.removeprefix("usage").splitlines()) <= 2


@pytest.mark.parametrize("name", ["1", "01", FIRST, "ranks", f"exercises/{FIRST}/", f"{FIRST}.py"])
def test_an_exercise_is_found_by_any_name(
    name: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert outline.find_exercise(name).name == FIRST


@pytest.mark.parametrize(
    "name", ["parallelism/01", "parallelism/1", "01_data_parallelism_ddp", "ism_ddp"]
)
def test_a_lesson_is_found_by_any_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outline.find_lesson(name).path == "parallelism/01_data_parallelism_ddp.py"
    monkeypatch.chdir(ROOT / "fsdp")
    assert outline.find_lesson("01_fsdp_basics.py").path == "fsdp/01_fsdp_basics.py"


# Lessons


def test_run_ticks_a_lesson_whose_claims_hold(home: Path) -> None:
    assert ask(home, "run", "launching", "--help").returncode == 0
    assert ask(home, "run", "launching", "--fail").returncode == 1
    assert ask(home, "run", "launching", "--break").returncode == 3
    assert "0 of 3 lessons" in ask(home).stdout
    ran = ask(home, "run", "launching")
    assert ran.returncode == 0
    assert "✓ fundamentals/02 is done as far as this machine can: " in ran.stdout
    assert "\nNext: exercise 01." in ran.stdout
    assert "1 of 3 lessons" in ask(home).stdout


def test_ctrl_c_ends_a_lesson_with_one_line_wherever_it_is(home: Path) -> None:
    shell = begin(home, "run", "launching", "--hang")
    for _ in range(2):  # whichever comes first
        shell.expect_exact(["a progress bar", "HANGING"], timeout=120)
    shell.sendintr()  # the lesson's Python says KeyboardInterrupt, as ranks that load torch do
    status, text = said(shell)
    assert status == 130
    assert text.replace("^C", "").strip() == "Ended by Ctrl-C: fundamentals/02 gets no tick."
    assert soon(lambda: not left_in(home))


def test_predict_shows_yours_beside_predicted_and_measured(home: Path) -> None:
    shell = begin(home, "predict", "launching")
    shell.expect_exact("Numbers are whole here.")
    for reply in ("two, never", ""):
        shell.expect_exact(" > ")
        shell.sendline(reply)
    shell.expect_exact("Were you right: y, n or p (partly)? > ")
    shown = shell.before.replace("\r", "").partition("Yours next to")[2]
    shell.sendline("y")
    status, text = said(shell)
    assert status == 0
    shown += text
    assert "By your own judgment you were right in 1 of 1." in shown
    assert shown.index("how often\n   does it change?") < shown.index("you      two, never\n")
    assert re.search(r" predicted +measured\n {12}one and one +  = 2 ±0.5 +2.25\n", shown)
    assert "you      no answer\n   No claim of this run answers it." in shown
    assert "BLOCKED  one and one, on a GPU (needs 99 GPUs)" in shown
    assert "Now read fundamentals/02_launching.py, then break what its **Try** names." in shown
    assert max(map(len, shown.splitlines())) <= 100
    again = ask(home, "predict", "launching", "--fail", stdin="\nfour\n")
    assert "[two, never] > " in again.stdout
    assert "you      two, never" in again.stdout, "Enter keeps it"
    assert "you      four" in again.stdout
    assert again.returncode == 1
    assert ticks(home)["predictions"] == {
        "fundamentals/02_launching.py": {"1": "two, never", "2": "four"}
    }


def test_predict_at_the_end_of_input(home: Path) -> None:
    ran = ask(home, "predict", "launching", stdin="two\n")
    assert ran.returncode == 0
    assert "The input has ended: the other questions are skipped." in ran.stdout
    assert "you      two\n" in ran.stdout
    ran = ask(home, "predict", "launching", "--break")
    assert ran.returncode == 3
    assert "ended with status 3 and no ledger: nothing to compare" in ran.stdout


def test_predict_goes_back_to_the_question_before(home: Path) -> None:
    replies = ["b", "two", "b", "three", "four"]  # the first question has none before it
    ran = ask(home, "predict", "launching", stdin="\n".join(replies) + "\n")
    assert ran.returncode == 0
    asked = re.findall(r"^([12])\. What is", ran.stdout.partition("Yours next to")[0], re.M)
    assert asked == ["1", "1", "2", "1", "2"]
    assert "   [two] > " in ran.stdout
    assert ticks(home)["predictions"] == {
        "fundamentals/02_launching.py": {"1": "three", "2": "four"}
    }


@pytest.mark.parametrize("lesson", outline.lessons(), ids=lambda lesson: lesson.name)
def test_the_questions_of_every_lesson_can_be_asked(lesson: outline.Lesson) -> None:
    _, questions = lesson.predict
    assert list(questions) == list(range(1, len(questions) + 1))
    assert all(question.count("\n\n") == 0 for question in questions.values())
    kept = ROOT / "results/lessons" / f"{lesson.path[:-3].replace('/', '_')}.json"
    rows = json.loads(kept.read_text())["ledger"]
    assert {row["question"] for row in rows if row.get("question")} <= set(questions)
    assert lesson.seen.keys() == questions.keys(), "each question has its answer"


def test_figures_are_written_as_in_a_ledger() -> None:
    assert [predict.readable(x) for x in (1440, 2.25, 1e-9 / 3, "nan")] == [
        "1,440",
        "2.25",
        "3.33333e-10",
        "nan",
    ]


# The learner's file


def test_start_never_writes_over_a_file(home: Path) -> None:
    assert ask(home, "start", "1").returncode == 0
    mine = home / f"answers/{FIRST}.py"
    assert re.search(r"raise NotImplementedError  # \d+ lines in the solution", mine.read_text())
    mine.write_text("mine")
    ran = ask(home, "start", "1")
    assert ran.returncode == 1
    assert "is there already, and stays as it is" in ran.stderr
    assert mine.read_text() == "mine"


def test_start_says_which_lesson_comes_first_unless_it_is_named(home: Path) -> None:
    ran = ask(home, "start")
    assert ran.returncode == 0
    said = "On the path the lesson fundamentals/02 comes first; you may begin all the same.\n"
    assert said in ran.stdout
    assert (home / f"answers/{FIRST}.py").exists()
    (home / f"answers/{FIRST}.py").unlink()
    assert "On the path" not in ask(home, "start", "1").stdout
    (home / f"answers/{FIRST}.py").unlink()
    ask(home, "tick", "launching")
    assert "On the path" not in ask(home, "start").stdout


def test_hints_come_one_by_one(home: Path) -> None:
    answer(home, FIRST, FAILED)
    assert re.search(r"A hint: \S+ hint 1", ask(home, "check", "1").stdout)
    there_are = len(outline.find_exercise(FIRST).hints)
    for shown in (*range(1, there_are + 1), there_are):
        text = ask(home, "hint").stdout
        numbers = [int(number) for number in re.findall(rf"Hint (\d) of {there_are}\n", text)]
        assert numbers == list(range(1, shown + 1))
    assert "No more hints." in text
    assert "A hint:" not in ask(home, "check", "1").stdout, "none is left to offer"


def test_a_hint_by_its_number_is_shown_alone_and_not_counted(home: Path) -> None:
    there_are = len(outline.find_exercise(FIRST).hints)
    text = ask(home, "hint", "1", str(there_are)).stdout
    assert re.findall(r"Hint (\d) of", text) == [str(there_are)]
    assert re.findall(r"Hint (\d) of", ask(home, "hint", "1").stdout) == ["1"]
    wrong = ask(home, "hint", "1", str(there_are + 1))
    assert wrong.returncode == 1
    assert f"has hints 1 to {there_are}, no {there_are + 1}." in wrong.stderr


def test_the_solution_is_shown_once_accepted_or_anyway(home: Path) -> None:
    ran = ask(home, "solution", "1")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "--anyway" in ran.stderr
    expected = (home / "exercises" / FIRST / "solution.py").read_text()
    assert ask(home, "solution", "1", "--anyway").stdout == expected
    answer(home, FIRST, ACCEPTED)
    ask(home, "check", "1")
    assert ask(home, "solution", "1").stdout == expected


def test_reset_asks_first_and_keeps_a_copy(home: Path) -> None:
    ask(home, "start", "1")
    mine = home / f"answers/{FIRST}.py"
    stub = mine.read_text()
    for kept in (1, 2):
        mine.write_text(f"mine = {kept}\n")
        for reply in ("n\n", "\n", ""):
            ran = ask(home, "reset", "1", stdin=reply)
            assert (ran.returncode, ran.stderr) == (1, "Nothing was changed.\n")
            assert mine.read_text() == f"mine = {kept}\n"
        assert ask(home, "reset", "1", stdin="y\n").returncode == 0
        assert mine.read_text() == stub
        copy = mine.with_name(f"{FIRST}.kept-{kept}.py")
        assert copy.read_text() == f"mine = {kept}\n"
    mine.unlink()
    ran = ask(home, "reset", "1", stdin="y\n")
    assert ran.returncode == 1
    assert re.match(rf"There is no answers/{FIRST}.py, so nothing to reset. To ", ran.stderr)
    assert not mine.exists()


def test_reset_of_all_asks_once_and_keeps_every_copy(home: Path) -> None:
    ask(home, "start", "4")
    answer(home, FIRST, "mine = 1\n")
    first, last = (home / f"answers/{name}.py" for name in (FIRST, LAST))
    ran = ask(home, "reset", "--all", stdin="n\n")
    assert (ran.returncode, ran.stderr) == (1, "Nothing was changed.\n")
    assert first.read_text() == "mine = 1\n"
    last.write_text("mine = 4\n")
    first.with_name(f"{FIRST}.kept-1.py").write_text("earlier")
    ran = ask(home, "reset", "--all", stdin="y\n")
    assert (ran.returncode, ran.stdout.count("[y/N]")) == (0, 1), ran.stderr
    kept = {path.name: path.read_text() for path in (home / "answers").glob("*.kept-*")}
    assert kept == {
        f"{FIRST}.kept-1.py": "earlier",
        f"{FIRST}.kept-2.py": "mine = 1\n",
        f"{LAST}.kept-1.py": "mine = 4\n",
    }
    assert "raise NotImplementedError" in first.read_text()
    assert "raise NotImplementedError" in last.read_text()


def test_nothing_but_answers_is_ever_written(home: Path) -> None:
    answer(home, FIRST, FAILED)

    def files() -> dict[Path, int]:
        found = [path for path in home.rglob("*") if path.is_file() and path.suffix != ".pyc"]
        return {path: path.stat().st_mtime_ns for path in found}

    before = files()
    for argv in (["next"], ["check", "1"], ["hint", "1"], ["solution", "1"], ["run", "launching"]):
        ask(home, *argv)
    after = files()
    assert {path.name for path in after.keys() - before.keys()} == {".progress.json"}
    assert all(after[path] == when for path, when in before.items())


# Checks


def test_a_check_says_what_failed_and_what_to_type(home: Path) -> None:
    message = "expected 8, got 16\n(inputs drawn from seed 77)"
    answer(home, FIRST, FAILED.replace('"expected 8, got 16"', repr(message)))
    ran = ask(home, "check")
    assert ran.returncode == 1
    expected = "  ✓ sums\n  ✗ counts\n    expected 8, got 16\n    (inputs drawn from seed 77)\n"
    assert expected in ran.stdout
    assert re.search(r"With the same inputs again: \S+ check 1 --seed 77\n", ran.stdout)
    answer(home, FIRST, 'check("seed", "failed", sys.argv[3]); sys.exit(1)')
    assert "    --seed=77\n" in ask(home, "check", "1", "--seed", "77").stdout
    answer(home, FIRST, 'check("all", "blocked", "needs FFCV"); sys.exit(1)')
    ran = ask(home, "check", "1")
    assert ran.returncode == 1
    assert "  BLOCKED all: needs FFCV\n\nNothing could be checked on this machine." in ran.stdout
    assert not (home / "answers/.progress.json").exists()


def test_an_accepted_answer_is_told_what_it_has_shown(home: Path) -> None:
    answer(home, FIRST, ACCEPTED)
    said = ask(home, "check", "1").stdout
    lines = (home / "fundamentals/02_launching.py").read_text().splitlines()
    place = f"fundamentals/02_launching.py:{lines.index('# ## What you should have seen') + 1}"
    assert (
        "\nSolved: Hello, ranks: who is there, and what do they hold together?\n"
        "At this cost: One collective, 8 bytes: a sum travels, not the shards.\n"
        "Lesson: fundamentals/02_launching_processes.py, section 1.\n"
        f"Read on: {place}, What you should have seen\n"
    ) in said


@pytest.mark.parametrize("exercise", outline.book(), ids=lambda exercise: exercise.name)
def test_every_exercise_says_what_it_shows_and_its_lesson(exercise: Exercise) -> None:
    assert check.sentence_after("**Cost target.**", exercise)
    lesson = re.match(r"([\w/-]+\.py)\b", check.sentence_after("Lesson", exercise))
    assert (ROOT / lesson[1]).is_file()
    assert any(exercise.name in lesson.exercises for lesson in outline.lessons())


def test_the_running_check_shows_its_name_and_seconds_on_a_terminal_alone(home: Path) -> None:
    started = 'check("counts", "running"); time.sleep(3)'
    answer(home, FIRST, f'check("sums"); {started}; check("counts")')
    shell = begin(home, "check", "1")
    shell.expect_exact("   1 s  counts ...")
    shell.expect_exact("✓ counts")
    shown = shell.before
    status, rest = said(shell)
    assert status == 0
    assert "\x1b" not in shown + rest, "NO_COLOR is set"
    assert "\n" not in shown, "it is one line, written over"
    piped = ask(home, "check", "1").stdout
    assert "\r" not in piped
    assert "..." not in piped.partition("Accepted")[0]


def test_an_accepted_answer_that_cannot_be_noted_is_accepted(home: Path) -> None:
    answer(home, FIRST, ACCEPTED)
    (home / "answers/.progress.json.part").mkdir()  # a folder that cannot be written, to root too
    ran = ask(home, "check", "1")
    assert ran.returncode == 0
    assert "Accepted: 2 checks passed" in ran.stdout
    why = "answers/.progress.json cannot be written: Is a directory"
    assert ran.stderr == f"Not noted: {why}.\n"


def test_texts_are_utf_8_whatever_the_locale(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (*home.glob("exercises/*/*"), *(home / path for path in LESSONS)):
        path.write_text(path.read_text(encoding="utf-8") + "\n# é\n", encoding="utf-8")
    for name, value in {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}.items():
        monkeypatch.setenv(name, value)
    answer(home, LAST, ACCEPTED)
    for argv in ("", "next", "start 1", "hint 1", "solution 1 --anyway", "check 4", "predict laun"):
        ran = ask(home, *argv.split())
        assert ran.returncode == 0, ran.stderr
    assert ask(home, "reset", "1", stdin="y").returncode == 0
    assert "é" in (home / f"answers/{FIRST}.py").read_text(encoding="utf-8")


def test_marks_can_be_told_apart_in_ascii(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    answer(home, LAST, FAILED)
    assert "  + sums\n  x counts\n" in ask(home, "check", "4").stdout
    ask(home, "tick", "launching")
    text = ask(home).stdout
    for row in ("+ 02  Launching", ". 03  Measuring", "> 01 hello ranks", ". 04 ring all reduce"):
        assert row in text


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("sys.exit(3)", "exit status 3"),
        ("pass", "exit status 0"),
        ("sys.exit(1)", "exit status 1"),
        (f"{ACCEPTED}; sys.exit(1)", "exit status 1"),
        (f"{FAILED.removesuffix('sys.exit(1)')}", "exit status 0"),
        (f"{ACCEPTED}; print('noise')", "noise"),
        (f"{ACCEPTED}; print([1, 2])", "[1, 2]"),
        (f"{ACCEPTED}; open('/nowhere')", "No such file or directory: '/nowhere'"),
        (f"{ACCEPTED}; os.kill(os.getpid(), signal.SIGSEGV)", "exit status -11"),
    ],
)
def test_a_grader_that_breaks_is_not_believed(source: str, word: str, home: Path) -> None:
    answer(home, FIRST, source)
    ran = subprocess.run(
        [sys.executable, "-m", "course", "check", "1"],
        cwd=home,
        env=environment(home),
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1
    assert "The grader itself failed: " in ran.stdout
    assert word in ran.stdout
    assert "Accepted" not in ran.stdout
    assert ran.stderr == ""


def test_checks_are_printed_as_they_end_and_nothing_is_left_behind(home: Path) -> None:
    answer(home, FIRST, 'check("sums"); time.sleep(600)')
    shell = begin(home, "check")
    shell.expect_exact("✓ sums", timeout=120)
    shell.sendintr()
    status, text = said(shell)
    assert status == 130
    assert "Traceback" not in text
    assert soon(lambda: not left_in(home))
    for stop in (signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen(
            [sys.executable, "-m", "course", "check"],
            cwd=home,
            env=environment(home),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        while "sums" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(stop)  # to `course` alone
        assert "Traceback" not in process.communicate(timeout=120)[1]
        assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[stop]
        assert soon(lambda: not left_in(home))


@pytest.mark.parametrize("argv", [[], ["check"], ["next"]])
def test_a_reader_that_leaves_is_no_error(argv: list[str], home: Path) -> None:
    answer(home, FIRST, 'check("sums"); time.sleep(0.5); check("counts"); time.sleep(600)')
    process = subprocess.Popen(
        [sys.executable, "-m", "course", *argv],
        cwd=home,
        env=environment(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()  # as `| head -1` does, only sooner
    assert process.stderr.read() == b""
    assert process.wait(100) == 141
    assert soon(lambda: not left_in(home))


def test_watch_shows_nothing_stale(home: Path) -> None:
    answer(home, FIRST, 'check("first"); time.sleep(600); check("stale")')
    shell = begin(home, "watch")
    shell.expect_exact("✓ first", timeout=120)
    answer(home, FIRST, 'check("second"); time.sleep(600); check("stale")')  # in the middle
    shell.expect_exact("Saved meanwhile: from the start.", timeout=120)
    shell.expect_exact("✓ second", timeout=120)
    assert "first" not in shell.before
    answer(home, FIRST, FAILED).unlink()  # as some editors save: away, then there again
    time.sleep(0.5)
    answer(home, FIRST, FAILED)
    shell.expect_exact("expected 8, got 16", timeout=120)
    shell.expect_exact("Waiting for you to save", timeout=120)
    answer(home, FIRST, ACCEPTED)
    status, text = said(shell)
    assert status == 0
    assert "Accepted: 2 checks passed" in text
    assert "stale" not in text
    assert soon(lambda: not left_in(home))


def test_a_teacher_gets_one_document(home: Path) -> None:
    answer(home, FIRST, ACCEPTED)
    ran = ask(home, "check", "--all", "--json")
    assert (ran.returncode, ran.stderr) == (1, "")
    told = json.loads(ran.stdout)
    assert (told["accepted"], told["of"]) == (1, 2)
    first, last = told["exercises"]
    assert 0 <= first.pop("seconds") < 60
    nothing = {"blocked": [], "failed": "", "message": ""}
    assert (
        first == {"exercise": FIRST, "status": "accepted", "passed": ["sums", "counts"]} | nothing
    )
    absent = {"exercise": LAST, "status": "absent", "passed": [], "seconds": 0}
    assert last == absent | nothing
    for source, status, message in (
        (FAILED, "failed", "expected 8, got 16"),
        ('check("all", "blocked", "needs FFCV"); sys.exit(1)', "blocked", ""),
        ("sys.exit(7)", "error", "exit status 7"),
    ):
        answer(home, LAST, source)
        ran = ask(home, "check", "--all", "--json")
        told = json.loads(ran.stdout)["exercises"][1]
        assert (ran.returncode, told["status"], told["message"].strip()) == (1, status, message)
    told = json.loads(ask(home, "check", "4", "--json").stdout)
    assert [one["exercise"] for one in told["exercises"]] == [LAST]
    text = ask(home, "check", "--all").stdout
    assert re.search(rf"✓ {FIRST} +accepted +\d+\.\d s\n", text)
    assert re.search(rf"· {LAST} +error .*\n    the grader itself failed: exit status 7\n", text)
    assert text.endswith("\n1 of 2 accepted\n")


def test_a_teacher_checks_a_folder_of_answers(home: Path) -> None:
    for name in (FIRST, LAST):
        answer(home, name, ACCEPTED)
    (home / "answers").rename(home / "ada")
    ran = ask(home, "check", "--all", "--json", "--answers", "ada")
    assert ran.returncode == 0
    assert json.loads(ran.stdout)["accepted"] == 2
    assert ask(home, "check", "1", "--answers", "ada").returncode == 0
    assert not (home / "answers").exists(), "her progress is not yours"


# The progress file


@pytest.mark.parametrize("broken", ["", '{"lessons": {', "[]", '{"exercises": 3}', "null", "\0"])
def test_a_broken_progress_file_is_moved_aside(broken: str, home: Path) -> None:
    kept = home / "answers/.progress.json"
    answer(home, FIRST, ACCEPTED)
    kept.write_text(broken)
    ran = ask(home, "check", "1")
    assert ran.returncode == 0
    assert re.fullmatch(
        r"answers/\.progress\.json was broken; it is (\S+) now, and ticks begin anew\.\n",
        ran.stderr,
    )
    aside = kept.with_name(ran.stderr.split()[5])
    assert aside.read_text() == broken
    assert list(ticks(home)["exercises"]) == [FIRST]
    assert ask(home).stderr == ""


def remember(home: Path, *names: str, before: str = "") -> subprocess.Popen:
    """A process that remembers these lessons, one by one."""
    script = "import os, signal\nfrom pathlib import Path\nfrom course import progress\n"
    script += f"{before}\nfor name in {names}:\n    progress.remember('lessons', name, 'today')\n"
    return subprocess.Popen([sys.executable, "-c", script], env=environment(home), cwd=home)


KILLED = """
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
def write_half(path, text, encoding):
    with path.open("w") as file:
        file.write(text[: len(text) // 2])
    die()
"""


@pytest.mark.parametrize("where", ["os.replace = die", "Path.write_text = write_half"])
def test_a_command_that_is_killed_while_it_writes_loses_nothing(where: str, home: Path) -> None:
    assert remember(home, "one").wait() == 0
    assert remember(home, "two", before=KILLED + where).wait() == -signal.SIGKILL
    assert list(ticks(home)["lessons"]) == ["one"]
    assert remember(home, "two").wait() == 0
    assert list(ticks(home)["lessons"]) == ["one", "two"]
    assert {path.name for path in (home / "answers").iterdir()} == {".progress.json"}


def test_commands_at_the_same_time_lose_nothing(home: Path) -> None:
    running = []
    for number in range(4):
        names = [f"{number}.{k}" for k in range(25)]
        running.append(remember(home, *names))
    assert [process.wait() for process in running] == [0] * 4
    assert len(ticks(home)["lessons"]) == 100


# With the real judge


def test_the_real_judge_accepts_the_solution(home: Path) -> None:
    shutil.copy(ROOT / "course/judge.py", home / "course/judge.py")
    solution = home / "exercises" / FIRST / "solution.py"
    answer(home, FIRST, solution.read_text())
    status, text = said(begin(home, "check", "1"))
    assert status == 0, text
    passed = re.findall("✓ (.*)\n", text)
    assert f"Accepted: {len(passed)} checks passed" in text
    for title in passed:
        assert f" s  {title} ..." in text
    assert soon(lambda: not left_in(home))


def test_a_file_that_python_cannot_read_is_told_before_any_check(home: Path) -> None:
    shutil.copy(ROOT / "course/judge.py", home / "course/judge.py")
    answer(home, FIRST, "import torch\ndef hello(shard) return 1\n")
    ran = ask(home, "check", "1")
    assert ran.returncode == 1
    said = ran.stdout.partition("\n")[2]
    where = f"{FIRST}.py, line 2: def hello\\(shard\\) return 1"
    told = rf"  ✗ Python can read the file\n    SyntaxError: expected ':'\n +{where}\n"
    assert re.match(told, said), said
    assert "A hint:" not in said, "it would be about the task"


@pytest.mark.deep
def test_ctrl_c_ends_the_ranks_of_an_endless_answer(home: Path) -> None:
    shutil.copy(ROOT / "course/judge.py", home / "course/judge.py")
    stub = outline.find_exercise("1").stub()
    endless = stub.replace("raise NotImplementedError", "open('busy', 'w'); exec('while True: 0')")
    answer(home, FIRST, endless)
    shell = begin(home, "check")
    assert soon((home / "busy").exists)
    shell.sendintr()
    status, text = said(shell)
    assert status == 130
    assert "Traceback" not in text
    assert soon(lambda: not left_in(home))
