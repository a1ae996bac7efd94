"""Three slow trainings: find each one's bottleneck, and fix it.

Task: exercises/26_three_slow_trainings/README.md.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

Pair = tuple[Tensor, Tensor]
RATE = 0.1


def step_together(model: nn.Module, x_BD: Tensor, y_BC: Tensor) -> None:
    """One step of data-parallel SGD, as it should be: all gradients in one all-reduce.

    x_BD, y_BC: this rank's batch; all ranks' have the same size. The loss is the mean square.
    """
    model.zero_grad()
    (model(x_BD) - y_BC).square().mean().backward()
    parameters = list(model.parameters())
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    gradients = flat.split([parameter.numel() for parameter in parameters])
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.data -= RATE * gradient.view_as(parameter)


def training_1(model: nn.Module, samples: Sequence[Pair], steps: int, batch: int) -> None:
    """Each step takes the next `batch` samples; every rank computes an equal share of them.

    samples: samples[i] is the pair (x, y), of (D,) and (C,); to read one takes long
    batch: over all ranks, a multiple of their number

    On 2 ranks with batches of 4, the first step takes samples 0 to 3, two of them on each rank.
    A step reads each of its samples once, on one rank, and no other step's. Train with
    `step_together`.
    """
    # --- yours
    share = batch // dist.get_world_size()
    for step in range(steps):
        first = step * batch + dist.get_rank() * share
        pairs = [samples[i] for i in range(first, first + share)]
        x_BD = torch.stack([x for x, _ in pairs])
        y_BC = torch.stack([y for _, y in pairs])
        step_together(model, x_BD, y_BC)
    # --- end


def training_2(model: nn.Module, batches: list[Pair]) -> list[float]:
    """SGD on each rank's own batches; the loss of each step, mean over all ranks, on every rank.

    batches: this rank's (x, y), of (B, D) and (B, C); B and their number are the same on all ranks

    A step makes one all_reduce, as `step_together` does. It carries one element more than the
    model's parameters have: the gradients, and the loss. Nothing besides.
    """
    # --- yours
    parameters = list(model.parameters())
    losses = []
    for x_BD, y_BC in batches:
        model.zero_grad()
        loss = (model(x_BD) - y_BC).square().mean()
        loss.backward()
        gradients = [parameter.grad.flatten() for parameter in parameters]
        flat = torch.cat([*gradients, loss.detach().reshape(1)])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        losses.append(flat[-1].item())
        gradients = flat[:-1].split([parameter.numel() for parameter in parameters])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.data -= RATE * gradient.view_as(parameter)
    return losses
    # --- end


def training_3(model: nn.Module, batches: list[Pair], validation: Pair) -> list[int]:
    """SGD on each rank's own batches; after each step, how many validation samples are right.

    batches: as in training 2
    validation: (x, labels), of (V, D) and (V,), the same on all ranks; V is any number, also 0

    A sample is right if the model's largest output is at its label. Returned, on every rank: how
    many of the V are, after each step. Train with `step_together`. For the validation a rank puts
    V / n samples into the model at most, rounded up, and joins one all_reduce of one int64.
    The model has no dropout and no batch norm, so its mode is all the same; in the end it is what
    it was.
    """
    # --- yours
    rank = dist.get_rank()
    x_VD, labels_V = (whole.tensor_split(dist.get_world_size())[rank] for whole in validation)
    right = []
    for x_BD, y_BC in batches:
        step_together(model, x_BD, y_BC)
        with torch.no_grad():
            hits = (model(x_VD).argmax(1) == labels_V).sum()
        dist.all_reduce(hits)
        right.append(hits.item())
    return right
    # --- end
