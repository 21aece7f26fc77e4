"""Where an attempt goes on: the newest whole copy on the run's line of attempts, wherever it lies.

A copy lies in one of six places: rank 0's run directory, an object store that the run lives in, its mirror, the disk
of another node, the memory of any node, or in parts in the memory of all nodes. All but the last have one interface,
`Source`. Every rank lists the copies that it can
reach, without a look at their bytes; then the newest is fetched and verified, and where it is damaged the next one.

A copy on another node's disk has the lineage of the attempt that wrote it beside it: a node 0 that comes back with an
empty disk does not know which run it is to go on with.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rankup.errors import PeerLost, UserError
from rankup.group.group import Group
from rankup.places.files import read_json
from rankup.places.lineage import Lineage, before
from rankup.state import rescue
from rankup.state.copies import STATE, all_damaged, find_problem, known_damaged, list_copies, looks_whole, step_of
from rankup.state.parts import PartsInMemory
from rankup.state.reading import Check, Copy, no_check, read, share

SECOND = "copies"  # in the run directory of another node than rank 0's: copies by the id of their run
CHECKPOINT, STORE, MIRROR, PEER, RESCUE, PARTS = range(6)  # the first is preferred, of two of the same step
Found = tuple[str, int, str, str, dict[str, Any] | None]  # the fields of a candidate from `where` on


class Source(Protocol):
    """A place of copies. `called`: its name for the user."""

    called: str

    def found(self) -> Iterable[Found]:
        """The copies that are there. Reads only what is small."""

    def fetch(self, where: str) -> tuple[Path, str]:
        """The folder of that copy on this machine, and what is wrong with it, "" where nothing is known to be."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A copy that `rank` can reach. `attempt`: the mark of the one that wrote it; `run` and `attempt` are "" where they
    can't be read. `lineage`: of that attempt, for a copy on another node's disk."""

    rank: int
    kind: int
    where: str
    step: int
    attempt: str
    run: str
    lineage: dict[str, Any] | None = None


class Folder:
    """Copies in folders of this machine. `look`: raises ValueError for those that are not to be listed.

    `unreadable`: called with what can't be listed; without it such a copy is listed all the same, to be found damaged.
    """

    def __init__(
        self, called: str, paths: Iterable[Path], *, look: Check = no_check, of_peer: bool = False,
        unreadable: Callable[[Path], None] | None = None,
    ) -> None:
        self.called, self._paths, self._look, self._of_peer, self._unreadable = called, paths, look, of_peer, unreadable

    def found(self) -> Iterator[Found]:
        for path in self._paths:
            record: Any = read_json(path / STATE)
            line = Lineage.read(path) if self._of_peer else None
            try:
                self._look(path, record)
                attempt, run = str(record["attempt"]), str(record["run"])
                if self._of_peer and (line is None or line.run != run):
                    raise ValueError
                if self._unreadable is None and record["step"] != step_of(path):
                    raise ValueError  # a folder that somebody renamed: listed first, and said to be damaged
            except (TypeError, LookupError, ValueError):
                attempt = run = ""
                if self._unreadable is not None:
                    self._unreadable(path)
                    continue
            yield str(path), step_of(path), attempt, run, line.values() if line else None

    def fetch(self, where: str) -> tuple[Path, str]:
        return Path(where), ""


@dataclass(frozen=True, slots=True)
class Opened:
    """What rank 0 knows of the run as it opens it: plain values, for all ranks.

    `lineage`: None where its folder holds no run. `new`: of the run that begins then. `found`: the kind and the fields
    of the copies that rank 0 alone reaches. `token`: of the lease. `mark`: of this attempt in the lineage.
    """

    lineage: dict[str, Any] | None
    new: dict[str, Any]
    found: list[list[Any]]
    token: str
    mark: str


@dataclass(slots=True)
class Origin:
    """`copy`: the state to go on from, on all ranks, None at the beginning of a run. `words`: what it is, for the user.

    `writer`: the attempt that wrote it. `kind`: of the place. `saved`: path and record of the newest copy in rank 0's
    folder. `second`: the rank that keeps second copies, None where none is needed.
    """

    lineage: Lineage
    second: int | None = None
    copy: Copy | None = None
    words: str = ""
    writer: str | None = None
    kind: int = CHECKPOINT
    saved: tuple[str, dict[str, Any]] | None = None
    damaged: list[tuple[Candidate, str]] = field(default_factory=list)


def find_origin(
    group: Group, folder: Path, opened: Opened, sources: Mapping[int, Source], *, check: Check, fits: Check,
    wanted: Callable[[Lineage], bool], sharded: bool = False, parts: bool = True,
) -> Origin:
    """The newest state that any rank can reach. All ranks call this.

    `folder`: the run directory. `sources`: rank 0's own, by kind. `check`, `fits`, `wanted` and `sharded`: see
    `rankup.state.run.Options`. `parts`: those in memory may be taken.
    Raises UserError on all ranks where nothing whole is left of a run that has copies, where other nodes hold copies of
    several runs, or where the newest state can't be gone on with, and PeerLost where a place does not answer that may
    hold the newest.
    """
    of_node = {PEER: _peers(group, folder), RESCUE: _rescues(check, fits)}
    own = [[kind, *found] for kind, place in of_node.items() for found in place.found()]
    answers = group.gather([_sees(folder, opened.token), own])
    candidates = [Candidate(0, *values) for values in opened.found]
    candidates += [Candidate(rank, *values) for rank, (_, found) in enumerate(answers) for values in found]
    memory = PartsInMemory(group, check, fits) if parts else None
    candidates += [Candidate(0, PARTS, *each) for each in memory.found()] if memory else []
    known = Lineage(**opened.lineage) if opened.lineage else None
    second = next((rank for rank, (sees, _) in enumerate(answers) if rank and not sees), None)
    origin = Origin(known or Lineage(**opened.new), second)
    places, chosen = {**sources, **of_node}, None
    for line, one in in_order(candidates, known, wanted, group, folder):
        if memory is not None and one.kind == PARTS:
            copy, problem = memory.load(one.where)
        else:
            copy, problem = _load(group, places, one, check, fits, sharded)
        if problem:
            origin.damaged.append((one, problem))
            continue
        origin.copy = copy if one.kind == PARTS else share(copy, group, source=one.rank)
        origin.kind, chosen = one.kind, one
        assert origin.copy is not None
        origin.writer = origin.copy.record["attempt"]
        if line is not None and (known is None or line.number > known.number):  # than what rank 0's disk knows
            origin.lineage = line
        elif known is None and one.kind == CHECKPOINT:
            origin.lineage.run = origin.copy.record["run"]  # run.json was lost: trackers know the run by the same id
        break
    lost = [(one, problem) for one, problem in origin.damaged if one.kind < RESCUE]
    if origin.copy is None and lost:
        raise UserError(_nothing_whole(group, lost, places), printed_elsewhere=not group.is_rank0)
    for one, problem in lost if group.is_rank0 else []:
        of = f" of {places[one.kind].called}" if one.kind in (STORE, MIRROR) else ""
        what = "a second copy" if one.kind == PEER else f"checkpoint {Path(one.where).name}{of}"
        group.log.warning(f"{what} was passed over: {problem}")
    origin.saved = group.on_rank0(lambda: _saved(origin, folder / "checkpoints", check))
    if chosen is not None:
        origin.words = _words(chosen, origin, group.hosts)
    _put_aside_others(folder, origin.lineage.run)
    return origin


def in_order(
    candidates: Iterable[Candidate], known: Lineage | None, wanted: Callable[[Lineage], bool], group: Group,
    folder: Path,
) -> Iterator[tuple[Lineage | None, Candidate]]:
    """The copies in the order in which to try them, with the line that each is on: on the line of the run that knows
    most the newest first, then what else rank 0 has, which nobody knows any better, then lines that know less.

    `known`: rank 0's line. Raises UserError where rank 0 has nothing, and the others know several runs.
    """
    # Ranks of one node list the same files
    once = {(group.hosts[one.rank], one.where): one for one in sorted(candidates, key=lambda one: -one.rank)}
    left = sorted(once.values(), key=lambda one: (-one.step, one.kind, one.rank))
    others = [(one, Lineage(**one.lineage)) for one in left if one.lineage is not None]

    def on(lines: Iterable[Lineage]) -> Iterator[tuple[Lineage | None, Candidate]]:
        for line in sorted(lines, key=lambda line: -line.number):
            for one in [*left]:
                if not one.attempt or (one.run == line.run and line.has(one.step, one.attempt)):
                    left.remove(one)
                    yield line, one

    if known is not None:
        of_run = [line for _, line in others if line.run == known.run]
        yield from on([known, *(line for line in of_run if line.number > known.number)])
    else:
        of_run = [line for _, line in others if wanted(line)]
    yield from ((None, one) for one in [*left] if one.kind < PEER)
    first = {line.run: one for one, line in reversed(others) if line in of_run}
    if len(first) > 1:
        named = " and ".join(f"{one.where} on {group.hosts[one.rank]} (rank {one.rank})" for one in first.values())
        raise UserError(
            f"run_dir: {folder} must hold a run, or other nodes copies of one run, got nothing there and copies "
            f"of {len(first)} runs: {named}. Move away what you don't want, or set --fresh to start anew.",
            printed_elsewhere=not group.is_rank0,
        )
    yield from on(of_run)


def _load(
    group: Group, places: Mapping[int, Source], one: Candidate, check: Check, fits: Check, sharded: bool
) -> tuple[Copy | None, str]:
    """The copy, on its rank, and on all ranks what is wrong with it. Raises UserError and PeerLost on all."""
    copy, answer = None, ("", "")
    if group.rank == one.rank:
        try:
            path, problem = places[one.kind].fetch(one.where)
            if not problem:
                copy, problem = read(path, check)
            if copy is not None:
                fits(copy.path, copy.record)
                copy = copy if sharded else copy.as_plain()
            else:
                if one.kind == CHECKPOINT:
                    known_damaged.add(path)
                elif one.kind >= PEER:
                    problem = f"checkpoint: {path} must be a whole checkpoint, got a damaged one: {problem}."
                if one.kind == RESCUE:
                    group.log.warning(f"a rescue was passed over: {problem}")
                    shutil.rmtree(path, ignore_errors=True)
                elif one.kind == PEER:
                    problem = f"rank {one.rank} on {group.hosts[one.rank]}: {problem}"
            answer = ("damaged" if problem else "", problem)
        except (UserError, PeerLost) as error:
            answer = ("lost" if isinstance(error, PeerLost) else "refused", str(error))
    kind, text = group.broadcast(answer, source=one.rank)
    if kind in ("lost", "refused"):
        raise (PeerLost if kind == "lost" else UserError)(text, printed_elsewhere=not group.is_rank0)
    return copy, text


def _peers(group: Group, folder: Path) -> Source:
    """Second copies on this rank's disk."""
    def unreadable(path: Path) -> None:
        group.log.warning(f"the copy {path} was passed over: its state.json or run.json is missing or damaged")

    paths = (path for copies in (folder / SECOND).glob("*") for path in list_copies(copies))
    return Folder("second copies", paths, of_peer=True, unreadable=unreadable)


def _rescues(check: Check, fits: Check) -> Source:
    """What this rank's node holds in memory of this run with these settings."""
    def look(path: Path, record: dict[str, Any]) -> None:
        check(path, record)
        fits(path, record)

    return Folder("rescues", rescue.found(), look=look, unreadable=lambda path: None)


def _sees(folder: Path, token: str) -> bool:
    """Whether this rank finds in `folder` what rank 0 has just written there.

    Not waited for: where a network file system shows it later, the node keeps a copy that nobody needs.
    """
    return bool((read_json(folder / "lease.json") or {}).get("token") == token)


def _saved(origin: Origin, checkpoints: Path, check: Check) -> tuple[str, dict[str, Any]] | None:
    """Path and record of the newest copy in rank 0's folder, None where there is no good one."""
    if origin.copy is not None and origin.kind < PEER:
        return str(origin.copy.path), origin.copy.record
    for path in reversed(list_copies(checkpoints)):
        # A rank that was lost is to be back within a second: its rescue stands for the bytes of what is older
        if looks_whole(path) and (origin.kind >= RESCUE or not find_problem(path)):
            with contextlib.suppress(TypeError, LookupError, ValueError):
                check(path, record := read_json(path / STATE))
                return str(path), record
    return None


def _words(chosen: Candidate, origin: Origin, hosts: Sequence[str]) -> str:
    """For the user: what the run goes on from."""
    assert origin.copy is not None
    if chosen.kind < PEER:
        return origin.copy.path.name
    if chosen.kind == RESCUE:
        return f"step {origin.copy.step}, rescued by {origin.copy.record['written_by']}; no finished step was lost"
    if chosen.kind == PARTS:
        return f"step {origin.copy.step}, of which each rank's part was in memory"
    has = "only damaged checkpoints" if any(one.kind < PEER for one, _ in origin.damaged) else "no checkpoint"
    has = f"none newer than step {origin.saved[1]['step']}" if origin.saved else has
    where = f"{hosts[chosen.rank]} (rank {chosen.rank})"
    return f"step {origin.copy.step}, the second copy on {where}: {hosts[0]} (rank 0) has {has}"


def _put_aside_others(folder: Path, run: str) -> None:
    """Move the second copies of other runs than this one to `before-<time>/`, as --fresh does on rank 0's disk.

    Else a node 0 that loses its disk before the new run's first checkpoint would go on with the earlier run. The ranks
    of a node do this at the same time: one of them moves a folder, the others find it gone.
    """
    for other in (folder / SECOND).glob("*"):
        if other.name == run or not other.is_dir():
            continue
        moved = before(folder) / SECOND
        with contextlib.suppress(OSError):
            moved.mkdir(parents=True, exist_ok=True)
            other.rename(moved / other.name)
        with contextlib.suppress(OSError):  # another rank was faster, and this folder is still empty
            moved.rmdir()
            moved.parent.rmdir()


def _nothing_whole(group: Group, damaged: Sequence[tuple[Candidate, str]], places: Mapping[int, Source]) -> str:
    texts: list[str] = []
    for kind in sorted({one.kind for one, _ in damaged}):
        if kind == PEER:
            listed = "; ".join(problem for one, problem in damaged if one.kind == kind)
            copied = f"second copies: one must be whole, got only damaged ones: {listed}"
            texts.append(copied if texts else f"{copied} Set --fresh to start anew, which keeps them aside.")
        elif group.is_rank0:
            found = {Path(one.where).name: problem for one, problem in damaged if one.kind == kind}
            texts.append(str(all_damaged(places[kind].called, found)))
    return " ".join(texts)
