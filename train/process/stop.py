"""The stop request: SIGTERM, SIGINT and SIGUSR1 set a flag that the loop looks at; they never interrupt a step.

No torch: the handlers stand before torch is imported, so that a container stopped while it starts ends at once
instead of being killed after its grace period (a first process without a handler ignores SIGTERM).
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

from train.errors import STOPPED
from train.process.exit import leave

# torchrun passes each signal on to its workers, who may also get it from their process group: twice within
# milliseconds. Slurm and Kubernetes repeat theirs after longer.
REPEAT_WINDOW_S = 5.0
SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1")  # Windows has no SIGUSR1
# A full pipe or a stuck disk must not keep a process that was told to leave.
FAREWELL_S = 3.0


class StopRequest:
    """Whether and by which signal this process was asked to stop.

    A thread reads the signals from a wake-up socket: a main thread that waits inside a collective runs no Python
    handler, and a second signal must end it all the same.
    """

    def __init__(self) -> None:
        self.signal_name = ""
        self.say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)
        self.before_leaving: Callable[[str], None] = lambda why: None
        self._deferred = False
        self._asked_at_s = 0.0

    @property
    def requested(self) -> bool:
        return bool(self.signal_name)

    def install(self) -> "StopRequest":
        """Take over the three signals. Main thread only, once a process."""
        # The writing end is kept: closed, the signals would go nowhere
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self.install_handlers()
        threading.Thread(target=self._read, name="stop-request", daemon=True).start()
        return self

    def install_handlers(self) -> None:
        """Empty ones: without any, Python would end the process, and would not write to the wake-up socket."""
        for name in SIGNALS:
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), lambda signum, frame: None)

    def finish_step_first(self) -> None:
        """From now on a signal only sets the flag: whoever calls this looks at it, and there is something to save.

        Before that a signal ends the process at once: importing torch, joining and downloading may take minutes, and
        nothing of them is worth a part of the time to stop.
        """
        self._deferred = True

    def _read(self) -> None:
        # Looked up once, and only these: SIGCHLD and others pass through the same socket.
        names = {int(getattr(signal, name)): name for name in SIGNALS if hasattr(signal, name)}
        while received := self._reader.recv(1):
            name = names.get(received[0])
            if name is None:
                continue
            now_s = time.monotonic()
            if not self.requested:
                self.signal_name, self._asked_at_s = name, now_s
                if not self._deferred:
                    self._leave(f"{name} before the first step: nothing new to save. The same command starts it again.")
            elif now_s - self._asked_at_s > REPEAT_WINDOW_S:
                waited_s = now_s - self._asked_at_s
                self._leave(f"{name} again, {waited_s:.0f} s after {self.signal_name}: leaving without saving")

    def _leave(self, why: str) -> None:
        """End this process, after a word to the user and the other ranks."""

        def farewell() -> None:
            self.say(why)
            self.before_leaving(why)

        leave(STOPPED, farewell, timeout_s=FAREWELL_S)


def die_with_parent(expected_parent: int) -> None:
    """Have the kernel kill this process when its parent ends. Linux only; elsewhere a no-op.

    A launcher that dies of SIGKILL can't end its ranks: they trained on, holding their GPUs
    (torch issue 5736; 126 such orphans were counted on one machine).
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != expected_parent:  # it ended before the line above
        leave(128 + signal.SIGKILL)
