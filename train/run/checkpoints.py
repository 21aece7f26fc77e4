"""Checkpoints of this program: copies whose record has its settings too, read by hand or from an address."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rankup.loop.record import check_record
from rankup.state import reading
from rankup.state.reading import Copy

BEGIN_ANEW = "set --fresh to start anew, or another --name"
ITEMS = {"model", "optimizer", "scaler"}  # what `train.loop.build` tracks
ABOUT = {"config", "data", "steps_per_epoch"}  # of the record, beside what each copy has


def check(path: Path, record: dict[str, Any], tracked: dict[str, Any] | None = None) -> None:
    """Raises UserError where the copy `path` is of another format, and ValueError where it is not of this program."""
    check_record(path, record, begin_anew=BEGIN_ANEW)
    if missing := sorted(ABOUT - record.keys()):
        raise ValueError(f"state.json: {', '.join(missing)} missing")
    if tracked is not None and not ({*tracked} == ITEMS and all(isinstance(each, dict) for each in tracked.values())):
        raise ValueError(f"it holds {', '.join(tracked)} in place of {', '.join(sorted(ITEMS))}")


def load_checkpoint(path: Path) -> Copy:
    """Read one checkpoint folder. Raises UserError where it is damaged, of another format, or no checkpoint."""
    return reading.load(path, check)


def load_newest(directory: Path, warn: Callable[[str], None]) -> Copy | None:
    """The newest checkpoint in `directory` that verifies, see `rankup.state.reading.load_newest`."""
    return reading.load_newest(directory, warn, check)
