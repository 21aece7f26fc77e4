"""What is printed: by this process, by whoever logs in it, and by a rank whose output comes through pipes.

Printing ends nothing and blocks nothing for long: a reader that has gone, a full disk or a disk that hangs costs lines,
not the run. Each line carries its host and rank. No torch here.

| what                                 | on the terminal                  | in the rank's file                     |
|--------------------------------------|----------------------------------|----------------------------------------|
| records of `rankup`, and of the user | from INFO on, by rank 0          | from DEBUG on; the user's from INFO on |
| records of libraries                 | warnings and errors, by all      | from INFO on                           |
| what a fresh rank prints, see `Pump` | all, behind the host and rank    | all, behind the time, host and rank    |
"""

import asyncio
import contextlib
import io
import json
import logging
import os
import re
import select
import socket
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TextIO

from rankup.errors import ConfigError

# How long a reader that does not read holds up who prints. After that lines are dropped until it reads again.
WAIT_S = 5.0
TAIL = 400  # lines that are kept to explain the end of a rank
LONGEST = 2000  # characters of such a line
READ = 1 << 16  # bytes that one turn of the event loop takes from a pipe; a line without an end is cut there too
# A progress bar writes a carriage return, and no newline for hours: so often its newest state becomes a line
BAR_S = 10.0
TRACEBACK = re.compile(r"(\[rank\d+\]: )?Traceback \(most recent call last\):")  # torch's own prefix
# The traceback of a rank that lost its peer has twenty lines, and says less than the line about the lost rank, which
# comes within a second or two. So long a traceback may wait for the rank's end
HOLD_S = 10.0
LIBRARY = re.compile(r"/lib(64)?/python3")  # in the path of code that is not the user's
# The last line of a traceback, or what argparse says of a wrong argument
EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning|Failure)\b|\S+: error: ")


def host_name() -> str:
    """This machine's name without its domain."""
    return socket.gethostname().split(".")[0]


# Streams that never fail ----------------------------------------------------------------------------------------------


class Output(io.RawIOBase):
    """A file, pipe or terminal that this process prints to: printing raises nothing, and waits WAIT_S at most.

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
        if self._lock.acquire(timeout=0.0 if self._dropped else WAIT_S):
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
        until_s = time.monotonic() + (0.0 if dropped else WAIT_S)
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
    """The file of a rank's lines, to append to. Raises ConfigError where it can't be written. May wait for the disk."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return Output(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666))
    except OSError as error:
        raise ConfigError(
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
    terminal = _Handler(_terminal_head(rank, world_size, host), prints_info=not rank)
    files = [_Handler(_file_head(rank, host), file)] if file is not None else []
    ours.handlers += [terminal, *files]
    ours.propagate = False
    ours.setLevel(logging.DEBUG)
    if not root.handlers:
        root.handlers.append(terminal)
        if root.level == logging.WARNING:  # Python's own default
            root.setLevel(logging.INFO)
    root.handlers += files


def _terminal_head(rank: int | None, world_size: int, host: str) -> str:
    who = "" if rank is None else f" r{rank}/{world_size}"
    return f"[{host or host_name()}{who}] " if world_size > 1 else ""


def _file_head(rank: int | None, host: str) -> str:
    return f"%Y-%m-%dT%H:%M:%S {host or host_name()} r{rank} "


def _headed(head: str, lines: Sequence[str], time_s: float | None = None) -> str:
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
            self._file.write(_headed(self._head, lines, record.created).encode(errors="backslashreplace"))
        elif warns or (self._prints_info and record.levelno >= logging.INFO and not is_library):
            _show(_headed(self._head, lines), sys.stderr if warns else sys.stdout)


def _show(text: str, stream: TextIO) -> None:
    """Print whole lines at once. A bar of tqdm's on the terminal is taken away before and comes back after."""
    with contextlib.suppress(Exception), contextlib.ExitStack() as stack:
        with contextlib.suppress(Exception):
            # Without tqdm's lock, which somebody may hold for as long as the terminal is full
            stack.enter_context(sys.modules["tqdm"].tqdm.external_write_mode(stream, nolock=True))
        stream.write(text)
        stream.flush()


# A rank's output through pipes ----------------------------------------------------------------------------------------


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
        self._terminal_head, self._file_head = _terminal_head(rank, world_size, host), _file_head(rank, host)
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
            text = _headed(self._file_head, lines).encode(errors="backslashreplace")
            self._outbox.append(lambda: file.write(text))

    def _print(self, lines: list[str], name: str) -> None:
        if lines:
            self._outbox.append(lambda: _show(_headed(self._terminal_head, lines), getattr(sys, name)))

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
