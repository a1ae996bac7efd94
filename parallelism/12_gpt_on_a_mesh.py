"""A GPT on a mesh, by hand: data, pipeline and tensor parallelism in one training step
====================================================================================

**Question.** Data, pipeline and tensor parallelism are simple one at a time. If a GPT trains with
all three at once, which sums belong to which axis, and what must not be counted twice?

**Predict**, and write it down before you run. Eight ranks train one GPT: two along each of dp
(other examples), pp (other layers) and tp (other parts of the same matrices).

1. To find the norm of the gradient, each rank adds up the squares of all gradients that it holds,
   and the eight sums are added. How many times does that count a weight of an MLP?
2. How many times does it count a weight of an RMSNorm?
3. The gradient of a matrix is summed along dp. Say that the gradients of the norms are summed along
   dp *and* along tp. How many times too large are they then?
4. Along which axis does rank 0 hand over most bytes per step? It holds 61,184 weights. Each of its
   two blocks adds up its activations four times along tp: 24 sequences of 16 tokens, 64 wide.
5. Ranks 0 to 3 are on one machine, ranks 4 to 7 on another. Which axis runs between the machines?

**Run.**

    torchrun --standalone --nproc-per-node=8 12_gpt_on_a_mesh.py   # NCCL on 8 GPUs, else gloo
    python 12_gpt_on_a_mesh.py                                     # the same, started for you
    python 12_gpt_on_a_mesh.py --mesh 2 1 2                        # another mesh: dp, pp, tp

Not run on several GPUs.

**Try.** In the table `COPIED` take "tp" away from the norms: which claims fail? In `PARTIAL` take
"ends" away from the embedding: which ones now? In `make_groups` put tp outermost,
`.view(tp, dp, pp).permute(2, 1, 0)`: and now?

**Before.** parallelism/06_tensor_parallel.py and parallelism/07_pipeline_schedules.py: f and g, and
stages that send activations on and gradients back.

**Next.** parallelism/13_gpt_by_library.py: the same mesh, by calls of PyTorch.
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

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim import AdamW, Optimizer

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
Group = dist.ProcessGroup

# Shapes: B sequences per step, T tokens each, V different tokens, D model width, H query heads, G
# key-value heads, K features per head, E hidden features. A small letter is a rank's share: b
# sequences of a micro-batch, and likewise h = H / tp, g = G / tp.
B, T, V, D, H, G, K, E = 48, 16, 256, 64, 8, 4, 8, 168
LAYERS, MICRO_BATCHES = 4, 4
MESHES = {1: (1, 1, 1), 2: (1, 1, 2), 3: (3, 1, 1), 4: (1, 2, 2), 8: (2, 2, 2), 16: (4, 2, 2)}

# %% [markdown]
# ## 1. The table: whose gradients are partial?
#
# A **mesh** numbers the ranks like the elements of an array. Ranks whose places differ along one
# axis alone are a **group**. tp is innermost: its ranks are neighbors, and share the fastest links.
#
#               pp 0: first layers       pp 1: last layers
#               tp 0        tp 1         tp 0        tp 1
#     dp 0      rank 0      rank 1       rank 4      rank 5        groups of rank 0:
#     dp 1      rank 2      rank 3       rank 6      rank 7        tp {0, 1}  dp {0, 2}  pp {0, 4}
#
# tp splits the matrices, and pp deals out the layers. Apart from that, weights are **copied**:
# several ranks hold the same ones, and each copy has a gradient of its own. It is **partial** if it
# lacks a part that other copies have, else **complete**. The head's weights here are those of the
# embedding, so the first stage and the last both hold them: the two **ends** of the pipeline. This
# table is the lesson:
#
#                           copied along    a copy's gradient is that of        it is
#     matrix                dp              its own sequences                   partial
#     norm                  dp              its own sequences                   partial
#                           tp              the same tokens as the other's      complete
#     embedding = head      dp              its own sequences                   partial
#                           ends            its use as embedding, or as head    partial
#                           tp              the same tokens as the other's      complete
#
# **Sum a gradient over the copies whose gradients are partial.** Ranks along tp meet the same
# tokens, and f (section 2) completes what comes back to a norm. One more sum would double it.
#
# **In the norm of the gradient n copies count as one.** After the sums all copies hold the same
# gradient, so each counts 1/n in a sum over all ranks.
#
# The code below is both rules. `stage` is this rank's part of the model (section 4), with its
# groups. `run_pipeline` does its forward and backward passes (section 2).


# %%
COPIED = {"matrix": ["dp"], "norm": ["dp", "tp"], "embedding": ["dp", "tp", "ends"]}
PARTIAL = {"matrix": ["dp"], "norm": ["dp"], "embedding": ["dp", "ends"]}
HANDED_OVER = Counter()  # bytes, by group: only to print it


def make_groups(dp: int, pp: int, tp: int) -> dict[str, Group]:
    """Return this rank's group along each axis."""
    mesh = torch.arange(WORLD_SIZE).view(pp, dp, tp)
    lines = {
        "tp": mesh,  # a group is a line of the last dimension
        "dp": mesh.movedim(1, 2),
        "pp": mesh.movedim(0, 2),
        "ends": mesh[:: max(1, pp - 1)].movedim(0, 2),  # the first stage and the last
    }
    groups = {}
    for axis, ranks in lines.items():
        groups[axis], _ = dist.new_subgroups_by_enumeration(ranks.flatten(0, 1).tolist())
    return groups


def add_up(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum of x over the ranks of the group, and note its bytes."""
    HANDED_OVER[group] += x.nbytes
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total


def kind_of(name: str) -> str:
    """Return the row of the table for a parameter, say for "blocks.0.norm1.weight"."""
    if "norm" in name:
        return "norm"
    return "embedding" if "embedding" in name else "matrix"


def compute_gradients(
    stage: "Llama", tokens_BT: torch.Tensor, partial: dict[str, list[str]] = PARTIAL
) -> torch.Tensor:
    """Leave the gradient of the batch's mean loss; return this rank's summand of that loss.

    partial: the table to follow. Only question 3 gives another one, which is wrong.
    """
    stage.zero_grad()
    dp = stage.groups["dp"]
    loss = run_pipeline(stage, tokens_BT.chunk(dp.size())[dp.rank()])
    for axis, group in stage.groups.items():
        gradients = [x.grad for n, x in stage.named_parameters() if axis in partial[kind_of(n)]]
        if gradients:
            bucket = nn.utils.parameters_to_vector(gradients)
            nn.utils.vector_to_parameters(add_up(bucket, group), gradients)
    return loss


def gradient_norm(stage: "Llama") -> torch.Tensor:
    """Return the norm of the whole gradient, in which each parameter counts once."""
    mine = 0
    for name, parameter in stage.named_parameters():
        copies = math.prod(stage.groups[axis].size() for axis in COPIED[kind_of(name)])
        mine += parameter.grad.square().sum() / copies
    return add_up(mine, dist.group.WORLD).sqrt()


def train_step(stage: "Llama", optimizer: Optimizer, tokens_BT: torch.Tensor) -> torch.Tensor:
    """Do one step; return this rank's summand of the loss, and the norm of the gradient."""
    loss = compute_gradients(stage, tokens_BT)
    norm = gradient_norm(stage)
    nn.utils.clip_grads_with_norm_(stage.parameters(), max_norm=1.0, total_norm=norm)
    optimizer.step()
    return torch.stack([loss, norm])


# %% [markdown]
# ## 2. Where partial and complete come from: f, g, and stages
#
# **Along tp** (06_tensor_parallel.py) each rank has some heads and hidden features of a block. From
# the same input it computes one summand of the output, and **g** adds these up. Backward, it has
# one summand of the input's gradient, and **f** adds those up. So all that stands before f or after
# g, norms and embedding too, is computed alike on all ranks along tp, forward and backward. Its
# gradient is complete:
#
#     x -> norm -> f -> my heads           -> my part of out  -> g -> + x    (attention)
#     x -> norm -> f -> my hidden features -> my part of down -> g -> + x    (MLP)


# %%
class SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor, tp: Group) -> torch.Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return add_up(grad, ctx.tp), None  # None: a group has no gradient


class SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor, tp: Group) -> torch.Tensor:
        return add_up(x, tp)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


f = SumBackward.apply
g = SumForward.apply

# %% [markdown]
# **Along pp** (07_pipeline_schedules.py) there are messages and no sum. All ranks along tp hold the
# same activations between two blocks, and each sends them to its own partner on the next stage. The
# order is GPipe's, the shortest to write; another one changes no gradient. A loss is divided at
# once by the tokens of the *whole* batch, so over micro-batches and along dp there are only sums.


# %%
def run_pipeline(stage: "Llama", tokens_bT: torch.Tensor) -> torch.Tensor:
    """Add to the gradients; return the loss of these sequences on the last stage, 0 elsewhere."""
    pp = stage.groups["pp"]
    s = pp.rank()
    micro_batches = tokens_bT.chunk(MICRO_BATCHES)
    loss = torch.zeros((), device=tokens_bT.device, dtype=torch.float64)
    arriving_bTD = loss.new_empty(len(micro_batches[0]), T, D)
    passes = []
    for micro_batch in micro_batches:
        x = micro_batch[:, :-1]
        if not stage.first:
            dist.recv(arriving_bTD, group=pp, group_src=s - 1)
            x = arriving_bTD.clone().requires_grad_()  # it is kept until backward
        y = stage(x)
        if stage.last:
            y = F.cross_entropy(y.flatten(0, 1), micro_batch[:, 1:].flatten(), reduction="sum")
            y = y / (B * T)
            loss += y.detach()
        else:
            send(y.detach(), pp, s + 1)
        passes.append((x, y))
    for x, y in passes:
        if stage.last:
            y.backward()
        else:
            dist.recv(arriving_bTD, group=pp, group_src=s + 1)
            y.backward(arriving_bTD)  # this uses it up, so the next may overwrite it
        if not stage.first:
            send(x.grad, pp, s - 1)
    return loss


def send(x: torch.Tensor, pp: Group, to: int) -> None:
    HANDED_OVER[pp] += x.nbytes
    dist.send(x, group=pp, group_dst=to)


# %% [markdown]
# ## 3. How it is measured
#
# The **oracle** is the same model on groups of one rank, without stages and micro-batches, with
# PyTorch's own loss and clipping, in float64. A gradient passes some 20 operations per block, each
# a sum of up to E terms in another order. That is the first slack.
#
# The second, for ten steps of training, is generous. Where a gradient is next to nothing, Adam may
# divide a rounding error of 2**-53 by as little as 1e-8, which moves a weight by the learning rate
# times that. Losses and norms may differ by ten such steps.


# %%
STEPS = 10
OF_A_GRADIENT = 20 * LAYERS * E * 2**-53
OF_TRAINING = STEPS * 1e-3 * 2**-53 / 1e-8  # 1e-3 is AdamW's usual learning rate
TEXT = torch.tensor(list(__doc__.encode()))


def check_gradients(whole: "Llama", stage: "Llama", device: torch.device) -> None:
    """Claim this rank's gradients, and how many times all ranks' squares of them count each."""
    tokens_BT = batch_of(device)
    loss_of_whole(whole, tokens_BT).backward()
    norm = stage.blocks[min(stage.blocks)].norm1.weight
    compute_gradients(stage, tokens_BT, PARTIAL | {"norm": ["dp", "tp"]})
    twice = norm.grad.clone()
    HANDED_OVER.clear()
    compute_gradients(stage, tokens_BT)
    dp, pp, tp = (stage.groups[axis].size() for axis in ("dp", "pp", "tp"))
    claim_counts("matrix", whole, stage, times=dp, question=1)
    claim_counts("norm", whole, stage, times=dp * tp, question=2)
    claim_counts("embedding", whole, stage, times=dp * tp * min(pp, 2))
    what = "norms summed along tp too: times too large"
    claim(what, tp, (twice / norm.grad).mean(), atol=1e-9, question=3)


def claim_counts(
    kind: str, whole: "Llama", stage: "Llama", times: int, question: int | None = None
) -> None:
    """Claim this kind's gradients, and all ranks' squares of them over the whole model's."""
    due = {name: x.grad for name, x in whole.named_parameters() if kind_of(name) == kind}
    ours = {name: x.grad for name, x in stage.named_parameters() if kind_of(name) == kind}
    errors = [torch.zeros((), dtype=torch.float64)]
    for name, gradient in ours.items():
        expected = share(due[name], name, stage.groups["tp"])
        errors.append((gradient - expected).abs().max().cpu() / expected.abs().max().cpu())
    error = torch.stack(errors).max()  # a tensor's max keeps a NaN; Python's may lose it
    claim(f"{kind}: error of the gradients", 0, error, atol=OF_A_GRADIENT)
    once = sum(gradient.square().sum() for gradient in due.values())
    held = torch.zeros_like(once) + sum(gradient.square().sum() for gradient in ours.values())
    dist.all_reduce(held)
    claim(f"{kind}: times that it counts", times, held / once, atol=1e-9, question=question)


# %% [markdown]
# Then training, clipped by the norm of the whole gradient.


# %%
def check_training(whole: "Llama", stage: "Llama", device: torch.device) -> None:
    """Claim that each step on the mesh does what one process does."""
    theirs = AdamW(whole.parameters())
    ours = AdamW(stage.parameters())
    errors = []
    for _ in range(STEPS):
        tokens_BT = batch_of(device)
        whole.zero_grad()
        due = loss_of_whole(whole, tokens_BT)
        due.backward()
        due_norm = nn.utils.clip_grad_norm_(whole.parameters(), max_norm=1.0)
        theirs.step()
        loss, norm = train_step(stage, ours, tokens_BT)
        dist.all_reduce(loss)  # along tp all have the same summand
        loss /= stage.groups["tp"].size()
        errors.append([(loss - due).abs().item(), (norm - due_norm).abs().item()])
    loss_error, norm_error = torch.tensor(errors).amax(dim=0)
    claim("losses of all steps: largest difference", 0, loss_error, atol=OF_TRAINING)
    claim("norms of all steps: largest difference", 0, norm_error, atol=OF_TRAINING)


def batch_of(device: torch.device) -> torch.Tensor:
    starts_B1 = torch.randint(len(TEXT) - T, (B, 1))  # the same on all ranks, by one seed
    return TEXT[starts_B1 + torch.arange(T + 1)].to(device)


def loss_of_whole(whole: "Llama", tokens_BT: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(whole(tokens_BT[:, :-1]).flatten(0, 1), tokens_BT[:, 1:].flatten())


def check_axes(stage: "Llama") -> None:
    """Claim which ranks are neighbors along each axis, and what one hands over per gradient."""
    dp = stage.groups["dp"].size()
    pp = stage.groups["pp"].size()
    A = 8 * B // dp * T * D  # bytes of a rank's activations, in float64
    due = {
        "tp": 4 * LAYERS // pp * A,
        "dp": sum(parameter.nbytes for parameter in stage.parameters()),
        "pp": (2 - stage.first - stage.last) * A,
    }
    stride = 1
    for axis, nbytes in due.items():
        group = stage.groups[axis]
        if group.size() == 1:
            blocked(f"{axis}: bytes handed over", needs=f"{2 * WORLD_SIZE} ranks, or --mesh")
            continue
        claim(f"{axis}: bytes handed over", nbytes, HANDED_OVER[group], question=4)
        one, other = dist.get_process_group_ranks(group)[:2]
        claim(f"{axis}: from a rank to the next in its group", stride, other - one, question=5)
        stride *= group.size()
    if pp > 1:
        numbers = HANDED_OVER[stage.groups["ends"]] / 8
        expected = V * D if stage.first or stage.last else 0
        claim("ends: numbers added up, embedding", expected, numbers)


# %% [markdown]
# ## 4. The model, a Llama: nothing here is new
#
# You may skip this section. The model's parts are RMSNorm; **RoPE**, which turns queries and keys
# by an angle that grows with their place; **grouped queries**, H heads that share G heads of keys
# and values; **SwiGLU**, a gate times a value; and a **tied** head, the embedding once more. All
# ranks draw the whole model from one seed, and each keeps its part. Megatron splits the embedding
# along tp as well, by words (18_vocabulary_parallel.py). Then it is no copy along tp.


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

    def forward(self, x_bTD: torch.Tensor, tp: Group) -> torch.Tensor:
        y_bTD = f(self.norm1(x_bTD), tp)
        features = [layer(y_bTD).unflatten(-1, (-1, K)) for layer in (self.q, self.k, self.v)]
        q_bhTK, k_bgTK, v_bgTK = [y_bThK.transpose(1, 2) for y_bThK in features]  # my heads
        how = {"is_causal": True, "enable_gqa": True}
        y_bhTK = F.scaled_dot_product_attention(rotate(q_bhTK), rotate(k_bgTK), v_bgTK, **how)
        x_bTD = x_bTD + g(self.out(y_bhTK.transpose(1, 2).flatten(2)), tp)
        y_bTD = f(self.norm2(x_bTD), tp)
        return x_bTD + g(self.down(F.silu(self.gate(y_bTD)) * self.up(y_bTD)), tp)


class Llama(nn.Module):
    """Tokens (b, T) or activations (b, T, D) -> activations, or at the end logits (b, T, V)."""

    def __init__(self, groups: dict[str, Group]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.groups = groups
        s = groups["pp"].rank()
        p = groups["pp"].size()
        self.first = s == 0
        self.last = s == p - 1
        blocks = [LlamaBlock() for _ in range(LAYERS)]
        mine = range(s * LAYERS // p, (s + 1) * LAYERS // p)
        self.blocks = nn.ModuleDict({str(i): blocks[i] for i in mine})
        if self.first or self.last:
            self.embedding = nn.Parameter(0.02 * torch.randn(V, D))
        if self.last:
            self.norm = nn.RMSNorm(D, eps=1e-5)
        for name, parameter in self.named_parameters():
            parameter.data = share(parameter.data, name, groups["tp"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = F.embedding(x, self.embedding)
        for block in self.blocks.values():
            x = block(x, self.groups["tp"])
        return self.norm(x) @ self.embedding.T if self.last else x


def share(whole: torch.Tensor, name: str, tp: Group) -> torch.Tensor:
    """Return a copy of this rank's part of a matrix, or of all of another parameter."""
    if kind_of(name) != "matrix":
        return whole.clone()
    dim = 1 if name.endswith(("out.weight", "down.weight")) else 0
    return whole.chunk(tp.size(), dim)[tp.rank()].clone()


# %% [markdown]
# ## What you should have seen
#
# 1. Two: ranks that differ in dp alone are copies of each other.
# 2. Four: a norm is copied along tp, too. The embedding, at both ends, counts eight times. So no
#    single factor repairs the sum, and a norm that is too large clips too hard, without an error.
# 3. Twice: along tp a norm's gradients are complete, so the sum adds the same number to itself.
# 4. tp. A is 24 x 16 x 64 = 24,576 numbers, 197 kB in float64. A rank hands over 4 A for each of
#    its two blocks: 8 A, 1.57 MB. Along dp go rank 0's 61,184 gradients, 0.49 MB (on the last stage
#    64 more, of the last norm), and along pp A. A ring of two ranks sends just as much. More tokens
#    make tp and pp larger, and leave dp as it is.
# 5. pp, the outermost: rank 0's partner there is rank 4. The sum of the embedding crosses, too:
#    16,384 numbers. An untied head would need no such sum. In all rank 0 hands over 0.33 MB to the
#    other machine.
#
# **Try.** Without "tp" in `COPIED` the two rows of norms and losses fail, and every gradient is
# right. Without the sum of the ends the two rows of the embedding fail, and losses and norms. So
# does the row that counts what the ends add up: it finds 0. With tp outermost all values are right.
# What fails is the distance to the next rank, for tp and for pp: 1.57 MB cross now. On a cluster
# nothing fails, and every block waits four times for the slowest link.
#
# **At a thousand GPUs.** Megatron-LM's 145.6B GPT ran on dp 24, pp 8, tp 8: 10 blocks per GPU, and
# 96 sequences of 2,048 tokens, 12,288 wide (Narayanan et al., 2021, table 1). In bfloat16 A is 4.8
# GB. With recomputation a block sums 6 A, so a GPU hands over 60 A per step along tp. A ring sends
# 2 x 7/8 of that, 507 GB: 1.7 s of 25 s by NVLink (A100: 300 GB/s one way), 20 s by a card of 25
# GB/s. Along dp a ring sends 17 GB of float32 gradients. A plain pipeline sends 2 A, 9.7 GB (theirs
# was interleaved, which sends more). So tp stays in one NVLink domain: 8 GPUs, or 72.
#
# **On GPUs** the same rows should hold over NCCL; that was not run, and nothing here is timed. Real
# runs hide dp's sum behind backward (04_buckets_and_overlap.py). With sequence parallelism
# (06_tensor_parallel.py) a norm's copies along tp have met other tokens. Then their gradients are
# partial, and by the same rule they are summed along tp as well.
#
# **When to use it.** If a model fits with FSDP on fast links, and the batch has sequences for each
# rank, tp and pp only cost: sums and a bubble. Else take tp up to the NVLink domain, then pp across
# nodes until the model fits, with many more micro-batches than stages. The rest is dp.


# %%
def main() -> None:
    flag = {"type": int, "nargs": 3, "metavar": ("DP", "PP", "TP"), "help": "ranks along each axis"}
    shape = command_line({"--mesh": flag}).mesh
    if "RANK" not in os.environ and torch.cuda.device_count() < 2:
        sys.argv.insert(0, f"--nproc-per-node={math.prod(shape or (2, 2, 2))}")  # torchrun's flag
    launch(list(MESHES))
    dp, pp, tp = shape or MESHES.get(WORLD_SIZE, (WORLD_SIZE, 1, 1))
    if dp * pp * tp != WORLD_SIZE or dp not in (1, 2, 3, 4) or not {pp, tp} <= {1, 2, 4}:
        rule = "dp x pp x tp must be the number of ranks, dp at most 4, and pp and tp 1, 2 or 4"
        refuse(f"{rule}; got {(dp, pp, tp)} for {WORLD_SIZE} ranks; choose others by --mesh")
    device = setup()
    stage = Llama(make_groups(dp, pp, tp)).to(device, torch.float64)
    alone, _ = dist.new_subgroups(1)
    whole = Llama({"pp": alone, "tp": alone}).to(device, torch.float64)
    check_gradients(whole, stage, device)
    check_axes(stage)
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
