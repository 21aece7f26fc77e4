"""Where copies are: the one interface to the run's folder, another node's disk, a node's memory, an object store and a
mirror. See `rankup.state` for the words.

| place | class | lists | keeps |
|---|---|---|---|
| the run's folder | `Folder` | rank 0 | the `keep` newest, and those that `job.keep` has named |
| another node's disk | `SecondCopies` | each rank | the newest one |
| a node's memory | `NodeMemory` | each rank | rescues of the newest step, the two newest parts of each rank |
| object store, mirror | `SecondPlace` | rank 0 | as the run's folder |
"""

import contextlib
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from rankup.agent.processes import cpu_quota
from rankup.errors import disk_errors
from rankup.places.files import discard, read_json
from rankup.places.lease import KEPT
from rankup.state import copies
from rankup.state.copies import MANIFEST, STATE, Content, Fingerprint, list_copies, looks_whole, step_of, to_json

CHECKPOINT, STORE, MIRROR, PEER, RESCUE, PARTS = range(6)  # kinds of copies; at the same step the lower kind wins
SECOND = "copies"  # folder for second copies, by the id of their run, in the run directory of a node without rank 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A copy at a place that `rank` can reach, on `node`. `where`: its folder there. `words`: its description for the
    user. `attempt` is the mark of the attempt that wrote the copy; `attempt` and `run` are "" if they can't be read.
    `lineage`: the lineage of that attempt, for a copy outside rank 0's folder. A part has `ranks`, whose state it is.
    All parts of a step become one with `parts`."""

    rank: int = 0
    node: str = ""
    kind: int = CHECKPOINT
    where: str = ""
    words: str = ""
    step: int = 0
    attempt: str = ""
    run: str = ""
    lineage: dict[str, Any] | None = None
    ranks: Sequence[int] = ()
    parts: Sequence["Candidate"] = ()

    @classmethod
    def of(cls, path: Path, record: dict[str, Any], **more: Any) -> Self:
        """Return the copy at `path` whose `state.json` is `record`. Nothing in it is believed if somebody has renamed
        the folder."""
        step = step_of(path)
        if {"run", "attempt"} <= record.keys() and record.get("step") == step:
            more |= {"attempt": str(record["attempt"]), "run": str(record["run"])}
        return cls(where=str(path), step=step, **more)


class Place(ABC):
    """What all places can do. At an address the methods raise as `ObjectStore` does, elsewhere UserError if the disk is
    full or not writable. A copy is put there by `Folder.write`, `Folder.put` or `SecondPlace.put`; it appears whole or
    not at all."""

    @abstractmethod
    def list(self) -> Iterable[Candidate]:
        """Return the copies here, without reading their bytes."""

    @contextlib.contextmanager
    def open(self, one: Candidate) -> Iterator[Path]:
        """Within the block, the copy is in a folder of this machine. Its bytes are not verified yet."""
        yield Path(one.where)


class Folder(Place):
    """A folder of copies on this machine: of a run, of second copies of a run, or in memory.

    A copy is written in a hidden folder, synced and renamed. Only then are old copies removed: all but the `keep`
    newest that look whole. The next owner of a run first removes all hidden folders: if an owner that was frozen and
    taken for dead wakes up, it finds nothing to rename. No save removes the hidden folders of others, because a late
    owner would then remove its successor's. A save does not read the files back: they would come from the page cache
    and prove nothing about the disk.
    """

    def __init__(
        self, path: Path, *, keep: int = 1, check_owner: Callable[[], None] = lambda: None, durable: bool = True
    ) -> None:
        """`check_owner` raises if another attempt owns the run by now. `durable`: whether copies must survive the end
        of this machine."""
        self.path, self.keep, self.check_owner, self.durable = path, keep, check_owner, durable
        self.in_use: set[Path | None] = set()  # the copies that another place takes now; no save removes them

    def list(self) -> Iterator[Candidate]:
        # Unreadable copies are included, so that they are later reported as damaged
        for path in reversed(list_copies(self.path)):
            yield Candidate.of(path, read_json(path / STATE), words=f"checkpoint {path.name}")

    def put(self, path: Path) -> Path:
        """Take the whole copy in the folder `path`, on the same disk. Return its path here."""
        with disk_errors("checkpoint", self.path):
            return _rename(path, self.path / path.name)

    @contextlib.contextmanager
    def incoming(self, step: int) -> Iterator[Path]:
        """Yield a path for a copy from elsewhere, which `put` then takes. It is removed after the block, and has the
        final name of the copy, because a name must have the right step. Raises UserError."""
        staging = self.stage(copies.staging_of(self.path, step))
        try:
            yield staging / f"step-{step:08d}"
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def write(self, step: int, files: Mapping[str, Content]) -> Path:
        """Write a copy that this process holds whole, and return its path. Raises as `publish` does."""
        self.check_owner()
        return self.publish(self.stage(copies.staging_of(self.path, step)), step, files)

    def stage(self, staging: Path) -> Path:
        """Create the hidden folder, which must not exist yet. Raises UserError."""
        with disk_errors("checkpoint", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            staging.mkdir()
        return staging

    def publish(
        self, staging: Path, step: int, files: Mapping[str, Content], written: Mapping[str, Fingerprint] | None = None
    ) -> Path:
        """Add `files` to those that the ranks have `written` in `staging`, and make it the copy of this step. Return
        the path of the copy. Raises UserError, and what `check_owner` raises. In any case `staging` is gone
        afterwards."""
        target = self.path / f"step-{step:08d}"
        try:
            with disk_errors("checkpoint", self.path, self.check_owner):
                # A rank that writes a rescue has the node's CPUs for itself: the other ranks wait for it
                threads = max(1, min(8, int(cpu_quota())))
                write = copies.write_durably if self.durable else partial(copies.write, durably=False, threads=threads)
                entries = {**(written or {}), **{name: write(staging / name, each) for name, each in files.items()}}
                copies.write_durably(staging / MANIFEST, [to_json({"step": step, "files": entries})])
                _sync(staging)
                self.check_owner()
                _rename(staging, target)
                _sync(self.path)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        self.check_owner()
        self._remove_old(target)
        return target

    def _remove_old(self, newest: Path) -> None:
        good, named = 0, kept_steps(self.path.parent)
        for path in reversed(list_copies(self.path)):
            if path == newest:  # it need not have the highest step: there may be damaged or a successor's later copies
                good += 1
            elif good < self.keep and not (path.suffix and path.with_suffix("").exists()):
                good += looks_whole(path)
            elif path not in self.in_use and step_of(path) not in named:  # a later save removes one that is in use
                discard(path)


def kept_steps(run_dir: Path) -> set[int]:
    """Return the steps of the copies that `job.keep` has given a name."""
    return {*read_json(run_dir / KEPT).values()}


def _rename(staging: Path, target: Path) -> Path:
    """Rename `staging` to `target`, so that a reader sees no copy or a whole one. Return `target`. Raises OSError."""
    # An earlier copy of this step may be damaged or lack its evaluation. A folder can't be renamed onto another one
    aside = target.with_name(f"{target.name}.replaced")
    if os.path.lexists(target):  # it may also be a file or a broken link
        discard(aside)  # an earlier process was killed between these renames
        target.rename(aside)
    try:
        staging.rename(target)
    except OSError:
        with contextlib.suppress(OSError):  # the next owner may have published a copy under this name
            aside.rename(target)
        raise
    discard(aside)
    return target


def _sync(directory: Path) -> None:
    """Sync a directory. Only then do the names in it survive a power cut."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
