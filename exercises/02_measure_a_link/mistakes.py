"""Known mistakes: name, passage of solution.py, what replaces it, check that refuses it, what that
check says."""

MISTAKES = [
    (
        "GiB for GB",
        "float(1 / inverse / 1e9)",
        "float(1 / inverse / 2**30)",
        "test_quiet",
        "that is GiB/s; 1 GB is 1e9 bytes",
    ),
    (
        "the first pings count",
        ("range(3 + 15)", "median(taken[3:])"),
        ("range(5)", "median(taken)"),
        "test_warm_up",
        "do the slow first pings count?",
    ),
    (
        "a fit of seconds, not of shares",
        (
            "    n = np.array(sizes)\n    t = np.array(times)\n"
            "    lines = np.stack([2 / t, n / t], axis=1)"
            "  # (2 alpha + n/beta) / t = 1: relative errors\n",
            "alpha, inverse = np.linalg.lstsq(lines, np.ones(len(t)), rcond=None)[0]",
        ),
        ("", "inverse, alpha = np.polyfit(sizes, times, 1) / [1, 2]"),
        "test_noise",
        "2% of the longest time is more than alpha: count errors relative to the time",
    ),
    (
        "a clock of its own",
        ("started = link.clock()", "append(link.clock() - started)"),
        ("started = time.perf_counter()", "append(time.perf_counter() - started)"),
        "test_quiet",
        "link.clock() was never read",
    ),
    (
        "a thousand pings",
        "range(3 + 15)",
        "range(3 + 1000)",
        "test_cost",
        "64 B: expected at most 50 pings, got 1,003",
    ),
    (
        "alpha from the smallest size, beta from the largest",
        (
            "    n = np.array(sizes)\n    t = np.array(times)\n"
            "    lines = np.stack([2 / t, n / t], axis=1)"
            "  # (2 alpha + n/beta) / t = 1: relative errors\n",
            "alpha, inverse = np.linalg.lstsq(lines, np.ones(len(t)), rcond=None)[0]",
        ),
        (
            "    by_size = dict(zip(sizes, times, strict=True))\n",
            "alpha, inverse = by_size[min(sizes)] / 2, by_size[max(sizes)] / max(sizes)",
        ),
        "test_narrow",
        "in no message here does alpha or n / beta count alone: fit both",
    ),
    (
        "the first time taken for alpha",
        (
            "    n = np.array(sizes)\n    t = np.array(times)\n"
            "    lines = np.stack([2 / t, n / t], axis=1)"
            "  # (2 alpha + n/beta) / t = 1: relative errors\n",
            "alpha, inverse = np.linalg.lstsq(lines, np.ones(len(t)), rcond=None)[0]",
        ),
        (
            "    alpha = times[0] / 2\n",
            "inverse = (times[-1] - times[0]) / (sizes[-1] - sizes[0])",
        ),
        "test_narrow",
        "in no message here does alpha or n / beta count alone: fit both",
    ),
    (
        "the clock stopped before the messages arrive",
        "            link.ping(nbytes)\n            link.synchronize()\n",
        "            link.ping(nbytes)\n",
        "test_quiet",
        "times with a ping still under way",
    ),
    (
        "both ways summed",
        "float(1 / inverse / 1e9)",
        "float(2 / inverse / 1e9)",
        "test_quiet",
        "one way is asked for",
    ),
    (
        "the mean of the pings",
        "median(taken[3:])",
        "sum(taken[3:]) / 15",
        "test_outliers",
        "do a few slow pings count that much?",
    ),
    (
        "the median of three pings",
        "range(3 + 15)",
        "range(3 + 3)",
        "test_outliers",
        "do a few slow pings count that much?",
    ),
    (
        "there and back taken for one way",
        "np.stack([2 / t, n / t], axis=1)",
        "np.stack([1 / t, n / t], axis=1)",
        "test_quiet",
        "a ping is two messages, there and back",
    ),
    (
        "half of a ping taken for one message of that size",
        ("taken.append(link.clock() - started)", "np.stack([2 / t, n / t], axis=1)"),
        ("taken.append((link.clock() - started) / 2)", "np.stack([1 / t, n / t], axis=1)"),
        "test_quiet",
        "only one message of a ping has those bytes",
    ),
    (
        "an all-gather goes round twice",
        "(n - 1) / n)\n    shares |=",
        "2 * (n - 1) / n)\n    shares |=",
        "test_busbw",
        "all_gather of 1 GB on 4 ranks in 0.1 s: expected 7.5 GB/s, got 15.0",
    ),
    (
        "algbw taken for busbw",
        "shares[collective] * nbytes",
        "nbytes",
        "test_busbw",
        "all_reduce of 1 GB on 4 ranks in 0.1 s: expected 15 GB/s, got 10.0",
    ),
    (
        "a line through the first and the last size",
        (
            "    n = np.array(sizes)\n    t = np.array(times)\n"
            "    lines = np.stack([2 / t, n / t], axis=1)"
            "  # (2 alpha + n/beta) / t = 1: relative errors\n",
            "alpha, inverse = np.linalg.lstsq(lines, np.ones(len(t)), rcond=None)[0]",
        ),
        (
            "    inverse = (times[-1] - times[0]) / (sizes[-1] - sizes[0])\n",
            "alpha = (times[0] - sizes[0] * inverse) / 2",
        ),
        "test_all_together",
        "sizes come in any order, and all of them count",
    ),
    (
        "sizes sorted in place",
        "    times = []\n    for nbytes in sizes:\n",
        "    times = []\n    sizes.sort()\n    for nbytes in sizes:\n",
        "test_narrow",
        "the list of sizes was changed; it is the caller's",
    ),
    (
        "two hundred pings where there are two sizes",
        "range(3 + 15)",
        "range(3 + (15 if len(sizes) > 2 else 200))",
        "test_two_sizes",
        "500,000 B: expected at most 50 pings, got 203",
    ),
    (
        "times of the first link kept for the next",
        ("def measure(", "times.append(median(taken[3:]))"),
        (
            "kept = {}\n\n\ndef measure(",
            "times.append(kept.setdefault(nbytes, median(taken[3:])))",
        ),
        "test_quiet",
        "got alpha 30 us, beta 0.5 GB/s: that is another link, measured in an earlier call",
    ),
    (
        "a ping of no bytes to begin with",
        "    times = []\n    for nbytes in sizes:\n",
        "    times = []\n    link.ping(0)\n    for nbytes in sizes:\n",
        "test_cost",
        "pings of sizes that were not asked for: [0]",
    ),
    (
        "beta rounded to 0.01 GB/s",
        "return float(alpha), float(1 / inverse / 1e9)",
        "return float(alpha), round(float(1 / inverse / 1e9), 2)",
        "test_all_together",
        "alpha 300 us, beta 0.0117 GB/s (within 5%), got",
    ),
    (
        "algbw where there is one rank",
        "return shares[collective] * nbytes / seconds / 1e9",
        "return (shares[collective] if n > 1 else 1) * nbytes / seconds / 1e9",
        "test_busbw",
        "all_reduce on one rank: GB/s: expected 0.0, got 10.0",
    ),
]
