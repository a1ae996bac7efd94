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
        "torch.arange(e).repeat(n).repeat_interleave(their_ne.flatten())",
        "torch.arange(e).repeat_interleave(their_ne.sum(0))",
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
]
