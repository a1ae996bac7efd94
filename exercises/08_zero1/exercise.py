"""ZeRO-1: an optimizer that holds its share of the state. Read README.md beside this file first."""

from collections.abc import Iterable

import torch
import torch.distributed as dist


def partition(sizes: list[int], n: int) -> list[int]:
    """Deal whole parameters out to n ranks; return the owner of each.

    No rank gets more elements than an even share plus the largest parameter: sum(sizes) / n +
    max(sizes). Every rank computes this alone and must come to the same answer.

    partition([2, 9, 4, 6, 1], 2) may return [0, 0, 1, 1, 1]: 11 elements each.
    """
    raise NotImplementedError  # 6 lines in the solution


class ZeRO1(torch.optim.Optimizer):
    """Any torch optimizer, its state spread over ranks (Rajbhandari et al., 2020, stage 1).

        optimizer = ZeRO1(model.parameters(), torch.optim.AdamW, lr=1e-3)

    Ranks hold equal parameters and, when `step` is called, equal gradients: DDP has averaged them.
    A rank steps the parameters it owns, with state for these alone, and sends them to the others.
    The weights are those of the plain optimizer, to the bit. Parameters are contiguous.

    With Adam, 8 P bytes of float32 state become 8 P / n on a rank, about. `step` sends at most P
    elements, by dist.broadcast: no gradients, and no frozen parameters (requires_grad is False).
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
        raise NotImplementedError  # 12 lines in the solution

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters on all ranks, as `self.param_groups` say now. A parameter without
        a gradient stays as it is."""
        raise NotImplementedError  # 5 lines in the solution
