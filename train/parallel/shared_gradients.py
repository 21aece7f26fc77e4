"""The exchange of gradients between two ranks of one host: through memory that they share, in place of gloo's TCP.

Its sums are gloo's to the bit, since a + b is b + a, and half of a number is exact. So a run gives the same weights
whether its two ranks are on one host or on two. With more ranks sums depend on the order, and gloo's changes with the
place of a number in its bucket: those are left to gloo.
"""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from rankup.group.host_link import HostLink

PART = 2**18  # numbers that are exchanged at a time: a megabyte, which stays in the caches


class SharedGradients:
    """What the hook works with: for each rank two parts of shared memory, which take turns.

    A rank writes into one while the other rank may still read what it wrote before into the other. It writes into the
    same one again after a message that the other rank sends once it has read it.
    """

    def __init__(self, link: HostLink, rank: int) -> None:
        """Both ranks call this."""
        self.link, self.rank, self.turn = link, rank, 0
        memory = link.share_memory(2 * 2 * PART * torch.float32.itemsize)
        self.parts = torch.frombuffer(memory, dtype=torch.float32).view(2, 2, PART)  # [turn, rank, number]


def average(
    shared: SharedGradients, bucket: dist.GradBucket  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """DDP's communication hook: the mean of both ranks' gradients, in place.

    Raises DistNetworkError where the other rank has ended.
    """
    gradients = bucket.buffer()
    if gradients.dtype != torch.float32:
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]
    for part in gradients.split(PART):
        shared.turn = 1 - shared.turn
        own, other = (shared.parts[shared.turn, rank, : len(part)] for rank in (shared.rank, 1 - shared.rank))
        torch.mul(part, 0.5, out=own)
        shared.link.max(0)  # both have written theirs
        torch.add(own, other, out=part)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(gradients)
    return done
