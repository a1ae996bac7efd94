# The grader says: rank 0: its calls: expected {'recv of 40 B, rank 1': 1, 'send of 40 B, rank 1': 1}, got {'all_gather
import torch
import torch.distributed as dist


def job_1(x, y, w):
    hits = ((x @ w).argmax(1) == y).sum()
    counts = torch.stack([hits, torch.tensor(len(y))])
    dist.all_reduce(counts)
    if dist.get_rank() == 0:
        right, seen = counts.tolist()
        return f"{right} of {seen} right"
    return None


def job_2(batches, w):
    steps = torch.tensor(len(batches))
    dist.all_reduce(steps, dist.ReduceOp.MAX)
    nothing = w.new_zeros(0, len(w)), w.new_zeros(0)
    for x, y in batches + [nothing] * (int(steps) - len(batches)):
        error = x @ w - y
        grad = x.T @ error
        dist.all_reduce(grad)
        w = w - grad / 64
    return w


def job_3(w):
    rank = dist.get_rank()
    n = dist.get_world_size()
    for round in range(2):
        partner = rank + 1 if (rank + round) % 2 == 0 else rank - 1
        of_rank = [torch.empty_like(w) for _ in range(n)]
        dist.all_gather(of_rank, w)
        if 0 <= partner < n:
            w = (w + of_rank[partner]) / 2
    return w
