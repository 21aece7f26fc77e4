"""A copy on disk: a folder of named files, which appears whole or not at all.

`step-00001200/` holds `state.json` (what a person may want to read, `step` among it), the files of
`rankup.state.tree`, and `manifest.json`: the step, and size in bytes and SHA-256 of each other file.

A copy is put together in a hidden folder, synced and renamed; only then are old copies removed. Whoever takes a run
over removes hidden folders first: an owner that was frozen, and taken for dead, may wake up anywhere, and finds nothing
to rename. No save removes the hidden folders of others, because such an owner would remove its successor's. Nothing is
read back: it would come from the page cache, and prove nothing about the disk. No torch.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from rankup.errors import UserError, disk_errors
from rankup.places.files import STAGING, discard, open_regular, read_json

MANIFEST = "manifest.json"
STATE = "state.json"
# `.replaced`: the earlier one of the same step, for the moment until the new one has its name
NAME = re.compile(r"step-(\d{8,})(\.replaced)?")
# A manifest may come from outside: no name in it may lead out of the copy's folder
FILE = re.compile(r"\w[\w.-]*")
Fingerprint = dict[str, Any]  # {"bytes": int, "sha256": str} of one file

# Looks at the path and the record of a copy. Raises UserError where the caller can't use it, and ValueError where it is
# damaged
Check = Callable[[Path, dict[str, Any]], object]

# What reading a manifest raises that holds anything
_NO_MANIFEST = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
uploading: set[Path | None] = set()  # what this process copies to another place at this moment: no save removes it


class Damaged(UserError):
    """The copy at `path` can't be used, because of `why`."""

    def __init__(self, path: Path | str, why: str, *, printed_elsewhere: bool = False) -> None:
        text = f"checkpoint: {path} must be a whole checkpoint, got a damaged one: {why:.300}."
        super().__init__(text, printed_elsewhere=printed_elsewhere)
        self.path, self.why = str(path), why


def no_check(path: Path, record: dict[str, Any]) -> None:
    """Any record will do."""


class Content(Protocol):
    """What a file is to hold: bytes, or an object that makes them piece by piece."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...


# Reading --------------------------------------------------------------------------------------------------------


def list_copies(directory: Path) -> list[Path]:
    """All folders that are named like a copy, good or not, oldest first; a replaced one before its successor."""
    try:
        # Not after a look whether it is there: ranks of one node remove a rescue's folder at the same time
        paths = list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    named = [(match, path) for path in paths if (match := NAME.fullmatch(path.name)) and path.is_dir()]
    # As numbers: from step 100,000,000 on the names have a digit more
    return [path for match, path in sorted(named, key=lambda pair: (int(pair[0][1]), not pair[0][2]))]


def list_whole(directory: Path) -> list[Path]:
    """Those that look whole, oldest first."""
    return [path for path in list_copies(directory) if looks_whole(path)]


def step_of(path: Path) -> int:
    """The step in the name of a copy's folder, here or at another place."""
    return int(path.name.split("-")[1].partition(".")[0])


def about(record: dict[str, Any], step: int) -> tuple[int, str, str]:
    """Step, attempt and run of the copy that is named after `step` and has this `state.json`; "" where that can't be
    read, or where somebody renamed the folder."""
    good = {"run", "attempt"} <= record.keys() and record.get("step") == step
    return (step, str(record["attempt"]), str(record["run"])) if good else (step, "", "")


def verify(path: Path) -> dict[str, Any]:
    """Read every file of a copy. Returns what `state.json` says. Raises Damaged unless every byte is as it was written.
    """
    try:
        for name, entry in read_manifest(path)["files"].items():
            with open_regular(path / name) as file:
                if (size := os.fstat(file.fileno()).st_size) != entry["bytes"]:
                    raise Damaged(path, f"{name} has {size} bytes instead of {entry['bytes']}")
                # Not read as a whole: it may be larger than the memory that is free
                if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                    raise Damaged(path, f"{name} does not match its digest")
        record = read_json(path / STATE)
        step = record["step"]
        # Under the name of a higher step it would win against the steps trained since. A folder that the user names may
        # have any name
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


def find_problem(path: Path) -> str:
    """Why a copy can't be used, or "" if every byte is as it was written."""
    try:
        verify(path)
    except Damaged as error:
        return error.why
    return ""


def looks_whole(path: Path) -> bool:
    """Whether a copy can be used, without a look at the bytes: a save must not wait for that."""
    try:
        manifest = read_manifest(path)
        sizes = {name: entry["bytes"] for name, entry in manifest["files"].items()}
        # One that says another step is none
        return manifest["step"] == step_of(path) and all((path / name).stat().st_size == sizes[name] for name in sizes)
    except (OSError, *_NO_MANIFEST):
        return False


def read_manifest(path: Path) -> dict[str, Any]:
    """Raises OSError, and one of _NO_MANIFEST where it is damaged."""
    with open_regular(path / MANIFEST) as file:
        manifest: dict[str, Any] = json.load(file)
    if not all(FILE.fullmatch(name) for name in manifest["files"]):
        raise ValueError
    return manifest


# Writing --------------------------------------------------------------------------------------------------------


def to_json(value: dict[str, Any]) -> bytes:
    """JSON for a person."""
    return (json.dumps(value, indent=2) + "\n").encode()


def save(
    directory: Path, files: Mapping[str, Content], *, step: int, keep: int,
    check_owner: Callable[[], None] = lambda: None,
) -> Path:
    """Write one copy that this process holds whole; the rest as `publish`."""
    check_owner()
    staging = create_staging(staging_of(directory, step))
    return publish(staging, files, {}, step=step, keep=keep, check_owner=check_owner)


def staging_of(directory: Path, step: int = 0, token: str = "") -> Path:
    """The hidden folder in which a copy is put together."""
    return directory / f"{STAGING}step-{step:08d}-{token or secrets.token_hex(4)}"


def create_staging(staging: Path) -> Path:
    """Make it: nobody else may have done so. Raises UserError."""
    with disk_errors("checkpoint", staging.parent):
        staging.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
    return staging


def publish(
    staging: Path, files: Mapping[str, Content], written: dict[str, Fingerprint], *, step: int, keep: int,
    check_owner: Callable[[], None] = lambda: None,
) -> Path:
    """Write `files` beside those that the ranks have `written`, give the folder its name, and remove all but the `keep`
    newest that look whole.

    `check_owner` raises where another attempt owns the run by now. Raises UserError where the disk is full or not
    writable. `staging` is gone in any case.
    """
    directory = staging.parent
    target = directory / f"step-{step:08d}"
    try:
        with disk_errors("checkpoint", directory, check_owner):
            entries = written | {name: write_durably(staging / name, content) for name, content in files.items()}
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
    """Write the pieces of `content`, or bytes, and return what the manifest says of the file. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece in [content] if isinstance(content, bytes | bytearray) else content:
            file.write(piece)
            digest.update(piece)
            size += len(piece)
        file.flush()
        # close() alone leaves the bytes in the page cache: after a power cut the rename could outlive the contents
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def rename(staging: Path, target: Path) -> Path:
    """Atomic within one file system: a reader sees no copy or a whole one. Returns `target`. Raises OSError."""
    # Of the same step: damaged, or saved before its evaluation. A folder can't be renamed onto another one
    aside = target.with_name(f"{target.name}.replaced")
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)  # left by a kill, before the last renames or right here
        target.rename(aside)
    try:
        staging.rename(target)
    except OSError:
        with contextlib.suppress(OSError):  # it may be the next owner's
            aside.rename(target)
        raise
    shutil.rmtree(aside, ignore_errors=True)
    return target


def _sync(directory: Path) -> None:
    """A name lasts through a power cut only once its directory is synced."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_old(directory: Path, keep: int, *, newest: Path) -> None:
    """Remove all but `newest` and the next ones to `keep` in all that look whole: others must not push a good one out.
    """
    good = 0
    for path in reversed(list_copies(directory)):
        if path == newest:  # where this attempt was frozen for long, those of later steps are its successor's
            good += 1
        elif good < keep and not (path.suffix and path.with_suffix("").exists()):
            good += looks_whole(path)
        elif path not in uploading:  # else a later save removes it
            discard(path)
