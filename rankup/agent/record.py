"""Where a rank is, as a record in shared memory that outlives the rank: phase, step, deadline and place in the program.

A record is a memory file without a name (memfd). The agent creates it, or a rank that has no agent. The rank writes it
without a system call, and the agent can read it at any time, even after the rank was killed. The agent writes only the
step to stop before, and whether all members confirmed it. This file does not import torch.
"""

import ctypes
import json
import mmap
import os
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankup.errors import UserError

NAME = "rankup-records"
LONGEST = 1024  # bytes of a path or a command, with a zero byte at the end
NO_STOP = 2**63 - 1  # a step that no rank reaches
NO_LIMIT = float("inf")


class _Phase(ctypes.Structure):
    _fields_ = (("entered_s", ctypes.c_double), ("timeout_s", ctypes.c_double), ("name", ctypes.c_char * 64))


class PhaseClock:
    """A clock that adds up seconds by phase, to show where the time of an attempt went. One thread enters phases, and
    any thread may read the sums.

    The time that steps wait for their batches counts as a phase of its own, "data"."""

    def __init__(self, phase: str) -> None:
        self._data_s = 0.0
        # Seconds by phase, the present phase, and its beginning. A reader can't see a tuple half written
        self._now: tuple[dict[str, float], str, float] = {}, phase, time.monotonic()

    def enter(self, phase: str) -> None:
        """End the present phase and begin `phase`, which may be the same one again. Takes 1 µs."""
        now_s = time.monotonic()
        self._now = self._until(now_s), phase, now_s

    def wait_for_data(self, taken_s: float) -> None:
        """Note that a step has just waited `taken_s` for its batch. Count only the part of it in the present phase."""
        _, _, since_s = self._now
        self._data_s += min(taken_s, time.monotonic() - since_s)

    def seconds(self) -> dict[str, float]:
        """Return the seconds by phase, the present phase included. Together they are the age of this clock."""
        found = self._until(time.monotonic())
        data_s = min(self._data_s, found.get("step", 0.0))
        return {**found, "step": found.get("step", 0.0) - data_s, "data": data_s}

    def _until(self, now_s: float) -> dict[str, float]:
        seconds, phase, since_s = self._now
        return {**seconds, phase: seconds.get(phase, 0.0) + now_s - since_s}


class Record(ctypes.Structure):
    """The memory that a rank shares with its agent, or a copy of it. Each number is aligned, so it is written in one
    piece. A phase is written as one copy of 80 bytes, which no other thread of the rank can interrupt. Times are in
    seconds of this machine's `time.monotonic()`.

    `step`: the newest step that the rank has begun, at `began_s`. `stop`: the step before which to stop. `confirmed`:
    the value of `stop` that all nodes agreed on. `heartbeat_s`: the last heartbeat, 0 before the first one. `waiting`:
    the rank waits for other ranks, so these are to blame for a delay. `finished`: the rank has done all its work.
    `alone`: at its end the rank had met no other one, see `rankup.agent.alone`. `batches`, `passes`: how many batches
    of `job.batches` the rank has got, and how many passes over a loader it has ended, in this attempt. `written`: how
    many bytes of its state the rank has copied or written to disk: it grows while a rescue makes progress. `run_dir`:
    the folder of its run, or None until the rank has opened its log. `on_end`: the command of the script for the end of
    the job.

    Behind these fields stands `commit`, the leader's message about the membership. It names each host of the job, so
    for 2,000 nodes an environment variable, of 128 KiB at most, could not hold it.

    Not in that memory: `clock` adds up this process's phases. `entered` is the phase and timeout it entered last.
    `stops_alone`: this rank is the only one, and stops before its next step. It writes neither `stop` nor `confirmed`,
    because its agent may write them at the same time."""

    stops_alone = False

    _fields_ = (
        ("rank", ctypes.c_int64), ("waiting", ctypes.c_bool), ("_blocked", ctypes.c_bool), ("step", ctypes.c_int64),
        ("began_s", ctypes.c_double), ("_phase", _Phase), ("stop", ctypes.c_int64), ("confirmed", ctypes.c_int64),
        ("heartbeat_s", ctypes.c_double), ("finished", ctypes.c_bool), ("alone", ctypes.c_bool),
        ("batches", ctypes.c_int64), ("passes", ctypes.c_int64), ("written", ctypes.c_int64),
        ("_named", ctypes.c_bool), ("_run_dir", ctypes.c_char * LONGEST), ("_on_end", ctypes.c_char * LONGEST),
        ("_location", ctypes.c_char * 256), ("_begun", ctypes.c_char * 512),
    )

    @classmethod
    def new(cls, rank: int = 0, commit: Mapping[str, Any] = {}) -> "Record":
        file, text = os.memfd_create(NAME), json.dumps(commit).encode()
        os.ftruncate(file, ctypes.sizeof(cls) + len(text))
        os.pwrite(file, text, ctypes.sizeof(cls))
        record = cls.of(file)
        record.rank, record.stop, record.confirmed = rank, NO_STOP, NO_STOP
        record.enter("start")
        return record

    @classmethod
    def of(cls, file: int) -> "Record":
        """Return the record in an open file, which this then owns."""
        record = cls._map(file)
        record.file = file
        weakref.finalize(record, os.close, file)
        return record

    @classmethod
    def at(cls, path: str) -> "Record":
        """Open the record of another process at its `path`. Raises OSError if it can't be reached."""
        # In another PID namespace the path may belong to some other process, whose file must not be touched
        if f"memfd:{NAME}" not in os.readlink(path):
            raise FileNotFoundError(path)
        with open(path, "r+b") as file:
            return cls._map(file.fileno())

    @classmethod
    def of_rank(cls, agent: Mapping[str, Any]) -> "Record":
        """Open the record of this process. `agent`: the content of RANKUP_AGENT. Raises UserError in a process that a
        rank has started: it has the variable, but not the file."""
        try:
            return cls.at(agent["record"])
        except OSError:
            raise UserError(
                "rankup.init must be called in the process that `rankup launch` started, got a process that it has "
                "started itself. Call it there, or unset RANKUP_AGENT."
            ) from None

    @classmethod
    def _map(cls, file: int) -> "Record":
        memory = mmap.mmap(file, 0)
        record = cls.from_buffer(memory)
        record.clock, record.entered = PhaseClock("start"), ("", NO_LIMIT)
        record.commit = json.loads(memory[ctypes.sizeof(cls):])
        return record

    @property
    def path(self) -> str:
        """The path by which other processes open this record, while this process keeps it open."""
        return f"/proc/{os.getpid()}/fd/{self.file}"

    @property
    def place(self) -> str:
        """Where `alone.note` writes: this record's path, and the place of `alone` in it."""
        return f"{self.path}:{Record.alone.offset}"

    # What others read -----------------------------------------------------------------------------------------------

    def read(self) -> "Record":
        """Return a copy that no longer changes."""
        return Record.from_buffer_copy(self)

    @property
    def phase(self) -> str:
        return str(self._phase.name.decode(errors="replace"))

    @property
    def entered_s(self) -> float:
        """When the rank entered its phase or began its step, whichever is later."""
        return float(max(self._phase.entered_s, self.began_s))

    @property
    def timeout_s(self) -> float:
        """How long the phase may take, in seconds."""
        return float(self._phase.timeout_s)

    @property
    def until_s(self) -> float:
        """The deadline of the phase."""
        return float(self._phase.entered_s + self._phase.timeout_s)

    @property
    def stop_is_settled(self) -> bool:
        """Whether it is settled before which step this rank stops."""
        return self.stops_alone or bool(self.confirmed == self.stop < NO_STOP)

    @property
    def run_dir(self) -> Path | None:
        return Path(os.fsdecode(self._run_dir)) if self._named else None

    @property
    def on_end(self) -> str:
        return os.fsdecode(self._on_end)

    def heartbeat(self) -> dict[str, Any]:
        """Return where the rank is. `for_s`: seconds in this phase or step. `ago_s`: seconds since its heartbeat.
        `begun`: by process group, how many collectives the rank has begun."""
        now_s, location, begun = time.monotonic(), self._location.decode(errors="replace"), self._begun.decode()
        # A script that has not imported rankup yet, or never does, sends no heartbeats
        lived_s = now_s if self.phase in ("start", "script") else max(self.heartbeat_s, self.entered_s)
        return {
            "rank": self.rank, "phase": self.phase, "step": self.step, "location": location,
            "waiting": self.waiting or self._blocked,
            "for_s": round(now_s - self.entered_s, 1), "ago_s": now_s - lived_s,
            "batches": self.batches, "passes": self.passes,
            # A number may be read half written: the next heartbeat has it whole
            "begun": {name: int(n) for name, _, n in (each.partition("=") for each in begun.split()) if n.isdigit()},
        }

    # What the rank writes -------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Write that `step` begins now, within the present phase."""
        self.step, self.began_s = step, time.monotonic()

    def begin_anew(self, step: int) -> None:
        """Write that `step` begins now, and that the present phase and its timeout begin again with it."""
        # `struct` would fill the memory with zeros first, and the agent could read step 0
        self.waiting, self.step, now_s = False, step, time.monotonic()
        self._phase.entered_s = self.began_s = now_s

    def may_begin(self, step: int) -> bool | None:
        """Write that `step` begins, and return whether it may. False: the rank must stop before this step. None: the
        members have not agreed yet, so the rank must ask again in a moment."""
        if self.step != step:
            self.begin(step)
        if self.stops_alone:
            return False
        stop: int = self.stop  # read only after the step was written, see `ask_to_stop`
        if step < stop:
            return True
        return None if self.confirmed != stop else False

    def enter(self, phase: str, timeout_s: float = NO_LIMIT, *, since_s: float | None = None) -> None:
        """Begin `phase`, which may be the present one again. One thread at a time. `since_s`: its start, if not now."""
        self.clock.enter(phase)
        began_s = time.monotonic() if since_s is None else since_s
        self._write(began_s, timeout_s, phase)

    def extend(self, timeout_s: float) -> None:
        """Move the deadline of the present phase to `timeout_s` seconds from now."""
        entered_s = self._phase.entered_s
        self._write(entered_s, time.monotonic() - entered_s + timeout_s, self.phase)

    def _write(self, entered_s: float, timeout_s: float, phase: str) -> None:
        self.entered = (phase, timeout_s)
        self._phase = _Phase(entered_s, timeout_s, phase.encode(errors="replace")[:64])

    def name_run(self, run_dir: Path, on_end: str = "") -> None:
        """Write in which run's folder this rank's log is, and the command for the end of the job. A path that is too
        long is left out."""
        path, self._on_end = os.fsencode(run_dir.absolute()), os.fsencode(on_end)
        if len(path) < LONGEST:
            self._run_dir = path
            self._named = True  # only now, because the agent may read at any time

    def note_written(self, size: int) -> None:
        """Write that this rank has written `size` more bytes of its state. Two threads may lose one sum of two."""
        self.written += size

    def beat(self, location: str, *, blocked: bool = False, begun: Mapping[str, int] | None = None) -> None:
        """Write that this rank is alive, and its place in the program. Any thread may call this. `blocked`: it waits in
        a collective. `begun`: by process group, how many collectives it has begun."""
        self._blocked, begun = blocked, begun or {}
        self._location = location.encode(errors="replace")[:256]
        self._begun = "".join(f"{name}={count} " for name, count in begun.items()).encode()[:512].rpartition(b" ")[0]
        self.heartbeat_s = time.monotonic()

    # What its agent writes ------------------------------------------------------------------------------------------

    def ask_to_stop(self, step: int) -> int:
        """Make the rank wait before `step`. Returns the newest step that the rank has begun.

        The agent and the rank each write their own number and then read the other's, so at least one of them sees both.
        If this returns less than `step`, this rank will not begin `step`. Once `confirmed` is `step`, no rank will.
        """
        self.stop = step
        begun: int = self.step
        return begun
