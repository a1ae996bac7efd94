"""Known mistakes: name, passage of solution.py, its replacement, the check, what it says."""

MISTAKES = [
    (
        "job 1 left as it was",
        "    dist.all_reduce(counts)\n    if dist.get_rank() == 0:\n",
        "    if dist.get_rank() == 0:\n        dist.all_reduce(counts)\n",
        "test_job_1",
        "rank 0 waits in all_reduce, called from answer.py:",
    ),
    (
        "job 1 without the call that hangs",
        "    dist.all_reduce(counts)\n",
        "",
        "test_job_1",
        "counts rank 0's own samples alone",
    ),
    (
        "job 1 reported by every rank",
        "    if dist.get_rank() == 0:\n"
        "        right, seen = counts.tolist()\n"
        '        return f"{right} of {seen} right"\n'
        "    return None\n",
        '    right, seen = counts.tolist()\n    return f"{right} of {seen} right"\n',
        "test_job_1",
        "rank 1: what job_1 returns: expected None, got",
    ),
    (
        "job 2 asks before every step whether somebody has a batch",
        "    steps = torch.tensor(len(batches))\n"
        "    dist.all_reduce(steps, dist.ReduceOp.MAX)\n"
        "    nothing = w.new_zeros(0, len(w)), w.new_zeros(0)\n"
        "    for x, y in batches + [nothing] * (int(steps) - len(batches)):\n"
        "        error = x @ w - y\n"
        "        grad = x.T @ error\n"
        "        dist.all_reduce(grad)\n"
        "        w = w - grad / 64\n"
        "    return w\n",
        "    step = 0\n"
        "    while True:\n"
        "        more = torch.tensor(int(step < len(batches)))\n"
        "        dist.all_reduce(more)\n"
        "        if more == 0:\n"
        "            return w\n"
        "        grad = torch.zeros_like(w)\n"
        "        if step < len(batches):\n"
        "            x, y = batches[step]\n"
        "            error = x @ w - y\n"
        "            grad = x.T @ error\n"
        "        dist.all_reduce(grad)\n"
        "        w = w - grad / 64\n"
        "        step += 1\n",
        "test_job_2",
        "rank 0: its calls: expected {'all_reduce of 48 B': 4}, got {'all_reduce of 48 B': 4, "
        "'all_reduce of 8 B': 4}",
    ),
    (
        "job 2 repeats batches to fill up",
        "    nothing = w.new_zeros(0, len(w)), w.new_zeros(0)\n"
        "    for x, y in batches + [nothing] * (int(steps) - len(batches)):\n",
        "    for x, y in (batches * int(steps))[:steps]:\n",
        "test_job_2",
        "rank 0: w after 4 steps: element",
    ),
    (
        "job 2 stops at the fewest batches",
        "    dist.all_reduce(steps, dist.ReduceOp.MAX)\n"
        "    nothing = w.new_zeros(0, len(w)), w.new_zeros(0)\n"
        "    for x, y in batches + [nothing] * (int(steps) - len(batches)):\n",
        "    dist.all_reduce(steps, dist.ReduceOp.MIN)\n    for x, y in batches[:steps]:\n",
        "test_job_2",
        "for all stopped when the first rank had no more",
    ),
    (
        "job 3 gathers everything",
        "        if 0 <= partner < n:\n"
        "            theirs = torch.empty_like(w)\n"
        "            sending = dist.isend(w, partner)\n"
        "            dist.recv(theirs, partner)\n"
        "            sending.wait()\n"
        "            w = (w + theirs) / 2\n",
        "        of_rank = [torch.empty_like(w) for _ in range(n)]\n"
        "        dist.all_gather(of_rank, w)\n"
        "        if 0 <= partner < n:\n"
        "            w = (w + of_rank[partner]) / 2\n",
        "test_job_3",
        "rank 0: its calls: expected {'recv of 40 B, rank 1': 1, 'send of 40 B, rank 1': 1}, got "
        "{'all_gather",
    ),
    (
        "job 3 never waits for its send",
        "            sending.wait()\n",
        "",
        "test_job_3",
        "isend and irecv return at once; wait for what they return",
    ),
    (
        "job 3 waits for what comes, and not for its send",
        "            dist.recv(theirs, partner)\n            sending.wait()\n",
        "            coming = dist.irecv(theirs, partner)\n            coming.wait()\n",
        "test_job_3",
        "wait for what they return: of 2 messages it has waited for 1",
    ),
    (
        "job 3 with rank 0 alone sending first",
        "            sending = dist.isend(w, partner)\n"
        "            dist.recv(theirs, partner)\n"
        "            sending.wait()\n",
        "            if rank == 0:\n"
        "                dist.send(w, partner)\n"
        "                dist.recv(theirs, partner)\n"
        "            else:\n"
        "                dist.recv(theirs, partner)\n"
        "                dist.send(w, partner)\n",
        "test_job_3",
        "rank 0 came back",
    ),
    (
        "job 4 ordered by kind alone",
        "    for _, tensor in sorted(state.items()):\n",
        "    for tensor in sorted(state.values(), key=torch.is_floating_point):\n",
        "test_job_4",
        "became the mean of rank 0's",
    ),
    (
        "job 4 with one rank's order turned round",
        "    for _, tensor in sorted(state.items()):\n",
        "    tensors = list(state.values())\n"
        "    for tensor in tensors[2:] + tensors[:2] if dist.get_rank() == 1 else tensors:\n",
        "test_job_4",
        "not every rank has come back",
    ),
    (
        "job 4 ordered by the length of names",
        "sorted(state.items())",
        "sorted(state.items(), key=lambda item: len(item[0]))",
        "test_job_4",
        "became the mean of rank 0's",
    ),
    (
        "job 4 in the order of a set",
        "for _, tensor in sorted(state.items()):",
        "for tensor in [state[name] for name in set(state)]:",
        "test_job_4",
        "a set of names has another order in each process that torchrun starts",
    ),
    (
        "job 4 puts other tensors into the dict",
        ("for _, tensor in", "            tensor /= n\n"),
        ("for name, tensor in", "            state[name] = tensor / n\n"),
        "test_job_4",
        "is another tensor now: write into the one that was given",
    ),
    (
        "job 5 drops the bad gradient alone",
        "        dist.all_reduce(grad)\n        if not grad.isfinite().all():\n"
        "            continue  # one bad sample must not spoil w\n",
        "        if not grad.isfinite().all():\n            grad = torch.zeros_like(w)\n"
        "        dist.all_reduce(grad)\n",
        "test_job_5",
        "bad gradients were left out, the others' of that step taken",
    ),
    (
        "job 5 takes the bad step",
        "        if not grad.isfinite().all():\n"
        "            continue  # one bad sample must not spoil w\n",
        "",
        "test_job_5",
        "rank 0: w is not finite; a bad step was taken",
    ),
    (
        "job 5 looks for NaN alone",
        "        if not grad.isfinite().all():\n",
        "        if grad.isnan().any():\n",
        "test_job_5",
        "rank 0: w is not finite; a bad step was taken",
    ),
    (
        "job 5 looks for infinities alone",
        "        if not grad.isfinite().all():\n",
        "        if grad.isinf().any():\n",
        "test_job_5",
        "rank 0: w is not finite; a bad step was taken",
    ),
    (
        "job 4 written anew",
        "    n = dist.get_world_size()\n"
        "    for _, tensor in sorted(state.items()):\n"
        "        if tensor.is_floating_point():\n"
        "            dist.all_reduce(tensor)\n"
        "            tensor /= n\n"
        "        else:\n"
        "            dist.broadcast(tensor, 0)\n",
        "    floats = [name for name in sorted(state) if state[name].is_floating_point()]\n"
        "    for name in floats:\n"
        "        dist.all_reduce(state[name])\n"
        "        state[name].div_(dist.get_world_size())\n"
        "    for name in sorted(set(state) - set(floats)):\n"
        "        dist.broadcast(state[name], 0)\n",
        "test_the_change_is_small",
        "7 lines differ from the job in jobs.py; 3 are enough",
    ),
    (
        "job 1 counts in float64",
        (
            "torch.stack([hits, torch.tensor(len(y))])",
            "right, seen = counts.tolist()",
        ),
        (
            "torch.stack([hits, torch.tensor(len(y))]).double()",
            "right, seen = counts.long().tolist()",
        ),
        "test_job_1",
        "what is all-reduced is of torch.float64; two int64 are asked for",
    ),
    (
        "job 2 takes as many steps as rank 1 has batches",
        (
            "dist.all_reduce(steps, dist.ReduceOp.MAX)",
            "batches + [nothing] * (int(steps) - len(batches)):",
        ),
        (
            "dist.broadcast(steps, 1)",
            "(batches + [nothing] * (int(steps) - len(batches)))[:steps]:",
        ),
        "test_job_2",
        "rank 0: w after 4 steps: element",
    ),
    (
        "job 2 takes as many steps as the last rank has batches",
        (
            "dist.all_reduce(steps, dist.ReduceOp.MAX)",
            "batches + [nothing] * (int(steps) - len(batches)):",
        ),
        (
            "dist.broadcast(steps, dist.get_world_size() - 1)",
            "(batches + [nothing] * (int(steps) - len(batches)))[:steps]:",
        ),
        "test_job_2",
        "rank 0: w after 0 of 4 steps: batches were left out",
    ),
    (
        "job 4 in the order of hashes",
        "sorted(state.items())",
        "sorted(state.items(), key=lambda item: hash(item[0]))",
        "test_job_4",
        "not every rank has come back",
    ),
    (
        "job 4 averages float64 alone",
        "if tensor.is_floating_point():",
        "if tensor.dtype == torch.float64:",
        "test_other_dtypes",
        "rank 0: weight: element",
    ),
    (
        "job 4 takes int64 alone from rank 0",
        ("if tensor.is_floating_point():", "tensor /= n"),
        ("if tensor.dtype != torch.int64:", "tensor.copy_(tensor / n)"),
        "test_other_dtypes",
        "rank 0: num_batches_tracked: element 0: expected 30, got 31",
    ),
    (
        "job 5 leaves a step out if no element is finite",
        "if not grad.isfinite().all():",
        "if not grad.isfinite().any():",
        "test_job_5",
        "rank 0: w is not finite; a bad step was taken",
    ),
    (
        "job 5 looks at the gradient's norm",
        "if not grad.isfinite().all():",
        "if not grad.norm().isfinite():",
        "test_job_5",
        "the last step was left out, though each element of its gradient is finite",
    ),
    (
        "job 5 looks at the sum of the gradient's elements",
        "if not grad.isfinite().all():",
        "if not grad.sum().isfinite():",
        "test_job_5",
        "the last step was left out, though each element of its gradient is finite",
    ),
]
