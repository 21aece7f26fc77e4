"""A copy on disk: a folder of named files, which appears whole or not at all. This module does not import torch.

`step-00001200/` holds `state.json` (what people may want to read, such as `step`), the files of `rankup.state.tree`,
and `manifest.json`, which has the step, and the size in bytes and the SHA-256 of each other file.

A copy is written in a hidden folder, synced and renamed. Only then are old copies removed. The next owner of a run
first removes all hidden folders: if an owner that was frozen and taken for dead wakes up, it finds nothing to rename.
No save removes the hidden folders of others, because a late owner would then remove its successor's. A save does not
read the files back: they would come from the page cache and prove nothing about the disk.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rankup.errors import UserError, disk_errors
from rankup.places.files import STAGING, discard, open_regular, read_json
from rankup.places.lease import KEPT

MANIFEST = "manifest.json"
STATE = "state.json"
# An earlier copy of the same step is called `.replaced` until the new copy has got the name
NAME = re.compile(r"step-(\d{8,})(\.replaced)?")
# Copies may come from anywhere, so no file name in a manifest may lead out of the copy's folder
FILE = re.compile(r"\w[\w.-]*")
Fingerprint = dict[str, Any]  # {"bytes": int, "sha256": str} of one file

# Checks the path and the record of a copy. Raises UserError if the caller can't use the copy, and ValueError if it is
# damaged
Check = Callable[[Path, dict[str, Any]], object]

# What reading a damaged manifest may raise
_NO_MANIFEST = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
CHUNK = 16 * 2**20  # bytes
on_write: list[Callable[[int], object]] = []  # called with the size of each chunk that this process has written
uploading: set[Path | None] = set()  # the copies that this process is uploading to another place; no save removes them


class Damaged(UserError):
    """A copy at `path` can't be used, for the reason `why`."""

    def __init__(self, path: Path | str, why: str, *, printed_elsewhere: bool = False) -> None:
        text = f"checkpoint: {path} must be a whole checkpoint, got a damaged one: {why:.300}."
        super().__init__(text, printed_elsewhere=printed_elsewhere)
        self.path, self.why = str(path), why


def no_check(path: Path, record: dict[str, Any]) -> None:
    """Accept any record."""


class Content(Protocol):
    """The content of a file to write: bytes, or an object that yields them piece by piece."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...


# Reading --------------------------------------------------------------------------------------------------------


def list_copies(directory: Path) -> list[Path]:
    """Return all folders named like a copy, good or not, oldest first, and `.replaced` before its successor."""
    try:
        # No exists() first: several ranks of a node may remove a rescue's folder at the same time
        paths = list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    named = [(match, path) for path in paths if (match := NAME.fullmatch(path.name)) and path.is_dir()]
    # Sort by number, because names have one digit more from step 100,000,000 on
    return [path for match, path in sorted(named, key=lambda pair: (int(pair[0][1]), not pair[0][2]))]


def list_whole(directory: Path) -> list[Path]:
    """Return the copies in `directory` that look whole, oldest first."""
    return [path for path in list_copies(directory) if not find_problem(path, digests=False)]


def step_of(path: Path) -> int:
    """Return the step in the name of a copy's folder, here or at another place."""
    return int(path.name.split("-")[1].partition(".")[0])


def kept_steps(run_dir: Path) -> set[int]:
    """Return the steps of the copies that `job.keep` has given a name."""
    return {*read_json(run_dir / KEPT).values()}


def identity_of(record: dict[str, Any], step: int) -> tuple[int, str, str]:
    """Return step, attempt and run of the copy whose folder is named after `step` and whose `state.json` is `record`.
    Attempt and run are "" if the record is unreadable or somebody renamed the folder."""
    good = {"run", "attempt"} <= record.keys() and record.get("step") == step
    return (step, str(record["attempt"]), str(record["run"])) if good else (step, "", "")


def verify(path: Path, *, digests: bool = True) -> dict[str, Any]:
    """Read every file of a copy and return the content of `state.json`. Raises Damaged if any byte has changed. Without
    `digests`, compare only sizes, and return the manifest: a save has no time to read every file."""
    try:
        manifest = read_manifest(path)
        for name, entry in manifest["files"].items():
            digest = entry["sha256"]
            if digests:
                with open_regular(path / name) as file:  # hashed piece by piece, because it may not fit into memory
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
            if (size := (path / name).stat().st_size) != entry["bytes"]:
                raise Damaged(path, f"{name} has {size} bytes instead of {entry['bytes']}")
            if digest != entry["sha256"]:
                raise Damaged(path, f"{name} does not match its digest")
        record = read_json(path / STATE) if digests else manifest
        step = record["step"]
        # A copy under the name of a higher step would win against newer copies. A folder that the user names may have
        # any other name
        if (named := NAME.fullmatch(path.name)) and int(named[1]) != step:
            raise Damaged(path, f"its name says step {int(named[1])}, its state {step}")
        return record
    except Damaged:
        raise
    except FileNotFoundError as error:
        why = f"{Path(error.filename).name} is missing"
    except OSError as error:
        why = f"can't be read ({error.strerror})"
    except _NO_MANIFEST:
        why = f"{MANIFEST} is damaged"
    raise Damaged(path, why)


def find_problem(path: Path, *, digests: bool = True) -> str:
    """Return why a copy can't be used, or "" if `verify` accepts it."""
    try:
        verify(path, digests=digests)
    except Damaged as error:
        return error.why
    return ""


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a copy. Raises OSError, and one of _NO_MANIFEST if the manifest is damaged."""
    with open_regular(path / MANIFEST) as file:
        manifest: dict[str, Any] = json.load(file)
    if not all(FILE.fullmatch(name) for name in manifest["files"]):
        raise ValueError
    return manifest


# Writing --------------------------------------------------------------------------------------------------------


def to_json(value: dict[str, Any]) -> bytes:
    """Return indented JSON, for people."""
    return (json.dumps(value, indent=2) + "\n").encode()


def save(
    directory: Path, files: Mapping[str, Content], *, step: int, keep: int,
    check_owner: Callable[[], None] = lambda: None, sync: bool = True,
) -> Path:
    """Write a copy that this process holds whole. Parameters, result and errors: as in `publish`."""
    check_owner()
    staging = create_staging(staging_of(directory, step))
    return publish(staging, files, {}, step=step, keep=keep, check_owner=check_owner, sync=sync)


def staging_of(directory: Path, step: int = 0, token: str = "") -> Path:
    """Return the path of a hidden folder in which a copy is written."""
    return directory / f"{STAGING}step-{step:08d}-{token or secrets.token_hex(4)}"


def create_staging(staging: Path) -> Path:
    """Create the hidden folder, which must not exist yet. Raises UserError."""
    with disk_errors("checkpoint", staging.parent):
        staging.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
    return staging


def publish(
    staging: Path, files: Mapping[str, Content], written: dict[str, Fingerprint], *, step: int, keep: int,
    check_owner: Callable[[], None] = lambda: None, sync: bool = True,
) -> Path:
    """Add `files` to those that the ranks have `written` in `staging`, rename the folder to its final name, and remove
    all copies but the `keep` newest that look whole. Return the path of the copy.

    `check_owner` raises if another attempt owns the run by now. `sync`: whether the copy must survive the end of this
    machine. Raises UserError if the disk is full or not writable.
    In any case `staging` is gone afterwards.
    """
    directory = staging.parent
    target = directory / f"step-{step:08d}"
    try:
        with disk_errors("checkpoint", directory, check_owner):
            write = write_durably if sync else partial(_write, sync=False)
            entries = written | {name: write(staging / name, content) for name, content in files.items()}
            write_durably(staging / MANIFEST, [to_json({"step": step, "files": entries})])
            _sync(staging)
            check_owner()
            rename(staging, target)
            _sync(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    check_owner()
    _remove_old(directory, keep, newest=target)
    return target


def write_durably(path: Path, content: Iterable[Any]) -> Fingerprint:
    """Write and sync `content`, bytes or pieces of bytes. Return the file's manifest entry. Raises OSError."""
    return _write(path, content, sync=True)


def _write(path: Path, content: Iterable[Any], *, sync: bool) -> Fingerprint:
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece in [content] if isinstance(content, bytes | bytearray) else content:
            for begin in range(0, len(piece), CHUNK):
                chunk = memoryview(piece)[begin:begin + CHUNK]
                file.write(chunk)
                digest.update(chunk)
                for note in on_write:
                    note(len(chunk))
            size += len(piece)
        file.flush()
        # close() leaves the bytes in the page cache. After a power cut the rename could survive without the contents
        if sync:
            os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def rename(staging: Path, target: Path) -> Path:
    """Rename `staging` to `target`, so that a reader sees no copy or a whole one. Return `target`. Raises OSError."""
    # An earlier copy of this step may be damaged or lack its evaluation. A folder can't be renamed onto another one
    aside = target.with_name(f"{target.name}.replaced")
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)  # an earlier process was killed between these renames
        target.rename(aside)
    try:
        staging.rename(target)
    except OSError:
        with contextlib.suppress(OSError):  # the next owner may have published a copy under this name
            aside.rename(target)
        raise
    shutil.rmtree(aside, ignore_errors=True)
    return target


def _sync(directory: Path) -> None:
    """Sync a directory. Only then do the names in it survive a power cut."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_old(directory: Path, keep: int, *, newest: Path) -> None:
    """Keep `newest` and the next copies that look whole, `keep` in all, and those with a name. Remove the others."""
    good, named = 0, kept_steps(directory.parent)
    for path in reversed(list_copies(directory)):
        if path == newest:  # it need not have the highest step: there may be damaged or a successor's later copies
            good += 1
        elif good < keep and not (path.suffix and path.with_suffix("").exists()):
            good += not find_problem(path, digests=False)
        elif path not in uploading and step_of(path) not in named:  # a later save removes one that is uploaded now
            discard(path)
