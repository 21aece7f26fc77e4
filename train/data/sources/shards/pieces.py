"""Large pieces of files at a URL, kept in a folder of bounded size that all processes of a node share.

fsspec's own caches are not used: none has a bound on its size, and two processes can't share one.
"""

import hashlib
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from train.data.sources.locks import locked
from train.data.sources.shards.parquet import is_whole, place_of
from train.data.sources.shards.remote import read_range
from train.process.atomic_file import staged

PIECE_BYTES = 8 << 20  # one request: long enough that its 20 to 100 ms of waiting don't count
NUM_LOCKS = 64
FULL, EMPTIED = 1.0, 0.9  # shares of the bound: where old pieces are removed, and down to where
USED_EVERY_S = 60.0  # how exactly a piece's file tells when it was used last


@dataclass
class Pieces:
    """`folder`: where they are kept; all that lie there take at most `max_bytes`, those used longest ago go first."""

    folder: Path
    max_bytes: int
    piece_bytes: int = PIECE_BYTES
    _said: set[str] = field(default_factory=set)

    def read(self, url: str, version: str, offset: int, size: int, *, file_size: int) -> bytearray:
        """`size` bytes from `offset` of the file at `url`, whose `version` changes when it is written again.

        Raises DataError if the file can't be read there or is shorter than `file_size`.
        """
        data = bytearray()
        key = hashlib.sha256(repr((url, version, file_size, self.piece_bytes)).encode()).hexdigest()[:24]
        for number in range(offset // self.piece_bytes, -(-(offset + size) // self.piece_bytes)):
            begin = number * self.piece_bytes
            end = min(begin + self.piece_bytes, file_size)
            first, last = max(offset, begin), min(offset + size, end)
            path = self.folder / f"{key}-{number:06}.piece"
            part = self._kept(path, first - begin, last - first, expected=end - begin)
            if part is None:
                fetch = partial(read_range, url, begin, end)
                fetched = self._fetch(path, fetch, is_whole=partial(_has_size, end - begin))
                part = fetched[first - begin : last - begin]
            data += part
        return data

    def read_unpacked(self, url: str, version: str, group: int, row: int, *, unpack: Callable[[], bytes]) -> bytearray:
        """One row of what `unpack` makes of a group of rows of a Parquet file, see there."""
        key = hashlib.sha256(repr((url, version)).encode()).hexdigest()[:24]
        path = self.folder / f"{key}-{group:06}.piece"
        head = self._kept(path, 8 * row, 16)
        if head is not None and len(head) == 16:
            begin, size = place_of(row, head)
            image = self._kept(path, begin, size)
            # None: removed at this moment, to make room
            if image is not None and len(image) == size:
                return bytearray(image)
        whole = self._fetch(path, unpack, is_whole=is_whole)
        begin, size = place_of(row, whole[8 * row : 8 * row + 16])
        return bytearray(whole[begin : begin + size])

    def _kept(self, path: Path, offset: int, size: int, *, expected: int | None = None) -> bytes | None:
        """A part of a piece, or None if it is not there, whole, of `expected` bytes."""
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError:
            return None
        try:
            found = os.fstat(file)
            if expected not in (None, found.st_size) or offset < 0 or not 0 <= size <= found.st_size - offset:
                return None
            if time.time() - found.st_mtime > USED_EVERY_S:
                with suppress(OSError):  # removed at this moment; what is open can still be read
                    os.utime(path)
            return os.pread(file, size, offset)
        finally:
            os.close(file)

    def _fetch(self, path: Path, fetch: Callable[[], bytes], *, is_whole: Callable[[bytes], bool]) -> bytes:
        """A whole piece, fetched by one process of this node and kept for all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder / f"fetch-{_stripe(path.name)}.lock"):
            with suppress(FileNotFoundError):
                if is_whole(kept := path.read_bytes()):  # another process was first
                    return kept
            data = fetch()
            if len(data) > self.max_bytes:
                return data
            try:
                self._make_room(len(data))
                with staged(path) as staging:
                    staging.write_bytes(data)
            except OSError as error:
                self._say_once(f"{self.folder}: can't be written ({error.strerror}), so pieces are fetched each time")
            return data

    def _make_room(self, num_bytes: int) -> None:
        """Count `num_bytes` more, and remove old pieces where that is too much.

        What a process was writing when it was killed stays counted until the folder is next looked through.
        """
        with locked(self.folder / "total.lock"):
            ledger = self.folder / "total"
            try:
                total = int(ledger.read_text()) + num_bytes
            except (OSError, ValueError):
                total = self.max_bytes + 1  # nobody knows: look
            if total > FULL * self.max_bytes:
                total = num_bytes + self._remove_old(int(EMPTIED * self.max_bytes) - num_bytes)
            ledger.write_text(str(total))

    def _remove_old(self, max_bytes: int) -> int:
        """Remove the pieces used longest ago until the others take at most `max_bytes`; returns what these take.

        Unfinished ones, which a killed process has left, are the oldest sooner or later.
        """
        found = sorted((entry.stat().st_mtime, entry.stat().st_size, entry.path) for entry in os.scandir(self.folder)
                       if ".piece" in entry.name)
        total = sum(size for _, size, _ in found)
        for _, size, path in found:
            if total <= max_bytes:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
            total -= size
        return total

    def _say_once(self, text: str) -> None:
        """On standard error, since a worker process has no log."""
        if text not in self._said:
            self._said.add(text)
            print(f"{text} (said once).", file=sys.stderr, flush=True)


def _has_size(size: int, data: bytes) -> bool:
    return len(data) == size


def _stripe(name: str) -> int:
    """The lock of a piece: one of NUM_LOCKS, the same in every process."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % NUM_LOCKS
