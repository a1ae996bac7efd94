"""Data parallelism by hooks, overlapped. Task: exercises/05_data_parallel_hooks/README.md."""

import copy
from collections import deque

import torch
import torch.distributed as dist
from torch import nn


class DataParallel(nn.Module):
    """Wraps any module so that all ranks train as one.

        model = DataParallel(module)
        loss(model(x), y).backward()   # all-reduces start in here
        model.finish()                 # and are over when this returns
        optimizer.step()               # on the mean gradient, the same on every rank

    A step is zero_grad (which may leave None or zeros), one forward, one backward, one finish. If
    the loss is a mean and all ranks hold equally many samples, the mean gradient is that of one
    process with all the samples. Parameters and buffers are contiguous.

    On 2 ranks, where a weight w has gradient 3 on rank 0 and 5 on rank 1: w.grad is 4 on both.

    Each step all-reduces every trained parameter's gradient once: P elements, no more and no less.
    Each all-reduce starts as soon as its turn has come: when its gradient and those before it in
    the order that all ranks share are there. Nothing else is sent, but for the start; and all is
    sent by the thread that calls.
    """

    def __init__(self, module: nn.Module) -> None:
        """Give every rank the parameters (frozen ones too) and buffers of rank 0, then have
        `arrived` called for each trained parameter when its gradient is complete. Tied weights are
        one parameter."""
        super().__init__()
        self.module = module
        # --- yours
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        self.trained = [p for p in module.parameters() if p.requires_grad][::-1]
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self.arrived)
        self.queue = deque(self.trained)
        self.there = set()
        self.works = []
        # --- end

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.module(*args, **kwargs)

    def arrived(self, parameter: nn.Parameter) -> None:
        """The hook. Launch what can go now: all ranks launch in one and the same order, for
        all-reduces are matched by order alone, and gradients need not arrive in it. The last layers
        go first, as most of their gradients do arrive first."""
        # --- yours
        self.there.add(parameter)
        while self.queue and self.queue[0] in self.there:
            self.launch(self.queue.popleft())
        # --- end

    def launch(self, parameter: nn.Parameter) -> None:
        """Start to make `parameter.grad` the mean over ranks, and return at once. A rank that has
        no gradient for it (it did not use the layer) contributes zeros."""
        # --- yours
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad /= dist.get_world_size()
        self.works.append(dist.all_reduce(parameter.grad, async_op=True))
        # --- end

    def finish(self) -> None:
        """Launch what is left, wait for all, and be ready for the next step. Afterwards every
        trained parameter has its mean gradient; if no rank has used it, that is zero."""
        # --- yours
        while self.queue:
            self.launch(self.queue.popleft())
        for work in self.works:
            work.wait()
        self.queue = deque(self.trained)
        self.there = set()
        self.works = []
        # --- end


# Live: torchrun --standalone --nproc-per-node=2 answers/05_data_parallel_hooks.py


def main() -> None:
    """Print the time of a step, alone and data-parallel, and how far its gradient is from the
    mean over ranks."""
    from course.live import joined, largest, milliseconds, say

    with joined() as device:
        width = 4096 if device.type == "cuda" else 256
        torch.manual_seed(0)
        layers = [nn.Linear(width + k, width + k + 1) for k in range(6)]
        alone = nn.Sequential(*layers).to(device)
        start = copy.deepcopy(alone)
        for parameter in start.parameters():
            parameter.data += dist.get_rank()  # rank 0's weights are to be everywhere
        together = DataParallel(start)
        x = torch.randn(width, width, device=device) + dist.get_rank()

        def step(model: nn.Module) -> None:
            model.zero_grad()
            model(x).square().mean().backward()
            if model is together:
                model.finish()

        times = [milliseconds(lambda m=m: step(m), device) for m in (alone, together)]
        off = 0.0
        for one, other in zip(alone.parameters(), together.parameters(), strict=True):
            dist.all_reduce(one.grad)
            mean = one.grad / dist.get_world_size()
            off = max(off, largest((other.grad - mean).norm() / mean.norm(), device))
        say(
            f"{dist.get_world_size()} ranks on {device.type}: a step takes {times[0]:.2f} ms alone,"
        )
        say(f"{times[1]:.2f} ms together; gradients are {off:.1g} of their length from the mean")


if __name__ == "__main__":
    main()
