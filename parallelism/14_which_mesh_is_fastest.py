"""Which mesh is the fastest? Predict the seconds of a step from three measured numbers
====================================================================================

**Question.** Eight ranks can train one model on 20 meshes. Which one is the fastest, and can you
know it without training on all of them?

**Predict**, and write it down before you run. Ranks train the 8 layers of a GPT, 128 wide, on 16
sequences of 64 tokens per step, in float32.

1. How many times as many bytes do the calls of a step handle if all ranks are along tp, as if all
   are along dp_shard (FSDP): 0.3, 3 or 30?
2. A mesh is dp_shard 2 x tp. Let dp_replicate take the place of dp_shard. How many times as many
   bytes of weights, gradients and optimizer state does a rank hold?
3. Eight stages work on eight micro-batches, so each idles in 7 of 15 slots. But the eight ranks
   share two cores. How many times as long as without idle slots does a step take?
4. Six meshes are predicted, then timed. Is the rank correlation of the two orders near 0, near 0.5,
   or above 0.7?
5. A slow cable joins two nodes of four ranks. Which axis should go across it?

**Run.**

    torchrun --standalone --nproc-per-node=8 14_which_mesh_is_fastest.py  # NCCL on GPUs, else gloo
    python 14_which_mesh_is_fastest.py                                    # on 4, started for you
    torchrun --standalone --nproc-per-node=8 14_which_mesh_is_fastest.py --all    # all 20 meshes
    launch/two_nodes_here.sh --ranks 4 parallelism/14_which_mesh_is_fastest.py --mbit 200

The last line makes two nodes here and joins them by a cable of 200 Mbit/s. Not run on several GPUs.

**Try.** In `messages` write `2 * layers` for `4 * layers`, as if the backward pass sent nothing:
which claims fail? In `predict` leave out `costs.alone *`: which ones now?

**Before.** parallelism/13_gpt_by_library.py: a GPT on a mesh. communication/04_alpha_beta.py: alpha
and beta.

**Next.** parallelism/15_is_it_right.py: how to know that such a run is right.
"""

import argparse
import ctypes
import itertools
import json
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: B sequences per step, T tokens each, D model width, H heads, K features of each; a small
# letter is a rank's share.
SIZES = {  # --size: B, T, D, H, LAYERS; the names say about how many parameters that makes
    "tiny": (16, 64, 128, 16, 8),
    "125m": (16, 1024, 768, 16, 16),
    "1b": (16, 2048, 2048, 16, 24),
    "8b": (16, 4096, 4096, 32, 40),
}
B, T, D, H, LAYERS = SIZES["tiny"]
DTYPE = torch.float32  # --dtype
AXES = ("pp", "dp_replicate", "dp_shard", "tp")  # of a mesh, outermost first

# %% [markdown]
# ## 1. A step is products, messages, and waiting
#
# On any mesh, three things take time in a step:
#
#     products    FLOPs of a rank / FLOP/s
#     messages    for each call along an axis: alpha + bytes / beta
#     waiting     p stages and m micro-batches make m + p - 1 slots; a stage idles in p - 1 of them
#
# FLOPs, calls and bytes follow from the mesh (section 2). What is left are three numbers of the
# machine: the **FLOP/s** of a rank, and **alpha** and **beta** of a call, its seconds however small
# it is and its bytes per second. Near ranks share NVLink or a memory, far ones a cable. So alpha
# and beta are measured for each **kind** of call: the operation, how many ranks make it, and how
# far apart they are (on pp 2 x tp 4, ranks 0 and 4 are neighbors along pp). This takes seconds.
# Then every mesh is predicted without being run.
#
# **Ranks that share cores** need one correction. A GPU whose rank waits is idle. On two cores, the
# core of a rank that waits goes to another rank. So a step takes the longer of two times: the
# *work* of all ranks, with all of them at it; and the *chain* of slots, one after another, in which
# fewer ranks compete and a product takes only `alone` of its time: about 1/4 for eight ranks on two
# cores, 1 on GPUs.


# %%
def predict(layout: "Layout", costs: "Costs") -> dict[str, float]:
    """Return the seconds of a step, by what they are spent on."""
    seconds = dict.fromkeys(("products", *AXES), 0.0)
    seconds["products"] = B * T * LAYERS * layer_flops() / math.prod(layout) / costs.flops
    for message in messages(layout, layout.pp // 2):  # of a stage in the middle
        alpha, beta = costs.lines[kind_of(message, layout)]
        seconds[message.axis] += message.calls * (alpha + message.nbytes / beta)
    work = sum(seconds.values())
    slots = (2 * layout.pp - 1) / layout.pp  # (m + p - 1) / m, as m = p here
    chain = slots * (costs.alone * seconds["products"] + seconds["tp"] + seconds["pp"])
    chain += seconds["dp_replicate"] + seconds["dp_shard"]
    seconds["waiting"] = max(chain - work, 0.0)
    return seconds


class Layout(NamedTuple):
    """How many ranks a mesh has along each axis, outermost first."""

    pp: int = 1
    dp_replicate: int = 1  # copies of the shards
    dp_shard: int = 1  # FSDP
    tp: int = 1


Kind = tuple[str, int, int]  # of a call: operation, ranks of a group, their distance


class Costs(NamedTuple):
    """The three numbers of a machine."""

    flops: float  # FLOP/s of a rank, while all ranks compute
    alone: float  # seconds of a product while no other rank computes / while all do
    lines: dict[Kind, tuple[float, float]]  # alpha in seconds, beta in bytes per second


def kind_of(message: "Message", layout: Layout) -> Kind:
    at = AXES.index(message.axis)
    return message.operation, layout[at], math.prod(layout[at + 1 :])


# %% [markdown]
# ## 2. What each axis sends
#
# b is the number of sequences in a micro-batch, B / (dp x m). Here m = p, the fewest that let all
# stages be at work; real runs take more (07_pipeline_schedules.py). So on every mesh a rank
# computes LAYERS layers per step, each on an equal share. **Meshes differ in messages and waiting,
# not in products.** A layer has 12 D^2 numbers in matrices, which tp splits, and 2 D in norms:
#
#     axis          sent                                     calls per step    numbers of each
#     tp            activations: gathered                    4 m per layer     b T D
#                   activations: reduce-scattered            4 m per layer     b T D
#                   gradients of the norms: all-reduced      2 per layer       D
#     pp            activations, gradients: to a neighbor    m per neighbor    b T D / tp
#     dp_shard      weights: gathered                        1 per layer       12 D^2 / tp + 2 D
#                   gradients: reduce-scattered              1 per layer       12 D^2 / tp + 2 D
#     dp_replicate  gradients: all-reduced                   1 per layer       of a shard
#
# Only tp and pp send more if there are more tokens. (FSDP keeps what it has gathered until the step
# is over, as torchtitan has it do under a pipeline; so m does not show in its rows.)


# %%
class Message(NamedTuple):
    """Equal calls of a collective, or sends, along an axis."""

    axis: str
    operation: str
    calls: int  # per step
    nbytes: int  # of each: of the tensor that the whole group has


def messages(layout: Layout, s: int) -> list[Message]:
    """Return what a rank of stage s sends in a step."""
    pp, copies, shards, tp = layout
    m = pp  # micro-batches
    layers = LAYERS // pp
    activation = B // (copies * shards * m) * T * D * DTYPE.itemsize
    layer = layer_numbers(tp) * DTYPE.itemsize
    passes = m * 4 * layers  # attention and MLP, forward and backward
    neighbors = int(s > 0) + int(s < pp - 1)
    found = [
        Message("tp", "all_gather", passes, activation),
        Message("tp", "reduce_scatter", passes, activation),
        Message("tp", "all_reduce", 2 * layers, D * DTYPE.itemsize),
        Message("pp", "send", m * neighbors, activation // tp),
        Message("dp_shard", "all_gather", layers, layer),
        Message("dp_shard", "reduce_scatter", layers, layer),
        Message("dp_replicate", "all_reduce", layers, layer // shards),
    ]
    return [message for message in found if getattr(layout, message.axis) > 1]


def layer_numbers(tp: int) -> int:
    return 12 * D * D // tp + 2 * D


def layer_flops() -> int:
    """Return the FLOPs of a layer for a token, there and back; of attention the causal half."""
    return 6 * 12 * D * D + 6 * D * T  # 17_planning_time.py


def state_bytes(layout: Layout) -> int:
    """Return what a rank holds of weights, gradients and AdamW's two moments."""
    numbers = LAYERS // layout.pp * layer_numbers(layout.tp) // layout.dp_shard
    return 4 * numbers * DTYPE.itemsize


# %% [markdown]
# ## 3. Three meshes by hand, on two machines
#
# Say that a rank has 8 GFLOP/s, and that a call costs 1 ms + bytes / 200 MB/s. A token costs 8 x
# 1.229 MFLOPs, so a step of 1,024 tokens costs each of eight ranks 1.258 GFLOPs, or 0.157 s:
#
#                                                              seconds of a step
#                 products   calls        bytes                2 cores   8 cores
#     dp_shard 8  0.157      16  0.016    12.6 MB  0.063       0.236     0.236
#     tp 8        0.157      80  0.080    33.6 MB  0.168       0.405     0.405
#     pp 8        0.157      16  0.016     1.0 MB  0.005       0.179     0.335
#
# With a core for each rank, pp 8 waits: 15 slots instead of 8 turn 0.179 s into 0.335 s. On two
# cores the 15 slots take less time than the work of all ranks. **So the mesh that is the fastest on
# two cores need not be the fastest on eight GPUs.** Nor on two nodes that a slow cable joins:

# %%
FEW = {  # the meshes of so many ranks that are run without --all
    2: [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)],
    4: [(4, 1, 1, 1), (1, 1, 4, 1), (1, 1, 1, 4), (2, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2)],
    8: [(8, 1, 1, 1), (1, 1, 8, 1), (1, 1, 1, 8), (2, 1, 1, 4), (1, 2, 1, 4), (1, 1, 2, 4)],
    16: [(8, 1, 2, 1), (1, 1, 16, 1), (1, 1, 1, 16), (2, 1, 1, 8), (1, 2, 1, 8), (1, 1, 2, 8)],
}


def made_up(alone: float, alpha: float, beta: float) -> Costs:
    return Costs(8e9, alone, defaultdict(lambda: (alpha, beta)))


def check_by_hand() -> None:
    """Claim what follows from made-up numbers, for 8 ranks of which 4 are on either node."""
    for cores, expected in ((2, 1), (8, 15 / 8)):
        seconds = predict(Layout(pp=8), made_up(cores / 8, 0.0, math.inf))
        text = f"pp 8 on {cores} cores: seconds / without idle slots"
        found = sum(seconds.values()) / seconds["products"]
        claim(text, expected, found, atol=1e-9, question=3, kind="theory")
    cable = made_up(0.25, 1e-3, 200e6)
    for operation in OPERATIONS:
        cable.lines[operation, 2, 4] = (1e-3, 5e6)
        cable.lines[operation, 8, 1] = (1e-3, 5e6)
    tp, pp, copies, shard = [sum(predict(Layout(*at), cable).values()) for at in FEW[8][2:]]
    best = min(tp, pp, copies, shard)
    claim("slow cable: pp across / the best axis, seconds", 1, pp / best, question=5, kind="theory")
    claim("slow cable: tp across / pp across, seconds", 20.36, tp / pp, atol=0.01, kind="theory")


# %% [markdown]
# ## 4. The three numbers, measured with all ranks at work
#
# **FLOP/s**: all ranks compute a layer, forward and backward, on a share as large as on any mesh.
# What ranks take from one another is then part of the number, and so is the time that torch needs
# for each call. Rank 0 does it once more while the others wait, which gives `alone`.
#
# **Alpha and beta**: two sizes of a message make a line. All groups of a kind call at once, as in a
# step: four pairs that share a cable get a quarter of it each.


# %%
def measure_costs(layouts: list[Layout], device: torch.device) -> Costs:
    """Return the three numbers of this machine, as far as the layouts need them."""
    mesh = make_mesh(Layout(pp=WORLD_SIZE), device)  # tp and dp have one rank each
    layer = on_mesh(1, mesh, device)
    x_bTD = torch.randn(B // WORLD_SIZE, T, D).to(device, DTYPE).requires_grad_()
    work = partial(forward_backward, layer, x_bTD)
    together = seconds_of(work, device, calls=5)
    alone = seconds_of(work if RANK == 0 else lambda: None, device, calls=5)
    kinds = set()
    for layout in layouts:
        kinds.update(kind_of(message, layout) for message in messages(layout, layout.pp // 2))
    lines = {kind: measure_line(kind, device) for kind in sorted(kinds)}
    return Costs(len(x_bTD) * T * layer_flops() / together, alone / together, lines)


def forward_backward(layer: nn.Module, x_bTD: torch.Tensor) -> None:
    layer(x_bTD).sum().backward()


def measure_line(kind: Kind, device: torch.device) -> tuple[float, float]:
    """Return alpha and beta of a call, which all groups of the kind make at once."""
    operation, ranks, distance = kind
    shape = (WORLD_SIZE // (ranks * distance), ranks, distance)
    mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("outer", "group", "inner"))
    small, large = (2**12, 2**20) if device.type == "cpu" else (2**16, 2**26)
    seconds = {}
    for nbytes in (small, large):
        whole = torch.zeros(nbytes // 4, device=device)
        work = partial(call, operation, whole, mesh["group"].get_group())
        seconds[nbytes] = seconds_of(work, device, calls=3)
    beta = (large - small) / max(seconds[large] - seconds[small], 1e-9)
    return max(seconds[small] - small / beta, 0.0), beta


def call(operation: str, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Make one call; `whole` is the tensor of the group, of which a rank has a part."""
    part = whole[: len(whole) // group.size()].clone()
    if operation == "all_gather":
        dist.all_gather_into_tensor(whole, part, group=group)
    elif operation == "reduce_scatter":
        dist.reduce_scatter_tensor(part, whole, group=group)
    elif operation == "all_reduce":
        dist.all_reduce(whole, group=group)
    else:  # a send to one neighbor, while another one sends to us
        peers = dist.get_process_group_ranks(group)
        sent = dist.P2POp(dist.isend, whole, peers[(group.rank() + 1) % len(peers)], group)
        received = dist.P2POp(dist.irecv, whole.clone(), peers[group.rank() - 1], group)
        for work in dist.batch_isend_irecv([sent, received]):
            work.wait()


# %% [markdown]
# ## 5. The layers on a mesh
#
# They come there as in 13_gpt_by_library.py: cut along pp, split along tp, sharded along dp, then
# the optimizer. Embedding and head are left out; they would make the first and the last stage
# exceptions. Layers are made on the meta device, where they have shapes and no memory, so that no
# rank holds more than its part. For the clock any weights will do (launch/fsdp_surviving.py loads
# and saves real ones), and the last stage is to give zeros.


# %%
class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(D, D, bias=False)
        self.k = nn.Linear(D, D, bias=False)
        self.v = nn.Linear(D, D, bias=False)
        self.out = nn.Linear(D, D, bias=False)

    def forward(self, x_bTD: torch.Tensor) -> torch.Tensor:
        parts = [linear(x_bTD).unflatten(-1, (-1, D // H)) for linear in (self.q, self.k, self.v)]
        q_bhTK, k_bhTK, v_bhTK = [x_bThK.transpose(1, 2) for x_bThK in parts]  # h: my heads
        y_bhTK = F.scaled_dot_product_attention(q_bhTK, k_bhTK, v_bhTK, is_causal=True)
        return self.out(y_bhTK.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(D)
        self.attention = Attention()
        self.norm2 = nn.RMSNorm(D)
        up = nn.Linear(D, 4 * D, bias=False)
        down = nn.Linear(4 * D, D, bias=False)
        self.mlp = nn.Sequential(up, nn.GELU(), down)

    def forward(self, x_btD: torch.Tensor) -> torch.Tensor:
        x_btD = x_btD + self.attention(self.norm1(x_btD))
        return x_btD + self.mlp(self.norm2(x_btD))


COLUMNS = parallel.ColwiseParallel()
ROWS = parallel.RowwiseParallel(output_layouts=Shard(1))
NORM = parallel.SequenceParallel()  # between attention and MLP a rank has T / tp of the tokens
GATHER = parallel.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
PLAN = {"norm1": NORM, "attention": GATHER, "attention.out": ROWS}
PLAN |= {f"attention.{name}": COLUMNS for name in "qkv"}
PLAN |= {"norm2": NORM, "mlp": GATHER, "mlp.0": COLUMNS, "mlp.2": ROWS}


def make_mesh(layout: Layout, device: torch.device) -> dist.DeviceMesh:
    return dist.init_device_mesh(device.type, layout, mesh_dim_names=AXES)


def on_mesh(layers: int, mesh: dist.DeviceMesh, device: torch.device) -> nn.Sequential:
    """Return a stage of so many layers, split along tp and sharded along dp."""
    with torch.device("meta"):
        stage = nn.Sequential(*[Layer() for _ in range(layers)]).to(DTYPE)
    hybrid = mesh["dp_replicate"].size() > 1
    dp = mesh["dp_replicate", "dp_shard"] if hybrid else mesh["dp_shard"]
    for layer in stage:
        parallel.parallelize_module(layer, mesh["tp"], PLAN)
        fully_shard(layer, mesh=dp, reshard_after_forward=False)
    fully_shard(stage, mesh=dp)
    stage.to_empty(device=device)
    for parameter in stage.parameters():
        parameter.detach().to_local().normal_(std=0.02)
    return stage


def train_step(optimizer: AdamW, schedule: Schedule1F1B, given: list, wanted: dict) -> None:
    optimizer.zero_grad()
    schedule.step(*given, **wanted)
    optimizer.step()


# %% [markdown]
# ## 6. How it is measured
#
# **Calls and bytes** are counted beneath torch's dispatcher, where those of DTensor, FSDP and the
# pipeline pass. **Memory** is what a rank holds after a step. The first step is not counted: in it
# the stages tell each other shapes. **Seconds** are the median of three, of the slowest rank.

# %%
OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "send")


class CallLog(TorchDispatchMode):
    """Records the operation and the bytes of each call that this rank makes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its local tensors come by in a moment
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.replace("_", "")
        for operation in OPERATIONS:
            if "c10d" in name and operation.replace("_", "") in name:
                both = tree_leaves((args, result))
                whole = max(leaf.nbytes for leaf in both if isinstance(leaf, torch.Tensor))
                self.calls.append((operation, whole))
        return result


class Run(NamedTuple):
    """What this rank has seen of a mesh."""

    stage: int
    calls: list[tuple[str, int]]  # of a step
    held: int  # bytes
    seconds: float  # of a step


def run_mesh(layout: Layout, device: torch.device) -> Run:
    mesh = make_mesh(layout, device)
    group = mesh["pp"].get_group()
    s = group.rank()
    stage = on_mesh(LAYERS // layout.pp, mesh, device)
    optimizer = AdamW(stage.parameters(), fused=True)
    pipeline_stage = PipelineStage(stage, s, layout.pp, device, group=group)
    schedule = Schedule1F1B(pipeline_stage, n_microbatches=layout.pp, loss_fn=F.mse_loss)
    sequences = B // (layout.dp_replicate * layout.dp_shard)
    x_btD = torch.randn(sequences, T // layout.tp, D).to(device, DTYPE)
    given = [x_btD] if s == 0 else []
    wanted = {"target": torch.zeros_like(x_btD)} if s == layout.pp - 1 else {}
    step = partial(train_step, optimizer, schedule, given, wanted)
    step()
    with CallLog() as log:
        step()
    held = 0
    for parameter, state in optimizer.state.items():
        for tensor in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]):
            held += tensor.to_local().nbytes
    return Run(s, log.calls, held, seconds_of(step, device))


def seconds_of(work: Callable, device: torch.device, calls: int = 1) -> float:
    """Return the seconds of one of so many calls in a row."""
    times = []
    for _ in range(3):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / calls)
    slowest = torch.tensor(median(times), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


# %% [markdown]
# Counts are exact, and the claims add them up over all meshes that were run.


# %%
def check_counts(runs: dict[Layout, Run]) -> None:
    """Claim what this rank sent and held."""
    expected = Counter()
    sent = Counter()
    for layout, run in runs.items():
        for message in messages(layout, run.stage):
            expected[message.operation] += message.calls * message.nbytes
            expected["calls"] += message.calls
        for operation, nbytes in run.calls:
            sent[operation] += nbytes
            sent["calls"] += 1
    for operation in OPERATIONS:
        claim(f"{operation}: bytes of a step, all meshes", expected[operation], sent[operation])
    claim("calls of a step, all meshes", expected["calls"], sent["calls"])
    states = sum(state_bytes(layout) for layout in runs)
    claim("bytes held, all meshes", states, sum(run.held for run in runs.values()))


def check_axes(runs: dict[Layout, Run]) -> None:
    """Claim two comparisons between axes."""
    tp = sum(nbytes for _, nbytes in runs[Layout(tp=WORLD_SIZE)].calls)
    shard = sum(nbytes for _, nbytes in runs[Layout(dp_shard=WORLD_SIZE)].calls)
    by_hand = (8 * B * T + 2) / (24 * D + 4)  # numbers per layer, over D
    claim("tp / dp_shard: bytes of a step", by_hand, tp / shard, question=1)
    half = WORLD_SIZE // 2
    held = runs[Layout(1, 2, 1, half)].held / runs[Layout(1, 1, 2, half)].held
    claim("dp_replicate 2 / dp_shard 2: bytes held", 2, held, question=2)


# %% [markdown]
# **Rank correlation** (Spearman) is 1 if two orders are the same and 0 if they have nothing to do
# with each other. **MFU** is the model's FLOPs over what the ranks could do in that time at the
# FLOP/s of section 4, not at a data sheet's.


# %%
def rank_correlation(one: list[float], other: list[float]) -> float:
    places = [torch.tensor(values).argsort().argsort() for values in (one, other)]
    return torch.corrcoef(torch.stack(places).double())[0, 1].item()


def show(runs: dict[Layout, Run], costs: Costs) -> None:
    """Print the three numbers, and where the seconds of each mesh should go."""
    print0(f"\n  a rank: {costs.flops / 1e9:.2f} GFLOP/s, alone / together {costs.alone:.2f}")
    for (operation, ranks, distance), (alpha, beta) in costs.lines.items():
        kind = f"{operation}, {ranks} ranks, {distance} apart"
        print0(f"  {kind:36}{alpha * 1e3:8.2f} ms {beta / 1e6:9,.0f} MB/s")
    print0(f"\n  {' x '.join(AXES)}:")
    print0(f"{'':9}ms in {' + '.join(('products', *AXES, 'waiting'))}")
    print0(f"{'':9}= predicted, measured, tokens/s, MFU")
    for layout, run in runs.items():
        parts = predict(layout, costs)
        shown = " + ".join(f"{1e3 * seconds:4.0f}" for seconds in parts.values())
        shown += f" = {1e3 * sum(parts.values()):5.0f}, {1e3 * run.seconds:5.0f}"
        tokens = B * T / run.seconds
        mfu = parts["products"] / run.seconds
        print0(f"  {'x'.join(map(str, layout))}  {shown}{tokens:9,.0f}{mfu:6.0%}")
    print0()


def check_times(runs: dict[Layout, Run], costs: Costs) -> None:
    """Claim how well the order of the meshes was predicted, and their seconds."""
    if len(runs) < 6:
        blocked("rank correlation of predicted and measured", needs="4 ranks, which have 6 meshes")
        return
    predicted = [sum(predict(layout, costs).values()) for layout in runs]
    measured = [run.seconds for run in runs.values()]
    correlation = rank_correlation(predicted, measured)
    text = "rank correlation of predicted and measured"
    claim(text, 0.7, correlation, ">=", question=4, timed=True)
    first = measured[predicted.index(min(predicted))] / min(measured)
    claim("predicted first / measured first, seconds", 1.1, first, "<=", timed=True)
    ratio = median(m / p for m, p in zip(measured, predicted, strict=True))
    claim("measured / predicted, median", 1, ratio, atol=0.6, timed=True)


def check_cable(runs: dict[Layout, Run], costs: Costs) -> None:
    """Claim what tp across the cable of two nodes costs more than pp across."""
    text = "cable: tp across less pp across, / predicted"
    if int(os.environ["LOCAL_WORLD_SIZE"]) == WORLD_SIZE:
        blocked(text, needs="8 ranks on two nodes")
        return
    tp = Layout(tp=WORLD_SIZE)
    pp = Layout(pp=2, tp=WORLD_SIZE // 2)
    expected = sum(predict(tp, costs).values()) - sum(predict(pp, costs).values())
    found = runs[tp].seconds - runs[pp].seconds
    claim(text, 1, found / expected, atol=0.25, kind="simulated", timed=True)


# %% [markdown]
# ## What you should have seen
#
# 1. 2.7, from 33.6 and 12.6 MB. A layer's activations are sent eight times, its weights and
#    gradients once each. But activations grow with the batch: with a quarter of the tokens, tp
#    sends less.
# 2. Twice as many. dp_replicate holds everything twice, and saves the gather of the weights.
# 3. As long: the factor is 1. A rank that waits leaves its core to another one. With a core for
#    each rank, as on GPUs, it is 15/8.
# 4. Above 0.7. No mesh was run for the prediction, only a layer and a few calls.
# 5. pp. An activation crosses once there and once back, while along tp eight are sent per layer.
#    Across a cable of 5 MB/s, tp 8 takes 20 times as long as pp 2 x tp 4.
#
# With `--all`, eight ranks on two cores, the order is predicted less well, and the claims of time
# may FAIL: pipelines take far longer than predicted, which their messages do not explain.
#
# **Try.** With `2 * layers` four claims fail: the bytes of all_gather and of reduce_scatter, the
# calls, and tp across / pp across. The ratio of question 1 holds, since it was written by hand.
# Without `costs.alone *` two fail, pp 8 on 2 cores and tp across / pp across: both pipelines then
# wait as if each rank had a core for itself.
#
# **What is not in it.** The optimizer's step, FSDP's copies into its buffers and out of them, a
# rank that is late. Embedding and head, which make some stages slower than others. And overlap: on
# cores that ranks share there is none, for a message needs a core as well.
#
# **On GPUs** (not run) `alone` is 1, and pipelines wait. FSDP gathers the next layer's weights
# while this one computes, so that dp costs less than the prediction says; 17_planning_time.py
# subtracts what is hidden. Take a larger `--size` there, or all you see is alpha. For 1,024 ranks
# there are 286 meshes. Two nodes are enough to measure most kinds of calls; run the best three.
#
# **When.** Before a long run, and when a cluster or its cable changes. Not for a model that trains
# well on one node with FSDP alone. Which meshes fit is the question that comes before
# (16_planning_memory.py).


# %%
def all_meshes() -> list[Layout]:
    """Return all meshes of these ranks with layers for each stage; heads are enough for 16."""
    sizes = itertools.product(range(1, WORLD_SIZE + 1), repeat=len(AXES))
    found = [Layout(*layout) for layout in sizes if math.prod(layout) == WORLD_SIZE]
    return [layout for layout in found if LAYERS % layout.pp == 0]


def main() -> None:
    global B, T, D, H, LAYERS, DTYPE
    every = {"action": "store_true", "help": "all meshes of these ranks, not six of them"}
    size = {"choices": list(SIZES), "default": "tiny", "help": "about so many parameters"}
    dtype = {"choices": ["float32", "bfloat16"], "default": "float32", "help": "of all"}
    mbit = {"type": int, "help": "of the cable that launch/two_nodes_here.sh makes"}
    options = command_line({"--all": every, "--size": size, "--dtype": dtype, "--mbit": mbit})
    launch(list(FEW))
    if WORLD_SIZE not in FEW:
        refuse(f"needs 2, 4, 8 or 16 ranks, got {WORLD_SIZE}: all is split into halves")
    B, T, D, H, LAYERS = SIZES[options.size]
    DTYPE = getattr(torch, options.dtype)
    if options.mbit and os.environ["LOCAL_RANK"] == "0":  # each node throttles its own end
        limit = f"tbf rate {options.mbit}mbit burst 64kb latency 100ms"
        subprocess.run(f"tc qdisc add dev cable root {limit}".split(), check=True)
    device = setup()
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # no in-place operation here
    layouts = all_meshes() if options.all else [Layout(*sizes) for sizes in FEW[WORLD_SIZE]]
    costs = measure_costs(layouts, device)
    runs = {layout: run_mesh(layout, device) for layout in layouts}
    show(runs, costs)
    check_counts(runs)
    check_axes(runs)
    if options.size == "tiny" and options.dtype == "float32":
        check_by_hand()
    check_times(runs, costs)
    check_cable(runs, costs)
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
