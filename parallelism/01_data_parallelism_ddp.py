"""Data parallelism: average the gradients by hand, then with DistributedDataParallel
==================================================================================

**Question.** Several ranks hold the same model and see different samples. What must they tell each
other, so that training goes as if one process had seen all the samples?

**Predict**, and write it down before you run:

1. A training set has 1,437 samples, and every rank draws equally many in an epoch. How many do 4
   ranks draw together, and how many of these are different?
2. Ranks train for 150 steps and exchange nothing but gradients. How far apart are their weights in
   the end, and how far from the weights of one process that saw all samples: nothing, rounding
   errors, or more?
3. By hand the gradients of the 8 parameter tensors are averaged in 8 all-reduces.
   DistributedDataParallel collects them in buckets, from the last layer to the first, and sends a
   bucket as soon as it is full. How many all-reduces does a step make with buckets of 0.1 MiB
   (105 kB), if the layers have, from the first to the last, 67, 132, 132 and 10 kB?
4. A batch is computed in 4 micro-batches. DDP sends all gradients after each of them, unless it is
   told not to (`no_sync`). If you forget that, how many times the bytes of a plain step is it?
5. Training in bfloat16 with Adam in float32, and gradients averaged by hand: how many bytes per
   parameter does each rank hold between two steps? How many GB is that for 7 billion parameters?

**Run.**

    torchrun --standalone --nproc-per-node=4 01_data_parallelism_ddp.py  # NCCL on 4 GPUs, or gloo
    python 01_data_parallelism_ddp.py                                    # the same, started for you

Not run on several GPUs.

**Try.** Delete the line `sampler.set_epoch(epoch)`: what fails? Put it back, and delete the line
that divides by WORLD_SIZE: do the ranks' weights drift apart now?

**Before.** communication/01_nccl_collectives.py: what an all-reduce and a broadcast do.

**Next.** exercises/06_gradient_accumulation and exercises/07_distributed_sampler; then
parallelism/02_fsdp_zero.py: why should every rank hold all of that? For runs that are interrupted:
fundamentals/07_training_that_survives.py; for one that hangs: profiling/04_debugging_hangs.py; for
DDP's own errors: section 4 of parallelism/04_buckets_and_overlap.py.
"""

import argparse
import copy
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
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from itertools import chain, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

GLOBAL_BATCH = 96  # samples per step, all ranks together
EPOCHS = 10  # passes over the data
LEARNING_RATE = 0.1
MOMENTUM = 0.9
Batch = tuple[torch.Tensor, torch.Tensor]  # image_BD, label_B: B samples of D = 64 pixels

# %% [markdown]
# ## 1. Data parallelism by hand: broadcast the weights, all-reduce the gradients
#
# In **data parallelism** every rank holds the whole model and sees its own share of each batch. Two
# rules make n ranks train as one process would. They start from the same weights, so rank 0
# broadcasts its own. And in every step each optimizer gets the same gradient: the mean over ranks.
# Equal weights and equal gradients make equal weights, so the weights never travel again:
#
#                    rank 0                       rank 1                       rank 2
#     start          weights ----broadcast------> weights ----broadcast------> weights
#
#     every step     samples 0, 3, 6, ...         samples 1, 4, 7, ...         samples 2, 5, 8, ...
#                    forward, backward            forward, backward            forward, backward
#                    gradient g_0                 gradient g_1                 gradient g_2
#                        |                            |                            |
#                        +-------- all-reduce, then divide: (g_0 + g_1 + g_2) / 3 -+
#                        |                            |                            |
#                    optimizer.step()             optimizer.step()             optimizer.step()
#
# Why the mean? A loss is usually a mean over samples. If all ranks hold equally many samples, the
# mean of their gradients is the gradient of the whole batch's mean loss. With 3 samples here and 1
# there it is not: the lonely sample would weigh three times as much as the others. Then a rank's
# gradient must be weighted by its share of the samples (or, for padded text, of the valid tokens).


# %%
def broadcast_weights(model: nn.Module) -> None:
    """Give every rank the weights and buffers of rank 0."""
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)


def average_gradients(model: nn.Module) -> None:
    """After backward: replace each gradient by its mean over ranks."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= WORLD_SIZE


def train(model: nn.Module, batches: Iterable[Batch], by_hand: bool = False) -> list[float]:
    """Train with SGD; return the loss of each step. `by_hand` adds the line that matters."""
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM)
    losses = []
    for image_BD, label_B in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(image_BD), label_B)
        losses.append(loss.detach())  # `.item()` here would let the host wait for the GPU
        loss.backward()
        if by_hand:
            average_gradients(model)
        optimizer.step()
    return [loss.item() for loss in losses]


# %% [markdown]
# ## 2. DistributedSampler: every rank draws its own samples
#
# `DistributedSampler` shuffles all indices with a seed that the ranks share and gives rank r every
# n-th of them, from the r-th on. If n does not divide their number, it repeats a few from the
# beginning, so that all ranks take equally many steps: a rank with one batch more would wait for
# ever in its last all-reduce.
#
# The seed is `seed + epoch`, and the sampler cannot know the epoch. So call `set_epoch` before each
# one. Forget it, and all epochs come in the order of the first: nothing complains. What it
# costs does not show in ten epochs of digits; it does in long trainings.


# %%
def my_share(train_set: TensorDataset, drawn: list[list[int]]) -> Iterator[Batch]:
    """Yield this rank's batches, epoch after epoch; add the indices of each to `drawn`."""
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=GLOBAL_BATCH // WORLD_SIZE, sampler=sampler)
    for epoch in tqdm(range(EPOCHS), "epochs", leave=False, disable=RANK > 0 or None):
        sampler.set_epoch(epoch)
        for index_B, image_BD, label_B in loader:
            drawn.append(index_B.tolist())
            yield image_BD, label_B


# %% [markdown]
# ## 3. DistributedDataParallel: the same, while backward still runs
#
# Averaging by hand is right and slow: every tensor pays the latency of an all-reduce, and none
# starts before backward has ended. `DistributedDataParallel` (DDP) wraps a module, broadcasts its
# weights when it is built, and hangs hooks on its parameters. The hooks collect gradients in
# **buckets**, flat buffers of 25 MiB (the first of 1 MiB; if you name a size, all have it), from
# the last layer on. The all-reduce of a bucket starts as soon as the bucket has reached its size.
# The gradients are averaged when `backward()` returns, not in `optimizer.step()`.
# parallelism/04_buckets_and_overlap.py builds all of it.
#
# The training loop stays as it was. `device_ids` names this process's GPU and is None on CPU.


# %%
def wrap(model: nn.Module, bucket_mib: float | None = None) -> DistributedDataParallel:
    """Make a module data-parallel: after each backward, all ranks hold the mean gradients."""
    device = next(model.parameters()).device
    ids = [device] if device.type == "cuda" else None
    return DistributedDataParallel(model, ids, bucket_cap_mb=bucket_mib)


# %% [markdown]
# ## 4. Gradient accumulation: `no_sync`, until the last micro-batch
#
# A batch that does not fit into memory is computed in **micro-batches**: backward *adds* to the
# gradients that are there, so several backwards make the gradient of the whole batch, provided that
# each loss is divided by their number. DDP knows nothing of this plan and averages after every
# backward. The result would be right, since the mean of means that all ranks share is itself; but
# 4 micro-batches would hand over the gradients 4 times.
#
#     micro-batch          0            1            2            3
#     without no_sync      B --reduce   B --reduce   B --reduce   B --reduce   step
#     with no_sync         B            B            B            B --reduce   step
#
# `no_sync` switches the hooks off. It must enclose the forward pass too, where DDP decides whether
# this backward will communicate.


# %%
def accumulate(
    model: DistributedDataParallel, batch: Batch, pieces: int, use_no_sync: bool = True
) -> None:
    """One step of SGD in so many micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM)
    optimizer.zero_grad()
    image_chunks = batch[0].chunk(pieces)
    label_chunks = batch[1].chunk(pieces)
    for i in range(pieces):
        local_only = use_no_sync and i < pieces - 1
        with model.no_sync() if local_only else nullcontext():
            loss = cross_entropy(model(image_chunks[i]), label_chunks[i])
            (loss / pieces).backward()
    optimizer.step()


# %% [markdown]
# ## 5. What every rank holds: sixteen bytes per parameter
#
# Data parallelism divides the work and not the memory. In **mixed precision** forward and backward
# run in bfloat16, while Adam updates a float32 copy of each weight, its **master**: a small update
# to a large weight would be lost in bfloat16's 8 bits. Between two steps a rank holds
#
#     weight    gradient    master    Adam's two moments
#     2         2           4         4 + 4                  = 16 bytes per parameter
#
# (Rajbhandari et al., 2020, section 3.1). All ranks hold all of it, whatever n is.


# %%
def mixed_precision_step(
    model: nn.Module, masters: list[torch.Tensor], adam: torch.optim.Adam, batch: Batch
) -> None:
    """Compute in the model's bfloat16, update the float32 masters, and round them back."""
    image_BD, label_B = batch
    model.zero_grad()
    cross_entropy(model(image_BD.bfloat16()), label_B).backward()
    average_gradients(model)
    for parameter, master in zip(model.parameters(), masters, strict=True):
        master.grad = parameter.grad.float()
    adam.step()
    adam.zero_grad()  # keeping the gradients in float32 as well would cost 4 bytes more
    for parameter, master in zip(model.parameters(), masters, strict=True):
        parameter.data.copy_(master)


# %% [markdown]
# ## 6. How it is measured
#
# The data are scikit-learn's 1,797 handwritten digits, which rank 0 reads and broadcasts; every
# fifth is kept for the test. Every rank seeds its weights differently, so that only the broadcast
# can make them agree.
#
# The **oracle** is one process: it starts from rank 0's weights and gets, step by step, the samples
# that all ranks drew for that step. All weights are float64. How exactly must we meet it? Adding up
# the B gradients of a batch in another order moves the sum by at most B eps, relative to the size
# of the terms. SGD hands a gradient's error on to the weights with a total gain of
# lr / (1 - momentum) = 0.1 / (1 - 0.9) = 1. So after S steps the weights may differ by S B eps, to
# first order: 3e-12 for 150 steps of 96 samples. (The terms of this network are smaller than 1, so
# expect to stay well below.) Between ranks the difference must be zero: they add the same numbers.


# %%
def digits(device: torch.device) -> tuple[TensorDataset, TensorDataset]:
    """The training and the test set of (index, image, label), in float64."""
    read = [None, None]
    if RANK == 0:
        from sklearn.datasets import load_digits  # takes a second, which one rank has to spend

        read = list(load_digits(return_X_y=True))
    dist.broadcast_object_list(read)
    image_ND, label_N = read
    whole = TensorDataset(
        torch.arange(len(label_N), device=device),
        torch.tensor(image_ND / 8 - 0.6, device=device),
        torch.tensor(label_N, device=device),
    )
    is_test_N = torch.arange(len(label_N), device=device) % 5 == 0
    train_set = TensorDataset(*whole[~is_test_N])
    train_set.tensors[0].copy_(torch.arange(len(train_set)))  # count them anew
    return train_set, TensorDataset(*whole[is_test_N])


def net(device: torch.device, seed: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Four linear layers, 8 parameter tensors."""
    torch.manual_seed(seed)
    layers = []
    for inputs, outputs in pairwise([64, 128, 128, 128, 10]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).to(device, dtype)


def largest_difference(ours: nn.Module, expected: nn.Module) -> float:
    """Between the parameters of two modules."""
    pairs = zip(ours.parameters(), expected.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def gather_objects(value: object) -> list:
    """Return every rank's `value`, in order, on every rank."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


# %% [markdown]
# The training runs three times: by hand, with DDP, and in one process. Afterwards the claims are
# made: on what the samplers drew, on the weights, and on the accuracy over digits that none of them
# has seen.


# %%
def train_three_times(device: torch.device) -> dict[str, list[float]]:
    """Train by hand, with DDP and in one process; claim that all agree; return their losses."""
    train_set, test_set = digits(device)
    drawn = []
    by_hand = net(device, seed=RANK)
    broadcast_weights(by_hand)
    curves = {"by hand": train(by_hand, my_share(train_set, drawn), by_hand=True)}
    ddp = net(device, seed=RANK)
    curves["DDP"] = train(wrap(ddp), my_share(train_set, []))
    for name in curves:
        per_rank = gather_objects(curves[name])
        curves[name] = [sum(step) / WORLD_SIZE for step in zip(*per_rank, strict=True)]

    steps = []  # the indices that all ranks together drew for each step
    for shares in zip(*gather_objects(drawn), strict=True):
        steps.append(list(chain(*shares)))
    check_sampler(steps, len(train_set))
    alone = net(device, seed=0)
    curves["one process"] = train(alone, (train_set[step][1:] for step in steps))
    atol = len(steps) * GLOBAL_BATCH * torch.finfo(torch.float64).eps
    for name, model in (("by hand", by_hand), ("DDP", ddp)):
        check_weights(name, model, alone, atol)
        accuracy = accuracy_on(test_set, model)
        claim(f"{name}: accuracy on new digits", 0.95, accuracy, ">=", varies=True)
    return curves


def check_sampler(steps: list[list[int]], samples: int) -> None:
    steps_per_epoch = len(steps) // EPOCHS
    epochs = []
    for start in range(0, len(steps), steps_per_epoch):
        epochs.append(list(chain(*steps[start : start + steps_per_epoch])))
    divisible = math.ceil(samples / WORLD_SIZE) * WORLD_SIZE
    claim("samples drawn in one epoch, by all ranks", divisible, len(epochs[0]), question=1)
    claim("different samples among them", samples, len(set(epochs[0])), question=1)
    claim("different orders in all epochs", EPOCHS, len({tuple(epoch) for epoch in epochs}))


def check_weights(name: str, model: nn.Module, alone: nn.Module, atol: float) -> None:
    if WORLD_SIZE == 1:
        blocked(f"{name}: weights, difference between ranks", needs="2 ranks")
    else:
        of_rank_0 = copy.deepcopy(model)
        broadcast_weights(of_rank_0)
        between_ranks = largest_difference(model, of_rank_0)
        claim(f"{name}: weights, difference between ranks", 0, between_ranks, question=2)
    error = largest_difference(model, alone)
    claim(f"{name}: weights, error against one process", 0, error, atol=atol, question=2)


def accuracy_on(test_set: TensorDataset, model: nn.Module) -> float:
    _, image_ND, label_N = test_set.tensors
    return (model(image_ND).argmax(1) == label_N).double().mean().item()


# %% [markdown]
# Collectives are counted beneath torch's dispatcher, where every call passes, also those that DDP
# makes from C++. What is counted is what a rank hands over to an all-reduce. What a backend then
# sends is its own affair: a ring sends 2(n-1)/n times as much (communication/03_ring_and_tree.py).


# %%
class Call(NamedTuple):
    """One collective, send or receive of this rank, as it was handed to the process group."""

    operation: str  # "all_reduce", "all_gather", "reduce_scatter", "send", ...
    elements: int  # of its input or its output, whichever is larger
    nbytes: int  # of the same
    ranks: tuple[int, ...]  # of the group
    peer: int | None  # of a send or receive: the other rank; None: any


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


# %% [markdown]
# One step of each kind is counted, of DDP the third: in its first step a fresh DDP sends everything
# in one bucket, whatever their size. Micro-batches must end at the weights of one process as well;
# after a single step the tolerance is B eps.


# %%
def check_communication(device: torch.device) -> None:
    train_set, _ = digits(device)
    everyone = train_set[: 16 * WORLD_SIZE][1:]
    mine = tuple(tensor.chunk(WORLD_SIZE)[RANK] for tensor in everyone)
    alone = net(device, seed=0)
    train(alone, [everyone])
    tolerance = len(everyone[1]) * torch.finfo(torch.float64).eps

    by_hand = net(device, seed=0)
    gradient_bytes = sum(parameter.nbytes for parameter in by_hand.parameters())
    with CountedCommunication() as counted:
        train(by_hand, [mine], by_hand=True)
    claim("by hand: all-reduces per step", 8, len(counted.calls("all_reduce")))
    claim("by hand: bytes per step", gradient_bytes, bytes_of(counted))
    for name, bucket_mib, buckets in (("DDP", None, 1), ("DDP, buckets of 0.1 MiB", 0.1, 3)):
        ddp = wrap(net(device, seed=0), bucket_mib)
        train(ddp, [mine] * 2)
        with CountedCommunication() as counted:
            train(ddp, [mine])
        calls = len(counted.calls("all_reduce"))
        claim(f"{name}: all-reduces per step", buckets, calls, question=3)
        claim(f"{name}: bytes per step", gradient_bytes, bytes_of(counted), question=3)

    for name, use_no_sync, times in (("no_sync", True, 1), ("without no_sync", False, 4)):
        ddp = wrap(net(device, seed=0))
        with CountedCommunication() as counted:
            accumulate(ddp, mine, pieces=4, use_no_sync=use_no_sync)
        name = f"4 micro-batches, {name}"
        claim(f"{name}: bytes", times * gradient_bytes, bytes_of(counted), question=4)
        error = largest_difference(ddp.module, alone)
        claim(f"{name}: error", 0, error, atol=tolerance)


def bytes_of(counted: CountedCommunication) -> int:
    """What this rank handed to all-reduces."""
    return sum(call.nbytes for call in counted.calls("all_reduce"))


# %% [markdown]
# For the memory, three steps of mixed precision are trained, on other samples on each rank, and the
# storages that are alive between two steps are added up, each once. (Adam's counters of steps, 4
# bytes per tensor, are left out.)


# %%
def check_memory(device: torch.device) -> None:
    train_set, _ = digits(device)
    mine = train_set[RANK * 8 : (RANK + 1) * 8][1:]
    model = net(device, 0, torch.bfloat16)
    masters = [parameter.detach().float() for parameter in model.parameters()]
    adam = torch.optim.Adam(masters)
    for _ in range(3):
        mixed_precision_step(model, masters, adam, mine)
    if WORLD_SIZE == 1:
        blocked("bfloat16: masters, difference between ranks", needs="2 ranks")
    else:
        apart = 0.0
        for master in masters:
            of_rank_0 = master.clone()
            dist.broadcast(of_rank_0, src=0)
            apart = max(apart, (master - of_rank_0).abs().max().item())
        claim("bfloat16: masters, difference between ranks", 0, apart)

    held = [*model.parameters(), *masters]
    held += [parameter.grad for parameter in model.parameters()]
    for state in adam.state.values():
        held += [state["exp_avg"], state["exp_avg_sq"]]
    storages = [tensor.untyped_storage() for tensor in held]
    held_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    per_parameter = held_bytes / sum(parameter.numel() for parameter in model.parameters())
    claim("bytes held per parameter", 16, per_parameter, question=5)
    print0(f"{'':13}7 billion parameters: {7 * per_parameter:.0f} GB on every rank")


# %% [markdown]
# ## 7. On GPUs: what n GPUs do more than one
#
# A GPU user asks how many samples per second n GPUs train. `no_sync` gives the answer for one GPU
# in the same run: a step without communication. The share of n times its speed that is reached is
# the **scaling efficiency**. Eight layers 8,192 wide have 0.5 billion parameters; in bfloat16 their
# gradients are 1.1 GB per step. CUDA events are the clock. Over NVLink expect an efficiency above
# 0.9; over PCIe much of an all-reduce does not fit behind backward, and 0.6 is the least that the
# claim accepts.


# %%
def measure_on_gpus(device: torch.device) -> None:
    if device.type == "cpu" or WORLD_SIZE == 1 or not torch.cuda.is_bf16_supported(False):
        blocked("samples per s, of n GPUs over one", needs="2 GPUs with bfloat16")
        return
    layers = [nn.Linear(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(8)]
    ddp = wrap(nn.Sequential(*layers))
    x_BD = torch.randn(16_384, 8192, device=device, dtype=torch.bfloat16)

    def step() -> None:
        with torch.enable_grad():
            ddp(x_BD).square().mean().backward()
        ddp.zero_grad()

    def step_alone() -> None:
        with ddp.no_sync():
            step()

    alone = median_ms(step_alone)
    together = median_ms(step)
    print0(f"{'':13}ms per step: {alone:.1f} alone, {together:.1f} with all-reduces")
    print0(f"{'':13}scaling efficiency of {WORLD_SIZE} GPUs: {alone / together:.2f}")
    floor = 0.6 * WORLD_SIZE
    faster = WORLD_SIZE * alone / together
    claim("samples per s, of n GPUs over one", floor, faster, ">=", timed=True)


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
# 1. The sampler repeats as many samples as it takes for n to divide their number: 4 ranks draw
#    1,440, of which 1,437 are different. That is right for training. When you *evaluate*, drop the
#    repeated ones, or three samples count twice in your accuracy.
# 2. Between ranks the weights differ by nothing at all, since every rank adds the same numbers to
#    the same weights. From one process they differ by rounding errors only, some 1e-15 here, and
#    `--figure PATH` draws the three curves of the loss, which lie on top of each other. So data
#    parallelism *is* training with the larger batch: no better, no worse. It is the larger batch
#    that may want a larger learning rate, in proportion, after a warm-up (Goyal et al., 2017).
# 3. Three, filled from the last layer on: 10 + 132, 132, and 67 kB. A bucket leaves once it has
#    reached its size, which may exceed it. With DDP's usual buckets of 25 MiB all 341,072 bytes fit
#    into one. Real models fill many, which is what lets them leave early.
# 4. Four times: 1,364,288 bytes for 341,072. With `no_sync` a step of 4 micro-batches hands over
#    what a plain step does. The weights are right both ways: forgotten, it only costs time.
# 5. Sixteen bytes: 112 GB for 7 billion parameters, on every rank, before any activation. No GPU
#    of 80 GB trains that, and adding GPUs does not help. DDP holds 18, unless you ask it for
#    `gradient_as_bucket_view=True`: its buckets are a second copy of the gradients.
#
# **Try.** Without `set_epoch` only the number of different orders gives it away: the weights still
# agree with one process, for that one follows the same order. Without the division the ranks agree
# too, on a step n times too large, and only the comparison with one process (and perhaps the
# accuracy) fails. Ranks that agree with each other prove little.
#
# On real systems: a model with batch norm needs `SyncBatchNorm` where a rank's share is small,
# since each rank normalizes with the statistics of its own samples. In float16, a sum of n
# gradients may overflow before it is divided, and dividing first may lose small ones; so DDP
# divides first, and FSDP and DeepSpeed let you split the factor between before and after. At a
# thousand ranks a batch of 32 per rank is 32,000 samples, which many models no longer learn well
# from: the limit of data parallelism is the batch before it is the network.


# %%
def draw(curves: dict[str, list[float]], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure((7, 4.5), layout="constrained")
    axes = figure.subplots()
    for width, (name, losses) in zip((7, 4, 1), curves.items(), strict=True):
        axes.semilogy(losses, linewidth=width, label=name)
    axes.set(title="Three trainings, one curve", xlabel="step", ylabel="loss, mean over ranks")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    figure = {"metavar": "PATH", "help": "save the curves of the loss as PNG"}
    options = command_line({"--figure": figure})
    launch(range(1, GLOBAL_BATCH + 1))
    if WORLD_SIZE > GLOBAL_BATCH:
        refuse(f"a rank needs a sample per step: at most {GLOBAL_BATCH} ranks, not {WORLD_SIZE}")
    device = setup()
    curves = train_three_times(device)
    check_communication(device)
    check_memory(device)
    measure_on_gpus(device)
    if options.figure and RANK == 0:
        draw(curves, options.figure)
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
