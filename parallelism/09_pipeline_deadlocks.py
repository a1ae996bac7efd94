"""Pipeline deadlocks: simulate a schedule before you run it; PyTorch's own schedules
==================================================================================

**Question.** A schedule is a list of actions per stage. Which lists can never finish, how do you
find that out before a thousand GPUs hang, and what does PyTorch give you ready-made?

**Predict**, and write it down before you run. There are four stages and eight micro-batches.

1. The last stage works in GPipe's order by mistake, all others in 1F1B's. How many of its 16
   actions does the last stage get done?
2. Sends wait for their receiver, and each stage sends first and receives then, instead of posting
   both together. How many of the four stages finish under GPipe, and how many under 1F1B?
3. PyTorch's `Schedule1F1B` is written by other people. At how many of the 16 places of a stage's
   list does it do something else than ours?

**Run.**

    torchrun --standalone --nproc-per-node=4 09_pipeline_deadlocks.py   # NCCL on 4 GPUs, else gloo
    python 09_pipeline_deadlocks.py                                     # the same, started for you

Not run on several GPUs.

**Try.** In `simulate` write `visible = posted[message.peer][:1]`, so that a stage sees only the
first message that its peer has posted: what becomes of 1F1B? Leave out the line with `max` there:
which claims fail, and are the deadlocks still found?

**Before.** parallelism/07_pipeline_schedules.py; communication/02_point_to_point.py: who waits.

**Next.** parallelism/12_3d_parallelism.py
"""

import argparse
import contextlib
import copy
import ctypes
import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from fractions import Fraction
from itertools import pairwise, product
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# A *rank* is one of WORLD_SIZE processes that run this same file, and here it is also one *stage*
# of the pipeline. `claim(text, predicted, measured)` prints one row of the ledger and must be
# called by every rank. It, `setup`, `print0`, `blocked` and `finish` stand in the last cell, the
# same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

MICRO_BATCHES = max(8, WORLD_SIZE)  # torch refuses fewer than stages
Action = tuple[str, int]  # ("F" or "B", number of the micro-batch): one forward, one backward pass
SLOTS = {"F": 1, "B": 2}  # a backward pass takes twice as long

# %% [markdown]
# ## 1. What the lists imply: who waits for whom
#
# The lists are those of the lesson before: GPipe does all forwards, then all backwards; 1F1B warms
# up with p-1-s forwards on stage s and then alternates. Nothing else is written down, and nothing
# else is needed: the lists alone say who sends what to whom. Between two actions a stage sends the
# result of the first and receives what the second needs:
#
#              ... F(k) ...  result to stage s+1,  input from stage s-1
#              ... B(k) ...  result to stage s-1,  input from stage s+1
#
# An arrow crosses two lists, so one stage's order constrains another's. That is where deadlocks
# come from: each list is sensible, and together they cannot be done.


# %%
def gpipe(stage: int, p: int, m: int) -> list[Action]:
    """The order in which a stage of p works on m micro-batches: all forward, then all backward."""
    return [("F", k) for k in range(m)] + [("B", k) for k in range(m)]


def one_f_one_b(stage: int, p: int, m: int) -> list[Action]:
    """1F1B with a flush: the order in which a stage of p works on m micro-batches."""
    num_warmup = min(p - 1 - stage, m)
    order = [("F", k) for k in range(num_warmup)]  # fill the pipeline
    for k in range(m - num_warmup):  # steady state: one forward, one backward
        order.append(("F", num_warmup + k))
        order.append(("B", k))
    for k in range(m - num_warmup, m):  # drain it
        order.append(("B", k))
    return order


class Message(NamedTuple):
    """One end of a message of `stage`: a send or a receive, its peer, the action it belongs to."""

    verb: str  # "send" or "recv"
    peer: int
    action: Action  # the send's: which made it; the receive's: which needs it


def neighbors(stage: int, action: Action) -> tuple[int, int]:
    """The stage that an action's input comes from, and the stage that its result goes to."""
    if action[0] == "F":
        return stage - 1, stage + 1
    return stage + 1, stage - 1


def messages(stage: int, p: int, done: Action | None, todo: Action | None) -> list[Message]:
    """What `stage` exchanges between two actions: first what it sends, then what it receives."""
    found = []
    if done is not None:
        found.append(Message("send", neighbors(stage, done)[1], done))
    if todo is not None:
        found.append(Message("recv", neighbors(stage, todo)[0], todo))
    return [message for message in found if 0 <= message.peer < p]


# %% [markdown]
# ## 2. A simulator: play the lists, message by message
#
# The simulator knows no layers and no bytes. A message passes when both ends have posted it: a send
# waits for its receiver, as NCCL's do when the message is large. A stage does its next action when
# all its messages have passed. `clock` counts slots; nothing starts before its cause. When a round
# over all stages changes nothing, either all lists are done or nobody will ever move again.
#
# With `together=False` a stage posts its send alone, and its receive only when the send is through.


# %%
def simulate(schedule: Sequence[list[Action]], together: bool = True) -> list[dict[Action, int]]:
    """The slot in which each stage starts each action; stages that get stuck start fewer."""
    p = len(schedule)
    starts: list[dict[Action, int]] = [{} for _ in range(p)]
    clock = [0] * p
    todo = [[*actions, None] for actions in schedule]
    posted = [messages(s, p, None, actions[0]) for s, actions in enumerate(schedule)]
    moved = True
    while moved:
        moved = False
        for s in range(p):
            for message in posted[s] if together else posted[s][:1]:
                match = Message("recv", s, message.action)
                visible = posted[message.peer] if together else posted[message.peer][:1]
                if message.verb == "send" and match in visible:
                    posted[s] = [other for other in posted[s] if other != message]
                    posted[message.peer] = [o for o in posted[message.peer] if o != match]
                    clock[message.peer] = max(clock[message.peer], clock[s])
                    moved = True
            action = todo[s][0]
            if action is not None and not posted[s] and is_able(action, starts[s]):
                starts[s][todo[s].pop(0)] = clock[s]
                clock[s] += SLOTS[action[0]]
                posted[s] = messages(s, p, action, todo[s][0])
                moved = True
    return starts


def is_able(action: Action, started: dict[Action, int]) -> bool:
    """A backward pass needs this stage's own forward pass; the rest comes by message."""
    return action[0] == "F" or ("F", action[1]) in started


def check_schedule(schedule: Sequence[list[Action]], together: bool = True) -> None:
    """Raise ValueError if the stages cannot all finish; name who waits before which action."""
    waiting = []
    for s, starts in enumerate(simulate(schedule, together)):
        if len(starts) < len(schedule[s]):
            direction, k = schedule[s][len(starts)]
            waiting.append(f"stage {s} before {direction}{k}")
    if waiting:
        stuck = ", ".join(waiting)
        raise ValueError(
            f"every stage must be able to finish its list; {stuck} wait for ever; reorder the lists"
        )


def idle_share(starts: list[dict[Action, int]]) -> Fraction:
    """The share of all slots that no stage uses, from the first action to the end of the last."""
    busy = 0
    end = 0
    for stage in starts:
        for (direction, _), slot in stage.items():
            busy += SLOTS[direction]
            end = max(end, slot + SLOTS[direction])
    return 1 - Fraction(busy, end * len(starts))


# %% [markdown]
# ## 3. Two deadlocks
#
# **Two good lists make a bad pair.** Four stages, the last one in GPipe's order. It wants all eight
# forwards before its first backward. The others warm up with a few forwards and then wait for
# gradients:
#
#               done          next    which needs the result of
#     stage 0   F0 F1 F2 F3   B0      stage 1's B0
#     stage 1   F0 F1 F2      B0      stage 2's B0
#     stage 2   F0 F1         B0      stage 3's B0, which stage 3 does after F7  <--.
#     stage 3   F0 F1         F2      stage 2's F2, which stage 2 does after B0  ---'  a cycle
#
# **A good schedule, a bad exchange.** In 1F1B's steady state stage s has an activation for s+1, and
# s+1 has a gradient for s. If both send first, both wait for the other's receive:
#
#     stage s     send F(k+1) to s+1 ---waits for---> recv F(k+1), which s+1 posts after its send
#     stage s+1   send B(k) to s     ---waits for---> recv B(k), which s posts after its send
#
# Under GPipe nothing ever crosses: forward, the last stage only receives, so it serves the one
# before it, and so on down the line; backward the same from the other end. On NCCL the second
# deadlock hides at first. A send that fits its buffer (4 MB per channel) completes with no receive
# posted, so small activations pass, and the job hangs when the batch, or the sequence, grows. Use
# one batch (`batch_isend_irecv`) for both messages.


# %%
def one_gpipe_among_1f1b(p: int, m: int) -> list[list[Action]]:
    """1F1B on all stages but the last."""
    return [one_f_one_b(s, p, m) for s in range(p - 1)] + [gpipe(p - 1, p, m)]


def rehearse(
    schedule: Sequence[list[Action]],
    group: dist.ProcessGroup,
    together: bool = True,
    patience: timedelta = timedelta(minutes=2),
) -> dict[Action, int]:
    """Follow this rank's list with messages but without layers; return the slots of its actions.

    Each message carries only its sender's clock, in slots. A rank that waits for one longer than
    its patience gives up: what it returns then is what it did until it got stuck.
    """
    now = 0
    starts = {}
    try:
        for done, todo in pairwise([None, *schedule[RANK], None]):
            for message, stamp in exchange(done, todo, now, group, together, patience):
                if message.verb == "recv":
                    now = max(now, stamp)
            if todo is not None:
                starts[todo] = now
                now += SLOTS[todo[0]]
    except RuntimeError as error:  # gloo: a timeout, or a peer that has left
        if "imed out" not in str(error) and "onnection" not in str(error):
            raise
    return starts


def exchange(
    done: Action | None,
    todo: Action | None,
    now: int,
    group: dist.ProcessGroup,
    together: bool,
    patience: timedelta,
) -> list[tuple[Message, int]]:
    """Pass on the clock; return each message with the clock that it carried."""
    ends = messages(RANK, WORLD_SIZE, done, todo)
    stamps = [torch.tensor([now]) for _ in ends]
    verbs = {"send": dist.isend, "recv": dist.irecv}
    ops = []
    for message, stamp in zip(ends, stamps, strict=True):
        ops.append(dist.P2POp(verbs[message.verb], stamp, message.peer, group))
    batches = [ops] if together else [[op] for op in ops]
    for batch in batches:
        if batch:
            for work in dist.batch_isend_irecv(batch):
                work.wait(patience)
    return [(message, stamp.item()) for message, stamp in zip(ends, stamps, strict=True)]


# %% [markdown]
# ## 4. PyTorch's own schedules
#
# `torch.distributed.pipelining` wraps this rank's layers in a `PipelineStage`, and a schedule
# object runs a step: it splits the batch, exchanges, accumulates gradients and scales them. GPipe
# and 1F1B you know. **Interleaved 1F1B** (Narayanan et al., 2021, section 2.2) gives each rank
# several stages, v of them: rank r holds stages r, r+p, r+2p, ... A micro-batch passes every rank v
# times, and the pipeline is full after 1/v of the time:
#
#     p = 2 ranks, v = 2:   rank 0: stages 0 and 2      micro-batch: rank 0, 1, 0, 1, and back
#                           rank 1: stages 1 and 3      idle: (p-1) / (vm+p-1) of the time
#
# It costs v times the messages, and the activations of up to p-1 more (smaller) passes in warm-up.
# There are also `ScheduleInterleavedZeroBubble`, `ScheduleZBVZeroBubble` and `ScheduleDualPipeV`,
# in which a backward pass is split in two.


# %%
class LoggedLayers(nn.Module):
    """Layers that note when a micro-batch passes forward and when it has passed backward."""

    def __init__(self, layers: nn.Module, log: list[Action]) -> None:
        super().__init__()
        self.layers = layers
        self.log = log
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k = self.forwards
        self.forwards += 1
        self.log.append(("F", k))
        y = self.layers(x)
        if y.requires_grad:
            y.register_hook(lambda grad: self.log.append(("B", k)))
        return y


def run_torch_schedule(schedule_class: type, case: "Case", per_rank: int) -> tuple[float, list]:
    """Run two steps by PyTorch; return the second's error of gradients and order of actions."""
    log: list[Action] = []
    count = per_rank * WORLD_SIZE
    stages = []
    modules = []
    for index in range(RANK, count, WORLD_SIZE):
        module = LoggedLayers(case.layers_of(index, count), log)
        modules.append((index, module))
        stages.append(PipelineStage(module, index, count, case.x.device))
    arguments = stages if per_rank > 1 else stages[0]
    schedule = schedule_class(arguments, MICRO_BATCHES, loss_fn=F.mse_loss)
    inputs = (case.x,) if RANK == 0 else ()
    target = {"target": case.target} if RANK == WORLD_SIZE - 1 else {}
    schedule.step(*inputs, **target)  # in its first step PyTorch also finds out all shapes
    log.clear()
    for _, module in modules:
        module.zero_grad()
        module.forwards = 0
    schedule.step(*inputs, **target)
    return max(case.error(module.layers, index, count) for index, module in modules), log


# %% [markdown]
# ## 5. How it is measured
#
# **Simulated against real.** `rehearse` above is the run: real ranks, real messages, whose clocks
# give each action's slot. Deadlocks are let happen, in a gloo group of their own in which a rank
# waits three seconds at most, so that the lesson survives them. It then returns the actions that it
# got done; their number must be the simulator's. (The group is gloo on GPUs too: NCCL's watchdog
# would end the process.) A schedule that is refused must not send one message, which is counted
# beneath torch's dispatcher.
#
# **PyTorch against one process.** The oracle is the whole model on the whole batch, in float64.
# Sums of WIDTH terms are reordered in 2 (LAYERS + 1) products, which sets the tolerance.


# %%
ROWS, WIDTH = 4, 32  # of one micro-batch
LAYERS = 2 * WORLD_SIZE + 1  # enough for two stages per rank; does not divide evenly
PATIENCE = timedelta(seconds=3)  # until a wait in a deadlock is given up
TOLERANCE = 2 * (LAYERS + 1) * WIDTH * 2**-53


class Case:
    """A model, a batch, and the gradients that one process finds."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)  # the same on every rank
        factory = {"device": device, "dtype": torch.float64}
        layers = []
        for _ in range(LAYERS):
            layers.append(nn.Sequential(nn.Linear(WIDTH, WIDTH, **factory), nn.Tanh()))
        self.model = nn.Sequential(*layers)
        self.x = torch.randn(MICRO_BATCHES * ROWS, WIDTH, **factory)
        self.target = torch.randn(MICRO_BATCHES * ROWS, WIDTH, **factory)
        F.mse_loss(self.model(self.x), self.target).backward()

    def expected(self, index: int, count: int) -> nn.Module:
        """Stage `index` of `count` of the model in one process, with its gradients."""
        return self.model[index * LAYERS // count : (index + 1) * LAYERS // count]

    def layers_of(self, index: int, count: int) -> nn.Module:
        """A copy of it, without gradients."""
        layers = copy.deepcopy(self.expected(index, count))
        layers.zero_grad()
        return layers

    def error(self, layers: nn.Module, index: int, count: int) -> float:
        expected = self.expected(index, count)
        pairs = zip(layers.parameters(), expected.parameters(), strict=True)
        return max(relative_error(ours.grad, theirs.grad) for ours, theirs in pairs)


def check_bubbles() -> None:
    wrong = 0
    for order, p, m in product((gpipe, one_f_one_b), range(1, 9), range(1, 9)):
        idle = idle_share(simulate([order(s, p, m) for s in range(p)]))
        wrong += idle != Fraction(p - 1, m + p - 1)
    claim("128 simulated: not (p-1)/(m+p-1) idle", 0, wrong, kind="simulated")


def check_rehearsals() -> None:
    """Run GPipe and 1F1B without layers; claim that every action starts in its simulated slot."""
    group = dist.new_group(backend="gloo")
    for name, order in (("GPipe", gpipe), ("1F1B", one_f_one_b)):
        schedule = [order(s, WORLD_SIZE, MICRO_BATCHES) for s in range(WORLD_SIZE)]
        with CountedCommunication() as counted:
            real = rehearse(schedule, group)
        simulated = simulate(schedule)[RANK]
        elsewhere = 0
        for action in schedule[RANK]:
            elsewhere += simulated.get(action) != real.get(action)
        claim(f"{name}: actions not in the slot simulated", 0, elsewhere, kind="simulated")
        links = (RANK > 0) + (RANK < WORLD_SIZE - 1)
        sent = len(counted.calls("send"))
        claim(f"{name}: messages handed to send", MICRO_BATCHES * links, sent)


# %% [markdown]
# The same counter sees that a schedule is refused before its first message. Then each deadlock is
# let happen.


# %%
def check_deadlocks() -> None:
    if WORLD_SIZE == 1:
        blocked("deadlocks: simulated, refused, and for real", needs="2 ranks")
        return
    p = WORLD_SIZE
    m = MICRO_BATCHES
    mixed = one_gpipe_among_1f1b(p, m)
    group = dist.new_group(backend="gloo")
    with CountedCommunication() as counted, contextlib.suppress(ValueError):
        check_schedule(mixed)
        rehearse(mixed, group, patience=PATIENCE)
    claim("refused: messages handed to send", 0, len(counted.calls("send")))

    done = let_happen("one GPipe among 1F1B", mixed, together=True)
    claim("one GPipe among 1F1B: done by the last stage", 2, done[-1], question=1)
    with_time = timedelta(minutes=2)  # it finishes, however slow the machine is
    schedule = [gpipe(s, p, m) for s in range(p)]
    done = let_happen("GPipe, sends first", schedule, together=False, patience=with_time)
    claim("GPipe, sends first: stages that finish", p, done.count(2 * m), question=2)
    done = let_happen("1F1B, sends first", [one_f_one_b(s, p, m) for s in range(p)], together=False)
    claim("1F1B, sends first: stages that finish", 0, done.count(2 * m), question=2)


def let_happen(
    name: str, schedule: list[list[Action]], together: bool, patience: timedelta = PATIENCE
) -> list[int]:
    """Run a schedule for real; claim that each stage gets as far as simulated; return how far."""
    group = dist.new_group(backend="gloo")
    dist.barrier()  # patience is for messages, and not for those that come late
    real = len(rehearse(schedule, group, together, patience))
    simulated = len(simulate(schedule, together)[RANK])
    claim(f"{name}: actions done", simulated, real, timed=True)
    return gather_objects(real)


def check_torch(case: Case) -> None:
    """Run PyTorch's schedules; claim their gradients, and that they follow our lists."""
    for name, schedule_class, order in (
        ("GPipe", ScheduleGPipe, gpipe),
        ("1F1B", Schedule1F1B, one_f_one_b),
    ):
        error, log = run_torch_schedule(schedule_class, case, per_rank=1)
        claim(f"torch's {name}: error of the gradients", 0, error, atol=TOLERANCE)
        ours = order(RANK, WORLD_SIZE, MICRO_BATCHES)
        others = sum(a != b for a, b in zip(log, ours, strict=True))
        claim(f"torch's {name}: actions unlike our list's", 0, others, question=3)
    if MICRO_BATCHES % WORLD_SIZE > 0:
        blocked("torch's Interleaved1F1B", needs=f"ranks that divide {MICRO_BATCHES}")
        return
    error, _ = run_torch_schedule(ScheduleInterleaved1F1B, case, per_rank=2)
    claim("torch's Interleaved1F1B: error of the gradients", 0, error, atol=TOLERANCE)


# %% [markdown]
# What is below is the same in other lessons: two small helpers, and the counter, which records what
# this rank hands to a process group.


# %%
def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference between two tensors, relative to the largest element."""
    return ((ours - expected).abs().max() / expected.abs().max()).item()


def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


class Call(NamedTuple):
    """One collective, send or receive of this rank, as it was handed to the process group."""

    operation: str  # "all_reduce", "all_gather", "reduce_scatter", "send", ...
    elements: int  # of its input or its output, whichever is larger
    nbytes: int  # of the same
    ranks: tuple[int, ...]  # of the group
    peer: int | None  # of a send or receive: the other rank; None: any


class CountedCommunication(TorchDispatchMode):
    """Records this rank's communication in `log`, beneath torch's dispatcher: DDP's and FSDP's too.

    It sees what is handed to a backend, not what the backend then sends.
    """

    NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier")
    NAMES += ("send", "recv", "reduce", "gather", "scatter")  # "_allgather_base_" is an all_gather

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Call] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its local tensors come by here in a moment
        if func.namespace.lstrip("_").startswith("c10d"):
            self.record(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def record(self, func, args: tuple, kwargs: dict) -> None:
        spelled = func._schema.name.replace("_", "")
        names = [name for name in self.NAMES if name.replace("_", "") in spelled]
        if not names:
            return  # it waits for a result or wraps one
        given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}
        given |= kwargs
        if "process_group" in given:
            group = dist.ProcessGroup.unbox(given["process_group"])
        else:
            group = dist.distributed_c10d._resolve_process_group(given["group_name"])
        ranks = tuple(dist.get_process_group_ranks(group))
        sizes = [(0, 0)]
        for argument in args:
            tensors = [leaf for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor)]
            sizes.append((sum(t.numel() for t in tensors), sum(t.nbytes for t in tensors)))
        peer = given.get("dst", given.get("src")) if names[0] in ("send", "recv") else None
        peer = None if peer is None or peer < 0 else ranks[peer]
        self.log.append(Call(names[0], *max(sizes), ranks, peer))

    def calls(self, operation: str = "") -> list[Call]:
        """The calls of one operation, in order; of all without a name."""
        return [call for call in self.log if operation in ("", call.operation)]

    def elements(self, operation: str = "") -> int:
        """Elements handed over in all calls of one operation."""
        return sum(call.elements for call in self.calls(operation))


# %% [markdown]
# ## What you should have seen
#
# 1. Two: F0 and F1. It waits for F2, which stage 2 does after B0, for which stage 3 has no gradient
#    yet. With more stages it is still two. The simulator knew, action by action, on every rank. On
#    NCCL you would see GPUs at 100% (a kernel spins) and, after ten minutes, the watchdog.
# 2. Under GPipe all four finish, under 1F1B none. Messages that cross need both ends posted
#    together.
# 3. At none: PyTorch's lists are ours. (Its warm-up is said to be p-s forwards, and its steady
#    state begins with a backward: the same list, cut elsewhere.) Gradients are one process's, to
#    rounding, also with two stages per rank.
#
# All 128 simulated schedules idle exactly (p-1)/(m+p-1) of the slots, and the real ranks started
# every action in the slot that was simulated. So a simulator of forty lines is worth having: it
# prices a schedule, draws it, and refuses it before a cluster hangs on it. PyTorch has one too, for
# its own lists with communication written out (`_simulate_comms_compute` in
# `torch.distributed.pipelining.schedules`).
#
# **Try.** A stage that sees only its peers' first message cannot post together: 1F1B gets stuck in
# the simulator and runs in reality, so slots and bubbles FAIL. Without the `max` no stage ever
# waits for a message's arrival in time: bubbles and slots are wrong, but the deadlocks are still
# found, for who waits for whom does not depend on how long anything takes.
#
# **What the simulator leaves out.** Messages take no time here, and stages are equal. Give actions
# measured times and messages a latency, and it predicts the step of a real job; PyTorch's
# `_PipelineScheduleRuntime` can load its lists from a file.


# %%
def main() -> None:
    command_line()
    launch()
    device = setup()
    check_bubbles()
    check_rehearsals()
    check_deadlocks()
    check_torch(Case(device))
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
    how = f"gloo ({local_ranks} ranks and {gpus} GPUs here)"
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
        counted = f"{devices.count(b'cuda')} GPUs for {WORLD_SIZE} ranks"
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
