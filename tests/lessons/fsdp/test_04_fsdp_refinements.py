"""The lesson on FSDP2's other settings: each claim FAILs when the line that it guards breaks."""

from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import Mock

from course.playing import load
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
    "every micro-batch synchronises (Try)": (
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
