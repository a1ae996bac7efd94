# The grader says: bytes in the all-reduce, forward: expected [120], got [240]
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        whole = grad.clone()
        dist.all_reduce(whole)
        return whole


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        whole = part.double()
        dist.all_reduce(whole)
        return whole.to(part.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad


class ParallelMLP(nn.Module):
    def __init__(self, w1, b1, w2, b2):
        super().__init__()
        rank, n = dist.get_rank(), dist.get_world_size()
        self.w1 = nn.Parameter(w1.tensor_split(n)[rank].detach().clone())
        self.b1 = nn.Parameter(b1.tensor_split(n)[rank].detach().clone())
        self.w2 = nn.Parameter(w2.tensor_split(n, 1)[rank].detach().clone())
        self.b2 = nn.Parameter(b2.detach().clone())

    def forward(self, x):
        h = F.gelu(F.linear(Enter.apply(x), self.w1, self.b1))
        return Leave.apply(F.linear(h, self.w2)) + self.b2
