"""Planning memory: will a training run fit on its GPUs?
=====================================================

**Question.** A model, a number of GPUs and a way to split one over the other: how many bytes does
the most loaded GPU hold, and of what?

**Predict**, and write it down before you run:

1. How many parameters has Llama 3 70B: 80 layers, 8,192 wide, 8 heads of keys and values for 64 of
   queries, an MLP of three matrices 28,672 wide, 128,256 tokens, no tied tables?
2. A GPT's block, h wide, trains in bfloat16 with FlashAttention. How many bytes does it keep per
   token for the backward pass, in units of h? If the matrix of scores were stored, as before
   FlashAttention, what share of all would it be (heads x tokens / h = 16, as in GPT-3)?
3. Four pipeline stages follow 1F1B, with eight micro-batches. The whole model would keep A bytes of
   activations for one micro-batch. How many A does the first stage hold at most? And the last?
4. Llama 3 70B on 64 H100 of 80 GB: FSDP over all of them, one sequence of 8,192 tokens per GPU. All
   that is kept per parameter is 18.5 GiB per GPU. Does the step fit without recomputation?
5. Peaks of memory were measured on 8 B200 under four layouts. The sum below has no fitted constant.
   By how much does it miss the worst of them: 1%, 5% or 20%?

**Run.**

    torchrun --standalone --nproc-per-node=4 16_planning_memory.py    # NCCL on 4 GPUs, else gloo
    python 16_planning_memory.py                                      # the same, started for you

Not run on several GPUs. Rows marked t hold the sum against what others have published.

**Try.** In `memory` let `in_flight` be 1: which claims fail? In the same function divide the
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
from torch.utils.checkpoint import checkpoint

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

GiB = 2**30
ROOM = 66.8 * GiB  # to plan for on an H100: 85% of what CUDA leaves of its 80 GB (see the end)

# %% [markdown]
# ## 1. A sum of six parts, each divided by axes of its own
#
# Everything on a GPU that trains belongs to one of six parts. P is the number of parameters, h the
# width of the model, V its vocabulary. A *token* is one of the micro-batch that a GPU works on.
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
# The first three are 18 P bytes, whatever the batch is. That is how Megatron trains. ZeRO's paper
# counts 16 P, with gradients in bfloat16; torch's FSDP has 16 P as well, 4 + 4 + 8, with weights in
# float32 that need no copy.
#
# **dp** ranks each train a copy of the model on other sequences; ZeRO keeps only 1/dp of the three
# parts on each of them, one part more with every stage (FSDP is stage 3). **tp** ranks share each
# layer, and by sequence parallelism each token between the layers as well. So tp divides
# everything. **pp** stages hold 1/pp of the layers each. That divides the first three parts, and
# not the activations: 1F1B has pp micro-batches in flight on the first stage, and pp x 1/pp is 1.
#
# So there are two kinds of bytes. Those per parameter can be divided by every axis. Those per token
# yield to tp, to a smaller micro-batch, and to recomputation. No number of replicas or stages
# helps.
#
# Two parts need a closer look before they can be added up: P, and the 34 h.

# %% [markdown]
# ## 2. P: what config.json says
#
# A Llama's layer has four matrices in its attention and three in its MLP. The queries and the
# output are h x h. Keys and values have fewer heads, so their matrices are h x kv. The MLP (SwiGLU)
# computes `down(silu(gate(x)) * up(x))`, with three matrices of h x ff. Outside of the layers there
# are two tables of V x h: the embedding and the head.


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


# %% [markdown]
# ## 3. The 34 h: what a token leaves for the backward pass
#
# The backward pass of a matrix product needs the product's input again. A norm and an activation
# function need their inputs, attention its queries, keys, values and output. In bfloat16 that is
# two bytes per element. Go through a layer from top to bottom, and count per token. The left column
# is the GPT of Korthikanti et al. (2022), with two matrices of h x 4h in its MLP and with dropout,
# whose masks take one byte per element:
#
#     operation                what it keeps                      GPT          Llama
#     norm                     its input                          2 h          2 h
#     queries, keys, values    the norm's output, once for all    2 h          2 h
#     attention                q, k, v                            6 h          2 h + 4 kv
#     output matrix            attention's output                 2 h          2 h
#     dropout                  a mask                               h
#     norm                     its input                          2 h          2 h
#     up (and gate)            the norm's output                  2 h          2 h
#     GELU or SwiGLU           its input, or its two inputs       8 h          4 ff
#     down                     its input                          8 h          2 ff
#     dropout                  a mask                               h
#                                                                34 h          12 h + 4 kv + 6 ff
#
# For Llama 3 70B, where kv is h/8 and ff is 3.5 h, the right column is 33.5 h. So "34 h" holds for
# both. A micro-batch of b sequences of s tokens leaves 34 s b h bytes per layer.
#
# Missing in it is the matrix of scores, s x s for each of a heads. Stored, it takes 5 a s bytes per
# token: two for the softmax, one for a mask of dropout, two for the product of both. FlashAttention
# computes the scores twice and stores none of them. SwiGLU is assumed to be one kernel. As three
# separate operations it also keeps silu(gate), 2 ff more.
#
# **Recomputation** of whole layers keeps a layer's input alone, 2 h, and runs its forward pass once
# more when its backward pass comes. Then all 34 h exist, but of one layer at a time.


# %%
def saved_per_token(model: Model) -> int:
    """Bytes that one token leaves in one layer for the backward pass."""
    return 12 * model.hidden + 4 * model.kv + 6 * model.ff


# %% [markdown]
# ## 4. The sum
#
# Here is the table of section 1 as code, for one stage of the pipeline. ZeRO comes first:


# %%
class Layout(NamedTuple):
    """How a model is split over dp x tp x pp GPUs, and how it runs there."""

    dp: int = 1
    tp: int = 1  # with sequence parallelism
    pp: int = 1  # must divide the layers
    zero: int = 1
    recompute: bool = False  # all layers
    micro_batch: int = 1  # sequences


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
# Then the sum. The first stage holds the embedding, and the last one the head and the logits. A
# logit is kept in bfloat16, and its softmax in float32, which makes 6 bytes.
#
# Three things exist for a moment, all of one layer. Its gradients are computed in bfloat16, 2 bytes
# each, before they are added to the float32 ones. ZeRO-3 gathers the whole weights of this layer
# and, ahead of time, of the next one, 2 bytes each. With recomputation, the layer's activations are
# there again.


# %%
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
# ## 5. One case by hand: Llama 3 70B on 64 H100
#
# Sequences have 8,192 tokens, a micro-batch is one of them, and a step has 128. Take tp = 8 inside
# each node, pp = 4, and the dp = 2 that remain, with ZeRO-1. On a GPU of the first stage:
#
#     P               20 layers x 855.7 million + 1,050.7 million, / 8      2.27 billion
#     weights          2 P                                                   4.2 GiB
#     gradients        4 P                                                   8.5 GiB
#     states          12 P / 2                                              12.7 GiB
#     activations     8,192 / 8 tokens x 33.5 h x 20 layers x 4 in flight   20.9 GiB
#     one layer        2 x 855.7 million / 8                                 0.2 GiB
#                                                                           46.5 GiB of 66.8
#
# It fits. FSDP over all 64, with recomputation, in the same way: 18 P / 64 of 70.6 billion are 18.5
# GiB; 8,192 tokens keep 2 h in each of 80 layers, 10.0, and 6 V for the logits, 5.9; for a moment
# there are 6 bytes per parameter of a layer, 4.8, and its 33.5 h per token, 2.1. That makes 41.2.
#
# Back to the pipeline: a GPU of the last stage has one micro-batch in flight instead of four, and
# 0.7 GiB of logits: 31.5 GiB. The run prints these two layouts and five others:
#
#     layout                 weights  gradients  states  activations  logits  one layer     sum
#     DDP 64                   131.4      262.8   788.5        167.5     5.9        1.6  1357.7  no
#     FSDP 64                    2.1        4.1    12.3        167.5     5.9        4.8   196.6  no
#     FSDP 64, recompute         2.1        4.1    12.3         10.0     5.9        6.9    41.2
#     TP 8, DP 8                16.4       32.9    12.3         20.9     0.7        0.2    83.5  no
#     TP 8, PP 2, DP 4           8.2       16.4    12.3         20.9     0.0        0.2    58.1
#     TP 8, PP 4, DP 2           4.2        8.5    12.7         20.9     0.0        0.2    46.5
#     TP 8, PP 8                 2.2        4.5    13.4         20.9     0.0        0.2    41.3
#
# ("One layer" of FSDP is (2 + 4) x 855.7 million bytes: its gradients, and two layers' weights. The
# head, a unit of its own with 1,051 million, makes it 0.4 GiB more for a moment, which we leave
# out. All rows count Megatron's 18 P. torch's FSDP, with 16 P, has 16.4 GiB of the first three
# instead of 18.5, and that changes no answer here.)
#
# Read it by columns. FSDP shrinks the first three and leaves the fourth as it is; recomputation
# does the reverse. From PP 2 to PP 8 the activations do not move.
#
# That is how to go on when a plan does not fit. **Find the largest part, and turn a knob that
# divides that part.** Too much per parameter: ZeRO first, for it costs the least; then tp inside
# the NVLink domain, then pp. Too much per token: a smaller micro-batch, then tp, then recomputation
# of whole layers, a third more of the computing. Too many logits: tp. What each knob costs in time
# is the next lesson.

# %%
LAYOUTS = {  # 64 GPUs
    "DDP 64": Layout(dp=64, zero=0),
    "FSDP 64": Layout(dp=64, zero=3),
    "FSDP 64, recompute": Layout(dp=64, zero=3, recompute=True),
    "TP 8, DP 8": Layout(tp=8, dp=8),
    "TP 8, PP 2, DP 4": Layout(tp=8, pp=2, dp=4),
    "TP 8, PP 4, DP 2": Layout(tp=8, pp=4, dp=2),
    "TP 8, PP 8": Layout(tp=8, pp=8),
}


def check_70b() -> None:
    """Print the table above; claim what fits of FSDP alone."""
    heads = "weights  gradients  states  activations  logits  one layer"
    print0(f"\n  {'GiB per GPU':21}{heads}     sum")
    total = {}
    for name, layout in LAYOUTS.items():
        parts = most_loaded(LLAMA_70B, layout, 8192, micro_batches=128 // layout.dp)
        total[name] = sum(parts.values()) / GiB
        cells = "  ".join(f"{parts[head] / GiB:{len(head)}.1f}" for head in heads.split("  "))
        no = "no" if total[name] * GiB > ROOM else ""
        print0(f"  {name:21}{cells}  {total[name]:6.1f}  {no}".rstrip())
    room = ROOM / GiB
    alone = total["FSDP 64"]
    claim("70B, FSDP over 64 H100: GiB per GPU", room, alone, ">=", question=4, kind="theory")
    again = total["FSDP 64, recompute"]
    claim("the same, all layers recomputed: GiB", room, again, "<=", question=4, kind="theory")
    claim("the same, by hand: GiB", 41.2, again, atol=0.05, kind="theory")
    pipeline = total["TP 8, PP 4, DP 2"]
    claim("TP 8, PP 4, DP 2, by hand: GiB", 46.5, pipeline, atol=0.05, kind="theory")


# %% [markdown]
# ## 6. How it is measured
#
# **Parameters** are counted in torch's own modules, on the meta device, where a tensor has a shape
# and takes no memory.


# %%
def counted_by_torch(model: Model) -> int:
    """Parameters of a Llama that is made of torch's modules."""
    h = model.hidden
    linear = partial(nn.Linear, bias=False)
    with torch.device("meta"):
        modules = [nn.Embedding(model.vocab, h), nn.RMSNorm(h), linear(h, model.vocab)]
        for _ in range(model.layers):
            modules += [nn.RMSNorm(h), linear(h, h), linear(h, model.kv), linear(h, model.kv)]
            modules += [linear(h, h), nn.RMSNorm(h)]
            modules += [linear(h, model.ff), linear(h, model.ff), linear(model.ff, h)]
    return sum(parameter.numel() for parameter in nn.ModuleList(modules).parameters())


# %% [markdown]
# **Activations** are counted by the hook that autograd calls for each tensor that it saves. A
# storage counts once, however many operations keep it, and the weights do not count. The block is a
# GPT's, small but real, in bfloat16. `torch.native_dropout` keeps a mask of one byte per element,
# as dropout does on a GPU; on a CPU `F.dropout` would keep two. Besides the table's entries only a
# few numbers per token are kept, for each norm a mean and a deviation and for each head a sum. They
# set the slack.

# %%
WIDTH = 128
HEADS = 4
TOKENS = 16 * WIDTH // HEADS  # so that heads x tokens / width is 16, as in GPT-3


class GptBlock(nn.Module):
    """A GPT's block with dropout, on one sequence: (T, h) -> (T, h)."""

    def __init__(self, stores_scores: bool = False) -> None:
        super().__init__()
        self.stores_scores = stores_scores
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        qkv_T3HK = self.qkv(self.norm1(x_TD)).view(1, TOKENS, 3, HEADS, -1)
        y_HTK = self.attention(*qkv_T3HK.permute(2, 0, 3, 1, 4))
        y_TD = self.out(y_HTK.transpose(1, 2).reshape(TOKENS, WIDTH))
        x_TD = x_TD + dropout(y_TD)
        return x_TD + dropout(self.down(F.gelu(self.up(self.norm2(x_TD)))))

    def attention(
        self, q_HTK: torch.Tensor, k_HTK: torch.Tensor, v_HTK: torch.Tensor
    ) -> torch.Tensor:
        if not self.stores_scores:
            return F.scaled_dot_product_attention(q_HTK, k_HTK, v_HTK, is_causal=True)
        future_TT = q_HTK.new_full((TOKENS, TOKENS), -math.inf).triu(1)
        scores_HTT = q_HTK @ k_HTK.transpose(-1, -2) / math.sqrt(WIDTH // HEADS) + future_TT
        return dropout(scores_HTT.softmax(-1)) @ v_HTK


def dropout(x: torch.Tensor) -> torch.Tensor:
    return torch.native_dropout(x, 0.1, True)[0]


# %% [markdown]
# The counter, and what it finds of one block in each way: with FlashAttention, with the scores
# stored, and recomputed.


# %%
def forward_counted(layers: nn.Module, recompute: bool = False) -> tuple[torch.Tensor, int]:
    """Return the output on random tokens, and the bytes that autograd keeps for backward."""
    weights = {weight.untyped_storage().data_ptr() for weight in layers.parameters()}
    kept = {}  # by address

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x_TD = next(layers.parameters()).new_empty(TOKENS, WIDTH).normal_()
    run = partial(checkpoint, layers, use_reentrant=False) if recompute else layers
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        y_TD = run(x_TD)
    return y_TD, sum(kept.values())


def check_blocks(device: torch.device) -> None:
    """Claim what a block keeps per token, in units of h."""
    block = GptBlock().to(device, torch.bfloat16)
    with_scores = GptBlock(stores_scores=True).to(device, torch.bfloat16)
    _, flash = forward_counted(block)
    _, stored = forward_counted(with_scores)
    _, again = forward_counted(block, recompute=True)
    unit = TOKENS * WIDTH
    slack = (4 * HEADS + 4 * 4) / WIDTH  # in float32: a sum per head; of two norms two numbers each
    claim("bytes kept per token / h", 34, flash / unit, atol=slack, question=2)
    share = 1 - flash / stored
    claim("scores stored: their share of all", 80 / 114, share, atol=0.005, question=2)
    claim("recomputed: bytes kept per token / h", 2, again / unit)
    if device.type == "cpu":
        blocked("the same, by the GPU's allocator", needs="1 GPU")
        return
    before = torch.cuda.memory_allocated()
    kept = forward_counted(block)  # its output keeps what backward needs
    grown = torch.cuda.memory_allocated() - before - 2 * unit  # and is itself no part of it
    del kept
    claim("bytes that the GPU's allocator keeps / h", 34, grown / unit, atol=1.5)


# %% [markdown]
# **Micro-batches in flight.** Every rank is one stage of two blocks. It follows 1F1B's order and
# keeps count of what its micro-batches hold. No messages are sent: the bytes are the same whatever
# arrives, so each stage makes up its own inputs and gradients. What a stage holds is compared with
# what `memory` says of such a model.


# %%
def most_held(layers: nn.Module, ahead: int, micro_batches: int) -> int:
    """The most bytes that micro-batches hold which wait for their backward pass.

    1F1B on one stage: `ahead` forward passes, then one forward and one backward in turn.
    """
    waiting = []
    most = 0
    for _ in range(micro_batches):
        waiting.append(forward_counted(layers))
        most = max(most, sum(kept for _, kept in waiting))
        if len(waiting) > ahead:
            y_TD, _ = waiting.pop(0)
            y_TD.sum().backward()
    for y_TD, _ in waiting:
        y_TD.sum().backward()
    return most


def check_pipeline(device: torch.device) -> None:
    """Claim what the first and the last stage hold, against all stages' layers once."""
    layers = nn.Sequential(GptBlock(), GptBlock()).to(device, torch.bfloat16)
    _, of_a_stage = forward_counted(layers)
    held = most_held(layers, ahead=WORLD_SIZE - 1 - RANK, micro_batches=2 * WORLD_SIZE)
    share = held / (WORLD_SIZE * of_a_stage)
    claim("first stage holds / whole model keeps", 1, share, question=3, rank=0)
    last = WORLD_SIZE - 1
    claim("last stage holds / whole model keeps", 1 / WORLD_SIZE, share, question=3, rank=last)
    model = Model(layers=2 * WORLD_SIZE, hidden=WIDTH, kv=WIDTH, ff=3 * WIDTH, vocab=0)  # 34 h
    expected = memory(model, Layout(pp=WORLD_SIZE), TOKENS, 2 * WORLD_SIZE, stage=RANK)
    slack = (4 * HEADS + 4 * 4) / WIDTH / 34
    claim("each stage: held / the sum's activations", 1, held / expected["activations"], atol=slack)


# %% [markdown]
# **Published figures**: rows of kind theory. Korthikanti et al. print the activations of a GPU of
# the first stage, for GPTs of 22 billion and of a trillion parameters with tp = 8. And SimuMax
# (Moore Threads, version 1.2) has the peak that Megatron allocated on each of 8 B200, for 12 layers
# of Llama 3 70B, four micro-batches of 4,096 tokens, and ZeRO-1.

# %%
KORTHIKANTI = {  # name: layers, h, stages, sequences per micro-batch, GiB
    "22B": (48, 6144, 1, 4, 9.56),
    "1T": (128, 25600, 64, 1, 26.56),
}
B200 = {  # GiB, docs/b200/b200_release_v1.2_summary.md
    Layout(dp=4, pp=2): 66.55,
    Layout(dp=4, tp=2): 60.68,
    Layout(dp=2, tp=4): 39.07,
    Layout(dp=1, tp=8): 28.29,
}


def check_published() -> None:
    for name, (layers, h, pp, sequences, published) in KORTHIKANTI.items():
        gpt = Model(layers, h, kv=h, ff=3 * h, vocab=51200)  # 12 h + 4 h + 18 h: the GPT's 34 h
        layout = Layout(tp=8, pp=pp, micro_batch=sequences)
        ours = memory(gpt, layout, 2048, micro_batches=4 * pp, stage=0)["activations"] / GiB
        claim(f"GPT {name}: GiB of activations", published, ours, atol=0.005, kind="theory")
    misses = []
    for layout, measured in B200.items():
        parts = most_loaded(LLAMA_70B._replace(layers=12), layout, 4096, micro_batches=4)
        total = sum(parts.values()) / GiB
        axes = f"TP {layout.tp}, PP {layout.pp}, DP {layout.dp}"
        print0(f"{'':13}8 B200, {axes}: {total:.1f} of {measured:.1f} GiB")
        misses.append(abs(total / measured - 1))
    claim("8 B200: largest miss", 0, max(misses), atol=0.01, question=5, kind="theory")


# %% [markdown]
# ## What you should have seen
#
# 1. 70,553,706,496. Of these, 56.4 billion are in the MLPs, 12.1 in attention, and 2.1 in the two
#    tables. At 18 bytes each that is 1.27 TB before the first token arrives.
# 2. 34 h, the left column of the table. The scores would add 5 x 16 h = 80 h, which is 70% of 114
#    h. Their share grows with the sequence: that is why long contexts waited for a kernel that does
#    not store them.
# 3. The first stage holds A: four micro-batches in flight, each of a quarter of the layers. The
#    last stage holds A/4. However many stages there are, the first one holds A.
# 4. No. It needs 197 GiB, of which 168 are activations, and FSDP divides none of them. With all
#    layers recomputed it needs 41 GiB. More GPUs would not help: each has a sequence of its own.
# 5. 1%. The sum is below each of the four peaks, by a quarter to half of a GiB: workspaces of
#    cuBLAS, and the ends of the allocator's segments.
#
# **Try.** With one micro-batch in flight a first stage seems as light as a last one; the GPT of a
# trillion and the B200 with two stages do not agree. With activations divided by dp, FSDP alone
# seems to fit, and a job planned so ends in its first forward pass: "CUDA out of memory".
#
# **Where it goes wrong in practice.** The first forward pass fails if activations were forgotten,
# the first `optimizer.step()` if the states were: Adam makes its moments there, not before. What
# grows later is something else, such as longer sequences (profiling/05_memory.py).
#
# **On GPUs** the driver shows more than this sum, which is what tensors take. CUDA and NCCL need
# about a GiB of an H100's 79.6. And the allocator *reserves* more than it has allocated, as freed
# pieces do not always fit what comes next: on the H100 rows of the Ultra-Scale Playbook, a fifth of
# the activations more under tensor parallelism. So plan to 85%, 66.8 GiB. In the same table, rows
# that were fuller ran three times slower: the allocator had to empty its cache and ask again.
#
# **What is not in it.** Experts are divided by an axis of their own. Context parallelism divides
# tokens as tp does. Multi-head latent attention keeps small ranks instead of keys. Layers that
# predict further tokens have a second head. LoRA has gradients and states of its adapters alone.
# Interleaved schedules hold up to half more micro-batches. Offloading moves states to the host.
# Stages may be uneven. `course plan` has the general sum, and `course plan --validate` shows how it
# does on thousands of published runs, those that crashed included.


# %%
def main() -> None:
    command_line()
    launch()
    device = setup()
    ours = parameters(LLAMA_70B) / 1e6
    counted = counted_by_torch(LLAMA_70B) / 1e6
    claim("parameters of Llama 3 70B, in millions", ours, counted, question=1)
    check_blocks(device)
    check_pipeline(device)
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
