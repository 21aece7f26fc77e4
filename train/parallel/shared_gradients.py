"""Exchange gradients between two ranks of one host through shared memory instead of gloo's TCP.

The sums equal gloo's bit for bit, because a + b is b + a, and halving a number is exact: two ranks give the same
weights on one host and on two hosts. With more ranks the sums depend on gloo's order.

The ranks wait for each other at pipes. This takes 4 µs, gloo takes 40 µs, and the kernel closes a pipe when its process
ends. Neither pipes nor memory have names in the file system, so none can be left behind. Each rank opens those of the
other rank through /proc, which keeps other users out.
"""

import contextlib
import mmap
import os
import secrets
import time
from io import FileIO

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.profiler import record_function

from rankup import Group

PART = 2**18  # numbers per exchange: 1 MiB, which fits into the CPU's caches
BYTES = 2 * PART * torch.float32.itemsize


class SharedGradients:
    """Memory shared by two ranks. Each rank owns two parts, and writes to them in turn: while it fills one, the other
    rank may still read its previous part. `waited_s`: how long this rank has waited for the other rank."""

    def __init__(self, group: Group, *, own: int, other: int, signals: int, peer: int) -> None:
        """File descriptors. `own`, `other`: the memory of this rank and of the other rank. `signals`: the pipe that
        this rank reads. `peer`: the pipe that the other rank reads."""
        self.own, self.other = _mapped(own), _mapped(other)
        self.signals, self.peer = signals, FileIO(peer, "w")
        self.turn, self.waited_s, self._record = 0, 0.0, group.record
        # A pipe ends when its last writer has closed it, so forked DataLoader workers close it. They close the FileIO,
        # not its number: FileIO closes once, and in a worker's children the number may belong to another file
        os.register_at_fork(after_in_child=self.peer.close)

    def meet(self) -> None:
        """Wait until the other rank calls this too. If it has ended, raise DistNetworkError, as torch's collectives
        do: rankup recognises a lost peer by this error."""
        began_s, self._record.waiting = time.perf_counter(), True
        try:
            with record_function("c10d::shared"):  # torch's profiler counts this name as communication
                self.peer.write(b"!")
                if not os.read(self.signals, 1):
                    raise ConnectionResetError("closed by peer")
        except OSError as error:
            raise dist.DistNetworkError(f"lost a rank of this host: {error}") from None
        self._record.waiting = False
        self.waited_s += time.perf_counter() - began_s


def _mapped(file: int) -> torch.Tensor:
    """Map the file `file` as float32 [turn, number], and close the descriptor."""
    memory = mmap.mmap(file, BYTES)
    os.close(file)
    return torch.frombuffer(memory, dtype=torch.float32).view(2, PART)


def average(
    shared: SharedGradients, bucket: dist.GradBucket  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average both ranks' gradients in place. This is DDP's communication hook."""
    gradients = bucket.buffer()
    if gradients.dtype != torch.float32:
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]
    for part in gradients.split(PART):
        shared.turn = 1 - shared.turn
        own, other = (parts[shared.turn, : len(part)] for parts in (shared.own, shared.other))
        torch.mul(part, 0.5, out=own)
        shared.meet()  # now both ranks have written their part
        torch.add(own, other, out=part)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(gradients)
    return done


def share_gradients(group: Group) -> SharedGradients | None:
    """Open the shared memory of a group of two ranks, which both call this. Return None on both if they are on two
    hosts, belong to two users, or run in containers that do not see each other's processes."""
    own, (signals, writer) = os.memfd_create(f"rankup-{secrets.token_hex(16)}"), os.pipe()
    os.ftruncate(own, BYTES)
    mine = [os.getpid(), own, writer, os.readlink(f"/proc/self/fd/{own}")]
    pid, memory, pipe, name = group.gather(mine)[1 - group.rank]
    opened: list[int] = []
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/{pid}/fd/{memory}") == name:  # else the peer is elsewhere, and `pid` another process
            opened += [os.open(f"/proc/{pid}/fd/{memory}", os.O_RDWR), os.open(f"/proc/{pid}/fd/{pipe}", os.O_WRONLY)]
    if not all(group.gather(bool(opened))):
        for file in (own, signals, writer, *opened):
            os.close(file)
        return None
    os.close(writer)  # only the other rank keeps it open now: this rank sees the end of the pipe when that rank ends
    return SharedGradients(group, own=own, other=opened[0], signals=signals, peer=opened[1])
