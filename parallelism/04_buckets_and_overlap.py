"""Gradient buckets and overlap: build DistributedDataParallel yourself
====================================================================

**Question.** DistributedDataParallel averages gradients while backward still runs. How does it know
when a gradient may leave, and what must all ranks agree on without a word?

**Predict**, and write it down before you run. Four linear layers have 8 gradients: 67, 132, 132 and
10 kB per layer, the first layer first.

1. Buckets are filled with the last layer first, and a bucket is closed as soon as it holds 100 kB.
   How many all-reduces does a step make?
2. How many of the 8 gradients are still missing when the first all-reduce starts: with such
   buckets, with one all-reduce per gradient after backward, and in the first step of PyTorch's
   DistributedDataParallel?
3. Even ranks use one layer, odd ranks another. In how many different orders do the ranks launch
   their buckets?
4. Gradients and buckets together: how many times the bytes of the gradients are they in our own
   implementation, and in PyTorch's by default?

**Run.**

    torchrun --standalone --nproc-per-node=4 04_buckets_and_overlap.py  # NCCL on 4 GPUs, or gloo
    python 04_buckets_and_overlap.py                                    # the same, started for you

Not run on several GPUs.

**Try.** Fill the buckets with the first layer first, by deleting `reversed` in `in_buckets`: which
claims fail? Then replace `work.wait()` by `pass`: does training still work, and who notices?

**Before.** parallelism/01_data_parallelism_ddp.py: why gradients are averaged.

**Next.** exercises/05_data_parallel_hooks; then communication/06_overlap.py measures how much of
the communication is hidden, and parallelism/05_zero2_and_zero3.py lets go of the gradients.
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
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from itertools import pairwise, zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand in the last cell, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

CAPACITY = 100_000  # bytes: a bucket is closed as soon as it holds this much
GLOBAL_BATCH = 96  # samples per step, all ranks together
STEPS = 100
Batch = tuple[torch.Tensor, torch.Tensor]  # image_BD, label_B: B samples of D = 64 pixels
Group = dist.ProcessGroup | None

# %% [markdown]
# ## 1. Buckets: few all-reduces, and early ones
#
# One all-reduce per gradient pays the network's latency once per tensor. One all-reduce for all of
# them pays it once, but cannot start before backward has made the last gradient. A **bucket** is
# the compromise: a flat buffer for the gradients of a few layers (Li et al., 2020, section 3.2).
# Backward makes the last layer's gradients first, so the buckets are filled in *reverse* order, and
# all but the last one travel while backward still computes:
#
#     time ------------------------------------------------------------------------------>
#     backward          | layer 4 | layer 3 | layer 2 | layer 1 |
#     per gradient                                              |a|a|a|a|a|a|a|a| step
#     one bucket                                                |all-reduce| step
#     three buckets                         | reduce  | reduce  |r.| step
#                                             4 and 3   2         1
#
# In the last line only the all-reduce of layer 1 is **exposed**; the others are hidden behind the
# computation. The price is memory, unless the gradients *are* parts of the buckets: here every
# `parameter.grad` is a view. A gradient must lie in memory as its parameter does, for instance
# transposed or with channels last, so a view gets the strides of a fresh copy of the parameter.


# %%
class Bucket:
    """One flat buffer; `views` maps each parameter to its gradient, a part of the buffer."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.flat = parameters[0].new_zeros(sum(p.numel() for p in parameters))
        self.missing: set[nn.Parameter] = set()  # whose gradients are still to come
        self.views = {}
        parts = self.flat.split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            strides = torch.empty_like(parameter, device="meta").stride()
            self.views[parameter] = part.as_strided(parameter.shape, strides)

    def take_in(self, parameter: nn.Parameter, ranks: int) -> None:
        """Move a gradient, divided, into the bucket. A gradient that was not made counts as 0."""
        grad = parameter.grad
        parameter.grad = self.views[parameter]
        self.missing.remove(parameter)  # KeyError: a second gradient in one backward
        if grad is None:
            parameter.grad.zero_()
        else:
            dense = grad.detach().to_dense() if grad.is_sparse else grad.detach()
            torch.div(dense, ranks, out=parameter.grad)


def in_buckets(parameters: list[nn.Parameter], capacity: float) -> list[Bucket]:
    """Deal out the parameters, the last one first. A bucket holds one dtype and device."""
    closed = []
    filling: dict[tuple, list[nn.Parameter]] = {}  # the open bucket of each dtype and device
    for parameter in reversed(parameters):
        dtype_and_device = (parameter.dtype, parameter.device)
        members = filling.setdefault(dtype_and_device, [])
        members.append(parameter)
        if sum(member.nbytes for member in members) >= capacity:
            closed.append(filling.pop(dtype_and_device))
    return [Bucket(members) for members in [*closed, *filling.values()]]


# %% [markdown]
# ## 2. The reducer: hooks that launch a bucket when its last gradient arrives
#
# Autograd calls a hook when the gradient of a parameter is complete. The hook moves it into its
# bucket, and when no other is missing there, it starts one asynchronous all-reduce and lets
# backward go on. Three rules make that right on any model:
#
# - **All ranks launch in the order of the buckets.** Collectives carry no names; they are matched
#   by order alone. If bucket 2 fills before bucket 1, it waits for its turn.
# - **What is missing at the end is sent as zeros.** A layer that this rank did not use makes no
#   gradient, yet other ranks may have used it and wait for our part.
# - **Divide first, then add.** In float16 a sum of n gradients may overflow where their mean does
#   not. (Dividing first may make small gradients vanish instead. So FSDP and DeepSpeed let you
#   split the factor n between before and after.)
#
# Beware: `register_post_accumulate_grad_hook` hands its hook the *parameter*, not its gradient.
# Average that, and the gradients stay as they are: no error, and the ranks drift apart.
#
# The parameters know their hook, and the hook knows its reducer only weakly: if the wrapper is
# dropped, its hooks fall silent, and the module can be wrapped again. A copy of a parameter has no
# hooks at all, so a copied reducer is built anew on the copied parameters.
#
# How do we learn that backward is over? Autograd's engine calls back what was queued on it *during*
# a backward, when that backward ends. `queue_callback` is private to PyTorch, and the one way to
# do this; DDP and FSDP use it as well.


# %%
class Reducer:
    """Averages gradients over the ranks of a group while backward runs."""

    def __init__(
        self, parameters: list[nn.Parameter], capacity: float, group: Group, find_unused: bool
    ) -> None:
        self.parameters = parameters
        self.capacity = capacity
        self.group = group
        self.find_unused = find_unused
        self.sync = True  # False: gradients stay on their rank
        self.reducing = False  # whether the current backward has made a gradient
        self.works: list[dist.Work] = []  # one for each bucket launched in this backward
        self.buckets = in_buckets(parameters, capacity)
        self.bucket_of = {}
        for bucket in self.buckets:
            self.bucket_of |= dict.fromkeys(bucket.views, bucket)
        this = weakref.ref(self)

        def hook(parameter: nn.Parameter) -> None:
            reducer = this()  # None: it was dropped, and the module wrapped again
            if reducer is not None:
                reducer.gradient_is_ready(parameter)

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(hook)

    def gradient_is_ready(self, parameter: nn.Parameter) -> None:
        if not self.sync:
            return
        if not self.reducing:
            self.begin()
        bucket = self.bucket_of[parameter]
        bucket.take_in(parameter, dist.get_world_size(self.group))
        if not bucket.missing:
            self.launch()

    def begin(self) -> None:
        """Backward has made its first gradient."""
        self.reducing = True
        self.works = []
        for bucket in self.buckets:
            bucket.missing = set(bucket.views)
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def launch(self, incomplete: bool = False) -> None:
        """Start the next buckets in line; stop at one that is not complete."""
        for bucket in self.buckets[len(self.works) :]:
            if bucket.missing and not incomplete:
                break
            for parameter in list(bucket.missing):
                bucket.take_in(parameter, dist.get_world_size(self.group))
            self.works.append(self.start_all_reduce(bucket.flat))

    def start_all_reduce(self, flat: torch.Tensor) -> dist.Work:
        return dist.all_reduce(flat, group=self.group, async_op=True)

    def __deepcopy__(self, memo: dict) -> "Reducer":
        parameters = copy.deepcopy(self.parameters, memo)
        return Reducer(parameters, self.capacity, self.group, self.find_unused)

    @torch.no_grad()
    def finish(self) -> None:
        """Backward is over: send what never filled, then wait, so that the optimizer may step."""
        used = [parameter.grad is not None for parameter in self.bucket_of]
        self.launch(incomplete=True)
        if self.find_unused:
            self.drop_unused(used)
        for work in self.works:
            work.wait()  # on NCCL the current stream waits, not the CPU
        self.reducing = False

    def drop_unused(self, used: list[bool]) -> None:
        """Give back None, as in one process, to every parameter that no rank has used."""
        device = self.buckets[0].flat.device
        used_N = torch.tensor(used, dtype=torch.int32, device=device)
        dist.all_reduce(used_N, dist.ReduceOp.MAX, group=self.group)
        for parameter, by_anyone in zip(self.bucket_of, used_N.tolist(), strict=True):
            if not by_anyone:
                parameter.grad = None


# %% [markdown]
# ## 3. The module: equal weights at the start, equal buffers in every forward
#
# What remains is the wrapper. It compares the modules of all ranks first: if one rank's layer is
# wider than another's, the broadcast of its weights would abort or hang, and say nothing useful.
# Then it copies the weights of the group's first rank to all. **Buffers**, such as the running
# statistics of batch norm, have no gradients to keep them together; they follow the first rank
# before each forward that trains.
#
# Autograd counts how often a tensor is written to, and refuses a backward for which it was written
# to too late. Batch norm keeps its buffers for backward, though it does not use them in training.
# So buffers are written through `.data`, which is not counted: then two forwards may come before
# one backward, as in the bare module.


# %%
def broadcast(tensors: Iterable[torch.Tensor], group: Group) -> None:
    """Copy the tensors of the group's first rank to all."""
    for tensor in tensors:
        dense = tensor.data.contiguous()  # the tensor itself, unless it is transposed
        dist.broadcast(dense, group_src=0, group=group)
        tensor.data.copy_(dense)


def require_equal_modules(module: nn.Module, options: dict, group: Group) -> None:
    """Raise the same ValueError on every rank if one of them has another module."""
    description = list(options.items())
    for name, t in [*module.named_parameters(), *module.named_buffers()]:
        description.append((name, tuple(t.shape), t.dtype, t.requires_grad))
    descriptions = [None] * dist.get_world_size(group)
    dist.all_gather_object(descriptions, description, group)
    for row_by_rank in zip_longest(*descriptions, fillvalue="nothing"):
        ranks_with: dict[tuple, list[int]] = {}
        for rank, row in enumerate(row_by_rank):
            ranks_with.setdefault(row, []).append(rank)
        if len(ranks_with) > 1:
            rule = "every rank must wrap the same module; build it from one configuration"
            found = [f"{row} on ranks {ranks}" for row, ranks in ranks_with.items()]
            raise ValueError(f"{rule}; the first difference: {'; '.join(found)}")


class BucketedDDP(nn.Module):
    """Data parallelism for any module: after backward every rank has the mean gradient.

    `bucket_mb` is in 1e6 bytes. Gradients are views of the buckets (sparse ones become dense). What
    no rank used gets zeros; with `find_unused` it keeps None, as in one process, for one small
    all-reduce more. Buffers follow the group's first rank, before each forward that trains. Raises
    ValueError on every rank if the modules differ, and in forward if a parameter was frozen or
    unfrozen since.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_mb: float = 25.0,
        group: Group = None,
        find_unused: bool = False,
    ) -> None:
        super().__init__()
        self.module = module
        options = {"bucket_mb": bucket_mb, "find_unused": find_unused}
        require_equal_modules(module, options, group)
        broadcast([*module.parameters(), *module.buffers()], group)
        trained = [p for p in module.parameters() if p.requires_grad]  # a tied weight counts once
        self.reducer = Reducer(trained, bucket_mb * 1e6, group, find_unused)

    def forward(self, *args: object, **kwargs: object) -> object:
        self.reducer.reducing = False  # start afresh even if the last backward died half-way
        if torch.is_grad_enabled():
            self.require_unchanged()
        if self.reducer.sync and self.training and torch.is_grad_enabled():
            broadcast(self.module.buffers(), self.reducer.group)
        return self.module(*args, **kwargs)

    def require_unchanged(self) -> None:
        """The buckets hold what was trained when they were made, and nothing else."""
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad != (parameter in self.reducer.bucket_of):
                was = "unfrozen" if parameter.requires_grad else "frozen"
                rule = "BucketedDDP trains what required gradients when it was built"
                remedy = "wrap the module again, and drop this wrapper"
                raise ValueError(f"{rule}; {name} has been {was} since: {remedy}")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward in here adds up local gradients; the next one outside sends the sum."""
        before = self.reducer.sync
        self.reducer.sync = False
        try:
            yield
        finally:
            self.reducer.sync = before


# %% [markdown]
# ## 4. PyTorch's DistributedDataParallel does the same, and rebuilds its buckets
#
# DDP's reducer is written in C++ and has one trick more. The order in which parameters are defined
# is only a guess at the order in which their gradients come. So in the first step all of them share
# one bucket and nothing overlaps; DDP notes the true order and *rebuilds* its buckets from it.
# (With `find_unused_parameters=True` it does neither.) Of its options,
#
# - `gradient_as_bucket_view=True` makes gradients views of the buckets, as ours are;
# - `find_unused_parameters=True` looks in every step for parameters without a gradient;
# - `static_graph=True` promises that all steps use the same parameters, so that looking once is
#   enough;
# - `bucket_cap_mb` counts in MiB, 25 by default, where the first bucket has 1.


# %%
def torch_ddp(model: nn.Module, **options: object) -> DistributedDataParallel:
    """PyTorch's own, with buckets as large as ours."""
    device = next(model.parameters()).device
    ids = [device] if device.type == "cuda" else None
    return DistributedDataParallel(model, ids, bucket_cap_mb=CAPACITY / 2**20, **options)


# %% [markdown]
# DDP waits for exactly one gradient of every parameter in every step. A model that makes none, or
# two, meets one of its two classic errors:
#
# - **"Expected to have finished reduction in the prior iteration"**: a parameter got no gradient,
#   so the *next* forward finds a bucket that never left. If all ranks leave the same layer out,
#   remove it from the model; otherwise set `find_unused_parameters=True`. If only some ranks leave
#   it out, the others wait in their all-reduce: there you see a hang, and the error on one rank.
# - **"Expected to mark a variable ready only once"**: a parameter got two. That happens when
#   re-entrant activation checkpointing wraps a layer that is used twice, since each of its backward
#   passes is one of its own. Use `use_reentrant=False`, or `static_graph=True`.


# %%
class Pair(nn.Module):
    """Two layers, used as `way` says."""

    def __init__(self, way: Callable) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.way = way

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return self.way(self, x_BD)


def leave_one_out(pair: Pair, x_BD: torch.Tensor) -> torch.Tensor:
    return pair.first(x_BD)


def checkpoint_one_twice(pair: Pair, x_BD: torch.Tensor) -> torch.Tensor:
    x_BD = checkpoint(pair.first, pair.second(x_BD), use_reentrant=True)
    return checkpoint(pair.first, x_BD, use_reentrant=True)


def refused_in_step(way: Callable, words: str, device: torch.device) -> int:
    """Let DDP take two steps; return in which one it raises an error with these words, or 0."""
    ddp = torch_ddp(Pair(way).to(device))
    for step in (1, 2):
        try:
            ddp(torch.ones(8, 64, device=device)).sum().backward()
        except RuntimeError as error:
            print0(f"{'':13}DDP: {str(error)[:70]} ...")
            return step if words in str(error) else -1
    return 0


# %% [markdown]
# ## 5. How it is measured
#
# **Overlap without a clock.** Where ranks share cores, a clock cannot show overlap, but the order
# of events can: a gradient that comes after an all-reduce has started is computed while that
# all-reduce may travel. `Timeline` notes both. The all-reduces it sees beneath torch's dispatcher,
# where those of DDP's C++ reducer pass, too; the gradients it learns from hooks of its own, which
# run before ours and DDP's because they were registered first.


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
# A timeline is made before the model is wrapped, and entered for each step.


# %%
class Timeline(CountedCommunication):
    """The events of each step, in order: ("gradient", bytes) and ("all_reduce", bytes)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.steps: list[list[tuple[str, int]]] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.note_gradient)

    def __enter__(self) -> "Timeline":
        self.steps.append([])
        return super().__enter__()

    def note_gradient(self, parameter: nn.Parameter) -> None:
        self.steps[-1].append(("gradient", parameter.nbytes))

    def record(self, func, args: tuple, kwargs: dict) -> None:
        known = len(self.log)
        super().record(func, args, kwargs)
        for call in self.log[known:]:
            self.steps[-1].append((call.operation, call.nbytes))


def net(device: torch.device, seed: int) -> nn.Sequential:
    """Four linear layers of 67, 132, 132 and 10 kB in float64."""
    torch.manual_seed(seed)
    layers = []
    for inputs, outputs in pairwise([64, 128, 128, 128, 10]):
        layers += [nn.Linear(inputs, outputs, device=device, dtype=torch.float64), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def train(
    wrapped: nn.Module, batches: Iterable[Batch], timeline: Timeline, pieces: int = 1
) -> None:
    """SGD, each batch in so many micro-batches, of which only the last communicates."""
    sgd = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    for image_BD, label_B in batches:
        sgd.zero_grad()
        pairs = zip(image_BD.tensor_split(pieces), label_B.tensor_split(pieces), strict=True)
        with timeline:
            for i, (image_bD, label_b) in enumerate(pairs):
                with wrapped.no_sync() if i < pieces - 1 else nullcontext():
                    loss = cross_entropy(wrapped(image_bD), label_b)
                    (loss * (len(label_b) / len(label_B))).backward()  # not all are equally large
        sgd.step()


# %% [markdown]
# The data are scikit-learn's digits. The **oracle** is one process that starts from rank 0's
# weights and sees the whole of every batch. Its additions come in another order, which moves a
# gradient's sum over B samples by at most B eps of its terms. SGD with learning rate 0.1 and
# momentum 0.9 passes a gradient's error on to the weights with a total gain of
# 0.1 / (1 - 0.9) = 1. So after S steps the weights may differ by S B eps, to first order.


# %%
def digits(device: torch.device) -> Batch:
    """1,797 handwritten digits, in an order drawn once."""
    image_ND, label_N = map(torch.tensor, load_digits(return_X_y=True))
    order_N = torch.randperm(len(label_N), generator=torch.Generator().manual_seed(0))
    return (image_ND[order_N] / 8 - 0.6).to(device), label_N[order_N].to(device)


def batches_of(samples: Batch, steps: int, first: int, stride: int) -> list[Batch]:
    """Every `stride`-th sample of each batch, from the `first` on; the last 300 are not drawn."""
    batch_size = GLOBAL_BATCH // WORLD_SIZE * WORLD_SIZE
    batches = []
    for step in range(steps):
        index_B = torch.arange(step * batch_size, (step + 1) * batch_size) % 1497
        mine = index_B[first::stride]
        batches.append((samples[0][mine], samples[1][mine]))
    return batches


def largest_difference(ours: nn.Module, expected: nn.Module) -> float:
    """Between the parameters of two modules."""
    pairs = zip(ours.parameters(), expected.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def check_training(device: torch.device) -> dict[str, list[tuple[str, int]]]:
    """Train with our own DDP; claim that it agrees with one process and overlaps as predicted."""
    samples = digits(device)
    alone = net(device, seed=0)
    train(alone, batches_of(samples, STEPS, 0, 1), Timeline(alone))
    model = net(device, seed=RANK)  # only a broadcast can make ranks agree
    timeline = Timeline(model)
    train(
        BucketedDDP(model, CAPACITY / 1e6), batches_of(samples, STEPS, RANK, WORLD_SIZE), timeline
    )
    if WORLD_SIZE == 1:
        blocked("own: weights, difference between ranks", needs="2 ranks")
    else:
        of_rank_0 = copy.deepcopy(model)
        broadcast(of_rank_0.parameters(), None)
        claim("own: weights, difference between ranks", 0, largest_difference(model, of_rank_0))
    atol = STEPS * GLOBAL_BATCH * torch.finfo(torch.float64).eps
    error = largest_difference(model, alone)
    claim("own: weights, error against one process", 0, error, atol=atol)
    accuracy = (model(samples[0][-300:]).argmax(1) == samples[1][-300:]).double().mean()
    claim("own: accuracy on new digits", 0.9, accuracy, ">=", varies=True)
    check_events("own", timeline.steps[-1], calls=3, missing=4)
    return {"own DDP": timeline.steps[-1]} | check_others(samples, device)


# %% [markdown]
# The same events are claimed of one all-reduce per gradient and of PyTorch's DDP. There, the first
# step is looked at by itself.


# %%
def check_others(samples: Batch, device: torch.device) -> dict[str, list[tuple[str, int]]]:
    """Claim the events of one all-reduce per gradient and of PyTorch's DDP; return them."""
    batches = batches_of(samples, 3, RANK, WORLD_SIZE)
    model = net(device, seed=0)
    per_gradient = Timeline(model)
    with per_gradient:
        cross_entropy(model(batches[0][0]), batches[0][1]).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
    check_events("per gradient", per_gradient.steps[-1], calls=8, missing=0)

    model = net(device, seed=0)
    ddp = Timeline(model)
    train(torch_ddp(model), batches, ddp)
    check_events("PyTorch, first step", ddp.steps[0], calls=1, missing=0)
    check_events("PyTorch, third step", ddp.steps[2], calls=3, missing=4)
    return {
        "per gradient": per_gradient.steps[0],
        "PyTorch, first step": ddp.steps[0],
        "PyTorch, third step": ddp.steps[2],
    }


def check_events(name: str, events: list[tuple[str, int]], calls: int, missing: int) -> None:
    kinds = [kind for kind, _ in events if kind in ("gradient", "all_reduce")]
    handed_over = sum(nbytes for kind, nbytes in events if kind == "all_reduce")
    to_come = kinds[kinds.index("all_reduce") :].count("gradient")
    claim(f"{name}: all-reduces per step", calls, kinds.count("all_reduce"), question=1)
    claim(f"{name}: bytes per step", 8 * 42_634, handed_over)
    claim(f"{name}: missing at the first", missing, to_come, question=2)


# %% [markdown]
# **Waiting.** An all-reduce may finish as late as in its `wait()`. A network that happens to be
# quick hides a forgotten wait, so we train on one that transfers nothing until `wait()` is called.
# Micro-batches and DDP's `static_graph` must end at the weights of one process, too.


# %%
class LateWork:
    """An all-reduce over a network that transfers nothing until wait() is called."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat

    def wait(self) -> None:
        dist.all_reduce(self.flat)


def check_errors(device: torch.device) -> None:
    """Claim in which step DDP notices that a parameter got no gradient, or two."""
    step = refused_in_step(leave_one_out, "finished reduction in the prior iteration", device)
    claim("a layer left out: DDP raises in step", 2, step)
    step = refused_in_step(checkpoint_one_twice, "mark a variable ready only once", device)
    claim("a layer checkpointed twice, re-entrantly: in step", 1, step)


def check_variants(device: torch.device) -> None:
    """Three steps each: micro-batches, a late network, a static graph."""
    samples = digits(device)
    alone = net(device, seed=0)
    train(alone, batches_of(samples, 3, 0, 1), Timeline(alone))
    batches = batches_of(samples, 3, RANK, WORLD_SIZE)
    atol = 3 * GLOBAL_BATCH * torch.finfo(torch.float64).eps

    def check(name: str, wrap: Callable, pieces: int) -> None:
        model = net(device, seed=RANK)
        timeline = Timeline(model)
        train(wrap(model), batches, timeline, pieces)
        claim(f"{name}: error", 0, largest_difference(model, alone), atol=atol)
        if pieces > 1:
            calls = [kind for kind, _ in timeline.steps[-1]].count("all_reduce")
            claim(f"{name}: all-reduces", 3, calls)

    def own(model: nn.Module) -> BucketedDDP:
        return BucketedDDP(model, CAPACITY / 1e6)

    def own_on_a_late_network(model: nn.Module) -> BucketedDDP:
        ddp = own(model)
        ddp.reducer.start_all_reduce = LateWork
        return ddp

    def static(model: nn.Module) -> DistributedDataParallel:
        return torch_ddp(model, static_graph=True)

    check("own, 4 micro-batches", own, pieces=4)
    check("PyTorch, 4 micro-batches", torch_ddp, pieces=4)
    check("own, late network", own_on_a_late_network, pieces=1)
    check("PyTorch, static_graph", static, pieces=1)


# %% [markdown]
# **Odd models.** In this one even ranks take one road, odd ranks the other, and in the next step
# the other way round; no rank takes the third. Batch norm has buffers, and one parameter is frozen.
# Each bucket holds one tensor, so that their order matters. The oracle computes the batch of each
# rank in turn. tests/lessons/parallelism/test_04_buckets_and_overlap.py goes on with tied weights,
# mixed dtypes, sparse gradients and checkpointing.


# %%
class Roads(nn.Module):
    """Batch norm, then one of three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.roads = nn.ModuleList(nn.Linear(64, 10) for _ in range(3))
        self.norm.bias.requires_grad_(False)
        self.double()

    def forward(self, image_BD: torch.Tensor, road: int) -> torch.Tensor:
        return self.roads[road](self.norm(image_BD))


def check_odd_model(device: torch.device) -> None:
    samples = digits(device)
    torch.manual_seed(0)
    alone = Roads().to(device)
    model = copy.deepcopy(alone)
    own = BucketedDDP(model, bucket_mb=1e-6, find_unused=True)
    launched = note_launches(own)
    entering = []  # the running mean with which each forward begins
    model.norm.register_forward_pre_hook(
        lambda norm, inputs: entering.append(norm.running_mean.clone())
    )
    errors = []
    for step in range(3):
        model.zero_grad()
        image_BD, label_B = batches_of(samples, 3, RANK, WORLD_SIZE)[step]
        cross_entropy(own(image_BD, (RANK + step) % 2), label_B).backward()
        alone.zero_grad()
        for rank in range(WORLD_SIZE):
            image_BD, label_B = batches_of(samples, 3, rank, WORLD_SIZE)[step]
            loss = cross_entropy(alone(image_BD, (rank + step) % 2), label_B)
            (loss / WORLD_SIZE).backward()
        for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
            if expected.grad is not None:
                grad = torch.inf if ours.grad is None else ours.grad
                errors.append((expected.grad - grad).abs().max().item())
    atol = GLOBAL_BATCH * torch.finfo(torch.float64).eps
    claim("odd model: error of the gradients", 0, max(errors), atol=atol)
    unused = [p.grad for p in model.roads[2].parameters()]
    claim("gradients that no rank made, and are None", 2, unused.count(None))
    check_that_ranks_agree(launched, torch.stack(entering))


def note_launches(own: BucketedDDP) -> list[str]:
    """Return a list to which a bucket's first parameter is added whenever a bucket leaves."""
    launched = []
    names = {parameter: name for name, parameter in own.module.named_parameters()}
    start_all_reduce = own.reducer.start_all_reduce

    def note_and_start(flat: torch.Tensor) -> dist.Work:
        for bucket in own.reducer.buckets:
            if bucket.flat is flat:
                launched.append(names[next(iter(bucket.views))])
        return start_all_reduce(flat)

    own.reducer.start_all_reduce = note_and_start
    return launched


def check_that_ranks_agree(launched: list[str], entering: torch.Tensor) -> None:
    if WORLD_SIZE == 1:
        blocked("different orders of buckets over ranks", needs="2 ranks")
        blocked("buffers at each forward, between ranks", needs="2 ranks")
        return
    orders = [None] * WORLD_SIZE
    dist.all_gather_object(orders, tuple(launched))
    claim("different orders of buckets over ranks", 1, len(set(orders)), question=3)
    of_rank_0 = entering.clone()
    dist.broadcast(of_rank_0, src=0)
    difference = (entering - of_rank_0).abs().max().item()
    claim("buffers at each forward, between ranks", 0, difference)


# %% [markdown]
# **Memory.** The storages of all gradients and buckets are added up, each once. A communication
# hook lets us see DDP's buckets; it is DDP's own reduction, called from Python.


# %%
def check_memory(device: torch.device) -> None:
    batches = batches_of(digits(device), 3, RANK, WORLD_SIZE)
    model = net(device, seed=0)
    own = BucketedDDP(model, CAPACITY / 1e6)
    train(own, batches, Timeline(model))
    ratio = gradient_copies(model, [bucket.flat for bucket in own.reducer.buckets])
    claim("own: gradients and buckets / gradients", 1, ratio, question=4)

    for views, copies in ((False, 2), (True, 1)):
        buffers = []

        def keep_buffer(state: None, bucket: dist.GradBucket, buffers: list = buffers):
            buffers.append(bucket.buffer())
            return allreduce_hook(None, bucket)

        model = net(device, seed=0)
        ddp = torch_ddp(model, gradient_as_bucket_view=views)
        ddp.register_comm_hook(None, keep_buffer)
        train(ddp, batches, Timeline(model))
        ratio = gradient_copies(model, buffers[-3:])  # those of the last step
        claim(f"PyTorch, views={views}: the same", copies, ratio, question=4)


def gradient_copies(model: nn.Module, buckets: list[torch.Tensor]) -> float:
    """Bytes of gradients and buckets, over those of the parameters."""
    tensors = [*buckets, *(parameter.grad for parameter in model.parameters())]
    storages = [tensor.untyped_storage() for tensor in tensors]
    held = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(held.values()) / sum(parameter.nbytes for parameter in model.parameters())


# %% [markdown]
# ## 6. On GPUs: how much of the all-reduces is exposed
#
# Sixteen layers 4,096 wide have 0.27 billion parameters, 0.54 GB of gradients in bfloat16. A step
# under `no_sync` communicates nothing; what a step takes longer than that is exposed communication.
# With one bucket for everything all of it is exposed. CUDA events are the clock.


# %%
def measure_on_gpus(device: torch.device) -> None:
    if device.type == "cpu" or WORLD_SIZE == 1 or not torch.cuda.is_bf16_supported(False):
        blocked("ms per step, 25 MB buckets / one bucket", needs="2 GPUs with bfloat16")
        return
    x_BD = torch.randn(8192, 4096, device=device, dtype=torch.bfloat16)
    times = {}
    for bucket_mb in (1, 5, 25, 100, 1e6):
        torch.manual_seed(0)
        layers = [nn.Linear(4096, 4096, device=device, dtype=torch.bfloat16) for _ in range(16)]
        own = BucketedDDP(nn.Sequential(*layers), bucket_mb)

        def step(own: BucketedDDP = own) -> None:
            with torch.enable_grad():
                own(x_BD).square().mean().backward()
            own.zero_grad()

        def step_alone(own: BucketedDDP = own, step: Callable = step) -> None:
            with own.no_sync():
                step()

        alone = median_ms(step_alone)
        times[bucket_mb] = median_ms(step)
        row = f"{bucket_mb:9,.0f} MB: {times[bucket_mb]:6.2f} ms per step"
        print0(f"{'':13}buckets of {row}, {times[bucket_mb] - alone:6.2f} exposed")
    ratio = times[25] / times[1e6]
    claim("ms per step, 25 MB buckets / one bucket", 1.05, ratio, "<=", timed=True)


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
# 1. Three: layers 4 and 3 make 142 kB and close the first bucket, layer 2 fills the second, and
#    layer 1 is what is left. PyTorch's DDP makes three as well, from its second step on. However
#    they are divided, all ways hand over the same 341,072 bytes.
# 2. Four: when layers 4 and 3 leave, the weights and biases of layers 2 and 1 are still to come.
#    Before the last of them is there, 80% of the bytes have left. One all-reduce per gradient after
#    backward leaves none to hide behind, and neither does DDP's first step, with its one bucket.
#    `--figure PATH` draws the order of events for all of them.
# 3. One order, the buckets' own, though their gradients come in different orders. Without that rule
#    one rank's layer would be added to another rank's: gloo and NCCL check no names, and where the
#    sizes happen to agree nobody complains.
# 4. Once in ours, and in DDP with `gradient_as_bucket_view=True`, since a gradient is a part of its
#    bucket. Twice in DDP by default: 2 bytes more per parameter in bfloat16, 18 instead of 16.
#
# **Try.** Buckets filled from the first layer on are complete only when backward ends: the same
# bytes, the same weights, and nothing is hidden. Only the claim on what is missing at the first
# all-reduce sees it. Without the wait the optimizer steps on whatever has arrived; on a quick
# network that may be everything, and only the late network proves the mistake.
#
# On real systems: larger buckets use the network better and leave later; 25 MB suits a node with
# NVLink, and slower networks want more. Hidden is not free: NCCL's kernels take streaming
# multiprocessors from the matrix products that hide them (communication/06_overlap.py). At a
# thousand ranks latency grows, and so does the best bucket. And one rank whose data are late delays
# the first bucket of all: then a trace shows long all-reduces on every rank but that one.


# %%
def draw(rows: dict[str, list[tuple[str, int]]], path: str) -> None:
    """Two lines for each way: its gradients as they come, and its all-reduces as they can leave."""
    from matplotlib.figure import Figure

    figure = Figure((10, 5), layout="constrained")
    axes = figure.subplots()
    for y, events in enumerate(rows.values()):
        whole = sum(nbytes for kind, nbytes in events if kind == "gradient")
        made = sent = early = 0  # bytes so far
        for kind, nbytes in events:
            if kind == "gradient":
                start = made
                made += nbytes
                color = "#9ecae1"
            else:  # one all-reduce after another
                start = max(made, sent)
                sent = start + nbytes
                early += nbytes if made < whole else 0
                color = "#a1d99b" if made < whole else "#fc9272"
            line = y - 0.2 if kind == "gradient" else y + 0.15
            axes.barh(line, nbytes / 1e3, 0.33, start / 1e3, color=color, edgecolor="white")
            if nbytes > whole / 20:
                where = (start + nbytes / 2) / 1e3, line
                axes.text(*where, f"{nbytes / 1e3:.0f}", ha="center", va="center", fontsize=9)
        text = f"all-reduces: {early / whole:.0%} leave early"
        axes.text(sent / 1e3 + 5, y + 0.15, text, va="center")
    axes.axvline(whole / 1e3, color="k", linewidth=0.7, linestyle=":")
    axes.text(whole / 1e3 + 5, -0.2, "gradients; dotted: the last one is there", va="center")
    axes.set_title("What leaves before the last gradient (green) can hide behind backward")
    axes.set_xlabel("kB: the order is measured, and a block is as long as it has bytes")
    axes.set_yticks(range(len(rows)), rows)
    axes.set(xlim=(0, 3 * whole / 1e3))
    axes.invert_yaxis()
    figure.savefig(path, dpi=120)


def main() -> None:
    figure = {"metavar": "PATH", "help": "save the order of events as PNG"}
    options = command_line({"--figure": figure})
    launch(range(1, GLOBAL_BATCH // 4 + 1))
    if WORLD_SIZE > GLOBAL_BATCH // 4:
        most = GLOBAL_BATCH // 4
        refuse(f"a rank needs 4 samples per step: at most {most} ranks, not {WORLD_SIZE}")
    device = setup()
    rows = check_training(device)
    check_variants(device)
    check_errors(device)
    check_odd_model(device)
    check_memory(device)
    measure_on_gpus(device)
    if options.figure and RANK == 0:
        draw(rows, options.figure)
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
