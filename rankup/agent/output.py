"""What a rank prints that comes through pipes, as a fresh rank's does: to its file with a time, to the terminal with
host and rank. No torch here.
"""

import asyncio
import contextlib
import json
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from rankup.agent.logs import WAIT_S, Output, file_head, headed, line_head, show

TAIL = 400  # lines that are kept to explain the end of a rank
LONGEST = 2000  # characters of such a line
READ = 1 << 16  # bytes that one turn of the event loop takes from a pipe; a line without an end is cut there too
# A progress bar writes a carriage return, and no newline for hours: so often its newest state becomes a line
BAR_S = 10.0
TRACEBACK = re.compile(r"(\[rank\d+\]: )?Traceback \(most recent call last\):")  # torch's own prefix
# The traceback of a rank that lost its peer has twenty lines, and says less than the line about the lost rank, which
# comes within a second or two. So long a traceback may wait for the rank's end
HOLD_S = 10.0
# The last line of a traceback, or what argparse says of a wrong argument
EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning|Failure)\b|\S+: error: ")


async def aside(work: Callable[[], object]) -> None:
    """Do `work` in a thread of its own: while a disk hangs, the event loop goes on, and so may the end of this process.

    What it raises is lost.
    """
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def run() -> None:
        with contextlib.suppress(Exception):
            work()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(done.set)

    try:
        threading.Thread(target=run, name="output", daemon=True).start()
    except RuntimeError:  # no more threads
        run()
    await done.wait()


class Pump:
    """Reads what a rank prints: to its file with a time, to the terminal with rank and host.

    A rank that prints faster than the terminal and the disk take it waits at its full pipe. A traceback, and what
    follows it on standard error, is held back from the terminal for HOLD_S.
    """

    def __init__(
        self, stdout: int, stderr: int, *, rank: int, world_size: int, host: str = "", file: Output | None = None
    ) -> None:
        """Begin to read, in the running event loop. `stdout`, `stderr`: the reading ends of the pipes, closed here."""
        self._tail: deque[str] = deque(maxlen=TAIL)
        self._alone, self._file = world_size == 1, file
        self._terminal_head, self._file_head = line_head(rank, world_size, host), file_head(rank, host)
        self._outbox: list[Callable[[], object]] = []  # what is to be written, in this order
        self._writing = asyncio.Lock()
        self._held: list[str] = []
        self._hold: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        for number, name in ((stdout, "stdout"), (stderr, "stderr")):
            self._begin(self._read(_Stream(number), name))

    @property
    def tail(self) -> str:
        """The last lines that it printed."""
        return "\n".join(self._tail)

    def note(self, text: str) -> None:
        """Write lines of the agent's about this rank into its file alone."""
        self._keep(text.splitlines())
        self._begin(self._write())

    async def show_held(self) -> None:
        """Print the traceback that is held back: nobody says better how the rank ended."""
        self._print(self.drop_held(), "stderr")
        await asyncio.wait([self._begin(self._write())], timeout=WAIT_S)

    def drop_held(self) -> list[str]:
        """Leave it to the rank's file. Returns its lines."""
        if self._hold is not None:
            self._hold.cancel()
        held, self._held, self._hold = self._held, [], None
        return held

    async def drained(self, timeout_s: float) -> bool:
        """Wait until all that the rank printed is written; False where processes that it left behind hold its output
        open, or a disk hangs."""
        return not self._tasks or not (await asyncio.wait(self._tasks, timeout=timeout_s))[1]

    def _begin(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)  # the event loop itself holds none
        task.add_done_callback(self._tasks.discard)
        return task

    async def _read(self, stream: "_Stream", name: str) -> None:
        data = b"-"
        while data:
            data = await stream.read()
            self._take(data, stream.lines(data), name)
            await self._write()
        os.close(stream.number)

    def _take(self, data: bytes, lines: list[str], name: str) -> None:
        self._tail.extend(line[:LONGEST] for line in lines[-TAIL:])
        self._keep(lines)
        if self._alone:
            self._outbox.append(lambda: _pass_on(data, getattr(sys, name)))  # as it is: a bar stays a bar
        elif name == "stderr" and (self._held or any(map(TRACEBACK.match, lines))):
            self._held += lines
            if len(self._held) > TAIL:
                self._print(self.drop_held(), name)
            elif self._hold is None:
                loop = asyncio.get_running_loop()
                self._hold = loop.call_later(HOLD_S, lambda: self._begin(self.show_held()))
        else:
            self._print(lines, name)

    def _keep(self, lines: list[str]) -> None:
        if lines and (file := self._file) is not None:
            text = headed(self._file_head, lines).encode(errors="backslashreplace")
            self._outbox.append(lambda: file.write(text))

    def _print(self, lines: list[str], name: str) -> None:
        if lines:
            self._outbox.append(lambda: show(headed(self._terminal_head, lines), getattr(sys, name)))

    async def _write(self) -> None:
        async with self._writing:
            todo, self._outbox = self._outbox, []
            if todo:
                await aside(lambda: [write() for write in todo])


def _pass_on(data: bytes, stream: Any) -> None:
    with contextlib.suppress(OSError, ValueError):
        stream.flush()
        stream.buffer.write(data)
        stream.buffer.flush()


class _Stream:
    """Standard output or error of a rank, cut into lines."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._rest = b""
        self._cut_s = time.monotonic()

    async def read(self) -> bytes:
        """What is there, or b"" at the end."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.number, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self.number)
        return os.read(self.number, READ)

    def lines(self, data: bytes) -> list[str]:
        """The lines that are whole by now; at the end (no data) the rest too. Of a bar only its newest state."""
        *whole, rest = (self._rest + data).split(b"\n")
        is_bar = b"\r" in rest
        if is_bar:
            # Only the newest state is kept, and whether the next one begins
            rest = b"\r" + rest.rstrip(b"\r").rpartition(b"\r")[2] + b"\r" * rest.endswith(b"\r")
        is_due = is_bar and not whole and time.monotonic() - self._cut_s > BAR_S
        if not data or is_due or len(rest) > READ:
            whole, rest = [*whole, rest], b""
        if whole:
            self._cut_s = time.monotonic()
        self._rest = rest
        lines = b"\n".join(whole).decode(errors="replace").split("\n")
        states = [line.rstrip("\r").rpartition("\r")[2] if "\r" in line else line for line in lines]
        return [state for state in states if state.strip()]


# How a rank failed ----------------------------------------------------------------------------------------------------


def last_exception(tail: str, error_file: Path | None = None) -> str:
    """The line that says how a rank failed: of what it printed last, or of the file that torch's @record writes.

    "" where neither says it.
    """
    tail = re.sub(r"^\[rank\d+\]: ", "", tail, flags=re.MULTILINE)  # torch's own, before each line
    if found := [line for line in tail.splitlines() if EXCEPTION.match(line)]:
        return found[-1][:500]
    content: Any = None
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(error_file.read_text()) if error_file is not None else None
    message = content.get("message") if isinstance(content, dict) else None
    text = message.get("message") if isinstance(message, dict) else message
    return str(text or "").partition("\n")[0][:500]
