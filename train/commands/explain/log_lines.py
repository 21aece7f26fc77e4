"""The lines of a log, and who wrote each of them. No torch here.

A log is read line by line, so its size does not matter: one of 10 GB needs no more memory than one of 10 KB.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.process.status import read_json

MAX_LINE = 1500  # characters: the rest of a longer line is not looked at
MAX_PREFIXES = 5  # docker compose, a time stamp, srun's label, torchrun's and ours have been seen on one line


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line without the prefixes that launchers and loggers put before it. The prefixes say who wrote the line."""

    text: str
    rank: int | None = None
    host: str = ""
    source: str = ""  # lines of one source belong together, such as the lines of a traceback


COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
DIGITS = "0123456789"
# The characters that a prefix may begin with, and its pattern. The first test is cheap and spares most of the patterns.
# Several prefixes may follow each other: the innermost one knows best who wrote the line.
PREFIXES = [
    (begin, re.compile(pattern))
    for begin, pattern in (
        ("[", r"\[(?P<host>[\w.-]+) r(?P<rank>\d+)/\d+\] ?"),  # ours, on the terminal
        (DIGITS, r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d (?P<host>[\w.-]+) r(?P<rank>\d+) "),  # ours, in logs/rank-N.log
        ("[", r"\[(?:\w*?)(?:default|rank)(?P<rank>\d+)\]:\s?"),  # torchrun's --tee, and torch's hook for exceptions
        ("[", r"\[pod/(?P<host>[\w.-]+)/[\w.-]+\] "),  # kubectl logs --prefix
        ("", r"(?P<host>[\w.-]{1,80})\s*\| "),  # docker compose
        (DIGITS, r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[.,\d]*(?:Z|[+-]\d\d:?\d\d) "),  # time stamps of docker and kubectl
        (DIGITS + " ", r"\s{0,3}(?P<rank>\d{1,5}): "),  # srun --label
    )
]


def split_prefixes(text: str) -> LogLine:
    """Take the prefixes off a line."""
    rest = text[:MAX_LINE].rstrip("\r\n")
    rest = COLOUR.sub("", rest) if "\x1b" in rest else rest
    rank, host, prefixed = None, "", False
    for _ in range(MAX_PREFIXES):
        piped = "| " in rest[:90]
        candidates = [pattern for begin, pattern in PREFIXES if (rest[:1] in begin if begin else piped)]
        found = next(filter(None, (pattern.match(rest) for pattern in candidates)), None)
        if found is None or not rest:
            break
        names = found.groupdict()
        rank = int(names["rank"]) if names.get("rank") else rank
        host = names.get("host") or host
        prefixed = True
        rest = rest[found.end() :]
    return LogLine(rest, rank, host, f"{rank} {host}" if prefixed else "")


def read_log(path: Path) -> Iterator[str]:
    """The lines of a log file, of standard input ("-"), or of a run's directory.

    Of a directory: how each rank ended in the last attempt, then what its log says of that attempt. Bytes that are not
    UTF-8 become question marks. Raises OSError if the file can't be read.
    """
    if path.is_dir():
        yield from _read_run(path)
        return
    file_or_number = sys.stdin.fileno() if str(path) == "-" else path
    with open(file_or_number, encoding="utf-8", errors="replace", closefd=str(path) != "-") as file:
        # A size for each readline: a file without line ends would otherwise be read into memory as a whole
        yield from iter(lambda: file.readline(1 << 16), "")


def _read_run(directory: Path) -> Iterator[str]:
    status = _read_object(directory / "status.json")
    if status.get("state") == "finished":
        return  # whatever went wrong in earlier attempts was overcome
    attempt = str(status.get("attempt", ""))
    began = re.match(r"(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)(\d\d)", attempt)
    since = "{}-{}-{}T{}:{}:{}".format(*began.groups()) if began else ""
    for path in sorted((directory / "status" / attempt).glob("rank-*.json")) if attempt else []:
        end = _read_object(path)
        if end.get("state") == "failed":
            # A user's mistake is marked as on the terminal
            text = f"error: {end.get('why')}" if end.get("code") == 2 else str(end.get("why"))
            yield f"[{end.get('host')} r{end.get('rank')}/{status.get('world_size')}] {text}\n"
    for path in sorted((directory / "logs").glob("rank-*.log")):
        # Logs are appended to; each line begins with its time, and ISO times compare as text
        yield from (line for line in read_log(path) if line[:19] >= since)


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one if there is none, since a failed run may have left anything."""
    found = read_json(path)
    return found if isinstance(found, dict) else {}
