"""Step time of data parallelism: by hand, in our own buckets, by DistributedDataParallel.

Two gloo ranks, one thread each; 80 layers of 512 x 512, which is 21 million parameters; a whole
step: zero_grad, forward, backward, SGD, with a barrier on both sides of the clock. The ways take
turns step by step, in a new order each round; a repeat is the median of its rounds, and the slower
rank counts.
"""

import random
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course.playing import load
from course.ranks import run

WIDTH, DEPTH, BATCH, ROUNDS = 512, 80, 8, 5
MIB = 2**20 / 1e6  # DistributedDataParallel's MB are MiB
SETTING = f"2 gloo ranks, {DEPTH} x Linear({WIDTH}, {WIDTH}), batch {BATCH}, bucket 25 MiB"


def net() -> nn.Sequential:
    pairs = ((nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(DEPTH))
    return nn.Sequential(*(layer for pair in pairs for layer in pair))


def step_times(repeats: int) -> dict[str, list[float]]:
    """Seconds a step, by way and repeat, on this rank."""
    by_hand = load("parallelism/01_data_parallelism_ddp.py")
    buckets = load("parallelism/04_buckets_and_overlap.py")
    ways = {
        "by hand": net(),
        "own": buckets.BucketedDDP(net(), 25 * MIB),
        "torch": DistributedDataParallel(net()),
        "torch, views": DistributedDataParallel(
            net(), bucket_cap_mb=25, gradient_as_bucket_view=True
        ),
    }
    by_hand.broadcast_weights(ways["by hand"])
    sgd = {way: torch.optim.SGD(model.parameters(), lr=1e-3) for way, model in ways.items()}
    x_BD, shuffle = torch.randn(BATCH, WIDTH), random.Random(0).shuffle

    def step(way: str) -> float:
        dist.barrier()
        start = time.perf_counter()
        sgd[way].zero_grad()
        ways[way](x_BD).square().mean().backward()
        if way == "by hand":
            by_hand.average_gradients(ways[way])
        sgd[way].step()
        dist.barrier()
        return time.perf_counter() - start

    times: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(-1, repeats):  # the first warms up: DistributedDataParallel makes buckets
        rounds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(ROUNDS):
            order = list(ways)
            shuffle(order)  # with the same seed on every rank
            for way in order:
                rounds[way].append(step(way))
        for way in ways if repeat >= 0 else ():
            times[way].append(statistics.median(rounds[way]))
    return times


def measure(repeats: int) -> dict[str, list[float]]:
    ranks = run(step_times, 2, repeats, deadline=60 + 20 * repeats)
    return {way: [max(t) for t in zip(*(r[way] for r in ranks), strict=True)] for way in ranks[0]}


def ratios(repeats: int) -> list[dict]:
    """Our step time against the peers', with the ratio aimed at."""
    times = measure(repeats)
    aims = {
        "torch": ("own DDP / DistributedDataParallel, default", 0.95),
        "torch, views": ("own DDP / DistributedDataParallel, gradient_as_bucket_view", 1.10),
        "by hand": ("own DDP / all-reduce by hand", 1.0),
    }
    return [
        {"name": name, "ours": times["own"], "peer": times[peer], "aim": aim, "setting": SETTING}
        for peer, (name, aim) in aims.items()
    ]
