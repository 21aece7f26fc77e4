"""Where a run stands, and `state.json`: what a copy says of itself beside the tracked state."""

import platform
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from rankup.errors import UserError
from rankup.state.copies import STATE, to_json
from rankup.state.saver import Options

# Raise it when a field is added, removed or changes its meaning, and when random numbers are drawn in another way: no
# generator's state is saved, each step, epoch and sample derives its own seed. A copy of another format is refused,
# because the weights of the resumed run would change without a word.
FORMAT = 6


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
    def key(self) -> tuple[int, int, int, int]:
        """Equal for two copies that hold the same state."""
        return self.step, self.epoch, self.changes, self.evaluated


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "python": platform.python_version()}


def write_record(
    position: Position, *, seed: int, world_size: int, run: str, attempt: str, written_by: str, about: dict[str, Any]
) -> bytes:
    """The contents of `state.json`. `about`: what the program says of itself, its settings for one."""
    return to_json({
        "format": FORMAT, **asdict(position), "seed": seed, "world_size": world_size, "versions": versions(),
        "run": run, "attempt": attempt, "written_by": written_by, **about,
    })


NAMES = {*Position.names(), "seed", "world_size", "versions", "written_by"}


def check_record(path: Path, record: dict[str, Any]) -> None:
    """Raises UserError where the copy `path` is of another format, and ValueError where a field is missing."""
    if (found := record.get("format")) != FORMAT:
        raise UserError(
            f"checkpoint: {path} must be of format {FORMAT}, got format {found}. Go on with the version of this "
            "program that wrote it, or begin anew."
        )
    if missing := sorted(NAMES - record.keys()):
        raise ValueError(f"{STATE}: {', '.join(missing)} missing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Options):
    """The arguments of `init`, and what else a program may set that opens its job itself.

    `share_all`: rank 0's buffers of all modules are those of all ranks, not of modules in DDP alone. `can_rescue`: a
    rank that lost another one still holds the whole last commit. `tracker`: mlflow or wandb; it is shown the settings
    `shown`. `begin_anew`, `again`: how the user begins a run anew, and goes on with one, in messages.
    """

    seed: int
    save_every_steps: int | None = None
    log_every_steps: int = 10
    tensorboard: bool = True
    step_timeout_s: float = 600.0
    share_all: bool = False
    can_rescue: bool = True
    tracker: str = "none"
    shown: dict[str, Any] = field(default_factory=dict)
    begin_anew: str = "set fresh=True to begin anew, or another run"
    again: str = "The same command"
