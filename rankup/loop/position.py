"""Where a run stands: as of the last commit, and what the loop has done since."""

from dataclasses import dataclass, field, fields
from typing import Any

from rankup.loop.batches import Source

CHECKED_STEPS = 20  # a mistake in a loop shows at each of its steps


@dataclass(slots=True)
class Position:
    """Where a run stood at its last commit.

    `step`: how many steps are finished. `streams`: for each pass over a loader in this epoch, in the order of their
    beginnings, how many batches it gave. `changes`: of `job.change` since the last step. `evaluated`: the step of the
    last `job.log`, and `metrics` its values. `line`: the last line of training in `metrics.jsonl`, which every rank
    knows: rank 0 may be killed before it writes it.
    """

    step: int = 0
    epoch: int = 0
    streams: list[int] = field(default_factory=list)
    changes: int = 0
    evaluated: int = 0
    metrics: dict[str, float] | None = None
    line: dict[str, Any] | None = None

    @classmethod
    def of(cls, record: dict[str, Any] | None) -> "Position":
        """As a copy's record has it; a run's beginning for None."""
        return cls(**{name: record[name] for name in cls.names()}) if record else cls()

    @classmethod
    def names(cls) -> list[str]:
        return [each.name for each in fields(cls)]

    @property
    def key(self) -> tuple[int, int, int]:
        """Equal for two copies that hold the same state."""
        return self.step, self.epoch, self.changes


class Live:
    """What the loop has done since the last commit, and what it has yet to do again after a resume.

    `fetched`: batches since then. `weight`: of the last one. `active`: how many loops over batches are running.
    """

    def __init__(self, position: Position, states: list[Any]) -> None:
        """`states`: of the loaders that can be asked for theirs, by pass; None for the others."""
        self.epoch = position.epoch
        self.streams: list[int] = []
        self.fetched = self.active = 0
        self.weight, self.weight_asked, self.weight_said = 1.0, False, False
        self.changes_to_repeat = position.changes
        self.line: dict[str, Any] | None = position.line
        self.has_epochs = False
        self.behind = False  # the run went on behind an epoch's last batch, and no batch has come since
        self.steps = 0  # of this process
        self._sources: list[Source] = []
        self._skip, self._states = [*position.streams], states

    def begin_epoch(self) -> None:
        self.epoch += 1
        self.streams, self._sources, self._skip, self._states = [], [], [], []

    def open(self, source: Source) -> tuple[int, int, Any]:
        """Another pass over a loader begins: its number in this epoch, how many batches to skip, and the loader's
        state."""
        number = len(self.streams)
        skip = self._skip[number] if number < len(self._skip) else 0
        state = self._states[number] if number < len(self._states) else None
        self.streams.append(skip)
        self._sources.append(source)
        return number, skip, state

    def states(self) -> list[Any]:
        """What the loaders say of themselves, by pass."""
        return [source.state() for source in self._sources]
