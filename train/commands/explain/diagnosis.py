"""Which faults the lines of logs show, and which of them is the root cause. No torch here.

Only a job that failed has a root cause. Any of these proves a failure: an exception after which its process made no
progress; a line of a scheduler, kernel or launcher about the end of a process; a fault in the last line of a process;
counters that all stop below their totals. What a process survived is no cause.
"""

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from train.commands.explain.faults import DIED, FOLLOWED, HARMLESS, ROOT, Fault, Language, faults_in, table, texts_in
from train.commands.explain.log_lines import LogLine, has_time, split_prefixes, time_of

MAX_SEEN = 300  # characters of a line that are quoted
MAX_KEPT = 500  # findings of one log: a log of any size needs a few megabytes of memory
MAX_UNKNOWN = 50  # unknown exceptions of one source
LAST_LINES = 6  # of a traceback that are quoted, beside the exception itself


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
    file: str = ""  # where there are several
    time: float | None = None  # seconds since 1970
    traceback: tuple[str, ...] = ()  # its last lines, without the exception


BEGIN = re.compile(r"(?:Original )?Traceback \(most recent call last\):|Fatal Python error: ")
# The next exception stands for the last one: both are of one failure. The last form is a DataLoader worker's
CHAIN = re.compile(r"During handling of the above|The above exception was the direct|Original Traceback ")
# Python prints these tracebacks and goes on
IGNORED = re.compile(r"Exception ignored in|--- Logging error ---|Error in atexit|Task exception was never retrieved")
EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*|\w*(?:error|timeout))(?::|$)")
# Not torch's notes and warnings, "[I1121 ..." and "[W1121 ...": healthy jobs print them too
LOOKS_BAD = re.compile(
    r"(?!\[[IW]\d{4} )(?=.*(?:\b(?i:error|fatal|panic|exception)\b\s*[:\]](?! *[\d.])|\bFAILED\b|\bcore dumped\b))"
)
INTERRUPTED = re.compile(r"KeyboardInterrupt|SystemExit")
# A line of that level says itself that its process goes on. Kubernetes' events have "Warning" and several spaces
LEVEL_OF_A_NOTE = re.compile(r"(?<!=)\b(?:DEBUG|INFO|WARNING|[Ww]arning)\b(?!  )")
# Launchers and libraries print these after the end of a rank, too
NOISE = re.compile(r"\s*$|\W{5}|frame #|wandb: |srun: |slurmstepd: |\[?[IWEF]\d{4} |\S+:\d+:\d+ |.*NCCL INFO|  \w+ *: ")
PROGRESS = re.compile(r"(?i)\b(?:steps?|epochs?|iter(?:ation)?s?|batch(?:es)?|loss)\b\W{0,4}\d")
# "step 30/100", "Epoch: [3][ 40/100]", and the bar of tqdm
COUNTER = re.compile(
    r"(?i)(?:\b(?:steps?|epochs?|iter(?:ation)?s?|batch(?:es)?)\b\W{0,4}|\]\[ *|(?P<bar>%\|.*\| ))"
    r"(\d+) *(?:/|of) *(\d+)"
)
FINISHED = re.compile(r"(?i)\b(?:finished|completed?|done|successful(?:ly)?)\b")
# torchrun's summary has a paragraph for each rank that failed, the first one under the words "Root Cause"
SUMMARY_ROOT = "Root Cause (first observed failure)"
SUMMARY_FIELD = re.compile(r"  (host|rank) +: (\S+(?: \(local_rank: \d+\))?)")
SUMMARY_END = re.compile(r"[=-]{10}|\[\d+\]:$")


UNKNOWN = Fault(name="", title="", why="", order=DIED, contains=(), example="")  # an exception that is not in the table


@dataclass(slots=True, eq=False)
class _Finding:
    said: Diagnosis
    fault: Fault = UNKNOWN
    raised: bool = False  # the exception at the end of a traceback
    last: bool = True  # its process wrote nothing more but noise
    survived: bool = False  # its process made progress afterwards
    code: str = ""  # the exit code that the line tells

    @property
    def proves(self) -> bool:
        if self.survived or self.said.harmless or self.fault.doubtful:
            return False
        return self.raised or self.fault.proof or (self.last and not LEVEL_OF_A_NOTE.search(self.said.seen))


@dataclass(slots=True)
class _Source:
    """The lines of one source, such as one rank: those of several ranks mix in one log."""

    inside: bool = False  # the next lines are a traceback, up to its exception
    ignored: bool = False  # that traceback does not end the process
    unknown: int = 0  # exceptions that are not in the table
    newest: _Finding | None = None  # the last exception
    bad: _Finding | None = None  # the last line that looks like an error
    open: list[_Finding] = field(default_factory=list)  # no progress since then
    traceback: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    clock: str = ""  # the last line that has a time
    summary: dict[str, str] = field(default_factory=dict)  # the paragraph of torchrun's summary that this is in
    summary_root: bool = False  # the next paragraph is that of the rank that failed first
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)  # last number and step of each kind of counter
    stopped: tuple[LogLine, int, str] | None = None  # the last ordinary line, if more was to come
    short: bool = False  # it is below its total
    spoke: bool = False  # there is an ordinary line


class Search:
    """Looks for faults in one log after the other. `language`: of the texts in what it finds."""

    def __init__(self, language: Language = "en") -> None:
        self._texts = texts_in(language)
        self._say: dict[str, str] = table(language)["sentences"]
        self._findings: list[_Finding] = []
        self._newest: dict[tuple[object, ...], _Finding] = {}  # of each fault, rank and host
        self._sources: dict[str, _Source] = {}
        self._first_rank: int | None = None  # the rank that failed first, as torchrun saw it
        self._failed = False  # somebody said so
        self._files: list[str] = []
        self._clock = ""  # the last line of this file that has a time
        self._progress = 0  # number of the last line of this file that shows progress

    def read(
        self, lines: Iterable[str], *, file: str = "", rank: int | None = None, host: str = "", failed: bool = False
    ) -> None:
        """`rank`, `host`: who wrote the lines that do not say so themselves; a rank's file has lines of no other.

        `failed`: each line is why a rank failed.
        """
        self._files.append(file)
        self._failed |= failed
        self._clock, self._progress, last, before = "", 0, "", len(self._findings)
        for number, raw in enumerate(lines, 1):
            line = split_prefixes(raw)
            who = "" if rank is not None else line.source
            line = LogLine(line.text, rank if line.rank is None else line.rank, line.host or host, who)
            source = self._source(f"{file}\n{line.source}")
            if has_time(raw):
                self._clock = source.clock = raw[:200]
            if source.summary or source.summary_root or line.text.startswith((SUMMARY_ROOT, "  host")):
                line = self._in_summary(line, source)
                source = self._source(f"{file}\n{line.source}")
            if failed and self._look_up(line, source, number, file) is None:
                source.bad = _Finding(self._unknown(line, source, number, file))
            elif not failed and self._look_at(line, source, number, file):
                last = line.text
        # A job that was stopped, started again and finished
        restarted = any(f.said.name == "torchrun-restarts" for f in self._findings[before:])
        for finding in self._findings[before:] if FINISHED.search(last) else ():
            finding.survived |= finding.said.line < self._progress and (restarted or finding.fault.proof)

    def _source(self, key: str) -> _Source:
        source = self._sources.get(key) or _Source()
        if len(self._sources) < MAX_KEPT:
            self._sources[key] = source
        return source

    def _in_summary(self, line: LogLine, source: _Source) -> LogLine:
        """A line of torchrun's summary is about the rank of its paragraph, and tracebacks in it are indented."""
        if line.text.startswith(SUMMARY_ROOT):
            source.summary_root = True
        elif SUMMARY_END.match(line.text):
            source.summary_root = source.summary_root and not source.summary
            source.summary = {}
        elif (found := SUMMARY_FIELD.match(line.text)) and found[1] not in source.summary:
            source.summary[found[1]] = found[2]
        summary = source.summary
        if "local_rank" not in summary.get("rank", ""):
            return line
        rank, host = int(summary["rank"].split()[0]), summary.get("host", "")
        if source.summary_root:
            self._first_rank = rank
        text = line.text.removeprefix("  traceback : ").removeprefix("  ")
        return LogLine(text, rank, host, f"{line.source} summary of {rank} {host}")

    def _look_at(self, line: LogLine, source: _Source, number: int, file: str) -> bool:
        """Note what a line shows. Whether it is an ordinary line: its process went on after what it wrote before."""
        text = line.text
        if CHAIN.match(text) and source.newest is not None and source.newest.fault is UNKNOWN:
            self._findings.remove(source.newest)
            source.newest = None
        # An indented line in a traceback is source code: it may name errors that did not happen
        code = source.inside and text.startswith("  ")
        known = None if code else self._look_up(line, source, number, file)
        if BEGIN.match(text):
            source.inside = True
            source.traceback.clear()
        elif source.inside and EXCEPTION.match(text) and not COUNTER.match(text):
            self._raise(known, line, source, number, file)
        elif source.inside:
            source.traceback.append(text[:MAX_SEEN])
        elif IGNORED.match(text):
            source.ignored = True
        elif known is None and LOOKS_BAD.match(text):
            source.bad = _Finding(self._unknown(line, source, number, file))
        elif known is None and not NOISE.match(text):
            self._go_on(line, source, number, file)
            return True
        return False

    def _raise(self, finding: _Finding | None, line: LogLine, source: _Source, number: int, file: str) -> None:
        """An exception, at the end of its traceback."""
        if finding is None and source.unknown < MAX_UNKNOWN and len(self._findings) < MAX_KEPT:
            source.unknown += 1
            finding = _Finding(self._unknown(line, source, number, file))
            self._findings.append(finding)
            source.open.append(finding)
        if finding is not None:
            for earlier in source.open:  # a rank dies of one exception: the last one
                earlier.survived |= line.rank is not None and earlier.raised and not earlier.last
            finding.survived |= source.ignored and not finding.raised
            finding.raised = True
            finding.said = replace(finding.said, traceback=finding.said.traceback or tuple(source.traceback))
        source.newest, source.inside, source.ignored = finding, False, False

    def _go_on(self, line: LogLine, source: _Source, number: int, file: str) -> None:
        """An ordinary line."""
        progress, more, source.bad = PROGRESS.search(line.text) is not None, True, None
        if found := COUNTER.search(line.text):
            now, total = int(found[2]), int(found[3])
            kind = re.sub(r"\d+", "#", line.text[: found.end()])
            before, step = source.counts.get(kind, (None, now))
            step = now - before if before is not None and now > before else step
            if kind in source.counts or len(source.counts) < MAX_UNKNOWN:
                source.counts[kind] = (now, step)
            more = source.short = bool(step) and now + step < total
            # tqdm draws its bar once more after an exception
            progress = not found["bar"] or before not in (None, now)
        source.spoke, source.stopped = True, (line, number, file) if more and (found or progress) else None
        for finding in source.open:
            finding.last = False
            finding.survived |= progress and not finding.fault.proof
        if progress:
            source.open.clear()
            self._progress = number

    def _look_up(self, line: LogLine, source: _Source, number: int, file: str) -> _Finding | None:
        """Keep the fault nearest to the root cause that this line shows."""
        if not (matches := faults_in(line.text)):
            return None
        fault, groups = matches[0]
        # Another fault's pattern may know the rank: "lost a peer: suspected: rank 1 on node1 (MemoryError: )" is about
        # rank 1's memory, whichever rank wrote the line
        named = {name.rstrip("23"): value for _, each in reversed(matches) for name, value in each.items() if value}
        rank = int(named["rank"]) if "rank" in named else line.rank
        host, code = named.get("host", line.host), named.get("code", "")
        key = (fault.name, rank, host, code)
        finding = self._newest.get(key)
        if finding is not None and not finding.survived:
            finding.said = replace(finding.said, times=finding.said.times + 1)
            finding.last = True
        else:
            words: dict[str, object] = {name: value or "" for name, value in groups.items()}
            words["rank"] = "?" if rank is None else rank
            texts = self._texts[fault.name]
            said = replace(
                self._unknown(replace(line, rank=rank, host=host), source, number, file),
                title=texts.title.format_map(words), why=texts.why.format_map(words),
                remedy=texts.remedy.format_map(words), order=fault.order, harmless=fault.order == HARMLESS,
                name=fault.name,
            )
            finding = _Finding(said, fault, code=code)
            if len(self._findings) < MAX_KEPT:
                self._findings.append(finding)
                self._newest[key] = finding
        if finding not in source.open:
            source.open.append(finding)
        return finding

    def _unknown(self, line: LogLine, source: _Source, number: int, file: str) -> Diagnosis:
        return Diagnosis(
            title=self._say["unknown_title"], seen=line.text.strip()[:MAX_SEEN], line=number, rank=line.rank,
            host=line.host, why=self._say["unknown_why"], remedy=self._say["unknown_remedy"], order=DIED,
            file=file, time=time_of(source.clock or self._clock),
        )

    def result(self) -> list[Diagnosis]:
        """All that was found, the root cause first, harmless ones last. Empty: nothing wrong was found."""
        places = {file: number for number, file in enumerate(self._files)}
        self._findings.sort(key=lambda f: (places[f.said.file], f.said.line))
        found = [f for f in self._findings if not f.survived or f.said.harmless]
        if not any(finding.proves or (self._failed and finding.said.order < HARMLESS) for finding in found):
            found = [f for f in found if f.said.harmless or f.fault.doubtful]
            for finding in found:
                finding.said = replace(finding.said, harmless=True, order=HARMLESS)
            found = [*self._ends(), *found]
        elif any(f.code == "1" for f in found) and not any(f.raised and f.said.order <= DIED for f in found):
            # Python's code for an exception: its rank can't be told from those that went on
            last = [f for f in self._findings if f.raised and f.said.order <= DIED][-1:]
            found = [f for f in self._findings if f in found or f in last]
        return self._by_cause(_without_repeats(found))

    def _ends(self) -> list[_Finding]:
        """How the logs end, where they show no fault: with a line that looks bad, or in the middle."""
        bad = [source.bad for source in self._sources.values() if source.bad is not None and source.bad.proves]
        spoke = [source for source in self._sources.values() if source.spoke]
        stopped = [(source, source.stopped) for source in spoke if source.stopped is not None]
        # Without totals one log may be whole; several that all end with such a line are not
        kinds = {re.sub(r"[\d.]+", "#", place[0].text) for _, place in stopped}
        doubt = len({place[2] for _, place in stopped}) < 2 or len(kinds) > 1
        doubt = doubt and not any(source.short for source in spoke)
        if bad or doubt or len(stopped) < len(spoke):
            return bad[-1:]
        source, (line, number, file) = stopped[0]
        said = replace(
            self._unknown(line, source, number, file), title=self._say["stopped_title"], why=self._say["stopped_why"],
            remedy=self._say["stopped_remedy"], name="unfinished", rank=None, host="", times=len(stopped),
        )
        return [_Finding(said)]

    def _by_cause(self, found: list[_Finding]) -> list[Diagnosis]:
        """The root cause first; among those of one kind the earliest, where all have a time."""
        errors = [f for f in found if f.raised and f.said.order <= DIED and not INTERRUPTED.match(f.said.seen)]
        causes = errors + [f for f in found if f.said.order == DIED and f.fault.proof]
        kept = []
        for finding in found:
            said = finding.said
            late = finding.fault.late and any(_before(cause.said, said) for cause in causes)
            if said.name == "exit-code":
                if any(f is not finding and f.raised and (f in errors or f.said.rank is not None)
                       and _may_be_one(f.said, said) for f in found):
                    continue  # of an exception that is there itself
                late = said.rank is not None and self._first_rank not in (None, said.rank)
            if late or (finding.fault is UNKNOWN and INTERRUPTED.match(said.seen)):
                finding.said = replace(said, order=FOLLOWED)
            kept.append(finding)
        ordered: list[Diagnosis] = []
        for kind in sorted({_kind(finding) for finding in kept}):
            group = [finding for finding in kept if _kind(finding) == kind]
            if len({f.said.file for f in group}) > 1 or any(f.fault.proof for f in group):
                # Nothing else says which file's came first. In one file the order of the lines does
                group.sort(key=lambda f: self._first_rank is None or f.said.rank != self._first_rank)
            if all(finding.said.time is not None for finding in group):
                group.sort(key=lambda f: f.said.time or 0.0)
            # A line that its process survived for a while comes after what ended a process
            group.sort(key=lambda f: bool(errors) and not f.raised and not f.last and not f.fault.proof)
            group.sort(key=lambda f: bool(errors) and f.said.name == "exit-code" and f.said.rank != self._first_rank)
            ordered += [finding.said for finding in group]
        return ordered


def _kind(finding: _Finding) -> int:
    """What causes are compared by before their times: words from outside, faults and exceptions, then the rest."""
    if finding.said.order > DIED:
        return finding.said.order
    return ROOT if finding.said.order == ROOT and finding.fault.proof else DIED


def _before(one: Diagnosis, other: Diagnosis) -> bool:
    """Whether the one came first; an error does where nothing says so."""
    if one.file == other.file:
        return one.line < other.line
    return one.time is None or other.time is None or one.time <= other.time


def _without_repeats(found: list[_Finding]) -> list[_Finding]:
    """Each fault once for each rank; an unknown exception once for each rank and text.

    What a launcher says of a rank that it does not name, or without a host, is taken for one with what names them.
    """
    kept: list[_Finding] = []
    for finding in found:
        new = finding.said
        same = (f for f in kept if (f.said.name or f.said.seen, f.code) == (new.name or new.seen, finding.code))
        first = next((other for other in same if _may_be_one(other.said, new)), None)
        if first is None:
            kept.append(finding)
            continue
        old = first.said
        first.raised, first.last = first.raised or finding.raised, first.last or finding.last
        first.said = replace(
            old, times=old.times + new.times, rank=new.rank if old.rank is None else old.rank,
            host=old.host or new.host, traceback=old.traceback or new.traceback,
            time=min((time for time in (old.time, new.time) if time is not None), default=None),
        )
    return kept


def _may_be_one(one: Diagnosis, other: Diagnosis) -> bool:
    same_rank = one.rank == other.rank or None in (one.rank, other.rank)
    return same_rank and (one.host == other.host or "" in (one.host, other.host))


def diagnose(lines: Iterable[str], language: Language = "en") -> list[Diagnosis]:
    """The faults that these lines show, the root cause first, harmless ones last. Empty: nothing wrong was found."""
    search = Search(language)
    search.read(lines)
    return search.result()
