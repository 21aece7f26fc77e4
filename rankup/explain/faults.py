"""The table of known faults, and which of them a line shows.

known_faults.toml has the texts, and lines.toml the forms in which launchers say how a process ended.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGABRT, SIGBUS, SIGINT, SIGKILL, SIGSEGV, SIGTERM, Signals

from rankup.errors import JOIN_FAILED, PEER_LOST
from rankup.explain.logs import LINES, group_names

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
    signal: int | None = None
    libraries: Sequence[str] = ()


TABLE = tomllib.loads(Path(__file__).with_name("known_faults.toml").read_text(encoding="utf-8"))
FAULTS = [Fault(name, **entry | {"pattern": re.compile(entry.get("pattern", ""))}) for name, entry in TABLE.items()]
WORDS = [(word, fault) for fault in FAULTS for word in fault.contains]
OF_SIGNAL = {fault.signal: replace(fault, proof=True) for fault in FAULTS if fault.signal is not None}
OF_LIBRARY = {name: fault for fault in FAULTS for name in fault.libraries}
# How launchers, shells and schedulers say that a process ended, and by which exit code or signal
END = re.compile("|".join(LINES["ends"]["patterns"]))
END_WORDS = LINES["ends"]["contains"]
NAMES = {"killed": SIGKILL, "segmentation fault": SIGSEGV, "segfault": SIGSEGV, "aborted": SIGABRT, "bus error": SIGBUS}


def faults_in(text: str) -> list[tuple[Fault, Mapping[str, str | None]]]:
    """Return the faults that a line shows, with the groups of their patterns, nearest to the root cause first."""
    # One flat loop over all words is fast. Nearly every line has none of them, and this loop takes most of the time
    faults = {fault.name: fault for word, fault in WORDS if word in text}
    found = [(each, match.groupdict()) for each in faults.values() if (match := each.pattern.search(text))]
    return sorted([*found, *end_in(text)], key=lambda pair: pair[0].order)  # stable: the table's order among equals


def end_in(text: str) -> list[tuple[Fault, Mapping[str, str | None]]]:
    """Return the fault of a line that says how a process ended, or an empty list. An exit code of 128 + N, and -N in
    Python, is a signal. These explain nothing: success, a stop on request, and the loss of another rank."""
    if not any(word in text for word in END_WORDS) or not (found := END.search(text)):
        return []
    named: dict[str, str | None] = {**group_names(found.groupdict())}
    signal = named.pop("signal", None) or ""
    number = int(named.get("code") or 0)
    if signal:
        number = -int(signal) if signal.isdigit() else -(NAMES.get(signal.lower()) or Signals[signal])
    ended_by = -number if number < 0 else number - 128
    if ended_by in OF_SIGNAL and number:
        return [(OF_SIGNAL[ended_by], named | {"code": ""})]
    explains = number not in (0, JOIN_FAILED, PEER_LOST) and ended_by not in (SIGINT, SIGTERM)
    return [(OF_SIGNAL[0], named | {"code": str(number)})] if explains else []


UNKNOWN = Fault("", **LINES["unknown"])
