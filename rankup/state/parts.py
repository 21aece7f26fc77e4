"""Parts in memory: where no rank holds the whole state (FSDP2), each keeps its own part of a recent step on its node.

A part is a sharded copy with the file of one rank. It lies beside the rescues, in
`/dev/shm/rankup-<user id>/<run id>.rank-00001/step-00001234/`. With several nodes a rank of the next node holds a
second one, unless a rank there holds the same part anyway (hybrid sharding), as in Wang et al., "Gemini: Fast Failure
Recovery in Distributed Training with In-Memory Checkpoints", SOSP 2023.

All ranks copy their parts into mapped memory after the same commit, and a thread does the rest. Before the next ones
all ranks agree that the last ones are whole: a rank has two, in turn, and at any moment the ranks have whole ones of
one step.
"""

import contextlib
import hashlib
import json
import math
import mmap
import os
import shutil
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rankup.agent.processes import memory_available
from rankup.errors import UserError, reason
from rankup.group.group import Group
from rankup.places.files import read_json
from rankup.state import copies, rescue
from rankup.state.copies import STATE, Check, Fingerprint, fingerprint, step_of, to_json, verify
from rankup.state.reading import Copy
from rankup.state.saver import Writing
from rankup.state.tree import INDEX, TensorFile, encode, file_of, index, local_part
from rankup.timing import HURRY_S, SHARE

FIRST = 10  # steps from the first part to the second, which is the first to say what one costs
ROOM = 1.25  # times what all parts of a node need
Of = tuple[int, str, str]  # step, attempt and run of a copy


# Keeping --------------------------------------------------------------------------------------------------------


class Parts:
    """Keeps this rank's part of the run with this id, and those of other nodes' ranks that it is asked to hold.
    `wanted`: there is something to keep, because state is split among ranks."""

    def __init__(self, group: Group, run: str, every: int | None) -> None:
        """`every`: steps from one to the next; 0 for none at all, None so that they cost `SHARE` of the time."""
        self.group, self.run, self.every = group, run, every
        self.wanted = False
        self._next = self._taken = 0  # steps
        self._taken_s = self._cost_s = self._beside_s = 0.0  # when, what the last one cost, and its thread
        self._writing = Writing("part", math.inf)
        self._layout, self._offsets, self._same = b"", dict[str, list[int]](), ""
        self._known: list[Any] = []  # of each rank: its node, digest of what it holds, and bytes of that
        self._held: dict[int, list[_Mapped]] = {}  # by rank: the next one to be overwritten first
        self._peer: int | None = None
        self._link: Any = None  # threads send in a group of their own
        cuda = group.device.type == "cuda"
        self._events = [torch.Event(group.device, enable_timing=True) for _ in range(2)] if cuda else []

    def due(self, step: int) -> bool:
        """Whether all ranks take their parts after this step."""
        return self.wanted and self.every != 0 and (step % self.every == 0 if self.every else step >= self._next)

    def take(self, step: int, make: Callable[[], tuple[bytes, dict[str, Any]]]) -> None:
        """Copy this rank's part of the state of this step. All ranks call this, before that state changes. What fails
        is one line. `make` returns the contents of `state.json`, and the tracked items with split tensors."""
        group, began_s, used_s = self.group, time.perf_counter(), time.thread_time()
        group.collective(self._writing.join)
        record, state = make()
        nodes, tensors = encode(state)
        local = {name: t.to_local() if hasattr(t, "to_local") else t for name, t in tensors.items()}
        file = TensorFile({name: t for name, t in local.items() if t.numel()})
        if file.layout != self._layout:
            self._layout = file.layout
            self._offsets = {name: [*local_part(name, t)[1]] for name, t in tensors.items() if local[name].numel()}
            # The state of a rank's own loader is in nobody else's part
            names = [sorted(node) for node in nodes.values() if isinstance(node, dict)]
            self._same = hashlib.sha256(file.layout + json.dumps([self._offsets, names]).encode()).hexdigest()
        failure = self._writing.failure
        gap = self._gap(step, began_s) if failure is None else 0
        gaps, *about = zip(*group.gather([gap, node_id(), self._same, len(file)]), strict=True)
        known, problem = list(zip(*about, strict=True)), reason(failure) if failure is not None else ""
        if min(gaps) > 0 and known != self._known:
            self._known = known
            problem = self._make_room()
            gaps = (*gaps, 1 - group.max(int(bool(problem))))
        if min(gaps) == 0:
            self.wanted, self._held = False, {}
            if problem:
                group.log.warning(f"no part of the state is kept in memory from now on: {problem}")
            return
        mapped = self._turn(group.rank)
        for event in self._events[:1]:
            event.record()
        file.put(mapped.content)
        for event in self._events[1:]:
            event.record()
        about_ranks = [rank for rank, (_, same, _) in enumerate(known) if same == self._same]
        files = {
            STATE: to_json({**json.loads(record), "ranks": about_ranks}),
            **index(nodes, tensors, [{}] * group.rank + [self._offsets]),
        }
        self._writing.start(partial(self._write, step, files, mapped))
        self._next, self._taken, self._taken_s = step + max(gaps), step, began_s
        self._cost_s = time.thread_time() - used_s

    def wait(self) -> None:
        """Let a part get done that is under way, because this process is about to end. Raises nothing."""
        self._writing.join(HURRY_S)

    def close(self) -> None:
        """The state is saved, and the training ends: free the memory. All ranks call this."""
        if self.wanted:
            self.group.collective(self._writing.join)
            self.group.barrier()
            self.wanted, self._held = False, {}
            remove(self.run)

    def _gap(self, step: int, now_s: float) -> int:
        """How many steps from this part to the next one, by what the last one cost."""
        if not self._taken:
            return FIRST
        step_s = (now_s - self._taken_s) / max(1, step - self._taken)
        return min(max(1, math.ceil((self._cost_s + self._beside_s) / SHARE / step_s)), 2**30)

    def _make_room(self) -> str:
        """Memory for the parts that this rank holds, twice. All ranks call this. Returns why there is none, or ""."""
        group, known = self.group, self._known
        peers = [peer_of(rank, known) for rank in range(group.world_size)]
        if self._link is None and any(peer is not None for peer in peers):
            self._link = dist.new_group(backend="gloo")
        self._peer, self._held = peers[group.rank], {}
        sizes = {rank: known[rank][2] for rank, peer in enumerate(peers) if group.rank in (rank, peer)}
        here = sum(node == known[group.rank][0] for node, _, _ in known)
        needed, problems = ROOM * here * 2 * sum(sizes.values()), []
        for place in rescue.places():
            try:
                rescue.check_room(place, needed, free=memory_available())
                rescue.remove_old(place)
                for rank, size in sizes.items():
                    folder = rescue.make_folder(place, f"{self.run}.rank-{rank:05d}")
                    copies.remove_unfinished(folder)
                    self._held[rank] = [_Mapped(folder, file_of(rank), size, group.device) for _ in range(2)]
                return ""
            except (OSError, UserError) as error:
                problems.append(str(error))
        return "; ".join(problems)

    def _turn(self, rank: int) -> "_Mapped":
        """Where the next part of that rank goes: the older one ends here."""
        self._held[rank].reverse()
        mapped = self._held[rank][1]
        mapped.hide()
        return mapped

    # In a thread ------------------------------------------------------------------------------------------------

    def _write(self, step: int, files: dict[str, bytes], mapped: "_Mapped") -> None:
        began_s, used_s, copying_s = time.perf_counter(), time.thread_time(), 0.0
        note = b""
        try:
            for event in self._events[1:]:
                event.synchronize()
                copying_s = self._events[0].elapsed_time(event) / 1000
            mapped.publish(step, files, fingerprint(mapped.bytes))
            note = _read(mapped.path)[0]
        finally:  # a rank that fails has to say so: the others wait for its part
            self._exchange(note, mapped)
        used_s = time.thread_time() - used_s
        # Beside a GPU the thread has a processor for itself; but the next part must not have to wait for it
        self._beside_s = max(copying_s, SHARE * 2 * (time.perf_counter() - began_s)) if self._events else used_s

    def _exchange(self, note: bytes, mapped: "_Mapped") -> None:
        """Send the part to its second node, and receive those that this rank is to hold. b"": there is none."""
        if self._link is None:
            return
        sent = [] if self._peer is None else _send(note, mapped.content, self._peer, self._link)
        for rank in self._held.keys() - {self.group.rank}:
            _receive(rank, lambda name, size, rank=rank: self._turn(rank), self._link)  # type: ignore[misc]
        for work, _ in sent:
            work.wait()


class _Mapped:
    """A part's file in memory that outlives this process. Fresh memory for each would cost more than the copy."""

    def __init__(self, folder: Path, name: str, size: int, device: torch.device) -> None:
        """Raises OSError where the memory is not there: to touch it later would end the process."""
        self.path, self.name = copies.create_staging(folder), name
        with (self.path / name).open("x+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            whole = mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.bytes, self.content = memoryview(whole), torch.frombuffer(whole, dtype=torch.uint8)
        if device.type == "cuda":  # so that the GPU copies into it by itself
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostRegister(self.content.data_ptr(), size, 0)

    def hide(self) -> None:
        """It is no copy any more."""
        with contextlib.suppress(OSError, UserError):  # somebody has removed it: then `publish` fails
            self.path = self.path.rename(copies.create_staging(self.path.parent))

    def publish(self, step: int, files: dict[str, bytes], entry: Fingerprint) -> None:
        """It is a copy from now on: its content, described by `entry`, and these small files."""
        self.path = copies.publish(self.path, files, {self.name: entry}, step=step, keep=2)


def node_id() -> str:
    """Equal for two ranks that see the same memory."""
    place = (rescue.places() or [Path("/")])[0].stat()
    boot = Path("/proc/sys/kernel/random/boot_id")  # containers on one machine may see different memory
    return f"{boot.read_text().strip() if boot.exists() else socket.gethostname()} {place.st_dev} {place.st_ino}"


def peer_of(rank: int, known: list[Any]) -> int | None:
    """The rank on the next node that holds this one's part too; None where nobody has to. `known`: see `Parts`."""
    own, same, _ = known[rank]
    nodes = list(dict.fromkeys(node for node, _, _ in known))
    if len(nodes) == 1 or any(other == same and node != own for node, other, _ in known):
        return None
    on = {node: [number for number, (each, _, _) in enumerate(known) if each == node] for node in nodes}
    there = on[nodes[(nodes.index(own) + 1) % len(nodes)]]
    return int(there[on[own].index(rank) % len(there)])


def remove(run: str, *, but: int = -1) -> None:
    """Remove the run's parts on this node, but those of one step. Several ranks may do it at once."""
    for name in {path.parent.name for path in rescue.found(parts=True) if path.parent.name.startswith(f"{run}.")}:
        rescue.remove(name, keep=range(but, but + 1))


def _new(folder: str, name: str, size: int) -> _Mapped | None:
    """Room for one part, None where there is none."""
    for place in rescue.places():
        with contextlib.suppress(OSError, UserError):
            return _Mapped(rescue.make_folder(place, folder), name, size, torch.device("cpu"))
    return None


# Going on -------------------------------------------------------------------------------------------------------


class PartsInMemory:
    """The parts of all ranks that lie in the memory of any node. All ranks make one and call its methods together."""

    def __init__(self, group: Group, check: Check, fits: Check) -> None:
        """`check` and `fits`: see `rankup.state.saver.Options`. What they refuse is not there."""
        self.group, own = group, []
        for path in rescue.found(parts=True):
            record: Any = read_json(path / STATE)
            with contextlib.suppress(TypeError, LookupError, ValueError):
                check(path, record)
                fits(path, record)
                ranks = [int(rank) for rank in record["ranks"]]
                if record["world_size"] == group.world_size:
                    own.append([str(path), ranks, step_of(path), str(record["attempt"]), str(record["run"])])
        # By step, attempt and run: the node of each part, its path there, and the ranks of which it is
        self._parts: dict[Of, set[tuple[str, str, tuple[int, ...]]]] = defaultdict(set)
        answers = group.gather([node_id(), own])
        self._nodes = [node for node, _ in answers]
        for node, found in answers:
            for path, ranks, step, attempt, run in found:
                self._parts[step, attempt, run].add((node, path, tuple(ranks)))

    def found(self) -> list[Of]:
        """Step, attempt and run of what all ranks have a part of."""
        every = {*range(self.group.world_size)}
        return [of for of, parts in self._parts.items() if {rank for *_, ranks in parts for rank in ranks} >= every]

    def load(self, *of: Any) -> tuple[Copy | None, str]:
        """This rank's part as a copy if all ranks have whole ones, and else why not. A damaged one is removed."""
        group, path, files, problem = self.group, Path(), dict[str, bytes](), ""
        for rank in range(group.world_size):
            able = [(node != self._nodes[rank], at, node) for node, at, ranks in self._parts[of] if rank in ranks]
            moved, at, node = min(able)
            source = self._nodes.index(node)
            if moved and group.rank == source:
                for work, _ in _send(*_read(Path(at)), rank):
                    group.collective(work.wait)
            if group.rank == rank:
                path = Path(at)
                if moved:
                    found = _receive(source, partial(_new, path.parent.name))
                    path, problem = found or path, "" if found else "it can't be read, or there is no room here"
        if not problem:
            files, problem = verify(path)
            if problem:
                group.log.warning(f"a part in memory was passed over: {path}: {problem}")
                shutil.rmtree(path, ignore_errors=True)
        if problem := next(filter(None, group.gather(problem)), ""):
            return None, problem
        # One for all: rank 0 alone may know the values of the last evaluation
        record = group.broadcast(json.loads(files[STATE]))
        return Copy(path, record, {}, files[INDEX]), ""


# Between ranks --------------------------------------------------------------------------------------------------


def _read(path: Path) -> tuple[bytes, torch.Tensor]:
    """A part as `_send` takes it, b"" where it can't be read: whether it is whole the receiver looks."""
    content = torch.empty(0, dtype=torch.uint8)
    try:
        small = {name: (path / name).read_text() for name in (STATE, INDEX)}
        (name,) = entries = {n: e for n, e in copies.read_manifest(path)["files"].items() if copies.is_shard(n)}
        with (path / name).open("rb") as file:
            content = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
        return json.dumps([step_of(path), small, name, len(content), entries[name]]).encode(), content
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return b"", content


def _send(note: bytes, content: torch.Tensor, to: int, link: Any = None) -> list[tuple[Any, torch.Tensor]]:
    """Begin to send both, the content if there is a note. Returns what to wait for, and what has to live until then."""
    told = torch.frombuffer(bytearray(note), dtype=torch.uint8) if note else content[:0]
    whole = [torch.tensor(len(note)), *([told, content] if note else [])]
    return [(dist.isend(tensor, to, group=link), tensor) for tensor in whole]


def _receive(source: int, place: Callable[[str, int], _Mapped | None], link: Any = None) -> Path | None:
    """Put what `_send` sends where `place` says, which is given a file's name and size. Returns where it is, if it is.
    """
    size = torch.zeros((), dtype=torch.int64)
    dist.recv(size, source, group=link)
    if not size:
        return None
    note = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(note, source, group=link)
    step, small, name, length, entry = json.loads(note.numpy().tobytes())
    mapped = place(name, length)
    dist.recv(mapped.content if mapped else torch.empty(length, dtype=torch.uint8), source, group=link)
    if mapped is None:
        return None
    mapped.publish(step, {each: text.encode() for each, text in small.items()}, entry)
    return mapped.path
