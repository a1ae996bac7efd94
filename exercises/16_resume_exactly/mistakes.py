"""Known mistakes: name, passage of solution.py, what replaces it, check, what that check says."""

MISTAKES = [
    (
        "random numbers not restored",
        '        torch.set_rng_state(state["random"])\n',
        "",
        "test_resume",
        "rank 0, stopped after step 0 of 20: weights",
    ),
    (
        "seeded anew instead of restored",
        'torch.set_rng_state(state["random"])',
        "torch.manual_seed(self.seed + 1 + dist.get_rank())",
        "test_resume",
        "rank 0, stopped after step 5 of 20: weights",
    ),
    (
        "momentum forgotten",
        '        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))\n',
        "",
        "test_resume",
        "rank 0, stopped after step",
    ),
    (
        "no momentum is not loaded",
        '        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))\n',
        '        if state["optimizer"]["state"]:\n'
        '            self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))\n',
        "test_resume",
        "rank 0, stopped after step 0 of 20: weights",
    ),
    (
        "the step forgotten",
        '        self.step = state["step"]\n',
        "",
        "test_resume",
        "rank 0, stopped after step 0 of 20: weights",
    ),
    (
        "all ranks go on with rank 0's random numbers",
        "        return copy.deepcopy(state)\n",
        '        dist.broadcast(state["random"], 0)\n        return copy.deepcopy(state)\n',
        "test_resume",
        "rank 0: collectives of state() and load(): expected [], got ['broadcast']",
    ),
    (
        "weights sent once more when loading",
        '        self.step = state["step"]\n',
        '        self.step = state["step"]\n'
        "        for weight in self.model.parameters():\n"
        "            dist.broadcast(weight.data, 0)\n",
        "test_resume",
        "rank 0: collectives of state() and load(): expected [], got ['broadcast', 'broadcast', ",
    ),
    (
        "each rank counts its own whole batches",
        "        steps_per_epoch = len(self.data) // n // self.batch\n",
        "        share = len(range(dist.get_rank(), len(self.data), n))\n"
        "        steps_per_epoch = share // self.batch\n",
        "test_batches",
        "rank 0, step 2, which is step 0 of epoch 1: samples",
    ),
    (
        "batches of 4, whatever was asked",
        "own[done * self.batch : (done + 1) * self.batch]",
        "own[done * 4 : (done + 1) * 4]",
        "test_batches",
        "rank 0, step 0, which is step 0 of epoch 0: samples: expected (9,) int64, got (4,) int64",
    ),
    (
        "the epoch is begun again",
        "own[done * self.batch : (done + 1) * self.batch]",
        "own[: self.batch]",
        "test_batches",
        "rank 0, step 1, which is step 1 of epoch 0: samples",
    ),
    (
        "a counter of its own, in place of the step",
        "        epoch, done = divmod(self.step, steps_per_epoch)\n",
        '        self.asked = getattr(self, "asked", -1) + 1\n'
        "        epoch, done = divmod(self.asked, steps_per_epoch)\n",
        "test_batches",
        "batch of step 19, asked for after later ones: element",
    ),
    (
        "every epoch in the same order",
        "manual_seed(self.seed + epoch)",
        "manual_seed(self.seed)",
        "test_batches",
        "rank 0, step 5, which is step 0 of epoch 1: samples",
    ),
    (
        "an order drawn from everybody's generator",
        (
            "generator = torch.Generator().manual_seed(self.seed + epoch)",
            "torch.randperm(len(self.data), generator=generator)",
        ),
        ("torch.manual_seed(self.seed + epoch)", "torch.randperm(len(self.data))"),
        "test_batches",
        "torch's global random numbers have moved",
    ),
    (
        "all ranks take the same samples",
        "own = order[dist.get_rank() :: n]",
        "own = order",
        "test_batches",
        "rank 0, step 0, which is step 0 of epoch 0: samples",
    ),
    (
        "a last batch that is too short",
        "len(self.data) // n // self.batch",
        "-(-len(self.data) // (n * self.batch))",
        "test_batches",
        "rank 0, step 5, which is step 0 of epoch 1: samples",
    ),
    (
        "no copy",
        "return copy.deepcopy(state)",
        "return state",
        "test_copies",
        "state() has changed while training went on: it is to be a copy",
    ),
    (
        "a copy that is too shallow",
        "return copy.deepcopy(state)",
        "return dict(state)",
        "test_copies",
        "state() has changed while training went on: it is to be a copy",
    ),
    (
        "the optimizer takes the state's own tensors",
        'copy.deepcopy(state["optimizer"])',
        'state["optimizer"]',
        "test_copies",
        "training went on after load(state), and has changed the state",
    ),
    (
        "the model itself in the state",
        (
            '"model": self.model.state_dict()',
            'self.model.load_state_dict(state["model"])',
        ),
        (
            '"model": self.model',
            'self.model.load_state_dict(state["model"].state_dict())',
        ),
        "test_resume",
        "torch.load(weights_only=True) refuses the state",
    ),
    (
        "all the data in the state",
        '"step": self.step}',
        '"step": self.step, "data": self.data}',
        "test_size",
        "rank 0: the state holds",
    ),
    (
        "an epoch is one sample shorter",
        "len(self.data) // n // self.batch",
        "(len(self.data) - 1) // n // self.batch",
        "test_batches",
        "rank 0, step 5, which is step 5 of epoch 0: samples",
    ),
    (
        "all the data in the state, as a list",
        '"step": self.step}',
        '"step": self.step, "data": self.data.tolist()}',
        "test_size",
        "rank 0: the state holds",
    ),
    (
        "the state that was asked for first",
        "        return copy.deepcopy(state)\n",
        '        self.kept = getattr(self, "kept", copy.deepcopy(state))\n'
        "        return self.kept\n",
        "test_resume",
        "rank 0, stopped after step 5 of 20: weights",
    ),
    (
        "a state is loaded once",
        '        self.model.load_state_dict(state["model"])\n',
        '        if getattr(self, "loaded", False):\n'
        "            return\n"
        "        self.loaded = True\n"
        '        self.model.load_state_dict(state["model"])\n',
        "test_resume",
        "rank 0, stopped after step 0 of 20: weights",
    ),
]
