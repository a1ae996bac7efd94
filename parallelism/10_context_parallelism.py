"""Context parallelism: ring attention over a sequence that no rank holds
======================================================================

**Question.** A sequence is too long for one GPU, so n ranks hold T/n of its tokens each. All parts
of a layer but attention treat every token alone. In attention a token looks at all tokens before
it. How do the ranks compute it without any of them ever holding all keys and values?

**Predict**, and write it down before you run. There are four ranks. The sequence is cut into eight
chunks, two for each rank. A *piece* of the work is the queries of one chunk against the keys of one
chunk. Attention is causal: a piece that the mask leaves empty is skipped, and one on the diagonal,
a chunk against itself, counts half.

1. In a forward pass, how many times the size of its own keys does a rank send, values included?
2. And in a backward pass?
3. Rank 0 holds the first two chunks, rank 3 the last two. How many times as many pieces does rank 3
   compute as rank 0?
4. The chunks are dealt out as evenly as can be. By what factor do the pieces of the busiest rank
   decrease?
5. All keys and values would be four blocks, one from each rank. Instead they travel: while a rank
   computes with one block, and sends it on, the next one arrives. How many blocks does it hold at a
   time in the forward pass, besides its own?

**Run.**

    torchrun --standalone --nproc-per-node=4 10_context_parallelism.py   # NCCL on 4 GPUs, else gloo
    python 10_context_parallelism.py                                     # the same, started for you

Not run on several GPUs.

**Try.** In `RunningSoftmax.add` leave out `* rescale_BHc1` behind `self.total_BHc1`: what fails,
outputs, gradients or both? In the last line of `ring_backward` write `grad_kv_22BHcK` for
`home_22BHcK`, so that gradients of keys and values never come home: what fails now?

**Before.** exercises/03_ring_shift: the hop from which the ring is made.
communication/02_point_to_point.py: why a send and a receive are posted together.

**Next.** exercises/27_merge_attention and exercises/29_ring_attention; then
parallelism/21_ulysses.py: the same without a ring, and which way to take when.
"""

import argparse
import contextlib
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
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: B sequences, H heads, T tokens, K features per head. A rank holds two chunks of c = T / 2n
# tokens: x_2BHcK. In kv_22BHcK the first 2 is the chunk, the second is keys and values.
B, H, K = 2, 3, 8
TOKENS = 201  # an odd number, so that 2n never divides it

# %% [markdown]
# ## 1. Softmax in pieces
#
# Suppose that every layer of Llama 3 8B is recomputed, so that only its input is kept for the
# backward pass. For one sequence of 131,072 tokens that is 1.07 GB per layer, and 34 GB in all 32.
# **Context parallelism** splits the tokens of one sequence over n ranks, and with them everything
# that is kept. Norms, projections and the MLP treat each token alone and never notice.
#
# Attention does. The output of a query is a mean of all values v, weighted by the exponentials of
# its scores s:
#
#     out  =  sum over keys j of exp(s_j) v_j   /   sum over keys j of exp(s_j)
#
# Both sums can be computed in pieces, in any order, and no score is needed twice. Only overflow is
# in the way: exp(1000) is infinite. So the largest score is subtracted from all, and as long as not
# all pieces have been seen, that is the largest *so far*. When a piece brings a larger one, what
# has been added up is too large by a known factor, and is rescaled. A running maximum, total and
# sum are enough (Milakov and Gimelshein, 2018; FlashAttention does the same inside one GPU).


# %%
class RunningSoftmax:
    """Attention of the queries of a chunk, (B, H, c, K), to keys that come in pieces."""

    def __init__(self, q_BHcK: torch.Tensor) -> None:
        self.q_BHcK = q_BHcK
        self.most_BHc1 = torch.full_like(q_BHcK[..., :1], -math.inf)  # largest score so far
        self.total_BHc1 = torch.zeros_like(self.most_BHc1)  # sum of exp(score - most)
        self.sum_BHcK = torch.zeros_like(q_BHcK)  # sum of exp(score - most) times value

    def add(self, k_BHcK: torch.Tensor, v_BHcK: torch.Tensor, diagonal: bool) -> None:
        s_BHcc = scores(self.q_BHcK, k_BHcK, diagonal)
        most_BHc1 = torch.maximum(self.most_BHc1, s_BHcc.amax(dim=-1, keepdim=True))
        weight_BHcc = (s_BHcc - most_BHc1).exp()
        rescale_BHc1 = (self.most_BHc1 - most_BHc1).exp()
        self.total_BHc1 = self.total_BHc1 * rescale_BHc1 + weight_BHcc.sum(dim=-1, keepdim=True)
        self.sum_BHcK = self.sum_BHcK * rescale_BHc1 + weight_BHcc @ v_BHcK
        self.most_BHc1 = most_BHc1


def scores(q_BHcK: torch.Tensor, k_BHcK: torch.Tensor, diagonal: bool) -> torch.Tensor:
    """Scores of queries and keys, (B, H, c, c); of the same chunk a query sees no later key."""
    s_BHcc = q_BHcK @ k_BHcK.transpose(-1, -2) / math.sqrt(q_BHcK.shape[-1])
    if diagonal:
        later_cc = torch.ones_like(s_BHcc[0, 0], dtype=torch.bool).triu(1)
        s_BHcc = s_BHcc.masked_fill(later_cc, -math.inf)
    return s_BHcc


# %% [markdown]
# ## 2. Forward: keys and values travel around a ring
#
# If pieces may come in any order, they may come from other ranks. Each rank keeps its queries. Keys
# and values move on n-1 times, and visit all ranks (**ring attention**, Liu et al., 2023):
#
#                rank 0     rank 1     rank 2     rank 3
#     step 0     k0 v0      k1 v1      k2 v2      k3 v3      each rank's own
#     step 1     k3 v3      k0 v0      k1 v1      k2 v2      from the rank before
#     step 2     k2 v2      k3 v3      k0 v0      k1 v1
#     step 3     k1 v1      k2 v2      k3 v3      k0 v0
#
# A hop starts before a rank computes, and is awaited afterwards, so it can hide behind the work. A
# rank never gathers what visits it: it holds the block that it works on, and the one that arrives.


# %%
class Hop:
    """A tensor on its way to the next rank, while one like it arrives from the rank before."""

    def __init__(self, x: torch.Tensor) -> None:
        self.leaving = x.contiguous()  # what is sent lies in one piece
        self.arriving = torch.empty_like(self.leaving) if WORLD_SIZE > 1 else x
        self.works = []
        if WORLD_SIZE > 1:
            send = dist.P2POp(dist.isend, self.leaving, (RANK + 1) % WORLD_SIZE)
            receive = dist.P2POp(dist.irecv, self.arriving, (RANK - 1) % WORLD_SIZE)
            self.works = dist.batch_isend_irecv([send, receive])

    def arrived(self) -> torch.Tensor:
        while self.works:
            self.works.pop().wait()
        self.leaving = None  # it has left: its memory may be used again
        return self.arriving


# %% [markdown]
# A **layout** says which two of the 2n chunks a rank holds; the simplest gives it consecutive
# tokens. From the layout `pieces` knows what the causal mask leaves of a visit. Chunks are compared
# by their place in the whole sequence: a later chunk of keys is skipped, an earlier one is seen
# whole, and within one chunk the mask is the usual triangle. No mask of T x T is ever built.

# %%
Layout = Callable[[int], tuple[int, int]]  # rank -> its two chunks


def consecutive(rank: int) -> tuple[int, int]:
    return 2 * rank, 2 * rank + 1


def pieces(layout: Layout, source: int) -> list[tuple[int, int, bool]]:
    """List (my chunk, chunk of `source`, is it the same one) wherever mine must see the other."""
    found = []
    for i, mine in enumerate(layout(RANK)):
        for j, theirs in enumerate(layout(source)):
            if theirs <= mine:
                found.append((i, j, theirs == mine))
    return found


# %% [markdown]
# A step of the ring is three lines: start the hop, compute, and wait for what arrives.


# %%
def ring_forward(
    q_2BHcK: torch.Tensor, k_2BHcK: torch.Tensor, v_2BHcK: torch.Tensor, layout: Layout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs (2, B, H, c, K) of my queries, and the logarithms of their totals."""
    running = [RunningSoftmax(q_BHcK) for q_BHcK in q_2BHcK]
    kv_22BHcK = torch.stack([k_2BHcK, v_2BHcK], dim=1)
    for step in range(WORLD_SIZE):
        hop = Hop(kv_22BHcK) if step < WORLD_SIZE - 1 else None
        for i, j, diagonal in pieces(layout, (RANK - step) % WORLD_SIZE):
            running[i].add(*kv_22BHcK[j], diagonal)
        if hop:
            kv_22BHcK = hop.arrived()
    out_2BHcK = torch.stack([one.sum_BHcK / one.total_BHc1 for one in running])
    lse_2BHc1 = torch.stack([one.most_BHc1 + one.total_BHc1.log() for one in running])
    return out_2BHcK, lse_2BHc1


# %% [markdown]
# ## 3. Backward: gradients of keys and values travel along, and come home
#
# First one piece, on one rank. Its weights p are not kept. They are computed again from queries,
# keys and **lse**, the logarithm of the sum of all exp(score) of a query: exp(score - lse) is the
# finished weight. If grad is the gradient of the output, ' means transposed, and * is an
# elementwise product, then
#
#     dv  =  p' grad       ds  =  p * (grad v' - delta)       delta  =  sum of grad * out per query
#     dq  =  ds k          dk  =  ds' q, and both are scaled as the scores are
#
# (The weights of a query add up to 1, so what raises one lowers the others: delta is the mean of
# grad v' over all keys, weighted by p. As out is that mean of v, delta needs no keys.)


# %%
def piece_gradients(mine: tuple, kv_2BHcK: torch.Tensor, diagonal: bool) -> tuple:
    """Return dq (B, H, c, K) of my chunk, and dk and dv (2, B, H, c, K) of the visitor's."""
    q_BHcK, lse_BHc1, delta_BHc1, grad_BHcK = mine
    k_BHcK, v_BHcK = kv_2BHcK
    p_BHcc = (scores(q_BHcK, k_BHcK, diagonal) - lse_BHc1).exp()
    grad_v_BHcK = p_BHcc.transpose(-1, -2) @ grad_BHcK
    grad_s_BHcc = p_BHcc * (grad_BHcK @ v_BHcK.transpose(-1, -2) - delta_BHc1)
    grad_s_BHcc /= math.sqrt(q_BHcK.shape[-1])
    grad_k_BHcK = grad_s_BHcc.transpose(-1, -2) @ q_BHcK
    return grad_s_BHcc @ k_BHcK, torch.stack([grad_k_BHcK, grad_v_BHcK])


# %% [markdown]
# Now the ring. dq belongs to this rank, which adds up its pieces. dk and dv belong to the visitor,
# so each block of keys and values takes its gradients along. They follow one step behind it, since
# a rank can send them on only when it has added its part. Here is the block of rank 0:
#
#                         rank 0          rank 1          rank 2          rank 3
#     step 0              its part  -->
#     step 1                              + its part -->
#     step 2                                              + its part -->
#     step 3                                                              + its part --> home
#
# The block itself stops at rank 3, after n-1 hops. Its gradients make one hop more, to rank 0.


# %%
def ring_backward(saved: tuple, grad_2BHcK: torch.Tensor, layout: Layout) -> tuple:
    """Return the gradients of my queries, keys and values, (2, B, H, c, K) each."""
    q_2BHcK, k_2BHcK, v_2BHcK, out_2BHcK, lse_2BHc1 = saved
    delta_2BHc1 = (grad_2BHcK * out_2BHcK).sum(dim=-1, keepdim=True)
    grad_q_2BHcK = torch.zeros_like(q_2BHcK)
    kv_22BHcK = torch.stack([k_2BHcK, v_2BHcK], dim=1)
    grad_hop = None  # gradients on their way
    for step in range(WORLD_SIZE):
        hop = Hop(kv_22BHcK) if step < WORLD_SIZE - 1 else None
        grad_kv_22BHcK = torch.zeros_like(kv_22BHcK)
        for i, j, diagonal in pieces(layout, (RANK - step) % WORLD_SIZE):
            mine = (q_2BHcK[i], lse_2BHc1[i], delta_2BHc1[i], grad_2BHcK[i])
            grad_q_BHcK, grad_kv_2BHcK = piece_gradients(mine, kv_22BHcK[j], diagonal)
            grad_q_2BHcK[i] += grad_q_BHcK
            grad_kv_22BHcK[j] += grad_kv_2BHcK
        if grad_hop:
            grad_kv_22BHcK += grad_hop.arrived()  # what the ranks before have added
        grad_hop = Hop(grad_kv_22BHcK)
        if hop:
            kv_22BHcK = hop.arrived()
    home_22BHcK = grad_hop.arrived()
    return grad_q_2BHcK, *home_22BHcK.unbind(dim=1)


# %% [markdown]
# To autograd both are one function. What it keeps is this rank's own: queries, keys, values,
# output, and one number per query.


# %%
class RingAttention(torch.autograd.Function):
    """Causal attention over the tokens of all ranks: q, k, v (2, B, H, c, K) -> (2, B, H, c, K)."""

    @staticmethod
    def forward(ctx, q_2BHcK, k_2BHcK, v_2BHcK, layout) -> torch.Tensor:
        out_2BHcK, lse_2BHc1 = ring_forward(q_2BHcK, k_2BHcK, v_2BHcK, layout)
        ctx.save_for_backward(q_2BHcK, k_2BHcK, v_2BHcK, out_2BHcK, lse_2BHc1)
        ctx.layout = layout
        return out_2BHcK

    @staticmethod
    def backward(ctx, grad_2BHcK) -> tuple:
        return *ring_backward(ctx.saved_tensors, grad_2BHcK, ctx.layout), None


# %% [markdown]
# ## 4. Causal attention makes the last rank the slowest: zig-zag
#
# With consecutive tokens the first rank has little before it, and the last rank everything. The
# ring moves on in step, so all wait for the slowest in every step. In the triangles below a row is
# a chunk of queries, and the digit is the rank that computes the piece. In **zig-zag**, as in
# Megatron-LM and Llama 3, rank r holds chunks r and 2n-1-r, one from the front, one from the back:
#
#                  consecutive            zig-zag
#     chunk 0      0                      0
#     chunk 1      0 0                    1 1
#     chunk 2      1 1 1                  2 2 2
#     chunk 3      1 1 1 1                3 3 3 3
#     chunk 4      2 2 2 2 2              3 3 3 3 3
#     chunk 5      2 2 2 2 2 2            2 2 2 2 2 2
#     chunk 6      3 3 3 3 3 3 3          1 1 1 1 1 1 1
#     chunk 7      3 3 3 3 3 3 3 3        0 0 0 0 0 0 0 0
#
# Not only are the sums equal. Every rank has two pieces in every step: first a whole one and two
# halves, those on the diagonal, and then two whole ones. (`scores` computes a half as a whole and
# masks it; the kernels of real systems skip what is masked.)
#
# When 2n does not divide the number of tokens, the sequence is padded at its end. In causal
# attention that needs no mask: no token sees the padding, which comes later than all.


# %%
def zig_zag(rank: int) -> tuple[int, int]:
    return rank, 2 * WORLD_SIZE - 1 - rank


def share(x_BHTK: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Pad the tokens to a multiple of 2n; return this rank's two chunks, (2, B, H, c, K)."""
    missing = -x_BHTK.shape[2] % (2 * WORLD_SIZE)
    chunks = F.pad(x_BHTK, (0, 0, 0, missing)).chunk(2 * WORLD_SIZE, dim=2)
    return torch.stack([chunks[number] for number in layout(RANK)])


LAYOUTS = {"consecutive": consecutive, "zig-zag": zig_zag}

# %% [markdown]
# ## 5. How it is measured
#
# The **oracle** is `F.scaled_dot_product_attention` over all tokens in one process, in float64 and
# without padding. Each rank compares its share of outputs and gradients; the gradient of padding
# must be zero. With `scale` the scores go into the thousands, where exponentials overflow unless
# the largest score is subtracted.

# %%
TOLERANCE = 10 * (TOKENS + 2 * WORLD_SIZE) * 2**-53  # sums over all tokens in another order


def draw(device: torch.device) -> torch.Tensor:
    """Queries, keys, values and the output's gradient, (4, B, H, T, K); the same on every rank."""
    torch.manual_seed(0)
    return torch.randn(4, B, H, TOKENS, K, device=device, dtype=torch.float64)


def largest_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference between two tensors; inf if one is no number."""
    return (ours - expected).abs().max().nan_to_num(nan=torch.inf).item()


def errors(device: torch.device, layout: Layout, scale: int = 1) -> tuple[float, float]:
    """How far the outputs are from one process's, and how far the gradients of q, k and v."""
    q_BHTK, k_BHTK, v_BHTK, grad_BHTK = draw(device)
    whole = [x.clone().requires_grad_() for x in (scale * q_BHTK, k_BHTK, v_BHTK)]
    due_BHTK = F.scaled_dot_product_attention(*whole, is_causal=True)
    due_BHTK.backward(grad_BHTK)
    mine = [share(x.detach(), layout).requires_grad_() for x in whole]
    out_2BHcK = RingAttention.apply(*mine, layout)
    out_2BHcK.backward(share(grad_BHTK, layout))
    real = share(torch.ones_like(q_BHTK), layout)  # 0 where padding is
    output = largest_error(out_2BHcK.detach() * real, share(due_BHTK.detach(), layout))
    pairs = zip(mine, whole, strict=True)
    return output, max(largest_error(a.grad, share(b.grad, layout)) for a, b in pairs)


def check_values(device: torch.device) -> None:
    for name, layout in LAYOUTS.items():
        output, gradients = errors(device, layout)
        claim(f"{name}: error of the output", 0, output, atol=TOLERANCE)
        claim(f"{name}: error of the gradients", 0, gradients, atol=TOLERANCE)
    output, _ = errors(device, zig_zag, scale=1000)
    claim("scores of thousands: error of the output", 0, output, atol=1e-10)  # they are rounded


# %% [markdown]
# While a pass is **watched**, each hop notes how much it sends, and how many blocks of keys and
# values, sent or received, are in memory when it starts. `scores` counts its pieces, one on the
# diagonal for a half.


# %%
@contextlib.contextmanager
def watched() -> Iterator[SimpleNamespace]:
    watch = SimpleNamespace(sent=0, blocks=[], most_blocks=0, pieces=0.0)
    real_hop = Hop
    real_scores = scores

    def noted_hop(x: torch.Tensor) -> Hop:
        hop = real_hop(x)
        watch.sent += x.numel()
        for block in (hop.leaving, hop.arriving):
            watch.blocks.append(StorageWeakRef(block.untyped_storage()))
        in_memory = {block.cdata for block in watch.blocks if not block.expired()}
        watch.most_blocks = max(watch.most_blocks, len(in_memory))
        return hop

    def noted_scores(q_BHcK: torch.Tensor, k_BHcK: torch.Tensor, diagonal: bool) -> torch.Tensor:
        watch.pieces += 0.5 if diagonal else 1
        return real_scores(q_BHcK, k_BHcK, diagonal)

    with patch.dict(globals(), Hop=noted_hop, scores=noted_scores):
        yield watch


def costs(device: torch.device, layout: Layout) -> dict[str, float]:
    """What a pass each way costs; elements in units of my keys."""
    q_2BHcK, k_2BHcK, v_2BHcK, grad_2BHcK = [share(x, layout) for x in draw(device)]
    q_2BHcK.requires_grad_()
    kept = []
    keep = saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x)
    with watched() as forward, keep:
        out_2BHcK = RingAttention.apply(q_2BHcK, k_2BHcK, v_2BHcK, layout)
    with watched() as backward:
        out_2BHcK.backward(grad_2BHcK)
    unit = k_2BHcK.numel()
    found = {"forward": forward.sent / unit, "backward": backward.sent / unit}
    found["kept"] = sum(x.untyped_storage().nbytes() // x.itemsize for x in kept) / unit
    return found | {"pieces": forward.pieces, "blocks": forward.most_blocks}


def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


def check_costs(device: torch.device) -> None:
    n = WORLD_SIZE
    found = costs(device, zig_zag)
    claim("elements sent forward / my keys", 2 * (n - 1), found["forward"], question=1)
    claim("elements sent backward / my keys", 4 * n - 2, found["backward"], question=2)
    claim("zig-zag: pieces of a rank", 2 * n, found["pieces"])
    unequal = gather_objects(costs(device, consecutive)["pieces"])
    ratio = unequal[-1] / unequal[0]
    claim("consecutive: pieces, last rank / first", 2 * n - 1, ratio, question=3)
    text = "busiest rank's pieces: consecutive / zig-zag"
    ratio = max(unequal) / max(gather_objects(found["pieces"]))
    claim(text, (2 * n - 1) / n, ratio, question=4)
    claim("traveling blocks held at a time", 2, found["blocks"], question=5)
    others = (found["kept"] - 4 - 1 / K) / 2  # my q, k, v, out, and one number per query
    claim("other ranks whose keys and values are kept", 0, others)


# %% [markdown]
# On GPUs the two layouts are timed on 131,072 tokens. `scores` stores c x c numbers for each head,
# so that one head is all that is timed, and computes a piece on the diagonal whole. So the slowest
# rank computes 4n-1 pieces with consecutive tokens, and 2n+1 in zig-zag; so should be the times.


# %%
def measure_on_gpus(device: torch.device) -> None:
    text = "ms of 131,072 tokens: zig-zag / consecutive"
    if device.type == "cpu" or WORLD_SIZE == 1:
        blocked(text, needs="2 GPUs")
        return
    factor = (2 * WORLD_SIZE + 1) / (4 * WORLD_SIZE - 1)
    ratio = slowest_ms(device, zig_zag) / slowest_ms(device, consecutive)
    claim(text, factor, ratio, atol=0.1, timed=True)


def slowest_ms(device: torch.device, layout: Layout) -> float:
    """Milliseconds of a forward pass on the slowest rank: one head of 128 features, in bf16."""
    shape = (2, 1, 1, 131_072 // (2 * WORLD_SIZE), 128)
    q_2BHcK, k_2BHcK, v_2BHcK = torch.randn(3, *shape, device=device, dtype=torch.bfloat16)
    mine = median_ms(lambda: ring_forward(q_2BHcK, k_2BHcK, v_2BHcK, layout))
    return max(gather_objects(mine))


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
# 1. Six: keys and values make three hops each, 2(n-1). A share has T/n keys, so a rank sends nearly
#    2T of them whatever n is: more ranks compute less each, and send no less.
# 2. Fourteen: keys and values make three hops again, their gradients four: 2(n-1) + 2n.
# 3. Seven, 2n-1: 14 pieces against 2. Rank 0 waits for the others most of the time.
# 4. 14/8 = 1.75, and nearly 2 with many ranks: (2n-1) / n.
# 5. Two: the one at work, and the one that arrives. Its own block, which it needs again backward,
#    is a third. Visitors are not kept, as all come once more, so a rank keeps 1/n of what one
#    process keeps. Backward, blocks of gradients are added, a few again however many ranks.
#
# **Try.** A total that is not rescaled gives wrong outputs, and its logarithm wrong weights
# backward: every error fails, the one of scores of thousands too. (The outputs of the first chunk
# are right even so, since it sees one piece only.) Gradients that do not come home are those of the
# next rank's keys. The outputs are right, and as much is sent; what fails is the error of the
# gradients, under both layouts.
#
# **On GPUs**, by arithmetic, not measured here: a hop hides if it takes less time than the two
# pieces of its step. Forward, and in bf16, that is so from 2 (G/H) F/W tokens per rank on, for H
# heads of queries and G of keys (here G = H; what travels shrinks with G), F FLOP/s, and a link of
# W bytes/s one way. At 400 TFLOP/s, with Llama 3 8B's H = 32 and G = 8, that is 444 tokens over
# NVLink (450 GB/s), and 4,000 over a network card (50 GB/s). A long sequence hides its ring even
# between machines, all but the last hop backward: the one that brings gradients home has no work to
# hide behind. Real rings keep the running numbers in float32 and let a fused kernel do each piece.
#
# **When.** When one sequence is too long even if every layer is recomputed and tensor parallelism
# splits what it can. Many short sequences are better split over ranks whole: that needs no hops.
#
# **Where it bites.** All that belongs to a token is dealt out in the same zig-zag: labels, masks of
# documents, the positions of rotary embeddings (counted in the whole sequence, not on the rank).
# Ranks see different tokens, so weights' gradients are combined over the ring too, as in data
# parallelism: averaged, if each rank's loss is the mean over its tokens and all have equally many.
#
# **In other systems.** Megatron-LM: `--context-parallel-size` with `--cp-comm-type p2p`. picotron
# has a ring over consecutive tokens. PyTorch's `context_parallel`, which is experimental, deals out
# chunks in zig-zag and gathers all keys and values, if it is not told to rotate them:
# 21_ulysses.py says when that is better.


# %%
def main() -> None:
    command_line()
    launch()
    device = setup()
    check_values(device)
    if WORLD_SIZE == 1:
        blocked("what a rank sends, computes and keeps", needs="2 ranks")
    else:
        check_costs(device)
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
