"""Passes over a user's loaders. A pass yields this rank's batches. After a resume it goes on behind the batches of
finished steps, and checks that the loader still gives the batches that it gave before."""

import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain, count
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map

from rankup.errors import UserError
from rankup.loop.arguments import iterable, switch, whole_number
from rankup.loop.batches import END, NO_ORDER, Source, Split, source_of
from rankup.loop.generators import KNOWN
from rankup.loop.position import OVER
from rankup.loop.trace import Trace, digest_of, digests_of_data
from rankup.seeds import derive_seed

OTHER_BATCH = (
    "gives another batch when it loads one again, so a resume changes the weights. Let it draw from random, "
    "numpy.random or torch, or from a generator that is an attribute"
)
FETCHED_AHEAD = (
    "A resume begins behind the newest batch that the loop got, so a stop loses batches that code fetches ahead or "
    "takes before the loop. Use job.batches(loader, prefetch=2). A first step that accumulates more is no mistake"
)


class Batches:
    """What `job.batches` returns. Iterate over it once per epoch. `len()` is the number of batches in a whole epoch."""

    def __init__(self, job: Any, source: Source) -> None:
        """`job`: a `rankup.loop.job.Job`, whose module imports this one."""
        self._job, self.source, self._weight, self._said = job, source, 1.0, set[str]()
        self.prefetch = 0  # how many batches are copied to the device ahead of the one that the loop gets
        self._stream: Any = None  # the GPU's stream for these copies
        self._generators: set[str] | None = None  # paths of those that were there before the first pass

    @classmethod
    def of(cls, job: Any, loader: Any, any_order: bool) -> Self:
        """Return the batches of a user's loader. Raises UserError for a loader that can't be replayed or split."""
        iterable("batches: the loader", loader)
        switch("batches: any_order", any_order)
        source = source_of(loader, job.rank, job.world_size, any_order=any_order, device=job.device)
        if source.stateful and not source.in_process:
            job.group.log.info(
                "batches  a resume changes the random numbers that this loader's workers draw, unless the loader's "
                "state holds them: keep a generator in the state of the data set"
            )
        return cls(job, source)

    def __len__(self) -> int:
        return len(self.source.loader)

    @property
    def weight(self) -> float:
        """`job.weight` for the newest batch of this loader, if a loop reads several loaders together."""
        self._job.loop.weight_asked = True
        return self._weight

    def __iter__(self) -> Iterator[Any]:
        # After a resume a finished pass has no batches left. `for` ends at once, but code that calls `next` and begins
        # the loader again would take the next batch of a pass that it has begun only once
        loop = self._job.loop
        if isinstance(sys.exc_info()[1], StopIteration) or ("steps" in loop.running and self in loop.begun):
            raise UserError(
                "batches: a loader that begins again inside a loop must be read by job.cycle, got another iter(). "
                "Write `it = job.cycle(loader)` above the loop, and only `next(it)` inside."
            )
        return self._pass()

    def ahead(self, prefetch: int) -> Self:
        """Return this object, which from the next pass on copies this many batches ahead to the device."""
        self.prefetch = whole_number("batches: prefetch", prefetch)
        return self

    def warn_of_steps_without_batch(self) -> None:
        """Say what a step means that follows a short pass and has got no batch, where earlier steps got several."""
        self._warn(f"steps follow a pass whose batches earlier steps have taken. {FETCHED_AHEAD}")

    def _warn(self, text: str) -> None:
        """Log this warning once."""
        if text not in self._said:
            self._said.add(text)
            self._job.group.log.warning(f"batches: {text}")

    def _begin_generators(self) -> None:
        """Say which generators rankup seeds, before the first pass. One that each rank has seeded for itself gets a
        seed for each rank; one that is equal on all ranks may order what the ranks share."""
        source, group = self.source, self._job.group
        source.begin_epoch(self._job.epoch)
        self._generators = source.generators
        if group.world_size > 1 and not isinstance(source, Split):
            states = source.orders.digests() | source.content.digests()
            ranks = group.gather(states)
            source.apart = frozenset(path for path in states if any(r.get(path) != states[path] for r in ranks))
        elif group.world_size > 1 and not source.uneven:
            ranks = group.gather(digests_of_data(source.loader.dataset))
            other = [path for path in ranks[0] if any(path in each and each[path] != ranks[0][path] for each in ranks)]
            if other and group.is_rank0:
                self._warn(
                    f"{other[0]} of {source.name()} differs between ranks, as if the script had split the data. rankup "
                    "splits each batch too, so no rank trains on all of its data. Give all ranks the same data set"
                )
        if named := sorted(self._generators - KNOWN):
            group.log.info(
                f"batches  {source.name()}: rankup seeds {', '.join(named)} from the run's seed, the epoch and the "
                "batch or sample, so a resume is exact. The numbers differ from those of plain PyTorch"
            )

    def open(self, seed: int, epoch: int, done: int, known: int | None, state: Any) -> Iterator[tuple[Any, ...]]:
        """Return an iterator over a pass's batches behind the `done` ones of finished steps, for `take`. All ranks call
        this. `known`: the trace of those batches. `state`: the loader's state after them.

        Raises UserError if a batch that is loaded again is another one now, or if ranks draw different orders."""
        source, trace = self.source, Trace(rolls=not isinstance(self.source, Split))
        if self._generators is None:
            self._begin_generators()
        pairs = self._open(seed, epoch, done, known, state, trace)
        if new := sorted(source.generators - (self._generators or set())):
            self._warn(
                f"{source.name()} made the generator {new[0]} during a pass, so a resume changes its numbers. Make it "
                "before the first pass, in __init__"
            )
        if order := source.fingerprint:
            self._job.group.must_match("batches: the order of the samples", order, remedy=(
                "A sampler must draw the same order on all ranks, or split the data as DistributedSampler does."
            ))
        return self._fetch(pairs, trace, done // source.stride)

    def _open(
        self, seed: int, epoch: int, done: int, known: int | None, state: Any, trace: Trace
    ) -> Iterator[tuple[Any, float]]:
        """Return an iterator over the batches with their weights."""
        job, source, loop, group = self._job, self.source, self._job.loop, self._job.group
        step = job.position.step
        if not done:
            if step == job.progress.first_step > 0 and source.replays and not source.stateful:
                return self._open_twice(seed, epoch)
            return source.open(seed, epoch=epoch, skip=0, state=state)
        resized = loop.ranks_before != job.world_size
        own = not resized and loop.rank_before == job.rank  # whether `known` is about this rank's batches
        if resized and source.stride > 1 and isinstance(source, Split) and source.whole is None:
            raise UserError(
                f"batches: {source.name()} must be split by torch's DistributedSampler to go on with {job.world_size} "
                f"ranks inside an epoch, got another sampler that splits. Start {loop.ranks_before} ranks, or give "
                "job.batches a sampler that does not split."
            )

        def look(number: int, batch: Any) -> None:
            moves()
            trace.add(number, batch)

        def moves() -> None:
            group.record.begin_anew(step)  # the deadline is one for each batch, so only a replay that hangs is late

        with self._replay():
            if isinstance(source, Split):
                trace.value = None
                compares = known is not None and not resized  # on all ranks: workers then get the same batches on each
                pairs = source.open(
                    seed, epoch=epoch, skip=done, state=state, look=look if compares else None, moves=moves
                )
                if compares and own and trace.value != known:
                    self._warn(f"{source.name()} {OTHER_BATCH}")
            else:
                replays = source.replays and not (source.stateful and state is not None)
                if replays:
                    group.log.info(f"batches  loading again the {done} batches of this epoch's finished steps")
                pairs = source.open(seed, epoch=epoch, skip=done, state=state, look=look)
                if replays and known is not None and (own or resized) and trace.value != known:
                    raise UserError(self._other_batches(resized=resized))
                if not replays:
                    trace.value = known if own and source.stateful else None
        return pairs

    @contextmanager
    def _replay(self) -> Iterator[None]:
        """Load batches of finished steps again in this block. Before the first one a loader may take long to reach its
        place, and no sign shows that it moves. Then wait for all ranks, for as long as any of them moves, and begin the
        step: a rank that is faster must not wait for the others in its step."""
        job, settings = self._job, self._job.settings
        timeout_s = max(settings.setup_timeout_s, settings.step_timeout_s)
        job.group.watch.enter("replay", timeout_s, step=job.position.step)
        yield
        job.group.watch.enter("replay", 0.0)
        job.group.barrier()
        job.enter_step()

    def _open_twice(self, seed: int, epoch: int) -> Iterator[tuple[Any, float]]:
        """Return what `open` returns at the beginning of an epoch, in an attempt that resumes there: nothing shows what
        the earlier attempt's loader would yield, but one with a generator or a counter of its own yields something else
        each time. Raises UserError, or warns, if the first batch is another one the second time."""
        source, firsts = self.source, []
        with self._replay():
            for _ in range(2):
                pairs = source.open(seed, epoch=epoch, skip=0, state=None)
                firsts.append(next(pairs, (END, 1.0)))
            if len({digest_of(batch) for batch, _ in firsts}) > 1:
                if not isinstance(source, Split):
                    raise UserError(self._other_batches(resized=False))
                self._warn(f"{source.name()} {OTHER_BATCH}")
        return chain(firsts[1:] if firsts[1][0] is not END else (), pairs)

    def _fetch(self, pairs: Iterator[tuple[Any, float]], trace: Trace, first: int) -> Iterator[tuple[Any, ...]]:
        """Iterate over the batches of `pairs`, each with its weight and what a copy holds once the loop has got it: the
        trace, and the loader's state. A copy knows nothing of batches that are fetched ahead, so a resume begins with
        them. `first`: the number of the first batch in the pass."""
        source, ahead = self.source, deque[tuple[Any, ...]]()
        for number, (batch, weight) in zip(count(first), pairs):
            value = trace.add(number, batch)  # before the copy: it can't read the device's memory
            if not self.prefetch:
                yield batch, weight, value, None
                continue
            state = deepcopy(source.loader.state_dict()) if source.stateful else None
            ahead.append((*self._on_device(batch), weight, value, state))
            if len(ahead) > self.prefetch:
                yield self._arrived(*ahead.popleft())
        yield from (self._arrived(*each) for each in ahead)

    def _on_device(self, batch: Any) -> tuple[Any, Any]:
        """Copy a batch of any structure to the device. Return it and, on a GPU, the event of its arrival. The copy runs
        beside the computation if the loader has `pin_memory`."""
        device, event = self._job.device, None

        def move(leaf: Any) -> Any:
            return leaf.to(device, non_blocking=True) if hasattr(leaf, "to") else leaf

        if device.type != "cuda":
            return tree_map(move, batch), event
        if self._stream is None:
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        # The copy may reuse the memory of an earlier batch, which the computation that is queued by now may still read
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            batch = tree_map(move, batch)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return batch, event

    def _arrived(self, batch: Any, event: Any, *more: Any) -> tuple[Any, ...]:
        """Let the computation that follows wait until the copy is done. The host does not wait."""
        if event is not None:
            torch.cuda.current_stream(self._job.device).wait_event(event)
        return batch, *more

    def _other_batches(self, *, resized: bool) -> str:
        name, before = self.source.name(), self._job.loop.ranks_before
        if resized:
            return (
                f"batches: {name} must give every rank the same batches to go on with {self._job.world_size} ranks "
                f"inside an epoch, got other ones than with {before}. Start {before} ranks, or use a DataLoader of a "
                f"map-style data set. {NO_ORDER}"
            )
        return (
            f"batches: {name} must give the same batches again after a resume, got other ones. Derive its order from "
            f"the epoch (set_epoch), or give the loader state_dict and load_state_dict. {NO_ORDER}"
        )

    def begin(self) -> None:
        """Prepare the first step, before this thread begins a pass."""
        if threading.get_ident() != self._job.thread:
            raise UserError(
                "batches: they must be read in the thread that called rankup.init, got another one. A thread that "
                "fetches ahead loses its batches at each stop: let the DataLoader do it (num_workers)."
            )
        self._job.begin()

    def take(self, fetches: Iterator[tuple[Any, ...]]) -> tuple[Any, int | None] | None:
        """Return the next batch of an open pass and the trace of the batches so far, or None at the end of the pass.
        Raises Stopped, after a save, if the job was asked to stop."""
        job, loop = self._job, self._job.loop
        if loop.fetched:  # this check also refuses a loop without any job.step
            job.tracked.check_unchanged(after_epoch=loop.epoch != job.position.epoch)
        elif job.group.stops_before(job.position.step):
            raise job.save_and_stop()
        job.clock.start()
        found = next(fetches, None)
        job.group.watch.clock.wait_for_data(job.clock.has_batch())
        if found is None:
            return None
        batch, self._weight, trace, self.source.state = found
        loop.weight = loop.batch_weight = self._weight
        loop.fetched, loop.began_at = loop.fetched + 1, job.position.step
        job.group.record.batches += 1
        job.reseed()
        return batch, trace

    def note_step(self, step: int, taken: list[int]) -> None:
        """Look at what the loop did with the batch that it got after this step, and warn of code that fetches ahead.
        `taken`: how many batches each of the first three steps took; the last entry counts those of the next step."""
        loop, now = self._job.loop, self._job.position.step
        taken[-1] += 1
        if now > step:
            if now > step + 1 and loop.running[0] is self:
                self._warn(
                    "a batch took several steps, and a resume between them starts with the next batch. Put them into "
                    "one block of job.step"
                )
            if len(taken) == 3 and taken[0] > taken[1] == taken[2]:
                self._warn(f"the first step took {taken[0]} batches, and the next ones {taken[1]}. {FETCHED_AHEAD}")
            if len(taken) <= 3:
                taken.append(0)
            taken[-1] = 0
        if self._weight != 1.0 and not loop.weight_asked:
            loop.weight_asked = True  # log once
            self._job.group.log.info(
                f"batches  {self._job.group.world_size} ranks do not divide a batch equally: multiply the loss by "
                "job.weight, or the gradients are not exactly those of the whole batch"
            )

    def _pass(self) -> Iterator[Any]:
        """Yield the batches of the next pass, none if the copy already had all of them."""
        job, source, loop, position = self._job, self.source, self._job.loop, self._job.position
        self.begin()
        if position.ended:
            return
        known = len(loop.streams)
        if loop.left_after:
            self._warn(
                f"the loop left its last pass after {loop.left_after} batches. If it counts batches in a variable, as "
                "with enumerate, a resume inside a pass changes the weights: it counts from 0. Limit the sampler"
            )
            loop.left_after = None
        number, state = loop.begin_pass(self, source)
        if number < known and loop.has_epochs:
            job.undo_options()
        if number and not (loop.running or loop.fetched or loop.has_epochs):  # code ran after the last pass
            job.tracked.check_unchanged(after_epoch=True)
            with job.commit_lock:
                if number < known:  # that code has run a second time, and the copy already holds its changes
                    job.tracked.undo_schedules()
                else:
                    job.commit()
        streams, sources, traces, stride = loop.streams, loop.sources, loop.traces, source.stride
        skip, fetches = streams[number], iter(tuple[tuple[Any, ...]]())
        if skip != OVER:
            seed = derive_seed(job.settings.seed, loop.epoch, number)
            fetches = self.open(seed, loop.epoch, skip, traces[number], state)
        taken, first_step, loop.may_hold = [0], position.step, None
        loop.running.append(self)
        try:
            while not position.ended and (found := self.take(fetches)) is not None:
                batch, traces[number] = found
                streams[number] += stride
                step = position.step
                try:
                    yield batch
                except GeneratorExit:
                    # Of several loaders, the shortest ends the loop
                    if loop.begun == [self] and loop.left_after is not None:
                        loop.left_after = streams[number] // stride
                    raise
                self.note_step(step, taken)
                job.warn_of_options()
            if source.uneven:
                job.group.end_pass(streams[number] // stride)
            job.reseed_outside(number + 1)
            held = (streams[number] - skip) // stride > position.step - first_step and len(taken) <= 3
            loop.may_hold = self if held else None
        finally:
            streams[number], source.state = OVER, None
            sources.pop(number, None)
            loop.running.remove(self)
