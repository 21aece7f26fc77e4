"""Which rank keeps the others waiting: decided from what every rank measured, in words that rank 0 prints. No torch.

A machine that does other work too slows now this rank and now that one. So a rank is called slow only after ROW windows
in a row in which both measures say so: its own part of a step takes LEAST longer, and it waits that much less. With ups
and downs of 8 % chance alone called no healthy rank slow in 20,000 windows of 2, 3, 4 and 16 ranks.
"""

import bisect
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rankup.env.rank_env import ranges

DATA, COMPUTE, WAITING = range(3)
PARTS = ("data", "compute", "waiting")
LEAST = 0.08  # of the median's own time
ROW = 10  # windows in a row until a rank is called slow, and until it is said to keep up again

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


class Stragglers:
    """Looks at one window after the other."""

    def __init__(self, hosts: Iterable[str]) -> None:
        """`hosts`: by rank."""
        self._hosts = list(hosts)
        # Of each rank, its newest windows in a row in which it was slow, or was not, each with its gap
        self._rows = [deque[tuple[Window, float]](maxlen=ROW) for _ in self._hosts]
        self._called = set[int]()  # slow, in a line

    def look(self, window: Window) -> list[str]:
        """What there is to say after this window: nothing in a healthy job."""
        lines = []
        found: dict[tuple[str, str, int], list[int]] = {}  # ranks of one host that are slow alike share a line
        for rank, (row, gap) in enumerate(zip(self._rows, window.gaps(), strict=True)):
            slow = gap >= LEAST
            if row and (row[-1][1] >= LEAST) != slow:
                row.clear()
            row.append((window, gap))
            if len(row) < ROW or slow == (rank in self._called):
                continue
            self._called ^= {rank}
            if slow:
                found.setdefault((self._hosts[rank], self._reason(rank), row[0][0].first), []).append(rank)
            else:
                lines.append(f"{self._name([rank])} keeps up again")
        for (_, reason, since), ranks in found.items():
            much = statistics.median(gap for _, gap in self._rows[ranks[0]])
            others = "the median" if len(self._hosts) > 2 else "the other"
            lines.append(f"{self._name(ranks)} {'is' if len(ranks) == 1 else 'are'} {100 * much:.0f} % slower than "
                         f"{others}, since step {since}: {reason} {self._split(ranks[0])}")
        return lines

    def _name(self, ranks: list[int]) -> str:
        return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)} ({self._hosts[ranks[0]]})"

    def _reason(self, rank: int) -> str:
        """The part in which this rank loses most: "data" or "compute"."""
        data, compute = (
            sum(window.seconds[rank][part] - window.median(part) for window, _ in self._rows[rank])
            for part in (DATA, COMPUTE)
        )
        return PARTS[DATA if data > compute else COMPUTE]

    def _split(self, rank: int) -> str:
        """A step of this rank in parts, and the median of all ranks: "(a step: data 2.1 ms, median 2; ...)"."""
        parts = []
        for part, name in enumerate(PARTS):
            own = statistics.median(window.seconds[rank][part] for window, _ in self._rows[rank])
            others = statistics.median(window.median(part) for window, _ in self._rows[rank])
            parts.append(f"{name} {1000 * own:.3g} ms, median {1000 * others:.3g}")
        return f"(a step: {'; '.join(parts)})"


def _others(values: Sequence[float]) -> list[float]:
    """For each value the median of all others. With itself a rank would be compared with a part of itself: of two
    ranks, by half of the difference."""
    ordered = sorted(values)
    places = (bisect.bisect_left(ordered, value) for value in values)
    return [statistics.median([*ordered[:place], *ordered[place + 1 :]]) for place in places]
