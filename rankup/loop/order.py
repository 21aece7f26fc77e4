"""The order of a map-style data set's samples, as torch's own samplers draw it, and each rank's part of it."""

from collections.abc import Iterable, Iterator
from copy import copy
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler


def part_of(batch: Any, rank: int, world_size: int) -> tuple[list[Any], float]:
    """Return this rank's part of a global batch, a sequence or a tensor of indices, and its weight. Parts differ by one
    sample at most; lower ranks get the larger parts. A rank without a sample gets the batch's first sample with the
    weight 0, because every rank must take part in the backward pass."""
    size, more = divmod(len(batch), world_size)
    begin, count = rank * size + min(rank, more), size + (rank < more)
    part = batch[begin : begin + count] if count else batch[:1]
    return [*numbers_of(part)], count * world_size / len(batch)


def numbers_of(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def in_tensors(batch_sampler: Any) -> Iterable[Any]:
    """Return a batch sampler that draws the same batches from the same random state, each as a tensor of indices, or
    `batch_sampler` itself unless it is torch's own over torch's RandomSampler or SequentialSampler. The sampler itself
    makes one Python number for each sample of the data set, on every rank; of a tensor, a rank turns only its own part
    into numbers."""
    sampler = getattr(batch_sampler, "sampler", None)
    own = type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement)
    return _in_tensors(batch_sampler) if type(batch_sampler) is BatchSampler and own else batch_sampler


def _in_tensors(batch_sampler: Any) -> Iterator[torch.Tensor]:
    order, size = _order(batch_sampler.sampler), batch_sampler.batch_size
    end = len(order) // size * size if batch_sampler.drop_last else len(order)
    yield from (order[begin : begin + size] for begin in range(0, end, size))


def _order(sampler: Any) -> torch.Tensor:
    number = len(sampler.data_source)
    if isinstance(sampler, SequentialSampler):
        return torch.arange(number)
    if (generator := sampler.generator) is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    times = -(-sampler.num_samples // number)
    return torch.cat([torch.randperm(number, generator=generator) for _ in range(times)])[: sampler.num_samples]


def remaining(sampler: Any, loader: Any, done: int) -> BatchSampler:
    """Return this rank's batches of the samples that no rank has had after `done` batches of all ranks together, in the
    order of a DistributedSampler, which does not depend on the number of ranks. As there, `drop_last` drops the samples
    that do not fill all ranks; otherwise the first samples of the epoch come again."""
    size, whole, rank, ranks = loader.batch_size, copy(sampler), sampler.rank, sampler.num_replicas
    whole.rank, whole.num_replicas, whole.num_samples = 0, 1, len(sampler.dataset)
    whole.total_size = whole.num_samples
    order = [*whole]
    left = order[done * size :]
    if sampler.drop_last:
        left = left[: len(left) // ranks * ranks]
    elif left:
        left += islice(cycle(order), -len(left) % ranks)
    return BatchSampler(left[rank::ranks], size, loader.drop_last)
