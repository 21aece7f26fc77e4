"""Find the log files of a job, in any files and folders or in a run, and find out who wrote each line and when.

A log is read line by line, so a log of 10 GB needs no more memory than a log of 10 KB.
"""

import contextlib
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from rankup.errors import UserError
from rankup.observe.logs import rank_logs
from rankup.places.files import read_json

# slurm-7.out, job.e123 of PBS, worker.log.1 of logrotate; a name without a dot may be a log too
LOG_NAME = re.compile(r"[^.]+|.*\.(?:log|out|err|txt|stdout|stderr|[oe]\d+)(?:\.\d+)?")
RANK_NAME = re.compile(r"rank[-_.]?(\d+)", re.IGNORECASE)
# torchrun writes LOG_DIR/ID_RANDOM/attempt_0/LOCAL_RANK/stderr.log. Next to the folders of the ranks it also writes
# filtered_stdout.log, a copy of what it printed
TORCHRUN_FILE = re.compile(r"(?P<job>.*/|)attempt_(?P<attempt>\d+)/(?P<rank>\d+)/[^/]+\.log")
MAX_LINE = 1500  # characters; the rest of a longer line is ignored
MAX_PREFIXES = 5  # a line has at most this many
COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
LINES = tomllib.loads(Path(__file__).with_name("lines.toml").read_text(encoding="utf-8"))
PREFIX = re.compile("|".join(LINES["prefixes"].values()))
CLOCK = re.compile(r"\d\d:\d\d:\d\d")
TIMES = [(re.compile(each["pattern"]), each["iso"]) for each in LINES["times"].values()]


class Log(NamedTuple):
    """The lines of a log. `name`: its name in messages. `rank`, `host`: who wrote the lines that do not say it
    themselves. `failed`: each line says why a rank failed."""

    lines: Iterable[str]
    name: str = ""
    rank: int | None = None
    host: str = ""
    failed: bool = False


class LogLine(NamedTuple):
    """A line without the prefixes of launchers and loggers, and what the prefixes say about who wrote it."""

    text: str
    rank: int | None = None
    host: str = ""
    source: str = ""  # lines with the same source belong together, such as the lines of a traceback


def read_lines(path: Path, *, since: str = "") -> Iterator[str]:
    """Yield the lines of a file, or of standard input ("-"). Bytes that are not UTF-8 become question marks.

    `since`: an ISO time. Skip older lines in logs of rankup, because they belong to an earlier attempt. Raises OSError.
    """
    is_input = str(path) == "-"
    file_or_number = sys.stdin.fileno() if is_input else path
    with open(file_or_number, encoding="utf-8", errors="replace", closefd=not is_input, newline="\n") as file:
        belongs = not since
        # Limit each readline: otherwise it would read a file without line ends into memory as a whole
        for line in iter(lambda: file.readline(1 << 16), ""):
            if since and re.match(r"\d{4}-\d\d-\d\dT", line):
                belongs = line[:19] >= since  # ISO times compare as text
            if belongs:
                # A progress bar overwrites its line after "\r": keep what a terminal would show in the end
                yield line.rstrip("\r\n").rpartition("\r")[2] if "\r" in line else line


def find_logs(paths: Sequence[Path], *, run_dir: Path = Path()) -> list[Log]:
    """Find the logs in files, "-", folders of logs, runs, and names of runs in `run_dir`. Raises UserError."""
    found: list[Log] = []
    for path in paths:
        place = run_dir / path if not path.exists() and (run_dir / path).is_dir() else path
        if not place.is_dir():
            found.append(Log(read_lines(place), str(path)))
        elif (place / "status.json").is_file() or rank_logs(place):
            found += _of_run(place)
        elif logs := [*_of_folder(place)]:
            found += logs
        else:
            raise UserError(f"explain needs a folder with logs (*.log, *.out, *.err, *.txt), got {place}.")
    return [found[0]._replace(name="")] if len(found) == 1 else found


def _of_run(directory: Path) -> Iterator[Log]:
    """Yield why ranks failed in the last attempt, and then what the log of each rank says about that attempt."""
    status = read_json(directory / "status.json")
    if status.get("state") == "finished":
        return  # the run has recovered from all earlier failures
    attempt, ends = str(status.get("attempt", "")), []
    folder = directory / "status" / attempt
    for end in map(read_json, sorted(folder.glob("rank-*.json"))):
        if end.get("state") == "failed" and not end.get("told"):
            # Write a user's mistake as the terminal shows it
            code, why = end.get("code"), end.get("why")
            text = f"error: {why}" if code == 2 else f"{why} (exit code {code})"
            ends.append(f"[{end.get('host')} r{end.get('rank')}/{status.get('world_size')}] {text}\n")
    if ends:
        yield Log(ends, "status", failed=True)
    began = re.match(r"(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)(\d\d)", attempt)
    since = "{}-{}-{}T{}:{}:{}".format(*began.groups()) if began else ""
    for path in folder.glob("progress-*.json"):  # one for each start of the ranks, whose time is in its name
        if found := re.fullmatch(r"progress-(\d+)\.\d+", path.stem):
            since = max(since, datetime.fromtimestamp(int(found[1])).isoformat())
    for path in rank_logs(directory):
        yield Log(read_lines(path, since=since), path.name, _rank_in(path.name))


def _of_folder(folder: Path) -> Iterator[Log]:
    """Yield all logs below a folder. Of torchrun's attempts, yield only the last."""
    names = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    of_torchrun = {name: match for name in names if (match := TORCHRUN_FILE.fullmatch(name))}
    last: dict[str, int] = {}
    for match in of_torchrun.values():
        last[match["job"]] = max(last.get(match["job"], 0), int(match["attempt"]))
    for name, path in names.items():
        if found := of_torchrun.get(name):
            # The folders have local ranks. With several nodes only the names of the folders tell the ranks apart
            if int(found["attempt"]) == last[found["job"]]:
                rank, host = (int(found["rank"]), "") if len(last) == 1 else (None, name)
                yield Log(read_lines(path), name, rank, host)
        elif LOG_NAME.fullmatch(path.name) and "filtered_" not in path.name:
            rank = _rank_in(path.name)
            yield Log(read_lines(path), name, rank, path.name.split(".")[0] if rank is None else "")


def _rank_in(name: str) -> int | None:
    rank = RANK_NAME.search(name)
    return int(rank[1]) if rank else None


def split_prefixes(text: str) -> LogLine:
    """Remove the prefixes from a line, and find in them who wrote it."""
    rest = COLOUR.sub("", text[:MAX_LINE].rstrip("\r\n"))
    rank, host = None, ""
    for _ in range(MAX_PREFIXES):
        if not (found := PREFIX.match(rest)):
            break
        for name, value in found.groupdict().items():
            if value and name.startswith("rank"):
                rank = int(value)
            elif value:
                host = value
        rest = rest[found.end() :]
    return LogLine(rest, rank, host, f"{rank} {host}")


def time_of(text: str) -> float | None:
    """Return the time in a line, in seconds since 1970. A time without a zone counts as this machine's local time."""
    for pattern, iso in TIMES:
        if found := pattern.search(text, 0, 160):
            with contextlib.suppress(ValueError):
                return datetime.fromisoformat(found.expand(iso).replace("YEAR", f"{datetime.now().year}")).timestamp()
    return None
