"""Modules and an optimizer that are hard to train in parallel; wrappers must take them as is."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Odd(nn.Module):
    """Tied, frozen, unused, empty, transposed and integer parameters, one with fewer rows than
    ranks, buffers, nested units, a layer called twice, an LSTM (which keeps its own list of
    weights), a 0-dimensional float32 parameter among float64, and a dict as its output."""

    def __init__(
        self, seed: int = 0, again: str = "", mixed: bool = False, buffer_seed: int = 0
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(13, 5)
        self.head = nn.Linear(5, 13)
        self.unused = nn.Linear(3, 3)
        self.body = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5))
        self.twice = nn.Linear(5, 5)
        self.memory = nn.LSTM(5, 5, batch_first=True)
        self.head.weight = self.embed.weight
        self.body[0].bias.requires_grad_(False)
        self.twice.weight = nn.Parameter(torch.randn(5, 5).t())
        self.turned = nn.Parameter(torch.randn(5, 4).t())
        self.table = nn.Parameter(torch.arange(3), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.single = nn.Parameter(torch.randn(1, 5))
        torch.manual_seed(buffer_seed)
        self.register_buffer("offset", torch.randn(5))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.double()
        self.gain = nn.Parameter(torch.tensor(1.5)) if mixed else 1.0
        self.again = again

    def units(self) -> list[nn.Module]:
        return [self.body, self.body[2], self.twice, self.memory, self.unused, self.head]

    def forward(self, pairs_B2: torch.Tensor) -> dict[str, torch.Tensor]:
        assert dict(self.named_parameters())["embed.weight"].shape == (13, 5)  # as some expect
        x_BD = self.embed(pairs_B2[:, 0]) + self.offset + self.single + self.turned.sum(0)
        if self.again:
            x_BD = x_BD + checkpoint(self.body, x_BD, use_reentrant=self.again == "reentrant")
        else:
            x_BD = x_BD + self.body(x_BD)
        x_BD = self.twice(x_BD) + self.twice(x_BD.sin())
        x_BD = (x_BD + self.memory(x_BD[:, None])[0][:, 0]) * self.gain
        return {"loss": F.cross_entropy(self.head(x_BD), pairs_B2[:, 1])}


def batches(n: int, steps: int = 3, size: int = 8) -> torch.Tensor:
    """Return pairs of tokens for `Odd`: (steps, n ranks, size, 2)."""
    return torch.randint(13, (steps, n, size, 2), generator=torch.Generator().manual_seed(3))


class Moody(nn.Module):
    """Which parameters are used depends on the mood; the last are never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(3, 3) for _ in range(5)).double()

    def forward(self, x_BD: torch.Tensor, mood: int) -> torch.Tensor:
        for part in list(self.parts)[mood % 2 : 4 : 2]:
            x_BD = part(x_BD)
        return x_BD.square().mean()


class CountingAdam(torch.optim.Optimizer):
    """Counts its steps in the group, as many a published optimizer does, and writes to `.data`."""

    def __init__(self, params, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "step": 0})

    def step(self, closure=None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                    state["v"] = torch.zeros_like(p)
                state["m"].lerp_(p.grad, 0.1)
                state["v"].lerp_(p.grad.square(), 0.01)
                m = state["m"] / (1 - 0.9 ** group["step"])
                v = state["v"] / (1 - 0.99 ** group["step"])
                p.data -= group["lr"] * m / (v.sqrt() + 0.1)
