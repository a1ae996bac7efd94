"""Gradient compression: send less, and what you did not send, later
=================================================================

**Question.** When the network is the limit, a step takes as long as its bytes. How few bytes can a
step of data-parallel training send and still learn, and what does that buy on which link?

**Predict**, and write it down before you run. Four ranks train a model of 85,002 parameters.

1. Gradients of 8 bits cannot be added up on the way, so every rank gathers what *all* ranks sent,
   over a ring. How many bytes does a rank send, of those that it sends in a float16 all-reduce?
2. There is a better way: rank r receives only the r-th quarter of everybody's gradients, adds it up
   in float32, rounds it to 8 bits again, and all ranks gather the four sums. How many bytes now?
3. Every rank sends the largest 0.1% of its gradients and drops the rest. Which share of all that
   the gradients would have done to the weights is lost?
4. It adds the rest to its next gradients instead. Which share is lost now?
5. Across a cable of 20 Mbit/s: how many times as long as a step of bfloat16 does one of float32
   take?

**Run.**

    torchrun --standalone --nproc-per-node=4 08_gradient_compression.py  # NCCL on 4 GPUs, else gloo
    python 08_gradient_compression.py                                    # the same, started for you

Not run on several GPUs. For the slow cable that rank 0 makes it needs Linux, iproute2, and root or
user namespaces.

**Try.** In `hook` leave out the line of the error feedback: which claims fail? In `quantize` round
to the nearest (`torch.round(x / step)`): training goes as well as before, so what fails?

**Before.** communication/07_hierarchical_collectives.py: the slow cable; what DDP is
(parallelism/01_data_parallelism_ddp.py) can be read later.

**Next.** parallelism/04_buckets_and_overlap.py builds what these hooks plug into.
"""

import argparse
import ctypes
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NamedTuple, NoReturn

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no warning that 10.0.0.1 has no name
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, pad
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

GLOBAL_BATCH = 96  # samples per step, all ranks together
STEPS = 60
RATE = 0.3  # learning rate
SHARE = 0.001  # of all gradients: what top-k sends
H = 10  # steps between two outer steps of local SGD and DiLoCo
SHAPES: list[tuple[int, ...]] = [(256, 64), (256,), (256, 256), (256,), (10, 256), (10,)]
P = sum(math.prod(shape) for shape in SHAPES)  # 85,002 parameters

Sent = tuple[torch.Tensor, torch.Tensor]  # what this rank sent, and the mean of what all sent
Compressor = Callable[[torch.Tensor], Sent]

# %% [markdown]
# ## 1. Fewer bits: casting, and 8 bits by all-to-all
#
# A **compressor** takes x, all gradients of this rank. It returns what it sent of them, and the
# mean over ranks of what all sent. The simplest one casts x to **float16** or **bfloat16**, which
# the all-reduce adds up on the way as it does float32. On a ring each of n ranks sends 2(n-1)/n
# times the bytes of x: half of float32's, for any n.


# %%
def mean(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the means over ranks, all in one message; dividing first avoids float16's overflow."""
    flat = torch.cat([t.flatten() for t in tensors]).div_(WORLD_SIZE)
    dist.all_reduce(flat)
    parts = flat.split([t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def cast_to(dtype: torch.dtype) -> Compressor:
    def cast(x: torch.Tensor) -> Sent:
        low = x.to(dtype)
        return low.float(), mean([low])[0].float()

    return cast


# %% [markdown]
# **8 bits** write each element as a whole multiple, from -127 to 127, of a step that goes along in
# float32. Rounding is up or down at random, more likely to the nearer, so that it is right on
# average (Alistarh et al., 2017). Such a message cannot be added up on the way: the sum of two
# needs nine bits, and every rank has another step. There are two ways out.
#
# - **All-gather.** Every rank gathers all n messages, and adds up itself. A rank then sends (n-1)
#   times the bytes of x, which grows with n: n/4 of what float16 needs.
# - **All-to-all.** Cut x into n chunks, and let rank r add up chunk r only. That is a ring
#   all-reduce's own idea, a reduce-scatter and an all-gather, with an all-to-all in place of the
#   first, because nothing may be added on the way:
#
#          rank 0        rank 1        rank 2
#          00 01 02      10 11 12      20 21 22       chunk c of rank r: "rc", one byte per element
#          00 10 20      01 11 21      02 12 22       all-to-all: rank c has everybody's chunk c
#           sum 0         sum 1         sum 2         added up in float32, and quantized again
#          s0 s1 s2      s0 s1 s2      s0 s1 s2       all-gather
#
# Each half sends (n-1)/n bytes per element, together half of float16's for any n. The price is a
# second rounding. ZeRO++ (Wang et al., 2023) sends its gradients this way, in 4 bits, and 1-bit
# Adam (Tang et al., 2021) its momentum.


# %%
def quantize(x: torch.Tensor) -> torch.Tensor:
    """Return a message of int8: the step in four bytes, then x in multiples of it."""
    step = x.abs().max().clamp(min=1e-30) / 127
    multiples = torch.floor(x / step + torch.rand_like(x)).clamp(-127, 127)
    return torch.cat([step[None].view(torch.int8), multiples.to(torch.int8)])


def dequantize(message: torch.Tensor) -> torch.Tensor:
    step = message[:4].clone().view(torch.float32)  # a copy: four bytes may lie anywhere
    return message[4:] * step


def gather(x: torch.Tensor) -> torch.Tensor:
    """Return every rank's x, one per row."""
    rows = x.new_empty(WORLD_SIZE * len(x))
    dist.all_gather_into_tensor(rows, x)
    return rows.view(WORLD_SIZE, len(x))


def eight_bits_by_all_gather(x: torch.Tensor) -> Sent:
    message = quantize(x)
    everyone = torch.stack([dequantize(one) for one in gather(message)])
    return dequantize(message), everyone.mean(0)


def eight_bits(x: torch.Tensor) -> Sent:
    padded = pad(x, (0, -len(x) % WORLD_SIZE))  # all chunks must have the same size
    outgoing = torch.stack([quantize(chunk) for chunk in padded.chunk(WORLD_SIZE)])
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing)
    mine = torch.stack([dequantize(one) for one in incoming]).mean(0)
    means = torch.cat([dequantize(one) for one in gather(quantize(mine))])
    sent = torch.cat([dequantize(one) for one in outgoing])
    return sent[: len(x)], means[: len(x)]


# %% [markdown]
# ## 2. Fewer elements: top-k, and why it needs error feedback
#
# **Top-k** sends the k largest gradients with their places, 8 bytes each. Ranks choose different
# places, so this message cannot be added up on the way either, and is gathered; it is small enough.


# %%
def top_k(x: torch.Tensor) -> Sent:
    k = max(1, round(SHARE * len(x)))
    places = x.abs().topk(k).indices
    message = torch.cat([places.int(), x[places].view(torch.int32)])
    total = torch.zeros_like(x)
    for row in gather(message):  # in the same order everywhere: sums are the same to the bit
        theirs, values = row.chunk(2)
        total[theirs.long()] += values.view(torch.float32)
    sent = torch.zeros_like(x).index_copy(0, places, x[places])
    return sent, total / WORLD_SIZE


# %% [markdown]
# Top-k chooses the same few places again and again. Of what would have moved the other 99.9% of the
# weights, nothing ever arrives. The cure is one line, **error feedback** (Seide et al., 2014): keep
# what you did not send, and add it to the next gradients. What is small adds up until it is large,
# and goes. Nothing is lost, it is late. Over all ranks, at any time,
#
#     all gradients so far  =  all that arrived  +  what is still kept
#
# DDP lets a **communication hook** take the gradients of a bucket, and return their mean. Here one
# bucket holds them all. DDP sorts it after the first step, but the model's own order never changes.


# %%
def hook(run: "Run", bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    gradients = dict(zip(bucket.parameters(), bucket.gradients(), strict=True))
    x = torch.cat([gradients[p].flatten() for p in run.model.parameters()])
    run.computed += x
    x += run.residual  # error feedback
    sent, arrived = run.compress(x)
    if run.method.feedback:
        run.residual = x - sent
    run.arrived += arrived
    parts = arrived.split([math.prod(shape) for shape in SHAPES])
    for p, part in zip(run.model.parameters(), parts, strict=True):
        gradients[p].copy_(part.view_as(p))  # a view of the bucket
    devices = [x.device] if x.is_cuda else []
    future = torch.futures.Future(devices=devices)
    future.set_result(bucket.buffer())
    return future


# %% [markdown]
# ## 3. Low rank: PowerSGD
#
# **PowerSGD** (Vogels et al., 2019, algorithm 1) takes the gradient of a weight for the matrix M
# (m x k) that it is, and approximates it by one of rank r, P Q'. That has r(m + k) elements instead
# of m k. One step of power iteration, starting from the last step's Q, finds it:
#
#         k                r                            1.  P = mean over ranks of M Q
#      +------+          +---+      k                   2.  make P's columns orthonormal
#    m |  M   |   ~    m | P |  r +------+              3.  Q = mean over ranks of M' P
#      +------+          +---+    |  Q'  |              4.  the mean of M is about P Q'
#                                 +------+
#
# M Q and M' P are linear in M, so an all-reduce can add them up on the way, and the price does not
# grow with n. Biases are sent whole, in P's message. torch's powerSGD_hook does the same, and works
# on NCCL; on gloo it deadlocks, because its callbacks wait for each other.


# %%
class PowerSGD:
    """Sends matrices (a weight of more dimensions is flattened to two) at rank r, vectors whole."""

    def __init__(self, r: int, shapes: list[tuple[int, ...]]) -> None:
        self.shapes = shapes
        seed = torch.Generator().manual_seed(0)  # the same Q on every rank
        self.q = []
        for shape in shapes:
            k = math.prod(shape[1:])
            if k > 1:
                self.q.append(torch.randn(k, r, generator=seed))

    def __call__(self, x: torch.Tensor) -> Sent:
        approximation = x.clone()
        matrices = []  # views of `approximation`
        vectors = []
        parts = approximation.split([math.prod(shape) for shape in self.shapes])
        for part, shape in zip(parts, self.shapes, strict=True):
            matrix = part.view(shape[0], -1)
            if matrix.shape[1] > 1:
                matrices.append(matrix)
            else:
                vectors.append(matrix)

        products = [m @ q.to(m) for m, q in zip(matrices, self.q, strict=True)]
        received = mean([*products, *vectors])
        p = [torch.linalg.qr(product).Q for product in received[: len(matrices)]]
        self.q = mean([m.T @ column for m, column in zip(matrices, p, strict=True)])

        for matrix, column, q in zip(matrices, p, self.q, strict=True):
            matrix.copy_(column @ q.T)
        for vector, whole in zip(vectors, received[len(matrices) :], strict=True):
            vector.copy_(whole)
        return approximation, approximation


# %% [markdown]
# Every rank makes P orthonormal by itself. The ranks stay equal to the bit only if their devices
# round alike, which GPUs of different models need not do; broadcast P then.

# %% [markdown]
# ## 4. Fewer steps: local SGD and DiLoCo
#
# **Local SGD** communicates every H steps only, and averages the weights. **DiLoCo** (Douillard et
# al., 2023) takes the way that the mean weights have gone in H steps for a gradient, and hands that
# to an outer optimizer: SGD with rate 0.7 and Nesterov momentum 0.9. With rate 1 and no momentum
# it is local SGD. (Their inner optimizer is AdamW and H is 500. Ours is the SGD of all other
# methods, and training is short.) Here are all methods, and what they should cost:


# %%
class Method(NamedTuple):
    """One way to send gradients, or not to send them."""

    compressor: Callable[[], Compressor] | None  # makes one; None: torch's own float16 hook
    handed: float  # bytes that a rank hands to collectives per step, predicted
    feedback: bool = False
    outer: tuple[float, float] | None = None  # rate and momentum of an outer step every H steps


def keep_to_myself(x: torch.Tensor) -> Sent:
    return x, x


FULL = "float32"
HALF = "float16, torch's hook"
BFLOAT = "bfloat16"
EIGHT = "8 bits"
EIGHT_GATHERED = "8 bits, all-gather"
TOP = "top-k"
TOP_OFF = "top-k, no feedback"
LOW = "PowerSGD 1"
LOW_OFF = "PowerSGD 1, no feedback"
LOCAL = f"local SGD, H={H}"
DILOCO = f"DiLoCo, H={H}"


def methods() -> dict[str, Method]:
    few = 8 * round(SHARE * P)
    chunk = 4 + math.ceil(P / WORLD_SIZE)  # of eight bits
    found = {
        FULL: Method(lambda: cast_to(torch.float32), 4 * P),
        HALF: Method(None, 2 * P),
        BFLOAT: Method(lambda: cast_to(torch.bfloat16), 2 * P),
        EIGHT: Method(lambda: eight_bits, WORLD_SIZE * chunk + chunk),
        EIGHT_GATHERED: Method(lambda: eight_bits_by_all_gather, P + 4),
        TOP: Method(lambda: top_k, few, feedback=True),
        TOP_OFF: Method(lambda: top_k, few),
        LOW_OFF: Method(lambda: PowerSGD(1, SHAPES), 4 * low_rank_elements(1)),
        LOCAL: Method(lambda: keep_to_myself, 4 * P / H, outer=(1.0, 0.0)),
        DILOCO: Method(lambda: keep_to_myself, 4 * P / H, outer=(0.7, 0.9)),
    }
    for r in (1, 2, 4):
        compressor = partial(PowerSGD, r, SHAPES)
        found[f"PowerSGD {r}"] = Method(compressor, 4 * low_rank_elements(r), feedback=True)
    return found


def low_rank_elements(r: int) -> int:
    """Elements of all P, Q and biases at rank r."""
    total = 0
    for shape in SHAPES:
        total += r * sum(shape) if len(shape) == 2 else shape[0]
    return total


# %% [markdown]
# ## 5. Training with each of them
#
# A small network learns scikit-learn's handwritten digits, 1,797 pictures of 8 x 8, of which every
# fifth is kept back. All methods train in turn, step by step, on the same samples.


# %%
class Run:
    """One method's training."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.method = methods()[name]
        torch.manual_seed(0)  # the same weights on every rank
        hidden = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()]
        self.model = nn.Sequential(*hidden, nn.Linear(256, 10)).to(device)
        gpus = [device] if device.type == "cuda" else None
        self.ddp = DistributedDataParallel(self.model, gpus, bucket_cap_mb=1e3, init_sync=False)
        if self.method.compressor is None:
            self.ddp.register_comm_hook(None, fp16_compress_hook)
        else:
            self.compress = self.method.compressor()
            self.ddp.register_comm_hook(self, hook)
        self.sgd = torch.optim.SGD(self.model.parameters(), RATE)
        self.common = self.weights()  # from which all ranks set out every H steps
        if self.method.outer is not None:
            rate, momentum = self.method.outer
            nesterov = momentum > 0
            self.outer = torch.optim.SGD([self.common], rate, momentum, nesterov=nesterov)

        self.computed = torch.zeros(P, device=device)  # all gradients so far, added up
        self.arrived = torch.zeros(P, device=device)  # all that came back from the ranks
        self.residual = torch.zeros(P, device=device)  # what has not been sent yet
        self.calls: list[Call] = []
        self.seconds: list[float] = []
        self.curve: list[float] = []  # accuracy on new digits, every EVERY steps
        self.carried = 0  # bytes on the cable, both ways, where there is one
        self.left = 0  # bytes that the ranks of this node have sent, where there is a cable

    def weights(self) -> torch.Tensor:
        return parameters_to_vector(self.model.parameters()).detach()

    def step(self, images_BD: torch.Tensor, labels_B: torch.Tensor) -> None:
        if images_BD.is_cuda:
            torch.cuda.synchronize()  # the clock must not pay for the batch
        start = time.perf_counter()
        counted = CountedCommunication()  # for one round of H steps; the next ones are alike
        with counted if len(self.seconds) < H else nullcontext():
            self.sgd.zero_grad()
            cross_entropy(self.ddp(images_BD), labels_B).backward()
            self.sgd.step()
            if self.method.outer is not None and len(self.seconds) % H == H - 1:
                self.outer_step()
        if images_BD.is_cuda:
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - start)
        for call in counted.log:
            if call.operation != "broadcast":  # by which DDP, once, tells the order of its buckets
                self.calls.append(call)

    def outer_step(self) -> None:
        self.common.grad = self.common - mean([self.weights()])[0]
        self.outer.step()
        vector_to_parameters(self.common.clone(), self.model.parameters())


# %% [markdown]
# Ranks draw their own samples from the digits that are not kept back, and share the work of
# measuring the accuracy. A fixed seed per step and rank makes the runs repeatable.

# %%
EVERY = 5  # steps from one look at the accuracy to the next


def read_digits() -> tuple:
    from sklearn.datasets import load_digits  # takes a second, which one rank has to spend

    return load_digits(return_X_y=True)


def train(device: torch.device, steps: int, few: int, on_cable: bool = False) -> dict[str, Run]:
    """Train all methods for `steps` steps, or for `few` where one step is like any other."""
    digits, labels = from_rank_0(read_digits() if RANK == 0 else None)
    image_ND = torch.tensor(digits, device=device).float() / 8 - 0.6
    label_N = torch.tensor(labels, device=device)
    places = torch.arange(len(label_N), device=device)
    old = places[places % 5 > 0]
    new = places[::5][RANK::WORLD_SIZE]
    runs = {name: Run(name, device) for name in methods()}
    for step in tqdm(range(steps), "steps", leave=False, disable=on_cable or RANK > 0 or None):
        torch.manual_seed(step * WORLD_SIZE + RANK)
        batch = old[torch.randint(len(old), (GLOBAL_BATCH // WORLD_SIZE,)).to(device)]
        dist.barrier()  # else the first method would wait for ranks that are late
        for run in runs.values():
            if step < few or run.method.outer is not None:
                carried, left = bytes_so_far() if on_cable else (0, 0)
                run.step(image_ND[batch], label_N[batch])
                if on_cable:
                    carried_now, left_now = bytes_so_far()
                    run.carried += carried_now - carried
                    run.left += left_now - left
        if step % EVERY == EVERY - 1:
            for run in runs.values():
                right = run.model(image_ND[new]).argmax(1) == label_N[new]
                run.curve.append(right.sum().item() / len(places[::5]))
    for run in runs.values():
        summarize(run, device)
    return runs


def summarize(run: Run, device: torch.device) -> None:
    """Set per step: the bytes that go over a ring's edge and over a cut, the fastest seconds."""
    counted = min(H, len(run.seconds))  # steps
    curve = torch.tensor(run.curve, device=device)
    dist.all_reduce(curve)  # each rank has looked at its share of the new digits
    run.curve = curve.tolist()
    seconds = torch.tensor(run.seconds, device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    at_once = 1 if run.method.outer is None else H
    run.best = seconds.view(-1, at_once).mean(1).min().item()  # other jobs can only delay one
    run.handed = sum(handed_over(call) for call in run.calls) / counted
    run.sent = sum(sent_by_a_rank(call) for call in run.calls) / counted
    run.crossing = sum(over_the_cable(call) for call in run.calls) / counted


# %% [markdown]
# ## 6. How it is measured
#
# **Bytes.** The counter sees what is handed to a collective. It costs time, so it runs in the first
# H steps of each method only. What a rank then sends follows from the textbook's algorithms: a ring
# for all-reduce and all-gather, one message to each rank for all-to-all. If half of the ranks are
# at either end of a cable, one edge of a ring crosses it in each direction; of an all-to-all, every
# chunk whose two ranks are at different ends.


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
# What the three collectives make of a tensor of `nbytes`, by these algorithms:


# %%
def handed_over(call: Call) -> float:
    """Bytes that this rank gave; of an all-gather the counter sees the output, n times that."""
    return call.nbytes / WORLD_SIZE if call.operation == "all_gather" else call.nbytes


def sent_by_a_rank(call: Call) -> float:
    passes = {"all_reduce": 2, "all_gather": 1, "all_to_all": 1}[call.operation]
    return passes * (WORLD_SIZE - 1) / WORLD_SIZE * call.nbytes


def over_the_cable(call: Call) -> float:
    """Bytes that cross it in one direction."""
    if call.operation != "all_to_all":
        return sent_by_a_rank(call)
    near = math.ceil(WORLD_SIZE / 2)
    return near * (WORLD_SIZE - near) * call.nbytes / WORLD_SIZE


# %% [markdown]
# **What is claimed**: the bytes handed in per step, by formula, and what the kernel counts of 8
# bits and of float16; that all ranks keep the same weights; which share of the gradients is lost,
# compared with the mean of all gradients, gathered in float32; that rounding is right on average,
# from 400 roundings of one tensor (the nearest multiple is off by up to half a step, a random one
# averages to less than 1/8 of it, five standard deviations); and what has been learned.


# %%
def check_runs(runs: dict[str, Run]) -> None:
    for name, run in runs.items():
        claim(f"{name}: bytes handed in per step", run.method.handed, run.handed)
    gaps = []
    for run in runs.values():
        rows = gather(run.weights())
        gaps.append((rows - rows[0]).abs().max())
    claim("largest difference of weights between ranks", 0, torch.stack(gaps).max())

    for name in (FULL, EIGHT, EIGHT_GATHERED, LOW, "PowerSGD 2", "PowerSGD 4"):
        bound = 0.05 if name in (EIGHT, EIGHT_GATHERED) else 1e-4  # 8 bits round
        claim(f"{name}: share of gradients lost", bound, share_lost(runs[name]), "<=")
    lost = share_lost(runs[TOP_OFF])
    claim(f"{TOP_OFF}: share of gradients lost", 0.5, lost, ">=", question=3)
    claim(f"{LOW_OFF}: share of gradients lost", 0.5, share_lost(runs[LOW_OFF]), ">=")
    lost = share_lost(runs[TOP])
    claim(f"{TOP}: share of gradients lost", 0, lost, atol=1e-4, question=4)

    for name, off in ((TOP, TOP_OFF), (LOW, LOW_OFF)):
        gain = runs[name].curve[-1] - runs[off].curve[-1]
        claim(f"{name}: accuracy that feedback saves", 0.1, gain, ">=", varies=True)
    worst = min(run.curve[-1] for name, run in runs.items() if name not in (TOP_OFF, LOW_OFF))
    claim("all others: accuracy on new digits", 0.85, worst, ">=", varies=True)


def share_lost(run: Run) -> float:
    """What neither arrived nor is kept, of the mean over ranks of all gradients; by norms."""
    computed = gather(run.computed).mean(0)
    residual = gather(run.residual).mean(0)
    return ((computed - residual - run.arrived).norm() / computed.norm()).item()


def check_rounding(device: torch.device) -> None:
    x = torch.linspace(-1, 1, 1000, device=device)
    step = 1 / 127
    roundings = [dequantize(quantize(x)) for _ in range(400)]
    largest = (torch.stack(roundings) - x).abs().max().item()
    claim("8 bits: largest error, in steps, below", 1, largest / step, "<=", atol=1e-3)
    bias = (sum(roundings) / len(roundings) - x).abs().max().item()
    claim("8 bits: largest error of the mean, in steps", 0, bias / step, atol=0.125)


# %% [markdown]
# **The slow link.** The fast link is these ranks' own. The slow one is a cable between two virtual
# nodes that rank 0 makes, explained in 07_hierarchical_collectives.py, section 4; skip the next two
# cells if you know them. As many ranks again, half of them at each end, take a few steps across it,
# on gloo and the CPU. There the kernel also counts what the ranks of a node send: on the cable to
# the other node, and on the node's loopback to each other.

# %%
libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNET = 0x40000000  # for unshare and setns: a network namespace
CLONE_NEWUSER = 0x10000000  # for unshare: a user namespace


def die_with(parent: int) -> None:
    """Be killed when `parent` ends (PR_SET_PDEATHSIG), or now if it has ended."""
    if sys.platform == "linux":
        libc.prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def new_network() -> int:
    """Move this process into a new network namespace; return a descriptor of it."""
    if sys.platform != "linux":
        raise OSError("network namespaces exist on Linux only")
    user = os.geteuid()
    group = os.getegid()
    if libc.unshare(CLONE_NEWNET) != 0:  # not root: become root of a user namespace first
        if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
            raise OSError(f"unshare: {os.strerror(ctypes.get_errno())}")
        for name, line in {
            "setgroups": "deny",
            "uid_map": f"0 {user} 1",
            "gid_map": f"0 {group} 1",
        }.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def enter(network: int) -> None:
    """Move this process into a network namespace."""
    if libc.setns(network, CLONE_NEWNET) != 0:
        raise OSError(f"setns: {os.strerror(ctypes.get_errno())}")


def command(line: str, keep: tuple[int, ...] = ()) -> None:
    """Run a command, with these descriptors open; raise OSError with what it complained of."""
    done = subprocess.run(line.split(), pass_fds=keep, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{done.stderr.strip()} ({line})")


def two_nodes(mbit: float) -> list[int]:
    """Make two networks joined by a cable that carries `mbit` Mbit/s each way; return both."""
    nodes = [new_network(), new_network()]  # we are in the second now
    far_end = f"peer name slow netns /proc/self/fd/{nodes[0]}"
    command(f"ip link add name slow type veth {far_end}", keep=(nodes[0],))
    for number, network in enumerate(nodes, start=1):
        enter(network)
        command("ip link set lo up")
        command(f"ip address add 10.0.0.{number}/24 dev slow")
        command("ip link set slow addrgenmode none up")  # no IPv6, so no chatter
        command("ip link set slow gso_max_segs 1")  # TCP cuts packets itself: no card does it here
        command(f"tc qdisc add dev slow root tbf rate {mbit}mbit burst 5kb latency 100ms")
    return nodes


def bytes_on_the_cable() -> int:
    """Bytes that have come into this node by the cable, and left: one end sees both ways."""
    with open("/proc/self/net/dev") as file:
        rows = [line.split() for line in file if "slow:" in line]
    # field 1 counts what was received, field 9 what was sent; without a cable there is no row
    return sum(int(row[1]) + int(row[9]) for row in rows)


# %% [markdown]
# Ranks are forked in their nodes, and talk to this process through pipes. Each asks the kernel to
# be killed when its parent ends, so nothing is left behind, however the lesson ends.


# %%
def start_ranks(
    count: int, mbit: float, work: Callable[[Connection], None]
) -> tuple[list[Connection], str]:
    """Fork `count` ranks in two nodes, where each calls `work` with a pipe to this process.

    Returns the pipes and "", or no pipes and the reason why there can be no nodes. With `mbit` 0
    there is no cable: the ranks share the loopback of this machine.
    """
    pipes = [Pipe() for _ in range(count)]
    answer, tell = Pipe(duplex=False)
    parent = os.getpid()
    if os.fork() == 0:
        try:
            be_launcher(parent, mbit, [theirs for _, theirs in pipes], tell, work)
        except BaseException:  # of the launcher or of a rank, which must not return into `main`
            sys.excepthook(*sys.exc_info())
        os._exit(1)
    tell.close()
    for _, theirs in pipes:
        theirs.close()  # so that `recv` fails once those who hold the other copies have ended
    why_not = answer.recv()
    if why_not:
        os.wait()
        return [], why_not
    return [ours for ours, _ in pipes], ""


def be_launcher(
    parent: int,
    mbit: float,
    pipes: list[Connection],
    tell: Connection,
    work: Callable[[Connection], None],
) -> NoReturn:
    """Make the nodes and fork their ranks; stay until all have ended, or one of them badly."""
    os.setsid()  # Ctrl-C is for the lesson; when that ends, we do
    die_with(parent)
    try:
        nodes = two_nodes(mbit) if mbit > 0 else []
    except OSError as error:
        tell.send(str(error))
        os._exit(0)
    tell.send("")
    launcher = os.getpid()
    if nodes:
        enter(nodes[0])
    meeting = socket.create_server(("10.0.0.1" if nodes else "127.0.0.1", 0))
    for rank, pipe in enumerate(pipes):
        if nodes:
            enter(nodes[2 * rank // len(pipes)])
        if os.fork() == 0:
            die_with(launcher)
            os.environ["GLOO_SOCKET_IFNAME"] = "slow" if nodes else "lo"
            be_rank(rank, len(pipes), meeting)
            work(pipe)
            os._exit(0)
    for pipe in pipes:
        pipe.close()
    for _ in pipes:
        _, status = os.wait()
        if status != 0:
            os._exit(1)  # the ranks that are left are killed with us
    os._exit(0)


def be_rank(rank: int, world_size: int, meeting: socket.socket) -> None:
    """Join the group of the ranks in both nodes, by way of a socket that rank 0 serves."""
    global RANK, WORLD_SIZE
    RANK = rank
    WORLD_SIZE = world_size
    host, port = meeting.getsockname()
    server = {}
    if rank == 0:
        server = {"is_master": True, "master_listen_fd": os.dup(meeting.fileno())}
    store = dist.TCPStore(host, port, wait_for_workers=False, **server)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


# %% [markdown]
# A step across the cable should take as long as on the fast link, and as long as its bytes need on
# the cable besides; and the kernel should count those bytes there, and 7% of headers. What a method
# has learned after equal *time* is read from the curves above: after as many steps as it can make.
# (On a machine with GPUs the fast step is a GPU's, and the slow one a CPU's. The wire takes so long
# that it does not matter.)

# %%
MBIT = 20
SLOW_STEPS = 4
BYTE = 1514 / 1448 * 8 / MBIT / 1e6  # seconds on the cable: a packet of 1,514 bytes carries 1,448


def train_when_told(pipe: Connection) -> None:
    """On each rank across the cable."""
    pipe.recv()
    runs = train(torch.device("cpu"), H, SLOW_STEPS, on_cable=True)
    here = math.ceil(WORLD_SIZE / 2)  # ranks of the first node, whose rank 0 is asked
    seen = []
    for run in runs.values():
        steps = len(run.seconds)
        seen.append((run.best, run.carried / 2 / steps, run.left / here / steps))
    pipe.send(seen)


def bytes_sent_in_this_node() -> int:
    """Bytes that all ranks of this node have sent: to each other on lo, and over the cable."""
    with open("/proc/self/net/dev") as file:
        rows = [line.replace(":", " ").split() for line in file]
    return sum(int(row[9]) for row in rows if row[0] in ("lo", "slow"))


def bytes_so_far() -> tuple[int, int]:
    """Both counts once all ranks have come so far; all have looked before any goes on."""
    dist.barrier()
    so_far = bytes_on_the_cable(), bytes_sent_in_this_node()
    dist.barrier()
    return so_far


def from_rank_0(value: object) -> object:
    """Return rank 0's `value` on every rank."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def train_across(link: list[Connection], why_not: str, runs: dict[str, Run]) -> bool:
    """Add to each run what was seen of it across the cable; if there is none, say why."""
    for pipe in link:
        pipe.send("go")
    seen = from_rank_0([pipe.recv() for pipe in link][:1] or why_not)
    if isinstance(seen, str):
        print0(f"{'':13}{seen:.80}")
        return False
    for run, (seconds, crossed, counted) in zip(runs.values(), seen[0], strict=True):
        run.slow = seconds
        run.crossed = crossed
        run.counted = counted
        run.expected = run.best + run.crossing * BYTE
    for run in runs.values():
        looks = round(runs[FULL].slow / run.slow)  # in the time of float32's first EVERY steps
        run.soon = run.curve[: max(1, looks)][-1]
    return True


# %% [markdown]
# What is claimed of it: the bytes, the seconds, and what has been learned in equal time.


# %%
def check_slow_link(runs: dict[str, Run]) -> None:
    full, half, low = (runs[name] for name in (FULL, BFLOAT, LOW))
    ratio = runs[EIGHT_GATHERED].counted / runs[HALF].counted
    gathered = WORLD_SIZE / 4
    what = "8 bits, all-gather: bytes sent / float16's"
    claim(what, gathered, ratio, atol=0.15 * gathered, question=1, varies=True)
    ratio = runs[EIGHT].counted / runs[HALF].counted
    claim("8 bits: bytes sent / float16's", 0.5, ratio, atol=0.1, question=2, varies=True)
    for name, itemsize in ((FULL, 4), (BFLOAT, 2), (EIGHT, 1), (EIGHT_GATHERED, 1)):
        ratio = runs[name].crossed / runs[name].crossing
        message = itemsize * P / (2 * WORLD_SIZE)  # each has a last packet that is not full
        slack = 0.07 + 200 / message
        claim(f"{name}: bytes on the cable / predicted", 1.07, ratio, atol=slack, varies=True)
    judge = partial(claim, kind="simulated", timed=True)  # by the cable, whose rate is set
    for name, run in ((FULL, full), (BFLOAT, half)):
        judge(f"{name}: slow step / predicted", 1, run.slow / run.expected, atol=0.3)
    judge("slow step: float32 / bfloat16", 2, full.slow / half.slow, atol=0.5, question=5)
    judge("slow step: float32 / PowerSGD 1, at least", 3, full.slow / low.slow, ">=")
    for name in (TOP, LOW, DILOCO):
        ahead = runs[name].soon - full.soon
        judge(f"{name}: accuracy ahead in equal time", 0.1, ahead, ">=")


def print_table(runs: dict[str, Run], slow: bool) -> None:
    print0(
        "\n  Per step: bytes handed in, bytes sent (computed), ms; accuracy after all. Across the"
    )
    print0("  cable: bytes counted, ms predicted and measured, accuracy after equal time")
    heads = f"{'':26}{'handed':>8}{'sent':>9}{'ms':>6}{f'{STEPS} steps':>9}"
    if slow:
        heads += f"{'counted':>9}{'ms':>7}{'ms':>7}{EVERY * runs[FULL].slow:8.1f} s"
    print0(heads)
    for name, run in runs.items():
        columns = f"{run.handed:8,.0f}{run.sent:9,.0f}{run.best * 1e3:6.1f}{run.curve[-1]:9.1%}"
        if slow:
            columns += f"{run.crossed:9,.0f}{run.expected * 1e3:7.1f}{run.slow * 1e3:7.1f}"
            columns += f"{run.soon:10.1%}"
        print0(f"  {name:24}{columns}")
    print0()


# %% [markdown]
# ## 7. Larger models
#
# The larger a matrix, the more a low rank saves: m k / r(m + k). The paper's ResNet-18 for
# CIFAR-10, 11 million parameters, sends 243, 136 and 72 times fewer bytes at rank 1, 2 and 4. Here
# are its shapes, with random gradients: what is sent depends on nothing else.


# %%
def resnet18() -> list[tuple[int, ...]]:
    """Shapes of all parameters: convolutions, each with a batch norm's two, and the last layer."""
    convolutions = [(64, 3, 3, 3)]
    for before, width in ((64, 64), (64, 128), (128, 256), (256, 512)):  # two blocks each
        convolutions.append((width, before, 3, 3))
        convolutions += 3 * [(width, width, 3, 3)]
        if before != width:
            convolutions.append((width, before, 1, 1))  # the shortcut
    norms = 2 * [shape[:1] for shape in convolutions]
    return [*convolutions, *norms, (10, 512), (10,)]


def check_published(device: torch.device) -> None:
    shapes = resnet18()
    x = torch.randn(sum(math.prod(shape) for shape in shapes), device=device)
    for r, published in ((1, 243), (2, 136), (4, 72)):
        with CountedCommunication() as counted:
            PowerSGD(r, shapes)(x)
        fewer = x.nbytes / sum(call.nbytes for call in counted.calls("all_reduce"))
        claim(f"ResNet-18, PowerSGD {r}: times fewer bytes", published, fewer, atol=0.5)


# %% [markdown]
# On GPUs the question is whether compressing costs less than it saves: over NVLink an all-reduce of
# 100 million float32 gradients takes some 1.5 to 2 ms (700 MB per GPU at 370 to 480 GB/s), and
# sorting, rounding and orthogonalising have to be cheaper than that. It depends on the link, so it
# is told and not judged.


# %%
def measure_on_gpus(device: torch.device) -> None:
    if device.type == "cpu":
        blocked("ms to compress and send 100 million gradients", needs="2 GPUs")
        return
    shapes = 24 * [(2048, 2048)]
    x = torch.randn(sum(math.prod(shape) for shape in shapes), device=device)
    compressors = {
        FULL: cast_to(torch.float32),
        BFLOAT: cast_to(torch.bfloat16),
        EIGHT: eight_bits,
        TOP: top_k,
        "PowerSGD 4": PowerSGD(4, shapes),
    }
    for name, compress in compressors.items():
        ms = median_ms(lambda compress=compress: compress(x))
        print0(f"{'':13}{name}: {ms:.2f} ms for {x.nbytes / 1e6:.0f} MB of gradients")


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
# 1. As many. With 4 ranks, 8 bits that are gathered cost what 16 bits cost that are added up on the
#    way; with 8 ranks they cost what 32 do, and with 64 four times that. The ratio is n/4, since an
#    all-gather of B bytes per rank sends (n-1) B, and an all-reduce 2(n-1)/n B, never 2 B.
# 2. Half, for any number of ranks. (With two ranks, both ways cost that.) The second rounding shows
#    in nothing that was learned. But look at the cable: half of an all-to-all's pairs of ranks
#    cross it, which is n/4 times the bytes of x in each direction, where a ring crosses it once. So
#    over several nodes it is done twice, inside the nodes first and then across them, as ZeRO++
#    does: that is the hierarchy of the lesson before.
# 3. Nine tenths. After 60 steps the accuracy is about 60%, where all others reach 90%.
# 4. None but for rounding: what has not arrived is kept. With 680 bytes per step in place of
#    340,008 the accuracy is nearly float32's.
# 5. Twice. The cable is the limit, so the time goes with the bytes: 0.2 s for float32, half of it
#    for bfloat16, and 10 to 20 ms for PowerSGD 1, most of which is latency and compute. In the time
#    in which float32 makes 5 steps, top-k has learned nearly all it will.
#
# On the fast link PowerSGD only costs time: compare the columns of ms. Compression is a remedy for
# a slow link, and a burden on a fast one. Whether a step gains depends on the bytes per second of
# *your* link; fundamentals/04_latency_and_bandwidth.py measures them.
#
# **Try.** Without feedback, top-k and PowerSGD lose what they do not send, and the accuracy goes
# with it. Rounding to the nearest trains this small model as well as random rounding, but it is
# wrong on average: a gradient below half a step is never sent, however often it comes. Only the
# claim on the mean of many roundings sees that.
#
# On real systems: at a thousand ranks top-k's messages name a thousand different sets of places, so
# what is gathered grows with n; that is why it is rare. PowerSGD is a hook in DDP; DeepSpeed's
# ZeRO++ gathers weights in 8 bits and sums gradients in 4; DiLoCo trains across data centers. All
# but plain casting change a little what is learned: compare final losses, and not only the seconds
# per step.


# %%
def main() -> None:
    command_line()
    launch(range(1, 65))
    if WORLD_SIZE > 64:
        refuse(f"needs 64 ranks or fewer, got {WORLD_SIZE}, to share 96 samples; use fewer")
    torch.optim.SGD([torch.zeros(1)])  # loads for a second; all who are forked have it then
    across = RANK == 0 and WORLD_SIZE > 1
    if across:
        read_digits()  # likewise
    link, why_not = start_ranks(WORLD_SIZE, MBIT, train_when_told) if across else ([], "")
    device = setup()  # after the forks: it starts threads
    runs = train(device, STEPS, STEPS)
    check_runs(runs)
    check_rounding(device)
    slow = train_across(link, why_not, runs) if WORLD_SIZE > 1 else False
    print_table(runs, slow)
    if slow:
        check_slow_link(runs)
    else:
        needs = "2 ranks" if WORLD_SIZE == 1 else "root or user namespaces"
        blocked("what it buys on a slow link", needs=needs)
    check_published(device)
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
