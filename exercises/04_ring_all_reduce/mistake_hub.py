import torch
import torch.distributed as dist


def ring_all_reduce(x):
    """Rank 0 collects everything and sends the sum to all."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    if rank > 0:
        dist.send(x, 0)
        dist.recv(x, 0)
        return
    for other in range(1, n):
        came = torch.empty_like(x)
        dist.recv(came, other)
        x += came
    for other in range(1, n):
        dist.send(x, other)
