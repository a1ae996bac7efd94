"""The lesson on FSDP2's other settings: each claim FAILs when the line that it guards breaks."""

from tests.lessons.every import Breaks, OnGpus, test_lesson  # noqa: F401

LESSON = "fsdp/04_fsdp_refinements.py"
GRADIENTS = {f"{name}: gradients, error" for name in ("as a rule", "with prefetch")}
BACKWARD = "Communication() as counted:\n        mean_loss(model, random_bytes(mesh, RANK))"
BACKWARD += ".backward()\n    first"
SYNC = "            model.set_requires_gradient_sync(last)\n"

LINES = {
    "nothing is fetched ahead": (
        ("model.blocks[i].set_modules_to_forward_prefetch([model.blocks[i + 1]])", "pass"),
        {"with prefetch: blocks asked for as block 0 starts"},
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
            "norm / expected,",
            "nn.utils.get_total_norm([p.grad.to_local() for p in model.parameters()]) / expected,",
        ),
        {"norm before clipping / one process's"},
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
    "one setting's gradients are not one process's": (
        (
            "RANK))\n        forward = len(counted.log)\n        loss",
            "0))\n        forward = len(counted.log)\n        loss",
        ),
        GRADIENTS,
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
