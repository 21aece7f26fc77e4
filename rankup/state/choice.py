"""Where an attempt goes on: the newest whole copy on the run's line of attempts, wherever it lies.

Every rank lists the copies that it can read: rank 0 the newest in its run directory, to which what is at a second place
was fetched; each rank the second copies on its disk (see `rankup.state.saver`) and the rescues in its node's memory
(`rankup.state.rescue`). A second copy has the lineage of the attempt that wrote it beside it: a node 0 that comes back
with an empty disk does not know which run it is to go on with.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankup.errors import UserError
from rankup.group.group import Group
from rankup.places.files import read_json
from rankup.places.lineage import Lineage, before
from rankup.state import rescue
from rankup.state.copies import STATE, list_copies
from rankup.state.reading import Check, Copy, load, share

SECOND = "copies"  # in the run directory of another node than rank 0's: copies by the id of their run
CHECKPOINT, SECOND_COPY, RESCUE = range(3)  # the first is preferred, of two of the same step


@dataclass(frozen=True, slots=True)
class Candidate:
    """A copy that `rank` can read; of a second copy or a rescue nobody has looked at the bytes.

    `attempt`: the mark of the one that wrote it. `lineage`: of that attempt, for a second copy.
    """

    rank: int
    kind: int
    path: str
    step: int
    attempt: str
    run: str
    lineage: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class OnDisk:
    """What rank 0 found in its run directory: plain values, for all ranks.

    `lineage`: None where it holds no run. `new`: of the run that begins then. `saved`: the record of the newest good
    copy, None where there is none. `problem`: why not, where all are damaged. `token`: of the lease. `mark`: of this
    attempt in the lineage.
    """

    finished: bool
    lineage: dict[str, Any] | None
    new: dict[str, Any]
    saved: dict[str, Any] | None
    problem: str
    token: str
    mark: str


@dataclass(slots=True)
class Origin:
    """`copy`: the state to go on from, on all ranks, None at the beginning of a run. `words`: what it is, for the user.

    `writer`: the attempt that wrote it. `second`: the rank that keeps second copies, None where none is needed.
    """

    lineage: Lineage
    second: int | None = None
    copy: Copy | None = None
    words: str = ""
    writer: str | None = None


def find_origin(
    group: Group, folder: Path, disk: OnDisk, earlier: Copy | None, *, check: Check, fits: Check,
    wanted: Callable[[Lineage], bool],
) -> Origin:
    """The newest state that any rank holds. All ranks call this.

    `folder`: the run directory. `earlier`: on rank 0 its newest checkpoint. `check`, `fits` and `wanted`: see
    `rankup.state.run.Options`. Raises UserError on all ranks where nothing whole is left of a run that has checkpoints,
    where other nodes hold copies of several runs, or where the newest state can't be gone on with.
    """
    own = [*_own_copies(group, folder, earlier), *_own_rescues(check, fits)]
    answers = group.gather([_sees(folder, disk.token), own])
    second = next((rank for rank, (sees, _) in enumerate(answers) if rank and not sees), None)
    candidates = [Candidate(rank, *values) for rank, (_, found) in enumerate(answers) for values in found]
    known = Lineage(**disk.lineage) if disk.lineage else None
    damaged: list[str] = []
    origin = Origin(known or Lineage(**disk.new), second)
    for line, one in in_order(candidates, _lines(group, folder, disk, known, candidates, wanted), group.hosts):
        found, problem = None, ""
        if group.rank == one.rank:
            try:
                found = earlier if one.kind == CHECKPOINT else load(Path(one.path), check)
                if found is not None and one.kind == SECOND_COPY:
                    fits(found.path, found.record)
            except UserError as error:
                problem = str(error)
        refused = found is not None and bool(problem)
        refused, problem = group.broadcast([refused, problem], source=one.rank)
        if refused:
            raise UserError(problem, printed_elsewhere=not group.is_rank0)
        if problem and one.kind == SECOND_COPY:
            damaged.append(f"rank {one.rank} on {group.hosts[one.rank]}: {problem}")
        elif problem and group.rank == one.rank:
            group.log.warning(f"a rescue was passed over: {problem}")
            shutil.rmtree(one.path, ignore_errors=True)
        if problem:
            continue
        origin.copy = share(found, group, source=one.rank)
        assert origin.copy is not None
        origin.words, origin.writer = _words(one, origin.copy, group.hosts, disk), one.attempt
        if line is not None and (known is None or line.number > known.number):  # than what rank 0's disk knows
            origin.lineage = line
        break
    if origin.copy is None and (disk.problem or damaged):
        raise UserError(_nothing_whole(disk.problem, damaged), printed_elsewhere=not group.is_rank0)
    for why in damaged if group.is_rank0 else []:
        group.log.warning(f"a second copy was passed over: {why}")
    _put_aside_others(folder, origin.lineage.run)
    return origin


def in_order(
    candidates: Iterable[Candidate], lines: Sequence[Lineage], hosts: Sequence[str]
) -> Iterator[tuple[Lineage | None, Candidate]]:
    """The copies in the order in which to try them: on the line of the run that knows most the newest first. In the end
    rank 0's own checkpoint, if nobody knows any better. `lines`: the one with the highest number first."""
    # Ranks of one node list the same files
    once = {(hosts[one.rank], one.path): one for one in sorted(candidates, key=lambda one: -one.rank)}
    left = sorted(once.values(), key=lambda one: (-one.step, one.kind, one.rank))
    for line in lines:
        on_it = [one for one in left if one.run == line.run and line.has(one.step, one.attempt)]
        left = [one for one in left if one not in on_it]
        yield from ((line, one) for one in on_it)
    yield from ((None, one) for one in left if one.kind == CHECKPOINT)


def _lines(
    group: Group, folder: Path, disk: OnDisk, known: Lineage | None, candidates: Iterable[Candidate],
    wanted: Callable[[Lineage], bool],
) -> list[Lineage]:
    """The run's line of attempts as rank 0's disk and the second copies know it, the one that knows most first.

    Raises UserError where rank 0's disk knows none, and the others know several runs.
    """
    others = [(one, Lineage(**one.lineage)) for one in candidates if one.lineage is not None]
    if known is not None:
        lines = [line for _, line in others if line.run == known.run]
        if disk.saved:  # else rank 0's checkpoints were removed, or are damaged: an earlier line is better than nothing
            lines = [line for line in lines if line.number > known.number]
        return sorted([known, *lines], key=lambda line: -line.number)
    if disk.saved:  # beside checkpoints without a run nobody can tell which is newer
        return []
    first = {line.run: one for one, line in reversed(others) if wanted(line)}
    if len(first) > 1:
        named = " and ".join(f"{o.path} on {group.hosts[o.rank]} (rank {o.rank})" for o in first.values())
        raise UserError(
            f"run_dir: {folder} must hold a run, or other nodes copies of one run, got nothing there and copies "
            f"of {len(first)} runs: {named}. Move away what you don't want, or set --fresh to start anew.",
            printed_elsewhere=not group.is_rank0,
        )
    return sorted((line for _, line in others if wanted(line)), key=lambda line: -line.number)


def _own_copies(group: Group, folder: Path, earlier: Copy | None) -> Iterator[list[Any]]:
    """What this rank's disk holds, as the fields of a candidate."""
    if earlier is not None:
        yield [CHECKPOINT, str(earlier.path), earlier.step, earlier.record["attempt"], earlier.record["run"]]
    for path in (path for copies in (folder / SECOND).glob("*") for path in list_copies(copies)):
        record: Any = read_json(path / STATE)
        lineage = Lineage.read(path)
        try:
            if lineage is None or lineage.run != record["run"]:
                raise ValueError
            yield [SECOND_COPY, str(path), int(record["step"]), str(record["attempt"]), lineage.run, lineage.values()]
        except (TypeError, LookupError, ValueError):
            group.log.warning(f"the copy {path} was passed over: its state.json or run.json is missing or damaged")


def _own_rescues(check: Check, fits: Check) -> Iterator[list[Any]]:
    """What this rank's node holds in memory, as the fields of a candidate."""
    for path in rescue.found():
        record: Any = read_json(path / STATE)
        with contextlib.suppress(TypeError, LookupError, ValueError):  # of another run, or with other settings
            check(path, record)
            fits(path, record)
            yield [RESCUE, str(path), int(record["step"]), str(record["attempt"]), str(record["run"])]


def _sees(folder: Path, token: str) -> bool:
    """Whether this rank finds in `folder` what rank 0 has just written there.

    Not waited for: where a network file system shows it later, the node keeps a copy that nobody needs.
    """
    return bool((read_json(folder / "lease.json") or {}).get("token") == token)


def _words(chosen: Candidate, copy: Copy, hosts: Sequence[str], disk: OnDisk) -> str:
    """For the user: what the run goes on from."""
    if chosen.kind == CHECKPOINT:
        return copy.path.name
    if chosen.kind == RESCUE:
        return f"step {copy.step}, rescued by {copy.record['written_by']}; no finished step was lost"
    has = "only damaged checkpoints" if disk.problem else "no checkpoint"
    has = f"none newer than step {disk.saved['step']}" if disk.saved else has
    where = f"{hosts[chosen.rank]} (rank {chosen.rank})"
    return f"step {copy.step}, the second copy on {where}: {hosts[0]} (rank 0) has {has}"


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


def _nothing_whole(problem: str, damaged: Sequence[str]) -> str:
    if not damaged:
        return problem
    copied = f"second copies: one must be whole, got only damaged ones: {'; '.join(damaged)}"
    return f"{problem} {copied}" if problem else f"{copied} Set --fresh to start anew, which keeps them aside."
