"""How all ranks stop before the same step. No torch here.

A rank writes the step that it is about to begin, then reads the step before which to stop (`RecordWriter.may_begin`); a
member writes the latter, then reads the former (`RecordWriter.ask_to_stop`). So nobody waits for anybody in a step.

| prepare(n, stop)        | leader  | let your ranks wait before step `stop`, and say how far they are                 |
| standing(n, stop, step) | member  | the furthest step that a rank of mine has begun, with `stop` before its eyes     |
| confirm(n, stop)        | leader  | no rank has begun `stop`, and so none will: stop before it                       |
| late(n)                 | member  | REACH_S later a rank of mine has not come there: it waits for data, or evaluates |
| leave(n)                | leader  | keep the last finished step, and leave                                           |
"""

from collections.abc import Iterable

MARGIN = 2  # steps beyond the furthest rank, where all are asked to stop; doubled at each refusal


class StopAgreement:
    """`step`: before which to stop, the first one for no other purpose than to hear where all are. `confirmed`: no rank
    will pass it."""

    def __init__(self, members: Iterable[object]) -> None:
        self.members = frozenset(members)
        self._waiting = set(self.members)
        self.step, self.confirmed = 0, False
        self._margin, self._furthest = MARGIN, -1

    def hear(self, member: object, *, stop: int, step: int) -> bool:
        """A member's `standing`. Returns whether all have answered: then there is another step to prepare, or this one
        to confirm."""
        if stop != self.step or self.confirmed or member not in self._waiting:
            return False
        self._waiting.remove(member)
        self._furthest = max(self._furthest, step)
        if self._waiting:
            return False
        if self._furthest < self.step:
            self.confirmed = True
        else:
            self.step = self._furthest + self._margin
            self._margin *= 2
            self._waiting, self._furthest = set(self.members), -1
        return True
