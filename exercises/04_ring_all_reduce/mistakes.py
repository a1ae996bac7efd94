"""Known mistakes: name, passage of solution.py, what replaces it, check that refuses it, what that
check says."""

MISTAKES = [
    (
        "added in float32",
        (
            "    for step in range",
            "zip(x.tensor_split(2), (1, -1)",
            "into.copy_(into + came if step < n - 1 else came)\n",
        ),
        (
            "    y = x.float()\n    for step in range",
            "zip(y.tensor_split(2), (1, -1)",
            "into.copy_(into + came if step < n - 1 else came)\n    x.copy_(y)\n",
        ),
        "test_dtypes",
        "rank 0: element",
    ),
    (
        "integers added in float64",
        (
            "    for step in range",
            "zip(x.tensor_split(2), (1, -1)",
            "into.copy_(into + came if step < n - 1 else came)\n",
        ),
        (
            "    y = x.double()\n    for step in range",
            "zip(y.tensor_split(2), (1, -1)",
            "into.copy_(into + came if step < n - 1 else came)\n    x.copy_(y)\n",
        ),
        "test_dtypes",
        "rank 0: element",
    ),
    (
        "the mean instead of the sum",
        "into.copy_(into + came if step < n - 1 else came)\n",
        "into.copy_(into + came if step < n - 1 else came)\n    x /= n\n",
        "test_sum",
        "this is the mean, not the sum",
    ),
    (
        "added in the second round too",
        "into.copy_(into + came if step < n - 1 else came)",
        "into.add_(came)",
        "test_sum",
        "rank 0: element",
    ),
    (
        "the library called",
        "    rank = dist.get_rank()\n",
        "    dist.all_reduce(x)\n    return\n    rank = dist.get_rank()\n",
        "test_sum",
        "the answer calls all_reduce; use send, recv",
    ),
    (
        "the library called beneath its name",
        ("import torch.distributed as dist\n", "    rank = dist.get_rank()\n"),
        (
            "import torch.distributed as dist\n"
            "from torch.distributed._functional_collectives import all_reduce\n",
            '    x.copy_(all_reduce(x, "sum", dist.group.WORLD))\n'
            "    return\n    rank = dist.get_rank()\n",
        ),
        "test_sum",
        "the answer calls all_reduce; use send, recv",
    ),
    (
        "everybody sends first",
        "            operations.append(dist.P2POp(dist.isend, out, (rank + way) % n))\n",
        "            dist.send(out, (rank + way) % n)\n",
        "test_sum",
        "waits in send",
    ),
    (
        "all gathered at rank 0",
        None,
        "mistake_hub.py",
        "test_bytes",
        "rank 0 of 4, x of 384 B: bytes sent: expected 576, got 1,152",
    ),
    (
        "a new tensor returned",
        (
            "    for step in range",
            "zip(x.tensor_split(2), (1, -1)",
            "into.copy_(into + came if step < n - 1 else came)\n",
        ),
        (
            "    y = x.clone()\n    for step in range",
            "zip(y.tensor_split(2), (1, -1)",
            "into.copy_(into + came if step < n - 1 else came)\n    return y\n",
        ),
        "test_sum",
        "it returns another tensor; the sum belongs into x itself",
    ),
    (
        "whole halves sent on every hop",
        None,
        "mistake_whole_tensors.py",
        "test_bytes",
        "x of 384 B: bytes sent: expected 576, got 1,152",
    ),
    (
        "only the first round",
        "range(2 * (n - 1))",
        "range(n - 1)",
        "test_sum",
        "rank 0: element",
    ),
    (
        "both halves to the left",
        "(1, -1), strict=True",
        "(-1, -1), strict=True",
        "test_bytes",
        "messages by rank: expected {1: 6, 3: 6}, got {3: 12}",
    ),
    (
        "both halves to the right",
        "(1, -1), strict=True",
        "(1, 1), strict=True",
        "test_bytes",
        "nothing goes to the left, so half of every link rests",
    ),
    (
        "the left ring is not mirrored",
        ("chunks[(way * rank - step) % n]", "chunks[(way * rank - step - 1) % n]"),
        ("chunks[(rank - step) % n]", "chunks[(rank - step - 1) % n]"),
        "test_sum",
        "rank 0: element",
    ),
    (
        "only the first half summed",
        "(1, -1), strict=True",
        "(1,), strict=False",
        "test_sum",
        "the half for the left is still this rank's own",
    ),
    (
        "one direction after the other",
        (
            "        for work in dist.batch_isend_irecv(operations):\n            work.wait()\n",
            "            arriving.append((into, came))\n",
        ),
        (
            "",
            "            arriving.append((into, came))\n"
            "            for work in dist.batch_isend_irecv(operations[-2:]):\n"
            "                work.wait()\n",
        ),
        "test_both_ways_at_once",
        "has not started its second send while rank 0 is away: start both directions, then wait",
    ),
    (
        "one ring after the other",
        (
            "    for step in range(2 * (n - 1)):\n        operations = []\n",
            "for half, way in zip(x.tensor_split(2), (1, -1), strict=True):",
        ),
        (
            "    for turn in range(4 * (n - 1)):\n"
            "        step = turn % (2 * (n - 1))\n"
            "        way = 1 if turn == step else -1\n"
            "        operations = []\n",
            "for half in [x.tensor_split(2)[turn != step]]:",
        ),
        "test_both_ways_at_once",
        "has not started its second send while rank 0 is away: start both directions, then wait",
    ),
    (
        "receives in the wrong order for two ranks",
        "operations.append(dist.P2POp(dist.irecv, came, (rank - way) % n))",
        "operations.insert(0, dist.P2POp(dist.irecv, came, (rank - way) % n))",
        "test_sum",
        "rank 0: element",
    ),
    (
        "equal chunks wanted",
        "            chunks = half.tensor_split(n)\n",
        '            assert len(half) % n == 0, "the length must be a multiple of 2 n"\n'
        "            chunks = half.tensor_split(n)\n",
        "test_sum",
        "AssertionError: the length must be a multiple of 2 n",
    ),
    (
        "the first half to the left",
        "(1, -1), strict=True",
        "(-1, 1), strict=True",
        "test_bytes",
        "x of 7 elements, the first half of them 4: messages to the right by bytes, from all 4 "
        "ranks: expected {4: 24}, got {0: 6, 4: 18}",
    ),
    (
        "chunks as equal as can be but for the last ones",
        "            chunks = half.tensor_split(n)\n",
        "            size = -(-len(half) // n)\n"
        "            chunks = [half[i * size : (i + 1) * size] for i in range(n)]\n",
        "test_bytes",
        "x of 10 elements, the first half of them 5: messages to the right by bytes, from all 4 "
        "ranks: expected {4: 18, 8: 6}, got {0: 6, 4: 6, 8: 12}",
    ),
    (
        "no elements not wanted",
        "    rank = dist.get_rank()\n",
        '    assert len(x) > 0, "there is nothing to sum"\n    rank = dist.get_rank()\n',
        "test_sum",
        "AssertionError: there is nothing to sum",
    ),
    (
        "x pointed at another tensor",
        (
            "    for step in range",
            "zip(x.tensor_split(2), (1, -1)",
            "into.copy_(into + came if step < n - 1 else came)\n",
        ),
        (
            "    y = x.clone()\n    for step in range",
            "zip(y.tensor_split(2), (1, -1)",
            "into.copy_(into + came if step < n - 1 else came)\n    x.data = y\n",
        ),
        "test_sum",
        "x was given other memory; the sum belongs where x lies",
    ),
    (
        "one direction after the other, but for the first step",
        "        for work in dist.batch_isend_irecv(operations):\n            work.wait()\n",
        "        works = [] if step else dist.batch_isend_irecv(operations)\n"
        "        for pair in (operations[:2], operations[2:]) if step else ():\n"
        "            for work in dist.batch_isend_irecv(pair):\n"
        "                work.wait()\n"
        "        for work in works:\n"
        "            work.wait()\n",
        "test_both_ways_at_once",
        "rank 0, step 1: it waits when 2 of the four have been started",
    ),
    (
        "x cut into 2 n chunks at once",
        "        for half, way in zip(x.tensor_split(2), (1, -1), strict=True):\n"
        "            chunks = half.tensor_split(n)\n",
        "        every = x.tensor_split(2 * n)\n"
        "        for chunks, way in zip((every[:n], every[n:]), (1, -1), strict=True):\n",
        "test_bytes",
        "x of 10 elements, the first half of them 5: messages to the right by bytes, from all 4 "
        "ranks: expected {4: 18, 8: 6}, got {4: 12, 8: 12}",
    ),
    (
        "one direction after the other where there are two ranks",
        "        for work in dist.batch_isend_irecv(operations):\n            work.wait()\n",
        "        for pair in (operations[:2], operations[2:]) if n == 2 else (operations,):\n"
        "            for work in dist.batch_isend_irecv(pair):\n"
        "                work.wait()\n",
        "test_both_ways_at_once",
        "rank 1 has not started its second send while rank 0 is away: start both directions, "
        "then wait",
    ),
    (
        "no wait for what is sent",
        (
            "def ring_all_reduce(",
            "        for work in dist.batch_isend_irecv(operations):\n            work.wait()\n",
        ),
        (
            "kept = []\n\n\ndef ring_all_reduce(",
            "        works = dist.batch_isend_irecv(operations)\n"
            "        kept.append(works)\n"
            "        for work in works[1::2]:\n"
            "            work.wait()\n",
        ),
        "test_both_ways_at_once",
        "rank 0: 24 sends and receives were started, 12 waited for",
    ),
    (
        "room for what comes kept by its length, not by its dtype",
        ("def ring_all_reduce(", "            came = torch.empty_like(into)\n"),
        (
            "rooms = {}\n\n\ndef ring_all_reduce(",
            "            if (way, len(into)) not in rooms:\n"
            "                rooms[way, len(into)] = torch.empty_like(into)\n"
            "            came = rooms[way, len(into)]\n",
        ),
        "test_dtypes_after_one_another",
        "call 2, the first of int64",
    ),
]
