"""Every lesson as a learner runs it: alone in an empty folder, at every world size it takes."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from course.lessons import LESSONS, ROOT, Played, load, play, world_sizes_of
from course.ranks import attempt
from course.tables import ledger_of
from tests.helpers.leftovers import left_in

# All that a root user's CPU machine may lack:
LACKING = r"(\d+\+? )?(nodes with )?(GPUs?|nsys|(more )?ranks)\b"
if os.system("unshare --net true 2>&- || unshare --user --net true 2>&-"):
    LACKING += "|root or user namespaces"  # a container that forbids them, or not Linux


def run(lesson: str, folder: Path, *launcher: str) -> Played:
    """Run a copy of the lesson in `folder`, with plain python or the launcher."""
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
    ledger = json.loads(path.read_text())["ledger"] if path.exists() else []
    said = ran.stdout + ran.stderr if ran.returncode else ran.stdout
    return Played(ran.returncode, ledger, said)


def check(played: Played) -> None:
    """Nothing FAILED, something PASSED, and what is BLOCKED wants what this machine may lack.

    Claims that a clock decides are left to who calls.
    """
    played.expect(set())
    assert "PASS" in [row["verdict"] for row in played.ledger]
    for row in played.ledger:
        if row["verdict"] == "BLOCKED":
            assert re.match(LACKING, row["needs"]), row


def lessons_marked() -> list:
    """Every lesson; those in which a clock decides a claim run with nothing beside them."""
    found = []
    for lesson in LESSONS:
        measured = ledger_of(lesson)["ledger"]
        timed = not measured or any(row.get("timed") for row in measured)
        found.append(pytest.param(lesson, marks=[pytest.mark.clock] if timed else []))
    return found


@pytest.mark.parametrize("lesson", lessons_marked())
def test_lesson_passes_alone_in_an_empty_folder(lesson: str, tmp_path: Path) -> None:
    played = run(lesson, tmp_path)
    check(played)
    assert played.failed_by_clock == set(), played.output
    same_claims_as_in_results(lesson, played.ledger)
    wide = [line for line in played.output.splitlines() if len(line) > 100]
    assert not wide, "the table stays within 100 columns"
    assert left_in(tmp_path) == []


def same_claims_as_in_results(lesson: str, ledger: list[dict]) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize(("lesson", "ranks"), cases(taken=True))
def test_lesson_passes_at_other_world_sizes(lesson: str, ranks: int, tmp_path: Path) -> None:
    """What a clock decides is judged on four ranks, where the lesson is alone on the machine."""
    if "mp.spawn(" in (ROOT / lesson).read_text():  # its children import it as their main program
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        check(run(lesson, tmp_path, *torchrun))
    else:
        check(play(lesson, ranks, deadline=120))


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
