"""What only the leading agent does: it decides what the ends of ranks mean for the job, and writes the status of a run
whose script does not import rankup. Imports no torch."""

import asyncio
import contextlib
import functools
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from rankup import timing
from rankup.agent.ends import End, Ends, ScriptStatus, Verdict, new_job
from rankup.agent.leader import Leader
from rankup.agent.leader_connection import who_leads
from rankup.agent.network import in_thread, open_port
from rankup.agent.processes import within
from rankup.agent.protocol import KILLED, SHARED, Member
from rankup.agent.ranks import Ranks
from rankup.env.launchers import free_port
from rankup.errors import STOPPED, JoinError, PeerLost, UserError, disk_errors
from rankup.places.place import Place

log = logging.getLogger("rankup")


async def id_of(shared_dir: str) -> str:
    """Return an id that is the same on all nodes that share this place. Raises UserError, PeerLost and JoinError."""

    def read() -> str:
        place = Place.open(shared_dir, warn=log.debug)
        place.create("shared.json", json.dumps({"id": secrets.token_hex(8)}).encode())
        # Otherwise two halves of a job could both claim the right to continue
        place.must_refuse("shared.json", option="--shared-dir")
        while not (found := str(place.read_json("shared.json").get("id", ""))):
            time.sleep(timing.PAUSE_S)  # another node is writing the file
        return found

    try:
        return await in_thread(read, timeout_s=timing.PREPARE_S)  # `read` may import an object store's client
    except TimeoutError:
        raise JoinError(f"--shared-dir: {shared_dir} does not answer") from None


class Coordinator:
    """The part of an agent that leads, from its election until the agent ends or another agent leads."""

    def __init__(
        self, me: Member, ranks: Ranks, *, places: Mapping[str, tuple[str, int]], outdone: Callable[[str, int], None]
    ) -> None:
        """`places`: the last address of each node. `outdone(ip, port)`: called if the agent there must lead instead."""
        options = self.options = ranks.options
        self.node, self.limits, self.server = options.node, options.node.limits, ranks.server
        self.places, self.outdone = places, outdone
        self.ends = Ends(self.node.world_size, options.max_restarts, options.restart_on)
        self.begin = ranks.begin
        self.leader = Leader(
            me, log=log.info, prepare=self._prepare, on_message=self._on_message, limits=self.limits, outdone=outdone,
            claim=self._claim if me.settings.get(SHARED) else None,
        )
        self.status = None if options.script.imports_rankup else ScriptStatus(options.run_dir)
        self.job = new_job()
        self._began_s = time.monotonic()  # when the newest membership began
        self._noticed = "", 0.0  # which node has given a notice last, by its token, and when
        self.failures = Counter[str]()  # how often the ranks of each node have failed, by the node's token
        self.taking: asyncio.Task[bool] | None = None  # takes the run's lease, see `ScriptStatus.take`
        works = [self.leader.watch()]
        works += [self._report(self.status)] if self.status is not None else []
        works += [self._call()] if self.limits is not None else []
        self._tasks = [self.begin(work) for work in works]

    def give_up(self) -> None:
        for task in self._tasks:
            task.cancel()
        self.leader.dismiss()
        if self.status is not None:
            self.status.held.close()

    async def close(self) -> None:
        """Stay until the others have heard how the job ends. If a repeated signal ends this agent, tell them first."""
        if self.ends.stopped_by and not self.leader.over:
            self._end(Verdict(STOPPED, self.ends.stopped_by))
        until_s = time.monotonic() + timing.FAREWELL_S
        while len(self.leader.seats.members) > 1 and time.monotonic() < until_s:
            await asyncio.sleep(timing.POLL_S)
        if self.status is not None:
            within(timing.LAST_MESSAGE_S, self.status.held.close)

    async def _report(self, status: ScriptStatus) -> None:
        while True:
            await asyncio.sleep(timing.REPORT_S)
            if status.owner is not None and (self.leader.running or self.limits is not None):
                ranks, nodes = self.leader.heartbeats(), self.leader.nodes()  # a thread writes: the disk may hang
                await in_thread(functools.partial(status.report, heartbeats=ranks, nodes=nodes))

    async def _call(self) -> None:
        """Call nodes that are not connected, every CALL_S. After a network cut or a restart of node 0 there may be two
        leaders, and only one may go on. A call also tells a restarted node that does not find node 0 who leads."""
        while True:
            await asyncio.sleep(timing.CALL_S)
            here = {(member.ip, member.serves) for member in self.leader.seats.members}
            known = {(self.node.master_addr, self.node.master_port), *self.places.values()}
            await asyncio.gather(*(self._call_one(*place) for place in known - here))

    async def _call_one(self, ip: str, port: int) -> None:
        leader = self.leader
        other = await who_leads(ip, port, answer={**leader.greeting(), "port": leader.me.serves})
        if other and not other["over"] and other["token"] != leader.me.token and leader.yields_to(other):
            self.outdone(ip, port)

    async def _claim(self, job: str, number: int) -> bool:
        """Claim the right to form the membership after `number`. Returns whether this node got the claim."""
        token = json.dumps({"token": self.leader.me.token}).encode()

        def create() -> bool:
            return Place.open(self.options.shared_dir, warn=log.debug).create(f"{job}-after-{number}.json", token)

        with contextlib.suppress(OSError, UserError, PeerLost):
            return await in_thread(create, timeout_s=timing.CLAIM_S)
        return False

    async def _prepare(self, n: int) -> Mapping[str, Any]:
        """Return what a commit says besides its members. If the job ends instead, wait until this task is cancelled."""
        size = sum(member.num_ranks for member in self.leader.chosen)
        verdict = await self._blame(self.ends.judge(resizing=self.leader.resizing, next_size=size))
        if verdict.code is not None:
            self._end(verdict)
            await asyncio.Event().wait()
        if self.options.script.imports_rankup:
            with open_port("127.0.0.1" if self.node.num_nodes == 1 else "", 0) as listener:
                self.server.start_store(listener)
                port = listener.getsockname()[1]
        else:
            port = free_port()
        self.ends.world_size, self._began_s = size, time.monotonic()
        if (job := self.leader.basis["job"]):  # in an elastic job, each leader continues the count of the one before
            self.job, self.ends.restarts = job, n - 1
        again = self.ends.restarts > 0
        if self.status is not None:
            attempt = f"{self.job}-{self.ends.restarts}"
            if self.taking is None:
                take = functools.partial(self.status.take, attempt, agreed=self.limits is not None)
                self.taking = asyncio.create_task(in_thread(take))
            with disk_errors("run_dir", self.options.run_dir):
                again |= await asyncio.shield(self.taking)  # if this task is cancelled, the next commit uses it
            self.status.begin(attempt, self.ends.world_size)
            # Report now, because the script may end before `_report` does. Use a thread, because the disk may hang
            self.begin(in_thread(self.status.report))
        return {
            "job": self.job, "restarts": self.ends.restarts, "why": verdict.text, "port": port,
            "store": self.options.script.imports_rankup, "again": again,
        }

    async def _blame(self, verdict: Verdict) -> Verdict:
        """Count a failure of the node that `verdict` blames. After too many failures leave the node out, and the leader
        proposes another membership. Returns `verdict`, or one that ends the job if too few nodes would be left."""
        most = self.options.max_failures
        if most is None or verdict.cause is None or (rank := verdict.cause.blamed) is None:
            return verdict
        token = self.leader.basis["ran"][rank // self.node.nproc]
        self.failures[token] += 1
        if self.failures[token] < most:
            return verdict
        why = f"{verdict.cause}, failure {self.failures[token]} of its ranks"
        self.ends.without_progress = 0
        if self.leader.leave_out(token, why):
            await asyncio.Event().wait()  # `leave_out` has dropped the proposal, which cancels this task
        return Verdict(verdict.cause.code, f"{why}, and too few nodes are left without that one")

    def _on_message(self, member: Member, message: Mapping[str, Any]) -> None:
        if message["is"] == "ending":
            self.leader.lose_by(member, End.read(message))
        elif message["is"] == "end":
            end = End.read(message)
            was_last = self.ends.add(end)
            if end.code:
                self.leader.lose(member, end.why or f"ended with {end.code}", ranks=[end.rank], code=end.code)
            elif was_last and self.leader.running:
                verdict = self.ends.judge(resizing=self.leader.resizing)
                if verdict.code is None:  # the ranks stopped for a change of nodes, and a script may end with 0 then
                    self.leader.lose(member, "nodes change", ranks=[end.rank])
                else:
                    self._end(verdict)
        elif message["is"] == "lost":
            lost = [End(rank, member.host, KILLED, message["why"]) for rank in member.ranks]
            self.ends.add_lost_node(lost, after_s=time.monotonic() - self._began_s)
        elif message["is"] == "notice":
            now_s, (other, noticed_s) = time.monotonic(), self._noticed
            # A scheduler signals all nodes at once. A second notice to the same node is meant as one
            if other in ("", member.token) or now_s - noticed_s > timing.REPEAT_S:
                self._noticed = member.token, now_s
                self.leader.tell("notice")
        elif message["is"] == "stop":
            self.ends.stopped_by = self.ends.stopped_by or message["signal"]
            self.leader.stop(message["signal"])
            if not self.leader.running:
                self._end(Verdict(STOPPED, self.ends.stopped_by))

    def _end(self, verdict: Verdict) -> None:
        if (status := self.status) is not None:  # for a limited time: a disk that hangs must not hide the end
            within(timing.REPORT_END_S, lambda: status.end(verdict.code or 0, verdict.text, self.ends.latest))
        self.leader.end(verdict.text, code=verdict.code)
