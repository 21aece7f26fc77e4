"""What a rank prints that comes through pipes, as a fresh rank's does: to its file with a time, to the terminal with
host and rank. No torch here.
"""

import contextlib
import json
import os
import re
import select
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

from rankup.agent.logs import Output, file_head, headed, line_head, show
from rankup.agent.network import in_thread

TAIL = 400  # lines that are kept to explain the end of a rank
LONGEST = 2000  # characters of such a line
READ = 1 << 16  # bytes that are read at once; a line without an end is cut there too
# The last line of a traceback, or what argparse says of a wrong argument
EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning|Failure)\b|\S+: error: ")


class Pump:
    """Reads what a rank prints, its two pipes in one thread: to its file with a time, to the terminal with rank and
    host.

    A rank that prints faster than the terminal and the disk take it waits at its full pipe.
    """

    def __init__(
        self, stdout: int, stderr: int, *, rank: int, world_size: int, host: str = "", file: Output | None = None
    ) -> None:
        """Begin to read. `stdout`, `stderr`: the reading ends of the pipes, closed here."""
        self._tail: deque[str] = deque(maxlen=TAIL)
        self._alone, self._file = world_size == 1, file
        self._terminal_head, self._file_head = line_head(rank, world_size, host), file_head(rank, host)
        self._thread = threading.Thread(target=self._read, args=({stdout: "stdout", stderr: "stderr"},), daemon=True)
        self._thread.start()

    @property
    def tail(self) -> str:
        """The last lines that it printed."""
        return "\n".join(self._tail.copy())

    async def drained(self, timeout_s: float) -> bool:
        """Wait until all that the rank printed is written; False where processes that it left behind hold its output
        open, or a disk hangs."""
        with contextlib.suppress(TimeoutError):
            await in_thread(self._thread.join, timeout_s=timeout_s)
        return not self._thread.is_alive()

    def _read(self, pipes: dict[int, str]) -> None:
        rest, poll = dict.fromkeys(pipes, b""), select.poll()
        for pipe in pipes:
            poll.register(pipe, select.POLLIN)
        while rest:
            for pipe, _ in poll.poll():
                data = os.read(pipe, READ)
                *whole, rest[pipe] = (rest[pipe] + data).split(b"\n")
                if not data or len(rest[pipe]) > READ:
                    whole, rest[pipe] = [*whole, rest[pipe]], b""
                # Of a progress bar the newest state alone
                states = [line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace") for line in whole]
                self._take(data, [state for state in states if state.strip()], pipes[pipe])
                if not data:
                    del rest[pipe]
                    poll.unregister(pipe)
                    os.close(pipe)

    def _take(self, data: bytes, lines: list[str], name: str) -> None:
        self._tail.extend(line[:LONGEST] for line in lines[-TAIL:])
        if lines and self._file is not None:
            self._file.write(headed(self._file_head, lines).encode(errors="backslashreplace"))
        if self._alone:
            _pass_on(data, getattr(sys, name))  # as it is: a bar stays a bar
        elif lines:
            show(headed(self._terminal_head, lines), getattr(sys, name))


def _pass_on(data: bytes, stream: Any) -> None:
    with contextlib.suppress(OSError, ValueError):
        stream.flush()
        stream.buffer.write(data)
        stream.buffer.flush()


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
