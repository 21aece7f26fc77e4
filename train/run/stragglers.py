"""Which rank keeps the others waiting: decided from what every rank measured, in words that rank 0 prints.

A machine that does other work too slows now this rank and now that one. So each rank has a score that rises with each
window in which it is slow, and falls with the others: a cumulative sum, as quality control uses it (Page, 1954). Its
unit is the rank's own usual ups and downs. On a quiet machine a rank that is 10 % slower is found after 7 windows, on a
busy one it takes longer, and a single window never suffices.
"""

import bisect
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rankup.env.rank_env import ranges
from train.run.step_clock import COMPUTE, DATA, PARTS, WAITING

LEAST = 0.08  # of the median's own time: less is not worth a line
ALARM = 14.0  # of a score: with ups and downs of 8 % chance alone got there in none of 20,000 windows
MOST = 16.0  # of a score: after long slowness too, it shall fall soon
LARGEST_CHANGE = 2.0  # by one window
LEAST_SPREAD = 0.02  # the unit where ups and downs are smaller
MEMORY = 30  # windows from which the spread is known
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

    def gaps(self) -> tuple[list[float], float]:
        """By how much of the median's own time each rank holds up the others, 0.18 for 18 %, and how far all spread.

        Slow is who is so in both ways that there are to see it: its own part of a step takes longer, and it waits less.
        """
        loads = self.load or [1.0] * len(self.seconds)
        own = [(rank[DATA] + rank[COMPUTE]) / load for rank, load in zip(self.seconds, loads, strict=True)]
        waits = [rank[WAITING] for rank in self.seconds]
        pairs = list(zip(own, _others(own), waits, _others(waits), strict=True))
        gaps = [min(mine - theirs, their_wait - wait) / max(theirs, 1e-9) for mine, theirs, wait, their_wait in pairs]
        middle = statistics.median_low(own)
        return gaps, statistics.median_low(abs(value - middle) for value in own) / max(middle, 1e-9)

    def median(self, part: int) -> float:
        """Seconds of this part: the median of the ranks."""
        return statistics.median_low(rank[part] for rank in self.seconds)


@dataclass(slots=True)
class _Rank:
    """What is known of one rank."""

    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=MEMORY))
    score: float = 0.0
    # Since the score is above 0
    since: int = 0
    slow: deque[tuple[Window, float]] = field(default_factory=lambda: deque(maxlen=MEMORY))
    called: bool = False  # slow, in a line
    quiet: int = 0  # windows to go before a hiccup is worth a line again

    def note(self, window: Window, gap: float, spread: float) -> None:
        self.gaps.append(gap)
        middle = statistics.median(self.gaps)
        own_spread = 1.5 * statistics.median(abs(each - middle) for each in self.gaps)  # 1.5: as a standard deviation
        unit = max(LEAST_SPREAD, own_spread, spread)
        change = (gap - max(LEAST, unit) / 2) / unit
        before = self.score
        self.score = min(MOST, max(0.0, before + max(-LARGEST_CHANGE, min(LARGEST_CHANGE, change))))
        if before == 0.0 < self.score:
            self.since = window.first
        if self.score > 0.0:
            self.slow.append((window, gap))

    @property
    def much(self) -> float:
        """By how much it is slower, since it is."""
        return statistics.median(gap for _, gap in self.slow)


class Stragglers:
    """Looks at one window after the other."""

    def __init__(self, hosts: Iterable[str]) -> None:
        """`hosts`: by rank."""
        self._hosts = list(hosts)
        self._ranks = [_Rank() for _ in self._hosts]

    def look(self, window: Window) -> list[str]:
        """What there is to say after this window: nothing in a healthy job."""
        lines = []
        found: dict[tuple[str, str, int], list[int]] = {}  # ranks of one host that are slow alike share a line
        gaps, spread = window.gaps()
        for number, (rank, gap) in enumerate(zip(self._ranks, gaps, strict=True)):
            rank.note(window, gap, spread)
            rank.quiet -= 1
            if rank.score == 0.0 and rank.slow:
                lines += self._over(number, rank)
                rank.slow.clear()
            elif rank.score >= ALARM and not rank.called and rank.much >= LEAST:
                rank.called = True
                found.setdefault((self._hosts[number], _reason(rank, number), rank.since), []).append(number)
        return lines + [self._chronic(numbers, reason) for (_, reason, _), numbers in found.items()]

    def _over(self, number: int, rank: _Rank) -> list[str]:
        """The score of a rank is back to 0: it was called slow, or had a hiccup, or it was nothing."""
        if rank.called:
            rank.called = False
            return [f"{self._name([number])} keeps up again"]
        window, worst = max(rank.slow, key=lambda slow: slow[1])
        if worst < ONCE or rank.quiet > 0:
            return []
        rank.quiet = QUIET_WINDOWS
        rank.slow = deque([(window, worst)])
        return [
            f"{self._name([number])} was {100 * worst:.0f} % slower than {self._others}, once, in steps {window.first} "
            f"to {window.last}: {_reason(rank, number)} {_split(rank, number)}"
        ]

    def _chronic(self, numbers: list[int], reason: str) -> str:
        """`rank 3 (node1) is 18 % slower than the median, since step 1200: compute (...)`."""
        rank = self._ranks[numbers[0]]
        return (
            f"{self._name(numbers)} {'is' if len(numbers) == 1 else 'are'} {100 * rank.much:.0f} % slower than "
            f"{self._others}, since step {rank.since}: {reason} {_split(rank, numbers[0])}"
        )

    @property
    def _others(self) -> str:
        return "the median" if len(self._hosts) > 2 else "the other"

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


def _reason(rank: _Rank, number: int) -> str:
    """The part in which the rank loses most: "data" or "compute"."""
    lost = [sum(window.seconds[number][part] - window.median(part) for window, _ in rank.slow)
            for part in (DATA, COMPUTE)]
    return PARTS[DATA if lost[DATA] > lost[COMPUTE] else COMPUTE]


def _split(rank: _Rank, number: int) -> str:
    """A step of this rank in parts, and the median of all ranks: "(a step: data 2.1 ms, median 2; ...)"."""
    parts = []
    for part, name in enumerate(PARTS):
        own = statistics.median(window.seconds[number][part] for window, _ in rank.slow)
        others = statistics.median(window.median(part) for window, _ in rank.slow)
        parts.append(f"{name} {1000 * own:.3g} ms, median {1000 * others:.3g}")
    return f"(a step: {'; '.join(parts)})"
