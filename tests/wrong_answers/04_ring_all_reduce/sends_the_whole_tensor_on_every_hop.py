# The grader says: x of 192 B: bytes sent: expected 288, got 576
import torch
import torch.distributed as dist


def ring_all_reduce(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % n, (rank - 1) % n
    sums = [x.clone()] + [torch.empty_like(x) for _ in range(n - 1)]
    for step in range(n - 1):  # what everybody holds passes round the whole ring
        sending = dist.isend(sums[step], right)
        dist.recv(sums[step + 1], left)
        sending.wait()
    in_order = [sums[(rank - r) % n] for r in range(n)]
    x.copy_(sum(in_order[1:], in_order[0]))
