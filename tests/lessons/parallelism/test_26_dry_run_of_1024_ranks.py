"""Other meshes of 1,024 ranks against the formula, fake tensors against real ones; breaks."""

import pytest
import torch
import torch.distributed as dist

from course.lessons import ROOT
from course.playing import load
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, Without, test_lesson  # noqa: F401

LESSON = "parallelism/26_dry_run_of_1024_ranks.py"
TINY = (3, 128, 8)  # layers, D, T
MICRO_BATCHES = 3


def in_one_process(function: object, *args: object) -> object:
    return run(function, 1, *args, group=False, deadline=200)[0]


def counted(fsdp: int, tp: int, rank: int, weightless: bool) -> tuple[list[tuple], int]:
    """Play a rank of fsdp x tp; return (operation, bytes, ranks) of each call, and bytes held."""
    module = load(LESSON)
    with module.pretended(rank, fsdp * tp) as fake_tensors:
        mesh = module.make_mesh("cpu", fsdp=fsdp, tp=tp)
        found = module.count(mesh, fake_tensors if weightless else module.AS_IT_IS, sizes=TINY)
    return [tuple(call) for call in found.calls], found.held


def rows(count: int, ranks: int) -> int:
    """Rows of a matrix that is sharded over ranks, with the padding."""
    return -(-count // ranks) * ranks


@pytest.mark.parametrize(("fsdp", "tp", "rank"), [(128, 8, 517), (512, 2, 1023), (16, 4, 0)])
def test_calls_and_groups_are_those_of_the_formula(fsdp: int, tp: int, rank: int) -> None:
    calls, held = in_one_process(counted, fsdp, tp, rank, True)
    layers, D, T = TINY
    unit = 4 * (rows(4 * D // tp, fsdp) * D + rows(D, fsdp) * 4 * D // tp)
    row = tuple(range(rank % tp, fsdp * tp, tp))
    node = tuple(range(rank // tp * tp, rank // tp * tp + tp))
    times = layers * MICRO_BATCHES
    due = times * [("all_gather", unit, row), ("reduce_scatter", unit, row)]
    due += 2 * times * [("all_reduce", 4 * T * D, node)]
    assert sorted(calls) == sorted(due)
    if 4 * D // tp % fsdp == D % fsdp == 0:
        assert held == 4 * layers * 8 * D**2 // (fsdp * tp)


def test_real_tensors_make_the_same_calls_as_fake_ones() -> None:
    fake, real = (in_one_process(counted, 16, 4, 13, weightless) for weightless in (True, False))
    assert fake == real


def two_worlds() -> list[list[tuple]]:
    """One process plays two ranks, one after the other."""
    return [counted(16, 4, rank, True)[0] for rank in (13, 2)]


def test_a_second_world_does_not_see_the_groups_of_the_first() -> None:
    """DTensor remembers meshes; those of two worlds are equal."""
    _, second = in_one_process(two_worlds)
    assert second == in_one_process(counted, 16, 4, 2, True)[0]


def what_is_pretended() -> dict[str, list]:
    """What the collectives of rank 2 of (5, 261, 517, 773) leave in tensors."""
    found = {}
    with load(LESSON).pretended(517, 1024) as fake_tensors:
        group = dist.new_group([5, 261, 517, 773])
        found["place"] = [dist.get_rank(), dist.get_world_size(), group.rank(), group.size()]
        x = torch.arange(4.0)
        dist.all_reduce(x, group=group)
        found["all_reduce"] = x.tolist()
        whole = torch.zeros(8)
        dist.all_gather_into_tensor(whole, torch.tensor([5.0, 6.0]), group=group)
        found["all_gather"] = whole.tolist()
        own = torch.zeros(1)
        dist.reduce_scatter_tensor(own, x, group=group)
        found["reduce_scatter"] = own.tolist()
        with fake_tensors:
            huge = torch.empty(10**12)  # 4 TB
            dist.all_reduce(huge)
        found["bytes"] = [huge.nbytes]
    found["after"] = [dist.is_initialized()]
    return found


def test_the_fake_group_is_as_the_lesson_says() -> None:
    """Pinned: `pretended` alone knows torch's private names for it."""
    assert in_one_process(what_is_pretended) == {
        "place": [517, 1024, 2, 4],
        "all_reduce": [0, 1, 2, 3],
        "all_gather": [5, 6, 5, 6, 5, 6, 5, 6],
        "reduce_scatter": [2],
        "bytes": [4 * 10**12],
        "after": [False],
    }
    source = (ROOT / LESSON).read_text(encoding="utf-8")
    for private in ("torch.testing._internal", "torch._subclasses", "tensor.debug import _clear"):
        assert source.count(private) == 1


def test_calls_of_other_sizes_differ_and_those_of_other_ranks_do_not() -> None:
    lesson = load(LESSON)
    one = lesson.Collective("all_reduce", 8, (0, 1))
    right = lesson.Found([one, one], 0)
    for calls, differ in (
        ([one._replace(ranks=(2, 3)), one], 0),
        ([one, one._replace(nbytes=4)], 2),
        ([one, one, one], 1),
        ([one], 1),
    ):
        assert lesson.unlike(right, lesson.Found(calls, 0)) == differ


ONE = "a one, all-reduced by rank 517 of 1,024"
GATHERS, GATHERED = "fsdp: all-gathers", "fsdp: GB in all-gathers"
SCATTERS, SCATTERED = "fsdp: reduce-scatters", "fsdp: GB in reduce-scatters"
SUMS, SUMMED = "tp: all-reduces", "tp: GB in all-reduces"
OTHERS = "calls along any other group"
HELD = "MB of parameters held"
FREED = "freed: all-gathers"
APART = "tp outermost: calls that differ but for ranks"
NODES = "tp outermost: nodes of a tp group"
ADDED = "added losses: calls that differ"
AS_517, AS_0 = (f"rank 0 logs: calls that differ, rank {rank}" for rank in (517, 0))
REAL_GATHERS = "real ranks: all-gathers"
REAL = "real ranks: calls unlike the dry run's"

SPLIT = 'parallelize_module(layer, mesh["tp"], PLAN, src_data_rank=None)'
OUTERMOST = 'dry_run(PLAYED, {"tp": TP, "fsdp": FSDP}'
LINES = {
    "layers are freed after forward (Try)": (
        ("reshard_after_forward=reshard", "reshard_after_forward=True"),
        {GATHERS, GATHERED, REAL_GATHERS},
    ),
    "tp is outermost (Try)": (
        ('MESH = {"fsdp": FSDP, "tp": TP}\n', 'MESH = {"tp": TP, "fsdp": FSDP}\n'),
        {GATHERS, GATHERED, SCATTERS, SCATTERED, SUMS, SUMMED, OTHERS},
    ),
    "the group adds up": (("        dist.all_reduce(one)\n", "        one *= 1024\n"), {ONE}),
    "gradients stay where they are": (
        (
            'fully_shard(model, mesh=mesh["fsdp"])',
            'fully_shard(model, mesh=mesh["fsdp"]).set_requires_gradient_sync(False)',
        ),
        {SCATTERS, SCATTERED},
    ),
    "the first layer's input has no gradient": (
        ("requires_grad=True", "requires_grad=False"),
        {SUMS, SUMMED},
    ),
    "nothing is split along tp": (
        (SPLIT, "pass"),
        {GATHERED, SCATTERED, SUMS, SUMMED, HELD, NODES},
    ),
    "each micro-batch's loss is logged": (
        ("* share).backward()", "* share).backward()\n        dist.all_reduce(torch.zeros(1))"),
        {OTHERS},
    ),
    "nothing is freed": (
        ("partial(put_on_mesh, reshard=True)", "partial(put_on_mesh, reshard=False)"),
        {FREED},
    ),
    "tp is innermost": (
        (OUTERMOST, 'dry_run(PLAYED, {"fsdp": FSDP, "tp": TP}'),
        {NODES},
    ),
    "tp is outermost, and layers are freed": (
        (OUTERMOST, OUTERMOST + ", put=partial(put_on_mesh, reshard=True)"),
        {APART},
    ),
    "losses are averaged, and layers are freed": (
        ("step=partial(train_step, share=1.0)", "put=partial(put_on_mesh, reshard=True)"),
        {ADDED},
    ),
    "all ranks but one log": (
        ("if dist.get_rank() == 0:", "if dist.get_rank() != 1:"),
        {AS_517},
    ),
    "another rank logs": (("if dist.get_rank() == 0:", "if dist.get_rank() == 1:"), {AS_0}),
    "the real ranks run another model": (
        ("(make_mesh(device.type, **OURS), sizes=SMALL)",
         "(make_mesh(device.type, **OURS), sizes=(3, 64, 16))"),
        {REAL_GATHERS, REAL},
    ),
    "the real ranks make one call more": (
        ("sizes=SMALL)\n    gathers =",
         "sizes=SMALL)\n    found.calls.append(found.calls[-1])\n    gathers ="),
        {REAL},
    ),
}  # fmt: skip
BREAKS = Breaks(LINES, ranks=4, deadline=200)
# FSDP refuses a DTensor on pretended GPUs, whose tensors say that they are on the CPU.
ON_GPUS = OnGpus(changes=[("    check_real_ranks(runs, device)\n", "")])
FAKE_GROUP = "from torch.testing._internal.distributed.fake_pg import FakeStore"
WITHOUT = {
    "the fake group": Without(
        [(FAKE_GROUP, FAKE_GROUP.replace("import Fake", "import Moved"))],
        {"what one rank of 1,024 holds and sends"},
    )
}
