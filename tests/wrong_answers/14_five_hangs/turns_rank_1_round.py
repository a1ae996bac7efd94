# The grader says: Job 4 ends, is right and does its work, on 3 ranks: after 10 s not every rank has come back
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
        if 0 <= partner < n:
            theirs = torch.empty_like(w)
            sending = dist.isend(w, partner)
            dist.recv(theirs, partner)
            sending.wait()
            w = (w + theirs) / 2
    return w


def job_4(state):
    n = dist.get_world_size()
    tensors = list(state.values())
    for tensor in tensors[2:] + tensors[:2] if dist.get_rank() == 1 else tensors:
        if tensor.is_floating_point():
            dist.all_reduce(tensor)
            tensor /= n
        else:
            dist.broadcast(tensor, 0)
