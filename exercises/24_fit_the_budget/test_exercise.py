"""Grader of 24: plans are run on four ranks and on two; bytes alive, FLOPs and bytes sent are
counted."""

import itertools
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course.grading import Wrong, expect, grade

N = 4  # ranks of the choice of a plan


class Counts(NamedTuple):
    """What one step of a plan took."""

    after_forward: int
    after_backward: int
    flops: int
    sent: float

    @property
    def most(self) -> int:
        return max(self.after_forward, self.after_backward)


class Alive(TorchDispatchMode):
    """Knows the storages that were made and are still alive; counts FLOPs of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.made = {}
        self.flops = 0
        self.paused = False  # in collectives: the group holds their tensors for a moment longer

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in [] if self.paused else tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.made[storage._cdata] = weakref.ref(storage)
        if str(func) == "aten.mm.default":
            self.flops += 2 * args[0].numel() * args[1].shape[1]
        return out

    def total(self) -> int:
        found = [reference() for reference in self.made.values()]
        return sum(storage.nbytes() for storage in found if storage is not None)


class Training:
    """The job, trained by the plan, by hand: what is held is what has a name here."""

    def __init__(self, job: tuple, plan: tuple, n: int, alive: Alive) -> None:
        self.alive = alive
        self.n = n
        self.L, self.D, self.B = job
        self.pieces, self.recompute, self.stage = plan
        self.sent = 0.0
        size = 8 * self.D**2
        self.weights = [torch.full((self.share(3, size),), 0.01) for _ in range(self.L)]
        self.moments = [torch.zeros(2 * self.share(1, size)) for _ in range(self.L)]
        self.gradients = [None] * self.L
        self.kept = []

    def share(self, stage: int, size: int) -> int:
        return size // self.n if self.stage >= stage else size

    def whole(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The matrices (4 D, D) and (D, 4 D) of a block."""
        flat = self.weights[i]
        if self.stage == 3:
            flat = self.collective(dist.all_gather_into_tensor, flat, 8 * self.D**2)
        up, down = flat.split(4 * self.D**2)
        return up.view(-1, self.D), down.view(self.D, -1)

    def forward(self, x: torch.Tensor) -> None:
        for i in range(self.L):
            up, down = self.whole(i)
            h = x @ up.T
            g = torch.nn.functional.gelu(h)
            self.kept.append((x,) if self.recompute else (x, h, g))
            x = x + g @ down.T
        self.output = x

    def backward(self) -> None:
        dy = self.output
        del self.output
        for i in reversed(range(self.L)):
            up, down = self.whole(i)
            x, *hidden = self.kept.pop()
            h = hidden[0] if hidden else x @ up.T
            g = hidden[1] if hidden else torch.nn.functional.gelu(h)
            d_down = dy.T @ g
            dh = (dy @ down) * gelu_slope(h)
            d_up = dh.T @ x
            dy = dy + dh @ up
            self.add(i, torch.cat([d_up.flatten(), d_down.flatten()]))

    def collective(self, call: Callable, x: torch.Tensor, elements: int) -> torch.Tensor:
        """An all-gather or a reduce-scatter, of copies, so that no byte is alive by accident."""
        self.alive.paused = True
        y = x.new_empty(elements)
        if dist.is_initialized():  # one rank alone counts the same bytes
            call(y, x.clone())
        self.alive.paused = False
        self.sent += max(x.nbytes, y.nbytes) * (self.n - 1) / self.n
        return y.clone()

    def add(self, i: int, gradient: torch.Tensor) -> None:
        if self.stage >= 2:
            share = len(gradient) // self.n
            gradient = self.collective(dist.reduce_scatter_tensor, gradient, share)
        if self.gradients[i] is None:
            self.gradients[i] = gradient
        else:
            self.gradients[i] += gradient

    def update(self) -> None:
        """Send what is sent once per step. (What is learned is of no interest here.)"""
        for gradient in self.gradients:
            if self.stage < 2:  # an all-reduce, in its two halves
                share = len(gradient) // self.n
                part = self.collective(dist.reduce_scatter_tensor, gradient, share)
                self.collective(dist.all_gather_into_tensor, part, len(gradient))
            elif self.stage == 2:
                self.collective(dist.all_gather_into_tensor, gradient, self.n * len(gradient))

    def step(self) -> tuple[int, int]:
        for _ in range(self.pieces):
            self.forward(torch.ones(self.B // self.pieces, self.D))
            after_forward = self.alive.total()
            self.backward()
        after_backward = self.alive.total()
        self.update()
        return after_forward, after_backward


def gelu_slope(h: torch.Tensor) -> torch.Tensor:
    density = (-h.square() / 2).exp() / math.sqrt(2 * math.pi)
    return (1 + (h / math.sqrt(2)).erf()) / 2 + h * density


def run(job: tuple, plan: tuple, n: int) -> Counts:
    with Alive() as alive:
        training = Training(job, plan, n, alive)
        moments = training.step()
    return Counts(*moments, alive.flops, training.sent)


def job_of(seed: int) -> tuple[int, int, int]:
    """(L, D, B), so that in some plans activations rule, and in others the states do.

    B is a square, so that not every divisor has a partner, nor is every one a power of two.
    """
    return 2 + seed % 2, 8 + 4 * (seed // 2 % 2), 36


PLANS = [(1, False, 0), (4, False, 0), (1, True, 0), (4, True, 1), (2, False, 2), (4, True, 3)]
PLANS += [(1, False, 3)]
MACHINES = [(1e9, 1e8, 1e-4), (1e9, 1e6, 1e-4), (1e7, 1e8, 1e-2)]  # the last two: slow links, cores
MACHINES += [(1e6, 1e10, 1e-4)]  # the slowest cores of all: nothing is computed twice


def judge_plans(answer, wire, seed: int) -> list[tuple]:
    job = job_of(seed)
    n = dist.get_world_size()
    machine = answer.Machine(*MACHINES[0])
    rows = []
    for plan in PLANS:
        ours = answer.Job(*job), answer.Plan(*plan), n
        ran = tuple(run(job, plan, n))
        rows.append((ran, answer.bytes_per_rank(*ours), answer.seconds_per_step(*ours, machine)))
    return rows


def name_of(plan: tuple) -> str:
    return "{} micro-batches, recompute={}, stage {}".format(*plan)


@pytest.mark.parametrize("n", [4, 2])
def test_bytes(answer: Path, seed: int, n: int) -> None:
    """The most bytes alive, of seven plans on {n} ranks"""
    for rank, rows in enumerate(grade(answer, judge_plans, n, seed)):
        for plan, (ran, said, _) in zip(PLANS, rows, strict=True):
            counts = Counts(*ran)
            at = "forward" if counts.after_forward > counts.after_backward else "backward"
            where = f"rank {rank} of {n}: {name_of(plan)}"
            expect(said, counts.most, f"{where}: bytes alive after {at}")


def seconds(counts: Counts, pieces: int, machine: tuple) -> float:
    flops, link, overhead = machine
    return counts.flops / flops + counts.sent / link + pieces * overhead


@pytest.mark.parametrize("n", [4, 2])
def test_seconds(answer: Path, seed: int, n: int) -> None:
    """The seconds of the same plans, by counted FLOPs and bytes sent, on {n} ranks"""
    for rank, rows in enumerate(grade(answer, judge_plans, n, seed)):
        for plan, (ran, _, said) in zip(PLANS, rows, strict=True):
            counts = Counts(*ran)
            due = seconds(counts, plan[0], MACHINES[0])
            if not isinstance(said, float | int) or abs(said - due) > 1e-9 * due:
                raise Wrong(
                    f"rank {rank} of {n}: {name_of(plan)}: expected {due:.6g} s "
                    f"({counts.flops:,} FLOPs, {counts.sent:,.0f} bytes sent), got {said}"
                )


def all_plans(job: tuple) -> list[tuple]:
    pieces = [k for k in range(1, job[2] + 1) if job[2] % k == 0]
    return list(itertools.product(pieces, (False, True), range(4)))


def judge_all(answer, wire, job: tuple, n: int) -> None:
    """Every plan of a job, for the shares of n ranks; one process runs it."""
    for plan in all_plans(job):
        counts = run(job, plan, n)
        ours = answer.Job(*job), answer.Plan(*plan), n
        where = f"{job}, {n} ranks: {name_of(plan)}"
        expect(answer.bytes_per_rank(*ours), counts.most, f"{where}: bytes alive")
        due = seconds(counts, plan[0], MACHINES[0])
        said = answer.seconds_per_step(*ours, answer.Machine(*MACHINES[0]))
        if not isinstance(said, float | int) or abs(said - due) > 1e-9 * due:
            raise Wrong(f"{where}: expected {due:.6g} s, got {said}")


@pytest.mark.parametrize(("job", "n"), [((1, 8, 6), 1), ((2, 16, 9), 8)])
def test_all_plans(answer: Path, job: tuple, n: int) -> None:
    """Bytes and seconds of every plan of the job {job}, on {n} ranks"""
    grade(answer, judge_all, 1, job, n, group=False)


def choose(answer, wire, seed: int) -> list[tuple]:
    """What is chosen for each budget and machine; all plans that the choice is from are run once.

    Budgets are bytes of plans that were run, so that some plan fits to the byte, and one less than
    the least. Powers of two alone do not find the cheapest plan for each of them, nor do pairs of
    two divisors that differ.
    """
    job = job_of(seed)
    ran = {plan: run(job, plan, N) for plan in all_plans(job)}
    sizes = sorted(counts.most for counts in ran.values())
    budgets = [ran[pieces, False, 3].most for pieces in (3, 6)]  # no power of two; the root of B
    budgets += [sizes[-1], *[sizes[len(sizes) * k // 5] for k in (3, 2, 1)], sizes[0], sizes[0] - 1]
    rows = []
    for machine in MACHINES:
        for budget in budgets:
            plan = answer.cheapest_plan(answer.Job(*job), budget, N, answer.Machine(*machine))
            fitting = [
                (seconds(counts, p[0], machine), p)
                for p, counts in ran.items()
                if counts.most <= budget
            ]
            due = min(fitting, default=None)
            if plan is None:
                rows.append((budget, due, None, 0, 0.0))
                continue
            plan = (plan.pieces, bool(plan.recompute), plan.stage)
            if plan not in ran:
                raise Wrong(f"{name_of(plan)}: there is no such plan for B = {job[2]}")
            counts = ran[plan]
            rows.append((budget, due, plan, counts.most, seconds(counts, plan[0], machine)))
    return rows


def test_cheapest(answer: Path, seed: int) -> None:
    """The plan chosen fits, and none that fits takes fewer seconds; eight budgets, four machines"""
    for rows in grade(answer, choose, 1, seed, group=False):
        for budget, due, plan, most, took in rows:
            where = f"budget of {budget:,} bytes"
            if due is None:
                expect(plan, None, f"{where}, into which no plan fits")
                continue
            least, best = due
            if plan is None:
                raise Wrong(f"{where}: a plan fits, in {least:.6g} s ({name_of(best)}), got None")
            if most > budget:
                raise Wrong(f"{where}: {name_of(plan)} holds {most:,}")
            if took > least * (1 + 1e-9):
                would = f"{least:.6g} s would do ({name_of(best)})"
                raise Wrong(f"{where}: {name_of(plan)} takes {took:.6g} s; {would}")
