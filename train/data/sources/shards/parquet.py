"""Images in Parquet files, with a column of images and one of labels, as Hugging Face writes them.

A row can't be reached by itself: its page is compressed, and a page holds many. So a group of rows is unpacked as a
whole when the first of them is asked for, and kept with the pieces of the node.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np

from rankup.errors import DataError
from train.data.sources.shards.tar_scan import PACK_AGAIN, Scan, check_label

ENDING = ".parquet"
GROUP = 1 << 32  # the offset of a sample in the index: GROUP * number of its group + its row in there


def scan_parquet(file: BinaryIO, name: str, *, image_column: str, label_column: str) -> Scan:
    """The samples of one file: the labels are read, and no image is. `name` stands in messages.

    Raises DataError for a file that is cut or no Parquet, and for a column or label that is missing.
    """
    parquet = _open(file, name)
    columns = parquet.schema_arrow.names
    for column, setting in ((image_column, "--input-column"), (label_column, "--label-column")):
        if column not in columns:
            raise DataError(f"{name}: must have a column {column}, has {', '.join(columns)}. Set {setting}.")
    scan, digest = Scan(), hashlib.sha256(image_column.encode())  # what is kept of one column is not another's
    stem = name.rpartition("/")[2].removesuffix(ENDING)
    for group in range(parquet.num_row_groups):
        labels = _column(parquet, group, label_column, name)
        for row, label in enumerate(labels):
            key = f"{stem}-{len(scan.keys):08}"
            scan.labels.append(check_label(label, f"{name}: the {label_column} of row {len(scan.keys)}"))
            scan.keys.append(key)
            scan.offsets.append(GROUP * group + row)
            scan.sizes.append(0)  # nobody knows before the group is unpacked
        facts = parquet.metadata.row_group(group)
        digest.update(repr((facts.num_rows, facts.total_byte_size, labels)).encode())
    if not scan.keys:
        raise DataError(f"{name}: holds no rows. Remove it, or name only other shards.")
    scan.digest = digest.hexdigest()
    return scan


def unpack(file: BinaryIO, name: str, *, group: int, image_column: str) -> bytes:
    """The images of one group of rows: where each begins and where the last ends, int64, and then their bytes.

    Raises DataError, naming the row, for one that holds no image.
    """
    images = [_bytes(image, f"{name}: group {group}, row {row}")
              for row, image in enumerate(_column(_open(file, name), group, image_column, name))]
    begins = 8 * (len(images) + 1) + np.cumsum([0, *map(len, images)], dtype="<i8")
    return begins.tobytes() + b"".join(images)


def place_of(row: int, head: bytes) -> tuple[int, int]:
    """Where the image of a row begins in what `unpack` gives, and its size; `head`: 16 bytes from 8 * `row` on."""
    begin, end = struct.unpack("<qq", head)
    return begin, end - begin


def is_whole(unpacked: bytes) -> bool:
    """Whether these are all bytes that `unpack` gave, by where it says that the last image ends."""
    table_end = int.from_bytes(unpacked[:8], "little")  # the first image follows the table
    return int.from_bytes(unpacked[max(0, table_end - 8) : table_end], "little") == len(unpacked) > 0


def _bytes(image: Any, where: str) -> bytes:
    content = image.get("bytes") if isinstance(image, dict) else image
    if not isinstance(content, bytes):
        raise DataError(f"{where}: must hold the bytes of an image, got {type(content).__name__}. No path counts.")
    return content


def _open(file: BinaryIO, name: str) -> Any:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise DataError(
            f"{name}: needs the package pyarrow. pip install 'rankup[parquet]', or '.[parquet]' in a checkout."
        ) from error
    try:
        return ParquetFile(file)
    except (ArrowException, OSError) as error:
        line = " ".join(str(error).split())[:200]
        raise DataError(f"{name}: is no whole Parquet file ({line}). {PACK_AGAIN}") from error


def _column(parquet: Any, group: int, column: str, name: str) -> Sequence[Any]:
    from pyarrow import ArrowException

    try:
        # Its threads would not be there in a worker that was forked
        values: list[Any] = parquet.read_row_group(group, columns=[column], use_threads=False)[column].to_pylist()
    except (ArrowException, OSError) as error:
        line = " ".join(str(error).split())[:200]
        raise DataError(f"{name}: is damaged in the rows of group {group} ({line}). {PACK_AGAIN}") from error
    return values
