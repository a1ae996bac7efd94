"""Known mistakes: name, passage of solution.py, its replacement, the check, what it says."""

MISTAKES = [
    (
        "the mean losses of unequal micro-batches added up",
        "y = loss_of(y, k) * len(x) / rows",
        "y = loss_of(y, k)",
        "test_values",
        "rank 0: this is the gradient of the sum of the micro-batches' mean losses",
    ),
    (
        "the mean losses of unequal micro-batches averaged",
        "y = loss_of(y, k) * len(x) / rows",
        "y = loss_of(y, k) / len(inputs)",
        "test_values",
        "this is the gradient of the mean of the micro-batches' mean losses, few rows or many",
    ),
    (
        "gradients cleared before each backward pass",
        "            y.backward(grad, inputs=weights)",
        "            stage.zero_grad()\n            y.backward(grad, inputs=weights)",
        "test_values",
        "rank 0: this is the gradient of the last micro-batch alone",
    ),
    (
        "the loss summed in float32",
        "loss += y.detach()",
        "loss += y.detach().float()",
        "test_values",
        "the loss: expected () float64, got () float32",
    ),
    (
        "a loss returned by every stage",
        "    return loss if rank == p - 1 else None",
        "    return loss",
        "test_values",
        "rank 0: returned, away from the last stage: expected None, got float 0.0",
    ),
    (
        "the last stage's loss broadcast to all",
        "    return loss if rank == p - 1 else None",
        "    loss = torch.as_tensor(loss, dtype=inputs[0].dtype)\n"
        "    dist.broadcast(loss, p - 1)\n"
        "    return loss",
        "test_values",
        "the answer calls broadcast; use send, recv",
    ),
    (
        "requires_grad set on the caller's inputs",
        "            if rank > 0:\n"
        "                x = torch.empty_like(x, device=weights[0].device)\n"
        "                dist.recv(x, rank - 1)\n                x.requires_grad_()\n",
        "            if rank > 0:\n"
        "                x = torch.empty_like(x, device=weights[0].device)\n"
        "                dist.recv(x, rank - 1)\n            x.requires_grad_()\n",
        "test_values",
        "requires_grad of the inputs was set; they are the caller's",
    ),
    (
        "the library's schedule",
        None,
        "mistake_library.py",
        "test_values",
        "the answer uses PipelineStage, which it is to do without",
    ),
    (
        "sends that wait until they are received",
        (
            "sends[k].append(dist.isend(y.detach(), rank + 1))",
            "sends[k].append(dist.isend(x.grad, rank - 1))",
        ),
        ("dist.send(y.detach(), rank + 1)", "dist.send(x.grad, rank - 1)"),
        "test_values",
        "waits in send",
    ),
    (
        "the last stage leaves a micro-batch out",
        "    for kind, k in zero_bubble(rank, p, len(inputs)):\n",
        "    for kind, k in zero_bubble(rank, p, len(inputs)):\n"
        "        if rank == p - 1 and k == len(inputs) - 1:\n"
        "            continue\n",
        "test_values",
        "rank 1 came back",
    ),
    (
        "more forwards ahead than there are micro-batches",
        "num_warmup = min(p - 1 - stage, m)",
        "num_warmup = p - 1 - stage",
        "test_zero_bubble",
        "zero_bubble(0, 3, 1): expected each of B0 F0 W0 once, got F0 F1 B0 W0",
    ),
    (
        "all forwards first, as GPipe does",
        "num_warmup = min(p - 1 - stage, m)",
        "num_warmup = m",
        "test_zero_bubble",
        "rank 0: micro-batches alive: expected at most 1, got 2; all forwards come first (GPipe)",
    ),
    (
        "one forward ahead on every stage",
        "num_warmup = min(p - 1 - stage, m)",
        "num_warmup = min(p - 1 - stage, m, 1)",
        "test_zero_bubble",
        "idle slots of each stage: expected",
    ),
    (
        "one forward too many ahead",
        "num_warmup = min(p - 1 - stage, m)",
        "num_warmup = min(p - stage, m) if stage < p - 1 else 0",
        "test_zero_bubble",
        "2 stages, 3 micro-batches, rank 0: micro-batches alive: expected at most 2, got 3",
    ),
    (
        "one micro-batch at a time",
        "num_warmup = min(p - 1 - stage, m)",
        "num_warmup = 0",
        "test_zero_bubble",
        "one micro-batch at a time goes there and back, while all other stages wait",
    ),
    (
        "each W right after its B",
        (
            '        if k >= stage:\n            order.append(("W", k - stage))',
            "range(max(0, m - stage), m)",
        ),
        ('        order.append(("W", k))', "range(0)"),
        "test_zero_bubble",
        "every W comes right after its B, though nobody waits for it",
    ),
    (
        "every W at the end",
        (
            '        if k >= stage:\n            order.append(("W", k - stage))\n',
            "range(max(0, m - stage), m)",
        ),
        ("", "range(m)"),
        "test_zero_bubble",
        "micro-batches alive: expected at most",
    ),
    (
        "each W one micro-batch too late",
        (
            '        if k >= stage:\n            order.append(("W", k - stage))',
            "range(max(0, m - stage), m)",
        ),
        (
            '        if k > stage:\n            order.append(("W", k - stage - 1))',
            "range(max(0, m - stage - 1), m)",
        ),
        "test_zero_bubble",
        "micro-batches alive: expected at most",
    ),
    (
        "the last Ws left out",
        '    return order + [("W", k) for k in range(max(0, m - stage), m)]',
        "    return order",
        "test_zero_bubble",
        "zero_bubble(1, 2, 1): expected each of B0 F0 W0 once, got F0 B0",
    ),
    (
        "a step with an order of its own, zero_bubble never asked",
        "    for kind, k in zero_bubble(rank, p, len(inputs)):\n",
        "    m = len(inputs)\n"
        '    for kind, k in [(kind, k) for k in range(m) for kind in "FBW"]:\n',
        "test_order",
        "pipeline_step works in another order than zero_bubble(0, 2, 6) says",
    ),
    (
        "B and W in one backward pass",
        (
            "            if rank > 0:\n"
            "                y.backward(grad, inputs=[x], retain_graph=True)\n",
            "            y.backward(grad, inputs=weights)\n",
        ),
        ("            y.backward(grad)\n            if rank > 0:\n", ""),
        "test_order",
        "each W comes next to its B: is it one backward pass?",
    ),
    (
        "W goes through to the input again",
        "y.backward(grad, inputs=weights)",
        "y.backward(grad)",
        "test_order",
        "gradients of the input: expected 6, got 12",
    ),
    (
        "each forward run twice",
        "            if rank < p - 1:\n                sends[k]",
        "            if rank < p - 1:\n                y = stage(x)\n                sends[k]",
        "test_order",
        "rank 0: forward passes: expected 6, got 12",
    ),
    (
        "inputs and outputs never freed",
        ("    held = {}\n", "            held[k] = (x, y)\n"),
        (
            "    held = {}\n    kept = []\n",
            "            held[k] = (x, y)\n            kept.append((x, y))\n",
        ),
        "test_order",
        "micro-batches whose input or output is kept, by the Work of a send perhaps: expected at "
        "most 2, got",
    ),
    (
        "sends waited for at the end of the step",
        (
            "            for send in sends.pop(k):\n                send.wait()\n",
            "    return loss if rank == p - 1 else None\n",
        ),
        (
            "",
            "    for send in sum(sends.values(), []):\n        send.wait()\n"
            "    return loss if rank == p - 1 else None\n",
        ),
        "test_order",
        "rank 0: micro-batches whose input or output is kept, by the Work of a send perhaps: "
        "expected at most 2, got 6",
    ),
    (
        "graphs never freed",
        "y.backward(grad, inputs=weights)",
        "y.backward(grad, inputs=weights, retain_graph=True)\n            held[k] = y",
        "test_order",
        "autograd is to hold activations of at most 2 micro-batches, got",
    ),
    (
        "padding sent back with the gradient",
        (
            "dist.recv(grad, rank + 1)\n",
            "grad = torch.empty_like(y)\n",
            "dist.isend(x.grad, rank - 1)",
        ),
        (
            "dist.recv(grad, rank + 1)\n                grad = grad[: len(y)]\n",
            "grad = torch.empty_like(torch.cat([y, y]))\n",
            "dist.isend(torch.cat([x.grad, x.grad]), rank - 1)",
        ),
        "test_messages",
        "rank 1 to rank 0: bytes: expected 440, got 880",
    ),
    (
        "the shape sent ahead of each activation",
        (
            "                sends[k].append(dist.isend(y.detach(), rank + 1))\n",
            "                dist.recv(x, rank - 1)\n",
        ),
        (
            "                sends[k].append(dist.isend(torch.tensor(y.shape), rank + 1))\n"
            "                sends[k].append(dist.isend(y.detach(), rank + 1))\n",
            "                dist.recv(torch.empty(2, dtype=torch.int64), rank - 1)\n"
            "                dist.recv(x, rank - 1)\n",
        ),
        "test_messages",
        "rank 0 to rank 1: messages: expected 6, got 12",
    ),
    (
        "the gradient waited for before a forward that could go on",
        (
            "    for kind, k in zero_bubble(rank, p, len(inputs)):\n",
            "                dist.recv(grad, rank + 1)\n",
            "                grad = torch.empty_like(y)\n",
            '        if kind == "F":\n',
        ),
        (
            "    early = {}\n    for kind, k in zero_bubble(rank, p, len(inputs)):\n",
            "",
            "                grad = early.pop(k)\n",
            "        back = k - min(p - 1 - rank, len(inputs))\n"
            '        if kind == "F" and back >= 0 and rank < p - 1:\n'
            "            early[back] = torch.empty_like(held[back][1])\n"
            "            dist.recv(early[back], rank + 1)\n"
            '        if kind == "F":\n',
        ),
        "test_in_flight",
        "rank 0 does not begin F1 before B0's gradient comes: it could work, and waits",
    ),
    (
        "each gradient's message waited for at once",
        "                sends[k].append(dist.isend(x.grad, rank - 1))\n",
        "                dist.isend(x.grad, rank - 1).wait()\n",
        "test_in_flight",
        "it waits for its message to be taken",
    ),
    (
        "messages that nobody waits for",
        "            for send in sends.pop(k):\n                send.wait()\n",
        "            sends.pop(k)\n",
        "test_values",
        "the Work of a send is gone, and nobody has waited for it: its message may never arrive",
    ),
    (
        "what isend returns not kept",
        (
            "sends[k].append(dist.isend(y.detach(), rank + 1))",
            "sends[k].append(dist.isend(x.grad, rank - 1))",
        ),
        ("dist.isend(y.detach(), rank + 1)", "dist.isend(x.grad, rank - 1)"),
        "test_values",
        "the Work of a send is gone, and nobody has waited for it: its message may never arrive",
    ),
    (
        "one forward too many ahead where that costs nothing",
        (
            "    num_warmup = min(p - 1 - stage, m)\n",
            '        if k >= stage:\n            order.append(("W", k - stage))\n',
            "range(max(0, m - stage), m)",
        ),
        (
            "    extra = int(0 < stage < p - 1 and m == p)\n"
            "    num_warmup = min(p - 1 - stage + extra, m)\n",
            '        if k >= stage - extra:\n            order.append(("W", k - stage + extra))\n',
            "range(max(0, m - stage + extra), m)",
        ),
        "test_zero_bubble",
        "3 stages, 3 micro-batches, rank 1: expected forwards and Bs as in 1F1B, "
        "F0 F1 B0 F2 B1 B2, got F0 F1 F2 B0 B1 B2",
    ),
    (
        "numbers of micro-batches that are no ints",
        "    return order + ",
        "    order = [(kind, str(k)) for kind, k in order]\n    return order + ",
        "test_zero_bubble",
        "expected the number of a micro-batch, got '0'",
    ),
    (
        "one activation in flight",
        "                sends[k].append(dist.isend(y.detach(), rank + 1))\n",
        "                for send in sends.get(k - 1, [])[:1]:\n                    send.wait()\n"
        "                    sends[k - 1].remove(send)\n"
        "                sends[k].append(dist.isend(y.detach(), rank + 1))\n",
        "test_in_flight",
        "is in F0: it waits for its earlier activations to be taken",
    ),
]
