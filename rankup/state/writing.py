"""Work beside the training: one piece at a time, in a thread. No torch."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Writing:
    """One piece of work at a time, in a thread or at once, and what the last one failed with."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name, self._timeout_s = name, timeout_s
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._next: Callable[[], object] | None = None
        self.began_s = time.monotonic()
        self.failure: BaseException | None = None

    def start(self, work: Callable[[], object]) -> None:
        """In a thread. Where one is under way, this follows it, in place of another one that waits for that."""
        with self._lock:
            self._next = work
            if self._thread is None:
                self.began_s, self.failure = time.monotonic(), None
                self._thread = threading.Thread(target=self._work_on, name=self._name, daemon=True)
                self._thread.start()

    def run(self, work: Callable[[], T]) -> T | None:
        """At once. Returns None where it fails."""
        self.began_s, self.failure = time.monotonic(), None
        try:
            return work()
        except BaseException as error:  # a fault too: it is raised where the loop sees it
            self.failure = error
            return None

    def _work_on(self) -> None:
        while True:
            with self._lock:
                work, self._next = self._next, None
                if work is None:
                    self._thread = None
                    return
            self.run(work)

    def join(self, timeout_s: float | None = None) -> None:
        if (thread := self._thread) is not None:
            thread.join(timeout_s)

    @property
    def under_way(self) -> bool:
        return self._thread is not None

    @property
    def until_s(self) -> float:
        return self.began_s + self._timeout_s

    @property
    def left_s(self) -> float:
        return max(0.0, self.until_s - time.monotonic())
