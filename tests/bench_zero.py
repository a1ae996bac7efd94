"""What `make bench` says of ZeRO: a step by hand beside a step of torch's, on the same GPT."""

import time
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from exercises.ranks import run
from tests.lessons import load

WIDTH, HEADS, DEPTH, TOKENS, VOCABULARY = 512, 8, 6, 64, 512  # 19.5 million parameters
ADAM = partial(torch.optim.Adam, lr=1e-4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(x_BTD)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).flatten(2))
        return x_BTD + self.down(F.gelu(self.up(self.norm2(x_BTD))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.embed(tokens_BT) + self.position(torch.arange(TOKENS))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return F.cross_entropy(self.head(self.norm(x_BTD)).flatten(0, 1), tokens_BT.flatten())


def zero1_by_hand():
    zero = load("parallelism/02_fsdp_zero.py").ZeRO1(GPT(), ADAM)
    return zero.module, lambda: None, zero.step


def zero1_of_torch():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(GPT())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, parameters_as_bucket_view=True, lr=1e-4
    )
    return model, optimizer.zero_grad, optimizer.step


def zero3_by_hand():
    model = GPT()
    zero = load("parallelism/03_fsdp_zero3.py").FSDP(model, ADAM, [*model.blocks])
    return model, lambda: None, zero.step


def zero3_of_torch():
    from torch.distributed.fsdp import fully_shard

    model = GPT()
    for block in model.blocks:
        fully_shard(block)
    optimizer = ADAM(fully_shard(model).parameters())
    return model, optimizer.zero_grad, optimizer.step


def race(ours, peer, repeats: int, steps: int = 2) -> tuple[list[float], list[float]]:
    """Seconds a step: the two take turns to go first; one repeat to warm up is not counted."""
    tokens_BT = torch.randint(VOCABULARY, (4, TOKENS))
    runners, times = [ours(), peer()], ([], [])
    for repeat in range(-1, repeats):
        for which in (0, 1) if repeat % 2 else (1, 0):
            model, zero_grad, step = runners[which]
            dist.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                zero_grad()
                model(tokens_BT).backward()
                step()
            dist.barrier()
            if repeat >= 0:
                times[which].append((time.perf_counter() - start) / steps)
    return times


def ratios(repeats: int) -> list[dict]:
    setting = f"GPT of 19.5M parameters, float32, Adam, {TOKENS} x 4 tokens, 2 ranks, gloo"
    pairs = {
        "ZeRO-1 step: ZeroRedundancyOptimizer": (zero1_by_hand, zero1_of_torch, 1.05),
        "ZeRO-3 step: FSDP2": (zero3_by_hand, zero3_of_torch, 1.1),
    }
    rows = []
    for name, (ours, peer, aim) in pairs.items():
        mine, theirs = run(race, 2, ours, peer, repeats, deadline=60 + 10 * repeats)[0]
        rows.append({"name": name, "setting": setting, "ours": mine, "peer": theirs, "aim": aim})
    return rows
