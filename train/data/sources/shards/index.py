"""The index of one part's shards: where each sample lies, in one file that all processes of a node map.

It is made once, from the headers in the tar files, beside the shards where that can be written, else in the node's
cache. Each start compares every shard with it, by size and time: a shard that is missing, cut or another one is named
before anything is trained. Samples are numbered by their keys, so the shards' number and order change nothing in a
training. The file: a table as `numpy.save` writes it, a row a sample in the order of their numbers, and a line of JSON.
"""

import hashlib
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from rankup.errors import DataError
from rankup.places.files import staged, write_atomically

from ..cache import writable_cache
from ..fetch import Say, locked
from ..imagefolder import EXTENSIONS
from .place import Place, Shard, each

FORMAT = 2
UNKNOWN = ""  # the stamp of a shard that was not looked at where it lies now: its size alone is compared
COLUMNS = [("label", "<i4"), ("shard", "<i4"), ("offset", "<i8"), ("size", "<i8")]
HIGHEST_LABEL = 99_999  # a higher one is taken for a mistake: the model would get as many outputs
MAX_LABEL_BYTES = 1 << 20
PACK_AGAIN = "Copy it again from where it is whole, or write it again."

Row = tuple[int, int, int, int, bytes]  # of the table: COLUMNS and the key


@dataclass(frozen=True)
class Index:
    """`table`: COLUMNS and the key of each sample. `path`: the file that it was read from."""

    path: Path
    shards: tuple[Shard, ...]
    table: NDArray[Any]
    digest: str  # of the samples' keys, sizes and labels: the same for the same samples in other shards

    @cached_property
    def labels(self) -> torch.Tensor:
        """int64 [N]."""
        return torch.from_numpy(self.table["label"].astype(np.int64))

    @cached_property
    def storage(self) -> torch.Tensor:
        """The numbers of the samples as they lie in the shards one after the other, int64 [N]."""
        return torch.from_numpy(np.lexsort((self.table["offset"], self.table["shard"])))

    def name(self, number: int) -> str:
        """Of a sample, for messages and predictions: its shard and its key."""
        row = self.table[number]
        return f"{self.shards[row['shard']].name}:{row['key'].decode(errors='replace')}"


def open_index(place: Place, names: Sequence[str], *, label_column: str, say: Say) -> Index:
    """The index of these shards: read, or made if there is none, by one process of each node.

    `say` gets a line when that takes time. Raises DataError for a shard that is missing or has changed since its index
    was made, and for whatever `_scan` refuses.
    """
    shards = each(place.look, names, say=say, doing=f"looking at {place.root}")
    key = _short_digest([FORMAT, list(names), label_column])
    name = f"shards-{key}.index"
    in_cache = writable_cache() / f"shards-{_short_digest([place.root, key])}.index"
    paths = [Path(place.root, name), in_cache] if place.copies is None else [in_cache]
    with locked(in_cache.with_suffix(".lock")):
        index = next((found for path in paths if (found := load_index(path, names)) is not None), None)
        if index is None and place.copies is not None and (content := place.read(name)) is not None:
            write_atomically(in_cache, content)
            if (index := load_index(in_cache, names)) is not None:
                # Its stamps are those of the folder where it was made
                index = replace(index, shards=tuple(replace(shard, stamp=UNKNOWN) for shard in index.shards))
        if index is None:
            if place.fits(shards):
                place.copy(shards, say=say)
            return _write(*_make(place, shards, label_column=label_column, say=say), paths)
        now = _compare(place, index, shards, label_column=label_column, say=say)
        return index if now == index.shards else _write(now, index.table, index.digest, paths)


def _short_digest(facts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


# The file -------------------------------------------------------------------------------------------------------


def load_index(path: Path, names: Sequence[str]) -> Index | None:
    """The index of the shards `names` in this file, or None if there is none that is whole.

    It may come with the data from elsewhere: nothing in it is used before it is compared with what it must be.
    """
    try:
        mapped = np.load(path, mmap_mode="r")  # refuses objects, which would be addresses in this process
        key = mapped.dtype["key"]
        if mapped.ndim != 1 or key.kind != "S" or mapped.dtype != np.dtype([*COLUMNS, ("key", key)]):
            return None
        with path.open("rb") as file:
            file.seek(mapped.offset + mapped.nbytes)
            facts = json.loads(file.read(1 << 24))
        table = mapped.view(np.ndarray)  # a row of a memmap takes ten times as long to be had
        shards = tuple(Shard(**shard) for shard in facts["shards"])
        types = [(shard.name, type(shard.size), type(shard.stamp), type(shard.digest)) for shard in shards]
        if types != [(name, int, str, str) for name in names] or not isinstance(facts["digest"], str):
            return None
        if hashlib.sha256(table.data).hexdigest() != facts["table"] or not _lies_in(table, shards):
            return None
        return Index(path, shards, table, facts["digest"])
    except Exception:  # whatever numpy and json make of a damaged or crafted file
        return None


def _lies_in(table: NDArray[Any], shards: Sequence[Shard]) -> bool:
    """Whether each sample has a label, and lies in one of the shards."""
    if not len(table) or table["shard"].min() < 0 or table["shard"].max() >= len(shards):
        return False
    sizes = np.array([shard.size for shard in shards])[table["shard"]]
    fits = (table["offset"] >= 0) & (table["size"] >= 0) & (table["size"] <= sizes - table["offset"])
    return bool(fits.all()) and int(table["label"].min()) >= 0 and int(table["label"].max()) <= HIGHEST_LABEL


def _write(shards: tuple[Shard, ...], table: NDArray[Any], digest: str, paths: Sequence[Path]) -> Index:
    """Write the index to the first of `paths` that can be written, whole or not at all, and map it."""
    checksum = hashlib.sha256(np.ascontiguousarray(table).data).hexdigest()
    facts = {"digest": digest, "table": checksum, "shards": [asdict(shard) for shard in shards]}
    for path in paths:
        try:
            with staged(path) as staging, staging.open("wb") as file:
                np.save(file, table)
                file.write(json.dumps(facts).encode() + b"\n")
        except OSError as error:
            problem = f"{path}: can't be written ({error.strerror})."
            continue
        index = load_index(path, [shard.name for shard in shards])
        assert index is not None, f"{path}: what was written can't be read"
        return index
    raise DataError(f"{problem} Set RANKUP_CACHE to a folder with room.")


# Making and comparing it ----------------------------------------------------------------------------------------


def _make(
    place: Place, shards: Sequence[Shard], *, label_column: str, say: Say
) -> tuple[tuple[Shard, ...], NDArray[Any], str]:
    """One table of all shards' samples, by key. Raises DataError for a sample that lies in two shards."""

    def scan(number: int) -> tuple[str, list[Row]]:
        return scan_shard(place, shards[number], number=number, label_column=label_column)

    found = each(scan, range(len(shards)), say=say, doing=f"indexing {place.root}")
    rows = [row for _, scanned in found for row in scanned]
    table = np.array(rows, np.dtype([*COLUMNS, ("key", f"S{max(len(row[-1]) for row in rows)}")]))
    table = table[np.lexsort((table["shard"], table["key"]))]
    # Some writers begin to count anew in each shard: only a sample that is the same in both is a mistake
    alike = (table["key"][1:] == table["key"][:-1]) & (table["size"][1:] == table["size"][:-1])
    for row in np.flatnonzero(alike)[:10].tolist():
        pair = [(shards[sample["shard"]], sample) for sample in table[row : row + 2]]
        contents = [read_sample(place, shard, int(sample["offset"]), int(sample["size"])) for shard, sample in pair]
        if contents[0] == contents[1]:
            raise DataError(
                f"{place.path(pair[1][0].name)}: holds the sample {table['key'][row].decode(errors='replace')}, which "
                f"{place.path(pair[0][0].name)} holds too. Is one a copy, or of an earlier set? Remove it."
            )
    digest = hashlib.sha256()
    for name in ("key", "size", "label"):
        digest.update(np.ascontiguousarray(table[name]).data)
    made = tuple(replace(shard, digest=digest_of) for shard, (digest_of, _) in zip(shards, found, strict=True))
    return made, table, digest.hexdigest()


def _compare(
    place: Place, index: Index, shards: Sequence[Shard], *, label_column: str, say: Say
) -> tuple[Shard, ...]:
    """The shards with what the index knows of them.

    A shard of another time may still hold the same, such as a copy: its headers say so. Raises DataError if not.
    """

    def compare(number: int) -> Shard:
        now, known = shards[number], index.shards[number]
        anew = f"If that is meant, remove {index.path}."
        if now.size != known.size:
            change = "is cut off or another one" if now.size < known.size else "is another one"
            sizes = f"{now.size} bytes, its index says {known.size}"
            raise DataError(f"{place.path(now.name)}: {change}: {sizes}. {anew}")
        if now.stamp != known.stamp != UNKNOWN:
            digest, _ = scan_shard(place, now, number=number, label_column=label_column)
            if digest != known.digest:
                changed = "has changed since its index was made: other samples or labels"
                raise DataError(f"{place.path(now.name)}: {changed}. {anew}")
        return replace(now, digest=known.digest)

    return tuple(each(compare, range(len(shards)), say=say, doing=f"comparing {place.root} with its index"))


def read_sample(place: Place, shard: Shard, offset: int, size: int) -> bytearray:
    """The image file of a sample. Raises DataError if its shard is gone or has become shorter."""
    path, data = place.path(shard.name), bytearray(size)
    try:
        file = place.open(shard)
        try:
            got = os.preadv(file, [data], offset)
        finally:
            os.close(file)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). Was it removed meanwhile?") from error
    if got < size:
        raise DataError(f"{path}: ends at byte {offset + got}, and its index says more. Was it cut meanwhile?")
    return data


# The headers of a tar file --------------------------------------------------------------------------------------


@dataclass
class _Sample:
    key: str
    image: tarfile.TarInfo | None = None
    label: int | None = None


def scan_shard(place: Place, shard: Shard, *, number: int, label_column: str) -> tuple[str, list[Row]]:
    """The digest of all headers and labels of one shard, and the rows of its samples, in the order of the file.

    Members that follow each other and are named alike up to the first dot are one sample, as the package webdataset has
    it: one image, and its label as a number in `.cls`, or in `.json` under `label_column`. Other members are left
    alone. Raises DataError for a file that is cut, damaged, compressed or no tar, and for a sample that lacks its
    label, has two images, or comes twice.
    """
    name = place.path(shard.name)
    try:
        with os.fdopen(place.open(shard), "rb") as file:
            return _scan(file, name, size=shard.size, number=number, label_column=label_column)
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror or error}).") from error


def _scan(file: BinaryIO, name: str, *, size: int, number: int, label_column: str) -> tuple[str, list[Row]]:
    if file.read(2) == b"\x1f\x8b":
        raise DataError(f"{name}: is compressed, so no sample in it can be reached by itself. Unpack it: gunzip.")
    file.seek(0)
    rows: list[Row] = []
    seen, digest = set[str](), hashlib.sha256()
    for sample in _samples(file, name, size=size, label_column=label_column, digest=digest):
        if sample.key in seen:
            raise DataError(f"{name}: holds two samples {sample.key}. Each key must be there once, in one place.")
        seen.add(sample.key)
        if sample.image is None:
            continue  # such as a file that describes the shard
        if sample.label is None:
            raise DataError(
                f"{name}: the sample {sample.key} has no label. There must be {sample.key}.cls with the number of its "
                f'class, or {sample.key}.json with "{label_column}".'
            )
        key = sample.key.encode(errors="surrogateescape")
        rows.append((sample.label, number, sample.image.offset_data, sample.image.size, key))
    if not rows:
        raise DataError(f"{name}: holds no images ({' '.join(EXTENSIONS)}). Remove it, or name only other shards.")
    return digest.hexdigest(), rows


def _samples(
    file: BinaryIO, name: str, *, size: int, label_column: str, digest: "hashlib._Hash"
) -> Iterator[_Sample]:
    sample = _Sample("")
    for member in _members(file, name, size=size):
        folder, base = os.path.split(member.name)
        if not member.isreg() or base.startswith("."):
            continue  # a folder; what macOS puts beside each file
        stem, _, ending = base.partition(".")
        key = f"{folder}/{stem}" if folder else stem
        if key != sample.key:
            if sample.key:
                yield sample
            sample = _Sample(key)
        content = b""
        if f".{ending}".lower().endswith(EXTENSIONS):
            if sample.image is not None:
                raise DataError(f"{name}: the sample {key} has two images, {sample.image.name} and {member.name}.")
            sample.image = member
        elif ending in ("cls", "json"):
            file.seek(member.offset_data)
            content = file.read(min(member.size, MAX_LABEL_BYTES))
            label = _label(content, f"{name}: {member.name}", column=label_column if ending == "json" else None)
            sample.label = label if label is not None else sample.label
        digest.update(f"{member.name}\0{member.size}\0{member.mtime}\0".encode(errors="surrogateescape") + content)
    if sample.key:
        yield sample


def _members(file: BinaryIO, name: str, *, size: int) -> Iterator[tarfile.TarInfo]:
    try:
        archive = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115 (the file is the caller's)
    except tarfile.TarError as error:
        raise DataError(f"{name}: is no tar file ({error}). {PACK_AGAIN}") from error
    while True:
        try:
            member = archive.next()
        except tarfile.TarError as error:
            raise DataError(f"{name}: is damaged at byte {archive.offset} ({error}). {PACK_AGAIN}") from error
        if member is None:
            break
        archive.members = []  # type: ignore[attr-defined]  # it would keep all of them
        if member.offset_data + member.size > size:
            break
        yield member
    # tarfile takes a header that it cannot read for the end, and says nothing
    at = member.offset if member else archive.offset
    file.seek(at)
    ending = file.read(tarfile.BLOCKSIZE)
    if member or len(ending) < tarfile.BLOCKSIZE:
        raise DataError(f"{name}: is cut off: its {size} bytes end in the middle, after byte {at}. {PACK_AGAIN}")
    if any(ending):
        raise DataError(f"{name}: is damaged at byte {at}, where a header should be. {PACK_AGAIN}")


def _label(content: bytes, where: str, *, column: str | None) -> int | None:
    """The label in the text of a `.cls`, or in a `.json` that has the column."""
    text = content.decode(errors="replace").strip()
    value: object = int(text) if text.isdecimal() and len(text) < 20 else text
    if column is not None:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: is no JSON ({error}).") from error
        if not isinstance(found, dict) or column not in found:
            return None
        value = found[column]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= HIGHEST_LABEL:
        raise DataError(f"{where}: must be the number of a class, 0 to {HIGHEST_LABEL}, got {value!r}.")
    return value
