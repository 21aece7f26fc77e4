"""Checkpoints of this program: their record has its settings too."""

from pathlib import Path
from typing import Any

BEGIN_ANEW = "set --fresh to start anew, or another --name"
ITEMS = {"model", "optimizer", "scaler"}  # what `train.loop.build` tracks
ABOUT = {"config", "data", "steps_per_epoch"}  # of the record, beside what each checkpoint has


def check(path: Path, record: dict[str, Any], tracked: dict[str, Any] | None = None) -> None:
    """Raises ValueError where the checkpoint `path` is not of this program."""
    if missing := sorted(ABOUT - record.keys()):
        raise ValueError(f"state.json: {', '.join(missing)} missing")
    if tracked is not None and not ({*tracked} == ITEMS and all(isinstance(each, dict) for each in tracked.values())):
        raise ValueError(f"it holds {', '.join(tracked)} in place of {', '.join(sorted(ITEMS))}")
