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
from typing import Literal

import torch

from rankup.errors import DataError

Kind = Literal["images", "labels"]

MAGIC: dict[Kind, bytes] = {"images": b"\0\0\x08\x03", "labels": b"\0\0\x08\x01"}
DAMAGED = "The file is damaged: remove it and run again, or put a good copy in its place."


def read_idx(path: Path, expect: Kind) -> torch.Tensor:
    """Read one IDX file: uint8 [N, H, W] for images, uint8 [N] for labels.

    Raises DataError, naming the file, if it cannot be read, is not of that kind, is empty, truncated or too long.
    """
    num_sizes = 3 if expect == "images" else 1
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            file = gzip.open(raw) if packed else raw  # noqa: SIM115 (`raw` is closed)
            head = file.read(4 + 4 * num_sizes)
            if len(head) >= 4 and head[:4] != MAGIC[expect]:
                if head[:4] in MAGIC.values():
                    other = "labels" if expect == "images" else "images"
                    what = f"holds {other} where {expect} are expected"
                    raise DataError(f"{path}: {what}. Are two files swapped or misnamed?")
                raise DataError(f"{path}: is no IDX file of {expect} (it starts with {head[:4]!r}). {DAMAGED}")
            if len(head) < 4 + 4 * num_sizes:
                raise DataError(f"{path}: truncated in its header, it holds {len(head)} bytes. {DAMAGED}")
            shape = struct.unpack(f">{num_sizes}I", head[4:])
            claimed = math.prod(shape)
            # Neither all that there may be nor all that is claimed: gzip packs by a factor of 1032 at most
            most = path.stat().st_size * (1032 if packed else 1)
            content = bytearray(file.read(min(claimed + 1, most)))
    except EOFError as error:
        raise DataError(f"{path}: truncated gzip data. {DAMAGED}") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: corrupt gzip data ({error}). {DAMAGED}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}).") from error
    written, there = "x".join(map(str, shape)), len(content)
    if claimed == 0:
        raise DataError(f"{path}: holds no {expect} (its header says {written}). {DAMAGED}")
    if there < claimed:
        raise DataError(f"{path}: truncated, {there} of {claimed} values ({written}) are there. {DAMAGED}")
    if there > claimed:
        raise DataError(f"{path}: has bytes left over after its {claimed} values ({written}). {DAMAGED}")
    return torch.frombuffer(content, dtype=torch.uint8).reshape(shape)


def write_idx(path: str | os.PathLike[str], values: torch.Tensor) -> None:
    """Write uint8 [N, H, W] as images or uint8 [N] as labels; gzip if the name ends in .gz.

    The same values give the same bytes: the gzip header carries neither name nor time.
    """
    magic = MAGIC["images" if values.dim() == 3 else "labels"]
    content = magic + struct.pack(f">{values.dim()}I", *values.shape) + values.contiguous().numpy().tobytes()
    path = Path(path)
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
