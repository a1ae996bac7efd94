"""Known mistakes: name, passage of solution.py, what replaces it, check, what that check says."""

MISTAKES = [
    (
        "A and B both random",
        "self.B = nn.Parameter(base.weight.new_zeros(base.out_features, r, dtype=dtype))",
        "self.B = nn.Parameter(base.weight.new_ones(base.out_features, r, dtype=dtype))",
        "test_start",
        "output of a new adapter: that of its base",
    ),
    (
        "A and B both zero",
        "nn.init.normal_(self.A, std=base.in_features**-0.5)",
        "nn.init.zeros_(self.A)",
        "test_start",
        "A and B are both zero at first: then neither ever has a gradient",
    ),
    (
        "A zero and B random",
        (
            "nn.init.normal_(self.A, std=base.in_features**-0.5)",
            "base.weight.new_zeros(base.out_features, r, dtype=dtype)",
        ),
        ("nn.init.zeros_(self.A)", "base.weight.new_ones(base.out_features, r, dtype=dtype)"),
        "test_start",
        "B is to be zero at first, and A random",
    ),
    (
        "the base is trained, too",
        "        base.requires_grad_(False)\n",
        "",
        "test_start",
        "parameters of an adapter that are trained: expected ['A', 'B'], "
        "got ['A', 'B', 'base.bias', 'base.weight']",
    ),
    (
        "A of ones",
        "nn.init.normal_(self.A, std=base.in_features**-0.5)",
        "nn.init.ones_(self.A)",
        "test_start",
        "A is to be random at first",
    ),
    (
        "float32 with bfloat16 alone",
        "torch.promote_types(base.weight.dtype, torch.float32)",
        "torch.float32 if base.weight.dtype == torch.bfloat16 else base.weight.dtype",
        "test_start",
        "A with a base in float16: expected torch.float32, got torch.float16",
    ),
    (
        "A made on the CPU",
        "base.weight.new_empty(r, base.in_features, dtype=dtype)",
        "torch.empty(r, base.in_features, dtype=dtype)",
        "test_start",
        "A is on cpu, its base is not: make it on the base's",
    ),
    (
        "adapters in the base's bfloat16",
        "torch.promote_types(base.weight.dtype, torch.float32)",
        "base.weight.dtype",
        "test_start",
        "A with a base in bfloat16: expected torch.float32, got torch.bfloat16",
    ),
    (
        "the factor forgotten in forward",
        "(self.scale * change).to(y.dtype)",
        "change.to(y.dtype)",
        "test_forward",
        "output: the factor alpha / r is missing",
    ),
    (
        "alpha for alpha / r",
        "self.scale = alpha / r",
        "self.scale = alpha",
        "test_forward",
        "output: the factor is alpha, not alpha / r",
    ),
    (
        "B A multiplied out",
        "F.linear(F.linear(x.to(self.A.dtype), self.A), self.B)",
        "F.linear(x.to(self.A.dtype), self.B @ self.A)",
        "test_made",
        "forward makes a tensor of 15,360 bytes, where W has 15,360: multiply x by A first",
    ),
    (
        "a copy of W in float32",
        "        y = self.base(x)\n",
        "        W = self.base.weight.to(self.A.dtype)\n"
        "        y = (F.linear(x.to(W.dtype), W) + self.base.bias).to(x.dtype)\n",
        "test_made",
        "and let the base compute its own part",
    ),
    (
        "the change in bfloat16",
        "F.linear(F.linear(x.to(self.A.dtype), self.A), self.B)",
        "F.linear(F.linear(x, self.A.to(x.dtype)), self.B.to(x.dtype))",
        "test_bfloat16",
        "elements differ from the change in float32, rounded once",
    ),
    (
        "the output in float32",
        "y + (self.scale * change).to(y.dtype)",
        "y + self.scale * change",
        "test_bfloat16",
        "output with a base in bfloat16: expected bfloat16, got torch.float32",
    ),
    (
        "bfloat16 meets float32",
        "x.to(self.A.dtype)",
        "x",
        "test_bfloat16",
        "RuntimeError: ",
    ),
    (
        "all frozen at the end, adapters too",
        ("    model.requires_grad_(False)\n", "    return model\n    # --- end\n\n\ndef shard"),
        ("", "    return model.requires_grad_(False)\n    # --- end\n\n\ndef shard"),
        "test_places",
        "not trained: blocks.0.down.A, blocks.0.down.B",
    ),
    (
        "norms and other layers left to train",
        "    model.requires_grad_(False)\n",
        "",
        "test_places",
        "only A and B are to be trained; blocks.0.norm.bias, blocks.0.norm.weight",
    ),
    (
        "an adapter for each place of a layer",
        "                if child not in adapters:\n"
        "                    adapters[child] = Adapter(child, r, alpha)\n",
        "                adapters[child] = Adapter(child, r, alpha)\n",
        "test_places",
        "a layer that is held in two places gets one adapter",
    ),
    (
        "names that only begin so",
        "if name in names and",
        "if name.startswith(names) and",
        "test_places",
        "places of the adapters: expected",
    ),
    (
        "names that only end so",
        "if name in names and",
        "if name.endswith(names) and",
        "test_places",
        "places of the adapters: expected",
    ),
    (
        "any part of a dotted name",
        (
            "    for parent in list(model.modules()):\n",
            "if name in names and",
        ),
        (
            "    for path, parent in list(model.named_modules()):\n",
            'if {name, *path.split(".")} & set(names) and',
        ),
        "test_places",
        "places of the adapters: expected",
    ),
    (
        "alpha is 1, whatever was asked",
        "Adapter(child, r, alpha)",
        "Adapter(child, r, 1.0)",
        "test_places",
        "change by an adapter that adapt made, r = 2, alpha = 7.0: element",
    ),
    (
        "whatever bears the name",
        "if name in names and isinstance(child, nn.Linear):",
        "if name in names:",
        "test_places",
        "AttributeError: 'Sequential' object has no attribute 'weight'",
    ),
    (
        "thin matrices dealt out by rows",
        "return Shard(1) if parameter.dim() == 2 and len(parameter) % n != 0 else None",
        "return None",
        "test_sharded",
        "are padding (r = 2, a layer of 24, 4 ranks)",
    ),
    (
        "one unit for the whole model",
        "    for block in model.blocks:\n"
        "        fully_shard(block, mesh=mesh, shard_placement_fn=placement)\n",
        "",
        "test_sharded",
        "rank 0: reduce-scatters, one per block: expected 2, got 1",
    ),
    (
        "what is outside the blocks forgotten",
        "return fully_shard(model, mesh=mesh, shard_placement_fn=placement)",
        "return model",
        "test_sharded",
        "rank 0: whole on every rank, in no unit: up_front.weight",
    ),
    (
        "a unit of its own for every adapter",
        "    for block in model.blocks:\n",
        "    for module in model.modules():\n"
        "        if isinstance(module, Adapter):\n"
        "            fully_shard(module, mesh=mesh, shard_placement_fn=placement)\n"
        "    for block in model.blocks:\n",
        "test_sharded",
        "rank 0: reduce-scatters, one per block: expected 2, got 4",
    ),
    (
        "units kept for backward",
        "fully_shard(block, mesh=mesh, shard_placement_fn=placement)",
        "fully_shard(\n"
        "            block, mesh=mesh, shard_placement_fn=placement, reshard_after_forward=False\n"
        "        )",
        "test_sharded",
        "rank 0: all-gathers, twice per block and once for the rest: expected 5, got 3",
    ),
    (
        "merged without the factor",
        "weight.to(self.A.dtype) + self.scale * self.B @ self.A",
        "weight.to(self.A.dtype) + self.B @ self.A",
        "test_merged",
        "merged weight: the factor alpha / r is missing",
    ),
    (
        "a new layer instead of the base",
        "        return self.base\n        # --- end\n\n\ndef adapt",
        "        layer = nn.Linear(self.base.in_features, self.base.out_features)\n"
        "        layer.weight = weight\n"
        "        return layer\n        # --- end\n\n\ndef adapt",
        "test_merged",
        "merged: expected the base itself, its weight changed",
    ),
    (
        "the change rounded before it is added",
        "weight.copy_(weight.to(self.A.dtype) + self.scale * self.B @ self.A)",
        "weight += (self.scale * self.B @ self.A).to(weight.dtype)",
        "test_merged_in_bfloat16",
        "the change was rounded to bfloat16 before it was added",
    ),
    (
        "by columns only what has fewer rows than there are ranks",
        "len(parameter) % n != 0",
        "len(parameter) < n",
        "test_sharded",
        "are padding (r = 6, a layer of 24, 4 ranks)",
    ),
    (
        "by columns A alone",
        "len(parameter) % n != 0",
        "len(parameter) % n != 0 and len(parameter) < parameter.shape[1]",
        "test_sharded",
        "are padding (r = 4, a layer of 18, 4 ranks)",
    ),
    (
        "alpha / r rounded down",
        "self.scale = alpha / r",
        "self.scale = alpha // r",
        "test_forward",
        "output: element",
    ),
    (
        "float64 with a base in float32",
        "dtype = torch.promote_types(base.weight.dtype, torch.float32)",
        "dtype = torch.float32 if base.weight.dtype.itemsize == 2 else torch.float64",
        "test_start",
        "A with a base in float32: expected torch.float32, got torch.float64",
    ),
    (
        "the same A in every adapter",
        "nn.init.normal_(self.A, std=base.in_features**-0.5)",
        "with torch.random.fork_rng(devices=[]):\n"
        "            torch.manual_seed(0)\n"
        "            nn.init.normal_(self.A)",
        "test_start",
        "A is to be random at first: two adapters have the same",
    ),
    (
        "x is flattened by view",
        "F.linear(F.linear(x.to(self.A.dtype), self.A), self.B)",
        "F.linear(F.linear(x.to(self.A.dtype).view(-1, x.shape[-1]), self.A), self.B)\n"
        "        change = change.view(y.shape)",
        "test_forward",
        "RuntimeError: view size is not compatible",
    ),
    (
        "a batch is taken for granted",
        "        y = self.base(x)\n",
        '        assert x.dim() > 1, "x has no batch"\n        y = self.base(x)\n',
        "test_forward",
        "AssertionError: x has no batch",
    ),
    (
        "another weight for the base",
        "weight.copy_(weight.to(self.A.dtype) + self.scale * self.B @ self.A)",
        "weight = weight.to(self.A.dtype) + self.scale * self.B @ self.A\n"
        "        self.base.weight = nn.Parameter(weight.to(self.base.weight.dtype))",
        "test_merged",
        "merged: the base has another weight now: write into the one that it has",
    ),
    (
        "only within the blocks",
        "    for parent in list(model.modules()):\n",
        "    for parent in list(model.blocks.modules()):\n",
        "test_places",
        "places of the adapters: expected",
    ),
    (
        "layers of nn.Linear's own class alone",
        "isinstance(child, nn.Linear)",
        "type(child) is nn.Linear",
        "test_places",
        "places of the adapters: expected",
    ),
    (
        "an adapter in places of any name",
        "    return model\n    # --- end\n\n\ndef shard",
        "    for parent in list(model.modules()):\n"
        "        for name, child in list(parent._modules.items()):\n"
        "            if child in adapters and not isinstance(parent, Adapter):\n"
        "                setattr(parent, name, adapters[child])\n"
        "    return model\n    # --- end\n\n\ndef shard",
        "test_places",
        "places of the adapters: expected",
    ),
    (
        "one of two places",
        "                setattr(parent, name, adapters[child])\n",
        "                    setattr(parent, name, adapters[child])\n",
        "test_places",
        "places of the adapters: expected",
    ),
    (
        "children without the second of two names",
        "list(parent._modules.items())",
        "list(parent.named_children())",
        "test_two_names",
        "are they the same one: expected [True, True, True], got [True, False, False]",
    ),
]
