"""Writing checkpoints, which appear whole or not at all: staged in a hidden folder, synced, renamed.

Rank 0 alone publishes. The order matters: every file is on the disk, and its digest in the manifest, before the folder
gets its name; only then are old checkpoints removed. A kill at any point leaves the earlier ones, and at most a hidden
folder. Who takes the run over removes hidden folders first: an owner that was frozen, and taken for dead, may wake up
anywhere, and finds nothing to give a name to. No save removes the hidden folders of others: such an owner would take
its successor's. Nothing that was written is read: it would
come from the page cache, and prove nothing about the disk.
"""

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from rankup.errors import disk_error
from train.group.group import pack
from train.run import sharded_checkpoint
from train.run.checkpoint import fingerprint_bytes, known_damaged, list_checkpoints, looks_whole
from train.run.sharded_checkpoint import Fingerprint
from train.run.training_state import TrainingState, to_json

STAGING = ".writing-"


def save_checkpoint(
    directory: Path, state: TrainingState, model: dict[str, torch.Tensor], *, keep: int,
    check_owner: Callable[[], None] = lambda: None,
) -> Path:
    """Write one plain checkpoint with the state dict `model`; the rest as `publish`."""
    check_owner()
    staging = create_staging(directory, state.step)
    files = {"model.pt": pack(model), **state.to_files()}
    return publish(staging, files, {}, step=state.step, keep=keep, check_owner=check_owner)


def create_staging(directory: Path, step: int) -> Path:
    """An empty hidden folder of its own in which the checkpoint of that step is put together. Raises UserError."""
    staging = directory / f"{STAGING}step-{step:08d}-{secrets.token_hex(4)}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
    except OSError as error:
        raise disk_error("checkpoint", directory, error) from None
    return staging


def remove_unfinished(directory: Path) -> None:
    """Remove what others were writing. Nobody else may own the directory. Raises nothing."""
    for left in directory.glob(f"{STAGING}*"):
        # Renamed first: its owner must not give its name to a folder that is half removed
        doomed = left.with_name(f"{STAGING}{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            left.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def publish(
    staging: Path, files: dict[str, bytes], shards: dict[str, Fingerprint], *, step: int, keep: int,
    check_owner: Callable[[], None] = lambda: None,
) -> Path:
    """Write `files` beside the `shards` that all ranks have written, give the folder its name, and remove old ones.

    The `keep` newest that look whole stay. `check_owner` raises where another attempt owns the run by now: it is called
    before the checkpoint appears, and again before others are removed. Raises UserError where the disk is full or not
    writable: the earlier checkpoints stay as they were. `staging` is gone in any case.
    """
    directory = staging.parent
    target = directory / f"step-{step:08d}"
    entries = {f"{sharded_checkpoint.FOLDER}/{name}": entry for name, entry in shards.items()}
    entries |= {name: fingerprint_bytes(data) for name, data in files.items()}
    try:
        for name, data in files.items():
            _write_durably(staging / name, data)
        _write_durably(staging / "manifest.json", to_json({"step": step, "files": entries}))
        for folder in (staging / sharded_checkpoint.FOLDER, staging):
            if folder.exists():
                _sync(folder)
        check_owner()
        _rename(staging, target)
        known_damaged.discard(target)
        _sync(directory)
    except OSError as error:
        raise disk_error("checkpoint", directory, error) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    check_owner()
    _remove_old(directory, keep, newest=target)
    return target


def _rename(staging: Path, target: Path) -> None:
    """Atomic within one file system: a reader sees no checkpoint or a whole one. Raises OSError."""
    aside = target.with_name(f"{target.name}.replaced")
    if aside.exists():  # left by a kill between the renames, and whole: it stays until the new one has its name
        aside = staging.with_name(f"{staging.name}-old")
    # Of the same step: damaged, or saved before its evaluation. A folder can't be renamed onto another one; after a
    # kill between the two renames the replaced one is found and used.
    with contextlib.suppress(FileNotFoundError):
        target.rename(aside)
    try:
        staging.rename(target)
    except OSError:
        with contextlib.suppress(OSError):  # it may be the next owner's
            aside.rename(target)
        raise
    if aside.name.startswith(STAGING):
        shutil.rmtree(aside, ignore_errors=True)


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        # close() alone leaves the bytes in the page cache: after a power cut the rename could outlive the contents
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    """A name lasts through a power cut only once its directory is synced."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_old(directory: Path, keep: int, *, newest: Path) -> None:
    """Remove all but `newest` and the next ones to `keep` in all that look whole.

    One that a run has found damaged does not count, nor one whose sizes are wrong: it must not push a good one out.
    Other damage is not seen, because nothing is read here.
    """
    good = 0
    for path in reversed(list_checkpoints(directory)):
        if good >= keep or (path.suffix and path.with_suffix("").exists()):
            # Renamed first: a folder whose removal is cut short must not look like a checkpoint
            doomed = path.with_name(f"{STAGING}{path.name}-old")
            with contextlib.suppress(OSError):
                path.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)
        elif path == newest or looks_whole(path):
            good += 1
