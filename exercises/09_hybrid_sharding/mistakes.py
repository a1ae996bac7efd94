"""Known mistakes: name, passage of solution.py, its replacement, the check, what it says."""

MISTAKES = [
    (
        "plain data parallelism",
        "    for block in model.blocks:\n"
        "        fully_shard(block, mesh=mesh)\n"
        "    return fully_shard(model, mesh=mesh)\n",
        "    return nn.parallel.DistributedDataParallel(model)\n",
        "test_shards",
        "rank 0: nothing is sharded: every rank holds every parameter whole",
    ),
    (
        "the axes of the mesh exchanged",
        '(nodes, per_node), mesh_dim_names=("replicate", "shard")',
        '(per_node, nodes), mesh_dim_names=("shard", "replicate")',
        "test_shards",
        "(over mesh [[0], [1], [2]], (Replicate(), Shard(dim=0))): bytes of the shard: "
        "expected 384, got 1,152",
    ),
    (
        "one axis over all ranks",
        '(nodes, per_node), mesh_dim_names=("replicate", "shard")',
        "(nodes * per_node,)",
        "test_shards",
        "(over mesh [0, 1, 2, 3], (Shard(dim=0),)): bytes of the shard: expected 576, got 288",
    ),
    (
        "shards over nodes, copies inside a node",
        "    mesh = init_device_mesh(device, (nodes, per_node), "
        'mesh_dim_names=("replicate", "shard"))\n',
        "    from torch import arange\n"
        "    from torch.distributed.device_mesh import DeviceMesh\n\n"
        "    ranks = arange(nodes * per_node).view(per_node, nodes).T\n"
        '    mesh = DeviceMesh(device, ranks, mesh_dim_names=("replicate", "shard"))\n',
        "test_shards",
        "rank 1: first.weight (over mesh [[0, 2], [1, 3]], (Replicate(), Shard(dim=0))): expected "
        "part 1, got part 0 of 2",
    ),
    (
        "nothing sharded",
        "(nodes, per_node), mesh_dim_names",
        "(nodes * per_node, 1), mesh_dim_names",
        "test_shards",
        "(over mesh [[0], [1], [2], [3]], (Replicate(), Shard(dim=0))): bytes of the shard: "
        "expected 576, got 1,152",
    ),
    (
        "the blocks alone in units",
        "    return fully_shard(model, mesh=mesh)\n",
        "    return model\n",
        "test_shards",
        "first.weight is no DTensor: it is in no unit",
    ),
    (
        "the model before its blocks",
        (
            "    for block in model.blocks:\n",
            "    return fully_shard(model, mesh=mesh)\n",
        ),
        (
            "    fully_shard(model, mesh=mesh)\n    for block in model.blocks:\n",
            "    return model\n",
        ),
        "test_shards",
        "in hybrid: fully_shard(block, mesh=mesh)",
    ),
    (
        "replicas whose gradients are never summed",
        "    return fully_shard(model, mesh=mesh)\n",
        "    fully_shard(model, mesh=mesh)\n"
        "    model.set_requires_all_reduce(False)\n"
        "    return model\n",
        "test_gradients",
        "gradient of first.weight: expected a tensor, got None",
    ),
    (
        "gradients divided by the ranks of a node alone",
        "    return fully_shard(model, mesh=mesh)\n",
        "    fully_shard(model, mesh=mesh)\n"
        "    for unit in (model, *model.blocks):\n"
        "        unit.set_gradient_divide_factor(per_node)\n"
        "    return model\n",
        "test_gradients",
        "gradient of first.weight (over mesh [[0, 1], [2, 3]], (Replicate(), Shard(dim=0))): "
        "2 times what is due: the sum over nodes, not the mean",
    ),
    (
        "the model alone a unit",
        "    for block in model.blocks:\n        fully_shard(block, mesh=mesh)\n",
        "",
        "test_memory",
        "bytes of parameters that are whole while block 0 works: expected",
    ),
    (
        "what forward gathered kept",
        ("fully_shard(block, mesh=mesh)", "fully_shard(model, mesh=mesh)"),
        (
            "fully_shard(block, mesh=mesh, reshard_after_forward=False)",
            "fully_shard(model, mesh=mesh, reshard_after_forward=False)",
        ),
        "test_memory",
        "whole while block 1 works: expected",
    ),
    (
        "the outermost unit freed too",
        ("fully_shard(block, mesh=mesh)", "fully_shard(model, mesh=mesh)"),
        (
            "fully_shard(block, mesh=mesh, reshard_after_forward=True)",
            "fully_shard(model, mesh=mesh, reshard_after_forward=True)",
        ),
        "test_bytes",
        "rank 0: all_gathers: expected 7, got 8",
    ),
    (
        "every layer a unit",
        "        fully_shard(block, mesh=mesh)\n",
        "        fully_shard(block.up, mesh=mesh)\n        fully_shard(block.down, mesh=mesh)\n",
        "test_bytes",
        "rank 0: all_gathers: expected 7, got 13",
    ),
    (
        "numbers predicted for bytes",
        (
            "sum(p.nbytes for p in model.blocks.parameters())",
            "sum(p.nbytes for p in model.parameters())",
        ),
        (
            "sum(p.numel() for p in model.blocks.parameters())",
            "sum(p.numel() for p in model.parameters())",
        ),
        "test_counted",
        "rank 0: bytes sent (inside, across): expected (29376, 10416), got (3672, 1302)",
    ),
    (
        "one gather predicted where there are two",
        "gathered = total + in_blocks",
        "gathered = total",
        "test_counted",
        "rank 0: bytes sent (inside, across): expected (29376, 10416), got (20832, 10416)",
    ),
    (
        "whole gradients predicted across nodes",
        "2 * (total // per_node) * (nodes - 1) // nodes",
        "2 * total * (nodes - 1) // nodes",
        "test_counted",
        "rank 0: bytes sent (inside, across): expected (29376, 10416), got (29376, 20832)",
    ),
    (
        "the traffic of two nodes predicted for any number",
        "2 * (total // per_node) * (nodes - 1) // nodes",
        "total // per_node if nodes > 1 else 0",
        "test_predict",
        "8 node(s) of 4: bytes sent (inside, across): expected (44064, 9114), got (44064, 5208)",
    ),
    (
        "eight bytes predicted for every number",
        (
            "sum(p.nbytes for p in model.blocks.parameters())",
            "sum(p.nbytes for p in model.parameters())",
        ),
        (
            "sum(8 * p.numel() for p in model.blocks.parameters())",
            "sum(8 * p.numel() for p in model.parameters())",
        ),
        "test_predict",
        "bfloat16, 8 node(s) of 4: bytes sent (inside, across): expected",
    ),
    (
        "buffers and tied weights predicted from the state_dict",
        "sum(p.nbytes for p in model.parameters())",
        "sum(t.nbytes for t in model.state_dict().values())",
        "test_counted",
        ", buffers, and tied weights twice counted: expected (29376, 10416), got",
    ),
    (
        "blocks left whole after their backward",
        "    return fully_shard(model, mesh=mesh)",
        "    model = fully_shard(model, mesh=mesh)\n"
        "    model.set_reshard_after_backward(False)\n"
        "    return model",
        "test_memory",
        "bytes of parameters that are whole while block 1 works backward: expected",
    ),
    (
        "what two blocks share counted twice",
        "sum(p.nbytes for p in model.blocks.parameters())",
        "sum(p.nbytes for block in model.blocks for p in block.parameters())",
        "test_tied_blocks",
        "two blocks share a bias: bytes sent (inside, across): expected",
    ),
    (
        "a ring's message rounded down before it is multiplied",
        "2 * (total // per_node) * (nodes - 1) // nodes",
        "2 * (nodes - 1) * (total // per_node // nodes)",
        "test_predict",
        "across rounded down before it is multiplied: expected (53856, 3444), got (53856, 3302)",
    ),
    (
        "what the model itself holds forgotten",
        "    total = sum(p.nbytes for p in model.parameters())\n",
        "    modules = [m for name, m in model.named_children() if name != 'blocks']\n"
        "    outside = {p for m in modules for p in m.parameters()}\n"
        "    total = in_blocks + sum(p.nbytes for p in outside)\n",
        "test_parameter_of_the_model",
        "a parameter lies in the model itself: bytes sent (inside, across): expected",
    ),
]
