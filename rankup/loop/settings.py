"""The arguments of `rankup.init`, and the format of `state.json`: from which copies an attempt may resume."""

import platform
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rankup.agent.network import fits
from rankup.errors import UserError
from rankup.state.copies import STATE, Check
from rankup.state.saver import Options

# Raise FORMAT if you add, remove or redefine a field, or change how random numbers are drawn. Copies hold no generator
# state: each step, epoch and sample derives its own seed. rankup refuses a copy of another format, because the resumed
# run would silently get other weights.
FORMAT = 13
VERSIONS = {"torch": str(torch.__version__), "python": platform.python_version()}
# The form of each field of a record, see `fits`
COUNT, PASS = range(2**63), ("streams", "traces", "loaders")
NEEDED: dict[str, Any] = {
    "step": COUNT, "evaluated": COUNT, "metrics?": {"*": float}, "line?": {"step": COUNT}, "epoch": COUNT,
    "streams": [range(-1, 2**63)], "traces": [int | None], "rank": COUNT, "loaders": [COUNT],
    "cycles": [(COUNT, COUNT, int | None)], "changes": COUNT, "ended": str, "seed": int, "world_size": range(1, 2**63),
    "versions": dict, "written_by": str,
}
EXTRA: dict[str, Any] = {
    "options": {"*": dict | list}, "built": {"*": [str]}, "settings": dict, "world_sizes": [(COUNT, COUNT)],
    "flags": {"*": ((int, int), (int, int))},
}


def check_record(path: Path, record: dict[str, Any], *, more: Check) -> None:
    """Raise UserError if the copy at `path` has another format, ValueError if a field is missing or of another type,
    and what `more` raises."""
    if (found := record.get("format")) != FORMAT:
        raise UserError(
            f"checkpoint: {path} must be of format {FORMAT}, got format {found}. Resume with the version of this "
            "program that wrote it, or start a new run."
        )
    if missing := sorted({name.removesuffix("?") for name in NEEDED} - record.keys()):
        raise ValueError(f"{STATE}: {', '.join(missing)} missing")
    for name, form in {**NEEDED, **{name: form for name, form in EXTRA.items() if name in record}}.items():
        if not fits(record, {name: form}):
            raise ValueError(f"{STATE}: {name.removesuffix('?')} is {record[name.removesuffix('?')]!r:.50}")
    if len({len(record[name]) for name in PASS}) > 1:
        raise ValueError(f"{STATE}: {', '.join(PASS)} must have the same length")
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
