"""The command `logs` prints what all ranks of a run wrote, in order of time. This module does not import torch.

It only reads the files `logs/rank-N.log`, so it works while the run trains. Its memory does not grow with the files.
Times are whole seconds. Within a second the ranks take turns, and the lines of each rank keep their order.
"""

import json
import os
import re
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import NamedTuple

from rankup.env.rank_env import ranges
from rankup.errors import UserError
from rankup.timing import FOLLOW_S, SAME_S

TAIL = 1 << 12  # how many bytes at the end of each file --follow prints first
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
HEAD = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d) (\S+) r\d+ ")


class Record(NamedTuple):
    """A line of a rank's log. `number`: the line's place among the lines that the rank wrote in the same second."""

    stamp: bytes
    number: int
    rank: int
    host: bytes
    text: bytes


def logs(
    runs: Path, run: str = "", *, rank: str = "", since: str = "", follow: bool = False, as_json: bool = False
) -> None:
    """Print the lines of a run, see `find_run`. With `follow`, go on until a signal ends the process. `rank`: such as
    "0-3,7". `since`: such as "10m". Raises UserError if there is no such run, or a text can't be understood."""
    wanted, first_s = wanted_ranks(rank), parse_since(since)
    folder = find_run(runs, run)
    if not rank_logs(folder, () if follow else wanted):  # with --follow, a wanted rank may begin later
        raise UserError(f"RUN must be a run whose ranks have written, got no logs/rank-{rank or 'N'}.log in {folder}.")
    found: dict[Path, LogReader] = {}
    try:
        while True:
            # Print what was not read yet, also of ranks that have begun to write since
            for path in rank_logs(folder, wanted):
                if path not in found:
                    found[path] = LogReader(path, tail=TAIL if follow and not since else None)
            records = [log.records(whole=not follow, first_s=first_s) for log in found.values()]
            sys.stdout.buffer.writelines(map(_as_json if as_json else _as_text, merged(records)))
            sys.stdout.buffer.flush()
            if not follow:
                return
            time.sleep(FOLLOW_S)
    except BrokenPipeError:  # the reader of the pipe has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# Which run, ranks, times ----------------------------------------------------------------------------------------------


def find_run(runs: Path, name: str) -> Path:
    """Return the folder of the run `name`, which is a name in the folder `runs` or a path. "" stands for the run whose
    ranks wrote last. Raises UserError if there is no such run."""
    if not name:
        newest = max(runs.glob("*/logs/rank-*.log"), key=lambda path: path.stat().st_mtime, default=None)
        if newest is None:
            raise UserError(f"no run with logs was found in {runs}. Name its folder, or set --run-dir.")
        return newest.parents[1]
    for folder in (runs / name, Path(name)):
        if is_run(folder):
            return folder
    names = sorted(path.name for path in runs.glob("*") if is_run(path))
    there = f"There are: {', '.join(names[:20])}." if names else "There are no runs yet."
    raise UserError(f"RUN must be a run in {runs}/ or a run's folder, got {name}. {there}")


def is_run(folder: Path) -> bool:
    with suppress(OSError):  # the folder may also hold runs of others that this user may not read
        return any((folder / name).is_file() for name in ("status.json", "run.json")) or bool(rank_logs(folder))
    return False


def rank_logs(folder: Path, wanted: Collection[int] = ()) -> list[Path]:
    """Return the log files of a run in the order of the ranks, only of the `wanted` ranks if any are given."""
    found = {path.stem.removeprefix("rank-"): path for path in (folder / "logs").glob("rank-*.log") if path.is_file()}
    logs = {int(rank): path for rank, path in found.items() if rank.isdigit()}
    return [logs[rank] for rank in sorted(logs) if not wanted or rank in wanted]


def wanted_ranks(text: str) -> Collection[int]:
    """Return the ranks in a text such as "0-3,7". No ranks, for "", stand for all. Raises UserError."""
    ranks: set[int] = set()
    for part in filter(None, text.replace(" ", "").split(",")):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UserError(f"--rank must be ranks such as 3 or 0-3,7, got {text}.")
        ranks.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return ranks


def parse_since(text: str) -> float:
    """Return the `time.time()` that the text of --since means, minus infinity for "". Raises UserError."""
    if not text:
        return -inf
    if found := re.fullmatch(r"(\d+)([smhd])", text):
        return time.time() - int(found[1]) * UNITS[found[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise UserError(f"--since must be a time such as 10m, 2h or 2026-11-22T14:05, got {text}.") from None


@lru_cache(maxsize=16)
def _seconds(stamp: bytes) -> float:
    """Return the time at the head of a line, as `time.time()`."""
    try:
        return datetime.fromisoformat(stamp.decode()).timestamp()
    except ValueError:  # the line has no time or a wrong one
        return 0.0


# Reading and merging --------------------------------------------------------------------------------------------------


class LogReader:
    """A reader of a file `rank-N.log`. It reads the whole file, or its last `tail` bytes, and later what was added."""

    def __init__(self, path: Path, *, tail: int | None) -> None:
        self.path, self.rank, self._offset = path, int(path.stem.removeprefix("rank-")), 0
        self._stamp = self._host = b""  # time and host of the last line
        if tail is not None and (size := path.stat().st_size) > tail:
            with path.open("rb") as file:
                file.seek(size - tail)
                file.readline()  # skip the rest of a line
                self._offset = file.tell()

    def records(self, *, whole: bool, first_s: float) -> Iterator[Record]:
        """Yield what was not read yet, from the time `first_s` on. `whole`: include a last line that has no end yet."""
        number = 0
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < self._offset:
                self._offset = 0  # it is a new file, as after --fresh
            file.seek(self._offset)
            for line in file:
                if not (whole or line.endswith(b"\n")):
                    break  # the line is still being written
                self._offset += len(line)
                number += 1
                if found := HEAD.match(line):
                    number = number if found[1] == self._stamp else 0
                    self._stamp, self._host = found.groups()
                if _seconds(self._stamp) >= first_s:
                    text = line[found.end() if found else 0 :].rstrip(b"\n")
                    yield Record(self._stamp, number, self.rank, self._host, text)


def merged(logs: Iterable[Iterator[Record]]) -> Iterator[Sequence[Record]]:
    """Yield all ranks' records by time. Equal lines that several ranks wrote at about the same time are one item."""
    following = {log: record for log in logs if (record := next(log, None))}
    while following:
        first = min(following.values())
        until_s = _seconds(first.stamp) + SAME_S
        alike = {log: record for log, record in following.items()
                 if record.text == first.text and _seconds(record.stamp) <= until_s}
        yield sorted(alike.values(), key=lambda record: record.rank)
        for log in alike:
            if record := next(log, None):
                following[log] = record
            else:
                del following[log]


def _as_text(alike: Sequence[Record]) -> bytes:
    """Return a line such as b"2026-11-22T14:05:00 rank 3 on node1: saved". Several hosts are not named."""
    hosts = {record.host for record in alike}
    host = b" on " + alike[0].host if len(hosts) == 1 and alike[0].host else b""
    who = f"rank{'s' if len(alike) > 1 else ''} {ranges(record.rank for record in alike)}".encode()
    return b"%b %b%b: %b\n" % (min(alike).stamp, who, host, alike[0].text)


def _as_json(alike: Sequence[Record]) -> bytes:
    text, hosts = alike[0].text.decode(errors="replace"), [record.host.decode(errors="replace") for record in alike]
    ranks, stamp = [record.rank for record in alike], min(alike).stamp.decode()
    return json.dumps({"time": stamp, "ranks": ranks, "hosts": hosts, "text": text}).encode() + b"\n"
