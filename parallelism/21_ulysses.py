"""Ulysses: context parallelism that exchanges tokens for heads
============================================================

**Question.** n ranks hold T/n tokens of one sequence each. In a ring, keys and values visit rank
after rank, and attention is computed in pieces by code of one's own. What must the ranks exchange,
so that each can call ordinary attention instead, and what does that cost?

**Predict**, and write it down before you run. There are four ranks, and 48 heads of queries share
24 heads of keys and values. What is sent is counted in units of a rank's own keys and values: all
keys and all values of its tokens together are one unit.

1. **Ulysses**: the ranks exchange tokens for heads, so that each has all tokens of 12 heads of
   queries. After attention they exchange the outputs back. How many units does a rank send in a
   forward pass, queries and outputs included?
2. Instead, each rank keeps its queries and gathers the keys and values of all ranks. How many units
   does it send in a forward pass?
3. Attention is causal. In Ulysses, how many times as many FLOPs does the last rank do in attention
   as the first?
4. Llama 3 8B has 32 heads of queries and 8 of keys, which may be copied. How many ranks can Ulysses
   use at the most?

**Run.**

    torchrun --standalone --nproc-per-node=4 21_ulysses.py   # NCCL on 4 GPUs, else gloo
    python 21_ulysses.py                                     # the same, started for you

Not run on several GPUs.

**Try.** In `heads_by_rank` write `x.repeat(1, copies, 1, 1)` for the call of `repeat_interleave`:
which single row fails, and why no other? In `ulysses_attention` write
`torch.cat([x.flatten(1, 2) for x in by_rank], dim=1)` for
`torch.cat(by_rank, dim=2).flatten(1, 2)`, which leaves the heads in the model's order: what fails
now, and what does not?

**Before.** parallelism/10_context_parallelism.py: the ring, and zig-zag.

**Next.** parallelism/11_expert_parallelism.py: experts on different ranks, by all-to-alls again.
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
from fractions import Fraction
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: B sequences, H heads of queries, G heads of keys and values, T tokens, K features per
# head. A small letter is one rank's share: t = T / n, h = H / n, and g heads of keys.
B, H, G, K = 2, 48, 24, 8
TOKENS = 37  # a prime number: no number of ranks divides it but 1 and 37

# %% [markdown]
# ## 1. Exchange tokens for heads
#
# The ring of the lesson before never holds all keys, and pays for it: attention has to be computed
# in pieces, and each piece needs its own mask. But attention treats each head alone. So before
# attention the ranks can change what is split: not the tokens of all heads, but the heads of all
# tokens (DeepSpeed Ulysses, Jacobs et al., 2023). With two ranks:
#
#                   heads a    heads b                      heads a    heads b
#     tokens 0      rank 0     rank 0       all-to-all      rank 0     rank 1
#     tokens 1      rank 1     rank 1       --------->      rank 0     rank 1
#
# The table of who has what is transposed, and that is an **all-to-all**: each rank sends each other
# rank a different part. Then each calls ordinary attention, one fused kernel with the usual causal
# mask, for its heads, and a second all-to-all takes the outputs back. A table that is transposed
# twice is as before, so the gradient of an exchange is another exchange.


# %%
class Exchange(torch.autograd.Function):
    """All-to-all: part i goes to rank i, and part i of the result comes from rank i."""

    @staticmethod
    def forward(ctx: object, parts_nBhtK: torch.Tensor) -> torch.Tensor:
        parts_nBhtK = parts_nBhtK.contiguous()  # what is sent lies in one piece
        arrived_nBhtK = torch.empty_like(parts_nBhtK)
        dist.all_to_all_single(arrived_nBhtK, parts_nBhtK)
        return arrived_nBhtK

    @staticmethod
    def backward(ctx: object, grad_nBhtK: torch.Tensor) -> torch.Tensor:
        return Exchange.apply(grad_nBhtK)


def tokens_to_heads(x_BHtK: torch.Tensor) -> torch.Tensor:
    """All heads given, of my tokens (B, H, t, K) -> all tokens of my heads (B, h, T, K)."""
    parts_nBhtK = torch.stack(x_BHtK.chunk(WORLD_SIZE, dim=1))
    return torch.cat(Exchange.apply(parts_nBhtK).unbind(), dim=2)


def heads_to_tokens(x_BhTK: torch.Tensor) -> torch.Tensor:
    """All tokens of my heads (B, h, T, K) -> all heads of my tokens (B, H, t, K)."""
    parts_nBhtK = torch.stack(x_BhTK.chunk(WORLD_SIZE, dim=2))
    return torch.cat(Exchange.apply(parts_nBhtK).unbind(), dim=1)


# %% [markdown]
# ## 2. Grouped heads, and attention
#
# Queries, keys and values go in one message. Rank 0 gets the first heads of each, rank 1 the next,
# and so on, so that the queries of a rank find their keys there. This needs n to divide the H heads
# of queries. It need not divide the G heads of keys, but if not, several ranks need the same head.
# So each is copied as often as makes their number a multiple of n, and no more: lcm(n, G) heads in
# all. The copies are sent as well. The gradient of a head is the sum over its copies, which
# autograd does by itself.


# %%
def heads_by_rank(
    q_BHtK: torch.Tensor, k_BGtK: torch.Tensor, v_BGtK: torch.Tensor, n: int
) -> list[torch.Tensor]:
    """Queries, keys and values, each as (B, n, heads of a rank, t, K)."""
    key_heads = k_BGtK.shape[1]
    copies = math.lcm(n, key_heads) // key_heads
    kv = [x.repeat_interleave(copies, dim=1) for x in (k_BGtK, v_BGtK)]
    return [x.unflatten(1, (n, -1)) for x in (q_BHtK, *kv)]


def ulysses_attention(
    q_BHtK: torch.Tensor, k_BGtK: torch.Tensor, v_BGtK: torch.Tensor
) -> torch.Tensor:
    """Causal attention of this rank's tokens to those of all ranks: (B, H, t, K)."""
    by_rank = heads_by_rank(q_BHtK, k_BGtK, v_BGtK, WORLD_SIZE)
    sizes = [x.shape[2] for x in by_rank]  # h, g, g
    mine = tokens_to_heads(torch.cat(by_rank, dim=2).flatten(1, 2))
    q_BhTK, k_BgTK, v_BgTK = mine.split(sizes, dim=1)
    out_BhTK = F.scaled_dot_product_attention(
        q_BhTK, k_BgTK, v_BgTK, is_causal=True, enable_gqa=True
    )
    return heads_to_tokens(out_BhTK)


# %% [markdown]
# ## 3. What it is compared with: gathered keys
#
# The other way to ordinary attention is that of Llama 3 (2024, section 3.3.2). Each rank keeps its
# queries and gathers the keys and values of all tokens. Backward it has gradients of *all* keys,
# from its own queries: a reduce-scatter adds them up, and gives each rank those of its own tokens.
# Here a rank has consecutive tokens, so the keys after its last token are cut off, and its queries
# are the last t of those that remain. (The mask lies in memory here. With `causal_lower_right` from
# torch.nn.attention.bias instead, a fused kernel needs none.) What is gathered stays for the
# backward pass. TransformerEngine gathers it once more then, and sends 2 (n-1) G more for it.


# %%
class GatherTokens(torch.autograd.Function):
    """Keys and values of my tokens (2, B, G, t, K) -> those of all tokens (2, B, G, T, K)."""

    @staticmethod
    def forward(ctx: object, kv_2BGtK: torch.Tensor) -> torch.Tensor:
        parts = kv_2BGtK.new_empty(WORLD_SIZE * 2, *kv_2BGtK.shape[1:])
        dist.all_gather_into_tensor(parts, kv_2BGtK.contiguous())
        return torch.cat(parts.chunk(WORLD_SIZE), dim=-2)

    @staticmethod
    def backward(ctx: object, grad_2BGTK: torch.Tensor) -> torch.Tensor:
        parts = [part.contiguous() for part in grad_2BGTK.chunk(WORLD_SIZE, dim=-2)]
        grad_2BGtK = torch.empty_like(parts[RANK])
        dist.reduce_scatter_tensor(grad_2BGtK, torch.cat(parts).contiguous())
        return grad_2BGtK


def gathered_attention(
    q_BHtK: torch.Tensor, k_BGtK: torch.Tensor, v_BGtK: torch.Tensor
) -> torch.Tensor:
    """Causal attention of this rank's tokens to those of all ranks: (B, H, t, K)."""
    k_BGTK, v_BGTK = GatherTokens.apply(torch.stack([k_BGtK, v_BGtK]))
    t = q_BHtK.shape[2]
    seen = (RANK + 1) * t  # my tokens, and those of the ranks before
    k_BGsK = k_BGTK[:, :, :seen]
    v_BGsK = v_BGTK[:, :, :seen]
    mask_ts = torch.ones(t, seen, dtype=torch.bool, device=q_BHtK.device).tril(seen - t)
    return F.scaled_dot_product_attention(q_BHtK, k_BGsK, v_BGsK, mask_ts, enable_gqa=True)


# %% [markdown]
# A rank sends so many numbers per token and feature of a head, in a forward pass and once more in a
# backward pass. (A ring sends what a gather sends forward, and 2 n G more backward.)
#
#     gather      2 (n-1) G
#     Ulysses     2 (n-1)/n (H + G)       if n divides G; else lcm(n, G) for G
#
# What Ulysses sends stays below 4 H, while what a gather sends grows with n. If n divides G,
# Ulysses sends (1 + H/G) / n times what a gather does: for Llama 3 8B, with H = 32 and G = 8, 1.25
# times on four ranks, and 0.625 times on eight.

# %% [markdown]
# ## 4. How it is measured
#
# The **oracle** is attention over all tokens in one process, in float64. Tokens are padded at the
# end to a multiple of n. That needs no mask, since no token of a causal sequence sees what follows.

# %%
TOLERANCE = 10 * (TOKENS + WORLD_SIZE) * 2**-53  # sums over all tokens in another order
WAYS = {"Ulysses": ulysses_attention, "gathered": gathered_attention}


def share(x_BHTK: torch.Tensor) -> torch.Tensor:
    """Pad the tokens to a multiple of n; return a copy of this rank's."""
    missing = -x_BHTK.shape[2] % WORLD_SIZE
    return F.pad(x_BHTK, (0, 0, 0, missing)).chunk(WORLD_SIZE, dim=2)[RANK].clone()


def draw(device: torch.device, tokens: int, key_heads: int) -> list[torch.Tensor]:
    """Queries, keys, values of all tokens, and the gradient of the output; alike on all ranks."""
    torch.manual_seed(0)
    factory = {"device": device, "dtype": torch.float64}
    return [torch.randn(B, heads, tokens, K, **factory) for heads in (H, key_heads, key_heads, H)]


def largest_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference between two tensors; inf if one is no number."""
    return (ours - expected).abs().max().nan_to_num(nan=torch.inf).item()


def errors(
    device: torch.device, way: Callable, tokens: int = TOKENS, key_heads: int = G
) -> tuple[float, float]:
    """How far this rank's outputs are from one process's, and its gradients of q, k and v."""
    *whole, grad_BHTK = draw(device, tokens, key_heads)
    for x in whole:
        x.requires_grad_()
    due_BHTK = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    due_BHTK.backward(grad_BHTK)
    mine = [share(x.detach()).requires_grad_() for x in whole]
    out_BHtK = way(*mine)
    out_BHtK.backward(share(grad_BHTK))
    real = share(torch.ones_like(grad_BHTK))  # 0 where padding is
    output = largest_error(out_BHtK.detach() * real, share(due_BHTK.detach()))
    pairs = zip(mine, whole, strict=True)
    return output, max(largest_error(ours.grad, share(one.grad)) for ours, one in pairs)


def check_values(device: torch.device) -> None:
    for name, way in WAYS.items():
        output, gradients = errors(device, way)
        claim(f"{name}: error of the output", 0, output, atol=TOLERANCE)
        claim(f"{name}: error of the gradients", 0, gradients, atol=TOLERANCE)
        short = max(max(errors(device, way, tokens)) for tokens in range(1, 11))
        claim(f"{name}, 1 to 10 tokens: largest error", 0, short, atol=TOLERANCE)
    few = max(errors(device, ulysses_attention, key_heads=2))
    claim("Ulysses, 2 heads of keys: largest error", 0, few, atol=TOLERANCE)


# %% [markdown]
# Of the larger tensor that a rank hands to a collective, input or output, all but the rank's own
# n-th leaves the rank. What attention is given stays for the backward pass: it is counted as the
# memory in which queries, keys and values lie. FLOPs are counted by PyTorch's `FlopCounterMode`,
# which counts masked pairs of queries and keys too.

# %%
COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")


@contextlib.contextmanager
def noted_elements() -> Iterator[list[float]]:
    """The elements that each collective of the block makes this rank send."""
    elements = []

    def noting(real: Callable) -> Callable:
        def collective(out: torch.Tensor, x: torch.Tensor) -> None:
            elements.append(max(out.numel(), x.numel()) * (WORLD_SIZE - 1) / WORLD_SIZE)
            real(out, x)

        return collective

    with patch.multiple(dist, **{name: noting(getattr(dist, name)) for name in COLLECTIVES}):
        yield elements


@contextlib.contextmanager
def noted_blocks() -> Iterator[dict[int, int]]:
    """The bytes of each block of memory that attention gets in the block, by its address."""
    real = F.scaled_dot_product_attention
    sizes = {}

    def attention(*given: torch.Tensor, **options: object) -> torch.Tensor:
        for x in given[:3]:  # queries, keys and values
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return real(*given, **options)

    with patch.object(F, "scaled_dot_product_attention", attention):
        yield sizes


def costs(device: torch.device, way: Callable) -> dict[str, float]:
    """What is sent and kept in units of my keys and values, collectives and FLOPs forward."""
    q_BHtK, k_BGtK, v_BGtK, grad_BHtK = [share(x).bfloat16() for x in draw(device, TOKENS, G)]
    unit = 2 * k_BGtK.numel()
    for x in (q_BHtK, k_BGtK, v_BGtK):
        x.requires_grad_()
    flop_counter = FlopCounterMode(display=False)
    with noted_elements() as forward, noted_blocks() as kept, flop_counter as flops:
        out_BHtK = way(q_BHtK, k_BGtK, v_BGtK)
    with noted_elements() as backward:
        out_BHtK.backward(grad_BHtK)
    found = {"forward": sum(forward) / unit, "backward": sum(backward) / unit}
    found["kept"] = sum(kept.values()) / (unit * q_BHtK.itemsize)
    return found | {"calls": len(forward), "flops": flops.get_total_flops()}


def last_by_first(value: float) -> float:
    """The last rank's `value`, divided by the first rank's."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values[-1] / values[0]


def check_costs(device: torch.device) -> None:
    n = WORLD_SIZE
    ulysses = costs(device, ulysses_attention)
    sent = Fraction(n - 1, n) * (H + math.lcm(n, G)) / G
    claim("Ulysses: sent forward / my keys and values", sent, ulysses["forward"], question=1)
    claim("Ulysses: sent backward / my keys and values", sent, ulysses["backward"])
    claim("Ulysses: all-to-alls forward", 2, ulysses["calls"])
    due = Fraction(H + 2 * math.lcm(n, G), 2 * G)
    claim("Ulysses: q, k and v kept / my keys and values", due, ulysses["kept"])
    flops = last_by_first(ulysses["flops"])
    claim("Ulysses: FLOPs, last rank / first", 1, flops, question=3)
    gathered = costs(device, gathered_attention)
    claim("gathered: sent forward / my keys and values", n - 1, gathered["forward"], question=2)
    claim("gathered: sent backward / my keys and values", n - 1, gathered["backward"])
    due = n + Fraction(H, 2 * G)
    claim("gathered: q, k and v kept / my keys and values", due, gathered["kept"])
    claim("gathered: FLOPs, last rank / first", n, last_by_first(gathered["flops"]))


# %% [markdown]
# How many ranks the heads of Llama 3 8B allow is tried: PyTorch refuses to cut a dimension into n
# equal parts if n does not divide it.


# %%
def check_llama() -> None:
    q_BHtK = torch.empty(1, 32, 1, 1)
    k_BGtK = torch.empty(1, 8, 1, 1)
    taken = []
    for n in range(1, 65):
        with contextlib.suppress(RuntimeError):
            heads_by_rank(q_BHtK, k_BGtK, k_BGtK, n)
            taken.append(n)
    claim("32 heads: most ranks that Ulysses takes", 32, max(taken), question=4)


# %% [markdown]
# ## 5. On GPUs: 131,072 tokens
#
# On 8 ranks these are the heads of Llama 3 8B: there go 4 heads of queries, one of keys and one of
# values to each rank, and 4 heads of outputs go back. So long a message is a matter of bytes, not
# of its start, so the first exchange should take 6/4 of the time of the second, each with its
# copies. Attention is left out: it takes so much longer that a wrong exchange would not be seen.


# %%
def measure_on_gpus(device: torch.device) -> None:
    text = "ms: exchange of q, k, v / exchange of outputs"
    if device.type == "cpu" or WORLD_SIZE == 1:
        blocked(text, needs="2 GPUs")
        return
    n = WORLD_SIZE
    t = 131_072 // n
    factory = {"device": device, "dtype": torch.bfloat16}
    qkv_BHtK = torch.zeros(1, (4 + 1 + 1) * n, t, 128, **factory)
    out_BhTK = torch.zeros(1, 4, n * t, 128, **factory)
    there = median_ms(lambda: tokens_to_heads(qkv_BHtK))
    back = median_ms(lambda: heads_to_tokens(out_BhTK))
    rate = qkv_BHtK.nbytes * (n - 1) / n / there / 1e6
    print0(f"{'':13}there {there:.2f} ms, {rate:.0f} GB/s per rank; back {back:.2f} ms")
    claim(text, 6 / 4, there / back, atol=0.25, timed=True)


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
# 1. 2.25. Queries, outputs, and keys with values are one unit each, and three quarters of all three
#    leave the rank. On any number of ranks it is less than 2H/G = 4 units. Backward it is the same.
# 2. Three: each rank's unit goes to the three others. With n ranks it is n-1, without a limit.
# 3. One: each has as many heads, and all tokens. After a gather of consecutive tokens the last
#    rank does n times as much as the first, masked pairs included, or 2n-1 times if a kernel skips
#    them; the cure is zig-zag.
# 4. 32: there is no half head. Heads of keys are fewer, so on 16 ranks each of them is sent in
#    two copies, and on 32 in four: as much as if there were 32 of them. Megatron-LM and
#    TransformerEngine make no copies, so that n must divide the heads of keys too: there it is 8.
#
# **Try.** With `repeat`, copies come in the order 0 1 0 1 instead of 0 0 1 1, so queries meet keys
# of another group. On four ranks only the row with 2 heads of keys copies any, so it alone fails.
# In the order of the model, ranks 0 and 1 get queries alone, and take some of them for keys. All
# four rows of Ulysses' errors fail. What is sent, and the FLOPs, do not change, and no shape is
# wrong: nothing but a comparison with attention in one process notices.
#
# **When.** Ulysses: inside an NVLink domain, with many heads; it takes any attention that treats
# heads alone, sparse ones too. It competes with tensor parallelism for the heads, for both split
# them: with 32 heads and eight ranks of one, four ranks are left for the other. The ring: over slow
# links, for its hops hide behind attention if sequences are long, and with more ranks than heads.
# The gather: on few ranks with few heads of keys, and with odd masks, for one call sees all keys;
# so did Llama 3, for packed documents. Each rank then keeps the keys and values of all tokens: with
# its queries five units here, where Ulysses keeps two. For 131,072 tokens of Llama 3 8B these keys
# and values are 0.54 GB per layer, whatever n is.
# By length, forward: hops hide from 2 (G/H) F/W tokens per rank on (lesson 10), and from
# 1 - (1+H/G)/n of that on a ring costs less than Ulysses, if its pieces run as fast as one kernel.
# For Llama 3 8B on 8 H100s (below) that is 167 tokens over NVLink, and 1,500 over 50 GB/s. A gather
# hides nothing: it never costs less than this ring, nor than Ulysses on more than 1 + H/G ranks.
#
# **Where it bites.** Rotary embeddings are applied before the exchange, with positions counted in
# the whole sequence. Weights' gradients are combined over the ranks as in data parallelism, for
# each has seen other tokens.
#
# **On GPUs.** Nothing hides the two exchanges. With 131,072 tokens of Llama 3 8B on 8 H100s of 400
# TFLOP/s they add 1.5% to the time of attention over NVLink (450 GB/s), and 13% over 50 GB/s. Twice
# the tokens halve this, for attention grows with their square. Between machines a ring can join
# Ulysses groups, one per machine (unified sequence parallelism, Fang and Zhao, 2024).
#
# **In other systems.** DeepSpeed's `DistributedAttention` is Ulysses, with uneven heads too.
# Megatron-LM has all of them: `--cp-comm-type` is `p2p`, `all_gather`, `a2a`, or `a2a+p2p`. If a
# model repeats its heads of keys before attention, as many do, every way sends H heads, not G.


# %%
def main() -> None:
    command_line()
    launch([n for n in range(1, H + 1) if H % n == 0])
    if H % WORLD_SIZE != 0:
        refuse(f"ranks must divide {H} heads, got {WORLD_SIZE}; use --nproc-per-node=4")
    device = setup()
    check_values(device)
    if WORLD_SIZE == 1:
        blocked("what each way sends and computes", needs="2 ranks")
    else:
        check_costs(device)
    check_llama()
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
