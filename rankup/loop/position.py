"""Where the loop is between two commits, and what it still has to repeat after a resume. `Position`, which a copy
holds, is in `rankup.observe.metrics`, because reports need it too."""

from dataclasses import dataclass
from typing import Any

from rankup.observe.metrics import Position

OVER = -1  # the number of batches of a pass that has ended


@dataclass
class CyclePlace:
    """Where a `job.cycle` is. `batches`, `trace`: of the pass that follows the finished `passes`. `state`: the loader's
    state in the copy, until this attempt reads the cycle. `source`: from then on, what it reads."""

    passes: int = 0
    batches: int = 0
    trace: int | None = 0
    state: Any = None
    source: Any = None


class LoopState:
    """The position of the loop, newer than the last commit, and what the loop still has to repeat after a resume.

    `streams`, `traces`, `loaders`: as in `Position`. `rank_before`, `ranks_before`: the rank that wrote the copy, and
    the number of ranks then. `begun`: the `Batches` of these loaders. `sources`: the sources of the
    passes that this attempt has begun, by number. `left`: for the copy's other passes, the loaders' states in the copy.
    `running`: the loops over batches or steps that have not ended. `fetched`: batches since the last commit. `weight`:
    `job.weight`. `batch_weight`: the weight of the newest batch of `job.batches`, for `weight` after an evaluation.
    `changes_to_repeat`: blocks of `job.change` whose changes the copy already holds.
    `left_after`: how many batches of its newest pass the loop took before it left that pass by `break`, or 0; None once
    that was said. `cycles`: where each `job.cycle` is.
    `began_at`: the step at which the newest pass of the loop's body began.
    `may_hold`: the `Batches` of the newest pass if code may hold batches of it, see `Step`.
    """

    def __init__(self, position: Position, states: list[Any], record: dict[str, Any]) -> None:
        """`states`: the loaders' states by pass, None for a loader without one. `record`: the copy's, {} for none."""
        self.epoch, self.has_epochs = position.epoch, False
        self.streams, self.loaders, self.traces = [*position.streams], [*position.loaders], [*position.traces]
        self.rank_before, self.ranks_before = position.rank, record.get("world_size", 0)
        self.begun, self.sources, self.stateful = list[Any](), dict[int, Any](), bool(states)
        self.left = {n: states[n] if n < len(states) else None for n in range(len(self.streams))}
        self.cycles = [CyclePlace(*place) for place in position.cycles]  # type: ignore[arg-type]
        for place, state in zip(self.cycles, states[len(self.streams) :], strict=False):
            place.state = state
        self.running: list[Any] = []
        self.fetched, self.weight, self.batch_weight, self.weight_asked = 0, 1.0, 1.0, False
        self.changes_to_repeat = position.changes
        self.left_after: int | None = 0
        self.may_hold: Any = None
        self.began_at = 0

    def begin_epoch(self) -> None:
        self.epoch += 1
        self.streams, self.loaders, self.traces, self.begun, self.sources, self.left = [], [], [], [], {}, {}

    def begin_pass(self, batches: Any, source: Any) -> tuple[int, Any]:
        """Begin the loader's next pass of the copy, or else a new pass. Return its number and the loader's state."""
        if batches not in self.begun:
            self.begun.append(batches)
        loader = self.begun.index(batches)
        number = next((n for n in self.left if self.loaders[n] == loader), len(self.streams))
        if number == len(self.streams):
            self.streams.append(0)
            self.traces.append(0)
            self.loaders.append(loader)
        self.sources[number], self.stateful = source, self.stateful or source.stateful
        return number, self.left.pop(number, None)

    def loader_states(self) -> list[Any]:
        """Return the loaders' states by pass, None for a loader without one; [] if no loader has a state."""
        if not self.stateful:
            return []
        # A pass that has ended has no state: its loader begins anew
        said = {n: state for n, state in self.left.items() if self.streams[n] != OVER}
        said |= {n: _state_of(each) for n, each in self.sources.items()}
        cycles = [each.state if each.source is None else _state_of(each.source) for each in self.cycles]
        return [*(said.get(number) for number in range(len(self.streams))), *cycles]

    def begin_cycle(self, number: int, source: Any) -> tuple[CyclePlace, Any]:
        """Begin to read this cycle. Return its place, and the loader's state there."""
        while number >= len(self.cycles):
            self.cycles.append(CyclePlace())
        place = self.cycles[number]
        place.source, self.stateful = source, self.stateful or source.stateful
        return place, place.state


def _state_of(source: Any) -> Any:
    if not source.stateful:
        return None
    return source.loader.state_dict() if source.state is None else source.state
