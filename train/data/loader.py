"""The way of a batch to the device: prepared ahead by worker processes where there are any.

Workers live and die with this process alone: what signals it gets is for the loop to hear, not for them.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import sys
import threading
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from train.data.samples import BatchIndex, Samples
from train.errors import DataError, PeerLost
from train.process.machine_checks import ENLARGE_SHM
from train.process.stop import SIGNALS, StopRequest, die_with_parent

SHM_FULL = (
    f"/dev/shm must hold the batches of all DataLoader workers, got no space left on it. {ENLARGE_SHM}, or set "
    "--num-workers 0."
)


class BatchLoader:
    """The batches of this rank, in order; prepared ahead by worker processes where there are any.

    With workers, a thread waits for them: the loop itself only ever waits for a queue, a moment at a time, and so sees a
    stop request while a disk is slow.
    """

    def __init__(
        self, samples: Samples, keys: Iterable[BatchIndex], *, device: torch.device, stop: StopRequest, num_workers: int,
        prefetch_factor: int,
    ) -> None:
        self.device, self.stop = device, stop
        self._samples, self._keys = samples, iter(keys)
        self._queue: queue.Queue[Any] | None = None
        if uses_workers(samples, num_workers):
            self._start(samples, num_workers, prefetch_factor)

    def next(self) -> Any | None:
        """The next batch on the device, or None if a stop was asked for while waiting. Raises StopIteration at the end,
        DataError for an unreadable sample."""
        if self._queue is None:
            epoch, indices = next(self._keys)
            return to_device(self._samples.batch(indices, epoch), self.device)
        while not self.stop.requested:
            try:
                item = self._queue.get(timeout=0.1)
            except queue.Empty:
                continue
            if isinstance(item, BaseException):
                if isinstance(item, ConnectionError | EOFError):  # a worker's end is felt before it can be seen
                    multiprocessing.connection.wait([worker.sentinel for worker in self._workers], timeout=5.0)
                raise _explained(item, [worker.exitcode for worker in self._workers])
            return to_device(item, self.device)
        return None

    def close(self) -> None:
        self._closed.set() if self._queue is not None else None

    def _start(self, samples: Samples, num_workers: int, prefetch_factor: int) -> None:
        loader: DataLoader[Any] = DataLoader(
            _Batches(samples),
            sampler=self._keys,
            batch_size=None,  # a key is a whole batch already
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            worker_init_fn=_WorkerStart(os.getpid()),
            generator=torch.Generator().manual_seed(0),  # its base seed must not be drawn from the model's random state
            pin_memory=self.device.type == "cuda",
            # Of a server process, which later Pythons start instead, the workers would be the children, not ours
            multiprocessing_context="fork" if sys.platform == "linux" else None,
        )
        others = set(multiprocessing.active_children())
        with _signals_held():
            iterator = iter(loader)
        self._workers = [child for child in multiprocessing.active_children() if child not in others]
        self._queue = queue.Queue(maxsize=1)
        self._closed = threading.Event()
        threading.Thread(target=self._pull, args=(iterator, self._queue), name="feed", daemon=True).start()

    def _pull(self, iterator: Iterator[Any], ready: "queue.Queue[Any]") -> None:
        item: Any = None
        while not isinstance(item, BaseException) and not self._closed.is_set():
            try:
                item = next(iterator)
            except BaseException as error:
                item = error
            while not self._closed.is_set():
                with contextlib.suppress(queue.Full):
                    ready.put(item, timeout=0.5)
                    break


def uses_workers(samples: Samples, num_workers: int) -> bool:
    """Whether workers prepare them: what lies in memory is faster taken by index than sent by a worker."""
    return num_workers > 0 and not getattr(samples, "in_memory", False)


def num_bytes(batch: Any) -> int:
    """What the tensors of a batch take."""
    if isinstance(batch, torch.Tensor):
        return batch.numel() * batch.element_size()
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple | list) else ()
    return sum(num_bytes(part) for part in parts)


def free_shared_memory() -> int:
    """Bytes free in /dev/shm, through which workers send their batches."""
    if not os.path.isdir("/dev/shm"):
        return sys.maxsize
    system = os.statvfs("/dev/shm")
    return system.f_bavail * system.f_frsize


class _Batches(Dataset[Any]):
    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __getitem__(self, key: Any) -> Any:
        epoch, indices = key
        try:
            return _shared(self.samples.batch(indices, epoch))
        except DataError as error:  # as a value: torch would wrap the one line in a traceback of the worker's
            return error


def _shared(batch: Any) -> Any:
    """Put the tensors of a batch where the loop reads them. torch would do it too, in a thread that prints a full /dev/shm
    and goes on: the loop waited for ever. Raises DataError."""
    if isinstance(batch, torch.Tensor) and batch.device.type == "cpu" and batch.layout == torch.strided:
        try:
            batch.share_memory_()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "shared memory" in str(error):
                raise DataError(SHM_FULL) from None
            raise
    for part in batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple | list) else ():
        _shared(part)
    return batch


class _WorkerStart:
    """First thing in a worker: ignore what is meant for the loop, and die with it."""

    def __init__(self, parent: int) -> None:
        self.parent = parent

    def __call__(self, worker: int) -> None:
        for name in SIGNALS:
            if hasattr(signal, name):
                # A batch system signals the whole process group: a worker that died of it took the checkpoint along.
                signal.signal(getattr(signal, name), signal.SIG_IGN)
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _stop_signals())
        die_with_parent(self.parent)
        torch.set_num_threads(1)


def _stop_signals() -> list[signal.Signals]:
    return [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Hold the stop signals back while workers are born: between its birth and its first line a worker would die of one.

    And keep torch from raising the death of a worker out of a signal handler, wherever the loop is at that moment, a save
    included: the thread that waits for the workers finds it within five seconds.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    on_child = signal.getsignal(signal.SIGCHLD)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _stop_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGCHLD, on_child or signal.SIG_DFL)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move all tensors of a batch (tuple, list, dict or tensor); a DataError that a worker sent is raised here."""
    if isinstance(batch, DataError):
        raise batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def _explained(error: BaseException, exit_codes: Collection[int | None]) -> BaseException:
    """What the death of a worker process means."""
    text = str(error)
    if -getattr(signal, "SIGBUS", 0) in exit_codes:
        return DataError(SHM_FULL)
    # torch's own word for it, or the end of the connection through which the worker was just handing over a batch;
    # "Caught ..." is what the user's code raised in a worker that lives
    cut_off = isinstance(error, ConnectionError | EOFError) and not text.startswith("Caught ")
    if "exited unexpectedly" in text or cut_off:
        killed = -getattr(signal, "SIGKILL", 0) in exit_codes
        return PeerLost(
            "a DataLoader worker was killed, most likely for want of memory. Allow more, or set fewer --num-workers, or a "
            "smaller --batch-size" if killed else f"a DataLoader worker died: {(text.splitlines() or [type(error).__name__])[0]}"
        )
    return error
