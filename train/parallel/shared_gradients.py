"""The exchange of gradients between two ranks of one host: through memory that they share, in place of gloo's TCP.

Its sums are gloo's to the bit, since a + b is b + a, and half of a number is exact: a run gives the same weights if its
two ranks are on one host or on two. With more ranks sums depend on their order, which is gloo's.

The ranks wait for each other at a local socket: it takes 4 µs, where gloo takes 40 µs, and the kernel closes it as a
process ends. Neither socket nor memory have a name in the file system, where they could be left.
"""

import contextlib
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.profiler import record_function

from rankup import Group

PART = 2**18  # numbers that are exchanged at a time: a megabyte, which stays in the caches
BYTES = 2 * 2 * PART * torch.float32.itemsize
CONNECT_S = 10.0  # rank 0 listens already, and the kernel completes a connection by itself
CREDENTIALS = struct.Struct("3i")  # what the kernel says of a local socket's other end: process, user, group


class SharedGradients:
    """For each rank two parts of shared memory, which take turns: a rank writes into one while the other rank may still
    read what it wrote before into the other. `waited_s`: for the other rank, so far."""

    def __init__(self, peer: socket.socket, file: int, rank: int) -> None:
        self.peer, self.rank, self.turn, self.waited_s = peer, rank, 0, 0.0
        peer.settimeout(None)
        # DataLoader workers are forked, and a connection ends only when its last holder has closed it
        os.register_at_fork(after_in_child=peer.close)
        memory = mmap.mmap(file, BYTES)
        os.close(file)
        self.parts = torch.frombuffer(memory, dtype=torch.float32).view(2, 2, PART)  # [turn, rank, number]

    def meet(self) -> None:
        """Wait until the other rank has called this too. Raises DistNetworkError where it has ended."""
        began_s = time.perf_counter()
        with _lost_peer(), record_function("c10d::shared"):  # a name that the profiler takes for communication
            self.peer.send(b"!")
            if not self.peer.recv(1):
                raise ConnectionResetError("closed by peer")
        self.waited_s += time.perf_counter() - began_s


def average(
    shared: SharedGradients, bucket: dist.GradBucket  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """DDP's communication hook: the mean of both ranks' gradients, in place."""
    gradients = bucket.buffer()
    if gradients.dtype != torch.float32:
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]
    for part in gradients.split(PART):
        shared.turn = 1 - shared.turn
        own, other = (shared.parts[shared.turn, rank, : len(part)] for rank in (shared.rank, 1 - shared.rank))
        torch.mul(part, 0.5, out=own)
        shared.meet()  # both have written theirs
        torch.add(own, other, out=part)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(gradients)
    return done


def share_gradients(group: Group) -> SharedGradients | None:
    """Between the two ranks of a group, which both call this. None on both where they are on two hosts, or in
    containers that share no network."""
    with _local_socket() as listener:
        # An abstract address, which nobody guesses: only a rank that shares the network's interfaces reaches it
        address = f"\0rankup-{secrets.token_hex(16)}"
        if group.is_rank0:
            listener.bind(address)
            listener.listen()
        address = group.broadcast(address)
        peer = None if group.is_rank0 else _reach(address)
        if not any(group.gather(peer is not None)):
            return None
        with _lost_peer():
            if peer is not None:
                _, files, _, _ = socket.recv_fds(peer, 1, 1)
                if not files:
                    raise ConnectionResetError("closed by peer")
                return SharedGradients(peer, files[0], group.rank)
            while not _of_this_user(other := listener.accept()[0]):
                other.close()  # the kernel shows addresses to everybody on this host
            file = os.memfd_create("rankup")
            os.ftruncate(file, BYTES)
            socket.send_fds(other, [b"!"], [file])
            return SharedGradients(other, file, group.rank)


def _reach(address: str) -> socket.socket | None:
    """None where that rank is on another host, or another user's."""
    peer = _local_socket()
    with contextlib.suppress(OSError):
        peer.connect(address)
        if _of_this_user(peer):
            return peer
    peer.close()
    return None


def _local_socket() -> socket.socket:
    """One that keeps messages apart: what is sent at once is received at once."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    found.settimeout(CONNECT_S)
    return found


def _of_this_user(peer: socket.socket) -> bool:
    user: int = CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))[1]
    return user == os.geteuid()


@contextlib.contextmanager
def _lost_peer() -> Iterator[None]:
    """Raise as torch's collectives do where a rank has ended: who explains the end looks for that."""
    try:
        yield
    except OSError as error:
        raise dist.DistNetworkError(f"lost a rank of this host: {error}") from None
