"""Grader of 22: gradients, random numbers, what is saved, how often the module computes."""

import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from course.grading import Wrong, expect, grade, same

D = 6
HIDDEN = 40
B = 5
BLOCKS = 4
CHECKPOINT = ("torch.utils.checkpoint.checkpoint",)
CHECKPOINT += ("torch.utils.checkpoint.check_backward_validity",)  # CheckpointFunction calls it


class Block(nn.Module):
    """Linear layers around dropout; masked, scaled by a number and shifted by a tensor."""

    def __init__(self, calls: list) -> None:
        super().__init__()
        self.up = nn.Linear(D, HIDDEN)
        self.down = nn.Linear(HIDDEN, D)
        self.calls = calls

    def forward(
        self, x: torch.Tensor, scale: float = 1.0, shift: object = None, mask: object = None
    ) -> torch.Tensor:
        self.calls.append(torch.is_grad_enabled())
        h = nn.functional.dropout(torch.tanh(self.up(x)), 0.3, self.training)
        h = h if mask is None else h * mask
        y = x + scale * self.down(h)
        return y if shift is None else y + shift.square()


def blocks_of(seed: int, calls: list) -> nn.ModuleList:
    """One of them is in the mode for evaluation, as a frozen part of a model may be."""
    torch.manual_seed(seed)
    blocks = nn.ModuleList(Block(calls) for _ in range(BLOCKS)).double()
    blocks[1].eval()
    return blocks


def data(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(B, D, generator=generator, dtype=torch.float64)
    shift = torch.randn(D, generator=generator, dtype=torch.float64)
    return x, shift


def step(blocks: nn.ModuleList, call: object, seed: int, needs: bool) -> dict[str, torch.Tensor]:
    """A forward and a backward with two micro-batches; the gradients, outputs, random numbers.

    Block 3 is called by a function, which has no parameters.
    """
    found = {}
    x, shift = data(seed)
    x.requires_grad_(needs)
    shift.requires_grad_(needs)
    mask = torch.arange(HIDDEN) % 3 > 0
    torch.manual_seed(seed + 1)
    for micro_batch in range(2):
        y = x
        for k, block in enumerate(blocks):
            module = block.forward if k == 3 else block
            y = call(module, y, 0.5 + k, shift if k % 2 else None, mask)
        found[f"output {micro_batch}"] = y.detach().clone()
        found[f"random numbers after forward {micro_batch}"] = torch.rand(3)
        y.square().sum().backward()
        found[f"random numbers after backward {micro_batch}"] = torch.rand(3)
        if blocks[1].training:
            raise Wrong("backward has changed a module's mode: compute it in the one that it has")
    for name, p in blocks.named_parameters():
        found[f"gradient of {name}"] = p.grad
    if needs:
        found["gradient of x"] = x.grad
        found["gradient of shift"] = shift.grad
    return found


def plainly(block: nn.Module, *inputs: object) -> torch.Tensor:
    return block(*inputs)


def compare(answer, wire, seed: int, needs: bool) -> tuple:
    got = step(blocks_of(seed, []), answer.recompute, seed, needs)
    due = step(blocks_of(seed, []), plainly, seed, needs)
    return {name: (got[name], due[name]) for name in due}


@pytest.mark.parametrize("needs", [True, False])
def test_gradients(answer: Path, seed: int, needs: bool) -> None:
    """Outputs and gradients, to the bit; inputs that require gradients: {needs}"""
    (pairs,) = grade(answer, compare, 1, seed, needs, group=False, forbid=CHECKPOINT)
    for name, (got, due) in pairs.items():
        if name.startswith("random"):
            continue
        if got is None:
            raise Wrong(f"{name}: expected a tensor, got None")
        same(got, due, name)


def test_random_numbers(answer: Path, seed: int) -> None:
    """The generator is where it would be without recomputation"""
    (pairs,) = grade(answer, compare, 1, seed, True, group=False, forbid=CHECKPOINT)
    for name, (got, due) in pairs.items():
        if name.startswith("random"):
            same(got, due, name)


def weigh(places: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a * b.square()).flatten()[places].sum().abs()


def called(answer, wire, seed: int) -> dict[str, tuple]:
    """By name, the gradient of a tensor that is given, and what it is without recomputation."""
    x, shift = data(seed)
    places = torch.arange(0, B * D, 2)
    found = {}
    cases = ("one tensor twice", "transposed", "the second alone", "backward twice")
    for case in (*cases, "complex numbers"):
        gradients = []
        for call in (answer.recompute, plainly):
            a = torch.complex(x, x.flip(0)) if case == "complex numbers" else x.clone()
            a.requires_grad_(case != "the second alone")
            b = a if case == "one tensor twice" else shift.repeat(B, 1).requires_grad_()
            y = call(weigh, places, *((a.T, b.T) if case == "transposed" else (a, b)))
            y.backward(retain_graph=True)
            if case == "backward twice":
                y.backward()
            gradients.append((a.grad, b.grad))
        for name, got, due in zip("ab", *gradients, strict=True):
            if due is not None:
                found[f"{case}: gradient of {name}"] = (got, due)
    return found


def test_inputs(answer: Path, seed: int) -> None:
    """Tensors given twice, transposed, after others, complex; two backward passes for one output"""
    (pairs,) = grade(answer, called, 1, seed, group=False, forbid=CHECKPOINT)
    for name, (got, due) in pairs.items():
        same(got, due, name)


def count(answer, wire, seed: int) -> tuple[list[bool], list[bool], list[bool]]:
    calls = []
    blocks = blocks_of(seed, calls)
    x, _ = data(seed)
    y = x
    for block in blocks:
        y = answer.recompute(block, y)
    forward = list(calls)
    calls.clear()
    y.sum().backward()
    backward = list(calls)
    calls.clear()
    with torch.no_grad():
        answer.recompute(blocks[0], x)
    return forward, backward, list(calls)


def test_calls(answer: Path, seed: int) -> None:
    """Each module computes once in forward, without a graph, and once in backward, with one"""
    ((forward, backward, without),) = grade(answer, count, 1, seed, group=False, forbid=CHECKPOINT)
    expect(len(forward), BLOCKS, "calls of the blocks in forward")
    expect(sum(forward), 0, "of these, calls that build a graph")
    expect(len(backward), BLOCKS, "calls of the blocks in backward")
    expect(sum(backward), BLOCKS, "of these, calls that build a graph")
    expect(len(without), 1, "calls of a block under no_grad")


def keep(answer, wire, seed: int) -> tuple[int, int, bool]:
    """Elements saved for backward by the whole step, parameters left out: ours and the plain; and
    whether the output of ours lives on when nobody holds it."""
    counts = []
    for call in (answer.recompute, plainly):
        blocks = blocks_of(seed, [])
        own = {p.untyped_storage().data_ptr() for p in blocks.parameters()}
        saved = []
        x, shift = data(seed)
        x.requires_grad_()

        def pack(tensor: torch.Tensor, saved: list = saved) -> torch.Tensor:
            saved.append((tensor.untyped_storage().data_ptr(), tensor))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = x
            for k, block in enumerate(blocks):
                y = call(block, y, 2.0, shift if k % 2 else None)
        storages = {at: t.untyped_storage().nbytes() // 8 for at, t in saved if at not in own}
        counts.append(sum(storages.values()))
        y.sum().backward()
    y = answer.recompute(blocks[0], x)
    output = weakref.ref(y)
    del y
    return *counts, output() is not None


def test_saved(answer: Path, seed: int) -> None:
    """What is saved for backward is each module's inputs"""
    ((got, plain, lives),) = grade(answer, keep, 1, seed, group=False, forbid=CHECKPOINT)
    due = BLOCKS * B * D + D
    if got > due:
        raise Wrong(
            f"{got:,} elements are saved for backward; the inputs are {due:,} "
            f"(without recomputation: {plain:,})"
        )
    expect(got, due, "elements of inputs saved by ctx.save_for_backward")
    if lives:
        raise Wrong("the output lives on when the caller holds it no more: keep it nowhere")


def spoil(answer, wire, seed: int) -> dict[str, str]:
    """An input is overwritten between forward and backward; of each, what backward says."""
    (block, *_) = blocks_of(seed, [])
    said = {}
    for name in ("x", "shift", "mask"):
        x, shift = data(seed)
        given = {"x": x, "shift": shift, "mask": torch.arange(HIDDEN) % 3 > 0}
        y = answer.recompute(block, x, 2.0, shift, given["mask"])
        given[name].zero_()
        said[name] = ""
        try:
            y.sum().backward()
        except RuntimeError as error:
            said[name] = str(error)
    return said


def test_written_into(answer: Path, seed: int) -> None:
    """An input that is written into before backward is noticed"""
    (told,) = grade(answer, spoil, 1, seed, group=False, forbid=CHECKPOINT)
    for name, said in told.items():
        if "modified by an inplace operation" not in said:
            raise Wrong(
                f"{name} was overwritten between forward and backward, and gradients came that "
                "are wrong: ctx.save_for_backward would have noticed"
            )
