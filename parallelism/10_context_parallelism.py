"""Context parallelism: ring attention over a sequence that no rank holds
======================================================================

**Question.** A sequence is too long for one GPU, so n ranks hold T/n of its tokens each. All parts
of a layer but attention treat every token alone. In attention a token looks at all tokens before
it. How do the ranks compute it without any of them ever holding all keys and values?

**Predict**, and write it down before you run. There are four ranks. The keys and values of one
rank's tokens are called a *block*. Attention is causal: a token sees itself and those before it, so
a rank's queries see half of the rank's own block.

1. In a forward pass, how many blocks does a rank send?
2. And in a backward pass? The gradient of a block is as large as a block, and counts like one.
3. Rank 0 holds the first quarter of the tokens, rank 3 the last. How many times as many scores does
   rank 3 compute as rank 0?
4. The sequence is cut into eight chunks instead, and each rank gets two, so that all have the same
   work. By what factor do the scores of the busiest rank decrease?
5. Sending is to hide behind computing. How many blocks of other ranks must be in a rank's memory
   at a time, in the forward pass?

**Run.**

    torchrun --standalone --nproc-per-node=4 10_context_parallelism.py   # NCCL on 4 GPUs, else gloo
    python 10_context_parallelism.py                                     # the same, started for you

Not run on several GPUs.

**Try.** In `RunningSoftmax.add` leave out `* rescale_Hc1` behind `self.total_Hc1`: what fails,
outputs, gradients or both? In the last line of `ring_backward` write `leaving` for `arriving`, so
that gradients of keys and values never come home: what fails now?

**Before.** exercises/03_ring_shift: the hop from which the ring is made.
communication/02_point_to_point.py: why a send and a receive are posted together.

**Next.** exercises/27_merge_attention and exercises/29_ring_attention; then
parallelism/21_ulysses.py: the same without a ring, and which way to take when.
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
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: H heads, T tokens, K features per head, c = T / 2n tokens of a chunk. A rank holds two
# chunks, so its queries are q_2HcK, and its block is (2, 2, H, c, K): chunk, then key or value.
H, K = 6, 8
TOKENS = 201  # an odd number, so that 2n never divides it

counts = Counter()  # bytes sent, and pieces computed: for section 5

# %% [markdown]
# ## 1. Softmax in pieces
#
# What is kept for the backward pass grows with the sequence. The least that Llama 3 8B can keep is
# the input of each layer, if all else is recomputed. For one sequence of 131,072 tokens, in bf16,
# that is 1.07 GB per layer, and 34 GB in all 32. **Context parallelism** splits the tokens of one
# sequence over n ranks, and with them everything that is kept. Norms, projections and the MLP treat
# each token alone and never notice.
#
# Attention does. The output of a query is a mean of all values v, weighted by the exponentials of
# its scores s:
#
#     out  =  sum over keys j of exp(s_j) v_j   /   sum over keys j of exp(s_j)
#
# Both sums can be computed in pieces, in any order, and no score is needed twice for them. Only
# overflow is in the way: exp(1000) is infinite. So the largest score is subtracted from all, and as
# long as not all pieces have been seen, that is the largest *so far*. When a piece brings a larger
# one, what has been added up is too large by a known factor, and is rescaled. A running maximum,
# total and sum are enough (Milakov and Gimelshein, 2018; FlashAttention does it inside one GPU).


# %%
class RunningSoftmax:
    """Attention of the queries of a chunk, (H, c, K), to keys that come in pieces."""

    def __init__(self, q_HcK: torch.Tensor) -> None:
        self.q_HcK = q_HcK
        self.most_Hc1 = torch.full_like(q_HcK[..., :1], -math.inf)  # largest score so far
        self.total_Hc1 = torch.zeros_like(self.most_Hc1)  # sum of exp(score - most)
        self.sum_HcK = torch.zeros_like(q_HcK)  # sum of exp(score - most) times value

    def add(self, k_HcK: torch.Tensor, v_HcK: torch.Tensor, diagonal: bool) -> None:
        s_Hcc = scores(self.q_HcK, k_HcK, diagonal)
        most_Hc1 = torch.maximum(self.most_Hc1, s_Hcc.amax(dim=-1, keepdim=True))
        weight_Hcc = (s_Hcc - most_Hc1).exp()
        rescale_Hc1 = (self.most_Hc1 - most_Hc1).exp()
        self.total_Hc1 = self.total_Hc1 * rescale_Hc1 + weight_Hcc.sum(dim=-1, keepdim=True)
        self.sum_HcK = self.sum_HcK * rescale_Hc1 + weight_Hcc @ v_HcK
        self.most_Hc1 = most_Hc1


def scores(q_HcK: torch.Tensor, k_HcK: torch.Tensor, diagonal: bool) -> torch.Tensor:
    """Scores of queries and keys, (H, c, c); within one chunk a query sees no later key."""
    counts["pieces"] += 0.5 if diagonal else 1
    s_Hcc = q_HcK @ k_HcK.mT / math.sqrt(q_HcK.shape[-1])
    if diagonal:
        later_cc = torch.ones_like(s_Hcc, dtype=torch.bool).triu(1)
        s_Hcc = s_Hcc.masked_fill(later_cc, -math.inf)
    return s_Hcc


# %% [markdown]
# ## 2. Forward: keys and values travel around a ring
#
# If pieces may come in any order, they may come from other ranks. Each rank keeps its queries, and
# the keys and values travel. Four words, for n = 4 ranks:
#
#     chunk      one of the 2n = 8 equal parts of the sequence; a rank has two (section 3 says why)
#     block      the keys and values of one rank's two chunks: what travels
#     visitor    the rank whose block is here in this step
#     piece      the scores of one chunk of queries and one chunk of keys: what is computed
#
# Blocks move on n-1 times, and visit all ranks (**ring attention**, Liu et al., 2023):
#
#                rank 0     rank 1     rank 2     rank 3
#     step 0     k0 v0      k1 v1      k2 v2      k3 v3      each rank's own
#     step 1     k3 v3      k0 v0      k1 v1      k2 v2      from the rank before
#     step 2     k2 v2      k3 v3      k0 v0      k1 v1
#     step 3     k1 v1      k2 v2      k3 v3      k0 v0
#
# In `visitors` a hop starts before the caller computes, and is awaited afterwards, so it can hide
# behind the work. Two buffers take turns: while one block is worked on and sent on, the next
# arrives in the other.


# %%
def start_hop(leaving: torch.Tensor, arriving: torch.Tensor) -> list[dist.Work]:
    """Send a tensor to the next rank, while one like it arrives from the rank before."""
    if WORLD_SIZE == 1:
        arriving.copy_(leaving)
        return []
    counts["bytes sent"] += leaving.nbytes
    send = dist.P2POp(dist.isend, leaving, (RANK + 1) % WORLD_SIZE)
    receive = dist.P2POp(dist.irecv, arriving, (RANK - 1) % WORLD_SIZE)
    return dist.batch_isend_irecv([send, receive])


def wait_for(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def visitors(block: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (rank, block of that rank) for all ranks, my own first."""
    buffers = [torch.empty_like(block), torch.empty_like(block)]
    for step in range(WORLD_SIZE - 1):
        arriving = buffers[step % 2]
        works = start_hop(block, arriving)
        yield (RANK - step) % WORLD_SIZE, block  # the caller computes with it meanwhile
        wait_for(works)
        block = arriving
    yield (RANK + 1) % WORLD_SIZE, block  # the last one goes no further


# %% [markdown]
# That is the ring. It remains to say which pieces to compute. A **layout** says which two chunks a
# rank holds; the simplest gives it two that follow each other. Chunks are compared by their place
# in the whole sequence: a later chunk of keys is skipped, an earlier one is seen whole, and within
# one chunk, on the *diagonal*, the mask is the usual triangle. No mask of T x T is ever built.

# %%
Layout = Callable[[int], tuple[int, int]]  # rank -> its two chunks


def consecutive(rank: int) -> tuple[int, int]:
    return 2 * rank, 2 * rank + 1


def pieces(layout: Layout, visitor: int) -> list[tuple[int, int, bool]]:
    """List (my chunk, the visitor's chunk, is it the same one) wherever mine must see the other."""
    found = []
    for i, mine in enumerate(layout(RANK)):
        for j, theirs in enumerate(layout(visitor)):
            if theirs <= mine:
                found.append((i, j, theirs == mine))
    return found


def ring_forward(
    q_2HcK: torch.Tensor, block: torch.Tensor, layout: Layout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs (2, H, c, K) of my queries, and lse, (2, H, c, 1): see section 4."""
    running = [RunningSoftmax(q_HcK) for q_HcK in q_2HcK]
    for visitor, kv in visitors(block):
        for i, j, diagonal in pieces(layout, visitor):
            k_HcK, v_HcK = kv[j]
            running[i].add(k_HcK, v_HcK, diagonal)
    out_2HcK = torch.stack([one.sum_HcK / one.total_Hc1 for one in running])
    lse_2Hc1 = torch.stack([one.most_Hc1 + one.total_Hc1.log() for one in running])
    return out_2HcK, lse_2Hc1


# %% [markdown]
# ## 3. Causal attention makes the last rank the slowest: zig-zag
#
# With consecutive tokens the first rank has little before it, and the last rank everything. The
# ring moves on in step, so all wait for the slowest in every step. In the triangles below a row is
# a chunk of queries, a column a chunk of keys, and the digit is the rank that computes the piece.
# In **zig-zag**, as in Megatron-LM and Llama 3, rank r holds chunks r and 2n-1-r, one from the
# front, one from the back:
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
# The last digit of a row is on the diagonal and counts half. In zig-zag the sums are equal, and so
# is each step: all ranks have two pieces, first a whole one and two halves, then two whole ones.
#
# When 2n does not divide the number of tokens, the sequence is padded at its end. In causal
# attention that needs no mask: no token sees the padding, which comes later than all.


# %%
def zig_zag(rank: int) -> tuple[int, int]:
    return rank, 2 * WORLD_SIZE - 1 - rank


def share(x_HTK: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Pad the tokens to a multiple of 2n; return this rank's two chunks, (2, H, c, K)."""
    missing = -x_HTK.shape[-2] % (2 * WORLD_SIZE)
    chunks = F.pad(x_HTK, (0, 0, 0, missing)).chunk(2 * WORLD_SIZE, dim=-2)
    return torch.stack([chunks[number] for number in layout(RANK)])


LAYOUTS = {"consecutive": consecutive, "zig-zag": zig_zag}

# %% [markdown]
# ## 4. Backward: gradients of keys and values travel along, and come home
#
# Backward the blocks go around once more. For each piece a rank computes gradients of the queries,
# which are its own and are added up here, and of the keys and values, which belong to the visitor.
# So each block takes its gradients along. They follow one step behind it, since a rank can send
# them on only when it has added its part. Here is the block of rank 0:
#
#                         rank 0          rank 1          rank 2          rank 3
#     step 0              its part  -->
#     step 1                              + its part -->
#     step 2                                              + its part -->
#     step 3                                                              + its part --> home
#
# The block itself stops at rank 3, after n-1 hops. Its gradients make one hop more, to rank 0.
#
# In the code, `grad_kv` is this rank's part, `arriving` what the ranks before have added up, and
# `leaving` the sum of both, which is sent while the next step computes. Take `piece_gradients`
# as given: it is what FlashAttention does on one GPU, and stands at the end. Of the other pieces it
# needs two numbers per query: **lse**, the logarithm of the sum of all its exp(score), which the
# forward pass has found, and **delta**, the sum of grad * out.


# %%
def ring_backward(
    q_2HcK: torch.Tensor,
    block: torch.Tensor,
    out_2HcK: torch.Tensor,
    lse_2Hc1: torch.Tensor,
    grad_2HcK: torch.Tensor,
    layout: Layout,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of my queries, (2, H, c, K), and of my block."""
    delta_2Hc1 = (grad_2HcK * out_2HcK).sum(dim=-1, keepdim=True)
    grad_q_2HcK = torch.zeros_like(q_2HcK)
    arriving = torch.zeros_like(block)  # gradients from the rank before: none yet
    works = []
    for visitor, kv in visitors(block):
        grad_kv = torch.zeros_like(kv)
        for i, j, diagonal in pieces(layout, visitor):
            mine = (q_2HcK[i], lse_2Hc1[i], delta_2Hc1[i], grad_2HcK[i])
            grad_q_HcK, grad_kv_2HcK = piece_gradients(*mine, kv[j], diagonal)
            grad_q_2HcK[i] += grad_q_HcK
            grad_kv[j] += grad_kv_2HcK
        wait_for(works)
        grad_kv += arriving  # what the ranks before have added
        leaving = grad_kv
        works = start_hop(leaving, arriving)
    wait_for(works)
    return grad_q_2HcK, arriving  # the last to arrive are my own block's


class RingAttention(torch.autograd.Function):
    """To autograd both passes are one function. It keeps what is this rank's own."""

    @staticmethod
    def forward(ctx, q_2HcK, block, layout) -> torch.Tensor:
        out_2HcK, lse_2Hc1 = ring_forward(q_2HcK, block, layout)
        ctx.save_for_backward(q_2HcK, block, out_2HcK, lse_2Hc1)
        ctx.layout = layout
        return out_2HcK

    @staticmethod
    def backward(ctx, grad_2HcK) -> tuple:
        return *ring_backward(*ctx.saved_tensors, grad_2HcK, ctx.layout), None


def ring_attention(
    q_2HcK: torch.Tensor, k_2HcK: torch.Tensor, v_2HcK: torch.Tensor, layout: Layout
) -> torch.Tensor:
    """Causal attention of this rank's tokens to those of all ranks: (2, H, c, K)."""
    return RingAttention.apply(q_2HcK, torch.stack([k_2HcK, v_2HcK], dim=1), layout)


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
    """Queries, keys, values and the output's gradient, (4, H, T, K); the same on every rank."""
    torch.manual_seed(0)
    return torch.randn(4, H, TOKENS, K, device=device, dtype=torch.float64)


def largest_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference between two tensors; inf if one is no number."""
    return (ours - expected).abs().max().nan_to_num(nan=torch.inf).item()


def errors(device: torch.device, layout: Layout, scale: int = 1) -> tuple[float, float]:
    """How far the outputs are from one process's, and how far the gradients of q, k and v."""
    q_HTK, k_HTK, v_HTK, grad_HTK = draw(device)
    whole = [x.clone().requires_grad_() for x in (scale * q_HTK, k_HTK, v_HTK)]
    due_HTK = F.scaled_dot_product_attention(*whole, is_causal=True)
    due_HTK.backward(grad_HTK)
    mine = [share(x.detach(), layout).requires_grad_() for x in whole]
    out_2HcK = ring_attention(*mine, layout)
    out_2HcK.backward(share(grad_HTK, layout))
    real = share(torch.ones_like(q_HTK), layout)  # 0 where padding is
    output = largest_error(out_2HcK.detach() * real, share(due_HTK.detach(), layout))
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
# `start_hop` counts the bytes that it sends, and `scores` its pieces, one on the diagonal for a
# half. How many blocks of other ranks are in memory at a time is seen from the addresses of those
# that `visitors` hands out. (Nothing else keeps one: `RunningSoftmax` has sums.)


# %%
def counted(device: torch.device, layout: Layout) -> tuple[Counter, Counter]:
    """What a forward pass counts, and what a backward pass does."""
    q_2HcK, k_2HcK, v_2HcK, grad_2HcK = [share(x, layout) for x in draw(device)]
    counts.clear()
    out_2HcK = ring_attention(q_2HcK.requires_grad_(), k_2HcK, v_2HcK, layout)
    forward = counts.copy()
    out_2HcK.backward(grad_2HcK)
    return forward, counts - forward


def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


def check_costs(device: torch.device) -> None:
    n = WORLD_SIZE
    block = share(draw(device)[1:3], zig_zag)  # keys and values
    forward, backward = counted(device, zig_zag)
    sent = forward["bytes sent"] / block.nbytes
    claim("bytes sent forward / my keys and values", n - 1, sent, question=1)
    sent = backward["bytes sent"] / block.nbytes
    claim("bytes sent backward / my keys and values", 2 * n - 1, sent, question=2)
    unequal = gather_objects(counted(device, consecutive)[0]["pieces"])
    equal = gather_objects(forward["pieces"])
    ratio = unequal[-1] / unequal[0]
    claim("consecutive: pieces, last rank / first", 2 * n - 1, ratio, question=3)
    text = "busiest rank's pieces: consecutive / zig-zag"
    claim(text, (2 * n - 1) / n, max(unequal) / max(equal), question=4)
    places = {visiting.data_ptr() for visitor, visiting in visitors(block) if visitor != RANK}
    claim("other ranks' blocks in memory at a time", min(2, n - 1), len(places), question=5)


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
    shape = (2, 1, 131_072 // (2 * WORLD_SIZE), 128)
    q_2HcK, k_2HcK, v_2HcK = torch.randn(3, *shape, device=device, dtype=torch.bfloat16)
    block = torch.stack([k_2HcK, v_2HcK], dim=1)
    return max(gather_objects(median_ms(lambda: ring_forward(q_2HcK, block, layout))))


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
# 1. Three: n-1. A block has T/n tokens, so a rank sends the keys and values of (n-1)/n of all
#    tokens: with more ranks each computes less, and sends no less.
# 2. Seven: the blocks make three hops again, their gradients four: (n-1) + n.
# 3. Seven, 2n-1: rank 0 has half a block to look at, rank 3 three and a half; in pieces of chunks
#    that is 2 and 14. Rank 0 waits for the others most of the time.
# 4. 14/8 = 1.75, and nearly 2 with many ranks: (2n-1) / n.
# 5. Two, from three ranks on: the one at work, and the one that arrives. None is kept for the
#    backward pass, since all come once more. Backward there are three blocks of gradients besides:
#    one that is computed, one that leaves and one that arrives. That two buffers are enough is
#    measured; that a hop really hides is not.
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
# NVLink (450 GB/s), and 4,000 over a network card (50 GB/s). Backward a step sends twice as much,
# if gradients are bf16 too, and computes 2.5 times as much: five products per piece in place of
# two. So what hides forward hides backward, all but the last hop: the one that brings gradients
# home has no work to hide behind. Real rings keep the running numbers in float32, let a fused
# kernel do each piece, and skip what is masked on the diagonal.
#
# **When.** When one sequence is too long even if every layer is recomputed and tensor parallelism
# splits what it can. Many short sequences are better split over ranks whole: that needs no hops.
# The simpler way is an **all-gather** of keys and values, as in Llama 3. It sends as much forward
# and leaves the rest to fused kernels, but each rank then holds n blocks: of 131,072 tokens and 8
# heads of 128 features 0.54 GB, one layer at a time. A ring pays where that is too much, or where
# waiting for it is. 21_ulysses.py compares both with a third way.
#
# **Where it bites.** All that belongs to a token is dealt out in the same zig-zag: labels, masks of
# documents, the positions of rotary embeddings (counted in the whole sequence, not on the rank).
# Ranks see different tokens, so weights' gradients are combined over the ring too, as in data
# parallelism: averaged, if each rank's loss is the mean over its tokens and all have equally many.
#
# **In other systems.** Megatron-LM: `--context-parallel-size` with `--cp-comm-type p2p`. picotron
# has a ring over consecutive tokens. PyTorch's `context_parallel`, which is experimental, deals out
# chunks in zig-zag and gathers all keys and values, if it is not told to rotate them.

# %% [markdown]
# **The backward pass of one piece**, for those who want it. Its weights p are not kept: they are
# computed again, and exp(score - lse) is the finished weight at once. With grad the gradient of the
# output, ' for transposed, and * for an elementwise product:
#
#     dv  =  p' grad       ds  =  p * (grad v' - delta)       dq  =  ds k       dk  =  ds' q
#
# The weights of a query add up to 1, so what raises one lowers the others: delta is the mean of
# grad v' over all keys, weighted by p. As out is that mean of v, delta is grad * out, added up over
# the features, and needs no keys (FlashAttention-2, Dao, 2023).


# %%
def piece_gradients(
    q_HcK: torch.Tensor,
    lse_Hc1: torch.Tensor,
    delta_Hc1: torch.Tensor,
    grad_HcK: torch.Tensor,
    kv_2HcK: torch.Tensor,
    diagonal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dq of my chunk, (H, c, K), and dk and dv of the visitor's, (2, H, c, K)."""
    k_HcK, v_HcK = kv_2HcK
    p_Hcc = (scores(q_HcK, k_HcK, diagonal) - lse_Hc1).exp()
    ds_Hcc = p_Hcc * (grad_HcK @ v_HcK.mT - delta_Hc1)
    ds_Hcc /= math.sqrt(q_HcK.shape[-1])  # as the scores are
    return ds_Hcc @ k_HcK, torch.stack([ds_Hcc.mT @ q_HcK, p_Hcc.mT @ grad_HcK])


def main() -> None:
    command_line()
    launch()
    device = setup()
    check_values(device)
    if WORLD_SIZE == 1:
        blocked("what a rank sends, computes and holds", needs="2 ranks")
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
