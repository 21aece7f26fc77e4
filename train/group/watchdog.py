"""Deadlines and signs of life: a hang always turns into an exit that names the suspect.

Two threads beside the loop: one beats through the store, so that others can tell who is alive and where it stands;
one looks at the clock and touches nothing that could block it. A process that is stopped (SIGSTOP, a frozen node)
does neither: the others find it.
"""

import faulthandler
import json
import threading
import time
from collections.abc import Callable
from typing import Any

# torch exports these under a condition that mypy does not follow
from torch.distributed import Store  # type: ignore[attr-defined]

from train.errors import JOIN_FAILED, PEER_LOST, PeerLost
from train.group.failure_detector import (
    BEAT_S,
    LOOK_S,
    Suspect,
    describe,
    ends_of,
    failed_first,
    find_suspects,
    reported_by_peers,
    root_exit_code,
)
from train.process import health
from train.process.exit import clear_hard_deadline, leave, set_hard_deadline, within
from train.process.log import Log
from train.process.status import UNDECIDED, End, tell_torchrun

TICK_S = 0.2
# How long the loop may take to notice by itself that a peer failed: collectives on a GPU don't.
UNNOTICED_S = 10.0
# Inside a collective nothing else can come: its other side may be a third rank that has not noticed either, and in the join
# gloo's passive side, which waits to be called, never does.
UNNOTICED_WAITING_S = 1.0
# How long a last word may take: its store may be the very thing that hangs, or be held by the thread that does.
LAST_WORD_S = 5.0
# How long a rank that failed may take to find the cause, to tell it and to leave.
LEAVING_S = 30.0
# The last resort, by the kernel: for a hang that holds the interpreter lock, so that no thread of ours runs.
LOCKED_GRACE_S = 60.0
REARM_S = 5.0


class Watchdog:
    """The phase this rank is in, its deadline, and what the other ranks last said."""

    def __init__(self, log: Log, *, rank: int, world_size: int) -> None:
        self.log, self.rank, self.world_size = log, rank, world_size
        self.hosts: list[str] = [log.host] * world_size
        self.host_of_store = "rank 0"
        self.store: Store | None = None
        self.phase, self.step = "start", 0
        self.before_exit: Callable[[int, str, int | None], None] = lambda code, why, suspect: None
        self._entered_s = time.monotonic()
        self._timeout_s = 0.0
        self._ended = threading.Event()
        self._told: list[Suspect] = []
        self._quiet = threading.Event()
        self._beats: threading.Thread | None = None
        self._waiting = False  # inside a collective: the others are to blame, not this rank
        self._leaving: int | None = None  # with this code
        self._leave_lock = threading.Lock()
        threading.Thread(target=self._watch_clock, name="deadlines", daemon=True).start()
        health.report(rank, self.state, self._ended)

    def state(self) -> dict[str, Any]:
        """Where this rank stands, and since when."""
        return {
            "phase": self.phase, "step": self.step, "waiting": self._waiting, "entered_s": self._entered_s,
            "timeout_s": self._timeout_s,
        }

    def enter(self, phase: str, timeout_s: float, *, step: int | None = None) -> None:
        """Begin a phase, with a deadline `timeout_s` seconds from now. Entering it anew moves the deadline."""
        if phase != self.phase:
            set_hard_deadline(timeout_s + LOCKED_GRACE_S)
        self._entered_s = time.monotonic()  # first: the clock's thread must never see a shorter time with the old beginning
        self.phase, self._timeout_s = phase, timeout_s
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

    def exit_within(self, code: int) -> None:
        """This rank is about to end with `code`: see to it that it does, however long its teardown would take."""
        self._leaving = code
        self.enter("leaving", LEAVING_S)

    def end(self) -> None:
        """No more deadlines and beats."""
        self._quiet.set()
        self._ended.set()
        clear_hard_deadline()

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
                if failed:
                    # Kept: rank 0's store goes with it, before a collective breaks here
                    ends = ends_of(self.store, self.world_size, myself=self.rank)
                    self._told = failed_first(ends) or reported_by_peers(ends) or self._told
            except RuntimeError:
                failed = True  # the store's process is gone
            failed_since_s = (failed_since_s or time.monotonic()) if failed else 0.0
            patience_s = UNNOTICED_WAITING_S if self._waiting or self.phase == "join" else UNNOTICED_S
            if failed and time.monotonic() - failed_since_s > patience_s and not self._quiet.is_set():
                self._leave(f"lost a peer at step {self.step}")

    def _watch_clock(self) -> None:
        armed_s = 0.0
        while not self._ended.wait(TICK_S):
            now_s = time.monotonic()
            if self._timeout_s <= 0:
                continue
            if now_s - armed_s > REARM_S:
                set_hard_deadline(self._timeout_s + LOCKED_GRACE_S)
                armed_s = now_s
            if now_s - self._entered_s > self._timeout_s and not self._ended.is_set():
                if self._leaving is not None:
                    leave(self._leaving)
                self._leave(f"{self.phase} (step {self.step}) took longer than {self._timeout_s:g} s", overdue=True)

    def _leave(self, what: str, *, overdue: bool = False) -> None:
        """Dump the stacks, name the suspect, tell the others, and end this process at once."""
        with self._leave_lock:  # two threads may find a reason; the second never gets here
            set_hard_deadline(LOOK_S + LAST_WORD_S + LOCKED_GRACE_S)
            if self._leaving is None and self.log.file is not None:
                faulthandler.dump_traceback(self.log.file.fileno())
            suspects = self.suspects(overdue=overdue) if self._leaving is None else []
            if self._leaving is not None:
                return  # the loop noticed by itself, and may know more
            code = root_exit_code(suspects, JOIN_FAILED if self.phase == "join" else PEER_LOST)
            suspect = suspects[0].rank if suspects else None
            why = what if self.world_size == 1 else f"{what}: {describe(suspects, self.hosts)}"
            self.log.warning(f"{why}. The stacks of all threads are in logs/rank-{self.rank}.log (exit code {code})")

            def last_word() -> None:
                tell_torchrun(TimeoutError(why) if suspect in (None, self.rank) else PeerLost(why))
                self.before_exit(code, why, suspect)

            leave(code, last_word, timeout_s=LAST_WORD_S)

    def suspects(self, *, overdue: bool = False) -> list[Suspect]:
        """Tell the others that this rank is a victim, and find out whose. In a thread of its own: a store whose process is
        stopped would hold us for ever. `overdue`: this rank's own deadline has passed.

        Over the connection there is: it breaks with the process that hosts the store, where a new one would be tried again
        and again, or meet a successor.
        """
        if self.store is None:
            return []
        store, found = self.store, list[list[Suspect]]()
        victim = End(self.rank, self.log.host, UNDECIDED, PEER_LOST, "a peer was lost", self.step)

        def look() -> None:
            try:
                # That leaves the culprit as the only one that told nothing, and wakes those that have not noticed
                store.set(f"end/{self.rank}", victim.to_json())
                store.set("failed", str(self.rank))
                found.append(find_suspects(store, self.world_size, myself=self.rank, waiting=self._waiting))
            except RuntimeError:
                # Where this rank is the one that takes too long, those that waited for it have left, and the store with them
                own = [Suspect(self.rank, "the others have left")] if overdue and not self._waiting else []
                found.append(self._told or own or [Suspect(0, f"the store of {self.host_of_store} is gone")])

        within(LOOK_S, look)
        return found[0] if found else [Suspect(0, f"the store of {self.host_of_store} does not answer")]
