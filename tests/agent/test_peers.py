"""Connections of the meeting's shell, `peers`, with a leader that the test plays."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict
from typing import Any

import pytest

from rankup import timing
from rankup.agent.events import Rules
from rankup.agent.network import LONGEST, Link, encode
from rankup.agent.peers import Peers
from rankup.agent.protocol import Member
from rankup.agent.votes import Basis, Node
from tests.rigs.meeting_room import NEW, Nobody, asynchronous, member

KNOWN = {"token": "t", "n": 0, "formed": 0, "running": False, "job": ""}


class Listening(Nobody):
    """A node: its connections, the messages that it heard, and the lines that it printed."""

    def __init__(self, me: Member, port: Callable[[], int], *, leads: bool = False) -> None:
        self.port, self.said, self.failed = port, list[str](), asyncio.get_running_loop().create_future()
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.peers = Peers(me, Rules(), self, master=self.find, leads=leads)
        self.peers.start()

    async def find(self) -> tuple[str, int]:
        return "127.0.0.1", self.port()

    def hear(self, message: dict[str, Any]) -> None:
        self.events.put_nowait(message)

    async def hears(self, kind: str) -> dict[str, Any]:
        event = await self.events.get()
        assert event["is"] == kind, event
        return event

    def say(self, text: str) -> None:
        self.said.append(text)

    def fail(self, error: Exception) -> None:
        self.failed.set_result(error)


@contextlib.asynccontextmanager
async def attending(me: Member, port: Callable[[], int], **more: Any) -> AsyncIterator[Listening]:
    made = Listening(me, port, **more)
    try:
        yield made
    finally:
        made.peers.close()


@contextlib.asynccontextmanager
async def fake_leader() -> AsyncIterator[tuple[Callable[[], int], "asyncio.Queue[Link]"]]:
    """A leader that the test plays. Yields its port and the connections to it."""
    links: asyncio.Queue[Link] = asyncio.Queue()
    writers = []

    async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        links.put_nowait(Link(reader, writer))

    server = await asyncio.start_server(attend, "127.0.0.1", 0)
    try:
        yield (lambda: server.sockets[0].getsockname()[1]), links
    finally:
        server.close()
        for writer in writers:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def greeted(links: "asyncio.Queue[Link]") -> tuple[Link, dict[str, Any]]:
    """Return the next connection, which is greeted as by a leader, and its hello."""
    link = await links.get()
    link.send("leader", over="", **KNOWN)
    return link, await link.receive()


def proposal(n: int, *members: Mapping[str, Any]) -> dict[str, Any]:
    """Return a proposal to members with these hellos."""
    known = tuple(Node(each["token"], "127.0.0.1", 1, each["port"], each["host"], each["first_rank"], 1)
                  for each in members)
    tokens = tuple(node.token for node in known)
    return {"n": n, "basis": Basis(n=n, known=known, used=tokens).pack()}


@asynchronous
async def test_member_that_leaves_before_the_greeting_closes_its_connection():
    async with fake_leader() as (port, links):
        async with attending(member(1), port):
            link = await links.get()
        with pytest.raises(ConnectionError):
            await link.receive()


@asynchronous
async def test_lost_leader_is_looked_for_again():
    async with fake_leader() as (port, links), attending(member(1), port) as one:
        link, hello = await greeted(links)
        assert (hello["age"], hello["first_rank"], hello["token"]) == (NEW["age"], 1, "token1")
        link.send("propose", **proposal(5, hello))
        await one.hears("propose")
        link.close()
        assert await one.hears("gone") == {"is": "gone", "why": "its process has ended", "code": 137}
        link, hello = await greeted(links)
        assert hello["age"] == [5, 5, 0, ""]


@asynchronous
async def test_connections_of_earlier_memberships_do_not_fill_the_listener(monkeypatch: pytest.MonkeyPatch):
    async with fake_leader() as (port, links), attending(member(1), port) as one:
        link, hello = await greeted(links)
        strangers = [socket.create_connection(("127.0.0.1", hello["port"])) for _ in range(100)]
        for n in range(1, 150):
            link.send("propose", **proposal(n, hello, {**hello, "token": "next", "first_rank": 2}))
            said = await one.hears("propose")
            await one.peers.try_route(n, said["next"])
            while (answer := await link.receive())["is"] != "ready":
                pass
            assert (answer["n"], answer["problem"]) == (n, "")
        for stranger in strangers:
            stranger.close()


@asynchronous
async def test_reason_for_a_missing_leader_is_printed_and_in_the_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timing, "NOTICE_S", 0.05)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        at = taken.getsockname()[1]
        async with attending(member(1, left_s=1.0), lambda: at) as one:
            error = await one.failed
    (told,) = {*one.said}
    problem = told.removeprefix("still waiting: ")
    assert problem.startswith(f"127.0.0.1:{at} refuses the connection: the machine answers, but nothing listens on ")
    assert problem.endswith("A loopback address reaches only the machine itself")
    assert str(error).startswith(f"rank 1 of 3 on node1 could not join within 1 s: {problem}. On all ranks, ")


@pytest.mark.parametrize("wrong", [
    {"over": 1}, {"over": None}, {"n": "1"}, {"n": 1e999}, {"running": "no"}, {"job": ["x"]}, {"job": "../x"},
    {"token": 5}, {"at": ["127.0.0.1"]}, {"at": ["127.0.0.1", 70000]}, {"at": [["127.0.0.1"], 1]},
])
@asynchronous
async def test_greeting_that_no_leader_sends_is_not_followed(wrong: dict[str, Any]):
    """Any program may listen there. A member that trusted it would compare a number with a string, and crash."""
    async with fake_leader() as (port, links), attending(member(1, left_s=0.0), port) as one:
        (await links.get()).send("leader", **{"over": "", **KNOWN, "at": ["127.0.0.1", 4711], **wrong})
        assert "does not answer as a rendezvous store" in str(await one.failed)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: node0\r\n\r\n", b"\x80\x04\x95\n", b"[" * 100_000 + b"\n", b"{}\n", b'{"is": 3}\n',
        b'{"is": "hello"}\n', b"x" * (LONGEST + 10), b"9" * 10_000 + b"\n",
        *[
            encode("hello", **{**asdict(member(1)), **NEW, **wrong})
            for wrong in (
                {"host": 3}, {"host": "\x1b[2J"}, {"host": "h" * 256}, {"first_rank": -1}, {"num_ranks": 3},
                {"age": None}, {"age": [0, 0, "x", ""]}, {"before": [-1]}, {"settings": 3},
            )
        ],
        encode("hello", **asdict(member(1)), **NEW) + b'{"is": "alive", "ranks": [{"rank": 1, "ago_s": 1e999}]}\n',
        encode("hello", **asdict(member(1)), **NEW) + b'{"is": "stop", "signal": "SIGKILL"}\n',
    ],
    ids=range(19),
)
@asynchronous
async def test_stranger_that_sends_garbage_is_disconnected(data: bytes):
    async with attending(member(0), lambda: 0, leads=True) as leader:
        server = await asyncio.start_server(leader.peers.accept, "127.0.0.1", 0, limit=LONGEST)
        port = server.sockets[0].getsockname()[1]
        link = await Link.connect("127.0.0.1", port)
        await link.receive()
        link.write(data)
        with contextlib.suppress(ConnectionError):  # otherwise the test takes too long
            while await link.receive():
                pass
        right = await Link.connect("127.0.0.1", port)
        assert (await right.receive())["over"] == ""
        for closed in (link, right):
            closed.close()
        server.close()
