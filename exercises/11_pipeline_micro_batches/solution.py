"""A pipeline of stages, fed with micro-batches. Read README.md beside this file first."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

Action = tuple[str, int]  # ("F" or "B", k): forward or backward pass of micro-batch k
ONWARD = {"F": 1, "B": -1}  # from which rank to which what it makes is sent


def exchange(*messages: tuple[Callable, Tensor, int]) -> None:
    """Start all messages together, (dist.isend or dist.irecv, tensor, peer), wait for all of them.

    One by one, on NCCL, a send may wait for a receive that its peer would post after its own send.
    """
    posts = [dist.P2POp(*message) for message in messages]
    for handle in dist.batch_isend_irecv(posts) if posts else []:
        handle.wait()


def one_f_one_b(stage: int, p: int, m: int) -> list[Action]:
    """The order in which a stage of p works on m micro-batches (Narayanan et al., 2019).

    It runs p - 1 - stage forwards ahead (m if there are fewer), then alternates a forward and a
    backward, and ends with the backwards that are left.

    one_f_one_b(0, 2, 3): F0 F1 B0 F2 B1 B2, as ("F", 0), ("F", 1), ...;
    one_f_one_b(1, 2, 3): F0 B0 F1 B1 F2 B2.
    """
    # --- yours
    num_warmup = min(p - 1 - stage, m)
    order = [("F", k) for k in range(num_warmup)]
    for k in range(m - num_warmup):
        order += [("F", num_warmup + k), ("B", k)]
    return order + [("B", k) for k in range(m - num_warmup, m)]
    # --- end


def pipeline_step(stage: nn.Module, inputs: Sequence[Tensor], loss_of: Callable) -> Tensor | None:
    """One step of the model whose layers the ranks share: rank r has stage r, and runs no other.

    stage: maps a micro-batch of rows to a tensor with as many rows, of the dtype of its input.
    inputs: on rank 0 the micro-batches, of unlike numbers of rows. Elsewhere tensors on the meta
    device, with shape and dtype of what will arrive, and no memory:
    `torch.empty_like(inputs[k], device="cpu")` makes room for the k-th.
    loss_of(y, k): on the last rank, the *mean* loss of micro-batch k's rows, from its output y.

    Leaves in every parameter of `stage` the gradient of the mean loss of all rows, as one process
    finds it from the whole batch. Returns this loss on the last rank, None elsewhere.

    On 2 ranks with 3 micro-batches of 2, 2 and 1 rows, the losses weigh 2/5, 2/5 and 1/5, and
    rank 0 sends F0's output, then F1's, before it waits for the gradient with which B0 begins.

    A stage works in the order of `one_f_one_b`: on rank r at most p - r micro-batches are alive,
    and it idles 3 (p - 1) slots, where a forward takes one and a backward two. Each micro-batch's
    activation crosses each cut once, its gradient once back; nothing else is sent.
    """
    # --- yours
    rank = dist.get_rank()
    p = dist.get_world_size()
    rows = sum(map(len, inputs))
    held = {}
    loss = 0.0
    leaving = None
    for done, todo in pairwise([None, *one_f_one_b(rank, p, len(inputs)), None]):
        messages = []
        if done and 0 <= (to := rank + ONWARD[done[0]]) < p:
            messages.append((dist.isend, leaving, to))
        if todo and 0 <= (source := rank - ONWARD[todo[0]]) < p:
            like = inputs[todo[1]] if todo[0] == "F" else held[todo[1]][1]
            arrived = torch.empty_like(like, device="cpu")
            messages.append((dist.irecv, arrived, source))
        exchange(*messages)
        kind, k = todo or (None, None)
        if kind == "F":
            x = inputs[k] if rank == 0 else arrived.requires_grad_()
            y = stage(x)
            if rank == p - 1:
                y = loss_of(y, k) * len(x) / rows
                loss += y.detach()
            held[k] = (x, y)
            leaving = y.detach()
        elif kind == "B":
            x, y = held.pop(k)
            y.backward(arrived if rank < p - 1 else None)
            leaving = x.grad
    return loss if rank == p - 1 else None
    # --- end
