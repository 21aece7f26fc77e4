"""Which samples each rank sees at each step. The order depends on the seed and the epoch alone."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rankup.seeds import derive_seed

# The epoch (None: evaluation, no augmentation) and the sample numbers of a batch, int64 [B].
BatchIndex = tuple[int | None, torch.Tensor]


def divide(count: int, num_parts: int) -> list[int]:
    """`count` in whole parts that differ by one at most, the larger ones first."""
    size, more = divmod(count, num_parts)
    return [size + (number < more) for number in range(num_parts)]


@dataclass(frozen=True, slots=True)
class Order:
    """Each rank takes its part of every global batch of `batch_size` samples, in `accumulate` micro-batches.

    Parts that cannot be equal differ by one sample; `check_world_size` has refused empty ones. An epoch's last partial
    batch is left out.
    """

    num_samples: int
    batch_size: int
    seed: int
    rank: int = 0
    world_size: int = 1
    accumulate: int = 1
    lengths: torch.Tensor | None = None  # int64 [num_samples]: samples of similar length shall share a batch ...
    pool: int = 0  # ... chosen from this many global batches; 0: lengths are ignored

    @property
    def steps_per_epoch(self) -> int:
        return self.num_samples // self.batch_size

    @property
    def samples_by_rank(self) -> list[int]:
        """How many samples of a global batch each rank takes."""
        return divide(self.batch_size, self.world_size)

    @property
    def load_by_rank(self) -> list[float]:
        """How much more than its exact part each rank takes, since samples are whole: 22 of 21.33 is 1.03."""
        return [samples * self.world_size / self.batch_size for samples in self.samples_by_rank]

    @property
    def micro_sizes(self) -> list[int]:
        """The samples of each of this rank's micro-batches in a step, the largest first."""
        return divide(self.samples_by_rank[self.rank], self.accumulate)

    @property
    def divisors(self) -> list[float]:
        """By what the mean loss over each of this rank's micro-batches is divided, so that each sample counts once.

        A rank adds up its micro-batches, and the exchange of gradients takes the mean over ranks. So a mean over n of
        N samples has to count n * world_size / N times. Equal micro-batches give exactly `accumulate`.
        """
        return [self.batch_size / (self.world_size * size) for size in self.micro_sizes]

    def epoch(self, epoch: int) -> torch.Tensor:
        """All sample numbers in the order of that epoch, int64 [num_samples]."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
        order = torch.randperm(self.num_samples, generator=generator)
        if self.lengths is None or self.pool == 0:
            return order
        # The tail that is left out stays a random one. The rest is cut into pools, each is sorted by length and cut
        # into batches, and the batches are shuffled. Every rank does the same and takes its slice of each batch, so
        # the order is the same for any number of ranks.
        whole = self.steps_per_epoch * self.batch_size
        pools = torch.split(order[:whole], self.pool * self.batch_size)
        sorted_pools = [pool[self.lengths[pool].argsort(stable=True)] for pool in pools]
        batches = torch.cat(sorted_pools).view(-1, self.batch_size)
        shuffled = batches[torch.randperm(len(batches), generator=generator)]
        return torch.cat([shuffled.flatten(), order[whole:]])

    def batches(self, first_step: int, last_step: int) -> Iterator[BatchIndex]:
        """This rank's micro-batches of the steps first_step .. last_step-1, `accumulate` a step."""
        order, known = torch.empty(0, dtype=torch.int64), -1
        sizes, before = self.micro_sizes, sum(self.samples_by_rank[: self.rank])
        for step in range(first_step, last_step):
            epoch, position = divmod(step, self.steps_per_epoch)
            if epoch != known:
                order, known = self.epoch(epoch), epoch
            start = position * self.batch_size + before
            for size in sizes:
                yield epoch, order[start : start + size]
                start += size


def evaluation_batches(
    num_samples: int, batch_size: int, rank: int, world_size: int
) -> Iterator[tuple[int, BatchIndex]]:
    """(number of the batch, its BatchIndex) of this rank's evaluation batches, the last one partial.

    The batches are the same for every world size, and the ranks take them in turn. So each sample counts once, and
    sums over batches can be added in the same order on any number of ranks.
    """
    for number in range(rank, num_batches(num_samples, batch_size), world_size):
        stop = min((number + 1) * batch_size, num_samples)
        yield number, (None, torch.arange(number * batch_size, stop))


def num_batches(num_samples: int, batch_size: int) -> int:
    """How many batches hold the samples, a partial one included."""
    return -(-num_samples // batch_size)
