"""Who leads the job, and what the leader's agent does beside: it decides what the ends of ranks mean. No torch here."""

import asyncio
import contextlib
import functools
import json
import logging
import math
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from rankup import timing
from rankup.agent import secret
from rankup.agent.attendance import Attendance
from rankup.agent.ends import End, Ends, ScriptStatus, Verdict, new_job
from rankup.agent.fork_server import ForkServer
from rankup.agent.meeting import Leader
from rankup.agent.network import open_port
from rankup.agent.processes import within
from rankup.agent.protocol import Link, Member, in_thread
from rankup.agent.ranks import Options
from rankup.env.launchers import free_port
from rankup.env.node_env import NodeEnv
from rankup.errors import STOPPED, JoinError, PeerLost, UserError
from rankup.places.place import Place

log = logging.getLogger("rankup")


class Lead:
    """What node 0's agent does beside: it leads the meeting, and decides what the ends of ranks mean."""

    def __init__(
        self, options: Options, me: Member, server: ForkServer, places: Mapping[str, tuple[str, int]], *,
        yield_to: Callable[[str, int], None],
        begin: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        """Decide from now on. `server`: serves the store. `places`: where nodes were last. `yield_to`: another one
        leads at that address. `begin`: a task."""
        self.options, self.node, self.limits, self.server = options, options.node, options.node.limits, server
        self.places, self.yield_to = places, yield_to
        self.ends = Ends(self.node.world_size, options.max_restarts, options.restart_on)
        self.leader = Leader(
            me, say=functools.partial(log.info, "%s"), prepare=self._prepare, hear=self._hear, limits=self.limits,
            outdone=yield_to, claim=self._claim,
        )
        self.status = None if options.knows_us else ScriptStatus(options.run_dir, self.node.world_size)
        self.job = self.status.job if self.status is not None else new_job()
        self.failures = Counter[str]()  # of the ranks of each node, by its token
        self.again = False  # this job goes on with an earlier one's run
        works = [self.leader.watch(master="" if options.alone or self.node.node_rank else self.node.master_addr)]
        works += [self._report(self.status)] if self.status is not None else []
        works += [self._call()] if self.limits is not None else []
        self._tasks = [begin(work) for work in works]

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
        node, me = self.node, self.leader.me
        while True:
            await asyncio.sleep(timing.CALL_S)
            here = {(member.ip, member.serves) for member in self.leader.members}
            known = {(node.master_addr, node.master_port), *self.places.values()}
            await asyncio.gather(*(self._call_one(*place) for place in known - here - {(me.ip, me.serves)}))

    async def _call_one(self, ip: str, port: int) -> None:
        leader = self.leader
        words = {"n": leader.basis["n"], "running": leader.running, "token": leader.me.token, "port": leader.me.serves}
        other = await who_leads(ip, port, answer=words)
        if other and not other["over"] and other["token"] != leader.me.token and leader.yields_to(other):
            self.yield_to(ip, port)

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
            if self.leader.running or self.limits is not None:
                report = functools.partial(status.report, nodes=self.leader.nodes())
                await in_thread(report, timeout_s=math.inf)  # the disk may hang

    async def _claim(self, job: str, number: int) -> bool:
        """Own what follows that membership: be the first to write in the shared folder that this member does."""
        place = Place.open(self.options.shared_dir, warn=log.debug)
        token = json.dumps({"token": self.leader.me.token}).encode()
        with contextlib.suppress(OSError, UserError, PeerLost):
            create = functools.partial(place.create, f"{job}-after-{number}.json", token)
            return await in_thread(create, timeout_s=timing.CLAIM_S)
        return False

    async def _prepare(self, n: int) -> Mapping[str, Any]:
        """What a commit says beside its members. Where the job is over instead, this returns nothing any more."""
        verdict = await self._blame(self.ends.judge(changing=self.leader.changing))
        if verdict.code is not None:
            self._end(verdict)
            await asyncio.Event().wait()
        if self.options.knows_us:
            await self.server.ready.wait()
            with open_port("127.0.0.1" if self.options.alone else "", 0) as listener:
                self.server.start_store(listener)
                port = listener.getsockname()[1]
        else:
            port = free_port()
        self.ends.world_size = sum(member.num_ranks for member in self.leader.chosen)
        if self.limits is not None:  # whoever leads counts the attempts the same way
            self.job, self.ends.restarts = self.leader.basis["job"] or self.job, n - 1
        if self.status is not None:
            self.status.job, self.status.world_size = self.job, self.ends.world_size
            if self.status.owner is None:
                self.again = await asyncio.to_thread(
                    self.status.take, self.ends.restarts, agreed=self.limits is not None
                )
            self.status.begin(self.ends.restarts, self.leader.chosen)
        return {
            "job": self.job, "restarts": self.ends.restarts, "why": verdict.text, "port": port,
            "store": self.options.knows_us, "again": self.again or self.ends.restarts > 0,
        }

    async def _blame(self, verdict: Verdict) -> Verdict:
        """Leave a node out on which ranks have failed too often: the leader then proposes another membership."""
        if self.options.max_failures is None or verdict.cause is None or verdict.rank is None:
            return verdict
        token = self.leader.basis["ran"][verdict.rank // self.node.nproc]
        self.failures[token] += 1
        if self.failures[token] < self.options.max_failures:
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


async def elect(
    attendance: Attendance, node: NodeEnv, elsewhere: tuple[str, int] | None
) -> tuple[str, int] | None:
    """Where somebody leads; None where this member is to: the first of the last membership that answers leads.
    `elsewhere`: where a leader has said that it leads. Raises OSError where that is to be waited for."""
    basis, me, master = attendance.basis, attendance.me, (node.master_addr, node.master_port)
    known = {token: (ip, port) for token, ip, port, _ in basis["known"] if token != me.token}
    said: dict[tuple[str, int], Mapping[str, Any] | None] = {}
    new = dict.fromkeys([*known.values(), master, elsewhere or master])
    while new:
        said |= zip(new, await asyncio.gather(*(who_leads(*place) for place in new)), strict=True)
        told = [(str(each["at"][0]), int(each["at"][1])) for each in said.values() if each and each["at"]]
        new = dict.fromkeys(place for place in told if place not in said)
    for place, each in said.items():
        if each and not each["over"] and each["n"] >= basis["n"] and each["token"] != me.token:
            return place
    if not basis["n"]:
        return master  # which says why not
    for token, _, _, host in basis["known"]:
        if token == me.token:
            return None
        if (each := said[known[token]]) and each["token"] == token:
            raise ConnectionError(f"{host} is to lead, and does not yet")
    raise ConnectionError("no leader of the job was found")


async def id_of(shared_dir: str) -> str:
    """The same on all nodes that share that place; "" where nobody can know whether he is the first to write there.
    Raises UserError, PeerLost and JoinError."""

    def read() -> str:
        place = Place.open(shared_dir, warn=log.debug)
        for _ in range(2):
            first = place.create("shared.json", json.dumps({"id": secrets.token_hex(8)}).encode())
        while not first and not (found := str(place.read_json("shared.json").get("id", ""))):
            time.sleep(timing.PAUSE_S)  # it is being written
        return "" if first else found

    try:
        found = await in_thread(read, timeout_s=timing.CLAIM_S)
    except TimeoutError:
        raise JoinError(f"--shared-dir: {shared_dir} does not answer") from None
    if not found:
        log.warning("--shared-dir: %s knows no conditional writes: of two nodes, both wait", shared_dir)
    return found


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
