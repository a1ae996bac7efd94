"""A GPT on a mesh, by library: pipelining, parallelize_module, fully_shard in one order
=====================================================================================

**Question.** PyTorch has a call for each kind of parallelism. In which order are they applied to
one model, what does a rank hold after each, and is the result what one process would compute?

**Predict**, and write it down before you run. Eight ranks train a GPT of 64 features, split into 2
pipeline stages, the data over 2 shards, and each matrix over 2 ranks of tensor parallelism.

1. A block's query matrix has 64 x 64 numbers. How many of them does a rank hold between steps?
2. FSDP gathers a block before it computes. How many numbers of that matrix has a rank then?
3. `AdamW(stage.parameters())` is called first, then the stage is split along tp and dp. How many of
   its parameters does a step of this optimizer change?
4. `fully_shard` is called before `parallelize_module` instead of after it. Are the gradients then
   right or wrong, or is there an error?
5. A block's first RMSNorm has no matrix to split, so it is left out of the plan for tp. Are the
   gradients of a step then all right, is that norm's wrong, or is there an error?

**Run.**

    torchrun --standalone --nproc-per-node=8 13_gpt_by_library.py   # NCCL on 8 GPUs, else gloo
    python 13_gpt_by_library.py                                     # the same, started for you

Not run on several GPUs. On a machine with 2, 4 or 16 GPUs plain `python` takes as many ranks; the
questions are about 8.

**Try.** In `ready_to_train` let `dp` be `mesh["dp_shard"]`: on which of the printed meshes is the
step wrong? In `schedule_of` give `Schedule1F1B` one more argument,
`scale_grads=False`: which claims fail, and by how much are the gradients too large?

**Before.** parallelism/12_gpt_on_a_mesh.py: the same step, by hand. fsdp/01_fsdp_basics.py.

**Next.** parallelism/14_which_mesh_is_fastest.py: which mesh to put it on.
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
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.optim import AdamW, Optimizer

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: B sequences per step, T tokens each, V different tokens, D model width, H query heads, G
# key-value heads, K features per head, E hidden features. A small letter is a rank's share.
B, T, V, D, H, G, K, E = 16, 16, 64, 64, 16, 8, 4, 168
LAYERS = 4
AXES = ("pp", "dp_replicate", "dp_shard", "tp")  # of a mesh, outermost first
DATA = ("dp_replicate", "dp_shard")  # those along which ranks have other sequences
Mesh = dist.DeviceMesh

# %% [markdown]
# ## 1. One mesh, three splits, one order
#
# The model is a small Llama. Its code stands at the end; the splits need only its names:
#
#     embedding
#     blocks 0 to 3:    norm1    attention (q, k, v, out)    norm2    mlp (gate, up, down)
#     norm, head
#
# Each split takes an axis of one mesh: pp cuts the layers, tp the matrices, and dp_shard what is
# then left of them (FSDP). What one split leaves is what the next one gets:
#
#     call                      a rank then holds           of one q   and sends, in a step
#     stage_of (pp)             its stage's layers, whole   64 x 64    activations, between stages
#     parallelize_module (tp)   its rows or columns         32 x 64    activations, in every block
#     fully_shard (dp_shard)    its shard of these          16 x 64    weights and gradients
#     AdamW                     moments of what it holds    16 x 64    nothing
#
#     while a block computes    what is gathered along dp   32 x 64
#
# The last line is why the order is not free. tp rewrites a layer, so that it computes with the
# rank's own rows. FSDP must hand it just these: it has to shard what tp has left. The cut comes
# before both, so that they split only the layers that stay, and the optimizer after both, since
# `parallelize_module` and `fully_shard` replace parameters by new ones.
#
# The cut is plain Python, as in torchtitan: each rank copies the model and drops the layers of
# other stages. A stage without the embedding takes activations instead of tokens; one without the
# head returns activations instead of logits.


# %%
def stage_of(model: "LlamaModel", s: int, p: int) -> "LlamaModel":
    """Return a copy with the layers of stage s of p, and None in place of ends it has not."""
    stage = copy.deepcopy(model)
    for i in range(LAYERS):
        if i not in range(s * LAYERS // p, (s + 1) * LAYERS // p):
            del stage.blocks[str(i)]
    if s > 0:
        stage.embedding = None
    if s < p - 1:
        stage.norm = stage.head = None
    return stage


# %% [markdown]
# The four calls in order; the plan is that of section 2.


# %%
def ready_to_train(model: nn.Module, mesh: Mesh, plan: dict) -> tuple[nn.Module, Optimizer]:
    """Return this rank's stage, split along tp, then sharded along dp, and its optimizer."""
    pp = mesh["pp"]
    dp = mesh[DATA]
    stage = stage_of(model, pp.get_local_rank(), pp.size())
    for block in stage.blocks.values():
        parallelize_module(block, mesh["tp"], plan)
        # a real run: activation checkpointing here, then torch.compile
        fully_shard(block, mesh=dp)  # a unit: gathered as one, freed as one
    put_ends_on_mesh(stage, mesh["tp"], dp)
    return stage, AdamW(stage.parameters())


def put_ends_on_mesh(stage: nn.Module, tp: Mesh, dp: Mesh) -> None:
    """Do the same with embedding, norm and head, as far as this stage has them."""
    ends = {name: style for name, style in ENDS.items() if getattr(stage, name) is not None}
    parallelize_module(stage, tp, ends)
    fully_shard(stage, mesh=dp)  # what is in no block


def put_on_mesh(model: nn.Module, mesh: Mesh) -> nn.Module:
    return ready_to_train(model, mesh, BLOCK)[0]


# %% [markdown]
# The place of checkpointing and compile is torchtitan's (its issue 1554); neither runs here.
#
# `mesh[DATA]` has two axes. `fully_shard` shards along the second and copies the shards along the
# first, `dp_replicate`; that is HSDP. In the questions there is one copy: plain FSDP.

# %% [markdown]
# ## 2. The plan for tp: one line per module
#
# A **plan** says of each module how its weights are split, and how its input and output lie on the
# ranks. A block, from left to right, with sequence parallelism (06_tensor_parallel.py):
#
#     a rank has     T / tp tokens         all T                 all T                 T / tp
#     attention      norm1            -->  q, k, v          -->  out              -->  added to x
#     mlp            norm2            -->  gate, up         -->  down             -->  added to x
#     tp splits      nothing               outputs               inputs
#     style          SequenceParallel      ColwiseParallel       RowwiseParallel
#
# `Shard(1)` says that the tokens, dimension 1 of x, are split, `Replicate()` that a rank has all of
# them. In front of attention and MLP tokens are gathered (`PrepareModuleInput`). Behind `out` and
# `down` the ranks' summands are added up and scattered again. *Colwise* means outputs, which are
# the *rows* of an `nn.Linear`'s weight; for attention these are a rank's own heads.

# %%
BLOCK = {
    "norm1": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "attention.q": ColwiseParallel(),
    "attention.k": ColwiseParallel(),
    "attention.v": ColwiseParallel(),
    "attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "norm2": SequenceParallel(),
    "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "mlp.gate": ColwiseParallel(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
}
ENDS = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}

# %% [markdown]
# torchtitan's Llama has the same plan, but for the head: by default it leaves the logits split over
# the vocabulary and computes the loss from these shares (18_vocabulary_parallel.py). `Replicate()`
# gathers the logits of all V tokens on each rank, so that the loss is a plain one.
#
# The norms are in the plan although nothing of them is split. Each rank of tp has a gradient from
# its own tokens, and these must be added up. `SequenceParallel` makes the weight a DTensor that is
# copied along tp. Its gradient is then marked as a summand (`Partial`), and FSDP adds the summands
# up along tp before it scatters them along dp.

# %% [markdown]
# ## 3. A step
#
# The **schedule** runs the pipeline. It is made once, for a stage that is on the mesh. In each step
# it hands tokens to the first stage and targets to the last one, and averages over micro-batches,
# as FSDP does over dp. Without pp there is one stage, and the schedule only adds up the
# micro-batches' gradients.


# %%
def schedule_of(stage: nn.Module, mesh: Mesh) -> Schedule1F1B:
    pp = mesh["pp"]
    device = torch.device(mesh.device_type)
    place = PipelineStage(stage, pp.get_local_rank(), pp.size(), device, group=pp.get_group())
    return Schedule1F1B(place, n_microbatches=max(2, pp.size()), loss_fn=loss_of)


def train_step(
    schedule: Schedule1F1B, optimizer: Optimizer, mesh: Mesh, x_bT: torch.Tensor
) -> None:
    optimizer.zero_grad()
    compute_gradients(schedule, mesh, x_bT)
    optimizer.step()


def compute_gradients(schedule: Schedule1F1B, mesh: Mesh, x_bT: torch.Tensor) -> list[torch.Tensor]:
    """Leave the gradient of the mean loss; return the micro-batches' losses, in the last stage."""
    tokens = [x_bT[:, :-1].contiguous()] if mesh["pp"].get_local_rank() == 0 else []
    losses = []
    schedule.step(*tokens, target=x_bT[:, 1:], losses=losses)
    return losses


def loss_of(logits_bTV: torch.Tensor, next_bT: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_bTV.flatten(0, 1), next_bT.flatten())


# %% [markdown]
# ## 4. How it is measured
#
# Each mesh starts from the same weights, and computes one gradient in float64. The **oracle** is
# the model in one process. `full_tensor()` gathers a DTensor's gradient along all its axes. A
# gradient passes some 20 operations per block, each a sum of up to E terms in another order.

# %%
MESHES = {  # by ranks: sizes of (pp, dp_replicate, dp_shard, tp)
    1: [(1, 1, 1, 1)],
    2: [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)],
    4: [(1, 1, 2, 2), (2, 1, 1, 2), (2, 1, 2, 1), (1, 2, 2, 1), (4, 1, 1, 1), (1, 1, 1, 4)],
    8: [(2, 1, 2, 2), (1, 2, 2, 2), (2, 2, 2, 1), (4, 1, 1, 2), (1, 1, 8, 1), (1, 1, 1, 8)],
    16: [(2, 1, 4, 2), (2, 2, 2, 2)],
}
ATOL = 20 * LAYERS * E * 2**-53
Shape = tuple[int, ...]


def make_mesh(shape: Shape, device: torch.device) -> Mesh:
    return dist.init_device_mesh(device.type, shape, mesh_dim_names=AXES)


def share_of(tokens_BT: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Return this rank's sequences; all ranks of pp and tp have the same."""
    for name in DATA:
        axis = mesh[name]
        tokens_BT = tokens_BT.chunk(axis.size())[axis.get_local_rank()]
    return tokens_BT


def check_meshes(shapes: list[Shape], whole: nn.Module, tokens_BT: torch.Tensor) -> None:
    """Claim that a step is the same on all meshes as in one process."""
    loss = loss_of(whole(tokens_BT[:, :-1]), tokens_BT[:, 1:])
    loss.backward()
    errors = []
    for shape in shapes:
        mesh = make_mesh(shape, tokens_BT.device)
        stage = put_on_mesh(whole, mesh)
        losses = compute_gradients(schedule_of(stage, mesh), mesh, share_of(tokens_BT, mesh))
        of_loss = abs(mean_loss(losses, tokens_BT.device) / loss.item() - 1)
        errors.append((error_of_gradients(stage, whole), of_loss))
        sizes = zip(AXES, shape, strict=True)
        on = ", ".join(f"{axis} {size}" for axis, size in sizes if size > 1)
        print0(f"{'':13}{on or 'one rank'}: error of gradients {errors[-1][0]:.1e}")
    worst = torch.tensor(errors).max(dim=0).values  # NaN if one is
    claim("any mesh: error of the gradients", 0, worst[0], atol=ATOL)
    claim("any mesh: error of the loss", 0, worst[1], atol=ATOL)


def mean_loss(losses: list[torch.Tensor], device: torch.device) -> float:
    """Return the mean over all micro-batches of all ranks; those of tp have the same losses."""
    numbers = [sum(loss.item() for loss in losses), len(losses)]
    total = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def error_of_gradients(stage: nn.Module, whole: nn.Module) -> float:
    """Return the largest error of a parameter's gradient, relative to the parameter's largest."""
    errors = []
    for name, parameter in stage.named_parameters():
        expected = whole.get_parameter(name).grad
        errors.append(relative_error(parameter.grad.full_tensor(), expected))
    return max(errors)


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element; inf if one is no number."""
    error = (ours - expected).abs().max() / expected.abs().max()
    return error.nan_to_num(nan=torch.inf).item()


# %% [markdown]
# The questions are answered on the first of the meshes.


# %%
def check_shares(shape: Shape, whole: nn.Module, tokens_BT: torch.Tensor) -> None:
    """Claim how many numbers a rank has of a matrix that tp splits, and of a norm."""
    mesh = make_mesh(shape, tokens_BT.device)
    stage = put_on_mesh(whole, mesh)
    block = next(iter(stage.blocks.values()))
    q = block.attention.q
    *_, shards, tp = shape
    claim("numbers of q on a rank", D * H * K / shards / tp, numbers_of(q), question=1)
    claim("numbers of an RMSNorm on a rank", D / shards, numbers_of(block.norm1))
    seen = []
    q.register_forward_pre_hook(lambda *_: seen.append(numbers_of(q)))
    compute_gradients(schedule_of(stage, mesh), mesh, share_of(tokens_BT, mesh))
    claim("numbers of q while its block computes", D * H * K / tp, seen[0], question=2)


def numbers_of(module: nn.Module) -> int:
    return module.weight.to_local().numel()


def check_optimizers(shape: Shape, whole: nn.Module, tokens_BT: torch.Tensor) -> None:
    """Claim what comes of an optimizer that is made too early, and of one made last."""
    mesh = make_mesh(shape, tokens_BT.device)
    late = ready_to_train(whole, mesh, BLOCK)
    stage = stage_of(whole, mesh["pp"].get_local_rank(), mesh["pp"].size())
    early = stage, AdamW(stage.parameters())
    for block in stage.blocks.values():
        parallelize_module(block, mesh["tp"], BLOCK)
        fully_shard(block, mesh=mesh[DATA])  # too late for AdamW
    put_ends_on_mesh(stage, mesh["tp"], mesh[DATA])
    changed = []
    for stage, optimizer in (early, late):
        before = [parameter.to_local().clone() for parameter in stage.parameters()]
        train_step(schedule_of(stage, mesh), optimizer, mesh, share_of(tokens_BT, mesh))
        pairs = zip(before, stage.parameters(), strict=True)
        changed.append(sum(not torch.equal(old, new.to_local()) for old, new in pairs))
    claim("parameters changed, optimizer made first", 0, changed[0], question=3)
    claim("parameters changed, optimizer made last", len(before), changed[1])


# %% [markdown]
# The two other mistakes: FSDP before tp, and a norm without a line in the plan. What is wrong with
# that norm's gradient can be said exactly: it is one summand of the right one.


# %%
def check_fsdp_first(shape: Shape, whole: nn.Module, device: torch.device) -> None:
    """Claim that tp can split no block that FSDP has sharded."""
    mesh = make_mesh(shape, device)
    stage = stage_of(whole, mesh["pp"].get_local_rank(), mesh["pp"].size())
    split = 0
    for block in stage.blocks.values():
        fully_shard(block, mesh=mesh[DATA])  # too early for tp
        try:
            parallelize_module(block, mesh["tp"], BLOCK)
            split += 1
        except (RuntimeError, ValueError) as error:
            if "DTensor" not in str(error):
                raise
    claim("blocks that tp can split after fully_shard", 0, split, question=4)


def check_plan(shapes: list[Shape], whole: nn.Module, tokens_BT: torch.Tensor) -> None:
    """Claim that a norm without a line in the plan gets one summand, and no error.

    `whole` has the right gradients.
    """
    own = "norm1 not in the plan: error of its gradient"
    summed = "norm1 not in the plan: error of the sum over tp"
    if WORLD_SIZE == 1:
        blocked(own, needs="2 ranks")
        blocked(summed, needs="2 ranks")
        return
    mesh = make_mesh(next(shape for shape in shapes if shape[-1] > 1), tokens_BT.device)
    plan = {name: BLOCK[name] for name in BLOCK if name != "norm1"}
    stage, _ = ready_to_train(whole, mesh, plan)
    compute_gradients(schedule_of(stage, mesh), mesh, share_of(tokens_BT, mesh))
    errors = []
    for name, block in stage.blocks.items():
        expected = whole.blocks[name].norm1.weight.grad
        grad = block.norm1.weight.grad.full_tensor()  # along dp: it knows of no tp
        total = grad.clone()
        dist.all_reduce(total, group=mesh["tp"].get_group())
        errors.append((relative_error(grad, expected), relative_error(total, expected)))
    worst = torch.tensor(errors).max(dim=0).values
    claim(own, 0.1, worst[0], ">=", question=5)
    claim(summed, 0, worst[1], atol=ATOL)


# %% [markdown]
# ## What you should have seen
#
# 1. 1,024, a quarter: tp has split the 64 rows once, dp_shard once more. Of a norm, which tp
#    copies, a rank holds 32 of 64.
# 2. 2,048, its 32 rows: FSDP gathers along dp_shard, and what tp has split stays split. That is why
#    the two do not disturb each other.
# 3. None, and no error. The optimizer has the parameters that the stage had then, and no gradient
#    ever comes to them. The one that is made last changes all.
# 4. An error at each block: `parallelize_module` is to make a DTensor out of a parameter that is
#    one already, and says so. That is the better kind of mistake; questions 3 and 5 have the other
#    kind.
# 5. Only that norm's is wrong, and there is no error. Its weight is no DTensor along tp, so its
#    gradient stays that of the rank's own tokens, T / tp of them. Added up over tp it is right, as
#    the last row shows.
#
# All meshes have the gradient of one process. **Model and plan say nothing of the mesh.** It has
# to fit them: tp divides the heads of keys and values, dp and micro-batches the batch; pp is at
# most the layers.
#
# **Try.** With `dp_shard` alone the gradients of the copies are never averaged: the step is wrong
# wherever dp_replicate is 2, and right elsewhere. With `scale_grads=False` the micro-batches'
# gradients are added and not averaged: the row of gradients fails, and that of the sum over tp.
# There are two micro-batches, so gradients are twice as large, and with 4 stages four times.
#
# **Not measured here**: what breaks when checkpointing, compile or the cut stand elsewhere in the
# order, and how often FSDP gathers a block in a step of several micro-batches.
#
# **Clipping** needs two lines by hand. `get_total_norm` of a stage's gradients returns a DTensor,
# which knows what is copied along dp and tp: take its `full_tensor()`. No stage knows of the
# others: add the squares along pp (12_gpt_on_a_mesh.py).
#
# **On GPUs** (not run) the same file uses NCCL. A real run adds a policy of mixed precision to
# `fully_shard` and schedules with less bubble (08_interleaved_schedules.py). Here each rank draws
# the whole model and keeps its part; one that fits on no rank is made on the meta device, put on
# the mesh, and filled from a checkpoint (fsdp/04_fsdp_refinements.py). A distributed checkpoint
# knows parameters by their names and whole shapes: what one mesh has saved any other loads
# (fsdp/06_fsdp_checkpoint.py). At a thousand ranks the mesh is 4,1,32,8, say, and the program is
# the same.
#
# **When.** One machine, and the model fits with `fully_shard` alone: take only that. Add tp, inside
# the machine, when a rank's share of the batch gets so small that its gathers are no longer hidden.
# Add pp, across machines, when dp's traffic is too much for the network between them. By hand only
# what no call does: a tied embedding across stages, an order of your own.

# %% [markdown]
# The model, which knows of no rank. Its parts are those of 12_gpt_on_a_mesh.py: RMSNorm, RoPE,
# grouped queries, SwiGLU. Two things differ. Attention and MLP are modules of their own, so that
# the plan can name them. And the head has weights of its own: torch.distributed.pipelining has no
# call that adds up the gradients of an embedding that two stages share. `-1` in `unflatten` is what
# makes the attention work on a rank's own heads.


# %%
def rotate(x_bhTK: torch.Tensor) -> torch.Tensor:
    """RoPE (Su et al., 2021): turn the features (i, i + K/2) of token t by t / 10000^(2i / K)."""
    t_T = torch.arange(x_bhTK.shape[-2], dtype=torch.float64)
    i_k = torch.arange(K // 2, dtype=torch.float64)
    angle_Tk = torch.outer(t_T, 10_000 ** (-2 * i_k / K))
    cos_Tk = angle_Tk.cos().to(x_bhTK)
    sin_Tk = angle_Tk.sin().to(x_bhTK)
    a_bhTk, b_bhTk = x_bhTK.chunk(2, dim=-1)
    return torch.cat([a_bhTk * cos_Tk - b_bhTk * sin_Tk, a_bhTk * sin_Tk + b_bhTk * cos_Tk], -1)


class GroupedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(D, H * K, bias=False)
        self.k = nn.Linear(D, G * K, bias=False)
        self.v = nn.Linear(D, G * K, bias=False)
        self.out = nn.Linear(H * K, D, bias=False)

    def forward(self, x_bTD: torch.Tensor) -> torch.Tensor:
        q_bhTK = rotate(self.q(x_bTD).unflatten(-1, (-1, K)).transpose(1, 2))  # -1: my heads
        k_bgTK = rotate(self.k(x_bTD).unflatten(-1, (-1, K)).transpose(1, 2))
        v_bgTK = self.v(x_bTD).unflatten(-1, (-1, K)).transpose(1, 2)
        how = {"is_causal": True, "enable_gqa": True}
        y_bhTK = F.scaled_dot_product_attention(q_bhTK, k_bgTK, v_bgTK, **how)
        return self.out(y_bhTK.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.up = nn.Linear(D, E, bias=False)
        self.down = nn.Linear(E, D, bias=False)

    def forward(self, x_bTD: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x_bTD)) * self.up(x_bTD))


class LlamaLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(D, eps=1e-5)
        self.attention = GroupedAttention()
        self.norm2 = nn.RMSNorm(D, eps=1e-5)
        self.mlp = SwiGLU()

    def forward(self, x_bTD: torch.Tensor) -> torch.Tensor:
        x_bTD = x_bTD + self.attention(self.norm1(x_bTD))
        return x_bTD + self.mlp(self.norm2(x_bTD))


class LlamaModel(nn.Module):
    """Tokens (b, T) -> logits (b, T, V); a stage without one of its ends takes or gives (b, T, D).

    The blocks have names, not places: a stage's are called as they are in the whole model.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.blocks = nn.ModuleDict({str(i): LlamaLayer() for i in range(LAYERS)})
        self.norm = nn.RMSNorm(D, eps=1e-5)
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


# %% [markdown]
# All claims, in order. Plain `python` starts eight ranks.


# %%
def main() -> None:
    command_line()
    if "RANK" not in os.environ and torch.cuda.device_count() < 2:
        sys.argv.insert(0, "--nproc-per-node=8")  # torchrun's flag
    launch(list(MESHES))
    if WORLD_SIZE not in MESHES:
        refuse(f"needs 1, 2, 4, 8 or 16 ranks, got {WORLD_SIZE}: all is split into halves")
    device = setup()
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # no in-place operation here
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    torch.manual_seed(0)  # the same weights and tokens on every rank
    whole = LlamaModel().to(device, torch.float64)
    tokens_BT = torch.randint(V, (B, T + 1)).to(device)
    shapes = MESHES[WORLD_SIZE]
    check_meshes(shapes, whole, tokens_BT)
    check_shares(shapes[0], whole, tokens_BT)
    check_optimizers(shapes[0], whole, tokens_BT)
    check_fsdp_first(shapes[0], whole, device)
    check_plan(shapes, whole, tokens_BT)
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
