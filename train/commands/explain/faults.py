"""The table of known faults, known_faults.toml, and which of them a line of a log shows. No torch here."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HARMLESS = 9
ROOT, NAMED, DIED, WAITED, FOLLOWED = 1, 2, 3, 4, 5  # the orders of known_faults.toml


@dataclass(frozen=True, slots=True)
class Fault:
    """An entry of the table. The comment at the top of known_faults.toml explains the fields."""

    name: str
    order: int
    contains: tuple[str, ...]
    title: str
    why: str
    remedy: str
    example: str
    pattern: re.Pattern[str] | None = None
    doubtful: bool = False

    def search(self, text: str) -> dict[str, str | None] | None:
        """The groups of the pattern, if `text` shows this fault; None if it does not."""
        if not any(word in text for word in self.contains):
            return None
        if self.pattern is None:
            return {}
        match = self.pattern.search(text)
        return match.groupdict() if match else None


@cache
def known_faults() -> tuple[Fault, ...]:
    """The table, in its order."""
    table = tomllib.loads(Path(__file__).with_name("known_faults.toml").read_text(encoding="utf-8"))
    return tuple(_fault(name, **entry) for name, entry in table.items())


def _fault(name: str, *, contains: list[str], pattern: str = "", **texts: str | int | bool) -> Fault:
    compiled = re.compile(pattern) if pattern else None
    return Fault(name=name, contains=tuple(contains), pattern=compiled, **texts)  # type: ignore[arg-type]


def faults_in(text: str) -> Iterator[tuple[Fault, dict[str, str | None]]]:
    """The faults that a line shows, with the groups of their patterns: nearest to the root cause first."""
    found = [(fault, groups) for fault in known_faults() if (groups := fault.search(text)) is not None]
    yield from sorted(found, key=lambda pair: pair[0].order)  # stable: the table's order among equals
