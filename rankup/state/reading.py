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
    where the copy is `sharded`, and all of that is still in the ranks' files.
    """

    path: Path
    record: dict[str, Any]
    tracked: dict[str, Any]
    sharded: bool = False
    files: dict[str, bytes] = field(default_factory=dict, repr=False)  # as read, without those of the ranks

    @property
    def step(self) -> int:
        return int(self.record["step"])

    def as_plain(self) -> Self:
        """The same with all shards read into this process, as if it had been saved plain."""
        if not self.sharded:
            return self
        with Shards(self.path, self.files[INDEX]) as shards:
            tracked = shards.read_all()
        files = {name: b"".join(content) if isinstance(content, tree.TensorFile) else content
                 for name, content in tree.to_files(tracked).items()}
        return replace(self, tracked=tracked, sharded=False, files={STATE: self.files[STATE], **files})


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
    own = {} if copy is None or group.rank != source else copy.files
    path, names = group.broadcast(("" if copy is None else str(copy.path), list(own)), source=source)
    files = {name: group.broadcast_bytes(own.get(name, b""), source=source) for name in names}
    received = copy if group.rank == source else _parse(Path(path), files, no_check) if files else None
    # The files take as much memory as the state itself. Of a sharded one the index is needed
    return received and replace(received, files=files if received.sharded else {})


def read(path: Path, check: Check = no_check) -> tuple[Copy | None, str]:
    """The copy in the folder `path`, or what is wrong with it. Raises UserError where `check` refuses it."""
    files, problem = verify(path)
    if problem:
        return None, problem
    try:
        found = _parse(path, files, check)
        if found.sharded:
            with Shards(path, files[INDEX]) as shards:
                shards.check()
        return found, ""
    except UserError:
        raise
    except Exception as error:  # every digest is right, so somebody made them: it may be anything
        return None, f"its files don't fit together ({' '.join(str(error).split())[:200]})"


def _parse(path: Path, files: dict[str, bytes], check: Check) -> Copy:
    record = json.loads(files[STATE])
    check(path, record)  # first: a copy of another kind may hold what nobody here can read
    if not RUN_ID.fullmatch(run := str(record.get("run", ""))):  # it names folders
        raise UserError(f'checkpoint: {path} must be of a run with an id, got "{run:.80}".')
    if not isinstance(record.get("attempt"), str):
        raise ValueError(f"{STATE}: attempt is missing")
    if INDEX in files:
        return Copy(path, record, {}, True, files)
    tracked = tree.from_files(files)
    check(path, record, tracked)
    return Copy(path, record, tracked, False, files)
