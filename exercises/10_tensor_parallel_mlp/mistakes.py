"""Known mistakes: name, passage of solution.py, its replacement, the check, what it says."""

MISTAKES = [
    (
        "the bias added on every rank",
        "F.linear(h_BTh, self.w2)) + self.b2",
        "F.linear(h_BTh, self.w2, self.b2))",
        "test_values",
        "y has b2 in it 2 times: it is added before the sum",
    ),
    (
        "an n-th of the bias added on every rank",
        "F.linear(h_BTh, self.w2)) + self.b2",
        "F.linear(h_BTh, self.w2, self.b2 / dist.get_world_size()))",
        "test_values",
        "gradient of b2 is an n-th of what it is to be",
    ),
    (
        "the bias added on rank 0 only",
        "F.linear(h_BTh, self.w2)) + self.b2",
        "F.linear(h_BTh, self.w2, self.b2 if dist.get_rank() == 0 else None))",
        "test_values",
        "rank 1: gradient of b2: expected a tensor, got None",
    ),
    (
        "the tanh approximation of gelu",
        "F.linear(Enter.apply(x_BTD), self.w1, self.b1))",
        'F.linear(Enter.apply(x_BTD), self.w1, self.b1), approximate="tanh")',
        "test_values",
        "y is that of the tanh approximation of gelu; the exact one is asked for",
    ),
    (
        "relu instead of gelu",
        "F.gelu(",
        "F.relu(",
        "test_values",
        "y is that of relu",
    ),
    (
        "the gradient of x left unsummed",
        "        whole_BTD = grad_BTD.clone()\n"
        "        dist.all_reduce(whole_BTD)\n"
        "        return whole_BTD\n",
        "        return grad_BTD\n",
        "test_values",
        "x's gradient is this rank's summand alone, not the sum",
    ),
    (
        "the gradient of the sum summed again",
        "        return grad_BTD\n",
        "        whole_BTD = grad_BTD.clone()\n"
        "        dist.all_reduce(whole_BTD)\n"
        "        return whole_BTD\n",
        "test_values",
        "gradient of w1 is 2 times too large: Leave has nothing to sum backward",
    ),
    (
        "the gradient summed and averaged in place in Leave",
        "        return grad_BTD\n",
        "        dist.all_reduce(grad_BTD)\n        return grad_BTD / dist.get_world_size()\n",
        "test_values",
        "the gradient that Leave was handed was changed; it is the caller's",
    ),
    (
        "the gradient summed in place in Enter",
        "        whole_BTD = grad_BTD.clone()\n"
        "        dist.all_reduce(whole_BTD)\n"
        "        return whole_BTD\n",
        "        dist.all_reduce(grad_BTD)\n        return grad_BTD\n",
        "test_values",
        "the gradient that Enter was handed was changed; it is the caller's",
    ),
    (
        "the partial output summed in place in Leave",
        "        whole_BTD = part_BTD.clone()\n"
        "        dist.all_reduce(whole_BTD)\n"
        "        return whole_BTD\n",
        "        dist.all_reduce(part_BTD)\n        return part_BTD\n",
        "test_values",
        "the tensor that Leave was handed was changed; it is the caller's",
    ),
    (
        "hidden features and weights gathered",
        "        return Leave.apply(F.linear(h_BTh, self.w2)) + self.b2\n",
        "        parts = [torch.empty_like(h_BTh) for _ in range(dist.get_world_size())]\n"
        "        dist.all_gather(parts, h_BTh.contiguous())\n"
        "        parts[dist.get_rank()] = h_BTh\n"
        "        weights = [torch.empty_like(self.w2) for _ in parts]\n"
        "        dist.all_gather(weights, self.w2.contiguous())\n"
        "        weights[dist.get_rank()] = self.w2\n"
        "        return F.linear(torch.cat(parts, -1), torch.cat(weights, 1), self.b2)\n",
        "test_values",
        "the answer calls all_gather; use all_reduce",
    ),
    (
        "the library's layers",
        None,
        "mistake_library.py",
        "test_values",
        "the answer uses parallelize_module, which it is to do without",
    ),
    (
        "features cut by chunk",
        (
            "whole.tensor_split(n)[rank] for whole",
            "w2_DH.tensor_split(n, dim=1)[rank]",
        ),
        ("whole.chunk(n)[rank] for whole", "w2_DH.chunk(n, dim=1)[rank]"),
        "test_parts",
        "IndexError: tuple index out of range",
    ),
    (
        "the second weight cut by rows",
        "w2_DH.tensor_split(n, dim=1)[rank]",
        "w2_DH.tensor_split(n)[rank]",
        "test_parts",
        "rank 0: w2: expected (5, 6) float64, got (3, 12) float64",
    ),
    (
        "features that do not divide evenly dropped",
        (
            "        w1_hD, b1_h = (whole.tensor_split(n)[rank] for whole in (w1_HD, b1_H))\n",
            "w2_DH.tensor_split(n, dim=1)[rank]",
        ),
        (
            "        h = len(w1_HD) // n\n"
            "        mine = slice(rank * h, rank * h + h)\n"
            "        w1_hD, b1_h = (whole[mine] for whole in (w1_HD, b1_H))\n",
            "w2_DH[:, mine]",
        ),
        "test_parts",
        "H = 10, rank 0: w1: expected (4, 5) float64, got (3, 5) float64",
    ),
    (
        "the whole weights kept along with the parts",
        "        w2_Dh = w2_DH",
        "        self.whole = [w1_HD, w2_DH]\n        w2_Dh = w2_DH",
        "test_parts",
        "rank 0: bytes kept for w1, b1, w2 and b2: expected 568, got 1,528",
    ),
    (
        "views of the whole weights kept",
        "nn.Parameter(part.detach().clone())",
        "nn.Parameter(part.detach())",
        "test_parts",
        "w1 is a view, which keeps the whole tensor alive",
    ),
    (
        "nothing sharded",
        (
            "(whole.tensor_split(n)[rank] for whole in (w1_HD, b1_H))",
            "w2_DH.tensor_split(n, dim=1)[rank]",
            "F.linear(Enter.apply(x_BTD), self.w1, self.b1)",
            "Leave.apply(F.linear(h_BTh, self.w2))",
        ),
        ("(w1_HD, b1_H)", "w2_DH", "F.linear(x_BTD, self.w1, self.b1)", "F.linear(h_BTh, self.w2)"),
        "test_parts",
        "rank 0: w1: expected (6, 5) float64, got (12, 5) float64",
    ),
    (
        "the output summed in float64",
        "        whole_BTD = part_BTD.clone()\n"
        "        dist.all_reduce(whole_BTD)\n"
        "        return whole_BTD\n",
        "        whole_BTD = part_BTD.double()\n"
        "        dist.all_reduce(whole_BTD)\n"
        "        return whole_BTD.to(part_BTD.dtype)\n",
        "test_cost",
        "bytes in the all-reduce, forward: expected [120], got [240]",
    ),
    (
        "the gradient of the second bias averaged over ranks",
        "        # --- end\n\n    def forward(self, x_BTD: Tensor)",
        "        self.b2.register_post_accumulate_grad_hook(self.average)\n\n"
        "    def average(self, b2: Tensor) -> None:\n"
        "        dist.all_reduce(b2.grad)\n"
        "        b2.grad /= dist.get_world_size()\n\n"
        "    def forward(self, x_BTD: Tensor)",
        "test_cost",
        "all-reduces, backward: expected 1, got 2",
    ),
    (
        "the second bias shared with the caller",
        "            nn.Parameter(part.detach().clone()) for part in (w1_hD, b1_h, w2_Dh, b2_D)\n"
        "        )\n",
        "            nn.Parameter(part.detach().clone()) for part in (w1_hD, b1_h, w2_Dh, b2_D)\n"
        "        )\n"
        "        self.b2 = nn.Parameter(b2_D)\n",
        "test_parts",
        "b2 is the caller's tensor itself; make a copy",
    ),
    (
        "Enter sums nothing, and a hook does",
        (
            "        whole_BTD = grad_BTD.clone()\n"
            "        dist.all_reduce(whole_BTD)\n"
            "        return whole_BTD\n",
            "class ParallelMLP(nn.Module):\n",
            "        h_BTh = F.gelu(F.linear(Enter.apply(x_BTD), self.w1, self.b1))\n",
        ),
        (
            "        return grad_BTD\n",
            "def summed(grad: Tensor) -> Tensor:\n"
            "    whole = grad.clone()\n"
            "    dist.all_reduce(whole)\n"
            "    return whole\n\n\n"
            "class ParallelMLP(nn.Module):\n",
            "        x_BTD = Enter.apply(x_BTD)\n"
            "        if x_BTD.requires_grad:\n"
            "            x_BTD.register_hook(summed)\n"
            "        h_BTh = F.gelu(F.linear(x_BTD, self.w1, self.b1))\n",
        ),
        "test_enter_and_leave",
        "rank 0: what Enter returns backward",
    ),
    (
        "the caller's weights themselves where there is one rank",
        "nn.Parameter(part.detach().clone())",
        "nn.Parameter(part.detach().clone() if n > 1 else part.detach())",
        "test_parts",
        "H = 12, rank 0: w1 is the caller's tensor itself; make a copy",
    ),
    (
        "every x kept in a list",
        "        h_BTh = F.gelu(F.linear(Enter.apply(x_BTD), self.w1, self.b1))\n",
        '        self.seen = [*getattr(self, "seen", []), x_BTD]\n'
        "        h_BTh = F.gelu(F.linear(Enter.apply(x_BTD), self.w1, self.b1))\n",
        "test_nothing_of_x_stays",
        "rank 0: x still has memory when the caller is done with it: keep it nowhere",
    ),
    (
        "the last x kept, detached",
        "        h_BTh = F.gelu(F.linear(Enter.apply(x_BTD), self.w1, self.b1))\n",
        "        self.last_x = x_BTD.detach()\n"
        "        h_BTh = F.gelu(F.linear(Enter.apply(x_BTD), self.w1, self.b1))\n",
        "test_nothing_of_x_stays",
        "rank 0: x still has memory when the caller is done with it: keep it nowhere",
    ),
    (
        "contiguous for a copy",
        "nn.Parameter(part.detach().clone()) for part in (w1_hD, b1_h, w2_Dh, b2_D)\n",
        "nn.Parameter(part.detach().contiguous() if part is w2_Dh else part.detach().clone())\n"
        "            for part in (w1_hD, b1_h, w2_Dh, b2_D)\n",
        "test_parts",
        "H = 2, rank 2: w2 is a view, which keeps the whole tensor alive",
    ),
]
