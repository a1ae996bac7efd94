"""Zero-bubble schedules: a backward pass in two halves
====================================================

**Question.** A backward pass computes two things: the gradient of a stage's input, for which
another rank waits, and the gradients of its weights, for which nobody waits until the optimizer
steps. How much of 1F1B's bubble can the second half fill, and what does that cost?

**Predict**, and write it down before you run. There are four ranks with one stage each, and eight
micro-batches. A forward pass and each half of a backward pass take one slot, and a message takes no
time. Under 1F1B every rank idles nine slots, and the last rank holds the activations of one
micro-batch.

1. A rank sends the first half's result at once, and then does the second half. How many slots does
   a rank idle now?
2. For the first halves of rank r, r ranks wait. So it puts each second half off, by r
   micro-batches. How many slots does a rank idle now?
3. How many micro-batches does the last rank hold then?

**Run.**

    torchrun --standalone --nproc-per-node=4 19_zero_bubble.py   # NCCL on 4 GPUs, else gloo
    python 19_zero_bubble.py                                     # the same, started for you
    python 19_zero_bubble.py --figure grids.svg                  # and draw the schedules

Not run on several GPUs.

**Try.** In `zb_h1` give every rank the delay of the last one, `p - 1`: what does it gain, and which
claims fail? Put it back, and let a forward pass take two slots, `"F": 2` in `SLOTS`: how many slots
does a rank idle now?

**Before.** parallelism/08_interleaved_schedules.py: the other way to a smaller bubble.

**Next.** exercises/11_pipeline_micro_batches: ZB-H1 by your own hand. Then
parallelism/09_pipeline_deadlocks.py: which lists can never finish.
"""

import argparse
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
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

# A *rank* is one of WORLD_SIZE processes that run this same file, and here it is also one *stage*
# of the pipeline. `claim(text, predicted, measured)` prints one row of the ledger and must be
# called by every rank. It, `setup`, `print0`, `blocked` and `finish` stand in the last cell, the
# same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# %% [markdown]
# ## 1. The two halves of a backward pass
#
# A linear layer computes z = x wᵀ, and y = tanh(z) is the input of the next one. Backward, the
# gradient of y arrives. From it the layer computes
#
#     g       = (grad of y) * (1 - y²)    through tanh
#     grad x  = g w                       I: the layer before waits for it, or the rank before
#     grad w  = gᵀ x                      W: nobody waits for it until the optimizer steps
#
# I and W are one matrix product each, as long as the forward pass. I goes from the last layer to
# the first, each needing the one behind it. W can be done at any time, in any order, if x and g of
# each layer are kept. So a stage has three kinds of action for a micro-batch: F, I and W.
# (PyTorch's code uses these letters too. The paper on zero-bubble schedules calls I "B". Here B is
# a whole backward pass, as in 1F1B.)


# %%
class Stage:
    """Some linear layers with tanh behind each, and a backward pass in two halves."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self.weights = weights
        self.grads = [torch.zeros_like(w) for w in weights]
        self.kept: dict[int, list[torch.Tensor]] = {}  # of each micro-batch, from its F to its W
        self.most_held = 0  # micro-batches

    def forward(self, k: int, x: torch.Tensor) -> torch.Tensor:
        """F: return the output; keep every layer's x, and the output."""
        xs = [x]
        for w in self.weights:
            xs.append(torch.tanh(xs[-1] @ w.T))
        self.kept[k] = xs
        self.most_held = max(self.most_held, len(self.kept))
        return xs[-1]

    def backward_input(self, k: int, grad: torch.Tensor) -> torch.Tensor:
        """I: return the gradient of the stage's input; keep every layer's x and g."""
        xs = self.kept[k]
        gs = []
        for w, y in zip(reversed(self.weights), reversed(xs[1:]), strict=True):
            gs.append(grad * (1 - y * y))
            grad = gs[-1] @ w
        self.kept[k] = xs[:-1] + gs[::-1]
        return grad

    def backward_weights(self, k: int) -> None:
        """W: add this micro-batch's gradients of the weights."""
        kept = self.kept.pop(k)
        layers = len(self.weights)
        for total, x, g in zip(self.grads, kept[:layers], kept[layers:], strict=True):
            total += g.T @ x


# %% [markdown]
# There is no autograd here, to show what is computed when. With autograd one might call
# `grad(y, x)` and later `grad(y, weights)` on one graph. But the second call starts at y again: to
# get at each layer's g it repeats I's products, and W is no half. (PyTorch's own zero-bubble
# schedules keep each g.) Rank 0 needs no grad x of its first layer, and computes it all the same,
# so that every rank's I takes as long.

# %% [markdown]
# ## 2. ZB-H1: first split, then delay
#
# Here is 1F1B, with a B of two slots, on three ranks with four micro-batches. It idles six slots:
#
#     1F1B       slot  0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17    holds
#     rank 0          F0 F1 F2  .  .  .  . B0 B0 F3 B1 B1  . B2 B2  . B3 B3      3
#     rank 1           . F0 F1  .  . B0 B0 F2 B1 B1 F3 B2 B2  . B3 B3  .  .      2
#     rank 2           .  . F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3  .  .  .  .      1
#
# **Split.** Cut each B into I and W, and send I's result at once. The first gradient is on rank 0
# in slot 5 instead of 7, since it came through two halves. A rank idles four slots:
#
#     W at once  slot  0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15    holds
#     rank 0          F0 F1 F2  .  . I0 W0 F3 I1 W1  . I2 W2  . I3 W3      3
#     rank 1           . F0 F1  . I0 W0 F2 I1 W1 F3 I2 W2  . I3 W3  .      2
#     rank 2           .  . F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3  .  .      1
#
# **Delay.** Rank 2 never waits between its slots 2 and 13, and yet it makes others wait. Two ranks
# need its I1, and first it does W0, which nobody needs. So let it do each W two micro-batches
# later:
#
#     rank 2     slot  2  3  4  5  6  7  8  9 10 11 12 13
#     W at once       F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3    I3 in slot 12
#     two later       F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3    I3 in slot 10
#
# It is the same work in the same slots, but I3 is done two slots earlier. It reaches rank 0 that
# much earlier, and while it travels, rank 2 does the W that it has put off. Rank 1, for which one
# rank waits, does its W one micro-batch later, and rank 0 at once: rank r has a **delay** of r. F
# and I keep 1F1B's order. This is ZB-H1 (Qi et al., 2023), and it idles two slots:
#
#     ZB-H1      slot  0  1  2  3  4  5  6  7  8  9 10 11 12 13    holds
#     rank 0          F0 F1 F2  .  . I0 W0 F3 I1 W1 I2 W2 I3 W3      3
#     rank 1           . F0 F1  . I0 F2 I1 W0 F3 I2 W1 I3 W2 W3      3
#     rank 2           .  . F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3      3
#
# **Why r?** After its last I, rank r has the r+1 last W to do. That takes as long as the gradient's
# way to rank 0, r slots, and rank 0's own last W. So all ranks end together. A longer delay gains
# nothing and holds more. With a shorter one the rank would do one more W before its last I, for
# which r ranks wait.
#
# **The price is memory.** A micro-batch is held from its F to its W. On rank r those are the p-1-r
# that ran ahead, the one at work, and the r whose W is to come: p on every rank, as on 1F1B's rank
# 0. In bytes it is more. Until I, a stage of four layers keeps five tensors of a micro-batch: each
# layer's x, and the output. From I to W it keeps eight, each layer's x and g. On the last of four
# ranks all four micro-batches have done I when the first W begins: 32 tensors. Between its passes
# 1F1B holds 5 there, and 20 on rank 0.

# %%
Action = tuple[str, int]  # ("F", "I" or "W", number of the micro-batch); 1F1B has "B" for both


def split_1f1b(m: int, num_warmup: int, delay: int) -> list[Action]:
    """1F1B's order of F and I, with each W `delay` micro-batches after its I."""
    num_warmup = min(num_warmup, m)
    order = [("F", k) for k in range(num_warmup)]
    for k in range(m):
        if num_warmup + k < m:
            order.append(("F", num_warmup + k))
        order.append(("I", k))
        if k >= delay:
            order.append(("W", k - delay))
    return order + [("W", k) for k in range(max(m - delay, 0), m)]


def zb_h1(rank: int, p: int, m: int) -> list[Action]:
    return split_1f1b(m, num_warmup=p - 1 - rank, delay=rank)


def w_at_once(rank: int, p: int, m: int) -> list[Action]:
    return split_1f1b(m, num_warmup=p - 1 - rank, delay=0)


def unsplit_1f1b(rank: int, p: int, m: int) -> list[Action]:
    order = w_at_once(rank, p, m)
    return [("B" if kind == "I" else kind, k) for kind, k in order if kind != "W"]


# %% [markdown]
# ## 3. Where four of six dots have gone
#
# Let F, I and W be the lengths of the passes, W no longer than F or I. Read the last grid from its
# last row. Rank 2 waits for F0, and then works without a break. It does its last I in slot 10, with
# p = 3 W left to do. Meanwhile I3's result goes on to rank 0, which ends with one W. So a step
# takes
#
#     F0 to the last rank      (p-1) F                       slots 0 and 1
#     its work, up to I3       m (F + I + W)  -  p W         slots 2 to 10
#     I3 on to rank 0          (p-1) I                       slots 11 and 12
#     rank 0's last W          W                             slot 13
#
# Of this sum m (F + I + W) is a rank's work. It idles the rest:
#
#     (p-1) F  -  p W  +  (p-1) I  +  W   =   (p-1) (F + I - W)
#
# Two things change for the other schedules. With no delay the last rank has one W left after I3,
# instead of p. And under 1F1B no W is left, there or on rank 0, but each hop on the way takes a
# whole B = I + W:
#
#     1F1B idles         (p-1) (F + I + W)      six slots
#     W at once          (p-1) (F + I)          four
#     ZB-H1              (p-1) (F + I - W)      two
#
# With slots of equal length a third of the bubble remains. (For ZB-H1 m must be large enough: 2p-1
# always is, and in the grid 4. A longer W saves no more than the shorter of F and I.)

# %% [markdown]
# ## 4. A rank follows its list
#
# The loop is that of 1F1B, with one case more. Activations go down to the next rank and gradients
# up to the one before. Each kind has a process group of its own, so that a send which nobody
# receives yet does not hold up the other kind.


# %%
def run_step(
    stage: Stage,
    order: list[Action],
    inputs: Sequence[torch.Tensor],
    loss_gradient: Callable,
    down: dist.ProcessGroup,
    up: dist.ProcessGroup,
) -> None:
    """Follow a list. inputs: rank 0's micro-batches, elsewhere tensors like what arrives."""
    outputs = {}  # of the last stage
    sends = []
    for kind, k in order:
        if kind == "F":
            x = inputs[k]
            if RANK > 0:
                x = torch.empty_like(x)
                dist.recv(x, RANK - 1, down)
            y = stage.forward(k, x)
            if RANK < WORLD_SIZE - 1:
                sends.append(dist.isend(y, RANK + 1, down))
            else:
                outputs[k] = y
        elif kind == "W":
            stage.backward_weights(k)
        else:  # "I", or 1F1B's "B", which does W before it sends
            if RANK < WORLD_SIZE - 1:
                grad = torch.empty_like(inputs[k])
                dist.recv(grad, RANK + 1, up)
            else:
                grad = loss_gradient(outputs.pop(k), k)
            grad = stage.backward_input(k, grad)
            if kind == "B":
                stage.backward_weights(k)
            if RANK > 0:
                sends.append(dist.isend(grad, RANK - 1, up))
    for work in sends:
        work.wait()


# %% [markdown]
# ## 5. How it is measured
#
# **Gradients and micro-batches held** are those of the loop above. The oracle is one process that
# runs the whole batch through the whole model with autograd, in float64.
#
# **Slots** follow from the lists, and `play` finds them. An action starts when its rank has done
# what stands before it on the list, and what it needs is done: F needs the F of the rank before, I
# and B need that of the next rank, W its own I. How long a pass takes is assumed, so these rows are
# "simulated". That an order saves real time only the rows of section 6 can show.

# %%
SLOTS = {"F": 1, "I": 1, "W": 1}
SLOTS["B"] = SLOTS["I"] + SLOTS["W"]


def play(orders: list[list[Action]]) -> list[dict[Action, int]]:
    """Follow the lists of all ranks; return the slot in which each of their actions starts."""
    starts = [{} for _ in orders]
    ends = {}  # {(rank, kind, k): the slot after it}, of what is done
    now = [0] * len(orders)  # each rank's clock
    for _ in range(sum(map(len, orders))):  # each round brings a rank further
        for rank, order in enumerate(orders):
            needs = {"F": (rank - 1, "F"), "W": (rank, "I")}
            needs |= {"I": (rank + 1, "I"), "B": (rank + 1, "B")}
            for kind, k in order[len(starts[rank]) :]:
                needed = (*needs[kind], k)
                if needed[0] in range(len(orders)) and needed not in ends:
                    break  # the rank waits
                starts[rank][kind, k] = max(now[rank], ends.get(needed, 0))
                now[rank] = starts[rank][kind, k] + SLOTS[kind]
                ends[rank, kind, k] = now[rank]
    return starts


def idle(starts: list[dict[Action, int]]) -> int:
    """The slots that this rank idles, from the first action of any rank to the last of any."""
    ends = []
    for actions in starts:
        ends += [slot + SLOTS[kind] for (kind, _), slot in actions.items()]
    return max(ends) - sum(SLOTS[kind] for kind, _ in starts[RANK])


# %% [markdown]
# Three schedules are played, and the first and the last also run.

# %%
ROWS, WIDTH = 4, 16  # of one micro-batch
LAYERS = 4  # of a stage
MICRO_BATCHES = WORLD_SIZE * max(2, math.ceil(8 / WORLD_SIZE))  # 8 on 1, 2 and 4 ranks
TOLERANCE = 2 * (LAYERS * WORLD_SIZE + 1) * WIDTH * 2**-53  # sums of WIDTH terms, there and back


def check_schedules(
    device: torch.device, down: dist.ProcessGroup, up: dist.ProcessGroup
) -> dict[str, list[dict]]:
    """Play and run the schedules; claim what they idle and hold; return every rank's slots."""
    p = WORLD_SIZE
    m = MICRO_BATCHES
    torch.manual_seed(0)  # model and batch are the same on every rank
    factory = {"device": device, "dtype": torch.float64}
    weights = torch.randn(p, LAYERS, WIDTH, WIDTH, **factory) / WIDTH**0.5
    weights.requires_grad_()
    x = torch.randn(m * ROWS, WIDTH, **factory)
    target = torch.randn_like(x)
    y = x
    for w in weights.flatten(0, 1):
        y = torch.tanh(y @ w.T)
    F.mse_loss(y, target).backward()
    expected = weights.grad[RANK]

    def loss_gradient(y: torch.Tensor, k: int) -> torch.Tensor:
        return 2 * (y - target.chunk(m)[k]) / target.numel()  # of the mean over the whole batch

    held = {}
    for name, order_of in (("1F1B", unsplit_1f1b), ("ZB-H1", zb_h1)):
        stage = Stage(weights.detach()[RANK].unbind())
        run_step(stage, order_of(RANK, p, m), x.chunk(m), loss_gradient, down, up)
        error = (torch.stack(stage.grads) - expected).abs().max() / expected.abs().max()
        claim(f"{name}: error of the gradients", 0, error, atol=TOLERANCE)
        held[name] = stage.most_held
    runs = {}
    for name, order_of in (("1F1B", unsplit_1f1b), ("W at once", w_at_once), ("ZB-H1", zb_h1)):
        runs[name] = play([order_of(rank, p, m) for rank in range(p)])
    claim("1F1B: slots idle", 3 * (p - 1), idle(runs["1F1B"]), kind="simulated")
    at_once = idle(runs["W at once"])
    claim("W at once: slots idle", 2 * (p - 1), at_once, question=1, kind="simulated")
    claim("ZB-H1: slots idle", p - 1, idle(runs["ZB-H1"]), question=2, kind="simulated")
    claim("1F1B: micro-batches held, last rank", 1, held["1F1B"], rank=p - 1)
    claim("ZB-H1: micro-batches held, every rank", p, held["ZB-H1"], question=3)
    return runs


# %% [markdown]
# PyTorch has ZB-H1 too: `ScheduleInterleavedZeroBubble` with one stage per rank.


# %%
def check_torchs(device: torch.device) -> None:
    text = "torch's ZB, v = 1: actions unlike ZB-H1's"
    if WORLD_SIZE == 1:
        blocked(text, needs="2 ranks")
        return
    stage = PipelineStage(nn.Linear(1, 1, device=device), RANK, WORLD_SIZE, device)
    schedule = ScheduleInterleavedZeroBubble([stage], MICRO_BATCHES, loss_fn=F.mse_loss)
    theirs = []
    for one in schedule.pipeline_order[RANK]:
        if one is not None:
            theirs.append((one.computation_type.value, one.microbatch_index))
    pairs = zip(theirs, zb_h1(RANK, WORLD_SIZE, MICRO_BATCHES), strict=True)
    claim(text, 0, sum(a != b for a, b in pairs))


# %% [markdown]
# ## 6. On GPUs: what a rank idles, by CUDA events
#
# The same pipeline, with layers 8,192 wide in bfloat16. A rank idles what a step takes longer than
# its own work alone. F, I and W are timed, too, since W is not exactly as long as they are. From
# these times section 3 predicts.


# %%
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


def check_gpus(device: torch.device, down: dist.ProcessGroup, up: dist.ProcessGroup) -> None:
    if device.type == "cpu" or WORLD_SIZE == 1 or not torch.cuda.is_bf16_supported(False):
        blocked("share that real stages idle, 1F1B and ZB-H1", needs="2 GPUs with bfloat16")
        return
    p = WORLD_SIZE
    m = 2 * p
    factory = {"device": device, "dtype": torch.bfloat16}
    stage = Stage(torch.randn(LAYERS, 8192, 8192, **factory).mul_(0.01).unbind())
    inputs = torch.randn(m * 2048, 8192, **factory).chunk(m)

    def alone(kinds: str = "FIW") -> None:
        for k, x in enumerate(inputs):
            y = stage.forward(k, x)
            if "I" in kinds:
                stage.backward_input(k, y)
            if "W" in kinds:
                stage.backward_weights(k)

    def step(order_of: Callable) -> None:
        run_step(stage, order_of(RANK, p, m), inputs, lambda y, k: y, down, up)

    f = median_ms(partial(alone, "F"), repeats=6)
    i = median_ms(partial(alone, "FI"), repeats=6) - f
    w = median_ms(alone, repeats=6) - f - i
    # With F = I = W, 1/5 and 1/13 on two GPUs, and further apart on more. `min`: a W that is
    # longer than F or I saves no more than the shorter of these (section 3)
    lost = {"1F1B": f + i + w, "ZB-H1": f + i - min(f, i, w)}  # by a hop
    for name, order_of in (("1F1B", unsplit_1f1b), ("ZB-H1", zb_h1)):
        bubble = (p - 1) * lost[name] / m  # f, i and w are of m micro-batches
        due = bubble / (f + i + w + bubble)
        found = []
        for _ in range(3):  # in turn; the median counts
            own = median_ms(alone, repeats=6)
            found.append(1 - own / median_ms(partial(step, order_of), repeats=6))
        claim(f"real {name}: share idle", due, sorted(found)[1], atol=0.05, timed=True)


def draw(path: str, runs: dict[str, list[dict]]) -> None:
    """One panel per schedule, one row per rank."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1.5 * len(runs)), layout="constrained")
    colors = {"F": "C0", "B": "C2", "I": "C1", "W": "C4"}
    panels = figure.subplots(len(runs), 1, sharex=True)
    for axes, (name, starts) in zip(panels, runs.items(), strict=True):
        for rank, actions in enumerate(starts):
            for (kind, _), slot in actions.items():
                axes.barh(rank, SLOTS[kind], left=slot, color=colors[kind], edgecolor="white")
        axes.set(ylabel="rank", yticks=range(len(starts)), ylim=(len(starts) - 0.5, -0.5))
        axes.set_title(f"{name}: each rank idles {idle(starts)} slots")
    panels[-1].set_xlabel("slots; F blue, I orange, W violet, B green")
    alt = "; ".join(axes.get_title() for axes in panels)
    figure.savefig(path, metadata={"Title": f"Pipeline schedules over time, a row per rank. {alt}"})


# %% [markdown]
# ## What you should have seen
#
# With 4 ranks and 8 micro-batches:
#
# 1. Six instead of nine: gradients travel back through three halves instead of three whole backward
#    passes.
# 2. Three. Each I comes earlier, and while the last one travels back, ranks 1 to 3 do the W that
#    they have put off. With 24 slots of work that is 11% of the time instead of 27%.
# 3. Four, like every rank. Under 1F1B the last rank held one. In tensors it is 32 instead of 5
#    (section 2).
#
# **Try.** Delaying W on every rank by p-1 gains nothing. No rank waits for rank 0, and now it has
# four W to do after its last I instead of one: a rank idles six slots again. And rank 0 holds seven
# micro-batches. Three claims fail: ZB-H1's slots, what it holds, and the comparison with PyTorch's
# list. With F of two slots a rank idles (p-1) (2 + 1 - 1) = 6, with W at once 9, and under 1F1B 12.
# The three claims about slots fail, and no other.
#
# **Why not zero?** F0 is done on the last rank after p slots, and I0 takes p-1 more through the
# others to rank 0, which until then has nothing but forwards to do. To fill these slots too it must
# run ahead by 2p-1 micro-batches and hold them all (ZB-H2, with twice the delay). Then the ranks
# end one after the other, as they began, and the next step must follow at once. So no rank may wait
# for all others before it, neither for the norm of all gradients nor for a check for infinities.
#
# **When to use it.** Where micro-batches are few, and the last ranks have memory to spare. Not
# where m is large compared with p: with m = 64 and p = 4 1F1B idles 4.5%, ZB-H1 1.5%. Not with
# recomputation: I recomputes the activations, and what W needs of them stays until W. That takes
# the memory which recomputing was to save.
#
# **On GPUs** W is seldom as long as I. The products of attention's scores have no weights, so both
# of their gradients belong to I. For long sequences some holes come back. The paper's authors
# measure F, I and W, and let a solver order them.


# %%
def main() -> None:
    figure = {"metavar": "PATH", "help": "draw the grid of the schedules: .svg or .png"}
    options = command_line({"--figure": figure})
    launch()
    device = setup()
    down = dist.new_group()
    up = dist.new_group()
    runs = check_schedules(device, down, up)
    check_torchs(device)
    check_gpus(device, down, up)
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
