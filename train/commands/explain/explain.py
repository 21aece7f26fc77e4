"""What does this log of a failed job say? Known pains by their texts (pains.toml), who has them, and what to do.

The root stands first: out of memory before a killed rank, that before "Connection closed by peer". What is not known is quoted
and never guessed at. No torch; a log is read line by line, so that its size does not matter.
"""

import json
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from train.commands.explain.literals import needed

LINE = 1500  # characters of a line that are looked at
SEEN = 300  # and quoted
KEPT = 500  # findings of one log, at most
HARMLESS = 9
ROOT, NAMED, DIED, WAITED, FOLLOWED = 1, 2, 3, 4, 5  # the orders of pains.toml
UNKNOWN_REMEDY = "The last lines of that traceback say where. It is none of the known pains, so no more is said of it."


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One pain that a log shows. `order`: 1 is the nearest to the root. `rank`, `host`: whom it is about, where that is known."""

    title: str
    seen: str
    line: int
    rank: int | None
    host: str
    why: str
    remedy: str
    order: int
    harmless: bool = False
    name: str = ""  # its entry in pains.toml; "" for an exception that is not known
    times: int = 1


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    order: int
    pattern: re.Pattern[str]
    title: str
    why: str
    remedy: str
    example: str
    doubtful: bool = False  # harmless where nothing else is wrong


@dataclass(frozen=True, slots=True)
class Line:
    """A line without what launchers and loggers put before it, which says who wrote it."""

    text: str
    rank: int | None = None
    host: str = ""
    source: str = ""  # lines of one source follow each other


COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
DIGITS = "0123456789"
# What a prefix begins with, and the prefix. Several may stand after each other: the innermost knows best who wrote the line
PREFIXES = [
    (begin, re.compile(pattern))
    for begin, pattern in (
        ("[", r"\[(?P<host>[\w.-]+) r(?P<rank>\d+)/\d+\] ?"),  # ours
        (DIGITS, r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d (?P<host>[\w.-]+) r(?P<rank>\d+) "),  # ours, in logs/rank-N.log
        ("[", r"\[(?:\w*?)(?:default|rank)(?P<rank>\d+)\]:\s?"),  # torchrun's --tee, and torch's own hook for exceptions
        ("[", r"\[pod/(?P<host>[\w.-]+)/[\w.-]+\] "),  # kubectl logs --prefix
        ("", r"(?P<host>[\w.-]{1,80})\s*\| "),  # docker compose
        (DIGITS, r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[.,\d]*(?:Z|[+-]\d\d:?\d\d) "),  # time stamps of docker and kubectl
        (DIGITS + " ", r"\s{0,3}(?P<rank>\d{1,5}): "),  # srun --label
    )
]
BEGIN = re.compile(r"Traceback \(most recent call last\):|Fatal Python error: ")
CHAIN = re.compile(r"(?:During handling of the above|The above exception was the direct)")
EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?::|$)")
# Not torch's notes and warnings, "[I1121 ..." and "[W1121 ...", which healthy jobs have too
LOOKS_BAD = re.compile(r"(?!\[[IW]\d{4} )(?=.*(?:\b(?i:error|fatal|panic|exception)\b\s*[:\]]|\bFAILED\b|\bcore dumped\b))")


@cache
def known_faults() -> tuple[Fault, ...]:
    """The table, in its order."""
    table = tomllib.loads(Path(__file__).with_name("known_faults.toml").read_text(encoding="utf-8"))
    return tuple(Fault(name=name, **{**entry, "pattern": re.compile(entry["pattern"])}) for name, entry in table.items())


def split(text: str) -> Line:
    """Take the prefixes off a line."""
    rest = text[:LINE].rstrip("\r\n")
    rest = COLOUR.sub("", rest) if "\x1b" in rest else rest
    rank, host, prefixed = None, "", False
    for _ in range(5):
        piped = "| " in rest[:90]
        near = [pattern for begin, pattern in PREFIXES if (rest[:1] in begin if begin else piped)]
        found = next((match for pattern in near if (match := pattern.match(rest))), None)
        if found is None or not rest:
            break
        names = found.groupdict()
        rank = int(names["rank"]) if names.get("rank") else rank
        host = names.get("host") or host
        prefixed = True
        rest = rest[found.end() :]
    return Line(rest, rank, host, f"{rank} {host}" if prefixed else "")


def explain(lines: Iterable[str]) -> list[Diagnosis]:
    """The pains that these lines show, the root first, harmless ones last. Empty: nothing wrong was found."""
    found: dict[tuple[str, int | None, str], Diagnosis] = {}
    traces: dict[str, bool] = {}  # sources in the middle of a traceback
    exceptions: dict[str, Diagnosis] = {}  # of each source, the last one of a chain, if not known
    last_bad: Diagnosis | None = None
    for number, raw in enumerate(lines, 1):
        line = split(raw)
        # A line of source code in a traceback is none of what happened
        known = None if traces.get(line.source) and line.text.startswith("  ") else _known(line, number)
        if known is not None:
            key = (known.name, known.rank, known.host)
            if key in found:
                found[key] = replace(found[key], times=found[key].times + 1)
            elif len(found) < KEPT:
                found[key] = known
        if BEGIN.match(line.text):
            traces[line.source] = True
        elif CHAIN.match(line.text):
            exceptions.pop(line.source, None)
        elif traces.get(line.source) and EXCEPTION.match(line.text):
            traces[line.source] = False
            if known is None and len(exceptions) < KEPT:
                exceptions.setdefault(f"{line.source} {number}" if line.source in exceptions else line.source,
                                      _unknown(line, number))
        elif known is None and LOOKS_BAD.match(line.text) and not traces.get(line.source):
            last_bad = _unknown(line, number)
    diagnoses = _judged([*found.values(), *exceptions.values()])
    if last_bad is not None and all(diagnosis.harmless for diagnosis in diagnoses):
        diagnoses.append(last_bad)
    return sorted(_once(diagnoses), key=lambda d: (d.order, d.line))


def _known(line: Line, number: int) -> Diagnosis | None:
    """The pain nearest to the root that this line shows."""
    worth = {pain for word, pain in _words() if word in line.text}
    matches = [(known_faults()[number], match) for number in worth if (match := known_faults()[number].pattern.search(line.text))]
    if not matches:
        return None
    matches.sort(key=lambda pair: (pair[0].order, known_faults().index(pair[0])))
    pain, match = matches[0]
    groups = {name: value or "" for name, value in match.groupdict().items()}
    # One rank's reason in another's line, "suspected: rank 1 on node1 (MemoryError: )", is the first one's
    told = [(name, value) for _, other in matches for name, value in other.groupdict().items() if value]
    rank = next((int(value) for name, value in told if name.startswith("rank")), line.rank)
    host = next((value for name, value in told if name == "host"), line.host)
    texts = [text.format_map({**groups, "rank": "?" if rank is None else rank}) for text in (pain.title, pain.why, pain.remedy)]
    return Diagnosis(
        title=texts[0], seen=line.text.strip()[:SEEN], line=number, rank=rank, host=host, why=texts[1], remedy=texts[2],
        order=pain.order, harmless=pain.order == HARMLESS, name=pain.name,
    )


@cache
def _words() -> tuple[tuple[str, int], ...]:
    """Strings, and the number of the pain whose texts have one of them: most lines are done with after these."""
    return tuple((word, number) for number, pain in enumerate(known_faults()) for word in needed(pain.pattern.pattern) or {""})


def _judged(diagnoses: list[Diagnosis]) -> list[Diagnosis]:
    """What is a sign of trouble only beside other trouble is harmless alone."""
    doubtful = {pain.name for pain in known_faults() if pain.doubtful}
    if any(not diagnosis.harmless and diagnosis.name not in doubtful for diagnosis in diagnoses):
        return diagnoses
    return [replace(d, harmless=True, order=HARMLESS) if d.name in doubtful else d for d in diagnoses]


def _unknown(line: Line, number: int) -> Diagnosis:
    return Diagnosis(
        title="an error that is not known here", seen=line.text.strip()[:SEEN], line=number, rank=line.rank, host=line.host,
        why="this is the last line of its traceback, or the last that looks like an error.", remedy=UNKNOWN_REMEDY, order=DIED,
    )


def _once(diagnoses: Iterable[Diagnosis]) -> Iterator[Diagnosis]:
    """One pain of many ranks is one finding for each, but what is unknown and says the same is said once a rank."""
    said = set()
    for diagnosis in diagnoses:
        key = (diagnosis.name or diagnosis.seen, diagnosis.rank, diagnosis.host)
        if key not in said:
            said.add(key)
            yield diagnosis


def report(diagnoses: list[Diagnosis]) -> str:
    """For people: the root with its reason and way out, then what else there is, in a line each."""
    wrong = [diagnosis for diagnosis in diagnoses if not diagnosis.harmless]
    harmless = [diagnosis for diagnosis in diagnoses if diagnosis.harmless]
    lines = [] if wrong else ["nothing wrong was found in these lines."]
    if wrong:
        root = wrong[0]
        alike = [d for d in wrong if d.name == root.name and d.name and d.title == root.title]
        lines += [f"{root.title}{_where(alike)} (line {root.line})", f"  seen  {root.seen}", f"  why   {root.why}",
                  f"  mend  {root.remedy}"]
        rest = [d for d in wrong[1:] if d not in alike]
        lines += ["also seen:"] if rest else []
        lines += [f"  {d.title}{_where([d])} (line {d.line}{_times(d)}): {d.remedy}" for d in rest[:8]]
        lines += [f"  and {len(rest) - 8} more"] if len(rest) > 8 else []
    lines += [f"harmless: {d.title} (line {d.line}{_times(d)}): {d.why}" for d in harmless[:5]]
    return "\n".join(lines)


def advice(text: str) -> str:
    """One line on a traceback, where it shows a known pain, or ""."""
    known = [diagnosis for diagnosis in explain(text.splitlines()) if diagnosis.name and not diagnosis.harmless]
    return f"this is: {known[0].title}. {known[0].why} {known[0].remedy}" if known else ""


def _where(diagnoses: list[Diagnosis]) -> str:
    """ ", rank 1 on node1", for all that have it; what the title says is not said twice."""
    ranks = sorted({d.rank for d in diagnoses if d.rank is not None and f"rank {d.rank}" not in d.title})
    hosts = sorted({d.host for d in diagnoses if d.host and f"on {d.host}" not in d.title})
    who = f"rank{'s' if len(ranks) > 1 else ''} {_list(ranks)}" if ranks else ""
    where = f"on {_list(hosts)}" if hosts else ""
    return f", {' '.join(filter(None, [who, where]))}" if who or where else ""


def _list(names: Sequence[object]) -> str:
    return ", ".join(map(str, names[:8])) + (", ..." if len(names) > 8 else "")


def _times(diagnosis: Diagnosis) -> str:
    return f", {diagnosis.times} times" if diagnosis.times > 1 else ""


def read(path: Path) -> Iterator[str]:
    """The lines of a log, of standard input ("-"), or of a run's directory: each rank's end and log of the last attempt.

    Never more than a piece of a file is in memory; bytes that are no text become question marks.
    """
    if path.is_dir():
        yield from _read_run(path)
        return
    name = sys.stdin.fileno() if str(path) == "-" else path
    with open(name, encoding="utf-8", errors="replace", closefd=str(path) != "-") as file:
        yield from iter(lambda: file.readline(1 << 16), "")


def _read_run(directory: Path) -> Iterator[str]:
    status = _json(directory / "status.json")
    if status.get("state") == "finished":
        return  # whatever earlier attempts said is over
    attempt = str(status.get("attempt", ""))
    began = re.match(r"(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)(\d\d)", attempt)
    since = "{}-{}-{}T{}:{}:{}".format(*began.groups()) if began else ""
    for path in sorted((directory / "status" / attempt).glob("rank-*.json")) if attempt else []:
        end = _json(path)
        if end.get("state") == "failed":
            yield f"[{end.get('host')} r{end.get('rank')}/{status.get('world_size')}] {_as_line(end)}\n"
    for path in sorted((directory / "logs").glob("rank-*.log")):
        yield from (line for line in read(path) if line[:19] >= since)


def _as_line(end: dict[str, object]) -> str:
    """A user's mistake is marked as the terminal marks it."""
    return f"error: {end.get('why')}" if end.get("code") == 2 else str(end.get("why"))


def _json(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
