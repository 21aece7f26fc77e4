"""The links between the ranks: is a collective right, how fast is each link, which link and which rank is slowest?

Links between nodes are measured between the nodes' first ranks, and each node takes part in one measurement at a time:
the pairs follow the circle method of a tournament. So no two measurements share a node's cable. Links inside a node are
measured between its ranks in the same manner.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest

import torch
import torch.distributed as dist

from train.group.group import Group

PINGS, PING_BYTES = 20, 8  # latency: round trips of this size
FIRST_BYTES, MAX_BYTES, GROWTH = 64 * 2**10, 16 * 2**20, 4  # bandwidth: larger and larger messages,
LONG_S = 0.1  # while the next larger one is not expected to take longer than this
TRANSFERS = 3  # of each size
MAX_ROUNDS = 16  # of a tournament: with more nodes each is measured with this many others only


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """One link between two ranks: the best of several tries, as other traffic of a moment is not the link's fault."""

    ranks: tuple[int, int]
    latency_s: float  # one way: half of a round trip of 8 bytes
    bandwidth: float  # bytes/s, the mean of both directions
    between_nodes: bool


def check_collectives(group: Group) -> list[str]:
    """Each collective that training uses and that gave a wrong result on this rank; empty if all are right.

    The numbers are integers that float32 holds exactly, so that the results must be equal to the bit.
    """
    rank, world_size, device = group.rank, group.world_size, group.device
    wrong = []
    for length in (1, 1000, 2**18 + 1):
        base = torch.arange(length, device=device, dtype=torch.float32) % 997
        summed = base + rank
        group.collective(functools.partial(dist.all_reduce, summed))
        if not torch.equal(summed, base * world_size + world_size * (world_size - 1) / 2):
            wrong.append(f"all_reduce of {length} numbers")
        for source in {0, world_size - 1}:
            sent = base + rank
            group.collective(functools.partial(dist.broadcast, sent, src=source))
            if not torch.equal(sent, base + source):
                wrong.append(f"broadcast of {length} numbers from rank {source}")
    parts = [torch.zeros(3, device=device) for _ in range(world_size)]
    own = torch.full((3,), float(rank), device=device)
    group.collective(lambda: dist.all_gather(parts, own))
    if [part[0].item() for part in parts] != [float(r) for r in range(world_size)]:
        wrong.append("all_gather")
    return wrong


def rounds(members: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """A tournament by the circle method: each member meets one other a round, and each other once in the end.

    >>> list(rounds([0, 1, 2]))
    [[(1, 2)], [(0, 2)], [(0, 1)]]
    """
    circle: list[int | None] = [*members, *([None] if len(members) % 2 else [])]
    half = len(circle) // 2
    for _ in range(len(circle) - 1):
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def plan(hosts: Sequence[str]) -> list[tuple[list[tuple[int, int]], bool]]:
    """Rounds of pairs of ranks, and whether these are between nodes. The same on every rank. `hosts`: of each rank."""
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    firsts = [ranks[0] for ranks in nodes.values()]
    between = [(pairs, True) for pairs in islice(rounds(firsts), MAX_ROUNDS)]
    of_each_node = [islice(rounds(ranks), MAX_ROUNDS) for ranks in nodes.values()]
    inside = [(list(chain(*parts)), False) for parts in zip_longest(*of_each_node, fillvalue=[])]
    return [(pairs, is_between) for pairs, is_between in between + inside if pairs]


def measure_links(
    rank: int, hosts: Sequence[str], device: torch.device, *, after_round: Callable[[], None]
) -> list[LinkSpeed]:
    """The links whose lower rank this is. Collective: every rank calls it."""
    found = []
    for pairs, between in plan(hosts):
        for low, high in pairs:
            if rank == low:
                found.append(LinkSpeed((low, high), *_measure_link(high, device, first=True), between))
            elif rank == high:
                _measure_link(low, device, first=False)
        after_round()
    return found


def _measure_link(other: int, device: torch.device, *, first: bool) -> tuple[float, float]:
    """Latency in s and bandwidth in bytes/s. The rank with `first` decides when to stop: their times differ."""
    ping = torch.zeros(PING_BYTES, dtype=torch.uint8, device=device)
    ping_s = _best_round_trip_s(other, ping, first=first, count=PINGS)
    size = FIRST_BYTES
    while True:
        block = torch.zeros(size, dtype=torch.uint8, device=device)
        taken_s = _best_round_trip_s(other, block, first=first, count=TRANSFERS)
        larger = torch.tensor([size < MAX_BYTES and GROWTH * taken_s < LONG_S], dtype=torch.uint8, device=device)
        if first:
            dist.send(larger, other)
        else:
            dist.recv(larger, other)
        if not larger.item():
            return ping_s / 2, 2 * size / max(taken_s - ping_s, 1e-9)
        size *= GROWTH


def _best_round_trip_s(other: int, message: torch.Tensor, *, first: bool, count: int) -> float:
    """Seconds of the fastest of `count` round trips: what else uses the machine only makes one slower, never faster.

    The end with `first` sends `message` and gets it back in place; the other end echoes it. Half of a round trip
    stands for one way: no clock of two machines is exact enough to time one way alone.
    """
    best_s = float("inf")
    for _ in range(count):
        began_s = time.perf_counter()
        if first:
            dist.send(message, other)
        dist.recv(message, other)
        if not first:
            dist.send(message, other)
        _wait_for_device(message.device)
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s


def _wait_for_device(device: torch.device) -> None:
    """Wait until an accelerator has done what it was given: calls only queue work there, and return at once."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def compute_s(device: torch.device) -> float:
    """Seconds for a fixed piece of work: the best of many short tries.

    What other processes or a CPU limit take away for a moment drops out; a slow clock or another kind of CPU does not.
    """
    matrix = torch.ones(192, 192, device=device)
    best_s = float("inf")
    for _ in range(50):
        began_s = time.perf_counter()
        for _ in range(4):
            matrix = matrix @ matrix * 1e-3
        _wait_for_device(device)
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s


def slow_links(links: Sequence[LinkSpeed], *, least: float, apart: float) -> list[LinkSpeed]:
    """The links below `least` bytes/s, and those `apart` times slower than the median of their kind and below ten times
    `least`. Slowest first."""
    found = []
    for between in (True, False):
        kind = [link for link in links if link.between_nodes is between]
        if kind:
            median = statistics.median(link.bandwidth for link in kind)
            limit = max(least, min(median / apart, 10 * least))
            found += [link for link in kind if link.bandwidth < limit]
    return sorted(found, key=lambda link: link.bandwidth)
