"""Reading checkpoints: copies of the training's state, see `rankup.state`.

Only rank 0 reads; the others get what it read over the network, so that nodes need no shared disk and all ranks go on
from the same checkpoint.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch

from rankup.errors import UserError
from rankup.group.group import Group
from rankup.places.stored_run import AllDamaged
from rankup.state import tree
from rankup.state.copies import (
    FILE,
    find_problem,
    known_damaged,
    looks_whole,
    newest_good_step,
    step_of,
    verify,
)
from rankup.state.copies import list_copies as list_checkpoints
from rankup.state.shards import INDEX, Shards
from train.run.training_state import TrainingState

__all__ = ["FILE", "find_problem", "list_checkpoints", "looks_whole", "newest_good_step", "step_of"]


ITEMS = ("model", "optimizer", "scaler")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as read and verified. `tracked`: the state of model, optimizer and scaler, on the CPU.

    `sharded`: all of that is still in files, and `tracked` is empty.
    """

    path: Path
    state: TrainingState
    tracked: dict[str, Any]
    sharded: bool = False
    files: dict[str, bytes] = field(default_factory=dict, repr=False)  # as read, without those of the ranks

    @property
    def step(self) -> int:
        return self.state.step

    @property
    def model(self) -> dict[str, torch.Tensor]:
        """The plain state dict."""
        model: dict[str, torch.Tensor] = self.tracked["model"]
        return model

    def as_plain(self) -> Self:
        """The same with all shards read into this process, as if it had been saved plain."""
        if not self.sharded:
            return self
        with Shards(self.path, self.files[INDEX]) as shards:
            tracked = shards.read_all()
        files = {name: b"".join(content) if isinstance(content, tree.TensorFile) else content
                 for name, content in tree.to_files(tracked).items()}
        return replace(self, tracked=tracked, sharded=False, files={"state.json": self.files["state.json"], **files})


def load_newest(directory: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that verifies, or None where there is no checkpoint at all. Warns of those passed over.

    Raises AllDamaged where all are, because a silent fresh start would lose days of work, and UserError where the
    newest good one is of another format.
    """
    damaged: dict[str, str] = {}
    for path in reversed(list_checkpoints(directory)):
        found, problem = _read(path)
        if found is not None:
            for name, why in damaged.items():
                warn(f"checkpoint {name} was passed over: {why}")
            return found
        damaged[path.name] = problem
        known_damaged.add(path)
    if damaged:
        raise AllDamaged(directory, damaged)
    return None


def load_checkpoint(path: Path) -> Checkpoint:
    """Read one checkpoint folder. Raises UserError where it is damaged, of another format, or no checkpoint."""
    found, problem = _read(path)
    if found is None:
        raise UserError(f"checkpoint: {path} must be a whole checkpoint, got a damaged one: {problem}.")
    return found


def share_checkpoint(checkpoint: Checkpoint | None, group: Group, *, source: int = 0) -> Checkpoint | None:
    """The `checkpoint` of rank `source` on all ranks, None where it has none. All ranks call this.

    Its files travel as they are, but for the parts of a sharded one, which each rank reads by itself.
    """
    own = {} if checkpoint is None or group.rank != source else checkpoint.files
    path, names = group.broadcast(("" if checkpoint is None else str(checkpoint.path), list(own)), source=source)
    files = {name: group.broadcast_bytes(own.get(name, b""), source=source) for name in names}
    received = checkpoint if group.rank == source else _parse(Path(path), files) if files else None
    # The files take as much memory as the state itself. Of a sharded one the index is needed
    return received and replace(received, files=files if received.sharded else {})


def _read(path: Path) -> tuple[Checkpoint | None, str]:
    """A checkpoint, or what is wrong with it."""
    files, problem = verify(path)
    if problem:
        return None, problem
    try:
        found = _parse(path, files)
        if found.sharded:
            with Shards(path, files[INDEX]) as shards:
                shards.check()
        return found, ""
    except UserError:
        raise
    except Exception as error:  # every digest is right, so somebody made them: it may be anything
        return None, f"its files don't fit together ({' '.join(str(error).split())[:200]})"


def _parse(path: Path, files: dict[str, bytes]) -> Checkpoint:
    state = TrainingState.from_file(path, files["state.json"])
    if INDEX in files:
        return Checkpoint(path, state, {}, True, files)
    tracked = tree.from_files(files)
    if tracked.keys() != {*ITEMS} or not all(isinstance(value, dict) for value in tracked.values()):
        raise ValueError(f"it holds {', '.join(tracked)} in place of {', '.join(ITEMS)}")
    return Checkpoint(path, state, tracked, False, files)
