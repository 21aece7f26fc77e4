"""Copies as read and verified: of one folder, the newest of several, and one that another rank has read.

One rank reads a copy, and the others get its files over the network: nodes need no shared disk, and all ranks go on
from the same copy. Of a sharded copy each rank reads its own part.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from rankup.errors import UserError
from rankup.group.group import Group
from rankup.places.lineage import RUN_ID
from rankup.state import tree
from rankup.state.copies import STATE, known_damaged, list_copies, passed_over, verify
from rankup.state.shards import INDEX, Shards

# check(path, record), and check(path, record, tracked) once they are read: looks at a copy. Raises UserError
# where it is of another kind than the caller's, and ValueError where it is damaged
Check = Callable[..., object]


def no_check(path: Path, record: dict[str, Any], tracked: dict[str, Any] | None = None) -> None:
    """Any record will do."""


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
        with Shards(self.path, self.index) as shards:
            return replace(self, tracked=shards.read_all(), index=b"")


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
            with Shards(path, files[INDEX]) as shards:
                shards.check()
            return Copy(path, record, {}, files[INDEX]), ""
        tracked = tree.from_files(files)
        check(path, record, tracked)
        return Copy(path, record, tracked), ""
    except UserError:
        raise
    except Exception as error:  # every digest is right, so somebody made them: it may be anything
        return None, f"its files don't fit together ({' '.join(str(error).split())[:200]})"
