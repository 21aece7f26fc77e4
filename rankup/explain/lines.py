"""The lines of a log: who wrote each of them, and when."""

import re
from dataclasses import dataclass
from datetime import datetime, timedelta

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
        ("[", r"\[\d+,(?P<rank>\d+)\]<std(?:err|out)>:\s?"),  # mpirun --tag-output
        ("MTWFS", r"\w{3} \w{3} [ \d]\d [\d:]{8} \d{4}\[(?P<rank>\d+)\]<std(?:err|out)>:\s?"),  # horovodrun
        ("(", r"\(\w+ pid=\d+(?:, ip=(?P<host>[\w.:]+))?\) "),  # Ray
    )
]
CLOCK = re.compile(r"\d\d:\d\d:\d\d")
# Where in a line a time is, by who writes it so. glog and torch leave out the year
TIMES = (
    r"(?P<year>\d{4})[-/](?P<month>\d\d)[-/](?P<day>\d\d)[T _](?P<clock>\d\d:\d\d:\d\d)(?P<part>[.,]\d{1,6})?\d*"
    r"(?P<zone>Z|[+-]\d\d:?\d\d)?",
    r"(?P<month>\d\d)/(?P<day>\d\d)/(?P<year>\d{4}) (?P<clock>\d\d:\d\d:\d\d)(?P<part>(?P<zone>))",  # transformers
    r"\b[IWEF](?P<month>\d\d?)(?P<day>\d\d) (?P<clock>\d\d:\d\d:\d\d)(?P<part>\.\d{1,6})?\d*(?P<year>)(?P<zone>)",
)
TIME_PATTERNS = [re.compile(pattern) for pattern in TIMES]


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


def has_time(text: str) -> bool:
    """Whether `time_of` may find a time in this line; quick."""
    return CLOCK.search(text, 0, 120) is not None


def time_of(text: str) -> float | None:
    """The time in a line, in seconds since 1970; a time without a zone is taken for this machine's."""
    for pattern in TIME_PATTERNS:
        if found := pattern.search(text, 0, 160):
            now = datetime.now()
            zone = (found["zone"] or "").replace("Z", "+00:00")
            try:
                date = f"{found['year'] or now.year}-{found['month']}-{found['day']}T{found['clock']}"
                time = datetime.fromisoformat(f"{date}{zone}")
                # A line of last December, read in January
                if not found["year"] and time > now + timedelta(days=1):
                    time = time.replace(year=now.year - 1)
            except ValueError:
                continue
            return time.timestamp() + float("0." + (found["part"] or ".0")[1:])
    return None
