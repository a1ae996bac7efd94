"""Run every lesson in reading order, a line each: `make lessons`.

Ledgers, figures and what each lesson printed go to build/lessons, or with --keep to results/, from
where README's tables are made. Exits 1 if a lesson failed.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch
from tqdm import tqdm

from course.lessons import LESSONS, ROOT, flags_of
from course.machines import COUNTED, counted, name_of
from course.ranks import lives

DEADLINE = 600.0  # seconds for one lesson: many times what the slowest takes
STACK_WAIT = 10.0  # seconds that hung ranks get, at most, to write their stacks down


def run_one(
    lesson: str,
    folder: Path,
    launcher: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    deadline: float = DEADLINE,
) -> dict:
    """Run one lesson as a learner does, or by a launcher, which gets the lesson's path.

    Return its ledger, with its seconds, its exit status ("hung" after the deadline), its output.
    """
    kept = folder / f"{name_of(lesson)}.json"
    figure = folder / f"{name_of(lesson)}.png"
    argv = ["--figure", str(figure)] if "--figure" in flags_of(lesson) else []
    with tempfile.TemporaryDirectory() as place:
        written = Path(place, "ledger.json")
        env = {"LESSON_JSON": str(written)} | (environment or {})
        started = time.monotonic()
        status, said = watch([*launcher, str(ROOT / lesson), *argv], env, deadline)
        seconds = time.monotonic() - started
        told = ledger_in(written)
    told |= {"lesson": lesson, "exit": status, "seconds": round(seconds, 1)}
    told |= {"torch": torch.__version__, "python": platform.python_version()}
    told |= {"cpus": os.cpu_count(), "date": time.strftime("%F")}
    kept.write_text(json.dumps(told, indent=1) + "\n")
    said = discreet(said)
    kept.with_suffix(".txt").write_text(said, encoding="utf-8")
    return told | {"output": said}


def discreet(text: str) -> str:
    """Without what names you: the clone's place, your home, this host and its addresses."""
    instead = {str(ROOT): ".", str(Path.home()): "~", socket.gethostname(): "host"}
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            instead[address.address.partition("%")[0]] = "ADDRESS"
    names = instead.keys() - {"/", "127.0.0.1", "::1", "localhost"}
    for name in sorted(names, key=len, reverse=True):  # the clone may lie in your home
        text = re.sub(rf"(?<![\w.:]){re.escape(name)}(?![\w:])", instead[name], text)
    return text


def ledger_in(written: Path) -> dict:
    """What a lesson wrote; an empty ledger if it was ended before that, or meanwhile."""
    try:
        return json.loads(written.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {"ledger": []}


def watch(arguments: Sequence[str], environment: dict, deadline: float) -> tuple[int | str, str]:
    """Run Python; return its exit status, or "hung", and what it printed. Nothing of it stays."""
    env = os.environ | {"PYTHONFAULTHANDLER": "1"} | environment
    command = [sys.executable, *arguments]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        running = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env)
        try:
            status = running.wait(deadline)
        except subprocess.TimeoutExpired:
            status = "hung"
            ask_for_stacks(running.pid)
        finally:
            end(running)
        output.seek(0)
        return status, output.read()


def ask_for_stacks(pid: int) -> None:
    """Make all that this process has started write its stack to its output, and abort."""
    process = psutil.Process(pid)
    hung = process.children(recursive=True) or [process]
    if process not in hung:
        process.suspend()  # a launcher would end the others as soon as one has aborted
    stop = time.monotonic() + STACK_WAIT
    for each in hung:  # one after another, or their lines would mix
        with contextlib.suppress(psutil.Error):  # it has just ended
            if sys.platform == "linux":
                each.rlimit(psutil.RLIMIT_CORE, (0, 0))  # a stack, and no dump of its memory
            each.send_signal(signal.SIGABRT)
        while lives(each) and time.monotonic() < stop:
            time.sleep(0.02)


def end(running: subprocess.Popen) -> None:
    """Leave none of its processes behind."""
    if running.poll() is None:
        process = psutil.Process(running.pid)
        started = process.children(recursive=True)
        for each in [*started, process]:
            with contextlib.suppress(psutil.Error):
                each.kill()
        running.wait()
        psutil.wait_procs(started, timeout=10)  # a kill takes its time


def run_many(runs: dict[str, Callable[[], dict]]) -> list[str]:
    """Call what runs each lesson, print a row under its label; return the labels that failed."""
    failed = []
    total = Counter()
    started = time.monotonic()
    bar = tqdm(runs, bar_format="{n}/{total} {bar} {desc}", leave=False, file=sys.stderr)
    heads = " ".join(f"{how:>9}" for how in COUNTED)
    print(f"{'lesson':50} {heads} {'seconds':>8}")
    for label in bar:
        bar.set_description_str(label)
        told = runs[label]()
        found = counted(told["ledger"])
        total += found
        row = " ".join(f"{found[how]:9}" for how in COUNTED)
        bar.write(f"{label:50} {row} {told['seconds']:8.1f}", file=sys.stdout)
        if told["exit"]:
            failed.append(label)
            bar.write(f"  exit status {told['exit']}:\n{told['output'][-3000:]}", file=sys.stdout)
    summed = ", ".join(f"{total[how]} {how}" for how in COUNTED)
    print(f"\n{len(runs) - len(failed)} of {len(runs)} lessons passed ({summed})", end=" ")
    print(f"in {time.monotonic() - started:.0f} s")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep", action="store_true", help="into results/, for README")
    parser.add_argument("--only", default="", metavar="TEXT", help="lessons whose path holds it")
    options = parser.parse_args()
    folder = ROOT / ("results/lessons" if options.keep else "build/lessons")
    folder.mkdir(parents=True, exist_ok=True)
    lessons = [lesson for lesson in LESSONS if options.only in lesson]
    failed = run_many({lesson: lambda lesson=lesson: run_one(lesson, folder) for lesson in lessons})
    print(f"Ledgers and figures: {folder.relative_to(ROOT)}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
