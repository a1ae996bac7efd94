"""Known mistakes: name, passage of solution.py, what replaces it, check that refuses it, what that
check says."""

MISTAKES = [
    (
        "the weights averaged",
        ("parameter.grad /= ", "dist.all_reduce(parameter.grad, "),
        ("parameter /= ", "dist.all_reduce(parameter, "),
        "test_gradients",
        "backward changed the weights, as averaging them does. "
        "A post_accumulate_grad hook is handed the parameter",
    ),
    (
        "divided by two, whatever the number of ranks",
        "parameter.grad /= dist.get_world_size()",
        "parameter.grad /= 2",
        "test_gradients",
        "it is the sum over 3 ranks, divided by 2",
    ),
    (
        "nothing is reset after the first step",
        (
            "            work.wait()\n        self.queue = deque(self.trained)\n"
            "        self.there = set()\n        self.works = []\n"
        ),
        "            work.wait()\n        self.works = []\n",
        "test_bytes",
        "step 1, rank 0: no all-reduce at all, though step 0 had some: is the object as __init__",
    ),
    (
        "buffers forgotten at the start",
        "(*module.parameters(), *module.buffers())",
        "module.parameters()",
        "test_start",
        "buffer shift once the module is wrapped",
    ),
    (
        "frozen parameters forgotten at the start",
        "(*module.parameters(), *module.buffers()):\n",
        "(*module.parameters(), *module.buffers()):\n"
        "            if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:\n"
        "                continue\n",
        "test_start",
        "parameter frozen.weight once the module is wrapped",
    ),
    (
        "no gradient where the layer was not used",
        (
            "        if parameter.grad is None:\n"
            "            parameter.grad = torch.zeros_like(parameter)\n"
            "        parameter.grad /= dist.get_world_size()\n",
            "dist.all_reduce(parameter.grad, ",
        ),
        (
            "        unused = parameter.grad is None\n"
            "        grad = torch.zeros_like(parameter) if unused else parameter.grad\n"
            "        grad /= dist.get_world_size()\n",
            "dist.all_reduce(grad, ",
        ),
        "test_layers_left_out",
        "expected a tensor, got None",
    ),
    (
        "zeros of float32 for every unused layer",
        "torch.zeros_like(parameter)",
        "torch.zeros(parameter.shape)",
        "test_layers_left_out",
        "in launch: parameter.grad = torch.zeros(parameter.shape)",
    ),
    (
        "nothing waited for",
        "            work.wait()\n",
        "            pass\n",
        "test_each_is_waited_for",
        "(its all-reduce arrives only if it is waited for): it is still this rank's own",
    ),
    (
        "only the last waited for",
        "        for work in self.works:\n            work.wait()\n",
        "        self.works[-1].wait()\n",
        "test_each_is_waited_for",
        "(its all-reduce arrives only if it is waited for): it is still this rank's own",
    ),
    (
        "all launched when the last gradient is there",
        "while self.queue and self.queue[0] in self.there:",
        "while self.queue and len(self.there) == len(self.trained):",
        "test_order",
        "last.weight was ready, but its all-reduce had not started when the gradient of",
    ),
    (
        "all launched after backward",
        (
            "        while self.queue and self.queue[0] in self.there:\n"
            "            self.launch(self.queue.popleft())\n"
        ),
        "",
        "test_order",
        "last.weight was ready, but its all-reduce had not started when the gradient of",
    ),
    (
        "one launched per arrival: if for while",
        "while self.queue and self.queue[0] in self.there:",
        "if self.queue and self.queue[0] in self.there:",
        "test_order",
        "was ready, but its all-reduce had not started when",
    ),
    (
        "only the first launched early",
        "while self.queue and self.queue[0] in self.there:",
        "while self.queue and self.queue[0] in self.there and not self.works:",
        "test_order",
        "was ready, but its all-reduce had not started when",
    ),
    (
        "each sent when it comes",
        (
            "        while self.queue and self.queue[0] in self.there:\n"
            "            self.launch(self.queue.popleft())\n",
            "        while self.queue:\n            self.launch(self.queue.popleft())\n",
        ),
        (
            "        self.launch(parameter)\n",
            "        for parameter in self.trained:\n"
            "            if parameter not in self.there:\n"
            "                self.launch(parameter)\n",
        ),
        "test_layers_left_out",
        "every rank makes the same calls in the same order",
    ),
    (
        "tied weights sent twice",
        (
            "[p for p in module.parameters() if p.requires_grad][::-1]",
            "for parameter in self.trained:",
        ),
        (
            "[p for _, p in module.named_parameters(remove_duplicate=False) "
            "if p.requires_grad][::-1]",
            "for parameter in dict.fromkeys(self.trained):",
        ),
        "test_bytes",
        "the tied weight is one parameter, and is all-reduced twice",
    ),
    (
        "the sum instead of the mean",
        "        parameter.grad /= dist.get_world_size()\n",
        "",
        "test_gradients",
        "it is the sum over 2 ranks, 2 times the mean",
    ),
    (
        "DDP used",
        "        self.module = module\n",
        "        self.module = nn.parallel.DistributedDataParallel(module)\n",
        "test_start",
        "the answer uses DistributedDataParallel",
    ),
    (
        "the hook waits",
        "dist.all_reduce(parameter.grad, async_op=True)",
        "dist.all_reduce(parameter.grad)",
        "test_waiting",
        "rank 0's backward waits for rank 1's: start the all-reduce and go on",
    ),
    (
        "sent by threads",
        (
            "from collections import deque\n",
            "        self.works.append(dist.all_reduce(parameter.grad, async_op=True))\n",
            "work.wait()",
        ),
        (
            "import threading\nfrom collections import deque\n",
            "        thread = threading.Thread(target=dist.all_reduce, args=(parameter.grad,))\n"
            "        thread.start()\n        self.works.append(thread)\n",
            "work.join()",
        ),
        "test_bytes",
        "the answer uses Thread",
    ),
    (
        "the first layers first, so that nothing overlaps",
        "if p.requires_grad][::-1]",
        "if p.requires_grad]",
        "test_order",
        "0 of 7 all-reduces had started when the last gradient came: backward begins with the last "
        "layers, so reduce them first",
    ),
    (
        "a hook of the tensor, before .grad is there",
        "parameter.register_post_accumulate_grad_hook(self.arrived)",
        "parameter.register_hook(lambda _, p=parameter: self.arrived(p))",
        "test_each_is_waited_for",
        "zeros are all-reduced: this step's gradient was not in .grad yet",
    ),
    (
        "zeros of zero_grad taken for a gradient",
        "while self.queue and self.queue[0] in self.there:",
        "while self.queue and self.queue[0].grad is not None:",
        "test_each_is_waited_for",
        "zeros are all-reduced: this step's gradient was not in .grad yet",
    ),
    (
        "launched in the order of a set",
        "[p for p in module.parameters() if p.requires_grad][::-1]",
        "[p for p in set(module.parameters()) if p.requires_grad]",
        "test_waiting",
        "every rank makes the same calls in the same order",
    ),
    (
        "the state_dict broadcast, without the buffers that it leaves out",
        "(*module.parameters(), *module.buffers()):",
        "module.state_dict().values():",
        "test_start",
        "buffer scale (state_dict() leaves it out) once the module is wrapped",
    ),
    (
        "what step 0 has not used left out for ever",
        (
            "        self.there = set()\n        self.works = []\n        # --- end\n\n"
            "    def forward(",
            "        while self.queue:\n            self.launch(self.queue.popleft())\n",
        ),
        (
            "        self.there = set()\n        self.works = []\n        self.steps = 0\n"
            "        # --- end\n\n    def forward(",
            "        while self.queue:\n            self.launch(self.queue.popleft())\n"
            "        self.steps += 1\n"
            "        if self.steps == 1:\n"
            "            for work in self.works:\n"
            "                work.wait()\n"
            "            self.trained = [p for p in self.trained if p.grad.any()]\n",
        ),
        "test_layers_left_out",
        "step 1, rank 0, gradient of gain (layers used: [0] on rank 0",
    ),
    (
        "parameters of all modules in one list",
        (
            "    def __init__(self, module: nn.Module)",
            "        self.trained = [p for p in module.parameters() if p.requires_grad][::-1]\n",
        ),
        (
            "    trained = []\n\n    def __init__(self, module: nn.Module)",
            "        self.trained += [p for p in module.parameters() if p.requires_grad][::-1]\n",
        ),
        "test_bytes",
        "step 0, rank 0: bytes all-reduced: expected",
    ),
    (
        "the hook waits from the second step on",
        (
            "dist.all_reduce(parameter.grad, async_op=True))\n",
            "        for work in self.works:\n            work.wait()\n",
        ),
        (
            "dist.all_reduce(parameter.grad, async_op=True))\n"
            "        if hasattr(self, 'later'):\n"
            "            self.works[-1].wait()\n",
            "        for work in self.works:\n            work.wait()\n        self.later = True\n",
        ),
        "test_waiting",
        "rank 0's backward waits for rank 1's: start the all-reduce and go on",
    ),
]
