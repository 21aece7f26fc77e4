"""`job.cycle`: a loader that begins again whenever it ends, for loops whose length does not depend on it.

A pass of a cycle is like an epoch of this loader alone: its order depends on the seed, the number of the cycle and the
number of the pass. A copy holds only the place in the newest pass, so a resume skips no finished pass.
"""

from collections.abc import Iterator
from typing import Any

from rankup.errors import UserError
from rankup.loop.passes import Batches
from rankup.seeds import derive_seed

CYCLE = -3  # takes the place of the epoch in the seed of a pass


class Cycle:
    """What `job.cycle` returns. Call `next` on it inside a loop over `job.steps` or `job.batches`."""

    def __init__(self, job: Any, batches: Batches, number: int) -> None:
        """`job`: a `rankup.loop.job.Job`. `number`: how many cycles the loop had before."""
        self._job, self._batches, self._number, self.source = job, batches, number, batches.source
        self._found = self._read()

    @property
    def weight(self) -> float:
        """`job.weight` for the newest batch of this cycle, if a loop reads several loaders together."""
        return self._batches.weight

    def __iter__(self) -> "Cycle":
        return self

    def __next__(self) -> Any:
        if not self._job.loop.running:
            raise UserError(
                "cycle: next must be called in a loop over job.steps or job.batches, got a call outside of these: a "
                "resume would not know how far another loop was. Write `for step in job.steps(total):`."
            )
        return next(self._found)

    def _read(self) -> Iterator[Any]:
        job, batches, source = self._job, self._batches, self.source
        batches.begin()
        place, state = job.loop.begin_cycle(self._number, source)
        taken = [0]
        while True:
            seed = derive_seed(job.settings.seed, CYCLE, self._number, place.passes)
            fetches = batches.open(seed, place.passes, place.batches, place.trace, state)
            while (found := batches.take(fetches)) is not None:
                batch, place.trace = found
                place.batches += source.stride
                step = job.position.step
                yield batch
                batches.note_step(step, taken)
            if source.uneven:
                job.group.end_pass(place.batches // source.stride)
            if not place.batches:
                raise UserError(f"cycle: {source.name()} must yield a batch in each pass, got none. Fill it.")
            place.passes, place.batches, place.trace, state, source.state = place.passes + 1, 0, 0, None, None
