"""Run a function on several ranks of this machine, and say truly what became of each.

    from course.ranks import run

    def total(x: int) -> float:
        y = torch.tensor([float(x + dist.get_rank())])
        dist.all_reduce(y)
        return y.item()

    assert run(total, 4, 10) == [46.0] * 4

Ranks are forked from a server that has torch loaded and no threads running, so a run costs a tenth
of a second where torchrun takes three to five. Every rank is a new process, has one thread, its own
session and its own output file; the parent holds the store open on a port the kernel chose. When a
deadline passes, every rank is asked for its stack, all are killed, and the error names who waits
where. Files have no name and go with the processes that hold them. Tests and the exercises' graders
share this file.
"""

import contextlib
import ctypes
import faulthandler
import importlib
import math
import os
import pickle
import re
import signal
import socket
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, forkserver, get_context, reduction
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO

import cloudpickle
import psutil
import torch
import torch.distributed as dist

from course.plain import read

if os.name != "posix":
    sys.exit("Ranks are forked processes, which Windows has not: use WSL2, where all of this runs.")

GRACE = 1.5  # seconds that the others get to end by themselves once one rank has failed
OUTPUT_LIMIT = 20_000_000  # bytes one rank may print
WORD_LIMIT = 1_000_000_000  # bytes one rank may return
STACK_WAIT = 3.0  # seconds that hung ranks get to write their stacks down
STARTUP = 50.0  # seconds that the ranks get to start and to find each other
PATIENCE = 6  # deadlines, or graces, for ranks that would compute and are kept from it by others
PRELOAD = ["torch.distributed." + name for name in ("fsdp", "tensor.parallel", "pipelining")]
PRELOAD += ["torch.distributed.checkpoint", "torch._dynamo", "cloudpickle", "course.grading"]
PRELOAD += ["pytest"]  # it may be the main program, which every rank loads again
OF_LESSONS = ["sklearn.datasets"]  # their tests' ranks need it, and no exercise
BEGUN, DONE = b"(", b")"  # how a rank rings
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

COURSE = Path(__file__).resolve().parent
server = get_context("forkserver")
server.set_forkserver_preload([*PRELOAD, *OF_LESSONS, "course.rank_server"])
one_at_a_time = threading.Lock()  # when the ranks have ended, all that the server has is a stray


@dataclass
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}, in {self.function}"


@dataclass
class Outcome:
    """What became of one rank."""

    rank: int
    kind: str = "running"  # returned, raised, exited, killed, hung or flooded
    value: object = None  # what the function returned
    text: str = ""  # the traceback, the exit status, the signal, or where the rank hangs
    stack: str = ""  # every thread of a rank that hangs or crashed, with file and line
    frames: list[Frame] = field(default_factory=list)  # those of the caller's own, innermost first
    output: str = ""  # what the rank printed
    when: float = 0  # of a raise or exit, on the clock all ranks share; 0 if killed
    waited: float = 0  # seconds that a hung rank was given, from when all ranks had met

    def __str__(self) -> str:
        return f"rank {self.rank} {self.kind}: {self.text}"


class RanksFailed(AssertionError):
    """At least one rank did not return. `outcomes` holds every rank's, in order."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        later = {"hung": 1, "returned": 2}  # causes first, then what they led to
        lines = [str(o) for o in sorted(outcomes, key=lambda o: (later.get(o.kind, 0), o.when))]
        for o in outcomes:
            if o.stack:
                lines.append(f"--- rank {o.rank}, stack ---\n{o.stack}")
            if o.output:
                lines.append(f"--- rank {o.rank} printed ---\n{o.output[-2000:]}")
        super().__init__("\n".join(lines))


def run(
    function: Callable, world_size: int, *args: object, deadline: float = 30, group: bool = True
) -> list:
    """Call `function(*args)` on every rank; return what the ranks returned, in order.

    `deadline` is in seconds, from when all ranks have met. It is put off, at most PATIENCE times
    over, while a rank that would compute has not had so much of a core. With `group`, a gloo
    process group is there; its own timeout lies far beyond the deadline. Raises RanksFailed if any
    rank raises, exits, is killed, hangs, prints more than OUTPUT_LIMIT or returns more than
    WORD_LIMIT bytes.
    """
    outcomes = attempt(function, world_size, *args, deadline=deadline, group=group)
    if any(o.kind != "returned" for o in outcomes):
        raise RanksFailed(outcomes)
    return [o.value for o in outcomes]


def attempt(
    function: Callable,
    world_size: int,
    *args: object,
    deadline: float = 30,
    group: bool = True,
    stay: bool = False,
    own: Iterable[Path] = (),
    trusted: bool = True,
) -> list[Outcome]:
    """Like `run`, but return every rank's Outcome and raise nothing.

    With `stay`, a rank that is done keeps its connections until all are: who still waits for it
    hangs, and gets no error. A hang is told by lines of files under the first of the folders `own`
    that has any; if none is given, under that of the function's file or of the repository. What a
    rank returns that is not `trusted` must be built-in types alone (course/plain.py); else it may
    be whatever can be pickled, and unpickling may run code here. Threads take turns.
    """
    module = sys.modules[function.__module__]
    file = Path(getattr(module, "__file__", None) or __file__)
    if not (is_library(str(file)) or file.resolve().is_relative_to(COURSE)):
        cloudpickle.register_pickle_by_value(module)  # ranks need not import what a test imports
    work = cloudpickle.dumps((function, args))
    own = [*own] or [file.parent, COURSE.parent]
    with one_at_a_time, contextlib.ExitStack() as files:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = [Rank(Outcome(rank), files) for rank in range(world_size)]
        try:
            for rank in ranks:
                place = (rank.outcome.rank, world_size, store.port, deadline, group, stay)
                rank.start(place, work)
            _watch(ranks, deadline, trusted, own)
        finally:
            _end(ranks)
        for rank in ranks:
            rank.outcome.output = _read(rank.output, OUTPUT_LIMIT)
    return [rank.outcome for rank in ranks]


# The parent's side


def fork_server() -> None:
    """Make the ranks' server a fork of this process, so that torch is loaded once for both.

    Call it first, while there is one thread and nothing was computed. Without it, the first run
    starts a server of its own, which loads all of PRELOAD anew; so it does on macOS, where a
    process that has loaded frameworks may not fork, and from Python 3.14 on, whose server asks
    for a key that only `multiprocessing` has.
    """
    if sys.platform != "linux" or sys.version_info >= (3, 14):
        return
    for name in PRELOAD:
        importlib.import_module(name)
    with socket.socket(socket.AF_UNIX) as listener:
        address = connection.arbitrary_address("AF_UNIX")
        listener.bind(address)
        os.chmod(address, 0o600)
        listener.listen()
        alive, hold = os.pipe()  # the server stays up as long as somebody holds the other end
        pid = os.fork()
        if pid == 0:
            _be_server(listener.detach(), alive)
        os.close(alive)
    known = forkserver._forkserver
    known._forkserver_address, known._forkserver_alive_fd = address, hold
    known._forkserver_pid = pid


def _be_server(listener: int, alive: int) -> None:
    """Do what a forked copy must do to be what `multiprocessing` would have started."""
    try:
        kept = {0, 1, 2, listener, alive}
        for descriptor in {int(name) for name in os.listdir("/dev/fd")} - kept:
            with contextlib.suppress(OSError):  # the one through which the folder was read
                os.close(descriptor)
        forkserver.main(listener, alive, ["course.rank_server"])  # until nobody holds `alive`
    finally:
        importlib.import_module("course.rank_server").leave()


class Handed:
    """A descriptor that a new process is given; it arrives as a number."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> tuple:
        return _arrived, (reduction.DupFd(self.descriptor),)


def _arrived(duplicate: object) -> int:
    descriptor = duplicate.detach()
    os.set_inheritable(descriptor, False)
    return descriptor


class Rank:
    """One rank as its parent sees it: a process, three files without a name, and a bell."""

    def __init__(self, outcome: Outcome, files: contextlib.ExitStack) -> None:
        self.outcome = outcome
        self.process: BaseProcess | None = None
        self.output: IO[bytes] = files.enter_context(tempfile.TemporaryFile())
        self.stack: IO[bytes] = files.enter_context(tempfile.TemporaryFile())
        self.word: IO[bytes] = files.enter_context(tempfile.TemporaryFile())  # what it returned
        self.bell, self.rope = (
            os.pipe()
        )  # the rank rings as it begins, and once its word is written
        self.began = False
        self.used_before = 0.0  # seconds of a core, when another rank failed
        os.set_blocking(self.bell, False)
        files.callback(os.close, self.bell)
        files.callback(os.close, self.rope)

    def start(self, place: tuple, work: bytes) -> None:
        _wake_server()
        descriptors = [self.output.fileno(), self.stack.fileno(), self.word.fileno(), self.rope]
        handed = [Handed(descriptor) for descriptor in descriptors]
        self.process = server.Process(target=_be_rank, args=(place, work, handed), daemon=False)
        self.process.start()

    def hear(self, trusted: bool) -> bool:
        """Take down the rank's word, if it has rung for that; never waits for it."""
        rung = b""
        with contextlib.suppress(BlockingIOError):
            rung = os.read(self.bell, 100)
        self.began = self.began or BEGUN in rung
        if DONE in rung:
            size = os.fstat(self.word.fileno()).st_size
            if size > WORD_LIMIT:
                self.outcome.kind = "raised"
                self.outcome.text = f"returned more than {WORD_LIMIT:,} bytes"
                return True
            word = os.pread(self.word.fileno(), size, 0)
            heard = _read_trusting(word) if trusted else _read_with_care(word)
            o = self.outcome
            o.kind, o.value, o.text, o.when = heard or ("raised", None, "sent what is no word", 0)
        return self.outcome.kind != "running"


def _read_trusting(word: bytes) -> tuple:
    """(kind, value, text, when), of any type that can be loaded here."""
    try:
        return pickle.loads(word)
    except Exception as error:  # a class that only the rank knows, perhaps
        return "raised", None, f"returned what cannot be unpickled here: {error!r}", 0


def _read_with_care(word: bytes) -> tuple | None:
    """(kind, value, text, when), of built-in types alone; None if it is anything else."""
    try:
        kind, value, text, when = read(word)
    except Exception:  # an answer may have written whatever it likes
        return None
    types = (str, str, float)
    if (type(kind), type(text), type(when)) != types or kind not in (
        "returned",
        "raised",
        "exited",
    ):
        return None
    return kind, value, text, when


class Stopwatch:
    """When a run is over: at its deadline, or GRACE after a failure; later for a starved rank."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.began: float | None = None  # when all ranks had met
        self.failed: float | None = None  # when the first of them had
        self.stop = time.monotonic() + STARTUP

    def is_over(self, ranks: list[Rank]) -> bool:
        now = time.monotonic()
        running = [rank for rank in ranks if rank.outcome.kind == "running"]
        if self.began is None and all(rank.began for rank in ranks):
            self.began = now
            self.stop = now + (GRACE if self.failed else self.deadline)
        kinds = {rank.outcome.kind for rank in ranks}
        if self.failed is None and kinds - {"running", "returned"}:
            self.failed = now
            self.stop = min(self.stop, now + GRACE)
            for rank in running:
                rank.used_before = _used(rank)
        since, seconds = (self.failed, GRACE) if self.failed else (self.began, self.deadline)
        if since and self.stop < now < since + PATIENCE * seconds and _starved(running, seconds):
            self.stop = now + seconds / 4
        return now > self.stop


def _watch(ranks: list[Rank], deadline: float, trusted: bool, own: list[Path]) -> None:
    """Fill in the outcomes as they come; give up when the time is over."""
    watch = Stopwatch(deadline)
    while running := [rank for rank in ranks if rank.outcome.kind == "running"]:
        signs = [rank.bell for rank in running] + [rank.process.sentinel for rank in running]
        connection.wait(signs, timeout=0.05)
        for rank in running:
            o = rank.outcome
            ended = rank.process.exitcode is not None  # look first: its last words may still come
            if not rank.hear(trusted) and ended:
                _died(rank, own)
            elif os.fstat(rank.output.fileno()).st_size > OUTPUT_LIMIT:
                o.kind = "flooded"
                o.text = f"printed more than {OUTPUT_LIMIT:,} bytes"
        if watch.is_over(ranks):
            break
    for rank in running:
        rank.outcome.waited = time.monotonic() - (watch.began or watch.stop)
    _ask_for_stacks([rank for rank in ranks if rank.outcome.kind == "running"], trusted, own)


def _starved(ranks: list[Rank], seconds: float) -> bool:
    """Whether one of them would compute, and has had less of a core than these seconds are worth.

    They count from the rank's start, or from when another rank failed.
    """
    return any(_used(rank) - rank.used_before < 0.7 * seconds for rank in _at_work(ranks))


def _used(rank: Rank) -> float:
    """Seconds of a core that the rank has used; without end if it is gone."""
    with contextlib.suppress(psutil.Error):
        used = psutil.Process(rank.process.pid).cpu_times()
        return used.user + used.system
    return math.inf


def _died(rank: Rank, own: list[Path]) -> None:
    """Say how the rank went without a word, and where if it crashed."""
    o = rank.outcome
    code = rank.process.exitcode
    o.kind = "killed" if code < 0 else "exited"
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
    o.text = f"{how}, before the function returned"
    stack = _read(rank.stack)
    if "Fatal Python error" in stack:
        o.stack = stack
        frames = frames_of(stack, crashed=True)
        o.frames = own_frames(frames, own)
        if frames:
            o.text = f"{how} at {(o.frames or frames)[0]}"


def _ask_for_stacks(hung: list[Rank], trusted: bool, own: list[Path]) -> None:
    """Tell where each hung rank is: faulthandler answers, even from inside C++."""
    if not hung:
        return
    working = _at_work(hung)
    for rank in hung:
        with contextlib.suppress(ProcessLookupError):  # it has ended just now
            os.kill(rank.process.pid, signal.SIGUSR1)
    stop = time.monotonic() + STACK_WAIT
    for rank in hung:
        o = rank.outcome
        while not (told := _read(rank.stack)).endswith(("in <module>\n", "...\n")):
            if time.monotonic() > stop:
                break
            time.sleep(0.02)
        if rank.hear(trusted):  # it has come back just now
            continue
        o.kind = "hung"
        o.stack = told
        frames = frames_of(told)
        o.frames = own_frames(frames, own)
        o.text = where(frames, o.frames, rank in working)


def _at_work(ranks: list[Rank]) -> list[Rank]:
    """Those whose main thread is on a core or waits for one; the others wait for something else."""
    seen = [0 for _ in ranks]
    for _ in range(5):
        for i, rank in enumerate(ranks):
            with contextlib.suppress(psutil.Error):
                seen[i] += psutil.Process(rank.process.pid).status() == psutil.STATUS_RUNNING
        time.sleep(0.02)
    return [rank for rank, times in zip(ranks, seen, strict=True) if times >= 3]


def _end(ranks: list[Rank]) -> None:
    """Kill the ranks and whatever they started; leave no zombie."""
    _wake_server()
    for rank in ranks:
        process = rank.process
        if process is None or process.pid is None:
            continue
        for kill in (os.killpg, os.kill):  # its group, and itself if it had not made one yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(process.pid, signal.SIGKILL)
    for rank in ranks:
        if rank.process is not None and rank.process.pid is not None:
            rank.process.join()
            rank.process.close()
    _end_strays()


def _end_strays(patience: float = 5) -> None:
    """Kill what dead ranks had started: the server has inherited it (course/rank_server.py)."""
    stop = time.monotonic() + patience
    while time.monotonic() < stop:  # one may start another while we look
        with contextlib.suppress(psutil.NoSuchProcess):  # an answer has killed the server
            strays = psutil.Process(_server()[0]).children(recursive=True)
            alive = [stray for stray in strays if lives(stray)]
            for stray in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    stray.kill()
            if alive:
                time.sleep(0.01)
                continue
        return


def lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def _server() -> tuple[int | None, int | None]:
    """The server's process number (in its parent) and the pipe that keeps it up.

    The names are private to multiprocessing, which offers no others; from Python 3.11 to 3.14 they
    are the same.
    """
    known = forkserver._forkserver
    return known._forkserver_pid, known._forkserver_alive_fd


def _wake_server() -> None:
    """Let the server go on, should an answer have stopped it: nothing starts or ends without it."""
    pid, _ = _server()
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _read(file: IO[bytes], limit: int = OUTPUT_LIMIT) -> str:
    """The file from its start, without moving the place where the rank writes."""
    return os.pread(file.fileno(), limit, 0).decode(errors="replace")


# Stacks


def frames_of(stack: str, crashed: bool = False) -> list[Frame]:
    """The main thread's frames in a faulthandler dump, innermost first.

    If it has `crashed`, those of the thread that did, if that has any.
    """
    main, _, dump = stack.partition("\n")
    threads = re.split(r"\n(?=(?:Current thread|Thread) 0x)", "\n" + dump)
    mine = [t for t in threads if main and main in t.partition("\n")[0]] or [dump]
    if crashed:
        mine = [t for t in threads if t.startswith("Current thread") and "File " in t] + mine
    found = re.findall(r'File "(.+)", line (\d+) in (.+)', mine[0])
    return [Frame(_unescaped(file), int(line), function) for file, line, function in found]


def _unescaped(path: str) -> str:
    """A path as it is; faulthandler escapes what is not ASCII."""
    code = r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})"
    return re.sub(code, lambda found: chr(int(found[1] or found[2] or found[3], 16)), path)


def is_library(file: str) -> bool:
    """Whether a file is the standard library's or an installed package's, wherever that lies."""
    parts = Path(file).parts
    if file.startswith("<") or "site-packages" in parts or "dist-packages" in parts:
        return True
    return Path(file).is_relative_to(sysconfig.get_path("stdlib"))


def own_frames(frames: list[Frame], own: Iterable[Path]) -> list[Frame]:
    """Those of files under the first folder that has any."""
    for folder in own:
        found = []
        for frame in frames:
            file = Path(frame.file)
            if file.is_relative_to(folder) and not is_library(frame.file) and file.parent != COURSE:
                found.append(frame)
        if found:
            return found
    return []


def where(frames: list[Frame], own: list[Frame], works: bool = False) -> str:
    """Condense a stack: waits in FUNCTION, called from FILE:LINE, in FUNCTION."""
    does = "busy" if works else "waits"
    if not frames:
        return "gave no stack"
    if not own:
        return f"{does} in {frames[0].function}, at {frames[0].file}:{frames[0].line}"
    if own[0] == frames[0]:
        return f"{does} at {own[0]}"
    called = [f.function for f in frames[: frames.index(own[0])]]
    names = [name for name in called if not name.startswith(("_", "<"))] or called
    return f"{does} in {names[0]}, called from {own[0]}"


# The rank's side


def _be_rank(place: tuple, work: bytes, handed: list[int]) -> None:
    """Become one rank: own session, own output, one thread; send (kind, value, text); leave."""
    rank, world_size, port, deadline, group, stay = place
    output, stack, word, rope = handed
    if sys.platform == "linux":  # PR_SET_PDEATHSIG: the server goes with the parent, we with it
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    os.close(_server()[1])  # held open, it would keep the server up
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent may ignore it
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(0)
    sys.stdout = open(1, "w", 1)
    sys.stderr = open(2, "w", 1)
    os.write(stack, f"0x{threading.get_ident():016x}\n".encode())
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    faulthandler.enable(file=stack)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    os.environ |= {"GLOO_SOCKET_IFNAME": LOOPBACK}  # whatever the host's name resolves to today
    try:
        function, args = pickle.loads(work)
        if group:
            patience = timedelta(seconds=STARTUP + PATIENCE * deadline + 60)
            dist.init_process_group("gloo", timeout=patience)
            _meet(world_size)
        os.write(rope, BEGUN)
        told = "returned", function(*args), ""
        if dist.is_initialized() and not stay:
            dist.destroy_process_group()
        said = pickle.dumps((*told, time.monotonic()))
    except SystemExit as error:
        said = pickle.dumps(("exited", None, f"called sys.exit({error.code!r})", time.monotonic()))
    except BaseException as error:
        trace = error.__traceback__.tb_next or error.__traceback__  # less this very frame
        text = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
        said = pickle.dumps(("raised", None, text, time.monotonic()))
    with open(word, "wb", closefd=False) as file:
        file.write(said)
    os.write(rope, DONE)
    sys.stdout.flush()
    while stay:
        time.sleep(1)  # until the parent ends us
    os._exit(0)  # no farewell: peers may be stuck, threads may run on


def _meet(world_size: int) -> None:
    """Wait until all have joined: gloo lets a rank go, and leave, while others still connect."""
    store = dist.distributed_c10d._get_default_store()
    if store.add("joined", 1) == world_size:
        store.set("all joined", "")
    store.wait(["all joined"])
