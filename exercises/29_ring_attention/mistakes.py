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
        "it holds the keys and values of 7 other ranks at a time",
    ),
    (
        "of all that comes a copy is kept",
        ("    here = torch.stack([k_BHtD, v_BHtD])\n", "        here = came\n"),
        (
            "    here = torch.stack([k_BHtD, v_BHtD])\n    kept = [here]\n",
            "        here = came\n        kept.append(came.clone())\n",
        ),
        "test_memory",
        "it holds the keys and values of 7 other ranks at a time",
    ),
    (
        "all that comes is joined to one tensor",
        ("    here = torch.stack([k_BHtD, v_BHtD])\n", "        here = came\n"),
        (
            "    here = torch.stack([k_BHtD, v_BHtD])\n    every = here\n",
            "        here = came\n        every = torch.cat([every, came], dim=3)\n",
        ),
        "test_memory",
        "it holds the keys and values of 7 other ranks at a time",
    ),
    (
        "received into float64, whatever is given",
        "came = torch.empty_like(here)",
        "came = torch.empty(here.shape, dtype=torch.float64)",
        "test_float32",
        "RuntimeError",
    ),
    (
        "its own keys in three blocks, on odd ranks only",
        "    o_BHtD, lse_BHt = attention(q_BHtD, k_BHtD, v_BHtD, causal=True)\n",
        "    if rank % 2 == 0:\n"
        "        o_BHtD, lse_BHt = attention(q_BHtD, k_BHtD, v_BHtD, causal=True)\n"
        "    else:\n"
        "        q1, q2 = q_BHtD.chunk(2, dim=2)\n"
        "        k1, k2 = k_BHtD.chunk(2, dim=2)\n"
        "        v1, v2 = v_BHtD.chunk(2, dim=2)\n"
        "        early = attention(q1, k1, v1, causal=True)\n"
        "        late = merge(*attention(q2, k1, v1, False), *attention(q2, k2, v2, True))\n"
        "        o_BHtD, lse_BHt = (torch.cat(both, dim=2) for both in zip(early, late))\n",
        "test_work",
        "ranks compute unlike numbers of scores: 864, 720",
    ),
]
