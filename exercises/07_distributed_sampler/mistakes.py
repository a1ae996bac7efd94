"""Known mistakes: name, passage of solution.py, what replaces it, check that refuses it, what that
check says."""

MISTAKES = [
    (
        "the order asked of rank 0",
        (
            "import torch\n",
            "            generator = torch.Generator().manual_seed(self.seed + self.epoch)\n"
            "            order = torch.randperm(self.length, generator=generator).tolist()\n",
        ),
        (
            "import torch\nimport torch.distributed as dist\n",
            "            drawn = torch.randperm(self.length)\n"
            "            dist.broadcast(drawn, 0)\n"
            "            order = drawn.tolist()\n",
        ),
        "test_each_epoch",
        "the answer calls broadcast; nothing is to be sent here",
    ),
    (
        "epochs counted by the sampler itself",
        (
            "        self.epoch = 0\n",
            "            generator = torch.Generator().manual_seed(self.seed + self.epoch)\n",
        ),
        (
            "        self.epoch = 0\n        self.calls = 0\n",
            "            self.calls += 1\n"
            "            generator = torch.Generator().manual_seed(self.seed + self.calls)\n",
        ),
        "test_orders",
        "has another order in epoch 5 again",
    ),
    (
        "the length of the whole dataset",
        (
            "return self.length // self.n if self.drop_last else -(-self.length // self.n)",
            "total = len(self) * self.n",
        ),
        ("return self.length", "total = -(-self.length // self.n) * self.n"),
        "test_each_epoch",
        "length 13, in order, epoch 0: it yields 5 samples, but len(sampler) is 13",
    ),
    (
        "dealt in blocks",
        "order[self.rank : total : self.n]",
        "order[self.rank * len(self) : (self.rank + 1) * len(self)]",
        "test_places",
        "the order put together again: expected [0, 1, 2,",
    ),
    (
        "no padding",
        (
            "return self.length // self.n if self.drop_last else -(-self.length // self.n)",
            "        order += [i % self.length for i in range(first, first + padding)]\n",
            "order[self.rank : total : self.n]",
        ),
        (
            "return len(range(self.rank, self.length, self.n))",
            "",
            "order[self.rank :: self.n]",
        ),
        "test_each_epoch",
        "length 13, in order, epoch 0: ranks get [5, 4, 4] samples: one with more waits for",
    ),
    (
        "every rank draws an order of its own",
        "manual_seed(self.seed + self.epoch)",
        "manual_seed(self.seed + self.epoch + self.rank)",
        "test_each_epoch",
        "length 13, shuffled, epoch 0: no rank gets sample",
    ),
    (
        "the epoch forgotten",
        "manual_seed(self.seed + self.epoch)",
        "manual_seed(self.seed)",
        "test_orders",
        "has the same order in epochs 0 and 1: does epoch count?",
    ),
    (
        "the seed forgotten",
        "manual_seed(self.seed + self.epoch)",
        "manual_seed(self.epoch)",
        "test_orders",
        "rank 0 has the same order with seed 1 and with seed 8: does seed count?",
    ),
    (
        "inherited from the library's",
        (
            "from torch.utils.data import Sampler\n",
            "class FairSampler(Sampler[int]):",
            "        self.epoch = 0\n",
            "        order = list(range(self.length))\n",
        ),
        (
            "from torch.utils.data import DistributedSampler\n",
            "class FairSampler(DistributedSampler):",
            "        self.epoch = 0\n"
            "        self.dataset = range(length)\n"
            "        self.num_replicas = n\n"
            "        self.num_samples = len(self)\n"
            "        self.total_size = len(self) * n\n",
            "        return super().__iter__()\n        order = list(range(self.length))\n",
        ),
        "test_each_epoch",
        "the answer is a DistributedSampler, which it is to do without",
    ),
    (
        "the tail left out",
        "return self.length // self.n if self.drop_last else -(-self.length // self.n)",
        "return self.length // self.n",
        "test_each_epoch",
        "length 13, in order, epoch 0: samples on each rank: expected 5, got 4",
    ),
    (
        "too little padding for a short dataset",
        "        order += [i % self.length for i in range(first, first + padding)]\n",
        "        first %= max(1, self.length)\n"
        "        order += (order[first:] + order[:first])[:padding]\n",
        "test_each_epoch",
        "length 1, in order, epoch 0: it yields 0 samples, but len(sampler) is 1",
    ),
    (
        "padded though it is to drop",
        "return self.length // self.n if self.drop_last else -(-self.length // self.n)",
        "return -(-self.length // self.n)",
        "test_drop_last",
        "length 13, in order, epoch 0: samples on rank 0: expected 4, got 5",
    ),
    (
        "the dataset's last samples dropped before it is shuffled",
        "torch.randperm(self.length, generator=generator)",
        "torch.randperm(\n"
        "                self.length - self.length % self.n * self.drop_last, generator=generator\n"
        "            )",
        "test_drop_last",
        "length 13, shuffled, epoch 0: this is not the head of the order without drop_last",
    ),
    (
        "repeats drawn by lot",
        "        order += [i % self.length for i in range(first, first + padding)]\n",
        "        generator = torch.Generator().manual_seed(self.seed + 1000 * self.epoch)\n"
        "        extra = torch.randperm(self.length, generator=generator).tolist()\n"
        "        order += (extra * self.n)[:padding]\n",
        "test_over_epochs",
        "in sum over epochs 0 to",
    ),
    (
        "the head repeated as the library does",
        "        order += [i % self.length for i in range(first, first + padding)]\n",
        "        order += (order * self.n)[:padding]\n",
        "test_over_epochs",
        "in sum over epochs 0 to 1: the same as in epoch 0 are repeated: 0, 1",
    ),
    (
        "only the last sample repeated",
        "        order += [i % self.length for i in range(first, first + padding)]\n",
        "        order += order[-1:] * padding\n",
        "test_each_epoch",
        "the padding is to come from different samples: sample 12 came 3x, sample 0 1x",
    ),
    (
        "the whole program seeded anew",
        (
            "            generator = torch.Generator().manual_seed(self.seed + self.epoch)\n",
            "torch.randperm(self.length, generator=generator)",
        ),
        (
            "            torch.manual_seed(self.seed + self.epoch)\n",
            "torch.randperm(self.length)",
        ),
        "test_orders",
        "torch's global random numbers have moved",
    ),
    (
        "shuffled once, then turned round",
        (
            "manual_seed(self.seed + self.epoch)\n",
            "            order = torch.randperm(self.length, generator=generator).tolist()\n",
        ),
        (
            "manual_seed(self.seed)\n",
            "            order = torch.randperm(self.length, generator=generator).tolist()\n"
            "            turn = self.epoch % max(1, self.length)\n"
            "            order = order[turn:] + order[:turn]\n",
        ),
        "test_orders",
        "epoch 1 is not shuffled anew: 99 of 100 pairs of neighbors are the same as in epoch 0",
    ),
    (
        "shuffled after dealing",
        (
            "        if self.shuffle:\n"
            "            generator = torch.Generator().manual_seed(self.seed + self.epoch)\n"
            "            order = torch.randperm(self.length, generator=generator).tolist()\n",
            "        return iter(order[self.rank : total : self.n])\n",
        ),
        (
            "",
            "        mine = order[self.rank : total : self.n]\n"
            "        if self.shuffle:\n"
            "            generator = torch.Generator().manual_seed(self.seed + self.epoch)\n"
            "            mine = [mine[i] for i in torch.randperm(len(mine), generator=generator)]\n"
            "        return iter(mine)\n",
        ),
        "test_orders",
        "has the same samples in each epoch: shuffle, then deal",
    ),
    (
        "the dataset turned round instead of shuffled",
        (
            "            generator = torch.Generator().manual_seed(self.seed + self.epoch)\n"
            "            order = torch.randperm(self.length, generator=generator).tolist()\n"
        ),
        (
            "            turn = (self.seed + self.epoch) % max(1, self.length)\n"
            "            order = order[turn:] + order[:turn]\n"
        ),
        "test_orders",
        "epoch 0 is not shuffled anew: 99 of 100 pairs of neighbors are the same as in the dataset",
    ),
    (
        "the library's wrapped",
        (
            "from torch.utils.data import Sampler\n",
            "        order = list(range(self.length))\n",
        ),
        (
            "from torch.utils.data import DistributedSampler, Sampler\n",
            "        theirs = DistributedSampler(\n"
            "            range(self.length), self.n, self.rank, self.shuffle, self.seed, "
            "self.drop_last\n        )\n"
            "        theirs.set_epoch(self.epoch)\n"
            "        return iter(theirs)\n"
            "        order = list(range(self.length))\n",
        ),
        "test_each_epoch",
        "the answer uses DistributedSampler, which it is to do without",
    ),
    (
        "Python's global random numbers seeded and drawn",
        (
            "import torch\n",
            "            generator = torch.Generator().manual_seed(self.seed + self.epoch)\n"
            "            order = torch.randperm(self.length, generator=generator).tolist()\n",
        ),
        (
            "import random\n\nimport torch\n",
            "            random.seed(self.seed + self.epoch)\n            random.shuffle(order)\n",
        ),
        "test_orders",
        "Python's global random numbers have moved: draw from a Generator of your own",
    ),
    (
        "tensors instead of ints",
        "torch.randperm(self.length, generator=generator).tolist()",
        "list(torch.randperm(self.length, generator=generator))",
        "test_each_epoch",
        "length 13, shuffled, epoch 0: it yields tensor(",
    ),
    (
        "a length that iterating sets",
        (
            "return self.length // self.n if self.drop_last else -(-self.length // self.n)\n",
            "        order = list(range(self.length))\n",
        ),
        (
            "return getattr(self, 'share', self.length)\n",
            "        order = list(range(self.length))\n"
            "        self.share = self.length // self.n if self.drop_last "
            "else -(-self.length // self.n)\n",
        ),
        "test_each_epoch",
        "length 13, in order, epoch 0: it yields 5 samples, but len(sampler) is 13",
    ),
    (
        "seed times epoch, so that seed 0 has one order",
        "manual_seed(self.seed + self.epoch)",
        "manual_seed(self.seed * (self.epoch + 1))",
        "test_orders",
        "rank 0 has the same order in epochs 0 and 1 if the seed is 0",
    ),
    (
        "an order that depends on the number of ranks",
        "manual_seed(self.seed + self.epoch)",
        "manual_seed(self.seed + self.epoch + 1000 * self.n)",
        "test_places",
        "2 ranks have another order than 3; only seed and epoch count",
    ),
    (
        "the padding begins anew after ten epochs",
        "first = self.epoch * padding",
        "first = self.epoch % 10 * padding",
        "test_over_epochs",
        "in sum over epochs 0 to 10: sample",
    ),
    (
        "the padding goes on where this sampler stopped",
        "        first = self.epoch * padding",
        "        self.turn = getattr(self, 'turn', -1) + 1\n        first = self.turn * padding",
        "test_over_epochs",
        "in sum over epochs 0 to 1: the same as in epoch 0 are repeated",
    ),
    (
        "the whole program seeded anew until the last sample has come",
        (
            "        order = list(range(self.length))\n",
            "            generator = torch.Generator().manual_seed(self.seed + self.epoch)\n",
            "torch.randperm(self.length, generator=generator)",
            "        return iter(order[self.rank : total : self.n])\n",
        ),
        (
            "        state = torch.get_rng_state()\n        order = list(range(self.length))\n",
            "            torch.manual_seed(self.seed + self.epoch)\n",
            "torch.randperm(self.length)",
            "        yield from order[self.rank : total : self.n]\n"
            "        torch.set_rng_state(state)\n",
        ),
        "test_orders",
        "torch's global random numbers have moved while samples are still to come",
    ),
]
