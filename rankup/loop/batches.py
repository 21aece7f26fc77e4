"""The batches of a user's loader: which part of each this rank gets, and how to resume in the middle of an epoch.

A batch of a DataLoader is a global batch: the loader's own batch sampler draws it, equally on all ranks, and each rank
takes its part. A sampler that splits by itself (DistributedSampler) stays as it is.

To resume, a DataLoader of a map-style data set draws its order again, an object with a state_dict loads its own state,
and any other iterable loads the earlier batches and drops them. A generator can't do that, and is an error.
"""

import hashlib
import json
import math
import sys
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import chain, count, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from rankup.errors import UserError
from rankup.loop.record import OVER
from rankup.loop.tracked import has_state
from rankup.loop.workers import Workers
from rankup.seeds import derive_seed, drawn_apart, host_state_kept, seed_host

NO_ORDER = "Set any_order=True where the order of its batches does not matter."
EVALUATION = -1  # in place of the epoch
ALIKE = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor",
    "multiprocessing_context", "persistent_workers",
)
END = object()
# For evaluations, by the user's loader: its workers outlive one
_evaluating: "weakref.WeakKeyDictionary[Any, _Fed]" = weakref.WeakKeyDictionary()


def part_of(batch: Sequence[Any], rank: int, world_size: int) -> tuple[list[Any], float]:
    """This rank's part of a global batch, and its weight. Parts differ by one sample at most, the larger ones first.

    A rank without a sample gets the first one with the weight 0: it has to take part in the backward pass.
    """
    size, more = divmod(len(batch), world_size)
    begin, count = rank * size + min(rank, more), size + (rank < more)
    return [*batch[begin : begin + count]] or [batch[0]], count * world_size / len(batch)


def splits(loader: Any) -> bool:
    """Whether the loader's sampler gives each rank its own samples already."""
    return any(hasattr(each, "num_replicas") and hasattr(each, "rank") for each in _samplers(loader))


class Source:
    """Any iterable: each rank gets what it yields there.

    `replays`: False where the order does not matter. `tells`: it can be asked for its state, as torchdata's
    StatefulDataLoader of an IterableDataset. `fingerprint`: of the order that was opened last, to be equal on all
    ranks; "" where ranks may differ.
    """

    fingerprint = ""

    def __init__(self, loader: Any, rank: int, *, replays: bool = True) -> None:
        self.loader, self.rank, self.replays = loader, rank, replays
        self.tells = replays and has_state(loader)
        self.in_process = not getattr(loader, "num_workers", 0)

    def open(self, seed: int, *, epoch: int, skip: int, state: Any) -> Iterator[tuple[Any, float]]:
        """This rank's batches of an epoch with their weights, from number `skip` on.

        `seed`: of this pass over the loader. `state`: what the loader said of itself after batch `skip`, None at the
        beginning. A weight is this rank's part of the global batch, times the number of ranks.
        """
        _prepare(self.loader, seed, epoch)
        own, first = derive_seed(seed, self.rank), 0
        seed_host(own)  # workers get their seeds from it
        # A copy that another rank has rescued holds the state of its loader alone
        if self.tells and state is not None:
            self.loader.load_state_dict(state)
            first = skip
        return self._read(iter(Workers(self.loader)), own, first, skip if self.replays else first)

    def _read(self, iterator: Iterator[Any], seed: int, first: int, skip: int) -> Iterator[tuple[Any, float]]:
        for number in count(first):
            if self.in_process:  # loading may draw random numbers, whatever the training drew meanwhile
                seed_host(seed + number)
            if (batch := next(iterator, END)) is END:
                return
            if number >= skip:
                yield batch, 1.0


class Split(Source):
    """A DataLoader that batches a map-style data set. Its batch sampler is iterated here, in the main process."""

    def __init__(self, loader: Any, rank: int, world_size: int) -> None:
        super().__init__(loader, rank)
        self.tells = False  # its order is drawn again
        self._share = (0, 1) if splits(loader) else (rank, world_size)
        self._fed, self._checked = _Fed(loader), False

    def open(self, seed: int, *, epoch: int, skip: int, state: Any) -> Iterator[tuple[Any, float]]:
        weights: deque[float] = deque()
        parts = self._split(islice(self._draw(seed, epoch), skip, None), weights)
        return ((batch, weights.popleft()) for batch in self._fed.read(parts, seed))

    def _draw(self, seed: int, epoch: int) -> Iterator[Any]:
        """The samples' numbers, a global batch at a time."""
        _prepare(self.loader, seed, epoch)
        drawn = drawn_apart(self.loader.batch_sampler, seed)
        first, kinds = next(drawn), [type(each) for each in _samplers(self.loader)]
        own = [kind.__name__ for kind in kinds if not kind.__module__.startswith("torch.utils.data")]
        if own and not self._checked:
            _prepare(self.loader, seed, epoch)
            drawn = drawn_apart(self.loader.batch_sampler, seed)
            if _digest(first) != _digest(next(drawn)):
                raise UserError(
                    f"batches: {own[-1]} must draw the same batches again under the same seed, got others. Draw from "
                    f"random, numpy.random or torch without a generator of your own. {NO_ORDER}"
                )
        self._checked = True
        self.fingerprint = "" if self._share[1] == 1 else _digest(first)
        return chain(first, chain.from_iterable(drawn))

    def _split(self, drawn: Iterable[Any], weights: deque[float]) -> Iterator[Any]:
        """This rank's part of each batch, for the DataLoader; their weights, in the same order, go to `weights`."""
        rank, world_size = self._share
        for batch in drawn:
            part, weight = part_of(batch, rank, world_size) if world_size > 1 else (batch, 1.0)
            weights.append(weight)
            yield part


def source_of(loader: Any, rank: int, world_size: int, *, any_order: bool) -> Source:
    """How to read `loader`. Raises UserError, in one line, for what can't be replayed, and for what can't be split."""
    if any_order:
        return Source(loader, rank, replays=False)
    map_style, stateful = _is_map_style(loader), has_state(loader)
    usual = stateful or type(loader).__iter__ is DataLoader.__iter__
    if map_style and loader.batch_sampler is not None and usual:
        return Split(loader, rank, world_size)
    if map_style and world_size > 1 and not splits(loader):
        raise UserError(
            f"batches: {type(loader).__name__} must split its samples among {world_size} ranks, because it iterates in "
            "its own way or has no batches. Give it a DistributedSampler, or use torch's DataLoader with a batch_size."
        )
    if stateful:
        return Source(loader, rank)
    if iter(loader) is loader:
        raise UserError(
            f"batches: the loader must be one that can be iterated from the beginning, got {type(loader).__name__}, "
            f"which can be neither replayed nor asked for its state. Give it state_dict and load_state_dict. {NO_ORDER}"
        )
    return Source(loader, rank)


def evaluation_batches(loader: Any, seed: int, rank: int, world_size: int, *, pad: bool) -> Iterator[tuple[Any, float]]:
    """This rank's batches of an evaluation, each sample once over all ranks, with their weights: 1.0, or 0.0 for one
    that only keeps this rank busy (`pad`). The random state is as before between them.

    The ranks take batches in turn, so that a batch is the same for every number of ranks. An iterable that is no
    DataLoader of a map-style data set is read by all ranks, and each takes its turn.
    """
    seed, num_own = derive_seed(seed, EVALUATION), math.inf
    batches: Iterator[Any]
    with host_state_kept():
        seed_host(seed)
        _prepare(loader, seed, EVALUATION)
        if not _is_map_style(loader) or loader.batch_sampler is None:
            batches = islice(Workers(loader), rank, None, world_size)
        else:
            sampler = loader.batch_sampler
            if splits(loader):  # it may repeat samples, so that all ranks get as many
                sampler = BatchSampler(range(len(loader.dataset)), loader.batch_size or 1, drop_last=False)
            every = list(sampler)
            own = every[rank::world_size]
            num_own = len(own)
            padding = every[-1:] if pad and num_own < -(-len(every) // world_size) else []
            fed = _evaluating.get(loader) or _Fed(loader)
            if loader.persistent_workers:
                _evaluating[loader] = fed
            batches = fed.read(iter([*own, *padding]), seed)
    for number in count():
        with host_state_kept():
            seed_host(seed + number)  # loading may draw random numbers
            if (batch := next(batches, END)) is END:
                return
        yield batch, 1.0 if number < num_own else 0.0


# DataLoaders ---------------------------------------------------------------------------------------------------------


class _Given:
    """Takes a sampler's place. It does not know its DataLoader: in a cycle workers would live until garbage is
    collected."""

    parts: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.parts


class _Fed:
    """A DataLoader as `loader`, of the parts that it is given, in place of those of its sampler."""

    def __init__(self, loader: Any) -> None:
        self._given, self._workers = _Given(), loader.num_workers > 0
        dataset: Any = _Seeded(loader.dataset) if self._workers else loader.dataset
        alike: dict[str, Any] = {name: getattr(loader, name) for name in ALIKE}
        # The default generator would be drawn from, for the workers' seeds
        self._own = DataLoader(dataset, batch_sampler=self._given, generator=torch.Generator(), **alike)

    def read(self, parts: Iterator[Any], seed: int) -> Iterator[Any]:
        """The batches of these parts. Workers live longer than an epoch: the seed comes with the samples."""
        self._given.parts = parts
        if self._workers:
            self._given.parts = ([(seed, index) for index in part] for part in parts)
        self._own.generator.manual_seed(seed)
        return Workers(self._own)


class _Seeded:
    """The data set in worker processes: random numbers of a sample depend on the seed and the sample alone, whichever
    worker loads it."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitems__(self, numbered: list[tuple[int, Any]]) -> list[Any]:
        if getattr(self.dataset, "__getitems__", None):
            seed_host(derive_seed(numbered[0][0], *(index for _, index in numbered)))
            return list(self.dataset.__getitems__([index for _, index in numbered]))
        samples = []
        for seed, index in numbered:
            seed_host(derive_seed(seed, index))
            samples.append(self.dataset[index])
        return samples


def _is_map_style(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def _samplers(loader: Any) -> list[Any]:
    """The loader's samplers, the outermost first."""
    outer = getattr(loader, "batch_sampler", None)
    found = [outer, getattr(loader, "sampler", None), getattr(outer, "sampler", None)]
    return [each for number, each in enumerate(found) if each is not None and each not in found[:number]]


def _prepare(loader: Any, seed: int, epoch: int) -> None:
    """Tell the epoch to whoever wants to know it, and seed the loader's own generators."""
    for each in (loader, *_samplers(loader), getattr(loader, "dataset", None)):
        if hasattr(each, "set_epoch"):
            each.set_epoch(epoch)
        if isinstance(generator := getattr(each, "generator", None), torch.Generator):
            generator.manual_seed(seed)


def _digest(batches: list[Any]) -> str:
    text = json.dumps(batches, default=lambda value: value.tolist() if hasattr(value, "tolist") else repr(value))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# Passes over loaders -------------------------------------------------------------------------------------------------


def at_stop_iteration() -> bool:
    """Whether the user's `except StopIteration` runs just now. A resumed loop comes there once for all passes that are
    over, so nothing can tell which of them its code has followed."""
    return isinstance(sys.exc_info()[1], StopIteration)


class Batches:
    """What `job.batches` returns: to be iterated once an epoch. `len()` is the number of batches of a whole epoch.
    `weight`: `job.weight` for the newest batch of this loader, where several are read together."""

    def __init__(self, job: Any, source: Source) -> None:
        """`job`: a `rankup.loop.job.Job`, which imports this."""
        self._job, self._source, self.weight, self._reused = job, source, 1.0, False

    def __len__(self) -> int:
        return len(self._source.loader)

    def __iter__(self) -> Iterator[Any]:
        # `except StopIteration` asks for the batch after a pass that is over, where `for` goes through all in turn
        while not (yield from self._pass()) and at_stop_iteration():
            pass

    def _pass(self) -> Generator[Any, None, bool]:
        """The batches of the next pass. Returns False where a copy had all of them."""
        # What a step needs is looked up here: by then nothing of it is in the processor's caches
        job, source, live, group, clock = self._job, self._source, self._job.live, self._job.group, self._job.clock
        waited = group.watch.clock.wait_for_data
        job.begin()
        known = len(live.streams)
        again = at_stop_iteration()
        if again and live.begun and self not in live.begun and not live.has_epochs:
            raise UserError(
                "batches: `except StopIteration` must begin again a loader that was begun before, got a new one, whose "
                "place a resumed run would not find. Build the loader once, above the loop."
            )
        number, state = live.begin_pass(self, source)
        if number and not (again or live.running or live.fetched or live.has_epochs):  # what follows a pass has run
            job.tracked.check_unchanged(after_epoch=True)
            with job.commit_lock:
                if number < known:  # again: the copy holds it
                    job.tracked.undo_schedules()
                else:
                    job.commit()
        skip = live.streams[number]
        seed = derive_seed(job.settings.seed, live.epoch, number)
        pairs = source.open(seed, epoch=live.epoch, skip=skip, state=state) if skip != OVER else iter(())
        if order := source.fingerprint:
            group.must_match("batches: the order of the samples", order, remedy=(
                "A sampler must draw the same on all ranks, or split by itself as DistributedSampler does."
            ))
        position, streams = job.position, live.streams
        live.running.append(self)
        try:
            while True:
                if live.fetched:  # a loop that has no job.step at all is refused here
                    job.tracked.check_unchanged(after_epoch=live.epoch != position.epoch)
                elif group.stops_before(position.step):
                    raise job.stopped()
                clock.start()
                found = next(pairs, None)
                waited(clock.has_batch())
                if found is None:
                    return streams[number] != skip or not skip
                batch, self.weight = found
                live.weight = self.weight
                live.fetched += 1
                streams[number] += 1
                job.draw_anew()
                step = position.step
                yield batch
                if position.step > step + 1 and live.running[0] is self and not self._reused:
                    self._reused = True  # said once
                    group.log.warning(
                        "batches: a batch took several steps, and a resume between them goes on with the next batch. "
                        "Put them into one block of job.step"
                    )
                if self.weight != 1.0 and not live.weight_asked:
                    live.weight_asked = True  # said once
                    group.log.info(
                        f"batches  a batch does not divide among {group.world_size} ranks: multiply the loss by "
                        "job.weight, or the gradients are not exactly those of the whole batch"
                    )
        finally:
            streams[number] = OVER
            live.running.remove(self)
