"""Harm that a rank does to itself, to others or to its disk, at a line that a seed has drawn.

`python chaos.py SCRIPT ARGUMENTS` runs the script as `python SCRIPT ARGUMENTS` would. The fault
stands in the environment variable FAULT. It happens once: when it does, it first says so in a file.
"""

import json
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

WRITING = ("write_checkpoint", "write_durably", "sync_folder", "to_bytes")


class Fault:
    """One thing that goes wrong: on which rank, before how many lines of the script, and what."""

    def __init__(
        self,
        what: str,
        rank: int = 0,
        line: int = 0,
        writing: bool = False,
        seconds: float = 0,
    ) -> None:
        self.what = what
        self.rank = rank
        self.line = line  # the script's n-th line that this rank runs, or
        self.writing = writing  # the n-th of those that write a checkpoint
        self.seconds = seconds  # and so long after it, wherever it is then: within a line

    def __repr__(self) -> str:
        where = " of those that write" if self.writing else ""
        later = f" and {1000 * self.seconds:.0f} ms" if self.seconds else ""
        return f"{self.what}, rank {self.rank}, line {self.line}{where}{later}"

    def written(self) -> str:
        return json.dumps(vars(self))


def run_with(fault: str, script: str, folder: str, argv: list[str]) -> tuple[int, int]:
    """Run the script to its end; return how many lines of it this rank ran, and how many to write.

    `folder` holds what ranks and harness say to each other.
    """
    notes = Path(folder)
    rank = int(os.environ["RANK"])
    (notes / f"pid-{rank}").write_text(str(os.getpid()))
    wanted = Fault(**json.loads(fault)) if fault else None
    if wanted and (wanted.rank != rank or (notes / "fired").exists()):
        wanted = None
    counter = Lines(script, wanted, partial(fire, notes))
    sys.argv = [script, *argv]
    sys.settrace(counter.enter)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        sys.settrace(None)
    return counter.all, counter.writing


class Lines:
    """Counts the script's lines as they run, and fires at the one that was drawn."""

    def __init__(self, script: str, fault: Fault | None, fire: Callable) -> None:
        self.script = script
        self.fire = fire
        self.fault = fault
        self.all = 0
        self.writing = 0

    def enter(self, frame: FrameType, event: str, argument: object) -> Callable | None:
        return self.line if frame.f_code.co_filename == self.script else None

    def line(self, frame: FrameType, event: str, argument: object) -> Callable:
        if event == "line":
            self.all += 1
            self.writing += frame.f_code.co_name in WRITING
            fault = self.fault
            if fault and fault.line == (self.writing if fault.writing else self.all):
                self.fault = None
                self.fire(fault)
        return self.line


def fire(notes: Path, fault: Fault) -> None:
    if fault.seconds:
        threading.Timer(fault.seconds, happen, (notes, fault)).start()
    else:
        happen(notes, fault)


def happen(notes: Path, fault: Fault) -> None:
    """Say that it happens now, and what was saved by then; do it."""
    checkpoints = notes / "checkpoints"
    saved = sorted(path.name for path in checkpoints.glob("step-*") if not path.suffix)
    (notes / "firing").write_text(json.dumps({"saved": saved, "pid": os.getpid()}))
    (notes / "firing").rename(notes / "fired")
    kill = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
    kill["hup"] = signal.SIGHUP
    what, _, whom = fault.what.partition(" ")
    if what == "fill":
        fill(checkpoints / "balloon")
    elif whom == "agent":
        os.kill(os.getppid(), kill[what])
    elif whom == "all":
        for path in sorted(notes.glob("pid-*"), reverse=True):
            os.kill(int(path.read_text()), kill[what])
    else:
        os.kill(os.getpid(), kill[what])


def fill(balloon: Path) -> None:
    """Take all the room that the disk has left."""
    with open(balloon, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


if __name__ == "__main__":
    if os.environ["RANK"] == "1" and Path(os.environ["NOTES"], "fired").exists():
        time.sleep(2)  # it comes back late: meanwhile the others must not take its old address
    run_with(os.environ["FAULT"], sys.argv[1], os.environ["NOTES"], sys.argv[2:])
