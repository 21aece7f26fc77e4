"""A copy as one file that plain torch reads."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from rankup.errors import UserError
from rankup.places.files import staged
from rankup.state.reading import Check, Copy, load, load_newest, no_check
from rankup.state.stored_run import fetched
from rankup.urls import is_url

OWN = "rankup_"  # items whose names begin so are no objects of the user


def find_copy(
    place: str, run_dir: Path, *, warn: Callable[[str], None], check: Check = no_check, timeout_s: float = 1800.0
) -> Copy:
    """The copy at `place`, a folder or an address, or the newest good one of the run in `run_dir` if it is empty. The
    parts of a sharded one are put together.

    Raises UserError, and PeerLost where a store does not answer within `timeout_s`.
    """
    if is_url(place):
        with fetched(place, warn=warn, timeout_s=timeout_s) as path:
            return replace(load(path, check).as_plain(), path=Path(path.name))  # the folder is gone afterwards
    if place:
        return load(Path(place), check).as_plain()
    found = load_newest(run_dir / "checkpoints", warn, check)
    if found is None:
        raise UserError(f"checkpoint: {run_dir}/checkpoints must hold one, got none. Train first, or name one.")
    return found.as_plain()


def export(copy: Copy, file: Path, *, item: str = "") -> str:
    """Write the tracked items of a plain copy to `file`, for `torch.load(file, weights_only=True)`: a dict from the
    name of each item to its state. With `item`, the state of that item alone. Returns what was written, in words.

    Raises UserError where the copy has no such item, or the file can't be written.
    """
    items = {name: state for name, state in copy.tracked.items() if not name.startswith(OWN)}
    if item and item not in items:
        raise UserError(f"--item must be one of {', '.join(items)}, got {item}.")
    state = items[item] if item else items
    try:
        with staged(file) as staging, staging.open("wb") as opened:
            torch.save(state, opened)
            opened.flush()
            size = opened.tell()
    except OSError as error:
        raise UserError(f"export: the file must be one that can be written, got {file}: {error.strerror}.") from None
    what = "the weights" if item == "model" else item or ", ".join(items)
    count = f"{len(state)} tensors, " if item == "model" else ""
    return f"{file}: {what} of step {copy.step}, {count}{size / 1e6:.1f} MB"
