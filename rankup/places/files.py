"""Files that a reader sees old or new, never half. No torch here."""

import errno
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

Check = Callable[[], None]


@contextmanager
def staged(path: Path, *, check: Check | None = None) -> Iterator[Path]:
    """A hidden path beside `path` to write to. It takes the name `path` at the end of a block that succeeds.

    `check`: of an owner, see `rankup.places.lease`; called right before that, it raises where another one owns the
    folder. Raises OSError where the folder can't be made or written, or where the next owner has called
    `remove_staged`. A block that fails leaves `path` as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A random name, not the process's number: two containers that share this folder may have equal numbers
    staging = path.with_name(f".{path.name}.{secrets.token_hex(4)}{'.owned' if check else ''}")
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


def remove_staged(folder: Path) -> None:
    """Remove what earlier owners were about to give a name to in `folder`: they fail then. Raises nothing."""
    for path in folder.glob(".*.owned"):
        with suppress(OSError):
            path.unlink()


def write_atomically(path: Path, content: bytes | str, *, check: Check | None = None) -> None:
    """Write the whole of `content`, text as UTF-8, or nothing; the rest as `staged`."""
    with staged(path, check=check) as staging:
        staging.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, data: Any, *, check: Check | None = None) -> None:
    """Write `data` so that a reader sees the old file or the new one; the rest as `staged`."""
    write_atomically(path, json.dumps(data, indent=2) + "\n", check=check)


def read_json(path: Path) -> Any:
    """The file's content, or None if it is missing or is not whole."""
    try:
        with open_regular(path) as file:
            return json.load(file)
    except (OSError, ValueError, RecursionError):
        return None


def open_regular(path: Path) -> BufferedReader:
    """A file to read that came from elsewhere. Raises OSError, also for a pipe or a device, which may never end."""
    # Who opens a pipe otherwise waits for its writer
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "no regular file", str(path))
