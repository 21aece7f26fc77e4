"""Passes over loaders: what the loop has done since the last commit, and where each loader goes on after a resume."""

from collections.abc import Iterator
from typing import Any

from rankup.errors import UserError
from rankup.group.group import Group
from rankup.loop.batches import Source, Split, source_of
from rankup.loop.record import Position
from rankup.seeds import derive_seed


class Live:
    """What the loop has done since the last commit, and what it has yet to do again after a resume.

    `fetched`: batches since then. `weight`: of the last one. `active`: how many loops over batches or steps are
    running. `unequal`: the newest batches of loops that run together have different weights.
    """

    def __init__(self, position: Position, states: list[Any]) -> None:
        """`states`: of the loaders that can be asked for theirs, by pass; None for the others."""
        self.epoch = position.epoch
        self.streams: list[int] = []
        self.fetched = self.active = 0
        self.weight, self.weight_asked, self.weight_said, self.unequal = 1.0, False, False, False
        self.changes_to_repeat = position.changes
        self.line: dict[str, Any] | None = position.line
        self.has_epochs = False
        self.behind = False  # the run went on behind an epoch's last batch, and no step has come since
        self.running: list[Batches] = []
        self._sources: list[Source] = []
        self._skip, self._states = [*position.streams], states

    def asked_weight(self) -> float:
        """See `rankup.loop.job.Job.weight`."""
        self.weight_asked = True
        if self.unequal:
            raise UserError(
                "weight: the batches that are read together must have one weight, got several. Keep what job.batches "
                "returns, as in real = job.batches(loader), and multiply by real.weight."
            )
        return self.weight

    def after_step(self, group: Group) -> None:
        self.fetched, self.behind = 0, False
        if self.weight != 1.0 and not self.weight_asked and not self.weight_said:
            self.weight_said = True
            group.log.info(
                f"batches  a batch does not divide among {group.world_size} ranks: multiply the loss by job.weight, or "
                "the gradients are not exactly those of the whole batch"
            )

    def begin_epoch(self) -> None:
        self.epoch += 1
        self.streams, self._sources, self._skip, self._states = [], [], [], []

    def open(self, source: Source) -> tuple[int, int, Any]:
        """Another pass over a loader begins: its number in this epoch, how many batches to skip, and the loader's
        state."""
        number = len(self.streams)
        skip = self._skip[number] if number < len(self._skip) else 0
        state = self._states[number] if number < len(self._states) else None
        self.streams.append(skip)
        self._sources.append(source)
        return number, skip, state

    def states(self) -> list[Any]:
        """What the loaders say of themselves, by pass."""
        return [source.state() for source in self._sources]


class Batches:
    """What `job.batches` returns: to be iterated once an epoch. `len()` is the number of batches of a whole epoch.
    `weight`: `job.weight` for the newest batch of this loader, where several are read together."""

    def __init__(self, job: Any, loader: Any, *, any_order: bool) -> None:
        """`job`: a `rankup.loop.job.Job`, which imports this."""
        self._job, self._loader = job, loader
        # The same for each epoch: a loader's workers may outlive it
        known = job._sources.get(id(loader))
        source = known[1] if known else source_of(loader, job.rank, job.world_size, any_order=any_order)
        job._sources[id(loader)] = (loader, source)
        self._source, self.weight = source, 1.0

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        job, live, group = self._job, self._job.live, self._job.group
        job.begin()
        if not live.active and not live.fetched and live.streams and not live.has_epochs:
            with job.changing:  # what follows the last batch of a pass has run
                job._commit()
        number, skip, state = live.open(self._source)
        streams = live.streams
        seed = derive_seed(job.settings.seed, live.epoch, number)
        pairs = self._source.open(seed, epoch=live.epoch, skip=skip, state=state)
        if order := self._source.fingerprint():
            group.must_match("batches: the order of the samples", order, remedy=(
                "A sampler must draw the same on all ranks, or split by itself as DistributedSampler does."
            ))
        live.active += 1
        live.running.append(self)
        try:
            while True:
                job.stop_here()
                job.clock.start()
                with group.watch.clock.during("data"):  # a slow loader shows in the status
                    found = next(pairs, None)
                job.clock.has_batch()
                if found is None:
                    live.behind |= 0 < skip == streams[number]
                    return
                job.tracked.check_unchanged()
                batch, self.weight = found
                live.weight = self.weight
                together = [each for each in live.running if isinstance(each._source, Split)]
                live.unequal = any(each.weight != self.weight for each in together)
                live.fetched += 1
                streams[number] += 1
                job._seed()
                yield batch
        finally:
            live.active -= 1
            live.running.remove(self)
