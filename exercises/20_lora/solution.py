"""LoRA: an adapter for any linear layer, put in by name, sharded. Task: exercises/20_lora."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard


class Adapter(nn.Module):
    """A frozen linear layer with a trained change added to it: W + alpha / r B A (Hu et al., 2021).

    `self.base` is the layer that was given, `self.A` (r, d_in) is random at first, and `self.B`
    (d_out, r) zero. Both are of the base's device, and of its dtype, but of float32 with a base
    in bfloat16 or float16.
    """

    def __init__(self, base: nn.Linear, r: int, alpha: float) -> None:
        """Freeze the base, and make the parameters A and B."""
        super().__init__()
        self.base = base
        # --- yours
        base.requires_grad_(False)
        self.scale = alpha / r
        dtype = torch.promote_types(base.weight.dtype, torch.float32)
        self.A = nn.Parameter(base.weight.new_empty(r, base.in_features, dtype=dtype))
        self.B = nn.Parameter(base.weight.new_zeros(base.out_features, r, dtype=dtype))
        nn.init.normal_(self.A, std=base.in_features**-0.5)
        # --- end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., d_in) -> (..., d_out), in the dtype of the base's output. The change is computed
        in the dtype of A and B, and no tensor of as many elements as W is made on the way."""
        # --- yours
        y = self.base(x)
        change = F.linear(F.linear(x.to(self.A.dtype), self.A), self.B)
        return y + (self.scale * change).to(y.dtype)
        # --- end

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """Add the change to the base's weight, rounded once to its dtype; return the base."""
        # --- yours
        weight = self.base.weight
        weight.copy_(weight.to(self.A.dtype) + self.scale * self.B @ self.A)
        return self.base
        # --- end


def adapt(model: nn.Module, names: tuple[str, ...], r: int, alpha: float) -> nn.Module:
    """Put an Adapter in the place of each linear layer, wherever in the model, whose own name, the
    last part of its dotted one, is among `names`. Nothing but A and B is trained afterwards.
    Return the model.

    A layer that the model holds in two places of such names gets one adapter, in both; where it has
    another name, it stays as it is. So do other modules of such a name.
    """
    # --- yours
    model.requires_grad_(False)
    adapters = {}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if name in names and isinstance(child, nn.Linear):
                if child not in adapters:
                    adapters[child] = Adapter(child, r, alpha)
                setattr(parent, name, adapters[child])
    return model
    # --- end


def shard(model: nn.Module) -> nn.Module:
    """Shard an adapted model over all ranks with `fully_shard`, and return it: each of
    `model.blocks` is a unit with its adapters, all the rest is another one.

    The gradients that are reduce-scattered are those of A and B, and not one element of padding:
    where n does not divide the rows of a matrix, it divides its columns.
    """
    # --- yours
    n = dist.get_world_size()
    mesh = init_device_mesh(next(model.parameters()).device.type, (n,))

    def placement(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.dim() == 2 and len(parameter) % n != 0 else None

    for block in model.blocks:
        fully_shard(block, mesh=mesh, shard_placement_fn=placement)
    return fully_shard(model, mesh=mesh, shard_placement_fn=placement)
    # --- end
