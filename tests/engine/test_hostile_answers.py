"""Answers that attack their grader: each ends in time, is told truly, runs nothing here, and leaves
neither a process nor a file."""

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from course.lessons import ROOT
from tests.helpers.judges import Judges
from tests.helpers.leftovers import MARKED, gone

pytestmark = pytest.mark.timeout(600)
EXERCISE = ROOT / "exercises" / "01_hello_ranks"
PLAIN = ROOT / "exercises" / "00_first_collectives"  # its grader looks at no value on a rank
HEAD = """import ctypes, os, pickle, shutil, signal, subprocess, sys, threading, time
import torch, torch.distributed as dist
class Bomb:
    def __reduce__(self):
        return os.mkdir, (os.environ["PROOF"],)
def hello(shard):
"""
DEADLINE = 4  # seconds of CPU, for answers that loop; of the command's own judge, 10
LATE = "not every rank has come back"
TYPE = "returned a value of type {}, which cannot leave the rank"
LEFT = "exited with status 0, before the function returned"

HOSTILE = {  # the body of `hello`, and what the grader says
    "loops for ever": ("while True: pass", [LATE, "rank 0 busy at answer.py:7, in hello"]),
    "starts others": (
        "for _ in range(5): os.fork() or (os.setsid(), os.fork(), time.sleep(1000))\n"
        "    subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "    return 'hello', 1",
        ["greeting: expected rank 0 of 1, got hello"],
    ),
    "prints 100 MB": (
        "for _ in range(100): print('x' * 10**6)",
        ["rank 0: printed more than 20,000,000 bytes; is there a loop that prints?"],
    ),
    "crashes": (
        "ctypes.string_at(0)",
        ["rank 0: killed by SIGSEGV at answer.py:7, in hello", "ctypes.string_at(0)"],
    ),
    "leaves at once": ("os._exit(0)", [LEFT]),
    "leaves": ("sys.exit(0)", ["rank 0: called sys.exit(0)"]),
    "returns a pickle that runs code": ("return Bomb()", [TYPE.format("Bomb")]),
    "hides such a pickle": ("return 'rank 0 of 1', [Bomb()]", [TYPE.format("Bomb")]),
    "forges its rank's word": (
        "word = pickle.dumps(('returned', Bomb(), '', 1.0))\n"
        "    pickle.dumps = lambda *args: word\n    return 'rank 0 of 1', 1",
        ["sent what is no word"],
    ),
    "raises what runs code": (
        "class Loud(Exception):\n        __reduce__ = Bomb.__reduce__\n    raise Loud('boo')",
        ["Loud: boo", "answer.py, line 9, in hello"],
    ),
    "returns a lambda": ("return lambda: 1", [TYPE.format("function")]),
    "returns a generator": ("return (i for i in 'ab')", [TYPE.format("generator")]),
    "returns a class of its own": (
        "from dataclasses import make_dataclass\n"
        "    return make_dataclass('Result', ['said', 'total'])('rank 0 of 1', 1)",
        [TYPE.format("Result")],
    ),
    "deletes its folder": (
        "shutil.rmtree(os.path.dirname(__file__)); return 1 / 0",
        ["rank 0: ZeroDivisionError: division by zero"],
    ),
    "kills its group": ("os.killpg(0, signal.SIGKILL)", ["rank 0: killed by SIGKILL"]),
    "kills the ranks' server": (
        "subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "    os.kill(os.getppid(), signal.SIGKILL); time.sleep(1000)",
        ["rank 0: "],
    ),
    "stops the ranks' server": (
        "os.kill(os.getppid(), signal.SIGSTOP); return 'hello', 1",
        ["greeting: expected rank 0 of 1, got hello"],
    ),
    "stops itself": (
        "os.kill(os.getpid(), signal.SIGSTOP)",
        [LATE, "rank 0 gave no stack"],
    ),
    "speaks for the grader": (
        "from course.grading import Wrong; raise Wrong('all is well')",
        ["rank 0: all is well"],
    ),
    "changes torch": (
        "dist.all_reduce = lambda *args, **more: None; return 'rank 0 of 1', 1",
        ["checksum: expected"],
    ),
}
# Judged by the command itself; the others by judges that are forked
BY_COMMAND = {"starts others", "forges its rank's word", "kills the ranks' server", "stops itself"}
FILES = {  # the whole file
    "is no Python": ("def hello(shard) return", ["SyntaxError", "answer.py, line 1"]),
    "loops on import": ("while True: pass", [LATE, "rank 0 busy at answer.py:1, in <module>"]),
}


def short_folder() -> Path:
    """A folder for temporary files whose path leaves room for a socket's name: 107 bytes in all."""
    folder = Path(tempfile.mkdtemp(prefix="judge-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@pytest.fixture(scope="module")
def judges() -> Iterator[Judges]:
    """What most judges are forked from, for torch takes seconds to load."""
    judges = Judges(MARKED)
    yield judges
    judges.close()


def judged(
    judges: Judges, folder: Path, source: str, exercise: Path = EXERCISE, by_command: bool = False
) -> tuple[int, list[dict], str]:
    """The judge's exit status, what it says of each check, and what else it prints."""
    (place := folder / "answers").mkdir()
    temporary = short_folder()
    (answer := place / "answer.py").write_text(source)
    output, errors = folder / "output", folder / "errors"
    environment = {"TMPDIR": str(temporary), "PROOF": str(folder / "proof")}
    arguments = [exercise, answer, "--seed", "1"]
    started = time.monotonic()
    if by_command:
        status = subprocess.run(
            [sys.executable, "-m", "course.judge", *arguments],
            env=MARKED | environment,
            cwd=ROOT,
            stdout=output.open("w"),
            stderr=errors.open("w"),
            timeout=400,
        ).returncode
    else:
        status = judges.judge(arguments, environment, [output, errors], DEADLINE)
    assert time.monotonic() - started < 400  # 10 s and the start of a server, on a busy machine
    assert gone(besides=judges.process.pid), "a process outlived the judge"
    assert left_in(temporary) == []
    assert not (folder / "proof").exists(), "the answer ran code in the grader's process"
    told = [json.loads(line) for line in output.read_text().splitlines()]
    told = [row for row in told if row["verdict"] != "running"]
    return status, told, errors.read_text()


def left_in(folder: Path) -> list[Path]:
    """What is there, less the cache that torch makes for its compiler wherever it is imported."""
    return [path for path in folder.iterdir() if not path.name.startswith("torchinductor")]


def refused(judged: tuple[int, list[dict], str], words: list[str]) -> None:
    code, told, errors = judged
    assert code == 1, errors
    assert [row["verdict"] for row in told] == ["failed"], told
    message = " ".join(told[0]["message"].split())
    for word in words:
        assert word in message, message
    assert "Traceback" not in message
    assert "the grader itself" not in message
    assert errors == ""


@pytest.mark.deep
@pytest.mark.parametrize("how", HOSTILE)
def test_a_hostile_answer_is_refused_and_leaves_nothing(
    how: str, judges: Judges, tmp_path: Path
) -> None:
    body, words = HOSTILE[how]
    exercise = PLAIN if "cannot leave" in words[0] else EXERCISE
    source = f"{HEAD}    {body}\nsum_and_mean = hello\n"
    refused(judged(judges, tmp_path, source, exercise, how in BY_COMMAND), words)


@pytest.mark.deep
@pytest.mark.parametrize("how", FILES)
def test_a_file_that_cannot_be_imported_is_refused(
    how: str, judges: Judges, tmp_path: Path
) -> None:
    source, words = FILES[how]
    refused(judged(judges, tmp_path, source), words)


@pytest.mark.deep
def test_a_thread_that_never_ends_holds_nothing_up(judges: Judges, tmp_path: Path) -> None:
    thread = (
        "\nimport threading, time\nthreading.Thread(target=time.sleep, args=(10**6,)).start()\n"
    )
    source = (EXERCISE / "solution.py").read_text() + thread
    code, told, errors = judged(judges, tmp_path, source)
    assert (code, errors) == (0, "")
    assert {row["verdict"] for row in told} == {"passed"}


@pytest.mark.deep
def test_nothing_stays_when_the_judge_is_killed(judges: Judges, tmp_path: Path) -> None:
    (place := tmp_path / "answers").mkdir()
    temporary = short_folder()
    note = tmp_path / "note"
    source = f"open({str(note)!r}, 'w').close()\nwhile True: pass\n"
    (answer := place / "answer.py").write_text(source)
    judge = subprocess.Popen(
        [sys.executable, "-m", "course.judge", EXERCISE, answer],
        env=MARKED | {"TMPDIR": str(temporary)},
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    stop = time.monotonic() + 120
    while not note.exists() and time.monotonic() < stop:
        time.sleep(0.05)
    assert note.exists()
    alike = [p for p in psutil.Process(judge.pid).children() if str(answer) in p.cmdline()]
    assert len(alike) == 1, "the ranks' server is not forked from the judge: it loads torch anew"
    os.kill(judge.pid, signal.SIGKILL)
    judge.wait()
    assert gone(besides=judges.process.pid)
    assert left_in(temporary) == []
