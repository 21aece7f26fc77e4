"""The agent of one node: it meets the others, starts this node's ranks, and carries their ends and stop requests.

It lives as long as the job. It has one thread, uses no device and does not import torch.

| a rank ends badly      | its agent says so; the leader ends the membership; every agent has its ranks leave, and      |
|                        | says how each of them ended; the leader decides (`ends`): another membership, or the end     |
| an agent is lost       | the same, once its connection ends or it is silent; another one has to come in its place     |
| the leader is lost     | every agent has its ranks leave, and looks for the leader until its time to join is over     |
| an agent gets a signal | the leader tells all agents, and each passes it on to its ranks                              |
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankup.agent import script_env
from rankup.agent.ends import End, Ends, Verdict
from rankup.agent.fork_server import ForkServer
from rankup.agent.meeting import Attendance, Leader, Member
from rankup.agent.network import free_port, listen
from rankup.agent.output import Pump
from rankup.agent.processes import Fresh, explain_sigkill, oom_kills, reap, state_of
from rankup.agent.record import Records
from rankup.agent.script import Script
from rankup.agent.status import RunStatus
from rankup.env.node_env import NodeEnv
from rankup.errors import FAULT, FINISHED, JOIN_FAILED, PEER_LOST, STOPPED, JoinError

log = logging.getLogger("rankup")

# Ranks notice within a second that a peer is gone, and leave with what they hold. One that still waits for a peer to
# join does not: it is told to leave after this time.
NOTICE_S = 2.0
# The ranks of a job end together. After one has ended the rest have this long to leave.
SETTLE_S = 15.0
SCRIPT_SETTLE_S = 5.0  # a script that knows nothing of us: it has only its own state to write
KILL_S = 5.0  # how long a process may take to end once it is killed
STOPPED_S = 10.0  # a rank in state T (SIGSTOP) answers nobody
TICK_S = 0.25
SAY_S = 10.0  # between two lines that say where a script is that does not stop
REPEAT_S = 5.0  # a signal that comes again so much later is meant: leave at once
KILLED = 128 + signal.SIGKILL


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `rankup launch` was asked for; `rankup launch --help` explains each."""

    join_timeout_s: float = 300.0
    max_restarts: int = 3
    restart_on: frozenset[int] = frozenset()
    restart_args: tuple[str, ...] = ()
    stop_grace_s: float = 110.0
    pass_local_rank: str = "auto"
    work_dir: str = ""
    start: str = "fork"  # or fresh, spawn: of a script that imports rankup
    preload: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Helpers:
    """What the agent needs of layers above it. `advice`: on a script's last lines, or "". `where`: in which line each
    of this node's ranks is, or ""."""

    advice: Callable[[str], str] = lambda tail: ""
    where: Callable[[], str] = lambda: ""


class Rank:
    """One rank of this node. A process runs while `running`; `told` to leave, its code explains nothing."""

    def __init__(self, local_rank: int, number: int) -> None:
        self.local_rank, self.number = local_rank, number
        self.running = self.told = False
        self.pid = 0
        self.process: Fresh | None = None  # of a script that does not import rankup
        self.pump: Pump | None = None
        self.stopped_since_s = 0.0  # in state T


class Agent:
    """Runs this node's part of the job to its end."""

    def __init__(
        self, node: NodeEnv, script: Script, options: Options, *, run_dir: Path, helpers: Helpers
    ) -> None:
        self.node, self.script, self.options, self.helpers = node, script, options, helpers
        self.run_dir = run_dir
        self.knows_us = script.imports_rankup
        self.ranks = [Rank(local_rank, node.first_rank + local_rank) for local_rank in range(node.nproc)]
        self.records = Records(node.nproc)
        self.host = socket.gethostname().split(".")[0]
        self.commit: dict[str, Any] = {}
        self.server: ForkServer | None = None
        self.lead: Lead | None = None
        self._all_ended = asyncio.Event()
        self._all_ended.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving: asyncio.Task[None] | None = None
        self._passed_on = ""  # the newest signal that the ranks got
        self._asked_s = 0.0  # when a signal came to this agent
        self._oom_kills = oom_kills()
        self._over: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()

    async def run(self) -> Verdict:
        """Be one of the agents to the end. Returns its exit code and why. Raises JoinError and LaunchError."""
        loop = asyncio.get_running_loop()
        for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
            loop.add_signal_handler(getattr(signal, name), self._hear_signal, name)
        if self.knows_us and self.options.start != "fresh":
            self._start_server()
        settings = self.script.must_match()
        me = Member.of(settings, node=self.node, host=self.host, left_s=self.options.join_timeout_s)
        try:
            if self.node.node_rank == 0:
                self.lead = Lead(self, me)
                await self.lead.listen()
            attendance = Attendance(me, settings, self._find_leader, notice=lambda text: log.info("%s", text))
            self._say = attendance.say
            self._spawn(self._attend(attendance))
            self._spawn(self._tick())
            return await self._over
        finally:
            await self._end_ranks(settle_s=0.0)
            if self.lead is not None:
                await self.lead.close()
            for task in self._tasks:
                task.cancel()
            if self.server is not None:
                await self.server.close()

    async def _find_leader(self) -> tuple[str, int]:
        if self.lead is not None:
            return "127.0.0.1", self.lead.port
        return self.node.master_addr, self.node.master_port

    # Events of the leader -------------------------------------------------------------------------------------------

    async def _attend(self, attendance: Attendance) -> None:
        try:
            async for event in attendance.events():
                self._act(event)
        except JoinError as error:
            self._finish(Verdict(JOIN_FAILED, str(error)))

    def _act(self, event: dict[str, Any]) -> None:
        if event["is"] == "propose":
            self._spawn(self._get_ready(event))
        elif event["is"] == "commit":
            self._start_ranks(event)
        elif event["is"] in ("lost", "gone"):
            self._leave_soon()
        elif event["is"] == "stop":
            self._pass_on(event["signal"])
        elif event["is"] in ("over", "refused"):
            self._finish(Verdict(event["code"], event["text"]))

    def _finish(self, verdict: Verdict) -> None:
        if not self._over.done():
            self._over.set_result(verdict)

    async def _get_ready(self, event: dict[str, Any]) -> None:
        """Answer a proposal once no rank of an earlier membership runs, and the next ones can be started."""
        self._leave_soon()
        await self._all_ended.wait()
        if self.server is not None:
            await self.server.ready()
        self._say("ready", membership=event["membership"])

    # This node's ranks ----------------------------------------------------------------------------------------------

    def _start_server(self) -> None:
        modules = ["torch", "torch._dynamo", *self.script.safe_imports(), *self.options.preload]
        self.server = ForkServer(
            modules, on_end=self._ended, on_start=self._started, on_gone=self._replace_server,
            on_warning=lambda text: log.warning("%s", text),
        )

    def _replace_server(self) -> None:
        """It was killed, and the kernel kills its ranks: start another one."""
        log.warning("the process that forks the ranks was killed, and they with it")
        self._start_server()
        for rank in self.ranks:
            if rank.running:
                self._ended(rank.local_rank, KILLED)

    def _start_ranks(self, commit: dict[str, Any]) -> None:
        self.commit = commit
        if commit.get("why"):
            log.warning("%s", commit["why"])
        self._oom_kills = oom_kills()
        self._all_ended.clear()
        for rank in self.ranks:
            rank.running, rank.told, rank.pid = True, False, 0
            self.records.clear(rank.local_rank)
            env = self._environment(rank)
            words = self.script.command(rank.local_rank, self.options.pass_local_rank)
            if commit["restarts"]:
                words += self.options.restart_args
            if self.server is not None:
                self.server.start_rank(rank.local_rank, name=f"rank {rank.number}", argv=words, env=env)
            else:
                self._start_fresh(rank, words, env)
        if self._passed_on:  # it came between the leader's words
            self._pass_on(self._passed_on)

    def _environment(self, rank: Rank) -> dict[str, str]:
        commit, node = self.commit, self.node
        agent = {
            "pid": os.getpid(), "job": commit["job"], "restarts": commit["restarts"],
            "max_restarts": self.options.max_restarts, "membership": commit["membership"],
            "record": self.records.place(rank.local_rank),
        }
        attempt = f"{commit['job']}-{commit['restarts']}"
        error_file = self.run_dir / "status" / attempt / f"error-rank-{rank.number}.json"
        return script_env.rank_environment(
            os.environ, rank=rank.number, local_rank=rank.local_rank, world_size=node.world_size,
            local_world_size=node.nproc, node_rank=node.node_rank, num_nodes=node.num_nodes,
            master_addr=node.master_addr, master_port=commit["port"], use_agent_store=commit["store"],
            restarts=commit["restarts"], max_restarts=self.options.max_restarts, run_id=commit["job"],
            error_file=error_file, agent=agent if self.knows_us else None,
        )

    def _start_fresh(self, rank: Rank, words: list[str], env: dict[str, str]) -> None:
        log.info("starting %s as rank %d of %d", self.script.name, rank.number, self.node.world_size)
        rank.process = Fresh.start(words, env=env, folder=self.options.work_dir, pipes=not self.knows_us)
        rank.pid = rank.process.pid
        if not self.knows_us:
            rank.pump = Pump(rank.process, rank=rank.number, world_size=self.node.world_size, run_dir=self.run_dir)
        self._spawn(self._await_end(rank, rank.process))

    async def _await_end(self, rank: Rank, process: Fresh) -> None:
        code = await process.wait()
        if rank.pump is not None:
            await rank.pump.drained()
        if rank.process is process:
            self._ended(rank.local_rank, code)

    def _started(self, local_rank: int, pid: int) -> None:
        self.ranks[local_rank].pid = pid

    def _ended(self, local_rank: int, code: int) -> None:
        rank, record = self.ranks[local_rank], self.records.read(local_rank)
        if not rank.running:
            return
        rank.running = False
        if code == FINISHED and record.phase and not record.finished:
            log.warning("rank %d ended with 0, but it did not say that it finished", rank.number)
            code = FAULT
        cause = f"SIGKILL: {explain_sigkill(self._oom_kills)}" if code == KILLED else ""
        if rank.pump is not None and code != FINISHED and not rank.told and not cause:
            cause = rank.pump.cause()
        self._say("end", rank=rank.number, code=code, cause=cause, step=record.step, told=rank.told)
        if not any(each.running for each in self.ranks):
            self._all_ended.set()

    # Their ends -----------------------------------------------------------------------------------------------------

    def _leave_soon(self) -> None:
        if self._leaving is None or self._leaving.done():
            self._leaving = self._spawn(self._end_ranks(settle_s=SETTLE_S if self.knows_us else SCRIPT_SETTLE_S))

    async def _end_ranks(self, *, settle_s: float) -> None:
        """Return once all ranks have ended. They get a moment to find out by themselves, then SIGTERM, then SIGKILL."""
        if self._passed_on:
            settle_s += 0.0 if self.knows_us else self.options.stop_grace_s
        elif not await self._ended_within(min(NOTICE_S, settle_s)):
            self._signal("SIGTERM")
        if await self._ended_within(settle_s):
            return
        for rank in self.ranks:
            if rank.running:
                log.warning("rank %d did not end within %g s after the others: killed", rank.number, settle_s)
                rank.told = True
                self._kill(rank)
        if not await self._ended_within(KILL_S):
            for rank in self.ranks:  # it waits for a dead disk, and ends when the disk answers
                self._ended(rank.local_rank, PEER_LOST)

    async def _ended_within(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_ended.wait(), timeout_s)
        return self._all_ended.is_set()

    def _signal(self, name: str) -> None:
        """To every rank that runs, at once."""
        for rank in self.ranks:
            if rank.running:
                rank.told = True
                if rank.process is not None:
                    rank.process.send(getattr(signal, name))
                elif self.server is not None:
                    # SIGTERM whatever the signal was: a Python that has just started leaves of it without a traceback
                    self.server.signal(rank.local_rank, signal.SIGTERM)

    def _kill(self, rank: Rank) -> None:
        if rank.process is not None:
            rank.process.kill()
        elif self.server is not None:
            self.server.kill(rank.local_rank)

    # Stops ----------------------------------------------------------------------------------------------------------

    def _hear_signal(self, name: str) -> None:
        """The first one is told to all agents. One that comes again later is meant."""
        now_s = time.monotonic()
        if self._asked_s and name != "SIGUSR1" and now_s - self._asked_s > REPEAT_S:
            why = f"{name} again, {now_s - self._asked_s:.0f} s after the first: leaving at once"
            self._finish(Verdict(STOPPED, why))
        if name != "SIGUSR1":
            self._asked_s = self._asked_s or now_s
        if not any(rank.running for rank in self.ranks):
            self._finish(Verdict(STOPPED, f"{name} before the first step: nothing new to save."))
        self._say("stop", signal=name)
        self._pass_on(name)

    def _pass_on(self, name: str) -> None:
        if self._passed_on in (name, "SIGTERM", "SIGINT"):
            return
        self._passed_on = name
        running = sum(rank.running for rank in self.ranks)
        log.info("%s: passed on to %d rank%s", name, running, "" if running == 1 else "s")
        self._signal(name)
        if not self.knows_us and name != "SIGUSR1":
            self._spawn(self._oversee_stop(name))

    async def _oversee_stop(self, name: str) -> None:
        """Say every SAY_S where the script's ranks are that do not end; kill them once their grace is over."""
        began_s = time.monotonic()
        while (left_s := began_s + self.options.stop_grace_s - time.monotonic()) > 0:
            if await self._ended_within(min(SAY_S, left_s)):
                return
            where = await asyncio.to_thread(self.helpers.where)
            log.warning("%.0f s after %s the script still runs%s", time.monotonic() - began_s, name, where)
        grace_s = self.options.stop_grace_s
        log.warning("the script did not end within %g s of %s: killed (--stop-grace-s)", grace_s, name)
        for rank in self.ranks:
            if rank.running:
                self._kill(rank)

    async def _tick(self) -> None:
        """What tells nobody: ranks that were stopped (SIGSTOP), and orphans that a container's first process reaps."""
        while True:
            await asyncio.sleep(TICK_S)
            reap()
            now_s = time.monotonic()
            for rank in self.ranks:
                if not (rank.running and rank.pid and state_of(rank.pid) == "T"):
                    rank.stopped_since_s = now_s
                elif now_s - rank.stopped_since_s > STOPPED_S:
                    log.warning("rank %d has been stopped (SIGSTOP) for %g s: killed", rank.number, STOPPED_S)
                    rank.stopped_since_s = now_s
                    self._kill(rank)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        """A fault of ours in a task ends the agent: nobody else would notice it."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._over.done():
            self._over.set_exception(error)


class Lead:
    """What node 0's agent does beside: it leads the meeting, and decides what the ends of ranks mean."""

    def __init__(self, agent: Agent, me: Member) -> None:
        self.agent = agent
        self.ends = Ends(agent.node.world_size, agent.options.max_restarts, agent.options.restart_on)
        self.leader = Leader(me, say=lambda text: log.info("%s", text), prepare=self._prepare, hear=self._hear)
        self.status = RunStatus(agent.run_dir, agent.node.world_size) if not agent.knows_us else None
        self.port = 0

    async def listen(self) -> None:
        """Raises LaunchError where the port can't be had."""
        alone = self.agent.node.num_nodes == 1
        self._server = await listen(
            self.leader.attend, ip="127.0.0.1" if alone else "", port=self.agent.node.master_port
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self.agent._spawn(self._tick())

    async def close(self) -> None:
        """Once the others have heard how it ends."""
        await self.leader.close()
        self._server.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.leader.tick()

    async def _prepare(self, membership: int) -> dict[str, Any] | None:
        """What a commit says beside its members; None where the job is over instead."""
        verdict = self.ends.judge()
        if verdict.code is not None:
            self._end(verdict)
            return None
        server = self.agent.server
        port = await server.serve_store() if server is not None else free_port()
        return {
            "job": self.agent.job, "restarts": self.ends.restarts, "why": verdict.text, "port": port,
            "store": server is not None,
        }

    def _hear(self, member: Member, message: dict[str, Any]) -> None:
        if message["is"] == "end":
            end = End.read(message, member.host)
            if self.ends.add(end) and self.leader.running:
                if end.code == FINISHED and self.ends.all_finished:
                    self._end(Verdict(FINISHED))
                else:
                    self.leader.lose([end.rank], member.host, str(end))
        elif message["is"] == "lost":  # its agent, and its ranks with it
            self.ends.lose(member.ranks, member.host, message["why"])
        elif message["is"] == "stop":
            self.ends.stopped_by = self.ends.stopped_by or str(message["signal"])
            self.leader.tell("stop", signal=message["signal"])
            if not self.leader.running:
                self._end(Verdict(STOPPED, self.ends.stopped_by))

    def _end(self, verdict: Verdict) -> None:
        self.leader.tell("over", code=verdict.code, text=verdict.text)
