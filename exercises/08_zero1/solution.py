"""ZeRO-1: an optimizer that holds its share of the state. Task: exercises/08_zero1/README.md."""

from collections.abc import Iterable

import torch
import torch.distributed as dist


def partition(sizes: list[int], n: int) -> list[int]:
    """Deal whole parameters out to n ranks; return the owner of each.

    No rank gets more elements than an even share plus the largest parameter: sum(sizes) / n +
    max(sizes). Every rank computes this alone and must come to the same answer. `sizes` stays as
    it is.

    partition([2, 9, 4, 6, 1], 2) may return [0, 0, 1, 1, 1]: 11 elements each.
    """
    # --- yours
    owners = [0] * len(sizes)
    held = [0] * n
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = held.index(min(held))
        held[owners[i]] += sizes[i]
    return owners
    # --- end


class ZeRO1(torch.optim.Optimizer):
    """Any torch optimizer, its state spread over ranks (Rajbhandari et al., 2020, stage 1).

        optimizer = ZeRO1(model.parameters(), torch.optim.AdamW, lr=1e-3)

    Ranks hold equal parameters and, when `step` is called, equal gradients: DDP has averaged them.
    A rank steps the parameters it owns, with state for these alone, and sends them to the others.
    The weights are those of the plain optimizer, to the bit. Parameters are contiguous.

    With Adam, 8 P bytes of float32 state become 8 P / n on a rank, about. `step` sends at most P
    elements, by dist.broadcast: no gradients, no frozen parameters (requires_grad is False), and
    none that has no gradient in this step.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict],
        optimizer_class: type[torch.optim.Optimizer],
        **defaults: object,
    ) -> None:
        """The base class sets up `self.param_groups`, complete with the optimizer's own defaults,
        and `zero_grad`; schedulers change `param_groups`. Build the optimizer of this rank's part:
        the same groups, each with the parameters that this rank owns, which may be none."""
        full = optimizer_class([torch.zeros(1)], **defaults).defaults
        super().__init__(params, full)
        # --- yours
        rank = dist.get_rank()
        n = dist.get_world_size()
        trained = []
        for group in self.param_groups:
            trained += [p for p in group["params"] if p.requires_grad]
        owners = partition([p.numel() for p in trained], n)
        self.owner = dict(zip(trained, owners, strict=True))
        mine = []
        for group in self.param_groups:
            params = [p for p in group["params"] if self.owner.get(p) == rank]
            mine.append(group | {"params": params})
        self.local = optimizer_class(mine, **defaults)
        # --- end

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters on all ranks, in place, as `self.param_groups` say now. A parameter
        without a gradient stays as it is."""
        # --- yours
        for mine, group in zip(self.local.param_groups, self.param_groups, strict=True):
            mine |= group | {"params": mine["params"]}
        self.local.step()
        for parameter, owner in self.owner.items():
            if parameter.grad is not None:
                dist.broadcast(parameter.detach(), src=owner)
        # --- end


# Live: torchrun --standalone --nproc-per-node=2 answers/08_zero1.py


def main() -> None:
    """Print the time of a step of AdamW and of its sharded form, how far their weights are apart,
    and, on GPUs, the bytes of their state."""
    from course.live import joined, largest, milliseconds, say

    with joined() as device:
        width = 4096 if device.type == "cuda" else 256
        say(f"{dist.get_world_size()} ranks on {device.type}, {6 * width**2 / 1e6:.1f}M weights")
        ended = []
        for name in ("AdamW", "ZeRO-1"):
            torch.manual_seed(0)
            start = [torch.randn(width + k, width, device=device) for k in range(6)]
            weights = [torch.nn.Parameter(part.clone()) for part in start]
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            held = torch.cuda.memory_allocated() if device.type == "cuda" else 0
            if name == "AdamW":
                optimizer = torch.optim.AdamW(weights)
            else:
                optimizer = ZeRO1(weights, torch.optim.AdamW)
            line = f"{name:8}{milliseconds(optimizer.step, device):8.2f} ms per step"
            if device.type == "cuda":
                line += f", {(torch.cuda.memory_allocated() - held) / 1e6:,.0f} MB of state"
            say(line)
            ended.append(weights)
        off = max((a - b).abs().max().item() for a, b in zip(*ended, strict=True))
        say(f"largest difference of the weights {largest(off, device):g}")


if __name__ == "__main__":
    main()
