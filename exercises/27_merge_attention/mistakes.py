"""Known mistakes: name, passage of solution.py, its replacement, the check, what it says."""

MISTAKES = [
    (
        "the mean of both",
        "        share_BHT1 = (part_BHT - lse_BHT).exp().unsqueeze(-1)\n",
        "        share_BHT1 = torch.full_like(seen_BHT1, 0.5, dtype=part_BHTD.dtype)\n",
        "test_by_hand",
        "expected 17.5",
    ),
    (
        "the sum of both",
        "        share_BHT1 = (part_BHT - lse_BHT).exp().unsqueeze(-1)\n",
        "        share_BHT1 = torch.ones_like(seen_BHT1, dtype=part_BHTD.dtype)\n",
        "test_by_hand",
        "expected 17.5",
    ),
    (
        "exponentials without a maximum",
        "    lse_BHT = torch.logaddexp(lse1_BHT, lse2_BHT)\n",
        "    lse_BHT = (lse1_BHT.exp() + lse2_BHT.exp()).log()\n",
        "test_large_scores",
        "scores of 1,000 or -1,000: o",
    ),
    (
        "nan times a share of 0",
        "torch.where(seen_BHT1, share_BHT1 * part_BHTD, 0)",
        "(share_BHT1 * part_BHTD).where(lse_BHT.unsqueeze(-1) > -torch.inf, 0)",
        "test_nan_where_no_key_is",
        "nan lies where a part has no key: o",
    ),
    (
        "no key at all is nan",
        "torch.where(seen_BHT1, share_BHT1 * part_BHTD, 0)",
        "share_BHT1 * part_BHTD",
        "test_small_scores",
        "scores near 0: o",
    ),
    (
        "the larger lse for that of both",
        "    lse_BHT = torch.logaddexp(lse1_BHT, lse2_BHT)\n",
        "    lse_BHT = torch.maximum(lse1_BHT, lse2_BHT)\n",
        "test_by_hand",
        "expected 17.5",
    ),
    (
        "the lse of both added",
        "    return o_BHTD, lse_BHT\n",
        "    return o_BHTD, lse1_BHT + lse2_BHT\n",
        "test_by_hand",
        "lse: ",
    ),
    (
        "each part gets the other's share",
        "((o1_BHTD, lse1_BHT), (o2_BHTD, lse2_BHT))",
        "((o1_BHTD, lse2_BHT), (o2_BHTD, lse1_BHT))",
        "test_by_hand",
        "expected 17.5",
    ),
    (
        "the first part overwritten",
        "    lse_BHT = torch.logaddexp(lse1_BHT, lse2_BHT)\n",
        "    lse_BHT = torch.logaddexp(lse1_BHT, lse2_BHT)\n    lse1_BHT.clamp_(min=-1e4)\n",
        "test_small_scores",
        "merge changed lse1; it is the caller's",
    ),
    (
        "the last rank's part forgotten",
        "    for part in parts:\n",
        "    for part in parts[:-1]:\n",
        "test_ranks",
        "rank 0: o",
    ),
    (
        "each rank begins with its own part",
        "    for part in parts:\n",
        "    for part in parts[dist.get_rank() :] + parts[: dist.get_rank()]:\n",
        "test_ranks",
        "o next to rank 0's, to the bit",
    ),
    (
        "two all-gathers",
        "    dist.all_gather(parts, mine)\n",
        "    dist.all_gather([part[..., :-1].contiguous() for part in parts], o_BHTD)\n"
        "    dist.all_gather(parts, mine)\n",
        "test_cost",
        "its calls",
    ),
    (
        "no lse below -10,000",
        "    return o_BHTD, lse_BHT\n",
        "    lse_BHT = lse_BHT.where(lse_BHT > -1e4, -torch.inf)\n"
        "    return o_BHTD.where(lse_BHT.unsqueeze(-1) > -1e4, 0), lse_BHT\n",
        "test_large_scores",
        "scores of 20,000 or -20,000: o",
    ),
    (
        "inf weighed by 0",
        (
            "(part_BHT - lse_BHT).exp().unsqueeze(-1)",
            "torch.where(seen_BHT1, share_BHT1 * part_BHTD, 0)",
        ),
        (
            "(part_BHT - lse_BHT).exp().nan_to_num(0.0).unsqueeze(-1)",
            "share_BHT1 * part_BHTD.masked_fill(part_BHTD.isnan(), 0.0)",
        ),
        "test_nan_where_no_key_is",
        "inf lies where a part has no key: o",
    ),
    (
        "all ranks' exponentials added without a maximum",
        "    for part in parts:\n"
        "        o_BHTD, lse_BHT = merge(o_BHTD, lse_BHT, part[..., :-1], part[..., -1])\n"
        "    return o_BHTD\n",
        "    every = torch.stack(parts)\n"
        "    weight = every[..., -1:].exp()\n"
        "    total = weight.sum(0).clamp(min=1e-300)\n"
        "    return (weight * every[..., :-1].where(weight > 0, 0)).sum(0) / total\n",
        "test_ranks",
        "scores of 1,000 or -1,000, rank 0: o",
    ),
    (
        "no key below -100,000",
        "(part_BHT > -torch.inf)",
        "(part_BHT > -1e5)",
        "test_large_scores",
        "scores of 1,000,000,000,000 or -1,000,000,000,000: o",
    ),
    (
        "no key at the lowest number, in the caller's lse",
        "    return o_BHTD, lse_BHT\n",
        "    lse1_BHT.clamp_(min=torch.finfo(lse1_BHT.dtype).min)\n    return o_BHTD, lse_BHT\n",
        "test_small_scores",
        "merge changed lse1; it is the caller's",
    ),
    (
        "nan taken away from the caller's o",
        "    mine = torch.cat(",
        "    o_BHTD.nan_to_num_()\n    mine = torch.cat(",
        "test_ranks",
        "over_all_ranks changed o; it is the caller's",
    ),
    (
        "float64, whatever is given",
        "    o_BHTD = torch.zeros_like(o1_BHTD)\n",
        "    o_BHTD = torch.zeros(o1_BHTD.shape, dtype=torch.float64)\n",
        "test_float32",
        "float32: o: expected (2, 3, 5, 4) float32, got (2, 3, 5, 4) float64",
    ),
    (
        "float64 over all ranks, whatever is given",
        "    o_BHTD = torch.zeros_like(o_BHTD)\n",
        "    o_BHTD = torch.zeros(o_BHTD.shape, dtype=torch.float64)\n",
        "test_float32",
        "float32, rank 0: o: expected (2, 3, 5, 4) float32, got (2, 3, 5, 4) float64",
    ),
]
