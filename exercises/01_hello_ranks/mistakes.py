"""Known mistakes: name, passage of solution.py, what replaces it, check that refuses it, what that
check says."""

MISTAKES = [
    (
        "ranks counted from 1",
        'f"rank {rank} of {n}"',
        'f"rank {rank + 1} of {n}"',
        "test_greeting_and_checksum",
        "greeting: expected rank 0 of 1, got rank 1 of 1",
    ),
    (
        "every shard gathered",
        (
            "    checksum = (rank + 1) * shard.sum()\n    dist.all_reduce(checksum)\n",
            "int(checksum)",
        ),
        (
            "    shards = [None] * n\n    dist.all_gather_object(shards, shard)\n",
            "sum((r + 1) * int(s.sum()) for r, s in enumerate(shards))",
        ),
        "test_cost",
        "rank 0: collectives: expected 1",
    ),
    (
        "only rank 0 is told the sum",
        "dist.all_reduce(checksum)",
        "dist.reduce(checksum, 0)",
        "test_greeting_and_checksum",
        "that is this rank's own part, not the sum over all ranks",
    ),
    (
        "ranks without data stay away",
        "    checksum = (rank + 1) * shard.sum()\n",
        '    if len(shard) == 0:\n        return f"rank {rank} of {n}", 0\n'
        "    checksum = (rank + 1) * shard.sum()\n",
        "test_greeting_and_checksum",
        "rank 2 came back",
    ),
    (
        "summed in float32",
        "shard.sum()",
        "shard.float().sum()",
        "test_greeting_and_checksum",
        "as rounded by a float; int64 is exact",
    ),
    (
        "summed in float64",
        "shard.sum()",
        "shard.double().sum()",
        "test_greeting_and_checksum",
        "as rounded by a float; int64 is exact",
    ),
    (
        "a tensor returned for an int",
        "int(checksum)",
        "checksum",
        "test_greeting_and_checksum",
        "the checksum: expected of type int, got tensor(",
    ),
    (
        "weighed after the sum",
        ("checksum = (rank + 1) * shard.sum()", "int(checksum)"),
        ("checksum = shard.sum()", "int((rank + 1) * checksum)"),
        "test_greeting_and_checksum",
        "weigh each rank's sum before they are added up",
    ),
    (
        "weighed by ranks from 0",
        "(rank + 1) * shard.sum()",
        "rank * shard.sum()",
        "test_greeting_and_checksum",
        "the weights are to be 1 to n",
    ),
    (
        "the shard weighed in place",
        "    checksum = (rank + 1) * shard.sum()\n",
        "    shard *= rank + 1\n    checksum = shard.sum()\n",
        "test_greeting_and_checksum",
        "the shard was changed",
    ),
    (
        "the checksum of the first call kept",
        (
            "import torch.distributed as dist\n",
            "    checksum = (rank + 1) * shard.sum()\n    dist.all_reduce(checksum)\n",
        ),
        (
            "import torch.distributed as dist\n\nkept = []\n",
            "    if not kept:\n"
            "        kept.append((rank + 1) * shard.sum())\n"
            "        dist.all_reduce(kept[0])\n"
            "    checksum = kept[0]\n",
        ),
        "test_nobody_holds_anything",
        "rank 0: checksum: expected 0, got",
    ),
    (
        "a new group for each call",
        "dist.all_reduce(checksum)",
        "dist.all_reduce(checksum, group=dist.new_group())",
        "test_greeting_and_checksum",
        "was made; all ranks are in one already",
    ),
    (
        "a new group by way of new_subgroups",
        "dist.all_reduce(checksum)",
        "dist.all_reduce(checksum, group=dist.new_subgroups(n)[0])",
        "test_greeting_and_checksum",
        "was made; all ranks are in one already",
    ),
    (
        "a barrier where ranks are odd in number",
        "    dist.all_reduce(checksum)\n",
        "    if n % 2:\n        dist.barrier()\n    dist.all_reduce(checksum)\n",
        "test_cost",
        "rank 0: collectives: expected 1, got 2",
    ),
    (
        "the weights of four ranks written down",
        "(rank + 1) * shard.sum()",
        "[1, 2, 3, 4][rank] * shard.sum()",
        "test_greeting_and_checksum",
        "rank 4: IndexError: list index out of range",
    ),
    (
        "a checksum that is never below zero",
        "int(checksum)",
        "int(checksum) % 2**64",
        "test_greeting_and_checksum",
        ": elements may be below zero, and so may their sum",
    ),
]
