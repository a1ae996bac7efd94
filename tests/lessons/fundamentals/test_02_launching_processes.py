"""The lesson on launching: what breaks it FAILs, what is started ends, nothing stays behind."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock, patch

import pytest

from course.playing import changed, load
from tests.helpers.leftovers import MARKED, gone
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "fundamentals/02_launching_processes.py"
HELLO, OWN, NEEDS = "say_hello", "own_ranks", "what_a_rank_needs"
NODES, SKIP, DIES = "two_torchruns_make_one_world", "one_rank_skips_the_call", "one_rank_dies"
SECTIONS = {HELLO, OWN, NEEDS, NODES, SKIP, DIES}
WITH_DEVICE = {OWN}

STARTS_PROCESSES = [  # sections of rank 0 that start processes of their own
    ("    say_hello()\n", ""),
    ("    two_torchruns_make_one_world()\n", ""),
    ("    one_rank_dies()\n", ""),
]
SIZES = {1: STARTS_PROCESSES, 3: STARTS_PROCESSES}  # they are the same at every world size
ON_GPUS = OnGpus(changes=STARTS_PROCESSES)  # these are started without pretended GPUs


def only(*sections: str) -> list[tuple[str, str]]:
    """Changes that leave these sections alone in `main`."""
    left_out = sorted(SECTIONS - set(sections))
    return [(f"    {name}({'device' * (name in WITH_DEVICE)})\n", "") for name in left_out]


HELLOS = "each of four ranks prints 0 + 1 + 2 + 3"
PROCESSES = "processes that run this lesson"
SUM = "this lesson's ranks, summed by all_reduce"
NEEDED = "variables without which a rank cannot join"
FOUR = "ranks of two launchers' four that print 6"
SECOND = "rank with local rank 1 on the second node"
STORES = "stores at which the four would meet"
PAST = "ranks that come past the all-reduce"
STATUS = "torchrun's exit status when one rank has died"
HEALTHY = "healthy ranks that come to their end"
CAUSE = "rank that torchrun names as the root cause"

# Where rank 0 starts processes it is alone: who waited for it would end by a timeout.
LAUNCHED = Breaks(
    {"hello by a barrier": ("dist.all_reduce(x)\nprint", "dist.barrier()\nprint", {HELLOS})},  # Try
    ranks=1,
    changes=only(HELLO),
    deadline=250,
)
NODES_APART = Breaks(
    {
        "two launchers that do not meet": (
            [
                ('torchrun("--nnodes=2", "--nproc-per-node=2"', 'torchrun("--nproc-per-node=2"'),
                (
                    "[start(command), start(command)]",
                    '[start(command), start([*command[:3], "--rdzv-id=b", *command[3:]])]',
                ),
            ],
            {FOUR, SECOND, STORES},
        ),
    },
    ranks=1,
    changes=only(NODES),
    deadline=250,
)
HIDDEN = Breaks(
    {
        "hidden variables that stay hidden": (
            "        os.environ[name] = hidden\n",
            "",
            {NEEDED},
        ),
    },
    ranks=1,
    changes=only(NEEDS),
)
TOGETHER = Breaks(
    {
        "ranks that are one process": ("(host, os.getpid())", "(host, 0)", {PROCESSES}),
        "no all-reduce": ("    dist.all_reduce(x)\n    claim", "    claim", {SUM}),
        "no rank skips the call": ("if RANK > 0:  # the", "if RANK >= 0:  # the", {PAST}),  # Try
    },
    changes=only(OWN, SKIP),
)
DEATHS = Breaks(
    {
        "no rank dies": (
            [
                ('["RANK"] == "1"', '["RANK"] == "7"'),
                ("time.sleep(30)  # the others", "time.sleep(1)  # the others"),
            ],
            {STATUS, HEALTHY, CAUSE},
        ),
        "another rank dies": ('["RANK"] == "1"', '["RANK"] == "2"', {CAUSE}),
    },
    ranks=1,
    changes=only(DIES),
    deadline=250,
)
BREAKS = [TOGETHER, HIDDEN, DEATHS, LAUNCHED, NODES_APART]


@pytest.mark.deep
def test_nothing_outlives_a_killed_launcher(tmp_path: Path) -> None:
    """The lesson's launcher is killed while four ranks of two other launchers sleep."""
    asleep = tmp_path / "asleep"
    sleep = f"import time\nopen({str(asleep)!r}, 'a').write('z')\ntime.sleep(600)\n"
    first = 'import os\nnames = ["RANK", "GROUP_RANK"'
    source = changed(LESSON, *only(NODES), (first, sleep + first))
    (tmp_path / "lesson.py").write_text(source)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([*torchrun, "lesson.py"], cwd=tmp_path, env=MARKED, **silent) as launcher:
        stop = time.monotonic() + 200
        while not (asleep.exists() and asleep.stat().st_size == 4):
            assert time.monotonic() < stop, "not in time"
            time.sleep(0.1)
        launcher.send_signal(signal.SIGKILL)
    assert gone()


# Values that no row shows


def test_what_is_started_does_not_take_itself_for_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    lesson = load(LESSON)
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_NEW", "PYTHONUNBUFFERED"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KEPT", "1")
    process = lesson.start([sys.executable, "-c", "import os; print(*os.environ)"])
    (line,) = lesson.lines_of([process])
    assert not [name for name in line.split() if name.startswith(lesson.OURS)]
    assert "KEPT" in line.split()


def test_hello_adds_up_any_number_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """As rank 39 of 40, whose sum no byte holds."""
    others = {"get_rank": lambda: 39, "get_world_size": lambda: 40}
    others |= {"all_reduce": lambda x: x.add_(sum(range(39))), "init_process_group": Mock()}
    with patch.multiple("torch.distributed", **others, destroy_process_group=Mock()):
        exec(load(LESSON).HELLO, {})
    assert capsys.readouterr().out == "I am rank 39 of 40, and the ranks sum to 780\n"


def test_a_program_that_fails_is_not_read_as_one_that_says_nothing() -> None:
    lesson = load(LESSON)
    two = [lesson.start([sys.executable, "-c", f"print({word!r})"]) for word in "ab"]
    assert lesson.lines_of(two) == ["a", "b"]
    with pytest.raises(SystemExit, match="why"):
        lesson.lines_of([lesson.start([sys.executable, "-c", "import sys; sys.exit('why')"])])
