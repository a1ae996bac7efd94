"""Train a GPT with FSDP2: memory, recomputation, FLOPs, MFU and precision, predicted
==================================================================================

**Question.** Before a training run you must know whether it fits, how fast it should be, and which
settings leave the result alone. Can all of that be predicted from the model's shape and the number
of ranks?

**Predict**, and write it down before you run. A GPT of L blocks, D wide, has P parameters and is
trained by Adam on n ranks, with a unit of `fully_shard` per block.

1. Masters, gradients and moments are float32. How many bytes per parameter does a rank hold at
   rest? And between two micro-batches, if every unit also keeps its bfloat16 copy whole?
2. How many bytes per token does a block keep for backward in bfloat16? Korthikanti et al. count
   34 D + 5 H T, with H heads. How many are left if it keeps only the results of its matrix
   products (selective recomputation), or only its input (full recomputation)?
3. Forward and backward are three times the FLOPs of forward. How many times are they with full
   recomputation? And the popular 6 P FLOPs per token: is it too many or too few for GPT-2 small
   ("124m"), and for 7 billion parameters?
4. Units chosen by size, units kept whole, selective and full recomputation, bfloat16: after three
   steps, which have the losses of one process? Which weights equal the default's to the last bit?
5. In float16, one element of the gradient overflows, in one rank's shard. How many ranks skip the
   step?
6. A model that knows nothing pays ln 256 = 5.55 nats per byte. What does the smallest GPT pay for
   text that it has not seen, after some seconds of training?

**Run.**

    torchrun --standalone --nproc-per-node=4 05_fsdp_transformer.py   # NCCL on 4 GPUs, else gloo
    python 05_fsdp_transformer.py                                     # the same, started for you
    python 05_fsdp_transformer.py --size 1b --compile inductor        # on GPUs: is the MFU 50%?
    python 05_fsdp_transformer.py --data FILE --recompute full --precision bfloat16 --units 20000

Not run on several GPUs.

**Try.** Delete the line of `addmm` in `KEPT_RESULTS`: what does selective recomputation keep now,
and what does it cost? In `check_bytes_at_rest` write `SGD` for `AdamW`: how many bytes are left?

**Before.** fsdp/01_fsdp_basics.py: units. fsdp/04_fsdp_refinements.py: dtypes, the meta device.

**Next.** exercises/22_recompute; then fsdp/06_fsdp_checkpoint.py: a training saved and resumed.
"""

import argparse
import ctypes
import gc
import json
import logging
import math
import os
import re
import signal
import sys
import sysconfig
import tempfile
import time
import warnings
import weakref
from collections import Counter
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import create_selective_checkpoint_contexts, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: B sequences, T tokens in each, D model width, V different tokens, L blocks, H heads of K
# features. P is the number of parameters, n the number of ranks, U the number of inner units.


class Shape(NamedTuple):
    """The sizes of a GPT."""

    L: int
    D: int
    T: int
    V: int
    heads: int

    @property
    def P(self) -> int:
        """Parameters: 12 D^2 + 13 D per block, embeddings, the last norm, an untied head."""
        per_block = 12 * self.D**2 + 13 * self.D
        return self.L * per_block + (2 * self.V + self.T + 2) * self.D


SIZES = {  # the shapes of GPT-2 and GPT-3; tokens are bytes, V is GPT-2's, so that costs are real
    "tiny": Shape(L=4, D=96, T=64, V=256, heads=4),
    "124m": Shape(L=12, D=768, T=1024, V=50_304, heads=12),
    "350m": Shape(L=24, D=1024, T=1024, V=50_304, heads=16),
    "1b": Shape(L=16, D=2048, T=2048, V=50_304, heads=16),
    "7b": Shape(L=32, D=4096, T=2048, V=50_304, heads=32),
}
PEAK_LR = {"tiny": 6e-3, "124m": 6e-4, "350m": 3e-4, "1b": 2e-4, "7b": 1.2e-4}  # GPT-3's, but tiny

# %% [markdown]
# ## 1. The recipe: recompute, compile, shard, in this order
#
# Three wrappers go around a block, and each must see what the one before did. (`block.compile()`
# will not do: it compiles the call with all hooks, so FSDP2's end up inside and break the graph.)
#
#     fully_shard(         gathers before and frees after, by hooks that no graph should hold
#       compile(           sees the block and its recomputation, and may fuse either
#         checkpoint(      drops what backward needs, and computes it again
#           block)))
#
# **Activation checkpointing** (Chen et al. 2016) frees what a block would keep for its backward
# pass, and computes it again when backward gets there. This course says **recomputation** for it,
# since checkpoints are also what one saves on disk. **Full** recomputation keeps the block's input
# and nothing else. **Selective** recomputation keeps some results and recomputes the cheap rest:
# here it keeps what matrix products and attention return.
#
# Which modules are units? One per block is the usual choice (fsdp/01_fsdp_basics.py). What FSDP1
# called the *size-based* policy knows nothing of blocks: it goes through the modules from the
# inside out, and makes a unit of each that has at least so many parameters left.

# %%
KEPT_RESULTS = [  # by selective recomputation
    torch.ops.aten.addmm.default,  # nn.Linear
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


class Recipe(NamedTuple):
    """How a model is prepared."""

    least: int | None = None  # parameters of a unit; None: a unit per block
    recompute: str = "none"  # or "selective" or "full"
    compiler: str | None = None  # a backend of torch.compile


def build(model: "GPT", mesh: DeviceMesh, recipe: Recipe, **options: object) -> "GPT":
    """Prepare a model for training, in place."""
    for i, block in enumerate(model.blocks):
        if recipe.recompute == "full":
            block = checkpoint_wrapper(block)
        elif recipe.recompute == "selective":
            block = checkpoint_wrapper(block, context_fn=keep_results)
        if recipe.compiler:
            block = torch.compile(block, backend=recipe.compiler)
        model.blocks[i] = block
    for unit in units_of(model, recipe.least):
        fully_shard(unit, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def keep_results() -> tuple:
    return create_selective_checkpoint_contexts(KEPT_RESULTS)


def units_of(model: "GPT", least: int | None) -> list[nn.Module]:
    """Return the inner units: the blocks, or every module that is large enough."""
    if least is None:
        return list(model.blocks)
    return [module for module in large_modules(model, least) if module is not model]


def large_modules(module: nn.Module, least: int) -> list[nn.Module]:
    """Return modules with at least so many parameters that no inner one has taken, inner first."""
    found = []
    for child in module.children():
        found += large_modules(child, least)
    taken = set()
    for unit in found:
        taken.update(unit.parameters())
    left = [p.numel() for p in module.parameters() if p not in taken]
    if sum(left) >= least and not isinstance(module, nn.ModuleList):
        found.append(module)  # a list has no forward pass that a hook could precede
    return found


def check_units(mesh: DeviceMesh, least: int = 20_000) -> None:
    shape = SIZES["tiny"]
    for name, threshold in {"by block": None, "by size": least}.items():
        model = build(new_gpt(mesh, shape), mesh, Recipe(threshold))
        units = units_of(model, threshold)
        whole = []  # elements, each time a unit begins to compute

        def note(*_: object, model: nn.Module = model, whole: list[int] = whole) -> None:
            whole.append(sum(p.numel() for p in model.parameters() if not isinstance(p, DTensor)))

        for unit in units:
            unit.register_forward_pre_hook(note)
        with LiveBytes() as live:
            mean_loss(model, random_bytes(mesh, RANK)).backward()
        inner = [elements_of(unit) for unit in units]
        U = shape.L if threshold is None else 3 * shape.L + 2  # qkv, up, down; token and head
        expected = shape.P - sum(inner) + max(inner)
        claim(f"{name}: units", U, len(units))
        claim(f"{name}: parameters ever whole, root + one unit", expected, max(whole))
        if WORLD_SIZE == 1:
            blocked(f"{name}: all-gathers", needs="2 ranks")
            continue
        gathers = sum(k for operation, k in live.calls.items() if "allgather" in operation)
        claim(f"{name}: all-gathers in a step, 2U + 1", 2 * U + 1, gathers)


# %% [markdown]
# ## 2. Bytes at rest: 16P/n, and when it is 18P
#
# Adam keeps two moments per parameter. With **master weights** and gradients in float32 that makes
# 16 bytes per parameter, of which every rank holds 1/n. Where does bfloat16 come in? FSDP2 casts
# the masters' shards as it gathers them, so a bfloat16 copy exists only while its unit is whole:
#
#     at rest           4 master + 4 gradient + 8 moments            16P/n
#     while computing   the same, and the root and a unit in bfloat16    + 2 (P_root + P_unit)
#     kept whole        the same, and every unit in bfloat16             + 2P
#
# The last row is `reshard_after_forward=False` between the forward and the backward pass of a
# second micro-batch. On one rank it is 18P, Megatron-LM's sum: there the bfloat16 parameters exist
# at all times, next to float32 masters and gradients.


# %%
def bytes_at_rest(P: int, n: int, copies: int = 0) -> float:
    """Return the bytes per rank of `P` parameters, and of bfloat16 copies of so many of them."""
    return 16 * P / n + 2 * copies


def check_bytes_at_rest(mesh: DeviceMesh) -> None:
    for L, D in ((1, 240), (2, 240), (3, 240)):
        shape = Shape(L, D, T=64, V=256, heads=4)
        x_BT = random_bytes(mesh, RANK)[:1, :3]  # two tokens: activations are next to nothing
        with LiveBytes() as live:
            model = new_gpt(mesh, shape)
            policy = policy_of("bfloat16")
            build(model, mesh, Recipe(), mp_policy=policy, reshard_after_forward=False)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            mean_loss(model, x_BT).backward()
            optimizer.step()
            live.settle()
            at_rest = mean_over_ranks(live.total())
            loss = mean_loss(model, x_BT)  # of the second micro-batch
            live.settle()
            kept = mean_over_ranks(live.total())
            loss.backward()

        P = shape.P
        name = f"{P / 1e6:.1f} million parameters"
        expected = bytes_at_rest(P, WORLD_SIZE) / P
        claim(f"{name}: bytes of each", expected, at_rest / P, atol=0.02 * expected, question=1)
        expected = bytes_at_rest(P, WORLD_SIZE, copies=P) / P
        claim(f"{name}, kept whole: bytes", expected, kept / P, atol=0.02 * expected, question=1)


# %% [markdown]
# ## 3. What a block keeps for backward, tensor by tensor
#
# At rest the optimizer rules; during a step the **activations** do. A linear layer needs its input
# to compute its weight's gradient, a norm needs its input and the statistics, attention needs q, k,
# v. Korthikanti et al. (2022) counted, for 16 bits, in bytes per token of a block:
#
#     Korthikanti et al.                       here, and the operation that made it
#     inputs of the two norms          4 D     4 D            the residual additions
#     inputs of qkv and of up          4 D     4 D, and 8     the norms; 8: statistics
#     q, k and v                       6 D     6 D            addmm, the product of qkv
#     softmax, its mask, their product 5 H T   0
#     input of the output product      2 D     2 D + 4 H      attention; 4 H: log-sum-exps
#     input of GeLU                    8 D     8 D            addmm, the product of up
#     input of down                    8 D     8 D            GeLU
#     masks of two dropouts            2 D     0              there is no dropout here
#     sum                     34 D + 5 H T     32 D + 4 H + 8
#
# The term that grows with T is gone. `scaled_dot_product_attention` is FlashAttention (Dao et al.
# 2022), on CPUs as well. It never holds the T x T scores of a head: it saves one log-sum-exp per
# row of them, and computes the scores again in backward. It is selective recomputation of what used
# to be most of the memory, built into one operation. Its output is saved twice, by itself and by
# the next product; but that is one tensor, counted once.
#
# Full recomputation leaves the block's input, 2 D. Selective recomputation as above keeps the input
# and the results of four products and of attention: 2 D + (6 + 2 + 8 + 2) D + 2 D = 22 D, which
# includes two results (of out and down) that backward never asks for.


# %%
def saved_per_token(shape: Shape, recompute: str, statistic: int = 2) -> dict[str, int]:
    """Return the bytes that a block keeps per token in 16 bits, by the operation that made them."""
    D = shape.D
    if recompute == "full":
        return {"add": 2 * D}
    attention = 2 * D + 4 * shape.heads
    if recompute == "selective":
        return {"add": 2 * D, "addmm": 18 * D, "attention": attention}
    norms = 4 * D + 4 * statistic  # two norms, a mean and a standard deviation each
    return {
        "add": 4 * D,
        "layer_norm": norms,
        "addmm": 14 * D,
        "attention": attention,
        "gelu": 8 * D,
    }


def check_activations(mesh: DeviceMesh) -> None:
    shape = SIZES["tiny"]
    theirs = 34 * shape.D + 5 * shape.heads * shape.T  # Korthikanti et al.
    for recompute in ("none", "selective", "full"):
        saved = after_forward(mesh, recompute, L=3) - after_forward(mesh, recompute, L=2)
        expected = saved_per_token(shape, recompute)
        slack = 0 if mesh.device_type == "cpu" else 0.05  # GPUs: float32 statistics, a seed
        if recompute == "none":
            for operation, size in expected.items():
                claim(
                    f"made by {operation}: bytes per token",
                    size,
                    saved[operation],
                    atol=slack * size,
                )
        total = sum(expected.values())
        counted = sum(saved.values())
        claim(f"{recompute}: bytes per token", total, counted, atol=slack * total, question=2)
        print0(f"{'':13}which is {counted / theirs:.0%} of Korthikanti's 34 D + 5 H T")


def after_forward(mesh: DeviceMesh, recompute: str, L: int) -> Counter:
    """Return the bytes per token that live after a forward pass, by what made them."""
    shape = SIZES["tiny"]._replace(L=L)
    recipe = Recipe(recompute=recompute)
    model = build(new_gpt(mesh, shape), mesh, recipe, mp_policy=policy_of("bfloat16"))
    x_BT = random_bytes(mesh, RANK)
    with LiveBytes() as live:
        loss = mean_loss(model, x_BT)
        live.settle()
        alive = live.by_operation()
    del loss
    tokens = x_BT[:, 1:].numel()
    return Counter({operation: size / tokens for operation, size in alive.items()})


# %% [markdown]
# The **peak** of a step is one of two moments. Either backward begins: all blocks' activations are
# there, and the head's three float32 arrays of V per token (log-probabilities, and two gradients).
# Or backward is in the middle of the last block: its activations are there again, if they were
# recomputed, with three gradients of 18 D bytes per token together. On top come the units that are
# whole, and a block's gradients before they are reduced.


# %%
def predicted_peak(shape: Shape, recompute: str, tokens: int, n: int = WORLD_SIZE) -> float:
    """Return the most bytes that a step in bfloat16 adds to masters and moments."""
    D = shape.D
    saved = sum(saved_per_token(shape, recompute).values())
    again = {"none": 0, "selective": 12 * D, "full": 30 * D + 4 * shape.heads}[recompute]
    P_block = 12 * D * D + 13 * D
    P_root = shape.P - shape.L * P_block
    moments = [tokens * (shape.L * saved + 4 * D + 12 * shape.V)]  # backward begins at the head
    for done in range(shape.L):  # blocks whose backward pass is over
        alive = tokens * ((shape.L - done) * saved + again + 18 * D)
        this_block = 2 * P_block + 2 * P_block  # weights and gradients
        moments.append(alive + this_block + done * 4 * P_block / n)
    moments.append(4 * shape.P / n)  # all gradients' shards
    return 2 * P_root + max(moments)


def check_peak(mesh: DeviceMesh, tokens: int = 512) -> None:
    shape = SIZES["tiny"]
    x_BT = random_bytes(mesh, RANK, tokens // shape.T)
    for recompute in ("none", "selective", "full"):
        recipe = Recipe(recompute=recompute)
        model = build(new_gpt(mesh, shape), mesh, recipe, mp_policy=policy_of("bfloat16"))
        with LiveBytes(find_peak=True) as live:
            mean_loss(model, x_BT).backward()
        expected = predicted_peak(shape, recompute, tokens)
        name = f"{recompute}: peak of a step, in MB"
        claim(name, expected / 1e6, live.peak / 1e6, atol=0.1 * expected / 1e6)


# %% [markdown]
# ## 4. FLOPs: what is useful, what is recomputed, and what 6 P leaves out
#
# A product of (tokens, a) by (a, b) takes 2ab FLOPs per token forward, and twice that backward:
# once for the input's gradient, once for the weight's. Forward, per token:
#
#     four products of a block     24 D^2     2 (3 + 1 + 4 + 4) D^2
#     attention of a block         4 D T      two products with T keys
#     the head                     2 D V
#
# **Model FLOPs** are three times the sum of these, whatever you recompute. Divided by time and by
# the GPU's peak they give **MFU** (model FLOPs utilization), which rewards nothing but progress.
# **Hardware FLOPs** are what really ran, and give **HFU**. Papers say that full recomputation runs
# the forward pass twice, 4 instead of 3, so that HFU/MFU = 4/3. In PyTorch it is less, for two
# reasons. The head is not recomputed. And a recomputation stops as soon as it has what backward
# needs (*early stop*): a block's last product, a third of its FLOPs, never runs again. On the other
# hand, FlashAttention's backward pass has five products for forward's two, since it computes the
# scores again; they are hardware FLOPs in any case.
#
# The rule of 6 P FLOPs per token ("6ND", Kaplan et al. 2020) takes every parameter for a factor of
# a product. The embeddings are not, and attention has FLOPs without parameters. So an MFU means
# little until its convention is named. For one and the same run:
#
#     counted per token                              "124m"    "7b"      used by, for example
#     6 P                                            1.15      0.96      scaling laws
#     products + 12 L D T: all T keys                1         1         here, torchtitan
#     products + 6 L D T: causality spares half      0.93      0.96      Megatron-LM since 2024
#
# The divisor has conventions, too. Datasheets print peaks with sparsity, which are twice those of
# dense products. And a run that multiplies in fp8 has another peak: an H100 that does 734 TFLOP/s
# in fp8 reaches 37% of its 1,979, and "74%" if they are divided by bfloat16's 989.


# %%
def forward_flops(shape: Shape) -> tuple[int, int, int]:
    """Return the FLOPs per token of the blocks' products, of attention and of the head."""
    return 24 * shape.L * shape.D**2, 4 * shape.L * shape.D * shape.T, 2 * shape.D * shape.V


def model_flops(shape: Shape) -> int:
    """Return the useful FLOPs per token of forward and backward."""
    return 3 * sum(forward_flops(shape))


def hardware_flops(shape: Shape, recompute: str, early_stop: bool = True) -> float:
    """Return the FLOPs per token that run, with FlashAttention."""
    products, attention, _ = forward_flops(shape)
    total = model_flops(shape) + attention / 2  # five products for two, not four
    if recompute == "full":
        total += products + attention
        if early_stop:
            total -= 8 * shape.L * shape.D**2
    return total


def check_flops(mesh: DeviceMesh) -> None:
    shape = SIZES["tiny"]
    useful = model_flops(shape)
    x_BT = random_bytes(mesh, RANK)
    cases = {"none": ("none", True), "selective": ("selective", True), "full": ("full", True)}
    cases["full, no early stop"] = ("full", False)
    for name, (recompute, early_stop) in cases.items():
        model = build(new_gpt(mesh, shape), mesh, Recipe(recompute=recompute))
        whole_way = nullcontext() if early_stop else set_checkpoint_early_stop(False)
        with whole_way, FlopCounterMode(display=False) as counter:
            mean_loss(model, x_BT).backward()
        counted = counter.get_total_flops() / x_BT[:, 1:].numel()
        expected = hardware_flops(shape, recompute, early_stop)
        claim(f"{name}: FLOPs / forward's", 3 * expected / useful, 3 * counted / useful, question=3)


def check_sizes() -> None:
    """Count parameters and FLOPs of real sizes on the meta device, where nothing is computed."""
    mine = {}  # what this rank counts: the ranks deal out the sizes
    for i, size in enumerate(("7b", "1b", "124m")):
        if i % WORLD_SIZE == RANK:
            mine[size] = count_on_meta(SIZES[size])
    counts = {}
    for of_rank in gather_objects(mine):
        counts |= of_rank
    for size in ("124m", "1b", "7b"):
        shape = SIZES[size]
        parameters, flops = counts[size]
        claim(f"{size}: parameters", shape.P, parameters, kind="theory")
        expected = 6 * shape.P / model_flops(shape)
        counted = 6 * parameters / flops
        claim(f"{size}: 6 P / FLOPs", expected, counted, question=3)
        hfu = hardware_flops(shape, "full") / model_flops(shape)
        gigabytes = []
        for recompute in ("none", "selective", "full"):
            peak = 12 * shape.P / 8 + predicted_peak(shape, recompute, 8 * shape.T, n=8)
            gigabytes.append(f"{recompute} {peak / 1e9:.1f}")
        print0(f"{'':13}peak on 8 GPUs, 8 sequences each, in GB: {', '.join(gigabytes)}")
        print0(f"{'':13}HFU/MFU of full recomputation: {hfu:.2f}")


def count_on_meta(shape: Shape) -> tuple[int, float]:
    """Return the parameters, and the FLOPs per token of forward and backward."""
    with torch.device("meta"):
        model = GPT(*shape)
        x_BT = torch.zeros(1, shape.T + 1, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        mean_loss(model, x_BT).backward()
    return elements_of(model), counter.get_total_flops() / shape.T


# %% [markdown]
# ## 5. Which choices keep the arithmetic
#
# Wrapping, freeing and recomputing change *when* a number exists, never what it is. The losses of
# three steps must be those of one process that sees all ranks' batches, but for the order of
# additions: in float64 a loss below 6 then differs by less than 2000 roundings of 2**-53, 1.3e-12.
# Recomputation does not even change the order: the weights are the same to the last bit. Two things
# break that, and neither is here: dropout, if a recomputation drew other masks (torch restores the
# generator's state for it), and a block that depends on state which changes meanwhile.
#
# bfloat16 is another matter. It keeps 8 bits of every product, so a loss moves in its third digit.
# That is what **float32 masters** and a **float32 reduction** are for: the noise of one step does
# not stay. A weight of 0.05 in bfloat16 has neighbors 0.00024 away, so an update of 0.0001 would
# be rounded off, in this step and in all that follow.

# %%
RECIPES = {  # name: (recipe, options of fully_shard)
    "by block": (Recipe(), {}),
    "by size": (Recipe(least=7_000), {}),
    "kept whole": (Recipe(), {"reshard_after_forward": False}),
    "selective": (Recipe(recompute="selective"), {}),
    "full": (Recipe(recompute="full"), {}),
}


def check_losses(mesh: DeviceMesh, compiler: str | None) -> None:
    shape = Shape(L=2, D=48, T=64, V=256, heads=4)
    whole = new_gpt(mesh, shape).double()
    everything = torch.cat([random_bytes(mesh, rank) for rank in range(WORLD_SIZE)])
    oracle = losses_of(whole, everything)
    recipes = dict(RECIPES)
    if compiler:
        recipes["compiled"] = (Recipe(recompute="full", compiler=compiler), {})
    weights = {}
    for name, (recipe, options) in recipes.items():
        model = build(new_gpt(mesh, shape).double(), mesh, recipe, **options)
        losses = losses_of(model, random_bytes(mesh, RANK))
        weights[name] = [p.full_tensor() for p in model.parameters()]
        error = largest_error(losses, oracle)
        slack = 6 * 2000 * 2**-53
        claim(f"{name}: losses, error", 0, error, atol=slack, question=4)
    for name in ("selective", "full"):
        pairs = zip(weights[name], weights["by block"], strict=True)
        different = sum((ours != theirs).sum().item() for ours, theirs in pairs)
        claim(f"{name}: weights unlike those of by block", 0, different, question=4)

    model = build(new_gpt(mesh, shape), mesh, Recipe(), mp_policy=policy_of("bfloat16"))
    error = largest_error(losses_of(model, random_bytes(mesh, RANK)).double(), oracle)
    claim("bfloat16: losses, error, at least", 1e-6, error, ">=", question=4)
    claim("bfloat16: losses, error, at most", 0.002, error, "<=", question=4)
    check_masters(mesh)


def losses_of(model: nn.Module, x_BT: torch.Tensor, steps: int = 3) -> torch.Tensor:
    """Train with SGD; return the loss of each step, averaged over the ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = mean_loss(model, x_BT)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return average(torch.stack(losses))


def check_masters(mesh: DeviceMesh, lr: float = 1e-4) -> None:
    """Let Adam move weights by `lr`, in float32 and in bfloat16; count those that stay."""
    for dtype in (torch.float32, torch.bfloat16):
        model = new_gpt(mesh, Shape(L=2, D=48, T=64, V=256, heads=4)).to(dtype)
        build(model, mesh, Recipe(), mp_policy=policy_of("bfloat16"))
        weight = model.blocks[0].up.weight
        before = weight.full_tensor().clone()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0, fused=True)
        mean_loss(model, random_bytes(mesh, RANK)).backward()
        optimizer.step()
        stayed = (weight.full_tensor() == before).double().mean()
        spacing = 2.0 ** (before.float().abs().log2().floor() - (7 if dtype.itemsize == 2 else 23))
        expected = (spacing / 2 > lr).double().mean()  # then the update is rounded off
        name = str(dtype).removeprefix("torch.")
        claim(f"{name} masters: share that an update misses", expected, stayed, atol=0.01)


# %% [markdown]
# ## 6. float16: scale the loss, and skip together
#
# float16 has more digits than bfloat16 and a narrower range: nothing above 65,504, little below
# 6e-8. Gradients are small, so the loss is **scaled** up before backward, and gradients are divided
# by the scale before the update. If the scale was too large, some gradient is infinite or NaN; then
# the step is **skipped** and the scale halved. After 2000 good steps it doubles.
#
# Sharding adds a trap. Each rank holds other elements of the gradient. The one overflow may lie in
# one rank's shard: if that rank skips and the others step, the model is torn apart. So the ranks
# must agree. FSDP1 needed a `ShardedGradScaler` for that. With FSDP2 the ordinary
# `torch.amp.GradScaler` sees gradients that are DTensors, and DTensor all-reduces the flag.


# %%
def check_overflow(mesh: DeviceMesh) -> None:
    shape = Shape(L=2, D=48, T=64, V=256, heads=4)
    model = build(new_gpt(mesh, shape), mesh, Recipe(), mp_policy=policy_of("float16"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(mesh.device_type, init_scale=2.0**26)  # far too large

    def step(plant: bool = False) -> tuple[int, int]:
        """Return how many elements of this rank's gradients overflow, and how many weights move."""
        before = [p.to_local().clone() for p in model.parameters()]
        scaler.scale(mean_loss(model, random_bytes(mesh, RANK))).backward()
        gradients = [p.grad.to_local() for p in model.parameters()]
        if plant and RANK == 0:
            gradients[0][0, 0] = math.inf
        overflows = sum((~grad.isfinite()).sum().item() for grad in gradients)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        pairs = zip(before, model.parameters(), strict=True)
        return overflows, sum((old != p.to_local()).sum().item() for old, p in pairs)

    skipped = 0
    while step()[1] == 0 and skipped < 20:
        skipped += 1
    claim("steps skipped until the scale fits, at least", 1, skipped, ">=")
    claim("the scale is halved by each", 2.0 ** (26 - skipped), scaler.get_scale())
    overflows, moved = step(plant=True)
    ranks = gather_objects((overflows > 0, moved == 0))
    claim("one overflow: ranks that hold it", 1, sum(bad for bad, _ in ranks))
    claim("one overflow: ranks that skip", WORLD_SIZE, sum(s for _, s in ranks), question=5)
    _, moved = step()
    claim("the next step: weights that move, of a rank", 1, moved, ">=")


# %% [markdown]
# ## 7. Training on real text
#
# The loop is the ordinary one. The learning rate **warms up** in a straight line, since Adam knows
# nothing of the gradients' sizes in the first steps, and then falls along half a **cosine** to a
# tenth. One tenth of the text is held out; the loss on it is the **validation loss**. The scaler
# does nothing unless the precision is float16.


# %%
def learning_rate(step: int, steps: int, peak: float) -> float:
    """Warm up over a tenth of the steps, then follow a cosine from the peak to a tenth of it."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - 1 - warm_up)
    return peak * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)


def train(
    model: "GPT", text_N: torch.Tensor, options: argparse.Namespace, steps: int
) -> tuple[list[float], float]:
    """Train on this rank's draws; return the losses, and the mean seconds of the later steps."""
    T = SIZES[options.size].T
    peak = PEAK_LR[options.size]
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), fused=True)
    scaler = torch.amp.GradScaler(text_N.device.type, enabled=options.precision == "float16")
    generator = torch.Generator().manual_seed(RANK)  # every rank draws another part of the text
    losses = []
    silent = None if RANK == 0 else True  # None: show progress if this is a terminal
    for step in tqdm(range(steps), "training", leave=False, disable=silent):
        if step == steps // 2:
            wait_for(text_N.device)
            start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak)
        loss = mean_loss(model, draw(text_N, options.batch, T, generator))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.detach())
    wait_for(text_N.device)
    seconds = (time.perf_counter() - start) / (steps - steps // 2)
    return average(torch.stack(losses).float()).tolist(), seconds


def draw(text_N: torch.Tensor, B: int, T: int, generator: torch.Generator) -> torch.Tensor:
    """Return B pieces of the text with T + 1 tokens each."""
    starts = torch.randint(len(text_N) - T, (B,), generator=generator).tolist()
    return torch.stack([text_N[start : start + T + 1] for start in starts]).long()


@torch.no_grad()
def validation_loss(model: "GPT", text_N: torch.Tensor, options: argparse.Namespace) -> float:
    """Return the mean loss on pieces of a text, the same whatever the number of ranks."""
    T = SIZES[options.size].T
    generator = torch.Generator().manual_seed(0)
    x_BT = draw(text_N, 32 * options.batch, T, generator)  # fewer differ by tenths of a nat
    losses = [mean_loss(model, piece_BT) for piece_BT in x_BT.split(options.batch)]
    return torch.stack(losses).mean().item()


# %% [markdown]
# Two bounds are claimed. The validation loss ends below the entropy of the text's bytes, so the
# model uses context, and above one bit per byte, so it does not see what it predicts. (For large
# sizes a few dozen steps are next to nothing: there it must end below ln 256.)


# %%
def check_training(mesh: DeviceMesh, options: argparse.Namespace) -> None:
    shape = SIZES[options.size]
    device = torch.device(mesh.device_type)
    tokens = options.batch * shape.T
    expected = 12 * shape.P / WORLD_SIZE + predicted_peak(shape, options.recompute, tokens)
    if device.type == "cuda" and expected > torch.cuda.get_device_properties(device).total_memory:
        blocked(f"{options.size}: training", needs=f"{expected / 1e9:.0f} GB per GPU, or more GPUs")
        return
    text = read_text(options.data)
    text_N = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    held_out = len(text_N) // 10
    if held_out <= shape.T:
        raise ValueError(f"--data needs over {10 * shape.T:,} bytes; it has {len(text_N):,}")
    model = new_gpt(mesh, shape)
    recipe = Recipe(options.units, options.recompute, options.compile)
    build(model, mesh, recipe, mp_policy=policy_of(options.precision))
    losses, seconds = train(model, text_N[:-held_out], options, options.steps)
    after = validation_loss(model, text_N[-held_out:], options)
    print_rates(shape, options, tokens / seconds, device)

    shares = [count / len(text) for count in Counter(text).values()]
    entropy = -sum(share * math.log(share) for share in shares)
    print0(f"{'':13}{len(text):,} bytes; loss {losses[0]:.2f} to {losses[-1]:.2f} nats per byte")
    most = entropy if options.size == "tiny" else math.log(256)
    claim("validation loss, at most", most, after, "<=", question=6, varies=True)
    if options.data is None:  # another text may be as predictable as it likes
        bit = math.log(2)
        claim("validation loss, and one bit per byte", bit, after, ">=", question=6, varies=True)


def print_rates(
    shape: Shape, options: argparse.Namespace, tokens_per_second: float, device: torch.device
) -> None:
    """Print tokens per second of all ranks, and this rank's share of its peak."""
    peak, name = peak_flops(device)
    useful = model_flops(shape) * tokens_per_second
    ran = hardware_flops(shape, options.recompute) * tokens_per_second
    every = tokens_per_second * WORLD_SIZE
    print0(f"{'':13}{every:,.0f} tokens/s, {useful / 1e12:.3g} TFLOP/s per rank")
    print0(f"{'':13}MFU {useful / peak:.1%}, HFU {ran / peak:.1%} of {peak / 1e12:.3g}: {name}")


# %% [markdown]
# ## 8. How it is measured
#
# `LiveBytes` watches every operation beneath torch's dispatcher. A tensor that an operation returns
# and that shares no memory with its inputs was *made* by it. What is still alive later is found by
# weak references to the memory itself, which see what autograd keeps in C++, and which no list of
# saved tensors shows for selective recomputation. Storages that FSDP2 has emptied count as nothing.
# To find what *one* block keeps, a model of three blocks is compared with one of two.


# %%
class LiveBytes(TorchDispatchMode):
    """Counts operations, and knows the memory that they have made and that is still alive."""

    NAMES = ("addmm", "attention", "layer_norm", "gelu", "add")

    def __init__(self, find_peak: bool = False) -> None:
        super().__init__()
        self.made: list[tuple[weakref.ref, str]] = []
        self.calls = Counter()
        self.find_peak = find_peak  # adds up all that lives after each operation
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its local tensors come by here in a moment
        out = func(*args, **(kwargs or {}))
        self.calls[str(func)] += 1
        given = {storage._cdata for storage in storages_of((args, kwargs))}
        for storage in storages_of(out):
            if storage._cdata not in given:
                self.made.append((weakref.ref(storage), str(func)))
        if self.find_peak:
            self.peak = max(self.peak, self.total())
        return out

    def alive(self) -> list[tuple[int, str]]:
        """Return the bytes of all that lives, and the operation that made it."""
        living = []
        sizes = []
        for reference, name in self.made:
            storage = reference()
            if storage is not None:
                living.append((reference, name))
                sizes.append((storage.nbytes(), name))
        self.made = living
        return sizes

    def total(self) -> int:
        return sum(size for size, _ in self.alive())

    def settle(self) -> None:
        """Leave gloo's threads the moment in which they let go of what they sent."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        time.sleep(0.1)

    def by_operation(self) -> Counter:
        """Return the bytes that live, summed for each operation of `NAMES` and for the others."""
        total = Counter()
        for size, name in self.alive():
            known = [short for short in self.NAMES if short in name]
            total[known[0] if known else name] += size
        return total


def storages_of(tree: object) -> list[torch.UntypedStorage]:
    """Return the storages of the tensors with at least one dimension in a nested structure."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [tensor.untyped_storage() for tensor in tensors if tensor.dim() > 0]


# %% [markdown]
# FLOPs are counted by torch's `FlopCounterMode`: for the tiny model while it computes, for the real
# sizes on the meta device, where attention is written out as two products, and its backward pass as
# four. (These counters' hooks return views of tensors, of which FSDP2 warns.) The **oracle** is
# one process: the same weights, and the batches of all ranks.


# %%
def largest_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference between two tensors; inf if one is no number."""
    return (ours - expected).abs().max().nan_to_num(nan=torch.inf).item()


def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


def new_gpt(mesh: DeviceMesh, shape: Shape) -> "GPT":
    torch.manual_seed(0)  # the same weights on every rank
    with torch.device(mesh.device_type):
        return GPT(*shape)


def random_bytes(mesh: DeviceMesh, rank: int, B: int = 2) -> torch.Tensor:
    """Return a rank's batch of random bytes, (B, 65)."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(256, (B, 65), generator=generator).to(mesh.device_type)


def mean_loss(model: nn.Module, x_BT: torch.Tensor) -> torch.Tensor:
    """Return the mean loss, in at least float32, of predicting each byte from those before it."""
    logits_BTV = model(x_BT[:, :-1])
    if logits_BTV.dtype.itemsize < 4:
        logits_BTV = logits_BTV.float()
    return F.cross_entropy(logits_BTV.flatten(0, 1), x_BT[:, 1:].flatten())


def average(x: torch.Tensor) -> torch.Tensor:
    """Return the mean of `x` over the ranks."""
    total = x.clone()
    dist.all_reduce(total)
    return total / WORLD_SIZE


def mean_over_ranks(value: float) -> float:
    return sum(gather_objects(value)) / WORLD_SIZE


def elements_of(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def policy_of(precision: str) -> MixedPrecisionPolicy:
    """Compute in this dtype; keep masters, gradients and reductions in float32."""
    return MixedPrecisionPolicy(getattr(torch, precision), torch.float32)


def read_text(path: str | None) -> bytes:
    """Return up to 2 MB of the file at `path`, or of the standard library's sources."""
    if path:
        return Path(path).read_bytes()[:2_000_000]
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    return b"".join(source.read_bytes() for source in sources)[:2_000_000]


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# %% [markdown]
# The peak of a GPU is its datasheet's, for dense bfloat16. A CPU's is measured: one product of two
# square matrices in float32, while the other ranks do the same. A share of that is no MFU in the
# usual sense, and nothing is claimed of it.

# %%
PEAKS = {"T4": 65e12, "V100": 125e12, "L4": 121e12, "A10": 125e12, "A10G": 70e12, "L40S": 362e12}
PEAKS |= {"4090": 165e12, "A100": 312e12, "H100": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12}
PEAKS |= {"H200": 989e12, "GH200": 989e12, "B200": 2250e12, "B300": 2250e12, "GB200": 2500e12}
PEAKS |= {"GB300": 2500e12}  # dense FLOP/s in bfloat16; of T4 and V100, which lack it, in float16


def datasheet_of(gpu: str) -> str | None:
    """Return the longest name in PEAKS that occurs in a GPU's name as a word."""
    names = [name for name in PEAKS if re.search(rf"\b{name}\b", gpu)]
    return max(names, key=len, default=None)


def peak_flops(device: torch.device) -> tuple[float, str]:
    """Return the FLOP/s that this device should reach, and where the number comes from."""
    if device.type == "cuda":
        gpu = torch.cuda.get_device_name()
        if name := datasheet_of(gpu):
            return PEAKS[name], f"{name}'s datasheet, dense 16-bit products"
        return math.nan, f"no datasheet known for {gpu}"
    matrix = torch.ones(512, 512)
    matrix @ matrix
    start = time.perf_counter()
    for _ in range(5):
        matrix @ matrix
    wait_for(device)
    seconds = (time.perf_counter() - start) / 5
    return 2 * 512**3 / seconds, "matrix products, measured here"


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
# ## 9. On GPUs: every setting's tokens per second, MFU, HFU and memory
#
# The same model as in section 7, a few steps for each setting, in bfloat16. The peak of memory is
# the allocator's, next to the formulas of sections 2 and 3.


# %%
def compare_on_gpus(mesh: DeviceMesh, options: argparse.Namespace) -> None:
    if mesh.device_type == "cpu":
        blocked("peak memory, MFU and HFU of each setting", needs="1 GPU")
        return
    if not torch.cuda.is_bf16_supported(False):  # in hardware, not emulated
        blocked("peak memory, MFU and HFU of each setting", needs="1 GPU with bfloat16")
        return
    shape = SIZES[options.size]
    text_N = torch.randint(256, (100_000,), device="cuda", dtype=torch.uint8)
    tokens = options.batch * shape.T
    total = torch.cuda.get_device_properties(text_N.device).total_memory
    settings = {name: Recipe(None, name, options.compile) for name in ("full", "selective", "none")}
    settings["by size"] = Recipe(shape.D**2, "none", options.compile)
    settings["compiled"] = Recipe(None, "none", options.compile or "inductor")
    head = f"{'setting':10} {'tokens/s':>12} {'MFU':>6} {'HFU':>6} {'peak GB':>8} {'formula':>8}"
    print0(f"{'':13}{head}")
    for name, recipe in settings.items():
        expected = 12 * shape.P / WORLD_SIZE + predicted_peak(shape, recipe.recompute, tokens)
        if expected > 0.95 * total:
            blocked(f"{name}: a step", needs=f"{expected / 1e9:.0f} GB per GPU")
            continue
        gc.collect()  # of the model before: FSDP's hooks and it hold each other
        torch.cuda.empty_cache()
        model = build(new_gpt(mesh, shape), mesh, recipe, mp_policy=policy_of("bfloat16"))
        torch.cuda.reset_peak_memory_stats()
        _, seconds = train(model, text_N, options, steps=8)
        held = torch.cuda.max_memory_allocated()
        peak, _ = peak_flops(text_N.device)
        mfu = model_flops(shape) * tokens / seconds / peak
        hfu = hardware_flops(shape, recipe.recompute) * tokens / seconds / peak
        row = f"{name:10} {tokens / seconds * WORLD_SIZE:12,.0f} {mfu:6.1%} {hfu:6.1%}"
        print0(f"{'':13}{row} {held / 1e9:8.2f} {expected / 1e9:8.2f}")
        if name in ("full", "selective", "none"):
            claim(f"{name}: peak memory / predicted", 1, held / expected, atol=0.15)
        if name == "compiled" and options.size in ("1b", "7b") and peak > 0:
            claim_mfu(mfu)
        del model


def claim_mfu(mfu: float) -> None:
    """Claim it where the links between the GPUs are not what decides: NVLink, or one GPU."""
    gathered = gather_speed() if WORLD_SIZE > 1 else math.inf
    if gathered < 100e9:
        print0(f"{'':13}an all-gather brings {gathered / 1e9:.0f} GB/s: the links decide")
        blocked("compiled: MFU, at least", needs="1 GPU, or NVLink between them")
        return
    claim("compiled: MFU, at least", 0.4, mfu, ">=", timed=True)


def gather_speed(nbytes: int = 2**26) -> float:
    """Return the bytes per second that a rank receives in an all-gather of `nbytes` from each."""
    shard = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    whole = shard.new_empty(nbytes * WORLD_SIZE)
    dist.all_gather_into_tensor(whole, shard)  # connects
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(5):
        dist.all_gather_into_tensor(whole, shard)
    end.record()
    end.synchronize()
    seconds = start.elapsed_time(end) / 5e3
    return min(gather_objects(nbytes * (WORLD_SIZE - 1) / seconds))


# %% [markdown]
# ## What you should have seen
#
# 1. 16/n bytes, 4 on four ranks; 16/n + 2 with all units kept whole, 6 on four ranks and 18 on one.
#    bfloat16 adds nothing that stays. It does not save anything at rest either: what it halves is
#    the gathers, the units that are whole, and the activations.
# 2. 32 D + 4 H + 8, that is 3,096 bytes. Korthikanti's formula has 2 D more for masks of dropout,
#    and 5 H T that FlashAttention never stores. Here that makes 68%; with GPT-3's 96 heads of 128
#    features and 2,048 tokens, 5 H T is 80 D, and what is left is 28%. Selective recomputation
#    leaves 69% of ours, full recomputation 6%. The *peak* does not fall as far: the logits stay,
#    and so does one block's whole work. Of 4 blocks that is much, of 32 it is little.
# 3. 3.71 times forward. Without any recomputation it is 3.05 already, since FlashAttention computes
#    scores twice; without early stop it would be 4.00: one more attention and no second head. For
#    the real sizes HFU/MFU is 1.20 to 1.24. 6 P is 15% too many for "124m", a quarter of which is
#    the embedding (its head is untied here, so it has 163 million parameters), and 4.5% too few for
#    7 billion, where attention outweighs the embedding.
# 4. All but bfloat16 have one process's losses, to about 1e-15. The recomputed ones have the
#    default's weights to the last bit. bfloat16's losses differ in the fourth digit: too much for
#    a comparison of implementations, too little to hurt training, as long as the masters are
#    float32. With masters in bfloat16, an update of 0.0001 misses 78% of the weights.
# 5. All of them, though one rank alone holds the overflow. A job in which a single rank skips does
#    not fail: its shards drift apart by one update, and the loss shows it late or never.
# 6. About 2.8, below the bytes' entropy of 3.1. The training loss ends near it: after so few steps
#    there is nothing yet to overfit.
#
# **By size or by block?** With units of 20,000 parameters and more, half as much is ever whole, and
# a step takes 29 all-gathers instead of 9. They also cut through blocks, whose norms and output
# products end up in the root, which is always whole. Take blocks, and a unit for a large embedding.
#
# **Try.** Without `addmm` the four products run again: selective recomputation keeps 4 D + 4 H
# bytes, and a step takes 3.6 times forward's FLOPs. That is a good choice where T is large, since
# attention is the expensive part then. With SGD two moments are gone: 8/n bytes are left.
#
# **On GPUs** section 9 prints what you came for. n does not occur in section 3: FSDP shards states,
# not activations. When these are what does not fit, recompute, take fewer sequences per rank and
# more micro-batches, or split the activations themselves (parallelism/06_tensor_parallel.py). For
# Llama 3 405B on 16,384 H100s an MFU of 41% was published (Grattafiori et al. 2024); one GPU, where
# nothing is exposed, should do better: aim at 50%. If yours is below 30%, look for small batches, a
# missing `--compile` and exposed gathers (fsdp/04_fsdp_refinements.py), in this order.
#
# **Where it bites.** `expandable_segments:True` in `PYTORCH_ALLOC_CONF` spares fragmentation, which
# no formula here knows. The logits of a large vocabulary are 12 V bytes per token: at V = 50,304
# more than nine blocks of D = 2048 keep. And an activation that something still refers to, such as
# a list of losses without `.detach()`, keeps the graph of its step alive.


# %%
def main() -> None:
    options = command_line(
        {
            "--size": {"choices": SIZES, "help": "shape of the GPT (tiny; on GPUs 1b)"},
            "--data": {"metavar": "PATH", "help": "text to train on (Python's own sources)"},
            "--steps": {"type": int, "default": 20, "help": "training steps (20)"},
            "--batch": {"type": int, "default": 6, "help": "sequences per rank and step (6)"},
            "--units": {"type": int, "metavar": "N", "help": "units of N parameters, not blocks"},
            "--recompute": {"choices": ["none", "selective", "full"], "default": "none"},
            "--precision": {"choices": ["float32", "bfloat16", "float16"]},
            "--compile": {"metavar": "BACKEND", "help": "of torch.compile: inductor, aot_eager"},
        }
    )
    launch()
    if options.batch < 1:
        refuse(f"a rank needs at least one sequence; got --batch {options.batch}; leave it out")
    if options.steps < 2:
        refuse(f"training takes at least two steps; got --steps {options.steps}; leave it out")
    device = setup()
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # counters make it
    on_gpus = device.type == "cuda"
    options.size = options.size or ("1b" if on_gpus else "tiny")
    half = "bfloat16" if on_gpus and torch.cuda.is_bf16_supported(False) else "float16"
    options.precision = options.precision or (half if on_gpus else "float32")
    mesh = init_device_mesh(device.type, (WORLD_SIZE,), mesh_dim_names=("shard",))
    check_units(mesh)
    check_bytes_at_rest(mesh)
    check_activations(mesh)
    check_peak(mesh)
    check_flops(mesh)
    check_sizes()
    check_losses(mesh, options.compile)
    check_overflow(mesh)
    check_training(mesh, options)
    compare_on_gpus(mesh, options)
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
