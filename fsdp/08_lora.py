"""LoRA on FSDP2: fine-tuning with adapters from scratch, the frozen base sharded
==============================================================================

**Question.** LoRA freezes a model and trains a small change of its weights instead. What does that
save under FSDP2, in memory and in communication, what does it not save, and is the merged model the
one that was trained?

**Predict**, and write it down before you run. A GPT of P parameters in 4 blocks is adapted: each
linear layer in a block, d_in to d_out features, gets an adapter A (r, d_in), B (d_out, r) of matrix
rank r = 4. All adapters together have Q parameters. There are n ranks.

1. How many parameters does one adapter have? The blocks are 64 wide, their linear layers lead from
   64 to 192, 64 to 64, 64 to 256 and 256 to 64 features: how large is Q?
2. B starts at zero, A does not. How many elements of the output change when the adapters are added?
   Which of A and B has a gradient in the first step? What would be learned if A were zero as well?
3. How many bytes per rank do weights, gradients and Adam's moments take: under full fine-tuning in
   float32, with adapters on a frozen base in float32, and on one in bfloat16?
4. A step of full fine-tuning hands 1 P to reduce-scatters and nearly 2 P to all-gathers. What
   does a step with adapters hand to each?
5. Let r be 1, so that A has a single row. fully_shard deals out rows. How many elements of such an
   A does a reduce-scatter carry?
6. A unit holds frozen bfloat16 weights next to float32 adapters. Does fully_shard take that? And
   adapters of two dtypes?
7. A base that has learned Python's source code is tuned on English prose. Of what full fine-tuning
   gains on new prose, how much do the adapters reach: next to nothing, most, or all and more?
8. What is the matrix rank of a layer's change after training: with adapters, and under full
   fine-tuning?
9. By how much does merging, W + (alpha / r) B A, change the outputs in float64? And if W is
   bfloat16 and the change is a thousandth of it, what share of W's elements stay as they were?

**Run.**

    torchrun --standalone --nproc-per-node=4 08_lora.py    # NCCL on 4 GPUs, else gloo
    python 08_lora.py                                      # the same, started for you
    python 08_lora.py --data PATH                          # tune on your own text

Not run on several GPUs.

**Try.** In `add_adapters` leave out `model.requires_grad_(False)`: what notices, and with which
error does it end? In `fine_tune` make the optimizer before `shard_model`: what fails?

**Before.** fsdp/01_fsdp_basics.py: units, all-gathers, reduce-scatters.

**Next.** exercises/20_lora; then fsdp/09_inference.py: the trained model answers
"""

import argparse
import copy
import ctypes
import gc
import json
import logging
import math
import os
import signal
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: B sequences, T tokens in each, D model width, V different tokens, L blocks, H heads of K
# features, M elements of all adapted weights. P counts the parameters of the base, Q those of all
# adapters; there are n ranks and U blocks.

CONTEXT = 64  # tokens that the GPT sees at once; a batch holds one more, which is only predicted
ADAPTED = ("qkv", "out", "up", "down")  # the linear layers of a block
MATRIX_RANK = 4
ALPHA = 16

# %% [markdown]
# ## 1. The adapter: a frozen W, and a change of low rank next to it
#
# Fine-tuning moves each weight matrix from W to W + dW. **LoRA** (low-rank adaptation, Hu et al.
# 2021) writes the change as a product of two thin matrices, and trains only these:
#
#     y = W x + (alpha / r) B A x           W  (d_out, d_in)   frozen
#                                           A  (r, d_in)       random at first
#         d_in            d_out             B  (d_out, r)      zero at first
#        +----+   W      +----+
#     x  |    |--------->|    | + --> y     d_out d_in  elements of W, which need no gradient,
#        |    |          |    | |                       no moments and no float32 copy
#        |    |   A   +-+|  B | |           r (d_in + d_out)  elements that are trained
#        |    |------>|r|---->|-+
#        +----+       +-+
#
# With B at zero the product is zero, so training starts exactly at the base model. The factor
# alpha / r keeps the change about as large when r is changed. Our layer has no dropout, which many
# implementations put before A.
#
# Adapters stay in float32 where the base is in bfloat16. They are what is trained, and many updates
# of a trained weight are smaller than bfloat16 resolves.


# %%
class LoRALinear(nn.Module):
    """A linear layer with a trained change of its weight: W + alpha / r B A, (..., d_out)."""

    def __init__(self, base: nn.Linear, r: int, alpha: float) -> None:
        super().__init__()
        self.base = base
        self.scale = alpha / r
        weight = base.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.lora_A = nn.Parameter(weight.new_empty(r, base.in_features, dtype=dtype))
        self.lora_B = nn.Parameter(weight.new_zeros(base.out_features, r, dtype=dtype))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))  # as nn.Linear initializes itself

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scale * F.linear(F.linear(x, self.lora_A), self.lora_B)

    def change(self) -> torch.Tensor:
        """Return the change of the weight: (d_out, d_in)."""
        return self.scale * self.lora_B.detach() @ self.lora_A.detach()


def add_adapters(model: nn.Module, names: tuple[str, ...], r: int, alpha: float) -> nn.Module:
    """Freeze the model, and put an adapter around each linear layer that has one of the names."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in names and isinstance(child, nn.Linear):
                setattr(parent, name, LoRALinear(child, r, alpha))
    return model


def merge_adapters(model: nn.Module) -> nn.Module:
    """Add each change to its weight, and put the plain linear layer back."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LoRALinear):
                child.base.weight.data += child.change().to(child.base.weight.dtype)
                setattr(parent, name, child.base)
    return model


# %% [markdown]
# What zeros do: the gradient of B is that of the output times A x, the gradient of A is B times
# something. With B = 0 only B moves in the first step, and A follows from the second step on. With
# A = 0 as well, both gradients are zero, and stay so for ever.


# %%
def check_adapters(mesh: DeviceMesh) -> None:
    base = new_gpt(mesh)
    model = add_adapters(copy.deepcopy(base), ADAPTED, MATRIX_RANK, ALPHA)
    Q = 0
    for layer in linear_layers(base.blocks):
        Q += MATRIX_RANK * (layer.in_features + layer.out_features)
    claim("Q: the sum of r (d_in + d_out)", Q, elements_of(trained(model)), question=1)
    print0(f"{'':13}which is {Q / elements_of(base.parameters()):.1%} of P\n")

    x_BT = random_bytes(mesh, RANK)
    with torch.no_grad():
        differing = (model(x_BT[:, :-1]) != base(x_BT[:, :-1])).sum()
    claim("outputs that differ once adapters are there", 0, differing, question=2)
    mean_loss(model, x_BT).backward()
    layers = adapters_of(model)
    claim("first step: elements of A with a gradient", 0, with_gradient(layers, "A"), question=2)
    elements = elements_of([layer.lora_B for layer in layers])
    claim("first step: elements of B with one, all", elements, with_gradient(layers, "B"))

    for layer in adapters_of(model):
        nn.init.zeros_(layer.lora_A)
    before = [parameter.detach().clone() for parameter in trained(model)]
    optimizer = torch.optim.AdamW(trained(model))
    for _ in range(3):
        optimizer.zero_grad()
        mean_loss(model, x_BT).backward()
        optimizer.step()
    pairs = zip(trained(model), before, strict=True)
    moved = sum((parameter != start).sum() for parameter, start in pairs)
    claim("A = B = 0: elements moved in 3 steps", 0, moved, question=2)


def with_gradient(layers: list[LoRALinear], matrix: str) -> int:
    """Return how many elements of all A, or of all B, have a gradient other than zero."""
    parameters = [getattr(layer, f"lora_{matrix}") for layer in layers]
    return sum(int(parameter.grad.count_nonzero()) for parameter in parameters)


# %% [markdown]
# ## 2. Sharded: what a rank holds at rest
#
# Freeze and adapt first, then shard, then make the optimizer. Nothing else is new: `fully_shard`
# shards frozen parameters like all others, and looks at `requires_grad` in each backward pass.
#
#     add_adapters(model, ADAPTED, r, alpha)
#     for block in model.blocks:
#         fully_shard(block)                 # its frozen weights and its adapters are one unit
#     fully_shard(model)
#     optimizer = torch.optim.AdamW(trained(model))
#
# Full fine-tuning in float32 takes 16 bytes per parameter: weight, gradient and two moments. A
# frozen parameter has a weight and nothing else:
#
#                               base           adapters
#     full fine-tuning         16 P / n
#     LoRA, base in float32     4 P / n     + 16 Q / n
#     LoRA, base in bfloat16    2 P / n     + 16 Q / n
#
# These are exact where n divides each tensor's rows; elsewhere shards are padded to equal length.
# **QLoRA** (Dettmers et al. 2023) goes on to 4 bits for the frozen weights, half a byte and some
# scales per parameter, and dequantizes each layer while it computes.


# %%
def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def shard_model(model: nn.Module, mesh: DeviceMesh, **options: object) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


MIXED = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)}
SETTINGS = {  # name: (dtype of the base, matrix rank of the adapters, options of fully_shard)
    "full": (torch.float32, None, {}),
    "LoRA": (torch.float32, MATRIX_RANK, {}),
    "LoRA, bfloat16": (torch.bfloat16, MATRIX_RANK, MIXED),
}


def new_model(mesh: DeviceMesh, name: str) -> nn.Module:
    """Return the unsharded model of a setting."""
    dtype, r, _ = SETTINGS[name]
    model = new_gpt(mesh, dtype)
    return model if r is None else add_adapters(model, ADAPTED, r, ALPHA)


def check_bytes(mesh: DeviceMesh) -> None:
    base = list(new_gpt(mesh).parameters())
    adapters = trained(new_model(mesh, "LoRA"))
    expected = {
        "full": on_this_rank(base, padded=8, exact=8),
        "LoRA": on_this_rank(base, padded=4) + on_this_rank(adapters, padded=8, exact=8),
        "LoRA, bfloat16": on_this_rank(base, padded=2) + on_this_rank(adapters, padded=8, exact=8),
    }
    per_parameter = {}
    for name, (_, _, options) in SETTINGS.items():
        model = shard_model(new_model(mesh, name), mesh, **options)
        optimizer = torch.optim.AdamW(trained(model))
        mean_loss(model, random_bytes(mesh, RANK)).backward()
        optimizer.step()
        held = bytes_held(model, optimizer)
        claim(f"{name}: bytes on this rank", expected[name], held, question=3)
        per_parameter[name] = WORLD_SIZE * held / elements_of(base)
    for name, count in per_parameter.items():
        print0(f"{'':13}{name:16} {'#' * round(3 * count):49} {count:.2f} P / n")
    print0()


def on_this_rank(parameters: list[nn.Parameter], padded: int, exact: int = 0) -> int:
    """Return the bytes of this rank's shards: `padded` per element that is stored with padding, as
    weights and gradients are, and `exact` per element without, as moments are.
    """
    total = 0
    for parameter in parameters:
        row = parameter[0].numel()
        total += padded * math.ceil(len(parameter) / WORLD_SIZE) * row
        total += exact * rows_held(len(parameter)) * row
    return total


# %% [markdown]
# ## 3. What travels: the gradients do not, the base still does
#
# A frozen weight W has no gradient of its own. But the gradient of the layer's *input* is W^T times
# that of its output, so backward needs W, and gathers it once more:
#
#                              all-gathers                   reduce-scatters
#     full fine-tuning     2U + 1   2 P_in + P_root           U + 1   P
#     LoRA                 2U + 1   2 (P_in + Q) + P_root     U       Q
#
# P_in lies in the blocks, P_root outside. The root has nothing to train, so it reduces nothing. Of
# the 3 P of FSDP two thirds remain, unless the frozen base is whole on every rank: where 2 P bytes
# fit, adapters under DDP hand over only Q elements, to an all-reduce.


# %%
def check_elements(mesh: DeviceMesh) -> None:
    if WORLD_SIZE == 1:
        blocked("elements gathered and reduce-scattered", needs="2 ranks")
        return
    for name, (_, _, options) in SETTINGS.items():
        whole = new_model(mesh, name)
        P_in = padded_elements(whole.blocks.parameters())  # of an adapted model: with Q
        P_root = padded_elements(whole.parameters()) - P_in
        Q = padded_elements(trained(whole))  # under full fine-tuning this is P
        U = len(whole.blocks)
        model = shard_model(new_model(mesh, name), mesh, **options)
        with CountedCommunication() as counted:
            mean_loss(model, random_bytes(mesh, RANK)).backward()
        gathered = counted.elements("all_gather")
        scattered = counted.elements("reduce_scatter")
        claim(f"{name}: elements gathered", 2 * P_in + P_root, gathered, question=4)
        claim(f"{name}: elements reduce-scattered", Q, scattered, question=4)
        scatters = len(counted.calls("reduce_scatter"))
        claim(f"{name}: reduce-scatters", U + (name == "full"), scatters)
        sent = sum(call.nbytes for call in counted.log) / 1e6
        print0(f"{'':13}{sent:.2f} MB handed over in one step\n")


# %% [markdown]
# ## 4. Two hazards: thin matrices, and dtypes
#
# `fully_shard` deals out **rows**, and all ranks' shards must be equally long. A has only r rows:
# on n > r ranks it is padded to n, and the padding is communicated and stored. So with r = 8 on 64
# GPUs, 56 of them hold nothing of any A, and each A travels 8 times as large as it is. The option
# `shard_placement_fn` says by which dimension a parameter is dealt out; then n must divide it.


# %%
def by_columns_if_thin(parameter: nn.Parameter) -> Shard | None:
    """Shard a matrix with fewer rows than ranks by its columns; None: by rows, as always."""
    thin = parameter.dim() == 2 and len(parameter) < WORLD_SIZE
    return Shard(1) if thin else None


def check_thin_matrices(mesh: DeviceMesh) -> None:
    if WORLD_SIZE == 1:
        blocked("r = 1: elements of A reduce-scattered", needs="2 ranks")
        return
    whole = add_adapters(new_gpt(mesh), ADAPTED, 1, ALPHA)
    in_A = sum(layer.base.in_features for layer in adapters_of(whole))
    in_B = padded_elements([layer.lora_B for layer in adapters_of(whole)])
    cases = {"rows": (None, WORLD_SIZE * in_A), "columns": (by_columns_if_thin, in_A)}
    for name, (placement, expected) in cases.items():
        if name == "columns" and CONTEXT % WORLD_SIZE != 0:
            blocked("r = 1, by columns: A reduce-scattered", needs="ranks that divide 64")
            continue
        model = add_adapters(new_gpt(mesh), ADAPTED, 1, ALPHA)
        shard_model(model, mesh, shard_placement_fn=placement)
        with CountedCommunication() as counted:
            mean_loss(model, random_bytes(mesh, RANK)).backward()
        scattered = counted.elements("reduce_scatter") - in_B
        claim(f"r = 1, by {name}: A reduce-scattered", expected, scattered, question=5)


# %% [markdown]
# The second hazard is an error message. All *trained* parameters of a unit must have one dtype,
# since their gradients travel in one buffer; frozen ones may have any other. FSDP2 checks this in
# the first forward pass, on all ranks alike. (FSDP1 joined a unit's parameters into one flat
# tensor; by default all of them had to be trained, or none.) With a frozen base in bfloat16,
# `param_dtype=bfloat16` lets both compute, and travel, in bfloat16.


# %%
def check_dtypes(mesh: DeviceMesh) -> None:
    frozen = new_model(mesh, "LoRA, bfloat16")
    claim("frozen bfloat16, trained float32: errors", 0, errors_in(frozen, mesh), question=6)
    mixed = new_model(mesh, "LoRA, bfloat16")
    for layer in adapters_of(mixed)[::4]:  # one in each block
        layer.lora_A.data = layer.lora_A.data.bfloat16()
    claim("trained in two dtypes: errors", 1, errors_in(mixed, mesh), question=6)


def errors_in(model: nn.Module, mesh: DeviceMesh) -> int:
    """Shard the model and take one step; return 1 if FSDP2 refuses its dtypes."""
    shard_model(model, mesh, **MIXED)
    try:
        mean_loss(model, random_bytes(mesh, RANK)).backward()
    except AssertionError as error:
        if "uniform original parameter dtype" not in str(error):
            raise
        print0(f"{'':13}AssertionError: {str(error).partition(' but')[0]}")
        return 1
    return 0


# %% [markdown]
# ## 5. Training is that of one process
#
# Three steps of SGD in float64 must end where one process ends on the batches of all ranks, and
# their losses, averaged over the ranks, must be its losses. Allow each gradient 2000 roundings of
# 2**-53 of terms below 1: three steps of lr = 0.1 then move a weight by at most 3 x 0.1 x 2000 x
# 2**-53 = 7e-14. A loss lies below 8, so 2000 roundings of it are at most 8 x 2000 x 2**-53 =
# 1.8e-12. Gradients that were added up, not averaged, are off by 1e6 times as much and more, and so
# is a single rank's loss.


# %%
def take_steps(model: nn.Module, x_BT: torch.Tensor) -> torch.Tensor:
    """Take three steps of SGD; return their losses."""
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = mean_loss(model, x_BT)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def check_against_one_process(mesh: DeviceMesh) -> None:
    whole = add_adapters(new_gpt(mesh, torch.float64), ADAPTED, MATRIX_RANK, ALPHA)
    model = shard_model(copy.deepcopy(whole), mesh)
    batches = [random_bytes(mesh, rank) for rank in range(WORLD_SIZE)]
    expected = take_steps(whole, torch.cat(batches))
    losses = take_steps(model, batches[RANK])
    dist.all_reduce(losses)
    error = largest_error(losses / WORLD_SIZE, expected)
    claim("losses of 3 steps, error", 0, error, atol=8 * 2000 * 2**-53)
    pairs = zip(whole_parameters(model).values(), whole.parameters(), strict=True)
    error = max(largest_error(ours, expected) for ours, expected in pairs)
    claim("weights after 3 steps, error", 0, error, atol=3 * 0.1 * 2000 * 2**-53)


# %% [markdown]
# ## 6. Fine-tuning a model that has learned something
#
# The base learns the source code of Python's standard library, every rank on its own part of each
# batch. Then it is tuned on prose, the text behind Python's `help("topics")`: once with all weights
# trained, once with adapters. What counts is the loss on text that was held out, the last tenth.
#
# The adapters must reach a third of what full fine-tuning gains. There is no upper bound: in a few
# steps, on text that neither has seen, and at a learning rate of its own, LoRA may do as well or
# better.


# %%
def fine_tune(
    model: nn.Module, mesh: DeviceMesh, bytes_N: torch.Tensor, steps: int, lr: float
) -> nn.Module:
    """Shard the model, train what is not frozen, and return it."""
    shard_model(model, mesh)
    optimizer = torch.optim.AdamW(trained(model), lr=lr, fused=True)
    generator = torch.Generator().manual_seed(RANK)  # every rank draws another part of the text
    silent = None if RANK == 0 else True  # None: show progress if this is a terminal
    for step in tqdm(range(steps), "training", leave=False, disable=silent):
        optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / 5)  # warm-up
        x_BT = draw(bytes_N, math.ceil(24 / WORLD_SIZE), generator)
        mean_loss(model, x_BT.to(mesh.device_type)).backward()
        nn.utils.clip_grad_norm_(trained(model), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def check_fine_tuning(mesh: DeviceMesh, options: argparse.Namespace) -> dict[str, dict]:
    """Return the base's weights, and those after tuning all weights and the adapters."""
    code, prose = read_texts(options.data)
    base = fine_tune(new_gpt(mesh), mesh, code.train_N, 2 * options.steps, lr=6e-3)
    weights = {"base": whole_parameters(base)}
    losses = {"base": [held_out_loss(base, text, mesh) for text in (code, prose)]}
    for name, r, lr in (("full", None, 3e-3), ("LoRA", MATRIX_RANK, 1e-2)):
        model = new_gpt(mesh)
        model.load_state_dict(weights["base"])
        if r is not None:
            add_adapters(model, ADAPTED, r, ALPHA)
        fine_tune(model, mesh, prose.train_N, options.steps, lr)
        weights[name] = whole_parameters(model)
        losses[name] = [held_out_loss(model, text, mesh) for text in (code, prose)]

    print0(f"{'':13}held out, nats per byte{'code':>10}{'prose':>10}")
    for name, (on_code, on_prose) in losses.items():
        print0(f"{'':13}{name:23}{on_code:10.3f}{on_prose:10.3f}")
    check_gains(losses, weights, own_data=options.data is not None)
    return weights


def check_gains(losses: dict[str, list[float]], weights: dict[str, dict], own_data: bool) -> None:
    changed = 0
    for name, weight in weights["base"].items():
        changed += (frozen_weight(weights["LoRA"], name) != weight).sum()
    claim("frozen weights that training has changed", 0, changed)
    if own_data:
        return  # which may gain much or nothing
    gain = losses["base"][1] - losses["full"][1]
    claim("full fine-tuning's gain in nats, at least", 0.1, gain, ">=", varies=True)
    reached = losses["base"][1] - losses["LoRA"][1]
    text = "gain of the adapters, at least a third of it"
    claim(text, gain / 3, reached, ">=", question=7, varies=True)
    print0(f"{'':13}{reached:.2f} of {gain:.2f} nats per byte")


# %% [markdown]
# ## 7. What was learned, and merging it
#
# A product of a (d_out, r) and an (r, d_in) matrix has a matrix rank of r at most. So an adapter
# can move W in r directions only, however long it trains.
#
# To **merge** is to add the change to W. The merged model has no adapters and costs nothing more
# than the base. In exact arithmetic it is the same function, (W + s B A) x = W x + s B A x, so in
# float64 the two may differ by rounding alone: 2000 roundings of numbers below 32, 7e-12.
#
# In bfloat16 it is not that simple. Its 8 bits leave a gap between neighboring numbers, of 1/256
# to 1/128 of their size. A change smaller than half the gap rounds back to W, and is lost. How
# large the change is depends on the training; so the one that was learned is scaled to a tenth, a
# hundredth and a thousandth of W, by their norms. (The sum itself is rounded to float32 first: one
# element in 2**16 may fall on the other side of a middle. 1e-4 is allowed.)
#
# An adapter that stays next to its base loses nothing. That also lets one base serve many adapters
# at once, each sequence with its own (S-LoRA, Sheng et al. 2023).


# %%
def check_change(mesh: DeviceMesh, weights: dict[str, dict]) -> None:
    tuned = add_adapters(new_gpt(mesh), ADAPTED, MATRIX_RANK, ALPHA)
    tuned.load_state_dict(weights["LoRA"])
    tuned.double()
    merged = merge_adapters(copy.deepcopy(tuned))
    ranks = []
    for name, layer in tuned.named_modules():
        if isinstance(layer, LoRALinear):
            ranks.append(matrix_rank(merged.get_submodule(name).weight - layer.base.weight))
    furthest = max(ranks, key=lambda rank: abs(rank - MATRIX_RANK))
    claim("LoRA: matrix rank of what merging changed", MATRIX_RANK, furthest, question=8)
    ranks = []
    for name, weight in weights["base"].items():
        if weight.dim() == 2 and name.startswith("blocks"):
            ranks.append(matrix_rank(weights["full"][name].double() - weight.double()))
    claim("full: smallest matrix rank of a change", 64, min(ranks), question=8)

    x_BT = random_bytes(mesh, RANK)[:, :-1]
    error = largest_error(merged(x_BT), tuned(x_BT))
    slack = 2000 * 32 * 2**-53
    claim("merged in float64: outputs, error", 0, error, atol=slack, question=9)
    check_merged_in_bfloat16(tuned)


def check_merged_in_bfloat16(tuned: nn.Module) -> None:
    """Claim how much of W stays as it is, for changes of three sizes."""
    layers = adapters_of(tuned)
    W_M = torch.cat([layer.base.weight.detach().flatten() for layer in layers]).cpu().bfloat16()
    change_M = torch.cat([layer.change().flatten() for layer in layers]).cpu().float()
    for size in (1 / 10, 1 / 100, 1 / 1000):
        change_M *= size * W_M.float().norm() / change_M.norm()
        towards_M = torch.where(change_M > 0, math.inf, -math.inf).bfloat16()
        gap_M = (torch.nextafter(W_M, towards_M).float() - W_M.float()).abs()
        expected = (change_M.abs() < gap_M / 2).float().mean()
        stays = ((W_M.float() + change_M).bfloat16() == W_M).float().mean()
        text = f"in bfloat16, a change of {size:g} W: share that stays"
        claim(text, expected, stays, atol=1e-4, question=9)


def matrix_rank(change: torch.Tensor) -> int:
    return int(torch.linalg.matrix_rank(change))


# %% [markdown]
# ## 8. How it is measured
#
# The **oracle** is one process: the same adapted model, whole, on the batches of all ranks.
#
# `CountedCommunication` records every collective as it is handed to the backend. A call counts with
# its input or its output, whichever is larger; that is not what then crosses a wire.
#
# `bytes_held` adds up the *storages* behind a model's parameters, their gradients and the
# optimizer's moments, each once. So the padding counts, and a small view counts with all the memory
# that it keeps.


# %%
class Call(NamedTuple):
    """One collective, send or receive of this rank, as it was handed to the process group."""

    operation: str  # "all_reduce", "all_gather", "reduce_scatter", "send", ...
    elements: int  # of its input or its output, whichever is larger
    nbytes: int  # of the same
    ranks: tuple[int, ...]  # of the group
    peer: int | None


class CountedCommunication(TorchDispatchMode):
    """Records this rank's communication in `log`, beneath torch's dispatcher: DDP's and FSDP's too.

    It sees what is handed to a backend, not what the backend then sends.
    """

    NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier")
    NAMES += ("send", "recv", "reduce", "gather", "scatter")  # "_allgather_base_" is an all_gather

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Call] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its local tensors come by here in a moment
        if func.namespace.lstrip("_").startswith("c10d"):
            self.record(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def record(self, func, args: tuple, kwargs: dict) -> None:
        spelled = func._schema.name.replace("_", "")
        names = [name for name in self.NAMES if name.replace("_", "") in spelled]
        if not names:
            return  # it waits for a result or wraps one
        given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}
        given |= kwargs
        if "process_group" in given:
            group = dist.ProcessGroup.unbox(given["process_group"])
        else:
            group = dist.distributed_c10d._resolve_process_group(given["group_name"])
        ranks = tuple(dist.get_process_group_ranks(group))
        sizes = [(0, 0)]
        for argument in args:
            tensors = [leaf for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor)]
            sizes.append((sum(t.numel() for t in tensors), sum(t.nbytes for t in tensors)))
        peer = given.get("dst", given.get("src")) if names[0] in ("send", "recv") else None
        peer = None if peer is None or peer < 0 else ranks[peer]
        self.log.append(Call(names[0], *max(sizes), ranks, peer))

    def calls(self, operation: str = "") -> list[Call]:
        """The calls of one operation, in order; of all without a name."""
        return [call for call in self.log if operation in ("", call.operation)]

    def elements(self, operation: str = "") -> int:
        """Elements handed over in all calls of one operation."""
        return sum(call.elements for call in self.calls(operation))


# %% [markdown]
# Sizes of what is sharded, and the tensors made whole again.


# %%
def bytes_held(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of parameters, gradients and moments on this rank."""
    tensors = list(model.parameters())
    tensors += [parameter.grad for parameter in trained(model)]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if value.dim() > 0]  # not the count of steps
    storages = {}
    for tensor in tensors:
        storage = tensor.to_local().untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def elements_of(parameters: list[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def rows_held(rows: int) -> int:
    """Return how many of a tensor's rows are this rank's: chunks of ceil(rows / n), in order."""
    chunk = math.ceil(rows / WORLD_SIZE)
    return min(chunk, max(0, rows - RANK * chunk))


def padded_elements(parameters: list[nn.Parameter]) -> int:
    """Return the elements of the parameters, their rows rounded up to a multiple of n."""
    rows = [(math.ceil(len(p) / WORLD_SIZE) * WORLD_SIZE, p[0].numel()) for p in parameters]
    return sum(count * length for count, length in rows)


def whole_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gather every parameter of a sharded model, on every rank, by name."""
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}


def frozen_weight(weights: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return a base weight out of an adapted model, where it may be `up.base.weight`."""
    module, _, kind = name.rpartition(".")
    return weights[name if name in weights else f"{module}.base.{kind}"]


def adapters_of(model: nn.Module) -> list[LoRALinear]:
    return [module for module in model.modules() if isinstance(module, LoRALinear)]


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def largest_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference between two tensors; inf if one is no number."""
    return (ours - expected).abs().max().nan_to_num(nan=torch.inf).item()


# %% [markdown]
# Two texts, and the loss on them, in nats per byte.


# %%
class Text(NamedTuple):
    """A text as bytes, and its last tenth, which nobody trains on."""

    train_N: torch.Tensor
    held_out_N: torch.Tensor


def read_texts(path: str | None) -> tuple[Text, Text]:
    """Return source code, and prose: the file at `path`, or Python's help on its topics."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    code = b"".join(file.read_bytes() for file in files)
    prose = Path(path).read_bytes() if path else "".join(topics.values()).encode()
    texts = []
    for text in (code, prose):
        bytes_N = torch.frombuffer(bytearray(text[:2_000_000]), dtype=torch.uint8).long()
        cut = len(bytes_N) * 9 // 10
        texts.append(Text(bytes_N[:cut], bytes_N[cut:]))
    return texts[0], texts[1]


def draw(bytes_N: torch.Tensor, B: int, generator: torch.Generator) -> torch.Tensor:
    """Return B pieces of a text: (B, CONTEXT + 1)."""
    starts = torch.randint(len(bytes_N) - CONTEXT, (B,), generator=generator).tolist()
    return torch.stack([bytes_N[start : start + CONTEXT + 1] for start in starts])


def held_out_loss(model: nn.Module, text: Text, mesh: DeviceMesh) -> float:
    """Return the loss on 48 pieces of the held-out text, the same on every rank."""
    x_BT = draw(text.held_out_N, 48, torch.Generator().manual_seed(0))
    with torch.no_grad():
        return mean_loss(model, x_BT.to(mesh.device_type)).item()


def mean_loss(model: nn.Module, x_BT: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of predicting each byte from those before it."""
    logits_BTV = model(x_BT[:, :-1])
    return F.cross_entropy(logits_BTV.transpose(1, 2), x_BT[:, 1:])


def new_gpt(mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> "GPT":
    torch.manual_seed(0)  # the same weights on every rank
    return GPT().to(mesh.device_type, dtype)


def random_bytes(mesh: DeviceMesh, rank: int) -> torch.Tensor:
    """Return a rank's batch of two sequences of random bytes: (B, CONTEXT + 1)."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(256, (2, CONTEXT + 1), generator=generator).to(mesh.device_type)


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
# ## 9. On GPUs: what the allocator says
#
# The same two settings for a model that is worth adapting: 0.94 billion parameters at the default
# width, adapters of r = 16, computed in bfloat16. At rest the allocator must show what the formula
# says. A frozen weight has no gradient to compute either, so per parameter and token the step takes
# 4 FLOPs instead of 6. The clock is CUDA events.


# %%
def check_on_gpus(mesh: DeviceMesh, width: int, L: int = 16, T: int = 2048, B: int = 2) -> None:
    if mesh.device_type == "cpu":
        blocked("bytes at rest by the allocator / formula", needs="1 GPU")
        return
    if not torch.cuda.is_bf16_supported(False):  # in hardware, not emulated
        blocked("bytes at rest by the allocator / formula", needs="1 GPU with bfloat16")
        return
    x_BT = torch.randint(32_768, (B, T + 1), device="cuda")
    print0(f"{'':13}{'':16} {'at rest GB':>10} {'peak GB':>10} {'ms':>8} {'tokens/s':>12}")
    for name in ("full", "LoRA, bfloat16"):
        before = torch.cuda.memory_allocated()
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = GPT(L, width, T, V=32_768, heads=width // 128)
        if name != "full":
            add_adapters(model.bfloat16(), ADAPTED, r=16, alpha=32)
        expected = on_this_rank(trained(model), padded=8, exact=8)
        expected += on_this_rank([p for p in model.parameters() if not p.requires_grad], padded=2)
        shard_model(model, mesh, **MIXED)
        optimizer = torch.optim.AdamW(trained(model), lr=1e-4, fused=True)
        milliseconds, peak = time_steps(model, optimizer, x_BT)
        at_rest = torch.cuda.memory_allocated() - before
        row = f"{name:16} {at_rest / 1e9:10.2f} {peak / 1e9:10.2f} {milliseconds:8.1f}"
        print0(f"{'':13}{row} {WORLD_SIZE * B * T / milliseconds * 1e3:12,.0f}")
        claim(f"{name}: bytes at rest, allocator / formula", 1, at_rest / expected, atol=0.05)
        del model, optimizer
        gc.collect()  # FSDP's hooks and the model hold each other
        torch.cuda.empty_cache()


def time_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, x_BT: torch.Tensor, repeats: int = 5
) -> tuple[float, int]:
    """Return the median milliseconds of a step, and the peak memory; gradients are left there."""
    times = []
    for _ in range(repeats + 2):  # the first two allocate and warm up
        torch.cuda.reset_peak_memory_stats()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        optimizer.zero_grad()
        mean_loss(model, x_BT).backward()
        optimizer.step()
        events[1].record()
        events[1].synchronize()
        times.append(events[0].elapsed_time(events[1]))
    return sorted(times[2:])[repeats // 2], torch.cuda.max_memory_allocated()


# %% [markdown]
# ## What you should have seen
#
# 1. r (d_in + d_out): 1,024, 512, 1,280 and 1,280, which is 4,096 in a block and Q = 16,384, 6.9%
#    of P. The share of a layer is r (1/d_in + 1/d_out), so it falls as layers grow: r = 16 on the
#    seven linear layers of each block of Llama 2 7B is 40 million parameters, 0.6%.
# 2. None. B alone has a gradient in the first step, on every element. With A = 0 nothing would
#    ever be learned: zero times zero is a place that no gradient leads away from.
# 3. 16 P/n, 5.1 P/n and 3.1 P/n. Gradients and moments all but vanish, and the frozen base is what
#    remains; that is why QLoRA compresses just that.
# 4. Q to reduce-scatters, and to all-gathers even a little more than before, 1.98 P for 1.84 P,
#    since each unit's adapters are gathered with it. So 2.8 P became 2.05 P: FSDP saves LoRA a lot
#    of memory, but LoRA saves FSDP little communication.
# 5. n times A's one row: 4 x 1,792 elements for all 16 adapters on 4 ranks. Dealt out by columns it
#    is 1,792. Nothing tells you but the count, or a rank whose shard is empty.
# 6. Yes, frozen weights may have any dtype. No: "FSDP expects uniform original parameter dtype", in
#    the first forward pass. Cast all that is trained to one dtype.
# 7. Most: between half and four fifths after 12 steps, with 7% of the parameters. How much it is
#    depends on how far the new text is from the old one, and on the learning rates; with others the
#    adapters may reach all of it. On the code that the base had learned, neither is much worse
#    after so short a training.
# 8. 4 and 64. A change of full rank is not better by itself; here, tuned on text of another kind,
#    it does gain more.
# 9. By less than 1e-13 in float64. In bfloat16 four fifths of W do not move at all when the change
#    is a thousandth of W; of a hundredth a quarter is lost, of a tenth 2%. So add the change to the
#    float32 weights, round once, and measure the merged model before you throw the adapter away.
#
# **Try.** Without `model.requires_grad_(False)` everything is trained next to the adapters. The
# first claim and the bytes notice; then FSDP2 refuses the bfloat16 base, which is now trained in
# another dtype than its adapters. In float32 it would not have complained. An optimizer that is
# made before `shard_model` holds the old, whole parameters, which nobody uses any more: no error,
# and nothing is learned.
#
# **On GPUs** the saved memory goes into larger batches or fewer GPUs. The gathers of the base are
# the same for every micro-batch, so LoRA under FSDP wants large ones; and where 2 P bytes fit on
# one GPU, DDP spares them altogether.
#
# **Where it bites.** A checkpoint needs the adapters alone, Q elements, together with the *name and
# version* of the base: on another base they are noise. Adapters in a unit of their own, per layer,
# are gathered by tiny messages of their own; keep them in the unit of their block.


# %%
def main() -> None:
    options = command_line(
        {
            "--data": {"metavar": "PATH", "help": "text to tune on (Python's help on its topics)"},
            "--steps": {"type": int, "default": 12, "help": "steps of fine-tuning (12)"},
            "--width": {"type": int, "default": 2048, "help": "model width on GPUs (2048)"},
        }
    )
    launch()
    if options.steps < 1:
        refuse(f"training takes at least one step; got --steps {options.steps}; leave it out")
    device = setup()
    mesh = init_device_mesh(device.type, (WORLD_SIZE,), mesh_dim_names=("shard",))
    check_adapters(mesh)
    check_bytes(mesh)
    check_elements(mesh)
    check_thin_matrices(mesh)
    check_dtypes(mesh)
    check_against_one_process(mesh)
    weights = check_fine_tuning(mesh, options)
    check_change(mesh, weights)
    check_on_gpus(mesh, options.width)
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
