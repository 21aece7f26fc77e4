"""Ships the parts of a copy to every node that needs them. This is the one way in which a copy gets into memory.

All ranks know what to ship, and each knows where its own node may have it. The ranks of a node share one memory, a file
without a name, which the kernel frees with the last process that has it open. Each of them reads and verifies some
pieces into it. A piece that a node lacks, or has otherwise than the copy, comes from a rank that has it, straight into
that memory, and goes on from there to the next node. A file that is in memory already, or on a disk of this machine, is
verified and used where it is.
"""

import contextlib
import hashlib
import mmap
import os
import weakref
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from rankup.agent.processes import cpu_quota
from rankup.places.files import is_local, open_regular
from rankup.state.copies import Part, write_at
from rankup.state.memory import is_held, node_id

THREADS = 8  # that read and verify in a rank, at most
Key = tuple[int, int]  # the number of a shipment, and of a piece of its part


@dataclass(frozen=True, slots=True)
class Shipment:
    """A part to ship. `to`: for each node that gets it, the ranks that share its memory, first those of a node that has
    the part whole; equal on all ranks. `paths`: where this rank may have it. `in_place`: use the file itself, although
    it is not in memory. `on_disk`: use it if it is on a disk of this machine and all ranks of the node can."""

    part: Part
    to: Sequence[Sequence[int]]
    paths: Sequence[Path] = ()
    in_place: bool = False
    on_disk: bool = False

    @property
    def held(self) -> Path | None:
        return next((path for path in self.paths
                     if self.in_place or is_held(path) or (self.on_disk and is_local(path))), None)


class InPlace:
    """A file that is used where it is. `path` leads to it even if it is moved or removed. `buffer`: its first `size`
    bytes. Raises OSError and ValueError if it can't be mapped."""

    def __init__(self, path: Path, size: int) -> None:
        with open_regular(path) as file:
            self.buffer = _mapped(file.fileno(), size, 0)
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)
        self.path, self._before = Path(f"/proc/self/fd/{self._file}"), self._stamp()

    def _stamp(self) -> tuple[int, int]:
        about = os.fstat(self._file)
        return about.st_size, about.st_mtime_ns

    @property
    def changed(self) -> bool:
        """Whether somebody has written to the file since."""
        return self._stamp() != self._before


class Memory:
    """Memory of a node for parts, as large as needed: nothing is used until it is written. `nodes`: the ranks that
    share each node's memory."""

    def __init__(self, group: Any, file: int, nodes: Sequence[Sequence[int]]) -> None:
        self._file, self.nodes = file, nodes
        self.own = next(ranks for ranks in nodes if group.rank in ranks)
        self._begins = dict[int, int]()

    @classmethod
    def shared(cls, group: Any) -> Self:
        """Return memory that the ranks of a node share, as far as they can. All ranks call this."""
        try:  # ranks in another namespace have other files under a path
            name = f"{node_id()} {[os.stat(f'/proc/self/ns/{kind}').st_ino for kind in ('pid', 'mnt')]}"
        except OSError:
            name = f"rank {group.rank}"
        nodes = defaultdict[str, list[int]](list)
        for rank, other in enumerate(group.gather(name)):
            nodes[other].append(rank)
        file = os.memfd_create("rankup-copy")
        path = group.gather(f"/proc/{os.getpid()}/fd/{file}")[nodes[name][0]]
        try:
            other = os.open(path, os.O_RDWR)
        except OSError:  # a system that lets no process open another's files
            other = -1
        if min(group.gather(other)) < 0:
            if other >= 0:
                os.close(other)
            return cls(group, file, [[rank] for rank in range(group.world_size)])
        os.close(file)
        return cls(group, other, [*nodes.values()])

    def lay_out(self, sizes: dict[int, int]) -> None:
        """Make room for parts of these sizes, by number. The ranks that share the memory name the same parts."""
        end = 0
        for number, size in sizes.items():
            self._begins[number], end = end, end + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(self._file, end)

    def put(self, number: int, at: int, content: memoryview) -> None:
        """Put bytes into a part. Through a mapping they would take a fifth more of a resume's CPU seconds: the kernel
        would fill each page with zeros first."""
        write_at(self._file, self._begins[number] + at, content)

    def part(self, number: int, size: int) -> Any:
        """Return a buffer with a part, whose changes no other rank sees."""
        return _mapped(self._file, size, self._begins[number])

    def close(self) -> None:
        """Free what no buffer refers to."""
        os.close(self._file)


class Shipping:
    """Ships the parts. All ranks make one with the same parts, and close `memory` later. `lacking`: for each rank and
    piece that it takes care of but does not have, the reason."""

    def __init__(self, group: Any, shipments: Sequence[Shipment], memory: Memory) -> None:
        self.group, self.shipments, self.memory = group, shipments, memory
        self.stops: dict[Key, list[int]] = {}  # for each piece, the rank of each node that takes care of it
        for n, one in enumerate(shipments):
            for piece in range(len(one.part.digests)):
                turn = len(self.stops)
                self.stops[n, piece] = [ranks[turn % len(ranks)] for ranks in one.to]
        self.mine = [n for n, one in enumerate(shipments) if any(group.rank in ranks for ranks in one.to)]
        held = {n: path for n in self.mine if (path := shipments[n].held) is not None}
        self.maps = dict[int, InPlace]()  # made before any exchange: afterwards another rank may move the files
        for n, path in held.items():
            # If it is missing or shorter, `_read` says so
            with contextlib.suppress(OSError, ValueError, OverflowError):
                self.maps[n] = InPlace(path, shipments[n].part.size)
        # The ranks of a node use the same file in place, or none
        named = group.gather([n for n in self.maps if not shipments[n].in_place])
        self.held = {
            n: self.maps[n].path if n in self.maps else path
            for n, path in held.items() if (one := shipments[n]).in_place
            or all(n in named[rank] for rank in next(ranks for ranks in one.to if group.rank in ranks))
        }
        here = {*memory.own}
        memory.lay_out({n: one.part.size for n, one in enumerate(shipments)
                        if not one.in_place and not all(here.isdisjoint(ranks) for ranks in one.to)})

    def result(self) -> tuple[dict[int, Any], dict[int, str]]:
        """Return the buffers that this rank gets, by number of the shipment; and why the first node of a shipment does
        not have the part whole, by number, equal on all ranks."""
        lacking = self._read()
        problems: dict[int, str] = {}
        for (n, piece, rank), why in sorted(lacking.items()):
            if rank == self.stops[n, piece][0]:
                problems.setdefault(n, why)
        if lacking := {key: why for key, why in lacking.items() if key[0] not in problems}:
            problems |= self._send_on({*lacking})
        return {n: self._buffer(n) for n in self.mine if n not in problems}, problems

    def _buffer(self, n: int) -> Any:
        part = self.shipments[n].part
        return self.maps[n].buffer if n in self.held else self.memory.part(n, part.size)

    @property
    def in_place(self) -> list[InPlace]:
        """The files that this rank uses where they are."""
        return [each for n, each in self.maps.items() if n in self.held]

    def _read(self) -> dict[tuple[int, int, int], str]:
        """Read and verify this rank's pieces. Return, for all ranks, the pieces that they lack, and why."""
        def read(key: Key) -> str:
            (n, piece), why = key, ""
            part = self.shipments[n].part
            if n in self.held:
                return part.problem(piece, self.held[n])
            for path in self.shipments[n].paths:
                if not (why := part.problem(piece, path, partial(self.memory.put, n))):
                    return ""
            return why or f"{part.name} is missing"

        own = [key for key, ranks in self.stops.items() if self.group.rank in ranks]
        threads = max(1, min(THREADS, int(cpu_quota() / len(self.memory.own))))
        with ThreadPoolExecutor(threads, thread_name_prefix="read") as pool:
            whys = zip(own, [*pool.map(read, own)], strict=True)
        listed = [[n, piece, why, n in self.held] for (n, piece), why in whys if why]
        lacking: dict[tuple[int, int, int], str] = {}
        for rank, each in enumerate(self.group.gather(listed)):
            for n, piece, why, held in each:
                lacking[n, piece, rank] = why
                if held and self.stops[n, piece][0] != rank:
                    # The file in use must stay as it is, so that node gets the whole part
                    node = self.stops[n, piece].index(rank)
                    pieces = range(len(self.shipments[n].part.digests))
                    lacking |= {(n, other, self.stops[n, other][node]): why for other in pieces}
                    if self.group.rank in self.shipments[n].to[node]:
                        self.held.pop(n, None)
        return lacking

    def _send_on(self, lacking: set[tuple[int, int, int]]) -> dict[int, str]:
        """Send each piece from a rank that has it to one that lacks it, and on to the next. Return the parts of which a
        piece did not arrive as it was sent."""
        me, sent, damaged = self.group.rank, list[Any](), list[list[Any]]()
        for (n, piece), ranks in self.stops.items():
            part, to = self.shipments[n].part, [rank for rank in ranks if (n, piece, rank) in lacking]
            if me not in ranks or not to or part.size == 0:
                continue
            begin, end = part.piece(piece)
            route = [next(rank for rank in reversed(ranks) if rank not in to), *to]
            for source, target in pairwise(route):
                if me == target:
                    content = memoryview(bytearray(end - begin))
                    self.group.collective(partial(dist.recv, torch.frombuffer(content, dtype=torch.uint8), source))
                    self.memory.put(n, begin, content)
                    if hashlib.sha256(content).hexdigest() != part.digests[piece]:
                        damaged.append([n, f"{part.name} did not arrive whole"])
                elif me == source:
                    view = memoryview(self._buffer(n))[begin:end]
                    sent.append((dist.isend(tensor := torch.frombuffer(view, dtype=torch.uint8), target), tensor))
        for work, _ in sent:
            self.group.collective(work.wait)
        return {n: why for each in self.group.gather(damaged) for n, why in each}


def _mapped(file: int, size: int, begin: int) -> Any:
    """Return a buffer with bytes of an open file. It may be written to, which changes neither the file nor what others
    see."""
    if not size:
        return bytearray()
    return mmap.mmap(file, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=begin)
