"""Activation checkpointing by hand. Task: exercises/22_recompute/README.md."""

from collections.abc import Callable

import torch


def recompute(module: Callable, *inputs: object) -> torch.Tensor:
    """module(*inputs), of which nothing but the inputs is kept for backward.

        y = recompute(block, x)         # as y = block(x), with the same gradients
        y = recompute(block, x, mask)   # inputs may be anything; tensors among them have gradients

    The module is anything that can be called; it computes in the mode that it is in.

    Backward computes the module once more, with the random numbers that forward drew, so that
    dropout masks are the same, and leaves the generator as it found it. If the parameters are what
    has gradients, and no input requires one, backward must compute them nevertheless.

    Do not use it inside `torch.autocast`, whose state backward does not have; torch's own
    `checkpoint` brings that back, too.
    """
    if not torch.is_grad_enabled():
        return module(*inputs)  # nobody will ask for gradients
    # --- yours
    anchor = torch.empty(0, requires_grad=True)
    return Recompute.apply(module, anchor, *inputs)
    # --- end


class Recompute(torch.autograd.Function):
    """Forward without a graph; backward with one that it builds anew."""

    @staticmethod
    def forward(ctx: object, module: Callable, anchor: torch.Tensor, *inputs: object) -> object:
        """Keep the tensors among the inputs by `ctx.save_for_backward`, which notices if somebody
        writes into them, the others in `ctx`, and the state of the CPU's generator."""
        # --- yours
        ctx.module = module
        ctx.state = torch.get_rng_state()
        ctx.inputs = [None if torch.is_tensor(x) else x for x in inputs]
        ctx.places = [i for i, x in enumerate(inputs) if torch.is_tensor(x)]
        ctx.save_for_backward(*[inputs[i] for i in ctx.places])
        return module(*inputs)
        # --- end

    @staticmethod
    def backward(ctx: object, dy: torch.Tensor) -> tuple:
        """The gradient of each argument of forward; those of parameters go into their `grad`."""
        # --- yours
        inputs = list(ctx.inputs)
        for i, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            inputs[i] = tensor.detach().requires_grad_(tensor.requires_grad)
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            y = ctx.module(*inputs)
        torch.autograd.backward(y, dy)
        return None, None, *[getattr(x, "grad", None) for x in inputs]
        # --- end
