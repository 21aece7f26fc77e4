"""A short way between ranks of one host: a local socket from each to each, and memory that they share.

gloo sends the smallest message over TCP and through a thread of its own: 40 µs, and 0.2 ms on average where the ranks
leave no core idle. Over these sockets it takes 4 µs.

They are sockets and not a flag in the shared memory, which ranks would look at until it changes. A rank that waits for
a socket leaves its core to the others. And the kernel closes the sockets of a process as it ends, so that the ranks
that wait for it notice at once.

Neither sockets nor memory have a name in the file system: nothing is left of them, however a rank ends.
"""

import contextlib
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.profiler import record_function

from rankup.timing import LOCAL_CONNECT_S

MOST_RANKS = 16  # each sends to each: with more ranks gloo's ring is the shorter way
INT = struct.Struct("i")
CREDENTIALS = struct.Struct("3i")  # what the kernel says of a local socket's other end: process, user, group


class HostLink:
    """The connections of this rank to all others, which are on this host. Every method is called by all ranks.

    All raise torch's DistNetworkError once another rank has ended, as gloo's collectives do.
    """

    def __init__(self, rank: int, sockets: dict[int, socket.socket]) -> None:
        """`sockets`: the connection to each other rank."""
        self.rank, self._sockets = rank, sockets
        self.waited_s = 0.0  # in `max`, for who counts what a step waits for others
        # DataLoader workers are forked, and a connection ends only when its last holder has closed it
        os.register_at_fork(after_in_child=self._close)

    def max(self, value: int) -> int:
        """The largest `value` of all ranks, an int32. No rank returns before all have called it."""
        message, began_s = INT.pack(value), time.perf_counter()
        with lost_peer(), record_function("c10d::host_link"):  # a name that the profiler takes for communication
            for peer in self._sockets.values():
                peer.send(message)
            for peer in self._sockets.values():
                value = max(value, INT.unpack(_received(peer))[0])
        self.waited_s += time.perf_counter() - began_s
        return value

    def share_memory(self, num_bytes: int) -> mmap.mmap:
        """Memory of that size, zeros, that all ranks read and write. It does not count as a file in /dev/shm."""
        with lost_peer():
            if self.rank == 0:
                file = os.memfd_create("rankup")
                os.ftruncate(file, num_bytes)
                for peer in self._sockets.values():
                    socket.send_fds(peer, [b"!"], [file])
            else:
                _, files, _, _ = socket.recv_fds(self._sockets[0], 1, 1)
                if not files:
                    raise ConnectionResetError("closed by peer")
                file = files[0]
        try:
            return mmap.mmap(file, num_bytes)
        finally:
            os.close(file)

    def _close(self) -> None:
        for peer in self._sockets.values():
            peer.close()


def open_link(rank: int, world_size: int, *, gather: Callable[[Any], list[Any]]) -> HostLink | None:
    """The link between all ranks, or None on all of them where it can't be had: they are on several hosts, in
    containers that share no network, or too many. `gather`: every rank's value, in the order of the ranks.

    Raises DistNetworkError where a rank is lost meanwhile.
    """
    if world_size > MOST_RANKS or not hasattr(os, "memfd_create"):  # Linux has it
        return None
    # An abstract address: the ranks reach it that share the network's interfaces. Nobody guesses it, so that it is
    # never that of a rank on another host.
    name = f"\0rankup-{secrets.token_hex(16)}"
    sockets: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as unless_linked, _local_socket() as listener:
        listener.bind(name)
        listener.listen(world_size)
        names = gather(name)
        with contextlib.suppress(OSError):  # no such address here: that rank is on another host
            for other in range(rank):
                peer = unless_linked.enter_context(_local_socket())
                peer.connect(names[other])
                peer.send(INT.pack(rank))
                if _of_this_user(peer):
                    sockets[other] = peer
        if not all(gather(len(sockets) == rank)):
            return None
        with lost_peer():
            while len(sockets) < world_size - 1:
                peer, _ = listener.accept()
                peer.settimeout(LOCAL_CONNECT_S)
                if _of_this_user(peer):
                    sockets[INT.unpack(_received(peer))[0]] = unless_linked.enter_context(peer)
                else:  # the kernel shows the addresses to everybody on this host
                    peer.close()
        unless_linked.pop_all()
    for peer in sockets.values():
        peer.settimeout(None)
    return HostLink(rank, sockets)


def _local_socket() -> socket.socket:
    """One that keeps messages apart: what is sent at once is received at once."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    found.settimeout(LOCAL_CONNECT_S)
    return found


def _of_this_user(peer: socket.socket) -> bool:
    """Whether the other end is a process of this user. Both ends see the other in the same way."""
    user: int = CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))[1]
    return user == os.geteuid()


def _received(peer: socket.socket) -> bytes:
    """An int's bytes, from the other end. Raises OSError where that has ended."""
    data = peer.recv(INT.size)
    if not data:
        raise ConnectionResetError("closed by peer")
    return data


@contextlib.contextmanager
def lost_peer() -> Iterator[None]:
    """Raise as torch's collectives do where a rank has ended: who explains the end looks for that."""
    try:
        yield
    except OSError as error:
        raise dist.DistNetworkError(f"lost a rank of this host: {error}") from None
