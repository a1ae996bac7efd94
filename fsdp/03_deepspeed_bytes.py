"""DeepSpeed's ZeRO in bytes and messages: stages 0 to 3 against the formulas of the paper
=======================================================================================

**Question.** What does a rank hold, and what does it hand to collectives, in each stage of
DeepSpeed's ZeRO? Where does that leave the paper?

**Predict**, and write it down before you run. The GPT of fsdp/01_fsdp_basics.py has P parameters.
It trains in bfloat16 with Adam on n ranks, two micro-batches per step.

1. How many bytes per parameter does a rank hold after the first micro-batch, in stages 0 to 3?
2. How many elements are reduced in one step in stages 0 to 3, and how many are gathered, in
   multiples of P?
3. Stage 2 needs each gradient on one rank only. Does it communicate less than plain data
   parallelism (stage 0)? And after `use_multi_rank_bucket_allreduce` is set to false?
4. Stage 3 is told to keep what it has gathered from forward to backward. How many elements does it
   gather then?
5. Micro-batches are to be added up in float32, not in bfloat16. How many bytes per parameter does
   stage 3 hold then?
6. The optimizer is offloaded to the CPU. How many bytes per parameter does the host hold per rank?

**Run.**

    torchrun --standalone --nproc-per-node=4 03_deepspeed_bytes.py   # NCCL on 4 GPUs, else gloo
    python 03_deepspeed_bytes.py                                     # the same, started for you

Not run on several GPUs.

**Try.** Set `stage3_param_persistence_threshold` to 10**5 in `ZERO3_OPTIONS`: what fails? Replace
`use_multi_rank_bucket_allreduce=False` by `=True`: what fails?

**Before.** fsdp/02_deepspeed_config.py: the keys. parallelism/02_fsdp_zero.py: ZeRO's formulas.

**Next.** fsdp/04_fsdp_refinements.py, or fsdp/07_deepspeed_train.py if you use DeepSpeed alone.
Which strategy when: fsdp/sharding_strategies.md
"""

import argparse
import ctypes
import gc
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
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: B sequences, T tokens in each, D model width, V different tokens, L blocks, H heads of K
# features. P is the number of parameters, n the number of ranks, a the micro-batches per step.

# %% [markdown]
# ## 1. What a rank holds: 16 bytes per parameter, divided in three ways
#
# With Adam in mixed precision a parameter takes 2 bytes (bfloat16), its gradient 2, and 12 more go
# to float32: the **master** weight that the optimizer updates, and Adam's two moments, 4 bytes
# each. On 4 ranks, one rank's share (Rajbhandari et al. 2020, section 5):
#
#              weights 2P     gradients 2P    masters and moments 12P         bytes per parameter
#     stage 0  [########]     [########]      [########################]      16
#     stage 1  [########]     [########]      [######                  ]      4 + 12/4 = 7
#     stage 2  [########]     [##      ]      [######                  ]      2 + 14/4 = 5.5
#     stage 3  [##      ]     [##      ]      [######                  ]          16/4 = 4
#
# The same holds for FSDP2, with one difference. Its shards are float32, the master weights
# themselves, and so are its gradients: 4 + 4 + 8 = 16 bytes, divided by n. The bfloat16 copy exists
# only while a unit is whole, where DeepSpeed keeps a second, lasting shard of it.
#
# Stages 1 and 2 lay all tensors end to end and give each rank one n-th of that, wherever it cuts.
# So a tensor can belong to two ranks; stage 2 then keeps its whole gradient on both. Stage 3 cuts
# every tensor by itself. What a rank holds between two micro-batches follows:

# %%
BUCKET = 100_000
FLAT_OPTIONS = {"reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
ZERO3_OPTIONS = {
    "reduce_bucket_size": BUCKET,
    "stage3_prefetch_bucket_size": 0,
    "stage3_param_persistence_threshold": 0,  # smaller tensors stay whole
    "stage3_max_live_parameters": 0,  # free everything after use ...
    "stage3_max_reuse_distance": 0,  # ... however soon it is used again
}


def zero_config(stage: int, **options: object) -> dict:
    """Return the config of a stage, with some keys of zero_optimization added or changed."""
    of_stage = {0: {}, 1: FLAT_OPTIONS, 2: FLAT_OPTIONS, 3: ZERO3_OPTIONS}[stage]
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage, **of_stage, **options},
    }


def expected_bytes(stage: int, sizes: list[int]) -> tuple[int, int]:
    """Return the bytes in float32 and in bfloat16 that this rank holds of such tensors."""
    P = sum(sizes)
    if stage == 0:
        return 12 * P, 2 * P + 2 * P
    if stage == 3:
        share = sum(math.ceil(size / WORLD_SIZE) for size in sizes)
        return 12 * share, 2 * share + 2 * share
    share = flat_share(P)
    weights = 2 * share * WORLD_SIZE  # all of them, padded to n equal parts
    gradients = 2 * P if stage == 1 else 2 * elements_on_my_share(sizes)
    return 12 * share, weights + gradients


def flat_share(P: int) -> int:
    """Return one rank's share of P elements laid end to end, rounded up to an even number."""
    return 2 * math.ceil(P / (2 * WORLD_SIZE))


def elements_on_my_share(sizes: list[int]) -> int:
    """Return the elements of all tensors that lie, with at least one, in this rank's share."""
    share = flat_share(sum(sizes))
    start = 0
    kept = 0
    for size in sizes:
        if start < (RANK + 1) * share and start + size > RANK * share:
            kept += size
        start += size
    return kept


def check_bytes(steps: dict[int, "Step"], device: torch.device) -> None:
    sizes = [p.numel() for p in GPT().parameters()]
    for stage, step in steps.items():
        float32, bfloat16 = expected_bytes(stage, sizes)
        held32 = step.held[device.type, torch.float32]
        held16 = step.held[device.type, torch.bfloat16]
        claim(f"stage {stage}: bytes in float32", float32, held32, question=1)
        claim(f"stage {stage}: bytes in bfloat16", bfloat16, held16, question=1)
        each = step.held.total() / sum(sizes)
        print0(f"{'':13}{'#' * round(2 * each):32} {each:.2f} bytes per parameter\n")


def check_fsdp2(device: torch.device) -> None:
    """Claim what FSDP2 holds between backward and update; it is sharded like stage 3."""
    forget_what_there_is()
    mesh = init_device_mesh(device.type, (WORLD_SIZE,))
    model = GPT().to(device)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.step()  # the first does nothing: there are no gradients
        optimizer.zero_grad()
        mean_loss(model, random_bytes(device)).backward()
    held = smallest_census()
    moments = 8 * sum(p.to_local().numel() for p in model.parameters())
    rows = [math.ceil(len(p) / WORLD_SIZE) for p in model.parameters()]  # padded to equal shares
    padded = sum(r * math.prod(p.shape[1:]) for r, p in zip(rows, model.parameters(), strict=True))
    claim("FSDP2: bytes in float32", 8 * padded + moments, held[device.type, torch.float32])
    claim("FSDP2: bytes in bfloat16", 0, held[device.type, torch.bfloat16])


# %% [markdown]
# ## 2. What a step communicates: elements reduced and elements gathered
#
# A step of `a` micro-batches, as ZeRO's paper has it for a = 1 (section 7) and as DeepSpeed does it
# by default. An all-reduce is a reduce-scatter and an all-gather, so in a ring it counts twice:
#
#     stage | reduced, DeepSpeed        gathered    in a ring, x (n-1)/n   paper, a = 1
#       0   | P    all-reduce             -          2P                     2P
#       1   | P    all-reduce             P          2P + P                 2P
#       2   | P a  all-reduce             P          2P a + P               2P
#       3   | P a  reduce-scatter         2P a       3P a                   3P
#
# Two things surprise. Stage 2 reduces every micro-batch, since it has nowhere to accumulate whole
# gradients. And stages 1 and 2 *all-reduce* gradients that only one rank needs. A bucket usually
# holds tensors of several owners, and one all-reduce of it is a single message; the extra P is the
# price. `use_multi_rank_bucket_allreduce: false` reduces every part to its owner instead.


# %%
def expected_elements(stage: int, a: int, sizes: list[int]) -> tuple[int, int]:
    """Return how many elements a step of `a` micro-batches reduces, and how many it gathers."""
    P = sum(sizes)
    if stage == 0:
        return P, 0
    if stage == 3:
        padded = sum(math.ceil(size / WORLD_SIZE) for size in sizes) * WORLD_SIZE
        return a * padded, a * 2 * padded
    reductions = 1 if stage == 1 else a
    return reductions * P, flat_share(P) * WORLD_SIZE


def check_elements(steps: dict[int, "Step"]) -> None:
    if WORLD_SIZE == 1:
        blocked("elements reduced and gathered", needs="2 ranks")
        return
    sizes = [p.numel() for p in GPT().parameters()]
    for stage, step in steps.items():
        reduced, gathered = expected_elements(stage, 2, sizes)
        claim(f"stage {stage}: elements reduced", reduced, step.reduced, question=2)
        if stage > 0:  # stage 0 gathers nothing
            claim(f"stage {stage}: elements gathered", gathered, step.gathered, question=2)
        in_a_ring = step.gathered + step.reduced * (1 if stage == 3 else 2)
        print0(f"{'':13}in a ring {in_a_ring / sum(sizes):.2f} P (n-1)/n\n")


# %% [markdown]
# ## 3. Keys that change bytes or elements
#
# | key                                  | set to        | effect                                 |
# |--------------------------------------|---------------|----------------------------------------|
# | `use_multi_rank_bucket_allreduce`    | false         | each part to its owner: half as much   |
# | `stage3_max_live_parameters`,        | 1e9 (default) | weights stay whole until backward,     |
# |   `stage3_max_reuse_distance`        | 1e9 (default) | like FSDP2's kept ones                 |
# | `stage3_param_persistence_threshold` | 1e5 (default) | smaller tensors are never sharded:     |
# |                                      |               | all of this model, 2P bytes more       |
# | `data_types: grad_accum_dtype`       | fp32          | gradients in 4 bytes: 18/n, not 16/n   |
# | `offload_optimizer: device`          | cpu           | masters, moments, gradients: the host  |
#
# `grad_accum_dtype` deserves a word. ZeRO's 16 bytes hold gradients in bfloat16, and DeepSpeed's
# default adds micro-batches up in the dtype of the model, too. With bfloat16's 8 significant bits,
# many small gradients vanish next to a large sum. Megatron-LM therefore insists on float32
# gradients: 18 bytes per parameter, or 6 + 12/n with a sharded optimizer.
#
# Offloading (Ren et al. 2021, ZeRO-Offload) keeps 16P/n bytes on the host, of which 4P/n are
# gradients in float32; the CPU updates, and the GPU holds no float32 at all.


# %%
def check_keys(deepspeed: ModuleType, device: torch.device) -> None:
    sizes = [p.numel() for p in GPT().parameters()]
    P = sum(sizes)
    share = sum(math.ceil(size / WORLD_SIZE) for size in sizes)

    more = {"stage3_param_persistence_threshold": 10**5, "reduce_bucket_size": 10 * BUCKET}
    step = Step(deepspeed, device, zero_config(3, **more))
    whole = share * WORLD_SIZE if WORLD_SIZE > 1 else 0  # one rank's share is whole already
    expected = 2 * share + 2 * share + 2 * whole + 2 * 10 * BUCKET  # the last is the bucket
    held = step.held[device.type, torch.bfloat16]
    claim("stage 3, small tensors whole: bytes in bfloat16", expected, held)

    config = zero_config(3) | {"data_types": {"grad_accum_dtype": "fp32"}}
    step = Step(deepspeed, device, config)
    claim("stage 3, gradients in float32: bytes", 18 * share, step.held.total(), question=5)

    step = Step(deepspeed, device, zero_config(2, offload_optimizer={"device": "cpu"}))
    host = step.held["cpu", torch.float32]
    claim("offload: bytes in float32, host", 16 * flat_share(P), host, question=6)
    if device.type == "cpu":
        blocked("offload: bytes in float32, GPU", needs="1 GPU")
    else:
        claim("offload: bytes in float32, GPU", 0, step.held["cuda", torch.float32])


def check_keys_of_messages(deepspeed: ModuleType, device: torch.device) -> None:
    if WORLD_SIZE == 1:
        blocked("stage 2 to owners only, stage 3 kept", needs="2 ranks")
        return
    sizes = [p.numel() for p in GPT().parameters()]
    step = Step(deepspeed, device, zero_config(2, use_multi_rank_bucket_allreduce=False))
    in_a_ring = step.counted.elements("reduce") + 2 * large_elements(step.counted, "all_reduce")
    claim("stage 2, to owners only: reduced, ring", 2 * sum(sizes), in_a_ring, question=3)

    keep = {"stage3_max_live_parameters": 10**9, "stage3_max_reuse_distance": 10**9}
    step = Step(deepspeed, device, zero_config(3, **keep))
    padded = sum(math.ceil(size / WORLD_SIZE) for size in sizes) * WORLD_SIZE
    claim("stage 3, kept for backward: elements gathered", 2 * padded, step.gathered, question=4)


# %% [markdown]
# ## 4. How it is measured
#
# `Step` runs three steps of a config, since Adam's moments come with the first, and measures the
# third: what is held after its first micro-batch, and what the whole step hands to collectives.
# Norms and overflow flags, single elements, are left out.


# %%
class Step:
    """The third step of a config: the bytes held, the elements reduced and gathered."""

    def __init__(self, deepspeed: ModuleType, device: torch.device, config: dict) -> None:
        x_BT = random_bytes(device)
        forget_what_there_is()
        torch.manual_seed(0)  # the same weights on every rank
        engine, *_ = deepspeed.initialize(model=GPT().to(device), config=config)
        micro_batches = config["gradient_accumulation_steps"]
        for _ in range(2 * micro_batches):
            engine.backward(mean_loss(engine, x_BT))
            engine.step()  # does nothing before the last micro-batch of a step
        with CountedCommunication() as self.counted:
            engine.backward(mean_loss(engine, x_BT))
            self.held = smallest_census()
            engine.step()
            for _ in range(micro_batches - 1):
                engine.backward(mean_loss(engine, x_BT))
                engine.step()
        engine.destroy()
        reductions = ("all_reduce", "reduce_scatter")
        self.reduced = sum(large_elements(self.counted, name) for name in reductions)
        self.gathered = large_elements(self.counted, "all_gather")


def large_elements(counted: "CountedCommunication", operation: str) -> int:
    return sum(call.elements for call in counted.calls(operation) if call.elements > 1)


def random_bytes(device: torch.device) -> torch.Tensor:
    """Return this rank's batch of two sequences of 65 random bytes: (B, T)."""
    generator = torch.Generator().manual_seed(RANK)
    return torch.randint(256, (2, 65), generator=generator).to(device)


def mean_loss(model: Callable, x_BT: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of predicting each byte from those before it."""
    logits_BTV = model(x_BT[:, :-1])
    return F.cross_entropy(logits_BTV.flatten(0, 1), x_BT[:, 1:].flatten())


# %% [markdown]
# Bytes are counted by a **census**: Python's garbage collector lists every object made since a
# start, and the census adds up the storages of the tensors among them, each once. It leaves out
# scalars and the reduce bucket, whose size is a choice. Gloo's threads let go of a buffer a moment
# after its collective has ended, so the census is taken three times, and the smallest counts.


# %%
def forget_what_there_is() -> None:
    gc.collect()
    gc.freeze()  # what exists now is no longer listed


def census() -> Counter[tuple[str, torch.dtype]]:
    """Return the bytes of all tensors made since `gc.freeze()`, by device and dtype."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    time.sleep(0.05)
    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter)]
    tensors += [t.grad for t in tensors if t.is_leaf and type(t.grad) is torch.Tensor]
    held = Counter()
    seen = {0}  # 0 is the address of what has no memory: meta tensors
    for tensor in tensors:
        storage = tensor.untyped_storage()
        is_bucket = storage.nbytes() == 2 * BUCKET
        if storage.data_ptr() not in seen and storage.nbytes() > 8 and not is_bucket:
            held[tensor.device.type, tensor.dtype] += storage.nbytes()
        seen.add(storage.data_ptr())
    return held


def smallest_census() -> Counter[tuple[str, torch.dtype]]:
    return min([census(), census(), census()], key=Counter.total)


# %% [markdown]
# The counter records every collective as it is handed to the backend; it does not see what then
# crosses a wire. The import of DeepSpeed is guarded, since it would compile C++ for minutes.


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
# ## 5. On GPUs: gigabytes and milliseconds of each stage
#
# The same stages for 0.94 billion parameters, with DeepSpeed's default buckets. The allocator's
# peak includes activations and buckets, so it lies above the formula. The news here is what the
# stages leave free, and what each costs in time.


# %%
def check_on_gpus(deepspeed: ModuleType, device: torch.device) -> None:
    if device.type == "cpu" or WORLD_SIZE == 1:
        blocked("peak memory of stage 3 / stage 0", needs="2 GPUs")
        return
    if not torch.cuda.is_bf16_supported(False):  # in hardware, not emulated
        blocked("peak memory of stage 3 / stage 0", needs="2 GPUs with bfloat16")
        return
    peaks = {}
    for stage in range(4):
        config = zero_config(stage) | {"zero_optimization": {"stage": stage}}  # all else by default
        with device:
            model = GPT(L=16, D=2048, T=2048, V=32_768, heads=16)
        P = sum(p.numel() for p in model.parameters())
        engine, *_ = deepspeed.initialize(model=model, config=config)
        milliseconds, peaks[stage] = time_engine(engine, device)
        engine.destroy()
        del model, engine
        gc.collect()
        torch.cuda.empty_cache()
        print0(f"{'':13}stage {stage}: {peaks[stage] / 1e9:.1f} GB, {peaks[stage] / P:.1f} P")
        print0(f"{'':13}{milliseconds:.1f} ms per step of two micro-batches")
    claim("peak memory of stage 3 / stage 0", 0.9, peaks[3] / peaks[0], "<=")


def time_engine(engine: nn.Module, device: torch.device) -> tuple[float, int]:
    """Return the median time of a step in milliseconds, and the peak memory in bytes."""
    x_BT = torch.randint(32_768, (2, 2049), device=device)
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(7):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(2):
            engine.backward(mean_loss(engine, x_BT))
            engine.step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times[2:])[2], torch.cuda.max_memory_allocated()


# %% [markdown]
# ## What you should have seen
#
# 1. On 4 ranks 16, 7, about 5.6 and 4 bytes per parameter. Stage 2 is a little above its 5.5, since
#    tensors on the edge of a share keep whole gradients on both sides. ZeRO's "4x" and "8x" are
#    limits for many ranks: with 4 ranks stages 1 and 2 save factors of 2.3 and 2.9.
# 2. Reduced: P, P, 2P, 2P. Gathered: none, P, P, 4P. In a ring that is 2, 3, 5 and 6 P times
#    (n-1)/n for two micro-batches. Stages 2 and 3 pay for every micro-batch, stages 0 and 1 once
#    per step: with many micro-batches stage 1 is the bargain.
# 3. No, it communicates *more*, 5P against 2P, as long as it all-reduces its buckets. With owners
#    only it reduces 2P instead of 4P (counted in a ring), and comes to 3P. For one micro-batch that
#    is the paper's 2P.
# 4. 2P instead of 4P: each micro-batch gathers once. That is the default of DeepSpeed, and the
#    opposite of FSDP2's; compare like with like.
# 5. 18/n. Gradients cost 4 bytes, and that is Megatron's arithmetic too. For 7B parameters without
#    sharding it is 126 GB against 112 GB.
# 6. 16/n: masters, moments and float32 gradients; on the GPU only the 2P bytes of weights and some
#    gradients are left. With one micro-batch a step moves 6P/n bytes over PCIe, 4 down and 2 up
#    (10_offload.py counts them; the paper has 2 and 2), and waits for the CPU's Adam.
#
# **Try.** A persistence threshold of 10**5 keeps every tensor of this small model whole: stage 3
# then holds 2P bytes more and gathers less. With `use_multi_rank_bucket_allreduce=True` stage 2
# reduces twice as much as section 3 predicts.
#
# **At scale** the same formulas decide. On 1,000 ranks stage 2 holds little more than 2P, and stage
# 3 almost nothing. But each of stage 3's passes gathers every module over all ranks, and latency
# grows with n. Then hpZ, or a group per node, brings the gathers back inside the node
# (fsdp/04_fsdp_refinements.py).


# %%
def main() -> None:
    command_line()
    launch()
    device = setup()
    deepspeed = import_deepspeed(device)
    check_fsdp2(device)
    if deepspeed is None:
        blocked("stages 0 to 3", needs="deepspeed: pip install -e '.[deepspeed]'")
        finish()
    steps = {stage: Step(deepspeed, device, zero_config(stage)) for stage in range(4)}
    check_bytes(steps, device)
    check_elements(steps)
    check_keys_of_messages(deepspeed, device)
    check_keys(deepspeed, device)
    check_on_gpus(deepspeed, device)
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
