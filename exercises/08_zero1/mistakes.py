"""Known mistakes: name, passage of solution.py, its replacement, the check, what it says."""

MISTAKES = [
    (
        "parameters dealt out in turn",
        "    return owners\n",
        "    return [i % n for i in range(len(sizes))]\n",
        "test_partition",
        "partition([100, 1, 100, 1, 100, 1, 100, 1, 100, 1, 100, 1], 2): no rank may hold over "
        "403 elements; by rank they hold [600, 6]",
    ),
    (
        "the list cut into pieces of equal length",
        "    return owners\n",
        "    each = -(-len(sizes) // n)\n    return [i // each for i in range(len(sizes))]\n",
        "test_partition",
        "no rank may hold over 27 elements; by rank they hold [30, 6]",
    ),
    (
        "everything owned by rank 0",
        "    return owners\n",
        "    return [0] * len(sizes)\n",
        "test_partition",
        "no rank may hold over 403 elements; by rank they hold [606, 0]",
    ),
    (
        "gradients averaged once more",
        "        self.local.step()\n",
        "        for parameter in self.owner:\n"
        "            if parameter.grad is not None:\n"
        "                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)\n"
        "        self.local.step()\n",
        "test_bytes",
        "calls all_reduce, broadcast; gradients come averaged",
    ),
    (
        "every parameter gathered from every rank",
        "                dist.broadcast(parameter.detach(), src=owner)\n",
        "                came = [torch.empty_like(parameter)"
        " for _ in range(dist.get_world_size())]\n"
        "                dist.all_gather(came, parameter.detach())\n"
        "                parameter.copy_(came[owner])\n",
        "test_bytes",
        "calls all_gather; use broadcast",
    ),
    (
        "frozen parameters sent too",
        ('[p for p in group["params"] if p.requires_grad]', "if parameter.grad is not None:"),
        ('group["params"]', "if True:"),
        "test_bytes",
        "expected 868 B of broadcasts at most, got 1,948 B",
    ),
    (
        "each owner broadcasts on its own",
        "if parameter.grad is not None:",
        "if parameter.grad is not None and owner == dist.get_rank():",
        "test_bytes",
        "every rank makes the same calls in the same order",
    ),
    (
        "the library's optimizer",
        None,
        "mistake_library.py",
        "test_bytes",
        "the answer uses ZeroRedundancyOptimizer, which it is to do without",
    ),
    (
        "groups forgotten",
        (
            "        self.local = optimizer_class(mine, **defaults)\n",
            "        for mine, group in "
            "zip(self.local.param_groups, self.param_groups, strict=True):\n"
            '            mine |= group | {"params": mine["params"]}\n',
        ),
        (
            '        mine = [{"params": [p for p in trained if self.owner[p] == rank]}]\n'
            "        self.local = optimizer_class(mine, **defaults)\n",
            "",
        ),
        "test_weights",
        "after step 0, weights on rank 0 are as if groups had no settings of their own",
    ),
    (
        "only lr and weight_decay of the groups kept",
        (
            'mine.append(group | {"params": params})',
            'mine |= group | {"params": mine["params"]}',
        ),
        (
            'mine.append({"params": params})',
            'mine |= {name: group[name] for name in ("lr", "weight_decay")}',
        ),
        "test_weights",
        "are as if groups had no settings of their own but lr and weight_decay",
    ),
    (
        "a new optimizer in every step",
        (
            "        self.local = optimizer_class(mine, **defaults)\n",
            "zip(self.local.param_groups, self.param_groups",
            "        self.local.step()\n",
        ),
        (
            "        self.mine = mine\n"
            "        self.make = lambda mine: optimizer_class(mine, **defaults)\n",
            "zip(self.mine, self.param_groups",
            "        self.make(self.mine).step()\n",
        ),
        "test_weights",
        "after step 1, bias on rank 0: element",
    ),
    (
        "rank 0 sends everything",
        "src=owner",
        "src=0",
        "test_weights",
        "is what it was before on ranks [0, 1]: its owner has not updated it, or a stale copy was "
        "sent",
    ),
    (
        "nothing sent",
        "if parameter.grad is not None:",
        "if False:",
        "test_weights",
        "after step 0, bias is what it was before on ranks [1]: its owner has to send it to all",
    ),
    (
        "a missing gradient taken for zero",
        "        self.local.step()\n",
        "        for parameter in self.owner:\n"
        "            if parameter.grad is None:\n"
        "                parameter.grad = torch.zeros_like(parameter)\n"
        "        self.local.step()\n",
        "test_weights",
        "after step 1, up on rank 0 (it has no gradient in this step)",
    ),
    (
        "nothing sharded, nothing sent",
        (
            '            params = [p for p in group["params"] if self.owner.get(p) == rank]\n',
            "if parameter.grad is not None:",
        ),
        ('            params = group["params"]\n', "if False:"),
        "test_state",
        "this optimizer shards nothing: every rank holds 1,736 B, a whole copy",
    ),
    (
        "nothing sharded, everything sent",
        '[p for p in group["params"] if self.owner.get(p) == rank]',
        'group["params"]',
        "test_state",
        "this optimizer shards nothing: every rank holds 1,736 B, a whole copy",
    ),
    (
        "state of others thrown away after each step",
        (
            '[p for p in group["params"] if self.owner.get(p) == rank]',
            "        self.local.step()\n",
        ),
        (
            'group["params"]',
            "        self.local.step()\n"
            "        rank = dist.get_rank()\n"
            "        for parameter in list(self.local.state):\n"
            "            if self.owner.get(parameter) != rank:\n"
            "                del self.local.state[parameter]\n",
        ),
        "test_state",
        "state of others is made, then thrown away",
    ),
    (
        "state of others thrown away by a hook of the step",
        (
            '[p for p in group["params"] if self.owner.get(p) == rank]',
            "        self.local = optimizer_class(mine, **defaults)\n",
        ),
        (
            'group["params"]',
            "        self.local = optimizer_class(mine, **defaults)\n\n"
            "        def free(optimizer: object, *_: object) -> None:\n"
            "            for parameter in list(optimizer.state):\n"
            "                if self.owner.get(parameter) != rank:\n"
            "                    del optimizer.state[parameter]\n\n"
            "        self.local.register_step_post_hook(free)\n",
        ),
        "test_state",
        "state of others is made, then thrown away",
    ),
    (
        "only lr copied before a step",
        'mine |= group | {"params": mine["params"]}',
        'mine["lr"] = group["lr"]',
        "test_settings_change",
        "are as if weight_decay and betas and eps had not changed in param_groups",
    ),
    (
        "only lr and weight_decay copied before a step",
        'mine |= group | {"params": mine["params"]}',
        'mine |= {name: group[name] for name in ("lr", "weight_decay")}',
        "test_settings_change",
        "are as if betas and eps had not changed in param_groups",
    ),
    (
        "settings never copied",
        "        for mine, group in zip(self.local.param_groups, self.param_groups, strict=True):\n"
        '            mine |= group | {"params": mine["params"]}\n',
        "",
        "test_settings_change",
        "are as if lr and weight_decay and betas and eps had not changed in param_groups",
    ),
    (
        "groups of which a rank owns nothing left out",
        (
            "        self.local = optimizer_class(mine, **defaults)\n",
            "        for mine, group in "
            "zip(self.local.param_groups, self.param_groups, strict=True):\n"
            '            mine |= group | {"params": mine["params"]}\n',
        ),
        (
            '        mine = [group for group in mine if group["params"]]\n'
            "        self.local = optimizer_class(mine, **defaults)\n",
            "",
        ),
        "test_few_parameters",
        "ValueError: optimizer got an empty parameter list",
    ),
    (
        "the settings that one can think of copied before a step",
        'mine |= group | {"params": mine["params"]}',
        'names = {"lr", "momentum", "weight_decay", "betas"}\n'
        "            mine |= {name: group[name] for name in names & group.keys()}",
        "test_settings_change",
        "are as if eps had not changed in param_groups",
    ),
    (
        "frozen parameters dealt out with the trained",
        (
            "        owners = partition([p.numel() for p in trained], n)\n",
            "        self.owner = dict(zip(trained, owners, strict=True))\n",
        ),
        (
            '        every = [p for group in self.param_groups for p in group["params"]]\n'
            "        owners = partition([p.numel() for p in every], n)\n",
            "        owners = dict(zip(every, owners, strict=True))\n"
            "        self.owner = {p: owners[p] for p in trained}\n",
        ),
        "test_state",
        "rank 1 holds 1,736 B of state; no more than 1,396 B are due. Is something dealt out that "
        "has no state, like the frozen?",
    ),
    (
        "received into new memory",
        "                dist.broadcast(parameter.detach(), src=owner)\n",
        "                came = parameter.detach().clone()\n"
        "                dist.broadcast(came, src=owner)\n"
        "                parameter.data = came\n",
        "test_bytes",
        "lies in other memory now: update it in place",
    ),
    (
        "ties dealt by lot",
        ("from collections.abc import Iterable\n", "key=lambda i: -sizes[i]"),
        (
            "import random\nfrom collections.abc import Iterable\n",
            "key=lambda i: (-sizes[i], random.random())",
        ),
        "test_partition",
        "partition, asked again, deals otherwise: ranks would not agree",
    ),
    (
        "parameters read from what the base class has used up",
        "        for group in self.param_groups:\n"
        '            trained += [p for p in group["params"] if p.requires_grad]\n',
        "        for group in params:\n"
        '            every = group["params"] if isinstance(group, dict) else [group]\n'
        "            trained += [p for p in every if p.requires_grad]\n",
        "test_few_parameters",
        "after step 0, embedding is what it was before on ranks [0, 1, 2, 3]",
    ),
    (
        "broadcasts in the order of a set",
        ("for parameter, owner in self.owner.items():\n", "src=owner"),
        ("for parameter in set(self.owner):\n", "src=self.owner[parameter]"),
        "test_weights",
        "every rank makes the same calls in the same order",
    ),
    (
        "trained parameters without a gradient sent too",
        "if parameter.grad is not None:",
        "if True:",
        "test_bytes",
        "step 1: expected 700 B of broadcasts at most, got 868 B; in this step there is no "
        "gradient of frozen, up",
    ),
    (
        "sent and not waited for",
        "dist.broadcast(parameter.detach(), src=owner)",
        "dist.broadcast(parameter.detach(), src=owner, async_op=True)",
        "test_bytes",
        "step 0: step came back before what it sends had arrived: wait",
    ),
    (
        "state made for all parameters, of which those of others are never stepped",
        (
            '[p for p in group["params"] if self.owner.get(p) == rank]',
            "        self.local.step()\n",
        ),
        (
            'group["params"]',
            "        rank = dist.get_rank()\n"
            "        hidden = {p: p.grad for p in self.owner if self.owner[p] != rank}\n"
            "        for p in hidden:\n"
            "            p.grad = None\n"
            "        self.local.step()\n"
            "        for p in hidden:\n"
            "            p.grad = hidden[p]\n",
        ),
        "test_state",
        "this optimizer shards nothing: every rank holds 868 B, a whole copy",
    ),
    (
        "the rank's own optimizer kept in the class",
        "self.local = optimizer_class(mine",
        "type(self).local = optimizer_class(mine",
        "test_weights",
        "answer.py, line",
    ),
    (
        "the sizes sorted in place",
        "    owners = [0] * len(sizes)\n",
        "    sizes.sort()\n    owners = [0] * len(sizes)\n",
        "test_partition",
        "partition has changed the list of sizes; it is the caller's",
    ),
    (
        "owners that are no ints",
        "    return owners\n",
        "    return [float(owner) for owner in owners]\n",
        "test_partition",
        "expected 12 ranks from 0 to 1, got [0.0, ",
    ),
    (
        "each group dealt out by itself",
        (
            "        trained = []\n        for group in self.param_groups:\n"
            '            trained += [p for p in group["params"] if p.requires_grad]\n'
            "        owners = partition([p.numel() for p in trained], n)\n"
            "        self.owner = dict(zip(trained, owners, strict=True))\n",
        ),
        (
            "        self.owner = {}\n        for group in self.param_groups:\n"
            '            trained = [p for p in group["params"] if p.requires_grad]\n'
            "            owners = partition([p.numel() for p in trained], n)\n"
            "            self.owner |= dict(zip(trained, owners, strict=True))\n",
        ),
        "test_groups_of_one",
        "with one parameter per group one rank holds all of the state",
    ),
]
