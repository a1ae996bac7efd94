"""Thirty meshes of 1,024 ranks against plan and planner; gradients against one process; breaks."""

import math
from itertools import chain
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from course import plan
from course.lessons import ROOT
from course.playing import Lazily, load
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, Without, test_lesson  # noqa: F401

LESSON = "parallelism/27_dry_run_of_experts_and_context.py"
lesson = Lazily(LESSON)
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


def model_of(module: ModuleType, shape: tuple, width: int = 64) -> tuple:
    """The lesson's small model, or the one with experts; a wider one has nothing to pad."""
    m = module.EXPERTS if shape in WITH_EP else module.SMALL
    return m._replace(width=width), module.Mesh(*shape)


def dry(shapes: list[tuple], ranks: tuple[int, ...], width: int = 64) -> dict:
    """What one process counts that plays these ranks of these meshes."""
    module = load(LESSON)
    found = {}
    for shape in shapes:
        m, mesh = model_of(module, shape, width)
        for rank in ranks:
            with module.pretended(rank, 1024, weightless=width > 64):
                found[shape, rank] = module.counted(m, mesh)
    return found


def in_one_process(function: object, *args: object, deadline: float = 200) -> object:
    return run(function, 1, *args, group=False, deadline=deadline)[0]


def non_empty(calls: dict) -> dict:
    return {key: sorted(sizes) for key, sizes in calls.items() if sizes}


def check_plan(shapes: list[tuple], ranks: tuple[int, ...]) -> None:
    """Every single call is of the size that the plan says, on every axis, and so are the shards."""
    for (shape, rank), (calls, held) in in_one_process(dry, shapes, ranks).items():
        due, parameters = lesson.planned(*model_of(lesson, shape), rank)
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
        layers=m.layers, hidden=m.width, heads=m.heads, kv_heads=m.kv_heads, qk_dim=m.head_width,
        v_dim=m.head_width, ff=m.mlp_width, vocab=0, tied=False, gated=True, experts=m.experts,
        top_k=m.top_k, expert_ff=m.mlp_width if m.experts else 0,
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
        m, _ = model_of(lesson, shape, 1024)
        model, layout = of_planner(m, shape)
        layers = m.layers // pp
        job = plan.Job(sequence=m.tokens, batch=shards * lesson.MICRO_BATCHES, weight_bytes=4)
        job = job._replace(grad_bytes=4, hide=False)

        due = plan.stage_bytes(model, job, layout, layers, False, False)["weights"]
        assert held == due, shape

        monkeypatch.setattr(plan, "LATENCY", 0)
        sent = plan.micro_batch_seconds(model, job, layout, link)
        monkeypatch.setattr(plan, "LATENCY", 1)
        count = plan.micro_batch_seconds(model, job, layout, endless)
        each = lesson.MICRO_BATCHES

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
        due = 3 * 4 * each * (1 - 1 / (shards * cp)) * m.width / pp  # of the last norm
        for axis, ranks in (("fsdp", shards * cp), ("copies", shards * cp * tp // ep)):
            due += (1 - 1 / ranks) * sum(along(axis, *both))
        assert exposed["data parallel, exposed"] == pytest.approx(due), shape


def test_the_planner_says_the_same_of_five_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    check_planner([DENSE[0], DENSE[9], WITH_CP[0], WITH_EP[3], WITH_EP[7]], monkeypatch)


@pytest.mark.night
def test_the_planner_says_the_same_of_all_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    check_planner(MESHES, monkeypatch)


@pytest.mark.parametrize("shape", [(2, 2, 2, 2, 2, 4), (1, 3, 2, 1, 2, 4), (2, 1, 3, 2, 1, 3)])
def test_groups_are_ranks_that_differ_in_one_place(shape: tuple) -> None:
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
    for axis, lines in lesson.lines_of(lesson.Mesh(*shape)).items():
        together = {}
        for rank, fixed in places.items():
            together.setdefault(fixed[axis], []).append(rank)
        assert sorted(lines.tolist()) == sorted(together.values()), axis


def test_rank_517_is_where_the_lesson_says() -> None:
    lines = lesson.lines_of(lesson.Mesh(4, 2, 8, 2, 8, 16))
    told = (ROOT / LESSON).read_text(encoding="utf-8")
    for axis, groups in lines.items():
        (mine,) = [line for line in groups.tolist() if 517 in line]
        shown = [row for row in told.splitlines() if row.startswith(f"#     {axis} ")]
        numbers = [int(word) for word in shown[0].split() if word.isdigit()]
        assert numbers[0] == mine[0]
        assert {*numbers[: len(mine)]} <= {*mine, len(mine)}


# The program is a right step: its gradients are those of one process


SPLIT = {"q": 0, "k": 0, "v": 0, "out": 1, "gate": 0, "up": 0, "down": 1}


def share(module: ModuleType, whole: torch.Tensor, unit: object) -> torch.Tensor:
    """This rank's shard of a unit of one process: cut by tp or ep, then padded, then by FSDP."""
    row = []
    for name, piece in zip(unit.whole_shapes, whole.split(unit.whole_sizes), strict=True):
        piece = piece.view(unit.whole_shapes[name])
        if unit.axis == "copies":
            piece = piece.chunk(module.size("ep"))[module.place("ep")]
        elif name in SPLIT:
            piece = piece.chunk(module.size("tp"), SPLIT[name])[module.place("tp")]
        row.append(piece.flatten())
    row = torch.cat(row)
    n = module.size(unit.axis)
    padded = torch.cat([row, row.new_zeros(-len(row) % n)])
    return padded.chunk(n)[module.place(unit.axis)]


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


def drawn(m: object) -> tuple[list[list], torch.Tensor, torch.Tensor]:
    """Weights of all units in one process, inputs and gradients of eight sequences."""
    module = load(LESSON)
    units = [module.units_of_a_layer(m, zeros) for _ in range(m.layers)]
    torch.manual_seed(0)
    for one in units:
        for unit in one:
            unit.shard = torch.randn_like(unit.shard) / m.width**0.5
    return units, *torch.randn(2, 8, m.tokens, m.width, dtype=torch.float64)


def gradient_errors(shape: tuple) -> list[float]:
    """Play a mesh for real; compare every shard's gradient with one process's."""
    module = load(LESSON)
    m = module.EXPERTS if shape[5] > 1 else module.SMALL
    m = m._replace(layers=4, tokens=64, experts=min(m.experts, 4))
    alone = load(LESSON)
    whole, inputs, grads = drawn(m)
    alone.step(m, whole, [*inputs.clone()], [*grads.clone()])

    mesh = module.Mesh(*shape)
    module.join(mesh)
    layers = m.layers // mesh.pp
    mine = [module.units_of_a_layer(m, zeros) for _ in range(layers)]
    of_stage = whole[module.place("pp") * layers :][:layers]
    for ours, theirs in zip(mine, of_stage, strict=True):
        for unit, reference in zip(ours, theirs, strict=True):
            unit.whole_shapes, unit.whole_sizes = reference.shapes, reference.sizes
            unit.shard = share(module, reference.shard, unit).clone()
    data = mesh.dp_replicate * mesh.dp_shard
    rank = dist.get_rank() % (math.prod(shape[:5]) // mesh.pp)
    at = rank // (mesh.cp * mesh.tp)

    def local(x_BTD: torch.Tensor) -> list[torch.Tensor]:
        x_bTD = x_BTD.chunk(data)[at]
        x_btD = x_bTD.chunk(mesh.cp, dim=1)[module.place("cp")]
        return [x.clone() for x in x_btD.chunk(mesh.tp, dim=1)[module.place("tp")]]

    module.step(m, mine, local(inputs), local(grads))
    errors = []
    for ours, theirs in zip(mine, of_stage, strict=True):
        for unit, reference in zip(ours, theirs, strict=True):
            due = share(module, reference.grad, unit)
            errors.append(((unit.grad - due).abs().max() / reference.grad.abs().max()).item())
    return errors


REAL = {
    2: [(2, 1, 1, 1, 1, 1), (1, 2, 1, 1, 1, 1), (1, 1, 2, 1, 1, 1), (1, 1, 1, 2, 1, 1)],
    4: [(2, 1, 1, 1, 2, 1), (1, 1, 1, 2, 2, 1), (1, 1, 2, 1, 2, 4), (1, 2, 1, 2, 1, 2)],
}
REAL[2] += [(1, 1, 1, 1, 2, 1), (1, 1, 2, 1, 1, 2), (1, 1, 1, 1, 2, 2)]
CASES = [(n, shape) for n, shapes in REAL.items() for shape in shapes]


@pytest.mark.parametrize(("n", "shape"), CASES)
def test_gradients_are_those_of_one_process(n: int, shape: tuple) -> None:
    for errors in run(gradient_errors, n, shape):
        assert max(errors) < 1e-12


@pytest.mark.night
@pytest.mark.parametrize("shape", [(2, 1, 1, 2, 2, 1), (2, 1, 2, 1, 2, 2), (1, 2, 2, 1, 2, 4)])
def test_gradients_of_eight_ranks_are_those_of_one_process(shape: tuple) -> None:
    for errors in run(gradient_errors, 8, shape):
        assert max(errors) < 1e-12


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
    module = load(LESSON)
    with module.pretended(517, 1024), Seen() as seen:
        calls, _ = module.counted(*model_of(module, shape))
    return sorted(seen.found), sorted(chain(*calls.values()))


@pytest.mark.parametrize("shape", [(4, 2, 8, 2, 8, 16), (4, 2, 8, 2, 8, 1)])
def test_no_call_goes_past_the_log(shape: tuple) -> None:
    below, noted = in_one_process(seen_below, shape)
    assert below == noted


# The private API


def what_is_pretended() -> list:
    module = load(LESSON)
    found = []
    with module.pretended(517, 1024):
        group = dist.new_group([5, 261, 517, 773])
        x = torch.arange(4.0)
        dist.all_reduce(x, group=group)
        found += [dist.get_rank(), dist.get_world_size(), group.rank(), group.size(), x.tolist()]
    found.append(dist.is_initialized())
    with module.pretended(1023, 1024, weightless=True):
        huge = torch.empty(10**12)  # 4 TB
        dist.all_reduce(huge)
        found.append(huge.nbytes)
    return found


def test_the_fake_group_is_as_the_lesson_needs_it() -> None:
    """Pinned: `pretended` alone knows torch's private names."""
    assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)
    due = [517, 1024, 2, 4, [0.0, 1.0, 2.0, 3.0], False, 4 * 10**12]
    assert in_one_process(what_is_pretended) == due
    source = (ROOT / LESSON).read_text(encoding="utf-8")
    for private in ("torch.testing._internal", "torch._subclasses"):
        assert source.count(private) == 1


DENSE_MESH, EP, QWEN = "PP 4, FSDP 16, CP 2, TP 8", "FSDP 1024, EP 16", "Qwen3-30B"
PER_DENSE_LAYER = "TP: gathers and scatters per dense layer"
PER_CP_LAYER = "CP: collectives per layer"
PER_MIXTURE = "EP: bytes in all-to-alls per layer / A"
MB = "Qwen3-30B: MB of parameters"
REAL_CALLS, REAL_BYTES = "real ranks: calls", "real ranks: bytes handed over"
UNLIKE = "real ranks: kinds of calls unlike the dry run's"


def handed(name: str, *axes: str) -> set[str]:
    return {f"{name}; {axis}: MB" for axis in axes}


def held(*names: str) -> set[str]:
    return {f"{name}: kB of parameters" for name in names}


ALL = handed(DENSE_MESH, "pp", "fsdp", "cp", "tp"), handed(EP, "fsdp", "copies", "ep")
ALL_OF_QWEN = handed(QWEN, "pp", "dp_replicate", "fsdp", "copies", "cp", "tp", "ep")
ADDED_UP = '            grad[: self.copied] = call("all_reduce", grad[: self.copied], "tp")\n'
LINES = {
    "norms keep the gradients of a rank's own tokens (Try)": (
        ("        if self.copied:\n" + ADDED_UP, ""),
        handed(DENSE_MESH, "tp") | handed(QWEN, "tp") | {REAL_CALLS, REAL_BYTES},
    ),
    "parameters are sharded along dp_shard alone (Try)": (
        (
            "ranks.transpose(0, 1, 4, 2, 3).reshape(-1, shards * cp)",
            "ranks.transpose(0, 1, 3, 4, 2).reshape(-1, shards)",
        ),
        handed(QWEN, "dp_replicate") | held(DENSE_MESH) | {MB},
    ),
    "gathered keys and values are kept": (
        ("checkpoint(attend, q_thK, torch.stack([k_tgK, v_tgK], dim=1), **how)",
         "attend(q_thK, torch.stack([k_tgK, v_tgK], dim=1))"),
        handed(DENSE_MESH, "cp") | handed(QWEN, "cp") | {PER_CP_LAYER},
    ),
    "units are kept for the backward pass": (
        ("            unit.gather({})\n", "            pass\n"),
        handed(DENSE_MESH, "fsdp") | handed(EP, "fsdp", "copies")
        | handed(QWEN, "fsdp", "copies") | {REAL_CALLS, REAL_BYTES},
    ),
    "experts are sharded as all else is": (
        ('Unit("copies", experts, 0, zeros)', 'Unit("fsdp", experts, 0, zeros)'),
        handed(EP, "fsdp", "copies") | handed(QWEN, "fsdp", "copies", "dp_replicate")
        | held(EP) | {MB, REAL_CALLS, REAL_BYTES},
    ),
    "Qwen3 is in float32": (
        ("torch.bfloat16 if m == QWEN3_30B else torch.float32", "torch.float32"),
        ALL_OF_QWEN | {MB},
    ),
    "all but Qwen3 is in float64": (
        ("torch.bfloat16 if m == QWEN3_30B else torch.float32",
         "torch.bfloat16 if m == QWEN3_30B else torch.float64"),
        ALL[0] | ALL[1] | held(DENSE_MESH, EP) | {REAL_BYTES, PER_MIXTURE},
    ),
    "an all-gather counts its input": (
        ("append(max(x.nbytes, y.nbytes))", "append(x.nbytes)"),
        handed(DENSE_MESH, "fsdp", "cp", "tp") | handed(EP, "fsdp", "copies")
        | handed(QWEN, "fsdp", "copies", "cp", "tp") | {REAL_BYTES},
    ),
    "replicas do not add up": (
        ('+= call("all_reduce", mine, "dp_replicate")', "+= mine"),
        handed(QWEN, "dp_replicate"),
    ),
    "tokens stay with their experts": (
        ('    home_ERD = Collective.apply("all_to_all", leaving, "ep")', "    home_ERD = leaving"),
        handed(EP, "ep") | handed(QWEN, "ep") | {PER_MIXTURE},
    ),
    "gate and up gather for themselves": (
        ('(x_tD @ w["up"].T)', '(Collective.apply("all_gather", x_nD, "tp") @ w["up"].T)'),
        handed(DENSE_MESH, "tp") | {PER_DENSE_LAYER},
    ),
    "the real ranks run another model": (
        ("counted(EXPERTS, OURS, device)", "counted(SMALL, OURS, device)"),
        {REAL_CALLS, REAL_BYTES, UNLIKE},
    ),
    "the plan gives every stage two neighbors": (
        ("neighbors = 2 - int(stage == 0) - int(stage == pp - 1)", "neighbors = 2"),
        handed(DENSE_MESH, "pp") | handed(QWEN, "pp") | {REAL_CALLS, REAL_BYTES},
    ),
    "the plan forgets the padding": (
        ("shard = -(-numbers // ways[axis])", "shard = numbers // ways[axis]"),
        handed(EP, "fsdp") | held(EP),
    ),
    "each rank holds all layers": (
        ("for _ in range(m.layers // mesh.pp)]", "for _ in range(m.layers)]"),
        (ALL[0] | ALL_OF_QWEN) - handed(DENSE_MESH, "pp") - handed(QWEN, "pp") | held(DENSE_MESH)
        | {PER_DENSE_LAYER, PER_CP_LAYER, MB, REAL_CALLS, REAL_BYTES},
    ),
}  # fmt: skip
BREAKS = Breaks(LINES, ranks=4)
# checkpoint compares devices, which the pretended ones do not have below Python.
NO_CHECK = (
    '"preserve_rng_state": False}',
    '"preserve_rng_state": False, "determinism_check": "none"}',
)
ON_GPUS = OnGpus(changes=(NO_CHECK,))
FAKE_GROUP = "from torch.testing._internal.distributed.fake_pg import FakeStore"
WITHOUT = {
    "the fake group": Without(
        [(FAKE_GROUP, FAKE_GROUP.replace("import Fake", "import Moved"))],
        {"what one rank of 1,024 holds and sends"},
    )
}
