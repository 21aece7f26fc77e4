"""What a node's memory holds of a run: a rescue, and parts of split state.

The rescue is a copy that a rank writes when it loses a peer, right before it ends (Gupta et al., "Just-In-Time
Checkpointing", EuroSys 2024). It lies in `/dev/shm/rankup-<user id>/<run id>/step-00001234/`. If it can't be written
there, it lies in the same folders of the temporary directory. It is lost with its node, so it never replaces a
checkpoint.

Where no rank holds the whole state (FSDP2), each keeps its own part of a recent step: a sharded copy with the file of
one rank, in `<run id>.rank-00001`. With several nodes a rank of the next node holds a second one, unless a rank there
holds the same part anyway (hybrid sharding), as in Wang et al., "Gemini: Fast Failure Recovery in Distributed Training
with In-Memory Checkpoints", SOSP 2023. All ranks copy their parts after the same commit, and a thread does the rest.
Before the next ones all ranks agree that the last ones are whole: a rank keeps two, and at any moment the ranks have
whole parts of one step.
"""

import contextlib
import fcntl
import json
import math
import os
import shutil
import stat
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
import torch.distributed as dist

from rankup.agent.processes import memory_available
from rankup.errors import UserError, reason
from rankup.group.group import Group
from rankup.places.files import discard, read_json, remove_unfinished
from rankup.places.lease import kernel_id
from rankup.state import copies
from rankup.state.copies import MANIFEST, STATE, Check, Content, Damaged, find_problem, list_copies, step_of, to_json
from rankup.state.reading import Copy
from rankup.state.saver import HostCopies, Writing
from rankup.state.tree import TREE, TensorFile, encode, file_of, local_parts, place_of, to_file
from rankup.timing import ABANDONED_S, HURRY_S, SHARE

SHARED_MEMORY = Path("/dev/shm")  # Linux; absent elsewhere
FIRST = 10  # steps from the first part to the second, which is the first to say what one costs
Of = tuple[int, str, str]  # step, attempt and run of a copy
T = TypeVar("T")


# Folders --------------------------------------------------------------------------------------------------------


def homes() -> list[Path]:
    """The folders in which this user's runs may have theirs, the fastest first."""
    places = [SHARED_MEMORY, Path(tempfile.gettempdir())]
    return [place / f"rankup-{os.getuid()}" for place in places if place.is_dir()]


def in_memory(write: Callable[[Path], T], needed: float = 0, *, free: float = math.inf) -> T:
    """What `write` returns for the first of the `homes` that it can write to, with `needed` bytes free there and of the
    memory, of which `free` are. Raises UserError where there is none."""
    problems = []
    for home in homes():
        try:
            home.mkdir(mode=0o700, exist_ok=True)  # a rescue holds the weights
            if not _is_ours(home):
                raise PermissionError(f"{home} belongs to another user or is open to others")
            if (left := min(free, shutil.disk_usage(home.parent).free)) < needed:
                raise OSError(f"{home.parent} has {left / 2**20:.0f} MiB free, {needed / 2**20:.0f} are needed")
            return write(home)
        except (OSError, UserError) as error:
            problems.append(str(error))
    raise UserError("; ".join(problems))


def _folders(*kinds: bool) -> Iterator[Path]:
    """Those of this user's runs on this node. `kinds`: True for those of parts, False for those of rescues."""
    for home in filter(_is_ours, homes()):  # nearly always there is none
        yield from (folder for folder in home.glob("*") if ("." in folder.name) in kinds)


def list_held(*, parts: bool = False) -> Iterator[Path]:
    """The rescues of all runs on this node, or the parts. Their bytes are not looked at yet."""
    for folder in _folders(parts):
        yield from list_copies(folder)


def remove(run: str, keep: range = range(0), *, parts: bool = False) -> None:
    """Remove this node's rescues of the run, or the parts, but those of the steps in `keep`. Several ranks may do it at
    once, of parts while none is written."""
    for folder in _folders(parts):
        if folder.name.partition(".")[0] == run:
            if parts:
                remove_unfinished(folder)
            for path in list_copies(folder):
                if step_of(path) not in keep:
                    shutil.rmtree(path, ignore_errors=True)
            if list_copies(folder):
                continue
            with contextlib.suppress(OSError), (folder / ".lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # another rank may be writing its rescue there
                if not list_copies(folder):
                    shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned() -> None:
    """Remove what no run went on with for long: it takes memory from all users of the node."""
    for folder in _folders(True, False):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(folder, ignore_errors=True)


def _is_ours(home: Path) -> bool:
    """Whether nobody else could have put anything there: all users of a machine may write to /dev/shm and /tmp."""
    with contextlib.suppress(OSError):
        facts = home.lstat()
        return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o077
    return False


# The rescue -----------------------------------------------------------------------------------------------------


def write_rescue(run: str, step: int, attempt: str, make_files: Callable[[], Mapping[str, Content]]) -> None:
    """Write the files of a copy where there is room, unless another rank of this node has done so in this `attempt`: an
    earlier one's may be damaged. `make_files` is called if they are needed. Raises UserError where they can't be
    written."""
    def open_lock(home: Path) -> IO[str]:
        (home / run).mkdir(exist_ok=True)
        return (home / run / ".lock").open("a", encoding="ascii")

    def save(home: Path) -> None:
        remove_unfinished(home / run)
        copies.save(home / run, files, step=step, keep=1)

    remove_abandoned()
    with in_memory(open_lock) as lock:
        # The ranks of a node come here together. Each waits for the one before: the kernel frees the lock of one that
        # is killed while it writes
        fcntl.flock(lock, fcntl.LOCK_EX)
        held = [read_json(path / STATE) for path in list_held() if path.parent.name == run and step_of(path) >= step]
        if not any(record.get("attempt") == attempt for record in held):
            files = make_files()
            # Twice its size: the ranks' own buffers live in shared memory too
            in_memory(save, 2 * sum(map(len, files.values())))


# Parts: keeping ---------------------------------------------------------------------------------------------------


class Parts:
    """Keeps this rank's part of the run with this id, and those of other nodes' ranks that it is asked to hold.
    `wanted`: there is something to keep, because state is split among ranks."""

    def __init__(self, group: Group, run: str, every: int | None) -> None:
        """`every`: steps from one to the next; 0 for none at all, None so that they cost `SHARE` of the time."""
        self.group, self.run, self.every = group, run, every
        self.wanted = False
        self._next = self._taken = 0  # steps
        self._taken_s = self._cost_s = self._beside_s = 0.0  # when, what the last one cost, and its thread
        self._copies, self._writing = HostCopies(group.device), Writing("part", math.inf)
        self._known: list[Any] = []  # of each rank: its node, what says which part it holds, and bytes of that
        self._folders: dict[int, Path] = {}  # by rank: those of the parts that are kept here
        self._peer: int | None = None
        self._link: Any = None  # threads send in a group of their own

    def due(self, step: int) -> bool:
        """Whether all ranks take their parts after this step."""
        return self.wanted and self.every != 0 and (step % self.every == 0 if self.every else step >= self._next)

    def take(self, step: int, make: Callable[[], tuple[bytes, dict[str, Any]]]) -> None:
        """Copy this rank's part of the state of this step. All ranks call this, before that state changes. What fails
        is one line. `make` returns the contents of `state.json`, and the tracked items with split tensors."""
        group = self.group
        group.collective(self._writing.join)
        began_s, used_s = time.perf_counter(), time.thread_time()
        record, state = make()
        nodes, tensors = encode(state)
        parts, places = local_parts(tensors)
        problem = reason(failure) if (failure := self._writing.failure) is not None else ""
        which, size = _which(nodes, tensors), sum(part.nbytes for part in parts.values())
        answers = group.gather([problem, self._gap(step, began_s), node_id(), which, size])
        problems, gaps, *about = zip(*answers, strict=True)
        known = list(zip(*about, strict=True))
        if not any(problems) and known != self._known:
            self._known, problem = known, self._find_room(known)
            problems = tuple(group.gather(problem))
        if any(problems):
            self._stop(range(sys.maxsize))
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
        """Let a part get done that is under way, because this process is about to end. Raises nothing."""
        self._writing.join(HURRY_S)

    def close(self) -> None:
        """The state is saved, and the training ends: free the memory. All ranks call this."""
        if self.wanted:
            self.group.collective(self._writing.join)
            self.group.barrier()
        self._stop(range(0))

    def _stop(self, keep: range) -> None:
        """Take no more, and free all memory but that of the parts of the steps in `keep`. None is written now."""
        self.wanted = False
        self._copies, self._writing.failure = HostCopies(self.group.device), None  # whose traceback holds copies too
        remove(self.run, keep, parts=True)

    def _gap(self, step: int, now_s: float) -> int:
        """How many steps from this part to the next one, by what the last one cost."""
        if not self._taken:
            return FIRST
        step_s = (now_s - self._taken_s) / max(1, step - self._taken)
        return min(max(1, math.ceil((self._cost_s + self._beside_s) / SHARE / step_s)), 2**30)

    def _find_room(self, known: list[Any]) -> str:
        """Find folders for the parts that this rank holds. All ranks call this. Returns why there are none, or ""."""
        group = self.group
        peers = [peer_of(rank, known) for rank in range(group.world_size)]
        if self._link is None and any(peer is not None for peer in peers):
            self._link = dist.new_group(backend="gloo")
        self._peer = peers[group.rank]
        held = [rank for rank, peer in enumerate(peers) if group.rank in (rank, peer)]
        here = sum(node == known[group.rank][0] for node, _, _ in known)
        remove_abandoned()
        try:
            # Two of each part stay, and a third is in the ranks' own memory. A quarter more stays free
            needed = 1.25 * 3 * here * sum(known[rank][2] for rank in held)
            home = in_memory(lambda home: home, needed, free=memory_available())
        except UserError as error:
            return str(error)
        self._folders = {rank: home / _folder_of(self.run, rank) for rank in held}
        return ""

    # In a thread ------------------------------------------------------------------------------------------------

    def _write(self, step: int, files: dict[str, Content]) -> None:
        began_s, used_s = time.perf_counter(), time.thread_time()
        path: Path | None = None
        try:
            copying_s = self._copies.wait()
            path = _keep(self._folders[self.group.rank], step, files)
        finally:  # a rank that fails has to say so: the others wait for its part
            sent = _send(path, self._peer, self._link) if self._peer is not None else []
            received = {rank: _receive(rank, self._link) for rank in self._folders if rank != self.group.rank}
            for work, _ in sent:
                work.wait()
        for rank, part in received.items():
            if part is not None:
                _keep(self._folders[rank], *part)
        # Beside a GPU the thread has a processor for itself; but the next part must not have to wait for it
        beside = max(copying_s, 2 * SHARE * (time.perf_counter() - began_s))
        self._beside_s = time.thread_time() - used_s if self.group.device.type == "cpu" else beside


def _keep(folder: Path, step: int, files: Mapping[str, Content]) -> Path:
    """Write a part beside the last one, which all ranks know to be whole. Raises UserError."""
    for older in list_copies(folder)[:-1]:
        discard(older)
    remove_unfinished(folder)
    return copies.save(folder, files, step=step, keep=2)


def _which(nodes: dict[str, Any], tensors: dict[str, Any]) -> str:
    """Equal for two ranks that hold the same part."""
    places = sorted({str(place_of(tensor)) for tensor in tensors.values() if hasattr(tensor, "to_local")})
    # The state of a rank's own loader is in nobody else's part
    return json.dumps([places, [sorted(node) for node in nodes.values() if isinstance(node, dict)]])


def node_id() -> str:
    """Equal for two ranks that see the same memory."""
    place = homes()[0].parent.stat()  # containers on one machine may see different memory
    return f"{kernel_id()} {place.st_dev} {place.st_ino}"


def peer_of(rank: int, known: list[Any]) -> int | None:
    """The rank on the next node that holds this one's part too; None where nobody has to. `known`: see `Parts`."""
    own, which, _ = known[rank]
    nodes = list(dict.fromkeys(node for node, _, _ in known))
    if len(nodes) == 1 or any(other == which and node != own for node, other, _ in known):
        return None
    on = {node: [number for number, (each, _, _) in enumerate(known) if each == node] for node in nodes}
    there = on[nodes[(nodes.index(own) + 1) % len(nodes)]]
    return int(there[on[own].index(rank) % len(there)])


def _folder_of(run: str, rank: int) -> str:
    return f"{run}.rank-{rank:05d}"


# Parts: going on --------------------------------------------------------------------------------------------------


class PartsInMemory:
    """The parts of all ranks that lie in the memory of any node. All ranks make one and call its methods together."""

    def __init__(self, group: Group, check: Check) -> None:
        """`check`: see `rankup.state.saver.Options`. What it refuses is not there."""
        self.group, own = group, []
        for path in list_held(parts=True):
            record: Any = read_json(path / STATE)
            with contextlib.suppress(TypeError, LookupError, ValueError):
                check(path, record)
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

    def load(self, *of: Any) -> Copy:
        """This rank's part as a copy, if all ranks have whole ones. A damaged one is removed, and another node's is
        taken in its place. Raises Damaged, on all ranks, where that can't be."""
        group, path, problem, chosen = self.group, Path(), "", []
        for rank in range(group.world_size):
            able = [(part[0] != self._nodes[rank], part) for part in self._parts[of] if rank in part[2]]
            moved, part = min(able)
            chosen.append(part)
            node, at, _ = part
            source = self._nodes.index(node)
            if moved and group.rank == source:
                whole = Path(at) if not find_problem(Path(at)) else None
                for work, _ in _send(whole, rank):
                    group.collective(work.wait)
            if group.rank == rank:
                path = Path(at)
                if moved:
                    path, problem = _take_over(_receive(source), _folder_of(of[2], rank))
        damage = "" if problem else find_problem(path)
        if damage:
            group.log.warning(f"a part in memory was passed over: {path}: {damage}")
            discard(path)
        problems = group.gather(problem or damage)
        if any(problems):
            self._parts[of] -= {part for part, problem in zip(chosen, problems, strict=True) if problem}
            if of in self.found():
                return self.load(*of)
            raise Damaged(path, next(filter(None, problems)))
        # One for all: rank 0 alone may know the values of the last evaluation
        return Copy(path, group.broadcast(read_json(path / STATE)), {}, sharded=True)


def _take_over(part: tuple[int, dict[str, Content]] | None, name: str) -> tuple[Path, str]:
    """Keep a part that was received. Returns where, and what is wrong."""
    if part is None:
        return Path(), "it is damaged on the node that has it"
    step, files = part
    try:
        needed = sum(map(len, files.values()))
        return in_memory(lambda home: copies.save(home / name, files, step=step, keep=2), needed), ""
    except UserError as error:
        return Path(), str(error)


def _send(path: Path | None, to: int, link: Any = None) -> list[tuple[Any, torch.Tensor]]:
    """Begin to send a part, or that there is none. Returns what to wait for, and what has to live until then."""
    files = [file for file in path.iterdir() if file.name != MANIFEST] if path is not None else []
    sizes = {file.name: file.stat().st_size for file in files}
    note = json.dumps([step_of(path), sizes] if path is not None else None).encode()
    tensors = [torch.tensor(len(note)), torch.frombuffer(bytearray(note), dtype=torch.uint8)]
    tensors += [torch.from_file(str(file), size=sizes[file.name], dtype=torch.uint8) for file in files]
    return [(dist.isend(tensor, to, group=link), tensor) for tensor in tensors]


def _receive(source: int, link: Any = None) -> tuple[int, dict[str, Content]] | None:
    """What `_send` sends: the step, and the contents of the files."""
    def receive(length: int) -> bytearray:
        content = bytearray(length)
        dist.recv(torch.frombuffer(content, dtype=torch.uint8), source, group=link)
        return content

    size = torch.zeros((), dtype=torch.int64)
    dist.recv(size, source, group=link)
    note = json.loads(receive(int(size)))
    return None if note is None else (note[0], {name: receive(length) for name, length in note[1].items()})
