"""Checkpoints that appear whole or not at all: written aside, synced, verified by digest, renamed.

`step-00001200/` holds `model.pt` (plain weights, no wrapper's prefixes), `training.pt` (optimizer, scaler), `state.json`
(position, random scheme, settings, versions) and `manifest.json` (size and SHA-256 of each). Everything loads with
`weights_only=True`. Only rank 0 touches the disk; the others get what it read over the network.
"""

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

from train.errors import UserError

NAME = re.compile(r"step-(\d{8,})")
ASIDE = ".writing-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as read and verified. `model` and `training` are the bytes of torch.save."""

    path: str
    state: dict[str, Any]
    model: bytes
    training: bytes

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def model_state(self) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = load_bytes(self.model)
        return state

    def training_state(self) -> dict[str, Any]:
        state: dict[str, Any] = load_bytes(self.training)
        return state


def load_bytes(data: bytes) -> Any:
    """torch.load onto the CPU, tensors and plain values only: onto a GPU, every rank would allocate on cuda:0."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def save(
    directory: Path, *, model: dict[str, torch.Tensor], training: dict[str, Any], state: dict[str, Any], keep: int,
    still_ours: Callable[[], None] = lambda: None,
) -> Path:  # fmt: skip
    """Write one checkpoint, then remove old ones, the `keep` newest stay. Rank 0 only.

    `still_ours` is called right before the checkpoint appears, and raises where another attempt owns the run by now.
    Raises UserError where the disk is full or not writable: the earlier checkpoints stay as they were.
    """
    target = directory / f"step-{state['step']:08d}"
    aside = directory / f"{ASIDE}{target.name}-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _sweep(directory)
        aside.mkdir()
        contents = {
            "model.pt": _saved(model),
            "training.pt": _saved(training),
            "state.json": (json.dumps(state, indent=2) + "\n").encode(),
        }
        manifest = {name: {"bytes": len(data), "sha256": _sha256(data)} for name, data in contents.items()}
        contents["manifest.json"] = (json.dumps(manifest, indent=2) + "\n").encode()
        for name, data in contents.items():
            _write(aside / name, data)
        _sync(aside)
        problem = problem_of(aside)
        if problem:
            raise OSError(errno.EIO, f"read back differently: {problem}")
        still_ours()
        if target.exists():  # left by an earlier attempt, and not chosen when this one resumed: it is damaged
            shutil.rmtree(target)
        # Atomic within one file system: a reader sees no checkpoint or a whole one.
        aside.rename(target)
        _sync(directory)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise UserError(_disk_problem(error, directory)) from None
    _retain(directory, keep)
    return target


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


def _retain(directory: Path, keep: int) -> None:
    """Remove all but the `keep` newest, counting only good ones, after the new one has appeared."""
    good = 0
    for path in sorted(found(directory), reverse=True):
        if good >= keep:
            # A name that ends with the removal half done must not look like a checkpoint.
            doomed = path.with_name(f"{ASIDE}{path.name}-old")
            with contextlib.suppress(OSError):
                path.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)
        elif problem_of(path) == "":
            good += 1


def _disk_problem(error: OSError, directory: Path) -> str:
    free = ""
    with contextlib.suppress(OSError):
        free = f", {shutil.disk_usage(directory).free / 2**20:.0f} MiB free"
    what = "has no space left" if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"can't be written ({error.strerror})"
    return (
        f"checkpoint: {directory} {what}{free}. The earlier checkpoints there are untouched; make room, or set --run-dir "
        "elsewhere, and run the same command again."
    )


# Reading ------------------------------------------------------------------------------------------------------


def found(directory: Path) -> list[Path]:
    """All directories that look like a checkpoint, good or not, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if NAME.fullmatch(path.name) and path.is_dir())


def problem_of(path: Path) -> str:
    """Why a checkpoint can't be used, or "" if every byte is as it was written. A marker file alone proves nothing."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        for name, expected in manifest.items():
            data = (path / name).read_bytes()
            if len(data) != expected["bytes"]:
                return f"{name} has {len(data)} bytes instead of {expected['bytes']}"
            if _sha256(data) != expected["sha256"]:
                return f"{name} does not match its digest"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"can't be read ({error})"
    return "" if {"model.pt", "training.pt", "state.json"} <= manifest.keys() else "manifest.json is incomplete"


def newest_good(directory: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that verifies, or None. Says which were passed over, and why."""
    for path in reversed(found(directory)):
        problem = problem_of(path)
        if problem == "":
            return read(path)
        say(f"checkpoint {path.name} was passed over: {problem}")
    return None


def read(path: Path) -> Checkpoint:
    """Read one checkpoint directory. Raises UserError where it is damaged or none."""
    problem = problem_of(path)
    if problem:
        raise UserError(f"checkpoint: {path} must be a whole checkpoint, got a damaged one: {problem}.")
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    return Checkpoint(str(path), state, (path / "model.pt").read_bytes(), (path / "training.pt").read_bytes())


# Weights ------------------------------------------------------------------------------------------------------


def digest(state: dict[str, torch.Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes of a model's state, in the order of the names."""
    total = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return total.hexdigest()


def without_prefixes(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Strip what wrappers put before the names: "module." (DP, DDP), "_orig_mod." (torch.compile), in any order."""
    return {re.sub(r"(^|\.)((module|_orig_mod)\.)+", r"\1", name): value for name, value in state.items()}


def init_from(model: torch.nn.Module, path: Path, say: Callable[[str], None]) -> None:
    """Start from someone's weights: a checkpoint directory of ours, or any file of a state dict.

    Tensors whose shape differs, or that the file lacks, keep their initial value and are listed. Raises UserError where
    the file can't be read or nothing in it fits.
    """
    state: Any
    if path.is_dir():
        state = read(path).model_state()
    else:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise UserError(f"init_from must name an existing file or checkpoint directory, got {path}.") from None
        except Exception as error:  # torch.load raises half a dozen unrelated types for a damaged file
            reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise UserError(f"init_from: {path} must hold weights that load with weights_only, got: {reason}") from None
    for key in ("state_dict", "model_state_dict", "model"):  # the usual envelopes of published checkpoints
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
            break
    given = without_prefixes({k: v for k, v in state.items() if isinstance(v, torch.Tensor)})
    own = model.state_dict()
    fitting = {name: value for name, value in given.items() if name in own and own[name].shape == value.shape}
    if not fitting:
        raise UserError(f"init_from: {path} must share weights with the model, got none that fits by name and shape.")
    model.load_state_dict(fitting, strict=False)
    say(f"started from {path}: {len(fitting)} of {len(own)} tensors")
    for name in (name for name in own if name not in fitting):
        reason = f"its shape there is {tuple(given[name].shape)}, here {tuple(own[name].shape)}" if name in given else "not there"
        say(f"  {name} keeps its initial value: {reason}")
    if unused := [name for name in given if name not in own]:
        say(f"  not used from the file: {', '.join(unused[:8])}{' ...' if len(unused) > 8 else ''}")
