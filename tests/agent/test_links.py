"""The lines between an agent and its ranks, and their messages."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Mapping
from typing import Any

import pytest

from rankup.agent.links import AgentLine, Links
from rankup.agent.record import Record
from tests.rigs.meeting_room import asynchronous


@pytest.mark.parametrize("sent", [b"no json\n", b"[]\n", b'{"is": "stop", "signal": "SIGKILL"}\n'])
@asynchronous
async def test_rank_that_sends_garbage_is_disconnected_unheard(sent: bytes) -> None:
    heard: list[tuple[int, Mapping[str, Any]]] = []
    links = Links[int](lambda rank, message: heard.append((rank, message)))
    reader, writer = await asyncio.open_unix_connection(sock=links.open(7))
    writer.write(b'{"is": "ask"}\n' + sent + b'{"is": "ask"}\n')
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()
    assert heard == [(7, {"is": "ask"})]


@asynchronous
async def test_rank_that_starts_after_a_loss_hears_of_it_but_not_of_the_last_membership() -> None:
    links, heard = Links[int](lambda rank, message: None), list[Mapping[str, Any]]()
    links.tell("lost", n=1, ranks=[0], host="here", why="it ended", code=1)
    links.begin()
    early = AgentLine(links.open(0), heard.append)
    await links.catch_up()
    links.tell("lost", n=2, ranks=[1], host="here", why="it ended", code=171)
    for line in (early, AgentLine(links.open(1), heard.append)):
        assert await asyncio.to_thread(line.receive)
        line._socket.close()
    assert [(each["n"], each["ranks"], each["code"]) for each in heard] == [(2, [1], 171)] * 2
    links.close()


def test_agent_that_does_not_read_does_not_block_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankup.agent.links.SAY_S", 0.2)
    ours, theirs = socket.socketpair()
    with ours:
        line = AgentLine(theirs, [].append)
        assert not line.send("end", why="x" * 10_000_000)  # this message fills the socket
        assert not line.send("end", why="short")
        line._socket.close()


def test_process_that_a_rank_has_started_does_not_take_another_file_for_the_line() -> None:
    """It inherits RANKUP_AGENT, but not the files that the variable names."""
    ours, theirs = socket.socketpair()
    record = Record.new()
    with ours, theirs, open(os.devnull) as other:
        agent = {"line": theirs.fileno(), "record": f"/proc/self/fd/{record.file}"}
        line = AgentLine.of(agent, [].append)
        assert line.send("ask")
        line._socket.close()
        with pytest.raises(FileNotFoundError):
            AgentLine.of({**agent, "record": f"/proc/self/fd/{other.fileno()}"}, [].append)
        assert ours.recv(100) == b'{"is": "ask"}\n'
