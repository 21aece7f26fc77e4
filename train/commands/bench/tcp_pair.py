"""A plain TCP connection between rank 0 and the last rank: what the wire carries without torch, beside what torch makes of it."""

import contextlib
import os
import socket
from collections.abc import Iterator

from train.group.group import Group
from train.group.network import address_of, address_of_host_name

CONNECT_S = 10.0
CHUNK = 2**20


class Line:
    """One end of the connection; on the ranks between there is none. Whoever holds a message has it as bytes."""

    def __init__(self, group: Group, connection: socket.socket | None) -> None:
        self.group, self.connection = group, connection

    def back_and_forth(self, message: bytearray) -> None:
        """Rank 0's `message` to the last rank and back, in place. Raises RuntimeError where the other end is gone, in words that
        the group takes for a lost peer."""
        if self.connection is None:
            return
        try:
            if self.group.rank == 0:
                self.connection.sendall(message)
            _receive(self.connection, message)
            if self.group.rank != 0:
                self.connection.sendall(message)
        except OSError as error:
            raise RuntimeError(f"plain connection closed by peer: {error}") from error


@contextlib.contextmanager
def plain_line(group: Group, timeout_s: float) -> Iterator[Line | str]:
    """The connection, on the interface that gloo takes; or why there is none. Collective: every rank calls it.

    `timeout_s`: of one send or receive.
    """
    with contextlib.ExitStack() as stack:
        listener, connection, problem = None, None, ""
        if group.rank == 0:
            try:
                interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
                ip = address_of(interface) if interface else address_of_host_name()
                listener = stack.enter_context(socket.create_server((ip, 0), family=_family(ip)))
                listener.settimeout(CONNECT_S)
            except OSError as error:
                problem = f"rank 0 can't listen: {error}"
        door = group.broadcast(listener.getsockname()[:2] if listener else None)
        try:
            if door and group.rank == group.world_size - 1:
                connection = stack.enter_context(socket.create_connection(door, timeout=CONNECT_S))
            elif listener is not None:
                connection = stack.enter_context(listener.accept()[0])
        except OSError as error:
            problem = f"rank {group.rank} on {group.log.host}: {error}"
        if connection is not None:
            connection.settimeout(timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield next(filter(None, group.gather(problem)), "") or Line(group, connection)


def _family(ip: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in ip else socket.AF_INET


def _receive(connection: socket.socket, message: bytearray) -> None:
    view, done = memoryview(message), 0
    while done < len(message):
        got = connection.recv_into(view[done : done + CHUNK])
        if not got:
            raise ConnectionResetError("the other end is gone")
        done += got
