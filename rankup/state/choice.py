"""The copies from which an attempt may resume, wherever they lie, and the order in which to try them.

Every rank lists the copies that it can reach, without reading their bytes. A copy has the lineage of the attempt that
wrote it, because a node 0 that comes back with an empty disk does not know which run to resume.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rankup.agent.ends import job_of
from rankup.errors import UserError
from rankup.group.group import Group
from rankup.places.files import read_json
from rankup.places.lease import Lineage, before
from rankup.state.copies import STATE, about, list_copies, step_of
from rankup.state.memory import list_held
from rankup.state.saver import Options

SECOND = "copies"  # in the run directory of another node than rank 0's: copies by the id of their run
CHECKPOINT, STORE, MIRROR, PEER, RESCUE, PARTS = range(6)  # the first is preferred, of two of the same step


@dataclass(frozen=True, slots=True)
class Candidate:
    """A copy that `rank` can reach on `node`. `words`: what it is, for the user. `attempt`: the mark of the one that
    wrote it, "" as `run` is where that can't be read. `lineage`: of that attempt, for a copy that is not in rank 0's
    folder. `ranks`: whose part of the state it is, and `parts`: with which others it is whole."""

    rank: int
    node: str
    kind: int
    where: str
    words: str
    step: int
    attempt: str
    run: str
    lineage: dict[str, Any] | None = None
    ranks: Sequence[int] = ()
    parts: Sequence["Candidate"] = ()


def distinct(found: Iterable[Candidate], world_size: int) -> list[Candidate]:
    """Each copy once, though the ranks of a node list the same files; parts that together are of all ranks as one, and
    no others."""
    once = {(one.node, one.where): one for one in sorted(found, key=lambda one: -one.rank)}
    parts = defaultdict[tuple[int, str, str], list[Candidate]](list)
    for one in once.values():
        if one.kind == PARTS:
            parts[one.step, one.attempt, one.run].append(one)
    whole = [each for each in parts.values() if {rank for one in each for rank in one.ranks} >= {*range(world_size)}]
    return [one for one in once.values() if one.kind != PARTS] + [replace(each[0], parts=each) for each in whole]


def in_order(
    candidates: Iterable[Candidate], known: Lineage | None, wanted: Callable[[Lineage], bool], group: Group
) -> Iterator[tuple[Lineage | None, Candidate]]:
    """The copies in the order in which to try them, with the line that each is on: the newest on the line that knows
    most, then what else rank 0 has, then lines that know less. `known`: rank 0's line. Raises UserError where rank 0
    has nothing, and the others know several runs."""
    left = sorted(distinct(candidates, len(group.hosts)), key=lambda one: (-one.step, one.kind, one.rank))
    lines = [(one, Lineage(**one.lineage)) for one in left if one.lineage is not None]
    lines = [(one, line) for one, line in lines if (line.run == known.run if known else wanted(line))]

    def on(line: Lineage) -> Iterator[tuple[Lineage | None, Candidate]]:
        for one in [*left]:
            if not one.attempt or (one.run == line.run and line.has(one.step, one.attempt)):
                left.remove(one)
                yield line, one

    by_number = sorted((line for _, line in lines), key=lambda line: -line.number)
    if known is not None:
        for line in [*(line for line in by_number if line.number > known.number), known]:
            yield from on(line)
    yield from ((None, one) for one in [*left] if one.kind < PEER)
    first = {line.run: one for one, line in reversed(lines)}
    if len(first) > 1:
        named = " and ".join(f"{one.where} on {group.hosts[one.rank]} (rank {one.rank})" for one in first.values())
        raise UserError(
            f"run_dir: {group.run_dir} must hold a run, or other nodes copies of one run, got nothing there and copies "
            f"of {len(first)} runs: {named}. Move away what you don't want, or set --fresh to start anew.",
            printed_elsewhere=not group.is_rank0,
        )
    for line in by_number:
        yield from on(line)


def found_in(folder: Path) -> list[list[Any]]:
    """The copies in rank 0's folder, the newest first, as fields of a Candidate from `kind` on. What can't be read is
    one too, to be found damaged."""
    return [
        [CHECKPOINT, str(path), f"checkpoint {path.name}", *about(read_json(path / STATE), step_of(path))]
        for path in reversed(list_copies(folder))
    ]


def held_by(group: Group, folder: Path, options: Options) -> Iterator[list[Any]]:
    """What any rank may reach, in the same way: second copies on its disk, and what its node's memory holds of this run
    with these settings."""
    for path in (path for copies in (folder / SECOND).glob("*") for path in list_copies(copies)):
        record = read_json(path / STATE)
        of, line = about(record, step_of(path)), Lineage.of(record.get("lineage"))
        if line is not None:
            words = f"step {of[0]}, the second copy on {group.hosts[group.rank]} (rank {group.rank})"
            yield [PEER, str(path), words, *of, line.values()]
        else:
            group.log.warning(f"the copy {path} was passed over: its state.json is missing or damaged")
    for path in list_held():
        record = read_json(path / STATE)
        with contextlib.suppress(TypeError, LookupError, ValueError):
            options.check(path, record)
            of = step_of(path), str(record["attempt"]), str(record["run"])
            if "." not in path.parent.name:
                # Memory holds rescues of other jobs too: only this one's says which run to go on with
                line = Lineage.of(record.get("lineage"))
                known = line.values() if line is not None and group.launch.agent and of_this_job(line, group) else None
                yield [RESCUE, str(path), f"step {of[0]}, rescued by {record['written_by']}", *of, known]
            elif options.memory_every_steps != 0 and record["world_size"] == group.world_size:
                words = f"step {of[0]}, of which each rank's part was in memory"
                yield [PARTS, str(path), words, *of, None, [int(rank) for rank in record["ranks"]]]


def put_aside_others(folder: Path, run: str) -> None:
    """Move the second copies of other runs than this one to `before-<time>-...`, as --fresh does on rank 0's disk: else
    a node 0 that loses its disk before the new run's first checkpoint would go on with the earlier run."""
    for other in [path for path in (folder / SECOND).glob("*") if path.name != run and path.is_dir()]:
        with contextlib.suppress(OSError):  # another rank of this node has done it
            other.rename(f"{before(folder)}-{SECOND}-{other.name}")


def of_this_job(other: Lineage, group: Group) -> bool:
    """Whether an attempt of this launch began the run `other`. `launch` gives all its attempts ids of one job; where
    containers are started again (compose, pods), `start` names the start of them all."""
    if group.launch.start:
        return other.start == group.launch.start
    if not group.restarted or group.launch.agent is None:
        return group.restarted
    return job_of(other.begun_by) == job_of(group.attempt)
