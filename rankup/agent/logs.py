"""Output: where agents and ranks print and log, where a rank writes its stacks, and how the agent reads the output of a
script that does not import rankup. This file does not import torch.

Printing never ends a process and never blocks it for long: a closed pipe, a full disk or a disk that hangs costs lines,
not the run. Each line carries its host and rank.

| what                                 | on the terminal                  | in the rank's file                     |
|--------------------------------------|----------------------------------|----------------------------------------|
| records of `rankup`, and of the user | rank 0: INFO and above           | DEBUG and above; the user's from INFO  |
| records of libraries                 | every rank: WARNING and above    | INFO and above                         |
| what a script prints itself          | every rank: unchanged            | each line                              |
| what compiled code prints            | every rank: with rank and host   | each line                              |
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rankup.agent.processes import start_of
from rankup.errors import UserError, disk_errors
from rankup.places.files import open_to_append
from rankup.timing import PRINT_S

LIBRARY = re.compile(r"/lib(64)?/python3")  # found in the path of code that is not the user's
STACKS = "stacks"  # a folder in the run's folder
TAIL = 400  # how many of a rank's last lines to keep, which explain its end
LONGEST = 2000  # how many characters of each such line to keep
READ = 1 << 16  # bytes per read; a longer line is cut into several
# The last line of a traceback, or argparse's message about a wrong argument
EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning|Failure)\b|\S+: error: ")


def host_name() -> str:
    """Return this machine's name without its domain."""
    return socket.gethostname().split(".")[0]


# Streams that never fail ----------------------------------------------------------------------------------------------


class Output(io.FileIO):
    """A file, pipe or terminal, given by its descriptor, on which printing raises nothing and waits at most PRINT_S.
    Any thread and any forked process may print. On a disk that hangs one thread hangs, and the others lose lines."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self._unread = False  # the last line was dropped, because nobody reads
        self._pid, self._lock = os.getpid(), threading.Lock()

    def write(self, data: Any) -> int:
        if self._pid != os.getpid():  # after a fork: the thread that holds the lock may not exist here
            self._pid, self._lock = os.getpid(), threading.Lock()
        whole = False
        if self._lock.acquire(timeout=0.0 if self._unread else PRINT_S):
            try:
                whole = self._write(bytes(data))
            except OSError:
                whole = True  # the reader is gone, so it makes no sense to write the rest
            finally:
                self._lock.release()
        self._unread = not whole
        return len(data)

    def _write(self, data: bytes) -> bool:
        """Write `data`. Returns False if the reader did not make room in time. Raises OSError."""
        if stat.S_ISREG(os.fstat(self.fileno()).st_mode):
            os.write(self.fileno(), data)
            return True
        room, until_s = select.poll(), time.monotonic() + (0.0 if self._unread else PRINT_S)
        if self._unread:  # a part of the last line may have been written
            data = b"\n" + data
        try:  # open it a second time: O_NONBLOCK on the descriptor itself would hold for other processes too
            number, most = os.open(f"/proc/self/fd/{self.fileno()}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY), 2**20
        except OSError:  # a socket, or another user's terminal
            number, most = os.dup(self.fileno()), select.PIPE_BUF  # this much fits once poll reports room
        try:
            room.register(number, select.POLLOUT)
            while data:
                if not room.poll(1000 * max(0.0, until_s - time.monotonic())):
                    return False
                with contextlib.suppress(BlockingIOError):  # another process was faster and took the room
                    data = data[os.write(number, data[:most]) :]
        finally:
            os.close(number)
        return True


def open_streams() -> None:
    """Open /dev/null for each of stdin, stdout and stderr that was closed (`>&-`) when this process started. Otherwise
    a file or a socket would get the free descriptor, and what compiled code and children print would go there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the kernel gives the lowest free descriptor
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, f"__{name}__") is None:  # another file may have the descriptor by now
            stream = io.TextIOWrapper(io.FileIO(os.devnull, mode), "utf-8")
            setattr(sys, f"__{name}__", stream)
            setattr(sys, name, getattr(sys, name) or stream)


def guard() -> None:
    """Replace stdout and stderr by `Output`, so that printing can neither end nor block this process. Do not call this
    in a command whose output is its result."""
    open_streams()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):  # otherwise the user, or an earlier call, has replaced it
            with contextlib.suppress(OSError, ValueError):
                stream.flush()  # otherwise earlier lines would come last, or never
            output = io.TextIOWrapper(Output(stream.fileno()), stream.encoding, "backslashreplace", line_buffering=True)
            setattr(sys, name, output)


class RankLog(Output):
    """The log file of a rank. Each line begins with the time, host and rank."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        """Open the file for appending, which may wait for the disk. Raises UserError if it can't be written."""
        self._head, path = f"%Y-%m-%dT%H:%M:%S {host_name()} r{rank} ", run_dir / "logs" / f"rank-{rank}.log"
        with disk_errors("run_dir", path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            super().__init__(open_to_append(path))

    def add(self, lines: Sequence[str], time_s: float | None = None) -> None:
        """Append lines. `time_s`: when they were written, as `time.time()`; by default now."""
        head = time.strftime(self._head, time.localtime(time_s))
        self.write("".join([f"{head}{line}\n" for line in lines]).encode(errors="backslashreplace"))


class _Copied:
    """The stdout of a script that imports rankup. It copies each line to a file, and otherwise acts as `plain`."""

    def __init__(self, plain: TextIO, file: RankLog) -> None:
        self.plain, self._file, self._begun = plain, file, ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        if len(self._begun) > READ:
            lines, self._begun = [*lines, self._begun], ""
        if lines:
            self._file.add([line.rstrip("\r").rpartition("\r")[2] for line in lines])
        with _unless_hung_up():
            self.plain.write(text)
        return len(text)

    def flush(self) -> None:
        with _unless_hung_up():
            self.plain.flush()

    def __getattr__(self, name: str) -> Any:
        if name == "plain":  # copy.copy asks for it before __init__ has set it
            raise AttributeError(name)
        return getattr(self.plain, name)


@contextlib.contextmanager
def _unless_hung_up() -> Iterator[None]:
    """Ignore that the terminal was closed: the job has got SIGHUP, and is about to save and leave."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise


def print_to(terminal: Sequence[int]) -> None:
    """Let Python's own stdout and stderr print to these two descriptors, wherever the streams are in use already. The
    descriptors 1 and 2 remain for compiled code and for child processes, which cannot write to a rank's file."""
    for stream, number in zip((sys.__stdout__, sys.__stderr__), terminal, strict=False):  # [] leaves both
        os.set_inheritable(number, False)
        if stream is not None:
            stream.flush()
            raw = getattr(stream.buffer, "raw", stream.buffer)
            raw.__init__(number, "w", closefd=False)  # type: ignore[misc]  # the same FileIO, another file


def copy_prints(file: RankLog) -> None:
    """Copy everything that this process prints from now on to the rank's file. On the terminal a line stays whole."""
    for stream in (sys.__stdout__, sys.__stderr__):
        # PYTHONUNBUFFERED, which images set, writes each argument of a print alone: lines of several ranks would mix
        if isinstance(stream, io.TextIOWrapper) and stream.write_through:
            stream.reconfigure(line_buffering=True, write_through=False)
    plain = sys.stdout.plain if isinstance(sys.stdout, _Copied) else sys.stdout
    sys.stdout = _Copied(plain, file)


# Logging --------------------------------------------------------------------------------------------------------------


def setup_logging(*, rank: int | None = 0, world_size: int = 1, file: RankLog | None = None) -> None:
    """Send log records to the terminal and to `file`, as the table above says. An agent passes `rank=None`, and the
    number of nodes as `world_size`. A later call replaces an earlier one. If the user has configured the root logger
    already, this leaves its handlers, and prints only rankup's own records."""
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
    """Return the beginning of each line on the terminal, which names host and rank; "" if there is only one rank."""
    who = "" if rank is None else f" r{rank}/{world_size}"
    return f"[{host_name()}{who}] " if world_size > 1 else ""


class _Handler(logging.Handler):
    """A handler that prints records to the terminal or to a file, and raises nothing. It does not use logging's lock,
    which a thread would hold for as long as a disk hangs. `Output` has a lock with a time limit."""

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
    """Print whole lines at once. tqdm clears its progress bar before, and draws it again after."""
    with contextlib.suppress(Exception), contextlib.ExitStack() as stack:
        with contextlib.suppress(Exception):
            # Without tqdm's lock, which another thread may hold for as long as the terminal is full
            stack.enter_context(sys.modules["tqdm"].tqdm.external_write_mode(stream, nolock=True))
        stream.write("".join([f"{head}{line}\n" for line in lines]))
        stream.flush()


# Stacks ---------------------------------------------------------------------------------------------------------------


def script_environment(run_dir: Path, rank: int, environ: Mapping[str, str], *, record: str) -> dict[str, str]:
    """Return the variables that make a script write its stacks when it gets SIGRTMAX, and note in the `record` whether
    it met another rank, see `script_site`."""
    path = run_dir.absolute() / STACKS / f"rank-{rank}.txt"
    folders = [str(Path(__file__).with_name("script_site")), environ.get("PYTHONPATH")]
    return {
        "RANKUP_STACKS": str(path), "RANKUP_RECORD": record, "PYTHONPATH": os.pathsep.join(filter(None, folders)),
    }


def announce_stacks(
    run_dir: Path, rank: int, world_size: int, pid: int, *, thread: int | None = None, main: str = "",
    signals: Iterable[int] = (signal.SIGRTMAX,),
) -> Path:
    """Append a line to the rank's stacks file that says which process writes the stacks and how to request them.
    Returns the path. Raises OSError. `thread`: the kernel's id of a thread that never hangs and takes the signals.
    `main`: the main thread's id, as faulthandler writes it, or "". `signals`: the signals to try, in this order."""
    writer = {
        "rank": rank, "world_size": world_size, "host": host_name(), "pid": pid, "started": start_of(pid),
        "thread": thread or pid, "main": main, "signals": [*map(int, signals)],
    }
    path = run_dir / STACKS / f"rank-{rank}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(open_to_append(path), "a", encoding="utf-8") as file:
        file.write(f"# {json.dumps(writer)}\n")
    return path


# The pipes of a rank --------------------------------------------------------------------------------------------------


class OutputReader:
    """Reads what a rank prints, from two pipes in one thread. It writes the lines to the rank's file with the time, and
    to the terminal with rank and host. A rank that prints faster waits for room in its pipe. `outputs`: the ends of the
    pipes for the rank, which the caller closes. `thread` ends once everything that the rank printed is written.

    If the script imports rankup, Python's own streams lead elsewhere (`print_to`), because the rank itself writes to
    its file what it prints and logs."""

    def __init__(
        self, rank: int, world_size: int, *, run_dir: Callable[[], Path | None], fail: Callable[[UserError], object],
    ) -> None:
        """`run_dir`: returns the folder of the run, or None as long as it is unknown. The rank's last lines are written
        once it is known. `fail`: called in the thread if it is known now, and the rank's file can't be written."""
        self._rank, self._head, self._run_dir, self._fail = rank, line_head(rank, world_size), run_dir, fail
        self._tail, self.last_error = deque[str](maxlen=TAIL), ""  # `last_error`: the newest line of stderr
        self._file: RankLog | None = None
        (stdout, out), (stderr, error) = os.pipe(), os.pipe()
        self.outputs = [out, error]
        self.thread = threading.Thread(target=self._read, args=({stdout: "stdout", stderr: "stderr"},), daemon=True)
        self.thread.start()

    @property
    def tail(self) -> str:
        """The last TAIL lines that the rank printed."""
        return "\n".join(self._tail.copy())

    def keep_in(self, run_dir: Path) -> None:
        """Write the last lines of a rank that has ended to its file in `run_dir`, unless its run became known. Raises
        UserError if the file can't be written."""
        if self._file is None and self._tail:
            file = RankLog(run_dir, self._rank)
            file.add(self._tail.copy())
            os.close(file.fileno())

    def _read(self, pipes: dict[int, str]) -> None:
        self._look_for_run(self._fail)
        rest, poll = dict.fromkeys(pipes, b""), select.poll()
        for pipe in pipes:
            poll.register(pipe, select.POLLIN)
        while rest:
            found = poll.poll(None if self._file is not None else 1000.0)
            self._look_for_run()
            for pipe, _ in found:
                data = os.read(pipe, READ)
                *whole, rest[pipe] = (rest[pipe] + data).split(b"\n")
                if not data or len(rest[pipe]) > READ:
                    whole, rest[pipe] = [*whole, rest[pipe]], b""
                # Keep only the newest state of a progress bar
                states = [line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace") for line in whole]
                self._take(data, [state for state in states if state.strip()], pipes[pipe])
                if not data:
                    del rest[pipe]
                    poll.unregister(pipe)
                    os.close(pipe)
        if self._file is not None:
            os.close(self._file.fileno())

    def _look_for_run(self, fail: Callable[[UserError], object] = lambda error: None) -> None:
        if self._file is None and (run_dir := self._run_dir()) is not None:
            try:
                self._file = RankLog(run_dir, self._rank)
                self._file.add(self._tail)
            except UserError as error:
                fail(error)

    def _take(self, data: bytes, lines: list[str], name: str) -> None:
        self._tail.extend(line[:LONGEST] for line in lines[-TAIL:])
        if lines and name == "stderr":
            self.last_error = lines[-1][:500]
        if self._file is not None:
            self._file.add(lines)
        if not self._head:
            with contextlib.suppress(OSError, ValueError):
                getattr(sys, name).buffer.write(data)  # unchanged, so that progress bars work
        elif lines:
            show(self._head, lines, getattr(sys, name))


def last_exception(tail: str) -> str:
    """Return the line that says how a rank failed, or "". `tail`: the rank's last lines."""
    tail = re.sub(r"^\[rank\d+\]: ", "", tail, flags=re.MULTILINE)  # torch puts this before each line
    return next((line[:500] for line in reversed(tail.splitlines()) if EXCEPTION.match(line)), "")
