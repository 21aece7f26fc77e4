"""Which files hold the logs of a job: anybody's files and folders, and runs of this program. No torch here.

A log is read line by line, so its size does not matter: one of 10 GB needs no more memory than one of 10 KB.
"""

import contextlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rankup.errors import ConfigError
from rankup.places.files import read_json

MAX_FILES = 10_000
STDIN = "-"
# slurm-7.out, job.e123 of PBS, worker.log.1 of logrotate; a name without a dot may be one too
LOG_NAME = re.compile(r"[^.]+|.*\.(?:log|out|err|txt|stdout|stderr|[oe]\d+)(?:\.\d+)?")
RANK_NAME = re.compile(r"rank[-_.]?(\d+)", re.IGNORECASE)
# LOG_DIR/ID_RANDOM/attempt_0/LOCAL_RANK/stderr.log, as torchrun writes it. Beside the ranks' folders it keeps copies of
# what it showed: filtered_stdout.log
TORCHRUN_FILE = re.compile(r"(?P<job>.*/|)attempt_(?P<attempt>\d+)/(?P<rank>\d+)/[^/]+")
TORCHRUN_ERROR = "error.json"


@dataclass(frozen=True, slots=True)
class LogFile:
    """A file, and who wrote those of its lines that do not say so themselves. `name`: as messages call it."""

    path: Path
    name: str = ""
    rank: int | None = None
    host: str = ""
    since: str = ""  # a time as our logs have it: what is older belongs to an earlier attempt
    ends: tuple[str, ...] = ()  # in place of a file: how the ranks of a run ended, as `status/` has it

    def lines(self) -> Iterator[str]:
        """Its lines. Bytes that are not UTF-8 become question marks. Raises OSError."""
        if self.ends or self.path.name == TORCHRUN_ERROR:
            yield from self.ends or _error_lines(self.path)
            return
        is_input = str(self.path) == STDIN
        file_or_number = sys.stdin.fileno() if is_input else self.path
        with open(file_or_number, encoding="utf-8", errors="replace", closefd=not is_input, newline="\n") as file:
            belongs = not self.since
            # A size for each readline: a file without line ends would otherwise be read into memory as a whole
            for line in iter(lambda: file.readline(1 << 16), ""):
                if self.since and re.match(r"\d{4}-\d\d-\d\dT", line):
                    belongs = line[:19] >= self.since  # ISO times compare as text
                if belongs:
                    # A progress bar writes over itself: what a terminal would show in the end
                    yield line.rstrip("\r\n").rpartition("\r")[2] if "\r" in line else line


def find_files(paths: Sequence[Path], *, run_dir: Path = Path()) -> list[LogFile]:
    """The logs at these places: files, "-", folders of logs, runs, and names of runs in `run_dir`.

    Raises ConfigError where there is nothing to read.
    """
    found: list[LogFile] = []
    for path in paths:
        place = run_dir / path if not path.exists() and (run_dir / path).is_dir() else path
        if not place.is_dir():
            found.append(LogFile(place, name=str(path)))
        elif (place / "status.json").is_file() or [*place.glob("logs/rank-*.log")]:
            found += _of_run(place)
        elif files := _of_folder(place):
            found += files
        else:
            raise ConfigError(f"explain needs a folder with logs (*.log, *.out, *.err, *.txt), got {place}.")
    return [replace(file, name="") for file in found] if len(found) == 1 else found


def _of_run(directory: Path) -> list[LogFile]:
    """How each rank ended in the last attempt, then what its log says of that attempt."""
    status = _read_object(directory / "status.json")
    if status.get("state") == "finished":
        return []  # whatever went wrong in earlier attempts was overcome
    attempt = str(status.get("attempt", ""))
    began = re.match(r"(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)(\d\d)", attempt)
    since = "{}-{}-{}T{}:{}:{}".format(*began.groups()) if began else ""
    ends = []
    for path in sorted((directory / "status" / attempt).glob("rank-*.json")) if attempt else []:
        end = _read_object(path)
        if end.get("state") == "failed":
            # A user's mistake is marked as on the terminal
            code, why = end.get("code"), end.get("why")
            text = f"error: {why}" if code == 2 else f"{why} (exit code {code})"
            ends.append(f"[{end.get('host')} r{end.get('rank')}/{status.get('world_size')}] {text}\n")
    logs = []
    for path in sorted((directory / "logs").glob("rank-*.log")):
        rank = RANK_NAME.search(path.name)
        logs.append(LogFile(path, path.name, int(rank[1]) if rank else None, since=since))
    return [LogFile(directory, "status", ends=tuple(ends)), *logs] if ends else logs


def _of_folder(folder: Path) -> list[LogFile]:
    """All logs below a folder; of torchrun's attempts only the last."""
    names = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*"))[: MAX_FILES] if path.is_file()}
    attempts: dict[str, int] = {}
    for name in names:
        if match := TORCHRUN_FILE.fullmatch(name):
            attempts[match["job"]] = max(attempts.get(match["job"], 0), int(match["attempt"]))
    found = []
    for name, path in names.items():
        match = TORCHRUN_FILE.fullmatch(name)
        if match and int(match["attempt"]) == attempts[match["job"]]:
            # Its folders count the ranks of one node. Several nodes' are told apart by the folders' names alone
            single = len(attempts) == 1
            found.append(LogFile(path, name, int(match["rank"]) if single else None, "" if single else name))
        elif not match and LOG_NAME.fullmatch(path.name) and "filtered_" not in path.name and _is_text(path):
            rank = RANK_NAME.search(path.name)
            found.append(LogFile(path, name, int(rank[1]) if rank else None, "" if rank else path.name.split(".")[0]))
    return found


def _is_text(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return b"\0" not in file.read(1024)
    except OSError:
        return True  # whoever reads it gets the reason


def _error_lines(path: Path) -> Iterator[str]:
    """The traceback that torch's `@record` keeps, with its time."""
    message = _read_object(path).get("message")
    more = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
        yield f"{datetime.fromtimestamp(int(more['timestamp'])).isoformat()}\n"
    text = more.get("py_callstack") or (message if isinstance(message, str) else json.dumps(message))
    yield from (f"{line}\n" for line in str(text).splitlines())


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one if there is none, since a failed run may have left anything."""
    found = read_json(path)
    return found if isinstance(found, dict) else {}
