"""Gradient accumulation with no_sync. Task: exercises/06_gradient_accumulation/README.md."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel


def train_epoch(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    micro_batches: list[tuple[torch.Tensor, torch.Tensor]],
    k: int,
) -> None:
    """Train on all micro-batches, in order; step after every k of them, and after what is left.

    loss_fn(output, target) is the mean over the samples of one micro-batch.
    micro_batches: this rank's pairs (input, target), each of one sample or more. All ranks hold
    equally many micro-batches and, in each group of k, equally many samples, though otherwise cut.

    Each step goes along the gradient of the mean loss over all samples in the group, on all ranks:
    one process with one large batch would make the same step. Seven micro-batches with k = 3 make
    groups of 3, 3 and 1. In a group of sizes 1, 4 and 2, their mean losses count 1/7, 4/7, 2/7.
    What lies in .grad before the first group does not count; the list stays as it is.

    One all-reduce of the P gradients per step, not per micro-batch; and one micro-batch's
    activations at a time: each goes forward and backward before the next.
    """
    # --- yours
    for start in range(0, len(micro_batches), k):
        group = micro_batches[start : start + k]
        samples = sum(len(x) for x, _ in group)
        optimizer.zero_grad()
        for i, (x, y) in enumerate(group, 1):
            with model.no_sync() if i < len(group) else nullcontext():
                loss = loss_fn(model(x), y)
                (loss * len(x) / samples).backward()
        optimizer.step()
    # --- end
