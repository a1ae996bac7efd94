"""Hybrid sharding with FSDP2, every byte predicted.

Task: exercises/09_hybrid_sharding/README.md.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def hybrid(model: nn.Module, per_node: int) -> nn.Module:
    """Shard `model` over the ranks of a node, replicate it over the nodes; return it.

    model: has its blocks in `model.blocks`, and parameters outside of them. The same on all ranks.
    per_node: ranks in a node, a divisor of their number. Consecutive ranks share a node.

    On 4 ranks with per_node = 2, ranks 0 and 1 are a node, 2 and 3 another. Ranks 0 and 2 hold the
    first half of every parameter's rows, ranks 1 and 3 the second.

    Parameters are gathered only inside a node: one block at a time, freed after its forward and
    gathered again for its backward; all that lies outside the blocks once, as one message. So with
    U blocks: 2 U + 1 all-gathers, U + 1 reduce-scatters inside, U + 1 all-reduces across. Never
    are more parameters whole, forward or backward, than those of one block and those outside of
    all blocks.
    """
    # --- yours
    nodes = dist.get_world_size() // per_node
    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (nodes, per_node), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)
    # --- end


def predict(model: nn.Module, nodes: int, per_node: int) -> tuple[int, int]:
    """Bytes that each rank sends in one step of `hybrid(model, per_node)`, forward and backward:
    (inside its node, across nodes).

    model: whole, not sharded yet; per_node divides the rows of every parameter, and all want
    gradients. Parameters alone travel: tied ones once, buffers not at all. Count as a ring does: of
    B bytes, a rank of n sends (n - 1)/n in an all-gather or a reduce-scatter, twice that in an
    all-reduce.

    100 B in blocks and 20 B outside, on 2 nodes of 2 ranks: (170, 60). Its two ranks together send
    120 B out of a node. Sharded over all 4, in one ring, each rank would send 255 B, and so would
    the node, which one edge of the ring leaves.
    """
    # --- yours
    in_blocks = sum(p.nbytes for p in model.blocks.parameters())
    total = sum(p.nbytes for p in model.parameters())
    gathered = total + in_blocks
    scattered = total
    inside = (gathered + scattered) * (per_node - 1) // per_node
    return inside, 2 * (total // per_node) * (nodes - 1) // nodes
    # --- end


# Live: torchrun --standalone --nproc-per-node=4 answers/09_hybrid_sharding.py


def main() -> None:
    """Print, for each number of ranks per "node", the time of a step, the bytes it sends, and how
    far its gradients are from the mean of those that the ranks find alone."""
    from course.live import joined, largest, milliseconds, say

    class Model(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            widths = [width, 2 * width] * 3 + [width]
            self.blocks = nn.ModuleList(nn.Linear(*widths[k : k + 2]) for k in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x).relu()
            return x.square().mean()

    with joined() as device:
        n = dist.get_world_size()
        width = 4096 if device.type == "cuda" else 256
        torch.manual_seed(0)  # the same weights on all ranks
        plain = Model(width).to(device)
        torch.manual_seed(1 + dist.get_rank())
        x = torch.randn(width, width, device=device)
        plain(x).backward()
        for parameter in plain.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= n
        for per_node in [k for k in range(1, n + 1) if n % k == 0]:
            torch.manual_seed(0)
            model = Model(width).to(device)
            inside, across = predict(model, n // per_node, per_node)
            model = hybrid(model, per_node)
            model(x).backward()
            off = 0.0
            for one, due in zip(model.parameters(), plain.parameters(), strict=True):
                error = (one.grad.full_tensor() - due.grad).norm() / due.grad.norm()
                off = max(off, largest(error, device))
            ms = milliseconds(lambda model=model: model(x).backward(), device)
            say(f"{n // per_node} x {per_node} ranks on {device.type}: {ms:8.2f} ms per step, ")
            say(f"    gradients are {off:.1g} of their length from the mean of the ranks'")
            say(f"    {inside / 1e6:.2f} MB sent inside a node, {across / 1e6:.2f} MB across")


if __name__ == "__main__":
    main()
