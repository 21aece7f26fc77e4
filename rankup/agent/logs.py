"""Output: where the lines of an agent and of a rank go, printed or logged, where stacks are written, and what the agent
reads from the pipes of a script that does not import rankup. No torch here.

Printing ends nothing and blocks nothing for long: a reader that has gone, a full disk or a disk that hangs costs lines,
not the run. Each line carries its host and rank.

| what                                 | on the terminal                  | in the rank's file                     |
|--------------------------------------|----------------------------------|----------------------------------------|
| records of `rankup`, and of the user | from INFO on, by rank 0          | from DEBUG on; the user's from INFO on |
| records of libraries                 | warnings and errors, by all      | from INFO on                           |
| what a script prints itself          | as it is, by all                 | each line                              |
"""

import contextlib
import errno
import io
import json
import logging
import os
import re
import select
import signal
import socket
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rankup.agent.processes import start_of
from rankup.errors import disk_errors
from rankup.timing import PRINT_S

LIBRARY = re.compile(r"/lib(64)?/python3")  # in the path of code that is not the user's
STACKS = "stacks"  # the folder in that of the run
TAIL = 400  # lines that are kept to explain the end of a rank
LONGEST = 2000  # characters of such a line
READ = 1 << 16  # bytes that are read at once; a line without an end is cut there too
# The last line of a traceback, or what argparse says of a wrong argument
EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning|Failure)\b|\S+: error: ")


def host_name() -> str:
    """This machine's name without its domain."""
    return socket.gethostname().split(".")[0]


# Streams that never fail ----------------------------------------------------------------------------------------------


class Output(io.FileIO):
    """A file, pipe or terminal that this process prints to, by its number: printing raises nothing, and waits PRINT_S
    at most. Any thread and any fork may print. On a disk that hangs one thread hangs; the others lose their lines."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self._unread = False  # nobody has read since the last line that was dropped
        self._pid, self._lock = os.getpid(), threading.Lock()

    def write(self, data: Any) -> int:
        if self._pid != os.getpid():  # in a fork: who holds the lock may not be here
            self._pid, self._lock = os.getpid(), threading.Lock()
        whole = False
        if self._lock.acquire(timeout=0.0 if self._unread else PRINT_S):
            try:
                whole = self._write(bytes(data))
            except OSError:
                whole = True  # there is nobody to read it
            finally:
                self._lock.release()
        self._unread = not whole
        return len(data)

    def _write(self, data: bytes) -> bool:
        """Returns False where it did not fit in time. Raises OSError."""
        if stat.S_ISREG(os.fstat(self.fileno()).st_mode):
            os.write(self.fileno(), data)
            return True
        room, until_s = select.poll(), time.monotonic() + (0.0 if self._unread else PRINT_S)
        if self._unread:  # the last line may be there in part
            data = b"\n" + data
        try:  # once more: opened anew it does not block, and the usual one is shared with other processes
            number, most = os.open(f"/proc/self/fd/{self.fileno()}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY), 2**20
        except OSError:  # a socket, another user's terminal
            number, most = os.dup(self.fileno()), select.PIPE_BUF  # so much fits where it has room
        try:
            room.register(number, select.POLLOUT)
            while data:
                if not room.poll(1000 * max(0.0, until_s - time.monotonic())):
                    return False
                with contextlib.suppress(BlockingIOError):  # another process has taken the room
                    data = data[os.write(number, data[:most]) :]
        finally:
            os.close(number)
        return True


def guard() -> None:
    """From now on nothing that is printed ends or stops this process, see `Output`. Not for a command whose output is
    its result."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):  # else somebody else has it already, or this has been called before
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()  # what was printed before would come last, or never
            if stream is None:  # it was closed as this process began
                number, encoding = os.open(os.devnull, os.O_WRONLY), "utf-8"
            else:
                number, encoding = stream.fileno(), stream.encoding
            setattr(sys, name, io.TextIOWrapper(Output(number), encoding, "backslashreplace", line_buffering=True))


class RankLog(Output):
    """The file of a rank's lines, each with the time, host and rank."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        """Open it to append to it. Raises UserError where it can't be written. May wait for the disk."""
        self._head, path = f"%Y-%m-%dT%H:%M:%S {host_name()} r{rank} ", run_dir / "logs" / f"rank-{rank}.log"
        with disk_errors("run_dir", path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            super().__init__(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666))

    def add(self, lines: Sequence[str], time_s: float | None = None) -> None:
        """`time_s`: of `time.time()`, by default now."""
        head = time.strftime(self._head, time.localtime(time_s))
        self.write("".join([f"{head}{line}\n" for line in lines]).encode(errors="backslashreplace"))


class _Copied:
    """The stdout of a script that imports rankup, of which a file gets each line too. All else is `plain`'s."""

    def __init__(self, plain: TextIO, file: RankLog) -> None:
        self.plain, self._file, self._begun = plain, file, ""

    def write(self, text: str) -> int:
        *lines, begun = (self._begun + text).split("\n")
        self._begun = begun[-LONGEST:]
        if lines:
            self._file.add([line.rpartition("\r")[2] for line in lines])
        with _unless_hung_up():
            self.plain.write(text)
        return len(text)

    def flush(self) -> None:
        with _unless_hung_up():
            self.plain.flush()

    def __getattr__(self, name: str) -> Any:
        if name == "plain":  # of one that is only being made, as by copy.copy
            raise AttributeError(name)
        return getattr(self.plain, name)


@contextlib.contextmanager
def _unless_hung_up() -> Iterator[None]:
    """A terminal that was closed takes no line, and the job is about to save and leave for that: see SIGHUP."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise


def copy_prints(file: RankLog) -> None:
    """From now on what this process prints stands in the rank's file too."""
    plain = sys.stdout.plain if isinstance(sys.stdout, _Copied) else sys.stdout
    sys.stdout = _Copied(plain, file)


# Logging --------------------------------------------------------------------------------------------------------------


def setup_logging(*, rank: int | None = 0, world_size: int = 1, file: RankLog | None = None) -> None:
    """Send records to the terminal and to `file`, see the table above. An agent's `rank` is None, and its `world_size`
    the number of nodes. It may be called again. What the user has configured before stays: then only our own records
    are printed here."""
    logging.raiseExceptions = False
    logging.captureWarnings(True)
    root, ours = logging.getLogger(), logging.getLogger("rankup")
    for logger in (root, ours):
        logger.handlers = [handler for handler in logger.handlers if not isinstance(handler, _Handler)]
    terminal = _Handler(line_head(rank, world_size), prints_info=not rank)
    files = [_Handler(file=file)] if file is not None else []
    ours.handlers += [terminal, *files]
    ours.propagate = False
    ours.setLevel(logging.DEBUG)
    if not root.handlers:
        root.handlers.append(terminal)
        if root.level == logging.WARNING:  # Python's own default
            root.setLevel(logging.INFO)
    root.handlers += files


def line_head(rank: int | None, world_size: int) -> str:
    """What stands before each line on the terminal: nothing where there is one rank alone."""
    who = "" if rank is None else f" r{rank}/{world_size}"
    return f"[{host_name()}{who}] " if world_size > 1 else ""


class _Handler(logging.Handler):
    """Prints records to the terminal or to a file. It raises nothing, and has none of logging's locks, which a thread
    would hold for ever while a disk hangs: `Output` has its own."""

    def __init__(self, head: str = "", *, file: RankLog | None = None, prints_info: bool = False) -> None:
        super().__init__()
        self._head, self._file, self._prints_info = head, file, prints_info

    def createLock(self) -> None:
        self.lock = None

    def handle(self, record: logging.LogRecord) -> bool:
        with contextlib.suppress(Exception):
            self._write(record, self.format(record))
        return True

    def _write(self, record: logging.LogRecord, text: str) -> None:
        is_library = LIBRARY.search(record.pathname) is not None and record.name.split(".")[0] != "rankup"
        lines = (f"{record.name}: {text}" if is_library else text).splitlines()
        warns = record.levelno >= logging.WARNING
        if self._file is not None:
            self._file.add(lines, record.created)
        elif warns or (self._prints_info and record.levelno >= logging.INFO and not is_library):
            show(self._head, lines, sys.stderr if warns else getattr(sys.stdout, "plain", sys.stdout))


def show(head: str, lines: Sequence[str], stream: TextIO) -> None:
    """Print whole lines at once. A bar of tqdm's on the terminal is taken away before and comes back after."""
    with contextlib.suppress(Exception), contextlib.ExitStack() as stack:
        with contextlib.suppress(Exception):
            # Without tqdm's lock, which somebody may hold for as long as the terminal is full
            stack.enter_context(sys.modules["tqdm"].tqdm.external_write_mode(stream, nolock=True))
        stream.write("".join([f"{head}{line}\n" for line in lines]))
        stream.flush()


# Stacks ---------------------------------------------------------------------------------------------------------------


def stacks_environment(run_dir: Path, rank: int, environ: Mapping[str, str]) -> dict[str, str]:
    """What has a script write its stacks where it gets SIGRTMAX, see `script_site`."""
    path = run_dir.resolve() / STACKS / f"rank-{rank}.txt"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    folders = [str(Path(__file__).with_name("script_site")), environ.get("PYTHONPATH")]
    return {"RANKUP_STACKS": str(path), "PYTHONPATH": os.pathsep.join(filter(None, folders))}


def announce_stacks(
    run_dir: Path, rank: int, world_size: int, pid: int, *, thread: int | None = None, main: str = "",
    signals: Iterable[int] = (signal.SIGRTMAX,),
) -> Path:
    """Write whose stacks follow in that rank's file, which is returned, and how to ask for more. Raises OSError.
    `thread`: the kernel's number of one that never hangs, and takes the signals. `main`: the main thread, as
    faulthandler writes it, "" where nobody knows. `signals`: to try in turn."""
    writer = {
        "rank": rank, "world_size": world_size, "host": host_name(), "pid": pid, "started": start_of(pid),
        "thread": thread or pid, "main": main, "signals": [*map(int, signals)],
    }
    path = run_dir / STACKS / f"rank-{rank}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"# {json.dumps(writer)}\n")
    return path


# What a script prints that does not import rankup: it comes through pipes --------------------------------------------


class Pump:
    """Reads what a rank prints, its two pipes in one thread: to its file with a time, to the terminal with rank and
    host. A rank that prints faster than these take it waits at its full pipe. `outputs`: for the rank; the caller
    closes its own. `thread`: ends once all that the rank printed is written."""

    def __init__(self, run_dir: Path, rank: int, world_size: int) -> None:
        """Raises UserError where its file can't be written."""
        self._head, self._file = line_head(rank, world_size), RankLog(run_dir, rank)
        self._tail, self.last_error = deque[str](maxlen=TAIL), ""  # the newest line of stderr
        (stdout, out), (stderr, error) = os.pipe(), os.pipe()
        self.outputs = [out, error]
        self.thread = threading.Thread(target=self._read, args=({stdout: "stdout", stderr: "stderr"},), daemon=True)
        self.thread.start()

    @property
    def tail(self) -> str:
        """The last lines."""
        return "\n".join(self._tail.copy())

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
        os.close(self._file.fileno())

    def _take(self, data: bytes, lines: list[str], name: str) -> None:
        self._tail.extend(line[:LONGEST] for line in lines[-TAIL:])
        if lines and name == "stderr":
            self.last_error = lines[-1][:500]
        self._file.add(lines)
        if not self._head:
            with contextlib.suppress(OSError, ValueError):
                getattr(sys, name).buffer.write(data)  # as it is: a bar stays a bar
        elif lines:
            show(self._head, lines, getattr(sys, name))


def last_exception(tail: str) -> str:
    """The line of a rank's last lines that says how it failed, or ""."""
    tail = re.sub(r"^\[rank\d+\]: ", "", tail, flags=re.MULTILINE)  # torch's own, before each line
    return next((line[:500] for line in reversed(tail.splitlines()) if EXCEPTION.match(line)), "")
