"""How a member takes part in the meeting: it finds the leader, tests the route to the next member, and follows the
leader's decisions. In an elastic job, whose number of nodes may change, the members also elect the leader."""

import asyncio
import contextlib
import itertools
import math
import os
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from rankup import timing
from rankup.agent.network import Link, fits, greeting, open_port, read_secret
from rankup.agent.protocol import KILLED, LEADERS, Member
from rankup.agent.quorum import NONE, Basis, age, knowledge, same_job
from rankup.agent.record import Record
from rankup.env.node_env import NodeEnv
from rankup.env.rank_env import is_loopback
from rankup.errors import JoinError

ASKED = 4  # how many members are asked at once who leads
CROWD = 8  # members of a job with more ranks than this retry less often, because one machine accepts all connections
HINT = "On all ranks, MASTER_ADDR and MASTER_PORT, or the file, must be those of rank 0."


class LeaderConnection:
    """A member's connection to the leader. If it is lost, the member looks for a leader for `me.left_s` at most.

    `problem`: why there is no membership yet. `basis`: the newest basis that the leader has sent, see `quorum`. If the
    number of nodes is fixed, only the basis's `n` is used."""

    def __init__(
        self, me: Member, find_leader: Callable[[], Awaitable[tuple[str, int]]], *,
        notice: Callable[[str], None], clock: Callable[[], float] = time.monotonic,
        records: Callable[[], Mapping[int, Record]] = dict, silent_s: float = timing.SILENT_S,
        warm: Callable[[], bool] = lambda: True,
    ) -> None:
        """`find_leader`: returns the leader's host and port, which may change, or raises an OSError that says why there
        is no leader yet. `notice`: prints what this member waits for, every NOTICE_S. `records`: the records of this
        member's running ranks, by rank. `silent_s`: the leader is lost after this many seconds without a heartbeat.
        `warm`: whether the fork server has imported torch already, so that ranks start at once."""
        self.basis: Basis = NONE
        self._silent_s, self._warm, self._records = silent_s, warm, records
        self.me, self._find_leader, self._notice, self._clock = me, find_leader, notice, clock
        self.problem = "nothing was heard from rank 0"
        self._until_s = math.inf  # when this member gives up joining; infinite while it is in a membership
        self._heard_s = self._noticed_s = clock()
        self._link: Link | None = None
        self._leader, self.at = "", list[Any]()  # the leader's last address as text; its [ip, port] while connected
        self._chosen_ip = me.ip
        self._listener: socket.socket | None = None
        self._next_member: list[Any] | None = None  # ip, port and name
        self._tasks: set[asyncio.Task[Any]] = set()

    def send(self, kind: str, **values: Any) -> bool:
        """Send a message to the leader. Returns False while no leader is connected."""
        if self._link is not None:
            self._link.send(kind, **values)
        return self._link is not None

    def ready(self, n: int) -> None:
        """Tell the leader that this member's ranks have ended and that it can join membership `n`. Returns at once. The
        message is sent after the test of the route to the next member."""
        if self._link is not None and n == self.basis["n"]:
            self._start(self._try_route(self._link, n))

    async def follow(self, on_message: Callable[[dict[str, Any]], object]) -> None:
        """Take part until `on_message` returns true. It receives each message of the leader: propose, commit, lost, ...
        If the leader itself is lost, `on_message` receives "gone" (with `why`), and this member looks for a leader.

        Raises JoinError if no leader answers within `me.left_s` seconds of the start, or of the end of the last
        membership. A leader that answers decides how long to wait, because it knows who is missing.
        """
        self._until_s = self._clock() + self.me.left_s
        try:
            while True:
                link = await self._connect()
                watch = self._start(self._watch(link))
                while (message := await self._next(link)) is not None:
                    if self._take(link, message) and on_message(message):
                        return
                lost = {"why": watch.result()} if watch.done() else {"why": "its process has ended", "code": KILLED}
                watch.cancel()
                link.close()
                self._link, self.at = None, []
                if self._clock() > self._until_s:
                    if "code" not in lost:
                        stopped = "its process is stopped, or the network to it is cut"
                        self.problem = f"rank 0 at {self._leader} {lost['why']}: {stopped}"
                    raise self._failure()
                self._leave_membership()
                if on_message({"is": "gone", **lost}):
                    return
                await asyncio.sleep(timing.PAUSE_S)
        finally:
            self.close()

    async def _next(self, link: Link) -> dict[str, Any] | None:
        """Return the leader's next message, or None if the connection has ended or the message is malformed."""
        with contextlib.suppress(ConnectionError, ValueError):
            message = await link.receive(LEADERS)
            self._heard_s = self._clock()
            return message
        return None

    def close(self) -> None:
        """Leave. Messages that were sent before still go out."""
        for task in self._tasks:
            task.cancel()
        for held in (self._link, self._listener):
            if held is not None:
                held.close()

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _take(self, link: Link, message: dict[str, Any]) -> bool:
        """Act on a message as far as the meeting is concerned. Returns whether `on_message` gets the message too."""
        kind = message["is"]
        if kind == "waiting":
            self.problem = message["text"]
            self._notice(f"still waiting: {self.problem}")
        elif kind == "propose":
            self.basis = message.get("basis") or {**self.basis, "n": message["n"]}
            self._next_member = message.get("next")
        elif kind in ("commit", "spare", "basis"):
            self._until_s = self._until_s if kind == "basis" else math.inf
            basis = message.get("basis") or self.basis
            if age(basis) >= age(self.basis):  # otherwise a newer basis has been proposed already
                self.basis = basis
            if message.get("basis"):
                link.send("has", n=self.basis["n"], v=self.basis["v"])
        elif kind == "over":  # look for no other leader. Stay: a leader in this process may still have to tell others
            self._until_s = self._clock()
        elif kind == "lost":
            self._leave_membership()
        elif kind == "prepare":
            begun = [record.ask_to_stop(message["stop"]) for record in self._records().values()]
            link.send("standing", n=message["n"], step=max(begun, default=-1))
        elif kind == "confirm":
            for record in self._records().values():
                record.confirmed = message["stop"]
        return kind not in ("alive", "waiting", "prepare", "confirm")

    def _leave_membership(self) -> None:
        if self._until_s == math.inf:
            self._until_s = self._clock() + self.me.left_s

    def _failure(self) -> JoinError:
        who = self.me.name.replace(" on ", f" of {self.me.world_size} on ", 1)
        return JoinError(f"{who} could not join within {self.me.left_s:g} s: {self.problem.rstrip('.')}. {HINT}")

    # The connection -----------------------------------------------------------------------------------------------

    async def _connect(self) -> Link:
        crowd, begun_s, refused = min(10.0, max(1.0, self.me.world_size / CROWD)), self._clock(), ""
        while True:
            try:
                host, port = await self._find_leader()
            except OSError as error:
                self.problem = str(error)
            else:
                try:
                    return await self._introduce(host, port)
                except JoinError as error:
                    self.problem = str(error)
                except OSError as error:
                    now = explain(error, host, port)
                    # When rank 0 gives up, its container and host name vanish. An earlier refusal shows the real cause
                    refused = now if isinstance(error, ConnectionRefusedError) else refused
                    self.problem = f"{refused}. By now {now}" if refused and refused != now else now
            now_s = self._clock()
            if now_s > self._until_s:
                raise self._failure()
            if now_s - self._noticed_s >= timing.NOTICE_S:
                self._noticed_s = now_s
                self._notice(f"still waiting: {self.problem}")
            await asyncio.sleep(crowd * (timing.EARLY_PAUSE_S if now_s - begun_s < timing.EARLY_S else timing.PAUSE_S))

    async def _introduce(self, host: str, port: int) -> Link:
        """Connect and send hello. Raises OSError if nobody accepts, and JoinError if no leader there takes members."""
        self._listen()
        secret = read_secret(os.environ)
        link = await Link.connect(host, port)
        try:
            async with asyncio.timeout(min(timing.HELLO_S, max(1.0, self._until_s - self._clock()))):
                over = str((await greeting(link, secret))["over"])
        except asyncio.CancelledError:
            link.close()
            raise
        except (OSError, LookupError, ValueError):
            over = (
                f"something accepts connections at {host}:{port} but does not answer as a rendezvous store: another "
                "service holds the port, the machine is the wrong one, or the process of rank 0 is stopped"
            )
        if over:
            link.close()
            raise JoinError(over)
        self.me = replace(self.me, ip=self._chosen_ip or link.local_ip)
        link.send("hello", **asdict(self.me), n=self.basis["n"], basis=self.basis, warm=self._warm())
        self._link, self._heard_s = link, self._clock()
        self._leader, self.at = f"{host}:{port}", [link.remote_ip, port]
        self.problem = f"rank 0 at {self._leader} is still waiting for others"
        return link

    async def _watch(self, link: Link) -> str:
        """Send heartbeats until the leader sends none for too long. Returns why the leader counts as lost."""
        looked_s = self._clock()
        while True:
            heartbeats = [record.read().heartbeat() for record in self._records().values()]
            link.send("alive", ranks=heartbeats, warm=self._warm())
            await asyncio.sleep(timing.ALIVE_S)
            now_s = self._clock()
            if now_s - looked_s > timing.ALIVE_S + min(timing.FROZEN_S - timing.ALIVE_S, self._silent_s / 2):
                self._heard_s = now_s  # this process itself was stopped for a while, and could receive nothing
            looked_s, silent_s = now_s, now_s - self._heard_s
            is_over = now_s > self._until_s + timing.LAST_MESSAGE_S and silent_s > timing.BUSY_S
            if silent_s > self._silent_s or is_over:
                link.close(at_once=True)
                return f"sent no heartbeat for {silent_s:.0f} s"

    # The route to the next member ---------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Listen on any high port, as gloo will, so that another member can test the route. Raises OSError.

        The kernel completes the connections by itself. No code reads from them, so strangers can do no harm.
        """
        if self._listener is None and self.me.num_ranks < self.me.world_size:  # a single member needs no route test
            self._listener = open_port("", 0, backlog=128)
            self._listener.setblocking(False)
            self.me = replace(self.me, port=self._listener.getsockname()[1])

    async def _try_route(self, link: Link, n: int) -> None:
        """Test the route to the next member. Then tell the leader that this member is ready, and what failed, or ""."""
        problem = ""
        with contextlib.suppress(OSError):
            while self._listener is not None:  # drop connections of earlier tests, so that the backlog never fills
                self._listener.accept()[0].close()
        if self._next_member is not None:
            ip, port, name = self._next_member
            try:
                (await Link.connect(ip, port, timeout_s=timing.ROUTE_S)).close()
            except OSError as error:
                why = os.strerror(error.errno) if error.errno else "no answer"
                problem = f"{self.me.name} does not reach {name} at {ip}:{port} ({why})"
        link.send("ready", n=n, problem=problem)


def explain(error: OSError, host: str, port: int) -> str:
    """Return a clause that says why a connection failed and what such an error usually means."""
    address = f"{host}:{port}"
    if isinstance(error, socket.gaierror):
        return f'the name "{host}" does not resolve here ({error.strerror})'
    if isinstance(error, ConnectionRefusedError):
        own = ". A loopback address reaches only the machine itself" if is_loopback(host) else ""
        return (
            f"{address} refuses the connection: the machine answers, but nothing listens on that port (rank 0 not "
            f"started or already gone, or another port){own}"
        )
    if isinstance(error, TimeoutError):
        return f"{address} does not answer: a wrong address, a machine that is down, or a firewall that drops packets"
    return f"{address}: {os.strerror(error.errno) if error.errno else error}"


# Who leads an elastic job ---------------------------------------------------------------------------------------------


async def elect(
    connection: LeaderConnection, node: NodeEnv, elsewhere: tuple[str, int] | None
) -> tuple[str, int] | None:
    """Return the leader's address, or None if this member must lead: the first member of the last membership that
    answers leads. `elsewhere`: the address of an agent that has said it leads. Raises OSError if the caller must retry.

    All members search at the same time. So each of them asks only ASKED members at once, in the order in which they
    would lead. Only a member that is about to lead asks all others."""
    basis, me, master = connection.basis, connection.me, (node.master_addr, node.master_port)
    said: dict[tuple[str, int], Mapping[str, Any] | None] = {}
    # Port 0: this member does not lead. From this message a new node 0 learns that the job exists already
    words = {**knowledge(basis, me.token), "port": 0}

    async def ask(places: Iterable[tuple[str, int]]) -> tuple[str, int] | None:
        new = dict.fromkeys(place for place in places if place not in said)
        while new:
            found = await asyncio.gather(*(who_leads(*place, answer=words) for place in new))
            said.update(zip(new, found, strict=True))
            told = [tuple(each["at"]) for each in said.values() if each and each.get("at")]
            new = dict.fromkeys(place for place in told if place not in said)
        for place, each in said.items():
            leads = each is not None and not each["over"] and each["token"] != me.token
            if each is not None and leads and each["formed"] >= words["formed"] and same_job(each, words):
                return place
        return None

    known = [(token, (ip, port), name) for token, ip, port, name in basis["known"]]
    before = list(itertools.takewhile(lambda each: each[0] != me.token, known))
    for start in range(0, max(1, len(before)), ASKED):
        few = before[start:start + ASKED]
        if found := await ask([*(place for _, place, _ in few), master, elsewhere or master]):
            return found
        for token, place, name in few:
            if (each := said[place]) and each["token"] == token:
                raise ConnectionError(f"{name} should lead, but does not lead yet")
    if not basis["n"]:
        return master  # connecting there raises the error that users should see
    if len(before) == len(known):
        raise ConnectionError("no leader of the job was found")
    return await ask(place for token, place, _ in known if token != me.token)


async def who_leads(ip: str, port: int, *, answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Ask the agent at this address who leads, and send `answer` to it as "leads". Returns None if no agent answers."""
    connect = Link.connect(ip, port, timeout_s=timing.PROBE_S)
    with contextlib.suppress(OSError, ValueError), contextlib.closing(await connect) as link:
        async with asyncio.timeout(timing.PROBE_S):
            said = await greeting(link, read_secret(os.environ))
        link.send("leads", **answer)
        if fits(said, LEADERS["leader"]):
            return said
    return None
