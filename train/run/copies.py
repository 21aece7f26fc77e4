"""Second copies of checkpoints: where nodes share no disk, rank 0's holds the only ones, and may be lost with its node.

The lowest rank that does not see rank 0's run directory keeps the newest checkpoint in its own as well, in
`copies/<run id>/step-00001234/`; `train.run.copier` writes it. A copy is found when the ranks meet, whichever of them
is on that node by then, and taken where rank 0's disk holds nothing as new. With it lies the lineage of the attempt
that wrote it: a node 0 that comes back with an empty disk does not know which run it is to go on with.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankup.errors import UserError
from rankup.places.lineage import Lineage, before
from train.group.group import Group
from train.process.status import read_json
from train.run.checkpoint import Checkpoint, list_checkpoints, load_checkpoint, share_checkpoint

FOLDER = "copies"


@dataclass(frozen=True, slots=True)
class Offer:
    """A copy on the disk of `rank`, whose bytes nobody has looked at. `attempt`: the mark of the one that wrote it."""

    rank: int
    path: str
    step: int
    attempt: str
    lineage: Lineage


@dataclass(frozen=True, slots=True)
class Known:
    """What rank 0's disk says. `step`: of its newest good checkpoint, None where it holds none.

    `lineage` is None where its disk holds no run. `token`: what stands in the lease that rank 0 has just taken.
    """

    step: int | None
    lineage: Lineage | None
    token: str


@dataclass(frozen=True, slots=True)
class Choice:
    """`keeper`: the rank that is to keep the second copies, None where all ranks see rank 0's disk.

    `checkpoint`: the copy to go on from, on all ranks, and `offer` where it came from; both None where none is to be
    taken. `damaged`: those that were passed over, and why.
    """

    keeper: int | None
    checkpoint: Checkpoint | None
    offer: Offer | None
    damaged: list[str]


def choose(group: Group, known: Known, *, wanted: Callable[[Lineage], bool]) -> Choice:
    """The newest copy that any rank's disk holds, if the run is to go on from it. All ranks call this.

    `wanted`: whether a run that rank 0's disk knows nothing of may be gone on with.
    Raises UserError on all ranks where there are several such runs.
    """
    own = [[str(path), step, attempt, lineage.values()] for path, step, attempt, lineage in _find(group)]
    answers = group.gather([_sees(group.run_dir, known.token), own])
    keeper = next((rank for rank, (sees, _) in enumerate(answers) if rank and not sees), None)
    offers = [
        Offer(rank, path, step, attempt, Lineage(**values))
        for rank, (_, found) in enumerate(answers) for path, step, attempt, values in found
    ]
    fitting = [offer for offer in offers if _fits(offer, known, wanted)]
    _refuse_several_runs(group, fitting)
    damaged: list[str] = []
    for offer in sorted(fitting, key=lambda offer: (-offer.step, offer.rank)):
        problem, found = "", None
        if group.rank == offer.rank:
            try:
                found = load_checkpoint(Path(offer.path))
            except UserError as error:
                problem = str(error)
        if problem := group.broadcast(problem, source=offer.rank):
            damaged.append(f"rank {offer.rank} on {group.hosts[offer.rank]}: {problem}")
            continue
        return Choice(keeper, share_checkpoint(found, group, source=offer.rank), offer, damaged)
    return Choice(keeper, None, None, damaged)


def put_aside_others(run_dir: Path, run: str) -> None:
    """Move the copies of other runs than this one to `before-<time>/`, as --fresh does on rank 0's disk.

    Else a node 0 that loses its disk before the new run's first checkpoint would go on with the earlier run. The ranks
    of a node do this at the same time: one of them moves a folder, the others find it gone.
    """
    for folder in (run_dir / FOLDER).glob("*"):
        if folder.name == run or not folder.is_dir():
            continue
        moved = before(run_dir) / FOLDER
        with contextlib.suppress(OSError):
            moved.mkdir(parents=True, exist_ok=True)
            folder.rename(moved / folder.name)
        with contextlib.suppress(OSError):  # another rank was faster, and this folder is still empty
            moved.rmdir()
            moved.parent.rmdir()


def _sees(run_dir: Path, token: str) -> bool:
    """Whether this rank finds in `run_dir` what rank 0 has just written there.

    Not waited for: where a network file system shows it later, the node keeps a copy that nobody needs.
    """
    return bool((read_json(run_dir / "lease.json") or {}).get("token") == token)


def _find(group: Group) -> Iterator[tuple[Path, int, str, Lineage]]:
    """The copies on this rank's disk: path, step, the attempt that wrote it, and its lineage."""
    for path in (path for folder in (group.run_dir / FOLDER).glob("*") for path in list_checkpoints(folder)):
        state: Any = read_json(path / "state.json")
        lineage = Lineage.read(path)
        try:
            if lineage is None or lineage.run != state["run"]:
                raise ValueError
            yield path, int(state["step"]), str(state["attempt"]), lineage
        except (TypeError, LookupError, ValueError):
            group.log.warning(f"the copy {path} was passed over: its state.json or run.json is missing or damaged")


def _fits(offer: Offer, known: Known, wanted: Callable[[Lineage], bool]) -> bool:
    """Whether the run goes on from this copy if it is the newest whole one."""
    if known.lineage is None:  # node 0 came back empty; beside checkpoints without a run nobody can tell which is newer
        return known.step is None and wanted(offer.lineage)
    if offer.lineage.run != known.lineage.run:
        return False
    if known.step is None:  # they were removed, or are damaged
        return True
    # A node that was away during later attempts may hold what the run went on without. A higher number: the same of
    # rank 0's disk, because another node was node 0 meanwhile
    of_this_line = known.lineage.has(offer.step, offer.attempt) or offer.lineage.number > known.lineage.number
    return offer.step > known.step and of_this_line


def _refuse_several_runs(group: Group, offers: list[Offer]) -> None:
    first = {offer.lineage.run: offer for offer in reversed(offers)}
    if len(first) > 1:
        named = " and ".join(f"{o.path} on {group.hosts[o.rank]} (rank {o.rank})" for o in first.values())
        raise UserError(
            f"run_dir: {group.run_dir} must hold a run, or other nodes copies of one run, got nothing there and copies "
            f"of {len(first)} runs: {named}. Move away what you don't want, or set --fresh to start anew.",
            printed_elsewhere=not group.is_rank0,
        )
