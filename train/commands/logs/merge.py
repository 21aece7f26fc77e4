"""All ranks' lines in the order of time, equal ones of several ranks as one. No torch here.

Times have whole seconds, so nothing says which rank came first within one. There the lower rank stands first, each
rank's lines keep their order, and a line that several ranks wrote waits until all of them have come to it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache

from train.commands.logs.rank_log import Block

# Equal lines that are so many seconds apart are still one: the ranks' clocks differ, and one of them may write at the
# end of a second what another writes at the beginning of the next
SAME_S = 2
NEVER = b"~"  # later than any time


@dataclass(frozen=True, slots=True)
class Line:
    """What one or several ranks wrote at `stamp`; with line ends inside where lines without a time follow."""

    stamp: bytes
    who: tuple[tuple[int, bytes], ...]  # rank and host
    text: bytes


class _Reader:
    """One rank's lines: the next one, and its time."""

    __slots__ = ("_blocks", "_index", "block", "stamp", "text")

    def __init__(self, blocks: Iterator[Block]) -> None:
        self._blocks = blocks
        self.block = Block(b"", b"", 0, [])
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
        self.text = self.block.lines[self._index]

    def comes_to(self, text: bytes) -> bool:
        """Whether `text` is among the next lines of this second."""
        if text not in self.block.texts:
            return False
        try:
            self.block.lines.index(text, self._index)
        except ValueError:
            return False
        return True


def merge(logs: Sequence[Iterator[Block]]) -> Iterator[Line]:
    """The lines of `logs`, each in the order of time, as one sequence in the order of time."""
    readers = [_Reader(blocks) for blocks in logs]
    while readers:
        now = min(reader.stamp for reader in readers)
        limit = _later(now)
        near = [reader for reader in readers if reader.stamp <= limit]
        for reader in near:
            while reader.stamp == now:
                yield from _next_of(reader, near, now, limit)
        readers = [reader for reader in readers if reader.stamp != NEVER]


def _next_of(reader: _Reader, near: list[_Reader], now: bytes, limit: bytes) -> Iterator[Line]:
    """The next line of `reader`, once all others that write it in this second have come to it."""
    text = reader.text
    for other in near:
        if other.stamp == now and other.text != text and other is not reader and other.comes_to(text):
            # What the reader writes later itself must not be taken out of its order
            while other.text != text and other.text not in reader.block.texts:
                yield _take(other.text, near, now, limit)
    yield _take(text, near, now, limit)


def _take(text: bytes, near: list[_Reader], now: bytes, limit: bytes) -> Line:
    """`text`, of all ranks whose next line it is."""
    same = [reader for reader in near if reader.text == text and reader.stamp <= limit]
    who = tuple((reader.block.rank, reader.block.host) for reader in same)
    for reader in same:
        reader.step()
    return Line(now, who, text)


@lru_cache(maxsize=64)
def _later(stamp: bytes) -> bytes:
    try:
        time = datetime.fromisoformat(stamp.decode())
    except ValueError:  # no time, or no day of the calendar
        return stamp
    return (time + timedelta(seconds=SAME_S)).isoformat().encode()
