# The grader says: Greeting and checksum, on 1 rank: rank 0: checksum: expected 3,000,000,003, got 3,000,000,000
import torch
import torch.distributed as dist


def hello(shard):
    rank, n = dist.get_rank(), dist.get_world_size()
    total = (rank + 1) * shard.float().sum()
    dist.all_reduce(total)
    return f"rank {rank} of {n}", int(total)
