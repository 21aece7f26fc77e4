"""Samples as torch's DataLoader loads them: the training's in micro-batches, an evaluation's in batches."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from .samples import Samples


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
