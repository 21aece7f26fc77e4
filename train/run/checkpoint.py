"""Reading checkpoints: which ones there are, whether every byte is as it was written, and what is in them.

`step-00001200/` holds `model.pt` (plain weights, no wrapper's prefixes), `training.pt` and `state.json` (see
`train.run.training_state`), and `manifest.json` (the step, and size and SHA-256 of each file). Everything loads with
`weights_only=True`. A sharded one has `shards/` in place of `model.pt`: weights and the optimizer's tensors, see
`train.run.sharded_checkpoint`. Only rank 0 reads; the others get what it read over the network, so that nodes need no
shared disk and all ranks go on from the same checkpoint. `train.run.publish` writes them.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch

from rankup.errors import UserError
from rankup.places.stored_run import AllDamaged
from train.group.group import Group, pack, unpack
from train.run import sharded_checkpoint
from train.run.sharded_checkpoint import Fingerprint
from train.run.training_state import TrainingState

# `.replaced`: the earlier one of the same step, for the moment until the new one has its name
NAME = re.compile(r"step-(\d{8,})(\.replaced)?")
# A manifest may come from outside: no name in it may lead out of the checkpoint's folder
FILE = re.compile(r"(shards/)?\.?\w[\w.-]*")

known_damaged: set[Path] = set()  # what this process has read and found damaged


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as read and verified. `model`: the plain state dict, on the CPU.

    `sharded`: the weights and the optimizer's tensors are still in files, and `model` is empty.
    """

    path: Path
    state: TrainingState
    model: dict[str, torch.Tensor]
    sharded: bool = False
    files: dict[str, bytes] = field(default_factory=dict, repr=False)  # as read, for `share_checkpoint`

    @property
    def step(self) -> int:
        return self.state.step

    def to_files(self) -> dict[str, bytes]:
        """The contents of its files by their names, without manifest and shards."""
        if self.files:
            return self.files
        model = {} if self.sharded else {"model.pt": pack(self.model)}
        return {**model, **self.state.to_files()}

    def as_plain(self) -> Self:
        """The same with all shards read into this process, as if it had been saved plain."""
        if not self.sharded:
            return self
        tensors = sharded_checkpoint.read_all_shards(self.path / sharded_checkpoint.FOLDER)
        state = self.state.optimizer["state"]
        names = tensors.get("optimizer", {}).keys() | state.keys()
        merged = {name: {**state.get(name, {}), **tensors.get("optimizer", {}).get(name, {})} for name in names}
        optimizer = {**self.state.optimizer, "state": merged}
        state = replace(self.state, optimizer=optimizer)
        return replace(self, state=state, model=tensors["model"], sharded=False, files={})


def list_checkpoints(directory: Path) -> list[Path]:
    """All folders that are named like a checkpoint, good or not, oldest first; a replaced one before its successor."""
    try:
        # Not after a look whether it is there: ranks of one node remove a rescue's folder at the same time
        paths = list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    named = [(match, path) for path in paths if (match := NAME.fullmatch(path.name)) and path.is_dir()]
    # As numbers: from step 100,000,000 on the names have a digit more
    return [path for match, path in sorted(named, key=lambda pair: (int(pair[0][1]), not pair[0][2]))]


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    return int(path.name.removeprefix("step-").split(".")[0])


def find_problem(path: Path) -> str:
    """Why a checkpoint can't be used, or "" if every byte is as it was written."""
    return _read_verified(path)[1]


def looks_whole(path: Path) -> bool:
    """Whether a checkpoint is of the step in its name, its files have their sizes, and `load_newest` found no damage.

    For a save, which must not wait until older checkpoints are read.
    """
    try:
        manifest = _read_manifest(path)
        if path in known_damaged or _compare_steps(path, manifest["step"], manifest["step"]):
            return False
        return all((path / name).stat().st_size == entry["bytes"] for name, entry in manifest["files"].items())
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return False


def newest_good_step(directory: Path) -> int:
    """The step of the newest checkpoint that verifies, -1 where there is none."""
    return next((step_of(path) for path in reversed(list_checkpoints(directory)) if not find_problem(path)), -1)


def load_newest(directory: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that verifies, or None where there is no checkpoint at all. Warns of those passed over.

    Raises AllDamaged where all are, for to start anew without a word would throw away the work of days, and UserError
    where the newest good one is of another format.
    """
    damaged: dict[str, str] = {}
    for path in reversed(list_checkpoints(directory)):
        files, problem = _read_verified(path)
        if not problem:
            for name, why in damaged.items():
                warn(f"checkpoint {name} was passed over: {why}")
            return _parse(path, files)
        damaged[path.name] = problem
        known_damaged.add(path)
    if damaged:
        raise AllDamaged(directory, damaged)
    return None


def load_checkpoint(path: Path) -> Checkpoint:
    """Read one checkpoint folder. Raises UserError where it is damaged, of another format, or no checkpoint."""
    files, problem = _read_verified(path)
    if problem:
        raise UserError(f"checkpoint: {path} must be a whole checkpoint, got a damaged one: {problem}.")
    return _parse(path, files)


def share_checkpoint(checkpoint: Checkpoint | None, group: Group, *, source: int = 0) -> Checkpoint | None:
    """The `checkpoint` of rank `source` on all ranks, None where it has none. All ranks call this.

    Its files travel as they are, and each rank reads them with `weights_only=True`.
    """
    own = {} if checkpoint is None or group.rank != source else checkpoint.to_files()
    path, names = group.broadcast(("" if checkpoint is None else str(checkpoint.path), list(own)), source=source)
    files = {name: group.broadcast_bytes(own.get(name, b""), source=source) for name in names}
    received = checkpoint if group.rank == source else _parse(Path(path), files) if files else None
    return received and replace(received, files={})  # they take as much memory as the state itself


def _parse(path: Path, files: dict[str, bytes]) -> Checkpoint:
    state = TrainingState.from_files(path, files)
    sharded = "model.pt" not in files
    return Checkpoint(path, state, {} if sharded else unpack(files["model.pt"]), sharded, files)


def _read_verified(path: Path) -> tuple[dict[str, bytes], str]:
    """The contents of all files but the shards, and what is wrong with any of the files, or "".

    The caller uses these bytes: a file that is read twice may have changed between its check and its use.
    """
    files: dict[str, bytes] = {}
    try:
        manifest = _read_manifest(path)
        entries: dict[str, Fingerprint] = manifest["files"]
        shards = [name for name in entries if name.startswith(f"{sharded_checkpoint.FOLDER}/")]
        for name in (*([] if shards else ["model.pt"]), "training.pt", "state.json"):
            files[name] = (path / name).read_bytes()
            if problem := _compare(name, fingerprint_bytes(files[name]), entries[name]):
                return {}, problem
        for name in shards:
            if problem := _compare(name, sharded_checkpoint.fingerprint_file(path / name), entries[name]):
                return {}, problem
        return files, _compare_steps(path, manifest["step"], json.loads(files["state.json"])["step"])
    except FileNotFoundError as error:
        return {}, f"{Path(error.filename).name} is missing"
    except OSError as error:
        return {}, f"can't be read ({error.strerror})"
    except (ValueError, TypeError, LookupError, AttributeError):
        return {}, "manifest.json is damaged"


def _read_manifest(path: Path) -> dict[str, Any]:
    """Raises OSError, and ValueError, TypeError, LookupError or AttributeError where it is damaged."""
    manifest: dict[str, Any] = json.loads((path / "manifest.json").read_bytes())
    if not all(FILE.fullmatch(name) for name in manifest["files"]):
        raise ValueError
    return manifest


def _compare(name: str, found: Fingerprint, expected: Fingerprint) -> str:
    if found["bytes"] != expected["bytes"]:
        return f"{name} has {found['bytes']} bytes instead of {expected['bytes']}"
    return "" if found["sha256"] == expected["sha256"] else f"{name} does not match its digest"


def _compare_steps(path: Path, in_manifest: Any, in_state: Any) -> str:
    """A copy under the name of a higher step has whole files, and would win against the steps trained since."""
    named = NAME.fullmatch(path.name)
    # A folder that the user names may have any name
    steps = {"name": int(named[1]) if named else in_state, "manifest": in_manifest, "state": in_state}
    if len(set(steps.values())) == 1:
        return ""
    return ", ".join(f"its {where} says step {step}" for where, step in steps.items())


def fingerprint_bytes(data: bytes) -> Fingerprint:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
