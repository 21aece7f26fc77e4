"""Checkpoints that appear whole or not at all: written aside, synced, verified by digest, renamed.

`step-00001200/` holds `model.pt` (plain weights, no wrapper's prefixes), `training.pt` (optimizer, scaler), `state.json`
(position, random scheme, settings, versions) and `manifest.json` (size and SHA-256 of each). Everything loads with
`weights_only=True`. Only rank 0 touches the disk; the others get what it read over the network.

A sharded one has `shards/` in place of `model.pt`: weights and the optimizer's tensors, see `train.run.sharded_checkpoint`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from train.errors import UserError, disk_error
from train.run import sharded_checkpoint

NAME = re.compile(r"step-(\d{8,})(\.replaced)?")
FILES = ("model.pt", "training.pt", "state.json")
ASIDE = ".writing-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as read and verified. `model` and `training` are the bytes of torch.save; `shards`: what `model` would
    hold is still in that folder, and the optimizer's tensors too."""

    path: str
    state: dict[str, Any]
    model: bytes
    training: bytes
    shards: bool = False

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def model_state(self) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = load_bytes(self.model)
        return state

    def training_state(self) -> dict[str, Any]:
        state: dict[str, Any] = load_bytes(self.training)
        return state

    def whole(self) -> Checkpoint:
        """The same with nothing left in shards, which one process reads: as if it had been saved plain."""
        if not self.shards:
            return self
        tensors = sharded_checkpoint.read_whole(Path(self.path) / sharded_checkpoint.FOLDER)
        training = self.training_state()
        for name, values in tensors.get("optimizer", {}).items():
            training["optimizer"]["state"].setdefault(name, {}).update(values)
        return Checkpoint(self.path, self.state, _saved(tensors["model"]), _saved(training))


def load_bytes(data: bytes) -> Any:
    """torch.load onto the CPU, tensors and plain values only: onto a GPU, every rank would allocate on cuda:0."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def save(
    directory: Path, *, model: dict[str, torch.Tensor], training: dict[str, Any], state: dict[str, Any], keep: int,
    still_ours: Callable[[], None] = lambda: None,
) -> Path:
    """Write one checkpoint, then remove old ones, the `keep` newest stay. Rank 0 only.

    `still_ours` is called right before the checkpoint appears, and raises where another attempt owns the run by now.
    Raises UserError where the disk is full or not writable: the earlier checkpoints stay as they were.
    """
    staging = begin(directory, state["step"], str(os.getpid()))
    contents = {"model.pt": _saved(model), "training.pt": _saved(training), "state.json": _as_json(state)}
    manifest = {name: {"bytes": len(data), "sha256": _sha256(data)} for name, data in contents.items()}
    return _publish(staging, contents, manifest, keep=keep, still_ours=still_ours, check=problem_of)


def begin(directory: Path, step: int, mark: str) -> Path:
    """The folder to write the checkpoint of that step into. `mark` keeps it apart from another attempt's. Raises UserError."""
    staging = directory / f"{ASIDE}step-{step:08d}-{mark}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _sweep(directory)
        staging.mkdir()
    except OSError as error:
        raise disk_error("checkpoint", directory, error) from None
    return staging


def save_shards(
    staging: Path, *, shards: dict[str, sharded_checkpoint.Fingerprint], training: dict[str, Any], state: dict[str, Any], keep: int,
    still_ours: Callable[[], None] = lambda: None,
) -> Path:
    """Complete a checkpoint whose shards all ranks have written into `aside`, and checked. Rank 0 only; as `save`."""
    contents = {"training.pt": _saved(training), "state.json": _as_json(state)}
    manifest = {f"{sharded_checkpoint.FOLDER}/{name}": entry for name, entry in shards.items()}
    manifest |= {name: {"bytes": len(data), "sha256": _sha256(data)} for name, data in contents.items()}
    # All of it was read back once already, each part by another rank
    return _publish(staging, contents, manifest, keep=keep, still_ours=still_ours, check=lambda staging: "")


def _publish(
    staging: Path, contents: dict[str, bytes], manifest: dict[str, Any], *, keep: int, still_ours: Callable[[], None],
    check: Callable[[Path], str],
) -> Path:
    directory = staging.parent
    match = re.match(rf"{re.escape(ASIDE)}(step-\d+)-", staging.name)
    assert match is not None
    target = directory / match[1]
    try:
        for name, data in {**contents, "manifest.json": _as_json(manifest)}.items():
            _write(staging / name, data)
        for folder in (path for path in staging.iterdir() if path.is_dir()):
            _sync(folder)
        _sync(staging)
        problem = check(staging)
        if problem:
            raise OSError(errno.EIO, f"read back differently: {problem}")
        still_ours()
        if target.exists():
            # Of the same step: damaged, or saved before its evaluation. After a kill right here it is found again.
            replaced = target.with_name(f"{target.name}.replaced")
            shutil.rmtree(target) if replaced.exists() else target.rename(replaced)
        # Atomic within one file system: a reader sees no checkpoint or a whole one.
        staging.rename(target)
        _sync(directory)
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise disk_error("checkpoint", directory, error) from None
    _retain(directory, keep, newest=target)
    return target


def _as_json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    """A rename lasts through a power cut only once its directory is synced. Windows can't, and needn't."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sweep(directory: Path) -> None:
    """Remove what an attempt that was killed while saving left behind. The run's lease keeps others from writing now."""
    for left in directory.glob(f"{ASIDE}*"):
        shutil.rmtree(left, ignore_errors=True)


def _retain(directory: Path, keep: int, *, newest: Path) -> None:
    """Remove all but the `keep` newest, counting only good ones, now that `newest` has appeared, which is known as good."""
    good = 0
    for path in reversed(found(directory)):
        if good >= keep or (path.suffix and path.with_suffix("").exists()):
            # A name that ends with the removal half done must not look like a checkpoint.
            doomed = path.with_name(f"{ASIDE}{path.name}-old")
            with contextlib.suppress(OSError):
                path.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)
        elif path == newest or problem_of(path) == "":
            good += 1


# Reading ------------------------------------------------------------------------------------------------------


def found(directory: Path) -> list[Path]:
    """All directories that look like a checkpoint, good or not, oldest first."""
    if not directory.is_dir():
        return []
    named = [(match, path) for path in directory.iterdir() if (match := NAME.fullmatch(path.name)) and path.is_dir()]
    return [path for match, path in sorted(named, key=lambda pair: (int(pair[0][1]), not pair[0][2]))]


def problem_of(path: Path) -> str:
    """Why a checkpoint can't be used, or "" if every byte is as it was written. A marker file alone proves nothing."""
    return _verified(path)[1]


def newest_good(directory: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that verifies, or None where there are none at all. Says which were passed over, and why.

    Raises UserError where all are damaged: to start anew without a word would throw away the work of days.
    """
    damaged: list[tuple[Path, str]] = []
    for path in reversed(found(directory)):
        contents, problem = _verified(path)
        if problem == "":
            for other, why in damaged:
                say(f"checkpoint {other.name} was passed over: {why}")
            return _parsed(path, contents)
        damaged.append((path, problem))
    if damaged:
        raise UserError(
            f"checkpoint: {directory} must hold a whole checkpoint, got only damaged ones: "
            f"{'; '.join(f'{path.name}: {why}' for path, why in damaged)}. Put one back from a copy, or set --fresh to "
            "start anew, which keeps them aside."
        )
    return None


def read(path: Path) -> Checkpoint:
    """Read one checkpoint directory. Raises UserError where it is damaged or none."""
    contents, problem = _verified(path)
    if problem:
        raise UserError(f"checkpoint: {path} must be a whole checkpoint, got a damaged one: {problem}.")
    return _parsed(path, contents)


def _verified(path: Path) -> tuple[dict[str, bytes], str]:
    """The files of a checkpoint but its shards, and what is wrong with any or "". What is used later are these very bytes."""
    contents: dict[str, bytes] = {}
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        shards = [name for name in manifest if name.startswith(f"{sharded_checkpoint.FOLDER}/")]
        for name in (*FILES[1:], *shards) if shards else FILES:
            expected = manifest[name]
            if name in shards:
                got = sharded_checkpoint.fingerprint(path / name)
            else:
                contents[name] = (path / name).read_bytes()
                got = {"bytes": len(contents[name]), "sha256": _sha256(contents[name])}
            if got["bytes"] != expected["bytes"]:
                return {}, f"{name} has {got['bytes']} bytes instead of {expected['bytes']}"
            if got["sha256"] != expected["sha256"]:
                return {}, f"{name} does not match its digest"
    except FileNotFoundError as error:
        return {}, f"{Path(error.filename).name} is missing"
    except OSError as error:
        return {}, f"can't be read ({error.strerror})"
    except (ValueError, TypeError, LookupError, AttributeError):
        return {}, "manifest.json is damaged"
    return contents, ""


def _parsed(path: Path, contents: dict[str, bytes]) -> Checkpoint:
    model = contents.get("model.pt", b"")
    return Checkpoint(str(path), json.loads(contents["state.json"]), model, contents["training.pt"], shards=not model)
