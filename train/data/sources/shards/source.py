"""The data set `shards`: images in tar files, in a folder or at a URL, each reached by itself."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import overload

import torch

from rankup.errors import DataError

from ....config import Config
from ..fetch import Say
from ..imagefolder import MEAN, STD
from ..sets import FileSet, version_of_facts
from .index import Index, open_index, read_sample
from .place import Place, find_shards


def load(config: Config, say: Say) -> tuple[FileSet, FileSet]:
    """The shards of data_dir to train on, and those to test on: as train_shards and eval_shards name them, else found
    by their names. Those at a URL are copied to this node first, with shuffle_window when they are needed.

    Samples are numbered by their keys. So shards of a folder whose keys have the order of its files give the same
    training, to the bit, as the folder itself. Raises DataError, naming the shard, for whatever is wrong with one.
    """
    assert config.data_dir is not None, "Config refuses shards without data_dir"
    place = Place.at(config)
    (train_names, classes), (test_names, _) = (
        find_shards(place, part, pattern)
        for part, pattern in (("train", config.train_shards), ("val", config.eval_shards))
    )
    parts = [open_index(place, names, label_column=config.label_column or "label", say=say)
             for names in (train_names, test_names)]
    classes = classes or tuple(str(number) for number in range(int(parts[0].labels.max()) + 1))
    for index in parts:
        _check_labels(index, classes, place)
    _bring(place, parts, config, say)
    # Resumed with other samples, labels or classes, a run is refused
    facts = repr((classes, [(index.digest, list[str]()) for index in parts]))
    name = f"shards-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"
    train, test = (_file_set(ShardReader(place, index), classes, name, config) for index in parts)
    return train, test


def _bring(place: Place, parts: Sequence[Index], config: Config, say: Say) -> None:
    """Copy the shards of a URL to this node now, or see that they can be when they are needed."""
    shards = [shard for index in parts for shard in index.shards]
    if config.shuffle_window:
        largest = max(shards, key=lambda shard: shard.size)
        if not place.fits([largest]):
            way_out = "Set a larger --cache-max-gb."
            raise DataError(f"{place.path(largest.name)}: takes {largest.size / 1e9:.3g} GB. {way_out}")
    elif place.fits(shards):
        place.copy(shards, say=say)
    else:
        raise DataError(
            f"{place.root}: the shards take {sum(shard.size for shard in shards) / 1e9:.3g} GB, and cache_max_gb lets "
            f"this node keep {config.cache_max_gb:g}. Set a larger --cache-max-gb, or --shuffle-window 8192 to copy "
            "each shard when it is needed."
        )


def _file_set(reader: "ShardReader", classes: tuple[str, ...], name: str, config: Config) -> FileSet:
    place, index = reader.place, reader.index
    note = f", kept in {place.copies}" if place.copies else ""
    return FileSet(
        Names(reader), index.labels, classes, MEAN, STD, name,
        origin=f"{len(index.shards)} shard{'s'[: len(index.shards) > 1]} in {place.root}{note}",
        margin=config.augment in ("imagenet", "trivial"), contents=reader,
    )


def _check_labels(index: Index, classes: tuple[str, ...], place: Place) -> None:
    over = (index.labels >= len(classes)).nonzero().flatten()
    if len(over):
        row = index.table[int(over[0])]
        raise DataError(
            f"{place.path(index.shards[row['shard']].name)}: the sample {row['key'].decode(errors='replace')} has the "
            f"label {row['label']}, and the training shards have the classes 0 to {len(classes) - 1}."
        )


class ShardReader:
    """Reads the samples of one part by their numbers; safe to be forked and pickled."""

    def __init__(self, place: Place, index: Index) -> None:
        self.place, self.index = place, index

    @property
    def storage(self) -> torch.Tensor:
        """The numbers of the samples as they lie in the shards one after the other, int64 [N]."""
        return self.index.storage

    def name(self, number: int) -> str:
        """Of a sample, for messages and predictions: its shard and its key."""
        return self.place.path(self.index.name(number))

    def version(self, number: int) -> int:
        """A number that differs once the sample's shard has been replaced."""
        shard = self.index.shards[self.index.table["shard"][number]]
        return version_of_facts(shard.size, shard.digest)

    def read(self, number: int) -> bytearray:
        """The image file of a sample. Raises DataError, naming the shard, if it is gone or has become shorter."""
        row = self.index.table[number]
        return read_sample(self.place, self.index.shards[row["shard"]], int(row["offset"]), int(row["size"]))


class Names(Sequence[str]):
    """The names of the samples, made when they are asked for: a million of them would take 100 MB."""

    def __init__(self, reader: ShardReader) -> None:
        self.reader, self.numbers = reader, range(len(reader.index.table))

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...

    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        found = self.numbers[index]
        return self.reader.name(found) if isinstance(found, int) else [self.reader.name(number) for number in found]

    def __iter__(self) -> Iterator[str]:
        return map(self.reader.name, self.numbers)
