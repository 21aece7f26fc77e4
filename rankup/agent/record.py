"""The life of a rank as one record in memory that outlives it: phase, step, deadline and place. No torch here.

A record lies in a file without a name, which the agent has made, or a rank without an agent. The rank writes it
without a system call; the agent reads it at any time, also after the rank was killed. One number goes the other way:
the step at which to stop.
"""

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

NAME = "rankup-records"
NO_STOP = 2**63 - 1  # a step that no rank reaches
NO_LIMIT = float("inf")


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
    """Adds up seconds by phase: where the time of an attempt went. One thread enters phases, any thread may read."""

    def __init__(self, phase: str) -> None:
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

    def move(self, phase: str, taken_s: float) -> None:
        """So many of the present phase's last seconds were another one's. A phase in between keeps its own."""
        with self._lock:
            taken_s = min(taken_s, time.monotonic() - self._since_s)
            self._seconds[phase] = self._seconds.get(phase, 0.0) + taken_s
            self._since_s += taken_s

    def present(self) -> tuple[str, float]:
        """The present phase, and how many seconds ago it was entered."""
        with self._lock:
            return self._phase, time.monotonic() - self._since_s

    def seconds(self) -> dict[str, float]:
        """The seconds so far by phase, the present phase included. They add up to the age of this clock."""
        with self._lock:
            running = {self._phase: self._seconds.get(self._phase, 0.0) + time.monotonic() - self._since_s}
            return self._seconds | running


class RecordWriter:
    """The rank's side, and the agent's. `clock`: of this process's own phases. `entered`: the present one, and its
    timeout."""

    def __init__(self, place: str | None = None, *, rank: int = 0) -> None:
        """`place`: of an agent's record, else this is a new one, of `rank`. Raises OSError where it is out of reach."""
        self.clock, self.entered = PhaseClock("start"), ("", NO_LIMIT)
        if place is None:
            number = os.memfd_create(NAME)
            os.ftruncate(number, ctypes.sizeof(_Cell))
        elif f"memfd:{NAME}" in os.readlink(place):
            number = os.open(place, os.O_RDWR | os.O_CLOEXEC)
        else:  # in another namespace of processes the same path may be somebody's file, which must stay as it is
            raise FileNotFoundError(place)
        self._file = os.fdopen(number, "r+b")  # closed with this object
        self._cell = _Cell.from_buffer(mmap.mmap(number, 0))
        if place is None:
            self._cell.rank, self._cell.stop, self._cell.confirmed = rank, NO_STOP, NO_STOP
            self.enter("start")

    @property
    def place(self) -> str:
        """Where other processes find it, as long as this one has it."""
        return f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    def begin(self, step: int) -> None:
        """Say that `step` begins now, in the present phase."""
        self._cell.step, self._cell.began_s = step, time.monotonic()

    def begin_anew(self, step: int) -> None:
        """The same, and that the phase begins anew with it, see `enter`. In every step, so in one call."""
        cell, now_s = self._cell, time.monotonic()
        cell.waiting, cell.step = False, step
        cell.phase.entered_s = cell.began_s = now_s
        self.clock.enter(self.entered[0])

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
