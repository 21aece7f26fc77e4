"""The table of known faults, known_faults.toml, and which of them a line shows."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# The orders of the table
ROOT, NAMED, DIED, WAITED, FOLLOWED, SUMMARY, HARMLESS = 1, 2, 3, 4, 5, 6, 9


@dataclass(frozen=True, slots=True)
class Fault:
    """An entry of the table, whose first lines explain the fields. Groups of `pattern` stand in texts as {group}."""

    name: str
    title: str
    why: str
    remedy: str = ""
    order: int = DIED
    contains: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None
    example: str = ""
    doubtful: bool = False
    proof: bool = False
    late: bool = False

    def search(self, text: str) -> Mapping[str, str | None] | None:
        """The groups of the pattern, if `text`, which has one of the words, shows this fault; None if it does not."""
        if self.pattern is None:
            return {}
        match = self.pattern.search(text)
        return match.groupdict() if match else None


@cache
def known_faults() -> tuple[Fault, ...]:
    """The table, in its order."""
    table = tomllib.loads(Path(__file__).with_name("known_faults.toml").read_text(encoding="utf-8"))
    found = []
    for name, entry in table.items():
        pattern = re.compile(entry.pop("pattern")) if "pattern" in entry else None
        found.append(Fault(name, contains=tuple(entry.pop("contains")), pattern=pattern, **entry))
    return tuple(found)


@cache
def _words() -> tuple[tuple[str, Fault], ...]:
    return tuple((word, fault) for fault in known_faults() for word in fault.contains)


def faults_in(text: str) -> list[tuple[Fault, Mapping[str, str | None]]]:
    """The faults that a line shows, with the groups of their patterns: nearest to the root cause first."""
    # One flat loop over all words: nearly every line has none of them, and this is most of what a line costs
    faults = {fault.name: fault for word, fault in _words() if word in text}
    found = [(fault, groups) for fault in faults.values() if (groups := fault.search(text)) is not None]
    return sorted(found, key=lambda pair: pair[0].order)  # stable: the table's order among equals
