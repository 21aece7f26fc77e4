"""Where the samples of one tar file lie: its headers are read once, and no image is."""

import hashlib
import json
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from rankup.errors import DataError
from train.data.sources.imagefolder import EXTENSIONS

PACK_AGAIN = "Copy it again from where it is whole, or write it again."
HIGHEST_LABEL = 99_999  # a higher one is taken for a mistake: the model would get as many outputs
MAX_LABEL_BYTES = 1 << 20


@dataclass
class Scan:
    """The samples of one shard, in the order of the file. `digest` is that of all headers and labels."""

    keys: list[str] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # of the image, in bytes
    sizes: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    digest: str = ""


@dataclass
class _Sample:
    key: str
    image: tarfile.TarInfo | None = None
    label: int | None = None


def scan_tar(file: BinaryIO, name: str, *, size: int, label_column: str) -> Scan:
    """Read the headers of the tar `file`, of `size` bytes; `name` stands in messages.

    Members that follow each other and are named alike up to the first dot are one sample, as the package webdataset has
    it: one image, and its label as a number in `.cls`, or in `.json` under `label_column`. Other members are left
    alone. Raises DataError for a file that is cut, damaged, compressed or no tar, and for a sample that lacks its
    label, has two images, or comes twice.
    """
    if file.read(2) == b"\x1f\x8b":
        raise DataError(f"{name}: is compressed, so no sample in it can be reached by itself. Unpack it: gunzip.")
    file.seek(0)
    scan, seen = Scan(), set[str]()
    digest = hashlib.sha256()
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
        scan.keys.append(sample.key)
        scan.offsets.append(sample.image.offset_data)
        scan.sizes.append(sample.image.size)
        scan.labels.append(sample.label)
    if not scan.keys:
        raise DataError(f"{name}: holds no images ({' '.join(EXTENSIONS)}). Remove it, or name only other shards.")
    scan.digest = digest.hexdigest()
    return scan


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
            content = _read(file, member)
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


def _read(file: BinaryIO, member: tarfile.TarInfo) -> bytes:
    file.seek(member.offset_data)
    return file.read(min(member.size, MAX_LABEL_BYTES))


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
    return check_label(value, where)


def check_label(value: object, where: str) -> int:
    """`value` as a class number. Raises DataError."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= HIGHEST_LABEL:
        raise DataError(f"{where}: must be the number of a class, 0 to {HIGHEST_LABEL}, got {value!r}.")
    return value
