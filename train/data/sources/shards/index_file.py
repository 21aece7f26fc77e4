"""The index of one part's shards: where each sample lies, in one file that all processes of a node map.

The file: a line of JSON, and from the next page on the table, a row a sample in the order of their numbers. Samples are
numbered by their keys, so the shards' number and order change nothing in a training.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rankup.errors import DataError
from train.data.sources.shards.parquet import ENDING
from train.data.sources.shards.tar_scan import HIGHEST_LABEL
from train.process.atomic_file import staged

FORMAT = 1
UNKNOWN = ""  # the stamp of a shard that was not looked at where it lies now: its size alone is compared
PAGE = 4096
KEY = re.compile(r"\|S\d{1,6}")
LARGEST = 2**63 - 1
COLUMNS = [("label", "<i4"), ("shard", "<i4"), ("offset", "<i8"), ("size", "<i8")]


@dataclass(frozen=True)
class Shard:
    """`stamp`: what changes when the file is written again, or UNKNOWN. `digest`: of its headers and labels."""

    name: str
    size: int
    stamp: str
    digest: str


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


def first_index(paths: Sequence[Path], names: Sequence[str]) -> Index | None:
    """The first of these that is whole, or None."""
    return next((index for path in paths if (index := load_index(path, names)) is not None), None)


def load_index(path: Path, names: Sequence[str]) -> Index | None:
    """The index of the shards `names` in this file, or None if there is none that is whole.

    It may come with the data from elsewhere: nothing in it is used before it is compared with what it must be.
    """
    try:
        with path.open("rb") as file:
            head = json.loads(file.readline(1 << 24))
        # Bytes alone: of a key with another type numpy would take what stands in the file for addresses
        if not KEY.fullmatch(head["key"]) or not isinstance(head["digest"], str):
            return None
        shards = tuple(Shard(**shard) for shard in head["shards"])
        facts = [(shard.name, type(shard.size), type(shard.stamp), type(shard.digest)) for shard in shards]
        if head["format"] != FORMAT or facts != [(name, int, str, str) for name in names]:
            return None
        dtype = np.dtype([*COLUMNS, ("key", head["key"])])
        mapped = np.memmap(path, dtype, mode="r", offset=head["table_at"], shape=(head["samples"],))
        table = mapped.view(np.ndarray)  # a row of a memmap takes ten times as long to be had
        if hashlib.sha256(table.data).hexdigest() != head["table"] or not _lies_in(table, shards):
            return None
        return Index(path, shards, table, head["digest"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _lies_in(table: NDArray[Any], shards: Sequence[Shard]) -> bool:
    """Whether each sample has a label, and lies in one of the shards. Of rows of Parquet the shard alone is known."""
    if not len(table) or table["shard"].min() < 0 or table["shard"].max() >= len(shards):
        return False
    sizes = np.array([LARGEST if shard.name.endswith(ENDING) else shard.size for shard in shards])[table["shard"]]
    fits = (table["offset"] >= 0) & (table["size"] >= 0) & (table["size"] <= sizes - table["offset"])
    return bool(fits.all()) and int(table["label"].min()) >= 0 and int(table["label"].max()) <= HIGHEST_LABEL


def write_index(shards: tuple[Shard, ...], table: NDArray[Any], digest: str, paths: Sequence[Path]) -> Index:
    """Write the index to the first of `paths` that can be written, whole or not at all, and map it."""
    facts = {
        "format": FORMAT, "samples": len(table), "key": table.dtype["key"].str, "digest": digest,
        "table": hashlib.sha256(np.ascontiguousarray(table).data).hexdigest(),
        "shards": [asdict(shard) for shard in shards],
    }
    # Two passes: where the table begins is part of the line before it
    room = len(json.dumps(facts)) + 100
    table_at = -(-room // PAGE) * PAGE
    head = (json.dumps({"table_at": table_at, **facts}) + "\n").encode().ljust(table_at)
    for path in paths:
        try:
            with staged(path) as staging, staging.open("wb") as file:
                file.write(head)
                file.write(np.ascontiguousarray(table).data)
        except OSError as error:
            problem = f"{path}: can't be written ({error.strerror})."
            continue
        index = load_index(path, [shard.name for shard in shards])
        assert index is not None, f"{path}: what was written can't be read"
        return index
    raise DataError(f"{problem} Set RANKUP_CACHE to a folder with room.")
