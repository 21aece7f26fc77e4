"""The local socket between an agent and its ranks: who may connect, and what goes over it."""

import asyncio
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from rankup.agent.protocol import Links
from rankup.group.line import AgentLine
from rankup.group.stop import StopRequest

Heard = list[tuple[int, Mapping[str, Any]]]


def run(scene: Callable[[Links, Heard], Awaitable[None]]) -> None:
    """The scene beside an agent's links that listen, and what was heard over them."""

    async def whole() -> None:
        heard: Heard = []
        agents = Links(lambda rank, message: heard.append((rank, message)))
        await agents.open()
        try:
            async with asyncio.timeout(30):
                await scene(agents, heard)
        finally:
            agents.close()

    asyncio.run(whole())


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def line_of(agents: Links, local_rank: int) -> AgentLine:
    return AgentLine({"socket": agents.address, "local_rank": local_rank}, local_rank, StopRequest())


def hang_up(line: AgentLine) -> None:
    """As the end of a rank's process does."""
    asyncio.get_running_loop().remove_reader(line._socket)
    with contextlib.suppress(OSError):
        line._socket.shutdown(socket.SHUT_RDWR)
    line._socket.close()


@pytest.mark.parametrize("sent", [b"no json\n", b"[]\n", b'{"is": "rank"}\n', b'{"is": "rank", "local_rank": "x"}\n'])
def test_who_sends_something_else_is_disconnected(sent: bytes) -> None:
    async def scene(agents: Links, heard: Heard) -> None:
        reader, writer = await asyncio.open_unix_connection(agents.address)
        writer.write(sent)
        assert await reader.read() == b""
        writer.close()
        assert heard == []

    run(scene)


def test_another_user_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(agents: Links, heard: Heard) -> None:
        reader, writer = await asyncio.open_unix_connection(agents.address)
        writer.write(b'{"is": "rank", "local_rank": 0}\n{"is": "stop", "signal": "SIGTERM"}\n')
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        assert heard == []

    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    run(scene)


def test_an_agent_that_reads_nothing_does_not_keep_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankup.timing.SAY_S", 0.2)
    name = f"\0rankup-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen(1)
        line = AgentLine({"socket": name, "local_rank": 0}, 0, StopRequest())
        filler = threading.Thread(target=lambda: line.say("end", cause="x" * 10_000_000), daemon=True)
        filler.start()  # it fills the socket, and waits
        while line._lock.acquire(blocking=False):
            line._lock.release()
            time.sleep(0.01)
        assert not line.say("end", cause=json.dumps(1))
        line._socket.shutdown(socket.SHUT_RDWR)
        line._socket.close()
        filler.join(30)
        assert not filler.is_alive()


def test_a_rank_whose_agent_has_gone_says_so() -> None:
    async def scene(agents: Links, heard: Heard) -> None:
        line = line_of(agents, 0)
        line.say("ask")
        await until(lambda: heard)
        for link in agents._links.values():
            link.close()
        await until(lambda: not agents._links)
        await until(lambda: not line.say("ask"))
        hang_up(line)

    run(scene)
