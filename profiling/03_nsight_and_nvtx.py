"""NVTX and Nsight Systems: your own ranges, seen with nsys and without
====================================================================

**Question.** How do the steps, phases and collectives of your training get into Nsight Systems;
can you see them on a machine that has no nsys; and what share of a step is all-reduce by them?

**Predict**, and write it down before you run.

1. A step has a range around it, and ranges around loader, forward, backward, optimizer and each of
   3 all-reduces. A table sums the ranges of 4 steps by name: how many rows does it have? And if the
   step's number and the all-reduces' bytes stood in the names, instead of in payloads?
2. Every all-reduce's range carries its bytes as a payload. The model has P float32 parameters. What
   do the payloads of one step add up to?
3. You put a range around `dist.all_reduce(x, async_op=True)`. The last of n ranks joins only when
   all others have returned from that call. How many of the n ranges end before it has joined?
4. One rank's loader is 40 ms late in every step. In whose trace are the all-reduces short, its own
   or the others'? By how many points do the shares that NVTX and torch's profiler see differ?
5. Ranges stay in the code when nobody profiles. What share of a step do all of its ranges take
   then: 5%, 1%, less than 0.1%?

**Run.**

    torchrun --standalone --nproc-per-node=4 03_nsight_and_nvtx.py # NCCL if 4 GPUs, else gloo
    python 03_nsight_and_nvtx.py                                   # the same, started for you
    python 03_nsight_and_nvtx.py --figure timeline.png             # and draw the timeline

Not run on several GPUs, nor with nsys. Needs a C compiler.

**Try.** Leave `payload=bucket_N.nbytes` out: which claims notice? Undo it, write `work =
dist.all_reduce(bucket_N, async_op=True)`, and put `work.wait()` below the range: what share now?

**Before.** profiling/02_one_trace_for_all_ranks.py: torch's traces, and the clocks of many ranks.

**Next.** exercises/13_profile_all_reduce; then profiling/04_debugging_hangs.py: when nothing moves
any more.
"""

import argparse
import contextlib
import csv
import ctypes
import json
import logging
import math
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import timeit
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.profiler import profile, record_function

try:
    import nvtx  # pip install -e '.[profiling]'
except ImportError:
    nvtx = None

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

DOMAIN = "training"
COLORS = {  # red, green and blue, a byte each
    "step": 0x808080,
    "loader": 0xFFA500,
    "forward": 0x0000FF,
    "backward": 0x800080,
    "all_reduce": 0xFF0000,
    "optimizer": 0x008000,
}
LAYERS, STEPS = 3, 4
RANGES = 1 + 4 + LAYERS  # of a step
MOST = 200_000  # calls that the listener has room for
LATE = 0.040  # seconds by which the loader of the last rank is late in each step
SLOW = WORLD_SIZE - 1

# %% [markdown]
# ## 1. Ranges, domains, colors, payloads, marks
#
# **NVTX** is NVIDIA's interface by which a program tells a profiler what it is doing. It has two
# sorts of range. `nvtx.annotate` *pushes* a range onto the stack of its thread and *pops* it at the
# end of the block, so such ranges nest. `nvtx.start_range` returns a handle, and `nvtx.end_range`
# may be called elsewhere, in another thread too. A **mark** is a moment. Each of them can have
#
# - a **domain**: all that your program says, apart from what NCCL or cuDNN say in their own ones;
# - a color, by which the eye finds the phase on a timeline of two million ranges;
# - a **payload**: a number that belongs to this one range, such as the step or the bytes.
#
# Put the number into the payload, and never into the name: "step 17" is a new name in every step,
# and a table that sums by name then has a row per step.
#
#     step 17  [============================================================]      depth 0
#               [ loader ][forward][ backward ][all_reduce][  ][  ][optimizer]     depth 1
#                                               130 kB each                    ^ mark: the loss
#
# One helper names a phase for both profilers, so that the two never drift apart. On a GPU the host
# only launches: there a range around Python code ends before the work does. The helper therefore
# waits for the device at the end of each phase, which no training should do. Nsight Systems needs
# no such wait: it *projects* a range onto the kernels that were launched within it.


# %%
@contextlib.contextmanager
def phase(name: str, device: torch.device, payload: float | None = None) -> Iterator[None]:
    """A range in torch's trace and in NVTX, from here until the device is done with it."""
    with record_function(name), nvtx.annotate(name, COLORS[name], DOMAIN, payload=payload):
        yield
        if device.type == "cuda":
            torch.cuda.synchronize()


def one_step(model: nn.Sequential, x_BD: torch.Tensor, number: int) -> float:
    """Train one step, without overlap: each phase waits for the one before. Returns the loss."""
    device = x_BD.device
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with phase("step", device, payload=number):
        with phase("loader", device):
            time.sleep(LATE if RANK == SLOW else 0)
        with phase("forward", device):
            loss = model(x_BD).square().mean()
        with phase("backward", device):
            loss.backward()
        for layer in model:  # a bucket per layer
            gradients = [p.grad for p in layer.parameters()]
            bucket_N = parameters_to_vector(gradients)
            with phase("all_reduce", device, payload=bucket_N.nbytes):
                dist.all_reduce(bucket_N)
            vector_to_parameters(bucket_N / WORLD_SIZE, gradients)
        with phase("optimizer", device):
            optimizer.step()
            optimizer.zero_grad()
    nvtx.mark("loss", COLORS["step"], DOMAIN, payload=loss.item())
    return loss.item()


# %% [markdown]
# ## 2. The door by which nsys comes in
#
# NVTX itself records nothing. A program's first call of any NVTX function looks at the variable
# NVTX_INJECTION64_PATH. If that names a library, the library's `InitializeInjectionNvtx2` is called
# and puts its own functions into a table of callbacks; if not, all NVTX functions do nothing.
# `nsys profile` sets this variable for you. So can anybody: the listener below is all it takes to
# see what nsys would see. NVIDIA documents the door in `nvtxDetail/nvtxTypes.h` and `nvtxInit.h`
# of NVTX 3; the numbers of the callbacks are those of its `NvtxCallbackIdCore2`.

# %%
LISTENER = r"""
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef struct {  // NVTX's nvtxEventAttributes_t
  uint16_t version, size; uint32_t category; int32_t color_type; uint32_t color;
  int32_t payload_type, reserved; int64_t payload; int32_t message_type; const char *message;
} Attributes;
typedef struct {  // what Python reads
  int64_t ns, thread, payload; const char *domain, *name; uint32_t color; char kind, payload_type;
} Event;

Event events[MOST];
int count;

static int record(char kind, const char *domain, const Attributes *a) {
  struct timespec now;
  int number = __atomic_fetch_add(&count, 1, __ATOMIC_RELAXED);
  if (number >= MOST) return number;
  clock_gettime(CLOCK_MONOTONIC, &now);
  Event *e = &events[number];
  *e = (Event){.ns = now.tv_sec * 1000000000LL + now.tv_nsec, .thread = (int64_t)pthread_self(),
               .domain = domain, .kind = kind};
  if (a == NULL) return number;
  e->color = a->color; e->payload = a->payload; e->payload_type = a->payload_type;
  if (a->message_type == 1) e->name = strdup(a->message);  // the caller's, who may free it
  if (a->message_type == 3) e->name = a->message;          // a registered string: ours
  return number;
}
static const char *new_domain(const char *name) { return strdup(name); }
static const char *new_string(const char *domain, const char *name) { return strdup(name); }
static void mark(const char *domain, const Attributes *a) { record('M', domain, a); }
static int push(const char *domain, const Attributes *a) { record('<', domain, a); return 0; }
static int pop(const char *domain) { record('>', domain, NULL); return 0; }
static uint64_t start(const char *domain, const Attributes *a) { return record('[', domain, a); }
static void end(const char *domain, uint64_t id) {
  record(']', domain, &(Attributes){.payload = id});
}
static int torch_push(const char *name) {
  return push(NULL, &(Attributes){.message = name, .message_type = 1});
}
static int torch_pop(void) { return pop(NULL); }

typedef struct { size_t size; int (*functions)(int module, void ****table, unsigned *size); } Table;
int InitializeInjectionNvtx2(const Table *(*get_table)(uint32_t)) {
  void ***of; unsigned size;
  if (get_table(1)->functions(5, &of, &size)) {  // functions with a domain
    *of[1] = mark; *of[2] = start; *of[3] = end; *of[4] = push; *of[5] = pop;
    *of[10] = new_string; *of[12] = new_domain;
  }
  if (get_table(1)->functions(1, &of, &size)) {  // those without one, which torch.cuda.nvtx calls
    *of[9] = torch_push; *of[11] = torch_pop;
  }
  return 1;
}
"""

# %% [markdown]
# A handle of a domain or a name is whatever the listener returns, so here it is the string itself.
# The library is loaded by the first call after the variable is set; each C library that speaks NVTX
# (the nvtx package, torch, NCCL) has its own table and loads it for itself.


# %%
class Event(ctypes.Structure):
    """What the listener wrote down of one call; the same fields as in C."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("ns", "thread", "payload")),
        *((name, ctypes.c_char_p) for name in ("domain", "name")),
        *(("color", ctypes.c_uint32), ("kind", ctypes.c_char), ("payload_type", ctypes.c_byte)),
    )


def listen() -> tuple[ctypes.CDLL | None, str]:
    """Compile the listener and have NVTX load it; or return None, and what that would need."""
    if "NVTX_INJECTION64_PATH" in os.environ:
        return None, "no other listener, such as nsys"
    if shutil.which("cc") is None:
        return None, "a C compiler: g++"
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/listener.so"
        options = ["-shared", "-fPIC", "-O2", "-pthread", f"-DMOST={MOST}"]
        compiler = ["cc", *options, "-o", path, "-x", "c", "-"]
        subprocess.run(compiler, input=LISTENER, text=True, check=True)
        os.environ["NVTX_INJECTION64_PATH"] = path
        nvtx.mark("the first call", domain=DOMAIN)
        with contextlib.suppress(RuntimeError):  # a torch for CPUs has no NVTX
            torch.cuda.nvtx.mark("the first call")
        del os.environ["NVTX_INJECTION64_PATH"]  # what this process starts is its own master
        return ctypes.CDLL(path), ""


def heard(listener: ctypes.CDLL | None) -> list[Event]:
    """All calls since the last time that this was asked, in order."""
    if listener is None:
        return []
    count = ctypes.c_int.in_dll(listener, "count")
    events = (Event * min(count.value, MOST)).in_dll(listener, "events")
    copies = [Event.from_buffer_copy(event) for event in events]
    count.value = 0
    return copies


# %% [markdown]
# Pairing a push with its pop takes a stack per thread and domain. Payloads are 64 bits, and their
# type says whether these are an integer (2) or a double (3).


# %%
@dataclass
class Range:
    """A range, or a mark, which ends as it begins; times in ns of the machine's clock."""

    name: str
    depth: int  # how many ranges of its thread are open around it
    payload: float | None
    color: int
    start: int
    end: float = math.nan  # while it is open

    @property
    def ns(self) -> float:
        return self.end - self.start


def ranges_of(events: list[Event], domain: str | None) -> list[Range]:
    """The ranges and marks of one domain, in the order in which they begin."""
    found = []
    stacks = defaultdict(list)  # {thread: open ranges}
    for number, event in enumerate(events):
        if (event.domain or b"").decode() != (domain or ""):
            continue
        stack = stacks[event.thread]
        if event.kind == b">":
            stack.pop().end = event.ns
        elif event.kind == b"]":
            stacks[event.payload].pop().end = event.ns
        else:
            name = (event.name or b"").decode()
            opened = Range(name, len(stack), value_of(event), event.color, event.ns)
            found.append(opened)
            if event.kind == b"M":
                opened.end = event.ns
            else:
                where = stack if event.kind == b"<" else stacks[number]
                where.append(opened)
    return found


def value_of(event: Event) -> float | None:
    if event.payload_type == 3:
        return struct.unpack("d", struct.pack("q", event.payload))[0]
    return event.payload if event.payload_type == 2 else None


# %% [markdown]
# ## 3. A range around a launch is not a range around the transfer
#
# `dist.all_reduce(x, async_op=True)` returns as soon as the work is queued. A range around that
# call shows how long queueing takes, whatever the network does. Three ranges tell it apart:
#
#     rank 0      [launch]                          [ wait .......]
#                 [ in flight .....................................]     start_range ... end_range
#     the last        joins only now: [launch][ wait]
#
# The exposed part, which you can save, is the range around the *wait*, or around a call that waits
# itself. To make sure of the order, the last rank here joins only when all others have told the
# store that they have launched. No clock decides who comes first.


# %%
def launch_and_wait(listener: ctypes.CDLL, device: torch.device) -> dict[str, Range]:
    """One asynchronous all-reduce, which the last rank joins last; the ranges by their names."""
    x_N = torch.ones(1000, device=device)
    store = dist.distributed_c10d._get_default_store()
    if RANK == WORLD_SIZE - 1:
        store.wait([f"launched by {rank}" for rank in range(WORLD_SIZE - 1)])
    flight = nvtx.start_range("in flight", COLORS["all_reduce"], DOMAIN, payload=x_N.nbytes)
    with nvtx.annotate("launch", COLORS["all_reduce"], DOMAIN):
        work = dist.all_reduce(x_N, async_op=True)
    store.set(f"launched by {RANK}", "")
    with nvtx.annotate("wait", COLORS["all_reduce"], DOMAIN):
        work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize()  # on NCCL, `wait` makes the stream wait, not the host
    nvtx.end_range(flight)
    return {found.name: found for found in ranges_of(heard(listener), DOMAIN)}


# %% [markdown]
# ## 4. Commands: nsys, ncu, and what to look for
#
# One report for a node; on several nodes one report for each, or one per rank (`%q{}` takes a
# variable from the environment). A report grows with every call that is recorded, so record ten
# steps in the middle: from `torch.cuda.profiler.start()` to its `stop()`.
#
#     MIDDLE="--capture-range=cudaProfilerApi --capture-range-end=stop"
#     nsys profile -t cuda,nvtx,osrt -s none $MIDDLE -o step \
#         torchrun --standalone --nproc-per-node=8 train.py
#     srun --ntasks-per-node=1 nsys profile -t cuda,nvtx,osrt -s none $MIDDLE \
#         -o step_%q{SLURM_NODEID} \
#         torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=$HOST train.py
#     srun --ntasks-per-node=8 nsys profile -t cuda,nvtx -s none $MIDDLE \
#         -o step_%q{SLURM_PROCID} python train.py
#
# (A range can start the recording as well: `--capture-range=nvtx --nvtx-capture=NAME@training`. Its
# name must be a *registered* string, as those of the nvtx package are; for torch.cuda.nvtx, set
# NSYS_NVTX_PROFILER_REGISTER_ONLY=0.) nsys itself needs no GPU: on a machine with CPUs only leave
# out `cuda` and $MIDDLE, and it records ranges and what waits in the operating system. Then sums,
# without any window:
#
#     nsys stats -r nvtx_pushpop_sum step.nsys-rep    # ranges on the host: what section 5 adds up
#     nsys stats -r nvtx_gpu_proj_sum step.nsys-rep   # the same, from first to last kernel of each
#     nsys stats -r cuda_gpu_kern_sum step.nsys-rep   # kernels: those named ncclDevKernel_...
#     nsys stats --help-reports                       # all of them
#
# Nsight Compute looks at single kernels. It runs each one many times, with counters, so let ranges
# choose a few; the slash says that the range is pushed and popped. Leave collectives out: a NCCL
# kernel that is run again waits for peers that do not come. (Where it must be, ncu's
# `--communicator` and `--lockstep-kernel-launch` make all ranks run it again together.)
#
#     ncu --target-processes all --nvtx --nvtx-include "training@forward/" --launch-count 20 \
#         -o forward torchrun --standalone --nproc-per-node=8 train.py
#
# All of these are from NVIDIA's guides: the User Guide and the Analysis Guide of Nsight Systems,
# and, for Nsight Compute's command line, "NVTX Filtering" and "Mandatory Concurrent Kernels".
#
# On the timeline, look first at where red (all-reduce) stands alone, with no kernel next to it:
#
#     rank 0   [load][forward][backward][ all_reduce: mostly waiting ........][ ][ ][opt]
#     rank 1   [load][forward][backward][ all_reduce: mostly waiting ........][ ][ ][opt]
#     rank 2   [load .........................][forward][backward][all_reduce][ ][ ][opt]
#                                                                  the transfer itself
#
# The rank whose all-reduces are *short* is the slow one: it comes last and waits for nobody. Its
# neighbors' long red bars are the symptom. Where all are long alike, it is the network.
# `--figure` draws this run so, from what the listener heard on all ranks.


# %%
def draw(ranges: list[list[Range]], path: str) -> None:
    """One step of every rank, a row per rank; where a block is narrow, its name stands upright."""
    from matplotlib.figure import Figure

    colors = {"loader": "#fdae6b", "forward": "#9ecae1", "backward": "#bcbddc"}
    colors |= {"all_reduce": "#fc9272", "optimizer": "#a1d99b"}
    figure = Figure((11, 1.2 + 0.8 * WORLD_SIZE), layout="constrained")
    axes = figure.subplots()
    longest = [max(mine[step * RANGES].ns for mine in ranges) for step in range(STEPS)]
    quiet = longest.index(min(longest)) * RANGES  # where nothing else made the machine wait
    shown = [mine[quiet : quiet + RANGES] for mine in ranges]
    begin = min(step.start for step, *_ in shown)
    whole = max(step.end for step, *_ in shown) - begin
    for rank, (_, *phases) in enumerate(shown):
        for one in phases:
            left = (one.start - begin) / 1e6
            ms = one.ns / 1e6
            axes.barh(rank, ms, 0.8, left, color=colors[one.name], edgecolor="white")
            style = {"ha": "center", "va": "center", "fontsize": 8}
            if one.ns > 0.1 * whole:
                axes.text(left + ms / 2, rank, f"{one.name} {ms:.0f} ms", **style)
            elif one.ns > 0.015 * whole:
                axes.text(left + ms / 2, rank, one.name, rotation=90, **style)
    if WORLD_SIZE > 1:
        waiting = [next(one for one in mine if one.name == "all_reduce").ns / 1e6 for mine in shown]
        late = f"Rank {SLOW} comes late: its first all_reduce takes {waiting[SLOW]:.0f} ms"
        axes.set_title(f"{late}; rank 0, which waits for it, is in there for {waiting[0]:.0f} ms")
    axes.set_yticks(range(WORLD_SIZE), [f"rank {rank}" for rank in range(WORLD_SIZE)])
    axes.invert_yaxis()
    axes.set_xlabel("ms since the step began; white: what no range names")
    figure.savefig(path, dpi=150)


# %% [markdown]
# ## 5. How it is measured
#
# One step warms up; four are recorded, by the listener and by torch's profiler at once. The oracle
# for the ranges is the plan: their names, depths, payloads and colors, in order. For the share of
# all-reduce the two profilers look at different things: NVTX at the range around the call, torch at
# its own spans of the transfer, "gloo:all_reduce" in a thread of gloo's, or NCCL's kernels.


# %%
def plan(number: int, width: int) -> list[tuple]:
    """The ranges of step `number`: (name, depth, payload, color)."""
    nbytes = 4 * (width + 1) * width
    names = ["loader", "forward", "backward", *["all_reduce"] * LAYERS, "optimizer"]
    inner = []
    for name in names:
        inner.append((name, 1, nbytes if name == "all_reduce" else None, COLORS[name]))
    return [("step", 0, number, COLORS["step"]), *inner]


def width_on(device: torch.device) -> int:
    """Of the layers: a toy on CPUs; on a GPU, 268 MB of gradients each."""
    return 180 if device.type == "cpu" else 8192


def train(
    listener: ctypes.CDLL | None, device: torch.device
) -> tuple[list[Event], list[dict], list]:
    """Some steps; what the listener heard of them, torch's events, and the losses."""
    torch.manual_seed(0)
    width = width_on(device)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS))).to(device)
    x_BD = torch.full((512 if device.type == "cpu" else 4096, width), 1.0 + RANK, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    one_step(model, x_BD, -1)
    heard(listener)
    losses = []
    with profile() as profiler:
        for number in range(STEPS):
            losses.append(one_step(model, x_BD, number))
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        with open(file.name) as trace:
            return heard(listener), json.load(trace)["traceEvents"], losses


def share_of_nvtx(ranges: list[Range]) -> float:
    """All-reduce's share of the steps, by the ranges."""
    spent = Counter()
    for one in ranges:
        spent[one.name] += one.ns
    return spent["all_reduce"] / spent["step"]


def share_of_torch(events: list[dict]) -> float:
    """All-reduce's share of the steps, by torch's own spans: kernels where there are any."""
    spans = [event for event in events if event["ph"] == "X"]
    moved = [e["dur"] for e in spans if e.get("cat") == "kernel" and "AllReduce" in e["name"]]
    if not moved:
        moved = [e["dur"] for e in spans if e["name"] == "gloo:all_reduce"]
    steps = [e["dur"] for e in spans if (e["name"], e.get("cat")) == ("step", "user_annotation")]
    return sum(moved) / sum(steps)


# %% [markdown]
# What a rank says must be what NVTX hears, to the bit.


# %%
def check_ranges(events: list[Event], losses: list[float], width: int) -> None:
    """Claim that what was pushed is what was heard."""
    ranges = [one for one in ranges_of(events, DOMAIN) if one.name != "loss"]
    names = {one.name for one in ranges}
    claim("rows of a table by name", 6, len(names), question=1)
    named = {(one.name, one.payload) for one in ranges}
    claim("the same, were payloads in the names", 9, len(named), question=1)
    pops = sum(event.kind == b">" for event in events)
    claim("pops, one for each push", len(ranges), pops)
    expected = []
    for number in range(STEPS):
        expected += plan(number, width)
    right = 0
    for one, row in zip(ranges, expected, strict=False):
        right += (one.name, one.depth, one.payload, one.color) == row
    claim("in the plan's order, depth, payload and color", len(expected), right)
    marks = [one.payload for one in ranges_of(events, DOMAIN) if one.name == "loss"]
    same = sum(a == b for a, b in zip(marks, losses, strict=False))
    claim("marks whose payload is the step's loss, to the bit", STEPS, same)


def check_collectives(events: list[Event], traced: list[dict], width: int) -> None:
    """Claim that every collective has a range, and that payloads are the gradients' bytes."""
    ranges = [one for one in ranges_of(events, DOMAIN) if one.name == "all_reduce"]
    calls = [event for event in traced if event["name"] == "c10d::allreduce_"]
    dispatched = 0
    end = -math.inf
    for call in sorted(calls, key=lambda event: event["ts"]):
        if call["ts"] >= end:  # not one that another one called
            dispatched += 1
            end = call["ts"] + call["dur"]
    claim("collectives that torch dispatched, with a range", dispatched, len(ranges))
    parameters = LAYERS * (width + 1) * width
    payloads = [one.payload for one in ranges if one.payload is not None]
    claim("bytes per step, by payloads: 4 P", 4 * parameters, sum(payloads) / STEPS, question=2)


def check_torch(listener: ctypes.CDLL) -> None:
    """Claim that torch's own NVTX functions come in by the same door."""
    try:
        torch.cuda.nvtx.range_push("torch's")
        torch.cuda.nvtx.range_pop()
    except RuntimeError:
        blocked("ranges of torch.cuda.nvtx that are heard", needs="GPU build of torch")
        return
    found = [one.name for one in ranges_of(heard(listener), None)]
    claim("ranges of torch.cuda.nvtx that are heard", 1, found.count("torch's"))


# %% [markdown]
# What compares ranks uses one clock, the machine's monotonic one. Several nodes have several: there
# it is BLOCKED, and lesson 02 says how such clocks are brought together.


# %%
def check_order(everyone: list[list[Range]], asynchronous: dict[str, Range]) -> None:
    """Claim what must come before what on all ranks, whatever their speed."""
    if int(os.environ["LOCAL_WORLD_SIZE"]) < WORLD_SIZE:
        blocked("the order of events on all ranks", needs="ranks of one node, with one clock")
        return
    if WORLD_SIZE == 1:
        blocked("the order of events on all ranks", needs="2 ranks")
        return
    together = 0
    rows = []
    for mine in everyone:
        rows.append([one for one in mine if one.name == "all_reduce"])
    for spans in zip(*rows, strict=True):
        together += max(one.start for one in spans) < min(one.end for one in spans)
    claim("all-reduces in which all ranks are at one moment", STEPS * LAYERS, together)
    tries = gather_objects(asynchronous)
    joined = tries[-1]["launch"].start
    before = {}
    for name in ("launch", "wait", "in flight"):
        before[name] = sum(ranges[name].end < joined for ranges in tries)
    text = "launch ranges that end before the last joins"
    claim(text, WORLD_SIZE - 1, before["launch"], question=3)
    after = 2 * WORLD_SIZE - before["wait"] - before["in flight"]
    claim("waits and flights that end after it", 2 * WORLD_SIZE, after)


def check_shares(everyone: list[list[Range]], traced: list[dict]) -> None:
    """Claim that NVTX and torch agree on all-reduce's share, and which rank waits least."""
    by_nvtx = share_of_nvtx(everyone[RANK])
    by_torch = share_of_torch(traced)
    shares = gather_objects((by_nvtx, by_torch))
    for rank, (nvtx_share, torch_share) in enumerate(shares):
        print0(
            f"{'':13}rank {rank}: all-reduce {nvtx_share:6.1%} of its steps by NVTX, "
            f"{torch_share:6.1%} by torch"
        )
    if WORLD_SIZE == 1:
        blocked("all-reduce's share, and who waits least", needs="2 ranks")
        return
    text = "all-reduce's share of the steps: by torch, by NVTX"
    claim(text, by_torch, by_nvtx, atol=0.1, question=4, timed=True, rank=0)
    least = shares.index(min(shares))
    claim("the rank whose all-reduces take least", SLOW, least, question=4, timed=True)


def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


# %% [markdown]
# For the cost of a range that nobody hears, rank 0 starts a process without a listener.

# %%
RANGE = f"with nvtx.annotate('x', 0, {DOMAIN!r}): pass"
TIMES = 2000
ALONE = f"""
import timeit
print(min(timeit.repeat({RANGE!r}, "import nvtx", repeat=10, number={TIMES})))
"""


def check_cost(listener: ctypes.CDLL, mine: list[Range]) -> None:
    """Claim that ranges cost next to nothing where nobody listens."""
    unheard = 0.0
    if RANK == 0:
        done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, check=True)
        unheard = 1e9 * float(done.stdout) / TIMES
        seconds = timeit.repeat(RANGE, "import nvtx", repeat=10, number=TIMES)
        heard(listener)
        told = 1e9 * min(seconds) / TIMES
        print(f"{'':13}a range takes {unheard:,.0f} ns unheard, {told:,.0f} ns heard")
    step = min(one.ns for one in mine if one.name == "step")
    text = "% of a step that its ranges take, unheard"
    claim(text, 0.1, 100 * RANGES * unheard / step, "<=", question=5, timed=True, rank=0)


# %% [markdown]
# Where nsys is, it profiles a small program whose steps are half all-reduce (both are sleeps), and
# `nsys stats` says so.

# %%
PROGRAM = """
import time
import nvtx
for number in range(3):
    with nvtx.annotate("step", domain="training", payload=number):
        time.sleep(0.05)
        with nvtx.annotate("all_reduce", domain="training"):
            time.sleep(0.05)
"""


def by_nsys() -> dict[str, tuple[int, float]]:
    """Profile PROGRAM with nsys; {range: (how often, ns in all)} as `nsys stats` tells them."""
    with tempfile.TemporaryDirectory() as folder:
        report = f"{folder}/report.nsys-rep"
        profiled = ["nsys", "profile", "-t", "nvtx", "-s", "none", "-o", report]
        profiled += [sys.executable, "-c", PROGRAM]
        stats = ["nsys", "stats", "-r", "nvtx_pushpop_sum", "--format", "csv", report]
        subprocess.run(profiled, check=True, capture_output=True, timeout=60)
        printed = subprocess.run(stats, capture_output=True, text=True, timeout=60).stdout
    lines = printed.splitlines()
    header = next((i for i, line in enumerate(lines) if line.startswith("Time (%)")), len(lines))
    found = {}
    for row in csv.DictReader(line for line in lines[header:] if line):
        name = row["Range"].rpartition(":")[2]  # nsys writes "training:step"
        found[name] = (int(row["Instances"]), float(row["Total Time (ns)"]))
    return found


def check_nsight_systems() -> None:
    """Claim that nsys finds the ranges of a program, and the share of its all-reduces."""
    texts = ("ranges that nsys counts", "all-reduce's share, by nsys stats")
    if shutil.which("nsys") is None or nvtx is None:
        for text in texts:
            blocked(text, needs="nsys, and the nvtx package")
        return
    found = None
    if RANK == 0:
        try:
            found = by_nsys()
        except subprocess.SubprocessError as failed:  # where nothing may be traced, say
            print(f"{'':13}{str(failed)[-80:]}")  # what went wrong stands last
    found = gather_objects(found)[0]
    if found is None:
        for text in texts:
            blocked(text, needs="nsys that works here")
        return
    steps, ns = found.get("step", (0, math.inf))
    reduced, reduced_ns = found.get("all_reduce", (0, 0.0))
    claim(texts[0], 6, steps + reduced, rank=0)
    share = reduced_ns / ns
    claim(texts[1], 0.5, share, atol=0.1, kind="simulated", timed=True, rank=0)


# %% [markdown]
# ## What you should have seen
#
# 1. Six: the step, its four other phases, and all_reduce. With numbers in the names they are nine:
#    four steps are four names, and the all-reduces stay one only because their bytes are equal. In
#    a run of 10,000 steps it would be 10,005. All ranges come back in order, with the depth, color
#    and payload that they were given.
# 2. 4 P bytes: every gradient is handed over once, in float32. A payload makes that a sum over a
#    table: `nsys export --type sqlite` writes ranges with their payloads into one (NVTX_EVENTS,
#    where whole numbers and fractions have columns of their own).
# 3. All but its own. Their launches returned before it had come, so nothing can have been
#    reduced. A timeline on which "all_reduce" takes 20 us shows launches. The ranges around the
#    waits, and those in flight, end after it, on every rank.
# 4. In its own. It comes last and waits for nobody; the others' all-reduces hold its 40 ms, some
#    two thirds of their steps or more. NVTX and torch agree within a few points, since both saw the
#    same wait: from outside the call, and from the thread that does the transfer.
# 5. Far less than 0.1%: some hundred ns each, and about twice that when this listener writes them
#    down. So leave them in. (`nvtx.get_domain` once, and its own `push_range`, cost less yet.)
#
# **Try.** Without the payload, the plan and the sum of bytes FAIL; counts and order hold. With the
# wait outside, NVTX sees some percent where torch sees more than half of the step, and the ranges
# of the ranks no longer share a moment: the range shows a launch, under the name of a transfer.
#
# **On GPUs** trust the projected ranges (`nvtx_gpu_proj_sum`), never the host's, unless something
# waits as the helper here does. NCCL has a domain of its own, with one range per call.
# `torch.autograd.profiler.emit_nvtx()` names every operation; use it for a step or two, because it
# slows each of them. **At scale** profile a few ranks (`%q{SLURM_PROCID}` and a wrapper that
# starts nsys on rank 0 and on the slowest), for ten steps, and never by default.


# %%
def main() -> None:
    figure = {"metavar": "PATH", "help": "save the timeline of all ranks as a PNG"}
    options = command_line({"--figure": figure})
    launch()
    device = setup()
    os.environ["KINETO_LOG_LEVEL"] = "99"  # else the profiler tells when it starts and stops
    listener, why_not = listen() if nvtx is not None else (None, "the nvtx package")
    if listener is None:
        blocked("what ranges say", needs=why_not)
        if nvtx is not None:
            train(None, device)  # for another tool that listens
    else:
        events, traced, losses = train(listener, device)
        asynchronous = launch_and_wait(listener, device)
        ranges = gather_objects([r for r in ranges_of(events, DOMAIN) if r.name != "loss"])
        check_ranges(events, losses, width_on(device))
        check_collectives(events, traced, width_on(device))
        check_torch(listener)
        check_order(ranges, asynchronous)
        check_shares(ranges, traced)
        check_cost(listener, ranges[RANK])
        if options.figure and RANK == 0:
            draw(ranges, options.figure)
    check_nsight_systems()
    finish()


# %% [markdown]
# ## Plumbing, the same in every lesson: join the group, print, check a claim, leave

# %%
ledger: list[dict] = []  # one row per claim, the same on every rank


def command_line(flags: dict[str, dict] | None = None) -> argparse.Namespace:
    """Read the flags, given as {name: arguments of add_argument}; --help and mistakes end here."""
    as_it_is = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_it_is)
    for name, arguments in (flags or {}).items():
        parser.add_argument(name, **arguments)
    parser.error = refuse
    return parser.parse_args()


def launch(world_sizes: range | list[int] = range(1, 1025)) -> None:
    """Plain `python lesson.py`: be torchrun, one rank per GPU if there are several, else 4.

    `world_sizes` are the numbers of ranks that the lesson takes: it gets the largest that fits.
    """
    if "RANK" in os.environ:
        return  # torchrun has started this rank
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    gpus = torch.cuda.device_count()
    ranks = max(size for size in world_sizes if size <= gpus) if gpus > 1 else 4
    os.environ |= {"LAUNCHER": str(os.getpid()), "OMP_NUM_THREADS": "1"}  # ranks share the cores
    logging.disable()  # the rank that fails says why
    here = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]
    try:
        with tempfile.TemporaryDirectory() as logs:  # the one that torchrun makes would stay
            torchrun([*here, f"--log-dir={logs}", *sys.argv])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        sys.exit(f"rank {rank} was ended by {failure.signal_name()}" if failure.exitcode < 0 else 1)
    except SignalException as error:
        sys.exit(128 + error.sigval)
    sys.exit()


def setup() -> torch.device:
    """Join the process group: NCCL if every rank has a GPU of its own, gloo if none has."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the launcher
    if os.environ.pop("LAUNCHER", str(os.getppid())) != str(os.getppid()):
        sys.exit(1)  # it was killed before that line
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank that waits inside C++ too
    torch.set_float32_matmul_precision("highest")  # some images make TF32 the default
    gpus = torch.cuda.device_count()
    local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cpu")
    some = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    how = f"gloo ({local_ranks} ranks and {some} here)"
    if gpus >= local_ranks:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        version = ".".join(map(str, torch.cuda.nccl.version()))
        how = f"NCCL {version} on {torch.cuda.get_device_name()}"
    patience = timedelta(minutes=2)
    store, _, _ = next(dist.rendezvous("env://", timeout=patience))
    store.set(f"device of {RANK}", device.type)
    devices = store.multi_get([f"device of {rank}" for rank in range(WORLD_SIZE)])
    if len(set(devices)) > 1:
        counted = f"GPUs for {devices.count(b'cuda')} of {WORLD_SIZE} ranks"
        refuse(f"needs a GPU per rank, or none, got {counted}; hide all by CUDA_VISIBLE_DEVICES=")
    group = {"rank": RANK, "world_size": WORLD_SIZE, "store": store, "timeout": patience}
    own_gpu = device if device.type == "cuda" else None
    dist.init_process_group("nccl" if own_gpu else "gloo", device_id=own_gpu, **group)
    sys.excepthook = crash  # only now: init_process_group sets one of its own
    print0(f"{WORLD_SIZE} ranks, {how}, torch {torch.__version__}\n")
    print0(f"{'':13}{'claim':50} {'predicted':22} {'measured':>11}")
    return device


def print0(*words: object) -> None:
    """Print on rank 0 only."""
    if RANK == 0:
        print(*words, flush=True)


def refuse(rule: str) -> None:
    """End before the first collective with one message, from rank 0: rule, value, remedy."""
    if RANK != 0:
        time.sleep(30)  # the launcher ends us meanwhile
    sys.exit(f"{sys.argv[0]}: {rule}")


def crash(*error: object) -> None:
    """Leave without ceremony, since peers may be stuck. The first rank that fails says why."""
    first = dist.distributed_c10d._get_default_store().add("crashes", 1) == 1
    time.sleep(1 if first else 30)  # the launcher ends us meanwhile, if a peer's death is the cause
    print(f"rank {RANK}:", file=sys.stderr)
    sys.__excepthook__(*error)
    os._exit(1)


def claim(
    text: str,
    predicted: float,
    measured: float,
    sign: str = "=",
    atol: float = 0.0,
    question: int | None = None,
    kind: str = "measured",
    timed: bool = False,
    varies: bool = False,
    rank: int | None = None,
) -> None:
    """Check `measured sign predicted` (=, <=, >=), give or take `atol`, on all ranks; all call.

    The worst rank is shown, or `rank`. `question` is the number in *Predict* that this answers.
    `kind` says what was measured: the real thing, or what is "simulated", or "theory". `timed` says
    that a clock decides; `varies`, that the kernel's own traffic does, or how well a model learns.
    """
    p = float(predicted)
    m = float(measured)
    error = {"=": abs(m - p), "<=": m - p, ">=": p - m}[sign] - atol
    found = [(math.inf if math.isnan(error) else error, RANK, p, m, float(atol))]
    if dist.is_initialized():
        found *= WORLD_SIZE
        dist.all_gather_object(found, found[0])
    worst = max(found, key=lambda one: one[0]) if rank is None else found[rank]
    error, rank, p, m, slack = worst
    verdict = "PASS" if error <= 0 else "FAIL"
    mark = {"measured": " ", "simulated": "s", "theory": "t"}[kind]
    answers = f"{question}." if question else ""
    between = f"{sign:>2} {readable(p)}" + (f" ±{slack:.2g}" if slack else "")
    print0(f"  {verdict} {mark}  {answers:2} {text:50} {between:22} {readable(m):>11}")
    if verdict == "FAIL":
        print0(f"{'':13}off by {m - p:.3g} on rank {rank}")
    row = {"claim": text, "verdict": verdict, "sign": sign, "rank": rank, "slack": slack}
    row |= {"predicted": p, "measured": m if math.isfinite(m) else str(m)}  # JSON knows no NaN
    row |= {"question": question, "kind": kind, "timed": timed, "varies": varies}
    ledger.append(row | {"line": sys._getframe(1).f_lineno})


def readable(x: float) -> str:
    """Whole numbers in full, others to six digits."""
    return f"{x:,.0f}" if x.is_integer() and abs(x) < 1e12 else f"{x:,.6g}"


def blocked(text: str, needs: str) -> None:
    """Record what this machine cannot answer, and what would."""
    print0(f"  BLOCKED    {text:50} needs {needs}")
    row = {"claim": text, "verdict": "BLOCKED", "needs": needs}
    ledger.append(row | {"line": sys._getframe(1).f_lineno})


def finish() -> None:
    """Write the ledger where LESSON_JSON says; exit 1 if a claim failed or none was made."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    counts = Counter((row.get("kind"), row["verdict"]) for row in ledger)
    said = f"{counts['measured', 'PASS']} PASS, {counts['measured', 'FAIL']} FAIL"
    said += f", {counts[None, 'BLOCKED']} BLOCKED"
    for kind in ("simulated", "theory"):  # apart from what was measured
        passed = counts[kind, "PASS"]
        failed = counts[kind, "FAIL"]
        said += f"; {kind} ({kind[0]}): {passed} PASS, {failed} FAIL" if passed + failed else ""
    print0(f"\n  {said}")
    verdicts = {row["verdict"] for row in ledger}
    if verdicts == {"BLOCKED"}:
        print0("  Nothing could be checked: BLOCKED rows say what they need.")
    if RANK == 0 and "LESSON_JSON" in os.environ:
        with open(os.environ["LESSON_JSON"], "w") as file:
            json.dump({"ranks": WORLD_SIZE, "ledger": ledger}, file, indent=1)
    code = int("FAIL" in verdicts or "PASS" not in verdicts)
    if __name__ == "__main__":
        os._exit(code)  # threads of a group that something still holds can abort a plain exit
    sys.exit(code)


if __name__ == "__main__":
    main()
