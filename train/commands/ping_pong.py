"""A message between two ranks, there and back: bench and the doctor measure links with it, over torch or a socket.

Half of a round trip stands for one way: no clock of two machines is exact enough to time one way alone.
"""

import time
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist


class Peer(Protocol):
    """The other end of a connection. Messages are tensors of any dtype."""

    def send(self, message: torch.Tensor) -> None: ...

    def receive(self, message: torch.Tensor) -> None:
        """Fill `message` with what the other end sent."""


@dataclass(frozen=True, slots=True)
class TorchPeer:
    """Another rank of the process group. The backend is the one that the group has for the message's device."""

    rank: int

    def send(self, message: torch.Tensor) -> None:
        dist.send(message, dst=self.rank)

    def receive(self, message: torch.Tensor) -> None:
        dist.recv(message, src=self.rank)


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
