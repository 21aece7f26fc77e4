"""The life of a rank as one record in memory that outlives it: phase, step, deadline and place. No torch here.

All records of an agent lie in one file without a name; a rank without an agent makes its own. A rank writes its own
record, and so costs no system call; the agent reads it at any time, also after the rank was killed. One number goes the
other way: the step at which to stop, see `rankup.agent.meeting`.

A container's health check finds the records of all ranks there:

    python -I rankup/agent/record.py    # one line; 0: every rank makes progress, 1: one hangs or none has started

It only reports: the deadlines of the ranks end a hang. It runs every few seconds beside the training, so this file
needs nothing but the standard library.
"""

import contextlib
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
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
SIGN = struct.Struct("d")  # when the rank last gave a sign of life, 0 before it was started
STOP_AT, STEP_AT, SEQUENCE_AT, WAITING_AT, FINISHED_AT, SETTLED_AT = 0, 8, 24, 32, 33, 34
PLACE_AT, CONFIRMED_AT, SIGN_AT, RANK_AT, SIZE = 200, 456, 464, 472, 512
# The phase lies in one of two places, an even and an odd sequence number. A rank writes the other one and then the
# number, so that what the number points to is whole, whenever the rank is killed or stopped
PHASES_AT = (40, 120)
TRIES = 100  # of a reader, while the rank enters one phase after the other
# Limits of the health check. A rank that gives no sign of life for SILENT_S is stopped or frozen, or a call of it holds
# the interpreter's lock. No step of a healthy job takes HEALTHY_STEP_S, and its deadline is far later;
# RANKUP_HEALTHY_STEP_S sets another
SILENT_S, HEALTHY_STEP_S = 10.0, 60.0


@dataclass(frozen=True)
class Record:
    """What is known of a rank. Times are in seconds of this machine's `time.monotonic()`.

    `step`: the one that it has begun last. `entered_s`: when it entered the phase, or began the step. `timeout_s`: how
    long it may take from then on. `waiting`: for other ranks. `place`: in the program. `finished`: all its work.
    `settled`: it begins no further step, and needs nobody to tell it so. `until_s`: the deadline. `signed_s`: its last
    sign of life, 0 before it was started.
    """

    rank: int
    phase: str
    step: int
    place: str
    entered_s: float
    timeout_s: float
    until_s: float
    signed_s: float
    waiting: bool
    finished: bool
    settled: bool

    def sign(self) -> dict[str, Any]:
        """Where the rank is, for others: `for_s` is how long it has been there."""
        return {
            "rank": self.rank, "phase": self.phase, "step": self.step, "waiting": self.waiting,
            "for_s": round(time.monotonic() - self.entered_s, 1), "place": self.place,
        }


class PhaseClock:
    """Adds up seconds by phase: where the time of an attempt went. One thread enters phases, any thread may read."""

    def __init__(self, phase: str) -> None:
        self._seconds: dict[str, float] = {}
        self._phase, self._since_s = phase, time.monotonic()
        # A reader between two of the assignments below would count the time of one phase twice
        self._lock = threading.Lock()

    def enter(self, phase: str) -> None:
        """End the present phase and begin another one, or the same one anew. Takes a microsecond."""
        now_s = time.monotonic()
        with self._lock:
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now_s - self._since_s
            self._phase, self._since_s = phase, now_s

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """For the length of the block, another phase inside the present one."""
        outer = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(outer)

    def present(self) -> tuple[str, float]:
        """The present phase, and how many seconds ago it was entered."""
        with self._lock:
            return self._phase, time.monotonic() - self._since_s

    def seconds(self) -> dict[str, float]:
        """The seconds so far by phase, the present phase included. They add up to the age of this clock."""
        with self._lock:
            running = {self._phase: self._seconds.get(self._phase, 0.0) + time.monotonic() - self._since_s}
            return self._seconds | running


class Records:
    """The agent's side, for ranks `first_rank` and following."""

    def __init__(self, num_ranks: int, *, first_rank: int = 0) -> None:
        self._file, self._memory = _memory(num_ranks)
        for local_rank in range(num_ranks):
            self.of(local_rank).clear(first_rank + local_rank)

    def of(self, local_rank: int) -> "RecordWriter":
        return RecordWriter(None, memory=self._memory, offset=SIZE * local_rank)

    def place(self, local_rank: int) -> dict[str, Any]:
        """What `RecordWriter` needs in the process of the rank; it can be written as JSON."""
        return {"path": f"/proc/{os.getpid()}/fd/{self._file}", "offset": SIZE * local_rank}

    def read(self, local_rank: int) -> Record:
        return _read(self._memory, SIZE * local_rank)


class RecordWriter:
    """The rank's side. Where there is no agent, or its memory cannot be reached, health checks alone see the record.

    `clock`: of this process's own phases.
    """

    def __init__(
        self, place: Mapping[str, Any] | None, *, rank: int = 0, memory: mmap.mmap | None = None, offset: int = 0
    ) -> None:
        """`place`: of `Records.place`. `rank`: where there is none. `memory`, `offset`: in place of it, where the
        memory is there already."""
        self.clock = PhaseClock("start")
        if memory is None and place:
            memory, offset = _map(place["path"]), int(place["offset"])
            if memory is not None and offset + SIZE > len(memory):
                memory = None
        self.shared = memory is not None
        if memory is None:
            file, memory = _memory(1)
            offset = 0
            if file >= 0:
                os.close(file)  # the memory has a copy of its own
        self._memory, self._offset = memory, offset
        if not self.shared:
            self.clear(rank)

    def clear(self, rank: int | None = None) -> None:
        """For a rank that will be started. `rank`: its number, where the record has none yet."""
        if rank is not None:
            STOP.pack_into(self._memory, self._offset + RANK_AT, rank)
        for at in (STOP_AT, CONFIRMED_AT):
            STOP.pack_into(self._memory, self._offset + at, NO_STOP)
        STEP.pack_into(self._memory, self._offset + STEP_AT, 0, 0.0)
        self.enter("start")
        self.set_place("")
        self.wait(False)
        self.finish(False)
        self.settle(False)
        SIGN.pack_into(self._memory, self._offset + SIGN_AT, 0.0)

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
        self.clock.enter(phase)
        self._write(time.monotonic() if since_s is None else since_s, timeout_s, phase)

    def extend(self, timeout_s: float) -> None:
        """Move the deadline of the same phase to `timeout_s` seconds from now."""
        now = self.read()
        entered_s = now.until_s - now.timeout_s if now.timeout_s < NO_LIMIT else now.entered_s
        self._write(entered_s, time.monotonic() - entered_s + timeout_s, now.phase)

    def _write(self, entered_s: float, timeout_s: float, phase: str) -> None:
        memory, offset = self._memory, self._offset
        sequence = SEQUENCE.unpack_from(memory, offset + SEQUENCE_AT)[0] + 1
        where = offset + PHASES_AT[sequence % 2]
        PHASE.pack_into(memory, where, entered_s, timeout_s, phase.encode(errors="replace"))
        SEQUENCE.pack_into(memory, offset + SEQUENCE_AT, sequence)

    def set_place(self, text: str) -> None:
        """Say where in the program this rank is: a sign of life too. Any thread."""
        PLACE.pack_into(self._memory, self._offset + PLACE_AT, text.encode(errors="replace"))
        self.give_sign()

    def give_sign(self) -> None:
        """Say that this rank lives."""
        SIGN.pack_into(self._memory, self._offset + SIGN_AT, time.monotonic())

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
        rank=STOP.unpack_from(memory, offset + RANK_AT)[0], phase=phase.decode(errors="replace"), step=step,
        entered_s=max(entered_s, began_s), timeout_s=timeout_s, until_s=entered_s + timeout_s,
        signed_s=SIGN.unpack_from(memory, offset + SIGN_AT)[0],
        place=PLACE.unpack_from(memory, offset + PLACE_AT)[0].decode(errors="replace"),
        waiting=memory[offset + WAITING_AT] != 0, finished=memory[offset + FINISHED_AT] != 0,
        settled=memory[offset + SETTLED_AT] != 0,
    )


def _memory(num_ranks: int) -> tuple[int, mmap.mmap]:
    """Its file, -1 where the system has no files without a name, and the memory itself."""
    file = -1
    if hasattr(os, "memfd_create"):
        file = os.memfd_create(NAME)
        os.ftruncate(file, SIZE * num_ranks)
    return file, mmap.mmap(file, SIZE * num_ranks)


def _map(path: str) -> mmap.mmap | None:
    """None in another namespace of processes, where the same path may be another file, or none."""
    try:
        if f"memfd:{NAME}" not in os.readlink(path):
            return None
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return mmap.mmap(file, 0)
        finally:
            os.close(file)
    except (OSError, ValueError):
        return None


# The health check -----------------------------------------------------------------------------------------------------


def find_records(process: str = "[0-9]*") -> list[Record]:
    """Of all ranks whose processes this one may see, by rank. `process`: a number, or a pattern of such."""
    found: dict[tuple[int, int], list[Record]] = {}  # by file: what a rank has forked has it open too
    for path in Path("/proc").glob(f"{process}/fd/*"):
        with contextlib.suppress(OSError):
            if NAME in os.readlink(path) and (memory := _map(str(path))) is not None:
                about = path.stat()
                found[about.st_dev, about.st_ino] = [_read(memory, at) for at in range(0, len(memory), SIZE)]
    return sorted((record for records in found.values() for record in records), key=lambda record: record.rank)


def judge(record: Record, *, now_s: float, healthy_step_s: float) -> tuple[bool, str]:
    """Whether this rank makes progress, and where it stands. `now_s`: of `time.monotonic()`, which all containers of a
    machine share."""
    lasted_s, silent_s = now_s - record.entered_s, now_s - record.signed_s
    where = f"rank {record.rank}: {record.phase} (step {record.step}) for {lasted_s:.0f} s"
    limit_s = min(record.timeout_s, healthy_step_s) if record.phase == "step" else record.timeout_s
    if not record.signed_s:
        return False, f"rank {record.rank}: not started"
    if silent_s > SILENT_S:
        return False, f"{where}, no sign of life for {silent_s:.0f} s: stopped or frozen"
    if lasted_s > limit_s:
        return False, f"{where}, {'waiting for another rank' if record.waiting else 'hung'}"
    return True, where


def main() -> int:
    """The exit code of the health check, which prints its line."""
    limit_s = float(os.environ.get("RANKUP_HEALTHY_STEP_S", HEALTHY_STEP_S))
    found = [judge(record, now_s=time.monotonic(), healthy_step_s=limit_s) for record in find_records()]
    print("; ".join(text for _, text in found) or "no rank has started")
    return 0 if found and all(good for good, _ in found) else 1


if __name__ == "__main__":
    sys.exit(main())
