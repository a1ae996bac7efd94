"""Split or copied: initial values, dropout and grouped-query heads in tensor parallelism
======================================================================================

**Question.** Tensor parallelism gives each rank a part of some tensors and a copy of the others.
Parts and copies look alike in the code. What must differ between ranks, what must be equal, and
which mistakes raise no error?

**Predict**, and write it down before you run. There are four ranks.

1. An MLP has 384 hidden features, and each rank draws its 96 of them itself, after the same
   `torch.manual_seed(0)`. After ten steps of training, how many of the 384 are distinct?
2. A rank draws its part of a row-parallel weight (96 of 384 inputs) as an `nn.Linear(96, 96)`. How
   many times the right standard deviation does that have?
3. Dropout with p = 0.1 on split activations: each rank has random numbers of its own. In which
   share of places do the masks of two ranks agree?
4. Two ranks hold a copy of the same key-value head, and each has some of its query heads. What must
   they do with their two gradients: nothing, average them, or add them up?

**Run.**

    torchrun --standalone --nproc-per-node=4 22_tensor_parallel_init_dropout_gqa.py
    python 22_tensor_parallel_init_dropout_gqa.py     # the same, started for you

NCCL on 4 GPUs, else gloo. Not run on several GPUs.

**Try.** In `sum_copies` leave out the all-reduce: the output stays right, so what fails? In
`Part.forward` call `self.dropout(hidden_TBe, None)`: what fails, and do the ranks still agree?

**Before.** parallelism/06_tensor_parallel.py: f and g, columns and rows.

**Next.** parallelism/23_tensor_parallel_overlap.py: for which of the sums a GPU need not wait.
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
import warnings
from collections import Counter
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor import empty as empty_dtensor

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
Group = dist.ProcessGroup | None  # the ranks that share a layer; None: all ranks

# Shapes: T tokens, B sequences, D model width, H query heads, G key-value heads, K features per
# head, E hidden features of the MLP. A small letter is one rank's share: h = H / n, e = E / n.
T, B, D, H, K, E = 48, 2, 96, 48, 2, 384
G = max(1, WORLD_SIZE // 2)  # half as many as ranks: two ranks have the same one (of three, all)
P = 0.1  # of dropout

# %% [markdown]
# ## 1. Split or copied?
#
# Ask of every tensor of a tensor-parallel block whether it is **split** (each rank has a part) or
# **copied** (ranks have the same). A third kind, **partial**, is one summand of what f, g or an
# optimizer needs whole; lesson 06 adds up most of them, and section 3 one more. One rule follows:
#
# - What is split needs *other* random numbers on each rank: those of its place in the whole.
# - What is copied needs *the same* random numbers on every rank that has it, and the same gradient.
#
#     x -> norm -> f -> q, kv -> attention -> out -> g -> dropout -> + -> norm -> f -> up -> ...
#     [   copied   ]   [          split          ]   [            copied           ]  [ split ...
#
#     initial values     q, out, up, down     split       a part of the whole's numbers
#                        norms                copied      the same numbers
#                        kv                   both        section 3
#     dropout            after GELU           split       a part of the whole's mask
#                        after g              copied      the same mask
#
# Nothing enforces it: a rank that draws wrongly raises no error. The safest way is to draw the
# whole on every rank, from the same seed, as one process would, and to keep one's `share`. The
# obvious way is `drawn_alone`, and it is wrong twice:


# %%
def share(x: torch.Tensor, dim: int | None) -> torch.Tensor:
    """Return a copy of this rank's 1/n of `x` along `dim`, or all of it if `dim` is None."""
    if dim is None:
        return x.detach().clone()
    return x.detach().tensor_split(WORLD_SIZE, dim)[RANK].clone()


def drawn_alone(**factory: object) -> tuple[torch.Tensor, torch.Tensor]:
    """An MLP's up (e, D) and down (D, e), if a rank draws layers of the size that it holds."""
    torch.manual_seed(0)
    e = E // WORLD_SIZE
    up_eD = nn.Linear(D, e, bias=False, **factory).weight
    down_De = nn.Linear(e, D, bias=False, **factory).weight
    return up_eD.detach(), down_De.detach()


# %% [markdown]
# With the same seed everywhere, all ranks draw the *same* part. Their gradients are the same then,
# so the parts stay the same. And `nn.Linear` draws from -1/sqrt(fan_in) to 1/sqrt(fan_in), where
# **fan_in** is the number of inputs that the layer sees. `up` sees all D of them. `down` sees e,
# and the whole one has E.

# %% [markdown]
# ## 2. Dropout: a mask is random numbers, too
#
# The rule is the same for masks. `F.dropout` of ones is the mask that one process would multiply
# by: 0, or 1 / (1 - P). Of it a rank keeps what belongs to its activations. `dim` says along which
# dimension they are split; None, that they are copied.


# %%
def dropout_of_whole(x: torch.Tensor, dim: int | None) -> torch.Tensor:
    """Drop what one process would drop: draw the mask of the whole, and keep one's share."""
    shape = list(x.shape)
    if dim is not None:
        shape[dim] *= WORLD_SIZE
    mask = F.dropout(x.new_ones(shape), P)
    return x * share(mask, dim)


# %% [markdown]
# That gives the masks of one process, whatever n is. But each rank draws n times as many numbers as
# it needs. Megatron-LM keeps **two generators** instead: one that all ranks seed alike, for what is
# copied, and one that each rank seeds with its own number, for what is split. The masks are as
# random, and cost nothing; but another number of ranks gets other masks.


# %%
class TwoGenerators:
    """Dropout with one generator for what is copied, and one for what is split."""

    def __init__(self, device: torch.device, copied: int, split: int) -> None:
        self.copied = torch.Generator(device).manual_seed(copied)
        self.split = torch.Generator(device).manual_seed(split)

    def dropout(self, x: torch.Tensor, dim: int | None) -> torch.Tensor:
        generator = self.copied if dim is None else self.split
        mask = torch.empty_like(x).bernoulli_(1 - P, generator=generator)
        return x * mask / (1 - P)


# %% [markdown]
# ## 3. Grouped-query heads: copies whose gradients are parts
#
# Attention is split by heads. In **grouped-query attention** one key-value head serves several
# query heads. If there are more ranks than key-value heads, each rank gets a copy of the one that
# its query heads need. Four ranks, 48 query heads, two key-value heads:
#
#     rank                         0          1           2           3
#     query heads, split           0 to 11    12 to 23    24 to 35    36 to 47
#     key-value head, copied       0          0           1           1
#     its gradient comes from      0 to 11    12 to 23    24 to 35    36 to 47
#                                  '---- add ----'        '----- add -----'
#
# Both copies start equal, for both are cut from the same whole. But the whole's gradient is a sum
# over 24 query heads, and each rank has seen 12. So the gradients of copies are added up, over the
# ranks that hold the same head, before the optimizer steps. The norms need no such sum: they come
# before f, which has completed their gradient on every rank. (Under sequence parallelism they do,
# for there each rank's norm sees its own tokens alone: the sum that is forgotten most often.)
#
# Thus n must divide the query heads; and it must divide the key-value heads, or be a multiple.


# %%
def key_value_heads(rank: int, ranks: int, heads: int) -> range:
    """The key-value heads of a rank: its share of them, or the one that it has a copy of."""
    first = rank * heads // ranks
    return range(first, max(first + 1, (rank + 1) * heads // ranks))


def keep_heads(kv_CD: torch.Tensor) -> torch.Tensor:
    """Cut this rank's key-value heads out of all G: (G 2 K, D) -> (g 2 K, D)."""
    heads = key_value_heads(RANK, WORLD_SIZE, G)
    by_head = kv_CD.detach().unflatten(0, (G, 2 * K))
    return by_head[heads.start : heads.stop].flatten(0, 1).clone()


def sum_copies(gradient: torch.Tensor, copies: Group) -> None:
    """Complete the gradient of key-value heads, over the ranks that hold the same ones."""
    dist.all_reduce(gradient, group=copies)


def sizes_for(query_heads: int, key_value_heads: int) -> list[int]:
    """The numbers of ranks over which so many heads can be split, with copies if need be."""
    sizes = []
    for n in range(1, query_heads + 1):
        fits = key_value_heads % n == 0 or n % key_value_heads == 0
        if query_heads % n == 0 and fits:
            sizes.append(n)
    return sizes


# %% [markdown]
# ## 4. The block, whole and in parts
#
# First in one process: plain PyTorch, with dropout after GELU (as in T5) and on the residual. Then
# a rank's part. The lines correspond; new are f and g of 06_tensor_parallel.py, and how a mask is
# drawn.


# %%
class WholeBlock(nn.Module):
    """A pre-norm transformer block in one process: (T, B, D) -> (T, B, D)."""

    def __init__(self, **factory: object) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(D, **factory)
        self.q = nn.Linear(D, H * K, bias=False, **factory)
        self.kv = nn.Linear(D, G * 2 * K, bias=False, **factory)
        self.out = nn.Linear(H * K, D, bias=False, **factory)
        self.norm2 = nn.RMSNorm(D, **factory)
        self.up = nn.Linear(D, E, bias=False, **factory)
        self.down = nn.Linear(E, D, bias=False, **factory)

    def forward(self, x_TBD: torch.Tensor) -> torch.Tensor:
        h_TBD = self.norm1(x_TBD)
        y_TBD = self.out(attention(self.q(h_TBD), self.kv(h_TBD)))
        x_TBD = x_TBD + F.dropout(y_TBD, P)
        hidden_TBE = F.dropout(F.gelu(self.up(self.norm2(x_TBD))), P)
        return x_TBD + F.dropout(self.down(hidden_TBE), P)


class Part(nn.Module):
    """What one rank holds of a block: (T, B, D) -> (T, B, D), the same on every rank."""

    def __init__(self, whole: WholeBlock, dropout: Callable = dropout_of_whole) -> None:
        super().__init__()
        self.norm1 = copy.deepcopy(whole.norm1)
        self.norm2 = copy.deepcopy(whole.norm2)
        self.q = nn.Parameter(share(whole.q.weight, 0))
        self.kv = nn.Parameter(keep_heads(whole.kv.weight))
        self.out = nn.Parameter(share(whole.out.weight, 1))
        self.up = nn.Parameter(share(whole.up.weight, 0))
        self.down = nn.Parameter(share(whole.down.weight, 1))
        self.dropout = dropout

    def forward(self, x_TBD: torch.Tensor) -> torch.Tensor:
        h_TBD = CopyToRanks.apply(self.norm1(x_TBD))
        y_TBd = attention(F.linear(h_TBD, self.q), F.linear(h_TBD, self.kv))
        y_TBD = ReduceFromRanks.apply(F.linear(y_TBd, self.out))
        x_TBD = x_TBD + self.dropout(y_TBD, None)
        h_TBD = CopyToRanks.apply(self.norm2(x_TBD))
        hidden_TBe = self.dropout(F.gelu(F.linear(h_TBD, self.up)), 2)
        y_TBD = ReduceFromRanks.apply(F.linear(hidden_TBe, self.down))
        return x_TBD + self.dropout(y_TBD, None)


def attention(q_TBd: torch.Tensor, kv_TBc: torch.Tensor) -> torch.Tensor:
    """Causal attention of as many heads as there are: (T, B, h K), (T, B, g 2 K) -> (T, B, h K)."""
    q_BhTK = q_TBd.unflatten(-1, (-1, K)).permute(1, 2, 0, 3)
    k_BgTK, v_BgTK = kv_TBc.unflatten(-1, (-1, 2, K)).permute(3, 1, 2, 0, 4)
    options = {"is_causal": True, "enable_gqa": True}
    y_BhTK = F.scaled_dot_product_attention(q_BhTK, k_BgTK, v_BgTK, **options)
    return y_BhTK.permute(2, 0, 1, 3).flatten(2)


# %% [markdown]
# f and g, from 06_tensor_parallel.py:


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
# ## 5. How it is measured
#
# The oracle is `WholeBlock`, in float64, with PyTorch's own initial values and its own `F.dropout`.
# Errors are relative to the largest element; some 20 operations in a row each add up at most E
# terms, in another order. What must be *equal* is gathered and compared to the bit. Shares and
# standard deviations of N random numbers may be five of their own standard deviations off.


# %%
TOLERANCE = 20 * E * 2**-53


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference between two tensors, relative to the largest element."""
    return ((ours - expected).abs().max() / expected.abs().max()).item()


def gathered(x: torch.Tensor, group: Group = None) -> list[torch.Tensor]:
    """Return every rank's `x`."""
    mine = x.detach().contiguous()
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return everyone


def unlike(x: torch.Tensor, group: Group = None) -> int:
    """Count the places of `x` where not all ranks of the group have the same number."""
    together = torch.stack(gathered(x, group))
    return (together != together[0]).any(dim=0).sum().item()


def alike_next_rank(x: torch.Tensor) -> float:
    """The share of places in which this rank has the same number as the next one."""
    other = gathered(x)[(RANK + 1) % WORLD_SIZE]
    return (x == other).double().mean().item()


def step(block: nn.Module, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Run both passes from one seed; return the output and the input's gradient."""
    torch.manual_seed(1)
    x_TBD = torch.randn(T, B, D, device=device, dtype=torch.float64, requires_grad=True)
    y_TBD = block(x_TBD)
    y_TBD.backward(y_TBD.detach().sin())
    return y_TBD.detach(), x_TBD.grad


# %% [markdown]
# Initial values: ten steps of training, and then the hidden features of all ranks are compared.


# %%
def different_features(up_eD: torch.Tensor, down_De: torch.Tensor) -> int:
    """Train a split MLP for ten steps; return how many of its E hidden features are different."""
    torch.manual_seed(2)
    x_TD = torch.randn(T, D, device=up_eD.device, dtype=torch.float64)
    up_eD = up_eD.clone().requires_grad_()
    down_De = down_De.clone().requires_grad_()
    optimizer = torch.optim.SGD([up_eD, down_De], lr=0.1)
    for _ in range(10):
        hidden_Te = F.gelu(F.linear(x_TD, up_eD))
        y_TD = ReduceFromRanks.apply(F.linear(hidden_Te, down_De))
        optimizer.zero_grad()
        (y_TD - x_TD.roll(1, dims=0)).square().mean().backward()
        optimizer.step()
    return len(torch.cat(gathered(up_eD)).unique(dim=0))


def check_initial_values(device: torch.device) -> None:
    """Claim what an MLP gets that is drawn whole and cut, and one whose ranks draw alone."""
    factory = {"device": device, "dtype": torch.float64}
    torch.manual_seed(0)
    whole_ED = nn.Linear(D, E, bias=False, **factory).weight.detach()
    whole_DE = nn.Linear(E, D, bias=False, **factory).weight.detach()
    different = different_features(share(whole_ED, 0), share(whole_DE, 1))
    claim("drawn whole: different hidden features", E, different)
    if WORLD_SIZE == 1:
        blocked("drawn alone: different hidden features", needs="2 ranks")
        return
    n = WORLD_SIZE
    up_eD, down_De = drawn_alone(**factory)
    different = different_features(up_eD, down_De)
    claim("drawn alone: different hidden features", E // n, different, question=1)
    off = 5 * 0.45 / up_eD.numel() ** 0.5  # of the std of so many uniform numbers
    claim("drawn alone: std of columns / whole's", 1, up_eD.std() / whole_ED.std(), atol=off)
    ratio = down_De.std() / whole_DE.std()
    claim("drawn alone: std of rows / whole's", n**0.5, ratio, atol=off * n**0.5, question=2)


# %% [markdown]
# The block with dropout against one process, and the gradients of copies against each other:


# %%
def check_block(whole: WholeBlock, copies: Group, device: torch.device) -> None:
    """Claim that the split block computes what one process does, dropout included."""
    expected, expected_grad = step(whole, device)
    part = Part(whole)
    output, input_grad = step(part, device)
    sum_copies(part.kv.grad, copies)
    claim("error of the output, with dropout", 0, relative_error(output, expected), atol=TOLERANCE)
    pairs = [(input_grad, expected_grad), (part.kv.grad, keep_heads(whole.kv.weight.grad))]
    for name, dim in (("q", 0), ("out", 1), ("up", 0), ("down", 1)):
        whole_grad = whole.get_submodule(name).weight.grad
        pairs.append((part.get_parameter(name).grad, share(whole_grad, dim)))
    for name in ("norm1.weight", "norm2.weight"):
        pairs.append((part.get_parameter(name).grad, whole.get_parameter(name).grad))
    worst = max(relative_error(ours, theirs) for ours, theirs in pairs)
    claim("error of the gradients", 0, worst, atol=TOLERANCE)
    norms = unlike(part.norm1.weight.grad) + unlike(part.norm2.weight.grad)
    claim("norms: gradients that differ between ranks", 0, norms)
    claim("key-value copies: gradients that differ", 0, unlike(part.kv.grad, copies))


# %% [markdown]
# Masks: in a place two of them agree if both drop or both keep, p**2 + (1 - p)**2. If each rank
# draws the masks of *copied* activations alone, its output is another rank's only where both
# residual masks agree.


# %%
def check_masks(whole: WholeBlock, device: torch.device) -> None:
    """Claim how masks agree between ranks, and outputs, with generators seeded well and badly."""
    if WORLD_SIZE == 1:
        blocked("masks of two ranks: places alike", needs="2 ranks")
        return
    agree = P**2 + (1 - P) ** 2
    ones_TBe = torch.ones(T, B, E // WORLD_SIZE, device=device)
    right = TwoGenerators(device, copied=3, split=2718 + RANK)
    alike = alike_next_rank(right.dropout(ones_TBe, 2))
    off = 5 * (agree * (1 - agree) / ones_TBe.numel()) ** 0.5
    claim("split, own generator: places alike", agree, alike, atol=off, question=3)
    same = TwoGenerators(device, copied=3, split=2718)
    alike = alike_next_rank(same.dropout(ones_TBe, 2))
    claim("split, all seeded alike: places alike", 1, alike)
    output, _ = step(Part(whole, right.dropout), device)
    claim("two generators: outputs alike", 1, alike_next_rank(output))
    alone = TwoGenerators(device, copied=3 + RANK, split=2718 + RANK)
    output, _ = step(Part(whole, alone.dropout), device)
    off = 5 * (agree**2 * (1 - agree**2) / output.numel()) ** 0.5
    text = "copied, own generator: outputs alike"
    claim(text, agree**2, alike_next_rank(output), atol=off)


# %% [markdown]
# Key-value heads: what copies cost, and what becomes of them if their gradients are left alone, or
# averaged. (An optimizer moves weights by their gradients: where these differ, copies drift apart.)


# %%
def check_key_value_heads(whole: WholeBlock, copies: Group, device: torch.device) -> None:
    """Claim which sizes there are, and what other ways to treat copies come to."""
    sizes = sizes_for(query_heads=28, key_value_heads=4)
    claim("sizes for 28 query and 4 key-value heads", 4, len(sizes), kind="theory")
    if WORLD_SIZE == 1:
        blocked("key-value weights held / (whole / n)", needs="2 ranks")
        return
    part = Part(whole)
    held = WORLD_SIZE * part.kv.numel() / whole.kv.weight.numel()
    claim("key-value weights held / (whole / n)", WORLD_SIZE / G, held)
    step(part, device)
    claim("copies left alone: gradients that differ", 2 * K * D, unlike(part.kv.grad, copies))
    mean = all_reduce(part.kv.grad, copies) / dist.get_world_size(copies)
    due = keep_heads(whole.kv.weight.grad)  # check_block has left it
    ratio = (mean * due).sum() / due.square().sum()
    text = "copies averaged: gradient / whole's"
    claim(text, G / WORLD_SIZE, ratio, atol=TOLERANCE, question=4)


# %% [markdown]
# ## 6. The same in PyTorch: DTensor's random numbers
#
# On GPUs, DTensor follows the rule. All ranks keep the same state of the generator; for a tensor
# that is split each rank draws from an offset of its own, and copies are drawn alike. On a CPU mesh
# DTensor warns, and draws each part from the rank's own generator: with one seed for all, the
# mistake of question 1.


# %%
def check_dtensor(device: torch.device) -> None:
    """Claim that the parts of a split DTensor are drawn alike on CPUs, and not on GPUs."""
    if WORLD_SIZE == 1:
        blocked("DTensor, all seeded alike: places alike", needs="2 ranks")
        return
    mesh = dist.init_device_mesh(device.type, (WORLD_SIZE,))
    weight = empty_dtensor(E, D, device_mesh=mesh, placements=[Shard(0)])
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):  # that of CPUs
        nn.init.normal_(weight)
    alike = alike_next_rank(weight.to_local())
    expected = 1 if device.type == "cpu" else 0
    claim("DTensor, all seeded alike: places alike", expected, alike)


# %% [markdown]
# ## What you should have seen
#
# 1. 96. Every rank has the same part, computes the same features, and gets the same gradients: an
#    MLP of 96 features, computed four times. A seed of its own on each rank cures this one, and not
#    the next.
# 2. Two: sqrt(384 / 96). The part takes itself for a layer of 96 inputs, but its output is added to
#    three others. Columns see all their inputs, so `nn.Linear` gets them right. Xavier counts
#    outputs as well, and gets both wrong. A fixed standard deviation (0.02 in GPT-2, and in
#    Megatron-LM by default) gets both right.
# 3. 0.1**2 + 0.9**2 = 0.82. All seeded alike, they agree everywhere: feature j of every rank is
#    dropped together, and 384 features share 96 masks. Copied activations with masks of one's own
#    are worse: outputs agree in 0.82**2 = 67% of places, and the next layer's f and g add up what
#    ranks have computed from different inputs.
# 4. Add them up. The whole's gradient is a sum over all query heads of the group. Averaged, as data
#    parallelism would, it is half of that on 4 ranks. Left alone, all numbers of the copies drift
#    apart in the first step.
#
# **Try.** Without the sum in `sum_copies` two rows fail: the error of the gradients, and the
# key-value copies. With `None` all three rows fail that compare with one process: the output, the
# gradients, and the averaged copies. The ranks still agree with each other to the bit.
#
# **It has happened.** A fork of Megatron-LM got multi-query attention (one key-value head) without
# the sum. After 5,000 steps its validation loss was 3.74; with the sum it was 2.64, as without
# tensor parallelism (bigcode-project/Megatron-LM, pull request 37).
#
# **Which sizes.** Llama 3 8B (32 query heads, 8 key-value heads) takes 1, 2, 4, 8, and with copies
# 16 and 32. Qwen2 7B (28 and 4) takes 1, 2, 4 and 28: neither 7 nor 8. Copies save no memory: on 16
# ranks each holds twice its share of Llama's keys and values, in weights as in an inference cache.
#
# **When to use which.** Initial values: draw whole and cut, a layer at a time, or load a checkpoint
# of the whole; then 2 ranks and 8 start with the same model. Dropout: two generators. Both their
# states belong in every rank's checkpoint, and are restored before activations are recomputed.
# Models without dropout, as most large ones today, need only the first.
#
# **With other axes.** Data-parallel ranks need the same initial values and other masks, on copied
# activations too. Sequence parallelism splits the residual by tokens, so its masks are a rank's
# own. And a norm of all gradients, for clipping, counts every part but each copy once.
#
# **On GPUs** a seed gives other numbers than on CPUs. DTensor's parts differ there: its row is 0.


# %%
def main() -> None:
    command_line()
    sizes = [ranks for ranks in range(1, H + 1) if H % ranks == 0]
    launch(sizes)
    if WORLD_SIZE not in sizes:
        rule = f"ranks must share {H} heads evenly; got {WORLD_SIZE}"
        refuse(f"{rule}; set --nproc-per-node to 1, 2, 3, 4, 6, 8, 12, 16, 24 or 48")
    device = setup()
    mesh = dist.init_device_mesh(device.type, (G, WORLD_SIZE // G), mesh_dim_names=("kv", "copies"))
    copies = mesh.get_group("copies")
    check_initial_values(device)
    torch.manual_seed(0)  # the same weights on every rank
    whole = WholeBlock(device=device, dtype=torch.float64)
    check_block(whole, copies, device)
    check_masks(whole, device)
    check_key_value_heads(whole, copies, device)
    check_dtensor(device)
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
    how = f"gloo ({local_ranks} ranks and {gpus} GPUs here)"
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
        counted = f"{devices.count(b'cuda')} GPUs for {WORLD_SIZE} ranks"
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
