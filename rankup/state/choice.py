"""The copies from which an attempt may resume, wherever they are, and the order in which to try them.

Every rank lists the copies that it can reach, without reading their bytes. A copy has the lineage of the attempt that
wrote it, because a node 0 that comes back with an empty disk does not know which run to resume.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from rankup.agent.ends import job_of
from rankup.errors import UserError, reason
from rankup.group.group import Group
from rankup.places.files import read_json
from rankup.places.lease import Lineage, aside_folder
from rankup.state.copies import STATE, list_copies, step_of
from rankup.state.memory import list_held
from rankup.state.place import PARTS, PEER, RESCUE, SECOND, Candidate, Folder, Place
from rankup.state.saver import Options


def distinct(found: Iterable[Candidate], world_size: int) -> list[Candidate]:
    """Return each copy once, although the ranks of a node list the same files. Parts that together cover all ranks
    become one candidate; incomplete sets of parts are dropped."""
    # A new agent does not know that a copy is of this job, and another agent on its machine does
    known_last = sorted(found, key=lambda one: (one.lineage is not None, -one.rank))
    once = {(one.node, one.where): one for one in known_last}
    parts = defaultdict[tuple[int, str, str], list[Candidate]](list)
    for one in once.values():
        if one.kind == PARTS:
            parts[one.step, one.attempt, one.run].append(one)
    whole = [each for each in parts.values() if {rank for one in each for rank in one.ranks} >= {*range(world_size)}]
    first = [max(each, key=lambda one: one.lineage is not None) for each in whole]
    sets = [replace(one, parts=each) for one, each in zip(first, whole, strict=True)]
    return [one for one in once.values() if one.kind != PARTS] + sets


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


class SecondCopies(Place):
    """The second copies on this node's disk, of all runs in the run directory."""

    def __init__(self, group: Group) -> None:
        self.group, self.path = group, group.run_dir / SECOND

    def of(self, run: str) -> Folder:
        # Keep no other copy: a copy of a later step would be of an attempt that is not on the run's line
        return Folder(self.path / run, keep=0)

    def list(self) -> Iterator[Candidate]:
        on = f"the second copy on {self.group.hosts[self.group.rank]} (rank {self.group.rank})"
        for path in (path for copies in self.path.glob("*") for path in list_copies(copies)):
            record = read_json(path / STATE)
            if (line := Lineage.of(record.get("lineage"))) is not None:
                words = f"step {step_of(path)}, {on}"
                yield Candidate.of(path, record, kind=PEER, words=words, lineage=line.values())
            else:
                self.group.log.warning(f"the copy {path} was skipped: its state.json is missing or damaged")

    def put_aside_others(self, run: str) -> None:
        """Move the copies of all runs but `run` to `before-<time>-...`, as --fresh does on rank 0's disk. Otherwise a
        node 0 that loses its disk before the new run's first checkpoint would resume the earlier run."""
        for other in [path for path in self.path.glob("*") if path.name != run and path.is_dir()]:
            with contextlib.suppress(OSError):  # another rank of this node has moved it
                aside = other.rename(f"{aside_folder(self.group.run_dir)}-{SECOND}-{other.name}")
                self.group.log.warning(f"copies this node's second copies of an earlier run were moved to {aside}")


class NodeMemory(Place):
    """The rescues and parts in this node's memory, of all runs of this user, that fit the options."""

    def __init__(self, group: Group, options: Options) -> None:
        self.group, self.options = group, options
        self.skipped = list[tuple[str, int, str]]()  # run, step, and a line that says which copy was skipped and why

    def list(self) -> Iterator[Candidate]:
        for path in list_held():
            run, dot, _ = path.parent.name.partition(".")
            where = f"{'a part' if dot else 'the rescue'} in the memory of {self.group.hosts[self.group.rank]}"
            try:
                if not (record := read_json(path / STATE)):
                    raise ValueError(f"{path}: its {STATE} is missing or damaged")
                self.options.check(path, record)
                if not (one := Candidate.of(path, record)).attempt:
                    continue
                # Memory also holds copies of other jobs. Only a copy of this job may say which run to resume
                line = Lineage.of(record.get("lineage"))
                ours = line is not None and self._is_of_this_job(one, line)
                one = replace(one, lineage=line.values() if line and ours else None)
                if not dot:
                    yield replace(one, kind=RESCUE, words=f"step {one.step}, rescued by {record['written_by']}")
                elif self.options.memory_every_steps == 0:
                    continue
                elif (ranks := record["world_size"]) == self.group.world_size:
                    words, held = f"step {one.step}, whose parts were all in memory", map(int, record["ranks"])
                    yield replace(one, kind=PARTS, words=words, ranks=[*held])
                else:
                    where = "parts in memory"  # of all nodes: one line
                    raise ValueError(f"they are of step {one.step} of {ranks} ranks, got {self.group.world_size}")
            except (TypeError, LookupError, ValueError) as error:
                why = str(error) if isinstance(error, ValueError) else reason(error)
                self.skipped.append((run, step_of(path), f"skipped {where}: {why}"))

    def _is_of_this_job(self, one: Candidate, line: Lineage) -> bool:
        """Return whether this launch began the run of copy `one`, or a rank of one of its agents wrote the copy."""
        agent = self.group.rank_env.agent
        return agent is not None and (of_this_job(line, self.group) or job_of(one.attempt) in self.group.jobs)


def of_this_job(other: Lineage, group: Group) -> bool:
    """Return whether this launch began the run `other`. If only node 0 was started again, with --fresh too, that is the
    same launch. Launchers without agents give a launch no id, and only tell of restarts."""
    start = group.rank_env.start
    return other.start in {start, *group.jobs} if start else group.restarted
