"""What the offline files of W&B hold. Its Python package can write them only; the form is that of LevelDB's log."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK = 32 * 1024  # bytes; no piece of a record reaches over the end of one
HEAD = struct.Struct("<IHB")  # of a piece: checksum, length, kind
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class Rows:
    """All that the files of one run hold, in the order of the attempts."""

    ids: set[str] = field(default_factory=set)
    history: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    codes: list[int] = field(default_factory=list)  # with which the attempts ended


def rows_of(run: Path) -> Rows:
    from wandb.proto.wandb_internal_pb2 import Record

    rows = Rows()
    for path in sorted((run / "tracker" / "wandb").glob("offline-run-*/run-*.wandb")):
        for record in map(Record.FromString, records_in(path.read_bytes())):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                rows.ids.add(record.run.run_id)
            elif kind == "exit":
                rows.codes.append(record.exit.exit_code)
            elif kind == "history":
                rows.history.append(values_of(record.history.item))
            rows.config |= values_of([*record.run.config.update, *record.config.update])
    return rows


def values_of(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def records_in(file: bytes) -> Iterator[bytes]:
    """The records; one that was cut by a kill ends the file, which begins with a head of its own."""
    pieces = b""
    for place in range(0, len(file), BLOCK):
        block = file[max(HEAD.size, place) : place + BLOCK]
        while len(block) > HEAD.size:
            _, length, kind = HEAD.unpack_from(block)
            data, block = block[HEAD.size : HEAD.size + length], block[HEAD.size + length :]
            if len(data) < length:
                return
            pieces = data if kind in (WHOLE, FIRST) else pieces + data
            if kind in (WHOLE, LAST):
                yield pieces
