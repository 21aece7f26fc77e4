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
import os
import secrets
import signal
import time
from collections.abc import Coroutine, Mapping
from typing import Any

from rankup import timing
from rankup.agent.attendance import Attendance
from rankup.agent.ends import Verdict
from rankup.agent.lead import Lead, elect, id_of
from rankup.agent.logs import host_name
from rankup.agent.network import choose_interface, chosen_address, foreign_address, listen, open_port
from rankup.agent.protocol import AGENTS, CHANGING, VERSION, Link, Member
from rankup.agent.ranks import Options, Ranks
from rankup.errors import LEFT_OUT, STOPPED

log = logging.getLogger("rankup")


class Agent:
    """Runs this node's part of the job to its end."""

    def __init__(self, options: Options) -> None:
        self.options, self.node, self.limits, self.alone = options, options.node, options.node.limits, options.alone
        self.ranks = Ranks(options, say=self._say, hear_stop=self._hear_stop, begin=self.begin, finish=self.finish)
        self.lead: Lead | None = None
        self.port = 0  # where this agent leads, or says who does
        self._given = dict(os.environ)
        self._places = dict[str, tuple[str, int]]()  # where each node was last, which may be started there anew
        self._leaves = False  # for good, and the others go on
        self._listener: asyncio.Server | None = None
        self._elsewhere: tuple[str, int] | None = None  # where a leader has said that it leads
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked_s = 0.0  # when a signal came to this agent
        self._over: asyncio.Future[Verdict]

    async def run(self) -> Verdict:
        """Be one of the agents to the end. Returns its exit code and why. Raises JoinError and UserError."""
        self._over = asyncio.get_running_loop().create_future()
        self.options.script.check(os.environ, world_size=self.node.world_size)
        settings = self.options.script.must_match()
        if self.limits is not None:
            settings |= {"--nnodes": f"{self.limits.least}:{self.limits.most}"}
        place = await id_of(self.options.shared_dir) if self.options.shared_dir else ""
        if self.node.node_rank == 0 or self.limits is not None:
            await self._listen()
        me = Member(
            place=place,
            token=secrets.token_hex(8), first_rank=self.node.first_rank, num_ranks=self.node.nproc,
            world_size=self.node.world_size, host=host_name(), pid=os.getpid(),
            digest=hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16],
            left_s=self.options.join_timeout_s, ip="" if self.alone else chosen_address(os.environ),
            serves=self.port if self.limits is not None else 0,
        )
        self.attendance = Attendance(
            me, settings, self._find_leader, notice=functools.partial(log.warning, "%s"),
            records=self.ranks.running_records, warm=self.ranks.server.ready.is_set,
            silent_s=self.limits.silent_s if self.limits is not None else timing.SILENT_S,
            commit=AGENTS | (CHANGING if self.limits is not None else {}),
        )
        loop = asyncio.get_running_loop()
        for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
            loop.add_signal_handler(getattr(signal, name), self._hear_signal, name)
        loop.add_signal_handler(signal.SIGUSR2, self._ask_for_stacks)
        try:
            await self.ranks.open()
            if self.node.node_rank == 0:
                self._begin_to_lead()
            self.begin(self._attend())
            self.begin(self.ranks.watch())
            return await self._over
        finally:
            for task in list(self._tasks):
                task.cancel()
            await self.ranks.end(settle_s=0.0)
            if self.lead is not None:
                await self.lead.close()
            if self._listener is not None:
                self._listener.close()
            await self.ranks.close()

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
        self.lead = Lead(
            self.options, self.attendance.me, self.ranks.server, self._places, begin=self.begin, yield_to=self.yield_to
        )

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
        elsewhere, self._elsewhere = self._elsewhere, None
        if (found := await elect(self.attendance, self.node, elsewhere)) is None:
            log.warning("this node leads from now on: no member before it answers")
            self._begin_to_lead()
        return found or ("127.0.0.1", self.port)

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
                known = event["basis"]["known"] if self.limits is not None else []
                self._places |= {name.partition(" on ")[0]: (ip, port) for _, ip, port, name in known}
                self.ranks.start(event, token=self.attendance.me.token)
            elif event["is"] in ("lost", "gone", "ranks", "leave"):
                self.ranks.links.tell(event["is"], **{name: value for name, value in event.items() if name != "is"})
                if event["is"] in ("lost", "gone"):
                    self.ranks.leave_soon()
            elif event["is"] == "stop":
                self.ranks.pass_on(event["signal"], change=bool(event.get("change")))
            elif event["is"] == "spare":
                log.info("this node is a spare: it waits until a node is needed")
            elif event["is"] == "left_out" and not self._leaves:
                self._leaves = True
                self.begin(self._leave(Verdict(LEFT_OUT, f"this node is left out: {event['why']}")))
            elif event["is"] == "stacks":
                self.begin(self.ranks.show_stacks())
            elif event["is"] in ("over", "refused"):
                self.finish(Verdict(event["code"], event["text"]))

    def _say(self, kind: str, **values: Any) -> bool:
        return self.attendance.say(kind, **values)

    def finish(self, verdict: Verdict) -> None:
        """The job is over for this agent."""
        if not self._over.done():
            self._over.set_result(verdict)

    async def _get_ready(self, event: Mapping[str, Any]) -> None:
        """Answer a proposal once no rank of an earlier membership runs."""
        self.ranks.leave_soon()
        await self.ranks.all_ended.wait()
        if self.limits is not None:  # they can go on without a node that still imports torch
            await self.ranks.server.ready.wait()
        mistake = "" if self.alone else choose_interface(os.environ, event["ip"], given=self._given)
        self.attendance.ready(event["n"], mistake=mistake)

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
                log.info("SIGTERM: this node leaves, and the job goes on without it")
                self.begin(self._leave(Verdict(STOPPED, "this node was asked to leave")))
            return
        self.attendance.say("stop", signal=name)
        if not self.ranks.running:
            self.finish(Verdict(STOPPED, f"{name} before the first step: nothing new to save."))
        self.ranks.pass_on(name)

    def _hear_stop(self, name: str) -> None:
        """A rank got a signal itself."""
        if not self._leaves:  # else it was ours
            self._hear_signal(name)

    async def _leave(self, verdict: Verdict) -> None:
        """Once this node's ranks have ended with the others."""
        await asyncio.sleep(timing.ENDING_S)  # the leader may have it that all leave
        while not await self.ranks.ended_within(timing.ALIVE_S):
            self.attendance.say("leaving")  # it may be another leader by now
        if self.ranks.stopping:
            return  # all leave, and hear how the job ends
        self.attendance.say("left")
        await asyncio.sleep(timing.ENDING_S)
        if self.lead is not None:
            lead, self.lead = self.lead, None
            lead.give_up()
        self.finish(verdict)

    def _ask_for_stacks(self) -> None:
        """Somebody wants to know where the ranks are, those of all nodes."""
        if not self.attendance.say("stacks"):
            self.begin(self.ranks.show_stacks())
