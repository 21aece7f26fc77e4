"""Worker processes of DataLoaders. They ignore the signals that a job gets: a batch system signals the whole process
group, and only the loop should answer. Workers end with their parent. If a worker dies, one line says why, and the job
ends."""

import atexit
import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from rankup.agent.processes import die_with_parent, has_handler, leave, start_of
from rankup.errors import PeerLost, UserError
from rankup.group.stop import STOP_SIGNALS, TAKEN

SHM_FULL = (
    "/dev/shm must hold the batches of all DataLoader workers, got no space left on it. Enlarge it (docker run "
    "--shm-size=1g, shm_size in compose, an emptyDir of medium Memory at /dev/shm), or set the number of workers to 0."
)
START_S = 10.0  # for a worker to run its first line
_all: "weakref.WeakSet[Any]" = weakref.WeakSet()


class Workers:
    """An iterator like `iter(loader)`. It starts the workers of a DataLoader, and keeps the loader's settings. Create
    it in the main thread. `keep`: let workers of an earlier pass go on. Otherwise each pass has new ones, also with
    `persistent_workers`: workers that live on remember earlier passes, and a resume could not give them back.

    Raises PeerLost if a worker fails to begin twice. `next` raises UserError if /dev/shm is full, PeerLost if a worker
    died, and whatever the data set raises.
    """

    def __init__(self, loader: Any, *, keep: bool = False) -> None:
        if isinstance(loader, DataLoader) and not keep:
            loader._iterator = None  # ends these workers
        before = {*multiprocessing.active_children()}
        with _prepared(loader) as begun:
            try:
                self._iterator: Iterator[Any] = iter(loader)
            finally:  # also if a sampler raises after the workers have started
                _all.update({*multiprocessing.active_children()} - before)
            self._workers = [*getattr(self._iterator, "_workers", ())]
            new = [worker for worker in self._workers if worker not in before]  # persistent workers began earlier
            # CPython 3.11 can deadlock a child inside os.fork, on a lock that another thread held at that moment
            for worker in _hanging(new):
                worker.kill()
                worker.join()
                vars(worker).update(begun[worker], _popen=None)
                worker.start()
            if hanging := _hanging(new):
                for worker in new:
                    worker.kill()
                raise PeerLost(
                    f"DataLoader worker {new.index(hanging[0])} has not begun {START_S:g} s after its start, twice. Is "
                    "this machine overloaded?"
                )

    def __iter__(self) -> Iterator[Any]:
        return self if self._workers else self._iterator

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except Exception as error:
            if not self._workers:
                raise
            explained = self._explained(error)
            if explained is None and not str(error).startswith("Caught "):
                raise
            # Drop torch's frames, which hold the iterator and its workers. The text has the worker's own traceback
            found = (explained or error).with_traceback(None)
            self._iterator, self._workers = iter(()), []
            raise found from None

    def _explained(self, error: Exception) -> Exception | None:
        """Return the error to raise instead, if the cause is a worker's UserError, its death, or a full /dev/shm."""
        text, kind = str(error), type(error)
        if isinstance(error, UserError | PeerLost):  # torch has put the worker's traceback before the text
            return kind(text.rpartition(f"\n{kind.__module__}.{kind.__qualname__}: ")[2].strip())
        # "Caught ..." marks an error that the data set raised in a living worker. Without that prefix, a broken
        # connection means that the worker died while it handed over a batch
        cut_off = isinstance(error, ConnectionError | EOFError) and not text.startswith("Caught ")
        full = "unable to allocate shared memory" in text
        if not (cut_off or full or "exited unexpectedly" in text):
            return None
        if cut_off:  # the connection breaks a moment before the exit code, which shows the cause, can be read
            dead = multiprocessing.connection.wait([worker.sentinel for worker in self._workers], timeout=5.0)
            for worker in (each for each in self._workers if each.sentinel in dead):
                worker.join(5.0)
        codes = [worker.exitcode for worker in self._workers]
        if full or -signal.SIGBUS in codes:
            return UserError(SHM_FULL)
        ended = [f"worker {number} (exit code {code})" for number, code in enumerate(codes) if code]
        who = ", ".join(ended) or (text.splitlines() or [type(error).__name__])[0]
        memory = ", most likely because memory ran out" if -signal.SIGKILL in codes else ""
        return PeerLost(f"a DataLoader worker died{memory}: {who}")


@atexit.register
def _end_all() -> None:
    """Kill the remaining workers at exit: they ignore the SIGTERM that multiprocessing sends before it waits."""
    # A script that reads a loader without rankup gets torch's handler, which raises an error for each worker that dies
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with contextlib.suppress(AssertionError):  # raised in a fork of the process that has the workers
        for worker in _all:
            if worker.is_alive():
                worker.kill()


def _hanging(workers: list[Any]) -> list[Any]:
    """Return the workers that have not begun within START_S. A rank handles SIGUSR2, and so does each process that it
    forks, until `_begin` has run there."""
    until_s = time.monotonic() + START_S
    while found := [each for each in workers if each.is_alive() and has_handler(each.pid, signal.SIGUSR2)]:
        if time.monotonic() > until_s:
            break
        time.sleep(0.005)
    return found


@contextlib.contextmanager
def _prepared(loader: Any) -> Iterator[dict[BaseProcess, dict[str, Any]]]:
    """Run `_begin` in the workers that a DataLoader starts in this block, unless a subclass's `__iter__` is a generator
    and starts them later. Yields the target and arguments of each started process, which the process itself forgets."""
    before, begun, start = dict[str, Any](), dict[BaseProcess, dict[str, Any]](), BaseProcess.start

    def remember(process: BaseProcess) -> None:
        begun[process] = {name: getattr(process, name) for name in ("_target", "_args", "_kwargs")}
        start(process)

    BaseProcess.start = remember  # type: ignore[assignment, method-assign]
    if isinstance(loader, DataLoader) and loader.num_workers:
        before = {"worker_init_fn": loader.worker_init_fn, "collate_fn": loader.collate_fn}
        loader.worker_init_fn = functools.partial(_begin, loader.worker_init_fn)
        loader.collate_fn = functools.partial(_share, loader.collate_fn)
    # torch's SIGCHLD handler raises an error for a worker's death wherever the loop is, even in a save. It is not
    # needed: a loop that waits for its workers notices the death within five seconds
    on_child = signal.getsignal(signal.SIGCHLD)
    # A stop signal would kill a worker that has not run its first line yet
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield begun
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        BaseProcess.start = start  # type: ignore[method-assign]
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, on_child or signal.SIG_DFL)
        for name, value in before.items():
            setattr(loader, name, value)


def _begin(then: Callable[[int], None] | None, worker: int) -> None:
    """Run first in each worker: ignore stop signals, and end with the parent. `then`: the user's `worker_init_fn`. A
    batch system signals the whole process group, and if workers died of that signal, the loop could not save."""
    for each in TAKEN:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    die_with_parent(os.getppid())  # with Python 3.14's default start method, the parent is a server process
    # The loop may have ended before the line above. `is_alive` can't tell: later workers hold its pipe open
    if (loop := multiprocessing.parent_process()) is None or not start_of(loop.pid or 0):
        leave(128 + signal.SIGKILL)
    if then is not None:
        then(worker)


def _share(collate: Callable[[Any], Any], samples: Any) -> Any:
    """Collate in a worker, and put the batch's tensors into /dev/shm, where the loop reads them.

    torch does this in a thread, which would print the error for a full /dev/shm and go on: the loop would wait forever.
    """
    batch = collate(samples)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.layout == torch.strided:
            leaf.share_memory_()  # type: ignore[no-untyped-call]
    return batch
