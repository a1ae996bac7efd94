"""Every lesson as a learner runs it: alone in an empty folder, at every world size it states."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import psutil
import pytest

from exercises.ranks import attempt
from tests.lessons import LESSONS, ROOT, load, world_sizes_of

SIZES = (1, 2, 4)
LACKING = r"(\d+\+? )?(GPUs?|nsys|(more )?ranks)\b"  # all that a root user's CPU machine may lack
if os.system("unshare --net true 2>&- || unshare --user --net true 2>&-"):
    LACKING += "|root or user namespaces"  # a container that forbids them, or not Linux


def run(lesson: str, folder: Path, ranks: int) -> tuple[subprocess.CompletedProcess, dict, float]:
    """Run a copy of the lesson under torchrun, or with plain python if `ranks` is 0."""
    shutil.copy(ROOT / lesson, folder)
    (ledger := folder / "ledger.json").unlink(missing_ok=True)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    started = time.monotonic()
    ran = subprocess.run(
        [sys.executable, *(torchrun if ranks else []), Path(lesson).name],
        cwd=folder,
        env=os.environ | {"LESSON_JSON": str(ledger), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=180,
    )
    seconds = time.monotonic() - started
    return ran, json.loads(ledger.read_text()) if ledger.exists() else {}, seconds


def left_in(folder: Path) -> list[str]:
    """Command lines of the processes that still work in this folder."""
    found = []
    for process in psutil.process_iter(["cwd", "cmdline"]):
        if process.info["cwd"] == str(folder) and process.pid != os.getpid():
            found.append(" ".join(process.info["cmdline"]))
    return found


def cases(taken: bool) -> list:
    """Every lesson with each world size that it takes, or does not; 0 stands for plain python."""
    return [
        pytest.param(lesson, n, id=f"{lesson}-{n or 'python'}")
        for lesson in LESSONS
        for n in ((*SIZES, 0) if taken else SIZES)
        if taken == (n in world_sizes_of(lesson) or n == 0)
    ]


def verdicts(told: dict) -> list[str]:
    return [row["verdict"] for row in told.get("ledger", [])]


@pytest.mark.parametrize(("lesson", "ranks"), cases(taken=True))
def test_lesson_passes_alone_in_an_empty_folder(lesson: str, ranks: int, tmp_path: Path) -> None:
    ran, told, _ = run(lesson, tmp_path, ranks)
    if "FAIL" in verdicts(told):  # another job may have disturbed a clock; hardly twice
        warnings.warn(f"{lesson}, run once more after:\n{ran.stdout[-3000:]}", stacklevel=1)
        ran, told, _ = run(lesson, tmp_path, ranks)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "PASS" in verdicts(told)
    assert "FAIL" not in verdicts(told)
    for row in told["ledger"]:
        if row["verdict"] == "BLOCKED":
            assert re.match(LACKING, row["needs"]), row
    if ranks:
        assert told["ranks"] == ranks
    wide = [line for line in ran.stdout.splitlines() if len(line) > 100]
    assert not wide, "the table stays within 100 columns"
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(("lesson", "ranks"), cases(taken=False))
def test_lesson_refuses_other_world_sizes(lesson: str, ranks: int, tmp_path: Path) -> None:
    ran, told, seconds = run(lesson, tmp_path, ranks)
    assert ran.returncode != 0
    assert ran.stderr.count(f"needs a number of ranks in {world_sizes_of(lesson)}, got") == 1
    assert told == {}
    assert seconds < 30
    assert left_in(tmp_path) == []


def asked(lesson: str, flag: str) -> object:
    """Give the lesson this flag, as plain python would; return its exit status or message."""
    os.environ.pop("RANK")
    sys.argv = [lesson, flag]
    try:
        return load(lesson).command_line()
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize("lesson", LESSONS)
def test_help_answers_before_any_rank_starts(lesson: str) -> None:
    (helped,) = attempt(asked, 1, lesson, "--help", group=False)
    assert helped.value == 0, helped
    assert "**Question.**" in helped.output
    assert max(map(len, helped.output.splitlines())) <= 100
    (refused,) = attempt(asked, 1, lesson, "--wrong", group=False)
    assert "unrecognized arguments: --wrong" in refused.value
    assert refused.output == ""
