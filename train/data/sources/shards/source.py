"""The data set `shards`: images in tar files, in a folder or at a URL, each reached by itself."""

import hashlib
from collections.abc import Sequence

from rankup.errors import DataError
from train.config import Config
from train.data.sources.cache import writable_cache
from train.data.sources.fetch import Say
from train.data.sources.imagefolder import MEAN, STD
from train.data.sources.sets import FileSet
from train.data.sources.shards.index import Columns, open_index
from train.data.sources.shards.index_file import Index
from train.data.sources.shards.parquet import ENDING
from train.data.sources.shards.pieces import Pieces
from train.data.sources.shards.place import Place, find_shards
from train.data.sources.shards.reader import Names, ShardReader


def load(config: Config, say: Say) -> tuple[FileSet, FileSet]:
    """The shards of data_dir to train on, and those to test on: as train_shards and eval_shards name them, else found
    by their names.

    Samples are numbered by their keys. So shards of a folder whose keys have the order of its files give the same
    training, to the bit, as the folder itself. Raises DataError, naming the shard, for whatever is wrong with one.
    """
    assert config.data_dir is not None, "Config refuses shards without data_dir"
    place = Place.at(config.data_dir)
    found = [(part, *find_shards(place, part, pattern))
             for part, pattern in (("train", config.train_shards), ("val", config.eval_shards))]
    columns = Columns.of(config)
    train, test = (open_index(place, names, columns=columns, say=say) for _, names, _ in found)
    classes = found[0][2] or tuple(str(number) for number in range(int(train.labels.max()) + 1))
    for index in (train, test):
        _check_labels(index, classes, place)
    pieces, note = _pieces(place, (train, test), config)
    # Resumed with other samples, labels or classes, a run is refused. Rows of Parquet have no sizes, their files have
    facts = [(index.digest, [s.digest for s in index.shards if s.name.endswith(ENDING)]) for index in (train, test)]
    name = f"shards-{hashlib.sha256(repr((classes, facts)).encode()).hexdigest()[:12]}"
    readers = (ShardReader(place, index, pieces=pieces, image_column=columns.image) for index in (train, test))
    trained, tested = (_file_set(reader, classes, name, note, config) for reader in readers)
    return trained, tested


def _pieces(place: Place, parts: Sequence[Index], config: Config) -> tuple[Pieces | None, str]:
    """Where to keep what is read at a URL, and a note for the log.

    None for a folder, and where a piece would be removed before another of its images is asked for.
    """
    packed = any(shard.name.endswith(ENDING) for index in parts for shard in index.shards)
    if place.is_local and not packed:
        return None, ""
    needed, room = sum(shard.size for index in parts for shard in index.shards), int(config.cache_max_gb * 1e9)
    if needed <= room or config.shuffle_window or packed:
        return Pieces(writable_cache() / "shards", room), f", kept in {writable_cache() / 'shards'}"
    return None, (
        f", {needed / 1e9:.3g} GB: more than cache_max_gb, so each image is a request of its own; quicker with "
        "--shuffle-window 8192"
    )


def _file_set(reader: ShardReader, classes: tuple[str, ...], name: str, note: str, config: Config) -> FileSet:
    place, index = reader.place, reader.index
    return FileSet(
        Names(reader, len(index.table)), index.labels, classes, MEAN, STD, name,
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
