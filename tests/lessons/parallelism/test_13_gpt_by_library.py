"""All 20 meshes of eight ranks against one process, and claims against broken lines."""

import math
import re
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from course.passages import CountedCommunication
from course.playing import load, play
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "parallelism/13_gpt_by_library.py"

GRADIENTS = "any mesh: error of the gradients"
LOSS = "any mesh: error of the loss"
Q = "numbers of q on a rank"
NORM = "numbers of an RMSNorm on a rank"
FIRST = "parameters changed, optimizer made first"
LAST = "parameters changed, optimizer made last"
ERROR = "blocks that tp can split after fully_shard"
COMPUTING = "numbers of q while its block computes"
PLAN = "norm1 not in the plan: error of its gradient"
SUM = "norm1 not in the plan: error of the sum over tp"

LINES = {
    "micro-batches are added, as in Try": (
        "n_microbatches=max(2, pp.size()), loss_fn=loss_of)",
        "n_microbatches=max(2, pp.size()), loss_fn=loss_of, scale_grads=False)",
        {GRADIENTS, SUM},
    ),
    "nothing is sharded along dp": (
        [
            ("        fully_shard(block, mesh=dp)  # a unit", "        # a unit"),
            ("    fully_shard(stage, mesh=dp)  # what is", "    # what is"),
            ("        fully_shard(block, mesh=mesh[DATA])  # too late", "        # too late"),
            ("        fully_shard(block, mesh=mesh[DATA])  # too early", "        # too early"),
            ("    check_plan(shapes, whole, tokens_BT)\n", ""),  # of FSDP and tp together
        ],
        {GRADIENTS, Q, NORM, ERROR},
    ),
    "all ranks have the first rank's data": (
        "tokens_BT.chunk(axis.size())[axis.get_local_rank()]",
        "tokens_BT.chunk(axis.size())[0]",
        {GRADIENTS, LOSS, SUM},
    ),
    "the optimizer is made last each time": (
        "    for stage, optimizer in (early, late):",
        "    for stage, optimizer in (late, late):",
        {FIRST},
    ),
    "the optimizer is made first each time": (
        "    for stage, optimizer in (early, late):",
        "    for stage, optimizer in (early, early):",
        {LAST},
    ),
    "copies are not averaged, as in Try": (
        "    dp = mesh[DATA]\n",
        '    dp = mesh["dp_shard"]\n',
        {GRADIENTS},
    ),
    "the norm is in the plan all the same": (' if name != "norm1"}', "}", {PLAN, SUM}),
    "the norm's summands are not added up": (
        '        dist.all_reduce(total, group=mesh["tp"].get_group())\n',
        "",
        {SUM},
    ),
    "q is counted before the step": (
        "    q.register_forward_pre_hook(lambda *_: seen.append(numbers_of(q)))\n",
        "    seen.append(numbers_of(q))\n",
        {COMPUTING},
    ),
}
ALONE = ["nothing is sharded along dp", "the norm is in the plan all the same"]
BREAKS = Breaks(LINES, ranks=4, deadline=150, alone=ALONE)

WHY = "the pretended GPUs' tensors say that they are on the CPU, and FSDP refuses a DTensor there"
ON_GPUS = OnGpus(
    changes=LINES["nothing is sharded along dp"][0],
    hardware=dict.fromkeys([GRADIENTS, Q, NORM, ERROR], WHY),
)


def all_meshes_of_eight_ranks() -> list[tuple[int, ...]]:
    """The meshes, that of the questions first."""
    found = [sizes for sizes in product((1, 2, 4, 8), repeat=4) if math.prod(sizes) == 8]
    return sorted(found, key=lambda sizes: sizes != (2, 1, 2, 2))


def test_there_are_20_meshes_of_eight_ranks() -> None:
    found = all_meshes_of_eight_ranks()
    assert len(found) == 20
    assert found[0] == (2, 1, 2, 2)
    meshes = load(LESSON).MESHES
    assert len(set(meshes[8])) == 6
    assert set(meshes[8]) < set(found)
    assert all(math.prod(sizes) == ranks for ranks in meshes for sizes in meshes[ranks])


def ranks_along_each_axis() -> dict[str, list[int]]:
    lesson = load(LESSON)
    mesh = lesson.make_mesh((2, 1, 2, 2), torch.device("cpu"))
    groups = {name: mesh.get_group(name) for name in lesson.AXES}
    return {name: dist.get_process_group_ranks(group) for name, group in groups.items()}


def test_tp_is_innermost_and_pp_outermost() -> None:
    """Groups are found by name: no claim tells where their ranks are."""
    found = run(ranks_along_each_axis, 8)
    assert found[0] == {"pp": [0, 4], "dp_replicate": [0], "dp_shard": [0, 2], "tp": [0, 1]}
    assert found[7] == {"pp": [3, 7], "dp_replicate": [7], "dp_shard": [5, 7], "tp": [6, 7]}


def two_steps_on_one_rank() -> float:
    """How far they come, by one schedule, from two steps of a plain loop."""
    lesson = load(LESSON)
    torch.manual_seed(0)
    whole = lesson.LlamaModel().double()
    mesh = lesson.make_mesh((1, 1, 1, 1), torch.device("cpu"))
    stage = lesson.put_on_mesh(whole, mesh)
    schedule = lesson.schedule_of(stage, mesh)
    ours, plain = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (stage, whole))
    for tokens_BT in torch.randint(lesson.V, (2, lesson.B, lesson.T + 1)):
        lesson.train_step(schedule, ours, mesh, tokens_BT)
        plain.zero_grad()
        lesson.loss_of(whole(tokens_BT[:, :-1]), tokens_BT[:, 1:]).backward()
        plain.step()
    pairs = zip(stage.parameters(), whole.parameters(), strict=True)
    errors = [(found.full_tensor() - due).abs().max() for found, due in pairs]
    return torch.stack(errors).max().item()


def test_a_second_step_has_no_gradient_of_the_first() -> None:
    assert run(two_steps_on_one_rank, 1)[0] < 1e-12


def gathers_of_a_step() -> int:
    """All-gathers along dp_shard in the second step: before the first, shapes are tried as well."""
    lesson = load(LESSON)
    mesh = lesson.make_mesh((1, 1, 2, 1), torch.device("cpu"))
    stage = lesson.put_on_mesh(lesson.LlamaModel().double(), mesh)
    schedule = lesson.schedule_of(stage, mesh)
    tokens_bT = lesson.share_of(torch.randint(lesson.V, (lesson.B, lesson.T + 1)), mesh)
    lesson.compute_gradients(schedule, mesh, tokens_bT)
    with CountedCommunication() as counted:
        lesson.compute_gradients(schedule, mesh, tokens_bT)
    return sum(len(call.ranks) == 2 for call in counted.calls("all_gather"))


def test_a_block_is_gathered_once_more_than_there_are_micro_batches() -> None:
    """Two of these, and four blocks; embedding, norm and head are gathered once."""
    assert run(gathers_of_a_step, 2) == [4 * 3 + 1] * 2


@pytest.mark.night
@pytest.mark.timeout(400)
def test_all_20_meshes_are_as_one_process() -> None:
    """With a layer for each of eight stages."""
    all_of_them = ("shapes = MESHES[WORLD_SIZE]", f"shapes = {all_meshes_of_eight_ranks()}")
    played = play(LESSON, 8, ("LAYERS = 4", "LAYERS = 8"), all_of_them, deadline=300)
    played.expect(set())
    assert len(re.findall(r": error of gradients \d", played.output)) == 20


MAX_NORM = 0.01


def clipped_step(shape: tuple[int, ...]) -> tuple[float, float, float]:
    """The whole gradient's norm; how far ours is, and the weights after a clipped step."""
    lesson = load(LESSON)
    torch.manual_seed(0)
    whole = lesson.LlamaModel().double()
    mesh = lesson.make_mesh(shape, torch.device("cpu"))
    stage = lesson.put_on_mesh(whole, mesh)
    tokens_BT = torch.randint(lesson.V, (lesson.B, lesson.T + 1))
    ours, plain = (torch.optim.SGD(model.parameters(), lr=1.0) for model in (stage, whole))
    mine = lesson.share_of(tokens_BT, mesh)
    lesson.compute_gradients(lesson.schedule_of(stage, mesh), mesh, mine)
    found = nn.utils.get_total_norm([parameter.grad for parameter in stage.parameters()])
    square = found.full_tensor() ** 2  # DTensors know what is copied; no stage knows of others
    dist.all_reduce(square, group=mesh["pp"].get_group())
    nn.utils.clip_grads_with_norm_(stage.parameters(), MAX_NORM, square.sqrt())
    ours.step()
    lesson.loss_of(whole(tokens_BT[:, :-1]), tokens_BT[:, 1:]).backward()
    norm = nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM)
    plain.step()
    errors = [
        (parameter.full_tensor() - whole.get_parameter(name)).abs().max()
        for name, parameter in stage.named_parameters()
    ]
    off = abs(square.sqrt() / norm - 1).item()
    return norm.item(), off, torch.stack(errors).max().item()


@pytest.mark.parametrize("shape", [(2, 1, 1, 2), (1, 2, 2, 1), (1, 1, 2, 2)])
def test_a_loop_that_clips_adds_the_squares_along_pp(shape: tuple[int, ...]) -> None:
    """By its own gradient's norm each stage would take a longer step; copies count once."""
    for norm, off, error in run(clipped_step, 4, shape):
        assert norm > 0.1
        assert off < 1e-12
        assert error < 1e-12


def saved_on_one_mesh_and_loaded_on_another(folder: str) -> int:
    """How many numbers are not as they were saved."""
    lesson = load(LESSON)
    stages = []
    for seed, shape in enumerate([(2, 1, 1, 2), (1, 1, 2, 2)]):
        torch.manual_seed(seed)
        whole = lesson.LlamaModel().double()
        stages.append(lesson.put_on_mesh(whole, lesson.make_mesh(shape, torch.device("cpu"))))
    saved, loaded = ({n: p.detach() for n, p in s.named_parameters()} for s in stages)
    dcp.save(saved, checkpoint_id=folder)
    dcp.load(loaded, checkpoint_id=folder)
    torch.manual_seed(0)
    whole = lesson.LlamaModel().double()
    pairs = [(loaded[name].full_tensor(), whole.get_parameter(name)) for name in loaded]
    return sum((ours != due).sum().item() for ours, due in pairs)


def test_another_mesh_loads_what_one_has_saved(tmp_path: Path) -> None:
    assert run(saved_on_one_mesh_and_loaded_on_another, 4, str(tmp_path)) == [0] * 4
