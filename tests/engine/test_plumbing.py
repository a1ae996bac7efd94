"""However a lesson ends: the right exit status, one message, a whole ledger, no process left."""

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from course.lessons import ROOT

LESSON = """
def main() -> None:
    ill = command_line({"--ill": {"default": "", "metavar": "HOW", "help": "how to fail"}}).ill
    launch()
    if WORLD_SIZE % 2 == 1 or ill == "refuses":
        refuse(f"needs an even number of ranks, got {WORLD_SIZE}; set --nproc-per-node")
    setup()
    claim("one that holds", 1, 1)
    last = RANK == WORLD_SIZE - 1
    if ill == "fails on the last rank":
        claim("wrong on the last rank", 10, 13 if last else 10)
    if ill == "judges one rank only":
        claim("wrong on the last rank, rank 0 asked", 10, 13 if last else 10, rank=0)
        claim("wrong on rank 0, the last rank asked", 10, 10 if last else 13, rank=WORLD_SIZE - 1)
    if ill == "is nan on the last rank":
        claim("not a number there", 0, float("nan") if last else 0, "<=", atol=1e9)
    if ill == "is infinite":
        claim("no end", 0, float("inf") * (1 if RANK else -1), ">=")
    if ill == "judges by its own prediction":
        claim("each rank its own", RANK, RANK)
        claim("each rank its own, and rank 0 wrong", RANK, max(RANK, 1))
    if ill == "says more":
        claim("a question's answer", 1, 2, "<=", atol=1, question=3, timed=True)
    if ill == "raises on the last rank" and last:
        raise RuntimeError("boom")
    if ill == "raises everywhere":
        raise RuntimeError("boom")
    if ill == "segfaults" and last:
        os.kill(os.getpid(), signal.SIGSEGV)
    if ill == "hangs" and last:
        print("HANGING", flush=True)
        time.sleep(1000)
    if ill == "claims nothing":
        ledger.clear()
    blocked("what this machine cannot answer", needs="2 GPUs")
    dist.barrier()
    finish()
"""


@pytest.fixture
def lesson(tmp_path: Path) -> Path:
    """A lesson of the plumbing and a `main` that can fail in every way, alone in its folder."""
    source = (ROOT / "course/plumbing.py").read_text()
    old = source[source.index("def main(") : source.index("\n# %% [markdown]")]
    source = source.replace(old, LESSON + "\n")
    assert "> 1 else 4" in source
    source = source.replace("> 1 else 4", "> 1 else 2")  # quicker
    path = tmp_path / "lesson.py"
    path.write_text(source)
    return path


def command(lesson: Path, *argv: str, ranks: int = 0) -> list:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [sys.executable, *(torchrun if ranks else []), lesson, *argv]


def environment(lesson: Path) -> dict:
    return os.environ | {"LESSON_JSON": str(lesson.parent / "ledger.json")}


def end(lesson: Path, *argv: str, ranks: int = 0) -> tuple[int, str, str, list[dict]]:
    """Run to the end; return exit status, stdout, stderr and ledger; no process may be left."""
    kept = lesson.parent / "ledger.json"
    kept.unlink(missing_ok=True)
    ran = subprocess.run(
        command(lesson, *argv, ranks=ranks),
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(lesson),
        cwd=lesson.parent,
    )
    assert left(lesson) == []
    ledger = json.loads(kept.read_text(), parse_constant=pytest.fail) if kept.exists() else {}
    return ran.returncode, ran.stdout, ran.stderr, ledger.get("ledger", [])


def left(lesson: Path, within: float = 10) -> list[psutil.Process]:
    """Processes that run this lesson and do not end within so many seconds."""
    stop = time.monotonic() + within
    while True:
        mine = []
        for process in psutil.process_iter(["cmdline", "status"]):
            zombie = process.info["status"] == psutil.STATUS_ZOMBIE
            if str(lesson) in " ".join(process.info["cmdline"] or []) and not zombie:
                mine.append(process)
        if not mine or time.monotonic() > stop:
            return mine
        time.sleep(0.1)


def test_a_lesson_that_holds(lesson: Path) -> None:
    code, out, err, ledger = end(lesson)
    assert (code, err) == (0, "")
    assert [row["verdict"] for row in ledger] == ["PASS", "BLOCKED"]
    assert "1 PASS, 0 FAIL, 1 BLOCKED" in out
    assert out.count("one that holds") == 1
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_claim_that_fails_on_one_rank_only(lesson: Path, ranks: int) -> None:
    code, out, err, ledger = end(lesson, "--ill", "fails on the last rank", ranks=ranks)
    assert code == 1
    assert err == "" or ranks
    assert "off by 3 on rank 1" in out
    assert ledger[1] | {"verdict": "FAIL", "rank": 1, "measured": 13.0} == ledger[1]


def test_one_rank_s_figures_may_count_alone(lesson: Path) -> None:
    code, _, _, ledger = end(lesson, "--ill", "judges one rank only")
    assert code == 0
    assert [row["rank"] for row in ledger[1:3]] == [0, 1]


def test_a_row_says_its_question_its_slack_and_whether_a_clock_decides(lesson: Path) -> None:
    _, out, _, ledger = end(lesson, "--ill", "says more")
    assert "PASS    3. a question's answer" in out
    assert "<= 1 ±1" in out
    said = {"question": 3, "timed": True, "slack": 1, "sign": "<="}
    assert ledger[1] | said == ledger[1]
    assert ledger[0] | {"question": None, "timed": False} == ledger[0]


def test_not_a_number_is_never_right(lesson: Path) -> None:
    code, _, _, ledger = end(lesson, "--ill", "is nan on the last rank")
    assert code == 1
    assert (ledger[1]["verdict"], ledger[1]["measured"], ledger[1]["rank"]) == ("FAIL", "nan", 1)
    code, _, _, ledger = end(lesson, "--ill", "is infinite")
    assert code == 1
    assert (ledger[1]["verdict"], ledger[1]["measured"], ledger[1]["rank"]) == ("FAIL", "-inf", 0)


def test_every_rank_is_judged_by_its_own_prediction(lesson: Path) -> None:
    code, _, _, ledger = end(lesson, "--ill", "judges by its own prediction", ranks=2)
    assert code == 1
    assert [row["verdict"] for row in ledger] == ["PASS", "PASS", "FAIL", "BLOCKED"]
    assert (ledger[2]["rank"], ledger[2]["predicted"], ledger[2]["measured"]) == (0, 0, 1)


def test_no_claim_is_no_success(lesson: Path) -> None:
    code, out, _, _ = end(lesson, "--ill", "claims nothing")
    assert code == 1
    assert "0 PASS" in out


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("ill", ["raises on the last rank", "raises everywhere"])
def test_an_exception_is_told_once_and_nobody_waits(lesson: Path, ill: str, ranks: int) -> None:
    code, _, err, ledger = end(lesson, "--ill", ill, ranks=ranks)
    assert code == 1
    assert err.count("RuntimeError: boom") == 1
    assert ledger == []
    if not ranks:
        assert err.count("Traceback") == 1
        assert err.rstrip().endswith("RuntimeError: boom")


def test_a_segfault_is_named(lesson: Path) -> None:
    code, _, err, _ = end(lesson, "--ill", "segfaults")
    assert (code, err) == (1, "rank 1 was ended by SIGSEGV\n")


@pytest.mark.parametrize("ranks", [0, 2])
def test_wrong_usage_is_one_message(lesson: Path, ranks: int) -> None:
    code, _, err, _ = end(lesson, "--wrong", ranks=ranks)
    assert code == 1
    assert err.count("unrecognized arguments: --wrong") == 1
    code, _, err, _ = end(lesson, "--ill", "refuses", ranks=ranks)
    assert code == 1
    assert err.count("needs an even number of ranks, got 2; set --nproc-per-node") == 1
    assert ranks or err.count("\n") == 1


def test_a_world_size_it_does_not_take(lesson: Path) -> None:
    code, _, err, ledger = end(lesson, ranks=3)
    rule = "lesson.py: needs an even number of ranks, got 3; set --nproc-per-node"
    assert code == 1
    assert err.count(rule) == 1
    assert ledger == []


@pytest.mark.parametrize("ranks", [0, 2])
def test_help_reads_well_and_starts_nothing(lesson: Path, ranks: int) -> None:
    code, out, err, ledger = end(lesson, "--help", ranks=ranks)
    assert (code, ledger) == (0, [])
    assert out.count("--ill HOW") == 2 * max(ranks, 1)  # in the usage line, and explained
    assert "2 ranks, gloo" not in out
    assert ranks or err == ""


def hanging(lesson: Path, ranks: int = 0) -> tuple[subprocess.Popen, list[psutil.Process]]:
    """Start a lesson whose last rank hangs; return its launcher and its ranks."""
    launcher = subprocess.Popen(
        command(lesson, "--ill", "hangs", ranks=ranks),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(lesson),
    )
    for line in launcher.stdout:
        if "HANGING" in line:
            break
    return launcher, psutil.Process(launcher.pid).children()


@pytest.mark.parametrize(("sent", "ranks"), [("SIGINT", 0), ("SIGTERM", 0), ("SIGTERM", 2)])
def test_ctrl_c_and_sigterm_of_the_launcher(lesson: Path, sent: str, ranks: int) -> None:
    launcher, _ = hanging(lesson, ranks)
    launcher.send_signal(signal.Signals[sent])
    _, err = launcher.communicate(timeout=15)
    assert left(lesson) == []
    if ranks:
        assert launcher.returncode != 0
    else:
        assert (launcher.returncode, err) == (128 + signal.Signals[sent], "")


@pytest.mark.parametrize("ranks", [0, 2])
def test_sigkill_of_the_launcher_takes_the_ranks_along(lesson: Path, ranks: int) -> None:
    launcher, children = hanging(lesson, ranks)
    assert len(children) == 2
    launcher.kill()
    launcher.wait()
    assert left(lesson) == []


def test_sigkill_of_the_launcher_before_its_ranks_can_ask_to_die_with_it(lesson: Path) -> None:
    launcher = subprocess.Popen(command(lesson, "--ill", "hangs"), stdout=subprocess.DEVNULL)
    while len(psutil.Process(launcher.pid).children()) < 2:
        time.sleep(0.02)  # the ranks now import torch, which takes a second
    launcher.kill()
    launcher.wait()
    assert left(lesson, within=30) == []


def test_sigkill_of_a_rank_ends_the_others(lesson: Path) -> None:
    launcher, children = hanging(lesson)
    victim = min(children, key=lambda p: p.pid)
    victim.kill()
    _, err = launcher.communicate(timeout=15)
    assert (launcher.returncode, err.count("\n")) == (1, 1)
    assert "was ended by SIGKILL" in err
    assert left(lesson) == []


SLURM = {"SLURM_STEP_NODELIST": "gpu[07-08,11]", "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}
SLURM |= {"SLURM_JOB_ID": "123456", "SLURM_NODEID": "1", "SLURM_LOCALID": "1"}


def test_srun_s_variables_become_torchrun_s(lesson: Path) -> None:
    told = "name_ranks_as_torchrun_does(); print({name: os.environ[name] for name in NAMES})"
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    source = lesson.read_text().replace("\n    main()\n", f"\n    NAMES = {names}\n    {told}\n")
    lesson.write_text(source)
    variables = os.environ | SLURM | {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "6"}
    ran = subprocess.run(command(lesson), env=variables, capture_output=True, text=True, timeout=60)
    values = ["3", "6", "1", "2", "gpu07", "23456"]
    assert ast.literal_eval(ran.stdout) == dict(zip(names, values, strict=True)), ran.stderr


def test_one_task_per_rank_is_one_world(lesson: Path) -> None:
    here = {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2"}
    here |= {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "0"}
    tasks = []
    for rank in "01":
        variables = environment(lesson) | here | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}
        pipe = subprocess.PIPE
        tasks.append(subprocess.Popen(command(lesson), env=variables, stdout=pipe, text=True))
    outputs = [task.communicate(timeout=60)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0]
    assert outputs[0].startswith("2 ranks, gloo (0 GPUs visible, 2 ranks here)")
    assert outputs[1] == ""
    assert json.loads((lesson.parent / "ledger.json").read_text())["ranks"] == 2
