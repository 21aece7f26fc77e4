"""What members of a job say to each other: one JSON object a line, over TCP. No torch here.

Nothing that arrives is unpickled or executed. Whoever sends something else is disconnected.
"""

import asyncio
import contextlib
import json
from typing import Any

# Of one message: the settings of a job are the longest, some kilobytes.
LONGEST = 1 << 20
CONNECT_S = 2.0  # for each try; a packet that is dropped is sent again after a second


class Link:
    """A connection to another member. All methods belong to the event loop's thread."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.local_ip: str = writer.get_extra_info("sockname")[0]
        self.remote_ip: str = writer.get_extra_info("peername")[0]

    @classmethod
    async def connect(cls, host: str, port: int) -> "Link":
        """Raises OSError (TimeoutError, gaierror, ConnectionRefusedError, ...) where nobody answers in CONNECT_S."""
        async with asyncio.timeout(CONNECT_S):
            link = cls(*await asyncio.open_connection(host, port, limit=LONGEST))
        sock = link._writer.get_extra_info("socket")
        if sock.getsockname() == sock.getpeername():
            # Nobody listens, and the system chose that very port for our side: TCP then connects to itself
            link.close()
            raise ConnectionRefusedError
        return link

    def send(self, kind: str, **values: Any) -> None:
        """Returns at once, and raises nothing: the end of the connection is found by who receives."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps({"is": kind, **values}).encode() + b"\n")

    async def receive(self) -> dict[str, Any]:
        """The next message. Raises ConnectionError where there will be none."""
        try:
            message = json.loads(await self._reader.readuntil())
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, OSError) as error:
            self.close()
            raise ConnectionError(f"{type(error).__name__}: {error}") from None
        if not isinstance(message, dict) or not isinstance(message.get("is"), str):
            self.close()
            raise ConnectionError("not a message of ours")
        return message

    def close(self) -> None:
        """Whatever was sent still goes out."""
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.close()
