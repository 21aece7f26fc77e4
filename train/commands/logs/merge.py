"""All ranks' lines in the order of time, equal ones of several ranks as one. No torch here.

Times have whole seconds, so nothing says which rank came first within one. There the lower rank stands first, each
rank's lines keep their order, and a line that several ranks wrote waits until all of them have come to it.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from train.commands.logs.rank_log import Block

# Equal lines that are so many seconds apart are still one: the ranks' clocks differ, and one of them may write at the
# end of a second what another writes at the beginning of the next
SAME_S = 2
NEVER = b"~"  # later than any time


Who = tuple[tuple[int, bytes], ...]  # rank and host


class Line(NamedTuple):
    """What one or several ranks wrote at `stamp`; with line ends inside where lines without a time follow.

    A tuple, because there are millions: a frozen dataclass takes four times as long to make.
    """

    stamp: bytes
    who: Who
    text: bytes


class _Reader:
    """One rank's lines: the next one, and its time."""

    __slots__ = ("_blocks", "_index", "block", "stamp", "text", "who")

    def __init__(self, blocks: Iterator[Block]) -> None:
        self._blocks = blocks
        self.block = Block(b"", b"", 0, [])
        self.who: Who = ()
        self._index = -1
        self.step()

    def step(self) -> None:
        self._index += 1
        if self._index == len(self.block.lines):
            block = next(self._blocks, None)
            if block is None:
                self.stamp, self.text = NEVER, b""
                return
            self.block, self.stamp, self._index = block, block.stamp, 0
            self.who = ((block.rank, block.host),)
        self.text = self.block.lines[self._index]

    def shares_nothing_with(self, other: "_Reader") -> bool:
        """Whether no line of this block is in the other's block. The first test spares making the sets."""
        return self.text != other.text and self.block.texts.isdisjoint(other.block.texts)

    def take_block(self) -> list[bytes]:
        """All lines that are left in this block; the next one is the first of the next block."""
        lines = self.block.lines[self._index :]
        self._index = len(self.block.lines) - 1
        self.step()
        return lines

    def comes_to(self, text: bytes) -> bool:
        """Whether `text` is among the next lines of this second."""
        try:
            self.block.lines.index(text, self._index)
        except ValueError:
            return False
        return True


def merge(logs: Sequence[Iterator[Block]]) -> Iterator[Line]:
    """The lines of `logs`, each in the order of time, as one sequence in the order of time."""
    readers = [_Reader(blocks) for blocks in logs]
    while readers:
        now = min([reader.stamp for reader in readers])
        limit = _later(now)
        near = [reader for reader in readers if reader.stamp <= limit]
        for reader in near:
            while reader.stamp == now:
                if all(reader is other or reader.shares_nothing_with(other) for other in near):
                    # Most lines of most logs, so they take the short way
                    who = reader.who
                    for text in reader.take_block():
                        yield Line(now, who, text)
                    continue
                text = reader.text
                for other in near:
                    if other.stamp == now and other.text != text and text in other.block.texts:
                        yield from _ahead_of(text, reader, other, near, limit)
                yield _take(text, near, now, limit)
        if any([reader.stamp == NEVER for reader in near]):
            readers = [reader for reader in readers if reader.stamp != NEVER]


def _ahead_of(text: bytes, reader: _Reader, other: _Reader, near: list[_Reader], limit: bytes) -> Iterator[Line]:
    """What `other` writes in this second before it comes to `text`, the next line of `reader`."""
    if other.comes_to(text):
        # What the reader writes later itself must not be taken out of its order
        while other.text != text and other.text not in reader.block.texts:
            yield _take(other.text, near, reader.stamp, limit)


def _take(text: bytes, near: list[_Reader], now: bytes, limit: bytes) -> Line:
    """`text`, of all ranks whose next line it is."""
    same = [reader for reader in near if reader.text == text and reader.stamp <= limit]
    who = same[0].who if len(same) == 1 else tuple([reader.who[0] for reader in same])
    for reader in same:
        reader.step()
    return Line(now, who, text)


def _later(stamp: bytes) -> bytes:
    seconds = stamp[17:]
    if seconds.isdigit() and int(seconds) + SAME_S < 60:  # a twentieth of the time that datetime takes
        return b"%b%02d" % (stamp[:17], int(seconds) + SAME_S)
    try:
        time = datetime.fromisoformat(stamp.decode())
    except ValueError:  # no time, or no day of the calendar
        return stamp
    return (time + timedelta(seconds=SAME_S)).isoformat().encode()
