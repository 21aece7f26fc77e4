"""A script of the user's as a process of its own: how it starts, what it prints, the signals it gets, how it ends.

It is a fresh `python SCRIPT`, neither a fork of this process nor `runpy` inside it. Libraries read OMP_NUM_THREADS and
others while they are imported; multiprocessing's spawn looks for the main module by its file; signals shall have their
default handlers; and what the kernel kills, or a library aborts, must leave somebody who can say so. The price is the
import of torch at each start, some seconds. No torch here.
"""

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO, Any, TextIO

from train.process.log import Log
from train.process.proc import has_handler

# Run by a bare Python between this process and the script: the kernel kills the script when this process ends. Not
# subprocess's preexec_fn, which runs Python in a fork of a process with threads and may wait for a lock without end.
# SIGUSR1 is ignored until the script has a handler for it: Slurm sends it to every process of a step as a warning, and
# its default is to end the process at once.
BIND = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)\n"
    "signal.signal(signal.SIGUSR1, signal.SIG_IGN)\n"
    "if os.getppid() != int(sys.argv[1]): os._exit(137)\n"
    "os.execv(sys.argv[2], sys.argv[2:])\n"
)
TAIL = 400  # lines that are kept to explain the end
LONGEST = 2000  # characters of such a line
# A progress bar writes a carriage return, and no newline for hours: so often its newest state becomes a line
BAR_S = 10.0
TRACEBACK = re.compile(r"(\[rank\d+\]: )?Traceback \(most recent call last\):")  # torch's own prefix
# The traceback of a script that lost its peer has twenty lines, and says less than the line about the lost rank, which
# comes within a second or two. So long a traceback may wait for the script's end
HOLD_S = 10.0
END_S = 5.0  # how long a script whose peer is lost has to write what it wants to keep
DRAIN_S = 2.0  # processes that the script left behind may hold its output open


class Script:
    """One start of the script, on one rank."""

    def __init__(
        self, words: Sequence[str], *, env: Mapping[str, str], folder: str, own_session: bool, log: Log
    ) -> None:
        """Start it. `words`: of Python's command line. `folder`: where it runs, or "". Main thread only: the kernel
        binds the script to the thread that started it.

        `own_session`: a terminal's Ctrl-C reaches this process alone, which passes it on once, and what the script
        leaves behind is ended here. A supervisor's rank has a session of its own already, and the supervisor ends that.
        """
        command = [sys.executable, *words]
        if sys.platform.startswith("linux"):
            command = [sys.executable, "-ISc", BIND, str(os.getpid()), *command]
        self._leads_session = own_session
        self._process = subprocess.Popen(
            command, env=dict(env), cwd=folder or None, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
            start_new_session=own_session,
        )
        self.pid = self._process.pid
        self.ending = False  # somebody here ends it, so its code says nothing
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        streams = [(self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr)]
        self._output = _Output(streams, log)
        self._output.start()

    @property
    def tail(self) -> str:
        """The last lines that it printed."""
        return "\n".join(self._output.tail)

    def show_held(self) -> None:
        """Print the traceback that was held back: nobody says better how the script ended."""
        self._output.show_held()

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code, 128 and the signal's number where a signal ended it; None if it still runs by then."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        self._kill_rest()
        self._output.join(DRAIN_S)
        return code if code >= 0 else 128 - code

    def send(self, number: int) -> int:
        """Pass a signal on to the script itself; what it has started is the script's business. Returns what was sent:
        SIGTERM in place of a SIGUSR1 that the script has no handler for."""
        # Where nobody knows (no /proc), it is taken to have a handler
        if number == signal.SIGUSR1 and has_handler(self.pid, number) is False:
            number = signal.SIGTERM
        self._process.send_signal(number)
        return number

    def kill(self) -> None:
        """End it at once. `wait` returns its code."""
        self._process.kill()

    def keep(self) -> None:
        """End it: a peer is lost. For `Watchdog.protect`, which calls this from any thread."""
        self.ending = True
        with contextlib.suppress(OSError):
            self._process.terminate()
        until_s = time.monotonic() + END_S
        while self._process.poll() is None and time.monotonic() < until_s:
            time.sleep(0.02)
        self._process.kill()
        self._kill_rest()
        self._output.join(DRAIN_S)

    def _kill_rest(self) -> None:
        """What it has left behind would keep its memory, and its GPU."""
        if self._leads_session:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)


class _Output(threading.Thread):
    """Reads what the script prints: to the rank's file with a time, to the terminal with rank and host.

    A traceback, and what follows it on standard error, is held back from the terminal for HOLD_S.
    """

    def __init__(self, streams: Sequence[tuple[IO[bytes], TextIO]], log: Log) -> None:
        super().__init__(name="output", daemon=True)
        self.log = log
        self.tail: deque[str] = deque(maxlen=TAIL)
        self._streams = [_Stream(pipe, terminal) for pipe, terminal in streams]
        self._held: list[str] = []
        self._held_since_s = 0.0

    def run(self) -> None:
        selector = selectors.DefaultSelector()
        for each in self._streams:
            selector.register(each.pipe, selectors.EVENT_READ, each)
        while selector.get_map():
            if self._held and time.monotonic() - self._held_since_s > HOLD_S:
                self.show_held()
            for key, _ in selector.select(1.0 if self._held else BAR_S):
                stream: _Stream = key.data
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(stream.pipe)
                    stream.pipe.close()
                if data and self.log.world_size == 1:
                    stream.show(data)  # as it is: a bar stays a bar
                self._take(stream.lines(data), stream)

    def _take(self, lines: list[str], stream: "_Stream") -> None:
        if not lines:
            return
        self.tail.extend(line[:LONGEST] for line in lines)
        self.log.debug("\n".join(lines))
        if self.log.world_size == 1:
            return
        if stream is self._streams[1] and (self._held or any(TRACEBACK.match(line) for line in lines)):
            if not self._held:
                self._held_since_s = time.monotonic()
            self._held += lines
        else:
            self.log.show("\n".join(lines), stream.terminal)

    def show_held(self) -> None:
        held, self._held = self._held, []
        self.log.show("\n".join(held), sys.stderr)


class _Stream:
    """Standard output or error of the script, cut into lines."""

    def __init__(self, pipe: IO[bytes], terminal: Any) -> None:
        self.pipe, self.terminal = pipe, terminal
        self._rest = b""
        self._cut_s = time.monotonic()

    def show(self, data: bytes) -> None:
        self.terminal.flush()
        self.terminal.buffer.write(data)
        self.terminal.buffer.flush()

    def lines(self, data: bytes) -> list[str]:
        """The lines that are whole by now; at the end (no data) the rest too. Of a bar only its newest state."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if not data and self._rest:
            whole, self._rest = [*whole, self._rest], b""
        if whole:
            self._cut_s = time.monotonic()
        elif b"\r" in self._rest and time.monotonic() - self._cut_s > BAR_S:
            whole, self._rest = [self._rest], b""
            self._cut_s = time.monotonic()
        states = [line.decode(errors="replace").rstrip("\r").rpartition("\r")[2] for line in whole]
        return [state for state in states if state.strip()]
