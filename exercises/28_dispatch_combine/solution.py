"""A layer of experts that lie on several ranks: tokens out, and back.

Task: exercises/28_dispatch_combine/README.md.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

# Shapes: N tokens of this rank, D numbers each, K experts per token, n ranks, e experts on each.


class AllToAll(torch.autograd.Function):
    """Send `sent[r]` rows to each rank r, in order, and get `received[r]` rows from it."""

    @staticmethod
    def forward(ctx: object, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sizes = sent, received
        return exchange(rows, sent, received)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None, None]:
        # --- yours
        sent, received = ctx.sizes
        return exchange(grad, received, sent), None, None
        # --- end


def exchange(rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    """The same without gradients; what comes from rank 0 lies first, then rank 1's, and so on."""
    came = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(came, rows.contiguous(), received, sent)
    return came


def mixture(
    x_ND: Tensor, score_NK: Tensor, expert_NK: Tensor, experts: list[Callable[[Tensor], Tensor]]
) -> Tensor:
    """Return y (N, D): for each token the sum over its K experts of score x expert(token).

    x, score, expert: this rank's tokens, and what the router chose for them: K different experts
    of all n e. N is another on each rank, and may be 0.
    experts: this rank's, e on every rank. They are dealt like cards: expert number g is
    `experts[g // n]` of rank g % n. Each takes rows (any number, D) and returns as many rows of D.
    x, score, rows and y are of one dtype. What is given stays as it is.

    Each expert is called once, with all the rows that have come for it, also if there are none.
    Gradients reach x, score, and the parameters of the experts on whichever rank they are: zeros
    for an expert that nobody chose. Backward must not hang if nobody chose any of a rank's experts.

    An all-to-all of the counts, n e integers; one of the rows out, and one back. Each rank sends
    N K rows of D numbers: no padding. Backward makes two more of the same sizes, on every rank.
    """
    # --- yours
    n = dist.get_world_size()
    e = len(experts)
    K = expert_NK.shape[1]
    place_C = expert_NK.flatten() % n * e + expert_NK.flatten() // n  # by rank, then by expert
    order_C = place_C.argsort(stable=True)
    count_ne = torch.bincount(place_C, minlength=n * e).view(n, e)
    their_ne = torch.empty_like(count_ne)
    dist.all_to_all_single(their_ne, count_ne)
    sent = count_ne.sum(1).tolist()
    received = their_ne.sum(1).tolist()

    came_RD = AllToAll.apply(x_ND[order_C // K], sent, received)
    which_R = torch.arange(e, device=x_ND.device).repeat(n).repeat_interleave(their_ne.flatten())
    y_RD = torch.zeros_like(came_RD)
    for i, expert in enumerate(experts):
        mine_R = (which_R == i).nonzero().flatten()
        y_RD = y_RD.index_add(0, mine_R, expert(came_RD[mine_R]))

    y_CD = AllToAll.apply(y_RD, received, sent)
    weighed_CD = score_NK.flatten()[order_C, None] * y_CD
    return torch.zeros_like(x_ND).index_add(0, order_C // K, weighed_CD)
    # --- end


# Live: torchrun --standalone --nproc-per-node=2 answers/28_dispatch_combine.py


def main() -> None:
    """Send tokens to experts that only scale them; print the time and what came wrong."""
    from course.live import joined, largest, milliseconds, say

    with joined() as device:
        n = dist.get_world_size()
        N = 4096
        D = 1024 if device.type == "cuda" else 64
        torch.set_default_device(device)
        torch.manual_seed(dist.get_rank())
        x_ND = torch.randn(N, D)
        expert_NK = torch.rand(N, 2 * n).topk(2).indices
        score_NK = torch.rand(N, 2)
        factors = [1.0 + i * n + dist.get_rank() for i in range(2)]
        experts = [lambda rows, by=factor: by * rows for factor in factors]
        due = (score_NK * (1.0 + expert_NK)).sum(1, keepdim=True) * x_ND
        off = largest(
            (mixture(x_ND, score_NK, expert_NK, experts) - due).norm() / due.norm(), device
        )
        ms = milliseconds(lambda: mixture(x_ND, score_NK, expert_NK, experts), device)
        say(f"{n} ranks on {device.type}: {N:,} tokens each to 2 of {2 * n} experts and back")
        say(f"in {ms:.2f} ms; outputs are {off:.1g} of their length off")


if __name__ == "__main__":
    main()
