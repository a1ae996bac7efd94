"""Run a function on several ranks of this machine, and say truly what became of each.

    from course.ranks import run

    def total(x: int) -> float:
        y = torch.tensor([float(x + dist.get_rank())])
        dist.all_reduce(y)
        return y.item()

    assert run(total, 4, 10) == [46.0] * 4

Ranks are forked from a server that has torch loaded and no threads running, so a run costs a tenth
of a second where torchrun takes three to five. Every rank is a new process, has one thread, its own
session and its own output file; the parent holds the store open on a port the kernel chose. A rank
that is done keeps its connections until all are: a rank that still waits for it hangs, and gets no
error. Files have no name and go with the processes that hold them.

A hang is a state: for 1.5 s, every rank that has not returned was asleep, with all that it
started. An endless loop shows in the CPU time that it uses. So neither depends on what else the
machine does. Then every rank is asked for its stack, all are killed, and the error names who waits
where. Linux says how often each thread was scheduled; elsewhere CPU time alone tells a sleeping
rank, which is untried. Tests and the exercises' graders share this file.
"""

import contextlib
import ctypes
import faulthandler
import importlib
import itertools
import math
import operator
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
from collections.abc import Callable, Iterable, Iterator
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

QUIET = 1.5  # seconds of sleep on every rank that make a hang; TCP asks again after 1 s
# The same where ranks join by themselves: a TCPStore's client asks the DNS for its peer's name, and
# even for that of 127.0.0.1, written as an IPv6 address. A question that is lost costs 5 s.
ALONE = 7.0
GRACE = 1.5  # seconds of CPU that the others may use once one rank has failed
OUTPUT_LIMIT = 20_000_000  # bytes one rank may print
WORD_LIMIT = 1_000_000_000  # bytes one rank may return
STACK_WAIT = 3.0  # seconds that hung ranks get to write their stacks down
STARTUP = 50.0  # seconds that the ranks get to start and to find each other
LONGEST = 10  # deadlines, by the clock on the wall, that a run gets however busy the machine is
LOOK = 0.2  # seconds from one look at the ranks' threads to the next
POLLER = "gloo_tcp_loop"  # gloo's thread at the sockets: it wakes every 10 ms, whatever happens
NOISE = 0.05  # of a core: what a rank may use asleep; each gloo group's poller uses 0.002
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
    waited: float = 0  # seconds that a hung rank was given, since all had met or one had failed
    asleep: bool = False  # whether a hung rank slept; else it worked

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
    function: Callable,
    world_size: int,
    *args: object,
    deadline: float = 30,
    quiet: float | None = None,
    group: bool = True,
) -> list:
    """Call `function(*args)` on every rank; return what the ranks returned, in order.

    The ranks hang if all that have not returned are asleep for `quiet` seconds (QUIET, or ALONE
    without a group): choose more if they sleep on purpose, or communicate over a throttled link.
    `deadline` is in seconds of CPU, of any rank and what it started, from when all ranks have met;
    on the clock the run gets LONGEST times that. With `group`, a gloo process group is there; its
    own timeout lies beyond both. Raises RanksFailed if any rank raises, exits, is killed, hangs,
    prints more than OUTPUT_LIMIT or returns more than WORD_LIMIT bytes.
    """
    how = {"deadline": deadline, "quiet": quiet, "group": group}
    outcomes = attempt(function, world_size, *args, **how)
    if any(o.kind != "returned" for o in outcomes):
        raise RanksFailed(outcomes)
    return [o.value for o in outcomes]


def attempt(
    function: Callable,
    world_size: int,
    *args: object,
    deadline: float = 30,
    quiet: float | None = None,
    group: bool = True,
    own: Iterable[Path] = (),
    trusted: bool = True,
) -> list[Outcome]:
    """Like `run`, but return every rank's Outcome and raise nothing.

    A hang is told by lines of files under the first of the folders `own` that has any; if none is
    given, under that of the function's file or of the repository. What a rank returns that is not
    `trusted` must be built-in types alone (course/plain.py); else it may be whatever can be
    pickled, and unpickling may run code here. Threads take turns.
    """
    module = sys.modules[function.__module__]
    file = Path(getattr(module, "__file__", None) or __file__)
    if not (is_library(str(file)) or file.resolve().is_relative_to(COURSE)):
        cloudpickle.register_pickle_by_value(module)  # ranks need not import what a test imports
    work = cloudpickle.dumps((function, args))
    own = [*own] or [file.parent, COURSE.parent]
    if quiet is None:
        quiet = QUIET if group else ALONE
    with one_at_a_time, contextlib.ExitStack() as files:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = [Rank(Outcome(rank), files) for rank in range(world_size)]
        try:
            for rank in ranks:
                rank.start((rank.outcome.rank, world_size, store.port, deadline, group), work)
            _watch(ranks, deadline, quiet, trusted, own)
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
        self.bell, self.rope = os.pipe()  # it rings as it begins, and once its word is written
        self.began = False
        self.switches: dict[Path, str] = {}  # how often each thread was put on a core
        self.used = 0.0  # seconds of CPU, of what it started, too
        self.used_before = 0.0  # when all had met, or one had failed
        self.used_at_work = 0.0  # when it was last seen at work
        self.worked = 0.0  # when that was
        self.looked = 0.0  # when it was last looked at
        os.set_blocking(self.bell, False)
        files.callback(os.close, self.bell)
        files.callback(os.close, self.rope)

    def start(self, place: tuple, work: bytes) -> None:
        _wake_server()
        descriptors = [self.output.fileno(), self.stack.fileno(), self.word.fileno(), self.rope]
        handed = [Handed(descriptor) for descriptor in descriptors]
        self.process = server.Process(target=_be_rank, args=(place, work, handed), daemon=False)
        self.process.start()

    def look(self, served: bool = False) -> None:
        """Find out whether the rank, or what it started, has worked since the last look.

        If it is `served`, what it waits for is about to come.
        """
        self.looked = time.monotonic()
        switches = {}
        states = set()
        with contextlib.suppress(psutil.Error, OSError):  # one of them has just ended
            process = psutil.Process(self.process.pid)
            family = [process, *process.children(recursive=True)]
            self.used = sum(sum(each.cpu_times()[:4]) for each in family)  # the dead included
            for thread, state, count in itertools.chain(*[_threads(each.pid) for each in family]):
                switches[thread] = count
                states.add(state)
        runs = states & {"R", "D"}  # on a core or waiting for one, or for the disk
        allowed = NOISE * max(self.looked - self.worked, 0.5)
        if served or runs or switches != self.switches or self.used - self.used_at_work > allowed:
            self.worked = self.looked
            self.used_at_work = self.used
        self.switches = switches

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


def _threads(pid: int) -> Iterator[tuple[Path, str, str]]:
    """Each thread's file, state, and how often it was put on a core; gloo's poller left out."""
    for file in Path(f"/proc/{pid}/task").glob("*/status"):
        told = dict(line.partition(":\t")[::2] for line in file.read_text().splitlines())
        if told["Name"] != POLLER:
            counts = [value for name, value in told.items() if name.endswith("ctxt_switches")]
            yield file, told["State"][0], " ".join(counts)


def _works_for_them() -> bool:
    """Whether a thread of this process, which serves the ranks' store, waits for a core."""
    own = str(threading.get_native_id())
    states = {state for file, state, _ in _threads(os.getpid()) if file.parent.name != own}
    return bool(states & {"R", "D"})


def _watch(
    ranks: list[Rank], deadline: float, quiet: float, trusted: bool, own: list[Path]
) -> None:
    """Fill in the outcomes as they come; give up once the others hang."""
    limits = [  # seconds that all sleep, of CPU, and on the clock
        (math.inf, math.inf, STARTUP),  # until all have met
        (quiet, deadline, LONGEST * deadline),
        (QUIET, GRACE, LONGEST * GRACE),  # once one has failed
    ]
    phase = 0
    since = time.monotonic()
    while running := [rank for rank in ranks if rank.outcome.kind == "running"]:
        signs = [rank.bell for rank in running] + [rank.process.sentinel for rank in running]
        silent = not connection.wait(signs, timeout=LOOK)
        served = silent and _works_for_them()
        for rank in running:
            o = rank.outcome
            ended = rank.process.exitcode is not None  # look first: its last words may still come
            if not rank.hear(trusted) and ended:
                _died(rank, own)
            elif os.fstat(rank.output.fileno()).st_size > OUTPUT_LIMIT:
                o.kind = "flooded"
                o.text = f"printed more than {OUTPUT_LIMIT:,} bytes"
            elif silent:
                rank.look(served)
        now = time.monotonic()
        failed = {rank.outcome.kind for rank in ranks} - {"running", "returned"}
        reached = 2 if failed else int(all(rank.began for rank in ranks))
        if reached > phase:
            phase = reached
            since = now
            for rank in ranks:
                rank.used_before = rank.used
        slept = min(rank.looked - max(since, rank.worked) for rank in running)
        used = max(rank.used - rank.used_before for rank in running)
        if any(map(operator.gt, (slept, used, now - since), limits[phase])):
            break
    for rank in running:
        rank.outcome.waited = now - since
    _ask_for_stacks([rank for rank in running if rank.outcome.kind == "running"], trusted, own)


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
        o.stack = told + _stacks_of_children(rank, len(told))
        frames = frames_of(told)
        o.frames = own_frames(frames, own)
        o.asleep = rank.worked < rank.looked
        o.text = where(frames, o.frames, works=not o.asleep)


def _stacks_of_children(rank: Rank, before: int) -> str:
    """What the processes that it has forked say of their stacks, in half a second."""
    asked = []
    with contextlib.suppress(psutil.Error, OSError):  # one of them has just ended
        for child in psutil.Process(rank.process.pid).children(recursive=True):
            status = Path(f"/proc/{child.pid}/status").read_text()
            caught = int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16)
            if caught >> signal.SIGUSR1 - 1 & 1:  # faulthandler would answer; else it would die
                child.send_signal(signal.SIGUSR1)
                asked.append(child.pid)
    if not asked:
        return ""
    time.sleep(0.5)
    return f"\n--- processes {asked}, which it started ---\n{_read(rank.stack)[before:]}"


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
    wrappers = ("inner", "wrapper")  # what torch's decorators call themselves
    names = [f for f in called if not f.startswith(("_", "<")) and f not in wrappers] or called
    return f"{does} in {names[0]}, called from {own[0]}"


# The rank's side


def _be_rank(place: tuple, work: bytes, handed: list[int]) -> None:
    """Become one rank: own session, own output, one thread; send (kind, value, text); stay."""
    rank, world_size, port, deadline, group = place
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
            patience = timedelta(seconds=STARTUP + LONGEST * deadline + 60)
            dist.init_process_group("gloo", timeout=patience)
            _meet(world_size)
        os.write(rope, BEGUN)
        told = "returned", function(*args), ""
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
    while True:
        time.sleep(1000)  # until the parent ends all: who leaves closes connections that others use


def _meet(world_size: int) -> None:
    """Wait until all have joined: gloo lets a rank go, and leave, while others still connect."""
    store = dist.distributed_c10d._get_default_store()
    if store.add("joined", 1) == world_size:
        store.set("all joined", "")
    store.wait(["all joined"])
