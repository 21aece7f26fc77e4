"""The wire between ranks, measured: is a collective right, how fast is each link, which link and which rank is slowest?

Links between nodes are measured between their first ranks, one link a node at a time (the circle method of a tournament),
so that no two measurements share a node's cable; links inside a node the same way between its ranks.
"""

import statistics
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

PINGS = 20
PING_BYTES = 8
FIRST_BYTES = 64 * 2**10
MOST_BYTES = 8 * 2**20
AIM_S = 0.1  # one transfer, at most about this long
TRANSFERS = 3
MOST_ROUNDS = 16  # of a tournament: with more nodes than this each is measured with so many others


@dataclass(frozen=True, slots=True)
class Link:
    """One link, as the best of several tries shows it: what shares it for a moment is not the link's fault."""

    ranks: tuple[int, int]
    latency_s: float  # one way: half of a round trip of 8 bytes
    bandwidth: float  # bytes/s, one way
    between_nodes: bool


def check_collectives(rank: int, world_size: int, device: torch.device) -> list[str]:
    """What came out wrong of each collective that training uses, on this rank; empty where all is right. Whole numbers that
    every type holds exactly, so that equal means equal."""
    wrong = []
    for length in (1, 1000, 2**18 + 1):
        base = torch.arange(length, device=device, dtype=torch.float32) % 997
        summed = base + rank
        dist.all_reduce(summed)
        if not torch.equal(summed, base * world_size + world_size * (world_size - 1) / 2):
            wrong.append(f"all_reduce of {length} numbers")
        for source in {0, world_size - 1}:
            sent = base + rank
            dist.broadcast(sent, src=source)
            if not torch.equal(sent, base + source):
                wrong.append(f"broadcast of {length} numbers from rank {source}")
    parts = [torch.zeros(3, device=device) for _ in range(world_size)]
    dist.all_gather(parts, torch.full((3,), float(rank), device=device))
    if [part[0].item() for part in parts] != [float(r) for r in range(world_size)]:
        wrong.append("all_gather")
    return wrong


def rounds(members: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """A tournament by the circle method: in each round every member meets at most one other, at the end each met each.

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
    """Rounds of pairs of ranks, and whether they are between nodes, the same on every rank."""
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    firsts = [ranks[0] for ranks in nodes.values()]
    between = [(pairs, True) for pairs, _ in zip(rounds(firsts), range(MOST_ROUNDS), strict=False) if pairs]
    inside: list[list[tuple[int, int]]] = []
    for ranks in nodes.values():
        for number, (pairs, _) in enumerate(zip(rounds(ranks), range(MOST_ROUNDS), strict=False)):
            inside += [[]] * (number + 1 - len(inside))
            inside[number] = inside[number] + pairs
    return between + [(pairs, False) for pairs in inside if pairs]


def measure(rank: int, hosts: Sequence[str], device: torch.device, *, alive: Callable[[], None]) -> list[Link]:
    """The links in which this rank is the lower one. Collective: every rank calls it. `alive` is called between rounds."""
    found = []
    for pairs, between in plan(hosts):
        for low, high in pairs:
            if rank == low:
                found.append(Link((low, high), *_lead(high, device), between))
            elif rank == high:
                _follow(low, device)
        alive()
    return found


def _lead(peer: int, device: torch.device) -> tuple[float, float]:
    ping = torch.zeros(PING_BYTES, dtype=torch.uint8, device=device)
    best_s = min(_round_trip(ping, peer) for _ in range(PINGS))
    size = FIRST_BYTES
    first_s = _transfer(size, peer, device)
    size = int(min(MOST_BYTES, max(FIRST_BYTES, FIRST_BYTES * AIM_S / first_s)))
    taken_s = min(_transfer(size, peer, device) for _ in range(TRANSFERS))
    _announce(0, peer, device)
    return best_s / 2, size / max(taken_s - best_s / 2, 1e-9)


def _follow(peer: int, device: torch.device) -> None:
    ping = torch.zeros(PING_BYTES, dtype=torch.uint8, device=device)
    for _ in range(PINGS):
        dist.recv(ping, src=peer)
        dist.send(ping, dst=peer)
    while size := _announced(peer, device):
        dist.recv(torch.empty(size, dtype=torch.uint8, device=device), src=peer)
        dist.send(ping, dst=peer)


def _round_trip(ping: torch.Tensor, peer: int) -> float:
    began_s = time.monotonic()
    dist.send(ping, dst=peer)
    dist.recv(ping, src=peer)
    return _since(began_s, ping.device)


def _transfer(size: int, peer: int, device: torch.device) -> float:
    """Seconds for `size` bytes there and a sign that they came back."""
    block = torch.zeros(size, dtype=torch.uint8, device=device)
    _announce(size, peer, device)
    answer = torch.empty(PING_BYTES, dtype=torch.uint8, device=device)
    began_s = time.monotonic()
    dist.send(block, dst=peer)
    dist.recv(answer, src=peer)
    return _since(began_s, device)


def _announce(size: int, peer: int, device: torch.device) -> None:
    dist.send(torch.tensor(list(struct.pack("<q", size)), dtype=torch.uint8, device=device), dst=peer)


def _announced(peer: int, device: torch.device) -> int:
    told = torch.empty(8, dtype=torch.uint8, device=device)
    dist.recv(told, src=peer)
    return int(struct.unpack("<q", bytes(told.tolist()))[0])


def _since(began_s: float, device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.monotonic() - began_s


def compute_s(device: torch.device) -> float:
    """Seconds for a fixed piece of work, the best of many short tries: what other processes or a quota take of the CPU drops
    out, what a slow clock or another kind of CPU takes stays."""
    matrix = torch.ones(192, 192, device=device)
    best_s = float("inf")
    for _ in range(50):
        began_s = time.monotonic()
        for _ in range(4):
            matrix = matrix @ matrix * 1e-3
        best_s = min(best_s, _since(began_s, device))
    return best_s


def odd_ones(links: Sequence[Link], *, least: float, apart: float) -> list[Link]:
    """The links that are slow: below `least` bytes/s, or `apart` times slower than the median of their kind and below ten
    times `least`. Slowest first."""
    found = []
    for between in (True, False):
        kind = [link for link in links if link.between_nodes is between]
        if kind:
            median = statistics.median(link.bandwidth for link in kind)
            found += [k for k in kind if k.bandwidth < least or (k.bandwidth * apart < median and k.bandwidth < 10 * least)]
    return sorted(found, key=lambda link: link.bandwidth)
