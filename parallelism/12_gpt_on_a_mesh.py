"""A GPT on a mesh, by hand: data, pipeline and tensor parallelism in one training step
====================================================================================

**Question.** Data, pipeline and tensor parallelism are simple one at a time. If a GPT trains with
all three at once, which sums belong to which axis, and what must not be counted twice?

**Predict**, and write it down before you run. Eight ranks train one GPT: two along each of dp
(other examples), pp (other layers) and tp (other parts of the same layers).

1. To find the norm of the gradient, each rank adds up the squares of all gradients that it holds,
   and the eight sums are added. How many times does that count a weight of an MLP?
2. How many times does it count a weight of an RMSNorm?
3. Along which axis does a rank hand over most bytes per step? (It has 8 sequences of 32 tokens, 64
   wide, and half of each matrix of two blocks, which have 44,672 parameters each.)
4. Ranks 0 to 3 are on one machine, ranks 4 to 7 on another. Which axis crosses the cable?
5. The embedding, 256 x 64 numbers, is the head, too: the first stage needs it, and so does the
   last. How many numbers must one of their ranks add up with the other stage per step?

**Run.**

    torchrun --standalone --nproc-per-node=8 12_gpt_on_a_mesh.py   # NCCL on 8 GPUs, else gloo
    python 12_gpt_on_a_mesh.py                                     # the same, started for you
    python 12_gpt_on_a_mesh.py --mesh 2,1,2                        # another mesh: dp,pp,tp

Not run on several GPUs.

**Try.** In `gradient_norm` leave out the first `continue` and the `if` above it: which claims fail?
In `device_mesh` put tp outermost, `(tp, dp, pp)` with names in the same order: which fail now?

**Before.** parallelism/06_tensor_parallel.py, parallelism/07_pipeline_schedules.py and
parallelism/18_vocabulary_parallel.py: f and g, 1F1B, and an embedding split by words.

**Next.** parallelism/13_gpt_by_library.py: the same mesh, by calls of PyTorch.
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
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
Group = dist.ProcessGroup | None  # the ranks that share a layer; None: all ranks

# Shapes: B sequences per step, T tokens each, V different tokens (bytes), D model width, H query
# heads, G key-value heads, K features per head, E hidden features. A small letter is a rank's
# share: b sequences of a micro-batch, v = V / tp, and likewise h, g, e.
B, T, V, D, H, G, K, E = 16, 32, 256, 64, 8, 4, 8, 168
LAYERS = 4
MICRO_BATCHES = 4
MESHES = {1: (1, 1, 1), 2: (1, 1, 2), 3: (3, 1, 1), 4: (1, 2, 2), 8: (2, 2, 2), 16: (4, 2, 2)}
MAX_NORM = 1.0  # a gradient longer than this is clipped

# %% [markdown]
# ## 1. A step on a mesh: what is partial is added up, what is copied counts once
#
# A **mesh** numbers the ranks like the elements of an array. Ranks whose places differ along one
# axis alone are a group:
#
#               pp 0: first layers       pp 1: last layers
#               tp 0        tp 1         tp 0        tp 1
#     dp 0      rank 0      rank 1       rank 4      rank 5
#     dp 1      rank 2      rank 3       rank 6      rank 7
#
#     groups of rank 0:   tp {0, 1}   dp {0, 2}   pp {0, 4}
#
# tp is innermost: its ranks are neighbors, and share the fastest links. Now ask of each tensor, and
# of each axis: is it **split**, **copied**, or **partial**, which is one summand of a sum?
#
#                               along tp          along pp               along dp
#     matrices                  split             on one stage           copied
#     norms                     copied            on one stage           copied
#     embedding, also the head  split             copied, on both ends   copied
#     output of split matrices  partial: g        handed on              of other examples
#     gradient of their input   partial: f        handed back            of other examples
#     gradients of parameters   complete          embedding's: partial   partial
#
# What is partial is added up once, over the axis along which it is partial. What is copied starts
# equal, is updated equally, and counts once. The step is this table as code. A `Stage` is what a
# rank holds, and f and g are inside of `run_pipeline`. A loss is divided at once by the tokens of
# the *whole* batch, so all that follows is a sum, and no mean.


# %%
def device_mesh(device: torch.device, shape: tuple[int, int, int]) -> dist.DeviceMesh:
    """Return the mesh of this (dp, pp, tp): pp outermost, tp innermost."""
    dp, pp, tp = shape
    return dist.init_device_mesh(device.type, (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))


def compute_gradients(stage: "Stage", tokens_BT: torch.Tensor) -> torch.Tensor:
    """Leave the gradient of the batch's mean loss; return this rank's summand of that loss."""
    stage.zero_grad()
    loss = run_pipeline(stage, tokens_BT.tensor_split(stage.dp.size())[stage.dp.rank()])
    gradients = [parameter.grad for parameter in stage.parameters()]
    bucket = nn.utils.parameters_to_vector(gradients)
    dist.all_reduce(bucket, group=stage.dp)
    nn.utils.vector_to_parameters(bucket, gradients)
    if stage.ends is not None:
        dist.all_reduce(stage.embedding.weight.grad, group=stage.ends)
    return loss


def gradient_norm(stage: "Stage") -> torch.Tensor:
    """Return the norm of the whole gradient, in which each parameter counts once."""
    squares = []
    for name, parameter in stage.named_parameters():
        if split_along(name) is None and stage.tp.rank() > 0:
            continue  # a copy: the first rank along tp counts it
        if name == "embedding.weight" and not stage.first:
            continue  # a copy: the first stage counts it
        squares.append(parameter.grad.square().sum())
    total = torch.stack(squares).sum()
    dist.all_reduce(total, group=stage.tp)
    dist.all_reduce(total, group=stage.pp)  # not along dp, where all is copied
    return total.sqrt()


def train_step(stage: "Stage", optimizer: Optimizer, tokens_BT: torch.Tensor) -> torch.Tensor:
    """Do one step; return this rank's summand of the loss, and the norm of the gradient."""
    loss = compute_gradients(stage, tokens_BT)
    norm = gradient_norm(stage)
    nn.utils.clip_grads_with_norm_(stage.parameters(), MAX_NORM, norm)
    optimizer.step()
    return torch.stack([loss, norm])


# %% [markdown]
# ## 2. The model, in one process
#
# The parts are Llama's: RMSNorm; **RoPE**, which turns queries and keys by an angle that grows with
# their place; **grouped queries**, H heads that share G heads of keys and values; **SwiGLU**, a
# gate times a value. Nothing here knows of ranks.


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


class LlamaBlock(nn.Module):
    """A pre-norm transformer block: (b, T, D) -> (b, T, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(D, eps=1e-5)
        self.q = nn.Linear(D, H * K, bias=False)
        self.k = nn.Linear(D, G * K, bias=False)
        self.v = nn.Linear(D, G * K, bias=False)
        self.out = nn.Linear(H * K, D, bias=False)
        self.norm2 = nn.RMSNorm(D, eps=1e-5)
        self.gate = nn.Linear(D, E, bias=False)
        self.up = nn.Linear(D, E, bias=False)
        self.down = nn.Linear(E, D, bias=False)

    def forward(self, x_bTD: torch.Tensor) -> torch.Tensor:
        x_bTD = x_bTD + self.attention(self.norm1(x_bTD))
        return x_bTD + self.mlp(self.norm2(x_bTD))

    def attention(self, x_bTD: torch.Tensor) -> torch.Tensor:
        features = [layer(x_bTD).unflatten(-1, (-1, K)) for layer in (self.q, self.k, self.v)]
        q_bhTK, k_bgTK, v_bgTK = [x_bThK.transpose(1, 2) for x_bThK in features]  # my heads
        how = {"is_causal": True, "enable_gqa": True}
        y_bhTK = F.scaled_dot_product_attention(rotate(q_bhTK), rotate(k_bgTK), v_bgTK, **how)
        return self.out(y_bhTK.transpose(1, 2).flatten(2))

    def mlp(self, x_bTD: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x_bTD)) * self.up(x_bTD))


class Llama(nn.Module):
    """A small GPT with Llama's parts, which reads bytes; its embedding is the head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(LlamaBlock() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(D, eps=1e-5)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, x_bT: torch.Tensor) -> torch.Tensor:
        """Return the logits (b, T, V) of the token after each of `x_bT`."""
        x_bTD = self.embedding(x_bT)
        for block in self.blocks:
            x_bTD = block(x_bTD)
        return F.linear(self.norm(x_bTD), self.embedding.weight)


# %% [markdown]
# ## 3. Along tp: f and g around each pair of matrices
#
# f and g are those of 06_tensor_parallel.py, and the loss is that of 18_vocabulary_parallel.py,
# written with g: a rank has the logits of its own v tokens, and of each token three numbers are
# compared or added up.


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


def local_rows(token_bT: torch.Tensor, v: int, tp: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's row among this rank's v, 0 for others', and which tokens are ours."""
    local_bT = token_bT - tp.rank() * v
    mine_bT = (local_bT >= 0) & (local_bT < v)
    return local_bT * mine_bT, mine_bT


def loss_of(logits_bTv: torch.Tensor, next_bT: torch.Tensor, tp: Group) -> torch.Tensor:
    """Return the cross-entropy of each token, (b, T)."""
    most_bT = logits_bTv.detach().amax(dim=-1)
    dist.all_reduce(most_bT, op=dist.ReduceOp.MAX, group=tp)
    shifted_bTv = logits_bTv - most_bT[..., None]
    total_bT = ReduceFromRanks.apply(shifted_bTv.exp().sum(dim=-1), tp)
    local_bT, mine_bT = local_rows(next_bT, logits_bTv.shape[-1], tp)
    right_bT = shifted_bTv.gather(-1, local_bT[..., None])[..., 0] * mine_bT
    return total_bT.log() - ReduceFromRanks.apply(right_bT, tp)


# %% [markdown]
# A rank cuts its part out of the whole model, which all ranks draw from the same seed. The code of
# a `LlamaBlock` stays: with a rank's own heads and hidden features, its attention and its MLP
# compute one summand of their output. So f stands before each, and g behind.


# %%
SPLIT_ALONG = {"q": 0, "k": 0, "v": 0, "out": 1, "gate": 0, "up": 0, "down": 1, "embedding": 0}


def split_along(name: str) -> int | None:
    """Along which dimension tp splits a parameter, say "blocks.0.q.weight"; None: it is copied."""
    return SPLIT_ALONG.get(name.split(".")[-2])


def share(whole: torch.Tensor, dim: int | None, group: Group) -> torch.Tensor:
    """Return a copy of this rank's part along `dim` within the group, or all of it if None."""
    mine = whole if dim is None else whole.chunk(group.size(), dim)[group.rank()]
    return mine.clone()


class Stage(nn.Module):
    """What one rank of a mesh holds of a Llama."""

    def __init__(self, whole: Llama, mesh: dist.DeviceMesh) -> None:
        super().__init__()
        self.dp = mesh.get_group("dp")
        self.pp = mesh.get_group("pp")
        self.tp = mesh.get_group("tp")
        s = self.pp.rank()
        p = self.pp.size()
        self.first = s == 0
        self.last = s == p - 1
        self.ends = None  # the group of first and last stage, if this is one of two
        if p > 1:
            pipelines = [None] * WORLD_SIZE
            dist.all_gather_object(pipelines, dist.get_process_group_ranks(self.pp))
            ends = sorted({(ranks[0], ranks[-1]) for ranks in pipelines})
            self.ends, _ = dist.new_subgroups_by_enumeration([list(pair) for pair in ends])
        part = copy.deepcopy(whole)
        self.blocks = nn.ModuleDict()
        for i in range(s * LAYERS // p, (s + 1) * LAYERS // p):
            self.blocks[str(i)] = part.blocks[i]
        if self.first or self.last:
            self.embedding = part.embedding
        if self.last:
            self.norm = part.norm
        for name, parameter in self.named_parameters():
            parameter.data = share(parameter.data, split_along(name), self.tp)

    def forward(self, x: torch.Tensor, next_bT: torch.Tensor) -> torch.Tensor:
        """Tokens (b, T) or activations (b, T, D) -> activations, or on the last stage a loss."""
        f = CopyToRanks.apply
        g = ReduceFromRanks.apply
        if self.first:
            local_bT, mine_bT = local_rows(x, len(self.embedding.weight), self.tp)
            x = g(self.embedding(local_bT) * mine_bT[..., None], self.tp)
        for block in self.blocks.values():
            x = x + g(block.attention(f(block.norm1(x), self.tp)), self.tp)
            x = x + g(block.mlp(f(block.norm2(x), self.tp)), self.tp)
        if not self.last:
            return x
        logits_bTv = F.linear(f(self.norm(x), self.tp), self.embedding.weight)
        return loss_of(logits_bTv, next_bT, self.tp).sum() / (B * T)


# %% [markdown]
# ## 4. Along pp: 1F1B between ranks that differ in pp alone
#
# The order and the exchange are those of 07_pipeline_schedules.py. All ranks along tp hold the same
# activations between two blocks, so each sends them to its own partner on the next stage.


# %%
Action = tuple[str, int]  # ("F" or "B", number of the micro-batch)
TOWARD = {"F": 1, "B": -1}  # the next stage, or the one before


def one_f_one_b(stage: int, p: int, m: int) -> list[Action]:
    """1F1B with a flush: the order in which a stage of p works on m micro-batches."""
    num_warmup = min(p - 1 - stage, m)
    order = [("F", k) for k in range(num_warmup)]  # fill the pipeline
    for k in range(m - num_warmup):  # steady state: one forward, one backward
        order.append(("F", num_warmup + k))
        order.append(("B", k))
    for k in range(m - num_warmup, m):  # drain it
        order.append(("B", k))
    return order


def run_pipeline(stage: Stage, tokens_bT: torch.Tensor) -> torch.Tensor:
    """Add to the gradients; return the loss of these sequences on the last stage, 0 elsewhere."""
    micro_batches = tokens_bT.tensor_split(MICRO_BATCHES)
    loss = torch.zeros((), device=tokens_bT.device, dtype=torch.float64)
    pipe = stage.pp
    held = {}
    result = None
    order = one_f_one_b(pipe.rank(), pipe.size(), MICRO_BATCHES)
    for done, todo in pairwise([None, *order, None]):
        messages = []
        receiver = pipe.rank() + TOWARD[done[0]] if done else None
        sender = pipe.rank() - TOWARD[todo[0]] if todo else None
        if receiver in range(pipe.size()):
            result = result.contiguous()
            messages.append(dist.P2POp(dist.isend, result, group=pipe, group_peer=receiver))
        if sender in range(pipe.size()):
            arrived = loss.new_empty(len(micro_batches[todo[1]]), T, D)
            messages.append(dist.P2POp(dist.irecv, arrived, group=pipe, group_peer=sender))
        for work in dist.batch_isend_irecv(messages) if messages else []:
            work.wait()
        if todo is None:
            return loss
        direction, k = todo
        if direction == "F":
            x = micro_batches[k][:, :-1] if stage.first else arrived.requires_grad_()
            y = stage(x, micro_batches[k][:, 1:])
            held[k] = (x, y)
            result = y.detach()
            if stage.last:
                loss += result
        else:
            x, y = held.pop(k)
            y.backward(None if stage.last else arrived)
            result = x.grad


# %% [markdown]
# ## 5. What each axis hands over
#
# Let A be the activations of a rank's sequences, (B/dp) T D numbers. Per step,
#
#     tp      4 A per block               f and g, of attention and of the MLP
#             A on the first stage        g of the embedding
#             A + 3 (B/dp) T on the last  f of the head; three numbers per token for the loss
#     dp      the rank's parameters       all gradients, once
#     pp      A to each neighbor          activations forward, their gradients backward
#     ends    V/tp D                      the embedding's gradient, between first and last stage
#
# `Traffic` sits beneath torch's dispatcher and sees every tensor that a rank hands to a group. The
# two machines are the two halves of the ranks: a group with ranks in both needs the cable.


# %%
def bytes_by_arithmetic(stage: Stage) -> dict[str, int]:
    """What this rank hands over along each axis per step, in bytes of float64."""
    sequences = len(range(stage.dp.rank(), B, stage.dp.size()))  # the first may have one more
    A = sequences * T * D
    blocks = len(stage.blocks)
    matrices = D * (2 * H * K + 2 * G * K + 3 * E) // stage.tp.size()
    embedding = V // stage.tp.size() * D if stage.first or stage.last else 0
    return {
        "tp": 8 * (4 * blocks * A + stage.first * A + stage.last * (A + 3 * sequences * T)),
        "dp": 8 * (blocks * (matrices + 2 * D) + embedding + stage.last * D),
        "pp": 8 * (2 - stage.first - stage.last) * A,
        "ends": 8 * embedding,
    }


class Traffic(TorchDispatchMode):
    """Adds up the bytes that this rank hands over, by operation and by the group's ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in ("c10d::allreduce_", "c10d::send"):
            tensors, group = args[:2]
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))
            self.nbytes[func.name(), *ranks] += sum(tensor.nbytes for tensor in tensors)
        return func(*args, **(kwargs or {}))


def check_axes(stage: Stage, traffic: Traffic) -> None:
    """Claim which ranks are neighbors, what was handed over along each axis, and where."""
    due = bytes_by_arithmetic(stage)
    stride = 1
    for axis, group in {"tp": stage.tp, "dp": stage.dp, "pp": stage.pp}.items():
        if group.size() == 1:
            blocked(f"{axis}: bytes handed over", needs=f"{2 * WORLD_SIZE} ranks, or --mesh")
            continue
        ranks = dist.get_process_group_ranks(group)
        nbytes = traffic.nbytes["c10d::send" if axis == "pp" else "c10d::allreduce_", *ranks]
        claim(f"{axis}: from a rank to the next in its group", stride, ranks[1] - ranks[0])
        claim(f"{axis}: bytes handed over", due[axis], nbytes, question=3)
        stride *= group.size()
        expected = due[axis] if stride == WORLD_SIZE else 0  # of the outermost axis
        crossing = nbytes if ranks[0] < WORLD_SIZE / 2 <= ranks[-1] else 0
        claim(
            f"{axis}: bytes that need the cable",
            expected,
            crossing,
            question=4,
            kind="simulated",
        )
    if stage.pp.size() > 1:
        ranks = [] if stage.ends is None else dist.get_process_group_ranks(stage.ends)
        numbers = traffic.nbytes["c10d::allreduce_", *ranks] / 8
        claim("ends: numbers added up, embedding", due["ends"] / 8, numbers, question=5)


# %% [markdown]
# ## 6. How it is measured
#
# The **oracle** is section 2 in one process, with PyTorch's own loss and clipping, on the bytes of
# argparse's source, in float64. A gradient passes some 20 operations per block, each a sum of up to
# E terms in another order. Adam divides a gradient by its own size plus 1e-8, so an error of 2**-53
# near zero may move a weight by the learning rate times 2**-53 / 1e-8 in every step. The loss must
# fall below the entropy of the text's bytes, the least for a model that looks at no other byte.


# %%
STEPS = 40
LEARNING_RATE = 3e-3
OF_A_GRADIENT = 20 * LAYERS * E * 2**-53
OF_TRAINING = STEPS * LEARNING_RATE * 2**-53 / 1e-8
TEXT = torch.tensor(list(Path(argparse.__file__).read_bytes()))


def batch_of(step: int, device: torch.device) -> torch.Tensor:
    """Return B sequences of T + 1 bytes of the text, the same on every rank."""
    starts_B = torch.randint(len(TEXT) - T, (B,), generator=torch.Generator().manual_seed(step))
    return TEXT[starts_B[:, None] + torch.arange(T + 1)].to(device)


def whole_loss(whole: Llama, tokens_BT: torch.Tensor) -> torch.Tensor:
    logits_BTV = whole(tokens_BT[:, :-1])
    return F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())


def check_gradients(whole: Llama, stage: Stage, device: torch.device) -> Traffic:
    """Claim every gradient, and its copies; return what was handed over meanwhile."""
    tokens_BT = batch_of(0, device)
    whole_loss(whole, tokens_BT).backward()
    with Traffic() as traffic:
        compute_gradients(stage, tokens_BT)
    errors = []
    for name, parameter in stage.named_parameters():
        expected = share(whole.get_parameter(name).grad, split_along(name), stage.tp)
        errors.append((parameter.grad - expected).abs().max() / expected.abs().max())
    claim("error of every gradient", 0, max(errors), atol=OF_A_GRADIENT)

    dp = stage.dp.size()
    times = times_counted("blocks.0.up.weight", stage, whole)
    claim("times that a weight of an MLP counts", dp, times, atol=1e-9, question=1)
    times = times_counted("blocks.0.norm1.weight", stage, whole)
    claim("times that a norm counts", dp * stage.tp.size(), times, atol=1e-9, question=2)
    times = times_counted("embedding.weight", stage, whole)
    claim("times that the embedding counts", dp * min(stage.pp.size(), 2), times, atol=1e-9)
    return traffic


def times_counted(name: str, stage: Stage, whole: Llama) -> torch.Tensor:
    """All ranks' squares of this parameter's gradient, over those of the whole model's."""
    expected = whole.get_parameter(name).grad
    held = dict(stage.named_parameters()).get(name)
    squares = expected.new_zeros(()) if held is None else held.grad.square().sum()
    return all_reduce(squares) / expected.square().sum()


def train_in_one_process(whole: Llama, found: torch.Tensor) -> None:
    """Note the loss and the norm of each step in a row of `found`, (STEPS, 2)."""
    optimizer = AdamW(whole.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = whole_loss(whole, batch_of(step, found.device))
        loss.backward()
        found[step, 0] = loss.detach()
        found[step, 1] = nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM)
        optimizer.step()


def check_training(whole: Llama, stage: Stage, device: torch.device) -> None:
    """Claim that the model learns, and that the mesh does in each step what one process does."""
    expected = torch.empty(STEPS, 2, device=device, dtype=torch.float64)
    if RANK == 0:
        train_in_one_process(whole, expected)
    dist.broadcast(expected, src=0)
    optimizer = AdamW(stage.parameters(), lr=LEARNING_RATE)
    rows = [train_step(stage, optimizer, batch_of(step, device)) for step in range(STEPS)]
    ours = torch.stack(rows)
    ours[:, 0] = all_reduce(ours[:, 0]) / stage.tp.size()  # along tp all have the same summand
    loss_error, norm_error = (ours - expected).abs().amax(dim=0)
    share_V = torch.bincount(TEXT, minlength=V) / len(TEXT)
    entropy = -torch.xlogy(share_V, share_V).sum()
    claim("one process: the last loss, at most", entropy, expected[-1, 0], "<=", varies=True)
    claim("losses of all steps: largest difference", 0, loss_error, atol=OF_TRAINING)
    claim("norms of all steps: largest difference", 0, norm_error, atol=OF_TRAINING)


# %% [markdown]
# ## What you should have seen
#
# 1. Two: ranks that differ in dp alone are copies of each other.
# 2. Four: norms are copied along tp, too. The embedding counts four times as well, since two stages
#    have it. So no factor repairs the sum, and a norm that is too large clips without an error.
# 3. tp. A is 8 x 32 x 64 = 16,384 numbers, 131 kB in float64. Each of a stage's two blocks hands
#    over 4 A, and an end one more: 9 A, 1.18 MB. Along dp go 0.42 MB of gradients, along pp one A.
#    More tokens make tp and pp larger, and leave dp as it is.
# 4. pp, which is outermost: rank 0's partner along pp is rank 4, and along tp it is rank 1. (The
#    sum of the embedding's gradients crosses as well, 0.07 MB.)
# 5. 8,192: the 64 numbers of each of a rank's 128 rows. An untied head needs no such sum, and has
#    V D more parameters.
#
# **Try.** Without the first `continue` the norms and the losses of training fail wherever tp has
# two ranks, while every gradient is right. With tp outermost all values are right. What fails are
# the rows of neighbors and cable, for tp and for pp: 1.18 MB now need the cable, 0.13 before. On
# a cluster nothing fails, and every block waits four times for the slowest link.
#
# **At a thousand GPUs.** Megatron-LM's 145.6B GPT ran on 1,536 A100 with dp 24, pp 8, tp 8: 10
# blocks per GPU, and 96 sequences of 2,048 tokens, 12,288 wide, per rank along dp (Narayanan et
# al., 2021, table 1). So A is 4.8 GB in bfloat16. Of 40 A along tp a ring sends 2 x 7/8, 338 GB per
# GPU and step; along pp go 2 A, 9.7 GB; of 4.55 GB of gradients along dp a ring sends 2 x 23/24,
# 8.7 GB. That is why tp stays in one NVLink domain: 8 GPUs in most machines, 72 in an NVL72 rack.
#
# **On GPUs** the same rows hold over NCCL; nothing here is timed. Real runs hide dp's sum behind
# backward (04_buckets_and_overlap.py), or make a reduce-scatter and an all-gather of it, ZeRO-1
# (02_fsdp_zero.py). With sequence parallelism (06_tensor_parallel.py) the norms' gradients are
# partial along tp: one more sum in the table.
#
# **When.** Take tp first, as small as memory allows; then pp, with many more micro-batches than
# stages; what remains is dp. A model that fits with FSDP on fast links needs neither tp nor pp, and
# would pay for a bubble and four sums per block.


# %%
def mesh_of(text: str) -> tuple[int, int, int]:
    dp, pp, tp = map(int, text.split(","))
    return dp, pp, tp


def main() -> None:
    flag = {"type": mesh_of, "metavar": "DP,PP,TP", "help": "the ranks along each axis, say 2,1,2"}
    shape = command_line({"--mesh": flag}).mesh
    if "RANK" not in os.environ and torch.cuda.device_count() < 2:
        sys.argv.insert(0, f"--nproc-per-node={math.prod(shape or (2, 2, 2))}")  # torchrun's flag
    launch(list(MESHES))
    shape = shape or MESHES.get(WORLD_SIZE, (WORLD_SIZE, 1, 1))
    dp, pp, tp = shape
    if dp * pp * tp != WORLD_SIZE or not (0 < dp <= 4 and 0 < pp <= 4 and tp in (1, 2, 4)):
        rule = "dp x pp x tp must be the number of ranks, dp and pp at most 4, and tp 1, 2 or 4"
        refuse(f"{rule}; got {shape} for {WORLD_SIZE} ranks; choose others by --mesh")
    device = setup()
    torch.manual_seed(0)  # the same weights on every rank
    whole = Llama().to(device, torch.float64)
    stage = Stage(whole, device_mesh(device, shape))
    traffic = check_gradients(whole, stage, device)
    check_axes(stage, traffic)
    check_training(whole, stage, device)
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
