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
where. Tests and the exercises' graders share this file.
"""

import contextlib
import ctypes
import faulthandler
import os
import pickle
import re
import signal
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver, get_context
from pathlib import Path

import cloudpickle
import psutil
import torch
import torch.distributed as dist

GRACE = 1.5  # seconds that the others get to end by themselves once one rank has failed
OUTPUT_LIMIT = 20_000_000  # bytes one rank may print
PRELOAD = ["torch.distributed." + name for name in ("fsdp", "tensor.parallel", "pipelining")]
PRELOAD += ["torch.distributed.checkpoint", "torch._dynamo", "sklearn.datasets", "cloudpickle"]
PRELOAD += ["pytest"]  # it may be the main program, which every rank loads again
PRELOAD += ["course.subreaper"]

LIBRARY = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), __file__, "<")
LIBRARY += (str(Path(__file__).with_name("grading.py")),)  # neither sent to ranks nor named

server = get_context("forkserver")
server.set_forkserver_preload(PRELOAD)
alive: set[int] = set()  # the numbers of all ranks that run just now


@dataclass
class Outcome:
    """What became of one rank."""

    rank: int
    kind: str = "running"  # returned, raised, exited, killed, hung or flooded
    value: object = None  # what the function returned
    text: str = ""  # the traceback, the exit status, the signal, or where the rank hangs
    stack: str = ""  # every thread of a rank that hangs, with file and line
    output: str = ""  # what the rank printed
    when: float = 0  # of a raise or exit, on the clock all ranks share; 0 if killed

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

    `deadline` is in seconds, from the start of the ranks. With `group`, a gloo process group is
    there; its own timeout lies far beyond the deadline. Raises RanksFailed if any rank raises,
    exits, is killed, hangs, or prints more than OUTPUT_LIMIT bytes.
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
) -> list[Outcome]:
    """Like `run`, but return every rank's Outcome and raise nothing. With `stay`, a rank that is
    done keeps its connections until all are: who still waits for it hangs, and gets no error.
    """
    module = sys.modules[function.__module__]
    if not getattr(module, "__file__", __file__).startswith(LIBRARY):
        cloudpickle.register_pickle_by_value(module)  # ranks need not import what a test imports
    work = cloudpickle.dumps((function, args))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = []
        outcomes = [Outcome(rank) for rank in range(world_size)]
        try:
            for rank in range(world_size):
                inbox, outbox = server.Pipe(duplex=False)
                place = (rank, world_size, store.port, folder, deadline, group, stay)
                process = server.Process(target=_be_rank, args=(place, work, outbox), daemon=False)
                process.start()
                alive.add(process.pid)
                outbox.close()
                ranks.append((process, inbox))
            _watch(ranks, outcomes, folder, deadline)
        finally:
            for process, _ in ranks:
                _end(process)
            _end_what_ranks_started()
        for o in outcomes:
            o.output = _read(folder, f"{o.rank}.out")
    return outcomes


# The parent's side


def _watch(ranks: list, outcomes: list[Outcome], folder: str, deadline: float) -> None:
    """Fill in the outcomes as they come; give up at the deadline, or GRACE after a failure."""
    stop = time.monotonic() + deadline
    while running := [o for o in outcomes if o.kind == "running"]:
        connection.wait([ranks[o.rank][1] for o in running], timeout=0.05)
        for o in running:
            process, inbox = ranks[o.rank]
            ended = process.exitcode is not None  # look first: its last words may still come
            if not _receive(o, inbox) and ended:
                code = process.exitcode
                o.kind = "killed" if code < 0 else "exited"
                how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
                o.text = f"{how}, before the function returned"
            elif _size(folder, f"{o.rank}.out") > OUTPUT_LIMIT:
                o.kind = "flooded"
                o.text = f"printed over {OUTPUT_LIMIT:,} bytes"
        if any(o.kind not in ("running", "returned") for o in outcomes):
            stop = min(stop, time.monotonic() + GRACE)
        if time.monotonic() > stop:
            break
    hung = [o for o in outcomes if o.kind == "running"]
    for o in hung:
        os.kill(ranks[o.rank][0].pid, signal.SIGUSR1)  # faulthandler answers, even inside C++
    time.sleep(0.3 if hung else 0)
    for o in hung:
        o.kind = "hung"
        o.stack = _read(folder, f"{o.rank}.stack")
        o.text = where(o.stack)


def _receive(o: Outcome, inbox: connection.Connection) -> bool:
    try:
        if inbox.poll():
            o.kind, o.value, o.text, o.when = pickle.loads(inbox.recv_bytes())
    except EOFError:
        pass  # it left without a word; its exit status follows
    return o.kind != "running"


def _end(process) -> None:
    """Kill a rank and whatever it started; leave no zombie."""
    for kill in (os.killpg, os.kill):  # its group, and itself if it had not made one yet
        with contextlib.suppress(ProcessLookupError):
            kill(process.pid, signal.SIGKILL)
    process.join()
    alive.discard(process.pid)
    process.close()


def _end_what_ranks_started() -> None:
    """Kill what dead ranks had started: the server has inherited it (course/subreaper.py)."""
    for child in psutil.Process(forkserver._forkserver._forkserver_pid).children():
        if child.pid not in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in [child, *child.children(recursive=True)]:
                    process.kill()


def _size(folder: str, name: str) -> int:
    path = Path(folder, name)
    return path.stat().st_size if path.exists() else 0


def _read(folder: str, name: str) -> str:
    path = Path(folder, name)
    if not path.exists():
        return ""
    with path.open(errors="replace") as file:
        return file.read(OUTPUT_LIMIT)


def where(stack: str) -> str:
    """Condense a faulthandler dump to: waits in FUNCTION, called from FILE:LINE, in FUNCTION."""
    main, _, dump = stack.partition("\n")
    threads = re.split(r"\n(?=(?:Current thread|Thread) 0x)", "\n" + dump)
    mine = next((t for t in threads if main and main in t.partition("\n")[0]), dump)
    frames = re.findall(r'File "(.+)", line (\d+) in (.+)', mine)
    if not frames:
        return "gave no stack"
    own = next((f for f in frames if not f[0].startswith(LIBRARY)), frames[-1])
    at = f"{own[0]}:{own[1]}, in {own[2]}"
    return f"busy at {at}" if own == frames[0] else f"waits in {frames[0][2]}, called from {at}"


# The rank's side


def _be_rank(place: tuple, work: bytes, outbox: connection.Connection) -> None:
    """Become one rank: own session, own output, one thread; send (kind, value, text); leave."""
    rank, world_size, port, folder, deadline, group, stay = place
    if sys.platform == "linux":  # PR_SET_PDEATHSIG: the server goes with the parent, we with it
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    os.close(forkserver._forkserver._forkserver_alive_fd)  # held open, it would keep the server up
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent may ignore it
    os.dup2(os.open(f"{folder}/{rank}.out", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 1)
    os.dup2(1, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(0)
    sys.stdout = open(1, "w", 1)
    sys.stderr = open(2, "w", 1)
    stack = open(f"{folder}/{rank}.stack", "w")
    print(f"0x{threading.get_ident():016x}", file=stack, flush=True)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        function, args = pickle.loads(work)
        if group:
            dist.init_process_group("gloo", timeout=timedelta(seconds=2 * deadline + 60))
            _meet(world_size)
        word = "returned", function(*args), ""
        if dist.is_initialized() and not stay:
            dist.destroy_process_group()
        word = pickle.dumps((*word, time.monotonic()))
    except SystemExit as error:
        word = pickle.dumps(("exited", None, f"called sys.exit({error.code!r})", time.monotonic()))
    except BaseException as error:
        trace = error.__traceback__.tb_next or error.__traceback__  # less this very frame
        text = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
        word = pickle.dumps(("raised", None, text, time.monotonic()))
    outbox.send_bytes(word)
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
