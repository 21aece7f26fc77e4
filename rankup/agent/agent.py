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
from collections import Counter
from collections.abc import Coroutine, Mapping
from typing import Any

from rankup import timing
from rankup.agent.attendance import Attendance, elect, who_leads
from rankup.agent.ends import End, Ends, ScriptStatus, Verdict, new_job
from rankup.agent.logs import host_name
from rankup.agent.meeting import Leader
from rankup.agent.network import (
    Link,
    chosen_address,
    in_thread,
    interface_variables,
    is_this_machine,
    listen,
    open_port,
)
from rankup.agent.processes import within
from rankup.agent.protocol import ARGUMENTS, KILLED, SHARED, Member
from rankup.agent.ranks import Options, Ranks
from rankup.agent.votes import same_job
from rankup.env.launchers import free_port
from rankup.errors import LEFT_OUT, STOPPED, JoinError, PeerLost, UserError
from rankup.places.place import Place

log = logging.getLogger("rankup")


async def id_of(shared_dir: str) -> str:
    """The same on all nodes that share that place. Raises UserError, PeerLost and JoinError."""

    def read() -> str:
        place = Place.open(shared_dir, warn=log.debug)
        for _ in range(2):
            first = place.create("shared.json", json.dumps({"id": secrets.token_hex(8)}).encode())
        if first:  # twice: two nodes would both own what follows
            raise UserError(f"--shared-dir must know conditional writes, got {shared_dir}. Name another place.")
        while not (found := str(place.read_json("shared.json").get("id", ""))):
            time.sleep(timing.PAUSE_S)  # it is being written
        return found

    try:
        return await in_thread(read, timeout_s=timing.PREPARE_S)  # it may import the client of an object store
    except TimeoutError:
        raise JoinError(f"--shared-dir: {shared_dir} does not answer") from None


class Lead:
    """What the agent that leads does beside: it decides what the ends of ranks mean, and writes down how a script ends.
    """

    def __init__(self, agent: "Agent") -> None:
        options = self.options = agent.options
        self.agent, self.node, self.limits = agent, agent.node, agent.limits
        self.ends = Ends(self.node.world_size, options.max_restarts, options.restart_on)
        me = agent.attendance.me
        self.leader = Leader(
            me, say=log.info, prepare=self._prepare, hear=self._hear, limits=agent.limits, outdone=agent.yield_to,
            claim=self._claim if me.settings.get(SHARED) else None,
        )
        self.status = None if options.script.imports_rankup else ScriptStatus(options.run_dir)
        self.job = new_job()
        self.failures = Counter[str]()  # of the ranks of each node, by its token
        self.taking: asyncio.Task[bool] | None = None  # of the run; whether this job goes on with an earlier one's
        works = [self.leader.watch()]
        works += [self._report(self.status)] if self.status is not None else []
        works += [self._call()] if self.limits is not None else []
        self._tasks = [agent.begin(work) for work in works]

    def give_up(self) -> None:
        self.agent.lead = None
        for task in self._tasks:
            task.cancel()
        self.leader.dismiss()
        if self.status is not None:
            self.status.held.close()

    async def close(self) -> None:
        """Leave once the others have heard how the job ends."""
        until_s = time.monotonic() + timing.FAREWELL_S
        while len(self.leader.seats.members) > 1 and time.monotonic() < until_s:
            await asyncio.sleep(timing.POLL_S)
        if self.status is not None:
            within(timing.LAST_WORD_S, self.status.held.close)

    async def _report(self, status: ScriptStatus) -> None:
        while True:
            await asyncio.sleep(timing.REPORT_S)
            if status.owner is not None and (self.leader.running or self.limits is not None):
                report = functools.partial(status.report, signs=self.leader.signs(), nodes=self.leader.nodes())
                await in_thread(report, timeout_s=math.inf)  # the disk may hang

    async def _call(self) -> None:
        """Find other leaders of the job, which a cut or a node that is started anew may have made: one goes on. A node
        that is started anew where it was before, and does not find node 0, hears of this leader too."""
        while True:
            await asyncio.sleep(timing.CALL_S)
            here = {(member.ip, member.serves) for member in self.leader.seats.members}
            known = {(self.node.master_addr, self.node.master_port), *self.agent.places.values()}
            await asyncio.gather(*(self._call_one(*place) for place in known - here))

    async def _call_one(self, ip: str, port: int) -> None:
        leader = self.leader
        other = await who_leads(ip, port, answer={**leader.greeting(), "port": leader.me.serves})
        if other and not other["over"] and other["token"] != leader.me.token and leader.yields_to(other):
            self.agent.yield_to(ip, port)

    async def _claim(self, job: str, number: int) -> bool:
        """Own what follows that membership: be the first to write in the shared folder that this member does."""
        token = json.dumps({"token": self.leader.me.token}).encode()

        def create() -> bool:
            return Place.open(self.options.shared_dir, warn=log.debug).create(f"{job}-after-{number}.json", token)

        with contextlib.suppress(OSError, UserError, PeerLost):
            return await in_thread(create, timeout_s=timing.CLAIM_S)
        return False

    async def _prepare(self, n: int) -> Mapping[str, Any]:
        """What a commit says beside its members. Where the job is over instead, this returns nothing any more."""
        verdict = await self._blame(self.ends.judge(changing=self.leader.changing))
        if verdict.code is not None:
            self._end(verdict)
            await asyncio.Event().wait()
        if self.options.script.imports_rankup:
            with open_port("127.0.0.1" if self.agent.alone else "", 0) as listener:
                self.agent.ranks.server.start_store(listener)
                port = listener.getsockname()[1]
        else:
            port = free_port()
        self.ends.world_size = sum(member.num_ranks for member in self.leader.chosen)
        if (job := self.leader.basis["job"]):  # whoever leads counts the attempts the same way
            self.job, self.ends.restarts = job, n - 1
        again = self.ends.restarts > 0
        if self.status is not None:
            attempt = f"{self.job}-{self.ends.restarts}"
            if self.taking is None:
                take = asyncio.to_thread(self.status.take, attempt, agreed=self.limits is not None)
                self.taking = asyncio.create_task(take)
            again |= await asyncio.shield(self.taking)  # a member may be lost meanwhile: the next commit has it
            self.status.begin(attempt, self.ends.world_size)
            # It may end before the next report; the disk may hang
            self.agent.begin(in_thread(self.status.report, timeout_s=math.inf))
        return {
            "job": self.job, "restarts": self.ends.restarts, "why": verdict.text, "port": port,
            "store": self.options.script.imports_rankup, "again": again,
        }

    async def _blame(self, verdict: Verdict) -> Verdict:
        """Leave a node out on which ranks have failed too often: the leader then proposes another membership."""
        most = self.options.max_failures
        if most is None or self.limits is None or verdict.cause is None or (rank := verdict.cause.blamed) is None:
            return verdict
        token = self.leader.basis["ran"][rank // self.node.nproc]
        self.failures[token] += 1
        if self.failures[token] < most:
            return verdict
        why = f"{verdict.cause}, failure {self.failures[token]} of its ranks"
        self.ends.without_progress = 0
        if self.leader.leave_out(token, why):
            await asyncio.Event().wait()  # until this is cancelled
        return Verdict(verdict.cause.code, f"{why}, and without that node too few are here")

    def _hear(self, member: Member, message: Mapping[str, Any]) -> None:
        if message["is"] == "ending":
            self.leader.lose_by(member, message)
        elif message["is"] == "end":
            end = End.read(message, member.host)
            was_last = self.ends.add(end)
            if end.code:
                self.leader.lose(member, end.cause or f"ended with {end.code}", ranks=[end.rank], code=end.code)
            elif was_last and self.leader.running:
                self._end(self.ends.judge())
        elif message["is"] == "lost":
            for rank in member.ranks:
                self.ends.add(End(rank, member.host, KILLED, message["why"]))
        elif message["is"] == "stop":
            self.ends.stopped_by = self.ends.stopped_by or str(message["signal"])
            self.leader.stop(str(message["signal"]))
            if not self.leader.running:
                self._end(Verdict(STOPPED, self.ends.stopped_by))

    def _end(self, verdict: Verdict) -> None:
        if (status := self.status) is not None:  # the disk may hang, and nobody else would hear of the end
            within(timing.REPORT_END_S, lambda: status.end(verdict.code or 0, verdict.text, self.ends.latest))
        self.leader.tell("over", code=verdict.code, text=verdict.text)


class Agent:
    """Runs this node's part of the job to its end."""

    def __init__(self, options: Options) -> None:
        self.options, self.node, self.limits = options, options.node, options.node.limits
        self.alone = self.node.num_nodes == 1
        self.ranks = Ranks(options, say=self.say, hear_stop=self._hear_signal, begin=self.begin, finish=self.finish)
        self.lead: Lead | None = None
        self.port = 0  # where this agent leads, or says who does
        self.places = dict[str, tuple[str, int]]()  # where each node was last, which may be started there anew
        self._leaves = False  # for good, and the others go on
        self._listener: asyncio.Server | None = None
        self._elsewhere: tuple[str, int] | None = None  # where a leader has said that it leads
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked_s = 0.0  # when a signal came to this agent
        self._over: asyncio.Future[Verdict]  # set once the job is over for this agent

    async def run(self) -> Verdict:
        """Be one of the agents to the end. Returns its exit code and why. Raises UserError, JoinError and PeerLost."""
        self._over = asyncio.get_running_loop().create_future()
        self.options.script.check(os.environ, world_size=self.node.world_size)
        place = await id_of(self.options.shared_dir) if self.options.shared_dir else ""
        if self.node.node_rank == 0 or self.limits is not None:
            await self._listen()
        self.attendance = self._introduce(place)
        loop = asyncio.get_running_loop()
        for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
            loop.add_signal_handler(getattr(signal, name), self._hear_signal, name)
        loop.add_signal_handler(signal.SIGUSR2, lambda: None)  # a batch system may send it to every process
        try:
            await self.ranks.open()
            if self.node.node_rank == 0:
                self.lead = Lead(self)
            self.begin(self.attendance.attend(self._hear_leader))
            return await self._over
        finally:
            for task in list(self._tasks):
                task.cancel()
            await self.ranks.end()
            if self.lead is not None:
                await self.lead.close()
            if self._listener is not None:
                self._listener.close()
            await self.ranks.close()

    def _introduce(self, place: str) -> Attendance:
        """`place`: the id of what it shares with other nodes."""
        node, limits, words = self.node, self.limits, self.options.script.words
        # A digest: arguments may be long, and may hold a secret
        settings = self.options.script.must_match()
        settings[ARGUMENTS] = hashlib.sha256(os.fsencode("\0".join(words))).hexdigest()[:16]
        if self.options.shared_dir:
            settings[SHARED] = place
        if limits is not None:
            settings |= {"--nnodes": f"{limits.least}:{limits.most}"}
        me = Member(
            token=secrets.token_hex(8), first_rank=node.first_rank, num_ranks=node.nproc,
            world_size=node.world_size, host=host_name(), pid=os.getpid(), left_s=self.options.join_timeout_s,
            ip="" if self.alone else chosen_address(os.environ), serves=self.port if limits is not None else 0,
            settings=settings,
        )
        return Attendance(
            me, self._find_leader, notice=log.warning,
            records=self.ranks.running_records, warm=self.ranks.server.ready.is_set,
            silent_s=limits.silent_s if limits is not None else timing.SILENT_S,
        )

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

    def finish(self, verdict: Verdict) -> None:
        if not self._over.done():
            self._over.set_result(verdict)

    def say(self, kind: str, **values: Any) -> bool:
        """To the leader. Returns False where there is none just now."""
        return self.attendance.say(kind, **values)

    # Who leads ------------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        """On MASTER_PORT where others look for this node there. Raises JoinError and UserError."""
        port = self.node.master_port
        if self.node.node_rank:
            try:  # node 0, or another agent, may be on this machine too
                port = 0 if await is_this_machine(self.node.master_addr) else port
                open_port("", port).close()
            except OSError:
                port = 0
        self._listener = await listen(self._greet, ip="127.0.0.1" if self.alone else "", port=port)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.lead is not None:
            await self.lead.leader.attend(reader, writer)
            return
        basis, link = self.attendance.basis, Link(reader, writer)
        with contextlib.suppress(OSError, LookupError, TypeError, ValueError, asyncio.CancelledError):
            link.send(
                "leader", over="this node does not lead", token=self.attendance.me.token, n=basis["n"],
                at=self.attendance.at, job=basis["job"],
            )
            async with asyncio.timeout(timing.HELLO_S):
                said = await link.receive()
                if said["is"] == "leads" and int(said["n"]) >= basis["n"] and same_job(said, basis):
                    port = int(said["port"])
                    self._elsewhere = (link.remote_ip, port) if port else self._elsewhere
        link.close()

    def yield_to(self, ip: str, port: int) -> None:
        """There is a leader that knows a newer membership."""
        if self.lead is not None:
            log.warning("another node leads, at %s:%d: this one becomes a member there", ip, port)
            self._elsewhere = ip, port
            self.lead.give_up()

    async def _find_leader(self) -> tuple[str, int]:
        if self.lead is not None:
            return "127.0.0.1", self.port
        if self.limits is None:
            return self.node.master_addr, self.node.master_port
        elsewhere, self._elsewhere = self._elsewhere, None
        if (found := await elect(self.attendance, self.node, elsewhere)) is None:
            log.warning("this node leads from now on: no member before it answers")
            self.lead = Lead(self)
        return found or ("127.0.0.1", self.port)

    # The leader's words ---------------------------------------------------------------------------------------------

    def _hear_leader(self, event: dict[str, Any]) -> bool:
        """Returns whether nothing more is to be heard."""
        kind = event["is"]
        if kind == "propose":
            self.begin(self._get_ready(event))
        elif kind == "commit":
            known = self.attendance.basis["known"]
            self.places |= {name.partition(" on ")[0]: (ip, port) for _, ip, port, name in known}
            self.ranks.start(event, token=self.attendance.me.token)
        elif kind in ("lost", "gone", "ranks"):
            self.ranks.links.tell(kind, **{name: value for name, value in event.items() if name != "is"})
            if kind in ("lost", "gone"):
                self.ranks.leave_soon(node_lost=kind == "gone" or bool(event.get("node")))
        elif kind == "stop":
            self.ranks.pass_on(event["signal"], change=bool(event.get("change")))
        elif kind == "spare":
            log.info("this node is a spare: it waits until a node is needed")
        elif kind == "left_out" and not self._leaves:
            self._leave_for_good(Verdict(LEFT_OUT, f"this node is left out: {event['why']}"))
        elif kind in ("over", "refused"):
            self.begin(self._end(Verdict(event["code"], event["text"])))
            return self.lead is None
        return False

    async def _end(self, verdict: Verdict) -> None:
        """Somebody may ask the job to stop while ranks that lost another one still write down what they hold."""
        await self.ranks.left()
        self.finish(verdict)

    async def _get_ready(self, event: Mapping[str, Any]) -> None:
        """Answer a proposal once no rank of an earlier membership runs, and the next ones can be forked."""
        self.ranks.leave_soon()
        await self.ranks.all_ended.wait()
        if self.limits is None or self.attendance.me.token in self.attendance.basis["used"]:
            await self.ranks.server.ready.wait()  # a spare knows of the membership at once, whatever it still imports
        self.ranks.interface = {} if self.alone else interface_variables(os.environ, event["ip"])
        self.attendance.ready(event["n"])

    # Stops ----------------------------------------------------------------------------------------------------------

    def _hear_signal(self, name: str) -> None:
        """To this agent, or one of its ranks. The first one is told to all agents. One that comes again later is meant.
        """
        if name != "SIGUSR1":
            after_s = time.monotonic() - self._asked_s
            if self._asked_s and after_s > timing.REPEAT_S:
                self.finish(Verdict(STOPPED, f"{name} again, {after_s:.0f} s after the first: leaving at once"))
            self._asked_s = self._asked_s or time.monotonic()
        if self.limits is not None and name == "SIGTERM" and (self._leaves or self.say("leaving")):
            if not self._leaves:
                log.info("SIGTERM: this node leaves, and the job goes on without it")
                self._leave_for_good(Verdict(STOPPED, "this node was asked to leave"))
            return
        self.say("stop", signal=name)
        if not self.ranks.running:
            self.finish(Verdict(STOPPED, f"{name} before the first step: nothing new to save."))
        self.ranks.pass_on(name)

    def _leave_for_good(self, verdict: Verdict) -> None:
        self._leaves = True
        self.begin(self._leave(verdict))

    async def _leave(self, verdict: Verdict) -> None:
        """Once this node's ranks have ended with the others."""
        await asyncio.sleep(timing.ENDING_S)  # the leader may have it that all leave
        while not await self.ranks.ended_within(timing.ALIVE_S):
            self.say("leaving")  # it may be another leader by now
        if self.ranks.stopping:
            return  # all leave, and hear how the job ends
        self.say("left")
        await asyncio.sleep(timing.ENDING_S)
        if self.lead is not None:
            self.lead.give_up()
        self.finish(verdict)
