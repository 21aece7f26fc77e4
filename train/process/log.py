"""What a run prints: lines with rank and host, one file for each rank, progress on the terminal of rank 0.

Only rank 0 writes to the terminal. Yet every rank prints its own failure, with its rank and host: that torchrun's
"[default3]:" names no node is the first complaint about its logs (pytorch issue 75087).

Not Python's logging: a stream that depends on rank and level, a prefix before each line of a text, and a bar that makes
room for it need handlers and a formatter of our own, which are longer than what is below.
"""

import contextlib
import io
import os
import select
import socket
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from rankup.errors import ConfigError

# How long a reader that does not read holds up who prints. After that lines are dropped until it reads again.
WAIT_S = 5.0


def host_name() -> str:
    """This machine's name without its domain."""
    return socket.gethostname().split(".")[0]


class Output(io.RawIOBase):
    """A file, pipe or terminal that this process prints to: printing raises nothing, and waits WAIT_S at most.

    Where the reader has gone, or the disk is full, the text is lost and the run goes on. Any thread and any fork of
    this process may print. A regular file is written to in the usual way, so a disk that hangs still holds up a thread.
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
        if self._lock.acquire(timeout=WAIT_S):
            try:
                with contextlib.suppress(OSError):
                    self._write(bytes(data))
            finally:
                self._lock.release()
        return len(data)

    def _write(self, data: bytes) -> None:
        if stat.S_ISREG(os.fstat(self._number).st_mode):
            os.write(self._number, data)
            return
        until_s = time.monotonic() + (0.0 if self._dropped else WAIT_S)
        notice = f"\n[{self._dropped} lines were not printed: nobody read them]\n" if self._dropped else ""
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
            self._dropped = 0
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


class Log:
    """Lines of one rank: all go to `logs/rank-N.log`, and to the terminal what the rank and the kind of line allow."""

    def __init__(self, *, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self.host = host_name()
        self.prefix = f"[{self.host} r{rank}/{world_size}] " if world_size > 1 else ""
        self.file: TextIO | None = None
        self._bar: Any = None

    def open(self, run_dir: Path) -> None:
        """Append to `run_dir/logs/rank-N.log`. Raises ConfigError where the directory can't be written."""
        path = run_dir / "logs" / f"rank-{self.rank}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("a", buffering=1, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"run_dir: {path.parent} must be writable, got {error.strerror}. "
                "Set --run-dir to a directory this user owns, or change its owner."
            ) from None

    def info(self, text: str) -> None:
        """A line for the user: rank 0 prints it, every rank writes it to its file."""
        if self.rank == 0:
            self._print(text, sys.stdout)
        self.debug(text)

    def warning(self, text: str) -> None:
        """A line that every rank prints, as it is about this rank alone."""
        self._print(text, sys.stderr)
        self.debug(text)

    def debug(self, text: str) -> None:
        """A line for the rank's file only."""
        if self.file is not None:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S")
            with contextlib.suppress(OSError):  # a full disk is reported by the next save, which loses something
                self.file.writelines(f"{stamp} {self.host} r{self.rank} {line}\n" for line in text.splitlines())

    def show(self, text: str, stream: TextIO) -> None:
        """Lines for the terminal only, of any rank."""
        self._print(text, stream)

    def _print(self, text: str, stream: TextIO) -> None:
        if self._bar is not None:
            self._bar.clear()
        # One write for all: otherwise lines of several ranks on one terminal would break into each other
        stream.write("".join(f"{self.prefix}{line}\n" for line in text.splitlines()))
        stream.flush()

    def start_progress(self, *, kind: str, total_steps: int, step: int, every_s: float) -> None:
        """Begin to show steps: as a bar on a terminal, elsewhere as a line every `every_s` seconds. Rank 0 only.

        `kind`: the setting `progress`. `step`: the steps that were done before, when a run resumes.
        """
        self._every_s, self._reported_s = every_s, time.monotonic()
        self._kind = kind if kind != "auto" else ("bar" if sys.stderr.isatty() else "lines")
        if self.rank == 0 and self._kind == "bar":
            from tqdm import tqdm

            self._bar = tqdm(total=total_steps, initial=step, unit="step", dynamic_ncols=True, leave=False)

    def progress(self, step: int, text: str) -> None:
        """Show that `step` steps are done; `text`: how it goes, such as the loss."""
        if self.rank != 0:
            return
        if self._bar is not None:
            self._bar.update(step - self._bar.n)
            self._bar.set_postfix_str(text, refresh=False)
        elif self._kind == "lines" and text:
            self.info(text)

    def progress_due(self) -> bool:
        """Whether `every_s` seconds have passed since this last returned True. It does not wait for the device."""
        now_s = time.monotonic()
        if now_s - self._reported_s < self._every_s:
            return False
        self._reported_s = now_s
        return True

    def end_progress(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
