"""Known mistakes: name, passage of solution.py, its replacement, the check, what it says."""

MISTAKES = [
    (
        "pieces that are neighbors",
        "    pieces = torch.arange(T).chunk(2 * n)\n"
        "    return torch.cat([pieces[rank], pieces[2 * n - 1 - rank]])\n",
        "    return torch.arange(T).chunk(n)[rank]\n",
        "test_places",
        "places(8, 2, 0)",
    ),
    (
        "places dealt like cards",
        "    pieces = torch.arange(T).chunk(2 * n)\n"
        "    return torch.cat([pieces[rank], pieces[2 * n - 1 - rank]])\n",
        "    return torch.arange(rank, T, n)\n",
        "test_places",
        "places(8, 2, 0)",
    ),
    (
        "the later piece first",
        "torch.cat([pieces[rank], pieces[2 * n - 1 - rank]])",
        "torch.cat([pieces[2 * n - 1 - rank], pieces[rank]])",
        "test_places",
        "places(8, 2, 0)",
    ),
    (
        "its own keys sent every time",
        "dist.P2POp(dist.isend, here, (rank + 1) % n)",
        "dist.P2POp(dist.isend, torch.stack([k_BHtD, v_BHtD]), (rank + 1) % n)",
        "test_values",
        "o: ",
    ),
    (
        "a step too few",
        "range(1, n)",
        "range(1, max(n - 1, 1))",
        "test_values",
        "o: ",
    ),
    (
        "whose keys have come, miscounted",
        "(rank - step) % n < rank:",
        "(rank + step) % n < rank:",
        "test_values",
        "o: ",
    ),
    (
        "the second half of a lower rank's keys",
        "            seen = attention(q_BHtD, k[:, :, :half], v[:, :, :half], causal=False)\n",
        "            seen = attention(q_BHtD, k[:, :, half:], v[:, :, half:], causal=False)\n",
        "test_values",
        "o: ",
    ),
    (
        "the outputs averaged instead of merged",
        "            o_BHtD, lse_BHt = merge(o_BHtD, lse_BHt, *seen)\n",
        "            o_BHtD, lse_BHt = (o_BHtD + seen[0]) / 2, torch.logaddexp(lse_BHt, seen[1])\n",
        "test_values",
        "o: ",
    ),
    (
        "the log of the sum kept from the first part",
        "            o_BHtD, lse_BHt = merge(o_BHtD, lse_BHt, *seen)\n",
        "            o_BHtD, _ = merge(o_BHtD, lse_BHt, *seen)\n",
        "test_values",
        "o: ",
    ),
    (
        "all scores computed, half of them hidden",
        "            seen = attention(q_BHtD, k[:, :, :half], v[:, :, :half], causal=False)\n",
        "            v = torch.cat([v[:, :, :half], 0 * v[:, :, half:]], dim=2)\n"
        "            scores = q_BHtD @ k.mT / q_BHtD.shape[-1] ** 0.5\n"
        "            scores[..., half:] = -torch.inf\n"
        "            seen = scores.softmax(-1) @ v, scores.logsumexp(-1)\n",
        "test_work",
        "scores computed",
    ),
    (
        "everything gathered",
        "    here = torch.stack([k_BHtD, v_BHtD])\n",
        "    here = torch.stack([k_BHtD, v_BHtD])\n"
        "    dist.all_gather([torch.empty_like(here) for _ in range(n)], here)\n",
        "test_values",
        "all_gather",
    ),
    (
        "all that comes is kept",
        ("    here = torch.stack([k_BHtD, v_BHtD])\n", "        here = came\n"),
        (
            "    here = torch.stack([k_BHtD, v_BHtD])\n    kept = []\n",
            "        here = came\n        kept.append(came)\n",
        ),
        "test_memory",
        "it holds the keys and values of 5 other ranks at a time",
    ),
]
