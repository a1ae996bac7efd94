"""What a rank communicates, counted beneath the answer's feet.

Seen are all calls that pass torch's dispatcher, on any thread that Python starts, under any name:
collectives, functional ones, send and recv, those of DDP and FSDP. The answer's own use of the
group's store is seen too. What goes past the dispatcher is not seen but missed: every group
numbers its calls, and the kernel counts each socket's bytes (`hidden`).

Neither seen nor missed: what an answer hands over in files, shared memory, other processes' hands,
or a few bytes through sockets of its own. And `events` lies in the same process as the answer,
which can find it in its caller's frame and write there what it likes. The wire is made to find
mistakes, not to hold out against malice.
"""

import contextlib
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WIRE = "[wire] "
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier", "send")
OPS += ("recv", "reduce", "gather", "scatter")  # c10d's "_allgather_base_" is an all_gather
STORE = ("set", "add", "append", "compare_set", "multi_set", "queue_push")  # carry bytes away

SPARE = 65_536  # bytes with which the sockets of a group greet each other, five times over
SPARE_OF_A_CALL = 4_096  # bytes around the data of one call per rank of its group, likewise


class Wrong(AssertionError):
    """What is wrong with an answer, in words for the learner."""


@dataclass
class Event:
    """One call, or a grader's note, in the order in which this rank made them."""

    op: str  # send, recv, all_reduce, all_gather, ..., store, or note
    nbytes: int = 0  # of the larger of what goes in and what comes out
    peer: int | None = None  # of a send or recv (None: from anyone): the rank in the whole world
    ranks: tuple[int, ...] = ()  # the group's, in the whole world
    text: str = ""  # a note's


class InOrder(list):
    """For a wire's `events`: each call is compared with the other ranks' in the same place.

    Raises Wrong on the rank that makes another call there than the rank that came first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place = 0

    def append(self, event: Event) -> None:
        super().append(event)
        self.place += 1
        mine = f"{event.op} of {event.nbytes:,} B"
        key = f"call {self.place}"
        first = dist.distributed_c10d._get_default_store().compare_set(key, "", mine).decode()
        if first != mine:
            told = f"{key} is a {mine} here, and on another rank a {first}"
            raise Wrong(f"{told}: every rank makes the same calls in the same order")


class NotedWait:
    """To patch `dist.Work.wait` with: `note` is told each Work as its wait is asked for.

    An attribute and no function, since a rank that hangs in it is to stand in no line of ours.
    """

    def __init__(self, note: Callable[[dist.Work], object]) -> None:
        self.note = note
        self.wait = vars(dist.Work)["wait"]

    def __get__(self, work: dist.Work, kind: type) -> Callable:
        self.note(work)
        return self.wait.__get__(work, kind)


class Wire(TorchDispatchMode):
    """Sees every communication of this rank; see above for what it cannot see. `events` holds them
    in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.refused = ""
        self.groups: list[tuple[int, ...]] = []  # ranks of each process group that was made
        self.seen: Counter[str] = Counter()  # at most so many numbers each group has given away
        self.allowed = [SPARE]  # bytes that the sockets may carry for the calls that were seen
        self.before = calls_made()
        self.carried_before = carried()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # let it come apart first; its collectives then pass here
        kwargs = kwargs or {}
        if not func.namespace.lstrip("_").startswith("c10d"):
            return func(*args, **kwargs)
        event = self._saw(func, args, kwargs)
        result = func(*args, **kwargs)
        if event is not None:  # a functional collective makes its output itself
            event.nbytes = max(event.nbytes, _nbytes(result))
            self.allowed.append(4 * event.nbytes + SPARE_OF_A_CALL * len(event.ranks))
        return result

    def _saw(self, func, args: tuple, kwargs: dict) -> Event | None:
        name = func._schema.name.partition("::")[2]
        op = next((op for op in OPS if op.replace("_", "") in name.replace("_", "")), None)
        if op is None:
            return None  # it waits, or wraps a result: nothing is sent
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        if "group_name" in given:
            group = given["group_name"]
            if isinstance(group, str):
                group = dist.distributed_c10d._resolve_process_group(group)
        else:
            group = dist.ProcessGroup.unbox(given["process_group"])
        ranks = tuple(dist.get_process_group_ranks(group))
        self.seen[group.group_name] += _numbers_taken(name, len(ranks), args)
        peer = given.get("dst", given.get("src"))
        event = Event(op, max(map(_nbytes, args), default=0), ranks=ranks)
        event.peer = None if peer is None else ranks[peer]
        self.events.append(event)
        whom = f"among {list(ranks)}"
        if op in ("send", "recv"):
            way = "to" if op == "send" else "from"
            whom = f"{way} rank {'?' if peer is None else event.peer}"
        say(f"{event.op}, {event.nbytes:,} B, {whom}")
        if op in ("send", "recv") and event.peer == dist.get_rank():
            what = "sends to" if op == "send" else "receives from"
            raise ValueError(f"it {what} itself; gloo has no such connection")
        return event

    def beneath_a_thread(self) -> "Wire":
        """Another mode, for modes are per thread, that writes into the same list."""
        wire = Wire()
        wire.events = self.events
        wire.seen = self.seen
        wire.allowed = self.allowed
        return wire

    def note(self, text: str) -> None:
        """Put a mark of the grader's among the events."""
        self.events.append(Event("note", text=text))

    def calls(self, *ops: str) -> list[Event]:
        """The communications, all or those named, in order."""
        return [e for e in self.events if e.op != "note" and (not ops or e.op in ops)]

    def sent(self) -> int:
        """Bytes that this rank gave to `send`."""
        return sum(e.nbytes for e in self.calls("send"))

    def only(self, *allowed: str) -> None:
        """Refuse an answer that communicated by anything else."""
        if other := {e.op for e in self.calls()} - set(allowed):
            rest = f"use {', '.join(allowed)}" if allowed else "nothing is to be sent here"
            raise Wrong(f"the answer calls {', '.join(sorted(other))}; {rest}")

    def no_groups(self) -> None:
        """Refuse an answer that made a process group, by whatever call: see `groups_counted`."""
        if self.groups:
            ranks = list(self.groups[0])
            raise Wrong(f"a process group of ranks {ranks} was made; all ranks are in one already")

    def hidden(self) -> str:
        """What went past this wire, in a sentence; empty if nothing did."""
        for group, made in calls_made().items():
            made -= self.before.get(group, 0)
            if made > self.seen[group]:
                return (
                    f"the process group made {made:,} calls, and torch's dispatcher passed no more "
                    f"than {self.seen[group]:,} of them; call torch.distributed's own functions"
                )
        sent = 0
        for at, nbytes in carried().items():
            sent += nbytes - self.carried_before.get(at, 0)
        if sent > sum(self.allowed):
            more = sent - sum(self.allowed)
            return (
                f"its sockets carried {more:,} B more than the calls that the grader saw can need"
            )
        return ""


def _numbers_taken(name: str, world_size: int, args: tuple) -> int:
    """At most so many numbers of its group does one call take, as gloo carries it out."""
    if name.startswith("monitored"):
        return 2 * world_size  # sends and receives
    tensors = len([t for t in tree_leaves(args) if isinstance(t, torch.Tensor)])
    times = tensors if "coalesced" in name else 1
    return times * world_size if "reduce_scatter" in name else times  # a list: a reduce per rank


def _nbytes(value: object) -> int:
    return sum(t.nbytes for t in tree_leaves(value) if isinstance(t, torch.Tensor))


def say(call: str) -> None:
    """Put a call into the rank's output, where it is found if the rank hangs."""
    os.write(1, f"\n{WIRE}{call}\n".encode())


# What the wire cannot see, but others count


def calls_made() -> dict[str, int]:
    """How many calls each gloo group of this rank has numbered, those that hide included."""
    found = {}
    if dist.is_initialized():
        for group in dist.distributed_c10d._world.pg_map:
            with contextlib.suppress(RuntimeError):  # a kind of group that numbers nothing
                found[group.group_name] = group._get_sequence_number_for_group()
    return found


def carried() -> dict[str, int]:
    """Bytes that each TCP socket of this process has sent, repeats apart; none without TCP_INFO.

    The store's own connection is left out: forming a group sends through it.
    """
    found = {}
    descriptors = os.listdir("/proc/self/fd") if sys.platform == "linux" else []
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # closed by now, or not TCP
            at = os.readlink(f"/proc/self/fd/{descriptor}")
            if not at.startswith("socket"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as one:
                if one.getpeername()[1] == int(os.environ.get("MASTER_PORT", "0")):
                    continue
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
            sent = int.from_bytes(info[200:208], sys.byteorder)  # tcpi_bytes_sent
            found[at] = sent - int.from_bytes(info[208:216], sys.byteorder)  # tcpi_bytes_retrans
    return found


# Put beneath an answer


@contextlib.contextmanager
def in_threads(wire: Wire) -> Iterator[None]:
    """Within, every thread that Python starts has the wire beneath it too: modes are per thread."""
    start = threading.Thread.start

    def start_seen(thread: threading.Thread) -> None:
        run = thread.run

        def run_seen() -> None:
            with wire.beneath_a_thread():
                run()

        thread.run = run_seen
        start(thread)

    with patch.object(threading.Thread, "start", start_seen):
        yield


@contextlib.contextmanager
def groups_counted(wire: Wire) -> Iterator[None]:
    """Within, each process group that is made puts its ranks into the wire's `groups`, also one
    that this rank is no member of: every way to make one (new_group, new_subgroups, split_group,
    init_device_mesh, under any name) asks torch for the group's name. A mesh of all ranks in one
    row makes none; a group built by its C++ class is not seen.
    """
    named = dist.distributed_c10d._process_group_name

    def name(ranks: list[int], *args: object, **kwargs: object) -> str:
        wire.groups.append(tuple(ranks))
        return named(ranks, *args, **kwargs)

    with patch.object(dist.distributed_c10d, "_process_group_name", name):
        yield


@contextlib.contextmanager
def at_the_store(wire: Wire, file: str) -> Iterator[None]:
    """Within, what code of `file` puts into a store is an event too."""

    def seen(name: str) -> Callable:
        call = getattr(dist.Store, name)

        def put(store: dist.Store, *args: object) -> object:
            if sys._getframe(1).f_code.co_filename == file:
                nbytes = sum(len(a) for a in args if isinstance(a, str | bytes))
                wire.events.append(Event("store", nbytes))
                say(f"store.{name}, {nbytes:,} B")
            return call(store, *args)

        return put

    with contextlib.ExitStack() as stack:
        for name in STORE:
            if hasattr(dist.Store, name):
                stack.enter_context(patch.object(dist.Store, name, seen(name)))
        yield


@contextlib.contextmanager
def forbidden(wire: Wire, names: tuple[str, ...]) -> Iterator[None]:
    """Within, calling any of `names` ("torch.utils.data.DistributedSampler.__init__") is refused,
    even where the answer swallows the error.
    """
    with contextlib.ExitStack() as stack:
        for name in names:
            short = name.removesuffix(".__init__").rpartition(".")[2]

            def refuse(*args: object, _short: str = short, **kwargs: object) -> None:
                wire.refused = f"the answer uses {_short}, which it is to do without"
                raise Wrong(wire.refused)

            stack.enter_context(patch(name, refuse))
        yield
