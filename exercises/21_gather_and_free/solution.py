"""ZeRO-3 for a chain of units: gather, compute, free. Task: exercises/21_gather_and_free."""

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call


class ZeRO3(nn.Module):
    """Units that are called one after the other, each with its parameters spread over all ranks.

        model = ZeRO3([unit0, unit1, unit2])     # the same values on every rank
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss(model(x)).backward()                # the mean gradient of this rank's shares

    A unit is any module with parameters that maps one tensor of floats to one. Unit k has T trained
    elements in the order of `parameters()`, one after the other, and F frozen ones likewise. Cut
    into n equal shares, with zeros at the end where n does not divide them, rank r holds share r:
    `self.trained[k]` is a parameter of ceil(T / n) elements, and `self.frozen[k]` a tensor of
    ceil(F / n). All parameters of a unit are of one dtype.

    Forward: gather unit 0; then for each unit start to gather the next one, compute, free.
    Backward: the same from the last unit to the first, each computed once more from its input (no
    unit draws random numbers), then its gradient is reduce-scattered.
    """

    def __init__(self, units: list[nn.Module]) -> None:
        """Keep this rank's shares, and free the units' own parameters: their `data` gets empty."""
        super().__init__()
        self.units = tuple(units)  # in a tuple they are no submodules of this one
        self.shapes: list[dict[str, tuple[torch.Size, bool]]] = []  # of each unit's parameters
        self.trained = nn.ParameterList()
        self.frozen: list[torch.Tensor] = []
        self.coming: dict[int, tuple[torch.Tensor, dist.Work]] = {}  # gathers under way, by unit
        for unit in self.units:
            named = dict(unit.named_parameters())
            self.shapes.append({name: (p.shape, p.requires_grad) for name, p in named.items()})
            # --- yours
            flat = {True: [], False: []}
            for p in named.values():
                flat[p.requires_grad].append(p.detach().flatten())
            nothing = p.detach().new_zeros(0)  # in the unit's dtype
            share = my_share(torch.cat([nothing, *flat[True]])).clone()
            self.trained.append(nn.Parameter(share, requires_grad=len(share) > 0))
            self.frozen.append(my_share(torch.cat([nothing, *flat[False]])).clone())
            for p in named.values():
                p.data = p.data.new_empty(0)
            # --- end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k in range(len(self.units)):
            x = Unit.apply(self, k, x, self.trained[k])
        return x

    def gather(self, k: int) -> None:
        """Start to gather unit k, its trained and its frozen shares in one all-gather, and return
        at once. Do nothing if it is under way, or if there is no unit k."""
        # --- yours
        if k in self.coming or not 0 <= k < len(self.units):
            return
        share = torch.cat([self.trained[k].detach(), self.frozen[k]])
        whole = share.new_empty(dist.get_world_size() * len(share))
        self.coming[k] = (whole, dist.all_gather_into_tensor(whole, share, async_op=True))
        # --- end

    def whole(self, k: int) -> dict[str, torch.Tensor]:
        """Wait until unit k is there, and return its parameters by name, whole, in their shapes."""
        # --- yours
        self.gather(k)
        whole, work = self.coming.pop(k)
        work.wait()
        columns = whole.view(dist.get_world_size(), -1)
        cut = len(self.trained[k])
        flat = {True: columns[:, :cut].flatten(), False: columns[:, cut:].flatten()}
        parameters = {}
        for name, (shape, trained) in self.shapes[k].items():
            parameters[name] = flat[trained][: shape.numel()].view(shape)
            flat[trained] = flat[trained][shape.numel() :]
        return parameters
        # --- end

    def scatter(self, k: int, gradients: list[torch.Tensor | None]) -> torch.Tensor:
        """Return this rank's share of the mean over ranks of the gradients of unit k's trained
        parameters, given in their order; None, for one that was not used, is zero."""
        shapes = [shape for shape, trained in self.shapes[k].values() if trained]
        # --- yours
        n = dist.get_world_size()
        share = torch.zeros_like(self.trained[k])
        flat = share.new_zeros(n * len(share))
        start = 0
        for shape, gradient in zip(shapes, gradients, strict=True):
            if gradient is not None:
                flat[start : start + shape.numel()] = gradient.flatten() / n
            start += shape.numel()
        dist.reduce_scatter_tensor(share, flat)
        return share
        # --- end


class Unit(torch.autograd.Function):
    """One unit of a ZeRO3, forward and backward."""

    @staticmethod
    def forward(
        ctx: object, model: ZeRO3, k: int, x: torch.Tensor, share: torch.Tensor
    ) -> torch.Tensor:
        """Unit k of x. Only x is kept for backward."""
        ctx.model = model
        ctx.k = k
        ctx.save_for_backward(x)
        # --- yours
        parameters = model.whole(k)
        model.gather(k + 1)
        return functional_call(model.units[k], parameters, (x,))
        # --- end

    @staticmethod
    def backward(ctx: object, dy: torch.Tensor) -> tuple:
        """The gradients of model, k, x and share: None, None, that of x, and that of the share,
        which is None if nothing in the unit is trained."""
        model = ctx.model
        k = ctx.k
        # --- yours
        parameters = model.whole(k)
        model.gather(k - 1)
        trained = []
        for name, (_, is_trained) in model.shapes[k].items():
            if is_trained:
                trained.append(parameters[name].requires_grad_())
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = functional_call(model.units[k], parameters, (x,))
        dx, *gradients = torch.autograd.grad(y, [x, *trained], dy, allow_unused=True)
        return None, None, dx, model.scatter(k, gradients) if trained else None
        # --- end


def my_share(flat: torch.Tensor) -> torch.Tensor:
    """Return this rank's share of a flat tensor: of n equal ones, zeros at the end."""
    # --- yours
    n = dist.get_world_size()
    length = -(-len(flat) // n)
    padded = torch.cat([flat, flat.new_zeros(n * length - len(flat))])
    return padded[dist.get_rank() * length : (dist.get_rank() + 1) * length]
    # --- end
