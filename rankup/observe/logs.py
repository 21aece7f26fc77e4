"""What all ranks of a run wrote, by time: the command `logs`. No torch here.

It reads the files `logs/rank-N.log` alone, so it works while the run trains, and its memory does not depend on their
size. Times have whole seconds: within one the ranks take turns, and each rank's lines keep their order.
"""

import heapq
import json
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path

from rankup.env.rank_env import ranges
from rankup.errors import UserError
from rankup.timing import FOLLOW_S, SAME_S

MOST = 1 << 20  # bytes of lines that are compared at once
TAIL = 1 << 12  # bytes of each file that --follow begins with
LONGEST = 1 << 15  # bytes of a line; the rest of a longer one is a line of its own
COLOURS = (36, 33, 32, 35, 34, 31)  # of the ranks, in turn
UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
# Lines without it belong to the record of the line before: the rest of a traceback, or what a library prints
HEAD = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d) (\S+) r\d+ ")

Record = tuple[bytes, int, int, bytes, bytes]  # time, number in that second, rank, host, text of one or more lines


def logs(
    runs: Path, run: str = "", *, rank: str = "", since: str = "", follow: bool = False, as_json: bool = False
) -> None:
    """Print the lines of a run; with `follow` until a signal ends the process.

    `runs`: the folder of all runs. `run`: see `find_logs`. `rank`: such as "0-3,7". `since`: such as "10m" or "14:05".
    `as_json`: an object a line, with `time`, `ranks`, `hosts` (of each rank) and `text`.
    Raises UserError where no such run has logs, and where `rank` or `since` can't be understood.
    """
    wanted = wanted_ranks(rank)
    first = first_stamp(since, now=datetime.now())
    folder = find_logs(runs, run)
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    found: dict[int, RankLog] = {}
    skip = TAIL if follow and not first else 0

    def look() -> Iterator[bytes]:
        """What was not read yet, also of ranks that have begun to write."""
        for number, path in _files(folder).items():
            if number not in found and (not wanted or number in wanted):
                found[number] = RankLog(path, number, skip)
        lines = folded(heapq.merge(*(log.records(whole=not follow) for log in found.values())), first)
        return (printed for line in lines for printed in (_as_json(line) if as_json else _labelled(line, colour)))

    try:
        _write(look())
        while follow:
            time.sleep(FOLLOW_S)
            _write(look())
    except BrokenPipeError:  # the reader has had enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# Which run, ranks, times ----------------------------------------------------------------------------------------------


def find_run(runs: Path, name: str, is_run: Callable[[Path], bool]) -> Path:
    """The folder of the run `name`, which is in the folder `runs`, or is a folder itself. Raises UserError."""
    for folder in (runs / name, Path(name)):
        if is_run(folder):
            return folder
    names = sorted(path.name for path in runs.glob("*") if is_run(path))
    near = get_close_matches(name, names, n=1)
    hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(names[:20]) or 'none'}."
    raise UserError(f"RUN must be a run in {runs}/ or its folder, got {name}. {hint}")


def find_logs(runs: Path, run: str) -> Path:
    """The folder with the logs of a run: `run` is its name or folder; "" stands for the one that wrote last.

    Raises UserError where there is none.
    """
    if run:
        return find_run(runs, run, lambda folder: bool(_files(folder / "logs"))) / "logs"
    newest = max(runs.glob("*/logs/rank-*.log"), key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        raise UserError(f"no run with logs was found in {runs}. Name its folder, or set --run-dir.")
    return newest.parent


def _files(folder: Path) -> dict[int, Path]:
    """The logs in a folder by rank, in the order of the ranks."""
    names = ((path, re.fullmatch(r"rank-(\d+)\.log", path.name)) for path in folder.glob("rank-*.log"))
    return dict(sorted((int(match[1]), path) for path, match in names if match))


def wanted_ranks(text: str) -> Collection[int]:
    """ "0-3,7" -> those ranks; "" -> none, which stands for all. Raises UserError."""
    ranks: set[int] = set()
    for part in filter(None, text.replace(" ", "").split(",")):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UserError(f"--rank must be ranks such as 3 or 0-3,7, got {text}.")
        ranks.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return ranks


def first_stamp(text: str, *, now: datetime) -> bytes:
    """The time that --since stands for, as logs have it; b"" for no text. Raises UserError."""
    if not text:
        return b""
    try:
        if re.fullmatch(r"(?:\d+[smhd])+", text):
            parts = re.findall(r"(\d+)([smhd])", text)
            moment = now - sum((timedelta(**{UNITS[unit]: int(count)}) for count, unit in parts), timedelta())
        elif re.match(r"\d\d?:\d\d", text):
            moment = datetime.fromisoformat(f"{now:%Y-%m-%d}T{text.zfill(len(text) + (text[1] == ':'))}")
        else:
            moment = datetime.fromisoformat(text)
        return _stamp(moment.astimezone().replace(tzinfo=None) if moment.tzinfo else moment)
    except (ValueError, OverflowError):
        raise UserError(
            f"--since must be a time such as 10m, 2h30m, 14:05 or 2026-11-22T14:05, got {text}."
        ) from None


def _stamp(moment: datetime) -> bytes:
    return f"{moment:%Y-%m-%dT%H:%M:%S}".encode()


@lru_cache(maxsize=16)
def _shifted(stamp: bytes, seconds: float) -> bytes:
    """So many seconds later; b"" for what is no time."""
    try:
        return _stamp(datetime.fromisoformat(stamp.decode()) + timedelta(seconds=seconds))
    except (ValueError, OverflowError):
        return b""


# Reading and merging --------------------------------------------------------------------------------------------------


class RankLog:
    """A file `rank-N.log`: what it has, or the last `tail` bytes of it, and later what was added to it."""

    def __init__(self, path: Path, rank: int, tail: int) -> None:
        self.path, self.rank, self._tail = path, rank, tail
        self._offset = self._inode = 0
        self._stamp = self._host = b""  # of the last line

    def records(self, *, whole: bool) -> Iterator[Record]:
        """What was not read yet. `whole`: also the last line, if it has no end yet."""
        number, text = 0, b""
        for line in self._lines(whole):
            found = HEAD.match(line)
            if text and (found or len(text) > LONGEST):
                yield self._stamp, number, self.rank, self._host, text
                text, number = b"", number + 1
            if found:
                number = number if found[1] == self._stamp else 0
                self._stamp, self._host = found.groups()
            text += line[found.end() :] if found else line
        if text:
            yield self._stamp, number, self.rank, self._host, text

    def _lines(self, whole: bool) -> Iterator[bytes]:
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:  # a new file under that name
                self._inode, self._offset, self._stamp, self._host = status.st_ino, 0, b"", b""
                if self._tail and status.st_size > self._tail:
                    file.seek(status.st_size - self._tail)
                    file.readline(LONGEST)  # most likely the rest of one
                    self._offset = file.tell()
            file.seek(self._offset)
            while line := file.readline(LONGEST):
                if not (whole or line.endswith(b"\n") or len(line) == LONGEST):
                    break  # it is being written
                self._offset += len(line)
                yield line


@dataclass(slots=True)
class Line:
    """A record that one or several ranks, each with its host, wrote at `stamp`. `number`: its place among all."""

    stamp: bytes
    number: int
    text: bytes
    who: list[tuple[int, bytes]]


def folded(records: Iterable[Record], since: bytes) -> Iterator[Line]:
    """The records, which are in the order of time: equal ones of several ranks as one, where the order allows it."""
    pending = deque[Line]()
    newest: dict[bytes, Line] = {}  # of those that are pending, by text
    last: dict[int, int] = {}  # by rank: the number of its last line
    size = count = 0
    for stamp, _, rank, host, text in records:
        if stamp < since:
            continue
        limit = _shifted(stamp, -SAME_S)
        while pending and (pending[0].stamp < limit or size > MOST):
            line = pending.popleft()
            size -= len(line.text)
            if newest.get(line.text) is line:
                del newest[line.text]
            yield line
        found = newest.get(text)
        if found is None or found.number <= last.get(rank, -1):
            found = newest[text] = Line(stamp, count, text, [])
            pending.append(found)
            size, count = size + len(text), count + 1
        found.who.append((rank, host))
        last[rank] = found.number
    yield from pending


# Printing -------------------------------------------------------------------------------------------------------------


def _labelled(line: Line, colour: bool) -> Iterator[bytes]:
    label = _label(tuple(sorted(line.who)), colour)
    label = b"%b %b" % (line.stamp, label) if line.stamp else label
    for text in line.text.removesuffix(b"\n").split(b"\n"):
        # A progress bar writes over itself: only its last state would be left on a terminal
        yield b"%b%b\n" % (label, text.rstrip(b"\r").rpartition(b"\r")[2])


def _as_json(line: Line) -> Iterator[bytes]:
    ranks, hosts = zip(*((rank, host.decode(errors="replace")) for rank, host in sorted(line.who)), strict=True)
    for text in line.text.decode(errors="replace").removesuffix("\n").split("\n"):
        yield json.dumps({"time": line.stamp.decode(), "ranks": ranks, "hosts": hosts, "text": text}).encode() + b"\n"


@lru_cache(maxsize=4096)
def _label(who: tuple[tuple[int, bytes], ...], colour: bool) -> bytes:
    """b"rank 3 on node1: "; several hosts are not named."""
    ranks, hosts = [rank for rank, _ in who], {host for _, host in who}
    label = f"rank{'s' if len(who) > 1 else ''} {ranges(ranks)}".encode()
    label += (b" on " + min(hosts) if len(hosts) == 1 and b"" not in hosts else b"") + b":"
    if colour:
        label = b"\x1b[%dm%b\x1b[0m" % (1 if len(who) > 1 else COLOURS[ranks[0] % len(COLOURS)], label)
    return label + b" "


def _write(lines: Iterable[bytes]) -> None:
    sys.stdout.buffer.writelines(lines)
    sys.stdout.buffer.flush()
