# The grader says: rank 0: its calls: expected {'all_reduce of 48 B': 4}, got {'all_reduce of 48 B': 4, 'all_reduce of 8 B': 4}
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
    step = 0
    while True:
        more = torch.tensor(int(step < len(batches)))
        dist.all_reduce(more)
        if more == 0:
            return w
        grad = torch.zeros_like(w)
        if step < len(batches):
            x, y = batches[step]
            error = x @ w - y
            grad = x.T @ error
        dist.all_reduce(grad)
        w = w - grad / 64
        step += 1
