"""IDX files, the format of MNIST and its relatives: read, checked, written; plain or gzip, recognised by content.

An IDX file is a big-endian header (two zero bytes, a type byte, the number of dimensions, one 32-bit size per
dimension) followed by the values. http://yann.lecun.com/exdb/mnist describes it; only unsigned bytes are read here.
"""

import gzip
import math
import os
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, Literal

import torch

from rankup.errors import DataError

Kind = Literal["images", "labels"]

MAGIC: dict[Kind, int] = {"images": 0x00000803, "labels": 0x00000801}
GZIP_MAGIC = b"\x1f\x8b"
# deflate compresses at most by this factor, so a gzip file of n bytes never holds more than 1032 n.
DEFLATE_RATIO = 1032
CHUNK = 1 << 20
DAMAGED = "The file is damaged: remove it and run again, or put a good copy in its place."


def read_idx(path: str | os.PathLike[str], expect: Kind) -> torch.Tensor:
    """Read one IDX file: uint8 [N, H, W] for images, uint8 [N] for labels.

    Memory is taken only for bytes that the file really holds, whatever its header claims.
    Raises DataError, naming the file, if it cannot be read, is not of that kind, is empty, truncated or too long.
    """
    path = Path(path)
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == GZIP_MAGIC
            raw.seek(0)
            size = os.fstat(raw.fileno()).st_size
            if not packed:
                return _read(raw, path, expect, most=size)
            with gzip.open(raw) as unpacked:
                return _read(unpacked, path, expect, most=size * DEFLATE_RATIO)  # type: ignore[arg-type]
    except EOFError as error:
        raise DataError(f"{path}: truncated gzip data. {DAMAGED}") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: corrupt gzip data ({error}). {DAMAGED}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}).") from error


def _read(file: BinaryIO, path: Path, expect: Kind, *, most: int) -> torch.Tensor:
    head = file.read(4)
    if len(head) < 4:
        raise DataError(f"{path}: truncated, it holds {len(head)} bytes and no IDX header. {DAMAGED}")
    magic = struct.unpack(">I", head)[0]
    if magic != MAGIC[expect]:
        other: Kind = "labels" if expect == "images" else "images"
        if magic == MAGIC[other]:
            raise DataError(f"{path}: holds {other} where {expect} are expected. Are two files swapped or misnamed?")
        raise DataError(f"{path}: is no IDX file of {expect} (it starts with {head!r}). {DAMAGED}")
    rank = magic & 0xFF
    sizes = file.read(4 * rank)
    if len(sizes) < 4 * rank:
        raise DataError(f"{path}: truncated in its header. {DAMAGED}")
    shape = struct.unpack(f">{rank}I", sizes)
    written = "x".join(str(size) for size in shape)
    claimed = math.prod(shape)
    if claimed == 0:
        raise DataError(f"{path}: holds no {expect} (its header says {written}). {DAMAGED}")
    header = 4 + 4 * rank
    if claimed + header > most:
        raise DataError(
            f"{path}: truncated, its header claims {written} values and the file cannot hold more than "
            f"{max(0, most - header)}. {DAMAGED}"
        )
    # In chunks: read(n) takes memory for n bytes before the first one has arrived.
    values = bytearray()
    while len(values) <= claimed:
        chunk = file.read(min(CHUNK, claimed + 1 - len(values)))
        if not chunk:
            break
        values += chunk
    if len(values) < claimed:
        raise DataError(f"{path}: truncated, {len(values)} of {claimed} values ({written}) are there. {DAMAGED}")
    if len(values) > claimed:
        raise DataError(f"{path}: has bytes left over after its {claimed} values ({written}). {DAMAGED}")
    return torch.frombuffer(values, dtype=torch.uint8).reshape(shape)


def write_idx(path: str | os.PathLike[str], values: torch.Tensor) -> None:
    """Write uint8 [N, H, W] as images or uint8 [N] as labels; gzip if the name ends in .gz.

    The same values give the same bytes: the gzip header carries neither name nor time.
    """
    magic = MAGIC["images" if values.dim() == 3 else "labels"]
    content = struct.pack(f">I{values.dim()}I", magic, *values.shape) + values.contiguous().numpy().tobytes()
    path = Path(path)
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
