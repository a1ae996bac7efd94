"""ZeRO: why 7 billion parameters do not train on 80 GB, and stage 1 from scratch
==============================================================================

**Question.** The weights of a model of 7 billion parameters take 14 GB in bfloat16. Why does it not
train on a GPU of 80 GB, and what do n ranks gain if each keeps 1/n of the optimizer's state?

**Predict**, and write it down before you run:

1. Data parallelism, Adam. How many bytes per parameter does a rank hold when backward has ended:
   in mixed precision (bfloat16 with a float32 master), and in plain float32?
2. The same for ZeRO stage 1 on 4 ranks, where each rank keeps 1/4 of what the optimizer needs.
3. How many elements per parameter go through collectives on a rank in one step, and through which
   ones: with data parallelism, and with ZeRO-1? Count the whole array: what goes into a
   reduce-scatter, what comes out of an all-gather.
4. In mixed precision the optimizer updates a float32 copy of each weight, its *master*. After three
   steps, how many bfloat16 weights differ from their master rounded to bfloat16?

**Run.**

    torchrun --standalone --nproc-per-node=4 02_fsdp_zero.py   # NCCL on 4 GPUs, else gloo
    python 02_fsdp_zero.py                                     # the same, started for you

Not run on several GPUs.

**Try.** Replace `bucket.shard_K.copy_(bucket.master_K)` by `pass`, so that the weights never see an
update: which claims notice? Put it back. In `reduce`, change the `if` to `if True:`: is
the training still right?

**Before.** parallelism/01_data_parallelism_ddp.py: what every rank holds, and why gradients are
averaged.

**Next.** exercises/08_zero1; then parallelism/03_model_tensor_pipeline_parallel.py divides the
computation itself, and parallelism/05_zero2_and_zero3.py shards gradients and weights.
"""

import argparse
import ctypes
import gc
import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import timedelta
from itertools import chain, zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: N elements of a bucket with its padding, K = N / n of a rank's shard; B samples of D
# features on a rank, R ranks. P counts the parameters of a model.
Group = dist.ProcessGroup | None

# %% [markdown]
# ## 1. Sixteen bytes per parameter, and what ZeRO shards
#
# **Mixed precision** computes in bfloat16 and updates in float32. Each parameter then has a weight
# and a gradient in bfloat16, of 2 bytes each, which forward and backward use. The optimizer adds a
# float32 copy of the weight, its **master** (4 bytes), and Adam's momentum (4) and variance (4).
# Together that is 16 bytes: 112 GB for 7 billion parameters, before a single activation. In plain
# float32 the weight is its own master: 4 + 4 + 8, sixteen again.
#
# Data parallelism stores all of it n times. The Zero Redundancy Optimizer, **ZeRO** (Rajbhandari
# et al., 2020), lets each rank keep one n-th, a **shard**: in stage 1 of what the optimizer needs,
# in stage 2 of the gradients too, in stage 3 of the weights as well. **FSDP** is stage 3 in
# PyTorch, by the function `fully_shard` (fsdp/01_fsdp_basics.py). This is what one of 4 ranks holds
# in mixed precision, to scale:
#
#              weights   gradients   masters and Adam
#                2P         2P             12P                  bytes per parameter
#     DDP      [####]     [####]   [########################]   16
#     ZeRO-1   [####]     [####]   [######                  ]    4 + 12/4 = 7
#     ZeRO-2   [####]     [#   ]   [######                  ]    2 + 14/4 = 5.5
#     ZeRO-3   [#   ]     [#   ]   [######                  ]        16/4 = 4
#
# The paper's "4x less memory" for stage 1 and "8x" for stage 2 are limits for large n: 16/4 and
# 16/2.


# %%
class Sizes(NamedTuple):
    """Bytes per parameter."""

    weight: int
    gradient: int
    optimizer: int


SIZES = {
    torch.bfloat16: Sizes(weight=2, gradient=2, optimizer=12),
    torch.float32: Sizes(weight=4, gradient=4, optimizer=8),
}


def bytes_held(stage: int, n: int, dtype: torch.dtype = torch.bfloat16) -> list[float]:
    """Bytes per parameter on one of n ranks: of weights, of gradients, of the optimizer."""
    held = []
    for size, first_sharding_stage in zip(SIZES[dtype], (3, 2, 1), strict=True):
        held.append(size / n if stage >= first_sharding_stage else size)
    return held


def print_table(billions: float) -> None:
    """What the formula says of a model on n ranks. The paper's Table 1 prints the same figures."""
    print0(f"{'':13}{billions} billion parameters, GB per rank by the formula")
    print0(f"{'':13}ranks  " + "".join(f"{stage:>9}" for stage in ("DDP", *STAGES)))
    for n in (1, 4, 16, 64, 256, 1024):
        gigabytes = [billions * sum(bytes_held(stage, n)) for stage in range(4)]
        print0(f"{'':13}{n:5}  " + "".join(f"{each:9.2f}" for each in gigabytes))


STAGES = ("ZeRO-1", "ZeRO-2", "ZeRO-3")

# %% [markdown]
# ## 2. A flat bucket: parameters of any shape, in n equal shards
#
# Weights come in all shapes, and few can be divided by n. So lay them end to end in one flat
# tensor, a **bucket**, and add a few zeros: then N elements make n shards of K = N/n. The module's
# parameters become views of the bucket and notice nothing. A second flat tensor, the buffer, is for
# the gradients: a hook moves each of them there as soon as it is complete, and `p.grad` becomes a
# view of the buffer. Micro-batches then add up in it, and until `step` you may look at `p.grad`,
# scale or drop it, as without ZeRO.
#
#     full_N     [         weight 1        |   bias 1  |    weight 2   | bias 2|0]
#     shards     [     rank 0    |     rank 1    |     rank 2    |     rank 3    ]
#     pieces     [    weight 1   | weight 1| b. 1| b. 1| weight 2| w. 2| bias 2| ]
#
# A shard holds **pieces** of parameters: rank 1 has the end of weight 1 and half of bias 1. The
# optimizer gets the pieces as its parameters and never knows: SGD, Adam and AdamW treat every
# element by itself. (Muon and Adafactor look at whole matrices; PyTorch's `ZeroRedundancyOptimizer`
# deals out whole parameters for them.)
#
# `reduce` and `gather` are the two halves of an all-reduce. A **reduce-scatter** leaves each rank
# the sum of one shard; an **all-gather** gives all shards to all. With A = a0 + a1 + a2 + a3, where
# rank r brings ar, br, cr and dr:
#
#                       rank 0         rank 1         rank 2         rank 3
#     before            a0 b0 c0 d0    a1 b1 c1 d1    a2 b2 c2 d2    a3 b3 c3 d3
#     reduce-scatter    A              B              C              D
#     all-gather        A  B  C  D     A  B  C  D     A  B  C  D     A  B  C  D
#
# Both work in place, since a shard is a view of its bucket. Gradients are divided by n before they
# are added up: in float16 their sum may overflow where their mean does not. Stage 0, plain data
# parallelism, uses the same class: its bucket has one shard, the whole, which every rank owns. Then
# `reduce` is an all-reduce, and there is nothing to gather.


# %%
class Piece(NamedTuple):
    """What this rank's shard holds of one parameter."""

    master: nn.Parameter  # flat, a view of master_K: what the optimizer updates
    of_shard: slice
    of_parameter: slice  # of its elements laid flat


class Bucket:
    """Parameters of one dtype laid end to end.

    full_N      their weights; each parameter is a view of it
    shard_K     this rank's shard of them, a view of full_N
    master_K    the shard that the optimizer updates: shard_K, or a copy of higher precision
    buffer_N    this rank's gradients; after backward each p.grad is a view of it
    gradient_K  the shard of their mean over ranks, a view of buffer_N
    """

    def __init__(
        self, parameters: list[nn.Parameter], group: Group, shards: int, master_dtype: torch.dtype
    ) -> None:
        self.group = group
        self.shards = shards
        whole = torch.cat([p.detach().flatten() for p in parameters])
        self.full_N = F.pad(whole, (0, -len(whole) % shards))
        self.buffer_N = torch.zeros_like(self.full_N)
        mine = dist.get_rank(group) if shards > 1 else 0
        self.shard_K = self.full_N.tensor_split(shards)[mine]
        self.gradient_K = self.buffer_N.tensor_split(shards)[mine]
        self.master_K = self.shard_K.to(master_dtype)  # itself, if that is its dtype
        self.gradient_of: dict[nn.Parameter, torch.Tensor] = {}
        self.pieces: dict[nn.Parameter, Piece] = {}
        first = mine * len(self.shard_K)  # my shard begins here
        this = weakref.ref(self)  # a hook must not keep an old bucket in memory

        def hook(p: nn.Parameter) -> None:
            if this() is not None:
                this().take_in(p)

        start = 0
        for p in parameters:
            end = start + p.numel()
            p.data = self.full_N[start:end].view(p.shape)
            self.gradient_of[p] = self.buffer_N[start:end].view(p.shape)
            low = max(start, first)
            high = min(end, first + len(self.shard_K))
            if low < high:
                of_shard = slice(low - first, high - first)
                master = nn.Parameter(self.master_K[of_shard])
                self.pieces[p] = Piece(master, of_shard, slice(low - start, high - start))
            p.register_post_accumulate_grad_hook(hook)
            start = end

    def take_in(self, p: nn.Parameter) -> None:
        """Move p.grad into the buffer. (A hook of this kind is handed p, not its gradient.)"""
        view = self.gradient_of[p]
        if p.grad is None:
            view.zero_()  # other ranks may have used it
        elif p.grad is not view:  # the first since the gradients were dropped
            view.copy_(p.grad.detach().to_dense())
            p.grad = view

    def reduce(self) -> dist.Work:
        """Start to average the gradients over all ranks, whatever shares out the shards."""
        for p in self.gradient_of:
            self.take_in(p)
        self.buffer_N.div_(dist.get_world_size(self.group))
        if self.shards == 1:
            return dist.all_reduce(self.buffer_N, group=self.group, async_op=True)
        return dist.reduce_scatter_tensor(
            self.gradient_K, self.buffer_N, group=self.group, async_op=True
        )

    def gather(self) -> dist.Work:
        """Start to collect the shards of all ranks."""
        return dist.all_gather_into_tensor(
            self.full_N, self.shard_K, group=self.group, async_op=True
        )


# %% [markdown]
# ## 3. Stage 1: the optimizer steps between the two halves of an all-reduce
#
# Data parallelism all-reduces the gradients, and then all ranks compute the same update. Stage 1
# puts the optimizer *between* the halves of that all-reduce: a rank receives the gradient of its
# own shard only and updates that shard. The all-gather then carries updated weights, where in data
# parallelism it carries gradients:
#
#     DDP       gradients --reduce-scatter--> --all-gather--> all gradients, all updates
#     ZeRO-1    gradients --reduce-scatter--> own update --all-gather--> all weights
#
# So no more goes through collectives than before. All reductions are started at once, and all
# gathers. The optimizer steps once in between, on all pieces: one that counts its steps, and hooks
# on it, see what they would see in one process. During that step the float32 gradients of a whole
# shard are there, 4/n bytes per parameter.
#
# **Clipping** needs the norm of the whole gradient. Each rank adds up the squares of its own shard,
# and one all-reduce of a single element adds these up. The padding is zero and adds nothing.


# %%
class ZeRO1(torch.optim.Optimizer):
    """A sharded optimizer that also averages the gradients: leave DistributedDataParallel away.

    Takes parameters or parameter groups, like any optimizer, and builds `optimizer_class` (an
    elementwise one) with `defaults` on this rank's pieces of them. Parameters of lower precision
    than `master_dtype` get masters of it. `step` clips the gradient to norm `clip` and uses it up;
    what no rank has used is passed over, as in one process. `numel` is about the number of elements
    in a bucket; `sharded=False` is stage 0. Parameters start as on the group's first rank; buffers
    are the module's business. Raises ValueError on every rank if their parameters differ.
    """

    def __init__(
        self,
        params: Iterable,
        optimizer_class: type[torch.optim.Optimizer],
        master_dtype: torch.dtype | None = None,
        clip: float | None = None,
        numel: int = 1 << 22,
        sharded: bool = True,
        group: Group = None,
        **defaults: object,
    ) -> None:
        super().__init__(params, defaults)
        self.clip = clip
        self.group = group
        self.shards = dist.get_world_size(group) if sharded else 1
        self.device = next(self.parameters()).device
        require_equal_parameters(self, (numel, sharded, master_dtype))
        self.buckets = buckets_of(self, numel, master_dtype)
        self.pieces: dict[nn.Parameter, Piece] = {}
        for bucket in self.buckets:
            self.pieces |= bucket.pieces
        self.optimizer = optimizer_class(groups_of_pieces(self), **defaults)
        self.defaults = self.optimizer.defaults  # some schedulers look for them
        copy_settings(self.optimizer, self)

    def parameters(self) -> Iterator[nn.Parameter]:
        return chain.from_iterable(group["params"] for group in self.param_groups)

    @torch.no_grad()
    def step(self) -> torch.Tensor | None:
        """Reduce, clip, update this rank's shards, gather; return the norm if clipping."""
        used = used_by_anyone(self)
        reducing = [bucket.reduce() for bucket in self.buckets]
        for work in reducing:
            work.wait()
        norm = None if self.clip is None else gradient_norm(self)
        for bucket in self.buckets:
            follow_loaded_weights(bucket)
            gradient_K = bucket.gradient_K.to(bucket.master_K.dtype)
            if norm is not None:
                gradient_K.mul_((self.clip / (norm + 1e-6)).clamp(max=1))
            for p, piece in bucket.pieces.items():
                piece.master.grad = gradient_K[piece.of_shard] if p in used else None
        copy_settings(self, self.optimizer)  # a scheduler may have changed them
        self.optimizer.step()
        copy_settings(self.optimizer, self)
        self.optimizer.zero_grad()
        gathering = []
        for bucket in self.buckets:
            if bucket.master_K is not bucket.shard_K:
                bucket.shard_K.copy_(bucket.master_K)
            if bucket.shards > 1:
                gathering.append(bucket.gather())
        for work in gathering:
            work.wait()
        self.zero_grad()  # the buffer holds sums now
        return norm

    def state_dict(self) -> dict:
        """The state of whole parameters, on the CPU of every rank. All ranks must call this."""
        return super().state_dict() | {"state": whole_state(self)}

    def load_state_dict(self, state_dict: dict) -> None:
        """Cut this rank's pieces out of a state dict of whole parameters."""
        super().load_state_dict(state_dict | {"state": {}})
        copy_settings(self, self.optimizer)
        take_pieces(self, state_dict["state"])


# %% [markdown]
# The gradients here are bfloat16 throughout: micro-batches and ranks are added up in it, as
# DeepSpeed does by default (`data_types.grad_accum_dtype` changes it). A bfloat16 number has 8
# significant bits, so a sum does not change when a gradient is added that is 1000 times smaller,
# however often that happens. Megatron-LM therefore accumulates and reduces gradients in float32,
# whenever it trains in bfloat16: 18 bytes per parameter instead of 16, or 6 + 12/n sharded, 126 GB
# for 7 billion parameters.

# %% [markdown]
# ## 4. What a real module needs: equal ranks, unused layers, groups, loaded weights
#
# - **Ranks that differ.** If one rank's layer is wider, its buckets are larger, and the first
#   collective aborts or hangs. So the ranks compare their lists of parameters before.
# - **Unused layers.** An optimizer passes over a parameter whose gradient is None: AdamW does not
#   even decay it. In the buffer such a gradient is zero, since another rank may have made one. So
#   one small all-reduce per step, of an integer per parameter, asks who has; the CPU waits for its
#   result. A parameter frozen later is passed over, too. One that is unfrozen later lies in no
#   bucket, and that is refused.
# - **Groups.** Settings such as the learning rate stand in two places: in the groups of whole
#   parameters, where a scheduler writes, and in the groups of pieces, where the optimizer that
#   steps may keep a count.
# - **Loaded weights.** A weight that is no longer its master, rounded, has been written to from
#   outside, by `load_state_dict` for instance. The next step would undo that, unless the master
#   follows.


# %%
def require_equal_parameters(zero: ZeRO1, options: tuple) -> None:
    """Raise the same ValueError on every rank if one of them has other parameters."""
    listed = [f"numel, sharded, master_dtype = {options}"]
    for i, group in enumerate(zero.param_groups):
        names = group.get("param_names", range(len(group["params"])))
        for name, p in zip(names, group["params"], strict=True):
            trained = "trained" if p.requires_grad else "frozen"
            listed.append(f"{name} of group {i}: {p.dtype}, {tuple(p.shape)}, {trained}")
    by_rank = [None] * dist.get_world_size(zero.group)
    dist.all_gather_object(by_rank, listed, zero.group)
    for rows in zip_longest(*by_rank, fillvalue="nothing"):
        ranks_of: dict[str, list[int]] = {}
        for rank, row in enumerate(rows):
            ranks_of.setdefault(row, []).append(rank)
        if len(ranks_of) > 1:
            rule = "every rank must hand ZeRO1 the same parameters: build all modules alike"
            raise ValueError(f"{rule}; the first difference, and its ranks: {ranks_of}")


def buckets_of(zero: ZeRO1, numel: int, master_dtype: torch.dtype | None) -> list[Bucket]:
    """Deal out what is trained, by dtype; all ranks start from the weights of the first."""
    members: dict[tuple, list[nn.Parameter]] = {}  # of each bucket
    seen = Counter()  # elements so far, by dtype
    for p in zero.parameters():
        dense = p.data.contiguous()  # p itself, unless it is transposed
        dist.broadcast(dense, group_src=0, group=zero.group)
        p.data.copy_(dense)
        if p.requires_grad:
            bucket_number = seen[p.dtype] // numel
            members.setdefault((p.dtype, bucket_number), []).append(p)
            seen[p.dtype] += p.numel()
    buckets = []
    for (dtype, _), parameters in members.items():
        precision = torch.promote_types(dtype, master_dtype or dtype)
        buckets.append(Bucket(parameters, zero.group, zero.shards, precision))
    return buckets


def groups_of_pieces(zero: ZeRO1) -> list[dict]:
    """The same parameter groups, of what this rank updates."""
    groups = []
    for group in zero.param_groups:
        mine = [zero.pieces[p].master for p in group["params"] if p in zero.pieces]
        groups.append(settings(group) | {"params": mine})
    return groups


def settings(group: dict) -> dict:
    """Learning rate and so on, of one parameter group."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def copy_settings(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    for theirs, ours in zip(source.param_groups, target.param_groups, strict=True):
        ours.update(settings(theirs))


# %% [markdown]
# Three more functions serve every step. They find which parameters were used, the norm of the whole
# gradient, and whether weights were loaded.


# %%
def used_by_anyone(zero: ZeRO1) -> set[nn.Parameter]:
    """Return the parameters for which any rank has made a gradient."""
    made: dict[nn.Parameter, bool] = {}
    for bucket in zero.buckets:
        made |= {p: p.grad is not None for p in bucket.gradient_of}
    for i, p in enumerate(zero.parameters()):
        if p.requires_grad and p not in made:
            rule = "ZeRO1 trains what required gradients when it was built"
            raise ValueError(f"{rule}; parameter {i} does only now: build another ZeRO1")
    by_anyone = torch.tensor(list(made.values()), dtype=torch.int32, device=zero.device)
    dist.all_reduce(by_anyone, dist.ReduceOp.MAX, group=zero.group)
    return {p for p, used in zip(made, by_anyone.tolist(), strict=True) if used}


def gradient_norm(zero: ZeRO1) -> torch.Tensor:
    square = torch.zeros((), device=zero.device)
    for bucket in zero.buckets:
        square = square + bucket.gradient_K.to(bucket.master_K.dtype).square().sum()
    if zero.shards > 1:
        dist.all_reduce(square, group=zero.group)
    return square.sqrt()


def follow_loaded_weights(bucket: Bucket) -> None:
    """Where a weight is not its master, rounded, take over the weight."""
    if bucket.master_K is not bucket.shard_K:
        loaded = bucket.shard_K != bucket.master_K.to(bucket.shard_K.dtype)
        bucket.master_K.copy_(torch.where(loaded, bucket.shard_K, bucket.master_K))


# %% [markdown]
# **Checkpoints.** A rank's state makes sense only to the same rank of the same number of ranks. So
# `state_dict` joins the pieces: it returns what the optimizer would return in one process, and the
# masters with it. `load_state_dict` cuts it for whatever number of ranks there is now. (Every rank
# gets a copy in its host's memory. Large jobs save the shards as they are and reshard when they
# load them: torch.distributed.checkpoint.)


# %%
def whole_state(zero: ZeRO1) -> dict[int, dict]:
    """Return the state of each parameter, by its number, on the CPU of every rank; all call."""
    mine = {}
    for i, p in enumerate(zero.parameters()):
        if p in zero.pieces:
            master = zero.pieces[p].master
            mine[i] = dict(zero.optimizer.state.get(master, {}))
            if master.dtype != p.dtype:
                mine[i]["master"] = master.detach()
            for key, value in mine[i].items():  # pickled, a tensor would land on its sender's GPU
                if isinstance(value, torch.Tensor):
                    mine[i][key] = value.cpu().clone()
    by_rank = [mine]
    if zero.shards > 1:
        by_rank = [None] * zero.shards
        dist.all_gather_object(by_rank, mine, zero.group)
    whole = {}
    for i, p in enumerate(zero.parameters()):
        parts = [state[i] for state in by_rank if i in state]
        if parts and parts[0]:
            whole[i] = joined(parts, p.shape)
    return whole


def joined(parts: list[dict], shape: torch.Size) -> dict:
    """Pieces laid end to end are the whole. What is not flat, such as Adam's step, is common."""
    whole = {}
    for key, value in parts[0].items():
        if isinstance(value, torch.Tensor) and value.dim() == 1:
            value = torch.cat([part[key] for part in parts]).view(shape)
        whole[key] = value
    return whole


def take_pieces(zero: ZeRO1, whole: dict[int, dict]) -> None:
    """Give the optimizer of pieces its parts of what `whole_state` has returned."""
    numbers = {p: i for i, p in enumerate(zero.parameters())}
    mine = zero.optimizer.state_dict()
    mine["state"] = {}
    ours = [p for p in zero.parameters() if p in zero.pieces]
    for k, p in enumerate(ours):  # the optimizer of pieces numbers them in this order
        master, _, of_parameter = zero.pieces[p]
        state = {}
        for key, value in whole.get(numbers[p], {}).items():
            if isinstance(value, torch.Tensor) and value.shape == p.shape and key != "step":
                value = value.flatten()[of_parameter].clone()  # a view would keep the whole alive
            state[key] = value
        if "master" in state:
            master.data.copy_(state.pop("master"))
        if state:
            mine["state"][k] = state
    zero.optimizer.load_state_dict(mine)


# %% [markdown]
# ## 5. How it is measured
#
# **Weights.** Three steps of two micro-batches, on ranks that are seeded differently, against the
# **oracle**, one process that sees all samples. The first and the third step skip the last block,
# the second step skips the third: what is skipped must be passed over, and its gradient of the step
# before must not count. All in float32.
#
# Sharded or not, the additions come in another order than in one process, so they round otherwise.
# 100 roundings of 2**-24 are allowed per gradient, whose terms are below 1. Adam's first step is
# lr g / (|g| + eps), whose slope in g is at most lr / eps = 1: it changes by no more than g does.
# So three steps may move a weight by 3 x 100 x 2**-24 = 1.8e-5. Expect much less. One update
# that is left out would move some weight by 1.2e-3, some sixty times as far.


# %%
D, HIDDEN, STEPS, LR, EPS, CLIP = 420, 120, 3, 0.01, 0.01, 0.1
SLACK = STEPS * 100 * 2**-24


class Net(nn.Module):
    """Four residual blocks, of which one is skipped."""

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList()
        for _ in range(4):
            up = nn.Linear(D, HIDDEN, bias=False)
            down = nn.Linear(HIDDEN, D, bias=False)
            self.blocks.append(nn.Sequential(up, nn.ReLU(), down))
        self.to(device)

    def forward(self, x_BD: torch.Tensor, skip: int) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            if i != skip:
                x_BD = x_BD + block(x_BD)
        return x_BD


def loss_of(model: nn.Module, x_BD: torch.Tensor, step: int) -> torch.Tensor:
    """How far the outputs are from the inputs, in reverse order."""
    return (model(x_BD, skip=2 if step == 1 else 3) - x_BD.flip(-1)).square().mean()


def train_plainly(x_BD: torch.Tensor, ddp: bool) -> dict[str, torch.Tensor]:
    """Train without ZeRO: in one process, or with PyTorch's DDP; return weights and norm."""
    model = Net(0, x_BD.device)
    wrapped = model
    if ddp:
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, eps=EPS)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(wrapped, x_BD, step).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return model.state_dict() | {"norm": norm}


def largest_difference(state: dict, expected: dict) -> float:
    return max((state[name] - expected[name]).abs().max().item() for name in expected)


# %% [markdown]
# **Bytes held.** Between backward and step, every tensor that Python can reach is asked for its
# storage, and what was there before is left out.
#
# **Elements** are counted beneath torch's dispatcher, as they are handed to a collective. A call
# counts with its input or its output, whichever is larger, as in nccl-tests. What then travels is
# up to the backend: of N elements, a ring sends (n-1)/n N in a reduce-scatter, as many in an
# all-gather, and 2(n-1)/n N in an all-reduce. Over such a ring ZeRO-1 costs what data parallelism
# costs. On gloo it costs more: its reduce-scatter is an all-reduce inside and moves twice as much
# (communication/01_nccl_collectives.py counts it on the sockets).


# %%
def live_storages() -> dict[int, torch.UntypedStorage]:
    """Return every storage that a tensor within Python's reach holds, by address.

    Scalars are left out, such as Adam's counters of steps. Who keeps the storages keeps their
    addresses from being used again.
    """
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.dim() > 0]
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes() > 0}


def bytes_added(before: dict[int, torch.UntypedStorage]) -> int:
    """Return the bytes of all live storages but those of `before`.

    Gloo's threads hold what they have sent for a moment longer: the smallest of three looks counts.
    """
    looks = []
    for _ in range(3):
        time.sleep(0.05)  # launch time or not: bytes are counted here
        added = [storage for at, storage in live_storages().items() if at not in before]
        looks.append(sum(storage.nbytes() for storage in added))
    return min(looks)


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
# One run trains three steps and looks at the last one. All weights have a multiple of 840 elements,
# so that 1 to 8 ranks need no padding. For more ranks it adds at most n - 1 elements to each of 4
# buckets.


# %%
def check_stage(
    stage: int, layout: torch.dtype, x_RBD: torch.Tensor, alone: dict[str, torch.Tensor]
) -> float:
    """Train in stage 0 or 1; claim bytes, elements and weights; return bytes per parameter."""
    name = f"stage {stage}, {str(layout).removeprefix('torch.')}"
    x_BD = x_RBD[RANK].to(layout)
    before = live_storages()
    model = Net(RANK, x_BD.device).to(layout)
    P = sum(parameter.numel() for parameter in model.parameters())
    sizes = {"numel": P // 4, "sharded": stage == 1}
    adam = {"lr": LR, "eps": EPS}
    zero = ZeRO1(model.parameters(), torch.optim.Adam, torch.float32, CLIP, **sizes, **adam)
    for step in range(STEPS):
        with CountedCommunication() as counted:
            for half_BD in x_BD.chunk(2):
                (loss_of(model, half_BD, step) / 2).backward()
            held = bytes_added(before) / P
            norm = zero.step()
    padding = 4 * (WORLD_SIZE - 1) / P if 840 % WORLD_SIZE else 0  # elements per parameter
    expected = sum(bytes_held(stage, WORLD_SIZE, layout))
    text = f"{name}: bytes held per parameter"
    if stage == 0:
        claim(text, expected, held, atol=16 * padding, question=1)
    else:
        claim(text, expected, held, atol=16 * padding, question=2)
    check_elements(name, stage, layout, counted, P, padding)
    if layout == torch.float32:
        error = largest_difference(model.state_dict() | {"norm": norm}, alone)
        claim(f"{name}: error against one process", 0, error, atol=SLACK)
    else:
        unlike = 0
        for parameter, state in zip(model.parameters(), whole_state(zero).values(), strict=True):
            unlike += (state["master"].to(layout) != parameter.cpu()).sum()
        claim(f"{name}: weights unlike their master", 0, unlike, question=4)
    return held


def check_elements(
    name: str,
    stage: int,
    layout: torch.dtype,
    counted: CountedCommunication,
    P: int,
    padding: float,
) -> None:
    """Claim what went through each collective, per parameter; norm and flags apart."""
    if WORLD_SIZE == 1:
        blocked(f"{name}: elements handed over", needs="2 ranks")
        return
    expected = {"all_reduce": 1, "reduce_scatter": 0, "all_gather": 0}
    if stage == 1:
        expected = {"all_reduce": 0, "reduce_scatter": 1, "all_gather": 1}
    nbytes = 0
    for operation, times in expected.items():
        calls = [c for c in counted.calls(operation) if c.elements > 8]  # a flag per parameter: 8
        elements = sum(call.elements for call in calls) / P
        nbytes += sum(call.nbytes for call in calls) / P
        text = f"{name}: {operation}, elements / P"
        claim(text, times, elements, atol=padding * times, question=3)
    per_element = layout.itemsize * sum(expected.values())
    claim(f"{name}: bytes handed over / P", per_element, nbytes, atol=8 * padding)


# %% [markdown]
# ## 6. On GPUs: what the allocator says
#
# The same count, by CUDA's allocator, for half a billion parameters: what is allocated when
# backward has ended, and the peak of a step, which the activations of this small batch hardly
# raise. (The slack is for cuBLAS, which keeps a workspace of some 32 MB.)


# %%
def measure_on_gpus(device: torch.device) -> None:
    if device.type == "cpu" or not torch.cuda.is_bf16_supported(False):
        blocked("GPU: bytes allocated per parameter, stage 0", needs="1 GPU with bfloat16")
        blocked("GPU: bytes allocated per parameter, stage 1", needs="1 GPU with bfloat16")
        return
    x_BD = torch.randn(64, 8192, device=device, dtype=torch.bfloat16)
    for stage in (0, 1):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        model = nn.Sequential()
        for _ in range(8):
            model.append(nn.Linear(8192, 8192, False, device, torch.bfloat16))
        P = sum(parameter.numel() for parameter in model.parameters())
        adam = torch.optim.Adam
        zero = ZeRO1(model.parameters(), adam, torch.float32, sharded=stage == 1)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            model(x_BD).square().mean().backward()
            held = (torch.cuda.memory_allocated() - before) / P
            zero.step()
        peak = (torch.cuda.max_memory_allocated() - before) / P
        expected = sum(bytes_held(stage, WORLD_SIZE))
        claim(f"GPU: bytes allocated per parameter, stage {stage}", expected, held, atol=0.2)
        print0(f"{'':13}peak of a step: {peak:.1f} bytes per parameter")
        del model, zero


# %% [markdown]
# ## What you should have seen
#
# 1. Sixteen bytes, in bfloat16 as in float32: 2 + 2 + 12 or 4 + 4 + 8. So 7 billion parameters need
#    112 GB on every rank, and mixed precision saves no memory here; it saves time, and halves the
#    activations. These come on top. For sequences of s tokens, b of them per micro-batch, width h
#    and a attention heads, a transformer keeps about s b h (34 + 5 a s / h) bytes per layer
#    (Korthikanti et al., 2022). The second term, which grows with the square of s, is attention's;
#    FlashAttention avoids it, and so does recomputing attention in backward. Adding GPUs to plain
#    data parallelism changes nothing of all this.
# 2. Seven bytes in mixed precision, 4 + 12/n: 49 GB of the 80. In float32 ten, 8 + 8/n. At a
#    thousand ranks little more than 4 of the 16 bytes remain, those of weight and gradient;
#    `--figure PATH` draws memory over the number of ranks.
# 3. With data parallelism P elements go through an all-reduce; with ZeRO-1, P through a
#    reduce-scatter and P through an all-gather, which are the two halves of one. Over a ring both
#    send 2(n-1)/n P: stage 1 is free in bytes, on gloo apart (section 5). In time it is free only
#    if the all-gather hides behind the next forward, as Megatron's does. Here it is exposed after
#    the step, and the reduce-scatters start in `step`, not during backward as DDP's all-reduces do.
# 4. None. That says that every update has reached the weights. It does not say that the masters are
#    right: they are fed gradients that were computed and added up in bfloat16, with 8 significant
#    bits, and drift from those of float32 training accordingly. A comparison of masters with a
#    tolerance for that would not notice weights that stay at their first values.
#
# Weights and the norm of the gradient follow one process to some 1e-8, as with PyTorch's DDP.
#
# **Try.** Without the copy the float32 claims all pass, for there the master *is* the weight. In
# bfloat16 every step takes the weights, which never change, for loaded ones: the masters start from
# them again, and only the comparison of the two notices. If `reduce` always all-reduces, training
# stays right to the bit, since the shard is a view of the sum; only the count of elements tells.
#
# On real systems: PyTorch's `ZeroRedundancyOptimizer`, DeepSpeed's stage 1, Megatron's distributed
# optimizer. Their checkpoints hold shards, so changing the number of ranks means joining or
# resharding them, as in section 4. At a thousand ranks the shards of small buckets become a few
# elements, and the all-gather a matter of latency: use fewer, larger buckets, or shard within a
# group of ranks only.


# %%
def draw(held: dict[tuple[int, torch.dtype], float], path: str) -> None:
    """GB for 7B parameters over the number of ranks, a panel per stage."""
    from matplotlib.figure import Figure

    ns = [1, 2, 4, 8, 16, 32, 64]
    figure = Figure((12, 4), layout="constrained")
    panels = figure.subplots(1, 4, sharey=True)
    sharded = ("nothing is sharded", "the optimizer's state", "and gradients", "and weights")
    for stage, axes in enumerate(panels):
        heights = torch.tensor([bytes_held(stage, n) for n in ns]).T * 7
        axes.stackplot(range(len(ns)), heights, colors=("#9ecae1", "#fdae6b", "#a1d99b"))
        axes.axhline(80, color="k", linestyle=":")
        if stage < 2 and WORLD_SIZE in ns:
            x = ns.index(WORLD_SIZE)
            measured = 7 * held[stage, torch.bfloat16]
            axes.plot(x, measured, "ko")
            axes.annotate(" measured,\n scaled to 7B", (x, measured), va="bottom")
        axes.set(title=f"stage {stage}: {sharded[stage]}", xlabel="ranks")
        axes.set(xticks=range(len(ns)), xticklabels=ns)
    for part, middle in (("weights", 7), ("gradients", 21), ("optimizer's state", 54)):
        panels[0].text(3, middle, part, ha="center", va="center")
    panels[3].text(6, 81, "80 GB: one H100", ha="right", va="bottom")
    panels[0].set(ylabel="GB per rank: bfloat16, Adam", ylim=(0, 130))
    figure.suptitle("7 billion parameters need 112 GB on every rank, unless the ranks share them")
    figure.savefig(path, dpi=150)


def main() -> None:
    figure = {"metavar": "PATH", "help": "draw memory over the number of ranks as PNG"}
    options = command_line({"--figure": figure})
    launch()
    device = setup()
    generator = torch.Generator().manual_seed(2)
    x_RBD = torch.randn(WORLD_SIZE, 8, D, generator=generator).to(device)
    alone = train_plainly(x_RBD.flatten(0, 1), ddp=False)
    with_ddp = train_plainly(x_RBD[RANK], ddp=True)
    gc.freeze()  # what there is already need not be searched for tensors
    error = largest_difference(with_ddp, alone)
    claim("PyTorch's DDP: error against one process", 0, error, atol=SLACK)
    held = {}
    for stage in (0, 1):
        for layout in SIZES:
            held[stage, layout] = check_stage(stage, layout, x_RBD, alone)
    gc.unfreeze()
    print_table(7.5)
    measure_on_gpus(device)
    if options.figure and RANK == 0:
        draw(held, options.figure)
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
