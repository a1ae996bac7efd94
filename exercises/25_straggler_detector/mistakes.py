"""Known mistakes: name, passage of solution.py, what replaces it, check, what that check says."""

MISTAKES = [
    (
        "the step's time, which is the same on all ranks",
        "[arrived - begun for begun, arrived, _ in",
        "[ended - begun for begun, _, ended in",
        "test_slow",
        "half as slow again, on rank 0 of 2: expected",
    ),
    (
        "when it arrived, by clocks that are hours apart",
        "[arrived - begun for begun, arrived, _ in",
        "[arrived for _, arrived, _ in",
        "test_healthy",
        "false alarms in 200 healthy steps: expected 0, got",
    ),
    (
        "an alarm at every pause",
        ".sum() >= k:",
        ".any():",
        "test_healthy",
        "false alarms in 200 healthy steps: expected 0, got",
    ),
    (
        "significant, however small",
        "(1 + margin) * median",
        "median",
        "test_a_little_slower",
        "always 4% slower, on rank 0 of 4: expected [], got [2]",
    ),
    (
        "a margin of 10%, whatever was asked",
        "(1 + margin) * median",
        "1.1 * median",
        "test_margin",
        "18% slower, a margin of 30%, on rank 0 of 4: expected [], got [2]",
    ),
    (
        "rank 0 is never named",
        "    for rank in range(ranks):\n",
        "    for rank in range(1, ranks):\n",
        "test_slow",
        "half as slow again, on rank 0 of 2: expected [0], got []",
    ),
    (
        "late if the margin is reached",
        "(gathered[rank] > (1 + margin) * median)",
        "(gathered[rank] >= (1 + margin) * median)",
        "test_margin",
        "exactly 50% slower, a margin of 50%, on rank 0 of 4: expected [], got [2]",
    ),
    (
        "the mean of the others, which another slow rank moves",
        "others.sort(dim=0).values[len(others) // 2]",
        "others.mean(dim=0)",
        "test_two_slow",
        "20% slower, and thrice as slow, on rank 0 of 4: expected",
    ),
    (
        "of two others, the faster one",
        "others.sort(dim=0).values[len(others) // 2]",
        "others.median(dim=0).values",
        "test_of_two_others_the_larger_counts",
        "two of three are slow alike, on rank 0 of 3: expected [], got [",
    ),
    (
        "compared with its own past",
        "median = others.sort(dim=0).values[len(others) // 2]",
        "median = gathered[rank].median()",
        "test_slow",
        "half as slow again, on rank 0 of 2: expected",
    ),
    (
        "all steps so far",
        "stamps[-window:]",
        "stamps",
        "test_recent",
        "slow until the middle, on rank 0 of 3: expected [], got [1]",
    ),
    (
        "less than false_alarm, not at most",
        "<= false_alarm:",
        "< false_alarm:",
        "test_count",
        "late in 6 of 6 steps, false alarm 0.03125, 2 ranks: named on rank 0: expected [1], got []",
    ),
    (
        "as if there were one rank",
        "ranks * (tail +",
        "(tail +",
        "test_count",
        "named on rank 0: expected [], got [1]",
    ),
    (
        "of an even number of others, the slowest",
        "others.sort(dim=0).values[len(others) // 2]",
        "others.sort(dim=0).values[len(others) // 2 if len(others) % 2 else -1]",
        "test_of_four_others",
        "1.8 s, others 1, 1, 1.5 and 3 s, on rank 0 of 5: expected",
    ),
    (
        "of an even number of others, the mean of the two in the middle",
        "others.sort(dim=0).values[len(others) // 2]",
        "others.quantile(0.5, dim=0)",
        "test_of_four_others",
        "1.55 s, others 1, 1, 1.5 and 3 s, on rank 0 of 5: expected",
    ),
    (
        "those that are late most often first",
        (
            "        if (gathered[rank] > (1 + margin) * median).sum() >= k:\n"
            "            found.append(rank)\n"
            "    return found\n"
        ),
        (
            "        late = int((gathered[rank] > (1 + margin) * median).sum())\n"
            "        if late >= k:\n"
            "            found.append((-late, rank))\n"
            "    return [rank for _, rank in sorted(found)]\n"
        ),
        "test_two_slow",
        "rank 1 late in 17 of 20 steps, rank 3 in all, on rank 0 of 4: expected",
    ),
    (
        "powers of two as floats",
        "comb(window, k - 1) / 2**window)",
        "comb(window, k - 1) / 2.0**window)",
        "test_count",
        "OverflowError",
    ),
]
