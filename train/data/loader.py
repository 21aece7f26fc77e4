"""Batches on their way to the device: made by the training process itself, or ahead of it by worker processes."""

from collections.abc import Iterable
from typing import Any

import torch

from train.data.batch import to_device
from train.data.order import BatchIndex
from train.data.samples import Samples
from train.data.worker_loader import WorkerLoader
from train.process.stop import StopRequest


class DirectLoader:
    """Makes each batch when it is asked for, in this process."""

    def __init__(self, samples: Samples, batches: Iterable[BatchIndex], *, device: torch.device) -> None:
        self.samples, self.batches, self.device = samples, iter(batches), device

    def next(self) -> Any | None:
        """The next batch on the device. Raises StopIteration at the end, DataError for an unreadable sample."""
        epoch, indices = next(self.batches)
        return to_device(self.samples.batch(indices, epoch), self.device)

    def close(self) -> None:
        """Nothing to end."""


BatchLoader = DirectLoader | WorkerLoader  # the batches of this rank, in order


def open_loader(
    samples: Samples, batches: Iterable[BatchIndex], *, device: torch.device, stop: StopRequest, num_workers: int,
    prefetch_factor: int,
) -> BatchLoader:
    """A loader of these batches of `samples`: with workers where `uses_workers` says so."""
    if not uses_workers(samples, num_workers):
        return DirectLoader(samples, batches, device=device)
    return WorkerLoader(
        samples, batches, device=device, stop=stop, num_workers=num_workers, prefetch_factor=prefetch_factor
    )


def uses_workers(samples: Samples, num_workers: int) -> bool:
    """Whether workers prepare the batches. Samples in memory are taken by index faster than a worker can send them."""
    return num_workers > 0 and not getattr(samples, "in_memory", False)
