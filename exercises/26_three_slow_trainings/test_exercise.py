"""Grader of 26: each training does what it did, and pays for what it needs, and no more."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from course.grading import Reduced, Wrong, expect, grade, same

D, C, RATE, STEPS, BATCH = 6, 3, 0.1, 3, 12
ATOL = 1e-12  # of float64: what the order of a sum may change
on_ranks = pytest.mark.parametrize("n", [1, 2, 4])


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, C)).double()


def numbers(seed: int, *shape: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random, dtype=torch.float64)


def batches_of(seed: int, rank: int) -> list[tuple[Tensor, Tensor]]:
    found = []
    for step in range(STEPS):
        start = seed + 1000 * rank + 10 * step
        found.append((numbers(start, 5, D), numbers(start + 1, 5, C)))
    return found


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train(seed: int, batches: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, float]]:
    """In one process: the parameters and the loss of each step; a batch is all ranks'."""
    model = network(seed)
    told = []
    for x, y in batches:
        model.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        for parameter in model.parameters():
            parameter.data -= RATE * parameter.grad
        told.append((flat(model), loss.item()))
    return told


def joined(seed: int, n: int) -> list[tuple[Tensor, Tensor]]:
    """Each step's batches of n ranks, as one."""
    steps = zip(*(batches_of(seed, rank) for rank in range(n)), strict=True)
    return [tuple(map(torch.cat, zip(*pairs, strict=True))) for pairs in steps]


class Samples(Sequence):
    """Notes who reads what; there are more than the steps take."""

    def __init__(self, seed: int) -> None:
        self.x = numbers(seed, STEPS * BATCH + BATCH, D)
        self.y = numbers(seed + 1, STEPS * BATCH + BATCH, C)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read.append(range(len(self.x))[index])
        return self.x[index], self.y[index]


def used(seed: int) -> nn.Module:
    """The network as given to a training: somebody has left gradients in it."""
    model = network(seed)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


def steps_counted(answer, read: Sequence[int] = ()) -> list[int]:
    """A list that gets longer with each call of the answer's step_together: of how many samples
    have been read by then.
    """
    given = answer.step_together
    made = []

    def step_together(*arguments: object, **named: object) -> None:
        made.append(len(read))
        given(*arguments, **named)

    answer.step_together = step_together
    return made


def expect_steps(rank: int, made: int) -> None:
    expect(made, STEPS, f"rank {rank}: calls of step_together in {STEPS} steps")


def call_1(answer, wire, seed: int) -> tuple:
    model = used(seed)
    samples = Samples(seed)
    made = steps_counted(answer, samples.read)
    answer.training_1(model, samples, STEPS, BATCH)
    return flat(model), samples.read, [event.op for event in wire.calls()], made


@on_ranks
def test_training_1(answer: Path, seed: int, n: int) -> None:
    """Training 1 reads each sample once, and learns the same, on {n} ranks"""
    told = grade(answer, call_1, n, seed)
    samples = Samples(seed)
    whole = list(zip(samples.x.split(BATCH), samples.y.split(BATCH), strict=True))
    due = train(seed, whole[:STEPS])[-1][0]
    for rank, (_, read, calls, _) in enumerate(told):
        expect(len(read), STEPS * BATCH // n, f"rank {rank}: samples that it reads")
        expect(calls, ["all_reduce"] * STEPS, f"rank {rank}: its calls")
    everyone = []
    for _, read, _, _ in told:
        everyone += read
    everyone.sort()
    if everyone != list(range(STEPS * BATCH)):
        twice = sorted({index for index in everyone if everyone.count(index) > 1})
        raise Wrong(f"samples read more than once: {twice}; others are read by nobody")
    for rank, (parameters, _, _, made) in enumerate(told):
        same(parameters, due, f"rank {rank}: parameters", ATOL)
        expect_steps(rank, len(made))
        shares = [(step + 1) * BATCH // n for step in range(STEPS)]
        expect(made, shares, f"rank {rank}: samples read by the time of each step")


def call_2(answer, wire, seed: int) -> tuple:
    model = used(seed)
    losses = answer.training_2(model, batches_of(seed, dist.get_rank()))
    return flat(model), losses, [(event.op, event.nbytes) for event in wire.calls()]


@on_ranks
def test_training_2(answer: Path, seed: int, n: int) -> None:
    """Training 2 calls once a step, and learns the same, on {n} ranks"""
    told = grade(answer, call_2, n, seed)
    due = train(seed, joined(seed, n))
    for rank, (parameters, losses, calls) in enumerate(told):
        same(parameters, due[-1][0], f"rank {rank}: parameters", ATOL)
        expect([type(loss) for loss in losses], [float] * STEPS, f"rank {rank}: types of losses")
        got = torch.tensor(losses, dtype=torch.float64)
        mean = torch.tensor([loss for _, loss in due], dtype=torch.float64)
        same(got, mean, f"rank {rank}: losses", ATOL, {"these are sums": mean * n})
        nbytes = 8 * (due[-1][0].numel() + 1)
        expect(len(calls), STEPS, f"rank {rank}: calls in {STEPS} steps")
        expect(calls, [("all_reduce", nbytes)] * STEPS, f"rank {rank}: calls, with their bytes")


def validation_of(seed: int, V: int, parameters: Tensor) -> tuple[Tensor, Tensor]:
    """With these parameters every other sample is right, and the last one is, if V is odd. With
    those before the first step none is: the right ones are those that it turns.
    """
    pool = numbers(seed + 7, 10_000, D)
    model = network(seed)
    before = model(pool).argmax(1)
    nn.utils.vector_to_parameters(parameters, model.parameters())
    after = model(pool).argmax(1)
    chosen = torch.empty(V, dtype=torch.int64)
    chosen[0::2] = (before != after).nonzero().flatten()[: len(chosen[0::2])]
    chosen[1::2] = (before == after).nonzero().flatten()[: len(chosen[1::2])]
    x = pool[chosen]
    labels = after[chosen]
    labels[1::2] = (labels[1::2] + 1) % C
    return x, labels


def call_3(answer, wire, seed: int, validation: tuple[Tensor, Tensor], training: bool) -> tuple:
    model = used(seed).train(training)
    made = steps_counted(answer)
    with Reduced() as reduced, FlopCounterMode(display=False) as counted:
        right = answer.training_3(model, batches_of(seed, dist.get_rank()), validation)
    calls = [(event.op, event.nbytes) for event in wire.calls()]
    flops = counted.get_total_flops()
    return flat(model), right, flops, calls, model.training, reduced.dtypes, len(made)


def samples_in(flops: int, seed: int) -> float:
    """How many samples went through the model, by the FLOPs of its products: 5 in each step."""
    with FlopCounterMode(display=False) as of_a_step:
        train(seed, batches_of(seed, 0)[:1])
    of_a_sample = 2 * (D * 8 + 8 * C)
    return 5 * STEPS + (flops - STEPS * of_a_step.get_total_flops()) / of_a_sample


@pytest.mark.parametrize(("n", "V"), [(1, 31), (2, 31), (4, 31), (4, 5), (4, 3), (2, 0)])
def test_training_3(answer: Path, seed: int, n: int, V: int) -> None:
    """Training 3 shares the validation of {V} samples, and counts the same, on {n} ranks"""
    due = train(seed, joined(seed, n))
    x, labels = validation_of(seed, V, due[0][0])  # none can be left out unseen after step 1
    given = V != 5  # else it is given in evaluation mode, as in fine-tuning
    told = grade(answer, call_3, n, seed, (x, labels), given)
    hits = []
    model = network(seed)
    for parameters, _ in due:
        nn.utils.vector_to_parameters(parameters, model.parameters())
        hits.append(int((model(x).argmax(1) == labels).sum()))
    most = STEPS * (5 + -(-V // n))
    for rank, (parameters, right, flops, calls, training, dtypes, made) in enumerate(told):
        expect(training, given, f"rank {rank}: model.training at the end, as it was when given")
        rows = samples_in(flops, seed)
        if rows > most:
            told_rows = f"{rows:g} samples through the model, where {most} do"
            raise Wrong(f"rank {rank}: {told_rows}: the others wait for this rank")
        expect(right, hits, f"rank {rank}: right after each step")
        same(parameters, due[-1][0], f"rank {rank}: parameters", ATOL)
        step = [("all_reduce", 8 * parameters.numel()), ("all_reduce", 8)]
        expect(calls, step * STEPS, f"rank {rank}: calls, with their bytes")
        expect(
            dtypes,
            ["torch.float64", "torch.int64"] * STEPS,
            f"rank {rank}: dtypes that are all-reduced",
        )
        expect_steps(rank, made)
