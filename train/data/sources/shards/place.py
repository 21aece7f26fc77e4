"""Where shards lie, a folder or a URL, and which files of it they are."""

import fnmatch
import json
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar

from rankup.errors import DataError
from rankup.places.urls import is_url, must_hold_no_secrets, secrets_in
from train.data.sources.shards.remote import explained, filesystem

LIST = "shards.json"  # may lie beside shards: their names, and those of the classes
ENDINGS = (".tar", ".parquet")
COMPRESSED = (".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")
PARTS = {"train": ("train",), "val": ("val", "test")}  # what their names begin with; the first that is there counts
# What the file systems of fsspec call that which tells one version of a file from another
VERSIONS = ("ETag", "etag", "md5Hash", "LastModified", "mtime", "created")
READERS = 16  # threads that ask a store at the same time: each request takes some 20 ms, and does nothing meanwhile
BRACES = re.compile(r"\{([^{}]*)\}")
NUMBER = re.compile(r"(\d+)(?:-of-(\d+))?(?=\.\w+$)")

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """A folder, or a URL that fsspec reads."""

    root: str

    @classmethod
    def at(cls, text: str) -> "Place":
        """`text`: what the user wrote in data_dir."""
        if text.startswith("file://"):
            text = text.removeprefix("file://")
        if secrets_in(text):
            raise DataError(must_hold_no_secrets("data_dir"))
        return cls(text.rstrip("/") if is_url(text) else os.path.abspath(os.path.expanduser(text)))

    @property
    def is_local(self) -> bool:
        return not is_url(self.root)

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def names(self) -> list[str]:
        """The files that lie there and one folder below, sorted. Raises DataError where they can't be listed."""
        if not self.is_local:
            return self._remote_names()
        try:
            names = []
            for entry in os.scandir(self.root):
                if entry.is_dir() and not entry.name.startswith("."):
                    names += [f"{entry.name}/{name}" for name in os.listdir(entry.path)]
                else:
                    names.append(entry.name)
        except OSError as error:
            raise DataError(f"{self.root}: cannot be read ({error.strerror}).") from error
        return sorted(names)

    def _remote_names(self) -> list[str]:
        files = filesystem(self.root)
        base = files._strip_protocol(self.root)
        with explained(self.root, "can't be listed"):
            files.invalidate_cache()  # some remember what was there earlier
            try:
                found = files.ls(self.root, detail=True)  # not `find`, to which a store that denies it is an empty one
            except FileNotFoundError:
                way_out = "Is the address right? Where nothing can be listed, set --train-shards and --eval-shards."
                raise DataError(f"{self.root}: is not there or can't be listed. {way_out}") from None
            names = [entry["name"] for entry in found if entry["type"] != "directory"]
            for entry in found:
                if entry["type"] == "directory":
                    names += files.ls(entry["name"], detail=False)
        return sorted(name.removeprefix(base).lstrip("/") for name in names)

    def look(self, name: str) -> tuple[int, str] | None:
        """Size in bytes, and what changes when the file is written again; None if there is none."""
        path = self.path(name)
        if self.is_local:
            try:
                found = os.stat(path)
            except FileNotFoundError:
                return None
            except OSError as error:
                raise DataError(f"{path}: cannot be read ({error.strerror}).") from error
            return found.st_size, str(found.st_mtime_ns)
        with explained(path, "can't be looked at"):
            try:
                facts = filesystem(path).info(path)
            except FileNotFoundError:
                return None
        version = next((facts[k] for k in VERSIONS if facts.get(k)), "")
        return int(facts["size"] or 0), str(version)

    def open(self, name: str) -> BinaryIO:
        """The file, to be read from its beginning to its end in large pieces."""
        if self.is_local:
            return open(self.path(name), "rb")
        with explained(self.path(name), "can't be read"):
            file: Any = filesystem(self.root).open(self.path(name), "rb", block_size=8 << 20, cache_type="readahead")
            return file  # type: ignore[no-any-return]

    def read(self, name: str) -> bytes | None:
        """A small file, or None if there is none."""
        path = self.path(name)
        try:
            if self.is_local:
                with open(path, "rb") as file:
                    return file.read()
            with explained(path, "can't be read"):
                try:
                    return bytes(filesystem(path).cat_file(path))
                except PermissionError:
                    return None  # what a store says of a file that is not there to those who may not list it
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}).") from error


def each(work: Callable[[str], T], names: Sequence[str]) -> list[T]:
    """`work` of all names, several at a time: stores and network disks answer slowly, and many at once."""
    with ThreadPoolExecutor(READERS) as threads:
        return list(threads.map(work, names))


def find_shards(place: Place, part: str, pattern: str) -> tuple[list[str], tuple[str, ...]]:
    """The shards of `part`, "train" or "val", by name, and the names of the classes, if shards.json has them.

    `pattern`: what the user wrote, names with * and {000..009}; "": those that shards.json names, else what lies there
    by the name of its part. Raises DataError for none, a gap in their numbers, and compressed ones.
    """
    listed = _read_list(place)
    classes = tuple(listed.get("classes", ()))
    if pattern:
        names = [name for word in pattern.split() for name in _expand(word)]
        if any("*" in name for name in names):
            there = place.names()
            names = [found for name in names for found in (fnmatch.filter(there, name) if "*" in name else [name])]
        what = f"of {pattern}"
    elif part in listed:
        return listed[part], classes
    else:
        there = place.names()
        named = ([name for name in there if name.startswith(word)] for word in PARTS[part])
        names = next(filter(None, named), [])
        what = f"named {part}-000000.tar and so on, or {part}/..."
    if packed := [name for name in names if name.endswith(COMPRESSED)]:
        raise DataError(
            f"{place.path(packed[0])}: is compressed, so no sample in it can be reached by itself. Unpack it: gunzip."
        )
    names = [name for name in dict.fromkeys(names) if name.endswith(ENDINGS)]
    if not names:
        setting = "--train-shards" if part == "train" else "--eval-shards"
        example = f"{part}-{{000000..000146}}.tar"
        raise DataError(f"{place.root}: holds no shards {what}. Set {setting}, such as '{example}'.")
    if not pattern or "*" in pattern:
        _refuse_gaps(place, names)
    return names, classes


def _read_list(place: Place) -> dict[str, list[str]]:
    """What shards.json says; nothing where there is none."""
    content = place.read(LIST) or b"{}"
    try:
        listed: dict[str, list[str]] = json.loads(content)
        if not all(isinstance(name, str) for key in ("classes", "train", "val") for name in listed.get(key, ())):
            raise ValueError("no lists of names")
    except (ValueError, AttributeError, TypeError) as error:
        way_out = "Correct it, or remove it and name the shards by patterns."
        raise DataError(f"{place.path(LIST)}: is no list of shards ({error}). {way_out}") from error
    return listed


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


def _refuse_gaps(place: Place, names: Sequence[str]) -> None:
    """Numbered shards must be there from the first to the last: one that was not copied is easily overlooked."""
    numbered: dict[str, set[int]] = {}
    ends: dict[str, int] = {}
    shapes: dict[str, str] = {}
    for name in names:
        if found := NUMBER.search(name):
            kind = name[: found.start()]
            numbered.setdefault(kind, set()).add(int(found[1]))
            ends[kind] = int(found[2] or 0)
            shapes[kind] = f"{kind}{{:0{len(found[1])}}}{name[found.end(1):]}"
    for kind, numbers in numbered.items():
        first = min(numbers)
        last = max(first + ends[kind] - 1, max(numbers)) if ends[kind] else max(numbers)
        if gaps := sorted(set(range(first, last + 1)) - numbers):
            raise DataError(
                f"{place.path(shapes[kind].format(gaps[0]))}: is missing, and {len(gaps) - 1} more, between the "
                f"{len(numbers)} shards that are there. Copy them, or name those that you want by a pattern."
            )
