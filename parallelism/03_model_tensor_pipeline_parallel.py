"""Model, pipeline and tensor parallelism: a map of the ways to split one model
============================================================================

**Question.** A model is too big for one device. Where can it be cut, how long do devices wait for
each other then, and what must they tell each other?

**Predict**, and write it down before you run:

1. Each of n devices holds 1/n of a model's layers. In a training step, what share of the time does
   each idle, if n = 2, and if n = 4?
2. An MLP (linear, GELU, linear) is cut inside: each rank holds 1/n of both weights. How many
   all-reduces does it need forward, and how many backward?
3. A model of 10 MLPs, each with 32 features in and out, trains on batches of 250 examples. How
   many elements does a rank in the middle send per step if the model is cut between its layers?
   How many does a rank hand to all-reduces if every MLP is cut inside?
4. The batch of question 1 is cut into 4 micro-batches, which follow one another through the stages.
   What share of the time does each of four devices idle now?

**Run.**

    torchrun --standalone --nproc-per-node=4 03_model_tensor_pipeline_parallel.py   # NCCL, or gloo
    python 03_model_tensor_pipeline_parallel.py                    # the same, started for you

Not run on several GPUs. With more than 12 ranks the model has more than 10 MLPs, so that every rank
gets a layer.

**Try.** In `column_parallel` replace `CopyToRanks.apply(x_BD)` by `x_BD`: which claims fail, and
does the model still learn? In `loss_of` replace `/ B` by `/ len(y_bC)`: which ways to split notice?

**Before.** parallelism/02_fsdp_zero.py: how far one gets by splitting only what each rank stores.

**Next.** parallelism/04_buckets_and_overlap.py or, on the spine, fsdp/01_fsdp_basics.py
"""

import argparse
import copy
import ctypes
import functools
import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
Group = dist.ProcessGroup | None  # the ranks that share a layer; None: all ranks

# Shapes: B examples per batch, I = 64 pixels, D features between layers, E = 4 D inside an MLP, C
# classes, P parameters. A small letter is a share: b rows of a micro-batch, e features.
B, D, C = 250, 32, 10
MLPS = max(10, WORLD_SIZE - 2)  # on more than 12 ranks as many more, so that each has a layer
LAYERS = MLPS + 2  # and one linear layer at either end
M = 4  # micro-batches

# %% [markdown]
# ## 1. Model parallelism: two devices in one process
#
# The model of this lesson reads handwritten digits: a linear layer, ten MLPs, a linear layer. The
# simplest cut is between two layers. Half of them go to one device and half to the other, and
# `x.to(device)` carries the **activations**, the numbers between the layers, across the cut;
# autograd carries their gradient back. One process drives both devices.
#
# Only one of them can work at a time, because each pass needs the result of the pass before. In the
# picture F is a forward pass of the whole batch through one device's layers, and that takes one
# **slot**. B is a backward pass. It takes two slots, about twice as long, because it computes two
# gradients: that of the weights and that of the input. (This B is not the batch size.)
#
#     slot       0  1  2  3  4  5
#     device 0   F  .  .  .  B  B       idle 3 of 6 slots
#     device 1   .  F  B  B  .  .       idle 3 of 6 slots
#
# This is **naive model parallelism**. It makes a large model fit, and nothing faster.


# %%
class MLP(nn.Module):
    """x + down(gelu(up(x))): (B, D) -> (B, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, 4 * D)
        self.down = nn.Linear(4 * D, D)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return x_BD + self.down(F.gelu(self.up(x_BD)))


def part_of(layers: nn.Sequential, number: int, parts: int) -> nn.Sequential:
    """Return one of so many parts of a model; they differ by one layer at most."""
    start = number * LAYERS // parts
    stop = (number + 1) * LAYERS // parts
    return layers[start:stop]


class OnDevices(nn.Module):
    """A model of which each device holds a part."""

    def __init__(self, layers: nn.Sequential, devices: list[torch.device]) -> None:
        super().__init__()
        self.devices = devices
        self.parts = nn.ModuleList()
        for number, device in enumerate(devices):
            self.parts.append(part_of(layers, number, len(devices)).to(device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part, device in zip(self.parts, self.devices, strict=True):
            x = part(x.to(device))
        return x


# %% [markdown]
# ## 2. The same over ranks: one stage per rank
#
# With one process per device, each rank holds one **stage**, its part of the layers, and the cut
# becomes two messages per step: activations go on to the next rank, their gradient comes back. A
# stage keeps its input and its output, because its backward pass starts from the output's gradient
# and ends at the input's, which is the message to the stage before.
#
#     rank 0                                rank 1
#     x -->  stage 0  ----activations--->  stage 1  --> loss
#                     <---gradient-------           <--


# %%
def forward_stage(stage: nn.Module, x_bI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute this rank's stage; return its input and output. Only rank 0 reads the examples."""
    if RANK == 0:
        x = x_bI
    else:
        buffer = x_bI.new_empty(len(x_bI), D)
        x = receive(buffer, RANK - 1).requires_grad_()
    y = stage(x)
    if RANK < WORLD_SIZE - 1:
        send(y.detach(), RANK + 1)  # autograd does not cross ranks: see backward_stage
    return x, y


def backward_stage(x: torch.Tensor, y: torch.Tensor, target_b: torch.Tensor) -> None:
    """Find this stage's gradients; carry the gradient of its input to the stage before."""
    if RANK < WORLD_SIZE - 1:
        y.backward(receive(torch.empty_like(y), RANK + 1))
    else:
        loss_of(y, target_b).backward()
    if RANK > 0:
        send(x.grad, RANK - 1)


def naive_step(stage: nn.Module, x_BI: torch.Tensor, target_B: torch.Tensor) -> None:
    x, y = forward_stage(stage, x_BI)
    backward_stage(x, y, target_B)


def loss_of(y_bC: torch.Tensor, target_b: torch.Tensor) -> torch.Tensor:
    """A micro-batch's part of the batch's mean loss, so that the parts add up to it."""
    return F.cross_entropy(y_bC, target_b, reduction="sum") / B


# %% [markdown]
# `dist.P2POp` describes one send or receive, and `dist.batch_isend_irecv` starts a list of them
# together. Here each list holds one. On NCCL this is the form to use: where a rank sends and
# receives at the same time, separate calls can deadlock (communication/02_point_to_point.py).


# %%
def send(x: torch.Tensor, peer: int) -> None:
    operation = dist.P2POp(dist.isend, x.contiguous(), peer)
    for work in dist.batch_isend_irecv([operation]):
        work.wait()


def receive(buffer: torch.Tensor, peer: int) -> torch.Tensor:
    """Fill `buffer` with what `peer` sends; return it."""
    operation = dist.P2POp(dist.irecv, buffer, peer)
    for work in dist.batch_isend_irecv([operation]):
        work.wait()
    return buffer


# %% [markdown]
# ## 3. Tensor parallelism: a linear layer by columns and by rows, f and g
#
# The other cut goes through the layers. A linear layer computes Y = X A. PyTorch stores the
# transpose of A as the layer's `weight`, so the columns of A are the rows of `weight`, along its
# dimension 0. n ranks can share A in two ways (Shoeybi et al., 2019, section 3); ' is transpose:
#
#     by columns: every rank has all of X, and some columns of A
#                     +-----+-----+
#       +-------+     |     |     |       +-----+-----+
#       |   X   |  x  | A_1 | A_2 |   =   | Y_1 | Y_2 |     forward   Y_i = X A_i
#       +-------+     |     |     |       +-----+-----+     backward  dX = sum_i dY_i A_i'   "f"
#                     +-----+-----+
#
#     by rows: every rank has some columns of X, and the same rows of A
#                     +-----------+
#       +-----+-----+ |    A_1    |
#       | X_1 | X_2 |x+-----------+   =   X_1 A_1 + X_2 A_2    forward   Y = sum_i X_i A_i   "g"
#       +-----+-----+ |    A_2    |                            backward  dX_i = dY A_i'
#                     +-----------+
#
# By columns every rank reads all of X, so X's gradient is a sum over the ranks: **f** is the
# identity forward and an all-reduce backward. By rows the output is the sum: **g** is an all-reduce
# forward and the identity backward, because every rank holds the whole dY already.
#
# The gradients of the weights need no message either way: dA_i = X' dY_i by columns, X_i' dY by
# rows, and rank i holds both factors.


# %%
class CopyToRanks(torch.autograd.Function):
    """f in Shoeybi et al. (2019), section 3: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, group: Group = None) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(grad, ctx.group), None  # None: a group has no gradient


class ReduceFromRanks(torch.autograd.Function):
    """g in Shoeybi et al. (2019), section 3: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, group: Group = None) -> torch.Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def all_reduce(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Return the sum over the group. `x` stays as it is: a gradient we are handed is not ours."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def column_parallel(
    x_BD: torch.Tensor, weight_eD: torch.Tensor, bias_e: torch.Tensor
) -> torch.Tensor:
    """Return this rank's e of the layer's output features."""
    return F.linear(CopyToRanks.apply(x_BD), weight_eD, bias_e)


def row_parallel(x_Be: torch.Tensor, weight_De: torch.Tensor, bias_D: torch.Tensor) -> torch.Tensor:
    """Return all output features, given this rank's e input features; add the bias once."""
    return ReduceFromRanks.apply(F.linear(x_Be, weight_De)) + bias_D


# %% [markdown]
# ## 4. An MLP over ranks: columns first, then rows
#
# An MLP is two linear layers, `up` and `down`, with a GELU between them. After a split of `up` by
# columns every rank holds some hidden features, complete. GELU acts on each number alone, so every
# rank applies it to its own. A split of `down` by rows takes exactly such features as its input. So
# nothing is sent in the middle, and every MLP costs f and g once each:
#
#     rank 0    x --f--> up_1 --> GELU --> down_1 --g--> y
#     rank 1    x --f--> up_2 --> GELU --> down_2 --g--> y, the sum of both
#
# The other order would not work: after a split by rows a rank holds a summand of every hidden
# feature, and GELU(a + b) is not GELU(a) + GELU(b). So a sum would be needed before GELU.
#
# All ranks work at the same time, on the same batch. The small layers at the two ends of this model
# stay whole: every rank computes them, and finds the same gradients, because it sees the same input
# and the same gradient of the output. The 4 D hidden features need not be a multiple of n:
# `tensor_split` makes shares that differ by one feature at most.


# %%
class ParallelMLP(nn.Module):
    """This rank's share of an MLP: (B, D) -> (B, D)."""

    def __init__(self, whole: MLP) -> None:
        super().__init__()
        self.up_weight = nn.Parameter(my_share(whole.up.weight, 0))
        self.up_bias = nn.Parameter(my_share(whole.up.bias, 0))
        self.down_weight = nn.Parameter(my_share(whole.down.weight, 1))
        self.down_bias = nn.Parameter(whole.down.bias.detach().clone())

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        hidden_Be = F.gelu(column_parallel(x_BD, self.up_weight, self.up_bias))
        return x_BD + row_parallel(hidden_Be, self.down_weight, self.down_bias)


def my_share(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.detach().tensor_split(WORLD_SIZE, dim)[RANK].clone()


def tensor_parallel(model: nn.Sequential) -> nn.Sequential:
    """Return this rank's share of the model."""
    middle = [ParallelMLP(layer) for layer in model[1:-1]]
    return nn.Sequential(copy.deepcopy(model[0]), *middle, copy.deepcopy(model[-1]))


# %% [markdown]
# ## 5. Pipeline parallelism: micro-batches fill the idle time
#
# Back to the cut between layers. Its devices idle because there is one batch to work on. Cut the
# batch into m **micro-batches**, let them follow one another through the stages, and stage 0 can
# work on the second while stage 1 works on the first (Huang et al., 2019: GPipe). A slot is now the
# forward pass of one *micro-batch* through one stage, 1/m of a slot of section 1. Two stages and
# four micro-batches:
#
#     slot       0  1  2  3  4  5  6  7  8  9 10 11 12 13 14
#     rank 0    F0 F1 F2 F3  .  .  . B0 B0 B1 B1 B2 B2 B3 B3       idle 3 of 15 slots
#     rank 1     . F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3  .  .       idle 3 of 15 slots
#
# The idle slots that remain are the **bubble**. Let p be the number of stages, here as many as
# ranks. Filling and draining the pipeline takes p-1 forward and p-1 backward passes, 3 (p-1) slots,
# in which a stage idles, whatever m is. Its own work takes 3 m slots, so it idles (p-1)/(m+p-1) of
# the time. This counts all stages as equally long; the longest sets the pace. The gradients of the
# micro-batches add up in `.grad`, and the optimizer steps once.


# %%
def micro_batch_step(
    stage: nn.Module, x_BI: torch.Tensor, target_B: torch.Tensor, m: int = M
) -> None:
    targets = target_B.chunk(m)
    passes = [forward_stage(stage, x_bI) for x_bI in x_BI.chunk(m)]
    for (x, y), target_b in zip(passes, targets, strict=True):
        backward_stage(x, y, target_b)


# %% [markdown]
# ## 6. How it is measured
#
# Every way to split trains the same model on the same batches of scikit-learn's digits. The
# **oracle** is that training in one process: afterwards each rank compares the weights it holds
# with the oracle's. In float64 each step adds sums of at most 4 D terms per layer in another order
# than the oracle does, which sets the tolerance.
#
# A deeper model needs smaller steps, and more of them, because every MLP changes what those behind
# it get. It also starts with smaller `down` weights, as in GPT-2 (Radford et al., 2019, section
# 2.3), so that what its MLPs add up to is as large as in ten. For ten MLPs that factor is 1.


# %%
EPOCHS = 6 * MLPS // 10
LEARNING_RATE = 0.5 / MLPS
TRAINED_ON = 1500  # of 1,797 digits
STEPS = EPOCHS * TRAINED_ON // B
TOLERANCE = STEPS * LAYERS * 4 * D * 2**-53


def untrained(device: torch.device) -> nn.Sequential:
    """Return the model with the same weights on every rank."""
    torch.manual_seed(0)
    middle = [MLP() for _ in range(MLPS)]
    model = nn.Sequential(nn.Linear(64, D), *middle, nn.Linear(D, C)).to(device, torch.float64)
    for mlp in middle:
        mlp.down.weight.data *= math.sqrt(10 / MLPS)
    return model


@functools.cache  # the file is read once
def digits(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all images (1797, 64), between 0 and 1, and their digits (1797)."""
    images, targets = load_digits(return_X_y=True)
    shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x = torch.from_numpy(images)[shuffled].to(device) / 16
    return x, torch.from_numpy(targets)[shuffled].to(device)


def train(
    step: Callable, model: nn.Module, device: torch.device, epochs: int = EPOCHS
) -> nn.Module:
    """Train `model` by `step(model, x_BI, target_B)`, which leaves gradients; return the model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    for x_BI, target_B in batches(device, epochs):
        optimizer.zero_grad()
        step(model, x_BI, target_B)
        optimizer.step()
    return model


def batches(device: torch.device, epochs: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield so many times all training examples, B at a time, the same on every rank."""
    x, target = digits(device)
    for _ in range(epochs):
        yield from zip(x[:TRAINED_ON].split(B), target[:TRAINED_ON].split(B), strict=True)


def one_process_step(model: nn.Module, x_BI: torch.Tensor, target_B: torch.Tensor) -> None:
    y_BC = model(x_BI)
    loss_of(y_BC, target_B.to(y_BC.device)).backward()


def accuracy(y_NC: torch.Tensor, target_N: torch.Tensor) -> float:
    return (y_NC.argmax(1) == target_N).double().mean().item()


def weights_error(ours: nn.Module, expected: nn.Module) -> float:
    """Return the largest difference of the parameters, relative to the largest of each."""
    pairs = zip(ours.parameters(), expected.parameters(), strict=True)
    return max(relative_error(a.detach().to(b.device), b.detach()) for a, b in pairs)


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference between two tensors, relative to the largest element."""
    return ((ours - expected).abs().max() / expected.abs().max()).item()


# %% [markdown]
# Messages and all-reduces are counted where they are handed to torch.distributed: in its block,
# `Traffic` puts functions that take notes in the place of the two that this lesson calls.


# %%
class Event(NamedTuple):
    """A message or an all-reduce of this rank, or a pass of its part of the model."""

    operation: str  # "send", "recv", "all_reduce", "F" or "B"
    elements: int = 0
    peer: int | None = None


class Traffic(list):
    """The calls of this rank in its block, in order."""

    def __enter__(self) -> "Traffic":
        self.batch_isend_irecv = dist.batch_isend_irecv
        self.all_reduce = dist.all_reduce
        dist.batch_isend_irecv = self.note_messages
        dist.all_reduce = self.note_sum
        return self

    def __exit__(self, *error: object) -> None:
        dist.batch_isend_irecv = self.batch_isend_irecv
        dist.all_reduce = self.all_reduce

    def note_messages(self, messages: list[dist.P2POp]) -> list[dist.Work]:
        for message in messages:
            way = "send" if message.op is dist.isend else "recv"
            self.append(Event(way, message.tensor.numel(), message.peer))
        return self.batch_isend_irecv(messages)

    def note_sum(self, x: torch.Tensor, group: Group = None) -> None:
        self.append(Event("all_reduce", x.numel()))
        self.all_reduce(x, group=group)

    def elements(self, operation: str) -> int:
        return sum(event.elements for event in self if event.operation == operation)


# %% [markdown]
# Idle time is counted in slots. Hooks write each pass of a stage, F or B, into the log that holds
# its messages too. `replay` then asks of all ranks' logs: if a forward pass takes one slot, a
# backward pass two, and a message no time, when does each pass start? (Two cores cannot show that
# on a clock, because a stage that idles lends its core to the others.)


# %%
SLOTS = {"F": 1, "B": 2}


def log_passes(part: nn.Module, log: list[Event]) -> None:
    """Write F into `log` before each forward pass of a part, B before each backward pass."""
    part.register_forward_pre_hook(lambda *_: log.append(Event("F")))
    part.register_full_backward_pre_hook(lambda *_: log.append(Event("B")))


def replay(logs: list[list[Event]]) -> float:
    """Return the idle share of all ranks' slots, given what each rank did, in order."""
    mail = defaultdict(deque)  # (sender, receiver): the slots at whose start messages were there
    clocks = [0] * len(logs)
    busy = 0
    logs_left = [deque(log) for log in logs]
    while any(logs_left):
        for rank, log in enumerate(logs_left):
            while log:
                event = log[0]
                if event.operation == "recv" and not mail[event.peer, rank]:
                    break  # the sender has not come that far; let the other ranks go on
                log.popleft()
                if event.operation == "send":
                    mail[rank, event.peer].append(clocks[rank])
                elif event.operation == "recv":
                    clocks[rank] = max(clocks[rank], mail[event.peer, rank].popleft())
                else:
                    clocks[rank] += SLOTS[event.operation]
                    busy += SLOTS[event.operation]
    return 1 - busy / (len(logs) * max(clocks))


def count_step(step: Callable, model: nn.Module, device: torch.device) -> Traffic:
    """Take one step with a copy of the model; return its messages, and its passes among them."""
    model = copy.deepcopy(model)
    x_BI, target_B = next(batches(device, epochs=1))
    with Traffic() as traffic:
        log_passes(model, traffic)
        step(model, x_BI, target_B)
    return traffic


def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


# %% [markdown]
# With two devices in one process only rank 0 trains, on two GPUs if it has them; without GPUs both
# devices are the CPU.


# %%
def check_one_process(device: torch.device, oracle: nn.Module) -> None:
    """Train on two devices from one process; claim the weights."""
    error = 0.0
    if RANK == 0:
        devices = [device, device]
        if device.type == "cuda" and torch.cuda.device_count() > 1:
            devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
        model = train(one_process_step, OnDevices(untrained(device), devices), device)
        error = weights_error(model, oracle)
    claim("two devices: error of the trained weights", 0, error, atol=TOLERANCE, rank=0)


# %% [markdown]
# Over ranks, every stage trains, with and without micro-batches, and compares its weights with its
# part of the oracle's. One more step is counted. The last rank knows the predictions for digits
# that the training did not see.


# %%
def check_pipeline(device: torch.device, oracle: nn.Module) -> None:
    """Train with and without micro-batches over ranks; claim weights, slots and messages."""
    if WORLD_SIZE == 1:
        blocked("a pipeline: its weights, messages and idle slots", needs="2 ranks")
        return
    naive, naive_log = train_stage(naive_step, device)
    filled, filled_log = train_stage(micro_batch_step, device)
    expected = part_of(oracle, RANK, WORLD_SIZE)
    error = weights_error(naive, expected)
    claim("naive: error of the trained weights", 0, error, atol=TOLERANCE)
    error = weights_error(filled, expected)
    claim("micro-batches: error of the trained weights", 0, error, atol=TOLERANCE)
    right = pipelined_accuracy(filled, device)
    last = WORLD_SIZE - 1
    claim("pipeline: accuracy on new digits", 0.9, right, ">=", varies=True, rank=last)

    count_messages("naive", naive_log)
    count_messages("micro-batches", filled_log)
    p = WORLD_SIZE
    idle = replay(gather_objects([*naive_log]))
    what = "naive: share of slots idle"
    claim(what, (p - 1) / p, idle, atol=1e-12, question=1, kind="simulated")
    idle = replay(gather_objects([*filled_log]))
    bubble = (p - 1) / (M + p - 1)
    what = "micro-batches: share of slots idle"
    claim(what, bubble, idle, atol=1e-12, question=4, kind="simulated")


def count_messages(name: str, counted: Traffic) -> None:
    """Claim the elements that a stage and all stages together hand to sends in one step."""
    neighbors = (RANK > 0) + (RANK < WORLD_SIZE - 1)
    elements = counted.elements("send")
    what = f"{name}: elements that rank 1 sends per step"
    claim(what, neighbors * B * D, elements, question=3, rank=1)
    total = sum(gather_objects(elements))
    claim(f"{name}: elements that all send per step", 2 * (WORLD_SIZE - 1) * B * D, total)


def train_stage(step: Callable, device: torch.device) -> tuple[nn.Module, Traffic]:
    """Train this rank's stage; return it, and the messages and passes of one step."""
    stage = train(step, part_of(untrained(device), RANK, WORLD_SIZE), device)
    return stage, count_step(step, stage, device)


def pipelined_accuracy(stage: nn.Module, device: torch.device) -> float:
    """Return, on the last rank, the share of new digits that all stages together get right."""
    x, target = digits(device)
    with torch.no_grad():
        _, y = forward_stage(stage, x[TRAINED_ON:])
    return accuracy(y, target[TRAINED_ON:]) if RANK == WORLD_SIZE - 1 else 0.0


# %% [markdown]
# Tensor parallelism is counted in all-reduces, one MLP first, then a whole training step.


# %%
def check_tensor(device: torch.device, oracle: nn.Module) -> None:
    """Train with every MLP split; claim its all-reduces, weights, messages and accuracy."""
    if WORLD_SIZE == 1:
        blocked("tensor parallelism: its weights and all-reduces", needs="2 ranks")
        return
    mlp = ParallelMLP(oracle[1])
    x_BD = torch.randn(B, D, device=device, dtype=torch.float64, requires_grad=True)
    with Traffic() as forward:
        y_BD = mlp(x_BD)
    with Traffic() as backward:
        y_BD.sum().backward()
    claim("MLP: all-reduces forward", 1, len(forward), question=2)
    claim("MLP: all-reduces backward", 1, len(backward), question=2)
    held = mlp.up_weight.numel() + mlp.down_weight.numel()
    e = 4 * D // WORLD_SIZE + (RANK < 4 * D % WORLD_SIZE)
    claim("MLP: elements held of its weights / D", 2 * e, held / D)

    model = train(one_process_step, tensor_parallel(untrained(device)), device)
    error = weights_error(model, tensor_parallel(oracle))
    claim("tensor: error of the trained weights", 0, error, atol=TOLERANCE)
    x, target = digits(device)
    with torch.no_grad():
        right = accuracy(model(x[TRAINED_ON:]), target[TRAINED_ON:])
    claim("tensor: accuracy on new digits", 0.9, right, ">=", varies=True)
    counted = count_step(one_process_step, model, device)
    elements = counted.elements("all_reduce")
    what = "tensor: elements handed to all-reduces per step"
    claim(what, 2 * MLPS * B * D, elements, question=3)


# %% [markdown]
# ## 7. On GPUs: one process, two GPUs, and what each is busy with
#
# A process only *launches* work on GPUs and runs ahead of them, so one process is enough to let two
# GPUs work at the same time, if there are micro-batches to work on. A step begins and ends on GPU
# 0, where CUDA events time it; how long GPU 0 works in it is the time of its part alone. `.to()`
# waits for the other GPU on the GPUs, not on the host.


# %%
def check_two_gpus(device: torch.device) -> None:
    """Claim how long two GPUs idle, with one batch and with micro-batches."""
    capable = torch.cuda.device_count() >= 2 and torch.cuda.is_bf16_supported(False)
    if device.type == "cpu" or not capable:
        blocked("two GPUs: share of time idle, naive", needs="2 GPUs with bfloat16")
        blocked("two GPUs: share of time idle, micro-batches", needs="2 GPUs with bfloat16")
        return
    store = dist.distributed_c10d._get_default_store()  # waiting there leaves the GPUs alone
    naive = 0.0
    filled = 0.0
    if RANK == 0:
        naive = idle_of_two_gpus(1)
        filled = idle_of_two_gpus(M)
        store.set("two GPUs", "measured")
    store.wait(["two GPUs"])
    what = "two GPUs: share of time idle, naive"
    claim(what, 1 / 2, naive, atol=0.1, question=1, timed=True, rank=0)
    bubble = 1 / (M + 1)
    what = "two GPUs: share of time idle, micro-batches"
    claim(what, bubble, filled, atol=0.15, timed=True, rank=0)


def idle_of_two_gpus(m: int, width: int = 8192) -> float:
    """Return the share of a step in which GPU 0 has nothing to do."""
    gpus = [torch.device("cuda", number) for number in (0, 1)]
    factory = {"dtype": torch.bfloat16}
    layers = nn.Sequential(*[nn.Linear(width, width, **factory) for _ in range(LAYERS)])
    model = OnDevices(layers, gpus)
    x = torch.randn(width, width, device=gpus[0], requires_grad=True, **factory)

    def step_of(layers: nn.Module) -> None:
        for y in [layers(x_b) for x_b in x.chunk(m)]:
            y.sum().backward()

    alone = milliseconds(lambda: step_of(model.parts[0]))
    return 1 - alone / milliseconds(lambda: step_of(model))


def milliseconds(work: Callable) -> float:
    """Return the median time of five on the current GPU, after one to warm up."""
    times = []
    for _ in range(6):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times[1:])[2]


# %% [markdown]
# ## What you should have seen
#
# 1. Half, and three quarters. Each of p devices idles (p-1)/p of the time, so 16 GPUs are no faster
#    than one. The row shows the share for as many stages as there are ranks; start the lesson with
#    two ranks to see the half.
# 2. One forward, by g, and one backward, by f. 06_tensor_parallel.py measures each layer
#    alone: by columns it costs the one backward, by rows the one forward.
# 3. A rank in the middle of the pipeline sends 2 B D = 16,000 elements per step, activations on and
#    a gradient back; the first and the last rank send half of that. Cut inside, each of the 10
#    MLPs hands B D elements to an all-reduce forward and B D backward: 20 B D = 160,000. It is 10
#    times as many here, grows with the depth of the model, and each of the 20 sums makes all ranks
#    wait.
# 4. (p-1)/(m+p-1) = 3/7, not 3/4. With 32 micro-batches it would be 3/35. Counted in the slots of
#    section 5, a step takes 3 (m+p-1) = 21 of them, and without micro-batches it takes 3 p m = 48.
#    So four devices are 16/7 times as fast as one, not 4 times.
#
# Every way to split ends at the weights of one process, so what chooses among them is what a rank
# must hold, what it must send, and when it waits. P are the model's parameters; the line of data
# parallelism is that of 01_data_parallelism_ddp.py:
#
#     split          a rank holds   it hands over per step      it waits
#     data           P              P, all-reduce               once per step; can be hidden
#     model, naive   P/n            2 B D, to its neighbors     (n-1)/n of the time
#     pipeline       P/n            2 B D, to its neighbors     (n-1)/(m+n-1) of the time
#     tensor         P/n            2 B D per MLP, all-reduce   twice per MLP, for the sum
#
# **Try.** Yes, the model still learns without f: four ranks get 90 % of the new digits right, not
# 93 %, which could have many causes. Every forward pass is right, but the gradients below the last
# MLP are not, because each rank follows its own summand of them. What says so are the weights,
# compared with one process, and the counts: no all-reduce backward, and half of the elements. With
# `/ len(y_bC)` every micro-batch counts like a whole batch. So micro-batches, where a part of the
# batch is seen at a time, take steps that are too large, and the claim of their weights fails.
# Naive and tensor parallelism see the whole batch and notice nothing.
#
# On GPUs the same cuts meet links. The sums of tensor parallelism want NVLink, the messages of a
# pipeline pass over a network. On real systems all are combined (parallelism/12_3d_parallelism.py),
# the schedule keeps fewer micro-batches in memory than this one (07_pipeline_schedules.py), and
# attention is split by heads (06_tensor_parallel.py). parallelism/README.md helps to choose.


# %%
def main() -> None:
    command_line()
    launch(range(1, 65))
    if WORLD_SIZE > 64:
        rule = f"takes at most 64 ranks, for no deeper model was tried; got {WORLD_SIZE}"
        refuse(f"{rule}; set --nproc-per-node to 64 or less")
    device = setup()
    oracle = train(one_process_step, untrained(device), device)
    check_one_process(device, oracle)
    check_pipeline(device, oracle)
    check_tensor(device, oracle)
    check_two_gpus(device)
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
