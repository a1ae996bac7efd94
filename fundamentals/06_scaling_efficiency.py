"""Scaling efficiency: speed-up, Amdahl's and Gustafson's laws, and the batch size
===============================================================================

**Question.** Training on n ranks should be n times as fast. How much of that arrives, what takes
the rest, and can you tell from a few ranks how fast many will be?

**Predict**, and write it down before you run:

1. A step takes 200 ms on one rank: 160 ms for its 240 samples, 40 ms for the optimizer, which
   every rank runs, whatever the number of ranks. The 240 samples are now shared among 4 ranks. How
   many times as fast is the step? How fast can it become on any number of ranks?
2. Now each of 4 ranks gets 240 samples of its own. How many times as many samples per second are
   that, compared with one rank that computes the same 960 samples per step?
3. The ranks also add up their gradients, and nothing overlaps. If an all-reduce by itself takes
   100 ms, and a step without it too, what share of a step is lost?
4. The ranks multiply real matrices on the cores of this machine, and there are more ranks than
   cores. How large is their speed-up: nearly the number of cores, or of ranks?
5. A step may use the same samples in micro-batches of 24 once, of 12 twice, or of 6 four times per
   rank. How far apart are the weights in the end: nothing, rounding errors, or more?
6. A network learns well from batches of 20 samples with learning rate 0.01. It now gets batches of
   160 and equally many epochs. Is its loss much worse with learning rate 0.01? And with 0.08? Does
   the same rule hold for batches of 640 with 0.32, if a warm-up leads there?

**Run.**

    torchrun --standalone --nproc-per-node=4 06_scaling_efficiency.py  # NCCL on 4 GPUs, else gloo
    python 06_scaling_efficiency.py                                    # the same, started for you
    python 06_scaling_efficiency.py --model net.py:build --data FOLDER # your own model and images

Not run on several GPUs.

**Try.** Let the time for communication grow with the number of ranks: add
`time.sleep(0.01 * dist.get_world_size(group))` below the all-reduce in `train_step`. Which rows
fail? Undo it, and drop the division by `accumulation` in `train_in_pieces`: what fails now?

**Before.** parallelism/01_data_parallelism_ddp.py: gradients averaged over ranks.

**Next.** exercises/18_scaling_curve; then 07_training_that_survives.py: many ranks fail often. How
to hide the communication that is counted in full here: communication/06_overlap.py.
"""

import argparse
import ctypes
import importlib.util
import json
import logging
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import ChainMap, Counter
from collections.abc import Callable
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

# A *rank* is one of WORLD_SIZE processes that run this same file. `claim(text, predicted,
# measured)` prints one row of the ledger and must be called by every rank. It, `setup`, `print0`,
# `blocked` and `finish` stand at this file's end, the same in every lesson; you need not read them.
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

BATCH = 240  # samples per step; divisible by 1 to 6, 8, 10, 12, 15, 16
COMPUTE = 0.160  # seconds that one rank sleeps for BATCH samples, in place of forward and backward
UPDATE = 0.040  # seconds that every rank sleeps in place of the optimizer
ROUNDS = 5  # every number of ranks is measured so often, in turn
WIDTH = 4096  # of the layers that are trained on GPUs
EPOCHS, SAMPLES = 8, 1280  # of section 6
Times = dict[int, float]  # {number of ranks: seconds per step}

# %% [markdown]
# ## 1. One step of training, and what of it can be shared
#
# Data parallelism divides the samples of a step among n ranks. Not all of the step divides:
#
#     one rank       | forward and backward, 240 samples                   | update |
#
#     4 ranks        | 60 samples | all-reduce | update |
#                    | 60 samples | all-reduce | update |
#                    | 60 samples | all-reduce | update |
#                    | 60 samples | all-reduce | update |
#
#                      divided by n  grows with n   stays
#
# The **speed-up** S(n) = T(1) / T(n) says how many times as fast the n ranks are, in samples per
# second. The **efficiency** S(n) / n is the share of the n GPUs that you pay for and get.
#
# Four ranks on the cores of a laptop disturb each other. So on a CPU a *sleep* stands for forward
# and backward, and another for the update: a rank that sleeps needs no core, just as a rank whose
# GPU computes needs none. The all-reduce is real. On GPUs all of it is real, and so it is with a
# model of your own.


# %%
def train_step(work: "StandIn | RealModel", samples: int, group: dist.ProcessGroup | None) -> None:
    """One step on this rank's share of the samples; no group means that it trains alone."""
    work.forward_backward(samples)
    if group is not None:
        dist.all_reduce(work.gradient, group=group)
    work.update()


class StandIn:
    """A device that is not here: it sleeps as long as it would compute."""

    batch = BATCH

    def __init__(self, gradient_bytes: int = 100_000) -> None:
        self.gradient = torch.zeros(gradient_bytes // 4)

    def forward_backward(self, samples: int) -> None:
        time.sleep(COMPUTE * samples / BATCH)

    def update(self) -> None:
        time.sleep(UPDATE)


# %% [markdown]
# ## 2. Strong scaling and Amdahl's law: the same batch on more ranks
#
# In **strong scaling** the work of a step stays and the ranks share it: you want the same training,
# sooner. The part a that every rank does in full does not shrink, the part b that is divided does:
#
#     T(n) = a + b/n          S(n) = T(1) / T(n) = 1 / (s + (1 - s)/n)      with s = a / (a + b)
#
# This is Amdahl's law (1967). The **serial share** s is all that it needs to know, and 1/s is the
# speed-up that no number of ranks exceeds. If a fifth of a step cannot be divided, a thousand ranks
# are not five times as fast as one.
#
# Measured times give a and b by least squares: T is a straight line in 1/n. Then the law can be put
# to the test. Fit it to the small numbers of ranks, and let it predict the largest, which the fit
# has not seen.


# %%
def fit_amdahl(times: Times) -> tuple[float, float]:
    """Return a and b, in seconds, of the line T(n) = a + b/n that fits best."""
    shares = [1 / n for n in times]
    line = statistics.linear_regression(shares, list(times.values()))
    return line.intercept, line.slope


def amdahl(n: int, serial_share: float) -> float:
    """The speed-up of n ranks that share one rank's work."""
    return 1 / (serial_share + (1 - serial_share) / n)


# %% [markdown]
# ## 3. Weak scaling and Gustafson's law: more samples for more ranks
#
# In **weak scaling** every rank keeps its batch, and the batch of all grows with n: you want more
# samples per second, and use them for a larger batch. A step then takes as long as on one rank, if
# communication is left aside. One rank alone would need a + n b for all those samples, so
#
#     S(n) = (a + n b) / (a + b) = s + (1 - s) n
#
# This is Gustafson's law (1988). The same serial share that stops Amdahl's curve at 1/s takes a
# constant share here: with s = 0.2 the efficiency stays above 0.8 for any n. Nothing was won by
# magic: the batch grew. Section 6 asks what a batch of that size is worth.


# %%
def gustafson(n: int, serial_share: float) -> float:
    """The speed-up of n ranks that each do as much as one did, over one rank that does it all."""
    return serial_share + (1 - serial_share) * n


# %% [markdown]
# ## 4. The share of communication, and what two cores can show
#
# Both laws leave out the all-reduce. It divides by nothing: a ring hands 2 (n-1)/n times the
# gradients through every rank's link, so its time grows with n and tends to a constant, while
# compute shrinks as 1/n. Where nothing overlaps, the share of a step that is lost to it is
#
#     t / (t + T)       t: an all-reduce alone,  T: the step of a rank that trains alone
#
# Two ways to measure one thing: the all-reduce by itself, and the step with it and without it.
#
# Why the sleeps, then? Let the ranks multiply real matrices instead, with one thread each. As soon
# as there are more ranks than cores, they take turns, and the speed-up stops at the number of
# cores. No law about training is in that. It is the same on a node whose loader processes have to
# share too few cores, and there it is your problem.


# %%
def multiply(matrix: torch.Tensor) -> None:
    """Some milliseconds of arithmetic on one core."""
    for _ in range(4):
        matrix @ matrix


# %% [markdown]
# ## 5. The effective batch: micro-batch times accumulation times ranks
#
# The optimizer sees one gradient per step: the mean over the **effective batch**,
#
#     effective batch = samples per micro-batch x micro-batches per step x ranks
#
# How the product is made up does not matter to it. Micro-batches that do not fit into memory at
# once are computed one after the other, and backward adds up their gradients. Ranks that are
# missing can be replaced by accumulation, at the price of time, and a run of 64 GPUs can be
# repeated exactly on 8.


# %%
def train_in_pieces(
    model: nn.Module, image_BD: torch.Tensor, label_B: torch.Tensor, accumulation: int
) -> None:
    """Some steps of SGD over this rank's samples of each batch, in so many micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for images, labels in zip(image_BD.split(24), label_B.split(24), strict=True):
        optimizer.zero_grad()
        pieces = zip(images.chunk(accumulation), labels.chunk(accumulation), strict=True)
        for image, label in pieces:
            (cross_entropy(model(image), label) / accumulation).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= WORLD_SIZE
        optimizer.step()


# %% [markdown]
# ## 6. Linear scaling and warm-up: what a larger batch is worth
#
# Equally many epochs with batches k times as large are k times fewer steps. With the learning rate
# as it was, the weights come only 1/k of the way. The **linear scaling rule** multiplies the
# learning rate by k (Goyal et al., 2017): one large step then replaces k small ones,
#
#     k small steps     w - lr (g_1 + g_2 + ... + g_k)           each g_i where the step before led
#     one large step    w - lr k * mean(g_1, ..., g_k)           all g_i at w
#
# which is nearly the same as long as the gradients change little on the way. They change most in
# the first steps, so the learning rate is raised to its full value over the first epochs: a
# **warm-up**. And when the steps get so large that the gradients do change on the way, the rule
# breaks, with or without a warm-up. Where that happens depends on the model and the data. Goyal et
# al. reached batches of 8,192 images with ResNet-50, from 256, before it did.
#
# How large a batch is worth its samples can be estimated before: the **critical batch size** is
# about the noise of the gradient over its square, tr(covariance of one sample's gradient) / |mean
# gradient|^2 (McCandlish et al., 2018). Well below it twice the batch saves half of the steps; well
# above it, hardly any. It grows as the loss falls, which is why language models raise the batch
# during training. With Adam, which divides by the gradient's size, the learning rate is mostly
# scaled by the square root of k instead of k. So ranks are worth their price in data parallelism as
# long as the effective batch stays below the critical one.


# %%
def train_on_digits(
    digits: list[torch.Tensor], batch: int, learning_rate: float, warm_up: int, seed: int
) -> float:
    """Train with SGD, the learning rate raised over `warm_up` epochs; return the loss."""
    image_ND, label_N = digits
    model = net(seed)
    optimizer = torch.optim.SGD(model.parameters(), learning_rate, momentum=0.9)
    order = torch.Generator().manual_seed(seed)
    step = 0
    for _ in range(EPOCHS):
        chosen = torch.randperm(len(label_N), generator=order)[:SAMPLES]
        for index_B in chosen.split(batch):
            step += 1
            done = step / (warm_up * SAMPLES / batch) if warm_up else 1
            optimizer.param_groups[0]["lr"] = learning_rate * min(1, done)
            optimizer.zero_grad()
            cross_entropy(model(image_ND[index_B]), label_N[index_B]).backward()
            optimizer.step()
    with torch.no_grad():
        return cross_entropy(model(image_ND), label_N).item()


# %% [markdown]
# ## 7. GPU utilization, and why it misleads
#
# `nvidia-smi` and most dashboards show a **utilization** in percent. It is the share of time in
# which *at least one* kernel ran, however small: one thread that spins on one of 132
# multiprocessors counts as much as a matrix product that fills them all. A GPU that waits in an
# NCCL all-reduce for a slower rank is at 100%, since that wait is a kernel that spins. So a job
# that scales badly looks busy. What tells you more: samples per second against one GPU (this
# lesson), FLOP/s against the peak (MFU), or DCGM's `SM_ACTIVE` and `DRAM_ACTIVE`.


# %%
def check_utilization(work: "StandIn | RealModel", device: torch.device) -> None:
    """Keep a GPU at 100% without any arithmetic."""
    text = "utilization in percent, by one thread that spins"
    if device.type == "cpu":
        blocked(text, needs="1 GPU")
        return
    try:
        torch.cuda.utilization(device)
    except (ImportError, RuntimeError) as error:
        blocked(text, needs=f"1 GPU that NVML can see, and nvidia-ml-py ({error})")
        return
    show_utilization(work, device)
    shown = []
    for _ in range(10):
        torch.cuda._sleep(10**9)  # cycles of one thread: about half a second
        time.sleep(0.4)  # NVML looks a few times per second, and tells of the last look
        shown.append(torch.cuda.utilization(device))
        torch.cuda.synchronize()
    claim(text, 90, statistics.median(shown[2:]), ">=", timed=True)


def show_utilization(work: "RealModel", device: torch.device) -> None:
    """Print what NVML says while all ranks train, next to the samples per second."""
    shown = []
    steps = 20
    dist.barrier()
    wait_for(device)
    start = time.perf_counter()
    for _ in range(steps):
        train_step(work, work.batch, dist.group.WORLD)
        shown.append(torch.cuda.utilization(device))
    wait_for(device)
    rate = steps * WORLD_SIZE * work.batch / (time.perf_counter() - start)
    median = statistics.median(shown)
    print0(f"{'':13}while training: {median:.0f}% utilization, {rate:,.0f} samples/s")


# %% [markdown]
# ## 8. How it is measured
#
# All ranks are there from the start. Some of them work while the others wait at a barrier, which
# takes no core. So all numbers of ranks are measured in one run, in turn, five times, and the
# median of each is taken. Every measurement begins with a barrier and a synchronized device; a step
# ends when its last rank ends.


# %%
def seconds(
    runs: dict[str, dict[int, Callable[[], None]]], device: torch.device
) -> dict[str, Times]:
    """Time `runs[name][n]()` on the first n ranks, for all names and n in turn; return medians."""
    measured = {}
    for name, on_ranks in runs.items():
        for n in on_ranks:
            measured[name, n] = []
    for _ in range(ROUNDS):
        for name, n in measured:
            dist.barrier()
            wait_for(device)
            start = time.perf_counter()
            if n > RANK:
                runs[name][n]()
            wait_for(device)
            elapsed = time.perf_counter() - start
            measured[name, n].append(elapsed if n > RANK else 0.0)
    everyone = [measured] * WORLD_SIZE
    dist.all_gather_object(everyone, measured)
    times = {name: {} for name in runs}
    for name, n in measured:
        rounds = zip(*[theirs[name, n] for theirs in everyone], strict=True)
        times[name][n] = statistics.median(max(of_all_ranks) for of_all_ranks in rounds)
    return times


def wait_for(device: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def groups_of_ranks() -> dict[int, dist.ProcessGroup | None]:
    """The first n ranks, for every n that is measured; None for one rank, which talks to nobody."""
    sizes = [n for n in range(1, WORLD_SIZE + 1) if n <= 4 or n.bit_count() == 1 or n == WORLD_SIZE]
    groups = {n: dist.new_group(list(range(n))) for n in sizes}
    return groups | {1: None}


# %% [markdown]
# On GPUs a stack of linear layers in bfloat16 (float16 before Ampere) is trained with Adam, on
# 15,360 samples. The option `--model FILE:FUNCTION` takes a model of yours, which the function
# returns, and `--data FOLDER` takes images, in one folder per class. Gradients are views of one
# flat buffer, so that a single all-reduce adds them up.


# %%
class RealModel:
    """Any module with parameters of one dtype, updated by Adam."""

    def __init__(
        self, model: nn.Module, batch: int, input_ND: torch.Tensor, label_N: torch.Tensor
    ) -> None:
        self.model = model
        self.batch = batch
        self.input_ND = input_ND
        self.label_N = label_N
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(parameters, lr=1e-4)
        self.gradient = nn.utils.parameters_to_vector(parameters).detach().zero_()
        shares = self.gradient.split([p.numel() for p in parameters])
        for parameter, share in zip(parameters, shares, strict=True):
            parameter.grad = share.view_as(parameter)

    def forward_backward(self, samples: int) -> None:
        """In pieces of at most `batch` samples: one GPU cannot hold the work of all."""
        self.gradient.zero_()
        inputs = self.input_ND[:samples].split(self.batch)
        for piece, labels in zip(inputs, self.label_N[:samples].split(self.batch), strict=True):
            (cross_entropy(self.model(piece), labels) * (len(labels) / samples)).backward()

    def update(self) -> None:
        self.optimizer.step()


def work_of(options: argparse.Namespace, device: torch.device) -> StandIn | RealModel:
    """What the flags ask for; without flags, a sleep on CPUs and large layers on GPUs."""
    if options.model:
        input_ND, label_N = read_images(options.data) if options.data else read_digits()
        often = math.ceil(BATCH * WORLD_SIZE / len(label_N))  # a small set, several times over
        inputs = torch.cat([input_ND.float()] * often).to(device)
        labels = torch.cat([label_N] * often).to(device)
        return RealModel(module_from(options.model).to(device), BATCH, inputs, labels)
    if device.type == "cpu":
        return StandIn()
    dtype = torch.bfloat16 if torch.cuda.is_bf16_supported(False) else torch.float16
    layers = [nn.Linear(WIDTH, WIDTH, device=device, dtype=dtype) for _ in range(8)]
    batch = 64 * BATCH
    inputs = torch.randn(batch * WORLD_SIZE, WIDTH, device=device, dtype=dtype)
    labels = torch.zeros(batch * WORLD_SIZE, device=device, dtype=torch.long)
    return RealModel(nn.Sequential(*layers), batch, inputs, labels)


def module_from(place: str) -> nn.Module:
    """Call the function that FILE:FUNCTION names; it returns the module."""
    file, _, function = place.partition(":")
    spec = importlib.util.spec_from_file_location("model_of_the_learner", file)
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    build = getattr(theirs, function)
    return build()


def read_images(folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The images of FOLDER/CLASS/*, 64 x 64 pixels, (N, 3, 64, 64), and their labels."""
    from torchvision import datasets, transforms

    shape = transforms.Compose([transforms.Resize((64, 64)), transforms.ToTensor()])
    images = datasets.ImageFolder(folder, shape)
    some = [images[i] for i in range(min(len(images), BATCH * WORLD_SIZE))]
    return torch.stack([image for image, _ in some]), torch.tensor([label for _, label in some])


def read_digits() -> list[torch.Tensor]:
    """The 1,797 handwritten digits of scikit-learn: 64 pixels each, and their labels."""
    read = [None, None]
    if RANK == 0:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        read = [torch.tensor(pixels / 8 - 0.6), torch.tensor(labels)]
    dist.broadcast_object_list(read)
    return read


def net(seed: int) -> nn.Module:
    """Three linear layers in float64."""
    torch.manual_seed(seed)
    layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(*layers).double()


# %% [markdown]
# The claims on both laws. With the stand-in the serial share is known, 40 of 200 ms, and both laws
# predict a number. On real devices nobody knows it, and the fit to fewer ranks has to find it. A
# law may be off by a third of what it corrects, that is, of its distance from perfect scaling.


# %%
def measure_scaling(work: StandIn | RealModel, device: torch.device) -> dict[str, Times]:
    """Time strong and weak scaling, and the work of all ranks on one."""
    strong = {}
    weak = {}
    for n, group in groups_of_ranks().items():
        strong[n] = lambda n=n, group=group: train_step(work, round(work.batch / n), group)
        weak[n] = lambda group=group: train_step(work, work.batch, group)
    whole = {1: lambda: train_step(work, WORLD_SIZE * work.batch, None)}
    times = seconds({"strong": strong, "weak": weak, "all on one": whole}, device)
    show(work.batch, times["strong"], times["weak"])
    return times


def check_laws(times: dict[str, Times], known_share: float | None) -> None:
    """Claim what Amdahl's and Gustafson's laws predict for the largest number of ranks."""
    n = WORLD_SIZE
    share = known_share
    strong = times["strong"]
    judged = {"kind": "measured" if known_share is None else "simulated", "timed": True}
    from_fewer = "strong: speed-up of all ranks, from fewer"
    if n > 2:
        serial, divided = fit_amdahl({fewer: strong[fewer] for fewer in strong if fewer < n})
        fitted = serial / (serial + divided)
        law = amdahl(n, fitted)
        claim(from_fewer, law, strong[1] / strong[n], atol=(n - law) / 3, question=1, **judged)
        if known_share is None:
            share = fitted
        else:
            claim("serial share, as fitted", known_share, fitted, atol=known_share / 4, **judged)
    else:
        blocked(from_fewer, needs="3 ranks")
    if n == 1 or share is None:
        blocked("weak: speed-up of all ranks", needs="2 ranks" if share else "3 ranks")
        return
    if known_share is not None:
        law = amdahl(n, share)
        text = "strong: speed-up of all ranks"
        claim(text, law, strong[1] / strong[n], atol=(n - law) / 3, question=1, **judged)
    law = gustafson(n, share)
    speed_up = times["all on one"][1] / times["weak"][n]
    text = "weak: speed-up of all ranks"
    claim(text, law, speed_up, atol=(n - law) / 3, question=2, **judged)


def show(batch: int, strong: Times, weak: Times) -> None:
    """Print what every number of ranks delivers."""
    print0(f"{'':13}ranks   strong: samples/s  speed-up  efficiency   weak: samples/s  efficiency")
    for n in strong:
        speed_up = strong[1] / strong[n]
        row = f"{n:5} {batch / strong[n]:19,.0f} {speed_up:9.2f} {speed_up / n:11.2f}"
        print0(f"{'':13}{row} {n * batch / weak[n]:17,.0f} {weak[1] / weak[n]:11.2f}")


# %% [markdown]
# The claims on communication, with 40 MB of gradients, and on the cores.


# %%
def check_communication(work: StandIn | RealModel, device: torch.device) -> None:
    """Measure what an all-reduce costs by itself, and within a step."""
    text = "share of a step lost to the all-reduce"
    if WORLD_SIZE == 1:
        blocked(text, needs="2 ranks")
        return
    if isinstance(work, StandIn):
        work = StandIn(gradient_bytes=40_000_000)
    group = dist.group.WORLD
    runs = {
        "the all-reduce": lambda: dist.all_reduce(work.gradient),
        "a step without": lambda: train_step(work, work.batch, None),
        "a step with it": lambda: train_step(work, work.batch, group),
    }
    times = seconds({name: {WORLD_SIZE: run} for name, run in runs.items()}, device)
    alone, without, together = [times[name][WORLD_SIZE] for name in runs]
    share = alone / (alone + without)
    how = {"kind": "simulated" if isinstance(work, StandIn) else "measured", "timed": True}
    claim(text, share, 1 - without / together, atol=share / 3, question=3, **how)


def check_cores() -> None:
    """Let the ranks really compute, on the cores that are there."""
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        cores = len(os.sched_getaffinity(0))
    if cores >= WORLD_SIZE:
        text = "real arithmetic: speed-up, at most the cores"
        blocked(text, needs=f"more ranks than cores, of which there are {cores}")
        return
    matrix = torch.randn(512, 512)
    runs = {n: lambda: multiply(matrix) for n in (1, WORLD_SIZE)}
    times = seconds({"": runs}, torch.device("cpu"))[""]
    judge_cores(cores, WORLD_SIZE, WORLD_SIZE * times[1] / times[WORLD_SIZE])


def judge_cores(cores: int, n: int, speed_up: float) -> None:
    text = "real arithmetic: speed-up, at most the cores"
    slack = (n - cores) / 4  # n ranks on n cores would reach n
    claim(text, cores, speed_up, "<=", atol=slack, question=4, timed=True)
    if cores > 1:
        least = (1 + cores) / 2  # hyper-threads are half a core each
        claim("real arithmetic: speed-up, at least", least, speed_up, ">=", question=4, timed=True)


# %% [markdown]
# The claims on the effective batch, against one process that sees whole batches. All is float64,
# and the error may be what rounding allows: adding up B gradients in another order moves each of S
# steps by at most lr B eps.


# %%
def check_effective_batch(digits: list[torch.Tensor], device: torch.device) -> None:
    """Train with 1, 2 and 4 micro-batches per step; claim one result."""
    steps = 5
    image_ND, label_N = [tensor.to(device) for tensor in digits]
    index = torch.arange(steps * 24 * WORLD_SIZE) % len(label_N)
    mine = index.view(steps, WORLD_SIZE, 24)[:, RANK].flatten()
    alone = net(seed=0).to(device)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for batch in index.split(24 * WORLD_SIZE):
        optimizer.zero_grad()
        cross_entropy(alone(image_ND[batch]), label_N[batch]).backward()
        optimizer.step()
    expected = nn.utils.parameters_to_vector(alone.parameters())
    errors = []
    for accumulation in (1, 2, 4):
        model = net(seed=0).to(device)
        train_in_pieces(model, image_ND[mine], label_N[mine], accumulation)
        weights = nn.utils.parameters_to_vector(model.parameters())
        errors.append((weights - expected).abs().max())
    slack = steps * 0.1 * 24 * WORLD_SIZE * torch.finfo(torch.float64).eps
    text = "24 x 1, 12 x 2, 6 x 4 samples: error of weights"
    claim(text, 0, torch.stack(errors).max(), atol=slack, question=5)


# %% [markdown]
# The claims on learning rates. Each training runs with three seeds, and the ranks share these runs
# among them, whole ones: after section 5 it does not matter who computes a batch.


# %%
def check_learning_rates(digits: list[torch.Tensor]) -> None:
    """Train with small and large batches; claim where the linear scaling rule holds."""
    trainings = {  # (samples per batch, learning rate, epochs of warm-up)
        "small": (20, 0.01, 0),
        "8x, as before": (160, 0.01, 0),
        "8x, scaled": (160, 0.08, 0),
        "8x, scaled, warm-up": (160, 0.08, 2),
        "32x, scaled": (640, 0.32, 0),
        "32x, scaled, warm-up": (640, 0.32, 2),
    }
    jobs = list(product(trainings, range(3)))
    mine = {}
    for name, seed in jobs[RANK::WORLD_SIZE]:
        mine[name, seed] = train_on_digits(digits, *trainings[name], seed)
    everyone = [mine] * WORLD_SIZE
    dist.all_gather_object(everyone, mine)
    losses = dict(ChainMap(*everyone))
    median = {name: statistics.median(losses[name, s] for s in range(3)) for name in trainings}
    small = median["small"]
    print0(f"{'':13}loss after {EPOCHS} epochs with batches of 20, median: {small:.3f}")
    for name in trainings:
        if name != "small":
            holds = name.startswith("8x, scaled")
            bound, sign = (2, "<=") if holds else (4, ">=")
            text = f"loss / the small batch's: {name}"
            claim(text, bound, median[name] / small, sign, question=6, varies=True)


# %% [markdown]
# Published numbers can be read with the same model. PyTorch measured DDP on up to 16 V100s with 32
# images per GPU, weak scaling (pytorch/benchmarks/distributed/ddp/README.md, seconds per iteration,
# median). A line in (n-1)/n, the ring's factor, is fitted to 1 to 8 GPUs and predicts 16. That is
# somebody else's measurement, so it makes no claim here.


# %%
PUBLISHED = {  # on 1, 2, 4, 8 and 16 GPUs; without DDP first
    "ResNet-50": (0.097, [0.100, 0.103, 0.103, 0.104, 0.104]),
    "ResNet-101": (0.162, [0.171, 0.176, 0.176, 0.179, 0.179]),
    "ResNeXt-50": (0.145, [0.147, 0.153, 0.153, 0.157, 0.157]),
    "ResNeXt-101": (0.415, [0.425, 0.438, 0.439, 0.447, 0.450]),
}


def read_published() -> None:
    """Print the published times on 16 GPUs next to what 1 to 8 predict."""
    print0(f"{'':13}published: s per iteration on 16 GPUs, and what 1 to 8 predict; efficiency")
    ring = [(n - 1) / n for n in (1, 2, 4, 8)]
    for model, (without_ddp, times) in PUBLISHED.items():
        line = statistics.linear_regression(ring, times[:4])
        predicted = line.intercept + line.slope * 15 / 16
        row = f"{model:12} {times[4]:.3f} {predicted:.3f}   {without_ddp / times[4]:.2f}"
        print0(f"{'':13}{row}")


# %% [markdown]
# ## What you should have seen
#
# 1. The serial share is 40 of 200 ms, s = 0.2. Four ranks are 1 / (0.2 + 0.8/4) = 2.5 times as
#    fast, an efficiency of 0.63, and no number of ranks is more than five times as fast. The fit to
#    1, 2 and 3 ranks finds the share, a little more than 0.2 since the all-reduce looks serial to
#    it, and predicts the fourth.
# 2. Gustafson: 0.2 + 0.8 x 4 = 3.4. The same job, the same serial share, but the work grew: one
#    rank would take 40 + 640 ms for what four do in 200. Say which of the two scalings you mean
#    whenever you quote an efficiency: strong 0.63 and weak 0.85 are the same machine here. (Against
#    one rank with *one* rank's batch, as most papers put it, weak efficiency is T(1)/T(n), nearly
#    1.)
# 3. Half. What an all-reduce takes by itself is what the step gets longer by: nothing hides it.
#    Here it is 40 MB, which four ranks push through two cores next to a step of 200 ms. DDP starts
#    the all-reduce during backward, to hide most of it (communication/06_overlap.py).
# 4. Nearly the number of cores, and no more. There is the reason why this lesson sleeps: on two
#    cores, real arithmetic would show the number of cores, whatever the law. Hyper-threads are half
#    a core each, or less; and other jobs on the machine take their share of it.
# 5. Rounding errors, some 3e-17. So the effective batch is what you report, and a recipe for 64
#    GPUs can be run on 8 with accumulation of 8.
# 6. With 0.01 the loss stays some twenty times higher: an eighth of the steps, each as small as
#    before. With 0.08 it is within a factor of two, so the rule holds. With 32 times the batch it
#    breaks: two steps per epoch, each so large that the gradients change on the way. Warm-up does
#    not cure that. At 8x it changes little here, since this network of three layers has no fragile
#    first steps. Goyal et al. needed it for ResNet-50 at 8,192, and transformers need it with Adam.
#
# **Try.** A cost that grows with n is in neither law. The fit takes it for serial time and finds
# twice the share, and both speed-ups fall short of theirs. With more ranks, one more would make the
# step longer: curves of real jobs have a maximum (exercise 18). Without the division by
# `accumulation` the gradient is as many times too large, and the weights are off by far more than
# rounding.
#
# On GPUs the all-reduce is fast inside an NVLink domain. This lesson's is synchronous, so nothing
# overlaps it; DDP's runs on a stream of its own and does. Other serial time hides elsewhere: the
# loader, checkpoints, logging with `.item()`, an optimizer that every rank repeats (ZeRO divides
# it). At a thousand ranks strong scaling ends when a rank's share of the batch is too small to fill
# its GPU, which neither law knows, and weak scaling ends when the batch is too large to learn from.


# %%
def draw(times: dict[str, Times], path: str) -> None:
    """Save the scaling curves as PNG."""
    from matplotlib.figure import Figure

    figure = Figure((9, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    strong = times["strong"]
    weak = times["weak"]
    sizes = range(1, max(strong) + 1)
    left.plot(sizes, sizes, "k:", label="ideal")
    if len(strong) > 2:
        serial, divided = fit_amdahl({n: strong[n] for n in strong if n < max(strong)})
        share = serial / (serial + divided)
        curve = [amdahl(n, share) for n in sizes]
        left.plot(sizes, curve, label=f"Amdahl, from fewer: s = {share:.2f}")
    left.plot(list(strong), [strong[1] / strong[n] for n in strong], "o", label="measured")
    left.set(title="Strong scaling: the same batch", xlabel="ranks", ylabel="speed-up")
    right.axhline(1, color="k", linestyle=":", label="ideal")
    right.plot(list(weak), [weak[1] / weak[n] for n in weak], "o-", label="weak: T(1) / T(n)")
    strong_efficiency = [strong[1] / strong[n] / n for n in strong]
    right.plot(list(strong), strong_efficiency, "s-", label="strong: T(1) / (n T(n))")
    right.set(title="Efficiency", xlabel="ranks", ylim=(0, 1.1))
    for axes in (left, right):
        axes.set_xticks(list(strong))
        axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    model = {"metavar": "FILE:FUNCTION", "help": "scale this model: the function returns it"}
    data = {"metavar": "FOLDER", "help": "with --model: images, 64 x 64, in a folder per class"}
    figure = {"metavar": "PATH", "help": "save the scaling curves as PNG"}
    options = command_line({"--model": model, "--data": data, "--figure": figure})
    launch()
    if options.data and not options.model:
        refuse("--data goes with --model FILE:FUNCTION, a model that takes such images")
    device = setup()
    torch.set_num_threads(1)  # ranks share the cores
    work = work_of(options, device)
    times = measure_scaling(work, device)
    stand_in = isinstance(work, StandIn)
    check_laws(times, known_share=UPDATE / (UPDATE + COMPUTE) if stand_in else None)
    check_communication(work, device)
    check_cores()
    digits = read_digits()
    check_effective_batch(digits, device)
    check_learning_rates(digits)
    check_utilization(work, device)
    read_published()
    if options.figure and RANK == 0:
        draw(times, options.figure)
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
