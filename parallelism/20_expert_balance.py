"""Expert balance: the fullest rank sets the pace
==============================================

**Question.** A router learns which experts a token visits, and nothing makes it spread the tokens
evenly. What does uneven routing cost, and what keeps it even?

**Predict**, and write it down before you run. Four ranks hold one expert each.

1. Half of all copies of tokens go to rank 0, a quarter to rank 1, a quarter to rank 2, and none to
   rank 3. How many times as long as with even routing do the experts take?
2. The same, but an expert takes no more than its even share of the copies (capacity factor 1), and
   the rest is dropped. What share of all copies is dropped?
3. The balancing loss is E x the sum, over all E experts, of an expert's share of the copies x the
   mean probability that the router gives it: 1 if routing is even. All tokens of rank r go to
   expert r, with probability 1, which is even over all ranks. What is the loss on a rank that
   counts its own tokens only?
4. In Qwen3-30B 95% of the parameters are in experts, of which a token visits 8 of 128. What share
   of a token's FLOPs is spent there, with sequences of 4,096 tokens?

**Run.**

    torchrun --standalone --nproc-per-node=4 20_expert_balance.py   # NCCL on 4 GPUs, else gloo
    python 20_expert_balance.py                                     # the same, started for you
    python 20_expert_balance.py --data FILE                         # train on a text of your own

Not run on several GPUs. Rows marked t hold formulas against what others have published.

**Try.** In `within_capacity` let `before_E` be 0: which claims fail? In `choose` take the scores
with the bias, `(score_NE + bias_E).gather(1, expert_NK)`: which ones now?

**Before.** parallelism/11_expert_parallelism.py: how tokens reach their experts.

**Next.** parallelism/12_3d_parallelism.py
"""

import argparse
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
from pathlib import Path
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
Group = dist.ProcessGroup | None  # ranks whose tokens share a capacity; None: all ranks

# Shapes: N tokens of a rank, D model width, E experts, each H wide, K experts per token, C = N K
# copies of tokens; M tokens of all ranks.

# %% [markdown]
# ## 1. The fullest rank sets the pace
#
# Under expert parallelism each copy of a token goes to the rank that has its expert, and comes
# back. The all-to-all that brings it back ends when the last rank has sent. So a layer takes as
# long as its fullest rank computes, and the others wait. Here are 24 copies on four ranks:
#
#                even          half of all to rank 0
#     rank 0     ######        ############
#     rank 1     ######        ######......        # computes
#     rank 2     ######        ######......        . waits
#     rank 3     ######        ............
#     it takes   6             12
#
# **Imbalance** is the copies on the fullest rank over the mean of all ranks, here 12 / 6 = 2. If a
# share s of the step is spent in experts and their all-to-alls with even routing, the step takes
# 1 + s (imbalance - 1) times as long. Memory follows the fullest rank as well: it must hold all
# rows that arrive, so a router that goes astray ends a run with "out of memory".
#
# Nothing keeps a router even by itself. An expert that gets more tokens learns more, becomes the
# better choice, and gets more tokens still.


# %%
def loads(expert_C: torch.Tensor, experts: int) -> torch.Tensor:
    """How many copies each expert gets, from the tokens of all ranks: (E,)."""
    count_E = torch.bincount(expert_C, minlength=experts)
    dist.all_reduce(count_E)
    return count_E


def imbalance(count_n: torch.Tensor) -> float:
    """Copies on the fullest rank over the mean."""
    return (count_n.max() / count_n.double().mean()).item()


# %% [markdown]
# There are three answers: drop what is too much, make the router pay for it, or correct its choice.

# %% [markdown]
# ## 2. Capacity: drop what is too much
#
# An expert takes at most its **capacity**: the *capacity factor* times the even share of a group's
# copies. Copies are served in order. One that comes too late is dropped: it adds nothing to its
# token, which goes on by the residual connection. Then no rank is fuller than the factor says, and
# all sizes are known beforehand.
#
# Whose copies share a capacity, the **group**, is part of what the model computes. If it is all
# ranks' tokens, a copy's place in the queue depends on how many the ranks before have for the same
# expert. If each rank is a group of its own (as in Megatron-LM), nothing is asked of others, but a
# rank whose text is all of one kind drops most of it while experts have room. One process drops the
# same copies only if it serves the same groups. **Dropless** layers, as lesson 11's, drop nothing.


# %%
def within_capacity(
    expert_C: torch.Tensor, experts: int, capacity: int, group: Group
) -> torch.Tensor:
    """Which copies their experts take, (C,): the first ones, in order of ranks and of tokens."""
    chosen_CE = F.one_hot(expert_C, experts)
    count_E = chosen_CE.sum(dim=0)
    counts_nE = [torch.empty_like(count_E) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts_nE, count_E, group=group)
    before_E = sum(counts_nE[: dist.get_rank(group)])  # copies of the ranks before this one
    place_CE = before_E + chosen_CE.cumsum(dim=0)  # of each copy in each expert's queue
    return place_CE.gather(1, expert_C[:, None])[:, 0] <= capacity


# %% [markdown]
# ## 3. Balance by loss: make the router pay
#
# The **balancing loss** (GShard, 2020; Switch, 2021) is added to the model's own, times a small
# coefficient such as 0.01. f_e is expert e's share of all copies, and P_e the mean over all tokens
# of its probability:
#
#     L  =  E x sum over all experts e of  f_e P_e            1 if all are equal, at most E / K
#
# f_e is a count and has no gradient. P_e has one: it pushes down the probability of each expert in
# proportion to how full that expert is. So f is what must be right. Counted on each rank alone, L
# asks that the tokens of *each rank* be spread evenly, those of a rank with nothing but Python
# included, and experts cannot specialize. Counted over all ranks, it asks for what the hardware
# needs (Qiu et al., 2025). P needs no message: a rank's own mean will do, since L is linear in P
# and gradients are averaged over ranks.


# %%
def balance_loss(score_NE: torch.Tensor, count_E: torch.Tensor) -> torch.Tensor:
    """E x sum of share x mean probability, of this rank's probabilities and the given counts."""
    share_E = count_E.double() / count_E.sum()
    return len(count_E) * (share_E * score_NE.mean(dim=0)).sum()


# %% [markdown]
# ## 4. Balance by bias: correct its choice
#
# The loss has a price: its gradient pulls the router away from what predicts best. DeepSeek-V3 adds
# a **bias** to each expert's score instead (Wang et al., 2024), *for choosing only*. The output is
# weighted by the score without it, so there is no gradient, and nothing is pulled. After each step
# the bias of an expert that got more copies than the mean goes down by a fixed amount, and that of
# one that got fewer goes up. Again the counts are those of all ranks; else the ranks' biases would
# drift apart, and with them the model.


# %%
def choose(
    score_NE: torch.Tensor, bias_E: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k experts with the highest score + bias: their scores without it, and which they are."""
    expert_NK = (score_NE + bias_E).topk(k, dim=1).indices
    return score_NE.gather(1, expert_NK), expert_NK


def adjust(bias_E: torch.Tensor, count_E: torch.Tensor, rate: float) -> None:
    """After a step: up where there were too few copies, down where there were too many."""
    too_few_E = count_E.double().mean() - count_E
    bias_E += rate * too_few_E.sign()


# %% [markdown]
# ## 5. Trained on text: with neither, with the loss, with the bias
#
# A small model predicts the next byte of Python's own standard library from the 8 bytes before it:
# an embedding, one mixture of 8 experts of which a token visits 2, and a head. All experts are on
# every rank here, and tokens stay. That changes no number (lesson 11), only who computes it.

# %%
EXPERTS, K, CONTEXT, D, H = 8, 2, 8, 64, 64
BATCH = 1680  # tokens per step, of all ranks: 1 to 8 ranks divide it
STEPS = 150
COEFFICIENT = 0.1  # of the balancing loss
RATE = 0.002  # of the bias


class Model(nn.Module):
    """Contexts of bytes (N, 8) -> logits (N, 256), and the router's scores and choices."""

    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, D // CONTEXT)
        self.router = nn.Linear(D, EXPERTS, bias=False)
        self.up_EDH = nn.Parameter(torch.randn(EXPERTS, D, H) / D**0.5)
        self.down_EHD = nn.Parameter(torch.randn(EXPERTS, H, D) / H**0.5)
        self.head = nn.Linear(D, 256)
        self.register_buffer("bias_E", torch.zeros(EXPERTS))

    def forward(self, byte_NT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x_ND = self.byte(byte_NT).flatten(1)
        score_NE = self.router(x_ND).softmax(dim=1)
        score_NK, expert_NK = choose(score_NE, self.bias_E, K)
        y_ND = x_ND
        for e in range(EXPERTS):
            token_R, which_R = (expert_NK == e).nonzero(as_tuple=True)
            row_RD = F.relu(x_ND[token_R] @ self.up_EDH[e]) @ self.down_EHD[e]
            y_ND = y_ND.index_add(0, token_R, score_NK[token_R, which_R][:, None] * row_RD)
        return self.head(y_ND), score_NE, expert_NK


def train(how: str, text: torch.Tensor) -> tuple[float, float]:
    """Return imbalance (with one expert per rank) and loss, means over the last 30 steps."""
    torch.manual_seed(2)
    model = Model().to(text.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    generator = torch.Generator().manual_seed(1)  # the same on every rank
    history = []
    for _ in range(STEPS):
        start_M = torch.randint(len(text) - CONTEXT, (BATCH,), generator=generator)
        start_N = start_M.chunk(WORLD_SIZE)[RANK].to(text.device)
        window_NT = text[start_N[:, None] + torch.arange(CONTEXT + 1, device=text.device)]
        logits_NV, score_NE, expert_NK = model(window_NT[:, :-1])
        loss = F.cross_entropy(logits_NV, window_NT[:, -1])
        count_E = loads(expert_NK.flatten(), EXPERTS)
        balance = COEFFICIENT * balance_loss(score_NE, count_E) if how == "loss" else 0
        optimizer.zero_grad()
        (loss + balance).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= WORLD_SIZE
        optimizer.step()
        if how == "bias":
            adjust(model.bias_E, count_E, RATE)
        history.append((imbalance(count_E), loss.item()))
    last = torch.tensor(history[-30:], device=text.device).mean(dim=0)
    dist.all_reduce(last)
    return last[0].item() / WORLD_SIZE, last[1].item() / WORLD_SIZE


# %% [markdown]
# ## 6. How much of a step it is: the FLOPs of real models
#
# A parameter costs a token six FLOPs, forward and backward, if the token meets it: of the experts K
# and those that all tokens share, of the two tables the head (the embedding is a look-up).
# Attention adds 3 FLOPs per head, layer, token of the sequence, and number in a key and a value,
# causal half (parallelism/17_planning_time.py). Balance changes none of it. Either all ranks do
# these FLOPs, or one does many of them while the others wait.


# %%
class Mixture(NamedTuple):
    """The shape of a mixture of experts, from its config.json."""

    layers: int
    dense: int  # layers with one MLP for all tokens
    hidden: int
    attention: int  # parameters in one layer
    heads: int  # heads x (width of a key + width of a value)
    ff: int  # width of a dense MLP
    expert: int  # width of an expert
    experts: int
    k: int
    shared: int  # experts that see every token
    vocab: int


MLA = 7168 * (1536 + 512 + 64) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
SHAPES = {
    "Qwen3-30B": Mixture(48, 0, 2048, 2048 * 9216, 32 * 256, 0, 768, 128, 8, 0, 151_936),
    "Qwen3-235B": Mixture(94, 0, 4096, 4096 * 17408, 64 * 256, 0, 1536, 128, 8, 0, 151_936),
    "DeepSeek-V3": Mixture(61, 3, 7168, MLA, 128 * 320, 18432, 2048, 256, 8, 1, 129_280),
}


def parameters(m: Mixture, experts: int) -> int:
    """Parameters, norms apart, with so many routed experts in a layer: all, or those met."""
    router = m.hidden * m.experts
    mixture = router + (experts + m.shared) * 3 * m.hidden * m.expert
    mlps = m.dense * 3 * m.hidden * m.ff + (m.layers - m.dense) * mixture
    return m.layers * m.attention + mlps + 2 * m.vocab * m.hidden


def flops_per_token(m: Mixture, sequence: int) -> int:
    met = parameters(m, m.k) - m.vocab * m.hidden
    return 6 * met + 3 * m.layers * m.heads * sequence


# %% [markdown]
# ## 7. How it is measured
#
# **The pace.** Each rank computes as many rows as the routing sends it, even or skewed as in the
# picture: the last rank's copies go to rank 0. FLOPs are counted by torch. Seconds are those that
# rank 0's process was on a core, the best of seven; ranks take turns, as if each had a device of
# its own.


# %%
def skewed(copies: int, device: torch.device) -> torch.Tensor:
    """The expert of each copy of a rank, (C,), one expert per rank: rank 0 also has the last's."""
    expert_C = torch.arange(copies, device=device) % WORLD_SIZE
    return expert_C * (expert_C < WORLD_SIZE - 1)


def slowest(x: float, device: torch.device) -> float:
    """The largest of the ranks' numbers."""
    largest = torch.tensor(x, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def check_pace(device: torch.device) -> None:
    expert = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128)).to(device)
    even_C = torch.arange(250 * WORLD_SIZE, device=device) % WORLD_SIZE
    inputs = []
    flops = []
    for expert_C in (even_C, skewed(250 * WORLD_SIZE, device)):
        rows = loads(expert_C, WORLD_SIZE)[RANK].item()
        inputs.append(torch.ones(rows, 128, device=device))
        with FlopCounterMode(display=False) as counter:
            expert(inputs[-1])
        flops.append(slowest(counter.get_total_flops(), device))
    due = min(2, WORLD_SIZE)
    claim("skewed: FLOPs of the slowest rank / even", due, flops[1] / flops[0], question=1)
    if device.type == "cuda":
        return
    tries = ([], [])
    for turn in range(7 * WORLD_SIZE):
        dist.barrier()
        if turn % WORLD_SIZE == RANK:
            for x_RD, seconds in zip(inputs, tries, strict=True):
                begin = time.process_time()
                expert(x_RD).sum().item()
                seconds.append(time.process_time() - begin)
    ratio = min(tries[1]) / min(tries[0])
    text = "skewed: CPU seconds of rank 0 / even"
    claim(text, due, ratio, atol=0.4, question=1, timed=True, rank=0)


# %% [markdown]
# **Capacity** is held against one process that serves the groups one after the other, with all
# ranks in one group, and with a group per rank. Copies come in another order on each rank.


# %%
def served_in_one_process(groups: list[list[int]], capacity: int) -> list[bool]:
    """Which copies are taken if each group's experts take so many."""
    served = []
    for experts in groups:
        taken = Counter()
        for expert in experts:
            taken[expert] += 1
            served.append(taken[expert] <= capacity)
    return served


def check_capacity(device: torch.device) -> None:
    C = 30 * WORLD_SIZE
    order_C = torch.randperm(C, generator=torch.Generator().manual_seed(RANK))
    expert_C = skewed(C, device)[order_C.to(device)]
    ranks = [torch.empty_like(expert_C) for _ in range(WORLD_SIZE)]
    dist.all_gather(ranks, expert_C)
    everyone = torch.cat(ranks)

    served_C = within_capacity(expert_C, WORLD_SIZE, C, None)  # n C copies, n experts
    kept_E = loads(expert_C[served_C], WORLD_SIZE)
    due = (min(2, WORLD_SIZE) - 1) / WORLD_SIZE
    dropped = 1 - kept_E.sum().item() / len(everyone)
    claim("capacity 1: share of copies dropped", due, dropped, atol=1e-12, question=2)
    claim("capacity 1: copies of the fullest rank / even", 1, kept_E.max().item() / C)
    expected = served_in_one_process([everyone.tolist()], C)
    wrong = served_C.cpu() != torch.tensor(expected).chunk(WORLD_SIZE)[RANK]
    claim("all ranks a group: copies served otherwise", 0, wrong.sum())

    alone, _ = dist.new_subgroups(1)
    served_C = within_capacity(expert_C, WORLD_SIZE, 30, alone)
    expected = served_in_one_process([rank.tolist() for rank in ranks], 30)
    wrong = served_C.cpu() != torch.tensor(expected).chunk(WORLD_SIZE)[RANK]
    claim("each rank a group: copies served otherwise", 0, wrong.sum())


# %% [markdown]
# **Loss and bias** are held against one process that has the tokens of all ranks.


# %%
def check_loss(device: torch.device) -> None:
    n = WORLD_SIZE
    expert_N = torch.full((5,), RANK, device=device)
    certain_NE = F.one_hot(expert_N, n).double()
    loss = balance_loss(certain_NE, torch.bincount(expert_N, minlength=n))
    claim("own counts: the balancing loss", n, loss, question=3)
    loss = balance_loss(certain_NE, loads(expert_N, n))
    claim("counts of all ranks: the balancing loss", 1, loss, atol=1e-12, question=3)


def check_one_process(device: torch.device) -> None:
    torch.manual_seed(0)
    x_MD = torch.randn(21 * WORLD_SIZE, D, device=device, dtype=torch.float64)
    weight_ED = torch.randn_like(x_MD[:EXPERTS]).requires_grad_()
    score_NE = (x_MD.chunk(WORLD_SIZE)[RANK] @ weight_ED.T).softmax(dim=1)
    bias_E = torch.zeros_like(score_NE[0])
    _, expert_NK = choose(score_NE, bias_E, K)
    count_E = loads(expert_NK.flatten(), EXPERTS)
    (ours_ED,) = torch.autograd.grad(balance_loss(score_NE, count_E) / WORLD_SIZE, weight_ED)
    dist.all_reduce(ours_ED)
    adjust(bias_E, count_E, RATE)

    score_ME = (x_MD @ weight_ED.T).softmax(dim=1)
    second_M1 = score_ME.detach().sort(dim=1).values[:, [-K]]
    share_E = (score_ME >= second_M1).double().mean(dim=0) / K
    expected = EXPERTS * (share_E * score_ME.mean(dim=0)).sum()
    (expected_ED,) = torch.autograd.grad(expected, weight_ED)
    error = (ours_ED - expected_ED).abs().max() / expected_ED.abs().max()
    claim("loss: error of the router's gradient", 0, error, atol=len(x_MD) * 2**-50)
    due_E = RATE * (1 / EXPERTS - share_E).sign()
    claim("bias: experts with another one than due", 0, (bias_E != due_E).sum())
    score_NK, _ = choose(score_NE, 10 * F.one_hot(torch.tensor(3), EXPERTS).to(device), K)
    changed = (score_NK[:, 0] != score_NE[:, 3]).sum()
    claim("bias of 10 for expert 3: tokens it rescores", 0, changed)


# %% [markdown]
# What the model learns varies with the text, so these rows have room. **Published figures** are of
# kind theory: parameters from the models' own pages, and FLOPs per token as NVIDIA's TFLOP/s over
# its tokens per second (Megatron-Bridge's performance pages).


# %%
def check_training(text: torch.Tensor) -> None:
    uneven, loss = train("neither", text)
    by_loss, with_loss = train("loss", text)
    by_bias, with_bias = train("bias", text)
    print0(f"{'':13}nats per byte: {loss:.3f}; by loss {with_loss:.3f}, by bias {with_bias:.3f}")
    claim("neither: imbalance, at least", 2, uneven, ">=", varies=True)
    claim("loss: imbalance, at most", 1.5, by_loss, "<=", varies=True)
    claim("bias: imbalance, at most", 1.25, by_bias, "<=", varies=True)
    worst = max(loss, with_loss, with_bias)
    claim("each: nats per byte, at most", 2.6, worst, "<=", varies=True)


def read_text(path: str | None) -> bytes:
    """Return up to 2 MB of the file at `path`, or of the standard library's sources."""
    if path:
        return Path(path).read_bytes()[:2_000_000]
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    return b"".join(source.read_bytes() for source in sources)[:2_000_000]


PUBLISHED = {  # billions of parameters, all and met, cut off; tokens/s and TFLOP/s of a GPU
    "Qwen3-30B": (30.5, 3.3, [(45275, 1041), (40706, 936), (40769, 938), (8826, 203)]),
    "Qwen3-235B": (235, 22, [(4452, 659), (4104, 607), (1204, 178)]),
    "DeepSeek-V3": (671, 37, [(3848, 961), (4357, 1088), (3139, 782), (4018, 1003)]),
}


def check_published() -> None:
    for name, (total, met, rows) in PUBLISHED.items():
        m = SHAPES[name]
        digit = 10 if total < 100 else 1
        found = math.floor(parameters(m, m.experts) / 1e9 * digit) / digit
        claim(f"{name}: billions of parameters", total, found, kind="theory")
        found = math.floor(parameters(m, m.k) / 1e9 * digit) / digit
        claim(f"{name}: billions that a token meets", met, found, kind="theory")
        ours = flops_per_token(m, 4096) / 1e9
        found = median(tflops * 1e3 / tokens for tokens, tflops in rows)
        claim(f"{name}: GFLOPs per token", ours, found, atol=0.005 * ours, kind="theory")
    m = SHAPES["Qwen3-30B"]
    in_experts = 6 * m.layers * m.k * 3 * m.hidden * m.expert
    share = in_experts / flops_per_token(m, 4096)
    _, _, rows = PUBLISHED["Qwen3-30B"]
    published = in_experts / median(tflops * 1e12 / tokens for tokens, tflops in rows)
    text = "Qwen3-30B: share of a token's FLOPs in experts"
    claim(text, share, published, atol=0.005 * share, question=4, kind="theory")


# %% [markdown]
# ## 8. On GPUs: the step of a skewed layer
#
# Experts of Qwen3-30B's width compute 32,768 copies per rank, in bfloat16, between two all-to-alls:
# evenly routed, and with the last rank's copies on rank 0.


# %%
def layer_ms(expert_C: torch.Tensor, expert: Callable) -> float:
    """Milliseconds of dispatch, expert and combine, if all ranks' copies are routed like this."""
    sent = torch.bincount(expert_C, minlength=WORLD_SIZE).tolist()
    received = [sent[RANK]] * WORLD_SIZE
    x_CD = torch.randn(len(expert_C), 2048, device=expert_C.device, dtype=torch.bfloat16)
    row_RD = x_CD.new_empty(sum(received), 2048)

    def layer() -> None:
        dist.all_to_all_single(row_RD, x_CD, received, sent)
        dist.all_to_all_single(x_CD, expert(row_RD), sent, received)

    return median_ms(layer)


def measure_on_gpus(device: torch.device) -> None:
    text = "ms of a layer, rank 0 twice as full / even"
    if device.type == "cpu" or WORLD_SIZE == 1 or not torch.cuda.is_bf16_supported(False):
        blocked(text, needs="2 GPUs with bfloat16")
        return
    expert = nn.Sequential(nn.Linear(2048, 1152), nn.SiLU(), nn.Linear(1152, 2048))
    expert = expert.to(device, torch.bfloat16)  # as many FLOPs as three matrices 768 wide
    copies = 32768 // WORLD_SIZE * WORLD_SIZE
    even = layer_ms(torch.arange(copies, device=device) % WORLD_SIZE, expert)
    uneven = layer_ms(skewed(copies, device), expert)
    claim(text, 2, slowest(uneven / even, device), atol=0.4, timed=True)


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
# 1. Twice as long: all wait for rank 0. That the last rank has nothing to do helps nobody.
# 2. A quarter: rank 0's expert takes half of what it is sent. The layer is as fast as with even
#    routing, and a quarter of all copies got nothing for it. A capacity factor of 1.25 drops 19%,
#    and takes 1.25 times as long.
# 3. 4, which is E / K: its own tokens look as uneven as can be. Trained so, each rank would pull
#    its tokens away from the expert that suits them, though over all ranks nothing is uneven.
# 4. 47%: 10.9 of 23.1 GFLOPs. So 95% of the parameters are less than half of the work, and if all
#    products run at one rate, an imbalance of 2 makes the products of a step 1.47 times as long.
#    For Qwen3-235B the share is 57%, for DeepSeek-V3 49%.
#
# Trained with neither, the fullest expert ends at more than three times the mean; four times would
# be all tokens. With the loss it is about 1.3, with the bias less, and the text is predicted no
# worse for it.
#
# **Try.** With `before_E` 0 each rank holds only its own copies against a capacity that is meant
# for those of all ranks, so nothing is ever dropped: both rows of *capacity 1* fail, and *all ranks
# a group*. With the bias in the scores only *bias of 10* fails: the model still trains, but the
# bias now moves its output, and no gradient knows of it.
#
# **On GPUs** the imbalance of a single micro-batch counts, not the mean over many: each layer of
# each micro-batch waits for its own fullest rank. More experts per rank even it out, and so do
# larger micro-batches. NVIDIA's figures above come from routing that is forced to be even, so a
# real run is slower than they are by what its router leaves uneven. Fixed capacities also give
# fixed shapes, which CUDA graphs and TPUs ask for. Nothing here was run on several GPUs.
#
# **When.** The bias, with a very small loss per sequence on top, is what DeepSeek-V3 trained with;
# the loss over all ranks is what Qwen3 uses; capacity is for fixed shapes, and as an upper limit
# on memory. Where all experts are on every rank, an uneven router costs no time, only experts that
# never learn.
#
# **In other systems.** Megatron-LM: `--moe-router-load-balancing-type` aux_loss, or global_aux_loss
# for counts of all ranks; `--moe-expert-capacity-factor`; `--moe-router-enable-expert-bias`.
# torchtitan: `load_balance_coeff`, the bias's step, applied before the optimizer's.


# %%
def main() -> None:
    data = {"metavar": "PATH", "help": "text to train on (Python's own sources)"}
    options = command_line({"--data": data})
    launch()
    device = setup()
    check_pace(device)
    check_capacity(device)
    check_loss(device)
    check_one_process(device)
    text = bytearray(read_text(options.data))
    check_training(torch.frombuffer(text, dtype=torch.uint8).long().to(device))
    check_published()
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
