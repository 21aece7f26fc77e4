"""The bytes of single samples, out of the shards."""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import overload

import torch

from rankup.errors import DataError
from train.data.sources.image_cache import version_of_facts
from train.data.sources.shards import parquet
from train.data.sources.shards.index_file import Index
from train.data.sources.shards.pieces import Pieces
from train.data.sources.shards.place import Place
from train.data.sources.shards.remote import read_range

OPEN_FILES = 256  # that a process keeps open at most; most systems allow 1,024


class ShardReader:
    """Reads the samples of one part by their numbers; safe to be forked and pickled."""

    def __init__(
        self, place: Place, index: Index, *, pieces: Pieces | None = None, image_column: str = "image"
    ) -> None:
        """`pieces`: where to keep what is read at a URL, without it each sample is one request; and what is unpacked
        of Parquet files, which need it."""
        self.place, self.index, self.pieces, self.image_column = place, index, pieces, image_column
        self._files: dict[int, int] = {}

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_files": {}}  # workers that are not forked open the files themselves

    @property
    def storage(self) -> torch.Tensor:
        """The numbers of the samples as they lie in the shards one after the other, int64 [N]."""
        return self.index.storage

    def name(self, number: int) -> str:
        """Of a sample, for messages and predictions: its shard and its key."""
        row = self.index.table[number]
        return f"{self.place.path(self.index.shards[row['shard']].name)}:{row['key'].decode(errors='replace')}"

    def version(self, number: int) -> int:
        """A number that differs once the sample's shard has been replaced."""
        shard = self.index.shards[self.index.table["shard"][number]]
        return version_of_facts(shard.size, shard.digest)

    def read(self, number: int) -> bytearray:
        """The image file of a sample. Raises DataError, naming the shard, if it is gone or has become shorter."""
        row = self.index.table[number]
        number_of_shard, offset, size = int(row["shard"]), int(row["offset"]), int(row["size"])
        shard = self.index.shards[number_of_shard]
        path = self.place.path(shard.name)
        if self.pieces is not None and shard.name.endswith(parquet.ENDING):
            group, row_in_group = divmod(offset, parquet.GROUP)
            return self.pieces.read_unpacked(
                path, shard.stamp + shard.digest, group, row_in_group, unpack=partial(self._unpack, shard.name, group)
            )
        if self.pieces is not None:
            return self.pieces.read(path, shard.stamp, offset, size, file_size=shard.size)
        if not self.place.is_local:
            return bytearray(read_range(path, offset, offset + size))
        data = bytearray(size)
        try:
            # No position in the file is moved: workers that were forked share it
            got = os.preadv(self._file(number_of_shard), [data], offset)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}). Was it removed meanwhile?") from error
        if got < size:
            raise DataError(f"{path}: ends at byte {offset + got}, and its index says more. Was it cut meanwhile?")
        return data

    def _unpack(self, name: str, group: int) -> bytes:
        with self.place.open(name) as file:
            return parquet.unpack(file, self.place.path(name), group=group, image_column=self.image_column)

    def _file(self, shard: int) -> int:
        if shard not in self._files:
            if len(self._files) >= OPEN_FILES:
                os.close(self._files.pop(next(iter(self._files))))
            self._files[shard] = os.open(self.place.path(self.index.shards[shard].name), os.O_RDONLY)
        return self._files[shard]


class Names(Sequence[str]):
    """The names of the first `count` samples, made when they are asked for: a million of them would take 100 MB."""

    def __init__(self, reader: ShardReader, count: int) -> None:
        self.reader, self.length = reader, count

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...

    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self.reader.name(number) for number in range(*index.indices(self.length))]
        return self.reader.name(range(self.length)[index])

    def __iter__(self) -> Iterator[str]:
        return map(self.reader.name, range(self.length))
