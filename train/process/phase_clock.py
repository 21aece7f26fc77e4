"""How long this process has been in each phase: where the time of an attempt went. No torch here."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from rankup.agent.processes import start_of


def process_began() -> float:
    """When this process began, in seconds of `time.time()`, to a hundredth of a second on Linux."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return psutil.Process().create_time()
    # psutil adds the same number to the time of the boot, which the kernel tells in whole seconds
    ticks = int(start_of(os.getpid()))
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


class PhaseClock:
    """Adds up seconds by phase. One thread enters phases, any thread may read. Entering takes a microsecond."""

    def __init__(self, phase: str) -> None:
        self._seconds: dict[str, float] = {}
        self._phase, self._since_s = phase, time.monotonic()
        # A reader between two of the assignments below would count the time of one phase twice
        self._lock = threading.Lock()

    def enter(self, phase: str) -> None:
        """End the present phase and begin another one, or the same one anew."""
        now_s = time.monotonic()
        with self._lock:
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now_s - self._since_s
            self._phase, self._since_s = phase, now_s

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """For the length of the block, another phase inside the present one."""
        outer = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(outer)

    def present(self) -> tuple[str, float]:
        """The present phase, and how many seconds ago it was entered."""
        with self._lock:
            return self._phase, time.monotonic() - self._since_s

    def seconds(self) -> dict[str, float]:
        """The seconds so far by phase, the present phase included. They add up to the age of this clock."""
        with self._lock:
            running = {self._phase: self._seconds.get(self._phase, 0.0) + time.monotonic() - self._since_s}
            return self._seconds | running
