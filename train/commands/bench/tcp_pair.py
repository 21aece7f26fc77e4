"""A plain TCP connection between rank 0 and the last rank: what the network carries without torch."""

import contextlib
import os
import socket
from collections.abc import Iterator

import torch

from train.group.group import Group
from train.group.network import address_of, address_of_host_name

CONNECT_S = 10.0
CHUNK = 2**20  # bytes of one recv: larger ones made no difference


class TcpPair:
    """One end of the connection, as `ping_pong` wants it. Messages are tensors in host memory.

    Both calls raise RuntimeError if the other end is gone, in words by which the group recognises a lost peer.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, message: torch.Tensor) -> None:
        """Send all of it; returns once the kernel has it."""
        with _lost_peer():
            self._connection.sendall(_bytes_of(message))

    def receive(self, message: torch.Tensor) -> None:
        """Fill `message` with what the other end sent."""
        with _lost_peer():
            _receive(self._connection, _bytes_of(message))


@contextlib.contextmanager
def tcp_pair(group: Group, timeout_s: float) -> Iterator[tuple[TcpPair | None, str]]:
    """This rank's end of the connection, and the problem if there is no connection. Collective: every rank calls it.

    The connection uses the interface that gloo uses. Ranks between the first and the last have no end of it.
    `timeout_s`: of one send or receive.
    """
    with contextlib.ExitStack() as stack:
        listener, connection, problem = None, None, ""
        if group.rank == 0:
            try:
                interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
                ip = address_of(interface) if interface else address_of_host_name()
                family = socket.AF_INET6 if ":" in ip else socket.AF_INET
                listener = stack.enter_context(socket.create_server((ip, 0), family=family))
                listener.settimeout(CONNECT_S)
            except OSError as error:
                problem = f"rank 0 can't listen: {error}"
        endpoint = group.broadcast(listener.getsockname()[:2] if listener else None)
        try:
            if endpoint and group.rank == group.world_size - 1:
                connection = stack.enter_context(socket.create_connection(endpoint, timeout=CONNECT_S))
            elif listener is not None:
                connection = stack.enter_context(listener.accept()[0])
        except OSError as error:
            problem = f"rank {group.rank} on {group.log.host}: {error}"
        if connection is not None:
            connection.settimeout(timeout_s)
            # Otherwise the kernel holds small messages back, to send several of them in one packet
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        problem = next(filter(None, group.gather(problem)), "")  # all ranks must decide alike whether to use it
        yield TcpPair(connection) if connection is not None and not problem else None, problem


@contextlib.contextmanager
def _lost_peer() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RuntimeError(f"plain connection closed by peer: {error}") from error


def _bytes_of(message: torch.Tensor) -> memoryview:
    """The tensor's own memory: what is received into it arrives in the tensor."""
    return message.numpy().data.cast("B")


def _receive(connection: socket.socket, message: memoryview) -> None:
    done = 0
    while done < len(message):
        count = connection.recv_into(message[done : done + CHUNK])
        if not count:
            raise ConnectionResetError("the other end is gone")
        done += count
