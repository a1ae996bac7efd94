"""Planning time: how long does a step take, and which layout is the fastest?
==========================================================================

**Question.** Of all ways to spread a model over a cluster that fit, which one is the fastest, and
what do the others pay for?

**Predict**, and write it down before you run:

1. Llama 3 8B at 8,192 tokens: how many GFLOPs does a token cost, forward and backward, if half of
   the attention matrix counts, as it is causal?
2. A step has three micro-batches. How many collectives does the MLP of one layer cost a rank under
   tensor parallelism (with sequence parallelism)? How many under FSDP, if it is a unit?
3. The equation below takes products to reach one share of a GPU's peak, the same in every layout.
   The share is fitted to runs on 8 B200 with TP 2. Which runs does it miss most, those with PP 2,
   TP 4 or TP 8? And does it find these too fast or too slow?
4. Llama 3 70B, 128 sequences of 8,192 tokens per step, in bfloat16. Is FSDP alone the fastest way
   on 64 H100 (80 GB, NVLink joins 8)? And on 64 GB300 (288 GB, NVLink joins 72)?

**Run.**

    torchrun --standalone --nproc-per-node=4 17_planning_time.py    # NCCL on 4 GPUs, else gloo
    python 17_planning_time.py                                      # the same, started for you

Not run on several GPUs. Rows marked t hold the equation against what others have published.

**Try.** Give the H100 the memory of a GB300 (`memory=235` in `H100`): which claims fail? In
`micro_batch` let recomputation be free (`passes = 1`): which ones now?

**Before.** parallelism/16_planning_memory.py: what fits. communication/04_alpha_beta.py: what a
collective costs.

**Next.** parallelism/26_dry_run_of_1024_ranks.py: the plan against the program. For a model of
your own, `course plan --model llama-70b --gpus 64 --gpu h100`.
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
import warnings
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.flop_counter import FlopCounterMode

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# %% [markdown]
# ## 1. The equation
#
# A step computes; it waits for messages that nothing hides; and, if there is a pipeline, it idles.
# Every layout is a bargain between these three. Here is a step on one GPU, over time:
#
#     [ products | memory-bound | tensor parallel ]  m times       [ bubble ]  [ data parallel ]
#       one micro-batch on one stage, there and back                pp-1 more    what is not hidden
#
#     seconds per step = (m + pp - 1) x one micro-batch + what is exposed of data parallelism
#
#     products         = FLOPs per token x tokens / (tp x pp) / (share x peak)
#     messages         = calls x (alpha + bytes that a GPU sends / rate of its link)
#
# m is the number of micro-batches that a GPU works on per step: sequences per step / (dp x
# sequences per micro-batch). **dp** replicas work on different sequences, **tp** GPUs share each
# layer, and **pp** stages each have 1/pp of the layers, all as in
# parallelism/16_planning_memory.py.
#
# One number in it is fitted: **share**, the part of the peak that matrix products reach in a real
# run. Three are round numbers that we took over: what a link reaches of its rate, alpha, and the
# bytes that memory-bound work moves. All else is counted or stands in a data sheet. We take the
# terms in turn.

# %% [markdown]
# ## 2. Products: six FLOPs per parameter and token
#
# A parameter of a matrix costs a token two FLOPs forward, a product and a sum. It costs four
# backward, two for the gradient of the input and two for its own. Layers and head count; the
# embedding is a look-up. Attention comes on top: queries times keys and scores times values are 4 h
# s FLOPs per token and layer forward, and 12 h s with backward.
#
# Causality spares half of that. **MFU**, the model FLOPs utilization, is these FLOPs per second
# over the peak. Beware: torchtitan counts all of attention, and "6N" counts none, but the
# embedding. For Llama 3 8B these are 1.2 apart, so an MFU without its convention says little.


# %%
class Model(NamedTuple):
    """The shape of a dense Llama."""

    layers: int
    hidden: int  # h
    kv: int  # width of the keys, and of the values: their heads x 128
    ff: int
    vocab: int  # V


LLAMA_8B = Model(layers=32, hidden=4096, kv=1024, ff=14336, vocab=128256)
LLAMA_70B = Model(layers=80, hidden=8192, kv=1024, ff=28672, vocab=128256)
LLAMA_405B = Model(layers=126, hidden=16384, kv=1024, ff=53248, vocab=128256)


def layer_matrices(model: Model) -> int:
    """Parameters of a layer, the norms apart."""
    h = model.hidden
    return 2 * h * h + 2 * h * model.kv + 3 * h * model.ff


def flops_per_token(model: Model, sequence: int) -> float:
    """FLOPs forward and backward; of attention the causal half, as NVIDIA counts."""
    matrices = model.layers * layer_matrices(model) + model.vocab * model.hidden  # with the head
    return 6 * matrices + 12 * model.layers * model.hidden * sequence / 2


# %% [markdown]
# ## 3. Messages: bytes over the rate of a link
#
# Around a ring of n GPUs an all-gather or a reduce-scatter of S bytes makes each GPU send (n-1)/n x
# S. Three axes send three kinds of messages:
#
#     tensor      8 per layer and micro-batch, 4 forward, 4 backward: the activations of a
#                 micro-batch, 2 bytes x tokens x h. Nothing hides them: the next product waits.
#     data        ZeRO-1: one reduce-scatter of the gradients per step, 4 bytes per parameter, and
#                 one all-gather of the weights, 2 bytes. FSDP: for each micro-batch one gather
#                 forward; one gather and one reduce-scatter backward. Products hide them.
#     pipeline    one activation to the next stage. Small; we leave it out.
#
# The rate depends on where a group's GPUs are. Inside an NVLink domain it is NVLink's. If a group
# reaches across domains, a ring leaves each domain through the network cards of all its members
# there, one card per GPU. Ranks of tp are neighbors, and those of dp are tp apart. So tp = 8 on
# nodes of eight leaves one card to each group of dp; tp = 1 leaves it all eight.

# %%
LINK_SHARE = 0.8  # of a link's rate that NCCL reaches: 370 of 450 GB/s on 8 H100 (nccl-tests #212)
ALPHA = 20e-6  # seconds that a collective takes however small it is; assumed


class Gpu(NamedTuple):
    """A GPU, and the links that it has, one way; from data sheets."""

    peak: float  # FLOP/s in bfloat16, without sparsity
    hbm: float  # bytes per second
    nvlink: float  # bytes per second
    domain: int  # GPUs that NVLink joins
    network: float  # bytes per second of a card
    memory: float  # GiB to plan for: 85% of what a training may use


H100 = Gpu(peak=989e12, hbm=3.35e12, nvlink=450e9, domain=8, network=50e9, memory=67)
B200 = Gpu(peak=2250e12, hbm=8e12, nvlink=900e9, domain=8, network=50e9, memory=151)
GB300 = Gpu(peak=2500e12, hbm=8e12, nvlink=900e9, domain=72, network=100e9, memory=235)


def rate(gpu: Gpu, ranks: int, stride: int) -> float:
    """Bytes per second that a GPU sends in a group whose ranks are `stride` apart."""
    if ranks * stride <= gpu.domain:
        return LINK_SHARE * gpu.nvlink
    cards = min(ranks, max(gpu.domain // stride, 1))
    return LINK_SHARE * min(gpu.nvlink, cards * gpu.network)


# %% [markdown]
# ## 4. A step
#
# The slowest stage sets the pace of a pipeline. It is the last one, which has the head besides its
# layers. Recomputation of all layers is a forward pass more: 4/3 of the products, and 12 messages
# of tensor parallelism instead of 8.
#
# Norms, activation functions and residuals compute little and move many bytes. They take the time
# that the GPU's memory needs, for about three times what is kept for the backward pass: a write, a
# read, and a gradient. What is kept is lesson 16's 34 h per token and layer.

# %%
SHARE = 0.39  # of the peak that products reach; fitted in section 6


class Layout(NamedTuple):
    """How a model is split over dp x tp x pp GPUs, and how it runs there."""

    dp: int = 1
    tp: int = 1  # with sequence parallelism
    pp: int = 1  # must divide the layers
    zero: int = 1  # or 3, which is FSDP
    recompute: bool = False  # all layers


def saved_per_token(model: Model) -> int:
    """Bytes that one token leaves in one layer for the backward pass (lesson 16, section 3)."""
    return 12 * model.hidden + 4 * model.kv + 6 * model.ff


def micro_batch(model: Model, layout: Layout, gpu: Gpu, tokens: int) -> dict[str, float]:
    """Seconds of one micro-batch, a sequence of so many tokens, on the slowest stage, by part."""
    layers = model.layers / layout.pp
    passes = 4 / 3 if layout.recompute else 1
    flops = layers * (6 * layer_matrices(model) + 6 * model.hidden * tokens)
    flops += 6 * model.vocab * model.hidden  # the head
    touched = 3 * layers * saved_per_token(model)
    tensor = 0.0
    if layout.tp > 1:
        calls = 12 if layout.recompute else 8  # per layer
        sent = (layout.tp - 1) / layout.tp * 2 * tokens * model.hidden
        tensor = calls * layers * (ALPHA + sent / rate(gpu, layout.tp, stride=1))
    return {
        "products": passes * tokens * flops / layout.tp / (SHARE * gpu.peak),
        "memory-bound": passes * tokens * touched / layout.tp / gpu.hbm,
        "tensor": tensor,
    }


# %% [markdown]
# Data-parallel messages run while products do. Forward is a third of a micro-batch's time, and
# backward two thirds. A message is exposed as far as it is longer than what runs next to it.
#
# **When does FSDP hide?** Backward moves 6 bytes per parameter while it computes 4 FLOPs per
# parameter and token. So a micro-batch must have 1.5 x share x peak / rate tokens. That is 1,800 on
# H100s with a card of 400 Gb/s each, and one sequence of 8,192 is plenty. It is four times as many
# if tp = 4 leaves two of eight cards to a group: still hidden, but just.


# %%
def data_parallel(model: Model, layout: Layout, gpu: Gpu, m: int, seconds: float) -> float:
    """Exposed seconds per step; `seconds` is the time of a micro-batch."""
    P = model.layers * layer_matrices(model) + 2 * model.vocab * model.hidden
    shared = P / (layout.tp * layout.pp)
    per_byte = (layout.dp - 1) / layout.dp * shared / rate(gpu, layout.dp, stride=layout.tp)
    gather = 2 * per_byte  # weights in bfloat16
    reduce = 4 * per_byte  # gradients in float32
    forward = seconds / 3
    backward = 2 * seconds / 3
    if layout.zero == 3:
        return m * (max(gather - forward, 0) + max(gather + reduce - backward, 0))
    return max(gather - forward, 0) + max(reduce - backward, 0)


def step(model: Model, layout: Layout, gpu: Gpu, tokens: int, batch: int) -> dict[str, float]:
    """Seconds per step of `batch` sequences of so many tokens, by part."""
    m = batch // layout.dp
    one = micro_batch(model, layout, gpu, tokens)
    seconds = sum(one.values())
    parts = {part: m * each for part, each in one.items()}
    parts["bubble"] = (layout.pp - 1) * seconds
    parts["data"] = data_parallel(model, layout, gpu, m, seconds)
    return parts


# %% [markdown]
# **One case by hand**: lesson 16's, Llama 3 70B on 64 H100 with tp = 8, pp = 4, dp = 2, a step of
# 128 sequences of 8,192 tokens. Each pipeline works on m = 64 sequences. (20 layers have 20 x (6 x
# 855.6 million + 6 h s) FLOPs per token, of which the second is attention.)
#
#     FLOPs           20 layers x 5.54 billion, 6.3 of the head     117 billion per token
#     products        8,192 x 117 billion / 8 / (0.39 x 989e12)     0.311 s per micro-batch
#     memory-bound    3 x 20 x 274,432 bytes x 8,192 / 8 / 3.35e12  0.005 s
#     tensor          8 x 20 x (20 us + 7/8 x 134 MB / 360e9)       0.055 s
#     sum             of one micro-batch                            0.371 s
#     step            64 + 3 of them                                24.9 s
#     data            4 x 2.2 billion bytes / 2 / 40e9 = 0.11 s, less than the last backward pass
#
# That is 659 tokens per second and GPU, an MFU of 30%. Of the step, products are 80%, tensor
# parallelism 14%, and the bubble 4.5%.

# %% [markdown]
# ## 5. Which layout?
#
# Here are eight layouts for the same job, each with the GiB that lesson 16's sum finds for its most
# loaded GPU. Of those that fit, the fastest is the choice. Every other one gets a line that says
# *why not*: it does not fit, or in which part of the step it loses most. The run prints:
#
#                              64 H100                           64 GB300
#                          GiB
#     FSDP alone           197  does not fit                        7.7 s  the choice
#     FSDP, recomputed      41  25.9 s  1.24 x: products + 6.4     10.2 s  1.33 x: products + 2.5
#     FSDP x TP 4           63  20.9 s  the choice                  8.5 s  1.11 x: tensor + 0.8
#     FSDP x TP 8           41  26.2 s  1.25 x: data + 3.2          9.6 s  1.24 x: tensor + 1.9
#     FSDP x TP 16          30  27.9 s  1.33 x: tensor + 6.9       11.7 s  1.52 x: tensor + 4.0
#     TP 8, PP 4            47  24.9 s  1.19 x: tensor + 2.0       10.3 s  1.35 x: tensor + 1.9
#     TP 4, PP 8            69  does not fit                       10.3 s  1.33 x: bubble + 1.0
#     PP 16, recomputed     58  45.9 s  2.19 x: bubble + 14.6      18.2 s  2.36 x: bubble + 5.8
#
# "Does not fit" leaves 15% of the memory free. TP 4, PP 8 exceeds that by two of 67 GiB: it runs if
# all goes well, and NVIDIA did run it, in 8 bits (section 6). FSDP alone could not.
#
# On H100, activations are what does not fit. FSDP alone has to recompute, which costs a forward
# pass. TP 4 divides the activations by four, and its messages cost less than that. TP 8 has
# messages of 7/8 instead of 3/4 for half of the products, so they weigh more than twice as much;
# and each of its FSDP groups is left with one card, so the weights no longer hide. Pipelines idle.
# On GB300 FSDP alone fits as it is, and then it pays for nothing: its messages hide. (Both have the
# share of a B200 here, so that what differs is memory and links.)

# %%
JOB = {"tokens": 8192, "batch": 128}
LAYOUTS = {  # the layout, and its GiB
    "FSDP alone": (Layout(dp=64, zero=3), 197),
    "FSDP, recomputed": (Layout(dp=64, zero=3, recompute=True), 41),
    "FSDP x TP 4": (Layout(dp=16, tp=4, zero=3), 63),
    "FSDP x TP 8": (Layout(dp=8, tp=8, zero=3), 41),
    "FSDP x TP 16": (Layout(dp=4, tp=16, zero=3), 30),
    "TP 8, PP 4": (Layout(dp=2, tp=8, pp=4), 47),
    "TP 4, PP 8": (Layout(dp=2, tp=4, pp=8), 69),
    "PP 16, recomputed": (Layout(dp=4, pp=16, recompute=True), 58),
}


def parts_of(name: str, gpu: Gpu) -> dict[str, float]:
    return step(LLAMA_70B, LAYOUTS[name][0], gpu, **JOB)


def seconds_of(name: str, gpu: Gpu) -> float:
    return sum(parts_of(name, gpu).values())


def fastest(gpu: Gpu, names: Iterable = LAYOUTS) -> str:
    """The name of the fastest of these layouts that fits."""
    fits = [name for name in names if LAYOUTS[name][1] <= gpu.memory]
    return min(fits, key=lambda name: seconds_of(name, gpu))


def why_not(name: str, gpu: Gpu) -> str:
    """In one line: it does not fit, or in which part it takes most longer than the fastest."""
    best = fastest(gpu)
    if LAYOUTS[name][1] > gpu.memory:
        return f"needs {LAYOUTS[name][1]} GiB of {gpu.memory}"
    if name == best:
        return "the choice"
    others = parts_of(best, gpu)
    more = {part: seconds - others[part] for part, seconds in parts_of(name, gpu).items()}
    worst = max(more, key=more.get)
    slower = seconds_of(name, gpu) / seconds_of(best, gpu)
    return f"{slower:.2f} x as long: {worst} + {more[worst]:.1f} s"


# %% [markdown]
# ## 6. How it is measured
#
# **FLOPs** are counted by torch's own counter as matrix products pass, in a Llama on the meta
# device, where nothing is computed. It knows nothing of the causal mask, so it counts all of
# attention, 6 L h s more.


# %%
def counted_flops(model: Model, tokens: int) -> int:
    """FLOPs per token of a forward and a backward pass of one sequence."""
    h = model.hidden
    heads = h // 128
    linear = partial(nn.Linear, bias=False, device="meta")
    x_TD = torch.zeros(tokens, h, device="meta", requires_grad=True)  # from the embedding
    with FlopCounterMode(display=False) as counter:
        y_TD = x_TD
        for _ in range(model.layers):
            q_HTK = linear(h, h)(y_TD).view(tokens, heads, 128).transpose(0, 1)
            k_GTK = linear(h, model.kv)(y_TD).view(tokens, -1, 128).transpose(0, 1)
            v_GTK = linear(h, model.kv)(y_TD).view(tokens, -1, 128).transpose(0, 1)
            shared = heads // len(k_GTK)  # queries' heads that share a head of keys and values
            scores_HTT = q_HTK @ k_GTK.repeat_interleave(shared, 0).transpose(1, 2)
            mixed_HTK = scores_HTT.softmax(-1) @ v_GTK.repeat_interleave(shared, 0)
            y_TD = y_TD + linear(h, h)(mixed_HTK.transpose(0, 1).flatten(1))
            gated = F.silu(linear(h, model.ff)(y_TD)) * linear(h, model.ff)(y_TD)
            y_TD = y_TD + linear(model.ff, h)(gated)
        linear(h, model.vocab)(y_TD).sum().backward()
    return counter.get_total_flops() / tokens


# %% [markdown]
# And what others have published: NVIDIA's TFLOP/s over its tokens per second *is* FLOPs per token,
# free of any clock. (Megatron-Bridge's performance pages, NeMo 25.11: H100, 8,192 tokens.)

# %%
PUBLISHED = {  # tokens/s and TFLOP/s per GPU
    "8B": (LLAMA_8B, 14451, 744),
    "70B": (LLAMA_70B, 1602, 719),
    "405B": (LLAMA_405B, 292, 737),
}


def check_flops() -> None:
    whole = flops_per_token(LLAMA_8B, 8192) + 6 * 32 * 4096 * 8192
    counted = counted_flops(LLAMA_8B, 8192)
    claim("8B: GFLOPs per token, all of attention", whole / 1e9, counted / 1e9, question=1)
    for name, (model, tokens, tflops) in PUBLISHED.items():
        ours = flops_per_token(model, 8192) / 1e9
        found = tflops * 1e3 / tokens
        claim(f"{name}: GFLOPs per token, published", ours, found, atol=0.002 * ours, kind="theory")


# %% [markdown]
# **Collectives** are counted on the ranks, by torch's `CommDebugMode`, for the MLP of one layer.
# Once it is split by torch's tensor and sequence parallelism, and once it is a unit of FSDP.
# Attention has two such products as well, so that a layer has twice the messages of its MLP.


# %%
def collectives(device: torch.device, fsdp: bool) -> int:
    """Count those of a step of three micro-batches."""
    width = 8 * WORLD_SIZE
    mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    mesh = init_device_mesh(device.type, (WORLD_SIZE,))
    warnings.filterwarnings("ignore", "FSDP2-wrapped")  # the counter's hooks return views
    if fsdp:
        fully_shard(mlp.to(device), mesh=mesh, reshard_after_forward=True)
    else:  # this rank's tokens come in, and this rank's tokens go out
        first = ColwiseParallel(input_layouts=Shard(0))
        second = RowwiseParallel(output_layouts=Shard(0))
        parallelize_module(mlp.to(device), mesh, {"0": first, "2": second})
    with CommDebugMode() as counter:
        for _ in range(3):
            x_tD = torch.randn(4, width, device=device, requires_grad=True)
            mlp(x_tD).sum().backward()
    return counter.get_total_counts()


def check_collectives(device: torch.device) -> None:
    if WORLD_SIZE == 1:
        blocked("collectives of an MLP, three micro-batches", needs="2 ranks")
        return
    claim("TP: collectives of an MLP", 3 * (2 + 2), collectives(device, fsdp=False), question=2)
    claim("FSDP: collectives of an MLP", 3 * (1 + 2), collectives(device, fsdp=True), question=2)


# %% [markdown]
# **Seconds** are those that SimuMax 1.2 (Moore Threads) published of Megatron on 8 B200, for 12
# layers of Llama 3 70B and sequences of 4,096 tokens: four layouts with 4, 8 and 32 micro-batches.
# The share is fitted to the three runs with TP 2: whatever time they have beyond the other terms,
# products took. Then it is judged on the nine runs that it has not seen. And for each number of
# micro-batches: would the equation have chosen the layout with the most tokens per second?

# %%
PP_2 = Layout(dp=4, pp=2)
TP_2 = Layout(dp=4, tp=2)
TP_4 = Layout(dp=2, tp=4)
TP_8 = Layout(dp=1, tp=8)
COUNTS = (4, 8, 32)  # micro-batches
PUBLISHED_MS = {  # docs/b200/b200_release_v1.2_summary.md
    PP_2: (843.0, 1476.8, 5436.5),
    TP_2: (725.5, 1387.0, 5376.5),
    TP_4: (409.8, 765.6, 2964.6),
    TP_8: (280.9, 556.7, 2073.7),
}
TWELVE = LLAMA_70B._replace(layers=12)


def fitted_share() -> float:
    """The share that explains the three runs with TP 2, in the median."""
    one = micro_batch(TWELVE, TP_2, B200, 4096)
    shares = []
    for m, milliseconds in zip(COUNTS, PUBLISHED_MS[TP_2], strict=True):
        left = milliseconds / 1e3 - m * (one["memory-bound"] + one["tensor"])
        shares.append(SHARE * m * one["products"] / left)
    return median(shares)


def most_tokens(milliseconds: dict[Layout, list], at: int) -> Layout:
    """The layout with the most tokens per second, with the micro-batches of one column."""
    return max(milliseconds, key=lambda layout: layout.dp / milliseconds[layout][at])


# %% [markdown]
# The bubble shows there as well: with PP 2, 4 micro-batches take the time of 5, and 32 that of 33.


# %%
def check_seconds() -> None:
    claim("share of the peak, from three runs", SHARE, fitted_share(), atol=0.005, kind="theory")
    ours = {}
    misses = {}
    for layout, published in PUBLISHED_MS.items():
        ours[layout] = []
        misses[layout] = []
        for m, milliseconds in zip(COUNTS, published, strict=True):
            seconds = sum(step(TWELVE, layout, B200, 4096, m * layout.dp).values())
            ours[layout].append(1e3 * seconds)
            misses[layout].append(abs(1e3 * seconds / milliseconds - 1))
        shown = "  ".join(f"{miss:.1%}" for miss in misses[layout])
        print0(f"{'':13}TP {layout.tp}, PP {layout.pp}, DP {layout.dp}: missed by {shown}")
    half = median(misses[PP_2] + misses[TP_4] + misses[TP_8])
    claim("nine other runs: median miss", 0.1, half, atol=0.01, kind="theory")
    others = max(misses[PP_2] + misses[TP_4])
    ratio = min(misses[TP_8]) / others
    claim("TP 8's least miss / the others' largest", 1.5, ratio, ">=", question=3, kind="theory")
    slowest = max(o / p for o, p in zip(ours[TP_8], PUBLISHED_MS[TP_8], strict=True))
    claim("TP 8: our seconds / published, at most", 0.8, slowest, "<=", question=3, kind="theory")
    expected = 8 * ours[PP_2][0] / ours[PP_2][2]
    found = 8 * PUBLISHED_MS[PP_2][0] / PUBLISHED_MS[PP_2][2]
    claim("PP 2: a micro-batch of 4 / one of 32", expected, found, atol=0.03, kind="theory")
    right = sum(most_tokens(ours, at) == most_tokens(PUBLISHED_MS, at) for at in range(3))
    claim("times of three that we choose the fastest", 3, right, kind="theory")


# %% [markdown]
# **Other GPUs.** NVIDIA's pages also have what H100 and GB300 reached with layouts of ours, in 8
# bits. For the products that is twice the peak. What they recompute the pages do not say.

# %%
NVIDIA = {  # model, layout, GPU, sequences per step, tokens/s per GPU
    "8 H100, 8B, FSDP": (LLAMA_8B, Layout(dp=8, zero=3), H100, 128, 14451),
    "64 GB300, 70B, FSDP": (LLAMA_70B, Layout(dp=64, zero=3), GB300, 256, 4520),
    "64 H100, 70B, TP 4, PP 8": (LLAMA_70B, Layout(dp=2, tp=4, pp=8), H100, 128, 1602),
}


def check_nvidia() -> None:
    for name, (model, layout, gpu, batch, rate_of_gpu) in NVIDIA.items():
        gpus = layout.dp * layout.tp * layout.pp
        published = batch * 8192 / gpus / rate_of_gpu
        ours = sum(step(model, layout, gpu._replace(peak=2 * gpu.peak), 8192, batch).values())
        if layout.pp == 1:
            claim(f"{name}: seconds", published, ours, atol=0.1 * published, kind="theory")
        else:  # they interleave five pieces per stage, which the equation does not know
            print0(f"{'':13}{name}: {ours:.1f} s without interleaving, published {published:.1f} s")


def check_choices() -> None:
    for title, gpu in (("64 H100", H100), ("64 GB300", GB300)):
        print0(f"\n  {title:19}products  tensor  bubble  data    all")
        for name in LAYOUTS:
            parts = parts_of(name, gpu)
            shown = f"{parts['products']:8.1f} {parts['tensor']:7.1f} {parts['bubble']:7.1f}"
            shown += f" {parts['data']:5.1f} {sum(parts.values()):6.1f}"
            print0(f"  {name:19}{shown}  {why_not(name, gpu)}")
    print0()
    slower = {}
    for gpu in (H100, GB300):
        alone = fastest(gpu, ("FSDP alone", "FSDP, recomputed"))
        slower[gpu] = seconds_of(alone, gpu) / seconds_of(fastest(gpu), gpu)
    claim("64 H100: FSDP alone / the choice", 1.2, slower[H100], ">=", question=4, kind="theory")
    claim("64 GB300: FSDP alone / the choice", 1, slower[GB300], question=4, kind="theory")
    swapped = seconds_of(fastest(H100), GB300) / seconds_of(fastest(GB300), GB300)
    claim("64 GB300: H100's choice / the choice", 1.1, swapped, ">=", kind="theory")
    eight = seconds_of("FSDP x TP 8", H100) / seconds_of("FSDP x TP 4", H100)
    claim("64 H100: FSDP with TP 8 / with TP 4", 1.2, eight, ">=", kind="theory")


# %% [markdown]
# ## What you should have seen
#
# 1. 51.5 GFLOPs, of which attention is 6.4; with all of attention 57.9. What NVIDIA publishes for
#    8B, 70B and 405B agrees with the causal count to 0.1%.
# 2. 12 and 9: 4 and 3 per micro-batch. What differs more is that FSDP's run behind products, while
#    those of tensor parallelism are waited for.
# 3. TP 8, by 21 to 27%, and it finds it too fast: a product that is cut in eight no longer fills a
#    GPU, so *share* is not one number. For PP 2 it is too slow, by 8 to 11%; in the median of the
#    nine runs it misses by 10%. Yet with 4, 8 and 32 micro-batches it takes the layout that was the
#    fastest.
# 4. No on H100, where FSDP alone must recompute and takes 1.24 times as long as with TP 4. Yes on
#    GB300, where it has no recomputation, no bubble, and no message that is waited for. FSDP's
#    messages hide on both clusters: the memory turns the choice round, not that NVLink joins 72.
#
# **Try.** With a GB300's memory, 64 H100 would run FSDP alone too. With free recomputation, FSDP
# alone seems to win on H100 as it is. Both times the rows *64 H100: FSDP alone* and *64 GB300:
# H100's choice* fail. A plan made so loses a fifth of the cluster, and no error tells.
#
# **How to use it.** A miss of 10% means that layouts closer than that are ties: on GB300, FSDP
# alone and FSDP with TP 4 are nearly one. Let the equation throw out what takes 1.3 times as long,
# and *measure* the two or three that are left. It met NVIDIA's two runs of FSDP within 10%. For the
# pipeline of 8 on H100 it is a third too slow. That NVIDIA interleaves it, five pieces per stage,
# explains a third of that; the rest we do not know. So on H100 the equation tells that FSDP alone
# loses to TP 4, and does not tell whether TP 4 goes better with FSDP or with such a pipeline.
#
# **At a thousand GPUs** the same batch leaves less than a sequence to each. Then tp and pp come
# back: they are what lets several GPUs work on one sequence.
#
# **What is not in it.** Interleaving divides the bubble by the number of pieces per stage. Experts
# add two all-to-alls per layer and pass. Context parallelism sends keys and values around a ring.
# Messages of the pipeline and the optimizer's step take a percent or so. Stragglers, checkpoints
# and energy are left out. `course plan` has all of these but the last three, and a share for each
# type of GPU.


# %%
def main() -> None:
    command_line()
    launch()
    device = setup()
    check_flops()
    check_collectives(device)
    check_seconds()
    check_nvidia()
    check_choices()
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
