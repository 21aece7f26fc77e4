"""A message between two ranks, there and back: bench and the doctor measure links with it, over torch or a socket.

Half of a round trip stands for one way: no clock of two machines is exact enough to time one way alone.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Peer(NamedTuple):
    """The other end of a connection. `send` takes a tensor of any dtype; `receive` fills one with what was sent."""

    send: Callable[[torch.Tensor], Any]
    receive: Callable[[torch.Tensor], Any]


def torch_peer(rank: int) -> Peer:
    """Another rank of the process group. The backend is the one that the group has for the message's device."""
    return Peer(partial(dist.send, dst=rank), partial(dist.recv, src=rank))


def ping_pong(peer: Peer, message: torch.Tensor, *, first: bool) -> None:
    """One round trip. The end with `first` sends `message` and gets it back in place; the other end echoes it."""
    if first:
        peer.send(message)
    peer.receive(message)
    if not first:
        peer.send(message)


def best_round_trip_s(peer: Peer, message: torch.Tensor, *, first: bool, count: int) -> float:
    """Seconds of the fastest of `count` round trips: what else uses the machine only makes one slower, never faster."""
    best_s = float("inf")
    for _ in range(count):
        began_s = time.perf_counter()
        ping_pong(peer, message, first=first)
        wait_for_device(message.device)
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s


def wait_for_device(device: torch.device) -> None:
    """Wait until an accelerator has done what it was given: calls only queue work there, and return at once."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
