"""Which faults the lines of logs show, and which of them is the root cause. No torch here.

The root cause comes first: out of memory before a killed rank, and a killed rank before "Connection closed by peer".
Of several of one kind the earliest comes first, where the logs have times. An exception that is not in the table is
quoted and never guessed at.
"""

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from train.commands.explain.faults import DIED, HARMLESS, faults_in, known_faults, texts_in
from train.commands.explain.language import SENTENCES, Language
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


BEGIN = re.compile(r"Traceback \(most recent call last\):|Fatal Python error: ")
CHAIN = re.compile(r"(?:During handling of the above|The above exception was the direct)")
EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*|\w*(?:error|timeout))(?::|$)")
# Not torch's notes and warnings, "[I1121 ..." and "[W1121 ...": healthy jobs print them too
LOOKS_BAD = re.compile(
    r"(?!\[[IW]\d{4} )(?=.*(?:\b(?i:error|fatal|panic|exception)\b\s*[:\]]|\bFAILED\b|\bcore dumped\b))"
)
# torchrun's summary has a paragraph for each rank that failed, the first one under the words "Root Cause"
SUMMARY_ROOT = "Root Cause (first observed failure)"
SUMMARY_FIELD = re.compile(r"  (host|rank) +: (\S+(?: \(local_rank: \d+\))?)")
SUMMARY_END = re.compile(r"[=-]{10}|\[\d+\]:$")


@dataclass(slots=True)
class _Source:
    """The lines of one source, such as one rank: those of several ranks mix in one log."""

    inside: bool = False  # the next lines are a traceback, up to its exception
    unknown: list[Diagnosis] = field(default_factory=list)  # exceptions that are not in the table
    last_is_unknown: bool = False
    traceback: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    clock: str = ""  # the last line that has a time
    summary: dict[str, str] = field(default_factory=dict)  # the paragraph of torchrun's summary that this is in
    summary_root: bool = False  # the next paragraph is that of the rank that failed first


class Search:
    """Looks for faults in one log after the other. `language`: of the texts in what it finds."""

    def __init__(self, language: Language = "en") -> None:
        self._texts = texts_in(language)
        self._sentences = SENTENCES[language]
        self._known: dict[tuple[str, int | None, str], Diagnosis] = {}
        self._sources: dict[str, _Source] = {}
        self._last_bad: Diagnosis | None = None
        self._first: Diagnosis | None = None  # the rank that failed first, as torchrun saw it
        self._files: list[str] = []
        self._clock = ""  # the last line of this file that has a time

    def read(self, lines: Iterable[str], *, file: str = "", rank: int | None = None, host: str = "") -> None:
        """`rank`, `host`: who wrote the lines that do not say so themselves; a rank's file has lines of no other."""
        self._files.append(file)
        self._clock = ""
        for number, raw in enumerate(lines, 1):
            line = split_prefixes(raw)
            if rank is not None:
                line = LogLine(line.text, rank if line.rank is None else line.rank, line.host or host)
            elif host:
                line = LogLine(line.text, line.rank, line.host or host, line.source)
            source = self._source(f"{file}\n{line.source}")
            if has_time(raw):
                self._clock = source.clock = raw[:200]
            if source.summary or source.summary_root or line.text.startswith((SUMMARY_ROOT, "  host")):
                line = self._in_summary(line, source, number, file)
                source = self._source(f"{file}\n{line.source}")
            self._look_at(line, source, number, file)

    def _source(self, key: str) -> _Source:
        source = self._sources.get(key)
        if source is None:
            source = _Source()
            if len(self._sources) < MAX_KEPT:
                self._sources[key] = source
        return source

    def _in_summary(self, line: LogLine, source: _Source, number: int, file: str) -> LogLine:
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
        text = line.text.removeprefix("  traceback : ").removeprefix("  ")
        about = LogLine(text, rank, host, f"{line.source} summary of {rank} {host}")
        if source.summary_root and text.startswith("exitcode"):
            self._first = replace(
                self._unknown(about, source, number, file), title=self._sentences.summary_title,
                why=self._sentences.summary_why, remedy=self._sentences.summary_remedy,
            )
        return about

    def _look_at(self, line: LogLine, source: _Source, number: int, file: str) -> None:
        # An indented line in a traceback is source code: it may name errors that did not happen
        code = source.inside and line.text.startswith("  ")
        known = not code and self._look_up(line, source, number, file)
        if BEGIN.match(line.text):
            source.inside = True
            source.traceback.clear()
        elif CHAIN.match(line.text):
            # The next exception stands for the last one: Python prints both tracebacks for one failure
            if source.last_is_unknown and source.unknown:
                source.unknown.pop()
                source.last_is_unknown = False
        elif source.inside:
            if EXCEPTION.match(line.text):
                if not known and len(source.unknown) < MAX_UNKNOWN:
                    source.unknown.append(self._unknown(line, source, number, file))
                source.inside, source.last_is_unknown = False, not known
            else:
                source.traceback.append(line.text[:MAX_SEEN])
        elif not known and LOOKS_BAD.match(line.text):
            self._last_bad = self._unknown(line, source, number, file)

    def _look_up(self, line: LogLine, source: _Source, number: int, file: str) -> bool:
        """Keep the fault nearest to the root cause that this line shows; whether it shows one."""
        matches = faults_in(line.text)
        if not matches:
            return False
        fault, groups = matches[0]
        # Another fault's pattern may know the rank: "lost a peer: suspected: rank 1 on node1 (MemoryError: )" is about
        # rank 1's memory, whichever rank wrote the line
        named = [(name, value) for _, each in matches for name, value in each.items() if value]
        rank = next((int(value) for name, value in named if name.startswith("rank")), line.rank)
        host = next((value for name, value in named if name == "host"), line.host)
        key = (fault.name, rank, host)
        known = self._known.get(key)
        if known is not None:
            self._known[key] = replace(known, times=known.times + 1)
        elif len(self._known) < MAX_KEPT:
            words = {**{name: value or "" for name, value in groups.items()}, "rank": "?" if rank is None else rank}
            found = self._unknown(replace(line, rank=rank, host=host), source, number, file)
            texts = self._texts[fault.name]
            self._known[key] = replace(
                found, title=texts.title.format_map(words), why=texts.why.format_map(words),
                remedy=texts.remedy.format_map(words), order=fault.order, harmless=fault.order == HARMLESS,
                name=fault.name,
            )
        return True

    def _unknown(self, line: LogLine, source: _Source, number: int, file: str) -> Diagnosis:
        return Diagnosis(
            title=self._sentences.unknown_title, seen=line.text.strip()[:MAX_SEEN], line=number, rank=line.rank,
            host=line.host, why=self._sentences.unknown_why, remedy=self._sentences.unknown_remedy, order=DIED,
            file=file, time=time_of(source.clock or self._clock),
            traceback=tuple(source.traceback) if source.inside else (),
        )

    def result(self) -> list[Diagnosis]:
        """All that was found, the root cause first, harmless ones last. Empty: nothing wrong was found."""
        unknown = [diagnosis for source in self._sources.values() for diagnosis in source.unknown][:MAX_KEPT]
        found = [*self._known.values(), *unknown]
        first = self._first
        if first is not None and not any(d.rank == first.rank and not d.harmless for d in found):
            found.append(first)
        # A doubtful sign is trouble only beside other trouble; alone it is harmless
        doubtful = {fault.name for fault in known_faults() if fault.doubtful}
        if all(d.harmless or d.name in doubtful for d in found):
            found = [replace(d, harmless=True, order=HARMLESS) for d in found]
            found += [self._last_bad] if self._last_bad is not None else []
        places = {file: number for number, file in enumerate(self._files)}
        found.sort(key=lambda d: (places[d.file], d.line))
        return self._by_cause(_without_repeats(found))

    def _by_cause(self, found: list[Diagnosis]) -> list[Diagnosis]:
        """The root cause first; among those of one order the earliest, where all have a time."""
        first_rank = None if self._first is None else self._first.rank
        ordered: list[Diagnosis] = []
        for order in sorted({diagnosis.order for diagnosis in found}):
            group = [diagnosis for diagnosis in found if diagnosis.order == order]
            if len({diagnosis.file for diagnosis in group}) > 1:
                # Nothing else says which file's came first. In one file the order of the lines does
                group.sort(key=lambda d: first_rank is None or d.rank != first_rank)
            if all(diagnosis.time is not None for diagnosis in group):
                group.sort(key=lambda d: d.time or 0.0)
            ordered += group
        return ordered


def _without_repeats(found: list[Diagnosis]) -> list[Diagnosis]:
    """Each fault once for each rank; an unknown exception once for each rank and text.

    What a launcher says of a rank that it does not name, or without a host, is taken for one with what names them.
    """
    kept: list[Diagnosis] = []
    for diagnosis in found:
        what = diagnosis.name or diagnosis.seen
        same = (
            number for number, other in enumerate(kept)
            if (other.name or other.seen) == what and _may_be_one(other, diagnosis)
        )
        number = next(same, None)
        if number is None:
            kept.append(diagnosis)
        else:
            other = kept[number]
            if diagnosis.time is not None and (other.time is None or diagnosis.time < other.time):
                other = replace(other, time=diagnosis.time)
            kept[number] = replace(
                other, times=other.times + diagnosis.times, rank=diagnosis.rank if other.rank is None else other.rank,
                host=other.host or diagnosis.host, traceback=other.traceback or diagnosis.traceback,
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
