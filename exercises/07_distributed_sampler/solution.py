"""A sampler for many ranks: none lost, padded fairly.

Task: exercises/07_distributed_sampler/README.md.
"""

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class FairSampler(Sampler[int]):
    """One rank's share of a dataset, for DataLoader(dataset, sampler=...).

    length: samples in the dataset, any number, also fewer than ranks
    n, rank: as dist.get_world_size() and dist.get_rank() give them
    shuffle, seed: another order each epoch, the same on all ranks and for any number of them, from
        (seed, epoch) alone; seed may be 0
    drop_last: leave out the last length % n samples of the order; nothing is padded then

    The order is the dataset's, or shuffled. Behind it stands the padding: samples of the dataset
    once more, until n divides the number. Then the order is dealt like cards: rank r gets places
    r, r + n, r + 2n, and so on. The same number for each rank, or one would wait for the others.

    Fair: without drop_last, within an epoch and in sum over epochs 0 to any other, no sample comes
    more than once more often than another.
    """

    def __init__(
        self,
        length: int,
        n: int,
        rank: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.length, self.n, self.rank = length, n, rank
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called before each epoch on every rank; after a restart with the epoch to go on from."""
        self.epoch = epoch

    def __len__(self) -> int:
        """How many samples this rank gets in an epoch: 3 of 7 on 3 ranks, 2 with drop_last."""
        # --- yours
        return self.length // self.n if self.drop_last else -(-self.length // self.n)
        # --- end

    def __iter__(self) -> Iterator[int]:
        """This rank's samples, in this epoch's order.

        7 samples on 3 ranks, not shuffled: in epoch 0 the order could be 0 1 2 3 4 5 6, padded by
        0 1, so rank 0 gets 0 3 6, rank 1 gets 1 4 0, rank 2 gets 2 5 1. Epoch 1 pads by others.

        No communication. What else the program draws at random, by torch, Python or NumPy, stays
        the same.
        """
        # --- yours
        order = list(range(self.length))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.length, generator=generator).tolist()
        total = len(self) * self.n
        padding = max(0, total - self.length)
        first = self.epoch * padding  # the repeats go round the dataset, epoch after epoch
        order += [i % self.length for i in range(first, first + padding)]
        return iter(order[self.rank : total : self.n])
        # --- end
