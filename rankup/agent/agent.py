"""The agent of one node: it meets the others, starts this node's ranks, and carries their ends and stop requests.

It lives as long as the job. Its event loop is one thread; the pipes of a fresh rank are read by others. It uses no
device and does not import torch.

| a rank ends badly      | its agent says so; the leader ends the membership; every agent has its ranks leave, and     |
|                        | says how each of them ended; the leader decides (`ends`): another membership, or the end    |
| an agent is lost       | the same, once its connection ends or it is silent; another one has to come in its place    |
| the leader is lost     | every agent has its ranks leave, and looks for the leader until its time to join is over    |
| the number may change  | the lost one is replaced by a spare, or not at all; after the leader the next member leads  |
|                        | after SIGTERM to one agent its node saves with the others, and leaves for good              |
| an agent gets a signal | the leader tells all agents, and each passes it on to its ranks                             |
"""

import asyncio
import contextlib
import functools
import hashlib
import json
import logging
import math
import os
import secrets
import signal
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rankup import timing
from rankup.agent import secret
from rankup.agent.attendance import Attendance
from rankup.agent.ends import End, Ends, Verdict
from rankup.agent.fork_server import ForkServer
from rankup.agent.limits import cpu_quota, explain_sigkill, oom_kills
from rankup.agent.logs import host_name, open_log
from rankup.agent.meeting import Leader
from rankup.agent.network import choose_interface, chosen_address, foreign_address, listen, open_port
from rankup.agent.output import Pump, last_exception
from rankup.agent.processes import (
    die_with_parent,
    has_handler,
    reap_orphans,
    state_of,
    within,
)
from rankup.agent.protocol import AGENTS, CHANGING, KILLED, SIGNALS, VERSION, Link, Links, Member, in_thread
from rankup.agent.record import Records, RecordWriter
from rankup.agent.script import Script, own_imports, safe_imports
from rankup.agent.status import (
    STACKS,
    ScriptStatus,
    announce_stacks,
    attempt_of,
    new_job,
    stacks_environment,
    write_end,
)
from rankup.env.addresses import free_port
from rankup.env.node_env import NodeEnv
from rankup.errors import FAULT, FINISHED, PEER_LOST, STOPPED

log = logging.getLogger("rankup")
PARENT = "RANKUP_PARENT"  # the process without which the agent shall not go on


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `rankup launch` was asked for; `rankup launch --help` explains each."""

    join_timeout_s: float = 300.0
    max_restarts: int = 3
    restart_on: frozenset[int] = frozenset()
    restart_args: tuple[str, ...] = ()
    stop_grace_s: float = 110.0
    work_dir: str = ""
    start: str = "fork"  # or fresh: of a script that imports rankup
    stop_after: int | None = None  # a part of a replay ends after this step


@dataclass(frozen=True, kw_only=True)
class Helpers:
    """What the agent needs of layers above it. `advice`: on a script's last lines, or "". `where`: asks these ranks of
    a run for their stacks, and returns a line for each place where they are. `tell`: the platform, how a job ended."""

    advice: Callable[[str], str] = lambda tail: ""
    where: Callable[[Path, Collection[int]], Sequence[str]] = lambda run_dir, ranks: ()


class Rank:
    """One rank of this node. `told` to leave, its code explains nothing."""

    def __init__(self, local_rank: int, number: int) -> None:
        self.local_rank, self.number = local_rank, number
        self.running = self.told = False
        self.said: End | None = None  # how it ends, in its own words
        self.pump: Pump | None = None  # where the script does not import rankup
        self.stopped_since_s = 0.0  # in state T


class Agent:
    """Runs this node's part of the job to its end."""

    def __init__(
        self, node: NodeEnv, script: Script, options: Options, *, run_dir: Path, helpers: Helpers
    ) -> None:
        self.claimed = node  # as it was started; `node` has the numbers of the newest membership
        self.node, self.script, self.options, self.run_dir, self.helpers = node, script, options, run_dir, helpers
        self.knows_us = script.imports_rankup()
        self.ranks = [Rank(local_rank, node.first_rank + local_rank) for local_rank in range(node.nproc)]
        self.records = Records(node.nproc, first_rank=node.first_rank)
        self.host = host_name()
        self.links = Links(self._hear_rank)
        self.server = ForkServer(
            on_start=self._announce, on_end=self._read_rest, on_gone=self._forget_server,
            on_warning=functools.partial(log.warning, "%s"),
        )
        self.lead: Lead | None = None
        self.limits, self.alone = node.limits, node.num_nodes == 1
        self.port = 0  # where this agent leads, or says who does
        self._listener: asyncio.Server | None = None
        self._elsewhere: tuple[str, int] | None = None  # where a leader has said that it leads
        self._commit: dict[str, Any] = {}
        self._given = dict(os.environ)
        self.places = dict[str, tuple[str, int]]()  # where each node was last, which may be started there anew
        self._all_ended = asyncio.Event()
        self._all_ended.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving: asyncio.Task[None] | None = None
        self._passed_on = ""  # the newest signal that the ranks got
        self._for_change = False  # it only asks them to stop for another membership
        self._asked_s = 0.0  # when a signal came to this agent
        self._leaves = False  # for good, and the others go on
        self._oom_kills = oom_kills()
        self._over: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()

    async def run(self) -> Verdict:
        """Be one of the agents to the end. Returns its exit code and why. Raises JoinError and UserError."""
        if (parent := os.environ.get(PARENT, "")).isdecimal():
            die_with_parent(int(parent))
        self.script.check(os.environ, world_size=self.node.world_size)
        settings = self.script.must_match()
        if self.limits is not None:
            settings |= {"--nnodes": f"{self.limits.least}:{self.limits.most}"}
        if self.node.node_rank == 0 or self.limits is not None:
            await self._listen()
        me = Member(
            token=secrets.token_hex(8), first_rank=self.node.first_rank, num_ranks=self.node.nproc,
            world_size=self.node.world_size, host=self.host, pid=os.getpid(),
            digest=hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16],
            left_s=self.options.join_timeout_s, ip="" if self.alone else chosen_address(os.environ),
            serves=self.port if self.limits is not None else 0,
        )
        self.attendance = Attendance(
            me, settings, self._find_leader, notice=functools.partial(log.warning, "%s"), records=self._records,
            silent_s=self.limits.silent_s if self.limits is not None else timing.SILENT_S,
            commit=AGENTS | (CHANGING if self.limits is not None else {}),
        )
        loop = asyncio.get_running_loop()
        for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
            loop.add_signal_handler(getattr(signal, name), self._hear_signal, name)
        loop.add_signal_handler(signal.SIGUSR2, self._ask_for_stacks)
        try:
            self._start_server()
            if self.knows_us:
                await self.links.open()
            if self.node.node_rank == 0:
                self._begin_to_lead()
            self.begin(self._attend())
            self.begin(self._tick())
            return await self._over
        finally:
            for task in list(self._tasks):
                task.cancel()
            await self._end_ranks(settle_s=0.0)
            if self.lead is not None:
                await self.lead.close()
            if self._listener is not None:
                self._listener.close()
            await self.server.close()
            self.links.close()

    # Who leads ------------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        """On MASTER_PORT where others look for this node there. Raises JoinError and LaunchError."""
        port = self.node.master_port
        if self.node.node_rank:
            try:  # node 0, or another agent, may be on this machine too
                port = port if await foreign_address(self.node.master_addr) else 0
                open_port("", port).close()
            except OSError:
                port = 0
        self._listener = await listen(self._greet, ip="127.0.0.1" if self.alone else "", port=port)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Whoever connects to this agent."""
        if self.lead is not None:
            await self.lead.leader.attend(reader, writer)
            return
        link, strange = Link(reader, writer), (OSError, LookupError, TypeError, ValueError, asyncio.CancelledError)
        with contextlib.suppress(*strange):
            link.send(
                "leader", version=VERSION, over="this node does not lead", token=self.attendance.me.token,
                n=self.attendance.basis["n"], at=self.attendance.at,
            )
            async with asyncio.timeout(timing.HELLO_S):
                said = await link.receive()
                if said["is"] == "leads" and int(said["n"]) >= self.attendance.basis["n"]:
                    self._elsewhere = link.remote_ip, int(said["port"])
        link.close()

    def _begin_to_lead(self) -> None:
        self.lead = Lead(self, self.attendance.me)
        self.lead.begin()

    def yield_to(self, ip: str, port: int) -> None:
        """There is a leader that knows a newer membership: be a member there."""
        if self.lead is not None:
            log.warning("another node leads, at %s:%d: this one becomes a member there", ip, port)
            lead, self.lead, self._elsewhere = self.lead, None, (ip, port)
            lead.give_up()

    async def _find_leader(self) -> tuple[str, int]:
        if self.lead is not None:
            return "127.0.0.1", self.port
        if self.limits is None:
            return self.node.master_addr, self.node.master_port
        return await self._elect()

    async def _elect(self) -> tuple[str, int]:
        """Where somebody leads; the first member of the last membership that answers does so, which may be this one.
        Raises OSError where that is to be waited for."""
        basis, me = self.attendance.basis, self.attendance.me
        known = {token: (ip, port) for token, ip, port, _ in basis["known"] if token != me.token}
        places = [*known.values(), (self.claimed.master_addr, self.claimed.master_port)]
        places += [self._elsewhere] if self._elsewhere else []
        said = dict(zip(places, await asyncio.gather(*(who_leads(*place) for place in places)), strict=True))
        told = [(str(each["at"][0]), int(each["at"][1])) for each in said.values() if each and each.get("at")]
        if new := [place for place in dict.fromkeys(told) if place not in said]:
            said |= zip(new, await asyncio.gather(*(who_leads(*place) for place in new)), strict=True)
        for place, each in said.items():
            if each and not each["over"] and each["n"] >= basis["n"] and each["token"] != me.token:
                return place
        self._elsewhere = None
        if not basis["n"]:
            return self.claimed.master_addr, self.claimed.master_port  # which says why not
        for token, _, _, host in basis["known"]:
            if token == me.token:
                log.warning("this node leads from now on: no member before it answers")
                self._begin_to_lead()
                return "127.0.0.1", self.port
            if (each := said[known[token]]) and each["token"] == token:
                raise ConnectionError(f"{host} is to lead, and does not yet")
        raise ConnectionError("no leader of the job was found")

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task. A fault of ours in it ends the agent: nobody else would notice it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._over.done():
            self._over.set_exception(error)

    # The leader's words ---------------------------------------------------------------------------------------------

    async def _attend(self) -> None:
        async for event in self.attendance.events():
            if event["is"] == "propose":
                self.begin(self._get_ready(event))
            elif event["is"] == "commit":
                self._start_ranks(event)
            elif event["is"] in ("lost", "gone", "ranks", "leave"):
                self.links.tell(event["is"], **{name: value for name, value in event.items() if name != "is"})
                if event["is"] in ("lost", "gone"):
                    self._leave_soon()
            elif event["is"] == "stop":
                self._pass_on(event["signal"], change=bool(event.get("change")))
            elif event["is"] == "spare":
                log.info("this node is a spare: it waits until a node is needed")
            elif event["is"] == "stacks":
                self.begin(self._show_stacks())
            elif event["is"] in ("over", "refused"):
                self.finish(Verdict(event["code"], event["text"]))

    def finish(self, verdict: Verdict) -> None:
        """The job is over for this agent."""
        if not self._over.done():
            self._over.set_result(verdict)

    async def _get_ready(self, event: Mapping[str, Any]) -> None:
        """Answer a proposal once no rank of an earlier membership runs, and the next can be forked at once."""
        self._leave_soon()
        await self._all_ended.wait()
        await self.server.ready.wait()  # the others' ranks would wait in vain for those of a node that imports torch
        mistake = "" if self.alone else choose_interface(os.environ, event["ip"], given=self._given)
        self.attendance.ready(event["n"], mistake=mistake)

    # This node's ranks ----------------------------------------------------------------------------------------------

    def _start_server(self) -> None:
        """It imports torch while the agents meet."""
        file, fork = self.script.file or "", self.knows_us and self.options.start == "fork"
        preload, folder = own_imports(file)
        env = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        self.server.start(safe_imports(file), env=env, preload=preload, folder=folder, fork=fork)

    def _forget_server(self) -> None:
        if self.server.ready.is_set():
            log.warning("the process that forks the ranks was killed, and they with it")
            self._start_server()
        else:  # it has not even imported torch: nor would the next
            self.finish(Verdict(KILLED, f"starting the ranks: SIGKILL: {explain_sigkill(self._oom_kills)}"))

    def _start_ranks(self, commit: dict[str, Any]) -> None:
        self._commit, self._oom_kills = commit, oom_kills()
        if commit["why"]:
            log.warning("%s", commit["why"])
        if self._for_change:
            self._passed_on, self._for_change = "", False
        if self.limits is not None and not self._take_place(commit):
            return
        self._all_ended.clear()
        for rank in self.ranks:
            rank.running, rank.told, rank.said = True, False, None
            record = self.records.of(rank.local_rank)
            record.clear()
            if self.options.stop_after is not None:
                record.ask_to_stop(self.options.stop_after)
                record.confirm_stop(self.options.stop_after)
            if not self.knows_us:
                record.enter("script")
            words = self.script.command(local_rank=self.node.local_rank + rank.local_rank)
            if commit["again"]:
                words += self.options.restart_args
            env, outputs = self._environment(rank), [] if self.knows_us else self._open_outputs(rank)
            if not self.knows_us:
                env |= stacks_environment(self.run_dir, rank.number, env)
            self.server.start_rank(
                rank.local_rank, words, env=env, name=f"rank {rank.number}", cwd=self.options.work_dir, outputs=outputs
            )
            for output in outputs:
                os.close(output)
        if self._passed_on:  # it came before they were there
            self._signal(self._passed_on, told=not self.knows_us)

    def _take_place(self, commit: Mapping[str, Any]) -> bool:
        """The numbers of this node's ranks in a membership. Returns False for a spare."""
        if commit["change"]:
            log.warning("%s", commit["change"])
        self.places |= {name.partition(" on ")[0]: (ip, port) for _, ip, port, name in commit["basis"]["known"]}
        used, token = commit["basis"]["used"], self.attendance.me.token
        if token not in used:
            log.info("this node is a spare: it waits until a node is needed")
            return False
        self.node = replace(self.node, node_rank=used.index(token), num_nodes=len(used), master_addr=commit["ip"])
        for rank in self.ranks:
            rank.number = self.node.first_rank + rank.local_rank
            self.records.of(rank.local_rank).clear(rank.number)
        return True

    @property
    def attempt(self) -> str:
        """The id of this membership's attempt."""
        return attempt_of(self._commit["job"], self._commit["restarts"])

    def _error_file(self, rank: Rank) -> Path:
        return self.run_dir / "status" / self.attempt / f"error-rank-{rank.number}.json"

    def _environment(self, rank: Rank) -> dict[str, str]:
        """What a rank finds: every variable that torchrun sets, with torchrun's meaning, and one of ours. Everything
        else is kept, Slurm's variables too.

        `env://` reads five of them. Lightning, Accelerate and Transformers look for more to find out who started them:
        TORCHELASTIC_RUN_ID makes Lightning and torch take the process for one of torchrun's, also where Slurm's
        variables are there too, and LOCAL_RANK keeps Accelerate and Transformers from starting processes of their own.
        """
        commit, node, local = self._commit, self.node, self.node.local_world_size or self.node.nproc
        # A script that imports rankup may know our settings by the environment, as where its cache lies
        hidden = ("PET_", PARENT, secret.VARIABLE) if self.knows_us else ("PET_", "RANKUP_")
        given = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        by_default = {
            # torchrun takes one thread, whatever the machine has
            "OMP_NUM_THREADS": max(1, int(cpu_quota() // local)),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
            "PYTHONUNBUFFERED": 1,  # its output may be a pipe: lines would come in blocks, and the last not at all
            "PYTHONFAULTHANDLER": 1,  # a crash in a library's own code leaves the Python stack in the log
        }
        # Before those that are there: the shell may hold the variables of an earlier torchrun
        set_by_torchrun = {
            "RANK": rank.number, "LOCAL_RANK": node.local_rank + rank.local_rank, "WORLD_SIZE": node.world_size,
            "LOCAL_WORLD_SIZE": local, "GROUP_RANK": node.node_rank, "GROUP_WORLD_SIZE": node.num_nodes,
            "ROLE_RANK": rank.number, "ROLE_WORLD_SIZE": node.world_size, "ROLE_NAME": "default",
            "MASTER_ADDR": node.master_addr, "MASTER_PORT": commit["port"],
            "TORCHELASTIC_RESTART_COUNT": commit["restarts"],
            "TORCHELASTIC_MAX_RESTARTS": self.options.max_restarts, "TORCHELASTIC_RUN_ID": commit["job"],
            "TORCHELASTIC_USE_AGENT_STORE": commit["store"],  # else the script's rank 0 opens one at that port
            "TORCHELASTIC_ERROR_FILE": self._error_file(rank),
        }
        ours = {}
        if self.knows_us:
            place, address = self.records.place(rank.local_rank), self.links.address
            agent = {"commit": commit, "record": place, "socket": address, "local_rank": rank.local_rank}
            ours["RANKUP_AGENT"] = json.dumps(agent)
        return {name: str(value) for name, value in {**by_default, **given, **set_by_torchrun, **ours}.items()}

    def _open_outputs(self, rank: Rank) -> list[int]:
        """Where a script that does not import rankup prints to."""
        log.info("starting %s as rank %d of %d", self.script.name, rank.number, self.node.world_size)
        self._error_file(rank).parent.mkdir(parents=True, exist_ok=True)  # for torch's @record
        (stdout, ours), (stderr, ours_too) = os.pipe(), os.pipe()
        rank.pump = Pump(
            stdout, stderr, rank=rank.number, world_size=self.node.world_size,
            file=open_log(self.run_dir / "logs" / f"rank-{rank.number}.log"),
        )
        return [ours, ours_too]

    def _announce(self, local_rank: int, pid: int) -> None:
        if not self.knows_us:
            with contextlib.suppress(OSError):  # it costs only that nobody can ask
                announce_stacks(self.run_dir, self.ranks[local_rank].number, self.node.world_size, pid)

    def _read_rest(self, local_rank: int, code: int) -> None:
        """Its process has ended; its last words may not be read yet."""

        async def read(pump: Pump) -> None:
            # What it left behind may hold its output open; a terminal that nobody reads holds the reader up for PRINT_S
            await pump.drained(timing.PRINT_S + timing.LAST_WORD_S)
            self._ended(local_rank, code)

        if (pump := self.ranks[local_rank].pump) is None:
            self._ended(local_rank, code)
        else:
            self.begin(read(pump))

    def _hear_rank(self, local_rank: int, message: Mapping[str, Any]) -> None:
        """What a rank says that imports rankup."""
        rank = self.ranks[local_rank]
        asked = self._passed_on or self._leaves or rank.told  # its signal was our SIGTERM
        if message["is"] == "end" and rank.running:
            # At once: its process may take a while to end, and the others wait for it
            rank.said = End.read(message, self.host)
            if rank.said.code != FINISHED:
                self.attendance.say("ending", n=self._commit["n"], **rank.said.message())
        elif message["is"] == "ask":
            self.attendance.say("ask")
        elif message["is"] == "stop" and message["signal"] in SIGNALS and not asked:
            self._hear_signal(message["signal"])

    def _records(self) -> Mapping[int, RecordWriter]:
        """Of this node's ranks that run."""
        return {rank.number: self.records.of(rank.local_rank) for rank in self.ranks if rank.running}

    def _ended(self, local_rank: int, code: int) -> None:
        rank, record = self.ranks[local_rank], self.records.read(local_rank)
        if not rank.running:
            return
        rank.running = False
        if code == FINISHED and self.knows_us and record.phase != "start" and not record.finished:
            log.warning("rank %d ended with 0, but it did not say that it finished", rank.number)
            code = FAULT
        cause, suspect = (rank.said.cause, rank.said.suspect) if rank.said is not None else ("", None)
        if code == KILLED:
            cause = f"SIGKILL: {explain_sigkill(self._oom_kills)}"
        elif rank.pump is not None and code != FINISHED:
            cause = last_exception(rank.pump.tail, self._error_file(rank))
        end = End(rank.number, self.host, code, cause, record.step, rank.told, suspect)
        if rank.pump is not None:
            within(timing.LAST_WORD_S, lambda: write_end(self.run_dir, self.attempt, end))
            if end.explains and code != FINISHED and (advice := self.helpers.advice(rank.pump.tail)):
                log.warning("%s", advice)
        self.attendance.say("end", n=self._commit["n"], **end.message())
        if not any(each.running for each in self.ranks):
            self._all_ended.set()

    # Their ends -----------------------------------------------------------------------------------------------------

    def _leave_soon(self) -> None:
        if self._leaving is None or self._leaving.done():
            settle_s = timing.LEAVE_S if self.knows_us else timing.SCRIPT_LEAVE_S
            self._leaving = self.begin(self._end_ranks(settle_s=settle_s))

    async def _end_ranks(self, *, settle_s: float) -> None:
        """Return once all ranks have ended. They get a moment to find out by themselves, then SIGTERM, then SIGKILL.
        Without `settle_s` they are killed at once."""
        if self._passed_on in ("SIGTERM", "SIGINT"):
            settle_s += self.options.stop_grace_s if settle_s else 0.0
        elif not await self._ended_within(min(timing.UNNOTICED_S, settle_s)):
            self._signal("SIGTERM", told=True)
        if await self._ended_within(settle_s):
            return
        for rank in self.ranks:
            if rank.running and settle_s:
                log.warning("rank %d did not end within %g s after the others: killed", rank.number, settle_s)
            self._kill(rank)
        if not await self._ended_within(timing.KILL_S):
            for rank in self.ranks:  # it waits for a dead disk, and ends when the disk answers
                self._ended(rank.local_rank, PEER_LOST)

    async def _ended_within(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_ended.wait(), timeout_s)
        return self._all_ended.is_set()

    def _signal(self, name: str, *, told: bool) -> None:
        """To every rank that runs, at once. `told`: its code says nothing from now on, as that of a script that was
        asked to stop; one that imports rankup says by its code what became of that."""
        for rank in self.ranks:
            if rank.running:
                rank.told = rank.told or told
                # SIGTERM, whatever it was: a Python that has just started leaves of it without a traceback
                self.server.signal(rank.local_rank, signal.SIGTERM if self.knows_us else getattr(signal, name))

    def _kill(self, rank: Rank) -> None:
        if rank.running:
            rank.told = True
            self.server.signal(rank.local_rank, signal.SIGKILL)

    # Stops ----------------------------------------------------------------------------------------------------------

    def _hear_signal(self, name: str) -> None:
        """The first one is told to all agents. One that comes again later is meant."""
        now_s = time.monotonic()
        if self._asked_s and name != "SIGUSR1" and now_s - self._asked_s > timing.REPEAT_S:
            why = f"{name} again, {now_s - self._asked_s:.0f} s after the first: leaving at once"
            self.finish(Verdict(STOPPED, why))
        if name != "SIGUSR1":
            self._asked_s = self._asked_s or now_s
        if self.limits is not None and name == "SIGTERM" and (self._leaves or self.attendance.say("leaving")):
            if not self._leaves:
                self._leaves = True
                self.begin(self._leave())
            return
        self.attendance.say("stop", signal=name)
        if not any(rank.running for rank in self.ranks):
            self.finish(Verdict(STOPPED, f"{name} before the first step: nothing new to save."))
        self._pass_on(name)

    async def _leave(self) -> None:
        """Once this node's ranks have ended with the others."""
        log.info("SIGTERM: this node leaves, and the job goes on without it")
        await asyncio.sleep(timing.ENDING_S)  # the leader may have it that all leave
        while not await self._ended_within(timing.ALIVE_S):
            self.attendance.say("leaving")  # it may be another leader by now
        if self._passed_on and not self._for_change:
            return  # all leave, and hear how the job ends
        self.attendance.say("left")
        await asyncio.sleep(timing.ENDING_S)
        if self.lead is not None:
            lead, self.lead = self.lead, None
            lead.give_up()
        self.finish(Verdict(STOPPED, "this node was asked to leave"))

    def _pass_on(self, name: str, *, change: bool = False) -> None:
        self._for_change = change and (self._for_change or not self._passed_on)
        if self._passed_on in (name, "SIGTERM", "SIGINT"):
            return
        self._passed_on = name
        running = sum(rank.running for rank in self.ranks)
        why = "nodes change: " if change else ""
        if running or not change:  # a spare has none
            log.info("%s%s: passed on to %d rank%s", why, name, running, "" if running == 1 else "s")
        self._signal(name, told=not self.knows_us)
        if not self.knows_us and name != "SIGUSR1":
            self.begin(self._oversee_stop(name))

    async def _oversee_stop(self, name: str) -> None:
        """Say every NOTICE_S where the script's ranks are that do not end; kill them once their grace is over."""
        began_s, grace_s = time.monotonic(), self.options.stop_grace_s
        while (left_s := began_s + grace_s - time.monotonic()) > 0:
            if await self._ended_within(min(timing.NOTICE_S, left_s)):
                return
            where = "; ".join(await self._where(timeout_s=began_s + grace_s - time.monotonic()))
            said = f"{time.monotonic() - began_s:.0f} s after {name} the script still runs"
            log.warning("%s", f"{said}: {where}" if where else said)
        log.warning("the script did not end within %g s of %s: killed (--stop-grace-s)", grace_s, name)
        for rank in self.ranks:
            self._kill(rank)

    # Stacks ---------------------------------------------------------------------------------------------------------

    def _ask_for_stacks(self) -> None:
        """Somebody wants to know where the ranks are, those of all nodes."""
        if not self.attendance.say("stacks"):
            self.begin(self._show_stacks())

    async def _show_stacks(self) -> None:
        """Those that import rankup write it down themselves."""
        if self.knows_us:
            for local_rank, pid in self.server.pids.items():
                if pid and has_handler(pid, signal.SIGUSR2):
                    self.server.signal(local_rank, signal.SIGUSR2)
            return
        for line in await self._where(timeout_s=timing.NOTICE_S):
            log.info("%s", line)
        log.info("the stacks of all threads are in %s", self.run_dir / STACKS)

    async def _where(self, *, timeout_s: float) -> Sequence[str]:
        running = [rank.number for rank in self.ranks if rank.running]
        with contextlib.suppress(OSError):  # a TimeoutError too
            return await in_thread(lambda: self.helpers.where(self.run_dir, running), timeout_s=timeout_s)
        return ()

    async def _tick(self) -> None:
        """What tells nobody: ranks that were stopped (SIGSTOP), and orphans that a container's first process reaps."""
        while True:
            await asyncio.sleep(timing.TICK_S)
            reap_orphans({self.server.pid})
            pids = {rank: self.server.pids.get(rank.local_rank, 0) for rank in self.ranks if rank.running}
            now_s = time.monotonic()
            for rank, pid in pids.items():
                record = self.records.of(rank.local_rank)
                if record.read().phase in ("start", "script"):  # nobody in its process gives signs of life
                    record.give_sign()
                if not pid or state_of(pid) != "T":
                    rank.stopped_since_s = now_s
                elif now_s - rank.stopped_since_s > timing.STOPPED_S:
                    log.warning("rank %d has been stopped (SIGSTOP) for %g s: killed", rank.number, timing.STOPPED_S)
                    rank.stopped_since_s = now_s
                    self._kill(rank)
                    rank.told = False


class Lead:
    """What node 0's agent does beside: it leads the meeting, and decides what the ends of ranks mean."""

    def __init__(self, agent: Agent, me: Member) -> None:
        self.agent = agent
        self.ends = Ends(agent.node.world_size, agent.options.max_restarts, agent.options.restart_on)
        self.leader = Leader(
            me, say=functools.partial(log.info, "%s"), prepare=self._prepare, hear=self._hear, limits=agent.limits,
            outdone=agent.yield_to,
        )
        self.status = None if agent.knows_us else ScriptStatus(agent.run_dir, agent.node.world_size)
        self.job = self.status.job if self.status is not None else new_job()
        self.again = False  # this job goes on with an earlier one's run
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Decide from now on."""
        node = self.agent.claimed
        works = [self.leader.watch(master="" if self.agent.alone or node.node_rank else node.master_addr)]
        works += [self._report(self.status)] if self.status is not None else []
        works += [self._call()] if self.agent.limits is not None else []
        self._tasks = [self.agent.begin(work) for work in works]

    def give_up(self) -> None:
        """Another one leads."""
        for task in self._tasks:
            task.cancel()
        self.leader.dismiss()
        if self.status is not None:
            self.status.release()

    async def _call(self) -> None:
        """Find other leaders of the job, which a cut or a node that is started anew may have made: one goes on. A node
        that is started anew where it was before, and does not find node 0, hears of this leader too."""
        node, me = self.agent.claimed, self.leader.me
        while True:
            await asyncio.sleep(timing.CALL_S)
            here = {(member.ip, member.serves) for member in self.leader.members}
            known = {(node.master_addr, node.master_port), *self.agent.places.values()}
            await asyncio.gather(*(self._call_one(*place) for place in known - here - {(me.ip, me.serves)}))

    async def _call_one(self, ip: str, port: int) -> None:
        leader = self.leader
        words = {"n": leader.basis["n"], "running": leader.running, "token": leader.me.token, "port": leader.me.serves}
        other = await who_leads(ip, port, answer=words)
        if other and not other["over"] and other["token"] != leader.me.token and leader.yields_to(other):
            self.agent.yield_to(ip, port)

    async def close(self) -> None:
        """Leave once the others have heard how the job ends."""
        until_s = time.monotonic() + timing.FAREWELL_S
        while len(self.leader.members) > 1 and time.monotonic() < until_s:
            await asyncio.sleep(timing.POLL_S)
        if self.status is not None:
            within(timing.LAST_WORD_S, self.status.release)

    async def _report(self, status: ScriptStatus) -> None:
        while True:
            await asyncio.sleep(timing.REPORT_S)
            if self.leader.running or self.agent.limits is not None:
                report = functools.partial(status.report, nodes=self.leader.nodes())
                await in_thread(report, timeout_s=math.inf)  # the disk may hang

    async def _prepare(self, n: int) -> Mapping[str, Any]:
        """What a commit says beside its members. Where the job is over instead, this returns nothing any more."""
        verdict = self.ends.judge(changing=self.leader.changing)
        if verdict.code is not None:
            self._end(verdict)
            await asyncio.Event().wait()
        if self.agent.knows_us:
            server = self.agent.server
            await server.ready.wait()
            with open_port("127.0.0.1" if self.agent.alone else "", 0) as listener:
                server.start_store(listener)
                port = listener.getsockname()[1]
        else:
            port = free_port()
        self.ends.world_size = sum(member.num_ranks for member in self.leader.chosen)
        if self.agent.limits is not None:  # whoever leads counts the attempts the same way
            self.job, self.ends.restarts = self.leader.basis["job"] or self.job, n - 1
        if self.status is not None:
            self.status.job, self.status.world_size = self.job, self.ends.world_size
            if not self.status.owned:
                self.again = await asyncio.to_thread(self.status.take)
            self.status.begin(self.ends.restarts, self.leader.chosen)
        return {
            "job": self.job, "restarts": self.ends.restarts, "why": verdict.text, "port": port,
            "store": self.agent.knows_us, "again": self.again or self.ends.restarts > 0,
        }

    def _hear(self, member: Member, message: Mapping[str, Any]) -> None:
        if message["is"] == "ending":
            self.leader.lose_by(member, message)
        elif message["is"] == "end":
            end = End.read(message, member.host)
            if self.ends.add(end) and self.leader.running:
                if self.ends.all_finished:
                    self._end(self.ends.judge())
                else:
                    self.leader.lose(member, end.cause or f"ended with {end.code}", ranks=[end.rank], code=end.code)
        elif message["is"] == "lost":
            self.ends.lose(member.ranks, member.host, message["why"])
        elif message["is"] == "stacks":
            self.leader.tell("stacks")
        elif message["is"] == "stop":
            self.ends.stopped_by = self.ends.stopped_by or str(message["signal"])
            self.leader.stop(str(message["signal"]))
            if not self.leader.running:
                self._end(Verdict(STOPPED, self.ends.stopped_by))

    def _end(self, verdict: Verdict) -> None:
        if (status := self.status) is not None:  # the disk may hang, and nobody else would hear of the end
            within(timing.REPORT_END_S, lambda: status.end(verdict.code or 0, verdict.text, self.ends.latest))
        self.leader.tell("over", code=verdict.code, text=verdict.text)


async def who_leads(ip: str, port: int, *, answer: Mapping[str, Any] | None = None) -> Mapping[str, Any] | None:
    """What an agent at that address says of who leads; None where none answers. `answer`: what a leader says to it."""
    with contextlib.suppress(OSError, LookupError, TypeError, ValueError):
        link = await Link.connect(ip, port, timeout_s=timing.PROBE_S)
        try:
            async with asyncio.timeout(timing.PROBE_S):
                said = await secret.greeting(link, secret.read_secret(os.environ))
            said = {"token": "", "n": 0, "running": False, "at": [], **said, "over": str(said["over"])}
            if answer is not None:
                link.send("leads", **answer)
            return said
        finally:
            link.close()
    return None
