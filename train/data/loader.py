"""Batches on their way to the device: made by the training process itself, or ahead of it by worker processes."""

import contextlib
import queue
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from rankup import PeerLost, UserError, Workers

from .order import BatchIndex
from .samples import Samples, to_device

AHEAD = 2  # batches that each worker prepares ahead


class Loader:
    """The batches of this rank, in order, on the device.

    Where training `uses_workers`, those of a torch DataLoader prepare all batches ahead. A thread waits for them. The
    loop itself only ever waits for a queue, a moment at a time, and so sees a stop request even while a disk is slow.
    """

    def __init__(
        self, samples: Samples, batches: Iterable[BatchIndex], *, evaluation: Samples | None = None,
        device: torch.device, stop: Any, num_workers: int,
    ) -> None:
        """`evaluation`: the samples of batches that have no epoch; None: those are of `samples` too. `stop`: its
        `requested` says whether the loop is to stop."""
        self._device, self._stop, self._batches = device, stop, iter(batches)
        self._dataset = _Batches(samples, evaluation or samples)
        self._closed = threading.Event()
        # One place: the workers hold AHEAD batches each already, and each batch here costs memory too
        self._ready: queue.Queue[Any] | None = None
        if uses_workers(samples, num_workers):
            self._ready = queue.Queue(maxsize=1)
            workers = Workers(DataLoader(
                self._dataset, sampler=self._batches, batch_size=None,  # each index is a whole batch already
                num_workers=num_workers, prefetch_factor=AHEAD, pin_memory=device.type == "cuda",
                generator=torch.Generator().manual_seed(0),  # its base seed must not come from the model's random state
                multiprocessing_context="fork",  # Python 3.14's default would import everything once more
            ))
            # A daemon: it may wait for a stuck disk when the process wants to end
            threading.Thread(
                target=self._pull, args=(workers, self._ready), name="wait for workers", daemon=True
            ).start()

    def next(self, *, until_stop: bool = True) -> Any | None:
        """The next batch on the device, or None if a stop was requested while waiting for it. Without `until_stop` wait
        for it whatever comes.

        Raises StopIteration at the end, UserError for an unreadable sample or a full /dev/shm, PeerLost if a worker
        process died, and what the data set itself raised.
        """
        if self._ready is None:
            return to_device(self._dataset.read(next(self._batches)), self._device)
        while not (until_stop and self._stop.requested):
            with contextlib.suppress(queue.Empty):
                item = self._ready.get(timeout=0.1)
                if isinstance(item, BaseException):
                    raise item
                return to_device(item, self._device)
        return None

    def close(self) -> None:
        """Let the workers end: the thread lets go of the DataLoader's iterator, which ends them. Does not wait."""
        self._closed.set()

    def _pull(self, workers: Workers, ready: "queue.Queue[Any]") -> None:
        """Move batches, and at last the exception that ends them, from the workers to the queue; runs in the thread."""
        item: Any = None
        while not isinstance(item, BaseException) and not self._closed.is_set():
            try:
                item = next(workers)
            except BaseException as error:
                item = error
            while not self._closed.is_set():
                with contextlib.suppress(queue.Full):
                    ready.put(item, timeout=0.5)
                    break


def uses_workers(samples: Samples, num_workers: int) -> bool:
    """Whether workers prepare the batches. Samples in memory are taken by index faster than a worker can send them."""
    return num_workers > 0 and not getattr(samples, "in_memory", False)


class _Batches(Dataset[Any]):
    """Samples of training and of evaluation as a torch Dataset whose items are whole batches."""

    def __init__(self, samples: Samples, evaluation: Samples) -> None:
        self.samples, self.evaluation = samples, evaluation

    def read(self, index: BatchIndex) -> Any:
        epoch, indices = index
        return (self.evaluation if epoch is None else self.samples).batch(indices, epoch)

    def __getitem__(self, index: Any) -> Any:
        try:
            return self.read(index)
        except (UserError, PeerLost) as error:
            return error  # as a value: torch would wrap the one line in the worker's traceback
