"""Expert accounting: how many parameters a token uses
===================================================

**Question.** A mixture of experts is named by two numbers, such as 30B-A3B: what it stores, and
what a token uses. Which number sets its FLOPs, its memory on a GPU, and its MFU?

**Predict**, and write it down before you run. Qwen3-30B has 48 layers, 2,048 wide. In a layer,
attention has 18.9 million parameters, the router 0.26 million, and each of 128 experts 4.72
million. A token visits 8 experts per layer. Embedding and head have 0.311 billion each.

1. With how many billions of parameters is a token multiplied? (The embedding is a look-up.)
2. Each of these costs a token six FLOPs, forward and backward; attention's scores cost it another
   4.83 billion, with sequences of 4,096 tokens. What share of its FLOPs is spent in experts?
3. Eight GPUs deal out the experts of each layer, and each GPU has all of the rest. How many
   billions of parameters does a GPU hold?
4. MFU divides the FLOPs that a model needs by those that the GPU could do. If all parameters but
   the embedding's were counted, not those that a token uses, how many times as large would it be?

**Run.**

    torchrun --standalone --nproc-per-node=4 24_expert_accounting.py   # NCCL on 4 GPUs, else gloo
    python 24_expert_accounting.py                                     # the same, started for you

Not run on several GPUs. Rows marked t hold the sum against what others have published.

**Try.** In `parameters` forget the shared experts (`experts * 3` for `(experts + m.shared) * 3`):
which models' claims fail? In `used` leave out the subtraction: which of the questions' claims fail?

**Before.** parallelism/11_expert_parallelism.py: how tokens reach their experts.
parallelism/20_expert_balance.py: what uneven routing costs.

**Next.** parallelism/12_gpt_on_a_mesh.py: several ways to split a model at once.
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
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: T tokens, D model width, E experts, H heads, G heads of keys and values, R rows of tokens
# that visit one expert.

# %% [markdown]
# ## 1. One sum, three numbers of experts
#
# A matrix of a dense model is stored once and multiplied with every token. In a mixture of experts
# the two come apart: E experts are stored, and a token is multiplied with K of them. On one of n
# GPUs that deal out the experts (**expert parallelism**, EP) there are E / n. All three counts are
# one sum, with another number of routed experts in it. D is the model's width, W that of an expert,
# V the vocabulary, and an expert is three matrices, as in a Llama's MLP:
#
#                                         stored      used by a token     on a GPU, EP n
#     per layer   attention               A           A                   A
#                 router                  D E         D E                 D E
#                 routed experts          E 3 D W     K 3 D W             E / n 3 D W
#                 shared experts          S 3 D W     S 3 D W             S 3 D W
#     once        embedding               V D         looked up: none     V D
#                 head                    V D         V D                 V D
#
# **Shared experts** see every token: DeepSeek-V3 has one per layer, Qwen3 none. The first three
# layers of DeepSeek-V3 are **dense**, with one MLP for all tokens. Vectors, such as those of norms,
# are left out: some millionths of all.


# %%
class Shape(NamedTuple):
    """What config.json says of a mixture of experts, in few numbers."""

    layers: int
    dense: int  # layers with one MLP for all tokens
    hidden: int  # D
    attention: int  # A: parameters of one layer's attention
    attended: int  # products per pair of tokens: query heads x (width of key + of value)
    mlp: int  # width of a dense layer's MLP
    expert: int  # W: width of an expert
    experts: int  # E: routed experts of a layer
    k: int  # K: experts that a token visits
    shared: int  # S: experts that see every token
    vocab: int  # V


def parameters(m: Shape, experts: int) -> int:
    """Those in matrices, with so many routed experts per layer: all, those used, those held."""
    router = m.hidden * m.experts
    mixture = router + (experts + m.shared) * 3 * m.hidden * m.expert
    mlps = m.dense * 3 * m.hidden * m.mlp + (m.layers - m.dense) * mixture
    return m.layers * m.attention + mlps + 2 * m.vocab * m.hidden


def used(m: Shape) -> int:
    """Parameters that one token is multiplied with."""
    return parameters(m, m.k) - m.vocab * m.hidden  # the embedding is a look-up


# %% [markdown]
# Attention is spelled out for each model. Qwen3's queries, keys, values and output are four
# matrices, with fewer heads of keys and values than of queries. DeepSeek-V3 makes queries, and keys
# and values, out of narrow **latents**, 1,536 and 512 wide; a key has 128 numbers from the latent
# and 64 that carry its position, which all heads share.

# %%
A_30B = 2048 * (4096 + 512 + 512 + 4096)
A_235B = 4096 * (8192 + 512 + 512 + 8192)
A_V3 = 7168 * 1536 + 1536 * 128 * 192  # queries: 128 heads, 192 wide
A_V3 += 7168 * (512 + 64) + 512 * 128 * (128 + 128)  # keys and values
A_V3 += 128 * 128 * 7168  # output
SHAPES = {  # layers, dense, hidden, attention, attended, mlp, expert, experts, k, shared, vocab
    "Qwen3-30B": Shape(48, 0, 2048, A_30B, 32 * 256, 0, 768, 128, 8, 0, 151_936),
    "Qwen3-235B": Shape(94, 0, 4096, A_235B, 64 * 256, 0, 1536, 128, 8, 0, 151_936),
    "DeepSeek-V3": Shape(61, 3, 7168, A_V3, 128 * 320, 18_432, 2048, 256, 8, 1, 129_280),
}

# %% [markdown]
# ## 2. FLOPs follow what is used
#
# A parameter of a matrix costs a token two FLOPs forward, a product and a sum, and four backward.
# So a token costs six per parameter that it uses, and the other experts cost it nothing. Attention
# comes on top: each query head multiplies its query with a key, and a score with a value, 2 FLOPs
# per number of them and token of the sequence, three times that with backward, and half of it since
# a token sees only those before it. (Fewer heads of keys and values save projections, not these.)


# %%
def flops_per_token(m: Shape, sequence: int) -> int:
    """Forward and backward, of attention the causal half."""
    return 6 * used(m) + 3 * m.layers * m.attended * sequence


# %% [markdown]
# ## 3. Memory follows what is held
#
# A GPU holds its E / n experts whether a token comes or not, and all that is not an expert. EP
# divides the first and leaves the second:
#
#     billions        stored   in experts   the rest   on a GPU, EP 8   EP 64
#     Qwen3-235B       235.1        227.1        8.0             36.4    11.5
#     DeepSeek-V3      671.0        653.9       17.1             98.9    27.3
#
# With EP 64 most of what DeepSeek-V3 leaves on a GPU is the rest, which no EP divides. In training
# each parameter takes 16 bytes, so 27.3 billion are 437 GB. That is why EP comes with pipeline
# stages, which divide both, and with ZeRO over the copies of the rest.

# %% [markdown]
# ## 4. MFU counts what is used
#
# **MFU**, the model FLOPs utilization, is tokens per second times FLOPs per token, over the GPU's
# peak. It asks which part of the machine did work that the model needs. An expert that a token does
# not visit is no such work. If it counted, MFU would rise with every expert that one adds and
# nobody visits. NVIDIA reports 45,275 tokens per second on a GB300 for Qwen3-30B, in 8 bits, where
# the peak is about 5,000 TFLOP/s. With the FLOPs of section 2 that is an MFU of 21%. With all
# parameters but the embedding's it would be 169%.

# %% [markdown]
# ## 5. How it is measured
#
# **Parameters.** The models are built, layer by layer, and their tensors' elements are counted.
# Built on PyTorch's *meta* device, tensors have shapes and no memory, so 671 billion parameters
# cost nothing. The layers are real ones nevertheless: section 6 runs small ones forward and
# backward. Attention computes the whole matrix of scores. Rotation by position is left out, as it
# has no parameters and no matrix products. Nothing is sent in this lesson: each rank counts alone.


# %%
def attend(q_THK: torch.Tensor, k_THK: torch.Tensor, v_THV: torch.Tensor) -> torch.Tensor:
    """Causal attention by two products of matrices: (T, H, V)."""
    score_HTT = q_THK.transpose(0, 1) @ k_THK.permute(1, 2, 0) / q_THK.shape[2] ** 0.5
    future_TT = torch.ones_like(score_HTT[0], dtype=torch.bool).triu(1)
    weight_HTT = score_HTT.masked_fill(future_TT, -torch.inf).softmax(dim=2)
    return (weight_HTT @ v_THV.transpose(0, 1)).transpose(0, 1)


def matrix(inner: int, outer: int) -> nn.Linear:
    return nn.Linear(inner, outer, bias=False)


class GroupedQueryAttention(nn.Module):
    """Qwen3's: H heads of queries share G heads of keys and of values; (T, D) -> (T, D)."""

    def __init__(self, D: int, H: int, G: int, width: int) -> None:
        super().__init__()
        self.H, self.G = H, G
        self.q = matrix(D, H * width)
        self.k = matrix(D, G * width)
        self.v = matrix(D, G * width)
        self.q_norm = nn.RMSNorm(width)
        self.k_norm = nn.RMSNorm(width)
        self.out = matrix(H * width, D)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        q_THK = self.q_norm(self.q(x_TD).unflatten(1, (self.H, -1)))
        k_TGK = self.k_norm(self.k(x_TD).unflatten(1, (self.G, -1)))
        v_TGK = self.v(x_TD).unflatten(1, (self.G, -1))
        times = self.H // self.G
        k_THK = k_TGK.repeat_interleave(times, dim=1)
        v_THK = v_TGK.repeat_interleave(times, dim=1)
        return self.out(attend(q_THK, k_THK, v_THK).flatten(1))


class LatentAttention(nn.Module):
    """DeepSeek-V3's: queries, keys and values come out of narrow latents; (T, D) -> (T, D)."""

    def __init__(
        self, D: int, H: int, q_latent: int, latent: int, key: int, position: int, value: int
    ) -> None:
        super().__init__()
        self.H, self.latent, self.key = H, latent, key
        self.q_down = matrix(D, q_latent)
        self.q_norm = nn.RMSNorm(q_latent)
        self.q_up = matrix(q_latent, H * (key + position))
        self.kv_down = matrix(D, latent + position)
        self.kv_norm = nn.RMSNorm(latent)
        self.kv_up = matrix(latent, H * (key + value))
        self.out = matrix(H * value, D)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        q_THK = self.q_up(self.q_norm(self.q_down(x_TD))).unflatten(1, (self.H, -1))
        down_TC = self.kv_down(x_TD)
        up_TC = self.kv_up(self.kv_norm(down_TC[:, : self.latent]))
        key_value_THC = up_TC.unflatten(1, (self.H, -1))
        position_THC = down_TC[:, None, self.latent :].expand(-1, self.H, -1)
        k_THK = torch.cat([key_value_THC[..., : self.key], position_THC], dim=2)
        return self.out(attend(q_THK, k_THK, key_value_THC[..., self.key :]).flatten(1))


# %% [markdown]
# A mixture holds some of its layer's routed experts: all of them, or as many as question 1 or 3
# asks for. DeepSeek-V3's router has a bias per expert, the one of lesson 20, which is only counted.


# %%
class GatedMLP(nn.Module):
    def __init__(self, D: int, width: int) -> None:
        super().__init__()
        self.gate = matrix(D, width)
        self.up = matrix(D, width)
        self.down = matrix(width, D)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x_TD)) * self.up(x_TD))


class Mixture(nn.Module):
    """`held` routed experts, and the shared ones as one MLP: (T, D) -> (T, D)."""

    def __init__(self, m: Shape, held: int) -> None:
        super().__init__()
        self.k = m.k
        self.router = matrix(m.hidden, m.experts)
        self.gate_EDW = nn.Parameter(torch.randn(held, m.hidden, m.expert) / m.hidden**0.5)
        self.up_EDW = nn.Parameter(torch.randn(held, m.hidden, m.expert) / m.hidden**0.5)
        self.down_EWD = nn.Parameter(torch.randn(held, m.expert, m.hidden) / m.expert**0.5)
        self.bias_E = nn.Parameter(torch.zeros(m.experts if m.shared else 0), requires_grad=False)
        self.shared = GatedMLP(m.hidden, m.shared * m.expert) if m.shared else None

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        score_TE = self.router(x_TD).softmax(dim=1)
        score_TK, expert_TK = score_TE.topk(self.k, dim=1)
        y_TD = self.shared(x_TD) if self.shared else torch.zeros_like(x_TD)
        for e, (gate_DW, up_DW) in enumerate(zip(self.gate_EDW, self.up_EDW, strict=True)):
            token_R, which_R = (expert_TK == e).nonzero(as_tuple=True)
            row_RD = x_TD[token_R]
            row_RD = (F.silu(row_RD @ gate_DW) * (row_RD @ up_DW)) @ self.down_EWD[e]
            y_TD = y_TD.index_add(0, token_R, score_TK[token_R, which_R, None] * row_RD)
        return y_TD


class Layer(nn.Module):
    def __init__(self, D: int, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(D)
        self.attention = attention
        self.norm2 = nn.RMSNorm(D)
        self.mlp = mlp

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        x_TD = x_TD + self.attention(self.norm1(x_TD))
        return x_TD + self.mlp(self.norm2(x_TD))


def model_of(m: Shape, attention: Callable, held: int) -> nn.Sequential:
    """Tokens (T,) -> logits (T, V), with so many routed experts in each mixture."""
    parts = [nn.Embedding(m.vocab, m.hidden)]
    for layer in range(m.layers):
        mlp = GatedMLP(m.hidden, m.mlp) if layer < m.dense else Mixture(m, held)
        parts.append(Layer(m.hidden, attention(), mlp))
    return nn.Sequential(*parts, nn.RMSNorm(m.hidden), matrix(m.hidden, m.vocab))


# %% [markdown]
# A model that is built right has as many parameters, norms and biases included, as the checkpoint
# that its makers published. Its matrices alone have as many as the sum of section 1 says.

# %%
ATTENTION = {
    "Qwen3-30B": partial(GroupedQueryAttention, 2048, H=32, G=4, width=128),
    "Qwen3-235B": partial(GroupedQueryAttention, 4096, H=64, G=4, width=128),
    "DeepSeek-V3": partial(
        LatentAttention, 7168, H=128, q_latent=1536, latent=512, key=128, position=64, value=128
    ),
}
CHECKPOINT = {  # parameters; DeepSeek-V3's without the module that predicts a second token
    "Qwen3-30B": 30_532_122_624,
    "Qwen3-235B": 235_093_634_560,
    "DeepSeek-V3": 671_026_419_200,
}


def elements(name: str, held: int) -> tuple[int, int]:
    """Parameters of the model, built with so many experts per layer: all, those of matrices."""
    with torch.device("meta"):
        model = model_of(SHAPES[name], ATTENTION[name], held)
    everything = sum(parameter.numel() for parameter in model.parameters())
    vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1)
    return everything, everything - vectors


def check_parameters() -> None:
    for name, m in SHAPES.items():
        everything, matrices = elements(name, m.experts)
        stored = parameters(m, m.experts)
        claim(f"{name}, built: billions in matrices", stored / 1e9, matrices / 1e9)
        text = f"{name}, built: billions, as in its checkpoint"
        claim(text, CHECKPOINT[name] / 1e9, everything / 1e9)
    m = SHAPES["Qwen3-30B"]
    _, visited = elements("Qwen3-30B", held=m.k)
    multiplied = visited - m.vocab * m.hidden
    text = "Qwen3-30B, 8 experts per layer: billions used"
    claim(text, used(m) / 1e9, multiplied / 1e9, question=1)
    held = m.experts // 8
    _, matrices = elements("Qwen3-30B", held)
    text = "Qwen3-30B, EP 8: billions on a GPU"
    claim(text, parameters(m, held) / 1e9, matrices / 1e9, question=3)


# %% [markdown]
# ## 6. FLOPs of real layers
#
# Two small models, one of each family, run forward and backward on real tokens with real routing.
# PyTorch's counter adds up the FLOPs of each product of matrices. Those with weights (`mm`) and
# those of attention (`bmm`) are apart in it. It counts both halves of attention's matrix, since
# `attend` computes both.

# %%
TOKENS = 20
A_QWEN = 32 * (64 + 32 + 32 + 64)
A_DEEPSEEK = 32 * 12 + 12 * 48 + 32 * 12 + 8 * 64 + 32 * 32
SMALL = {
    "small Qwen3": Shape(2, 0, 32, A_QWEN, 4 * 32, 0, 24, 8, 2, 0, 96),
    "small DeepSeek": Shape(3, 1, 32, A_DEEPSEEK, 4 * 20, 80, 24, 8, 2, 1, 96),
}
ATTENTION["small Qwen3"] = partial(GroupedQueryAttention, 32, H=4, G=2, width=16)
ATTENTION["small DeepSeek"] = partial(
    LatentAttention, 32, H=4, q_latent=12, latent=8, key=8, position=4, value=8
)


def check_flops(device: torch.device) -> None:
    for name, m in SMALL.items():
        torch.manual_seed(0)
        model = model_of(m, ATTENTION[name], m.experts).to(device)
        token_T = torch.randint(m.vocab, (TOKENS + 1,)).to(device)
        with FlopCounterMode(display=False) as counter:
            logits_TV = model(token_T[:-1])
            with_weights = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
            F.cross_entropy(logits_TV, token_T[1:]).backward()
        claim(f"{name}: forward FLOPs by weights / (2 T)", used(m), with_weights / 2 / TOKENS)
        other_half = 3 * m.layers * m.attended * TOKENS
        due = flops_per_token(m, TOKENS) + other_half
        claim(f"{name}: FLOPs per token", due, counter.get_total_flops() / TOKENS)


# %% [markdown]
# **Published figures** are of kind theory: NVIDIA's TFLOP/s over its tokens per second
# (Megatron-Bridge's performance pages, sequences of 4,096 tokens), the median of some rows, since
# they are rounded. They leave the router out, 0.3% of a token's work: so without it our sum agrees
# to a thousandth. (The parameters that cards call "activated" prove little: some count the
# embedding, some do not, and digits are cut off.)

# %%
SPEEDS = {  # tokens/s and TFLOP/s of a GPU
    "Qwen3-30B": [(45275, 1041), (40706, 936), (40769, 938), (8826, 203)],
    "Qwen3-235B": [(4452, 659), (4104, 607), (1204, 178)],
    "DeepSeek-V3": [(3848, 961), (4357, 1088), (3139, 782), (4018, 1003)],
}


def published_flops(name: str) -> float:
    """FLOPs per token."""
    return median(tflops * 1e12 / tokens for tokens, tflops in SPEEDS[name])


def check_published() -> None:
    for name, m in SHAPES.items():
        router = 6 * (m.layers - m.dense) * m.hidden * m.experts
        ours = (flops_per_token(m, 4096) - router) / 1e9
        found = published_flops(name) / 1e9
        claim(f"{name}: GFLOPs per token", ours, found, atol=0.001 * ours, kind="theory")


def check_shares() -> None:
    m = SHAPES["Qwen3-30B"]
    _, stored = elements("Qwen3-30B", m.experts)
    _, visited = elements("Qwen3-30B", m.k)
    _, rest = elements("Qwen3-30B", held=0)
    theirs = published_flops("Qwen3-30B")
    share = 6 * (parameters(m, m.k) - parameters(m, 0)) / flops_per_token(m, 4096)
    found = 6 * (visited - rest) / theirs
    text = "Qwen3-30B: share of a token's FLOPs in experts"
    claim(text, share, found, atol=0.005 * share, question=2, kind="theory")
    unused = parameters(m, m.experts) - parameters(m, m.k)
    larger = 1 + 6 * unused / flops_per_token(m, 4096)
    found = 1 + 6 * (stored - visited) / theirs
    text = "Qwen3-30B: MFU with all parameters / MFU"
    claim(text, larger, found, atol=0.005 * larger, question=4, kind="theory")


# %% [markdown]
# ## What you should have seen
#
# 1. 3.04 billion, the "A3B" of its name. Its card says 3.3: the embedding's 0.31 counted in, and
#    cut off.
# 2. 47%: 10.9 of 23.1 GFLOPs. So experts are 95% of what is stored, and less than half of the work.
#    For Qwen3-235B the share is 57%, for DeepSeek-V3 49%, or 55% with its shared expert.
# 3. 5.16 billion: an eighth of 28.99 in experts, and all of the other 1.54. With 16 bytes each in
#    training, that is 83 of the 86 GB of an H100, and leaves nothing for activations: it wants ZeRO
#    besides EP 8.
# 4. 8.07 times: 186 instead of 23.1 GFLOPs per token. A run at a good 40% would report 323%.
#
# **Try.** Without its shared experts DeepSeek-V3 is 2.6 billion parameters too small, of 671: all
# claims of its name fail, those of *small DeepSeek* too, except the checkpoint's: that model is
# built, not summed up. Qwen3 has none and notices nothing. With the embedding counted as used,
# questions 1, 2 and 4 fail, and 3 does not, since memory holds the embedding anyway.
#
# **On GPUs** nothing here changes: FLOPs and parameters are counts. Time does. Experts of few rows
# reach a smaller part of the peak than one large product, and the all-to-alls are no FLOPs at all.
# So a mixture's MFU is usually lower than that of a dense model with as many FLOPs per token, and
# the honest comparison is quality per GPU-hour. Nothing here was run on several GPUs.
#
# **When which number.** FLOPs, speed and MFU: used. Memory and checkpoints: stored, or held. What
# inference reads per step lies between: one token reads 8 of a layer's 128 experts, and a hundred
# tokens read nearly all of them.
#
# **Conventions.** "6N" with N the parameters used leaves out attention, 21% of Qwen3-30B's FLOPs at
# 4,096 tokens. Full attention instead of its causal half would make 27.9 GFLOPs of 23.1.
# Recomputation is not in MFU either (it is in HFU). DeepSeek-V3 trains with a module that predicts
# a second token, and NVIDIA's newer figures have it: one layer, a projection, and the head again.


# %%
def main() -> None:
    command_line()
    launch()
    device = setup()
    check_parameters()
    check_flops(device)
    check_published()
    check_shares()
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
