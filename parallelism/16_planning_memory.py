"""Planning memory: will a training run fit on its GPUs?
=====================================================

**Question.** A model, a number of GPUs and a way to split one over the other: how many bytes does
the most loaded GPU hold, and of what?

**Predict**, and write it down before you run:

1. A layer of a Llama trains in bfloat16. It is h wide, its keys and values h/8 each, and the three
   matrices of its MLP are 3.5 h wide. Attention is one kernel (FlashAttention), and so is SwiGLU.
   How many bytes does a token leave in the layer for the backward pass, in units of h?
2. Four ranks train by FSDP, each on a sequence of its own. By how much are the *activations* that a
   rank holds divided: by 4, by 2 or by 1?
3. Llama 3 70B on 64 H100 of 80 GB: FSDP over all of them, one sequence of 8,192 tokens per GPU. All
   that is kept per parameter is 18.5 GiB per GPU. Does the step fit without recomputation?
4. A pipeline of four stages (1F1B) becomes one of eight, so that each stage has half as many
   layers. A step has 64 micro-batches. What happens to the activations that the first stage holds:
   a half, the same or twice?

**Run.**

    torchrun --standalone --nproc-per-node=4 16_planning_memory.py    # NCCL on 4 GPUs, else gloo
    python 16_planning_memory.py                                      # the same, started for you

Not run on several GPUs. Rows marked t are arithmetic, or hold the sum against what others have
measured.

**Try.** In `memory` let `in_flight` be 1: which claims fail? Put it back, and divide the
activations by `dp`, as if ZeRO sharded them too: which fail now?

**Before.** parallelism/05_zero2_and_zero3.py: what ZeRO shards.
parallelism/07_pipeline_schedules.py: micro-batches in flight.

**Next.** parallelism/17_planning_time.py: how long a step takes. For a model of your own, `course
plan --model llama-70b --gpus 64 --gpu h100`.
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
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# %% [markdown]
# ## 1. A sum of six parts, each divided by axes of its own
#
# A GPU that trains holds two kinds of bytes. **Those per parameter can be divided by every axis.
# Those per token cannot: more replicas or a longer pipeline leave them as they are.** What reduces
# them is ranks that share a sequence, a smaller micro-batch, or recomputation. That is the idea;
# what is left is to count both.
#
# In detail there are six parts. h is the width of the model, V its vocabulary. A *token* is one of
# the micro-batch that a GPU works on.
#
#     part               bytes                                      divided by
#     weights             2 per parameter, bfloat16                 tp, pp; from ZeRO-3 on dp
#     gradients           4 per parameter, added up in float32      tp, pp; from ZeRO-2 on dp
#     optimizer states   12 per parameter, in float32: a copy of    tp, pp; from ZeRO-1 on dp
#                        the weights and Adam's two moments
#     activations        about 34 h per token and layer             tp
#     logits              6 V per token, on the last stage          tp
#     one layer          what exists of it for a moment only        tp
#
# The first three are 18 bytes per parameter, as Megatron trains. (torch's FSDP has 16: weights in
# float32, which need no copy, then 4 + 4 + 8.)
#
# - **dp** ranks each train the model on other sequences. ZeRO keeps only 1/dp of the first three
#   parts on each of them, one part more with every stage; FSDP is stage 3.
# - **tp** ranks share each layer and, by sequence parallelism, the tokens between the layers.
#   (Context parallelism shares the tokens too; it is not in this sum.)
# - **pp** stages hold 1/pp of the layers each. That divides the first three parts and not the
#   activations: under 1F1B the first stage has pp micro-batches in flight, and pp x 1/pp is 1. This
#   is so if a step has at least pp micro-batches. Later stages have fewer in flight, and hold less.

# %% [markdown]
# ## 2. Bytes per parameter
#
# A Llama's layer has four matrices in its attention and three in its MLP. The queries and the
# output are h x h. Keys and values have fewer heads, so their matrices are h x kv. The MLP (SwiGLU)
# computes `down(silu(gate(x)) * up(x))`, with three matrices of h x ff. Outside of the layers there
# are two tables of V x h: the embedding and the head. All this stands in a model's config.json.


# %%
class Model(NamedTuple):
    """The shape of a dense Llama."""

    layers: int
    hidden: int  # h
    kv: int  # width of the keys, and of the values: their heads x the width of a head
    ff: int
    vocab: int  # V


LLAMA_70B = Model(layers=80, hidden=8192, kv=1024, ff=28672, vocab=128256)


def layer_parameters(model: Model) -> int:
    h = model.hidden
    attention = 2 * h * h + 2 * h * model.kv
    mlp = 3 * h * model.ff
    norms = 2 * h
    return attention + mlp + norms


def parameters(model: Model) -> int:
    tables = 2 * model.vocab * model.hidden
    return model.layers * layer_parameters(model) + tables + model.hidden  # and a last norm


def bytes_per_parameter(zero: int, dp: int) -> dict[str, float]:
    """Bytes that a rank keeps per parameter, of each of the three parts."""
    weights = 2
    gradients = 4
    states = 12
    if zero >= 1:
        states = states / dp
    if zero >= 2:
        gradients = gradients / dp
    if zero >= 3:
        weights = weights / dp
    return {"weights": weights, "gradients": gradients, "states": states}


# %% [markdown]
# ## 3. Bytes per token
#
# The backward pass of a matrix product needs the product's input again. A norm and SwiGLU need
# their inputs, attention its queries, keys, values and output. In bfloat16 that is two bytes per
# element. Go through a layer from top to bottom, and count per token:
#
#     operation                what it keeps                      bytes
#     norm                     its input                          2 h
#     queries, keys, values    the norm's output, once for all    2 h
#     attention                q, k, v                            2 h + 4 kv
#     output matrix            attention's output                 2 h
#     norm                     its input                          2 h
#     gate and up              the norm's output, once for both   2 h
#     SwiGLU                   its two inputs                     4 ff
#     down                     its input                          2 ff
#                                                                12 h + 4 kv + 6 ff
#
# Llama 3 70B has kv = h/8 and ff = 3.5 h: 33.5 h. (GPT-3's layer, with dropout and two matrices of
# h x 4h, has 34 h; Korthikanti et al., 2022.)
#
# Two things are taken for granted. FlashAttention stores no matrix of scores, which would be
# heads x tokens more elements per token. And SwiGLU is one kernel, as in Megatron. In plain torch
# it is two operations, and also keeps silu(gate): 2 ff bytes more, 40.5 h in all.
#
# **Recomputation** of whole layers keeps a layer's input alone, 2 h, and runs its forward pass once
# more when its backward pass comes. Then all 33.5 h exist, but of one layer at a time.


# %%
def saved_per_token(model: Model) -> int:
    """Bytes that one token leaves in one layer for the backward pass."""
    return 12 * model.hidden + 4 * model.kv + 6 * model.ff


# %% [markdown]
# ## 4. The sum
#
# Here is the table of section 1 as code, for one stage of a pipeline. The first stage holds the
# embedding, and the last one the head and the logits. A logit is kept in bfloat16 and its softmax
# in float32, 6 bytes, if the loss is one kernel; in torch's own operations it is about twice that.
#
# "One layer" exists for a moment only: its gradients in bfloat16, before they are added to the
# float32 ones; under ZeRO-3 its gathered weights, and those of the next layer; with recomputation
# its activations.
#
# The sum has two errors, of opposite signs. It adds the logits and "one layer", though the logits
# are gone when the backward pass reaches a layer: in the table below that is 5.9 GiB too much at
# most. And it leaves out what libraries need for themselves: on B200 it comes out 0.2 to 0.6 GiB
# below what was measured (section 6).


# %%
class Layout(NamedTuple):
    """How a model is split over dp x tp x pp GPUs, and how it runs there."""

    dp: int = 1
    tp: int = 1  # with sequence parallelism
    pp: int = 1  # must divide the layers
    zero: int = 1
    recompute: bool = False  # all layers
    micro_batch: int = 1  # sequences


def memory(
    model: Model, layout: Layout, sequence: int, micro_batches: int, stage: int
) -> dict[str, float]:
    """Bytes on each GPU of a stage at the worst moment of a step, by part."""
    _, tp, pp = layout[:3]
    layers = model.layers / pp
    P = layers * layer_parameters(model)
    if stage == 0:
        P += model.vocab * model.hidden  # the embedding
    if stage == pp - 1:
        P += model.vocab * model.hidden  # the head
    P = P / tp
    tokens = layout.micro_batch * sequence / tp
    in_flight = min(pp - stage, micro_batches)  # 1F1B
    kept = 2 * model.hidden if layout.recompute else saved_per_token(model)

    parts = {}
    for part, each in bytes_per_parameter(layout.zero, layout.dp).items():
        parts[part] = each * P
    parts["activations"] = tokens * kept * layers * in_flight
    parts["logits"] = 6 * tokens * model.vocab if stage == pp - 1 else 0
    parts["one layer"] = 2 * layer_parameters(model) / tp  # its gradients
    if layout.zero == 3:
        parts["one layer"] += 2 * 2 * layer_parameters(model) / tp  # two layers' weights
    if layout.recompute:
        parts["one layer"] += tokens * saved_per_token(model)
    return parts


def most_loaded(
    model: Model, layout: Layout, sequence: int, micro_batches: int
) -> dict[str, float]:
    """The same on the first or the last stage, whichever holds more: those between have less."""
    first = memory(model, layout, sequence, micro_batches, stage=0)
    last = memory(model, layout, sequence, micro_batches, stage=layout.pp - 1)
    return max(first, last, key=lambda parts: sum(parts.values()))


# %% [markdown]
# ## 5. Llama 3 70B on 64 H100
#
# Sequences have 8,192 tokens, a micro-batch is one of them, and a step has 128. Take tp = 8 inside
# each node, pp = 4, and the dp = 2 that remain, with ZeRO-1. By hand, on a GPU of the first stage:
#
#     P               20 layers x 855.7 million + 1,050.7 million, / 8      2.27 billion
#     weights          2 P                                                   4.2 GiB
#     gradients        4 P                                                   8.5 GiB
#     states          12 P / 2                                              12.7 GiB
#     activations     8,192 / 8 tokens x 33.5 h x 20 layers x 4 in flight   20.9 GiB
#     one layer        2 x 855.7 million / 8                                 0.2 GiB
#                                                                           46.5 GiB
#
# How much room is there? CUDA and NCCL need about a GiB of an H100's 79.6. And the allocator
# *reserves* more than the tensors take, as freed pieces do not always fit what comes next. So plan
# to 85% of the rest: **66.8 GiB**. The run prints this layout and six others:
#
#     layout              weights  gradients  states  activations  logits  one layer     sum
#     FSDP alone              2.1        4.1    12.3        167.5     5.9        4.8   196.6  no
#     FSDP, recomputed        2.1        4.1    12.3         10.0     5.9        6.9    41.2
#     FSDP x TP 4             2.1        4.1    12.3         41.9     1.5        1.2    63.0
#     FSDP x TP 8             2.1        4.1    12.3         20.9     0.7        0.6    40.7
#     TP 8, DP 8             16.4       32.9    12.3         20.9     0.7        0.2    83.5  no
#     TP 8, PP 4, DP 2        4.2        8.5    12.7         20.9     0.0        0.2    46.5
#     TP 8, PP 8              2.2        4.5    13.4         20.9     0.0        0.2    41.3
#
# Read it by columns. FSDP shrinks the first three and leaves the fourth as it is. Recomputation
# does the reverse, and so does tp within FSDP. From PP 1 to PP 8 the activations do not move.
#
# **Which program?** All rows are Megatron's sum, those of FSDP too. torch's FSDP has 16 bytes per
# parameter, which takes 2.1 GiB off each FSDP row. But torch's own sequence parallelism keeps more
# per token. Two inputs of each layer are gathered along tp, 4 h of the 33.5 h. Megatron gathers
# them once more for the backward pass; torch keeps them, whole on each rank. So TP 4 leaves
# 29.5/4 + 4 = 11.4 h instead of 8.4 h. In torch's own program:
#
#                         per parameter  activations  logits  one layer     sum
#     FSDP x TP 4, torch           16.4         56.9     1.5        1.2    76.0  no
#     FSDP x TP 8, torch           16.4         38.4     0.7        0.6    56.2
#
# **When a plan does not fit, find the largest part, and turn a knob that divides that part.** Too
# much per parameter: ZeRO first, as it costs the least; then tp inside the NVLink domain, then pp.
# Too much per token: a smaller micro-batch, then tp or context parallelism, then recomputation of
# whole layers, a third more of the computing. What each knob costs in time is the next lesson.

# %%
GiB = 2**30
ROOM = 66.8 * GiB  # to plan for on an H100
LAYOUTS = {  # 64 GPUs
    "FSDP alone": Layout(dp=64, zero=3),
    "FSDP, recomputed": Layout(dp=64, zero=3, recompute=True),
    "FSDP x TP 4": Layout(dp=16, tp=4, zero=3),
    "FSDP x TP 8": Layout(dp=8, tp=8, zero=3),
    "TP 8, DP 8": Layout(tp=8, dp=8),
    "TP 8, PP 4, DP 2": Layout(tp=8, pp=4, dp=2),
    "TP 8, PP 8": Layout(tp=8, pp=8),
}


def check_70b() -> None:
    """Print the table above; claim what fits, and what a longer pipeline changes."""
    heads = "weights  gradients  states  activations  logits  one layer"
    print0(f"\n  {'GiB per GPU':18}{heads}     sum")
    parts = {}
    total = {}
    for name, layout in LAYOUTS.items():
        parts[name] = most_loaded(LLAMA_70B, layout, 8192, micro_batches=128 // layout.dp)
        total[name] = sum(parts[name].values()) / GiB
        cells = "  ".join(f"{parts[name][head] / GiB:{len(head)}.1f}" for head in heads.split("  "))
        no = "no" if total[name] * GiB > ROOM else ""
        print0(f"  {name:18}{cells}  {total[name]:6.1f}  {no}".rstrip())
    room = ROOM / GiB
    alone = total["FSDP alone"]
    claim("70B, FSDP over 64 H100: GiB per GPU", room, alone, ">=", question=3, kind="theory")
    again = total["FSDP, recomputed"]
    claim("the same, all layers recomputed: GiB", room, again, "<=", kind="theory")
    four = parts["TP 8, PP 4, DP 2"]["activations"]
    eight = parts["TP 8, PP 8"]["activations"]
    claim("first stage's activations, 8 stages / 4", 1, eight / four, question=4, kind="theory")


# %% [markdown]
# ## 6. How it is measured
#
# A layer of Llama in torch. Its parameters are counted in 70B's size, on the meta device, where a
# tensor has a shape and takes no memory. It runs in the proportions of 70B, and small. Two parts
# are not torch's own, so that each keeps what its GPU kernel does: `OneKernel` stands for a fused
# SwiGLU, and LayerNorm for RMSNorm, whose CPU version keeps copies in float32. Rotary positions are
# left out; they keep nothing more.

# %%
SMALL = Model(layers=2, hidden=512, kv=64, ff=1792, vocab=0)
HEAD = 64  # width of a head: 8 heads of queries share one of keys and values
TOKENS = 96  # no side of a weight is that long


class OneKernel(torch.autograd.Function):
    """silu(gate) * up, which keeps its two inputs alone."""

    @staticmethod
    def forward(ctx, gate_TF: torch.Tensor, up_TF: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_TF, up_TF)
        return F.silu(gate_TF) * up_TF

    @staticmethod
    def backward(ctx, grad_TF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate_TF, up_TF = ctx.saved_tensors
        s_TF = gate_TF.sigmoid()
        slope_TF = s_TF * (1 + gate_TF * (1 - s_TF))  # of silu
        return grad_TF * up_TF * slope_TF, grad_TF * gate_TF * s_TF


class CountedLayer(nn.Module):
    """A layer of a Llama on one sequence: (T, h) -> (T, h)."""

    def __init__(self, model: Model, fused: bool = True) -> None:
        super().__init__()
        h = model.hidden
        linear = partial(nn.Linear, bias=False)
        self.fused = fused  # SwiGLU is one kernel
        self.norm1 = nn.LayerNorm(h, bias=False)
        self.q = linear(h, h)
        self.k = linear(h, model.kv)
        self.v = linear(h, model.kv)
        self.out = linear(h, h)
        self.norm2 = nn.LayerNorm(h, bias=False)
        self.gate = linear(h, model.ff)
        self.up = linear(h, model.ff)
        self.down = linear(model.ff, h)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        y_TD = self.norm1(x_TD)
        heads = []
        for matrix in (self.q, self.k, self.v):
            heads.append(matrix(y_TD).view(1, TOKENS, -1, HEAD).transpose(1, 2))
        z_BHTK = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        x_TD = x_TD + self.out(z_BHTK.transpose(1, 2).reshape(TOKENS, -1))
        y_TD = self.norm2(x_TD)
        gate_TF = self.gate(y_TD)
        up_TF = self.up(y_TD)
        product_TF = OneKernel.apply(gate_TF, up_TF) if self.fused else F.silu(gate_TF) * up_TF
        return x_TD + self.down(product_TF)


# %% [markdown]
# **Activations** are counted by the hook that autograd calls for each tensor that it saves. A
# storage counts once, however many operations keep it. Besides the table's entries only a few
# numbers per token are kept, for each norm a mean and a deviation and for each head a sum. They set
# the slack.

# %%
SLACK = (4 * 8 + 4 * 4) / SMALL.hidden  # of eight heads a sum; of two norms two numbers each


def forward_counted(layers: nn.Module, recompute: bool = False) -> tuple[torch.Tensor, int]:
    """Return the output on random tokens, and the bytes of activations that autograd keeps."""
    kept = {}  # by address

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if TOKENS in tensor.shape:  # weights are not activations
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    device = next(layers.parameters()).device
    x_TD = torch.randn(TOKENS, SMALL.hidden, device=device).to(torch.bfloat16)
    run = partial(checkpoint, layers, use_reentrant=False) if recompute else layers
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        y_TD = run(x_TD)
    return y_TD, sum(kept.values())


def check_layer(device: torch.device) -> None:
    """Claim the parameters of a layer, and what it keeps per token, in units of h."""
    with torch.device("meta"):
        counted = sum(weight.numel() for weight in CountedLayer(LLAMA_70B).parameters())
    claim("70B: parameters of a layer", layer_parameters(LLAMA_70B), counted)
    layer = CountedLayer(SMALL).to(device, torch.bfloat16)
    separate = CountedLayer(SMALL, fused=False).to(device, torch.bfloat16)
    unit = TOKENS * SMALL.hidden
    expected = saved_per_token(SMALL) / SMALL.hidden
    _, kept = forward_counted(layer)
    claim("a layer: bytes kept per token / h", expected, kept / unit, atol=SLACK, question=1)
    _, kept = forward_counted(separate)
    more = 2 * SMALL.ff / SMALL.hidden
    claim("SwiGLU in separate operations", expected + more, kept / unit, atol=SLACK)
    _, kept = forward_counted(layer, recompute=True)
    claim("recomputed", 2, kept / unit)
    if device.type == "cpu":
        blocked("a layer, by the GPU's allocator", needs="1 GPU")
        return
    before = torch.cuda.memory_allocated()
    output = forward_counted(layer)  # it keeps what backward needs
    grown = torch.cuda.memory_allocated() - before - 2 * unit  # and is itself no part of it
    del output
    claim("a layer, by the GPU's allocator", expected, grown / unit, atol=1.5)


# %% [markdown]
# **FSDP** on all ranks, each with a sequence of its own. What is kept per parameter after a step is
# read off the tensors themselves: torch's 16 bytes, divided by the ranks. What is kept per token is
# held against `memory`.


# %%
def check_fsdp(device: torch.device) -> None:
    """Claim what a rank holds per parameter, and of activations."""
    layers = nn.Sequential(CountedLayer(SMALL), CountedLayer(SMALL)).to(device)  # in float32
    P = sum(weight.numel() for weight in layers.parameters())
    mesh = init_device_mesh(device.type, (WORLD_SIZE,))
    for layer in layers:  # computes in bfloat16
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    optimizer = torch.optim.AdamW(layers.parameters())
    y_TD, activations = forward_counted(layers)
    y_TD.sum().backward()
    optimizer.step()
    held = 0
    for weight in layers.parameters():
        moments = optimizer.state[weight]
        for tensor in (weight, weight.grad, moments["exp_avg"], moments["exp_avg_sq"]):
            held += tensor.to_local().nbytes
    share = 16 / WORLD_SIZE  # shards differ by a row, if ranks do not divide the rows
    claim("FSDP: bytes per parameter", share, held / P, atol=0.01 * share)
    sums = memory(SMALL, Layout(dp=WORLD_SIZE, zero=3), TOKENS, micro_batches=1, stage=0)
    found = activations / sums["activations"]
    slack = SLACK * SMALL.hidden / saved_per_token(SMALL)
    claim("FSDP: activations of a rank / undivided", 1, found, atol=slack, question=2)


# %% [markdown]
# **The whole sum** is held against peaks that others have measured: rows of kind theory. SimuMax
# (Moore Threads, version 1.2) has what Megatron allocated on each of 8 B200, for 12 layers of Llama
# 3 70B, four micro-batches of 4,096 tokens, and ZeRO-1. Nothing in the sum is fitted. There is no
# such peak for FSDP here: keep more room for it until you have measured your own.

# %%
B200 = {  # GiB, docs/b200/b200_release_v1.2_summary.md
    Layout(dp=4, pp=2): 66.55,
    Layout(dp=4, tp=2): 60.68,
    Layout(dp=2, tp=4): 39.07,
    Layout(dp=1, tp=8): 28.29,
}


def check_published() -> None:
    misses = []
    for layout, measured in B200.items():
        parts = most_loaded(LLAMA_70B._replace(layers=12), layout, 4096, micro_batches=4)
        total = sum(parts.values()) / GiB
        axes = f"TP {layout.tp}, PP {layout.pp}, DP {layout.dp}"
        print0(f"{'':13}8 B200, {axes}: {total:.1f} of {measured:.1f} GiB")
        misses.append(abs(total / measured - 1))
    claim("8 B200: largest miss", 0, max(misses), atol=0.01, kind="theory")


# %% [markdown]
# ## What you should have seen
#
# 1. 33.5: 12 h + 4 x h/8 + 6 x 3.5 h. A token of 70B, 8,192 wide, leaves 268 KiB in each layer; if
#    the layer is recomputed, 2 h or 16 KiB.
# 2. By 1. Each rank has 16/4 = 4 bytes per parameter, and all 33.5 h of each of its own tokens.
# 3. No. It needs 197 GiB, of which 168 are activations, and FSDP divides none of them. With all
#    layers recomputed it needs 41 GiB. More GPUs would not help: each has a sequence of its own.
# 4. The same: half as many layers, and twice as many micro-batches in flight. (If a step had six
#    micro-batches, a first stage of eight could have only six in flight, and would hold 6/8.)
#
# **Try.** With one micro-batch in flight two rows fail: *8 stages / 4*, and the largest miss on
# B200, where two stages now seem too light. With activations divided by dp four rows fail: those of
# questions 2, 3 and 4, and B200's. FSDP alone then seems to fit, and a job planned so ends in its
# first forward pass: "CUDA out of memory".
#
# **Where it goes wrong in practice.** The first forward pass fails if activations were forgotten,
# the first `optimizer.step()` if the states were: Adam makes its moments there, not before. What
# grows later is something else, such as longer sequences (profiling/05_memory.py).
#
# **On GPUs** leave the room that section 5 leaves. A GPU that is nearly full gets slow before it
# fails: the allocator has to empty its cache and ask the driver again. And if tp exceeds the heads
# of keys and values (8 here), those are copied.
#
# **At a thousand GPUs** bytes per parameter are nearly free under FSDP, 1.2 GiB of 70B's 1,183, and
# what decides is bytes per token. For long sequences context parallelism divides them. Experts and
# adapters follow the same two questions: per parameter or per token, and which axis divides it.
# `course plan` has the general sum, and `course plan --validate` holds it against published runs.


# %%
def main() -> None:
    command_line()
    launch()
    device = setup()
    check_layer(device)
    check_fsdp(device)
    check_70b()
    check_published()
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
