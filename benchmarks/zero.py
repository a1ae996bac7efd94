"""What `make bench` says of ZeRO: a step by hand next to a step of torch's, on the same GPT.

The two halves of an all-reduce, which ZeRO-1 by hand is made of, are NCCL's cheapest. On gloo each
of them copies through a buffer of its own: `reduce_scatter_tensor` costs more than DDP's whole
all-reduce, and `all_gather_into_tensor` twice what ZeroRedundancyOptimizer's broadcasts cost. DDP
also starts its all-reduces during backward. ZeRO-1 by hand starts its one reduce-scatter in `step`,
so nothing of it is hidden.
"""

import time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from course.passages import GPT
from course.playing import load
from course.ranks import run

LAYERS, WIDTH, TOKENS, VOCABULARY = 6, 512, 64, 512  # 19.5 million parameters
ADAM = partial(torch.optim.Adam, lr=1e-4)


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(L=LAYERS, D=WIDTH, T=TOKENS, V=VOCABULARY)


def zero1_by_hand():
    model = gpt()
    lesson = load("parallelism/02_fsdp_zero.py")
    zero = lesson.ZeRO1(model.parameters(), torch.optim.Adam, lr=1e-4)
    return model, zero.zero_grad, zero.step


def zero1_of_torch():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(gpt())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, parameters_as_bucket_view=True, lr=1e-4
    )
    return model, optimizer.zero_grad, optimizer.step


class Embeddings(nn.Module):
    """What a GPT computes before its blocks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.token = model.token
        self.position = model.position

    def forward(self, x_BT: torch.Tensor) -> torch.Tensor:
        return self.token(x_BT) + self.position.weight[: x_BT.shape[1]]


def units_of_gpt() -> list[nn.Module]:
    """The GPT as a chain: its embeddings, each of its blocks, its norm and head."""
    model = gpt()
    return [Embeddings(model), *model.blocks, nn.Sequential(model.norm, model.head)]


def zero3_by_hand():
    model = load("parallelism/05_zero2_and_zero3.py").ZeRO(units_of_gpt())
    optimizer = ADAM(model.parameters())

    def step() -> None:
        optimizer.step()
        model.free()

    return model, optimizer.zero_grad, step


def zero3_of_torch():
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(*units_of_gpt())
    for unit in model:
        fully_shard(unit)
    optimizer = ADAM(fully_shard(model).parameters())
    return model, optimizer.zero_grad, optimizer.step


def race(ours, peer, repeats: int, steps: int = 2) -> tuple[list[float], list[float]]:
    """Seconds a step: the two take turns to go first; one repeat to warm up is not counted."""
    tokens_BT = torch.randint(VOCABULARY, (4, TOKENS + 1))
    runners, times = [ours(), peer()], ([], [])
    for repeat in range(-1, repeats):
        for which in (0, 1) if repeat % 2 else (1, 0):
            model, zero_grad, step = runners[which]
            dist.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                zero_grad()
                logits_BTV = model(tokens_BT[:, :-1])
                cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten()).backward()
                step()
            dist.barrier()
            if repeat >= 0:
                times[which].append((time.perf_counter() - start) / steps)
    return times


def ratios(repeats: int) -> list[dict]:
    setting = f"GPT of 19.5M parameters, float32, Adam, {TOKENS} x 4 tokens, 2 ranks, gloo"
    pairs = {
        "ZeRO-1 step: ZeroRedundancyOptimizer": (zero1_by_hand, zero1_of_torch, 1.0),
        "ZeRO-3 step: FSDP2": (zero3_by_hand, zero3_of_torch, 1.0),
    }
    rows = []
    for name, (ours, peer, aim) in pairs.items():
        mine, theirs = run(race, 2, ours, peer, repeats, deadline=60 + 10 * repeats)[0]
        rows.append({"name": name, "setting": setting, "ours": mine, "peer": theirs, "aim": aim})
    return rows
