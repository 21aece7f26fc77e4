"""The life of a rank as one record in memory that outlives it: phase, step, deadline and place. No torch here.

All records of an agent lie in one file without a name. A rank writes its own, and so costs no system call; the agent
reads it at any time, also after the rank was killed. One number goes the other way: the step at which to stop, see
`rankup.agent.stop`.
"""

import mmap
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NAME = "rankup-records"
NO_STOP = 2**63 - 1  # a step that no rank reaches
NO_LIMIT = float("inf")
# In the machine's own alignment, so that a number is written as a whole: the sizes with "=" are copied byte by byte.
# "p": a text behind its length, which a reader bounds by the size of the field
STOP = struct.Struct("q")  # the step before which to stop, and which of those is confirmed
STEP = struct.Struct("qd")  # and when it began
SEQUENCE = struct.Struct("Q")  # how often a phase was entered
FLAG = struct.Struct("?")
PHASE = struct.Struct("dd64p")  # entered_s, timeout_s
PLACE = struct.Struct("256p")
STOP_AT, STEP_AT, SEQUENCE_AT, WAITING_AT, FINISHED_AT, SETTLED_AT = 0, 8, 24, 32, 33, 34
PLACE_AT, CONFIRMED_AT, SIZE = 200, 456, 512
# The phase lies in one of two places, an even and an odd sequence number. A rank writes the other one and then the
# number, so that what the number points to is whole, whenever the rank is killed or stopped
PHASES_AT = (40, 120)
TRIES = 100  # of a reader, while the rank enters one phase after the other


@dataclass(frozen=True)
class Record:
    """What is known of a rank. Times are in seconds of this machine's `time.monotonic()`.

    `step`: the one that it has begun last. `entered_s`: when it entered the phase, or began the step. `timeout_s`: how
    long it may take from then on. `waiting`: for other ranks. `place`: in the program. `finished`: all its work.
    `settled`: it begins no further step, and needs nobody to tell it so.
    """

    phase: str
    step: int
    place: str
    entered_s: float
    timeout_s: float
    waiting: bool
    finished: bool
    settled: bool

    def sign(self, rank: int) -> dict[str, Any]:
        """Where the rank is, for others: `for_s` is how long it has been there."""
        return {
            "rank": rank, "phase": self.phase, "step": self.step, "waiting": self.waiting,
            "for_s": round(time.monotonic() - self.entered_s, 1), "place": self.place,
        }


class Records:
    """The agent's side."""

    def __init__(self, num_ranks: int) -> None:
        self._file = -1
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create(NAME)
            os.ftruncate(self._file, SIZE * num_ranks)
        self._memory = mmap.mmap(self._file, SIZE * num_ranks)
        for local_rank in range(num_ranks):
            self.clear(local_rank)

    def clear(self, local_rank: int) -> None:
        """For a rank that will be started."""
        self.of(local_rank).clear()

    def of(self, local_rank: int) -> "RecordWriter":
        return RecordWriter(None, memory=self._memory, offset=SIZE * local_rank)

    def place(self, local_rank: int) -> dict[str, Any]:
        """What `RecordWriter` needs in the process of the rank; it can be written as JSON."""
        return {"path": f"/proc/{os.getpid()}/fd/{self._file}", "offset": SIZE * local_rank}

    def read(self, local_rank: int) -> Record:
        return _read(self._memory, SIZE * local_rank)


class RecordWriter:
    """The rank's side. What it writes goes nowhere without an agent, or where the memory cannot be reached."""

    def __init__(self, place: Mapping[str, Any] | None, *, memory: mmap.mmap | None = None, offset: int = 0) -> None:
        """`place`: of `Records.place`. `memory`, `offset`: in place of it, where the memory is there already."""
        if memory is None and place:
            memory, offset = _map(place), int(place["offset"])
        self.shared = memory is not None
        self._memory, self._offset = (memory, offset) if memory is not None else (mmap.mmap(-1, SIZE), 0)
        if not self.shared:
            self.clear()

    def clear(self) -> None:
        for at in (STOP_AT, CONFIRMED_AT):
            STOP.pack_into(self._memory, self._offset + at, NO_STOP)
        STEP.pack_into(self._memory, self._offset + STEP_AT, 0, 0.0)
        self.enter("start")
        self.set_place("")
        self.wait(False)
        self.finish(False)
        self.settle(False)

    def begin(self, step: int) -> None:
        """Say that `step` begins now, in the present phase."""
        STEP.pack_into(self._memory, self._offset + STEP_AT, step, time.monotonic())

    def may_begin(self, step: int) -> bool | None:
        """Say that `step` begins now. Returns False where the rank has to stop instead, and None where it has to ask
        again in a moment: the members have not agreed yet."""
        self.begin(step)
        (stop,) = STOP.unpack_from(self._memory, self._offset + STOP_AT)  # after the line above, see `ask_to_stop`
        if step < stop:
            return True
        return None if STOP.unpack_from(self._memory, self._offset + CONFIRMED_AT)[0] != stop else False

    def ask_to_stop(self, step: int) -> int:
        """The agent's: let the rank wait before `step`. Returns the step that it has begun last.

        Each side writes its own number and then reads the other's, so that at least one of them sees both. Where this
        returns less than `step`, the rank will not pass it.
        """
        STOP.pack_into(self._memory, self._offset + STOP_AT, step)
        begun: int = STEP.unpack_from(self._memory, self._offset + STEP_AT)[0]
        return begun

    def confirm_stop(self, step: int) -> None:
        """The agent's: no rank of the job passes the step of the last `ask_to_stop`, so stop before it."""
        STOP.pack_into(self._memory, self._offset + CONFIRMED_AT, step)

    def settle(self, settled: bool = True) -> None:
        """Say that this rank begins no further step."""
        FLAG.pack_into(self._memory, self._offset + SETTLED_AT, settled)

    def enter(self, phase: str, timeout_s: float = NO_LIMIT, *, since_s: float | None = None) -> None:
        """Begin another phase, or the same one anew. One thread at a time. `since_s`: it began then."""
        memory, offset = self._memory, self._offset
        sequence = SEQUENCE.unpack_from(memory, offset + SEQUENCE_AT)[0] + 1
        where = offset + PHASES_AT[sequence % 2]
        entered_s = time.monotonic() if since_s is None else since_s
        PHASE.pack_into(memory, where, entered_s, timeout_s, phase.encode(errors="replace"))
        SEQUENCE.pack_into(memory, offset + SEQUENCE_AT, sequence)

    def set_place(self, text: str) -> None:
        """Say where in the program this rank is. Any thread."""
        PLACE.pack_into(self._memory, self._offset + PLACE_AT, text.encode(errors="replace"))

    def wait(self, waiting: bool) -> None:
        """Say whether this rank waits for others."""
        FLAG.pack_into(self._memory, self._offset + WAITING_AT, waiting)

    def read(self) -> Record:
        return _read(self._memory, self._offset)

    def finish(self, finished: bool = True) -> None:
        FLAG.pack_into(self._memory, self._offset + FINISHED_AT, finished)


def _read(memory: mmap.mmap, offset: int) -> Record:
    for _ in range(TRIES):
        (before,) = SEQUENCE.unpack_from(memory, offset + SEQUENCE_AT)
        entered_s, timeout_s, phase = PHASE.unpack_from(memory, offset + PHASES_AT[before % 2])
        if SEQUENCE.unpack_from(memory, offset + SEQUENCE_AT)[0] == before:
            break
    step, began_s = STEP.unpack_from(memory, offset + STEP_AT)
    return Record(
        phase=phase.decode(errors="replace"), step=step, entered_s=max(entered_s, began_s), timeout_s=timeout_s,
        place=PLACE.unpack_from(memory, offset + PLACE_AT)[0].decode(errors="replace"),
        waiting=memory[offset + WAITING_AT] != 0, finished=memory[offset + FINISHED_AT] != 0,
        settled=memory[offset + SETTLED_AT] != 0,
    )


def _map(place: Mapping[str, Any]) -> mmap.mmap | None:
    """None in another namespace of processes, where the same path may be another file, or none."""
    try:
        if f"memfd:{NAME}" not in os.readlink(place["path"]):
            return None
        file = os.open(place["path"], os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(file, 0)
        finally:
            os.close(file)
    except (OSError, ValueError):
        return None
    return memory if int(place["offset"]) + SIZE <= len(memory) else None
