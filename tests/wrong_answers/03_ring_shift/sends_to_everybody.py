# The grader says: rank 0 of 3, shift 1: sends to ranks: expected [1], got [1, 2]
import torch
import torch.distributed as dist


def ring_shift(x, shift=1):
    rank, n = dist.get_rank(), dist.get_world_size()
    x = x.contiguous()
    every = [torch.empty_like(x) if r != rank else x.clone() for r in range(n)]
    others = [r for r in range(n) if r != rank]
    works = [dist.isend(x, r) for r in others] + [dist.irecv(every[r], r) for r in others]
    for work in works:
        work.wait()
    return every[(rank - shift) % n]
