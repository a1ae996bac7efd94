"""Grader of 10: output and gradients of one process, two all-reduces, an n-th of the weights."""

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef

from course.grading import Wrong, expect, grade, same

B, T, D = 2, 3, 5
NAMES = {"w1": 0, "b1": 0, "w2": 1, "b2": None}  # cut along which dimension
FORBIDDEN = [f"torch.distributed.tensor.parallel{m}.parallelize_module" for m in ("", ".api")]
# Float64, numbers below 10. A result is two sums in a row, of at most 20 terms each, and one
# backward, all in another order than one process's: 3 x 20 additions of sums below 200.
ATOL = 3 * 20 * 200 * 2**-53


def whole(seed: int, H: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """w1, b1, w2, b2, x, y's gradient: the same on every rank."""
    torch.manual_seed(100 * seed + H)
    shapes = (H, D), (H,), (D, H), (D,), (B, T, D), (B, T, D)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def oracle(seed: int, H: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """y, and the gradients of w1, b1, w2, b2, x, from one process."""
    *given, grad = whole(seed, H)
    w1, b1, w2, b2, x = (t.requires_grad_() for t in given)
    y = F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)
    return y.detach(), list(torch.autograd.grad(y, given, grad))


def mistaken(seed: int, H: int, n: int) -> dict[str, torch.Tensor]:
    """What known mistakes make of y."""
    w1, b1, w2, b2, x, _ = whole(seed, H)
    h = F.linear(x, w1, b1)
    y = F.linear(F.gelu(h), w2, b2)
    tanh = F.linear(F.gelu(h, approximate="tanh"), w2, b2)
    return {
        f"y has b2 in it {n} times: it is added before the sum": y + (n - 1) * b2,
        "y is that of the tanh approximation of gelu; the exact one is asked for": tanh,
        "y is that of relu; gelu is asked for": F.linear(F.relu(h), w2, b2),
    }


def parts(tensor: torch.Tensor, dim: int | None, n: int) -> list[torch.Tensor]:
    return [tensor] * n if dim is None else list(tensor.tensor_split(n, dim))


def step(
    answer, wire, seed: int, H: int, dtype: torch.dtype = torch.float64, asks: bool = True
) -> tuple:
    """One step; returns y, x's gradient, the parameters' gradients, and what was sent when."""
    *weights, x, grad = given = whole(seed, H, dtype)
    model = answer.ParallelMLP(*weights)
    wire.note("forward")
    y = model(x.requires_grad_(asks))
    if not isinstance(y, torch.Tensor) or not y.requires_grad:
        raise Wrong(f"forward: expected a tensor with a way back to the weights, got {y!r}"[:200])
    y_seen = y.detach().clone()
    wire.note("backward")
    y.backward(grad)
    wire.only("all_reduce")
    changed = [not a.equal(b) for a, b in zip(given, whole(seed, H, dtype), strict=True)]
    if any(changed):
        names = [*NAMES, "x", "y's gradient"]
        raise Wrong(f"{names[changed.index(True)]} was changed; it is the caller's")
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return y_seen, x.grad, grads, wire.events


def build(answer, wire, seed: int, sizes: list[int]) -> list[tuple]:
    """For each H: the parameters, which are views of more, which are the caller's, bytes alive with
    the whole ones gone."""
    found = []
    for H in sizes:
        gc.collect()
        gc.freeze()  # from here on, get_objects() lists what is new
        given = whole(seed, H)[:4]
        theirs = {t.data_ptr() for t in given}
        model = answer.ParallelMLP(*given)
        del given
        gc.collect()
        tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
        storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}
        mine = dict(model.named_parameters())
        views = [name for name, p in mine.items() if p.untyped_storage().nbytes() > p.nbytes]
        shared = [name for name, p in mine.items() if p.data_ptr() in theirs]
        found.append(({name: p.detach() for name, p in mine.items()}, views, shared, storages))
    return found


@pytest.mark.parametrize("n", [2, 3, 1])
def test_parts(answer: Path, seed: int, n: int) -> None:
    """A rank keeps its n-th of the weights and no more, on {n} ranks"""
    sizes = [12, 10, 2]
    for rank, found in enumerate(grade(answer, build, n, seed, sizes, forbid=FORBIDDEN)):
        for H, (mine, views, shared, storages) in zip(sizes, found, strict=True):
            where = f"H = {H}, rank {rank}"
            expect(sorted(mine), sorted(NAMES), f"{where}: names of the parameters")
            for (name, dim), tensor in zip(NAMES.items(), whole(seed, H), strict=False):
                same(mine[name], parts(tensor, dim, n)[rank], f"{where}: {name}")
            if views:
                raise Wrong(f"{where}: {views[0]} is a view, which keeps the whole tensor alive")
            if shared:
                raise Wrong(f"{where}: {shared[0]} is the caller's tensor itself; make a copy")
            due = sum(tensor.nbytes for tensor in mine.values())
            expect(sum(storages.values()), due, f"{where}: bytes kept for w1, b1, w2 and b2")


def check_handed(answer) -> None:
    """Refuse an answer that changes a tensor that one of the two functions was handed."""
    for name in "Enter", "Leave":
        function = getattr(answer, name, None)
        if function is None:
            continue
        x = torch.randn(B, T, D, requires_grad=True)
        grad = torch.randn(B, T, D)
        x_before = x.detach().clone()
        grad_before = grad.clone()
        y = function.apply(x)
        if not x.detach().equal(x_before):
            raise Wrong(f"the tensor that {name} was handed was changed; it is the caller's")
        y.backward(grad)
        if not grad.equal(grad_before):
            raise Wrong(f"the gradient that {name} was handed was changed; it is the caller's")


def steps(answer, wire, seed: int, sizes: list[int]) -> list[tuple]:
    check_handed(answer)
    return [step(answer, wire, seed, H) for H in sizes]


@pytest.mark.parametrize("n", [2, 3, 1])
def test_values(answer: Path, seed: int, n: int) -> None:
    """One process's output and gradients, {n} ranks, any H"""
    sizes = [12, 10, 2]
    of_ranks = grade(answer, steps, n, seed, sizes, forbid=FORBIDDEN)
    for H, *got in zip(sizes, *of_ranks, strict=True):
        check_values(seed, n, H, got)


def ramp(factor: int) -> torch.Tensor:
    return factor * torch.arange(B * T * D, dtype=torch.float64).view(B, T, D)


def alone(answer, wire) -> dict[str, tuple]:
    """What Enter and Leave make of a tensor, and of a gradient, that differ between ranks."""
    rank = dist.get_rank()
    found = {}
    for name in ("Enter", "Leave"):
        x = ramp(rank + 1).requires_grad_()
        y = getattr(answer, name).apply(x)
        y.backward(ramp(rank + 10))
        found[name] = y.detach(), x.grad
    return found


def test_enter_and_leave(answer: Path) -> None:
    """Enter and Leave, each alone, on 3 ranks"""
    for rank, found in enumerate(grade(answer, alone, 3, forbid=FORBIDDEN)):
        due = {
            "Enter": (ramp(rank + 1), ramp(10 + 11 + 12)),
            "Leave": (ramp(1 + 2 + 3), ramp(rank + 10)),
        }
        for name, ways in due.items():
            for way, expected, got in zip(("forward", "backward"), ways, found[name], strict=True):
                same(got, expected, f"rank {rank}: what {name} returns {way}")


def check_values(seed: int, n: int, H: int, got: list[tuple]) -> None:
    y, (*grads, x_grad) = oracle(seed, H)
    for rank, (y_got, *_) in enumerate(got):
        where = f"H = {H}, rank {rank}"
        for told, wrong in mistaken(seed, H, n).items():
            refuse(y_got, wrong, y, f"{where}: {told}")
        same(y_got, y, f"{where}: y", ATOL)
        same(y_got, got[0][0], f"{where}: y next to rank 0's, to the bit")
    for rank, (_, _, mine, _) in enumerate(got):
        for (name, dim), grad in zip(NAMES.items(), grads, strict=True):
            due = parts(grad, dim, n)[rank]
            what = f"H = {H}, rank {rank}: gradient of {name}"
            told = f"{what} is {n} times too large: Leave has nothing to sum backward"
            refuse(mine[name], n * due, due, told)
            refuse(mine[name], due / n, due, f"{what} is an n-th of what it is to be")
            same(mine[name], due, what, ATOL)
    summands = [x_got for _, x_got, *_ in got]
    for rank, x_got in enumerate(summands):
        told = f"H = {H}, rank {rank}: x's gradient is this rank's summand alone, not the sum"
        if all(isinstance(x, torch.Tensor) for x in summands):
            refuse(sum(summands), x_grad, x_grad * n, told)
        same(x_got, x_grad, f"H = {H}, rank {rank}: gradient of x", ATOL)


def refuse(got: object, wrong: torch.Tensor, due: torch.Tensor, told: str) -> None:
    """Name a mistake that can be recognized by what it leads to."""
    alike = isinstance(got, torch.Tensor) and (got.shape, got.dtype) == (due.shape, due.dtype)
    if alike and torch.allclose(got, wrong) and not torch.allclose(wrong, due):
        raise Wrong(told)


def check_cost(answer: Path, seed: int, n: int, asks: bool) -> None:
    size = 4 * B * T * D
    due = {"building": [], "forward": [size], "backward": [size] * asks}
    got = grade(answer, step, n, seed, 12, torch.float32, asks, forbid=FORBIDDEN)
    for rank, (_, _, _, events) in enumerate(got):
        sent, phase = {phase: [] for phase in due}, "building"
        for event in events:
            if event.op == "note":
                phase = event.text
            else:
                sent[phase].append(event.nbytes)
        for phase, sizes in due.items():
            expect(len(sent[phase]), len(sizes), f"rank {rank}: all-reduces, {phase}")
            expect(sent[phase], sizes, f"rank {rank}: bytes in the all-reduce, {phase}")


@pytest.mark.parametrize("n", [2, 4])
def test_cost(answer: Path, seed: int, n: int) -> None:
    """One all-reduce forward and one backward, on {n} ranks"""
    check_cost(answer, seed, n, True)


def test_x_wants_no_gradient(answer: Path, seed: int) -> None:
    """If x wants no gradient, nothing is sent backward"""
    check_cost(answer, seed, 3, False)


def lives_on(answer, wire, seed: int) -> bool:
    """Whether x's memory is still there after backward, when the caller holds x no more."""
    *weights, x, grad = whole(seed, 12)
    model = answer.ParallelMLP(*weights)
    y = model(x.requires_grad_())
    y.backward(grad)
    memory = StorageWeakRef(x.untyped_storage())
    del x, y
    gc.collect()
    return not memory.expired()


def test_nothing_of_x_stays(answer: Path, seed: int) -> None:
    """After backward nothing of x is kept"""
    for rank, lives in enumerate(grade(answer, lives_on, 2, seed, forbid=FORBIDDEN)):
        if lives:
            told = "x still has memory when the caller is done with it: keep it nowhere"
            raise Wrong(f"rank {rank}: {told}")
