"""Find the faults that log lines show, and choose the root cause.

Only a failed job has a root cause. Each of these proves a failure: an exception after which the process made no
progress; a line of a scheduler, kernel or launcher about the end of a process; a fault in the last line of a process.
"""

import re
import tomllib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rankup.explain.logs import CLOCK, LINES, Log, LogLine, split_prefixes, time_of

MAX_SEEN = 300  # quote at most this many characters of a line
MAX_KEPT = 2_000  # limits findings, and sources of one log, so that a log of any size needs a few megabytes of memory
MAX_UNKNOWN = 50  # limits unknown exceptions of one source, so that one rank's do not hide another rank's fault
LAST_LINES = 6  # quote this many lines of a traceback, and the exception itself
# Values of `order` in the table of known faults
ROOT, NAMED, DIED, WAITED, FOLLOWED, SUMMARY, HARMLESS = 1, 2, 3, 4, 5, 6, 9


@dataclass(frozen=True, slots=True)
class Fault:
    """An entry of known_faults.toml, which explains the fields. Texts contain groups of `pattern` as {group}."""

    name: str
    title: str
    why: str
    remedy: str = ""
    order: int = DIED
    contains: Sequence[str] = ()
    pattern: re.Pattern[str] = re.compile("")
    example: str = ""
    doubtful: bool = False
    proof: bool = False
    late: bool = False


TABLE = tomllib.loads(Path(__file__).with_name("known_faults.toml").read_text(encoding="utf-8"))
FAULTS = [Fault(name, **entry | {"pattern": re.compile(entry.get("pattern", ""))}) for name, entry in TABLE.items()]
WORDS = [(word, fault) for fault in FAULTS for word in fault.contains]


def faults_in(text: str) -> list[tuple[Fault, Mapping[str, str | None]]]:
    """Return the faults that a line shows, with the groups of their patterns, nearest to the root cause first."""
    # One flat loop over all words is fast. Nearly every line has none of them, and this loop takes most of the time
    faults = {fault.name: fault for word, fault in WORDS if word in text}
    found = [(each, match.groupdict()) for each in faults.values() if (match := each.pattern.search(text))]
    return sorted(found, key=lambda pair: pair[0].order)  # stable: the table's order among equals


UNKNOWN = Fault("", **LINES["unknown"])
# Kinds of lines that are not faults, see lines.toml
LINE = {kind: re.compile("|".join(patterns)) for kind, patterns in LINES["kinds"].items()}


@dataclass(slots=True)
class _Source:
    """The state of one source of lines, such as one rank. One log may mix the lines of several ranks."""

    inside: bool = False  # the next lines belong to a traceback, up to its exception
    ignored: bool = False  # that traceback does not end the process
    traceback: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    newest: "Diagnosis | None" = None  # the last exception
    bad: "Diagnosis | None" = None  # the last line that looks like an error
    unknown: list["Diagnosis"] = field(default_factory=list)  # exceptions that are not in the table
    spoke: int = 0  # number of the last ordinary line; no earlier error has ended the process
    progressed: int = 0  # number of the last ordinary line that shows progress
    bar: str = ""  # the last position of a tqdm bar
    summary: dict[str, str] = field(default_factory=dict)  # the current paragraph of torchrun's summary
    summary_root: bool = False  # the next paragraph is about the rank that failed first


@dataclass(slots=True, eq=False, kw_only=True)
class Diagnosis:
    """One fault that a log shows. `order`: 1 is nearest to the root cause. `rank`, `host`: which rank has it, if known.

    `name`: the entry in known_faults.toml; "" for an unknown exception. `file`: the log's name if there are several.
    `time`: seconds since 1970. `traceback`: its last lines, without the exception.
    """

    title: str
    seen: str
    line: int
    rank: int | None
    host: str
    why: str
    remedy: str
    order: int
    name: str
    file: str
    time: float | None
    traceback: tuple[str, ...] = ()
    # Only for `Search`
    fault: Fault
    source: _Source
    last_line: int  # number of the last line that shows this fault
    raised: bool = False  # it is the exception at the end of a traceback
    over: bool = False  # it did not end the process
    code: str = ""  # the exit code in the line

    @property
    def harmless(self) -> bool:
        return self.order == HARMLESS

    @property
    def place(self) -> str:
        return f"{self.file} line {self.line}".lstrip()

    @property
    def last(self) -> bool:
        """Whether its process wrote only noise after it."""
        return self.source.spoke <= self.last_line

    @property
    def survived(self) -> bool:
        return self.over or (self.source.progressed > self.last_line and not self.fault.proof)

    @property
    def proves(self) -> bool:
        if self.survived or self.harmless or self.fault.doubtful:
            return False
        return self.raised or self.fault.proof or (self.last and not LINE["note"].search(self.seen))

    @property
    def kind(self) -> int:
        """Causes sort by kind first, then by time: proofs from outside, other faults and exceptions, the rest."""
        return self.order if self.order > DIED else ROOT if self.order == ROOT and self.fault.proof else DIED

    def as_dict(self) -> dict[str, Any]:
        """Return the public fields, for JSON."""
        public = [each.name for each in fields(self)[:12]]
        return {name: getattr(self, name) for name in (*public, "harmless")}

    def may_be_of(self, other: "Diagnosis") -> bool:
        """Return whether both may be about one rank. Launchers do not always name rank and host."""
        same_rank = self.rank == other.rank or None in (self.rank, other.rank)
        return same_rank and (self.host == other.host or "" in (self.host, other.host))

    def take(self, other: "Diagnosis") -> None:
        """Merge `other`, which says the same, into this diagnosis."""
        self.raised = self.raised or other.raised
        self.rank = other.rank if self.rank is None else self.rank
        self.host, self.traceback = self.host or other.host, self.traceback or other.traceback
        self.time = min((time for time in (self.time, other.time) if time is not None), default=None)


class Search:
    """A search for faults in one log after the other. `result` returns them."""

    def __init__(self, logs: Iterable[Log]) -> None:
        self._findings: list[Diagnosis] = []  # in the order of files and lines
        self._newest: dict[tuple[object, ...], Diagnosis] = {}  # by fault, rank, host and exit code
        self._bad: list[Diagnosis] = []  # last lines of sources that look like errors
        self._first_rank: int | None = None  # the rank that failed first according to torchrun
        self._failed = False  # a log says that a rank failed
        # State of the current log: its sources by name, its name, the current line number, the last line with a time
        self._sources: dict[str, _Source] = {}
        self._file, self._number, self._clock = "", 0, ""
        for log in logs:
            self._read(log)

    def _read(self, log: Log) -> None:
        """Read one log. If `log.rank` is set, all lines belong to that rank."""
        self._failed |= log.failed
        self._file, self._clock, self._sources = log.name, "", {}
        for self._number, raw in enumerate(log.lines, 1):
            line = split_prefixes(raw)
            line = line._replace(
                rank=log.rank if line.rank is None else line.rank, host=line.host or log.host,
                source=line.source if log.rank is None else "",
            )
            if CLOCK.search(raw, 0, 120):
                self._clock = raw[:200]
            line = self._in_summary(line, self._source(line))
            source = self._source(line)
            if not log.failed:
                self._look_at(line, source)
            elif self._known(line, source) is None:
                source.bad = self._finding(UNKNOWN, line, source)
        self._bad += [source.bad for source in self._sources.values() if source.bad is not None and source.bad.proves]

    def _source(self, line: LogLine) -> _Source:
        source = self._sources.get(line.source) or _Source()
        if len(self._sources) < MAX_KEPT:
            self._sources[line.source] = source
        return source

    def _in_summary(self, line: LogLine, source: _Source) -> LogLine:
        """Give a line of torchrun's summary the rank and host of its paragraph, and remove the indent of tracebacks."""
        if LINE["summary_root"].match(line.text):
            source.summary_root = True
        elif LINE["summary_end"].match(line.text):
            source.summary_root = source.summary_root and not source.summary
            source.summary = {}
        elif found := LINE["summary_field"].match(line.text):
            source.summary.setdefault(found[1], found[2])
        if "local_rank" not in source.summary.get("rank", ""):
            return line
        rank, host = int(source.summary["rank"].split()[0]), source.summary.get("host", "")
        if source.summary_root:
            self._first_rank = rank
        text = line.text.removeprefix("  traceback : ").removeprefix("  ")
        return LogLine(text, rank, host, f"{line.source} summary of {rank} {host}")

    def _look_at(self, line: LogLine, source: _Source) -> None:
        """Note what a line shows: a fault, part of a traceback, an error, noise, or that the process continues."""
        text = line.text
        if LINE["chain"].match(text) and source.newest is not None and source.newest.fault is UNKNOWN:
            source.newest.over = True
        # An indented line in a traceback is source code: it may name errors that did not happen
        known = None if source.inside and LINE["code"].match(text) else self._known(line, source)
        if LINE["begin"].match(text):
            source.inside = True
            source.traceback.clear()
        elif (source.inside and LINE["exception"].match(text)) or LINE["thrown"].match(text):
            self._raise(known, line._replace(text=LINE["thrown"].sub("", text, 1)), source)
        elif source.inside:
            source.traceback.append(text[:MAX_SEEN])
        elif LINE["ignored"].match(text):
            source.ignored = True
        elif known is not None and (newest := source.newest) is not None and not known.fault.proof:
            if known.order <= NAMED < newest.order and source.spoke < newest.last_line:
                # The lines after an exception belong to its message, and this line names the cause
                known.raised, newest.over = True, True
                known.traceback = known.traceback or (*newest.traceback, newest.seen)
        elif known is None and LINE["bad"].match(text):
            source.bad = self._finding(UNKNOWN, line, source)
        elif known is None and not LINE["noise"].match(text):  # an ordinary line: the process continued
            source.spoke = self._number
            bar = LINE["bar"].search(text)  # tqdm draws its bar again after an exception, at the same position
            if (bar[1] != source.bar) if bar else LINE["progress"].search(text):
                source.progressed = self._number
            source.bar = bar[1] if bar else source.bar

    def _raise(self, finding: Diagnosis | None, line: LogLine, source: _Source) -> None:
        """Note the exception at the end of a traceback."""
        if finding is None and len(source.unknown) == MAX_UNKNOWN:  # drop a middle one: first or last may be the cause
            self._findings.remove(source.unknown.pop(MAX_UNKNOWN // 2))
        if finding is None and len(self._findings) < MAX_KEPT:
            finding = self._finding(UNKNOWN, line, source)
            source.unknown.append(finding)
            self._findings.append(finding)
        if finding is not None:
            for earlier in self._findings if line.rank is not None else ():  # only the last exception ends a rank
                earlier.over |= earlier.source is source and earlier.raised and not earlier.last
            finding.over |= source.ignored and not finding.raised
            finding.raised, finding.traceback = True, finding.traceback or tuple(source.traceback)
        source.newest, source.inside, source.ignored = finding, False, False

    def _known(self, line: LogLine, source: _Source) -> Diagnosis | None:
        """Keep, of the faults that this line shows, the one nearest to the root cause."""
        if not (matches := faults_in(line.text)):
            return None
        fault, groups = matches[0]
        # The pattern of another fault may find the rank: "lost a peer: suspected: rank 1 on node1 (MemoryError: )" is
        # about the memory of rank 1, no matter which rank wrote the line
        named = {name.rstrip("23"): value for _, each in reversed(matches) for name, value in each.items() if value}
        rank = int(named["rank"]) if "rank" in named else line.rank
        host, code = named.get("host", line.host), named.get("code", "")
        key = (fault.name, rank, host, code)
        finding = self._newest.get(key)
        if finding is not None and not finding.survived:
            finding.source, finding.last_line = source, self._number
            return finding
        finding = self._finding(fault, line._replace(rank=rank, host=host), source, groups)
        finding.code = code
        if len(self._findings) < MAX_KEPT:
            self._findings.append(finding)
            self._newest[key] = finding
        return finding

    def _finding(
        self, fault: Fault, line: LogLine, source: _Source, groups: Mapping[str, str | None] | None = None
    ) -> Diagnosis:
        words = {name: value or "" for name, value in (groups or {}).items()}
        words["rank"] = "?" if line.rank is None else str(line.rank)
        title, why, remedy = (text.format_map(words) for text in (fault.title, fault.why, fault.remedy))
        return Diagnosis(
            title=title, seen=line.text.strip()[:MAX_SEEN], line=self._number, rank=line.rank, host=line.host, why=why,
            remedy=remedy, order=fault.order, name=fault.name, file=self._file, time=time_of(self._clock), fault=fault,
            source=source, last_line=self._number,
        )

    def result(self) -> list[Diagnosis]:
        """Return all findings, the root cause first, harmless ones last. Empty: nothing wrong was found."""
        found = [each for each in self._findings if not each.survived or each.harmless]
        raised = [each for each in self._findings if each.raised and each.order <= DIED]
        if not any(each.proves or (self._failed and each.order < HARMLESS) for each in found):
            found = [each for each in found if each.harmless or each.fault.doubtful]
            for each in found:
                each.order = HARMLESS
            found = [*self._bad[-1:], *found]
        elif any(each.code == "1" for each in found) and all(each.survived for each in raised):
            # 1 is Python's code for an exception. The exception that ended the process can't be told from survived ones
            found = [each for each in self._findings if each in found or each in raised[-1:]]
        kept: list[Diagnosis] = []
        for each in found:
            same = (old for old in kept if (old.name or old.seen, old.code) == (each.name or each.seen, each.code))
            if (first := next((old for old in same if old.may_be_of(each)), None)) is None:
                kept.append(each)
            else:
                first.take(each)
        return self._by_cause(kept)

    def _by_cause(self, found: list[Diagnosis]) -> list[Diagnosis]:
        """Sort by kind, the root cause first. Within a kind sort by time if all have one, and put aborts last."""
        errors = [each for each in found if each.raised and each.order <= DIED]
        causes = errors + [each for each in found if each.order == DIED and each.fault.proof]
        for each in found:
            if each.fault.late and any(_is_before(cause, each) for cause in causes):
                each.order = FOLLOWED
            if each.name == "exit-code":
                others = (one for one in found if one.raised and one is not each and one.may_be_of(each))
                if any(one.order <= (WAITED if each.code == "1" and _is_before(one, each) else DIED) for one in others):
                    each.over = True  # the exception that caused this exit code is a finding itself
                elif each.rank is not None and self._first_rank not in (None, each.rank):
                    each.order = FOLLOWED
        found = [each for each in found if not each.over]
        untimed = {each.kind for each in found if each.time is None}

        def place(each: Diagnosis) -> tuple[int, bool, bool, float, bool]:
            # What ended a process comes before a line after which its process continued for a while
            survived = bool(errors) and not (each.raised or each.last or each.fault.proof)
            other_rank = self._first_rank is None or each.rank != self._first_rank
            time = 0.0 if each.kind in untimed else each.time or 0.0
            return each.kind, survived, each.name == "aborted", time, other_rank

        return sorted(found, key=place)


def _is_before(one: Diagnosis, other: Diagnosis) -> bool:
    """Return whether `one` came first. If times are missing, assume that it did."""
    if one.file == other.file:
        return one.line < other.line
    return one.time is None or other.time is None or one.time <= other.time


def diagnose(lines: Iterable[str]) -> list[Diagnosis]:
    """Return the faults that the lines of one log show, see `Search.result`."""
    return Search([Log(lines)]).result()
