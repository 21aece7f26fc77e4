"""The batches of a user's loader: which part of each batch this rank gets, and how to resume inside an epoch.

A batch of a DataLoader is a global batch: all ranks draw the same one with the loader's own batch sampler, and each
rank takes its part. A sampler that already splits the data (DistributedSampler) is used as it is.

After a resume, rankup draws the order of a DataLoader of a map-style data set again, restores the state of a loader
that has a state_dict, and loads and drops the earlier batches of any other iterable. A generator can't start again, and
is an error.
"""

import hashlib
import json
import math
import sys
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import chain, count, islice, repeat
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from rankup.errors import UserError
from rankup.loop.reporting import OVER
from rankup.loop.tracked import has_state
from rankup.loop.workers import Workers
from rankup.seeds import CPU, derive_seed, drawn_apart, host_state_kept, seed_everything, seed_host

NO_ORDER = "Set any_order=True if the order of its batches does not matter."
EVALUATION = -1  # takes the place of the epoch
ALIKE = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor",
    "multiprocessing_context", "persistent_workers",
)
END = object()
# User's loader -> the loader that reads for it in evaluations. It is kept if its workers are persistent
_evaluating: "weakref.WeakKeyDictionary[Any, _RankLoader]" = weakref.WeakKeyDictionary()


def part_of(batch: Sequence[Any], rank: int, world_size: int) -> tuple[list[Any], float]:
    """Return this rank's part of a global batch, and its weight. Parts differ by one sample at most; lower ranks get
    the larger parts. A rank without a sample gets the batch's first sample with the weight 0, because every rank must
    take part in the backward pass."""
    size, more = divmod(len(batch), world_size)
    begin, count = rank * size + min(rank, more), size + (rank < more)
    return [*batch[begin : begin + count]] or [batch[0]], count * world_size / len(batch)


def splits(loader: Any) -> bool:
    """Return whether the loader's sampler already gives each rank its own samples."""
    return any(hasattr(each, "num_replicas") and hasattr(each, "rank") for each in _samplers(loader))


class Source:
    """Reads any iterable. Each rank gets everything that its own iterable yields.

    `replays`: whether a resume skips the batches of earlier steps; False if their order does not matter. `stateful`:
    whether copies hold the loader's own state, as of torchdata's StatefulDataLoader. `fingerprint`: a digest of the
    newest order, which must be equal on all ranks, or "" if ranks may differ. `uneven`: whether ranks may get different
    numbers of batches, because each rank reads a loader of its own.
    """

    fingerprint, uneven = "", True

    def __init__(self, loader: Any, rank: int, *, device: torch.device, replays: bool = True) -> None:
        self.loader, self.rank, self.device, self.replays = loader, rank, device, replays
        self.stateful = replays and has_state(loader)
        self.in_process = not getattr(loader, "num_workers", 0)

    def open(self, seed: int, *, epoch: int, skip: int, state: Any) -> Iterator[tuple[Any, float]]:
        """Iterate over this rank's batches of an epoch with their weights, without the first `skip` batches.

        `seed`: the seed of this pass over the loader. `state`: the loader's state after `skip` batches, None at the
        beginning. A weight is this rank's share of the global batch, times the number of ranks.
        """
        _prepare(self.loader, seed, epoch)
        own, first = derive_seed(seed, self.rank), 0
        seed_everything(own, self.device)  # DataLoader workers derive their seeds from this state
        # The state may be missing: a copy that another rank rescued has only the state of that rank's loader
        if self.stateful and state is not None:
            self.loader.load_state_dict(state)
            first = skip
        return self._read(iter(Workers(self.loader)), own, first, skip if self.replays else first)

    def _read(self, iterator: Iterator[Any], seed: int, first: int, skip: int) -> Iterator[tuple[Any, float]]:
        for number in count(first):
            # Random numbers for loading must not depend on what the training drew meanwhile. A loader with workers
            # draws them too: its sampler runs in this process
            seed_everything(seed + number, self.device)
            if (batch := next(iterator, END)) is END:
                return
            if number >= skip:
                yield batch, 1.0


class Split(Source):
    """Reads a DataLoader that batches a map-style data set, and iterates over its batch sampler in the main process."""

    def __init__(self, loader: Any, rank: int, world_size: int, *, device: torch.device) -> None:
        super().__init__(loader, rank, device=device)
        self.stateful = False  # a resume draws the order again
        self.uneven = splits(loader)
        self._share = (0, 1) if splits(loader) else (rank, world_size)
        self._rank_loader, self._checked = _RankLoader(loader), False

    def open(self, seed: int, *, epoch: int, skip: int, state: Any) -> Iterator[tuple[Any, float]]:
        weights: deque[float] = deque()
        parts = self._split(islice(self._draw(seed, epoch), skip, None), weights)
        batches = self._rank_loader.read(parts, seed)
        pairs = self._read(batches, derive_seed(seed, self.rank), skip, skip) if self.in_process else zip(
            batches, repeat(1.0))  # workers draw with a seed for each sample
        return ((batch, weights.popleft()) for batch, _ in pairs)

    def _draw(self, seed: int, epoch: int) -> Iterator[Any]:
        """Iterate over the global batches, each a list of sample indices."""
        _prepare(self.loader, seed, epoch)
        drawn = drawn_apart(self.loader.batch_sampler, seed)
        first, kinds = next(drawn), [type(each) for each in _samplers(self.loader)]
        own = [kind.__name__ for kind in kinds if not kind.__module__.startswith("torch.utils.data")]
        if own and not self._checked:
            _prepare(self.loader, seed, epoch)
            drawn = drawn_apart(self.loader.batch_sampler, seed)
            if _digest(first) != _digest(next(drawn)):
                raise UserError(
                    f"batches: {own[-1]} must draw the same batches for the same seed, got different ones. Draw from "
                    f"random, numpy.random or torch without a generator of your own. {NO_ORDER}"
                )
        self._checked = True
        self.fingerprint = "" if self._share[1] == 1 else _digest(first)
        return chain(first, chain.from_iterable(drawn))

    def _split(self, drawn: Iterable[Any], weights: deque[float]) -> Iterator[Any]:
        """Iterate over this rank's parts of the batches, and append their weights to `weights` in the same order."""
        rank, world_size = self._share
        for batch in drawn:
            part, weight = part_of(batch, rank, world_size) if world_size > 1 else (batch, 1.0)
            weights.append(weight)
            yield part


def source_of(
    loader: Any, rank: int, world_size: int, *, any_order: bool, device: torch.device = CPU
) -> Source:
    """Return the Source that reads `loader`. Raises UserError for a loader that can't be replayed or can't be split.
    `device`: the device on which loading may draw random numbers."""
    if any_order:
        return Source(loader, rank, device=device, replays=False)
    map_style, stateful = _is_map_style(loader), has_state(loader)
    usual = stateful or type(loader).__iter__ is DataLoader.__iter__
    if map_style and loader.batch_sampler is not None and usual:
        return Split(loader, rank, world_size, device=device)
    if map_style and world_size > 1 and not splits(loader):
        raise UserError(
            f"batches: {type(loader).__name__} must split its samples among {world_size} ranks, because it iterates in "
            "its own way or has no batches. Give it a DistributedSampler, or use torch's DataLoader with a batch_size."
        )
    if stateful:
        return Source(loader, rank, device=device)
    if iter(loader) is loader:
        raise UserError(
            f"batches: the loader must be an iterable that can start again, got {type(loader).__name__}, which can "
            f"neither start again nor return its state. Give it state_dict and load_state_dict. {NO_ORDER}"
        )
    return Source(loader, rank, device=device)


def evaluation_batches(loader: Any, seed: int, rank: int, world_size: int, *, pad: bool) -> Iterator[tuple[Any, float]]:
    """Iterate over this rank's batches of an evaluation with their weights: 1.0, or 0.0 for a batch that only keeps
    this rank busy (`pad`). All ranks together get each sample once. Restores the random state after each batch.

    The ranks take batches in turn, so that batches are the same for every number of ranks. If `loader` is no DataLoader
    of a map-style data set, every rank reads all batches, and uses its own and, with `pad`, perhaps the last one.
    """
    seed, num_own = derive_seed(seed, EVALUATION), math.inf
    batch: Any = None
    batches: Iterator[Any]
    with host_state_kept():
        seed_host(seed)
        _prepare(loader, seed, EVALUATION)
        if not _is_map_style(loader) or loader.batch_sampler is None:
            batches = iter(Workers(loader))
        else:
            sampler = loader.batch_sampler
            if splits(loader):  # the sampler may repeat samples, so that all ranks get the same number
                sampler = BatchSampler(range(len(loader.dataset)), loader.batch_size or 1, drop_last=False)
            every = list(sampler)
            own = every[rank::world_size]
            num_own = len(own)
            padding = every[-1:] if pad and num_own < -(-len(every) // world_size) else []
            rank_loader = _evaluating.get(loader) or _RankLoader(loader)
            if loader.persistent_workers:
                _evaluating[loader] = rank_loader
            batches = rank_loader.read(iter([*own, *padding]), seed)
            rank, world_size = 0, 1  # this rank uses all batches that it reads
    for number in count():
        with host_state_kept():
            seed_host(seed + number)  # loading may draw random numbers
            if (found := next(batches, END)) is END:
                break
        batch = found
        if number % world_size == rank:
            yield batch, 1.0 if number < num_own else 0.0
    if pad and 0 < number % world_size <= rank:  # the last turn ended before this rank
        yield batch, 0.0


# DataLoaders ---------------------------------------------------------------------------------------------------------


class _PresetBatches:
    """Takes the place of a batch sampler. It has no reference to its DataLoader: in a reference cycle, workers would
    live until the next garbage collection."""

    parts: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.parts


class _RankLoader:
    """A DataLoader with the settings of `loader`, which loads the batches given to `read` instead of its sampler's."""

    def __init__(self, loader: Any) -> None:
        self._preset, self._workers = _PresetBatches(), loader.num_workers > 0
        dataset: Any = _Seeded(loader.dataset) if self._workers else loader.dataset
        alike: dict[str, Any] = {name: getattr(loader, name) for name in ALIKE}
        # Without its own generator, a DataLoader draws the workers' seeds from the default one
        self._own = DataLoader(dataset, batch_sampler=self._preset, generator=torch.Generator(), **alike)

    def read(self, parts: Iterator[Any], seed: int) -> Iterator[Any]:
        """Load the batches of `parts`. Workers may outlive an epoch, so the seed travels with each sample."""
        self._preset.parts = parts
        if self._workers:
            self._preset.parts = ([(seed, index) for index in part] for part in parts)
        self._own.generator.manual_seed(seed)
        return Workers(self._own)


class _Seeded:
    """The data set in worker processes. The random numbers for a sample depend only on the seed and the sample,
    whichever worker loads it."""

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
    """Return the loader's samplers, outermost first."""
    outer = getattr(loader, "batch_sampler", None)
    found = [outer, getattr(loader, "sampler", None), getattr(outer, "sampler", None)]
    return [each for number, each in enumerate(found) if each is not None and each not in found[:number]]


def _prepare(loader: Any, seed: int, epoch: int) -> None:
    """Call each `set_epoch` of the loader, its samplers and its data set, and seed their generators."""
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
    """Return whether the user's `except StopIteration` block is running. A resumed loop runs that block once for all
    finished passes, so rankup can't tell after which of these passes the block runs."""
    return isinstance(sys.exc_info()[1], StopIteration)


class Batches:
    """What `job.batches` returns. Iterate over it once per epoch. `len()` is the number of batches in a whole epoch."""

    def __init__(self, job: Any, source: Source) -> None:
        """`job`: a `rankup.loop.job.Job`, whose module imports this one."""
        self._job, self._source, self._weight, self._reused = job, source, 1.0, False

    def __len__(self) -> int:
        return len(self._source.loader)

    @property
    def weight(self) -> float:
        """`job.weight` for the newest batch of this loader, if a loop reads several loaders together."""
        self._job.loop.weight_asked = True
        return self._weight

    def __iter__(self) -> Iterator[Any]:
        # After a resume a finished pass has no batches left: `for` ends at once, `except StopIteration` skips the pass
        while not (yield from self._pass()) and at_stop_iteration():
            pass

    def _pass(self) -> Generator[Any, None, bool]:
        """Yield the batches of the next pass. Returns False if the copy already had all of them."""
        # Look up here what each step needs: during a step, the CPU's caches are cold
        job, source, loop, group, clock = self._job, self._source, self._job.loop, self._job.group, self._job.clock
        waited = group.watch.clock.wait_for_data
        job.begin()
        known = len(loop.streams)
        again = at_stop_iteration()
        if again and loop.begun and self not in loop.begun and not loop.has_epochs:
            raise UserError(
                "batches: `except StopIteration` must restart a loader that was used before, got a new one, which "
                "has no place in a resumed run. Build the loader once, above the loop."
            )
        number, state = loop.begin_pass(self, source)
        if number and not (again or loop.running or loop.fetched or loop.has_epochs):  # code ran after the last pass
            job.tracked.check_unchanged(after_epoch=True)
            with job.commit_lock:
                if number < known:  # that code has run a second time, and the copy already holds its changes
                    job.tracked.undo_schedules()
                else:
                    job.commit()
        skip = loop.streams[number]
        seed = derive_seed(job.settings.seed, loop.epoch, number)
        pairs = source.open(seed, epoch=loop.epoch, skip=skip, state=state) if skip != OVER else iter(())
        if order := source.fingerprint:
            group.must_match("batches: the order of the samples", order, remedy=(
                "A sampler must draw the same order on all ranks, or split the data as DistributedSampler does."
            ))
        position, streams, record = job.position, loop.streams, group.record
        loop.running.append(self)
        try:
            while True:
                if loop.fetched:  # this check also refuses a loop without any job.step
                    job.tracked.check_unchanged(after_epoch=loop.epoch != position.epoch)
                elif group.stops_before(position.step):
                    raise job.save_and_stop()
                clock.start()
                found = next(pairs, None)
                waited(clock.has_batch())
                if found is None:
                    if source.uneven:
                        group.end_pass(streams[number])
                    job.reseed_outside(number + 1)
                    return streams[number] != skip or not skip
                batch, self._weight = found
                loop.weight = loop.batch_weight = self._weight
                loop.fetched += 1
                record.batches += 1
                streams[number] += 1
                job.reseed()
                step = position.step
                yield batch
                if position.step > step + 1 and loop.running[0] is self and not self._reused:
                    self._reused = True  # warn once
                    group.log.warning(
                        "batches: a batch took several steps, and a resume between them starts with the next batch. "
                        "Put them into one block of job.step"
                    )
                if self._weight != 1.0 and not loop.weight_asked:
                    loop.weight_asked = True  # log once
                    group.log.info(
                        f"batches  {group.world_size} ranks do not divide a batch equally: multiply the loss by "
                        "job.weight, or the gradients are not exactly those of the whole batch"
                    )
        finally:
            streams[number] = OVER
            loop.running.remove(self)
