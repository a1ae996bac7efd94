"""What the tests of lessons on virtual nodes share: playing as nobody, waiting for the ranks."""

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
from sklearn.datasets import load_digits

from course import playing
from tests.helpers.leftovers import networks


def play_as_nobody(path: str, *changes: tuple[str, str]) -> tuple[int, list[dict]]:
    """Play a lesson as a user who can make a network only inside a user namespace.

    Root's clone has to lie where everybody may read it: in /opt, say, and not in root's home.
    """
    "localhost".encode("idna")  # getaddrinfo loads this, from where nobody may not read
    shut = [folder for folder in Path(sys.executable).parents if not folder.stat().st_mode & 0o001]
    assert not shut, f"nobody may enter {shut[-1]}: clone the repository elsewhere, into /opt, say"
    load_digits()  # what it imports and reads late, nobody may not be able to
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: or /proc/self stays root's
    return playing.play_here(path, changes, ())


def once_there(lesson: subprocess.Popen, processes: int, nets: int = 2) -> list[psutil.Process]:
    """All that the lesson has started, once so many processes are in so many networks."""
    for _ in range(4000):
        time.sleep(0.05)
        started = psutil.Process(lesson.pid).children(recursive=True)
        found = networks([process.pid for process in started])
        if (len(started), len(found)) == (processes, nets):
            return started
    raise AssertionError(f"no {processes} processes in {nets} networks: {started}")
