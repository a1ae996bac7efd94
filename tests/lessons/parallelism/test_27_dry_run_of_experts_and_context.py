"""The lesson's groups, plan and gradients on other meshes; 31 meshes on five axes; breaks.

The lesson has two axes. The program of all five stands here, built of the lesson's parts, and what
it hands over is compared with a formula and with `course plan`.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from course import plan
from course.lessons import ROOT
from course.playing import Lazily, load
from course.ranks import run
from tests.lessons.every import Breaks, Without, test_lesson  # noqa: F401

LESSON = "parallelism/27_dry_run_of_experts_and_context.py"


class Sent(Lazily):
    """The lesson, which a process of ranks loads anew."""

    def __reduce__(self) -> tuple:
        return Sent, (LESSON,)


lesson = Sent(LESSON)


def in_one_process(function: object, *args: object, deadline: float = 200) -> object:
    return run(function, 1, *args, group=False, deadline=deadline)[0]


# The lesson's own two axes


@pytest.mark.parametrize(("n", "cp", "ep"), [(8, 2, 4), (24, 4, 6), (24, 3, 2), (6, 1, 6)])
def test_lines_are_ranks_that_use_the_same(n: int, cp: int, ep: int) -> None:
    key = {
        "cp": lambda rank: rank // cp, "ep": lambda rank: rank // ep,
        "fsdp": lambda rank: 0, "copies": lambda rank: rank % ep,
    }  # fmt: skip
    for axis, lines in lesson.lines_of(n, cp, ep).items():
        together = {}
        for rank in range(n):
            together.setdefault(key[axis](rank), []).append(rank)
        assert sorted(lines) == sorted(together.values()), axis


def test_eight_ranks_are_as_the_lesson_draws_them() -> None:
    told = (ROOT / LESSON).read_text(encoding="utf-8").splitlines()
    for axis, lines in lesson.lines_of(8, 4, 2).items():
        drawn = " ".join("".join(map(str, line)) for line in lines)
        (shown,) = [row for row in told if row.startswith(f"#     {axis} ") and drawn in row]
        assert shown.split()[2 : 2 + len(lines)] == drawn.split()


OTHER_MESHES = [(8, 32), (1, 1), (2, 1), (1, 16), (64, 2), (16, 128), (4, 8), (8, 8)]


def dry_of_the_lesson(meshes: list[tuple[int, int]]) -> list[tuple]:
    m = lesson.Model()
    return [tuple(lesson.dry_run(m, 517, 1024, *mesh, torch.bfloat16)) for mesh in meshes]


def test_the_lessons_plan_holds_on_other_meshes() -> None:
    m = lesson.Model()
    runs = in_one_process(dry_of_the_lesson, OTHER_MESHES)
    for mesh, run_of_it in zip(OTHER_MESHES, runs, strict=True):
        found = lesson.Found(*run_of_it)
        cp, ep = mesh
        due = lesson.planned(m, *mesh)
        ranks = {"fsdp": 1024, "copies": 1024 // ep, "cp": cp, "ep": ep}
        for axis, n in ranks.items():
            counted = lesson.per_token(found, axis)
            assert counted == (due[axis] if n > 1 else 0), (mesh, axis)
        assert found.held == {"fsdp": 18688, "copies": 128 * 3 * 2048 * 768 // 1024}


def plain_loss(w: dict, x_BTD: torch.Tensor, m: object) -> torch.Tensor:
    """The loss of all sequences, with neither groups nor a mesh: one expert after the other."""
    normed_BTD = F.rms_norm(x_BTD, [m.D])
    q, k, v = [(normed_BTD @ w[name]).unflatten(2, (-1, m.K)).transpose(1, 2) for name in "qkv"]
    y_BhTK = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x_BTD = x_BTD + y_BhTK.transpose(1, 2).flatten(2) @ w["out"]

    normed_BTD = F.rms_norm(x_BTD, [m.D])
    score_BTE = (normed_BTD @ w["router"]).softmax(dim=2)
    y_BTD = torch.zeros_like(x_BTD)
    for expert in range(m.experts):
        gate, up, down = [w[name][expert] for name in ("gate", "up", "down")]
        for copy in range(m.top_k):  # copy c of token i goes to expert (i k + c) mod E
            chosen_T = (torch.arange(m.T) * m.top_k + copy) % m.experts
            mine_T1 = (chosen_T == expert)[:, None]
            out_BTD = (F.silu(normed_BTD @ gate) * (normed_BTD @ up)) @ down
            y_BTD = y_BTD + mine_T1 * score_BTE[:, :, expert, None] * out_BTD
    return 0.5 * (x_BTD + y_BTD).square().sum()


def error_in_one_process(*changes: tuple[str, str]) -> float:
    """The largest error of the loss and all gradients of the lesson's layer, without groups."""
    module = load(LESSON, *changes)
    m = module.SMALL
    torch.manual_seed(0)
    w = {}
    for shapes in module.shapes_of(m, 1).values():
        for name, shape in shapes.items():
            w[name] = (torch.randn(shape, dtype=torch.float64) / m.D**0.5).requires_grad_()
    x_BTD = torch.randn(2, m.T, m.D, dtype=torch.float64)
    due = plain_loss(w, x_BTD, m)
    ours = sum(module.layer_loss(x_TD, w, m, module.Mesh({})) for x_TD in x_BTD)
    errors = [module.relative_error(ours.detach(), due.detach())]
    for mine, expected in zip(
        torch.autograd.grad(ours, [*w.values()]),
        torch.autograd.grad(due, [*w.values()]),
        strict=True,
    ):
        errors.append(module.relative_error(mine, expected))
    return max(errors)


def test_the_layer_without_groups_is_one_written_plainly() -> None:
    """So the lesson's real rows may compare with it."""
    assert error_in_one_process() < 1e-12


def test_a_router_that_weighs_nothing_is_seen() -> None:
    right = "(y_tkD * score_tk[:, :, None])"
    wrong = "(y_tkD * score_tk[:, :, None].sum() / t / m.top_k)"
    assert error_in_one_process((right, wrong)) > 1e-3


def real_ranks(cp: int, ep: int) -> list[tuple[str, str]]:
    """The lesson's real rows on another mesh."""
    module = load(LESSON)
    module.CP, module.EP = cp, ep
    module.check_real_ranks({}, torch.device("cpu"))
    return [(row["claim"], row["verdict"]) for row in module.ledger]


REAL_MESHES = [(2, 1, 2), (2, 2, 1), (3, 1, 1), (4, 1, 4), (4, 2, 4), (4, 4, 2)]


@pytest.mark.parametrize(("n", "cp", "ep"), REAL_MESHES)
def test_the_lessons_gradients_are_the_references(n: int, cp: int, ep: int) -> None:
    for rows in run(real_ranks, n, cp, ep):
        assert rows == [(REAL_ATTENTION, "PASS"), (REAL_EXPERTS, "PASS")]


@pytest.mark.night
@pytest.mark.parametrize(("cp", "ep"), [(2, 4), (4, 2), (2, 8)])
def test_the_lessons_gradients_on_eight_ranks(cp: int, ep: int) -> None:
    for rows in run(real_ranks, 8, cp, ep):
        assert rows == [(REAL_ATTENTION, "PASS"), (REAL_EXPERTS, "PASS")]


# Five axes: the meshes

RANKS = (5, 517, 1023)  # of the first, a middle and the last stage

# pp, dp_replicate, dp_shard, cp, tp, ep; 1,024 ranks each
DENSE = [
    (1, 1, 1024, 1, 1, 1),
    (1, 1, 512, 1, 2, 1),
    (1, 1, 256, 1, 4, 1),
    (1, 1, 128, 1, 8, 1),
    (1, 2, 512, 1, 1, 1),
    (1, 16, 64, 1, 1, 1),
    (1, 1024, 1, 1, 1, 1),
    (1, 4, 32, 1, 8, 1),
    (2, 1, 512, 1, 1, 1),
    (4, 1, 32, 1, 8, 1),
    (8, 1, 128, 1, 1, 1),
    (8, 2, 8, 1, 8, 1),
    (4, 2, 16, 1, 8, 1),
    (4, 16, 4, 1, 4, 1),
]
WITH_CP = [
    (1, 1, 512, 2, 1, 1),
    (1, 1, 64, 2, 8, 1),
    (1, 1, 64, 4, 4, 1),
    (1, 1, 16, 8, 8, 1),
    (1, 4, 32, 4, 2, 1),
    (4, 1, 16, 2, 8, 1),
    (4, 2, 8, 2, 8, 1),
    (8, 1, 8, 8, 2, 1),
]
WITH_EP = [
    (1, 1, 1024, 1, 1, 16),
    (1, 1, 1024, 1, 1, 2),
    (1, 2, 512, 1, 1, 8),
    (4, 1, 256, 1, 1, 16),
    (2, 4, 128, 1, 1, 4),
    (1, 1, 128, 1, 8, 16),
    (1, 1, 256, 4, 1, 8),
    (4, 2, 8, 2, 8, 16),
    (2, 1, 64, 2, 4, 8),
]
MESHES = [*DENSE, *WITH_CP, *WITH_EP]


# Five axes: the program. Sequence parallelism gathers the t tokens of a tensor-parallel group and
# keeps them for the backward pass; keys and values are dropped, and so are parameters, which are
# gathered again; norms and router are copied along tp. Stages send all micro-batches forward, then
# all back. Embedding and head are left out.

LAYERS = 8
MICRO_BATCHES = 2  # of one sequence each
Calls = dict[tuple[str, str], list[int]]  # the bytes of each call, by axis and operation


def lines_of_all(shape: tuple) -> dict[str, list]:
    """All groups along each axis, one per row: its axis is moved to the end."""
    pp, replicas, shards, cp, tp, ep = shape
    ranks = np.arange(math.prod(shape[:5])).reshape(shape[:5])  # axes 0 to 4 are pp to tp
    in_rows = ranks.reshape(pp * replicas, -1, ep)
    lines = {
        "pp": ranks.transpose(1, 2, 3, 4, 0).reshape(-1, pp),
        "dp_replicate": ranks.transpose(0, 2, 3, 4, 1).reshape(-1, replicas),
        "fsdp": ranks.transpose(0, 1, 4, 2, 3).reshape(-1, shards * cp),
        "cp": ranks.transpose(0, 1, 2, 4, 3).reshape(-1, cp),
        "tp": ranks.reshape(-1, tp),
        "ep": ranks.reshape(-1, ep),
        "copies": in_rows.transpose(0, 2, 1).reshape(-1, in_rows.shape[1]),
    }
    return {axis: array.tolist() for axis, array in lines.items()}


def model_of(shape: tuple, width: int = 64) -> object:
    """A small model, dense or with experts; a wider one has nothing to pad."""
    m = lesson.Model(width, heads=16, kv_heads=8, K=4, expert_width=128, T=256)
    return m._replace(experts=16, top_k=2) if shape in WITH_EP else m._replace(experts=0, top_k=0)


def all_reduce(x: torch.Tensor, axis: str, mesh: object) -> torch.Tensor:
    if axis in mesh.groups:
        x = x.clone()
        dist.all_reduce(x, group=mesh.groups[axis])
        mesh.calls.append((axis, "all_reduce", x.nbytes))
    return x


def meet(operation: Callable, x: torch.Tensor, stage: int, mesh: object) -> None:
    """Send x to another stage, or receive it from there, if there is such a stage."""
    if stage in range(mesh.size("pp")):
        message = dist.P2POp(operation, x, group=mesh.groups["pp"], group_peer=stage)
        for work in dist.batch_isend_irecv([message]):
            work.wait()
        mesh.calls.append(("pp", operation.__name__, x.nbytes))


def attention(x_nD: torch.Tensor, w: dict, m: object, mesh: object) -> torch.Tensor:
    x_tD = lesson.Collective.apply(mesh, "all_gather", x_nD, "tp")
    q_thK, k_tgK, v_tgK = [(x_tD @ w[name]).unflatten(1, (-1, m.K)) for name in "qkv"]
    how = {"use_reentrant": False, "preserve_rng_state": False}
    y_thK = checkpoint(lesson.attend, q_thK, torch.stack([k_tgK, v_tgK], dim=1), mesh, **how)
    return lesson.Collective.apply(mesh, "reduce_scatter", y_thK.flatten(1) @ w["out"], "tp")


def dense_mlp(x_nD: torch.Tensor, w: dict, m: object, mesh: object) -> torch.Tensor:
    x_tD = lesson.Collective.apply(mesh, "all_gather", x_nD, "tp")
    y_tD = (F.silu(x_tD @ w["gate"]) * (x_tD @ w["up"])) @ w["down"]
    return lesson.Collective.apply(mesh, "reduce_scatter", y_tD, "tp")


def layer(x_nD: torch.Tensor, w: dict, m: object, mesh: object) -> torch.Tensor:
    x_nD = x_nD + attention(F.rms_norm(x_nD, [m.D], w["norm1"]), w, m, mesh)
    mlp = lesson.mixture if m.experts else dense_mlp
    return x_nD + mlp(F.rms_norm(x_nD, [m.D], w["norm2"]), w, m, mesh)


class Unit:
    """Parameters that are gathered and reduced as one, along `axis`."""

    def __init__(
        self, axis: str, shapes: dict[str, tuple], copied: int, zeros: Callable, mesh: object
    ) -> None:
        self.axis = axis
        self.shapes = shapes
        self.copied = copied  # so many numbers in front are the same along tp
        self.mesh = mesh
        self.sizes = [math.prod(shape) for shape in shapes.values()]
        self.shard = zeros(-(-sum(self.sizes) // mesh.size(axis)))
        self.grad = torch.zeros_like(self.shard)

    def gather(self, w: dict) -> torch.Tensor:
        """Put the parameters into `w`; return them as one row, whose gradient will be theirs."""
        row = self.mesh.call("all_gather", self.shard, self.axis)[: sum(self.sizes)]
        row = row.detach().requires_grad_()
        pieces = zip(self.shapes.items(), row.split(self.sizes), strict=True)
        w |= {name: piece.view(shape) for (name, shape), piece in pieces}
        return row

    def reduce(self, grad: torch.Tensor) -> None:
        if self.copied:
            grad[: self.copied] = all_reduce(grad[: self.copied], "tp", self.mesh)
        padding = len(self.shard) * self.mesh.size(self.axis) - len(grad)
        mine = self.mesh.call("reduce_scatter", F.pad(grad, (0, padding)), self.axis)
        self.grad += all_reduce(mine, "dp_replicate", self.mesh)


def units_of_a_layer(m: object, zeros: Callable, mesh: object) -> list[Unit]:
    """Units of the shapes that tp and ep leave to this rank."""
    D, tp = m.D, mesh.size("tp")
    wide = m.expert_width if m.experts else m.expert_width // tp
    queries, keys = m.heads // tp * m.K, m.kv_heads // tp * m.K
    shapes = {"norm1": (D,), "norm2": (D,), "router": (D, m.experts)}
    shapes |= {"q": (D, queries), "k": (D, keys), "v": (D, keys), "out": (queries, D)}
    copied = (2 + m.experts) * D
    if m.experts:
        e = m.experts // mesh.size("ep")
        experts = {"gate": (e, D, wide), "up": (e, D, wide), "down": (e, wide, D)}
        dense = Unit("fsdp", shapes, copied, zeros, mesh)
        return [dense, Unit("copies", experts, 0, zeros, mesh)]
    shapes |= {"gate": (D, wide), "up": (D, wide), "down": (wide, D)}
    return [Unit("fsdp", shapes, copied, zeros, mesh)]


def step(m: object, layers: list[list[Unit]], inputs: list, grads: list, mesh: object) -> None:
    """Add up gradients in the units; neighbors overwrite `inputs` and `grads`, (n, D) each."""
    s = mesh.place("pp")
    traces = []
    for x_nD in inputs:
        meet(dist.irecv, x_nD, s - 1, mesh)
        trace = []
        for units in layers:
            x_nD = x_nD.detach().requires_grad_()
            w = {}
            rows = [unit.gather(w) for unit in units]
            y_nD = layer(x_nD, w, m, mesh)
            trace.append((x_nD, rows, y_nD))
            x_nD = y_nD
        traces.append(trace)
        meet(dist.isend, x_nD.detach(), s + 1, mesh)
    for trace, grad_nD in zip(traces, grads, strict=True):
        meet(dist.irecv, grad_nD, s + 1, mesh)
        for units, (x_nD, rows, y_nD) in zip(layers[::-1], trace[::-1], strict=True):
            for unit in units:
                unit.gather({})
            y_nD.backward(grad_nD)
            for unit, row in zip(units, rows, strict=True):
                unit.reduce(row.grad)
            grad_nD = x_nD.grad
        meet(dist.isend, grad_nD, s - 1, mesh)


def counted(m: object, shape: tuple) -> tuple[Calls, int]:
    """Do a step in whatever world this is; return its calls, and the bytes of parameters held."""
    mesh = lesson.Mesh(lines_of_all(shape))
    pp, _, _, cp, tp, _ = shape
    layers = [units_of_a_layer(m, torch.zeros, mesh) for _ in range(LAYERS // pp)]
    inputs = [torch.zeros(m.T // cp // tp, m.D) for _ in range(MICRO_BATCHES)]
    step(m, layers, inputs, [torch.zeros_like(x_nD) for x_nD in inputs], mesh)
    calls = {}
    for axis, operation, nbytes in mesh.calls:
        calls.setdefault((axis, operation), []).append(nbytes)
    return calls, sum(unit.shard.nbytes for unit in chain(*layers))


def planned(m: object, shape: tuple, rank: int) -> tuple[Calls, int]:
    """How many numbers each call of a step is about, and how many parameters are held."""
    pp, replicas, shards, cp, tp, ep = shape
    ways = {"pp": pp, "dp_replicate": replicas, "fsdp": shards * cp, "cp": cp, "tp": tp, "ep": ep}
    ways["copies"] = shards * cp * tp // ep
    stage = rank * pp // math.prod(shape[:5])
    neighbors = 2 - int(stage == 0) - int(stage == pp - 1)
    layers = LAYERS // pp
    D = m.D
    tD = m.T // cp * D
    keys_values = 2 * m.T * m.kv_heads // tp * m.K
    mlp = 3 * D * m.expert_width
    copied = (2 + m.experts) * D  # two norms, and a column of the router per expert
    dense = copied + 2 * D * (m.heads + m.kv_heads) * m.K // tp
    dense += 0 if m.experts else mlp // tp
    split = 1 if m.experts else 2  # attention, and a dense MLP
    calls = {
        ("tp", "all_gather"): 2 * split * layers * [tD],  # forward, and backward
        ("tp", "reduce_scatter"): 2 * split * layers * [tD],
        ("tp", "all_reduce"): layers * [copied],
        ("cp", "all_gather"): 2 * layers * [keys_values],  # forward, and again backward
        ("cp", "reduce_scatter"): layers * [keys_values],
        ("ep", "all_to_all"): 4 * layers * [tD // tp * m.top_k],  # there and back, both ways
        ("pp", "isend"): neighbors * [tD // tp],
        ("pp", "irecv"): neighbors * [tD // tp],
    }
    units = {"fsdp": dense}
    if m.experts:
        units["copies"] = m.experts * mlp // ep
    held = []
    for axis, numbers in units.items():
        shard = -(-numbers // ways[axis])  # with padding
        calls[axis, "all_gather"] = 2 * layers * [shard * ways[axis]]
        calls[axis, "reduce_scatter"] = layers * [shard * ways[axis]]
        held += layers * [shard]
    calls["dp_replicate", "all_reduce"] = held
    calls = {key: MICRO_BATCHES * sizes for key, sizes in calls.items() if ways[key[0]] > 1}
    return calls, sum(held)


# Five axes: what is counted


def dry(shapes: list[tuple], ranks: tuple[int, ...], width: int = 64) -> dict:
    """What one process counts that plays these ranks of these meshes."""
    found = {}
    for shape in shapes:
        for rank in ranks:
            with lesson.pretended(rank, 1024):
                found[shape, rank] = counted(model_of(shape, width), shape)
    return found


def non_empty(calls: dict) -> dict:
    return {key: sorted(sizes) for key, sizes in calls.items() if sizes}


def check_plan(shapes: list[tuple], ranks: tuple[int, ...]) -> None:
    """Every single call is of the size that the formula says, on every axis, and so are shards."""
    for (shape, rank), (calls, held) in in_one_process(dry, shapes, ranks).items():
        due, parameters = planned(model_of(shape), shape, rank)
        due = {key: [4 * numbers for numbers in sizes] for key, sizes in due.items()}
        assert non_empty(calls) == non_empty(due), (shape, rank)
        assert held == 4 * parameters, (shape, rank)


def test_there_are_thirty_meshes_of_1024_ranks() -> None:
    assert len({*MESHES}) >= 30
    assert {math.prod(shape[:5]) for shape in MESHES} == {1024}
    assert len(WITH_CP) >= 5
    assert sum(shape[5] > 1 for shape in WITH_EP) >= 5


def test_the_plan_holds_on_six_meshes() -> None:
    check_plan([DENSE[3], DENSE[12], WITH_CP[5], WITH_CP[6], WITH_EP[7], WITH_EP[8]], (5, 517))


@pytest.mark.night
def test_the_plan_holds_on_all_meshes() -> None:
    check_plan(MESHES, RANKS)


def of_planner(m: object, shape: tuple) -> tuple[plan.Model, plan.Layout]:
    """The same for `course plan`. It knows no replicas of shards: they are another job to it."""
    pp, _, shards, cp, tp, ep = shape
    model = plan.Model(
        layers=LAYERS, hidden=m.D, heads=m.heads, kv_heads=m.kv_heads, qk_dim=m.K,
        v_dim=m.K, ff=m.expert_width, vocab=0, tied=False, gated=True, experts=m.experts,
        top_k=m.top_k, expert_ff=m.expert_width if m.experts else 0,
    )  # fmt: skip
    return model, plan.Layout(dp=shards, tp=tp, pp=pp, cp=cp, ep=ep, zero=3)


def check_planner(shapes: list[tuple], monkeypatch: pytest.MonkeyPatch) -> None:
    """`course plan` says the same as a dry run has counted, in bytes and calls."""
    gpu = {"domain": 10**9, "efficiency": 1, "grouped": 1, "bf16": 1, "fp8": 1, "hbm": 1}
    one = 1 / plan.LINK_SHARE  # a byte per second
    link = SimpleNamespace(**gpu, nvlink=one, network=one)
    endless = SimpleNamespace(**gpu, nvlink=math.inf, network=math.inf)
    for (shape, _), (calls, held) in in_one_process(dry, shapes, (517,), 1024).items():
        pp, _, shards, cp, tp, ep = shape
        m = model_of(shape, 1024)
        model, layout = of_planner(m, shape)
        layers = LAYERS // pp
        job = plan.Job(sequence=m.T, batch=shards * MICRO_BATCHES, weight_bytes=4)
        job = job._replace(grad_bytes=4, hide=False)

        due = plan.stage_bytes(model, job, layout, layers, False, False)["weights"]
        assert held == due, shape

        monkeypatch.setattr(plan, "LATENCY", 0)
        sent = plan.micro_batch_seconds(model, job, layout, link)
        monkeypatch.setattr(plan, "LATENCY", 1)
        count = plan.micro_batch_seconds(model, job, layout, endless)
        each = MICRO_BATCHES

        def along(axis: str, *operations: str, calls: dict = calls) -> list[int]:
            return [*chain(*[calls.get((axis, operation), []) for operation in operations])]

        both = ("all_gather", "reduce_scatter")
        ours = along("tp", *both)
        assert count["tensor parallel"] * each == len(ours), shape
        in_two_bytes = (tp - 1) / tp * sum(ours) / 2
        assert sent["tensor parallel"] * each == pytest.approx(in_two_bytes), shape
        ours = along("cp", *both)
        assert count["context parallel"] * each == len(ours) * (cp - 1), shape  # it counts hops
        in_two_bytes = (cp - 1) / cp * sum(ours) / 2
        assert sent["context parallel"] * each == pytest.approx(in_two_bytes), shape
        ours = along("ep", "all_to_all")
        assert count["expert parallel"] * each == len(ours), shape
        copies = m.top_k / plan.groups_met(model, ep) if ours else 1  # it sends a rank one copy
        in_two_bytes = (ep - 1) / ep * sum(ours) / 2
        assert sent["expert parallel"] * each * copies == pytest.approx(in_two_bytes), shape
        exposed = plan.data_parallel_seconds(model, job, layout, link, 0)
        due = 3 * 4 * each * (1 - 1 / (shards * cp)) * m.D / pp  # of the last norm
        for axis, ranks in (("fsdp", shards * cp), ("copies", shards * cp * tp // ep)):
            due += (1 - 1 / ranks) * sum(along(axis, *both))
        assert exposed["data parallel, exposed"] == pytest.approx(due), shape


def test_the_planner_says_the_same_of_five_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    check_planner([DENSE[0], DENSE[9], WITH_CP[0], WITH_EP[3], WITH_EP[7]], monkeypatch)


@pytest.mark.night
def test_the_planner_says_the_same_of_all_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    check_planner(MESHES, monkeypatch)


@pytest.mark.parametrize("shape", [(2, 2, 2, 2, 2, 4), (1, 3, 2, 1, 2, 4), (2, 1, 3, 2, 1, 3)])
def test_groups_of_five_axes_are_ranks_that_differ_in_one_place(shape: tuple) -> None:
    _, replicas, shards, cp, tp, ep = shape
    places = {}
    for rank in range(math.prod(shape[:5])):
        rest, t = divmod(rank, tp)
        rest, c = divmod(rest, cp)
        rest, s = divmod(rest, shards)
        p, r = divmod(rest, replicas)
        inside = (s * cp + c) * tp + t
        places[rank] = {
            "pp": (r, s, c, t), "dp_replicate": (p, s, c, t), "cp": (p, r, s, t),
            "tp": (p, r, s, c), "fsdp": (p, r, t), "ep": (p, r, inside // ep),
            "copies": (p, r, inside % ep),
        }  # fmt: skip
    for axis, lines in lines_of_all(shape).items():
        together = {}
        for rank, fixed in places.items():
            together.setdefault(fixed[axis], []).append(rank)
        assert sorted(lines) == sorted(together.values()), axis


# Five axes: the program is a right step, for its gradients are those of one process

SPLIT = {"q": 1, "k": 1, "v": 1, "out": 0, "gate": 1, "up": 1, "down": 0}
zeros = partial(torch.zeros, dtype=torch.float64)


def share(whole: torch.Tensor, unit: Unit, reference: Unit) -> torch.Tensor:
    """This rank's shard of a unit of one process: cut by tp or ep, then padded, then by FSDP."""
    mesh = unit.mesh
    row = []
    for (name, shape), piece in zip(
        reference.shapes.items(), whole.split(reference.sizes), strict=True
    ):
        piece = piece.view(shape)
        if unit.axis == "copies":
            piece = piece.chunk(mesh.size("ep"))[mesh.place("ep")]
        elif name in SPLIT:
            piece = piece.chunk(mesh.size("tp"), SPLIT[name])[mesh.place("tp")]
        row.append(piece.flatten())
    row = torch.cat(row)
    n = mesh.size(unit.axis)
    return F.pad(row, (0, -len(row) % n)).chunk(n)[mesh.place(unit.axis)].clone()


def gradient_errors(shape: tuple) -> list[float]:
    """Play a mesh for real; compare every shard's gradient with one process's."""
    pp, replicas, data, cp, tp, ep = shape
    m = lesson.Model(64, heads=16, kv_heads=8, K=4, expert_width=128, T=64)
    m = m._replace(experts=4, top_k=2) if ep > 1 else m._replace(experts=0, top_k=0)
    alone = lesson.Mesh({})
    whole = [units_of_a_layer(m, zeros, alone) for _ in range(4)]
    torch.manual_seed(0)
    for unit in chain(*whole):
        unit.shard = torch.randn_like(unit.shard) / m.D**0.5
    inputs, grads = torch.randn(2, 8, m.T, m.D, dtype=torch.float64)
    step(m, whole, [*inputs.clone()], [*grads.clone()], alone)

    mesh = lesson.Mesh(lines_of_all(shape))
    layers = 4 // pp
    theirs = [*chain(*whole[mesh.place("pp") * layers :][:layers])]
    mine = [units_of_a_layer(m, zeros, mesh) for _ in range(layers)]
    for unit, reference in zip(chain(*mine), theirs, strict=True):
        unit.shard = share(reference.shard, unit, reference)
    in_stage = dist.get_rank() % (math.prod(shape[:5]) // pp)

    def local(x_BTD: torch.Tensor) -> list[torch.Tensor]:
        x_bTD = x_BTD.chunk(replicas * data)[in_stage // (cp * tp)]
        x_btD = x_bTD.chunk(cp, dim=1)[mesh.place("cp")]
        return [x.clone() for x in x_btD.chunk(tp, dim=1)[mesh.place("tp")]]

    step(m, mine, local(inputs), local(grads), mesh)
    errors = []
    for unit, reference in zip(chain(*mine), theirs, strict=True):
        due = share(reference.grad, unit, reference)
        errors.append(((unit.grad - due).abs().max() / reference.grad.abs().max()).item())
    return errors


MESHES_OF = {
    2: [(2, 1, 1, 1, 1, 1), (1, 2, 1, 1, 1, 1), (1, 1, 2, 1, 1, 1), (1, 1, 1, 2, 1, 1)],
    4: [(2, 1, 1, 1, 2, 1), (1, 1, 1, 2, 2, 1), (1, 1, 2, 1, 2, 4), (1, 2, 1, 2, 1, 2)],
}
MESHES_OF[2] += [(1, 1, 1, 1, 2, 1), (1, 1, 2, 1, 1, 2), (1, 1, 1, 1, 2, 2)]
CASES = [(n, shape) for n, shapes in MESHES_OF.items() for shape in shapes]


@pytest.mark.parametrize(("n", "shape"), CASES)
def test_gradients_on_five_axes_are_those_of_one_process(n: int, shape: tuple) -> None:
    for errors in run(gradient_errors, n, shape):
        assert all(error < 1e-12 for error in errors)


@pytest.mark.night
@pytest.mark.parametrize("shape", [(2, 1, 1, 2, 2, 1), (2, 1, 2, 1, 2, 2), (1, 2, 2, 1, 2, 4)])
def test_gradients_of_eight_ranks_are_those_of_one_process(shape: tuple) -> None:
    for errors in run(gradient_errors, 8, shape):
        assert all(error < 1e-12 for error in errors)


# What is counted in `call` is what torch's dispatcher sees


class Seen(TorchDispatchMode):
    """Bytes of what is handed to process groups, by torch's own names."""

    def __init__(self) -> None:
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            leaves = torch.utils._pytree.tree_leaves(args)
            sizes = [leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor)]
            self.found.append(max(sizes))
        return func(*args, **(kwargs or {}))


def seen_below(shape: tuple) -> tuple[list[int], list[int]]:
    with lesson.pretended(517, 1024), Seen() as seen:
        calls, _ = counted(model_of(shape), shape)
    return sorted(seen.found), sorted(chain(*calls.values()))


@pytest.mark.parametrize("shape", [(4, 2, 8, 2, 8, 16), (4, 2, 8, 2, 8, 1)])
def test_no_call_of_five_axes_goes_past_the_log(shape: tuple) -> None:
    below, noted = in_one_process(seen_below, shape)
    assert below == noted


def seen_below_the_lesson() -> tuple[list[int], list[int]]:
    module = load(LESSON)
    pretended = module.pretended
    seen = Seen()

    @contextlib.contextmanager
    def watched(rank: int, world_size: int) -> Iterator[None]:
        with pretended(rank, world_size), seen:
            yield

    module.pretended = watched
    found = module.dry_run(module.Model(), 517, 1024, 8, 32, torch.bfloat16)
    return seen.found, [nbytes for _, _, nbytes in found.calls]


def test_no_call_of_the_lesson_goes_past_the_log() -> None:
    below, noted = in_one_process(seen_below_the_lesson)
    assert below == noted
    assert len(noted) == 10


# The private API


def what_is_pretended() -> list:
    found = []
    with lesson.pretended(517, 1024):
        group = dist.new_group([5, 261, 517, 773])
        found += [dist.get_rank(), dist.get_world_size(), group.rank(), group.size()]
        huge = torch.empty(10**12)  # 4 TB
        dist.all_reduce(huge, group=group)
        found.append(huge.nbytes)
    found.append(dist.is_initialized())
    return found


def test_the_fake_group_is_as_the_lesson_needs_it() -> None:
    """Pinned: `pretended` alone knows torch's private names."""
    assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)
    assert in_one_process(what_is_pretended) == [517, 1024, 2, 4, 4 * 10**12, False]
    source = (ROOT / LESSON).read_text(encoding="utf-8")
    for private in ("torch.testing._internal", "torch._subclasses"):
        assert source.count(private) == 1


ATTENTION_SHARDS, EXPERT_SHARDS = "attention: shards", "an expert: shards"
REAL_ATTENTION = "real ranks: error of attention's gradients"
REAL_EXPERTS = "real ranks: error of experts' gradients"
REAL_BOTH = {REAL_ATTENTION, REAL_EXPERTS}
UNLIKE = "real ranks: calls unlike the dry run's"


def handed(mesh: str, *axes: str) -> set[str]:
    return {f"{mesh}; {axis}: kB per token" for axis in axes}


BASE, CP_16, EP_32 = "cp 8, ep 16", "cp 16, ep 16", "cp 8, ep 32"
ALL_TO_ALLS = handed(BASE, "ep") | handed(CP_16, "ep") | handed(EP_32, "ep")
LINES = {
    "attention is sharded over the same places alone (Try)": (
        ('"fsdp": [ranks],', '"fsdp": [ranks[i::cp] for i in range(cp)],'),
        {ATTENTION_SHARDS, REAL_ATTENTION},
    ),
    "experts are sharded over all ranks (Try)": (
        ('"copies": [ranks[i::ep] for i in range(ep)],', '"copies": [ranks],'),
        {EXPERT_SHARDS} | REAL_BOTH,
    ),
    "tokens stay with their experts": (
        ('home_ERD = Collective.apply(mesh, "all_to_all", y_neRD.flatten(0, 1), "ep")',
         "home_ERD = y_neRD.flatten(0, 1)"),
        ALL_TO_ALLS | REAL_BOTH,
    ),
    "keys and values are gathered along ep": (
        ('Collective.apply(mesh, "all_gather", kv_t2gK, "cp")',
         'Collective.apply(mesh, "all_gather", kv_t2gK, "ep")'),
        handed(BASE, "cp", "ep") | handed(CP_16, "cp", "ep") | handed(EP_32, "ep") | REAL_BOTH,
    ),
    "an all-gather counts its input": (
        ("max(x.nbytes, y.nbytes)))", "x.nbytes))"),
        handed(BASE, "fsdp", "copies", "cp") | handed(CP_16, "cp") | handed(EP_32, "copies"),
    ),
    "cp 8 is in float32": (
        ("PLAYED, 1024, 8, 16, torch.bfloat16", "PLAYED, 1024, 8, 16, torch.float32"),
        handed(BASE, "fsdp", "copies", "cp", "ep"),
    ),
    "cp stays": (
        ("PLAYED, 1024, 16, 16, torch.bfloat16", "PLAYED, 1024, 8, 16, torch.bfloat16"),
        handed(CP_16, "cp"),
    ),
    "ep stays": (
        ("PLAYED, 1024, 8, 32, torch.bfloat16", "PLAYED, 1024, 8, 16, torch.bfloat16"),
        handed(EP_32, "copies"),
    ),
    "the plan knows a rank's own keys and values alone": (
        ("2 * (2 * m.T * m.kv_heads * m.K) / t", "2 * (2 * t * m.kv_heads * m.K) / t"),
        handed(BASE, "cp") | handed(CP_16, "cp"),
    ),
    "every rank has the first part of a sequence": (
        ("x_BTD[RANK // CP].chunk(CP)[RANK % CP]", "x_BTD[RANK // CP].chunk(CP)[0]"), REAL_BOTH,
    ),
    "every rank's tokens come first": (
        ('before = mesh.place("cp") * len(q_thK)', "before = 0"), REAL_BOTH,
    ),
    "rows go home in the order of experts": (
        ("y_neRD.flatten(0, 1)", "y_neRD.transpose(0, 1).flatten(0, 1)"), REAL_BOTH,
    ),
    "the rehearsal is in float32": (
        ("WORLD_SIZE, CP, EP, torch.float64", "WORLD_SIZE, CP, EP, torch.float32"), {UNLIKE},
    ),
    "the rehearsal has no context parallelism": (
        ("dry_run(SMALL, RANK, WORLD_SIZE, CP, EP", "dry_run(SMALL, RANK, WORLD_SIZE, 1, EP"),
        {UNLIKE},
    ),
}  # fmt: skip
BREAKS = Breaks(LINES, ranks=4)
FAKE_GROUP = "from torch.testing._internal.distributed.fake_pg import FakeStore"
WITHOUT = {
    "the fake group": Without(
        [(FAKE_GROUP, FAKE_GROUP.replace("import Fake", "import Moved"))],
        {"what one rank of 1,024 holds and sends"},
    )
}
