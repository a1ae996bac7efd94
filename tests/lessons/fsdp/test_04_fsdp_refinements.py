"""The lesson on FSDP2's other settings: each claim FAILs when the line that it guards breaks."""

from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from course.playing import load
from course.ranks import run
from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "fsdp/04_fsdp_refinements.py"
GRADIENTS = {f"{name}: gradients, error" for name in ("as a rule", "with prefetch")}
BACKWARD = "Communication() as counted:\n        mean_loss(model, random_bytes(mesh, RANK))"
BACKWARD += ".backward()\n    first"
SYNC = "            model.set_requires_gradient_sync(last)\n"

LINES = {
    "blocks are fetched ahead unless that is asked for": (
        ("    if prefetch:\n", "    if not prefetch:\n"),
        {f"{name}: blocks asked for as block 0 starts" for name in ("as a rule", "with prefetch")},
    ),
    "backward fetches no block ahead": (
        (
            "            block.register_forward_pre_hook(note)\n",
            "            block.register_forward_pre_hook(note)\n"
            "            block.set_modules_to_backward_prefetch([block])\n",  # no other
        ),
        {f"{name}: gathers before the first gradient" for name in ("as a rule", "with prefetch")},
    ),
    "bfloat16 is computed on rank 0's data": (
        (
            "RANK)).backward()\n\n    sizes",
            "0)).backward()\n\n    sizes",
        ),
        {"bfloat16: gradients, relative error, at most"},
    ),
    "gathers stay in float32": (
        ("param_dtype=torch.bfloat16,", "param_dtype=torch.float32,"),
        {"bytes of an element gathered", "bytes of an activation"},
    ),
    "gradients are summed in bfloat16": (
        ("reduce_dtype=torch.float32", "reduce_dtype=torch.bfloat16"),
        {"bytes of an element reduced"},
    ),
    "the masters are bfloat16": (
        ("new_gpt(mesh, torch.float32)", "new_gpt(mesh, torch.bfloat16)"),
        {"bytes of a weight that the optimizer updates"},
    ),
    "every micro-batch synchronizes (Try)": (
        (SYNC, ""),
        {"3 micro-batches: reduce-scatters"},
    ),
    "micro-batches keep their blocks for backward": (
        (
            "shard_blocks(new_gpt(mesh), mesh)\n    batches",
            "shard_blocks(new_gpt(mesh), mesh, reshard_after_forward=False)\n    batches",
        ),
        {"3 micro-batches: all-gathers"},
    ),
    "micro-batches are summed, not averaged": (
        (
            "(mean_loss(model, x_BT) / micro_batches).backward()",
            "mean_loss(model, x_BT).backward()",
        ),
        {
            "norm before clipping / one process's",
            "clipped gradients, error",  # 1e-6 in the divisor of the clip
        },
    ),
    "the norm is one rank's": (
        (
            "    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()\n",
            "    shards = [p.grad.to_local() for p in model.parameters()]\n"
            "    norm = nn.utils.get_total_norm(shards)\n"
            "    for shard in shards:\n"
            "        shard.mul_(0.1 / norm)\n",
        ),
        {"norm before clipping / one process's", "clipped gradients, error"},
    ),
    "one setting's gradients are not one process's": (
        (
            "RANK))\n        forward = len(counted.log)\n        loss",
            "0))\n        forward = len(counted.log)\n        loss",
        ),
        GRADIENTS,
    ),
    "nobody fills the model born on meta": (
        ("    set_model_state_dict(model, state, options=options)\n", ""),
        {"the cure: distance from rank 0's weights"},
    ),
    "seeds differ (Try)": (
        ("    torch.manual_seed(0)\n    weight", "    torch.manual_seed(RANK)\n    weight"),
        {"one seed on all ranks: shards like rank 0's"},
    ),
    "the state dict holds the buffer": (
        ("torch.arange(64.0), persistent=False)", "torch.arange(64.0))"),
        {"elements of a non-persistent buffer filled"},
    ),
}

ON_FOUR_RANKS = {
    "freed as a rule, not resharded": (
        [
            ("mesh=mesh, reshard_after_forward=k", "mesh=mesh, reshard_after_forward=True"),
        ],
        {
            "resharded: elements a rank keeps of the blocks",
            "resharded: ranks in a gather of backward",
        },
    ),
    "it trains on rank 0's data while it reshards, and in groups": (
        [
            (
                "RANK))\n        forward = len(counted.log)\n        kept",
                "0))\n        forward = len(counted.log)\n        kept",
            ),
            (
                "RANK)).backward()\n    first",
                "0)).backward()\n    first",
            ),
        ],
        {"resharded: gradients, error", "HSDP: gradients, error"},
    ),
    "the root is resharded, too": (
        (
            "    fully_shard(model, mesh=mesh)\n",
            "    fully_shard(model, mesh=mesh, reshard_after_forward=k)\n",
        ),
        {"resharded: all-gathers in backward"},
    ),
    "one group of all ranks, seen as two": (
        [
            (
                "    model = shard_blocks(new_gpt(mesh), mesh)\n    with Counted" + BACKWARD,
                "    flat = init_device_mesh(device.type, (WORLD_SIZE,))\n"
                "    model = shard_blocks(new_gpt(mesh), flat)\n    with Counted" + BACKWARD,
            )
        ],
        {"HSDP: elements handed over inside a group", "HSDP: elements handed over across groups"},
    ),
    "groups are made of every second rank": (
        [
            (
                "mesh = init_device_mesh(device.type, (r, s), ",
                "mesh = DeviceMesh(device.type, torch.arange(WORLD_SIZE).view(s, r).T, ",
            )
        ],
        {"HSDP: elements handed over inside a group", "HSDP: elements handed over across groups"},
    ),
    "blocks are sharded in pairs from the start": (
        [
            (
                "    P_blocks = elements_of(model.blocks)\n    for",
                "    P_blocks = elements_of(model.blocks)\n"
                '    names = {"mesh_dim_names": ("replicate", "shard")}\n'
                "    pairs = init_device_mesh(mesh.device_type, (WORLD_SIZE // k, k), **names)\n"
                "    for",
            ),
            ("mesh=mesh, reshard_after_forward=k", "mesh=pairs"),
        ],
        {"resharded: ranks in a reduce-scatter"},
    ),
}


BREAKS = [Breaks(LINES), Breaks(ON_FOUR_RANKS, ranks=4)]
ON_GPUS = OnGpus(
    [
        ("    check_drawing(mesh)\n", ""),  # DTensor asks for the GPU's random numbers' state
        ("torch.randint(32_768, (2, 2049)", "torch.randint(1024, (2, 65)"),
        (
            "GPT(L=16, D=2048, T=2048, V=32_768, heads=16)",
            "GPT(L=2, D=256, T=64, V=1024, heads=2)",
        ),
        ("repeats: int = 20", "repeats: int = 1"),
    ]
)


def test_each_block_prefetches_the_one_after_it() -> None:
    """How many blocks are asked for does not tell which ones."""
    blocks = [Mock(), Mock(), Mock(), Mock()]
    load(LESSON).prefetch_forward(SimpleNamespace(blocks=blocks))
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch.assert_called_once_with([following])
    blocks[-1].set_modules_to_forward_prefetch.assert_not_called()


def test_ranks_have_different_batches() -> None:
    """With the same one everywhere, a mean over the ranks could be left out."""
    lesson = load(LESSON)
    mesh = SimpleNamespace(device_type="cpu")
    assert not lesson.random_bytes(mesh, 0).equal(lesson.random_bytes(mesh, 1))


def born_and_filled() -> tuple[set[str], int]:
    """The devices on which models are before they are sharded; the tensors that this rank read."""
    lesson = load(LESSON)
    shard_blocks, fill = lesson.shard_blocks, lesson.set_model_state_dict
    born = set()
    read = []

    def note(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        born.update(tensor.device.type for tensor in (*model.parameters(), *model.buffers()))
        return shard_blocks(model, mesh)

    def note_and_fill(model: nn.Module, state: dict, **options: object) -> None:
        read.append(len(state))
        fill(model, state, **options)

    lesson.shard_blocks, lesson.set_model_state_dict = note, note_and_fill
    lesson.claim = Mock()
    mesh = init_device_mesh("cpu", (2,))
    lesson.check_drawing(mesh)
    lesson.check_meta_device(mesh)
    return born, read[0]


def test_models_are_born_on_the_meta_device_and_rank_0_alone_has_a_state() -> None:
    assert run(born_and_filled, 2) == [({"meta"}, 53), ({"meta"}, 0)]


ON_META = [  # which has all shapes of a GPU's tensors
    ('(2, 2049), device="cuda")', '(2, 2049), device="meta")'),
    ('device="cuda", dtype=torch.bfloat16)', 'device="meta", dtype=torch.bfloat16)'),
    ('(elements // WORLD_SIZE, device="cuda")', '(elements // WORLD_SIZE, device="meta")'),
]


def test_what_is_hidden_is_what_is_not_added_to_the_unsharded_time() -> None:
    """Of 5 + 11 ms for the root, 2 x 3 + 7 for each of 4 blocks, that is 68, 20 are exposed."""
    lesson = load(LESSON, *ON_META)
    lesson.WORLD_SIZE = 2
    lesson.large_gpt = lesson.GPT
    block, root = 12 * 64**2 + 13 * 64, (2 * 256 + 64 + 2) * 64
    lesson.gather_ms = {block: 3.0, root: 5.0}.__getitem__
    lesson.scatter_ms = {block: 7.0, root: 11.0}.__getitem__
    lesson.step_ms = Mock(side_effect=[100.0, 120.0, 110.0])  # unsharded, as a rule, kept
    lesson.fully_shard = Mock()
    lesson.print0 = Mock()
    claims = []
    lesson.claim = lambda text, predicted, measured, *_, **__: claims.append(measured)
    with patch.object(torch.cuda, "is_bf16_supported", return_value=True):
        lesson.check_on_gpus(SimpleNamespace(device_type="cuda"))
    assert claims == [pytest.approx(48 / 68)]
    kept = [call.kwargs.get("reshard_after_forward") for call in lesson.fully_shard.mock_calls]
    assert kept == [None] * 5 + [False] * 4 + [None]  # the root as a rule


def test_gathers_are_timed_in_bfloat16_and_scatters_in_float32() -> None:
    lesson = load(LESSON, *ON_META)
    lesson.WORLD_SIZE = 4
    lesson.median_ms = lambda work: work()
    with patch.object(lesson.dist, "all_gather_into_tensor") as gather:
        lesson.gather_ms(40)
    with patch.object(lesson.dist, "reduce_scatter_tensor") as scatter:
        lesson.scatter_ms(40)
    handed = [(tensor.dtype, len(tensor)) for tensor in gather.call_args.args]
    assert handed == [(torch.bfloat16, 40), (torch.bfloat16, 10)]
    handed = [(tensor.dtype, len(tensor)) for tensor in scatter.call_args.args]
    assert handed == [(torch.float32, 10), (torch.float32, 40)]
