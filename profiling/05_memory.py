"""Memory: where it goes in a step, and the out-of-memory clinic
=============================================================

**Question.** A training step does not fit. What fills the memory, at which moment, and which cure
takes most of it away for the least time?

**Predict**, and write it down before you run. A GPT of P parameters, all in float32, is trained by
fused Adam under DistributedDataParallel on n ranks. One job has many tokens for its P (512 per
rank), the other few (64).

1. At the end of backward, how many bytes per parameter does a rank hold? Adam's moments are 8.
2. At which moment of the step is the most memory taken, in each of the two jobs: when backward
   begins, in the middle of it, or at its end? What takes the most then?
3. The job with many tokens accumulates over 4 micro-batches of a quarter each. Is 3/4 of the
   activations' memory saved, or more, or less? What is saved in the other job?
4. Every block is recomputed in backward. What is left of the activations of a block, per token? By
   how much do the FLOPs of a step grow? And does `autocast` to bfloat16 halve the activations?
5. `zero_grad(set_to_none=False)` keeps the gradients. `gradient_as_bucket_view=True` merges them
   with the buckets. How many bytes per parameter does either change at the peak of either job?
6. `fully_shard` on n ranks: how many bytes per parameter stay in each job? How many times as much
   is sent?
7. A caching allocator has 240 MiB. Three tensors of 5 MiB lie in it and leave holes of 75 MiB. Does
   it answer a request of 100 MiB? With `expandable_segments:True`? And if it has 60 MiB, holes of
   15 MiB, and is asked for 24 MiB?
8. "You tried to allocate 8,388,608 bytes", says the error. Is that the tensor that filled the
   memory?
9. Cures without a price first, then those that save most for a second: which cure stands first for
   each job, and does this order follow from formulas alone?

**Run.**

    torchrun --standalone --nproc-per-node=4 05_memory.py    # NCCL on 4 GPUs, else gloo
    python 05_memory.py                                      # the same, started for you
    python 05_memory.py --figure steps.png                   # and draw memory over a step
    python 05_memory.py --snapshot oom.pickle                # on GPUs: for pytorch.org/memory_viz

Not run on several GPUs.

**Try.** In `train` write `foreach=True` for `fused=True`: which claims fail, and why in one job
only? In `CURES` give the accumulation `views=True` as well: what does it save then?

**Before.** fsdp/05_fsdp_transformer.py: what a block keeps for backward, tensor by tensor.
parallelism/04_buckets_and_overlap.py: buckets.

**Next.** exercises/24_fit_the_budget; then profiling/06_stragglers.py.
"""

import argparse
import ctypes
import gc
import itertools
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import weakref
from collections import Counter
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: B sequences, T tokens in each, D model width, V different tokens, L blocks, H heads of K
# features. P is the number of parameters, n the number of ranks.


class Job(NamedTuple):
    """A GPT and a rank's batch."""

    L: int
    D: int
    B: int
    T: int
    V: int = 256
    heads: int = 4
    context: int = 64

    @property
    def P_block(self) -> int:
        return 12 * self.D**2 + 13 * self.D

    @property
    def P_root(self) -> int:
        """The embeddings, the last norm, the head."""
        return (2 * self.V + self.context + 2) * self.D

    @property
    def P(self) -> int:
        return self.L * self.P_block + self.P_root


JOBS = {"many tokens": Job(L=3, D=96, B=8, T=64), "few tokens": Job(L=3, D=192, B=4, T=16)}

# %% [markdown]
# ## 1. One step in one picture
#
# Memory goes up and down within a step. What is there all the time is easy to count; what comes and
# goes decides whether the step fits, for it must fit at its worst moment:
#
#     bytes
#       |                        ____  activations: made by forward, freed by backward
#       |                   ____/    \____
#       |              ____/      ________\____
#       |         ____/     _____/ gradients   \____________
#       |________/_________/_________________________________|_________   buckets, moments,
#       |____________________________________________________|_________   parameters
#        forward            ^ backward            its end ^    optimizer
#                           | backward begins
#
# Everything has a **category**, and a formula in float32, per parameter (P) or per token (t):
#
#     parameters        4 P     the model
#     moments           8 P     Adam's two, from its first step on
#     buckets           4 P     DDP's copy of the gradients, which it all-reduces
#     gradients         4 P     from backward to zero_grad
#     activations       t (L (64 D + 4 H + 16) + ...)      what forward keeps for backward
#     gathered shards           with sharding: units that are whole at the moment
#     work                      gradients of activations, and what lives for one operation
#
# The activations' line is that of fsdp/05_fsdp_transformer.py, section 3, in 4 bytes per element:
# 2 (32 D) + 4 H + 16. Nothing there depends on what the machine is; so the memory of a step can be
# predicted to the byte, if its moments are known.
#
# `predict` writes down the candidates for the worst moment, each as bytes by category, and takes
# the largest. When **backward begins**, all activations are there, and the loss has three arrays of
# 4 V bytes per token: log-probabilities and two gradients. **In each block** GeLU's backward has
# two arrays of 16 D, its input and the block's other activations. At the **end** all gradients are
# there and next to nothing else.


# %%
class Plan(NamedTuple):
    """How a step is run. The plain plan is DDP with its defaults."""

    pieces: int = 1  # micro-batches that a step accumulates
    recompute: bool = False  # the blocks, in backward
    autocast: bool = False  # to bfloat16
    zeros: bool = False  # zero_grad(set_to_none=False)
    views: bool = False  # gradient_as_bucket_view=True
    shard: bool = False  # fully_shard instead of DDP
    offload: bool = False  # activations, to a file here, to host memory on GPUs


def kept_by_block(job: Job, plan: Plan) -> int:
    """Return the bytes per token that a block keeps for backward."""
    if plan.offload:
        return 0
    if plan.recompute:
        return 4 * job.D
    if plan.autocast:  # residuals and statistics stay in float32
        return 36 * job.D + 4 * job.heads + 16
    return 64 * job.D + 4 * job.heads + 16


def predict(job: Job, plan: Plan, n: int) -> tuple[str, Counter]:
    """Return the worst moment of a step, and its bytes by category."""
    ranks = n if plan.shard else 1
    at_rest = Counter(parameters=4 * job.P / ranks, moments=8 * job.P / ranks)
    if not (plan.shard or plan.views):
        at_rest["buckets"] = 4 * job.P
    moments = {"backward begins": when_backward_begins(job, plan)}
    if not plan.autocast:  # it halves what a block has, so the worst moment is the first
        moments |= within_backward(job, plan, n)
    worst = max(moments, key=lambda moment: moments[moment].total())
    return worst, at_rest + moments[worst]


def kept_gradients(job: Job, plan: Plan) -> int:
    """Return the bytes of gradients that are there before backward makes any."""
    return 4 * job.P if plan.views or plan.zeros or plan.pieces > 1 else 0


def when_backward_begins(job: Job, plan: Plan) -> Counter:
    t = job.B * job.T // plan.pieces
    per_token = 4 * job.V  # log-probabilities
    if not plan.offload:
        last_norm = (2 if plan.autocast else 4) * job.D + 8
        per_token += job.L * kept_by_block(job, plan) + 4 * job.D + last_norm
    copies = 2 * (12 * job.L * job.D**2 + job.V * job.D) if plan.autocast else 0  # of weights
    return Counter(
        activations=t * per_token + copies,
        work=8 * job.V * t,
        gradients=kept_gradients(job, plan),
        gathered=4 * job.P_root if plan.shard else 0,
    )


# %% [markdown]
# Within backward, a block counts twice: at GeLU, where its activations are nearly all alive, and at
# the gradient of qkv's weight, when nearly all its gradients are. `fully_shard` then holds two more
# blocks, one that is being gathered and one whose gradients were just reduced.


# %%
def within_backward(job: Job, plan: Plan, n: int) -> dict[str, Counter]:
    """Return two moments of each block: GeLU's backward, and the gradient of qkv's weight."""
    D = job.D
    t = job.B * job.T // plan.pieces
    moments = {}
    for done in range(job.L):  # blocks whose backward pass is over
        below = (job.L - done - 1) * kept_by_block(job, plan)
        at_gelu = 48 * D + 4 * job.heads + 16
        at_qkv = 8 * D + 8
        if plan.offload:
            below = 0
            at_gelu = 16 * D
            at_qkv = 4 * D
        name = f"block {job.L - 1 - done}"
        gradients = 16 * D**2 + 4 * D  # of down
        moments[f"{name}, GeLU"] = Counter(activations=t * (below + at_gelu), work=t * 36 * D)
        moments[f"{name}, GeLU"] += gradients_at(job, plan, n, done, gradients, 16 * D**2)
        gradients = 4 * (job.P_block - 2 * D)  # all but the first norm's
        moments[f"{name}, qkv"] = Counter(activations=t * (below + at_qkv), work=t * 20 * D)
        moments[f"{name}, qkv"] += gradients_at(job, plan, n, done, gradients, 12 * D**2)
    embedding = 4 * job.V * D if kept_gradients(job, plan) else 0
    if not plan.shard:
        moments["end"] = Counter(work=t * 4 * D + embedding, gradients=4 * job.P)
    return moments


def gradients_at(job: Job, plan: Plan, n: int, done: int, mine: int, fresh: int) -> Counter:
    """Return what is there of gradients, buckets and gathered shards while a block is backward.

    `mine` bytes of its own gradients are there, of which `fresh` were made just now.
    """
    kept = kept_gradients(job, plan)
    head = 4 * (job.V + 2) * job.D
    block = 4 * job.P_block
    if plan.shard:
        neighbors = (done < job.L - 1) + (done > 0)  # one being gathered, one just reduced
        gathered = 4 * job.P_root + block
        whole = head + mine  # they wait for their reduce-scatter
        reduced = done * block / n
        return Counter(work=whole, gradients=reduced, gathered=gathered, buckets=neighbors * block)
    if kept:
        return Counter(gradients=kept, work=fresh)  # which is added, or copied, and gone
    return Counter(gradients=head + done * block + mine)


# %% [markdown]
# The step itself is the ordinary one. `line` is the recorder of section 6: it is told which tensors
# are parameters, gradients, moments, and finds the rest by itself.


# %%
def prepare(job: Job, plan: Plan, device: torch.device) -> nn.Module:
    torch.manual_seed(0)  # the same weights on every rank
    with device:
        model = GPT(job.L, job.D, job.context, job.V, job.heads)
    if plan.recompute:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block)
    if not plan.shard:
        return DistributedDataParallel(model, gradient_as_bucket_view=plan.views)
    mesh = init_device_mesh(device.type, (WORLD_SIZE,))
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh)
    return model


def train(
    job: Job, plan: Plan, device: torch.device, settled: bool = False, watch: object = None
) -> "Timeline":
    """Train for two steps, if `settled` three, the last within `watch`; return its record."""
    with Timeline() as line:
        generator = torch.Generator().manual_seed(RANK)
        x_BT = torch.randint(job.V, (job.B, job.T + 1), generator=generator).to(device)
        model = prepare(job, plan, device)
        line.mark("batch", [x_BT])
        line.mark("parameters", model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        if plan.shard:
            watch_gathers(model, line)
            line.patient = device.type == "cpu"
        with FlopCounterMode(display=False) as flops:  # it keeps tensors: not in the second step
            step(model, optimizer, x_BT, plan, line)
        if settled:
            step(model, optimizer, x_BT, plan, line)  # the second makes DDP's buckets anew
        if plan.recompute:
            gc.collect()  # the counter's references to what was recomputed
        line.start_step()
        with watch or nullcontext():
            step(model, optimizer, x_BT, plan, line)
        line.moment = "after"
        line.flops = flops.get_total_flops()
    return line


# %% [markdown]
# A step may have several micro-batches. DDP sends only after the last of them, in `no_sync` before.


# %%
def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x_BT: torch.Tensor,
    plan: Plan,
    line: "Timeline",
) -> None:
    pieces = x_BT.chunk(plan.pieces)
    for i, piece_BT in enumerate(pieces):
        with ExitStack() as stack:
            if i < len(pieces) - 1:
                stack.enter_context(model.no_sync())
            line.moment = "forward"
            with forward_context(model, x_BT.device, plan, line):
                loss = mean_loss(model, piece_BT) / len(pieces)
            line.moment = "backward"
            loss.backward()
        line.mark("gradients", [p.grad for p in model.parameters()])
    line.moment = "optimizer"
    optimizer.step()
    for state in optimizer.state.values():
        line.mark("moments", state.values())
    optimizer.zero_grad(set_to_none=not plan.zeros)


def forward_context(
    model: nn.Module, device: torch.device, plan: Plan, line: "Timeline"
) -> ExitStack:
    stack = ExitStack()
    if plan.autocast:
        stack.enter_context(torch.autocast(device.type, torch.bfloat16))
    if plan.offload:
        offload = Offload({p.untyped_storage()._cdata for p in model.parameters()}, line)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(offload.away, offload.back))
    return stack


def check_the_plain_step(lines: dict[str, "Timeline"], device: torch.device) -> None:
    for name, job in JOBS.items():
        line = lines[name]
        held = line.last("backward").total()
        claim(f"{name}: bytes per parameter, end", 20, held / job.P, atol=0.1, question=1)
        moment, expected = predict(job, Plan(), WORLD_SIZE)
        peak = line.peak()
        print0(f"{'':13}{name}: the peak is predicted for this moment: {moment}")
        for category, size in expected.items():
            slack = 256  # bytes: Adam's counts of steps, and other scalars
            if device.type == "cuda":
                slack = 0.02 * size  # attention's kernel saves other things there
            text = f"{name}: {category} at the peak, in kB"
            claim(text, size / 1e3, peak[category] / 1e3, atol=slack / 1e3, question=2)
        share = max(expected.values()) / expected.total()
        print0(f"{'':13}{name}: {max(peak, key=peak.get)} are the largest category")
        text = f"{name}: share of the largest category"
        claim(text, share, max(peak.values()) / peak.total(), atol=0.02 * share, question=2)


# %% [markdown]
# ## 2. The cures, what each saves, and its price
#
# | Cure | Takes away | Costs |
# |---|---|---|
# | k smaller micro-batches, accumulated | (1 - 1/k) of activations | k times as many kernels |
# | recomputation | all but 4 D per token of a block | a block's forward once more |
# | mixed precision | half of what matrix products save | bfloat16 copies of weights |
# | set_to_none=True (the default) | gradients, outside backward | nothing |
# | gradient_as_bucket_view=True | the second copy; the first lives always | nothing |
# | sharding | (n - 1)/n of states | half as many bytes again on the network |
# | offloading | activations (or states) | their way over PCIe, to and fro |
#
# A cure helps if, and as far as, it takes something away **at the peak**. What it takes away at any
# other moment saves nothing. So no cure has *a* saving: it has one for each job, and the formula
# tells it beforehand. The new peak may also be at another moment, which is why a saving cannot be
# read off the category that the cure empties.


# %%
CURES = {
    "many tokens": {
        "4 micro-batches": Plan(pieces=4),
        "recompute": Plan(recompute=True),
        "autocast": Plan(autocast=True),
        "set_to_none=False": Plan(zeros=True),
        "bucket views": Plan(views=True),
        "shard": Plan(shard=True),
        "offload": Plan(offload=True),
    },
    "few tokens": {
        "4 micro-batches": Plan(pieces=4),
        "recompute": Plan(recompute=True),
        "set_to_none=False": Plan(zeros=True),
        "bucket views": Plan(views=True),
        "shard": Plan(shard=True),
    },
}


def claim_for(cure: str) -> partial:
    """Return `claim`, with the number of the question that is about this cure."""
    questions = {
        "4 micro-batches": partial(claim, question=3),
        "recompute": partial(claim, question=4),
        "autocast": partial(claim, question=4),
        "set_to_none=False": partial(claim, question=5),
        "bucket views": partial(claim, question=5),
        "shard": partial(claim, question=6),
    }
    return questions.get(cure, partial(claim))


# %% [markdown]
# The price is counted, too: FLOPs, bytes on the network, and bytes moved out and back. FLOPs
# are those of fsdp/05_fsdp_transformer.py, section 4.


# %%
class Price(NamedTuple):
    """What a step costs besides memory."""

    flops: float
    sent: float  # bytes, times (n - 1)/n, over a ring
    moved: float = 0.0  # bytes to host memory, or here to a file, and back


def predict_price(job: Job, plan: Plan) -> Price:
    """Return the FLOPs, and the bytes on the network and to the host, of a rank's step."""
    tokens = job.B * job.T
    D = job.D
    products = 24 * job.L * D**2
    attention = 4 * job.L * D * job.T
    flops = 3 * (products + attention + 2 * D * job.V) + attention / 2
    if plan.recompute:
        flops += products + attention - 8 * job.L * D**2  # the last product is never needed again
    sent = 8 * job.P  # all-reduce: a reduce-scatter and an all-gather
    if plan.shard:
        sent = 4 * (job.P + job.P - job.P_root) + 4 * job.P  # two all-gathers, a reduce-scatter
    saved = job.L * (68 * D + 4 * job.heads + 16) + 8 * D + 8 + 8 * job.V
    return Price(flops * tokens, sent, 2 * saved * tokens if plan.offload else 0)


def check_cures(lines: dict, device: torch.device) -> None:
    for name, cures in CURES.items():
        job = JOBS[name]
        _, plain = predict(job, Plan(), WORLD_SIZE)
        price = predict_price(job, Plan())
        held = lines[name].peak().total()
        for cure, plan in cures.items():
            line = lines[name, cure]
            _, cured = predict(job, plan, WORLD_SIZE)
            expected = (plain.total() - cured.total()) / job.P
            saved = (held - line.peak().total()) / job.P
            slack = (0.05 if device.type == "cuda" else 0.01) * cured.total() / job.P
            text = f"{name}, {cure}: saves, per P"
            claim_for(cure)(text, expected, saved, atol=slack)
            if name == "many tokens":
                check_price(cure, price, predict_price(job, plan), line)


def check_price(cure: str, plain: Price, expected: Price, line: "Timeline") -> None:
    """Claim the price that the cure is known for; the table prints all."""
    if cure == "recompute":
        ran = line.flops / plain.flops
        text = f"{cure}: FLOPs / the plain step's"
        claim_for(cure)(text, expected.flops / plain.flops, ran, atol=1e-6)
    if cure in ("shard", "4 micro-batches"):
        sent = line.sent / plain.sent
        text = f"{cure}: bytes sent / the plain step's"
        claim_for(cure)(text, expected.sent / plain.sent, sent, atol=0.01)
    if cure == "offload":
        claim(f"{cure}: MB moved", expected.moved / 1e6, line.moved / 1e6, atol=0.001)


# %% [markdown]
# ## 3. Which to try first
#
# Divide the price by the saving. FLOPs, bytes on NVLink and bytes over PCIe become comparable as
# seconds on some machine; here it is an H100 by its datasheet, in float32 as the job. Cures without
# a price come first, the largest saving before the others; then those that buy most bytes for a
# second; cures that save nothing at this job's peak come last. Kernels that are too small to fill a
# GPU are not in here: k micro-batches are free only while each still fills it.


# %%
FLOPS, NVLINK, PCIE = 67e12, 450e9, 63e9  # per second: float32 without TF32; bytes, one way


def seconds(price: Price, plain: Price) -> float:
    extra = max(0, price.flops - plain.flops) / FLOPS
    return extra + max(0, price.sent - plain.sent) / NVLINK + price.moved / PCIE


def order(rows: dict[str, tuple[float, float]]) -> list[str]:
    """Return the cures, first to try first, from (bytes saved, seconds) of each."""
    useful = {name: row for name, row in rows.items() if row[0] > 0}
    first = sorted(useful, key=lambda name: (useful[name][1] / useful[name][0], -useful[name][0]))
    return first + sorted(set(rows) - set(useful))


def check_order(lines: dict) -> None:
    for name, cures in CURES.items():
        job = JOBS[name]
        plain = predict_price(job, Plan())
        predicted = {}
        counted = {}
        _, at_peak = predict(job, Plan(), WORLD_SIZE)
        held = lines[name].peak().total()
        base = Price(lines[name].flops, lines[name].sent)
        for cure, plan in cures.items():
            line = lines[name, cure]
            _, cured = predict(job, plan, WORLD_SIZE)
            saved = at_peak.total() - cured.total()
            predicted[cure] = (whole(saved, job), seconds(predict_price(job, plan), plain))
            ran = Price(line.flops, line.sent, line.moved)
            counted[cure] = (whole(held - line.peak().total(), job), seconds(ran, base))
        print_table(name, predicted, counted, lines)
        pairs = zip(order(predicted), order(counted), strict=True)
        wrong = sum(a != b for a, b in pairs)
        claim(f"{name}: places in the order, wrong", 0, wrong, question=9)


def whole(saved: float, job: Job) -> float:
    """Return a saving, or nothing if it is below 2% of the states: then it is no cure."""
    return saved if saved > 0.02 * 16 * job.P else 0


def print_table(name: str, predicted: dict, counted: dict, lines: dict) -> None:
    head = f"{'saves, predicted':>16} {'counted, MB':>12} {'FLOPs':>7} {'sent':>6} {'kernels':>8}"
    print0(f"\n{'':13}{name + ', first to try first':28}{head}")
    plain = lines[name]
    for cure in order(counted):
        line = lines[name, cure]
        saved = f"{predicted[cure][0] / 1e6:16.2f} {counted[cure][0] / 1e6:12.2f}"
        ratios = f"{line.flops / plain.flops:7.2f} {line.sent / plain.sent:6.2f}"
        print0(f"{'':13}{cure:28}{saved} {ratios} {line.kernels / plain.kernels:8.2f}")
    print0()


# %% [markdown]
# The table as a chart. Start at the top whenever the words "out of memory" appear:
#
#     reserved - allocated larger than the request? ---yes---> expandable_segments:True (section 4)
#       | no
#     set_to_none, gradient_as_bucket_view, bfloat16 as they should be? ---no---> free: do it first
#       | yes
#     what is largest at the peak? (snapshot, or `predict`)
#       |                                        |
#     activations                              parameters, gradients, moments, buckets
#       1. smaller micro-batches, accumulated    1. bucket views
#       2. recompute (selective, then full)      2. shard: moments, gradients, parameters
#       3. split them: tensor, sequence or       3. offload the states
#          context parallelism; offload
#       |                                        |
#       '----------- fits? If not: the peak has moved. Ask again what is largest. ---------'

# %% [markdown]
# ## 4. Fragmentation: free, and yet refused
#
# cudaMalloc is slow and cudaFree waits for the GPU, so torch calls them rarely and hands out parts
# of what it has. A request of up to 1 MiB is cut from a **segment** of 2 MiB, one of less than 10
# MiB from a segment of 20 MiB, larger ones have segments of their own. A block that is freed can
# serve another request, if that one is not larger; a segment goes back only when all of it is free.
# So a few small tensors that stay can hold many segments:
#
#     three segments of 80 MiB     [k...............]  k: kept, 5 MiB; . : freed
#     225 MiB are free, no hole    [k...............]  is 100 MiB long; a segment of 100 MiB
#     is longer than 75 MiB        [k...............]  more does not fit either
#
# With **expandable segments** there is one range of addresses for small requests and one for large
# ones. Memory is mapped to them by pages: of 2 MiB for requests of up to 1 MiB, of **20 MiB** for
# all others. Pages that hold nothing are unmapped, and mapped again at the end, as one long block.
# So it is the holes that count: one that contains no whole page gives nothing back.


# %%
MIB = 2**20
UNMAPPED = "(unmapped)"  # a block of no bytes, where pages have been


def page_for(size: int) -> int:
    return 2 * MIB if size <= MIB else 20 * MIB


def segment_for(size: int) -> int:
    return page_for(size) if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB


class CachingAllocator:
    """A small model of torch's CUDA allocator: best fit, split, merge, release what is all free."""

    def __init__(self, capacity: int, expandable: bool = False) -> None:
        self.capacity = capacity
        self.expandable = expandable
        segments = [[]] if expandable else []  # of blocks [size, name]; None: it is free
        self.pools = {page: list(map(list, segments)) for page in (2 * MIB, 20 * MIB)}

    @property
    def reserved(self) -> int:
        segments = itertools.chain.from_iterable(self.pools.values())
        return sum(size for size, _ in itertools.chain.from_iterable(segments))

    def malloc(self, name: str, size: int) -> bool:
        """Return whether the request was answered."""
        return self.take(name, size) or self.grow(name, size)

    def take(self, name: str, size: int) -> bool:
        """Cut the request from the smallest free block that is large enough."""
        found = []
        for blocks in self.pools[page_for(size)]:
            found += [(block[0], blocks, block) for block in blocks if not block[1]]
        found = [entry for entry in found if entry[0] >= size]
        if not found:
            return False
        rest, blocks, block = min(found, key=lambda entry: entry[0])
        block[:] = [size, name]
        if rest > size:
            blocks.insert(blocks.index(block) + 1, [rest - size, None])
        return True

    def grow(self, name: str, size: int) -> bool:
        length = segment_for(size)
        if self.reserved + length > self.capacity:
            self.release()
        if self.reserved + length > self.capacity:
            return False
        segments = self.pools[page_for(size)]
        if self.expandable:
            map_pages(segments[0], size)
        else:
            segments.append([[length, None]])
        return self.take(name, size)

    def release(self) -> None:
        """Give back segments that are all free, or of expandable ones the pages that are."""
        for page, segments in self.pools.items():
            if self.expandable:
                segments[0] = without_free_pages(segments[0], page)
            else:
                segments[:] = [blocks for blocks in segments if any(name for _, name in blocks)]

    def free(self, name: str) -> None:
        for blocks in itertools.chain(*self.pools.values()):
            for block in blocks:
                block[1] = None if block[1] == name else block[1]
            for i in range(len(blocks) - 1, 0, -1):
                if not blocks[i][1] and not blocks[i - 1][1]:
                    blocks[i - 1][0] += blocks.pop(i)[0]


# %% [markdown]
# Pages are mapped and unmapped whole. A free block at the end of the range needs only the rest.


# %%
def map_pages(blocks: list[list], size: int) -> None:
    """Make the free block at the end large enough for a request."""
    if not blocks or blocks[-1][1]:
        blocks.append([0, None])
    page = page_for(size)
    blocks[-1][0] += -(-(size - blocks[-1][0]) // page) * page


def without_free_pages(blocks: list[list], page: int) -> list[list]:
    """The blocks without the pages in which nothing lies."""
    left = []
    start = 0
    for size, name in blocks:
        first = -(-start // page) * page  # where the block's whole pages begin and end
        last = (start + size) // page * page
        if name or first >= last:
            left.append([size, name])
        else:
            left += [[first - start, None], [0, UNMAPPED], [start + size - last, None]]
        start += size
    return [block for block in left if block[0] or block[1]]


# %% [markdown]
# The same requests in four cases. Three tensors come and go, and leave the memory behind to be cut.
# Then, three times, a tensor of 5 MiB stays and one that fills the rest goes. At last a tensor is
# asked for that is longer than any hole, and takes about half of what is free.
#
# Without a GPU the model above answers. That is a simulation, whose page sizes are torch's by its
# source; on a GPU a fresh process asks CUDA's own allocator.

# %%
ASKED = {20: 24, 80: 100}  # MiB: the tensors that come and go, and what is asked for at last


class CudaAllocator:
    """CUDA's own, with as much memory as the model of it."""

    def __init__(self, capacity: int) -> None:
        total = torch.cuda.get_device_properties("cuda").total_memory
        # torch computes fraction * total and drops what is below a byte: a MiB of room for that
        torch.cuda.set_per_process_memory_fraction((capacity + MIB) / total)
        self.tensors: dict[str, torch.Tensor] = {}

    def malloc(self, name: str, size: int) -> bool:
        try:
            self.tensors[name] = torch.empty(size, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            return False
        return True

    def free(self, name: str) -> None:
        del self.tensors[name]


def answers(allocator: "CachingAllocator | CudaAllocator", whole: int) -> bool:
    """Whether it answers the last request, after tensors of so many MiB have come and gone."""
    for i in range(3):
        assert allocator.malloc(f"whole {i}", whole * MIB)
    for i in range(3):
        allocator.free(f"whole {i}")
    for i in range(3):
        assert allocator.malloc(f"kept {i}", 5 * MIB)
        assert allocator.malloc(f"freed {i}", (whole - 5) * MIB)
    for i in range(3):
        allocator.free(f"freed {i}")
    return allocator.malloc("asked", ASKED[whole] * MIB)


def check_fragmentation(device: torch.device) -> None:
    for expandable in (False, True):
        if device.type == "cuda":
            found = from_rank_0(ask_cuda(expandable) if RANK == 0 else {})
        else:
            model = partial(CachingAllocator, expandable=expandable)
            found = {whole: answers(model(3 * whole * MIB), whole) for whole in ASKED}
        name = "expandable" if expandable else "segments"
        kind = "simulated" if device.type == "cpu" else "measured"
        for whole, answered in found.items():
            text = f"{name}: holes of {whole - 5} MiB, {ASKED[whole]} MiB answered"
            expected = expandable and whole - 5 >= 2 * 20  # it contains a page, wherever that is
            claim(text, expected, answered, question=7, kind=kind)
    if device.type == "cpu":
        blocked("the same by CUDA's caching allocator", needs="1 GPU")


# %% [markdown]
# ## 5. Out of memory: provoke it, and read what it says
#
# Here it happens for real. A child process limits its own address space (`RLIMIT_AS`) to what it
# has and 208 MiB more, and runs a GPT of two blocks forward on 32,768 tokens. A block keeps 134 MiB
# for backward, so that it gets stuck in the second one.
#
# The message says how much was asked for, not who has the rest. The traceback's line says what the
# bytes were for, which tells their category; Python marks the expression within the line. Who has
# the rest is a question to a list of what is alive: here the recorder's, on GPUs the snapshot's.
# Where the process had memory that is no tensor's (libraries' work space, the allocator's rest), it
# is missing from both.

# %%
OOM_JOB = Job(L=2, D=64, B=512, T=64)
ROOM = 208 * MIB
ASKS = {  # what an expression of a block asks for, in bytes per token
    "self.up(": (16 * OOM_JOB.D,),
    "F.gelu(": (16 * OOM_JOB.D,),
    "self.qkv(": (12 * OOM_JOB.D,),
    "F.scaled": (4 * OOM_JOB.D, 4 * OOM_JOB.heads),
    "self.norm": (4 * OOM_JOB.D, 4),
    "": (4 * OOM_JOB.D,),  # all others: out, down, the residual additions
}


def run_out_of_memory(room: int) -> None:
    """Be the child: compute with so many bytes of address space more; print what went wrong."""
    import resource

    torch.set_num_threads(1)
    job = OOM_JOB
    model = GPT(job.L, job.D, job.context, job.V, job.heads)
    x_BT = torch.zeros(job.B, job.T, dtype=torch.long)
    with torch.no_grad():
        model(x_BT)  # libraries are loaded, and have their own memory
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + room
    without = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, without[1]))
    told = {}
    with Timeline() as line:
        line.moment = "forward"
        try:
            model(x_BT)
        except RuntimeError as error:
            resource.setrlimit(resource.RLIMIT_AS, without)  # reports take memory, too
            told = {"message": str(error), "at": failing_expression(error)}
            told["alive"] = line.history()[-1][1].total()
    print(json.dumps(told))


def failing_expression(error: Exception) -> str:
    """Return the innermost expression of this file that the error came from."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == __file__]
    last = [frame for frame in frames if frame.name in ("forward", "attention")][-1]
    line = Path(__file__).read_text().splitlines()[last.lineno - 1]
    return line[last.colno : last.end_colno]


def check_out_of_memory(device: torch.device, path: str | None) -> None:
    if device.type == "cuda":
        check_out_of_memory_on_gpu(device, path)
        return
    if sys.platform != "linux":
        blocked("a real out-of-memory error", needs="Linux, where RLIMIT_AS is kept")
        return
    told = {}
    if RANK == 0:
        environment = dict(os.environ, OMP_NUM_THREADS="1", MALLOC_ARENA_MAX="1")
        environment["MALLOC_MMAP_THRESHOLD_"] = "65536"  # free at once: then arithmetic is exact
        command = [sys.executable, __file__, "--room", str(ROOM)]
        child = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        told = json.loads(child.stdout)
    told = from_rank_0(told)
    print0(f"\n{'':13}{told['message'].partition('DefaultCPUAllocator: ')[2][:80]}")
    print0(f"{'':13}with {told['alive'] / MIB:.0f} MiB alive, at {told['at']:.60}")
    asked = int(re.search(r"tried to allocate (\d+) bytes", told["message"])[1])
    tokens = OOM_JOB.B * OOM_JOB.T
    due = next(sizes for start, sizes in ASKS.items() if told["at"].startswith(start))
    due = min((size * tokens for size in due), key=lambda size: abs(size - asked))
    claim("asked for by this expression: bytes", due, asked, question=8)
    claim("alive / asked for, at least", 4, told["alive"] / asked, ">=", question=8)
    share = (told["alive"] + asked) / ROOM
    claim("share of the limit that is known, at least", 0.75, share, ">=")
    claim("share of the limit that is known, at most", 1, told["alive"] / ROOM, "<=")


# %% [markdown]
# ## 6. How it is measured
#
# `Timeline` works as CUDA's memory snapshot does: it notes every storage that an operation makes,
# and every one that has gone or changed its size since the last operation. Categories are given
# later, when it is known what a storage was for; then the events are replayed. What a collective is
# handed is a bucket, unless it is known as something else. What an operation makes while gradients
# are enabled is an activation, also in backward (that is recomputation); the rest is work.
#
# What is made and gone within one operation is not seen; the profiler sees it, below.


# %%
class Recorder(TorchDispatchMode):
    """Records memory made and freed, by category; counts kernels and bytes on the network."""

    def __init__(self) -> None:
        super().__init__()
        self.moment = "before"
        self.alive: dict[int, list] = {}  # storage number: [weak reference, its bytes]
        self.number: dict[int, int] = {}  # of the latest storage at an address
        self.category: list[str] = []  # by storage number
        self.events: list[tuple[str, int, int]] = []  # (moment, storage number, bytes more)
        self.patient = False  # gloo's threads let go of a tensor a moment after `wait` has returned
        self.start_step()

    def start_step(self) -> None:
        """What is counted is counted from here."""
        self.start = len(self.events)
        self.kernels = self.sent = self.moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its local tensors come by here in a moment
        known = {storage._cdata for storage in storages_of((args, kwargs))}
        if self.patient and func.namespace in ("c10d", "fsdp"):
            time.sleep(0.005)
        out = func(*args, **(kwargs or {}))
        self.kernels += 1
        category = "activations" if torch.is_grad_enabled() else "work"
        for storage in storages_of(out):
            if storage._cdata not in known:
                self.note(storage, category)
        if func.namespace.startswith("c10d"):
            self.note_collective(str(func), args)
        self.note_sizes()
        return out

    def note(self, storage: torch.UntypedStorage, category: str) -> int:
        """Return the number of a storage, a new one if it was not known."""
        number = self.number.get(storage._cdata)
        if number in self.alive and self.alive[number][0]() is storage:
            return number
        number = len(self.category)
        self.number[storage._cdata] = number
        self.category.append(category)
        self.alive[number] = [weakref.ref(storage, partial(self.freed, number)), storage.nbytes()]
        self.events.append((self.moment, number, storage.nbytes()))
        return number

    def freed(self, number: int, _: weakref.ref) -> None:
        self.events.append((self.moment, number, -self.alive.pop(number)[1]))

    def note_sizes(self) -> None:
        """FSDP empties and refills the storages of whole parameters: note their sizes."""
        for number, entry in list(self.alive.items()):  # another thread may free one meanwhile
            if self.category[number] == "gathered":
                size = entry[0]().nbytes()
                if size != entry[1]:
                    self.events.append((self.moment, number, size - entry[1]))
                    entry[1] = size

    def note_collective(self, name: str, args: tuple) -> None:
        sizes = [0]
        for argument in args:
            storages = storages_of(argument)
            sizes.append(sum(storage.nbytes() for storage in storages))
            for storage in storages:
                number = self.note(storage, "work")
                if self.category[number] not in ("parameters", "gathered"):
                    self.category[number] = "buckets"
        if "reduce" in name or "gather" in name:
            self.sent += max(sizes) * (2 if "allreduce" in name else 1)

    def mark(self, category: str, tensors: object) -> None:
        """Say what these tensors are."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for storage in storages_of(local):
                self.category[self.note(storage, category)] = category
        self.note_sizes()


# %% [markdown]
# The record is read by replaying it, with the categories as they are known by then.


# %%
class Timeline(Recorder):
    """A record, and what it tells of one step."""

    def history(self) -> list[tuple[str, Counter]]:
        """Replay: return (moment, bytes by category) at the start and after each event."""
        now = Counter()
        history = []
        for i, (moment, number, more) in enumerate(self.events):
            if moment == "after":
                break
            if i == self.start:
                history.append(("start", now.copy()))
            now[self.category[number]] += more
            if i >= self.start:
                history.append((moment, now.copy()))
        for _, entry in history:
            del entry["batch"]
        return history

    def peak(self) -> Counter:
        """Return the bytes by category when they were most."""
        return max((now for _, now in self.history()), key=Counter.total)

    def last(self, moment: str) -> Counter:
        """Return the bytes by category at the end of a moment."""
        return [now for name, now in self.history() if name == moment][-1]


def storages_of(tree: object) -> list[torch.UntypedStorage]:
    """Return the storages of all tensors in a nested structure that are not sharded."""
    found = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor):
            found.append(leaf.untyped_storage())
    return found


def watch_gathers(model: nn.Module, line: Timeline) -> None:
    """Have the recorder know each unit's whole parameters, from the first time they are there."""

    def note(unit: nn.Module, *_: object) -> None:
        line.mark("gathered", [p for p in unit.parameters() if not isinstance(p, DTensor)])

    for unit in (*model.blocks, model):
        unit.register_forward_pre_hook(note)


class NoRecord:
    """Stands for a recorder where nothing is to be recorded."""

    moment = ""
    moved = 0

    def mark(self, category: str, tensors: object) -> None:
        pass


# %% [markdown]
# torch's profiler hears of every byte from the allocator itself: an oracle that knows nothing of
# categories, and of nothing that was there before it began.


# %%
def check_against_the_allocator(device: torch.device) -> None:
    """Compare the recorder's peak, above what was there, with the allocator's own."""
    job = JOBS["many tokens"]
    if device.type == "cuda":
        watch = AllocatorPeak()
        line = train(job, Plan(), device, settled=True, watch=watch)
        theirs = watch.peak
    else:
        watch = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        line = train(job, Plan(), device, settled=True, watch=watch)
        events = [e for e in watch.profiler.kineto_results.events() if e.name() == "[memory]"]
        now = theirs = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            now += event.nbytes()
            theirs = max(theirs, now)
    history = line.history()
    ours = line.peak().total() - history[0][1].total()
    claim(
        "peak above the start, in MB: allocator's", theirs / 1e6, ours / 1e6, atol=0.01 * ours / 1e6
    )


class AllocatorPeak:
    """Around a step: the most that CUDA's allocator handed out, above what it had."""

    def __enter__(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated()

    def __exit__(self, *_: object) -> None:
        self.peak = torch.cuda.max_memory_allocated() - self.before


# %% [markdown]
# Offloading here goes to a file, for want of another memory, by the same hooks of autograd that
# `torch.autograd.graph.save_on_cpu` uses on GPUs. Parameters stay where they are. A tensor that two
# operations save goes twice, and comes back as two.


# %%
class Offload:
    """Hooks for saved tensors: away when forward saves them, back when backward asks."""

    def __init__(self, parameters: set[int], line: "Timeline | NoRecord") -> None:
        self.parameters = parameters
        self.line = line
        self.folder = tempfile.TemporaryDirectory()  # removed with the last tensor's way back
        self.count = 0

    def away(self, x: torch.Tensor) -> object:
        if x.untyped_storage()._cdata in self.parameters or not x.is_floating_point():
            return x
        self.line.moved += x.nbytes
        if x.device.type == "cuda":
            there = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            return there.copy_(x, non_blocking=True), x.device
        file = Path(self.folder.name, str(self.count))
        self.count += 1
        x.detach().numpy().tofile(file)
        return file, x.shape

    def back(self, saved: object) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        there, where = saved
        if isinstance(there, torch.Tensor):
            self.line.moved += there.nbytes
            return there.to(where, non_blocking=True)
        x = torch.empty(where)
        x.numpy()[...] = np.fromfile(there, dtype=np.float32).reshape(where)
        self.line.moved += x.nbytes
        return x


def mean_loss(model: nn.Module, x_BT: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of predicting each byte from those before it."""
    logits_BTV = model(x_BT[:, :-1])
    return F.cross_entropy(logits_BTV.flatten(0, 1), x_BT[:, 1:].flatten())


def from_rank_0(value: object) -> object:
    """Return rank 0's `value` on every rank."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


# %% [markdown]
# The GPT of fsdp/01_fsdp_basics.py, to the letter.


# %%
class Block(nn.Module):
    """A pre-norm transformer block: (B, T, D) -> (B, T, D)."""

    def __init__(self, D: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)
        self.norm2 = nn.LayerNorm(D)
        self.up = nn.Linear(D, 4 * D)
        self.down = nn.Linear(4 * D, D)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
        return x_BTD + self.down(F.gelu(self.up(self.norm2(x_BTD))))

    def attention(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """H heads of K features each; a token sees itself and those before it."""
        qkv_BT3HK = self.qkv(x_BTD).unflatten(-1, (3, self.heads, -1))
        q_BHTK, k_BHTK, v_BHTK = qkv_BT3HK.permute(2, 0, 3, 1, 4)
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        return self.out(y_BHTK.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """A GPT: L blocks, D wide, at most T tokens of context, V different tokens; here bytes."""

    def __init__(self, L: int = 4, D: int = 64, T: int = 64, V: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(V, D)
        self.position = nn.Embedding(T, D)
        self.blocks = nn.ModuleList(Block(D, heads) for _ in range(L))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, x_BT: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, T, V) of the token after each of `x_BT`."""
        h_BTD = self.token(x_BT) + self.position.weight[: x_BT.shape[1]]
        for block in self.blocks:
            h_BTD = block(h_BTD)
        return self.head(self.norm(h_BTD))


# %% [markdown]
# `--figure` draws memory over the step, category by category, for the plain plan and some cures.

# %%
COLORS = {"parameters": "0.55", "moments": "0.75", "buckets": "C4", "gradients": "C3"}
COLORS |= {"gathered": "C2", "activations": "C0", "work": "C1"}
DRAWN = {
    "many tokens": (None, "4 micro-batches", "recompute", "autocast", "shard"),
    "few tokens": (None, "4 micro-batches", "recompute", "bucket views", "shard"),
}


def megabytes(history: list, category: str) -> list[float]:
    return [now[category] / 1e6 for _, now in history]


def draw(lines: dict, path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure((13, 6), layout="constrained")
    all_axes = figure.subplots(2, 5, sharey="row")
    for row, (name, cures) in zip(all_axes, DRAWN.items(), strict=True):
        plain = lines[name].peak().total() / 1e6
        for axes, cure in zip(row, cures, strict=True):
            if cure and (name, cure) not in lines:
                continue  # one rank shards nothing
            line = lines[name, cure] if cure else lines[name]
            history = line.history()
            heights = [megabytes(history, category) for category in COLORS]
            axes.stackplot(range(len(history)), *heights, colors=COLORS.values(), labels=COLORS)
            axes.axhline(plain, color="k", linewidth=0.7, linestyle=":")
            axes.set_title(f"{name}: {cure or 'plain'}", fontsize=9)
            mark_phases(axes, [moment for moment, _ in history[1:]])
        row[0].set_ylabel("MB on rank 0")
    axes = all_axes[0][0]
    figure.suptitle("With many tokens activations fill the memory, with few the parameters' state")
    words = "one step, event by event: F forward, B backward, O optimizer"
    figure.supxlabel(f"{words}; dotted: the plain plan's peak", fontsize=9)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper")
    figure.savefig(path, dpi=120)


def mark_phases(axes: object, moments: list[str]) -> None:
    """Write below the axis where forward, backward and optimizer run, with a line between them."""
    begin = 0
    places = {}
    for moment, events in itertools.groupby(moments):
        end = begin + len(list(events))
        places[(begin + end) / 2] = moment[0].upper()
        axes.axvline(end, color="k", linewidth=0.3)
        begin = end
    axes.set_xticks(list(places), places.values(), fontsize=8)
    axes.tick_params(axis="x", length=0)


# %% [markdown]
# ## 7. On GPUs: a real size, the allocator's figures, milliseconds, and a snapshot
#
# The formulas meet CUDA's allocator, which rounds, caches and fragments. Printed with the peak is
# what it has **reserved** beyond it: what `nvidia-smi` shows and no tensor uses.


# %%
def compare_on_gpus(device: torch.device) -> None:
    if device.type == "cpu":
        blocked("peak, ms and reserved bytes of each cure", needs="1 GPU")
        return
    job = Job(L=12, D=768, B=8, T=1024, V=50_304, heads=12, context=1024)
    total = torch.cuda.get_device_properties(device).total_memory
    head = f"{'peak GB':>8} {'predicted':>9} {'reserved':>9} {'ms':>8}"
    print0(f"{'':13}{'124 million parameters':22}{head}")
    for name, plan in {"plain": Plan(), **CURES["many tokens"]}.items():
        expected = predict(job, plan, WORLD_SIZE)[1].total()
        if expected > 0.9 * total:
            blocked(f"{name}: a step", needs=f"{expected / 1e9:.0f} GB per GPU")
            continue
        gc.collect()  # of the model before
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        peak, reserved, ms = measure_on_gpu(job, plan, device)
        peak -= before
        row = f"{peak / 1e9:8.2f} {expected / 1e9:9.2f} {reserved / 1e9:9.2f} {ms:8.1f}"
        print0(f"{'':13}{name:22}{row}")
        claim(f"{name}: peak memory / predicted", 1, peak / expected, atol=0.15)


def measure_on_gpu(job: Job, plan: Plan, device: torch.device) -> tuple[int, int, float]:
    """Return the most bytes allocated and reserved, and the milliseconds of a step."""
    x_BT = torch.randint(job.V, (job.B, job.T + 1), device=device)
    model = prepare(job, plan, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for _ in range(2):
        step(model, optimizer, x_BT, plan, NoRecord())
    torch.cuda.reset_peak_memory_stats()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(3):
        step(model, optimizer, x_BT, plan, NoRecord())
    end.record()
    end.synchronize()
    peak = torch.cuda.max_memory_allocated()
    return peak, torch.cuda.max_memory_reserved(), start.elapsed_time(end) / 3


def ask_cuda(expandable: bool) -> dict[int, bool]:
    """What CUDA's allocator answers, in a process that has nothing else in its memory."""
    environment = dict(os.environ, PYTORCH_ALLOC_CONF=f"expandable_segments:{expandable}")
    environment.pop("PYTORCH_CUDA_ALLOC_CONF", None)  # the older name, which still counts
    command = [sys.executable, __file__, "--fragments"]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return {int(whole): answered for whole, answered in json.loads(child.stdout).items()}


def fragment() -> None:
    """Be the child: ask, and print what was answered."""
    found = {}
    for whole in ASKED:
        found[whole] = answers(CudaAllocator(3 * whole * MIB), whole)
        torch.cuda.empty_cache()
    print(json.dumps(found))


# %% [markdown]
# A **snapshot** holds every block of the allocator, with the stack that asked for it.


# %%
def check_out_of_memory_on_gpu(device: torch.device, path: str | None) -> None:
    """Run out of a limit that torch keeps, and ask the snapshot who has the memory."""
    job = OOM_JOB
    with device:
        model = GPT(job.L, job.D, job.context, job.V, job.heads)
        x_BT = torch.zeros(job.B, job.T, dtype=torch.long)
    gc.collect()  # of the models before: what they leave half free would be room, too
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.memory._record_memory_history()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + ROOM) / total)
    message = at = ""
    by_line = Counter()
    try:
        model(x_BT)
    except torch.OutOfMemoryError as error:
        message = str(error)
        at = failing_expression(error)
        by_line = bytes_by_line(torch.cuda.memory._snapshot())
        if path and RANK == 0:
            torch.cuda.memory._dump_snapshot(path)
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.memory._record_memory_history(enabled=None)
    print0(f"{'':13}{message[:80]}\n{'':13}at {at}; alive, by the line that made it:")
    for line, size in by_line.most_common(5):
        print0(f"{'':13}{size / 1e6:8.1f} MB   {line[:70]}")
    asked = float(re.search(r"Tried to allocate ([\d.]+) MiB", message)[1]) * MIB
    claim("alive / asked for, at least", 4, by_line.total() / asked, ">=", question=8)


def bytes_by_line(snapshot: dict) -> Counter:
    """Return the bytes of the snapshot's living blocks, by the line of this file that made them."""
    found = Counter()
    source = Path(__file__).read_text().splitlines()
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                frames = [f for f in block.get("frames", []) if f["filename"] == __file__]
                line = source[frames[0]["line"] - 1].strip() if frames else "(elsewhere)"
                found[line] += block["size"]
    return found


# %% [markdown]
# ## What you should have seen
#
# 1. 20: parameters, gradients and buckets 4 each, moments 8. The often quoted 16 leaves out DDP's
#    buckets, which are a second copy of the gradients.
# 2. With many tokens when backward begins, and activations are 59% of it. With few tokens at the
#    end, in the last block whose backward pass is run, and the moments are the largest, 40%. Every
#    category at the peak is its formula's to the byte, but for a few scalars.
# 3. Less. 3/4 of activations and work go, 22 bytes per parameter, but the gradients of the first
#    micro-batch are alive when the second begins its backward pass: that takes 4 back, and 18 are
#    saved. With few tokens the peak is *larger* than without: activations were not what filled it.
#    Nothing more is sent, because of `no_sync`; kernels are nearly three times as many.
# 4. 4 D of 64 D + 4 H + 16: one sixteenth. The FLOPs grow by 22%, not by the third of the papers,
#    for the head and each block's last product are not run again. The *peak* falls less than the
#    activations: it moves into the first block's backward pass, where one block's activations and
#    nearly all gradients meet. autocast leaves 36 D of 64 D, as residuals stay in float32, and adds
#    bfloat16 copies of the weights: not half, 34% off.
# 5. Zeros that stay cost 4 with many tokens and 2.1 with few, where they no longer meet the plain
#    step's peak. Bucket views save nothing with many tokens: when backward begins, the plain plan
#    has buckets and no gradients, and with views it has one array, too. With few tokens, where both
#    were there at the end, they save 2 of the 4, since the peak moves to its beginning.
# 6. On four ranks 12 of 16 bytes are sharded away, but units that are whole, their gradients and
#    two buffers take much of it back in a model of three blocks; the more blocks, the smaller is a
#    unit next to the whole. What is sent grows by 43%: half as much again, less the root, which
#    forward leaves whole.
# 7. Without expandable segments no, twice: three holes are not one. With them the first request is
#    answered, since each hole of 75 MiB contains whole pages of 20 MiB that can lie elsewhere. The
#    second is not: no hole of 15 MiB contains such a page, and they stay as they are. On GPUs
#    the sign is the end of the message, "3.90 GiB is reserved by PyTorch but unallocated": if that
#    is more than what was asked for, memory is fragmented. It comes with shapes that change from
#    step to step, and with kept tensors among short-lived ones.
# 8. No. It is the one that came last; here 22 times as much was alive, and where the largest tensor
#    of a block is refused, five times. Ask who is alive, not who asked. But it says where in the
#    step the peak is, and with that which formula to look at.
# 9. Micro-batches for many tokens, bucket views for few; and the order by counted bytes is the one
#    by the formulas. So the choice can be made before the job is queued.
#
# **Try.** With `foreach=True` Adam makes arrays as long as all gradients during its step. With few
# tokens the peak moves there; with many, it is far below that of backward. With views, accumulation
# saves 4 bytes more: the gradients that live on *are* the buckets.
#
# **On GPUs** section 7 compares the allocator's peak with the same formulas. Attention's kernel and
# norms save a little more there, sizes are rounded up to 512 bytes, and cuBLAS and NCCL take memory
# that no tensor shows: 15% is the slack. `--snapshot oom.pickle` writes what
# https://docs.pytorch.org/memory_viz draws: the same picture as `--figure`, with the line of your
# code for every block. To have it in a job, call `torch.cuda.memory._record_memory_history()` at
# its start and `torch.cuda.memory._dump_snapshot(path)` where `torch.OutOfMemoryError` is caught.
#
# **At scale** P and t are those of one GPU: tensor parallelism divides both, sharding divides P
# only, and context parallelism (parallelism/10) t only. Which one is large decides, and the chart
# asks for it first.


# %%
def main() -> None:
    options = command_line(
        {
            "--figure": {"metavar": "PATH", "help": "save memory over a step as PNG"},
            "--snapshot": {"metavar": "PATH", "help": "on GPUs: save the snapshot of section 5"},
            "--room": {"type": int, "metavar": "BYTES", "help": argparse.SUPPRESS},
            "--fragments": {"action": "store_true", "help": argparse.SUPPRESS},
        }
    )
    if options.room:  # the child of section 5
        run_out_of_memory(options.room)
        return
    if options.fragments:  # the child of section 4
        fragment()
        return
    launch()
    device = setup()
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # a counter's
    os.environ["KINETO_LOG_LEVEL"] = "99"  # else the profiler tells when it starts and stops
    if WORLD_SIZE == 1:
        for cures in CURES.values():
            del cures["shard"]
        blocked("what sharding saves", needs="2 ranks")
    lines = {}
    for name, job in JOBS.items():
        settled = bool(options.figure)  # DDP makes its buckets anew in the second step
        lines[name] = train(job, Plan(), device, settled)
        for cure, plan in CURES[name].items():
            lines[name, cure] = train(job, plan, device, settled)
    check_the_plain_step(lines, device)
    check_cures(lines, device)
    check_order(lines)
    check_fragmentation(device)
    check_out_of_memory(device, options.snapshot)
    check_against_the_allocator(device)
    compare_on_gpus(device)
    if options.figure and RANK == 0:
        draw(lines, options.figure)
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
