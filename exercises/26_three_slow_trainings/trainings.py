"""Three trainings that are right, and slow. Fix them in answers/26_three_slow_trainings.py.

    python exercises/26_three_slow_trainings/trainings.py 1
    python exercises/26_three_slow_trainings/trainings.py 1 answers/26_three_slow_trainings.py

runs training 1 on 3 ranks under torch's profiler and tells where each rank's step goes; with a
file, that file's training 1 as well.
"""

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import profile, record_function

Pair = tuple[Tensor, Tensor]
RATE = 0.1


def step_together(model: nn.Module, x_BD: Tensor, y_BC: Tensor) -> None:
    """One step of data-parallel SGD, as it should be: all gradients in one all-reduce."""
    model.zero_grad()
    (model(x_BD) - y_BC).square().mean().backward()
    parameters = list(model.parameters())
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    gradients = flat.split([parameter.numel() for parameter in parameters])
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.data -= RATE * gradient.view_as(parameter)


def training_1(model: nn.Module, samples: Sequence[Pair], steps: int, batch: int) -> None:
    """Each step takes the next `batch` samples; every rank computes an equal share of them."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    for step in range(steps):
        pairs = [samples[i] for i in range(step * batch, (step + 1) * batch)]
        x_BD = torch.stack([x for x, _ in pairs]).chunk(n)[rank]
        y_BC = torch.stack([y for _, y in pairs]).chunk(n)[rank]
        step_together(model, x_BD, y_BC)


def training_2(model: nn.Module, batches: list[Pair]) -> list[float]:
    """SGD on each rank's own batches; the loss of each step, mean over all ranks."""
    n = dist.get_world_size()
    losses = []
    for x_BD, y_BC in batches:
        model.zero_grad()
        loss = (model(x_BD) - y_BC).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            dist.barrier()  # to be safe
            parameter.data -= RATE * parameter.grad / n
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / n)
    return losses


def training_3(model: nn.Module, batches: list[Pair], validation: Pair) -> list[int]:
    """SGD on each rank's own batches; after each step, how many validation samples are right."""
    x_VD, labels_V = validation
    right = []
    for x_BD, y_BC in batches:
        step_together(model, x_BD, y_BC)
        hits = torch.zeros((), dtype=torch.int64)
        if dist.get_rank() == 0:
            with torch.no_grad():
                hits = (model(x_VD).argmax(1) == labels_V).sum()
        dist.broadcast(hits, 0)
        right.append(hits.item())
    return right


# Looking at them


class Samples(Sequence):
    """Samples of which each takes 2 ms to read, as a small image does."""

    def __init__(self, x_ND: Tensor, y_NC: Tensor) -> None:
        self.x_ND = x_ND
        self.y_NC = y_NC

    def __len__(self) -> int:
        return len(self.x_ND)

    def __getitem__(self, index: int) -> Pair:
        with record_function("reading"):
            time.sleep(0.002)
            return self.x_ND[index], self.y_NC[index]


STEPS = 6


def work_for(training: int) -> tuple:
    """A model, and what the training takes besides; batches differ between ranks."""
    torch.manual_seed(0)
    D, hidden, layers, C = 32, 64, 12, 10
    middle = [nn.Linear(hidden, hidden) for _ in range(layers)]
    model = nn.Sequential(nn.Linear(D, hidden), *middle, nn.Tanh(), nn.Linear(hidden, C))
    if training == 1:
        return model, Samples(torch.rand(STEPS * 12, D), torch.rand(STEPS * 12, C)), STEPS, 12
    validation = torch.rand(6000, D), torch.randint(C, (6000,))
    torch.manual_seed(1 + dist.get_rank())
    batches = [(torch.rand(16, D), torch.rand(16, C)) for _ in range(STEPS)]
    return (model, batches) if training == 2 else (model, batches, validation)


KINDS = {  # of a column: how its events' names begin
    "reading": "reading",
    "computing": "aten::",
    "all_reduce": "gloo:all_reduce",
    "broadcast": "gloo:broadcast",
    "barrier": "gloo:barrier",
}


def look(training: int, file: str) -> tuple[float, dict[str, float], int]:
    """On a rank: ms of a step, ms of each kind in it, and how many collectives it makes."""
    os.environ["KINETO_LOG_LEVEL"] = "99"  # else the profiler tells when it starts and stops
    specification = importlib.util.spec_from_file_location("trainings", file)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    train = getattr(module, f"training_{training}")
    arguments = work_for(training)
    dist.barrier()
    with profile() as profiler:
        start = time.perf_counter()
        train(*arguments)
        took = time.perf_counter() - start
    us = dict.fromkeys(KINDS, 0.0)
    collectives = 0
    for event in profiler.events():
        for kind, begins in KINDS.items():
            if event.name.startswith(begins):
                alone = kind == "computing"  # aten's operators call others: each counts its own
                us[kind] += event.self_cpu_time_total if alone else event.time_range.elapsed_us()
        collectives += event.name.startswith("gloo:")
    ms = {kind: us[kind] / 1e3 / STEPS for kind in KINDS}
    return 1e3 * took / STEPS, ms, collectives // STEPS


def show(training: int, file: str, run: Callable) -> None:
    header = "".join(f"{kind:>12}" for kind in KINDS)
    print(f"\ntraining {training} of {Path(file).name}: ms per step")
    print(f"{'':8}{'step':>8}{header}   calls")
    for rank, (ms, kinds, collectives) in enumerate(run(look, 3, training, file)):
        row = "".join(f"{kinds[kind]:12.1f}" for kind in KINDS)
        print(f"rank {rank}  {ms:8.1f}{row}{collectives:8}")


def main() -> None:
    if sys.argv[1:2] not in [[str(training)] for training in (1, 2, 3)]:
        sys.exit(__doc__)
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from course.ranks import run

    for file in (__file__, *sys.argv[2:]):
        show(int(sys.argv[1]), str(Path(file).resolve()), run)


if __name__ == "__main__":
    main()
