"""Inference: the KV cache, tensor parallel decoding, and DeepSpeed's init_inference
=================================================================================

**Question.** A trained GPT is to answer requests. What does it cost to generate a token, what does
a KV cache save, and what do several GPUs change?

**Predict**, and write it down before you run. A GPT has L blocks and is D wide. It reads a prompt
of T tokens and generates G more, one at a time, for a batch of B requests.

1. How many tokens go through each block in all: without a cache, and with one?
2. How many bytes does the cache hold per token, in float32? What share of it lies on each of n
   tensor parallel ranks?
3. One step generates a token for each of B requests. How many times longer does it take for 4
   requests than for one?
4. n ranks share every layer (tensor parallelism). How many all-reduces does each step need, and how
   many elements are summed per token?
5. In how many of the B x G tokens do these differ from plain PyTorch's on one rank: a KV cache,
   tensor parallelism by hand, and DeepSpeed, which is only told the names of two layers?

**Run.**

    torchrun --standalone --nproc-per-node=4 09_inference.py    # NCCL on 4 GPUs, else gloo
    python 09_inference.py                                      # the same, started for you

Not run on several GPUs.

**Try.** In `RowParallelLinear.forward` add the bias before the all-reduce: what fails, and at which
numbers of ranks? In `cached_attention` replace `tril(total - new)` by `tril()`: does generating
without a cache notice?

**Before.** parallelism/06_tensor_parallel.py: which layer is cut into rows and which into columns.

**Next.** fsdp/10_offload.py: when a model does not fit; or the documentation of vLLM or SGLang,
which are what serves a model to users.
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
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: B requests, T tokens, G generated tokens, L blocks, D model width, H heads of K features,
# V different tokens: here bytes. n tensor parallel ranks share every layer.
L, D, H, V = 2, 192, 24, 256
CONTEXT = 64  # the longest text
PROMPT = 16  # T
GENERATED = 32  # G
REQUESTS = 4  # B
Group = dist.ProcessGroup | None  # the ranks that share a layer; None: all ranks

# %% [markdown]
# ## 1. Prefill, decode, and the KV cache
#
# A GPT predicts the token after each of its input tokens. To **generate**, one takes the prediction
# after the last token, appends it, and asks again. Done plainly, step g computes all T + g tokens
# anew, although only one of them is new, and a token never depends on later ones: everything that
# the old tokens compute, they have computed before.
#
# Attention alone looks back. The new token's query meets the **keys** and **values** of all tokens
# before it. So each block keeps these, 2 D numbers per token: the **KV cache**. What is left of a
# step is one token's way through the network.
#
#     plain          [prompt.........]                      T tokens
#                    [prompt.........][1]                   T + 1
#                    [prompt.........][1][2]                T + 2
#     with cache     [prompt.........]                      T tokens: the prefill
#                                     [1]                   1: a decode step
#                                        [2]                1
#
# The **prefill** computes many tokens at once, as training does. A **decode step** computes one
# token per request.


# %%
class Cache:
    """Keys and values of one block for B requests of up to T tokens: (2, B, H, T, K)."""

    def __init__(self, block: "Block", B: int, T: int) -> None:
        K = block.qkv.weight.shape[0] // (3 * block.heads)
        self.kv_2BHTK = block.qkv.weight.new_zeros(2, B, block.heads, T, K)
        self.length = 0

    def append(self, new_2BHTK: torch.Tensor) -> torch.Tensor:
        """Keep the new tokens' keys and values; return those of all tokens so far."""
        end = self.length + new_2BHTK.shape[3]
        self.kv_2BHTK[:, :, :, self.length : end] = new_2BHTK
        self.length = end
        return self.kv_2BHTK[:, :, :, :end]


def cached_attention(block: "Block", x_BTD: torch.Tensor, cache: Cache) -> torch.Tensor:
    """Attention of the new tokens `x_BTD` to themselves and to all that came before them."""
    qkv_3BHTK = block.qkv(x_BTD).unflatten(-1, (3, block.heads, -1)).permute(2, 0, 3, 1, 4)
    k_BHTK, v_BHTK = cache.append(qkv_3BHTK[1:])
    new = x_BTD.shape[1]
    total = k_BHTK.shape[2]
    sees = torch.ones(new, total, dtype=torch.bool, device=x_BTD.device).tril(total - new)
    y_BHTK = F.scaled_dot_product_attention(qkv_3BHTK[0], k_BHTK, v_BHTK, attn_mask=sees)
    return block.out(y_BHTK.transpose(1, 2).flatten(2))


def next_logits(model: "GPT", x_BT: torch.Tensor, caches: list[Cache]) -> torch.Tensor:
    """Return the logits (B, V) of the token after `x_BT`, the tokens that are not cached yet."""
    start = caches[0].length
    h_BTD = model.token(x_BT) + model.position.weight[start : start + x_BT.shape[1]]
    for block, cache in zip(model.blocks, caches, strict=True):
        h_BTD = h_BTD + cached_attention(block, block.norm1(h_BTD), cache)
        h_BTD = h_BTD + block.down(F.gelu(block.up(block.norm2(h_BTD))))
    return model.head(model.norm(h_BTD[:, -1]))


def empty_caches(model: "GPT", B: int) -> list[Cache]:
    return [Cache(block, B, model.position.num_embeddings) for block in model.blocks]


# %% [markdown]
# A token is drawn from the probabilities that the logits stand for. Adding to each logit noise that
# is drawn from the Gumbel distribution, and taking the largest sum, does just that. So the whole
# chance can be drawn beforehand: the same noise has to give the same text.


# %%
@torch.no_grad()
def generate(
    model: "GPT", prompt_BT: torch.Tensor, noise_GBV: torch.Tensor, cached: bool
) -> tuple[torch.Tensor, list[Cache]]:
    """Return the generated tokens (B, G), and the caches as they are in the end."""
    text_BT = prompt_BT
    caches = empty_caches(model, len(prompt_BT))
    for noise_BV in noise_GBV:
        if cached:
            logits_BV = next_logits(model, text_BT[:, caches[0].length :], caches)
        else:
            logits_BV = model(text_BT)[:, -1]
        new_B = (logits_BV + noise_BV).argmax(-1)
        text_BT = torch.cat([text_BT, new_B[:, None]], dim=1)
    return text_BT[:, prompt_BT.shape[1] :], caches


def check_cache(model: "GPT", prompt_BT: torch.Tensor, noise_GBV: torch.Tensor) -> torch.Tensor:
    """Return the tokens that plain PyTorch generates without a cache: the oracle of all others."""
    with TokensSeen(model) as seen:
        expected_BG, _ = generate(model, prompt_BT, noise_GBV, cached=False)
    B, T, G = REQUESTS, PROMPT, GENERATED
    plain = T * G + G * (G - 1) // 2
    claim("no cache: tokens through a block per request", plain, seen[0] / B, question=1)

    with TokensSeen(model) as seen:
        ours_BG, caches = generate(model, prompt_BT, noise_GBV, cached=True)
    claim("KV cache: tokens through a block per request", T + G - 1, seen[0] / B, question=1)
    differ = (ours_BG != expected_BG).sum()
    claim("KV cache: tokens that differ from those without", 0, differ, question=5)
    held = bytes_per_token(caches)
    claim("KV cache: bytes per token, 2 L D x 4", 2 * L * D * 4, held, question=2)
    return expected_BG


# %% [markdown]
# ## 2. Why requests are batched: a decode step reads all weights for one token
#
# A linear layer with weights (O, I) makes 2 O I FLOPs per token, and reads its O I weights once,
# whatever the number of tokens. With float32 weights that is half a FLOP per byte for one token. A
# GPU can make hundreds of FLOPs in the time in which it reads a byte (H100: 989 TFLOP/s in
# bfloat16 and 3.35 TB/s, 295 per byte), so a decode step with few requests waits for memory, and
# more requests per step cost almost nothing. That ends when the FLOPs take as long as the reading,
# or when the caches fill the memory.
#
# The wait for one token hardly changes, therefore, while B requests get B tokens in it: the
# **throughput** rises with the batch, until it does not.


# %%
def check_batches(model: "GPT", text_BT: torch.Tensor) -> None:
    with torch.no_grad():
        expected_BV = model(text_BT)[:, -1]
    error = (decode_step(model, text_BT)() - expected_BV).abs().max()
    claim("a decode step's logits, error", 0, error, atol=1e-4, question=5)
    times = {}
    rows = [f"{'requests B':>10} {'ms per step':>12} {'tokens/s':>10}"]
    for B in (1, 4, 16):
        x_BT = text_BT[:1].expand(B, -1)
        step = decode_step(model, x_BT)
        milliseconds = times[B] = median_of_steps(step)
        rows.append(f"{B:10} {milliseconds:12.2f} {B / milliseconds * 1e3:10,.0f}")
    for row in rows:
        print0(f"{'':13}{row}")
    ratio = times[4] / times[1]
    claim("a step's time, B = 4 / B = 1, at most", 3, ratio, "<=", question=3, timed=True)


def decode_step(model: "GPT", x_BT: torch.Tensor) -> Callable:
    """Return a function that computes the logits after the last of these tokens, others cached."""
    caches = empty_caches(model, len(x_BT))
    with torch.no_grad():
        next_logits(model, x_BT[:, :-1], caches)  # the prefill

    def step() -> torch.Tensor:
        for cache in caches:
            cache.length = x_BT.shape[1] - 1
        with torch.no_grad():
            return next_logits(model, x_BT[:, -1:], caches)

    return step


# %% [markdown]
# ## 3. Tensor parallelism without a backward pass
#
# One rank reads all weights for every token. If n ranks hold 1/n of each matrix, each reads 1/n, at
# the same time. That is why tensor parallelism, of all kinds, is used for inference: it shortens
# the wait for a single token. The cut is the one of training (parallelism/06_tensor_parallel.py).
# The first layer of a pair is cut by outputs: every rank computes some heads, or some of the inner
# features. The second is cut by inputs, and the partial results are summed by an **all-reduce**.
#
#     x ── qkv (its heads) ── attention ── out (their columns) ── all-reduce ── + bias
#     x ── up (its features) ── gelu ───── down (their columns) ─ all-reduce ── + bias
#
# The keys and values of a head lie where the head is computed, so the cache is cut along.
#
# Which rows of `qkv` belong to a rank's heads? The layer is **fused**: its 3 D outputs are all
# queries, then all keys, then all values. A rank takes a piece of each third.


# %%
class RowParallelLinear(nn.Module):
    """x @ W + bias, from this rank's columns of W and its part of x."""

    def __init__(self, linear: nn.Linear, rank: int, n: int, group: Group) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.chunk(n, dim=1)[rank].clone())
        self.bias = linear.bias
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight)
        dist.all_reduce(y, group=self.group)
        return y + self.bias


def keep_rows(linear: nn.Linear, rows: torch.Tensor) -> nn.Linear:
    """Return a layer that computes only these outputs, in this order."""
    kept = nn.Linear(linear.in_features, len(rows), device="meta")
    kept.weight = nn.Parameter(linear.weight[rows])
    kept.bias = nn.Parameter(linear.bias[rows])
    return kept


def fused_rows(D: int, n: int) -> torch.Tensor:
    """Return the rows of `qkv` that each rank needs: (n, 3 D / n)."""
    return torch.arange(3 * D).view(3, n, D // n).transpose(0, 1).flatten(1)


@torch.no_grad()
def cut(model: "GPT", rank: int, n: int, group: Group) -> "GPT":
    """Leave this rank its share of every block, in place."""
    D = model.token.embedding_dim
    for block in model.blocks:
        block.qkv = keep_rows(block.qkv, fused_rows(D, n)[rank])
        block.out = RowParallelLinear(block.out, rank, n, group)
        block.up = keep_rows(block.up, torch.arange(4 * D).chunk(n)[rank])
        block.down = RowParallelLinear(block.down, rank, n, group)
        block.heads //= n
    return model


# %% [markdown]
# Each all-reduce leaves the sum on every rank, and every rank has the same noise. So all ranks draw
# the same next token, and nothing else has to be sent. That holds while the logits are the same to
# the last bit on all ranks, as these sums are; engines send the token that one rank has drawn. In
# prefill an all-reduce carries the whole
# prompt, in a decode step one token per request.


# %%
def check_tensor_parallel(
    model: "GPT",
    prompt_BT: torch.Tensor,
    noise_GBV: torch.Tensor,
    expected_BG: torch.Tensor,
    group: Group,
) -> None:
    n = dist.get_world_size(group)
    if n == 1:
        blocked("tensor parallelism by hand", needs="2 ranks")
        return
    ours = cut(copy.deepcopy(model), dist.get_rank(group), n, group)
    with CountedCommunication() as counted:
        _, caches = generate(ours, prompt_BT, noise_GBV, cached=True)
    text_BT = torch.cat([prompt_BT, expected_BG], dim=1)
    with torch.no_grad():
        expected_BV = model(text_BT)[:, -1]
    error = (decode_step(ours, text_BT)() - expected_BV).abs().max()
    claim(f"cut in {n}: a decode step's logits, error", 0, error, atol=1e-4, question=5)
    calls = len(counted.calls("all_reduce")) / GENERATED
    claim(f"cut in {n}: all-reduces per step, 2 L", 2 * L, calls, question=4)
    tokens = REQUESTS * (PROMPT + GENERATED - 1)
    summed = counted.elements("all_reduce") / tokens
    claim(f"cut in {n}: elements summed per token, 2 L D", 2 * L * D, summed, question=4)
    held = bytes_per_token(caches)
    claim(f"cut in {n}: cache per token, 2 L D x 4 / n", 2 * L * D * 4 / n, held, question=2)


# %% [markdown]
# ## 4. DeepSpeed's init_inference: what it cuts, and what it does not know
#
# `init_inference` takes a model of yours and does that cut. Its `injection_policy` says, per class
# of block, which layers are to be summed: those are cut by inputs. All other linear layers inside
# are cut by outputs. (The dot in ".out" is needed: layers are compared by their path.) It needs to
# know no more, as long as each layer has one purpose.
#
# A fused `qkv` has three, and DeepSpeed cuts it into n contiguous pieces of rows, for it cannot see
# where the queries end. With two ranks, the first gets all queries and half of the keys. Shapes
# fit, nothing complains, and the model generates nonsense. For architectures that it knows by name
# (GPT-NeoX, BLOOM, Falcon, ...) DeepSpeed reorders the rows; for your own you must do it first. And
# `heads` is an ordinary number of yours: you divide it.


# %%
def serve(deepspeed: ModuleType, model: "GPT", n: int, reorder: bool) -> "GPT":
    """Return the model as DeepSpeed has cut it over all n ranks."""
    options = {"dtype": torch.float32, "tensor_parallel": {"tp_size": n, "tp_grain_size": 1}}
    if n > 1:
        options["injection_policy"] = {Block: (".out", ".down")}
    for block in model.blocks:
        if reorder:
            block.qkv = keep_rows(block.qkv, fused_rows(D, n).flatten())
    engine = deepspeed.init_inference(model, **options)
    for block in engine.module.blocks:
        block.heads //= n
    return engine.module


def check_deepspeed(
    model: "GPT", prompt_BT: torch.Tensor, noise_GBV: torch.Tensor, expected_BG: torch.Tensor
) -> None:
    text = "DeepSpeed: tokens that differ"
    deepspeed = import_deepspeed(prompt_BT.device)
    if deepspeed is None:
        blocked(text, needs="DeepSpeed: pip install -e '.[deepspeed]'")
        return
    n = WORLD_SIZE
    if n == 1:
        model = serve(deepspeed, copy.deepcopy(model), 1, reorder=False)
        ours_BG, _ = generate(model, prompt_BT, noise_GBV, cached=True)
        claim(text, 0, (ours_BG != expected_BG).sum(), question=5)
        return
    if H % n > 0 or not find_spec("transformers"):
        blocked(text, needs=f"transformers, and ranks whose number divides {H}")
        return
    whole = serve(deepspeed, copy.deepcopy(model), n, reorder=False)
    ours_BG, _ = generate(whole, prompt_BT, noise_GBV, cached=True)
    differ = (ours_BG != expected_BG).sum()
    claim("DeepSpeed, qkv as it is: tokens that differ", 1, differ, ">=", question=5)

    ordered = serve(deepspeed, copy.deepcopy(model), n, reorder=True)
    with CountedCommunication() as counted:
        ours_BG, _ = generate(ordered, prompt_BT, noise_GBV, cached=True)
    differ = (ours_BG != expected_BG).sum()
    claim("DeepSpeed, rows reordered: tokens that differ", 0, differ, question=5)
    calls = len(counted.calls("all_reduce")) / GENERATED
    claim("DeepSpeed: all-reduces per step, 2 L", 2 * L, calls, question=4)


# %% [markdown]
# ## 5. The GPT, and how it is trained
#
# The GPT is the one of the lessons before. It is trained for a few seconds on the sources of
# Python's standard library, so that its text is not all noise. This is data parallelism in its
# simplest form: every rank takes its own part of the batch, and gradients are averaged.


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
# In the training loop, all gradients and the loss travel in one all-reduce, as one flat message.


# %%
def read_text(path: str | None) -> bytes:
    """Return up to 2 MB of the file at `path`, or of the standard library's sources."""
    if path:
        return Path(path).read_bytes()[:2_000_000]
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    return b"".join(source.read_bytes() for source in sources)[:2_000_000]


def train(model: GPT, bytes_N: torch.Tensor, steps: int, device: torch.device) -> list[float]:
    """Train on all ranks; return the loss of each step, averaged over them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(RANK)  # every rank draws another part of the text
    own = max(1, 16 // WORLD_SIZE)
    losses = []
    silent = None if RANK == 0 else True  # None: show progress if this is a terminal
    for _ in tqdm(range(steps), "training", leave=False, disable=silent):
        starts = torch.randint(len(bytes_N) - CONTEXT, (own,), generator=generator).tolist()
        x_BT = torch.stack([bytes_N[start : start + CONTEXT + 1] for start in starts]).to(device)
        logits_BTV = model(x_BT[:, :-1])
        loss = F.cross_entropy(logits_BTV.transpose(1, 2), x_BT[:, 1:])
        loss.backward()
        shared = [p.grad for p in model.parameters()] + [loss.detach()]
        flat = torch.cat([tensor.flatten() for tensor in shared])
        dist.all_reduce(flat)
        flat /= WORLD_SIZE
        pieces = flat.split([tensor.numel() for tensor in shared])
        for tensor, piece in zip(shared, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(flat[-1].item())
    return losses


def check_learning(text: bytes, losses: list[float], own_data: bool) -> None:
    shares = [count / len(text) for count in Counter(text).values()]
    entropy = -sum(share * math.log(share) for share in shares)
    final = sum(losses[-5:]) / 5
    claim("loss in nats per byte, below the bytes' entropy", entropy, final, "<=", varies=True)
    if not own_data:  # which may be as predictable as you like
        claim("loss in nats per byte, above one bit", math.log(2), final, ">=", varies=True)


# %% [markdown]
# ## 6. How it is measured
#
# The **oracle** is `GPT.forward` on one rank, without a cache. Two ways to compute a logit differ
# by rounding, about 1e-6 in float32. A token differs only if two sums of logit and noise lie that
# close together, which of 128 choices happens once in some thousand runs; seeds are fixed, so it
# happens on a machine always or never. That is why `claim` may demand 0.
#
# A hook counts the tokens that go through the first block. FLOPs are counted by torch's
# `FlopCounterMode`, collectives by the counter of the other lessons. Steps are timed on rank 0,
# while the others wait.


# %%
class TokensSeen:
    """Counts in [number] the tokens that reach the first block's `up` layer, of all requests."""

    def __init__(self, model: GPT) -> None:
        self.layer = model.blocks[0].up
        self.count = [0]

    def __enter__(self) -> list[int]:
        self.hook = self.layer.register_forward_hook(self.see)
        return self.count

    def see(self, layer: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        self.count[0] += inputs[0].shape[:-1].numel()

    def __exit__(self, *error: object) -> None:
        self.hook.remove()


def bytes_per_token(caches: list[Cache], longest: int = CONTEXT) -> float:
    """Return the bytes of memory behind all blocks' caches, per token of the longest texts."""
    B = caches[0].kv_2BHTK.shape[1]
    held = sum(cache.kv_2BHTK.untyped_storage().nbytes() for cache in caches)
    return held / (B * longest)


def gumbel(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Noise that makes `argmax` draw from a softmax's probabilities; the same on every rank."""
    uniform = torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return -(-uniform.log()).log().float().to(device)


def median_of_steps(step: Callable, repeats: int = 30) -> float:
    """Return rank 0's median time of a step in milliseconds, on every rank."""
    times = []
    if RANK == 0:
        for _ in range(repeats + 3):
            synchronize()
            start = time.perf_counter()
            step()
            synchronize()
            times.append((time.perf_counter() - start) * 1e3)
    median = [sorted(times[3:])[repeats // 2] if times else None]
    dist.broadcast_object_list(median)
    return median[0]


def synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


# %% [markdown]
# The counter of collectives, and DeepSpeed with nothing left to compile, as in other lessons.


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


def import_deepspeed(device: torch.device, cpu_adam: bool = False) -> ModuleType | None:
    """Return DeepSpeed, quiet and with nothing left to compile; None if it is not installed."""
    os.environ |= {"DS_ACCELERATOR": device.type, "TORCHDYNAMO_DISABLE": "1"}  # load no compiler
    try:
        import deepspeed
    except ImportError:
        return None
    deepspeed.utils.logger.setLevel(logging.ERROR)
    if device.type == "cpu":  # else it compiles, for minutes, an all-reduce for inference only
        deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    if cpu_adam:  # the first rank compiles; the others wait at its lock file, in no collective
        os.environ["PATH"] += f":{Path(sys.executable).parent}"  # ninja may lie there only
        deepspeed.ops.op_builder.CPUAdamBuilder().load()
    return deepspeed


# %% [markdown]
# ## 7. On GPUs: how close a decode step comes to reading the weights once
#
# A model of 1.9 billion parameters in bfloat16, cut over all ranks that divide its heads, with 1
# request and with 32. Every step has to read this rank's weights and its cache. How long that takes
# at least follows from the rate at which the GPU copies memory, which is measured here.


# %%
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


BIG = {"L": 16, "D": 3072, "T": 2048, "V": 32_768}  # 1.9 billion parameters


def check_on_gpus(device: torch.device) -> None:
    if device.type == "cpu":
        blocked("a step's time in bfloat16, B = 32 / B = 1", needs="1 GPU")
        return
    if not torch.cuda.is_bf16_supported(False):  # in hardware, not emulated
        blocked("a step's time in bfloat16, B = 32 / B = 1", needs="1 GPU with bfloat16")
        return
    n = math.gcd(WORLD_SIZE, H)
    group = init_device_mesh("cuda", (WORLD_SIZE // n, n)).get_group(1)
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / median_ms(lambda: target.copy_(source)) / 1e6  # GB/s
    with device:
        model = GPT(**BIG, heads=H).to(torch.bfloat16)
    if n > 1:
        cut(model, dist.get_rank(group), n, group)
    weights = sum(p.nbytes for p in model.parameters())
    print0(f"\n{'':13}{n} ranks, {weights / 1e9:.2f} GB of weights each, {copied:,.0f} GB/s copied")
    print0(f"{'':13}{'B':>4} {'ms':>8} {'tokens/s':>10} {'ms to read weights and cache':>30}")
    times = {}
    for B in (1, 32):
        x_BT = torch.randint(BIG["V"], (B, BIG["T"] // 2), device=device)
        milliseconds = times[B] = median_ms(decode_step(model, x_BT))
        cached = bytes_per_token(empty_caches(model, 1), BIG["T"]) * x_BT.numel()
        floor = (weights + cached) / copied / 1e6
        print0(f"{'':13}{B:4} {milliseconds:8.2f} {B / milliseconds * 1e3:10,.0f} {floor:30.2f}")
    text = "a step's time in bfloat16, B = 32 / B = 1, at most"
    claim(text, 1.5, times[32] / times[1], "<=", question=3, timed=True)


# %% [markdown]
# ## What you should have seen
#
# 1. 1,008 against 47. Without a cache, the work per token grows with the text; with one, each token
#    passes once. The text is the same.
# 2. 3,072 bytes per token here, of which each rank holds 1/n. Llama 3 70B keeps 80 blocks x 2 x 8
#    heads x 128 features x 2 bytes = 0.33 MB per token, 2.7 GB for a text of 8192 tokens. It would
#    be 8 times as much if its 64 query heads did not share 8 heads of keys and values (GQA). The
#    cache, not the weights, decides how many requests fit.
# 3. Less than 4 times: about twice as long on a CPU, whose caches hold so small a model's weights.
#    On a GPU 32 requests take hardly longer than one, until B nears the FLOPs per byte of the
#    device: B requests make B / 2 FLOPs per byte of float32 weights, B in bfloat16.
# 4. 2 L all-reduces per step, after `out` and `down` of each block, and D elements per token in
#    each. That is 3 kB for four requests here, 64 kB at D = 8192 in bfloat16: messages that are all
#    latency. Tensor parallel decoding therefore lives inside one NVLink domain, and pays for models
#    whose weights take longer to read than 2 L small all-reduces take to travel.
# 5. In none with a cache; cut by hand, all logits are the same up to rounding, which is a sharper
#    test than tokens: noise hides a small error. DeepSpeed, given the fused `qkv` as it is, made
#    another text, and raised nothing; with its rows reordered, none differs. Compare tokens with
#    the uncut model before you believe any engine. On one rank there is nothing to cut.
#
# **Try.** The bias before the all-reduce is added n times: wrong from 2 ranks on, right on one,
# where nothing is cut. `tril()` lets the newest token see only the first one, so the cached text
# differs, and with it every other that uses a cache. Generating without a cache does not notice:
# it never calls this function, which is why it is the oracle.
#
# **On CPUs and on GPUs.** All of this runs on both. DeepSpeed's kernel injection
# (`replace_with_kernel_inject=True`) and CUDA graphs need GPUs, and the first also an architecture
# that it knows. A decode step launches hundreds of small kernels: without CUDA graphs a GPU waits
# for Python, which section 7 shows as a step that takes a multiple of the time to read its weights.
#
# **Where it bites.** Requests end at different times, and their places in the batch stay empty
# until the last one ends. vLLM and SGLang fill them at once (**continuous batching**, Yu et al.
# 2022), and keep the cache in pages, so that nothing is reserved for text that never comes
# (**PagedAttention**, Kwon et al. 2023). To serve users, take one of these; take DeepSpeed or your
# own loop for a model that they do not know, or for evaluation inside training.


# %%
def main() -> None:
    options = command_line(
        {
            "--data": {"metavar": "PATH", "help": "text to train on (Python's own sources)"},
            "--steps": {"type": int, "default": 30, "help": "training steps (30)"},
        }
    )
    launch()
    if options.steps < 5:
        refuse(f"training takes at least 5 steps; got --steps {options.steps}; leave it out")
    device = setup()
    text = read_text(options.data)
    bytes_N = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    torch.manual_seed(0)  # the same weights on every rank
    model = GPT(L, D, CONTEXT, V, heads=H).to(device)
    losses = train(model, bytes_N, options.steps, device)
    check_learning(text, losses, own_data=options.data is not None)

    starts = range(0, REQUESTS * 1000, 1000)
    prompt_BT = torch.stack([bytes_N[start : start + PROMPT] for start in starts]).to(device)
    noise_GBV = gumbel((GENERATED, REQUESTS, V), device)
    expected_BG = check_cache(model, prompt_BT, noise_GBV)
    print0(f"{'':13}{bytes(expected_BG[0].tolist())!r} follows {bytes(prompt_BT[0].tolist())!r}")
    check_batches(model, torch.cat([prompt_BT, expected_BG], dim=1))
    n = math.gcd(WORLD_SIZE, H)  # ranks that share a model; there are WORLD_SIZE / n copies of it
    mesh = init_device_mesh(device.type, (WORLD_SIZE // n, n))
    check_tensor_parallel(model, prompt_BT, noise_GBV, expected_BG, mesh.get_group(1))
    check_deepspeed(model, prompt_BT, noise_GBV, expected_BG)
    check_on_gpus(device)
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
