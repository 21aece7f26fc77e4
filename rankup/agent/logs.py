"""What a process prints, by hand and by logging, in an agent as in a rank. No torch here.

Printing ends nothing and blocks nothing for long: a reader that has gone, a full disk or a disk that hangs costs lines,
not the run. Each line carries its host and rank.

| what                                 | on the terminal                  | in the rank's file                     |
|--------------------------------------|----------------------------------|----------------------------------------|
| records of `rankup`, and of the user | from INFO on, by rank 0          | from DEBUG on; the user's from INFO on |
| records of libraries                 | warnings and errors, by all      | from INFO on                           |
"""

import contextlib
import io
import logging
import os
import re
import select
import socket
import stat
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from rankup.errors import UserError
from rankup.timing import PRINT_S

LIBRARY = re.compile(r"/lib(64)?/python3")  # in the path of code that is not the user's


def host_name() -> str:
    """This machine's name without its domain."""
    return socket.gethostname().split(".")[0]


# Streams that never fail ----------------------------------------------------------------------------------------------


class Output(io.RawIOBase):
    """A file, pipe or terminal that this process prints to: printing raises nothing, and waits PRINT_S at most.

    Any thread and any fork of this process may print. On a disk that hangs one thread hangs with it; the others lose
    their lines.
    """

    def __init__(self, number: int) -> None:
        """`number`: of the open file."""
        self._number = self.name = number
        self._dropped = 0  # lines, since somebody last read
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._begin_fork)

    def _begin_fork(self) -> None:
        self._lock = threading.Lock()  # the one who held it may not be here

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self._lock.acquire(timeout=0.0 if self._dropped else PRINT_S):
            try:
                with contextlib.suppress(OSError):
                    self._write(bytes(data))
            finally:
                self._lock.release()
        else:
            self._dropped += max(1, bytes(data).count(b"\n"))
        return len(data)

    def _write(self, data: bytes) -> None:
        dropped = self._dropped
        if stat.S_ISREG(os.fstat(self._number).st_mode):
            os.write(self._number, data)
            self._dropped -= dropped
            return
        until_s = time.monotonic() + (0.0 if dropped else PRINT_S)
        notice = f"\n[{dropped} lines were not printed: nobody read them]\n" if dropped else ""
        rest = notice.encode() + data
        number, most = self._open()
        try:
            room = select.poll()
            room.register(number, select.POLLOUT)
            while rest:
                if not room.poll(1000 * max(0.0, until_s - time.monotonic())):
                    self._dropped += max(1, data.count(b"\n"))
                    return
                with contextlib.suppress(BlockingIOError):  # another process has taken the room
                    rest = rest[os.write(number, rest[:most]) :]
            self._dropped -= dropped
        finally:
            os.close(number)

    def _open(self) -> tuple[int, int]:
        """The file once more, and how many bytes fit where it has room. Opened anew it does not block: the usual one
        is shared with other processes, and to change it would change it for them."""
        try:
            return os.open(f"/proc/self/fd/{self._number}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY), 2**20
        except OSError:  # a socket, another user's terminal, no /proc
            return os.dup(self._number), select.PIPE_BUF


class _Lines(io.TextIOWrapper):
    """Text for an `Output`. What a thread prints goes there in whole lines, and no other thread's comes between."""

    def __init__(self, output: Output, encoding: str) -> None:
        super().__init__(output, encoding=encoding, errors="backslashreplace")
        self._begun = threading.local()

    def write(self, text: str) -> int:
        self._begun.text = getattr(self._begun, "text", "") + text
        if "\n" in text:
            self.flush()
        return len(text)

    def flush(self) -> None:
        text, self._begun.text = getattr(self._begun, "text", ""), ""
        if text:
            self.buffer.write(text.encode(self.encoding, "backslashreplace"))


def guard(*names: str) -> None:
    """From now on nothing that is printed to these of "stdout" and "stderr" ends or stops this process, see `Output`.

    Whoever prints: logs, bars, warnings, tracebacks, the user's code. Not for a command whose output is its result.
    """
    for name in names:
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):  # else somebody else has it already, or this has been called before
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()  # what was printed before would come last, or never
            number, encoding = (-1, "utf-8") if stream is None else (stream.fileno(), stream.encoding)
            setattr(sys, name, _Lines(Output(number), encoding))


# Logging --------------------------------------------------------------------------------------------------------------


def open_log(path: Path) -> Output:
    """The file of a rank's lines, to append to. Raises UserError where it can't be written. May wait for the disk."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return Output(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666))
    except OSError as error:
        raise UserError(
            f"run_dir: {path.parent} must be writable, got {error.strerror}. "
            "Set --run-dir to a directory this user owns, or change its owner."
        ) from None


def setup_logging(*, rank: int | None = 0, world_size: int = 1, host: str = "", file: Output | None = None) -> None:
    """Send records to the terminal and to `file`, each line of a text with its host and rank. See the table above.

    An agent's `rank` is None, and its `world_size` the number of nodes.
    Call it again after a fork, or where the world size has changed. Where the user has configured logging before, only
    our own records are printed here.
    """
    logging.raiseExceptions = False
    logging.captureWarnings(True)
    root, ours = logging.getLogger(), logging.getLogger("rankup")
    for logger in (root, ours):
        logger.handlers = [handler for handler in logger.handlers if not isinstance(handler, _Handler)]
    terminal = _Handler(line_head(rank, world_size, host), prints_info=not rank)
    files = [_Handler(file_head(rank, host), file)] if file is not None else []
    ours.handlers += [terminal, *files]
    ours.propagate = False
    ours.setLevel(logging.DEBUG)
    if not root.handlers:
        root.handlers.append(terminal)
        if root.level == logging.WARNING:  # Python's own default
            root.setLevel(logging.INFO)
    root.handlers += files


def line_head(rank: int | None, world_size: int, host: str = "") -> str:
    """What stands before each line on the terminal: nothing where there is one rank alone."""
    who = "" if rank is None else f" r{rank}/{world_size}"
    return f"[{host or host_name()}{who}] " if world_size > 1 else ""


def file_head(rank: int | None, host: str = "") -> str:
    """What stands before each line in a rank's file, with the time as `time.strftime` writes it."""
    return f"%Y-%m-%dT%H:%M:%S {host or host_name()} r{rank} "


def headed(head: str, lines: Sequence[str], time_s: float | None = None) -> str:
    """`head`, in which `time.strftime` puts the time, before each line."""
    head = time.strftime(head, time.localtime(time_s))
    return "".join([f"{head}{line}\n" for line in lines])


class _Handler(logging.Handler):
    """Prints records to the terminal or to a file. It raises nothing.

    It has none of logging's locks, which a thread would hold for ever while a disk hangs: `Output` has its own.
    """

    def __init__(self, head: str, file: Output | None = None, *, prints_info: bool = False) -> None:
        super().__init__()
        self._head, self._file, self._prints_info = head, file, prints_info

    def createLock(self) -> None:
        self.lock = None

    def handle(self, record: logging.LogRecord) -> bool:
        with contextlib.suppress(Exception):
            self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        is_library = LIBRARY.search(record.pathname) is not None and record.name.split(".")[0] != "rankup"
        lines = (f"{record.name}: {text}" if is_library else text).splitlines()
        warns = record.levelno >= logging.WARNING
        if self._file is not None:
            self._file.write(headed(self._head, lines, record.created).encode(errors="backslashreplace"))
        elif warns or (self._prints_info and record.levelno >= logging.INFO and not is_library):
            show(headed(self._head, lines), sys.stderr if warns else sys.stdout)


def show(text: str, stream: TextIO) -> None:
    """Print whole lines at once. A bar of tqdm's on the terminal is taken away before and comes back after."""
    with contextlib.suppress(Exception), contextlib.ExitStack() as stack:
        with contextlib.suppress(Exception):
            # Without tqdm's lock, which somebody may hold for as long as the terminal is full
            stack.enter_context(sys.modules["tqdm"].tqdm.external_write_mode(stream, nolock=True))
        stream.write(text)
        stream.flush()
