"""Hello on two nodes: the flags of each torchrun, and who shares a node with whom.

Task: exercises/15_hello_on_two_nodes/README.md.
"""

import torch.distributed as dist


def torchrun_flags(node: int, nodes: int, ranks: int, head: str, here: str) -> list[str]:
    """The flags for torchrun on one node, up to the script, which the grader adds.

    node: this node's number, from 0; nodes: how many there are; ranks: how many to start on each.
    head: the address of node 0; here: this node's own. Names of hosts mean nothing on either node.
    Nodes come in any order, up to a few seconds apart. Port 29500 is free on all; no other need be.

    On one node of one, these would do: ["--standalone", "--nproc-per-node=2"].
    """
    # --- yours
    return [
        f"--nnodes={nodes}",
        f"--nproc-per-node={ranks}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={head}:29500",
        f"--rdzv-conf=is_host={int(node == 0)}",
        f"--local-addr={here}",
    ]
    # --- end


def hello(host: str) -> tuple[str, list[int], list[int]]:
    """Greet, and say who is near.

    host: the name of this rank's host. Ranks lie on the hosts in any order, and hosts may have
    different numbers of them. Nodes are numbered from 0 in the order of their lowest rank.

    Returns the greeting, "rank R of N: local rank L of K on node M of H"; the ranks of this node,
    in order; and the ranks that have this one's local rank, in the order of their nodes (a node
    with too few ranks has none).

    On ranks 0 to 3 with the hosts b, a, b, b, rank 2 returns
    ("rank 2 of 4: local rank 1 of 3 on node 0 of 2", [0, 2, 3], [2]).
    """
    # --- yours
    rank = dist.get_rank()
    n = dist.get_world_size()
    hosts = [None] * n
    dist.all_gather_object(hosts, host)
    nodes = {name: [] for name in hosts}
    for other, name in enumerate(hosts):
        nodes[name].append(other)
    inside = nodes[host]
    local = inside.index(rank)
    across = [ranks[local] for ranks in nodes.values() if local < len(ranks)]
    place = f"local rank {local} of {len(inside)} on node {list(nodes).index(host)} of {len(nodes)}"
    return f"rank {rank} of {n}: {place}", inside, across
    # --- end
