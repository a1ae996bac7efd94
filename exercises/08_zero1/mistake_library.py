"""The library's optimizer."""

from torch.distributed.optim import ZeroRedundancyOptimizer


def partition(sizes, n):
    owners = [0] * len(sizes)
    held = [0] * n
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = held.index(min(held))
        held[owners[i]] += sizes[i]
    return owners


def ZeRO1(params, optimizer_class, **defaults):
    return ZeroRedundancyOptimizer(params, optimizer_class, **defaults)
