"""What does the log of a failed job say? Finds the known faults in it, which rank has them, and what to do.

The root cause comes first: out of memory before a killed rank, and a killed rank before "Connection closed by peer".
An exception that is not in the table is quoted and never guessed at. No torch here.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from train.commands.explain.faults import DIED, HARMLESS, faults_in, known_faults
from train.commands.explain.log_lines import LogLine, read_log, split_prefixes
from train.errors import ConfigError

MAX_SEEN = 300  # characters of a line that are quoted
MAX_KEPT = 500  # findings of one log: a log of any size needs a few megabytes of memory
MAX_UNKNOWN = 50  # unknown exceptions of one source


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One fault that a log shows. `order`: 1 is nearest to the root cause. `rank`, `host`: who has it, where known."""

    title: str
    seen: str
    line: int
    rank: int | None
    host: str
    why: str
    remedy: str
    order: int
    harmless: bool = False
    name: str = ""  # its entry in known_faults.toml; "" for an exception that is not known
    times: int = 1


BEGIN = re.compile(r"Traceback \(most recent call last\):|Fatal Python error: ")
CHAIN = re.compile(r"(?:During handling of the above|The above exception was the direct)")
EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?::|$)")
# Not torch's notes and warnings, "[I1121 ..." and "[W1121 ...": healthy jobs print them too
LOOKS_BAD = re.compile(
    r"(?!\[[IW]\d{4} )(?=.*(?:\b(?i:error|fatal|panic|exception)\b\s*[:\]]|\bFAILED\b|\bcore dumped\b))"
)


@dataclass(slots=True)
class Tracebacks:
    """The tracebacks of one source, such as one rank: the lines of several ranks mix in one log."""

    inside: bool = False  # the next lines are a traceback, up to its exception
    unknown: list[Diagnosis] = field(default_factory=list)  # exceptions that are not in the table
    last_is_unknown: bool = False


def diagnose(lines: Iterable[str]) -> list[Diagnosis]:
    """The faults that these lines show, the root cause first, harmless ones last. Empty: nothing wrong was found."""
    known: dict[tuple[str, int | None, str], Diagnosis] = {}
    sources: dict[str, Tracebacks] = {}
    last_bad: Diagnosis | None = None
    for number, raw in enumerate(lines, 1):
        line = split_prefixes(raw)
        source = sources.get(line.source)
        inside = source is not None and source.inside
        # An indented line in a traceback is source code: it may name errors that did not happen
        fault = None if inside and line.text.startswith("  ") else _known(line, number)
        if fault is not None:
            key = (fault.name, fault.rank, fault.host)
            if key in known:
                known[key] = replace(known[key], times=known[key].times + 1)
            elif len(known) < MAX_KEPT:
                known[key] = fault
        if BEGIN.match(line.text):
            if len(sources) < MAX_KEPT:
                sources.setdefault(line.source, Tracebacks()).inside = True
        elif source is not None and CHAIN.match(line.text):
            # The next exception stands for the last one: Python prints both tracebacks for one failure
            if source.last_is_unknown and source.unknown:
                source.unknown.pop()
                source.last_is_unknown = False
        elif source is not None and inside:
            if EXCEPTION.match(line.text):
                source.inside, source.last_is_unknown = False, fault is None
                if fault is None and len(source.unknown) < MAX_UNKNOWN:
                    source.unknown.append(_unknown(line, number))
        elif fault is None and LOOKS_BAD.match(line.text):
            last_bad = _unknown(line, number)
    unknown = [diagnosis for source in sources.values() for diagnosis in source.unknown][:MAX_KEPT]
    return _from_the_root([*known.values(), *unknown], last_bad)


def _from_the_root(found: list[Diagnosis], last_bad: Diagnosis | None) -> list[Diagnosis]:
    """`found` without repeats, the root cause first. `last_bad`: the last line that looked like an error."""
    # A doubtful sign is trouble only beside other trouble; alone it is harmless
    doubtful = {fault.name for fault in known_faults() if fault.doubtful}
    if all(d.harmless or d.name in doubtful for d in found):
        found = [replace(d, harmless=True, order=HARMLESS) for d in found]
        found += [last_bad] if last_bad is not None else []
    # Each fault once for each rank; an unknown exception once for each rank and text
    once: dict[tuple[str, int | None, str], Diagnosis] = {}
    for diagnosis in sorted(found, key=lambda diagnosis: (diagnosis.order, diagnosis.line)):
        once.setdefault((diagnosis.name or diagnosis.seen, diagnosis.rank, diagnosis.host), diagnosis)
    return list(once.values())


def _known(line: LogLine, number: int) -> Diagnosis | None:
    """The fault nearest to the root cause that this line shows."""
    matches = faults_in(line.text)
    if not matches:
        return None
    fault, groups = matches[0]
    # Another fault's pattern may know the rank: "lost a peer: suspected: rank 1 on node1 (MemoryError: )" is about
    # rank 1's memory, whichever rank wrote the line
    named = [(name, value) for _, each in matches for name, value in each.items() if value]
    rank = next((int(value) for name, value in named if name.startswith("rank")), line.rank)
    host = next((value for name, value in named if name == "host"), line.host)
    words = {**{name: value or "" for name, value in groups.items()}, "rank": "?" if rank is None else rank}
    return Diagnosis(
        title=fault.title.format_map(words), seen=line.text.strip()[:MAX_SEEN], line=number, rank=rank, host=host,
        why=fault.why.format_map(words), remedy=fault.remedy.format_map(words), order=fault.order,
        harmless=fault.order == HARMLESS, name=fault.name,
    )


def _unknown(line: LogLine, number: int) -> Diagnosis:
    return Diagnosis(
        title="an error that is not known here", seen=line.text.strip()[:MAX_SEEN], line=number, rank=line.rank,
        host=line.host, why="this is the last line of its traceback, or the last line that looks like an error.",
        remedy="It is not in the table of known faults. The last lines of its traceback say where it happened.",
        order=DIED,
    )


def format_report(diagnoses: list[Diagnosis]) -> str:
    """For people: the root cause with its reason and remedy, then everything else in a line each."""
    wrong = [diagnosis for diagnosis in diagnoses if not diagnosis.harmless]
    harmless = [diagnosis for diagnosis in diagnoses if diagnosis.harmless]
    lines = [] if wrong else ["nothing wrong was found in these lines."]
    if wrong:
        root = wrong[0]
        same = [d for d in wrong if d.name == root.name and d.name and d.title == root.title]
        lines += [f"{root.title}{_where(same)} (line {root.line})", f"  seen  {root.seen}", f"  why   {root.why}",
                  f"  fix   {root.remedy}"]
        rest = [d for d in wrong[1:] if d not in same]
        lines += ["also seen:"] if rest else []
        lines += [f"  {d.title}{_where([d])} (line {d.line}{_times(d)}): {d.remedy}" for d in rest[:8]]
        lines += [f"  and {len(rest) - 8} more"] if len(rest) > 8 else []
    lines += [f"harmless: {d.title} (line {d.line}{_times(d)}): {d.why}" for d in harmless[:5]]
    return "\n".join(lines)


def _where(diagnoses: list[Diagnosis]) -> str:
    """Such as ", rank 1 on node1", for all ranks that have the fault. What the title says is not repeated."""
    ranks = sorted({d.rank for d in diagnoses if d.rank is not None and f"rank {d.rank}" not in d.title})
    hosts = sorted({d.host for d in diagnoses if d.host and f"on {d.host}" not in d.title})
    who = f"rank{'s' if len(ranks) > 1 else ''} {_listed(ranks)}" if ranks else ""
    where = f"on {_listed(hosts)}" if hosts else ""
    return f", {' '.join(filter(None, [who, where]))}" if who or where else ""


def _listed(names: Sequence[object]) -> str:
    return ", ".join(map(str, names[:8])) + (", ..." if len(names) > 8 else "")


def _times(diagnosis: Diagnosis) -> str:
    return f", {diagnosis.times} times" if diagnosis.times > 1 else ""


def advice(text: str) -> str:
    """One line about a traceback if it shows a known fault, otherwise ""."""
    known = [diagnosis for diagnosis in diagnose(text.splitlines()) if diagnosis.name and not diagnosis.harmless]
    return f"this is: {known[0].title}. {known[0].why} {known[0].remedy}" if known else ""


def explain_logs(paths: Sequence[Path], *, as_json: bool) -> tuple[str, bool]:
    """What the command `explain` prints about logs, and whether they show a fault. Raises ConfigError."""
    try:
        found = diagnose(line for path in paths for line in read_log(path))
    except OSError as error:
        got = f"{error.filename}: {error.strerror}"
        raise ConfigError(f"explain needs a file or folder that it can read, got {got}.") from None
    text = json.dumps([asdict(diagnosis) for diagnosis in found]) if as_json else format_report(found)
    return text, not all(diagnosis.harmless for diagnosis in found)
