"""Five hanging jobs, each fixed by a small change. Task: exercises/14_five_hangs/README.md."""

import torch
import torch.distributed as dist
from torch import Tensor

Batches = list[tuple[Tensor, Tensor]]


def job_1(x: Tensor, y: Tensor, w: Tensor) -> str | None:
    """The accuracy over all ranks' validation samples, reported by rank 0. Fix jobs.py's job_1.

    x: this rank's samples, (B, D); y: their labels, (B,); w: (D, C), the same on all ranks. Rank 0
    returns "R of S right", counted over all ranks; the others return None. On 2 ranks that have
    1 of 3 and 4 of 5 right: "5 of 8 right".

    Every rank: one all_reduce of two int64, 16 bytes.
    """
    # --- yours
    hits = ((x @ w).argmax(1) == y).sum()
    counts = torch.stack([hits, torch.tensor(len(y))])
    dist.all_reduce(counts)
    if dist.get_rank() == 0:
        right, seen = counts.tolist()
        return f"{right} of {seen} right"
    return None
    # --- end


def job_2(batches: Batches, w: Tensor) -> Tensor:
    """Data-parallel SGD: a step takes one batch of each rank and sums their gradients. Fix job_2.

    batches: this rank's (x, y), x of (B, D), y of (B,); ranks have different numbers of them, some
    have none. No batch is left out: there are as many steps as the longest rank has batches, and a
    rank that has run out adds nothing to the sum. Returns w, (D,), the same on all ranks.

    On 2 ranks with 2 and 1 batches: 2 steps; in the second the gradient is rank 0's alone.

    A step: one all_reduce of the gradient. To agree on the number of steps: at most one more
    collective, of 8 n bytes at most.
    """
    # --- yours
    steps = torch.tensor(len(batches))
    dist.all_reduce(steps, dist.ReduceOp.MAX)
    nothing = w.new_zeros(0, len(w)), w.new_zeros(0)
    for x, y in batches + [nothing] * (int(steps) - len(batches)):
        error = x @ w - y
        grad = x.T @ error
        dist.all_reduce(grad)
        w = w - grad / 64
    return w
    # --- end


def job_3(w: Tensor) -> Tensor:
    """Gossip: average w with the one neighbor, then with the other. Fix job_3.

    First ranks 0 and 1, 2 and 3, ... average, then 1 and 2, 3 and 4, ...; a rank without a partner
    keeps what it has. On 3 ranks that hold 0, 4 and 8: 2, 2, 8, then 2, 5, 5.

    A rank sends one message to each of its partners, and waits for every call that it starts.
    """
    # --- yours
    rank = dist.get_rank()
    n = dist.get_world_size()
    for round in range(2):
        partner = rank + 1 if (rank + round) % 2 == 0 else rank - 1
        if 0 <= partner < n:
            theirs = torch.empty_like(w)
            sending = dist.isend(w, partner)
            dist.recv(theirs, partner)
            sending.wait()
            w = (w + theirs) / 2
    return w
    # --- end


def job_4(state: dict[str, Tensor]) -> None:
    """Make replicas equal, in place: floats the mean over ranks, integers rank 0's. Fix job_4.

    state: the same names, shapes and dtypes on all ranks, in whatever order. On 2 ranks that hold
    {"w": 1.0, "seen": 5} and {"seen": 6, "w": 3.0}: w is 2.0 and seen is 5 on both.

    One all_reduce or one broadcast a tensor; none besides.
    """
    # --- yours
    n = dist.get_world_size()
    for _, tensor in sorted(state.items()):
        if tensor.is_floating_point():
            dist.all_reduce(tensor)
            tensor /= n
        else:
            dist.broadcast(tensor, 0)
    # --- end


def job_5(batches: Batches, w: Tensor) -> Tensor:
    """SGD as in job 2, as many batches on every rank; bad steps are left out. Fix job_5.

    A step in which any rank's gradient is not finite is left out on all ranks: then w stays as it
    is. On 2 ranks with 3 batches each, of which rank 1's second is bad: steps 1 and 3 are taken.

    A step, taken or not: one all_reduce of the gradient; nothing besides.
    """
    # --- yours
    for x, y in batches:
        error = x @ w - y
        grad = x.T @ error
        dist.all_reduce(grad)
        if not grad.isfinite().all():
            continue  # one bad sample must not spoil w
        w = w - grad / 64
    return w
    # --- end
