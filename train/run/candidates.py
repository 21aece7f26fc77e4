"""Where an attempt goes on: the newest whole copy on the run's line of attempts, wherever it lies.

Every rank lists the copies that it can read: rank 0 the newest checkpoint in its run directory, to which what is at a
second place was fetched; each rank the second copies of checkpoints on its disk (written by `train.run.copier`) and the
rescues in its node's memory (`train.run.rescue`). A second copy has the lineage of the attempt that wrote it beside it:
a node 0 that comes back with an empty disk does not know which run it is to go on with.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankup.errors import UserError
from rankup.group.group import Group, on_rank0
from rankup.places.files import read_json
from rankup.places.lineage import Lineage, before
from train.config import Config
from train.run import rescue
from train.run.checkpoint import Checkpoint, list_checkpoints, load_checkpoint, share_checkpoint
from train.run.metrics import Progress
from train.run.on_disk import COPIES, OnDisk, check_settings, is_wanted

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


@dataclass(slots=True)
class Origin:
    """`checkpoint`: the state to go on from, on all ranks, None at the beginning of a run. `words`: what it is.

    `writer`: the attempt that wrote it. `saved`: where the run stood at the newest checkpoint on rank 0's disk.
    `keeper`: the rank that keeps second copies, None where none is needed.
    """

    lineage: Lineage
    saved: Progress
    keeper: int | None = None
    checkpoint: Checkpoint | None = None
    words: str = ""
    writer: str | None = None

    def second_copies(self, group: Group, *, replicated: bool) -> str:
        """For the user: who keeps the newest checkpoint a second time, "" where all nodes share rank 0's disk.

        `replicated`: every rank holds the whole state, see `train.parallel.method`.
        """
        if self.keeper is None:
            return ""
        if not replicated:
            return "copies none: the nodes share no disk, and no rank but 0 has whole checkpoints: its disk alone does"
        who = f"rank {self.keeper} on {group.hosts[self.keeper]}"
        none = "" if self.checkpoint else "; none of them holds one, so the run begins at step 0"
        return f"copies {who} keeps the newest checkpoint too: the nodes share no disk{none}"


def find_origin(config: Config, group: Group, disk: OnDisk, earlier: Checkpoint | None) -> Origin:
    """The newest state that any rank holds. All ranks call this. `earlier`: rank 0's newest checkpoint, on rank 0.

    Raises UserError on all ranks where nothing whole is left of a run that has checkpoints, where other nodes hold
    copies of several runs, or where the newest state can't be gone on with.
    """
    own = [*_own_copies(group, earlier), *_own_rescues(config)]
    answers = group.gather([_sees(group.run_dir, disk.token), own])
    keeper = next((rank for rank, (sees, _) in enumerate(answers) if rank and not sees), None)
    candidates = [Candidate(rank, *values) for rank, (_, found) in enumerate(answers) for values in found]
    known = Lineage(**disk.lineage) if disk.lineage else None
    lines = _lines(group, disk, known, candidates, wanted=lambda other: is_wanted(other, config, group))
    damaged: list[str] = []
    chosen: Candidate | None = None
    newer: Lineage | None = None  # than what rank 0's disk knows
    shared: Checkpoint | None = None
    for line, candidate in in_order(candidates, lines, group.hosts):
        found, problem = None, ""
        if group.rank == candidate.rank:
            found, problem = _read(candidate, earlier)
        if problem := group.broadcast(problem, source=candidate.rank):
            if candidate.kind == SECOND_COPY:
                damaged.append(f"rank {candidate.rank} on {group.hosts[candidate.rank]}: {problem}")
            elif group.rank == candidate.rank:
                group.log.warning(f"a rescue was passed over: {problem}")
                shutil.rmtree(candidate.path, ignore_errors=True)
            continue
        chosen, shared = candidate, share_checkpoint(found, group, source=candidate.rank)
        newer = line if line is not None and (known is None or line.number > known.number) else None
        break
    if chosen is None and (disk.problem or damaged):
        raise UserError(_nothing_whole(disk.problem, damaged), printed_elsewhere=not group.is_rank0)
    for why in damaged if group.is_rank0 else []:
        group.log.warning(f"a second copy was passed over: {why}")
    origin = Origin(newer or known or Lineage(**disk.new), Progress(*disk.saved or (0, 0)), keeper, shared)
    if chosen is not None and shared is not None:
        if chosen.kind == SECOND_COPY:
            on_rank0(group, lambda: check_settings(shared, config))
        origin.words, origin.writer = _words(chosen, shared, group, disk), chosen.attempt
    _put_aside_others(group.run_dir, origin.lineage.run)
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
    group: Group, disk: OnDisk, known: Lineage | None, candidates: Iterable[Candidate],
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
            f"run_dir: {group.run_dir} must hold a run, or other nodes copies of one run, got nothing there and copies "
            f"of {len(first)} runs: {named}. Move away what you don't want, or set --fresh to start anew.",
            printed_elsewhere=not group.is_rank0,
        )
    return sorted((line for _, line in others if wanted(line)), key=lambda line: -line.number)


def _own_copies(group: Group, earlier: Checkpoint | None) -> Iterator[list[Any]]:
    """What this rank's disk holds, as the fields of a candidate."""
    if earlier is not None:
        yield [CHECKPOINT, str(earlier.path), earlier.step, earlier.state.attempt, earlier.state.run]
    for path in (path for folder in (group.run_dir / COPIES).glob("*") for path in list_checkpoints(folder)):
        state: Any = read_json(path / "state.json")
        lineage = Lineage.read(path)
        try:
            if lineage is None or lineage.run != state["run"]:
                raise ValueError
            yield [SECOND_COPY, str(path), int(state["step"]), str(state["attempt"]), lineage.run, lineage.values()]
        except (TypeError, LookupError, ValueError):
            group.log.warning(f"the copy {path} was passed over: its state.json or run.json is missing or damaged")


def _own_rescues(config: Config) -> Iterator[list[Any]]:
    """What this rank's node holds in memory, as the fields of a candidate."""
    for path, state in rescue.found(config):
        yield [RESCUE, str(path), int(state["step"]), str(state["attempt"]), str(state["run"])]


def _sees(run_dir: Path, token: str) -> bool:
    """Whether this rank finds in `run_dir` what rank 0 has just written there.

    Not waited for: where a network file system shows it later, the node keeps a copy that nobody needs.
    """
    return bool((read_json(run_dir / "lease.json") or {}).get("token") == token)


def _read(candidate: Candidate, earlier: Checkpoint | None) -> tuple[Checkpoint | None, str]:
    """The checkpoint, and why it can't be used, or ""."""
    if candidate.kind == CHECKPOINT:
        return earlier, ""
    try:
        return load_checkpoint(Path(candidate.path)), ""
    except UserError as error:
        return None, str(error)


def _words(chosen: Candidate, shared: Checkpoint, group: Group, disk: OnDisk) -> str:
    """For the user: what the run goes on from."""
    if chosen.kind == CHECKPOINT:
        return shared.path.name
    if chosen.kind == RESCUE:
        return f"step {shared.step}, rescued by {shared.state.written_by}; no finished step was lost"
    has = "only damaged checkpoints" if disk.problem else "no checkpoint"
    has = f"none newer than step {disk.saved[0]}" if disk.saved else has
    return (
        f"step {shared.step}, the second copy on {group.hosts[chosen.rank]} (rank {chosen.rank}): {group.hosts[0]} "
        f"(rank 0) has {has}"
    )


def _put_aside_others(run_dir: Path, run: str) -> None:
    """Move the second copies of other runs than this one to `before-<time>/`, as --fresh does on rank 0's disk.

    Else a node 0 that loses its disk before the new run's first checkpoint would go on with the earlier run. The ranks
    of a node do this at the same time: one of them moves a folder, the others find it gone.
    """
    for folder in (run_dir / COPIES).glob("*"):
        if folder.name == run or not folder.is_dir():
            continue
        moved = before(run_dir) / COPIES
        with contextlib.suppress(OSError):
            moved.mkdir(parents=True, exist_ok=True)
            folder.rename(moved / folder.name)
        with contextlib.suppress(OSError):  # another rank was faster, and this folder is still empty
            moved.rmdir()
            moved.parent.rmdir()


def _nothing_whole(problem: str, damaged: Sequence[str]) -> str:
    if not damaged:
        return problem
    copied = f"second copies: one must be whole, got only damaged ones: {'; '.join(damaged)}"
    return f"{problem} {copied}" if problem else f"{copied} Set --fresh to start anew, which keeps them aside."
