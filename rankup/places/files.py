"""Files that a reader sees old or new, never half. No torch here."""

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """A hidden path beside `path` to write to. It takes the name `path` at the end of a block that succeeds.

    Raises OSError where the folder can't be made or written. A block that fails leaves `path` as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A random name, not the process's number: two containers that share this folder may have equal numbers
    staging = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield staging
        # Atomic within one file system. Not synced: these files may be lost in a power cut, copies of a state must not
        staging.replace(path)
    except BaseException:
        with suppress(OSError):  # the first error is the one that counts
            staging.unlink()
        raise


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write the whole of `content`, text as UTF-8, or nothing. Makes the folder. Raises OSError."""
    with staged(path) as staging:
        staging.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, data: Any) -> None:
    """Write `data` so that a reader sees the old file or the new one. Makes the folder. Raises OSError."""
    write_atomically(path, json.dumps(data, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """The file's content, or None if it is missing or is not whole."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
