"""The copies from which an attempt may resume, wherever they are, and the order in which to try them.

Every rank lists the copies that it can reach, without reading their bytes. A copy has the lineage of the attempt that
wrote it, because a node 0 that comes back with an empty disk does not know which run to resume.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rankup.errors import UserError
from rankup.group.group import Group
from rankup.places.files import read_json
from rankup.places.lease import Lineage, aside_folder
from rankup.state.copies import STATE, identity_of, list_copies, step_of
from rankup.state.memory import list_held
from rankup.state.saver import Options

SECOND = "copies"  # folder for second copies, by the id of their run, in the run directory of a node without rank 0
CHECKPOINT, STORE, MIRROR, PEER, RESCUE, PARTS = range(6)  # kinds of copies; at the same step the lower kind wins


@dataclass(frozen=True, slots=True)
class Candidate:
    """A copy that `rank` can reach on `node`. `words`: a description for the user. `attempt` is the mark of the attempt
    that wrote the copy; `attempt` and `run` are "" if they can't be read. `lineage`: the lineage of that attempt, for a
    copy outside rank 0's folder. A part has `ranks`, whose state it is. All parts of a step become one with `parts`."""

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
    """Return each copy once, although the ranks of a node list the same files. Parts that together cover all ranks
    become one candidate; incomplete sets of parts are dropped."""
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
    """Yield the copies in the order in which to try them, each with its lineage: copies on the newest lineage, then
    rank 0's other copies, then copies on older lineages, each newest first. `known`: rank 0's lineage. `wanted`:
    whether to resume a run. Raises UserError if rank 0 has no copy and the other ranks know several runs."""
    ordered = sorted(distinct(candidates, len(group.hosts)), key=lambda one: (-one.step, one.kind, one.rank))
    left = dict(enumerate(ordered))
    newest = dict[str, tuple[Candidate, Lineage]]()  # on each line: a thousand nodes hold copies on the same few lines
    for one in ordered:
        if one.lineage is not None and (text := str(one.lineage)) not in newest:
            newest[text] = one, Lineage(**one.lineage)
    lines = [(one, line) for one, line in newest.values() if (line.run == known.run if known else wanted(line))]

    def on(line: Lineage) -> Iterator[tuple[Lineage | None, Candidate]]:
        for number, one in [*left.items()]:
            if not one.attempt or (one.run == line.run and line.has(one.step, one.attempt)):
                del left[number]
                yield line, one

    by_number = sorted((line for _, line in lines), key=lambda line: -line.number)
    if known is not None:
        for line in [*(line for line in by_number if line.number > known.number), known]:
            yield from on(line)
    yield from ((None, one) for one in [*left.values()] if one.kind < PEER)
    first = {line.run: one for one, line in reversed(lines)}
    if len(first) > 1:
        named = " and ".join(f"{one.where} on {group.hosts[one.rank]} (rank {one.rank})" for one in first.values())
        raise UserError(
            f"run_dir: {group.run_dir} must hold a run, unless other nodes hold copies of a single run, got no run and "
            f"copies of {len(first)} runs: {named}. Move away what you don't want, or set --fresh to start anew.",
            printed_elsewhere=not group.is_rank0,
        )
    for line in by_number:
        yield from on(line)


def found_in(folder: Path) -> list[list[Any]]:
    """Return the copies in rank 0's folder, newest first, each as the fields of a Candidate from `kind` on. Unreadable
    copies are included, so that they are later reported as damaged."""
    return [
        [CHECKPOINT, str(path), f"checkpoint {path.name}", *identity_of(read_json(path / STATE), step_of(path))]
        for path in reversed(list_copies(folder))
    ]


def held_by(group: Group, folder: Path, options: Options) -> Iterator[list[Any]]:
    """Yield, in the same form, the copies that any rank may reach: second copies on its disk, and the rescues and parts
    in its node's memory that fit the options."""
    for path in (path for copies in (folder / SECOND).glob("*") for path in list_copies(copies)):
        record = read_json(path / STATE)
        of, line = identity_of(record, step_of(path)), Lineage.of(record.get("lineage"))
        if line is not None:
            words = f"step {of[0]}, the second copy on {group.hosts[group.rank]} (rank {group.rank})"
            yield [PEER, str(path), words, *of, line.values()]
        else:
            group.log.warning(f"the copy {path} was skipped: its state.json is missing or damaged")
    for path in list_held():
        record = read_json(path / STATE)
        with contextlib.suppress(TypeError, LookupError, ValueError):
            options.check(path, record)
            of = step_of(path), str(record["attempt"]), str(record["run"])
            if "." not in path.parent.name:
                # Memory also holds rescues of other jobs. Only a rescue of this job may say which run to resume
                line = Lineage.of(record.get("lineage"))
                ours = line is not None and group.rank_env.agent and of_this_job(line, group)
                known = line.values() if line is not None and ours else None
                yield [RESCUE, str(path), f"step {of[0]}, rescued by {record['written_by']}", *of, known]
            elif options.memory_every_steps != 0 and record["world_size"] == group.world_size:
                words = f"step {of[0]}, whose parts were all in memory"
                yield [PARTS, str(path), words, *of, None, [int(rank) for rank in record["ranks"]]]


def put_aside_others(folder: Path, run: str) -> None:
    """Move the second copies of all runs but `run` to `before-<time>-...`, as --fresh does on rank 0's disk. Otherwise
    a node 0 that loses its disk before the new run's first checkpoint would resume the earlier run."""
    for other in [path for path in (folder / SECOND).glob("*") if path.name != run and path.is_dir()]:
        with contextlib.suppress(OSError):  # another rank of this node has moved it
            other.rename(f"{aside_folder(folder)}-{SECOND}-{other.name}")


def of_this_job(other: Lineage, group: Group) -> bool:
    """Return whether this launch began the run `other`. Launchers without agents give a launch no id, and only tell of
    restarts."""
    return other.start == group.rank_env.start if group.rank_env.start else group.restarted
