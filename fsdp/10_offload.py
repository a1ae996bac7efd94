"""Offload: parameters and optimizer state on the host or on a disk, and when it pays
==================================================================================

**Question.** A model's 16 bytes per parameter can leave the GPU for the host's memory (FSDP2's
`CPUOffloadPolicy`, ZeRO-Offload) or for a disk (ZeRO-Infinity). How many bytes then cross the link
in every step, does anything learned change, and when is it worth it?

**Predict**, and write it down before you run. P parameters on n ranks; a rank's share is P/n
elements, and every figure is in bytes per element of that share and step.

1. FSDP2 keeps float32 shards, gradients and moments on the host. How many bytes go up to the GPU,
   and how many come down? How many if the model computes in bfloat16?
2. How many bytes go up with `reshard_after_forward=False`, and with an int s? How many go up and
   down, in all, if an update has two micro-batches?
3. DeepSpeed's stage 2 in bfloat16, with masters and moments on the host. The paper on ZeRO-Offload
   has 2 bytes of gradients come down and 2 of parameters go up. And the library?
4. Stage 3 keeps its bfloat16 parameters on the host, too. How many bytes go up now? And down?
5. Masters, moments, gradients and parameters lie on a disk. How many bytes does a step read, how
   many does it write, and how large are the files?
6. By how much do the losses differ from those without offload?
7. AdamW on the host: how many bytes per element do the operations of torch's plain `AdamW` read and
   write in a step? One pass over weight, gradient and moments would be 28. How many times faster is
   `fused=True`, which makes one?
8. How much faster is a copy from page-locked (*pinned*) memory than from ordinary memory?

**Run.**

    python 10_offload.py --compile     # once: DeepSpeed's C++, minutes on two cores; then it runs
    torchrun --standalone --nproc-per-node=4 10_offload.py     # NCCL on 4 GPUs, else gloo
    python 10_offload.py                                       # the same, started for you
    python 10_offload.py --folder DIR      # swap files there, on a local disk (default: in /tmp)

Not run on several GPUs.

**Try.** In `FREE_AT_ONCE`, set `stage3_max_live_parameters` and `stage3_max_reuse_distance` to
10**9: what fails? In `ON_DISK`, set `max_in_cpu` to 10**9: what fails now, and where do the
parameters lie?

**Before.** fsdp/04_fsdp_refinements.py: `reshard_after_forward=s` without offload.
fsdp/03_deepspeed_bytes.py: the 16 bytes, and who holds them.

**Next.** fsdp/sharding_strategies.md: which strategy when. profiling/01_distributed_profiling.py.
"""

import argparse
import contextlib
import copy
import ctypes
import json
import logging
import math
import mmap
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

# Shapes: B examples, D features, H hidden ones. P is the number of parameters, n the number of
# ranks.

LAYERS = 1
BATCH = 4  # examples per rank and micro-batch
STEPS = 3
ADAM = {"lr": 1e-3, "weight_decay": 0.01}

# %% [markdown]
# ## 1. What crosses the link
#
# A GPU reaches the host's memory through a link: PCIe, about 63 GB/s each way in generation 5,
# where its own memory gives 3,350 GB/s. Whatever is **offloaded** lives on the host's side, and
# what the GPU computes with must cross. FSDP2 does it for everything that a rank holds:
#
#     host    | shard w (4)  moments (8)  gradient (4) |      the CPU runs Adam
#               | up 4: forward    | up 4: backward   ^ down 4: backward
#     GPU       v                  v                  |
#             gather, compute    gather, compute    reduce-scatter
#
# Up go the float32 shards, since that is what lies there; if the model computes in bfloat16, the
# GPU rounds them when they have arrived. With `reshard_after_forward=False` the gathered weights
# stay from forward to backward, so nothing goes up again. An int s frees them all the same, and
# keeps 1/s of them *on the GPU* (fsdp/04_fsdp_refinements.py): backward gathers from that.
#
# Nothing waits for the next micro-batch: each has its gathers and its gradients.

# %%
Traffic = tuple[float, float]  # bytes up and down, per element of this rank's share


def offloaded(device: torch.device, dtype: torch.dtype, reshard: bool | int) -> nn.Module:
    """Return the network under FSDP2, its shards on the host."""
    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda")  # pinning is CUDA's
    return sharded(build(device), device, dtype, reshard, policy)


def sharded(
    model: "Network",
    device: torch.device,
    dtype: torch.dtype,
    reshard: bool | int,
    policy: OffloadPolicy,
) -> nn.Module:
    mesh = init_device_mesh(device.type, (WORLD_SIZE,))
    for module in (*model.blocks, model):
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard,
            mp_policy=MixedPrecisionPolicy(param_dtype=dtype, output_dtype=torch.float32),
            offload_policy=policy,
        )
    return model


def train_fsdp2(
    model: nn.Module, device: torch.device, steps: int = STEPS, micro_batches: int = 1
) -> tuple[list[float], Traffic]:
    """Return the losses, and what crossed the link in the last step."""
    x_BD, y_BD = examples(RANK, device)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    host = [parameter.to_local() for parameter in model.parameters()]
    losses = []
    for _ in range(steps):
        with HostLink(device, host, to_host=True) as link:
            for _ in range(micro_batches):
                loss = F.mse_loss(model(x_BD), y_BD)
                loss.backward()
        optimizer.step()  # on the host: nothing crosses
        optimizer.zero_grad()
        losses.append(loss.item())
    return average(losses, device), link.traffic()


# %% [markdown]
# The claims follow; section 6 says how they are counted.


# %%
def check_fsdp2(expected: list[float], device: torch.device) -> None:
    kept = sharded(build(device), device, torch.float32, True, OffloadPolicy())
    without, _ = train_fsdp2(kept, device)
    model = offloaded(device, torch.float32, True)
    losses, (up, down) = train_fsdp2(model, device)
    claim("FSDP2: bytes up", 4 + 4, up, question=1)
    claim("FSDP2: bytes down", 4, down, question=1)
    error = largest_difference(losses, expected)
    claim("FSDP2: losses, error against one process", 0, error, atol=1e-4, question=6)
    same_or_close("FSDP2", losses, without, device, atol=1e-4)
    check_device_bytes(kept, model, device)

    _, (up, down) = train_fsdp2(offloaded(device, torch.bfloat16, True), device, steps=1)
    claim("FSDP2, bfloat16: bytes up and down", 12, up + down, question=1)
    _, (up, _) = train_fsdp2(offloaded(device, torch.float32, False), device, steps=1)
    claim("reshard_after_forward=False: bytes up", 4, up, question=2)
    model = offloaded(device, torch.float32, True)
    _, traffic = train_fsdp2(model, device, steps=1, micro_batches=2)
    claim("two micro-batches: bytes up and down", 2 * 12, sum(traffic), question=2)
    divisors = [s for s in range(2, WORLD_SIZE) if WORLD_SIZE % s == 0]
    if not divisors:
        blocked("reshard_after_forward=s: bytes up", needs="4 ranks, or 6, 8, 9, ...")
        return
    _, (up, _) = train_fsdp2(offloaded(device, torch.float32, divisors[0]), device, steps=1)
    claim("reshard_after_forward=s: bytes up", 4, up, question=2)


def check_device_bytes(kept: nn.Module, model: nn.Module, device: torch.device) -> None:
    """Claim where parameters lie between steps."""
    if device.type == "cpu":
        blocked("bytes of parameters left on the GPU", needs="1 GPU")
        return
    for name, network, left in ("kept", kept, 4), ("offloaded", model, 0):
        shards = [parameter.to_local() for parameter in network.parameters()]
        held = sum(shard.nbytes for shard in shards if shard.device.type == "cuda")
        claim(f"bytes of parameters on the GPU, {name}", left, held / share())


# %% [markdown]
# ## 2. DeepSpeed: the optimizer alone, or parameters too
#
# ZeRO-Offload (Ren et al. 2021) keeps bfloat16 parameters on the GPU, and masters and moments on
# the host, where a CPU Adam updates them (`DeepSpeedCPUAdam`, vectorised C++). By the paper,
# 2 bytes of gradient come down and 2 of parameter go up. Read the library (runtime/zero,
# `async_inplace_copy_grad_to_fp32_buffer_from_gpu`): it casts a gradient to float32 *on the GPU*,
# and copies that.
#
# Stage 3 with `offload_param` fetches parameters for forward, and for backward again. And its
# `partition_grads` moves a gradient three times: down into a bfloat16 buffer, where micro-batches
# would be added up; up again, to take its norm; and down as float32, for Adam. With one
# micro-batch, two of the three are wasted.
#
#     stage 2     gradient   down 4                    parameter   up 2
#     stage 3     gradient   down 2, up 2, down 4      parameter   up 2 (forward), up 2 (backward)

# %%
FREE_AT_ONCE = {  # as FSDP2 does: gather for forward, free, gather for backward
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}
KEPT = {"stage": 3, **FREE_AT_ONCE}
OPTIMIZER_ON_HOST = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
ALL_ON_HOST = KEPT | {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


def start_engine(
    deepspeed: ModuleType, device: torch.device, zero: dict, cpu_adam: bool = False
) -> nn.Module:
    """Return DeepSpeed's engine; Adam is torch's unless it shall be DeepSpeed's for the CPU."""
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "bf16": {"enabled": True},
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {**ADAM, "torch_adam": not cpu_adam}},
        "zero_optimization": zero | {"reduce_bucket_size": D() * H(), "sub_group_size": part()},
    }
    return deepspeed.initialize(model=build(device), config=config)[0]


def train_deepspeed(engine: nn.Module, device: torch.device) -> tuple[list[float], Traffic]:
    """Return the losses, and what crossed the link in the last step."""
    x_BD, y_BD = examples(RANK, device)
    losses = []
    for _ in range(STEPS):
        with HostLink(device, on_the_host(engine), to_host=False) as link:
            loss = F.mse_loss(engine(x_BD.bfloat16()).float(), y_BD)
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
    return average(losses, device), link.traffic()


def on_the_host(engine: nn.Module) -> list[torch.Tensor]:
    """Return the buffers that DeepSpeed keeps on the host when it offloads."""
    zero = engine.zero_optimization_stage()
    config = engine._config.zero_config
    tensors = []
    if config.offload_optimizer and zero == 2:
        tensors += engine.optimizer.single_partition_of_fp32_groups
        tensors += engine.optimizer.param_buffer_of_bit16_for_cpu_offload_groups
    elif config.offload_optimizer:
        tensors += engine.optimizer.fp32_partitioned_groups_flat
        tensors.append(engine.optimizer.grad_partitions_flat_buffer)
    if config.offload_param:
        tensors += [parameter.ds_tensor for parameter in engine.module.parameters()]
    return tensors + [tensor.grad for tensor in tensors if tensor.grad is not None]


# %% [markdown]
# Every run is compared with stage 3 that keeps everything on the GPU.


# %%
def check_deepspeed(
    deepspeed: ModuleType, expected: list[float], found: set[str], device: torch.device
) -> list[float]:
    """Return the losses of stage 3 without offload."""
    engine = start_engine(deepspeed, device, KEPT)
    kept, _ = train_deepspeed(engine, device)
    engine.destroy()
    error = largest_difference(kept, expected)
    claim("stage 3: losses, error against one process", 0, error, atol=BF16_ERROR, question=6)

    cpu_adam = "cpu_adam" in found
    engine = start_engine(deepspeed, device, OPTIMIZER_ON_HOST, cpu_adam)
    losses, (up, down) = train_deepspeed(engine, device)
    claim("optimizer on the host: bytes down", 4, down, question=3)
    claim("optimizer on the host: bytes up", 2, up, question=3)
    error = largest_difference(losses, kept)
    if cpu_adam:
        assert type(engine.basic_optimizer).__name__ == "DeepSpeedCPUAdam"
        claim("DeepSpeedCPUAdam: losses, error", 0, error, atol=1e-3, question=6)
        check_cpu_adam(deepspeed)
    else:
        claim("torch's Adam on the host: losses, error", 0, error, atol=BF16_ERROR, question=6)
        blocked("DeepSpeedCPUAdam: losses, error", needs="--compile, once, and g++")
    engine.destroy()

    engine = start_engine(deepspeed, device, ALL_ON_HOST)
    losses, (up, down) = train_deepspeed(engine, device)
    engine.destroy()
    claim("parameters too: bytes up", 2 + 2 + 2, up, question=4)
    claim("parameters too: bytes down", 2 + 4, down, question=4)
    same_or_close("parameters too", losses, kept, device, atol=BF16_ERROR)
    return kept


BF16_ERROR = 0.03  # of losses near 1: some of bfloat16's steps of 2**-8


def check_cpu_adam(deepspeed: ModuleType) -> None:
    """Claim that it is AdamW: with decay and rates that a loss after three steps would not show."""
    ours = nn.Parameter(torch.randn(1000, generator=torch.Generator().manual_seed(RANK)))
    theirs = nn.Parameter(ours.detach().clone())
    adam = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.5}
    optimizers = [torch.optim.AdamW([ours], **adam)]
    optimizers += [deepspeed.ops.adam.DeepSpeedCPUAdam([theirs], **adam)]
    for _ in range(10):
        ours.grad = torch.randn(1000)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    error = (ours - theirs).abs().max().item()
    claim("DeepSpeedCPUAdam: weights of 10 steps, error", 0, error, atol=1e-5, question=6)


# %% [markdown]
# ## 3. A disk: ZeRO-Infinity
#
# With device `nvme`, masters, moments and float32 gradients lie in files, one per tensor and rank,
# and a sub-group of the parameters at a time is read, updated and written back. Rajbhandari et al.
# (2021, section 4) count 16 bytes read and 16 written per parameter. With `offload_param` the
# bfloat16 parameters lie in files as well; `max_in_cpu` 0 says that none is cached on the host.
#
#     backward   write the gradient 4
#     update     read  master 4, moments 8, gradient 4
#                write master 4, moments 8             and the parameter 2
#     forward    read the parameter 2;   backward: read it 2 again
#
# The files are opened with O_DIRECT: past the kernel's page cache, straight from and to the disk,
# many requests at a time (libaio). That works in blocks, and tensors of less than 1 MiB stay in
# memory. So each share of a weight has 2**19 elements here, or a few more.
#
# With `pipeline_read` and `pipeline_write` the next sub-group is read, and the last one written,
# while one is updated. That takes buffers for three: 3 x 4 tensors. With 4 buffers, the default,
# DeepSpeed 0.19 stops at an assertion as soon as there are two sub-groups.

# %%
ON_DISK = {"device": "nvme", "pin_memory": False, "max_in_cpu": 0}
AHEAD = {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}


def on_disk(folder: str) -> dict:
    """Return stage 3 with everything in files below `folder`."""
    place = ON_DISK | {"nvme_path": folder, "buffer_count": 5, "buffer_size": part()}
    optimizer = AHEAD | {"device": "nvme", "nvme_path": folder, "pin_memory": False}
    return KEPT | {"offload_optimizer": optimizer, "offload_param": place}


def check_disk(
    deepspeed: ModuleType, kept: list[float], found: set[str], folder: str, device: torch.device
) -> None:
    why_not = "--compile, once; libaio-dev" if "async_io" not in found else ""
    if why_not or not reaches_a_disk(folder):
        blocked("bytes read from a disk, and written", needs=why_not or "--folder on a local disk")
        return
    x_BD, y_BD = examples(RANK, device)
    engine = start_engine(deepspeed, device, on_disk(folder))
    losses = []
    for _ in range(STEPS):
        before = bytes_of_the_kernel()
        start = time.perf_counter()
        with CountedFiles() as files:
            loss = F.mse_loss(engine(x_BD.bfloat16()).float(), y_BD)
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
        seconds = time.perf_counter() - start
    after = bytes_of_the_kernel()
    claim("disk: bytes read", 16 + 2 + 2, files.read / share(), question=5)
    claim("disk: bytes written", 16 + 2, files.written / share(), question=5)
    read, written = ((b - a) / share() for a, b in zip(before, after, strict=True))
    text = "disk, as the kernel counts: read, at least"
    claim(text, 20, read, sign=">=", question=5, varies=True)
    text = "disk, as the kernel counts: written, at least"
    claim(text, 18, written, sign=">=", question=5, varies=True)
    mine = [path for path in Path(folder).rglob("*.swp") if path.parent.name == f"rank{RANK}"]
    sizes = sum(path.stat().st_size for path in mine)
    claim("disk: bytes of the files", 12 + 4 + 2, sizes / share(), question=5)
    same_or_close("disk", average(losses, device), kept, device, atol=BF16_ERROR)
    speed = (files.read + files.written) / seconds / 1e6
    print0(f"{'':13}a step took {1e3 * seconds:,.0f} ms, {speed:,.0f} MB/s to and from the disk")
    engine.destroy()


# %% [markdown]
# ## 4. When it pays: the link hides behind computing, Adam on the host does not
#
# The bytes of a step do not depend on the batch, and the computation grows with it. Three terms
# make a step. All ranks of a machine share the host's memory, say 300 GB/s of it. For 7 billion
# parameters on 8 GPUs of 4e14 FLOP/s, each with a link of 55 GB/s:
#
#     computing   6 P x tokens FLOP per rank      0.19 s for 1,800 tokens, 0.84 s for 8,000
#     the link    12 P/n bytes per rank           84e9 / 8 / 55e9   = 0.19 s
#     Adam        28 P bytes of the host's memory   196e9 / 300e9   = 0.65 s, at best
#
# The link's term can overlap with computing, and hides behind it from 1,800 tokens per rank on.
# (Eight links at once want 440 GB/s of the host's memory, though.) Adam's term hides behind
# nothing: it begins when the gradients are there, and the next step needs its weights. It is paid
# once per update, however many micro-batches there are, while the link is paid for each. So the
# cure for one is a larger micro-batch, and for the other a larger batch: to be a tenth of an
# update, Adam's 0.65 s want 56,000 tokens per GPU. Offload never makes a step faster. It pays if
# the model does not fit otherwise, or if the memory that it frees lets a batch grow.
#
# "At best" means one pass: read weight, gradient and two moments, 16 bytes, and write all but the
# gradient, 12. `DeepSpeedCPUAdam` does so, and torch's `AdamW(fused=True)`. Torch's plain `AdamW`
# runs one operation after another, and each goes through the whole tensor. Their bytes per element:
#
#     weight.mul_(1 - lr decay)            8        denominator = moment2.sqrt()   8
#     moment1.lerp_(gradient)             12        denominator / correction       8
#     moment2.mul_(beta2)                  8        denominator.add_(eps)          8
#     moment2.addcmul_(gradient, ...)     12        weight.addcdiv_(moment1, ...) 16      80 in all

# %%
ELEMENTS = 2**22  # of a weight on each rank: 16 MiB, and as much for gradient and moments


def host_adam(fused: bool) -> torch.optim.Optimizer:
    """Return AdamW of one weight in the host's memory, after its first step."""
    weight = nn.Parameter(torch.randn(ELEMENTS))
    weight.grad = torch.randn(ELEMENTS)
    optimizer = torch.optim.AdamW([weight], **ADAM, fused=fused)
    optimizer.step()  # makes the moments
    return optimizer


def check_adam_on_the_host() -> None:
    plain = host_adam(fused=False)
    fused = host_adam(fused=True)
    with TouchedBytes() as touched:
        plain.step()
    text = "plain AdamW: bytes read and written"
    claim(text, 80, touched.nbytes / ELEMENTS, question=7)
    times = [(seconds_of(plain.step), seconds_of(fused.step)) for _ in range(5)]
    slow, fast = (sorted(column)[2] for column in zip(*times, strict=True))
    claim("plain AdamW's seconds / fused, at least", 1.5, slow / fast, ">=", question=7, timed=True)
    for name, nbytes, seconds in ("plain", 80, slow), ("fused", 28, fast):
        print0(
            f"{'':13}{name}: {1e3 * seconds:.1f} ms, {nbytes * ELEMENTS / seconds / 1e9:.1f} GB/s"
        )


def seconds_of(work: Callable) -> float:
    """Return how long work on the CPU takes while all ranks do it."""
    dist.barrier()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# %% [markdown]
# ## 5. On GPUs: the link, pinned and pageable, and a real step
#
# A GPU reads the host's memory by itself (DMA), but only pages that the kernel has promised not to
# move: **pinned** ones. From ordinary, *pageable* memory the driver copies a piece into a pinned
# buffer of its own first, and the host waits for it. So only pinned copies overlap with anything.


# %%
def measure_on_gpus(device: torch.device) -> None:
    if device.type == "cpu":
        blocked("pinned copies / pageable ones, bytes per second", needs="1 GPU")
        return
    nbytes = 2**28
    gpu = torch.empty(nbytes, dtype=torch.uint8, device=device)
    speeds = {}
    for name, pinned in ("pageable", False), ("pinned", True):
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        up = nbytes / 1e6 / median_ms(lambda host=host: gpu.copy_(host, non_blocking=True))
        down = nbytes / 1e6 / median_ms(lambda host=host: host.copy_(gpu, non_blocking=True))
        print0(f"{'':13}{name:10} {up:8.1f} GB/s up, {down:8.1f} GB/s down")
        speeds[name] = up
    ratio = speeds["pinned"] / speeds["pageable"]
    claim("pinned copies / pageable, at least", 1.5, ratio, sign=">=", question=8, timed=True)
    if not torch.cuda.is_bf16_supported(False):  # in hardware, not emulated
        blocked("link's speed in a step / pinned, at least", needs="1 GPU with bfloat16")
        return
    measure_steps(speeds["pinned"] * 1e9, device)


def large_network(features: int = 8192, pairs: int = 8) -> "Network":
    """Return a network of 1.07 billion parameters, whose shares take a while to move."""
    network = Network()
    matrices = [nn.Linear(features, features, bias=False) for _ in range(2 * pairs)]
    blocks = [
        nn.Sequential(matrices[i], nn.ReLU(), matrices[i + 1]) for i in range(0, 2 * pairs, 2)
    ]
    network.blocks = nn.ModuleList(blocks)
    return network


def measure_steps(speed: float, device: torch.device) -> None:
    """Print a step's forward and backward, kept and offloaded, next to the link's own time."""
    nets = []
    for policy in OffloadPolicy(), CPUOffloadPolicy():
        with device:
            network = large_network()
        nets.append(sharded(network, device, torch.bfloat16, True, policy))
    features = nets[0].blocks[0][0].in_features
    parameters = sum(parameter.numel() for parameter in nets[0].parameters())
    link_ms = 12e3 * parameters / WORLD_SIZE / speed
    print0(f"{'':13}examples    kept ms    offloaded ms    the link alone, ms")
    shares = []
    for B in (64, 1024, 16_384):
        x_BD = torch.randn(B, features, device=device)
        times = [median_ms(lambda net=net, x=x_BD: step(net, x)) for net in nets]
        print0(f"{'':13}{B:8,} {times[0]:10.2f} {times[1]:15.2f} {link_ms:21.2f}")
        shares.append(link_ms / times[1])
    text = "link's speed in a step / pinned, at least"  # with so few examples it is all there is
    claim(text, 0.3, shares[0], sign=">=", timed=True)


def step(model: nn.Module, x_BD: torch.Tensor) -> None:
    with torch.enable_grad():
        model(x_BD).square().mean().backward()
    model.zero_grad()


# %% [markdown]
# ## 6. How it is measured
#
# **The link.** `HostLink` counts what the libraries ask to be moved: `to` another device, and
# copies between buffers, which it sees beneath torch's dispatcher. On GPUs the devices say which of
# them cross. On a CPU there is one memory, `to` copies nothing, and nothing crosses. But the
# library asks all the same. There, what lives on the host is a list of buffers; FSDP2 asks `to`
# bring gradients down as well, and DeepSpeed copies them. Bytes are those of the target, for a copy
# that changes the dtype converts first, and then crosses. Scalars are left out.


# %%
class HostLink(TorchDispatchMode):
    """Counts bytes from the host's memory up to the GPU, and down, among given host buffers."""

    def __init__(self, device: torch.device, host: list[torch.Tensor], to_host: bool) -> None:
        super().__init__()
        self.cuda = device.type == "cuda"
        self.host = {tensor.untyped_storage().data_ptr() for tensor in host}
        self.to_host = to_host  # whether `to` brings things down as well
        self.up = 0
        self.down = 0

    def __enter__(self) -> "HostLink":
        original = torch.Tensor.to

        def to(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
            result = original(tensor, *args, **kwargs)
            places = [a for a in (*args, *kwargs.values()) if isinstance(a, str | torch.device)]
            up = self.on_host(tensor)
            crosses = up or self.to_host
            if self.cuda:
                crosses = up != self.on_host(result)
            if places and crosses:
                self.count(up, result)
            return result

        torch.Tensor.to = to
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        del torch.Tensor.to
        super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its local tensors come by here in a moment
        by_copying = self.cuda or not self.to_host  # else `to` has given the host's buffer itself
        if by_copying and func._schema.name == "aten::copy_":
            target, source = args[:2]
            if self.on_host(source) != self.on_host(target):
                self.count(self.on_host(source), target)
        return func(*args, **(kwargs or {}))

    def on_host(self, tensor: torch.Tensor) -> bool:
        if self.cuda:
            return tensor.device.type == "cpu"
        return tensor.untyped_storage().data_ptr() in self.host

    def count(self, up: bool, target: torch.Tensor) -> None:
        if target.numel() == 1:
            return
        if up:
            self.up += target.nbytes
        else:
            self.down += target.nbytes

    def traffic(self) -> Traffic:
        return self.up / share(), self.down / share()


# %% [markdown]
# **Adam's bytes.** `TouchedBytes` adds up the tensors that each operation is given, each once, and
# the one that it returns, which an operation in place has written, too.


# %%
class TouchedBytes(TorchDispatchMode):
    """Counts the bytes that operations read from tensors, and write to them; no scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() > 1:
            read = {a.data_ptr(): a.nbytes for a in args if isinstance(a, torch.Tensor)}
            self.nbytes += sum(read.values()) + result.nbytes
        return result


# %% [markdown]
# **The disk.** `CountedFiles` stands between DeepSpeed and its asynchronous reads and writes. The
# kernel counts for itself what a process had read from a device, and written (/proc/self/io); a
# page that is loaded meanwhile counts as well, so its figures are lower bounds.


# %%
class CountedFiles:
    """Counts the bytes that DeepSpeed reads from its files, and writes to them."""

    def __init__(self) -> None:
        self.read = 0
        self.written = 0

    def __enter__(self) -> "CountedFiles":
        def swap_in(handle: object, buffers: list, paths: list) -> None:
            self.read += sum(buffer.nbytes for buffer in buffers)
            self.original[0](handle, buffers, paths)

        def swap_out(handle: object, buffers: list, paths: list) -> None:
            self.written += sum(buffer.nbytes for buffer in buffers)
            self.original[1](handle, buffers, paths)

        utils = sys.modules["deepspeed.runtime.swap_tensor.utils"]
        self.original = (utils.swap_in_tensors, utils.swap_out_tensors)
        self.put(swap_in, swap_out)
        return self

    def __exit__(self, *error: object) -> None:
        self.put(*self.original)

    def put(self, swap_in: Callable, swap_out: Callable) -> None:
        """Give every module of the swapper these two functions."""
        for name, module in list(sys.modules.items()):
            if name.startswith("deepspeed.runtime.swap_tensor."):
                for function, ours in ("swap_in_tensors", swap_in), ("swap_out_tensors", swap_out):
                    if function in vars(module):
                        setattr(module, function, ours)


def bytes_of_the_kernel() -> tuple[int, int]:
    """Return the bytes that this process has had read from devices, and written to them."""
    rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(rows["read_bytes"]), int(rows["write_bytes"])


def reaches_a_disk(folder: str) -> bool:
    """Whether O_DIRECT works in `folder`, and the kernel counts it, on all ranks."""
    works = False
    page = mmap.mmap(-1, 4096)  # begins at a page's boundary, as O_DIRECT demands
    if sys.platform == "linux":
        before = bytes_of_the_kernel()
        with contextlib.suppress(OSError):
            file = os.open(f"{folder}/try{RANK}", os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
            os.write(file, page)
            os.close(file)
        works = bytes_of_the_kernel()[1] > before[1]
    return all(gather_objects(works))


# %% [markdown]
# **DeepSpeed's C++** is compiled by `--compile`, in one process before there are ranks: ranks that
# compile at once wait for each other's lock. Afterwards every rank loads what lies in torch's
# folder for extensions, and takes no lock.


# %%
def compile_extensions() -> None:
    """Compile what offload needs, unless it is there."""
    if shutil.which("c++") is None:
        refuse("--compile needs a C++ compiler; found no c++; install g++ (and libaio-dev)")
    os.environ["PATH"] += f":{Path(sys.executable).parent}"  # ninja may lie there only
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if import_deepspeed(device) is None:
        refuse("--compile needs deepspeed; found none; pip install -e '.[deepspeed]'")
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder

    for builder in AsyncIOBuilder(), CPUAdamBuilder():
        print(f"compiling {builder.name}, for minutes ...", flush=True)
        builder.load()


def load_extensions() -> set[str]:
    """Give DeepSpeed what is compiled, and return the names."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    logging.disable(logging.WARNING)  # the import warns where there is no GPU
    from torch.utils import cpp_extension

    logging.disable(logging.NOTSET)
    found = set()
    for name in "pin_memory", "async_io", "cpu_adam":
        folder = Path(cpp_extension._get_build_directory(name, verbose=False))
        if (folder / f"{name}.so").exists():
            found.add(name)
    for name in sorted(set.intersection(*gather_objects(found)), reverse=True):  # pin_memory first
        folder = cpp_extension._get_build_directory(name, verbose=False)
        ctypes.CDLL(f"{folder}/{name}.so", mode=ctypes.RTLD_GLOBAL)  # async_io looks into the first
        OpBuilder._loaded_ops[name] = cpp_extension._import_module_from_library(name, folder, True)
    return set(OpBuilder._loaded_ops)


# %% [markdown]
# And some small helpers, which stand in other lessons, too.


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
# **The network** is made of pairs of matrices, and n divides both of their sides. The **oracle**
# is one process, rank 0, that trains on the examples of all ranks at once, in float32.


# %%
def D() -> int:
    """Features: 1,024, or the next multiple of n."""
    return WORLD_SIZE * math.ceil(1024 / WORLD_SIZE)


def H() -> int:
    """Hidden features: a rank's share of a matrix has D x 512 elements, 2**19 or a few more."""
    return 512 * WORLD_SIZE


def part() -> int:
    """Elements of a rank's share of one matrix."""
    return D() * H() // WORLD_SIZE


def share() -> int:
    """Elements of a rank's share of all parameters, P/n."""
    return 2 * LAYERS * part()


class Network(nn.Module):
    """Residual blocks of two matrices: (B, D) -> (B, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(LAYERS):
            up = nn.Linear(D(), H(), bias=False)
            down = nn.Linear(H(), D(), bias=False)
            self.blocks.append(nn.Sequential(up, nn.ReLU(), down))

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x_BD = x_BD + block(x_BD)
        return x_BD


@cache
def first_network() -> nn.Module:
    torch.manual_seed(0)  # the same weights on every rank
    return Network()


def build(device: torch.device) -> nn.Module:
    return copy.deepcopy(first_network()).to(device)


def examples(rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's inputs and targets, two random (B, D)."""
    generator = torch.Generator().manual_seed(rank)
    x_BD, y_BD = torch.randn(2, BATCH, D(), generator=generator)
    return x_BD.to(device), y_BD.to(device)


def one_process(device: torch.device) -> list[float]:
    """Return the losses of one process that sees every rank's examples."""
    model = build(device)
    pairs = [examples(rank, device) for rank in range(WORLD_SIZE)]
    x_BD, y_BD = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses = []
    for _ in range(STEPS):
        loss = F.mse_loss(model(x_BD), y_BD)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def average(losses: list[float], device: torch.device) -> list[float]:
    """Return each loss's mean over the ranks."""
    mean = torch.tensor(losses, dtype=torch.float64, device=device) / WORLD_SIZE
    dist.all_reduce(mean)
    return mean.tolist()


def largest_difference(ours: list[float], expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, expected, strict=True))


def same_or_close(
    name: str, losses: list[float], kept: list[float], device: torch.device, atol: float
) -> None:
    """Claim that offload changed nothing; a GPU's Adam rounds otherwise than a CPU's."""
    if device.type == "cpu":
        differ = sum(a != b for a, b in zip(losses, kept, strict=True))
        claim(f"{name}: losses that offload changed", 0, differ, question=6)
    else:
        error = largest_difference(losses, kept)
        claim(f"{name}: losses, error of offload", 0, error, atol=atol, question=6)


# %% [markdown]
# Times of GPUs are medians between two CUDA events. The swap files lie in a folder of their own,
# which goes with the lesson.


# %%
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


def from_rank_0(value: object) -> object:
    """Return rank 0's `value` on every rank."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def shared_folder(path: str | None) -> Iterator[str]:
    """Yield a folder that rank 0 makes below `path` or in /tmp, and removes."""
    folder = from_rank_0(tempfile.mkdtemp(dir=path) if RANK == 0 else None)
    os.makedirs(folder, exist_ok=True)  # on another node it is another disk
    try:
        yield folder
        dist.barrier()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# %% [markdown]
# ## What you should have seen
#
# 1. 8 up, 4 down. The shards go up for forward and again for backward, 4 bytes each time, and the
#    gradients come down. In bfloat16 as well: FSDP2 rounds after the copy. So half of what goes up
#    is thrown away on arrival.
# 2. 4 up, in both cases: with False the weights are still whole, and with s backward gathers from
#    what the group keeps on the GPU. Either pays with the GPU's memory: whole weights, or 1/s of
#    them. Two micro-batches move 24 bytes, twice as much, since everything moves for each.
# 3. 4 down and 2 up, where the paper has 2 and 2. The gradients are cast to float32 before they
#    leave the GPU, so the link carries 6 bytes instead of 4.
# 4. 6 up and 6 down. The parameters take 4 of those that go up. The gradients take all the others:
#    down in bfloat16, up again for their norm, down in float32 for Adam.
# 5. 20 read, 18 written, and the files have 18. Of these, 16 read and 16 written are
#    ZeRO-Infinity's: masters, moments, and gradients, which only go to and fro. The parameters in
#    bfloat16 are written once and read twice. The kernel agrees, so the page cache had no part.
# 6. Not at all where the same Adam runs on the same processor, whether its state lies in memory or
#    in files. DeepSpeed's own Adam rounds otherwise, and bfloat16 hides it. On GPUs offload moves
#    Adam to another processor, which rounds otherwise as well.
# 7. 80, nearly three times as many as one pass needs, and `fused=True` is several times faster.
#    FSDP2 leaves the choice to you: pass `fused=True` to AdamW when parameters are offloaded, and
#    give a rank its share of the cores (`OMP_NUM_THREADS`); here each rank has one.
# 8. BLOCKED without a GPU. There the table prints both, and a pinned copy is at least 1.5 times as
#    fast; two to four times is usual.
#
# **Try.** With 10**9 live parameters stage 3 keeps weights from forward to backward: "parameters
# too: bytes up" falls to 4 and "disk: bytes read" to 18. With `max_in_cpu` 10**9 the parameters
# stay on the host: 16 are read and 16 written, and their files remain as they were at first.
#
# **On GPUs** `clip_grad_norm_` needs a process group with a CPU backend when parameters are
# offloaded, since the gradients then lie on the CPU: `init_process_group("cpu:gloo,cuda:nccl")`.
#
# **Where it bites.** The host must hold it: 8 ranks with a model of 7B parameters pin 16 x 7e9
# bytes, 112 GB, and ranks of one machine share its links and its cores for Adam. A disk wears out:
# 18 bytes written per parameter and step are 126 GB for 7B, and a drive for 1 PB of writes is gone
# after 8,000 steps. And a step takes as long as its slowest link: 7B at 38 bytes are 266 GB, which
# is 38 s at 7 GB/s. Count before you rent.


# %%
def main() -> None:
    options = command_line(
        {
            "--compile": {"action": "store_true", "help": "compile DeepSpeed's C++ first, once"},
            "--folder": {"metavar": "DIR", "help": "swap files go there, on a disk (in /tmp)"},
        }
    )
    if options.folder and not Path(options.folder).is_dir():
        refuse(f"--folder needs a folder; got {options.folder}; make it first")
    if options.compile and "RANK" not in os.environ:
        compile_extensions()
    launch()
    device = setup()
    expected = from_rank_0(one_process(device) if RANK == 0 else None)
    check_fsdp2(expected, device)
    deepspeed = import_deepspeed(device)
    if deepspeed is None:
        blocked("DeepSpeed on the host and on a disk", needs="pip install -e '.[deepspeed]'")
    else:
        found = load_extensions()
        kept = check_deepspeed(deepspeed, expected, found, device)
        with shared_folder(options.folder) as folder:
            check_disk(deepspeed, kept, found, folder, device)
    check_adam_on_the_host()
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
