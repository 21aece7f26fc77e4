"""What the doctor found: its findings, the verdict that follows from them, and how both are shown. No torch here."""

import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

OK, NOTE, WARNING, INCOMPLETE, UNFIT = "ok", "note", "warning", "incomplete", "unfit"
# From good to bad. A check that could not be completed is worse than a warning, as nobody knows that it would pass;
# a fault that is certain is worse than both.
_ORDER = (OK, NOTE, WARNING, INCOMPLETE, UNFIT)
CODES = {OK: 0, NOTE: 0, WARNING: 10, UNFIT: 20, INCOMPLETE: 30}
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


def exit_code(findings: Iterable[Finding]) -> int:
    """0 fit, 10 fit with warnings, 20 not fit, 30 could not be completed."""
    worst = max((_ORDER.index(finding.level) for finding in findings), default=0)
    return CODES[_ORDER[worst]]


def merge(findings: Iterable[Finding]) -> list[tuple[Finding, list[int]]]:
    """Each finding once, with the ranks that have it; by stages in their order, and in a stage the worst first."""
    ranks: dict[Finding, list[int]] = {}
    stages: list[str] = []
    for finding in findings:
        if finding.stage not in stages:
            stages.append(finding.stage)
        same = Finding(finding.stage, finding.level, finding.seen, finding.why, finding.remedy, 0, finding.host)
        ranks.setdefault(same, []).append(finding.rank)
    return sorted(ranks.items(), key=lambda item: (stages.index(item[0].stage), -_ORDER.index(item[0].level)))


def line(finding: Finding, *, ranks: str = "") -> str:
    """One finding for people: what was seen, and below it why it matters and how to mend it."""
    head = f"{_SHOWN[finding.level]:8} {finding.stage:12} "
    where = f"{ranks}: " if ranks else ""
    parts = [(head, where + finding.seen)]
    if finding.level not in (OK, NOTE):
        parts += [(" " * 22 + "why:  ", finding.why)] if finding.why else []
        parts += [(" " * 22 + "mend: ", finding.remedy)] if finding.remedy else []
    lines = []
    for start, text in parts:
        wrapped = textwrap.wrap(text, WIDTH - len(start), break_long_words=False, break_on_hyphens=False) or [""]
        lines += [start + wrapped[0], *(" " * len(start) + more for more in wrapped[1:])]
    return "\n".join(lines)


def as_json(findings: Iterable[Finding], facts: dict[str, Any]) -> dict[str, Any]:
    """The verdict, the facts, and each finding once with its ranks; good ones only where rank 0 has them."""
    found = list(findings)
    code = exit_code(found)
    kept = []
    for finding, ranks in merge(found):
        if finding.level not in (OK, NOTE) or 0 in ranks:
            fields = asdict(finding)
            del fields["rank"]
            kept.append({**fields, "ranks": ranks})
    return {"verdict": VERDICTS[code], "exit_code": code, **facts, "findings": kept}
