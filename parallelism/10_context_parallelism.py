"""Context parallelism: ring attention over a sequence that no rank holds
======================================================================

**Question.** A sequence is too long for one GPU, so n ranks hold T/n of its tokens each. All parts
of a layer but attention treat every token alone. In attention a token looks at all tokens before
it. How do the ranks compute it without any of them ever holding all keys and values?

**Predict**, and write it down before you run. There are four ranks. The keys and values of one
rank's tokens are called a *block*. Attention is causal: a token sees itself and those before it, so
of a rank's scores with its own block half are needed, if blocks are long.

1. In a forward pass, how many blocks does a rank send?
2. Meanwhile, how many blocks of other ranks must be in its memory at a time?
3. Rank 0 holds the first quarter of the tokens, rank 3 the last. How many times as many scores does
   rank 3 need as rank 0?
4. The sequence is cut into eight chunks instead, and each rank gets two, so that all have the same
   work. By what factor do the scores of the busiest rank decrease?
5. In a backward pass, how many blocks does a rank send? The gradient of a block is as large as a
   block, and counts like one.

**Run.**

    torchrun --standalone --nproc-per-node=4 10_context_parallelism.py   # NCCL on 4 GPUs, else gloo
    python 10_context_parallelism.py                                     # the same, started for you

Not run on several GPUs.

**Try.** In `RunningSoftmax.add` leave out `* rescale` behind `self.total_Hc1`: what fails, outputs,
gradients or both? In the last line of `ring_backward` write `leaving` for `arriving`, so that the
gradients of a rank's keys and values do not come home: what fails now?

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
from itertools import pairwise
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: H heads, T tokens, K features per head, c tokens of a chunk. A rank holds one chunk of
# c = T/n tokens; in zig-zag (section 3) two, of T/2n. A block is (2, H, c, K): keys, then values.
H, K = 6, 8
TOKENS = 48 * WORLD_SIZE  # 2n divides it

# %% [markdown]
# ## 1. Softmax in pieces
#
# What is kept for the backward pass grows with the sequence. Even if each layer of Llama 3 8B keeps
# its input alone and recomputes all else, one sequence of 131,072 tokens takes 1.07 GB per layer in
# bf16, and 34 GB in all 32. **Context parallelism** splits the tokens of one sequence over n ranks,
# and with them everything that is kept. Norms, projections and the MLP treat each token alone and
# never notice.
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
        weight = (s_Hcc - most_Hc1).exp()
        rescale = (self.most_Hc1 - most_Hc1).exp()
        self.total_Hc1 = self.total_Hc1 * rescale + weight.sum(dim=-1, keepdim=True)
        self.sum_HcK = self.sum_HcK * rescale + weight @ v_HcK
        self.most_Hc1 = most_Hc1

    def output(self) -> torch.Tensor:
        return self.sum_HcK / self.total_Hc1


def scores(q_HcK: torch.Tensor, k_HcK: torch.Tensor, diagonal: bool) -> torch.Tensor:
    """Scores of queries and keys, (H, c, c); within one chunk a query sees no later key."""
    s_Hcc = q_HcK @ k_HcK.mT / math.sqrt(q_HcK.shape[-1])
    if diagonal:
        later_Hcc = torch.ones_like(s_Hcc, dtype=torch.bool).triu(1)
        s_Hcc = s_Hcc.masked_fill(later_Hcc, -math.inf)
    return s_Hcc


# %% [markdown]
# ## 2. The ring: keys and values travel
#
# If pieces may come in any order, they may come from other ranks. Cut the sequence into n chunks,
# one per rank, in order. Each rank keeps its queries, and blocks of keys and values travel (**ring
# attention**, Liu et al., 2023). Here n = 4; the rank whose block is here is the *visitor*:
#
#                rank 0     rank 1     rank 2     rank 3
#     step 0     k0 v0      k1 v1      k2 v2      k3 v3      each rank's own
#     step 1     k3 v3      k0 v0      k1 v1      k2 v2      from the rank before
#     step 2     k2 v2      k3 v3      k0 v0      k1 v1
#     step 3     k1 v1      k2 v2      k3 v3      k0 v0
#
# The keys of an earlier rank are seen by all queries, and those of a later rank by none. Within a
# rank's own block, on the *diagonal*, the mask is the usual triangle: one of T x T is never built.


# %%
def ring_forward(q_HcK: torch.Tensor, block: torch.Tensor) -> RunningSoftmax:
    """Attention of my queries to the keys of all ranks; my own block is (2, H, c, K)."""
    running = RunningSoftmax(q_HcK)
    for visitor, (k_HcK, v_HcK) in visitors(block):
        if visitor <= RANK:  # a later rank's keys are not seen
            running.add(k_HcK, v_HcK, diagonal=visitor == RANK)
    return running


# %% [markdown]
# It remains to make the blocks travel. A hop starts before `ring_forward` computes, and is awaited
# afterwards, so it can hide behind the work. Two buffers take turns: while one block is worked on
# and sent on, the next arrives in the other.


# %%
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


def start_hop(leaving: torch.Tensor, arriving: torch.Tensor) -> list[dist.Work]:
    """Send a tensor to the next rank, while one like it arrives from the rank before."""
    if WORLD_SIZE == 1:
        arriving.copy_(leaving)
        return []
    send = dist.P2POp(dist.isend, leaving, (RANK + 1) % WORLD_SIZE)
    receive = dist.P2POp(dist.irecv, arriving, (RANK - 1) % WORLD_SIZE)
    return dist.batch_isend_irecv([send, receive])


def wait_for(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


# %% [markdown]
# ## 3. Causal attention makes the last rank the slowest: zig-zag
#
# With consecutive tokens the first rank has little before it, and the last rank everything. A rank
# passes a block on only when it is done with the one before, so the slowest sets the pace. The
# remedy is to cut the sequence into 2n chunks, two per rank. The scores of one chunk of queries and
# one chunk of keys are a **piece**. In the triangles below a row is a chunk of queries, a column a
# chunk of keys, and the digit is the rank that computes the piece. On the left each rank holds two
# chunks in order: as much as in section 2. In **zig-zag**, as in Megatron-LM and Llama 3, rank r
# holds chunks r and 2n-1-r, one from the front, one from the back:
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
# The last digit of a row is on the diagonal, where nearly half is masked. (This code computes that
# half too; a fused kernel skips most of it.) In zig-zag the sums are equal, and so is each step:
# all ranks need two pieces, first a whole one and two halves, then two whole ones. The ring stays
# as it is, and chunks are compared as ranks were.


# %%
def zig_zag(rank: int) -> tuple[int, int]:
    """The two of 2n chunks that a rank holds."""
    return rank, 2 * WORLD_SIZE - 1 - rank


def zig_zag_forward(q_2HcK: torch.Tensor, block: torch.Tensor) -> list[RunningSoftmax]:
    """Attention of my two chunks of queries; my own block is (2, 2, H, c, K)."""
    running = [RunningSoftmax(q_HcK) for q_HcK in q_2HcK]
    for visitor, (k_2HcK, v_2HcK) in visitors(block):
        for i, mine in enumerate(zig_zag(RANK)):
            for j, theirs in enumerate(zig_zag(visitor)):
                if theirs <= mine:  # a later chunk's keys are not seen
                    running[i].add(k_2HcK[j], v_2HcK[j], diagonal=theirs == mine)
    return running


# %% [markdown]
# ## 4. Backward: gradients of keys and values travel along, and come home
#
# The weights p of a piece were not kept. A rank computes them again, from the scores s and each
# query's final maximum and total. With grad the gradient of the output, ' for transposed, and * for
# an elementwise product:
#
#     p   =  exp(s - most) / total          dv  =  p' grad
#     ds  =  p * (grad v' - delta)          dq  =  ds k               dk  =  ds' q
#
# The weights of a query add up to 1, so what raises one lowers the others: **delta** is the mean of
# grad v' over all keys, weighted by p. As out is that mean of v, delta is grad * out, added up over
# the features, and needs no keys (FlashAttention, Dao et al., 2022).


# %%
def piece_gradients(
    running: RunningSoftmax, visiting: torch.Tensor, grad_HcK: torch.Tensor, diagonal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a piece adds to dq, (H, c, K), and to the visitor's dk and dv, (2, H, c, K)."""
    q_HcK = running.q_HcK
    k_HcK, v_HcK = visiting
    p_Hcc = (scores(q_HcK, k_HcK, diagonal) - running.most_Hc1).exp() / running.total_Hc1
    delta_Hc1 = (grad_HcK * running.output()).sum(dim=-1, keepdim=True)
    ds_Hcc = p_Hcc * (grad_HcK @ v_HcK.mT - delta_Hc1)
    ds_Hcc /= math.sqrt(q_HcK.shape[-1])  # as the scores are
    return ds_Hcc @ k_HcK, torch.stack([ds_Hcc.mT @ q_HcK, p_Hcc.mT @ grad_HcK])


# %% [markdown]
# dq is this rank's own, and is added up here. dk and dv belong to the visitor. So all blocks go
# around once more, and each takes its gradients along. They follow one step behind it, since a rank
# can send them on only when it has added its part. Here are those of the block of rank 0:
#
#                         rank 0          rank 1          rank 2          rank 3
#     step 0              its part  -->
#     step 1                              + its part -->
#     step 2                                              + its part -->
#     step 3                                                              + its part --> home
#
# The block itself stops at rank 3, after n-1 hops. Its gradients make one hop more, to rank 0.


# %%
def ring_backward(
    running: RunningSoftmax, block: torch.Tensor, grad_HcK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of my queries, (H, c, K), and of my block, (2, H, c, K)."""
    dq_HcK = torch.zeros_like(grad_HcK)
    arriving = torch.zeros_like(block)  # what the ranks before have added: nothing yet
    works = []
    for visitor, visiting in visitors(block):
        part = torch.zeros_like(block)  # what I add to the visitor's gradients
        if visitor <= RANK:
            dq_part, part = piece_gradients(running, visiting, grad_HcK, visitor == RANK)
            dq_HcK += dq_part
        wait_for(works)
        leaving = part + arriving
        works = start_hop(leaving, arriving)
    wait_for(works)
    return dq_HcK, arriving  # the last to arrive are my own block's


# %% [markdown]
# Zig-zag loops over the chunks here too, as in section 3. In a model, forward and backward become
# one `torch.autograd.Function`. It keeps queries, output and this rank's own block, and in place of
# most and total one number per query: **lse** = most + log(total), for p = exp(s - lse).

# %% [markdown]
# ## 5. How it is measured
#
# The **oracle** is `F.scaled_dot_product_attention` over all tokens in one process, in float64;
# each rank compares its share. With `scale` the scores go into the thousands, where exponentials
# overflow unless the largest score is subtracted.

# %%
TOLERANCE = 10 * TOKENS * 2**-53  # sums over all tokens in another order


def draw(device: torch.device) -> torch.Tensor:
    """Queries, keys, values and the output's gradient, (4, H, T, K); the same on every rank."""
    torch.manual_seed(0)
    return torch.randn(4, H, TOKENS, K, device=device, dtype=torch.float64)


def share(x_HTK: torch.Tensor) -> torch.Tensor:
    """Return this rank's one chunk, (H, c, K)."""
    return x_HTK.chunk(WORLD_SIZE, dim=-2)[RANK].clone()


def zig_zag_share(x_HTK: torch.Tensor) -> torch.Tensor:
    """Return this rank's two chunks, (2, H, c, K)."""
    chunks = x_HTK.chunk(2 * WORLD_SIZE, dim=-2)
    return torch.stack([chunks[number] for number in zig_zag(RANK)])


def largest_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference between two tensors; inf if one is no number."""
    return (ours - expected).abs().max().nan_to_num(nan=torch.inf).item()


def zig_zag_error(device: torch.device, scale: int = 1) -> float:
    """How far the outputs in zig-zag are from one process's."""
    q_HTK, k_HTK, v_HTK, _ = draw(device)
    due_HTK = F.scaled_dot_product_attention(scale * q_HTK, k_HTK, v_HTK, is_causal=True)
    block = torch.stack([zig_zag_share(k_HTK), zig_zag_share(v_HTK)])
    running = zig_zag_forward(zig_zag_share(scale * q_HTK), block)
    out_2HcK = torch.stack([one.output() for one in running])
    return largest_error(out_2HcK, zig_zag_share(due_HTK))


def check_values(device: torch.device) -> None:
    *whole_HTK, grad_HTK = draw(device)
    whole_HTK = [x_HTK.clone().requires_grad_() for x_HTK in whole_HTK]
    due_HTK = F.scaled_dot_product_attention(*whole_HTK, is_causal=True)
    due_HTK.backward(grad_HTK)
    q_HcK, k_HcK, v_HcK = [share(x_HTK.detach()) for x_HTK in whole_HTK]
    block = torch.stack([k_HcK, v_HcK])
    running = ring_forward(q_HcK, block)
    output = largest_error(running.output(), share(due_HTK.detach()))
    claim("consecutive: error of the output", 0, output, atol=TOLERANCE)
    dq_HcK, (dk_HcK, dv_HcK) = ring_backward(running, block, share(grad_HTK))
    expected = torch.stack([share(x_HTK.grad) for x_HTK in whole_HTK])
    gradients = largest_error(torch.stack([dq_HcK, dk_HcK, dv_HcK]), expected)
    claim("consecutive: error of the gradients", 0, gradients, atol=TOLERANCE)
    claim("zig-zag: error of the output", 0, zig_zag_error(device), atol=TOLERANCE)
    output = zig_zag_error(device, scale=1000)
    claim("scores of thousands: error of the output", 0, output, atol=1e-10)  # they are rounded


# %% [markdown]
# Costs are noted where messages are handed over and where pieces are added: the bytes of each hop,
# the address at which a block arrives, and the scores that are not masked. A hop that is followed
# by scores, and not by its own wait, is under way while they are computed. That shows the order,
# not that the link is as fast as the work.


# %%
class NotedWork:
    """The works of one hop; notes when they are awaited."""

    def __init__(self, works: list[dist.Work], events: list) -> None:
        self.works = works
        self.events = events

    def wait(self) -> None:
        self.events.append(("wait", len(self.works)))
        for work in self.works:
            work.wait()


@contextlib.contextmanager
def noted_events() -> Iterator[list[tuple[str, int]]]:
    """What this rank does in the block, in order: (what, how much)."""
    real_hop = dist.batch_isend_irecv
    real_add = RunningSoftmax.add
    events = []

    def hop(operations: list[dist.P2POp]) -> list[NotedWork]:
        send, receive = operations
        events.append(("into", receive.tensor.data_ptr()))
        events.append(("hop", send.tensor.nbytes))
        return [NotedWork(real_hop(operations), events)]

    def add(self: RunningSoftmax, k_HcK: torch.Tensor, v_HcK: torch.Tensor, diagonal: bool) -> None:
        seen_Hcc = scores(self.q_HcK, k_HcK, diagonal).isfinite()
        events.append(("scores", seen_Hcc.sum().item()))
        real_add(self, k_HcK, v_HcK, diagonal)

    with patch.object(dist, "batch_isend_irecv", hop), patch.object(RunningSoftmax, "add", add):
        yield events


def total(events: list[tuple[str, int]], what: str) -> int:
    """How much of it was noted."""
    return sum(amount for name, amount in events if name == what)


# %% [markdown]
# Of c x c scores on a diagonal c(c+1)/2 are not masked, slightly more than half. The predictions
# count them so.


# %%
def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


def check_costs(device: torch.device) -> None:
    n = WORLD_SIZE
    q_2HcK, k_2HcK, v_2HcK, _ = [zig_zag_share(x_HTK) for x_HTK in draw(device)]
    block = torch.stack([k_2HcK, v_2HcK])
    with noted_events() as events:
        zig_zag_forward(q_2HcK, block)
    sent = total(events, "hop") / block.nbytes
    under_way = list(pairwise(name for name, _ in events)).count(("hop", "scores"))
    places = {place for name, place in events if name == "into"}
    equal = gather_objects(total(events, "scores"))
    claim("bytes sent forward / my keys and values", n - 1, sent, question=1)
    claim("hops under way while scores are computed", n - 1, under_way)
    claim("other ranks' blocks in memory at a time", min(2, n - 1), len(places), question=2)

    q_HcK, k_HcK, v_HcK, grad_HcK = [share(x_HTK) for x_HTK in draw(device)]
    block = torch.stack([k_HcK, v_HcK])
    with noted_events() as events:
        running = ring_forward(q_HcK, block)
    unequal = gather_objects(total(events, "scores"))
    c = TOKENS // n
    first = c * (c + 1) / 2
    last = first + (n - 1) * c**2
    ratio = unequal[-1] / unequal[0]
    claim("consecutive: scores needed, last rank / first", last / first, ratio, question=3)
    half = c // 2  # of its 2n+1 pieces in zig-zag, two are on the diagonal
    each = half * (half + 1) + (2 * n - 1) * half**2
    ratio = max(unequal) / max(equal)
    claim("busiest rank's scores: consecutive / zig-zag", last / each, ratio, question=4)
    with noted_events() as events:
        ring_backward(running, block, grad_HcK)
    sent = total(events, "hop") / block.nbytes
    claim("bytes sent backward / my keys and values", 2 * n - 1, sent, question=5)


# %% [markdown]
# On GPUs the output is compared with that of PyTorch's `context_parallel`, which is experimental;
# its pieces are fused kernels. Then blocks of 34 MB go around alone, for the peak of memory. Last,
# hops alone, a forward pass, and one without hops are timed. If hops hide, the pass takes as long
# as the longer of work and hops. Not all can hide, for NCCL copies with some of the GPU's cores.


# %%
def measure_on_gpus(device: torch.device) -> None:
    same = "context_parallel: difference of the output"
    peak = "other ranks' blocks in memory, at the peak"
    hides = "of work and hops, part of the shorter that hides"
    if device.type == "cpu" or WORLD_SIZE == 1:
        blocked(same, needs="2 GPUs")
        blocked(peak, needs="2 GPUs")
        blocked(hides, needs="2 GPUs")
        return
    claim(same, 0, largest_error(*with_torch(device)), atol=1e-5)
    block = torch.randn(2, 2, 64, 512, 128, device=device, dtype=torch.bfloat16)
    q_2HcK = torch.randn_like(block[0])
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    list(visitors(block))
    held = torch.cuda.max_memory_allocated() - before
    claim(peak, 2, held / block.nbytes, atol=0.1)  # the allocator rounds
    hops = median_ms(lambda: list(visitors(block)))
    both = median_ms(lambda: zig_zag_forward(q_2HcK, block))
    with patch.object(dist, "batch_isend_irecv", lambda operations: []):  # nothing is sent
        work = median_ms(lambda: zig_zag_forward(q_2HcK, block))
    print0(f"{'':13}work {work:.2f} ms, hops {hops:.2f} ms, both {both:.2f} ms")
    claim(hides, 0.7, hidden(work, hops, both), ">=", timed=True)


def hidden(work: float, hops: float, both: float) -> float:
    """The part of the shorter of two times that the longer hides, if both take this long."""
    return (work + hops - both) / min(work, hops)


def with_torch(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return PyTorch's outputs of my two chunks and ours, (2, H, c, K), in float32."""
    from torch.distributed.tensor.experimental import context_parallel

    torch.manual_seed(0)
    qkv_HTK = torch.randn(3, H, 128 * WORLD_SIZE, 64, device=device)
    mesh = dist.init_device_mesh(device.type, (WORLD_SIZE,))
    buffers = [x_HTK[None].clone() for x_HTK in qkv_HTK]  # they are cut in place
    split = context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2])
    with split, sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        theirs_1HtK = F.scaled_dot_product_attention(*buffers, is_causal=True)
    q_2HcK, k_2HcK, v_2HcK = [zig_zag_share(x_HTK) for x_HTK in qkv_HTK]
    running = zig_zag_forward(q_2HcK, torch.stack([k_2HcK, v_2HcK]))
    theirs_2HcK = torch.stack(theirs_1HtK[0].chunk(2, dim=-2))
    return theirs_2HcK, torch.stack([one.output() for one in running])


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
# 2. Two, from three ranks on: the one at work, and the one that arrives. None is kept for the
#    backward pass, since all come once more.
# 3. Seven, 2n-1: rank 0 needs the scores of half a block, rank 3 of three and a half. (6.88 in the
#    row: with 48 tokens, slightly more than half.) After one step rank 0 has no more to compute.
# 4. 1.75: three and a half blocks are 14 pieces, and in zig-zag each rank needs 8. (1.746 in the
#    row.) With many ranks it is nearly 2: (2n-1) / n.
# 5. Seven: the blocks make three hops again, their gradients four: (n-1) + n.
#
# **Try.** A total that is not rescaled gives wrong outputs, and wrong weights backward: every error
# fails. (With consecutive tokens the first rank's outputs are right even so, since it sees one
# piece only.) Gradients that do not come home are those of the next rank's keys. The outputs are
# right, and as much is sent; what fails is the error of the gradients.
#
# **On GPUs**, by arithmetic, for pieces in fused kernels. A hop hides if it takes less time than
# its step of zig-zag: two pieces of t/2 x t/2 scores, for t tokens per rank. Let H be the heads of
# queries and G those of keys (here G = H), F the FLOP/s, and W a link's bytes/s one way:
#
#     work    2 pieces, 2 products each of 2 (t/2)^2 K H FLOP      2 t^2 K H / F   seconds
#     hop     keys and values, t G K numbers each, in bf16         4 t G K / W     seconds
#
# So hops hide from t = 2 (G/H) F/W on. At 400 TFLOP/s, with Llama 3 8B's H = 32 and G = 8, that is
# 444 tokens over NVLink (450 GB/s), and 4,000 over a network card (50 GB/s). A sequence of 131,072
# tokens can be split over 32 ranks before hops over such cards show. Backward a step sends twice as
# much, if gradients are bf16 too, and has 2.5 times the work: five products per piece in place of
# two. So what hides forward hides backward, all but the last hop: the one that brings gradients
# home has no work to hide behind. (Real rings keep the running numbers in float32.)
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
# If 2n does not divide the number of tokens, the sequence is padded at its end. Causal attention
# needs no mask for that, since the padding comes later than all tokens; the loss leaves it out.
# Ranks see different tokens, so weights' gradients are combined over the ring too, as in data
# parallelism: averaged, if each rank's loss is the mean over its tokens and all have equally many.
#
# **In other systems.** Megatron-LM: `--context-parallel-size` with `--cp-comm-type p2p`. picotron
# has a ring over consecutive tokens. PyTorch's `context_parallel`, which is experimental, deals out
# chunks in zig-zag and gathers all keys and values, if it is not told to rotate them.


# %%
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
