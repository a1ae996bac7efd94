"""What the pretended GPUs still have to do, and who reads a clock meanwhile.

A kernel or a collective that was launched stays pending until the host waits for it. To read
a clock or sleep before that, in the lesson's own code, is to measure how long a launch takes: an
error, unless the line says that this is what it wants, by a comment with "launch time" in it.
"""

import linecache
import os
import sys
import threading
import time
from collections.abc import Callable

import torch

CLOCKS = ("sleep", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time")
MARK = "launch time"
really = {name: getattr(time, name) for name in CLOCKS}


class Unsettled(AssertionError):
    """A clock was read, or a sleep begun, before the GPU was done."""


class Work(torch.distributed.Work):
    """A collective's handle as NCCL's: waiting for it stops the stream, not the host."""

    def __init__(self, gloo: torch.distributed.Work, name: str, device: torch.device) -> None:
        super().__init__()
        self.gloo = gloo
        self.name = name
        self.device = device
        self.waited_on: set[Stream] = set()  # the streams that wait for it
        self.done = False
        self.settled = False  # whether the host knows that it is over
        pending_works.append(self)
        kept.append(self)

    def finish(self) -> None:
        """Let gloo really do it, so that values are there for all that need them."""
        if not self.done:  # gloo's sends and receives can be waited for once
            self.done = True
            self.gloo.wait()

    def wait(self, timeout: object = None) -> bool:
        self.finish()
        self.gloo = None  # it holds the tensors
        self.waited_on.add(stream_of(self.device))
        launched(self.device, f"the wait for {self.name}")
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self.settled

    def get_future(self) -> torch.futures.Future:
        """A future that is complete at once, as NCCL's are: their streams do the waiting."""
        assert self.gloo, "ask for the future before you wait"
        self.finish()
        return self.gloo.get_future()


kept: list[Work] = []  # as long as C++ may hold them, Python must, too
pending_works: list[Work] = []
used: set[int] = set()  # the devices on which this process has a context
forked = False  # whether this process is a fork of one that had used a GPU
file_of_the_lesson = ""


class Current(threading.local):
    """What is current in this thread: a new one starts on GPU 0, and on the default streams."""

    device = 0
    chosen = False  # whether the thread has called set_device

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}  # by the device's number


current = Current()


class Stream:
    """A stream of one device: what was launched on it and not waited for, and what it waits on."""

    def __init__(self, device: object = None, priority: int = 0, **other: object) -> None:
        self.device = device_of(device)
        self.device_index = self.device.index
        self.priority = priority
        self.cuda_stream = self.stream_id = id(self)
        self.device_type = 1  # CUDA, as C++ counts them
        self.pending: str | None = None  # what was launched last
        self.behind: set[Stream] = set()  # streams whose work this one waits for
        every_stream.append(self)

    def __enter__(self) -> "Stream":
        self.before = current.streams.get(self.device.index)
        self.device_before = current.device
        current.streams[self.device.index] = self
        current.device = self.device.index
        return self

    def __exit__(self, *error: object) -> None:
        current.streams.pop(self.device.index)
        if self.before:
            current.streams[self.device.index] = self.before
        current.device = self.device_before

    def query(self) -> bool:
        return self.pending is None

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        """The host waits for this stream, and so for all that it waits for."""
        self.pending = None
        for work in [work for work in pending_works if self in work.waited_on]:
            settle(work)
        behind = self.behind
        self.behind = set()
        for other in behind:
            other.synchronize()

    def wait_stream(self, other: "Stream") -> None:
        self.behind.add(other)
        self.pending = self.pending or other.pending

    def wait_event(self, event: "Event") -> None:
        if event.stream:
            self.wait_stream(event.stream)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event


every_stream: list[Stream] = []
defaults: dict[int, Stream] = {}


def device_of(device: object = None) -> torch.device:
    """The device that is meant: the current one if none is said."""
    if forked:
        raise RuntimeError(
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you "
            "must use the 'spawn' start method"
        )
    if not isinstance(device, int | None):
        device = torch.device(device).index
    index = current.device if device is None else device
    if not 0 <= index < torch.cuda.device_count():
        raise RuntimeError("CUDA error: invalid device ordinal")
    return torch.device("cuda", index)


def default_stream(device: object = None) -> Stream:
    index = device_of(device).index
    if index not in defaults:
        defaults[index] = Stream(index)
    return defaults[index]


def stream_of(device: object = None) -> Stream:
    """The current stream of a device."""
    index = device_of(device).index
    return current.streams.get(index) or default_stream(index)


class Event:
    """An event with the host's clock; like CUDA's it tells no time before somebody waited."""

    def __init__(self, enable_timing: bool = False, **other: object) -> None:
        self.enable_timing = enable_timing
        self.stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or stream_of()
        used.add(self.stream.device.index)
        self.at = really["perf_counter"]()
        self.over = False
        kept_events.append(self)

    def query(self) -> bool:
        return self.stream is None or self.over or self.stream.pending is None

    def synchronize(self) -> None:
        if self.stream:
            self.stream.synchronize()
            self.over = True

    def wait(self, stream: Stream | None = None) -> None:
        (stream or stream_of()).wait_event(self)

    def elapsed_time(self, end: "Event") -> float:
        if not (self.enable_timing and end.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.stream is None or end.stream is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and end.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return 1e3 * (end.at - self.at)


kept_events: list[Event] = []


def note_fork() -> None:
    """In a forked child: CUDA does not survive that, if the parent had begun to use it."""
    global forked
    forked = forked or current.chosen or bool(used)


def patch_futures() -> None:
    """Futures that know devices ask the CUDA driver; these know none."""
    begin = torch.futures.Future.__init__
    torch.futures.Future.__init__ = lambda self, *, devices=None: begin(self)


def launched(device: torch.device, what: str) -> None:
    """Note that the current stream of `device` has something to do."""
    used.add(device.index)
    stream_of(device).pending = what


def settle(work: Work) -> None:
    work.finish()
    work.gloo = None
    work.settled = True
    pending_works.remove(work)


def synchronize(device: object = None) -> None:
    """The host waits for all that one GPU has to do."""
    index = device_of(device).index
    if index not in used and index != current.device:
        raise RuntimeError(
            f"torch.cuda.synchronize({index}) makes a context on GPU {index}, on which this rank "
            "has nothing: it takes memory there, and milliseconds. Synchronize your own GPU only."
        )
    for stream in every_stream:
        if stream.device.index == index:
            stream.pending = None
            stream.behind.clear()
    for work in [work for work in pending_works if work.device.index == index]:
        settle(work)
    for event in [event for event in kept_events if event.stream.device.index == index]:
        event.over = True
        kept_events.remove(event)


def waited(device: torch.device) -> None:
    """The host has waited for the current stream, as `item` does."""
    stream_of(device).synchronize()


def pending() -> str | None:
    """What this rank has launched and not waited for, if anything."""
    for work in pending_works:
        return f"{work.name} that nobody waited for"
    for stream in every_stream:
        if stream.pending:
            return f"{stream.pending} on cuda:{stream.device.index}"
    return None


def watched(name: str) -> Callable:
    """A clock's function, that looks at the GPU first if the lesson itself calls it."""
    clock = really[name]

    def read_the_clock(*args: object) -> object:
        frame = sys._getframe(1)
        if frame.f_code.co_filename == file_of_the_lesson and (name, args) != ("sleep", (0,)):
            line = linecache.getline(file_of_the_lesson, frame.f_lineno)
            if (what := pending()) and MARK not in line.partition("#")[2]:
                where = f"{os.path.basename(file_of_the_lesson)}:{frame.f_lineno}"
                raise Unsettled(
                    f"{where}, in {frame.f_code.co_name}: time.{name} while the GPU has not "
                    f"finished {what}. Synchronize first, or say `# {MARK}` if that is meant."
                )
        return clock(*args)

    return read_the_clock


def watch_clocks(lesson: str) -> None:
    """From now on, no clock may be read in the file `lesson` while a GPU is busy."""
    global file_of_the_lesson
    file_of_the_lesson = lesson
    for name in CLOCKS:
        setattr(time, name, watched(name))
