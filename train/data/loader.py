"""Batches on their way to the device: made by the training process itself, or ahead of it by worker processes.

Workers live and die with their parent alone. They ignore the signals that a job gets: these are for the training loop.
"""

import contextlib
import copy
import functools
import itertools
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from rankup import PeerLost, UserError, start_worker

from .order import BatchIndex
from .samples import Samples, tensors, to_device

SHM_FULL = (
    "/dev/shm must hold the batches of all DataLoader workers, got no space left on it. Enlarge it (docker run "
    "--shm-size=1g, shm_size in compose, an emptyDir of medium Memory at /dev/shm), or set --num-workers 0."
)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # they ask the loop to stop
# Python 3.14 starts processes from a server of its own by default: workers would not be our children, and the loop
# below could not tell which of them died.
CONTEXT: Any = multiprocessing.get_context("fork")
# CPython 3.11 can deadlock a child inside os.fork: it waits for a lock of the interpreter that another thread held at
# that moment, and gloo's threads take this lock for an instant after a collective. One of about 1,300 workers hung like
# that on a busy machine. Where a worker lives and has not begun within this time, all are started anew.
START_S = 10.0
STARTS = 5  # of all workers, at most
AHEAD = 2  # batches that each worker prepares ahead
PID, EPOCH, SAMPLE = range(3)  # what each worker says of itself: the last two of its newest batch, EPOCH -1: evaluation


class Loader:
    """The batches of this rank, in order, on the device.

    Where training `uses_workers`, those of a torch DataLoader prepare all batches ahead. A thread waits for them. The
    loop itself only ever waits for a queue, a moment at a time, and so sees a stop request even while a disk is slow.
    """

    def __init__(
        self, samples: Samples, batches: Iterable[BatchIndex], *, evaluation: Samples | None = None,
        device: torch.device, stop: Any, num_workers: int, warn: Callable[[str], None] = print,
    ) -> None:
        """`evaluation`: the samples of batches that have no epoch; None: those are of `samples` too. `stop`: its
        `requested` says whether the loop is to stop.

        Raises PeerLost where workers do not begin.
        """
        self._device, self._stop, self._batches = device, stop, iter(batches)
        self._samples, self._evaluation = samples, evaluation or samples
        self._said: Any = None  # by the workers, see PID
        self._workers: list[Any] = []
        self._closed = threading.Event()
        # One place: the workers hold AHEAD batches each already, and each batch here costs memory too
        self._ready: queue.Queue[Any] = queue.Queue(maxsize=1)
        if uses_workers(samples, num_workers):
            iterator = self._start(num_workers, warn)
            # A daemon: it may wait for a stuck disk when the process wants to end
            threading.Thread(target=self._pull, args=(iterator,), name="wait for workers", daemon=True).start()

    def _start(self, num_workers: int, warn: Callable[[str], None]) -> Iterator[Any]:
        (kept,) = itertools.tee(self._batches, 1)  # a copy begins with the first batch again
        for left in reversed(range(STARTS)):
            self._said = CONTEXT.RawArray("q", 3 * num_workers)
            loader: DataLoader[Any] = DataLoader(
                _Batches(self._samples, self._evaluation, self._said),
                sampler=copy.copy(kept),
                batch_size=None,  # each index is a whole batch already
                num_workers=num_workers, prefetch_factor=AHEAD,
                worker_init_fn=functools.partial(_start_worker, os.getpid(), self._said),
                generator=torch.Generator().manual_seed(0),  # its base seed must not come from the model's random state
                pin_memory=self._device.type == "cuda",
                multiprocessing_context=CONTEXT,
            )
            others = set(multiprocessing.active_children())
            with _signals_held():
                iterator = iter(loader)
            self._workers = [child for child in multiprocessing.active_children() if child not in others]
            if not (hanging := _hanging(self._workers, self._said)):
                break
            for worker in self._workers:
                worker.kill()
            what = f"DataLoader worker {hanging[0]} has not begun {START_S:g} s after its start"
            if not left:
                raise PeerLost(f"{what}, nor has one in the {STARTS - 1} starts before. Is this machine overloaded?")
            warn(f"{what}: all {num_workers} are started anew")
        return iterator

    def next(self, *, until_stop: bool = True) -> Any | None:
        """The next batch on the device, or None if a stop was requested while waiting for it. Without `until_stop` wait
        for it whatever comes.

        Raises StopIteration at the end, UserError for an unreadable sample or a full /dev/shm, PeerLost if a worker
        process died, and what the data set itself raised.
        """
        if not self._workers:
            epoch, indices = next(self._batches)
            samples = self._evaluation if epoch is None else self._samples
            return to_device(samples.batch(indices, epoch), self._device)
        while not (until_stop and self._stop.requested):
            try:
                item = self._ready.get(timeout=0.1)
            except queue.Empty:
                continue
            if isinstance(item, BaseException):
                if isinstance(item, ConnectionError | EOFError):
                    # A dead worker's connection breaks before its exit code can be read, and the code says why it died.
                    dead = multiprocessing.connection.wait([worker.sentinel for worker in self._workers], timeout=5.0)
                    for worker in self._workers:
                        if worker.sentinel in dead:  # it closes its files a moment before it has ended
                            worker.join(5.0)
                raise _explained(item, {worker.pid: worker.exitcode for worker in self._workers}, self._said)
            return to_device(item, self._device)
        return None

    def close(self) -> None:
        """Let the workers end: the thread lets go of the DataLoader's iterator, which ends them. Does not wait."""
        self._closed.set()

    def _pull(self, iterator: Iterator[Any]) -> None:
        """Move batches, and at last the exception that ends them, from the workers to the queue; runs in the thread."""
        item: Any = None
        while not isinstance(item, BaseException) and not self._closed.is_set():
            try:
                item = next(iterator)
            except BaseException as error:
                item = error
            while not self._closed.is_set():
                with contextlib.suppress(queue.Full):
                    self._ready.put(item, timeout=0.5)
                    break


def uses_workers(samples: Samples, num_workers: int) -> bool:
    """Whether workers prepare the batches. Samples in memory are taken by index faster than a worker can send them."""
    return num_workers > 0 and not getattr(samples, "in_memory", False)


class _Batches(Dataset[Any]):
    """Samples of training and of evaluation as a torch Dataset whose items are whole batches."""

    def __init__(self, samples: Samples, evaluation: Samples, said: Any) -> None:
        self.samples, self.evaluation, self.said = samples, evaluation, said

    def __getitem__(self, index: Any) -> Any:
        epoch, indices = index
        samples = self.evaluation if epoch is None else self.samples
        own = 3 * get_worker_info().id  # type: ignore[union-attr]  # there is one in a worker
        self.said[own + EPOCH], self.said[own + SAMPLE] = -1 if epoch is None else epoch, int(indices[0])
        try:
            return _shared(samples.batch(indices, epoch))
        except (UserError, PeerLost) as error:
            return error  # as a value: torch would wrap the one line in the worker's traceback


def _shared(batch: Any) -> Any:
    """Put the tensors of a batch into /dev/shm, where the loop reads them. Raises UserError if it is full.

    torch would do it too, but in a thread that prints the error and goes on: the loop would wait forever.
    """
    for tensor in tensors(batch):
        if tensor.device.type == "cpu" and tensor.layout == torch.strided:
            try:
                tensor.share_memory_()  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                if "shared memory" in str(error):
                    raise UserError(SHM_FULL) from None
                raise
    return batch


def _hanging(workers: Collection[multiprocessing.process.BaseProcess], said: Any) -> list[int]:
    """The numbers of the workers that have not begun within START_S. Empty where one has died: who waits says so."""
    until_s = time.monotonic() + START_S
    while (hanging := [n for n, pid in enumerate(said[PID::3]) if not pid]) and time.monotonic() < until_s:
        if not all(worker.is_alive() for worker in workers):
            return []
        time.sleep(0.01)
    return hanging


def _start_worker(parent: int, said: Any, worker: int) -> None:
    """Runs first in each worker."""
    start_worker(parent)
    torch.set_num_threads(1)  # the workers are the parallelism; more threads would take the loop's cores
    said[3 * worker + PID] = os.getpid()


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Block the stop signals while workers start: until its first line has run, a worker would die of one.

    This also removes the SIGCHLD handler that torch installs. It raises the death of a worker wherever the loop is at
    that moment, even in a save; the thread that waits for the workers notices the death within five seconds anyway.
    """
    on_child = signal.getsignal(signal.SIGCHLD)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGCHLD, on_child or signal.SIG_DFL)


def _explained(error: BaseException, codes: Mapping[int | None, int | None], said: Any) -> BaseException:
    """The error to raise for one that the DataLoader raised. `codes`: of its workers by process, None: alive."""
    text = str(error)
    if -signal.SIGBUS in codes.values():
        return UserError(SHM_FULL)
    # "Caught ..." is what the user's code raised in a worker that lives. Without it, a broken connection means that the
    # worker died while it was handing over a batch.
    cut_off = isinstance(error, ConnectionError | EOFError) and not text.startswith("Caught ")
    if "exited unexpectedly" not in text and not cut_off:
        return error
    # A worker that has not begun has no number yet
    dead = [
        f"worker {number} (exit code {codes[pid]}) at the {'evaluation' if epoch < 0 else 'training'} batch that "
        f"begins with sample {sample}"
        for number, (pid, epoch, sample) in enumerate(zip(said[PID::3], said[EPOCH::3], said[SAMPLE::3], strict=True))
        if codes.get(pid)
    ]
    who = ", ".join(dead) or (text.splitlines() or [type(error).__name__])[0]
    if -signal.SIGKILL in codes.values():
        return PeerLost(
            f"a DataLoader worker was killed, most likely because memory ran out: {who}. Allow more, or set fewer "
            "--num-workers, or a smaller --batch-size"
        )
    return PeerLost(f"a DataLoader worker died: {who}")
