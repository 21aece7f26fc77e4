"""Deadlines and signs of life: a hang always turns into an exit that names the suspect.

Two threads beside the loop: one beats through the store, so that others can tell who is alive and where it stands;
one looks at the clock and touches nothing that could block it. A process that is stopped (SIGSTOP, a frozen node)
does neither: the others find it.
"""

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# torch exports these under a condition that mypy does not follow
from torch.distributed import Store  # type: ignore[attr-defined]

from train import health
from train.errors import JOIN_FAILED, PEER_LOST
from train.log import Log
from train.status import End

BEAT_S = 0.5
SILENT_S = 2.0  # no beat for this long, and no end told: lost
TICK_S = 0.2
# The last resort, by a C thread that needs no interpreter lock: for a hang that holds it.
LOCKED_GRACE_S = 60.0
# How long the loop may take to notice by itself that a peer told it had failed: collectives on a GPU don't.
UNNOTICED_S = 10.0
UNNOTICED_JOINING_S = 1.0  # gloo's passive side, which waits to be called, never does
# How long a last word may take: its store may be the very thing that hangs, or be held by the thread that does.
LAST_WORD_S = 5.0


@dataclass(frozen=True, slots=True)
class Suspect:
    """Who is to blame and why; `end` where that rank told it itself."""

    rank: int
    why: str
    end: End | None = None


class Watch:
    """The phase this rank is in, its deadline, and what the other ranks last said."""

    def __init__(self, log: Log, *, rank: int, world_size: int) -> None:
        self.log, self.rank, self.world_size = log, rank, world_size
        self.hosts: list[str] = [log.host] * world_size
        self.host_of_store = "rank 0"
        self.store: Store | None = None
        self.phase, self.step = "start", 0
        self.before_exit: Callable[[int, str], None] = lambda code, why: None
        self._entered_s = time.monotonic()
        self._timeout_s = 0.0
        self._ended = threading.Event()
        self._told: list[Suspect] = []
        self._quiet = threading.Event()
        self._beats: threading.Thread | None = None
        self._waiting = False  # inside a collective: the others are to blame, not this rank
        threading.Thread(target=self._watch_clock, name="deadlines", daemon=True).start()
        health.report(rank, self.state, self._ended)

    def state(self) -> dict[str, Any]:
        """Where this rank stands, and since when."""
        return {
            "phase": self.phase, "step": self.step, "waiting": self._waiting, "entered_s": self._entered_s,
            "timeout_s": self._timeout_s,
        }  # fmt: skip

    def enter(self, phase: str, timeout_s: float, *, step: int | None = None) -> None:
        """Begin a phase, with a deadline `timeout_s` seconds from now. Entering it anew moves the deadline."""
        self.phase, self._timeout_s, self._entered_s = phase, timeout_s, time.monotonic()
        self._waiting = False
        if step is not None:
            self.step = step

    def wait_for_others(self, waiting: bool) -> None:
        """Say that this rank is about to wait in a collective, or has left it."""
        self._waiting = waiting

    def connect(self, store: Store, hosts: list[str], *, agent_store: bool) -> None:
        """Begin to beat. `store` must be a connection of its own."""
        self.store, self.hosts = store, hosts
        self.host_of_store = "the launcher's agent on node 0" if agent_store else f"rank 0 on {hosts[0]}"
        self._beats = threading.Thread(target=self._beat, name="beats", daemon=True)
        self._beats.start()

    def end_beats(self) -> None:
        """No more beats: the store may go from now on."""
        self._quiet.set()
        if self._beats is not None:
            self._beats.join(BEAT_S)

    def end(self) -> None:
        """No more deadlines and beats."""
        self._quiet.set()
        self._ended.set()
        faulthandler.cancel_dump_traceback_later()

    # Threads --------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        assert self.store is not None
        count, failed_since_s = 0, 0.0
        while not self._quiet.wait(BEAT_S):
            count += 1
            try:
                state = {"n": count, "phase": self.phase, "step": self.step, "waiting": self._waiting}
                self.store.set(f"beat/{self.rank}", json.dumps(state))
                failed = self.store.check(["failed"])
                if failed and not self._told:
                    # Kept: rank 0's store goes with it, before a collective breaks here
                    others = {rank: _end(self.store, rank) for rank in range(self.world_size) if rank != self.rank}
                    self._told = _guilty(others)
            except RuntimeError:
                failed = True  # the store's process is gone
            failed_since_s = (failed_since_s or time.monotonic()) if failed else 0.0
            patience_s = UNNOTICED_JOINING_S if self.phase == "join" else UNNOTICED_S
            if failed and time.monotonic() - failed_since_s > patience_s and not self._quiet.is_set():
                self._leave("a rank failed and this one did not notice by itself")

    def _watch_clock(self) -> None:
        armed_s = 0.0
        while not self._ended.wait(TICK_S):
            now_s = time.monotonic()
            if self._timeout_s <= 0:
                continue
            if now_s - armed_s > 5.0:
                faulthandler.dump_traceback_later(self._timeout_s + LOCKED_GRACE_S, exit=True)
                armed_s = now_s
            if now_s - self._entered_s > self._timeout_s and not self._ended.is_set():
                what = f"{self.phase} (step {self.step}) took longer than {self._timeout_s:g} s"
                self._leave(what)

    def _leave(self, what: str) -> None:
        """Dump the stacks, name the suspect, tell the others, and end this process at once."""
        if self.log.file is not None:
            faulthandler.dump_traceback(self.log.file.fileno())
        suspects = self.suspects_within(5.0)
        why = f"{what}; {describe(suspects, self.hosts)}"
        self.log.warn(f"{why}. The stacks of all threads are in logs/rank-{self.rank}.log")
        code = code_of_cause(suspects, JOIN_FAILED if self.phase == "join" else PEER_LOST)
        thread = threading.Thread(target=self.before_exit, args=(code, why), daemon=True)
        thread.start()
        thread.join(LAST_WORD_S)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    # Suspects -------------------------------------------------------------------------------------------------

    def suspects_within(self, timeout_s: float) -> list[Suspect]:
        """`find_suspects`, in a thread of its own: a store whose process is stopped would hold us for ever."""
        found: list[list[Suspect]] = []
        if self.store is None:
            return []
        store = self.store

        def look() -> None:
            try:
                found.append(find_suspects(store.clone(), self.world_size, myself=self.rank))
            except RuntimeError:
                return

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        thread.join(timeout_s)
        if found:
            return found[0]
        return self._told or [Suspect(0, f"the store of {self.host_of_store} does not answer")]


def find_suspects(store: Store, world_size: int, *, myself: int) -> list[Suspect]:
    """Who is to blame, most likely first: ranks that failed by themselves, then silent ones, then those behind.

    Returns as soon as that is settled, at the latest after SILENT_S: every survivor of a lost peer tells its end at once,
    which leaves the lost ones.
    """
    others = [rank for rank in range(world_size) if rank != myself]
    first: dict[int, str] = {}
    began_s = time.monotonic()
    while True:
        ends = {rank: _end(store, rank) for rank in others}
        if guilty := _guilty(ends):
            return guilty
        silent = []
        for rank in (rank for rank in others if ends[rank] is None):
            beat = store.get(f"beat/{rank}").decode() if store.check([f"beat/{rank}"]) else ""
            if first.setdefault(rank, beat) == beat:
                silent.append(rank)
        waited_s = time.monotonic() - began_s
        settled = waited_s > 2 * BEAT_S and len(silent) == 1 and all(ends[r] for r in others if r not in silent)
        if waited_s > SILENT_S or settled:
            break
        time.sleep(0.1)
    if silent:
        return [Suspect(rank, "gave no sign of life") for rank in silent]
    told = [end.suspect for end in ends.values() if end is not None and end.suspect is not None]
    if told:
        return [Suspect(told[0], "was lost, as another rank says")]
    return _behind(store, others)


def _guilty(ends: dict[int, End | None]) -> list[Suspect]:
    """Those that told of an end of their own making."""
    guilty = [Suspect(r, e.why, e) for r, e in ends.items() if e is not None and e.code not in (0, PEER_LOST)]
    return sorted(guilty, key=lambda s: (s.end.code if s.end else 0, s.rank))


def _behind(store: Store, others: list[int]) -> list[Suspect]:
    """All are alive: those not waiting in a collective keep the rest waiting; otherwise those of the lowest step."""
    beats = {r: json.loads(store.get(f"beat/{r}")) for r in others if store.check([f"beat/{r}"])}
    busy = [r for r, beat in beats.items() if not beat["waiting"]]
    return [Suspect(r, f"is alive, in {beats[r]['phase']} at step {beats[r]['step']}") for r in busy]


def _end(store: Store, rank: int) -> End | None:
    return End.from_json(store.get(f"end/{rank}")) if store.check([f"end/{rank}"]) else None


def code_of_cause(suspects: list[Suspect], otherwise: int) -> int:
    """The cause decides whether trying again helps: a user's mistake or a fault on one rank ends all as such."""
    told = [suspect.end.code for suspect in suspects[:1] if suspect.end is not None]
    return told[0] if told and 0 < told[0] < 128 else otherwise


def describe(suspects: list[Suspect], hosts: list[str]) -> str:
    """One clause: "suspected: rank 3 on node1 (gave no sign of life)"."""
    if not suspects:
        return "suspected: this rank itself, the others wait for it"
    return "suspected: " + ", ".join(f"rank {s.rank} on {hosts[s.rank]} ({s.why})" for s in suspects[:4])
