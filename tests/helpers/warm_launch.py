"""Do what `python lesson.py` does, in processes that need not load torch again.

torchrun and its ranks are the real ones, each a process of its own. Only, all of them are forked
from one process of the harness, which has torch loaded and a single thread: torchrun asks it for
each rank. (To fork them from torchrun itself, whose store has threads, hangs one time in hundreds.)
What this cannot see, a module that a lesson uses without importing it, tests/form/test_lessons.py
does.
"""

import contextlib
import faulthandler
import math
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import torch

from course.ranks import lives, run
from course.subreaper import adopt_orphans

CAN_FORK = sys.platform == "linux" and not torch.cuda.is_available()


def run_warm(
    argv: list[str], cwd: Path, env: dict[str, str], timeout: float
) -> subprocess.CompletedProcess:
    """Do what `subprocess.run([sys.executable, *argv], ...)` does, its output captured.

    Nothing that was started may outlive it by more than ten seconds.
    """
    if not CAN_FORK:
        how = {"capture_output": True, "text": True, "timeout": timeout}
        return subprocess.run([sys.executable, *argv], cwd=cwd, env=env, **how)
    how = {"deadline": timeout, "quiet": timeout, "group": False}
    ((code, output, errors),) = run(_start, 1, argv, cwd, env, **how)
    return subprocess.CompletedProcess(argv, code, output, errors)


def _start(argv: list[str], cwd: Path, env: dict[str, str]) -> tuple[int, str, str]:
    """On one of the harness's ranks: fork the launcher and its ranks; wait for the launcher."""
    adopt_orphans()
    os.chdir(cwd)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        os.dup2(output.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        launcher = os.fork()
        if launcher == 0:
            be_launcher(there, argv, env)
        there.close()
        status = _serve(here, launcher)
        stop = time.monotonic() + 10
        while left := [one for one in psutil.Process().children() if lives(one)]:
            assert time.monotonic() < stop, f"outlived their launcher: {left}"
            time.sleep(0.02)
        output.seek(0)
        errors.seek(0)
        return os.waitstatus_to_exitcode(status), output.read(), errors.read()


def _serve(here: socket.socket, launcher: int) -> int:
    """Fork what the launcher asks for, and tell it what has ended, until it has ended itself."""
    ended = {}
    here.settimeout(0.02)
    while launcher not in ended:
        with contextlib.suppress(TimeoutError):
            if asked := here.recv(1_000_000):
                what, *words = pickle.loads(asked)
                answer = _fork(*words) if what == "fork" else ended.get(*words)
                here.send(pickle.dumps(answer))
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                ended[found[0]] = found[1]
    return ended[launcher]


def _fork(argv: list[str], env: dict[str, str]) -> int:
    """Fork a main program; return its number once it has a session of its own."""
    begun, beginning = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(beginning)
        be_main_program(argv, env)
    os.close(beginning)
    os.read(begun, 1)
    os.close(begun)
    return pid


def be_launcher(there: socket.socket, argv: list[str], env: dict[str, str]) -> None:
    """Be the main program that is asked for; should it be torchrun, its ranks are forked."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    one_at_a_time = threading.Lock()

    def ask(*words: object) -> object:
        with one_at_a_time:
            there.send(pickle.dumps(words))
            return pickle.loads(there.recv(1000))

    subprocess_handler.Popen = partial(Forked, ask)
    be_main_program(argv, env)


class Forked:
    """What torchrun uses of `subprocess.Popen([python, "-u", SCRIPT], start_new_session=True)`.

    Another process forks it, and hears of its end.
    """

    def __init__(self, ask: Callable, args: tuple, env: dict[str, str], **how: object) -> None:
        _, unbuffered, *argv = args
        known = {"stdout": None, "stderr": None, "start_new_session": True}
        assert (unbuffered, how) == ("-u", known), (args, how)
        env = {name: value for name, value in env.items() if name != "LAUNCHER"}  # not its parent
        self.args = args
        self.ask = ask
        self.returncode: int | None = None
        self.pid = ask("fork", argv, env)

    def poll(self) -> int | None:
        if self.returncode is None:
            status = self.ask("status", self.pid)
            if status is not None:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        stop = time.monotonic() + (math.inf if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > stop:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.02)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def be_main_program(argv: list[str], env: dict[str, str]) -> None:
    """Do what `python ARGV` does, to the end of this process."""
    # torch builds its pool of threads anew after a fork. Two threads that ask for it at once would
    # end the process ("Invalid thread pool!", seen once in torch 2.15); now there is only one.
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ |= env
    faulthandler.disable()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):  # none outlives an exec
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 0
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            sys.path.insert(0, str(Path(argv[0]).resolve().parent))
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
