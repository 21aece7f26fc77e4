"""The order of the training samples. It depends on the seed and the epoch alone."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rankup.seeds import derive_seed


@dataclass(eq=False, slots=True)
class Order:
    """A batch sampler: the global batches of an epoch. The last partial batch is left out.

    It gives the number of a sample in the whole run, epoch * num_samples + sample: augmentation depends on both.
    """

    num_samples: int
    batch_size: int
    seed: int
    lengths: torch.Tensor | None = None  # int64 [num_samples]: samples of similar length shall share a batch ...
    pool: int = 0  # ... chosen from this many batches; 0: lengths are ignored
    now: int = 0  # the epoch

    def __len__(self) -> int:
        return self.num_samples // self.batch_size

    def set_epoch(self, epoch: int) -> None:
        self.now = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order, before = self.epoch(self.now), self.now * self.num_samples
        for begin in range(0, len(self) * self.batch_size, self.batch_size):
            yield (order[begin : begin + self.batch_size] + before).tolist()

    def epoch(self, epoch: int) -> torch.Tensor:
        """All samples in the order of that epoch, int64 [num_samples]."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
        order = torch.randperm(self.num_samples, generator=generator)
        if self.lengths is None or self.pool == 0:
            return order
        # The tail that is left out stays a random one. The rest is cut into pools, each is sorted by length and cut
        # into batches, and the batches are shuffled.
        whole = len(self) * self.batch_size
        pools = torch.split(order[:whole], self.pool * self.batch_size)
        sorted_pools = [pool[self.lengths[pool].argsort(stable=True)] for pool in pools]
        batches = torch.cat(sorted_pools).view(-1, self.batch_size)
        shuffled = batches[torch.randperm(len(batches), generator=generator)]
        return torch.cat([shuffled.flatten(), order[whole:]])
