"""Making the index of one part's shards, and comparing them with it.

It is made once, beside the shards where that can be written, else in the node's cache. Each start compares every shard
with it, by size and time: a shard that is missing, cut or another one is named before anything is trained.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rankup.errors import DataError
from train.config import Config
from train.data.sources.cache import writable_cache
from train.data.sources.fetch import Say
from train.data.sources.locks import locked
from train.data.sources.shards.index_file import (
    COLUMNS,
    FORMAT,
    UNKNOWN,
    Index,
    Shard,
    first_index,
    load_index,
    write_index,
)
from train.data.sources.shards.parquet import ENDING, scan_parquet
from train.data.sources.shards.place import Place, each
from train.data.sources.shards.remote import explained
from train.data.sources.shards.tar_scan import Scan, scan_tar
from train.process.atomic_file import staged, write_atomically

REPORT_EVERY_S = 5.0


class Columns(NamedTuple):
    """Where image and label of a sample are: in Parquet files; of a tar file the label's name in `.json`."""

    image: str
    label: str

    @classmethod
    def of(cls, config: Config) -> "Columns":
        return cls(config.input_column or "image", config.label_column or "label")


def open_index(place: Place, names: Sequence[str], *, columns: Columns, say: Say) -> Index:
    """The index of these shards: read, or made if there is none, by one process of each node.

    `say` gets a line when that takes time. Raises DataError for a shard that is missing or has changed since its index
    was made, and for whatever `scan_tar` refuses.
    """
    key = _short_digest([FORMAT, list(names), *columns])
    name = f"shards-{key}.index"
    in_cache = writable_cache() / f"shards-{_short_digest([place.root, key])}.index"
    paths = [Path(place.root, name), in_cache] if place.is_local else [in_cache]
    index = first_index(paths, names)
    if index is None:
        with locked(in_cache.with_suffix(".lock")):
            index = first_index(paths, names)  # another process may have made it meanwhile
            if index is None and not place.is_local:
                index = _fetch(place, name, in_cache, names)
            if index is None:
                found = _scan(place, names, columns=columns, say=say, parts=in_cache.with_suffix(".parts"))
                return write_index(*_merge(place, found), paths)
    now = _compare(place, index, columns=columns)
    return index if now == index.shards else write_index(now, index.table, index.digest, paths)


def _short_digest(facts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _fetch(place: Place, name: str, path: Path, names: Sequence[str]) -> Index | None:
    """The index that lies beside shards at a URL, as `path`; None if there is none. To make it, all would be read."""
    content = place.read(name)
    if content is None:
        return None
    write_atomically(path, content)
    index = load_index(path, names)
    # Its stamps are those of the folder where it was made
    return None if index is None else replace(index, shards=tuple(replace(s, stamp=UNKNOWN) for s in index.shards))


def _scan(place: Place, names: Sequence[str], *, columns: Columns, say: Say, parts: Path) -> list[tuple[Shard, Scan]]:
    """All shards, several at a time. What is scanned is kept in `parts`, for the next start if this one is killed."""
    began_s = reported_s = time.monotonic()
    done = 0
    parts.mkdir(parents=True, exist_ok=True)

    def scan(name: str) -> tuple[Shard, Scan]:
        nonlocal done, reported_s
        facts = place.look(name)
        if facts is None:
            raise DataError(f"{place.path(name)}: is missing. {_bring(place)}")
        kept = parts / hashlib.sha256(repr((name, facts)).encode()).hexdigest()[:24]
        try:
            found = Scan(**json.loads(kept.read_bytes()))
        except (OSError, ValueError, TypeError):
            found = scan_shard(place, name, size=facts[0], columns=columns)
            with staged(kept) as staging:
                staging.write_text(json.dumps(asdict(found)))
        done += 1
        if time.monotonic() - reported_s > REPORT_EVERY_S:
            reported_s = time.monotonic()
            say(f"indexing {place.root}: {done} of {len(names)} shards after {reported_s - began_s:.0f} s (once)")
        return Shard(name, *facts, found.digest), found

    found = each(scan, names)
    for path in parts.iterdir():
        path.unlink(missing_ok=True)
    parts.rmdir()
    return found


def scan_shard(place: Place, name: str, *, size: int, columns: Columns) -> Scan:
    """The samples of one shard. Raises DataError."""
    path = place.path(name)
    try:
        # Each store has errors of its own for a connection that breaks in the middle
        with nullcontext() if place.is_local else explained(path, "can't be read"), place.open(name) as file:
            if name.endswith(ENDING):
                return scan_parquet(file, path, image_column=columns.image, label_column=columns.label)
            return scan_tar(file, path, size=size, label_column=columns.label)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}).") from error


def _bring(place: Place) -> str:
    return f"Bring it back to {place.root}, or name only the shards that you want by a pattern."


def _merge(place: Place, found: Sequence[tuple[Shard, Scan]]) -> tuple[tuple[Shard, ...], NDArray[Any], str]:
    """One table of all shards' samples, by key. Raises DataError for a sample that lies in two shards."""
    keys = [key.encode(errors="surrogateescape") for _, scan in found for key in scan.keys]
    longest = max(map(len, keys))
    table = np.empty(len(keys), np.dtype([*COLUMNS, ("key", f"S{longest}")]))
    table["key"] = keys
    table["shard"] = np.repeat(np.arange(len(found)), [len(scan.keys) for _, scan in found])
    for column in ("label", "offset", "size"):
        table[column] = np.concatenate([getattr(scan, f"{column}s") for _, scan in found])
    table = table[np.lexsort((table["shard"], table["key"]))]
    # Some writers begin to count anew in each shard: only a sample that is the same in both is a mistake
    alike = (table["key"][1:] == table["key"][:-1]) & (table["size"][1:] == table["size"][:-1])
    for row in np.flatnonzero(alike)[:10].tolist():
        contents = []
        for sample in table[row : row + 2]:
            with place.open(found[sample["shard"]][0].name) as file:
                file.seek(int(sample["offset"]))
                contents.append(file.read(int(sample["size"])))
        if contents[0] == contents[1]:
            names = [place.path(found[sample["shard"]][0].name) for sample in table[row : row + 2]]
            raise DataError(
                f"{names[1]}: holds the sample {table['key'][row].decode(errors='replace')}, which {names[0]} holds "
                "too. Is one a copy, or of an earlier set? Remove it."
            )
    digest = hashlib.sha256()
    for name in ("key", "size", "label"):
        digest.update(np.ascontiguousarray(table[name]).data)
    return tuple(shard for shard, _ in found), table, digest.hexdigest()


def _compare(place: Place, index: Index, *, columns: Columns) -> tuple[Shard, ...]:
    """The shards of the index with their stamps of today.

    A shard of another time may still hold the same, such as a copy: its headers say so. Raises DataError if not.
    """

    def look(shard_name: str) -> Shard:
        known, path = by_name[shard_name], place.path(shard_name)
        facts = place.look(shard_name)
        if facts is None:
            raise DataError(f"{path}: is missing, and its index {index.path} has it. {_bring(place)}")
        size, stamp = facts
        anew = f"If that is meant, remove {index.path}."
        if size != known.size:
            change = "is cut off or another one" if size < known.size else "is another one"
            raise DataError(f"{path}: {change}: {size} bytes, its index says {known.size}. {anew}")
        if stamp != known.stamp and known.stamp != UNKNOWN:
            found = scan_shard(place, shard_name, size=size, columns=columns)
            if found.digest != known.digest:
                raise DataError(f"{path}: has changed since its index was made: other samples or labels. {anew}")
        return replace(known, stamp=stamp)

    by_name = {shard.name: shard for shard in index.shards}
    return tuple(each(look, list(by_name)))
