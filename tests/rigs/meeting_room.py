"""A leader in this process, members that send what a test tells them to send, and a clock that only the test moves."""

import asyncio
import contextlib
import functools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import pytest

from rankup.agent.leader import Leader
from rankup.agent.network import LONGEST, Link
from rankup.agent.protocol import Member
from rankup.env.node_env import Limits

BOUND_S = 60.0  # of each test, for a machine that is ten times as busy
HELLO = {"n": 0}
Claim = Callable[[str, int], Awaitable[bool]]


def asynchronous(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*given: Any, **named: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(BOUND_S):
                await test(*given, **named)

        asyncio.run(bounded())

    return run


async def until(condition: Callable[[], Any]) -> None:
    """Wait for something that the leader does without a message."""
    while not condition():
        await asyncio.sleep(0.001)


def member(rank: int, *, of: int = 3, num_ranks: int = 1, token: str = "", **more: Any) -> Member:
    values = {"host": f"node{rank}", "pid": 1000 + rank, "left_s": 120.0, "ip": "127.0.0.1", **more}
    return Member(token or f"token{rank}", rank, num_ranks, of, **values)


class Puppet:
    """A member that sends what the test tells it to send."""

    def __init__(self, link: Link, me: Member) -> None:
        self.link, self.me = link, me

    def send(self, kind: str, **values: Any) -> None:
        self.link.send(kind, **values)

    async def hears(self, kind: str) -> dict[str, Any]:
        """Return the next message, which must be of this kind."""
        while (message := await self.link.receive())["is"] == "alive":
            pass
        assert message["is"] == kind, message
        return message

    async def is_cut(self) -> None:
        """Wait until the connection ends. No other message may come before."""
        with pytest.raises(ConnectionError):
            await self.hears("the end")

    def vanish(self) -> None:
        self.link.close()


async def all_hear(kind: str, puppets: Iterable[Puppet]) -> list[dict[str, Any]]:
    return [await puppet.hears(kind) for puppet in puppets]


async def get_ready(puppets: Iterable[Puppet]) -> None:
    """Answer the next proposal."""
    for puppet in puppets:
        puppet.send("ready", n=(await puppet.hears("propose"))["n"], problem="")


class Room:
    """A leader of three ranks, with a port that anybody can connect to, and a clock that only the test moves."""

    def __init__(self, me: Member, limits: Limits | None, claim: Claim | None) -> None:
        self.now_s, self.said, self.raised = 1000.0, list[str](), list[Exception]()
        self.heard: asyncio.Queue[tuple[Member, Mapping[str, Any]]] = asyncio.Queue()
        self.prepared: Callable[[int], Awaitable[Mapping[str, Any]]] = self.prepare_nothing
        self.leader = Leader(
            me, log=self.said.append, prepare=lambda n: self.prepared(n), limits=limits, clock=lambda: self.now_s,
            on_message=lambda member, message: self.heard.put_nowait((member, message)), claim=claim,
        )
        self.port, self.links, self.attended = 0, list[Link](), 0

    async def prepare_nothing(self, n: int) -> Mapping[str, Any]:
        return {"job": f"job{n}"}

    async def attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.attended += 1
        try:
            await self.leader.accept(reader, writer)
        except Exception as error:
            self.raised.append(error)
        finally:
            writer.close()
            self.attended -= 1

    async def connect(self) -> Link:
        self.links.append(link := await Link.connect("127.0.0.1", self.port))
        return link

    async def enter(self, me: Member, **more: Any) -> Puppet:
        """Return a puppet that has introduced itself."""
        link = await self.connect()
        assert (await link.receive())["is"] == "leader"
        link.send("hello", **{**asdict(me), **HELLO, **more})
        return Puppet(link, me)

    async def three(self) -> list[Puppet]:
        """Return three puppets that have introduced themselves."""
        puppets = [await self.enter(member(rank)) for rank in (2, 0, 1)]
        return sorted(puppets, key=lambda puppet: puppet.me.first_rank)

    async def agree(self, puppets: list[Puppet]) -> dict[str, Any]:
        """Answer the next proposal, and return the commit."""
        await get_ready(puppets)
        said = await all_hear("commit", puppets)
        assert said[1:] == said[:-1]
        return said[0]

    async def job(self) -> list[Puppet]:
        """Return three puppets in a membership."""
        puppets = await self.three()
        await self.agree(puppets)
        return puppets

    async def nothing_is_said_to(self, *puppets: Puppet) -> None:
        for puppet in puppets:  # connections keep their order, so the leader has then read all that the puppets sent
            puppet.send("mark")
            while (await self.heard.get())[1]["is"] != "mark":
                pass
        self.leader.tell("mark")
        await all_hear("mark", puppets)

    async def pass_time(self, seconds: float, *alive: Puppet) -> None:
        """Move the clock in steps, as a running process sees it. Puppets in `alive` send a heartbeat in each step."""
        while seconds > 0:
            for puppet in alive:
                puppet.send("mark")
                while (await self.heard.get())[1]["is"] != "mark":
                    pass
            self.now_s += min(seconds, 1.0)
            seconds -= 1.0
            self.leader.tick()


@contextlib.asynccontextmanager
async def room(
    me: Member | None = None, limits: Limits | None = None, claim: Claim | None = None
) -> AsyncIterator[Room]:
    made = Room(me or member(0), limits, claim)
    listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)  # as agents do
    server = await asyncio.start_server(made.attend, sock=listener, limit=LONGEST)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        for link in made.links:
            link.close()
        await until(lambda: made.attended == 0)
    assert not made.raised
