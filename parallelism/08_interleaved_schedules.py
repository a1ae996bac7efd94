"""Interleaved pipeline schedules: smaller stages, a smaller bubble
================================================================

**Question.** 1F1B idles (p-1) / (m+p-1) of the time with p ranks and m micro-batches. A rank may
hold several small stages instead of one large one. How much less does it idle then, and what does
it pay?

**Predict**, and write it down before you run. There are four ranks and eight micro-batches. A
backward pass takes twice as long as a forward pass, and a message takes no time. Under 1F1B a rank
idles 3/11 of the time, and rank 0 holds the activations of four micro-batches. Now cut the model
into eight stages, two per rank: rank r holds stages r and r + 4.

1. What share of the time does a rank idle?
2. How many times as many messages are sent as under 1F1B?
3. Before its first backward pass each rank does as many forward passes as it takes to add no
   waiting, and no more. How many micro-batches does rank 0 hold at most? (The activations of half
   as large a stage count half.)
4. Now a message takes a slot, as long as a forward pass through one of the eight stages. Under both
   schedules the ranks run further ahead, until a step waits only for the first micro-batch's
   messages on their way out and for the last gradient's on their way back. How many slots shorter
   than under 1F1B is a step?

**Run.**

    torchrun --standalone --nproc-per-node=4 08_interleaved_schedules.py   # NCCL on 4 GPUs, or gloo
    python 08_interleaved_schedules.py                              # the same, started for you
    python 08_interleaved_schedules.py --figure grids.svg           # and draw the schedules

Not run on several GPUs.

**Try.** Set `MICRO_BATCHES` to 64: by what share do two stages per rank shorten a step now? Put it
back, and in `interleaved` let no rank run ahead for its hops, `num_warmup = (v - 1) * p`: how long
does a step take, and which claims do not fail?

**Before.** parallelism/07_pipeline_schedules.py: GPipe, 1F1B, and how large their bubble is.

**Next.** parallelism/19_zero_bubble.py: fill what is left of the bubble.
"""

import argparse
import ctypes
import json
import logging
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from fractions import Fraction

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# %% [markdown]
# ## 1. The bubble is as long as a stage
#
# A micro-batch needs p-1 forward passes to reach the last rank, and its gradient needs p-1 backward
# passes to come back to rank 0. For that long, in sum, each rank has nothing to do, however many
# micro-batches there are. But these are passes through a *stage*, and a smaller stage is passed
# sooner. So cut the model into v p stages, and give each rank v of them. Take p = 2 ranks, m = 2
# micro-batches and a model of four layers. A slot is the forward pass of one layer:
#
#     1F1B     slot    0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17
#     layers 0, 1     F0 F0 F1 F1  .  .  .  . B0 B0 B0 B0  .  . B1 B1 B1 B1
#     layers 2, 3      .  . F0 F0 B0 B0 B0 B0 F1 F1 B1 B1 B1 B1  .  .  .  .
#
#     v = 2    slot    0  1  2  3  4  5  6  7  8  9 10 11 12 13 14
#     layers 0, 2     F0 F1 f0 f1  .  . b0 b0  . b1 b1 B0 B0 B1 B1
#     layers 1, 3      . F0 F1 f0 b0 b0 f1 b1 b1 B0 B0 B1 B1  .  .
#
# A row is a rank. F1 and B1 are the passes of micro-batch 1 through the rank's first stage, f1 and
# b1 through its second. Count the dots: six per rank under 1F1B, three with two stages per rank.
# Rank 1 begins after one layer instead of two. Each micro-batch now goes around all ranks twice,
# and yet no rank waits for it to come around: while F0 is on rank 1, rank 0 does F1, and then goes
# on with f0. That is why p micro-batches are taken through a stage before the next stage.
#
# In general, p-1 forward and p-1 backward passes of a stage are lost. A rank does m forward and m
# backward passes of each of its v stages. So it idles (p-1) / (v m + p-1) of the time, as 1F1B
# would with v times as many micro-batches.

# %% [markdown]
# ## 2. Interleaved 1F1B: 1F1B with several stages per rank
#
# Rank r has the stages r, r+p, r+2p, ... (They lie p apart. Stages that are neighbors would be one
# large stage again.) Forward, it takes p micro-batches through its first stage, the same p through
# its second, and so on, and then the next p. Backward it does the same with the stages in reverse.
# As in 1F1B it first runs ahead with forwards (warm-up), then does one forward and one backward in
# turn (steady state), and then the backwards that are left (cooldown). The last grid as lists:
#
#     p = 2, v = 2, m = 2    warm-up     steady state    cooldown
#     rank 0                 F0 F1 f0    f1 b0           b1 B0 B1
#     rank 1                 F0 F1       f0 b0 f1 b1     B0 B1
#                            -----                       (v-1) p forwards
#                                  --                    one per hop to the last rank: 1, 0
#
# How far must it run ahead? Its first backward pass is through its last stage. Before it can do a
# forward pass there, it takes p micro-batches through each of its other stages: (v-1) p passes, F0
# and F1. Then it is as in 1F1B: one more for each hop between it and the last rank, f0 on rank 0.
# With v = 1 the list is 1F1B.

# %%
Action = tuple[str, int, int]  # ("F" or "B", stage, micro-batch): f0 on rank 0 is ("F", p, 0)


def interleaved(rank: int, p: int, m: int, v: int, per_hop: int = 1) -> list[Action]:
    """Interleaved 1F1B: the order in which a rank of p works on its v stages; p divides m."""
    stages = range(rank, v * p, p)
    forwards = []
    backwards = []
    for first in range(0, m, p):  # p micro-batches at a time
        for stage in stages:
            forwards += [("F", stage, k) for k in range(first, first + p)]
        for stage in reversed(stages):
            backwards += [("B", stage, k) for k in range(first, first + p)]
    num_warmup = min((v - 1) * p + per_hop * (p - 1 - rank), v * m)
    order = forwards[:num_warmup]  # fill the pipeline
    for i in range(v * m - num_warmup):  # steady state: one forward, one backward
        order.append(forwards[num_warmup + i])
        order.append(backwards[i])
    return order + backwards[v * m - num_warmup :]  # drain it


# %% [markdown]
# Two of its costs can be counted on the list.
#
# - **Messages.** A micro-batch crosses v p - 1 borders between stages each way, instead of p-1: it
#   also goes from the last rank to rank 0. A message is as large as before, one activation.
# - **Memory.** When rank r does its first backward, (v-1) p + p-1-r + 1 = v p - r forwards are
#   under way, each of 1/v of its layers. That makes p - r/v micro-batches, where 1F1B holds p - r.
#   On rank 0, the fullest, both are p.

# %% [markdown]
# ## 3. Where messages leave slots empty
#
# The two stages per rank of section 1 once more. But now a message takes a slot:
#
#     v = 2    slot    0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19 20
#     layers 0, 2     F0 F1  .  . f0 f1  .  .  .  . b0 b0  . b1 b1  . B0 B0  . B1 B1
#     layers 1, 3      .  . F0 F1  .  . f0 b0 b0 f1 b1 b1  . B0 B0  . B1 B1  .  .  .
#
# Six slots more are empty: micro-batch 0 is under way between stages in slots 1, 3 and 5, and the
# gradient of micro-batch 1 in slots 12, 15 and 18. 1F1B has one border each way instead of three,
# and takes 20 slots instead of 18: here it is faster. With more micro-batches than ranks, one
# forward per hop is too few: a rank then waits for messages in the steady state too. Two per hop
# (`per_hop=2`) are enough, as in Megatron's and PyTorch's interleaved lists. This costs memory:
# rank 0 holds (v-1) p + 2 (p-1) + 1 passes of a stage, p + (p-1)/v micro-batches instead of p.

# %% [markdown]
# ## 4. Play the lists
#
# How long a step takes follows from the lists. An action starts when its rank has done what stands
# before it on the list, and the neighboring stage's result for the same micro-batch has arrived.
# The lengths of passes and messages are assumed, so what is claimed of them is "simulated".

# %%
LAYERS_PER_RANK = 2  # so that a stage is both of them or one
SLOTS = {"F": 1, "B": 2}  # of one layer


def play(orders: list[list[Action]], v: int, message: int = 0) -> list[dict[Action, range]]:
    """Follow the lists of all ranks; return the slots of each rank's actions."""
    stages = range(v * len(orders))
    arrivals = {}  # the slot in which a neighbor has an action's result, if it is done
    played = [{} for _ in orders]
    now = [0] * len(orders)  # each rank's clock
    for _ in range(sum(map(len, orders))):  # in each round at least one rank does an action
        for rank, order in enumerate(orders):
            if len(played[rank]) == len(order):
                continue  # its list is done
            kind, stage, k = order[len(played[rank])]
            neighbor = stage - 1 if kind == "F" else stage + 1
            if neighbor in stages and (kind, neighbor, k) not in arrivals:
                continue  # it waits
            start = max(now[rank], arrivals.get((kind, neighbor, k), 0))
            now[rank] = start + SLOTS[kind] * LAYERS_PER_RANK // v
            arrivals[kind, stage, k] = now[rank] + message
            played[rank][kind, stage, k] = range(start, now[rank])
    return played


def length(ranks: list[dict]) -> int:
    """The slots of a step, from the first action of any rank to the last of any."""
    return max(max(slots.stop for slots in actions.values()) for actions in ranks)


def idle_share(ranks: list[dict]) -> Fraction:
    """The share of all slots of all ranks that are empty."""
    busy = sum(sum(map(len, actions.values())) for actions in ranks)
    return 1 - Fraction(busy, length(ranks) * len(ranks))


def most_held(order: list[Action]) -> int:
    """How many forward passes wait at most for their backward pass."""
    held = 0
    most = 0
    for kind, _, _ in order:
        held += 1 if kind == "F" else -1
        most = max(most, held)
    return most


# %% [markdown]
# First 1F1B, then two stages per rank, then both where a message takes a slot. What was played is
# printed as grids: a letter in each slot, small for the second stage, and under its first slot the
# number of the micro-batch. The rows on what is held are rank 0's.


# %%
def check_schedules() -> dict[str, list[dict]]:
    """Play 1F1B and two stages per rank; claim what they cost; return all slots."""
    p = WORLD_SIZE
    runs = {"1F1B": play(lists(1), 1)}
    show("1F1B", runs["1F1B"])
    held = most_held(lists(1)[RANK])
    claim("1F1B: micro-batches held", p, held, kind="simulated", rank=0)
    if p == 1:
        blocked("several stages per rank, and messages", needs="2 ranks")
        return runs
    runs["v = 2"] = play(lists(2), 2)
    show("v = 2", runs["v = 2"])
    bubble = Fraction(p - 1, 2 * MICRO_BATCHES + p - 1)
    idle = idle_share(runs["v = 2"])
    claim("v = 2: share of slots idle", bubble, idle, question=1, kind="simulated")
    held = most_held(lists(2)[RANK]) / 2  # each is half of the rank's layers
    claim("v = 2: micro-batches held", p, held, question=3, kind="simulated", rank=0)

    slots = {}
    for v, name in ((1, "1F1B"), (2, "v = 2")):
        slow = f"{name}, 2 per hop, a message takes a slot"
        runs[slow] = play(lists(v, per_hop=2), v, message=1)
        show(slow, runs[slow])
        slots[v] = length(runs[slow])
    due = 3 * (p - 1) - 2 * p  # so much less bubble; p more messages out and p back
    saved = slots[1] - slots[2]
    claim("v = 2: slots saved if a message takes one", due, saved, question=4, kind="simulated")
    return runs


def lists(v: int, per_hop: int = 1) -> list[list[Action]]:
    """Every rank's list."""
    return [interleaved(r, WORLD_SIZE, MICRO_BATCHES, v, per_hop) for r in range(WORLD_SIZE)]


# %% [markdown]
# ## 5. How it is measured: PyTorch's own
#
# `torch.distributed.pipelining` has the schedule as a class. **The oracle** for its gradients is
# the whole model on the whole batch in one process, in float64.

# %%
ROWS, WIDTH = 4, 16  # of one micro-batch
MICRO_BATCHES = WORLD_SIZE * max(2, math.ceil(8 / WORLD_SIZE))  # 8 on 1, 2 and 4 ranks
LAYERS = LAYERS_PER_RANK * WORLD_SIZE
TOLERANCE = 2 * (LAYERS + 1) * WIDTH * 2**-53  # sums of WIDTH terms, LAYERS there and back
Gradients = dict[str, torch.Tensor]  # by the names of the parameters


def model_and_batch() -> tuple[nn.Sequential, torch.Tensor, torch.Tensor, Gradients]:
    """The model, the batch and its targets, and the oracle; the same on every rank."""
    torch.manual_seed(0)
    layers = []
    for _ in range(LAYERS):
        layers.append(nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Tanh()))
    model = nn.Sequential(*layers)
    x = torch.randn(MICRO_BATCHES * ROWS, WIDTH, dtype=torch.float64)
    target = torch.randn_like(x)
    F.mse_loss(model(x), target).backward()
    return model, x, target, {name: weight.grad for name, weight in model.named_parameters()}


def my_stages(model: nn.Sequential, v: int) -> dict[int, nn.Module]:
    """This rank's v stages of the model, {number: layers}."""
    size = LAYERS_PER_RANK // v
    mine = {}
    for stage in range(RANK, v * WORLD_SIZE, WORLD_SIZE):
        mine[stage] = model[stage * size : (stage + 1) * size]
    return mine


def gradient_error(modules: dict[int, nn.Module], oracle: Gradients) -> float:
    """How far the stages' gradients are from the oracle's."""
    errors = []
    for layers in modules.values():
        for name, weight in layers.named_parameters():  # the same names as in the whole model
            difference = (weight.grad.cpu() - oracle[name]).abs().max()
            errors.append(difference / oracle[name].abs().max())
    return torch.stack(errors).max().item()  # NaN if one is


# %% [markdown]
# The class takes this rank's stages, makes every rank's list (`pipeline_order`) and follows its own
# with gloo or NCCL. The list is ours with two forwards per hop, and so it holds more. Our stages
# count the activations that they send; as many gradients come back.


# %%
class CountingStage(PipelineStage):
    """PyTorch's stage, and how many activations it has sent."""

    sent = 0

    def get_fwd_send_ops(self, k: int) -> list[dist.P2POp]:
        ops = super().get_fwd_send_ops(k)  # one, or none from the last stage
        self.sent += len(ops)
        return ops


Schedule = pipelining.Schedule1F1B | pipelining.ScheduleInterleaved1F1B


def pytorchs(
    modules: dict[int, nn.Module], micro_batches: int, device: torch.device
) -> tuple[Schedule, list[CountingStage]]:
    """PyTorch's schedule for this rank's stages, {number: layers}, and the stages that count."""
    stages = []
    for stage, module in modules.items():
        num_stages = len(modules) * WORLD_SIZE
        stages.append(CountingStage(module.to(device), stage, num_stages, device))
    if len(stages) == 1:
        schedule = pipelining.Schedule1F1B(stages[0], micro_batches, loss_fn=F.mse_loss)
    else:
        schedule = pipelining.ScheduleInterleaved1F1B(stages, micro_batches, loss_fn=F.mse_loss)
    return schedule, stages


def step(schedule: Schedule, x: torch.Tensor, target: torch.Tensor) -> None:
    """All micro-batches; the first rank gives the inputs, the last one the targets."""
    inputs = [x] if RANK == 0 else []
    targets = {"target": target} if RANK == WORLD_SIZE - 1 else {}
    schedule.step(*inputs, **targets)


def check_torchs(device: torch.device) -> None:
    """Claim what gradients PyTorch's class finds, what it sends, and which list it follows."""
    p = WORLD_SIZE
    model, x, target, oracle = model_and_batch()
    sent = {}
    for v in (1, 2):
        model.zero_grad()
        modules = my_stages(model, v)
        schedule, stages = pytorchs(modules, MICRO_BATCHES, device)
        step(schedule, x.to(device), target.to(device))
        sent[v] = sum(gather_objects(sum(stage.sent for stage in stages)))
    claim("v = 2: messages / 1F1B's", (2 * p - 1) / (p - 1), sent[2] / sent[1], question=2)
    error = gradient_error(modules, oracle)  # of v = 2, as the schedule below
    claim("torch's Interleaved1F1B: error of the gradients", 0, error, atol=TOLERANCE)

    theirs = []
    for one in schedule.pipeline_order[RANK]:
        if one is not None:  # so it marks where the rank idles
            theirs.append((one.computation_type.value, one.stage_index, one.microbatch_index))
    ours = lists(2, per_hop=2)[RANK]
    different = sum(one != other for one, other in zip(theirs, ours, strict=True))
    claim("torch's list: actions unlike ours, 2 per hop", 0, different)
    held = most_held(theirs) / 2
    claim("torch's list: micro-batches held", p + (p - 1) / 2, held, kind="simulated", rank=0)


def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


# %% [markdown]
# ## 6. On GPUs: the share that real stages idle
#
# A rank's 32 layers make one stage or two, and a step of PyTorch's class is timed. In turn with it
# each rank does the same work alone, with no neighbor to wait for. What the step takes longer is
# bubble, and messages that were not hidden. With only p micro-batches the bubbles are large. (A
# message is 34 MB: under 0.1 ms over an H100's NVLink, 0.5 to 1.1 ms over PCIe. The forward
# pass of the smaller stage is 4.4 TFLOP, 11 ms at 400 TFLOP/s.)


# %%
def idle_on_gpu(v: int, device: torch.device) -> float:
    """The share of a step in which a rank does not work, with v stages of 32 / v layers."""
    factory = {"bias": False, "device": device, "dtype": torch.bfloat16}
    modules = {}
    for stage in range(RANK, v * WORLD_SIZE, WORLD_SIZE):
        layers = [nn.Linear(8192, 8192, **factory) for _ in range(32 // v)]
        modules[stage] = nn.Sequential(*layers)
    schedule, _ = pytorchs(modules, WORLD_SIZE, device)
    x = torch.randn(WORLD_SIZE * 2048, 8192, device=device, dtype=torch.bfloat16)

    def alone() -> None:
        for micro_batch in x.chunk(WORLD_SIZE):
            for stage, layers in modules.items():  # the model's own input needs no gradient
                given = micro_batch.detach().requires_grad_(stage > 0)
                layers(given).sum().backward()

    steps = []
    own = []
    for _ in range(6):
        steps.append(seconds(lambda: step(schedule, x, x)))
        own.append(seconds(alone))
    return share_idle(steps[1:], own[1:])  # the first of each warms up


def share_idle(steps: list[float], own: list[float]) -> float:
    """The share of a step that is not a rank's own work, by the medians of both."""
    return 1 - statistics.median(own) / statistics.median(steps)


def seconds(work: Callable) -> float:
    """How long it takes all ranks."""
    dist.barrier()
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    dist.barrier()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def check_gpus(device: torch.device) -> None:
    if device.type == "cpu" or WORLD_SIZE == 1 or not torch.cuda.is_bf16_supported(False):
        blocked("share that real stages idle, v = 1 and 2", needs="2 GPUs with bfloat16")
        return
    for v in (1, 2):
        idle = idle_on_gpu(v, device)
        due = Fraction(WORLD_SIZE - 1, v * WORLD_SIZE + WORLD_SIZE - 1)
        # 1/3 and 1/5 on two GPUs; 7/15 and 7/23 on eight
        claim(f"real stages, v = {v}: share idle", due, idle, atol=0.05, timed=True)


# %% [markdown]
# Every schedule is printed as a grid. `--figure` draws them all on one scale of time.


# %%
def show(name: str, ranks: list[dict]) -> None:
    """Print a grid, if the screen is wide enough; a number stands in an action's first slot."""
    print0(f"\n  {name}: {length(ranks)} slots")
    for rank, actions in enumerate(ranks):
        letters = ["."] * length(ranks)
        numbers = [" "] * length(ranks)
        for (kind, stage, k), slots in actions.items():
            numbers[slots.start] = str(k % 10)
            for slot in slots:
                letters[slot] = kind if stage == rank else kind.lower()
        if length(ranks) <= 88:
            print0(f"  rank {rank}  {''.join(letters)}\n{'':10}{''.join(numbers)}".rstrip())
    print0()


def draw(path: str, runs: dict[str, list[dict]]) -> None:
    """One panel per schedule, one row per rank; a rank's second stage is lighter."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1.6 * len(runs)), layout="constrained")
    panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    told = []
    for axes, (name, ranks) in zip(panels, runs.items(), strict=True):
        for rank, actions in enumerate(ranks):
            for (kind, stage, _), slots in actions.items():
                bar = {"color": {"F": "C0", "B": "C2"}[kind], "alpha": 1 if stage == rank else 0.5}
                axes.barh(rank, len(slots), left=slots.start, edgecolor="white", **bar)
        axes.set(ylabel="rank", yticks=range(len(ranks)), ylim=(len(ranks) - 0.5, -0.5))
        told.append(f"{name}: {length(ranks)} slots, {float(idle_share(ranks)):.1%} idle")
        axes.set_title(told[-1])
    panels[-1].set_xlabel("slots, a layer forward; backward is green, a second stage pale")
    alt = f"Pipeline schedules on {WORLD_SIZE} ranks over time, a row per rank. {'; '.join(told)}"
    figure.savefig(path, metadata={"Title": alt})


# %% [markdown]
# ## What you should have seen
#
# With 4 ranks and 8 micro-batches:
#
# 1. 3/19 = 15.8% instead of 3/11 = 27.3%: what 1F1B would idle with 16 micro-batches. The work
#    stays, so a step gets shorter by less: by 14%, from 66 slots to 57.
# 2. 7/3 as many: seven borders between stages instead of three.
# 3. Four, as many as under 1F1B: eight halves. But this is rank 0, the fullest. The other ranks
#    hold more than under 1F1B, up to 2.5 instead of 1 on the last.
# 4. One: 71 slots instead of 72. With free messages it is nine, but now a step waits for seven
#    messages each way instead of three. That takes a warm-up of two forwards per hop, with which
#    rank 0 holds 5.5 micro-batches. With one per hop interleaving loses, 87 to 82.
#
# **Try.** With 64 micro-batches 1F1B idles 3/67 = 4.5%, and interleaving 3/131 = 2.3%: a step takes
# 393 slots instead of 402, which is 2.2% less, for 7/3 as many messages. If no rank runs ahead for
# its hops, a step takes 156 slots, and under 1F1B 192, each micro-batch alone. Only three claims on
# PyTorch do not fail: its gradients, its messages, and what its list holds.
#
# **When to use it.** With few micro-batches, m a few times p: the batch of a step is limited, and
# many replicas share it. With v = 2 half of the bubble goes, with v = 4 half of the rest, and each
# time about twice as many messages are sent. On a thousand GPUs p and m of one replica count: with
# p = 16 and m = 32, 1F1B idles 32%, v = 2 19% and v = 5 9% (of 80 layers one per stage). It takes
# v p stages of equal size (the embedding and the head count as layers), room for the longer
# warm-up, and an m that p divides (PyTorch's takes some others). With FSDP keep each stage's
# weights gathered, as Llama 3's training did.
#
# **What messages cost.** For Llama 3 70B an activation of 4,096 tokens in bfloat16 is 67 MB, 1.3 ms
# through a network card of 400 Gb/s. The forward pass of one of its 80 layers is 7 TFLOP: 18 ms on
# a GPU at 400 TFLOP/s, 2.2 ms on each of eight with tensor parallelism. If each of these sends the
# whole activation, and a stage is a layer, a message takes 0.6 of a forward pass.


# %%
def main() -> None:
    figure = {"metavar": "PATH", "help": "draw the grid of every schedule: .svg or .png"}
    options = command_line({"--figure": figure})
    launch()
    device = setup()
    runs = check_schedules()
    if WORLD_SIZE > 1:
        check_torchs(device)
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
