"""Tensor and pipeline parallelism: cut the layers, or cut the stack
=================================================================

**Question.** A model is too big for one device. It can be cut between its layers, or inside each of
them. What does each rank hold then, and what must travel between the ranks?

**Predict**, and write it down before you run. The model is a stack of 16 MLPs (linear, GELU,
linear) with 32 features in and out, 128 inside, and 133,632 parameters. Four ranks train it on a
batch of 100 examples.

1. The stack is cut into four stages, one per rank. How many elements cross each cut in a training
   step, forward and backward together?
2. The whole batch goes through the four stages at once. They take equally long, and messages no
   time. What share of a step does each rank idle?
3. Now each MLP is cut instead: a rank holds a quarter of both its weights. How many all-reduces
   does one MLP need in a training step, forward and backward together?
4. How many elements does each rank hand to all-reduces in a step, for all MLPs?
5. How many parameters does each rank hold, if the MLPs are cut?

**Run.**

    torchrun --standalone --nproc-per-node=4 03_model_tensor_pipeline_parallel.py   # NCCL, or gloo
    python 03_model_tensor_pipeline_parallel.py                    # the same, started for you

Not run on several GPUs.

**Try.** In `ParallelMLP.forward` replace `CopyToRanks.apply(x_BD)` by `x_BD`: which claims fail,
and does the model still learn? In `loss_of` replace `/ B` by `/ len(y_bD)`: which cut notices?

**Before.** parallelism/02_fsdp_zero.py: how far one gets by splitting only what each rank stores.

**Next.** fsdp/01_fsdp_basics.py, on the spine; or parallelism/04_buckets_and_overlap.py
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
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
LAST = WORLD_SIZE - 1
Group = dist.ProcessGroup | None  # the ranks that share a layer; None: all ranks

# Shapes: B examples per batch, D features between MLPs, 4 D inside. A small letter is a share: b
# examples of a micro-batch, e of the 4 D features.
B, D = 100, 32
MLPS = 16
M = 4  # micro-batches

# %% [markdown]
# ## 1. One model, two ways to cut it
#
# The model is a stack of MLPs. Each makes 4 D **hidden** features of an example's D, makes D again
# of those, and adds them to its input. So between two MLPs lie D numbers per example, the
# **activations**. There are two ways to give each of n ranks 1/n of the weights:
#
#     cut the stack                            cut the layers
#
#     rank 0   [ MLP 1 ]                       rank 0   [MLP 1   <--sum-->   MLP 1]   rank 1
#              [ MLP 2 ]                                [MLP 2   <--sum-->   MLP 2]
#     - - - - - - | - - - activations                   [MLP 3   <--sum-->   MLP 3]
#     rank 1   [ MLP 3 ]                                [MLP 4   <--sum-->   MLP 4]
#              [ MLP 4 ]
#
# **Pipeline parallelism** cuts the stack. A rank holds some layers whole, and passes activations to
# the next rank. **Tensor parallelism** cuts the layers. A rank holds a slice of each layer, so each
# of its results is only a part, and all ranks must add up their parts in every MLP.


# %%
class MLP(nn.Module):
    """x + down(gelu(up(x))): (B, D) -> (B, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, 4 * D)
        self.down = nn.Linear(4 * D, D)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return x_BD + self.down(F.gelu(self.up(x_BD)))


def loss_of(y_bD: torch.Tensor, target_bD: torch.Tensor) -> torch.Tensor:
    """A micro-batch's part of the batch's mean loss, so that the parts add up to it."""
    return (y_bD - target_bD).square().sum() / B


def step(model: nn.Module, x_BD: torch.Tensor, target_BD: torch.Tensor) -> None:
    """Leave a training step's gradients in `.grad`, as one process finds them."""
    loss_of(model(x_BD), target_BD).backward()


# %% [markdown]
# ## 2. Cut the stack: each rank is a stage
#
# A rank's part of the stack is its **stage**. Autograd does not cross ranks, so the cut becomes two
# messages per step: the activations go on to the next rank, and later their gradient comes back. A
# stage keeps its input and its output until then. Its backward pass starts from the output's
# gradient and ends at the input's, which is the message to the stage before. Messages go by
# `batch_isend_irecv`, the form to use on NCCL (communication/02_point_to_point.py).


# %%
class Stage(nn.Module):
    """This rank's part of the stack: forward, backward, and messages to its neighbors."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        first = RANK * MLPS // WORLD_SIZE
        end = (RANK + 1) * MLPS // WORLD_SIZE
        self.layers = copy.deepcopy(model[first:end])

    def forward(self, x_bD: torch.Tensor) -> torch.Tensor:
        return self.layers(x_bD)

    def backward(self, y: torch.Tensor, grad: torch.Tensor | None = None) -> None:
        y.backward(grad)

    def send(self, x: torch.Tensor, peer: int) -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer)]):
            work.wait()

    def receive(self, buffer: torch.Tensor, peer: int) -> torch.Tensor:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, buffer, peer)]):
            work.wait()
        return buffer


# %% [markdown]
# **Who works when.** F is a forward pass of the whole batch through one stage, and takes one
# **slot**. B is a backward pass, and takes two, because it finds two gradients: those of the
# weights and that of the input. Only one stage can work at a time:
#
#     slot       0  1  2  3  4  5
#     rank 0     F  .  .  .  B  B       idle 3 of 6 slots
#     rank 1     .  F  B  B  .  .       idle 3 of 6 slots
#
# This makes a large model fit, and nothing faster. So the batch is cut, too, into m
# **micro-batches** that follow one another through the stages (Huang et al., 2019: GPipe). Now a
# slot is the forward pass of one micro-batch, and with m = 4:
#
#     slot       0  1  2  3  4  5  6  7  8  9 10 11 12 13 14
#     rank 0    F0 F1 F2 F3  .  .  . B0 B0 B1 B1 B2 B2 B3 B3       idle 3 of 15 slots
#     rank 1     . F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3  .  .       idle 3 of 15 slots
#
# The idle slots that remain are the **bubble**. A stage works for 3 m slots. To fill and to drain p
# stages takes p-1 forward and p-1 backward passes, 3 (p-1) slots, in which it idles: a share of
# (p-1)/(m+p-1). The gradients of the micro-batches add up in `.grad`.


# %%
def pipeline_step(stage: Stage, x_BD: torch.Tensor, target_BD: torch.Tensor, m: int = M) -> None:
    passes = []
    for x in x_BD.chunk(m):
        if RANK > 0:  # only rank 0 reads the examples
            x = stage.receive(torch.empty_like(x), RANK - 1).requires_grad_()
        y = stage(x)
        if RANK < LAST:
            stage.send(y.detach(), RANK + 1)
        passes.append((x, y))
    for (x, y), target_bD in zip(passes, target_BD.chunk(m), strict=True):
        if RANK < LAST:
            grad = stage.receive(torch.empty_like(y), RANK + 1)
            stage.backward(y, grad)
        else:
            stage.backward(loss_of(y, target_bD))
        if RANK > 0:
            stage.send(x.grad, RANK - 1)


# %% [markdown]
# ## 3. Cut the layers: by columns, then by rows
#
# A linear layer computes Y = X A. PyTorch stores the transpose of A as the layer's `weight`, so the
# columns of A are the rows of `weight`. n ranks can share A in two ways (Shoeybi et al., 2019,
# section 3); ' is transpose:
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
# forward and the identity backward, because every rank holds the whole dY already. The gradients of
# the weights need no message: rank i holds both factors of its dA_i.


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


# %% [markdown]
# An MLP is two linear layers, `up` and `down`, with a GELU between them. Cut `up` by columns, and
# every rank holds some hidden features, complete. GELU acts on each number alone, so every rank
# applies it to its own. Cut `down` by rows, and it takes exactly such features as its input. So
# nothing is sent in the middle:
#
#     rank 0    x --f--> up_1 --> GELU --> down_1 --g--> y
#     rank 1    x --f--> up_2 --> GELU --> down_2 --g--> y, the sum of both
#
# In the other order a rank would hold a summand of every hidden feature, and GELU(a + b) is not
# GELU(a) + GELU(b). The bias of `down` is whole on every rank, and is added once, after the sum.


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
        hidden_Be = F.gelu(F.linear(CopyToRanks.apply(x_BD), self.up_weight, self.up_bias))
        y_BD = ReduceFromRanks.apply(F.linear(hidden_Be, self.down_weight))
        return x_BD + y_BD + self.down_bias


def my_share(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.detach().tensor_split(WORLD_SIZE, dim)[RANK].clone()


def tensor_parallel(model: nn.Sequential) -> nn.Sequential:
    """Return this rank's share of the model."""
    return nn.Sequential(*[ParallelMLP(mlp) for mlp in model])


# %% [markdown]
# ## 4. How it is measured
#
# The **oracle** is the whole model, trained in one process. Both cuts start from the same weights,
# take the same steps, and then each rank compares what it holds with its part of the oracle. The
# model learns to reverse the order of an example's features. In float64, a step adds four sums of
# at most 4 D terms per MLP in another order than the oracle does, which sets the tolerance. What
# travels is noted beneath torch's dispatcher.
#
# **Slots** are counted in the run. A stage's clock moves on by one slot per forward pass and two
# per backward pass, and each message takes its sender's clock along. The receiver's is set to it,
# if that is later. So no core's speed matters, and no message takes time.


# %%
STEPS = 20
LEARNING_RATE = 0.003
TOLERANCE = STEPS * MLPS * 4 * 4 * D * 2**-53


class Case:
    """The whole model, untrained and trained in one process, and its batch; the same everywhere."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*[MLP() for _ in range(MLPS)])
        self.model = model.to(device, torch.float64)
        x_BD = torch.randn(B, D, dtype=torch.float64).to(device)
        self.x = x_BD.requires_grad_()  # as if there were layers below
        self.target = x_BD.detach().flip(1)
        self.oracle = self.train(copy.deepcopy(self.model), step)

    def train(self, model: nn.Module, step: Callable) -> nn.Module:
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        for _ in range(STEPS):
            optimizer.zero_grad()
            step(model, self.x, self.target)
            optimizer.step()
        return model


class ClockedStage(Stage):
    """A stage that counts slots; each message takes its sender's count along."""

    slots = 0

    def forward(self, x_bD: torch.Tensor) -> torch.Tensor:
        self.slots += 1
        return super().forward(x_bD)

    def backward(self, y: torch.Tensor, grad: torch.Tensor | None = None) -> None:
        self.slots += 2
        super().backward(y, grad)

    def send(self, x: torch.Tensor, peer: int) -> None:
        super().send(x, peer)
        super().send(torch.tensor([self.slots], device=x.device), peer)

    def receive(self, buffer: torch.Tensor, peer: int) -> torch.Tensor:
        super().receive(buffer, peer)
        slots = super().receive(torch.tensor([0], device=buffer.device), peer)
        self.slots = max(self.slots, slots.item())
        return buffer


class Counted(TorchDispatchMode):
    """Notes what this rank hands to torch.distributed in its block: {operation: [elements]}."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: dict[str, list[int]] = defaultdict(list)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and args[0][0].is_floating_point():  # slots are integers
            self.elements[func.name().removeprefix("c10d::")].append(args[0][0].numel())
        return func(*args, **(kwargs or {}))


def weights(model: nn.Module) -> torch.Tensor:
    """Return all parameters of a model in one vector."""
    return nn.utils.parameters_to_vector(model.parameters()).detach()


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
# The pipeline trains with micro-batches, and a step is counted with and without them. What all
# ranks send, divided by the number of cuts, crosses each.


# %%
def check_pipeline(case: Case) -> None:
    """Claim the weights of all stages, what crosses the cuts, and how long a stage idles."""
    if WORLD_SIZE == 1:
        blocked("a pipeline: its weights, messages and idle slots", needs="2 ranks")
        return
    stage = case.train(Stage(case.model), pipeline_step)
    error = relative_error(weights(stage), weights(Stage(case.oracle)))
    claim("pipeline: error of the trained weights", 0, error, atol=TOLERANCE)
    held = sum(gather_objects(len(weights(stage))))
    claim("pipeline: parameters held by all ranks", 133_632, held)

    _, elements, idle = count_step(case, m=1)
    claim("naive: elements across each cut per step", 2 * B * D, elements, question=1)
    what = "naive: share of slots idle"
    claim(what, LAST / WORLD_SIZE, idle, atol=1e-12, question=2, kind="simulated")
    messages, elements, idle = count_step(case, m=M)
    claim("micro-batches: messages across each cut per step", 2 * M, messages)
    claim("micro-batches: elements across each cut per step", 2 * B * D, elements)
    what = "micro-batches: share of slots idle"
    claim(what, LAST / (M + LAST), idle, atol=1e-12, kind="simulated")


def count_step(case: Case, m: int) -> tuple[float, float, float]:
    """Return messages and elements across each cut, and the share of slots idle, of one step."""
    stage = ClockedStage(case.model)
    with Counted() as counted:
        pipeline_step(stage, case.x, case.target, m)
    sent = counted.elements["send"]
    messages = sum(gather_objects(len(sent)))
    elements = sum(gather_objects(sum(sent)))
    idle = 1 - 3 * m / max(gather_objects(stage.slots))  # a stage works for 3 m slots
    return messages / LAST, elements / LAST, idle


# %% [markdown]
# Tensor parallelism is counted in one step of the untrained model, and then trains.


# %%
def check_tensor(case: Case) -> None:
    """Claim the output, weights and loss of the cut model, its all-reduces, and what is held."""
    model = tensor_parallel(case.model)
    with Counted() as counted:
        y_BD = model(case.x)
        forward = len(counted.elements["allreduce_"])
        loss_of(y_BD, case.target).backward()
    sums = counted.elements["allreduce_"]
    error = relative_error(y_BD, case.model(case.x))
    claim("tensor: error of the untrained model's output", 0, error, atol=TOLERANCE)
    claim("tensor: all-reduces per MLP, forward", 1, forward / MLPS)
    claim("tensor: all-reduces per MLP, in a training step", 2, len(sums) / MLPS, question=3)
    what = "tensor: elements handed to all-reduces per step"
    claim(what, 2 * MLPS * B * D, sum(sums), question=4)
    e = 4 * D // WORLD_SIZE + (RANK < 4 * D % WORLD_SIZE)  # hidden features of this rank
    held = MLPS * (D * e + e + e * D + D)
    claim("tensor: parameters that a rank holds", held, len(weights(model)), question=5)

    before = loss_of(y_BD, case.target).item()
    model = case.train(model, step)
    error = relative_error(weights(model), weights(tensor_parallel(case.oracle)))
    claim("tensor: error of the trained weights", 0, error, atol=TOLERANCE)
    after = loss_of(model(case.x), case.target).item()
    claim("tensor: loss after training / before", 0.5, after / before, "<=", varies=True)


# %% [markdown]
# ## 5. On GPUs: what the two cuts send, in milliseconds
#
# Per step, two messages of B D elements cross each cut of the stack, and each MLP takes two
# all-reduces of as many. A ring all-reduce sends 2 (n-1)/n of its elements over each link, so at
# one speed of the links the sums take 2 (n-1)/n x MLPS times as long as the messages. The claim is
# half of that, because NCCL may use a link better for a sum. B D is here what 8,192 tokens are,
# 8,192 wide, in bfloat16: 134 MB.


# %%
def measure_on_gpus(device: torch.device) -> None:
    """Claim how many times as long the sums of a step take as its messages."""
    what = "GPUs: ms of a step's sums / of its messages"
    if device.type == "cpu" or WORLD_SIZE == 1:
        blocked(what, needs="2 GPUs")
        return
    x = torch.zeros(8192, 8192, dtype=torch.bfloat16, device=device)
    send = dist.P2POp(dist.isend, x, (RANK + 1) % WORLD_SIZE)
    receive = dist.P2POp(dist.irecv, torch.empty_like(x), (RANK - 1) % WORLD_SIZE)

    def pass_on() -> None:
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    message = median_ms(pass_on)
    total = median_ms(lambda: dist.all_reduce(x))
    print0(f"{'':13}{x.nbytes / 1e6:.0f} MB: a message {message:.2f} ms, a sum {total:.2f} ms")
    at_one_speed = 2 * LAST / WORLD_SIZE * MLPS
    claim(what, at_one_speed / 2, MLPS * total / message, ">=", timed=True)


def median_ms(work: Callable, repeats: int = 20) -> float:
    """Return the median time of `work()` on this rank's GPU, in milliseconds."""
    times = []
    with torch.no_grad():
        for _ in range(repeats + 3):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return sorted(times[3:])[repeats // 2]


# %% [markdown]
# ## What you should have seen
#
# 1. 6,400: B D = 100 x 32 activations go on, and as many gradients come back, whatever the number
#    of layers. Micro-batches send the same elements in more messages.
# 2. Three quarters: with p stages (p-1)/p, so four ranks are no faster than one. Four micro-batches
#    make it 3/7, and 32 would make it 3/35, if all stages take equally long.
# 3. Two: one forward, by g, and one backward, by f. Forward, the sum stands between an MLP and the
#    next one, and hides behind nothing; backward, f's can (lesson 23).
# 4. 102,400: each of 16 MLPs hands 3,200 elements to a sum forward and 3,200 backward. That is 16
#    times what crosses a cut of the stack (a ring sends 2(n-1)/n of it, 24 times as much on four
#    ranks), it grows with the depth of the model, and all ranks wait for the slowest in 32 sums.
# 5. 33,792: (133,632 - 16 x 32) / 4 + 16 x 32, for the biases of `down` are whole on every rank. A
#    stage of four MLPs holds just a quarter, 33,408.
#
# Both cuts end at the weights of one process. So what chooses between them is what a rank must
# hold, what it must send, and when it waits:
#
#                    cut the stack                       cut the layers
#     a rank holds   MLPS/n layers, whole                1/n of every layer, and what is not cut
#     it hands over  2 B D per cut, to a neighbor        2 B D per MLP, to sums over all ranks
#     it waits       (p-1)/(m+p-1) of the time           twice in every MLP
#     take it for    deep models, over slow links too    wide layers, few examples per rank
#     not if         a step has few micro-batches        PCIe or a network joins the ranks
#
# If each layer and its activations fit on one GPU, try neither first: FSDP stores 1/n of the
# weights on each rank and needs no change of the model (fsdp/01_fsdp_basics.py).
#
# **Try.** Without f every forward pass is right. But below each MLP a rank follows its own summand
# of the gradient, so three claims fail: the all-reduces per MLP in a training step, the elements
# handed to all-reduces, and the trained weights. The loss falls all the same, and would not have
# told. With `/ len(y_bD)` every micro-batch counts like a whole batch, and the pipeline's weights
# fail. Tensor parallelism sees whole batches and notices nothing.
#
# **On GPUs** the links decide. Of the 134 MB of section 5, a ring of 8 GPUs sends 2 x 7/8, 235 MB:
# 0.5 ms at the 450 GB/s of NVLink 4, 4.7 ms at the 50 GB/s of a 400 Gb/s network card. That is one
# sum, and a transformer block needs four per step (06_tensor_parallel.py). So the sums stay inside
# an NVLink domain, and a pipeline's messages pass between machines. A rank of this pipeline holds
# the activations of all m micro-batches; 07_pipeline_schedules.py has an order that holds fewer. On
# a thousand GPUs both cuts are combined with data parallelism: 12_gpt_on_a_mesh.py.


# %%
def main() -> None:
    command_line()
    launch(range(1, MLPS + 1))
    if WORLD_SIZE > MLPS:
        rule = f"takes at most {MLPS} ranks, one per MLP; got {WORLD_SIZE}"
        refuse(f"{rule}; set --nproc-per-node to {MLPS} or less")
    device = setup()
    case = Case(device)
    check_pipeline(case)
    check_tensor(case)
    measure_on_gpus(device)
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
