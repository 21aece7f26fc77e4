"""What a rank that is about to leave writes of where it stands, and says of where the others do."""

from train.group.failure_detector import PLACES_S, FailureDetector
from train.process import flight_recorder, stacks
from train.process.exit import within
from train.process.places import compare

DUMP_S = 5.0  # the disk of the run may be the very thing that hangs
LAST_STACKS_S = PLACES_S + DUMP_S


def take_stacks(why: str, rank: int, own_place: str, detector: FailureDetector | None, *, hung: bool) -> list[str]:
    """Write the stacks of this rank. Returns lines for its log: where all ranks are, and which files say more.

    `detector`: knows where the other ranks were at their last sign of life; None before they have met. `hung`: no
    process has ended as far as this rank knows; if one has, the others wait for its successor, and this one makes
    haste. Takes LAST_STACKS_S at most.
    """
    lines = []
    if hung:
        # First: ranks that leave before this one stay in the store, but rank 0 takes the store along
        others = detector.places() if detector else {}
        lines.append("; ".join(compare(others | {rank: own_place})))
    if file := within(DUMP_S, lambda: stacks.dump(why, workers=hung)):
        lines.append(f"the stacks of all threads are in {file}")
    return lines + flight_recorder.lines(rank)
