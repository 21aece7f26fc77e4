"""How a member takes part in the meeting, with a leader that the test plays or runs."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from rankup import timing
from rankup.agent.leader_connection import LeaderConnection, who_leads
from rankup.agent.network import Link
from rankup.agent.protocol import Member
from rankup.agent.quorum import NONE
from rankup.agent.record import Record
from rankup.errors import JoinError
from tests.rigs.meeting_room import Puppet, asynchronous, member, until

COMMIT = {"ip": "", "hosts": [], "port": 1, "job": "job", "restarts": 0}


class Listening:
    """A running member: its connection, the events that it heard, and the lines that it printed."""

    def __init__(self, me: Member, port: Callable[[], int], **more: Any) -> None:
        self.port, self.said = port, list[str]()
        self.connection = LeaderConnection(me, self.find, notice=self.said.append, **more)
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.running = asyncio.create_task(self.connection.follow(self.hear))

    async def find(self) -> tuple[str, int]:
        return "127.0.0.1", self.port()

    def hear(self, event: dict[str, Any]) -> None:
        self.events.put_nowait(event)
        if event["is"] == "propose":
            self.connection.ready(event["n"])

    async def hears(self, kind: str) -> dict[str, Any]:
        event = await self.events.get()
        assert event["is"] == kind, event
        return event

    async def leave(self) -> None:
        self.running.cancel()
        with contextlib.suppress(asyncio.CancelledError, JoinError):
            await self.running


@contextlib.asynccontextmanager
async def attending(*members: Member, port: Callable[[], int], **more: Any) -> AsyncIterator[list[Listening]]:
    made = [Listening(each, port, **more) for each in members]
    try:
        yield made
    finally:
        for each in made:
            await each.leave()


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
    link.send("leader", over="")
    return link, await link.receive()


@asynchronous
async def test_member_that_leaves_before_the_greeting_closes_its_connection():
    async with fake_leader() as (port, links):
        async with attending(member(1), port=port):
            link = await links.get()
        with pytest.raises(ConnectionError):
            await link.receive()


@pytest.mark.parametrize("loss", ["lost", "gone"])
@asynchronous
async def test_member_waits_while_its_leader_answers_and_its_time_starts_with_the_loss(
    loss: str, monkeypatch: pytest.MonkeyPatch
):
    clock = Steps(monkeypatch)
    async with fake_leader() as (port, links), attending(member(1), port=port, clock=clock) as (one,):
        link, _ = await greeted(links)
        link.send("commit", n=1, **COMMIT)
        await one.hears("commit")
        clock.now_s += 1000.0
        if loss == "lost":
            link.send("lost", n=1, ranks=[2], host="node2", why="exit code 137")
        else:
            link.close()
        said = await one.hears(loss)
        if loss == "gone":
            assert said == {"is": "gone", "why": "its process has ended", "code": 137}
            link, _ = await greeted(links)
        for _ in range(200):
            link.send("alive")
            clock.now_s += 1.0
            await link.receive()
            await asyncio.sleep(0)
        assert not one.running.done()
        with contextlib.suppress(ConnectionError):
            while True:
                clock.now_s += 1.0
                await link.receive()
                await asyncio.sleep(0)
        with pytest.raises(JoinError, match=r"sent no heartbeat for \d s: its process is stopped, or the network"):
            await one.running


@asynchronous
async def test_silent_leader_is_lost_and_looked_for_again(monkeypatch: pytest.MonkeyPatch):
    clock = Steps(monkeypatch)
    async with fake_leader() as (port, links), attending(member(1), port=port, clock=clock) as (one,):
        link, _ = await greeted(links)
        link.send("propose", n=5, ip="", next=None)
        link.send("commit", n=5, **COMMIT)
        await one.hears("propose"), await one.hears("commit")
        while one.events.empty():
            clock.now_s += 1.0
            with contextlib.suppress(ConnectionError):
                await link.receive()
            await asyncio.sleep(0)
        assert (await one.hears("gone"))["why"].startswith("sent no heartbeat for ")
        link, hello = await greeted(links)
        assert (hello["n"], hello["first_rank"], hello["token"]) == (5, 1, "token1")
        link.send("propose", n=6, ip="", next=None)
        assert (await one.hears("propose"))["n"] == 6


@asynchronous
async def test_news_of_the_last_membership_does_not_replace_a_proposal():
    proposed, last = {**NONE, "n": 6, "before": [{"n": 5, "voters": []}]}, {**NONE, "n": 5, "v": 3}
    async with fake_leader() as (port, links), attending(member(1), port=port) as (one,):
        link, _ = await greeted(links)
        link.send("propose", n=6, ip="", basis=proposed)
        link.send("basis", basis=last)  # a member has left meanwhile
        await one.hears("propose"), await one.hears("basis")
        assert one.connection.basis == proposed


class Steps:
    """A clock that the test moves, in steps or in a leap, while the member sends heartbeats without a pause."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(timing, "ALIVE_S", 0.0)

    def __call__(self) -> float:
        return self.now_s


@asynchronous
async def test_stopped_member_does_not_take_its_leader_for_silent_when_it_wakes(monkeypatch: pytest.MonkeyPatch):
    clock = Steps(monkeypatch)
    async with fake_leader() as (port, links), attending(member(1), port=port, clock=clock) as (one,):
        link, _ = await greeted(links)
        link.send("commit", n=1, **COMMIT)
        await one.hears("commit")
        for _ in range(5):
            clock.now_s += 10 * timing.SILENT_S
            for _ in range(100):
                assert (await link.receive())["is"] == "alive"
        assert one.events.empty()


@asynchronous
async def test_member_reports_its_furthest_step_once_its_ranks_will_wait():
    records = {rank: Record.new(rank) for rank in (1, 2, 3)}
    for rank, step in ((1, 7), (2, 8), (3, 6)):
        records[rank].begin(step)
    async with fake_leader() as (port, links), attending(member(1), port=port, records=lambda: records):
        link, _ = await greeted(links)
        link.send("prepare", n=1, stop=9)
        said = await Puppet(link, member(1)).hears("standing")
        assert (said["step"], {record.stop for record in records.values()}) == (8, {9})
        link.send("confirm", n=1, stop=9)
        await until(lambda: all(record.confirmed == 9 for record in records.values()))


@asynchronous
async def test_connections_of_earlier_memberships_do_not_fill_the_listener(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timing, "ROUTE_S", 2.0)
    async with fake_leader() as (port, links), attending(member(1), port=port) as (one,):
        link, hello = await greeted(links)
        strangers = [socket.create_connection(("127.0.0.1", hello["port"])) for _ in range(100)]
        for n in range(1, 150):
            link.send("propose", n=n, ip="", next=["127.0.0.1", hello["port"], "rank 1 on node1"])
            said = await Puppet(link, member(1)).hears("ready")
            assert (said["n"], said["problem"]) == (n, "")
            await one.hears("propose")
        for stranger in strangers:
            stranger.close()


@asynchronous
async def test_reason_for_a_missing_leader_is_printed_and_in_the_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timing, "NOTICE_S", 0.05)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        at = taken.getsockname()[1]
        async with attending(member(1, left_s=1.0), port=lambda: at) as (one,):
            with pytest.raises(JoinError) as caught:
                await one.running
    (told,) = {*one.said}
    problem = told.removeprefix("still waiting: ")
    assert problem.startswith(f"127.0.0.1:{at} refuses the connection: the machine answers, but nothing listens on ")
    assert problem.endswith("A loopback address reaches only the machine itself")
    assert str(caught.value).startswith(f"rank 1 of 3 on node1 could not join within 1 s: {problem}. On all ranks, ")
    one.connection.problem = "rank 1 differs. Set the same."
    assert ": rank 1 differs. Set the same. On all ranks, MASTER_ADDR and " in str(one.connection._failure())


@pytest.mark.parametrize("wrong", [
    {"over": 1}, {"over": None}, {"n": "1"}, {"n": 1e999}, {"running": "no"}, {"job": ["x"]}, {"job": "../x"},
    {"token": 5}, {"at": ["127.0.0.1"]}, {"at": ["127.0.0.1", 70000]}, {"at": [["127.0.0.1"], 1]},
])
@asynchronous
async def test_greeting_that_no_leader_sends_is_not_followed(wrong: dict[str, Any]):
    """Any program may listen there. A member that trusted it would compare a number with a string, and crash."""
    right = {"over": "", "n": 2, "formed": 2, "running": True, "job": "job", "token": "t", "at": ["127.0.0.1", 4711]}
    async with fake_leader() as (port, links):
        for said, leads in ((right, True), ({**right, **wrong}, False)):
            asked = asyncio.create_task(who_leads("127.0.0.1", port(), answer={}))
            (await links.get()).send("leader", **said)
            assert (await asked is not None) == leads
