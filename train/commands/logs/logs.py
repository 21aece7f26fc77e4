"""What all ranks of a run wrote, by time: the command `logs`. No torch here.

It only reads the files `logs/rank-N.log`, so it works while the run trains, from another terminal, and for any script
that `run` has started. Its memory does not depend on the size of the files.
"""

import os
import re
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path

from rankup.env.rank_env import ranges
from rankup.errors import UserError
from train.commands.logs.merge import Line, Who, merge
from train.commands.logs.rank_log import RankLog
from train.config.options import LogsOptions
from train.process.context import Context, runs_folder

POLL_S = 1.0  # of --follow: equal lines of several ranks have come by then, mostly
RECENT_S = 60  # --follow begins so long before the newest line: all of a long run would be in the way
WRITE_SIZE = 1 << 16
COLOURS = (36, 33, 32, 35, 34, 31)  # of the ranks, in turn
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def logs(context: Context, given: LogsOptions) -> None:
    """Print the lines of a run; with `given.follow` until a signal ends the process.

    Raises UserError where no such run has logs, and where --rank or --since can't be understood.
    """
    wanted = wanted_ranks(given.rank)
    since = first_stamp(given.since, now=datetime.now())
    run = RunLogs(find_logs(runs_folder(context.config), given.run), wanted)
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    with closing(run):
        run.seek(_earlier(run.newest(), RECENT_S) if given.follow and not since else since)
        try:
            _write(_labelled(run.lines(whole=not given.follow), colour=colour))
            while given.follow:
                time.sleep(POLL_S)
                _write(_labelled(run.lines(whole=False), colour=colour))
        except BrokenPipeError:  # the reader has had enough, as `head` has
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class RunLogs:
    """The logs of all wanted ranks of a run, also of those that begin to write later."""

    def __init__(self, folder: Path, wanted: Collection[int]) -> None:
        """`wanted`: ranks; none stands for all."""
        self._folder, self._wanted = folder, wanted
        self._logs: dict[int, RankLog] = {}
        self._look()

    def _look(self) -> None:
        for rank, path in _files(self._folder).items():
            if rank not in self._logs and (not self._wanted or rank in self._wanted):
                self._logs[rank] = RankLog(path, rank)

    def newest(self) -> bytes:
        """The newest time in any of them, or b""."""
        return max((log.last_stamp() for log in self._logs.values()), default=b"")

    def seek(self, since: bytes) -> None:
        """Leave out what is older than the time `since`."""
        for log in self._logs.values():
            log.seek(since)

    def lines(self, *, whole: bool) -> Iterator[Line]:
        """What was not read yet. `whole`: also the last line of a file, if it has no end yet."""
        self._look()
        return merge([log.blocks(whole=whole) for _, log in sorted(self._logs.items())])

    def close(self) -> None:
        """Close the files."""
        for log in self._logs.values():
            log.close()


def find_logs(run_dir: Path, run: str) -> Path:
    """The folder with the logs of a run: `run` is its name or folder; "" stands for the one that wrote last."""
    if run:
        places = [Path(run_dir, run, "logs"), Path(run, "logs"), Path(run)]
        found = [place for place in places if _files(place)]
        if not found:
            raise UserError(f"RUN must be a run with logs/rank-N.log, got {run}.{_runs_there(run_dir)}")
        return found[0]
    newest = max(_runs(run_dir), key=lambda folder: max(path.stat().st_mtime for path in _files(folder).values()),
                 default=None)
    if newest is None:
        raise UserError(f"no run with logs was found in {run_dir}. Name its folder, or set --run-dir.")
    return newest


def _runs(run_dir: Path) -> list[Path]:
    return [folder for folder in run_dir.glob("*/logs") if _files(folder)]


def _runs_there(run_dir: Path) -> str:
    names = sorted(folder.parent.name for folder in _runs(run_dir))
    return f" In {run_dir} there are {', '.join(names[:20])}." if names else f" There are no runs in {run_dir}."


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
    spans = re.fullmatch(r"(?:\d+[smhd])+", text)
    try:
        if spans:
            seconds = sum(int(number) * UNITS_S[unit] for number, unit in re.findall(r"(\d+)([smhd])", text))
            moment = now - timedelta(seconds=seconds)
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


def _earlier(stamp: bytes, seconds: float) -> bytes:
    try:  # b"" where no line has a time
        return _stamp(datetime.fromisoformat(stamp.decode()) - timedelta(seconds=seconds))
    except (ValueError, OverflowError):
        return b""


def _labelled(lines: Iterable[Line], *, colour: bool) -> Iterator[bytes]:
    stamp, label = b"", b""
    who: Who = ()
    for line in lines:
        if line.stamp != stamp or line.who != who:
            stamp, who, text = line
            label = b"%b %b" % (stamp, _label(who, colour)) if stamp else _label(who, colour)
        text = line.text
        if b"\r" in text:  # a progress bar writes over itself: only its last state would be left on a terminal
            text = b"\n".join(part.rstrip(b"\r").rpartition(b"\r")[2] for part in text.split(b"\n"))
        yield b"%b%b\n" % (label, text.replace(b"\n", b"\n" + label) if b"\n" in text else text)


@lru_cache(maxsize=4096)
def _label(who: Who, colour: bool) -> bytes:
    """b"rank 3 on node1: "; several hosts are not named."""
    hosts = {host for _, host in who}
    ranks = f"rank{'s' if len(who) > 1 else ''} {ranges(rank for rank, _ in who)}".encode()
    label = ranks + (b" on " + next(iter(hosts)) if len(hosts) == 1 and b"" not in hosts else b"") + b":"
    if colour:
        number = 1 if len(who) > 1 else COLOURS[who[0][0] % len(COLOURS)]
        label = b"\x1b[%dm%b\x1b[0m" % (number, label)
    return label + b" "


def _write(parts: Iterable[bytes]) -> None:
    """To standard output, in pieces of some size: one write for each line would take longer than everything else."""
    waiting: list[bytes] = []
    size = 0
    for part in parts:
        waiting.append(part)
        size += len(part)
        if size >= WRITE_SIZE:
            sys.stdout.buffer.write(b"".join(waiting))
            waiting, size = [], 0
    sys.stdout.buffer.write(b"".join(waiting))
    sys.stdout.buffer.flush()
