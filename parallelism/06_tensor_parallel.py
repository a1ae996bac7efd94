"""Tensor parallelism: one transformer block over several ranks
============================================================

**Question.** A layer is too big or too slow for one device. How can several ranks compute it
together, and what must they tell each other?

**Predict**, and write it down before you run:

1. An MLP (linear, GELU, linear) runs on n ranks, and each rank holds 1/n of both weights. How many
   all-reduces does it need forward, and how many backward?
2. How many does a whole transformer block (attention and MLP) need, forward and backward?
3. Sequence parallelism replaces each all-reduce by a reduce-scatter and an all-gather. How many of
   each does a block need forward, and how many backward?
4. Which share of the activations that the layer norms save does each rank get rid of?

**Run.**

    torchrun --standalone --nproc-per-node=4 06_tensor_parallel.py   # NCCL on 4 GPUs, else gloo
    python 06_tensor_parallel.py                                     # the same, started for you

Not run on several GPUs.

**Try.** Make `CopyToRanks.backward` return `grad, None`: the output stays right, so what fails? In
`RowParallelLinear` add the bias before the sum: what fails now?

**Before.** communication/01_nccl_collectives.py: what an all-reduce does. The map of which this is
one part is parallelism/03_model_tensor_pipeline_parallel.py.

**Next.** exercises/10_tensor_parallel_mlp; then
parallelism/22_tensor_parallel_random_state.py: random numbers of a split block.
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
from collections import Counter
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
Group = dist.ProcessGroup | None  # the ranks that share a layer; None: all ranks

# Shapes: T tokens, B sequences in the batch, D model width, H heads, K = D / H features per head,
# E features of whichever layer is split. A small letter is one rank's share: t = T / n, h = H / n,
# d = D / n, e = E / n. Tokens come first, so that a rank's share of them is contiguous in memory.
T, B, D, H = 48, 2, 96, 48

# %% [markdown]
# ## 1. Column-parallel and row-parallel linear layers
#
# A linear layer computes Y = X A, where A is PyTorch's `weight` transposed: A's columns are the
# rows of `weight`. A can be split over n ranks in two ways (Shoeybi et al., 2019, section 3). In
# the table, ' is transpose, and everything without "all-reduce" needs no communication:
#
#                 **column-parallel**                 **row-parallel**
#     split       A = [A_1 | ... | A_n]               A = [A_1; ...; A_n],  X = [X_1 | ... | X_n]
#     forward     Y_i = X A_i                         Y = sum_i X_i A_i          all-reduce  "g"
#     backward    dX = sum_i dY_i A_i'  all-reduce    dX_i = dY A_i'
#                                       "f"
#                 dA_i = X' dY_i                      dA_i = X_i' dY
#
# Each way costs one all-reduce. Split by columns, X feeds all ranks, so its gradient is a sum over
# ranks. Split by rows, the output is the sum; every rank then computes the same loss from the same
# Y and already holds the whole dY, so summing that again would count it n times. The paper has
# two **conjugate operators**: f is the identity forward and an all-reduce backward, g the reverse.


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
# The two layers take their share of a given whole layer. Split by columns, a rank owns whole output
# features, so it owns their biases too. Split by rows, every rank holds the full bias and adds it
# once, after the sum. A row-parallel layer expects an input that is split already: just what a
# column-parallel layer leaves. `enter` and `leave` are f and g here; section 3 passes others. Where
# n does not divide the features, `tensor_split` gives the first ranks one feature more.


# %%
def share(x: torch.Tensor, dim: int | None) -> torch.Tensor:
    """Return a copy of this rank's 1/n of `x` along `dim`, or all of it if `dim` is None."""
    if dim is None:
        return x.detach().clone()
    return x.detach().tensor_split(WORLD_SIZE, dim)[RANK].clone()


class ColumnParallelLinear(nn.Module):
    """This rank's output features of a linear layer: X (T, B, D) -> Y_i (T, B, e)."""

    def __init__(self, whole: nn.Linear, enter: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.weight = nn.Parameter(share(whole.weight, 0))
        self.bias = None
        if whole.bias is not None:
            self.bias = nn.Parameter(share(whole.bias, 0))
        self.enter = enter

    def forward(self, x_TBD: torch.Tensor) -> torch.Tensor:
        return F.linear(self.enter.apply(x_TBD), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """This rank's input features of a linear layer: X_i (T, B, e) -> Y (T, B, D)."""

    def __init__(self, whole: nn.Linear, leave: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.weight = nn.Parameter(share(whole.weight, 1))
        self.bias = copy.deepcopy(whole.bias)  # all of it, on every rank
        self.leave = leave

    def forward(self, x_TBe: torch.Tensor) -> torch.Tensor:
        y_TBD = self.leave.apply(F.linear(x_TBe, self.weight))
        if self.bias is not None:
            y_TBD = y_TBD + self.bias
        return y_TBD


# %% [markdown]
# ## 2. A transformer block: columns first, then rows
#
# Put a column-parallel layer A before a row-parallel one C, and nothing is sent between them. For
# an MLP, Z = GELU(X A) C = sum_i GELU(X A_i) C_i, because GELU works on every feature alone:
#
#     rank 0    X --f--> A_1 --> GELU --> C_1 --> Z_1 --g--> Z
#     rank 1    X --f--> A_2 --> GELU --> C_2 --> Z_2 --g--> Z = Z_1 + Z_2
#
# The other order would fail: GELU(X_1 A_1 + X_2 A_2) is not GELU(X_1 A_1) + GELU(X_2 A_2). In
# attention, the softmax takes GELU's place. It works on every head alone; so `qkv` orders its
# features by head, and a rank's columns are whole heads. Layer norms and residuals run on every
# rank, on all of D.


# %%
class TransformerBlock(nn.Module):
    """A pre-norm transformer block: (T, B, D) -> (T, B, D)."""

    def __init__(self, width: int, heads: int, **factory: object) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1 = nn.LayerNorm(width, **factory)
        self.qkv = nn.Linear(width, 3 * width, **factory)
        self.out = nn.Linear(width, width, **factory)
        self.norm2 = nn.LayerNorm(width, **factory)
        self.up = nn.Linear(width, 4 * width, **factory)
        self.down = nn.Linear(4 * width, width, **factory)

    def forward(self, x_TBD: torch.Tensor) -> torch.Tensor:
        x_TBD = x_TBD + self.attention(self.norm1(x_TBD))
        return x_TBD + self.mlp(self.norm2(x_TBD))

    def attention(self, x_TBD: torch.Tensor) -> torch.Tensor:
        qkv_TBh3K = self.qkv(x_TBD).unflatten(-1, (-1, 3, self.head_width))  # -1: my heads
        q_BhTK, k_BhTK, v_BhTK = qkv_TBh3K.permute(3, 1, 2, 0, 4)
        y_BhTK = F.scaled_dot_product_attention(q_BhTK, k_BhTK, v_BhTK, is_causal=True)
        y_TBd = y_BhTK.permute(2, 0, 1, 3).flatten(2)
        return self.out(y_TBd)

    def mlp(self, x_TBD: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x_TBD)))


def tensor_parallel(
    block: TransformerBlock,
    enter: type[torch.autograd.Function] = CopyToRanks,
    leave: type[torch.autograd.Function] = ReduceFromRanks,
) -> TransformerBlock:
    """Return this rank's part of a block; ValueError if the ranks cannot share its heads evenly."""
    heads = block.out.in_features // block.head_width
    if heads % WORLD_SIZE != 0:
        rule = f"ranks must share heads evenly; got {heads} heads for {WORLD_SIZE} ranks"
        raise ValueError(f"{rule}; use a number of ranks that divides {heads}")
    part = copy.deepcopy(block)
    part.qkv = ColumnParallelLinear(block.qkv, enter)
    part.out = RowParallelLinear(block.out, leave)
    part.up = ColumnParallelLinear(block.up, enter)
    part.down = RowParallelLinear(block.down, leave)
    return part


# %% [markdown]
# ## 3. Sequence parallelism: splitting the tokens between the layers
#
# Between g and the next f every rank holds the same T tokens, and the layer norms save all of them
# for the backward pass. But norms and residuals treat each token alone, so a rank needs only its
# share. An all-reduce is a reduce-scatter followed by an all-gather: pull the two apart, and in
# between each rank holds t = T/n tokens (Korthikanti et al., 2022, section 4.2.2):
#
#     tensor parallel      C_i --all-reduce-----> residual, norm on T tokens --------------> A_i
#     sequence parallel    C_i --reduce-scatter-> residual, norm on t tokens --all-gather--> A_i
#
# Backward, the two change places. Beware of the names: what Korthikanti calls g stands where
# Shoeybi's f stood, and g-bar where Shoeybi's g stood. There is a price: norms and row biases see
# t tokens, so their gradients are partial sums, to be added up before the optimizer steps.


# %%
class GatherTokens(torch.autograd.Function):
    """g in Korthikanti et al. (2022): all-gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: object, x_tBD: torch.Tensor) -> torch.Tensor:
        return all_gather_tokens(x_tBD)

    @staticmethod
    def backward(ctx: object, grad_TBD: torch.Tensor) -> torch.Tensor:
        return reduce_scatter_tokens(grad_TBD)


class ScatterTokens(torch.autograd.Function):
    """g-bar in Korthikanti et al. (2022): reduce-scatter forward, all-gather backward."""

    @staticmethod
    def forward(ctx: object, x_TBD: torch.Tensor) -> torch.Tensor:
        return reduce_scatter_tokens(x_TBD)

    @staticmethod
    def backward(ctx: object, grad_tBD: torch.Tensor) -> torch.Tensor:
        return all_gather_tokens(grad_tBD)


def all_gather_tokens(x_tBD: torch.Tensor) -> torch.Tensor:
    x_TBD = x_tBD.new_empty(WORLD_SIZE * x_tBD.shape[0], *x_tBD.shape[1:])
    dist.all_gather_into_tensor(x_TBD, x_tBD.contiguous())
    return x_TBD


def reduce_scatter_tokens(x_TBD: torch.Tensor) -> torch.Tensor:
    x_tBD = x_TBD.new_empty(x_TBD.shape[0] // WORLD_SIZE, *x_TBD.shape[1:])
    dist.reduce_scatter_tensor(x_tBD, x_TBD.contiguous())
    return x_tBD


def sum_token_gradients(part: TransformerBlock) -> None:
    """After a backward pass on T/n tokens: complete the gradients of what saw only those."""
    for parameter in (*part.norm1.parameters(), *part.norm2.parameters()):
        dist.all_reduce(parameter.grad)
    dist.all_reduce(part.out.bias.grad)
    dist.all_reduce(part.down.bias.grad)


# %% [markdown]
# ## 4. The same in PyTorch: a plan for `parallelize_module`
#
# PyTorch makes the weights **DTensors**: a local tensor, a mesh of ranks, and a **placement**. A
# split input times split rows yields the placement `Partial`, a summand; a layer that is asked for
# `Replicate` then all-reduces it, one that is asked for `Shard(0)` reduce-scatters it over tokens.
# `ColwiseParallel` hands out a local tensor, so that attention sees its own h heads.


# %%
def by_dtensor(block: TransformerBlock, sequence_parallel: bool) -> TransformerBlock:
    """Return a copy of `block` under PyTorch's plan; its inputs are this rank's tokens, or all."""
    mesh = dist.init_device_mesh(block.up.weight.device.type, (WORLD_SIZE,))
    tokens = Shard(0) if sequence_parallel else Replicate()
    plan = {
        "qkv": ColwiseParallel(input_layouts=tokens),
        "out": RowwiseParallel(output_layouts=tokens),
        "up": ColwiseParallel(input_layouts=tokens),
        "down": RowwiseParallel(output_layouts=tokens),
    }
    if sequence_parallel:
        plan["norm1"] = SequenceParallel(sequence_dim=0)
        plan["norm2"] = SequenceParallel(sequence_dim=0)
    return parallelize_module(copy.deepcopy(block), mesh, plan)


# %% [markdown]
# ## 5. How it is measured
#
# The **oracle** is the whole block in one process: same weights, same batch, in float64. Every rank
# compares its output and its gradients with its share of the oracle's. An error is relative to the
# largest element. About 20 operations in a row each add up to 4 D terms in another order than the
# oracle does, which sets the tolerance. `CommDebugMode` is PyTorch's own counter of collectives.


# %%
TOLERANCE = 20 * 4 * D * 2**-53
ALL_REDUCE = torch.ops.c10d.allreduce_
COLUMNS = {"qkv.weight": 0, "qkv.bias": 0, "up.weight": 0, "up.bias": 0}
SPLIT_ALONG = COLUMNS | {"out.weight": 1, "down.weight": 1}  # parameter: dimension


class Step:
    """One forward and backward pass: its output, input gradient, and collectives of each pass."""

    def __init__(self, layer: Callable, x: torch.Tensor, grad: torch.Tensor) -> None:
        x = x.detach().requires_grad_()
        with CommDebugMode() as forward:
            y = layer(x)
        with CommDebugMode() as backward:
            y.backward(grad)
        self.output = y.detach()
        self.input_grad = x.grad
        self.forward = forward.get_comm_counts()
        self.backward = backward.get_comm_counts()


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element; inf if one is no number."""
    error = (ours - expected).abs().max() / expected.abs().max()
    return error.nan_to_num(nan=torch.inf).item()


def batch(whole: TransformerBlock) -> torch.Tensor:
    """Return the same random batch on every rank: (T, B, D)."""
    torch.manual_seed(1)
    return torch.randn(T, B, D, device=whole.up.weight.device, dtype=torch.float64)


# %% [markdown]
# `compare` steps a block and its oracle on the same batch. The parameters that see only T/n tokens
# have their gradients completed first; a DTensor's gradient is put together from its shards.


# %%
def compare(
    name: str, part: TransformerBlock, whole: TransformerBlock, tokens_dim: int | None
) -> Step:
    """Step both, ours on its share of the tokens; claim that output and gradients agree."""
    x_TBD = batch(whole)
    grad_TBD = x_TBD.sin()
    whole.zero_grad()
    expected = Step(whole, x_TBD, grad_TBD)
    ours = Step(part, share(x_TBD, tokens_dim), share(grad_TBD, tokens_dim))
    if isinstance(part.up, ColumnParallelLinear) and tokens_dim == 0:
        sum_token_gradients(part)

    error = relative_error(ours.output, share(expected.output, tokens_dim))
    claim(f"{name}: error of the output", 0, error, atol=TOLERANCE)
    errors = [relative_error(ours.input_grad, share(expected.input_grad, tokens_dim))]
    for parameter_name, parameter in part.named_parameters():
        expected_grad = whole.get_parameter(parameter_name).grad
        if isinstance(parameter.grad, DTensor):
            errors.append(relative_error(parameter.grad.full_tensor(), expected_grad))
        else:
            dim = SPLIT_ALONG.get(parameter_name)
            errors.append(relative_error(parameter.grad, share(expected_grad, dim)))
    claim(f"{name}: error of the gradients", 0, max(errors), atol=TOLERANCE)
    return ours


# %% [markdown]
# First the layers one at a time, then the block on all tokens: what each costs in all-reduces, and
# which share of the weights a rank holds.


# %%
def check_layers(whole: TransformerBlock) -> None:
    """Claim what each of the two splits costs alone, and both together."""
    x_TBD = batch(whole)
    column = Step(ColumnParallelLinear(whole.up, CopyToRanks), x_TBD, share(whole.up(x_TBD), 2))
    row = Step(RowParallelLinear(whole.out, ReduceFromRanks), share(x_TBD, 2), x_TBD)
    mlp = Step(tensor_parallel(whole).mlp, x_TBD, x_TBD)
    claim("column-parallel alone: all-reduces forward", 0, column.forward[ALL_REDUCE])
    claim("column-parallel alone: all-reduces backward", 1, column.backward[ALL_REDUCE])
    claim("row-parallel alone: all-reduces forward", 1, row.forward[ALL_REDUCE])
    claim("row-parallel alone: all-reduces backward", 0, row.backward[ALL_REDUCE])
    claim("MLP: all-reduces forward", 1, mlp.forward[ALL_REDUCE], question=1)
    claim("MLP: all-reduces backward", 1, mlp.backward[ALL_REDUCE], question=1)


def check_tensor_parallel(whole: TransformerBlock) -> None:
    """Claim what a rank holds, that the block is right, and its collectives."""
    part = tensor_parallel(whole)
    held = sum(part.get_parameter(name).numel() for name in SPLIT_ALONG)
    total = sum(whole.get_parameter(name).numel() for name in SPLIT_ALONG)
    claim("elements held of the split weights", total / WORLD_SIZE, held)
    block = compare("tensor parallel", part, whole, tokens_dim=None)
    claim("block: all-reduces forward", 2, block.forward[ALL_REDUCE], question=2)
    claim("block: all-reduces backward", 2, block.backward[ALL_REDUCE], question=2)


# %% [markdown]
# With the tokens split, the collectives change their names, and autograd keeps less. What it keeps
# is counted by the hooks that PyTorch calls for every tensor saved for the backward pass.


# %%
def check_sequence_parallel(whole: TransformerBlock) -> None:
    """Claim that the block is right on a share of the tokens, its collectives, and its memory."""
    part = tensor_parallel(whole, GatherTokens, ScatterTokens)
    block = compare("sequence parallel", part, whole, tokens_dim=0)
    for way, counts in (("forward", block.forward), ("backward", block.backward)):
        gathers = counts[torch.ops.c10d._allgather_base_]
        scatters = counts[torch.ops.c10d._reduce_scatter_base_]
        claim(f"block: all-gathers {way}", 2, gathers, question=3)
        claim(f"block: reduce-scatters {way}", 2, scatters, question=3)

    x_TBD = batch(whole)
    with_all_tokens = saved_elements(tensor_parallel(whole), x_TBD)
    with_a_share = saved_elements(part, share(x_TBD, 0))
    norms = 2 * T * B * (D + 2)  # each saves its input, and per token mean and 1 / deviation
    spared = norms - norms // WORLD_SIZE
    claim("saved elements spared", spared, with_all_tokens - with_a_share, question=4)


def saved_elements(layer: nn.Module, x: torch.Tensor) -> int:
    """Count the elements of the storages that autograd keeps for the backward pass of `layer`."""
    saved = {}  # by address: a storage counts once, however many operations keep it

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return tensor

    def give_back(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    with saved_tensors_hooks(keep, give_back):
        layer(x.detach().requires_grad_())
    return sum(saved.values())


def check_dtensor(whole: TransformerBlock) -> None:
    """Claim that PyTorch's plan gives the same, with as many collectives."""
    plain = compare("DTensor", by_dtensor(whole, False), whole, tokens_dim=None)
    claim("DTensor: collectives forward", 2, sum(plain.forward.values()))
    claim("DTensor: collectives backward", 2, sum(plain.backward.values()))
    tokens = compare("DTensor, tokens split", by_dtensor(whole, True), whole, tokens_dim=0)
    claim("DTensor, tokens split: collectives forward", 4, sum(tokens.forward.values()))
    claim("DTensor, tokens split: collectives backward", 4, sum(tokens.backward.values()))


# %% [markdown]
# ## 6. On GPUs: what a block takes, and what the all-reduces take of it
#
# At this size the block is arithmetic-bound on one GPU. n ranks do 1/n of it each, apart from norms
# and residuals, which every rank does on all tokens, and add two all-reduces of T B D elements,
# which nothing hides in a forward pass. So the block should take what is split divided by n, what
# is not, and the two sums, each measured alone. The claim allows half of what the sums take:
# without them, or with twice as many, it fails. CUDA events are the clock: a host clock would see
# nothing before the stream is synchronized.


# %%
def measure_on_gpus(device: torch.device) -> None:
    """Claim that a split block takes 1/n of what is split, all of the rest, and two all-reduces."""
    if device.type == "cpu" or not torch.cuda.is_bf16_supported(False):
        blocked("ms of a block 9216 wide, split / the model's", needs="2 GPUs with bfloat16")
        return
    factory = {"device": device, "dtype": torch.bfloat16}
    x_TBD = torch.randn(4096, 1, 9216, **factory)
    whole = TransformerBlock(9216, 48, **factory)
    part = tensor_parallel(whole)
    alone = median_ms(lambda: whole(x_TBD))
    split = median_ms(lambda: part(x_TBD))
    kept = 2 * median_ms(lambda: x_TBD + whole.norm1(x_TBD))
    sums = 2 * median_ms(lambda: all_reduce(x_TBD))
    print0(f"{'':13}forward: {alone:.2f} ms on one GPU, {split:.2f} ms on {WORLD_SIZE} together,")
    print0(f"{'':13}of which two all-reduces of {x_TBD.nbytes / 1e6:.0f} MB take {sums:.2f} ms,")
    print0(f"{'':13}norms and residuals, which sequence parallelism splits too, {kept:.2f} ms")
    model = (alone - kept) / WORLD_SIZE + kept + sums
    slack = max(0.05, sums / model / 2)
    claim("ms of a block 9216 wide, split / the model's", 1, split / model, atol=slack, timed=True)


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
# 1. One all-reduce forward, by g at the end of the MLP, and one backward, by f at its beginning.
#    Alone, a column-parallel layer costs one backward, a row-parallel layer one forward.
# 2. Two forward and two backward, for attention is a pair of the same kind. Forward, the next layer
#    must wait for the sum; backward, f's sum can overlap the product for dA, if the layer is wide
#    enough (23_tensor_parallel_overlap.py). A sum of T = 8192 tokens, D = 8192, in bf16, is 134 MB:
#    on 8 ranks about 0.5 ms at 450 GB/s, 4.7 ms at 50 GB/s. So tensor parallelism stays inside one
#    NVLink domain: 8 GPUs in most machines, 72 in a rack.
# 3. Two of each, in both directions. A ring all-reduce *is* a reduce-scatter and an all-gather, so
#    over a ring the same bytes travel; what is new are six small sums of gradients per block, which
#    Megatron packs into one message. gloo's reduce-scatter is an all-reduce inside, so in this run
#    about 1.5 times the bytes of section 2 traveled: communication/01_nccl_collectives.py counts
#    them on the sockets.
# 4. (n-1)/n of what the norms save. What remains whole is the gathered input of A; Megatron keeps
#    only its own t tokens of that too, and gathers once more backward.
#
# Each rank holds 1/n of the split weights: that is what lets a layer be too big for one device.
# DTensor's plan needs as many collectives as the hand-written layers and gives the same numbers.
#
# **Try.** `CopyToRanks.backward` without its sum leaves the output right, and a loss would still
# fall: only the gradients, and the counts backward, give it away. A bias added before the sum
# counts n times.
#
# On GPUs, width is what pays for the sums: per element of its activations a rank computes 12 D / n
# multiplications and hands 2 elements to sums, so at 9216 wide NVLink leaves most of the speed-up,
# and PCIe takes most of it. With sequence parallelism the gathers can be hidden behind the matrix
# products that need them, piece by piece (async tensor parallelism in torch, userbuffers in
# Transformer Engine).
#
# On real systems a split block also needs the right random numbers, for its initial values and for
# dropout (22_tensor_parallel_random_state.py). Grouped-query attention needs copies of key-value
# heads if there are fewer than ranks (25_grouped_query_heads.py). Embedding and loss are split over
# the vocabulary (18_vocabulary_parallel.py).


# %%
def main() -> None:
    command_line()
    launch([ranks for ranks in range(2, H + 1) if H % ranks == 0])
    if WORLD_SIZE == 1 or H % WORLD_SIZE != 0:
        rule = f"ranks must share {H} heads evenly, and be 2 or more; got {WORLD_SIZE}"
        refuse(f"{rule}; set --nproc-per-node to 2, 3, 4, 6, 8, 12, 16, 24 or 48")
    device = setup()
    torch.manual_seed(0)  # the same weights on every rank
    whole = TransformerBlock(D, H, device=device, dtype=torch.float64)
    check_layers(whole)
    check_tensor_parallel(whole)
    check_sequence_parallel(whole)
    check_dtensor(whole)
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
