"""Every lesson as a learner runs it: alone in an empty folder, at every world size it takes."""

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from course.lessons import LESSONS, ROOT, load, play, world_sizes_of
from course.ranks import attempt
from course.tables import ledger_of
from tests.helpers.leftovers import left_in

# All that a root user's CPU machine may lack:
LACKING = r"(\d+\+? )?(nodes with )?(GPUs?|nsys|(more )?ranks)\b"
if os.system("unshare --net true 2>&- || unshare --user --net true 2>&-"):
    LACKING += "|root or user namespaces"  # a container that forbids them, or not Linux

Ledger = list[dict]


def run(lesson: str, folder: Path, *launcher: str) -> tuple[subprocess.CompletedProcess, Ledger]:
    """Run a copy of the lesson, with plain python or the launcher; return its ledger too."""
    shutil.copy(ROOT / lesson, folder)
    path = folder / "ledger.json"
    path.unlink(missing_ok=True)
    ran = subprocess.run(
        [sys.executable, *launcher, Path(lesson).name],
        cwd=folder,
        env=os.environ | {"LESSON_JSON": str(path), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=180,
    )
    return ran, json.loads(path.read_text())["ledger"] if path.exists() else []


def disturbed(ledger: Ledger) -> bool:
    """Whether claims FAILED, all of them by the clock: another job may have disturbed it."""
    failed = [row for row in ledger if row["verdict"] == "FAIL"]
    return bool(failed) and all(row["timed"] for row in failed)


def check(ledger: Ledger) -> None:
    assert "PASS" in [row["verdict"] for row in ledger]
    assert [row for row in ledger if row["verdict"] == "FAIL"] == []
    for row in ledger:
        if row["verdict"] == "BLOCKED":
            assert re.match(LACKING, row["needs"]), row


@pytest.mark.parametrize("lesson", LESSONS)
def test_lesson_passes_alone_in_an_empty_folder(lesson: str, tmp_path: Path) -> None:
    ran, ledger = run(lesson, tmp_path)
    if disturbed(ledger):
        warnings.warn(f"{lesson}, run once more after:\n{ran.stdout[-3000:]}", stacklevel=1)
        ran, ledger = run(lesson, tmp_path)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    check(ledger)
    same_claims_as_in_results(lesson, ledger)
    wide = [line for line in ran.stdout.splitlines() if len(line) > 100]
    assert not wide, "the table stays within 100 columns"
    assert left_in(tmp_path) == []


def same_claims_as_in_results(lesson: str, ledger: Ledger) -> None:
    """What results/ says was measured are the claims of the lesson as it is."""
    measured = ledger_of(lesson)["ledger"]
    blocked = [[row["claim"] for row in rows if "needs" in row] for rows in (ledger, measured)]
    if blocked[0] == blocked[1]:  # else this is another sort of machine
        claims = [row["claim"] for row in ledger]
        assert claims == [row["claim"] for row in measured], f"make results ONLY={lesson}"


def cases(taken: bool) -> list:
    """Every lesson at 1 and 3 ranks if it takes them, or at those of 1 to 4 that it does not.

    Plain python runs 4 ranks, and 2 are what most tests of a lesson's broken lines play.
    """
    sizes = (1, 3) if taken else (1, 2, 3, 4)
    found = []
    for lesson in LESSONS:
        for ranks in sizes:
            if taken == (ranks in world_sizes_of(lesson)):
                found.append(pytest.param(lesson, ranks, id=f"{lesson}-{ranks}"))
    return found


@pytest.mark.parametrize(("lesson", "ranks"), cases(taken=True))
def test_lesson_passes_at_other_world_sizes(lesson: str, ranks: int, tmp_path: Path) -> None:
    if "mp.spawn(" in (ROOT / lesson).read_text():  # its children import it as their main program
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        ran, ledger = run(lesson, tmp_path, *torchrun)
        assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
        check(ledger)
        return
    played = play(lesson, ranks, deadline=120)
    if disturbed(played.ledger):
        warnings.warn(f"{lesson}, run once more after:\n{played.output[-3000:]}", stacklevel=1)
        played = play(lesson, ranks, deadline=120)
    assert played.code == 0, f"{played.code}\n{played.output[-3000:]}"
    check(played.ledger)


@pytest.mark.parametrize(("lesson", "ranks"), cases(taken=False))
def test_lesson_refuses_other_world_sizes(lesson: str, ranks: int) -> None:
    """One message from rank 0 before any collective: rule, value, remedy."""
    outcomes = attempt(refusal, ranks, lesson, group=False)
    assert re.search(rf"got {ranks}\b", outcomes[0].value), outcomes[0]
    assert all(outcome.value for outcome in outcomes)


def refusal(lesson: str) -> str:
    """What the lesson says as it leaves, on this rank."""
    sys.argv = [lesson]
    module = load(lesson)
    module.time.sleep = lambda seconds: None  # other ranks wait for the launcher to end them
    module.dist.init_process_group = None
    try:
        module.main()
    except SystemExit as end:
        return end.code
    return ""


def asked(lesson: str, flag: str) -> object:
    """Give the lesson this flag, as plain python would; return its exit status or message."""
    os.environ.pop("RANK")
    sys.argv = [lesson, flag]
    try:
        return load(lesson).main()
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
