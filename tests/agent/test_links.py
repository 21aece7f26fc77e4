"""The local socket between an agent and its ranks: which processes may connect, and the messages."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Mapping
from typing import Any

import pytest

from rankup.agent.protocol import AgentLine, Links


@pytest.mark.parametrize(("user", "sent"), [
    (0, b"no json\n"), (0, b"[]\n"), (0, b'{"is": "rank", "local_rank": "x"}\n'),
    (1, b'{"is": "rank", "local_rank": 0}\n{"is": "stop", "signal": "SIGTERM"}\n'),
], ids=["text", "list", "number", "another-user"])
def test_other_users_and_garbage_are_disconnected_unheard(
    user: int, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        heard: list[tuple[int, Mapping[str, Any]]] = []
        agents = Links(lambda rank, message: heard.append((rank, message)))
        await agents.open()
        reader, writer = await asyncio.open_unix_connection(agents.address)
        writer.write(sent)
        async with asyncio.timeout(30):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()
        agents.close()
        assert heard == []

    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + user)
    asyncio.run(scene())


def test_rank_that_connects_after_a_loss_hears_of_it() -> None:
    async def scene() -> None:
        links = Links(lambda rank, message: None)
        await links.open()
        links.tell("lost", n=1, ranks=[1], host="here", why="it ended", code=171)
        heard: list[Mapping[str, Any]] = []
        line = AgentLine({"socket": links.address, "local_rank": 0}, heard.append)
        async with asyncio.timeout(30):
            assert await asyncio.to_thread(line.receive)
        assert [(each["ranks"], each["code"], each["why"]) for each in heard] == [([1], 171, "it ended")]
        line._socket.close()
        links.close()

    asyncio.run(scene())


def test_agent_that_does_not_read_does_not_block_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankup.timing.SAY_S", 0.2)
    name = f"\0rankup-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen(1)
        line = AgentLine({"socket": name, "local_rank": 0}, [].append)
        assert not line.send("end", why="x" * 10_000_000)  # this message fills the socket
        assert not line.send("end", why="short")
        line._socket.close()
