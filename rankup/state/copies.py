"""A copy on disk: a folder of named files, which appears whole or not at all. This module does not import torch.

`step-00001200/` holds `state.json` (what people may want to read, such as `step`), the files of `rankup.state.tree`,
and `manifest.json`, which has the step, and the size in bytes and the digests of each other file, its parts.

A part has a SHA-256 for each `PIECE` of its bytes, so that threads, ranks and nodes can each hash some pieces. blake3
is four times as fast on one core (4.6 and 1.2 GiB/s on a CPU with instructions for SHA-256), but would be the only
package beside torch and psutil that every rank needs, and a few cores with SHA-256 are faster than disks and networks.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rankup.errors import UserError
from rankup.places.files import STAGING, open_regular, read_json

MANIFEST = "manifest.json"
STATE = "state.json"
# An earlier copy of the same step is called `.replaced` until the new copy has got the name
NAME = re.compile(r"step-(\d{8,})(\.replaced)?")
# Copies may come from anywhere, so no file name in a manifest may lead out of the copy's folder
FILE = re.compile(r"\w[\w.-]*")
Fingerprint = dict[str, Any]  # {"bytes": int, "sha256": [str, ...]} of one file

# Checks the path and the record of a copy. Raises UserError if the caller can't use the copy, and ValueError if it is
# damaged
Check = Callable[[Path, dict[str, Any]], object]

# What reading a damaged manifest may raise
_NO_MANIFEST = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
PIECE = 32 * 2**20  # bytes under one digest
CHUNK = 2**20  # bytes that are read or written at a time: they are hashed while they are still in the CPU's cache
on_write: list[Callable[[int], object]] = []  # called with the size of each chunk that this process has written


class Damaged(UserError):
    """A copy at `path` can't be used, for the reason `why`."""

    def __init__(self, path: Path | str, why: str, *, printed_elsewhere: bool = False) -> None:
        text = f"checkpoint: {path} must be a whole checkpoint, got a damaged one: {why:.300}."
        super().__init__(text, printed_elsewhere=printed_elsewhere)
        self.path, self.why = str(path), why


@dataclass(frozen=True, slots=True)
class Part:
    """A file of a copy, as its manifest describes it. `size`: in bytes. Copies of an earlier version have one digest
    for the whole file."""

    name: str
    size: int
    digests: tuple[str, ...]

    def piece(self, number: int) -> tuple[int, int]:
        """Return where the piece under this digest begins and ends."""
        if len(self.digests) == 1:
            return 0, self.size
        return number * PIECE, min(self.size, (number + 1) * PIECE)

    def problem(self, number: int, path: Path, put: Callable[[int, memoryview], object] | None = None) -> str:
        """Read a piece from the file `path`, and return why it can't be used, or "". `put`: called with the bytes, and
        where in the part they begin."""
        (at, end), digest = self.piece(number), hashlib.sha256()
        buffer = memoryview(bytearray(min(CHUNK, end - at)))
        try:
            with open_regular(path) as file:
                if (size := os.fstat(file.fileno()).st_size) != self.size:
                    return f"{self.name} has {size} bytes instead of {self.size}"
                # If the file was cut meanwhile, nothing is read, and the digest will differ
                while at < end and (got := os.preadv(file.fileno(), [buffer[:end - at]], at)):
                    digest.update(view := buffer[:got])
                    if put is not None:
                        put(at, view)
                    at += got
        except FileNotFoundError:
            return f"{self.name} is missing"
        except OSError as error:
            return f"can't be read ({error.strerror})"
        return "" if digest.hexdigest() == self.digests[number] else f"{self.name} does not match its digest"


def no_check(path: Path, record: dict[str, Any]) -> None:
    """Accept any record."""


class Content(Protocol):
    """The content of a file to write: bytes, or an object that yields them piece by piece."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...


# Reading --------------------------------------------------------------------------------------------------------


def list_copies(directory: Path) -> list[Path]:
    """Return all folders named like a copy, good or not, oldest first, and `.replaced` before its successor. A link may
    be broken: a copy that was moved to another disk, for example, is then reported as damaged."""
    try:
        # No exists() first: several ranks of a node may remove a rescue's folder at the same time
        paths = list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    named = [(match, path) for path in paths
             if (match := NAME.fullmatch(path.name)) and (path.is_dir() or path.is_symlink())]
    # Sort by number, because names have one digit more from step 100,000,000 on
    return [path for match, path in sorted(named, key=lambda pair: (int(pair[0][1]), not pair[0][2]))]


def list_whole(directory: Path) -> list[Path]:
    """Return the copies in `directory` that look whole, oldest first."""
    return [path for path in list_copies(directory) if looks_whole(path)]


def step_of(path: Path) -> int:
    """Return the step in the name of a copy's folder, here or at another place."""
    return int(path.name.split("-")[1].partition(".")[0])


def verify(path: Path) -> None:
    """Read every file of a copy. Raises Damaged if any byte has changed."""
    for part in read_manifest(path)[1]:
        for number in range(len(part.digests)):
            if why := part.problem(number, path / part.name):
                raise Damaged(path, why)


def looks_whole(path: Path) -> bool:
    """Return whether a copy has a manifest and all files have their sizes: a save has no time to read every file."""
    with contextlib.suppress(Damaged, OSError):
        return all((path / part.name).stat().st_size == part.size for part in read_manifest(path)[1])
    return False


def read_record(path: Path, parts: Iterable[Part]) -> dict[str, Any]:
    """Return the content of `state.json`, verified. Raises Damaged."""
    found = [part for part in parts if part.name == STATE]
    problems = [part.problem(number, path / STATE) for part in found for number in range(len(part.digests))]
    if why := "".join(problems) if found else f"{MANIFEST} is damaged":
        raise Damaged(path, why)
    with _readable(path):
        return _of_this_step(path, read_json(path / STATE))


def _of_this_step(path: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Return `record`. Raises Damaged if the folder's name has another step: a copy under the name of a higher step
    would win against newer copies. A folder that the user names may have any other name."""
    step = record["step"]
    if (named := NAME.fullmatch(path.name)) and int(named[1]) != step:
        raise Damaged(path, f"its name says step {int(named[1])}, its state {step}")
    return record


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Within the block, turn what reading a damaged manifest or a missing file raises into Damaged."""
    try:
        yield
        return
    except Damaged:
        raise
    except FileNotFoundError as error:
        why = f"{Path(error.filename).name} is missing"
    except OSError as error:
        why = f"can't be read ({error.strerror})"
    except _NO_MANIFEST:
        why = f"{MANIFEST} is damaged"
    raise Damaged(path, why)


def read_manifest(path: Path) -> tuple[dict[str, Any], list[Part]]:
    """Return the manifest of a copy, and the parts in it. Raises Damaged."""
    with _readable(path):
        with open_regular(path / MANIFEST) as file:
            manifest: dict[str, Any] = json.load(file)
        parts = [part_of(name, entry) for name, entry in manifest["files"].items()]
        _of_this_step(path, manifest)
    return manifest, parts


def part_of(name: str, entry: Fingerprint) -> Part:
    """Return the part that a manifest describes. Raises one of _NO_MANIFEST if the manifest is damaged."""
    digests = [entry["sha256"]] if isinstance(entry["sha256"], str) else entry["sha256"]
    size = entry["bytes"]
    if not FILE.fullmatch(name) or type(size) is not int or len(digests) not in (1, -(-size // PIECE)):
        raise ValueError
    return Part(name, size, tuple(digests))


# Writing --------------------------------------------------------------------------------------------------------


def to_json(value: dict[str, Any]) -> bytes:
    """Return indented JSON, for people."""
    return (json.dumps(value, indent=2) + "\n").encode()


def staging_of(directory: Path, step: int, token: str = "") -> Path:
    """Return the path of a hidden folder in which a copy is written."""
    return directory / f"{STAGING}step-{step:08d}-{token or secrets.token_hex(4)}"


def write_durably(path: Path, content: Iterable[Any]) -> Fingerprint:
    """Write and sync `content`, bytes or pieces of bytes. Return the file's manifest entry. Raises OSError."""
    return write(path, content, durably=True)


def write(path: Path, content: Iterable[Any], *, durably: bool, threads: int = 1) -> Fingerprint:
    """Write `content` in pieces, several at a time by `threads`. A GPU's tensors are copied to the host a few ahead."""
    with path.open("wb") as file, ThreadPoolExecutor(threads, thread_name_prefix="write") as pool:
        size, digests, begun = 0, list[str](), deque[Future[str]]()
        for views in _pieces(content):
            work = partial(_write_piece, file.fileno(), size, views)
            size += sum(map(len, views))
            if threads == 1:
                digests.append(work())
                continue
            begun.append(pool.submit(work))
            if len(begun) > threads:
                digests.append(begun.popleft().result())
        digests += [each.result() for each in begun]
        # close() leaves the bytes in the page cache. After a power cut the rename could survive without the contents
        if durably:
            os.fsync(file.fileno())
    return {"bytes": size, "sha256": digests}


def _pieces(content: Iterable[Any]) -> Iterator[list[memoryview]]:
    """Yield the bytes of a file, `PIECE` at a time; one piece without bytes if it is empty."""
    views, left, whole = list[memoryview](), PIECE, 0
    for each in [content] if isinstance(content, bytes | bytearray) else content:
        rest = memoryview(each)
        while len(rest):
            views.append(rest[:left])
            rest, left = rest[left:], left - len(views[-1])
            if not left:
                yield views
                views, left, whole = [], PIECE, whole + 1
    if views or not whole:
        yield views


def _write_piece(file: int, at: int, views: Iterable[memoryview]) -> str:
    """Write a piece to the open `file`, where it begins `at` this byte. Return its digest. Raises OSError."""
    digest = hashlib.sha256()
    for view in views:
        for begin in range(0, len(view), CHUNK):
            digest.update(chunk := view[begin:begin + CHUNK])
            write_at(file, at, chunk)
            at += len(chunk)
            for note in on_write:
                note(len(chunk))
    return digest.hexdigest()


def write_at(file: int, at: int, content: memoryview) -> None:
    """Write all of `content` to the open `file`, where it begins `at` this byte. Raises OSError."""
    while content:  # a disk that is nearly full takes a part, and then raises
        written = os.pwrite(file, content, at)
        at, content = at + written, content[written:]
