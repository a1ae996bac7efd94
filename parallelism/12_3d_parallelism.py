"""3D parallelism: data, pipeline and tensor parallelism on one device mesh
========================================================================

**Question.** Data, pipeline and tensor parallelism each hand over something else. Joined in one
mesh, which of them may cross machines, and which must stay inside an NVLink domain?

**Predict**, and write it down before you run:

1. A linear layer 1024 wide is split over n ranks by its output features, and every output is
   gathered by all ranks, in float64. How many FLOPs does a rank compute per byte that it receives
   if n is 4? How many with four times the batch?
2. A small GPT trains on four ranks, two along one axis and two along another: examples (dp), layers
   (pp), or the inside of each layer (tp). Along which axis does a rank hand over most bytes per
   step, along which least? (B T D = 18,432, blocks of 12,704 parameters, 5 blocks.)
3. How many all-reduces along tp does a transformer block need per micro-batch, both passes
   together?

**Run.**

    torchrun --standalone --nproc-per-node=4 12_3d_parallelism.py   # NCCL on 4 GPUs, else gloo
    python 12_3d_parallelism.py --mesh 2,1,2                        # dp,pp,tp: this mesh alone

Not run on several GPUs.

**Try.** In `bytes_handed_over` write 2 for 4, as if a block were one MLP: which claims fail, and
on which meshes? In `train_step` leave out the loop of `dist.all_reduce` over dp: which fail now?

**Before.** parallelism/03_model_tensor_pipeline_parallel.py, all of it; 06_tensor_parallel.py and
07_pipeline_schedules.py help.

**Next.** Split a block three ways on a mesh of your own with `--mesh` on 8 or 16 ranks; then
parallelism/16_planning_memory.py: which mesh a model needs.
"""

import argparse
import copy
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
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
Group = dist.ProcessGroup | None  # the ranks that share a layer; None: all ranks

# Shapes: B sequences per batch, T tokens each, D model width, H heads, K = D / H features per head,
# V different tokens. A small letter is one rank's share: b = B / dp / micro-batches, h = H / tp.
B, T, D, H, V = 18, 32, 32, 4, 256
LAYERS = 5
MICRO_BATCHES = 3

# %% [markdown]
# ## 1. What decides: FLOPs per byte
#
# A GPU waits for a link if it has too little to compute per byte that the link brings. Take the
# chattiest way to split a layer: each of n ranks computes W/n of its W output features, then an
# **all-gather** gives every rank all of them, as the next layer's input. Per example a rank
# computes 2 W W/n FLOPs and receives (n-1)/n W elements of s bytes:
#
#     FLOPs per byte  =  (2 W W/n) / ((n-1)/n W s)  =  2 W / ((n-1) s)
#
# The batch is not in it: twice the examples are twice the FLOPs and twice the bytes. Only width
# helps. A GPU that computes `peak` FLOP/s on a link of `rate` B/s needs peak/rate FLOPs per byte to
# be busy half of the time, if nothing is overlapped.


# %%
class GatherFeatures(torch.autograd.Function):
    """(B, W/n) -> (B, W): all-gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: object, y_Bw: torch.Tensor) -> torch.Tensor:
        y_nBw = y_Bw.new_empty(WORLD_SIZE * y_Bw.shape[0], y_Bw.shape[1])
        dist.all_gather_into_tensor(y_nBw, y_Bw.contiguous())
        return y_nBw.unflatten(0, (WORLD_SIZE, -1)).movedim(0, 1).flatten(1)

    @staticmethod
    def backward(ctx: object, grad_BW: torch.Tensor) -> torch.Tensor:
        grad_nBw = grad_BW.unflatten(1, (WORLD_SIZE, -1)).movedim(1, 0).contiguous()
        grad_Bw = torch.empty_like(grad_nBw[0])
        dist.reduce_scatter_tensor(grad_Bw, grad_nBw.flatten(0, 1))
        return grad_Bw


def flops_per_byte(width: int, n: int, element_bytes: int) -> float:
    return 2 * width / ((n - 1) * element_bytes)


def busy_share(width: int, n: int, peak: float, rate: float) -> float:
    """The share of its time a GPU computes in bfloat16, given peak FLOP/s and link B/s."""
    seconds_computing = flops_per_byte(width, n, 2) / peak  # per byte received
    return seconds_computing / (seconds_computing + 1 / rate)


# %% [markdown]
# ## 2. A device mesh: every rank has one place per axis
#
# A **DeviceMesh** numbers the ranks like the elements of an array. The last axis is innermost:
# ranks that differ in it alone are neighbors, so it gets the fastest links. Every rank belongs to
# one group per axis. Eight ranks as (pp, dp, tp) = (2, 2, 2), with the three groups of rank 0:
#
#               pp 0: first layers       pp 1: last layers
#               tp 0        tp 1         tp 0        tp 1
#     dp 0      rank 0      rank 1       rank 4      rank 5
#     dp 1      rank 2      rank 3       rank 6      rank 7
#
#     tp {0, 1}: parts of the same layers       dp {0, 2}: other examples       pp {0, 4}: layers
#
# pp stands outermost, as in Megatron-LM and torchtitan: it sends least, and sharded data
# parallelism (ZeRO, FSDP), which hands over parameters for every micro-batch, wants the faster
# links of the two. With plain gradients once per step, the order of dp and pp matters little.


# %%
def device_mesh(device: torch.device, shape: tuple[int, int, int]) -> dist.DeviceMesh:
    """Return the mesh of this (dp, pp, tp)."""
    dp, pp, tp = shape
    return dist.init_device_mesh(device.type, (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))


def meshes_of(n: int) -> list[tuple[int, int, int]]:
    """Return the meshes (dp, pp, tp) of n ranks that have as many axes above 1 as n allows."""
    fitting = []
    for pp in range(1, min(n, LAYERS) + 1):
        for tp in (1, 2, 4):
            dp = n // (pp * tp)
            if dp * pp * tp == n and dp * MICRO_BATCHES <= B:
                fitting.append((dp, pp, tp))
    axes = [sum(size > 1 for size in shape) for shape in fitting]
    most = max(axes, default=0)
    return [shape for shape, number in zip(fitting, axes, strict=True) if number == most]


# %% [markdown]
# ## 3. The model, and a rank's part of it
#
# The model is the course's small GPT, which reads bytes. Along tp every block is split as in
# 06_tensor_parallel.py: f (CopyToRanks), columns, rows, g (ReduceFromRanks), once for attention and
# once for the MLP. The only difference is the group: sums go over the ranks of one tp group.


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
# This `Block` keeps the rows of `qkv` in the order (3, heads, features), so a rank takes its heads
# from each of the three.


# %%
class ParallelBlock(nn.Module):
    """The part of a Block that one rank of the group `tp` holds: (b, T, D) -> (b, T, D)."""

    def __init__(self, whole: Block, tp: dist.ProcessGroup) -> None:
        super().__init__()
        self.tp = tp
        self.norm1 = copy.deepcopy(whole.norm1)
        self.norm2 = copy.deepcopy(whole.norm2)
        by_head = (3, whole.heads, -1)
        self.qkv_weight = share(whole.qkv.weight.unflatten(0, by_head), 1, tp)
        self.qkv_bias = share(whole.qkv.bias.unflatten(0, by_head), 1, tp)
        self.out_weight = share(whole.out.weight, 1, tp)
        self.out_bias = share(whole.out.bias, None, tp)
        self.up_weight = share(whole.up.weight, 0, tp)
        self.up_bias = share(whole.up.bias, 0, tp)
        self.down_weight = share(whole.down.weight, 1, tp)
        self.down_bias = share(whole.down.bias, None, tp)

    def forward(self, x_bTD: torch.Tensor) -> torch.Tensor:
        x_bTD = x_bTD + self.attention(self.norm1(x_bTD))
        return x_bTD + self.mlp(self.norm2(x_bTD))

    def attention(self, x_bTD: torch.Tensor) -> torch.Tensor:
        x_bTD = CopyToRanks.apply(x_bTD, self.tp)
        qkv = F.linear(x_bTD, self.qkv_weight.flatten(0, 2), self.qkv_bias.flatten())
        qkv_bT3hK = qkv.unflatten(-1, self.qkv_bias.shape)
        q_bhTK, k_bhTK, v_bhTK = qkv_bT3hK.permute(2, 0, 3, 1, 4)
        y_bhTK = F.scaled_dot_product_attention(q_bhTK, k_bhTK, v_bhTK, is_causal=True)
        partial_bTD = F.linear(y_bhTK.transpose(1, 2).flatten(2), self.out_weight)
        return ReduceFromRanks.apply(partial_bTD, self.tp) + self.out_bias

    def mlp(self, x_bTD: torch.Tensor) -> torch.Tensor:
        x_bTD = CopyToRanks.apply(x_bTD, self.tp)
        hidden = F.gelu(F.linear(x_bTD, self.up_weight, self.up_bias))
        return ReduceFromRanks.apply(F.linear(hidden, self.down_weight), self.tp) + self.down_bias


def share(whole: torch.Tensor, dim: int | None, group: dist.ProcessGroup) -> nn.Parameter:
    """Return a copy of this rank's part along `dim` within the group, or all of it if None."""
    mine = whole.detach()
    if dim is not None:
        mine = mine.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]
    return nn.Parameter(mine.clone())


# %% [markdown]
# Along pp a rank holds some of the blocks; the first stage has the embeddings too, the last one the
# final norm and the head. Five blocks on two stages are two and three: stages need not be equal.


# %%
class Stage(nn.Module):
    """What one rank of a mesh holds of a GPT."""

    def __init__(self, gpt: GPT, mesh: dist.DeviceMesh) -> None:
        super().__init__()
        stage = mesh.get_local_rank("pp")
        stages = mesh["pp"].size()
        blocks = gpt.blocks[stage * LAYERS // stages : (stage + 1) * LAYERS // stages]
        self.blocks = nn.ModuleList(ParallelBlock(b, mesh.get_group("tp")) for b in blocks)
        self.first = stage == 0
        self.last = stage == stages - 1
        if self.first:
            self.token = copy.deepcopy(gpt.token)
            self.position = copy.deepcopy(gpt.position)
        if self.last:
            self.norm = copy.deepcopy(gpt.norm)
            self.head = copy.deepcopy(gpt.head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens (b, T) or activations (b, T, D) -> activations or logits (b, T, V)."""
        if self.first:
            x = self.token(x) + self.position.weight
        for block in self.blocks:
            x = block(x)
        if self.last:
            x = self.head(self.norm(x))
        return x


# %% [markdown]
# ## 4. A training step on three axes
#
# Along dp a rank takes its share of the sequences, and cuts it into micro-batches. Along pp these
# pass through the stages: all forward, then all backward (GPipe). Then the gradients are summed
# along dp. Along tp the blocks have summed already, inside both passes; and all tp ranks of a stage
# compute the same activations, so each sends them to its own partner on the next stage.


# %%
def train_step(stage: Stage, mesh: dist.DeviceMesh, tokens_BT: torch.Tensor) -> float:
    """Leave the gradients of the batch's mean loss; return this rank's summand of the loss."""
    mine = tokens_BT.tensor_split(mesh["dp"].size())[mesh.get_local_rank("dp")]
    pipe = mesh.get_group("pp")
    passes = []
    for tokens_bT in mine.tensor_split(MICRO_BATCHES):
        x = tokens_bT[:, :-1]  # the inputs; the targets are one token further
        if not stage.first:
            x = receive_like(activations_like(x), pipe, -1).requires_grad_()
        y = stage(x)
        if not stage.last:
            send(y.detach(), pipe, 1)
        passes.append((x, y, tokens_bT[:, 1:]))
    losses = []
    for x, y, targets_bT in passes:
        if stage.last:
            loss = F.cross_entropy(y.flatten(0, 1), targets_bT.flatten(), reduction="sum") / (B * T)
            loss.backward()
            losses.append(loss.detach())  # read at the end: `.item()` would stop the pipeline
        else:
            y.backward(receive_like(y, pipe, 1))
        if not stage.first:
            send(x.grad, pipe, -1)
    if mesh["dp"].size() > 1:
        for parameter in stage.parameters():
            dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
    return float(sum(losses)) / mesh["tp"].size()


def activations_like(tokens_bT: torch.Tensor) -> torch.Tensor:
    return torch.empty(*tokens_bT.shape, D, device=tokens_bT.device, dtype=torch.float64)


def send(x: torch.Tensor, pipe: dist.ProcessGroup, way: int) -> None:
    """Send to the next stage (way 1) or the one before (-1). NCCL wants batches, even of one."""
    peer = dist.get_rank(pipe) + way
    operation = dist.P2POp(dist.isend, x.contiguous(), group=pipe, group_peer=peer)
    dist.batch_isend_irecv([operation])[0].wait()


def receive_like(like: torch.Tensor, pipe: dist.ProcessGroup, way: int) -> torch.Tensor:
    """Receive from the next stage (way 1) or the one before (-1)."""
    received = torch.empty_like(like)
    peer = dist.get_rank(pipe) + way
    operation = dist.P2POp(dist.irecv, received, group=pipe, group_peer=peer)
    dist.batch_isend_irecv([operation])[0].wait()
    return received


# %% [markdown]
# ## 5. What each axis hands over, and which link it needs
#
# Let A be the activations of a rank's share of the batch, (B/dp) T D elements. Per step,
#
#     tp    4 all-reduces per block     4 A per block of the stage
#     pp    activations on, gradients   A to each neighbor
#           back
#     dp    one all-reduce              the rank's own parameters
#
# The same function predicts what is counted below, and what a published run hands over: Megatron's
# 145.6B GPT on 1536 A100s (Narayanan et al., 2021, table 1), in 24 x 8 x 8. A ring all-reduce sends
# 2(n-1)/n of what it is handed, so these are the bytes that cross a GPU's links.


# %%
def bytes_handed_over(
    blocks: int, parameters: float, activations: float, neighbors: int, element_bytes: int
) -> dict[str, float]:
    """Per axis, for a rank and a step, given what the rank holds and its share of activations."""
    return {
        "dp": parameters * element_bytes,
        "pp": neighbors * activations * element_bytes,
        "tp": 4 * blocks * activations * element_bytes,
    }


def published_run() -> dict[str, float]:
    """Return the GB that a GPU in the middle of the 145.6B run sends per step, by axis."""
    dp, pp, tp = 24, 8, 8
    blocks, width, tokens, batch, parameters = 80, 12288, 2048, 2304, 145.6e9
    activations = batch / dp * tokens * width
    handed = bytes_handed_over(blocks // pp, parameters / (pp * tp), activations, 2, 2)
    ring = {"dp": 2 * (dp - 1) / dp, "pp": 1, "tp": 2 * (tp - 1) / tp}
    return {axis: ring[axis] * handed[axis] / 1e9 for axis in handed}


def print_published_run(nvlink: float = 300, network: float = 25) -> None:
    """Print GB and seconds per step; the links in GB/s one way."""
    sent = published_run()
    print0(f"\n  145.6B GPT, dp 24, pp 8, tp 8{'':22}{'dp':>10}{'pp':>10}{'tp':>10}{'sum':>10}")
    print0(f"  {'GB per GPU and step':50}" + "".join(f"{x:10.1f}" for x in sent.values()))
    for inner in ("pp", "tp"):
        seconds = []
        for axis, gigabytes in sent.items():
            seconds.append(gigabytes / (nvlink if axis == inner else network))
        row = "".join(f"{x:10.2f}" for x in (*seconds, sum(seconds)))
        print0(f"  {f's if {inner} has NVLink, the others 200 Gb/s':50}{row}")


def print_busy_shares(n: int = 4, width: int = 1024) -> None:
    """Print how long GPUs of 989 TFLOP/s compute if they gather after every layer."""
    links = {"NVLink 4": 450, "PCIe 5.0 x16": 63, "400 Gb/s network": 50, "25 Gb/s Ethernet": 3.125}
    print0(f"\n  {width} wide in bfloat16 over {n} H100, gathered after every layer, no overlap")
    for link, rate in links.items():
        busy = busy_share(width, n, 989e12, rate * 1e9)
        half = 989e12 / (rate * 1e9) * (n - 1)  # the width at which 2 W / ((n-1) 2) is peak / rate
        print0(f"  {link:20} computes {busy:6.1%} of the time; half of it if {half:,.0f} wide")


# %% [markdown]
# ## 6. How it is measured
#
# The **oracle** is the same GPT, trained by one process on the same text, in float64. Adam divides
# a gradient by its own size plus 1e-8, so a rounding error of 2**-53 in a gradient near zero may
# move a weight by the learning rate times 2**-53 / 1e-8, in every step.


# %%
STEPS = 15
LEARNING_RATE = 3e-3
TOLERANCE = STEPS * LEARNING_RATE * 2**-53 / 1e-8


def batch_of(step: int, device: torch.device) -> torch.Tensor:
    """Return B sequences of T + 1 bytes of argparse's source, the same on every rank."""
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - T, (B,), generator=generator)
    return torch.stack([text[at : at + T + 1] for at in starts.tolist()]).long().to(device)


def train_in_one_process(gpt: GPT, device: torch.device) -> float:
    """Train a GPT; return the loss of the last step."""
    optimizer = torch.optim.Adam(gpt.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        tokens_BT = batch_of(step, device)
        logits_BTV = gpt(tokens_BT[:, :-1])
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def train_on_mesh(stage: Stage, mesh: dist.DeviceMesh, device: torch.device) -> float:
    """Train this rank's part; return the loss of the last step, the same on every rank."""
    optimizer = torch.optim.Adam(stage.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        mine = train_step(stage, mesh, batch_of(step, device))
        optimizer.step()
    return sum(gather_objects(mine))


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference between two tensors, relative to the largest element."""
    return ((ours - expected).abs().max() / expected.abs().max()).item()


def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


# %% [markdown]
# What a rank hands over is counted beneath torch's dispatcher, with the ranks of the group that it
# is handed to, which tell the axis. The counter is the same in all lessons that need it.


# %%
class Call(NamedTuple):
    """One collective, send or receive of this rank, as it was handed to the process group."""

    operation: str  # "all_reduce", "all_gather", "reduce_scatter", "send", ...
    elements: int  # of its input or its output, whichever is larger
    nbytes: int  # of the same
    ranks: tuple[int, ...]  # of the group
    peer: int | None  # of a send or receive: the other rank; None: any


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
# Every mesh trains, is compared with the oracle, and counts one more step. Where an axis has one
# rank, nothing goes along it: a claim that 0 equals 0 would be none, so it is BLOCKED.


# %%
def check_mesh(
    shape: tuple[int, int, int], device: torch.device, gpt: GPT, trained: GPT, loss: float
) -> None:
    """Train on one mesh; claim the weights, the loss, and the bytes handed over along each axis."""
    dp, pp, tp = shape
    name = f"mesh {dp},{pp},{tp}"
    mesh = device_mesh(device, shape)
    stage = Stage(gpt, mesh)
    mean_loss = train_on_mesh(stage, mesh, device)
    claim(f"{name}: loss of the last step", loss, mean_loss, atol=TOLERANCE)
    expected = Stage(trained, mesh)
    errors = []
    for ours, theirs in zip(stage.parameters(), expected.parameters(), strict=True):
        errors.append(relative_error(ours.detach(), theirs.detach()))
    claim(f"{name}: error of the trained weights", 0, max(errors), atol=TOLERANCE)

    with CountedCommunication() as counted:
        train_step(stage, mesh, batch_of(0, device))
    blocks = len(stage.blocks)
    sequences = len(torch.arange(B).tensor_split(dp)[mesh.get_local_rank("dp")])
    neighbors = (not stage.first) + (not stage.last)
    held = parameters_of(blocks, stage.first, stage.last, tp)
    handed = bytes_handed_over(blocks, held, sequences * T * D, neighbors, 8)
    for axis, size in (("dp", dp), ("pp", pp), ("tp", tp)):
        calls = calls_along(mesh, axis, counted)
        if size == 1:
            needs = f"{2 * WORLD_SIZE} ranks, or --mesh with {axis} > 1"
            blocked(f"{name}: bytes along {axis}", needs=needs)
            continue
        measured = sum(call.nbytes for call in calls)
        claim(f"{name}: bytes along {axis}", handed[axis], measured, question=2)
        if axis == "tp":
            per_block = len(calls) / (blocks * MICRO_BATCHES)
            claim(f"{name}: all-reduces per block", 4, per_block, question=3)


def calls_along(mesh: dist.DeviceMesh, axis: str, counted: CountedCommunication) -> list[Call]:
    """Return what was handed to the axis' group: all-reduces, and the sending half of messages."""
    ranks = tuple(dist.get_process_group_ranks(mesh.get_group(axis)))
    calls = counted.calls("all_reduce") + counted.calls("send")
    return [call for call in calls if call.ranks == ranks]


def parameters_of(blocks: int, first: bool, last: bool, tp: int) -> int:
    """Return how many parameters a rank holds, by the formula."""
    split = (12 * D * D + 7 * D) // tp  # qkv, out's and down's weights, up
    whole = 6 * D  # two norms, and the biases added after g
    embeddings = first * (V + T) * D
    head = last * (2 * D + V * D)
    return blocks * (split + whole) + embeddings + head


# %% [markdown]
# FLOPs are counted by PyTorch's own `FlopCounterMode`, as matrix products pass; a rank receives of
# an all-gather all but its own part.


# %%
def check_gather_after_every_layer(device: torch.device) -> None:
    """Claim the gradients and the FLOPs per byte of a layer gathered by all ranks."""
    if WORLD_SIZE == 1:
        blocked("FLOPs per gathered byte", needs="2 ranks")
        return
    W = 1024 // WORLD_SIZE * WORLD_SIZE
    torch.manual_seed(0)  # the same on every rank
    weights = []
    for _ in range(4):
        w_WW = torch.randn(W, W, device=device, dtype=torch.float64) / W**0.5
        weights.append(w_WW.requires_grad_())
    mine = [w_WW.detach().chunk(WORLD_SIZE)[RANK].clone().requires_grad_() for w_WW in weights]
    for batch in (4, 16):
        x_BW = torch.randn(batch, W, device=device, dtype=torch.float64)
        whole_BW = x_BW
        for w_WW in weights:
            whole_BW = F.linear(whole_BW, w_WW).tanh()
        y_BW = x_BW
        with CountedCommunication() as counted, FlopCounterMode(display=False) as flops:
            for w_wW in mine:
                y_BW = GatherFeatures.apply(F.linear(y_BW, w_wW).tanh())
        expected = torch.autograd.grad(whole_BW.square().sum(), weights)
        ours = torch.autograd.grad(y_BW.square().sum() / WORLD_SIZE, mine)  # n equal losses
        errors = []
        for grad, theirs in zip(ours, expected, strict=True):
            errors.append(relative_error(grad, theirs.chunk(WORLD_SIZE)[RANK]))
        gathered = sum(call.nbytes for call in counted.calls("all_gather"))
        received = gathered * (WORLD_SIZE - 1) / WORLD_SIZE
        per_byte = flops.get_total_flops() / received
        rounding = 10 * 4 * W * 2**-53  # ten operations in a row, sums of up to 4 W terms
        claim(f"batch {batch}: error of the gradients", 0, max(errors), atol=rounding)
        expected_ratio = flops_per_byte(W, WORLD_SIZE, 8)
        claim(f"batch {batch}: FLOPs per gathered byte", expected_ratio, per_byte, question=1)


# %% [markdown]
# ## 7. On GPUs: would a bigger batch help?
#
# The share of the time that a rank computes, if it gathers after every layer and nothing overlaps,
# is measured with CUDA events: the product alone, and the gather alone. Section 1 says that four
# times the batch leave it where it is.


# %%
def check_busy_share_on_gpus(device: torch.device) -> None:
    """Claim that the share of time spent computing does not grow with the batch."""
    if device.type == "cpu" or WORLD_SIZE == 1 or not torch.cuda.is_bf16_supported(False):
        blocked("share of time computing, batch x 4 / batch", needs="2 GPUs with bfloat16")
        return
    W = 1024 // WORLD_SIZE * WORLD_SIZE
    shares = []
    for batch in (65_536, 262_144):
        x_BW = torch.randn(batch, W, device=device, dtype=torch.bfloat16)
        w_wW = torch.randn(W // WORLD_SIZE, W, device=device, dtype=torch.bfloat16)
        y_Bw = F.linear(x_BW, w_wW)
        y_nBw = torch.empty(WORLD_SIZE * batch, W // WORLD_SIZE, device=device, dtype=x_BW.dtype)
        computing = median_ms(lambda x_BW=x_BW, w_wW=w_wW: F.linear(x_BW, w_wW))
        gathering = median_ms(lambda all=y_nBw, own=y_Bw: dist.all_gather_into_tensor(all, own))
        shares.append(computing / (computing + gathering))
        words = f"{computing:.2f} ms computing, {gathering:.2f} ms gathering"
        print0(f"{'':13}batch {batch}: {words}, busy {shares[-1]:.0%} of the time")
    ratio = shares[1] / shares[0]
    claim("share of time computing, batch x 4 / batch", 1, ratio, atol=0.25, timed=True)


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
# 1. 2 x 1024 / (3 x 8) = 85.3 FLOPs per byte, with either batch. In bfloat16 it is 341, and an H100
#    on NVLink 4 needs 989e12 / 450e9 = 2,198 to be busy half of the time: it computes 13% of the
#    time, on 25 Gb/s Ethernet 0.1%. A bigger batch changes nothing; a wider layer does.
# 2. tp leads: with dp 2, A is 9,216 elements, and a rank hands 4 x 5 A x 8 bytes = 1.47 MB to sums
#    along tp, but 0.40 MB of gradients along dp. pp sends least: A to its neighbor, 74 kB with
#    dp 2. Gradients come second in this toy; a larger batch moves more activations, not more
#    gradients.
# 3. Four: f and g around attention, f and g around the MLP.
#
# The same function gives for the 145.6B GPT 338 GB per GPU and step along tp, 9.7 along pp, 8.7
# along dp. So the rule is: **tensor parallelism stays inside one NVLink domain** (8 GPUs in most
# machines, 72 in an NVL72 rack); pipeline and data parallelism may cross the network. And tp waits
# for its sums in every block, while the others' messages can pass behind computation.
#
# The table leaves three things out. That run recomputed activations, which repeats the two forward
# sums of each block (6 for 4: 507 GB); Megatron sums gradients in float32 (17.4 GB along dp); and
# interleaved schedules with v chunks per rank send v times as much along pp.
#
# **Try.** With 2 for 4, the bytes along tp fail on every mesh that has tp, and the table would tell
# 169 GB: a table is worth what the claims behind its formula are worth. Without the sum along dp,
# its bytes, the weights and the loss fail on the meshes that have dp, and only there.
#
# On real systems, ZeRO or FSDP usually takes the place of plain dp, sequence parallelism that of
# the replicated norms, and long texts and experts bring a fourth and a fifth axis (context and
# expert parallelism). Choose tp first, as small as memory allows inside the NVLink domain; then pp;
# what remains is dp.


# %%
def chosen_meshes(text: str | None) -> list[tuple[int, int, int]]:
    """Return the meshes to run, given what stood behind --mesh."""
    if text is None:
        shapes = meshes_of(WORLD_SIZE)
        if not shapes:
            refuse(f"no mesh of tp 1, 2 or 4 and pp up to 5 fits {WORLD_SIZE} ranks; use 4 or 8")
        return shapes
    if not re.fullmatch(r"[1-9]\d*,[1-9]\d*,[1-9]\d*", text):
        refuse(f"--mesh takes three sizes, dp,pp,tp; got {text}; write --mesh 2,1,2")
    dp, pp, tp = map(int, text.split(","))
    if dp * pp * tp != WORLD_SIZE:
        product = dp * pp * tp
        refuse(f"dp x pp x tp must be the number of ranks; got {product} for {WORLD_SIZE} ranks")
    if H % tp != 0 or pp > LAYERS or dp * MICRO_BATCHES > B:
        rule = f"tp must divide {H} heads, pp be at most {LAYERS}, dp at most {B // MICRO_BATCHES}"
        refuse(f"{rule}; got {text}; choose smaller axes")
    return [(dp, pp, tp)]


def main() -> None:
    options = command_line(
        {"--mesh": {"metavar": "DP,PP,TP", "help": "train on this mesh alone, say 2,1,2"}}
    )
    launch([ranks for ranks in range(1, 1025) if meshes_of(ranks)])
    shapes = chosen_meshes(options.mesh)
    device = setup()
    check_gather_after_every_layer(device)
    torch.manual_seed(0)  # the same weights on every rank
    gpt = GPT(LAYERS, D, T, V).to(device, torch.float64)
    trained = copy.deepcopy(gpt)
    loss = train_in_one_process(trained, device)
    claim("one process: loss of the last step, at most", 4.2, loss, "<=", varies=True)
    for shape in shapes:
        check_mesh(shape, device, gpt, trained, loss)
    print_published_run()
    print_busy_shares()
    check_busy_share_on_gpus(device)
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
