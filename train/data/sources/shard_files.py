"""Where shards lie, a folder or a URL, which files of it they are, and this node's copies of those at a URL."""

import fnmatch
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from rankup.errors import DataError, UserError
from rankup.places.files import staged
from rankup.places.place import Place
from rankup.places.urls import is_url, must_hold_no_secrets, secrets_in

from ...config import Config
from .cache import writable_cache
from .fetch import Say, locked, print_to_stderr

LIST = "shards.json"  # may lie beside shards: their names, and those of the classes
COMPRESSED = (".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")
PARTS = {"train": ("train",), "val": ("val", "test")}  # what their names begin with; the first that is there counts
# What the file systems of fsspec call that which tells one version of a file from another
VERSIONS = ("ETag", "etag", "md5Hash", "LastModified", "mtime", "created")
THREADS = 16  # that ask a store at the same time: each request takes some 20 ms, and does nothing meanwhile
REQUEST_BYTES = 16 << 20  # long enough that this waiting does not count
REPORT_EVERY_S = 5.0
# Longer than a step may take: a store that stays away ends a training by the step's deadline, with a code after which
# it is started again
PATIENCE_S = 1200.0
BRACES = re.compile(r"\{([^{}]*)\}")
NUMBER = re.compile(r"(\d+)(?:-of-(\d+))?(?=\.\w+$)")

Item = TypeVar("Item")
T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """`stamp`: what changes when the file is written again."""

    name: str
    size: int
    stamp: str


@dataclass(frozen=True)
class ShardFiles:
    """A folder, or a URL that fsspec reads. `copies`: where this node keeps the shards of a URL, all places' together
    at most `max_bytes`; those used longest ago go first."""

    root: str
    copies: Path | None = None
    max_bytes: int = 0

    @classmethod
    def at(cls, config: Config) -> "ShardFiles":
        """Those in `data_dir`. Raises DataError for an address with a password in it."""
        text = str(config.data_dir).removeprefix("file://")
        if secrets_in(text):
            raise DataError(must_hold_no_secrets("data_dir"))
        if not is_url(text):
            return cls(os.path.abspath(os.path.expanduser(text)))
        return cls(text.rstrip("/"), writable_cache() / "shards", int(config.cache_max_gb * 1e9))

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def names(self) -> list[str]:
        """The files that lie there and one folder below, sorted. Raises DataError for none, UserError, PeerLost."""
        store = _store(self.root, os.getpid())
        try:
            found = store.entries()
            folders = [name for name, is_folder in found.items() if is_folder and not name.startswith(".")]
            for folder in folders:
                found |= store.entries(folder)
        except OSError as error:
            raise DataError(f"{self.root}: can't be listed ({error.strerror}).") from error
        names = sorted(name for name, is_folder in found.items() if not is_folder)
        if not names:
            way_out = "Is the address right? Where nothing can be listed, set --train-shards and --eval-shards."
            raise DataError(f"{self.root}: is not there, is empty or can't be listed. {way_out}")
        return names

    def look(self, name: str) -> Shard:
        """Its size and stamp. Raises DataError if there is none."""
        facts = _store(self.root, os.getpid()).info(name)
        if facts is None:
            raise DataError(
                f"{self.path(name)}: is missing. Bring it back to {self.root}, or name only the shards that you want "
                "by a pattern."
            )
        stamp = next((facts[key] for key in VERSIONS if facts.get(key)), "")
        return Shard(name, int(facts["size"] or 0), str(stamp))

    def listed(self) -> dict[str, list[str]]:
        """What shards.json says; nothing where there is none."""
        content = None
        try:
            content = _store(self.root, os.getpid()).read(LIST)
        except UserError:  # what a store says of a file that is not there to those who may not list it
            if self.copies is None:
                raise
        try:
            found: dict[str, list[str]] = json.loads(content or b"{}")
            if not all(isinstance(name, str) for key in ("classes", "train", "val") for name in found.get(key, ())):
                raise ValueError("no lists of names")
        except (ValueError, AttributeError, TypeError) as error:
            way_out = "Correct it, or remove it and name the shards by patterns."
            raise DataError(f"{self.path(LIST)}: is no list of shards ({error}). {way_out}") from error
        return found

    # Contents ---------------------------------------------------------------------------------------------------

    def fits(self, shards: Iterable[Shard]) -> bool:
        """Whether this node may keep all of them."""
        return self.copies is None or sum(shard.size for shard in shards) <= self.max_bytes

    def open(self, shard: Shard) -> int:
        """A descriptor of its file on this node, where one at a URL is copied to first. Raises OSError, DataError."""
        if self.copies is None:
            return os.open(self.path(shard.name), os.O_RDONLY)
        while True:  # again where another process removes it at this moment, to make room
            with suppress(FileNotFoundError):
                file = os.open(self._copy_of(shard), os.O_RDONLY)
                if os.fstat(file).st_size == shard.size:
                    os.utime(file)
                    return file
                os.close(file)  # cut by a power failure
            self.copy([shard])

    def copy(self, shards: Sequence[Shard], *, say: Say = print_to_stderr) -> None:
        """Copy shards at a URL to this node: one process does it, the others wait. A copy is there whole or not at all.

        Raises DataError if one can't be read there or there is no room, PeerLost if the store stays away.
        """
        if self.copies is None or all(map(self._is_here, shards)):
            return
        try:
            self.copies.mkdir(parents=True, exist_ok=True)
            with locked(self.copies / "lock"):
                missing = [shard for shard in shards if not self._is_here(shard)]
                self._make_room(sum(shard.size for shard in missing))
                each(self._copy, missing, say=say, doing=f"copying {self.root} to {self.copies}")
        except OSError as error:
            way_out = "Set RANKUP_CACHE to a folder with room for them, or a smaller --cache-max-gb."
            raise DataError(f"{self.copies}: can't hold the shards ({error.strerror or error}). {way_out}") from error

    def _copy_of(self, shard: Shard) -> Path:
        assert self.copies is not None
        key = repr((self.root, shard.name, shard.stamp, shard.size))
        return self.copies / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.tar"

    def _is_here(self, shard: Shard) -> bool:
        try:
            path = self._copy_of(shard)
            os.utime(path)  # so that it is not what goes to make room for the others
            return path.stat().st_size == shard.size
        except FileNotFoundError:
            return False

    def _copy(self, shard: Shard) -> None:
        with staged(self._copy_of(shard)) as staging, staging.open("wb") as file:
            for begin in range(0, shard.size, REQUEST_BYTES):
                end = min(begin + REQUEST_BYTES, shard.size)
                data = _store(self.root, os.getpid()).read(shard.name, (begin, end))
                if data is None:
                    raise DataError(f"{self.path(shard.name)}: is gone since the training began. Bring it back.")
                if len(data) != end - begin:
                    raise DataError(
                        f"{self.path(shard.name)}: gives {len(data)} bytes from byte {begin} on, and its size says "
                        f"{end - begin}. Was it cut or replaced meanwhile? (A server must know range requests.)"
                    )
                file.write(data)

    def _make_room(self, num_bytes: int) -> None:
        """Remove what a killed process left half copied, and then the copies used longest ago. Under the lock."""
        assert self.copies is not None
        found = []
        for path in self.copies.glob("*.tar*"):
            if path.name.startswith("."):
                path.unlink(missing_ok=True)
            else:
                found.append((path.stat().st_mtime, path.stat().st_size, path))
        total = num_bytes + sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size


@lru_cache(maxsize=8)
def _store(root: str, pid: int) -> Place:
    """One for each process: it has connections, which a forked one can't share."""
    return Place.open(root, warn=print_to_stderr).while_moving(PATIENCE_S if is_url(root) else 0.0)


def each(work: Callable[[Item], T], items: Sequence[Item], *, say: Say, doing: str) -> list[T]:
    """`work` of all items, several at a time: stores and network disks answer slowly, and many at once."""
    began_s = reported_s = time.monotonic()
    results = []
    with ThreadPoolExecutor(THREADS) as threads:
        for done, result in enumerate(threads.map(work, items), 1):
            results.append(result)
            if (now_s := time.monotonic()) - reported_s > REPORT_EVERY_S:
                reported_s = now_s
                say(f"{doing}: {done} of {len(items)} shards after {now_s - began_s:.0f} s (once)")
    return results


# Names ----------------------------------------------------------------------------------------------------------


def find_shards(files: ShardFiles, part: str, pattern: str) -> tuple[list[str], tuple[str, ...]]:
    """The shards of `part`, "train" or "val", by name, and the names of the classes, if shards.json has them.

    `pattern`: what the user wrote, names with * and {000..009}; "": those that shards.json names, else what lies there
    by the name of its part. Raises DataError for none, a gap in their numbers, and compressed ones.
    """
    listed = files.listed()
    classes = tuple(listed.get("classes", ()))
    if pattern:
        names = [name for word in pattern.split() for name in _expand(word)]
        if any("*" in name for name in names):
            there = files.names()
            names = [found for name in names for found in (fnmatch.filter(there, name) if "*" in name else [name])]
        what = f"of {pattern}"
    elif part in listed:
        return listed[part], classes
    else:
        there = files.names()
        named = ([name for name in there if name.startswith(word)] for word in PARTS[part])
        names = next(filter(None, named), [])
        what = f"named {part}-000000.tar and so on, or {part}/..."
    if packed := [name for name in names if name.endswith(COMPRESSED)]:
        raise DataError(
            f"{files.path(packed[0])}: is compressed, so no sample in it can be reached by itself. Unpack it: gunzip."
        )
    parquet = any(name.endswith(".parquet") for name in names)
    names = [name for name in dict.fromkeys(names) if name.endswith(".tar")]
    if not names:
        setting = "--train-shards" if part == "train" else "--eval-shards"
        way_out = f"Set {setting}, such as '{part}-{{000000..000146}}.tar'."
        if parquet:
            way_out = "Parquet files are read by --dataset hf:FOLDER."
        raise DataError(f"{files.root}: holds no shards {what}. {way_out}")
    if not pattern or "*" in pattern:
        _refuse_gaps(files, names)
    return names, classes


def _expand(pattern: str) -> list[str]:
    """The names that {000..146} and {train,val} stand for, as in a shell."""
    found = BRACES.search(pattern)
    if found is None:
        return [pattern]
    first, dots, last = found[1].partition("..")
    if dots and first.isdecimal() and last.isdecimal():
        words = [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    else:
        words = found[1].split(",")
    rest = _expand(pattern[found.end():])
    return [pattern[: found.start()] + word + more for word in words for more in rest]


def _refuse_gaps(files: ShardFiles, names: Sequence[str]) -> None:
    """Numbered shards must be there from the first to the last: one that was not copied is easily overlooked."""
    kinds: dict[str, list[re.Match[str]]] = {}
    for name in names:
        if found := NUMBER.search(name):
            kinds.setdefault(name[: found.start()], []).append(found)
    for kind, found_here in kinds.items():
        numbers, total = {int(found[1]) for found in found_here}, int(found_here[-1][2] or 0)
        last = max(min(numbers) + total - 1, *numbers, 0)
        if gaps := sorted(set(range(min(numbers), last + 1)) - numbers):
            found = found_here[-1]
            name = f"{kind}{gaps[0]:0{len(found[1])}}{found.string[found.end(1):]}"
            raise DataError(
                f"{files.path(name)}: is missing, and {len(gaps) - 1} more, between the {len(numbers)} shards that are "
                "there. Copy them, or name those that you want by a pattern."
            )
