"""The report names all eight, also from NCCL's records, and nobody without a reason; breaks fail.

The eight jobs hang once; the report, with a line changed, reads the same looks again and again.
"""

import functools
import inspect
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest

from course.lessons import ROOT
from course.playing import Lazily, load
from course.ranks import lives, run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "profiling/04_debugging_hangs.py"
lesson = Lazily(LESSON)

# Some containers forbid root to trace: what py-spy says is BLOCKED there.
PY_SPY_DUMP = f"{Path(sys.executable).parent}/py-spy dump --pid {os.getpid()}"
MAY_TRACE = os.system(f"{PY_SPY_DUMP} >/dev/null 2>&1") == 0

# One process, which joins no group.
ON_GPUS = OnGpus(ranks=(1,), says="torch .*, gloo, 4 ranks per job")
NO_DEVICE = {"watch": "its ranks have no GPUs"}


def let_them_hang() -> bytes:
    """The last looks at each of the eight jobs."""
    alone = load(LESSON)
    watched = {job.__name__: alone.watch(job).looks for job in alone.JOBS}
    return pickle.dumps({name: [vars(look) for look in looks] for name, looks in watched.items()})


@pytest.fixture(scope="module")
def hung() -> dict[str, list[dict]]:
    (looks,) = run(let_them_hang, 1, group=False, deadline=250)
    return pickle.loads(looks)


def blamed(report: ModuleType, hung: dict[str, list[dict]]) -> dict[str, list[int]]:
    """Whom the report, perhaps a broken one, blames for each job."""
    said = {}
    for name, looks in hung.items():
        said[name] = report.who_waits_for_whom([report.Look(**look) for look in looks]).ranks
    return said


@functools.cache
def right() -> dict[str, list[int]]:
    return {job.__name__: [2] for job in lesson.JOBS} | {"both_send_first": [2, 3]}


ALL = [0, 1, 2, 3]


@pytest.mark.deep
def test_all_eight_are_named_with_rank_line_and_reason(hung: dict) -> None:
    assert blamed(lesson, hung) == right()
    for job in lesson.JOBS:
        verdict = lesson.who_waits_for_whom([lesson.Look(**look) for look in hung[job.__name__]])
        source, first = inspect.getsourcelines(job)
        assert source[verdict.line - first].endswith("# BUG\n"), job
        assert verdict.why.startswith("rank 2: ")


REPORT_BREAKS = {  # a changed line of the report, and whom it blames then
    "no dtypes, as in Try": (
        ('    same += ["input_dtypes"]\n', ""),
        {"other_dtype": []},
    ),
    "no groups": (
        ('same = ["process_group", ', "same = ["),
        {"wrong_group": []},
    ),
    "one that was aborted is to blame": (
        ("if look.exitcode == -signal.SIGABRT:", "if False:"),
        {"other_dtype": [1]},
    ),
    "one that has failed waits for nobody": (
        ("return look.calls[-1] if look.calls and failed_inside else None", "return None"),
        {},  # one rank still waits
    ),
}


@pytest.mark.deep
@pytest.mark.parametrize("name", REPORT_BREAKS)
def test_a_broken_report_blames_somebody_else(name: str, hung: dict) -> None:
    change, wrong = REPORT_BREAKS[name]
    said = blamed(load(LESSON, change), hung)
    assert {job: said[job] for job in wrong} == wrong
    assert (said == right()) == (not wrong)


@pytest.mark.deep
def test_without_the_vote_a_circle_is_blamed_whole(hung: dict) -> None:
    said = blamed(load(LESSON, ("append((eventually, directly))", "append((eventually, 0))")), hung)
    named = {name for name, ranks in said.items() if ranks == right()[name]}
    assert named == {"dead_rank", "both_send_first"}
    assert said["skipped_collective"] == said["wrong_group"] == ALL


# Looks made by hand: what no job here shows


def test_a_hang_is_three_looks_alike_and_not_two() -> None:
    """A slow job stands still for two looks, and goes on."""
    one, other = ["a look at all ranks"], ["another"]
    assert not lesson.hangs([one], [])
    assert not lesson.hangs([one, one], [])
    assert not lesson.hangs([other, one, one], [])
    assert lesson.hangs([other, one, one, one], [])


def call(name: str, number: int = 1, group: str = "0", retired: bool = False) -> dict:
    return {
        "process_group": (group, ""),
        "collective_seq_id": number,
        "profiling_name": name,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "retired": retired,
    }


def looks(*calls: list[dict], groups: dict | None = None) -> list:
    everyone = groups or {"0": list(range(len(calls)))}
    return [lesson.Look(calls=list(own), groups=everyone) for own in calls]


def test_records_of_nccl_are_read_as_those_of_gloo() -> None:
    name = "nccl:all_reduce"
    found = looks([call(name)], [], [call(name)])
    assert lesson.who_waits_for_whom(found).ranks == [1]
    sends = looks([call("nccl:send 0->1")], [call("nccl:send 1->0")], [])
    assert lesson.who_waits_for_whom(sends).ranks == [0, 1]
    met = looks([call("nccl:send 0->1")], [call("nccl:recv 1<-0")], [])
    assert lesson.who_waits_for_whom(met).ranks == []


@pytest.mark.parametrize(
    "other",
    [
        {"profiling_name": "gloo:broadcast"},
        {"input_sizes": [[5]]},
        {"input_dtypes": ["Double"]},
        {"collective_seq_id": 2},
        {"process_group": ("1", "")},
    ],
)
def test_one_other_call_is_outvoted(other: dict) -> None:
    mine = call("gloo:all_reduce")
    found = looks([mine], [mine | other], [mine], groups={"0": [0, 1, 2], "1": [0, 1, 2]})
    assert lesson.who_waits_for_whom(found).ranks == [1]
    assert lesson.who_waits_for_whom(looks([mine], [mine], [mine])).ranks == []


def test_where_all_have_died_it_was_not_who_was_aborted() -> None:
    """NCCL's watchdog aborts every rank that waited for one that the kernel had killed."""
    found = [lesson.Look(state="dead", exitcode=code) for code in (-6, -9, -6)]
    assert lesson.who_waits_for_whom(found).ranks == [1]


def test_the_end_of_a_chain_is_blamed_and_not_its_middle() -> None:
    groups = {"0": [0, 1, 2], "1": [2, 3]}
    waits = [[call("gloo:all_reduce")], [call("gloo:all_reduce")]]
    found = looks(*waits, [call("gloo:broadcast", group="1")], [], groups=groups)
    verdict = lesson.who_waits_for_whom(found)
    assert verdict.ranks == [3]
    assert verdict.why.endswith("rank 2: broadcast of Float[4], #1 in group 1")


def test_a_message_whose_peer_answers_blames_nobody() -> None:
    found = [lesson.Look(message=("send", 1)), lesson.Look(message=("recv", 0))]
    assert lesson.who_waits_for_whom(found).ranks == []
    found = [lesson.Look(message=("recv", 1)), lesson.Look(message=("recv", 0))]
    assert lesson.who_waits_for_whom(found).ranks == [0, 1]
    found = [lesson.Look(message=("recv", 1)), lesson.Look(state="finished")]
    assert lesson.who_waits_for_whom(found).ranks == [1]


def test_three_looks_alike_and_nobody_who_wants_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lesson.wants_a_core(psutil.Process())  # this one, as it asks
    asleep, busy = "asleep", "busy"
    monkeypatch.setitem(lesson.hangs.__globals__, "wants_a_core", lambda process: process is busy)
    still = looks([call("gloo:all_reduce")], [])
    moved = [lesson.Look(**vars(still[0]) | {"cpu": 1}), still[1]]
    assert lesson.hangs([still] * 3, [asleep, asleep])
    assert not lesson.hangs([still] * 3, [asleep, busy])
    assert not lesson.hangs([still] * 2, [asleep, asleep])
    assert not lesson.hangs([still, moved, still], [asleep, asleep])


def test_nobody_waits_in_a_call_that_is_over() -> None:
    over, now = call("gloo:all_reduce", retired=True), call("gloo:broadcast", 2)
    verdict = lesson.who_waits_for_whom(looks([over, now], [over, now], [over]))
    assert verdict.ranks == [2]
    assert verdict.why.endswith("rank 0: broadcast of Float[4], #2 in group 0")


def test_a_job_is_looked_at_until_somebody_is_waited_for_or_all_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(lesson.decided.__globals__, "hangs", lambda history, _: len(history) > 1)
    waits, running = call("gloo:all_reduce"), lesson.Look()
    finished = lesson.Look(state="finished")
    raised = lesson.Look(state="raised", stack=[("train.py", 1, "train")])
    assert lesson.decided([[], looks([waits], [waits], [])], [])
    assert not lesson.decided([looks([waits], [waits], [])], [])  # it may still move
    assert not lesson.decided([[], looks([waits], [waits], [waits])], [])
    assert not lesson.decided([[], [running, finished]], [])
    assert lesson.decided([[], [finished, finished]], [])
    assert lesson.decided([[], [running, raised]], [])


def test_what_became_of_the_ranks_is_counted() -> None:
    states = ["running", "dead", "raised", "running"]
    seen = SimpleNamespace(looks=[lesson.Look(state=state) for state in states])
    assert lesson.symptom(seen) == "2 wait, 1 raise, 1 dead"


@pytest.mark.parametrize(("end", "code"), [("exit 3", 3), ("kill -9 $$", -9)])
def test_how_a_child_ended_is_told_and_it_stays_to_be_asked_again(end: str, code: int) -> None:
    with subprocess.Popen(["sh", "-c", f"read line; {end}"], stdin=subprocess.PIPE) as child:
        process = psutil.Process(child.pid)
        assert lesson.exitcode_of(process) is None
        child.stdin.write(b"\n")
        child.stdin.close()
        lesson.wait_until(lambda: lesson.exitcode_of(process) is not None)
        assert [lesson.exitcode_of(process) for _ in range(2)] == [code] * 2


# Claims. Sections that a break does not touch are left out.

NO_EIGHT = ("    name_all_eight()\n", "")
ONE = ("    for job in JOBS:\n", "    for job in (dead_rank,):\n")
NO_DOUBT = ("    check_doubt()\n", "")
NO_TOOLS = ("    check_tools()\n", "")
NO_CURE = ("    check_cure()\n", "")
FEW = ("    for job in JOBS:\n", "    for job in (dead_rank, skipped_collective):\n")
SILENT = "jobs of eight in which no rank prints an error"
RANKS, LINE = "jobs whose guilty rank is named", "jobs whose guilty line is named"
SLOWEST = "seconds until the slowest is named"
RAISE, NAMING = (
    "dead rank: ranks that raise",
    "dead rank: of their messages, how many name it",
)
TWO, BLAMED = "two ranks, another order: ranks blamed", "healthy: ranks blamed"
TRAINED = "healthy: ranks that trained to the end"
PY_SPY, FAULT = "py-spy: line of the guilty rank", "faulthandler: line of the guilty rank"
FR_TRACE, BARRIER = "torchfrtrace: names the rank", "monitored_barrier: names the rank"
DETAIL = "DETAIL, another dtype: ranks that name it"
BATCHES, ENDED = (
    "uneven, with join: batches trained on",
    "uneven, with join: ranks that come to the end",
)
LINES = {
    "two jobs of eight, of which the dead rank sleeps": (
        [
            *(NO_DOUBT, NO_TOOLS, NO_CURE, FEW),
            ("            os.kill(os.getpid(), signal.SIGKILL)\n", "            time.sleep(600)\n"),
        ],
        {SILENT, RANKS, LINE, RAISE},
    ),
    "three ranks for two, and one look is enough": (
        [
            *(NO_EIGHT, NO_TOOLS, NO_CURE),
            ("watch(another_order, ranks=2)", "watch(another_order, ranks=3)"),
            ("if len(looks) < 3 or not looks[-1] == looks[-2] == looks[-3]:", "if not looks:"),
            ("not any(wants_a_core(process) for process in processes)", "True"),
        ],
        {TWO, BLAMED, TRAINED},
    ),
    "no join; the one job's rank does not die, and says which one it is": (
        [
            *(NO_DOUBT, NO_TOOLS, ONE),
            ("model.join(enable=join)", "model.join(enable=False)"),
            ("            os.kill(os.getpid(), signal.SIGKILL)\n",
             '            raise RuntimeError(f"rank {rank} is out of memory")\n'),
        ],
        {BATCHES, ENDED, SILENT, RANKS, LINE, NAMING},
    ),
}  # fmt: skip
OF_THE_TOOLS = {
    "the stacks of another rank": (
        [
            (
                "ask_py_spy(processes[GUILTY]), ask_faulthandler(processes[GUILTY])",
                "ask_py_spy(processes[0]), ask_faulthandler(processes[0])",
            ),
            ('Path(process.cwd(), f"{GUILTY}.txt")', 'Path(process.cwd(), "0.txt")'),
        ],
        {FAULT} | ({PY_SPY} if MAY_TRACE else set()),
    ),
    "one rank's record for all": (
        "for call in look.calls]",
        "for call in looks[0].calls]",
        {FR_TRACE},
    ),
    "another rank stays away": ("    while guilty:\n", "    while rank == 1:\n", {BARRIER}),
    "a level of debugging that torch is not told": (
        "    dist.set_debug_level_from_env()\n",
        "",
        {DETAIL},
    ),
}
OF_THE_CLOCK = {
    "a look at the one job every six seconds": (
        [ONE, ("time.sleep(0.1)", "time.sleep(6)")],
        {SILENT, RANKS, LINE, SLOWEST},
    ),
}


BREAKS = [
    Breaks(LINES, ranks=1, deadline=250),
    Breaks(OF_THE_TOOLS, ranks=1, changes=[NO_EIGHT, NO_DOUBT, NO_CURE], deadline=250),
    Breaks(OF_THE_CLOCK, ranks=1, changes=[NO_DOUBT, NO_TOOLS, NO_CURE], clock=True),
]


@pytest.mark.deep
def test_ranks_that_hang_die_with_the_lesson() -> None:
    """SIGKILL leaves no time to tidy up: each rank has asked to be killed as well."""
    command = [sys.executable, "-u", LESSON]
    started = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    while "blamed" not in started.stdout.readline():
        assert started.poll() is None
    process = psutil.Process(started.pid)
    while not (ranks := process.children()):
        time.sleep(0.01)
    started.send_signal(signal.SIGKILL)
    started.wait()
    started.stdout.close()
    stop = time.monotonic() + 100
    while any(map(lives, ranks)):  # what inherits them may leave zombies
        assert time.monotonic() < stop, ranks
        time.sleep(0.02)
