"""The agent of one node. It meets the other agents, starts this node's ranks, and reports their ends and stop requests.

The agent lives as long as the job. Its event loop runs in one thread. Other threads read the output of scripts that do
not import rankup. The agent uses no device and no torch. A job whose number of nodes may change is called elastic.

| a rank fails           | its agent tells the leader, and the leader ends the membership. Every agent makes its ranks |
|                        | leave and reports how each ended. The leader then starts a new membership or ends the job   |
| an agent is lost       | the same, once its connection ends or is silent too long. A new agent must replace it       |
| the leader is lost     | every agent makes its ranks leave, and looks for a leader for --join-timeout-s at most      |
| an agent gets a signal | the leader tells all agents, and each agent passes the signal on to its ranks. SIGUSR1 is a |
|                        | notice if the script handles it, and a request to stop if not                               |
| in an elastic job      | a spare replaces a lost node, or the job goes on with fewer. The next member replaces a     |
|                        | lost leader. A node that gets SIGTERM saves together with the others and leaves for good    |
"""

import asyncio
import hashlib
import logging
import os
import secrets
import signal
import time
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import Any

from rankup import timing
from rankup.agent.ends import Verdict, new_job
from rankup.agent.events import Rules
from rankup.agent.leader_files import LeaderFiles, id_of
from rankup.agent.logs import host_name
from rankup.agent.network import chosen_address, in_thread, interface_variables, is_this_machine, listen, open_port
from rankup.agent.operators import problem, watch_spot
from rankup.agent.peers import Peers
from rankup.agent.processes import allow_open_files
from rankup.agent.protocol import ARGUMENTS, SHARED, Member
from rankup.agent.ranks import Options, Ranks
from rankup.agent.votes import Address
from rankup.errors import LEFT_OUT, STOPPED

log = logging.getLogger("rankup")


class Agent:
    """The agent of this node, from its start until the job is over for it. `Meeting` decides what happens with the
    other members, and `Ranks` has this node's ranks."""

    def __init__(self, options: Options) -> None:
        self.options, self.node, self.limits = options, options.node, options.node.limits
        self.alone = self.node.num_nodes == 1
        self._handlers = {"SIGTERM": self._on_sigterm, "SIGINT": self._on_sigint, "SIGUSR1": self._on_sigusr1}
        on_stop = lambda name: self._handlers[name]()  # noqa: E731
        self.ranks = Ranks(options, send=self.send, on_stop=on_stop, begin=self.begin, finish=self.finish)
        self.files = LeaderFiles(self.ranks, lambda: self.peers.meeting.leading)
        self.prepare, self.claim, self.judged = self.files.prepare, self.files.claim, self.files.judged
        self.port = 0  # where this agent serves members while it leads, and otherwise tells callers who leads
        self.unfit = False  # this node failed its check before it could rejoin
        self._leaves = False  # whether this node leaves for good while the job goes on
        self._listener: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked_s = 0.0  # when this agent got its first request to stop
        self._over: asyncio.Future[Verdict]  # set once the job is over for this agent

    async def run(self) -> Verdict:
        """Run until the job is over for this agent. Returns how it ended. Raises UserError, JoinError and PeerLost."""
        self._over = asyncio.get_running_loop().create_future()
        self.options.script.check(os.environ, world_size=self.node.world_size)
        # A leader has a connection to each node, and others call it. Each rank has two pipes, a line and a record
        leads = self.node.node_rank == 0 or self.limits is not None
        needed = (2 * self.node.num_nodes if leads else 0) + 8 * self.node.nproc + 128
        allow_open_files(needed, what=f"a job of {self.node.num_nodes} nodes")
        place = await id_of(self.options.shared_dir) if self.options.shared_dir else ""
        if self.node.node_rank == 0 or self.limits is not None:
            await self._listen()
        self.peers = self._introduce(place)
        loop = asyncio.get_running_loop()
        for name, handler in self._handlers.items():
            loop.add_signal_handler(getattr(signal, name), handler)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores SIGHUP: do the same
            loop.add_signal_handler(signal.SIGHUP, self._on_sigterm)  # the terminal was closed
        loop.add_signal_handler(signal.SIGUSR2, lambda: None)  # batch systems may send it, and by default it kills
        await self.ranks.open()
        try:
            if self.options.spot:
                self.begin(watch_spot(self._on_sigterm))
            self.peers.start()
            self.begin(self.files.report())
            return await self._over
        finally:
            for task in list(self._tasks):
                task.cancel()
            await self.ranks.end()
            await self._say_farewell()
            self.peers.close()
            if self._listener is not None:
                self._listener.close()
            self.ranks.close()

    def _introduce(self, place: str) -> Peers:
        """Return the connections that will describe this agent to the others. `place`: what `id_of` returned, or ""."""
        node, limits, options = self.node, self.limits, self.options
        # Send only a digest of the arguments, because they may be long and may contain a secret
        settings = options.script.must_match()
        settings[ARGUMENTS] = hashlib.sha256(os.fsencode("\0".join(options.script.words))).hexdigest()[:16]
        if options.shared_dir:
            settings[SHARED] = place
        if limits is not None:
            settings |= {"--nnodes": f"{limits.least}:{limits.most}"}
        me = Member(
            token=secrets.token_hex(8), first_rank=node.first_rank, num_ranks=node.nproc,
            world_size=node.world_size, host=host_name(), pid=os.getpid(), left_s=options.join_timeout_s,
            ip="" if self.alone else chosen_address(os.environ), serves=self.port if limits is not None else 0,
            settings=settings,
        )
        rules = Rules(
            limits=limits, shared=bool(options.shared_dir), max_restarts=options.max_restarts,
            max_failures=options.max_failures, restart_on=options.restart_on, job=new_job(),
            epoch_s=time.time() - time.monotonic(),
        )
        master = node.master_addr, node.master_port
        return Peers(me, rules, self, master=self._master, address=master, leads=node.node_rank == 0)

    async def _master(self) -> Address:
        return self.node.master_addr, self.node.master_port

    async def _say_farewell(self) -> None:
        """Stay until the others have heard how the job ends. If a repeated signal ends this agent, tell them first."""
        self.send("quit")
        until_s = time.monotonic() + timing.FAREWELL_S
        leading = self.peers.meeting.leading
        while leading is not None and len(leading.seats) > 1 and time.monotonic() < until_s:
            await asyncio.sleep(timing.POLL_S)
        await self.files.close()

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task. If the task raises, `run` ends with the same exception, because nobody awaits the task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)  # the event loop holds only weak references to tasks
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._over.done():
            self._over.set_exception(error)

    def finish(self, verdict: Verdict) -> None:
        if not self._over.done():
            self._over.set_result(verdict)

    def send(self, kind: str, **values: Any) -> bool:
        """Say something to the leader. Returns False while no leader is connected."""
        return self.peers.send(kind, **values)

    @property
    def leads(self) -> bool:
        return hasattr(self, "peers") and self.peers.meeting.leading is not None

    async def _listen(self) -> None:
        """Listen on MASTER_PORT, or on any free port if another agent here needs it. Raises JoinError and UserError."""
        port = self.node.master_port
        if self.node.node_rank:
            try:  # node 0 or another agent may run on this machine too
                port = 0 if await is_this_machine(self.node.master_addr) else port
                open_port("", port).close()
            except OSError:
                port = 0
        accept = lambda *connection: self.peers.accept(*connection)  # noqa: E731
        self._listener = await listen(accept, ip="127.0.0.1" if self.alone else "", port=port)
        self.port = self._listener.sockets[0].getsockname()[1]

    # What `Peers` asks of this node -----------------------------------------------------------------------------------

    def heartbeat(self) -> tuple[list[dict[str, Any]], bool]:
        self.ranks.kill_stopped()
        beats = [record.read().heartbeat() for record in self.ranks.running_records().values()]
        return beats, self.ranks.server.ready.is_set()

    def say(self, text: str) -> None:
        log.warning("%s", text)

    def fail(self, error: Exception) -> None:
        if not self._over.done():
            self._over.set_exception(error)

    # Messages of the leader -----------------------------------------------------------------------------------------

    def hear(self, message: dict[str, Any]) -> None:
        """Act on a message of the leader."""
        kind = message["is"]
        if kind == "propose":
            self.begin(self._get_ready(message))
        elif kind == "spare" or (kind == "commit" and not self.ranks.start(message, token=self.peers.meeting.me.token)):
            log.info("this node is a spare: it waits until a node is needed")
        elif kind in ("lost", "gone", "ranks"):
            self.ranks.links.tell(kind, **{name: value for name, value in message.items() if name != "is"})
            if kind in ("lost", "gone"):
                self.ranks.leave_soon(node_lost=kind == "gone" or bool(message.get("node")))
            if kind == "gone" and self.peers.meeting.leading is None:
                self.files.give_up()
        elif kind == "prepare":
            begun = [record.ask_to_stop(message["stop"]) for record in self.ranks.running_records().values()]
            self.send("standing", n=message["n"], stop=message["stop"], step=max(begun, default=-1))
        elif kind == "confirm":
            for record in self.ranks.running_records().values():
                record.confirmed = message["stop"]
        elif kind == "notice":
            self.ranks.notice()
        elif kind == "stop":
            self.ranks.pass_on(message["signal"], change=bool(message.get("change")))
        elif kind == "left_out" and not self._leaves:
            self._leave_for_good(Verdict(LEFT_OUT, f"this node is left out: {message['why']}"))
        elif kind == "over":
            self.begin(self._end(Verdict(message["code"], message["text"])))

    async def _end(self, verdict: Verdict) -> None:
        """Finish once the ranks have left: if a stop ends the job, ranks that lost a peer may still be saving."""
        await self.ranks.left()
        self.finish(verdict)

    async def _get_ready(self, proposal: Mapping[str, Any]) -> None:
        """Answer a proposal once no rank of an earlier membership runs and the fork server can start the next ranks."""
        self.ranks.leave_soon()
        await self.ranks.all_ended.wait()
        check = self.options.health_check if self.ranks.ranks else ""  # before the first ranks `launch` has checked
        if check and (why := await in_thread(partial(problem, check))):
            self.unfit = True
            self.finish(Verdict(LEFT_OUT, f"this node is not fit and leaves the job for now: {why}"))
            return
        if proposal["used"]:
            await self.ranks.server.ready.wait()  # a spare starts no ranks, so it does not wait for imports
        self.ranks.interface = {} if self.alone else interface_variables(os.environ, proposal["ip"])
        if proposal["n"] == self.peers.meeting.basis.n:  # otherwise another one has come meanwhile
            await self.peers.try_route(proposal["n"], proposal["next"])

    # Signals that this agent or one of its ranks got ----------------------------------------------------------------

    def _on_sigusr1(self) -> None:
        """Pass on a notice if the script handles SIGUSR1, and otherwise stop the job."""
        if not self.ranks.takes_notice:
            self._stop("SIGUSR1")
        elif not self.send("notice"):
            self.ranks.notice()

    def _on_sigint(self) -> None:
        self._leave_if_repeated("SIGINT")
        self._stop("SIGINT")

    def _on_sigterm(self) -> None:
        """Stop the job. In an elastic job only this node leaves."""
        self._leave_if_repeated("SIGTERM")
        if self.limits is None or not (self.send("leaving") or self.peers.meeting.basis.n):
            self._stop("SIGTERM")
        elif not self._leaves:
            log.info("SIGTERM: this node leaves, and the job goes on without it")
            self._leave_for_good(Verdict(STOPPED, "this node was asked to leave"))

    def _leave_if_repeated(self, name: str) -> None:
        """End this agent at once if it was asked to stop more than REPEAT_S ago."""
        after_s = time.monotonic() - self._asked_s
        if self._asked_s and after_s > timing.REPEAT_S:
            self.finish(Verdict(STOPPED, f"{name} again, {after_s:.0f} s after the first: leaving at once"))
        self._asked_s = self._asked_s or time.monotonic()

    def _stop(self, name: str) -> None:
        """Ask the leader to stop the job. It passes the signal on to all agents."""
        self.send("stop", signal=name)
        if not self.ranks.running:
            self.finish(Verdict(STOPPED, f"{name} before the first step: nothing new to save."))
        self.ranks.pass_on(name)

    def _leave_for_good(self, verdict: Verdict) -> None:
        self._leaves = True
        self.begin(self._leave(verdict))

    async def _leave(self, verdict: Verdict) -> None:
        """Leave once a leader knows that this node leaves and this node's ranks have stopped with all others."""
        await asyncio.sleep(timing.ENDING_S)  # if every node is asked to leave, the leader stops the whole job
        while not (self.send("leaving") and await self.ranks.ended_within(timing.ALIVE_S)):
            await asyncio.sleep(timing.ENDING_S)  # another member may lead by now, so say it again
        if self.ranks.stopping:
            return  # the whole job stops, and the leader will say how it ends
        self.send("left")
        await asyncio.sleep(timing.ENDING_S)
        self.send("resign")
        self.finish(verdict)
