"""What an attempt goes on from: rank 0's newest checkpoint, or what another rank's node holds and is newer.

Rank 0's own disk comes first, then the second copies of checkpoints (`train.run.copies`), then the rescues
(`train.run.rescue`), each only where it is of a later step than what was found before.
"""

from dataclasses import dataclass

from rankup.errors import UserError
from rankup.places.lineage import Lineage
from train.config import Config
from train.group.group import Group, on_rank0
from train.run import copies, rescue
from train.run.checkpoint import Checkpoint, share_checkpoint
from train.run.metrics import Progress
from train.run.on_disk import OnDisk, check_settings, is_wanted


@dataclass(slots=True)
class Origin:
    """`checkpoint`: the state to go on from, on all ranks, None at the beginning of a run. `words`: what it is.

    `writer`: the attempt that wrote it. `saved`: where the run stood at the
    newest checkpoint on rank 0's disk. `keeper`: the rank that keeps second copies, None where none is needed.
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

    Raises UserError on all ranks where nothing whole is left of a run that has checkpoints, or where the newest state
    can't be gone on with.
    """
    lineage = Lineage(**disk.lineage) if disk.lineage else None
    saved = Progress(*disk.saved or (0, 0))
    known = copies.Known(saved.step if disk.saved else None, lineage, disk.token)
    choice = copies.choose(group, known, wanted=lambda other: is_wanted(other, config, group))
    copied = choice.checkpoint
    if copied is None and disk.saved is None and (disk.problem or choice.damaged):
        raise UserError(_nothing_whole(disk.problem, choice.damaged), printed_elsewhere=not group.is_rank0)
    if group.is_rank0:
        for why in choice.damaged:
            group.log.warning(f"a second copy was passed over: {why}")
    if copied is not None and choice.offer is not None:
        on_rank0(group, lambda: check_settings(copied, config))
        if lineage is None or choice.offer.lineage.number > lineage.number:
            lineage = choice.offer.lineage
    origin = Origin(lineage or Lineage(**disk.new), saved, choice.keeper)
    copies.put_aside_others(group.run_dir, origin.lineage.run)
    newest = copied.step if copied else saved.step
    if rescued := rescue.choose(group, origin.lineage, config, above=newest, warn=group.log.warning):
        origin.words = f"step {rescued.step}, rescued by {rescued.state.written_by}; no finished step was lost"
        origin.checkpoint = rescued
    elif copied is not None and choice.offer is not None:
        has = "only damaged checkpoints" if disk.problem else "no checkpoint"
        has = f"none newer than step {saved.step}" if disk.saved else has
        origin.words = (
            f"step {copied.step}, the second copy on {group.hosts[choice.offer.rank]} (rank {choice.offer.rank}): "
            f"{group.hosts[0]} (rank 0) has {has}"
        )
        origin.checkpoint = copied
    else:
        origin.checkpoint = share_checkpoint(earlier, group)
        origin.words = origin.checkpoint.path.name if origin.checkpoint else ""
    origin.writer = origin.checkpoint.state.attempt if origin.checkpoint else None
    return origin
    return origin


def _nothing_whole(problem: str, damaged: list[str]) -> str:
    if not damaged:
        return problem
    copied = f"second copies: one must be whole, got only damaged ones: {'; '.join(damaged)}"
    return f"{problem} {copied}" if problem else f"{copied} Set --fresh to start anew, which keeps them aside."
