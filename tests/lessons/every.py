"""What is tested of every lesson, one body each, from the tables in the lesson's own test file.

A test file says `from tests.lessons.every import test_lesson` (and what else it names of here), and

    LESSON      the lesson's path; the rest may be left out
    BREAKS      Breaks, or a list of them: lines to break, and the claims that FAIL then
    SIZES       {ranks: changes}: what is left out at another world size than plain python's
    ON_GPUS     OnGpus: what is changed on pretended GPUs, and which claims only hardware answers
    WITHOUT     {package: Without}: what is BLOCKED where the package is missing
    PLAIN       a function of what plain python's run came to (Played): more that must hold of it
    NO_DEVICE   {function: why}: what tests/form/test_clocks.py need not see wait for a device

A change is (passage of the lesson, what it becomes); the passage occurs once.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock, patch

import pytest

from course.gpu_box import SIZES as GPU_COUNTS
from course.gpu_box import TORCHRUN, first, starts_its_own, takes
from course.lessons import READING_ORDER, ROOT, flags_of, world_sizes_of
from course.machines import ledger_of, wanted
from course.playing import Played, at_night, load, play
from course.ranks import attempt
from course.ranks import run as run_ranks
from tests.helpers.leftovers import left_in
from tests.helpers.together import merged, together

Change = tuple[str, str]
SPINE = [row["path"] for row in READING_ORDER if row.get("spine")]


@dataclass
class Breaks:
    """Lines to break: {what: (old, new, claims) or (change, claims) or (changes, claims)}.

    Breaks whose claims are disjoint are played together (tests/helpers/together.py), `alone` apart.
    """

    lines: dict[str, tuple]
    ranks: int = 2
    changes: Sequence[Change] = ()  # in every play: sections that no claim of these needs, left out
    argv: Sequence[str] = ()
    alone: Sequence[str] = ()  # they end the lesson early, or change what others would have done
    most: int = 4  # in one play
    deadline: float = 90
    clock: bool = False  # the claims are those that a clock decides: at night, alone


@dataclass
class OnGpus:
    """How the lesson is played on pretended GPUs (tests/helpers/pretended_gpus.py)."""

    changes: Sequence[Change] = ()  # smaller, or without what asks C++ for CUDA
    argv: Sequence[str] = ()
    hardware: dict[str, str] = field(default_factory=dict)  # claims it cannot keep there, and why
    ranks: Sequence[int] = ()  # 1 (at night only) and 4, as far as the lesson takes them
    says: str = "{ranks} ranks, NCCL"  # how the line begins in which it says how it runs


@dataclass
class Without:
    """What happens without a package."""

    changes: Sequence[Change]  # as if it could not be imported
    blocked: set[str]  # claims that are BLOCKED then; no claim FAILS
    ranks: int = 2


@dataclass
class Case:
    """One test of a lesson."""

    name: str
    play: Callable[[Path], None]
    marks: list = field(default_factory=list)

    def __str__(self) -> str:
        return self.name


def test_lesson(case: Case, tmp_path: Path) -> None:
    case.play(tmp_path)


def cases_of(module: ModuleType) -> list[Case]:
    """Every test of the lesson to which this module of tests belongs."""
    more = getattr(module, "PLAIN", None)
    assert more is None or callable(more), f"{module.__name__}: PLAIN is a function, or not there"
    plain = partial(passes_alone, module.LESSON, more)
    found = [Case("plain", plain, plain_marks(module.LESSON))]
    for cases in (
        refusal_cases,
        broken_cases,
        size_cases,
        pretended_cases,
        gpu_cases,
        without_cases,
    ):
        found += cases(module)
    return found


# What all that root's CPU machine may lack looks like in a row that is BLOCKED:
LACKING = r"(\d+\+? )?(nodes with )?(GPUs?|nsys|(more )?ranks)\b"
LACKING += "|--compile, once"  # DeepSpeed's C++, which tests compile that want it


def may_be_blocked(needs: str) -> bool:
    """Whether this machine may lack it: a GPU, ranks, and what a container may forbid."""
    if needs.startswith("root or user namespaces"):
        return bool(os.system("unshare --net true 2>&- || unshare --user --net true 2>&-"))
    if needs.startswith("root with bpf(2)"):
        return bool(os.system("bpftrace -e 'BEGIN { exit(); }' >/dev/null 2>&1"))
    if needs.startswith("root and a memory cgroup"):
        return os.geteuid() != 0 or not os.access("/sys/fs/cgroup", os.W_OK)
    if needs.startswith("a temporary folder on a disk"):
        return os.path.ismount(tempfile.gettempdir())
    return bool(re.match(LACKING, needs))


def check(played: Played) -> None:
    """Nothing FAILED, something PASSED, and what is BLOCKED wants what this machine may lack."""
    played.expect(set())
    assert "PASS" in [row["verdict"] for row in played.ledger]
    for row in played.ledger:
        if row["verdict"] == "BLOCKED":
            assert may_be_blocked(row["needs"]), row


# As a learner runs it


def run(
    lesson: str, folder: Path, *launcher: str, flags: Sequence[str] = (), warm: bool = False
) -> Played:
    """Run a copy of the lesson in `folder`, with plain python or the launcher."""
    shutil.copy(ROOT / lesson, folder)
    path = folder / "ledger.json"
    path.unlink(missing_ok=True)
    env = os.environ | {"LESSON_JSON": str(path)}
    argv = [*launcher, Path(lesson).name, *flags]
    if warm:
        from tests.helpers.warm_launch import run_warm

        ran = run_warm(argv, folder, env, timeout=280)
    else:
        captured = {"capture_output": True, "text": True}
        ran = subprocess.run([sys.executable, *argv], cwd=folder, env=env, timeout=280, **captured)
    ledger = json.loads(path.read_text())["ledger"] if path.exists() else []
    said = ran.stdout + ran.stderr if ran.returncode else ran.stdout
    return Played(ran.returncode, ledger, said)


def plain_marks(lesson: str) -> list:
    """At night a lesson whose claims a clock decides runs with nothing next to it."""
    measured = ledger_of(lesson)["ledger"]
    return [] if measured and not any(row.get("timed") for row in measured) else [pytest.mark.timed]


def loads_torch_anew(lesson: str) -> bool:
    """Whether every process here loads torch, as a learner's do: 2.5 s of a core, five times.

    So do the first lesson of the spine and those that start processes of their own; and those that
    spawn, for such a child looks for the file where Python started.
    """
    spawns = "mp.spawn(" in (ROOT / lesson).read_text(encoding="utf-8")
    return lesson == SPINE[0] or starts_its_own(lesson) or spawns


def passes_alone(lesson: str, more: Callable[[Played], None] | None, folder: Path) -> None:
    """By plain python, in an empty folder: all claims hold, its figure is drawn, nothing stays."""
    figure = ["--figure", "figure.png"] if "--figure" in flags_of(lesson) else []
    played = run(lesson, folder, flags=figure, warm=not loads_torch_anew(lesson))
    check(played)
    drawn = figure and "no figure:" not in played.output
    if drawn and not any("namespaces" in row.get("needs", "") for row in played.ledger):
        assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG"), played.output
        (folder / "figure.png").unlink()
    if more:
        more(played)
    if at_night():
        assert played.failed_by_clock == set(), played.output
    same_claims_as_in_results(lesson, played.ledger)
    wide = [line for line in played.output.splitlines() if len(line) > 100]
    assert not wide, "the table stays within 100 columns"
    assert left_in(folder) == []


def same_claims_as_in_results(lesson: str, ledger: list[dict]) -> None:
    """What results/ says was measured are the claims of the lesson as it is."""
    measured = ledger_of(lesson)["ledger"]
    blocked = [[row["claim"] for row in rows if "needs" in row] for rows in (ledger, measured)]
    if blocked[0] == blocked[1]:  # else this is another sort of machine
        claims = [row["claim"] for row in ledger]
        assert claims == [row["claim"] for row in measured], f"make results ONLY={lesson}"


# Broken lines


def broken_cases(module: ModuleType) -> Iterator[Case]:
    """The first three plays of a lesson are its sentinels: they guard what all lessons share."""
    tables = getattr(module, "BREAKS", [])
    count = 0
    for breaks in [tables] if isinstance(tables, Breaks) else tables:
        for names in together(module.LESSON, breaks.lines, breaks.alone, breaks.most):
            marks = [pytest.mark.clock] if breaks.clock else [pytest.mark.deep]
            if not breaks.clock and count < 3:
                count += 1
                marks.append(pytest.mark.sentinel)
            yield Case("; ".join(names), partial(is_broken, module.LESSON, breaks, names), marks)


def is_broken(lesson: str, breaks: Breaks, names: Sequence[str], folder: Path) -> None:
    """These claims FAIL and no other."""
    changes, claims = merged(breaks.lines, names)
    how = {"argv": tuple(breaks.argv), "deadline": breaks.deadline}
    played = play(lesson, breaks.ranks, *breaks.changes, *changes, **how)
    if breaks.clock:
        played.expect(set(), by_clock=claims)
    else:
        played.expect(claims)


# Other world sizes


def size_cases(module: ModuleType) -> Iterator[Case]:
    """On 3 ranks, and at night on 1: plain python runs 4, and most broken lines are played on 2.

    Others are refused by one message before any collective.
    """
    left_out = getattr(module, "SIZES", {})
    taken = world_sizes_of(module.LESSON)
    for ranks in (1, 3):
        if ranks in taken:
            mark = pytest.mark.night if ranks == 1 else pytest.mark.deep
            played = partial(passes_on_ranks, module.LESSON, ranks, left_out.get(ranks, ()))
            yield Case(f"ranks: {ranks}", played, [mark])


def passes_on_ranks(lesson: str, ranks: int, left_out: Sequence[Change], folder: Path) -> None:
    check(play(lesson, ranks, *left_out, deadline=120))


def refusal_cases(module: ModuleType) -> Iterator[Case]:
    refused = [n for n in (1, 2, 3, 4, 8) if n not in world_sizes_of(module.LESSON)]
    if refused:
        yield Case("refuses other world sizes", partial(refuses, module.LESSON, refused))
    if re.search(r"^    launch\(.+\)", (ROOT / module.LESSON).read_text(), re.M):
        yield Case("starts only what it takes", partial(starts_what_it_takes, module.LESSON))


def refuses(lesson: str, sizes: Sequence[int], folder: Path) -> None:
    """One message from rank 0 before any collective: rule, value, remedy."""
    for ranks in sizes:
        outcomes = attempt(refusal, ranks, lesson, quiet=60, group=False)
        assert re.search(rf"got {ranks}\b", outcomes[0].value), outcomes[0]
        assert all(outcome.value for outcome in outcomes)


def refusal(lesson: str) -> str:
    """What the lesson says as it leaves, on this rank."""
    sys.argv = [lesson]
    module = load(lesson)
    module.time = SimpleNamespace(
        sleep=lambda seconds: None
    )  # other ranks wait for the launcher to end them
    module.dist.init_process_group = None
    try:
        module.main()
    except SystemExit as end:
        return end.code
    return ""


def starts_what_it_takes(lesson: str, folder: Path) -> None:
    """Plain python starts no number of ranks that the lesson refuses; on 16 GPUs it starts 16."""
    (started,) = run_ranks(started_on_gpus, 1, lesson, group=False)
    assert {gpus: refused for gpus, (_, refused) in started.items() if refused} == {}
    assert started[16] == (16, "")


def started_on_gpus(lesson: str) -> dict[int, tuple[int, str]]:
    return {gpus: started_on(lesson, gpus) for gpus in (2, 3, 5, 7, 8, 16, 100)}


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


class Joined(Exception):
    """The lesson did not refuse: it would join the group now."""


# GPUs, pretended and real


def pretended_cases(module: ModuleType) -> Iterator[Case]:
    on_gpus = getattr(module, "ON_GPUS", OnGpus())
    sizes = on_gpus.ranks or [n for n in (1, 4) if n in world_sizes_of(module.LESSON)]
    for ranks in sizes:
        marks = [pytest.mark.night if ranks == 1 and len(sizes) > 1 else pytest.mark.deep]
        if module.LESSON in SPINE and ranks > 1:
            marks.append(pytest.mark.sentinel)
        played = partial(passes_on_pretended_gpus, module.LESSON, on_gpus, ranks)
        yield Case(f"pretended GPUs: {ranks}", played, marks)


def passes_on_pretended_gpus(lesson: str, on_gpus: OnGpus, ranks: int, folder: Path) -> None:
    """What a clock decides is not judged: there is no GPU whose speed it could tell."""
    from tests.helpers.pretended_gpus import play_on_gpus

    played = play_on_gpus(lesson, ranks, *on_gpus.changes, argv=tuple(on_gpus.argv), deadline=250)
    assert played.failed - {*on_gpus.hardware} == set(), played.output[-3000:]
    joined = on_gpus.says.format(ranks=ranks)
    assert re.search(rf"^ *{joined}", played.output, re.M), "the lesson took gloo"
    assert any(row["verdict"] == "PASS" for row in played.ledger)


def gpu_cases(module: ModuleType) -> Iterator[Case]:
    """On 1, 2, 4 and 8 GPUs, as far as this machine has them and the lesson takes so many ranks."""
    import torch

    for ranks in GPU_COUNTS:
        if ranks <= torch.cuda.device_count() and takes(module.LESSON, ranks):
            played = partial(passes_on_gpus, module.LESSON, ranks)
            yield Case(f"GPUs: {ranks}", played, [pytest.mark.gpu])


def passes_on_gpus(lesson: str, ranks: int, folder: Path) -> None:
    """Through NCCL; and nothing is BLOCKED for want of GPUs that are there."""
    os.environ["CUDA_VISIBLE_DEVICES"] = first(ranks)
    torchrun = () if starts_its_own(lesson) else (*TORCHRUN, f"--nproc-per-node={ranks}")
    played = run(lesson, folder, *torchrun)
    check(played)
    assert played.failed_by_clock == set(), played.output
    wants = [row["needs"] for row in played.ledger if row["verdict"] == "BLOCKED"]
    counted = [needs for needs in wants if re.fullmatch(r"\d+ GPUs?(,.*)?", needs)]
    assert [needs for needs in counted if wanted(needs) <= ranks] == []
    if torchrun:
        assert re.search(rf"^{ranks} ranks?, nccl", played.output, re.M | re.I)


# What is missing


def without_cases(module: ModuleType) -> Iterator[Case]:
    for package, what in getattr(module, "WITHOUT", {}).items():
        played = partial(is_blocked_without, module.LESSON, what)
        yield Case(f"without {package}", played, [pytest.mark.deep])


def is_blocked_without(lesson: str, what: Without, folder: Path) -> None:
    played = play(lesson, what.ranks, *what.changes)
    played.expect(set())
    blocked = {row["claim"] for row in played.ledger if row["verdict"] == "BLOCKED"}
    assert blocked >= what.blocked
