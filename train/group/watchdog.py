"""Deadlines and signs of life: a hang always turns into an exit that names the suspect, and so does a lost rank.

Three threads run beside the loop. One waits until another rank reports a loss. One sends and hears signs of life
(`Beats`). One looks at the clock, and uses nothing that could block it: a store in a process that is stopped, or behind
a cable that is pulled, keeps the other two waiting without end. A process that is stopped itself (SIGSTOP, a frozen
node) does none of that: the other ranks find it.
"""

import functools
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from torch.distributed import Store  # type: ignore[attr-defined]

from rankup.errors import JOIN_FAILED, PEER_LOST, STOPPED, PeerLost
from train.group.beats import Beats, Sign
from train.group.ends import EndReporter
from train.group.failure_detector import LOOK_S, FailureDetector, Suspect, describe, root_exit_code
from train.group.last_stacks import LAST_STACKS_S, take_stacks
from train.process import flight_recorder, health, stacks
from train.process.exit import clear_hard_deadline, leave, set_hard_deadline, within
from train.process.log import Log
from train.process.phase_clock import PhaseClock
from train.process.places import moment, own_place
from train.process.status import tell_torchrun
from train.process.stop import FAREWELL_S, StopRequest

TICK_S = 0.2
# How long the loop gets to notice by itself that another rank's process is gone. It does so within milliseconds where a
# collective of gloo breaks. NCCL's do not break, nor does one whose other side is a third rank that is alive.
NOTICE_S = 0.05
# The same where the other rank ended with an error. The loop may be about to raise that error too (a mistake of the
# user shows on all ranks), and then says more about it than this rank's end for a lost peer would.
UNNOTICED_S = 10.0
UNNOTICED_WAITING_S = 1.0  # in a collective
# gloo was seen to wait without end for a rank that was killed while something was being sent to it. So while a rank
# waits in a collective, or gets no further, it does not accept that the next rank or the store is silent for longer
# than this. Long, because a machine with too much to do may look dead for a while. A rank that works for minutes (rank
# 0 writes to a slow disk) goes on beating.
NO_SIGN_S = 30.0
# How long a last word may take: the store may be the very thing that hangs, or be in use by the thread that hangs.
LAST_WORD_S = 5.0
# How long a rank that failed may take to find the cause, to report it and to leave.
LEAVING_S = 30.0
# How long after a deadline the kernel ends the process: for a hang that holds the interpreter's lock, so that no
# thread of ours runs. Long, because the thread that ends it properly may need most of LOOK_S + LAST_WORD_S on a busy
# machine.
LOCKED_GRACE_S = 60.0
# A phase that is entered anew at every step would set the kernel's timer thousands of times a second.
REARM_S = 5.0


class Keeper(Protocol):
    """Has the state that this process alone holds, and can write it to where the next attempt finds it."""

    def keep(self) -> None:
        """Write the state of the last finished step. Called once, from a thread of its own, while the main thread may
        be blocked in a collective or be in the middle of a step."""


class Watchdog:
    """The phase this rank is in, its deadline, and what the other ranks last reported."""

    def __init__(self, ends: EndReporter, stop: StopRequest, *, log: Log) -> None:
        """Starts the clock; from now on a stop request that cannot wait for the loop is carried out here."""
        self.ends, self.stop, self.log = ends, stop, log
        self.rank, self.world_size = ends.rank, ends.world_size
        self.hosts: Sequence[str] = [log.host] * self.world_size
        self.phase = "start"
        self.clock = PhaseClock(self.phase)
        self._entered_s = time.monotonic()
        self._timeout_s = 0.0
        self._ended = threading.Event()
        self._detector: FailureDetector | None = None  # once the ranks have met
        self._beats: Beats | None = None  # likewise
        self._quiet = threading.Event()
        self.peer_gone = False  # also of a peer that went after `end_beats`
        self._waiting = False  # inside a collective: the others are to blame, not this rank
        self._leaving: int | None = None  # the exit code, once the loop has failed and this process is about to end
        self._leave_lock = threading.Lock()
        self._keeper: Keeper | None = None
        self._keep_timeout_s = 0.0
        self._keep_lock = threading.Lock()
        stop.guarded = True
        threading.Thread(target=self._watch_clock, name="deadlines", daemon=True).start()
        health.report(self.rank, self.state, self._ended)

    def state(self) -> dict[str, Any]:
        """Where this rank stands, and since when."""
        return {
            "phase": self.phase, "step": self.ends.step, "waiting": self._waiting, "entered_s": self._entered_s,
            "timeout_s": self._timeout_s,
        }

    def signs_of_life(self) -> list[Sign]:
        """Where each rank stood when this one last heard of it, in the order of the ranks.

        Keys: rank, host, phase, step, waiting, for_s, which is how long it had been there, place, in the program, and
        seen, in seconds of `time.time()`. Rank 0 knows all ranks from their first beat on, others only themselves.
        Callable from any thread; asks nobody.
        """
        others = self._beats.others if self._beats else {}
        signs = others | {self.rank: {**self._sign(), "rank": self.rank, "seen": time.time()}}
        return [signs[rank] for rank in sorted(signs)]

    def _sign(self) -> Sign:
        return {
            "host": self.log.host, "phase": self.phase, "step": self.ends.step, "waiting": self._waiting,
            "for_s": round(time.monotonic() - self._entered_s, 1), "place": self._place(),
        }

    def enter(
        self, phase: str, timeout_s: float, *, step: int | None = None, since_s: float | None = None
    ) -> None:
        """Begin a phase, with a deadline `timeout_s` seconds from now (0: none). Entering it anew moves the deadline.

        `since_s`: the phase began earlier, at this time of `time.monotonic()`, and its deadline counts from there.
        """
        self.clock.enter(phase)
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
        if step is not None:
            self.ends.step = step
        stacks.note(phase, self.ends.step)

    @property
    def at_step(self) -> str:
        """For messages: where this rank stands."""
        return f" at step {self.ends.step}"

    def wait_for_others(self, waiting: bool) -> None:
        """Say that this rank is about to wait in a collective, or has left it."""
        self._waiting = waiting

    def connect(self, store: Store, hosts: Sequence[str], *, agent_store: bool) -> None:
        """Begin to beat, and to wait for losses. `store` must be a connection of its own: a collective's set-up blocks
        the one it uses."""
        self.hosts = hosts
        holder = "the launcher's agent on node 0" if agent_store else f"rank 0 on {hosts[0]}"
        self._detector = FailureDetector(store, self.rank, self.world_size, holder=holder)
        threading.Thread(target=self._await_loss, args=(self._detector,), name="losses", daemon=True).start()
        self._beats = Beats(store, self.rank, self.world_size, self._sign)
        threading.Thread(target=self._beats.send, args=(self._quiet,), name="beats", daemon=True).start()

    def protect(self, keeper: Keeper, *, timeout_s: float) -> None:
        """From now on call `keeper.keep()` before this process ends because of a lost peer or a deadline. It gets
        `timeout_s` seconds."""
        self._keeper, self._keep_timeout_s = keeper, timeout_s

    def end_beats(self) -> None:
        """All ranks are done: no more beats, and a rank or the store that goes is no loss from now on."""
        self._quiet.set()

    def exit_within(self, code: int) -> None:
        """This rank is about to end with `code`: LEAVING_S later it ends, however long its teardown takes."""
        self._leaving = code
        self._extend(LEAVING_S)

    def _extend(self, timeout_s: float) -> None:
        """A new deadline for the same phase: the others read from the beats what this rank was doing."""
        set_hard_deadline(timeout_s + LOCKED_GRACE_S)
        self._entered_s, self._timeout_s = time.monotonic(), timeout_s

    def end(self) -> None:
        """No more deadlines and beats."""
        self._quiet.set()
        self.stop.guarded = False
        self._ended.set()
        clear_hard_deadline()

    # Threads --------------------------------------------------------------------------------------------------

    def _await_loss(self, detector: FailureDetector) -> None:
        """Leave soon after another rank has failed, unless the loop notices that by itself."""
        detector.wait_for_failure()
        since_s = time.monotonic()
        while True:
            gone = self.peer_gone = detector.look()
            if self._quiet.wait(NOTICE_S):
                break
            waiting = self._waiting or self.phase == "join"
            patience_s = UNNOTICED_WAITING_S if waiting else UNNOTICED_S
            # Without a keeper the checkpoint that this rank writes is all that will be left
            if gone and (waiting or self.phase != "save" or self._keeper is not None):
                patience_s = 0.0
            if time.monotonic() - since_s > patience_s:
                self._leave(f"lost a peer{self.at_step}", hung=False)

    def _watch_clock(self) -> None:
        armed_s = silent_s = 0.0
        heard = -1
        while not self._ended.wait(TICK_S):
            if why := self.stop.leave_now:
                leave(STOPPED, functools.partial(self.ends.report_stop, why), timeout_s=FAREWELL_S)
            # Counted by ticks: a process that was stopped itself and goes on has missed the others' beats meanwhile
            heard_before, heard = heard, self._beats.heard if self._beats else -1
            silent_s = silent_s + TICK_S if heard == heard_before >= 0 else 0.0
            now_s = time.monotonic()
            # Collectives that torch begins by itself (fsdp's forward) are not announced: a rank that gets no further
            # may be in one. But rank 0 shall get to the end of what it writes in a save
            stuck = self._waiting or (self.phase != "save" and now_s - self._entered_s > NO_SIGN_S)
            if stuck and silent_s > NO_SIGN_S and self._leaving is None and not self._quiet.is_set():
                self._leave(f"waited in vain{self.at_step}")
            if self._timeout_s <= 0:
                continue
            if now_s - armed_s > REARM_S:
                set_hard_deadline(self._timeout_s + LOCKED_GRACE_S)
                armed_s = now_s
            if now_s - self._entered_s > self._timeout_s and not self._ended.is_set():
                if self._leaving is not None:
                    leave(self._leaving)
                what = f"{self.phase} (step {self.ends.step}) took longer than {self._timeout_s:g} s"
                self._leave(what, overdue=True)

    def _leave(self, what: str, *, overdue: bool = False, hung: bool = True) -> None:
        """Dump the stacks, name the suspect, tell the others, and end this process at once.

        `hung`: as far as this rank knows no process has ended.
        """
        with self._leave_lock:  # two threads may find a reason; the second never gets here
            set_hard_deadline(LAST_STACKS_S + LOOK_S + LAST_WORD_S + LOCKED_GRACE_S)
            otherwise = JOIN_FAILED if overdue and self.phase == "join" else PEER_LOST
            said = []
            if self._leaving is None:
                said = take_stacks(what, self.rank, self._place(), self._detector, hung=hung)
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
                flight_recorder.dump(self.rank)  # last: while NCCL hangs, this may hang too
                return told

            leave(code, last_word, timeout_s=LAST_WORD_S)

    def _place(self) -> str:
        """Where the main thread is: "all_reduce (loop.py:213 step) of step 413"."""
        return own_place() + moment(self.phase, self.ends.step)

    def suspects(self, *, overdue: bool = False) -> list[Suspect]:
        """Report that this rank lost a peer, keep what it holds, and find out which; the most likely suspect first.

        `overdue`: this rank's own deadline has passed.
        """
        self.ends.report_loss()  # first: who has not noticed yet wakes up while this rank writes
        self._keep()
        return self._detector.suspects(waiting=self._waiting, overdue=overdue) if self._detector else []

    def _keep(self) -> None:
        """Have the keeper write, once. A second caller waits for the first: the process must not end meanwhile."""
        with self._keep_lock:
            keeper, self._keeper = self._keeper, None
            if keeper is None:
                return
            self._extend(self._keep_timeout_s + LEAVING_S)
            within(self._keep_timeout_s, keeper.keep)
            self._extend(LEAVING_S)
