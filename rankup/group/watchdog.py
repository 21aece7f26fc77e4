"""Deadlines, lost peers, and how this rank ends: a hang always turns into an exit that names the suspect.

A rank has a line to the others, apart from the training traffic: a local socket to its agent, or else it is a member of
the meeting itself (`rankup.group.member`). The thread of `rankup.group.stop` watches the clock and reads the line; it
does nothing that could block it. A rank that has to end does so in another thread. A process that is stopped itself
(SIGSTOP, a frozen node) does none of that: the others find it by its silence. No torch here.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rankup import timing
from rankup.agent.ends import End, StatusFile, tell_torchrun, write_end
from rankup.agent.logs import host_name
from rankup.agent.processes import leave, set_hard_deadline, within
from rankup.agent.protocol import KILLED
from rankup.agent.record import NO_LIMIT, NO_STOP, Record
from rankup.errors import FINISHED, JOIN_FAILED, PEER_LOST, STOPPED, PeerLost, root_cause, worth_restarting
from rankup.group.stop import StopRequest, compare, dump, in_phase, own_place


@dataclass(frozen=True, slots=True)
class Suspect:
    """A rank that may be the cause, and why. `code`: that it ended with, where somebody knows. `alive`: it keeps the
    others waiting."""

    rank: int
    why: str
    code: int | None = None
    alive: bool = False


class Watchdog:
    """The deadline of this rank's phase, what the other ranks last reported, and how this rank ends.

    What this rank does stands in its `record`: phase, step, deadline, and whether it waits for others.
    `hosts`: by rank. `nodes`: where their number may change, as they were said with the last signs of life.
    """

    def __init__(self, status: StatusFile, stop: StopRequest, *, record: Record, log: logging.Logger) -> None:
        """Starts the clock."""
        self.status, self.stop, self.record, self.log = status, stop, record, log
        self.rank, self.world_size, self.clock = status.rank, status.world_size, record.clock
        self.hosts: Sequence[str] = [host_name()] * self.world_size
        self.nodes: list[dict[str, Any]] = []
        # Called before this rank ends for a deadline or a lost peer; returns the code
        self.leaving: Callable[[PeerLost], int] = lambda loss: loss.code
        self.quiet = False  # all ranks are done: one that goes is no loss
        self._line: Any = None  # an AgentLine or a MemberLine, once the ranks have met
        self._lost: Mapping[str, Any] = {}  # the first loss that the line has told of
        self._heard, self._answered = threading.Event(), threading.Event()  # of a loss; of where all ranks are
        self._signs: list[dict[str, Any]] = []
        self._leaving: int | None = None  # the exit code, once the loop has failed and this process is about to end
        self._keeper: Any = None  # a `Saving`, of `rankup.loop.saving`
        self._keep_timeout_s = 0.0
        self._keep_lock = threading.Lock()  # held while the keeper writes
        self._ending = False  # the thread that watches ends this process: the main thread says nothing of its own
        self._settled = False  # the loop begins no further step, and leaves for a stop by itself
        self._leave_at_s = 0.0  # for a stop, unless this rank comes before to the step at which all stop
        self._placed_s = self._lost_s = 0.0  # when the thread last gave a sign, and when it saw a loss
        self._leaver: threading.Thread | None = None  # it finds out whether this rank has to go, and ends it
        stop.watch = self
        stop.wake()

    # Any thread ---------------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        return self._line is not None

    def signs_of_life(self) -> list[dict[str, Any]]:
        """Where each rank stood when it last said so, by rank; what is known where nobody answers. See `Record.sign`;
        also host, and seen, in seconds of `time.time()`. Not for the thread of `hear`."""
        self.record.give_sign(self._place())
        own = {**self.record.read().sign(), "host": host_name(), "seen": time.time()}
        self._ask(timing.WHERE_S)
        others = [sign for sign in self._signs if sign["rank"] != self.rank]
        return sorted([own, *others], key=lambda sign: int(sign["rank"]))

    def _ask(self, timeout_s: float) -> bool:
        """Have the line say where all ranks are. Returns whether it did so in time."""
        self._answered.clear()
        return self._say("ask") and self._answered.wait(timeout_s)

    def report(self, code: int, why: str, suspect: int | None = None) -> None:
        """Say how this rank ends, to the other ranks and in the files of the run. `suspect`: the rank that it lost,
        where it knows."""
        own = End(self.rank, host_name(), code, why, self.record.step, suspect=suspect)
        self._say("end", **own.message())
        write_end(self.status.run_dir, self.status.attempt, own)
        ends: dict[int, End] = {}
        if code in (FINISHED, STOPPED):  # then all ranks end so
            ends = {rank: replace(own, rank=rank, host=host) for rank, host in enumerate(self.hosts)}
        elif (reported := self._lost.get("code")) not in (None, KILLED):  # they have said themselves how they end
            for rank in self._lost["ranks"]:
                ends[rank] = End(rank, self.hosts[rank], reported, self._lost["why"], own.step)
        self.status.write_summary({**ends, self.rank: own}.values())

    def report_stop(self, why: str) -> None:
        """This rank leaves for a stop."""
        self.log.info(why)
        self.report(STOPPED, why)

    def tell_others(self, name: str) -> None:
        """A signal has come to this process, which asks the whole job to stop."""
        self._say("stop", signal=name)
        if self.world_size == 1:  # there is nobody to agree with
            self.record.stop = self.record.confirmed = 0

    def _say(self, kind: str, **values: Any) -> bool:
        return self._line is not None and bool(self._line.say(kind, **values))

    def hear(self, message: Mapping[str, Any]) -> None:
        """The others say: lost, gone, stop, ranks. In one thread."""
        if message["is"] in ("lost", "gone") and not self._lost:
            self._lost = message
            self._heard.set()
            self.stop.wake()
        elif message["is"] == "stop":
            self.stop.ask(str(message["signal"]))
        elif message["is"] == "ranks":
            now = time.time()
            self._signs = [{**sign, "seen": now - sign["ago_s"]} for sign in message["ranks"]]
            self.nodes = message.get("nodes", [])
            self._answered.set()

    # The main thread --------------------------------------------------------------------------------------------

    def connect(self, line: Any, hosts: Sequence[str]) -> None:
        """The ranks have met: look for losses, and report to the others from now on."""
        self.hosts, self._line = hosts, line
        self.stop.wake()

    def enter(
        self, phase: str, timeout_s: float, *, step: int | None = None, since_s: float | None = None
    ) -> None:
        """Begin a phase, or the same one anew, with a deadline `timeout_s` seconds from now (0: none), or from
        `since_s`, a time of `time.monotonic()` at which it began."""
        if self.record.entered != (phase, timeout_s or NO_LIMIT):  # else `tick` moves it
            set_hard_deadline((timeout_s or NO_LIMIT) + timing.LOCKED_GRACE_S)
        self.record.waiting = False
        self.record.enter(phase, timeout_s or NO_LIMIT, since_s=since_s)
        if step is not None:
            self.record.begin(step)

    def protect(self, keeper: Any, *, timeout_s: float) -> None:
        """From now on call `keeper.keep()` before this process ends because of a lost peer or a deadline, and
        `keeper.keep_for_stop()` where the job is to stop: once, from a thread of its own, while the main thread may be
        blocked in a collective or be in the middle of a step. It gets `timeout_s` seconds."""
        self._keeper, self._keep_timeout_s = keeper, timeout_s

    def settle(self) -> None:
        """This rank begins no further step: it saves and leaves with the others, however long that takes."""
        with self._keep_lock:
            self._wait_if_ending()
            self._settled = True

    def exit_within(self, code: int) -> None:
        """This rank is about to end with `code`: LEAVING_S later it ends, however long its teardown takes."""
        with self._keep_lock:
            self._wait_if_ending()
            self._leaving = code
        self.record.extend(timing.LEAVING_S)  # of the same phase: the others still see what this rank was doing

    def _wait_if_ending(self) -> None:
        """Never return where another thread ends this process, for a stop or a loss."""
        if self._ending:
            threading.Event().wait()

    def end(self) -> None:
        """No more deadlines, and nothing more to keep."""
        self.quiet = True
        self.stop.watch = self._keeper = None
        set_hard_deadline(NO_LIMIT)

    # The thread that watches --------------------------------------------------------------------------------------

    def tick(self) -> float:
        """Give a sign of life, and look whether this rank has to go. Returns in how many seconds to look again."""
        now_s, now = time.monotonic(), self.record.read()
        set_hard_deadline(now.until_s - now_s + timing.LOCKED_GRACE_S)
        if self.stop.watch is None:  # since the look at the record
            set_hard_deadline(NO_LIMIT)
        if now_s - self._placed_s > timing.ALIVE_S:
            self.record.give_sign(self._place())
            self._placed_s = now_s
        overdue = now.until_s < now_s
        if overdue and self._leaving is not None:
            leave(self._leaving)
        if self.connected and self._lost:
            self._lost_s = self._lost_s or now_s
        if self._leaving is not None or (self._leaver is not None and self._leaver.is_alive()):
            return timing.TICK_S  # it goes already
        if not self._leave_at_s and self.stop.requested and now.confirmed == now.stop < NO_STOP:
            self._leave_at_s = now_s + timing.REACH_S
        work = None
        if 0.0 < self._leave_at_s < now_s and not overdue:
            self._leave_at_s, work = math.inf, self._leave_for_stop
        elif overdue or (self._lost_s and now_s - self._lost_s > self._patience_s()):
            work = self._leave
        if work is not None:
            self._leaver = threading.Thread(target=work, name="leaves", daemon=True)
            self._leaver.start()
        return timing.GONE_S if self._lost_s else timing.TICK_S

    def _patience_s(self) -> float:
        """How long after a loss this rank's loop may take to notice it by itself."""
        if self.quiet:
            return math.inf
        now = self.record.read()
        waiting = now.waiting or now.phase == "join"
        # It ended by itself, or is out of reach: a collective with it breaks, or never comes to an end
        gone = self._lost.get("code") == KILLED or self._lost.get("is") == "gone"
        if gone or self._lost.get("alive"):
            return 0.0
        return timing.FAILED_WAITING_S if waiting else timing.FAILED_S

    def _leave_for_stop(self) -> None:
        """This rank waits for data, or evaluates, and does not come to the step at which all stop: keep the last
        finished one, and leave."""
        with self._keep_lock:
            keeper = self._keeper
            if keeper is None or self._leaving is not None or self._settled:
                return
            self.record.extend(self._keep_timeout_s + timing.LEAVING_S)
            why = within(self._keep_timeout_s, keeper.keep_for_stop)
            if why == "":  # it takes all ranks, so they go on until they come to that step
                return
            self._ending = True
        if self.rank > 0:  # rank 0 keeps the copy for all, unless its loop finds before that this rank is gone
            self._heard.wait(timing.LAST_WORD_S)
        why = why or f"{self.stop.signal_name}: the state could not be kept"
        leave(STOPPED, lambda: self.report_stop(why), timeout_s=timing.REPORT_END_S)

    def _leave(self) -> None:
        """A deadline has passed, or a rank is lost: dump the stacks, name the suspect, tell the others, and end this
        process at once."""
        now = self.record.read()
        overdue, code = now.until_s < time.monotonic(), PEER_LOST
        what = f"lost a peer at step {now.step}"
        if overdue:
            what = f"{now.phase} (step {now.step}) took longer than {now.timeout_s:g} s"
            code = JOIN_FAILED if now.phase == "join" else PEER_LOST
        if self._leaving is None:
            lines = self._take_stacks(what, all_alive=overdue or bool(self._lost.get("alive")))
            loss = self.loss(self.suspects(overdue=overdue), what, code=code)
        with self._keep_lock:
            if self._leaving is not None:
                return  # the loop noticed by itself, and may know more
            self._ending = True
        self.log.warning("\n".join([f"{loss} (exit code {loss.code})", *lines]))

        def report_loss() -> int:
            tell_torchrun(TimeoutError(str(loss)) if loss.suspect in (None, self.rank) else loss)
            self.report(loss.code, str(loss), loss.suspect)
            changed = self.leaving(loss)
            if overdue and self.world_size > 1:
                time.sleep(timing.LINGER_S)
            return changed

        leave(loss.code, report_loss, timeout_s=timing.REPORT_END_S)

    def _take_stacks(self, why: str, *, all_alive: bool) -> list[str]:
        """Write the stacks of this rank. Returns lines for its log: which file has them, and where all ranks are unless
        a process has ended: then the others wait for its successor, and this one makes haste."""
        file = within(timing.STACKS_S, lambda: dump(why, self.record))  # first: an answer of the others takes longer
        places = {sign["rank"]: sign["place"] for sign in self.signs_of_life()} if all_alive else {}
        lines = ["; ".join(compare(places))] if places else []
        return [*lines, f"the stacks of all threads are in {file}"] if file else lines

    def _place(self) -> str:
        """Where the main thread is: "all_reduce (loop.py:213 step) of step 413"."""
        now = self.record.read()
        return own_place() + in_phase(now.phase, now.step)

    def loss(self, suspects: list[Suspect], what: str = "", *, code: int = PEER_LOST) -> PeerLost:
        """What to raise where these were lost, the likeliest first. `what` has happened, by default the loss of a peer.
        `code`: unless the likeliest suspect has ended with one that forbids a restart."""
        what = what or f"lost a peer at step {self.record.step}"
        root = root_cause([*(suspect.code for suspect in suspects[:1] if suspect.code is not None), code])
        return PeerLost(
            what if self.world_size == 1 else f"{what}: {describe(suspects, self.hosts)}",
            code=code if worth_restarting(root) else root,
            suspect=suspects[0].rank if suspects else None,
            nobody_died=all(suspect.alive for suspect in suspects),
        )

    def suspects(self, *, overdue: bool = False) -> list[Suspect]:
        """Keep what this rank holds, and return who may be lost, the likeliest first; nobody if all ranks wait for each
        other. `overdue`: this rank's own deadline has passed. Else the line may be about to say who it is."""
        self._keep()
        if not self.connected:
            return []
        if not overdue:
            self._heard.wait(timing.CAUSE_S)
        waiting = self.record.waiting
        late = self._late() if not self._lost else []
        if not (lost := self._lost):  # which may have come meanwhile, and says more
            return late or ([] if waiting else [Suspect(self.rank, "the others wait for it", alive=True)])
        if lost["is"] == "gone" and overdue and not waiting:
            # This rank is the one that takes too long: those that waited for it have left, rank 0 among them
            return [Suspect(self.rank, "the others have left", alive=True)]
        alive = bool(lost.get("alive"))
        return [Suspect(rank, lost["why"], code=lost.get("code"), alive=alive) for rank in lost.get("ranks", [0])]

    def _late(self) -> list[Suspect]:
        """Where nobody has ended: who gave no sign of life, else who does not wait for others."""
        asked_s = time.monotonic()
        while True:
            waited_s = time.monotonic() - asked_s  # before the answer, whose age on arrival nobody knows
            if not self._ask(timing.QUIET_S):
                return [Suspect(0, "it does not answer")]
            # What one said before does not count: it may have been stopped since, and then it is the one
            signs = [sign for sign in self._signs if sign["rank"] != self.rank]
            silent = [sign for sign in signs if sign["ago_s"] > waited_s]
            if not silent or waited_s > timing.QUIET_S or self._heard.wait(timing.ALIVE_S):
                break
        return [Suspect(sign["rank"], "gave no sign of life") for sign in silent] or [
            Suspect(sign["rank"], f"is alive, in {sign['phase']} at step {sign['step']}", alive=True)
            for sign in signs if not sign["waiting"]
        ]

    def _keep(self) -> None:
        """Have the keeper write, once. A second caller waits for the first: the process must not end meanwhile."""
        with self._keep_lock:
            keeper, self._keeper = self._keeper, None
            if keeper is not None:
                self.record.extend(self._keep_timeout_s + timing.LEAVING_S)
                within(self._keep_timeout_s, keeper.keep)
                self.record.extend(timing.LEAVING_S)


def describe(suspects: list[Suspect], hosts: Sequence[str]) -> str:
    """One clause: "rank 3 on node1 (its process has ended)"; "suspected: ..." where its end is not known."""
    if not suspects:
        return "suspected: nobody, all ranks wait for each other"
    named = ", ".join(f"rank {s.rank} on {hosts[s.rank]} ({s.why})" for s in suspects[:4])
    return named if suspects[0].code is not None else f"suspected: {named}"
