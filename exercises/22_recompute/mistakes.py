"""Known mistakes: name, passage of solution.py, what replaces it, check, what that check says."""

MISTAKES = [
    (
        "other random numbers in backward",
        "            torch.set_rng_state(ctx.state)\n",
        "",
        "test_gradients",
        "gradient of 0.up.weight: element",
    ),
    (
        "the state taken after forward",
        (
            "        ctx.state = torch.get_rng_state()\n",
            "        return module(*inputs)\n        # --- end",
        ),
        (
            "",
            "        y = module(*inputs)\n"
            "        ctx.state = torch.get_rng_state()\n"
            "        return y\n        # --- end",
        ),
        "test_gradients",
        "gradient of 0.up.weight: element",
    ),
    (
        "a seed of its own",
        (
            "        ctx.state = torch.get_rng_state()\n",
            "            torch.set_rng_state(ctx.state)\n",
        ),
        ("        torch.manual_seed(0)\n", "            torch.manual_seed(0)\n"),
        "test_gradients",
        "output 0: element",
    ),
    (
        "no graph in backward",
        "torch.random.fork_rng(devices=[]), torch.enable_grad()",
        "torch.random.fork_rng(devices=[])",
        "test_gradients",
        "RuntimeError: element 0 of tensors does not require grad",
    ),
    (
        "nothing requires a gradient",
        "torch.empty(0, requires_grad=True)",
        "torch.empty(0)",
        "test_gradients",
        "RuntimeError: element 0 of tensors does not require grad",
    ),
    (
        "gradients of the inputs alone",
        (
            "        torch.autograd.backward(y, dy)\n",
            '        return None, None, *[getattr(x, "grad", None) for x in inputs]\n',
        ),
        (
            "        wanted = [x for x in inputs if torch.is_tensor(x) and x.requires_grad]\n"
            "        found = iter(torch.autograd.grad(y, wanted, dy))\n",
            "        return None, None, *["
            "next(found) if any(x is w for w in wanted) else None for x in inputs]\n",
        ),
        "test_gradients",
        "gradient of 0.up.weight: expected a tensor, got None",
    ),
    (
        "the gradient of the first input alone",
        '*[getattr(x, "grad", None) for x in inputs]',
        "inputs[0].grad, *[None] * (len(inputs) - 1)",
        "test_gradients",
        "gradient of shift: expected a tensor, got None",
    ),
    (
        "the parameters are asked of the module",
        "        torch.autograd.backward(y, dy)\n",
        "        for p in ctx.module.parameters():\n"
        "            p.requires_grad_()\n"
        "        torch.autograd.backward(y, dy)\n",
        "test_gradients",
        "AttributeError: 'function' object has no attribute 'parameters'",
    ),
    (
        "every tensor is to have a gradient",
        "tensor.detach().requires_grad_(tensor.requires_grad)",
        "tensor.detach().requires_grad_()",
        "test_gradients",
        "RuntimeError: only Tensors of floating point dtype can require gradients",
    ),
    (
        "in training mode, whatever it was in",
        "            torch.set_rng_state(ctx.state)\n",
        "            torch.set_rng_state(ctx.state)\n"
        "            if isinstance(ctx.module, torch.nn.Module):\n"
        "                ctx.module.train()\n",
        "test_gradients",
        "backward has changed a module's mode: compute it in the one that it has",
    ),
    (
        "the gradient of the sum, whatever came",
        "torch.autograd.backward(y, dy)",
        "torch.autograd.backward(y, torch.ones_like(y))",
        "test_gradients",
        "gradient of 0.up.weight: element",
    ),
    (
        "torch.utils.checkpoint",
        "    anchor = torch.empty(0, requires_grad=True)\n"
        "    return Recompute.apply(module, anchor, *inputs)\n",
        "    return torch.utils.checkpoint.checkpoint(module, *inputs, use_reentrant=False)\n",
        "test_gradients",
        "the answer uses checkpoint",
    ),
    (
        "no recomputation at all",
        "    anchor = torch.empty(0, requires_grad=True)\n"
        "    return Recompute.apply(module, anchor, *inputs)\n",
        "    return module(*inputs)\n",
        "test_calls",
        "of these, calls that build a graph: expected 0, got 4",
    ),
    (
        "the generator left where recomputation ends",
        "torch.random.fork_rng(devices=[]), torch.enable_grad()",
        "torch.enable_grad()",
        "test_random_numbers",
        "random numbers after backward 0: element",
    ),
    (
        "a graph in forward, too",
        "        return module(*inputs)\n        # --- end",
        "        with torch.enable_grad():\n"
        "            return module(*inputs).detach()\n        # --- end",
        "test_calls",
        "of these, calls that build a graph: expected 0, got 4",
    ),
    (
        "computed twice in backward",
        "            y = ctx.module(*inputs)\n",
        "            ctx.module(*inputs)\n"
        "            torch.set_rng_state(ctx.state)\n"
        "            y = ctx.module(*inputs)\n",
        "test_calls",
        "calls of the blocks in backward: expected 4, got 8",
    ),
    (
        "the output saved as well",
        (
            "        ctx.save_for_backward(*[inputs[i] for i in ctx.places])\n"
            "        return module(*inputs)\n",
            "zip(ctx.places, ctx.saved_tensors, strict=True)",
        ),
        (
            "        y = module(*inputs)\n"
            "        ctx.save_for_backward(*[inputs[i] for i in ctx.places], y)\n"
            "        return y\n",
            "zip(ctx.places, ctx.saved_tensors, strict=False)",
        ),
        "test_saved",
        "elements are saved for backward; the inputs are 126",
    ),
    (
        "the output kept in ctx",
        "        return module(*inputs)\n        # --- end",
        "        ctx.y = module(*inputs)\n        return ctx.y\n        # --- end",
        "test_saved",
        "the output lives on when the caller holds it no more: keep it nowhere",
    ),
    (
        "inputs kept in ctx",
        (
            "ctx.save_for_backward(*[inputs[i] for i in ctx.places])",
            "zip(ctx.places, ctx.saved_tensors, strict=True)",
        ),
        (
            "ctx.tensors = [inputs[i] for i in ctx.places]",
            "zip(ctx.places, ctx.tensors, strict=True)",
        ),
        "test_written_into",
        "ctx.save_for_backward would have noticed",
    ),
    (
        "a mask kept in ctx",
        (
            "[None if torch.is_tensor(x) else x for x in inputs]",
            "[i for i, x in enumerate(inputs) if torch.is_tensor(x)]",
        ),
        (
            "list(inputs)",
            "[i for i, x in enumerate(inputs) if torch.is_tensor(x) and x.is_floating_point()]",
        ),
        "test_written_into",
        "mask was overwritten between forward and backward",
    ),
    (
        "gradients by tensor, of which one may come twice",
        (
            "        inputs = list(ctx.inputs)\n",
            "            inputs[i] = tensor.detach().requires_grad_(tensor.requires_grad)\n",
        ),
        (
            "        inputs = list(ctx.inputs)\n        kept = {}\n",
            "            if id(tensor) not in kept:\n"
            "                kept[id(tensor)] = tensor.detach()\n"
            "                kept[id(tensor)].requires_grad_(tensor.requires_grad)\n"
            "            inputs[i] = kept[id(tensor)]\n",
        ),
        "test_inputs",
        "one tensor twice: gradient of a: element",
    ),
    (
        "torch's CheckpointFunction",
        "    return Recompute.apply(module, anchor, *inputs)\n",
        "    from torch.utils.checkpoint import CheckpointFunction\n\n"
        "    return CheckpointFunction.apply(lambda _, *x: module(*x), True, anchor, *inputs)\n",
        "test_gradients",
        "the answer uses check_backward_validity, which it is to do without",
    ),
    (
        "backward only once",
        "        torch.autograd.backward(y, dy)\n",
        "        torch.autograd.backward(y, dy)\n        del ctx.state\n",
        "test_inputs",
        "AttributeError",
    ),
    (
        "gradients for floats alone, and none for complex numbers",
        "requires_grad_(tensor.requires_grad)",
        "requires_grad_(tensor.requires_grad and tensor.is_floating_point())",
        "test_inputs",
        "complex numbers: gradient of a: expected a tensor, got None",
    ),
]
