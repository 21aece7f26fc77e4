"""The order of the training samples, and samples as torch's DataLoader loads them: the training's in micro-batches, an
evaluation's in batches."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from rankup.seeds import derive_seed

from .samples import Samples


@dataclass(eq=False, slots=True)
class Order:
    """A batch sampler: the global batches of an epoch, whose order depends on the seed and the epoch alone. The last
    partial batch is left out.

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


def load_batches(
    samples: Samples, numbers: Iterable[list[int]], *, accumulate: int = 0, num_workers: int, device: torch.device
) -> DataLoader[Any]:
    """A loader of the batches `numbers`, a batch sampler.

    With `accumulate`, a batch is that many micro-batches of training, with numbers as `Order` gives them: for each the
    batch's size as a multiple of its own, and what `Samples.batch` returned. Samples in memory need no workers: they
    are taken by index faster than a worker can send them.
    """
    workers: dict[str, Any] = {}
    if num_workers and not getattr(samples, "in_memory", False):
        workers = {
            "num_workers": num_workers, "persistent_workers": True, "pin_memory": device.type == "cuda",
            "prefetch_factor": 1 if accumulate > 1 else 2,  # whole steps, so as many samples
            "multiprocessing_context": "fork",  # Python 3.14's default would import everything once more
        }
    return DataLoader(_Batches(samples, accumulate), batch_sampler=numbers, collate_fn=_only_one, **workers)


class _Batches(Dataset[Any]):
    def __init__(self, samples: Samples, accumulate: int) -> None:
        self.samples, self.accumulate = samples, accumulate

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        """One item, the whole batch: to take samples at once is much faster than one by one."""
        indices = torch.tensor(numbers)
        if not self.accumulate:
            return [self.samples.batch(indices, None)]
        epoch = numbers[0] // len(self.samples)
        # The first parts are the larger ones
        parts = (indices - epoch * len(self.samples)).tensor_split(self.accumulate)
        return [[(len(indices) / len(part), self.samples.batch(part, epoch)) for part in parts]]

    def __len__(self) -> int:
        return len(self.samples)


def _only_one(items: list[Any]) -> Any:
    return items[0]
