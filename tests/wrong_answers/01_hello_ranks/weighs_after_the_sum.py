# The grader says: Greeting and checksum, on 2 ranks: rank 1: checksum: expected 3,000,000,003, got 6,000,000,006
import torch
import torch.distributed as dist


def hello(shard):
    rank, n = dist.get_rank(), dist.get_world_size()
    total = shard.sum()
    dist.all_reduce(total)
    return f"rank {rank} of {n}", int((rank + 1) * total)
