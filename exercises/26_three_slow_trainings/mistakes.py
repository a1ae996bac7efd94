"""Known mistakes: name, passage of solution.py, its replacement, the check, what it says."""

MISTAKES = [
    (
        "every rank reads the whole batch",
        "        first = step * batch + dist.get_rank() * share\n"
        "        pairs = [samples[i] for i in range(first, first + share)]\n",
        "        whole = [samples[i] for i in range(step * batch, (step + 1) * batch)]\n"
        "        first = dist.get_rank() * share\n"
        "        pairs = whole[first : first + share]\n",
        "test_training_1",
        "samples that it reads: expected 18, got 36",
    ),
    (
        "every rank reads the first share",
        "step * batch + dist.get_rank() * share",
        "step * batch",
        "test_training_1",
        "samples read more than once: [0, 1, 2, 3, 4, 5, 12,",
    ),
    (
        "one rank reads for all, and scatters",
        "        pairs = [samples[i] for i in range(first, first + share)]\n"
        "        x_BD = torch.stack([x for x, _ in pairs])\n"
        "        y_BC = torch.stack([y for _, y in pairs])\n",
        "        whole = [None]\n"
        "        if dist.get_rank() == 0:\n"
        "            whole = [[samples[i] for i in range(step * batch, (step + 1) * batch)]]\n"
        "        dist.broadcast_object_list(whole)\n"
        "        pairs = whole[0][first - step * batch :][:share]\n"
        "        x_BD = torch.stack([x for x, _ in pairs])\n"
        "        y_BC = torch.stack([y for _, y in pairs])\n",
        "test_training_1",
        "rank 0: its calls: expected",
    ),
    (
        "shares that follow each other over steps",
        "step * batch + dist.get_rank() * share",
        "(dist.get_rank() * steps + step) * share",
        "test_training_1",
        "rank 0: parameters",
    ),
    (
        "as many steps as there are samples for",
        "    for step in range(steps):\n",
        "    for step in range(len(samples) // batch):\n",
        "test_training_1",
        "rank 0: samples that it reads: expected 36, got 48",
    ),
    (
        "a call for each tensor",
        "        dist.all_reduce(flat)\n        flat /= dist.get_world_size()\n        losses",
        "        for part in flat.split([len(gradient) for gradient in gradients] + [1]):\n"
        "            dist.all_reduce(part)\n"
        "        flat /= dist.get_world_size()\n        losses",
        "test_training_2",
        "calls in 3 steps: expected 3, got 15",
    ),
    (
        "the loss in a call of its own",
        "        losses.append(flat[-1].item())\n",
        "        dist.all_reduce(loss.detach())\n"
        "        losses.append(loss.item() / dist.get_world_size())\n",
        "test_training_2",
        "calls in 3 steps: expected 3, got 6",
    ),
    (
        "a barrier is left, to be safe",
        "        losses.append(flat[-1].item())\n",
        "        dist.barrier()\n        losses.append(flat[-1].item())\n",
        "test_training_2",
        "calls in 3 steps: expected 3, got 6",
    ),
    (
        "this rank's loss",
        "losses.append(flat[-1].item())",
        "losses.append(loss.item())",
        "test_training_2",
        "rank 0: losses",
    ),
    (
        "losses that are tensors",
        "losses.append(flat[-1].item())",
        "losses.append(flat[-1])",
        "test_training_2",
        "rank 0: types of losses: expected [<class 'float'>",
    ),
    (
        "gradients are summed",
        "        flat /= dist.get_world_size()\n        losses.append(flat[-1].item())\n",
        "        losses.append(flat[-1].item() / dist.get_world_size())\n",
        "test_training_2",
        "rank 0: parameters",
    ),
    (
        "rank 0 validates alone",
        "whole.tensor_split(dist.get_world_size())[rank] for whole",
        "whole[: len(whole) * (rank == 0)] for whole",
        "test_training_3",
        "rank 0: 108 samples through the model, where 63 do",
    ),
    (
        "every rank validates everything",
        "whole.tensor_split(dist.get_world_size())[rank] for whole",
        "whole for whole",
        "test_training_3",
        "rank 0: 108 samples through the model, where 63 do",
    ),
    (
        "what cannot be shared evenly is left out",
        "whole.tensor_split(dist.get_world_size())[rank] for whole",
        "whole.split(len(whole) // dist.get_world_size())[rank] for whole",
        "test_training_3",
        "rank 0: right after each step",
    ),
    (
        "this rank's share alone",
        "        dist.all_reduce(hits)\n",
        "",
        "test_training_3",
        "rank 0: calls, with their bytes",
    ),
    (
        "chunks, of which there may be fewer than ranks",
        "whole.tensor_split(dist.get_world_size())[rank] for whole",
        "whole.chunk(dist.get_world_size())[rank] for whole",
        "test_training_3",
        "IndexError",
    ),
    (
        "the model is left in the mode for evaluation",
        "        with torch.no_grad():\n            hits",
        "        model.eval()\n        with torch.no_grad():\n            hits",
        "test_training_3",
        "rank 0: model.training at the end, as it was when given: expected True, got False",
    ),
    (
        "right ones counted in float64",
        ("        dist.all_reduce(hits)\n", "right.append(hits.item())"),
        (
            "        hits = hits.double()\n        dist.all_reduce(hits)\n",
            "right.append(int(hits.item()))",
        ),
        "test_training_3",
        "rank 0: dtypes that are all-reduced: expected ['torch.float64', 'torch.int64',",
    ),
    (
        "no sample, no validation",
        "    right = []\n",
        "    if len(validation[0]) == 0:\n"
        "        for x_BD, y_BC in batches:\n"
        "            step_together(model, x_BD, y_BC)\n"
        "        return [0] * len(batches)\n"
        "    right = []\n",
        "test_training_3",
        "rank 0: calls, with their bytes",
    ),
    (
        "gradients set to zero after a step alone",
        (
            "        model.zero_grad()\n        loss =",
            "            parameter.data -= RATE * gradient.view_as(parameter)\n    return losses\n",
        ),
        (
            "        loss =",
            "            parameter.data -= RATE * gradient.view_as(parameter)\n"
            "        model.zero_grad()\n"
            "    return losses\n",
        ),
        "test_training_2",
        "rank 0: parameters",
    ),
    (
        "a step of its own",
        "        step_together(model, x_BD, y_BC)\n    # --- end\n\n\ndef training_2",
        "        training_2(model, [(x_BD, y_BC)])\n    # --- end\n\n\ndef training_2",
        "test_training_1",
        "rank 0: calls of step_together in 3 steps: expected 3, got 0",
    ),
    (
        "evaluation mode for the validation, training mode after it",
        (
            "        with torch.no_grad():\n            hits = ",
            "        right.append(hits.item())\n",
        ),
        (
            "        model.eval()\n        with torch.no_grad():\n            hits = ",
            "        right.append(hits.item())\n        model.train()\n",
        ),
        "test_training_3",
        "model.training at the end, as it was when given: expected False, got True",
    ),
    (
        "every rank validates everything, by model.forward",
        (
            "(whole.tensor_split(dist.get_world_size())[rank] for whole in validation)",
            "hits = (model(x_VD).argmax(1) == labels_V).sum()",
        ),
        (
            "validation",
            "hits = (model.forward(x_VD).argmax(1) == labels_V).sum() * (rank == 0)",
        ),
        "test_training_3",
        "rank 0: 108 samples through the model, where 63 do",
    ),
    (
        "all steps' samples read before the first",
        "    for step in range(steps):\n"
        "        first = step * batch + dist.get_rank() * share\n"
        "        pairs = [samples[i] for i in range(first, first + share)]\n",
        "    mine = [step * batch + dist.get_rank() * share for step in range(steps)]\n"
        "    for pairs in [[samples[first + i] for i in range(share)] for first in mine]:\n",
        "test_training_1",
        "rank 0: samples read by the time of each step: expected [12, 24, 36], got [36, 36, 36]",
    ),
    (
        "validated before the step",
        (
            "        step_together(model, x_BD, y_BC)\n        with torch.no_grad():\n",
            "        right.append(hits.item())\n",
        ),
        (
            "        with torch.no_grad():\n",
            "        right.append(hits.item())\n        step_together(model, x_BD, y_BC)\n",
        ),
        "test_training_3",
        "rank 0: right after each step: expected [16,",
    ),
]
