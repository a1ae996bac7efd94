# The grader says: rank 0: bytes sent (inside, across): expected (29376, 10416), got (20832, 10416)
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard


def hybrid(model, per_node):
    nodes = dist.get_world_size() // per_node
    mesh = init_device_mesh("cpu", (nodes, per_node), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def predict(model, nodes, per_node):
    in_blocks = sum(p.nbytes for p in model.blocks.parameters())
    total = sum(p.nbytes for p in model.parameters())
    inside = (2 * total) * (per_node - 1) // per_node
    return inside, 2 * (total // per_node) * (nodes - 1) // nodes
