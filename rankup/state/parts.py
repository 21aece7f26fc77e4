"""Parts of split state in the memory of nodes.

If no rank holds the whole state (FSDP2), each rank keeps its own part of a recent step: a sharded copy with the file of
one rank. With several nodes a rank of the next node holds the part too, unless a rank on another node has the same part
anyway (hybrid sharding), as in Wang et al., "Gemini: Fast Failure Recovery in Distributed Training with In-Memory
Checkpoints", SOSP 2023. All ranks copy their parts after the same commit, and a thread of each rank does the rest.
Before the next parts all ranks agree that the last parts are whole. Each rank keeps its newest two parts, so at any
moment all ranks have whole parts of one step.
"""

import hashlib
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rankup.agent.processes import memory_available
from rankup.errors import UserError, reason
from rankup.group.group import MESSAGES, Group
from rankup.places.files import discard, remove_unfinished
from rankup.state.copies import MANIFEST, STATE, Content, Damaged, list_copies, read_manifest, to_json
from rankup.state.memory import in_memory, node_id, remove, remove_abandoned
from rankup.state.place import Folder
from rankup.state.saver import BackgroundTask, HostCopies
from rankup.state.tree import TREE, TensorFile, encode, file_of, local_parts, mesh_position, to_file
from rankup.timing import HURRY_S, SHARE

FIRST = 10  # steps from the first part to the second; only then is the cost of a part known


class Parts:
    """The parts of a run that this rank keeps in memory: its own, and parts of other nodes' ranks.
    `wanted`: whether to keep parts, because the state is split among ranks."""

    def __init__(self, group: Group, run: str, every: int | None) -> None:
        """`every`: steps from one part to the next. 0: keep no parts. None: parts cost about `SHARE` of the time."""
        self.group, self.run, self.every = group, run, every
        self.wanted = False
        self._next = self._taken = 0  # steps
        self._taken_s = self._cost_s = self._beside_s = 0.0  # start of the last part, cost of its copy and its thread
        self._copies, self._writing = HostCopies(group.device), BackgroundTask("part", math.inf)
        self._known: list[Any] = []  # for each rank: its node, an id of its part, and the bytes of the part
        self._folders: dict[int, Path] = {}  # folders of the parts that are kept here, by rank
        self._peer: int | None = None  # the rank that holds this rank's part too
        self._link: Any = None  # the threads' own process group

    def due(self, step: int) -> bool:
        """Return whether all ranks take their parts after this step."""
        return self.wanted and self.every != 0 and (step % self.every == 0 if self.every else step >= self._next)

    def take(self, step: int, make: Callable[[], tuple[bytes, dict[str, Any]]]) -> None:
        """Copy this rank's part of the state of this step. All ranks call this before the state changes. A failure is
        logged in one line. `make` returns the content of `state.json`, and the tracked items with split tensors."""
        group = self.group
        group.collective(self._writing.join)
        began_s, used_s = time.perf_counter(), time.thread_time()
        record, state = make()
        nodes, tensors = encode(state)
        parts, places = local_parts(tensors)
        problem = reason(failure) if (failure := self._writing.failure) is not None else ""
        which, size = _part_id(nodes, tensors), sum(part.nbytes for part in parts.values())
        answers = group.gather([problem, self._gap(step, began_s), node_id(), which, size])
        problems, gaps, *about = zip(*answers, strict=True)
        known = list(zip(*about, strict=True))
        if not any(problems) and known != self._known:
            self._known, problem = known, self._find_room(known)
            problems = tuple(group.gather(problem))
        if any(problems):
            self._stop()
            if problem:
                group.log.warning(f"no part of the state is kept in memory from now on: {problem}")
            return
        file = TensorFile(self._copies.take(parts), places)
        alike = [rank for rank, (_, other, _) in enumerate(known) if other == which]
        record = to_json({**json.loads(record), "ranks": alike})
        self._writing.start(lambda: self._write(step, {STATE: record, TREE: to_file(nodes), file_of(group.rank): file}))
        self._next, self._taken, self._taken_s = step + max(gaps), step, began_s
        self._cost_s = time.thread_time() - used_s

    def wait(self) -> None:
        """Wait a bounded time for a part that is being written, because this process will end soon. Raises nothing."""
        self._writing.join(HURRY_S)

    def close(self) -> None:
        """Free the memory, because the state is saved and the training ends. All ranks call this."""
        if self.wanted:
            self.group.collective(self._writing.join)
            self.group.barrier()
        self._stop()
        remove(self.run)

    def distrust(self) -> None:
        """Remove the parts in this node's memory, because this rank's state may be wrong."""
        self.wait()
        if self.wanted or self._folders:  # parts of earlier attempts go too; without parts, other ranks' rescues stay
            remove(self.run)

    def _stop(self) -> None:
        """Take no more parts, and free this process's buffers. No part is being written now."""
        self.wanted = False
        self._copies, self._writing.failure = HostCopies(self.group.device), None  # a traceback refers to copies too

    def _gap(self, step: int, now_s: float) -> int:
        """Return how many steps to wait before the next part, given the cost of the last one."""
        if not self._taken:
            return FIRST
        step_s = (now_s - self._taken_s) / max(1, step - self._taken)
        return min(max(1, math.ceil((self._cost_s + self._beside_s) / SHARE / step_s)), 2**30)

    def _find_room(self, known: list[Any]) -> str:
        """Find folders for the parts that this rank holds. All ranks call this. Return why there is no room, or ""."""
        group = self.group
        peers = peers_of(known)
        if self._link is None and any(peer is not None for peer in peers):
            self._link = dist.new_group(backend="gloo", group_desc=MESSAGES)
        self._peer = peers[group.rank]
        held = [rank for rank, peer in enumerate(peers) if group.rank in (rank, peer)]
        here = sum(node == known[group.rank][0] for node, _, _ in known)
        remove_abandoned()
        try:
            # Two of each part are kept, and a third is in the buffers of the ranks. Leave a quarter more free
            needed = 1.25 * 3 * here * sum(known[rank][2] for rank in held)
            home = in_memory(lambda home: home, needed, free=memory_available())
        except UserError as error:
            return str(error)
        self._folders = {rank: home / f"{self.run}.rank-{rank:05d}" for rank in held}
        return ""

    # In a thread ------------------------------------------------------------------------------------------------

    def _write(self, step: int, files: dict[str, Content]) -> None:
        began_s, used_s = time.perf_counter(), time.thread_time()
        path: Path | None = None
        try:
            copying_s = self._copies.wait()
            path = _keep(self._folders[self.group.rank], step, files)
        finally:  # also after a failure: the other ranks wait for this rank's part, or for a note that there is none
            sent = _send(path, self._peer, self._link) if self._peer is not None else []
            received = {rank: _receive(rank, self._link) for rank in self._folders if rank != self.group.rank}
            for work, _ in sent:
                work.wait()
        for rank, part in received.items():
            if part is not None:
                manifest, content = part
                kept = _keep(self._folders[rank], manifest["step"], content)
                if read_manifest(kept)[0] != manifest:
                    discard(kept)  # its digests are those of other bytes than the rank's own
                    raise Damaged(kept, "it did not arrive whole")
        # With a GPU the thread's work does not slow down the training, but the next part must not wait for the thread
        beside = max(copying_s, 2 * SHARE * (time.perf_counter() - began_s))
        self._beside_s = time.thread_time() - used_s if self.group.device.type == "cpu" else beside


def _keep(folder: Path, step: int, files: Mapping[str, Content]) -> Path:
    """Write a part, and keep the part before, which all ranks know to be whole. Raises UserError."""
    for older in list_copies(folder)[:-1]:
        discard(older)
    remove_unfinished(folder)
    return Folder(folder, keep=2).write(step, files)


def _part_id(nodes: dict[str, Any], tensors: dict[str, Any]) -> str:
    """Return an id that is equal for two ranks if they hold the same part."""
    places = sorted({str(mesh_position(tensor)) for tensor in tensors.values() if hasattr(tensor, "to_local")})
    # The keys count too: only a rank's own part holds the state of its loader
    text = json.dumps([places, [sorted(node) for node in nodes.values() if isinstance(node, dict)]])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()  # the names of a large model take kilobytes


def peers_of(known: Sequence[Any]) -> list[int | None]:
    """Return for each rank the rank on the next node that must hold its part too, or None if another node has that part
    anyway. `known`: see `Parts`. Called on every rank, so the work grows with the number of ranks, not its square."""
    on, holding = defaultdict[str, list[int]](list), defaultdict[str, set[str]](set)
    for rank, (node, which, _) in enumerate(known):
        on[node].append(rank)
        holding[which].add(node)
    peers: list[int | None] = [None] * len(known)
    for own, there in zip(on.values(), [*on.values()][1:] + [*on.values()][:1], strict=True):
        for place, rank in enumerate(own):
            if len(on) > 1 and len(holding[known[rank][1]]) == 1:
                peers[rank] = there[place % len(there)]
    return peers


def _send(path: Path | None, to: int, link: Any) -> list[tuple[Any, torch.Tensor]]:
    """Begin to send a part, its manifest first, or a note that there is none. Return the transfers, each with the
    tensor to keep alive."""
    manifest, files = b"null", list[torch.Tensor]()
    if path is not None:
        manifest = (path / MANIFEST).read_bytes()
        files = [torch.from_file(str(path / part.name), size=part.size, dtype=torch.uint8)
                 for part in read_manifest(path)[1]]
    tensors = [torch.tensor(len(manifest)), torch.frombuffer(bytearray(manifest), dtype=torch.uint8), *files]
    return [(dist.isend(tensor, to, group=link), tensor) for tensor in tensors]


def _receive(source: int, link: Any) -> tuple[dict[str, Any], dict[str, Content]] | None:
    """Receive what `_send` sends, and return the manifest and the content of each file, or None if there is no part."""
    def receive(length: int) -> bytearray:
        content = bytearray(length)
        dist.recv(torch.frombuffer(content, dtype=torch.uint8), source, group=link)
        return content

    size = torch.zeros((), dtype=torch.int64)
    dist.recv(size, source, group=link)
    manifest = json.loads(receive(int(size)))
    if manifest is None:
        return None
    return manifest, {name: receive(entry["bytes"]) for name, entry in manifest["files"].items()}
