"""The doctor: is this machine, and this group of machines, fit to train? Here: what it finds, the verdict that follows
from that, and how both are shown.
"""

import contextlib
import json
import logging
import textwrap
import time
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TextIO

from rankup.agent.logs import host_name
from rankup.env.rank_env import ranges
from rankup.places.files import write_json

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


@cache
def _table() -> dict[str, dict[str, str]]:
    return tomllib.loads(Path(__file__).with_name("findings.toml").read_text(encoding="utf-8"))


def problem(name: str, **words: Any) -> Finding:
    """That entry of findings.toml, with these words."""
    entry = {part: text.format_map(words) for part, text in _table()[name].items()}
    return Finding(entry["stage"], entry["level"], entry["seen"], entry["why"], entry.get("remedy", ""))


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


def _text(finding: Finding, *, who: str = "") -> str:
    """One finding for people: what was seen, and below it why it matters and how to mend it."""
    parts = [(f"{_SHOWN[finding.level]:8} {finding.stage:12} ", who + finding.seen)]
    if finding.is_problem:
        parts += [(" " * 22 + "why:  ", finding.why), (" " * 22 + "mend: ", finding.remedy)]
    return "\n".join(
        textwrap.fill(text, WIDTH, initial_indent=start, subsequent_indent=" " * len(start), break_long_words=False,
                      break_on_hyphens=False)
        for start, text in parts if text
    )


class Report:
    """The findings of one rank. `json_out`: where JSON goes, in place of the table; None prints the table."""

    def __init__(self, log: logging.Logger, *, rank: int, world_size: int, json_out: TextIO | None) -> None:
        self.findings: list[Finding] = []
        self.facts: dict[str, Any] = {"world_size": world_size, "hosts": [host_name()]}
        self._log, self._rank, self._json_out = log, rank, json_out
        self._began_s = time.monotonic()

    def add(self, *findings: Finding) -> None:
        """Keep findings of this rank, and print them on rank 0."""
        for finding in findings:
            self.findings.append(replace(finding, rank=self._rank, host=host_name()))
            if self._json_out is None:
                self._log.info(_text(finding))

    def end_together(self, gather: Callable[[Any], list[Any]], path: Path) -> int:
        """Rank 0 prints the verdict of all ranks and writes it to `path`. Collective: every rank calls it.

        `gather`: gives every rank's value, in the order of the ranks. Returns the exit code, the same on all ranks.
        """
        gathered = gather([asdict(finding) for finding in self.findings])
        everything = [Finding(**finding) for part in gathered for finding in part]
        if self._rank == 0:
            for finding, ranks in merge(everything) if self._json_out is None else ():
                # Rank 0's own findings were printed as they were found
                if ranks[0] != 0 and finding.is_problem:
                    self._log.info(_text(finding, who=f"rank {ranges(ranks)} on {finding.host}: "))
            self._end(everything)
            with contextlib.suppress(OSError):  # a disk that can't be written has its own finding
                write_json(path, self._as_json(everything))
        return exit_code(everything)

    def end_alone(self) -> int:
        """The ranks did not join, or lost each other: each rank reports its own findings. Returns the exit code."""
        if self._rank != 0 and self._json_out is None:  # its log shows warnings alone
            for finding in (each for each in self.findings if each.is_problem):
                self._log.warning(_text(finding))
        self._end(self.findings)
        return exit_code(self.findings)

    def _end(self, findings: list[Finding]) -> None:
        if self._json_out is not None:
            self._json_out.write(json.dumps(self._as_json(findings)) + "\n")
            self._json_out.flush()
            return
        stages = len({finding.stage for finding in findings})
        counts = {level: len(merge(f for f in findings if f.level == level)) for level in (UNFIT, INCOMPLETE, WARNING)}
        problems = ", ".join(f"{count} {level}" for level, count in counts.items() if count)
        verdict = VERDICTS[exit_code(findings)] + (f" ({problems})" if problems else "")
        level = logging.WARNING if self._rank else logging.INFO
        self._log.log(level, f"doctor: {verdict}: {stages} stages in {time.monotonic() - self._began_s:.1f} s")

    def _as_json(self, findings: list[Finding]) -> dict[str, Any]:
        """The verdict, the facts, and each finding once with its ranks; good ones only where rank 0 has them."""
        code = exit_code(findings)
        kept = [{**asdict(finding), "ranks": ranks} for finding, ranks in merge(findings)
                if finding.is_problem or 0 in ranks]
        facts = {**self.facts, "seconds": round(time.monotonic() - self._began_s, 2)}
        return {"verdict": VERDICTS[code], "exit_code": code, **facts, "findings": kept}
