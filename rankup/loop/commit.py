"""Guards the state of the last finished step: whoever wants to save it may not read while the next step changes it.

Weights and optimizer state change in the optimizer's step alone. Forward and backward passes, in which a rank notices
that it lost a peer, leave them as the last finished step did.
"""

import threading
import time
from collections import deque
from copy import copy
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

# An optimizer's step takes this long at most, on a busy machine and with a large model on a CPU.
CHANGE_S = 10.0
# A GPU that works gets done with what was queued within this time. One that waits for a dead rank never does.
SETTLE_S = 2.0


P = TypeVar("P")  # where the run stands; copied shallowly


@dataclass(slots=True)
class _Queued(Generic[P]):
    """A change in a GPU's queue: events at its beginning and its end, and where the run stands after it."""

    began: torch.Event
    ended: torch.Event | None = None  # until the host has queued all of it. An event that nobody recorded looks done
    progress: P | None = None

    @property
    def done(self) -> bool:
        return self.ended is not None and self.ended.query()


class Changing(Generic[P]):
    """`with changing:` around everything that makes a finished step out of the one before, `progress` included.

    A block that fails never ends the change: what it leaves is the state of no step.
    """

    def __init__(self, progress: P, device: torch.device) -> None:
        self.progress, self.device = progress, device
        self._lock = threading.Lock()
        self._failed = False  # in the middle of a change, which so never ends
        # GPUs only: the host queues work and goes on. It may be steps ahead of a GPU that waits for a dead rank.
        self._queue: deque[_Queued[P]] = deque()
        self._on_host = device.type != "cuda"

    def __enter__(self) -> None:
        self._lock.acquire()
        if not self._on_host:
            self._queue.append(_Queued(self._mark()))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._failed = True
            return
        if not self._on_host:
            self._queue[-1].progress = copy(self.progress)
            self._queue[-1].ended = self._mark()
            # The newest change that the GPU is done with stays: its progress is needed if the next one never ends
            while len(self._queue) > 1 and self._queue[1].done:
                self._queue.popleft()
        self._lock.release()

    def stop(self) -> P | None:
        """Allow no further change, and say where the run stands; None where that can't be known. From any thread."""
        until_s = time.monotonic() + CHANGE_S
        while not (held := self._lock.acquire(timeout=0.05)) and not self._failed and time.monotonic() < until_s:
            pass
        if self._on_host:
            return self.progress if held else None
        # Without the lock too: the thread that has it waits for the GPU, in whose queue nothing of its change has begun
        until_s = time.monotonic() + SETTLE_S
        while time.monotonic() < until_s and not all(change.done for change in self._queue):
            time.sleep(0.01)
        done = [change.progress for change in self._queue if change.done]
        return done[-1] if done and self.unchanged() else None

    def unchanged(self) -> bool:
        """Whether the GPU has begun no change that it is not done with. To be asked again once all is copied."""
        return self._on_host or not any(change.began.query() and not change.done for change in self._queue)

    def _mark(self) -> torch.Event:
        event = torch.Event(self.device)
        event.record()
        return event
