"""Atomic file writes: a reader sees the old or the new content, never half of it. Also this machine's folders for
downloads and for runs in an object store. This module does not import torch."""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

from rankup.env.rank_env import cache_folder
from rankup.errors import UserError
from rankup.urls import is_url

OwnerCheck = Callable[[], None]
SNAPSHOT = ".rankup.json"  # in a snapshot of `rankup submit`: what it is of
LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs"}  # file systems of one machine
STAGING = ".writing-"  # prefix of what the folder's owner is still writing; the next owner of the folder removes it


@contextmanager
def staged(path: Path, *, check: OwnerCheck | None = None) -> Iterator[Path]:
    """Yield a hidden path beside `path` to write to, and rename it to `path` if the block succeeds.

    `check`: the owner's `rankup.places.lease.Lease.check`. It is called right before the rename and raises if another
    attempt owns the folder. Raises OSError if the folder can't be written or the next owner called `remove_unfinished`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name is random instead of the process id, because two containers that share this folder may have equal ids
    staging = path.with_name(f"{STAGING if check else '.'}{path.name}.{secrets.token_hex(4)}")
    try:
        yield staging
        if check:
            check()
        # Atomic within one file system. Without fsync a power cut may lose these files. Copies of the state are synced
        staging.replace(path)
    except BaseException:
        with suppress(OSError):  # the first error is the one to raise
            staging.unlink()
        raise


def remove_unfinished(folder: Path) -> None:
    """Remove what earlier owners have not finished writing in `folder`, so that their renames fail. Raises nothing."""
    with suppress(FileNotFoundError):  # another rank of the node may remove the folder itself at the same time
        for left in folder.glob(f"{STAGING}*"):
            discard(left)


def discard(path: Path, *, check: OwnerCheck | None = None) -> None:
    """Remove a file, a copy or an unfinished copy. `check`: as in `staged`. Raises only what `check` raises."""
    # Rename first: a half-removed folder must not look like a copy, and nobody who still writes to it may publish it
    doomed = aside = path.with_name(f"{STAGING}{secrets.token_hex(4)}-old")
    with suppress(OSError):
        if check:  # the next owner removes the folder `aside`: if we freeze after check(), our rename fails
            aside.mkdir()
            check()
            doomed = aside / path.name
        path.rename(doomed)
    with suppress(OSError):  # first: rmtree opens what it is given, and would wait for the writer of a pipe
        aside.unlink()
    shutil.rmtree(aside, ignore_errors=True)


def write_atomically(path: Path, content: str, *, check: OwnerCheck | None = None) -> None:
    """Write `content` as UTF-8, completely or not at all. `check` and errors: as in `staged`."""
    with staged(path, check=check) as staging:
        staging.write_text(content, encoding="utf-8")


def write_json(path: Path, data: Any, *, check: OwnerCheck | None = None) -> None:
    """Write `data` as JSON, completely or not at all. `check` and errors: as in `staged`."""
    write_atomically(path, json.dumps(data, indent=2) + "\n", check=check)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or {} if the file is missing, incomplete, or holds no JSON object."""
    try:
        with open_regular(path) as file:
            return parse_json(file.read())
    except OSError:
        return {}


def snapshot_here() -> dict[str, dict[str, Any]]:
    """Return {"snapshot": its name, commit, branch, dirty} if the current folder is a snapshot of `rankup submit`."""
    found = read_json(Path(SNAPSHOT))
    return {"snapshot": found} if found else {}


def snapshot_text(snapshot: str, *, commit: str = "", branch: str = "", dirty: bool = False) -> str:
    """Return the record of a snapshot in words."""
    return f"{snapshot}{f', {branch} at {commit[:8]}' if commit else ''}{' with changes' if dirty else ''}"


def parse_json(content: bytes) -> dict[str, Any]:
    """Return the JSON object in `content`, or {} if it holds none."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def open_regular(path: Path) -> BufferedReader:
    """Open a file of unknown origin for reading. Raises OSError, also for a pipe or a device, which may never end."""
    # Without O_NONBLOCK, opening a pipe waits for its writer
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "no regular file", str(path))


def open_to_append(path: Path) -> int:
    """Open a file of a run for appending, and create it if it is missing. Return its descriptor. Raises OSError, also
    for a pipe, which would wait for its reader."""
    with suppress(FileNotFoundError):
        if stat.S_ISFIFO(path.stat().st_mode):
            raise OSError(errno.EINVAL, "a pipe", str(path))
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)


def is_local(path: Path) -> bool:
    """Return whether a file is on a file system of this machine: no server can take away what is mapped of it."""
    with suppress(OSError, IndexError):
        device = path.stat().st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        for row in Path("/proc/self/mountinfo").read_text().splitlines():
            mount, _, about = row.partition(" - ")
            if mount.split()[2] == number:
                return about.split()[0] in LOCAL
    return False


# Folders of this machine ---------------------------------------------------------------------------------------------


RUNS = "runs"  # the default of --run-dir


def runs_folder(run_dir: str) -> Path:
    """Return the folder of all runs on this machine. If `run_dir` is an address, the runs work in a folder of the
    cache, see `rankup.state.second_place`. Raises UserError as `cache_roots` does."""
    if not is_url(run_dir):
        return Path(run_dir)
    url = run_dir.rstrip("/")
    readable = re.sub(r"[^A-Za-z0-9]+", "-", url)[:60]
    return cache_roots()[0] / "runs" / f"{readable}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


def cache_roots() -> list[Path]:
    """Return this machine's folders for downloads and for runs in an object store, the preferred one first. If
    RANKUP_CACHE is set, it is the only one. Otherwise they are in the user's cache and in the temporary directory.
    Raises UserError if another user may have prepared all of them."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    shared = Path(tempfile.gettempdir(), f"rankup-cache-{os.geteuid()}")  # rescues have another folder
    # For a user without a home directory, expanduser leaves the ~
    roots = [shared] if base.startswith("~") else [Path(base, "rankup"), shared]
    roots = [Path(wanted)] if (wanted := cache_folder()) else roots
    if not (own := [root for root in roots if _is_own(root)]):
        raise UserError(
            f"cache: {roots[0]} must belong to this user, got another user's. Set RANKUP_CACHE to another folder."
        )
    return own


def _is_own(folder: Path) -> bool:
    """Return whether no other user could have prepared `folder`. Only in the temporary directory could anybody do so.
    There the owner of the outermost folder is checked, after the folder is created if it is missing."""
    temporary = Path(tempfile.gettempdir())
    outermost = next((each for each in (folder, *folder.parents) if each.parent == temporary), None)
    if outermost is None:
        return True
    with suppress(OSError):
        outermost.mkdir(mode=0o700, exist_ok=True)
        return outermost.lstat().st_uid == os.geteuid()
    return False
