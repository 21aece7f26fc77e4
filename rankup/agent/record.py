"""Where a rank is, as a record in memory that outlives it: phase, step, deadline and place. No torch here.

A record lies in a file without a name. The agent makes it, or a rank without an agent. The rank writes it without a
system call; the agent can read it at any time, also after the rank was killed. One number goes the other way: the step
at which to stop.
"""

import ctypes
import mmap
import os
import time
import weakref
from collections.abc import Iterable
from typing import Any

NAME = "rankup-records"
NO_STOP = 2**63 - 1  # a step that no rank reaches
NO_LIMIT = float("inf")


class _Phase(ctypes.Structure):
    _fields_ = (("entered_s", ctypes.c_double), ("timeout_s", ctypes.c_double), ("name", ctypes.c_char * 64))


class PhaseClock:
    """Adds up seconds by phase: where the time of an attempt went. One thread enters phases, any thread may read.

    What steps have waited for their batches counts as a phase of its own, "data"."""

    def __init__(self, phase: str) -> None:
        self._data_s = 0.0
        # In one tuple, as a reader may come between two assignments: seconds by phase, the present one, and its begin
        self._now: tuple[dict[str, float], str, float] = {}, phase, time.monotonic()

    def enter(self, phase: str) -> None:
        """End the present phase, and begin another one, or the same one anew. Takes a µs."""
        now_s = time.monotonic()
        self._now = self._until(now_s), phase, now_s

    def wait_for_data(self, taken_s: float) -> None:
        """A step has just waited so long for its batch. A phase in between keeps its own time."""
        _, _, since_s = self._now
        self._data_s += min(taken_s, time.monotonic() - since_s)

    def seconds(self) -> dict[str, float]:
        """The seconds so far by phase, the present phase included. They add up to the age of this clock."""
        found = self._until(time.monotonic())
        data_s = min(self._data_s, found.get("step", 0.0))
        return {**found, "step": found.get("step", 0.0) - data_s, "data": data_s}

    def _until(self, now_s: float) -> dict[str, float]:
        seconds, phase, since_s = self._now
        return {**seconds, phase: seconds.get(phase, 0.0) + now_s - since_s}


class Record(ctypes.Structure):
    """What is known of a rank, in memory that it shares with its agent, or a copy of that. In the machine's own
    alignment a number is written as a whole. A phase is one copy of 80 bytes, which no other thread of the rank can
    come between. Times are in seconds of this machine's `time.monotonic()`.

    `step`: the one that it has begun last, at `began_s`. `stop`: the step before which to stop; `confirmed`: which of
    those is confirmed. `signed_s`: its last sign of life, 0 before it was started. `waiting`: for other ranks, which
    are to blame then. `finished`: all its work.

    `clock`: of the phases of this process. `entered`: the present one, and its timeout.
    """

    _fields_ = (
        ("rank", ctypes.c_int64), ("waiting", ctypes.c_bool), ("step", ctypes.c_int64), ("began_s", ctypes.c_double),
        ("_phase", _Phase), ("stop", ctypes.c_int64), ("confirmed", ctypes.c_int64), ("signed_s", ctypes.c_double),
        ("finished", ctypes.c_bool), ("_place", ctypes.c_char * 256),
    )

    @classmethod
    def new(cls, rank: int = 0) -> "Record":
        file = os.memfd_create(NAME)
        os.ftruncate(file, ctypes.sizeof(cls))
        record = cls._map(file)
        record._file = file
        weakref.finalize(record, os.close, file)
        record.rank, record.stop, record.confirmed = rank, NO_STOP, NO_STOP
        record.enter("start")
        return record

    @classmethod
    def at(cls, path: str) -> "Record":
        """The one that another process has there, see `path`. Raises OSError where it can't be reached."""
        # In another namespace of processes the same path may be somebody's file, which must stay as it is
        if f"memfd:{NAME}" not in os.readlink(path):
            raise FileNotFoundError(path)
        with open(path, "r+b") as file:
            return cls._map(file.fileno())

    @classmethod
    def _map(cls, file: int) -> "Record":
        record = cls.from_buffer(mmap.mmap(file, 0))
        record.clock, record.entered = PhaseClock("start"), ("", NO_LIMIT)
        return record

    @property
    def path(self) -> str:
        """Where other processes find it, as long as this one has it."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    # What others read -----------------------------------------------------------------------------------------------

    def read(self) -> "Record":
        """A copy, which stays as it is."""
        return Record.from_buffer_copy(self)

    @property
    def phase(self) -> str:
        return str(self._phase.name.decode(errors="replace"))

    @property
    def entered_s(self) -> float:
        """When it entered the phase, or began the step."""
        return float(max(self._phase.entered_s, self.began_s))

    @property
    def timeout_s(self) -> float:
        """How long the phase may take."""
        return float(self._phase.timeout_s)

    @property
    def until_s(self) -> float:
        """The deadline."""
        return float(self._phase.entered_s + self._phase.timeout_s)

    def sign(self) -> dict[str, Any]:
        """Where the rank is, for others: `for_s` is how long it has been there, `ago_s` how long ago it lived."""
        now_s, place = time.monotonic(), self._place.decode(errors="replace")
        # Before a script has imported rankup, and in one that does not, nobody gives signs of life
        lived_s = now_s if self.phase in ("start", "script") else max(self.signed_s, self.entered_s)
        return {
            "rank": self.rank, "phase": self.phase, "step": self.step, "waiting": self.waiting, "place": place,
            "for_s": round(now_s - self.entered_s, 1), "ago_s": now_s - lived_s,
        }

    # What the rank writes -------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Say that `step` begins now, in the present phase."""
        self.step, self.began_s = step, time.monotonic()

    def begin_anew(self, step: int) -> None:
        """The same, and that the phase begins anew with it, see `enter`."""
        # Not by `struct`, which fills all with zeros first: the agent would read step 0
        self.waiting, self.step, now_s = False, step, time.monotonic()
        self._phase.entered_s = self.began_s = now_s

    def may_begin(self, step: int) -> bool | None:
        """Say that `step` begins. Returns False where the rank has to stop instead, and None where it has to ask again
        in a moment: the members have not agreed yet."""
        if self.step != step:
            self.begin(step)
        stop: int = self.stop  # after the step was written, see `ask_to_stop`
        if step < stop:
            return True
        return None if self.confirmed != stop else False

    def enter(self, phase: str, timeout_s: float = NO_LIMIT, *, since_s: float | None = None) -> None:
        """Begin another phase, or the same one anew. One thread at a time. `since_s`: it began then."""
        self.clock.enter(phase)
        began_s = time.monotonic() if since_s is None else since_s
        self._write(began_s, timeout_s, phase)

    def extend(self, timeout_s: float) -> None:
        """Move the deadline of the same phase to `timeout_s` seconds from now."""
        entered_s = self._phase.entered_s
        self._write(entered_s, time.monotonic() - entered_s + timeout_s, self.phase)

    def _write(self, entered_s: float, timeout_s: float, phase: str) -> None:
        self.entered = (phase, timeout_s)
        self._phase = _Phase(entered_s, timeout_s, phase.encode(errors="replace")[:64])

    def give_sign(self, place: str) -> None:
        """Say that this rank lives, and where in the program it is. Any thread."""
        self._place = place.encode(errors="replace")[:256]
        self.signed_s = time.monotonic()

    # What its agent writes ------------------------------------------------------------------------------------------

    def ask_to_stop(self, step: int) -> int:
        """Let the rank wait before `step`. Returns the step that it has begun last.

        Each side writes its own number and then reads the other's, so that at least one of them sees both. Where this
        returns less than `step`, the rank will not pass it. `confirmed` says that no rank of the job passes it.
        """
        self.stop = step
        begun: int = self.step
        return begun


# How all ranks stop before the same step ------------------------------------------------------------------------------

MARGIN = 2  # steps beyond the furthest rank, where all are asked to stop; doubled at each refusal


class StopAgreement:
    """The leader's side. A rank writes the step that it is about to begin, then reads the step before which to stop
    (`may_begin`); a member writes the latter, then reads the former (`ask_to_stop`). So nobody waits in a step. A rank
    that is not there REACH_S later keeps the last finished step, and leaves.

    | prepare(n, stop)        | leader | let your ranks wait before step `stop`, and say how far they are         |
    | standing(n, step)       | member | the furthest step that a rank of mine has begun, with `stop` before it   |
    | confirm(n, stop)        | leader | no rank has begun `stop`, and so none will: stop before it               |

    `step`: before which to stop, the first one for no other purpose than to hear where all are. `confirmed`: no rank
    will pass it.
    """

    def __init__(self, members: Iterable[object]) -> None:
        self.members = frozenset(members)
        self.step, self.confirmed = 0, False
        self._margin, self._answers = MARGIN, dict[object, int]()  # to the question about `step`

    def hear(self, member: object, *, step: int) -> bool:
        """A member's `standing`, which answers each question once. Returns whether all have answered: then there is
        another step to prepare, or this one to confirm."""
        if member not in self.members:  # spares are asked too
            return False
        self._answers[member] = step
        if len(self._answers) < len(self.members):
            return False
        furthest = max(self._answers.values())
        if furthest < self.step:
            self.confirmed = True
        else:
            self.step = furthest + self._margin
            self._margin *= 2
            self._answers = {}
        return True
