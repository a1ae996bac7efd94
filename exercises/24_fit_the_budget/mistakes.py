"""Known mistakes: name, passage of solution.py, what replaces it, check, what that check says."""

MISTAKES = [
    (
        "accumulation has no gradients in forward",
        "max(activations + earlier, gradients)",
        "max(activations, gradients)",
        "test_bytes",
        "4 micro-batches, recompute=False, stage 0: bytes alive after forward",
    ),
    (
        "the two moments added",
        "max(activations + earlier, gradients)",
        "activations + gradients",
        "test_bytes",
        "1 micro-batches, recompute=False, stage 0: bytes alive after",
    ),
    (
        "GeLU's output left out",
        "(1 if plan.recompute else 9)",
        "(1 if plan.recompute else 5)",
        "test_bytes",
        "1 micro-batches, recompute=False, stage 0: bytes alive after forward",
    ),
    (
        "stage 1 shards the gradients",
        "gradients = 4 * P // (n if plan.stage >= 2 else 1)",
        "gradients = 4 * P // (n if plan.stage >= 1 else 1)",
        "test_bytes",
        "4 micro-batches, recompute=True, stage 1: bytes alive after forward",
    ),
    (
        "the whole forward pass again",
        "(7 if plan.recompute else 6)",
        "(8 if plan.recompute else 6)",
        "test_seconds",
        "1 micro-batches, recompute=True, stage 0: expected",
    ),
    (
        "gathered once per step",
        "sent = 12 * P * plan.pieces",
        "sent = 8 * P + 4 * P * plan.pieces",
        "test_seconds",
        "4 micro-batches, recompute=True, stage 3: expected",
    ),
    (
        "the smallest plan",
        "seconds_per_step(job, plan, n, machine))",
        "bytes_per_rank(job, plan, n))",
        "test_cheapest",
        " s would do",
    ),
    (
        "the budget not reached",
        "bytes_per_rank(job, plan, n) <= budget",
        "bytes_per_rank(job, plan, n) < budget",
        "test_cheapest",
        ": a plan fits, in",
    ),
    (
        "micro-batches in powers of two only",
        "for pieces in [k for k in range(1, job.B + 1) if job.B % k == 0]:",
        "for pieces in [k for k in (1, 2, 4, 8, 16) if job.B % k == 0]:",
        "test_cheapest",
        " s would do",
    ),
]
