"""Known mistakes: name, passage of solution.py, what replaces it, check that refuses it, what that
check says."""

MISTAKES = [
    (
        "all-reduced once more by hand",
        "        optimizer.step()\n",
        "        for p in model.parameters():\n"
        "            torch.distributed.all_reduce(p.grad)\n"
        "            p.grad /= torch.distributed.get_world_size()\n"
        "        optimizer.step()\n",
        "test_bytes",
        "bytes all-reduced: expected 256, got 512",
    ),
    (
        "unequal micro-batches weighed alike",
        "(loss * len(x) / samples).backward()",
        "(loss / len(group)).backward()",
        "test_gradients",
        "step 0, gradient of 0.weight: it is the mean of micro-batches' means; their sizes differ",
    ),
    (
        "gradients cleared between micro-batches",
        (
            "        optimizer.zero_grad()\n",
            "        for i, (x, y) in enumerate(group, 1):\n",
        ),
        (
            "",
            "        for i, (x, y) in enumerate(group, 1):\n            optimizer.zero_grad()\n",
        ),
        "test_gradients",
        "step 0, gradient of 0.weight: it is that of the last micro-batch alone",
    ),
    (
        "micro-batches counted from 0",
        ("enumerate(group, 1)", "i < len(group) else"),
        ("enumerate(group)", "i < len(group) - 2 else"),
        "test_bytes",
        "step 0, micro-batches: 3: bytes all-reduced: expected 256, got 512",
    ),
    (
        "divided by the ranks again",
        "(loss * len(x) / samples).backward()",
        "(loss * len(x) / samples / torch.distributed.get_world_size()).backward()",
        "test_gradients",
        "step 0, gradient of 0.weight (0.5 times what is due)",
    ),
    (
        "the short group divided by k",
        "(loss * len(x) / samples).backward()",
        "(loss * len(x) / samples * len(group) / k).backward()",
        "test_gradients",
        "step 2, gradient of 0.weight (0.333333 times what is due)",
    ),
    (
        "the losses not scaled",
        "(loss * len(x) / samples).backward()",
        "loss.backward()",
        "test_gradients",
        "step 0, gradient of 0.weight: it is the sum of micro-batches' means; their sizes differ",
    ),
    (
        "the last, shorter group dropped",
        "range(0, len(micro_batches), k)",
        "range(0, len(micro_batches) - k + 1, k)",
        "test_steps",
        "samples in each forward, step by step, 2 epochs: expected "
        "[[1, 4, 2], [3, 3, 1], [5], [1, 4, 2], [3, 3, 1], [5]], got [[1, 4, 2], [3, 3, 1], [1,",
    ),
    (
        "forward outside no_sync",
        (
            "            with model.no_sync() if i < len(group) else nullcontext():\n"
            "                loss = loss_fn(model(x), y)\n"
        ),
        (
            "            loss = loss_fn(model(x), y)\n"
            "            with model.no_sync() if i < len(group) else nullcontext():\n"
        ),
        "test_bytes",
        "backward is inside no_sync(), its forward is not",
    ),
    (
        "one backward for the whole group",
        (
            "        for i, (x, y) in enumerate(group, 1):\n"
            "            with model.no_sync() if i < len(group) else nullcontext():\n"
            "                loss = loss_fn(model(x), y)\n"
            "                (loss * len(x) / samples).backward()\n"
        ),
        (
            "        outputs = torch.cat([model(x) for x, _ in group])\n"
            "        loss_fn(outputs, torch.cat([y for _, y in group])).backward()\n"
        ),
        "test_steps",
        "each micro-batch goes forward, then backward, before the next",
    ),
    (
        "the last, shorter group not all-reduced",
        "i < len(group) else",
        "i < k else",
        "test_bytes",
        "step 2, micro-batches: 1: bytes all-reduced: expected 256, got 0",
    ),
    (
        "the group put together into one large batch",
        (
            "        for i, (x, y) in enumerate(group, 1):\n"
            "            with model.no_sync() if i < len(group) else nullcontext():\n"
            "                loss = loss_fn(model(x), y)\n"
            "                (loss * len(x) / samples).backward()\n"
        ),
        (
            "        x, y = (torch.cat(part) for part in zip(*group, strict=True))\n"
            "        loss_fn(model(x), y).backward()\n"
        ),
        "test_steps",
        "samples in each forward, step by step, 2 epochs: expected [[1, 4, 2], [3, 3, 1], [5], "
        "[1, 4, 2], [3, 3, 1], [5]], got [[7], [7], [5], [7], [7], [5]]",
    ),
    (
        "gradients never cleared",
        "        optimizer.zero_grad()\n",
        "",
        "test_gradients",
        "step 0, gradient of 0.weight: it is this step's, and what lay in .grad before the epoch",
    ),
    (
        "gradients cleared after each step, not before the first",
        ("        optimizer.zero_grad()\n", "        optimizer.step()\n"),
        ("", "        optimizer.step()\n        optimizer.zero_grad()\n"),
        "test_gradients",
        "step 0, gradient of 0.weight: it is this step's, and what lay in .grad before the epoch",
    ),
    (
        "gradients cleared once an epoch",
        (
            "        optimizer.zero_grad()\n",
            "    for start in range(0, len(micro_batches), k):\n",
        ),
        ("", "    optimizer.zero_grad()\n    for start in range(0, len(micro_batches), k):\n"),
        "test_gradients",
        "step 1, gradient of 0.weight: it is this step's and the one before's together",
    ),
    (
        "the caller's list eaten",
        (
            "    for start in range(0, len(micro_batches), k):\n",
            "        group = micro_batches[start : start + k]\n",
        ),
        (
            "    while micro_batches:\n",
            "        group = [micro_batches.pop(0) for _ in range(min(k, len(micro_batches)))]\n",
        ),
        "test_steps",
        "the list of micro-batches was changed; the next epoch needs it again",
    ),
    (
        "never all-reduced",
        "with model.no_sync() if i < len(group) else nullcontext():",
        "with model.no_sync():",
        "test_bytes",
        "rank 0, step 0, micro-batches: 3: bytes all-reduced: expected 256, got 0",
    ),
    (
        "a step after every micro-batch",
        "        optimizer.step()\n",
        "            optimizer.step()\n",
        "test_steps",
        "got [[1], [4], [2],",
    ),
    (
        "all-reduced after every micro-batch",
        "with model.no_sync() if i < len(group) else nullcontext():",
        "with nullcontext():",
        "test_bytes",
        "rank 0, step 0, micro-batches: 3: bytes all-reduced: expected 256, got 768",
    ),
    (
        "the first of each group all-reduced",
        "i < len(group) else",
        "i > 1 else",
        "test_bytes",
        "it all-reduces before the last micro-batch has had its turn",
    ),
    (
        "the target for the output",
        "loss_fn(model(x), y)",
        "loss_fn(y, model(x))",
        "test_gradients",
        "step 0, gradient of 0.weight",
    ),
    (
        "never all-reduced where k is more than there are",
        "if i < len(group) else nullcontext()",
        "if i < len(group) or k > len(micro_batches) else nullcontext()",
        "test_other_groups",
        "rank 0, step 0, gradient of 0.weight",
    ),
    (
        "a group of one all-reduced once more by hand",
        "        optimizer.step()\n",
        "        for p in model.parameters() if k == 1 else ():\n"
        "            torch.distributed.all_reduce(p.grad)\n"
        "            p.grad /= torch.distributed.get_world_size()\n"
        "        optimizer.step()\n",
        "test_other_groups",
        "rank 0, step 0, micro-batches: 1: bytes all-reduced: expected 256, got 512",
    ),
    (
        "the graph retained after backward",
        "(loss * len(x) / samples).backward()",
        "(loss * len(x) / samples).backward(retain_graph=True)",
        "test_activations",
        "as a micro-batch goes forward, tensors kept for others' backward: expected [0, 0",
    ),
]
