"""A whole training run with DeepSpeed: schedule, precision, checkpoint, another number of ranks
=============================================================================================

**Question.** DeepSpeed's engine counts updates, sets learning rates, scales losses and writes
checkpoints for you. What exactly does it do in a whole training run, does it learn what FSDP2
learns, and what does it take to go on with fewer ranks?

**Predict**, and write it down before you run. The GPT of fsdp/01_fsdp_basics.py, with 2 blocks and
P parameters, trains on real text on n ranks: 12 updates of two micro-batches, AdamW, clipping.

1. How many times does the loop call `engine.step()`? How many updates does the engine count, and
   how many steps of the learning-rate scheduler?
2. The scheduler is `WarmupLR`, linear from 0 to 1e-3 within 4 updates. How many updates leave every
   weight exactly as it was?
3. In float32, by how much do the losses of stages 1, 2 and 3 and of FSDP2 differ from those of one
   process, which sees the batches of all ranks?
4. A weight of a LayerNorm begins at 1. In bfloat16 the next number below 1 is 0.9961, and an update
   moves a weight by about the learning rate, 0.001. How many of these weights have moved after 12
   updates: if bfloat16 is all there is, and if there are float32 masters?
5. How many bytes per parameter does a checkpoint take on the disk, in stages 1 and 3, and which of
   its files does which rank write?
6. Training goes on from a checkpoint, once with n ranks and once with fewer. How many of the next
   losses differ from those of the run that was never interrupted, and by how much?
7. In float16 the loss is multiplied by a scale, here 2**24 at first, and an update whose gradients
   overflow is left out. How many were left out if the scale has come down to 2**20, and what does
   the scheduler do meanwhile?

**Run.**

    torchrun --standalone --nproc-per-node=4 07_deepspeed_train.py   # NCCL on 4 GPUs, else gloo
    python 07_deepspeed_train.py                                     # the same, started for you
    deepspeed --num_gpus 4 07_deepspeed_train.py     # its own launcher; no GPU: DS_ACCELERATOR=cpu
    python 07_deepspeed_train.py --deepspeed_config PATH     # stage and precision from this file
    python 07_deepspeed_train.py --data PATH         # text of your own instead of Python's sources

Not run on several GPUs.

**Try.** In `COMMON`, set `warmup_min_lr` to 1e-4: what fails? In `check_resume`, load with
`load_optimizer_states=False`: what fails, and why is the first of the losses still right?

**Before.** fsdp/02_deepspeed_config.py and 03_deepspeed_bytes.py: the keys, and the stages' bytes.

**Next.** Which of the two when: fsdp/sharding_strategies.md; then fsdp/08_lora.py
"""

import argparse
import contextlib
import ctypes
import gc
import io
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
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_leaves

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: S sequences to train on, E to evaluate on, B in a micro-batch, T tokens in each, D model
# width, V different tokens, L blocks, H heads of K features. P is the number of parameters, n the
# number of ranks.

UPDATES = 12
EPOCH = 6  # updates in which every sequence is seen once
SAVED_AT = 8  # updates before the checkpoint: in the middle of the second epoch
MICRO_BATCH = 2  # sequences
ACCUMULATION = 2  # micro-batches per update and rank
WARMUP = 4  # updates

# %% [markdown]
# ## 1. The script: data, a loop, a config
#
# A job will be interrupted, and it may go on with another number of ranks. So its data must not
# depend on what is lost then. Here the sequences of an update follow from the *number* of the
# update alone: the number gives the epoch and the place in it, the epoch gives the order. The ranks
# of the day divide them among themselves.
#
#     update      0    1    2    3    4    5   |  6    7    8    9   10   11
#     epoch       ------- 0, shuffled ------   |  ---- 1, shuffled anew ----
#     learning    0    0  1/4  2/4  3/4   1       1    1    1    1    1    1    x 1e-3
#     rate                                               ^ checkpoint
#
#     update 7 = 4n sequences, in order:  rank 0 takes the 1st, the n+1st, ...: two micro-batches
#
# The loop is the same for every stage and precision, because the config says the rest. The engine
# counts updates (`global_steps`) and keeps that number in its checkpoints, so the loop asks *it*
# where to go on. `engine.backward` divides a loss by the micro-batches of an update. `engine.step`
# counts; on the last micro-batch it reduces what is left to reduce, clips, updates the weights, and
# steps the scheduler.

# %%
ADAMW = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}  # as in torch
COMMON: dict = {
    "train_micro_batch_size_per_gpu": MICRO_BATCH,
    "gradient_accumulation_steps": ACCUMULATION,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},  # none compiled
    "scheduler": {
        "type": "WarmupLR",
        "params": {
            "warmup_type": "linear",
            "warmup_min_lr": 0,
            "warmup_max_lr": ADAMW["lr"],
            "warmup_num_steps": WARMUP,
        },
    },
}


def sequences_of(update: int, x_ST: torch.Tensor) -> torch.Tensor:
    """Return the sequences of an update, which its number alone decides: (S / EPOCH, T)."""
    epoch, place = divmod(update, EPOCH)
    order = torch.randperm(len(x_ST), generator=torch.Generator().manual_seed(epoch))
    return x_ST[order.chunk(EPOCH)[place]]


def micro_batches(update: int, x_ST: torch.Tensor, B: int = MICRO_BATCH) -> list[torch.Tensor]:
    """Return this rank's share of an update, B sequences at a time: [(B, T), ...]."""
    mine = sequences_of(update, x_ST)[dist.get_rank() :: dist.get_world_size()]
    return list(mine.split(B))


def train(engine: nn.Module, x_ST: torch.Tensor, stop: int) -> list[float]:
    """Train until `stop` updates are done; return each update's loss, averaged over the ranks."""
    B = engine.train_micro_batch_size_per_gpu()
    losses = []
    while engine.global_steps < stop:
        of_update = []
        for x_BT in micro_batches(engine.global_steps, x_ST, B):
            loss = mean_loss(engine, x_BT.to(engine.device))
            engine.backward(loss)
            engine.step()
            of_update.append(loss.item())
        losses.append(sum(of_update) / len(of_update))
    return average(losses, engine.device)


# %% [markdown]
# `initialize` builds engine, optimizer and scheduler from a config. Stage 3 keeps tensors of fewer
# than 100,000 elements whole unless it is told otherwise, which for this model are all.


# %%
def config_of(stage: int, dtype: str = "", **more: object) -> dict:
    """Return the config of a stage that computes in float32, or in "bf16" or "fp16"."""
    zero = {"stage": stage, "reduce_bucket_size": 100_000}
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0}
    precision = {dtype: {"enabled": True}} if dtype else {}
    return COMMON | {"zero_optimization": zero} | precision | more


def start_engine(deepspeed: ModuleType, device: torch.device, config: dict) -> nn.Module:
    """Return DeepSpeed's engine around a new GPT."""
    return deepspeed.initialize(model=new_gpt(device), config=config)[0]


# %% [markdown]
# ## 2. Who counts what, and a warmup that begins twice
#
# The engine calls the scheduler *after* an update. `WarmupLR` sets `warmup_min_lr` when it is made,
# and its first step, number 0, sets it again:
#
#     lr after step number k = min + (max - min) * min(k / warmup_num_steps, 1),    k = 0, 1, 2, ...
#
# So two updates run at the lowest rate, and the highest is reached one update later than the name
# `warmup_num_steps` suggests. With `warmup_min_lr` at 0, the default, both do nothing but count.
# Without `warmup_type` the warmup is logarithmic, and far steeper at its beginning. To compare with
# DeepSpeed, the loop of FSDP2 uses the same rates: `LambdaLR` in section 9.


# %%
def check_counting(engine: nn.Module, x_ST: torch.Tensor) -> list[float]:
    """Train to the end, an update at a time; claim what was counted, and return the losses."""
    losses = []
    still = 0
    for update in range(UPDATES):
        before = engine.module.head.weight.detach().clone()
        losses += train(engine, x_ST, update + 1)
        still += torch.equal(engine.module.head.weight, before)
    steps = engine.lr_scheduler.last_batch_iteration + 1
    claim("calls of engine.step()", UPDATES * ACCUMULATION, engine.micro_steps, question=1)
    claim("updates that the engine counts", UPDATES, engine.global_steps, question=1)
    claim("steps of the scheduler", UPDATES, steps, question=1)
    claim("updates that changed no weight", 2, still, question=2)
    return losses


# %% [markdown]
# ## 3. The same losses as one process and as FSDP2
#
# In float32 the runs differ by the order of additions only. A loss of 5.6 may be off by some
# roundings of 5.6 x 2**-24, which is 3e-7, and training carries them along; 1e-5 is allowed. An
# update more or less at rate 0, a norm that is not clipped, or another order of the data moves some
# loss by more than 1e-3.
#
# For evaluation, the ranks' shares of the E = 2n + 1 held-out sequences are of different lengths.
# So the sums of losses and the numbers of sequences are added up over the ranks, each by itself;
# the mean of the ranks' means would be wrong. And every rank must call the model equally often:
# a forward pass of stage 3 or FSDP2 is a series of collectives, and one rank without a batch would
# leave the others waiting.


# %%
def evaluate(model: nn.Module, x_ET: torch.Tensor, device: torch.device) -> float:
    """Return the mean loss over all held-out sequences, of which this rank takes every n-th."""
    mine = x_ET[dist.get_rank() :: dist.get_world_size()].to(device)
    model.eval()
    with torch.no_grad():
        loss = mean_loss(model, mine)
    model.train()
    total = torch.tensor([loss.item() * len(mine), len(mine)], device=device)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def compare(name: str, losses: list[float], held_out: float, expected: dict) -> None:
    """Claim that a run in float32 has the losses of one process."""
    error = largest_difference(losses, expected["losses"])
    claim(f"{name}: losses, error", 0, error, atol=1e-5, question=3)
    error = abs(held_out - expected["held out"])
    claim(f"{name}: held-out loss, error", 0, error, atol=1e-5, question=3)


def check_fsdp2(
    x_ST: torch.Tensor, x_ET: torch.Tensor, expected: dict, device: torch.device
) -> None:
    model = sharded(new_gpt(device), torch.float32)
    losses = average(train_torch(model, lambda u: micro_batches(u, x_ST), device), device)
    compare("FSDP2", losses, evaluate(model, x_ET, device), expected)


def sharded(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Make a unit of each block and one of the rest; compute in `dtype`, with float32 shards."""
    mesh = init_device_mesh(next(model.parameters()).device.type, (WORLD_SIZE,))
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


# %% [markdown]
# ## 4. bfloat16: why there are masters
#
# bfloat16 keeps 8 bits of a number, so the numbers next to 1 are 0.9961 and 1.0078. An update that
# moves a weight by 0.001 gets it less than half of the way, and rounding puts it back: the weight
# never moves, however many updates there are. So `bf16` keeps a float32 **master** of each weight,
# updates that, and rounds a copy for the computation:
#
#     all in bfloat16    1 - 0.001 -> 1        1 - 0.001 -> 1        1 - 0.001 -> 1    ...
#     master             1 -> 0.999 -> 0.998 -> 0.997 ...
#     its rounded copy   1    1        0.9961   0.9961
#
# The key `bf16_master_weights_and_grads` of the section `bf16` gives the masters up, in order to
# save 4 bytes per parameter, and `bf16_optimizer_states` the moments' precision too. The loss of so
# short a run hardly shows it; the weights do.

# %%
BF16_ERROR = 0.01  # of a loss near 5: half of 2**-8 of it
ALL_BF16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


def check_bf16(
    deepspeed: ModuleType, x_ST: torch.Tensor, folder: Path, expected: dict, device: torch.device
) -> None:
    engine = start_engine(deepspeed, device, config_of(2, bf16=ALL_BF16))
    train(engine, x_ST, UPDATES)
    norms = [m.weight for m in engine.module.modules() if isinstance(m, nn.LayerNorm)]
    every = sum(weight.numel() for weight in norms)
    moved = sum((weight != 1).sum().item() for weight in norms)
    engine.destroy()
    claim("bf16 without masters: LayerNorm weights moved", 0, moved, question=4)

    engine = start_engine(deepspeed, device, config_of(2, "bf16"))
    losses = train(engine, x_ST, UPDATES)
    norms = [m.weight for m in engine.module.modules() if isinstance(m, nn.LayerNorm)]
    masters = [deepspeed.utils.safe_get_full_fp32_param(weight) for weight in norms]
    moved = sum((master != 1).sum().item() for master in masters)
    claim("bf16 with masters: LayerNorm masters moved", every, moved, question=4)
    error = largest_difference(losses, expected["losses"])
    claim("bf16: losses, error against float32's", 0, error, atol=BF16_ERROR)
    engine.save_checkpoint(folder / "bf16")
    engine.destroy()
    check_files("stage 2, bf16", folder / "bf16" / f"global_step{UPDATES}", 2, weight_bytes=2)


# %% [markdown]
# ## 5. float16: a loss scale that looks for its place
#
# float16 has 11 bits of precision, but its largest number is 65,504, and below 6e-8 all is 0. Small
# gradients would vanish. So the loss is multiplied by a **loss scale** before backward, and the
# float32 gradients are divided by it before the update (Micikevicius et al. 2018). The scale looks
# for its place by itself (`"loss_scale": 0`): if a gradient is infinite or no number, the update is
# left out and the scale is halved; after `loss_scale_window` good updates it is doubled. With
# `hysteresis` above 1 the first overflows leave updates out without halving.
#
# An update that is left out still counts in `global_steps`, and its data are gone. The scheduler
# does not step. So `global_steps - skipped_steps` is what has been learned, and a job that leaves
# out updates forever has diverged. GPUs before Ampere have no bfloat16; on others prefer bfloat16,
# which needs no scale.

# %%
FP16 = {
    "enabled": True,
    "loss_scale": 0,  # dynamic
    "initial_scale_power": 16,  # so 2**16
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
}


def check_fp16(deepspeed: ModuleType, x_ST: torch.Tensor, device: torch.device) -> None:
    """Begin with a scale that is too high, and halve it at every overflow."""
    config = config_of(2, fp16=FP16 | {"initial_scale_power": 24, "hysteresis": 1})
    params = COMMON["scheduler"]["params"] | {"warmup_min_lr": 1e-4}  # so every update moves
    config = config | {"scheduler": {"type": "WarmupLR", "params": params}}
    try:
        engine = start_engine(deepspeed, device, config)
    except ValueError as refusal:  # a CPU without float16
        blocked("fp16: updates left out, 24 - log2(scale)", needs="1 GPU")
        print0(f"{'':13}or a CPU with AVX512-FP16; DeepSpeed says: {refusal}")
        return
    still = 0
    for update in range(UPDATES):
        before = engine.module.head.weight.detach().clone()
        train(engine, x_ST, update + 1)
        still += torch.equal(engine.module.head.weight, before)
    halved = 24 - math.log2(engine.optimizer.loss_scale)
    steps = engine.lr_scheduler.last_batch_iteration + 1
    engine.destroy()
    claim("fp16: updates left out, 24 - log2(scale)", halved, still, question=7)
    claim("fp16: updates left out, at least", 1, still, ">=", question=7)
    claim("fp16: steps of the scheduler", UPDATES - still, steps, question=7)


# %% [markdown]
# ## 6. A checkpoint: who writes what, and going on to the bit
#
# `save_checkpoint` must be called by every rank, since every rank writes its own share:
#
#     folder/
#       latest                                            the name of the newest: "global_step8"
#       global_step8/
#         mp_rank_00_model_states.pt                      stages 1, 2: the weights, by rank 0,
#                                                         counters, scheduler, your client_state
#         zero_pp_rank_0_mp_rank_00_optim_states.pt       rank 0: masters and moments, 12P/n bytes
#         zero_pp_rank_1_mp_rank_00_optim_states.pt       rank 1's
#         ...
#         zero_pp_rank_0_mp_rank_00_model_states.pt       stage 3, by every rank: no weights at all
#       zero_to_fp32.py                                   makes one file of float32 weights from it
#
# In stages 1 and 2 the weights are saved twice, rounded and as masters: 2P + 12P bytes in bfloat16,
# 4P + 12P in float32. In stage 3 only masters are saved. A shard of stage 3 is rounded up to whole
# elements per tensor. In bfloat16 the names of the optimizer files begin with `bf16_`.


# %%
def expected_states(stage: int) -> int:
    """Return the bytes of masters and moments that this rank writes."""
    sizes = [p.numel() for p in small_gpt().parameters()]
    if stage == 3:
        return 12 * sum(math.ceil(size / WORLD_SIZE) for size in sizes)
    share = 2 * math.ceil(sum(sizes) / (2 * WORLD_SIZE))  # an even number
    own = max(0, min(share, sum(sizes) - RANK * share))
    return 4 * own + 8 * share  # of the padding at the end, only the masters' is left out


def check_files(name: str, folder: Path, stage: int, weight_bytes: int) -> None:
    """Claim the bytes of the tensors in this rank's files, and of all files on the disk."""
    P = sum(p.numel() for p in small_gpt().parameters())
    (mine,) = folder.glob(f"*zero_pp_rank_{RANK}_mp_rank_00_optim_states.pt")
    states = tensor_bytes(mine)
    claim(f"{name}: masters and moments", expected_states(stage), states, question=5)
    weights = weight_bytes * P if stage < 3 else 0
    model = "mp_rank_00" if stage < 3 else f"zero_pp_rank_{RANK}_mp_rank_00"
    measured = tensor_bytes(folder / f"{model}_model_states.pt")
    claim(f"{name}: bytes of weights in a model file", weights, measured, question=5)
    files = list(folder.glob("*.pt"))
    each = sum(file.stat().st_size for file in files) / P
    expected = 12 if stage == 3 else 12 + weight_bytes
    more = 12_288 * len(files) / P  # a file's names and config
    claim(f"{name}: bytes on the disk / P", expected, each, atol=more, question=5)


def check_resume(
    deepspeed: ModuleType,
    stage: int,
    x_ST: torch.Tensor,
    folder: Path,
    device: torch.device,
) -> tuple[nn.Module, list[float]]:
    """Save in the middle; go on with the same engine and with a new one; return the former."""
    engine = start_engine(deepspeed, device, config_of(stage))
    losses = train(engine, x_ST, SAVED_AT)
    engine.save_checkpoint(folder, client_state={"losses": losses})
    losses += train(engine, x_ST, UPDATES)
    check_files(f"stage {stage}", folder / f"global_step{SAVED_AT}", stage, weight_bytes=4)

    resumed = start_engine(deepspeed, device, config_of(stage))
    _path, client_state = resumed.load_checkpoint(folder)
    seen = client_state["losses"] + train(resumed, x_ST, UPDATES)
    resumed.destroy()
    differ = sum(a != b for a, b in zip(seen, losses, strict=True))
    claim(f"resumed in stage {stage}: losses that differ", 0, differ, question=6)
    return engine, losses


# %% [markdown]
# What `load_checkpoint` brings back: weights, masters, moments, the scheduler, the counters, the
# loss scale, and what you gave as `client_state`. What it does not: the state of random numbers,
# and the place in your data, unless it follows from `global_steps`, as here. A checkpoint between
# two micro-batches loses the gradients so far; save after an update.

# %% [markdown]
# ## 7. Another number of ranks: the universal checkpoint
#
# The files above belong to n ranks. With another number, `load_checkpoint` refuses. A **universal
# checkpoint** (Lian et al. 2024) has a folder per parameter instead, with its whole master and its
# whole moments. One process makes it from the files, offline:
#
#     python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state \
#         --input_folder folder/global_step8 --output_folder folder/universal
#
#     folder/latest_universal
#     folder/universal/zero/head.weight/fp32.pt, exp_avg.pt, exp_avg_sq.pt      12P bytes in all
#
# `--inject_missing_state` is for stages 1 and 2: your `client_state` could have said the format's
# version, and did not. Loading is asked for in the config, and each rank takes its share, whatever
# n is. The batch of an update should stay what it was, so fewer ranks accumulate longer.
#
# That of stage 1 may be loaded in stage 2. Between these and stage 3 there is no way, since the
# files of stage 3 have other names.
#
# Here n ranks leave their group and form groups of m, the largest proper divisor of n: as if some
# nodes were gone. Every group then goes on from the same files.


# %%
def on_fewer_ranks(
    deepspeed: ModuleType, stage: int, x_ST: torch.Tensor, folder: Path, device: torch.device
) -> list[float]:
    """Return the losses of a run that goes on from the universal checkpoint in `folder`."""
    micro_batches_in_all = COMMON["gradient_accumulation_steps"] * WORLD_SIZE
    accumulation = micro_batches_in_all // dist.get_world_size()
    config = config_of(stage, gradient_accumulation_steps=accumulation)
    config = config | {"checkpoint": {"load_universal": True}}
    engine = start_engine(deepspeed, device, config)
    _path, client_state = engine.load_checkpoint(folder)
    losses = client_state["losses"] + train(engine, x_ST, UPDATES)
    engine.destroy()
    return losses


def is_refused(deepspeed: ModuleType, folder: Path, device: torch.device) -> bool:
    """Return whether the plain checkpoint of another number of ranks cannot be loaded."""
    engine = start_engine(deepspeed, device, config_of(1))
    try:
        engine.load_checkpoint(folder)
    except deepspeed.runtime.zero.utils.ZeRORuntimeException:
        return True
    finally:
        engine.destroy()
    return False


def check_other_world(
    deepspeed: ModuleType,
    saved: dict[int, Path],
    x_ST: torch.Tensor,
    expected: dict,
    device: torch.device,
) -> None:
    """Go on from each stage's checkpoint on fewer ranks; from that of stage 1 in stage 2."""
    if WORLD_SIZE == 1:
        blocked("resumed on fewer ranks", needs="2 ranks")
        return
    for stage, folder in saved.items():
        if RANK == 0:
            make_universal(folder, stage)
        dist.barrier()
        P = sum(p.numel() for p in small_gpt().parameters())
        files = [*folder.glob("universal/zero/*/fp32.pt"), *folder.glob("universal/zero/*/exp_*")]
        measured = sum(tensor_bytes(file) for file in files)
        claim(f"stage {stage}, universal: bytes of tensors", 12 * P, measured)
    with groups_of_fewer(deepspeed, device):
        refused = is_refused(deepspeed, saved[1], device)
        from_1 = on_fewer_ranks(deepspeed, 2, x_ST, saved[1], device)
        from_3 = on_fewer_ranks(deepspeed, 3, x_ST, saved[3], device)
    claim("fewer ranks: plain checkpoint refused", 1, refused)
    error = largest_difference(from_1, expected["losses"])
    claim("fewer ranks, stage 1 to 2: losses, error", 0, error, atol=1e-5, question=6)
    error = largest_difference(from_3, expected["losses"])
    claim("fewer ranks, stage 3: losses, error", 0, error, atol=1e-5, question=6)


# %% [markdown]
# ## 8. Configs for machines with GPUs
#
# Four configs that this lesson does not run by default, written to deepspeed_configs by
# `--write-configs`; fsdp/README.md explains every key. They are for models of billions of
# parameters: DeepSpeed's default sizes, its own Adam, which is compiled on first use, and a warmup
# of 2,000 updates. Batch, learning rate and decay are yours to choose. `--deepspeed_config` puts
# this lesson's small values in their place, and says which.
#
# - `fp16.json` for GPUs without bfloat16.
# - `offload_cpu.json`: masters and moments in the host's memory. `data_types: grad_accum_dtype`
#   adds micro-batches up in float32, where bfloat16 would drop small gradients next to a large sum.
# - `offload_nvme.json`: stage 3 with masters, moments and parameters on a local disk
#   (ZeRO-Infinity, Rajbhandari et al. 2021). `aio` says how the disk is read: in which blocks, and
#   how many at a time.
# - `zeropp.json`: ZeRO++ (Wang et al. 2023) on nodes of 8 GPUs. **hpZ** keeps a second shard of the
#   parameters inside each node, so only the first forward pass of an update gathers across nodes.
#   **qwZ** gathers weights in 8 bits, and **qgZ** reduces gradients in 4. Both need CUDA kernels,
#   and both change values, where stages 1 to 3 do not.

# %%
CPU = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
DISK = {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True}
NVME = {
    "offload_optimizer": {
        **DISK,
        "buffer_count": 12,
        "pipeline_read": True,
        "pipeline_write": True,
    },
    "offload_param": {**DISK, "buffer_count": 5, "buffer_size": 10**8, "max_in_cpu": 10**9},
}
ASYNCHRONOUS_IO = {
    "block_size": 2**20,  # bytes
    "queue_depth": 8,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
}
PLUS_PLUS = {
    "stage": 3,
    "zero_hpz_partition_size": 8,
    "zero_quantized_weights": True,
    "zero_quantized_gradients": True,
}
FLOAT32 = {"grad_accum_dtype": "fp32"}
LARGE: dict = COMMON | {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": COMMON["scheduler"]["params"] | {"warmup_max_lr": 3e-4, "warmup_num_steps": 2000},
    },
}
IN_BF16 = {"bf16": {"enabled": True}}
CONFIGS = {
    "fp16.json": LARGE | {"zero_optimization": {"stage": 2}, "fp16": FP16},
    "offload_cpu.json": LARGE
    | IN_BF16
    | {"zero_optimization": {"stage": 2, **CPU}, "data_types": FLOAT32},
    "offload_nvme.json": LARGE
    | IN_BF16
    | {"zero_optimization": {"stage": 3, **NVME}, "aio": ASYNCHRONOUS_IO},
    "zeropp.json": LARGE | IN_BF16 | {"zero_optimization": PLUS_PLUS},
}


def check_config(
    deepspeed: ModuleType, path: str, x_ST: torch.Tensor, expected: dict, device: torch.device
) -> None:
    """Train with the stage and precision of a file, and the lesson's batch, rates and AdamW."""
    file = json.loads(Path(path).read_text())
    file.pop("train_batch_size", None)  # it follows from the other two
    replaced = [key for key in file if key in COMMON]
    print0(f"{'':13}{Path(path).name}: this lesson's values for")
    print0(f"{'':13}{', '.join(replaced) or 'nothing'}")
    engine = start_engine(deepspeed, device, file | COMMON)
    losses = train(engine, x_ST, UPDATES)
    rounded = engine.bfloat16_enabled() or engine.fp16_enabled()
    engine.destroy()
    error = largest_difference(losses, expected["losses"])
    claim(f"{Path(path).name}: losses, error", 0, error, atol=BF16_ERROR if rounded else 1e-5)


# %% [markdown]
# ## 9. How it is measured
#
# The **oracle** is one process, rank 0, that sees all sequences of an update at once. FSDP2 runs
# through the same loop, written by hand: an update's micro-batches, the clip, the optimizer, the
# scheduler. The text is Python's own sources; the sequences that follow those for training are held
# out.


# %%
def small_gpt() -> "GPT":
    return GPT(L=2)


def new_gpt(device: torch.device) -> "GPT":
    torch.manual_seed(0)  # the same weights on every rank
    return small_gpt().to(device)


def read_sequences(path: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sequences of 65 bytes to train on, and 2n + 1 others to evaluate on."""
    S = EPOCH * MICRO_BATCH * ACCUMULATION * WORLD_SIZE
    E = 2 * WORLD_SIZE + 1
    files = [Path(path)] if path else sorted(Path(argparse.__file__).parent.glob("[a-r]*.py"))
    text = bytearray()
    for file in files:
        text += file.read_bytes()
    if len(text) < 65 * (S + E):
        refuse(f"--data needs {65 * (S + E):,} bytes of text; got {len(text):,}; take a longer one")
    rows_NT = torch.frombuffer(text[: 65 * (S + E)], dtype=torch.uint8).view(S + E, 65).long()
    return rows_NT[:S], rows_NT[S:]


def mean_loss(model: Callable, x_BT: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of predicting each byte from those before it, in float32."""
    logits_BTV = model(x_BT[:, :-1])
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), x_BT[:, 1:].flatten())


def train_torch(model: nn.Module, batches: Callable, device: torch.device) -> list[float]:
    """Train by PyTorch alone on `batches(update)`; return this rank's losses."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda update: min(max(update - 1, 0) / WARMUP, 1),  # as WarmupLR has it
    )
    losses = []
    for update in range(UPDATES):
        of_update = batches(update)
        total = 0.0
        for x_BT in of_update:
            loss = mean_loss(model, x_BT.to(device)) / len(of_update)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), COMMON["gradient_clipping"])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def one_process(x_ST: torch.Tensor, x_ET: torch.Tensor, device: torch.device) -> dict:
    """Return what one process sees: each update's loss, and the held-out loss before and after."""
    model = new_gpt(device)
    with torch.no_grad():
        before = mean_loss(model, x_ET.to(device)).item()
    losses = train_torch(model, lambda update: [sequences_of(update, x_ST)], device)
    with torch.no_grad():
        after = mean_loss(model, x_ET.to(device)).item()
    return {"losses": losses, "held out at first": before, "held out": after}


def average(values: list[float], device: torch.device) -> list[float]:
    """Return each value's mean over the ranks of the present group."""
    mean = torch.tensor(values, dtype=torch.float64, device=device) / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.tolist()


def largest_difference(ours: list[float], expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, expected, strict=True))


# %% [markdown]
# Bytes of a file are those of the tensors in it, and of the file. To change the number of ranks
# inside one run, all ranks leave their group and join a smaller one, through the store that they
# met at. DeepSpeed's `destroy_process_group` also forgets the groups that it had made.


# %%
def tensor_bytes(file: Path) -> int:
    """Return the bytes of the tensors that a file of `torch.save` holds, scalars left out."""
    content = torch.load(file, map_location="cpu", weights_only=False)
    tensors = [leaf for leaf in tree_leaves(content) if isinstance(leaf, torch.Tensor)]
    once = {tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor.numel() > 1}
    return sum(once.values())


def make_universal(folder: Path, stage: int) -> None:
    """Convert the newest checkpoint in `folder`, as ds_to_universal does from a command line."""
    from deepspeed.checkpoint import ds_to_universal

    newest = folder / (folder / "latest").read_text()
    options = argparse.Namespace(
        input_folder=str(newest),
        output_folder=str(folder / "universal"),
        num_extract_workers=1,  # in this process
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=stage < 3,
    )
    silence = io.StringIO()
    with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
        ds_to_universal.main(options)


@contextlib.contextmanager
def groups_of_fewer(deepspeed: ModuleType, device: torch.device) -> Iterator[None]:
    """Make the ranks n/m groups of m, the largest proper divisor of n; then one group again."""
    store = dist.distributed_c10d._get_default_store()
    m = max(size for size in range(1, WORLD_SIZE) if WORLD_SIZE % size == 0)
    number, rank = divmod(RANK, m)
    regroup(deepspeed, device, dist.PrefixStore(f"group {number}", store), rank, m)
    yield
    regroup(deepspeed, device, dist.PrefixStore("all again", store), RANK, WORLD_SIZE)


def regroup(
    deepspeed: ModuleType, device: torch.device, store: dist.Store, rank: int, size: int
) -> None:
    """Leave the present group and join another one, as if a launcher had started it so."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}  # DeepSpeed reads these, too
    hook = sys.excepthook  # the plumbing's; init_process_group sets one of its own
    deepspeed.comm.destroy_process_group()
    options = {"store": store, "rank": rank, "world_size": size, "timeout": timedelta(minutes=2)}
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device, **options)
    else:
        dist.init_process_group("gloo", **options)
    sys.excepthook = hook


@contextlib.contextmanager
def shared_folder(path: str | None) -> Iterator[Path]:
    """Give all ranks the same folder: `path`, or a temporary one of rank 0's."""
    if path:
        yield Path(path)
        return
    own = tempfile.TemporaryDirectory() if RANK == 0 else None
    yield Path(from_rank_0(own.name if own else None))
    dist.barrier()
    if own:
        own.cleanup()


def from_rank_0(value: object) -> object:
    """Return rank 0's `value` on every rank."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


# %% [markdown]
# The import of DeepSpeed is guarded, since it would compile C++ for minutes.


# %%
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
# ## 10. On GPUs: tokens per second of FSDP2 and of each stage
#
# The same GPT with 0.94 billion parameters in bfloat16, with DeepSpeed's default buckets. Which of
# the two is faster depends on links, sizes and versions: measure it where you train.


# %%
def measure_on_gpus(deepspeed: ModuleType | None, device: torch.device) -> None:
    if device.type == "cpu" or WORLD_SIZE == 1:
        blocked("tokens per second: FSDP2, stages 1 to 3", needs="2 GPUs")
        return
    if not torch.cuda.is_bf16_supported(False):  # in hardware, not emulated
        blocked("tokens per second: FSDP2, stages 1 to 3", needs="2 GPUs with bfloat16")
        return
    x_BT = torch.randint(32_768, (2, 2049), device=device)
    measure_fsdp2(x_BT)
    for stage in (1, 2, 3) if deepspeed else ():
        gc.collect()
        torch.cuda.empty_cache()
        measure_stage(deepspeed, stage, x_BT)
    gc.collect()
    torch.cuda.empty_cache()


def large_gpt(device: torch.device) -> "GPT":
    with device:
        return GPT(L=16, D=2048, T=2048, V=32_768, heads=16)


def measure_fsdp2(x_BT: torch.Tensor) -> None:
    model = sharded(large_gpt(x_BT.device), torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())

    def update() -> None:
        mean_loss(model, x_BT).backward()
        optimizer.step()
        optimizer.zero_grad()

    report("FSDP2", update)


def measure_stage(deepspeed: ModuleType, stage: int, x_BT: torch.Tensor) -> None:
    config = COMMON | {"bf16": {"enabled": True}, "gradient_accumulation_steps": 1}
    config = config | {"zero_optimization": {"stage": stage}}  # all else by default
    engine, *_ = deepspeed.initialize(model=large_gpt(x_BT.device), config=config)

    def update() -> None:
        engine.backward(mean_loss(engine, x_BT))
        engine.step()

    report(f"stage {stage}", update)
    engine.destroy()


def report(name: str, update: Callable) -> None:
    """Time five updates after two; print tokens per second of all ranks, and the peak."""
    for _ in range(2):
        update()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(5):
        update()
    end.record()
    end.synchronize()
    rate = 5 * 2 * 2048 * WORLD_SIZE / start.elapsed_time(end) * 1000
    peak = torch.cuda.max_memory_allocated() / 1e9
    print0(f"{'':13}{name}: {rate:,.0f} tokens/s, {peak:.1f} GB at most")


# %% [markdown]
# ## What you should have seen
#
# 1. 24 calls, 12 updates, 12 steps of the scheduler. A schedule written in calls, or in sequences,
#    is off by a factor that changes with the accumulation; DeepSpeed's counts updates.
# 2. Two: the rate is 0 when the scheduler is made, and 0 again after its first step. That costs a
#    run two updates. It costs a day to anyone who compares DeepSpeed with another trainer step by
#    step.
# 3. By less than 1e-6 of 5.7, which is rounding. What stages 1 to 3 and FSDP2 learn is what one
#    process learns, held-out loss included. The choice among them is about memory and messages.
# 4. None, and all 320. In bfloat16 alone every LayerNorm stays at its initial ones forever, and the
#    loss of 12 updates does not tell. With masters it moves, and the losses stay within 0.01 of
#    float32's. FSDP2 needs no key for that: its shards *are* float32.
# 5. Stage 1 takes 16 bytes per parameter in float32 and 14 in bfloat16: rank 0 writes the weights,
#    and each rank its 12/n of masters and moments. Stage 3 takes 12, each rank 12/n, and the files
#    named after the model hold no weights. A model of 7B parameters fills 84 to 98 GB each time it
#    is saved.
# 6. With n ranks none, to the bit: masters, moments, rate, counters and data are as they were. With
#    fewer ranks the plain checkpoint is refused. From the universal one the losses agree within
#    rounding, since sums over other ranks add up in another order.
# 7. Four, one per halving, and the scheduler stands still in them. Left out are the first updates,
#    while the scale is too high. BLOCKED on a CPU of which DeepSpeed says that it cannot compute in
#    float16.
#
# **Try.** With `warmup_min_lr` 1e-4 every update moves the weights, so none is counted as still.
# And DeepSpeed's losses leave those of one process, whose rates still begin at 0. Without the
# optimizer's states the weights come back as they were. So the first loss after the checkpoint,
# which is computed before any update, is right. Then the moments begin at zero, and it shows.
#
# **On GPUs** float16 runs, and section 10 prints tokens per second. `torch_adam` false takes the
# fused Adam. Training stands still while a checkpoint is written, for as long as the disk takes.
#
# **Where it bites.** `save_checkpoint` on rank 0 only waits forever for the others. A checkpoint of
# n shares needs a file system that all nodes share, or the same ranks on the same nodes. And
# another number of ranks with the same config is another batch.


# %%
def run_deepspeed(
    deepspeed: ModuleType,
    x_ST: torch.Tensor,
    x_ET: torch.Tensor,
    folder: Path,
    expected: dict,
    device: torch.device,
) -> None:
    """Claim everything about DeepSpeed: stage 2 for the counts, 1 and 3 for the checkpoints."""
    engine = start_engine(deepspeed, device, config_of(2))
    losses = check_counting(engine, x_ST)
    compare("stage 2", losses, evaluate(engine, x_ET, device), expected)
    engine.destroy()
    check_bf16(deepspeed, x_ST, folder, expected, device)
    check_fp16(deepspeed, x_ST, device)
    saved = {1: folder / "stage1", 3: folder / "stage3"}
    for stage, place in saved.items():
        engine, losses = check_resume(deepspeed, stage, x_ST, place, device)
        compare(f"stage {stage}", losses, evaluate(engine, x_ET, device), expected)
        engine.destroy()
    check_other_world(deepspeed, saved, x_ST, expected, device)


def write_configs(folder: str) -> None:
    for name, config in CONFIGS.items():
        Path(folder, name).write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    options = command_line(
        {
            "--data": {"metavar": "PATH", "help": "text to train on (Python's own sources)"},
            "--folder": {"metavar": "DIR", "help": "for checkpoints; all nodes share it (in /tmp)"},
            "--deepspeed_config": {"metavar": "PATH", "help": "only this file's stage, dtype"},
            "--write-configs": {"metavar": "DIR", "help": "write section 8's configs there first"},
            "--local_rank": {"type": int, "help": "appended by deepspeed; LOCAL_RANK says it too"},
        }
    )
    launch()
    path = options.deepspeed_config
    if path and not Path(path).is_file():
        refuse(f"--deepspeed_config needs a JSON file; got {path}; see fsdp/deepspeed_configs")
    x_ST, x_ET = read_sequences(options.data)
    if options.write_configs and RANK == 0:
        write_configs(options.write_configs)
    os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "1"))  # by deepspeed
    device = setup()
    deepspeed = import_deepspeed(device)
    expected = from_rank_0(one_process(x_ST, x_ET, device) if RANK == 0 else None)
    if path and deepspeed:
        check_config(deepspeed, path, x_ST, expected, device)
        finish()
    fall = expected["held out at first"] - expected["held out"]
    claim("one process: held-out loss falls by", 1.1, fall, atol=0.6, varies=True)
    check_fsdp2(x_ST, x_ET, expected, device)
    measure_on_gpus(deepspeed, device)
    if deepspeed is None:
        blocked("what DeepSpeed does", needs="deepspeed: pip install -e '.[deepspeed]'")
        finish()
    with shared_folder(options.folder) as folder:
        run_deepspeed(deepspeed, x_ST, x_ET, folder, expected, device)
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
