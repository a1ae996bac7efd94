"""All 20 meshes of eight ranks against one process, and claims against broken lines."""

import re

import pytest
import torch
import torch.distributed as dist

from course.playing import load, play
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "parallelism/13_gpt_by_library.py"

MESHES = "any mesh: error of gradients, loss, norm"
Q = "numbers of q on a rank"
NORM = "numbers of an RMSNorm on a rank"
FIRST = "parameters changed, optimizer made first"
LAST = "parameters changed, optimizer made last"
ERROR = "errors about a DTensor, fully_shard before tp"
LOADED = "numbers unlike the saved ones, another mesh"

LINES = {
    "micro-batches are added, as in Try": (
        "n_microbatches=max(2, p), loss_fn=loss_of)",
        "n_microbatches=max(2, p), loss_fn=loss_of, scale_grads=False)",
        {MESHES},
    ),
    "nothing is sharded along dp": (
        [
            ("        fully_shard(block, mesh=dp)  # a unit", "        pass  # a unit"),
            ("    fully_shard(stage, mesh=dp)  # what is", "    # what is"),
        ],
        {MESHES, Q, NORM, ERROR},
    ),
    "all ranks have the first rank's data": (
        "tokens_bT = tokens_BT.chunk(dp)[mine]",
        "tokens_bT = tokens_BT.chunk(dp)[0]",
        {MESHES},
    ),
    "the norm is this stage's": (
        '    dist.all_reduce(square, group=mesh["pp"].get_group())\n',
        "",
        {MESHES},
    ),
    "the optimizer is made last each time": (
        "    for optimizer in (early, late):",
        "    for optimizer in (late, late):",
        {FIRST},
    ),
    "the optimizer is made first each time": (
        "    for optimizer in (early, late):",
        "    for optimizer in (early, early):",
        {LAST},
    ),
    "nothing is loaded": (
        "    dcp.load(weights_of(loaded), checkpoint_id=folders[0])\n",
        "",
        {LOADED},
    ),
}
BREAKS = Breaks(LINES, ranks=4, deadline=150)

WHY = "the pretended GPUs' tensors say that they are on the CPU, and FSDP refuses a DTensor there"
ON_GPUS = OnGpus(
    changes=LINES["nothing is sharded along dp"][0],
    hardware={MESHES: WHY, Q: WHY, NORM: WHY, ERROR: WHY},
)


def test_there_are_20_meshes_of_eight_ranks() -> None:
    found = load(LESSON, ("LAYERS = 4", "LAYERS = 8")).all_meshes(8)
    assert len(found) == len(set(found)) == 20
    assert all(pp * replicas * shards * tp == 8 for pp, replicas, shards, tp in found)


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


@pytest.mark.night
@pytest.mark.timeout(400)
def test_all_20_meshes_are_as_one_process() -> None:
    played = play(LESSON, 8, argv=("--all",), deadline=300)
    played.expect(set())
    assert len(re.findall(r": error \d", played.output)) == 20
