"""Deadlines, and how this rank ends: a hang always turns into an exit that names the suspect.

The thread of `rankup.group.stop` looks at the clock, and at what the line to the others has said; it does nothing that
could block it. A rank that has to go does so in a thread of its own. A process that is stopped itself (SIGSTOP, a
frozen node) does none of that: the others find it by its silence. No torch here.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from rankup import timing
from rankup.agent.ends import End, StatusFile, tell_torchrun, write_end
from rankup.agent.logs import host_name
from rankup.agent.processes import clear_hard_deadline, leave, set_hard_deadline, within
from rankup.agent.record import NO_LIMIT, RecordWriter
from rankup.errors import JOIN_FAILED, PEER_LOST, STOPPED, PeerLost
from rankup.group.line import Line, Suspect, describe, root_exit_code
from rankup.group.stop import StopRequest, compare, dump, follow, moment, own_place


class Watchdog:
    """The deadline of this rank's phase, what the other ranks last reported, and how this rank ends.

    What this rank does stands in its `record`: phase, step, deadline, and whether it waits for others.
    `hosts`: by rank.
    """

    def __init__(
        self, status: StatusFile, stop: StopRequest, *, record: RecordWriter, log: logging.Logger,
        leaving: Callable[[int, str, Suspect | None], int] = lambda code, why, suspect: code,
    ) -> None:
        """Starts the clock.

        `leaving(code, why, suspect)`: is called last, before this rank ends for a deadline or a lost peer. Returns the
        code to end with.
        """
        self.status, self.stop, self.record, self.log, self.leaving = status, stop, record, log, leaving
        self.rank, self.world_size, self.clock = status.rank, status.world_size, record.clock
        self.hosts: Sequence[str] = [host_name()] * self.world_size
        self._line = Line(status.rank, stop)  # it reaches nobody until the ranks have met
        self._met = False
        self.quiet = False  # all ranks are done: one that goes is no loss
        self._leaving: int | None = None  # the exit code, once the loop has failed and this process is about to end
        self._keeper: Any = None  # a `Saving`, of `rankup.loop.saving`
        self._keep_timeout_s = 0.0
        self._keep_lock = threading.Lock()  # held while the keeper writes
        self._stopping = False  # it ends for a stop, and has kept the state for that
        self._leave_at_s = math.inf  # to leave for a stop then
        self._armed_s = self._placed_s = self._lost_s = 0.0  # when the thread did this, or saw a loss
        self._leaver: threading.Thread | None = None  # it finds out whether this rank has to go, and ends it
        follow(record)
        stop.watch = self
        stop.wake()

    @property
    def nodes(self) -> list[dict[str, Any]]:
        """Of a job whose number of nodes may change, as they were said with the last signs of life."""
        return self._line.nodes

    def signs_of_life(self) -> list[dict[str, Any]]:
        """Where each rank stood when it last said so, in the order of the ranks.

        Keys: rank, host, phase, step, waiting, for_s, which is how long it had been there, place, in the program, and
        seen, in seconds of `time.time()`. Any thread may call it.
        """
        self.record.set_place(self._place())
        own = {**self.record.read().sign(), "host": host_name(), "seen": time.time()}
        others = [sign for sign in self._line.signs() if sign["rank"] != self.rank]
        return sorted([own, *others], key=lambda sign: int(sign["rank"]))

    def enter(
        self, phase: str, timeout_s: float, *, step: int | None = None, since_s: float | None = None
    ) -> None:
        """Begin a phase, with a deadline `timeout_s` seconds from now (0: none). Entering it anew moves the deadline.

        `since_s`: the phase began earlier, at this time of `time.monotonic()`, and its deadline counts from there.
        """
        if self.record.entered != (phase, timeout_s or NO_LIMIT):  # else `tick` moves the hard deadline now and then
            set_hard_deadline(timeout_s + timing.LOCKED_GRACE_S) if timeout_s else clear_hard_deadline()
        self.record.wait(False)
        self.record.enter(phase, timeout_s or NO_LIMIT, since_s=since_s)
        if step is not None:
            self.record.begin(step)

    @property
    def at_step(self) -> str:
        """For messages: where this rank stands."""
        return f" at step {self.record.read().step}"

    def connect(self, line: Line, hosts: Sequence[str]) -> None:
        """The ranks have met: look for losses, and report to the others from now on."""
        self.hosts, self._line, self._met = hosts, line, True
        self.stop.wake()

    def protect(self, keeper: Any, *, timeout_s: float) -> None:
        """From now on call `keeper.keep()` before this process ends because of a lost peer or a deadline, and
        `keeper.keep_for_stop()` where the job is to stop: once, from a thread of its own, while the main thread may be
        blocked in a collective or be in the middle of a step. It gets `timeout_s` seconds."""
        self._keeper, self._keep_timeout_s = keeper, timeout_s

    def settle(self) -> None:
        """This rank begins no further step: it saves and leaves with the others, however long that takes."""
        with self._keep_lock:
            if not self._stopping:
                self.record.settle()
        self.wait_if_leaving()

    def wait_if_leaving(self) -> None:
        """Never return where this process is about to end for a stop."""
        with self._keep_lock:
            stopping = self._stopping
        if stopping:
            threading.Event().wait()

    def exit_within(self, code: int) -> None:
        """This rank is about to end with `code`: LEAVING_S later it ends, however long its teardown takes."""
        self._leaving = code
        self._extend(timing.LEAVING_S)

    def _extend(self, timeout_s: float) -> None:
        """A new deadline for the same phase: the others still see what this rank was doing."""
        set_hard_deadline(timeout_s + timing.LOCKED_GRACE_S)
        self.record.extend(timeout_s)

    def end(self) -> None:
        """No more deadlines."""
        self.quiet = True
        self.stop.watch = None
        clear_hard_deadline()

    def report(self, code: int, why: str, suspect: int | None = None, *, together: bool = False) -> None:
        """Say that this rank ends with `code`, and `why`, to the other ranks and in the files of the run.

        `suspect`: the rank that this one lost, where it knows. `together`: all ranks end so.
        """
        step = self.record.read().step
        own = End(self.rank, host_name(), code, why, step, suspect=suspect)
        self._line.say("end", **own.message())
        write_end(self.status.run_dir, self.status.attempt, own)
        if together:
            ends = [End(rank, host, code, why, step) for rank, host in enumerate(self.hosts)]
        else:
            ends = [*(End(rank, self.hosts[rank], code, why, step) for rank, code, why in self._line.reported()), own]
        self.status.write_summary({end.rank: end for end in ends}.values())

    # The thread -----------------------------------------------------------------------------------------------

    def tell_others(self, name: str) -> None:
        """A signal has come to this process, which asks the whole job to stop."""
        self._line.say("stop", signal=name)
        if self.world_size == 1:  # nobody else finds out that it waits for data, or evaluates
            self._leave_at_s = time.monotonic() + timing.REACH_S

    def last_word(self, why: str, *, together: bool = False) -> None:
        """This rank leaves for a stop."""
        self.log.info(why)
        self.report(STOPPED, why, together=together)

    def tick(self) -> float:
        """Give a sign of life, and look whether this rank has to go. Returns in how many seconds to look again."""
        now_s, now, line = time.monotonic(), self.record.read(), self._line
        if now_s - self._placed_s > timing.ALIVE_S:
            self.record.set_place(self._place())
            self._placed_s = now_s
        overdue = now.until_s < now_s
        if overdue and self._leaving is not None:
            leave(self._leaving)
        if line.heard.is_set():
            self._lost_s = self._lost_s or now_s
        if self._leaving is not None or (self._leaver is not None and self._leaver.is_alive()):
            return timing.TICK_S  # it goes already
        if now.until_s < NO_LIMIT and now_s - self._armed_s > timing.REARM_S:
            set_hard_deadline(max(0.0, now.until_s - now_s) + timing.LOCKED_GRACE_S)
            self._armed_s = now_s
        if overdue:
            self._aside(lambda: self._leave(""))
        elif line.must_leave or now_s > self._leave_at_s:
            line.must_leave, self._leave_at_s = False, math.inf
            self._aside(self._leave_for_stop)
        elif self._lost_s and now_s - self._lost_s > self._patience_s(line):
            self._aside(lambda: self._leave(f"lost a peer{self.at_step}", hung=line.hang))
        return timing.GONE_S if self._lost_s else timing.TICK_S

    def _aside(self, work: Callable[[], None]) -> None:
        self._leaver = threading.Thread(target=work, name="leaves", daemon=True)
        self._leaver.start()

    def _leave_for_stop(self) -> None:
        """The ranks do not come to the step at which all would stop: keep the last finished one, and leave."""
        with self._keep_lock:
            keeper = self._keeper
            if keeper is None or self.record.read().settled:
                return
            self._extend(self._keep_timeout_s + timing.LEAVING_S)
            why = within(self._keep_timeout_s, keeper.keep_for_stop)
            if why == "":  # it takes all ranks, so they go on until they come to that step
                return
            self._stopping = True
        why = why or f"{self.stop.signal_name}: the state could not be kept"
        leave(STOPPED, lambda: self.last_word(why, together=True), timeout_s=timing.REPORT_END_S)

    def _patience_s(self, line: Line) -> float:
        """How long after a loss this rank's loop may take to notice it by itself."""
        if self.quiet:
            return math.inf
        now = self.record.read()
        waiting = now.waiting or now.phase == "join"
        # Without a keeper the checkpoint that this rank writes is all that will be left
        if line.hang or (line.gone and (waiting or now.phase != "save" or self._keeper is not None)):
            return 0.0
        return timing.FAILED_WAITING_S if waiting else timing.FAILED_S

    def _leave(self, what: str, *, hung: bool = True) -> None:
        """Dump the stacks, name the suspect, tell the others, and end this process at once.

        `what`: has happened, unless the deadline has passed. `hung`: as far as this rank knows no process has ended.
        """
        set_hard_deadline(timing.STACKS_S + timing.REPORT_END_S + timing.LOCKED_GRACE_S)
        now = self.record.read()
        if overdue := now.until_s < time.monotonic() and self._leaving is None:
            what = f"{now.phase} (step {now.step}) took longer than {now.timeout_s:g} s"
        otherwise = JOIN_FAILED if overdue and now.phase == "join" else PEER_LOST
        said = self._take_stacks(what, hung=hung or overdue) if self._leaving is None else []
        suspects = self.suspects(overdue=overdue) if self._leaving is None else []
        if self._leaving is not None:
            return  # the loop noticed by itself, and may know more
        code = root_exit_code(suspects, otherwise)
        suspect = suspects[0] if suspects else None
        why = what if self.world_size == 1 else f"{what}: {describe(suspects, self.hosts)}"
        self.log.warning("\n".join([f"{why} (exit code {code})", *said]))

        def last_words() -> int:
            tell_torchrun(PeerLost(why) if suspect and suspect.rank != self.rank else TimeoutError(why))
            self.report(code, why, suspect.rank if suspect is not None else None)
            changed = self.leaving(code, why, suspect)
            if overdue and self.world_size > 1:
                time.sleep(timing.LINGER_S)
            return changed

        leave(code, last_words, timeout_s=timing.REPORT_END_S)

    def _take_stacks(self, why: str, *, hung: bool) -> list[str]:
        """Write the stacks of this rank. Returns lines for its log: where all ranks are, and which files say more.

        `hung`: no process has ended as far as this rank knows; if one has, the others wait for its successor, and this
        one makes haste.
        """
        file = within(timing.STACKS_S, lambda: dump(why))  # first: an answer of the others takes longer
        lines = ["; ".join(compare({sign["rank"]: sign["place"] for sign in self.signs_of_life()}))] if hung else []
        if file:
            lines.append(f"the stacks of all threads are in {file}")
        return lines

    def _place(self) -> str:
        """Where the main thread is: "all_reduce (loop.py:213 step) of step 413"."""
        now = self.record.read()
        return own_place() + moment(now.phase, now.step)

    def suspects(self, *, overdue: bool = False) -> list[Suspect]:
        """Keep what this rank holds, and find out which rank was lost; the most likely suspect first.

        `overdue`: this rank's own deadline has passed. Else the line may be about to say who it is.
        """
        self._keep()
        if not self._met:
            return []
        if not overdue:
            self._line.heard.wait(timing.CAUSE_S)
        return self._line.suspects(waiting=self.record.read().waiting, overdue=overdue)

    def _keep(self) -> None:
        """Have the keeper write, once. A second caller waits for the first: the process must not end meanwhile."""
        with self._keep_lock:
            keeper, self._keeper = self._keeper, None
            if keeper is None:
                return
            self._extend(self._keep_timeout_s + timing.LEAVING_S)
            within(self._keep_timeout_s, keeper.keep)
            self._extend(timing.LEAVING_S)
