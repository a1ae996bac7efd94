"""A pipeline whose backward passes come in two parts.

Task: exercises/11_pipeline_micro_batches/README.md.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

Action = tuple[str, int]  # ("F", "B" or "W", k): one of the three passes of micro-batch k


def zero_bubble(stage: int, p: int, m: int) -> list[Action]:
    """The order in which a stage of p works on m micro-batches: ZB-H1 (Qi et al., 2023).

    F is a forward pass. B computes the gradient of the stage's input, for which the stage before
    waits. W computes the gradients of the stage's weights, for which nobody waits. A micro-batch is
    alive, and its activations are held, from its F to its W.

    Forwards and Bs come as in 1F1B: p - 1 - stage forwards ahead (m if there are fewer), then one
    of each in turn, then the Bs that are left. Ws come so late that no B waits for one, and so
    early that no stage holds more than p micro-batches: any places will do. Each takes one slot;
    every stage idles p - 1 slots if m >= p.

    zero_bubble(0, 2, 3): F0 F1 B0 W0 F2 B1 W1 B2 W2, as ("F", 0), ("F", 1), ...;
    zero_bubble(1, 2, 3): F0 B0 F1 B1 W0 F2 B2 W1 W2.
    """
    # --- yours
    num_warmup = min(p - 1 - stage, m)
    order = [("F", k) for k in range(num_warmup)]
    for k in range(m):
        if num_warmup + k < m:
            order.append(("F", num_warmup + k))
        order.append(("B", k))
        if k >= stage:
            order.append(("W", k - stage))
    return order + [("W", k) for k in range(max(0, m - stage), m)]
    # --- end


def pipeline_step(stage: nn.Module, inputs: Sequence[Tensor], loss_of: Callable) -> Tensor | None:
    """One step of the model whose layers the ranks share: rank r has stage r, and runs no other.

    stage: maps a micro-batch of rows to a tensor with as many rows, of the dtype of its input. All
    its parameters want gradients, and all take part.
    inputs: on rank 0 the micro-batches, of unlike numbers of rows. Elsewhere tensors on the meta
    device, with shape and dtype of what will arrive, and no memory:
    `torch.empty_like(inputs[k], device=DEVICE)` makes room for the k-th, DEVICE being the stage's.
    loss_of(y, k): on the last rank, the *mean* loss of micro-batch k's rows, from its output y.

    Leaves in every parameter of `stage` the gradient of the mean loss of all rows, as one process
    finds it from the whole batch. Returns this loss on the last rank, None elsewhere.

    On 2 ranks with 3 micro-batches of 2, 2 and 1 rows, the losses weigh 2/5, 2/5 and 1/5, and
    rank 1 computes W0 while rank 0 may not yet have asked for B1's gradient.

    A stage works in the order of `zero_bubble`, and never waits for a neighbor to take a message
    before it goes on. On rank 0, whose inputs want no gradient, B only receives. Each micro-batch's
    activation crosses each cut once, its gradient once back; nothing else is sent. After its W,
    nothing of a micro-batch is held.
    """
    # --- yours
    rank = dist.get_rank()
    p = dist.get_world_size()
    rows = sum(len(x) for x in inputs)
    weights = list(stage.parameters())
    held = {}
    sends = {k: [] for k in range(len(inputs))}
    loss = 0.0
    for kind, k in zero_bubble(rank, p, len(inputs)):
        if kind == "F":
            x = inputs[k]
            if rank > 0:
                x = torch.empty_like(x, device=weights[0].device)
                dist.recv(x, rank - 1)
                x.requires_grad_()
            y = stage(x)
            if rank < p - 1:
                sends[k].append(dist.isend(y.detach(), rank + 1))
            else:
                y = loss_of(y, k) * len(x) / rows
                loss += y.detach()
            held[k] = (x, y)
        elif kind == "B":
            x, y = held[k]
            grad = None
            if rank < p - 1:
                grad = torch.empty_like(y)
                dist.recv(grad, rank + 1)
            if rank > 0:
                y.backward(grad, inputs=[x], retain_graph=True)
                sends[k].append(dist.isend(x.grad, rank - 1))
            held[k] = (y, grad)
        else:
            y, grad = held.pop(k)
            y.backward(grad, inputs=weights)
            for send in sends.pop(k):
                send.wait()
    return loss if rank == p - 1 else None
    # --- end


# Live: torchrun --standalone --nproc-per-node=2 answers/11_pipeline_micro_batches.py


def main() -> None:
    """Print the time of a step, and its loss and gradients next to those of one process.

    On GPUs, messages stay so small that NCCL's buffers take them: larger ones, of which one goes
    forth while the other comes back, want a process group for each direction.
    """
    from course.live import joined, largest, milliseconds, say

    with joined() as device:
        rank = dist.get_rank()
        p = dist.get_world_size()
        torch.manual_seed(0)  # the same stages and input on all ranks
        stages = [nn.Linear(64 + r, 65 + r, device=device) for r in range(p)]
        sizes = [6 + k % 5 for k in range(4 * p)]  # rows of the micro-batches
        batch = torch.randn(sum(sizes), 64, device=device)
        inputs = list(batch.split(sizes))
        if rank > 0:
            inputs = [torch.empty(size, 64 + rank, device="meta") for size in sizes]

        def mean_loss(y: Tensor, k: int) -> Tensor:
            return y.square().mean()

        loss = pipeline_step(stages[rank], inputs, mean_loss)
        got = [parameter.grad.clone() for parameter in stages[rank].parameters()]
        ms = milliseconds(lambda: pipeline_step(stages[rank], inputs, mean_loss), device)
        stages[rank].zero_grad()
        due = nn.Sequential(*stages)(batch).square().mean()
        due.backward()
        off = 0.0
        for grad, parameter in zip(got, stages[rank].parameters(), strict=True):
            error = (grad - parameter.grad).norm() / parameter.grad.norm()
            off = max(off, largest(error, device))
        if rank == p - 1:
            print(f"loss {loss.item():.6f}, of one process {due.item():.6f}", flush=True)
        dist.barrier()
        say(f"{p} stages on {device.type}: {ms:.2f} ms per step of {len(sizes)} micro-batches;")
        say(f"gradients are {off:.1g} of their length from those of one process")


if __name__ == "__main__":
    main()
