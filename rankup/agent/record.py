"""The life of a rank as one record in memory that outlives it: phase, step, deadline and place. No torch here.

All records of an agent lie in one file without a name; a rank without an agent makes its own. A rank writes its own
record, and so costs no system call; the agent reads it at any time, also after the rank was killed. One number goes the
other way: the step at which to stop.

A container's health check finds the records of all ranks there:

    python -I rankup/agent/record.py    # one line; 0: every rank makes progress, 1: one hangs or none has started

It only reports: the deadlines of the ranks end a hang. It runs every few seconds beside the training, so this file
needs nothing but the standard library.
"""

import contextlib
import ctypes
import mmap
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME = "rankup-records"
NO_STOP = 2**63 - 1  # a step that no rank reaches
NO_LIMIT = float("inf")
SIZE = 512  # of one record
# Limits of the health check. A rank that gives no sign of life for SILENT_S is stopped or frozen, or a call of it holds
# the interpreter's lock. No step of a healthy job takes HEALTHY_STEP_S, and its deadline is far later;
# RANKUP_HEALTHY_STEP_S sets another
SILENT_S, HEALTHY_STEP_S = 10.0, 60.0


class _Phase(ctypes.Structure):
    _fields_ = (("entered_s", ctypes.c_double), ("timeout_s", ctypes.c_double), ("name", ctypes.c_char * 64))


class _Cell(ctypes.Structure):
    """A record in memory, in the machine's own alignment: a number is written as a whole. A phase is one copy of 80
    bytes, which no other thread of the rank can come between."""

    _fields_ = (
        ("rank", ctypes.c_int64), ("step", ctypes.c_int64), ("began_s", ctypes.c_double),
        ("stop", ctypes.c_int64),  # the step before which to stop
        ("confirmed", ctypes.c_int64),  # which of those is confirmed
        ("signed_s", ctypes.c_double), ("phase", _Phase),
        ("waiting", ctypes.c_bool), ("finished", ctypes.c_bool), ("settled", ctypes.c_bool),
        ("place", ctypes.c_char * 256),
    )

    def read(self) -> "Record":
        phase = _Phase.from_buffer_copy(self.phase)
        return Record(
            rank=self.rank, phase=phase.name.decode(errors="replace"), step=self.step,
            place=self.place.decode(errors="replace"), entered_s=max(phase.entered_s, self.began_s),
            timeout_s=phase.timeout_s, until_s=phase.entered_s + phase.timeout_s, signed_s=self.signed_s,
            waiting=self.waiting, finished=self.finished, settled=self.settled,
        )


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
        """Where the rank is, for others: `for_s` is how long it has been there, `ago_s` how long ago it lived."""
        now_s = time.monotonic()
        return {
            "rank": self.rank, "phase": self.phase, "step": self.step, "waiting": self.waiting, "place": self.place,
            "for_s": round(now_s - self.entered_s, 1), "ago_s": now_s - max(self.signed_s, self.entered_s),
        }


class PhaseClock:
    """Adds up seconds by phase: where the time of an attempt went. One thread enters phases, any thread may read.

    What steps have waited for their batches counts as a phase of its own, "data"."""

    def __init__(self, phase: str) -> None:
        self._data_s = 0.0
        self._seconds: dict[str, float] = {}
        self._phase, self._since_s = phase, time.monotonic()
        # A reader between two of the assignments below would count the time of one phase twice
        self._lock = threading.Lock()

    def enter(self, phase: str) -> None:
        """End the present phase, and begin another one, or the same one anew. Takes a µs."""
        now_s = time.monotonic()
        with self._lock:
            ended = self._phase
            self._seconds[ended] = self._seconds.get(ended, 0.0) + now_s - self._since_s
            self._phase, self._since_s = phase, now_s

    def wait_for_data(self, taken_s: float) -> None:
        """A step has just waited so long for its batch. A phase in between keeps its own time."""
        self._data_s += min(taken_s, time.monotonic() - self._since_s)

    def seconds(self) -> dict[str, float]:
        """The seconds so far by phase, the present phase included. They add up to the age of this clock."""
        with self._lock:
            running = {self._phase: self._seconds.get(self._phase, 0.0) + time.monotonic() - self._since_s}
            found = self._seconds | running
        data_s = min(self._data_s, found.get("step", 0.0))
        return {**found, "step": found.get("step", 0.0) - data_s, "data": data_s}


class Records:
    """The agent's side, for ranks `first_rank` and following."""

    def __init__(self, num_ranks: int, *, first_rank: int = 0) -> None:
        self._file, self.memory = _memory(num_ranks)
        self._writers = [RecordWriter(None, cell=_cell(self.memory, number)) for number in range(num_ranks)]
        for rank, writer in enumerate(self._writers, start=first_rank):
            writer.clear(rank)

    def of(self, local_rank: int) -> "RecordWriter":
        return self._writers[local_rank]

    def place(self, local_rank: int) -> dict[str, Any]:
        """What `RecordWriter` needs in the process of the rank; it can be written as JSON."""
        return {"path": f"/proc/{os.getpid()}/fd/{self._file}", "number": local_rank}


class RecordWriter:
    """The rank's side. Where there is no agent, or its memory cannot be reached, health checks alone see the record.

    `clock`: of this process's own phases. `entered`: the present one, and its timeout.
    `shared`: whether the agent sees it.
    """

    def __init__(self, place: Mapping[str, Any] | None, *, rank: int = 0, cell: _Cell | None = None) -> None:
        """`place`: of `Records.place`. `rank`: where there is none. `cell`: in place of both, of this process."""
        self.clock, self.entered = PhaseClock("start"), ("", NO_LIMIT)
        with contextlib.suppress(OSError, ValueError):
            cell = _cell(_map(place["path"]), int(place["number"])) if place else cell
        self.shared = cell is not None
        if cell is None:
            file, memory = _memory(1)
            cell = _cell(memory, 0)
            os.close(file)  # the memory has a copy of its own
        self._cell = cell
        if not self.shared:
            self.clear(rank)

    def clear(self, rank: int | None = None) -> None:
        """For a rank that will be started. `rank`: its new number."""
        cell = self._cell
        cell.rank = cell.rank if rank is None else rank
        cell.stop = cell.confirmed = NO_STOP
        cell.step, cell.began_s, cell.place = 0, 0.0, b""
        cell.waiting = cell.finished = cell.settled = False
        self.entered = ("", NO_LIMIT)  # the rank has written others
        self.enter("start")
        cell.signed_s = 0.0

    def begin(self, step: int) -> None:
        """Say that `step` begins now, in the present phase."""
        self._cell.step, self._cell.began_s = step, time.monotonic()

    def begin_anew(self, step: int) -> None:
        """The same, and that the phase begins anew with it, see `enter`. In every step, so in one call."""
        cell, now_s = self._cell, time.monotonic()
        cell.waiting, cell.step = False, step
        cell.phase.entered_s = cell.began_s = now_s

    def may_begin(self, step: int) -> bool | None:
        """Say that `step` begins. Returns False where the rank has to stop instead, and None where it has to ask again
        in a moment: the members have not agreed yet."""
        if self._cell.step != step:
            self.begin(step)
        stop: int = self._cell.stop  # after the step was written, see `ask_to_stop`
        if step < stop:
            return True
        return None if self._cell.confirmed != stop else False

    def ask_to_stop(self, step: int) -> int:
        """The agent's: let the rank wait before `step`. Returns the step that it has begun last.

        Each side writes its own number and then reads the other's, so that at least one of them sees both. Where this
        returns less than `step`, the rank will not pass it.
        """
        self._cell.stop = step
        begun: int = self._cell.step
        return begun

    def confirm_stop(self, step: int) -> None:
        """The agent's: no rank of the job passes the step of the last `ask_to_stop`, so stop before it."""
        self._cell.confirmed = step

    def settle(self) -> None:
        """Say that this rank begins no further step."""
        self._cell.settled = True

    def enter(self, phase: str, timeout_s: float = NO_LIMIT, *, since_s: float | None = None) -> None:
        """Begin another phase, or the same one anew. One thread at a time. `since_s`: it began then."""
        self.clock.enter(phase)
        began_s = time.monotonic() if since_s is None else since_s
        self._write(began_s, timeout_s, phase)

    def extend(self, timeout_s: float) -> None:
        """Move the deadline of the same phase to `timeout_s` seconds from now."""
        now = self.read()
        entered_s = now.until_s - now.timeout_s if now.timeout_s < NO_LIMIT else now.entered_s
        self._write(entered_s, time.monotonic() - entered_s + timeout_s, now.phase)

    def _write(self, entered_s: float, timeout_s: float, phase: str) -> None:
        self.entered = (phase, timeout_s)
        self._cell.phase = _Phase(entered_s, timeout_s, phase.encode(errors="replace")[:64])

    def set_place(self, text: str) -> None:
        """Say where in the program this rank is: a sign of life too. Any thread."""
        self._cell.place = text.encode(errors="replace")[:256]
        self.give_sign()

    def give_sign(self) -> None:
        """Say that this rank lives."""
        self._cell.signed_s = time.monotonic()

    def wait(self, waiting: bool) -> None:
        """Say whether this rank waits for others, which are to blame then."""
        self._cell.waiting = waiting

    def read(self) -> Record:
        return self._cell.read()

    def finish(self) -> None:
        """Say that this rank has done all its work."""
        self._cell.finished = True


def _cell(memory: mmap.mmap, number: int) -> _Cell:
    """Raises ValueError where the memory is not so large."""
    return _Cell.from_buffer(memory, SIZE * number)


def _memory(num_ranks: int) -> tuple[int, mmap.mmap]:
    """Its file and the memory itself."""
    file = os.memfd_create(NAME)
    os.ftruncate(file, SIZE * num_ranks)
    return file, mmap.mmap(file, SIZE * num_ranks)


def _map(path: str) -> mmap.mmap:
    """Raises OSError or ValueError in another namespace of processes, where the same path may be another file."""
    if f"memfd:{NAME}" not in os.readlink(path):
        raise FileNotFoundError(path)
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(file, 0)
    finally:
        os.close(file)


# How all ranks stop before the same step ------------------------------------------------------------------------------

MARGIN = 2  # steps beyond the furthest rank, where all are asked to stop; doubled at each refusal


class StopAgreement:
    """The leader's side. A rank writes the step that it is about to begin, then reads the step before which to stop
    (`may_begin`); a member writes the latter, then reads the former (`ask_to_stop`). So nobody waits in a step.

    | prepare(n, stop)        | leader | let your ranks wait before step `stop`, and say how far they are         |
    | standing(n, stop, step) | member | the furthest step that a rank of mine has begun, with `stop` before it   |
    | confirm(n, stop)        | leader | no rank has begun `stop`, and so none will: stop before it               |
    | late(n)                 | member | REACH_S later a rank of mine is not there: it waits for data or evaluates|
    | leave(n)                | leader | keep the last finished step, and leave                                   |

    `step`: before which to stop, the first one for no other purpose than to hear where all are. `confirmed`: no rank
    will pass it.
    """

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


# The health check -----------------------------------------------------------------------------------------------------


def find_records(process: str = "[0-9]*") -> list[Record]:
    """Of all ranks whose processes this one may see, by rank. `process`: a number, or a pattern of such."""
    found: dict[tuple[int, int], list[Record]] = {}  # by file: what a rank has forked has it open too
    for path in Path("/proc").glob(f"{process}/fd/*"):
        with contextlib.suppress(OSError, ValueError):
            if NAME in os.readlink(path):
                memory, about = _map(str(path)), path.stat()
                found[about.st_dev, about.st_ino] = [_cell(memory, at).read() for at in range(len(memory) // SIZE)]
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
