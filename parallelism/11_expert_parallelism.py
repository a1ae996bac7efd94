"""Expert parallelism: tokens travel to their experts and back
===========================================================

**Question.** A mixture of experts has many MLPs in one layer, and each token visits a few of them.
The experts are dealt out over ranks. How do tokens reach their experts and come back, and what does
that cost, forward and backward?

**Predict**, and write it down before you run. Each of n ranks has E/n of a layer's experts, and N
tokens of its own, D numbers each. The router sends a token to K experts.

1. How many all-to-alls of tokens does the layer need, forward and backward together?
2. Four ranks, K = 2, and the router spreads the tokens evenly. How many numbers does a rank send to
   other ranks in one of these all-to-alls, per token, in units of D?
3. Four ranks hold two copies of every expert. After backward the gradients of the two copies are
   added up, each from the mean loss over a rank's own tokens. By which number must the sum be
   divided to belong to the mean loss over all tokens?

**Run.**

    torchrun --standalone --nproc-per-node=4 11_expert_parallelism.py   # NCCL on 4 GPUs, else gloo
    python 11_expert_parallelism.py                                     # the same, started for you

Not run on several GPUs.

**Try.** In `combine` leave out `[way.order_C]`: does anything but the values fail? In
`complete_gradients` divide an expert's gradient by `dist.get_world_size(copies)`: which claims fail
now?

**Before.** communication/01_nccl_collectives.py: what an all-to-all does.

**Next.** exercises/28_dispatch_combine; then parallelism/20_expert_balance.py: what uneven routing
costs, and how it is kept even.
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
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
Group = dist.ProcessGroup | None  # the ranks that share the experts; None: all ranks

# Shapes: N tokens of a rank, D model width, E experts, e of them on a rank, each H wide, K experts
# per token; C = N K copies of tokens that leave a rank, R rows that arrive there, n ranks.
D, H, K = 12, 16, 2
N = 8 * WORLD_SIZE
E = 2 * WORLD_SIZE

# %% [markdown]
# ## 1. Many experts, few per token
#
# In most transformers every token goes through the same MLP. A **mixture of experts** has E MLPs
# instead, the **experts**, and a **router** that chooses K of them for each token. The output is
# the sum of what these K return, each times its score:
#
#     y  =  sum over the K experts e with the highest scores of   score_e(x) expert_e(x)
#
# Parameters grow with E, and the work per token grows with K. Qwen3-30B has 128 experts in each of
# its 48 layers, and a token visits 8. So 29.0 of its 30.5 billion parameters are in experts, and a
# token meets 1.8 billion of those 29.0.
#
# Below are both parts. The router's scores are a softmax over all experts, as in Qwen3 and Mixtral
# (which then divide the K scores by their sum; we do not). An expert is the gated MLP of a Llama.


# %%
class Router(nn.Module):
    """Tokens (N, D) -> the scores of each token's K experts, and which they are, (N, K) both."""

    def __init__(self, weight_ED: torch.Tensor) -> None:
        super().__init__()
        self.weight_ED = nn.Parameter(weight_ED)

    def forward(self, x_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        score_NE = (x_ND @ self.weight_ED.T).softmax(dim=1)
        score_NK, expert_NK = score_NE.topk(K, dim=1)
        return score_NK, expert_NK


class Experts(nn.Module):
    """Some experts: rows (R, D) sorted by expert, and how many each gets, (e,) -> (R, D)."""

    def __init__(self, gate_eDH: torch.Tensor, up_eDH: torch.Tensor, down_eHD: torch.Tensor):
        super().__init__()
        self.gate_eDH = nn.Parameter(gate_eDH)
        self.up_eDH = nn.Parameter(up_eDH)
        self.down_eHD = nn.Parameter(down_eHD)

    def forward(self, row_RD: torch.Tensor, rows_e: torch.Tensor) -> torch.Tensor:
        y = []
        for e, x in enumerate(row_RD.split(rows_e.tolist())):
            hidden = F.silu(x @ self.gate_eDH[e]) * (x @ self.up_eDH[e])
            y.append(hidden @ self.down_eHD[e])
        return torch.cat(y)


# %% [markdown]
# ## 2. Dispatch, experts, combine
#
# **Expert parallelism** deals the experts out: rank 0 has the first E/n, rank 1 the next, and so
# on. Tokens are data-parallel as before, so each rank has other ones. A token and its experts are
# therefore rarely in one place, and it is the token that travels. Here are two ranks with three
# tokens each, four experts, and K = 2. "a2" is the copy of token a for expert 2:
#
#                        rank 0, experts 0 and 1          rank 1, experts 2 and 3
#     router             a: 0, 2   b: 2, 3   c: 1, 2      p: 2, 3   q: 0, 2   r: 1, 3
#     copies, by expert  a0 c1 | a2 b2 c2 b3              q0 r1 | p2 q2 p3 r3
#     counts             1  1  | 3  1                     1  1  | 2  2
#     all-to-all         a0 c1 | q0 r1                    a2 b2 c2 b3 | p2 q2 p3 r3
#     by expert again    a0 q0 | c1 r1                    a2 b2 c2 p2 q2 | b3 p3 r3
#     all-to-all back    a0 c1 | a2 b2 c2 b3              q0 r1 | p2 q2 p3 r3
#     combine            a = its score for 0 x a0 + its score for 2 x a2, and so on
#
# Before the rows go back, each expert computes its own, which lie together by then.
#
# Two things are unlike other collectives. Nobody knows beforehand how many rows will arrive, so the
# ranks first exchange their **counts**, in a small all-to-all of its own. And the parts are
# **uneven**: rank 1 gets eight rows, and rank 0 four.
#
# Backward, each row's gradient goes the way back that its row came. So the gradient of an
# all-to-all is an all-to-all with the two lists of sizes swapped:


# %%
class AllToAll(torch.autograd.Function):
    """Send `sent[r]` rows to each rank r, and get `received[r]` from it: (C, D) -> (R, D)."""

    @staticmethod
    def forward(
        ctx: object, row_CD: torch.Tensor, sent: list[int], received: list[int], group: Group
    ) -> torch.Tensor:
        ctx.way_back = (received, sent, group)
        return exchange(row_CD, sent, received, group)

    @staticmethod
    def backward(ctx: object, grad_RD: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return exchange(grad_RD, *ctx.way_back), None, None, None


def exchange(
    row_CD: torch.Tensor, sent: list[int], received: list[int], group: Group
) -> torch.Tensor:
    row_RD = row_CD.new_empty(sum(received), row_CD.shape[1])
    dist.all_to_all_single(row_RD, row_CD.contiguous(), received, sent, group=group)
    return row_RD


# %% [markdown]
# `dispatch` is the picture from the copies to the second sort. Copies that are sorted by expert are
# sorted by rank as well, since a rank's experts are neighbors. What arrives is sorted by sender
# first, and by expert within each sender. The counts say which row is for whom. So the rows can be
# sorted by expert alone, and each expert computes all its rows in one product.


# %%
class Way(NamedTuple):
    """What `combine` needs to bring the rows back."""

    order_C: torch.Tensor  # the copies, sorted: copy c is of token c // K
    order_R: torch.Tensor  # the rows that arrived, sorted by expert
    sent: list[int]  # rows to each rank
    received: list[int]


def dispatch(
    x_ND: torch.Tensor, expert_NK: torch.Tensor, e: int, group: Group
) -> tuple[torch.Tensor, torch.Tensor, Way]:
    """Send tokens to their experts, e per rank: rows by expert, how many each gets, the way."""
    n = dist.get_world_size(group)
    expert_C = expert_NK.flatten()
    order_C = expert_C.argsort(stable=True)
    count_ne = torch.bincount(expert_C, minlength=n * e).view(n, e)  # mine, for each rank's experts
    their_ne = torch.empty_like(count_ne)  # each rank's, for my experts
    dist.all_to_all_single(their_ne, count_ne, group=group)
    sent, received = torch.stack([count_ne.sum(dim=1), their_ne.sum(dim=1)]).tolist()

    row_CD = x_ND[order_C // expert_NK.shape[1]]
    row_RD = AllToAll.apply(row_CD, sent, received, group)
    expert_ne = torch.arange(e, device=x_ND.device).repeat(n)
    expert_R = expert_ne.repeat_interleave(their_ne.flatten(), output_size=len(row_RD))
    order_R = expert_R.argsort(stable=True)
    return row_RD[order_R], their_ne.sum(dim=0), Way(order_C, order_R, sent, received)


# %% [markdown]
# `combine` sorts the rows by sender again and sends them back, the lists swapped. They arrive in
# the order in which they left. So the scores have to be put into that order too, or tokens are
# multiplied by the scores of others. Then the whole layer is three lines. Every rank takes part in
# each all-to-all, even if no token has chosen its experts:


# %%
def combine(y_RD: torch.Tensor, score_NK: torch.Tensor, way: Way, group: Group) -> torch.Tensor:
    """Bring the rows back; return for each token the sum of its K rows times their scores."""
    y_RD = y_RD[way.order_R.argsort()]  # the inverse of that order
    y_CD = AllToAll.apply(y_RD, way.received, way.sent, group)
    score_C = score_NK.flatten()[way.order_C]
    y_ND = y_CD.new_zeros(len(score_NK), y_CD.shape[1])
    return y_ND.index_add(0, way.order_C // score_NK.shape[1], score_C[:, None] * y_CD)


def expert_parallel(
    x_ND: torch.Tensor, router: Callable, experts: Experts, group: Group
) -> torch.Tensor:
    """A mixture of experts, dealt out over the group: this rank's tokens (N, D) -> (N, D)."""
    score_NK, expert_NK = router(x_ND)
    row_RD, rows_e, way = dispatch(x_ND, expert_NK, len(experts.gate_eDH), group)
    return combine(experts(row_RD, rows_e), score_NK, way, group)


# %% [markdown]
# ## 3. Copies: which gradients are added up over which ranks
#
# With many ranks, experts are not dealt out over all of them. There are several groups, each with a
# copy of all experts, and tokens travel inside their group. Router, attention and all else are on
# every rank, as in data parallelism. So two kinds of parameters are on the same ranks, and their
# gradients need other sums:
#
#     parameter           its gradient after backward is of            add up over       divide by
#     router, attention   the rank's own tokens                        all n ranks       n
#     an expert           all tokens that came, of its whole group     its copies        n
#
# The last column is where habit misleads. Backward starts on each rank from the mean over its own N
# tokens, and the mean over all tokens is 1/n of the sum of these n means. Through the all-to-alls
# an expert's gradient is a sum over the ranks of its group already. The sum over the copies makes
# it one over all n ranks. Divided by the number of copies, it would be n / copies times too large.


# %%
def complete_gradients(router: nn.Module, experts: Experts, copies: Group) -> None:
    """After backward from the mean over this rank's tokens: gradients of the mean over all."""
    for parameter in router.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= WORLD_SIZE
    for parameter in experts.parameters():
        dist.all_reduce(parameter.grad, group=copies)
        parameter.grad /= WORLD_SIZE


# %% [markdown]
# Expert parallelism lies inside data parallelism: it uses ranks that have other tokens anyway. And
# it is apart from tensor parallelism, which may split attention on the same ranks: Megatron calls
# that **folding**. Here pairs of ranks split the heads, half A and half B, and each rank of a pair
# has half of its tokens (sequence parallelism). The same 8 ranks hold 8 experts twice:
#
#     rank                 0     1     2     3     4     5     6     7
#     heads: dp 4 x tp 2   A     B     A     B     A     B     A     B
#     experts: ep 4 x 2    0 1   2 3   4 5   6 7   0 1   2 3   4 5   6 7
#
#     gradient of      after backward, a sum over the tokens of    add up over
#     half the heads   a pair: 01, 23, 45 or 67                    dp: 0246 1357
#     an expert        an ep group: 0123 or 4567                   copies: 04 15 26 37
#     the router       one rank                                    all: 01234567
#
# In the end each row is a sum over the tokens of all 8 ranks, and is divided by 8.

# %% [markdown]
# ## 4. How it is measured
#
# The oracle is the same layer in one process, in float64, without dispatch: every expert computes
# every token, and its result counts if the token chose it. Each rank compares the output of its
# tokens, and the gradients of these, of the router, and of its experts.

# %%
TOLERANCE = 10 * N * WORLD_SIZE * 2**-53  # some ten sums of at most all tokens, in another order
WEIGHTS = ("gate", "up", "down")  # of the experts
COPIES = min([c for c in range(2, WORLD_SIZE + 1) if WORLD_SIZE % c == 0], default=1)


def draw(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the tokens of all ranks, and all weights: the same on every rank."""
    torch.manual_seed(0)
    shapes = {"x": (N * WORLD_SIZE, D), "router": (E, D)}
    shapes |= {"gate": (E, D, H), "up": (E, D, H), "down": (E, H, D)}
    drawn = {}
    for name, shape in shapes.items():
        drawn[name] = torch.randn(shape, device=device, dtype=torch.float64, requires_grad=True)
    return drawn


def in_one_process(whole: dict[str, torch.Tensor]) -> torch.Tensor:
    """The layer on the M tokens of all ranks: (M, D)."""
    score_ME = (whole["x"] @ whole["router"].T).softmax(dim=1)
    least_M1 = score_ME.sort(dim=1).values[:, [-K]]
    score_ME = score_ME * (score_ME >= least_M1)
    hidden_EMH = F.silu(whole["x"] @ whole["gate"]) * (whole["x"] @ whole["up"])
    return torch.einsum("me,emd->md", score_ME, hidden_EMH @ whole["down"])


def share(x: torch.Tensor, parts: int, part: int) -> torch.Tensor:
    """Return a copy of one of so many parts of `x`, along its first dimension."""
    return x.detach().chunk(parts)[part].clone()


def share_of_experts(whole: dict[str, torch.Tensor], parts: int, part: int) -> Experts:
    return Experts(*[share(whole[weights], parts, part) for weights in WEIGHTS])


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element; inf if one is no number."""
    error = (ours - expected).abs().max() / expected.abs().max()
    return error.nan_to_num(nan=torch.inf).item()


# %% [markdown]
# The layer is checked with one copy of each expert, dealt out over all ranks, and with as few
# copies as make equal groups: on four ranks two copies, each dealt out over two ranks.


# %%
def check_layer(name: str, copies: int, device: torch.device) -> float:
    """Claim the values; return the gradient added up over the copies / the oracle's."""
    whole = draw(device)
    expected_MD = in_one_process(whole)
    expected_MD.square().mean().backward()
    shape = (copies, WORLD_SIZE // copies)
    mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("copy", "expert"))
    place = (mesh["expert"].size(), mesh.get_local_rank("expert"))
    experts = share_of_experts(whole, *place)
    router = Router(share(whole["router"], 1, 0))
    x_ND = share(whole["x"], WORLD_SIZE, RANK).requires_grad_()
    y_ND = expert_parallel(x_ND, router, experts, mesh.get_group("expert"))
    y_ND.square().mean().backward()
    x_ND.grad /= WORLD_SIZE  # a token is on one rank: nothing to add up
    added_eDH = experts.gate_eDH.grad.clone()
    dist.all_reduce(added_eDH, group=mesh.get_group("copy"))
    complete_gradients(router, experts, mesh.get_group("copy"))

    error = relative_error(y_ND.detach(), share(expected_MD, WORLD_SIZE, RANK))
    claim(f"{name}: error of the output", 0, error, atol=TOLERANCE)
    errors = [relative_error(x_ND.grad, share(whole["x"].grad, WORLD_SIZE, RANK))]
    errors.append(relative_error(router.weight_ED.grad, whole["router"].grad))
    claim(f"{name}: error of the other gradients", 0, max(errors), atol=TOLERANCE)
    errors = []
    for weights, ours in zip(WEIGHTS, experts.parameters(), strict=True):
        errors.append(relative_error(ours.grad, share(whole[weights].grad, *place)))
    claim(f"{name}: error of the experts' gradients", 0, max(errors), atol=TOLERANCE)
    expected_eDH = share(whole["gate"].grad, *place)
    return ((added_eDH * expected_eDH).sum() / expected_eDH.square().sum()).item()


def check_layers(device: torch.device) -> None:
    check_layer("one copy", 1, device)
    ratio = check_layer("several copies", COPIES, device)
    slack = WORLD_SIZE * TOLERANCE
    text = "several copies: gradient added up / the oracle's"
    claim(text, WORLD_SIZE, ratio, atol=slack, question=3)


# %% [markdown]
# What is handed to all-to-alls is noted beneath torch's dispatcher, where every collective passes.
# For exact numbers to other ranks, the router is replaced by one that deals the copies out in turn.


# %%
class AllToAllsNoted(TorchDispatchMode):
    """Notes the all-to-alls of its block: those of tokens, and those of counts."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[tuple[int, list[int]]] = []  # elements handed over, rows to each rank
        self.counts = 0  # calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and "alltoall" in func._schema.name:
            if args[1].is_floating_point():
                self.tokens.append((args[1].numel(), args[4]))
            else:
                self.counts += 1
        return func(*args, **(kwargs or {}))


def in_turn(x_ND: torch.Tensor, experts: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A router that deals the copies out evenly, whatever the tokens are."""
    copy_C = torch.arange(len(x_ND) * k, device=x_ND.device)
    expert_NK = (copy_C % experts).view(-1, k)
    return torch.full_like(expert_NK, 1 / k, dtype=x_ND.dtype), expert_NK


def check_traffic(device: torch.device) -> None:
    whole = draw(device)
    x_ND = share(whole["x"], WORLD_SIZE, RANK).requires_grad_()
    experts = share_of_experts(whole, WORLD_SIZE, RANK)
    router = Router(share(whole["router"], 1, 0))
    with AllToAllsNoted() as forward:
        y_ND = expert_parallel(x_ND, router, experts, None)
    with AllToAllsNoted() as backward:
        y_ND.sum().backward()
    calls = len(forward.tokens) + len(backward.tokens)
    claim("all-to-alls of tokens, forward and backward", 4, calls, question=1)
    claim("all-to-alls of counts", 1, forward.counts + backward.counts)

    even = partial(in_turn, experts=E, k=K)
    with AllToAllsNoted() as step:
        expert_parallel(x_ND, even, experts, None)
    elements, rows_n = step.tokens[0]
    to_others = elements * (1 - rows_n[RANK] / sum(rows_n))
    due = K * (WORLD_SIZE - 1) / WORLD_SIZE
    text = "even routing: numbers to other ranks / (N D)"
    claim(text, due, to_others / (N * D), atol=1e-12, question=2)


# %% [markdown]
# On GPUs the all-to-all of a layer of Qwen3-30B (4,096 tokens of 2,048 numbers in bfloat16, K = 8,
# routed evenly) is held against the link: what a rank gets if each sends as many bytes to the next.


# %%
def pass_on(x: torch.Tensor) -> None:
    """Send x to the next rank, and get as much from the one before."""
    to = dist.P2POp(dist.isend, x, (RANK + 1) % WORLD_SIZE)
    back = dist.P2POp(dist.irecv, torch.empty_like(x), (RANK - 1) % WORLD_SIZE)
    for work in dist.batch_isend_irecv([to, back]):
        work.wait()


def measure_on_gpus(device: torch.device) -> None:
    text = "all-to-all: its rate / the link's"
    one_node = int(os.environ["LOCAL_WORLD_SIZE"]) == WORLD_SIZE
    if device.type == "cpu" or WORLD_SIZE == 1 or not one_node:
        blocked(text, needs="2 GPUs, all of one node")
        return
    rows = 4096 * 8 // WORLD_SIZE  # to each rank
    row_CD = torch.randn(rows * WORLD_SIZE, 2048, device=device, dtype=torch.bfloat16)
    sizes = [rows] * WORLD_SIZE
    exchanging = median_ms(lambda: exchange(row_CD, sizes, sizes, None))
    passing = median_ms(lambda: pass_on(row_CD))
    rate = row_CD.nbytes * (1 - 1 / WORLD_SIZE) / exchanging / 1e6
    link = row_CD.nbytes / passing / 1e6
    print0(f"{'':13}all-to-all {rate:.0f} GB/s per rank, link {link:.0f}")
    claim(text, 0.5, rate / link, ">=", timed=True)


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
# 1. Four: there and back, forward and backward. Besides, a small one of counts, forward alone.
# 2. 1.5 D, which is K (n-1)/n: a rank dispatches K D per token however it routes, and if it routes
#    evenly, 1/n of that stays. Qwen3-30B on 8 ranks sends 7 copies of 2,048 numbers in bfloat16, 29
#    kB per token and all-to-all, and 5.5 MB per token in all four of all 48 layers.
# 3. By 4, the number of ranks, as for every other parameter. Only the sum is over fewer of them.
#    DistributedDataParallel on the group of the copies would divide by 2.
#
# **Try.** With the scores in another order, tokens are multiplied by the scores of others. Seven
# rows fail, those of output and gradients; every count is right, and no shape complains. Divided
# by the number of copies, only the two rows *error of the experts' gradients* fail. A model trains
# that way, too: SGD takes larger steps for its experts; Adam hides the factor, clipping does not.
#
# **On GPUs.** The host must read the counts to ask for the buffer: in each layer it waits for the
# GPU. A loop over experts is many small products there; `F.grouped_mm` computes all of them in one
# kernel, and needs the rows sorted by expert, as they are here. And links decide. Each token makes
# 29 kB per all-to-all (answer 2): 117 MB for 4,096 tokens, by datasheet 0.26 ms over NVLink at 450
# GB/s and 2.3 ms over a network card of 50 GB/s, where the experts' 309 GFLOP forward take some 0.8
# ms at 40% of an H100's 989 TFLOP/s. So a group of experts belongs inside an NVLink domain first.
# benchmarks/experts.py measures at this size: the links inside a node and across nodes, the experts
# in a loop and grouped, and the whole layer.
#
# **When.** If experts are most of the model and do not fit, weights and states, on each rank. FSDP
# is the alternative: tokens stay at home, and all E experts come to them, twice, and their
# gradients leave once. That is 3 x 3 E D H numbers, however few tokens there are, against 4 N K D
# here. In Qwen3-30B (E = 128, D = 2,048, H = 768, K = 8) both are equal at N = 27,648 tokens per
# rank; with fewer, tokens are cheaper to move than weights.
#
# **In other systems.** torchtitan's `AllToAllTokenDispatcher` and Megatron-LM's
# `MoEAlltoAllTokenDispatcher` have the steps of section 2, both sorts included. Megatron too
# divides experts' gradients by all data-parallel ranks, not by their copies. PyTorch has an
# all-to-all with a backward pass ready-made, `all_to_all_single_autograd`.


# %%
def main() -> None:
    command_line()
    launch()
    device = setup()
    check_layers(device)
    check_traffic(device)
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
