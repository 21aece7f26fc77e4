"""Batches on their way to the device: made by the training process itself, or ahead of it by worker processes."""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from rankup.group.stop import StopRequest

from .batch import to_device
from .order import BatchIndex
from .samples import Samples
from .worker_loader import WorkerLoader


class Loader:
    """The batches of this rank, in order. Those of samples for which `uses_workers` says so come from one pool.

    There is a pool only where training uses it: for evaluations alone it would read the order far ahead.
    """

    def __init__(
        self, samples: Samples, batches: Iterable[BatchIndex], *, evaluation: Samples | None = None,
        device: torch.device, stop: StopRequest, num_workers: int, prefetch_factor: int,
        warn: Callable[[str], None] = print,
    ) -> None:
        """`evaluation`: the samples of batches that have no epoch; None: those are of `samples` too.

        Raises PeerLost where workers do not begin.
        """
        self._samples, self._evaluation, self._device = samples, evaluation or samples, device
        self._num_workers = num_workers
        self._batches, ahead = _for_two_threads(batches)
        self._workers = None
        if uses_workers(self._samples, num_workers):
            self._workers = WorkerLoader(
                self._samples, self._evaluation, filter(self._by_workers, ahead), device=device, stop=stop,
                num_workers=num_workers, prefetch_factor=prefetch_factor, warn=warn,
            )

    def next(self, *, until_stop: bool = True) -> Any | None:
        """The next batch on the device, or None if a stop was requested while waiting for it. Without `until_stop` wait
        for it whatever comes.

        Raises StopIteration at the end, DataError for an unreadable sample, and what `WorkerLoader.next` raises.
        """
        index = next(self._batches)
        if self._workers is not None and self._by_workers(index):
            return self._workers.next(until_stop=until_stop)
        epoch, indices = index
        return to_device(self._samples_of(index).batch(indices, epoch), self._device)

    def close(self) -> None:
        """Let the workers end. Does not wait."""
        if self._workers is not None:
            self._workers.close()

    def _by_workers(self, index: BatchIndex) -> bool:
        return uses_workers(self._samples_of(index), self._num_workers)

    def _samples_of(self, index: BatchIndex) -> Samples:
        return self._evaluation if index[0] is None else self._samples


def _for_two_threads(batches: Iterable[BatchIndex]) -> Iterator[Iterator[BatchIndex]]:
    """The same batches twice. Two threads may not take from one `tee` at the same time."""
    lock = threading.Lock()

    def locked(copy: Iterator[BatchIndex]) -> Iterator[BatchIndex]:
        while True:
            with lock:
                index = next(copy, None)
            if index is None:
                return
            yield index

    return map(locked, itertools.tee(batches))


def uses_workers(samples: Samples, num_workers: int) -> bool:
    """Whether workers prepare the batches. Samples in memory are taken by index faster than a worker can send them."""
    return num_workers > 0 and not getattr(samples, "in_memory", False)
