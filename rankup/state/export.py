"""Copies for other commands: the newest one of a run or what is at an address, and one as a file of plain torch."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from rankup.errors import UserError
from rankup.places.files import cache_roots, staged
from rankup.places.place import Place
from rankup.state.copies import MANIFEST, passed_over
from rankup.state.reading import Check, Copy, load, load_newest, no_check
from rankup.state.stored_run import StoredRun
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


# At an address --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def fetched(place: str, *, warn: Callable[[str], None], timeout_s: float) -> Iterator[Path]:
    """The path of `place` for the length of the block: the place itself, or a copy of what is at that address.

    The address may be of a run, whose newest checkpoint it is then, of a checkpoint's folder, or of a file. Checkpoints
    are verified. Raises UserError where there is nothing to read or the store refuses, and PeerLost where it does not
    answer within `timeout_s`.
    """
    if not is_url(place):
        yield Path(place)
        return
    folder = cache_roots()[0] / "fetched"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"{folder} must be writable, got {error.strerror}. Set RANKUP_CACHE to a folder that is."
        raise UserError(text) from None
    with tempfile.TemporaryDirectory(dir=folder) as own:
        yield _fetch_any(place.rstrip("/"), Path(own), warn, timeout_s)


def _fetch_any(url: str, directory: Path, warn: Callable[[str], None], timeout_s: float) -> Path:
    stored = StoredRun(Place.open(url, warn=warn, timeout_s=timeout_s))
    above, _, name = url.rpartition("/")
    beside = StoredRun(replace(stored.place, url=above, root=stored.place.root.rpartition("/")[0]))
    if MANIFEST in stored.place.names():
        path, problem = beside.fetch(name, directory)
        if problem:
            raise UserError(f"checkpoint: {url} must be a whole checkpoint, got a damaged one: {problem}.")
        return path
    if run := stored.lineage():
        if newest := fetch_newest(stored, directory, run=run.run):
            return newest
    elif beside.place.download(name, directory / name):
        return directory / name
    raise UserError(f"{url} must be a run, a checkpoint's folder or a file of weights, got nothing there.")


def fetch_newest(stored: StoredRun, directory: Path, *, run: str) -> Path | None:
    """Copy the newest whole copy of that run into the folder `directory`, verified. Returns its path there.

    None where there is none at all. Warns of those passed over. Raises as `StoredRun.fetch`, and UserError where all
    are damaged.
    """
    damaged: dict[str, str] = {}
    found = None
    for one in stored.copies(run):
        path, problem = stored.fetch(one.folder, directory)
        if not problem:
            found = path
            break
        damaged[f"checkpoint {one.name}"] = problem
    passed_over(stored.place.url, damaged, found, stored.place.warn)
    return found
