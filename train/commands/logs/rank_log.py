"""The log of one rank, read in blocks: all lines of one second at a time. No torch here.

A log may have gigabytes, and Python needs a microsecond for the simplest work on a line. So one regular expression
finds a whole block, and one split takes the same time, host and rank from all of its lines.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

HEAD = rb"(?P<stamp>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d) (?P<host>\S+) r\d+ "
UNSTAMPED = rb"(?!\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d \S+ r\d+ )[^\n]*\n"
# The lines that begin with the same time, host and rank, and behind each those without: the rest of a traceback, or
# what a library prints past the log. `*+` keeps no way back: that of a million lines would fill the memory.
STAMPED_BLOCK = re.compile(rb"(?P<head>%b)[^\n]*\n(?:(?P=head)[^\n]*\n|%b)*+" % (HEAD, UNSTAMPED))
UNSTAMPED_BLOCK = re.compile(rb"(?:%b)++" % UNSTAMPED)
STAMP = re.compile(rb"\n%b" % HEAD)
CHUNK = 1 << 18  # bytes that are read at once: of each rank, and there may be a thousand
# A block, or a line, that is still not at its end after so many bytes is cut: a log without times, or without line
# ends, would otherwise have to fit into memory
MAX_BLOCK = 4 * CHUNK


@dataclass
class Block:
    """Lines that one rank wrote within one second, each with the lines without a time that follow it."""

    stamp: bytes  # b"2026-11-22T10:02:03"; b"" before the first time in a file
    host: bytes
    rank: int
    lines: list[bytes] = field(repr=False)

    @cached_property
    def texts(self) -> frozenset[bytes]:
        return frozenset(self.lines)


class RankLog:
    """A file `rank-N.log`: what it has from some time on, and later what was added to it."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank = path, rank
        self._file: BinaryIO | None = None
        self._rest = b""  # the beginning of a line whose end is not written yet
        self._stamp = self._host = b""  # of the last block
        self._since = b""

    def seek(self, since: bytes) -> None:
        """Leave out what is older than the time `since`, by bisection: each file is in the order of time."""
        self._since = since
        file = self._open()
        low, high = 0, _size(file)
        while file is not None and high - low > CHUNK:
            middle = (low + high) // 2
            stamp = _first_stamp(file, middle, high)
            low, high = (middle, high) if stamp and stamp < since else (low, middle)
        if file is not None:
            file.seek(low)  # `blocks` passes over what is still too old, and over the half of a line

    def last_stamp(self) -> bytes:
        """The newest time in the file, or b""."""
        file = self._open()
        if file is None:
            return b""
        position = file.tell()
        file.seek(max(0, _size(file) - CHUNK))
        found = re.findall(STAMP, b"\n" + file.read(CHUNK))
        file.seek(position)
        return found[-1][0] if found else b""

    def blocks(self, *, whole: bool) -> Iterator[Block]:
        """What was not read yet, up to the end of the file. `whole`: the last line too, if it has no end yet."""
        file = self._open()
        buffer, self._rest = self._rest, b""
        more = file is not None
        while more and file is not None:
            piece = file.read(CHUNK)
            more = bool(piece)
            buffer += piece
            if not more and whole and buffer:
                buffer += b"" if buffer.endswith(b"\n") else b"\n"
            position = 0
            complete = buffer.rfind(b"\n") + 1
            for block, end in self._split(buffer):
                # What stands at the end of the buffer may go on in the next piece
                if more and end == complete and end - position < MAX_BLOCK:
                    break
                position = end
                if block.stamp >= self._since:
                    yield block
            if len(buffer) - complete >= MAX_BLOCK:
                buffer += b"\n"
            buffer = buffer[position:]
        self._rest = buffer

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _split(self, buffer: bytes) -> Iterator[tuple[Block, int]]:
        """The blocks in `buffer`, and where each ends; what stands behind the last line end is left."""
        end = 0
        while True:
            start = end
            if found := STAMPED_BLOCK.match(buffer, start):
                head, self._stamp, self._host = found["head"], found["stamp"], found["host"]
                end = found.end()
                lines = buffer[start + len(head) : end - 1].split(b"\n" + head)
            elif found := UNSTAMPED_BLOCK.match(buffer, start):
                end = found.end()
                lines = [buffer[start : end - 1]]
            else:
                return
            yield Block(self._stamp, self._host, self.rank, lines), end

    def _open(self) -> BinaryIO | None:
        """The open file; one that was replaced or cut is opened anew. None as long as there is none."""
        try:
            now = self.path.stat()
            if self._file is not None:
                old = os.fstat(self._file.fileno())
                if (old.st_dev, old.st_ino) == (now.st_dev, now.st_ino) and now.st_size >= self._file.tell():
                    return self._file
                self._file.close()
                self._rest = self._stamp = self._host = b""
            self._file = self.path.open("rb")
        except FileNotFoundError:
            pass  # `--fresh` has just renamed the folder: the next look may find a new one
        return self._file


def _size(file: BinaryIO | None) -> int:
    return 0 if file is None else os.fstat(file.fileno()).st_size


def _first_stamp(file: BinaryIO, start: int, end: int) -> bytes:
    """The first time at the beginning of a line behind `start`, or b"" if there is none before `end`."""
    overlap = 400  # a head that lies across two pieces is found in the second one
    while start < end:
        file.seek(start)
        piece = file.read(CHUNK // 4)
        if found := STAMP.search(piece):
            return found["stamp"]
        start += max(1, len(piece) - overlap)
    return b""
