"""The command `course`: its parts, each a module with `add(commands)`, and how it begins and ends.

`course` alone imports neither torch nor pytest: it answers at once, and before either works.
"""

import argparse
import codecs
import os
import signal
import sys

from course import answers, check, doctor, new, overview, plan_command, predict, write
from course.book import ROOT
from course.terminal import plain

PARTS = (
    overview,
    predict,
    answers,
    check,
    doctor,
    plan_command,
    new,
    write,
)  # in the order in which --help lists their commands


def parser() -> argparse.ArgumentParser:
    """All commands; each sets `run`, a function of the options that returns the exit status."""
    whole = argparse.ArgumentParser(
        "course", description="Without a command: the path, how far you are, and what comes next."
    )
    whole.set_defaults(run=overview.show)
    commands = whole.add_subparsers(title="commands", metavar="COMMAND", prog="course")
    for part in PARTS:
        part.add(commands)
    return whole


def run(argv: list[str] | None = None) -> int:
    """Be the command `course`; return its exit status."""
    if sys.platform == "win32":
        sys.exit("torch.distributed's examples here need Linux: use WSL2, and clone inside it.")
    if not (ROOT / "exercises").is_dir():
        sys.exit(
            f"`course` works inside a clone of the course, and {ROOT} is none.\n"
            "Clone the repository, and in it: pip install -e ."
        )
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what started us may ignore it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what we have started ends with us
    codecs.register_error("plain", plain)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="plain")  # a terminal that knows no ticks
    options = parser().parse_args(argv)
    try:
        status = options.run(options)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.filename is None:
            raise
        sys.exit(f"{error.filename}: {error.strerror}.")
