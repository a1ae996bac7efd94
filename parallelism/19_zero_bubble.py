"""Zero-bubble schedules: a backward pass in two halves
====================================================

**Question.** A backward pass computes two things: the gradient of a stage's input, for which
another rank waits, and the gradients of its weights, for which nobody waits until the optimizer
steps. How much of 1F1B's bubble can the second half fill, and what does that cost?

**Predict**, and write it down before you run. There are four ranks with one stage each, and eight
micro-batches. A stage is four linear layers. A forward pass and each half of a backward pass take
one slot, a message takes none. Under 1F1B every rank idles nine slots, rank 0 holds the activations
of four micro-batches, and the last rank those of one.

1. A stage's backward pass is eight matrix products. How many belong to the second half?
2. How many does `torch.autograd.grad(y, weights, ...)` compute, on the kept graph of the stage?
3. The second half is put off as long as another rank waits for a first half. How many slots does a
   rank idle then?
4. How many micro-batches does the last rank hold then?
5. How many tensors does it keep for them, at the most? (A layer's input is one tensor, and so is
   the gradient of its output.)

**Run.**

    torchrun --standalone --nproc-per-node=4 19_zero_bubble.py   # NCCL on 4 GPUs, else gloo
    python 19_zero_bubble.py                                     # the same, started for you
    python 19_zero_bubble.py --figure grids.svg                  # and draw what was run

Not run on several GPUs.

**Try.** In `zb_h1` let every rank have a `delay` of 0: which claims fail? Put it back, and let a
forward pass take two slots, `"F": 2` in `SLOTS`: how many slots does a rank idle now?

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
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from fractions import Fraction
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble
from torch.utils.flop_counter import FlopCounterMode

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


# %%
class Stage:
    """Some linear layers with tanh behind each, and a backward pass in two halves."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self.weights = weights
        self.grads = [torch.zeros_like(w) for w in weights]
        self.kept: dict[int, list[torch.Tensor]] = {}  # of each micro-batch, from its F to its W

    def forward(self, k: int, x: torch.Tensor) -> torch.Tensor:
        """F: return the output; keep every layer's x, and the output."""
        xs = [x]
        for w in self.weights:
            xs.append(torch.tanh(xs[-1] @ w.T))
        self.kept[k] = xs
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
# There is no autograd here, to show what is computed when. The obvious way with autograd is two
# calls on one graph, `grad(y, x)` and then `grad(y, weights)`. The first is I. But the second
# starts at y again and walks through I's products once more, to get at each layer's g. What makes W
# a half is that g is kept. That takes memory: from I to W two tensors per layer, instead of one.

# %% [markdown]
# ## 2. ZB-H1: W fills what were holes
#
# Take 1F1B, cut each B into I and W, and send I's result at once (ZB-H1, Qi et al., 2023):
#
#     1F1B   slot  0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17    holds
#     rank 0      F0 F1 F2  .  .  .  . B0 B0 F3 B1 B1  . B2 B2  . B3 B3      3
#     rank 1       . F0 F1  .  . B0 B0 F2 B1 B1 F3 B2 B2  . B3 B3  .  .      2
#     rank 2       .  . F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3  .  .  .  .      1
#
#     ZB-H1  slot  0  1  2  3  4  5  6  7  8  9 10 11 12 13    holds
#     rank 0      F0 F1 F2  .  . I0 W0 F3 I1 W1 I2 W2 I3 W3      3
#     rank 1       . F0 F1  . I0 F2 I1 W0 F3 I2 W1 I3 W2 W3      3
#     rank 2       .  . F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3      3
#
# The first gradient is on rank 0 in slot 5 instead of 7, since it came through two halves. At the
# end, ranks 1 and 2 do W where they idled. Of six dots per rank two are left.
#
# F and I come in 1F1B's order: rank r runs ahead by p-1-r forwards. New is the **delay**: rank r
# does a W when r more I are done. Two ranks wait for rank 2's I, so it puts W off; none waits for
# rank 0's, so it does W at once. A micro-batch is held from its F to its W: p-1-r that ran ahead,
# the one at work, and r whose W is to come. That is p on every rank, as on 1F1B's rank 0. In bytes
# the last rank keeps more than rank 0 did, for its p micro-batches keep g, too.

# %%
Action = tuple[str, int]  # ("F", "I" or "W", number of the micro-batch); 1F1B has "B" for both
SLOTS = {"F": 1, "I": 1, "W": 1}
SLOTS["B"] = SLOTS["I"] + SLOTS["W"]


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


# %% [markdown]
# Where have four of six dots gone? Read the lower grid from its last row. Rank 2 waits for F0, and
# then works without a break. It does its last I, I3, in slot 10; thanks to the delay three W are
# left to do after it. Meanwhile I3's result goes on to rank 0, in slots 11 and 12, and rank 0 ends
# with one W in slot 13. So a step takes
#
#     F0 to the last rank      (p-1) F                       slots 0 and 1
#     its work, up to I3       m (F + I + W)  -  p W         slots 2 to 10
#     I3 on to rank 0          (p-1) I                       slots 11 and 12
#     rank 0's last W          W                             slot 13
#
#     in all                   m (F + I + W)  +  (p-1) (F + I - W)
#
# The first part is a rank's work, and the second is what it idles: two slots here. Under 1F1B the
# last rank has no W left to do after I3, and B travels to rank 0 as a whole: (p-1) (F + I + W), or
# six. With slots of equal length a third of the bubble remains. (All this if W is no longer than F
# or I, and if m is large enough: 2p-1 always is, and here 4.)

# %% [markdown]
# ## 3. A rank follows its list
#
# The loop is that of 1F1B, with one case more. Activations go to the next rank and gradients to the
# one before, each in a process group of its own: NCCL runs in order what one rank has started in a
# group, so a send that nobody receives yet would hold up what comes after it.

# %%
groups: dict[str, dist.ProcessGroup] = {}  # "down" and "up"; "clocks" for section 4


def run_step(stage: Stage, order: list[Action], inputs: Sequence, loss_gradient: Callable) -> None:
    """Follow a list; `inputs`: rank 0's micro-batches, elsewhere tensors like what arrives."""
    outputs = {}  # of the last stage
    sends = []
    for kind, k in order:
        if kind == "F":
            x = inputs[k]
            if RANK > 0:
                x = torch.empty_like(x)
                dist.recv(x, RANK - 1, groups["down"])
            y = stage.forward(k, x)
            if RANK < WORLD_SIZE - 1:
                sends.append(dist.isend(y, RANK + 1, groups["down"]))
            else:
                outputs[k] = y
        if kind in ("I", "B"):
            if RANK < WORLD_SIZE - 1:
                grad = torch.empty_like(inputs[k])
                dist.recv(grad, RANK + 1, groups["up"])
            else:
                grad = loss_gradient(outputs.pop(k), k)
            grad = stage.backward_input(k, grad)
        if kind in ("W", "B"):
            stage.backward_weights(k)
        if kind in ("I", "B") and RANK > 0:
            sends.append(dist.isend(grad, RANK - 1, groups["up"]))
    for send in sends:
        send.wait()


# %% [markdown]
# ## 4. How it is measured
#
# **The oracle** is one process that runs the whole batch through the whole model with autograd, in
# float64. **Products** are counted by PyTorch's `FlopCounterMode`. What is **kept** is noted after
# each I, when it is most. **Slots**: each rank follows its list once more, and really sends and
# receives, but a message is only the sender's logical clock, the slot in which its action has
# ended. The lengths of slots are assumed, so these rows are "simulated".

# %%
ROWS, WIDTH = 4, 16  # of one micro-batch
LAYERS = 4  # of a stage
MICRO_BATCHES = WORLD_SIZE * max(2, math.ceil(8 / WORLD_SIZE))  # 8 on 1, 2 and 4 ranks
TOLERANCE = 2 * (LAYERS * WORLD_SIZE + 1) * WIDTH * 2**-53  # sums of WIDTH terms, there and back


class NotedStage(Stage):
    """A stage that notes the most that it keeps, in micro-batches and in tensors: after an I."""

    most_held = 0
    most_tensors = 0

    def backward_input(self, k: int, grad: torch.Tensor) -> torch.Tensor:
        grad = super().backward_input(k, grad)
        self.most_held = max(self.most_held, len(self.kept))
        self.most_tensors = max(self.most_tensors, sum(map(len, self.kept.values())))
        return grad


def slots_of(order: list[Action]) -> dict[Action, int]:
    """Follow a list; return the slot in which each action starts."""
    now = 0
    starts = {}
    sends = []
    for kind, k in order:
        source = {"F": RANK - 1, "I": RANK + 1, "B": RANK + 1, "W": -1}[kind]
        target = {"F": RANK + 1, "I": RANK - 1, "B": RANK - 1, "W": -1}[kind]
        if source in range(WORLD_SIZE):
            clock = torch.tensor([0])
            dist.recv(clock, source, groups["clocks"])
            now = max(now, clock.item())
        starts[kind, k] = now
        now += SLOTS[kind]
        if target in range(WORLD_SIZE):
            sends.append(dist.isend(torch.tensor([now]), target, groups["clocks"]))
    for send in sends:
        send.wait()
    return starts


def idle(starts: list[dict[Action, int]]) -> int:
    """The slots that this rank idles, from the first action of any rank to the last of any."""
    ends = []
    for actions in starts:
        ends += [slot + SLOTS[kind] for (kind, _), slot in actions.items()]
    return max(ends) - sum(SLOTS[kind] for kind, _ in starts[RANK])


# %% [markdown]
# First the halves, on one stage; autograd's second call runs on the same layers as a module.


# %%
class Layers(nn.Module):
    """A stage's layers under autograd: for the oracle, and for PyTorch's schedule."""

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights.unbind())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for w in self.weights:
            x = torch.tanh(x @ w.T)
        return x


def products(work: Callable, *given: object) -> float:
    """How many products of a layer's weight with a micro-batch `work` computes."""
    with FlopCounterMode(display=False) as counter:
        work(*given)
    return counter.get_total_flops() / (2 * ROWS * WIDTH * WIDTH)


def check_halves() -> None:
    weights = torch.ones(LAYERS, WIDTH, WIDTH)
    x = torch.ones(ROWS, WIDTH)
    stage = Stage(weights.unbind())
    y = stage.forward(0, x)
    claim("I: products", LAYERS, products(stage.backward_input, 0, y))
    claim("W: products", LAYERS, products(stage.backward_weights, 0), question=1)
    layers = Layers(weights)
    y = layers(x)
    second = products(torch.autograd.grad, y, list(layers.weights), torch.ones_like(y))
    claim("autograd.grad(y, weights): products", 2 * LAYERS - 1, second, question=2)


# %% [markdown]
# Then the schedules, and 1F1B for comparison, which does I and W as one.


# %%
def unsplit_1f1b(rank: int, p: int, m: int) -> list[Action]:
    order = split_1f1b(m, num_warmup=p - 1 - rank, delay=0)
    return [("B" if kind == "I" else kind, k) for kind, k in order if kind != "W"]


def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


def check_schedules(device: torch.device) -> dict[str, list[dict]]:
    """Run both schedules; claim what they idle and hold; return every rank's slots."""
    p = WORLD_SIZE
    m = MICRO_BATCHES
    torch.manual_seed(0)  # model and batch are the same on every rank
    factory = {"device": device, "dtype": torch.float64}
    weights = torch.randn(p, LAYERS, WIDTH, WIDTH, **factory) / WIDTH**0.5
    x = torch.randn(m * ROWS, WIDTH, **factory)
    target = torch.randn_like(x)
    whole = Layers(weights.flatten(0, 1))
    F.mse_loss(whole(x), target).backward()
    expected = torch.stack([w.grad for w in whole.weights]).view_as(weights)[RANK]

    def loss_gradient(y: torch.Tensor, k: int) -> torch.Tensor:
        return 2 * (y - target.chunk(m)[k]) / target.numel()  # of the mean over the whole batch

    runs = {}
    stages = {}
    for name, order_of in (("1F1B", unsplit_1f1b), ("ZB-H1", zb_h1)):
        stages[name] = NotedStage(weights[RANK].unbind())
        run_step(stages[name], order_of(RANK, p, m), x.chunk(m), loss_gradient)
        error = (torch.stack(stages[name].grads) - expected).abs().max() / expected.abs().max()
        claim(f"{name}: error of the gradients", 0, error, atol=TOLERANCE)
        runs[name] = gather_objects(slots_of(order_of(RANK, p, m)))
    claim("1F1B: slots idle", 3 * (p - 1), idle(runs["1F1B"]), kind="simulated")
    claim("ZB-H1: slots idle", p - 1, idle(runs["ZB-H1"]), question=3, kind="simulated")
    back = runs["ZB-H1"][0]["I", 0]
    claim("ZB-H1: slot of rank 0's first I", 2 * p - 1, back, kind="simulated")
    one = stages["1F1B"]
    split = stages["ZB-H1"]
    claim("1F1B: micro-batches held, last rank", 1, one.most_held, rank=p - 1)
    claim("ZB-H1: micro-batches held, last rank", p, split.most_held, question=4, rank=p - 1)
    due = (p - 1) * (LAYERS + 1) + 2 * LAYERS
    claim("1F1B: tensors kept, rank 0", due, one.most_tensors, rank=0)
    due = p * 2 * LAYERS
    claim("ZB-H1: tensors kept, last rank", due, split.most_tensors, question=5, rank=p - 1)
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
    named = " ".join(str(action) for action in schedule.pipeline_order[RANK] if action)
    theirs = [(kind, int(k)) for kind, k in re.findall(r"\d+([FBIW])(\d+)", named)]  # as in 2I0
    pairs = zip(theirs, zb_h1(RANK, WORLD_SIZE, MICRO_BATCHES), strict=True)
    claim(text, 0, sum(a != b for a, b in pairs))


# %% [markdown]
# ## 5. On GPUs: what a rank idles, by CUDA events
#
# The same pipeline, with layers 8,192 wide in bfloat16. A rank's own work takes as long as when it
# computes alone; what a step takes longer, it idles. (`--figure` draws the grids of the slots.)


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


def check_gpus(device: torch.device) -> None:
    if device.type == "cpu" or WORLD_SIZE == 1 or not torch.cuda.is_bf16_supported(False):
        blocked("share that real stages idle, 1F1B and ZB-H1", needs="2 GPUs with bfloat16")
        return
    p = WORLD_SIZE
    m = 2 * p
    factory = {"device": device, "dtype": torch.bfloat16}
    stage = Stage(torch.randn(LAYERS, 8192, 8192, **factory).mul_(0.01).unbind())
    inputs = torch.randn(m * 2048, 8192, **factory).chunk(m)

    def alone() -> None:
        for k, x in enumerate(inputs):
            stage.backward_input(k, stage.forward(k, x))
            stage.backward_weights(k)

    def step(order_of: Callable) -> None:
        run_step(stage, order_of(RANK, p, m), inputs, lambda y, k: y)

    # 1/5 and 1/13 on two GPUs, and further apart on more
    for name, order_of, due in (
        ("1F1B", unsplit_1f1b, Fraction(p - 1, m + p - 1)),
        ("ZB-H1", zb_h1, Fraction(p - 1, 3 * m + p - 1)),
    ):
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
# 1. Four: one per layer, half of the backward pass.
# 2. Seven: the four of W, and three of I's once more, as all layers but the first hand a gradient
#    on. Such a W would take nearly as long as a whole backward pass.
# 3. Three instead of nine. With 24 slots of work that is 11% of the time instead of 27%.
# 4. Four, like every rank. Under 1F1B the last rank held one.
# 5. 32: x and g of four layers, for each of the four. Under 1F1B no rank keeps more than 23: on
#    rank 0 three micro-batches wait with the four inputs and the output, and a fourth is between I
#    and W. So equal numbers of micro-batches are not equal numbers of bytes.
#
# **Try.** Without delay each W stands in the way of an I for which another rank waits. Four claims
# fail: a rank idles six slots, the last one holds one micro-batch and eight tensors, and PyTorch's
# list is another. With F of two slots a rank idles (p-1) (2 + 1 - 1) = 6, and 12 under 1F1B. The
# three claims about slots fail, and no other.
#
# **Why not zero?** F0 is done on the last rank after p slots, and I0 takes p-1 more through the
# ranks behind rank 0, which until then has nothing but forwards to do. To fill these slots too it
# must run ahead by 2p-1 micro-batches and hold them all (ZB-H2, with twice the delay).
#
# **When to use it.** Where micro-batches are few, and the last ranks have memory to spare. Not
# where m is large compared with p: with m = 64 and p = 4 1F1B idles 4.5%, ZB-H1 1.5%. If
# activations are recomputed, I recomputes them, and what W needs stays until W: that takes the
# memory which recomputing was to save.
#
# **On GPUs** W is seldom as long as I. The products of attention's scores have no weights, so both
# of their gradients belong to I; for long sequences some holes come back. The paper's authors
# measure F, I and W, and let a solver order them.


# %%
def main() -> None:
    figure = {"metavar": "PATH", "help": "draw the grid of both schedules: .svg or .png"}
    options = command_line({"--figure": figure})
    launch()
    device = setup()
    groups["down"] = dist.new_group()
    groups["up"] = dist.new_group()
    groups["clocks"] = dist.new_group(backend="gloo")
    check_halves()
    runs = check_schedules(device)
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
