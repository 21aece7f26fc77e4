"""How a run is kept, as its caller wants it."""

from collections.abc import Callable
from dataclasses import dataclass

from rankup.places.lineage import Lineage
from rankup.state.reading import Check, Copy, no_check


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a run is kept.

    `store`: an address below which the run must lie too, "" for none. `mirror`: a folder or an address that gets copies
    and may fail. `fresh`: put aside what is there, unless `wanted` says that it is this launch's own. `how`: sync,
    async, or auto, see `rankup.state.saver`. `sharded`: each rank writes its part of a copy. `keep`: how many copies
    stay. `setup_s`, `save_s`: deadlines. `start`: names the start of a job whose containers are started again.
    `memory_every`: steps from one part in memory to the next, see `rankup.state.parts`; 0 takes none that are there
    either.

    `check`: looks at the record of a copy; raises UserError where it is of another kind, and ValueError where it is
    damaged. `fits`: the same, where this attempt may not go on from it. `finished`: whether nothing is left to do after
    a copy; asked on rank 0.
    """

    store: str = ""
    mirror: str = ""
    fresh: bool = False
    how: str = "auto"
    sharded: bool = False
    keep: int = 2
    memory_every: int | None = None
    setup_s: float = 600.0
    save_s: float = 600.0
    start: str = ""
    check: Check = no_check
    fits: Check = no_check
    wanted: Callable[[Lineage], bool] = lambda other: False
    finished: Callable[[Copy], bool] = lambda copy: False

    def may_take(self, other: Lineage) -> bool:
        """Whether this attempt may go on with the run `other`."""
        return not self.fresh or self.wanted(other)
