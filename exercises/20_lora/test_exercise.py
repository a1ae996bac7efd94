"""Grader of 20: the start, values, what forward makes, who is adapted, shards, sums, merging."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from course.grading import Largest, Wrong, expect, grade, same

D = 16
ALPHA = 7.0  # no r here divides it
NAMES = ("up", "down")
# Float64, numbers below 10, at most 100 roundings one after the other of sums of up to 32 terms.
ATOL = 100 * 32 * 10 * 2**-53


class Down(nn.Linear):
    """A linear layer is one also if its class is another."""


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up = nn.Linear(D, hidden)
        self.down = Down(hidden, D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Two blocks, linear layers outside them that nobody names, and names that mislead."""

    def __init__(self, seed: int, tied: bool = False, hidden: int = 24) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up_front = nn.Linear(D, D)
        self.blocks = nn.ModuleList(Block(width) for width in (hidden, 32))
        self.step_up = nn.Linear(D, D)
        self.down = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D))  # called so, and not linear
        if tied:
            self.blocks[1].up = self.blocks[0].up
            self.blocks[1].down = self.blocks[0].down
            self.blocks[1].extra = self.blocks[0].up  # nobody names it so
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.step_up(self.up_front(x))
        for block in self.blocks:
            x = block(x)
        return self.down(x).square().mean()


def batch(seed: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return torch.randn(3, D, generator=generator, dtype=torch.float64)


def layer_of(seed: int, bias: bool = True, dtype: torch.dtype = torch.float64) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(40, 48, bias=bias).to(dtype)


def fill(adapter: nn.Module, seed: int) -> None:
    """A and B as after training."""
    generator = torch.Generator().manual_seed(seed + 1)
    for name in ("A", "B"):
        parameter = getattr(adapter, name, None)
        if not isinstance(parameter, nn.Parameter):
            raise Wrong(f"Adapter: self.{name} is no nn.Parameter")
        draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 8
        parameter.data.copy_(draw)


def begin(answer, wire, seed: int, dtype: torch.dtype) -> tuple:
    base = layer_of(seed, dtype=dtype)
    weight = base.weight.detach().clone()
    x = torch.randn(2, 3, 40).to(dtype)
    before = base(x).detach().clone()
    adapter = answer.Adapter(base, 3, ALPHA)
    if adapter.base is not base or not torch.equal(base.weight, weight):
        raise Wrong("Adapter: self.base is to be the layer that was given, as it was")
    told = {}
    for name in ("A", "B"):
        parameter = getattr(adapter, name, None)
        if not isinstance(parameter, nn.Parameter):
            raise Wrong(f"Adapter: self.{name} is no nn.Parameter")
        told[name] = (parameter.detach().clone(), parameter.requires_grad)
    elsewhere = answer.Adapter(nn.Linear(4, 4, device="meta"), 2, ALPHA)
    for name, parameter in elsewhere.named_parameters():
        if parameter.device.type != "meta":
            raise Wrong(f"{name} is on {parameter.device}, its base is not: make it on the base's")
    trained = sorted(name for name, p in adapter.named_parameters() if p.requires_grad)
    other = answer.Adapter(nn.Linear(40, 48).to(dtype), 3, ALPHA)
    alike = torch.equal(adapter.A, other.A)
    return before, adapter(x).detach().clone(), told, trained, alike


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_start(answer: Path, seed: int, dtype: str) -> None:
    """A new adapter changes nothing yet, and can learn: base in {dtype}"""
    due = torch.float64 if dtype == "float64" else torch.float32
    ((before, after, told, trained, alike),) = grade(answer, begin, 1, seed, getattr(torch, dtype))
    for name, shape in (("A", (3, 40)), ("B", (48, 3))):
        value, _ = told[name]
        expect(tuple(value.shape), shape, f"shape of {name}")
        if value.dtype != due:
            raise Wrong(f"{name} with a base in {dtype}: expected {due}, got {value.dtype}")
    if told["A"][0].abs().max() == 0 and told["B"][0].abs().max() == 0:
        raise Wrong("A and B are both zero at first: then neither ever has a gradient")
    same(after, before, "output of a new adapter: that of its base")
    if told["B"][0].abs().max() > 0:
        raise Wrong("B is to be zero at first, and A random")
    if len(told["A"][0].unique()) < 60:
        raise Wrong("A is to be random at first: half of its 120 elements are equal to others")
    if alike:
        raise Wrong("A is to be random at first: two adapters have the same")
    expect(trained, ["A", "B"], "parameters of an adapter that are trained")


def go(answer, wire, seed: int, bias: bool, dtype: torch.dtype) -> tuple:
    base = layer_of(seed, bias, dtype)
    adapter = answer.Adapter(base, 3, ALPHA)
    fill(adapter, seed)
    x = torch.randn(2, 3, 40).to(dtype)
    with Largest([*adapter.parameters(), x]) as largest:
        y = adapter(x)
    others = [("one vector", adapter(x[0, 0]), y[0, 0]), ("rows", adapter(x[0]), y[0])]
    others += [("an x that is transposed", adapter(x.transpose(0, 1)), y.transpose(0, 1))]
    others += [("no rows at all", adapter(x[:0]), y[:0])]
    others = [(name, got.detach().clone(), due.detach().clone()) for name, got, due in others]
    A = adapter.A.detach().double()
    B = adapter.B.detach().double()
    plain = torch.nn.functional.linear(x.double(), base.weight.double())
    if bias:
        plain = plain + base.bias.double()
    change = x.double() @ A.T @ B.T
    for p in base.parameters():
        p.data.zero_()
    alone = adapter(x).detach().clone()
    return y.detach().clone(), plain.detach(), change, largest.nbytes, alone, others


@pytest.mark.parametrize("bias", [True, False])
def test_forward(answer: Path, seed: int, bias: bool) -> None:
    """W x + alpha / r B A x, in float64, bias: {bias}"""
    ((y, plain, change, _, _, others),) = grade(answer, go, 1, seed, bias, torch.float64)
    due = plain + ALPHA / 3 * change
    known = {"the factor alpha / r is missing": plain + change}
    known["the factor is alpha, not alpha / r"] = plain + ALPHA * change
    known["it is the base's alone"] = plain
    known["the base's part is missing"] = ALPHA / 3 * change
    same(y, due, "output", ATOL, known)
    for name, got, expected in others:
        same(got, expected, f"output of {name}", ATOL)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_made(answer: Path, seed: int, dtype: str) -> None:
    """No tensor as large as W is made in forward, base in {dtype}"""
    base = getattr(torch, dtype)
    ((_, _, _, most, _, _),) = grade(answer, go, 1, seed, True, base)
    whole = 40 * 48 * base.itemsize
    if most >= whole:
        raise Wrong(
            f"forward makes a tensor of {most:,} bytes, where W has {whole:,}: multiply x by A "
            "first, and then by B, and let the base compute its own part"
        )


def test_bfloat16(answer: Path, seed: int) -> None:
    """A base in bfloat16: output in bfloat16, the change computed in float32"""
    ((y, plain, change, _, alone, _),) = grade(answer, go, 1, seed, True, torch.bfloat16)
    due = plain + ALPHA / 3 * change
    if y.dtype != torch.bfloat16:
        raise Wrong(f"output with a base in bfloat16: expected bfloat16, got {y.dtype}")
    # The base's output, the change and their sum are each rounded to 8 bits, half a gap of 2**-8.
    slack = 3 * 2**-8 * max(due.abs().max(), plain.abs().max(), change.abs().max() * 2).item()
    same(y.double(), due, "output, of a base in bfloat16", slack)
    off = (alone != (ALPHA / 3 * change).bfloat16()).sum().item()
    if off > 4:  # float32 sums in another order may fall on the other side of a middle
        told = f"{off} of {change.numel()} elements differ from the change in float32, rounded once"
        raise Wrong(f"output, of a base of zeros in bfloat16: {told}")


def place(answer, wire, seed: int, tied: bool) -> tuple:
    model = Model(seed, tied)
    whole = Model(seed, tied)
    model.front = nn.ModuleDict({"up": nn.Linear(D, D).double()})  # in no block
    got = answer.adapt(model, NAMES, 2, ALPHA)
    if got is not model:
        raise Wrong(f"adapt: expected the model that was given, got {type(got).__name__}")
    adapted = []
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, answer.Adapter):
            adapted.append(name)
    trained = sorted(name for name, p in model.named_parameters() if p.requires_grad)
    x = batch(seed, 0)
    losses = model(x).detach().clone(), whole(x).detach().clone()
    for adapter in [m for m in model.modules() if isinstance(m, answer.Adapter)][:1]:
        fill(adapter, seed)
        change = (adapter(x) - adapter.base(x)).detach()
        due = ALPHA / 2 * x @ adapter.A.detach().T @ adapter.B.detach().T
        same(change, due, f"change by an adapter that adapt made, r = 2, alpha = {ALPHA}", ATOL)
    return adapted, trained, *losses


@pytest.mark.parametrize("tied", [False, True])
def test_places(answer: Path, seed: int, tied: bool) -> None:
    """Who is adapted, and what is trained, with layers in two places: {tied}"""
    ((adapted, trained, got, due),) = grade(answer, place, 1, seed, tied)
    where = ["front.up", "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]
    expect(sorted(adapted), sorted(where), "places of the adapters")
    if tied:
        where = where[:3]
    due_trained = sorted([f"{name}.A" for name in where] + [f"{name}.B" for name in where])
    extra = sorted(set(trained) - set(due_trained))
    if tied and extra:
        raise Wrong(f"a layer that is held in two places gets one adapter; trained too: {extra}")
    if extra:
        raise Wrong(f"only A and B are to be trained; {', '.join(extra)} would be, too")
    missing = sorted(set(due_trained) - set(trained))
    if missing:
        raise Wrong(f"not trained: {', '.join(missing)}")
    same(got, due, "loss of the model with new adapters", 0.0)


def two_names(answer, wire) -> list[bool]:
    """Of a module that holds one layer under both names: is each an adapter, and the same?"""
    layer = nn.Linear(D, D)
    model = answer.adapt(nn.ModuleDict({"up": layer, "down": layer}), NAMES, 2, ALPHA)
    both = [model["up"], model["down"]]
    return [isinstance(one, answer.Adapter) for one in both] + [both[0] is both[1]]


def test_two_names(answer: Path) -> None:
    """A layer that one module holds under two names"""
    (told,) = grade(answer, two_names, 1)
    expect(told, [True, True, True], "is the first an adapter, the second, are they the same one")


def prepared(answer, seed: int, r: int, hidden: int) -> nn.Module:
    model = answer.adapt(Model(seed, hidden=hidden), NAMES, r, ALPHA)
    for k, module in enumerate(m for m in model.modules() if isinstance(m, answer.Adapter)):
        fill(module, seed + k)
    return model


def step(answer, wire, seed: int, r: int, hidden: int) -> tuple:
    """A step of the sharded model, and of the whole one on all batches; of each, its gradients."""
    n = dist.get_world_size()
    rank = dist.get_rank()
    whole = prepared(answer, seed, r, hidden)
    sum(whole(batch(seed, other)) / n for other in range(n)).backward()
    adapted = prepared(answer, seed, r, hidden)
    model = answer.shard(adapted)
    if model is not adapted:
        raise Wrong(f"shard: expected the model that was given, got {type(model).__name__}")
    unsharded = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    before = len(wire.events)
    model(batch(seed, rank)).backward()
    calls = [(e.op, e.nbytes // 8) for e in wire.calls()[before:]]
    grads = {}
    frozen = []
    for (name, p), due in zip(model.named_parameters(), whole.parameters(), strict=True):
        if not p.requires_grad and p.grad is not None:
            frozen.append(name)
        elif p.requires_grad:
            got = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            grads[name] = (got, due.grad)
    trained = sum(p.numel() for p in whole.parameters() if p.requires_grad)
    return unsharded, frozen, grads, calls, trained


SIZES = [(2, 2, 24), (4, 2, 24)]  # n divides all matrices' rows; it does not those of A
SIZES += [(4, 6, 24), (2, 3, 24)]  # nor here, where A has more rows than there are ranks
SIZES += [(4, 4, 18)]  # it does not divide those of one B


@pytest.mark.parametrize(("n", "r", "hidden"), SIZES)
def test_sharded(answer: Path, seed: int, n: int, r: int, hidden: int) -> None:
    """Shards, gradients of one process, who sends what: {n} ranks, r = {r}, a layer of {hidden}"""
    for rank, result in enumerate(grade(answer, step, n, seed, r, hidden)):
        unsharded, frozen, grads, calls, trained = result
        told = f"rank {rank}"
        if unsharded:
            raise Wrong(f"{told}: whole on every rank, in no unit: {', '.join(unsharded[:4])}")
        expect(frozen, [], f"{told}: frozen parameters with a gradient")
        for name, (got, due) in grads.items():
            same(got, due, f"{told}: gradient of {name}", ATOL, {"this is the sum": n * due})
        scatters = [elements for op, elements in calls if op == "reduce_scatter"]
        gathers = [elements for op, elements in calls if op == "all_gather"]
        expect(len(scatters), 2, f"{told}: reduce-scatters, one per block")
        if sum(scatters) > trained:
            more = f"{sum(scatters):,} elements, of which {sum(scatters) - trained:,} are padding"
            sizes = f"r = {r}, a layer of {hidden}, {n} ranks"
            raise Wrong(f"{told}: reduce-scattered {more} ({sizes})")
        expect(sum(scatters), trained, f"{told}: elements reduce-scattered")
        expect(len(gathers), 5, f"{told}: all-gathers, twice per block and once for the rest")


def merge(answer, wire, seed: int, dtype: torch.dtype) -> tuple:
    base = layer_of(seed, dtype=dtype)
    adapter = answer.Adapter(base, 3, ALPHA)
    fill(adapter, seed)
    if dtype == torch.bfloat16:
        adapter.B.data /= 32  # a change of some gaps of bfloat16
    weight = base.weight
    W = base.weight.detach().clone()
    A = adapter.A.detach().clone()
    B = adapter.B.detach().clone()
    merged = adapter.merged()
    if merged is not base:
        raise Wrong("merged: expected the base itself, its weight changed")
    if base.weight is not weight:
        raise Wrong("merged: the base has another weight now: write into the one that it has")
    return merged.weight.detach().clone(), W, A, B


def test_merged(answer: Path, seed: int) -> None:
    """The merged weight, in float64"""
    ((got, W, A, B),) = grade(answer, merge, 1, seed, torch.float64)
    change = B @ A
    known = {"the factor alpha / r is missing": W + change, "the change is missing": W}
    same(got, W + ALPHA / 3 * change, "merged weight", ATOL, known)


def test_merged_in_bfloat16(answer: Path, seed: int) -> None:
    """Merged into bfloat16: rounded once"""
    ((got, W, A, B),) = grade(answer, merge, 1, seed, torch.bfloat16)
    change = ALPHA / 3 * B @ A
    due = (W.float() + change).bfloat16()
    if got.dtype != torch.bfloat16:
        raise Wrong(f"merged weight of a base in bfloat16: expected bfloat16, got {got.dtype}")
    twice = W + change.bfloat16()
    off = (got != due).sum().item()
    if off > 4 and not torch.equal(due, twice) and (got != twice).sum() < off:
        raise Wrong(
            f"merged weight: {off} elements differ from W + change rounded once: the change was "
            "rounded to bfloat16 before it was added"
        )
    if off > 4:  # float32 sums in another order may fall on the other side of a middle
        raise Wrong(f"merged weight: {off} elements differ from W + change rounded once")
