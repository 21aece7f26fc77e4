"""The table of known faults, known_faults.toml, in two languages, and which of them a line shows. No torch here."""

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

Language = Literal["en", "zh"]
HARMLESS = 9
ROOT, NAMED, DIED, WAITED, FOLLOWED = 1, 2, 3, 4, 5  # the orders of known_faults.toml


class Texts(BaseModel, frozen=True, extra="forbid"):
    """What a report says of a fault, in one language. Groups of the fault's pattern stand in it as {group}."""

    title: str
    why: str
    remedy: str = ""


class Fault(Texts, frozen=True, extra="forbid"):
    """An entry of the table. The comment at the top of known_faults.toml explains the fields. Its texts are English."""

    name: str
    order: int
    contains: tuple[str, ...]
    example: str
    pattern: re.Pattern[str] | None = None
    doubtful: bool = False
    proof: bool = False
    late: bool = False

    def search(self, text: str) -> dict[str, str | None] | None:
        """The groups of the pattern, if `text`, which has one of the words, shows this fault; None if it does not."""
        if self.pattern is None:
            return {}
        match = self.pattern.search(text)
        return match.groupdict() if match else None


def language_of(environ: Mapping[str, str]) -> Language:
    """Chinese where the user's locale is; the first of these variables that is not empty decides, as in POSIX."""
    locale = next(filter(None, (environ.get(name) for name in ("LC_ALL", "LC_MESSAGES", "LANG"))), "")
    return "zh" if locale.lower().startswith("zh") else "en"


@cache
def table(language: Language) -> dict[str, Any]:
    """The file of a language: the texts of each fault, and under "sentences" what a report says around them."""
    name = "known_faults.toml" if language == "en" else f"known_faults.{language}.toml"
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


@cache
def known_faults() -> tuple[Fault, ...]:
    """The table, in its order."""
    return tuple(Fault(name=name, **entry) for name, entry in table("en").items() if name != "sentences")


@cache
def texts_in(language: Language) -> dict[str, Texts]:
    """What a report says of each fault, by the fault's name."""
    if language == "en":
        return {fault.name: fault for fault in known_faults()}
    return {name: Texts(**entry) for name, entry in table(language).items() if name != "sentences"}


@cache
def _words() -> tuple[tuple[str, Fault], ...]:
    return tuple((word, fault) for fault in known_faults() for word in fault.contains)


def faults_in(text: str) -> list[tuple[Fault, dict[str, str | None]]]:
    """The faults that a line shows, with the groups of their patterns: nearest to the root cause first."""
    # One flat loop over all words: nearly every line has none of them, and this is most of what a line costs
    candidates = [fault for word, fault in _words() if word in text]
    faults = {fault.name: fault for fault in candidates}.values()
    found = [(fault, groups) for fault in faults if (groups := fault.search(text)) is not None]
    return sorted(found, key=lambda pair: pair[0].order)  # stable: the table's order among equals
