"""A plain TCP connection between rank 0 and the last rank: what the network carries without torch."""

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from train.commands.ping_pong import Peer
from train.group.group import Group
from train.group.network import address_of, address_of_host_name

CONNECT_S = 10.0
TOKEN_S = 1.0  # of one who has connected, and may say nothing
CHUNK = 2**20  # bytes of one recv: larger ones made no difference


@contextlib.contextmanager
def tcp_pair(group: Group, timeout_s: float) -> Iterator[tuple[Peer | None, str]]:
    """This rank's end of the connection, and the problem if there is no connection. Collective: every rank calls it.

    The connection uses the interface that gloo uses. Ranks between the first and the last have no end of it.
    `timeout_s`: of one send or receive. Messages are tensors in host memory. The last rank shows a token that only the
    group knows: whoever scans the port at that moment must not be measured in its place.
    """
    with contextlib.ExitStack() as stack:
        listener, connection, problem = None, None, ""
        if group.rank == 0:
            try:
                interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
                ip = address_of(interface) if interface else address_of_host_name()
                family = socket.AF_INET6 if ":" in ip else socket.AF_INET
                listener = stack.enter_context(socket.create_server((ip, 0), family=family))
            except OSError as error:
                problem = f"rank 0 can't listen: {error}"
        own = (listener.getsockname()[:2], secrets.token_hex(16)) if listener else (None, "")
        endpoint, token = group.broadcast(own)
        try:
            if endpoint and group.rank == group.world_size - 1:
                connection = stack.enter_context(socket.create_connection(endpoint, timeout=CONNECT_S))
                connection.sendall(token.encode())
            elif listener is not None:
                connection = stack.enter_context(_accept(listener, token.encode()))
        except OSError as error:
            problem = f"rank {group.rank} on {group.log.host}: {error}"
        if connection is not None:
            connection.settimeout(timeout_s)
            # Otherwise the kernel holds small messages back, to send several of them in one packet
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        problem = next(filter(None, group.gather(problem)), "")  # all ranks must decide alike whether to use it
        yield _peer(connection) if connection is not None and not problem else None, problem


def _accept(listener: socket.socket, token: bytes) -> socket.socket:
    """The first connection that shows the token. Raises TimeoutError."""
    until_s = time.monotonic() + CONNECT_S
    while (left_s := until_s - time.monotonic()) > 0:
        listener.settimeout(left_s)
        connection = listener.accept()[0]
        connection.settimeout(min(left_s, TOKEN_S))
        with contextlib.suppress(OSError):
            if connection.recv(len(token), socket.MSG_WAITALL) == token:
                return connection
        connection.close()
    raise TimeoutError("the other rank did not connect")


def _peer(connection: socket.socket) -> Peer:
    def exchange(how: Callable[[memoryview], None], message: torch.Tensor) -> None:
        try:
            how(message.numpy().data.cast("B"))  # the tensor's own memory: what is received arrives in the tensor
        except OSError as error:
            # In words by which the group recognises a lost peer
            raise RuntimeError(f"plain connection closed by peer: {error}") from error

    return Peer(partial(exchange, connection.sendall), partial(exchange, partial(_receive, connection)))


def _receive(connection: socket.socket, message: memoryview) -> None:
    done = 0
    while done < len(message):
        count = connection.recv_into(message[done : done + CHUNK])
        if not count:
            raise ConnectionResetError("the other end is gone")
        done += count
