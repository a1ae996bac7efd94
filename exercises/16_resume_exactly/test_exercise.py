"""Grader of 16: batches by step; the bits of an uninterrupted run; a plain state, and a copy."""

import io
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from course.grading import Wrong, expect, grade, same

LENGTH = 53  # divided by no number of ranks
EVEN = 54  # 1, 2 and 3 ranks have whole batches of 9, and nothing is left out
STEPS = 20
BATCH = 9  # 2 ranks have shares of 27 and 26: one rank alone could fill a third batch
RANDOM = 5056  # bytes of the state of torch's generator


def training(answer, seed: int, batch: int = 4, length: int = LENGTH):
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(length, 6, generator=generator)
    targets = torch.randint(3, (length,), generator=generator)
    return answer.Training(data, targets, seed, batch)


def batches(answer, wire, seed: int, length: int) -> list[torch.Tensor]:
    """This rank's batches, asked for once in order and once from the last to the first."""
    it = training(answer, seed, BATCH, length)
    before = torch.get_rng_state()
    drawn = []
    for it.step in range(STEPS):
        drawn.append(it.indices())
    for it.step in reversed(range(STEPS)):
        same(it.indices(), drawn[it.step], f"batch of step {it.step}, asked for after later ones")
    if not torch.equal(torch.get_rng_state(), before):
        raise Wrong("torch's global random numbers have moved: draw from a Generator of your own")
    wire.only()
    return drawn


@pytest.mark.parametrize("length", [LENGTH, EVEN])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_batches(answer: Path, seed: int, n: int, length: int) -> None:
    """Each step's batch of {length} samples, by its number alone, on {n} ranks"""
    per_epoch = length // n // BATCH
    for rank, drawn in enumerate(grade(answer, batches, n, seed, length)):
        for step, got in enumerate(drawn):
            epoch, done = divmod(step, per_epoch)
            order = torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch))
            due = order[rank::n][BATCH * done :][:BATCH]
            where = f"rank {rank}, step {step}, which is step {done} of epoch {epoch}"
            same(got, due, f"{where}: samples")


def weights(it) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in it.model.parameters()]).clone()


def stopped(answer, wire, seed: int, at: int) -> tuple:
    """Weights after STEPS, uninterrupted and not; calls that state() and load() made; bytes of
    the state's tensors."""
    whole = training(answer, seed)
    whole.train(STEPS)
    first = training(answer, seed)
    first.state()  # nobody asks for it: the one that counts is taken later
    first.train(at)
    wire.events.clear()
    file = io.BytesIO()
    torch.save(first.state(), file)
    calls = wire.calls()

    def state() -> dict:
        try:
            return torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        except Exception as error:
            said = str(error).strip().partition("\n")[0]
            raise Wrong(f"torch.load(weights_only=True) refuses the state: {said}") from None

    torch.rand(11)  # another process has drawn other numbers by now
    second = training(answer, seed)
    second.train(3)
    wire.events.clear()
    second.load(state())
    calls += wire.calls()
    second.train(2)
    second.load(state())  # once more: it goes back to where it was
    second.train(STEPS - at)
    held = {}
    for leaf in tree_leaves(state()):
        if isinstance(leaf, torch.Tensor):
            held[leaf.untyped_storage().data_ptr()] = leaf.untyped_storage().nbytes()
        else:
            held[len(held)] = len(leaf) if isinstance(leaf, str | bytes) else 8
    return weights(whole), weights(second), [event.op for event in calls], sum(held.values())


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("at", [0, 5, 13])
def test_resume(answer: Path, seed: int, n: int, at: int) -> None:
    """Stopped after {at} of 20 steps, it ends with the same bits, on {n} ranks"""
    for rank, (whole, resumed, calls, _) in enumerate(grade(answer, stopped, n, seed, at)):
        expect(calls, [], f"rank {rank}: collectives of state() and load()")
        where = f"rank {rank}, stopped after step {at} of {STEPS}"
        same(resumed, whole, f"{where}: weights")


def test_size(answer: Path, seed: int) -> None:
    """The state holds what is needed, and no more"""
    for rank, (whole, _, _, nbytes) in enumerate(grade(answer, stopped, 2, seed, 5)):
        most = 2 * whole.nbytes + RANDOM + 400  # weights, momentum, a few values more
        if nbytes > most:
            raise Wrong(f"rank {rank}: the state holds {nbytes} bytes, at most {most} are needed")


def copies(answer, wire, seed: int) -> None:
    first = training(answer, seed)
    first.train(5)
    state = first.state()
    before = written(state)
    first.train(2)
    if written(state) != before:
        raise Wrong("state() has changed while training went on: it is to be a copy")
    second = training(answer, seed)
    second.load(state)
    second.train(2)
    if written(state) != before:
        raise Wrong("training went on after load(state), and has changed the state")
    dist.barrier()


def written(state: dict) -> list:
    """Every value of a state, in order."""
    found = []
    for key, value in state.items():
        if isinstance(value, dict):
            found += written(value)
        else:
            found.append((key, value.tolist() if isinstance(value, torch.Tensor) else str(value)))
    return found


def test_copies(answer: Path, seed: int) -> None:
    """Neither state() nor load() shares memory with the training"""
    grade(answer, copies, 2, seed)
