"""The stop request: SIGTERM, SIGINT and SIGUSR1 set a flag that the loop looks at; they never interrupt a step.

SIGUSR2 comes the same way, and asks for the stacks of all threads (`rankup.group.stacks`).

No torch: the handlers are installed before torch is imported, so that a container stopped while it starts ends at once
instead of being killed after its grace period. (The kernel ignores SIGTERM for a container's first process unless that
process has a handler.)
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

from rankup.agent.processes import leave
from rankup.errors import STOPPED
from rankup.group import stacks
from rankup.timing import PARTING_S, REPEAT_S

SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1")
STOP_SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
TAKEN = (*SIGNALS, "SIGUSR2")  # which asks for the stacks


class StopRequest:
    """Whether and by which signal this process was asked to stop.

    A thread reads the signals from a wake-up socket, because Python runs its handlers in the main thread only: while
    that one waits inside a collective no handler runs, and a second signal must end the process all the same.

    `signal_name`: the first signal that came, or ""; SIGTERM and SIGINT take the place of SIGUSR1.
    """

    def __init__(self) -> None:
        self.signal_name = ""
        self._log: logging.Logger | None = None
        self._finish_step_first = False
        self._requested_at_s = 0.0  # of the first signal to this process itself
        self._tell_others: Callable[[str], object] = lambda name: None
        self._last_word: Callable[[str], None] = self._say
        self._held = threading.local()

    @property
    def requested(self) -> bool:
        return bool(self.signal_name)

    def fileno(self) -> int:
        """For select: readable once a stop was requested."""
        return self._requested.fileno()

    def install(self) -> "StopRequest":
        """Take over the signals. Main thread only, once a process."""
        # The writing end is kept as an attribute: were it closed, the signals would go nowhere
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._requested, self._tell = socket.socketpair()
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # Without a handler a signal would end the process and never reach the socket
        for name in TAKEN:
            signal.signal(getattr(signal, name), self._pass_on)
        os.register_at_fork(before=self._hold, after_in_parent=self._release, after_in_child=self._begin_fork)
        threading.Thread(target=self._read, name="stop-request", daemon=True).start()
        return self

    def _pass_on(self, number: int, _: object) -> None:
        """The socket has the signal already, unless somebody has put theirs in its place, as asyncio's loops do."""
        ours = self._writer.fileno()
        other = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
        if other != ours:
            self._writer.send(bytes([number]))
            if other != -1:
                with contextlib.suppress(OSError, ValueError):  # it is closed by now
                    signal.set_wakeup_fd(other)

    def _hold(self) -> None:
        # Until it lets go of the socket below, a signal to the new process would count as one to this
        self._held.before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def _release(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._held.before)

    def _begin_fork(self) -> None:
        """What the user's code forks shares no socket with this process, and SIGTERM ends it."""
        signal.set_wakeup_fd(-1)
        for name in TAKEN:
            number = getattr(signal, name)
            if signal.getsignal(number) == self._pass_on:
                signal.signal(number, signal.SIG_DFL if name == "SIGTERM" else lambda *_: None)
        self._release()

    def uninstall(self) -> "StopRequest":
        """Let the signals end the process as they end any other: a command that only reads has nothing to save."""
        if hasattr(self, "_reader"):
            signal.set_wakeup_fd(-1)
            for name in SIGNALS:
                signal.signal(getattr(signal, name), signal.SIG_DFL)
        return self

    def print_through(self, log: logging.Logger) -> None:
        """Print through the log of this rank from now on. Before the rank is known, lines go to stderr."""
        self._log = log

    def finish_step_first(self) -> None:
        """From now on a signal only sets the flag: the caller looks at it, and there is something to save.

        Before that a signal ends the process at once: importing torch, joining and downloading may take minutes, and
        the grace period is too short to wait for any of them.
        """
        self._finish_step_first = True

    def tell_others(self, tell: Callable[[str], object]) -> None:
        """From now on `tell(signal)` when a signal has come to this process itself."""
        self._tell_others = tell

    def report_through(self, last_word: Callable[[str], None] | None) -> None:
        """From now on `last_word(why)` before this process leaves without saving. None: a line is printed."""
        self._last_word = last_word or self._say

    def ask(self, name: str) -> None:
        """Request a stop as that signal does, which may have come to another rank. SIGUSR1 is only a notice."""
        if not self.requested or self.signal_name == "SIGUSR1" != name:
            self.signal_name, self._requested_at_s = name, 0.0
            self._tell.send(b"!")

    def _read(self) -> None:
        # Numbers are looked up once, and only these: SIGCHLD and others pass through the same socket
        names = {int(getattr(signal, name)): name for name in TAKEN}
        while received := self._reader.recv(1):
            name = names.get(received[0])
            if name is None:
                continue
            if name == "SIGUSR2":
                stacks.dump_aside()  # a disk that hangs must not keep this thread from the next signal
                continue
            now_s = time.monotonic()
            self.ask(name)
            if not self._requested_at_s:
                self._requested_at_s = now_s
                if self._finish_step_first:
                    self._tell_others(name)
                else:
                    self._leave(f"{name} before the first step: nothing new to save. The same command starts it again.")
            elif now_s - self._requested_at_s > REPEAT_S:
                waited_s = now_s - self._requested_at_s
                self._leave(f"{name} again, {waited_s:.0f} s after {self.signal_name}: leaving without saving")

    def _leave(self, why: str) -> None:
        leave(STOPPED, lambda: self._last_word(why), timeout_s=PARTING_S)

    def _say(self, why: str) -> None:
        if self._log is not None:
            self._log.info(why)
        else:
            print(why, file=sys.stderr, flush=True)
