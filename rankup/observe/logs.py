"""What all ranks of a run wrote, by time: the command `logs`. No torch here.

It reads the files `logs/rank-N.log` alone, so it works while the run trains, and its memory does not depend on their
size. Times have whole seconds: within one the lower rank stands first, and each rank's lines keep their order.
"""

import heapq
import json
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from difflib import get_close_matches
from functools import lru_cache
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path

from rankup.env.rank_env import ranges
from rankup.errors import UserError
from rankup.timing import FOLLOW_S, RECENT_S, SAME_S

MOST = 1 << 20  # bytes of lines that are compared at once
CHUNK = 1 << 17  # bytes: --since looks for its first line in steps of so many, doubled each time
LONGEST = 1 << 15  # bytes of a line; the rest of a longer one is a line of its own
AT_ONCE = 50  # lines of one rank and second that are merged at once
COLOURS = (36, 33, 32, 35, 34, 31)  # of the ranks, in turn
UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
# Lines without it belong to the line before: the rest of a traceback, or what a library prints past the log
HEAD = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d) (\S+) r\d+ ")

Batch = tuple[bytes, int, bytes, list[bytes]]  # time, rank, host, and what that rank wrote in that second


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

    def look() -> Iterator[bytes]:
        """What was not read yet, also of ranks that have begun to write."""
        for number, path in _files(folder).items():
            if number not in found and (not wanted or number in wanted):
                found[number] = RankLog(path, number)
                found[number].seek(first)
        lines = folded(heapq.merge(*(log.batches(whole=not follow) for log in found.values())))
        return map(_as_json, lines) if as_json else _labelled(lines, colour)

    look()
    if follow and not first:
        newest = max((log.last_stamp() for log in found.values()), default=b"")
        for log in found.values():
            log.seek(_shifted(newest, -RECENT_S))
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
    """A file `rank-N.log`: what it has from some time on, and later what was added to it."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank = path, rank
        self._offset = self._inode = 0
        self._stamp = self._host = b""  # of the last line
        self._since = b""

    def seek(self, since: bytes) -> None:
        """Leave out what is older than the time `since`: each file is in the order of time."""
        self._since, self._offset, length = since, 0, CHUNK
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            self._inode = status.st_ino
            while since and length < status.st_size and not self._offset:
                file.seek(status.st_size - length)
                file.readline(LONGEST)  # most likely the rest of one
                found = next(filter(None, map(HEAD.match, file)), None)
                if found and found[1] < since:
                    self._offset = status.st_size - length
                length *= 2

    def last_stamp(self) -> bytes:
        """The newest time in the file, or b""."""
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - CHUNK))
            return max((found[1] for found in map(HEAD.match, file) if found), default=b"")
        return b""

    def batches(self, *, whole: bool) -> Iterator[Batch]:
        """What was not read yet. `whole`: also the last line, if it has no end yet."""
        for (stamp, host), lines in groupby(self._lines(whole), itemgetter(0, 1)):
            while texts := [text for *_, text in islice(lines, AT_ONCE)]:
                if stamp >= self._since:
                    yield stamp, self.rank, host, texts

    def _lines(self, whole: bool) -> Iterator[tuple[bytes, bytes, bytes]]:
        # `--fresh` may just have renamed the folder: the next look finds a new one
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:  # it was replaced, or cut
                self._inode, self._offset, self._stamp, self._host = status.st_ino, 0, b"", b""
            file.seek(self._offset)
            while line := file.readline(LONGEST):
                if not (whole or line.endswith(b"\n") or len(line) == LONGEST):
                    break  # it is being written
                self._offset += len(line)
                if found := HEAD.match(line):
                    self._stamp, self._host = found.groups()
                    line = line[found.end() :]
                yield self._stamp, self._host, line.removesuffix(b"\n")


@dataclass(slots=True)
class Line:
    """What one or several ranks, each with its host, wrote at `stamp`."""

    stamp: bytes
    who: list[tuple[int, bytes]]
    text: bytes


def folded(batches: Iterable[Batch]) -> Iterator[Line]:
    """The lines of `batches`, which are in the order of time and rank; equal ones of several ranks as one."""
    pending: list[Line] = []
    newest, known, size = b"", set[bytes](), 0
    for stamp, rank, host, texts in batches:
        if stamp != newest or size > MOST:
            newest, limit = stamp, _shifted(stamp, -SAME_S)
            near = [n for n, line in enumerate(pending) if limit and size <= MOST and line.stamp >= limit]
            far = near[0] if near else len(pending)
            yield from pending[:far]
            pending = pending[far:]
            known, size = {line.text for line in pending}, sum(len(line.text) for line in pending)
        if known.isdisjoint(texts):  # most lines of most logs
            pending += [Line(stamp, [(rank, host)], text) for text in texts]
        else:
            pending = _with(pending, stamp, (rank, host), texts, known)
        known.update(texts)
        size += sum(map(len, texts))
    yield from pending


def _with(
    pending: list[Line], stamp: bytes, who: tuple[int, bytes], texts: list[bytes], known: set[bytes]
) -> list[Line]:
    """`pending` and what one more rank wrote: each line at an equal one where the order allows it, else before the
    next that has one.
    """
    place = max((number + 1 for number, line in enumerate(pending) if who in line.who), default=0)
    result, own = pending[:place], list[Line]()
    for text in texts:
        same = None
        if text in known:
            fits = (n for n in range(place, len(pending)) if pending[n].text == text)
            same = next((n for n in fits if not own or pending[n].stamp == stamp), None)
        if same is None:
            own.append(Line(stamp, [who], text))
            continue
        result += [*pending[place:same], *own, pending[same]]
        pending[same].who.append(who)
        place, own = same + 1, []
    return [*result, *pending[place:], *own]


# Printing -------------------------------------------------------------------------------------------------------------


def _labelled(lines: Iterable[Line], colour: bool) -> Iterator[bytes]:
    for line in lines:
        label = _label(tuple(line.who), colour)
        label = b"%b %b" % (line.stamp, label) if line.stamp else label
        # A progress bar writes over itself: only its last state would be left on a terminal
        yield b"%b%b\n" % (label, line.text.rstrip(b"\r").rpartition(b"\r")[2])


def _as_json(line: Line) -> bytes:
    ranks, hosts = zip(*((rank, host.decode(errors="replace")) for rank, host in line.who), strict=True)
    text = line.text.decode(errors="replace")
    return json.dumps({"time": line.stamp.decode(), "ranks": ranks, "hosts": hosts, "text": text}).encode() + b"\n"


@lru_cache(maxsize=4096)
def _label(who: tuple[tuple[int, bytes], ...], colour: bool) -> bytes:
    """b"rank 3 on node1: "; several hosts are not named."""
    ranks, hosts = [rank for rank, _ in who], {host for _, host in who}
    label = f"rank{'s' if len(who) > 1 else ''} {ranges(ranks)}".encode()
    label += (b" on " + min(hosts) if len(hosts) == 1 and b"" not in hosts else b"") + b":"
    if colour:
        label = b"\x1b[%dm%b\x1b[0m" % (1 if len(who) > 1 else COLOURS[ranks[0] % len(COLOURS)], label)
    return label + b" "


def _write(lines: Iterator[bytes]) -> None:
    sys.stdout.buffer.writelines(lines)
    sys.stdout.buffer.flush()
