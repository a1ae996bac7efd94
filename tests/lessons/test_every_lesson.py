"""Every lesson as a learner runs it: alone in an empty folder, at every world size it takes.

Where there are GPUs, these runs have one rank per GPU and NCCL. Ranks of `play` never see a GPU.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch

from course.gpu_box import SIZES, TORCHRUN, first, starts_its_own, takes
from course.lessons import LESSONS, ROOT, world_sizes_of
from course.machines import ledger_of, wanted
from course.playing import Played, load, play
from course.ranks import attempt
from course.ranks import run as run_ranks
from tests.helpers.leftovers import left_in
from tests.helpers.spared import LAUNCHING, NO_JIT, STARTS_PROCESSES, SURVIVING
from tests.helpers.warm_launch import run_warm

# All that a root user's CPU machine may lack:
LACKING = r"(\d+\+? )?(nodes with )?(GPUs?|nsys|(more )?ranks)\b"
LACKING += "|--compile, once"  # DeepSpeed's C++, which tests compile that want it
if os.system("unshare --net true 2>&- || unshare --user --net true 2>&-"):
    LACKING += "|root or user namespaces"  # a container that forbids them, or not Linux
if os.system("bpftrace -e 'BEGIN { exit(); }' >/dev/null 2>&1"):
    LACKING += r"|root with bpf\(2\)"  # likewise


def run(lesson: str, folder: Path, *launcher: str, warm: bool = False) -> Played:
    """Run a copy of the lesson in `folder`, with plain python or the launcher."""
    shutil.copy(ROOT / lesson, folder)
    path = folder / "ledger.json"
    path.unlink(missing_ok=True)
    env = os.environ | {"LESSON_JSON": str(path)}
    argv = [*launcher, Path(lesson).name]
    if warm:
        ran = run_warm(argv, folder, env, timeout=280)
    else:
        captured = {"capture_output": True, "text": True}
        ran = subprocess.run([sys.executable, *argv], cwd=folder, env=env, timeout=280, **captured)
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
        timed |= torch.cuda.device_count() > 1  # there, clocks decide more, on all GPUs
        found.append(pytest.param(lesson, marks=[pytest.mark.clock] if timed else []))
    return found


def loads_torch_anew(lesson: str) -> bool:
    """Whether every process here loads torch, as a learner's do: 2.5 s of a core, five times.

    So does the spine's first lesson, and those that start processes of their own.
    """
    return lesson == LAUNCHING or starts_its_own(lesson)


@pytest.mark.parametrize("lesson", lessons_marked())
def test_lesson_passes_alone_in_an_empty_folder(lesson: str, tmp_path: Path) -> None:
    played = run(lesson, tmp_path, warm=not loads_torch_anew(lesson))
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
    """Every lesson at 1 and 3 ranks if it takes them, or at those of 1 to 4 and 8 that it does not.

    Plain python runs 4 ranks, and 2 are what most tests of a lesson's broken lines play.
    """
    sizes = (1, 3) if taken else (1, 2, 3, 4, 8)
    found = []
    for lesson in LESSONS:
        for ranks in sizes:
            if taken == (ranks in world_sizes_of(lesson)):
                found.append(pytest.param(lesson, ranks, id=f"{lesson}-{ranks}"))
    return found


# What rank 0 alone does or starts is the same whatever the lesson's world size is.
WITHOUT = {
    LAUNCHING: STARTS_PROCESSES[LAUNCHING],
    SURVIVING: STARTS_PROCESSES[SURVIVING],
    "communication/06_overlap.py": [
        ("    check_across_the_cable(link, why_not, options.figure)\n", ""),
        ("REPEATS = 3", "REPEATS = 1"),
    ],
    "communication/08_gradient_compression.py": [
        ("    across = RANK == 0 and WORLD_SIZE > 1\n", "    across = False\n"),
        (
            "    slow = train_across(link, why_not, runs) if WORLD_SIZE > 1 else False\n",
            "    slow = False\n",
        ),
        ("    if slow:\n        check_slow_link(runs)\n    else:\n", "    if WORLD_SIZE == 1:\n"),
    ],
    "data-loading/01_ffcv_distributed_optimization.py": [
        ("    if RANK != 0:\n        os.environ", "    if RANK >= 0:\n        os.environ"),
        ("        stations = check_stations(place, device)\n", "        stations = {}\n"),
        ("        core = check_loaders(place)\n", "        core = {}\n"),
    ],
    "fundamentals/05_several_nodes.py": [
        ('    static = Launch(nodes, static_form, "")\n', ""),
        ("    tell.send(make_mistakes(nodes, mistakes))\n", ""),
        ("    tell.send(static.seen())\n", ""),
        ("        check_mistakes(next_report(operator))\n", ""),
        ('        check_hello(next_report(operator)["places"], 2, "static")\n', ""),
    ],
    # The plain run, on four ranks, compiles.
    "data-loading/02_beton_file.py": [NO_JIT],
    "data-loading/03_orders_pages_memory.py": [NO_JIT],
}


ONE_NODE = "fundamentals/05_several_nodes.py"  # on one rank: its two nodes are there on three


@pytest.mark.deep
@pytest.mark.parametrize(("lesson", "ranks"), cases(taken=True))
def test_lesson_passes_at_other_world_sizes(lesson: str, ranks: int) -> None:
    """What a clock decides is judged on four ranks, where the lesson is alone on the machine."""
    left_out = WITHOUT.get(lesson, [])
    if (lesson, ranks) == (ONE_NODE, 1):
        left_out = STARTS_PROCESSES[ONE_NODE]
    check(play(lesson, ranks, *left_out, deadline=120))


def cases_on_gpus() -> list:
    """Every lesson on 1, 2, 4 and 8 GPUs, as far as it takes so many ranks."""
    found = []
    for lesson in LESSONS:
        for ranks in SIZES:
            if takes(lesson, ranks):
                found.append(pytest.param(lesson, ranks, marks=pytest.mark.gpu(ranks)))
    return found


@pytest.mark.clock  # nothing else may use the GPUs meanwhile
@pytest.mark.parametrize(("lesson", "ranks"), cases_on_gpus())
def test_lesson_passes_on_gpus(
    lesson: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through NCCL; and nothing is BLOCKED for want of GPUs that are there."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", first(ranks))
    torchrun = () if starts_its_own(lesson) else (*TORCHRUN, f"--nproc-per-node={ranks}")
    played = run(lesson, tmp_path, *torchrun)
    check(played)
    assert played.failed_by_clock == set(), played.output
    wants = [row["needs"] for row in played.ledger if row["verdict"] == "BLOCKED"]
    counted = [needs for needs in wants if re.fullmatch(r"\d+ GPUs?(,.*)?", needs)]
    assert [needs for needs in counted if wanted(needs) <= ranks] == []
    if torchrun:
        assert re.search(rf"^{ranks} ranks?, nccl", played.output, re.M | re.I)


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


class Joined(Exception):
    """The lesson did not refuse: it would join the group now."""


def started_on(lesson: str, gpus: int) -> tuple[int, str]:
    """Let plain python count so many GPUs, and be one of the ranks that it starts, up to `setup`.

    Returns how many those are, and what they refuse, or nothing.
    """
    words = []
    sys.argv = [lesson]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    with (
        patch("torch.cuda.device_count", lambda: gpus),
        patch("torch.distributed.run.main", words.extend),
        suppress(SystemExit),
    ):
        load(lesson).main()
    (ranks,) = [word.partition("=")[2] for word in words if "--nproc-per-node=" in word]
    os.environ |= {"RANK": "1", "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    module = load(lesson)
    module.time = SimpleNamespace(sleep=lambda seconds: None)
    module.setup = Mock(side_effect=Joined)
    try:
        module.main()
    except SystemExit as end:
        return int(ranks), end.code
    except Joined:
        return int(ranks), ""


def started_on_gpus(lesson: str) -> dict[int, tuple[int, str]]:
    return {gpus: started_on(lesson, gpus) for gpus in (2, 3, 5, 7, 8, 16, 100)}


STARTED_BY_LAUNCH = [lesson for lesson in LESSONS if world_sizes_of(lesson) != [1]]


@pytest.mark.parametrize("lesson", STARTED_BY_LAUNCH)
def test_plain_python_starts_no_number_of_ranks_that_the_lesson_refuses(lesson: str) -> None:
    """And on a box of 16 GPUs it starts 16 ranks."""
    (started,) = run_ranks(started_on_gpus, 1, lesson, group=False)
    assert {gpus: refused for gpus, (_, refused) in started.items() if refused} == {}
    assert started[16] == (16, "")


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
