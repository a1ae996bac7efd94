"""A DeepSpeed config, key by key: what each key changes, and which do not do what they say
========================================================================================

**Question.** DeepSpeed is steered by a file of keys. What does each key change, and which of them
do something else than their name says, or nothing at all?

**Predict**, and write it down before you run. The model is the GPT of fsdp/01_fsdp_basics.py.

1. `train_micro_batch_size_per_gpu` is 2 and `gradient_accumulation_steps` is 2. How many sequences
   does one update see on n ranks?
2. The optimizer's `type` is `"Adam"`, with weight decay. Does the decay go through Adam's moments,
   as in `torch.optim.Adam`, or straight to the weights, as in AdamW?
3. The config has no key `gradient_clipping`. To what norm is a long gradient clipped? (This
   changed in July 2026, with DeepSpeed 0.19.3.)
4. Stages 0 to 3, and stage 2 with its optimizer on the CPU: by how much do losses and gradient
   norms differ from those of one process?
5. P elements of gradients go through a `reduce_bucket_size` of 100,000. How many all-reduces is
   that? And how many all-gathers are there with an `allgather_bucket_size` of P/100, about 2,000?
6. Stage 3, and `stage3_max_live_parameters` is 0. How many all-gathers does
   `stage3_prefetch_bucket_size` save?

**Run.**

    torchrun --standalone --nproc-per-node=4 02_deepspeed_config.py   # NCCL on 4 GPUs, else gloo
    python 02_deepspeed_config.py                                     # the same, started for you
    deepspeed --num_gpus 4 02_deepspeed_config.py    # its own launcher; no GPU: DS_ACCELERATOR=cpu

Not run on several GPUs.

**Try.** Write `"adam_w_mode": True` where it says False: what fails? Set
`stage3_max_live_parameters` to 10**9 in `ZERO3_OPTIONS`: what fails, and why?

**Before.** parallelism/02_fsdp_zero.py: the stages of ZeRO. fsdp/01_fsdp_basics.py: the GPT.

**Next.** fsdp/03_deepspeed_bytes.py: what the stages hold and communicate.
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
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: B sequences, T tokens in each, D model width, V different tokens, L blocks, H heads of K
# features. P is the number of parameters, n the number of ranks.

# %% [markdown]
# ## 1. The engine: a config goes in, a training loop of three calls comes out
#
# With PyTorch you write the training loop. With DeepSpeed you write a config, and
# `deepspeed.initialize` returns an **engine** around your model that does the rest:
#
#     you write                     PyTorch and FSDP2                 DeepSpeed's engine
#     loss = model(x)               forward                           forward
#     loss.backward()               divide by micro-batches;          engine.backward(loss)
#                                   set_requires_gradient_sync
#     clip_grad_norm_(...)          every step                        \
#     optimizer.step()              every step                         | engine.step(): on the last
#     scheduler.step()              every step                         | micro-batch all of this,
#     optimizer.zero_grad()         every step                        /  on the others nothing
#
# So the config must say what a batch is. Three keys are tied by one equation, and the engine
# derives the third from two of them:
#
#     train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x n
#
# Sizes in a config are *elements*, never bytes, except the batch sizes, which are sequences. Every
# key of this lesson, with its default, is in fsdp/README.md.

# %%
ADAMW = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}  # as in torch
COMMON: dict = {
    "train_micro_batch_size_per_gpu": 2,  # sequences in one forward pass; the loader is yours
    "gradient_accumulation_steps": 2,  # backward passes per update; gradients are averaged
    "gradient_clipping": 1.0,  # largest norm of the whole gradient
    "bf16": {"enabled": True},  # compute in bfloat16, keep float32 masters
    "optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},  # not a compiled one
}


def start_engine(deepspeed: ModuleType, device: torch.device, config: dict) -> nn.Module:
    """Return DeepSpeed's engine around a new GPT."""
    engine, _optimizer, _loader, _scheduler = deepspeed.initialize(
        model=new_gpt(device), config=config
    )
    return engine


def train_engine(engine: nn.Module, x_BT: torch.Tensor, steps: int) -> list[tuple[float, float]]:
    """Return each step's loss and norm of the gradient; `x_BT` is every micro-batch."""
    seen = []
    for _ in range(steps):
        for _ in range(engine.gradient_accumulation_steps()):
            loss = mean_loss(engine, x_BT)
            engine.backward(loss)
            norm = gradient_norm(engine)
            engine.step()  # does nothing before the last micro-batch of a step
        if engine.get_global_grad_norm() is not None:
            norm = float(engine.get_global_grad_norm())
        seen.append((loss.item(), norm))
    return seen


def check_batch_size(deepspeed: ModuleType, device: torch.device) -> None:
    engine = start_engine(deepspeed, device, COMMON)
    claim("sequences per update", 2 * 2 * WORLD_SIZE, engine.train_batch_size(), question=1)
    engine.destroy()


# %% [markdown]
# ## 2. The optimizer: "Adam" is AdamW
#
# The key `optimizer` names an optimizer that DeepSpeed builds. `"AdamW"` is what it says. `"Adam"`
# is AdamW *too*, unless its `params` say `"adam_w_mode": false`; so a job that is moved from
# `torch.optim.Adam` changes what its weight decay means, silently.
#
# To see it, look at a weight that has no gradient: the embedding of a byte that never occurs. Only
# weight decay moves it. With decay c and learning rate lr, per step:
#
#     AdamW (decoupled)   w <- w - lr c w            shrinks by the factor 1 - lr c
#     Adam (L2)           g = c w goes into the moments, and Adam divides by its size:
#                         w <- w - lr sign(w)        every element moves by lr, however large c is
#
# That is the reason for AdamW (Loshchilov and Hutter, 2019).


# %%
def decayed_embedding(deepspeed: ModuleType, device: torch.device, **params: object) -> tuple:
    """Return the unused embeddings before and after three steps of type "Adam"."""
    adam = {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True, **params}
    config = in_float32(COMMON) | {"optimizer": {"type": "Adam", "params": adam}}
    engine = start_engine(deepspeed, device, config)
    before = engine.module.token.weight[128:].detach().clone()
    train_engine(engine, random_ascii(device, RANK), steps=3)
    after = engine.module.token.weight[128:].detach().clone()
    engine.destroy()
    return before, after


def check_adam_is_adamw(deepspeed: ModuleType, device: torch.device) -> None:
    before, after = decayed_embedding(deepspeed, device)
    shrunk = (after.norm() / before.norm()).item()
    claim("type Adam: unused weights shrink to", (1 - 1e-3) ** 3, shrunk, atol=1e-6, question=2)
    before, after = decayed_embedding(deepspeed, device, adam_w_mode=False)
    moved = (after - before).abs().median().item()
    claim("with adam_w_mode false: they move by", 3 * 1e-2, moved, atol=1e-4, question=2)


# %% [markdown]
# ## 3. Clipping: a default that has changed, so write the key
#
# Since DeepSpeed 0.19.3 (July 2026) a config without `gradient_clipping` clips at a norm of 1.0; to
# switch that off, say 0. Up to 0.19.2 the default was 0: such a config did not clip, and most
# tutorials still say so. The same file trains differently before and after an upgrade, so always
# write the key. (This course asks for 0.19.4 or newer.)
#
# Plain SGD with learning rate 1 shows it: the weights move by just the gradient, so the length of a
# step is the norm that is left. The loss is made 100 times larger so that there is something to
# clip.


# %%
def step_length(deepspeed: ModuleType, device: torch.device, config: dict) -> tuple[float, float]:
    """Return the norm of the gradient, and how far one step of SGD moved the weights."""
    engine = start_engine(deepspeed, device, config)
    before = [p.detach().clone() for p in engine.module.parameters()]
    engine.backward(100 * mean_loss(engine, random_ascii(device, RANK)))
    norm = gradient_norm(engine)
    engine.step()
    moves = [a.detach() - b for a, b in zip(engine.module.parameters(), before, strict=True)]
    engine.destroy()
    return norm, nn.utils.get_total_norm(moves).item()


def check_clipping(deepspeed: ModuleType, device: torch.device) -> None:
    config = in_float32(COMMON) | {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    del config["gradient_clipping"]
    _, moved = step_length(deepspeed, device, config)
    claim("no gradient_clipping: norm of a step", 1, moved, atol=1e-4, question=3)
    norm, moved = step_length(deepspeed, device, config | {"gradient_clipping": 0})
    claim("gradient_clipping 0: norm of a step / gradient's", 1, moved / norm, atol=1e-4)


# %% [markdown]
# ## 4. zero_optimization: the stage changes no value
#
# The key `stage` says what is sharded: 1 the optimizer state, 2 gradients too, 3 parameters too
# (fsdp/03_deepspeed_bytes.py counts it). With `offload_optimizer` the masters and moments live in
# the host's memory, and the CPU updates them (Ren et al. 2021). None of it may change what is
# learned.
#
# Stages 1 and 2 lay all tensors end to end in one flat buffer and cut that into n parts; gradients
# are reduced in **buckets** of neighboring tensors. Stage 3 flattens and cuts every tensor by
# itself, and gathers tensors as the modules need them. So each has keys of its own. Their values
# here suit this small model, so that it has several buckets and frees what it has gathered; they
# would cripple a large one. The files in fsdp/deepspeed_configs have DeepSpeed's defaults.

# %%
BUCKET = 100_000
FLAT_OPTIONS = {  # stages 1 and 2
    "reduce_bucket_size": BUCKET,  # elements of gradients reduced together
    "allgather_bucket_size": BUCKET,  # by its name: updated parameters gathered together
    "use_multi_rank_bucket_allreduce": True,  # a bucket with several owners: all-reduce it whole
}
ZERO3_OPTIONS = {
    "reduce_bucket_size": BUCKET,
    "stage3_prefetch_bucket_size": 10_000,  # elements fetched ahead of use
    "stage3_param_persistence_threshold": 0,  # tensors smaller than this stay whole
    "stage3_max_live_parameters": 0,  # free what exceeds this many gathered elements,
    "stage3_max_reuse_distance": 0,  # unless it is used again within so many elements
}
ZERO = [  # the config of each stage
    COMMON | {"zero_optimization": {"stage": 0}},
    COMMON | {"zero_optimization": {"stage": 1, **FLAT_OPTIONS}},
    COMMON | {"zero_optimization": {"stage": 2, **FLAT_OPTIONS}},
    COMMON | {"zero_optimization": {"stage": 3, **ZERO3_OPTIONS}},
]


def with_zero_options(stage: int, **options: object) -> dict:
    """Return a stage's config with some of its zero_optimization keys changed."""
    return ZERO[stage] | {"zero_optimization": ZERO[stage]["zero_optimization"] | options}


def in_float32(config: dict) -> dict:
    """Return a config that computes in float32, one micro-batch per step."""
    return config | {"bf16": {"enabled": False}, "gradient_accumulation_steps": 1}


def check_values(deepspeed: ModuleType | None, device: torch.device, configs: dict) -> None:
    """Claim that FSDP2 and every config train like one process."""
    x_BT = random_ascii(device, RANK)
    all_BT = torch.cat([random_ascii(device, rank) for rank in range(WORLD_SIZE)])
    expected = train_torch(new_gpt(device), all_BT, steps=3)
    mesh = init_device_mesh(device.type, (WORLD_SIZE,))
    model = new_gpt(device)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    compare("FSDP2", train_torch(model, x_BT, steps=3), expected, device)
    if deepspeed is None:
        return
    for name, config in configs.items():
        engine = start_engine(deepspeed, device, in_float32(config))
        seen = train_engine(engine, x_BT, steps=3)
        engine.destroy()
        compare(name, seen, expected, device)


# %% [markdown]
# ## 5. Keys that decide how many messages there are
#
# `reduce_bucket_size` does what it says: P elements go in P / bucket all-reduces. Fewer, larger
# messages cost less latency, but such a buffer is allocated, and reduction can begin only when a
# bucket is full. The default of 5e8 elements takes 1 GB in bfloat16.
#
# `allgather_bucket_size` does nothing today. DeepSpeed splits the all-gather of updated parameters
# by it only where torch lacks `all_gather_into_tensor`, and every torch since 1.13 has that. All
# parameters travel in one all-gather, whatever the key says.
#
# `stage3_prefetch_bucket_size` fetches tensors ahead of their use, several in one all-gather. But
# it never fetches more than `stage3_max_live_parameters` leaves room for. A config that sets this
# to 0 in order to save memory has switched prefetching off, without a word:
#
#     max_live_parameters = 0        gather a | use a, free a | gather b | use b, free b | ...
#     max_live_parameters = 100,000  gather a | gather b c d, use a | use b | gather e f, use c ...


# %%
def count_step(deepspeed: ModuleType, device: torch.device, config: dict) -> "CountedCommunication":
    """Return what the second step of a config hands to collectives."""
    engine = start_engine(deepspeed, device, config)
    x_BT = random_ascii(device, RANK)
    train_engine(engine, x_BT, steps=1)  # from which stage 3 learns the order of use
    with CountedCommunication() as counted:
        train_engine(engine, x_BT, steps=1)
    engine.destroy()
    return counted


def check_messages(deepspeed: ModuleType, device: torch.device) -> None:
    if WORLD_SIZE == 1:
        blocked("messages of a step", needs="2 ranks")
        return
    P = sum(p.numel() for p in GPT().parameters())
    for size in (BUCKET, 10 * BUCKET):
        config = with_zero_options(1, reduce_bucket_size=size, allgather_bucket_size=2_000)
        counted = count_step(deepspeed, device, config)
        reduces = large_calls(counted, "all_reduce")
        claim(f"buckets of {size:,}: all-reduces", math.ceil(P / size), reduces, question=5)
    gathers = large_calls(counted, "all_gather")
    claim("allgather_bucket_size 2,000: all-gathers", 1, gathers, question=5)

    # A gather for each module that holds parameters itself, forward, backward, two micro-batches.
    holders = [m for m in GPT().modules() if list(m.parameters(recurse=False))]
    expected = 2 * 2 * len(holders)
    counted = count_step(deepspeed, device, ZERO[3])
    gathers = large_calls(counted, "all_gather")
    claim("stage 3, none live: all-gathers", expected, gathers, question=6)
    config = with_zero_options(3, stage3_max_live_parameters=BUCKET)
    gathers = large_calls(count_step(deepspeed, device, config), "all_gather")
    claim("stage 3, 100,000 live: all-gathers, at most", 0.75 * expected, gathers, "<=")
    config = with_zero_options(3, stage3_max_live_parameters=BUCKET, stage3_prefetch_bucket_size=0)
    gathers = large_calls(count_step(deepspeed, device, config), "all_gather")
    claim("the same without prefetch: all-gathers", expected, gathers)


def large_calls(counted: "CountedCommunication", operation: str) -> int:
    """Count the calls of an operation; flags and norms, which are single elements, do not count."""
    return sum(call.elements > 1 for call in counted.calls(operation))


# %% [markdown]
# ## 6. How it is measured
#
# The **oracle** is one process that sees the batches of all ranks, in float32: the same sums in
# another order. So a loss of 5.5 may be off by some roundings of 5.5 x 2**-24, say 1e-6; 1e-5 is
# allowed. A gradient n times too large would hardly change a step of Adam, which divides by its
# size, so the norms of the gradients are compared too. A rank's loss is that of its own batch;
# averaged over the ranks it must be the oracle's.


# %%
def new_gpt(device: torch.device) -> "GPT":
    torch.manual_seed(0)  # the same weights on every rank
    return GPT().to(device)


def random_ascii(device: torch.device, rank: int) -> torch.Tensor:
    """Return a rank's batch of random bytes below 128, so that half of all bytes never occur."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(128, (2, 65), generator=generator).to(device)


def mean_loss(model: Callable, x_BT: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of predicting each byte from those before it."""
    logits_BTV = model(x_BT[:, :-1])
    return F.cross_entropy(logits_BTV.flatten(0, 1), x_BT[:, 1:].flatten())


def gradient_norm(model: nn.Module) -> float:
    """Return the norm of all gradients; stage 0 in float32 keeps them and tells no norm."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return nn.utils.get_total_norm(gradients).item()


def train_torch(model: nn.Module, x_BT: torch.Tensor, steps: int) -> list[tuple[float, float]]:
    """Return each step's loss and norm of the gradient, by PyTorch alone."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    seen = []
    for _ in range(steps):
        loss = mean_loss(model, x_BT)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), COMMON["gradient_clipping"])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), norm.item()))
    return seen


def compare(name: str, ours: list, expected: list, device: torch.device) -> None:
    """Claim that losses and norms, averaged over the ranks, are those of one process."""
    mean = torch.tensor(ours, device=device) / WORLD_SIZE
    dist.all_reduce(mean)
    errors = (mean.cpu() - torch.tensor(expected)).abs().amax(0).tolist()
    claim(f"{name}: losses, error", 0, errors[0], atol=1e-5, question=4)
    claim(f"{name}: gradient norms, error", 0, errors[1], atol=1e-5, question=4)


# %% [markdown]
# The counter records every collective as it is handed to the backend. The import of DeepSpeed is
# guarded, since it would compile C++ for minutes.


# %%
class Call(NamedTuple):
    """One collective, send or receive of this rank, as it was handed to the process group."""

    operation: str  # "all_reduce", "all_gather", "reduce_scatter", "send", ...
    elements: int  # of its input or its output, whichever is larger
    nbytes: int  # of the same
    ranks: tuple[int, ...]  # of the group
    peer: int | None


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
# The GPT of fsdp/01_fsdp_basics.py, to the letter.


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
# ## What you should have seen
#
# 1. 2 x 2 x n: 16 on 4 ranks. Resume the same config on twice as many GPUs, and the batch doubles,
#    unless you give `train_batch_size` and let the engine derive the accumulation.
# 2. It is AdamW: unused weights shrink to 0.997 of themselves. With `adam_w_mode` false they move
#    by 0.03, which is the learning rate times three steps, whatever the decay is.
# 3. To 1.0 since DeepSpeed 0.19.3, and not at all before. A comparison "with and without DeepSpeed"
#    that forgets this compares clipped with unclipped training. Write the key.
# 4. By less than 1e-6, which is rounding. If a job learns differently under another stage, look for
#    a changed batch, clipping or decay, not for ZeRO.
# 5. 3 all-reduces, and 1 with a bucket ten times as large. But there is one all-gather whatever
#    `allgather_bucket_size` says: a key without effect.
# 6. None: 112 all-gathers, 28 modules forward and backward in two micro-batches, with prefetch set
#    to 10,000 elements. With room for 100,000 live elements it is half as many or fewer. On a slow
#    network those 112 waits are the step time.
#
# **Try.** With `adam_w_mode` True, unused weights shrink again instead of moving. With 10**9 live
# parameters stage 3 prefetches and keeps what it has gathered, so fewer all-gathers are made than
# section 5 derives; no value changes.
#
# **On GPUs** the same keys hold. `overlap_comm` then reduces on a stream of its own, and allocates
# a second bucket for stages 1 and 2 to do so: 2 x 5e8 elements by default. `torch_adam` false picks
# the fused CUDA Adam, which is compiled on first use.
#
# **Where it bites.** A key that is misspelt, or stands in the wrong section, is often ignored just
# as silently as `allgather_bucket_size`. Print the config that the engine has read
# (`engine.config`), and count what you meant to change.


# %% [markdown]
# The files that `--write-configs` writes are for models of billions of parameters: DeepSpeed's
# defaults, spelled out. Batch, learning rate and decay are yours to choose. They leave the choice
# of Adam to DeepSpeed, too, which compiles its own.

# %%
DEFAULTS = {
    1: {
        "reduce_bucket_size": 500_000_000,
        "allgather_bucket_size": 500_000_000,
        "use_multi_rank_bucket_allreduce": True,
    },
    3: {
        "reduce_bucket_size": 500_000_000,
        "stage3_prefetch_bucket_size": 50_000_000,
        "stage3_param_persistence_threshold": 100_000,
        "stage3_max_live_parameters": 1_000_000_000,
        "stage3_max_reuse_distance": 1_000_000_000,
    },
}
DEFAULTS[2] = DEFAULTS[1]
LARGE_ADAMW = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


def write_configs(folder: str) -> None:
    """Write configs of stages 1 to 3 for large models as files."""
    for stage in (1, 2, 3):
        optimizer = {"type": "AdamW", "params": LARGE_ADAMW}
        config = COMMON | {"optimizer": optimizer}
        config["zero_optimization"] = {"stage": stage, **DEFAULTS[stage]}
        text = json.dumps(config, indent=2) + "\n"
        Path(folder, f"zero{stage}.json").write_text(text)


def read_config(path: str) -> dict:
    """Return the lesson's config in float32 with the file's `zero_optimization`, and say so."""
    file = json.loads(Path(path).read_text())
    others = ", ".join(key for key in file if key != "zero_optimization")
    print0(f"{'':13}Of {Path(path).name} only zero_optimization is tried, in float32 and with")
    print0(f"{'':13}this lesson's batch, AdamW and clipping. Not tried: {others or 'nothing'}")
    return in_float32(COMMON) | {"zero_optimization": file.get("zero_optimization", {})}


def main() -> None:
    options = command_line(
        {
            "--deepspeed_config": {"metavar": "PATH", "help": "check only its zero_optimization"},
            "--write-configs": {"metavar": "DIR", "help": "write zero1.json to zero3.json first"},
            "--cpu-adam": {"action": "store_true", "help": "compile DeepSpeed's CPU Adam, use it"},
            "--local_rank": {"type": int, "help": "appended by deepspeed; LOCAL_RANK says it too"},
        }
    )
    launch()
    path = options.deepspeed_config
    if path and not Path(path).is_file():
        refuse(f"--deepspeed_config needs a JSON file; got {path}; see fsdp/deepspeed_configs")
    if options.write_configs and RANK == 0:
        write_configs(options.write_configs)
    os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "1"))  # by deepspeed
    device = setup()
    deepspeed = import_deepspeed(device, options.cpu_adam)
    if path:
        check_values(deepspeed, device, {Path(path).name: read_config(path)})
        finish()
    configs = {f"stage {stage}": config for stage, config in enumerate(ZERO)}
    adam = {"type": "AdamW", "params": {**ADAMW, "torch_adam": not options.cpu_adam}}
    configs["offload"] = with_zero_options(2, offload_optimizer={"device": "cpu"})
    configs["offload"] = configs["offload"] | {"optimizer": adam}
    if deepspeed is not None:
        check_batch_size(deepspeed, device)
        check_adam_is_adamw(deepspeed, device)
        check_clipping(deepspeed, device)
    check_values(deepspeed, device, configs)
    if deepspeed is None:
        blocked("what the keys change", needs="deepspeed: pip install -e '.[deepspeed]'")
    else:
        check_messages(deepspeed, device)
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
