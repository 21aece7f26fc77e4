"""The lines between an agent and its ranks: a pair of sockets for each rank. Imports no torch.

| from a rank                            | from its agent                              |
|----------------------------------------|---------------------------------------------|
| end: an End, just before the rank ends | lost(n, ranks, host, why), gone             |
| stop(signal): the rank got a signal    | ranks(ranks): where each rank of the job is |
| ask: where is each rank of the job?    |                                             |
"""

import asyncio
import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from rankup.agent.network import LONGEST, Link, encode
from rankup.agent.protocol import MEMBERS
from rankup.agent.record import NAME
from rankup.timing import SAY_S

T = TypeVar("T")


class Links(Generic[T]):
    """An agent's lines to its ranks, if their script imports rankup."""

    def __init__(self, on_message: Callable[[T, Mapping[str, Any]], None]) -> None:
        """`on_message`: receives each message of a rank, with the rank."""
        self._on_message = on_message
        self._tasks = dict[asyncio.Task[None], Link | None]()
        self._lost = b""  # the message for lines that open after the membership was lost

    def begin(self) -> None:
        """A new membership begins, and lines that opened before are no longer heard."""
        self.close()
        self._lost = b""

    def open(self, rank: T) -> socket.socket:
        """Open a line to `rank`, and return the rank's end, which the caller closes."""
        ours, theirs = socket.socketpair()
        task = asyncio.create_task(self._serve(rank, ours))
        task.add_done_callback(lambda _: ours.close())  # it may be cancelled before it has begun
        self._tasks[task] = None
        return theirs

    async def _serve(self, rank: T, sock: socket.socket) -> None:
        task, link = asyncio.current_task(), Link(*await asyncio.open_unix_connection(sock=sock, limit=LONGEST))
        assert task is not None
        self._tasks[task] = link
        try:
            link.write(self._lost)
            while True:
                self._on_message(rank, await link.receive(MEMBERS))
        except (ConnectionError, ValueError):
            pass  # the rank has ended
        finally:
            link.close(at_once=True)
            self._tasks.pop(task, None)

    async def catch_up(self) -> None:
        """Read the last messages of ranks that have ended. After a stall of this process, the exit codes may arrive
        before them, because it takes several turns of the event loop to read a message."""
        for _ in range(10):
            await asyncio.sleep(0)

    def tell(self, kind: str, **values: Any) -> None:
        """Send a message to all ranks."""
        data = encode(kind, **values)
        if kind in ("lost", "gone"):
            self._lost = data
        for link in filter(None, self._tasks.values()):
            link.write(data)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks = {}


class AgentLine:
    """A rank's connection to its agent. Call `receive` whenever `fileno` is readable; it passes each message to
    `on_message`."""

    def __init__(self, sock: socket.socket, on_message: Callable[[Mapping[str, Any]], None]) -> None:
        self._on_message, self._socket = on_message, sock
        self._socket.settimeout(SAY_S)  # an agent that was stopped (SIGSTOP) reads nothing
        self._lock, self._begun = threading.Lock(), b""  # `_begun`: the beginning of an incomplete message
        self.fileno = self._socket.fileno()

    @classmethod
    def of(cls, agent: Mapping[str, Any], on_message: Callable[[Mapping[str, Any]], None]) -> "AgentLine":
        """Return the line of a rank of `rankup launch`. `agent`: the content of RANKUP_AGENT. Raises OSError in a
        process that such a rank has started: there the same number may be another file."""
        if f"memfd:{NAME}" not in os.readlink(agent["record"]):
            raise FileNotFoundError(agent["record"])
        return cls(socket.socket(fileno=os.dup(agent["line"])), on_message)

    def receive(self) -> bool:
        """Read the messages that have come. Returns False if no more will come."""
        try:
            data = self._socket.recv(1 << 16)
            *whole, self._begun = (self._begun + data).split(b"\n")
            for line in whole:
                self._on_message(json.loads(line))
        except (OSError, ValueError):
            return False
        return bool(data)

    def send(self, kind: str, **values: Any) -> bool:
        """Send a message to the agent, from any thread. Raises nothing. Returns False if the agent can't be reached."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(encode(kind, **values))
            return True
        return False

    def close(self) -> None:
        """Close after the agent has read all messages. Otherwise the agent might notice the end of this process first.
        Waits SAY_S at most, and again after each message that comes meanwhile. Raises OSError if the agent is gone."""
        self._socket.shutdown(socket.SHUT_WR)
        while self.receive():
            pass


def tell_agent(agent: Mapping[str, Any], end: Mapping[str, Any]) -> None:
    """Tell the agent how this rank ends. `agent`: see `AgentLine.of`. `end`: see `End.entry`."""
    with contextlib.suppress(OSError):
        line = AgentLine.of(agent, lambda message: None)
        with line._socket:
            line.send("end", **end)
            line.close()
