"""The local socket between an agent and its ranks that import rankup: one JSON object a line. No torch here.

| from a rank                                        | from the agent                                          |
|----------------------------------------------------|---------------------------------------------------------|
| rank(local_rank): its first message                | lost(n, ranks, host, why): the membership is over       |
| end: an End, as it is about to end                 | stop(signal): somebody asks the job to stop             |
|                                                    | ranks(ranks): where each rank of the job is             |
| stop(signal): it got a signal itself               |                                                         |
| ask: where is everybody?                           | leave: keep the last finished step, and leave           |
"""

import asyncio
import contextlib
import os
import secrets
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from rankup.agent.protocol import LONGEST, Link

CREDENTIALS = struct.Struct("3i")  # what the kernel says of the other end: process, user, group


class Links:
    """The agent's side. `address`: where its ranks connect."""

    def __init__(self, hear: Callable[[int, Mapping[str, Any]], None]) -> None:
        """`hear` gets the local rank and its message."""
        self._hear = hear
        self._links: dict[int, Link] = {}
        self.address = ""
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Begin to listen. Nobody guesses the name, and other users are turned away."""
        token = secrets.token_hex(16)
        # An abstract name leaves nothing in the file system, however the agent ends
        folder = "" if sys.platform.startswith("linux") else tempfile.mkdtemp(prefix="rankup-")
        self.address = f"@rankup-{token}" if not folder else f"{folder}/agent"
        self._server = await asyncio.start_unix_server(self._attend, path_of(self.address), limit=LONGEST)

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link, local_rank = Link(reader, writer), -1
        try:
            if not _of_this_user(writer.get_extra_info("socket")):
                return
            local_rank = int((await link.receive())["local_rank"])
            self._links[local_rank] = link
            while True:
                self._hear(local_rank, await link.receive())
        except (ConnectionError, LookupError, TypeError, ValueError):
            pass  # the rank's process has ended
        except asyncio.CancelledError:
            pass  # the event loop ends. Python 3.11 prints a traceback where this is passed on
        finally:
            link.close()
            if self._links.get(local_rank) is link:
                del self._links[local_rank]

    def tell(self, kind: str, *, local_rank: int | None = None, **values: Any) -> None:
        """Tell one rank, or all that are connected."""
        for rank, link in self._links.items():
            if local_rank in (None, rank):
                link.send(kind, **values)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self.address and not self.address.startswith("@"):
            with contextlib.suppress(OSError):
                os.unlink(self.address)
                os.rmdir(os.path.dirname(self.address))


def path_of(address: str) -> str:
    """As the system writes it: an abstract name begins with a zero byte."""
    return f"\0{address[1:]}" if address.startswith("@") else address


def _of_this_user(sock: socket.socket) -> bool:
    if not hasattr(socket, "SO_PEERCRED"):
        return True  # a folder of ours keeps others out
    user: int = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))[1]
    return user == os.geteuid()
