"""Files that a reader sees old or new, never half, and this machine's folders for downloads and for runs in a store. No
torch."""

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

Check = Callable[[], None]
STAGING = ".writing-"  # what is put together beside its name, and belongs to the owner of the folder


@contextmanager
def staged(path: Path, *, check: Check | None = None) -> Iterator[Path]:
    """A hidden path beside `path` to write to. It takes the name `path` at the end of a block that succeeds.

    `check`: of an owner, see `rankup.places.lease`; called right before that, it raises where another one owns the
    folder. Raises OSError where the folder can't be written, or where the next owner has called `remove_unfinished`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A random name, not the process's number: two containers that share this folder may have equal numbers
    staging = path.with_name(f"{STAGING if check else '.'}{path.name}.{secrets.token_hex(4)}")
    try:
        yield staging
        if check:
            check()
        # Atomic within one file system. Not synced: these files may be lost in a power cut, copies of a state must not
        staging.replace(path)
    except BaseException:
        with suppress(OSError):  # the first error is the one that counts
            staging.unlink()
        raise


def remove_unfinished(folder: Path) -> None:
    """Remove what earlier owners were about to give a name to in `folder`: they fail then. Raises nothing."""
    with suppress(FileNotFoundError):  # another rank of the node may remove the folder itself meanwhile
        for left in folder.glob(f"{STAGING}*"):
            discard(left)


def discard(path: Path, *, check: Check | None = None) -> None:
    """Remove a file, a copy or what is to become one. `check`: as in `staged`; its error is all that this raises."""
    # Renamed first: a folder that is half removed must not look like a copy, and nobody may give its name to it
    doomed = aside = path.with_name(f"{STAGING}{secrets.token_hex(4)}-old")
    with suppress(OSError):
        if check:  # into a folder, which the next owner removes: whoever wakes up after the look moves nothing
            aside.mkdir()
            check()
            doomed = aside / path.name
        path.rename(doomed)
    shutil.rmtree(aside, ignore_errors=True)
    with suppress(OSError):
        aside.unlink()


def write_atomically(path: Path, content: str, *, check: Check | None = None) -> None:
    """Write the whole of `content`, as UTF-8, or nothing; the rest as `staged`."""
    with staged(path, check=check) as staging:
        staging.write_text(content, encoding="utf-8")


def write_json(path: Path, data: Any, *, check: Check | None = None) -> None:
    """Write `data` so that a reader sees the old file or the new one; the rest as `staged`."""
    write_atomically(path, json.dumps(data, indent=2) + "\n", check=check)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, {} where that is missing, not whole, or something else."""
    try:
        with open_regular(path) as file:
            return parse_json(file.read())
    except OSError:
        return {}


def parse_json(content: bytes) -> dict[str, Any]:
    """What `content` holds, {} where that is no JSON object."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def open_regular(path: Path) -> BufferedReader:
    """A file to read that came from elsewhere. Raises OSError, also for a pipe or a device, which may never end."""
    # Who opens a pipe otherwise waits for its writer
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "no regular file", str(path))


# Folders of this machine ---------------------------------------------------------------------------------------------


def runs_folder(run_dir: str) -> Path:
    """The folder of all runs on this machine. An address in `run_dir` has one of its own in the cache, where its runs
    work: see `rankup.state.second_place`. Raises UserError as `cache_roots` does."""
    if not is_url(run_dir):
        return Path(run_dir)
    url = run_dir.rstrip("/")
    readable = re.sub(r"[^A-Za-z0-9]+", "-", url)[:60]
    return cache_roots()[0] / "runs" / f"{readable}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


def cache_roots() -> list[Path]:
    """The folders of this machine for downloads and for runs in a store, the preferred one first: RANKUP_CACHE alone if
    it is set, else the user's cache and one in the temporary directory. Raises UserError if another user may have
    prepared all of them."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    shared = Path(tempfile.gettempdir(), f"rankup-cache-{os.geteuid()}")  # not that of rescues
    # For a user without a home directory ~ stays as it is
    roots = [shared] if base.startswith("~") else [Path(base, "rankup"), shared]
    roots = [Path(wanted)] if (wanted := cache_folder()) else roots
    if not (own := [root for root in roots if _is_own(root)]):
        raise UserError(
            f"cache: {roots[0]} must belong to this user, got another's. Set RANKUP_CACHE to another folder."
        )
    return own


def _is_own(folder: Path) -> bool:
    """Whether no other user made `folder` or what it lies in, as all can in the temporary directory. There a missing
    one is made."""
    temporary = Path(tempfile.gettempdir())
    outermost = next((each for each in (folder, *folder.parents) if each.parent == temporary), None)
    if outermost is None:
        return True
    with suppress(OSError):
        outermost.mkdir(mode=0o700, exist_ok=True)
        return outermost.lstat().st_uid == os.geteuid()
    return False
