"""Copies as read and verified. One rank reads a plain copy, and the others get it over the network; of a sharded one,
which has to be on storage that all nodes share, each rank reads the slices that it needs."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from rankup.errors import UserError
from rankup.group.group import Group
from rankup.places.files import staged
from rankup.places.lease import RUN_ID
from rankup.state import tree
from rankup.state.copies import STATE, Check, known_damaged, list_copies, no_check, passed_over, verify
from rankup.state.tree import INDEX, Shards

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
    each = ((f"checkpoint {path.name}", partial(read, path, check)) for path in reversed(list_copies(directory)))
    return newest_whole(directory, each, warn)


def newest_whole(
    place: Path | str, copies: Iterable[tuple[str, Callable[[], tuple[Copy | None, str]]]], warn: Callable[[str], None]
) -> Copy | None:
    """The first whole one of the `copies` in `place`, each with its name, and `read` for it."""
    damaged: dict[str, str] = {}
    found = None
    for name, read_it in copies:
        found, problem = read_it()
        if found is not None:
            break
        damaged[name] = problem
    passed_over(place, damaged, found, warn)
    return found


def share(copy: Copy | None, group: Group, *, source: int = 0) -> Copy | None:
    """The `copy` of rank `source` on all ranks, None where it has none. All ranks call this."""
    if group.world_size == 1:
        return copy
    own = tree.files_of(*tree.encode(copy.tracked)) if copy is not None and group.rank == source else {}
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
        known_damaged.add(path)
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
        known_damaged.add(path)
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
