# The grader says: AssertionError: the length must be a multiple of n
import torch
import torch.distributed as dist


def ring_all_reduce(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % n, (rank - 1) % n
    assert len(x) % n == 0, "the length must be a multiple of n"
    chunks = x.chunk(n)
    for step in range(2 * (n - 1)):
        out, into = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        came = torch.empty_like(into)
        sending = dist.isend(out, right)
        dist.recv(came, left)
        sending.wait()
        into.copy_(into + came if step < n - 1 else came)
