"""The batches of a user's loader: which part of each batch this rank gets, and how to resume inside an epoch.

A batch of a DataLoader is a global batch: all ranks draw the same one with the loader's own batch sampler, and each
rank takes its part. A sampler that already splits the data (DistributedSampler) is used as it is.

After a resume, rankup draws the order of a DataLoader of a map-style data set again, restores the state of a loader
that has a state_dict, and loads and drops the earlier batches of any other iterable. A generator can't start again, and
is an error. With another number of ranks, DistributedSampler's order is split anew.
"""

import hashlib
import json
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count, islice, repeat
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from rankup.errors import UserError
from rankup.loop.generators import CONTENT, Generators, parts_of
from rankup.loop.order import in_tensors, numbers_of, part_of, remaining
from rankup.loop.trace import last_traced
from rankup.loop.tracked import has_state
from rankup.loop.workers import Workers
from rankup.seeds import CPU, derive_seed, seed_everything, seed_host

NO_ORDER = "Set any_order=True if the order of its batches does not matter."
EVALUATION = -1  # takes the place of the epoch
OWN = -2  # takes the place of the rank in the seed of generators that a loader owns
ALIKE = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor",
    "multiprocessing_context", "persistent_workers",
)
END = object()
# User's loader -> the loader that reads for it in evaluations. It is kept if its workers are persistent
_evaluating: "weakref.WeakKeyDictionary[Any, _RankLoader]" = weakref.WeakKeyDictionary()


def splitting_sampler(loader: Any) -> Any:
    """Return the loader's sampler that already gives each rank its own samples, or None."""
    return next((each for each in _samplers(loader) if hasattr(each, "num_replicas") and hasattr(each, "rank")), None)


class Source:
    """Reads any iterable. Each rank gets everything that its own iterable yields.

    `replays`: whether a resume skips the batches of earlier steps; False if their order does not matter. `stateful`:
    whether copies hold the loader's own state, as of torchdata's StatefulDataLoader. `fingerprint`: a digest of the
    newest order, which must be equal on all ranks, or "" if ranks may differ. `uneven`: whether ranks may get different
    numbers of batches, because each rank reads a loader of its own. `stride`: how many batches all ranks together get
    for each one that this rank gets. `orders`, `content`: the generators that the newest pass drew from, those of the
    loader and its samplers, and those of the samples. `apart`: paths of generators that each rank seeds for itself.
    `state`: the loader's state as of the batch that the loop got, if batches are fetched ahead, else None.
    """

    fingerprint, uneven, stride, apart = "", True, 1, frozenset[str]()
    state: Any = None

    def __init__(self, loader: Any, rank: int, *, device: torch.device, replays: bool = True) -> None:
        self.loader, self.rank, self.device, self.replays = loader, rank, device, replays
        self.stateful = replays and has_state(loader)
        self.in_process = not getattr(loader, "num_workers", 0)
        self.orders = self.content = Generators({})

    def begin_epoch(self, epoch: int) -> None:
        """Call each `set_epoch`, which may make generators, and look for them anew. None is seeded if the order does
        not matter: each resume would begin with the same numbers."""
        _set_epoch(self.loader, epoch)
        parts = parts_of(self.loader) if self.replays else {}
        content = {name: parts.pop(name) for name in CONTENT if name in parts}
        self.orders = Generators(parts, apart=self.apart, rank=self.rank)
        self.content = Generators(content, apart=self.apart, rank=self.rank)

    @property
    def generators(self) -> set[str]:
        """The paths of all generators that the newest pass found."""
        return {*self.orders.found, *self.content.found}

    def name(self) -> str:
        """Return what the user calls this loader: the type of its data set, or its own type."""
        return type(getattr(self.loader, "dataset", self.loader)).__name__

    def open(
        self, seed: int, *, epoch: int, skip: int, state: Any, look: Callable[[int, Any], None] | None = None,
        moves: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[Any, float]]:
        """Iterate over this rank's batches of an epoch with their weights, without the first `skip` batches. Batches
        count over all ranks, see `stride`.

        `seed`: the seed of this pass over the loader. `state`: the loader's state after `skip` batches, None at the
        beginning. `look`: called with the number and the content of each batch of this rank that is loaded again.
        `moves`: called for each batch that a sampler draws again. A weight is this rank's share of the global batch,
        times the number of ranks.
        """
        self.begin_epoch(epoch)
        self.orders.seed(seed)
        self.content.seed(seed)
        own, first = derive_seed(seed, self.rank), 0
        seed_everything(own, self.device)  # DataLoader workers derive their seeds from this state
        # The state may be missing: a copy that another rank rescued has only the state of that rank's loader
        if self.stateful and state is not None:
            self.loader.load_state_dict(state)
            first = skip
        workers = Workers(self.loader, keep=not self.replays)
        generators = () if self.stateful else (self.orders, self.content)
        batches = self._seeded(iter(workers), own, count(first), generators, derive_seed(seed, OWN))
        for number in range(first, skip if self.replays else first):
            found = next(batches, END)
            if look is not None:
                look(number if found is not END else 0, found)  # batch 0 is not END: the loader has fewer batches now
        return zip(batches, repeat(1.0))

    def _seeded(
        self, batches: Iterator[Any], seed: int, numbers: Iterable[int], generators: Iterable[Generators], own: int
    ) -> Iterator[Any]:
        """Iterate over `batches`, which have these numbers. The random state in which the main process loads a batch
        depends on its number alone, not on what the training drew. A sampler draws there, even if workers load. The
        loader's own `generators` are seeded from `own` in the same way."""
        generators = [each for each in generators if each.found]
        for number in numbers:
            seed_everything(seed + number, self.device)
            for each in generators:
                each.seed(own + number)
            if (batch := next(batches, END)) is END:
                return
            yield batch


class Split(Source):
    """Reads a DataLoader that batches a map-style data set, and iterates over its batch sampler in the main process.

    `whole`: torch's own sampler that splits the samples, from which the order for any number of ranks follows, or None.
    """

    def __init__(self, loader: Any, rank: int, world_size: int, *, device: torch.device) -> None:
        super().__init__(loader, rank, device=device)
        self.stateful = False  # a resume draws the order again
        splitting, sampler = splitting_sampler(loader), loader.sampler
        self.uneven = splitting is not None
        self._share, self.stride = ((rank, world_size), 1) if splitting is None else ((0, 1), splitting.num_replicas)
        plain = type(loader.batch_sampler) is BatchSampler and splitting is sampler
        self.whole = sampler if plain and type(sampler).__iter__ is DistributedSampler.__iter__ else None
        self._rank_loader, self._checked = _RankLoader(loader), False

    def open(
        self, seed: int, *, epoch: int, skip: int, state: Any, look: Callable[[int, Any], None] | None = None,
        moves: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[Any, float]]:
        weights: deque[float] = deque()
        begin = skip // self.stride
        first = last_traced(begin) if look is not None and skip else begin  # this batch is loaded again
        if skip and self.whole is not None:
            self.begin_epoch(epoch)
            drawn = iter(remaining(self.whole, self.loader, skip - (begin - first) * self.stride))
        else:
            drawn = self._draw(seed, epoch)
            for _ in islice(drawn, first):  # now, in the time of the replay: a sampler may be slow
                moves()
        numbers: Iterator[int] = count(begin)
        if first < begin:
            drawn, numbers = chain(islice(drawn, 1), islice(drawn, begin - first - 1, None)), chain([first], numbers)
        batches = self._rank_loader.read(self._split(drawn, weights), seed)
        if self.in_process:  # workers draw with a seed for each sample
            own = derive_seed(seed, self.rank)
            batches = self._seeded(batches, own, numbers, (self.content,), own)
        pairs = ((batch, weights.popleft()) for batch in batches)
        if first < begin and look is not None:
            look(first, next(pairs, (END, 0.0))[0])
        return pairs

    def _draw(self, seed: int, epoch: int) -> Iterator[Any]:
        """Iterate over the global batches, each a list of sample indices."""
        self.begin_epoch(epoch)
        drawn = self.orders.drawn_apart(in_tensors(self.loader.batch_sampler), seed)
        first, kinds = next(drawn), [type(each) for each in _samplers(self.loader)]
        own = [kind.__name__ for kind in kinds if not kind.__module__.startswith("torch.utils.data")]
        if own and not self._checked:
            _set_epoch(self.loader, epoch)
            drawn = self.orders.drawn_apart(self.loader.batch_sampler, seed)
            if _digest(first) != _digest(next(drawn)):
                raise UserError(
                    f"batches: {own[-1]} must draw the same batches for the same seed, got different ones. Draw from "
                    f"random, numpy.random or torch, or from a generator that is an attribute. {NO_ORDER}"
                )
        self._checked = True
        self.fingerprint = "" if self._share[1] == 1 else _digest(first)
        return chain(first, chain.from_iterable(drawn))

    def _split(self, drawn: Iterable[Any], weights: deque[float]) -> Iterator[Any]:
        """Iterate over this rank's parts of the batches, and append their weights to `weights` in the same order."""
        rank, world_size = self._share
        for batch in drawn:
            part, weight = part_of(batch, rank, world_size) if world_size > 1 else (numbers_of(batch), 1.0)
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
    if map_style and world_size > 1 and splitting_sampler(loader) is None:
        raise UserError(
            f"batches: {type(loader).__name__} must split its samples among {world_size} ranks, because it iterates in "
            "its own way or has no batches. Give it a DistributedSampler, or use torch's DataLoader with a batch_size."
        )
    # `iter` may start workers, so only an iterator is asked
    if not stateful and isinstance(loader, Iterator) and iter(loader) is loader:
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
    _set_epoch(loader, EVALUATION)
    own = Generators(parts_of(loader))  # perhaps the training's too
    with own.kept():
        seed_host(seed)
        own.seed(seed)
        if not _is_map_style(loader) or loader.batch_sampler is None:
            batches = iter(Workers(loader))
        else:
            sampler = loader.batch_sampler
            if splitting_sampler(loader) is not None:  # it may repeat samples, so that all ranks get the same number
                sampler = BatchSampler(range(len(loader.dataset)), loader.batch_size or 1, drop_last=False)
            every = list(in_tensors(sampler))
            mine = every[rank::world_size]
            num_own = len(mine)
            padding = every[-1:] if pad and num_own < -(-len(every) // world_size) else []
            rank_loader = _evaluating.get(loader) or _RankLoader(loader)
            if loader.persistent_workers:
                _evaluating[loader] = rank_loader
            batches = rank_loader.read(map(numbers_of, [*mine, *padding]), seed)
            rank, world_size = 0, 1  # this rank uses all batches that it reads
    for number in count():
        with own.kept():
            seed_host(seed + number)  # loading may draw random numbers
            own.seed(derive_seed(seed, OWN) + number)
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
        dataset: Any = _Seeded(loader.dataset, loader.collate_fn) if self._workers else loader.dataset
        alike: dict[str, Any] = {name: getattr(loader, name) for name in ALIKE}
        # Without its own generator, a DataLoader draws the workers' seeds from the default one
        self._own = DataLoader(dataset, batch_sampler=self._preset, generator=torch.Generator(), **alike)

    def read(self, parts: Iterator[Any], seed: int) -> Iterator[Any]:
        """Load the batches of `parts`. Workers may outlive an epoch, so the seed travels with each sample."""
        self._preset.parts = parts
        if self._workers:
            self._preset.parts = ([(seed, index) for index in part] for part in parts)
        self._own.generator.manual_seed(seed)
        return Workers(self._own, keep=True)


class _Seeded:
    """The data set in worker processes. The random numbers for a sample depend only on the seed and the sample,
    whichever worker loads it, also those of generators that the data set owns. `collate` is seeded for each batch."""

    def __init__(self, dataset: Any, collate: Any) -> None:
        vars(self).update(dataset=dataset, _collate=collate, _generators=None)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the data set, as a user's `worker_init_fn` does."""
        setattr(self.dataset, name, value)

    def __getitems__(self, numbered: list[tuple[int, Any]]) -> list[Any]:
        if self._generators is None:  # not before: `worker_init_fn` may make them
            found = Generators({"dataset": self.dataset}), Generators({"collate_fn": self._collate})
            vars(self)["_generators"] = found
        samples, collate = self._generators
        if collate.found:
            collate.seed(derive_seed(numbered[0][0], OWN, *(index for _, index in numbered)))
        if getattr(self.dataset, "__getitems__", None):
            self._seed(samples, derive_seed(numbered[0][0], *(index for _, index in numbered)))
            return list(self.dataset.__getitems__([index for _, index in numbered]))
        loaded = []
        for seed, index in numbered:
            self._seed(samples, derive_seed(seed, index))
            loaded.append(self.dataset[index])
        return loaded

    @staticmethod
    def _seed(samples: Generators, seed: int) -> None:
        seed_host(seed)
        samples.seed(seed)


def _is_map_style(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def _samplers(loader: Any) -> list[Any]:
    """Return the loader's samplers, outermost first."""
    outer = getattr(loader, "batch_sampler", None)
    found = [outer, getattr(loader, "sampler", None), getattr(outer, "sampler", None)]
    return [each for number, each in enumerate(found) if each is not None and each not in found[:number]]


def _set_epoch(loader: Any, epoch: int) -> None:
    """Call each `set_epoch` of the loader, its samplers and its data set."""
    for each in (loader, *_samplers(loader), getattr(loader, "dataset", None)):
        if hasattr(each, "set_epoch"):
            each.set_epoch(epoch)


def _digest(batches: list[Any]) -> str:
    if batches and isinstance(batches[0], torch.Tensor):
        return hashlib.blake2b(torch.cat(batches).numpy().data, digest_size=8).hexdigest()
    text = json.dumps(batches, default=lambda value: value.tolist() if hasattr(value, "tolist") else repr(value))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
