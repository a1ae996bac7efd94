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
        "as if there were one rank",
        "ranks * (tail +",
        "(tail +",
        "test_count",
        "named on rank 0: expected [], got [1]",
    ),
]
