"""Known mistakes: name, passage of solution.py, its replacement, the check, what it says."""

MISTAKES = [
    (
        "experts dealt in blocks, as in the lesson",
        "expert_NK.flatten() % n * e + expert_NK.flatten() // n",
        "expert_NK.flatten()",
        "test_even",
        "y: ",
    ),
    (
        "scores left in the order of the tokens",
        "score_NK.flatten()[order_C, None] * y_CD",
        "score_NK.flatten()[:, None] * y_CD",
        "test_even",
        "y: ",
    ),
    (
        "the mean over a token's experts",
        "score_NK.flatten()[order_C, None] * y_CD",
        "score_NK.flatten()[order_C, None] * y_CD / K",
        "test_even",
        "y: ",
    ),
    (
        "only one of a token's rows kept",
        "torch.zeros_like(x_ND).index_add(0, order_C // K, weighed_CD)",
        "torch.zeros_like(x_ND).index_copy(0, order_C // K, weighed_CD)",
        "test_even",
        "y: ",
    ),
    (
        "the copies' tokens counted as if sorted by expert",
        "x_ND[order_C // K]",
        "x_ND[order_C % len(x_ND)] if len(x_ND) else x_ND[order_C]",
        "test_even",
        "y: ",
    ),
    (
        "rows taken for sorted by expert over all senders",
        "torch.arange(e, device=x_ND.device).repeat(n).repeat_interleave(their_ne.flatten())",
        "torch.arange(e, device=x_ND.device).repeat_interleave(their_ne.sum(0))",
        "test_even",
        "y: ",
    ),
    (
        "the gradient sent on with the same sizes",
        "        return exchange(grad, received, sent), None, None\n",
        "        return exchange(grad, sent, received), None, None\n",
        "test_uneven",
        "",
    ),
    (
        "no gradient through the all-to-all",
        "        return exchange(grad, received, sent), None, None\n",
        "        return torch.zeros_like(exchange(grad, received, sent)), None, None\n",
        "test_even",
        "gradient of x: ",
    ),
    (
        "an expert without rows not called",
        "        mine_R = (which_R == i).nonzero().flatten()\n",
        "        mine_R = (which_R == i).nonzero().flatten()\n"
        "        if len(mine_R) == 0:\n"
        "            continue\n",
        "test_calls",
        "(expert, rows) of each call",
    ),
    (
        "each expert called for every row",
        "        y_RD = y_RD.index_add(0, mine_R, expert(came_RD[mine_R]))\n",
        "        y_RD = y_RD.index_add(0, mine_R, expert(came_RD)[mine_R])\n",
        "test_calls",
        "(expert, rows) of each call",
    ),
    (
        "the counts gathered from everyone",
        "    dist.all_to_all_single(their_ne, count_ne)\n",
        "    every = [torch.empty_like(count_ne) for _ in range(n)]\n"
        "    dist.all_gather(every, count_ne)\n"
        "    their_ne = torch.stack(every)[:, dist.get_rank()]\n",
        "test_even",
        "all_gather",
    ),
    (
        "scores sent along with the tokens",
        "    weighed_CD = score_NK.flatten()[order_C, None] * y_CD\n",
        "    there = AllToAll.apply(score_NK.flatten()[order_C, None], sent, received)\n"
        "    weighed_CD = AllToAll.apply(there, received, sent) * y_CD\n",
        "test_cost",
        "all-to-alls, forward",
    ),
    (
        "a row of zeros for an expert for which none came",
        "        y_RD = y_RD.index_add(0, mine_R, expert(came_RD[mine_R]))\n",
        "        rows_RD = came_RD[mine_R]\n"
        "        if len(mine_R) == 0:\n"
        "            rows_RD = came_RD.new_zeros(1, came_RD.shape[1])\n"
        "        y_RD = y_RD.index_add(0, mine_R, expert(rows_RD)[: len(mine_R)])\n",
        "test_calls",
        "(1, 0)], got",
    ),
    (
        "what an expert without rows returns is left out",
        "        y_RD = y_RD.index_add(0, mine_R, expert(came_RD[mine_R]))\n",
        "        out = expert(came_RD[mine_R])\n"
        "        if len(mine_R):\n"
        "            y_RD = y_RD.index_add(0, mine_R, out)\n",
        "test_uneven",
        "uneven, rank 2 of 3: gradient of experts[1]: expected a tensor, got None",
    ),
    (
        "a rank that nobody chose stays out of backward",
        "        y_RD = y_RD.index_add(0, mine_R, expert(came_RD[mine_R]))\n",
        "        out = expert(came_RD[mine_R])\n"
        "        if len(came_RD):\n"
        "            y_RD = y_RD.index_add(0, mine_R, out)\n",
        "test_uneven",
        "rank 1: nobody chooses rank 1: 0 of the 2 all-to-alls of backward are made",
    ),
    (
        "two experts on each rank, whatever is given",
        "    e = len(experts)\n",
        "    e = 2\n",
        "test_even",
        "shape '[3, 2]' is invalid for input of size 7",
    ),
    (
        "float64, whatever is given",
        "torch.zeros_like(x_ND).index_add",
        "torch.zeros(x_ND.shape, dtype=torch.float64).index_add",
        "test_float32",
        "RuntimeError: index_add",
    ),
    (
        "y in float64, whatever is given",
        "torch.zeros_like(x_ND).index_add(0, order_C // K, weighed_CD)",
        "x_ND.double().mul(0).index_add(0, order_C // K, weighed_CD.double())",
        "test_float32",
        "y: expected (6, 5) float32, got (6, 5) float64",
    ),
    (
        "counts sent as floats",
        "    their_ne = torch.empty_like(count_ne)\n"
        "    dist.all_to_all_single(their_ne, count_ne)\n",
        "    their_ne = torch.empty_like(count_ne, dtype=torch.float64)\n"
        "    dist.all_to_all_single(their_ne, count_ne.double())\n"
        "    their_ne = their_ne.long()\n",
        "test_cost",
        "counts travel as torch.float64; they are integers",
    ),
    (
        "all counts sent to all ranks",
        "    dist.all_to_all_single(their_ne, count_ne)\n",
        "    every_nne = count_ne.new_empty(n, n, e)\n"
        "    dist.all_to_all_single(every_nne, count_ne.repeat(n, 1, 1))\n"
        "    their_ne = every_nne[:, dist.get_rank()]\n",
        "test_cost",
        "numbers that go in and come out, added up, of counts: expected 8, got 16",
    ),
    (
        "the experts' numbers overwritten",
        "expert_NK.flatten() % n * e + expert_NK.flatten() // n",
        "expert_NK.copy_(expert_NK % n * e + expert_NK // n).flatten()",
        "test_even",
        "expert was changed; it is the caller's",
    ),
]
