"""Copies as read and verified.

One rank reads a plain copy, and the others get its files over the network: nodes need no shared disk, and all ranks go
on from the same copy. A sharded one has to be on storage that all nodes share: each rank reads the slices that it
needs.
"""

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch

from rankup.errors import UserError
from rankup.group.group import Group
from rankup.places.files import cache_roots, staged
from rankup.places.lease import RUN_ID
from rankup.places.place import Place
from rankup.state import tree
from rankup.state.copies import MANIFEST, STATE, Check, known_damaged, list_copies, no_check, passed_over, verify
from rankup.state.stored_run import StoredRun
from rankup.state.tree import INDEX, Shards
from rankup.urls import is_url

OWN = "rankup_"  # items whose names begin so are no objects of the user


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of the state, verified.

    `record`: what `state.json` says, `step`, `run` and `attempt` among it. `tracked`: the tracked items, on the CPU; {}
    where all of that is still in the ranks' files, which `index` describes.
    """

    path: Path
    record: dict[str, Any]
    tracked: dict[str, Any]
    index: bytes = field(default=b"", repr=False)

    @property
    def step(self) -> int:
        return int(self.record["step"])

    @property
    def sharded(self) -> bool:
        return self.index != b""

    def as_plain(self) -> Self:
        """The same with all shards read into this process, as if it had been saved plain."""
        if not self.sharded:
            return self
        return replace(self, tracked=Shards(self.path, self.index).read_all(), index=b"")


def load(path: Path, check: Check = no_check) -> Copy:
    """Read the copy in the folder `path`. Raises UserError where it is damaged, refused by `check`, or no copy."""
    found, problem = read(path, check)
    if found is None:
        raise UserError(f"checkpoint: {path} must be a whole checkpoint, got a damaged one: {problem:.300}.")
    return found


def load_newest(directory: Path, warn: Callable[[str], None], check: Check = no_check) -> Copy | None:
    """The newest copy in `directory` that verifies, or None where there is none at all. Warns of those passed over.

    Raises UserError where all are damaged, and where `check` refuses the newest good one.
    """
    damaged: dict[str, str] = {}
    found = None
    for path in reversed(list_copies(directory)):
        found, problem = read(path, check)
        if found is not None:
            break
        damaged[f"checkpoint {path.name}"] = problem
        known_damaged.add(path)
    passed_over(directory, damaged, found, warn)
    return found


def share(copy: Copy | None, group: Group, *, source: int = 0) -> Copy | None:
    """The `copy` of rank `source` on all ranks, None where it has none. All ranks call this."""
    if group.world_size == 1:
        return copy
    own = tree.to_files(copy.tracked) if copy is not None and group.rank == source else {}
    about = [str(copy.path), copy.record, copy.index.decode(), [*own]] if copy is not None and own else None
    if (about := group.broadcast(about, source=source)) is None:
        return None
    path, record, index, names = about
    files = dict[str, bytes]()
    for name in names:
        content = own.get(name, b"")
        whole = content if isinstance(content, bytes) else b"".join(content)
        files[name] = group.broadcast_bytes(whole, source=source)
    return copy if own else Copy(Path(path), record, tree.from_files(files), index.encode())


def read(path: Path, check: Check = no_check) -> tuple[Copy | None, str]:
    """The copy in the folder `path`, or what is wrong with it. Raises UserError where `check` refuses it."""
    files, problem = verify(path)
    if problem:
        return None, problem
    try:
        record = json.loads(files[STATE])
        check(path, record)  # first: a copy of another kind may hold what nobody here can read
        if not RUN_ID.fullmatch(run := str(record.get("run", ""))):  # it names folders
            raise UserError(f'checkpoint: {path} must be of a run with an id, got "{run:.80}".')
        if not isinstance(record.get("attempt"), str):
            raise ValueError(f"{STATE}: attempt is missing")
        if INDEX in files:
            Shards(path, files[INDEX]).check()
            return Copy(path, record, {}, files[INDEX]), ""
        tracked = tree.from_files(files)
        check(path, record, tracked)
        return Copy(path, record, tracked), ""
    except UserError:
        raise
    except Exception as error:  # every digest is right, so somebody made them: it may be anything
        return None, f"its files don't fit together ({' '.join(str(error).split())[:200]})"


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


# For other commands --------------------------------------------------------------------------------------------------


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
