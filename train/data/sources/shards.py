"""The data set `shards`: images in tar files, as the package webdataset writes them, each reached by itself.

An index says where each sample lies: a table as `numpy.save` writes it, a row a sample, which all processes of a node
map. It is made from the headers in the tar files, lies beside the shards where that can be written, else in the node's
cache, and is named by their names, sizes and times: for other shards another one is made. Samples are numbered by their
keys, so the shards' number and order change nothing in a training.
"""

import hashlib
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from rankup.errors import DataError
from rankup.places.files import staged

from ...config import Config
from ..file_samples import FileSamples, version_of_facts
from .cache import writable_cache
from .fetch import Say, locked
from .imagefolder import EXTENSIONS, MEAN, STD
from .shard_files import Shard, ShardFiles, each, find_shards

FORMAT = 3
COLUMNS = [("label", "<i4"), ("shard", "<i4"), ("offset", "<i8"), ("size", "<i8")]
HIGHEST_LABEL = 99_999  # a higher one is taken for a mistake: the model would get as many outputs
MAX_LABEL_BYTES = 1 << 20
COPY_AGAIN = "Copy it again from where it is whole, or write it again."

Row = tuple[int, int, int, int, bytes]  # of the table: COLUMNS and the key


def load(config: Config, say: Say) -> tuple[FileSamples, FileSamples]:
    """The shards of data_dir to train on, and those to test on: as train_shards and eval_shards name them, else found
    by their names. Those at a URL are copied to this node first, with shuffle_window when they are needed.

    Shards of a folder whose keys have the order of its files give the same training, to the bit, as the folder itself.
    Raises DataError, naming the shard, for whatever is wrong with one.
    """
    assert config.data_dir is not None, "Config refuses shards without data_dir"
    files = ShardFiles.at(config)
    (train_names, classes), (test_names, _) = (
        find_shards(files, part, pattern)
        for part, pattern in (("train", config.train_shards), ("val", config.eval_shards))
    )
    parts = [open_index(files, names, label_column=config.label_column or "label", say=say)
             for names in (train_names, test_names)]
    classes = classes or tuple(str(number) for number in range(int(parts[0].labels.max()) + 1))
    for part in parts:
        part.check_labels(len(classes))
    _bring(files, [shard for part in parts for shard in part.shards], config, say)
    # Resumed with other samples, labels or classes, a run is refused
    facts = repr((classes, [(part.digest(), list[str]()) for part in parts]))
    name = f"shards-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"
    train, test = (
        FileSamples(
            Names(part), part.labels, classes, MEAN, STD, name,
            origin=f"{len(part.shards)} shard{'s'[: len(part.shards) > 1]} in {files.root}"
                   + (f", kept in {files.copies}" if files.copies else ""),
            margin=config.augment in ("imagenet", "trivial"), contents=part,
        )
        for part in parts
    )
    return train, test


def _bring(files: ShardFiles, shards: Sequence[Shard], config: Config, say: Say) -> None:
    """Copy the shards of a URL to this node now, or see that they can be when they are needed."""
    if config.shuffle_window:
        largest = max(shards, key=lambda shard: shard.size)
        if not files.fits([largest]):
            way_out = "Set a larger --cache-max-gb."
            raise DataError(f"{files.path(largest.name)}: takes {largest.size / 1e9:.3g} GB. {way_out}")
    elif files.fits(shards):
        files.copy(shards, say=say)
    else:
        raise DataError(
            f"{files.root}: the shards take {sum(shard.size for shard in shards) / 1e9:.3g} GB, and cache_max_gb lets "
            f"this node keep {config.cache_max_gb:g}. Set a larger --cache-max-gb, or --shuffle-window 8192 to copy "
            "each shard when it is needed."
        )


@dataclass(frozen=True)
class Index:
    """The samples of one part by their numbers. `table`: COLUMNS and the key of each."""

    files: ShardFiles
    shards: tuple[Shard, ...]
    table: NDArray[Any]

    @cached_property
    def labels(self) -> torch.Tensor:
        """int64 [N]."""
        return torch.from_numpy(self.table["label"].astype(np.int64))

    @cached_property
    def storage(self) -> torch.Tensor:
        """The numbers of the samples as they lie in the shards one after the other, int64 [N]."""
        return torch.from_numpy(np.lexsort((self.table["offset"], self.table["shard"])))

    def digest(self) -> str:
        """Of the samples' keys, sizes and labels: the same for the same samples in other shards."""
        digest = hashlib.sha256()
        for name in ("key", "size", "label"):
            digest.update(np.ascontiguousarray(self.table[name]).data)
        return digest.hexdigest()

    def name(self, number: int) -> str:
        """Of a sample, for messages and predictions: its shard and its key."""
        row = self.table[number]
        return self.files.path(f"{self.shards[row['shard']].name}:{row['key'].decode(errors='replace')}")

    def version(self, number: int) -> int:
        """A number that differs once the sample's shard has been replaced."""
        shard = self.shards[self.table["shard"][number]]
        return version_of_facts(shard.name, shard.size, shard.stamp)

    def read(self, number: int) -> bytearray:
        """The image file of a sample. Raises DataError, naming the shard, if it is gone or has become shorter."""
        row = self.table[number]
        shard, offset, data = self.shards[row["shard"]], int(row["offset"]), bytearray(int(row["size"]))
        path = self.files.path(shard.name)
        try:
            file = self.files.open(shard)
            try:
                got = os.preadv(file, [data], offset)
            finally:
                os.close(file)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}). Was it removed meanwhile?") from error
        if got < len(data):
            raise DataError(f"{path}: ends at byte {offset + got}, and its index says more. Was it cut meanwhile?")
        return data

    def check_labels(self, num_classes: int) -> None:
        """Raises DataError for a label that the training shards do not have."""
        over = (self.labels >= num_classes).nonzero().flatten()
        if len(over):
            row = self.table[int(over[0])]
            raise DataError(
                f"{self.files.path(self.shards[row['shard']].name)}: the sample {row['key'].decode(errors='replace')} "
                f"has the label {row['label']}, and the training shards have the classes 0 to {num_classes - 1}."
            )

    def refuse_copies(self) -> None:
        """Raises DataError for a sample that lies in two shards."""
        keys, sizes = self.table["key"], self.table["size"]
        # Some writers begin to count anew in each shard: only a sample that is the same in both is a mistake
        for first in np.flatnonzero((keys[1:] == keys[:-1]) & (sizes[1:] == sizes[:-1]))[:10].tolist():
            if self.read(first) == self.read(first + 1):
                one, other = (self.files.path(self.shards[self.table["shard"][n]].name) for n in (first, first + 1))
                raise DataError(
                    f"{other}: holds the sample {keys[first].decode(errors='replace')}, which {one} holds too. Is one "
                    "a copy, or of an earlier set? Remove it."
                )


class Names(Sequence[str]):
    """The names of the samples, made when they are asked for: a million of them would take 100 MB."""

    def __init__(self, part: Index) -> None:
        self.part, self.numbers = part, range(len(part.table))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, wanted: Any) -> Any:
        found = self.numbers[wanted]
        return self.part.name(found) if isinstance(found, int) else [self.part.name(number) for number in found]


# Made once ------------------------------------------------------------------------------------------------------


def open_index(files: ShardFiles, names: Sequence[str], *, label_column: str, say: Say) -> Index:
    """The index of these shards: read, or made if there is none, by one process of each node.

    `say` gets a line when that takes time. Raises DataError for a shard that is missing, and for what `_scan` refuses.
    """
    shards = tuple(each(files.look, names, say=say, doing=f"looking at {files.root}"))
    key = json.dumps([FORMAT, list(map(astuple, shards)), label_column])
    in_cache = writable_cache() / f"shards-{hashlib.sha256((files.root + key).encode()).hexdigest()[:16]}.index"
    paths = [in_cache]
    if files.copies is None:
        paths.insert(0, Path(files.root, f"shards-{hashlib.sha256(key.encode()).hexdigest()[:16]}.index"))

    def scan(number: int) -> list[Row]:
        return _scan(files, shards[number], number=number, label_column=label_column)

    with locked(in_cache.with_suffix(".lock")):
        for path in paths:
            if (table := _load(path, shards)) is not None:
                return Index(files, shards, table)
        if files.fits(shards):
            files.copy(shards, say=say)
        found = each(scan, range(len(shards)), say=say, doing=f"indexing {files.root}")
        rows = [row for scanned in found for row in scanned]
        table = np.array(rows, np.dtype([*COLUMNS, ("key", f"S{max(len(row[-1]) for row in rows)}")]))
        table = table[np.lexsort((table["shard"], table["key"]))]
        index = Index(files, shards, table)
        index.refuse_copies()
        for path in paths:
            try:
                with staged(path) as staging, staging.open("wb") as file:
                    np.save(file, table)
                return index
            except OSError as error:
                problem = f"{path}: can't be written ({error.strerror})."
    raise DataError(f"{problem} Set RANKUP_CACHE to a folder with room.")


def _load(path: Path, shards: Sequence[Shard]) -> NDArray[Any] | None:
    """The table in this file, or None if there is none that can be of these shards."""
    try:
        # It refuses objects, which would be addresses in this process. A row of a memmap takes ten times as long
        table = np.load(path, mmap_mode="r").view(np.ndarray)
        if table.ndim != 1 or table.dtype != np.dtype([*COLUMNS, ("key", f"S{table.dtype['key'].itemsize}")]):
            return None
        sizes = np.array([shard.size for shard in shards])[table["shard"]]
        fits = (table["offset"] >= 0) & (table["size"] >= 0) & (table["size"] <= sizes - table["offset"])
        labels, numbers = table["label"], table["shard"]
        whole = fits.all() and min(labels.min(), numbers.min()) >= 0 and labels.max() <= HIGHEST_LABEL
        return table if whole else None
    except Exception:  # whatever numpy makes of a damaged file
        return None


# The headers of a tar file --------------------------------------------------------------------------------------


def _scan(files: ShardFiles, shard: Shard, *, number: int, label_column: str) -> list[Row]:
    """The rows of one shard's samples, in the order of the file.

    Members that follow each other and are named alike up to the first dot are one sample, as the package webdataset has
    it: one image, and its label as a number in `.cls`, or in `.json` under `label_column`. Other members are left
    alone. Raises DataError for a file that is cut, damaged, compressed or no tar, and for a sample that lacks its
    label, has two images, or comes twice.
    """
    name = files.path(shard.name)
    images: dict[str, tarfile.TarInfo] = {}
    labels: dict[str, int] = {}
    seen, last = set[str](), ""
    try:
        with os.fdopen(files.open(shard), "rb") as file:
            for member in _members(file, name, size=shard.size):
                folder, base = os.path.split(member.name)
                if not member.isreg() or base.startswith("."):
                    continue  # a folder; what macOS puts beside each file
                stem, _, ending = base.partition(".")
                key = f"{folder}/{stem}" if folder else stem
                is_image = f".{ending}".lower().endswith(EXTENSIONS)
                if key != last and key in seen:
                    raise DataError(f"{name}: holds two samples {key}. Each key must be there once, in one place.")
                last = key
                seen.add(key)
                if is_image and (first := images.setdefault(key, member)) is not member:
                    raise DataError(f"{name}: the sample {key} has two images, {first.name} and {member.name}.")
                if not is_image and ending in ("cls", "json"):
                    file.seek(member.offset_data)
                    content = file.read(min(member.size, MAX_LABEL_BYTES))
                    where = f"{name}: {member.name}"
                    label = _label(content, where, column=label_column if ending == "json" else None)
                    if label is not None:
                        labels[key] = label
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror or error}).") from error
    if unlabelled := next((key for key in images if key not in labels), None):
        raise DataError(
            f"{name}: the sample {unlabelled} has no label. There must be {unlabelled}.cls with the number of its "
            f'class, or {unlabelled}.json with "{label_column}".'
        )
    if not images:  # what has none may describe the shard
        raise DataError(f"{name}: holds no images ({' '.join(EXTENSIONS)}). Remove it, or name only other shards.")
    return [
        (labels[key], number, image.offset_data, image.size, key.encode(errors="surrogateescape"))
        for key, image in images.items()
    ]


def _members(file: BinaryIO, name: str, *, size: int) -> Iterator[tarfile.TarInfo]:
    if file.read(2) == b"\x1f\x8b":
        raise DataError(f"{name}: is compressed, so no sample in it can be reached by itself. Unpack it: gunzip.")
    file.seek(0)
    try:
        archive = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115 (the file is the caller's)
    except tarfile.TarError as error:
        raise DataError(f"{name}: is no tar file ({error}). {COPY_AGAIN}") from error
    while True:
        try:
            member = archive.next()
        except tarfile.TarError as error:
            raise DataError(f"{name}: is damaged at byte {archive.offset} ({error}). {COPY_AGAIN}") from error
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
        raise DataError(f"{name}: is cut off: its {size} bytes end in the middle, after byte {at}. {COPY_AGAIN}")
    if any(ending):
        raise DataError(f"{name}: is damaged at byte {at}, where a header should be. {COPY_AGAIN}")


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
