"""Deadlines and signs of life: a hang always turns into an exit that names the suspect, and so does a lost rank.

One thread runs beside the loop. It looks at the clock, and at what the line to the others has said (`Losses`); it uses
nothing that could block it. A process that is stopped itself (SIGSTOP, a frozen node) does none of that: the others
find it by its silence.
"""

import functools
import logging
import math
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from rankup.agent.logs import host_name
from rankup.agent.processes import clear_hard_deadline, leave, set_hard_deadline, within
from rankup.agent.record import NO_LIMIT, RecordWriter
from rankup.agent.status import tell_torchrun
from rankup.errors import JOIN_FAILED, PEER_LOST, STOPPED, PeerLost
from rankup.group import stacks
from rankup.group.ends import EndReporter
from rankup.group.losses import Losses, Suspect, describe, root_exit_code
from rankup.group.stacks import COMPARE, compare, moment, own_place
from rankup.group.stop import StopRequest
from rankup.timing import (
    ALIVE_S,
    CAUSE_S,
    FAILED_S,
    FAILED_WAITING_S,
    GONE_S,
    LEAVING_S,
    LINGER_S,
    LOCKED_GRACE_S,
    PARTING_S,
    REARM_S,
    REPORT_END_S,
    STACKS_S,
    TICK_S,
)


class Keeper(Protocol):
    """Has the state that this process alone holds, and can write it to where the next attempt finds it."""

    def keep(self) -> None:
        """Write the state of the last finished step. Called once, from a thread of its own, while the main thread may
        be blocked in a collective or be in the middle of a step."""

    def keep_for_stop(self) -> str:
        """The same where the job is to stop, and may go on elsewhere. Returns what to say of it; "" where this process
        alone can not keep the state."""


class Watchdog:
    """The phase this rank is in, its deadline, and what the other ranks last reported."""

    def __init__(self, ends: EndReporter, stop: StopRequest, *, record: RecordWriter, log: logging.Logger) -> None:
        """Starts the clock; from now on a stop request that cannot wait for the loop is carried out here."""
        self.ends, self.stop, self.record, self.log = ends, stop, record, log
        self.rank, self.world_size = ends.rank, ends.world_size
        self.hosts: Sequence[str] = [host_name()] * self.world_size
        self.phase = "start"
        self.clock = record.clock
        self._entered_s = time.monotonic()
        self._timeout_s = 0.0
        self._ended = threading.Event()
        self._losses: Losses | None = None  # once the ranks have met
        self._woken = threading.Event()  # by a loss, or the end
        self._quiet = False  # all ranks are done
        self._waiting = False  # inside a collective: the others are to blame, not this rank
        self._leaving: int | None = None  # the exit code, once the loop has failed and this process is about to end
        self._leave_lock = threading.Lock()
        self._keeper: Keeper | None = None
        self._keep_timeout_s = 0.0
        self._keep_lock = threading.Lock()
        self._stop_lock = threading.Lock()
        self._stopping = False  # this thread ends the process, and keeps the state for that
        self._settled = False
        stop.guarded = True
        threading.Thread(target=self._watch_clock, name="deadlines", daemon=True).start()

    def signs_of_life(self) -> list[dict[str, Any]]:
        """Where each rank stood when it last said so, in the order of the ranks.

        Keys: rank, host, phase, step, waiting, for_s, which is how long it had been there, place, in the program, and
        seen, in seconds of `time.time()`. Any thread may call it.
        """
        self.record.set_place(self._place())
        own = {**self.record.read().sign(), "host": host_name(), "seen": time.time()}
        others = self._losses.signs() if self._losses is not None else []
        return sorted([own, *(sign for sign in others if sign["rank"] != self.rank)], key=lambda sign: sign["rank"])

    def enter(
        self, phase: str, timeout_s: float, *, step: int | None = None, since_s: float | None = None
    ) -> None:
        """Begin a phase, with a deadline `timeout_s` seconds from now (0: none). Entering it anew moves the deadline.

        `since_s`: the phase began earlier, at this time of `time.monotonic()`, and its deadline counts from there.
        """
        if timeout_s == 0:
            clear_hard_deadline()
        elif phase != self.phase:
            set_hard_deadline(timeout_s + LOCKED_GRACE_S)
        # First: the clock must never see the new, shorter time with the old beginning
        self._entered_s = time.monotonic()
        self.phase, self._timeout_s = phase, timeout_s
        if since_s is not None:
            self._entered_s = since_s
        self._waiting = False
        self.record.wait(False)
        self.record.enter(phase, timeout_s or NO_LIMIT, since_s=since_s)
        if step is not None:
            self.ends.step = step
            self.record.begin(step)
        stacks.note(phase, self.ends.step)

    @property
    def at_step(self) -> str:
        """For messages: where this rank stands."""
        return f" at step {self.ends.step}"

    def wait_for_others(self, waiting: bool) -> None:
        """Say that this rank is about to wait in a collective, or has left it."""
        self._waiting = waiting
        self.record.wait(waiting)

    def watch(self, losses: Losses, hosts: Sequence[str]) -> None:
        """Begin to look for losses."""
        self.hosts, self._losses = hosts, losses
        losses.notify(self._woken)

    def protect(self, keeper: Keeper, *, timeout_s: float) -> None:
        """From now on call `keeper.keep()` before this process ends because of a lost peer or a deadline. It gets
        `timeout_s` seconds."""
        self._keeper, self._keep_timeout_s = keeper, timeout_s

    def settle(self) -> None:
        """This rank begins no further step: it saves and leaves with the others, however long that takes."""
        with self._stop_lock:
            self._settled = True
        self.wait_if_leaving()
        self.record.settle()

    def wait_if_leaving(self) -> None:
        """Never return where this process is about to end for a stop."""
        with self._stop_lock:
            stopping = self._stopping
        if stopping:
            threading.Event().wait()

    def all_done(self) -> None:
        """All ranks are done: one that goes is no loss from now on."""
        self._quiet = True

    def exit_within(self, code: int) -> None:
        """This rank is about to end with `code`: LEAVING_S later it ends, however long its teardown takes."""
        self._leaving = code
        self._extend(LEAVING_S)

    def _extend(self, timeout_s: float) -> None:
        """A new deadline for the same phase: the others still see what this rank was doing."""
        set_hard_deadline(timeout_s + LOCKED_GRACE_S)
        self._entered_s, self._timeout_s = time.monotonic(), timeout_s

    def end(self) -> None:
        """No more deadlines."""
        self._quiet, self.stop.guarded = True, False
        self._ended.set()
        self._woken.set()
        clear_hard_deadline()

    # The thread -----------------------------------------------------------------------------------------------

    def _watch_clock(self) -> None:
        armed_s = placed_s = lost_s = 0.0
        while True:
            if lost_s:
                self._ended.wait(GONE_S)
            else:
                self._woken.wait(TICK_S)
            if self._ended.is_set():
                return
            now_s = time.monotonic()
            if why := self.stop.leave_now:
                leave(STOPPED, functools.partial(self.ends.report_stop, why), timeout_s=PARTING_S)
            if self._losses is not None and self._losses.must_leave:
                self._losses.must_leave = False
                self._leave_for_stop()
            if now_s - placed_s > ALIVE_S:
                self.record.set_place(self._place())
                placed_s = now_s
            if self._woken.is_set():
                lost_s = lost_s or now_s
                if self._losses is not None and now_s - lost_s > self._patience_s(self._losses):
                    self._leave(f"lost a peer{self.at_step}", hung=self._losses.hang)
            if self._timeout_s <= 0:
                continue
            if now_s - armed_s > REARM_S:
                set_hard_deadline(self._timeout_s + LOCKED_GRACE_S)
                armed_s = now_s
            if self._overdue and not self._ended.is_set():
                if self._leaving is not None:
                    leave(self._leaving)
                self._leave("")

    def _leave_for_stop(self) -> None:
        """The ranks do not come to the step at which all would stop: keep the last finished one, and leave."""
        with self._stop_lock:
            if self._settled or self._keeper is None:
                return
            self._stopping = True
        with self._keep_lock:
            keeper = self._keeper
            self._extend(self._keep_timeout_s + LEAVING_S)
            why = within(self._keep_timeout_s, keeper.keep_for_stop) if keeper is not None else None
        if why == "":  # it takes all ranks, so they go on until they come to that step
            self._stopping = False
            return
        why = why or f"{self.stop.signal_name}: the state could not be kept"
        self.log.info(why)
        leave(STOPPED, lambda: self.ends.report(STOPPED, why, together=True), timeout_s=REPORT_END_S)

    def _patience_s(self, losses: Losses) -> float:
        """How long after a loss this rank's loop may take to notice it by itself."""
        if self._quiet:
            return math.inf
        waiting = self._waiting or self.phase == "join"
        # Without a keeper the checkpoint that this rank writes is all that will be left
        if losses.hang or (losses.gone and (waiting or self.phase != "save" or self._keeper is not None)):
            return 0.0
        return FAILED_WAITING_S if waiting else FAILED_S

    @property
    def _overdue(self) -> bool:
        return 0 < self._timeout_s < time.monotonic() - self._entered_s

    def _leave(self, what: str, *, hung: bool = True) -> None:
        """Dump the stacks, name the suspect, tell the others, and end this process at once.

        `what`: has happened, unless the deadline has passed. `hung`: as far as this rank knows no process has ended.
        """
        with self._leave_lock:  # two threads may find a reason; the second never gets here
            set_hard_deadline(STACKS_S + REPORT_END_S + LOCKED_GRACE_S)
            overdue = self._overdue and self._leaving is None
            if overdue:
                what = f"{self.phase} (step {self.ends.step}) took longer than {self._timeout_s:g} s"
            otherwise = JOIN_FAILED if overdue and self.phase == "join" else PEER_LOST
            said = self._take_stacks(what, hung=hung or overdue) if self._leaving is None else []
            suspects = self.suspects(overdue=overdue) if self._leaving is None else []
            if self._leaving is not None:
                return  # the loop noticed by itself, and may know more
            code = root_exit_code(suspects, otherwise)
            suspect = suspects[0] if suspects else None
            why = what if self.world_size == 1 else f"{what}: {describe(suspects, self.hosts)}"
            self.log.warning("\n".join([f"{why} (exit code {code})", *said]))

            def last_word() -> int:
                tell_torchrun(PeerLost(why) if suspect and suspect.rank != self.rank else TimeoutError(why))
                told = self.ends.report_from_outside(code, why, suspect)
                if overdue and self.world_size > 1:
                    time.sleep(LINGER_S)
                stacks.dump_collectives(self.rank)  # last: while NCCL hangs, this may hang too
                return told

            leave(code, last_word, timeout_s=REPORT_END_S)

    def _take_stacks(self, why: str, *, hung: bool) -> list[str]:
        """Write the stacks of this rank. Returns lines for its log: where all ranks are, and which files say more.

        `hung`: no process has ended as far as this rank knows; if one has, the others wait for its successor, and this
        one makes haste.
        """
        file = within(STACKS_S, lambda: stacks.dump(why, workers=hung))  # first: an answer of the others takes longer
        lines = ["; ".join(compare({sign["rank"]: sign["place"] for sign in self.signs_of_life()}))] if hung else []
        if file:
            lines.append(f"the stacks of all threads are in {file}")
        if file := stacks.recorded(self.rank):
            lines.append(
                f"The last collectives of NCCL are in {file}; `{COMPARE} {file.parent}` compares those of all ranks"
            )
        return lines

    def _place(self) -> str:
        """Where the main thread is: "all_reduce (loop.py:213 step) of step 413"."""
        return own_place() + moment(self.phase, self.ends.step)

    def suspects(self, *, overdue: bool = False) -> list[Suspect]:
        """Keep what this rank holds, and find out which rank was lost; the most likely suspect first.

        `overdue`: this rank's own deadline has passed. Else the line may be about to say it.
        """
        self._keep()
        if self._losses is None:
            return []
        if not overdue:
            self._losses.wait(CAUSE_S)
        return self._losses.suspects(waiting=self._waiting, overdue=overdue)

    def _keep(self) -> None:
        """Have the keeper write, once. A second caller waits for the first: the process must not end meanwhile."""
        with self._keep_lock:
            keeper, self._keeper = self._keeper, None
            if keeper is None:
                return
            self._extend(self._keep_timeout_s + LEAVING_S)
            within(self._keep_timeout_s, keeper.keep)
            self._extend(LEAVING_S)
