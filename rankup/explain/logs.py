"""Find the log files of a job, in any files and folders or in a run, and find out who wrote each line and when.

A log is read line by line, so a log of 10 GB needs no more memory than a log of 10 KB.
"""

import contextlib
import json
import re
import sys
import tomllib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from rankup.errors import UserError
from rankup.observe.logs import rank_logs
from rankup.places.files import read_json

# slurm-7.out, job.e123 of PBS, worker.log.1 of logrotate; a name without a dot may be a log too
LOG_NAME = re.compile(r"[^.]+|.*\.(?:log|out|err|txt|stdout|stderr|[oe]\d+)(?:\.\d+)?")
RANK_NAME = re.compile(r"rank[-_.]?(\d+)", re.IGNORECASE)
# torchrun writes LOG_DIR/ID_RANDOM/attempt_0/LOCAL_RANK/stderr.log. Next to the folders of the ranks it also writes
# filtered_stdout.log, a copy of what it printed
TORCHRUN_FILE = re.compile(r"(?P<job>.*/|)attempt_(?P<attempt>\d+)/(?P<rank>\d+)/[^/]+\.log")
MAX_SEEN = 300  # quote at most this many characters of a line
MAX_LINE = 1500  # characters; the rest of a longer line is ignored
MAX_PREFIXES = 5  # a line has at most this many
MAX_HEADER = 160  # characters; a logger's header is shorter
MAX_HEADERS = 8  # remember this many
COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
LINES = tomllib.loads(Path(__file__).with_name("lines.toml").read_text(encoding="utf-8"))
# Kinds of lines that are not faults
LINE = {kind: re.compile("|".join(patterns)) for kind, patterns in LINES["kinds"].items()}
PREFIX = re.compile("|".join(LINES["prefixes"].values()))
SPEAKERS = [re.compile(each) for each in LINES["speakers"].values()]
SPEAKER_WORDS = ("ank", "RANK", "ip=", "host", "node", "pod=", "gpu")
FIRST_WORD = re.compile(LINES["first_word"]["who"])
JSON = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in LINES["json"].items()}
BEGIN = "Traceback (most recent call last)"
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
    named: bool = False  # words in the line name the rank: lines without any prefix may belong to the same record
    bare: bool = False  # the line has no prefix


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
        if end.get("state") == "finished":  # only all ends together show that it ended too early
            end = status.get("ranks", {}).get(str(end.get("rank")), end)
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


def group_names(found: Mapping[str, str | None]) -> dict[str, str]:
    """Return what the groups of a pattern have found. The number after a name only makes the name unique."""
    return {name.rstrip("0123456789"): value for name, value in found.items() if value}


def who_in(found: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the rank and the host that the groups of a pattern have found."""
    named = group_names(found)
    return {key: int(named[key]) if key == "rank" else named[key] for key in ("rank", "host") if key in named}


def split_prefixes(text: str, headers: Iterable[re.Pattern[str]] = ()) -> LogLine:
    """Remove the prefixes from a line, and find in them who wrote it. `headers`: those of loggers."""
    whole = rest = COLOUR.sub("", text[:MAX_LINE].rstrip("\r\n"))
    who: dict[str, Any] = {}
    for _ in range(MAX_PREFIXES):
        if not (found := PREFIX.match(rest)):
            break
        who |= who_in(found.groupdict())
        rest = rest[found.end() :]
    header = next((found for each in headers if (found := each.match(rest))), None)
    head, rest = (header[0], rest[header.end() :]) if header else (rest[:MAX_HEADER].partition(BEGIN)[0], rest)
    said = who_in(first.groupdict()) if header and (first := FIRST_WORD.match(head)) else {}
    if any(word in head for word in SPEAKER_WORDS):  # the patterns are slow
        for each in SPEAKERS:
            said = who_in(found.groupdict()) | said if (found := each.search(head)) else said
    rank, host = (who.get(key, said.get(key)) for key in ("rank", "host"))
    return LogLine(rest, rank, host or "", f"{rank} {host or ''}", bool(said.keys() - who.keys()), rest == whole)


NOBODY = split_prefixes("").source


class Headers:
    """What the loggers of one log write before each line. Only the first line of a traceback shows it, because all
    programs write the same words there."""

    def __init__(self) -> None:
        self._known: deque[re.Pattern[str]] = deque(maxlen=MAX_HEADERS)

    def split(self, raw: str) -> Iterator[LogLine]:
        """Yield the lines in a line of a log, each without its prefixes."""
        for text in lines_in(raw):
            line = split_prefixes(text, self._known)
            if BEGIN in line.text and (header := _header_of(line.text.partition(BEGIN)[0])):
                self._known.appendleft(re.compile(header))
                line = split_prefixes(text, self._known)
            yield line


def _header_of(before: str) -> str:
    """Return a pattern for a header. The next lines have other digits and spaces in it, such as in a time."""
    if not re.search(r"[^\sA-Za-z]|\b[A-Z]{4,}\b", before) or not re.search(r"\w", before):
        return ""  # only words, as in "Original Traceback", or the box that the library rich draws
    indent = before[: len(before) - len(before.lstrip())]
    words = r"\s+".join(re.sub(r"\d+", r"\\d+", re.escape(word)) for word in before.split())
    return f"{indent}{words}(?:{before[len(before.rstrip()) :]}|$)"


def lines_in(raw: str) -> list[str]:
    """Return the texts in a line of a log: those of a JSON object, and the lines of a traceback in one line."""
    if raw.startswith("{") and raw.rstrip().endswith("}"):
        with contextlib.suppress(ValueError):
            return [line for text in _texts(json.loads(raw)) for line in lines_in(text)]
    if "\n" in raw.rstrip("\n"):
        return raw.rstrip("\n").split("\n")
    return raw.replace('\\"', '"').split("\\n") if f"{BEGIN}:\\n" in raw else [raw]


def _flat(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in record.items():
        yield from _flat(value) if isinstance(value, dict) else [(key, str(value))]


def _texts(record: Mapping[str, Any]) -> list[str]:
    """Return the messages and tracebacks in a record of a logger that writes JSON, each line under a prefix of ours."""
    flat = [*_flat(record)]
    of = {name: [value for key, value in flat if pattern.fullmatch(key)] for name, pattern in JSON.items()}
    prefix = f"[rank{of['rank'][0]}]: " if of["rank"] and of["rank"][0].isdigit() else ""
    prefix = f"[pod/{of['host'][0]}/-] {prefix}" if of["host"] else prefix
    prefix += "".join(f"{level.upper()} " for level in of["level"][:1] if level.lower() in ("debug", "info", "warning"))
    return [f"{prefix}{line}" for text in of["text"] if text for line in text.rstrip("\n").split("\n")]


def time_of(text: str) -> float | None:
    """Return the time in a line, in seconds since 1970. A time without a zone counts as this machine's local time."""
    for pattern, iso in TIMES:
        if found := pattern.search(text, 0, 160):
            with contextlib.suppress(ValueError):
                return datetime.fromisoformat(found.expand(iso).replace("YEAR", f"{datetime.now().year}")).timestamp()
    return None
