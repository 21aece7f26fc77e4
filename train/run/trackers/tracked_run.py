"""One run at a tracker, as the sender sees it. No torch here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

KINDS = ("train", "eval", "final")  # the first part of a metric's name


@dataclass(frozen=True, slots=True)
class Facts:
    """What rank 0 tells the sender. `run`: the id of the run, which all attempts and checkpoints share. `address`: of
    the run in a store of objects, or of its folder.
    """

    tracker: str
    run: str
    name: str
    run_dir: str
    address: str
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Point:
    """Values of one step, all of one kind. `time`: of `time.time()` when they were measured."""

    kind: str
    step: int
    time: float
    values: dict[str, float]


class TrackedRun(Protocol):
    """Every method but `sent` may be called again with the same arguments, and raises what the package raises."""

    address: str  # for a browser

    def __init__(self, facts: Facts) -> None: ...

    def sent(self) -> dict[str, int] | None:
        """The last step that the tracker has of each kind; None where it can't be asked."""

    def log(self, points: list[Point]) -> None:
        """Points in the order of their steps."""

    def note(self, name: str, value: str) -> None:
        """A fact about the whole run, in place of an earlier value of it."""

    def upload(self, path: Path) -> None:
        """A file: a picture (.png), or anything else."""

    def end(self, state: str) -> None:
        """`state`: finished, stopped or failed."""
