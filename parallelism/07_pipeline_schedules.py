"""Pipeline schedules: GPipe and 1F1B
==================================

**Question.** A model is cut between its layers, and each rank holds one piece, a stage. It waits
for its neighbors most of the time. In which order should it work, how long does it still idle, and
how many activations must it hold?

**Predict**, and write it down before you run. There are four stages (one per rank) that take
equally long; a backward pass takes twice as long as a forward pass; a message takes no time.

1. The batch goes through whole: forward through all stages, then backward through all. What share
   of the time does a stage idle?
2. The batch is split into eight micro-batches, and GPipe does all forwards, then all backwards.
   What share does a stage idle now?
3. 1F1B does one forward and one backward in turn, as soon as it can. What share does a stage idle?
4. Under GPipe the first stage holds the activations of all eight micro-batches at one time. Of how
   many does it hold them under 1F1B?

**Run.**

    torchrun --standalone --nproc-per-node=4 07_pipeline_schedules.py   # NCCL on 4 GPUs, else gloo
    python 07_pipeline_schedules.py                                     # the same, started for you
    python 07_pipeline_schedules.py --figure gantt.png                  # and draw what was run

Not run on several GPUs.

**Try.** In `one_f_one_b` set `num_warmup` to `m`: which claims fail, and which do not? Now set it
to 0: what does that cost? In `Stage.forward` leave out the division by `self.micro_batches`: does
anything but the gradients tell?

**Before.** parallelism/03_model_tensor_pipeline_parallel.py: the two ways to cut a model.

**Next.** parallelism/08_interleaved_schedules.py: smaller stages, a smaller bubble.
"""

import argparse
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
from collections.abc import Callable, Sequence
from datetime import timedelta
from fractions import Fraction
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

# A *rank* is one of WORLD_SIZE processes that run this same file, and here it is also one *stage*
# of the pipeline. `claim(text, predicted, measured)` prints one row of the ledger and must be
# called by every rank. It, `setup`, `print0`, `blocked` and `finish` stand in the last cell, the
# same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

MICRO_BATCHES = 8
ROWS, WIDTH = 4, 32  # of one micro-batch
LAYERS = 2 * WORLD_SIZE

# %% [markdown]
# ## 1. GPipe: micro-batches fill the pipeline
#
# In **pipeline parallelism** rank s holds **stage** s: some consecutive layers. It receives the
# activations of stage s-1, runs its layers, and sends the result to stage s+1. Backward, gradients
# travel the other way. Little is sent, but everybody waits: below, a column is one slot of time, F
# is a forward pass (1 slot), B is a backward pass (2 slots, for it computes the gradients of inputs
# and of weights), and a dot is an idle slot.
#
#     one batch, p = 3 stages:   stage 0     F  .  .  .  .  .  .  B  B
#                                stage 1     .  F  .  .  .  B  B  .  .
#                                stage 2     .  .  F  B  B  .  .  .  .
#
# One stage works at a time. GPipe (Huang et al., 2019) splits the batch into m **micro-batches**
# and sends them one behind the other, all forward, then all backward; Fk and Bk belong to
# micro-batch k:
#
#     GPipe  slot  0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19 20    holds
#     stage 0     F0 F1 F2 F3 F4  .  .  .  .  .  . B0 B0 B1 B1 B2 B2 B3 B3 B4 B4      5
#     stage 1      . F0 F1 F2 F3 F4  .  .  . B0 B0 B1 B1 B2 B2 B3 B3 B4 B4  .  .      5
#     stage 2      .  . F0 F1 F2 F3 F4 B0 B0 B1 B1 B2 B2 B3 B3 B4 B4  .  .  .  .      5
#
# The dots are the **bubble**. A micro-batch needs p-1 forward and p-1 backward hops to reach every
# stage and come back; for so long each stage has nothing to do, 3(p-1) slots. It works for 3m
# slots, so it idles (p-1) / (m+p-1) of the time. More micro-batches make the bubble smaller, but a
# stage must hold ("holds") every micro-batch's activations until its backward pass: here all m of
# them.
#
# Gradients add up over the micro-batches, and the optimizer steps once, at the end. So the result
# is that of the whole batch, whatever the order. The order is a plain list per stage:

# %%
Action = tuple[str, int]  # ("F" or "B", number of the micro-batch)
SLOTS = {"F": 1, "B": 2}


def gpipe(stage: int, p: int, m: int) -> list[Action]:
    """The order in which a stage of p works on m micro-batches: all forward, then all backward."""
    return [("F", k) for k in range(m)] + [("B", k) for k in range(m)]


# %% [markdown]
# ## 2. 1F1B: one forward, one backward
#
# When stage 2 has done F0 it could do B0 at once. It need not wait for F4. In **1F1B** each stage
# runs ahead only as far as it must, by one micro-batch for each stage behind it: p-1-s forwards on
# stage s (**warm-up**). More would not bring the first gradient back any earlier, and stage 0 waits
# for it all the same. Then each stage does one forward and one backward in turn (**steady state**),
# and at the end the backwards that are left (**cooldown**):
#
#     1F1B   slot  0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19 20    holds
#     stage 0     F0 F1 F2  .  .  .  . B0 B0 F3 B1 B1 F4 B2 B2  . B3 B3  . B4 B4      3
#     stage 1      . F0 F1  .  . B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3  . B4 B4  .  .      2
#     stage 2      .  . F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4  .  .  .  .      1
#
# Count the dots: the bubble is just as large. What shrinks is memory. Stage s never holds more than
# p-s micro-batches, however large m is; so m may grow, and *that* makes the bubble small.
#
# This schedule has two names, PipeDream-Flush (Narayanan et al., 2021) and DAPPLE (Fan et al.,
# 2021). GPipe, in its paper, saves memory in another way: it keeps only each micro-batch's *input*
# to the stage and computes the rest anew before its backward pass, which then takes three slots.


# %%
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


# %% [markdown]
# ## 3. A stage follows its list
#
# Between two actions a stage sends what the first one made and receives what the second one needs.
# Both go into one batch, since in 1F1B's steady state neighbors have something for each other: if
# both sent first and waited, neither would ever receive (parallelism/09_pipeline_deadlocks.py).
#
# What arrives forward is a leaf of this rank's autograd graph. The stage keeps it and the output.
# When the output's gradient arrives, `y.backward(gradient)` runs through this stage only, and
# leaves in `x.grad` what the stage before needs. The last stage computes the loss. A micro-batch's
# loss is a mean over *its* rows; divided by m, the sum over micro-batches is the mean over all
# rows.


# %%
class Stage:
    """One rank's layers, the micro-batches that it holds, and the step that follows a list."""

    def __init__(self, layers: nn.Module, loss_of: Callable, micro_batches: int) -> None:
        self.layers = layers
        self.loss_of = loss_of  # (output of the last stage, k) -> mean loss of micro-batch k
        self.micro_batches = micro_batches
        self.held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # k: (input, output)
        self.most_held = 0

    def step(self, order: Sequence[Action], inputs: Sequence[torch.Tensor]) -> None:
        """Run one step; `inputs`: stage 0's micro-batches, elsewhere tensors like what arrives."""
        result = None
        for done, todo in pairwise([None, *order, None]):
            arrived = torch.empty_like(inputs[0])
            messages = []
            if done is not None and receiver(done) in range(WORLD_SIZE):
                messages.append(dist.P2POp(dist.isend, result, receiver(done)))
            if todo is not None and sender(todo) in range(WORLD_SIZE):
                messages.append(dist.P2POp(dist.irecv, arrived, sender(todo)))
            if messages:
                self.exchange(messages)
            if todo is not None:
                result = self.act(todo, arrived, inputs)

    def exchange(self, messages: list[dist.P2POp]) -> None:
        for work in dist.batch_isend_irecv(messages):
            work.wait()

    def act(self, action: Action, arrived: torch.Tensor, inputs: Sequence) -> torch.Tensor | None:
        """Do one action; return what a neighbor needs of it."""
        direction, k = action
        if direction == "F":
            x = inputs[k] if RANK == 0 else arrived.requires_grad_()
            return self.forward(k, x)
        return self.backward(k, arrived)

    def forward(self, k: int, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        if RANK == WORLD_SIZE - 1:
            y = self.loss_of(y, k) / self.micro_batches
        self.held[k] = (x, y)
        self.most_held = max(self.most_held, len(self.held))
        return y.detach().contiguous()

    def backward(self, k: int, grad: torch.Tensor) -> torch.Tensor | None:
        x, y = self.held.pop(k)
        y.backward(None if RANK == WORLD_SIZE - 1 else grad)
        return x.grad


def receiver(action: Action) -> int:
    """The stage that needs this action's result: the next one, of a backward the one before."""
    return RANK + 1 if action[0] == "F" else RANK - 1


def sender(action: Action) -> int:
    """The stage whose result this action needs."""
    return RANK - 1 if action[0] == "F" else RANK + 1


# %% [markdown]
# ## 4. How it is measured
#
# **The oracle** is the whole model on the whole batch in one process: same weights, float64. Every
# rank compares the gradients of its own layers, and rank 0 those of its inputs too. An error is
# relative to the largest element. Sums of 32 terms are reordered in 2 (LAYERS + 1) products, there
# and back, which sets the tolerance.
#
# **Slots** are counted in the run itself. Each message takes along its sender's *logical clock*
# (Lamport, 1978), the number of slots gone by: a stage's clock moves on by an action's slots, and a
# message that arrives sets it to the sender's, if that is later. So no core's speed matters.


# %%
TOLERANCE = 2 * (LAYERS + 1) * WIDTH * 2**-53


class SlotCounter(Stage):
    """A stage that notes in which slot each of its actions starts."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)
        self.now = 0
        self.starts: dict[Action, int] = {}

    def exchange(self, messages: list[dist.P2POp]) -> None:
        stamps = [torch.tensor([self.now], device=m.tensor.device) for m in messages]
        with_stamps = []
        for message, stamp in zip(messages, stamps, strict=True):
            with_stamps += [message, dist.P2POp(message.op, stamp, message.peer)]
        super().exchange(with_stamps)
        self.now = max(self.now, *(stamp.item() for stamp in stamps))

    def act(self, action: Action, arrived: torch.Tensor, inputs: Sequence) -> torch.Tensor | None:
        self.starts[action] = self.now
        self.now += SLOTS[action[0]]
        return super().act(action, arrived, inputs)


class Case:
    """A model, a batch, and the gradients that one process finds."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)  # the same on every rank
        factory = {"device": device, "dtype": torch.float64}
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH, **factory), nn.Tanh())]
        layers += [copy.deepcopy(layers[0]) for _ in range(LAYERS - 1)]
        for layer in layers:
            layer[0].reset_parameters()
        self.x = torch.randn(MICRO_BATCHES * ROWS, WIDTH, **factory, requires_grad=True)
        self.target = torch.randn(MICRO_BATCHES * ROWS, WIDTH, **factory)
        F.mse_loss(nn.Sequential(*layers)(self.x), self.target).backward()
        first = RANK * LAYERS // WORLD_SIZE
        last = (RANK + 1) * LAYERS // WORLD_SIZE
        self.expected = nn.Sequential(*layers[first:last])  # this rank's, with gradients

    def stage(self, m: int, kind: type[Stage] = Stage) -> Stage:
        """This rank's stage without gradients, for a step of m micro-batches."""
        layers = copy.deepcopy(self.expected)
        layers.zero_grad()
        return kind(layers, lambda y, k: F.mse_loss(y, self.target.chunk(m)[k]), m)

    def inputs(self, m: int) -> list[torch.Tensor]:
        return [x.requires_grad_() for x in self.x.detach().chunk(m)]

    def error(self, layers: nn.Module, inputs: Sequence[torch.Tensor]) -> float:
        """How far this rank's gradients are from one process's, relative to the largest."""
        pairs = []
        for ours, expected in zip(layers.parameters(), self.expected.parameters(), strict=True):
            pairs.append((ours.grad, expected.grad))
        if RANK == 0:
            pairs.append((torch.cat([x.grad for x in inputs]), self.x.grad))
        return max(relative_error(ours, expected) for ours, expected in pairs)


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element; inf if one is no number."""
    error = (ours - expected).abs().max() / expected.abs().max()
    return error.nan_to_num(nan=torch.inf).item()


def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


# %% [markdown]
# Each schedule is run once with slots counted. What the run did is printed as a grid, like those
# above, and the idle share of that grid is compared with the formula.


# %%
ORDERS = {"one batch": (gpipe, 1), "GPipe": (gpipe, MICRO_BATCHES)}
ORDERS["1F1B"] = (one_f_one_b, MICRO_BATCHES)


def bubble(m: int) -> Fraction:
    """The share of slots that a stage idles by the formula: (p-1) / (m+p-1)."""
    return Fraction(WORLD_SIZE - 1, m + WORLD_SIZE - 1)


def check_slots(case: Case) -> dict[str, list[dict[Action, int]]]:
    """Run each schedule; claim gradients, bubble, activations held; return every stage's slots."""
    runs = {}
    for name, (order, m) in ORDERS.items():
        stage = case.stage(m, SlotCounter)
        inputs = case.inputs(m)
        stage.step(order(RANK, WORLD_SIZE, m), inputs)
        error = case.error(stage.layers, inputs)
        runs[name] = gather_objects(stage.starts)

        show(name, runs[name])
        claim(f"{name}: error of the gradients", 0, error, atol=TOLERANCE)
        if m > 1:
            expected = min(m, WORLD_SIZE - RANK) if name == "1F1B" else m
            claim(f"{name}: micro-batches held at most", expected, stage.most_held, question=4)
    if WORLD_SIZE == 1:
        blocked("share of slots idle", needs="2 ranks")
        return runs
    idle = {name: idle_share(starts) for name, starts in runs.items()}
    one = bubble(1)
    many = bubble(MICRO_BATCHES)
    naive = idle["one batch"]
    claim("one batch: share of slots idle", one, naive, question=1, kind="simulated")
    claim("GPipe: share of slots idle", many, idle["GPipe"], question=2, kind="simulated")
    claim("1F1B: share of slots idle", many, idle["1F1B"], question=3, kind="simulated")
    return runs


def idle_share(starts: list[dict[Action, int]]) -> Fraction:
    """The share of all slots, of all stages, from the first action to the last, that are empty."""
    return 1 - Fraction(sum(map(busy, starts)), last_slot(starts) * len(starts))


def busy(starts: dict[Action, int]) -> int:
    return sum(SLOTS[direction] for direction, _ in starts)


def last_slot(starts: list[dict[Action, int]]) -> int:
    ends = [0]
    for stage in starts:
        ends += [slot + SLOTS[direction] for (direction, _), slot in stage.items()]
    return max(ends)


def show(name: str, starts: list[dict[Action, int]]) -> None:
    """Print a run as a grid: a row per stage, a column per slot."""
    print0(f"\n{'':13}{name}")
    between = " " if last_slot(starts) < 26 else ""  # a longer row would not fit the screen
    for stage, actions in enumerate(starts):
        row = [" ."] * last_slot(starts)
        for (direction, k), slot in actions.items():
            for column in range(slot, slot + SLOTS[direction]):
                row[column] = f"{direction}{k}"
        print0(f"{'':13}stage {stage}  " + between.join(row))
    print0()


# %% [markdown]
# `--figure` draws the same grids.


# %%
def draw(path: str, runs: dict[str, list[dict[Action, int]]]) -> None:
    """A panel per schedule, a row per stage: forward blue, backward green, idle gray."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 3.3), layout="constrained")
    panels = figure.subplots(1, len(runs), sharey=True)
    for axes, (name, starts) in zip(panels, runs.items(), strict=True):
        axes.barh(range(len(starts)), last_slot(starts), color="0.88")
        for stage, actions in enumerate(starts):
            for (direction, _), slot in actions.items():
                color = {"F": "C0", "B": "C2"}[direction]
                axes.barh(stage, SLOTS[direction], left=slot, color=color, edgecolor="white")
        axes.set(title=name, xlabel="slots", ylabel="stage", yticks=range(len(starts)))
    panels[0].invert_yaxis()
    figure.suptitle("1F1B begins backward earlier than GPipe, and its bubble (gray) is as large")
    figure.savefig(path)


# %% [markdown]
# ## 5. On GPUs: the bubble of real stages, and the memory of both schedules
#
# On GPUs a stage's work is real: 16 linear layers 8192 wide in bf16, so that a message of 34 MB is
# small compared with it. A step has two micro-batches per stage. CUDA events on the stream say how
# long each action computes, and the host's clock, after a synchronization, how long the step takes;
# the rest is idle, bubble and messages together. The allocator's peak says what each schedule
# holds. The first step of each is a warm-up: it connects neighbors and fills the allocator's cache.


# %%
class EventTimer(Stage):
    """A stage that brackets each action's kernels with CUDA events."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def act(self, action: Action, arrived: torch.Tensor, inputs: Sequence) -> torch.Tensor | None:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        result = super().act(action, arrived, inputs)
        end.record()
        self.events.append((start, end))
        return result


def step_on_gpu(order: Callable, layers: nn.Module, device: torch.device) -> tuple[float, float]:
    """Return the share of a step that this stage idles, and the GB that it allocates."""
    m = 2 * WORLD_SIZE
    inputs = torch.randn(m * 2048, 8192, device=device, dtype=torch.bfloat16).chunk(m)
    for _ in range(2):
        layers.zero_grad(set_to_none=False)  # gradients stay allocated: not what we compare
        stage = EventTimer(layers, lambda y, k: y.float().square().mean(), m)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        stage.step(order(RANK, WORLD_SIZE, m), inputs)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    computing = sum(start.elapsed_time(end) for start, end in stage.events) / 1e3
    return 1 - computing / seconds, (torch.cuda.max_memory_allocated() - before) / 1e9


def measure_on_gpus(device: torch.device) -> None:
    """Claim idle share and memory of both schedules."""
    if device.type == "cpu" or WORLD_SIZE == 1 or not torch.cuda.is_bf16_supported(False):
        blocked("idle share and peak memory of real stages", needs="2 GPUs with bfloat16")
        return
    linears = [nn.Linear(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(16)]
    layers = nn.Sequential(*linears)
    idle_gpipe, gb_gpipe = step_on_gpu(gpipe, layers, device)
    idle_1f1b, gb_1f1b = step_on_gpu(one_f_one_b, layers, device)
    print0(f"{'':13}stage 0, GPipe: {idle_gpipe:.1%} idle, {gb_gpipe:.2f} GB of activations;")
    print0(f"{'':13}stage 0, 1F1B: {idle_1f1b:.1%} idle, {gb_1f1b:.2f} GB.")
    expected = bubble(2 * WORLD_SIZE)  # 1/5 on two GPUs, 7/23 on eight
    claim("real stages, GPipe: share of time idle", expected, idle_gpipe, atol=0.08, timed=True)
    claim("real stages, 1F1B: share of time idle", expected, idle_1f1b, atol=0.08, timed=True)
    # One micro-batch more than held may be alive: what arrives, what is being computed; and, for a
    # moment in either schedule, the gradients of one layer.
    at_most = (WORLD_SIZE - RANK + 1) / (2 * WORLD_SIZE)
    claim("1F1B's activations / GPipe's, in bytes", at_most, gb_1f1b / gb_gpipe, "<=", atol=0.05)


# %% [markdown]
# ## What you should have seen
#
# With 4 stages and 8 micro-batches:
#
# 1. Three quarters: one stage of four works at a time. Four devices are as fast as one; all that
#    was gained is that the model fits.
# 2. 3/11 = 27.3%: three passes of idling for eight of work, in each direction. With 32
#    micro-batches it would be 3/35 = 8.6%.
# 3. As much, 3/11. In the grids the dots lie elsewhere (GPipe's in the middle, 1F1B's spread) but
#    there are equally many.
# 4. Four; stage s holds 4-s. With 32 micro-batches GPipe would hold 32, and 1F1B still four: that
#    is why large models are trained with 1F1B. Had GPipe recomputed its activations, as in its
#    paper, it would hold the *inputs* of eight, and pay a forward more.
#
# The gradients are those of one process, to rounding, under any order: a schedule changes when work
# is done, never what is computed.
#
# **Try.** 1F1B with `num_warmup = m` *is* GPipe: the bubble's claims hold, and only the number of
# micro-batches held tells. With `num_warmup = 0` stage 0 waits for each micro-batch to come all the
# way back: it idles 75%, as if there were no micro-batches, and it holds one at a time, so its row
# on micro-batches fails too. Without the division the gradients are eight times too large. Under
# SGD that is eight times the learning rate; Adam would hardly show it.
#
# **When to use it.** When a model does not fit on the GPUs of one machine, over the slow links
# between machines: a stage sends one activation on and one gradient back per micro-batch, where
# tensor parallelism all-reduces four activations per block. Take four micro-batches per stage or
# more (m = 4p idles less than 20%). Do not use it if the batch is too small for that (a kernel on a
# few tokens fills no GPU), or if FSDP fits: that has no bubble.
#
# **What the formula leaves out.** Stages of unequal size: the slowest sets the pace, and an
# embedding or a head counts as layers when you cut. The time of messages: p-1 hops each way are
# exposed at least, and here, where `exchange` waits between all actions, up to two per micro-batch.
# Two ways to a smaller bubble have lessons of their own: parallelism/08_interleaved_schedules.py
# and parallelism/19_zero_bubble.py.


# %%
def main() -> None:
    figure = {"metavar": "PATH", "help": "draw the schedules, in slots"}
    options = command_line({"--figure": figure})
    launch()
    device = setup()
    runs = check_slots(Case(device))
    measure_on_gpus(device)
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
