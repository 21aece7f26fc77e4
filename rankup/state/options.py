"""How a run is kept, as its caller wants it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rankup.agent.ends import job_of
from rankup.group.group import Group
from rankup.places.lineage import Lineage
from rankup.state.reading import Check, Copy, no_check


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a run is kept.

    `store`: an address below which the run must lie too, "" for none. `mirror`: a folder or an address that gets copies
    and may fail. `fresh`: put aside what is there, unless this launch began it. `save`: sync, async, or auto, see
    `rankup.state.saver`. `sharded`: ranks write their parts of split state, else rank 0 gathers it. `keep`: how many
    copies stay. `memory_every_steps`: from one part in memory to the next, see `rankup.state.parts`; 0 takes none that
    are there either. `compare_every_steps`: 0 says that ranks hold different states on purpose. Others: deadlines.

    `check`: called with path and record of a copy, and once it is read with the tracked state too; raises UserError for
    a copy of another program, ValueError for a damaged one. `fits`: the same, where this attempt may not go on from it.
    `finished`: whether nothing is left to do after a copy, given what `result.json` says; asked on rank 0.
    """

    store: str = ""
    mirror: str = ""
    fresh: bool = False
    save: str = "auto"
    sharded: bool = True
    keep: int = 2
    memory_every_steps: int | None = None
    compare_every_steps: int | None = None
    setup_timeout_s: float = 1800.0
    save_timeout_s: float = 600.0
    check: Check = no_check
    fits: Check = no_check
    finished: Callable[[Copy, dict[str, Any]], bool] = lambda copy, result: False


def may_take(other: Lineage, options: Options, group: Group) -> bool:
    """Whether this attempt may go on with the run `other`: where it begins anew, only if it is a restart that finds
    what its own launch began anew.

    That it is a restart does not suffice: a first attempt that was killed before it put the earlier run aside has left
    the earlier run. `launch` gives all its attempts ids of one job; where containers are started again (compose, pods),
    `start` names the start of them all.
    """
    return not options.fresh or of_this_job(other, group)


def of_this_job(other: Lineage, group: Group) -> bool:
    """Whether an attempt of this launch began the run `other`."""
    if group.launch.start:
        return other.start == group.launch.start
    if not group.restarted or group.launch.agent is None:
        return group.restarted
    return job_of(other.begun_by) == job_of(group.attempt)
