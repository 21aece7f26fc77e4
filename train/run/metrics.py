"""Where a run stands, and how fast it is. Its numbers are written by `rankup.observe.metrics`."""

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Progress:
    """Where a run stands: the last finished step.

    `evaluated`: the last step whose evaluation is complete, `metrics`: its outcome. `line`: the last line of training
    in `metrics.jsonl`, which every rank knows: rank 0 may be killed before it writes it.
    """

    step: int = 0
    evaluated: int = 0
    metrics: dict[str, float] | None = None
    line: dict[str, Any] | None = None


@dataclass(slots=True)
class Speed:
    """Samples per second of training alone: a clock that stands still during set-up, evaluation and saves."""

    batch_size: int
    first_step: int
    _trained_s: float = 0.0
    _began_s: float | None = field(default_factory=time.monotonic)  # None while it stands still

    def pause(self) -> None:
        self._trained_s, self._began_s = self._seconds(), None

    def resume(self) -> None:
        self._began_s = time.monotonic()

    def at(self, step: int) -> float:
        """The mean since this attempt began, with `step` steps of the run done."""
        return (step - self.first_step) * self.batch_size / max(self._seconds(), 1e-9)

    def _seconds(self) -> float:
        return self._trained_s + (time.monotonic() - self._began_s if self._began_s is not None else 0.0)
