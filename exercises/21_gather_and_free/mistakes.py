"""Known mistakes: name, passage of solution.py, what replaces it, check, what that check says."""

MISTAKES = [
    (
        "no zeros at the end",
        (
            "length = -(-len(flat) // n)",
            "torch.cat([flat, flat.new_zeros(n * length - len(flat))])",
        ),
        ("length = len(flat) // n", "flat[: n * length]"),
        "test_shares",
        "elements of its share of what is trained: expected",
    ),
    (
        "every n-th element",
        "padded[dist.get_rank() * length : (dist.get_rank() + 1) * length]",
        "padded[dist.get_rank() :: n]",
        "test_shares",
        "rank 0, unit 0: share of what is trained: element",
    ),
    (
        "the trained share is a view, which keeps the whole unit alive",
        "share = my_share(torch.cat([nothing, *flat[True]])).clone()",
        "share = my_share(torch.cat([nothing, *flat[True]]))",
        "test_shares",
        "alive: it is a view of the whole unit",
    ),
    (
        "the frozen share is a view, which keeps the whole base alive",
        "self.frozen.append(my_share(torch.cat([nothing, *flat[False]])).clone())",
        "self.frozen.append(my_share(torch.cat([nothing, *flat[False]])))",
        "test_shares",
        "alive: it is a view of the whole unit",
    ),
    (
        "the units keep their parameters",
        "p.data = p.data.new_empty(0)",
        "pass",
        "test_shares",
        "rank 0, unit 0: elements still in the unit's own parameters: expected 0",
    ),
    (
        "the last unit is kept, whole, besides the shares",
        "            nothing = p.detach().new_zeros(0)  # in the unit's dtype\n",
        "            nothing = p.detach().new_zeros(0)  # in the unit's dtype\n"
        "            self.last = torch.cat(flat[True] + flat[False])\n",
        "test_shares",
        "elements are held,",
    ),
    (
        "the sum instead of the mean",
        "gradient.flatten() / n",
        "gradient.flatten()",
        "test_training",
        "unit 0, its shares put together: gradients are the sum over ranks",
    ),
    (
        "each rank's own gradient",
        "dist.reduce_scatter_tensor(share, flat)",
        "share.copy_(n * my_share(flat))",
        "test_training",
        "unit 0, its shares put together: element",
    ),
    (
        "what was not used has no gradient",
        "            if gradient is not None:\n"
        "                flat[start : start + shape.numel()] = gradient.flatten() / n\n",
        "            flat[start : start + shape.numel()] = gradient.flatten() / n\n",
        "test_training",
        "AttributeError: 'NoneType' object has no attribute 'flatten'",
    ),
    (
        "places counted only of what was used",
        "            start += shape.numel()\n",
        "                start += shape.numel()\n",
        "test_training",
        "unit 0, its shares put together: element",
    ),
    (
        "no gradient for the input",
        "return None, None, dx, model.scatter",
        "return None, None, None, model.scatter",
        "test_training",
        "unit 0, its shares put together: it has not moved",
    ),
    (
        "the input of the first unit needs no gradient",
        "ctx.saved_tensors[0].detach().requires_grad_()",
        "ctx.saved_tensors[0]",
        "test_training",
        "does not require grad",
    ),
    (
        "frozen columns taken for trained ones",
        "flat[trained][: shape.numel()].view(shape)",
        "flat[True][: shape.numel()].view(shape)",
        "test_training",
        "RuntimeError: ",
    ),
    (
        "no prefetch in forward",
        "        model.gather(k + 1)\n",
        "",
        "test_order",
        "rank 0, forward: after gather 0: expected gather 1, got compute 0",
    ),
    (
        "prefetch after computing",
        "        model.gather(k + 1)\n"
        "        return functional_call(model.units[k], parameters, (x,))\n",
        "        y = functional_call(model.units[k], parameters, (x,))\n"
        "        model.gather(k + 1)\n"
        "        return y\n",
        "test_order",
        "rank 0, forward: after gather 0: expected gather 1, got compute 0",
    ),
    (
        "all gathered at the start",
        "        model.gather(k + 1)\n",
        "        for later in range(k + 1, len(model.units)):\n            model.gather(later)\n",
        "test_order",
        "rank 0, forward: after gather 0, gather 1: expected compute 0, got gather 2",
    ),
    (
        "no prefetch in backward",
        "        model.gather(k - 1)\n",
        "",
        "test_order",
        "rank 0, backward: after gather 5: expected gather 4, got compute 5",
    ),
    (
        "backward prefetches as forward does",
        "model.gather(k - 1)",
        "model.gather(k + 1)",
        "test_order",
        "rank 0, backward: after gather 5: expected gather 4, got compute 5",
    ),
    (
        "trained and frozen gathered one by one",
        (
            "        share = torch.cat([self.trained[k].detach(), self.frozen[k]])\n"
            "        whole = share.new_empty(dist.get_world_size() * len(share))\n"
            "        self.coming[k] = (whole, "
            "dist.all_gather_into_tensor(whole, share, async_op=True))\n",
            "columns = whole.view(dist.get_world_size(), -1)",
        ),
        (
            "        whole = []\n"
            "        for share in (self.trained[k].detach(), self.frozen[k]):\n"
            "            whole.append(share.new_empty(dist.get_world_size(), len(share)))\n"
            "            if len(share) > 0:\n"
            "                work = dist.all_gather_into_tensor("
            "whole[-1].view(-1), share, async_op=True)\n"
            "        self.coming[k] = (whole, work)\n",
            "columns = torch.cat(whole, dim=1)",
        ),
        "test_order",
        "elements, which no unit has",
    ),
    (
        "zeros reduced for what is frozen",
        (
            "share = torch.zeros_like(self.trained[k])",
            "        return share\n        # --- end\n\n\nclass Unit",
        ),
        (
            "share = self.frozen[k].new_zeros(len(self.trained[k]) + len(self.frozen[k]))",
            "        return share[: len(self.trained[k])]\n        # --- end\n\n\nclass Unit",
        ),
        "test_order",
        "expected scatter 1, got scatter 1 with what is frozen",
    ),
    (
        "gathered units kept for backward",
        ("whole, work = self.coming.pop(k)", "if k in self.coming or"),
        ("whole, work = self.coming[k]", "if k in self.coming or"),
        "test_order",
        "rank 0, backward: after nothing: expected gather 5, got compute 5",
    ),
    (
        "whole parameters kept for backward",
        (
            "        parameters = model.whole(k)\n        model.gather(k + 1)\n",
            "        parameters = model.whole(k)\n        model.gather(k - 1)\n",
        ),
        (
            "        ctx.parameters = parameters = model.whole(k)\n        model.gather(k + 1)\n",
            "        parameters = ctx.parameters\n"
            "        model.gather(k - 1)\n"
            "        model.whole(k)\n",
        ),
        "test_memory",
        "elements are alive while unit",
    ),
    (
        "whole parameters saved for backward",
        "        return functional_call(model.units[k], parameters, (x,))\n",
        "        ctx.save_for_backward(x, *parameters.values())\n"
        "        return functional_call(model.units[k], parameters, (x,))\n",
        "test_memory",
        "elements are alive while unit",
    ),
    (
        "the last input is kept in the model",
        "        ctx.save_for_backward(x)\n",
        "        ctx.save_for_backward(x)\n        model.last_input = x\n",
        "test_memory",
        "elements are alive after backward; the shares' gradients are",
    ),
    (
        "a buffer of gradients is kept",
        "        return share\n        # --- end\n\n\nclass Unit",
        "        self.flat = flat\n        return share\n        # --- end\n\n\nclass Unit",
        "test_memory",
        "elements are alive after backward; the shares' gradients are",
    ),
    (
        "a second gather of the same unit",
        (
            "        if k in self.coming or not 0 <= k < len(self.units):\n",
            "        self.gather(k)\n        whole",
        ),
        (
            "        if not 0 <= k < len(self.units):\n",
            "        if k not in self.coming:\n            self.gather(k)\n        whole",
        ),
        "test_waiting",
        "calls of gather, for unit 2 twice, unit -1 and one after the last: expected",
    ),
    (
        "the gather waits",
        "share, async_op=True))\n",
        "share, async_op=True))\n        self.coming[k][1].wait()\n",
        "test_waiting",
        "gather waits for the other ranks: start it, and return at once",
    ),
    (
        "shares of float64, whatever the unit is of",
        "nothing = p.detach().new_zeros(0)",
        "nothing = torch.zeros(0, dtype=torch.float64)",
        "test_shares",
        "its share of what is trained is of torch.float64, and the unit of float32",
    ),
    (
        "the model's input is nobody's output",
        "return None, None, dx, model.scatter",
        "return None, None, dx if k > 0 else None, model.scatter",
        "test_training",
        "rank 0: gradient of the model's input: expected a tensor, got None",
    ),
    (
        "the mean over ranks of the input's gradient, too",
        "return None, None, dx, model.scatter",
        "return None, None, dx / dist.get_world_size() if k == 0 else dx, model.scatter",
        "test_training",
        "rank 0: gradient of the model's input: element",
    ),
]
