"""Interleaved and zero-bubble schedules: smaller pieces, and a backward pass in two
=================================================================================

**Question.** 1F1B idles (p-1) / (m+p-1) of the time with p stages and m micro-batches. Which other
orders of the same work idle less, and what do they pay for it, in messages and in memory?

**Predict**, and write it down before you run. There are four ranks and eight micro-batches. A
backward pass takes twice as long as a forward pass, a message takes no time, and 1F1B idles 3/11.

1. The model is cut into eight pieces. Rank 0 holds pieces 0 and 4, rank 1 pieces 1 and 5, and so
   on. What share of the time does a rank idle, and how many times as many messages are sent?
2. Back to four pieces. A backward pass is done in two halves, of which only the first is waited
   for: the gradient of the piece's input. The second half, the gradients of its weights, fills
   holes. No rank may hold more micro-batches than rank 0 does under 1F1B. What share is left idle?
3. Now a rank may hold as many micro-batches as it likes. How many does it take until no rank idles
   between its first and its last action?
4. Rank 0 holds pieces 0 and 7 of eight, rank 1 pieces 1 and 6, and so on, down and up again. Can
   such a pipeline idle nowhere and hold no more than 1F1B's rank 0?

**Run.**

    torchrun --standalone --nproc-per-node=4 08_interleaved_zero_bubble.py   # NCCL on GPUs, or gloo
    python 08_interleaved_zero_bubble.py                          # the same, started for you
    python 08_interleaved_zero_bubble.py --figure grids.png       # and draw what was run

Not run on several GPUs.

**Try.** In `interleaved` leave out the `2 *`: what still holds, and what falls? In `zero_bubble`
let `delay` be 0: which claims fail?

**Before.** parallelism/07_pipeline_schedules.py: GPipe, 1F1B, and why the bubble is as large.

**Next.** exercises/11_pipeline_micro_batches: a backward pass in two halves, by your own hand. Then
parallelism/09_pipeline_deadlocks.py
"""

import argparse
import copy
import ctypes
import json
import logging
import math
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from fractions import Fraction
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# %% [markdown]
# ## 1. Smaller pieces: interleaved 1F1B
#
# Where does 1F1B's bubble come from? The last rank has nothing to do until the first micro-batch
# has come through p-1 stages, and at the end rank 0 waits for the last gradient to come back
# through p-1. So p-1 forward passes and p-1 backward passes of a *whole stage* are lost. The first
# remedy makes the stages smaller. Cut the model into v p **stages** and give each rank v of them,
# rank r the stages r, r+p, r+2p, ...: a micro-batch goes around all ranks v times, and the pipeline
# is full after 1/v of the time.
#
# An action is a kind, a stage and a micro-batch. F is a forward pass of one stage (1 slot) and B
# its backward pass (2 slots). With p = 2, v = 2 and m = 4, rank 0 has stages 0 and 2:
#
#     forwards of rank 0      stage         0 0 2 2 0 0 2 2        p micro-batches through its first
#                             micro-batch   0 1 0 1 2 3 2 3        stage, the same through its next
#     backwards of rank 0     stage         2 2 0 0 2 2 0 0        the stages in reverse
#
# As in 1F1B, a rank runs ahead, and then does one forward and one backward in turn. It must run
# ahead further: by (v-1) p forwards until its last stage has its first input, and by one for each
# rank behind it until the first gradient is back. Megatron takes two for each, so that a message
# may be on its way while a rank works.

# %%
Action = tuple[str, int, int]  # kind, stage, micro-batch
SLOTS = {"F": 1, "B": 2, "I": 1, "W": 1}


def interleaved(rank: int, p: int, m: int, v: int) -> list[Action]:
    """Interleaved 1F1B (Narayanan et al., 2021): v stages per rank, m a multiple of p, v > 1."""
    stages = range(rank, v * p, p)
    forwards = []
    backwards = []
    for group in range(0, m, p):  # of p micro-batches
        for stage in stages:
            forwards += [("F", stage, k) for k in range(group, group + p)]
        for stage in reversed(stages):
            backwards += [("B", stage, k) for k in range(group, group + p)]
    ahead = min((v - 1) * p + 2 * (p - 1 - rank), v * m)
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - ahead :]


# %% [markdown]
# What it costs: each micro-batch crosses v p - 1 borders in each direction instead of p - 1, and
# rank 0 holds more. A stage's input and output are as large as before, and there are v times as
# many of them.
#
# **Breadth first** (Lamy-Poirier, 2022) is GPipe with such pieces: all m micro-batches through the
# first stage of a rank, then all through its next. Its bubble is as small. It holds everything; but
# it is done with a stage before it begins the next one, so that a stage that is sharded by FSDP has
# to be gathered once per pass, and not once per micro-batch.


# %%
def breadth_first(rank: int, p: int, m: int, v: int) -> list[Action]:
    """Looped breadth-first: every stage does all forwards, then, in reverse, all backwards."""
    stages = range(rank, v * p, p)
    order = []
    for stage in stages:
        order += [("F", stage, k) for k in range(m)]
    for stage in reversed(stages):
        order += [("B", stage, k) for k in reversed(range(m))]
    return order


# %% [markdown]
# ## 2. A backward pass in two halves: zero bubble
#
# The second remedy fills the holes. A backward pass does two things that need not be done together.
# The gradient of its **input** (I) is waited for by the stage before. Those of its **weights** (W)
# are waited for by nobody until the optimizer steps. Do I at once, and W when there is nothing
# better to do (Qi et al., 2023; there I is called B):
#
#     1F1B    rank 0   F F F . . . . B B F B B . B B . B B          p = 3, m = 4
#             rank 1   . F F . . B B F B B F B B . B B              the first gradient comes back
#             rank 2   . . F B B F B B F B B F B B                  through whole backward passes
#
#     ZB-H1   rank 0   F F F . . I W F I W I W I W                  through halves it is there
#             rank 1   . F F . I F I W F I W I W W                  sooner, and at the end W
#             rank 2   . . F I F I F I W F I W W W                  fills what were holes
#
# Two numbers make a schedule of this family: by how many forward passes a rank runs **ahead**, and
# by how many micro-batches it **delays** W. It holds a micro-batch from its F to its W, so at most
# ahead + 1 + delay of them:
#
#                    ahead          delay       holds       idle slots of rank 0
#     1F1B           p-1-r          W with I    p-r         (p-1) (F + I + W)
#     ZB-H1          p-1-r          r           p           (p-1) (F + I - W)
#     ZB-H2       2 (p-1-r)        2 r          2 p - 1      0
#
# ZB-H1 lets every rank hold what 1F1B lets rank 0 hold. ZB-H2 uses twice that memory, to run so far
# ahead that rank 0 has forward passes to do until the first gradient is back.


# %%
def zero_bubble(rank: int, p: int, m: int, ahead: int, delay: int) -> list[Action]:
    """ZB-H1 and ZB-H2: 1F1B's order of F and I, with every W `delay` micro-batches after its I."""
    ahead = min(ahead, m)
    order = [("F", rank, k) for k in range(ahead)]
    for k in range(m):
        if ahead + k < m:
            order.append(("F", rank, ahead + k))
        order.append(("I", rank, k))
        if k >= delay:
            order.append(("W", rank, k - delay))
    return order + [("W", rank, k) for k in range(max(m - delay, 0), m)]


def zb_h1(rank: int, p: int, m: int) -> list[Action]:
    return zero_bubble(rank, p, m, ahead=p - 1 - rank, delay=rank)


def zb_h2(rank: int, p: int, m: int) -> list[Action]:
    return zero_bubble(rank, p, m, ahead=2 * (p - 1 - rank), delay=2 * rank)


# %% [markdown]
# ZB-H2 holds twice as much on every rank. The third remedy takes both ideas: two stages per rank,
# placed like a **V** (Qi et al., 2024). Rank r has stage r on the way down and stage 2p-1-r on the
# way up, so rank 0 has the first and the last one. What is early in the pipeline on one stage of a
# rank is late on its other one, and all ranks hold equally much: at most 2p activations of stages
# half as large, which is p micro-batches. The order is written down phase by phase:


# %%
def zb_v(rank: int, p: int, m: int) -> list[Action]:
    """ZB-V for passes F, I and W that take equally long, and m >= 2p-1; D is down, U is up."""
    stages = {"D": rank, "U": 2 * p - 1 - rank}
    phases = [
        (2 * (p - rank) - 1, "FD"),  # until the first micro-batch comes up again
        (rank, "FU FD"),
        (p - rank, "FU IU WU"),  # until the first gradient comes up again
        (m - p, "FD ID WD FU IU WU"),  # steady state
        (rank, "ID IU"),  # gradients are waited for, and W has time
        (p - rank, "ID WD"),
        (m, "WU"),  # what is left
        (m, "WD"),
    ]
    done = Counter()
    order = []
    for times, passes in phases:
        for kind, way in times * passes.split():
            if done[kind, way] < m:
                order.append((kind, stages[way], done[kind, way]))
                done[kind, way] += 1
    return order


# %% [markdown]
# ## 3. What the lists imply: slots, and what is held
#
# An action starts when its rank is free and its cause is done: F needs the F of the stage before, I
# or B needs its own F and the I or B of the stage behind it, and W needs its own I. That gives
# every action its slot. A rank idles between its first and its last action. Ranks start and end one
# after the other, and the one that takes longest sets the pace, since the next step can begin as
# staggered as this one did. (Only a gradient norm needs all ranks at one time; the paper puts it
# off.)


# %%
def simulate(orders: list[list[Action]]) -> list[dict[Action, int]]:
    """The slot in which each rank starts each of its actions."""
    last = max(max(stage for _, stage, _ in order) for order in orders)
    starts = [{} for _ in orders]
    clock = [0] * len(orders)
    done = {}  # the slot in which an action has ended
    todo = [list(order) for order in orders]
    while any(todo):
        before = len(done)
        for rank, actions in enumerate(todo):
            while actions and all(cause in done for cause in causes(actions[0], last)):
                action = actions.pop(0)
                kind, stage, k = action
                ready = max([clock[rank], *(done[cause] for cause in causes(action, last))])
                starts[rank][action] = ready
                clock[rank] = ready + SLOTS[kind]
                done["I" if kind == "B" else kind, stage, k] = clock[rank]
        if len(done) == before:
            raise ValueError(f"these lists wait for each other for ever: {todo}")
    return starts


def causes(action: Action, last: int) -> list[Action]:
    """What must be done before; the I of a whole backward pass is done with it."""
    kind, stage, k = action
    if kind == "F":
        return [("F", stage - 1, k)] if stage > 0 else []
    if kind == "W":
        return [("I", stage, k)]
    return [("F", stage, k)] + ([("I", stage + 1, k)] if stage < last else [])


def idle_share(starts: list[dict[Action, int]]) -> Fraction:
    """The largest share of a rank's time, from its first action to its last, in which it idles."""
    shares = []
    for actions in starts:
        busy = sum(SLOTS[kind] for kind, _, _ in actions)
        ends = [slot + SLOTS[kind] for (kind, _, _), slot in actions.items()]
        shares.append(1 - Fraction(busy, max(ends) - min(actions.values())))
    return max(shares)


# %% [markdown]
# ## 4. A rank follows its list
#
# The real run has a stage per entry of `stages`, and messages with a name each: the action whose
# result they carry. A rank sends without waiting and receives when an action needs it. A message
# between two stages of one rank (the tip of the V) stays there. The two halves of a backward pass
# are two calls of `torch.autograd.grad` on one graph: the first asks for the input's gradient and
# keeps the graph, the second asks for the weights'.


# %%
class Mail:
    """Sends and receives what an action has made, with the sender's clock; on the CPU, by gloo."""

    def __init__(self, rank_of: list[int], group: dist.ProcessGroup) -> None:
        self.rank_of = rank_of  # of each stage
        self.group = group
        self.at_home: dict[Action, torch.Tensor] = {}  # messages from this rank to itself
        self.sends: list[dist.Work] = []
        self.now = 0  # the logical clock, in slots

    def send(self, action: Action, result: torch.Tensor, stage: int) -> None:
        """Send the result of an action, and the clock, to the rank of another stage."""
        message = torch.cat([result.flatten(), torch.tensor([float(self.now)])])
        if self.rank_of[stage] == RANK:
            self.at_home[action] = message
        else:
            peer = self.rank_of[stage]
            self.sends.append(dist.isend(message, peer, self.group, tag=self.tag(*action)))

    def receive(self, *action: object) -> torch.Tensor:
        peer = self.rank_of[action[1]]
        if peer == RANK:
            message = self.at_home.pop(action)
        else:
            message = torch.empty(ROWS * WIDTH + 1, dtype=torch.float64)
            dist.recv(message, peer, self.group, tag=self.tag(*action))
        self.now = max(self.now, int(message[-1]))
        return message[:-1].view(ROWS, WIDTH)

    def tag(self, kind: str, stage: int, k: int) -> int:
        """A number of its own for each message of a step."""
        return (k * len(self.rank_of) + stage) * 2 + (kind == "F")


# %% [markdown]
# The step acts by the list: one method per kind of action.


# %%
class Pipeline(Mail):
    """One rank's stages, and the step that follows a list."""

    def __init__(self, case: "Case", rank_of: list[int], group: dist.ProcessGroup) -> None:
        super().__init__(rank_of, group)
        self.case = case
        self.stages = {}
        for stage, rank in enumerate(rank_of):
            if rank == RANK:
                self.stages[stage] = case.stage(stage, len(rank_of))
        self.graphs: dict[tuple[int, int], tuple] = {}  # (stage, k): what is held of it
        self.starts: dict[Action, int] = {}
        self.held = 0  # at most

    def step(self, order: list[Action]) -> None:
        act = {"F": self.forward, "B": self.backward, "I": self.to_input, "W": self.to_weights}
        for kind, stage, k in order:
            act[kind](kind, stage, k)
        for send in self.sends:
            send.wait()

    def begin(self, *action: object) -> None:
        self.starts[action] = self.now
        self.now += SLOTS[action[0]]

    def forward(self, kind: str, stage: int, k: int) -> None:
        x = self.case.inputs[k] if stage == 0 else self.receive("F", stage - 1, k)
        self.begin(kind, stage, k)
        y = self.stages[stage](x.requires_grad_())
        if stage == len(self.rank_of) - 1:
            y = self.case.loss(y, k)
        else:
            self.send(("F", stage, k), y.detach(), stage + 1)
        self.graphs[stage, k] = (x, y)
        self.held = max(self.held, len(self.graphs))

    def backward(self, kind: str, stage: int, k: int) -> None:
        """Both halves at once."""
        y, gradient = self.to_input(kind, stage, k)
        self.add_gradients(stage, y, gradient)
        del self.graphs[stage, k]

    def to_input(self, kind: str, stage: int, k: int) -> tuple:
        """The half that is waited for; returns what the other half needs."""
        gradient = None
        if stage < len(self.rank_of) - 1:
            gradient = self.receive("I", stage + 1, k)
        self.begin(kind, stage, k)
        x, y = self.graphs[stage, k]
        (x_gradient,) = torch.autograd.grad(y, x, gradient, retain_graph=True)
        if stage > 0:
            self.send(("I", stage, k), x_gradient, stage - 1)
        self.graphs[stage, k] = (y, gradient)
        return y, gradient

    def to_weights(self, kind: str, stage: int, k: int) -> None:
        """The half that nobody waits for."""
        self.begin(kind, stage, k)
        self.add_gradients(stage, *self.graphs.pop((stage, k)))

    def add_gradients(self, stage: int, y: torch.Tensor, gradient: torch.Tensor | None) -> None:
        weights = list(self.stages[stage].parameters())
        for weight, new in zip(weights, torch.autograd.grad(y, weights, gradient), strict=True):
            weight.grad = new if weight.grad is None else weight.grad + new


# %% [markdown]
# ## 5. How it is measured
#
# The oracle is the whole model on the whole batch in one process, in float64; the gradients of
# every rank's stages are compared with it. Slots are counted in the run, as in the lesson before:
# each message takes along its sender's logical clock. What is *predicted* is a formula; what is
# measured is what the run did. Lengths of slots are assumed, so rows in slots are "simulated". The
# simulator of section 3 is held against the run, action by action.

# %%
ROWS, WIDTH = 4, 16  # of one micro-batch
MICRO_BATCHES = WORLD_SIZE * max(2, math.ceil(8 / WORLD_SIZE))  # 8 on 1, 2, 4 ranks
V = 2  # stages per rank, where there are several
LAYERS = 2 * V * WORLD_SIZE
TOLERANCE = 2 * (LAYERS + 1) * WIDTH * 2**-53  # sums of WIDTH terms, LAYERS there and back


class Case:
    """A model, a batch, and the gradients that one process finds."""

    def __init__(self) -> None:
        torch.manual_seed(0)  # the same on every rank
        layers = []
        for _ in range(LAYERS):
            layers.append(nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Tanh()))
        self.model = nn.Sequential(*layers)
        self.x = torch.randn(MICRO_BATCHES * ROWS, WIDTH, dtype=torch.float64)
        self.inputs = self.x.chunk(MICRO_BATCHES)
        self.target = torch.randn(MICRO_BATCHES * ROWS, WIDTH, dtype=torch.float64)
        F.mse_loss(self.model(self.x), self.target).backward()

    def stage(self, stage: int, stages: int) -> nn.Module:
        """A copy of one of so many pieces, without gradients."""
        piece = copy.deepcopy(self.piece(stage, stages))
        piece.zero_grad()
        return piece

    def piece(self, stage: int, stages: int) -> nn.Module:
        return self.model[stage * LAYERS // stages : (stage + 1) * LAYERS // stages]

    def loss(self, y: torch.Tensor, k: int) -> torch.Tensor:
        return F.mse_loss(y, self.target.chunk(MICRO_BATCHES)[k]) / MICRO_BATCHES

    def error(self, ours: dict[int, nn.Module], stages: int) -> float:
        """How far the gradients are from one process's, relative to the largest."""
        worst = 0.0
        for stage, module in ours.items():
            expected = self.piece(stage, stages)
            for mine, whole in zip(module.parameters(), expected.parameters(), strict=True):
                difference = (mine.grad - whole.grad).abs().max() / whole.grad.abs().max()
                worst = max(worst, difference.item())
        return worst


def loop(stages: int) -> list[int]:
    """The rank of each stage, where they go round and round."""
    return [stage % WORLD_SIZE for stage in range(stages)]


def v_shape(stages: int) -> list[int]:
    """The rank of each stage, down and up again."""
    return [min(stage, stages - 1 - stage) for stage in range(stages)]


def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


# %% [markdown]
# Every schedule, with what the formulas of sections 1 and 2 say of it: the share idle, and what
# rank 0 holds, in activations of a pth of the model, so that a half counts half.


# %%
class Schedule(NamedTuple):
    """A list for each rank, the rank of each stage, and what is predicted."""

    orders: list[list[Action]]
    rank_of: list[int]
    idle: Fraction
    held: Fraction
    question: int | None = None


def schedules() -> dict[str, Schedule]:
    p = WORLD_SIZE
    m = MICRO_BATCHES
    ranks = range(p)
    smaller = Fraction(p - 1, V * m + p - 1)
    third = Fraction(p - 1, 3 * m + p - 1)  # F, I and W take a slot each
    ahead = Fraction((V - 1) * p + 2 * (p - 1) + 1, V)
    orders = [interleaved(rank, p, m, V) for rank in ranks]
    found = {"interleaved": Schedule(orders, loop(V * p), smaller, ahead, question=1)}
    orders = [breadth_first(rank, p, m, V) for rank in ranks]
    found["breadth first"] = Schedule(orders, loop(V * p), smaller, m)
    orders = [zb_h1(rank, p, m) for rank in ranks]
    found["ZB-H1"] = Schedule(orders, loop(p), third, p, question=2)
    orders = [zb_h2(rank, p, m) for rank in ranks]
    found["ZB-H2"] = Schedule(orders, loop(p), 0, 2 * p - 1, question=3)
    orders = [zb_v(rank, p, m) for rank in ranks]
    found["ZB-V"] = Schedule(orders, v_shape(2 * p), 0, p, question=4)
    return found


def check_ours(case: Case, group: dist.ProcessGroup) -> dict[str, list]:
    """Run every schedule; claim gradients, idle slots, what is held, messages; return the slots."""
    runs = {}
    for name, schedule in schedules().items():
        pipeline = Pipeline(case, schedule.rank_of, group)
        pipeline.step(schedule.orders[RANK])
        stages = len(schedule.rank_of)
        runs[name] = gather_objects(pipeline.starts)
        show(name, runs[name])
        error = case.error(pipeline.stages, stages)
        claim(f"{name}: error of the gradients", 0, error, atol=TOLERANCE)
        idle = idle_share(runs[name])
        number = schedule.question
        claim(f"{name}: share idle", schedule.idle, idle, question=number, kind="simulated")
        held = pipeline.held * WORLD_SIZE / stages
        claim(f"{name}: held by rank 0", schedule.held, held, question=number, rank=0)
        wrong = sum(pipeline.starts[a] != t for a, t in simulate(schedule.orders)[RANK].items())
        claim(f"{name}: actions not in the slot simulated", 0, wrong, kind="simulated")
        if name == "interleaved":
            sent = sum(gather_objects(len(pipeline.sends)))
            due = 2 * MICRO_BATCHES * (stages - 1) if WORLD_SIZE > 1 else 0
            claim("interleaved: messages", due, sent, question=1)
    return runs


def show(name: str, starts: list[dict[Action, int]]) -> None:
    """Print a run as a grid: a row per rank, a column per slot; small letters: a later stage."""
    print0(f"\n{'':13}{name}")
    for rank, actions in enumerate(starts):
        print0(f"{'':13}rank {rank}  {grid(actions)}")
    print0()


def grid(actions: dict[Action, int]) -> str:
    ends = [slot + SLOTS[kind] for (kind, _, _), slot in actions.items()]
    row = ["."] * max(ends)
    first = min(stage for _, stage, _ in actions)
    for (kind, stage, _), slot in actions.items():
        letter = kind if stage == first else kind.lower()
        row[slot : slot + SLOTS[kind]] = letter * SLOTS[kind]
    return "".join(row)


# %% [markdown]
# ## 6. PyTorch's own
#
# `torch.distributed.pipelining` has these schedules as classes, each of which takes this rank's
# stages. Their lists stand in `pipeline_order`, with names such as 2F0 for stage 2 and micro-batch
# 0. They are run, and their lists are put through our simulator, next to ours. PyTorch has no
# counterpart of ZB-H1 and ZB-H2: its `ScheduleInterleavedZeroBubble` is ZB-H1 on several stages per
# rank. **DualPipeV** (DeepSeek, 2025) has ZB-V's shape; in its steady state it puts a forward pass
# and a backward pass into one action, so that the all-to-alls of one run behind the products of the
# other. In slots, where a message takes no time, that gains nothing.

# %%
TORCHS = {  # the class, the ranks of its stages, and ours to compare with
    "Interleaved1F1B": (loop, "interleaved"),
    "LoopedBFS": (loop, "breadth first"),
    "InterleavedZeroBubble": (loop, None),
    "ZBVZeroBubble": (v_shape, "ZB-V"),
    "DualPipeV": (v_shape, None),
}


def run_torchs(name: str, case: Case, device: torch.device) -> tuple[float, list[list[Action]]]:
    """Run a step of one of PyTorch's schedules; return the error of gradients, and its lists."""
    place, _ = TORCHS[name]
    rank_of = place(V * WORLD_SIZE)
    modules = {}
    stages = []
    for stage, rank in enumerate(rank_of):
        if rank == RANK:
            modules[stage] = case.stage(stage, len(rank_of)).to(device)
            stages.append(PipelineStage(modules[stage], stage, len(rank_of), device))
    kind = getattr(pipelining, f"Schedule{name}")
    made = kind(stages, MICRO_BATCHES, loss_fn=F.mse_loss)
    inputs = (case.x.to(device),) if 0 in modules else ()
    target = {"target": case.target.to(device)} if len(rank_of) - 1 in modules else {}
    made.step(*inputs, **target)
    lists = []
    for rank in range(WORLD_SIZE):
        named = " ".join(str(action) for action in made.pipeline_order[rank] if action)
        found = re.findall(r"(\d+)([FBIW])(\d+)", named)
        lists.append([(kind, int(stage), int(k)) for stage, kind, k in found])
    on_cpu = {stage: module.cpu() for stage, module in modules.items()}
    return case.error(on_cpu, len(rank_of)), lists


def check_torchs(case: Case, device: torch.device) -> None:
    if WORLD_SIZE == 1:
        blocked("PyTorch's own schedules", needs="2 ranks")
        return
    ours = schedules()
    for name, (_, like) in TORCHS.items():
        error, lists = run_torchs(name, case, device)
        claim(f"torch's {name}: error of gradients", 0, error, atol=TOLERANCE)
        print0(f"{'':13}torch's {name}: {float(idle_share(simulate(lists))):.1%} idle")
        if like:
            others = sum(a != b for a, b in zip(lists[RANK], ours[like].orders[RANK], strict=True))
            claim(f"torch's {name}: actions unlike our list's", 0, others)


# %% [markdown]
# ## 7. On GPUs: the share that real stages idle
#
# With v stages per rank, all of one size, a step of PyTorch's `ScheduleInterleaved1F1B` is timed;
# and so is the same work on a rank alone, with no neighbor to wait for. What the step takes longer
# is bubble and messages.


# %%
def idle_on_gpu(v: int, device: torch.device) -> float:
    """The share of a step that is not a rank's own work, with v stages of 8 / v layers."""
    stages = []
    for stage in range(RANK, v * WORLD_SIZE, WORLD_SIZE):
        linears = [nn.Linear(8192, 8192, bias=False) for _ in range(8 // v)]
        module = nn.Sequential(*linears).to(device, torch.bfloat16)
        stages.append(PipelineStage(module, stage, v * WORLD_SIZE, device))
    kind = pipelining.ScheduleInterleaved1F1B if v > 1 else pipelining.Schedule1F1B
    made = kind(stages if v > 1 else stages[0], MICRO_BATCHES, loss_fn=F.mse_loss)
    x = torch.randn(MICRO_BATCHES * 2048, 8192, device=device, dtype=torch.bfloat16)
    inputs = (x,) if RANK == 0 else ()
    target = {"target": x} if RANK == WORLD_SIZE - 1 else {}

    def alone() -> None:
        for micro_batch in x.chunk(MICRO_BATCHES):
            for stage in stages:
                stage.submod(micro_batch.detach().requires_grad_()).sum().backward()

    return 1 - seconds(alone) / seconds(lambda: made.step(*inputs, **target))


def seconds(work: Callable) -> float:
    """The best of three times after a warm-up, in which ranks connect and shapes are found."""
    times = []
    for _ in range(4):
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def check_gpus(device: torch.device) -> None:
    if device.type == "cpu" or WORLD_SIZE == 1 or not torch.cuda.is_bf16_supported(False):
        blocked("share that real stages idle, v = 1, 2, 4", needs="2 GPUs with bfloat16")
        return
    for v in (1, 2, 4):
        expected = Fraction(WORLD_SIZE - 1, v * MICRO_BATCHES + WORLD_SIZE - 1)
        idle = idle_on_gpu(v, device)
        claim(f"real stages, v = {v}: share idle", expected, idle, atol=0.05, timed=True)


# %% [markdown]
# `--figure` draws the grid of every schedule that was run.


# %%
def draw(path: str, runs: dict[str, list]) -> None:
    """One panel per schedule, one row per rank; light colors are the rank's second stage."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1.5 * len(runs)), layout="constrained")
    colors = {"F": "C0", "B": "C2", "I": "C1", "W": "C4"}
    panels = figure.subplots(len(runs), 1, sharex=True)
    for axes, (name, starts) in zip(panels, runs.items(), strict=True):
        size = WORLD_SIZE / len(schedules()[name].rank_of)  # of a slot
        for rank, actions in enumerate(starts):
            first = min(stage for _, stage, _ in actions)
            for (kind, stage, _), slot in actions.items():
                bar = {"color": colors[kind], "alpha": 1 if stage == first else 0.5}
                axes.barh(rank, SLOTS[kind] * size, left=slot * size, edgecolor="white", **bar)
        axes.set(ylabel="rank", yticks=range(len(starts)), ylim=(len(starts) - 0.5, -0.5))
        axes.set_title(f"{name}: {float(idle_share(starts)):.1%} idle")
    panels[-1].set_xlabel("forward passes of 1/p of the model; F blue, B green, I orange, W violet")
    figure.savefig(path)


# %% [markdown]
# ## What you should have seen
#
# With 4 ranks and 8 micro-batches:
#
# 1. 3/19, 16%, instead of 3/11: what is lost are p-1 passes forward and backward, of stages half as
#    large. Seven borders are crossed instead of three, so 7/3 as many messages, each as large as
#    before. And rank 0 holds 11 activations of half stages, 5.5 instead of 4.
# 2. 1/9: 3 idle slots next to 24. Of 1F1B's 9 idle slots six are gone. All ranks now hold four
#    micro-batches; under 1F1B the last one held one.
# 3. Seven, 2p-1, on every rank. Fewer cannot do: the first gradient is back on rank 0 after p
#    forwards and p-1 halves of backward passes, 2p-1 slots.
# 4. Yes: none idles, and each holds 8 activations of half stages. But that needs F, I and W to be
#    equally long. In a transformer they are not: the products of attention have no W.
#    Then some holes come back.
#
# PyTorch's lists for interleaved 1F1B, breadth first and ZB-V are ours, action by action. In slots
# its InterleavedZeroBubble and DualPipeV idle 6%, where interleaved 1F1B idles 16%.
#
# **Try.** With one forward for each rank behind instead of two, interleaving idles as little and
# rank 0 holds 8 instead of 11: the other three are there for messages that take time, and here they
# take none. With no delay ZB-H1 and ZB-H2 hold what they should on rank 0, and idle 6 slots: each W
# stands in the way of an I for which another rank waits.
#
# **When.** Interleaving where stages are large and links fast enough for v times the messages, as
# NVIDIA's recipes for models of hundreds of billions of parameters do. Breadth first with FSDP.
# Zero-bubble schedules where there are few micro-batches, and memory for what is held until W. None
# of them where m is large against p: with m = 64 and p = 4 the bubble of plain 1F1B is 4%.
#
# **What the slots leave out.** That W is as short as I: `torch.autograd.grad` walks a stage of
# several layers from its output again, so that our W costs nearly a whole backward pass. PyTorch's
# runtime keeps the gradients between its layers from I, which takes memory; in Megatron and
# DeepSeek's code every linear layer postpones its own. Messages: interleaving has more of them, and
# every border crossed between nodes is latency that a small stage may not hide. Recomputation: with
# it, I and W both need the stage's forward pass again, or what it left must stay. And
# `torch.compile` does not split a backward pass, so PyTorch's zero-bubble classes refuse compiled
# stages.


# %%
def main() -> None:
    figure = {"metavar": "PATH", "help": "draw the grid of every schedule"}
    options = command_line({"--figure": figure})
    launch()
    device = setup()
    case = Case()
    runs = check_ours(case, dist.new_group(backend="gloo"))
    check_torchs(case, device)
    check_gpus(device)
    if options.figure and RANK == 0:
        draw(options.figure, runs)
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
