"""Find the faults that log lines show, and choose the root cause.

Only a failed job has a root cause. Each of these proves a failure: an exception after which the process made no
progress; a line of a scheduler, kernel or launcher about the end of a process; a fault in the last line of a process.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rankup.explain.faults import DIED, FOLLOWED, HARMLESS, NAMED, OF_LIBRARY, ROOT, UNKNOWN, WAITED, Fault, faults_in
from rankup.explain.logs import CLOCK, LINE, MAX_SEEN, NOBODY, Headers, Log, LogLine, time_of, who_in
from rankup.explain.tracebacks import Traceback

MAX_KEPT = 2_000  # limits findings, and sources of one log, so that a log of any size needs a few megabytes of memory
MAX_UNKNOWN = 50  # limits unknown exceptions of one source, so that one rank's do not hide another rank's fault
NEAR = 60  # a description of a pod or process has at most this many lines


@dataclass(slots=True)
class _Source:
    """The state of one source of lines, such as one rank. One log may mix the lines of several ranks."""

    traceback: Traceback = field(default_factory=Traceback)
    newest: "Diagnosis | None" = None  # the last exception
    replaced: "Diagnosis | None" = None  # an earlier exception of the same failure
    open: "Diagnosis | None" = None  # an exception whose message has not begun in its line
    died: "Diagnosis | None" = None  # the last line about the end of a process
    subject: tuple[int, dict[str, Any]] = (0, {})  # the number of a line that says whom the next lines describe
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
    `time`: seconds since 1970. `traceback`: its last lines about files of the user, or its last lines, without the
    exception. `at`: the last line of the user's code in it, such as "train.py:40".
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
    at: str = ""
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
        public = [each.name for each in fields(self)[:13]]
        return {name: getattr(self, name) for name in (*public, "harmless")}

    def may_be_of(self, other: "Diagnosis") -> bool:
        """Return whether both may be about one rank. Launchers do not always name rank and host."""
        same_rank = self.rank == other.rank or None in (self.rank, other.rank)
        return same_rank and (self.host == other.host or "" in (self.host, other.host))

    def take(self, other: "Diagnosis") -> None:
        """Merge `other`, which says the same, into this diagnosis."""
        self.raised = self.raised or other.raised
        self.rank = other.rank if self.rank is None else self.rank
        self.host, self.at = self.host or other.host, self.at or other.at
        self.traceback = self.traceback or other.traceback
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
        self._speaker: LogLine | None = None  # the last line whose header names a rank
        for log in logs:
            self._read(log)

    def _read(self, log: Log) -> None:
        """Read one log. If `log.rank` is set, all lines belong to that rank."""
        self._failed |= log.failed
        self._file, self._clock, self._sources, self._speaker = log.name, "", {}, None
        headers = Headers()
        for self._number, raw in enumerate(log.lines, 1):
            if CLOCK.search(raw, 0, 120):
                self._clock = raw[:200]
            for line in map(self._of_record, headers.split(raw)):
                line = line._replace(
                    rank=log.rank if line.rank is None else line.rank, host=line.host or log.host,
                    source=line.source if log.rank is None else "",
                )
                line = self._in_summary(line, self._source(line))
                source = self._source(line)
                if not log.failed:
                    self._look_at(line, source)
                elif self._known(line, source) is None:
                    source.bad = self._finding(UNKNOWN, line, source)
        self._bad += [source.bad for source in self._sources.values() if source.bad is not None and source.bad.proves]

    def _of_record(self, line: LogLine) -> LogLine:
        """Give a line without a prefix to the rank in the header above it, if it belongs to the same record."""
        speaker = self._speaker
        bare = self._sources.get(NOBODY) if line.named and line.bare else None
        if bare and bare.traceback.inside and (LINE["code"].match(line.text) or LINE["exception"].match(line.text)):
            return line._replace(rank=None, host="", source=NOBODY)  # these words are a part of the traceback
        if line.named:
            self._speaker = None if LINE["noise"].match(line.text) else line
        elif speaker is not None:
            if line.bare and (self._source(speaker).traceback.inside or LINE["record"].match(line.text)):
                return line._replace(rank=speaker.rank, host=speaker.host, source=speaker.source)
            self._speaker = None
        return line

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
        traceback = source.traceback
        text = traceback.dedent(line.text)
        line = line._replace(text=text)
        if LINE["chain"].match(text) and source.newest is not None and source.newest.fault is UNKNOWN:
            source.newest.over, source.replaced = True, source.newest
        if found := LINE["subject"].match(text):
            source.subject = (self._number, who_in(found.groupdict()))
        traceback.announce(text, self._number)
        begins, thrown = LINE["begin"].match(text), LINE["thrown"].match(text)
        raises = bool(thrown or (traceback.inside and LINE["exception"].match(text)))
        # An indented line in a traceback is source code: it may name errors that did not happen
        is_code = traceback.inside and (begins or LINE["code"].match(text))
        known = None if is_code else self._known(line, source, raises=raises)
        if begins:
            if traceback.begin(text, self._number) and source.newest is not None:
                source.newest.over |= source.newest.fault is UNKNOWN
                source.replaced = source.newest
            source.open = None
        elif raises:
            self._raise(known, line._replace(text=LINE["thrown"].sub("", text, 1)), source)
        elif traceback.inside:
            traceback.add(text)
            if source.died is not None and traceback.at and not traceback.inside:  # faulthandler's is about that end
                source.died.at, source.died.traceback = traceback.at, traceback.shown
        elif LINE["ignored"].match(text):
            traceback.ignored = True
        elif known is not None and (newest := source.newest) is not None and not known.fault.proof:
            if known.order <= NAMED < newest.order and source.spoke < newest.last_line:
                # The lines after an exception belong to its message, and this line names the cause
                known.raised, newest.over, source.open = True, True, None
                known.traceback, known.at = known.traceback or (*newest.traceback, newest.seen), known.at or newest.at
        elif known is None and source.open is not None and self._is_message(text, source.open, source):
            pass
        elif known is None and LINE["bad"].match(text):
            source.bad = self._finding(UNKNOWN, line, source)
        elif known is None and not LINE["noise"].match(text):  # an ordinary line: the process continued
            source.spoke = self._number
            bar = LINE["bar"].search(text)  # tqdm draws its bar again after an exception, at the same position
            if (bar[1] != source.bar) if bar else LINE["progress"].search(text):
                source.progressed = self._number
            source.bar = bar[1] if bar else source.bar

    def _is_message(self, text: str, finding: Diagnosis, source: _Source) -> bool:
        """Add a line to the message of an exception that has not begun in its own line, up to an empty line."""
        begun = not finding.seen.endswith(":")
        if (LINE["noise"].match(text) and (begun or text.strip())) or len(finding.seen) >= MAX_SEEN:
            source.open = None
            return False
        finding.seen, finding.last_line = f"{finding.seen} {text.strip()}".strip()[:MAX_SEEN], self._number
        return True

    def _raise(self, finding: Diagnosis | None, line: LogLine, source: _Source) -> None:
        """Note the exception at the end of a traceback."""
        traceback = source.traceback
        library = next(filter(OF_LIBRARY.get, (*traceback.libraries, line.text.partition(".")[0])), None)
        own = traceback.at and "torch" not in traceback.libraries and LINE["connection"].match(line.text)
        if finding is not None and not finding.raised and (
            (own and finding.order == FOLLOWED)
            or (library and (finding.order >= WAITED or finding.name == "no-such-name"))
        ):
            finding.over = True  # the words are those of ranks, but the connection was the script's or the library's
            finding = None
        if library and finding is None:
            finding = self._note(OF_LIBRARY[library], {}, line, source)
        if finding is None and len(source.unknown) == MAX_UNKNOWN:  # drop a middle one: first or last may be the cause
            self._findings.remove(source.unknown.pop(MAX_UNKNOWN // 2))
        if finding is None and len(self._findings) < MAX_KEPT:
            finding = self._finding(UNKNOWN, self._about(line, source, raises=True), source)
            source.unknown.append(finding)
            self._findings.append(finding)
            source.open = finding if finding.seen.endswith(":") else None
        if finding is not None:
            for earlier in self._findings if line.rank is not None else ():  # only the last exception ends a rank
                earlier.over |= earlier.source is source and earlier.raised and not earlier.last
            finding.over |= traceback.ignored and not finding.raised
            finding.raised, first, shown = True, source.replaced, (traceback.shown, traceback.at)
            if first is not None and first.at and (first.seen == finding.seen or not traceback.at):
                # Another process or a pool has raised it again: the first place in the user's code tells more
                shown = (first.traceback, first.at)
            finding.traceback, finding.at = finding.traceback or shown[0], finding.at or shown[1]
        source.newest, source.replaced, traceback.inside, traceback.ignored = finding, None, False, False

    def _known(self, line: LogLine, source: _Source, *, raises: bool = False) -> Diagnosis | None:
        """Keep, of the faults that this line shows, the one nearest to the root cause."""
        if not (matches := faults_in(line.text)):
            return None
        fault, groups = matches[0]
        # The pattern of another fault may find the rank: "lost a peer: suspected: rank 1 on node1 (MemoryError: )" is
        # about the memory of rank 1, no matter which rank wrote the line
        named = who_in({name: value for _, each in reversed(matches) for name, value in each.items()})
        about = self._about(line, source, raises=raises) if fault.order <= DIED else line
        return self._note(fault, groups, about._replace(**named), source)

    def _about(self, line: LogLine, source: _Source, *, raises: bool) -> LogLine:
        """Return the line with the rank and host that it is about, which may be others than those that wrote it."""
        if raises and source.traceback.about:
            return line._replace(**source.traceback.about)
        found = [who_in(match.groupdict()) for match in LINE["about"].finditer(line.text)]
        number, who = source.subject
        if number and self._number - number <= NEAR and not raises:
            found.append(who)
        ranks = {each["rank"] for each in found if "rank" in each}
        hosts = [each["host"] for each in found if "host" in each]
        rank = ranks.pop() if len(ranks) == 1 and (raises or line.rank is None) else line.rank
        return line._replace(rank=rank, host=line.host or (hosts[0] if hosts else ""))

    def _note(self, fault: Fault, groups: Mapping[str, str | None], line: LogLine, source: _Source) -> Diagnosis:
        """Return the finding of this fault at this rank. Make it if this is the first line that shows it."""
        key = (fault.name, line.rank, line.host, code := groups.get("code") or "")
        finding = self._newest.get(key)
        if finding is not None and not finding.survived:
            finding.source, finding.last_line = source, self._number
            return finding
        finding = self._finding(fault, line, source, groups)
        finding.code = code
        if len(self._findings) < MAX_KEPT:
            self._findings.append(finding)
            self._newest[key] = finding
        if fault.proof and fault.order <= DIED:
            source.died = finding
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
        ends: dict[Diagnosis, Diagnosis] = {}
        for each in found:
            if each.fault.late and any(_is_before(cause, each) for cause in causes):
                each.order = FOLLOWED
            if each.name == "exit-code":
                others = [one for one in found if one is not each and one.may_be_of(each) and _explains(one, each)]
                if others:
                    each.over = True  # the exception that caused this exit code is a finding itself
                    ends.setdefault(others[0], each)
                elif each.rank is not None and self._first_rank not in (None, each.rank):
                    each.order = FOLLOWED
        for one, each in ends.items():  # after the loop: what has no rank may explain the exit codes of several ranks
            if one.rank in (None, each.rank) and self._first_rank in (None, each.rank):
                one.rank, one.host = each.rank, one.host or each.host
        found = [each for each in found if not each.over]
        untimed = {each.kind for each in found if each.time is None}

        def place(each: Diagnosis) -> tuple[int, bool, bool, float, bool]:
            # What ended a process comes before a line after which its process continued for a while
            survived = bool(errors) and not (each.raised or each.last or each.fault.proof)
            other_rank = self._first_rank is None or each.rank != self._first_rank
            time = 0.0 if each.kind in untimed else each.time or 0.0
            return each.kind, survived, each.name == "aborted", time, other_rank

        return sorted(found, key=place)


def _explains(one: Diagnosis, end: Diagnosis) -> bool:
    """Return whether `one` is why a process ended with the exit code in `end`."""
    if not one.raised:
        return one.order <= NAMED and not one.fault.proof and _is_before(one, end)
    return one.order <= (WAITED if end.code == "1" and _is_before(one, end) else DIED)


def _is_before(one: Diagnosis, other: Diagnosis) -> bool:
    """Return whether `one` came first. If times are missing, assume that it did."""
    if one.file == other.file:
        return one.line < other.line
    return one.time is None or other.time is None or one.time <= other.time


def diagnose(lines: Iterable[str]) -> list[Diagnosis]:
    """Return the faults that the lines of one log show, see `Search.result`."""
    return Search([Log(lines)]).result()
