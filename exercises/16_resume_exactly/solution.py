"""Training that stops after any step, and goes on in another process with the same bits.

Task: exercises/16_resume_exactly/README.md.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn


class Training:
    """Data-parallel training of a small model with dropout.

    data, targets: all samples, on every rank; a rank learns from its share of them
    seed: decides the first weights, the order of the samples, and what is dropped out
    batch: samples of one rank in one step
    """

    def __init__(
        self, data: torch.Tensor, targets: torch.Tensor, seed: int, batch: int = 4
    ) -> None:
        self.data = data
        self.targets = targets
        self.seed = seed
        self.batch = batch
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        torch.manual_seed(seed + 1 + dist.get_rank())  # each rank drops out others
        self.step = 0  # how many steps are done

    def indices(self) -> torch.Tensor:
        """The samples of this rank's next batch, of shape (batch,).

        Epoch e goes through torch.randperm(len(data)), drawn by a generator with seed + e. Of n
        ranks, rank r gets its places r, r + n, r + 2n, ..., in batches. An epoch ends when the
        ranks have no whole batch left; the few samples that remain are left out.

        `step` alone decides, not what was called before. Nobody's random numbers move.
        """
        # --- yours
        n = dist.get_world_size()
        steps_per_epoch = len(self.data) // n // self.batch
        epoch, done = divmod(self.step, steps_per_epoch)
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(len(self.data), generator=generator)
        own = order[dist.get_rank() :: n]
        return own[done * self.batch : (done + 1) * self.batch]
        # --- end

    def train(self, steps: int) -> None:
        """Take so many steps."""
        for _ in range(steps):
            mine = self.indices()
            logits = self.model(self.data[mine])
            loss = nn.functional.cross_entropy(logits, self.targets[mine])
            self.optimizer.zero_grad()
            loss.backward()
            for weight in self.model.parameters():
                dist.all_reduce(weight.grad)
                weight.grad /= dist.get_world_size()
            self.optimizer.step()
            self.step += 1

    def state(self) -> dict:
        """All that this rank needs to go on from here, and `torch.load(weights_only=True)` reads.

        Training that goes on does not change it. No communication.
        """
        # --- yours
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        state |= {"random": torch.get_rng_state(), "step": self.step}
        return copy.deepcopy(state)
        # --- end

    def load(self, state: dict) -> None:
        """Be where `state` was made, whatever this process did before. No communication.

        Training that goes on does not change `state`.
        """
        # --- yours
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        torch.set_rng_state(state["random"])
        self.step = state["step"]
        # --- end
