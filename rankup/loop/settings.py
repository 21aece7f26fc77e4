"""The arguments of `rankup.init`, and the format of `state.json`: from which copies an attempt may resume."""

import platform
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from rankup.errors import UserError
from rankup.observe.metrics import Position
from rankup.state.copies import STATE, Check
from rankup.state.saver import Options

# Raise FORMAT if you add, remove or redefine a field, or change how random numbers are drawn. Copies hold no generator
# state: each step, epoch and sample derives its own seed. rankup refuses a copy of another format, because the resumed
# run would silently get other weights.
FORMAT = 13
VERSIONS = {"torch": str(torch.__version__), "python": platform.python_version()}
# What each field of a record is like; None: a dict or None
LIKE = {**asdict(Position()), "seed": 0, "world_size": 1, "versions": {}, "written_by": ""}


def check_record(path: Path, record: dict[str, Any], *, more: Check) -> None:
    """Raise UserError if the copy at `path` has another format, ValueError if a field is missing or of another type,
    and what `more` raises."""
    if (found := record.get("format")) != FORMAT:
        raise UserError(
            f"checkpoint: {path} must be of format {FORMAT}, got format {found}. Resume with the version of this "
            "program that wrote it, or start a new run."
        )
    if missing := sorted(LIKE.keys() - record.keys()):
        raise ValueError(f"{STATE}: {', '.join(missing)} missing")
    for name, like in {**LIKE, "options": {}, "built": {}}.items():
        if not isinstance(value := record.get(name, like), dict | None if like is None else type(like)):
            raise ValueError(f"{STATE}: {name} is {value!r:.50}")
    more(path, record)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Options):
    """The arguments of `rankup.init`, and options for a program that opens its job itself.

    `share_all`: all ranks get rank 0's buffers for all modules, not only for modules in DDP. `tracker`: "mlflow",
    "wandb" or "none". `shown`: the settings that the tracker gets. `may_change`, `again`: see
    `rankup.init`.
    """

    seed: int
    save_every_steps: int | None = None
    log_every_steps: int = 50
    tensorboard: bool = True
    step_timeout_s: float = 600.0
    share_all: bool = False
    tracker: str = "none"
    shown: dict[str, Any] = field(default_factory=dict)
    again: bool = False
    may_change: Collection[str] = ()
