"""Checkpoints of this program: copies whose record has its settings too, read by hand or from an address."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rankup.errors import UserError
from rankup.loop.record import check_record
from rankup.places.cache import cache_root
from rankup.places.place import Place
from rankup.places.stored_run import fetch
from rankup.places.urls import is_url
from rankup.state import reading
from rankup.state.copies import find_problem
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


@contextmanager
def fetched(place: str, *, warn: Callable[[str], None], timeout_s: float) -> Iterator[Path]:
    """The path of `place` for the length of the block: the place itself, or a copy of what is at that address.

    At the address of a run that is its newest checkpoint. Copies of checkpoints are verified. Raises UserError where
    there is nothing to read or the store refuses, and PeerLost where it does not answer within `timeout_s`.
    """
    if not is_url(place):
        yield Path(place)
        return
    folder = cache_root() / "fetched"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"{folder} must be writable, got {error.strerror}. Set RANKUP_CACHE to a folder that is."
        raise UserError(text) from None
    with tempfile.TemporaryDirectory(dir=folder) as own:
        yield fetch(Place.open(place, warn=warn, timeout_s=timeout_s), Path(own), find_problem)
