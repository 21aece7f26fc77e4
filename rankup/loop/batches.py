"""The batches of a user's loader: which of them this rank gets, and how to go on in the middle.

A batch of a DataLoader is a global batch: the loader's own batch sampler draws it, equally on all ranks, and each rank
takes its part. What splits already (DistributedSampler) is left as it is.

In the middle a DataLoader of a map-style data set goes on by drawing its order again, what has a state_dict by its own
state, any other iterable by loading the earlier batches and dropping them. A generator can't, and is refused.
"""

import hashlib
import json
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, zip_longest
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from rankup.errors import UserError
from rankup.group.group import Group
from rankup.loop.record import Position
from rankup.loop.workers import Workers
from rankup.seeds import derive_seed, drawn_apart, host_state_kept, seed_host

NO_ORDER = "Set any_order=True where the order of its batches does not matter."
EVALUATION = -1  # in place of the epoch
ALIKE = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor",
    "multiprocessing_context", "persistent_workers",
)
# For evaluations, by the user's loader: the workers may outlive one
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
    """Any iterable: each rank gets what it yields there. `replays`: False where the order does not matter.
    `fingerprint`: of the order that was opened last, to be equal on all ranks; "" where ranks may differ."""

    fingerprint = ""

    def __init__(self, loader: Any, rank: int, *, replays: bool = True) -> None:
        self.loader, self.rank, self.replays, self._tells = loader, rank, replays, replays and _tells(loader)

    def open(self, seed: int, *, epoch: int, skip: int, state: Any) -> Iterator[tuple[Any, float]]:
        """This rank's batches of an epoch with their weights, from number `skip` on.

        `seed`: of this pass over the loader. `state`: what `state()` returned after batch `skip`, None at the
        beginning. A weight is this rank's part of the global batch, times the number of ranks.
        """
        _prepare(self.loader, seed, epoch)
        own, first = derive_seed(seed, self.rank), 0
        seed_host(own)  # workers get their seeds from it
        # A copy that another rank has rescued holds the state of its loader alone
        if self._tells and state is not None:
            self.loader.load_state_dict(state)
            first = skip
        iterator: Iterator[Any] = Workers(self.loader)
        if not getattr(self.loader, "num_workers", 0):
            # Loading in this process may draw random numbers, whatever the training drew meanwhile
            iterator = _seeded_by_number(iterator, own, first)
        return ((batch, 1.0) for batch in islice(iterator, skip - first if self.replays else 0, None))

    def state(self) -> Any:
        """What to keep beside the number of the last batch; None for nothing."""
        return self.loader.state_dict() if self._tells else None


class Split(Source):
    """A DataLoader of a map-style data set. Its batch sampler is iterated here, in the main process."""

    def __init__(self, loader: Any, rank: int, world_size: int) -> None:
        """Raises UserError for a loader that takes sample by sample, where there are several ranks."""
        super().__init__(loader, rank)
        self._tells = False  # its order is drawn again
        self._share = (0, 1) if splits(loader) else (rank, world_size)
        self._fed, self._checked = _Fed(loader), False
        if loader.batch_sampler is None and self._share[1] > 1 and not isinstance(loader.sampler, BatchSampler):
            raise UserError(
                f"batches: the loader must have a batch_size or a batch_sampler, got batch_size=None, whose samples "
                f"can't be split among {world_size} ranks. Give it one, or a DistributedSampler."
            )

    def open(self, seed: int, *, epoch: int, skip: int, state: Any) -> Iterator[tuple[Any, float]]:
        weights: deque[float] = deque()
        parts = self._split(islice(self._draw(seed, epoch), skip, None), weights)
        return ((batch, weights.popleft()) for batch in self._fed.read(parts, seed))

    def _draw(self, seed: int, epoch: int) -> Iterator[Any]:
        """The samples' numbers, a global batch at a time."""
        sampler = self.loader.batch_sampler if self.loader.batch_sampler is not None else self.loader.sampler
        foreign = not all(type(each).__module__.startswith("torch.utils.data") for each in _samplers(self.loader))
        _prepare(self.loader, seed, epoch)
        drawn = drawn_apart(sampler, seed)
        first = next(drawn)
        if foreign and not self._checked:
            _prepare(self.loader, seed, epoch)
            drawn = drawn_apart(sampler, seed)
            if _digest(first) != _digest(next(drawn)):
                names = " in ".join(dict.fromkeys(type(each).__name__ for each in reversed(_samplers(self.loader))))
                raise UserError(
                    f"batches: {names} must draw the same batches again under the same seed, got others. Draw from "
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
    map_style = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    own_iteration = map_style and type(loader).__iter__ is not DataLoader.__iter__ and not hasattr(loader, "state_dict")
    if map_style and not own_iteration:
        return Split(loader, rank, world_size)
    if _tells(loader):
        return Source(loader, rank)
    if iter(loader) is loader:
        raise UserError(
            f"batches: the loader must be one that can be iterated from the beginning, got {type(loader).__name__}, "
            f"which can be neither replayed nor asked for its state. Give it state_dict and load_state_dict. {NO_ORDER}"
        )
    if own_iteration and world_size > 1 and not splits(loader):
        raise UserError(
            f"batches: {type(loader).__name__} must split its samples among {world_size} ranks, because it iterates in "
            "its own way. Give it a DistributedSampler, or use torch's DataLoader."
        )
    return Source(loader, rank)


def _tells(loader: Any) -> bool:
    """Whether it can be asked for its state, as torchdata's StatefulDataLoader of an IterableDataset."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _seeded_by_number(iterator: Iterator[Any], seed: int, first: int) -> Iterator[Any]:
    number, nothing = first, object()
    while True:
        seed_host(derive_seed(seed, number))
        if (batch := next(iterator, nothing)) is nothing:
            return
        number += 1
        yield batch


def evaluation_batches(loader: Any, seed: int, rank: int, world_size: int, *, pad: bool) -> Iterator[tuple[Any, float]]:
    """This rank's batches of an evaluation, each sample once over all ranks, with their weights: 1.0, or 0.0 for one
    that only keeps this rank busy (`pad`). The random state is as before between them.

    The ranks take batches in turn, so that a batch is the same for every number of ranks. An iterable that is no
    DataLoader of a map-style data set is read by all ranks, and each takes its turn.
    """
    iterator: Iterator[tuple[Any, float]] | None = None
    while True:
        with host_state_kept():
            iterator = iterator or _evaluation(loader, derive_seed(seed, EVALUATION), rank, world_size, pad=pad)
            found = next(iterator, None)
        if found is None:
            return
        yield found


def _evaluation(loader: Any, seed: int, rank: int, world_size: int, *, pad: bool) -> Iterator[tuple[Any, float]]:
    seed_host(seed)
    _prepare(loader, seed, EVALUATION)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        yield from ((batch, 1.0) for batch in islice(Workers(loader), rank, None, world_size))
        return
    dataset: Any = loader.dataset
    sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    if splits(loader):  # it may repeat samples, so that all ranks get as many
        sampler = BatchSampler(range(len(dataset)), loader.batch_size or 1, drop_last=False)
    every = list(sampler)
    own = every[rank::world_size]
    padding = every[-1:] if pad and len(own) < -(-len(every) // world_size) else []
    fed = _evaluating.get(loader)
    if fed is None or any(getattr(fed.own, name) != getattr(loader, name) for name in ALIKE):
        fed = _evaluating[loader] = _Fed(loader)
    for number, batch in enumerate(fed.read(iter([*own, *padding]), seed)):
        yield batch, 1.0 if number < len(own) else 0.0


# DataLoaders ---------------------------------------------------------------------------------------------------------


class _Given:
    """Takes a sampler's place. It does not know its DataLoader: in a cycle workers would live until garbage is
    collected."""

    parts: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.parts


class _Fed:
    """`own`: a DataLoader as `loader`, of the parts that it is given, in place of those of its sampler."""

    def __init__(self, loader: Any) -> None:
        self._given = _Given()
        self._workers, self._whole = loader.num_workers > 0, loader.batch_sampler is None
        dataset: Any = _Seeded(loader.dataset) if self._workers else loader.dataset
        given: dict[str, Any] = {name: getattr(loader, name) for name in ALIKE}
        given |= {"batch_size": None, "sampler": self._given} if self._whole else {"batch_sampler": self._given}
        # The default generator would be drawn from, for the workers' seeds
        self.own = DataLoader(dataset, generator=torch.Generator(), **given)

    def read(self, parts: Iterator[Any], seed: int) -> Iterator[Any]:
        """The batches of these parts. Workers live longer than an epoch: the seed comes with the samples."""
        self._given.parts = parts
        if self._workers:
            self._given.parts = ((seed, part) if self._whole else [(seed, index) for index in part] for part in parts)
        self.own.generator.manual_seed(seed)
        return Workers(self.own)


class _Seeded:
    """The data set in worker processes: random numbers of a sample depend on the seed and the sample alone, whichever
    worker loads it."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, numbered: tuple[int, Any]) -> Any:
        seed, index = numbered
        seed_host(derive_seed(seed, *(index if isinstance(index, list) else [index])))
        return self.dataset[index]

    def __getitems__(self, numbered: list[tuple[int, Any]]) -> list[Any]:
        if getattr(self.dataset, "__getitems__", None):
            seed_host(derive_seed(numbered[0][0], *(index for _, index in numbered)))
            return list(self.dataset.__getitems__([index for _, index in numbered]))
        return [self[each] for each in numbered]


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
        self.has_epochs = False
        self.running: list[Batches] = []
        self._sources: list[Source] = []
        self._before = [*zip_longest(position.streams, states[: len(position.streams)])]

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
        self.fetched = 0
        if self.weight != 1.0 and not self.weight_asked and not self.weight_said:
            self.weight_said = True
            group.log.info(
                f"batches  a batch does not divide among {group.world_size} ranks: multiply the loss by job.weight, or "
                "the gradients are not exactly those of the whole batch"
            )

    def begin_epoch(self) -> None:
        self.epoch += 1
        self.streams, self._sources, self._before = [], [], []

    def open(self, source: Source) -> tuple[int, int, Any]:
        """Another pass over a loader begins: its number in this epoch, how many batches to skip, and the loader's
        state."""
        number = len(self.streams)
        skip, state = self._before[number] if number < len(self._before) else (0, None)
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
        streams, clock, phases = live.streams, job.clock, group.watch.clock
        seed = derive_seed(job.settings.seed, live.epoch, number)
        pairs = self._source.open(seed, epoch=live.epoch, skip=skip, state=state)
        if order := self._source.fingerprint:
            group.must_match("batches: the order of the samples", order, remedy=(
                "A sampler must draw the same on all ranks, or split by itself as DistributedSampler does."
            ))
        live.active += 1
        live.running.append(self)
        try:
            while True:
                job.stop_here()
                clock.start()
                outer = phases.enter("data")  # for the status
                try:
                    found = next(pairs, None)
                finally:
                    phases.enter(outer)
                clock.has_batch()
                if found is None:
                    return
                job.tracked.check_unchanged()
                batch, self.weight = found
                live.weight = self.weight
                together = [each for each in live.running if isinstance(each._source, Split)]
                live.unequal = any(each.weight != self.weight for each in together)
                live.fetched += 1
                streams[number] += 1
                job.seed_batch()
                yield batch
        finally:
            live.active -= 1
            live.running.remove(self)
