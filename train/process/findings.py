"""What the doctor found: its findings, the verdict that follows from them, and how both are shown. No torch here."""

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, replace

OK, NOTE, WARNING, INCOMPLETE, UNFIT = "ok", "note", "warning", "incomplete", "unfit"
# From good to bad. A check that could not be completed is worse than a warning, as nobody knows that it would pass;
# a fault that is certain is worse than both.
CODES = {OK: 0, NOTE: 0, WARNING: 10, INCOMPLETE: 30, UNFIT: 20}
_ORDER = list(CODES)
VERDICTS = {0: "fit to train", 10: "fit to train, with warnings", 20: "not fit to train", 30: "could not be completed"}
_SHOWN = {OK: "ok", NOTE: "note", WARNING: "WARNING", INCOMPLETE: "NOT DONE", UNFIT: "NOT FIT"}
WIDTH = 110


@dataclass(frozen=True, slots=True)
class Finding:
    """What was seen in one stage, on which rank. A warning or worse also says why it matters and how to mend it."""

    stage: str
    level: str
    seen: str
    why: str = ""
    remedy: str = ""
    rank: int = 0
    host: str = ""

    @property
    def is_problem(self) -> bool:
        return self.level not in (OK, NOTE)


def exit_code(findings: Iterable[Finding]) -> int:
    """0 fit, 10 fit with warnings, 20 not fit, 30 could not be completed."""
    return CODES[max((finding.level for finding in findings), key=_ORDER.index, default=OK)]


def merge(findings: Iterable[Finding]) -> list[tuple[Finding, list[int]]]:
    """Each finding once, with the ranks that have it; by stages in their order, and in a stage the worst first."""
    ranks: dict[Finding, list[int]] = {}
    for finding in findings:
        ranks.setdefault(replace(finding, rank=0), []).append(finding.rank)
    stages = list(dict.fromkeys(finding.stage for finding in ranks))
    return sorted(ranks.items(), key=lambda item: (stages.index(item[0].stage), -_ORDER.index(item[0].level)))


def line(finding: Finding, *, ranks: str = "") -> str:
    """One finding for people: what was seen, and below it why it matters and how to mend it."""
    parts = [(f"{_SHOWN[finding.level]:8} {finding.stage:12} ", f"{ranks}: {finding.seen}" if ranks else finding.seen)]
    if finding.is_problem:
        parts += [(" " * 22 + "why:  ", finding.why), (" " * 22 + "mend: ", finding.remedy)]
    return "\n".join(
        textwrap.fill(text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start), break_long_words=False,
                      break_on_hyphens=False)
        for start, text in parts if text
    )
