"""The supervisor of the ranks of one node: forks each anew that ends in a way that a restart may help. No torch here.

It does not wait for the others: a rank that is lost costs them their peer, each leaves with its last finished step and
is forked anew, and all meet again within a second. It restarts at once and gives up after some ends in a row that
brought no new step; whoever started the supervisor (an engine, a scheduler, a user) then decides what to do.
"""

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from rankup.errors import FINISHED, PEER_LOST, STOPPED, root_cause, worth_restarting
from train.process.fork_client import ForkServer, reap
from train.process.last_word import take_back, tell_platform
from train.process.limits import explain_sigkill, oom_kills
from train.process.log import Log
from train.process.proc import state_of
from train.process.progress import ProgressBoard
from train.process.status import attempt_of
from train.process.stop import StopRequest

ENTRY = "train.main:entry"
# How often to look for what tells nobody: stopped ranks, and orphans that a container's first process has to reap.
TICK_S = 1.0
# The ranks of a job end together. After one has ended for good, with whatever code, the rest have this long to find out
# and report whom they lost, or to finish. One that was stopped (SIGSTOP, a frozen disk) ends in no other way.
SETTLE_S = 15.0
# Ranks notice within a second that a peer is gone, and explain it better than we can. One that still waits for a peer
# to join does not: it is told to leave after this time.
TELL_REST_S = 2.0
# A rank in state T answers nobody, and its peers find out only by its silence.
STOPPED_S = 10.0
KILL_S = 5.0  # how long a process may take to end once it is killed
KILLED = 128 + signal.SIGKILL


@dataclass
class Rank:
    """One rank of this node. `number`: among all. `environment`: what it gets beside that of the supervisor."""

    number: int
    environment: dict[str, str]
    restarts: int = 0
    without_progress: int = 0  # restarts since it last finished a new step
    furthest_step: int = 0
    running: bool = False
    pid: int = 0  # 0 until the server has said it
    code: int | None = None  # how its last process ended


class Supervisor:
    """Runs the ranks of a node to their end."""

    def __init__(
        self, environments: list[dict[str, str]], arguments: list[str], *, first_rank: int, job: str, start_method: str,
        modules: list[str], max_restarts: int, stop: StopRequest, log: Log, restart_on: Collection[int] = (),
        same_signal: bool = False, stop_grace_s: float = 0.0,
    ) -> None:
        """`environments`: what each local rank gets beside ours. `arguments`: of `train.main`.

        `job`: restart N of a rank is attempt `attempt_of(job, N)`. `start_method`, `modules`: see `fork_client.Order`.
        `max_restarts`: of one rank, in a row without a new step. `restart_on`: codes that are worth a restart beside
        those of `errors`. `same_signal`: pass on the signal that came, which somebody's script may tell from SIGTERM.
        `stop_grace_s`: how long a rank may take to stop after others have stopped, beside SETTLE_S.
        """
        self.restart_on, self.same_signal, self.stop_grace_s = restart_on, same_signal, stop_grace_s
        self.ranks = {local_rank: Rank(first_rank + local_rank, own) for local_rank, own in enumerate(environments)}
        self.arguments, self.job, self.start_method, self.modules = arguments, job, start_method, modules
        self.max_restarts, self.stop, self.log = max_restarts, stop, log
        self.codes: dict[int, int] = {}  # by local rank, the first that ended first
        self._board = ProgressBoard(len(environments))
        self._server = ForkServer(start_method, modules, ENTRY, arguments)
        self._forwarded = ""  # the signal
        self._settle_s = SETTLE_S
        self._settled_s = float("inf")  # when ranks that still run are late; finite once no rank is started again
        self._tell_rest_s = float("inf")  # when ranks that still run are told that one has failed
        self._told_rest = self._killing = False
        self._oom_kills = oom_kills()
        self._stopped_since_s: dict[int, float] = {}  # by process, of those that are stopped now

    def run(self) -> int:
        """Start the ranks and return the exit code of the one that caused the end."""
        try:
            while True:
                for local_rank in self.ranks:
                    self._start(local_rank)
                while any(rank.running for rank in self.ranks.values()):
                    self._wait()
                codes = list(self.codes.values())
                code = root_cause(codes, stopped=self.stop.requested, rest_stopped=self._told_rest)
                if not self._killed_after_the_end(code):
                    return code
        finally:
            self._server.close()

    def attempt(self, local_rank: int) -> str:
        """The id of this rank's last attempt."""
        return attempt_of(self.job, self.ranks[local_rank].restarts)

    def _start(self, local_rank: int) -> None:
        rank = self.ranks[local_rank]
        given = {
            "RANKUP_ATTEMPT": self.attempt(local_rank), "RANKUP_RESTART": str(rank.restarts),
            "RANKUP_PROGRESS": self._board.place(local_rank), "RANKUP_MAX_RESTARTS": str(self.max_restarts),
        }
        if rank.code is not None:
            given["RANKUP_ENDED"] = str(rank.code)
        rank.running, rank.pid = True, 0
        self.codes.pop(local_rank, None)
        self._server.ask(
            start=local_rank, name=f"rank {rank.number}", arguments=self.arguments, env={**rank.environment, **given}
        )

    def _wait(self) -> None:
        """Wait for something to happen, a moment at most, and act on it."""
        sources: list[Any] = [self._server.channel]
        if not self._forwarded:
            sources.append(self.stop)
        due_s = max(0.0, min(self._settled_s, self._tell_rest_s) - time.monotonic())
        readable = select.select(sources, [], [], min(TICK_S, due_s))[0]
        if self._server.channel in readable:
            for news in self._server.news():
                self._hear(news)
            if not self._server.alive:
                self._replace_server()
        name = self.stop.signal_name if self.same_signal or not self._forwarded else self._forwarded
        if name != self._forwarded:
            self._forward_stop()
        self._end_stopped()
        reap()
        if time.monotonic() > self._tell_rest_s:
            self._told_rest, self._tell_rest_s = True, float("inf")
            self._ask_to_leave()
        if time.monotonic() > self._settled_s:
            self._end_late()

    def _hear(self, news: dict[str, Any]) -> None:
        if "warning" in news:
            self.log.warning(news["warning"])
        elif "started" in news:
            self.ranks[news["started"]].pid = news["pid"]
            self.stop.finish_step_first()  # a signal is passed on from here on; before there was nobody to save
        else:
            self._note_end(news["ended"], news["code"])

    # Ends -------------------------------------------------------------------------------------------------------

    def _note_end(self, local_rank: int, code: int) -> None:
        """A rank has ended: start it again at once, or let all come to their end."""
        rank = self.ranks[local_rank]
        rank.running = False
        rank.code = self.codes[local_rank] = PEER_LOST if self._killing else code
        over = self.stop.requested or self._settled_s != float("inf")
        helps = worth_restarting(code) or code in self.restart_on
        if not over and helps and self._count_restart(local_rank):
            self._start(local_rank)
        elif self._settled_s == float("inf"):
            stopped = self.stop.requested or code == STOPPED
            self._settle_s = SETTLE_S + (self.stop_grace_s if stopped else 0)
            self._settled_s = time.monotonic() + self._settle_s
            if code not in (FINISHED, STOPPED) and not self._forwarded:
                self._tell_rest_s = time.monotonic() + TELL_REST_S

    def _count_restart(self, local_rank: int) -> bool:
        """Whether this rank may be started again, with one line about it."""
        rank = self.ranks[local_rank]
        if (step := self._board.step(local_rank)) > rank.furthest_step:
            rank.furthest_step, rank.without_progress = step, 0
        ended = f"rank {rank.number} ended with {rank.code}"
        if rank.code == KILLED:
            ended += f" (SIGKILL: {explain_sigkill(self._oom_kills)})"
            self._oom_kills = oom_kills()
        if rank.without_progress >= self.max_restarts:
            gave_up = f"{ended}; gave up after {self.max_restarts} restarts without progress"
            self.log.warning(gave_up)
            tell_platform(gave_up, rank.code or 0)
            return False
        take_back()
        rank.restarts += 1
        rank.without_progress += 1
        # Of the attempts since then: the one that reached the newest step is none of them
        vain = rank.without_progress - (rank.furthest_step > 0)
        self.log.warning(f"{ended}, restarted ({vain} of {self.max_restarts} attempts without progress)")
        return True

    def _killed_after_the_end(self, code: int) -> bool:
        """Whether some ranks finished and others were killed in their last moment: all then look at the run once more.

        Those that finished were not started again, and the others can't join without them.
        """
        if self.stop.requested or FINISHED not in self.codes.values() or not worth_restarting(code):
            return False
        for local_rank, ended in list(self.codes.items()):
            if ended == FINISHED:
                self.ranks[local_rank].restarts += 1
            elif not self._count_restart(local_rank):
                return False
        self._settled_s, self._killing = float("inf"), False
        return True

    # Ranks that do not end by themselves ------------------------------------------------------------------------

    def _forward_stop(self) -> None:
        self._forwarded, self._tell_rest_s = self.stop.signal_name, float("inf")
        running = sum(rank.running for rank in self.ranks.values())
        then = "" if self.same_signal else ", which save and leave"
        self.log.info(f"{self.stop.signal_name}: passed on to {running} ranks{then}")
        if any(rank.pid for rank in self.ranks.values() if rank.running):
            self._ask_to_leave(getattr(signal, self.stop.signal_name) if self.same_signal else signal.SIGTERM)
            return
        # A server that has replaced another one still imports, and has forked nobody
        self._server.close()
        for local_rank in self.ranks:
            self._note_end(local_rank, STOPPED)

    def _ask_to_leave(self, number: int = signal.SIGTERM) -> None:
        # SIGTERM, whatever the signal was: a Python that has only just started leaves of this one without a traceback
        for local_rank, rank in self.ranks.items():
            if rank.running:
                self._server.ask(signal=number, rank=local_rank)

    def _end_stopped(self) -> None:
        """Kill what has been stopped (SIGSTOP) for STOPPED_S: the peers would learn of it by silence alone."""
        now_s = time.monotonic()
        processes = {rank.pid: f"rank {rank.number}" for rank in self.ranks.values() if rank.running and rank.pid}
        processes[self._server.pid] = "the process that forks the ranks"
        self._stopped_since_s = {
            pid: self._stopped_since_s.get(pid, now_s) for pid in processes if state_of(pid) == "T"
        }
        for pid, since_s in self._stopped_since_s.items():
            if now_s - since_s > STOPPED_S:
                self.log.warning(f"{processes[pid]} has been stopped (SIGSTOP) for {STOPPED_S:g} s: killed")
                os.kill(pid, signal.SIGKILL)  # stopped, so neither gone nor another process by now

    def _end_late(self) -> None:
        late = [local_rank for local_rank, rank in self.ranks.items() if rank.running]
        for local_rank in late:
            if self._killing:  # it waits for a dead disk, and ends when the disk answers
                self._note_end(local_rank, PEER_LOST)
                continue
            self.log.warning(
                f"rank {self.ranks[local_rank].number} did not end within {self._settle_s:g} s after the others: killed"
            )
            self._server.ask(kill=local_rank)
        self._settled_s, self._killing = time.monotonic() + KILL_S, True

    def _replace_server(self) -> None:
        """The server was killed, and the kernel kills its ranks: start another one, which starts them again."""
        self.log.warning("the process that forks the ranks was killed, and they with it")
        self._server.close()
        lost = {local_rank: rank for local_rank, rank in self.ranks.items() if rank.running}
        for rank in lost.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if rank.pid:
                    os.killpg(rank.pid, signal.SIGKILL)  # what it had started itself
        until_s = time.monotonic() + KILL_S
        while any(state_of(rank.pid) not in ("", "Z") for rank in lost.values()) and time.monotonic() < until_s:
            time.sleep(0.01)
        self._server = ForkServer(self.start_method, self.modules, ENTRY, self.arguments)
        for local_rank in lost:
            self._note_end(local_rank, KILLED)
