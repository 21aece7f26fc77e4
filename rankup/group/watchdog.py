"""Deadlines, lost peers, and the end of this rank: every hang becomes an exit that names the suspect.

Each rank has a line to the other ranks, apart from the training traffic: a local socket to its agent. The thread of
`rankup.group.stop` watches the clock and reads the line; it does nothing that could block. Another thread ends the
rank. A process that is itself stopped (SIGSTOP, a frozen node) runs neither thread, so the others notice its silence.
This module does not import torch.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rankup import timing
from rankup.agent.ends import End
from rankup.agent.logs import host_name
from rankup.agent.processes import leave, set_hard_deadline, within
from rankup.agent.protocol import KILLED
from rankup.agent.record import NO_LIMIT, Record
from rankup.agent.status_files import StatusFile, tell_torchrun, write_end
from rankup.errors import FAULT, FINISHED, JOIN_FAILED, PEER_LOST, STOPPED, PeerLost, root_cause, worth_restarting
from rankup.group.stop import StopRequest, compare, dump, in_phase, may_wait, own_location


@dataclass(frozen=True, slots=True)
class Suspect:
    """A rank that may have caused a loss, and why. `code`: its exit code, if known. `alive`: the rank still runs, but
    keeps the others waiting."""

    rank: int
    why: str
    code: int | None = None
    alive: bool = False


class Watchdog:
    """Watches the deadline of this rank's phase and the reports about other ranks, and ends this rank if necessary.

    `record`: what this rank is doing: phase, step, deadline, and whether it waits for others. `hosts`: host names by
    rank. `nodes`: in an elastic job, a row per node as of the last answer to `heartbeats`.
    """

    def __init__(self, status: StatusFile, stop: StopRequest, *, record: Record, log: logging.Logger) -> None:
        """Also starts the clock."""
        self.status, self.stop, self.record, self.log = status, stop, record, log
        self.rank, self.world_size, self.clock = status.rank, status.world_size, record.clock
        self.hosts: Sequence[str] = [host_name()] * self.world_size
        self.nodes: list[dict[str, Any]] = []
        # Called before this rank ends because of a deadline or a lost peer. It returns the exit code
        self.leaving: Callable[[PeerLost], int] = lambda loss: loss.code
        # Returns by process group how many collectives this rank has begun, see `Group.begun`
        self.begun: Callable[[], Mapping[str, int]] = dict
        self.quiet = False  # all ranks have finished: a rank that leaves now is no loss
        self._line: Any = None  # an AgentLine or an OwnAgent, once the ranks have met
        self._lost: Mapping[str, Any] = {}  # the first message about a loss
        self._heard, self._answered = threading.Event(), threading.Event()  # set by a loss; set by the answer to `_ask`
        self._heartbeats: list[dict[str, Any]] = []
        self._pages = list[dict[str, Any]](), list[dict[str, Any]]()  # rows of ranks and nodes of an unfinished answer
        self._deadlock = ""  # how all ranks wait for each other at different places of the program
        self._leaving: int | None = None  # the exit code, once the main thread has failed and is about to exit
        self._saving: Any = None  # a `Saving` of `rankup.loop.saving`
        self._saving_timeout_s = 0.0
        self._saving_lock = threading.Lock()  # held while `Saving` writes the state
        self._ending = False  # another thread is ending this process, and the main thread must not report its own end
        self._steps_ended = False  # the loop begins no further step, and leaves for a stop by itself
        self._leave_at_s = 0.0  # when to leave for a stop if this rank has not reached the step at which all stop
        self._located_s = self._lost_s = 0.0  # when the thread last sent a heartbeat, and when it saw a loss
        self._leaver: threading.Thread | None = None  # decides whether this rank has to end, and ends it
        stop.watch = self
        stop.wake()

    # Any thread ---------------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        return self._line is not None

    def heartbeats(self) -> list[dict[str, Any]]:
        """Return each rank's last heartbeat, ordered by rank: what `Record.heartbeat` returns, `host`, and `seen`, a
        time of `time.time()`. If no answer comes, they are older. Don't call this in the thread of `on_message`."""
        self._ask(timing.WHERE_S)
        return self._newest()

    def _newest(self) -> list[dict[str, Any]]:
        """Return this rank's place now, and the other ranks' of the last answer, as `heartbeats` does."""
        self._beat()
        own = {**self.record.read().heartbeat(), "host": host_name(), "seen": time.time()}
        others = [heartbeat for heartbeat in self._heartbeats if heartbeat["rank"] != self.rank]
        found = sorted([own, *others], key=lambda heartbeat: int(heartbeat["rank"]))
        for row, ahead in zip(found, who_is_ahead([row["begun"] for row in found]), strict=True):
            row["waiting"] |= ahead
        return found

    def _ask(self, timeout_s: float) -> bool:
        """Ask through the line where all ranks are. Returns whether the answer came in time."""
        self._answered.clear()
        return self._send("ask") and self._answered.wait(timeout_s)

    def report(self, code: int, why: str, suspect: int | None = None) -> None:
        """Report how this rank ends, to the other ranks and in the files of the run. `suspect`: the rank that this rank
        lost, if known."""
        own = End(self.rank, host_name(), code, why, self.record.step, suspect=suspect)
        self._send("end", **own.entry())
        write_end(self.status.run_dir, self.status.attempt, own)
        ends: dict[int, End] = {}
        if code in (FINISHED, STOPPED):  # all ranks end this way
            ends = {rank: replace(own, rank=rank, host=host) for rank, host in enumerate(self.hosts)}
        elif (reported := self._lost.get("code")) not in (None, KILLED):  # the lost ranks reported their own end
            for rank in self._lost["ranks"]:
                ends[rank] = End(rank, self.hosts[rank], reported, self._lost["why"], own.step)
        self.status.write_summary({**ends, self.rank: own}.values())

    def report_stop(self, why: str) -> None:
        """Log and report that this rank leaves because the job was asked to stop."""
        self.log.info(why)
        self.report(STOPPED, why)

    def tell_others(self, name: str) -> None:
        """Tell the other ranks that this process got the signal `name`, which stops the whole job."""
        self._send("stop", signal=name)
        if self.world_size == 1:  # no other rank has to agree
            self.record.stops_alone = True

    def _send(self, kind: str, **values: Any) -> bool:
        return self._line is not None and bool(self._line.send(kind, **values))

    def on_message(self, message: Mapping[str, Any]) -> None:
        """Handle a message of the line: lost, gone, stop or ranks. Always called in the same thread."""
        if message["is"] in ("lost", "gone") and not self._lost:
            self._lost = message
            self._heard.set()
            self.stop.wake()
        elif message["is"] == "stop":
            self.stop.ask(str(message["signal"]))
        elif message["is"] == "ranks":
            now, before = time.time(), message["start"]
            rows = [{**heartbeat, "seen": now - heartbeat["ago_s"]} for heartbeat in message["ranks"]]
            self._pages = [*self._pages[0][:before], *rows], [*self._pages[1][:before], *message["nodes"]]
            if not message["more"]:
                self._heartbeats, self.nodes = self._pages
                self._answered.set()

    # The main thread --------------------------------------------------------------------------------------------

    def connect(self, line: Any, hosts: Sequence[str]) -> None:
        """From now on, look for losses and report to the other ranks: all ranks have met."""
        self.hosts, self._line = hosts, line
        self.stop.wake()

    def enter(
        self, phase: str, timeout_s: float, *, step: int | None = None, since_s: float | None = None
    ) -> None:
        """Begin a phase, or begin it again, with a deadline `timeout_s` seconds after `since_s`, a time of
        `time.monotonic()`, by default now. `timeout_s`: 0 means no deadline."""
        if self.record.entered != (phase, timeout_s or NO_LIMIT):  # for a phase that repeats, `tick` does this
            set_hard_deadline((timeout_s or NO_LIMIT) + timing.LOCKED_GRACE_S)
        self.record.waiting = False
        self.record.enter(phase, timeout_s or NO_LIMIT, since_s=since_s)
        if step is not None:
            self.record.begin(step)

    def protect(self, saving: Any, *, timeout_s: float) -> None:
        """From now on, call `saving.rescue()` once before this process ends because of a lost peer or a deadline, and
        `saving.save_for_stop()` once if it has to leave for a stop. Each call gets `timeout_s` seconds and a thread of
        its own, because the main thread may be blocked in a collective or in the middle of a step."""
        self._saving, self._saving_timeout_s = saving, timeout_s

    def end_steps(self) -> None:
        """Say that this rank begins no further step: it saves and leaves with the others, however long that takes."""
        with self._saving_lock:
            self._wait_if_ending()
            self._steps_ended = True

    def exit_within(self, code: int) -> None:
        """End this process with `code` after LEAVING_S at the latest, even if the main thread takes longer to exit."""
        with self._saving_lock:
            self._wait_if_ending()
            self._leaving = code
        self.record.extend(timing.LEAVING_S)  # the phase stays, so that the others still see what this rank was doing

    def _wait_if_ending(self) -> None:
        """Wait forever if another thread is ending this process because of a stop or a loss."""
        if self._ending:
            threading.Event().wait()

    def end(self) -> None:
        """Turn off all deadlines, and rescue no state from now on."""
        self.quiet = True
        self.stop.watch = self._saving = None
        set_hard_deadline(NO_LIMIT)

    # The thread that watches --------------------------------------------------------------------------------------

    def tick(self) -> float:
        """Write a heartbeat, and check whether this rank has to end. Returns the seconds until the next check."""
        now_s, now = time.monotonic(), self.record.read()
        set_hard_deadline(now.until_s - now_s + timing.LOCKED_GRACE_S)
        if self.stop.watch is None:  # `end` was called after the record was read
            set_hard_deadline(NO_LIMIT)
        if now_s - self._located_s > timing.ALIVE_S:
            self._beat()
            self._located_s = now_s
        overdue = now.until_s < now_s
        if overdue and self._leaving is not None:
            leave(self._leaving)
        if self.connected and self._lost:
            self._lost_s = self._lost_s or now_s
        if self._leaving is not None or (self._leaver is not None and self._leaver.is_alive()):
            return timing.TICK_S  # this rank is already ending
        if not self._leave_at_s and self.stop.requested and self.record.stop_is_settled:
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
        """Return how many seconds this rank's main thread gets to notice a loss by itself."""
        if self.quiet:
            return math.inf
        now = self.record.read()
        location, in_collective = own_location()  # in a backward pass it waits for other ranks, or soon will
        waiting = now.waiting or now.phase == "join" or in_collective or may_wait(location)
        # If the lost rank was killed, is unreachable, or is alive but late, a collective with it may never end
        gone = self._lost.get("code") == KILLED or self._lost.get("is") == "gone"
        if gone or self._lost.get("alive"):
            return 0.0
        return timing.FAILED_WAITING_S if waiting else timing.FAILED_S

    def _leave_for_stop(self) -> None:
        """Save the last finished step, and leave. This rank does not reach the step at which all ranks stop in time,
        perhaps because it waits for data or evaluates."""
        with self._saving_lock:
            saving = self._saving
            if saving is None or self._leaving is not None or self._steps_ended:
                return
            self.record.extend(self._saving_timeout_s + timing.LEAVING_S)
            why = within(self._saving_timeout_s, saving.save_for_stop)
            if why == "":  # only all ranks together can save the state, so this rank goes on to the step where all stop
                return
            self._ending = True
        if self.rank > 0:  # give rank 0 time to save: its main thread would fail if it noticed that this rank is gone
            self._heard.wait(timing.LAST_MESSAGE_S)
        why = why or f"{self.stop.signal_name}: the state could not be kept"
        leave(STOPPED, lambda: self.report_stop(why), timeout_s=timing.REPORT_END_S)

    def _leave(self) -> None:
        """End this process after a deadline or a loss: write the stacks, rescue the state, name the suspect and tell
        the others."""
        now = self.record.read()
        overdue, code = now.until_s < time.monotonic(), PEER_LOST
        what = f"lost a peer at step {now.step}"
        if overdue:
            what = f"{now.phase} (step {now.step}) took longer than {now.timeout_s:g} s"
            code = JOIN_FAILED if now.phase == "join" else PEER_LOST
        if self._leaving is None:
            lines = self._take_stacks(what, all_alive=overdue or bool(self._lost.get("alive")))
            loss = self.loss(self.suspects(overdue=overdue), what, code=code)
        with self._saving_lock:
            if self._leaving is not None:
                return  # the main thread noticed the loss by itself, and may know more about it
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
        """Write the stacks of this rank. Returns lines for the log: the file and, if `all_alive`, where all ranks are.
        If a rank's process has ended, ask nobody where it is: the restart of the job waits for this rank to leave."""
        file = within(timing.STACKS_S, lambda: dump(why, self.record))  # before `heartbeats`, which takes longer
        locations = {heartbeat["rank"]: heartbeat["location"] for heartbeat in self.heartbeats()} if all_alive else {}
        lines = ["; ".join(compare(locations))] if locations else []
        return [*lines, f"the stacks of all threads are in {file}"] if file else lines

    def _beat(self) -> None:
        """Write a heartbeat. The location is "all_reduce (loop.py:213 step) of step 413"."""
        now, (location, waits) = self.record.read(), own_location()
        self.record.beat(location + in_phase(now.phase, now.step), blocked=waits, begun=self.begun())

    def loss(self, suspects: list[Suspect], what: str = "", *, code: int = PEER_LOST) -> PeerLost:
        """Return the error for a loss, which the caller raises. `suspects`: the likeliest first. `what`: what happened,
        by default the loss of a peer. `code`: the exit code, unless the first suspect's forbids a restart."""
        what = what or f"lost a peer at step {self.record.step}"
        if self._deadlock:  # no restart helps
            return PeerLost(f"{what}: {self._deadlock}", code=FAULT, nobody_died=True)
        root = root_cause([*(suspect.code for suspect in suspects[:1] if suspect.code is not None), code])
        on_one_host = len({self.hosts[suspect.rank] for suspect in suspects}) == 1  # if not, any host may be at fault
        return PeerLost(
            what if self.world_size == 1 else f"{what}: {describe(suspects, self.hosts)}",
            code=code if worth_restarting(root) else root,
            suspect=suspects[0].rank if on_one_host else None,
            nobody_died=all(suspect.alive for suspect in suspects),
        )

    def suspects(self, *, overdue: bool = False) -> list[Suspect]:
        """Rescue this rank's state. Then return the ranks that may be lost, the likeliest first; none if all ranks wait
        for each other. Wait until the line names a lost rank, unless `overdue`: this rank's own deadline has passed."""
        self._rescue()
        if not self.connected:
            return []
        if not overdue:
            self._heard.wait(timing.CAUSE_S)
        late = self._late() if not self._lost else []
        if not (lost := self._lost):  # read again: a report may have come meanwhile, which says more
            return late
        if lost["is"] == "gone" and overdue and not any(
            row["waiting"] or may_wait(row["location"]) for row in self._newest() if row["rank"] == self.rank
        ):
            # This rank itself takes too long: the ranks that waited for it have left, and rank 0 was one of them
            return [Suspect(self.rank, "the others have left", alive=True)]
        alive = bool(lost.get("alive"))
        return [Suspect(rank, lost["why"], code=lost.get("code"), alive=alive) for rank in lost.get("ranks", [0])]

    def _late(self) -> list[Suspect]:
        """Return the suspects if no process has ended: the silent ranks, or else the ranks that wait for no other. A
        rank in backward or in `synchronize` is one only if all others certainly wait. If there are none although ranks
        have begun different collectives, set `_deadlock`."""
        asked_s = time.monotonic()
        while True:
            waited_s = time.monotonic() - asked_s  # before the question, because the delay of the answer is unknown
            if not self._ask(timing.QUIET_S):
                return [Suspect(0, "it does not answer")]
            # Only heartbeats given since the first question count: a rank with an older one may have been stopped since
            heartbeats = [heartbeat for heartbeat in self._heartbeats if heartbeat["rank"] != self.rank]
            silent = [heartbeat for heartbeat in heartbeats if heartbeat["ago_s"] > waited_s]
            if not silent or waited_s > timing.QUIET_S or self._heard.wait(timing.ALIVE_S):
                break
        if silent:
            return [Suspect(heartbeat["rank"], "sent no heartbeat") for heartbeat in silent]
        found = self._newest()
        late = [row for row in found if not row["waiting"]]
        if not late and any(who_is_ahead([row["begun"] for row in found])):
            where = "; ".join(compare({row["rank"]: row["location"] for row in found}))
            self._deadlock = f"the ranks wait for each other at different places of the program: {where}"
        # Not each backend counts its exchanges, and on a GPU the host may have begun all of them
        busy = [row for row in late if not may_wait(row["location"])]
        if busy or len(late) == self.world_size:
            late = busy
        if [row["rank"] for row in late] == [self.rank]:
            return [Suspect(self.rank, "the others wait for it", alive=True)]
        return [
            Suspect(row["rank"], f"is alive, in {row['phase']} at step {row['step']}", alive=True) for row in late
        ]

    def _rescue(self) -> None:
        """Let `Saving` write the state, once. A second caller waits for the first, so that the process does not end."""
        with self._saving_lock:
            saving, self._saving = self._saving, None
            if saving is not None:
                self.record.extend(self._saving_timeout_s + timing.LEAVING_S)
                self.record.note_written(1)  # the agent kills no rank that makes progress
                within(self._saving_timeout_s, saving.rescue)
                self.record.extend(timing.LEAVING_S)


def who_is_ahead(begun: Sequence[Mapping[str, int]]) -> list[bool]:
    """Return for each rank whether it has begun a collective that another rank has not begun, and so waits for that
    rank or soon will. `begun`: the number of collectives that each rank has begun, by process group."""
    least: dict[str, int] = {}
    for counts in begun:
        for name, count in counts.items():
            least[name] = min(count, least.get(name, count))
    return [any(count > least[name] for name, count in counts.items()) for counts in begun]


def describe(suspects: list[Suspect], hosts: Sequence[str]) -> str:
    """Return one clause: "rank 3 on node1 (its process has ended)". If no code is known, it is "suspected: ..."."""
    if not suspects:
        return "suspected: nobody, all ranks wait for each other"
    named = ", ".join(f"rank {s.rank} on {hosts[s.rank]} ({s.why})" for s in suspects[:4])
    return named if suspects[0].code is not None else f"suspected: {named}"
