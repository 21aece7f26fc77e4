"""Which rank keeps the others waiting: decided from what every rank measured, in words that rank 0 prints. No torch.

A machine that does other work too slows now this rank and now that one. So a rank is called slow only after ROW windows
in a row in which both measures say so: its own part of a step takes LEAST longer, and it waits that much less. With ups
and downs of 8 % chance alone called no healthy rank slow in 20,000 windows of 2, 3, 4 and 16 ranks.
"""

import bisect
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rankup.env.rank_env import ranges

DATA, COMPUTE, WAITING = range(3)
PARTS = ("data", "compute", "waiting")
LEAST = 0.08  # of the median's own time
ROW = 10  # windows in a row until a rank is called slow, and until it is said to keep up again
ONCE = 1.0  # in one window: a hiccup that is worth a line
QUIET_WINDOWS = 60  # after the line on a rank's hiccup, before another one

Parts = Sequence[float]  # seconds of DATA, COMPUTE and WAITING


@dataclass(frozen=True, slots=True)
class Window:
    """The steps from `first` to `last`, and the mean seconds of a step by rank.

    `load`: how much more than its exact part of the batch each rank takes; of 4 samples for three ranks the first takes
    2, and is not slow for that. Empty: all take theirs.
    """

    first: int
    last: int
    seconds: Sequence[Parts]
    load: Sequence[float] = ()

    def gaps(self) -> list[float]:
        """By how much of the median's own time each rank holds up the others by both measures, 0.18 for 18 %."""
        loads = self.load or [1.0] * len(self.seconds)
        own = [(rank[DATA] + rank[COMPUTE]) / load for rank, load in zip(self.seconds, loads, strict=True)]
        waits = [rank[WAITING] for rank in self.seconds]
        pairs = zip(own, _others(own), waits, _others(waits), strict=True)
        return [min(mine - theirs, their_wait - wait) / max(theirs, 1e-9) for mine, theirs, wait, their_wait in pairs]

    def median(self, part: int) -> float:
        """Seconds of this part: the median of the ranks."""
        return statistics.median_low(rank[part] for rank in self.seconds)


@dataclass(slots=True)
class _Rank:
    """What is known of one rank."""

    slow: deque[tuple[Window, float]] = field(default_factory=lambda: deque(maxlen=ROW))  # the newest, in a row
    fine: int = 0  # windows in a row
    called: bool = False  # slow, in a line
    quiet: int = 0  # windows to go before a hiccup is worth a line again

    @property
    def windows(self) -> list[Window]:
        return [window for window, _ in self.slow]


class Stragglers:
    """Looks at one window after the other."""

    def __init__(self, hosts: Iterable[str]) -> None:
        """`hosts`: by rank."""
        self._hosts = list(hosts)
        self._ranks = [_Rank() for _ in self._hosts]
        self._others = "the median" if len(self._hosts) > 2 else "the other"

    def look(self, window: Window) -> list[str]:
        """What there is to say after this window: nothing in a healthy job."""
        lines = []
        found: dict[tuple[str, str, int], list[int]] = {}  # ranks of one host that are slow alike share a line
        for number, (rank, gap) in enumerate(zip(self._ranks, window.gaps(), strict=True)):
            rank.quiet -= 1
            if gap < LEAST:
                lines += self._fine(number, rank)
                continue
            rank.fine = 0
            rank.slow.append((window, gap))
            if len(rank.slow) == ROW and not rank.called:
                rank.called = True
                alike = self._hosts[number], _reason(rank.windows, number), rank.windows[0].first
                found.setdefault(alike, []).append(number)
        for (_, reason, since), numbers in found.items():
            rank = self._ranks[numbers[0]]
            much = statistics.median(gap for _, gap in rank.slow)
            lines.append(
                f"{self._name(numbers)} {'is' if len(numbers) == 1 else 'are'} {100 * much:.0f} % slower than "
                f"{self._others}, since step {since}: {reason} {_split(rank.windows, numbers[0])}"
            )
        return lines

    def _fine(self, number: int, rank: _Rank) -> list[str]:
        """A rank that kept up in this window: it was called slow, or had a hiccup, or it was nothing."""
        rank.fine += 1
        if rank.called and rank.fine == ROW:
            rank.called = False
            return [f"{self._name([number])} keeps up again"]
        window, worst = max(rank.slow, key=lambda slow: slow[1], default=(None, 0.0))
        rank.slow.clear()
        if window is None or rank.called or worst < ONCE or rank.quiet > 0:
            return []
        rank.quiet = QUIET_WINDOWS
        return [
            f"{self._name([number])} was {100 * worst:.0f} % slower than {self._others}, once, in steps {window.first} "
            f"to {window.last}: {_reason([window], number)} {_split([window], number)}"
        ]

    def _name(self, numbers: list[int]) -> str:
        return f"rank{'s' if len(numbers) > 1 else ''} {ranges(numbers)} ({self._hosts[numbers[0]]})"


def _others(values: Sequence[float]) -> list[float]:
    """For each value the median of all others. With itself a rank would be compared with a part of itself: of two
    ranks, by half of the difference."""
    ordered = sorted(values)
    low, high = (len(values) - 2) // 2, (len(values) - 1) // 2  # the middle of one less
    found = []
    for value in values:
        place = bisect.bisect_left(ordered, value)
        found.append((ordered[low + (low >= place)] + ordered[high + (high >= place)]) / 2)
    return found


def _reason(windows: list[Window], number: int) -> str:
    """The part in which this rank loses most: "data" or "compute"."""
    lost = [sum(window.seconds[number][part] - window.median(part) for window in windows) for part in (DATA, COMPUTE)]
    return PARTS[DATA if lost[DATA] > lost[COMPUTE] else COMPUTE]


def _split(windows: list[Window], number: int) -> str:
    """A step of this rank in parts, and the median of all ranks: "(a step: data 2.1 ms, median 2; ...)"."""
    parts = []
    for part, name in enumerate(PARTS):
        own = statistics.median(window.seconds[number][part] for window in windows)
        others = statistics.median(window.median(part) for window in windows)
        parts.append(f"{name} {1000 * own:.3g} ms, median {1000 * others:.3g}")
    return f"(a step: {'; '.join(parts)})"
