"""Finds the files with a job's logs, who wrote each line, and when: anybody's files and folders, and runs.

A log is read line by line, so its size does not matter: one of 10 GB needs no more memory than one of 10 KB.
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

# slurm-7.out, job.e123 of PBS, worker.log.1 of logrotate; a name without a dot may be one too
LOG_NAME = re.compile(r"[^.]+|.*\.(?:log|out|err|txt|stdout|stderr|[oe]\d+)(?:\.\d+)?")
RANK_NAME = re.compile(r"rank[-_.]?(\d+)", re.IGNORECASE)
# LOG_DIR/ID_RANDOM/attempt_0/LOCAL_RANK/stderr.log, as torchrun writes it. Beside the ranks' folders it keeps copies of
# what it showed: filtered_stdout.log
TORCHRUN_FILE = re.compile(r"(?P<job>.*/|)attempt_(?P<attempt>\d+)/(?P<rank>\d+)/[^/]+\.log")
MAX_LINE = 1500  # characters: the rest of a longer line is not looked at
MAX_PREFIXES = 5  # of one line
COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
LINES = tomllib.loads(Path(__file__).with_name("lines.toml").read_text(encoding="utf-8"))
PREFIX = re.compile("|".join(LINES["prefixes"].values()))
CLOCK = re.compile(r"\d\d:\d\d:\d\d")
TIMES = [(re.compile(each["pattern"]), each["iso"]) for each in LINES["times"].values()]


class Log(NamedTuple):
    """Lines, and who wrote those that do not say so themselves. `name`: as messages call it. `failed`: each line says
    why a rank failed."""

    lines: Iterable[str]
    name: str = ""
    rank: int | None = None
    host: str = ""
    failed: bool = False


class LogLine(NamedTuple):
    """A line without the prefixes that launchers and loggers put before it. The prefixes say who wrote the line."""

    text: str
    rank: int | None = None
    host: str = ""
    source: str = ""  # lines of one source belong together, such as the lines of a traceback


def read_lines(path: Path, *, since: str = "") -> Iterator[str]:
    """The lines of a file, or of standard input ("-"). Bytes that are not UTF-8 become question marks. Raises OSError.

    `since`: a time as our logs have it: what is older belongs to an earlier attempt.
    """
    is_input = str(path) == "-"
    file_or_number = sys.stdin.fileno() if is_input else path
    with open(file_or_number, encoding="utf-8", errors="replace", closefd=not is_input, newline="\n") as file:
        belongs = not since
        # A size for each readline: a file without line ends would otherwise be read into memory as a whole
        for line in iter(lambda: file.readline(1 << 16), ""):
            if since and re.match(r"\d{4}-\d\d-\d\dT", line):
                belongs = line[:19] >= since  # ISO times compare as text
            if belongs:
                # A progress bar writes over itself: what a terminal would show in the end
                yield line.rstrip("\r\n").rpartition("\r")[2] if "\r" in line else line


def find_logs(paths: Sequence[Path], *, run_dir: Path = Path()) -> list[Log]:
    """The logs at these places: files, "-", folders of logs, runs, and names of runs in `run_dir`. Raises UserError."""
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
    """How each rank ended in the last attempt, then what its log says of that attempt."""
    status = read_json(directory / "status.json")
    if status.get("state") == "finished":
        return  # whatever went wrong in earlier attempts was overcome
    attempt, ends = str(status.get("attempt", "")), []
    folder = directory / "status" / attempt
    for end in map(read_json, sorted(folder.glob("rank-*.json"))):
        if end.get("state") == "failed" and not end.get("told"):
            # A user's mistake is marked as on the terminal
            code, why = end.get("code"), end.get("why")
            text = f"error: {why}" if code == 2 else f"{why} (exit code {code})"
            ends.append(f"[{end.get('host')} r{end.get('rank')}/{status.get('world_size')}] {text}\n")
    if ends:
        yield Log(ends, "status", failed=True)
    began = re.match(r"(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)(\d\d)", attempt)
    since = "{}-{}-{}T{}:{}:{}".format(*began.groups()) if began else ""
    for path in folder.glob("progress-*.json"):  # of a restart: its id has the time when the job began
        if found := re.fullmatch(r"progress-(\d+)\.\d+", path.stem):
            since = max(since, datetime.fromtimestamp(int(found[1])).isoformat())
    for path in rank_logs(directory):
        yield Log(read_lines(path, since=since), path.name, _rank_in(path.name))


def _of_folder(folder: Path) -> Iterator[Log]:
    """All logs below a folder; of torchrun's attempts only the last."""
    names = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    of_torchrun = {name: match for name in names if (match := TORCHRUN_FILE.fullmatch(name))}
    last: dict[str, int] = {}
    for match in of_torchrun.values():
        last[match["job"]] = max(last.get(match["job"], 0), int(match["attempt"]))
    for name, path in names.items():
        if found := of_torchrun.get(name):
            # Its folders count the ranks of one node. Several nodes' are told apart by the folders' names alone
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
    """Take the prefixes off a line."""
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
    """The time in a line, in seconds since 1970; a time without a zone is taken for this machine's."""
    for pattern, iso in TIMES:
        if found := pattern.search(text, 0, 160):
            with contextlib.suppress(ValueError):
                return datetime.fromisoformat(found.expand(iso).replace("YEAR", f"{datetime.now().year}")).timestamp()
    return None
